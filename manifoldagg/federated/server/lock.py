"""A lock that knows whether it is this thread's."""

import threading

__all__ = ["Lock"]


class Lock:
    """A lock that a thread may take more than once, and ask whether it has it.

    Attributes:
        lock: taken by `with`, in one instruction: an interrupt cannot leave it held.

    Example:
        >>> mine = Lock()
        >>> with mine.lock:
        ...     mine.is_mine()
        True
        >>> mine.is_mine()
        False
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        # Nobody waits for it: it refuses to notify for a thread that does not have the lock, and does nothing else.
        self._asked = threading.Condition(self.lock)

    def is_mine(self) -> bool:
        """Whether this thread has it."""
        try:
            self._asked.notify()
        except RuntimeError:
            return False
        return True
