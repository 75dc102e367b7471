"""Prediction of the order in which a run needs the results of its tasks in flight."""

import copy
import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from manifoldagg.errors import ArgumentError
from manifoldagg.simulation.dataset import TaskId
from manifoldagg.simulation.event_loop import DispatchEvent, DropoutEvent, EventLoop

__all__ = ["Lookahead"]

RECOPY_FACTOR = 4
"""The number of events in the copy that one event of the run pays for. After a wrong prediction, the event loop is
copied again when the previous copy has been paid for."""
CLIENTS_PER_EVENT = 64
"""The number of clients whose state can be copied at the cost of processing one event."""


class Lookahead:
    """A predictor of the order in which a run will need the results of its tasks in flight.

    The predictor copies the event loop and runs the copy ahead of the original, under two assumptions:

    - The server accepts every update.
    - Each task needs as much work as the previous task of its client.

    After a wrong prediction, the predictor discards the copy and later makes a new one. Without a copy, for example
    because the event loop cannot be copied, the predicted order is the order of dispatch.

    Args:
        event_loop: the event loop of the run.
        is_over: a function that returns whether the run ends before the next event of an event loop.
        task_cost: a function that returns the work of a client's first task.
    """

    def __init__(
        self, event_loop: EventLoop, is_over: Callable[[EventLoop], bool], task_cost: Callable[[int], float]
    ) -> None:
        self._event_loop = event_loop
        self._is_over = is_over
        self._task_cost = task_cost
        self._last_work: dict[int, float] = {}
        self._in_flight: dict[TaskId, None] = {}
        self._cost = 0.0
        self._copy: EventLoop | None = None
        # A prediction is the work of a dispatched task, or whether the update of a task is accepted.
        self._predicted: deque[tuple[TaskId, float | bool]] = deque()
        self._order: dict[TaskId, None] = {}

    def on_dispatch(self, task_id: TaskId, work: float) -> None:
        """Record a dispatch of the event loop."""
        self._last_work[task_id.client] = work
        self._in_flight[task_id] = None
        self._compare(task_id, work)

    def on_completion(self, task_id: TaskId, accepted: bool) -> None:
        """Record a completion of the event loop."""
        self._compare(task_id, accepted)
        self.on_dropout([task_id])

    def on_dropout(self, task_ids: Sequence[TaskId]) -> None:
        """Record the loss of tasks."""
        for task_id in task_ids:
            del self._in_flight[task_id]
            self._order.pop(task_id, None)

    def next_tasks(self, limit: int) -> list[TaskId]:
        """Return up to `limit` tasks in flight, in the order in which they will be needed."""
        if self._copy is None and self._cost <= 0:
            try:
                self._copy = copy.deepcopy(self._event_loop)
                self._cost = len(self._in_flight) + len(self._event_loop.clients) / CLIENTS_PER_EVENT
            except TypeError:  # a scheduler with an open file, for instance
                self._cost = math.inf
        needed = [task_id for task_id in self._order if task_id in self._in_flight]
        while self._copy is not None and len(needed) < min(limit, len(self._in_flight)):
            if (step := self._advance()) is None:
                break
            self._predicted.append(step)
            if step[0] in self._order and step[0] in self._in_flight:
                needed.append(step[0])
        return list(islice(self._in_flight if self._copy is None else needed, limit))

    def _compare(self, task_id: TaskId, value: float | bool) -> None:
        """Discard the copy if it did not predict this event of the run."""
        self._cost -= RECOPY_FACTOR
        if self._copy is None:
            return
        if (self._predicted.popleft() if self._predicted else self._advance(value)) != (task_id, value):
            self._copy = None
            self._predicted = deque()
            self._order = {}

    def _advance(self, value: float | bool | None = None) -> tuple[TaskId, float | bool] | None:
        """Advance the copied event loop to its next dispatch or completion, and return the task and `value`.

        By default, the method predicts `value`. At the end of the copy, it returns `None`.
        """
        # The value is the work of a dispatched task, or whether the server accepts the update of a completed task.
        ahead = self._copy
        if ahead is None or (ahead.pending_event is None and self._is_over(ahead)):
            return None
        self._cost += 1
        try:
            event = ahead.next() if ahead.pending_event is None else ahead.pending_event
            while isinstance(event, DropoutEvent):
                event = ahead.next()
            if isinstance(event, DispatchEvent):
                if value is None:
                    known = event.client in self._last_work
                    value = self._last_work[event.client] if known else self._task_cost(event.client)
                return ahead.submit(event.client, value), value
        except ArgumentError:
            return None
        ahead.acknowledge(value is None or bool(value))
        self._order[event.task_id] = None
        return event.task_id, value is None or value
