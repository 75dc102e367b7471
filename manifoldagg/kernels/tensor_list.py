"""Tensors: a row that lies in pieces, as a model does."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import attrgetter
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from manifoldagg.kernels.alloc import HUGE, empty_like

__all__ = ["CPU", "DTYPES", "Row", "Tensors", "edges", "overlaps", "reals"]

DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
"""What `native.cpp` calls the dtypes that it reads."""
APART = 64
"""An address that no tensor has and nobody reads: that of a tensor without entries, where 0 would mean no tensor."""

CPU = torch.device("cpu")

_dtype = attrgetter("dtype")
_layout = attrgetter("layout")
_is_cpu = attrgetter("is_cpu")
_device = attrgetter("device")


T = TypeVar("T")


class _Once(Generic[T]):
    """A property that is computed once: a `cached_property` without the lock, which takes longer than the answers."""

    def __init__(self, ask: Callable[[Any], T]) -> None:
        self.ask = ask

    def __get__(self, row: Any, owner: type | None = None) -> T:
        found = row.__dict__[self.ask.__name__] = self.ask(row)
        return found


class Tensors(tuple[Tensor, ...]):
    r"""A row whose P entries are those of some tensors, of any shapes and dtypes, one tensor after another.

    It is the tuple of these tensors and stands wherever a kernel takes one; the kernels make it of a plain tuple
    themselves. Made by the caller it spares questions: what each tensor is and where it lies is asked once, by the
    first call, and not again in the next ones. So it is for one step, in which no tensor is given another shape, dtype
    or storage; what the entries are may change.

    Example:
        >>> from manifoldagg.kernels import combine, gram
        >>> row = Tensors([torch.ones(2, 2), torch.tensor(3.0)])
        >>> gram([row]).item()
        13.0
        >>> combine(None, [row], [2.0])
        (tensor([[2., 2.],
                [2., 2.]]), tensor(6.))
    """

    bound: float | None = None
    """How long the row is at most, where whoever made it has said so."""

    apart: tuple[Any, ...] = ()
    """Rows of which a caller has seen, by `rows.check_apart`, that these tensors may be written while they are read."""

    @_Once
    def lengths(self) -> tuple[int, ...]:
        """How many entries each tensor has."""
        return tuple(map(Tensor.numel, self))

    @_Once
    def size(self) -> int:
        """P."""
        return sum(self.lengths)

    @_Once
    def dtypes(self) -> frozenset[torch.dtype]:
        """The dtypes that occur."""
        return frozenset(map(_dtype, self))

    @_Once
    def devices(self) -> frozenset[torch.device]:
        """The devices that occur."""
        # To ask each tensor for its device would take as long as everything else together.
        return frozenset({CPU}) if all(map(_is_cpu, self)) else frozenset(map(_device, self))

    @_Once
    def device(self) -> torch.device | None:
        """The device of all, if there is one and all are dense there, with values, and of floating dtypes."""
        real = all(dtype.is_floating_point for dtype in self.dtypes)
        dense = {torch.strided} == set(map(_layout, self))
        if not (real and dense) or len(self.devices) > 1:
            return None
        (device,) = self.devices
        return None if device.type == "meta" else device

    @_Once
    def whole(self) -> bool:
        """Whether each tensor lies in one piece, entry after entry."""
        return all(map(Tensor.is_contiguous, self))

    @_Once
    def addresses(self) -> tuple[int, ...]:
        """Where each tensor begins."""
        return tuple(map(Tensor.data_ptr, self))

    @_Once
    def extent(self) -> tuple[int, int]:
        """Two addresses between which all entries lie."""
        if not self.whole:
            return int(self.spans[0].min()), int(self.spans[1].max())
        item = max(dtype.itemsize for dtype in self.dtypes)
        return min(self.addresses), max(self.addresses) + max(self.lengths) * item

    @_Once
    def spans(self) -> np.ndarray:
        """(2, n): the addresses between which the entries of each tensor lie."""
        found = np.empty((2, len(self)), np.int64)
        found[:] = self.addresses
        if self.whole:
            items = self[0].itemsize if len(self.dtypes) == 1 else [dtype.itemsize for dtype in map(_dtype, self)]
            found[1] += np.array(self.lengths, np.int64) * items
        else:
            found[1] += np.array([_extent(tensor) for tensor in self], np.int64)
        return found

    @_Once
    def table(self) -> bytes | None:
        """Address, stride 1 and dtype of each tensor, as `native.cpp` reads them; `None` where it could not.

        The tensors lie in one piece each.
        """
        if not self.dtypes <= DTYPES.keys() or any(map(Tensor.is_neg, self)):
            return None
        if len(self.dtypes) == 1:
            table = _blank(len(self), DTYPES[self[0].dtype]).copy()
        else:
            table = _blank(len(self), 0).copy()
            table[:, 2] = [DTYPES[d] for d in map(_dtype, self)]
        table[:, 0] = self.addresses
        if 0 in self.addresses:
            empty = table[:, 0] == 0
            if np.array(self.lengths)[empty].any():  # zeros that torch never wrote down
                return None
            table[empty, 0] = APART
        return table.tobytes()

    def contiguous(self) -> "Tensors":
        """This row, or one with copies of the tensors that do not lie in one piece."""
        return self if self.whole else Tensors(tensor.contiguous() for tensor in self)

    def fresh(self) -> "Tensors":
        """Tensors like these, each in one piece, not yet written."""
        if self.whole:
            # Where all are small none need be asked for its size.
            small = 8 * max(self.lengths, default=0) < HUGE
            found = Tensors(map(torch.empty_like if small else empty_like, self))
            found.__dict__.update(lengths=self.lengths, dtypes=self.dtypes, whole=True)
            return found
        return Tensors(empty_like(tensor, memory_format=torch.contiguous_format) for tensor in self)


def _extent(tensor: Tensor) -> int:
    """The bytes from the first entry to the last."""
    if tensor.numel() == 0:
        return 0
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.itemsize


Row = Tensor | tuple[Tensor, ...]
"""A vector (P,), or tensors whose entries, one tensor after another, are P numbers."""


@lru_cache(maxsize=64)
def _blank(count: int, dtype: int) -> np.ndarray:
    """A table without addresses, to be copied."""
    return np.tile(np.array([0, 1, dtype], np.int64), (count, 1))


@lru_cache(maxsize=64)
def edges(lengths: tuple[int, ...]) -> np.ndarray:
    """Where pieces of these lengths begin, and where the last one ends.

    Example:
        >>> edges((2, 0, 3)).tolist()
        [0, 2, 2, 5]
    """
    found = np.array([0, *accumulate(lengths)], np.int64)
    found.setflags(write=False)
    return found


def overlaps(borders: Sequence[int], start: int, stop: int) -> list[tuple[int, int, int]]:
    """The pieces with entries from `start` to `stop`: which, and from where to where within it.

    Example:
        >>> overlaps([0, 2, 2, 5], 1, 4)
        [(0, 1, 2), (2, 0, 2)]
    """
    found = []
    piece = bisect_right(borders, start) - 1
    while start < stop:
        end = min(stop, borders[piece + 1])
        if end > start:
            found.append((piece, start - borders[piece], end - borders[piece]))
        start = max(start, end)
        piece += 1
    return found


def reals(row: Row, start: int = 0, stop: int | None = None) -> Tensor:
    """Entries of a row as one vector of float64 numbers, in plain torch."""
    if isinstance(row, Tensor):
        return row[start:stop].double()
    if stop is None and start == 0:
        return torch.cat([tensor.reshape(-1).double() for tensor in row])
    borders = edges(tuple([tensor.numel() for tensor in row])).tolist()
    parts = overlaps(borders, start, borders[-1] if stop is None else stop)
    return torch.cat([row[i].reshape(-1)[a:b].double() for i, a, b in parts])
