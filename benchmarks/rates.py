"""Line search for the global rates of `manifoldagg compare` on the digits, on seeds that no comparison uses.

Prints, for each method and each rate of the grid of Manifold appendix B, means over the seeds of the accuracy in the
last quarter of the rounds, of the final and of the best one. The default is the rate that does best in the last
quarter: a single round says little, because every update moves the model.
"""

import argparse
import statistics
from functools import partial

from manifoldagg.simulation import Federation, dirichlet_partition, run, task
from manifoldagg.simulation.errands import one_thread
from manifoldagg.simulation.methods import RULES, method

GRID = (0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 5.0)


def main() -> None:
    """Print a row for each method and rate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", default=",".join(name for name, entry in RULES.items() if "rate" in entry.options))
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101, 102, 103, 104])
    options = parser.parse_args()
    digits = task("digits")
    partition = partial(dirichlet_partition, concentration=0.5)
    federations = [Federation.split(digits, 30, partition=partition, seed=seed) for seed in options.seeds]
    print(
        f"{'method':<12} {'rate':>5}  {'late %':>8} {'final %':>8} {'best %':>8}   (mean over seeds {options.seeds})",
        flush=True,
    )
    with one_thread():
        for name in options.methods.split(","):
            late = {}
            for rate in GRID:
                runs = [run(federation, method(name, rate), rounds=options.rounds) for federation in federations]
                late[rate] = statistics.fmean(statistics.fmean(r.accuracy[-options.rounds // 4 :]) for r in runs)
                final = statistics.fmean(r.accuracy[-1] for r in runs)
                best = statistics.fmean(max(r.accuracy) for r in runs)
                print(
                    f"{name:<12} {rate:>5g}  {100 * late[rate]:>8.1f} {100 * final:>8.1f} {100 * best:>8.1f}",
                    flush=True,
                )
            print(f"{name:<12} best late at {max(late, key=lambda rate: late[rate]):g}", flush=True)


if __name__ == "__main__":
    main()
