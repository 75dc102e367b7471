"""One hour of training with failing clients and server restarts: do memory, open files or files on disk grow?

Thirty clients train a small convolutional network on the digits. About 60 % of the tasks return their update as bytes,
out of order and on time. The other clients

- never answer;
- release their ticket, and half of these clients send their update anyway;
- answer up to 45 seconds late;
- send the same update, or another update, again on an answered ticket;
- send an invalid update: values that are not finite or huge, wrong shapes or dtypes, false sample counts, or
  damaged bytes.

The server writes a journal and checkpoints, spills old versions to disk and averages its models (SWA). Every three
minutes the server is closed, or discarded without a call to `close`, and resumes from its files. After each restart,
the model and the tickets must be equal to the last bit. At the end, the number of accepted updates must be equal to
that of a counter outside the server.

The table shows the growth per hour of resident memory, retained versions, files on disk, open files and threads. The
growth is a least-squares slope with its 95 % confidence interval, after the first tenth of the run. The table also
shows the time of each kind of restart and the largest journal.
"""

import argparse
import gc
import heapq
import json
import math
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from resident import descriptors, megabytes, resident, slope, threads
from timing import machine

from manifoldagg import ParameterSpace, Server, wire
from manifoldagg._io import new_figure
from manifoldagg.averaging import SWA
from manifoldagg.errors import CheckpointError, WireError
from manifoldagg.experiments import load_dataset
from manifoldagg.federated import (
    CheckpointPolicy,
    Durability,
    Journal,
    MemoryPolicy,
    Payload,
    Receipt,
    ServerLimits,
    Ticket,
    UpdateLimits,
    clients,
)
from manifoldagg.federated.rules import CA2FL
from manifoldagg.simulation import FederatedDataset, dirichlet_partition

HERE = Path(__file__).parent
CLIENTS = 30
OUTCOMES = {"on time": 0.6, "late": 0.08, "no answer": 0.08, "released": 0.04, "repeated": 0.08, "invalid": 0.12}
"""Probabilities of the outcomes of a task."""
TICKET_TIMEOUT = 30.0
MAX_DELAY = 45.0
"""Largest delay of a late update, in seconds. One third of the late updates arrive after the ticket expired."""
HISTORY_SIZE = 1000
"""Rows of the history and cached receipts. Both reach their limit in the first minutes."""
CHECKPOINT_UPDATES = 200
MAX_MEMORY_GROWTH = 32e6
"""Largest growth of resident memory after the first tenth of the run, in bytes."""
MAX_FILE_GROWTH = 8
"""Largest growth of the number of open files after the first tenth of the run."""
MIN_TASKS = 100
MIN_ACCURACY = 0.8
"""Required accuracy of a run of at least five minutes."""


def replaced(payload: Payload, **fields: Any) -> Payload:
    """Return a copy of a payload with some fields replaced."""
    return Payload(**{**vars(payload), **fields})


INVALID: dict[str, Callable[[Payload], Any]] = {
    "nan": lambda p: replaced(p, points=torch.full_like(p.points, torch.nan)),
    "infinite": lambda p: replaced(p, points=torch.full_like(p.points, torch.inf)),
    "huge": lambda p: replaced(p, points=1e30 * p.points),
    "wrong length": lambda p: replaced(p, points=torch.cat([p.points, p.points], -1)),
    "too many points": lambda p: replaced(p, points=p.points.expand(40, -1)),
    "wrong dtype": lambda p: replaced(p, points=p.points.double()),
    "zero samples": lambda p: replaced(p, samples=0),
    "overflow": lambda p: replaced(p, points=p.points * torch.tensor([1.0]).exp() ** 80),
    "missing buffers": lambda p: replaced(p, buffers={}),
    "wrong buffers": lambda p: replaced(p, buffers={name: x[..., None] for name, x in p.buffers.items()}),
    "receipt as payload": lambda p: Receipt(True, "", 1),
}


class Deployment:
    """A server and its unreliable clients.

    Args:
        folder: folder of the server's files.
        seed: seed of the outcomes and delays.
    """

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.folder = folder
        dataset = load_dataset("digits", "cnn:width=4,dense=16,norm=batch")
        partition = partial(dirichlet_partition, concentration=0.5)
        self.federation = FederatedDataset.split(dataset, CLIENTS, partition=partition, seed=seed)
        self.model = self.federation.model()
        self.space = ParameterSpace.of(self.model)
        self.loss = self.space.loss(self.model, torch.nn.functional.cross_entropy)
        self.trainer = clients.Local(epochs=1, rate=3e-3)
        self.rule = CA2FL(5)
        self.counts: Counter[str] = Counter()
        self.tasks: Counter[int] = Counter()
        self.in_transit: list[tuple[float, int, bytes, str]] = []
        self.accepted = 0
        held_out = torch.from_numpy(np.concatenate(self.federation.held_out))
        self.test_data = (dataset.inputs[held_out], dataset.labels[held_out])
        self.server = Server.of(
            self.model,
            self.rule,
            averaging=SWA(self.space, start=50, cycle=5),
            limits=ServerLimits(
                UpdateLimits(norm_factor=20.0, samples_factor=5.0, max_staleness=500),
                timeout=TICKET_TIMEOUT,
                history_size=HISTORY_SIZE,
                receipt_cache_size=HISTORY_SIZE,
                max_in_flight=5000,
            ),
            memory=self._memory(),
            durability=self._durability(),
        )

    def _memory(self) -> MemoryPolicy:
        return MemoryPolicy(limit=20 * 4 * self.space.layout.size, spill=self.folder)

    def _durability(self) -> Durability:
        return Durability(
            CheckpointPolicy(self.folder / "server", every_updates=CHECKPOINT_UPDATES, keep=2),
            Journal(self.folder / "journal", "batch", fsync_every=50),
        )

    def run_task(self) -> None:
        """Dispatch one task, and deliver all messages that have arrived."""
        client = self.random.randrange(CLIENTS)
        ticket = self.server.dispatch(client)
        self.tasks[client] += 1
        (outcome,) = self.random.choices([*OUTCOMES], [*OUTCOMES.values()])
        self.counts[f"tasks: {outcome}"] += 1
        if outcome == "released":
            self.server.drop(ticket)
        if outcome != "no answer" and (outcome != "released" or self.random.random() < 0.5):
            self._train(client, ticket, outcome)
        now = time.monotonic()
        while self.in_transit and self.in_transit[0][0] <= now:
            self._deliver(*heapq.heappop(self.in_transit)[2:])

    def _train(self, client: int, ticket: Ticket, outcome: str) -> None:
        task = self.tasks[client]
        batches = self.federation.batches(client, task)
        generator = torch.Generator().manual_seed(task)
        payload = self.trainer.train(self.space, ticket.message, self.loss, batches, None, generator=generator)
        due = time.monotonic() + self.random.uniform(0, MAX_DELAY if outcome == "late" else 0.5)
        if outcome == "invalid":
            self._send(due, self._invalid(payload, ticket.id), "invalid")
            if self.random.random() < 0.5:
                self._send(due + 1, wire.pack(payload, ticket=ticket.id), "valid")
            return
        data = wire.pack(payload, ticket=ticket.id)
        self._send(due, data, "valid")
        if outcome == "repeated":
            for _ in range(self.random.randint(1, 3)):
                again = data if self.random.random() < 0.5 else self._invalid(payload, ticket.id)
                self._send(due + self.random.uniform(0, 5), again, "repeated")

    def _invalid(self, payload: Payload, ticket: str) -> bytes:
        kind = self.random.choice([*INVALID, "truncated", "damaged header", "random bytes"])
        if kind in INVALID:
            return wire.pack(INVALID[kind](payload), ticket=ticket)
        data = bytearray(wire.pack(payload, ticket=ticket))
        if kind == "truncated":
            return bytes(data[: self.random.randrange(len(data))])
        if kind == "random bytes":
            return self.random.randbytes(self.random.randrange(2000))
        # A flipped bit in the tensors can give a valid update, so only the header is damaged.
        data[self.random.randrange(int.from_bytes(data[:8], "little"))] ^= 1 << self.random.randrange(8)
        return bytes(data)

    def _send(self, due: float, data: bytes, kind: str) -> None:
        heapq.heappush(self.in_transit, (due, self.random.getrandbits(60), data, kind))

    def _deliver(self, data: bytes, kind: str) -> None:
        before = self.server.updates
        try:
            ticket = wire.ticket_of(data)
            receipt = self.server.receive(ticket or "", partial(wire.unpack, data, spec=self.space))
        except WireError:  # raised for a header without a ticket
            self.counts[f"{kind}: unreadable"] += 1
            return
        new = self.server.updates - before
        self.accepted += new
        result = "accepted" if new else "earlier receipt" if receipt.accepted else "rejected"
        self.counts[f"{kind}: {result}"] += 1

    def restart(self, *, close: bool) -> float:
        """Resume from the files, after `close` or without it, and return the seconds of `Server.resume`."""
        before = self._fingerprint()
        if close:
            self.server.save()
            self.server.close()
        del self.server
        # The journal's lock is released when the last reference to the server is gone.
        gc.collect()
        averaging = SWA(self.space, start=50, cycle=5)
        deadline = time.perf_counter() + 10
        while True:
            begun = time.perf_counter()
            try:
                self.server = Server.resume(
                    self.folder / "server",
                    self.space,
                    self.rule,
                    averaging=averaging,
                    memory=self._memory(),
                    durability=self._durability(),
                )
                break
            except CheckpointError as error:
                # A thread of the discarded server may still be writing its last checkpoint.
                if "another server of this one" not in str(error) or time.perf_counter() > deadline:
                    raise
                gc.collect()
                time.sleep(0.05)
        seconds = time.perf_counter() - begun
        if before != (after := self._fingerprint()):
            raise RuntimeError(f"a restart changed the server: expected {before[:3]}, got {after[:3]}")
        return seconds

    def _fingerprint(self) -> tuple[Any, ...]:
        server = self.server
        return server.version, server.updates, server.tickets, server.model.numpy().tobytes()

    def accuracy(self) -> float:
        """Return the accuracy on the held-out images."""
        self.model.load_state_dict(self.server.state_dict())
        self.model.eval()
        inputs, labels = self.test_data
        with torch.no_grad():
            accuracy = (self.model(inputs).argmax(-1) == labels).float().mean().item()
        self.model.train()
        return accuracy

    def sample(self, seconds: float) -> dict[str, float]:
        """Measure every quantity that must stay bounded, `seconds` after the start of the run."""
        files = {entry.name: entry.stat().st_size for entry in os.scandir(self.folder) if entry.is_file()}
        return {
            "seconds": seconds,
            "resident": resident(),
            "descriptors": descriptors(),
            "threads": threads(),
            "tickets": len(self.server.tickets),
            "updates": self.server.updates,
            "version": self.server.version,
            "files": len(files),
            "disk": sum(files.values()),
            "journal": sum(size for name, size in files.items() if name.startswith("journal")),
            "retained": self.server.memory["versions"] + self.server.memory["clients"],
        }


def run(
    seconds: float, interval: float, folder: Path, save: Callable[[dict[str, Any]], None] = lambda results: None
) -> dict[str, Any]:
    """Run for `seconds` with a restart every `interval` seconds, and pass the results to `save` once a minute."""
    deployment = Deployment(folder)
    begun = restarted = time.perf_counter()
    results: dict[str, Any] = {"samples": [], "accuracies": [], "restarts": []}
    results["settings"] = {
        "seconds": seconds,
        "interval": interval,
        "torch": torch.__version__,
        "machine": platform.platform(),
    }
    sampled = evaluated = saved = -math.inf

    def restart() -> None:
        close = len(results["restarts"]) % 2 == 0
        results["restarts"].append([time.perf_counter() - begun, deployment.restart(close=close), close])

    tasks = 0
    while (now := time.perf_counter()) - begun < seconds or tasks < MIN_TASKS:
        deployment.run_task()
        tasks += 1
        if now - restarted >= interval:
            restart()
            restarted = time.perf_counter()
        if now - sampled >= seconds / 1000:
            sampled = now
            results["samples"].append(deployment.sample(now - begun))
        if now - evaluated >= min(10.0, seconds / 5):
            evaluated = now
            results["accuracies"].append([now - begun, deployment.accuracy()])
        if now - saved >= 60:
            saved = now
            results["counts"] = dict(deployment.counts)
            save(results)
    while len(results["restarts"]) < 2:
        restart()
    if deployment.accepted != deployment.server.updates:
        raise RuntimeError(f"server.updates: expected {deployment.accepted}, got {deployment.server.updates}")
    results["accuracies"].append([time.perf_counter() - begun, deployment.accuracy()])
    results["counts"] = dict(deployment.counts)
    results["rejected"] = deployment.server.rejected
    deployment.server.close()
    return results


def growth_of(results: dict[str, Any]) -> dict[str, Any]:
    """Return the range and the growth per hour of each quantity after the first tenth of the run."""
    seconds = results["settings"]["seconds"]
    late = [row for row in results["samples"] if row["seconds"] >= seconds / 10]
    hours = [row["seconds"] / 3600 for row in late]
    growth: dict[str, Any] = {}
    for name in ("resident", "descriptors", "threads", "disk", "journal", "retained"):
        values = [row[name] for row in late]
        per_hour, half_width = slope(hours, values)
        growth[name] = {
            "first": values[0],
            "min": min(values),
            "max": max(values),
            "per_hour": per_hour,
            "half_width": half_width,
        }
    half = [row for row in late if row["seconds"] >= seconds / 2]
    growth["second half"] = slope([row["seconds"] / 3600 for row in half], [row["resident"] for row in half])
    # The samples of this script are a part of the resident memory, and grow with time.
    size = sum(sys.getsizeof(row) + sum(map(sys.getsizeof, row.values())) for row in results["samples"])
    growth["samples"] = 3600 * size / results["samples"][-1]["seconds"]
    return growth


def table_lines(results: dict[str, Any], growth: dict[str, Any]) -> list[str]:
    """Return the lines of the table."""
    last = results["samples"][-1]
    lines = [
        f"{last['seconds']:.0f} s, {last['updates']} accepted updates, {last['version']} versions, "
        f"{len(results['restarts'])} restarts, final accuracy {results['accuracies'][-1][1]:.3f}",
        "",
        f"Recovery time (one checkpoint per {CHECKPOINT_UPDATES} updates)   median        max",
    ]
    for label, closed in (("after close", True), ("without close", False)):
        times = [seconds for _, seconds, close in results["restarts"] if close is closed]
        lines.append(f"{label:<52} {statistics.median(times):>8.3f} s {max(times):>8.3f} s")
    lines += ["", "After the first tenth     first      min      max    growth per hour    95 %"]
    for name, (label, unit) in {
        "resident": ("resident memory, MB", 1e6),
        "retained": ("retained models, MB", 1e6),
        "disk": ("files on disk, MB", 1e6),
        "journal": ("journal, MB", 1e6),
        "descriptors": ("open files", 1),
        "threads": ("threads", 1),
    }.items():
        row = growth[name]
        lines.append(
            f"{label:<20} {row['first'] / unit:>10.2f} {row['min'] / unit:>8.2f} {row['max'] / unit:>8.2f} "
            f"{row['per_hour'] / unit:>+18.3f} {'+-':>4}{row['half_width'] / unit:>6.3f}"
        )
    per_hour, half_width = map(megabytes, growth["second half"])
    lines += [f"{'resident memory, second half of the run':<49}{per_hour:>+18.3f}   +-{half_width:>6.3f}"]
    lines += [f"{'of which samples stored by this script':<49}{megabytes(growth['samples']):>+18.3f}", ""]
    lines += [f"{name:<32} {count:>8}" for name, count in sorted(results["counts"].items())]
    return lines


def draw(results: dict[str, Any], path: Path) -> None:
    """Plot memory, open files, threads and accuracy over time. Dotted lines are restarts."""
    samples = results["samples"]
    minutes = [row["seconds"] / 60 for row in samples]
    figure = new_figure(6.4, 7.2)
    top, disk, middle, bottom = figure.subplots(4, sharex=True, height_ratios=(3, 1.5, 1, 1))
    top.plot(minutes, [megabytes(row["resident"]) for row in samples], color="#0072b2", lw=1)
    top.set_ylim(0, 1.25 * max(megabytes(row["resident"]) for row in samples))
    top.set_ylabel("resident memory, MB")
    disk.plot(minutes, [megabytes(row["disk"]) for row in samples], color="#0072b2", lw=1, label="all files")
    disk.plot(minutes, [megabytes(row["journal"]) for row in samples], color="#d55e00", lw=1, label="journal")
    disk.set_ylim(0, None)
    disk.set_ylabel("disk, MB")
    disk.legend(loc="upper right", ncols=2, fontsize="small", frameon=False)
    middle.plot(minutes, [row["descriptors"] for row in samples], color="#0072b2", lw=1, label="open files")
    middle.plot(minutes, [row["threads"] for row in samples], color="#d55e00", lw=1, ls="--", label="threads")
    middle.set_ylim(0, 1.6 * max(row["descriptors"] for row in samples))
    middle.legend(loc="upper right", ncols=2, fontsize="small", frameon=False)
    times, accuracies = zip(*results["accuracies"], strict=True)
    bottom.plot([seconds / 60 for seconds in times], accuracies, color="#009e73", lw=1)
    bottom.set_ylim(0, 1)
    bottom.set_ylabel("accuracy")
    bottom.set_xlabel("minutes")
    for axes in (top, disk, middle, bottom):
        for seconds, *_ in results["restarts"]:
            axes.axvline(seconds / 60, color="0.8", lw=0.5, ls=":", zorder=0)
    figure.savefig(path)


def main() -> None:
    """Run, print and store the table, the numbers and the picture, and fail if a quantity grew beyond its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--restart", type=float, default=180.0, help="seconds between two restarts")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "endurance.json"

    def save(results: dict[str, Any]) -> None:
        path.write_text(json.dumps(results) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        results = run(options.seconds, options.restart, Path(folder), save)
    growth = growth_of(results)
    lines = [f"Unreliable clients and restarts; torch {torch.__version__}, {machine()}", *table_lines(results, growth)]
    print(*lines, sep="\n")
    (options.out / "endurance.txt").write_text("\n".join(lines) + "\n")
    save({**results, "growth": growth})
    draw(results, options.out / "endurance.png")
    memory = growth["resident"]
    if memory["max"] > memory["first"] + MAX_MEMORY_GROWTH:
        raise SystemExit(f"memory grew by {megabytes(memory['max'] - memory['first']):.1f} MB")
    files = growth["descriptors"]
    if files["max"] > files["first"] + MAX_FILE_GROWTH:
        raise SystemExit(f"open files grew from {files['first']} to {files['max']}")
    if options.seconds >= 300 and results["accuracies"][-1][1] < MIN_ACCURACY:
        raise SystemExit(f"accuracy: expected at least {MIN_ACCURACY}, got {results['accuracies'][-1][1]:.3f}")


if __name__ == "__main__":
    main()
