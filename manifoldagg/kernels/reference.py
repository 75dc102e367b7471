"""The reference backend: plain torch, in chunks that stay in cache, with `out=` scratch.

Chunks are shorter than the length at which torch splits an operation over threads, and their partial sums
are added in order: the result does not depend on the number of threads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from manifoldagg.kernels.rows import Rows

CHUNK = 1 << 14


def gram(rows: Rows, segments: Sequence[tuple[int, int]]) -> Tensor:
    """$G^{(s)}_{ij} = \\sum_{p \\in s} r_i[p]\\, r_j[p]$, differences and products in float64: (S, k, k)."""
    k = len(rows.plus)
    scratch = rows.plus[0].new_empty((k + 1, CHUNK), dtype=torch.float64)
    total = scratch.new_zeros((len(segments), k, k))
    for s, (start, stop) in enumerate(segments):
        for low in range(start, stop, CHUNK):
            width = min(CHUNK, stop - low)
            window = slice(low, low + width)
            product, lines = scratch[k, :width], scratch[:k, :width]
            for i in range(k):
                _difference(rows, i, window, out=lines[i])
                for j in range(i + 1):
                    torch.mul(lines[i], lines[j], out=product)
                    total[s, i, j] += product.sum()
    lower = total.tril(-1)
    return total + lower.mT


def combine(
    base: Tensor | None,
    rows: Rows,
    coefficients: Sequence[Sequence[float]],
    segments: Sequence[tuple[int, int]],
    out: Tensor,
) -> Tensor:
    """$out = base + \\sum_j c^{(s)}_j r_j$ on each segment, summed in float64 and rounded once."""
    scratch = out.new_empty((2, CHUNK), dtype=torch.float64)
    for (start, stop), line in zip(segments, coefficients, strict=True):
        used = [j for j, c in enumerate(line) if c != 0]
        for low in range(start, stop, CHUNK):
            width = min(CHUNK, stop - low)
            window = slice(low, low + width)
            total, row = scratch[0, :width], scratch[1, :width]
            total.zero_() if base is None else total.copy_(base[window])
            for j in used:
                total.add_(_difference(rows, j, window, out=row), alpha=line[j])
            out[window].copy_(total)
    return out


def _difference(rows: Rows, i: int, window: slice, *, out: Tensor) -> Tensor:
    out.copy_(rows.plus[i][window])
    less = rows.minus[i]
    return out if less is None else out.sub_(less[window])
