"""Tangent spaces at one point: projected sums and differences of points of low-rank leaves."""

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
    r"""The tangent space at one point $X$: as `AmbientSpace`, with rows projected to tangents.

    Of a row $Z$ inner products and sums take $P_X Z$ at each leaf of low rank, which is what `inverse_retract` sees of
    a difference of points, and a point is `retract` of the sum in place of its truncation. What is kept is the tangent
    as a matrix: with it at another point is what is tangent of it there.

    A leaf whose $X$ has a lower rank than its factors has no such tangents: there everything is as in `AmbientSpace`,
    and `diagnostics` says at how many leaves (`ambient`).

    Attributes:
        base_point: $X$.
        smooth_leaves: the leaves with tangents.

    Example:
        >>> x = torch.tensor([[1.0], [0.0], [2.0], [0.0]])  # diag(2, 0)
        >>> y = torch.tensor([[0.0], [1.0], [0.0], [1.0]])  # diag(0, 1), of which nothing is tangent there
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
        """Return the tangent space at a point of a space that is `ambient`.

        Raises:
            ArgumentError: as [`AmbientSpace.of`][manifoldagg.manifolds.ambient.AmbientSpace.of].
        """
        around = AmbientSpace.of(space, base_point[0] if isinstance(base_point, tuple) else base_point)
        smooth = frozenset(
            i
            for i in around._low_rank_leaves
            if _is_smooth(copied_space(around.leaves[i].space), around._piece(base_point, i))
        )
        told = {**around.diagnostics, "ambient": float(len(around._low_rank_leaves) - len(smooth))}
        return TangentSpace(around.leaves, told, base_point=base_point, smooth_leaves=smooth)

    def _low_rank_gram(self, i: int, rows: Sequence[Row], minus: Sequence[Row | None]) -> Tensor:
        if i not in self.smooth_leaves:
            return super()._low_rank_gram(i, rows, minus)
        x = self._base_leaf(i)
        u = self._tangents(i, rows, minus)
        a, b = torch.tril_indices(len(u), len(u))
        values = (
            copied_space(self.leaves[i].space)._inner(x.expand(len(a), *x.shape), u[a], u[b]).reshape(len(a), -1).sum(1)
        )
        lower: Tensor = values.new_zeros(len(u), len(u)).index_put((a, b), values)
        return (lower + lower.tril(-1).mT).cpu()

    def _combine_low_rank(
        self, i: int, base: Row, rows: Sequence[Row], minus: Sequence[Row | None], coefficients: Sequence[float]
    ) -> tuple[Tensor, TruncatedSVD | None]:
        start = self._piece(base, i)
        if i not in self.smooth_leaves or not torch.equal(start, self._piece(self.base_point, i)):
            return super()._combine_low_rank(i, base, rows, minus, coefficients)
        u = self._combine_tangents(i, rows, minus, coefficients)
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
        # dB A + B dA, side by side.
        down = torch.cat([u[..., :m, :], x[..., m:, :]], -2)
        across = torch.cat([x[..., :m, :], u[..., m:, :]], -2)
        return [torch.cat([down, across], -1)], [1.0]

    def _base_leaf(self, i: int) -> Tensor:
        return self._piece(self.base_point, i).double()

    def _combine_tangents(
        self, i: int, rows: Sequence[Row], minus: Sequence[Row | None], line: Sequence[float]
    ) -> Tensor:
        """What of a combination of rows is tangent."""
        weights = torch.tensor([float(c) for c in line], dtype=torch.float64)
        u = self._tangents(i, rows, minus)
        # Of a row that has no part in it nothing is multiplied: 0 * inf is not a number.
        used = weights != 0
        found: Tensor = torch.tensordot(weights[used].to(u), u[used.to(u.device)], dims=1)
        return found

    def _tangents(self, i: int, rows: Sequence[Row], minus: Sequence[Row | None]) -> Tensor:
        """What of rows is tangent: (k, *batch, m + n, rank)."""
        space = copied_space(self.leaves[i].space)
        x = self._base_leaf(i)
        seen: dict[int | None, Tensor] = {}

        def tangent(row: Row | None) -> Tensor:
            """The way from X to a point, or to 0: the projection of a difference is a difference of such."""
            key = None if row is None else id(row)
            if key not in seen:
                seen[key] = space._inverse_retract(
                    x, torch.zeros_like(x) if row is None else self._piece(row, i).double()
                )
            return seen[key]

        return torch.stack([tangent(plus) - tangent(less) for plus, less in zip(rows, minus, strict=True)])


def _is_smooth(space: LowRank, x: Tensor) -> bool:
    """Whether the factors of a point, and of all copies, have the rank of the space in their dtype."""
    values = torch.linalg.svdvals(JointBasis.of([x], space.m).cores[0])
    least = max(space.m, space.n) * torch.finfo(x.dtype).eps * values[..., :1]
    return bool((values[..., space.rank - 1 :] > least).all())
