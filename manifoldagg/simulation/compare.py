"""Several methods on the same federations: the same data, initial models and order of events, seed by seed."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manifoldagg.curves import Bezier, Plane, plane
from manifoldagg.errors import ArgumentError, check_count, check_number
from manifoldagg.manifolds import ParameterSpace
from manifoldagg.simulation.errands import one_thread
from manifoldagg.simulation.federation import Federation
from manifoldagg.simulation.partitions import dirichlet_partition
from manifoldagg.simulation.run import Event, Method, Run, run
from manifoldagg.simulation.tasks import Task

__all__ = ["Comparison", "Landscape", "compare"]

PICTURED = 0.5
"""The plane is drawn for the first curve that arrives after this part of the rounds."""


@dataclass(frozen=True)
class Landscape:
    """The planes of one learned curve: the loss of the client's own data, and of everybody's held-out data."""

    method: str
    round: int
    client: int
    local: Plane
    held_out: Plane


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    Attributes:
        settings: everything that the results follow from.
        runs: by method, one run a seed.
        landscape: of the first method that learns curves; `None` if none does.
    """

    settings: dict[str, Any]
    runs: dict[str, list[Run]]
    landscape: Landscape | None = field(compare=False)

    def summary(self) -> dict[str, dict[str, float | int | None]]:
        """A row of the table for each method; means and sample standard deviations over the seeds."""
        return {name: _summarise(runs, self.settings["target"]) for name, runs in self.runs.items()}

    def results(self) -> dict[str, object]:
        """A tree for JSON that depends on the settings alone: equal seeds give equal bits."""
        methods = {
            name: {
                "summary": summary,
                "runs": [
                    {key: value for key, value in asdict(run_).items() if not key.endswith("seconds")}
                    | {"gini": run_.gini, "theil": run_.theil}
                    for run_ in self.runs[name]
                ],
            }
            for name, summary in self.summary().items()
        }
        return {"settings": self.settings, "methods": methods}

    def seconds(self) -> dict[str, list[float]]:
        """Wall-clock seconds by method, one number a seed."""
        return {name: [run_.seconds for run_ in runs] for name, runs in self.runs.items()}


def compare(
    task: Task,
    methods: Sequence[Method],
    *,
    clients: int = 30,
    rounds: int = 200,
    seeds: int = 3,
    concentration: float = 0.5,
    target: float | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> Comparison:
    """Run every method on every seed's federation, with one torch thread so that results repeat bit for bit.

    Args:
        task: what is learned.
        methods: what is compared, with distinct names.
        clients: how many clients share the data.
        rounds: updates a run.
        seeds: how many repetitions; the seeds are 0, 1, ...
        concentration: of the Dirichlet split.
        target: the accuracy to time; the task's own where not given.
        progress: called with the method's name and the seed after each round.

    Raises:
        ArgumentError: naming the argument that does not fit.
    """
    check_count("seeds", seeds)
    check_count("rounds", rounds)
    target = check_number("target", task.target if target is None else target, at_least=0, at_most=1)
    if len({method.name for method in methods}) < len(methods) or not methods:
        raise ArgumentError("methods: expected at least one, with distinct names")
    with one_thread():
        split = partial(dirichlet_partition, concentration=concentration)
        federations = [Federation.split(task, clients, partition=split, seed=s) for s in range(seeds)]
        pictured: list[tuple[str, Event]] = []

        def watch(name: str, event: Event) -> None:
            if not pictured and event.round >= PICTURED * rounds and len(event.payload.points) > 1:
                pictured.append((name, event))

        runs = {
            method.name: [
                run(
                    federation,
                    method,
                    rounds=rounds,
                    watch=partial(watch, method.name) if federation.seed == 0 else None,
                    progress=progress and partial(progress, method.name, federation.seed),
                )
                for federation in federations
            ]
            for method in methods
        }
        landscape = _landscape(federations[0], *pictured[0]) if pictured else None
    settings: dict[str, Any] = {
        "data": task.name,
        "clients": clients,
        "rounds": rounds,
        "seeds": list(range(seeds)),
        "concentration": concentration if math.isfinite(concentration) else "inf",
        "target": target,
        "methods": {method.name: {"rule": repr(method.rule), "trainer": _describe(method)} for method in methods},
        "not scheduled": [sorted(set(range(clients)) - set(f.scheduled)) for f in federations],
    }
    return Comparison(settings, runs, landscape)


def _landscape(federation: Federation, name: str, event: Event) -> Landscape:
    """The planes of a curve that a client sent."""
    model = federation.model()
    space = ParameterSpace.of(model)
    loss = space.loss(model, nn.functional.cross_entropy)
    phi = torch.cat([event.message.start[None], event.payload.points])

    def over(samples: np.ndarray) -> Plane:
        batch = federation.task.inputs[samples], federation.task.labels[samples]

        def value(theta: Tensor) -> float:
            with torch.no_grad():
                return loss(theta, batch).item()

        return plane(Bezier(space, len(event.payload.points)), phi, value)

    everybody = np.concatenate(federation.held_out)
    return Landscape(name, event.round, event.client, over(federation.train[event.client]), over(everybody))


def _describe(method: Method) -> str:
    """The trainer without the address that the repr of a class of `torch.optim` does not have."""
    trainer = method.trainer
    optimizer = getattr(trainer, "optimizer", None)
    return repr(trainer).replace(repr(optimizer), getattr(optimizer, "__name__", type(optimizer).__name__))


def _summarise(runs: Sequence[Run], target: float) -> dict[str, float | int | None]:
    final = [run_.accuracy[-1] for run_ in runs]
    best = [max(run_.accuracy) for run_ in runs]
    reached = [rounds for run_ in runs if (rounds := run_.rounds_to(target)) is not None]
    late = [x for run_ in runs for x in run_.staleness]
    return {
        "final_mean": statistics.fmean(final),
        "final_sd": _deviation(final),
        "best_mean": statistics.fmean(best),
        "best_sd": _deviation(best),
        "rounds_to_target_mean": statistics.fmean(reached) if reached else None,
        "reached_target": len(reached),
        "staleness_mean": statistics.fmean(late),
        "staleness_max": max(late),
        "gini_mean": statistics.fmean(run_.gini for run_ in runs),
        "theil_mean": statistics.fmean(run_.theil for run_ in runs),
        "refused": sum(run_.refused for run_ in runs),
    }


def _deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None
