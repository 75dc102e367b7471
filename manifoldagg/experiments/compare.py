"""Comparison of methods on the same federations: equal data, initial models and event order for each seed."""

import statistics
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manifoldagg._result_repr import format_result
from manifoldagg._validation import check_choice, check_count, check_instance, check_number
from manifoldagg.curves import Bezier, Plane, plane
from manifoldagg.errors import ArgumentError, StabilityWarning
from manifoldagg.experiments.progress_dir import ComparisonProgress, LearnedCurve
from manifoldagg.experiments.tuning import Tuning
from manifoldagg.federated import Server
from manifoldagg.federated.clients.determinism import single_threaded
from manifoldagg.federated.server.client_sampling import sampler_for
from manifoldagg.manifolds import ParameterSpace
from manifoldagg.simulation import registry
from manifoldagg.simulation.availability import Availability
from manifoldagg.simulation.dataset import LabelledDataset, check_dataset
from manifoldagg.simulation.delays import Delays
from manifoldagg.simulation.engine import TASK_COSTS, UpdateEvent, run
from manifoldagg.simulation.event_loop import DispatchEvent, build_event_loop
from manifoldagg.simulation.executors import ExecutorLike, shared_executor
from manifoldagg.simulation.federated_dataset import FederatedDataset
from manifoldagg.simulation.method import Method, RunResult, check_method
from manifoldagg.simulation.partitions import Partition
from manifoldagg.simulation.run_metadata import referenced_files
from manifoldagg.simulation.schedulers import Scheduler, SchedulerFactory
from manifoldagg.simulation.spec_parser import error_context
from manifoldagg.simulation.stable_repr import stable_repr
from manifoldagg.simulation.trace import TaskRecord

__all__ = ["Comparison", "Landscape", "compare"]
LANDSCAPE_AFTER = 0.5
"""The plane is drawn for the first curve that arrives after this part of the updates."""
MAX_LANDSCAPE_SAMPLES, MAX_LANDSCAPE_LABELS = 400, 8_000
"""The loss of a plane is taken over so many samples at most, and so many labels."""


@dataclass(frozen=True)
class Landscape:
    """The planes of one learned curve: the loss on the client's own data, and on all held-out data."""

    method: str
    update_index: int
    client: int
    local: Plane
    held_out: Plane


@dataclass(frozen=True)
class Comparison:
    """The results of `compare`.

    Attributes:
        settings: all settings that determine the results.
        runs: the runs of each method, one for each seed.
        landscape: the loss over the planes of a curve, for the first method that learns curves; else `None`.
    """

    settings: dict[str, Any]
    runs: dict[str, list[RunResult]]
    landscape: Landscape | None = field(compare=False)

    def __repr__(self) -> str:
        settings = self.settings
        return format_result(
            self,
            data=settings["data"]["name"],
            clients=settings["clients"],
            updates=settings["num_updates"],
            seeds=len(settings["seeds"]),
            final_accuracy={name: row["final_mean"] for name, row in self.summary().items()},
        )

    def summary(self) -> dict[str, dict[str, float | int | None]]:
        """Return a table row for each method, with means and sample standard deviations over the seeds."""
        return {name: _summarise(runs, self.settings["target"]) for name, runs in self.runs.items()}

    def results(self) -> dict[str, object]:
        """Return all results but the log as a JSON-compatible tree, which the settings determine bit for bit."""
        methods = {
            name: {"summary": summary, "runs": list(map(_run_to_dict, self.runs[name]))}
            for name, summary in self.summary().items()
        }
        return {"settings": self.settings, "methods": methods}

    def log(self) -> list[dict[str, object]]:
        """Return a row for each evaluation with its method and seed, which the settings determine bit for bit."""
        return [
            {"method": name, "seed": seed} | asdict(row)
            for name, runs in self.runs.items()
            for seed, run_ in zip(self.settings["seeds"], runs, strict=True)
            for row in run_.evaluations
        ]

    def timing(self) -> dict[str, dict[str, list[float]]]:
        """Return the wall-clock seconds of training and of evaluation, by method, for each seed."""
        return {
            "seconds": {name: [run_.seconds for run_ in runs] for name, runs in self.runs.items()},
            "evaluation_seconds": {
                name: [run_.evaluation_seconds for run_ in runs] for name, runs in self.runs.items()
            },
        }


def compare(
    dataset: LabelledDataset,
    methods: Sequence[Method],
    *,
    clients: int = 30,
    num_updates: int = 200,
    seeds: int = 3,
    partition: Partition | str = "dirichlet:concentration=0.5",
    holdout: float | None = None,
    validation: float = 0.0,
    batch: int = 16,
    target: float | None = None,
    scheduler: SchedulerFactory | str | None = None,
    delays: Delays = None,
    availability: Availability | str = None,
    task_cost: str = "fixed",
    concurrency: int | None = None,
    eval_every: int = 1,
    executor: ExecutorLike = None,
    progress: Callable[[str, int], None] | None = None,
    tuning: Tuning | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    duration: float | None = None,
) -> Comparison:
    """Run every method on every seed's federation, with one torch thread so that results repeat bit for bit.

    Strings say by name what [`by_name`][manifoldagg.simulation.registry] knows, as on the command line.

    Args:
        dataset: what is learned.
        methods: what is compared, with distinct names.
        clients: how many clients share the data.
        num_updates: updates in each run.
        seeds: how many repetitions; the seeds are 0, 1, ...
        partition: how the data are split, as in `FederatedDataset.split`.
        holdout: which part is held out, as in `FederatedDataset.split`.
        validation: which part of the rest to hold out in its place.
        batch: samples a minibatch.
        target: the accuracy to time; the data set's own if it is not given.
        scheduler: who finishes when, as in [`run`][manifoldagg.simulation.run]: a function that makes one for each run.
        delays: of clients that work alone, in place of a scheduler.
        availability: who comes and goes.
        task_cost: of a task: `"fixed"` or `"trainer"`.
        concurrency: the number of tasks in flight.
        eval_every: evaluate after so many updates.
        executor: what trains; one that a function makes serves all runs. Results do not depend on it.
        progress: called with the method's name and the seed after each update.
        tuning: searches the methods' rates first.
        folder: where to keep what is done until all is over: the runs, every half minute where the one that is under
            way stands, also when something ends it, and the log so far. It is made, and stays for who has the result
            to remove; what another comparison left there is removed.
        resume: resume from `folder`, if there is something: a comparison that was interrupted at any point
            finds what it would have found, bit for bit.
        duration: the virtual time in seconds after which each run ends, if it has fewer than `num_updates` updates.

    Raises:
        ArgumentError: naming the argument that does not fit.
        CheckpointError: if `folder` has another comparison, other versions or a damaged file, naming the first
            difference.

    Warns:
        StabilityWarning: once for each run with a step above the stability limit, but not with `tuning`.
    """
    check_count("seeds", seeds)
    check_count("num_updates", num_updates)
    check_count("eval_every", eval_every)
    check_choice("task_cost", task_cost, TASK_COSTS)
    check_dataset(dataset)
    _check_methods(methods)
    if tuning is not None:
        check_instance("tuning", tuning, Tuning, "Tuning(), or None")
    target = check_number("target", dataset.target if target is None else target, at_least=0, at_most=1)
    if resume and folder is None:
        raise ArgumentError("resume: expected a `folder` to resume from")
    if isinstance(scheduler, Scheduler):
        raise ArgumentError(
            "scheduler: expected a function that makes one for each run, got one, which the first run would use up"
        )
    if not (availability is None or callable(availability) or isinstance(availability, str)):
        availability = tuple(availability)
    with single_threaded(), shared_executor(executor) as workers:
        divided = partial(FederatedDataset.split, dataset, clients, partition=partition)
        divided = partial(divided, holdout=holdout, validation=validation, batch=batch)
        federations = [divided(seed=seed) for seed in range(seeds)]
        named = referenced_files(scheduler, delays, availability)
        scenario = registry.parse_workload(scheduler, delays, availability)
        for federation in federations:
            for method in methods:
                _check_startable(federation, method, scenario, concurrency)
        tried: dict[str, object] | None = None
        if tuning is not None:
            like = {
                "num_updates": num_updates,
                "task_cost": task_cost,
                "concurrency": concurrency,
                "executor": workers,
                "progress": progress,
            }
            like |= {"scheduler": scheduler, "delays": delays, "availability": availability}
            methods, tried = tuning.apply(methods, divided, validation=validation, num_used_seeds=seeds, **like)
        settings: dict[str, Any] = {
            "data": {"name": dataset.name, "checksum": f"{dataset.checksum:08x}"},
            "clients": clients,
            "num_updates": num_updates,
            "seeds": list(range(seeds)),
            "model": stable_repr(dataset.model),
            "partition": stable_repr(partition),
            "holdout": holdout,
            "validation": validation,
            "batch": batch,
            "target": target,
            "scheduler": stable_repr(scheduler),
            "delays": stable_repr(delays),
            "availability": stable_repr(availability),
            "files": named,
            "task_cost": task_cost,
            "concurrency": concurrency,
            "eval_every": eval_every,
            **({} if duration is None else {"duration": duration}),
            "tuning": tried,
            "methods": {
                method.name: {"rule": stable_repr(method.rule), "trainer": stable_repr(method.trainer)}
                for method in methods
            },
            "clients_without_samples": [sorted(set(range(clients)) - set(f.trainable_clients)) for f in federations],
        }
        pictured: dict[str, LearnedCurve] = {}

        def watch(name: str, event: UpdateEvent) -> None:
            is_curve = len(event.payload.points) > 1 and "vertices" not in event.message.tensors
            if name not in pictured and event.update_index >= LANDSCAPE_AFTER * num_updates and is_curve:
                phi = torch.cat([event.message.start[None], event.payload.points])
                pictured[name] = LearnedCurve(name, event.update_index, event.client, phi)
                if kept is not None:
                    kept.save_curve(pictured[name])

        def found(method: Method, federation: FederatedDataset) -> RunResult:
            log = None if kept is None else partial(kept.log_evaluation, method.name, federation.seed)
            over = None if kept is None else kept.load_run(method.name, federation.seed)
            if over is not None and log is not None:
                for row in over.evaluations:
                    log(row)
                return over
            with error_context(f"methods: {method.name}"):
                over = run(
                    federation,
                    method,
                    num_updates=num_updates,
                    duration=duration,
                    **scenario,
                    task_cost=task_cost,
                    concurrency=concurrency,
                    eval_every=eval_every,
                    executor=workers,
                    on_update=partial(watch, method.name) if federation.seed == 0 else None,
                    progress=progress and partial(progress, method.name, federation.seed),
                    log=log,
                    checkpoint=None if kept is None else kept.checkpoint_policy(method.name, federation.seed),
                    resume=kept is not None,
                )
            if kept is not None:
                kept.save_run(method.name, federation.seed, over)
            return over

        with ExitStack() as held:
            if tuning is not None:
                # A tuned rate is the best that was tried with this concurrency.
                held.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore", StabilityWarning)
            kept = (
                None
                if folder is None
                else held.enter_context(ComparisonProgress(Path(folder), settings, resume=resume))
            )
            if kept is not None:
                pictured |= {
                    name: curve for name in settings["methods"] if (curve := kept.load_curve(name)) is not None
                }
            runs = {method.name: [found(method, federation) for federation in federations] for method in methods}
        drawn = next((pictured[name] for name in runs if name in pictured), None)
        landscape = None if drawn is None else _compute_landscape(federations[0], drawn)
    return Comparison(settings, runs, landscape)


def _check_methods(methods: Sequence[Method]) -> None:
    """See that there are methods, in a list, with distinct names.

    Raises:
        ArgumentError: if not.
    """
    given: object = methods
    if isinstance(given, str):
        raise ArgumentError(f"methods: expected a list of Methods, got {given!r}; write methods({given!r})")
    if isinstance(given, Method):
        raise ArgumentError(f"methods: expected a list of Methods, got one, {given.name!r}; write [method]")
    if not isinstance(given, Collection):
        raise ArgumentError(f"methods: expected a list of Methods, got {type(given).__name__}")
    for place, method in enumerate(methods):
        check_method(f"methods[{place}]", method)
    if len({method.name for method in methods}) < len(methods) or not methods:
        raise ArgumentError("methods: expected at least one, with distinct names")


def _check_startable(
    federation: FederatedDataset, method: Method, workload: Mapping[str, Any], concurrency: int | None
) -> None:
    """See that a run can begin: that a method fits the clients, and its trainer what the server sends.

    Raises:
        ArgumentError: if it cannot.
    """
    clients = federation.trainable_clients
    with error_context(f"methods: {method.name}"):
        rule: Any = method.bind(clients).rule
        sampler_for(rule, clients, concurrency, np.random.default_rng(0))
        sizes = {client: len(federation.train[client]) for client in clients}
        message = Server.of(federation.model(), rule, weights=sizes).dispatch(clients[0]).message
        steps = getattr(method.trainer, "num_steps", None)
        if steps is not None:
            steps(message, federation.num_batches(clients[0]))
    course = build_event_loop(federation, rule, **workload, concurrency=concurrency)
    while isinstance(event := course.next(), DispatchEvent):
        with error_context("scheduler"):
            course.submit(event.client, float(federation.num_batches(event.client)))


def _compute_landscape(federation: FederatedDataset, curve: LearnedCurve) -> Landscape:
    """The planes of a curve that a client sent."""
    model = federation.model()
    space = ParameterSpace.of(model)
    loss = space.loss(model, nn.functional.cross_entropy)

    def over(samples: np.ndarray) -> Plane:
        most = min(
            MAX_LANDSCAPE_SAMPLES,
            MAX_LANDSCAPE_LABELS * len(federation.dataset.labels) // federation.dataset.labels.numel(),
        )
        if len(samples) > most:
            samples = samples[np.linspace(0, len(samples) - 1, most).astype(np.int64)]
        batch = federation.dataset.inputs[samples], federation.dataset.labels[samples]

        def value(theta: Tensor) -> float:
            with torch.no_grad():
                return loss(theta, batch).item()

        return plane(Bezier(space, len(curve.phi) - 1), curve.phi, value)

    everybody = np.concatenate(federation.held_out)
    return Landscape(
        curve.method, curve.update_index, curve.client, over(federation.train[curve.client]), over(everybody)
    )


def _run_to_dict(run_: RunResult) -> dict[str, object]:
    """A run for JSON: the trace by columns."""
    columns = {one.name: [getattr(task, one.name) for task in run_.trace] for one in fields(TaskRecord)}
    return {
        "trace": columns,
        "client_accuracy": run_.client_accuracy,
        "gini": run_.gini,
        "theil": run_.theil,
        "rejected": run_.rejected,
    }


def _summarise(runs: Sequence[RunResult], target: float) -> dict[str, float | int | None]:
    last = [run_.evaluations[-1] for run_ in runs]
    final = [row.accuracy for row in last]
    best = [max(run_.accuracy) for run_ in runs]
    reached = [rounds for run_ in runs if (rounds := run_.updates_to(target)) is not None]
    late = [x for run_ in runs for x in run_.staleness] or [0]
    return {
        "final_mean": statistics.fmean(final),
        "final_sd": _standard_deviation(final),
        "best_mean": statistics.fmean(best),
        "best_sd": _standard_deviation(best),
        "updates_to_target_mean": statistics.fmean(reached) if reached else None,
        "reached_target": len(reached),
        "staleness_mean": statistics.fmean(late),
        "staleness_max": max(late),
        "gini_mean": statistics.fmean(run_.gini for run_ in runs),
        "theil_mean": statistics.fmean(run_.theil for run_ in runs),
        "rejected": sum(run_.rejected for run_ in runs),
        "gradients_mean": statistics.fmean(row.gradients for row in last),
        "bytes_mean": statistics.fmean(row.bytes for row in last),
    }


def _standard_deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None
