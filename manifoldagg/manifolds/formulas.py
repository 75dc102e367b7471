"""Norms, distances, geodesics and approximations of parallel transport, without argument checks.

They are computed from the primitives of a manifold, such as `exp` and `log`. The module `operations` contains functions
with the same names, which check their arguments first.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from manifoldagg.manifolds.manifold import Manifold

__all__ = ["distance", "geodesic", "norm", "pole_ladder", "schild_ladder"]


def norm(space: Manifold, x: Tensor, u: Tensor) -> Tensor:
    r"""Compute the norm $\|u\|_x$, (*batch,)."""
    square = space._inner(x, u, u)
    # Negative rounding errors become 0, and NaN remains NaN. The root is not evaluated at 0, where its derivative is
    # infinite.
    is_zero = square <= 0
    return torch.where(is_zero, torch.zeros_like(square), torch.where(is_zero, torch.ones_like(square), square).sqrt())


def distance(space: Manifold, x: Tensor, y: Tensor) -> Tensor:
    r"""Compute the distance $d(x, y)$, (*batch,)."""
    return norm(space, x, space._log(x, y))


def geodesic(space: Manifold, x: Tensor, y: Tensor, t: float | Tensor) -> Tensor:
    r"""Compute $\exp_x(t \log_x y)$ for a number `t` or a tensor (*batch,)."""
    velocity = space._log(x, y)
    if isinstance(t, Tensor):
        t = t.to(velocity.dtype).reshape(*t.shape, *(1 for _ in space.shape))
    return space._exp(x, t * velocity)


def pole_ladder(space: Manifold, x: Tensor, y: Tensor, u: Tensor, *, rungs: int = 1) -> Tensor:
    """Transport the tangent `u` from `x` to `y` by a pole ladder, without argument checks."""

    def rung(start: Tensor, end: Tensor, v: Tensor) -> Tensor:
        # The reflection in the midpoint maps exp_start(v) to exp_end of the transported vector, with the sign reversed.
        middle = geodesic(space, start, end, 0.5)
        return -space._log(end, space._exp(middle, -space._log(middle, space._exp(start, v))))

    return _transport_by_ladder(rung, space, x, y, u, rungs)


def schild_ladder(space: Manifold, x: Tensor, y: Tensor, u: Tensor, *, rungs: int = 1) -> Tensor:
    """Transport the tangent `u` from `x` to `y` by Schild's ladder, without argument checks."""

    def rung(start: Tensor, end: Tensor, v: Tensor) -> Tensor:
        # The diagonals of a geodesic parallelogram bisect each other, so `middle` is also halfway to the fourth corner.
        middle = geodesic(space, space._exp(start, v), end, 0.5)
        return space._log(end, space._exp(start, 2 * space._log(start, middle)))

    return _transport_by_ladder(rung, space, x, y, u, rungs)


Rung = Callable[[Tensor, Tensor, Tensor], Tensor]


def _transport_by_ladder(rung: Rung, space: Manifold, x: Tensor, y: Tensor, u: Tensor, rungs: int) -> Tensor:
    start = x
    for i in range(1, rungs + 1):
        # The last rung ends exactly at y, not at a rounded point of the geodesic.
        end = y if i == rungs else geodesic(space, x, y, i / rungs)
        u = rung(start, end, u)
        start = end
    return u
