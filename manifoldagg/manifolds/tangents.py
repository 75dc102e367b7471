"""Linear algebra with tangent vectors of low-rank matrices, for models with LoRA adapters.

A sum of two low-rank matrices can have a higher rank, so it must be truncated. In contrast, a sum of two tangent
vectors at the same point is again a tangent vector at this point, so it needs no truncation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manifoldagg.kernels import Row
from manifoldagg.manifolds.ambient import AmbientSpace, copied_space
from manifoldagg.manifolds.lora.factors import JointBasis, TruncatedSVD
from manifoldagg.manifolds.lora.lowrank import LowRank
from manifoldagg.manifolds.manifold import Manifold

__all__ = ["TangentSpace"]


@dataclass(frozen=True, eq=False)
class TangentSpace(AmbientSpace):
    """The tangent space at one point $X$, with the interface of `AmbientSpace`.

    At each low-rank leaf, inner products and linear combinations of rows use the projection $P_X Z$ of each row $Z$ to
    the tangent space. For a difference of points, `inverse_retract` computes this projection. A new point is computed
    by `retract` instead of a truncation. A stored row is the tangent as a matrix, which can later be projected to the
    tangent space at another point.

    If the matrix of a leaf has a lower rank than its factors, the leaf has no tangent space. It is then treated as in
    `AmbientSpace`, and the entry `ambient` of `diagnostics` counts such leaves.

    Attributes:
        base_point: the point $X$.
        smooth_leaves: the indices of the leaves with a tangent space.

    Example:
        >>> x = torch.tensor([[1.0], [0.0], [2.0], [0.0]])  # diag(2, 0)
        >>> y = torch.tensor([[0.0], [1.0], [0.0], [1.0]])  # diag(0, 1), whose projection to tangents at x is 0
        >>> tangents = TangentSpace.at(LowRank(2, 2, 1), x)
        >>> tangents.gram([y, y], minus=[None, x])
        tensor([[[0., 0.],
                 [0., 4.]]], dtype=torch.float64)
        >>> tangents.combine(x, [y], [0.5], minus=[x]).flatten()
        tensor([1., 0., 1., 0.])
    """

    base_point: Row = ()
    smooth_leaves: frozenset[int] = frozenset()

    @staticmethod
    def at(space: Manifold, base_point: Row) -> "TangentSpace":
        """Return the tangent space at a point of an `ambient` space.

        Raises:
            ArgumentError: as [`AmbientSpace.of`][manifoldagg.manifolds.ambient.AmbientSpace.of].
        """
        ambient = AmbientSpace.of(space, base_point[0] if isinstance(base_point, tuple) else base_point)
        smooth = frozenset(
            i
            for i in ambient._low_rank_leaves
            if _is_smooth(copied_space(ambient.leaves[i].space), ambient._piece(base_point, i))
        )
        diagnostics = {**ambient.diagnostics, "ambient": float(len(ambient._low_rank_leaves) - len(smooth))}
        return TangentSpace(ambient.leaves, diagnostics, base_point=base_point, smooth_leaves=smooth)

    def _low_rank_gram(self, i: int, rows: Sequence[Row], minus: Sequence[Row | None]) -> Tensor:
        if i not in self.smooth_leaves:
            return super()._low_rank_gram(i, rows, minus)
        x = self._base_leaf(i)
        u = self._tangents(i, rows, minus)
        a, b = torch.tril_indices(len(u), len(u))
        values = (
            copied_space(self.leaves[i].space)._inner(x.expand(len(a), *x.shape), u[a], u[b]).reshape(len(a), -1).sum(1)
        )
        # Each pair is computed once, so the matrix is exactly symmetric even if the metric rounds.
        lower: Tensor = values.new_zeros(len(u), len(u)).index_put((a, b), values)
        return (lower + lower.tril(-1).mT).cpu()

    def _combine_low_rank(
        self, i: int, base: Row, rows: Sequence[Row], minus: Sequence[Row | None], coefficients: Sequence[float]
    ) -> tuple[Tensor, TruncatedSVD | None]:
        start = self._piece(base, i)
        if i not in self.smooth_leaves or not torch.equal(start, self._piece(self.base_point, i)):
            return super()._combine_low_rank(i, base, rows, minus, coefficients)
        u = self._combine_tangents(i, rows, minus, coefficients)
        # `retract` of a zero tangent would change the factors by rounding.
        if not u.any():
            return start, None
        space: LowRank = copied_space(self.leaves[i].space)
        return space._retract(start.double(), u).to(start.dtype), None

    def _weighted_stacks(
        self, i: int, rows: Sequence[Row], minus: Sequence[Row | None], coefficients: Sequence[float]
    ) -> tuple[list[Tensor], list[float]]:
        if i not in self.smooth_leaves:
            return super()._weighted_stacks(i, rows, minus, coefficients)
        m = copied_space(self.leaves[i].space).m
        x = self._base_leaf(i)
        u = self._combine_tangents(i, rows, minus, coefficients)
        # The columns of dB A and B dA are concatenated, so the stack represents their sum.
        first = torch.cat([u[..., :m, :], x[..., m:, :]], -2)
        second = torch.cat([x[..., :m, :], u[..., m:, :]], -2)
        return [torch.cat([first, second], -1)], [1.0]

    def _base_leaf(self, i: int) -> Tensor:
        """Return leaf i of the base point, in float64."""
        return self._piece(self.base_point, i).double()

    def _combine_tangents(
        self, i: int, rows: Sequence[Row], minus: Sequence[Row | None], coefficients: Sequence[float]
    ) -> Tensor:
        """Compute a linear combination of the tangents that belong to rows at leaf i."""
        weights = torch.tensor([float(c) for c in coefficients], dtype=torch.float64)
        u = self._tangents(i, rows, minus)
        # Rows with the coefficient 0 are excluded, because 0 * inf is NaN.
        used = weights != 0
        tangent: Tensor = torch.tensordot(weights[used].to(u), u[used.to(u.device)], dims=1)
        return tangent

    def _tangents(self, i: int, rows: Sequence[Row], minus: Sequence[Row | None]) -> Tensor:
        """Project the differences `rows[j] - minus[j]` of one LoRA adapter onto the tangent space.

        Args:
            i: the index of the adapter (leaf).
            rows: the minuends.
            minus: the subtrahends. `None` is the zero vector.

        Returns:
            The tangents (k, *batch, m + n, rank).
        """
        space = copied_space(self.leaves[i].space)
        x = self._base_leaf(i)
        # Rows often share a subtrahend, whose tangent is computed once.
        cache: dict[int | None, Tensor] = {}

        def tangent(row: Row | None) -> Tensor:
            """Project `row` (or 0 if it is `None`) minus the base point onto the tangent space."""
            key = None if row is None else id(row)
            if key not in cache:
                cache[key] = space._inverse_retract(
                    x, torch.zeros_like(x) if row is None else self._piece(row, i).double()
                )
            return cache[key]

        # `tangent` projects a row minus the base point. The projection is linear, so the base point cancels in the
        # difference of two tangents.
        pairs = zip(rows, minus, strict=True)
        return torch.stack([tangent(minuend) - tangent(subtrahend) for minuend, subtrahend in pairs])


def _is_smooth(space: LowRank, x: Tensor) -> bool:
    """Return whether the matrix of every copy has the full rank of the space, up to rounding."""
    # The small core has the singular values of the matrix, so the matrix itself is not formed.
    # The tolerance has the form of numpy.linalg.matrix_rank, with the dtype in which the point is stored.
    values = torch.linalg.svdvals(JointBasis.of([x], space.m).cores[0])
    least = max(space.m, space.n) * torch.finfo(x.dtype).eps * values[..., :1]
    return bool((values[..., space.rank - 1 :] > least).all())
