"""The Grassmann manifold, whose points are the subspaces of a fixed dimension.

A subspace is represented by a matrix whose columns form an orthonormal basis of it. All orthonormal bases of a subspace
represent the same point.
"""

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
    r"""The $p$-dimensional subspaces of $\mathbb{R}^n$, with $\langle u, v \rangle_x = \operatorname{tr}(u^\top v)$.

    A subspace is represented by any $n \times p$ matrix $x$ whose orthonormal columns span it. For $q \in O(p)$, the
    matrix $x q$ represents the same subspace. All methods accept any representative. A tangent at $x$ is a matrix $u$
    with $x^\top u = 0$. The matrix $u q$ at $x q$ represents the same tangent.

    Let $y^\top x = A \cos\Theta\, R^\top$ be an SVD with the principal angles $\Theta$. The representative of $y$
    nearest to $x$ is $\hat y = y q$ with $q = A R^\top$. With $S = u^\top u$ and $m = x + \hat y$,

    $$\exp_x u = x \cos\sqrt{S} + u \operatorname{sinc}\sqrt{S}, \qquad
      \log_x y = (1 - x x^\top)(\hat y - x)\, R \tfrac{\Theta}{\sin\Theta} R^\top, \qquad
      P_{x \to y} u = (u - 2 m (m^\top m)^{-1} m^\top u)\, q^\top.$$

    Both functions of $\sqrt{S}$ are entire functions of $S$. For an SVD $u = U \Sigma V^\top$, the exponential is
    $x V \cos\Sigma V^\top + U \sin\Sigma V^\top$. The transport generalises the formula of
    [`Sphere`][manifoldagg.manifolds.Sphere].

    Numerical properties:

    - All primitives are computed in float64 and cast back. $\sin\Theta$ is computed from $\hat y - x$, so small angles
      have a small relative error.
    - `log` depends only on the subspace of $y$, not on its representative.
    - `exp` has correct derivatives of all orders. `log`, `transport`, `project` and `retract` have correct first and
      second derivatives, also at $y = x$ and for repeated angles or singular values. Their higher derivatives are not
      correct.
    - If an angle is $\pi/2$ (the cut locus), `log` and `transport` are undefined and return NaN. If rounding hides the
      right angle, they return the values of one of the shortest geodesics.
    - The injectivity radius is $\pi/2$. For $p = n$, the manifold is a single point, and the radius is infinite.
    - `project` is the polar factor, the nearest orthonormal basis. If the columns of $x$ are linearly dependent,
      `project` returns NaN, or one of several nearest bases if rounding hides the dependence.
    - `retract` is the polar factor of $x + u$, $(x + u)(1 + u^\top u)^{-1/2}$. `inverse_retract` is
      $y (x^\top y)^{-1} - x$.
    - `random_point` is uniform.

    Args:
        n: the dimension of the ambient space.
        p: the dimension of the subspaces, from 1 to n.

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
        # The sine is computed from the difference, so small angles are accurate. Θ / sin Θ is a smooth function of the
        # cosine, so the rounding error of the cosine is harmless.
        orthogonal = orthogonal_part(a, step)
        # The matrix of cosines is xᵀ y q = 1 + xᵀ step. The clamp removes rounding errors above 1, where acos is NaN.
        _, sinc = _cos_and_sinc(_squared_angles(eye(turn) + sym(a.mT @ step), cosines.clamp(max=1).acos(), basis))
        # `inv` is used because forward derivatives of `solve` have no derivatives themselves.
        tangent: Tensor = orthogonal @ torch.linalg.inv(sinc)
        return tangent.to(x.dtype)

    def _transport(self, x: Point, y: Point, u: Tangent) -> Tangent:
        a = x.double()
        b = y.double()
        v = u.double()
        turn, _, _ = polar(b.mT @ a)
        middle = a + b @ turn
        # The reflection maps tangents at x to tangents at the aligned basis y q. The factor qᵀ then changes the basis
        # to y.
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
        # The orthogonal part is computed from the difference of aligned bases, which is accurate for small angles.
        tangent: Tensor = orthogonal_part(a, aligned - a) @ torch.linalg.inv(a.mT @ aligned)
        return tangent.to(x.dtype)

    def _injectivity_radius(self, x: Point) -> Scalar:
        return x.new_full(x.shape[:-2], math.inf if self.p == self.n else math.pi / 2)

    def _random_point(self, batch: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Point:
        # Drawing in float64 and casting gives the same point in both precisions for equal seeds.
        return super()._random_point(batch, generator, torch.float64).to(dtype)

    def _random_tangent(self, x: Point, generator: torch.Generator) -> Tangent:
        return super()._random_tangent(x.double(), generator).to(x.dtype)

    def _invariant(self, x: Point) -> Tensor:
        r"""Return the projector $x x^\top$ (*batch, n, n) onto the subspace."""
        a = x.double()
        return (a @ a.mT).to(x.dtype)


def _cos_and_sinc(s: Tensor) -> tuple[Tensor, Tensor]:
    r"""Compute $\cos\sqrt{S}$ and $\sin(\sqrt{S})/\sqrt{S}$ for a symmetric positive semi-definite matrix $S$.

    Both results are blocks of the matrix exponential of $[0, I;\; -S, 0]$. Unlike an eigendecomposition, this
    exponential is differentiable everywhere, even if eigenvalues are equal or 0.
    """
    # Without scaling, the off-diagonal blocks have the norms 1 and ‖S‖. Scaling both to the norm √‖S‖ reduces the norm
    # of the matrix and the cancellation.
    scale = s.detach().square().sum((-2, -1), keepdim=True).pow(0.25).clamp(min=1.0)
    zero = torch.zeros_like(s)
    p = s.shape[-1]
    rows = torch.cat([zero, scale * eye(s)], -1), torch.cat([-s / scale, zero], -1)
    upper = matrix_exp(torch.cat(rows, -2))[..., :p, :]
    return sym(upper[..., :p]), sym(upper[..., p:]) / scale


def _squared_angles(cosine: Tensor, angles: Tensor, basis: Tensor) -> Tensor:
    r"""Compute the symmetric matrix $S$ with $\cos\sqrt{S} = C$, with correct first and second derivatives.

    Args:
        cosine: the matrix $C$, with derivatives.
        angles: the square roots of the eigenvalues of $S$, without derivatives.
        basis: the eigenvectors of $C$, without derivatives.
    """
    mean = (angles.unsqueeze(-1) + angles.unsqueeze(-2)) / 2
    half = (angles.unsqueeze(-1) - angles.unsqueeze(-2)) / 2
    # (cos a - cos b) / (a² - b²), written without a division by a difference of angles.
    slopes = -torch.sinc(mean / math.pi) * torch.sinc(half / math.pi) / 2
    # The eigenvectors determine the value of S. They have no derivatives if two angles are equal, so two Newton steps
    # compute the derivatives. The steps do not change the value.
    s = (basis * angles.square().unsqueeze(-2)) @ basis.mT
    for _ in range(2):
        residual = cosine - _cos_and_sinc(s)[0]
        s = s + basis @ ((basis.mT @ (residual - residual.detach()) @ basis) / slopes) @ basis.mT
    return s
