"""Lookahead: a prediction of the order in which a run needs its tasks in flight."""

import bisect
import copy
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from manifoldagg.errors import ArgumentError
from manifoldagg.simulation.event_loop import DispatchEvent, DropoutEvent, EventLoop, SimulationEvent
from manifoldagg.simulation.federated_dataset import TaskId

__all__ = ["Lookahead"]

RECOPY_FACTOR = 4
"""After a wrong copy the next is made when one event in so many has passed of those that it looked at."""
CLIENTS_PER_EVENT = 64
"""So many clients are copied in the time of one event."""


class _Step(NamedTuple):
    """A recorded input of an event loop: the work of a dispatched task, or whether its update was accepted."""

    task_id: TaskId
    work: float | None = None
    accepted: bool | None = None


class Lookahead:
    """A prediction of the next completions among the tasks in flight.

    A copy of the event loop runs ahead of it, on the assumption that every update is accepted and that a client is
    given as much work as last time. While that is so, the order is exact, whatever the scheduler, changes included.
    Where something else happens the copy is made anew, but not so often that copies would cost many times as much as
    the event loop; until then the order is a guess. So it is where an event loop cannot be copied.

    Args:
        event_loop: that is looked ahead on, at its beginning. What it is told is told here too, at once.
        num_updates: updates of the event loop; later completions are not needed.
        task_cost: what a client will be given that was given nothing so far.
    """

    def __init__(self, event_loop: EventLoop, num_updates: int, task_cost: Callable[[int], float]) -> None:
        self._event_loop = event_loop
        self._num_updates = num_updates
        self._task_cost = task_cost
        self._last_work: dict[int, float] = {}
        # Tasks in flight; those with known or predicted completion times are in order.
        self._in_flight: dict[TaskId, None] = {}
        self._queue: list[tuple[float, TaskId]] = []
        self._positions: dict[TaskId, float] = {}
        # What the copy was told and the event loop not yet.
        self._copy: EventLoop | None = None
        self._predicted: deque[_Step] = deque()
        self._cost = 0.0
        self._events_since_copy = 0

    def on_dispatch(self, task_id: TaskId, work: float) -> None:
        """Record a dispatch of the event loop."""
        self._last_work[task_id.client] = work
        self._observe(_Step(task_id, work=work))
        self._in_flight[task_id] = None
        if self._copy is None or task_id in self._positions:
            self._enqueue(task_id)

    def on_completion(self, task_id: TaskId, accepted: bool) -> None:
        """Record a completion of the event loop."""
        self._observe(_Step(task_id, accepted=accepted))
        self._remove(task_id)

    def on_dropout(self, task_ids: Sequence[TaskId]) -> None:
        """Record the loss of tasks."""
        for key in task_ids:
            self._remove(key)

    def next_tasks(self, limit: int) -> list[TaskId]:
        """Return up to `limit` tasks in flight, in the order in which they will be needed."""
        if self._copy is None and self._events_since_copy >= self._cost / RECOPY_FACTOR:
            try:
                self._copy = copy.deepcopy(self._event_loop)
            except TypeError:  # a scheduler with a file, for instance: what is known is a guess then
                self._cost = math.inf
                return [key for _, key in self._queue[:limit]]
            self._cost = len(self._in_flight) + len(self._event_loop.clients) / CLIENTS_PER_EVENT
            self._events_since_copy = 0
            self._queue = []
            self._positions = {}
        while self._copy is not None and len(self._queue) < min(limit, len(self._in_flight)):
            expected = self._advance_copy()
            if expected is None:
                break
            self._predicted.append(expected)
        return [key for _, key in self._queue[:limit]]

    def _observe(self, step: _Step) -> None:
        """The event loop was told; the copy expected it, is told now, or was wrong."""
        self._events_since_copy += 1
        if self._copy is None:
            return
        expected = self._predicted.popleft() if self._predicted else self._advance_copy(step)
        if expected != step:
            self._copy = None
            self._predicted.clear()
            self._positions = {key: place for place, key in self._queue}
            for key in self._in_flight:
                if key not in self._positions:
                    self._enqueue(key)

    def _advance_copy(self, step: _Step | None = None) -> _Step | None:
        """Tell the copy what it is told next, as the event loop was or as is assumed; `None` if nothing follows."""
        ahead = self._copy
        if ahead is None or (ahead.pending_event is None and ahead.num_completed >= self._num_updates):
            return None
        self._cost += 1
        try:
            event: SimulationEvent = ahead.next() if ahead.pending_event is None else ahead.pending_event
            while isinstance(event, DropoutEvent):
                event = ahead.next()
            if isinstance(event, DispatchEvent):
                work = self._last_work.get(event.client) if step is None else step.work
                work = self._task_cost(event.client) if work is None else work
                return _Step(ahead.submit(event.client, work), work=work)
        except ArgumentError:
            return None
        accepted = step is None or bool(step.accepted)
        ahead.acknowledge(accepted)
        self._positions[event.task_id] = ahead.num_completed
        if event.task_id in self._in_flight:
            self._enqueue(event.task_id)
        return _Step(event.task_id, accepted=accepted)

    def _enqueue(self, task_id: TaskId) -> None:
        bisect.insort(self._queue, (self._positions.get(task_id, math.inf), task_id))

    def _remove(self, task_id: TaskId) -> None:
        """Remove a task that is no longer in flight."""
        del self._in_flight[task_id]
        entry = (self._positions.pop(task_id, math.inf), task_id)
        place = bisect.bisect_left(self._queue, entry)
        if place < len(self._queue) and self._queue[place] == entry:
            del self._queue[place]
