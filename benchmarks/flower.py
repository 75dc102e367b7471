"""The costs of `Asynchronous` in a Flower server, compared with Flower's own FedAvg.

The benchmark has two parts, each with its table.

- `server`: nodes reply at once with prepared models, so that only the server's work is measured. The table has updates
  per second, processor time per update, and bytes copied per update. FedAvg (configure and aggregate) receives the same
  replies. The ratio of processor times compares neighbouring runs: the two strategies run in turns in one process. A
  byte counts as copied if it is written to newly allocated memory. Page faults count these bytes, with every block
  above 16 KiB on its own pages (`MALLOC_MMAP_THRESHOLD_`). Serialising, hashing and sending over a network are the same
  for both strategies and are not measured.
- `straggler`: eight nodes have unequal parts of the digits, and one node takes ten times as long. Both strategies train
  the same tasks. The table has the time until the first model after a round of eight updates reaches the target
  accuracy.

Ratios have the form: median (first quartile - third quartile).
"""

import argparse
import ctypes
import logging
import os
import platform
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import flwr
import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Strategy
from flwr.supercore.task_identity import TaskIdentity
from simulation import spread
from timing import by_parts, ratio

from manifoldagg.experiments import load_dataset
from manifoldagg.federated.rules import FedAsync
from manifoldagg.integrations.flower import Asynchronous
from manifoldagg.simulation import dirichlet_partition

HERE = Path(__file__).parent
NODES = 8
TENSORS = 10
FAST, SLOW = 0.3, 3.0
"""The duration of a task, in seconds."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """The settings that determine the duration."""

    parameters: tuple[int, ...]
    rounds: tuple[int, ...]
    turns: int
    seeds: int
    most: int


FULL = Size(parameters=(10**5, 10**7), rounds=(60, 5), turns=9, seeds=7, most=40)
QUICK = Size(parameters=(10**5, 10**6), rounds=(6, 6), turns=3, seeds=2, most=20)


class Nodes(Grid):
    """Simulated nodes in this process, with one thread each. A task takes a given time, or its real time if that is
    longer.

    Args:
        client: a function that replies to a message.
        seconds: the duration of a task by node. With 0 for all nodes, replies are available at once.
    """

    def __init__(self, client: Callable[[Message], RecordDict], seconds: tuple[float, ...]) -> None:
        self._client = client
        self._seconds = seconds
        self._ids = count(1)
        self._answers: dict[str, Message] = {}
        self._ended = threading.Event()
        self._threads = ThreadPoolExecutor(len(seconds))
        self.marks: list[int] = []

    def close(self) -> None:
        """Stop the threads."""
        self._ended.set()
        self._threads.shutdown(cancel_futures=True)

    def set_run(self, run: Any) -> None:
        """Do nothing."""

    @property
    def run(self) -> Any:
        """Raise an error, because the strategies do not use this property."""
        raise NotImplementedError

    def create_message(self, *args: Any, **named: Any) -> Message:
        """Raise an error, because the strategies do not use this method."""
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return range(1, len(self._seconds) + 1)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Pass messages to the threads of their nodes."""
        self.marks.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        pushed = []
        for message in messages:
            name = str(next(self._ids))
            message.metadata.__dict__["_message_id"] = name
            seconds = self._seconds[message.metadata.dst_node_id - 1]
            if seconds:
                self._threads.submit(self._work, message, seconds)
            else:
                self._work(message, seconds)
            pushed.append(name)
        return pushed

    def _work(self, message: Message, seconds: float) -> None:
        end = time.monotonic() + seconds
        content = self._client(message)
        if seconds:
            self._ended.wait(max(end - time.monotonic(), 0))
        self._answers[message.metadata.message_id] = Message(content, reply_to=message)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the available replies."""
        return [self._answers.pop(name) for name in list(message_ids) if name in self._answers]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Wait for all replies, with Flower's polling interval."""
        waited = set(self.push_messages(messages))
        answers: list[Message] = []
        while waited:
            answers += self.pull_messages(waited)
            waited -= {message.metadata.reply_to_message_id for message in answers}
            if waited:
                time.sleep(0.1)
        return answers


def ours(**options: Any) -> Strategy:
    """Return an asynchronous strategy with FedAsync."""
    strategy = Asynchronous(
        FedAsync(0.5), updates=NODES, min_available_nodes=NODES, fraction_evaluate=0.0, min_evaluate_nodes=0, **options
    )
    return strategy


def flowers() -> Strategy:
    """Return Flower's FedAvg."""
    return FedAvg(min_train_nodes=NODES, min_available_nodes=NODES, fraction_evaluate=0.0)


# -- server --------------------------------------------------------------------------------------------------------


def model_of(parameters: int, seed: int) -> ArrayRecord:
    """Return a model with a given number of parameters and tensors."""
    generator = torch.Generator().manual_seed(seed)
    width = parameters // TENSORS
    return ArrayRecord({f"{i}.weight": 0.02 * torch.randn(width, generator=generator) for i in range(TENSORS)})


def strategies() -> dict[str, Strategy]:
    """Return new strategies that poll without a pause."""
    mine = ours()
    mine.poll_interval = 0.0
    return {"Asynchronous": mine, "FedAvg": flowers()}


def one(name: str, parameters: int, rounds: int) -> tuple[float, float, list[int]]:
    """Return wall-clock seconds, processor seconds and page faults at every push."""
    arrays, trained = model_of(parameters, 0), model_of(parameters, 1)
    metrics = MetricRecord({"num-examples": 1})
    nodes = Nodes(lambda message: RecordDict({"arrays": trained, "metrics": metrics}), (0.0,) * NODES)
    strategy = strategies()[name]
    wall, own = time.perf_counter(), time.process_time()
    strategy.start(nodes, arrays, num_rounds=rounds)
    wall, own = time.perf_counter() - wall, time.process_time() - own
    nodes.close()
    return wall, own, nodes.marks


def copied(name: str, parameters: int, rounds: int) -> float:
    """Return the number of copied bytes per update. A separate process allocates every block on new pages."""
    ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE, so that each fault is one small page
    ballast = [bytes(16_000) for _ in range(4_000)]  # fills free heap memory, which would be used before new pages
    marks = one(name, parameters, rounds + 2)[2]
    del ballast
    # The first and the last tasks of all nodes are not counted.
    quarter = len(marks) // 4
    part = marks[quarter : len(marks) - quarter]
    per_push = (part[-1] - part[0]) / (len(part) - 1)
    updates_a_push = NODES * (rounds + 2) / len(marks)
    return per_push / updates_a_push * resource.getpagesize()


def server_part(size: Size) -> list[Row]:
    """Measure both strategies for every size."""
    rows: list[Row] = []
    for parameters, rounds in zip(size.parameters, size.rounds, strict=True):
        names = list(strategies())
        wall: dict[str, list[float]] = {name: [] for name in names}
        own: dict[str, list[float]] = {name: [] for name in names}
        for name in names:
            one(name, parameters, 1)
        for turn in range(size.turns):
            for name in names[turn % 2 :] + names[: turn % 2]:
                seconds, processor, _ = one(name, parameters, rounds)
                wall[name].append(seconds / rounds / NODES)
                own[name].append(processor / rounds / NODES)
        ours, theirs = names
        for name in names:
            command = [sys.executable, __file__, "--copied", name, str(parameters), str(rounds)]
            variables = os.environ | {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TOP_PAD_": "0"}
            said = subprocess.run(command, check=True, capture_output=True, text=True, env=variables, timeout=600)
            rows.append(
                {
                    "strategy": name,
                    "parameters": parameters,
                    "speed": 1 / statistics.median(wall[name]),
                    "processor": statistics.median(own[name]),
                    "ratio": ratio(own[ours], own[theirs]) if name == ours else None,
                    "bytes": float(said.stdout.splitlines()[-1]),
                }
            )
    return rows


def server_lines(rows: list[Row]) -> list[str]:
    """Return the lines of the table."""
    lines = [
        f"{NODES} nodes that reply at once; copied bytes also as multiples of the model, 4 bytes per parameter",
        "parameters  strategy       updates/s   ms / update  / FedAvg (aim 3)      MB copied  models",
    ]
    for row in rows:
        compared = "" if row["ratio"] is None else spread(row["ratio"])
        megabytes, models = row["bytes"] / 1e6, row["bytes"] / (4 * row["parameters"])
        lines.append(
            f"{row['parameters']:>10}  {row['strategy']:<13} {row['speed']:>10.1f} {1e3 * row['processor']:>13.3f}"
            f"  {compared:<19} {megabytes:>11.2f} {models:>7.1f}"
        )
    return lines


# -- straggler -----------------------------------------------------------------------------------------------------


def straggler_part(size: Size) -> list[Row]:
    """Measure the time until the target accuracy for both strategies, with the same seeds."""
    names = ["Asynchronous", "FedAvg"]
    seen: dict[str, list[tuple[float, int]]] = {name: [] for name in names}
    target = load_dataset("digits").target
    for seed in range(size.seeds):
        for name in names[seed % 2 :] + names[: seed % 2]:
            seen[name].append(time_to(target, name, seed, size.most))
    return [
        {
            "strategy": name,
            "target": target,
            "seconds": statistics.median(seconds for seconds, _ in pairs),
            "updates": statistics.median(updates for _, updates in pairs),
            "ratio": ratio([s for s, _ in seen["FedAvg"]], [s for s, _ in pairs]) if name == names[0] else None,
        }
        for name, pairs in seen.items()
    ]


class Enough(Exception):
    """Exception that ends a run when the model has reached the target accuracy."""


def time_to(target: float, name: str, seed: int, most: int) -> tuple[float, int]:
    """Return the seconds and updates until a model reaches the target accuracy."""
    digits = load_dataset("digits")
    exam = np.random.default_rng(seed).permutation(len(digits.labels))[:360]
    held = np.setdiff1d(np.arange(len(digits.labels)), exam)
    parts = dirichlet_partition(digits.labels[held], NODES, concentration=0.5, generator=np.random.default_rng(seed))
    generators = [torch.Generator().manual_seed(1000 * seed + node) for node in range(NODES)]

    def client(message: Message) -> RecordDict:
        node = message.metadata.dst_node_id - 1
        index = torch.from_numpy(held[parts[node]])
        inputs, labels = digits.inputs[index], digits.labels[index]
        model = digits.model()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.Adam(model.parameters(), 0.003)
        for _ in range(12):
            batch = torch.randint(len(labels), (16,), generator=generators[node])
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            optimizer.step()
        metrics = MetricRecord({"num-examples": len(labels)})
        return RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})

    def right(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        nonlocal begun
        begun = begun or time.perf_counter()
        model = digits.model()
        model.load_state_dict(arrays.to_torch_state_dict())
        with torch.no_grad():
            share = (model(digits.inputs[exam]).argmax(1) == digits.labels[exam]).float().mean().item()
        if share >= target:
            taken.append((time.perf_counter() - begun, NODES * server_round))
            raise Enough
        return MetricRecord({"accuracy": share})

    begun = 0.0
    taken: list[tuple[float, int]] = []
    torch.manual_seed(seed)
    arrays = ArrayRecord(digits.model().state_dict())
    nodes = Nodes(client, (*(FAST,) * (NODES - 1), SLOW))
    strategy = ours() if name == "Asynchronous" else flowers()
    try:
        strategy.start(nodes, arrays, num_rounds=most * (1 if name == "FedAvg" else 10), evaluate_fn=right)
    except Enough:
        pass
    finally:
        nodes.close()
    if not taken:
        raise RuntimeError(f"{name}, seed {seed}: never {target:.0%} right")
    return taken[0]


def straggler_lines(rows: list[Row]) -> list[str]:
    """Return the lines of the table."""
    lines = [
        f"{NODES} nodes, a task takes {FAST:g} s, on one of them {SLOW:g} s; until {rows[0]['target']:.0%} are right",
        "strategy       seconds  updates  FedAvg / ours (aim 3)",
    ]
    for row in rows:
        compared = "" if row["ratio"] is None else spread(row["ratio"])
        lines.append(f"{row['strategy']:<13} {row['seconds']:>8.2f} {row['updates']:>8.0f}  {compared}".rstrip())
    return lines


MADE = {"server": (server_part, server_lines), "straggler": (straggler_part, straggler_lines)}


def main() -> None:
    """Run the benchmark, print the tables and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(MADE), choices=list(MADE))
    parser.add_argument("--quick", action="store_true", help="small sizes and inexact results; write nothing")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--copied", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = (
        1  # Flower requires these values to create messages
    )
    logging.getLogger("flwr").setLevel(logging.ERROR)
    if options.copied:
        name, parameters, rounds = options.copied
        print(copied(name, int(parameters), int(rounds)))
        return
    size = QUICK if options.quick else FULL
    settings = {"torch": torch.__version__, "flwr": flwr.__version__, "machine": platform.platform()}
    head = f"Flower {flwr.__version__}, torch {torch.__version__}, one thread; {os.cpu_count()} cores"
    by_parts(options.out / "flower.json", head, settings, options.parts, MADE, size, write=not options.quick)


if __name__ == "__main__":
    main()
