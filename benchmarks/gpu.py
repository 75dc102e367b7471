"""Time of the kernels and of a server step on a GPU.

*Kernels.* `gram` reads k rows, and `combine` reads k rows and writes one. Their limit is a copy between two vectors on
the GPU that moves as many bytes. A share is the time of the limit divided by the time of the kernel. `PyTorch` computes
the same numbers as a matrix product of stacked rows. It adds in the dtype of the rows, and the kernels in float64.
Wall-clock times include the launch and the wait for the result.

*Steps.* `aggregate` for a model of P parameters in 42 tensors. The model and the update of the client are on the GPU or
on the CPU.

*Sums.* `gram` copies the products of each block to the host and adds them there. The table compares the sum in compiled
code with the sum in NumPy. This part runs on the CPU and needs no GPU.

All calls run in turns.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from server_step import pieces
from timing import in_turns, machine, quartiles, ratio, tabled
from torch import Tensor

from manifoldagg import aggregate
from manifoldagg.federated.rules import AsyncKrylov, FedAsync, FedOrtho
from manifoldagg.kernels import combine, gram, reduction
from manifoldagg.kernels.backends import cpu
from manifoldagg.kernels.blocks import Blocks

HERE = Path(__file__).parent
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ROWS = {
    ("float32", "vector"): [1, 2, 3, 4, 8, 16],
    ("float32", "42 tensors"): [2, 4, 8],
    ("bfloat16", "vector"): [2, 4],
}
"""The numbers of rows, by dtype and layout."""
RULES = {"FedAsync": FedAsync(0.5), "FedOrtho": FedOrtho(0.5), "AsyncKrylov": AsyncKrylov(0.5)}


def finished(call: Callable[[], Any]) -> Callable[[], None]:
    """Return a function that calls `call` and waits for the GPU."""

    def run() -> None:
        call()
        torch.cuda.synchronize()

    return run


def kernels(sizes: list[int], repetitions: int) -> Iterator[dict[str, Any]]:
    """Yield the measurements of `gram` and `combine`."""
    for size, ((dtype, layout), counts) in product(sizes, ROWS.items()):
        lengths = pieces(size) if layout == "42 tensors" else None
        stack = torch.randn(max(counts), size, device="cuda").to(DTYPES[dtype])
        out = torch.empty_like(stack[0])
        rows = list(stack) if lengths is None else [vector.split(lengths) for vector in stack]
        target = out if lengths is None else out.split(lengths)
        for k in counts:
            line = [1.0 / (j + 2) for j in range(k)]
            numbers = torch.tensor([line], device="cuda", dtype=stack.dtype)
            parts = [stack[:k]] if lengths is None else stack[:k].split(lengths, dim=1)
            calls = {
                "gram": (partial(gram, rows[:k]), lambda parts=parts: sum(part @ part.T for part in parts).tolist()),
                "combine": (
                    partial(combine, None, rows[:k], line, out=target),
                    lambda parts=parts, numbers=numbers: [numbers @ part for part in parts],
                ),
            }
            for kernel, (ours, pytorch) in calls.items():
                moved = (k + (kernel == "combine")) * size * stack.itemsize
                source, copy = torch.ones(2, moved // 2, dtype=torch.uint8, device="cuda")
                ways = {"limit": partial(copy.copy_, source), "ours": ours, "PyTorch": pytorch}
                seconds = in_turns({name: finished(call) for name, call in ways.items()}, repetitions)
                low, middle, high = ratio(seconds["limit"], seconds["ours"])
                yield {
                    "dtype": dtype,
                    "layout": layout,
                    "P": size,
                    "k": k,
                    "kernel": kernel,
                    **{f"{name} us": 1e6 * statistics.median(taken) for name, taken in seconds.items()},
                    "GB/s": moved / statistics.median(seconds["ours"]) / 1e9,
                    "share": middle,
                    "low": low,
                    "high": high,
                }


KERNELS = (
    f"{'dtype':<9}{'layout':<11}{'P':>6}{'k':>4}  {'kernel':<8}{'us':>9}{'limit':>9}{'PyTorch':>10}{'GB/s':>7}"
    f"{'share':>7}  {'quartiles':>14}"
)


def kernel_line(row: dict[str, Any]) -> str:
    """Format a row of the table of the kernels."""
    spread = f"{row['low']:.2f} to {row['high']:.2f}"
    return (
        f"{row['dtype']:<9}{row['layout']:<11}{row['P']:>6.0e}{row['k']:>4}  {row['kernel']:<8}"
        f"{row['ours us']:>9.1f}{row['limit us']:>9.1f}{row['PyTorch us']:>10.1f}{row['GB/s']:>7.0f}"
        f"{row['share']:>7.2f}  {spread:>14}"
    )


def steps(sizes: list[int], repetitions: int) -> Iterator[dict[str, Any]]:
    """Yield the measurements of `aggregate` with the model and the update on either device."""
    for size in sizes:
        models = {device: [_model(size, seed, device) for seed in range(3)] for device in ("cuda", "cpu")}
        for name, rule in RULES.items():
            calls = {
                (device, other): finished(
                    partial(aggregate, rule, None, *models[device][:2], models[other][2], staleness=1)
                )
                for device, other in product(models, models)
            }
            for (device, other), seconds in in_turns(calls, repetitions).items():
                low, middle, high = (1e3 * value for value in quartiles(seconds))
                yield {
                    "rule": name,
                    "P": size,
                    "model": device,
                    "update": other,
                    "ms": middle,
                    "low": low,
                    "high": high,
                }


STEPS = f"{'rule':<12}{'P':>6}  {'model':<6}{'update':<8}{'ms':>10}{'quartiles':>20}"


def step_line(row: dict[str, Any]) -> str:
    """Format a row of the table of the steps."""
    spread = f"{row['low']:.2f} to {row['high']:.2f}"
    return f"{row['rule']:<12}{row['P']:>6.0e}  {row['model']:<6}{row['update']:<8}{row['ms']:>10.2f}{spread:>20}"


def _model(size: int, seed: int, device: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn(size, generator=generator).to(device).split(pieces(size))
    return {f"tensor {i}": part.clone() for i, part in enumerate(parts)}


def sums(sizes: list[int], repetitions: int) -> Iterator[dict[str, Any]]:
    """Yield the measurements of the sums of the blocks on the host."""
    generator = np.random.default_rng(0)
    for size, k in product(sizes, ROWS["float32", "vector"]):
        blocks = Blocks.of(((0, size),))
        products = generator.standard_normal((len(blocks.table), k * (k + 1) // 2))
        # The compiled function overwrites its argument.
        calls = {
            "NumPy": lambda products=products, blocks=blocks: reduction.pairwise_sum(products, blocks),
            "compiled": lambda products=products, blocks=blocks: cpu.pairwise_sum(products.copy(), blocks),
        }
        seconds = in_turns(calls, repetitions)
        low, middle, high = ratio(seconds["NumPy"], seconds["compiled"])
        medians = {f"{name} us": 1e6 * statistics.median(taken) for name, taken in seconds.items()}
        yield {"P": size, "k": k, **medians, "ratio": middle, "low": low, "high": high}


SUMS = f"{'P':>6}{'k':>4}{'NumPy us':>12}{'compiled us':>13}{'ratio':>8}{'quartiles':>16}"


def sum_line(row: dict[str, Any]) -> str:
    """Format a row of the table of the sums."""
    numbers = f"{row['NumPy us']:>12.1f}{row['compiled us']:>13.1f}{row['ratio']:>8.1f}"
    spread = f"{row['low']:.1f} to {row['high']:.1f}"
    return f"{row['P']:>6.0e}{row['k']:>4}{numbers}{spread:>16}"


PARTS = {
    "kernels": (kernels, KERNELS, kernel_line),
    "steps": (steps, STEPS, step_line),
    "sums": (sums, SUMS, sum_line),
}


def main() -> None:
    """Print the tables and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e6, 1e7, 1e8])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    if not torch.cuda.is_available() and options.parts != ["sums"]:
        raise SystemExit("this benchmark needs a GPU, except for --parts sums")
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
    head = f"{name}; torch {torch.__version__}, {machine()}"
    for part in options.parts:
        measured, header, line = PARTS[part]
        rows = measured([int(size) for size in options.sizes], options.repetitions)
        tabled(options.out / f"gpu_{part}", [f"{part.capitalize()} on {head}", header], rows, line, options.repetitions)


if __name__ == "__main__":
    main()
