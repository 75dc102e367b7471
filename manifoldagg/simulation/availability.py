"""Client availability in a simulation: clients join, leave, fail and return at given virtual times."""

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from manifoldagg._validation import check_choice, check_number, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.simulation.clock import check_generator
from manifoldagg.simulation.delays import Delay, set_fields
from manifoldagg.simulation.schedulers import Completion, Scheduler, normalize_client, parse_client

__all__ = ["Availability", "AvailabilityChange", "AvailabilityFactory", "AvailabilityTrace", "churn", "read_changes"]

C = TypeVar("C", bound=int | str)
CHANGE_KINDS = ("join", "leave", "fail", "return")
COLUMNS = ["time", "client", "kind"]


@dataclass(frozen=True)
class AvailabilityChange(Generic[C]):
    """An event at which one client becomes available or unavailable.

    Attributes:
        time: the time of the event, in virtual seconds.
        client: the identifier of the client, an integer or a string.
        kind: the kind of the event:

            - `"join"`: the client participates for the first time.
            - `"leave"`: the client finishes its tasks in flight and accepts no new tasks.
            - `"fail"`: the client becomes unavailable immediately, and its tasks in flight are lost.
            - `"return"`: the client participates again after `"leave"` or `"fail"`.
        lost_tasks: the number of tasks that are lost through a `"fail"` event. `AvailabilityTrace.next` sets this
            number.

    Raises:
        ArgumentError: if a field is invalid. The message names it.
    """

    time: float
    client: C
    kind: str
    lost_tasks: int = 0

    def __post_init__(self) -> None:
        set_fields(self, time=check_number("time", self.time, at_least=0), client=normalize_client(self.client))
        check_choice("kind", self.kind, CHANGE_KINDS)

    def __deepcopy__(self, memo: object) -> "AvailabilityChange[C]":
        return self


class AvailabilityTrace(Generic[C]):
    """A wrapper around a scheduler, in which clients become available and unavailable at given times.

    `next` returns task completions and availability changes in chronological order. If a change and a completion happen
    at the same time, `next` returns the change first. Simultaneous changes keep the order in which they were passed.

    The caller must react to each change:

    - When a client joins or returns, dispatch a task to it, unless it already has a task in flight (`is_idle` returns
      false). This can occur because a client that leaves still finishes its tasks.
    - When a client fails, its tasks in flight are lost. Discard their tickets (the server's permissions to return one
      update).

    Args:
        scheduler: the scheduler of the tasks. No other code may use this scheduler.
        changes: the changes in any order. A client whose first change is not `"join"` is available from the start.
        available: further clients that are available from the start.

    Raises:
        ArgumentError: if a change is impossible, such as a change in the past or the return of an available client. The
            message names it.

    Example:
        >>> from manifoldagg.simulation.delays import Deterministic
        >>> from manifoldagg.simulation.schedulers import IndependentClients
        >>> clients = IndependentClients(Deterministic(2.0), np.random.default_rng(0))
        >>> changes = [AvailabilityChange(1.0, "a", "fail"), AvailabilityChange(5.0, "b", "join")]
        >>> crowd = AvailabilityTrace(clients, changes)
        >>> crowd.dispatch("a", work=1.0)
        >>> crowd.next()
        AvailabilityChange(time=1.0, client='a', kind='fail', lost_tasks=1)
        >>> crowd.next().kind, sorted(crowd.available)
        ('join', ['b'])
    """

    def __init__(
        self, scheduler: Scheduler[C], changes: Iterable[AvailabilityChange[C]], *, available: Iterable[C] = ()
    ) -> None:
        changes = list(changes)
        for i, change in enumerate(changes):
            if not isinstance(change, AvailabilityChange):
                raise ArgumentError(f"changes[{i}]: expected an AvailabilityChange, got {short_repr(change)}")
        self._scheduler = scheduler
        self._changes = sorted(changes, key=lambda change: change.time)
        first = {change.client: change.kind for change in reversed(self._changes)}
        self._initial = set(available) | {client for client, kind in first.items() if kind != "join"}
        self._num_applied = 0
        if self._changes and self._changes[0].time < scheduler.now:
            raise ArgumentError(f"changes: expected times >= {scheduler.now:g}, which is now, got {self._changes[0]}")
        known = set(self._initial)
        here = set(self._initial)
        for change in self._changes:
            state = "available" if change.client in here else "unavailable" if change.client in known else "unknown"
            expected = {"join": "unknown", "return": "unavailable"}.get(change.kind, "available")
            if state != expected:
                raise ArgumentError(f"changes: {change}: expected a client that is {expected}, got one that is {state}")
            known.add(change.client)
            _apply(change, here)
        self._available = set(self._initial)

    @property
    def now(self) -> float:
        """The virtual time in seconds."""
        return self._scheduler.now

    @property
    def available(self) -> frozenset[C]:
        """The clients that accept tasks now."""
        return frozenset(self._available)

    def is_idle(self, client: C) -> bool:
        """Return whether a client is available and has no task in flight."""
        return client in self._available and not self._scheduler.num_in_flight(client)

    def dispatch(self, client: C, work: float) -> None:
        """Dispatch a task of `work` units.

        Raises:
            ArgumentError: if the client is not available, or the scheduler rejects the task.
        """
        if client not in self._available:
            raise ArgumentError(f"client: expected a client that is available at {self.now:g} s, got {client!r}")
        self._scheduler.dispatch(client, work)

    def peek(self) -> float:
        """Return the time of the next completion or availability change, or infinity."""
        change = self._changes[self._num_applied : self._num_applied + 1]
        return min(self._scheduler.peek(), *(c.time for c in change), inf)

    def next(self) -> Completion | AvailabilityChange[C]:
        """Return the next completion or availability change.

        Raises:
            ManifoldAggError: if there are neither tasks in flight nor later changes.
        """
        change = self._changes[self._num_applied] if self._num_applied < len(self._changes) else None
        if change is None or self._scheduler.peek() < change.time:
            return self._scheduler.next()
        self._scheduler.advance(change.time)
        self._num_applied += 1
        _apply(change, self._available)
        return replace(change, lost_tasks=self._scheduler.cancel(change.client)) if change.kind == "fail" else change


def churn(
    clients: Iterable[C], up: Delay, down: Delay, until: float, generator: np.random.Generator
) -> list[AvailabilityChange[C]]:
    """Generate random times at which each client repeatedly fails and then becomes available again.

    All clients are available at time 0.

    Args:
        clients: the clients.
        up: the distribution of the time from start or return to failure.
        down: the distribution of the time from failure to return.
        until: the latest time of a change.
        generator: the random generator. It draws all times of one client before the times of the next client.

    Returns:
        The changes for `AvailabilityTrace`, ordered by client.

    Raises:
        ArgumentError: if the mean of `up` plus `down` is 0, or `until` is not a number >= 0.

    Example:
        >>> from manifoldagg.simulation.delays import Deterministic
        >>> up, down = Deterministic(3.0), Deterministic(1.0)
        >>> [(c.time, c.kind) for c in churn(["a"], up, down, 5.0, np.random.default_rng(0))]
        [(3.0, 'fail'), (4.0, 'return')]
    """
    check_generator(generator)
    until = check_number("until", until, at_least=0)
    if not up.expected() + down.expected() > 0:
        raise ArgumentError("up, down: expected a positive time on average, got 0")
    changes = []
    for client in clients:
        time = up.draw(generator)
        here = True
        while time <= until:
            changes.append(AvailabilityChange(time, client, "fail" if here else "return"))
            here = not here
            time += (up if here else down).draw(generator)
    return changes


def read_changes(path: Path | str) -> list[AvailabilityChange[Any]]:
    """Read the availability changes of clients from a CSV file with the columns `time`, `client` and `kind`.

    A client name that is written as an integer becomes an `int`. Other names remain strings.

    Raises:
        ArgumentError: if the file is invalid. The message names the file and the line.
    """
    changes: list[AvailabilityChange[Any]] = []
    line = 1
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            table = csv.reader(file, strict=True, skipinitialspace=True)
            if next(table, None) != COLUMNS:
                raise ArgumentError(f"expected the columns {', '.join(COLUMNS)}")
            for row in table:
                line = table.line_num
                if len(row) != len(COLUMNS):
                    raise ArgumentError(f"expected {len(COLUMNS)} values, got {len(row)}")
                time, client, kind = row
                changes.append(AvailabilityChange(float(time), parse_client(client), kind))
    except OSError as error:
        raise ArgumentError(f"path: {path} cannot be read: {error.strerror or error}") from None
    except (ValueError, csv.Error) as error:
        raise ArgumentError(f"path: {path}, line {line}: {error}") from None
    return changes


def _apply(change: AvailabilityChange[C], available: set[C]) -> None:
    if change.kind in ("join", "return"):
        available.add(change.client)
    else:
        available.discard(change.client)


AvailabilityFactory: TypeAlias = Callable[[Sequence[int], np.random.Generator], Iterable[AvailabilityChange[int]]]
"""A function of the clients and a random generator that returns the availability changes of these clients."""
Availability: TypeAlias = Iterable[AvailabilityChange[int]] | AvailabilityFactory | None
"""The type of the argument `availability` of [`run`][manifoldagg.simulation.run]."""
