"""A replay scheduler: the tasks of a recorded trace finish at the same times in the same order."""

import hashlib
from collections.abc import Sequence
from dataclasses import astuple
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from manifoldagg.errors import ArgumentError
from manifoldagg.simulation.schedulers import Job, Scheduler
from manifoldagg.simulation.trace import TaskRecord, check_records

__all__ = ["ReplayScheduler"]

C = TypeVar("C", bound=int | str)


class ReplayScheduler(Scheduler[C]):
    """A scheduler that replays a recorded trace.

    Each `dispatch` of a client stands for its next recorded task, which finishes when it did, whatever its work is
    now. So one order of events serves several methods, or a measured run is driven through another rule. A task that
    the trace does not know, as those in flight at its end, never finishes.

    Args:
        records: in order of `finished`.

    Raises:
        ArgumentError: if they are out of order.

    Example:
        >>> trace = [TaskRecord("a", 1.0, 0.0, 0.0, 2.0, 0), TaskRecord("b", 1.0, 0.0, 0.0, 3.0, 1)]
        >>> replay = ReplayScheduler(trace)
        >>> replay.dispatch("b", work=1.0); replay.dispatch("a", work=1.0)
        >>> replay.next().client, replay.next().time
        ('a', 3.0)
    """

    allows_queueing = True
    starts_later = True

    def __init__(self, records: Sequence[TaskRecord[C]]) -> None:
        super().__init__(np.random.default_rng(0))
        self._records = check_records(records)
        for i, (before, record) in enumerate(pairwise(self._records), start=1):
            if record.finished < before.finished:
                raise ArgumentError(
                    f"records[{i}]: expected them in order of `finished`, "
                    f"got {record.finished:g} after {before.finished:g}"
                )
        self._digest = hashlib.sha256(repr(list(map(astuple, self._records))).encode()).hexdigest()
        self._remaining = self._by_client(range(len(self._records)))
        self._unrecorded: list[Job[C]] = []

    def dispatch(self, client: C, work: float) -> None:
        """Dispatch a client's next recorded task.

        Raises:
            ArgumentError: if it finished before now, or `work` is negative or no number.
        """
        job = self._make_job(client, work)
        client = job[0]
        rows = self._remaining.get(client)
        if rows:
            record = self._records[rows[-1]]
            now = self._clock.now
            if record.finished < now:
                raise ArgumentError(
                    f"client: the next task of {client!r} finished at {record.finished:g} s, and now is {now:g} s"
                )
            self._clock.schedule_at(record.finished, (*job, max(now, record.started)), order=rows.pop())
        else:
            self._unrecorded.append(job)
        self._count_in(client)

    def state(self) -> dict[str, Any]:
        return super().state() | {"left": sorted(i for rows in self._remaining.values() for i in rows)}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._remaining = self._by_client(sorted(state["left"]))

    def _by_client(self, rows: Sequence[int]) -> dict[C, list[int]]:
        """For each client its rows of the trace, the next one last."""
        left: dict[C, list[int]] = {}
        for i in reversed(rows):
            left.setdefault(self._records[i].client, []).append(i)
        return left

    def _drop_client(self, client: C) -> None:
        super()._drop_client(client)
        self._unrecorded = [job for job in self._unrecorded if job[0] != client]

    def _settings(self) -> dict[str, Any]:
        return {"records": self._digest}

    def _queued_jobs(self) -> list[Job[C]]:
        return self._unrecorded

    def _check_jobs(self, waiting: list[Job[C]], running: list[Job[C]], state: dict[str, Any]) -> None:
        everything = range(len(self._records))
        left = set(state["left"])
        rows = [row for _, row, *_ in state["clock"]["events"]]
        if any(type(i) is not int or i not in everything for i in [*state["left"], *rows]):
            raise ValueError("it has tasks that are not in the trace")
        if len({*left, *rows}) < len(state["left"]) + len(rows):
            raise ValueError("a task is there twice")
        for (client, _, dispatched, _), row, (time, _, _, (*_, started)) in zip(
            running, rows, state["clock"]["events"], strict=True
        ):
            record = self._records[row]
            if (client, time) != (record.client, record.finished):
                raise ValueError(f"task {row} is not that of the trace")
            if started != max(dispatched, record.started):
                raise ValueError(f"task {row} did not start at {started!r}")
        endless = {client for client, *_ in waiting}
        for client, mine in self._by_client(everything).items():
            ahead = sum(i in left for i in mine)
            if any(i not in left for i in mine[:ahead]) or (ahead and client in endless):
                raise ValueError(f"the tasks of {client!r} are not dispatched in the order of the trace")

    def _restore_jobs(self, waiting: list[Job[C]], running: list[Job[C]]) -> None:
        self._unrecorded = waiting
