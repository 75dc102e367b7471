"""A virtual clock for discrete-event simulation, which returns scheduled events in chronological order."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any, Generic, TypeVar

import numpy as np

from manifoldagg._validation import check_count, check_number, short_repr
from manifoldagg.errors import ArgumentError, ManifoldAggError

__all__ = ["VirtualClock", "check_generator"]

T = TypeVar("T")


class VirtualClock(Generic[T]):
    """A priority queue of events in virtual time. Simultaneous events are returned in the order in which they were
    scheduled.

    Args:
        generator: a random generator for the users of the clock. The clock itself draws no numbers. The default has
            seed 0.

    Raises:
        ArgumentError: if `generator` is invalid.

    Example:
        >>> clock = VirtualClock()
        >>> clock.schedule(2.0, "late"); clock.schedule(1.0, "early"); clock.schedule(1.0, "tie")
        >>> [clock.next() for _ in range(3)]
        [(1.0, 'early'), (1.0, 'tie'), (2.0, 'late')]
    """

    def __init__(self, generator: np.random.Generator | None = None) -> None:
        self.generator = check_generator(np.random.default_rng(0) if generator is None else generator)
        self.now = 0.0
        self._events: list[tuple[float, int, int, T]] = []
        self._scheduled = 0
        # Events that are not in this set were cancelled. They may remain in the heap, except as the first event.
        self._pending: set[int] = set()

    def __len__(self) -> int:
        return len(self._pending)

    def schedule(self, delay: float, event: T) -> None:
        """Schedule `event` after `delay` >= 0 seconds of virtual time."""
        self.schedule_at(self.now + check_number("delay", delay, at_least=0), event)

    def schedule_at(self, time: float, event: T, *, order: int | None = None) -> int:
        """Schedule `event` at `time` >= now.

        Args:
            time: the time of the event. `next` returns exactly this number.
            event: any object.
            order: the order among events at the same time. The default is the number of events scheduled before.

        Returns:
            The identifier of the event for `cancel`: the number of events scheduled before.

        Raises:
            ArgumentError: if `time` is in the past or not a finite number.
        """
        if not (type(time) is float and self.now <= time < inf):
            time = check_number("time", time, at_least=self.now)
        count = self._scheduled
        heappush(self._events, (time, count if order is None else order, count, event))
        self._pending.add(count)
        self._scheduled = count + 1
        return count

    def peek(self) -> float:
        """Return the time of the earliest event, or infinity if no event is scheduled."""
        return self._events[0][0] if self._events else inf

    def next(self) -> tuple[float, T]:
        """Advance to the earliest event and return its time and the event.

        Raises:
            ManifoldAggError: if there is no event.
        """
        if not self._events:
            raise ManifoldAggError("clock: expected a scheduled event, got an empty queue; call `schedule` first")
        time, _, count, event = heappop(self._events)
        self.now = time
        self._pending.remove(count)
        self._pop_cancelled()
        return time, event

    def advance(self, time: float) -> None:
        """Advance the time to `time`.

        Raises:
            ArgumentError: if there is an event before `time`.
        """
        self.now = check_number("time", time, at_least=self.now, at_most=self.peek())

    def cancel(self, event_id: int) -> None:
        """Cancel one scheduled event, identified by the return value of `schedule_at`.

        Raises:
            ArgumentError: if the event is not scheduled.
        """
        if check_count("event_id", event_id, at_least=0) not in self._pending:
            raise ArgumentError(f"event_id: expected an identifier of a scheduled event, got {short_repr(event_id)}")
        self._pending.remove(event_id)
        self._pop_cancelled()
        if len(self._events) > 2 * len(self):
            self._compact()

    def cancel_where(self, predicate: Callable[[T], bool]) -> list[T]:
        """Cancel and return the scheduled events that satisfy `predicate`, in linear time."""
        self._compact()
        gone = [entry for entry in self._events if predicate(entry[3])]
        self._pending.difference_update(entry[2] for entry in gone)
        self._compact()
        return [entry[3] for entry in sorted(gone, key=_sort_key)]

    def _pop_cancelled(self) -> None:
        """Remove cancelled events from the front of the heap."""
        while self._events and self._events[0][2] not in self._pending:
            heappop(self._events)

    def _compact(self) -> None:
        """Remove all cancelled events from the heap."""
        if len(self._events) > len(self):
            self._events = [entry for entry in self._events if entry[2] in self._pending]
            heapify(self._events)


def check_generator(generator: np.random.Generator) -> np.random.Generator:
    """Return `generator`, or raise an `ArgumentError` if it is not a NumPy generator."""
    if not isinstance(generator, np.random.Generator):
        raise ArgumentError(f"generator: expected a numpy.random.Generator, got {type(generator).__name__}")
    return generator


def _sort_key(entry: tuple[float, int, int, Any]) -> tuple[float, int, int]:
    return entry[:3]
