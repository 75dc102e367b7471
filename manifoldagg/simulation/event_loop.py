"""The course of a run: who is asked when, and who answers next. It knows no model."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from manifoldagg.errors import ArgumentError, ManifoldAggError
from manifoldagg.federated.server.client_sampling import AvailableClients, ClientSampler
from manifoldagg.simulation.availability import Change, Participation
from manifoldagg.simulation.federated_dataset import Key
from manifoldagg.simulation.schedulers import Completion, Scheduler

__all__ = ["Answer", "Ask", "Course", "Event", "Lost"]


class Ask(NamedTuple):
    """A client is to be given a task."""

    client: int


class Answer(NamedTuple):
    """A client has finished a task; `done` counts from when the client was asked."""

    key: Key
    done: Completion


class Lost(NamedTuple):
    """Nobody will answer these tasks: their client is gone."""

    keys: tuple[Key, ...]


Event: TypeAlias = Ask | Answer | Lost


class _Given(NamedTuple):
    nth: int
    work: float
    time: float
    finished: int


class Course:
    """Who is asked when, and who answers next.

    A client's tasks run in order: what it is asked while it is busy waits, here where the scheduler does not queue.
    Every `Ask` is followed by `give`, every `ClosedTicket` by `settle`, before the next event.

    Args:
        clients: all that will ever take part, once each.
        asking: whom to ask.
        scheduler: carries out the tasks; nothing else may use it from now on.
        changes: of who takes part. A client whose first change is no `"join"` is here from the start.

    Attributes:
        present: the clients that take tasks now.
        pending: the event that waits for `give` or `settle`.
        answers: how many there were.

    Raises:
        ArgumentError: if the scheduler was used before, or a change cannot happen or is of none of the clients.

    Example:
        >>> import numpy as np
        >>> from manifoldagg.simulation import Deterministic, IndependentClients
        >>> from manifoldagg.federated.server.client_sampling import AsyncSampler
        >>> alone = IndependentClients({3: Deterministic(1.0), 5: Deterministic(1.6)}, np.random.default_rng(0))
        >>> course = StepCurve([3, 5], AsyncSampler(None, np.random.default_rng(0)), alone)
        >>> answers = []
        >>> while len(answers) < 4:
        ...     event = course.next()
        ...     if isinstance(event, Ask):
        ...         key = course.give(event.client, work=1.0)
        ...     elif isinstance(event, ClosedTicket):
        ...         answers.append(tuple(event.key))
        ...         course.settle(accepted=True)
        >>> answers
        [(3, 0), (5, 0), (3, 1), (3, 2)]
    """

    def __init__(
        self,
        clients: Sequence[int],
        asking: ClientSampler,
        scheduler: Scheduler[int],
        changes: Iterable[Change[int]] = (),
    ) -> None:
        if scheduler.now or scheduler.in_flight:
            raise ArgumentError(
                f"scheduler: expected a new one, got one at {scheduler.now:g} s with {scheduler.in_flight} tasks; "
                "a function makes one for each run"
            )
        changes = list(changes)
        known = set(clients)
        away = {change.client for change in changes if isinstance(change, Change) and change.kind == "join"}
        here = [client for client in clients if client not in away]
        self._crowd = Participation(scheduler, changes, present=here)
        for change in changes:
            if change.client not in known:
                raise ArgumentError(f"participation: {change} is of a client that takes no part")
        self.clients = clients
        self._scheduler = scheduler
        self._asking = asking
        self.present = AvailableClients(here)
        self._given: dict[int, deque[_Given]] = {}
        self._count: dict[int, int] = {}
        self._asks = deque(asking.start(self.present))
        self.pending: Ask | Answer | None = None
        self.answers = 0

    @property
    def now(self) -> float:
        """The virtual time in seconds."""
        return self._scheduler.now

    def next(self) -> Event:
        """What happens next.

        Raises:
            ArgumentError: if nobody has a task any more, or the last event waits for its `give` or `settle`.
        """
        if self.pending is not None:
            raise ArgumentError(f"course: expected `give` or `settle` first, for {self.pending}")
        while not self._asks:
            try:
                event = self._crowd.next()
            except ManifoldAggError:
                raise ArgumentError(
                    f"scheduler, participation: nobody has a task any more after {self.answers} answers"
                ) from None
            if isinstance(event, Completion):
                self.pending = self._finish(event)
                return self.pending
            lost = self._change(event)
            if lost:
                return Lost(lost)
        self.pending = Ask(self._asks.popleft())
        return self.pending

    def give(self, client: int, work: float) -> Key:
        """Give the client that is to be asked a task of `work` units.

        Raises:
            ArgumentError: if another one is to be asked, or the scheduler does not take the task.
        """
        if self.pending != Ask(client):
            raise ArgumentError(f"client: expected the one of the last Ask, got {client!r} after {self.pending}")
        tasks = self._given.get(client)
        if tasks is None or self._scheduler.queues:
            self._scheduler.dispatch(client, work)
        if tasks is None:
            tasks = self._given[client] = deque()
        key = Key(client, self._count.get(client, 0))
        self._count[client] = key.nth + 1
        tasks.append(_Given(key.nth, work, self.now, self.answers))
        self.pending = None
        return key

    def settle(self, accepted: bool) -> None:
        """Tell whether the server took the update of the last answer.

        Raises:
            ArgumentError: if the last event was no answer.
        """
        if not isinstance(self.pending, Answer):
            raise ArgumentError(f"course: expected an Answer to settle, got {self.pending}")
        client = self.pending.key.client
        self.pending = None
        self._asks.extend(self._asking.on_completion(client, accepted, self.present))

    def _finish(self, done: Completion) -> Answer:
        """A task of a client has finished; its next one is taken up."""
        client = done.client
        tasks = self._given[client]
        task = tasks.popleft()
        if not tasks:
            del self._given[client]
        elif not self._scheduler.queues:
            self._scheduler.dispatch(client, tasks[0].work)
        late = self.answers - task.finished
        self.answers += 1
        return Answer(Key(client, task.nth), done._replace(dispatched=task.time, relative_delay=late))

    def _change(self, change: Change[int]) -> tuple[Key, ...]:
        """A client comes or goes; the tasks that are lost with it."""
        client = change.client
        if change.kind in ("join", "return"):
            self.present.add(client)
            self._asks.extend(self._asking.on_join(client, self.present))
            return ()
        self.present.discard(client)
        if change.kind == "leave":
            return ()
        lost = tuple(Key(client, task.nth) for task in self._given.pop(client, ()))
        self._asks.extend(self._asking.on_dropout(client, len(lost), self.present))
        return lost
