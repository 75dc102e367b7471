"""One simulated run: an event loop, training clients and a server, in virtual time."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from immutables import Map

from manifoldagg._result_repr import format_result
from manifoldagg._validation import check_choice, check_count, check_instance, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.federated import CheckpointPolicy, Rule, Server, Trainer
from manifoldagg.federated.server.durability.fingerprint import fingerprint
from manifoldagg.federated.server.durability.persistent_map import PersistentOrderedMap
from manifoldagg.federated.server.validation import check_rule
from manifoldagg.federated.types import check_trainer
from manifoldagg.manifolds import ParameterSpace
from manifoldagg.simulation.availability import Availability
from manifoldagg.simulation.checkpointing import RunCheckpointer
from manifoldagg.simulation.cost import Cost, Evaluation, first_reaching
from manifoldagg.simulation.delays import Delays
from manifoldagg.simulation.engine import Simulator, UpdateEvent
from manifoldagg.simulation.evaluation import EvaluationLog
from manifoldagg.simulation.executors.executor import ExecutorLike
from manifoldagg.simulation.executors.task_runner import TaskRunner
from manifoldagg.simulation.fairness import gini, theil
from manifoldagg.simulation.federated_dataset import FederatedDataset, check_federation
from manifoldagg.simulation.in_flight import InFlightTasks
from manifoldagg.simulation.lookahead import Lookahead
from manifoldagg.simulation.run_metadata import run_metadata
from manifoldagg.simulation.schedulers import SchedulerLike
from manifoldagg.simulation.snapshot import EventLog, LoadedRun
from manifoldagg.simulation.trace import TaskRecord
from manifoldagg.simulation.workload import build_event_loop

__all__ = ["Method", "RunResult", "check_method", "run"]

TASK_COSTS = ("fixed", "trainer")
SERVER_OPTIONS: dict[str, Any] = {"history_size": 0, "receipt_cache_size": 0}
"""Server options that disable storage for readers and repeated requests, which a simulation does not need."""


@dataclass(frozen=True)
class Method:
    """A rule and its trainer, with a display name.

    Attributes:
        name: distinct among the methods of a comparison.
        rule: or a function that makes one for the clients who take part, such as one with a routing of them.
        trainer: what they do.
        rate_field: where the rule has its global rate, such as `"rate"` or `"rule.rate"`, for who searches a better
            one; `None` where it is to stay as it is.
    """

    name: str
    rule: Rule | Callable[[Sequence[int]], Rule]
    trainer: Trainer
    rate_field: str | None = "rate"

    def bind(self, clients: Sequence[int]) -> "Method":
        """Return the method for these clients, with its rule built.

        Raises:
            ArgumentError: if the rule or the trainer is none.
        """
        made: Any = self.rule
        if callable(made) and not hasattr(made, "step"):
            made = made(clients)
        check_trainer(self.trainer)
        return replace(self, rule=check_rule(made))


def check_method(name: str, method: object) -> Method:
    """Return `method`, which must be a `Method` and not a name or a rule.

    Raises:
        ArgumentError: if it is invalid.

    Example:
        >>> check_method("method", "fedasync")
        Traceback (most recent call last):
            ...
        manifoldagg.errors.ArgumentError: method: expected a Method, got 'fedasync'; write method('fedasync')
    """
    hint = f"method({method!r})" if isinstance(method, str) else "Method(name, rule, trainer)"
    return check_instance(name, method, Method, hint)


@dataclass(frozen=True)
class RunResult:
    """The result of a run: the evaluations of the server's model, and the trace.

    Attributes:
        evaluations: the log, in order; the first is before update 1, the last after all updates.
        trace: (updates), the task of each update, with its staleness as the server counts it.
        client_accuracy: the accuracy of the best evaluated model, for each client with held-out samples.
        seconds: the wall-clock time without evaluation.
        evaluation_seconds: the wall-clock time of evaluation.
    """

    evaluations: list[Evaluation]
    trace: list[TaskRecord[int]]
    client_accuracy: list[float]
    seconds: float = field(compare=False)
    evaluation_seconds: float = field(compare=False)

    def __repr__(self) -> str:
        return format_result(
            self,
            updates=len(self.trace),
            accuracy=self.evaluations[-1].accuracy if self.evaluations else None,
            evaluations=len(self.evaluations),
            seconds=self.seconds,
        )

    @property
    def accuracy(self) -> list[float]:
        """The accuracy of each evaluation."""
        return [row.accuracy for row in self.evaluations]

    @property
    def evaluated_at(self) -> list[int]:
        """The number of updates at each evaluation."""
        return [row.updates for row in self.evaluations]

    @property
    def clients(self) -> list[int]:
        """The client of each update, (updates,)."""
        return [task.client for task in self.trace]

    @property
    def staleness(self) -> list[int]:
        """The staleness of each update in versions, (updates,)."""
        return [task.staleness for task in self.trace]

    @property
    def times(self) -> list[float]:
        """The virtual time of each update in seconds, (updates,)."""
        return [task.finished for task in self.trace]

    @property
    def rejected(self) -> int:
        """The number of updates that the server rejected or whose training diverged."""
        return self.evaluations[-1].rejected

    @property
    def gini(self) -> float:
        """The Gini index of the clients' accuracies."""
        return gini(self.client_accuracy)

    @property
    def theil(self) -> float:
        """The Theil index of the clients' accuracies."""
        return theil(self.client_accuracy)

    def updates_to(self, target: float) -> int | None:
        """Return the number of updates up to the first accuracy of at least `target`, or `None`."""
        row = first_reaching(self.evaluations, target)
        return None if row is None else row.updates


def run(
    federation: FederatedDataset,
    method: Method,
    *,
    num_updates: int,
    scheduler: SchedulerLike = None,
    delays: Delays = None,
    availability: Availability = None,
    task_cost: str = "fixed",
    concurrency: int | None = None,
    eval_every: int = 1,
    executor: ExecutorLike = None,
    on_update: Callable[[UpdateEvent], None] | None = None,
    progress: Callable[[], None] | None = None,
    log: Callable[[Evaluation], None] | None = None,
    checkpoint: CheckpointPolicy | None = None,
    resume: bool = False,
) -> RunResult:
    """Train in virtual time until the server has received `num_updates` updates.

    Who is asked, and when, is what the rule declares: everybody at once, who has answered again; k clients, and the
    next k when these have answered; or as the rule draws or routes them.

    Args:
        federation: who holds what.
        method: a rule and its trainer.
        num_updates: the number of updates, accepted or not.
        scheduler: who finishes when: one that this run uses up, or a function of clients and a generator that makes
            one; a [`PriorityScheduler`][manifoldagg.simulation.PriorityScheduler] where neither it nor `delays` is
            given.
        delays: of [`IndependentClients`][manifoldagg.simulation.IndependentClients] in place of a scheduler: one for
            all, a mapping from clients, the path of measurements for
            [`Empirical.from_csv`][manifoldagg.simulation.Empirical], of which each client gets those of some device, or
            a function of clients and a generator.
        availability: changes of who takes part, or a function of clients and a generator that makes them. Those of
            clients without samples do not count.
        task_cost: of a task: `"fixed"`, the client's minibatches, whatever a method makes of them, so that all methods
            see one order of events; or `"trainer"`, the steps of its trainer, where that tells them.
        concurrency: the number of tasks in flight, as many as clients by default; for a rule that draws
            (`DeFedAvg`), how many are asked at first. A rule that waits for a cohort takes none.
        eval_every: evaluate the model after so many updates; before the first and after the last in any case.
        executor: what trains ahead, for the same results: an executor of any kind, or a function that makes one such as
            [`processes(2)`][manifoldagg.simulation.processes]. `None`: every task is trained here on demand.
        on_update: called with each update, but not again with earlier ones if a run is resumed.
        progress: called once for each update, including the earlier ones of a resumed run.
        log: called with the row of each evaluation; likewise.
        checkpoint: when to write snapshots concurrently, and where to; updates are what `updates`
            counts. It is written too when something ends the run, an interrupt or an error. Where `seconds` say when,
            it takes no more than a twentieth of the time.
        resume: resume from the checkpoint, if it exists, bit for bit: a run that was interrupted at any point finds
            what it would have found. The events are replayed without training; trainers find their client state,
            which is to be a tree of tensors and plain values. A run that was over ends as it did.

    Raises:
        ArgumentError: naming the argument that does not fit; if no client has samples; if no client has a task any more
            before the last update; and what trainers raise but for divergence.
        CheckpointError: if the rule has something in it that has no name; if the checkpoint is none, or that of another
            run, naming the first difference, or scheduler or availability go otherwise than they went.

    Warns:
        StabilityWarning: once, if the step of an average client is above the stability limit.

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
    check_count("num_updates", num_updates)
    check_count("eval_every", eval_every)
    check_choice("task_cost", task_cost, TASK_COSTS)
    for name, told in (("on_update", on_update), ("progress", progress), ("log", log)):
        if told is not None and not callable(told):
            raise ArgumentError(f"{name}: expected a function, got {short_repr(told)}")
    check_method("method", method)
    if resume and checkpoint is None:
        raise ArgumentError("resume: expected a `checkpoint` to resume from")
    clients = check_federation("federation", federation).trainable_clients
    if not clients:
        raise ArgumentError("federation: expected clients with samples, got no such client")
    if not any(map(len, federation.held_out)):
        raise ArgumentError("federation: expected clients with held-out samples, got none")
    started = time.perf_counter()
    metadata = run_metadata(
        federation,
        method,
        num_updates=num_updates,
        scheduler=scheduler,
        delays=delays,
        availability=availability,
        task_cost=task_cost,
        concurrency=concurrency,
        eval_every=eval_every,
    )
    method = method.bind(clients)
    rule: Any = method.rule
    if checkpoint is not None:
        # What a file cannot hold is told now.
        fingerprint("rule", rule)
    loop = build_event_loop(
        federation, rule, scheduler=scheduler, delays=delays, availability=availability, concurrency=concurrency
    )
    loaded = None
    if checkpoint is not None and resume and Path(checkpoint.path).exists():
        loaded = LoadedRun(Path(checkpoint.path), metadata)
    evaluation_log = EvaluationLog(federation)
    model = federation.model()
    if loaded is None:
        sizes = {client: len(federation.train[client]) for client in clients}
        server = Server.of(model, rule, weights=sizes, **SERVER_OPTIONS)
        in_flight = InFlightTasks(server, PersistentOrderedMap())
    else:
        server = loaded.server(ParameterSpace.of(model), rule)
        in_flight = InFlightTasks(server, loaded.tickets(server.space))
    steps = getattr(method.trainer, "num_steps", None) if task_cost == "trainer" else None

    def asked(client: int) -> float:
        length = federation.num_batches(client)
        return float(length if steps is None else steps(in_flight.last_message, length))

    lookahead = Lookahead(loop, num_updates, asked)
    if loaded is None:
        event_log = EventLog()
        cost = Cost()
        evaluation_log.record(server, cost)
    else:
        event_log = loaded.replay(loop, lookahead)
        cost = loaded.cost
        evaluation_log.restore(loaded.evaluations, loaded.client_accuracy, loaded.evaluation_seconds)
        started -= loaded.seconds + loaded.evaluation_seconds
    runner = TaskRunner(
        federation, method.trainer, executor, lookahead, Map() if loaded is None else loaded.client_states()
    )
    # It holds all that it has read.
    del loaded
    simulator = Simulator(
        metadata, loop, asked, lookahead, server, in_flight, runner, evaluation_log, event_log, cost, started, on_update
    )
    if progress is not None:
        for _ in range(cost.updates):
            progress()
    if log is not None:
        for row in evaluation_log.evaluations:
            log(row)
    with runner, RunCheckpointer(checkpoint, cost.updates) as checkpointer:
        for key, ticket in in_flight.tickets.items():
            runner.submit(key, ticket.message)
        while simulator.cost.updates < num_updates:
            checkpointer.maybe_write(simulator.snapshot)
            if not simulator.advance():
                continue
            if simulator.cost.updates % eval_every == 0 or simulator.cost.updates == num_updates:
                row = simulator.evaluate()
                if log is not None:
                    log(row)
            if progress is not None:
                progress()
    return RunResult(
        evaluation_log.evaluations,
        event_log.trace,
        evaluation_log.client_accuracy,
        simulator.seconds,
        evaluation_log.seconds,
    )
