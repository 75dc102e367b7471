"""Ambient spaces: sums and differences of points of flat and low-rank leaves, and the projection to a leaf."""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from manifoldagg._validation import check_finite, check_shape
from manifoldagg.errors import ArgumentError
from manifoldagg.kernels import Row, TensorList, combine, gram
from manifoldagg.manifolds.lora.factors import JointBasis, TruncatedSVD, combine_stacks
from manifoldagg.manifolds.lora.lowrank import LowRank
from manifoldagg.manifolds.manifold import Leaf, Manifold
from manifoldagg.manifolds.power import Power

__all__ = ["FLAT_AMBIENT", "AmbientSpace", "copied_space"]

STATE_RANK_FACTOR = 4
"""What is kept of a leaf has so many times its rank, where the leaf does not say."""
UNCHANGED_ROUNDINGS = 16
"""Roundings of the length of a matrix: what moves it by no more does not move it."""
LeafCoefficients = Sequence[Any]
"""k numbers, or for each leaf k numbers."""


@dataclass(frozen=True, eq=False)
class AmbientSpace:
    r"""The ambient vector space: a flat leaf's is itself, that of `LowRank` contains all m x n matrices.

    It knows inner products and sums of *rows*, as the kernels do, and differences of them that are never formed. On a
    flat space they are the kernels' own. Where a leaf is of low rank a row is a point, or a tuple with one tensor for
    each leaf, that of a low-rank one a stack (*batch, m + n, any) of factors: inner products come from small cores in
    one basis of all stacks, a sum is their columns side by side, and one truncation brings it back to the leaf.

    Attributes:
        leaves: of the space; none where it is flat.
        diagnostics: what truncations did since this was made: `truncated` and `state_truncated`, the Frobenius norms of
            what they left out of points and of what is kept (added up over truncations), and `tied`, at how many of
            them singular values were equal at the cut. Nothing where the space is flat.

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
        """Return the ambient space of a space that is `flat` or `ambient`, with points like `point`.

        Raises:
            ArgumentError: naming a leaf of low rank within another kind of leaf.
        """
        if not space.ambient:
            return FLAT_AMBIENT
        leaves = space.leaves(point)
        for leaf in leaves:
            if not (leaf.space.flat or isinstance(copied_space(leaf.space), LowRank)):
                raise ArgumentError(f"space: expected leaves that are flat, or of low rank themselves, not so: {leaf}")
        return AmbientSpace(leaves, {"truncated": 0.0, "state_truncated": 0.0, "tied": 0.0})

    @property
    def segments(self) -> dict[str, int] | None:
        """The names and lengths of the leaves; `None` if the space is flat."""
        return {leaf.name: self._size(i) for i, leaf in enumerate(self.leaves)} or None

    def gram(
        self, rows: Sequence[Row], *, minus: Sequence[Row | None] | None = None, segments: Sequence[int] | None = None
    ) -> Tensor:
        """Compute inner products (S, k, k) of rows as [`gram`][manifoldagg.kernels.gram]; segments are leaves."""
        if not self.leaves:
            return gram(rows, minus=minus, segments=segments)
        less = [None] * len(rows) if minus is None else minus
        flat = self._flat_leaves
        found = {}
        if flat:
            vectors = self._flat_rows(rows, less)
            lengths = [self._size(i) for i in flat]
            found = dict(zip(flat, gram(vectors[0], minus=vectors[1], segments=lengths), strict=True))
        for i in self._low_rank_leaves:
            found[i] = self._low_rank_gram(i, rows, less)
        parts = torch.stack([found[i] for i in range(len(self.leaves))])
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
        """Add a combination of rows to a point, and return the nearest point of the space.

        Raises:
            ArgumentError: where a low-rank leaf would not be finite.
        """
        if not self.leaves:
            return combine(base, rows, coefficients, minus=minus, segments=segments, out=out)
        less = [None] * len(rows) if minus is None else minus
        pieces = self._combine_flat(base, rows, coefficients, less, None)
        cuts = []
        for i in self._low_rank_leaves:
            pieces[i], cut = self._combine_low_rank(i, base, rows, less, self._leaf_coefficients(i, coefficients))
            cuts += [] if cut is None else [cut]
        self._record_truncations("truncated", cuts)
        found = [pieces[i] for i in range(len(self.leaves))]
        if isinstance(base, tuple):
            return TensorList(found) if out is None else _copy_into(out, found)
        point = torch.cat([piece.flatten() for piece in found]).view(base.shape)
        return point if out is None else out.copy_(point)

    def for_state(
        self,
        rows: Sequence[Row],
        coefficients: LeafCoefficients,
        *,
        minus: Sequence[Row | None],
        dtype: torch.dtype,
    ) -> tuple[Tensor, ...]:
        """Combine rows into a stored row, with each low-rank leaf truncated to its `state_rank`."""
        pieces = self._combine_flat(None, rows, coefficients, minus, dtype)
        cuts = []
        for i in self._low_rank_leaves:
            space = copied_space(self.leaves[i].space)
            stacks, weights = self._weighted_stacks(i, rows, minus, self._leaf_coefficients(i, coefficients))
            cut = self._truncate_sum(i, stacks, weights, space.state_rank or STATE_RANK_FACTOR * space.rank)
            cuts.append(cut)
            pieces[i] = cut.point[..., : cut.values.shape[-1]].to(dtype)
        self._record_truncations("state_truncated", cuts)
        return tuple([pieces[i] for i in range(len(self.leaves))])

    def to_point(self, row: Row, like: Tensor) -> Tensor:
        """Return the point of the space nearest to a row, in the shape and dtype of `like`."""
        found: Tensor = self.combine(like.new_zeros(like.shape), [row], [1.0])
        return found

    def tangent_lengths(self, rows: Sequence[Row], coefficients: Sequence[float], point: Tensor) -> tuple[float, float]:
        """Compute the tangent lengths of sums of rows less a point on low-rank leaves, and the lengths of the sums."""
        lengths = [0.0]
        sizes = [0.0]
        for i in self._low_rank_leaves:
            space = copied_space(self.leaves[i].space)
            here = self._piece(point, i)
            whole = combine_stacks(coefficients, [self._piece(row, i) for row in rows], space.m)
            along = space._inverse_retract(here, whole)
            lengths += space._inner(here, along, along).clamp(min=0).sqrt().flatten().tolist()
            sizes += JointBasis.of([whole], space.m).gram(torch.ones(1, 1)).clamp(min=0).sqrt().flatten().tolist()
        return math.hypot(*lengths), math.hypot(*sizes)

    def check(self, name: str, row: Any, like: Tensor) -> Row:
        """Check a row against points like `like`: finite, one tensor for each leaf, of any rank.

        Raises:
            ArgumentError: naming it.
        """
        if isinstance(row, Tensor):
            return check_finite(name, check_shape(name, row, *like.shape))
        if not isinstance(row, tuple | list) or len(row) != len(self.leaves):
            raise ArgumentError(f"{name}: expected a tensor for each of {len(self.leaves)} leaves")
        for i, piece in enumerate(row):
            axes: list[int | None] = [*self._piece(like, i).shape]
            if i in self._low_rank_leaves:
                axes[-1] = None
            check_finite(f"{name}[{i}]", check_shape(f"{name}[{i}]", piece, *axes))
        return tuple(row)

    def combine_exact(
        self, rows: Sequence[Row], coefficients: LeafCoefficients, *, minus: Sequence[Row | None]
    ) -> tuple[Tensor, ...]:
        """Combine rows in float64 without truncation."""
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
        return len(range(*self.leaves[i].part.indices(sys.maxsize)))

    def _piece(self, row: Row, i: int) -> Tensor:
        """What of a row belongs to a leaf."""
        if isinstance(row, tuple):
            return row[i]
        leaf = self.leaves[i]
        return row.reshape(-1)[leaf.part].view(leaf.space.shape)

    def _leaf_coefficients(self, i: int, coefficients: LeafCoefficients) -> Sequence[float]:
        """The coefficients of a leaf."""
        first = coefficients[0] if len(coefficients) else 0.0
        return coefficients[i] if isinstance(first, list | tuple) else coefficients

    def _flat_rows(
        self, rows: Sequence[Row], minus: Sequence[Row | None]
    ) -> tuple[list[TensorList], list[TensorList | None]]:
        """The flat leaves of rows, as the kernels take them: one object is one again."""
        made: dict[int, TensorList] = {}
        for row in (*rows, *minus):
            if row is not None and id(row) not in made:
                made[id(row)] = TensorList([self._piece(row, i).reshape(-1) for i in self._flat_leaves])
        return [made[id(row)] for row in rows], [None if row is None else made[id(row)] for row in minus]

    def _combine_flat(
        self,
        base: Row | None,
        rows: Sequence[Row],
        coefficients: LeafCoefficients,
        minus: Sequence[Row | None],
        dtype: torch.dtype | None,
    ) -> dict[int, Tensor]:
        """The flat leaves of a combination, in `dtype` where it is given."""
        flat = self._flat_leaves
        if not flat:
            return {}
        plus, less = self._flat_rows(rows, minus)
        start = None if base is None else self._flat_rows([base], [])[0][0]
        like = plus[0] if start is None else start
        out = TensorList([torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format) for x in like])
        lines = [list(self._leaf_coefficients(i, coefficients)) for i in flat]
        made = combine(start, plus, lines, minus=less, segments=[self._size(i) for i in flat], out=out)
        return dict(zip(flat, made, strict=True))

    def _low_rank_gram(self, i: int, rows: Sequence[Row], minus: Sequence[Row | None]) -> Tensor:
        """Inner products (k, k) of rows at a low-rank leaf."""
        joint, lines = self._joint(i, rows, minus)
        return joint.gram(lines).reshape(-1, len(rows), len(rows)).sum(0).cpu()

    def _combine_low_rank(
        self, i: int, base: Row, rows: Sequence[Row], minus: Sequence[Row | None], coefficients: Sequence[float]
    ) -> tuple[Tensor, TruncatedSVD | None]:
        """A low-rank leaf of `base` plus a combination of rows, and what was cut for it, if anything was."""
        space = copied_space(self.leaves[i].space)
        start = self._piece(base, i)
        stacks, weights = self._distinct_stacks(i, (base, *rows), (None, *minus), (1.0, *coefficients))
        alone = len(stacks) == 1 and weights == [1.0] and stacks[0].shape[-1] <= space.rank
        if alone or self._is_unchanged(i, start, stacks, weights):
            # What nobody moved, or a client's model that is taken whole, keeps its factors, bit for bit.
            return space._project(stacks[0] if alone else start).to(start.dtype), None
        # Of what cancels nothing is left: no factors of the size of a root of its rounding.
        cut = self._truncate_sum(i, stacks, weights, space.rank, drops_rounding=True)
        return cut.point.to(start.dtype), cut

    def _weighted_stacks(
        self, i: int, rows: Sequence[Row], minus: Sequence[Row | None], coefficients: Sequence[float]
    ) -> tuple[list[Tensor], list[float]]:
        """Stacks of a low-rank leaf and their coefficients: a combination of rows."""
        return self._distinct_stacks(i, rows, minus, coefficients)

    def _distinct_stacks(
        self, i: int, rows: Sequence[Row], minus: Sequence[Row | None], coefficients: Sequence[float]
    ) -> tuple[list[Tensor], list[float]]:
        """Distinct stacks of a leaf with their coefficients, of which none is 0."""
        stacks: list[Tensor] = []
        weights: list[float] = []
        seen: dict[int, int] = {}
        for c, plus, less in zip(coefficients, rows, minus, strict=True):
            for sign, row in ((1.0, plus), (-1.0, less)):
                if row is None:
                    continue
                if id(row) not in seen:
                    seen[id(row)] = _index_or_append(stacks, self._piece(row, i))
                place = seen[id(row)]
                weights += [0.0] * (len(stacks) - len(weights))
                weights[place] += sign * float(c)
        # At least one, of weight 0 where the sum is empty.
        used = [j for j, weight in enumerate(weights) if weight != 0] or [0]
        return [stacks[j] for j in used], [weights[j] for j in used]

    def _joint(self, i: int, rows: Sequence[Row], minus: Sequence[Row | None]) -> tuple[JointBasis, Tensor]:
        """The basis of the stacks of a leaf, and the rows as combinations (k, any) of these."""
        stacks: list[Tensor] = []
        places = [
            [None if row is None else _index_or_append(stacks, self._piece(row, i)) for row in pair]
            for pair in zip(rows, minus, strict=True)
        ]
        joint, cores = self._basis(i, stacks)
        lines = torch.zeros(len(rows), len(joint.cores), dtype=torch.float64)
        for line, (plus, less) in zip(lines, places, strict=True):
            # One that is subtracted from itself is not a row at all, not the rounding of one.
            if plus is not None:
                line[cores[plus]] += 1.0
            if less is not None:
                line[cores[less]] -= 1.0
        return joint, lines

    def _basis(self, i: int, stacks: list[Tensor]) -> tuple[JointBasis, list[int]]:
        """A basis of stacks of a leaf, and which of its cores are theirs: one that is known, if it holds them all."""
        known, joint = self._joints.get(i, ([], None))
        places = [_index_of(known, stack) for stack in stacks]
        if joint is None or None in places:
            joint = JointBasis.of(stacks, copied_space(self.leaves[i].space).m)
            self._joints[i] = (stacks, joint)
            places = [*range(len(stacks))]
        return joint, [place for place in places if place is not None]

    def _is_unchanged(self, i: int, start: Tensor, stacks: list[Tensor], weights: list[float]) -> bool:
        """Whether a sum is `start` but for the rounding of what cancelled."""
        every = [*stacks]
        here = _index_or_append(every, start)
        joint, cores = self._basis(i, every)
        lines = torch.zeros(2, len(joint.cores), dtype=torch.float64)
        for core, weight in zip(cores, weights, strict=False):
            lines[0, core] = weight
        lines[0, cores[here]] -= 1.0
        lines[1, cores[here]] = 1.0
        step, whole = joint.gram(lines).reshape(-1, 2, 2).sum(0).diagonal().tolist()
        return bool(step <= (UNCHANGED_ROUNDINGS * torch.finfo(torch.float64).eps) ** 2 * whole)

    def _truncate_sum(
        self, i: int, stacks: list[Tensor], weights: list[float], rank: int, drops_rounding: bool = False
    ) -> TruncatedSVD:
        """The truncated sum of stacks; where `drops_rounding` without what may be the rounding of their factors."""
        joint, cores = self._basis(i, stacks)
        line = torch.zeros(len(joint.cores), dtype=torch.float64)
        for core, weight in zip(cores, weights, strict=True):
            line[core] = weight
        try:
            cut = joint.combine(line, rank)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # public, and not in torch's stubs
            raise ArgumentError(f"points: a sum would not be finite at {self.leaves[i]}") from None
        return cut.without_rounding(joint.rounding(line, cut)) if drops_rounding else cut

    def _record_truncations(self, key: str, cuts: Iterable[TruncatedSVD]) -> None:
        errors = []
        for cut in cuts:
            errors += cut.error.flatten().tolist()
            self.diagnostics["tied"] += float(cut.is_tied.sum())
        self.diagnostics[key] += math.hypot(*errors)


FLAT_AMBIENT = AmbientSpace()
"""Where there is no leaf of low rank."""


def copied_space(space: Any) -> Any:
    """Return the space of one copy in a leaf."""
    while isinstance(space, Power):
        space = space.space
    return space


def _index_of(stacks: Sequence[Tensor], stack: Tensor) -> int | None:
    """Where among the stacks there is an equal one: the difference of such is 0, and not rounding."""
    for place, other in enumerate(stacks):
        if other is stack or (other.shape == stack.shape and other.dtype == stack.dtype and torch.equal(other, stack)):
            return place
    return None


def _index_or_append(stacks: list[Tensor], stack: Tensor) -> int:
    """The place of a stack among them, at the end where it is a new one."""
    place = _index_of(stacks, stack)
    if place is None:
        place = len(stacks)
        stacks.append(stack)
    return place


def _copy_into(out: Sequence[Tensor], pieces: Sequence[Tensor]) -> Any:
    for target, piece in zip(out, pieces, strict=True):
        target.copy_(piece.view_as(target))
    return out
