"""Moving frames along a Bézier curve on a flat space."""

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from manifoldagg.curves.shape import Control, Times, derivative, unit

__all__ = ["rotation_minimising"]


def rotation_minimising(
    control: Control, t: Times, *, start: Float64[Tensor, "k m"], steps: int = 64
) -> Float64[Tensor, "*times k m"]:
    r"""Transport normal vectors along the curve from $t = 0$ without rotation about it: $R'$ is along $b'$.

    On a grid of equal steps each follows from the one before by double reflection: in the plane that halves the
    chord between the two points, then in the one that takes the reflected tangent to the new one. One more such
    step leads from the grid point before `t` to `t`, so that $R$ is continuous. The mean velocity stands for the
    chord, which is its direction without cancellation however small the step. The error is of fourth order in the
    step.

    Args:
        control: control points (n + 1, k).
        t: parameters; outside [0, 1] one step leads there from the first or the last grid point.
        start: orthonormal columns orthogonal to $b'(0)$.
        steps: of the grid.

    Returns:
        (*times, k, m): orthonormal columns orthogonal to $b'(t)$, to rounding.

    Source: Wang, Jüttler, Zheng, Liu 2008, Table I.

    Example:
        Along a circular arc in the plane the normal turns with the tangent.

        >>> import torch
        >>> control = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
        >>> start, end = torch.tensor([[0.0], [1.0]]).double(), torch.tensor(1.0).double()
        >>> rotation_minimising(control, end, start=start).squeeze().round(decimals=12)
        tensor([-1.,  0.], dtype=torch.float64)
    """
    grid = torch.linspace(0, 1, steps + 1, dtype=torch.float64, device=control.device)
    turns = _double_reflection(control, grid[:-1], grid[1:])
    stride = 1
    # The product of all turns so far, of twice as many each time.
    while stride < steps:
        turns = torch.cat([turns[:stride], turns[stride:] @ turns[:-stride]])
        stride *= 2
    before = (t.detach() * steps).floor().clamp(0, steps - 1).long()
    return _double_reflection(control, grid[before], t) @ torch.cat([start[None], turns @ start])[before]


def _double_reflection(control: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The rotation that a double reflection makes from `a` to `b`: (*times, k, k)."""
    degree = len(control) - 1
    # Enough nodes for the mean of a polynomial of degree n - 1 to be exact.
    nodes, weights = np.polynomial.legendre.leggauss((degree + 1) // 2)
    chord = torch.zeros_like(derivative(control, b))
    for node, weight in zip(nodes, weights, strict=True):
        chord = chord + weight / 2 * derivative(control, a + (node + 1) / 2 * (b - a))
    first = _reflection(chord)
    turned = (first @ unit(derivative(control, a))[..., None]).squeeze(-1)
    return _reflection(unit(derivative(control, b)) - turned) @ first


def _reflection(v: Tensor) -> Tensor:
    """In the plane orthogonal to `v`."""
    n = unit(v)
    return torch.eye(v.shape[-1]).to(v) - 2 * n[..., :, None] * n[..., None, :]
