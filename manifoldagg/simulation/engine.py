"""The simulator of a run, which processes one event at a time."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from manifoldagg.errors import DivergenceError
from manifoldagg.federated import Message, Payload, Server
from manifoldagg.simulation.cost import Cost, Evaluation
from manifoldagg.simulation.evaluation import EvaluationLog
from manifoldagg.simulation.event_loop import CompletionEvent, DispatchEvent, DropoutEvent, EventLoop
from manifoldagg.simulation.executors.task_runner import TaskRunner
from manifoldagg.simulation.federated_dataset import TaskId
from manifoldagg.simulation.in_flight import InFlightTasks
from manifoldagg.simulation.lookahead import Lookahead
from manifoldagg.simulation.snapshot import EventLog, RunSnapshot
from manifoldagg.simulation.trace import TaskRecord

__all__ = ["Simulator", "UpdateEvent"]


@dataclass(frozen=True)
class UpdateEvent:
    """The event of one processed update, for the callbacks of a run."""

    update_index: int
    client: int
    message: Message
    payload: Payload


@dataclass
class Simulator:
    """A simulated run that stops between two events.

    Attributes:
        metadata: what it follows from.
        event_loop: the order of dispatches and completions.
        task_cost: what a client is given, if it is asked now.
        lookahead: receives all inputs of the event loop.
        server: applies the updates.
        in_flight: the tickets that are out.
        task_runner: who trains.
        evaluation_log: the evaluations.
        event_log: what happened.
        cost: so far.
        started: when, in seconds of the wall clock, as if it had never been interrupted.
        on_update: called with each update.
    """

    metadata: Mapping[str, Any]
    event_loop: EventLoop
    task_cost: Callable[[int], float]
    lookahead: Lookahead
    server: Server
    in_flight: InFlightTasks
    task_runner: TaskRunner
    evaluation_log: EvaluationLog
    event_log: EventLog
    cost: Cost
    started: float
    on_update: Callable[[UpdateEvent], None] | None

    @property
    def seconds(self) -> float:
        """The wall-clock seconds so far, without evaluation."""
        return time.perf_counter() - self.started - self.evaluation_log.seconds

    def advance(self) -> bool:
        """Process the next event and return whether it was an update."""
        event = self.event_loop.next()
        self.event_log.num_events += 1
        if isinstance(event, DispatchEvent):
            self._dispatch(event.client)
        elif isinstance(event, DropoutEvent):
            self._drop(event.task_ids)
        else:
            self._complete(event)
        return isinstance(event, CompletionEvent)

    def evaluate(self) -> Evaluation:
        """Append a row to the log: the metrics of the model, and the staleness since the last evaluation."""
        seen = self.evaluation_log.evaluations[-1].updates
        return self.evaluation_log.record(
            self.server, self.cost, [task.staleness for task in self.event_log.trace[seen:]]
        )

    def snapshot(self) -> RunSnapshot:
        """Return a snapshot of the complete state."""
        return RunSnapshot(
            metadata=self.metadata,
            server=self.server.snapshot(),
            tickets=self.in_flight.tickets,
            client_states=self.task_runner.client_states,
            cost=self.cost,
            event_log=self.event_log,
            num_events=self.event_log.num_events,
            num_dispatched=len(self.event_log.work),
            evaluation_log=self.evaluation_log,
            num_evaluations=len(self.evaluation_log.evaluations),
            client_accuracy=self.evaluation_log.client_accuracy,
            seconds=self.seconds,
            evaluation_seconds=self.evaluation_log.seconds,
        )

    def _dispatch(self, client: int) -> None:
        ticket = self.in_flight.dispatch(client)
        self.cost = replace(self.cost, bytes_down=self.cost.bytes_down + ticket.message.nbytes)
        units = self.task_cost(client)
        key = self.event_loop.submit(client, units)
        self.event_log.work.append(units)
        self.lookahead.on_dispatch(key, units)
        self.in_flight.add(key, ticket)
        self.task_runner.submit(key, ticket.message)

    def _drop(self, task_ids: Sequence[TaskId]) -> None:
        for key in task_ids:
            self.server.drop(self.in_flight.pop(key))
        self.lookahead.on_dropout(task_ids)
        self.task_runner.cancel(task_ids)

    def _complete(self, event: CompletionEvent) -> None:
        ticket = self.in_flight.pop(event.task_id)
        trace = self.event_log.trace
        trace.append(TaskRecord.from_completion(event.completion, self.server.version - ticket.version))
        sent = 0
        try:
            payload = self.task_runner.result(event.task_id)
        except DivergenceError:
            accepted = False
        else:
            sent = payload.nbytes
            if self.on_update is not None:
                self.on_update(UpdateEvent(len(trace), event.task_id.client, ticket.message, payload))
            accepted = self.server.receive(ticket, payload).accepted
        if not accepted:
            self.server.drop(ticket)
        self.event_log.accepted.append(accepted)
        self.cost = replace(
            self.cost,
            updates=len(trace),
            time=event.completion.time,
            gradients=self.cost.gradients + self.task_runner.num_gradients,
            bytes_up=self.cost.bytes_up + sent,
            rejected=self.cost.rejected + (not accepted),
        )
        self.event_loop.acknowledge(accepted)
        self.lookahead.on_completion(event.task_id, accepted)
