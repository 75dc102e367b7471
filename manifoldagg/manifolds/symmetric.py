"""Symmetric positive definite matrices with the affine-invariant metric."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from manifoldagg._validation import check_count
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds.manifold import PRIMITIVES, Manifold, Point, Scalar, Tangent
from manifoldagg.manifolds.matrix import differentiable_log, eye, matrix_exp, sym

__all__ = ["SymmetricPositiveDefinite"]


@dataclass(frozen=True)
class SymmetricPositiveDefinite(Manifold):
    r"""The symmetric positive definite $n \times n$ matrices with the affine-invariant metric.

    $$\langle u, v \rangle_x = \operatorname{tr}(x^{-1} u\, x^{-1} v).$$

    With the Cholesky factor $x = L L^\top$ and $W(u) = L^{-1} u L^{-\top}$, which maps $x$ to the identity,

    $$\exp_x u = L\, e^{W(u)} L^\top, \qquad \log_x y = L \log(W(y))\, L^\top, \qquad
      P_{x \to y} u = L\, W(y)^{1/2}\, W(u)\, W(y)^{1/2} L^\top = E u E^\top, \quad E = (y x^{-1})^{1/2}.$$

    These formulas are equivalent to the common formulas with $x^{1/2}$ instead of $L$.

    Numerical properties:

    - All primitives are computed in float64 and cast back. If $y$ is close to $x$, $\log W(y)$ is computed from
      $W(y - x)$, which is accurate for small distances.
    - First and second derivatives are correct, also for repeated eigenvalues. Higher derivatives of `log` and
      `transport` are not correct.
    - The skew part of an argument is ignored.
    - `retract` is $x + u + \tfrac12 u x^{-1} u$, which is positive definite for every `u`.
    - `project` returns the symmetric part if it is positive definite. Otherwise, there is no nearest point, because the
      set is open. `project` then increases eigenvalues to $4 n \varepsilon$ times the largest absolute eigenvalue,
      where $\varepsilon$ is the machine epsilon of the dtype.
    - `random_point` draws condition numbers up to 100. `random_tangent` is standard normal in the metric.
    - The smallest eigenvalue of a point with condition number $c$ has a relative rounding error of $c\,\varepsilon$. At
      a distance $t$ from a point with condition number $c_0$, $c$ can be as large as $c_0 e^{\sqrt{2} t}$.

    Args:
        n: the number of rows.

    Raises:
        ArgumentError: if `n` is not a positive integer. Methods raise it if a point is not positive definite.

    Example:
        >>> import torch
        >>> x, y = torch.eye(2), torch.tensor([[1.0, 0.0], [0.0, 4.0]])
        >>> SymmetricPositiveDefinite(2).log(x, y)
        tensor([[0.0000, 0.0000],
                [0.0000, 1.3863]])
    """

    n: int
    open: ClassVar[bool] = True
    capabilities: ClassVar[frozenset[str]] = PRIMITIVES - {"inverse_retract"}
    symmetric: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("n", self.n)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return (self.n, self.n)

    def _inner(self, x: Point, u: Tangent, v: Tangent) -> Scalar:
        factor = _cholesky("x", x)
        return (_whiten(factor, u.double()) * _whiten(factor, v.double())).sum((-2, -1)).to(u.dtype)

    def _exp(self, x: Point, u: Tangent) -> Point:
        factor = _cholesky("x", x)
        return _restore(factor, matrix_exp(_whiten(factor, sym(u.double())))).to(x.dtype)

    def _log(self, x: Point, y: Point) -> Tangent:
        factor, velocity = self._velocity(x, y)
        return _restore(factor, velocity).to(x.dtype)

    def _transport(self, x: Point, y: Point, u: Tangent) -> Tangent:
        factor, velocity = self._velocity(x, y)
        half = matrix_exp(velocity / 2)
        return _restore(factor, half @ _whiten(factor, sym(u.double())) @ half).to(u.dtype)

    def _project_tangent(self, x: Point, u: Tangent) -> Tangent:
        return sym(u)

    def _project(self, x: Point) -> Point:
        symmetric = sym(x.double())
        with torch.no_grad():
            values, basis = torch.linalg.eigh(symmetric.detach())
            largest = values.abs().amax(-1, keepdim=True)
            floor = (4 * self.n * torch.finfo(x.dtype).eps * largest).clamp(min=torch.finfo(x.dtype).tiny)
            # The increase is added to the matrix, so a positive definite matrix does not change by rounding.
            lift = (basis * (floor - values).clamp(min=0).unsqueeze(-2)) @ basis.mT
        point: Tensor = symmetric + lift
        return point.to(x.dtype)

    def _retract(self, x: Point, u: Tangent) -> Point:
        factor = _cholesky("x", x)
        step = _whiten(factor, sym(u.double()))
        # 1 + s + s²/2 = ((1 + s)² + 1) / 2 is positive definite for every symmetric s.
        return _restore(factor, eye(step) + step + step @ step / 2).to(x.dtype)

    def _gradient(self, x: Point, derivative: Tangent) -> Tangent:
        # The gradient g = x D x satisfies tr(x⁻¹ g x⁻¹ v) = tr(D v) for every tangent v.
        a = sym(x.double())
        return sym(a @ sym(derivative.double()) @ a).to(x.dtype)

    def _injectivity_radius(self, x: Point) -> Scalar:
        return x.new_full(x.shape[:-2], math.inf)

    def _random_point(self, batch: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Point:
        device = generator.device
        noise = torch.randn(*batch, self.n, self.n, generator=generator, dtype=torch.float64, device=device)
        # Eigenvalues from 0.1 to 10 limit the condition number to 100.
        exponents = 2 * torch.rand(*batch, self.n, generator=generator, dtype=torch.float64, device=device) - 1
        basis = torch.linalg.qr(noise).Q
        return sym((basis * (10**exponents).unsqueeze(-2)) @ basis.mT).to(dtype)

    def _random_tangent(self, x: Point, generator: torch.Generator) -> Tangent:
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64, device=generator.device)
        return _restore(_cholesky("x", x), sym(noise.to(x.device))).to(x.dtype)

    def _velocity(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the Cholesky factor L of `x`, and the matrix V = log(L⁻¹ y L⁻ᵀ), for positive definite `x` and `y`.

        The logarithm of `y` at `x` is L V Lᵀ.
        """
        factor = _cholesky("x", x)
        # This factorisation only checks that y is positive definite.
        _cholesky("y", y.detach())
        target = sym(_whiten(factor, sym(y.double())))
        with torch.no_grad():
            step = sym(_whiten(factor, sym(y.double() - x.double())).detach())
            # For eigenvalues λ of W(y) - 1 within 1/2, log1p is accurate. The sum 1 + λ would lose the digits of small
            # eigenvalues.
            near = (step.square().sum((-2, -1)) < 0.25)[..., None, None]
            values, basis = torch.linalg.eigh(torch.where(near, step, target.detach()))
            logs = torch.where(near[..., 0], torch.where(near[..., 0], values, 0.0).log1p(), values.log())
        # The divided difference (e^a - e^b) / (a - b) is the derivative of exp in the eigenbasis.
        mean = (logs.unsqueeze(-1) + logs.unsqueeze(-2)) / 2
        half = (logs.unsqueeze(-1) - logs.unsqueeze(-2)) / 2
        # It is computed as e^mean sinh(half) / half, because the quotient cancels for close eigenvalues.
        slopes = mean.exp() * torch.where(half == 0, 1.0, half.sinh() / torch.where(half == 0, 1.0, half))
        value = (basis * logs.unsqueeze(-2)) @ basis.mT
        return factor, differentiable_log(value, target, lambda e: basis @ ((basis.mT @ e @ basis) / slopes) @ basis.mT)


def _cholesky(name: str, x: Tensor) -> Tensor:
    """Compute the Cholesky factors of the symmetric parts of matrices.

    Raises:
        ArgumentError: if a matrix is not positive definite.
    """
    try:
        factor: Tensor = torch.linalg.cholesky(sym(x.double()))
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]  # public, and not in torch's stubs
        raise ArgumentError(f"{name}: expected positive definite matrices, got another matrix: {error}") from None
    return factor


def _whiten(factor: Tensor, u: Tensor) -> Tensor:
    """Compute L⁻¹ u L⁻ᵀ."""
    left = torch.linalg.solve_triangular(factor, u, upper=False)
    both: Tensor = torch.linalg.solve_triangular(factor, left.mT, upper=False)
    return both.mT


def _restore(factor: Tensor, w: Tensor) -> Tensor:
    """Compute L w Lᵀ, exactly symmetric."""
    return sym(factor @ w @ factor.mT)
