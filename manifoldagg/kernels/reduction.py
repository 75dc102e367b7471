"""Summation of the products of blocks to Gram matrices, with a reproducible and accurate result.

The sums of the blocks are added in a fixed order, and the rounding errors are compensated. The result therefore depends
neither on the number of threads, nor on which thread computed which block.

Squares of differences of float32, bf16 and fp16 numbers never overflow or underflow in float64. Squares of float64
numbers can. If the norm of a row in a segment is below $2^{-450}$ or above $2^{500}$, the row is multiplied by $2^{-e}$
in this segment, where $2^e$ is close to its largest entry. The products are multiplied by $2^{e_i + e_j}$ at the end.
Multiplying by a power of two is exact, so every entry of the Gram matrix that float64 can represent is accurate.
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

# Between these bounds, no sum of products of two rows overflows, by the Cauchy-Schwarz inequality. Each subnormal
# square has an error of 2^-1075, which is negligible relative to 2^-900.
MIN_SQUARED_NORM = 2.0**-900
MAX_SQUARED_NORM = 2.0**1000


def gram_matrices(block_sums: np.ndarray, rows: Operands, blocks: Blocks) -> Tensor:
    """Return the Gram matrix of the rows for each segment: (S, k, k).

    Args:
        block_sums: (B, k(k+1)/2), the products over each block. The function may overwrite them.
        rows: the rows.
        blocks: the blocks of the sums.
    """
    # A single block needs no addition.
    whole = len(block_sums) == len(blocks.segment_bounds) == 1
    high = block_sums if whole else _sum_over_blocks(block_sums, blocks)
    outside = out_of_range(rows, high)
    if outside is not None:
        powers = scaling_exponents(rows, blocks, outside)
        if powers.any():  # otherwise the out-of-range rows are zero or not finite, and scaling has no effect
            scaled = reference.block_products(rows.prepare(), blocks, -powers)
            high = rescaled(high, _sum_over_blocks(scaled, blocks), powers)
    return torch.from_numpy(high.take(_triangle_indices(len(rows.plus)), axis=1))


def _sum_over_blocks(block_sums: np.ndarray, blocks: Blocks) -> np.ndarray:
    """Add the products of all blocks in each segment, in compiled code if it is available."""
    # The products are on the host, even if a GPU computed them.
    compiled = getattr(selection.backend_for(torch.device("cpu")), "pairwise_sum", None)
    # Only the totals are needed, so the low parts of the sums are discarded.
    result: np.ndarray = pairwise_sum(block_sums, blocks)[0] if compiled is None else compiled(block_sums, blocks)
    return result


def pairwise_sum(block_sums: np.ndarray, blocks: Blocks) -> np.ndarray:
    r"""Compute the sum of each segment of a vector from the sums of its blocks, and compensate for rounding errors.

    A segment, such as a layer, consists of blocks of consecutive entries. The function adds the sums of neighbouring
    blocks pairwise, level by level. Knuth's two-sum algorithm computes the rounding error of each addition, and these
    errors are added separately. Each total therefore consists of a high part $h$, which is the rounded total, and a low
    part $l$, which is the remaining error.

    For summands $x$ and the unit roundoff $u$ of float64, $h + l$ differs from the exact sum by a term of order
    $u^2 \sum |x|$. Usually, $h$ is therefore the exact sum, rounded once. It can differ in two cases: if the exact sum
    is almost midway between two float64 numbers, or if the summands cancel almost completely.

    Args:
        block_sums: (B, n) float64, one row for each block.
        blocks: the blocks, with the segment of each block.

    Returns:
        (2, S, n): $h$ and $l$.
    """
    total = np.zeros((2, len(blocks.segment_bounds), block_sums.shape[1]))
    if not blocks.reduction_levels:
        total[0, blocks.table[:, 2]] = block_sums
        return total
    parts = np.zeros((2, *block_sums.T.shape))  # blocks are the last axis, which NumPy traverses fastest
    # The sums are the high parts. The low parts, which collect the rounding errors, start at 0.
    parts[0] = block_sums.T
    with np.errstate(invalid="ignore", over="ignore"):
        for left, right in blocks.reduction_levels:
            parts[0][:, left], parts[1][:, left] = two_sum(parts[..., left], parts[..., right])
    total[:, blocks.table[blocks.first_blocks, 2]] = parts[..., blocks.first_blocks].swapaxes(1, 2)
    return total


def two_sum(a: CompensatedSum, b: CompensatedSum) -> CompensatedSum:
    """Add two compensated sums.

    A compensated sum is a pair of numbers. The high part $h$ is the rounded sum, and the low part $l$ contains the
    rounding error. If the high part of the result is not finite, the low part is 0, and NumPy may emit a warning.
    """
    high = a[0] + b[0]
    # Knuth 1969: the exact error of a[0] + b[0], whichever is larger, in six operations without a comparison.
    other = high - a[0]
    low = (a[0] - (high - other)) + (b[0] - other) + (a[1] + b[1])
    total = high + low
    low -= total - high
    if not np.isfinite(total).all():
        # Infinity minus infinity makes the errors NaN, so the uncorrected sum is used.
        low = np.where(np.isfinite(total), low, 0.0)
        total = np.where(np.isfinite(total), total, high)
    return total, low


def out_of_range(rows: Operands, sums: np.ndarray) -> np.ndarray | None:
    """Find the rows whose squared norm may be too small or too large for float64.

    Args:
        rows: the rows.
        sums: (S, k(k+1)/2), the unscaled products of the rows.

    Returns:
        A boolean mask (S, k) of these rows in each segment, or `None` if every squared norm is within range.
    """
    k = len(rows.plus)
    # Magnitudes of float32 and narrower dtypes are between 2^-149 and 2^128, so all their squares are within range.
    for row in rows.distinct:
        if torch.float64 in ((row.dtype,) if isinstance(row, Tensor) else row.dtypes):
            break
    else:
        return None
    squares = sums[:, _triangle_indices(k).diagonal()]
    # A sum of squares is NaN only if an entry is not finite. Scaling by a power of two does not help then.
    outside: np.ndarray = (squares < MIN_SQUARED_NORM) | (squares > MAX_SQUARED_NORM)
    if not outside.any():
        return None
    # The difference of a vector from itself is 0 and needs no scaling. `scaling_exponents` detects other zeros.
    zero = [plus is minus for plus, minus in zip(rows.plus, rows.minus, strict=True)]
    outside &= ~np.array(zero)
    return outside if outside.any() else None


def scaling_exponents(rows: Operands, blocks: Blocks, is_out_of_range: np.ndarray) -> np.ndarray:
    """Compute an exponent $e$ for each row whose squared norm overflows or underflows in float64.

    The inner products of such a row are computed after its division by $2^e$, which avoids the overflow or underflow.
    The power $2^e$ is close to the largest absolute value in the row.

    Args:
        rows: k rows.
        blocks: the blocks of S segments.
        is_out_of_range: (S, k), whether the squared norm of a row in a segment is out of range.

    Returns:
        (S, k), the exponent $e$ for each row in each segment. The exponent is 0 for a row that is within range, zero or
        not finite.
    """
    powers = np.zeros(is_out_of_range.shape, int)
    for s, i in np.argwhere(is_out_of_range).tolist():
        largest = _max_abs(rows, i, *blocks.segment_bounds[s])
        # Multiplication by a power of two is exact. So is its inverse, as long as the result is a normal number.
        powers[s, i] = math.frexp(largest)[1] if 0 < largest < math.inf else 0
    return powers


def rescaled(sums: np.ndarray, scaled: np.ndarray, powers: np.ndarray) -> np.ndarray:
    """Replace the products of scaled rows in the unscaled sums.

    Args:
        sums: (S, k(k+1)/2), the products of the unscaled rows.
        scaled: (S, k(k+1)/2), the products of the scaled rows.
        powers: (S, k), the exponents of the scaling. Rows with exponent 0 are not scaled.
    """
    # The product of an out-of-range row with any other row may be out of range too.
    i, j = np.tril_indices(powers.shape[1])
    exponents = powers[:, i] + powers[:, j]
    is_scaled = (powers[:, i] != 0) | (powers[:, j] != 0)
    # A product that float64 cannot represent becomes infinity or 0. Products of unscaled rows keep their bits.
    with np.errstate(over="ignore", under="ignore"):
        result: np.ndarray = np.where(is_scaled, np.ldexp(scaled, exponents), sums)
        return result


def unpack_symmetric(sums: np.ndarray, k: int) -> Tensor:
    """Unpack the lower halves (S, k(k+1)/2) into symmetric matrices (S, k, k)."""
    return torch.from_numpy(sums.take(_triangle_indices(k), axis=1))


@lru_cache(maxsize=64)
def _triangle_indices(k: int) -> np.ndarray:
    """Return the indices that expand the lower triangle of a matrix to the symmetric k x k matrix.

    The triangle is stored row by row. For k = 2, the indices are therefore [[0, 1], [1, 2]].
    """
    low, high = np.sort(np.indices((k, k)), axis=0)
    return np.asarray(high * (high + 1) // 2 + low)


@torch.no_grad()
def _max_abs(rows: Operands, i: int, start: int, stop: int) -> float:
    """Return the largest absolute value in a range of row i, or NaN if the range contains NaN."""
    maxima = [0.0]
    minus = rows.minus[i]
    for low in range(start, stop, BLOCK_SIZE):
        window = (low, min(low + BLOCK_SIZE, stop))
        values = as_float64(rows.plus[i], *window)
        maxima.append((values if minus is None else values - as_float64(minus, *window)).abs().max().item())
    return float(np.max(maxima))
