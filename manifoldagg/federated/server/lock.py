"""A reentrant lock that knows its owner."""

import threading

__all__ = ["OwnedLock"]


class OwnedLock:
    """A reentrant lock that tells whether the current thread owns it.

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
        # No thread waits on it: `notify` raises for a thread that does not own the lock, and does nothing else.
        self._owner_probe = threading.Condition(self.lock)

    def held_by_me(self) -> bool:
        """Whether this thread owns the lock."""
        try:
            self._owner_probe.notify()
        except RuntimeError:
            return False
        return True
