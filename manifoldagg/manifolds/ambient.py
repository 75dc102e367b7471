"""Linear algebra with the parameters of models that contain LoRA adapters.

The matrix of a LoRA adapter has a low rank, but the sum of two such matrices can have a higher rank. A linear
combination is therefore computed in two steps. The first step computes the sum in the vector space of all matrices (the
ambient space). The second step projects the sum onto the nearest matrix of the given rank.

The code calls each parameter of a model a leaf. A flat leaf is an ordinary tensor. A low-rank leaf is the matrix of an
adapter, which is stored as two factors.
"""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from manifoldagg._validation import check_finite, check_shape, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.kernels import Row, TensorList, combine, gram
from manifoldagg.manifolds.lora.factors import JointBasis, TruncatedSVD, combine_stacks
from manifoldagg.manifolds.lora.lowrank import LowRank
from manifoldagg.manifolds.manifold import Leaf, Manifold
from manifoldagg.manifolds.power import Power

__all__ = ["FLAT_AMBIENT", "AmbientSpace", "copied_space"]

STATE_RANK_FACTOR = 4
"""The default of `state_rank`, as a multiple of the rank of the leaf."""
UNCHANGED_ROUNDINGS = 16
"""The maximum relative change of a matrix that counts as unchanged, in units of machine epsilon."""
LeafCoefficients = Sequence[Any]
"""The coefficients of k vectors: k numbers for all leaves together, or k numbers for each leaf."""


@dataclass(frozen=True, eq=False)
class AmbientSpace:
    """The vector space that contains a manifold: low-rank leaves become m x n matrices, and flat leaves are unchanged.

    Like the kernels, the class computes inner products and linear combinations of vectors, which are called *rows*.
    Differences of rows are never stored. On a flat space, the class calls the kernels directly.

    On a space with low-rank leaves, a row is a point, or a tuple with one tensor for each leaf. The tensor of a
    low-rank leaf is a stack (*batch, m + n, any), which contains the two factors of a matrix. To compute inner
    products, all stacks are expressed in a joint orthonormal basis, in which each matrix is a small core. To compute a
    linear combination, the columns of all stacks are concatenated. One truncation then reduces the result to the rank
    of the leaf.

    Attributes:
        leaves: the leaves of the space, or an empty tuple for a flat space.
        diagnostics: the effect of all truncations so far; empty for a flat space. `truncated` and `state_truncated`
            are the total Frobenius norms of the truncated parts of points and of stored rows. `tied` is the number of
            truncations at which a retained and a truncated singular value are equal.

    Example:
        >>> from manifoldagg.manifolds import LowRank
        >>> x, y = torch.tensor([[1.0], [0.0], [2.0], [0.0]]), torch.tensor([[0.0], [1.0], [0.0], [1.0]])
        >>> ambient = AmbientSpace.of(LowRank(2, 2, 1), x)  # diag(2, 0) and diag(0, 1)
        >>> ambient.gram([x, y], minus=[y, None])
        tensor([[[ 5., -1.],
                 [-1.,  1.]]], dtype=torch.float64)
        >>> ambient.combine(x, [y], [1.0]).flatten().square().round(), ambient.diagnostics["truncated"]
        (tensor([2., 0., 2., 0.]), 1.0)
    """

    leaves: tuple[Leaf, ...] = ()
    diagnostics: dict[str, float] = field(default_factory=dict)
    _joints: dict[int, tuple[list[Tensor], JointBasis]] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(space: Manifold, point: Tensor) -> "AmbientSpace":
        """Return the ambient vector space of a manifold that is `flat` or `ambient`.

        Args:
            space: the manifold.
            point: any point of the manifold.

        Raises:
            ArgumentError: if a low-rank leaf is nested in another kind of leaf.
        """
        if not space.ambient:
            return FLAT_AMBIENT
        leaves = space.leaves(point)
        for leaf in leaves:
            if not (leaf.space.flat or isinstance(copied_space(leaf.space), LowRank)):
                raise ArgumentError(f"space: expected leaves that are flat or LowRank, got {leaf}")
        return AmbientSpace(leaves, {"truncated": 0.0, "state_truncated": 0.0, "tied": 0.0})

    @property
    def segments(self) -> dict[str, int] | None:
        """The names and lengths of the leaves; `None` if the space is flat."""
        return {leaf.name: self._size(i) for i, leaf in enumerate(self.leaves)} or None

    def gram(
        self, rows: Sequence[Row], *, minus: Sequence[Row | None] | None = None, segments: Sequence[int] | None = None
    ) -> Tensor:
        """Compute the matrix of inner products of k vectors, separately for each parameter of the model (each leaf).

        Vector i is the difference `rows[i] - minus[i]`, or `rows[i]` if `minus` or `minus[i]` is `None`. If the models
        have no adapters, the method returns the result of [`gram`][manifoldagg.kernels.gram] for the same arguments.

        Returns:
            The matrix of inner products (S, k, k) for each of S leaves. If `segments` is `None`, the sum of these
            matrices (1, k, k).
        """
        if not self.leaves:
            return gram(rows, minus=minus, segments=segments)
        subtrahends = [None] * len(rows) if minus is None else minus
        # The kernels read all flat leaves in one call, with one segment for each leaf.
        flat = self._flat_leaves
        products = {}
        if flat:
            vectors = self._flat_rows(rows, subtrahends)
            lengths = [self._size(i) for i in flat]
            products = dict(zip(flat, gram(vectors[0], minus=vectors[1], segments=lengths), strict=True))
        for i in self._low_rank_leaves:
            products[i] = self._low_rank_gram(i, rows, subtrahends)
        # Flat and low-rank leaves were computed separately, so they are brought back to the order of the leaves.
        parts = torch.stack([products[i] for i in range(len(self.leaves))])
        return parts if segments is not None else parts.sum(0, keepdim=True)

    def combine(
        self,
        base: Any,
        rows: Sequence[Row],
        coefficients: LeafCoefficients,
        *,
        minus: Sequence[Row | None] | None = None,
        segments: Sequence[int] | None = None,
        out: Any = None,
    ) -> Any:
        """Add a linear combination of vectors to a point, and project the sum to the nearest point of the space.

        Raises:
            ArgumentError: if the result is not finite at a low-rank leaf.
        """
        if not self.leaves:
            return combine(base, rows, coefficients, minus=minus, segments=segments, out=out)
        subtrahends = [None] * len(rows) if minus is None else minus
        pieces = self._combine_flat(base, rows, coefficients, subtrahends, None)
        truncations = []
        for i in self._low_rank_leaves:
            own = self._leaf_coefficients(i, coefficients)
            pieces[i], truncation = self._combine_low_rank(i, base, rows, subtrahends, own)
            truncations += [] if truncation is None else [truncation]
        self._record_truncations("truncated", truncations)
        ordered = [pieces[i] for i in range(len(self.leaves))]
        if isinstance(base, tuple):
            return TensorList(ordered) if out is None else _copy_into(out, ordered)
        point = torch.cat([piece.flatten() for piece in ordered]).view(base.shape)
        return point if out is None else out.copy_(point)

    def for_state(
        self,
        rows: Sequence[Row],
        coefficients: LeafCoefficients,
        *,
        minus: Sequence[Row | None],
        dtype: torch.dtype,
    ) -> tuple[Tensor, ...]:
        """Compute a linear combination of vectors that a server stores between rounds, such as a momentum.

        The matrix of each LoRA adapter is replaced by the nearest matrix of the rank `state_rank`, an option of the
        manifold `LowRank`. By default, this rank is four times the rank of the adapter, so that later sums of stored
        vectors are more accurate.
        """
        pieces = self._combine_flat(None, rows, coefficients, minus, dtype)
        truncations = []
        for i in self._low_rank_leaves:
            space = copied_space(self.leaves[i].space)
            stacks, weights = self._weighted_stacks(i, rows, minus, self._leaf_coefficients(i, coefficients))
            svd = self._truncate_sum(i, stacks, weights, space.state_rank or STATE_RANK_FACTOR * space.rank)
            truncations.append(svd)
            # `point` pads the factors to the rank. A stored row needs no padding, because its rank may vary.
            pieces[i] = svd.point[..., : svd.values.shape[-1]].to(dtype)
        self._record_truncations("state_truncated", truncations)
        return tuple([pieces[i] for i in range(len(self.leaves))])

    def to_point(self, row: Row, like: Tensor) -> Tensor:
        """Return the point of the space nearest to a row, in the shape and dtype of `like`."""
        point: Tensor = self.combine(like.new_zeros(like.shape), [row], [1.0])
        return point

    def tangent_lengths(self, rows: Sequence[Row], coefficients: Sequence[float], point: Tensor) -> tuple[float, float]:
        """Measure how accurately a point of the manifold approximates a linear combination of vectors.

        The difference between a combination and its nearest point is orthogonal to the tangent space at this point. The
        smaller the tangent component of the difference, the more accurate is the point. The method measures only the
        matrices of LoRA adapters.

        Returns:
            The norm of the tangent component of the difference, and the norm of the combination (the reference for a
            relative error).
        """
        tangent_norms = [0.0]
        norms = [0.0]
        for i in self._low_rank_leaves:
            space = copied_space(self.leaves[i].space)
            base = self._piece(point, i)
            total = combine_stacks(coefficients, [self._piece(row, i) for row in rows], space.m)
            # `inverse_retract` projects the difference of the combination and the point to tangents.
            tangent = space._inverse_retract(base, total)
            # An inner product of a small tangent can be negative by rounding.
            tangent_norms += space._inner(base, tangent, tangent).clamp(min=0).sqrt().flatten().tolist()
            norms += JointBasis.of([total], space.m).gram(torch.ones(1, 1)).clamp(min=0).sqrt().flatten().tolist()
        # `hypot` scales its arguments, so their squares neither overflow nor underflow.
        return math.hypot(*tangent_norms), math.hypot(*norms)

    def check(self, name: str, row: Any, like: Tensor) -> Row:
        """Check that a vector is finite and has a valid shape, and return the vector.

        Args:
            name: the name of the vector in error messages.
            row: the vector. It is one tensor with the shape of a point, or a tuple with one tensor for each leaf. In a
                tuple, the factors of LoRA adapters can have any rank.
            like: any point of the space.

        Raises:
            ArgumentError: if the vector is invalid.
        """
        if isinstance(row, Tensor):
            return check_finite(name, check_shape(name, row, *like.shape))
        if not isinstance(row, tuple | list) or len(row) != len(self.leaves):
            raise ArgumentError(
                f"{name}: expected a tensor for each of {len(self.leaves)} leaves, got {short_repr(row)}"
            )
        for i, piece in enumerate(row):
            axes: list[int | None] = [*self._piece(like, i).shape]
            # The last axis of a stack is its rank, which may differ from the rank of the leaf.
            if i in self._low_rank_leaves:
                axes[-1] = None
            check_finite(f"{name}[{i}]", check_shape(f"{name}[{i}]", piece, *axes))
        return tuple(row)

    def combine_exact(
        self, rows: Sequence[Row], coefficients: LeafCoefficients, *, minus: Sequence[Row | None]
    ) -> tuple[Tensor, ...]:
        """Compute a linear combination of vectors in float64, without truncating its low-rank matrices.

        A low-rank matrix is stored as two factors. The factors of a sum are the concatenated factors of its terms, so
        the number of their columns is the sum of the ranks of the terms.
        """
        pieces = self._combine_flat(None, rows, coefficients, minus, torch.float64)
        for i in self._low_rank_leaves:
            stacks, weights = self._weighted_stacks(i, rows, minus, self._leaf_coefficients(i, coefficients))
            pieces[i] = combine_stacks(weights, stacks, copied_space(self.leaves[i].space).m)
        return tuple([pieces[i] for i in range(len(self.leaves))])

    @property
    def _flat_leaves(self) -> list[int]:
        return [i for i, leaf in enumerate(self.leaves) if leaf.space.flat]

    @property
    def _low_rank_leaves(self) -> list[int]:
        return [i for i, leaf in enumerate(self.leaves) if not leaf.space.flat]

    def _size(self, i: int) -> int:
        """Return the number of entries of leaf i in a point."""
        return len(range(*self.leaves[i].part.indices(sys.maxsize)))

    def _piece(self, row: Row, i: int) -> Tensor:
        """Return leaf i of a row, which is a point or a tuple with one tensor for each leaf."""
        if isinstance(row, tuple):
            return row[i]
        leaf = self.leaves[i]
        return row.reshape(-1)[leaf.part].view(leaf.space.shape)

    def _leaf_coefficients(self, i: int, coefficients: LeafCoefficients) -> Sequence[float]:
        """Return the k coefficients of leaf i. All leaves can share one list of coefficients."""
        first = coefficients[0] if len(coefficients) else 0.0
        return coefficients[i] if isinstance(first, list | tuple) else coefficients

    def _flat_rows(
        self, rows: Sequence[Row], minus: Sequence[Row | None]
    ) -> tuple[list[TensorList], list[TensorList | None]]:
        """Return the flat leaves of rows and subtrahends as operands of the kernels."""
        # Operands are compared by identity, so one row must be converted to one operand.
        lists: dict[int, TensorList] = {}
        for row in (*rows, *minus):
            if row is not None and id(row) not in lists:
                lists[id(row)] = TensorList([self._piece(row, i).reshape(-1) for i in self._flat_leaves])
        return [lists[id(row)] for row in rows], [None if row is None else lists[id(row)] for row in minus]

    def _combine_flat(
        self,
        base: Row | None,
        rows: Sequence[Row],
        coefficients: LeafCoefficients,
        minus: Sequence[Row | None],
        dtype: torch.dtype | None,
    ) -> dict[int, Tensor]:
        """Compute the flat leaves of a linear combination, in `dtype` if it is given."""
        flat = self._flat_leaves
        if not flat:
            return {}
        minuends, subtrahends = self._flat_rows(rows, minus)
        start = None if base is None else self._flat_rows([base], [])[0][0]
        like = minuends[0] if start is None else start
        # The kernels write to contiguous memory. Another target would need a temporary copy.
        out = TensorList([torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format) for x in like])
        table = [list(self._leaf_coefficients(i, coefficients)) for i in flat]
        result = combine(start, minuends, table, minus=subtrahends, segments=[self._size(i) for i in flat], out=out)
        return dict(zip(flat, result, strict=True))

    def _low_rank_gram(self, i: int, rows: Sequence[Row], minus: Sequence[Row | None]) -> Tensor:
        # The copies of a power are separate matrices, so their inner products are added.
        """Compute the inner products (k, k) of rows at the low-rank leaf i."""
        joint, combinations = self._joint(i, rows, minus)
        return joint.gram(combinations).reshape(-1, len(rows), len(rows)).sum(0).cpu()

    def _combine_low_rank(
        self, i: int, base: Row, rows: Sequence[Row], minus: Sequence[Row | None], coefficients: Sequence[float]
    ) -> tuple[Tensor, TruncatedSVD | None]:
        """Compute one low-rank leaf of the sum of a point and a linear combination of vectors.

        Returns:
            The leaf, and its truncated SVD. The SVD is `None` if no truncation was necessary.
        """
        space = copied_space(self.leaves[i].space)
        start = self._piece(base, i)
        stacks, weights = self._distinct_stacks(i, (base, *rows), (None, *minus), (1.0, *coefficients))
        is_single_stack = len(stacks) == 1 and weights == [1.0] and stacks[0].shape[-1] <= space.rank
        if is_single_stack or self._is_unchanged(i, start, stacks, weights):
            # An unchanged leaf, or a client's leaf with coefficient 1, is returned without new rounding errors.
            return space._project(stacks[0] if is_single_stack else start).to(start.dtype), None
        # Balanced factors contain square roots of singular values. Without `drops_rounding`, a rounding error ε that
        # remains after a cancellation would leave factors of size √ε.
        svd = self._truncate_sum(i, stacks, weights, space.rank, drops_rounding=True)
        return svd.point.to(start.dtype), svd

    def _weighted_stacks(
        self, i: int, rows: Sequence[Row], minus: Sequence[Row | None], coefficients: Sequence[float]
    ) -> tuple[list[Tensor], list[float]]:
        """Express leaf `i` of a linear combination as a weighted sum of stacks of factors."""
        # `TangentSpace` overrides this method and returns tangents.
        return self._distinct_stacks(i, rows, minus, coefficients)

    def _distinct_stacks(
        self, i: int, rows: Sequence[Row], minus: Sequence[Row | None], coefficients: Sequence[float]
    ) -> tuple[list[Tensor], list[float]]:
        """Return the distinct stacks of leaf `i` in a linear combination, and their coefficients."""
        stacks: list[Tensor] = []
        weights: list[float] = []
        index_of_row: dict[int, int] = {}
        for c, minuend, subtrahend in zip(coefficients, rows, minus, strict=True):
            for sign, row in ((1.0, minuend), (-1.0, subtrahend)):
                if row is None:
                    continue
                if id(row) not in index_of_row:
                    index_of_row[id(row)] = _index_or_append(stacks, self._piece(row, i))
                index = index_of_row[id(row)]
                weights += [0.0] * (len(stacks) - len(weights))
                # Coefficients of equal stacks are added, so that a point that is added and subtracted cancels exactly.
                weights[index] += sign * float(c)
        # If all coefficients are 0, the result is one stack with weight 0, which determines the shapes.
        used = [j for j, weight in enumerate(weights) if weight != 0] or [0]
        return [stacks[j] for j in used], [weights[j] for j in used]

    def _joint(self, i: int, rows: Sequence[Row], minus: Sequence[Row | None]) -> tuple[JointBasis, Tensor]:
        """Express rows minus their subtrahends in a joint basis of the low-rank leaf i.

        Returns:
            The basis, and a matrix (k, number of cores) with the coefficients of each row.
        """
        stacks: list[Tensor] = []
        indices = [
            [None if row is None else _index_or_append(stacks, self._piece(row, i)) for row in pair]
            for pair in zip(rows, minus, strict=True)
        ]
        joint, cores = self._basis(i, stacks)
        combinations = torch.zeros(len(rows), len(joint.cores), dtype=torch.float64)
        for combination, (minuend, subtrahend) in zip(combinations, indices, strict=True):
            # The difference of two equal stacks is exactly 0, and not a rounding error.
            if minuend is not None:
                combination[cores[minuend]] += 1.0
            if subtrahend is not None:
                combination[cores[subtrahend]] -= 1.0
        return joint, combinations

    def _basis(self, i: int, stacks: list[Tensor]) -> tuple[JointBasis, list[int]]:
        """Return orthonormal bases for the columns and for the rows of several low-rank matrices.

        Returns:
            The bases with the coordinates (cores) of all matrices, and the index of the core of each matrix.
        """
        # Computing a basis is expensive, so the last basis of each leaf is cached. `gram` and `combine` of one step use
        # the same stacks, so the second call finds the basis of the first.
        known, joint = self._joints.get(i, ([], None))
        indices = [_index_of(known, stack) for stack in stacks]
        if joint is None or None in indices:
            joint = JointBasis.of(stacks, copied_space(self.leaves[i].space).m)
            self._joints[i] = (stacks, joint)
            indices = [*range(len(stacks))]
        return joint, [index for index in indices if index is not None]

    def _is_unchanged(self, i: int, start: Tensor, stacks: list[Tensor], weights: list[float]) -> bool:
        """Return whether a combination of stacks equals the stack `start`, up to rounding."""
        # The base may have cancelled out of the combination, so its stack is added again for the comparison.
        all_stacks = [*stacks]
        start_index = _index_or_append(all_stacks, start)
        joint, cores = self._basis(i, all_stacks)
        combinations = torch.zeros(2, len(joint.cores), dtype=torch.float64)
        # If the start was appended, `cores` has one entry more than `weights`.
        for core, weight in zip(cores, weights, strict=False):
            combinations[0, core] = weight
        combinations[0, cores[start_index]] -= 1.0
        combinations[1, cores[start_index]] = 1.0
        # The squared norms of the change and of the start come from the same cores. The change is combined before it is
        # squared, so it does not cancel.
        step, square = joint.gram(combinations).reshape(-1, 2, 2).sum(0).diagonal().tolist()
        return bool(step <= (UNCHANGED_ROUNDINGS * torch.finfo(torch.float64).eps) ** 2 * square)

    def _truncate_sum(
        self, i: int, stacks: list[Tensor], weights: list[float], rank: int, drops_rounding: bool = False
    ) -> TruncatedSVD:
        """Approximate a weighted sum of low-rank matrices by the nearest matrix of the given rank.

        If `drops_rounding` is true, singular values that may be rounding errors are set to 0.
        """
        joint, cores = self._basis(i, stacks)
        combination = torch.zeros(len(joint.cores), dtype=torch.float64)
        for core, weight in zip(cores, weights, strict=True):
            combination[core] = weight
        try:
            svd = joint.combine(combination, rank)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # public, and not in torch's stubs
            raise ArgumentError(f"points: expected a finite sum at {self.leaves[i]}, got NaN or infinity") from None
        return svd.without_rounding(joint.rounding(combination, svd)) if drops_rounding else svd

    def _record_truncations(self, key: str, truncations: Iterable[TruncatedSVD]) -> None:
        """Add the errors of truncations to `diagnostics[key]`, and count tied singular values."""
        errors = []
        for svd in truncations:
            errors += svd.error.flatten().tolist()
            self.diagnostics["tied"] += float(svd.is_tied.sum())
        # The truncated parts of different leaves are orthogonal, so their squared norms add up.
        self.diagnostics[key] += math.hypot(*errors)


FLAT_AMBIENT = AmbientSpace()
"""The ambient space of every space without low-rank leaves."""


def copied_space(space: Any) -> Any:
    """Return the space of one copy of a power, or the space itself if it is not a power."""
    while isinstance(space, Power):
        space = space.space
    return space


def _index_of(stacks: Sequence[Tensor], stack: Tensor) -> int | None:
    """Return the index of the first stack that equals `stack`, or `None` if there is none."""
    # Equal shapes are a cheap necessary condition. `torch.equal` reads both stacks.
    for index, other in enumerate(stacks):
        if other is stack or (other.shape == stack.shape and other.dtype == stack.dtype and torch.equal(other, stack)):
            return index
    return None


def _index_or_append(stacks: list[Tensor], stack: Tensor) -> int:
    """Return the index of `stack` in `stacks`. If it is missing, append it first."""
    # Equal stacks share one index, so that a stack that is added and subtracted cancels exactly.
    index = _index_of(stacks, stack)
    if index is None:
        index = len(stacks)
        stacks.append(stack)
    return index


def _copy_into(out: Sequence[Tensor], pieces: Sequence[Tensor]) -> Any:
    for target, piece in zip(out, pieces, strict=True):
        target.copy_(piece.view_as(target))
    return out
