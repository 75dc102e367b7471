"""Check for overlapping memory before an optimizer step.

If a tensor that the step writes shares memory with another tensor of the step, the result can be wrong.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from manifoldagg.errors import ArgumentError
from manifoldagg.kernels import TensorList

__all__ = ["MemoryAccess", "check_no_alias"]

Piece = tuple[int, int, int, torch.dtype]
"""The memory of a tensor: its first address, the address after its end, the index of its parameter, and its dtype."""


@dataclass(frozen=True)
class MemoryAccess:
    """The tensors that the optimizer step of one model writes and reads.

    The tensors are stored in lists with one tensor for each parameter of the model.

    Attributes:
        names: the names of the parameters.
        writes: the lists that the step overwrites: the parameters, and each stored state such as a momentum.
        reads: the lists that the step only reads, such as the gradients. Values of other types, such as `None`, are
            ignored.
    """

    names: Sequence[str]
    writes: Sequence[TensorList]
    reads: Iterable[Any]


def check_no_alias(accesses: Sequence[MemoryAccess]) -> None:
    """Check that each tensor that an optimizer step overwrites has its own memory.

    There is one exception. A tensor that the step only reads, such as a gradient, may have exactly the same addresses
    as an overwritten tensor of the same parameter and dtype. This is safe, because the step reads each element before
    it overwrites it.

    Args:
        accesses: the memory of each model that is updated.

    Raises:
        ArgumentError: if two tensors overlap, or if a written tensor is expanded. The message contains the name of a
            parameter.
    """
    names: list[str] = []
    written: list[Piece] = []
    read: list[Piece] = []
    for model in accesses:
        for row in model.writes:
            for name, x in zip(model.names, () if row.is_contiguous else row, strict=False):
                if _is_expanded(x):
                    raise ArgumentError(
                        f"params: {name}: expected entries with their own memory, got an expanded tensor"
                    )
        written += _pieces(model.writes, len(names))
        read += _pieces({id(row): row for row in model.reads if isinstance(row, TensorList)}.values(), len(names))
        names += model.names
    written.sort(key=itemgetter(0))
    for (_, end, i, _), (start, _, j, _) in pairwise(written):
        if end > start:
            raise ArgumentError(
                f"params: {names[max(i, j)]}: expected its own memory, got memory of another written tensor"
            )
    # The written pieces are disjoint and sorted by address. For each read piece, find the first written piece that ends
    # after the read piece begins. If any written piece overlaps with the read piece, this one does.
    ends = [end for _, end, _, _ in written]
    for piece in read:
        start, end, i, _ = piece
        nearest = bisect_right(ends, start)
        if nearest < len(written) and written[nearest][0] < end and written[nearest] != piece:
            raise ArgumentError(
                f"params: {names[i]}: expected gradients and bases disjoint from or identical to written memory, "
                "got a partial overlap"
            )


def _pieces(rows: Iterable[TensorList], first: int) -> Iterator[Piece]:
    """Yield the memory of each tensor that is not empty. `first` is the index of the first parameter."""
    for row in rows:
        starts, ends = row.address_ranges.tolist()
        for i, (start, end, x) in enumerate(zip(starts, ends, row, strict=True), first):
            if end > start:
                yield start, end, i, x.dtype


def _is_expanded(tensor: Tensor) -> bool:
    return any(step == 0 and n > 1 for n, step in zip(tensor.shape, tensor.stride(), strict=True))
