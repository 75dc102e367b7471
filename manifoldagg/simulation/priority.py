"""A priority scheduler: a queue for a few workers that prefers small tasks and tasks that have waited long."""

import bisect
import math
from typing import Any, TypeVar

import numpy as np

from manifoldagg._validation import check_count, check_number
from manifoldagg.simulation.schedulers import Job, Scheduler

__all__ = ["PriorityScheduler"]

C = TypeVar("C", bound=int | str)


class PriorityScheduler(Scheduler[C]):
    r"""A scheduler of a few workers that execute the tasks of many clients and prefer small tasks.

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
        super().__init__(generator)
        self._k = check_number("k", k, at_least=0)
        self._workers = self._idle_workers = check_count("workers", workers)
        default = k * check_count("clients", clients) / workers
        self._speed = check_number("speed", default if speed is None else speed, above=0)
        self._set_fast_bound(1 / self._speed)
        # Keys, how many were pushed before, and the fields of jobs: one tuple each, since many wait.
        self._queue: list[tuple[float, int, C, float, float, int]] = []
        self._pushed = 0

    def dispatch(self, client: C, work: float) -> None:
        job = self._make_job(client, work)
        self._push(job)
        self._count_in(job[0])

    def _max_seconds(self, client: C, work: float) -> float:
        return work / self._speed

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
        """Position i with probability proportional to length - i, by inverting triangular numbers exactly."""
        ticket = int(self._generator.integers(length * (length + 1) // 2))
        return length - 1 - (math.isqrt(8 * ticket + 1) - 1) // 2

    def _on_finished(self, client: C) -> None:
        self._idle_workers += 1
        self._start_ready()

    def _drop_client(self, client: C) -> None:
        self._idle_workers += len(self._clock.cancel_where(lambda running: running[0] == client))
        self._queue = [entry for entry in self._queue if entry[2] != client]

    def _settings(self) -> dict[str, Any]:
        return {"workers": self._workers, "k": self._k, "speed": self._speed}

    def _queued_jobs(self) -> list[Job[C]]:
        return [entry[2:] for entry in self._queue]

    def _check_jobs(self, waiting: list[Job[C]], running: list[Job[C]], state: dict[str, Any]) -> None:
        if len(running) > self._workers:
            raise ValueError(f"{len(running)} tasks run on {self._workers} workers")

    def _restore_jobs(self, waiting: list[Job[C]], running: list[Job[C]]) -> None:
        self._idle_workers = self._workers - len(running)
        self._queue = []
        self._pushed = 0
        for job in waiting:
            self._push(job)
