"""The reference backend: plain torch, block by block in cache, with `out=` scratch. It runs wherever torch does.

Blocks are shorter than the length at which torch splits an operation over threads: the result does not depend on
the number of threads.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from manifoldagg.kernels.blocks import BLOCK, Blocks
from manifoldagg.kernels.operands import Line, Rows
from manifoldagg.kernels.tensor_list import Tensors, edges, overlaps

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
def combine(base: Line | None, rows: Rows, coefficients: Sequence[Sequence[float]], blocks: Blocks, out: Line) -> Line:
    """$out = base + \\sum_j c^{(s)}_j r_j$ on each segment, summed in float64 and rounded once."""
    lines = _Lines(rows, blocks, 2)
    first = None if base is None else lines.cut(base)
    target = lines.cut(out)
    for b, segment in lines:
        total, line = lines.each
        total.zero_() if first is None else lines.load(first, b, total)
        for j, c in enumerate(coefficients[segment]):
            if c != 0:
                lines.read(b, j, line)
                total.add_(line, alpha=c)
        lines.store(total, b, target)
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
        self.borders = blocks.table[:, :2].tolist()
        self.widths: list[int] = [stop - start for start, stop in self.borders]
        self.pieces = None if rows.lengths is None else edges(rows.lengths).tolist()
        self.views = {id(row): self.cut(row) for row in rows.distinct}
        self.rows = rows
        self.memory = torch.empty((count + 1, BLOCK), dtype=torch.float64, device=rows.device)
        self.held: tuple[Line, int] | None = None

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
            if self.pieces is not None:
                self.parts = overlaps(self.pieces, *self.borders[b])
            yield b, segment

    def cut(self, row: Line) -> Sequence[Tensor]:
        """A vector block by block, or the tensors as vectors."""
        return row.split(self.widths) if isinstance(row, Tensor) else Tensors(tensor.view(-1) for tensor in row)

    def load(self, row: Sequence[Tensor], b: int, line: Tensor) -> None:
        """Block b of a row that was cut, into a line."""
        if not isinstance(row, Tensors):
            line.copy_(row[b])
            return
        at = 0
        for i, start, stop in self.parts:
            line[at : at + stop - start].copy_(row[i][start:stop])
            at += stop - start

    def store(self, line: Tensor, b: int, row: Sequence[Tensor]) -> None:
        """A line into block b of a row that was cut."""
        if not isinstance(row, Tensors):
            row[b].copy_(line)
            return
        at = 0
        for i, start, stop in self.parts:
            row[i][start:stop].copy_(line[at : at + stop - start])
            at += stop - start

    def read(self, b: int, j: int, line: Tensor) -> None:
        """Block b of row j, in float64, into a line; `less` holds what was subtracted last."""
        self.load(self.views[id(self.rows.plus[j])], b, line)
        if (minus := self.rows.minus[j]) is None:
            return
        if self.held is None or self.held[0] is not minus or self.held[1] != b:
            self.held = (minus, b)
            self.load(self.views[id(minus)], b, self.less)
        line.sub_(self.less)
