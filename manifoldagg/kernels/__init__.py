"""The two operations that touch the parameters: `gram` reads them, `combine` writes them.

Everything between the two is algebra on a k x k matrix. Rows are tensors or differences of tensors; a
difference is formed in float64, a few entries at a time, and never stored, so that a drift of relative size 1e-4
keeps its digits. Several backends do the same work: `reference`, `compiled` and `triton`, and `sharded` around them
for rows of which every rank holds a piece (`DTensor`s, or plain tensors within `across_ranks`).
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from manifoldagg.errors import ArgumentError
from manifoldagg.kernels import reference, sharded, sums
from manifoldagg.kernels.blocks import Blocks
from manifoldagg.kernels.choice import available_backends, backend, set_backend
from manifoldagg.kernels.pieces import across_ranks, guard
from manifoldagg.kernels.rows import (
    Rows,
    Subtrahend,
    bounds,
    check_coefficients,
    check_row,
    check_target,
    is_spread,
    is_transformed,
)

Coefficients = Sequence[float | Tensor] | Sequence[Sequence[float | Tensor]] | Float[Tensor, "*S k"]

__all__ = ["across_ranks", "available_backends", "combine", "gram", "set_backend"]


def gram(
    rows: Float[Tensor, "k P"] | Sequence[Float[Tensor, " P"]],
    *,
    minus: Subtrahend = None,
    segments: Sequence[int] | None = None,
) -> Float64[Tensor, "S k k"]:
    r"""The Gram matrix of the rows, one for each segment.

    $$G^{(s)}_{ij} = \sum_{p \in s} (a_i[p] - b_i[p])\,(a_j[p] - b_j[p])$$

    Args:
        rows: the $a_i$: k vectors of one length P, of any floating dtypes.
        minus: the $b_i$: `None`, one vector for all rows, or a sequence with one vector or `None` a row.
        segments: lengths that cut P into S consecutive pieces; `None` is one piece.

    Returns:
        (S, k, k) in float64 on the CPU, where the algebra on it is done; exactly symmetric. Differences and
        products are formed in float64. A row with an entry that is not finite has such a diagonal entry, and leaves
        those of the others as they are.

    Raises:
        ArgumentError: if rows, `minus` or `segments` do not fit one another.

    Cost: every distinct vector is read once from memory; no scratch of size P.

    Example:
        >>> import torch
        >>> gram(torch.tensor([[3.0, 4.0], [0.0, 1.0]]), minus=[None, torch.tensor([0.0, 3.0])])
        tensor([[[25., -8.],
                 [-8.,  4.]]], dtype=torch.float64)
    """
    spread = is_spread(rows, minus)
    with guard(rows, minus) if spread else nullcontext():
        lines = Rows.of(rows, minus)
        cuts = bounds(segments, lines.size)
    if spread:
        return sharded.gram(lines, cuts, backend)
    if is_transformed(lines.tensors):
        dense = lines.materialise()
        squares = [dense[:, a:b] @ dense[:, a:b].mT for a, b in cuts]
        halves = [square.tril() + square.tril(-1).mT for square in squares]
        return torch.stack(halves).cpu() if halves else dense.new_zeros(0, len(dense), len(dense), device="cpu")
    blocks = Blocks.of(cuts)
    high, _ = sums.fold(backend(lines.tensors).partials(lines, blocks), blocks)
    outside = sums.far(lines, high)
    if outside is not None:
        powers = sums.exponents(lines, blocks, outside)
        high = sums.restored(high, sums.fold(reference.partials(lines, blocks, -powers), blocks)[0], powers)
    return sums.symmetric(high, len(lines.plus))


def combine(
    base: Float[Tensor, " P"] | None,
    rows: Float[Tensor, "k P"] | Sequence[Float[Tensor, " P"]],
    coefficients: Coefficients,
    *,
    minus: Subtrahend = None,
    segments: Sequence[int] | None = None,
    out: Float[Tensor, " P"] | None = None,
) -> Float[Tensor, " P"]:
    r"""A vector plus a linear combination of the rows.

    $$\mathrm{out}[p] = \mathrm{base}[p] + \sum_j c^{(s(p))}_j\,(a_j[p] - b_j[p])$$

    Args:
        base: a vector of length P, or `None` for zero.
        rows: the $a_j$, as in [`gram`][manifoldagg.kernels.gram].
        coefficients: k numbers, or (S, k) numbers with `segments`. A row whose coefficient is 0 is not read.
        minus: the $b_j$, as in [`gram`][manifoldagg.kernels.gram].
        segments: lengths that cut P into S consecutive pieces; `None` is one piece.
        out: where to write; it may be `base` or a row itself, but must not overlap one otherwise.

    Returns:
        `out`, or a new vector with the dtype of `base` (of the first row without one). The sum is formed
        in float64 and rounded once (by way of float32, as torch does, where the result is bf16 or fp16).

    Raises:
        ArgumentError: if the arguments do not fit one another.

    Cost: every vector used is read once and `out` is written once; no scratch of size P.

    Example:
        >>> import torch
        >>> combine(torch.ones(2), [torch.tensor([2.0, 4.0])], [0.5], minus=torch.ones(2))
        tensor([1.5000, 2.5000])
    """
    spread = is_spread(rows, minus, base, out)
    with guard(rows, minus, base, out) if spread else nullcontext():
        lines = Rows.of(rows, minus)
        cuts = bounds(segments, lines.size)
        if base is not None:
            check_row("base", None, base, like=lines.plus[0])
        factors = check_coefficients(coefficients, len(cuts), len(lines.plus))
        if out is not None:
            check_row("out", None, out, like=lines.plus[0])
    if spread:
        return sharded.combine(base, lines, factors, cuts, out, backend)
    others = [] if base is None else [base]
    if out is not None:
        check_target(out, lines, base)
        others.append(out)
    dtype = (lines.plus[0] if base is None else base).dtype
    numbers = [factors] if isinstance(factors, Tensor) else []
    if is_transformed([*lines.tensors, *numbers, *others]):
        return _differentiable(base, lines, factors, cuts, out, dtype)
    target = lines.plus[0].new_empty(lines.size, dtype=dtype) if out is None else out
    table = factors.tolist() if isinstance(factors, Tensor) else factors
    backend([*lines.tensors, *others]).combine(base, lines, table, Blocks.of(cuts), target)
    return target


def _differentiable(
    base: Tensor | None,
    lines: Rows,
    factors: Tensor | list[list[float]],
    cuts: Sequence[tuple[int, int]],
    out: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
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
    total = torch.cat(parts)
    return (total if base is None else base.double() + total).to(dtype)
