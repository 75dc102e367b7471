"""The reference backend: plain torch, block by block in cache, with `out=` scratch. It runs wherever torch does.

Blocks are shorter than the length at which torch splits an operation over threads: the result does not depend on
the number of threads.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from manifoldagg.kernels.blocks import BLOCK, Blocks
from manifoldagg.kernels.rows import Rows

__all__ = ["combine", "partials", "unavailable"]

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
    lines = _Lines(rows, blocks, k)
    sums = []
    for b, segment in lines:
        for j, line in enumerate(lines.each):
            lines.read(b, j, line)
        for line, power in zip(lines.each, () if scales is None else scales[segment].tolist(), strict=False):
            # In two halves: 2^power itself may be no float64 where the product is.
            line.mul_(2.0 ** (power // 2)).mul_(2.0 ** (power - power // 2))
        sums.append(torch.bmm(lines.factors, lines.factors.mT).sum(0))
    total = (torch.stack(sums) if sums else lines.memory.new_zeros(0, k, k)).cpu().numpy()
    found: np.ndarray = total[:, *np.tril_indices(k)]
    return found


@torch.no_grad()
def combine(
    base: Tensor | None, rows: Rows, coefficients: Sequence[Sequence[float]], blocks: Blocks, out: Tensor
) -> Tensor:
    """$out = base + \\sum_j c^{(s)}_j r_j$ on each segment, summed in float64 and rounded once."""
    lines = _Lines(rows, blocks, 2)
    starts = None if base is None else base.split(lines.widths)
    targets = out.split(lines.widths)
    for b, segment in lines:
        total, line = lines.each
        total.zero_() if starts is None else total.copy_(starts[b])
        for j, c in enumerate(coefficients[segment]):
            if c != 0:
                lines.read(b, j, line)
                total.add_(line, alpha=c)
        targets[b].copy_(total)
    return out


class _Lines:
    """Lines of float64 into which the rows are read, block by block.

    While it is iterated, `each` has them at the width of the block at hand, and `factors` as matrices of `PART`
    columns, a batch of them, whose products add to those of the lines.
    """

    each: list[Tensor]
    factors: Tensor
    less: Tensor

    def __init__(self, rows: Rows, blocks: Blocks, count: int) -> None:
        self.segments = blocks.table[:, 2].tolist()
        self.widths: list[int] = (blocks.table[:, 1] - blocks.table[:, 0]).tolist()
        self.views = {id(row): row.split(self.widths) for row in rows.tensors}
        self.rows = rows
        self.memory = rows.plus[0].new_empty((count + 1, BLOCK), dtype=torch.float64)
        self.held: Tensor | None = None

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Each block and its segment."""
        before = None
        for b, (width, segment) in enumerate(zip(self.widths, self.segments, strict=True)):
            if width != before:
                # At least two products: torch would hand one alone to a library that shares it among threads.
                whole = max(2, -(-width // PART)) * PART
                self.memory[:, width:whole] = 0
                *self.each, self.less = self.memory[:, :width]
                self.factors = self.memory[:-1, :whole].view(len(self.each), -1, PART).transpose(0, 1)
                before = width
            yield b, segment

    def read(self, b: int, j: int, line: Tensor) -> None:
        """Block b of row j, in float64, into a line; `less` holds what was subtracted last."""
        line.copy_(self.views[id(self.rows.plus[j])][b])
        if (minus := self.rows.minus[j]) is None:
            return
        view = self.views[id(minus)][b]
        if view is not self.held:
            self.held = view
            self.less.copy_(view)
        line.sub_(self.less)
