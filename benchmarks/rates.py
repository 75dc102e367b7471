"""Line search for the global rates of `manifoldagg compare` on the digits, on seeds that no comparison uses.

Prints, for each method and each rate of the grid of Manifold appendix B, the mean final and best accuracy over
the seeds; the default is the rate with the best final accuracy.
"""

import argparse
import statistics

from manifoldagg.simulation import Federation, run, task
from manifoldagg.simulation.compare import one_thread
from manifoldagg.simulation.methods import RATES, method

GRID = (0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 5.0)


def main() -> None:
    """Print a row for each method and rate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", default=",".join(RATES))
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101, 102])
    options = parser.parse_args()
    digits = task("digits")
    federations = [Federation.split(digits, 30, concentration=0.5, seed=seed) for seed in options.seeds]
    print(f"{'method':<12} {'rate':>5}  {'final %':>8} {'best %':>8}   (mean over seeds {options.seeds})", flush=True)
    with one_thread():
        for name in options.methods.split(","):
            finals = {}
            for rate in GRID:
                runs = [run(federation, method(name, rate), rounds=options.rounds) for federation in federations]
                finals[rate] = statistics.fmean(r.accuracy[-1] for r in runs)
                best = statistics.fmean(max(r.accuracy) for r in runs)
                print(f"{name:<12} {rate:>5g}  {100 * finals[rate]:>8.1f} {100 * best:>8.1f}", flush=True)
            print(f"{name:<12} best final at {max(finals, key=lambda rate: finals[rate]):g}", flush=True)


if __name__ == "__main__":
    main()
