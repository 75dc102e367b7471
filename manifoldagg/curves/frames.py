"""Moving frames along a Bézier curve on a flat space.

At each point of the curve, a moving frame consists of orthonormal vectors that are orthogonal to the curve. They are
the axes of the cross-sections of a tunnel, which is a tube around the curve.
"""

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from manifoldagg.curves.shape import Control, Times, derivative, unit

__all__ = ["rotation_minimising"]


def rotation_minimising(
    control: Control, t: Times, *, start: Float64[Tensor, "k m"], steps: int = 64
) -> Float64[Tensor, "*times k m"]:
    """Transport normal vectors along a curve $b$ from $t = 0$ to `t`, without rotation about the tangent.

    Because the vectors do not rotate about the tangent, their derivatives are parallel to the velocity $b'$. The
    function uses the double reflection method on a grid of evenly spaced parameters. It transports the vectors from one
    grid point to the next by two reflections:

    1. The first reflection is in the plane that bisects the chord between the two points.
    2. The second reflection maps the reflected tangent to the tangent at the second point.

    One more double reflection leads from the last grid point before `t` to `t`. The chord is computed from the mean
    velocity, so small steps do not cause cancellation. The error is of fourth order in the step size.

    Args:
        control: control points (n + 1, k).
        t: parameters. Outside [0, 1], one double reflection leads from the first or the last grid point to `t`.
        start: orthonormal columns orthogonal to $b'(0)$.
        steps: the number of steps of the grid.

    Returns:
        Orthonormal columns (*times, k, m) that are orthogonal to $b'(t)$ up to rounding.

    Source: Wang, Jüttler, Zheng, Liu 2008, Table I.

    Example:
        Along a curve in the plane, the normal rotates with the tangent.

        >>> import torch
        >>> control = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
        >>> start, end = torch.tensor([[0.0], [1.0]]).double(), torch.tensor(1.0).double()
        >>> rotation_minimising(control, end, start=start).squeeze().round(decimals=12)
        tensor([-1.,  0.], dtype=torch.float64)
    """
    grid = torch.linspace(0, 1, steps + 1, dtype=torch.float64, device=control.device)
    rotations = _double_reflection(control, grid[:-1], grid[1:])
    stride = 1
    # A parallel prefix product: after each pass, an entry is the product of twice as many rotations.
    while stride < steps:
        rotations = torch.cat([rotations[:stride], rotations[stride:] @ rotations[:-stride]])
        stride *= 2
    # The last double reflection starts at the grid point before `t`. Its index has no derivative.
    previous = (t.detach() * steps).floor().clamp(0, steps - 1).long()
    return _double_reflection(control, grid[previous], t) @ torch.cat([start[None], rotations @ start])[previous]


def _double_reflection(control: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Compute the rotation matrices that transport vectors along a curve from `a` to `b`."""
    degree = len(control) - 1
    # With this number of nodes, the mean of a polynomial of degree n - 1 is exact.
    nodes, weights = np.polynomial.legendre.leggauss((degree + 1) // 2)
    chord = torch.zeros_like(derivative(control, b))
    for node, weight in zip(nodes, weights, strict=True):
        chord = chord + weight / 2 * derivative(control, a + (node + 1) / 2 * (b - a))
    first = _reflection(chord)
    reflected = (first @ unit(derivative(control, a))[..., None]).squeeze(-1)
    # The product of two reflections is a rotation.
    return _reflection(unit(derivative(control, b)) - reflected) @ first


def _reflection(v: Tensor) -> Tensor:
    """Return the matrix of the reflection in the plane orthogonal to `v`."""
    n = unit(v)
    return torch.eye(v.shape[-1]).to(v) - 2 * n[..., :, None] * n[..., None, :]
