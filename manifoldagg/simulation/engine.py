"""The simulation engine, which processes the dispatches, completions and dropouts of tasks in virtual time."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, TypeAlias

from immutables import Map

from manifoldagg._validation import check_choice, check_count, check_instance, check_number, short_repr
from manifoldagg.errors import ArgumentError, DivergenceError
from manifoldagg.federated import CheckpointPolicy, Message, Payload, Server, ServerLimits, Ticket
from manifoldagg.federated.server.durability.fingerprint import fingerprint
from manifoldagg.federated.server.durability.persistent_map import PersistentOrderedMap
from manifoldagg.federated.types import Averaging, check_averaging
from manifoldagg.manifolds import ParameterSpace
from manifoldagg.simulation.availability import Availability
from manifoldagg.simulation.checkpointing import EventLog, LoadedRun, RunCheckpointer, RunSnapshot
from manifoldagg.simulation.client_task import MessageTensors
from manifoldagg.simulation.cost import Cost, Evaluation
from manifoldagg.simulation.dataset import FederatedDataset, TaskId, check_federation
from manifoldagg.simulation.delays import Delays
from manifoldagg.simulation.evaluation import EvaluationLog
from manifoldagg.simulation.event_loop import CompletionEvent, DispatchEvent, DropoutEvent, EventLoop, build_event_loop
from manifoldagg.simulation.executors import ExecutorLike
from manifoldagg.simulation.lookahead import Lookahead
from manifoldagg.simulation.metadata import run_metadata
from manifoldagg.simulation.method import Method, RunResult, check_method
from manifoldagg.simulation.schedulers import SchedulerLike
from manifoldagg.simulation.task_runner import TaskRunner
from manifoldagg.simulation.trace import TaskRecord

__all__ = ["TASK_COSTS", "Simulator", "UpdateEvent", "run"]

TASK_COSTS = ("fixed", "trainer")
AveragingLike: TypeAlias = Averaging | Callable[[ParameterSpace], Averaging] | None
"""A weight average, a function that creates one for a `ParameterSpace`, or `None`."""
SERVER_LIMITS = ServerLimits(history_size=0, receipt_cache_size=0)
"""Limits that disable the model history and the receipt cache of the server, which a simulation does not need."""


@dataclass(frozen=True)
class UpdateEvent:
    """One update in a run. The run passes it to the callback `on_update`.

    Attributes:
        update_index: the index of the update in the run, counted from 1.
        client: the client that sent the update.
        message: the message that the client received before its training.
        payload: the payload that the client returned after its training.
    """

    update_index: int
    client: int
    message: Message
    payload: Payload


class Simulator:
    """A simulated run that advances event by event and can stop between any two events.

    Each call of `advance` processes one event: the server dispatches a task, a client completes a task, or tasks are
    lost. The arguments are those of `run`, with these differences:

    - `method` must already be bound to the clients.
    - `event_loop` replaces `scheduler`, `delays`, `availability`, `concurrency` and `refill`.
    - `duration` may be infinite.
    - `metadata` contains all settings of the run.
    - `loaded` is the checkpoint of an interrupted run, or `None`.

    Attributes:
        cost: the cost of the run so far.
        event_log: the events so far.
        evaluation_log: the evaluations so far.
        task_runner: the runner that trains the clients.
    """

    def __init__(
        self,
        federation: FederatedDataset,
        method: Method,
        event_loop: EventLoop,
        metadata: Mapping[str, Any],
        *,
        num_updates: int | None,
        duration: float,
        task_cost: str,
        averaging: AveragingLike,
        executor: ExecutorLike,
        eval_starts: bool,
        loaded: LoadedRun | None,
        on_update: Callable[[UpdateEvent], None] | None,
    ) -> None:
        self._started = time.perf_counter()
        self._federation = federation
        self._metadata = metadata
        self._event_loop = event_loop
        self._on_update = on_update
        self._num_steps = getattr(method.trainer, "num_steps", None) if task_cost == "trainer" else None
        self._num_updates = inf if num_updates is None else num_updates
        self._duration = duration
        self._lookahead = Lookahead(event_loop, self._is_over, self._work)
        self._last_message: Message
        self._message_tensors = MessageTensors()
        model = federation.model()
        space = ParameterSpace.of(model)
        average = averaging if averaging is None or isinstance(averaging, Averaging) else averaging(space)
        self.evaluation_log = EvaluationLog(federation, average, eval_starts=eval_starts)
        rule: Any = method.rule
        client_states: Map[int, Any] = Map()
        # The maps are persistent, so that a snapshot takes constant time.
        self._tickets: PersistentOrderedMap[TaskId, Ticket] = PersistentOrderedMap()
        if loaded is None:
            sizes = {client: len(federation.train[client]) for client in federation.trainable_clients}
            self._server = Server.of(model, rule, weights=sizes, limits=SERVER_LIMITS, averaging=average)
            self.event_log = EventLog()
            self.cost = Cost()
            self.evaluation_log.record(self._server, self.cost)
        else:
            self._server = loaded.server(space, rule, average)
            self._tickets = loaded.tickets(self._server.space)
            self.event_log = loaded.replay(event_loop, self._lookahead)
            self.cost = loaded.cost
            self.evaluation_log.restore(
                loaded.evaluations, loaded.starts, loaded.client_accuracy, loaded.evaluation_seconds
            )
            client_states = loaded.client_states()
            self._started -= loaded.seconds + loaded.evaluation_seconds
        self.task_runner = TaskRunner(federation, method.trainer, executor, self._lookahead, client_states)
        for task_id, ticket in self._tickets.items():
            self._last_message = ticket.message
            self.task_runner.submit(task_id, ticket.message)

    @property
    def seconds(self) -> float:
        """The wall-clock seconds so far, without evaluation."""
        return time.perf_counter() - self._started - self.evaluation_log.seconds

    @property
    def is_over(self) -> bool:
        """Whether the run ends before the next event."""
        return self._is_over(self._event_loop)

    def advance(self) -> bool:
        """Process the next event and return whether it was an update."""
        event = self._event_loop.next()
        self.event_log.num_events += 1
        if isinstance(event, DispatchEvent):
            self._dispatch(event.client)
        elif isinstance(event, DropoutEvent):
            self._drop(event.task_ids)
        else:
            self._complete(event)
        return isinstance(event, CompletionEvent)

    def evaluate(self) -> Evaluation:
        """Evaluate the current model of the server and append the result to the evaluation log.

        The result also contains the staleness of the updates since the previous evaluation.
        """
        seen = self.evaluation_log.evaluations[-1].updates
        return self.evaluation_log.record(
            self._server, self.cost, [task.staleness for task in self.event_log.trace[seen:]]
        )

    def snapshot(self) -> RunSnapshot:
        """Return a snapshot of the complete state of the run."""
        return RunSnapshot(
            metadata=self._metadata,
            server=self._server.snapshot(),
            tickets=self._tickets,
            client_states=self.task_runner.client_states,
            cost=self.cost,
            event_log=self.event_log,
            num_events=self.event_log.num_events,
            num_dispatched=len(self.event_log.work),
            evaluation_log=self.evaluation_log,
            num_evaluations=len(self.evaluation_log.evaluations),
            num_starts=len(self.evaluation_log.starts),
            client_accuracy=self.evaluation_log.client_accuracy,
            seconds=self.seconds,
            evaluation_seconds=self.evaluation_log.seconds,
        )

    def _dispatch(self, client: int) -> None:
        """Send the server's model to a client and start its task."""
        ticket = self._server.dispatch(client)
        self.evaluation_log.record_start(ticket, client, updates=self.cost.updates, now=self._event_loop.now)
        self._last_message = message = self._message_tensors.share(ticket)
        self.cost = replace(self.cost, bytes_down=self.cost.bytes_down + message.nbytes)
        work = self._work(client)
        task_id = self._event_loop.submit(client, work)
        self.event_log.work.append(work)
        self._lookahead.on_dispatch(task_id, work)
        self._tickets = self._tickets.set(task_id, replace(ticket, message=message))
        self.task_runner.submit(task_id, message)

    def _drop(self, task_ids: Sequence[TaskId]) -> None:
        """Discard tasks that were lost or cancelled."""
        for task_id in task_ids:
            self._server.drop(self._pop_ticket(task_id))
        self._lookahead.on_dropout(task_ids)
        self.task_runner.cancel(task_ids)

    def _complete(self, event: CompletionEvent) -> None:
        """Complete a task: the server receives the update and accepts or rejects it."""
        ticket = self._pop_ticket(event.task_id)
        trace = self.event_log.trace
        trace.append(TaskRecord.from_completion(event.completion, self._server.version - ticket.version))
        bytes_up = 0
        try:
            payload = self.task_runner.result(event.task_id)
        except DivergenceError:
            accepted = False
        else:
            bytes_up = payload.nbytes
            if self._on_update is not None:
                self._on_update(UpdateEvent(len(trace), event.task_id.client, ticket.message, payload))
            accepted = self._server.receive(ticket, payload).accepted
        if not accepted:
            self._server.drop(ticket)
        self.event_log.accepted.append(accepted)
        self.cost = replace(
            self.cost,
            updates=len(trace),
            time=event.completion.time,
            gradients=self.cost.gradients + self.task_runner.num_gradients,
            bytes_up=self.cost.bytes_up + bytes_up,
            rejected=self.cost.rejected + (not accepted),
        )
        self._event_loop.acknowledge(accepted)
        self._lookahead.on_completion(event.task_id, accepted)

    def _is_over(self, event_loop: EventLoop) -> bool:
        if event_loop.num_completed >= self._num_updates:
            return True
        return self._duration < inf and event_loop.peek() > self._duration

    def _work(self, client: int) -> float:
        """Return the work of a task that is dispatched to the client now."""
        length = self._federation.num_batches(client)
        return float(length if self._num_steps is None else self._num_steps(self._last_message, length))

    def _pop_ticket(self, task_id: TaskId) -> Ticket:
        ticket = self._tickets[task_id]
        self._tickets = self._tickets.remove(task_id)
        return ticket


def run(
    federation: FederatedDataset,
    method: Method,
    *,
    num_updates: int | None = None,
    duration: float | None = None,
    scheduler: SchedulerLike = None,
    delays: Delays = None,
    availability: Availability = None,
    task_cost: str = "fixed",
    concurrency: int | None = None,
    buffer: int | None = None,
    refill: int | None = None,
    averaging: AveragingLike = None,
    eval_every: int = 1,
    eval_starts: bool = False,
    executor: ExecutorLike = None,
    on_update: Callable[[UpdateEvent], None] | None = None,
    progress: Callable[[], None] | None = None,
    log: Callable[[Evaluation], None] | None = None,
    checkpoint: CheckpointPolicy | None = None,
    resume: bool = False,
) -> RunResult:
    """Simulate training in virtual time until `num_updates` updates have arrived or `duration` has passed.

    A method consists of a rule, with which the server aggregates updates, and a trainer for the clients. The rule also
    determines when the server dispatches training tasks, and to which clients:

    - With an asynchronous rule, the server first dispatches one task to every client, or to `concurrency` clients.
      After each update, it dispatches a new task.
    - With a synchronous rule, the server dispatches a task to each client of a random cohort. When it has accepted the
      number of updates that the rule needs, it cancels unfinished tasks and dispatches tasks to the next cohort.
    - Some rules draw the clients themselves, or define the probability that a client receives the next task.

    Args:
        federation: the federated data set.
        method: a rule and its trainer.
        num_updates: the number of updates, accepted or not. It may be omitted if `duration` is given.
        duration: the virtual time in seconds. The run ends before the first event after this time, even if no client
            has a task.
        scheduler: the scheduler of the tasks, or a function of the clients and a generator that returns a scheduler.
            Only this run may use the scheduler. Without `scheduler` and `delays`, the run uses a
            [`PriorityScheduler`][manifoldagg.simulation.PriorityScheduler].
        delays: the delays of [`IndependentClients`][manifoldagg.simulation.IndependentClients], instead of a scheduler:
            one delay for all clients, a mapping from clients to delays, or a function of the clients and a generator. A
            path names a CSV file for [`Empirical.from_csv`][manifoldagg.simulation.Empirical]; each client gets the
            measurements of a random device.
        availability: changes of the clients' availability, or a function of the clients and a generator that returns
            them. Changes of clients without samples are ignored.
        task_cost: the work of a task. `"fixed"` uses the number of the client's minibatches, so that all methods have
            the same order of events. `"trainer"` uses the number of steps of the trainer if it reports them.
        concurrency: the number of tasks in flight. The default is the number of clients. For a rule that draws clients
            (`DeFedAvg`), `concurrency` is the number of clients in the first draw. A rule with a cohort does not accept
            `concurrency`.
        buffer: the number of updates in each step of a rule with a buffer, such as `FedBuff`. The default is the buffer
            size of the rule. Other rules do not accept `buffer`.
        refill: the number of free slots, out of `concurrency`, that must accumulate before the server dispatches again.
            The server then fills all free slots. The default is 1. A rule that waits for a cohort or draws its clients
            does not accept `refill`.
        averaging: an average of the versions of the model, such as an [`SWA`][manifoldagg.averaging.SWA], or a function
            of the [`ParameterSpace`][manifoldagg.manifolds.ParameterSpace] that returns an average. No other run may
            use the same average. Each evaluation then includes the accuracy and the loss of the average. The BatchNorm
            statistics of the average are computed on the training samples of all clients.
        eval_every: the number of updates between evaluations. The model is also evaluated before the first update and
            after the last one.
        eval_starts: whether to evaluate the start model of each task on the held-out samples of its client, as in
            OrthoFL's Figure 6. The result contains the evaluations in `starts`. Each task needs one more evaluation.
        executor: an executor that trains tasks ahead of time, or a function that returns an executor, such as
            [`processes(2)`][manifoldagg.simulation.processes]. With `None`, the calling thread trains each task on
            demand. The results are the same.
        on_update: a function that is called with each update, except for the earlier updates of a resumed run.
        progress: a function that is called once for each update, including the earlier updates of a resumed run.
        log: a function that is called with each evaluation, including the earlier evaluations of a resumed run.
        checkpoint: the interval and the path of checkpoints. They are written concurrently with the training. A
            checkpoint is also written if an interrupt or an error ends the run. With an interval in `seconds`, writing
            takes at most 5 % of the time.
        resume: whether to resume from the checkpoint if the file exists. The results are bit-identical to those of an
            uninterrupted run. The events are replayed without training. Client states must be trees of tensors and
            plain values. Resuming a finished run returns its result.

    Raises:
        ArgumentError: if an argument is invalid (the message names it), if no client has samples, or if no client has a
            task before the last update. The exceptions of a trainer, except for divergence, are raised unchanged.
        CheckpointError: if a part of the rule cannot be identified by name, or if the checkpoint is invalid. Also if
            the checkpoint belongs to another run (the message contains the first difference), or if the scheduler or
            the availability differs from the saved run.

    Warns:
        StabilityWarning: once, if the server's step size for an average client is above the stability limit.

    Example:
        >>> from manifoldagg.federated import rules, clients
        >>> from manifoldagg.experiments import load_dataset
        >>> from manifoldagg.simulation import iid_partition
        >>> federation = FederatedDataset.split(load_dataset("digits"), 6, partition=iid_partition, seed=0)
        >>> method = Method("FedAvg", rules.FedAvg(cohort=3), clients.Local(epochs=1))
        >>> found = run(federation, method, num_updates=6, eval_every=3)
        >>> found.evaluated_at, found.staleness
        ([0, 3, 6], [0, 0, 0, 0, 0, 0])
    """
    if num_updates is None and duration is None:
        raise ArgumentError("num_updates, duration: expected at least one of them")
    if num_updates is not None:
        check_count("num_updates", num_updates)
    if duration is not None:
        duration = check_number("duration", duration, above=0)
    check_count("eval_every", eval_every)
    check_instance("eval_starts", eval_starts, bool, "True or False")
    check_choice("task_cost", task_cost, TASK_COSTS)
    for name, told in (("on_update", on_update), ("progress", progress), ("log", log)):
        if told is not None and not callable(told):
            raise ArgumentError(f"{name}: expected a function, got {short_repr(told)}")
    if not callable(averaging):
        check_averaging(averaging)
    check_method("method", method)
    if resume and checkpoint is None:
        raise ArgumentError("resume: expected a `checkpoint` to resume from")
    clients = check_federation("federation", federation).trainable_clients
    if not clients:
        raise ArgumentError("federation: expected clients with samples, got clients without samples")
    if not any(map(len, federation.held_out)):
        raise ArgumentError("federation: expected clients with held-out samples, got clients without held-out samples")
    metadata = run_metadata(
        federation,
        method,
        num_updates=num_updates,
        duration=duration,
        scheduler=scheduler,
        delays=delays,
        availability=availability,
        task_cost=task_cost,
        concurrency=concurrency,
        buffer=buffer,
        refill=refill,
        averaging=averaging,
        eval_every=eval_every,
        eval_starts=eval_starts or None,
    )
    method = method.bind(clients, buffer)
    rule: Any = method.rule
    if checkpoint is not None:
        # A rule that cannot be saved raises an error before the run starts.
        fingerprint("rule", rule)
    loop = build_event_loop(
        federation,
        rule,
        scheduler=scheduler,
        delays=delays,
        availability=availability,
        concurrency=concurrency,
        refill=refill,
    )
    loaded = None
    if checkpoint is not None and resume and Path(checkpoint.path).exists():
        loaded = LoadedRun(Path(checkpoint.path), metadata)
    simulator = Simulator(
        federation,
        method,
        loop,
        metadata,
        num_updates=num_updates,
        duration=inf if duration is None else duration,
        task_cost=task_cost,
        averaging=averaging,
        executor=executor,
        eval_starts=eval_starts,
        loaded=loaded,
        on_update=on_update,
    )
    # `loaded` references all tensors of the file.
    del loaded

    def evaluate() -> None:
        row = simulator.evaluate()
        if log is not None:
            log(row)

    if progress is not None:
        for _ in range(simulator.cost.updates):
            progress()
    if log is not None:
        for row in simulator.evaluation_log.evaluations:
            log(row)
    with simulator.task_runner, RunCheckpointer(checkpoint, simulator.cost.updates) as checkpointer:
        while not simulator.is_over:
            checkpointer.maybe_write(simulator.snapshot)
            if not simulator.advance():
                continue
            updates = simulator.cost.updates
            if updates % eval_every == 0 or updates == num_updates:
                evaluate()
            if progress is not None:
                progress()
        if simulator.evaluation_log.evaluations[-1].updates < simulator.cost.updates:
            evaluate()
    return RunResult(
        simulator.evaluation_log.evaluations,
        simulator.event_log.trace,
        simulator.evaluation_log.client_accuracy,
        simulator.seconds,
        simulator.evaluation_log.seconds,
        simulator.evaluation_log.starts,
    )
