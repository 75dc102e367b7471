"""The Grassmann manifold: subspaces, represented by classes of orthonormal bases."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from manifoldagg._validation import check_count, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds.embedded import Embedded
from manifoldagg.manifolds.manifold import PRIMITIVES, Point, Scalar, Tangent
from manifoldagg.manifolds.matrix import eye, matrix_exp, orthogonal_part, polar, sym

__all__ = ["Grassmann"]


@dataclass(frozen=True)
class Grassmann(Embedded):
    r"""Subspaces of $\mathbb{R}^n$ of dimension $p$, with $\langle u, v \rangle_x = \operatorname{tr}(u^\top v)$.

    A point is a class of $n \times p$ matrices with orthonormal columns: $x$ and $x q$, $q \in O(p)$, span the same
    subspace, and what they share is the projector $x x^\top$. Any representative will do; tangents at the
    representative $x$ are horizontal, $x^\top u = 0$, and $u q$ at $x q$ is the same tangent. With $S = u^\top u$, the
    SVD $y^\top x = A \cos\Theta\, R^\top$ of principal angles $\Theta$, the representative $\hat y = y q$ that is
    nearest to $x$, $q = A R^\top$, and $m = x + \hat y$,

    $$\exp_x u = x \cos\sqrt{S} + u \operatorname{sinc}\sqrt{S}, \qquad
      \log_x y = (1 - x x^\top)(\hat y - x)\, R \tfrac{\Theta}{\sin\Theta} R^\top, \qquad
      P_{x \to y} u = (u - 2 m (m^\top m)^{-1} m^\top u)\, q^\top.$$

    Both functions of $\sqrt{S}$ are entire in $S$. The first is $x V \cos\Sigma V^\top + U \sin\Sigma V^\top$ for
    $u = U \Sigma V^\top$; the last is the formula of [`Sphere`][manifoldagg.manifolds.Sphere] with a matrix for the
    cosine. $\sin\Theta$ is formed from $\hat y - x$, so that a small angle keeps its digits. Everything is computed in
    float64 and cast back. `log` depends on the class of $y$ only. `exp` has all derivatives; those of
    `log`, `transport`, `project` and `retract` are right up to the second, also at $y = x$ and where angles or
    singular values repeat; the third and higher ones are not. Where an angle is $\pi/2$, the cut locus, `log` and
    `transport` have no value: NaN, or, where rounding hides the right angle, those of one of the shortest geodesics.

    The injectivity radius is $\pi/2$, infinite for $p = n$, which is a single point with no tangent but 0.

    `project` is the polar factor: of all orthonormal bases the nearest. Where the columns of $x$ are dependent there is
    none: NaN, or, where rounding hides it, one of several.
    `retract` is $(x + u)(1 + u^\top u)^{-1/2}$, the polar factor of $x + u$, and `inverse_retract`
    $y (x^\top y)^{-1} - x$. `random_point` is uniform.

    Args:
        n: the dimension of the surrounding space.
        p: that of the subspaces, from 1 to n.

    Raises:
        ArgumentError: if `n` or `p` is not a positive integer, or `p` exceeds `n`.

    Source: Edelman, Arias, Smith 1998 for exp and transport; Bendokat, Zimmermann, Absil 2024, section 5.2, for log.

    Example:
        >>> import torch
        >>> x, y = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.6], [0.8]])
        >>> Grassmann(2, 1).log(x, y)
        tensor([[0.0000],
                [0.9273]])
        >>> torch.equal(Grassmann(2, 1).log(x, y), Grassmann(2, 1).log(x, -y))
        True
    """

    n: int
    p: int
    capabilities: ClassVar[frozenset[str]] = PRIMITIVES
    symmetric: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if check_count("p", self.p) > check_count("n", self.n):
            raise ArgumentError(f"p: expected an integer from 1 to n = {self.n}, got {short_repr(self.p)}")

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return (self.n, self.p)

    def _exp(self, x: Point, u: Tangent) -> Point:
        v = u.double()
        cosine, sinc = _cos_and_sinc(v.mT @ v)
        return (x.double() @ cosine + v @ sinc).to(x.dtype)

    def _log(self, x: Point, y: Point) -> Tangent:
        a = x.double()
        b = y.double()
        turn, cosines, basis = polar(b.mT @ a)
        step = b @ turn - a
        # Small angles keep their digits here; Θ / sin Θ is smooth in the cosine, and loses none to it.
        beside = orthogonal_part(a, step)
        _, sinc = _cos_and_sinc(_squared_angles(eye(turn) + sym(a.mT @ step), cosines.clamp(max=1).acos(), basis))
        # An inverse: forward derivatives of a solve carry no derivatives themselves.
        tangent: Tensor = beside @ torch.linalg.inv(sinc)
        return tangent.to(x.dtype)

    def _transport(self, x: Point, y: Point, u: Tangent) -> Tangent:
        a = x.double()
        b = y.double()
        v = u.double()
        turn, _, _ = polar(b.mT @ a)
        middle = a + b @ turn
        reflected: Tensor = v - 2 * middle @ torch.linalg.inv(middle.mT @ middle) @ (middle.mT @ v)
        return (reflected @ turn.mT).to(u.dtype)

    def _project_tangent(self, x: Point, u: Tangent) -> Tangent:
        return orthogonal_part(x.double(), u.double()).to(u.dtype)

    def _project(self, x: Point) -> Point:
        point, _, _ = polar(x.double())
        return point.to(x.dtype)

    def _retract(self, x: Point, u: Tangent) -> Point:
        return self._project(x.double() + u.double()).to(x.dtype)

    def _inverse_retract(self, x: Point, y: Point) -> Tangent:
        a = x.double()
        turn, _, _ = polar(y.double().mT @ a)
        aligned = y.double() @ turn
        # The part beside x of the nearest basis keeps the digits of a small angle.
        tangent: Tensor = orthogonal_part(a, aligned - a) @ torch.linalg.inv(a.mT @ aligned)
        return tangent.to(x.dtype)

    def _injectivity_radius(self, x: Point) -> Scalar:
        return x.new_full(x.shape[:-2], math.inf if self.p == self.n else math.pi / 2)

    def _random_point(self, batch: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Point:
        # Draws are the same in both precisions: in float64, then cast.
        return super()._random_point(batch, generator, torch.float64).to(dtype)

    def _random_tangent(self, x: Point, generator: torch.Generator) -> Tangent:
        return super()._random_tangent(x.double(), generator).to(x.dtype)

    def _invariant(self, x: Point) -> Tensor:
        r"""The projector $x x^\top$ (*batch, n, n) onto the subspace."""
        a = x.double()
        return (a @ a.mT).to(x.dtype)


def _cos_and_sinc(s: Tensor) -> tuple[Tensor, Tensor]:
    """cos √S and sin(√S)/√S for a symmetric S >= 0: the upper blocks of exp [[0, 1], [-S, 0]]."""
    # With √‖S‖ on either side the norm of the matrix is that of √S: fewer digits cancel.
    scale = s.detach().square().sum((-2, -1), keepdim=True).pow(0.25).clamp(min=1.0)
    zero = torch.zeros_like(s)
    p = s.shape[-1]
    rows = torch.cat([zero, scale * eye(s)], -1), torch.cat([-s / scale, zero], -1)
    upper = matrix_exp(torch.cat(rows, -2))[..., :p, :]
    return sym(upper[..., :p]), sym(upper[..., p:]) / scale


def _squared_angles(cosine: Tensor, angles: Tensor, basis: Tensor) -> Tensor:
    """The S with cos √S = `cosine`, whose angles and eigenvectors are known, with its first two derivatives.

    Newton's step adds nothing at a solution, and one right order to the derivatives each time that it is taken.
    """
    mean = (angles.unsqueeze(-1) + angles.unsqueeze(-2)) / 2
    half = (angles.unsqueeze(-1) - angles.unsqueeze(-2)) / 2
    # (cos a - cos b) / (a² - b²), with no difference to divide by.
    slopes = -torch.sinc(mean / math.pi) * torch.sinc(half / math.pi) / 2
    s = (basis * angles.square().unsqueeze(-2)) @ basis.mT
    for _ in range(2):
        residual = cosine - _cos_and_sinc(s)[0]
        s = s + basis @ ((basis.mT @ (residual - residual.detach()) @ basis) / slopes) @ basis.mT
    return s
