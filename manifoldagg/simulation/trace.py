"""Traces with one record for each task, trace files, and a scheduler that replays a trace."""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from manifoldagg._io import atomic_write
from manifoldagg._validation import check_count, check_number, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.simulation.delays import set_fields
from manifoldagg.simulation.schedulers import Completion, Scheduler, normalize_client, parse_client

__all__ = ["ReplayScheduler", "TaskRecord", "check_records", "read_trace", "write_trace"]

C = TypeVar("C", bound=int | str)


@dataclass(frozen=True)
class TaskRecord(Generic[C]):
    """The record of one client task in a trace. All times are in virtual seconds.

    Attributes:
        client: the client that ran the task, an int or a str.
        work: the amount of work of the task. A client's delay is the time for one unit of work.
        dispatched: the time at which the task was dispatched.
        started: the time at which the client started the task, at least `dispatched`.
        finished: the time at which the client finished the task, at least `started`.
        staleness: the staleness of the update, in model versions.

    Raises:
        ArgumentError: if a field is invalid. The message names it.
    """

    client: C
    work: float
    dispatched: float
    started: float
    finished: float
    staleness: int

    def __post_init__(self) -> None:
        set_fields(self, client=normalize_client(self.client))
        set_fields(self, work=check_number("work", self.work, at_least=0))
        set_fields(self, dispatched=check_number("dispatched", self.dispatched, at_least=0))
        set_fields(self, started=check_number("started", self.started, at_least=self.dispatched))
        set_fields(self, finished=check_number("finished", self.finished, at_least=self.started))
        set_fields(self, staleness=check_count("staleness", self.staleness, at_least=0))

    def __deepcopy__(self, memo: object) -> "TaskRecord[C]":
        return self

    @staticmethod
    def from_completion(completion: Completion, staleness: int | None = None) -> "TaskRecord[Any]":
        """Convert a completion to a record. The default `staleness` is its relative delay."""
        late = completion.relative_delay if staleness is None else staleness
        return TaskRecord(
            completion.client, completion.work, completion.dispatched, completion.started, completion.time, late
        )


def write_trace(path: Path | str, records: Iterable[TaskRecord[Any]]) -> None:
    """Write a trace as a CSV file with exact numbers. The file is written atomically.

    Args:
        path: the path of the CSV file. An existing file is replaced.
        records: the records of the tasks.

    Raises:
        ArgumentError: if the file cannot be written, or if the name of a client is a string that would be read as an
            integer.
    """
    path = Path(path)
    records = check_records(records)
    for record in records:
        if isinstance(record.client, str) and parse_client(record.client) != record.client:
            raise ArgumentError(f"records: expected names that are not integers, got {record.client!r}")
    try:
        with atomic_write(path) as draft, draft.open("w", newline="", encoding="utf-8") as file:
            # Quotes preserve a carriage return in a name.
            table = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
            table.writerows([_COLUMNS, *map(astuple, records)])
    except (OSError, UnicodeEncodeError) as error:
        raise ArgumentError(f"path: {path} cannot be written: {getattr(error, 'strerror', None) or error}") from None


def read_trace(path: Path | str) -> list[TaskRecord[Any]]:
    """Read a trace that `write_trace` wrote.

    Args:
        path: the path of the CSV file.

    Raises:
        ArgumentError: if the file is invalid. The message names the file and the line.
    """
    records = []
    line = 1
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            table = csv.reader(file, strict=True)
            if next(table, None) != list(_COLUMNS):
                raise ArgumentError(f"expected the columns {', '.join(_COLUMNS)}")
            line = 2
            for client, *numbers, staleness in table:
                work, dispatched, started, finished = map(float, numbers)
                records.append(TaskRecord(parse_client(client), work, dispatched, started, finished, int(staleness)))
                line = table.line_num + 1
    except OSError as error:
        raise ArgumentError(f"path: {path} cannot be read: {error.strerror or error}") from None
    except (TypeError, ValueError, csv.Error) as error:
        raise ArgumentError(f"path: {path}, line {line}: {error}") from None
    return records


def check_records(records: Iterable[TaskRecord[C]]) -> list[TaskRecord[C]]:
    """Return `records` as a list.

    Raises:
        ArgumentError: if an element is not a `TaskRecord`. The message contains the first such element.
    """
    records = list(records)
    for i, record in enumerate(records):
        if not isinstance(record, TaskRecord):
            raise ArgumentError(f"records[{i}]: expected a TaskRecord, got {short_repr(record)}")
    return records


class ReplayScheduler(Scheduler[C]):
    """A scheduler that replays a recorded trace of tasks.

    Each call of `dispatch` schedules the next recorded task of the given client. The task finishes at its recorded
    time, even if its amount of work differs from the recorded one. Several methods can therefore run with the same
    order of events, and a measured run can be repeated with another rule. If a client has no further recorded task, its
    task never finishes.

    Args:
        records: the records in order of `finished`.

    Raises:
        ArgumentError: if the records are not in order.

    Example:
        >>> trace = [TaskRecord("a", 1.0, 0.0, 0.0, 2.0, 0), TaskRecord("b", 1.0, 0.0, 0.0, 3.0, 1)]
        >>> replay = ReplayScheduler(trace)
        >>> replay.dispatch("b", work=1.0); replay.dispatch("a", work=1.0)
        >>> replay.next().client, replay.next().time
        ('a', 3.0)
    """

    allows_queueing = True

    def __init__(self, records: Sequence[TaskRecord[C]]) -> None:
        super().__init__(np.random.default_rng(0))
        self._records = check_records(records)
        for i, (before, record) in enumerate(pairwise(self._records), start=1):
            if record.finished < before.finished:
                raise ArgumentError(
                    f"records[{i}]: expected them in order of `finished`, "
                    f"got {record.finished:g} after {before.finished:g}"
                )
        # The remaining rows of each client in reverse order, so that the next row is the last one.
        self._remaining: dict[C, list[int]] = {}
        for i in reversed(range(len(self._records))):
            self._remaining.setdefault(self._records[i].client, []).append(i)

    def dispatch(self, client: C, work: float) -> None:
        """Dispatch a client's next recorded task.

        Raises:
            ArgumentError: if the task finished in the past, or `work` is negative or not a number.
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
        self._count_in(client)


_COLUMNS = tuple(field.name for field in fields(TaskRecord))
