"""Lists of tensors, such as the parameters of a model, that the kernels treat as one long vector.

The kernels read the tensors in place, so the parameters need not be copied into one vector. The module also encodes the
addresses, strides and dtypes of tensors for the compiled backend.
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import attrgetter
from struct import Struct
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from manifoldagg.kernels.alloc import HUGE_PAGE_BYTES, empty_like

__all__ = [
    "CPU",
    "NULL_DESCRIPTOR",
    "Row",
    "TensorList",
    "as_float64",
    "describe_vector",
    "edges",
    "overlapping_pieces",
    "set_reader",
]

NATIVE_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
"""The dtypes that `native.cpp` reads, with the numbers that it uses for them."""
EMPTY_ADDRESS = 64
"""The address of an empty tensor, which is never read. The address 0 marks a missing tensor."""
_pack_descriptor = Struct("3q").pack
NULL_DESCRIPTOR = _pack_descriptor(0, 1, 0)
"""The descriptor of an operand that is `None`."""

CPU = torch.device("cpu")

_dtype = attrgetter("dtype")
_layout = attrgetter("layout")
_is_cpu = attrgetter("is_cpu")
_device = attrgetter("device")

T = TypeVar("T")

Reader = Callable[[tuple[Tensor, ...]], bytes]
_reader: Reader | None = None
_read_header = Struct("3q").unpack_from
HEADER_BYTES = 24
COLUMN_BYTES = 8
"""The size of one number in the table of the native reader."""
KINDS = {
    sum(1 << code for code in NATIVE_DTYPES.values() if bits & 1 << code): frozenset(
        dtype for dtype, code in NATIVE_DTYPES.items() if bits & 1 << code
    )
    for bits in range(1, 1 << len(NATIVE_DTYPES))
}
"""The dtypes of a list for each value of the second number of its table, a bit mask of native dtypes."""
CPU_ONLY = frozenset({CPU})


def set_reader(reader: Reader | None) -> Reader | None:
    """Set the native function that reads the attributes of tensor lists, and return the previous function.

    If `reader` is `None`, the attributes are read in Python.
    """
    global _reader
    before, _reader = _reader, reader
    return before


@lru_cache(maxsize=64)
def _unpack(numbers: bytes) -> tuple[int, ...]:
    """Decode a byte string of 64-bit integers."""
    # Equal inputs return the same cached tuple, and comparing identical tuples is fast.
    return tuple(array("q", numbers))


class _lazy(Generic[T]):
    """A property of a tensor list that is computed at the first access and then cached.

    The first access to any such property calls the native reader, which computes most of the properties at once. The
    class replaces `functools.cached_property`, which acquires a lock in some Python versions. Acquiring the lock takes
    longer than computing the property.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        self.function = function
        self.name = function.__name__

    def __get__(self, row: Any, owner: type | None = None) -> T:
        known = row.__dict__
        if "table" not in known:
            row.read()
            if self.name in known:
                return known[self.name]  # type: ignore[no-any-return]
        value = known[self.name] = self.function(row)
        return value


class TensorList(tuple[Tensor, ...]):
    """A tuple of tensors that the kernels treat as one long vector.

    The tensors can have any shapes and dtypes. The kernels also accept a plain tuple of tensors, but they then read the
    shapes, dtypes and addresses of the tensors in every call. A `TensorList` caches these attributes.

    Use a tensor list only within one aggregation step. During this step, the values of the tensors may change. Their
    shapes, dtypes and storage must not change, because the cached attributes would become invalid.

    Example:
        >>> from manifoldagg.kernels import combine, gram
        >>> row = TensorList([torch.ones(2, 2), torch.tensor(3.0)])
        >>> gram([row]).item()
        13.0
        >>> combine(None, [row], [2.0])
        (tensor([[2., 2.],
                [2., 2.]]), tensor(6.))
    """

    norm_bound: float | None = None
    """An upper bound on the norm of the row, if the creator knows one."""

    disjoint_from: tuple[Any, ...] = ()
    """Rows that do not overlap these tensors, as `operands.check_no_alias` has verified."""

    table: bytes
    """The table of the native reader, or `b""` if the attributes are read in Python; see `tensor_reader.cpp`."""

    def read(self) -> None:
        """Read all attributes in one native call, if the native reader supports these tensors."""
        known = self.__dict__
        known["table"] = table = b""
        # If the addresses are known, the other attributes are known too.
        if _reader is not None and "addresses" not in known and not torch.compiler.is_compiling():
            known["table"] = table = _reader(self)
        if table:
            contiguous, kinds, size = _read_header(table)
            lengths = _unpack(table[HEADER_BYTES : HEADER_BYTES + COLUMN_BYTES * len(self)])
            known.update(lengths=lengths, size=size, is_contiguous=bool(contiguous), devices=CPU_ONLY)
            if kinds in KINDS:
                known.update(dtypes=KINDS[kinds], device=CPU)

    @property
    def form(self) -> bytes:
        """A key to compare two tensor lists: if their keys are equal, their tensors have equal shapes and dtypes.

        The key is `b""` if the compiled code cannot read the attributes of the tensors. Empty keys must not be
        compared. A key that is not empty also guarantees that the tensors are dense and are stored in CPU memory, and
        that no tensor is a negative view (a view that torch negates when it is read).
        """
        if "table" not in self.__dict__:
            self.read()
        # The key follows six columns: length, start address, stop address, and the three numbers of the descriptors.
        return self.table[HEADER_BYTES + 6 * COLUMN_BYTES * len(self) :]

    @_lazy
    def lengths(self) -> tuple[int, ...]:
        """The number of entries of each tensor."""
        return tuple(map(Tensor.numel, self))

    @_lazy
    def size(self) -> int:
        """The number of entries P."""
        return sum(self.lengths)

    @_lazy
    def dtypes(self) -> frozenset[torch.dtype]:
        return frozenset(map(_dtype, self))

    @_lazy
    def devices(self) -> frozenset[torch.device]:
        # Reading the device of every tensor takes as long as all other checks together.
        return CPU_ONLY if all(map(_is_cpu, self)) else frozenset(map(_device, self))

    @_lazy
    def device(self) -> torch.device | None:
        """The common device if all tensors are dense, allocated and floating; else `None`."""
        # Read all attributes that a check needs at once. Each separate property would cost two more calls.
        lengths = tuple(map(Tensor.numel, self))
        dtypes = frozenset(map(_dtype, self))
        self.__dict__.update(lengths=lengths, size=sum(lengths), dtypes=dtypes)
        real = all(dtype.is_floating_point for dtype in dtypes)
        if not real or {torch.strided} != set(map(_layout, self)) or len(self.devices) > 1:
            return None
        (device,) = self.devices
        return None if device.type == "meta" else device

    @_lazy
    def is_contiguous(self) -> bool:
        return all(map(Tensor.is_contiguous, self))

    @_lazy
    def addresses(self) -> tuple[int, ...]:
        """The address of each tensor."""
        if self.table:
            # The second column contains the start addresses.
            n = COLUMN_BYTES * len(self)
            return tuple(array("q", self.table[HEADER_BYTES + n : HEADER_BYTES + 2 * n]))
        return tuple(map(Tensor.data_ptr, self))

    @_lazy
    def address_ranges(self) -> np.ndarray:
        """The address range of each tensor: (2, n)."""
        if self.table:
            # The second and the third column contain the start and stop addresses. The array is a view of the table.
            n = len(self)
            return np.frombuffer(self.table, np.int64, 2 * n, HEADER_BYTES + COLUMN_BYTES * n).reshape(2, n)
        result = np.empty((2, len(self)), np.int64)
        result[:] = self.addresses
        if self.is_contiguous:
            items = self[0].itemsize if len(self.dtypes) == 1 else [dtype.itemsize for dtype in map(_dtype, self)]
            result[1] += np.array(self.lengths, np.int64) * items
        else:
            result[1] += np.array([_byte_extent(tensor) for tensor in self], np.int64)
        return result

    def describe(self) -> bytes:
        """Encode the address, stride and dtype of each tensor for `native.cpp`.

        If `native.cpp` cannot read the tensors, the result is `b""`.
        """
        known = self.__dict__
        if "descriptors" not in known:
            # This function reads everything that a kernel needs. Each separate property would cost two more calls.
            if "table" not in known:
                self.read()
            if "is_contiguous" not in known:
                known["is_contiguous"] = all(map(Tensor.is_contiguous, self))
            if not self.table and "addresses" not in known:
                known["addresses"] = tuple(map(Tensor.data_ptr, self))
            known["descriptors"] = b""
            if known["is_contiguous"] and self.dtypes <= NATIVE_DTYPES.keys():
                n = COLUMN_BYTES * len(self)
                table = self.table[HEADER_BYTES + 3 * n : HEADER_BYTES + 6 * n]
                known["descriptors"] = table or _descriptors(self)
        return bytes(known["descriptors"])  # the same object

    def contiguous(self) -> "TensorList":
        """Return this row, with copies of noncontiguous tensors."""
        return self if self.is_contiguous else TensorList(tensor.contiguous() for tensor in self)

    def new_empty(self) -> "TensorList":
        """Allocate contiguous tensors like these."""
        if self.is_contiguous:
            # `torch.empty_like` is sufficient for tensors that are smaller than a huge page. Neither `torch._foreach_*`
            # nor the DLPack allocator is faster than this loop.
            # No dtype has more than 8 bytes per entry.
            small = 8 * max(self.lengths, default=0) < HUGE_PAGE_BYTES
            result = TensorList(map(torch.empty_like if small else empty_like, self))
            result.__dict__.update(lengths=self.lengths, dtypes=self.dtypes, is_contiguous=True)
            return result
        return TensorList(empty_like(tensor, memory_format=torch.contiguous_format) for tensor in self)


def _descriptors(row: TensorList) -> bytes:
    """Encode the address, stride and dtype of each contiguous tensor as three 64-bit integers.

    The result is `b""` if the values of a tensor cannot be read from its memory.
    """
    addresses = row.addresses
    # A negative view stores the negated values of its entries, so its memory must not be read directly.
    if any(map(Tensor.is_neg, row)):
        return b""
    if 0 in addresses:
        # A lazily allocated zero tensor has entries, but a null data pointer.
        if any(n for n, address in zip(row.lengths, addresses, strict=True) if address == 0):
            return b""
        addresses = tuple([address or EMPTY_ADDRESS for address in addresses])
    # Two slice assignments fill the columns of addresses and dtypes. A loop over hundreds of tensors would be slower.
    table = array("q", (0, 1, NATIVE_DTYPES[row[0].dtype])) * len(row)
    table[::3] = array("q", addresses)
    if len(row.dtypes) > 1:
        table[2::3] = array("q", [NATIVE_DTYPES[tensor.dtype] for tensor in row])
    return table.tobytes()


def describe_vector(vector: Tensor, lengths: tuple[int, ...] | None) -> bytes:
    """Encode the address, stride and dtype of a vector as bytes for the compiled code in `native.cpp`.

    Args:
        vector: a vector on the CPU.
        lengths: the lengths of consecutive pieces of the vector, each of which is encoded separately. `None` means one
            piece.

    Returns:
        The encoded pieces, or `b""` if `native.cpp` cannot read the vector.
    """
    dtype = NATIVE_DTYPES.get(vector.dtype)
    address = vector.data_ptr()
    # A lazily allocated zero tensor has a null data pointer.
    if dtype is None or vector.is_neg() or (address == 0 and vector.shape[0] > 0):
        return b""
    # A vector that is combined with tensor lists is cut into the same pieces, each with its own address.
    step = vector.stride(0)
    if lengths is None:
        return _pack_descriptor(address, step, dtype)
    table = np.empty((len(lengths), 3), np.int64)
    table[:, 0] = address + edges(lengths)[:-1] * (step * vector.itemsize)
    table[:, 1:] = step, dtype
    return table.tobytes()


def _byte_extent(tensor: Tensor) -> int:
    """Return the number of bytes from the start of the first entry to the end of the last entry."""
    # An empty tensor has no last entry.
    if tensor.numel() == 0:
        return 0
    # torch has no negative strides, so the last entry has the largest address.
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


Row = Tensor | tuple[Tensor, ...]
"""A vector (P,), or a tuple of tensors with P entries in total, in the order of the tuple."""


@lru_cache(maxsize=64)
def edges(lengths: tuple[int, ...]) -> np.ndarray:
    """Return the start offset of each piece, followed by the end of the last piece.

    Example:
        >>> edges((2, 0, 3)).tolist()
        [0, 2, 2, 5]
    """
    result = np.array([0, *accumulate(lengths)], np.int64)
    # The result is cached and shared by all callers.
    result.setflags(write=False)
    return result


def overlapping_pieces(borders: Sequence[int], start: int, stop: int) -> list[tuple[int, int, int]]:
    """Find the pieces of a vector that contain the entries from `start` to `stop`.

    The vector is divided into consecutive pieces. `borders` contains the offset of each piece, followed by the end of
    the last piece. The function returns a triple `(i, a, b)` for each piece that it finds: the entries from `a` to `b`
    of piece `i` belong to the range.

    Example:
        >>> overlapping_pieces([0, 2, 2, 5], 1, 4)
        [(0, 1, 2), (2, 0, 2)]
    """
    result = []
    # `bisect_right` skips empty pieces, whose start is equal to the start of the next piece.
    piece = bisect_right(borders, start) - 1
    while start < stop:
        end = min(stop, borders[piece + 1])
        if end > start:
            result.append((piece, start - borders[piece], end - borders[piece]))
        start = max(start, end)
        piece += 1
    return result


def as_float64(row: Row, start: int = 0, stop: int | None = None) -> Tensor:
    """Convert a row to one float64 vector in plain torch."""
    if isinstance(row, Tensor):
        return row[start:stop].double()
    if stop is None and start == 0:
        return torch.cat([tensor.reshape(-1).double() for tensor in row])
    borders = edges(tuple([tensor.numel() for tensor in row])).tolist()
    parts = overlapping_pieces(borders, start, borders[-1] if stop is None else stop)
    return torch.cat([row[i].reshape(-1)[a:b].double() for i, a, b in parts])
