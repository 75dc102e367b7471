"""Norms, distances, geodesics and approximations of parallel transport, with argument checks.

They are computed from the primitives of a manifold, such as `exp` and `log`.
"""

from torch import Tensor

from manifoldagg._validation import check_count
from manifoldagg.manifolds import formulas
from manifoldagg.manifolds.manifold import Manifold, Point, Scalar, Tangent

__all__ = ["distance", "geodesic", "norm", "pole_ladder", "schild_ladder"]


def norm(space: Manifold, x: Point, u: Tangent) -> Scalar:
    r"""Compute the norm $\|u\|_x = \sqrt{\langle u, u\rangle_x}$ of each tangent $u$ at the point $x$.

    At $u = 0$, where the norm is not differentiable, its gradient is 0.

    Args:
        space: the manifold.
        x: points (*batch, *shape).
        u: tangent vectors at `x` (*batch, *shape).

    Returns:
        The norms (*batch,).

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Flat
        >>> norm(Flat(2), torch.zeros(2), torch.tensor([3.0, 4.0]))
        tensor(5.)
    """
    space._check({"x": x}, vectors={"u": u})
    return formulas.norm(space, x, u)


def distance(space: Manifold, x: Point, y: Point) -> Scalar:
    r"""Compute the geodesic distance $d(x, y) = \|\log_x y\|_x$ between two points $x$ and $y$.

    The points must be within the injectivity radius of each other. At $y = x$, where the distance is not
    differentiable, its gradient is 0.

    Args:
        space: the manifold.
        x: points (*batch, *shape).
        y: points (*batch, *shape).

    Returns:
        The distances (*batch,).

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

    A ladder with one rung maps a tangent $u$ at $x$ to the tangent $-\log_y(\exp_m(-\log_m(\exp_x u)))$ at $y$, where
    $m$ is the midpoint between $x$ and $y$. With several rungs, the geodesic from `x` to `y` is divided into segments
    of equal length. Each rung transports the tangent along one segment.

    On symmetric spaces, the result is exact. On other spaces, let $h$ be the length of a segment. The error of one rung
    is of third order in $h + \|u\|$. Additional rungs reduce only $h$, so divide $u$ by the number of rungs as well.
    The error of `k * pole_ladder(space, x, y, u / k, rungs=k)` is proportional to $1/k^2$.

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

    A ladder with one rung constructs a geodesic parallelogram from its corners $x$, $\exp_x u$ and $y$. The midpoint
    $m$ between $\exp_x u$ and $y$ is also the midpoint of the other diagonal, which starts at $x$. The fourth corner is
    therefore $z = \exp_x(2 \log_x m)$, and the result is the tangent $\log_y z$ at $y$.

    With several rungs, the geodesic from `x` to `y` is divided into segments of equal length. Each rung transports the
    tangent along one segment.

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
