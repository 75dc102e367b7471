r"""Blocks: how every backend cuts the rows, and how the sums of the blocks become one sum.

A backend returns one partial sum for each block; here they are folded, always in the same order and with the
rounding errors kept. The result does not depend on who computed which block, nor on how many threads there were.

Inside a block of $n \le 2^{14}$ entries a backend may add in any order, so that with $u = 2^{-53}$ every entry of a
Gram matrix obeys

$$|\hat G_{ij} - G_{ij}| \le (n + 3)\,u \sum_p |r_i[p]\, r_j[p]| \le 1.9 \cdot 10^{-12} \sqrt{G_{ii}\, G_{jj}}:$$

one rounding for each difference and for the product, at most $n - 1$ for the sum; the fold adds a relative
$2u$ at most. Two backends differ by twice that at most.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

__all__ = ["BLOCK", "Blocks", "fold", "pairs", "symmetric", "two_sum"]

BLOCK = 1 << 14
"""The length of a block, in entries; the last one of a segment may be shorter."""

Pair = tuple[np.ndarray, np.ndarray] | np.ndarray
Index = slice | np.ndarray


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of all segments, in order.

    Attributes:
        cuts: start and stop of each segment.
        table: (B, 3), int64: start, stop and segment of each block. An empty segment has none.
    """

    cuts: tuple[tuple[int, int], ...]
    table: np.ndarray

    @staticmethod
    @lru_cache(maxsize=64)
    def of(cuts: tuple[tuple[int, int], ...]) -> "Blocks":
        """The blocks of segments with these borders.

        Example:
            >>> Blocks.of(((0, 20000), (20000, 20000), (20000, 20001))).table.tolist()
            [[0, 16384, 0], [16384, 20000, 0], [20000, 20001, 2]]
        """
        lines = [np.zeros((0, 3), np.int64)]
        for s, (start, stop) in enumerate(cuts):
            low = np.arange(start, stop, BLOCK, dtype=np.int64)
            lines.append(np.stack([low, np.minimum(low + BLOCK, stop), np.full_like(low, s)], axis=1))
        table = np.concatenate(lines)
        table.setflags(write=False)
        return Blocks(cuts, table)

    @cached_property
    def address(self) -> int:
        """Where `table` lies in memory."""
        return self.table.ctypes.data

    @cached_property
    def levels(self) -> list[tuple[Index, Index]]:
        """The tree of `fold`: at each level, which parts take another one, and which those are."""
        here = np.arange(len(self.table))
        levels = []
        segment = self.table[:, 2]
        while len(here) > len(self.first):
            rank = np.arange(len(here)) - np.searchsorted(segment, segment)
            taken = np.flatnonzero(rank % 2)
            levels.append((_regular(here[taken - 1]), _regular(here[taken])))
            here = here[rank % 2 == 0]
            segment = segment[rank % 2 == 0]
        return levels

    @cached_property
    def first(self) -> np.ndarray:
        """The first block of each segment that has one."""
        return np.flatnonzero(np.diff(self.table[:, 2], prepend=-1))


def _regular(places: np.ndarray) -> Index:
    """Places at one distance as a slice, which needs no copy."""
    gaps = np.diff(places, prepend=places[0] - 1)[1:]
    if len(gaps) and (gaps != gaps[0]).any():
        return places
    step = int(gaps[0]) if len(gaps) else 1
    return slice(int(places[0]), int(places[-1]) + 1, step)


def pairs(k: int) -> list[tuple[int, int]]:
    """The entries (i, j), j <= i, of a symmetric k x k matrix, in the order of a partial sum.

    Example:
        >>> pairs(2)
        [(0, 0), (1, 0), (1, 1)]
    """
    return [(i, j) for i in range(k) for j in range(i + 1)]


def fold(partials: np.ndarray, blocks: Blocks) -> np.ndarray:
    r"""The sums over the blocks of each segment, as unevaluated pairs $h + l$.

    Neighbours are added pairwise, level by level; the rounding error of each addition is computed exactly
    (Knuth's two-sum) and carried along. So $h + l$ has an error of order $u^2 \sum |x|$, and $h$ is the sum
    rounded once, but for ties closer than that.

    Args:
        partials: (B, n) float64, a row for each block.
        blocks: which segment each belongs to.

    Returns:
        (2, S, n): $h$ and $l$.
    """
    total = np.zeros((2, len(blocks.cuts), partials.shape[1]))
    if not blocks.levels:
        total[0, blocks.table[:, 2]] = partials
        return total
    parts = np.zeros((2, *partials.T.shape))  # blocks last: numpy runs along them
    parts[0] = partials.T
    with np.errstate(invalid="ignore", over="ignore"):
        for left, right in blocks.levels:
            parts[0][:, left], parts[1][:, left] = two_sum(parts[..., left], parts[..., right])
    total[:, blocks.table[blocks.first, 2]] = parts[..., blocks.first].swapaxes(1, 2)
    return total


def two_sum(a: Pair, b: Pair) -> Pair:
    """The sum of two pairs $h + l$ as a pair; where $h$ is not finite, $l$ is 0. It may warn of infinities."""
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


def symmetric(sums: np.ndarray, k: int) -> Tensor:
    """The matrices (S, k, k) of whose lower half (S, k(k+1)/2) are the entries."""
    return torch.from_numpy(sums.take(_places(k), axis=1))


@lru_cache(maxsize=64)
def _places(k: int) -> np.ndarray:
    """Where each entry of a k x k matrix stands in `pairs`."""
    where = {pair: n for n, pair in enumerate(pairs(k))}
    return np.array([[where[max(i, j), min(i, j)] for i in range(k)] for j in range(k)])
