"""The reference backend: plain torch, block by block in cache, with `out=` scratch. It runs wherever torch does.

Blocks are shorter than the length at which torch splits an operation over threads: the result does not depend on
the number of threads.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from manifoldagg.kernels.blocks import BLOCK, Blocks, pairs
from manifoldagg.kernels.rows import Rows

__all__ = ["combine", "largest", "partials", "unavailable"]

PART = BLOCK // 16
"""The length of a product that is one small matrix product: too small for a library to share among threads."""


def unavailable() -> str | None:
    """It is always there."""
    return None


@torch.no_grad()
def partials(rows: Rows, blocks: Blocks, scales: np.ndarray | None = None) -> np.ndarray:
    r"""$\sum_{p \in b} r_i[p]\, r_j[p]$ for each block $b$ and $j \le i$: (B, k(k+1)/2) float64.

    With `scales` (S, k), row i is multiplied by $2^{e}$, $e$ that of the segment and the row, first.
    """
    k = len(rows.plus)
    cut = _Cut(rows, blocks)
    owners = blocks.table[:, 2].tolist()
    memory = _memory(rows, k)
    sums = []
    for b, scratch in enumerate(cut.scratches(memory)):
        for j, line in enumerate(scratch.lines):
            cut.read(b, j, line, scratch.less)
        for line, power in zip(scratch.lines, () if scales is None else scales[owners[b]].tolist(), strict=False):
            # In two halves: 2^power itself may be no float64 where the product is.
            line.mul_(2.0 ** (power // 2)).mul_(2.0 ** (power - power // 2))
        sums.append(torch.bmm(scratch.left, scratch.right).sum(0))
    total = (torch.stack(sums) if sums else memory.new_zeros(0, k, k)).cpu().numpy()
    found: np.ndarray = total.reshape(len(sums), k * k)[:, [i * k + j for i, j in pairs(k)]]
    return found


@torch.no_grad()
def combine(
    base: Tensor | None, rows: Rows, coefficients: Sequence[Sequence[float]], blocks: Blocks, out: Tensor
) -> Tensor:
    """$out = base + \\sum_j c^{(s)}_j r_j$ on each segment, summed in float64 and rounded once."""
    cut = _Cut(rows, blocks)
    owners = blocks.table[:, 2].tolist()
    starts = None if base is None else base.split(cut.widths)
    targets = out.split(cut.widths)
    for b, scratch in enumerate(cut.scratches(_memory(rows, 2))):
        total, line = scratch.lines
        total.zero_() if starts is None else total.copy_(starts[b])
        for j, c in enumerate(coefficients[owners[b]]):
            if c != 0:
                cut.read(b, j, line, scratch.less)
                total.add_(line, alpha=c)
        targets[b].copy_(total)
    return out


@torch.no_grad()
def largest(rows: Rows, i: int, start: int, stop: int) -> float:
    """The largest magnitude among the entries from `start` to `stop` of row i; NaN where one is NaN."""
    found = [0.0]
    minus = rows.minus[i]
    for low in range(start, stop, BLOCK):
        window = slice(low, min(low + BLOCK, stop))
        line = rows.plus[i][window].double()
        found.append((line if minus is None else line - minus[window].double()).abs().max().item())
    return float(np.max(found))


class _Cut:
    """Views of the rows, cut into blocks."""

    def __init__(self, rows: Rows, blocks: Blocks) -> None:
        self.widths: list[int] = (blocks.table[:, 1] - blocks.table[:, 0]).tolist()
        views = {id(row): row.split(self.widths) for row in rows.tensors}
        self.plus = [views[id(row)] for row in rows.plus]
        self.minus = [None if row is None else views[id(row)] for row in rows.minus]
        self.held: Tensor | None = None

    def scratches(self, memory: Tensor) -> "Iterator[_Scratch]":
        """For each block, lines of its width."""
        for i, width in enumerate(self.widths):
            if i == 0 or width != self.widths[i - 1]:
                scratch = _Scratch(memory, width)
            yield scratch

    def read(self, b: int, j: int, line: Tensor, less: Tensor) -> None:
        """Block b of row j, in float64, into a line; `less` holds what was subtracted last."""
        line.copy_(self.plus[j][b])
        if (minus := self.minus[j]) is None:
            return
        if minus[b] is not self.held:
            self.held = minus[b]
            less.copy_(minus[b])
        line.sub_(less)


class _Scratch:
    """The first entries of lines in float64: one by one, and as the factors of products of `PART` entries each."""

    def __init__(self, memory: Tensor, width: int) -> None:
        # At least two products: torch would hand one alone to a library that shares it among threads.
        whole = max(2, -(-width // PART)) * PART
        memory[:, width:whole] = 0
        *self.lines, self.less = memory[:, :width]
        self.left = memory[:-1, :whole].view(len(self.lines), -1, PART).transpose(0, 1)
        self.right = self.left.mT


def _memory(rows: Rows, count: int) -> Tensor:
    """(count + 1, BLOCK) in float64."""
    return rows.plus[0].new_empty((count + 1, BLOCK), dtype=torch.float64)
