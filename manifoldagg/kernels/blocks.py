r"""The partition of rows into blocks of at most $2^{14}$ entries, which all backends share.

A backend may add the entries of a block in any order. The sums of the blocks are then added in a fixed order, so two
backends differ only by the roundings within a block. Let $G$ be the exact Gram matrix of the rows $r_i$, and $\hat G$
the computed one. With blocks of $n$ entries and the unit roundoff $u = 2^{-53}$ of float64, every entry satisfies

$$|\hat G_{ij} - G_{ij}| \le (n + 3)\,u \sum_p |r_i[p]\, r_j[p]| \le 1.9 \cdot 10^{-12} \sqrt{G_{ii}\, G_{jj}}.$$

The bound counts two roundings of the differences, one rounding of the product, and at most $n - 1$ roundings of the
sum. Adding the blocks with `pairwise_sum` causes a relative error of at most $2u$. The results of two backends
therefore differ by at most twice this bound.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

__all__ = ["BLOCK_SIZE", "Blocks"]

BLOCK_SIZE = 1 << 14
"""The number of entries of a block. The last block of a segment may be shorter."""

Index = slice | np.ndarray


@dataclass(frozen=True, eq=False)
class Blocks:
    """The partition of a row into blocks, which are ranges of consecutive entries.

    The entries of a row can be divided into segments, such as the layers of a model. Each segment is divided into
    blocks of at most `BLOCK_SIZE` entries.

    Attributes:
        segment_bounds: the start and the stop of each segment.
        table: an int64 array (B, 3) with the start, the stop and the segment of each of the B blocks. An empty segment
            has no block.
    """

    segment_bounds: tuple[tuple[int, int], ...]
    table: np.ndarray

    @staticmethod
    @lru_cache(maxsize=64)
    def of(segment_bounds: tuple[tuple[int, int], ...]) -> "Blocks":
        """Divide segments with the given bounds into blocks.

        Example:
            >>> Blocks.of(((0, 20000), (20000, 20000), (20000, 20001))).table.tolist()
            [[0, 16384, 0], [16384, 20000, 0], [20000, 20001, 2]]
        """
        parts = [np.zeros((0, 3), np.int64)]
        for s, (start, stop) in enumerate(segment_bounds):
            # Blocks start at the start of a segment, so the sums of a segment do not depend on other segments.
            low = np.arange(start, stop, BLOCK_SIZE, dtype=np.int64)
            parts.append(np.stack([low, np.minimum(low + BLOCK_SIZE, stop), np.full_like(low, s)], axis=1))
        table = np.concatenate(parts)
        # The table is cached and shared by all callers.
        table.setflags(write=False)
        return Blocks(segment_bounds, table)

    @cached_property
    def table_address(self) -> int:
        return self.table.ctypes.data

    @cached_property
    def reduction_levels(self) -> list[tuple[Index, Index]]:
        """The order in which `pairwise_sum` adds the partial sums of the blocks: in pairs, level by level.

        A level is a pair `(left, right)` of index sequences of equal length. For each i, the partial sum at the index
        `right[i]` is added to the partial sum at the index `left[i]`. The following levels use only the updated one.
        """
        remaining = np.arange(len(self.table))
        levels = []
        segment = self.table[:, 2]
        # Each level halves the number of sums in every segment, so a segment of B blocks needs log2(B) levels, rounded
        # up. A loop over the blocks would instead run B additions one after another.
        while len(remaining) > len(self.first_blocks):
            # `rank` is the position of a block within its segment. Odd positions are added to the even positions before
            # them.
            rank = np.arange(len(remaining)) - np.searchsorted(segment, segment)
            odd_positions = np.flatnonzero(rank % 2)
            levels.append((_as_slice(remaining[odd_positions - 1]), _as_slice(remaining[odd_positions])))
            remaining = remaining[rank % 2 == 0]
            segment = segment[rank % 2 == 0]
        return levels

    @cached_property
    def first_blocks(self) -> np.ndarray:
        """The index of the first block of each nonempty segment."""
        return np.flatnonzero(np.diff(self.table[:, 2], prepend=-1))


def _as_slice(positions: np.ndarray) -> Index:
    """Convert equally spaced indices to a slice, which indexes an array without copying it."""
    gaps = np.diff(positions)
    if len(gaps) and (gaps != gaps[0]).any():
        return positions
    step = int(gaps[0]) if len(gaps) else 1
    return slice(int(positions[0]), int(positions[-1]) + 1, step)
