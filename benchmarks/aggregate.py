"""Time of `aggregate` on state dicts, compared with a memory floor and with hand-written loops.

The floor of a rule is the memory traffic that the rule cannot avoid, measured with streams in C++. FedOrtho reads three
models for the inner products, reads three models for the new model, and writes one model: 7 P words. A linear rule such
as FedAsync reads three models and writes one.

The peers compute the same step with the same formulas. All methods run in turns in one process:

- *torch*: plain expressions, tensor by tensor.
- *foreach*: `torch._foreach_*` on lists of tensors.
- *lerp, read*: `torch._foreach_lerp`, and one read of the base, which FedAsync needs for its cosine.
- *numpy*: lists of NumPy arrays, as in the servers of several frameworks.

The peers sum in float32. *ours* returns new tensors, *ours, out=* writes into an existing state dict, *ours, in place*
writes into the current model, and *ours, arrays* uses lists of arrays. The last column is the peak memory of a call, in
models. In the last rows, the models have running statistics with 64 numbers each, which all methods move halfway to the
client's statistics.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from floor import Floor
from timing import TIMES, beside_the_first, extra, machine, tabled, times
from torch import Tensor

from manifoldagg import aggregate
from manifoldagg.federated.rules import ASGD, AsyncBezier, FedAsync, FedGS, FedOrtho

HERE = Path(__file__).parent
RATE = 0.5
WEIGHTS = (0.25, 0.25)
"""The weights of the two control points in the middle of a quadratic Bézier curve."""
TINY = 1e-30
Step = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A rule, with the number of models that it reads for inner products and for the new model."""

    rule: Any
    gram: int
    combine: int
    points: int = 1

    @property
    def words(self) -> int:
        """The number of models that are read or written."""
        return self.gram + self.combine + 1


CASES = {
    "FedAsync": Case(FedAsync(RATE), 0, 3),
    "ASGD": Case(ASGD(RATE), 0, 3),
    "FedOrtho": Case(FedOrtho(RATE), 3, 3),
    "FedGS": Case(FedGS(RATE), 3, 3),
    "AsyncBezier": Case(AsyncBezier(rate=RATE), 4, 4, points=2),
}


def lengths(size: int, count: int) -> list[int]:
    """Return tensor sizes like those of a network: weights that grow by octaves, each followed by a vector."""
    if count == 1:
        return [size]
    half = count // 2
    shares = [2 ** (7 * i / half) for i in range(half)]
    weights = [max(1, round(size * 0.985 * share / sum(shares))) for share in shares]
    vectors = [max(1, round(size * 0.015 / half))] * half
    both = [length for pair in zip(weights, vectors, strict=True) for length in pair]
    both[-2] += size - sum(both)
    return both


# The peers. Each takes the base, the current model and the points as lists of tensors, and returns the new model.


def torch_loop(name: str, base: Sequence[Tensor], now: Sequence[Tensor], *points: Sequence[Tensor]) -> list[Tensor]:
    """Compute the step with plain expressions, tensor by tensor. Inner products are summed over the model."""
    if name == "FedAsync":
        return [c + RATE * (p - c) for c, p in zip(now, points[0], strict=True)]
    if name == "ASGD":
        return [c + RATE * (p - b) for b, c, p in zip(base, now, points[0], strict=True)]
    drift = [c - b for b, c in zip(base, now, strict=True)]
    square = sum((g * g).sum() for g in drift)
    moves = []
    for control in points:
        moves.append([p - b for b, p in zip(base, control, strict=True)])
    new = list(now)
    for v, weight in zip(moves, WEIGHTS if len(points) > 1 else (RATE,), strict=True):
        inner = sum((a * g).sum() for a, g in zip(v, drift, strict=True))
        part = inner / square if inner < 0 or name != "FedGS" else 0.0
        new = [c + weight * (a - part * g) for c, a, g in zip(new, v, drift, strict=True)]
    return new


def foreach(name: str, base: Sequence[Tensor], now: Sequence[Tensor], *points: Sequence[Tensor]) -> Sequence[Tensor]:
    """Compute the step with `torch._foreach_*` on lists of tensors."""
    if name == "FedAsync":
        return torch._foreach_lerp(now, points[0], RATE)
    if name == "ASGD":
        return torch._foreach_add(now, torch._foreach_sub(points[0], base), alpha=RATE)
    drift = torch._foreach_sub(now, base)
    square = torch.stack(torch._foreach_norm(drift)).square().sum()
    new: Sequence[Tensor] = now
    for control, weight in zip(points, WEIGHTS if len(points) > 1 else (RATE,), strict=True):
        v = torch._foreach_sub(control, base)
        inner = torch.stack([product.sum() for product in torch._foreach_mul(v, drift)]).sum()
        part = float(inner / square.clamp(min=TINY)) if inner < 0 or name != "FedGS" else 0.0
        torch._foreach_sub_(v, torch._foreach_mul(drift, part))
        new = torch._foreach_add(new, v, alpha=weight)
    return new


def numpy_loop(name: str, base: Sequence[Any], now: Sequence[Any], *points: Sequence[Any]) -> list[Any]:
    """Compute the step on lists of arrays, with dot products by BLAS."""
    if name == "FedAsync":
        return [c + RATE * (p - c) for c, p in zip(now, points[0], strict=True)]
    if name == "ASGD":
        return [c + RATE * (p - b) for b, c, p in zip(base, now, points[0], strict=True)]
    drift = [c - b for b, c in zip(base, now, strict=True)]
    square = sum(float(np.dot(g, g)) for g in drift)
    new = list(now)
    for control, weight in zip(points, WEIGHTS if len(points) > 1 else (RATE,), strict=True):
        v = [p - b for b, p in zip(base, control, strict=True)]
        inner = sum(float(np.dot(a, g)) for a, g in zip(v, drift, strict=True))
        part = np.float32(inner / square if inner < 0 or name != "FedGS" else 0.0)
        new = [c + np.float32(weight) * (a - part * g) for c, a, g in zip(new, v, drift, strict=True)]
    return new


def ways(name: str, size: int, count: int, buffers: int, threads: int, floor: Floor) -> dict[str, Step]:
    """Return all methods by name, with the floor first."""
    case = CASES[name]
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(size, generator=generator)
    others = [base.add(torch.randn(size, generator=generator), alpha=0.01) for _ in range(1 + case.points)]
    vectors = [base, *others]
    out = torch.empty(size)
    cuts = lengths(size, count)
    # Each tensor has separate memory, as in a model.
    split = [[piece.clone() for piece in vector.split(cuts)] for vector in vectors]
    then, now, *points = split
    models = [{f"layer{i}.weight": piece for i, piece in enumerate(model)} for model in split]
    arrays = [[piece.numpy() for piece in model] for model in split]
    carried = [{f"norm{i}.running_mean": torch.randn(64) for i in range(buffers)} for _ in models]
    models = [model | mine for model, mine in zip(models, carried, strict=True)]
    mine, theirs = ([*carried[i].values()] for i in (1, -1))
    pairs = [(a.numpy(), b.numpy()) for a, b in zip(mine, theirs, strict=True)]
    target = {key: torch.empty_like(piece) for key, piece in models[1].items()}

    def stream() -> None:
        if case.gram:
            floor.read(vectors[: case.gram], threads)
        floor.read_write(vectors[: case.combine], out, threads)

    def ours(held: Sequence[Any], **options: Any) -> Any:
        before, current, *brought = held
        return aggregate(case.rule, None, current, before, brought if case.points > 1 else brought[0], **options)

    found: dict[str, Step] = {"floor": stream, "ours": lambda: ours(models)}
    found["ours, out="] = lambda: ours(models, out=target)
    if name == "FedAsync":
        moving = {key: piece.clone() for key, piece in models[1].items()}
        found["ours, in place"] = lambda: ours([models[0], moving, *models[2:]], out=moving)
        found["lerp, read"] = lambda: (foreach(name, then, now, *points), floor.read(vectors[:1], threads))
    if not buffers:
        found["ours, arrays"] = lambda: ours(arrays)
    return found | {
        "torch": lambda: (torch_loop(name, then, now, *points), list(map(torch.lerp, mine, theirs, repeat(RATE)))),
        "foreach": lambda: (foreach(name, then, now, *points), mine and torch._foreach_lerp(mine, theirs, RATE)),
        "numpy": lambda: (numpy_loop(name, *arrays), [a + RATE * (b - a) for a, b in pairs]),
    }


def measure(
    name: str, size: int, count: int, buffers: int, threads: int, floor: Floor, repetitions: int
) -> Iterator[dict[str, Any]]:
    """Return a row for each method."""
    torch.set_num_threads(threads)
    about = {"rule": name, "P": size, "tensors": count, "buffers": buffers, "threads": threads}
    return beside_the_first(ways(name, size, count, buffers, threads, floor), repetitions, about, 4 * size)


HEAD = f"{'rule':<12}{'P':>6}{'tensors':>8}{'buffers':>8}{'threads':>8}  {'way':<15}{TIMES}"


def shown(row: dict[str, Any]) -> str:
    """Format a row of the table."""
    about = f"{row['rule']:<12}{row['P']:>6.0e}{row['tensors']:>8}{row['buffers']:>8}{row['threads']:>8}"
    return f"{about}  {row['way']:<15}{times(row)}"


def main() -> None:
    """Print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", nargs="+", default=[*CASES], choices=[*CASES])
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e4, 1e6, 1e7])
    parser.add_argument("--tensors", type=int, nargs="+", default=[1, 42, 400])
    parser.add_argument("--buffers", type=int, nargs="*", default=[400], help="numbers of buffers, for the first size")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--name", default="aggregate")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    floor = Floor()
    extra(lambda: None)  # the first use of the profiler allocates its own memory
    head = [f"aggregate on state dicts, float32; torch {torch.__version__}, {machine()}", HEAD]
    sizes = [int(size) for size in options.sizes]
    cells = [*product(options.rules, sizes, options.tensors, [0], options.threads)]
    cells += product(options.rules, sizes[:1], options.tensors[:1], options.buffers, options.threads)
    rows = (row for cell in cells for row in measure(*cell, floor, options.repetitions))
    tabled(options.out / options.name, head, rows, shown, options.repetitions)


if __name__ == "__main__":
    main()
