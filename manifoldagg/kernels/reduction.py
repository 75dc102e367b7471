r"""Reduction of the block sums to a Gram matrix.

They are folded, always in the same order and with the rounding errors kept: the result does not depend on who computed
which block, nor on how many threads there were.

Squares of float32, bf16 and fp16 differences always fit, denormal ones too. A float64 row that is below $2^{-450}$ or
above $2^{500}$ in a segment is multiplied there by $2^{-e}$, with $2^e$ next to its largest entry, which loses nothing;
the products are multiplied by $2^{e_i + e_j}$ at the end. So what float64 can hold of a Gram matrix is right to the
last digits, in each segment.
"""

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from manifoldagg.kernels.backends import reference, selection
from manifoldagg.kernels.blocks import BLOCK_SIZE, Blocks
from manifoldagg.kernels.operands import Operands
from manifoldagg.kernels.tensor_list import as_float64

__all__ = [
    "gram_matrices",
    "out_of_range",
    "pairwise_sum",
    "rescaled",
    "scaling_exponents",
    "two_sum",
    "unpack_symmetric",
]

CompensatedSum = tuple[np.ndarray, np.ndarray] | np.ndarray

# Between them, by Cauchy and Schwarz, no sum of products of two rows overflows, and what denormal squares lose, 2^-1075
# each, is nothing beside 2^-900.
MIN_SQUARED_NORM = 2.0**-900
MAX_SQUARED_NORM = 2.0**1000


def gram_matrices(block_sums: np.ndarray, rows: Operands, blocks: Blocks) -> Tensor:
    """Return the Gram matrix of the rows for each segment: (S, k, k).

    Args:
        block_sums: (B, k(k+1)/2), the products over each block. They may be overwritten.
        rows: the rows.
        blocks: the blocks of the sums.
    """
    whole = len(block_sums) == len(blocks.segment_bounds) == 1
    high = block_sums if whole else _sum_over_blocks(block_sums, rows, blocks)
    outside = out_of_range(rows, high)
    if outside is not None:
        powers = scaling_exponents(rows, blocks, outside)
        if powers.any():  # else what is outside is zero or not finite, whatever it is multiplied by
            scaled = reference.block_products(rows.prepare(), blocks, -powers)
            high = rescaled(high, _sum_over_blocks(scaled, rows, blocks), powers)
    return torch.from_numpy(high.take(_triangle_indices(len(rows.plus)), axis=1))


def _sum_over_blocks(block_sums: np.ndarray, rows: Operands, blocks: Blocks) -> np.ndarray:
    """Return the first component of `pairwise_sum`, which the compiled backend computes with the same bits."""
    compiled = getattr(selection.backend_for(rows.device), "pairwise_sum", None)
    found: np.ndarray = pairwise_sum(block_sums, blocks)[0] if compiled is None else compiled(block_sums, blocks)
    return found


def pairwise_sum(block_sums: np.ndarray, blocks: Blocks) -> np.ndarray:
    r"""Sum over the blocks of each segment, as unevaluated pairs $h + l$.

    Neighbours are added pairwise, level by level; the rounding error of each addition is computed exactly
    (Knuth's two-sum) and carried along. So $h + l$ has an error of order $u^2 \sum |x|$, and $h$ is the sum
    rounded once, but for ties closer than that.

    Args:
        block_sums: (B, n) float64, a row for each block.
        blocks: which segment each belongs to.

    Returns:
        (2, S, n): $h$ and $l$.
    """
    total = np.zeros((2, len(blocks.segment_bounds), block_sums.shape[1]))
    if not blocks.reduction_levels:
        total[0, blocks.table[:, 2]] = block_sums
        return total
    parts = np.zeros((2, *block_sums.T.shape))  # blocks last: numpy runs along them
    parts[0] = block_sums.T
    with np.errstate(invalid="ignore", over="ignore"):
        for left, right in blocks.reduction_levels:
            parts[0][:, left], parts[1][:, left] = two_sum(parts[..., left], parts[..., right])
    total[:, blocks.table[blocks.first_blocks, 2]] = parts[..., blocks.first_blocks].swapaxes(1, 2)
    return total


def two_sum(a: CompensatedSum, b: CompensatedSum) -> CompensatedSum:
    """Add two pairs $h + l$ as a pair; where $h$ is not finite, $l$ is 0. It may warn of infinities."""
    high = a[0] + b[0]
    # Knuth 1969: the error of a[0] + b[0] exactly, whichever is larger, in six operations without a comparison.
    other = high - a[0]
    low = (a[0] - (high - other)) + (b[0] - other) + (a[1] + b[1])
    total = high + low
    low -= total - high
    if not np.isfinite(total).all():
        # Infinity less infinity made the errors NaN: the sum itself says what became of it.
        low = np.where(np.isfinite(total), low, 0.0)
        total = np.where(np.isfinite(total), total, high)
    return total, low


def out_of_range(rows: Operands, sums: np.ndarray) -> np.ndarray | None:
    """Return where a squared norm may exceed the range of float64, (S, k), or `None` if nowhere.

    Args:
        rows: the rows.
        sums: (S, k(k+1)/2), their products as they came out.
    """
    k = len(rows.plus)
    # Of float32 and narrower the least magnitude is 2^-149 and the largest below 2^128: all squares fit.
    for row in rows.distinct:
        if torch.float64 in ((row.dtype,) if isinstance(row, Tensor) else row.dtypes):
            break
    else:
        return None
    squares = sums[:, _triangle_indices(k).diagonal()]
    # A sum of squares is NaN where an entry is not finite, and only there: then no power of two helps.
    outside: np.ndarray = (squares < MIN_SQUARED_NORM) | (squares > MAX_SQUARED_NORM)
    if not outside.any():
        return None
    # Differences of a vector from itself are 0 and need no second look; `scaling_exponents` finds other zeros.
    zero = [plus is minus for plus, minus in zip(rows.plus, rows.minus, strict=True)]
    outside &= ~np.array(zero)
    return outside if outside.any() else None


def scaling_exponents(rows: Operands, blocks: Blocks, is_out_of_range: np.ndarray) -> np.ndarray:
    """Return the exponents $e$ (S, k) for rows out of range; 0 elsewhere and for zero or nonfinite segments."""
    powers = np.zeros(is_out_of_range.shape, int)
    for s, i in np.argwhere(is_out_of_range).tolist():
        largest = _max_abs(rows, i, *blocks.segment_bounds[s])
        # Powers of two alone: a product with one is exact, and so is its undoing, while the result is a normal number.
        powers[s, i] = math.frexp(largest)[1] if 0 < largest < math.inf else 0
    return powers


def rescaled(sums: np.ndarray, scaled: np.ndarray, powers: np.ndarray) -> np.ndarray:
    r"""Return `sums` (S, k(k+1)/2) with out-of-range products replaced by products of rows multiplied by $2^{-e}$."""
    # A product with a row out of range may have left it too, whatever the other row is.
    i, j = np.tril_indices(powers.shape[1])
    both = powers[:, i] + powers[:, j]
    touched = (powers[:, i] != 0) | (powers[:, j] != 0)
    # What does not fit float64 even then becomes infinity or 0, as it should; what nobody scaled keeps its bits.
    with np.errstate(over="ignore", under="ignore"):
        found: np.ndarray = np.where(touched, np.ldexp(scaled, both), sums)
        return found


def unpack_symmetric(sums: np.ndarray, k: int) -> Tensor:
    """Unpack the lower halves (S, k(k+1)/2) into symmetric matrices (S, k, k)."""
    return torch.from_numpy(sums.take(_triangle_indices(k), axis=1))


@lru_cache(maxsize=64)
def _triangle_indices(k: int) -> np.ndarray:
    """Return the position of each entry of a symmetric k x k matrix in its lower half, row by row."""
    low, high = np.sort(np.indices((k, k)), axis=0)
    return np.asarray(high * (high + 1) // 2 + low)


@torch.no_grad()
def _max_abs(rows: Operands, i: int, start: int, stop: int) -> float:
    """The largest magnitude among the entries from `start` to `stop` of row i; NaN where one is NaN."""
    found = [0.0]
    minus = rows.minus[i]
    for low in range(start, stop, BLOCK_SIZE):
        window = (low, min(low + BLOCK_SIZE, stop))
        line = as_float64(rows.plus[i], *window)
        found.append((line if minus is None else line - as_float64(minus, *window)).abs().max().item())
    return float(np.max(found))
