"""Time of a step of `optim.Outer`, compared with PyTorch's optimizers and with hand-written formulas.

The tensors have sizes like those of a network. The benchmark measures wall-clock times in turns, and prints ratios with
their quartiles.

- *floor*: the memory traffic that a step cannot avoid, as streams in C++. The gradients are read before anything is
  written, because a non-finite gradient must not cause a partial step. Then gradients, parameters and momentum are
  read, and parameters and momentum are written.
- *SGD*: `torch.optim.SGD(fused=True)`, with Nesterov momentum if the rule has it. This optimizer does not check the
  gradients.
- *torch*: the formulas of HeLoCo, tensor by tensor.
- *workers*: k calls of `step()` with rules that wait for k updates. The references are one floor per call, and the mean
  of k gradients with one step of SGD.

The last rows have fewer parameters, down to a few entries per tensor, where the overhead of Python determines the time.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from aggregate import lengths
from floor import Floor
from timing import in_turns, ratio
from torch import Tensor, nn

from manifoldagg.federated.rules import ASGD, DelayedNesterov, FedAvg, HeLoCo, Momentum, RadialDirectional
from manifoldagg.optim import Outer

HERE = Path(__file__).parent
RULES = {
    "ASGD": (ASGD(0.7), 2, 1),
    "Momentum": (Momentum(ASGD(0.7)), 2, 2),
    "Nesterov": (Momentum(ASGD(0.7), nesterov=True), 2, 2),
    "HeLoCo": (HeLoCo(0.7), 3, 2),
    "DelayedNesterov": (DelayedNesterov(4), 2, 2),
}
"""For each rule: the number of vectors of its inner products plus one, and the number of vectors that a step writes.

`DelayedNesterov` reads one stored vector in half of its steps, two in a quarter, and none in the first step."""
SMALL = 42 * 8
"""Numbers of entries for which the overhead of Python determines the time."""


def parameters(size: int, count: int) -> list[nn.Parameter]:
    """Return parameters with gradients."""
    made = [nn.Parameter(torch.randn(n)) for n in lengths(size, count)]
    for p in made:
        p.grad = 1e-3 * torch.randn(p.shape)
    return made


class Written:
    """HeLoCo as written in the paper: Al Asif et al. 2026, Algorithms 1 and 2."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self.momentum = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self) -> list[Tensor]:
        """Take a step, and compute the start model of the workers."""
        for p, m in zip(self.params, self.momentum, strict=True):
            delta: Any = p.grad
            size, length = delta.norm(), m.norm()
            if size > 0 and length > 0:
                u, v = delta / size, m / length
                c = (u * v).sum()
                confidence = size / (size + 3.0 * length)
                if c < 0:
                    delta = delta - torch.clamp(0.5 * -c * confidence, max=0.5) * c * size * v
                elif c < 0.2:
                    part = torch.clamp((1 - c) * confidence, max=1.0)
                    mixed = (1 - part) * u + part * v
                    delta = size * mixed / mixed.norm()
            m.mul_(0.9).add_(delta, alpha=0.1)
            p.sub_(0.7 * (delta + 0.9 * m))
        return [p - 0.63 * m for p, m in zip(self.params, self.momentum, strict=True)]


def steps(size: int, count: int, repetitions: int) -> dict[str, Any]:
    """Measure each rule, its floor and PyTorch's optimizers."""
    threads = torch.get_num_threads()
    floor = Floor()
    vectors = [torch.randn(size) for _ in range(4)]
    found = {}
    for name, (rule, rows, written) in RULES.items():
        ours = Outer(parameters(size, count), rule)
        momentum = 0.0 if name == "ASGD" else 0.9
        peer = torch.optim.SGD(
            parameters(size, count), 0.7, momentum=momentum, nesterov=name != "ASGD" and name != "Momentum", fused=True
        )

        def least(rows: int = rows, written: int = written) -> None:
            # One pass checks the gradient, and reads the momentum if the rule needs inner products. One pass steps.
            floor.read(vectors[: rows - 1], threads)
            # The step is in place, because writes to other memory first fetch the lines into the cache.
            floor.read_write([vectors[0], vectors[2]], vectors[2], threads)
            if written > 1:
                floor.read_write([vectors[3]], vectors[3], threads)

        calls = {"ours": ours.step, "floor": least, "SGD": peer.step}
        if name == "HeLoCo":
            calls["torch"] = Written(parameters(size, count)).step
        taken = in_turns(calls, repetitions)
        found[name] = {
            "ms": {key: 1e3 * statistics.median(times) for key, times in taken.items()},
            "over": {key: ratio(taken["ours"], times) for key, times in taken.items() if key != "ours"},
        }
    return found


def workers(size: int, count: int, repetitions: int, most: int) -> dict[str, Any]:
    """Measure k updates that lead to one step, with their references."""
    found = {}
    threads = torch.get_num_threads()
    floor = Floor()
    vectors = [torch.randn(size) for _ in range(4)]
    for k in (2**i for i in range(1, 6) if 2**i <= most):
        row = {}
        for name, rule in (("FedAvg", FedAvg(k, 0.7)), ("RadialDirectional", RadialDirectional(k, 0.7))):
            mine, theirs = parameters(size, count), parameters(size, count)
            ours, peer = Outer(mine, rule), torch.optim.SGD(theirs, 0.7, fused=True)
            grads = [[1e-3 * torch.randn(p.shape) for p in mine] for _ in range(min(k, 4))]

            def each(ours: Outer = ours, mine: Any = mine, k: int = k, grads: Any = grads) -> None:
                for i in range(k):
                    for p, g in zip(mine, grads[i % len(grads)], strict=True):
                        p.grad = g
                    ours.step(worker=i)

            def mean(peer: Any = peer, theirs: Any = theirs, k: int = k, grads: Any = grads) -> None:
                total = [g.clone() for g in grads[0]]
                for i in range(1, k):
                    torch._foreach_add_(total, grads[i % len(grads)])
                torch._foreach_div_(total, k)
                for p, g in zip(theirs, total, strict=True):
                    p.grad = g
                peer.step()

            def least(k: int = k, measured: int = 1 + (name == "RadialDirectional")) -> None:
                # Each gradient is checked and added to the sum. The last gradient and the sum move the model.
                for i in range(k):
                    floor.read(vectors[: measured if i == k - 1 else 1], threads)
                    row = vectors[2 if i == k - 1 else 3]
                    read = [vectors[0], vectors[3], row] if i == k - 1 else [vectors[0], row] if i else [vectors[0]]
                    floor.read_write(read, row, threads)

            taken = in_turns({"ours": each, "floor": least, "mean": mean}, repetitions)
            row[name] = {
                "ms": {key: 1e3 * statistics.median(times) for key, times in taken.items()},
                "over": {key: ratio(taken["ours"], times) for key, times in taken.items() if key != "ours"},
            }
        found[str(k)] = row
    return found


def lines(rows: dict[str, Any]) -> list[str]:
    """Return the lines of the tables."""
    table = []
    for size, each in rows["steps"].items():
        head = f"{size} parameters"
        table += [
            f"{head:<18}{'ours':>10}{'floor':>10}{'SGD':>10}{'torch':>10}   ours over floor, SGD, torch (quartiles)"
        ]
        for name, row in each.items():
            times = "".join(
                f"{row['ms'][key]:>7.2f} ms" if key in row["ms"] else " " * 10
                for key in ("ours", "floor", "SGD", "torch")
            )
            table.append(f"{name:<18}{times}   {_over(row)}")
        table.append("")
    table.append(f"{'workers':<10}{'rule':<20}{'ours':>12}{'floor':>12}{'mean, SGD':>12}   ours over both (quartiles)")
    for k, row in rows["workers"].items():
        for name, one in row.items():
            times = "".join(f"{one['ms'][key]:>9.2f} ms" for key in ("ours", "floor", "mean"))
            table.append(f"{k:<10}{name:<20}{times}   {_over(one)}")
    return table


def _over(row: dict[str, Any]) -> str:
    return "; ".join(f"{key} {middle:.2f} ({low:.2f}-{high:.2f})" for key, (low, middle, high) in row["over"].items())


def main() -> None:
    """Run the benchmark, print the tables and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=10**7)
    parser.add_argument("--tensors", type=int, default=42)
    parser.add_argument("--repetitions", type=int, default=25)
    parser.add_argument("--workers", type=int, default=32, help="the maximum number of workers")
    parser.add_argument("--no-write", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(0)
    rows = {"settings": {"size": given.size, "tensors": given.tensors, "threads": torch.get_num_threads()}}
    sizes = (given.size, given.size // 10, SMALL)
    rows["steps"] = {str(size): steps(size, given.tensors, given.repetitions) for size in sizes}
    rows["workers"] = workers(given.size, given.tensors, given.repetitions, given.workers)
    head = f"{given.tensors} tensors, {torch.get_num_threads()} threads"
    text = "\n".join([head, "", *lines(rows)])
    print(text)
    if not given.no_write:
        path = HERE / "results" / "outer.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rows, indent=1) + "\n")
        path.with_suffix(".txt").write_text(text + "\n")


if __name__ == "__main__":
    main()
