"""Foresight: which of the tasks under way a run will need next, so that they are trained in that order."""

import bisect
import copy
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from manifoldagg.errors import ArgumentError
from manifoldagg.simulation.event_loop import Ask, Course, Event, Lost
from manifoldagg.simulation.federated_dataset import Key

__all__ = ["Foresight"]

PATIENCE = 4
"""After a wrong twin the next is made when one event in so many has passed of those that it looked at."""
COPIED = 64
"""So many clients are copied in the time of one event."""


class _Told(NamedTuple):
    """What a course was told of a task: its work when it was given, or whether its update was accepted."""

    key: Key
    work: float | None = None
    accepted: bool | None = None


class Foresight:
    """Which of the tasks that are under way will be answered next, and next but one.

    A twin of the course runs ahead of it, on the assumption that every update is accepted and that a client is given as
    much work as last time. While that is so, the order is exact, whatever the scheduler, changes included. Where
    something else happens the twin is made anew, but not so often that twins would cost many times as much as the
    course; until then the order is a guess. So it is where a course cannot be copied.

    Args:
        course: that is looked ahead on, at its beginning. What it is told is told here too, at once.
        rounds: answers of the course; what is answered after them is not needed.
        work: what a client will be given that was given nothing so far.
    """

    def __init__(self, course: Course, rounds: int, work: Callable[[int], float]) -> None:
        self._course = course
        self._rounds = rounds
        self._work = work
        self._last: dict[int, float] = {}
        # Tasks that are under way; in order, those of which it is known, or guessed, when they are answered.
        self._out: dict[Key, None] = {}
        self._line: list[tuple[float, Key]] = []
        self._places: dict[Key, float] = {}
        # What the twin was told and the course not yet.
        self._twin: Course | None = None
        self._ahead: deque[_Told] = deque()
        self._cost = 0.0
        self._heard = 0

    def gave(self, key: Key, work: float) -> None:
        """The course has given a task."""
        self._last[key.client] = work
        self._hear(_Told(key, work=work))
        self._out[key] = None
        if self._twin is None or key in self._places:
            self._line_up(key)

    def settled(self, key: Key, accepted: bool) -> None:
        """The course was told of an answer."""
        self._hear(_Told(key, accepted=accepted))
        self._forget(key)

    def lost(self, keys: Sequence[Key]) -> None:
        """The course has lost tasks."""
        for key in keys:
            self._forget(key)

    def coming(self, limit: int) -> list[Key]:
        """At most so many tasks that are given and not answered, in the order in which they will be needed."""
        if self._twin is None and self._heard >= self._cost / PATIENCE:
            try:
                self._twin = copy.deepcopy(self._course)
            except TypeError:  # a scheduler with a file, for instance: what is known is a guess then
                self._cost = math.inf
                return [key for _, key in self._line[:limit]]
            self._cost = len(self._out) + len(self._course.clients) / COPIED
            self._heard = 0
            self._line = []
            self._places = {}
        while self._twin is not None and len(self._line) < min(limit, len(self._out)):
            expected = self._step()
            if expected is None:
                break
            self._ahead.append(expected)
        return [key for _, key in self._line[:limit]]

    def _hear(self, told: _Told) -> None:
        """The course was told; the twin expected it, is told now, or was wrong."""
        self._heard += 1
        if self._twin is None:
            return
        expected = self._ahead.popleft() if self._ahead else self._step(told)
        if expected != told:
            self._twin = None
            self._ahead.clear()
            self._places = {key: place for place, key in self._line}
            for key in self._out:
                if key not in self._places:
                    self._line_up(key)

    def _step(self, told: _Told | None = None) -> _Told | None:
        """Tell the twin what it is told next, as the course was or as is assumed; `None` if nothing follows."""
        twin = self._twin
        if twin is None or (twin.pending is None and twin.answers >= self._rounds):
            return None
        self._cost += 1
        try:
            event: Event = twin.next() if twin.pending is None else twin.pending
            while isinstance(event, Lost):
                event = twin.next()
            if isinstance(event, Ask):
                work = self._last.get(event.client) if told is None else told.work
                work = self._work(event.client) if work is None else work
                return _Told(twin.give(event.client, work), work=work)
        except ArgumentError:
            return None
        accepted = told is None or bool(told.accepted)
        twin.settle(accepted)
        self._places[event.key] = twin.answers
        if event.key in self._out:
            self._line_up(event.key)
        return _Told(event.key, accepted=accepted)

    def _line_up(self, key: Key) -> None:
        bisect.insort(self._line, (self._places.get(key, math.inf), key))

    def _forget(self, key: Key) -> None:
        """A task that is not under way any more."""
        del self._out[key]
        entry = (self._places.pop(key, math.inf), key)
        place = bisect.bisect_left(self._line, entry)
        if place < len(self._line) and self._line[place] == entry:
            del self._line[place]
