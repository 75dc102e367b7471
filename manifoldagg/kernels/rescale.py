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

SMALLEST, LARGEST = 2.0**-900, 2.0**1000


def far(rows: Rows, sums: np.ndarray) -> np.ndarray | None:
    """Where a squared norm is one that float64 may not hold: (S, k); `None` if nowhere.

    Args:
        rows: the rows.
        sums: (S, k(k+1)/2), their products as they came out.
    """
    k = len(rows.plus)
    if all(row.dtype != torch.float64 for row in rows.tensors):
        return None
    squares = sums[:, [n for n, (i, j) in enumerate(pairs(k)) if i == j]]
    zero = [plus is minus for plus, minus in zip(rows.plus, rows.minus, strict=True)]
    outside: np.ndarray = ~((squares >= SMALLEST) & (squares <= LARGEST) | np.array(zero))
    return outside if outside.any() else None


def exponents(rows: Rows, blocks: Blocks, outside: np.ndarray) -> np.ndarray:
    """The $e$ (S, k) where a row is `outside`; 0 elsewhere, and where its segment is zero or not finite."""
    powers = np.zeros(outside.shape, int)
    for s, i in np.argwhere(outside).tolist():
        largest = reference.largest(rows, i, *blocks.cuts[s])
        powers[s, i] = math.frexp(largest)[1] if 0 < largest < math.inf else 0
    return powers


def restored(sums: np.ndarray, scaled: np.ndarray, powers: np.ndarray) -> np.ndarray:
    r"""`sums` (S, k(k+1)/2), with products of rows multiplied by $2^{-e}$ in place of those that were out of range."""
    both = np.stack([powers[:, i] + powers[:, j] for i, j in pairs(powers.shape[1])], axis=1)
    touched = np.stack([(powers[:, i] != 0) | (powers[:, j] != 0) for i, j in pairs(powers.shape[1])], axis=1)
    with np.errstate(over="ignore", under="ignore"):
        found: np.ndarray = np.where(touched, np.ldexp(scaled, both), sums)
        return found
