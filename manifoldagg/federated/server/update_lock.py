"""The update lock: updates are applied one at a time, and every waiting update is known despite interrupts."""

import threading
from itertools import count

from manifoldagg.errors import ArgumentError, BusyError
from manifoldagg.federated.server.lock import OwnedLock

__all__ = ["PendingUpdate", "UpdateLock"]


class PendingUpdate:
    """A pending update, from the call to its end.

    Attributes:
        ticket: the id of its ticket.
        thread: the id of the calling thread.
        position: in the queue; `None` until it is admitted.
        alive_lock: held by the call as long as it lasts: an interrupt cannot leave it held.
    """

    __slots__ = ("alive_lock", "position", "thread", "ticket")

    def __init__(self, ticket: str) -> None:
        self.ticket = ticket
        self.thread = threading.get_ident()
        self.position: int | None = None
        self.alive_lock = threading.Lock()


class UpdateLock(OwnedLock):
    """The lock that serialises updates, and the updates that wait for it.

    Args:
        max_queued: the number of updates that may wait beside the running one; `None` for any number.

    Example:
        >>> lock = UpdateLock(0)
        >>> update = PendingUpdate("ticket")
        >>> with update.alive_lock:
        ...     lock.register(update)
        ...     lock.enqueue(update)
        ...     lock.tickets, lock.num_queued
        (['ticket'], 1)
        >>> lock.tickets
        []
    """

    def __init__(self, max_queued: int | None) -> None:
        super().__init__()
        self.max_queued = max_queued
        # An interrupted update can remain here, but its lock is free, so that it is ignored.
        self._updates: dict[PendingUpdate, None] = {}
        self._positions = count()

    @property
    def tickets(self) -> list[str]:
        """The ids of the tickets with a pending update."""
        return [update.ticket for update in self._alive()]

    @property
    def num_queued(self) -> int:
        """The number of updates that hold or wait for the lock."""
        return sum(update.position is not None for update in self._alive())

    def register(self, update: PendingUpdate) -> None:
        """Register an update, which is pending until its `alive_lock` is released."""
        self._updates[update] = None

    def enqueue(self, update: PendingUpdate) -> None:
        """Enqueue an update for the lock.

        Raises:
            BusyError: if more than `max_queued` updates of other threads precede it.
        """
        place = update.position = next(self._positions)
        if self.max_queued is None:
            return
        others = [other.position for other in self._alive() if other.thread != update.thread]
        waiting = sum(other is not None and other < place for other in others)
        if waiting > self.max_queued:
            raise BusyError(f"server: busy: {waiting} queued updates, max_queued_updates={self.max_queued}")

    def unregister(self, update: PendingUpdate) -> None:
        """Remove an update."""
        self._updates.pop(update, None)

    def check(self) -> None:
        """Reject calls from within an update, whose thread would wait for itself.

        Raises:
            ArgumentError: if it is.
        """
        if self.held_by_me():
            raise ArgumentError("server: an update cannot wait for itself; call this after `receive` has returned")

    def _alive(self) -> list[PendingUpdate]:
        return [update for update in [*self._updates] if update.alive_lock.locked()]
