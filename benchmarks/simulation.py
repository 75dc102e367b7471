"""Speed of the simulator with one and two processes, compared with other engines, and its memory by number of clients.

The benchmark has three parts, each with a table:

- `run`: the methods of the demo with one process and with two processes. The first reference is the same training in a
  bare loop, without server, scheduler or evaluation. Two such loops in two processes, each with half of the work, show
  the limit of the machine. The table also shows a run with a checkpoint every second.
- `engines`: updates per second for equal work (FedAvg with the digits' CNN), compared with Flower's simulation engine
  and FLGo. Each engine runs in its own environment and processes. The cold start, until the end of the first round, is
  shown separately.
- `clients`: the memory of a run with many clients, and the time per update if clients do nothing.

The peers run in a separate network namespace (`unshare` of util-linux), because Ray, which Flower's engine uses,
listens on all interfaces. FLGo runs in one process, which is its fastest configuration, because it starts a new process
pool in every round.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers import apart
from timing import by_parts, machine, ratio

from manifoldagg.experiments import load_dataset
from manifoldagg.experiments.registry import method
from manifoldagg.federated import CheckpointPolicy, Message, Payload
from manifoldagg.federated.rules import FedAsync
from manifoldagg.simulation import (
    ClientTask,
    FederatedDataset,
    LabelledDataset,
    Method,
    TaskId,
    dirichlet_partition,
    processes,
    run,
    run_task,
)

HERE = Path(__file__).parent
PEERS = HERE / "peers"
PARTS = ("run", "engines", "clients")
CLIENTS = 30
Row = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """The settings that determine the duration."""

    updates: int
    turns: int
    rounds: int
    engine_turns: int
    clients: tuple[int, ...]
    answers: int


FULL = Size(updates=120, turns=7, rounds=30, engine_turns=5, clients=(1_000, 10_000, 100_000), answers=5_000)
QUICK = Size(updates=20, turns=2, rounds=3, engine_turns=2, clients=(100, 10_000), answers=200)


def in_turns(calls: Mapping[str, Callable[[], Any]], turns: int) -> dict[str, list[tuple[float, float]]]:
    """Return wall-clock and processor seconds of each call. The calls run in turns, and each turn starts with another
    call.
    """
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    names = list(calls)
    for turn in range(turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            wall, own = time.perf_counter(), time.process_time()
            calls[name]()
            taken[name].append((time.perf_counter() - wall, time.process_time() - own))
    return taken


# -- run -----------------------------------------------------------------------------------------------------------


def federation() -> FederatedDataset:
    """Return the federation of the demo."""
    return FederatedDataset.split(
        load_dataset("digits"), CLIENTS, partition=partial(dirichlet_partition, concentration=0.5), seed=0
    )


def errands_of(chosen: Method, updates: int) -> list[ClientTask]:
    """Return the tasks of the clients in a run. The trainers have no state."""
    errands: list[ClientTask] = []
    given = {client: count() for client in range(CLIENTS)}
    data = federation()

    def watch(event: Any) -> None:
        key = TaskId(event.client, next(given[event.client]))
        errands.append(ClientTask(data, chosen.trainer, key, event.message))

    run(data, chosen, num_updates=updates, eval_every=updates, on_update=watch)
    return errands


def bare(errands: list[ClientTask]) -> int:
    """Train in a loop without a server."""
    return sum(run_task(errand).samples for errand in errands)


def halves(pool: Executor, errands: list[ClientTask]) -> int:
    """Run two independent loops in two processes."""
    parts = [pool.submit(bare, errands[half::2]) for half in (0, 1)]
    return sum(part.result() for part in parts)


def run_part(size: Size) -> list[Row]:
    """Measure runs with one process and with two processes, and loops without a server."""
    rows: list[Row] = []
    pool = processes(2)()
    folder = tempfile.TemporaryDirectory()
    kept = CheckpointPolicy(Path(folder.name) / "run", every_seconds=1.0, keep=1)
    try:
        for name in ("fedasync", "asyncbezier"):
            chosen = method(name)
            errands = errands_of(chosen, size.updates)
            ours = partial(run, federation(), chosen, num_updates=size.updates, eval_every=size.updates)
            calls = {
                "bare": partial(bare, errands),
                "one": ours,
                "kept": partial(ours, checkpoint=kept),
                "two": partial(ours, executor=pool),
                "halves": partial(halves, pool, errands),
            }
            taken = in_turns(calls, size.turns)
            wall = {call: [seconds for seconds, _ in pairs] for call, pairs in taken.items()}
            own = {call: [seconds for _, seconds in pairs] for call, pairs in taken.items()}
            row: Row = {"method": chosen.name, "updates": size.updates}
            row |= {f"{call} s": statistics.median(seconds) for call, seconds in wall.items()}
            row |= {
                "overhead": ratio(own["one"], own["bare"]),
                "kept": ratio(own["kept"], own["one"]),
                "two": ratio(wall["one"], wall["two"]),
                "halves": ratio(wall["bare"], wall["halves"]),
            }
            rows.append(row)
    finally:
        pool.shutdown()
        folder.cleanup()
    return rows


def run_lines(rows: list[Row]) -> list[str]:
    """Return the lines of the table."""
    lines = [
        "milliseconds per update; run / loop in processor time, the other ratios in wall-clock time",
        "method        loop  run, 1  run, 2  run / loop (aim 1.05)  resumable / run (aim 1.05)"
        "  1 / 2 processes (aim 1.8)   separate loops",
    ]
    for row in rows:
        bare, one, two = (1e3 * row[f"{call} s"] / row["updates"] for call in ("bare", "one", "two"))
        kept = spread(row["kept"], 3) if "kept" in row else "-"
        lines.append(
            f"{row['method']:<12} {bare:>5.1f} {one:>7.1f} {two:>7.1f}  {spread(row['overhead'], 3):>21}"
            f"  {kept:>26}  {spread(row['two']):>25}  {spread(row['halves']):>16}"
        )
    return lines


# -- engines -------------------------------------------------------------------------------------------------------


def engine(script: str, python: Path | str, path: Path, *, alone: bool = False) -> Row:
    """Run the script of an engine and return its reported times."""
    paths = [] if alone else [HERE.parent, *map(Path, filter(None, [os.environ.get("PYTHONPATH")]))]
    command = [*(apart.NAMESPACE if alone else []), python, PEERS / script, path, repr(time.time())]
    done = subprocess.run(command, env=apart.variables(*paths), capture_output=True, text=True, timeout=300)
    said = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not said:
        raise RuntimeError(f"{script} failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    row: Row = json.loads(said[-1])
    return row


ENGINES = {
    "manifoldagg, 1": ("in_manifoldagg.py", None, 1, None),
    "FLGo, 1": ("in_flgo.py", "flgo", 1, "manifoldagg, 1"),
    "manifoldagg, 2": ("in_manifoldagg.py", None, 2, None),
    "Flower, 2": ("in_flower.py", "flower", 2, "manifoldagg, 2"),
}
"""For each engine: script, environment, number of processes, and the reference of the ratio."""


def engines_part(size: Size) -> list[Row]:
    """Measure all engines on equal work."""
    train = [part.tolist() for part in federation().train]
    work = {"train": train, "cohort": 10, "rounds": size.rounds, "warm": 3, "steps": 12, "batch": 16, "rate": 0.01}
    pythons = {name: apart.environment(name) for name in ("flower", "flgo")}
    seen: dict[str, list[Row]] = {name: [] for name in ENGINES}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "work.json"
        for turn in range(size.engine_turns):
            names = list(ENGINES)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                script, wanted, jobs, _ = ENGINES[name]
                path.write_text(json.dumps(work | {"jobs": jobs}))
                python = sys.executable if wanted is None else pythons[wanted]
                seen[name].append(engine(script, python, path, alone=wanted is not None))
    speeds = {name: [made["updates"] / made["seconds"] for made in rows] for name, rows in seen.items()}
    rows = []
    for name, (_, _, jobs, ours) in ENGINES.items():
        rows.append(
            {
                "engine": seen[name][0]["engine"],
                "version": seen[name][0]["version"],
                "processes": jobs,
                "updates": seen[name][0]["updates"],
                "speed": statistics.median(speeds[name]),
                "cold": statistics.median(made["cold"] for made in seen[name]),
                "ratio": None if ours is None else ratio(speeds[ours], speeds[name]),
            }
        )
    return rows


AIMS = {"FLGo": 1.0, "Flower": 3.0}


def engines_lines(rows: list[Row]) -> list[str]:
    """Return the lines of the table."""
    lines = [
        f"equal work: FedAvg, 10 of {CLIENTS} clients per round, 12 steps of Adam on minibatches of 16; no evaluation",
        "engine       version   processes  updates/s  cold start s  ours/peer            aim",
    ]
    for row in rows:
        compared = "" if row["ratio"] is None else f"{spread(row['ratio']):<19} {AIMS[row['engine']]:>4.1f}"
        lines.append(
            f"{row['engine']:<12} {row['version']:<9} {row['processes']:>9} {row['speed']:>10.1f} {row['cold']:>13.1f}"
            f"  {compared}".rstrip()
        )
    return lines


# -- clients -------------------------------------------------------------------------------------------------------


class Idle:
    """A trainer that returns the start model."""

    def train(
        self, space: Any, message: Message, loss: Any, batches: Any, client_state: Any, *, generator: Any
    ) -> Payload:
        """Return the start model, with the number of samples of the batches."""
        return Payload(message.start[None], batches.samples)


def held() -> float:
    """Return the peak memory in GiB. `ru_maxrss` would include the memory of the parent process."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 2**20


def one_size(clients: int, answers: int) -> Row:
    """Measure memory, the time of the first update, and the time of later updates, in a separate process."""
    torch.set_num_threads(1)
    labels = torch.arange(5 * clients) % 2
    inputs = torch.randn(5 * clients, 4, generator=torch.Generator().manual_seed(0))
    made = LabelledDataset("synthetic", inputs, labels, partial(torch.nn.Linear, 4, 2), target=0.9)
    parts = np.arange(5 * clients).reshape(clients, 5)
    data = FederatedDataset(made, list(parts[:, 1:]), list(parts[:, :1]), batch=16, seed=0)
    before = held()
    times = [time.perf_counter()]
    idle = Method("idle", FedAsync(0.5), Idle())
    run(data, idle, num_updates=answers, eval_every=answers, progress=lambda: times.append(time.perf_counter()))
    return {
        "clients": clients,
        "before": before,
        "GiB": held(),
        "first": times[1] - times[0],
        "answer": statistics.median(np.diff(times[1:])),
    }


def clients_part(size: Size) -> list[Row]:
    """Measure each number of clients in a separate process."""
    rows = []
    for clients in size.clients:
        command = [sys.executable, __file__, "--one-size", str(clients), str(size.answers)]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    return rows


def clients_lines(rows: list[Row]) -> list[str]:
    """Return the lines of the table."""
    lines = [
        "clients that do nothing, with a model of 10 parameters; GiB is the peak memory of the process",
        "  clients  GiB before    GiB  s to the first update us per update   aim",
    ]
    for row in rows:
        aim = "< 2 GiB" if row["clients"] == 100_000 else ""
        lines.append(
            f"{row['clients']:>9} {row['before']:>11.2f} {row['GiB']:>6.2f} {row['first']:>22.2f}"
            f" {1e6 * row['answer']:>13.0f}   {aim}".rstrip()
        )
    return lines


def spread(values: tuple[float, float, float], digits: int = 2) -> str:
    """Format the median and the quartiles."""
    low, middle, high = values
    return f"{middle:.{digits}f} ({low:.{digits}f} - {high:.{digits}f})"


MADE = {
    "run": (run_part, run_lines),
    "engines": (engines_part, engines_lines),
    "clients": (clients_part, clients_lines),
}


def main() -> None:
    """Run the benchmark, print the tables and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--quick", action="store_true", help="small sizes and inexact results; write nothing")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--one-size", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one_size:
        print(json.dumps(one_size(*options.one_size)))
        return
    torch.set_num_threads(1)
    size = QUICK if options.quick else FULL
    settings = {"torch": torch.__version__, "machine": platform.platform(), "cores": os.cpu_count()}
    head = f"simulation; torch {torch.__version__}, {machine()}; median (quartiles)"
    by_parts(options.out / "simulation.json", head, settings, options.parts, MADE, size, write=not options.quick)


if __name__ == "__main__":
    main()
