"""Alias checks of a step: written memory is disjoint from all other memory that is read or written."""

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
    """The rows of one model, with one tensor for each parameter.

    Attributes:
        names: of the parameters.
        writes: the parameters, and what is kept beside them.
        reads: what the step is made of.
    """

    names: Sequence[str]
    writes: Sequence[TensorList]
    reads: Iterable[Any]


def check_no_alias(accesses: Sequence[MemoryAccess]) -> None:
    """Check that written memory is disjoint from read memory, or is the same entries of the same parameter.

    Raises:
        ArgumentError: naming a parameter of which that is not so.
    """
    names = [name for model in accesses for name in model.names]
    borders = np.cumsum([0, *(len(model.names) for model in accesses)])
    spans, places = [], []
    tensors: list[Tensor] = []
    for model, start in zip(accesses, borders, strict=False):
        for row in model.writes:
            odd = (
                [] if row.is_contiguous else [name for name, x in zip(model.names, row, strict=True) if _is_expanded(x)]
            )
            if odd:
                raise ArgumentError(
                    f"params: {odd[0]}: expected entries with memory of their own, got an expanded tensor"
                )
            spans.append(row.address_ranges)
            places.append(np.arange(start, start + len(row)))
            tensors += row
    low, high = np.concatenate(spans, axis=1) if spans else np.empty((2, 0), np.int64)
    order = np.argsort(low, kind="stable")
    order = order[high[order] > low[order]]  # tensors without entries are nowhere
    if not len(order):
        return
    low, high, place = low[order], high[order], np.concatenate(places)[order]
    shared = np.flatnonzero(high[:-1] > low[1:])
    if len(shared):
        name = names[max(place[shared[0]], place[shared[0] + 1])]
        raise ArgumentError(f"params: {name}: expected memory of its own, got some that is written elsewhere too")
    for model, start in zip(accesses, borders, strict=False):
        for row in {id(row): row for row in model.reads if isinstance(row, TensorList)}.values():
            begin, end = row.address_ranges
            # By address, the first that ends behind where each begins: it is met, if any is.
            first = np.minimum(np.searchsorted(high, begin, side="right"), len(order) - 1)
            for i in np.flatnonzero((low[first] < end) & (high[first] > begin) & (end > begin)).tolist():
                j = first[i]
                same = (place[j], low[j], high[j]) == (start + i, begin[i], end[i])
                if not same or row[i].dtype != tensors[order[j]].dtype:
                    name = model.names[i]
                    raise ArgumentError(
                        f"params: {name}: expected gradients and bases apart from what is written, or just there"
                    )


def _is_expanded(tensor: Tensor) -> bool:
    return any(step == 0 and n > 1 for n, step in zip(tensor.shape, tensor.stride(), strict=True))
