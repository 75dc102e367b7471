"""How long `receive` takes on a machine that has other things to do.

Clients in threads of their own dispatch and answer without end; beside them, one process a core spins, or none does.
Seconds are those of a clock on the wall, from the call of `receive` to its return: with many clients they hold the wait
for the updates before it. A server that hands a small model to a pool of threads waits for threads that do not get
a core; the table shows it in the median and the 99th percentile.

A second table has so many tickets out at once, each of a client of its own, and what `dispatch` and `receive` cost
then, in seconds of the processor: of batches, taken in turns with those of a server with the fewest tickets.

A third table has one client of a large model, which is handed to it by `dispatch` and comes back by `receive`, on one
thread and beside its floor: what the rule's step has to read and write, and for the client's copy one model read and
one written.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from aggregate import CASES, Case
from floor import Floor
from timing import in_turns, machine, ratio

from manifoldagg import Server
from manifoldagg.federated import Payload, ServerLimits
from manifoldagg.federated.rules import AsyncBezier, FedAsync, FedOrtho
from manifoldagg.manifolds import Flat

HERE = Path(__file__).parent
RULES = {"FedAsync": (FedAsync(0.5), 1), "FedOrtho": (FedOrtho(0.5), 1), "AsyncBezier": (AsyncBezier(0.5), 2)}
"""Each with how many points its clients send."""
HEAD = "rule               P  threads  clients  beside  median ms    p99 ms  updates/s"
LARGE_HEAD = "rule               P      floor ms       ours ms  x floor  quartiles"
OUT_HEAD = "tickets out        P  call        median us  of the fewest  quartiles"
BATCH = 50
"""Calls between two looks at the clock."""


@contextmanager
def spinning(count: int) -> Iterator[None]:
    """So many processes that do nothing, as fast as they can."""
    spin = [sys.executable, "-S", "-c", "while True: pass"]
    busy = [subprocess.Popen(spin) for _ in range(count)]
    try:
        time.sleep(0.2 if count else 0)
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def seconds_of(rule: str, size: int, clients: int, limit: float) -> tuple[list[float], float]:
    """The seconds of each `receive`, and how long all of them took together."""
    kind, count = RULES[rule]
    server = Server(Flat(size), kind, torch.zeros(size), weights="uniform")
    gate = threading.Barrier(clients + 1)
    stop = threading.Event()
    seconds: list[list[float]] = [[] for _ in range(clients)]
    errors: list[Exception] = []

    def client(i: int) -> None:
        points = torch.randn(count, size, generator=torch.Generator().manual_seed(i))
        gate.wait()
        while not stop.is_set():
            ticket = server.dispatch(i)
            start = time.perf_counter()
            receipt = server.receive(ticket.id, Payload(points, 1))
            seconds[i].append(time.perf_counter() - start)
            if not receipt.accepted:
                errors.append(RuntimeError(receipt.reason))
                return

    for _ in range(5):
        server.receive(server.dispatch("first").id, Payload(torch.ones(count, size), 1))
    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    gate.wait()
    start = time.perf_counter()
    time.sleep(limit)
    stop.set()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sorted(second for mine in seconds for second in mine), time.perf_counter() - start


def seconds_with(counts: list[int], size: int, repetitions: int = 60) -> dict[str, list[list[float]]]:
    """Seconds of a `dispatch` and of a `receive`, for each number of tickets that are out."""
    servers = [Server(Flat(size), FedAsync(0.5), torch.zeros(size), limits=ServerLimits(timeout=1e6)) for _ in counts]
    payload = Payload(torch.ones(1, size), 1)
    for server, count in zip(servers, counts, strict=True):
        for client in range(count):
            server.dispatch(client)
    taken: dict[str, list[list[float]]] = {"dispatch": [[] for _ in counts], "receive": [[] for _ in counts]}
    for _ in range(repetitions):
        for i, server in enumerate(servers):
            start = time.process_time()
            tickets = [server.dispatch(client).id for client in range(BATCH)]
            between = time.process_time()
            for ticket in tickets:
                server.receive(ticket, payload)
            taken["dispatch"][i].append((between - start) / BATCH)
            taken["receive"][i].append((time.process_time() - between) / BATCH)
    return taken


def out_at_once(counts: list[int], size: int) -> tuple[list[str], list[dict[str, object]]]:
    """The second table: its lines and its rows."""
    lines = [OUT_HEAD]
    rows: list[dict[str, object]] = []
    for call, taken in seconds_with(counts, size).items():
        for count, seconds in zip(counts, taken, strict=True):
            low, middle, high = ratio(seconds, taken[0])
            median = statistics.median(seconds)
            row = {
                "tickets": count,
                "P": size,
                "call": call,
                "median": median,
                "ratio": middle,
                "quartiles": (low, high),
            }
            rows.append(row)
            lines.append(
                f"{count:>11} {size:>8}  {call:<9} {1e6 * median:>11.1f} {middle:>14.2f}  {low:.2f} - {high:.2f}"
            )
    return lines, rows


def with_large(size: int, repetitions: int = 9) -> tuple[list[str], list[dict[str, object]]]:
    """The third table: its lines and its rows."""
    torch.set_num_threads(1)
    floor = Floor()
    vectors = [torch.randn(size, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    lines = [LARGE_HEAD]
    rows: list[dict[str, object]] = []
    for rule, (kind, count) in RULES.items():
        server = Server(Flat(size), kind, vectors[0], weights="uniform")
        payload = Payload(torch.stack(vectors[1 : 1 + count]), 1)
        case = CASES[rule]

        def least(case: Case = case) -> None:
            floor.read_write(vectors[:1], vectors[-1], 1)
            floor.read(vectors[: case.gram], 1)
            floor.read_write(vectors[: case.combine], vectors[-1], 1)

        def ours(server: Server = server, payload: Payload = payload) -> None:
            ticket = server.dispatch("anybody")
            server.receive(ticket, payload).check()

        taken = in_turns({"floor": least, "ours": ours}, repetitions)
        low, middle, high = ratio(taken["ours"], taken["floor"])
        floored, median = (statistics.median(taken[name]) for name in ("floor", "ours"))
        rows.append(
            {"rule": rule, "P": size, "floor": floored, "median": median, "ratio": middle, "quartiles": (low, high)}
        )
        lines.append(
            f"{rule:<12} {size:>9} {1e3 * floored:>11.2f} {1e3 * median:>13.2f} {middle:>8.2f}  {low:.2f} - {high:.2f}"
        )
    return lines, rows


def main() -> None:
    """Print a table, and write it and its numbers into a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", nargs="+", default=["FedOrtho"], choices=list(RULES))
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e5, 1e6])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--beside", type=int, nargs="+", default=[0, os.cpu_count() or 1], help="processes that spin")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each line of the table")
    parser.add_argument("--tickets", type=float, nargs="+", default=[10, 1e3, 1e5], help="that are out at once")
    parser.add_argument("--large", type=float, default=1e7, help="numbers of the model in the third table")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    about = f"receive under load, float32; torch {torch.__version__}, {machine()}"
    lines = [about, HEAD]
    print(*lines, sep="\n", flush=True)
    rows = []
    for rule in options.rules:
        for size in map(int, options.sizes):
            for threads in options.threads:
                torch.set_num_threads(threads)
                for clients in options.clients:
                    for beside in options.beside:
                        with spinning(beside):
                            seconds, whole = seconds_of(rule, size, clients, options.seconds)
                        row = {
                            "rule": rule,
                            "P": size,
                            "threads": threads,
                            "clients": clients,
                            "beside": beside,
                            "median": statistics.median(seconds),
                            "p99": seconds[int(0.99 * (len(seconds) - 1))],
                            "rate": len(seconds) / whole,
                        }
                        rows.append(row)
                        lines.append(
                            f"{rule:<12} {size:>7} {threads:>8} {clients:>8} {beside:>7} {1e3 * row['median']:>10.3f} "
                            f"{1e3 * row['p99']:>9.2f} {row['rate']:>10.0f}"
                        )
                        print(lines[-1], flush=True)
    more, out_rows = out_at_once([int(count) for count in options.tickets], 1000)
    print(*more, sep="\n", flush=True)
    large, large_rows = with_large(int(options.large))
    print(*large, sep="\n", flush=True)
    lines += ["", *more, "", *large]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "server_load.txt").write_text("\n".join(lines) + "\n")
    settings = {"seconds": options.seconds, "torch": torch.__version__, "machine": platform.platform()}
    made = {"settings": settings, "rows": rows, "tickets": out_rows, "large": large_rows}
    (options.out / "server_load.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
