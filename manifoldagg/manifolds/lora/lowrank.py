"""The manifold of matrices of a fixed rank, as products of two factors up to a change of basis."""

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
    r"""$m \times n$ matrices $X = B A$ of a fixed rank, $\langle\xi, \eta\rangle = \operatorname{tr}(\xi^\top \eta)$.

    A point is one tensor (m + n, rank): $B$ (m, rank) over $A^\top$ (n, rank). It stands for $X$ alone: $B G$ and
    $G^{-1} A$ are the same point for every invertible $G$, a *gauge*. A tangent has the same shape, $\dot B$ over
    $\dot A^\top$, and stands for $\xi = \dot B A + B \dot A$; that of `project_tangent` has $B^\top \dot B = 0$, which
    makes it unique. With thin QRs $B = U R$ and $A^\top = V S$,

    $$\langle \xi, \eta \rangle = \langle M, M' \rangle + \langle U_p, U_p' \rangle + \langle V_p, V_p' \rangle, \quad
      M = U^\top \dot B S^\top + R \dot A V, \quad U_p = (1 - U U^\top) \dot B S^\top, \quad
      V_p = (1 - V V^\top) \dot A^\top R^\top .$$

    `retract` is orthographic: the $Y$ of that rank with $P_X(Y - X) = \xi$, $P_X$ the projection to tangents at $X$,

    $$Y = \bigl(B + \dot B S^\top [(A + \dot A) V]^{-1}\bigr)(A + \dot A), \qquad B^\top \dot B = 0,$$

    which agrees with the geodesic to second order; `inverse_retract` is $P_X(Y - X)$, for any $Y$.
    `project` takes a stack of any number of columns to the nearest matrix of the rank, by two thin QRs and the
    SVD of their small core; what has that many columns already is left as it is.

    Nothing here has the size of $X$, and no Gram matrix of a factor is formed: errors grow with the condition of the
    gauge, not with its square. Everything is computed in float64 and cast back. There is not a closed form of the
    geodesics, so `exp`, `log` and `transport` are not declared.

    Rules, averages and servers need none of them: on spaces whose leaves are flat or of low rank they take inner
    products and sums of the matrices themselves, and the nearest matrix of the rank, once a step.

    Where $B$ or $A$ lacks rank (as $B = 0$ at the start of a fine-tuning) the point is legal, and not smooth: `inner`
    is right, `project_tangent` keeps $\xi$, `inverse_retract`, `gradient` and `random_tangent` have only the directions
    that the factors span. Where $(A + \dot A) V$ is singular `retract` leaves its null space out.

    Args:
        m: rows of X.
        n: columns of X.
        rank: at most that of X.
        state_rank: at most that of what is kept of sums: of buffers, momentum, cached displacements and running means;
            four times `rank` where not given.

    Raises:
        ArgumentError: if one is not a positive integer, or `rank` exceeds `m` or `n`.

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
        if self.rank > (most := min(self.m, self.n)):
            raise ArgumentError(f"rank: expected at most {most}, the lesser of m and n, got {short_repr(self.rank)}")

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return (self.m + self.n, self.rank)

    def project(self, x: Float[Tensor, "..."]) -> Point:
        """Return the matrix of the rank nearest to that of a stack `x` (*batch, m + n, any): (*batch, *shape)."""
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
        if columns < self.rank:
            return torch.cat([x, x.new_zeros(*x.shape[:-1], self.rank - columns)], -1)
        return truncate(x, self.m, self.rank).point.to(x.dtype)

    def _retract(self, x: Point, u: Tangent) -> Point:
        b, a = self._split(x)
        left, right = self._factor_qrs(x)
        db, da = self._horizontal(left, right, u)
        moved = a + da
        # With V on its right the inverse has the condition of the gauge, and not its square.
        beside = db @ right.factor.mT @ torch.linalg.pinv(moved.mT @ right.basis)
        return torch.cat([b + beside, moved], -2).to(x.dtype)

    def _inverse_retract(self, x: Point, y: Point) -> Tangent:
        left, right = self._factor_qrs(x)
        to_left, to_right = self._factor_qrs(y)
        core = to_left.factor @ to_right.factor.mT
        # Of the difference Y - X, what is seen from U and, beside U, from V.
        seen = to_right.basis @ (left.basis.mT @ to_left.basis @ core).mT
        da = (seen - right.basis @ (left.factor @ right.factor.mT).mT) @ left.inverse.mT
        beside = orthogonal_part(left.basis, to_left.basis @ (core @ (to_right.basis.mT @ right.basis)))
        tangent: Tensor = torch.cat([beside @ right.inverse.mT, da], -2)
        return tangent.to(x.dtype)

    def _gradient(self, x: Point, derivative: Tangent) -> Tangent:
        left, right = self._factor_qrs(x)
        e, f = self._split(derivative)
        # One after the other: the first undoes a gauge, which the product of both would square.
        db = orthogonal_part(left.basis, e) @ right.inverse @ right.inverse.mT
        return torch.cat([db, f @ left.inverse @ left.inverse.mT], -2).to(derivative.dtype)

    def _random_point(self, batch: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Point:
        noise = torch.randn(*batch, *self.shape, generator=generator, dtype=torch.float64, device=generator.device)
        # Entries of X have variance 1.
        return (noise / math.sqrt(math.sqrt(self.rank))).to(dtype)

    def _random_tangent(self, x: Point, generator: torch.Generator) -> Tangent:
        left, right = self._factor_qrs(x)
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64, device=generator.device).to(x.device)
        db, da = self._split(noise)
        return torch.cat([orthogonal_part(left.basis, db) @ right.inverse.mT, da @ left.inverse.mT], -2).to(x.dtype)

    def _invariant(self, x: Point) -> Tensor:
        """The matrix X (*batch, m, n) itself: for tests, as nothing else here has its size."""
        b, a = self._split(x)
        return (b @ a.mT).to(x.dtype)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The part of B and the part of Aᵀ, in float64."""
        return x[..., : self.m, :].double(), x[..., self.m :, :].double()

    def _factor_qrs(self, x: Tensor) -> tuple[FactorQR, FactorQR]:
        b, a = self._split(x)
        return FactorQR.of(b, x.dtype), FactorQR.of(a, x.dtype)

    def _horizontal(self, left: FactorQR, right: FactorQR, u: Tensor) -> tuple[Tensor, Tensor]:
        """The factors of the same tangent whose first is orthogonal to B."""
        db, da = self._split(u)
        # What moves to the other factor is U (Uᵀ dB Sᵀ) Vᵀ, in which no gauge is left to be squared.
        inside = left.basis.mT @ db @ right.factor.mT
        return orthogonal_part(left.basis, db), da + right.full_basis @ (left.inverse @ inside).mT

    def _coordinates(self, left: FactorQR, right: FactorQR, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """M, U_p and V_p, whose squares add up."""
        db, da = self._split(u)
        down = db @ right.factor.mT
        along = da @ left.factor.mT
        # The full bases: what the factors do not span is measured too, once.
        u_basis, v_basis = left.full_basis, right.full_basis
        core = u_basis.mT @ down + (v_basis.mT @ along).mT
        return core, orthogonal_part(u_basis, down), orthogonal_part(v_basis, along)
