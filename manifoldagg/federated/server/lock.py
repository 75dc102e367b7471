"""A lock that knows whether it is this thread's."""

import threading

__all__ = ["OwnedLock"]


class OwnedLock:
    """A lock that a thread may take more than once, and ask whether it has it.

    Attributes:
        lock: taken by `with`, in one instruction: an interrupt cannot leave it held.

    Example:
        >>> mine = OwnedLock()
        >>> with mine.lock:
        ...     mine.held_by_me()
        True
        >>> mine.held_by_me()
        False
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        # Nobody waits for it: it refuses to notify for a thread that does not have the lock, and does nothing else.
        self._owner_probe = threading.Condition(self.lock)

    def held_by_me(self) -> bool:
        """Whether this thread has it."""
        try:
            self._owner_probe.notify()
        except RuntimeError:
            return False
        return True
