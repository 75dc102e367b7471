"""Compare routing probabilities on the digits data set: Queue, §5.1 (by updates) and §5.2 (by time).

    python benchmarks/papers/routing.py [--scenarios update:dirichlet,time:dirichlet,update:iid,time:iid] [--seeds 10]

The clients are the queues of a closed Jackson network. Each completed task returns one stochastic gradient
(Generalized AsyncSGD). There are two scenarios:

* *update* has 20 clients with service rates $e^{i/100}$ and a concurrency of 100. It ends after `--updates` updates.
* *time* has 10 clients for each of the service rates 0.01, 0.1 and 1, and a concurrency of 30. It ends after
  `--horizon` units of time.

The routings are uniform, balanced (proportional to the service rates), and optimised. The optimised routings minimise
the bounds G (A = 15, B = 209, L = 1, η = 0.01) and H by descent from the uniform routing, as in the paper.

The same line search tunes the server rate of each routing, on validation samples of seeds that no test run uses. The
columns *at one rate* use the paper's rate 0.01 for all routings. A score is the mean accuracy over the last quarter of
the updates or of the time. The default model is a perceptron, which learns within the available updates. The clients'
data are either identically distributed (*iid*) or partitioned by label with Dirichlet(0.5) (*dirichlet*). Each
gradient uses a minibatch of 64 samples.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from records import RESULTS, Parts, cell, markdown, table, write

from manifoldagg._io import atomic_write, new_figure
from manifoldagg.errors import DivergenceError, RuleError
from manifoldagg.experiments import load_dataset
from manifoldagg.experiments.tuning import line_search
from manifoldagg.federated import clients as trainers
from manifoldagg.federated import rules
from manifoldagg.routing import Bound, ClosedNetwork, TimeBound, UpdateBound, balanced, optimise_routing, uniform
from manifoldagg.simulation import (
    Evaluation,
    FederatedDataset,
    JacksonNetwork,
    Method,
    dirichlet_partition,
    iid_partition,
    run,
)
from manifoldagg.simulation.event_loop import DispatchEvent, DropoutEvent, build_event_loop

VALIDATION = (100, 101)
START = 0.04
PAPERS_RATE = 0.01
POINTS = 40
"""Number of evaluations in a run, and of points on a plotted curve."""
CONSTANTS = {"rate": PAPERS_RATE, "smoothness": 1.0, "noise": 209.0, "gap": 15.0}
SPLITS = {"iid": iid_partition, "dirichlet": partial(dirichlet_partition, concentration=0.5)}
COLOURS = {"uniform": "#e69f00", "balanced": "#009e73", "G": "#cc79a7", "H": "#0072b2"}


@dataclass(frozen=True)
class Scenario:
    """Service rates of the clients, concurrency, and the end of a run.

    Attributes:
        axis: `"update"` or `"time"`, the axis along which accuracy is reported.
        speeds: the service rates of the clients.
        tasks: the concurrency.
        end: the number of updates, or the duration in units of time.
    """

    axis: str
    speeds: np.ndarray
    tasks: int
    end: float

    @staticmethod
    def of(axis: str, updates: int, horizon: float) -> "Scenario":
        """Return the scenario of §5.1 (`"update"`) or of §5.2 (`"time"`)."""
        if axis == "update":
            return Scenario(axis, np.exp(np.arange(1, 21) / 100), 100, updates)
        return Scenario(axis, np.repeat([0.01, 0.1, 1.0], 10), 30, horizon)

    def routings(self) -> dict[str, np.ndarray]:
        """Return the routing probabilities by name."""
        bounds: dict[str, Bound] = {"G": UpdateBound(self.speeds, self.tasks, **CONSTANTS, num_updates=3000)}
        if self.axis == "time":
            bounds["H"] = TimeBound(self.speeds, self.tasks, **CONSTANTS)
        found = {name: optimise_routing(bound, starts=("uniform",)).p for name, bound in bounds.items()}
        return {"uniform": uniform(self.speeds), "balanced": balanced(self.speeds), **found}

    def num_updates(self, federation: FederatedDataset, rule: Any, network: Any) -> int:
        """Return the number of updates until the end.

        On the time axis, this method simulates the schedule without training. It counts the updates until the first
        completion after the end, including that completion.
        """
        if self.axis == "update":
            return int(self.end)
        course = build_event_loop(federation, rule, scheduler=network, concurrency=self.tasks)
        count = 0
        while True:
            event = course.next()
            if isinstance(event, DispatchEvent):
                course.submit(event.client, 1.0)
                continue
            if not isinstance(event, DropoutEvent) and event.completion.time > self.end:
                return count + 1
            count += 1
            course.acknowledge(True)

    def curve(self, rows: list[Evaluation]) -> list[float]:
        """Return the accuracy at `POINTS` equally spaced positions up to the end.

        The value at a position is the accuracy of the last evaluation at or before it.
        """
        along = "updates" if self.axis == "update" else "time"
        places = [(i + 1) / POINTS * self.end for i in range(POINTS)]
        return [[row.accuracy for row in rows if row.value_on(along) <= place][-1] for place in places]


def once(given: Scenario, model: str, split: str, routing: np.ndarray, rate: float, seed: int) -> dict[str, Any]:
    """Return the accuracy curve and the statistics of one run. The curve of a run that diverges is 0."""
    clients = len(given.speeds)
    validating = 0.2 if seed in VALIDATION else 0.0
    federation = FederatedDataset.split(
        load_dataset("digits", model), clients, partition=SPLITS[split], seed=seed, validation=validating, batch=64
    )
    if len(federation.trainable_clients) < clients:
        raise SystemExit(f"seed {seed}: a client has no samples")

    def network(_: Any, generator: np.random.Generator) -> JacksonNetwork:
        return JacksonNetwork(routing, given.speeds, generator, concurrency=given.tasks)

    rule = rules.GeneralizedAsyncSGD(dict(enumerate(routing.tolist())), rate)
    updates = given.num_updates(federation, rule, network)
    try:
        found = run(
            federation,
            Method("routed", rule, trainers.Gradient()),
            num_updates=updates,
            scheduler=network,
            concurrency=given.tasks,
            task_cost="trainer",
            eval_every=max(1, updates // POINTS),
        )
    except (DivergenceError, RuleError) as error:
        return {"curve": [0.0] * POINTS, "failed": str(error)}
    if given.axis == "time" and found.times[-1] < given.end:
        raise SystemExit(f"seed {seed}: {updates} updates were done after {found.times[-1]:.0f} of {given.end:.0f}")
    return {
        "curve": given.curve(found.evaluations),
        "loss": found.evaluations[-1].loss,
        "rejected": found.rejected,
        "updates": sum(time <= given.end for time in found.times) if given.axis == "time" else updates,
        "time": found.times[-1],
        "staleness": statistics.fmean(found.staleness),
        "most stale": max(found.staleness),
    }


def late(found: Mapping[str, Any]) -> float:
    """Return the mean accuracy over the last quarter of a run."""
    return statistics.fmean(found["curve"][-(POINTS // 4) :])


def compared(scenario: Scenario, split: str, seeds: int, kept: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Return the properties, the tuning record and the runs of each routing."""
    found = {}
    for name, routing in scenario.routings().items():
        network = ClosedNetwork(routing, scenario.speeds, scenario.tasks)

        def score(rate: float, name: str = name, routing: np.ndarray = routing) -> list[float]:
            return [late(kept(scenario, split, name, routing, rate, seed)) for seed in VALIDATION]

        search = line_search(score, START, max_doublings=4)
        found[name] = {
            "shares": sorted(set(np.round(routing, 4).tolist())),
            "slowest": float(routing[0]),
            "throughput": network.throughput,
            "search": search.to_dict(),
            "best": [kept(scenario, split, name, routing, search.best_rate, seed) for seed in range(seeds)],
            "one rate": [kept(scenario, split, name, routing, PAPERS_RATE, seed) for seed in range(seeds)],
        }
    return found


def page(found: Mapping[str, Any]) -> list[str]:
    """Return the parts of the result page."""
    parts = [
        "Late accuracy in percent; differences are paired over the seeds, in percentage points, with an asterisk where "
        "the interval of 95 % leaves out 0. *Spread* is the standard deviation over the seeds, in points."
    ]
    for name, told in found.items():
        rows = []
        for routing, one in told.items():
            best = [late(each) for each in one["best"]]
            fixed = [late(each) for each in one["one rate"]]
            spread = [f"{100 * statistics.stdev(each):.1f}" if len(each) > 1 else "" for each in (best, fixed)]
            rows.append(
                [
                    routing,
                    f"{one['slowest']:.4f}",
                    f"{one['throughput']:.4g}",
                    f"{statistics.fmean(each.get('updates', 0) for each in one['best']):.0f}",
                    f"{statistics.fmean(each.get('staleness', math.nan) for each in one['best']):.1f}",
                    f"{one['search']['chosen']:g}",
                    cell(best, 1, 100).rstrip("*"),
                    spread[0],
                    cell(fixed, 1, 100).rstrip("*"),
                    spread[1],
                ]
            )
        headings = ["routing", "slowest client's share", "throughput", "updates", "staleness", "best rate", "at it, %"]
        headings += ["spread", f"at one rate, {PAPERS_RATE}, %", "spread"]
        pairs = []
        for first, second in combinations(reversed(told), 2):
            row = [f"{first} less {second}"]
            for which in ("best", "one rate"):
                both = zip(told[first][which], told[second][which], strict=True)
                row.append(cell([late(a) - late(b) for a, b in both], 1, 100))
            pairs.append(row)
        parts += [f"## {name}", table(headings, rows), table(["difference", "at best rates", "at one rate"], pairs)]
    return parts


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Plot the mean accuracy curves with a band of one standard deviation."""
    figure = new_figure(4.6 * len(found), 6.4)
    axes = figure.subplots(2, len(found), squeeze=False)
    for column, (name, told) in enumerate(found.items()):
        for panel, which in zip(axes[:, column], ("best", "one rate"), strict=True):
            for routing, one in told.items():
                curves = 100 * np.array([each["curve"] for each in one[which]])
                along = (np.arange(POINTS) + 1) / POINTS
                mean, spread = curves.mean(0), curves.std(0)
                panel.plot(along, mean, color=COLOURS[routing], label=routing)
                panel.fill_between(along, mean - spread, mean + spread, color=COLOURS[routing], alpha=0.15, linewidth=0)
            panel.set_title(f"{name}, {'each at its best rate' if which == 'best' else 'all at .01'}", fontsize="small")
            panel.grid(alpha=0.25)
        axes[1, column].set_xlabel(f"part of the {'updates' if name.startswith('update') else 'time'}")
    for panel in axes[:, 0]:
        panel.set_ylabel("accuracy, %")
    handles = {h.get_label(): h for panel in axes.flat for h in panel.get_lines()}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)
    with atomic_write(path) as draft:
        figure.savefig(draft, dpi=110)


def main() -> None:
    """Tune the rates, execute the missing runs, and write the tables and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", default="update:dirichlet,time:dirichlet,update:iid,time:iid")
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--updates", type=int, default=3000)
    parser.add_argument("--horizon", type=float, default=3000.0)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=RESULTS / "routing")
    parser.add_argument("--parts", type=Path, default=Path("build/papers/routing"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    parts = Parts(given.parts)

    def kept(scenario: Scenario, split: str, name: str, routing: np.ndarray, rate: float, seed: int) -> dict[str, Any]:
        settings = {
            "axis": scenario.axis,
            "end": scenario.end,
            "split": split,
            "routing": name,
            "rate": rate,
            "model": given.model,
        }
        found: dict[str, Any] = parts.of(
            {**settings, "seed": seed}, partial(once, scenario, given.model, split, routing, rate, seed)
        )
        return found

    found = {}
    for words in given.scenarios.split(","):
        axis, split = words.split(":")
        scenario = Scenario.of(axis, given.updates, given.horizon)
        found[f"{axis}, {split}"] = compared(scenario, split, given.seeds, kept)
    told = {"model": given.model, "seeds": given.seeds, "updates": given.updates, "horizon": given.horizon}
    told["validation seeds"] = list(VALIDATION)
    write(given.out, {"found": found}, told, markdown("Routings", page(found), told))
    draw(found, given.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
