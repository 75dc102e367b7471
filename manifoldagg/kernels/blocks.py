r"""Blocks: the partition of the rows that every backend uses.

Inside a block of $n \le 2^{14}$ entries a backend may add in any order, so that with $u = 2^{-53}$ every entry of a
Gram matrix obeys

$$|\hat G_{ij} - G_{ij}| \le (n + 3)\,u \sum_p |r_i[p]\, r_j[p]| \le 1.9 \cdot 10^{-12} \sqrt{G_{ii}\, G_{jj}}:$$

one rounding for each difference and for the product, at most $n - 1$ for the sum; `pairwise_sum` adds a relative
$2u$ at most. Two backends differ by twice that at most.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

__all__ = ["BLOCK_SIZE", "Blocks"]

BLOCK_SIZE = 1 << 14
"""The length of a block, in entries; the last one of a segment may be shorter."""

Index = slice | np.ndarray


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of all segments, in order.

    Attributes:
        segment_bounds: start and stop of each segment.
        table: (B, 3), int64: start, stop and segment of each block. An empty segment has none.
    """

    segment_bounds: tuple[tuple[int, int], ...]
    table: np.ndarray

    @staticmethod
    @lru_cache(maxsize=64)
    def of(segment_bounds: tuple[tuple[int, int], ...]) -> "Blocks":
        """Build the blocks of segments with these borders.

        Example:
            >>> Blocks.of(((0, 20000), (20000, 20000), (20000, 20001))).table.tolist()
            [[0, 16384, 0], [16384, 20000, 0], [20000, 20001, 2]]
        """
        lines = [np.zeros((0, 3), np.int64)]
        for s, (start, stop) in enumerate(segment_bounds):
            low = np.arange(start, stop, BLOCK_SIZE, dtype=np.int64)
            lines.append(np.stack([low, np.minimum(low + BLOCK_SIZE, stop), np.full_like(low, s)], axis=1))
        table = np.concatenate(lines)
        table.setflags(write=False)
        return Blocks(segment_bounds, table)

    @cached_property
    def table_address(self) -> int:
        """The memory address of `table`."""
        return self.table.ctypes.data

    @cached_property
    def reduction_levels(self) -> list[tuple[Index, Index]]:
        """The tree of `pairwise_sum`: for each level, the parts that are added and their targets."""
        here = np.arange(len(self.table))
        levels = []
        segment = self.table[:, 2]
        while len(here) > len(self.first_blocks):
            rank = np.arange(len(here)) - np.searchsorted(segment, segment)
            taken = np.flatnonzero(rank % 2)
            levels.append((_as_slice(here[taken - 1]), _as_slice(here[taken])))
            here = here[rank % 2 == 0]
            segment = segment[rank % 2 == 0]
        return levels

    @cached_property
    def first_blocks(self) -> np.ndarray:
        """The first block of each nonempty segment."""
        return np.flatnonzero(np.diff(self.table[:, 2], prepend=-1))


def _as_slice(positions: np.ndarray) -> Index:
    """Places at one distance as a slice, which needs no copy."""
    gaps = np.diff(positions, prepend=positions[0] - 1)[1:]
    if len(gaps) and (gaps != gaps[0]).any():
        return positions
    step = int(gaps[0]) if len(gaps) else 1
    return slice(int(positions[0]), int(positions[-1]) + 1, step)
