"""Cost of one step of a small model: Python calls, file switches and time.

A call counts if its code is in the package. A file switch is a call into another file than the previous call. The steps
use FedOrtho with the compiled backend and one thread:

- `aggregate`: state dicts with 2 tensors and with 8 tensors.
- `receive`: a server with 10 parameters, and a server on `Sphere(50)`.

With `--trees A B`, the script measures several checkouts in turns, each in separate processes, so that a disturbance of
the machine affects all of them. The script prints the median and the quartiles over the processes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SHAPES = [(8, 3, 3, 3), (8,), (16, 8, 3, 3), (16,), (64, 16), (64,), (10, 64), (10,)]
COUNTED_STEPS = 3
TIMED_STEPS = 400


def counted(work: Callable[[], Any]) -> tuple[int, int]:
    """Return the number of Python calls within the package, and the number of file switches."""
    files: list[str] = []

    def watch(frame: Any, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and "/manifoldagg/" in name and not frame.f_code.co_name.startswith("<"):
            files.append(name)

    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(None)
    return len(files), sum(a != b for a, b in zip(["", *files], files, strict=False))


def steps() -> dict[str, Callable[[int], Iterator[Callable[[], Any]]]]:
    """Return a function for each row that prepares a number of calls, so that only the steps are measured."""
    import torch

    from manifoldagg import Server, aggregate
    from manifoldagg.federated import Payload
    from manifoldagg.federated.rules import FedOrtho
    from manifoldagg.manifolds import Flat, Sphere

    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    rule = FedOrtho(0.01)

    def models(shapes: list[tuple[int, ...]]) -> list[dict[str, torch.Tensor]]:
        base = {f"p{i}": torch.randn(shape, generator=draw) for i, shape in enumerate(shapes)}
        return [base, *({n: t + 0.1 * torch.randn(t.shape, generator=draw) for n, t in base.items()} for _ in "cu")]

    def aggregated(shapes: list[tuple[int, ...]]) -> Callable[[int], Iterator[Callable[[], Any]]]:
        base, current, update = models(shapes)
        return lambda count: (lambda: aggregate(rule, None, current, base, update) for _ in range(count))

    def received(space: Any, start: Any) -> Callable[[int], Iterator[Callable[[], Any]]]:
        server = Server(space, rule, start)

        def calls(count: int) -> Iterator[Callable[[], Any]]:
            tickets = [server.dispatch("a") for _ in range(count)]
            for ticket in tickets:
                at = ticket.message.start[None]
                if space.flat:
                    points = at + 0.01 * torch.randn(at.shape, generator=draw)
                else:
                    points = space.exp(at, 0.01 * space.random_tangent(at, generator=draw))
                payload = Payload(points, 5)
                yield lambda ticket=ticket, payload=payload: server.receive(ticket, payload).check()

        return calls

    sphere = Sphere(50)
    return {
        "aggregate, 2 tensors": aggregated([(2, 4), (2,)]),
        "aggregate, 8 tensors": aggregated(SHAPES),
        "receive, 10 parameters": received(Flat(10), torch.zeros(10)),
        "receive, Sphere(50)": received(sphere, sphere.random_point(generator=draw, dtype=torch.float64)),
    }


def measure() -> dict[str, list[float]]:
    """Return calls, file switches and milliseconds of each row."""
    found = {}
    warnings.simplefilter("ignore")
    for name, calls in steps().items():
        for call in calls(COUNTED_STEPS):
            call()
        *_, last = [counted(call) for call in calls(COUNTED_STEPS)]
        taken = []
        for call in calls(TIMED_STEPS):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
        found[name] = [*last, 1e3 * statistics.median(taken)]
    return found


def main() -> None:
    """Print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trees", nargs="+", default=[str(HERE.parent)], help="checkouts to measure in turns")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", type=Path, help="file for the measurements")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure()))
        return
    runs: dict[str, list[dict[str, list[float]]]] = {tree: [] for tree in options.trees}
    for _ in range(options.repetitions):
        for tree in options.trees:
            environment = os.environ | {"PYTHONPATH": str(Path(tree).resolve()), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, "--measure"]
            done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, cwd=tree)
            runs[tree].append(json.loads(done.stdout))
    print(f"{'step':24} {'tree':>12} {'calls':>6} {'file switches':>16} {'ms':>7}  quartiles")
    for name in runs[options.trees[0]][0]:
        for tree in options.trees:
            calls, changes, _ = runs[tree][-1][name]
            low, middle, high = statistics.quantiles([run[name][2] for run in runs[tree]], n=4)
            label = Path(tree).resolve().name[:12]
            print(f"{name:24} {label:>12} {calls:6} {changes:16} {middle:7.3f}  {low:.3f} to {high:.3f}")
    if options.json:
        options.json.write_text(json.dumps({Path(tree).resolve().name: found for tree, found in runs.items()}))


if __name__ == "__main__":
    main()
