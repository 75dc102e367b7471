"""The manifold of matrices of fixed rank, which are represented by two factors."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from manifoldagg._validation import check_count, check_shape, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds.lora.factors import FactorQR, truncate
from manifoldagg.manifolds.manifold import PRIMITIVES, Manifold, Point, Scalar, Tangent
from manifoldagg.manifolds.matrix import orthogonal_part

__all__ = ["LowRank"]


@dataclass(frozen=True)
class LowRank(Manifold):
    r"""Matrices $X = B A$ of fixed rank, with $\langle\xi, \eta\rangle = \operatorname{tr}(\xi^\top \eta)$.

    $X$ is an $m \times n$ matrix. A point is one tensor (m + n, rank), with $B$ (m, rank) on top of $A^\top$ (n, rank).
    It represents only the matrix $X$: for every invertible matrix $G$, called a *gauge*, the factors $B G$ and
    $G^{-1} A$ are the same point.

    A tangent has the same shape, with $\dot B$ on top of $\dot A^\top$, and represents $\xi = \dot B A + B \dot A$. The
    result of `project_tangent` has $B^\top \dot B = 0$, which makes the representation unique. With the thin QR
    decompositions $B = U R$ and $A^\top = V S$,

    $$\langle \xi, \eta \rangle = \langle M, M' \rangle + \langle U_p, U_p' \rangle + \langle V_p, V_p' \rangle, \quad
      M = U^\top \dot B S^\top + R \dot A V, \quad U_p = (1 - U U^\top) \dot B S^\top, \quad
      V_p = (1 - V V^\top) \dot A^\top R^\top .$$

    `retract` is the orthographic retraction, which agrees with the geodesic to second order. It returns the matrix $Y$
    of the given rank with $P_X(Y - X) = \xi$, where $P_X$ is the projection to tangents at $X$:

    $$Y = \bigl(B + \dot B S^\top [(A + \dot A) V]^{-1}\bigr)(A + \dot A), \qquad B^\top \dot B = 0 .$$

    `inverse_retract` is $P_X(Y - X)$ for any $Y$. `project` maps a stack with any number of columns to the nearest
    matrix of the given rank. The method uses two thin QR decompositions and the SVD of their small core. A stack that
    already has this number of columns is unchanged.

    Properties:

    - No matrix of the size of $X$ and no Gram matrix of a factor is computed. Errors are therefore proportional to the
      condition number of the factors and not to its square. All primitives are computed in float64 and cast back.
    - Geodesics have no closed form, so `exp`, `log` and `transport` are not declared. Rules, averages and servers
      need only inner products and sums of the matrices, and one nearest matrix of the given rank per step.
    - $B$ or $A$ can have a lower rank, for example if $B = 0$ at the start of a fine-tuning. The point is then valid,
      but the manifold is not smooth there. `inner` is correct, and `project_tangent` preserves $\xi$.
      `inverse_retract`, `gradient` and `random_tangent` contain only the directions that the factors span.
    - If $(A + \dot A) V$ is singular, `retract` ignores its null space.

    Args:
        m: the number of rows of X.
        n: the number of columns of X.
        rank: the maximum rank of X.
        state_rank: the maximum rank of stored sums, such as buffers, momentum, cached displacements and running means.
            The default is four times `rank`.

    Raises:
        ArgumentError: if an argument is not a positive integer, or `rank` exceeds `m` or `n`.

    Source: Vandereycken 2013; Absil and Oseledets 2015 for the orthographic retraction.

    Example:
        >>> import torch
        >>> space = LowRank(2, 2, 1)
        >>> x = torch.tensor([[1.0], [0.0], [2.0], [0.0]])  # [[2, 0], [0, 0]]
        >>> u = torch.tensor([[0.0], [1.0], [0.0], [0.0]])  # [[0, 0], [2, 0]]
        >>> space.inner(x, u, u)
        tensor(4.)
        >>> space.retract(x, u).flatten()
        tensor([1., 1., 2., 0.])
        >>> space.inner(10 * x / torch.tensor([[1.0], [1.0], [100.0], [100.0]]), 10 * u, 10 * u)
        tensor(4.)
    """

    m: int
    n: int
    rank: int
    state_rank: int | None = field(default=None, kw_only=True)
    ambient: ClassVar[bool] = True
    capabilities: ClassVar[frozenset[str]] = PRIMITIVES - {"exp", "log", "transport", "injectivity_radius"}

    def __post_init__(self) -> None:
        for name in ("m", "n", "rank"):
            check_count(name, getattr(self, name))
        if self.state_rank is not None:
            check_count("state_rank", self.state_rank)
        if self.rank > (max_rank := min(self.m, self.n)):
            raise ArgumentError(f"rank: expected at most min(m, n) = {max_rank}, got {short_repr(self.rank)}")

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return (self.m + self.n, self.rank)

    def project(self, x: Float[Tensor, "..."]) -> Point:
        """Return the matrix of the given rank that is nearest to the matrix of a stack of factors.

        Args:
            x: the stack (*batch, m + n, any).

        Returns:
            The factors of the matrix (*batch, *shape).
        """
        check_shape("x", x, self.m + self.n, None, batch=True)
        return self._project(x)

    def _inner(self, x: Point, u: Tangent, v: Tangent) -> Scalar:
        left, right = self._factor_qrs(x)
        of_u, of_v = (self._coordinates(left, right, w) for w in (u, v))
        sums = [(a * b).sum((-2, -1)) for a, b in zip(of_u, of_v, strict=True)]
        return (sums[0] + sums[1] + sums[2]).to(torch.promote_types(u.dtype, v.dtype))

    def _project_tangent(self, x: Point, u: Tangent) -> Tangent:
        return torch.cat(self._horizontal(*self._factor_qrs(x), u), -2).to(u.dtype)

    def _project(self, x: Point) -> Point:
        columns = x.shape[-1]
        if columns == self.rank:
            return x
        # Zero columns change only the representation.
        if columns < self.rank:
            return torch.cat([x, x.new_zeros(*x.shape[:-1], self.rank - columns)], -1)
        return truncate(x, self.m, self.rank).point.to(x.dtype)

    def _retract(self, x: Point, u: Tangent) -> Point:
        b, a = self._split(x)
        left, right = self._factor_qrs(x)
        db, da = self._horizontal(left, right, u)
        new_a = a + da
        # The product with V has the condition number of the gauge. A Gram matrix would have its square.
        new_b = b + db @ right.factor.mT @ torch.linalg.pinv(new_a.mT @ right.basis)
        return torch.cat([new_b, new_a], -2).to(x.dtype)

    def _inverse_retract(self, x: Point, y: Point) -> Tangent:
        left, right = self._factor_qrs(x)
        to_left, to_right = self._factor_qrs(y)
        core = to_left.factor @ to_right.factor.mT
        # The first component of Y - X is in the column space of X. The second is in the row space, and orthogonal to
        # the column space.
        uy = to_right.basis @ (left.basis.mT @ to_left.basis @ core).mT
        da = (uy - right.basis @ (left.factor @ right.factor.mT).mT) @ left.inverse.mT
        orthogonal = orthogonal_part(left.basis, to_left.basis @ (core @ (to_right.basis.mT @ right.basis)))
        tangent: Tensor = torch.cat([orthogonal @ right.inverse.mT, da], -2)
        return tangent.to(x.dtype)

    def _gradient(self, x: Point, derivative: Tangent) -> Tangent:
        left, right = self._factor_qrs(x)
        e, f = self._split(derivative)
        # The inverses are applied one after the other. Their product would square the condition number of the gauge.
        db = orthogonal_part(left.basis, e) @ right.inverse @ right.inverse.mT
        return torch.cat([db, f @ left.inverse @ left.inverse.mT], -2).to(derivative.dtype)

    def _random_point(self, batch: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Point:
        noise = torch.randn(*batch, *self.shape, generator=generator, dtype=torch.float64, device=generator.device)
        # With this scale, the entries of X have variance 1.
        return (noise / math.sqrt(math.sqrt(self.rank))).to(dtype)

    def _random_tangent(self, x: Point, generator: torch.Generator) -> Tangent:
        left, right = self._factor_qrs(x)
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64, device=generator.device).to(x.device)
        db, da = self._split(noise)
        # The inverses cancel the factors Sᵀ and Rᵀ of the metric, so the components M, U_p and V_p are standard normal.
        return torch.cat([orthogonal_part(left.basis, db) @ right.inverse.mT, da @ left.inverse.mT], -2).to(x.dtype)

    def _invariant(self, x: Point) -> Tensor:
        """Multiply the two factors of a low-rank matrix, and return the matrix (*batch, m, n)."""
        # Different factors of the same matrix have equal results. The matrix needs much more memory than its factors,
        # so only tests call this method.
        b, a = self._split(x)
        return (b @ a.mT).to(x.dtype)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the float64 factors B (*batch, m, any) and Aᵀ (*batch, n, any) of a stack."""
        return x[..., : self.m, :].double(), x[..., self.m :, :].double()

    def _factor_qrs(self, x: Tensor) -> tuple[FactorQR, FactorQR]:
        r"""Return the QR decompositions of the factors $B$ and $A^\top$ of a point."""
        b, a = self._split(x)
        # The dtype of x determines which singular values count as 0 in the pseudoinverses of the factors.
        return FactorQR.of(b, x.dtype), FactorQR.of(a, x.dtype)

    def _horizontal(self, left: FactorQR, right: FactorQR, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return the representation (dB, dAᵀ) of a tangent in which dB is orthogonal to B."""
        db, da = self._split(u)
        # The part U (Uᵀ dB Sᵀ) Vᵀ, which moves to the other factor, does not depend on the gauge. The condition number
        # of the gauge is therefore not squared.
        inside = left.basis.mT @ db @ right.factor.mT
        return orthogonal_part(left.basis, db), da + right.full_basis @ (left.inverse @ inside).mT

    def _coordinates(self, left: FactorQR, right: FactorQR, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Decompose a tangent into three orthogonal components, whose squared norms add up."""
        # The docstring of the class defines these components, M, U_p and V_p.
        db, da = self._split(u)
        columns = db @ right.factor.mT
        rows = da @ left.factor.mT
        # The full bases include directions that rank-deficient factors do not span. These count exactly once.
        u_basis, v_basis = left.full_basis, right.full_basis
        core = u_basis.mT @ columns + (v_basis.mT @ rows).mT
        return core, orthogonal_part(u_basis, columns), orthogonal_part(v_basis, rows)
