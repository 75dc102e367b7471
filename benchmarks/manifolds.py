"""Time and error of exp, log, transport and means, compared with geoopt and pymanopt on equal batches.

    python benchmarks/manifolds.py [--repetitions 15] [--out benchmarks/results/manifolds]

A time is the processor time of one call on the whole batch, on one thread. The ratio is ours / theirs over interleaved
repetitions, as median and quartiles. A ratio below 1 means that this library is faster.

An error is the largest value of |result - exact| / |exact| in coordinates, over tangents of lengths 1e-7, 1e-3, 0.1, 1
and far (3 on the sphere, 1.4 on Grassmann, 2 elsewhere). The exact value is computed by mpmath with 40 digits from the
same float64 input. Matrices are orthonormal only up to rounding, so a log of length 1e-7 is determined to about 1e-9 on
these spaces, for any formula.
"""

import argparse
import json
import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import exact
import numpy as np
import torch
from timing import interleaved, ratio
from torch import Tensor

from manifoldagg.manifolds import (
    Grassmann,
    Lorentz,
    Manifold,
    PoincareBall,
    SpecialOrthogonal,
    Sphere,
    Stiefel,
    SymmetricPositiveDefinite,
    karcher_mean,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import geoopt
    import pymanopt.manifolds as pymanopt

LENGTHS = (1e-7, 1e-3, 0.1, 1.0)
HEADER = (
    f"{'space (batch)':<34} {'against':<9} {'operation':<10} {'ours':>9} {'theirs':>9}  "
    f"{'ratio [quartiles]':<19} {'our error':>9} {'theirs':>9}"
)
OPERATIONS = ("exp", "log", "transport")


@dataclass(frozen=True)
class Case:
    """A space, with the calls of the peer and the 40-digit references by operation."""

    name: str
    peer: str
    space: Manifold
    batch: int
    far: float
    peers: dict[str, Callable[..., Any]]
    exact: dict[str, Callable[..., Any]]


def main() -> None:
    """Print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "manifolds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [f"torch {torch.__version__}, one thread, geoopt {geoopt.__version__}", HEADER]
    rows = []
    print("\n".join(lines), flush=True)
    for case in cases():
        for row in measured(case, options.repetitions):
            rows.append(row)
            lines.append(shown(row))
            print(lines[-1], flush=True)
    options.out.parent.mkdir(exist_ok=True)
    options.out.with_suffix(".txt").write_text("\n".join(lines) + "\n")
    options.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")


def measured(case: Case, repetitions: int) -> Iterator[dict[str, Any]]:
    """Return a row for each operation that the peer has, and a row for our mean."""
    x, y, u, v = drawn(case.space, case.batch, 0.7)
    arguments = {"exp": (x, u), "log": (x, y), "transport": (x, y, v)}
    for operation in OPERATIONS:
        if operation not in case.peers or operation not in case.space.capabilities:
            continue
        ours, theirs, given = getattr(case.space, operation), case.peers[operation], arguments[operation]
        seconds = interleaved({"ours": lambda: ours(*given), "theirs": lambda: theirs(*given)}, repetitions=repetitions)  # noqa: B023
        yield {
            "space": f"{case.name} ({case.batch})",
            "peer": case.peer,
            "operation": operation,
            "ours": statistics.median(seconds["ours"]),
            "theirs": statistics.median(seconds["theirs"]),
            "ratio": ratio(seconds["ours"], seconds["theirs"]),
            "our error": error(case, operation, ours),
            "their error": error(case, operation, theirs),
        }
    if case.peer == "geoopt":
        points = y.reshape(-1, 8, *case.space.shape)
        centre = points[:, :1].expand_as(points)
        near = case.space.exp(
            centre, 0.3 * case.space.random_tangent(centre.contiguous(), torch.Generator().manual_seed(1)) / 10
        )
        seconds = interleaved({"mean": lambda: karcher_mean(case.space, near)}, repetitions=3)
        mean = karcher_mean(case.space, near)
        yield {
            "space": f"{case.name} ({len(near)} of 8)",
            "peer": "-",
            "operation": "mean",
            "ours": statistics.median(seconds["mean"]),
            "our error": mean.residual.max().item(),
        }


def shown(row: dict[str, Any]) -> str:
    """Format a row of the table."""
    what = f"{row['space']:<34} {row['peer']:<9} {row['operation']:<10} {row['ours'] * 1e3:6.2f} ms"
    if "ratio" not in row:
        return f"{what} {'':>9}  {'(the residual)':<19} {row['our error']:9.1e}"
    low, middle, high = row["ratio"]
    times = f"{row['theirs'] * 1e3:6.2f} ms  {f'{middle:5.2f} [{low:.2f}, {high:.2f}]':<19}"
    return f"{what} {times} {row['our error']:9.1e} {row['their error']:9.1e}"


def drawn(space: Manifold, batch: int, length: float, seed: int = 0) -> tuple[Tensor, ...]:
    """Sample x, y = exp_x u, and tangents u and v of a given length, in float64."""
    generator = torch.Generator().manual_seed(seed)
    x = space.random_point(batch, generator=generator, dtype=torch.float64)
    axes = (1,) * len(space.shape)
    tangents = []
    for _ in range(2):
        u = space.random_tangent(x, generator)
        tangents.append(u * (length / space.inner(x, u, u).sqrt()).reshape(-1, *axes))
    return x, space.exp(x, tangents[0]), *tangents


def error(case: Case, operation: str, call: Callable[..., Any]) -> float:
    """Return the largest relative error over the lengths. A non-finite result has an infinite error."""
    worst = 0.0
    for length in (*LENGTHS, case.far):
        x, y, u, v = drawn(case.space, 3, length, seed=7)
        given = {"exp": (x, u), "log": (x, y), "transport": (x, y, v)}[operation]
        found = torch.as_tensor(call(*given)).double()
        for i in range(len(x)):
            reference = case.exact[operation](*(exact.mp.matrix(t[i].tolist()) for t in given))
            value = exact.mp.matrix(found[i].tolist())
            if not bool(found[i].isfinite().all()):
                return float("inf")
            worst = max(worst, float(exact.mp.norm(value - reference) / exact.mp.norm(reference)))
    return worst


def numpy_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """Apply a NumPy function to tensors."""
    return lambda *tensors: np.asarray(function(*(t.numpy() for t in tensors)))


def looped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Apply a function of one point to each point of a batch."""
    return lambda *tensors: np.stack([function(*(t.numpy() for t in one)) for one in zip(*tensors, strict=True)])


def cases() -> Iterator[Case]:
    """Return all comparisons."""
    sphere = {"exp": exact.sphere_exp, "log": exact.sphere_log, "transport": exact.sphere_transport}
    peer = geoopt.Sphere()
    # geoopt's `transp` is a projection and not a parallel transport, so it is not compared.
    yield Case("Sphere(16)", "geoopt", Sphere(16), 4096, 3.0, {"exp": peer.expmap, "log": peer.logmap}, sphere)
    ball = geoopt.PoincareBall(c=torch.tensor(1.0, dtype=torch.float64))
    calls = {"exp": lambda x, u: ball.expmap(x, u, project=False), "log": ball.logmap, "transport": ball.transp}
    digits = {"exp": exact.ball_exp, "log": exact.ball_log, "transport": exact.ball_transport}
    yield Case("PoincareBall(16)", "geoopt", PoincareBall(16), 4096, 2.0, calls, digits)
    sheet_ = geoopt.Lorentz(k=torch.tensor(1.0, dtype=torch.float64))
    calls = {
        "exp": lambda x, u: sheet_.expmap(x, u, project=False, norm_tan=False),
        "log": sheet_.logmap,
        "transport": sheet_.transp,
    }
    digits = {"exp": exact.lorentz_exp, "log": exact.lorentz_log, "transport": exact.lorentz_transport}
    yield Case("Lorentz(15)", "geoopt", Lorentz(15), 4096, 2.0, calls, digits)
    digits = {"exp": exact.spd_exp, "log": exact.spd_log, "transport": exact.spd_transport}
    cone = geoopt.SymmetricPositiveDefinite()
    calls = {"exp": cone.expmap, "log": cone.logmap, "transport": cone.transp}
    yield Case("SymmetricPositiveDefinite(6)", "geoopt", SymmetricPositiveDefinite(6), 512, 2.0, calls, digits)
    cone_ = pymanopt.SymmetricPositiveDefinite(6, k=512)
    # The transport of the peer is a projection and not a parallel transport, so it is not compared.
    calls = {"exp": numpy_call(cone_.exp), "log": numpy_call(cone_.log)}
    yield Case("SymmetricPositiveDefinite(6)", "pymanopt", SymmetricPositiveDefinite(6), 512, 2.0, calls, digits)
    frames = geoopt.EuclideanStiefelExact()
    yield Case("Stiefel(12, 3)", "geoopt", Stiefel(12, 3), 512, 2.0, {"exp": frames.expmap}, {"exp": exact.stiefel_exp})
    frames_ = looped(pymanopt.Stiefel(12, 3).exp)
    yield Case("Stiefel(12, 3)", "pymanopt", Stiefel(12, 3), 512, 2.0, {"exp": frames_}, {"exp": exact.stiefel_exp})
    planes = pymanopt.Grassmann(12, 3, k=512)
    calls = {"exp": numpy_call(planes.exp), "log": numpy_call(planes.log)}
    digits = {"exp": exact.grassmann_exp, "log": exact.grassmann_log}
    yield Case(
        "Grassmann(12, 3)",
        "pymanopt",
        Grassmann(12, 3),
        512,
        1.4,
        calls,
        {"exp": exact.grassmann_exp, "log": exact.grassmann_log},
    )
    turns = pymanopt.SpecialOrthogonalGroup(5, k=512)
    # The peer represents a tangent as xᵀu, with the same metric.
    calls = {
        "exp": lambda x, u: turns.exp(x.numpy(), (x.mT @ u).numpy()),
        "log": lambda x, y: x.numpy() @ turns.log(x.numpy(), y.numpy()),
    }
    digits = {
        "exp": lambda x, u: x * exact.mp.expm((x.T * u - u.T * x) / 2),
        "log": lambda x, y: x * exact.mp.logm(x.T * y).apply(exact.mp.re),
    }
    yield Case("SpecialOrthogonal(5)", "pymanopt", SpecialOrthogonal(5), 512, 2.0, calls, digits)


if __name__ == "__main__":
    main()
