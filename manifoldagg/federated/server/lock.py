"""Locks: a reentrant lock that reports its owner, and the lock that serialises updates."""

import os
import threading
from itertools import count

from manifoldagg.errors import ArgumentError, BusyError

__all__ = ["OwnedLock", "PendingUpdate", "UpdateLock"]


class OwnedLock:
    """Reentrant lock that reports whether the current thread owns it.

    Attributes:
        lock: the lock. Acquire it only in a `with` statement, so that an interrupt such as `KeyboardInterrupt` cannot
            leave it locked.

    Example:
        >>> mine = OwnedLock()
        >>> with mine.lock:
        ...     mine.held_by_me()
        True
        >>> mine.held_by_me()
        False
    """

    def __init__(self) -> None:
        # `RLock` is implemented in C, so a `with` statement acquires it in one bytecode instruction. Python runs signal
        # handlers only between two instructions.
        self.lock = threading.RLock()
        # No thread waits on the condition, so `notify` does nothing. It raises if this thread does not own the lock.
        self._owner_probe = threading.Condition(self.lock)

    def held_by_me(self) -> bool:
        """Return whether the current thread owns the lock."""
        try:
            self._owner_probe.notify()
        except RuntimeError:
            return False
        return True


class PendingUpdate:
    """Update that a call to `Server.receive` is processing.

    Attributes:
        ticket: the id of the ticket, which permits a client to return this update.
        thread: the id of the thread that called `receive`.
        position: the position in the queue of updates. `None` until the update is enqueued.
        alive_lock: a lock that the calling thread owns until the call has returned or raised an exception. Other
            threads test this lock to find out whether the call is still running.
    """

    __slots__ = ("alive_lock", "position", "thread", "ticket")

    def __init__(self, ticket: str) -> None:
        self.ticket = ticket
        self.thread = threading.get_ident()
        self.position: int | None = None
        self.alive_lock = threading.Lock()


class UpdateLock(OwnedLock):
    """Lock that serialises updates, with a queue of the updates that wait for the lock.

    Args:
        max_queued: the largest number of updates that may wait while another update runs. `None` disables the limit.

    Example:
        >>> lock = UpdateLock(0)
        >>> update = PendingUpdate("ticket")
        >>> with update.alive_lock:
        ...     lock.register(update)
        ...     lock.enqueue(update)
        ...     lock.tickets
        ['ticket']
    """

    def __init__(self, max_queued: int | None) -> None:
        super().__init__()
        self.max_queued = max_queued
        self._pid = os.getpid()
        # An update whose call has ended remains in this dictionary until the next update is registered.
        self._updates: dict[PendingUpdate, None] = {}
        self._positions = count()

    @property
    def tickets(self) -> list[str]:
        """The ticket ids of the updates that are being processed."""
        return [update.ticket for update in self._alive()]

    def register(self, update: PendingUpdate) -> None:
        """Register an update. It counts as being processed until its `alive_lock` is released."""
        for other in [*self._updates]:
            if not other.alive_lock.locked():
                self._updates.pop(other, None)
        self._updates[update] = None

    def enqueue(self, update: PendingUpdate) -> None:
        """Enqueue an update.

        Raises:
            BusyError: if more than `max_queued` updates of other threads are ahead of it in the queue.
        """
        place = update.position = next(self._positions)
        if self.max_queued is None:
            return
        others = [other.position for other in self._alive() if other.thread != update.thread]
        waiting = sum(other is not None and other < place for other in others)
        if waiting > self.max_queued:
            raise BusyError(f"server: busy: {waiting} queued updates, max_queued_updates={self.max_queued}")

    def check_process(self) -> None:
        """Check that this process has created the server.

        A forked process contains only a copy of the server. This copy is read-only, because an update of the copy would
        never reach the original server.

        Raises:
            ArgumentError: if this process is a fork of the server's process.
        """
        if os.getpid() != self._pid:
            raise ArgumentError(
                f"server: expected a call in process {self._pid}, got a call in a fork, where the server is read-only"
            )

    def check(self) -> None:
        """Check that the current thread may wait for a running update.

        Raises:
            ArgumentError: if the current thread owns the lock, so that it would wait for itself.
        """
        if self.held_by_me():
            raise ArgumentError("server: expected a call outside of an update; call this after `receive` has returned")

    def _alive(self) -> list[PendingUpdate]:
        return [update for update in [*self._updates] if update.alive_lock.locked()]
