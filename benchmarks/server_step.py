"""Time of a server step on a flat space, compared with a memory floor and with other implementations.

The step is that of a curve with two control points: `gram` of v1, v2 and g, the coefficients of a correction, and
`combine`. It must read four vectors of P float32 numbers twice and write one vector. The floor is this memory traffic,
as two streams in C++. All methods run in turns in one process.

The other implementations use the same formulas, with sums in float32 and therefore fewer correct digits:

- *foreach*: named tensors, with `torch._foreach_*` for differences and sums, and separate dot products.
- *torch*: named tensors, with plain expressions.
- *numpy*: a list of arrays, as in the servers of several frameworks.

The option `--layout tensors` splits P into 42 tensors like those of a ResNet. Our backends then read and write tuples
of 42 tensors, each with a separate Gram matrix.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from floor import Floor
from timing import extra, in_turns, machine, ratio, tabled
from torch import Tensor

from manifoldagg.corrections import Gram, OrthoDC
from manifoldagg.kernels import Row, available_backends, combine, gram, set_backend
from manifoldagg.kernels.backends.selection import BACKENDS

HERE = Path(__file__).parent
WEIGHTS = (0.42, 0.09)
Step = Callable[[], Any]


def pieces(size: int) -> list[int]:
    """Return 42 tensor sizes in the proportions of a ResNet: 21 weights that grow, each followed by a vector."""
    shares = [2 ** (i / 3) for i in range(21)]
    weights = [max(1, round(size * 0.985 * share / sum(shares))) for share in shares]
    vectors = [max(1, round(size * 0.015 / 21))] * 21
    lengths = [length for both in zip(weights, vectors, strict=True) for length in both]
    lengths[-2] += size - sum(lengths)
    return lengths


def ours(vectors: Sequence[Row], lengths: list[int] | None, out: Row) -> Step:
    """Compute the step with `gram`, the coefficients of OrthoDC in Python, and `combine`."""
    base, *points, current = vectors
    rows = (*points, current)
    correction = OrthoDC(1.0)

    def line(inner: list[list[float]]) -> list[float]:
        lines, _ = correction.coefficients(Gram.of(inner))
        return [sum(w * row[j] for w, row in zip(WEIGHTS, lines, strict=True)) for j in range(3)]

    def step() -> None:
        grams = gram(rows, minus=[base] * 3, segments=lengths).tolist()
        combine(current, rows, [line(inner) for inner in grams], minus=[base] * 3, segments=lengths, out=out)

    return step


def plain(vectors: list[list[Tensor]]) -> Step:
    """Compute the step with plain expressions on named tensors."""
    base, first, second, current = vectors

    def step() -> list[Tensor]:
        new = []
        for b, p, q, c in zip(base, first, second, current, strict=True):
            v, w, g = p - b, q - b, c - b
            square = (g * g).sum().clamp(min=1e-30)
            v, w = v - ((v * g).sum() / square) * g, w - ((w * g).sum() / square) * g
            new.append(c + WEIGHTS[0] * v + WEIGHTS[1] * w)
        return new

    return step


def foreach(vectors: list[list[Tensor]]) -> Step:
    """Compute the step with `torch._foreach_*` on lists of tensors."""
    base, first, second, current = vectors

    def step() -> list[Tensor]:
        g = torch._foreach_sub(current, base)
        square = torch._foreach_norm(g)
        new = list(current)
        for points, weight in ((first, WEIGHTS[0]), (second, WEIGHTS[1])):
            v = torch._foreach_sub(points, base)
            inner = [torch.dot(a, b) / (n * n).clamp(min=1e-30) for a, b, n in zip(v, g, square, strict=True)]
            torch._foreach_sub_(v, torch._foreach_mul(g, inner))
            new = list(torch._foreach_add(new, v, alpha=weight))
        return new

    return step


def numpy(vectors: list[list[np.ndarray]]) -> Step:
    """Compute the step on lists of arrays."""
    base, first, second, current = vectors

    def step() -> list[np.ndarray]:
        new = []
        for b, p, q, c in zip(base, first, second, current, strict=True):
            v, w, g = p - b, q - b, c - b
            square = max(float(np.sum(g * g)), 1e-30)
            v, w = v - (np.sum(v * g) / square) * g, w - (np.sum(w * g) / square) * g
            new.append(c + WEIGHTS[0] * v + WEIGHTS[1] * w)
        return new

    return step


def ways(size: int, layout: str, threads: int, floor: Floor) -> dict[str, Step]:
    """Return all methods by name, with the floor first."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(size, generator=generator)
    vectors = [base, *(base.add(torch.randn(size, generator=generator), alpha=0.01) for _ in range(3))]
    out = torch.empty(size)
    lengths = None if layout == "flat" else pieces(size)

    def stream() -> None:
        floor.read(vectors, threads)
        floor.read_write(vectors, out, threads)

    found: dict[str, Step] = {"floor": stream}
    if lengths is None:
        step = ours(vectors, lengths, out)
    else:
        rows = [tuple(piece.clone() for piece in vector.split(lengths)) for vector in (*vectors, out)]
        step = ours(rows[:-1], lengths, rows[-1])
    found |= dict.fromkeys(available_backends(), step)
    split = [list(vector.split(lengths or [size])) for vector in vectors]
    found |= {
        "foreach": foreach(split),
        "torch": plain(split),
        "numpy": numpy([[piece.numpy() for piece in whole] for whole in split]),
    }
    return found


def most_held(name: str, call: Step) -> int:
    """Return the peak memory of one call of a method, in bytes."""
    work_by(name)
    return extra(call)


def work_by(name: str) -> None:
    """Select the backend with the name of the method, if there is one."""
    if name in BACKENDS:
        set_backend(name)


def measure(size: int, layout: str, threads: int, floor: Floor, repetitions: int) -> list[dict[str, Any]]:
    """Return a row for each method."""
    torch.set_num_threads(threads)
    calls = ways(size, layout, threads, floor)
    taken = in_turns(calls, repetitions, prepare=work_by)
    rows = []
    for name, seconds in taken.items():
        low, middle, high = ratio(seconds, taken["floor"])
        median = statistics.median(seconds)
        rows.append(
            {
                "P": size,
                "layout": layout,
                "threads": threads,
                "way": name,
                "ms": 1e3 * median,
                "GB/s": 36 * size / median / 1e9,
                "ratio": middle,
                "low": low,
                "high": high,
                "extra": 0 if name == "floor" else most_held(name, calls[name]),
            }
        )
    return rows


def shown(row: dict[str, Any]) -> str:
    """Format a row of the table."""
    spread = f"{row['low']:.2f} to {row['high']:.2f}"
    return (
        f"{row['P']:>6.0e} {row['layout']:<8}{row['threads']:>8}  {row['way']:<10} {row['ms']:>10.4f} "
        f"{row['GB/s']:>7.2f} {row['ratio']:>8.2f} {spread:>15} {row['extra'] / 2**20:>10.2f}"
    )


def main() -> None:
    """Print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e4, 1e6, 1e7, 1e8])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layouts", nargs="+", default=["flat", "tensors"], choices=["flat", "tensors"])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    floor = Floor()
    extra(lambda: None)  # the first use of the profiler allocates its own memory
    head = [
        f"One server step, float32, two control points; torch {torch.__version__}, {machine()}",
        f"{'P':>6} {'layout':<8}{'threads':>8}  {'way':<10} {'ms':>10} {'GB/s':>7} {'x floor':>8} "
        f"{'quartiles':>15} {'extra MiB':>10}",
    ]
    before = set_backend("auto")
    cells = product(map(int, options.sizes), options.layouts, options.threads)
    rows = (row for cell in cells for row in measure(*cell, floor, options.repetitions))
    tabled(options.out / "server_step", head, rows, shown, options.repetitions)
    set_backend(before)


if __name__ == "__main__":
    main()
