r"""The special orthogonal group, which consists of the rotations of $\mathbb{R}^n$."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from manifoldagg._validation import check_count
from manifoldagg.manifolds.embedded import Embedded
from manifoldagg.manifolds.manifold import PRIMITIVES, Point, Scalar, Tangent
from manifoldagg.manifolds.matrix import differentiable_log, eye, matrix_exp, polar, skew

__all__ = ["SpecialOrthogonal"]


@dataclass(frozen=True)
class SpecialOrthogonal(Embedded):
    r"""Rotations of $\mathbb{R}^n$ with the Frobenius metric $\langle u, v \rangle_x = \operatorname{tr}(u^\top v)$.

    The metric is bi-invariant. Tangents at $x$ are matrices $x A$ with a skew-symmetric $A$.

    $$\exp_x u = x\, e^{x^\top u}, \qquad \log_x y = x \log(x^\top y), \qquad
      P_{x \to y} u = x\, e^{A/2}\, x^\top u\, e^{A/2}, \quad A = \log(x^\top y).$$

    The symmetric part $C$ and the skew part $K$ of $R = x^\top y$ commute. Therefore
    $\log R = \tfrac{\theta}{\sin\theta}(C)\, K$, where $\theta / \sin\theta$ is a function of $\cos\theta$.

    Numerical properties:

    - All primitives are computed in float64 and cast back. $K$ is computed from $y - x$, so small angles have a small
      relative error.
    - First and second derivatives are correct, also at $y = x$ and for repeated angles. Higher derivatives of `log` and
      `transport` are not correct.
    - If an angle is $\pi$ (the cut locus), `log` and `transport` are undefined. The injectivity radius is
      $\pi\sqrt{2}$. For $n = 1$, the manifold is a single point, and the radius is infinite.
    - `retract` is the Cayley transform $x\,(1 - A/2)^{-1}(1 + A/2)$.
    - `project` is the nearest rotation. For an SVD $x = U \Sigma V^\top$, the nearest rotation is
      $U \operatorname{diag}(1, \dots, 1, \det U V) V^\top$. First and second derivatives are correct if no two singular
      values have the sum 0.
    - `random_point` is uniform (Haar measure).

    Args:
        n: the number of rows.

    Raises:
        ArgumentError: if `n` is not a positive integer.

    Example:
        >>> import torch
        >>> x, y = torch.eye(2), torch.tensor([[0.0, -1.0], [1.0, 0.0]])
        >>> SpecialOrthogonal(2).log(x, y)
        tensor([[ 0.0000, -1.5708],
                [ 1.5708,  0.0000]])
    """

    n: int
    capabilities: ClassVar[frozenset[str]] = PRIMITIVES - {"inverse_retract"}
    symmetric: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("n", self.n)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return (self.n, self.n)

    def _exp(self, x: Point, u: Tangent) -> Point:
        a = x.double()
        return (a @ matrix_exp(skew(a.mT @ u.double()))).to(x.dtype)

    def _log(self, x: Point, y: Point) -> Tangent:
        a = x.double()
        return (a @ _velocity(a, y.double())).to(x.dtype)

    def _transport(self, x: Point, y: Point, u: Tangent) -> Tangent:
        a = x.double()
        # Parallel transport applies half of the rotation on each side. Translation on one side is not parallel.
        half = matrix_exp(_velocity(a, y.double()) / 2)
        return (a @ half @ skew(a.mT @ u.double()) @ half).to(u.dtype)

    def _project_tangent(self, x: Point, u: Tangent) -> Tangent:
        a = x.double()
        return (a @ skew(a.mT @ u.double())).to(u.dtype)

    def _project(self, x: Point) -> Point:
        point, _, _ = polar(x.double(), proper=True)
        return point.to(x.dtype)

    def _retract(self, x: Point, u: Tangent) -> Point:
        a = x.double()
        half = skew(a.mT @ u.double()) / 2
        # The eigenvalues of a skew-symmetric matrix are imaginary, so 1 - A/2 is always invertible.
        unit = eye(half)
        # `inv` is used because forward derivatives of `solve` have no derivatives themselves.
        rotation: Tensor = torch.linalg.inv(unit - half) @ (unit + half)
        return (a @ rotation).to(x.dtype)

    def _injectivity_radius(self, x: Point) -> Scalar:
        return x.new_full(x.shape[:-2], math.inf if self.n == 1 else math.pi * math.sqrt(2))

    def _random_point(self, batch: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Point:
        # Drawing in float64 and casting gives the same point in both precisions for equal seeds.
        return super()._random_point(batch, generator, torch.float64).to(dtype)


def _velocity(x: Tensor, y: Tensor) -> Tensor:
    """Compute the skew-symmetric matrix log(xᵀ y)."""
    rotation = x.mT @ y
    # `eigh` raises an error for the whole batch if one matrix is not finite. Such a matrix is replaced by the identity,
    # and its result is NaN.
    whole = rotation.detach().isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    rotation = torch.where(whole, rotation, eye(x))
    with torch.no_grad():
        middle = (rotation + rotation.mT).detach() / 2
        cosines, basis = torch.linalg.eigh(middle)
        across = torch.where(whole, skew((x.mT @ (y - x)).detach()), 0.0)
        # sin θ = |K v| is accurate near 0 and π, where arccos loses digits.
        sines = (across @ basis).square().sum(-2).sqrt()
        cut = ((sines == 0) & (cosines < 0)).any(-1).unsqueeze(-1).unsqueeze(-1)
        ratios = torch.where(sines == 0, 1.0, torch.atan2(sines, cosines) / torch.where(sines == 0, 1.0, sines))
        value = skew((basis * ratios.unsqueeze(-2)) @ basis.mT @ across)
        # The derivative of exp at a skew A = V diag(iμ) V* is exp(i(μ + ν)/2) sinc((μ - ν)/2) in that basis.
        turns, frame = torch.linalg.eigh(-1j * value)
        mean = (turns.unsqueeze(-1) + turns.unsqueeze(-2)) / 2
        half = (turns.unsqueeze(-1) - turns.unsqueeze(-2)) / 2
        slopes = torch.exp(1j * mean) * torch.sinc(half / math.pi)

    def solve(e: Tensor) -> Tensor:
        return skew((frame @ ((frame.mH @ e.to(frame.dtype) @ frame) / slopes) @ frame.mH).real)

    return torch.where(whole & ~cut, differentiable_log(value, rotation, solve), math.nan)
