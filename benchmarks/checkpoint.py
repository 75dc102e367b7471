"""What a checkpoint costs, and what it costs the updates beside it.

A server has so many clients, each with something kept for it and a ticket that is out. `receive` is timed alone and
while checkpoints are written without a pause, in turns; seconds are those of a clock on the wall. Where there are as
many cores as threads the difference is memory traffic and the interpreter's lock, which the writer takes for the many
small values of tickets and clients. `the call` is what `receive` spends on a checkpoint itself: taking the record, and
copying the average where there is one.

The second table has what a journal costs a `receive`: without one, with `"batch"` and with `"always"`, beside writing
as many bytes as a change has to a file, and writing and syncing them. A dispatch is journaled as well, and not timed.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch
from timing import machine

from manifoldagg import Server
from manifoldagg.averaging import SWA
from manifoldagg.federated import Durability, Journal, Payload
from manifoldagg.federated.rules import AsyncFedED
from manifoldagg.manifolds import Flat

HERE = Path(__file__).parent
FEW = 10
HEAD = (
    "       P  clients  average      MB  write s   MB/s  resume s  call ms  receive ms    p99  beside ms    p99    most"
)


KEPT = "       P   bytes    none ms    batch ms    write ms   always ms    write and fsync ms"


def filled(size: int, clients: int, average: bool) -> Server:
    """A server that has something kept for everybody, and as many tickets out."""
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
    """Seconds of each `receive` for so long."""
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
    """A line of the table."""
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


def journaled(size: int, limit: float, folder: Path) -> dict[str, float]:
    """A line of the second table: medians in seconds."""
    row: dict[str, float] = {"P": size}
    for fsync in (None, "batch", "always"):
        for path in folder.glob("lines.*"):
            path.unlink()
        journal = None if fsync is None else Journal(folder / "lines", fsync)
        server = Server(
            Flat(size), AsyncFedED(0.5), torch.zeros(size), weights="uniform", durability=Durability(journal=journal)
        )
        if fsync is not None:
            (path,) = folder.glob("lines.*.journal")
            ticket = server.dispatch("another")
            before = path.stat().st_size
            server.receive(ticket, Payload(torch.rand(1, size), 1))
            row["bytes"] = path.stat().st_size - before
        row[str(fsync)] = statistics.median(seconds_of(server, limit))
        server.close()
    data = os.urandom(int(row["bytes"]))
    for name, sync in (("write", False), ("write and fsync", True)):
        taken = []
        with open(folder / "bytes", "wb", buffering=0) as file:
            end = time.perf_counter() + limit
            while time.perf_counter() < end:
                start = time.perf_counter()
                file.write(data)
                if sync:
                    os.fsync(file.fileno())
                taken.append(time.perf_counter() - start)
        (folder / "bytes").unlink()
        row[name] = statistics.median(taken)
    return row


def main() -> None:
    """Print a table, and write it and its numbers into a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e5, 1e6, 1e7])
    parser.add_argument("--clients", type=float, nargs="+", default=[1e5], help="with models of P = 10^4")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each time of a line")
    parser.add_argument("--folder", type=Path, help="for journals, on the disk that is meant; a temporary one")
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
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            row = journaled(int(size), options.seconds, Path(folder))
        kept.append(row)
        lines.append(
            f"{int(size):>8} {row['bytes']:>7.2g} {1e3 * row['None']:>10.3f} {1e3 * row['batch']:>11.3f} "
            f"{1e3 * row['write']:>11.3f} {1e3 * row['always']:>11.3f} {1e3 * row['write and fsync']:>21.3f}"
        )
        print(lines[-1], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "checkpoint.txt").write_text("\n".join(lines) + "\n")
    made = {"settings": {"seconds": options.seconds, "machine": platform.platform()}, "rows": rows, "journal": kept}
    (options.out / "checkpoint.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
