"""Time of `gram` and `combine` for k rows, compared with the limits of the machine.

The limit of `combine` is a stream that reads k vectors with P entries and writes one vector. The limit of `gram` is the
slower of two loops: a stream that reads k vectors, and k(k + 1)/2 float64 multiplications and additions per entry in
registers. All calls run in turns. Times are processor times over all threads. A share is the time of the limit divided
by the time of the kernel.
"""

import argparse
import statistics
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from floor import STREAMS, Floor
from timing import interleaved, machine, ratio, tabled
from torch import Tensor

from manifoldagg.kernels import combine, gram, set_backend

HERE = Path(__file__).parent
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
MULTIPLICATIONS = 24_000_000


def measure(rows: list[Tensor], minus: Tensor | None, out: Tensor, threads: int, floor: Floor, repetitions: int) -> Any:
    """Return one row for `gram` and one row for `combine`."""
    k = len(rows)
    size = out.numel()
    # The sums of a stream are not used, so two 16-bit numbers are read as one 32-bit number.
    read = [row.view(torch.float32) for row in (rows if minus is None else [*rows, minus])]
    groups = [read[i : i + STREAMS] for i in range(0, len(read), STREAMS)]
    target = out.view(torch.float32)
    coefficients = [1.0 / (j + 2) for j in range(k)]

    def stream() -> None:
        for group in groups:
            floor.read(group, threads)

    def stream_and_write() -> None:
        for group in groups[1:]:
            floor.read(group, threads)
        floor.read_write(groups[0], target, threads)

    seconds = interleaved(
        {
            "read": stream,
            "write": stream_and_write,
            "multiply": lambda: floor.multiply_add(MULTIPLICATIONS, threads),
            "gram": lambda: gram(rows, minus=minus),
            "combine": lambda: combine(None, rows, coefficients, minus=minus, out=out),
        },
        repetitions=repetitions,
    )
    share = size * k * (k + 1) / 2 / (MULTIPLICATIONS * threads)
    products = [share * taken for taken in seconds["multiply"]]
    slower = [max(both) for both in zip(seconds["read"], products, strict=True)]
    about = {"dtype": str(out.dtype).removeprefix("torch."), "P": size, "k": k, "minus": minus is not None}
    for kernel, limit, vectors in (("gram", slower, len(read)), ("combine", seconds["write"], len(read) + 1)):
        low, middle, high = ratio(limit, seconds[kernel])
        binding = "memory" if kernel == "combine" or sum(products) < sum(seconds["read"]) else "multiply"
        yield {
            **about,
            "threads": threads,
            "kernel": kernel,
            "GB/s": threads * vectors * size * out.itemsize / statistics.median(seconds[kernel]) / 1e9,
            "limit": threads * vectors * size * out.itemsize / statistics.median(limit) / 1e9,
            "by": binding,
            "share": middle,
            "low": low,
            "high": high,
        }


def shown(row: dict[str, Any]) -> str:
    """Format a row of the table."""
    spread = f"{row['low']:.2f} to {row['high']:.2f}"
    return (
        f"{row['dtype']:<9}{row['P']:>6.0e}{row['threads']:>8}{row['k']:>4}  {row['kernel']:<8}{row['GB/s']:>7.1f} "
        f"{row['limit']:>7.1f}  {row['by']:<9}{row['share']:>6.2f} {spread:>14}"
    )


def main() -> None:
    """Print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e7])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=list(DTYPES))
    parser.add_argument(
        "--others", type=int, nargs="+", default=[2, 4, 8], help="numbers of rows, for all dtypes after the first"
    )
    parser.add_argument("--minus", action="store_true", help="subtract one vector from all rows")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", "--output", type=Path, default=HERE / "results")
    options = parser.parse_args()
    head = [
        f"Kernels, {'less one vector' if options.minus else 'plain rows'}; torch {torch.__version__}, {machine()}",
        f"{'dtype':<9}{'P':>6}{'threads':>8}{'k':>4}  {'kernel':<8}{'GB/s':>7} {'limit':>7}  {'by':<9}{'share':>6} "
        f"{'quartiles':>14}",
    ]
    before = set_backend("auto")
    tabled(options.out / "kernels", head, found(options), shown, options.repetitions)
    set_backend(before)


def found(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of the table."""
    floor = Floor()
    for number, name in enumerate(options.dtypes):
        counts = options.others if number else options.rows
        for size in map(int, options.sizes):
            noise = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(DTYPES[name])
            vectors = [noise.roll(i) for i in range(max(counts) + 1)]
            out = torch.empty_like(noise)
            for threads, k in product(options.threads, counts):
                torch.set_num_threads(threads)
                minus = vectors[-1] if options.minus else None
                yield from measure(vectors[:k], minus, out, threads, floor, options.repetitions)


if __name__ == "__main__":
    main()
