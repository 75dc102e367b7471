"""The turn: updates are taken one at a time; who is between the call and the turn is known, whatever interrupts it."""

import threading
from itertools import count

from manifoldagg.errors import ArgumentError, BusyError
from manifoldagg.federated.server.lock import Lock

__all__ = ["Answering", "Turn"]


class Answering:
    """An answer, from the call to its end.

    Attributes:
        ticket: id of the ticket that it is on.
        thread: in which it was called.
        place: in the queue; `None` until it is admitted.
        lasts: held by the call as long as it lasts: an interrupt cannot leave it held.
    """

    __slots__ = ("lasts", "place", "thread", "ticket")

    def __init__(self, ticket: str) -> None:
        self.ticket = ticket
        self.thread = threading.get_ident()
        self.place: int | None = None
        self.lasts = threading.Lock()


class Turn(Lock):
    """Whose turn it is, who has its `lock`, and who waits for it.

    Args:
        most: how many may wait beside the one whose turn it is; `None` for any number.

    Example:
        >>> turn = Turn(0)
        >>> answer = Answering("ticket")
        >>> with answer.lasts:
        ...     turn.come(answer)
        ...     turn.admit(answer)
        ...     turn.tickets, turn.admitted
        (['ticket'], 1)
        >>> turn.tickets
        []
    """

    def __init__(self, most: int | None) -> None:
        super().__init__()
        self.most = most
        # What an interrupt leaves here does not last, and counts for nothing.
        self._answers: dict[Answering, None] = {}
        self._places = count()

    @property
    def tickets(self) -> list[str]:
        """Ids of the tickets on which an answer is under way."""
        return [answer.ticket for answer in self._lasting()]

    @property
    def admitted(self) -> int:
        """How many have their turn, or wait for it."""
        return sum(answer.place is not None for answer in self._lasting())

    def come(self, answer: Answering) -> None:
        """Note an answer, which lasts until its `lasts` is let go."""
        self._answers[answer] = None

    def admit(self, answer: Answering) -> None:
        """Let an answer wait for its turn.

        Raises:
            BusyError: if more of other threads are before it than may be.
        """
        place = answer.place = next(self._places)
        if self.most is None:
            return
        others = [other.place for other in self._lasting() if other.thread != answer.thread]
        waiting = sum(other is not None and other < place for other in others)
        if waiting > self.most:
            raise BusyError(f"server: busy: {waiting} updates wait for their turn, of at most {self.most}")

    def go(self, answer: Answering) -> None:
        """Forget an answer."""
        self._answers.pop(answer, None)

    def check(self) -> None:
        """Not from within an update: its thread would wait for itself.

        Raises:
            ArgumentError: if it is.
        """
        if self.is_mine():
            raise ArgumentError("server: an update cannot wait for itself; call this after `receive` has returned")

    def _lasting(self) -> list[Answering]:
        return [answer for answer in [*self._answers] if answer.lasts.locked()]
