"""The reference backend, which implements the kernels in plain PyTorch.

The backend processes one cache-sized block of entries after another. If PyTorch split a sum over several threads, the
rounding errors would depend on the number of threads. A single block is too small to be split, so the results do not
depend on the number of threads.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from manifoldagg.kernels.blocks import BLOCK_SIZE, Blocks
from manifoldagg.kernels.operands import Operand, Operands
from manifoldagg.kernels.tensor_list import TensorList, edges, overlapping_pieces

__all__ = ["block_products", "combine", "unavailable"]

PRODUCT_COLUMNS = BLOCK_SIZE // 16
"""The number of columns of a matrix product. A product of this size is too small for BLAS to split over threads."""


def unavailable() -> str | None:
    """Return `None`, because the reference backend is always available."""
    return None


@torch.no_grad()
def block_products(rows: Operands, blocks: Blocks, scales: np.ndarray | None = None) -> np.ndarray:
    r"""Compute the inner products of all pairs of rows, separately for each block of consecutive entries.

    For the rows $r_i$ and $r_j$, the product over a block $b$ is the sum $\sum_{p \in b} r_i[p]\, r_j[p]$ over the
    entries $p$ of this block.

    Args:
        rows: k rows.
        blocks: the B blocks. Each block belongs to one of S segments.
        scales: exponents $e$ (S, k) of powers of two, or `None`. In segment $s$, row $i$ is first multiplied by
            $2^{e_{si}}$.

    Returns:
        A float64 array (B, k(k+1)/2), with one column for each pair of rows $i$ and $j \le i$.
    """
    k = len(rows.plus)
    lines = _BlockReader(rows, blocks, k)
    sums = []
    for b, segment in lines:
        for j, line in enumerate(lines.buffers):
            lines.read(b, j, line)
        for line, power in zip(lines.buffers, () if scales is None else scales[segment].tolist(), strict=False):
            # Multiply twice, because 2^power can exceed the range of float64 although the product does not.
            line.mul_(2.0 ** (power // 2)).mul_(2.0 ** (power - power // 2))
        # Products of many small matrices, summed afterwards: BLAS would split one long product over threads.
        sums.append(torch.bmm(lines.matrices, lines.matrices.mT).sum(0))
    total = (torch.stack(sums) if sums else lines.scratch.new_zeros(0, k, k)).cpu().numpy()
    found: np.ndarray = total[:, *np.tril_indices(k)]
    return found


@torch.no_grad()
def combine(
    base: Operand | None, rows: Operands, coefficients: Sequence[Sequence[float]], blocks: Blocks, out: Operand
) -> Operand:
    r"""Compute a base row plus a linear combination of rows, and write the result into the row `out`.

    Each segment $s$ of the rows, such as the parameters of one layer, has its own coefficients $c^{(s)}_j$. With the
    rows $r_j$, the result in this segment is $out = base + \sum_j c^{(s)}_j\, r_j$. Each entry is computed in float64
    and rounded once.
    """
    # One buffer accumulates the sum, and the other receives one row after another.
    lines = _BlockReader(rows, blocks, 2)
    first = None if base is None else lines.split(base)
    target = lines.split(out)
    for b, segment in lines:
        total, line = lines.buffers
        total.zero_() if first is None else lines.load(first, b, total)
        for j, c in enumerate(coefficients[segment]):
            # A row with the coefficient 0 is not read, so that a NaN in it has no effect.
            if c != 0:
                lines.read(b, j, line)
                total.add_(line, alpha=c)
        lines.store(total, b, target)
    return out


class _BlockReader:
    """A reader that converts long vectors to float64, one block of consecutive entries after another.

    A loop over the reader visits the blocks. For each block, the loop yields the index of the block and the index of
    the segment (such as a layer) that contains it. In the loop, `read` copies this block of a vector into a buffer.

    Attributes:
        buffers: k float64 vectors, into which `read` copies the block.
        matrices: a view (m, k, c) of the buffers, which divides each zero-padded buffer into m parts of c entries.
            The sum of `matrices @ matrices.mT` over the m parts is the Gram matrix of the buffers.
        subtrahend: the buffer for the subtrahend, if `read` computes the difference of two vectors.
    """

    buffers: list[Tensor]
    matrices: Tensor
    subtrahend: Tensor

    def __init__(self, rows: Operands, blocks: Blocks, count: int) -> None:
        self.segments = blocks.table[:, 2].tolist()
        self.block_bounds = blocks.table[:, :2].tolist()
        self.widths: list[int] = [stop - start for start, stop in self.block_bounds]
        self.piece_edges = None if rows.lengths is None else edges(rows.lengths).tolist()
        self.views = {id(row): self.split(row) for row in rows.distinct}
        self.rows = rows
        self.scratch = torch.empty((count + 1, BLOCK_SIZE), dtype=torch.float64, device=rows.device)
        self.cached_subtrahend: tuple[Operand, int] | None = None

    def __iter__(self) -> Iterator[tuple[int, int]]:
        before = None
        for b, (width, segment) in enumerate(zip(self.widths, self.segments, strict=True)):
            # Most blocks have the same width, so the views are rarely rebuilt.
            if width != before:
                # The batch has at least two matrices. torch passes a single matrix product to a library that may split
                # it over threads.
                whole = max(2, -(-width // PRODUCT_COLUMNS)) * PRODUCT_COLUMNS
                # The padding is zero, so that it does not change the products.
                self.scratch[:, width:whole] = 0
                *self.buffers, self.subtrahend = self.scratch[:, :width]
                self.matrices = self.scratch[:-1, :whole].view(len(self.buffers), -1, PRODUCT_COLUMNS).transpose(0, 1)
                before = width
            if self.piece_edges is not None:
                self.block_pieces = overlapping_pieces(self.piece_edges, *self.block_bounds[b])
            yield b, segment

    def split(self, row: Operand) -> Sequence[Tensor]:
        """Split a vector into blocks, or flatten the tensors of a tensor list."""
        return row.split(self.widths) if isinstance(row, Tensor) else TensorList(tensor.view(-1) for tensor in row)

    def load(self, row: Sequence[Tensor], b: int, buffer: Tensor) -> None:
        """Copy block b of a row into a float64 buffer."""
        if not isinstance(row, TensorList):
            buffer.copy_(row[b])
            return
        at = 0
        for i, start, stop in self.block_pieces:
            buffer[at : at + stop - start].copy_(row[i][start:stop])
            at += stop - start

    def store(self, buffer: Tensor, b: int, row: Sequence[Tensor]) -> None:
        """Round the float64 entries of block b to the dtype of the row, and write them."""
        if not isinstance(row, TensorList):
            row[b].copy_(buffer)
            return
        at = 0
        for i, start, stop in self.block_pieces:
            row[i][start:stop].copy_(buffer[at : at + stop - start])
            at += stop - start

    def read(self, b: int, j: int, buffer: Tensor) -> None:
        """Compute block b of row j in float64, and write it into `buffer`."""
        # The conversion to float64 is exact. It precedes the subtraction, because a difference of nearly equal numbers
        # in a narrower dtype would lose their low bits.
        self.load(self.views[id(self.rows.plus[j])], b, buffer)
        if (minus := self.rows.minus[j]) is None:
            return
        # Several rows often have the same subtrahend, so the block of the last subtrahend is cached.
        if self.cached_subtrahend is None or self.cached_subtrahend[0] is not minus or self.cached_subtrahend[1] != b:
            self.cached_subtrahend = (minus, b)
            self.load(self.views[id(minus)], b, self.subtrahend)
        buffer.sub_(self.subtrahend)
