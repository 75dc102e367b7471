"""Schedulers: which client finishes next, and when."""

import bisect
import math
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from manifoldagg.errors import ManifoldAggError, check_count, check_number
from manifoldagg.simulation.clock import VirtualClock

T = TypeVar("T")


@dataclass(frozen=True)
class Completion(Generic[T]):
    """A client finished its task at a virtual time, in seconds."""

    time: float
    client: T


class PriorityScheduler(Generic[T]):
    r"""A few workers that execute the tasks of many clients, out of a queue that favours small tasks.

    A client is pushed with key `work + k * now`, fixed at the push, and the queue is sorted by it. A worker
    that becomes free takes position i of N with probability $(N - i) / \sum_{j \le N} j$, i from 0, before the
    client that it just finished is pushed back. A task of `work` batches takes `work / speed` seconds.

    Args:
        clients: how many clients there are; sets the default speed $k \cdot$ clients / workers.
        generator: draws the positions; nothing else does.
        workers: how many tasks run at a time.
        k: batches per second and client that waiting is worth.
        speed: batches per second of one worker.

    Raises:
        ArgumentError: naming the argument that does not fit.

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
        self._k = check_number("k", k, at_least=0)
        self._idle = check_count("workers", workers)
        default = k * check_count("clients", clients) / workers
        self._speed = check_number("speed", default if speed is None else speed, above=0)
        self._generator = generator
        self._clock: VirtualClock[T] = VirtualClock()
        self._queue: list[tuple[float, int, T, float]] = []
        self._pushed = 0

    @property
    def now(self) -> float:
        """The virtual time in seconds."""
        return self._clock.now

    def dispatch(self, client: T, work: float) -> None:
        """Push a client that has `work` batches to do.

        Raises:
            ArgumentError: if `work` is negative or no number.
        """
        work = check_number("work", work, at_least=0)
        bisect.insort(self._queue, (work + self._k * self.now, self._pushed, client, work))
        self._pushed += 1

    def next(self) -> Completion[T]:
        """The next client to finish; its worker has taken up the next task already.

        Raises:
            ManifoldAggError: if no task is left.
        """
        self._employ()
        if not len(self._clock):
            raise ManifoldAggError("the scheduler has no task: dispatch a client before asking for the next")
        time, client = self._clock.next()
        self._idle += 1
        self._employ()
        return Completion(time, client)

    def _employ(self) -> None:
        while self._idle and self._queue:
            *_, client, work = self._queue.pop(self._draw(len(self._queue)))
            self._clock.schedule(work / self._speed, client)
            self._idle -= 1

    def _draw(self, length: int) -> int:
        """Position i with probability proportional to length - i, by inverting triangular numbers exactly."""
        ticket = int(self._generator.integers(length * (length + 1) // 2))
        return length - 1 - (math.isqrt(8 * ticket + 1) - 1) // 2
