"""Join the runs of the evidence into a report for each task, with every method beside the one that is put forward.

    python benchmarks/papers/tables.py [--results benchmarks/results/papers]

Reports that are not there yet are left out, and named.
"""

import argparse
from pathlib import Path

from manifoldagg.errors import ArgumentError
from manifoldagg.simulation.joined import join
from manifoldagg.simulation.summary import write_summary

RESULTS = Path(__file__).parent.parent / "results" / "papers"
FORWARD = "AsyncCorrected(correction=autothreshold)"
JOINED = {
    "{0}": ("{0}", "{0}-fewer-2", "{0}-fewer-4", "{0}-gradients"),
    "{0}-five": ("{0}-five", "{0}-cohorts"),
}
TASKS = ("digits", "mnist", "shakespeare")


def main() -> None:
    """Write the reports, and say which they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    for task in TASKS:
        for name, parts in JOINED.items():
            folders = [given.results / part.format(task) for part in parts]
            there = [folder for folder in folders if folder.is_dir()]
            missing = ", ".join(folder.name for folder in folders if folder not in there)
            try:
                files = write_summary(
                    join(there), given.results / "joined" / name.format(task), axis="gradients", against=FORWARD
                )
                print(files[0], f"without {missing}" if missing else "")
            except ArgumentError as error:
                print(f"{name.format(task)}: {error}")


if __name__ == "__main__":
    main()
