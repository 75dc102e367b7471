"""Schedulers, which determine the order and the times of task completions."""

import bisect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from manifoldagg._validation import check_count, check_number, short_repr
from manifoldagg.errors import ArgumentError, ManifoldAggError
from manifoldagg.simulation.clock import VirtualClock, check_generator
from manifoldagg.simulation.delays import MAX_PROBABILITY, Delay

__all__ = [
    "Completion",
    "IndependentClients",
    "Job",
    "PriorityScheduler",
    "Scheduler",
    "SchedulerFactory",
    "SchedulerLike",
    "normalize_client",
    "parse_client",
]

C = TypeVar("C", bound=int | str)
Job = tuple[C, float, float, int]
"""A task: its client, its work, the time of its dispatch, and the number of completions before its dispatch."""
RunningJob = tuple[C, float, float, int, float]
"""The fields of a `Job`, and the start time."""
MAX_WORK = 2.0**480
"""The largest work of a task, and the longest time of one unit of work in seconds.

A task then takes at most 2**960 seconds. This is below half an ulp of the largest float, so adding it to a time cannot
overflow.
"""


class Completion(NamedTuple):
    """The completion of a client's task, as a scheduler reports it.

    Attributes:
        time: the time of the completion, in virtual seconds.
        client: the client that ran the task.
        work: the amount of work of the task. A client's delay is the time for one unit of work.
        dispatched: the time of the task's dispatch, in virtual seconds.
        started: the time at which the client started the task, which is at least `dispatched`.
        relative_delay: the number of other tasks that finished while this task was in flight. If each of them created a
            new version of the server's model, this number is the staleness of the update.
    """

    time: float
    client: Any
    work: float
    dispatched: float
    started: float
    relative_delay: int


class Scheduler(ABC, Generic[C]):
    """Base class for schedulers, which determine when the tasks of clients start and finish in virtual time.

    All schedulers have these properties:

    - Clients are identified by integers or strings.
    - A client can have only one task in flight, unless the class sets `allows_queueing`.
    - `next` returns task completions in chronological order. Tasks that finish at the same time are returned in the
      order in which they started.
    - `copy.deepcopy` returns an independent copy. With the same calls, the copy and the original return the same
      completions.

    Args:
        generator: the random generator. No other code may use it.
    """

    allows_queueing: ClassVar[bool] = False

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = check_generator(generator)
        self._clock: VirtualClock[RunningJob[C]] = VirtualClock(generator)
        self._num_finished = 0
        self._client_counts: dict[C, int] = {}
        self._in_flight = 0

    @property
    def now(self) -> float:
        """The virtual time in seconds."""
        return self._clock.now

    @property
    def in_flight(self) -> int:
        """The number of dispatched tasks that have neither finished nor been cancelled."""
        return self._in_flight

    def num_in_flight(self, client: C) -> int:
        """Return the number of tasks of a client in flight."""
        return self._client_counts.get(client, 0)

    @abstractmethod
    def dispatch(self, client: C, work: float) -> None:
        """Dispatch a task of `work` units.

        Raises:
            ArgumentError: if the client cannot accept the task, or `work` is not a number from 0 to $2^{480}$. In this
                case, the generator is not used.
        """

    def next(self) -> Completion:
        """Return the next completion, and start the tasks that waited for the finished task.

        Raises:
            ManifoldAggError: if no task is in flight.
        """
        self._start_ready()
        try:
            time, (client, work, dispatched, finished, started) = self._clock.next()
        except ManifoldAggError:
            raise ManifoldAggError("scheduler: expected a task in flight; call `dispatch` before `next`") from None
        left = self._client_counts.pop(client) - 1
        if left:
            self._client_counts[client] = left
        self._in_flight -= 1
        self._on_finished(client)
        late = self._num_finished - finished
        self._num_finished += 1
        return Completion._make((time, client, work, dispatched, started, late))

    def peek(self) -> float:
        """Return the time of the next completion, or infinity if no task is in flight.

        A later call of `dispatch` or `cancel` can change this time.
        """
        self._start_ready()
        return self._clock.peek()

    def advance(self, time: float) -> None:
        """Advance the time without a completion.

        Raises:
            ArgumentError: if `time` is in the past, or after the next task finishes.
        """
        self._start_ready()
        self._clock.advance(time)

    def cancel(self, client: C) -> int:
        """Cancel all tasks of a client and return their number, in at most linear time."""
        lost = self._client_counts.pop(client, 0)
        if lost:
            self._in_flight -= lost
            self._drop_client(client)
        return lost

    def _make_job(self, client: C, work: float) -> Job[C]:
        """Return a task that is dispatched now, after checking that the client can accept it."""
        if type(client) is not int:
            client = normalize_client(client)
        if client in self._client_counts and not self.allows_queueing:
            raise ArgumentError(f"client: expected a client without a task in flight, got {client!r}")
        if not (type(work) is float and 0 <= work <= MAX_WORK):
            work = check_number("work", work, at_least=0, at_most=MAX_WORK)
        return client, work, self._clock.now, self._num_finished

    def _start(self, job: Job[C], seconds: float) -> int:
        """Start a task that takes `seconds`, and return the identifier of its event."""
        now = self._clock.now
        return self._clock.schedule_at(now + seconds, (*job, now))

    def _count_in(self, client: C) -> int:
        """Count a dispatched task, and return the number of tasks of its client."""
        self._in_flight += 1
        self._client_counts[client] = count = self._client_counts.get(client, 0) + 1
        return count

    def _start_ready(self) -> None:
        """Start the tasks that can start now."""

    def _on_finished(self, client: C) -> None:
        """Update the state after the running task of a client has finished."""

    def _drop_client(self, client: C) -> None:
        self._clock.cancel_where(lambda running: running[0] == client)


class IndependentClients(Scheduler[C]):
    """A scheduler for clients that work in parallel and independently of each other.

    The time of each task is drawn from the delay distribution of its client.

    Args:
        delays: a delay for each client, or one delay for all clients.
        generator: the random generator. It draws one number per dispatch.

    Raises:
        ArgumentError: if `delays` contains an invalid value.

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
        self._shared_delay = _check_delay("delays", delays) if isinstance(delays, Delay) else None
        self._delays = (
            {}
            if isinstance(delays, Delay)
            else {client: _check_delay(f"delays[{client!r}]", delay) for client, delay in delays.items()}
        )
        # The event identifier of each client's task.
        self._running: dict[C, int] = {}

    def dispatch(self, client: C, work: float) -> None:
        job = self._make_job(client, work)
        client, work, _, _ = job
        self._running[client] = self._start(job, self._delay(client).draw(self._generator, work))
        self._count_in(client)

    def _delay(self, client: C) -> Delay:
        delay = self._delays.get(client, self._shared_delay)
        if delay is None:
            raise ArgumentError(f"client: expected a client with an entry in `delays`, got {client!r}")
        return delay

    def _drop_client(self, client: C) -> None:
        self._clock.cancel(self._running[client])


class PriorityScheduler(Scheduler[C]):
    r"""A scheduler in which a few workers execute the tasks of many clients and prefer small tasks.

    The work of a task is its number of minibatches. The scheduler has these rules:

    - Waiting tasks are sorted by the sum of their work and k times their dispatch time in seconds, from low to high.
      Small tasks and tasks that have waited long therefore come first.
    - An idle worker selects one of the N waiting tasks at random. The task at position i, counted from 0, has the
      probability $(N - i) / \sum_{j=1}^N j$, so the first task is the most likely one.
    - A worker that has finished a task selects its next task before the client of the finished task can receive a new
      one.
    - A worker processes `speed` minibatches per second.

    Args:
        clients: the number of clients, which determines the default speed $k \cdot$ clients / workers.
        generator: the random generator of the positions. Only the scheduler may use it.
        workers: the number of workers, which is the number of concurrent tasks.
        k: the weight of the waiting time. One second of waiting has the same effect as k minibatches less work.
        speed: the number of minibatches per second of one worker.

    Raises:
        ArgumentError: if an argument is invalid. The message names it.

    Source: Manifold B.0.1.

    Example:
        >>> import numpy as np
        >>> scheduler = PriorityScheduler(2, np.random.default_rng(0), workers=1, speed=1.0)
        >>> scheduler.dispatch("small", work=1); scheduler.dispatch("large", work=5)
        >>> sorted(scheduler.next().client for _ in range(2))
        ['large', 'small']
    """

    def __init__(
        self,
        clients: int,
        generator: np.random.Generator,
        *,
        workers: int = 2,
        k: float = 2.0,
        speed: float | None = None,
    ) -> None:
        super().__init__(generator)
        self._k = check_number("k", k, at_least=0)
        self._workers = self._idle_workers = check_count("workers", workers)
        default = k * check_count("clients", clients) / workers
        self._speed = check_number("speed", default if speed is None else speed, at_least=1 / MAX_WORK)
        # Each entry is one tuple of the key, the number of earlier pushes and the fields of the job, to save memory.
        self._queue: list[tuple[float, int, C, float, float, int]] = []
        self._pushed = 0

    def dispatch(self, client: C, work: float) -> None:
        job = self._make_job(client, work)
        self._push(job)
        self._count_in(job[0])

    def _push(self, job: Job[C]) -> None:
        _, work, dispatched, _ = job
        bisect.insort(self._queue, (work + self._k * dispatched, self._pushed, *job))
        self._pushed += 1

    def _start_ready(self) -> None:
        while self._idle_workers and self._queue:
            job = self._queue.pop(self._draw(len(self._queue)))[2:]
            self._start(job, job[1] / self._speed)
            self._idle_workers -= 1

    def _draw(self, length: int) -> int:
        """Draw position i with probability proportional to `length - i`."""
        # The ticket is uniform, and position i has length - i tickets. The integer square root is exact.
        ticket = int(self._generator.integers(length * (length + 1) // 2))
        return length - 1 - (math.isqrt(8 * ticket + 1) - 1) // 2

    def _on_finished(self, client: C) -> None:
        self._idle_workers += 1
        self._start_ready()

    def _drop_client(self, client: C) -> None:
        self._idle_workers += len(self._clock.cancel_where(lambda running: running[0] == client))
        self._queue = [entry for entry in self._queue if entry[2] != client]


def _check_delay(name: str, delay: object) -> Delay:
    if not isinstance(delay, Delay):
        raise ArgumentError(f"{name}: expected a Delay, got {short_repr(delay)}")
    if not delay.quantile(MAX_PROBABILITY) <= MAX_WORK:
        raise ArgumentError(f"{name}: expected at most {MAX_WORK:.3g} s for one unit of work, got {short_repr(delay)}")
    return delay


def normalize_client(client: Any) -> Any:
    """Convert a client's identifier to a Python int or str, which JSON represents exactly.

    Raises:
        ArgumentError: if the identifier is neither an integer nor a string.
    """
    if type(client) is int or type(client) is str:
        return client
    if isinstance(client, np.integer):
        return int(client)
    raise ArgumentError(f"client: expected an int or a str, got {short_repr(client)}")


def parse_client(text: str) -> int | str:
    """Parse a client's name from a file. The name of an integer becomes an `int`."""
    try:
        return int(text) if str(int(text)) == text else text
    except ValueError:
        return text


SchedulerFactory: TypeAlias = Callable[[Sequence[int], np.random.Generator], Scheduler[int]]
"""A function of the clients and a random generator that returns a scheduler. The scheduler may draw from no other
generator.
"""
SchedulerLike: TypeAlias = Scheduler[int] | SchedulerFactory | None
"""The type of the argument `scheduler` of [`run`][manifoldagg.simulation.run]."""
