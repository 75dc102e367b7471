r"""Measure the effect of corrections on a single step: Manifold, Figure 1; Report, Figures 1 and 3.

    python benchmarks/papers/corrections.py [--task digits|mnist] [--seeds 5] [--updates 800] [--looks 40]

The script runs an asynchronous simulation and stops at equally spaced updates. At each stop it applies every
correction to the arriving stale update. Only the correction of the run itself changes the server model. For each
correction, the script records the loss of the resulting model minus the loss with the tangent reading. It evaluates
the loss on the test samples and on the client's training samples. Four step lengths are compared:

* *rate*: $\rho\,\pi v$, the step of the run with its rate $\rho$.
* *length*: $\rho\,\|v\|\,\pi v / \|\pi v\|$, the same length for all corrections.
* *tenth*: $0.1\,\pi v$, independent of the current rate.
* *whole*: $\pi v$, the full corrected displacement.

Stateful corrections process all updates of the run. *fresh* is the reference without staleness: the client trains
again from the current model with the same batches. A correction approximates this result.

A curve has a control point. The control point is fitted to the training path by least squares, or learned in five more
epochs at a tenth of the rate, as in the Report. The script compares the loss on the curve with the loss on the chord
at 0.1, 0.25 and 0.5 of the chord length. It does so at the client's base model (*no delay*), and at the current model
for each method of moving the end point and the control point there.

FedAsync and ASGD move the server model, with a rate that falls to 0 or a constant rate. Each phase is one third of a
run. The script averages each phase within a seed. It reports the mean over the seeds with the 95 % Student interval.
"""

import argparse
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from records import RESULTS, Parts, cell, markdown, table, write
from torch import Tensor
from torch.nn.functional import cross_entropy

from manifoldagg._io import atomic_write, new_figure
from manifoldagg.corrections import (
    AutoThreshold,
    Correction,
    DelayCompensated,
    Frame,
    OrthoDC,
    OrthoDyn,
    OrthoPos,
    Pairwise,
    Position,
    Tangent,
    rotate_control,
)
from manifoldagg.curves.distance import parameter_at_distance
from manifoldagg.experiments import load_dataset
from manifoldagg.federated import Message, Outcome, Update, clients, rules
from manifoldagg.federated.schedules import Cosine, rate_at
from manifoldagg.manifolds import ParameterSpace
from manifoldagg.simulation import ClientTask, FederatedDataset, Method, TaskId, dirichlet_partition, run, run_task

CLIENTS = 30
PHASES = ("early", "middle", "late")
STEPS = ("rate", "length", "tenth", "whole")
PLACES = (
    ("position, rotated", "position"),
    ("position, rotated", "position, shifted"),
    ("OrthoDC(1), rotated", "OrthoDC(1)"),
)
LOSSES = ("test", "client")
PARTS = (0.1, 0.25, 0.5)
TESTED = 600
"""Maximum number of held-out samples for evaluating a loss."""
RATE = 3.0
ROUNDING = 1e-3
"""Tolerance for repeated training, relative to the length of the client's step.

On some processors, the rounding of a sum depends on memory alignment. Training is therefore not bitwise reproducible.
"""
STATELESS: Mapping[str, Correction] = {
    "tangent": Tangent(),
    "position": Position(),
    "OrthoDC(-1)": OrthoDC(-1.0),
    "OrthoDC(0)": OrthoDC(0.0),
    "OrthoDC(1)": OrthoDC(1.0),
    "OrthoDC(1), by tensor": OrthoDC(1.0, "tensor"),
    "OrthoPos": OrthoPos(),
    "OrthoPos, clipped": OrthoPos(clip=True),
    "DC-ASGD-c, λ = 2": DelayCompensated(2.0),
}
REMEMBERING: Mapping[str, Correction] = {
    "OrthoDC(auto)": AutoThreshold(),
    "OrthoDyn": OrthoDyn(),
    "DC-ASGD-a, λ₀ = 2": DelayCompensated(2.0, adaptive=True),
    "DC-ASGD-a, λ₀ = 5": DelayCompensated(5.0, adaptive=True),
}
CARRIERS: Mapping[str, Correction] = {"FedAsync": Position(), "ASGD": Tangent()}
REPORTED = ("tangent", "position", "OrthoDC(0)", "OrthoPos", "DC-ASGD-a, λ₀ = 5")
"""Corrections in Figure 1 of the Report, where OrthoDC(0) is called OrthoGrad."""
BINS = 10
FIGURE = ("position", "OrthoDC(0)", "OrthoPos", "OrthoDC(1)", "OrthoDC(auto)", "DC-ASGD-a, λ₀ = 5", "fresh")
WAYS = (
    "no delay",
    "tangent",
    "position",
    "position, shifted",
    "position, rotated",
    "OrthoDC(1)",
    "OrthoDC(1), rotated",
)


@dataclass(frozen=True)
class Watched(rules.AsyncCorrected):
    """`AsyncCorrected` that passes each update to the callback `look` before the step."""

    accepts_tensor_lists: ClassVar[bool] = False
    look: Callable[[Update, float, int], None] | None = field(default=None, compare=False, kw_only=True)

    def step(self, space: Any, state: Any, update: Update, *, out: Any = None) -> tuple[Any, Outcome]:
        """Call `look` and take the step."""
        if self.look is not None:
            version = state["version"]
            self.look(update, min(1.0, update.weight * rate_at(self.rate, version)), version)
        return super().step(space, state, update, out=out)


class Looks:
    """Observer that applies all corrections to selected updates of a run.

    Args:
        federation: the federated data set of the run.
        every: the number of updates between two observations.
        local: the trainer of the run.
        curves: the curve trainers by name.
    """

    def __init__(
        self, federation: FederatedDataset, every: int, local: clients.Local, curves: Mapping[str, Any]
    ) -> None:
        self._federation = federation
        self._every = every
        self._local = local
        self._curves = curves
        model = federation.model()
        self._space = ParameterSpace.of(model)
        self._loss = self._space.loss(model, cross_entropy)
        self._segments = dict(
            zip([leaf.name for leaf in self._space.layout.leaves], self._space.layout.sizes, strict=True)
        )
        held = torch.cat([torch.from_numpy(part) for part in federation.held_out])
        order = torch.randperm(len(held), generator=torch.Generator().manual_seed(federation.seed))
        self._held = self._samples(held[order[:TESTED]])
        self._states: dict[str, Any] = dict.fromkeys(REMEMBERING)
        self._moved: dict[int, Tensor] = {}
        self._answers: Counter[int] = Counter()
        self.seen: list[dict[str, Any]] = []

    def look(self, update: Update, rho: float, version: int) -> None:
        """Update the stateful corrections, and record an observation if one is due."""
        client = update.client
        nth = self._answers[client]
        self._answers[client] += 1
        (end,) = update.points
        frame = Frame.of_points([end], update.base, update.current, segments=self._segments)
        corrected = {}
        for name, correction in REMEMBERING.items():
            done = correction.apply(frame, self._states[name])
            self._states[name] = done.state
            corrected[name] = done.displacements()[0]
        if (version + 1) % self._every == 0 and update.staleness > 0:
            others = [moved for other, moved in self._moved.items() if other != client]
            for name, correction in {**STATELESS, "OrthoFL pairwise": Pairwise(others)}.items():
                corrected[name] = correction.apply(frame).displacements()[0]
            self._note(update, end, rho, version, TaskId(client, nth), corrected)
        self._moved[client] = end - update.base

    def _note(
        self, update: Update, end: Tensor, rho: float, version: int, key: TaskId, corrected: dict[str, Tensor]
    ) -> None:
        base, now = update.base, update.current
        learned = {name: self._train(trainer, key, base) for name, trainer in self._curves.items()}
        for name, points in learned.items():
            if (points[-1] - end).norm() > ROUNDING * (end - base).norm():
                raise RuntimeError(f"{name}: the client's model is another one when it trains again")
        corrected["fresh"] = self._train(self._local, key, now)[-1] - now
        v, g = end - base, now - base
        part = self._samples(torch.from_numpy(self._federation.train[key.client]))

        def losses(point: Tensor) -> list[float]:
            with torch.no_grad():
                return [float(self._loss(point, samples)) for samples in (self._held, part)]

        length = float(v.norm())
        steps: dict[str, dict[str, list[float]]] = {}
        for name, u in corrected.items():
            scales = {"rate": rho, "length": rho * length / max(float(u.norm()), 1e-12), "tenth": 0.1, "whole": 1.0}
            steps[name] = {step: losses(now + scale * u) for step, scale in scales.items()}
        strict = OrthoDC(1.0).apply(Frame.of_points([end], base, now)).displacements()[0]
        chords: dict[str, tuple[Tensor, Tensor]] = {"no delay": (base, v), "tangent": (now, v)}
        chords |= {"position": (now, end - now), "OrthoDC(1)": (now, strict)}
        along = {name: {str(r): losses(start + r * u) for r in PARTS} for name, (start, u) in chords.items()}
        curves: dict[str, Any] = {}
        for name, points in learned.items():
            ways = self._ways(points[0], base, end, now, strict)
            curves[name] = {}
            for way, control in ways.items():
                start, u = chords[way.partition(",")[0]]
                rows = torch.stack([control - start, u])
                found = {}
                for r in PARTS:
                    s = parameter_at_distance(rows, r)
                    found[str(r)] = losses(start + 2 * s * (1 - s) * rows[0] + s * s * rows[1])
                curves[name][way] = found
            bent = points[0] - (base + end) / 2
            curves[name]["bend"] = float(bent.norm()) / length
        self.seen.append(
            {
                "updates": version + 1,
                "client": key.client,
                "staleness": update.staleness,
                "rho": rho,
                "cosine": float(v @ g / (v.norm() * g.norm()).clamp(min=1e-30)),
                "along": float(v @ g / (g @ g).clamp(min=1e-30)),
                "drift": float(g.norm()) / length,
                "threshold": self._states["OrthoDC(auto)"]["threshold"],
                "phase": self._states["OrthoDyn"]["phase"],
                "now": losses(now),
                "was": losses(base),
                "steps": steps,
                "chords": along,
                "curves": curves,
            }
        )

    @staticmethod
    def _ways(control: Tensor, base: Tensor, end: Tensor, now: Tensor, strict: Tensor) -> dict[str, Tensor]:
        """Return the control point at the current model for each method of moving it there."""
        middle = (base + end) / 2
        aligned = OrthoDC(1.0).apply(Frame.of_points([control, end], base, now)).displacements()[0]
        return {
            "no delay": control,
            "tangent": now + (control - base),
            "position": control,
            "position, shifted": (now + end) / 2 + (control - middle),
            "position, rotated": rotate_control(control, base, end, now, end),
            "OrthoDC(1)": now + aligned,
            "OrthoDC(1), rotated": rotate_control(control, base, end, now, now + strict),
        }

    def _train(self, trainer: Any, key: TaskId, start: Tensor) -> Tensor:
        return run_task(ClientTask(self._federation, trainer, key, Message(start))).points

    def _samples(self, places: Tensor) -> tuple[Tensor, Tensor]:
        return self._federation.dataset.inputs[places], self._federation.dataset.labels[places]


def once(given: argparse.Namespace, carrier: str, falling: bool, seed: int) -> list[dict[str, Any]]:
    """Return the observations of one run."""
    source = "digits" if given.task == "digits" else f"idx:{given.data / 'mnist'}"
    split = partial(dirichlet_partition, concentration=0.5)
    federation = FederatedDataset.split(load_dataset(source), CLIENTS, partition=split, seed=seed)
    plain: dict[str, Any] = {"rate": 0.01, "proximal": 1e-3}
    local = clients.Local(epochs=given.epochs, **plain)
    curves = {
        "fitted": clients.Trajectory(epochs=given.epochs, **plain),
        "learned": clients.Curve(epochs=(given.epochs, 5), control_rate=1e-3, **plain),
    }
    seen = Looks(federation, max(1, given.updates // given.looks), local, curves)
    rate = Cosine(RATE, 0.0, given.updates) if falling else RATE
    rule = Watched(rate=rate, correction=CARRIERS[carrier], look=seen.look)
    run(federation, Method(carrier, rule, local), num_updates=given.updates, eval_every=given.updates)
    return seen.seen


Looked = list[dict[str, Any]]


def by_phase(looks: Looked, updates: int, value: Callable[[dict[str, Any]], float], parts: int = 3) -> list[float]:
    """Return the mean of `value` in each of `parts` equal parts of a run."""
    found: list[list[float]] = [[] for _ in range(parts)]
    for look in looks:
        found[min(parts * (look["updates"] - 1) // updates, parts - 1)].append(value(look))
    return [statistics.fmean(each) for each in found]


def over_seeds(
    runs: list[Looked], updates: int, value: Callable[[dict[str, Any]], float], parts: int = 3
) -> list[list[float]]:
    """Return the means of `value` for each part of a run, as one list over the seeds per part."""
    return [[*each] for each in zip(*(by_phase(looks, updates, value, parts) for looks in runs), strict=True)]


def stepped(name: str, step: str, loss: str) -> Callable[[dict[str, Any]], float]:
    """Return a function that computes the loss of a correction minus the loss of the tangent reading."""
    at = LOSSES.index(loss)
    return lambda look: look["steps"][name][step][at] - look["steps"]["tangent"][step][at]


def bent(kind: str, way: str, parts: tuple[float, ...], loss: str) -> Callable[[dict[str, Any]], float]:
    """Return a function that computes the mean loss on a curve minus the mean loss on its chord."""
    at = LOSSES.index(loss)
    chord = way.partition(",")[0]
    return lambda look: statistics.fmean(
        look["curves"][kind][way][str(r)][at] - look["chords"][chord][str(r)][at] for r in parts
    )


def placed(way: str, other: str, loss: str) -> Callable[[dict[str, Any]], float]:
    """Return a function that computes the difference in loss between two placements of a learned control point.

    Both curves must have the same chord.
    """
    at = LOSSES.index(loss)
    return lambda look: statistics.fmean(
        look["curves"]["learned"][way][str(r)][at] - look["curves"]["learned"][other][str(r)][at] for r in PARTS
    )


def relative(name: str, step: str) -> Callable[[dict[str, Any]], float]:
    """Return a function that computes the relative loss of a method among the methods of the Report's Figure 1.

    The best method has value 0 and the worst method has value 1.
    """

    def value(look: dict[str, Any]) -> float:
        seen = {one: look["steps"][one][step][0] for one in REPORTED}
        low, high = min(seen.values()), max(seen.values())
        return (seen[name] - low) / (high - low) if high > low else 0.5

    return value


def summary(runs: list[Looked], updates: int) -> dict[str, Any]:
    """Return all statistics of a carrier, as one value per seed for each phase."""
    names = [name for name in runs[0][0]["steps"] if name != "tangent"]
    kinds = [*runs[0][0]["curves"]]
    told: dict[str, Callable[[dict[str, Any]], float]] = {
        "loss on the test samples": lambda look: look["now"][0],
        "loss on the client's": lambda look: look["now"][1],
        "staleness": lambda look: look["staleness"],
        "rate of the step": lambda look: look["rho"],
        "cos(v, g)": lambda look: look["cosine"],
        "share of cos(v, g) ≤ 0": lambda look: look["cosine"] <= 0,
        "length of g / length of v": lambda look: look["drift"],
        "⟨v, g⟩ / ⟨g, g⟩": lambda look: look["along"],
        "share of ϑ = 1 by auto": lambda look: look["threshold"] == 1,
        "share of OrthoDyn on position": lambda look: look["phase"] == "position",
        "bend of a fitted curve": lambda look: look["curves"]["fitted"]["bend"],
        "bend of a learned curve": lambda look: look["curves"]["learned"]["bend"],
    }
    return {
        "state": {name: over_seeds(runs, updates, value) for name, value in told.items()},
        "steps": {
            name: {
                step: {loss: over_seeds(runs, updates, stepped(name, step, loss)) for loss in LOSSES} for step in STEPS
            }
            for name in names
        },
        "relative": {
            step: {name: over_seeds(runs, updates, relative(name, step)) for name in REPORTED} for step in STEPS
        },
        "curves": {
            kind: {
                way: {
                    loss: {
                        "tenth": over_seeds(runs, updates, bent(kind, way, PARTS[:1], loss)),
                        "all": over_seeds(runs, updates, bent(kind, way, PARTS, loss)),
                    }
                    for loss in LOSSES
                }
                for way in WAYS
            }
            for kind in kinds
        },
        "places": {
            f"{way} less {other}": {loss: over_seeds(runs, updates, placed(way, other, loss)) for loss in LOSSES}
            for way, other in PLACES
        },
        "falls": {
            kind or "chord": {loss: falls(runs, updates, kind, loss) for loss in LOSSES} for kind in ("", *kinds)
        },
        "figure": {
            name: {step: over_seeds(runs, updates, stepped(name, step, "test"), BINS) for step in ("rate", "tenth")}
            for name in FIGURE
        },
    }


def falls(runs: list[Looked], updates: int, kind: str, loss: str) -> list[list[float]]:
    """Return the decrease of the loss from the client's base model.

    The decrease is measured along a curve, or along the chord if `kind` is empty.
    """
    at = LOSSES.index(loss)

    def fall(look: dict[str, Any]) -> float:
        seen = look["curves"][kind]["no delay"] if kind else look["chords"]["no delay"]
        return statistics.fmean(look["was"][at] - seen[str(r)][at] for r in PARTS)

    return over_seeds(runs, updates, fall)


def cells(values: list[list[float]], digits: int = 2, scale: float = 1e3) -> list[str]:
    """Format one table cell per phase."""
    return [cell(each, digits, scale) for each in values]


def page(found: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return the parts of the result page for all carriers."""
    parts = [
        "Losses are in thousandths, less those of the tangent reading of the same update; an asterisk where the "
        "interval of 95 % leaves out 0. Less is better."
    ]
    for name, told in found.items():
        parts += [f"## {name}", table(["", *PHASES], [[row, *cells(v, 3, 1)] for row, v in told["state"].items()])]
        for loss, of in zip(LOSSES, ("test samples", "client's own samples"), strict=True):
            steps = STEPS if loss == "test" else STEPS[:1]
            for step in steps:
                rows = [[row, *cells(v[step][loss])] for row, v in told["steps"].items()]
                parts += [f"Step *{step}*, on the {of}:", table(["correction", *PHASES], rows)]
        rows = [
            [row, *cells(told["relative"]["rate"][row], 2, 1), *cells(told["relative"]["whole"][row], 2, 1)]
            for row in REPORTED
        ]
        headings = ["between best, 0, and worst, 1", *PHASES, *(f"*whole*, {phase}" for phase in PHASES)]
        parts += ["As the Report's Figure 1, steps *rate* and *whole*, on the test samples:", table(headings, rows)]
        for loss, of in zip(LOSSES, ("test samples", "client's own samples"), strict=True):
            rows = [
                [f"{kind}: {way}", *cells(v[loss]["tenth"]), *cells(v[loss]["all"])]
                for kind, ways in told["curves"].items()
                for way, v in ways.items()
            ]
            headings = ["curve less chord", *(f"{p}, at .1" for p in PHASES), *(f"{p}, at all" for p in PHASES)]
            parts += [f"Curves against chords at equal distance, on the {of}:", table(headings, rows)]
        rows = [[one, *cells(v["test"]), *cells(v["client"])] for one, v in told["places"].items()]
        headings = ["control point of a learned curve", *(f"test, {p}" for p in PHASES)]
        parts += [table([*headings, *(f"client's, {p}" for p in PHASES)], rows)]
        rows = [[kind, *cells(v["test"]), *cells(v["client"])] for kind, v in told["falls"].items()]
        headings = ["fall of the loss", *(f"test, {p}" for p in PHASES), *(f"client's, {p}" for p in PHASES)]
        parts += ["By how much the loss falls from where the client started, mean over the parts:"]
        parts += [table(headings, rows)]
    return parts


def draw(found: Mapping[str, dict[str, Any]], path: Path) -> None:
    """Plot the loss of each correction minus the loss of the tangent reading along the run."""
    figure = new_figure(4.2 * len(found), 6.4)
    axes = figure.subplots(2, len(found), squeeze=False, sharex=True)
    for column, (name, told) in enumerate(found.items()):
        for panel, step in zip(axes[:, column], ("rate", "tenth"), strict=True):
            for correction, seen in told["figure"].items():
                means = [1e3 * statistics.fmean(each) for each in seen[step]]
                panel.plot([(i + 0.5) / BINS for i in range(BINS)], means, label=correction, linewidth=1.2)
            panel.axhline(0, color="black", linewidth=0.6)
            panel.set_title(f"{name}\nstep {step}", fontsize="small")
            panel.set_yscale("symlog", linthresh=1.0)
            panel.grid(alpha=0.25)
        axes[1, column].set_xlabel("part of the run")
    axes[0, 0].set_ylabel("test loss less tangent, 1e-3")
    axes[1, 0].set_ylabel("test loss less tangent, 1e-3")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    with atomic_write(path) as draft:
        figure.savefig(draft, dpi=110)


def main() -> None:
    """Execute the missing runs, and write the tables and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=("digits", "mnist"), default="digits")
    parser.add_argument("--data", type=Path, default=Path("build/data"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=800)
    parser.add_argument("--looks", type=int, default=40)
    parser.add_argument("--schedules", default="falling,constant")
    parser.add_argument("--carriers", default=",".join(CARRIERS))
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--out", type=Path, default=RESULTS, help="output directory; each schedule has its own files")
    parser.add_argument("--parts", type=Path, default=Path("build/papers/corrections"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    parts = Parts(given.parts)
    told = {"task": given.task, "seeds": given.seeds, "num_updates": given.updates, "looks": given.looks}
    told["epochs"] = given.epochs
    for falling in [schedule == "falling" for schedule in given.schedules.split(",")]:
        found = {}
        for carrier in given.carriers.split(","):
            runs = []
            for seed in range(given.seeds):
                settings = {**told, "seeds": 1, "seed": seed, "carrier": carrier, "falling": falling}
                runs.append(parts.of(settings, partial(once, given, carrier, falling, seed)))
            name = f"{carrier} moves the model, rate {'falling to 0' if falling else 'constant'}"
            found[name] = summary(runs, given.updates)
        out = given.out / f"corrections-{given.task}{'' if falling else '-constant'}"
        write(
            out, {"found": found}, told, markdown(f"What corrections do to one step: {given.task}", page(found), told)
        )
        draw(found, out.with_suffix(".png"))


if __name__ == "__main__":
    main()
