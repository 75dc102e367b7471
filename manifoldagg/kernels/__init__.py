"""The two operations that touch the parameters: `gram` reads them, `combine` writes them.

Everything between the two is algebra on a k x k matrix. Rows are vectors, tuples of tensors, or differences of them; a
difference is formed in float64, a few entries at a time, and never stored, so that a drift of relative size 1e-4
keeps its digits. Several backends do the same work: `reference`, `cpu` and `triton`, and `sharded` around them
for rows of which every rank holds a piece (`DTensor`s, or plain tensors within `across_ranks`).
"""

from collections.abc import Sequence
from typing import TypeVar, overload

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from manifoldagg.errors import ArgumentError
from manifoldagg.kernels import reduction, sharded
from manifoldagg.kernels.backends import selection
from manifoldagg.kernels.backends.selection import available_backends, set_backend
from manifoldagg.kernels.blocks import Blocks
from manifoldagg.kernels.fused import LinearCombination
from manifoldagg.kernels.operands import (
    Operand,
    Operands,
    Subtrahend,
    blocks_of,
    bump_version,
    check_coefficients,
    check_target,
    empty_like_row,
    is_sharded,
    needs_autograd_path,
    segment_bounds,
)
from manifoldagg.kernels.shards import across_ranks, collective_guard
from manifoldagg.kernels.tensor_list import Row, TensorList, as_float64

Coefficients = Sequence[float | Tensor] | Sequence[Sequence[float | Tensor]] | Float[Tensor, "*S k"]

R = TypeVar("R", Tensor, tuple[Tensor, ...])

__all__ = [
    "Operands",
    "Row",
    "TensorList",
    "across_ranks",
    "as_operands",
    "available_backends",
    "combine",
    "gram",
    "set_backend",
]


def as_operands(
    rows: Float[Tensor, "k P"] | Sequence[Row] | Operands, minus: Subtrahend = None, *others: Row | None
) -> Operands:
    """Validate rows once, for several calls of `gram` and `combine`.

    Args:
        rows: the rows, as in `gram`. An `Operands` is returned as it is.
        minus: the subtrahends, as in `gram`.
        others: further rows of the calls, which are not validated. If one of them is sharded, `rows` are shards too.

    Raises:
        ArgumentError: if rows and `minus` do not fit one another; on every rank, if they are sharded.

    Example:
        >>> import torch
        >>> base, current, point = torch.zeros(2), torch.ones(2), torch.tensor([3.0, 5.0])
        >>> rows = as_operands([point, current], base)
        >>> gram(rows.select([0])).item(), combine(current, rows.with_minus([current, base]), [0.5, 0.0]).tolist()
        (34.0, [2.0, 3.0])
    """
    if isinstance(rows, Operands):
        if minus is not None:
            raise ArgumentError("minus: expected None, because the operands include what is subtracted")
        return rows
    if is_sharded(rows, minus, *others):
        with collective_guard(rows, minus, *others):
            return Operands.of(rows, minus)
    return Operands.of(rows, minus)


def gram(
    rows: Float[Tensor, "k P"] | Sequence[Row] | Operands,
    *,
    minus: Subtrahend = None,
    segments: Sequence[int] | None = None,
) -> Float64[Tensor, "S k k"]:
    r"""Compute the Gram matrix of the rows, one for each segment.

    $$G^{(s)}_{ij} = \sum_{p \in s} (a_i[p] - b_i[p])\,(a_j[p] - b_j[p])$$

    Args:
        rows: the $a_i$: k rows of P entries of any floating dtypes. A row is a vector, or a tuple of tensors of any
            shapes, the entries of which are read one tensor after another where they lie; the tuples of a call have
            the same lengths tensor by tensor. `Operands` have been checked, with their $b_i$.
        minus: the $b_i$: `None`, one vector for all rows, or a sequence with one row or `None` a row.
        segments: lengths that cut P into S consecutive pieces; `None` is one piece.

    Returns:
        (S, k, k) in float64 on the CPU, where the algebra on it is done; exactly symmetric. Differences and
        products are formed in float64; the bits do not depend on how a row is cut into tensors. A row with an entry
        that is not finite has such a diagonal entry, and leaves those of the others as they are.

    Raises:
        ArgumentError: if rows, `minus` or `segments` do not fit one another.

    Cost: every distinct row is read once from memory; no scratch of size P. Of a tuple's tensors those that do not
    lie in one piece are copied first.

    Example:
        >>> import torch
        >>> gram(torch.tensor([[3.0, 4.0], [0.0, 1.0]]), minus=[None, torch.tensor([0.0, 3.0])])
        tensor([[[25., -8.],
                 [-8.,  4.]]], dtype=torch.float64)
    """
    lines = rows if minus is None and isinstance(rows, Operands) else as_operands(rows, minus)
    if is_sharded(lines):
        with collective_guard(lines.distinct):
            cuts = segment_bounds(segments, lines.size)
        return sharded.gram(lines, cuts, selection)
    if needs_autograd_path(lines.distinct):
        dense = lines.materialise()
        squares = [dense[:, a:b] @ dense[:, a:b].mT for a, b in segment_bounds(segments, lines.size)]
        halves = [square.tril() + square.tril(-1).mT for square in squares]
        return torch.stack(halves).cpu() if halves else dense.new_zeros(0, len(dense), len(dense), device="cpu")
    blocks = Blocks.of(((0, lines.size),)) if segments is None else blocks_of(segments, lines.size)
    return reduction.gram_matrices(selection.block_products(lines, blocks), lines, blocks)


def gram_combine(rows: Operands, combinations: Sequence[LinearCombination]) -> Float64[Tensor, "1 k k"]:
    r"""Compute the Gram matrix of rows and several linear combinations in one pass, if the backend supports it.

    The results have the bits of `gram` and `combine`.

    Args:
        rows: the rows of the Gram matrix, on one rank and without derivatives.
        combinations: one coefficient for each row, no derivatives, and targets in new memory, which nothing else uses.

    Returns:
        As `gram` without segments. The caller checks the result and discards the targets if a row is not finite.

    Cost: with the compiled backend each row is read once from memory; with others once for each result.
    """
    blocks = Blocks.of(((0, rows.size),))
    return reduction.gram_matrices(selection.gram_combine(rows, blocks, combinations), rows, blocks)


@overload
def combine(
    base: R,
    rows: Tensor | Sequence[Row] | Operands,
    coefficients: Coefficients,
    *,
    minus: Subtrahend = None,
    segments: Sequence[int] | None = None,
    out: None = None,
) -> R: ...
@overload
def combine(
    base: None,
    rows: Tensor | Sequence[R] | Operands,
    coefficients: Coefficients,
    *,
    minus: Subtrahend = None,
    segments: Sequence[int] | None = None,
    out: None = None,
) -> R: ...
@overload
def combine(
    base: Row | None,
    rows: Tensor | Sequence[Row] | Operands,
    coefficients: Coefficients,
    *,
    minus: Subtrahend = None,
    segments: Sequence[int] | None = None,
    out: R,
) -> R: ...
def combine(
    base: Row | None,
    rows: Float[Tensor, "k P"] | Sequence[Row] | Operands,
    coefficients: Coefficients,
    *,
    minus: Subtrahend = None,
    segments: Sequence[int] | None = None,
    out: Row | None = None,
) -> Row:
    r"""Add a linear combination of rows to a base row.

    $$\mathrm{out}[p] = \mathrm{base}[p] + \sum_j c^{(s(p))}_j\,(a_j[p] - b_j[p])$$

    Args:
        base: a row, or `None` for zero.
        rows: the $a_j$, as in [`gram`][manifoldagg.kernels.gram].
        coefficients: k numbers, or (S, k) numbers with `segments`. A row whose coefficient is 0 is not read.
        minus: the $b_j$, likewise.
        segments: lengths that cut P into S consecutive pieces; `None` is one piece.
        out: a row to write into; it may be `base` or another row itself, but must not overlap one otherwise.

    Returns:
        `out`, or a new row of the kind, shapes and dtypes of `base` (of the first row without one). The sum is formed
        in float64 and rounded once (by way of float32, as torch does, where the result is bf16 or fp16).

    Raises:
        ArgumentError: if the arguments do not fit one another.

    Cost: every row used is read once and `out` is written once; no scratch of size P. Of a tuple's tensors those that
    do not lie in one piece are copied first.

    Example:
        >>> import torch
        >>> combine(torch.ones(2), [torch.tensor([2.0, 4.0])], [0.5], minus=torch.ones(2))
        tensor([1.5000, 2.5000])
    """
    lines = rows if minus is None and isinstance(rows, Operands) else as_operands(rows, minus, base, out)
    if is_sharded(lines, base, out):
        with collective_guard(lines.distinct, base, out):
            cuts = segment_bounds(segments, lines.size)
            lines, start, target = lines.with_base_and_out(base, out)
            factors = check_coefficients(coefficients, len(cuts), len(lines.plus))
        new = sharded.combine(start, lines, factors, cuts, target, selection)
        return new if out is None else out
    lines, start, target = lines.with_base_and_out(base, out)
    if target is not None:
        check_target(target, lines, start)
    if needs_autograd_path([row for row in (*lines.distinct, start, target) if row is not None]):
        cuts = segment_bounds(segments, lines.size)
        return _combine_autograd(
            start, lines, check_coefficients(coefficients, len(cuts), len(lines.plus)), cuts, target
        )
    blocks = Blocks.of(((0, lines.size),)) if segments is None else blocks_of(segments, lines.size)
    factors = check_coefficients(coefficients, len(blocks.segment_bounds), len(lines.plus))
    if isinstance(factors, Tensor):
        if needs_autograd_path((factors,)):
            return _combine_autograd(start, lines, factors, blocks.segment_bounds, target)
        factors = factors.tolist()
    new = empty_like_row(lines.plus[0] if start is None else start) if target is None else target
    selection.combine(start, lines, factors, blocks, new)
    if out is None:
        return new
    bump_version(new)
    return out


def _combine_autograd(
    base: Operand | None,
    lines: Operands,
    factors: Tensor | list[list[float]],
    cuts: Sequence[tuple[int, int]],
    out: Operand | None,
) -> Row:
    """Plain torch. A row is left out where its coefficient is the number 0; a tensor's derivative needs the row."""
    if out is not None:
        raise ArgumentError("out: cannot be written into while a derivative is followed; leave it out")
    dense = lines.materialise()
    parts = [dense.new_zeros(0)]
    for s, (a, b) in enumerate(cuts):
        if isinstance(factors, Tensor):
            parts.append(factors[s].to(dense.device, torch.float64) @ dense[:, a:b])
        else:
            used = [j for j, c in enumerate(factors[s]) if c != 0]
            parts.append(dense.new_tensor([factors[s][j] for j in used]) @ dense[used, a:b])
    total = torch.cat(parts) if base is None else as_float64(base) + torch.cat(parts)
    like = lines.plus[0] if base is None else base
    if isinstance(like, Tensor):
        return total.to(like.dtype)
    pieces = zip(total.split(like.lengths), like, strict=True)
    return TensorList(piece.view(tensor.shape).to(tensor.dtype) for piece, tensor in pieces)
