"""Outer optimizers in four data centres with speeds 1 : 2 : 4 : 8, which train a transformer on a text of plays.

    python benchmarks/datacentres.py --data tinyshakespeare/

The speakers of the plays are split over four workers so that each worker has about the same amount of text. A worker
receives the model, takes a fixed number of AdamW steps, and returns its displacement to an outer optimizer. All methods
have the same number of updates, and therefore of tokens. A synchronous method waits for the slowest worker. The second
table shows the loss after the same virtual time.

The outer rate and the momentum of each method are selected from seven pairs, on a seed and samples that are not used
for testing. Each finished run is one line of `datacentres.jsonl` and is not repeated. The tables are computed from the
finished runs.
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
    """The settings of a run.

    Attributes:
        arrivals: the number of updates of all workers. It must be a multiple of the number of workers, and of the
            number of updates during one task of the slowest worker.
        steps: the number of local steps per update.
        rate: the learning rate of AdamW, whose state is reset for each task.
        batch: the number of sequences per step.
        length: the number of characters per sequence.
        width: the width of the transformer.
        layers: the number of layers of the transformer.
        eval_every: the number of updates between two evaluations.
        share: the fraction of the text that is held out for testing. The same fraction of the remaining text is used to
            select rates.
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
    """An outer optimizer.

    Attributes:
        make: a function that returns the rule for an outer rate and a momentum.
        trials: the pairs of outer rate and momentum to select from.
        baseline: whether the optimizer is a baseline of the comparison.
        trainer: the trainer of a worker. The default is `Local`.
    """

    make: Callable[[float, float], Any]
    trials: Sequence[tuple[float, float]]
    baseline: bool = True
    trainer: Callable[..., trainers.Local] = trainers.Local


def plain(rate: float, **options: Any) -> dict[str, Any]:
    """Return a rule whose rate is adapted to weights of about one in four."""
    return {"rate": WORKERS * rate, **options}


def asynchronous(rate: float, beta: float) -> rules.Momentum:
    """Return DiLoCo's outer step, applied to each update on arrival."""
    return rules.Momentum(rules.ASGD(**plain(rate)), beta, nesterov=True)


TOGETHER = [(0.5, 0.5), (1.0, 0.5), (1.0, 0.7), (0.2, 0.9), (0.4, 0.9), (0.7, 0.9), (1.0, 0.9)]
DELAYED = [(0.5, 0.5), (0.7, 0.5), (1.0, 0.5), (0.1, 0.9), (0.2, 0.9), (0.4, 0.9), (0.7, 0.9)]
ALONE = [(0.2, 0.2), (0.1, 0.5), (0.15, 0.5), (0.3, 0.5), (0.03, 0.9), (0.06, 0.9), (0.12, 0.9)]
AHEAD = [(0.2, 0.5), (0.35, 0.5), (0.5, 0.5), (0.1, 0.9), (0.15, 0.9), (0.25, 0.9), (0.6, 0.9)]
STILL = [(rate, 0.0) for rate in (0.15, 0.25, 0.3, 0.4, 0.5, 0.65, 1.0)]
ALONG = [(rate, 0.0) for rate in (0.05, 0.1, 0.15, 0.25, 0.4, 0.65, 1.0)]
"""The rates of `conflict_free_prefix`, whose best rate is smaller. The rates 0.3 and 0.5 had higher losses."""

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
"""The optimizers by name. All have the same number of trials. Without momentum, all trials are rates."""


def by_speaker(labels: Any, clients: int, generator: np.random.Generator, *, user_ids: np.ndarray) -> list[np.ndarray]:
    """Assign whole speakers in random order, each to the worker with the least text so far."""
    speakers, owner, sizes = np.unique(user_ids, return_inverse=True, return_counts=True)
    held = np.zeros(clients)
    worker = np.zeros(len(speakers), np.int64)
    for speaker in generator.permutation(len(speakers)):
        worker[speaker] = held.argmin()
        held[worker[speaker]] += sizes[speaker]
    return natural_partition(labels, clients, generator, user_ids=worker[owner])


def federation(data: Path, size: Size, seed: int, *, tuning: bool) -> FederatedDataset:
    """Return the four workers. For the selection of rates, the held-out samples differ from the test samples."""
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
    """Run one training, and return the loss in nats per character by updates, virtual time and tokens."""
    candidate = CANDIDATES[name]
    trainer = candidate.trainer(steps=size.steps, optimizer=torch.optim.AdamW, rate=size.rate)
    # The unit of time is one step of the fastest worker.
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
    """Return the last loss up to a virtual time."""
    losses = [entry["loss"] for entry in row["log"] if entry["time"] <= time]
    return math.inf if not losses or losses[-1] is None else float(losses[-1])


class Rows(Runs):
    """Finished runs of this benchmark."""

    def chosen(self, name: str) -> Row | None:
        """Return the trial with the lowest loss, if all trials are finished."""
        trials = [
            self.found(method=name, rate=rate, momentum=beta, seed=TUNED_ON) for rate, beta in CANDIDATES[name].trials
        ]
        done = [row for row in trials if row is not None]
        return min(done, key=loss_of) if len(done) == len(trials) else None

    def tests(self, name: str) -> dict[int, Row]:
        """Return the test runs by seed."""
        best = self.chosen(name)
        if best is None:
            return {}
        key = {"method": name, "rate": best["rate"], "momentum": best["momentum"]}
        found = {row["seed"]: row for row in self._rows if key.items() <= row.items()}
        return {seed: row for seed, row in sorted(found.items()) if seed != TUNED_ON}


def work(data: Path, size: Size, rows: Rows, names: Sequence[str], seeds: Sequence[int]) -> None:
    """Yield the missing runs: first all trials, then all methods for one seed after another."""

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
    """Return the baseline with the lowest mean loss."""
    means = {name: mean_ci(list(found.values())).value for name, found in scores.items() if CANDIDATES[name].baseline}
    return min(means, key=lambda name: means[name])


def less(scores: Mapping[str, Mapping[int, float]], other: str) -> dict[str, MeanCI]:
    """Return the difference of the losses of each method and a reference, over the seeds that both have."""
    reference = scores.get(other, {})
    pairs = {
        name: [found[seed] - reference[seed] for seed in found if seed in reference]
        for name, found in scores.items()
        if name != other
    }
    return {name: mean_ci(differences) for name, differences in pairs.items() if differences}


def said(mean: MeanCI | None) -> str:
    """Format a mean with half the width of its confidence interval."""
    if mean is None:
        return "-"
    return f"{mean.value:.4f}" if mean.half_width is None else f"{mean.value:.4f} +- {mean.half_width:.4f}"


def table(rows: Rows, size: Size) -> list[str]:
    """Return the tables of the finished runs."""
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
    """Run the benchmark, print the tables and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, help="the text of plays, or its folder; without this option, only the tables are printed"
    )
    parser.add_argument("--only", nargs="+", default=list(CANDIDATES), choices=list(CANDIDATES), metavar="METHOD")
    parser.add_argument("--seeds", type=int, nargs="*", default=list(TEST_SEEDS))
    parser.add_argument("--quick", action="store_true", help="a tiny run that tests the script")
    parser.add_argument(
        "--out", type=Path, help="the output folder; by default benchmarks/results, or build/datacentres with --quick"
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
