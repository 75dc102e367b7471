"""Tune the rates of every table of `evidence.toml` on validation seeds. The script does not run any test seed.

    python benchmarks/papers/validate.py [--only digits,mnist] [--jobs 1] [--out benchmarks/results/papers]

The script runs the same search as `manifoldagg compare --tune` and shares its cache `.tuned`. A comparison that runs
later therefore reuses the rates. Decisions that depend on validation can be recorded before any test seed runs. A
score is the mean accuracy over the last quarter of the updates, on validation samples.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping
from contextlib import chdir
from functools import partial
from pathlib import Path
from typing import Any

import typer

from manifoldagg.cli._config_file import parse_table, read_tables
from manifoldagg.cli.app import app
from manifoldagg.experiments import load_dataset, workloads
from manifoldagg.experiments.registry import methods
from manifoldagg.experiments.report import environment_info
from manifoldagg.experiments.tuning import Tuning, tuning_seeds
from manifoldagg.simulation import FederatedDataset, processes
from manifoldagg.simulation.executors import shared_executor

HERE = Path(__file__).parent
SCENARIO = ("scheduler", "delays", "availability")


def main() -> None:
    """Print and write one table for each comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=HERE / "evidence.toml")
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=HERE.parent / "results" / "papers")
    given = parser.parse_args()
    command: Any = typer.main.get_command(app)
    command, out = command.get_command(None, "compare"), given.out.resolve()
    only = [given.only] if given.only else []
    tables = read_tables(given.config, command, only)
    folder = out / "validation"
    folder.mkdir(parents=True, exist_ok=True)
    with chdir(given.config.parent), shared_executor(processes(given.jobs) if given.jobs > 1 else None) as workers:
        for name, options in tables.items():
            found: dict[str, Any] = {"options": options, **environment_info(), "methods": {}}
            for told in searched(parse_table(command, options), out / ".tuned", workers):
                found |= told | {"methods": found["methods"] | told["methods"]}
                (folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
                print(name, *table({**found, **told})[-1:], flush=True)
            (folder / f"{name}.md").write_text("\n".join([f"# {name}", "", *table(found), ""]))


def searched(options: Mapping[str, Any], cache: Path, workers: Any) -> Iterator[dict[str, Any]]:
    """Yield the tuning record of each method that `compare` would run with these options."""
    problem = load_dataset(options["data"], options["model"])
    partition = workloads.partition(options["partition"])
    split = partial(FederatedDataset.split, problem, options["clients"], partition=partition)
    tuning = Tuning(tuning_seeds(range(options["seeds"]), options["tune_seeds"]), cache=cache)
    for method in methods(options["methods"], options["rate"] or []):
        _, told = tuning.apply(
            [method],
            partial(split, holdout=options["holdout"], batch=options["batch"]),
            validation=options["validation"],
            used_seeds=range(options["seeds"]),
            num_updates=options["num_updates"],
            task_cost=options["task_cost"],
            concurrency=options["concurrency"],
            executor=workers,
            progress=None,
            **{name: options[name] for name in SCENARIO},
        )
        yield told


def table(told: Mapping[str, Any]) -> list[str]:
    """Format a table of the methods, sorted by score, with the tuned rate and the default rate of each method."""
    rows = []
    for method, search in told["methods"].items():
        if isinstance(search, dict):
            late = {one["rate"]: 100 * statistics.fmean(one["tail_accuracy"]) for one in search["tried"]}
            best = search["chosen"]
            edge = "at the end of the search" if best in (min(late), max(late)) else ""
            rows.append((late[best], method, best, late[search["start"]], search["start"], edge))
    heads = ["method", "rate", "late, %", "its own rate", "late, %", "%-points lost", ""]
    return [
        f"Seeds {told['seeds']}, {100 * told['validation']:.0f} % of the training samples.",
        "",
        f"| {' | '.join(heads)} |",
        "| --- |" + " ---: |" * 5 + " --- |",
        *(
            f"| {method} | {best:g} | {score:.2f} | {start:g} | {own:.2f} | {score - own:.2f} | {edge} |"
            for score, method, best, own, start, edge in sorted(rows, reverse=True)
        ),
    ]


if __name__ == "__main__":
    main()
