"""A virtual clock: events in order of time, ties in order of scheduling."""

import heapq
from typing import Generic, TypeVar

from manifoldagg.errors import ManifoldAggError, check_number

T = TypeVar("T")


class VirtualClock(Generic[T]):
    """An event heap that draws nothing and sleeps never.

    Example:
        >>> clock = VirtualClock()
        >>> clock.schedule(2.0, "late"); clock.schedule(1.0, "early"); clock.schedule(1.0, "tie")
        >>> [clock.next() for _ in range(3)]
        [(1.0, 'early'), (1.0, 'tie'), (2.0, 'late')]
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, T]] = []
        self._scheduled = 0

    def __len__(self) -> int:
        return len(self._events)

    def schedule(self, delay: float, event: T) -> None:
        """Let `event` happen `delay` >= 0 from now.

        Raises:
            ArgumentError: if `delay` is negative or no number.
        """
        time = self.now + check_number("delay", delay, at_least=0)
        heapq.heappush(self._events, (time, self._scheduled, event))
        self._scheduled += 1

    def next(self) -> tuple[float, T]:
        """Advance to the earliest event: its time and itself.

        Raises:
            ManifoldAggError: if nothing is scheduled.
        """
        if not self._events:
            raise ManifoldAggError("the clock has no event: schedule one before asking for the next")
        self.now, _, event = heapq.heappop(self._events)
        return self.now, event
