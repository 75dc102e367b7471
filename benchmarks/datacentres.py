"""Four data centres at speeds 1 : 2 : 4 : 8 train a transformer on what their speakers say, with outer optimisers.

Whole speakers of a text of plays are dealt to four workers, so that each has about as much. A worker fetches the model,
makes as many steps of AdamW as any other, and what it has moved goes to an outer optimiser. All methods have as many
answers, so as many tokens. Synchronous ones wait for the slowest worker, so that a second table has the loss when as
much virtual time has gone as the asynchronous methods take.

An outer rate and a momentum are chosen for each method, of seven trials each, on a seed that no other run uses and on
samples that are nobody's test set. Then come the test seeds. Every run that is done is a row of `datacentres.jsonl`,
and is not done again; the tables are made of the rows that there are.

    python benchmarks/datacentres.py --data tinyshakespeare/
"""

import argparse
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from runs import Row, Runs

from manifoldagg.corrections import AutoThreshold
from manifoldagg.errors import DivergenceError, RuleError
from manifoldagg.experiments import load_dataset
from manifoldagg.experiments.statistics import MeanCI, mean_ci
from manifoldagg.federated import clients as trainers
from manifoldagg.federated import rules
from manifoldagg.simulation import Deterministic, FederatedDataset, Method, natural_partition, run

HERE = Path(__file__).parent
WORKERS = 4
TUNED_ON = 100
TEST_SEEDS = range(5)


@dataclass(frozen=True)
class Size:
    """What a run is.

    Attributes:
        arrivals: of all workers; a multiple of what arrives in the slowest one's time, and of the workers.
        steps: of a worker, before it answers.
        rate: of AdamW, which begins anew with every task.
        batch: sequences a step.
        length: characters of a sequence.
        width: of the transformer.
        layers: likewise.
        eval_every: answers between two looks at the loss.
        share: of the text, held out for tests; and of the rest, for the choice of rates.
    """

    arrivals: int = 120
    steps: int = 20
    rate: float = 1e-2
    batch: int = 16
    length: int = 32
    width: int = 32
    layers: int = 1
    eval_every: int = 16
    share: float = 0.05


FULL = Size()
QUICK = Size(arrivals=16, steps=2, batch=4, length=16, width=16)


@dataclass(frozen=True)
class Candidate:
    """An outer optimiser.

    Attributes:
        make: its rule, of an outer rate and a momentum.
        trials: pairs of them to choose from.
        baseline: whether it is one of those that the others are compared with.
        trainer: what a worker does; `Local` unless given.
    """

    make: Callable[[float, float], Any]
    trials: Sequence[tuple[float, float]]
    baseline: bool = True
    trainer: Callable[..., trainers.Local] = trainers.Local


def plain(rate: float, **options: Any) -> dict[str, Any]:
    """The rate of a rule that weighs each worker by its share of the data, about one in four."""
    return {"rate": WORKERS * rate, **options}


def asynchronous(rate: float, beta: float) -> rules.Momentum:
    """DiLoCo's outer step at every arrival."""
    return rules.Momentum(rules.ASGD(**plain(rate)), beta, nesterov=True)


TOGETHER = [(0.5, 0.5), (1.0, 0.5), (1.0, 0.7), (0.2, 0.9), (0.4, 0.9), (0.7, 0.9), (1.0, 0.9)]
DELAYED = [(0.5, 0.5), (0.7, 0.5), (1.0, 0.5), (0.1, 0.9), (0.2, 0.9), (0.4, 0.9), (0.7, 0.9)]
ALONE = [(0.2, 0.2), (0.1, 0.5), (0.15, 0.5), (0.3, 0.5), (0.03, 0.9), (0.06, 0.9), (0.12, 0.9)]
AHEAD = [(0.2, 0.5), (0.35, 0.5), (0.5, 0.5), (0.1, 0.9), (0.15, 0.9), (0.25, 0.9), (0.6, 0.9)]
STILL = [(rate, 0.0) for rate in (0.15, 0.25, 0.3, 0.4, 0.5, 0.65, 1.0)]
ALONG = [(rate, 0.0) for rate in (0.05, 0.1, 0.15, 0.25, 0.4, 0.65, 1.0)]
"""Of `conflict_free_prefix`, which wants less; 0.3 and 0.5, rows of the file too, lost more."""

CANDIDATES: Mapping[str, Candidate] = {
    "synchronous DiLoCo": Candidate(
        lambda rate, beta: rules.Momentum(rules.FedAvg(WORKERS, rate), beta, nesterov=True), TOGETHER
    ),
    "asynchronous DiLoCo": Candidate(asynchronous, ALONE),
    "DelayedNesterov": Candidate(lambda rate, beta: rules.DelayedNesterov(WORKERS, rate, beta), DELAYED),
    "HeLoCo": Candidate(lambda rate, beta: rules.HeLoCo(rate, beta), AHEAD),
    "OrthoDC": Candidate(lambda rate, beta: rules.FedOrtho(**plain(rate)), STILL, baseline=False),
    "AutoThreshold": Candidate(
        lambda rate, beta: rules.AsyncCorrected(**plain(rate, correction=AutoThreshold())), STILL, baseline=False
    ),
    "conflict_free_prefix": Candidate(
        lambda rate, beta: rules.AsyncBezier(**plain(rate, threshold=-1.0, pull_back="conflict_free_prefix")),
        ALONG,
        baseline=False,
        trainer=partial(trainers.Trajectory, degree=3),
    ),
    "no correction": Candidate(lambda rate, beta: rules.ASGD(**plain(rate)), STILL),
}
"""By name; each has as many trials, and where there is no momentum all of them are rates."""


def by_speaker(labels: Any, clients: int, generator: np.random.Generator, *, user_ids: np.ndarray) -> list[np.ndarray]:
    """Whole speakers, in a random order, each to whoever has least so far."""
    speakers, owner, sizes = np.unique(user_ids, return_inverse=True, return_counts=True)
    held = np.zeros(clients)
    worker = np.zeros(len(speakers), np.int64)
    for speaker in generator.permutation(len(speakers)):
        worker[speaker] = held.argmin()
        held[worker[speaker]] += sizes[speaker]
    return natural_partition(labels, clients, generator, user_ids=worker[owner])


def federation(data: Path, size: Size, seed: int, *, tuning: bool) -> FederatedDataset:
    """The four workers; for a choice of rates with other held-out samples."""
    learned = load_dataset(
        f"shakespeare:{data},length={size.length}", f"transformer:width={size.width},layers={size.layers},heads=2"
    )
    return FederatedDataset.split(
        learned,
        WORKERS,
        partition=by_speaker,
        seed=seed,
        holdout=size.share,
        validation=size.share if tuning else 0.0,
        batch=size.batch,
    )


def trained(name: str, rate: float, beta: float, made: FederatedDataset, size: Size) -> Row:
    """One run: the loss in nats a character, by answers, virtual time and tokens."""
    candidate = CANDIDATES[name]
    trainer = candidate.trainer(steps=size.steps, optimizer=torch.optim.AdamW, rate=size.rate)
    # In units of a step of the fastest worker.
    speeds = {worker: Deterministic(2.0 ** (WORKERS - 1 - worker)) for worker in range(WORKERS)}
    started = time.process_time()
    log: list[Row] = []
    try:
        found = run(
            made,
            Method(name, candidate.make(rate, beta), trainer),
            num_updates=size.arrivals,
            delays=speeds,
            task_cost="trainer",
            eval_every=size.eval_every,
        )
        tokens = size.batch * size.length
        log = [
            {"updates": row.updates, "time": row.time, "tokens": tokens * row.gradients, "loss": row.loss}
            for row in found.evaluations
        ]
    except (DivergenceError, RuleError) as error:
        print(f"{name}, rate {rate:g}, momentum {beta:g}: {error}")
    return {"log": log, "seconds": time.process_time() - started}


def loss_of(row: Row, time: float = math.inf) -> float:
    """The last loss until a virtual time."""
    losses = [entry["loss"] for entry in row["log"] if entry["time"] <= time]
    return math.inf if not losses or losses[-1] is None else float(losses[-1])


class Rows(Runs):
    """The runs that are done."""

    def chosen(self, name: str) -> Row | None:
        """The trial with the lowest loss, once all are done."""
        trials = [
            self.found(method=name, rate=rate, momentum=beta, seed=TUNED_ON) for rate, beta in CANDIDATES[name].trials
        ]
        done = [row for row in trials if row is not None]
        return min(done, key=loss_of) if len(done) == len(trials) else None

    def tests(self, name: str) -> dict[int, Row]:
        """By seed."""
        best = self.chosen(name)
        if best is None:
            return {}
        key = {"method": name, "rate": best["rate"], "momentum": best["momentum"]}
        found = {row["seed"]: row for row in self._rows if key.items() <= row.items()}
        return {seed: row for seed, row in sorted(found.items()) if seed != TUNED_ON}


def work(data: Path, size: Size, rows: Rows, names: Sequence[str], seeds: Sequence[int]) -> None:
    """What is not done yet: all trials, then all methods of one seed after another."""

    def once(made: FederatedDataset, name: str, rate: float, beta: float) -> None:
        key = {"method": name, "rate": rate, "momentum": beta, "seed": made.seed}
        if rows.found(**key) is None:
            row = key | trained(name, rate, beta, made, size)
            rows.add(row)
            print(f"{name:<20} rate {rate:<5g} momentum {beta:<4g} seed {made.seed:<4} {loss_of(row):.4f}", flush=True)

    tuning = federation(data, size, TUNED_ON, tuning=True)
    for name in names:
        for rate, beta in CANDIDATES[name].trials:
            once(tuning, name, rate, beta)
    for seed in seeds:
        made = federation(data, size, seed, tuning=False)
        for name in names:
            best = rows.chosen(name)
            assert best is not None
            once(made, name, best["rate"], best["momentum"])


def best_baseline(scores: Mapping[str, Mapping[int, float]]) -> str:
    """The one with the lowest mean."""
    means = {name: mean_ci(list(found.values())).value for name, found in scores.items() if CANDIDATES[name].baseline}
    return min(means, key=lambda name: means[name])


def less(scores: Mapping[str, Mapping[int, float]], other: str) -> dict[str, MeanCI]:
    """By method how much more it loses than another one, over the seeds that both have."""
    reference = scores.get(other, {})
    pairs = {
        name: [found[seed] - reference[seed] for seed in found if seed in reference]
        for name, found in scores.items()
        if name != other
    }
    return {name: mean_ci(differences) for name, differences in pairs.items() if differences}


def said(mean: MeanCI | None) -> str:
    """A mean with the half of its interval."""
    if mean is None:
        return "-"
    return f"{mean.value:.4f}" if mean.half_width is None else f"{mean.value:.4f} +- {mean.half_width:.4f}"


def table(rows: Rows, size: Size) -> list[str]:
    """What is known by now."""
    tests = {name: rows.tests(name) for name in CANDIDATES}
    tests = {name: found for name, found in tests.items() if found}
    tokens = size.arrivals * size.steps * size.batch * size.length
    lines = [
        f"datacentres; torch {torch.__version__}; a transformer of {size.layers} layer, width {size.width}, "
        f"{size.length} characters; AdamW {size.rate:g}, {size.steps} steps of {size.batch} sequences a task",
        f"{size.arrivals} answers, {tokens} tokens in each run; time in steps of the fastest worker",
        "",
        "chosen on a seed of its own, the loss of each trial at the end (outer rate, momentum)",
    ]
    for name, candidate in CANDIDATES.items():
        trials = [
            (rate, beta, rows.found(method=name, rate=rate, momentum=beta, seed=TUNED_ON))
            for rate, beta in candidate.trials
        ]
        best = rows.chosen(name)
        shown = [
            f"({rate:g}, {beta:g}) {loss_of(row):.4f}{'*' if row is best else ''}"
            for rate, beta, row in trials
            if row is not None
        ]
        lines.append(f"{name:<20} {'  '.join(shown)}")
    if not any(CANDIDATES[name].baseline for name in tests):
        return lines
    least = min(entry["log"][-1]["time"] for found in tests.values() for entry in found.values() if entry["log"])
    for title, until in (("equal tokens", math.inf), (f"equal virtual time, {least:g}", least)):
        scores = {name: {seed: loss_of(row, until) for seed, row in found.items()} for name, found in tests.items()}
        best = best_baseline(scores)
        apart, uncorrected = less(scores, best), less(scores, "no correction")
        lines += [
            "",
            f"{title}: nats a character, mean with Student's interval of 95 %; pairs on the same seeds",
            f"{'method':<20} {'seeds':>5} {'time':>6} {'tokens':>8}  {'loss':<17}  "
            f"{f'less {best}':<25}  less no correction",
        ]
        for name in sorted(scores, key=lambda name: mean_ci(list(scores[name].values())).value):
            known = next(iter(tests[name].values()))["log"]
            end = [entry for entry in known if entry["time"] <= until][-1] if known else {"time": 0, "tokens": 0}
            loss = mean_ci(list(scores[name].values()))
            lines.append(
                f"{name:<20} {len(scores[name]):>5} {end['time']:>6g} {end['tokens']:>8}  "
                f"{said(loss):<17}  {said(apart.get(name)):<25}  {said(uncorrected.get(name))}"
            )
    return lines


def main() -> None:
    """Do what is not done yet, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, help="the text of plays, or its folder; without it only the tables are made"
    )
    parser.add_argument("--only", nargs="+", default=list(CANDIDATES), choices=list(CANDIDATES), metavar="METHOD")
    parser.add_argument("--seeds", type=int, nargs="*", default=list(TEST_SEEDS))
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it works")
    parser.add_argument(
        "--out", type=Path, help="a folder: results beside this file, or with --quick build/datacentres"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = QUICK if options.quick else FULL
    out = options.out or (HERE.parent / "build" / "datacentres" if options.quick else HERE / "results")
    out.mkdir(parents=True, exist_ok=True)
    rows = Rows(out / "datacentres.jsonl", size)
    if options.data is not None:
        work(options.data, size, rows, options.only, options.seeds)
    lines = table(rows, size)
    print("", *lines, sep="\n")
    (out / "datacentres.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
