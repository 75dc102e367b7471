"""The two operations that touch the parameters: `gram` reads them, `combine` writes them.

Everything between the two is algebra on a k x k matrix. Rows are tensors or differences of tensors; a
difference is formed in float64 chunk by chunk and never stored, so that a drift of relative size 1e-4 keeps
its digits.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from manifoldagg.errors import ArgumentError
from manifoldagg.kernels import reference
from manifoldagg.kernels.rows import Rows, Subtrahend, bounds, check_row, is_transformed

Coefficients = Sequence[float | Tensor] | Sequence[Sequence[float]] | Float[Tensor, "*S k"]

__all__ = ["combine", "gram", "is_transformed"]


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
        (S, k, k) in float64, exactly symmetric; differences and products are formed in float64.

    Raises:
        ArgumentError: if rows, `minus` or `segments` do not fit one another.

    Cost: every distinct vector is read once from memory; no scratch of size P.

    Example:
        >>> import torch
        >>> gram(torch.tensor([[3.0, 4.0], [0.0, 1.0]]), minus=[None, torch.tensor([0.0, 3.0])])
        tensor([[[25., -8.],
                 [-8.,  4.]]], dtype=torch.float64)
    """
    lines = Rows.of(rows, minus)
    cuts = bounds(segments, lines.size)
    if is_transformed(lines.tensors):
        dense = lines.materialise()
        squares = [dense[:, a:b] @ dense[:, a:b].mT for a, b in cuts]
        return torch.stack([square.tril() + square.tril(-1).mT for square in squares])
    with torch.no_grad():
        return reference.gram(lines, cuts)


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
    lines = Rows.of(rows, minus)
    cuts = bounds(segments, lines.size)
    factors = coefficients if isinstance(coefficients, Tensor) else _as_tensor(coefficients)
    factors = factors.expand(len(cuts), -1) if factors.ndim == 1 else factors
    if tuple(factors.shape) != (len(cuts), len(lines.plus)):
        expected = f"({len(cuts)}, {len(lines.plus)})"
        raise ArgumentError(f"coefficients: expected shape {expected}, got {tuple(factors.shape)}")
    for name, vector in (("base", base), ("out", out)):
        if vector is not None:
            check_row(name, vector, like=lines.plus[0])
    dtype = (lines.plus[0] if base is None else base).dtype
    if is_transformed([*lines.tensors, factors, *(vector for vector in (base, out) if vector is not None)]):
        return _differentiable(base, lines, factors, cuts, out, dtype)
    with torch.no_grad():
        target = torch.empty_like(lines.plus[0], dtype=dtype) if out is None else out
        return reference.combine(base, lines, factors.tolist(), cuts, target)


def _as_tensor(coefficients: Sequence[float | Tensor] | Sequence[Sequence[float]]) -> Tensor:
    try:
        if any(isinstance(c, Tensor) for c in coefficients):
            return torch.stack([torch.as_tensor(c, dtype=torch.float64) for c in coefficients])
        return torch.as_tensor(coefficients, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"coefficients: expected numbers of shape (k,) or (S, k): {error}") from None


def _differentiable(
    base: Tensor | None,
    lines: Rows,
    factors: Tensor,
    cuts: Sequence[tuple[int, int]],
    out: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    if out is not None:
        raise ArgumentError("out: cannot be written into while a derivative is followed; leave it out")
    dense, weights = lines.materialise(), factors.to(torch.float64)
    total = torch.cat([dense.new_zeros(0), *(weights[s] @ dense[:, a:b] for s, (a, b) in enumerate(cuts))])
    return (total if base is None else base.double() + total).to(dtype)
