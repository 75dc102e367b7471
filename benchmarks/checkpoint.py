"""Cost of checkpoints and of the journal.

The benchmark has three tables:

- Checkpoints: a server has a given number of clients, each with a client state and a ticket in flight. `receive` is
  timed without checkpoints, and while checkpoints are written continuously. Both variants run in turns, in wall-clock
  time. The difference is memory traffic, and the global interpreter lock that the writer needs for many small values.
  The column `call ms` is the time that `receive` itself spends on a checkpoint.
- Journal: a server without a journal and a server with a journal receive the same update in turns. The lower bound is
  the time without a journal, plus the time to append the same number of bytes to a file and to sync the file (with
  `"always"`). A dispatch is also written to the journal, but not timed. Each round uses new files, because the file
  system writes some files several times faster than others.
- Recovery: the time to resume from a journal. The lower bound reads the file once, and lets a server without a journal
  receive the same updates.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from timing import machine, ratio

from manifoldagg import Server
from manifoldagg.averaging import SWA
from manifoldagg.federated import Durability, Journal, Payload
from manifoldagg.federated.rules import AsyncFedED
from manifoldagg.manifolds import Flat

HERE = Path(__file__).parent
FEW = 10
HEAD = (
    "       P  clients  average      MB  write s   MB/s  resume s  call ms  receive ms    p99  during ms    p99    most"
)


KEPT = "       P    fsync    bytes   without ms   write ms   journal ms   x bound        quartiles"
RESUMED = "       P  updates       MB    read s   apply s   resume s   x bound"


def filled(size: int, clients: int, average: bool) -> Server:
    """Return a server with a client state and a ticket in flight for each client."""
    space = Flat(size)
    averaging = SWA(space) if average else None
    server = Server(space, AsyncFedED(0.5), torch.zeros(size), weights="uniform", averaging=averaging)
    answer = Payload(torch.ones(1, size), 1)
    for client in range(clients):
        if clients <= 1000 or client % 100 == 0:
            server.receive(server.dispatch(client), answer)
        server.dispatch(client)
    return server


def seconds_of(server: Server, limit: float) -> list[float]:
    """Return the wall-clock time of each `receive` within a given duration, in seconds."""
    answer = Payload(torch.rand(1, server.space.shape[0]), 1)
    taken = []
    end = time.perf_counter() + limit
    while time.perf_counter() < end:
        ticket = server.dispatch("another")
        start = time.perf_counter()
        server.receive(ticket, answer)
        taken.append(time.perf_counter() - start)
    return sorted(taken)


def measured(size: int, clients: int, average: bool, limit: float) -> dict[str, float]:
    """Return a row of the checkpoint table."""
    server = filled(size, clients, average)
    stop = threading.Event()
    writes: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "server"

        def write() -> None:
            while not stop.is_set():
                start = time.perf_counter()
                server.save(path)
                writes.append(time.perf_counter() - start)

        alone = seconds_of(server, limit)
        start = time.perf_counter()
        server.save(path)
        whole = time.perf_counter() - start
        thread = threading.Thread(target=write)
        thread.start()
        beside = seconds_of(server, limit)
        stop.set()
        thread.join()
        megabytes = path.stat().st_size / 1e6
        calls = []
        for _ in range(5):
            start = time.perf_counter()
            server._durability.make_snapshot()
            calls.append(time.perf_counter() - start)
        averaging = SWA(server.space) if average else None
        start = time.perf_counter()
        Server.resume(path, server.space, server.rule, averaging=averaging)
        resumed = time.perf_counter() - start
    return {
        "P": size,
        "clients": clients,
        "average": average,
        "megabytes": megabytes,
        "write": whole,
        "resume": resumed,
        "call": statistics.median(calls),
        "alone": statistics.median(alone),
        "alone p99": alone[int(0.99 * (len(alone) - 1))],
        "beside": statistics.median(beside),
        "beside p99": beside[int(0.99 * (len(beside) - 1))],
        "longest": beside[-1],
    }


def journaled(size: int, fsync: str, rounds: int, repetitions: int, folder: Path) -> dict[str, Any]:
    """Return a row of the journal table: medians in seconds, and the ratio to the lower bound."""
    payload = Payload(torch.rand(1, size), 1)
    taken: dict[str, list[float]] = {"without": [], "journal": [], "write": []}
    for turn in range(rounds):
        place = folder / f"{fsync}-{turn}"
        place.mkdir()
        servers = {
            name: Server(
                Flat(size),
                AsyncFedED(0.5),
                torch.zeros(size),
                weights="uniform",
                durability=Durability(journal=journal),
            )
            for name, journal in (("without", None), ("journal", Journal(place / "lines", fsync)))
        }
        (path,) = place.glob("lines.*.journal")
        ticket = servers["journal"].dispatch("another")
        before = path.stat().st_size
        servers["journal"].receive(ticket, payload)
        data = os.urandom(path.stat().st_size - before)
        with open(place / "bytes", "wb", buffering=0) as file:
            for i in range(repetitions):
                names = [*taken]
                for name in names[i % 3 :] + names[: i % 3]:
                    ticket = None if name == "write" else servers[name].dispatch("another")
                    start = time.perf_counter()
                    if ticket is not None:
                        servers[name].receive(ticket, payload)
                    else:
                        file.write(data)
                        if fsync == "always":
                            os.fsync(file.fileno())
                    taken[name].append(time.perf_counter() - start)
        servers["journal"].close()
        shutil.rmtree(place)
    bound = [a + b for a, b in zip(taken["without"], taken["write"], strict=True)]
    low, middle, high = ratio(taken["journal"], bound)
    medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
    return {"P": size, "fsync": fsync, "bytes": len(data), **medians, "ratio": middle, "low": low, "high": high}


def resumed(size: int, updates: int, folder: Path) -> dict[str, Any]:
    """Return a row of the recovery table, in seconds."""
    space, rule = Flat(size), AsyncFedED(0.5)
    journal = Journal(folder / "lines", "batch")
    written = Server(space, rule, torch.zeros(size), durability=Durability(journal=journal))
    payloads = [Payload(torch.rand(1, size), 1) for _ in range(8)]
    for i in range(updates):
        written.receive(written.dispatch(i % 100), payloads[i % 8]).check()
    written.close()
    (path,) = folder.glob("lines.*.journal")
    buffer = bytearray(2**20)
    start = time.perf_counter()
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    read = time.perf_counter() - start
    plain = Server(space, rule, torch.zeros(size))
    apply = 0.0
    for i in range(updates):
        ticket = plain.dispatch(i % 100)
        start = time.perf_counter()
        plain.receive(ticket, payloads[i % 8]).check()
        apply += time.perf_counter() - start
    megabytes = path.stat().st_size / 1e6
    start = time.perf_counter()
    after = Server.resume(folder / "checkpoint", space, rule, durability=Durability(journal=journal))
    whole = time.perf_counter() - start
    assert torch.equal(after.model, plain.model)
    after.close()
    made = {"P": size, "updates": updates, "megabytes": megabytes, "read": read, "apply": apply, "resume": whole}
    return {**made, "ratio": whole / (read + apply)}


def main() -> None:
    """Print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e5, 1e6, 1e7])
    parser.add_argument(
        "--clients", type=float, nargs="+", default=[1e5], help="numbers of clients, with models of P = 10^4"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="the duration of each measurement")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the journal table, each with new files")
    parser.add_argument("--updates", type=int, default=10_000, help="updates in the journal of the recovery table")
    parser.add_argument("--folder", type=Path, help="the folder for journals; by default a temporary folder")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        f"checkpoints beside receive, float32; torch {torch.__version__}, {machine()}",
        HEAD,
    ]
    print(*lines, sep="\n", flush=True)
    cases = [(int(size), FEW, average) for size in options.sizes for average in (False, True)]
    cases += [(10_000, int(count), False) for count in options.clients]
    rows = []
    for size, clients, average in cases:
        row = measured(size, clients, average, options.seconds)
        rows.append(row)
        lines.append(
            f"{size:>8} {clients:>8} {'SWA' if average else '-':>8} {row['megabytes']:>7.1f} {row['write']:>8.3f} "
            f"{row['megabytes'] / row['write']:>6.0f} {row['resume']:>9.3f} {1e3 * row['call']:>8.3f} "
            f"{1e3 * row['alone']:>11.3f} {1e3 * row['alone p99']:>6.2f} {1e3 * row['beside']:>10.3f} "
            f"{1e3 * row['beside p99']:>6.2f} {1e3 * row['longest']:>8.1f}"
        )
        print(lines[-1], flush=True)
    lines += ["", KEPT]
    print(*lines[-2:], sep="\n", flush=True)
    kept = []
    for size in options.sizes:
        for fsync in ("always", "batch"):
            repetitions = max(6, min(60, int(1e8 / size)))
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                row = journaled(int(size), fsync, options.rounds, repetitions, Path(folder))
            kept.append(row)
            lines.append(
                f"{row['P']:>8} {fsync:>8} {row['bytes']:>8.2g} {1e3 * row['without']:>12.3f} "
                f"{1e3 * row['write']:>10.3f} {1e3 * row['journal']:>12.3f} {row['ratio']:>9.2f}    "
                f"{row['low']:.2f} to {row['high']:.2f}"
            )
            print(lines[-1], flush=True)
    lines += ["", RESUMED]
    print(*lines[-2:], sep="\n", flush=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        row = resumed(100_000, options.updates, Path(folder))
    lines.append(
        f"{row['P']:>8} {row['updates']:>8} {row['megabytes']:>8.0f} {row['read']:>9.2f} {row['apply']:>9.2f} "
        f"{row['resume']:>10.2f} {row['ratio']:>9.2f}"
    )
    print(lines[-1], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "checkpoint.txt").write_text("\n".join(lines) + "\n")
    made = {
        "settings": {"seconds": options.seconds, "machine": platform.platform()},
        "rows": rows,
        "journal": kept,
        "resume": row,
    }
    (options.out / "checkpoint.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
