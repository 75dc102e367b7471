"""Compare three treatments of curved leaves on one asynchronous task: Riemannian, projected and flat.

    python benchmarks/papers/curved.py [--models sphere,rotation] [--rules tangent] [--seeds 5]

The models are networks for the digits data set. Each model has leaves of one kind:

* *sphere*: the weight vectors of all hidden and output units are unit vectors. Each unit has a separate scale.
* *rotation*: a point of SO(16) rotates the features between two hidden layers.

The treatments start from the same initial model:

* *geometry*: clients run Riemannian SGD. The server corrects, transports and steps on the manifold. All treatments use
  SGD, because the second moments of Adam differ between a manifold and a flat space.
* *projected*: clients run Riemannian SGD. The server steps in the ambient space and projects the result to the
  nearest point of the manifold.
* *flat*: neither the clients nor the server apply a constraint.

The script first searches the local rate, and then the server rate at the best local rate. Both searches are identical
for all treatments. They use validation samples of seeds that no test run uses. An accuracy is a mean over the last
quarter of the updates. Runs of *geometry* also record the distance between the *geometry* and *projected* models after
the same update, relative to the length of the step.
"""

import argparse
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from records import RESULTS, Parts, cell, markdown, table, write
from torch import Tensor, nn

from manifoldagg.corrections import Correction, OrthoDC, Position, Tangent
from manifoldagg.errors import DivergenceError, RuleError
from manifoldagg.experiments import load_dataset
from manifoldagg.experiments.tuning import line_search, tail_accuracy
from manifoldagg.federated import Outcome, Update, clients, rules
from manifoldagg.manifolds import Flat, SpecialOrthogonal, Sphere
from manifoldagg.simulation import FederatedDataset, LabelledDataset, Method, dirichlet_partition, run

CLIENTS = 30
START = 3.0
LOCAL_RATES = (0.3, 1.0)
VALIDATION = (100, 101)
TREATMENTS = ("geometry", "projected", "flat")
CORRECTIONS: Mapping[str, Correction] = {"tangent": Tangent(), "position": Position(), "OrthoDC(1)": OrthoDC(1.0)}
PIXELS = 64
CLASSES = 10


class Spherical(nn.Module):
    """Network with two dense layers, unit weight vectors and one scale per unit."""

    def __init__(self, curved: bool) -> None:
        super().__init__()
        self.first = _leaf(nn.functional.normalize(torch.randn(64, PIXELS), dim=1), Sphere(PIXELS) if curved else None)
        self.second = _leaf(nn.functional.normalize(torch.randn(CLASSES, 64), dim=1), Sphere(64) if curved else None)
        self.lengths = nn.Parameter(torch.ones(64))
        self.scale = nn.Parameter(torch.ones(CLASSES))
        self.bias = nn.Parameter(torch.zeros(64))
        self.offset = nn.Parameter(torch.zeros(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        """Return the class scores."""
        hidden = torch.relu(self.lengths * (x.flatten(1) @ self.first.T) + self.bias)
        return self.scale * (hidden @ self.second.T) + self.offset


class Turned(nn.Module):
    """Network with three dense layers, the second of which rotates its features."""

    def __init__(self, curved: bool) -> None:
        super().__init__()
        self.first = nn.Linear(PIXELS, 16)
        space = SpecialOrthogonal(16)
        turn = space.random_point(generator=torch.Generator().manual_seed(int(torch.randint(2**31, ()))))
        self.turn = _leaf(turn.float(), space if curved else None)
        self.bias = nn.Parameter(torch.zeros(16))
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the class scores."""
        hidden = torch.relu(self.first(x.flatten(1)))
        scores: Tensor = self.last(torch.relu(hidden @ self.turn + self.bias))
        return scores


def _leaf(weights: Tensor, space: Any) -> nn.Parameter:
    leaf = nn.Parameter(weights)
    if space is not None:
        leaf.manifold = space  # type: ignore[attr-defined]  # the attribute that `geoopt.ManifoldParameter` has
    return leaf


MODELS: Mapping[str, type[nn.Module]] = {"sphere": Spherical, "rotation": Turned}


@dataclass(frozen=True)
class Projected(rules.AsyncCorrected):
    """`AsyncCorrected` that steps in the ambient space and projects the result to the manifold."""

    accepts_tensor_lists: ClassVar[bool] = False

    def init(self, space: Any, start: Any) -> Any:
        """Initialise the state for a flat space."""
        return super().init(Flat(len(start)), start)

    def step(self, space: Any, state: Any, update: Update, *, out: Any = None) -> tuple[Any, Outcome]:
        """Take the flat step and project the new model."""
        after, outcome = super().step(Flat(len(update.current)), state, update)
        model = space.project(outcome.model)
        return after, replace(outcome, model=model if out is None else out.copy_(model))


@dataclass(frozen=True)
class Geometry(rules.AsyncCorrected):
    """`AsyncCorrected` that records its relative distance to the `Projected` step."""

    accepts_tensor_lists: ClassVar[bool] = False
    noted: list[float] | None = field(default=None, compare=False, kw_only=True)

    def step(self, space: Any, state: Any, update: Update, *, out: Any = None) -> tuple[Any, Outcome]:
        """Take the step. At every tenth version, compare it with the `Projected` step if the update is stale."""
        other = None
        if self.noted is not None and update.staleness > 0 and state["version"] % 10 == 0:
            other = Projected(self.rate, correction=self.correction).step(space, {**state}, update)[1].model
        after, outcome = super().step(space, state, update, out=out)
        if other is not None:
            moved = outcome.model - update.current
            self.noted.append(float((other - outcome.model).norm() / moved.norm().clamp(min=1e-30)))
        return after, outcome


def once(
    digits: LabelledDataset,
    model: str,
    treatment: str,
    correction: str,
    rate: float,
    local: float,
    seed: int,
    updates: int,
) -> dict[str, Any]:
    """Return the tail accuracy and the diagnostics of one run. A run that diverges has tail accuracy 0."""
    validating = seed >= min(VALIDATION)
    federation = FederatedDataset.split(
        replace(digits, model=partial(MODELS[model], treatment != "flat")),
        CLIENTS,
        partition=partial(dirichlet_partition, concentration=0.5),
        seed=seed,
        validation=0.2 if validating else 0.0,
    )
    noted: list[float] = []
    chosen = CORRECTIONS[correction]
    rule: Any
    if treatment == "projected":
        rule = Projected(rate, correction=chosen)
    elif treatment == "geometry":
        rule = Geometry(rate, correction=chosen, noted=None if validating else noted)
    else:
        rule = rules.AsyncCorrected(rate, correction=chosen)
    trainer = clients.Local(epochs=4, optimizer=torch.optim.SGD, rate=local, proximal=1e-3)
    try:
        found = run(federation, Method(treatment, rule, trainer), num_updates=updates, eval_every=max(1, updates // 40))
    except (DivergenceError, RuleError) as error:
        return {"tail_accuracy": 0.0, "failed": str(error), "rejected": updates, "apart": []}
    return {
        "tail_accuracy": tail_accuracy(found),
        "loss": found.evaluations[-1].loss,
        "rejected": found.rejected,
        "apart": noted,
    }


def main() -> None:
    """Tune the rates, execute the missing runs, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rules", default="tangent")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--out", type=Path, default=RESULTS / "curved")
    parser.add_argument("--parts", type=Path, default=Path("build/papers/curved"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    parts = Parts(given.parts)
    digits = load_dataset("digits")
    found: dict[str, Any] = {}

    def kept(seed: int, rate: float, local: float, of: dict[str, str]) -> dict[str, Any]:
        settings = {**of, "rate": rate, "local": local, "seed": seed, "num_updates": given.updates}
        return parts.of(
            settings,
            partial(once, digits, of["model"], of["treatment"], of["correction"], rate, local, seed, given.updates),
        )

    for model in given.models.split(","):
        for correction in given.rules.split(","):
            treated = {}
            for treatment in TREATMENTS:
                of = {"model": model, "treatment": treatment, "correction": correction}

                def score(rate: float, local: float, of: dict[str, str] = of) -> list[float]:
                    return [kept(seed, rate, local, of)["tail_accuracy"] for seed in VALIDATION]

                tried = {local: statistics.fmean(score(START, local)) for local in LOCAL_RATES}
                local = max(tried, key=lambda rate: tried[rate])
                search = line_search(partial(score, local=local), START, max_doublings=2)
                runs = [kept(seed, search.best_rate, local, of) for seed in range(given.seeds)]
                treated[treatment] = {"local": tried, "local rate": local, "search": search.to_dict(), "runs": runs}
            found[f"{model}, {correction}"] = treated
    told = {"seeds": given.seeds, "num_updates": given.updates, "validation seeds": list(VALIDATION)}
    write(
        given.out, {"found": found}, told, markdown("Curved leaves by geometry, or as flat numbers", page(found), told)
    )


def page(found: Mapping[str, Any]) -> list[str]:
    """Return the parts of the result page."""
    rows = []
    apart = []
    for name, treated in found.items():
        scores = {one: [each["tail_accuracy"] for each in told["runs"]] for one, told in treated.items()}
        row = [name, *(cell(scores[one], 1, 100).rstrip("*") for one in TREATMENTS)]
        for first, second in (("geometry", "projected"), ("geometry", "flat"), ("projected", "flat")):
            row.append(cell([a - b for a, b in zip(scores[first], scores[second], strict=True)], 2, 100))
        rates = (f"{treated[one]['search']['chosen']:g} / {treated[one]['local rate']:g}" for one in TREATMENTS)
        rows.append([*row, *rates])
        noted = [statistics.fmean(each["apart"] or [0.0]) for each in treated["geometry"]["runs"]]
        most = [max(each["apart"], default=0.0) for each in treated["geometry"]["runs"]]
        refused = [str(sum(each["rejected"] for each in treated[one]["runs"])) for one in TREATMENTS]
        apart.append([name, cell(noted, 2, 100).rstrip("*"), f"{100 * max(most):.2f}", *refused])
    differences = ("geometry less projected", "geometry less flat", "projected less flat")
    chosen = [f"{one}: rate / local" for one in TREATMENTS]
    return [
        "Late accuracy in percent, and paired differences in percentage points; an asterisk where the interval of "
        "95 % leaves out 0.",
        table(["model, correction", *TREATMENTS, *differences, *chosen], rows),
        "The two servers' models of the same update, as a part of the step, in percent; and updates that were refused "
        "in all test runs.",
        table(["model, correction", "apart, mean", "apart, most", *(f"refused, {one}" for one in TREATMENTS)], apart),
    ]


if __name__ == "__main__":
    main()
