"""Norms, distances, geodesics and approximations of parallel transport, with argument checks.

They are computed from the primitives of a manifold, such as `exp` and `log`.
"""

from torch import Tensor

from manifoldagg._validation import check_count
from manifoldagg.manifolds import formulas
from manifoldagg.manifolds.manifold import Manifold, Point, Scalar, Tangent

__all__ = ["distance", "geodesic", "norm", "pole_ladder", "schild_ladder"]


def norm(space: Manifold, x: Point, u: Tangent) -> Scalar:
    r"""Compute the norm $\|u\|_x = \sqrt{\langle u, u\rangle_x}$ of tangents $u$ at points $x$, (*batch,).

    The gradient of the norm at $u = 0$ is 0.

    Args:
        space: the manifold.
        x: points (*batch, *shape).
        u: tangent vectors at `x` (*batch, *shape).

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Flat
        >>> norm(Flat(2), torch.zeros(2), torch.tensor([3.0, 4.0]))
        tensor(5.)
    """
    space._check({"x": x}, vectors={"u": u})
    return formulas.norm(space, x, u)


def distance(space: Manifold, x: Point, y: Point) -> Scalar:
    r"""Compute the geodesic distance $d(x, y) = \|\log_x y\|_x$ of two points, (*batch,).

    The points must be within the injectivity radius of each other. The gradient of the distance at $y = x$ is 0.

    Args:
        space: the manifold.
        x: points (*batch, *shape).
        y: points (*batch, *shape).

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Sphere
        >>> distance(Sphere(2), torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
        tensor(1.5708)
    """
    space._check({"x": x, "y": y})
    return formulas.distance(space, x, y)


def geodesic(space: Manifold, x: Point, y: Point, t: float | Tensor) -> Point:
    r"""Compute the point $\gamma(t) = \exp_x(t \log_x y)$ of the geodesic from `x` to `y`.

    The geodesic is at `x` at time $t = 0$ and at `y` at time $t = 1$.

    Args:
        space: a space with exp and log.
        x: start points (*batch, *shape).
        y: end points (*batch, *shape).
        t: a number, or a tensor (*batch,).

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Flat
        >>> geodesic(Flat(1), torch.tensor([1.0]), torch.tensor([3.0]), 0.25)
        tensor([1.5000])
    """
    space._check({"x": x, "y": y})
    return formulas.geodesic(space, x, y, t)


def pole_ladder(space: Manifold, x: Point, y: Point, u: Tangent, *, rungs: int = 1) -> Tangent:
    r"""Transport a tangent `u` from `x` to `y` by the pole ladder, which approximates parallel transport.

    One rung maps a tangent $u$ at $x$ to the tangent $-\log_y(\exp_m(-\log_m(\exp_x u)))$ at $y$, where $m$ is the
    midpoint between $x$ and $y$. With several rungs, the geodesic from `x` to `y` is divided into segments of equal
    length, and each rung transports the tangent along one segment.

    On symmetric spaces, the result is exact. On other spaces, the error of a rung is of third order in the lengths of
    $u$ and of the segment together. To reduce the error, scale $u$ as well: the error of
    `k * pole_ladder(space, x, y, u / k, rungs=k)` is proportional to $1/k^2$.

    Args:
        space: the manifold.
        x: start points (*batch, *shape).
        y: end points (*batch, *shape).
        u: tangent vectors at `x` (*batch, *shape).
        rungs: the number of rungs, which divide the geodesic from `x` to `y` into equal segments.

    Raises:
        ArgumentError: if `rungs` is not a positive integer.

    Source: Lorenzi, Pennec 2014.

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Flat
        >>> pole_ladder(Flat(1), torch.tensor([0.0]), torch.tensor([2.0]), torch.tensor([0.5]))
        tensor([0.5000])
    """
    space._check({"x": x, "y": y}, tangents={"u": u})
    return formulas.pole_ladder(space, x, y, u, rungs=check_count("rungs", rungs))


def schild_ladder(space: Manifold, x: Point, y: Point, u: Tangent, *, rungs: int = 1) -> Tangent:
    r"""Transport a tangent `u` from `x` to `y` by Schild's ladder, which approximates parallel transport.

    One rung constructs a geodesic parallelogram. It maps a tangent $u$ at $x$ to the tangent
    $\log_y(\exp_x(2 \log_x m))$ at $y$, where $m$ is the midpoint between $\exp_x u$ and $y$.

    Args:
        space: the manifold.
        x: start points (*batch, *shape).
        y: end points (*batch, *shape).
        u: tangent vectors at `x` (*batch, *shape).
        rungs: the number of rungs, which divide the geodesic from `x` to `y` into equal segments.

    Raises:
        ArgumentError: if `rungs` is not a positive integer.

    Source: Ehlers, Pirani, Schild 1972.

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Flat
        >>> schild_ladder(Flat(1), torch.tensor([0.0]), torch.tensor([2.0]), torch.tensor([0.5]))
        tensor([0.5000])
    """
    space._check({"x": x, "y": y}, tangents={"u": u})
    return formulas.schild_ladder(space, x, y, u, rungs=check_count("rungs", rungs))
