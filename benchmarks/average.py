"""Time of `average` for k models, compared with a memory floor and with other weighted means of state dicts.

    python benchmarks/average.py [--sizes 1e4 1e6 1e7] [--models 2 10 30] [--repetitions 9]

The floor reads k models and writes one, as streams in C++. All methods run in turns in one process:

- *ours* returns a new state dict, and *ours, out=* writes into an existing state dict.
- *gathered*: the same mean by `karcher`, after each model has been copied into one vector.
- *torch*: a sum of products, tensor by tensor.
- *foreach*: `torch._foreach_*` on lists of tensors, with one accumulator.
- *flower*: `flwr.server.strategy.aggregate.aggregate` on lists of arrays.

The last three methods sum in float32. The last column is the peak memory of a call, in models.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from aggregate import lengths
from floor import Floor
from flwr.server.strategy.aggregate import aggregate as flower
from timing import TIMES, beside_the_first, extra, machine, tabled, times

from manifoldagg import ParameterSpace, average
from manifoldagg.averaging import karcher

HERE = Path(__file__).parent
MOST = 3 * 10**8
"""The largest total number of entries. Larger cells are skipped, so that the benchmark fits a small machine."""
HEAD = f"{'P':>6}{'tensors':>8}{'models':>7}{'threads':>8}  {'way':<10}{TIMES}"


def ways(size: int, count: int, k: int, threads: int, floor: Floor) -> dict[str, Callable[[], Any]]:
    """Return all methods by name, with the floor first."""
    generator = torch.Generator().manual_seed(0)
    vectors = [torch.randn(size, generator=generator) for _ in range(k)]
    into = torch.empty(size)
    cuts = lengths(size, count)
    # Each tensor has separate memory, as in a model.
    models = [{f"layer{i}.weight": piece.clone() for i, piece in enumerate(v.split(cuts))} for v in vectors]
    samples = [10 + i for i in range(k)]
    shares = [n / sum(samples) for n in samples]
    split = [[*model.values()] for model in models]
    arrays = [([piece.numpy() for piece in model], n) for model, n in zip(split, samples, strict=True)]
    target = {name: torch.empty_like(piece) for name, piece in models[0].items()}

    def gathered() -> dict[str, torch.Tensor]:
        space = ParameterSpace.of_state_dict(models[0])
        return space.state_dict(karcher(space, [space.point(model) for model in models], samples).point)

    def in_lists() -> Any:
        total = torch._foreach_mul(split[0], shares[0])
        for model, share in zip(split[1:], shares[1:], strict=True):
            torch._foreach_add_(total, model, alpha=share)
        return total

    def stream() -> None:
        floor.read_write(vectors, into, threads)

    return {
        "floor": stream,
        "ours": lambda: average(models, samples),
        "ours, out=": lambda: average(models, samples, out=target),
        "gathered": gathered,
        "torch": lambda: {
            name: sum(share * model[name] for share, model in zip(shares, models, strict=True)) for name in models[0]
        },
        "foreach": in_lists,
        "flower": lambda: flower(arrays),
    }


def measure(size: int, count: int, k: int, threads: int, repetitions: int) -> list[dict[str, Any]]:
    """Measure all methods in a new process, because a memory profile slows its process down by up to 1.6 times."""
    torch.set_num_threads(threads)
    about = {"P": size, "tensors": count, "models": k, "threads": threads}
    rows = beside_the_first(ways(size, count, k, threads, Floor()), repetitions, about, 4 * size)
    first = next(rows)  # Now the times of all methods are known.
    extra(lambda: None)  # The first profile of a process counts memory of the profiler itself.
    return [first, *rows]


def measured(cells: Iterable[tuple[int, ...]], repetitions: int) -> Iterator[dict[str, Any]]:
    """Measure each cell of the table in a separate process."""
    for cell in cells:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            yield from pool.submit(measure, *cell, repetitions).result()


def shown(row: dict[str, Any]) -> str:
    """Format a row of the table."""
    about = f"{row['P']:>6.0e}{row['tensors']:>8}{row['models']:>7}{row['threads']:>8}"
    return f"{about}  {row['way']:<10}{times(row)}"


def main() -> None:
    """Print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e4, 1e6, 1e7])
    parser.add_argument("--tensors", type=int, nargs="+", default=[42, 400])
    parser.add_argument("--models", type=int, nargs="+", default=[2, 10, 30])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--name", default="average")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    head = [f"the mean of k state dicts, float32; torch {torch.__version__}, {machine()}", HEAD]
    cells = product(map(int, options.sizes), options.tensors, options.models, options.threads)
    rows = measured((cell for cell in cells if cell[0] * cell[2] <= MOST), options.repetitions)
    tabled(options.out / options.name, head, rows, shown, options.repetitions)


if __name__ == "__main__":
    main()
