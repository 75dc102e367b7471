"""The two kernels of the library: `gram` reads the parameters of models, and `combine` writes them.

A model with P parameters is a row of P entries. For k rows, `gram` computes the k x k matrix of their inner products.
`combine` adds a weighted sum of the rows to a base row. All other computations of the library are algebra on this small
matrix.

A row is a vector, a tuple of tensors, or the difference of two of these. A difference is formed in float64, a few
entries at a time, and is never stored. Small differences of large models therefore keep their digits.

The backends `reference`, `cpu` and `triton` implement the same operations. The module `sharded` extends the operations
to rows that are distributed over several ranks, either as `DTensor`s or as plain tensors within `across_ranks`.
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
        rows: the rows, as in `gram`. An `Operands` is returned unchanged.
        minus: the subtrahends, as in `gram`.
        others: further rows of the calls, which are not validated. If any of them is sharded, all rows are treated as
            shards.

    Raises:
        ArgumentError: if the shapes, dtypes or devices of `rows` and `minus` are inconsistent. If the rows are sharded,
            every rank raises it.

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
    r"""Compute the Gram matrix of several rows, that is, the inner products of all pairs of rows.

    A row consists of P entries, such as all parameters of a model. A row can be given as a difference $a_i - b_i$, such
    as the change of a model. Without a subtrahend, $b_i$ is 0.

    The entries can be divided into consecutive segments, such as the layers of a model. The Gram matrix of segment $s$
    contains the sums over the entries $p$ of this segment:

    $$G^{(s)}_{ij} = \sum_{p \in s} (a_i[p] - b_i[p])\,(a_j[p] - b_j[p]).$$

    Args:
        rows: the $a_i$: k rows of P entries of any floating dtypes. A row is a vector, or a tuple of tensors of any
            shapes, which are read in place. All tuples of a call must have the same number of entries in each tensor.
            `Operands` are already validated and include their $b_i$.
        minus: the $b_i$: `None`, one vector for all rows, or a sequence with one row or `None` for each row.
        segments: the lengths of S consecutive segments that add up to P; `None` means one segment.

    Returns:
        (S, k, k) in float64 on the CPU, exactly symmetric. Differences and products are formed in float64. The bits do
        not depend on how a row is divided into tensors. If a row contains a value that is not finite, the diagonal
        entry of this row is not finite either. The products of the other rows are not affected.

    Raises:
        ArgumentError: if the shapes of rows, `minus` or `segments` are inconsistent.

    Cost: every distinct row is read once from memory. No temporary memory of size P is needed, except for copies of
    noncontiguous tensors in tuples.

    Example:
        >>> import torch
        >>> gram(torch.tensor([[3.0, 4.0], [0.0, 1.0]]), minus=[None, torch.tensor([0.0, 3.0])])
        tensor([[[25., -8.],
                 [-8.,  4.]]], dtype=torch.float64)
    """
    operands = rows if minus is None and isinstance(rows, Operands) else as_operands(rows, minus)
    if is_sharded(operands):
        # Only the segments are checked within this guard, because `sharded.gram` contains guards itself.
        with collective_guard(operands.distinct):
            bounds = segment_bounds(segments, operands.size)
        return sharded.gram(operands, bounds, selection)
    if needs_autograd_path(operands.distinct):
        # The fused kernels have no derivative. This path stores all differences, which needs k P entries of float64,
        # and lets autograd differentiate a matrix product.
        dense = operands.materialise()
        squares = [dense[:, a:b] @ dense[:, a:b].mT for a, b in segment_bounds(segments, operands.size)]
        # BLAS may round the two halves of a product with its own transpose differently. The lower half is copied to the
        # upper.
        halves = [square.tril() + square.tril(-1).mT for square in squares]
        return torch.stack(halves).cpu() if halves else dense.new_zeros(0, len(dense), len(dense), device="cpu")
    blocks = Blocks.of(((0, operands.size),)) if segments is None else blocks_of(segments, operands.size)
    return reduction.gram_matrices(selection.block_products(operands, blocks), operands, blocks)


def gram_combine(rows: Operands, combinations: Sequence[LinearCombination]) -> Float64[Tensor, "1 k k"]:
    """Compute a Gram matrix and several linear combinations of rows, in one pass if the backend supports it.

    The results are bitwise identical to those of separate calls of `gram` and `combine`.

    Args:
        rows: the rows of the Gram matrix, on one rank and without derivatives.
        combinations: linear combinations with one coefficient for each row, without derivatives. Their targets must be
            in newly allocated memory.

    Returns:
        The matrix of `gram` without segments. If it shows that a row is not finite, the caller must discard the
        targets.

    Cost: with the compiled backend, each row is read once from memory. With other backends, each row is read once for
    each result.
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
    r"""Add a linear combination of rows to a base row, such as a weighted sum of client updates to a model.

    A row consists of P entries, such as all parameters of a model. A row of the sum can be given as a difference
    $a_j - b_j$, such as the change of a model. The entries can be divided into consecutive segments, such as the layers
    of a model. Each segment $s$ has its own coefficients $c^{(s)}_j$. For an entry $p$ in segment $s$, the result is

    $$\mathrm{out}[p] = \mathrm{base}[p] + \sum_j c^{(s)}_j\,(a_j[p] - b_j[p]).$$

    Args:
        base: a row, or `None` for zero.
        rows: the $a_j$, as in [`gram`][manifoldagg.kernels.gram].
        coefficients: k numbers, or (S, k) numbers with `segments`. A row whose coefficient is 0 is not read.
        minus: the $b_j$, as in `gram`.
        segments: the lengths of S consecutive segments that add up to P; `None` means one segment.
        out: the row to write into. It may be `base` or one of the rows, but must not partially overlap them.

    Returns:
        `out`, or a new row with the type, shapes and dtypes of `base` (of the first row if `base` is `None`). The sum
        is formed in float64 and rounded once. For bf16 and fp16, it is rounded to float32 first, as in torch.

    Raises:
        ArgumentError: if the shapes, dtypes or devices of the arguments are inconsistent.

    Cost: every row with a nonzero coefficient is read once, and `out` is written once. No temporary memory of size P is
    needed, except for copies of noncontiguous tensors in tuples.

    Example:
        >>> import torch
        >>> combine(torch.ones(2), [torch.tensor([2.0, 4.0])], [0.5], minus=torch.ones(2))
        tensor([1.5000, 2.5000])
    """
    operands = rows if minus is None and isinstance(rows, Operands) else as_operands(rows, minus, base, out)
    # Sharded rows are checked on every rank before the exchange, so that an error on one rank reaches all ranks.
    if is_sharded(operands, base, out):
        with collective_guard(operands.distinct, base, out):
            bounds = segment_bounds(segments, operands.size)
            operands, start, target = operands.with_base_and_out(base, out)
            numbers = check_coefficients(coefficients, len(bounds), len(operands.plus))
        new = sharded.combine(start, operands, numbers, bounds, target, selection)
        return new if out is None else out
    operands, start, target = operands.with_base_and_out(base, out)
    if target is not None:
        check_target(target, operands, start)
    if needs_autograd_path([row for row in (*operands.distinct, start, target) if row is not None]):
        bounds = segment_bounds(segments, operands.size)
        return _combine_autograd(
            start, operands, check_coefficients(coefficients, len(bounds), len(operands.plus)), bounds, target
        )
    blocks = Blocks.of(((0, operands.size),)) if segments is None else blocks_of(segments, operands.size)
    numbers = check_coefficients(coefficients, len(blocks.segment_bounds), len(operands.plus))
    # Coefficients without derivatives are read once on the host, because the backends need numbers.
    if isinstance(numbers, Tensor):
        if needs_autograd_path((numbers,)):
            return _combine_autograd(start, operands, numbers, blocks.segment_bounds, target)
        numbers = numbers.tolist()
    # A new row has memory of its own, so it needs no check for overlaps.
    new = empty_like_row(operands.plus[0] if start is None else start) if target is None else target
    selection.combine(start, operands, numbers, blocks, new)
    # No autograd graph can have saved a row that was allocated in this call.
    if out is None:
        return new
    # The backend wrote through a pointer, so torch has not registered the change.
    bump_version(new)
    return out


def _combine_autograd(
    base: Operand | None,
    operands: Operands,
    numbers: Tensor | list[list[float]],
    bounds: Sequence[tuple[int, int]],
    out: Operand | None,
) -> Row:
    """Compute `combine` with differentiable PyTorch operations."""
    if out is not None:
        raise ArgumentError(
            "out: expected None while autograd tracks an argument; omit it, or call combine within torch.no_grad()"
        )
    dense = operands.materialise()
    # The empty tensor makes `torch.cat` work without segments.
    parts = [dense.new_zeros(0)]
    for s, (a, b) in enumerate(bounds):
        if isinstance(numbers, Tensor):
            # The derivative with respect to a coefficient depends on the row even if the coefficient is 0, so no row is
            # skipped.
            parts.append(numbers[s].to(dense.device, torch.float64) @ dense[:, a:b])
        else:
            # Zero coefficients are dropped before the product, because 0 times NaN or infinity is NaN.
            used = [j for j, c in enumerate(numbers[s]) if c != 0]
            parts.append(dense.new_tensor([numbers[s][j] for j in used]) @ dense[used, a:b])
    total = torch.cat(parts) if base is None else as_float64(base) + torch.cat(parts)
    like = operands.plus[0] if base is None else base
    if isinstance(like, Tensor):
        return total.to(like.dtype)
    pieces = zip(total.split(like.lengths), like, strict=True)
    return TensorList(piece.view(tensor.shape).to(tensor.dtype) for piece, tensor in pieces)
