"""The unit sphere, with formulas that are accurate from the smallest angle to the cut locus."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from manifoldagg._validation import check_count
from manifoldagg.manifolds.embedded import Embedded
from manifoldagg.manifolds.manifold import PRIMITIVES, Point, Scalar, Tangent
from manifoldagg.manifolds.smooth import angle_per_sine, cos_of_square, dot, sinc_of_square

__all__ = ["Sphere"]


@dataclass(frozen=True)
class Sphere(Embedded):
    r"""The unit sphere $S^{n-1} \subset \mathbb{R}^n$ with the metric of $\mathbb{R}^n$.

    With $t = \|u\|$ and the angle $\theta$ between $x$ and $y$:

    $$\exp_x u = \cos t\; x + \tfrac{\sin t}{t}\, u, \qquad
      \log_x y = \tfrac{\theta}{\sin\theta}\,(y - \langle x, y\rangle x), \qquad
      P_{x \to y} u = u - \tfrac{\langle y, u\rangle}{1 + \langle x, y\rangle}\,(x + y).$$

    All primitives are computed in float64 and cast back. They are smooth at $u = 0$ and $y = x$. At $y = -x$ (the cut
    locus), `log` and `transport` are undefined and return NaN.

    Small angles have a small relative error, because $y - \langle x, y\rangle x$ is computed from $y - x$, and
    $\theta = \operatorname{atan2}(\sin\theta, \langle x, y\rangle)$.

    Args:
        n: the dimension of the ambient space, at least 1.

    Raises:
        ArgumentError: if `n` is not a positive integer.

    Example:
        >>> import torch
        >>> x, y = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
        >>> Sphere(2).log(x, y)
        tensor([0.0000, 1.5708])
    """

    n: int
    capabilities: ClassVar[frozenset[str]] = PRIMITIVES
    symmetric: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("n", self.n)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return (self.n,)

    def _exp(self, x: Point, u: Tangent) -> Point:
        a = x.double()
        v = u.double()
        # Functions of the squared length are smooth at u = 0.
        square = dot(v, v)
        return (cos_of_square(square) * a + sinc_of_square(square) * v).to(x.dtype)

    def _log(self, x: Point, y: Point) -> Tangent:
        a = x.double()
        b = y.double()
        chord = b - a
        # The division makes the result orthogonal to x even if rounding has moved x off the sphere. Without it, the
        # distance from the sphere would more than double in each step of a mean.
        orthogonal = chord - dot(a, chord) / dot(a, a) * a
        return (angle_per_sine(dot(orthogonal, orthogonal), dot(a, b)) * orthogonal).to(x.dtype)

    def _transport(self, x: Point, y: Point, u: Tangent) -> Tangent:
        a = x.double()
        b = y.double()
        v = u.double()
        # 1 + <x, y> is computed as |x + y|² / 2, which is accurate near the cut locus.
        total = a + b
        return (v - 2 * dot(b, v) / dot(total, total) * total).to(u.dtype)

    def _project_tangent(self, x: Point, u: Tangent) -> Tangent:
        a = x.double()
        # The first pass leaves a component ε‖u‖ along x. The second pass reduces it to ε times the projected length.
        return _orthogonal_part(a, _orthogonal_part(a, u.double())).to(u.dtype)

    def _project(self, x: Point) -> Point:
        a = x.double()
        return (a / dot(a, a).sqrt()).to(x.dtype)

    def _retract(self, x: Point, u: Tangent) -> Point:
        return self._project(x.double() + u.double()).to(x.dtype)

    def _inverse_retract(self, x: Point, y: Point) -> Tangent:
        a = x.double()
        b = y.double()
        # The difference of nearby points is accurate, and has the same orthogonal part as y.
        return (_orthogonal_part(a, b - a) / dot(a, b)).to(x.dtype)

    def _injectivity_radius(self, x: Point) -> Scalar:
        return x.new_full(x.shape[:-1], math.pi)


def _orthogonal_part(x: Tensor, u: Tensor) -> Tensor:
    """Compute the part of u that is orthogonal to the unit vector x."""
    return u - dot(x, u) * x
