"""Time of `receive` on a busy machine, with many tickets in flight, and with a large model.

The benchmark has three tables:

- Load: clients in separate threads dispatch and return updates continuously. In half of the rows, one additional
  process per core runs a busy loop. The table shows the wall-clock time of `receive`, which includes the wait for
  earlier updates. If a server passes a small model to a thread pool, it waits for threads that have no core. This wait
  is visible in the median and the 99th percentile.
- Tickets: many tickets are in flight, each of a different client. The table shows the processor time of `dispatch` and
  `receive`. Batches run in turns with batches of the server with the fewest tickets.
- Large model: one client with a large model, on one thread. The floor is the memory traffic of the rule's step, and one
  read and one write of a model for the client's copy.
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
"""The rules, with the number of points that their clients return."""
HEAD = "rule               P  threads  clients    busy  median ms    p99 ms  updates/s"
LARGE_HEAD = "rule               P      floor ms       ours ms  x floor  quartiles"
OUT_HEAD = "tickets out        P  call        median us  ratio to base  quartiles"
BATCH = 50
"""The number of calls per time measurement."""


@contextmanager
def spinning(count: int) -> Iterator[None]:
    """Start processes that run a busy loop."""
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
    """Return the time of each `receive`, and the total time, in seconds."""
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
    """Return the times of `dispatch` and `receive` for each number of tickets in flight, in seconds."""
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
    """Return the lines and the rows of the table of tickets."""
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
    """Return the lines and the rows of the table of large models."""
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
    """Print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", nargs="+", default=["FedOrtho"], choices=list(RULES))
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e5, 1e6])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16])
    parser.add_argument(
        "--beside",
        type=int,
        nargs="+",
        default=[0, os.cpu_count() or 1],
        help="numbers of processes that run a busy loop",
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="the duration of each row")
    parser.add_argument("--tickets", type=float, nargs="+", default=[10, 1e3, 1e5], help="numbers of tickets in flight")
    parser.add_argument("--large", type=float, default=1e7, help="the number of parameters in the third table")
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
