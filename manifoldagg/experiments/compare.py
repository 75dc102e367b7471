"""Comparison of methods with the same data, initial model and order of events for each seed."""

import statistics
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manifoldagg._result_repr import format_result
from manifoldagg._validation import check_choice, check_count, check_instance, check_number
from manifoldagg.errors import ArgumentError, StabilityWarning
from manifoldagg.experiments import workloads
from manifoldagg.experiments.landscape import Landscape, compute_landscape
from manifoldagg.experiments.progress_dir import ComparisonProgress, LearnedCurve
from manifoldagg.experiments.spec_parser import error_context
from manifoldagg.experiments.tuning import Tuning
from manifoldagg.experiments.weight_averaging import WeightAveraging
from manifoldagg.experiments.workloads import referenced_files
from manifoldagg.federated import Server
from manifoldagg.federated.clients.determinism import single_threaded
from manifoldagg.federated.server.client_sampling import sampler_for
from manifoldagg.federated.stability import has_buffer
from manifoldagg.simulation.availability import Availability
from manifoldagg.simulation.cost import StartEvaluation
from manifoldagg.simulation.dataset import FederatedDataset, LabelledDataset, check_dataset
from manifoldagg.simulation.delays import Delays
from manifoldagg.simulation.engine import TASK_COSTS, UpdateEvent, run
from manifoldagg.simulation.event_loop import DispatchEvent, build_event_loop
from manifoldagg.simulation.executors import ExecutorLike, shared_executor
from manifoldagg.simulation.metadata import stable_repr
from manifoldagg.simulation.method import Method, RunResult, check_method
from manifoldagg.simulation.partitions import Partition
from manifoldagg.simulation.schedulers import Scheduler, SchedulerFactory
from manifoldagg.simulation.trace import TaskRecord

__all__ = ["Comparison", "compare", "comparison_settings", "method_settings"]
LANDSCAPE_AFTER = 0.5
"""The fraction of a run's updates after which the next learned curve is stored for the plot of its plane."""


@dataclass(frozen=True)
class Comparison:
    """The results of a comparison of several methods.

    Attributes:
        settings: all settings that determine the results.
        runs: the runs of each method, one for each seed.
        landscape: the loss on a plane in parameter space that contains the control points of one learned curve. The
            curve comes from the first method that learns curves. Without such a method, the value is `None`.
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

    def frame(self) -> Any:
        """Return `summary` as a pandas data frame with a row for each method."""
        from pandas import DataFrame

        return DataFrame.from_dict(self.summary(), orient="index").rename_axis("method")

    def summary(self) -> dict[str, dict[str, float | int | None]]:
        """Return a row for each method, with means and sample standard deviations over the seeds."""
        averaged = "averaging" in self.settings
        return {
            name: _summarise(runs, self.settings["target"]) | (_summarise_average(runs) if averaged else {})
            for name, runs in self.runs.items()
        }

    def results(self) -> dict[str, object]:
        """Return the settings and the results of all runs as JSON values, without the log of evaluations.

        Two comparisons with equal settings return bit-identical values.
        """
        methods = {
            name: {"summary": summary, "runs": list(map(_run_to_dict, self.runs[name]))}
            for name, summary in self.summary().items()
        }
        return {"settings": self.settings, "methods": methods}

    def log(self) -> list[dict[str, object]]:
        """Return a row for each evaluation of each run, with the method and the seed of the run.

        Two comparisons with the same settings return bit-identical rows.
        """
        return [
            {"method": name, "seed": seed} | row.asdict()
            for name, runs in self.runs.items()
            for seed, run_ in zip(self.settings["seeds"], runs, strict=True)
            for row in run_.evaluations
        ]

    def timing(self) -> dict[str, dict[str, list[float]]]:
        """Return the wall-clock seconds of training and of evaluation, by method, for each seed."""
        return {
            key: {name: [getattr(run_, key) for run_ in runs] for name, runs in self.runs.items()}
            for key in ("seconds", "evaluation_seconds")
        }


def compare(
    dataset: LabelledDataset,
    methods: Sequence[Method],
    *,
    clients: int = 30,
    num_updates: int = 200,
    seeds: int = 3,
    first_seed: int = 0,
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
    buffer: int | None = None,
    refill: int | None = None,
    averaging: WeightAveraging | str | None = None,
    eval_every: int = 1,
    eval_starts: bool = False,
    executor: ExecutorLike = None,
    progress: Callable[[str, int], None] | None = None,
    tuning: Tuning | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    duration: float | None = None,
) -> Comparison:
    """Run several methods on the same federated data sets, one data set for each seed.

    All runs use a single torch thread, so equal settings give bit-identical results. The partition, the scheduler, the
    delays and the availability may be given by name, as on the command line.

    Args:
        dataset: the data set.
        methods: the methods, with distinct names.
        clients: the number of clients that share the data.
        num_updates: the number of updates in each run.
        seeds: the number of repetitions.
        first_seed: the seed of the first repetition. Each further repetition increments the seed by 1.
        partition: the partition, as in `FederatedDataset.split`.
        holdout: the fraction of the data in the test set, as in `FederatedDataset.split`.
        validation: the fraction of the training data that replaces the test set, as in `FederatedDataset.split`.
        batch: the number of samples in a minibatch.
        target: the target accuracy. The results contain the number of updates until a run reaches it. The default is
            the target of the data set.
        scheduler: a function that returns a scheduler for each run. This and the next six arguments are as in
            [`run`][manifoldagg.simulation.run].
        delays: the delays of clients that work independently, instead of a scheduler.
        availability: the changes of the clients' availability.
        task_cost: the cost of a task: `"fixed"` or `"trainer"`.
        concurrency: the number of tasks in flight. With the default, every client always has one task.
        buffer: the number of updates in each step of the rules with a buffer. Other rules ignore this argument.
        refill: the number of free slots at which the server dispatches again. The default is 1.
        averaging: the settings of a weight average, or a string such as `"start=0.75,cycle=5"`. Each run computes this
            average and evaluates it together with the model.
        eval_every: the number of updates between evaluations.
        eval_starts: whether to evaluate the start model of each task on the held-out samples of its client.
        executor: the executor that trains, or a function that returns an executor for all runs. The results do not
            depend on it.
        progress: a function that is called with the method's name and the seed after each update.
        tuning: a search for the methods' rates before the comparison.
        folder: a folder for the finished runs, the state of the current run and the log. The state is stored every 30
            seconds, and when an exception ends the run. The caller must remove the folder after the comparison. Without
            `resume`, existing progress in the folder is removed.
        resume: whether to resume from `folder`. The results are bit-identical to those of an uninterrupted comparison.
        duration: the virtual time in seconds after which each run ends, if it has fewer than `num_updates` updates.

    Raises:
        ArgumentError: if an argument is invalid, or a run cannot start.
        CheckpointError: if `folder` contains a damaged file, the progress of another comparison, or progress from other
            versions of the packages. The message contains the first difference.

    Warns:
        StabilityWarning: once for each run whose step size is above the stability limit, except with `tuning`.
    """
    check_count("seeds", seeds)
    used_seeds = range(check_count("first_seed", first_seed, at_least=0), first_seed + seeds)
    check_count("num_updates", num_updates)
    check_count("eval_every", eval_every)
    check_choice("task_cost", task_cost, TASK_COSTS)
    check_dataset(dataset)
    _check_methods(methods)
    if tuning is not None:
        check_instance("tuning", tuning, Tuning, "Tuning(), or None")
    if resume and folder is None:
        raise ArgumentError("resume: expected a `folder` to resume from")
    if isinstance(scheduler, Scheduler):
        raise ArgumentError(
            "scheduler: expected a function that returns a scheduler for each run, got a scheduler, which only one run "
            "can use"
        )
    if not (availability is None or callable(availability) or isinstance(availability, str)):
        availability = tuple(availability)
    if isinstance(averaging, str):
        averaging = WeightAveraging.parse(averaging)
    arguments = {**locals(), "seeds": used_seeds}
    settings = comparison_settings(dataset, arguments)
    names = ("num_updates", "duration", "task_cost", "concurrency", "refill", "scheduler", "delays", "availability")
    options: dict[str, Any] = {name: arguments[name] for name in names}
    split = partial(
        FederatedDataset.split,
        dataset,
        clients,
        partition=workloads.partition(partition) if isinstance(partition, str) else partition,
        holdout=holdout,
        validation=validation,
        batch=batch,
    )
    with single_threaded(), shared_executor(executor) as workers, ExitStack() as stack:
        federations = [split(seed=seed) for seed in used_seeds]
        workload = workloads.parse_workload(scheduler, delays, availability)
        first = federations[0].trainable_clients
        if averaging is not None:
            methods = averaging.apply(methods, num_updates, first)
        buffers = _buffers_of(methods, first, buffer)
        for federation in federations:
            for method in methods:
                _check_startable(federation, method, workload, concurrency, buffers[method.name], refill)
        tuned: dict[str, object] | None = None
        if tuning is not None:
            methods, tuned = tuning.apply(
                methods,
                split,
                validation=validation,
                used_seeds=used_seeds,
                **options,
                buffer=buffer,
                executor=workers,
                progress=progress,
            )
            # A tuned rate is the best rate at this concurrency.
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", StabilityWarning)
        settings |= {
            "tuning": tuned,
            "methods": method_settings(methods),
            "clients_without_samples": [sorted(set(range(clients)) - set(f.trainable_clients)) for f in federations],
        }
        stored = stack.enter_context(ComparisonProgress(Path(folder), settings, resume=resume)) if folder else None
        options |= {**workload, "eval_every": eval_every, "eval_starts": eval_starts, "executor": workers}
        curves = {} if stored is None else stored.load_curves(settings["methods"])
        runner = _Runner(options, averaging, buffers, stored, progress, first_seed, curves)
        runs = {method.name: [runner.run(method, federation) for federation in federations] for method in methods}
        drawn = next((curves[name] for name in runs if name in curves), None)
        landscape = None if drawn is None else compute_landscape(federations[0], drawn)
    return Comparison(settings, runs, landscape)


def comparison_settings(dataset: LabelledDataset, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a comparison of methods as JSON values, without the methods and the tuning of their rates.

    Args:
        dataset: the data set.
        arguments: the other arguments of [`compare`][manifoldagg.experiments.compare] that determine its results, by
            name. `seeds` are the seeds instead of their number.

    Raises:
        ArgumentError: if the target or the name of a scheduler, a delay or an availability is invalid.
    """
    target = arguments["target"]
    named = {name: arguments[name] for name in ("scheduler", "delays", "availability")}
    optional = {
        **{name: arguments[name] for name in ("duration", "buffer", "refill")},
        "averaging": stable_repr(arguments["averaging"]),
        "eval_starts": arguments["eval_starts"] or None,
        "augment": stable_repr(dataset.augment),
        "metrics": None if dataset.has_default_metrics else list(dataset.metrics),
    }
    return {
        "data": {"name": dataset.name, "checksum": f"{dataset.checksum:08x}"},
        "clients": arguments["clients"],
        "num_updates": arguments["num_updates"],
        "seeds": list(arguments["seeds"]),
        "model": stable_repr(dataset.model),
        "partition": stable_repr(arguments["partition"]),
        "holdout": arguments["holdout"],
        "validation": arguments["validation"],
        "batch": arguments["batch"],
        "target": check_number("target", dataset.target if target is None else target, at_least=0, at_most=1),
        **{name: stable_repr(value) for name, value in named.items()},
        "files": referenced_files(*named.values()),
        "task_cost": arguments["task_cost"],
        "concurrency": arguments["concurrency"],
        "eval_every": arguments["eval_every"],
        **{name: value for name, value in optional.items() if value is not None},
    }


def method_settings(methods: Iterable[Method]) -> dict[str, dict[str, Any]]:
    """Return the rules and the trainers of methods as JSON values, by the names of the methods."""
    return {one.name: {"rule": stable_repr(one.rule), "trainer": stable_repr(one.trainer)} for one in methods}


@dataclass(frozen=True)
class _Runner:
    """A runner that executes the runs of a comparison, or loads those that have finished."""

    options: Mapping[str, Any]
    averaging: WeightAveraging | None
    buffers: Mapping[str, int | None]
    stored: ComparisonProgress | None
    progress: Callable[[str, int], None] | None
    first_seed: int
    curves: dict[str, LearnedCurve]

    def run(self, method: Method, federation: FederatedDataset) -> RunResult:
        """Run a method, or load its finished run."""
        name = method.name
        seed = federation.seed
        stored = self.stored
        if stored is not None and (finished := stored.load_run(name, seed)) is not None:
            for row in finished.evaluations:
                stored.log_evaluation(name, seed, row)
            return finished
        options = {
            **self.options,
            "buffer": self.buffers[name],
            "on_update": partial(self._save_curve, name) if seed == self.first_seed else None,
            "progress": self.progress and partial(self.progress, name, seed),
        }
        if self.averaging is not None:
            rule: Any = method.bind(federation.trainable_clients, self.buffers[name]).rule
            options["averaging"] = self.averaging.for_run(rule, self.options["num_updates"])
        if stored is not None:
            options["log"] = partial(stored.log_evaluation, name, seed)
            options |= {"checkpoint": stored.checkpoint_policy(name, seed), "resume": True}
        with error_context(f"methods: {name}"):
            result = run(federation, method, **options)
        if stored is not None:
            stored.save_run(name, seed, result)
        return result

    def _save_curve(self, name: str, event: UpdateEvent) -> None:
        """Save the first curve of a method that arrives in the second half of a run."""
        is_curve = len(event.payload.points) > 1 and "vertices" not in event.message.tensors
        late = event.update_index >= LANDSCAPE_AFTER * self.options["num_updates"]
        if is_curve and late and name not in self.curves:
            phi = torch.cat([event.message.start[None], event.payload.points])
            self.curves[name] = LearnedCurve(name, event.update_index, event.client, phi)
            if self.stored is not None:
                self.stored.save_curve(self.curves[name])


def _check_methods(methods: Any) -> None:
    """Check that there is a list of methods with distinct names."""
    if isinstance(methods, str):
        raise ArgumentError(f"methods: expected a list of Methods, got {methods!r}; write methods({methods!r})")
    if isinstance(methods, Method):
        raise ArgumentError(f"methods: expected a list of Methods, got the Method {methods.name!r}; write [method]")
    if not isinstance(methods, Collection):
        raise ArgumentError(f"methods: expected a list of Methods, got {type(methods).__name__}")
    for place, method in enumerate(methods):
        check_method(f"methods[{place}]", method)
    if len({method.name for method in methods}) < len(methods) or not methods:
        raise ArgumentError("methods: expected at least one method, and distinct names")


def _buffers_of(methods: Iterable[Method], clients: Sequence[int], buffer: int | None) -> dict[str, int | None]:
    """Return `buffer` for each method whose rule has a buffer, and `None` for the others."""
    found: dict[str, int | None] = {}
    for method in methods:
        with error_context(f"methods: {method.name}"):
            found[method.name] = buffer if has_buffer(method.bind(clients).rule) else None
    if buffer is not None and not any(found.values()):
        raise ArgumentError("buffer: expected a method with a buffer, such as fedbuff; omit buffer")
    return found


def _check_startable(
    federation: FederatedDataset,
    method: Method,
    workload: Mapping[str, Any],
    concurrency: int | None,
    buffer: int | None,
    refill: int | None,
) -> None:
    """Check that a run of the method can start on the federated data set."""
    clients = federation.trainable_clients
    with error_context(f"methods: {method.name}"):
        rule: Any = method.bind(clients, buffer).rule
        sampler_for(rule, clients, concurrency, np.random.default_rng(0), refill=refill)
        sizes = {client: len(federation.train[client]) for client in clients}
        message = Server.of(federation.model(), rule, weights=sizes).dispatch(clients[0]).message
        steps = getattr(method.trainer, "num_steps", None)
        if steps is not None:
            steps(message, federation.num_batches(clients[0]))
    course = build_event_loop(federation, rule, **workload, concurrency=concurrency, refill=refill)
    while isinstance(event := course.next(), DispatchEvent):
        with error_context("scheduler"):
            course.submit(event.client, float(federation.num_batches(event.client)))


def _run_to_dict(run_: RunResult) -> dict[str, object]:
    """Convert a run to JSON values. Each column of a table becomes a list."""
    return {
        "trace": _columns(TaskRecord, run_.trace),
        **({"starts": _columns(StartEvaluation, run_.starts)} if run_.starts else {}),
        "client_accuracy": run_.client_accuracy,
        "gini": run_.gini,
        "theil": run_.theil,
        "rejected": run_.rejected,
    }


def _columns(kind: type[Any], rows: Sequence[Any]) -> dict[str, list[Any]]:
    return {one.name: [getattr(row, one.name) for row in rows] for one in fields(kind)}


def _summarise(runs: Sequence[RunResult], target: float) -> dict[str, float | int | None]:
    last = [run_.evaluations[-1] for run_ in runs]
    reached = [updates for run_ in runs if (updates := run_.updates_to(target)) is not None]
    staleness = [x for run_ in runs for x in run_.staleness] or [0]
    # The first metric is the accuracy.
    metrics = {name: [(row.metrics or {})[name] for row in last] for name in list(last[0].metrics or ())[1:]}
    return {
        "final_mean": statistics.fmean(row.accuracy for row in last),
        "final_sd": _standard_deviation([row.accuracy for row in last]),
        **{f"{name}_mean": statistics.fmean(values) for name, values in metrics.items()},
        **{f"{name}_sd": _standard_deviation(values) for name, values in metrics.items()},
        "best_mean": statistics.fmean(max(run_.accuracy) for run_ in runs),
        "best_sd": _standard_deviation([max(run_.accuracy) for run_ in runs]),
        "updates_to_target_mean": _mean(reached),
        "reached_target": len(reached),
        "staleness_mean": statistics.fmean(staleness),
        "staleness_max": max(staleness),
        "gini_mean": statistics.fmean(run_.gini for run_ in runs),
        "theil_mean": statistics.fmean(run_.theil for run_ in runs),
        "rejected": sum(run_.rejected for run_ in runs),
        "gradients_mean": statistics.fmean(row.gradients for row in last),
        "bytes_mean": statistics.fmean(row.bytes for row in last),
    }


def _summarise_average(runs: Sequence[RunResult]) -> dict[str, float | int | None]:
    """Summarise the final `average_accuracy`, `loss` and `average_loss` over the runs."""
    accuracy, losses, average_losses = (
        [value for run_ in runs if (value := getattr(run_.evaluations[-1], name)) is not None]
        for name in ("average_accuracy", "loss", "average_loss")
    )
    return {
        "average_mean": _mean(accuracy),
        "average_sd": _standard_deviation(accuracy),
        "loss_mean": _mean(losses),
        "average_loss_mean": _mean(average_losses),
    }


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _standard_deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None
