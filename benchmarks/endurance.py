"""An hour of training with clients that fail, come back and lie: does the server grow?

Thirty clients learn the digits with a small convolutional network. Of what they are sent to do a good half comes back
as it should, in bytes and out of order. Others vanish, give their ticket back, come back up to a minute late or after
the server was restarted, send the same again or something else on a ticket that was answered, or lie: numbers that are
none or huge, other shapes and dtypes, samples that nobody has, bytes that were cut, altered or never packed.

A journal and checkpoints are written beside the work, older models go to files, an average listens, the model is
examined. Every few minutes the server is closed or dropped as it stands, and goes on from its files: at every restart
the model and the tickets must be the same to the last bit, and every update taken once.

Memory of the process, open files and threads are looked at a thousand times. The table has how much they grow in an
hour, with the interval in which that lies with 95 %, after the first tenth, in which what is bounded fills up, and of
memory in the second half as well, beside what this script itself has noted down by then; the picture has all of it.
"""

import argparse
import gc
import heapq
import json
import os
import platform
import random
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
FATES = {"comes back": 0.6, "comes late": 0.08, "vanishes": 0.08, "gives up": 0.04, "asks again": 0.08, "lies": 0.12}
"""What becomes of those that are sent to work, and of which share."""
TIMEOUT = 30.0
LATE = 45.0
"""Seconds that a late one may take: one in three comes after its ticket ended."""
KEPT = 1000
"""Rows of the history, and receipts: they fill up in the first minutes."""
BOUND = 32e6
"""Bytes by which the process may be larger at any time than at the end of the first tenth."""
FEW = 8
"""So many more files may be open at any time than then."""
LEAST = 100
"""Turns, however long they take."""
EXPECTED = 0.8
"""Accuracy after five minutes."""
Lie = Callable[[Payload], Any]


def replaced(payload: Payload, **fields: Any) -> Payload:
    """A payload with other fields."""
    return Payload(**{**vars(payload), **fields})


LIES: dict[str, Lie] = {
    "no number": lambda p: replaced(p, points=torch.full_like(p.points, torch.nan)),
    "infinite": lambda p: replaced(p, points=torch.full_like(p.points, torch.inf)),
    "huge": lambda p: replaced(p, points=1e30 * p.points),
    "too long": lambda p: replaced(p, points=torch.cat([p.points, p.points], -1)),
    "too many": lambda p: replaced(p, points=p.points.expand(40, -1)),
    "dtype": lambda p: replaced(p, points=p.points.double()),
    "no samples": lambda p: replaced(p, samples=0),
    "a model that has overflowed": lambda p: replaced(p, points=p.points * torch.tensor([1.0]).exp() ** 80),
    "no buffers": lambda p: replaced(p, buffers={}),
    "other buffers": lambda p: replaced(p, buffers={name: x[..., None] for name, x in p.buffers.items()}),
    "a receipt": lambda p: Receipt(True, "", 1),
}


class Hour:
    """A server and its clients.

    Args:
        folder: for its files.
        seed: of what happens.
    """

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.folder = folder
        of = load_dataset("digits", "cnn:width=4,dense=16,norm=batch")
        partition = partial(dirichlet_partition, concentration=0.5)
        self.federation = FederatedDataset.split(of, CLIENTS, partition=partition, seed=seed)
        self.model = self.federation.model()
        self.space = ParameterSpace.of(self.model)
        self.loss = self.space.loss(self.model, torch.nn.functional.cross_entropy)
        self.trainer = clients.Local(epochs=1, rate=3e-3)
        self.rule = CA2FL(5)
        self.size = 4 * self.space.layout.size
        self.counts: Counter[str] = Counter()
        self.turns: Counter[int] = Counter()
        self.mail: list[tuple[float, int, bytes, str]] = []
        self.taken = 0
        held_out = torch.from_numpy(np.concatenate(self.federation.held_out))
        self.exam = (of.inputs[held_out], of.labels[held_out])
        self.server = Server.of(
            self.model,
            self.rule,
            averaging=SWA(self.space, start=50, cycle=5),
            limits=ServerLimits(
                UpdateLimits(norm_factor=20.0, samples_factor=5.0, max_staleness=500),
                timeout=TIMEOUT,
                history_size=KEPT,
                receipt_cache_size=KEPT,
                max_in_flight=5000,
            ),
            memory=self._memory(),
            durability=self._durability(),
        )

    def _memory(self) -> MemoryPolicy:
        return MemoryPolicy(limit=20 * self.size, spill=self.folder)

    def _durability(self) -> Durability:
        return Durability(
            CheckpointPolicy(self.folder / "server", every_updates=200, keep=2),
            Journal(self.folder / "journal", "batch", fsync_every=50),
        )

    def turn(self) -> None:
        """Somebody is sent to work, and what is due comes."""
        client = self.random.randrange(CLIENTS)
        ticket = self.server.dispatch(client)
        self.turns[client] += 1
        (fate,) = self.random.choices([*FATES], [*FATES.values()])
        self.counts[fate] += 1
        if fate == "gives up":
            self.server.drop(ticket)
        # Some of those send what they have all the same.
        if fate != "vanishes" and (fate != "gives up" or self.random.random() < 0.5):
            self._works(client, ticket, fate)
        now = time.monotonic()
        while self.mail and self.mail[0][0] <= now:
            self._comes(*heapq.heappop(self.mail)[2:])

    def _works(self, client: int, ticket: Ticket, fate: str) -> None:
        nth = self.turns[client]
        batches = self.federation.batches(client, nth)
        generator = torch.Generator().manual_seed(nth)
        payload = self.trainer.train(self.space, ticket.message, self.loss, batches, None, generator=generator)
        now = time.monotonic()
        due = now + self.random.uniform(0, LATE if fate == "comes late" else 0.5)
        if fate == "lies":
            self._send(due, self._lie(payload, ticket.id), "lie")
            # Then, perhaps, the truth.
            if self.random.random() < 0.5:
                self._send(due + 1, self._packed(payload, ticket.id), "honest")
            return
        data = self._packed(payload, ticket.id)
        self._send(due, data, "honest")
        if fate == "asks again":
            for _ in range(self.random.randint(1, 3)):
                again = data if self.random.random() < 0.5 else self._lie(payload, ticket.id)
                self._send(due + self.random.uniform(0, 5), again, "again")

    def _packed(self, payload: Any, ticket: str, **options: Any) -> bytes:
        return wire.pack(payload, ticket=ticket, **options)

    def _lie(self, payload: Payload, ticket: str) -> bytes:
        name = self.random.choice([*LIES, "cut", "altered", "noise"])
        if name in LIES:
            return self._packed(LIES[name](payload), ticket)
        data = bytearray(self._packed(payload, ticket))
        if name == "cut":
            return bytes(data[: self.random.randrange(len(data))])
        if name == "noise":
            return self.random.randbytes(self.random.randrange(2000))
        # In the header: what was altered in a model nobody can know.
        data[self.random.randrange(int.from_bytes(data[:8], "little"))] ^= 1 << self.random.randrange(8)
        return bytes(data)

    def _send(self, due: float, data: bytes, what: str) -> None:
        heapq.heappush(self.mail, (due, self.random.getrandbits(60), data, what))

    def _comes(self, data: bytes, what: str) -> None:
        before = self.server.updates
        try:
            ticket = wire.ticket_of(data)
            receipt = self.server.receive(ticket or "", partial(wire.unpack, data, spec=self.space))
        except WireError:  # of a header without a ticket
            self.counts["not read"] += 1
            return
        self.taken += self.server.updates - before
        how = "taken" if self.server.updates > before else "receipt again" if receipt.accepted else "refused"
        self.counts[f"{what}: {how}"] += 1

    def restart(self, *, kindly: bool) -> float:
        """Go on from the files; the seconds that this took."""
        before = self._known()
        if kindly:
            self.server.save()
            self.server.close()
        # What is left is the folder: nobody holds the server any more.
        del self.server
        gc.collect()
        begun = time.perf_counter()
        averaging = SWA(self.space, start=50, cycle=5)
        while True:
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
                # The last checkpoint of the server that was dropped is still being written.
                if "another server of this one" not in str(error) or time.perf_counter() - begun > 10:
                    raise
                gc.collect()
                time.sleep(0.05)
        after = self._known()
        if before != after:
            raise RuntimeError(f"a restart changed the server: {before} is {after}")
        self.counts["restarts from the file" if kindly else "restarts from the journal"] += 1
        return time.perf_counter() - begun

    def _known(self) -> tuple[Any, ...]:
        server = self.server
        return server.version, server.updates, server.tickets, server.model.numpy().tobytes()

    def accuracy(self) -> float:
        """On what no client has trained on."""
        self.model.load_state_dict(self.server.state_dict())
        self.model.eval()
        inputs, labels = self.exam
        with torch.no_grad():
            right = (self.model(inputs).argmax(-1) == labels).float().mean().item()
        self.model.train()
        return right

    def look(self, begun: float) -> dict[str, float]:
        """All that may grow."""
        return {
            "seconds": time.perf_counter() - begun,
            "resident": resident(),
            "descriptors": descriptors(),
            "threads": threads(),
            "tickets": len(self.server.tickets),
            "updates": self.server.updates,
            "version": self.server.version,
            "files": sum(entry.is_file() for entry in os.scandir(self.folder)),
            "disk": sum(entry.stat().st_size for entry in os.scandir(self.folder) if entry.is_file()),
            "kept": self.server.memory["versions"] + self.server.memory["clients"],
        }


def lasting(
    seconds: float, restart: float, folder: Path, save: Callable[[dict[str, Any]], None] = lambda made: None
) -> dict[str, Any]:
    """Let it run for so long; all that was seen. `save` gets it every minute."""
    hour = Hour(folder)
    begun = time.perf_counter()
    made: dict[str, Any] = {"samples": [], "exams": [], "restarts": [], "settings": {"seconds": seconds}}
    made["settings"] |= {"restart": restart, "torch": torch.__version__, "machine": platform.platform()}
    looked = examined = saved = -1e9
    last = begun

    def again(now: float) -> None:
        took = hour.restart(kindly=len(made["restarts"]) % 2 == 0)
        made["restarts"].append([now - begun, took])

    turns = 0
    while (now := time.perf_counter()) - begun < seconds or turns < LEAST:
        hour.turn()
        turns += 1
        if now - last >= restart:
            again(now)
            last = time.perf_counter()
        if now - looked >= seconds / 1000:
            looked = now
            made["samples"].append(hour.look(begun))
        if now - examined >= min(10.0, seconds / 5):
            examined = now
            made["exams"].append([now - begun, hour.accuracy()])
        if now - saved >= 60:
            saved = now
            made["counts"] = dict(hour.counts)
            save(made)
    while len(made["restarts"]) < 2:
        again(time.perf_counter())
    if hour.taken != hour.server.updates:
        raise RuntimeError(f"{hour.taken} updates were taken, and the server knows {hour.server.updates}")
    made["exams"].append([time.perf_counter() - begun, hour.accuracy()])
    made["counts"] = dict(hour.counts)
    made["rejected"] = hour.server.rejected
    hour.server.close()
    return made


def judged(made: dict[str, Any]) -> dict[str, Any]:
    """What grew, after the first tenth."""
    first = made["settings"]["seconds"] / 10
    late = [row for row in made["samples"] if row["seconds"] >= first]
    hours = [row["seconds"] / 3600 for row in late]
    found: dict[str, Any] = {}
    for name in ("resident", "descriptors", "threads", "disk", "kept"):
        values = [row[name] for row in late]
        growth, half = slope(hours, values)
        found[name] = {"first": values[0], "least": min(values), "most": max(values), "growth": growth, "half": half}
    half = [row for row in late if row["seconds"] >= made["settings"]["seconds"] / 2]
    found["second half"] = slope([row["seconds"] / 3600 for row in half], [row["resident"] for row in half])
    last = made["samples"][-1]
    noted = sum(sys.getsizeof(row) + sum(map(sys.getsizeof, row.values())) for row in made["samples"])
    found["noted"] = 3600 * noted / last["seconds"]
    return found


def lines_of(made: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """The table."""
    last = made["samples"][-1]
    took = [seconds for _, seconds in made["restarts"]]
    lines = [
        f"{last['seconds']:.0f} s, {last['updates']} updates taken, {last['version']} versions, "
        f"{len(took)} restarts of at most {max(took, default=0):.2f} s, accuracy {made['exams'][-1][1]:.3f} at the end",
        "",
        "after the first tenth     first    least     most    growth an hour    95 %",
    ]
    for name, (label, unit) in {
        "resident": ("resident, MB", 1e6),
        "kept": ("kept in memory, MB", 1e6),
        "disk": ("files, MB", 1e6),
        "descriptors": ("open files", 1),
        "threads": ("threads", 1),
    }.items():
        row = found[name]
        lines.append(
            f"{label:<20} {row['first'] / unit:>10.2f} {row['least'] / unit:>8.2f} {row['most'] / unit:>8.2f} "
            f"{row['growth'] / unit:>+17.3f} {'+-':>4}{row['half'] / unit:>6.3f}"
        )
    growth, half = map(megabytes, found["second half"])
    lines += [f"{'resident, second half':<49}{growth:>+17.3f}   +-{half:>6.3f}"]
    lines += [f"{'of that noted here':<49}{megabytes(found['noted']):>+17.3f}", ""]
    lines += [f"{what:<32} {count:>8}" for what, count in sorted(made["counts"].items())]
    return lines


def draw(made: dict[str, Any], path: Path) -> None:
    """Memory, open files and accuracy over time; dotted where the server was restarted."""
    samples = made["samples"]
    minutes = [row["seconds"] / 60 for row in samples]
    figure = new_figure(6.4, 6.4)
    top, middle, bottom = figure.subplots(3, sharex=True, height_ratios=(3, 1, 1))
    top.plot(minutes, [megabytes(row["resident"]) for row in samples], color="#0072b2", lw=1)
    top.set_ylim(0, 1.25 * max(megabytes(row["resident"]) for row in samples))
    top.set_ylabel("resident memory, MB")
    middle.plot(minutes, [row["descriptors"] for row in samples], color="#0072b2", lw=1, label="open files")
    middle.plot(minutes, [row["threads"] for row in samples], color="#d55e00", lw=1, ls="--", label="threads")
    middle.set_ylim(0, 1.6 * max(row["descriptors"] for row in samples))
    middle.legend(loc="upper right", ncols=2, fontsize="small", frameon=False)
    bottom.plot([at / 60 for at, _ in made["exams"]], [right for _, right in made["exams"]], color="#009e73", lw=1)
    bottom.set_ylim(0, 1)
    bottom.set_ylabel("accuracy")
    bottom.set_xlabel("minutes")
    for axes in (top, middle, bottom):
        for at, _ in made["restarts"]:
            axes.axvline(at / 60, color="0.8", lw=0.5, ls=":", zorder=0)
    figure.savefig(path)


def main() -> None:
    """Print the table, write it, its numbers and the picture; fail where something grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--restart", type=float, default=180.0, help="seconds between two restarts")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "endurance.json"

    def save(made: dict[str, Any]) -> None:
        path.write_text(json.dumps(made) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        made = lasting(options.seconds, options.restart, Path(folder), save)
    found = judged(made)
    head = f"clients that fail, return and lie; torch {torch.__version__}, {machine()}"
    lines = [head, *lines_of(made, found)]
    print(*lines, sep="\n")
    (options.out / "endurance.txt").write_text("\n".join(lines) + "\n")
    save({**made, "grew": found})
    draw(made, options.out / "endurance.png")
    memory = found["resident"]
    if memory["most"] > memory["first"] + BOUND:
        raise SystemExit(f"memory grew by {megabytes(memory['most'] - memory['first']):.1f} MB")
    files = found["descriptors"]
    if files["most"] > files["first"] + FEW:
        raise SystemExit(f"open files grew from {files['first']} to {files['most']}")
    if options.seconds >= 300 and made["exams"][-1][1] < EXPECTED:
        raise SystemExit(f"the model has not learned: {made['exams'][-1][1]:.3f}")


if __name__ == "__main__":
    main()
