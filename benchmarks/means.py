"""Time and error of Karcher means of k models on a sphere, compared with two iterations and with the plain mean.

    python benchmarks/means.py [--size 1000000] [--repetitions 5] [--output benchmarks/results/means]

A time is the processor time of one call on one thread. There are three references:

- `iteration`: the fixed-point iteration, with the points in float64.
- `in place`: the same iteration in the dtype of the models, as in tools that merge models.
- `plain`: the arithmetic mean, divided by its norm.

An error is the distance to the mean of the same models in float64. The unit is the distance from this mean to its
rounding in the dtype of the models, so no model in this dtype has an error below 1.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from timing import interleaved
from torch import Tensor

from manifoldagg.averaging import karcher
from manifoldagg.manifolds import Sphere, karcher_mean

SPREAD = 0.3
"""The distance of each model from the first model."""
HEADER = (
    f"{'dtype':<9} {'k':>2} {'karcher':>9} {'iteration':>10} {'in place':>9} {'plain':>9}  "
    f"{'iteration / karcher':>19}   {'errors: karcher':>15} {'iteration':>9} {'in place':>9} {'plain':>9}"
)


def main() -> None:
    """Print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1_000_000)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "means")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [f"torch {torch.__version__}, one thread, Sphere({options.size}), models {SPREAD} apart", HEADER]
    print("\n".join(lines), flush=True)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for k in (2, 4, 8):
            row = measured(options.size, k, dtype, options.repetitions)
            rows.append(row)
            lines.append(shown(row))
            print(lines[-1], flush=True)
    options.output.parent.mkdir(exist_ok=True)
    options.output.with_suffix(".txt").write_text("\n".join(lines) + "\n")
    options.output.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")


def measured(size: int, k: int, dtype: torch.dtype, repetitions: int) -> dict[str, Any]:
    """Return the seconds and the errors of each method."""
    models = drawn(size, k, dtype)
    space = Sphere(size)
    calls = {
        "karcher": lambda: karcher(space, models).point,
        "iteration": lambda: iterated(space, models).point[0].to(dtype),
        "in place": lambda: in_place(models),
        "plain": lambda: plain(models),
    }
    seconds = {name: statistics.median(times) for name, times in interleaved(calls, repetitions=repetitions).items()}
    exact = iterated(space, [model.double() for model in models]).point[0]
    floor = (exact.to(dtype).double() - exact).norm().item()
    errors = {name: (call().double() - exact).norm().item() / floor for name, call in calls.items()}
    return {"dtype": str(dtype).removeprefix("torch."), "k": k, "seconds": seconds, "errors": errors}


def shown(row: dict[str, Any]) -> str:
    """Format a row of the table."""
    seconds = row["seconds"]
    times = " ".join(f"{1e3 * seconds[name]:6.1f} ms" for name in ("karcher", "iteration", "in place", "plain"))
    errors = " ".join(f"{error:9.2f}" for error in row["errors"].values())
    share = seconds["iteration"] / seconds["karcher"]
    return f"{row['dtype']:<9} {row['k']:>2} {times}  {share:19.1f}         {errors}"


def drawn(size: int, k: int, dtype: torch.dtype) -> list[Tensor]:
    """Sample k unit vectors in the given dtype, at distances of `SPREAD` from the first vector."""
    space = Sphere(size)
    generator = torch.Generator().manual_seed(0)
    start = space.random_point(generator=generator, dtype=torch.float64)
    models = [start]
    for _ in range(k - 1):
        u = space.random_tangent(start, generator)
        models.append(space.exp(start, SPREAD * u / u.norm()))
    return [model.to(dtype) for model in models]


def iterated(space: Sphere, models: list[Tensor]) -> Any:
    """Compute the mean by logarithms and exponentials in float64, as the mean of a batch with one element."""
    return karcher_mean(space, torch.stack(models)[None], tolerance=1e-12 * len(models[0]) ** 0.5)


def in_place(models: list[Tensor], steps: int = 50) -> Tensor:
    """Compute the same fixed point in the dtype of the models."""
    mean = plain(models)
    for _ in range(steps):
        step = torch.zeros_like(mean)
        for model in models:
            cosine = torch.dot(mean, model).clamp(-1, 1)
            angle = torch.arccos(cosine)
            if angle > 0:
                step += angle / torch.sin(angle) * (model - cosine * mean)
        step /= len(models)
        length = step.norm()
        if length < 1e-8:
            break
        mean = torch.cos(length) * mean + torch.sin(length) / length * step
        mean /= mean.norm()
    return mean


def plain(models: list[Tensor]) -> Tensor:
    """Compute the arithmetic mean and normalise it."""
    mean = torch.stack(models).mean(0)
    return mean / mean.norm()


if __name__ == "__main__":
    main()
