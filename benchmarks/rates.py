"""Line search for the global rates of `manifoldagg compare` on the digits, on seeds that no comparison uses.

For each method the rates at powers of 2 times the default: half of it, itself and twice it, then on towards the better
side until the best one has a worse one on both sides. What is compared is the mean accuracy in the last quarter of the
rounds over the seeds: a single round says little, because every update moves the model. All methods have as many
updates, one client's each, as in a comparison.

Runs that are done are kept in `results/rates.json`, under all that they follow from, and are not done again.
"""

import argparse
import json
import statistics
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from operator import attrgetter
from pathlib import Path
from typing import Any

from manifoldagg.errors import ManifoldAggError
from manifoldagg.simulation import Federation, dirichlet_partition, run, task
from manifoldagg.simulation.methods import RATE, RULES, method

RESULTS = Path(__file__).parent / "results"
FARTHEST = 5
"""So many doublings away from the default the search ends."""
EVERY = 5
CLIENTS = 30


@cache
def federation(seed: int) -> Federation:
    """That of `manifoldagg compare`, with this seed."""
    return Federation.split(
        task("digits"), CLIENTS, partition=partial(dirichlet_partition, concentration=0.5), seed=seed
    )


def late(name: str, rate: float, seed: int, rounds: int) -> float:
    """The mean accuracy in the last quarter of the rounds; 0 for a method that fails."""
    try:
        done = run(federation(seed), method(name, rate), rounds=rounds, every=EVERY)
    except ManifoldAggError:
        return 0.0
    return statistics.fmean(
        value for at, value in zip(done.evaluated, done.accuracy, strict=True) if at > rounds - rounds // 4
    )


def has_rate(name: str) -> bool:
    """Whether a method has a global rate: FLOCO has none."""
    return name in RATE or hasattr(method(name).bound(range(CLIENTS)).rule, "rate")


def default(name: str) -> float:
    """The global rate of a method where none is given."""
    rule: Any = method(name).bound(range(CLIENTS)).rule
    rate = attrgetter(RATE.get(name, "rate"))(rule)
    return float(rule.rate if rate is None else rate)


def main() -> None:
    """Print a row for each method and rate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", default=",".join(RULES))
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101, 102])
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    store = RESULTS / "rates.json"
    known: dict[str, float] = json.loads(store.read_text()) if store.exists() else {}
    lines: list[str] = []

    def tell(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    tell(f"{'method':<20} {'rate':>8} {'late %':>8}   (mean over seeds {options.seeds}, {options.rounds} rounds)")
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for name in options.methods.split(","):
            if not has_rate(name):
                continue
            begin = default(name)
            worth: dict[int, float] = {}
            wanted = [-1, 0, 1]
            while wanted:
                asked = [(power, seed) for power in wanted for seed in options.seeds]
                names = {(p, s): f"{name} rate {begin * 2.0**p:g} seed {s} rounds {options.rounds}" for p, s in asked}
                ahead = {
                    words: pool.submit(late, name, begin * 2.0**p, s, options.rounds)
                    for (p, s), words in names.items()
                    if words not in known
                }
                for words, answer in ahead.items():
                    known[words] = answer.result()
                    store.write_text(json.dumps(known, indent=1) + "\n")
                for power in wanted:
                    worth[power] = statistics.fmean(known[names[power, seed]] for seed in options.seeds)
                best = max(worth, key=lambda power: worth[power])
                wanted = [p for p in (best - 1, best + 1) if p not in worth and abs(p) <= FARTHEST]
            for power in sorted(worth):
                mark = "  best" if power == best else ""
                tell(f"{name:<20} {begin * 2.0**power:>8.4g} {100 * worth[power]:>8.1f}{mark}")
    (RESULTS / "rates.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
