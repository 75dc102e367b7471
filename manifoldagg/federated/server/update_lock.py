"""The turn: updates are taken one at a time; who is between the call and the turn is known, whatever interrupts it."""

import threading
from itertools import count

from manifoldagg.errors import ArgumentError, BusyError
from manifoldagg.federated.server.lock import OwnedLock

__all__ = ["PendingUpdate", "UpdateLock"]


class PendingUpdate:
    """An answer, from the call to its end.

    Attributes:
        ticket: id of the ticket that it is on.
        thread: in which it was called.
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
    """Whose turn it is, who has its `lock`, and who waits for it.

    Args:
        max_queued: how many may wait beside the one whose turn it is; `None` for any number.

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
        # What an interrupt leaves here does not last, and counts for nothing.
        self._updates: dict[PendingUpdate, None] = {}
        self._positions = count()

    @property
    def tickets(self) -> list[str]:
        """Ids of the tickets on which an answer is under way."""
        return [answer.ticket for answer in self._alive()]

    @property
    def num_queued(self) -> int:
        """How many have their turn, or wait for it."""
        return sum(answer.position is not None for answer in self._alive())

    def register(self, update: PendingUpdate) -> None:
        """Note an answer, which lasts until its `alive_lock` is let go."""
        self._updates[update] = None

    def enqueue(self, update: PendingUpdate) -> None:
        """Let an answer wait for its turn.

        Raises:
            BusyError: if more of other threads are before it than may be.
        """
        place = update.position = next(self._positions)
        if self.max_queued is None:
            return
        others = [other.position for other in self._alive() if other.thread != update.thread]
        waiting = sum(other is not None and other < place for other in others)
        if waiting > self.max_queued:
            raise BusyError(f"server: busy: {waiting} queued updates, max_queued_updates={self.max_queued}")

    def unregister(self, update: PendingUpdate) -> None:
        """Forget an answer."""
        self._updates.pop(update, None)

    def check(self) -> None:
        """Not from within an update: its thread would wait for itself.

        Raises:
            ArgumentError: if it is.
        """
        if self.held_by_me():
            raise ArgumentError("server: an update cannot wait for itself; call this after `receive` has returned")

    def _alive(self) -> list[PendingUpdate]:
        return [answer for answer in [*self._updates] if answer.alive_lock.locked()]
