r"""Rows whose squares leave the range of float64: read again, multiplied by powers of two.

Squares of float32, bf16 and fp16 differences always fit, denormal ones too. A float64 row that is below $2^{-450}$ or
above $2^{500}$ in a segment is multiplied there by $2^{-e}$, with $2^e$ next to its largest entry, which loses nothing;
the products are multiplied by $2^{e_i + e_j}$ at the end. So what float64 can hold of a Gram matrix is right to the
last digits, in each segment.
"""

import math

import numpy as np
import torch

from manifoldagg.kernels import reference
from manifoldagg.kernels.blocks import Blocks, pairs
from manifoldagg.kernels.rows import Rows

__all__ = ["exponents", "far", "restored"]

# Between them, by Cauchy and Schwarz, no sum of products of two rows overflows, and what denormal squares lose, 2^-1075
# each, is nothing beside 2^-900.
SMALLEST = 2.0**-900
LARGEST = 2.0**1000


def far(rows: Rows, sums: np.ndarray) -> np.ndarray | None:
    """Where a squared norm is one that float64 may not hold: (S, k); `None` if nowhere.

    Args:
        rows: the rows.
        sums: (S, k(k+1)/2), their products as they came out.
    """
    k = len(rows.plus)
    # Of float32 and narrower the least magnitude is 2^-149 and the largest below 2^128: all squares fit.
    if all(row.dtype != torch.float64 for row in rows.tensors):
        return None
    squares = sums[:, [n for n, (i, j) in enumerate(pairs(k)) if i == j]]
    # Differences of a vector from itself are 0 and need no second look; other zeros are found by `exponents`.
    zero = [plus is minus for plus, minus in zip(rows.plus, rows.minus, strict=True)]
    # Negated, so that a NaN, which is in no range, is outside.
    outside: np.ndarray = ~((squares >= SMALLEST) & (squares <= LARGEST) | np.array(zero))
    return outside if outside.any() else None


def exponents(rows: Rows, blocks: Blocks, outside: np.ndarray) -> np.ndarray:
    """The $e$ (S, k) where a row is `outside`; 0 elsewhere, and where its segment is zero or not finite."""
    powers = np.zeros(outside.shape, int)
    for s, i in np.argwhere(outside).tolist():
        largest = reference.largest(rows, i, *blocks.cuts[s])
        # Powers of two alone: a product with one is exact, and so is its undoing, while the result is a normal number.
        powers[s, i] = math.frexp(largest)[1] if 0 < largest < math.inf else 0
    return powers


def restored(sums: np.ndarray, scaled: np.ndarray, powers: np.ndarray) -> np.ndarray:
    r"""`sums` (S, k(k+1)/2), with products of rows multiplied by $2^{-e}$ in place of those that were out of range."""
    # A product with a row out of range may have left it too, whatever the other row is.
    both = np.stack([powers[:, i] + powers[:, j] for i, j in pairs(powers.shape[1])], axis=1)
    touched = np.stack([(powers[:, i] != 0) | (powers[:, j] != 0) for i, j in pairs(powers.shape[1])], axis=1)
    # What does not fit float64 even then becomes infinity or 0, as it should; what nobody scaled keeps its bits.
    with np.errstate(over="ignore", under="ignore"):
        found: np.ndarray = np.where(touched, np.ldexp(scaled, both), sums)
        return found
