"""Unchecked formulas that follow from the primitives of a space; `operations` checks and then calls them.

As `space._exp` is to `space.exp`, so `formulas.geodesic` is to `geodesic`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from manifoldagg.manifolds.manifold import Manifold

__all__ = ["distance", "geodesic", "norm", "pole_ladder", "schild_ladder"]


def norm(space: Manifold, x: Tensor, u: Tensor) -> Tensor:
    r"""Compute $\|u\|_x$: (*batch,)."""
    square = space._inner(x, u, u)
    # What rounding made negative is 0; NaN stays NaN. The root is taken where it has a derivative.
    none = square <= 0
    return torch.where(none, torch.zeros_like(square), torch.where(none, torch.ones_like(square), square).sqrt())


def distance(space: Manifold, x: Tensor, y: Tensor) -> Tensor:
    r"""Compute $d(x, y)$: (*batch,)."""
    return norm(space, x, space._log(x, y))


def geodesic(space: Manifold, x: Tensor, y: Tensor, t: float | Tensor) -> Tensor:
    r"""Compute $\exp_x(t \log_x y)$, `t` a number or (*batch,) numbers."""
    velocity = space._log(x, y)
    if isinstance(t, Tensor):
        t = t.to(velocity.dtype).reshape(*t.shape, *(1 for _ in space.shape))
    return space._exp(x, t * velocity)


def pole_ladder(space: Manifold, x: Tensor, y: Tensor, u: Tensor, *, rungs: int = 1) -> Tensor:
    """Transport `u` from `x` to `y` by reflection in the midpoints of `rungs` pieces of the geodesic."""

    def rung(start: Tensor, end: Tensor, v: Tensor) -> Tensor:
        middle = geodesic(space, start, end, 0.5)
        return -space._log(end, space._exp(middle, -space._log(middle, space._exp(start, v))))

    return _transport_by_ladder(rung, space, x, y, u, rungs)


def schild_ladder(space: Manifold, x: Tensor, y: Tensor, u: Tensor, *, rungs: int = 1) -> Tensor:
    """Transport `u` from `x` to `y` by geodesic parallelograms on `rungs` pieces of the geodesic."""

    def rung(start: Tensor, end: Tensor, v: Tensor) -> Tensor:
        middle = geodesic(space, space._exp(start, v), end, 0.5)
        return space._log(end, space._exp(start, 2 * space._log(start, middle)))

    return _transport_by_ladder(rung, space, x, y, u, rungs)


Rung = Callable[[Tensor, Tensor, Tensor], Tensor]


def _transport_by_ladder(rung: Rung, space: Manifold, x: Tensor, y: Tensor, u: Tensor, rungs: int) -> Tensor:
    """`rungs` ladder steps along the geodesic from `x` to `y`."""
    start = x
    for i in range(1, rungs + 1):
        end = y if i == rungs else geodesic(space, x, y, i / rungs)
        u = rung(start, end, u)
        start = end
    return u
