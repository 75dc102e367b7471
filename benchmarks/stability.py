"""Final accuracy by learning rate, concurrency and number of clients, on two tasks.

A server step moves the model by the step size rho = rate / N times a stale update. The table shows where training
collapses, next to the stability limit of `manifoldagg.federated.stability_limit` and the rate of `suggest_rate`.

- `digits`: scikit-learn's digits, a small CNN.
- `mnist`: the first 3,000 images of the MNIST test set, an MLP. It reads the folder `build/data/mnist`.

Each run has 200 updates on a Dirichlet(0.5) partition. Finished runs are stored in `build/stability.jsonl`, and an
interrupted benchmark resumes from them.
"""

import argparse
import json
import multiprocessing
import statistics
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path

import torch
from runs import Row, Runs

from manifoldagg.errors import DivergenceError, StabilityWarning
from manifoldagg.experiments import load_dataset
from manifoldagg.experiments.registry import method
from manifoldagg.federated import stability_limit, suggest_rate
from manifoldagg.simulation import FederatedDataset, run

HERE = Path(__file__).parent
TASKS = {"digits": ("digits", "cnn"), "mnist": ("idx:build/data/mnist", "mlp")}
METHODS = ("asgd", "fedortho")
STEP_SIZES = (0.05, 0.1, 0.2, 0.4, 1.0)
GRID = ((10, 2), (30, 2), (10, 10), (30, 10), (100, 10), (30, 30))
"""Pairs of the number of clients and the concurrency."""
MAX_SAMPLES = 3_000


@dataclass(frozen=True)
class Size:
    """The settings that all runs share."""

    updates: int = 200
    partition: str = "dirichlet:concentration=0.5"


def main() -> None:
    """Run the missing experiments, and print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=HERE.parent / "build" / "stability.jsonl")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "stability.txt")
    options = parser.parse_args()
    tasks = options.tasks.split(",")
    options.runs.parent.mkdir(parents=True, exist_ok=True)
    size = Size()
    runs = Runs(options.runs, size)
    keys = [
        {"task": task, "method": name, "clients": n, "concurrency": m, "seed": seed, "rho": rho}
        for task, seed, (n, m), name, rho in product(tasks, range(options.seeds), GRID, METHODS, STEP_SIZES)
    ]
    missing = [key for key in keys if runs.found(**key) is None]
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as workers:
        jobs = {workers.submit(accuracy, key, size): key for key in missing}
        for job in as_completed(jobs):
            runs.add(jobs[job] | {"accuracy": job.result()})
    rows = [{**key, "accuracy": (runs.found(**key) or {})["accuracy"]} for key in keys]
    lines = [line for task in tasks for line in table(task, rows)]
    print(*lines, sep="\n")
    options.out.write_text("\n".join(lines) + "\n")
    settings = {**asdict(size), "torch": torch.__version__}
    options.out.with_suffix(".json").write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")


@lru_cache(maxsize=2)
def federation(task: str, clients: int, seed: int, partition: str) -> FederatedDataset:
    """Return the split data of a task."""
    dataset = load_dataset(*TASKS[task])
    dataset = replace(dataset, inputs=dataset.inputs[:MAX_SAMPLES], labels=dataset.labels[:MAX_SAMPLES])
    return FederatedDataset.split(dataset, clients, partition=partition, seed=seed)


def accuracy(key: Row, size: Size) -> float:
    """Return the final accuracy of a run. If training diverges to non-finite values, return 0."""
    torch.set_num_threads(1)
    data = federation(key["task"], key["clients"], key["seed"], size.partition)
    chosen = method(key["method"], rate=key["rho"] * key["clients"])
    options = {"num_updates": size.updates, "concurrency": key["concurrency"], "eval_every": size.updates}
    with warnings.catch_warnings():
        # The grid exceeds the stability limit on purpose.
        warnings.simplefilter("ignore", StabilityWarning)
        try:
            return run(data, chosen, **options).evaluations[-1].accuracy
        except DivergenceError:
            return 0.0


def table(task: str, rows: list[Row]) -> list[str]:
    """Return the lines of the table of a task, with a block for each method and a row for each number of clients."""
    seeds = sorted({row["seed"] for row in rows if row["task"] == task})
    heads = "".join(f"{f'rate {rho:g} N':>15}" for rho in STEP_SIZES)
    lines = [f"{task}: final accuracy in %, mean and standard deviation over {len(seeds)} seeds; * above the limit"]
    for name in METHODS:
        lines += ["", f"{name:<10}{'N':>4}{'in flight':>11}{'limit of rate / N':>19}{'suggested rate':>16}{heads}"]
        for clients, concurrency in GRID:
            limit = stability_limit(concurrency)
            suggested = suggest_rate(method(name).bind(range(clients)).rule, clients, concurrency)
            cells = []
            for rho in STEP_SIZES:
                key = {"task": task, "method": name, "clients": clients, "concurrency": concurrency, "rho": rho}
                found = [100 * row["accuracy"] for row in rows if key.items() <= row.items()]
                spread = statistics.stdev(found) if len(found) > 1 else 0.0
                mark = "*" if rho > limit else " "
                cells.append(f"{statistics.fmean(found):>8.1f} ± {spread:>3.1f}{mark}")
            lines.append(f"{'':<10}{clients:>4}{concurrency:>11}{limit:>19.2f}{suggested:>16.3g}{''.join(cells)}")
    return [*lines, ""]


if __name__ == "__main__":
    main()
