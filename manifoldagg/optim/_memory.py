"""Check for overlapping memory before an optimizer step.

If a tensor that the step writes shares memory with another tensor of the step, the result can be wrong.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from manifoldagg.errors import ArgumentError
from manifoldagg.kernels import TensorList

__all__ = ["MemoryAccess", "check_no_alias"]


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
    names = [name for model in accesses for name in model.names]
    borders = np.cumsum([0, *(len(model.names) for model in accesses)])
    ranges = []
    positions = []
    tensors: list[Tensor] = []
    for model, start in zip(accesses, borders, strict=False):
        for row in model.writes:
            expanded = (
                [] if row.is_contiguous else [name for name, x in zip(model.names, row, strict=True) if _is_expanded(x)]
            )
            if expanded:
                raise ArgumentError(
                    f"params: {expanded[0]}: expected entries with their own memory, got an expanded tensor"
                )
            ranges.append(row.address_ranges)
            positions.append(np.arange(start, start + len(row)))
            tensors += row
    low, high = np.concatenate(ranges, axis=1) if ranges else np.empty((2, 0), np.int64)
    order = np.argsort(low, kind="stable")
    order = order[high[order] > low[order]]  # Empty tensors do not occupy memory.
    if not len(order):
        return
    low = low[order]
    high = high[order]
    position = np.concatenate(positions)[order]
    shared = np.flatnonzero(high[:-1] > low[1:])
    if len(shared):
        name = names[max(position[shared[0]], position[shared[0] + 1])]
        raise ArgumentError(f"params: {name}: expected its own memory, got memory of another written tensor")
    for model, start in zip(accesses, borders, strict=False):
        for row in {id(row): row for row in model.reads if isinstance(row, TensorList)}.values():
            start_address, end = row.address_ranges
            # The written tensors are disjoint and sorted by address. For each read tensor, find the first written
            # tensor that ends after the read tensor begins. If any written tensor overlaps with the read tensor, this
            # one does.
            first = np.minimum(np.searchsorted(high, start_address, side="right"), len(order) - 1)
            for i in np.flatnonzero(
                (low[first] < end) & (high[first] > start_address) & (end > start_address)
            ).tolist():
                j = first[i]
                same = (position[j], low[j], high[j]) == (start + i, start_address[i], end[i])
                if not same or row[i].dtype != tensors[order[j]].dtype:
                    name = model.names[i]
                    raise ArgumentError(
                        f"params: {name}: expected gradients and bases disjoint from or identical to written memory, "
                        "got a partial overlap"
                    )


def _is_expanded(tensor: Tensor) -> bool:
    return any(step == 0 and n > 1 for n, step in zip(tensor.shape, tensor.stride(), strict=True))
