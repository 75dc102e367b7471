"""Schedulers: the order and the times of task completions."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from manifoldagg._validation import check_count, check_number, short_repr
from manifoldagg.errors import ArgumentError, ManifoldAggError
from manifoldagg.simulation.clock import VirtualClock, check_generator
from manifoldagg.simulation.delays import MAX_PROBABILITY, Delay
from manifoldagg.simulation.resumable import Resumable

__all__ = [
    "Completion",
    "IndependentClients",
    "Job",
    "Scheduler",
    "SchedulerFactory",
    "SchedulerLike",
    "normalize_client",
    "parse_client",
]

C = TypeVar("C", bound=int | str)
Job = tuple[C, float, float, int]
"""A task: its client, its work, when it was dispatched and how many had finished by then."""
RunningJob = tuple[C, float, float, int, float]
"""The fields of a `Job`, and when it was taken up."""
MAX_TASK_SECONDS = 2.0**960
"""Seconds of one task: less than half the last place of the largest float, so that no finite time overflows by it."""
FAST_PATH_LIMIT = 2.0**480
"""So many units of work at so many seconds each are within `MAX_TASK_SECONDS`."""


class Completion(NamedTuple):
    """The completion of a client's task.

    Attributes:
        time: now, in virtual seconds.
        client: who.
        work: units that the task had.
        dispatched: when it was handed to the scheduler.
        started: when it was taken up, `dispatched` or later.
        relative_delay: the number of other tasks that finished while this one was in flight. It is the staleness in
            versions if each of them moved the model.
    """

    time: float
    client: Any
    work: float
    dispatched: float
    started: float
    relative_delay: int


class Scheduler(Resumable, Generic[C]):
    """Base class of all schedulers: the clock, the tasks in flight, and a state to resume from.

    Clients are integers or strings. Unless `allows_queueing`, a client has at most one task in flight. Ties in time are
    broken in the order in which tasks were taken up.

    Args:
        generator: draws all that is random here, and nothing else may draw from it.

    Raises:
        ArgumentError: if `generator` is invalid.
    """

    kind: ClassVar[str] = "scheduler"
    allows_queueing: ClassVar[bool] = False
    starts_later: ClassVar[bool] = False
    """Whether a task may be taken up later than it is put into the clock."""

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = check_generator(generator)
        self._clock: VirtualClock[RunningJob[C]] = VirtualClock(generator)
        self._num_finished = 0
        self._client_counts: dict[C, int] = {}
        self._fast_bound = FAST_PATH_LIMIT
        self._in_flight = 0

    @property
    def now(self) -> float:
        """The virtual time in seconds."""
        return self._clock.now

    @property
    def in_flight(self) -> int:
        """The tasks that were dispatched and have neither finished nor been cancelled."""
        return self._in_flight

    def num_in_flight(self, client: C) -> int:
        """Return the number of tasks of a client in flight."""
        return self._client_counts.get(client, 0)

    @abstractmethod
    def dispatch(self, client: C, work: float) -> None:
        """Dispatch a task of `work` units.

        Raises:
            ArgumentError: if the client cannot take it, or `work` is negative, no number, or might take more than
                $2^{960}$ seconds; nothing is drawn then.
        """

    def next(self) -> Completion:
        """Return the next completion; tasks that waited for its worker have been started.

        Raises:
            ManifoldAggError: if no task is left.
        """
        self._start_ready()
        try:
            time, (client, work, dispatched, finished, started) = self._clock.next()
        except ManifoldAggError:
            raise ManifoldAggError("the scheduler has no task: dispatch a client before asking for the next") from None
        left = self._client_counts.pop(client) - 1
        if left:
            self._client_counts[client] = left
        self._in_flight -= 1
        self._on_finished(client)
        late = self._num_finished - finished
        self._num_finished += 1
        return Completion._make((time, client, work, dispatched, started, late))

    def peek(self) -> float:
        """Return the time of the next completion if nothing is dispatched or cancelled before, or infinity."""
        self._start_ready()
        return self._clock.peek()

    def advance(self, time: float) -> None:
        """Advance the time by an interval without completions.

        Raises:
            ArgumentError: if `time` is in the past, or after the next task finishes.
        """
        self._start_ready()
        self._clock.advance(time)

    def cancel(self, client: C) -> int:
        """Cancel all tasks of a client and return their number, in linear time at most."""
        lost = self._client_counts.pop(client, 0)
        if lost:
            self._in_flight -= lost
            self._drop_client(client)
        return lost

    def state(self) -> dict[str, Any]:
        """Return the complete dynamic state as a JSON-compatible tree."""
        return {
            "scheduler": type(self).__name__,
            "settings": self._settings(),
            "finished": self._num_finished,
            "waiting": [list(job) for job in self._queued_jobs()],
            "clock": self._clock.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from a `state`, bit for bit; the constructor's arguments must be equal.

        Raises:
            ArgumentError: if `state` is not a state of such a scheduler; this one stays as it was.
        """
        try:
            kind = state["scheduler"]
            settings = state["settings"]
            finished = state["finished"]
            if (kind, settings) != (type(self).__name__, self._settings()):
                raise ValueError(
                    f"it is of {kind} with {settings}, not of {type(self).__name__} with {self._settings()}"
                )
            now = check_number("now", state["clock"]["now"])
            check_count("finished", finished, at_least=0)
            waiting = [_parse_job(entry, now, finished) for entry in state["waiting"]]
            running = []
            for time, _, _, (*entry, started) in state["clock"]["events"]:
                running.append(_parse_job(entry, now, finished))
                latest = check_number("time", time, at_least=now) if self.starts_later else now
                check_number("started", started, at_least=running[-1][2], at_most=latest)
            held = Counter(client for client, *_ in waiting + running)
            if not self.allows_queueing and any(count > 1 for count in held.values()):
                raise ValueError("a client has several tasks in flight")
            self._check_jobs(waiting, running, state)
            for client, work, *_ in waiting + running:
                self._check_duration(client, work)
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(f"state: expected the state of this scheduler, but {error}") from None
        self._clock.restore(state["clock"])
        self._num_finished = finished
        self._client_counts = dict(held)
        self._in_flight = held.total()
        self._restore_jobs(waiting, running)

    def _make_job(self, client: C, work: float) -> Job[C]:
        """A task that is dispatched now, if its client can take it."""
        if type(client) is not int:
            client = normalize_client(client)
        if client in self._client_counts and not self.allows_queueing:
            raise ArgumentError(f"client: {client!r} has a task in flight already")
        if not (type(work) is float and 0 <= work <= self._fast_bound):
            work = check_number("work", work, at_least=0)
            if work > self._fast_bound:
                self._check_duration(client, work)
        return client, work, self._clock.now, self._num_finished

    def _check_duration(self, client: C, work: float) -> None:
        """Refuse what would overflow when it is taken up, which may be long after it was dispatched."""
        if not self._max_seconds(client, work) <= MAX_TASK_SECONDS:
            raise ArgumentError(
                f"work: expected a task of at most {MAX_TASK_SECONDS:.3g} s for client {client!r}, got "
                f"{short_repr(work)}"
            )

    def _set_fast_bound(self, slowest: float) -> None:
        """No unit of work takes more seconds than `slowest`: `_check_duration` need not be asked about easy work if
        that is."""
        self._fast_bound = FAST_PATH_LIMIT if slowest <= FAST_PATH_LIMIT else -1.0

    def _start(self, job: Job[C], seconds: float) -> int:
        """Take up a task now that will take that long; what the clock knows it by."""
        now = self._clock.now
        return self._clock.schedule_at(now + seconds, (*job, now))

    def _max_seconds(self, client: C, work: float) -> float:
        """Seconds that no draw exceeds; an `ArgumentError` if there is no such client."""
        return 0.0

    def _count_in(self, client: C) -> int:
        """Count a task in; how many its client has now."""
        self._in_flight += 1
        self._client_counts[client] = count = self._client_counts.get(client, 0) + 1
        return count

    def _start_ready(self) -> None:
        """Take up what can be taken up now."""

    def _on_finished(self, client: C) -> None:
        """The running task of a client has finished."""

    def _drop_client(self, client: C) -> None:
        self._clock.cancel_where(lambda running: running[0] == client)

    def _settings(self) -> dict[str, Any]:
        return {}

    def _queued_jobs(self) -> list[Job[C]]:
        return []

    def _check_jobs(self, waiting: list[Job[C]], running: list[Job[C]], state: dict[str, Any]) -> None:
        """Raise a ValueError if these cannot be the tasks of a state."""
        if waiting:
            raise ValueError("no task waits here")

    def _restore_jobs(self, waiting: list[Job[C]], running: list[Job[C]]) -> None:
        """Take the tasks of a state; those that run are in the clock already."""


class IndependentClients(Scheduler[C]):
    """Clients that work in parallel and independently, each with its delay distribution.

    Args:
        delays: one for each client, or one for all that will ever be dispatched.
        generator: draws the delays, one number a dispatch.

    Raises:
        ArgumentError: if `delays` holds something else.

    Example:
        >>> from manifoldagg.simulation.delays import Deterministic
        >>> delays = {"fast": Deterministic(1.0), "slow": Deterministic(3.0)}
        >>> clients = IndependentClients(delays, np.random.default_rng(0))
        >>> clients.dispatch("slow", work=1); clients.dispatch("fast", work=2)
        >>> [(done.client, done.time) for done in (clients.next(), clients.next())]
        [('fast', 2.0), ('slow', 3.0)]
    """

    def __init__(self, delays: Mapping[C, Delay] | Delay, generator: np.random.Generator) -> None:
        super().__init__(generator)
        self._shared_delay = delays if isinstance(delays, Delay) else None
        self._delays = {} if isinstance(delays, Delay) else dict(delays)
        for client, delay in self._delays.items():
            if not isinstance(delay, Delay):
                raise ArgumentError(f"delays[{client!r}]: expected a Delay, got {short_repr(delay)}")
        # What the clock knows a client's task by.
        self._running: dict[C, int] = {}
        given = [delays] if isinstance(delays, Delay) else self._delays.values()
        self._set_fast_bound(max((delay.quantile(MAX_PROBABILITY) for delay in given), default=0.0))

    def dispatch(self, client: C, work: float) -> None:
        job = self._make_job(client, work)
        client, work, _, _ = job
        self._running[client] = self._start(job, self._delay(client).draw(self._generator, work))
        self._count_in(client)

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._running = {client: count for _, _, count, (client, *_) in state["clock"]["events"]}

    def _delay(self, client: C) -> Delay:
        delay = self._delays.get(client, self._shared_delay)
        if delay is None:
            raise ArgumentError(f"client: {client!r} has no entry in the delays that were given")
        return delay

    def _max_seconds(self, client: C, work: float) -> float:
        # Where part of a delay does not grow with the work, work below 1 does not shrink it.
        return max(1.0, work) * self._delay(client).quantile(MAX_PROBABILITY)

    def _drop_client(self, client: C) -> None:
        self._clock.cancel(self._running[client])


def normalize_client(client: Any) -> Any:
    """Return `client` as a Python int or str, which JSON represents exactly.

    Raises:
        ArgumentError: if it is something else.
    """
    if type(client) is int or type(client) is str:
        return client
    if isinstance(client, np.integer):
        return int(client)
    raise ArgumentError(f"client: expected an int or a str, got {short_repr(client)}")


def parse_client(text: str) -> int | str:
    """Parse a client's name from a file: an integer if `text` is written as one, otherwise a string."""
    try:
        return int(text) if str(int(text)) == text else text
    except ValueError:
        return text


def _parse_job(entry: Any, now: float, finished: int) -> Job[Any]:
    """A job out of a state."""
    client, work, dispatched, before = entry
    if type(client) not in (int, str):
        raise ValueError(f"{client!r} is not a client")
    check_number("work", work, at_least=0)
    check_number("dispatched", dispatched, at_least=0, at_most=now)
    if check_count("finished", before, at_least=0) > finished:
        raise ValueError("a task was dispatched after more tasks had finished than there are")
    return client, float(work), float(dispatched), before


SchedulerFactory: TypeAlias = Callable[[Sequence[int], np.random.Generator], Scheduler[int]]
"""A function that makes a scheduler of these clients. The scheduler draws random numbers from this generator only."""
SchedulerLike: TypeAlias = Scheduler[int] | SchedulerFactory | None
"""What [`run`][manifoldagg.simulation.run] accepts as a scheduler."""
