"""The event loop of a run, which determines the order of task dispatches and completions without training a model."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from manifoldagg._validation import short_repr
from manifoldagg.errors import ArgumentError, ManifoldAggError
from manifoldagg.federated import Rule
from manifoldagg.federated.server.client_sampling import AvailableClients, ClientSampler, sampler_for, shorten
from manifoldagg.simulation.availability import Availability, AvailabilityChange, AvailabilityTrace
from manifoldagg.simulation.dataset import FederatedDataset, TaskId
from manifoldagg.simulation.delays import Delay, Delays, Empirical, assign_profiles
from manifoldagg.simulation.schedulers import (
    Completion,
    IndependentClients,
    PriorityScheduler,
    Scheduler,
    SchedulerLike,
)

__all__ = ["CompletionEvent", "DispatchEvent", "DropoutEvent", "EventLoop", "SimulationEvent", "build_event_loop"]

# Each stream is an independent sequence of random numbers under the seed of a run. The modules `simulation.dataset` and
# `federated.clients.determinism` define the other streams.
SCHEDULER_STREAM = 1
DELAY_STREAM = 4
AVAILABILITY_STREAM = 5
SAMPLING_STREAM = 6


class DispatchEvent(NamedTuple):
    """A request to dispatch a task to a client."""

    client: int


class CompletionEvent(NamedTuple):
    """The completion of a task. `completion.dispatched` is the time of its `DispatchEvent`."""

    task_id: TaskId
    completion: Completion


class DropoutEvent(NamedTuple):
    """Tasks that will never complete, because their client failed or the server no longer needs their updates."""

    task_ids: tuple[TaskId, ...]


SimulationEvent: TypeAlias = DispatchEvent | CompletionEvent | DropoutEvent


class _DispatchedTask(NamedTuple):
    task_index: int
    work: float
    time: float
    num_completed: int


class EventLoop:
    """The event loop of a run, which returns the dispatches and completions of tasks in order.

    The method `next` returns the next event. After a `DispatchEvent`, the caller must call `submit` to dispatch the
    task. After a `CompletionEvent`, it must call `acknowledge` to report whether the server accepted the update. Each
    client runs its tasks one after another, in the order of dispatch.

    Args:
        clients: all clients that may participate, without duplicates.
        sampler: the sampler of the clients.
        scheduler: the scheduler of the tasks. No other code may use this scheduler.
        changes: the changes of availability. A client whose first change is not `"join"` is available from the start.

    Attributes:
        available: the clients that accept tasks now.
        pending_event: the event that waits for `submit` or `acknowledge`.
        num_completed: the number of completions.

    Raises:
        ArgumentError: if the scheduler was used before, or a change is impossible or concerns an unknown client.

    Example:
        >>> import numpy as np
        >>> from manifoldagg.simulation import Deterministic, IndependentClients
        >>> from manifoldagg.federated.server.client_sampling import AsyncSampler
        >>> alone = IndependentClients({3: Deterministic(1.0), 5: Deterministic(1.6)}, np.random.default_rng(0))
        >>> loop = EventLoop([3, 5], AsyncSampler(None, np.random.default_rng(0)), alone)
        >>> answers = []
        >>> while len(answers) < 4:
        ...     event = loop.next()
        ...     if isinstance(event, DispatchEvent):
        ...         task_id = loop.submit(event.client, work=1.0)
        ...     elif isinstance(event, CompletionEvent):
        ...         answers.append(tuple(event.task_id))
        ...         loop.acknowledge(accepted=True)
        >>> answers
        [(3, 0), (5, 0), (3, 1), (3, 2)]
    """

    def __init__(
        self,
        clients: Sequence[int],
        sampler: ClientSampler,
        scheduler: Scheduler[int],
        changes: Iterable[AvailabilityChange[int]] = (),
    ) -> None:
        if scheduler.now or scheduler.in_flight:
            raise ArgumentError(
                f"scheduler: expected a new scheduler, got one at {scheduler.now:g} s with {scheduler.in_flight} tasks"
                "; to use it in several runs, pass a function that returns a scheduler"
            )
        changes = list(changes)
        known = set(clients)
        away = {change.client for change in changes if isinstance(change, AvailabilityChange) and change.kind == "join"}
        here = [client for client in clients if client not in away]
        self._availability = AvailabilityTrace(scheduler, changes, available=here)
        for change in changes:
            if change.client not in known:
                raise ArgumentError(f"availability: expected changes of participating clients, got {change}")
        self.clients = clients
        self._scheduler = scheduler
        self._sampler = sampler
        self.available = AvailableClients(here)
        self._dispatched: dict[int, deque[_DispatchedTask]] = {}
        self._num_dispatched: dict[int, int] = {}
        self._dispatch_queue = deque(sampler.start(self.available))
        self._cancelled: tuple[TaskId, ...] = ()
        self.pending_event: DispatchEvent | CompletionEvent | None = None
        self.num_completed = 0

    @property
    def now(self) -> float:
        """The virtual time in seconds."""
        return self._scheduler.now

    def peek(self) -> float:
        """Return the time of the next event or availability change, or infinity if there is none."""
        return self.now if self._dispatch_queue or self._cancelled else self._availability.peek()

    def next(self) -> SimulationEvent:
        """Return the next event.

        Raises:
            ArgumentError: if no client has a task, or the last event waits for `submit` or `acknowledge`.
        """
        if self.pending_event is not None:
            raise ArgumentError(f"event_loop: expected `submit` or `acknowledge` first, for {self.pending_event}")
        if self._cancelled:
            cancelled, self._cancelled = self._cancelled, ()
            return DropoutEvent(cancelled)
        while not self._dispatch_queue:
            try:
                event = self._availability.next()
            except ManifoldAggError:
                raise ArgumentError(
                    f"scheduler, availability: expected a client with a task after {self.num_completed} updates"
                ) from None
            if isinstance(event, Completion):
                self.pending_event = self._complete(event)
                return self.pending_event
            lost = self._apply_change(event)
            if lost:
                return DropoutEvent(lost)
        self.pending_event = DispatchEvent(self._dispatch_queue.popleft())
        return self.pending_event

    def submit(self, client: int, work: float) -> TaskId:
        """Dispatch a task of `work` units to the client of the latest `DispatchEvent`.

        Returns:
            The identifier of the task.

        Raises:
            ArgumentError: if the last event is not a `DispatchEvent` of this client, or the scheduler rejects the task.
        """
        if self.pending_event != DispatchEvent(client):
            raise ArgumentError(
                f"client: expected the client of the last DispatchEvent, got {client!r} after {self.pending_event}"
            )
        tasks = self._dispatched.get(client)
        # If the scheduler does not allow queueing, further tasks of a busy client wait in `_dispatched`.
        if tasks is None or self._scheduler.allows_queueing:
            self._scheduler.dispatch(client, work)
        if tasks is None:
            tasks = self._dispatched[client] = deque()
        key = TaskId(client, self._num_dispatched.get(client, 0))
        self._num_dispatched[client] = key.task_index + 1
        tasks.append(_DispatchedTask(key.task_index, work, self.now, self.num_completed))
        self.pending_event = None
        return key

    def acknowledge(self, accepted: bool) -> None:
        """Report to the event loop whether the server accepted the update of a completed task.

        Call this method after each `CompletionEvent` that `next` returns.

        Args:
            accepted: whether the server accepted the update.

        Raises:
            ArgumentError: if the latest event is not a `CompletionEvent`.
        """
        if not isinstance(self.pending_event, CompletionEvent):
            raise ArgumentError(f"event_loop: expected a CompletionEvent to acknowledge, got {self.pending_event}")
        client = self.pending_event.task_id.client
        self.pending_event = None
        self._dispatch_queue.extend(self._sampler.on_completion(client, accepted, self.available))
        for straggler in self._sampler.pop_stragglers():
            self._scheduler.cancel(straggler)
            self._cancelled += self._pop_tasks(straggler)

    def _complete(self, completion: Completion) -> CompletionEvent:
        """Complete the first task of a client, and start its next task."""
        client = completion.client
        tasks = self._dispatched[client]
        task = tasks.popleft()
        if not tasks:
            del self._dispatched[client]
        elif not self._scheduler.allows_queueing:
            self._scheduler.dispatch(client, tasks[0].work)
        late = self.num_completed - task.num_completed
        self.num_completed += 1
        return CompletionEvent(
            TaskId(client, task.task_index), completion._replace(dispatched=task.time, relative_delay=late)
        )

    def _apply_change(self, change: AvailabilityChange[int]) -> tuple[TaskId, ...]:
        """Apply a change of availability, and return the lost tasks."""
        client = change.client
        if change.kind in ("join", "return"):
            self.available.add(client)
            self._dispatch_queue.extend(self._sampler.on_join(client, self.available))
            return ()
        self.available.discard(client)
        if change.kind == "leave":
            return ()
        lost = self._pop_tasks(client)
        self._dispatch_queue.extend(self._sampler.on_dropout(client, len(lost), self.available))
        return lost

    def _pop_tasks(self, client: int) -> tuple[TaskId, ...]:
        """Remove and return the tasks of a client, whose scheduled task was cancelled."""
        return tuple(TaskId(client, task.task_index) for task in self._dispatched.pop(client, ()))


def build_event_loop(
    federation: FederatedDataset,
    rule: Rule,
    *,
    scheduler: SchedulerLike = None,
    delays: Delays = None,
    availability: Availability = None,
    concurrency: int | None = None,
    refill: int | None = None,
) -> EventLoop:
    """Build the event loop of a run from the arguments of [`run`][manifoldagg.simulation.run]."""
    clients = federation.trainable_clients

    def stream(name: int) -> np.random.Generator:
        return np.random.default_rng([federation.seed, name])

    who = sampler_for(rule, clients, concurrency, stream(SAMPLING_STREAM), refill=refill)
    if scheduler is not None and delays is not None:
        raise ArgumentError("delays: expected either a scheduler or delays, got both")
    if delays is not None:
        made: object = IndependentClients(
            _resolve_delays(delays, clients, stream(DELAY_STREAM)), stream(SCHEDULER_STREAM)
        )
    elif scheduler is None:
        made = PriorityScheduler[int](len(clients), stream(SCHEDULER_STREAM))
    else:
        made = scheduler(clients, stream(SCHEDULER_STREAM)) if callable(scheduler) else scheduler
    if not isinstance(made, Scheduler):
        raise ArgumentError(f"scheduler: expected a Scheduler, or a function that returns one, got {short_repr(made)}")
    changes = availability(clients, stream(AVAILABILITY_STREAM)) if callable(availability) else availability or ()
    given: object = changes
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ArgumentError(
            f"availability: expected AvailabilityChanges, or a function that returns them, got {short_repr(changes)}"
        )
    idle = set(range(len(federation.train))).difference(clients)
    return EventLoop(
        clients, who, made, [c for c in changes if not (isinstance(c, AvailabilityChange) and c.client in idle)]
    )


def _resolve_delays(
    delays: Delays, clients: Sequence[int], generator: np.random.Generator
) -> Mapping[int, Delay] | Delay:
    """Return one delay for all clients, or a delay for each client."""
    if isinstance(delays, str | Path):
        return assign_profiles(Empirical.from_csv(delays), clients, generator)
    made = delays(clients, generator) if callable(delays) else delays
    if isinstance(made, Delay):
        return made
    if not isinstance(made, Mapping):
        raise ArgumentError(f"delays: expected a Delay, or a mapping from clients, got {short_repr(made)}")
    missing = [client for client in clients if client not in made]
    if missing:
        raise ArgumentError(f"delays: expected a delay for each participating client; missing for {shorten(missing)}")
    return {client: made[client] for client in clients}
