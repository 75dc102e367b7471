"""Line search for the server rates of `manifoldagg compare` on the digits, with seeds that no comparison uses.

The search is that of `manifoldagg.experiments.tuning`, on the held-out samples of these seeds. All methods have the
same number of updates, each from one client, as in a comparison. Finished runs are stored in `build/rates`, with all
their settings, and are not repeated.
"""

import argparse
import statistics
from functools import partial
from pathlib import Path

from manifoldagg.experiments import load_dataset
from manifoldagg.experiments.registry import RULES, method
from manifoldagg.experiments.tuning import tune
from manifoldagg.simulation import FederatedDataset, RestartingExecutor, dirichlet_partition, processes

HERE = Path(__file__).parent
CLIENTS = 30


def main() -> None:
    """Print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", default=",".join(RULES))
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101, 102])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "rates.txt")
    options = parser.parse_args()
    lines: list[str] = []

    def tell(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    split = partial(
        FederatedDataset.split,
        load_dataset("digits"),
        CLIENTS,
        partition=partial(dirichlet_partition, concentration=0.5),
    )
    federations = [split(seed=seed) for seed in options.seeds]
    tell(f"{'method':<20} {'rate':>8} {'late %':>8}   (mean over seeds {options.seeds}, {options.updates} updates)")
    with RestartingExecutor(processes(options.jobs)) as workers:
        for name in options.methods.split(","):
            found = tune(
                method(name),
                federations,
                num_updates=options.updates,
                executor=workers,
                cache=HERE.parent / "build" / "rates",
            )
            for power, scores in found.scores.items() if found else ():
                mark = "  best" if power == found.best_power else ""
                tell(f"{name:<20} {found.start * 2.0**power:>8.4g} {100 * statistics.fmean(scores):>8.1f}{mark}")
    options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
