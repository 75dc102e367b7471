"""Encoding of the arguments of a Triton kernel, so that new argument values do not cause a recompilation.

Triton compiles a separate version of a kernel if an integer argument is 1, and another one if it is divisible by 16.
Addresses, strides and coefficients differ between calls, so they would cause many compilations. This module therefore
encodes each of them as an opaque integer, that is, an odd integer greater than 1. The kernel decodes it.

The compiler also cannot see the alignment of an encoded address. The constant `is_aligned` therefore declares the
alignment to the kernel.
"""

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manifoldagg.kernels.blocks import Blocks
from manifoldagg.kernels.operands import Operand
from manifoldagg.kernels.tensor_list import edges

__all__ = ["LaunchOperands", "block_table", "opaque", "opaque_floats", "to_device", "to_host"]


@dataclass(frozen=True)
class LaunchOperands:
    """The distinct rows of a launch. They are either vectors, or tensor lists ("rows in pieces").

    Attributes:
        addresses: the opaque address of each vector. For rows in pieces, three tables on the device: the addresses of
            the pieces and the stride of each row; the edges of the pieces; the first piece of each block.
        strides: the opaque stride of each vector; empty if all are 1. For rows in pieces, the opaque number of pieces.
        dtypes: the dtype of each row.
        indices: for each requested row, its index among the distinct rows; -1 for `None`.
        num_shared: the number of rows that are requested more than once. These rows are numbered first.
        is_aligned: whether every stride is 1 and every address is a multiple of 16 bytes.
        has_pieces: whether the rows are in pieces.
        width: the number of neighbouring entries that a thread processes at once.
    """

    addresses: tuple[Any, ...]
    strides: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    indices: tuple[int, ...]
    num_shared: int
    is_aligned: bool
    has_pieces: bool
    width: int

    @staticmethod
    def of(
        operands: Sequence[Any], lengths: tuple[int, ...] | None = None, blocks: Blocks | None = None
    ) -> "LaunchOperands":
        """Collect the distinct operands of a kernel launch, and assign an index to each of them.

        The same operand can occur several times. The kernel reads such an operand only once and retains it in
        registers. The operands that occur several times get the lowest indices.

        Args:
            operands: vectors, tuples of contiguous tensors of one dtype, or `None`.
            lengths: the lengths of the tensors, if there are tuples.
            blocks: the blocks of the launch, if there are tuples.

        Example:
            >>> a, b = torch.ones(3), torch.ones(3)
            >>> operands = LaunchOperands.of([a, None, b, b])
            >>> operands.indices, operands.num_shared, len(operands.addresses)
            ((1, -1, 0, 0), 1, 2)
        """
        # Different tensor objects with the same address, dtype and stride are one row, which is read once.
        rows = {id(x): x for x in operands if x is not None}
        keys: dict[int, Any] = {place: _memory_key(row) for place, row in rows.items()} | {id(None): None}
        asked = [keys[id(x)] for x in operands]
        counts = Counter(key for key in asked if key is not None)
        # `False` sorts before `True`, so shared rows come first. The sort is stable.
        order = sorted(counts, key=lambda key: counts[key] == 1)
        number: dict[Any, int] = {key: n for n, key in enumerate(order)} | {None: -1}
        places = tuple([number[key] for key in asked])
        shared = sum(n > 1 for n in counts.values())
        addresses, dtypes, strides = zip(*order, strict=True)
        # A thread loads 16 bytes of the narrowest dtype with one instruction.
        width = 16 // min([dtype.itemsize for dtype in dtypes])
        if lengths is not None:
            assert blocks is not None
            some = next(iter(rows.values()))
            device = some.device if isinstance(some, Tensor) else some[0].device
            tables = (_address_table(order, lengths, device), *piece_tables(lengths, blocks, device))
            return LaunchOperands(tables, (opaque(len(lengths)),), dtypes, places, shared, False, True, width)
        unit = all(stride == 1 for stride in strides)
        aligned = unit and not any(address % 16 for address in addresses)
        opaque_strides = () if unit else tuple(map(opaque, strides))
        return LaunchOperands(
            tuple(map(opaque, addresses)), opaque_strides, dtypes, places, shared, aligned, False, width
        )


def _memory_key(row: Operand) -> tuple[Any, torch.dtype, int]:
    # The tensors of a tensor list are contiguous here, so its stride is 1.
    """Return a key that identifies the memory of a row: its address, dtype and stride."""
    if isinstance(row, Tensor):
        return row.data_ptr(), row.dtype, row.stride(0)
    return row.addresses, row[0].dtype, 1


def _address_table(
    order: Sequence[tuple[Any, torch.dtype, int]], lengths: tuple[int, ...], device: torch.device
) -> Tensor:
    """Build a device table with one line per operand: its tensors' addresses, then its stride."""
    # A vector is divided into pieces of the given lengths, so that each piece has an address like a tensor of a list.
    table = np.empty((len(order), len(lengths) + 1), np.int64)
    for line, (address, dtype, stride) in zip(table, order, strict=True):
        line[:-1] = address if isinstance(address, tuple) else address + edges(lengths)[:-1] * stride * dtype.itemsize
        line[-1] = stride
    return to_device(torch.from_numpy(table), device)


@lru_cache(maxsize=64)
def piece_tables(lengths: tuple[int, ...], blocks: Blocks, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return two tables on `device`, in which a kernel looks up the tensors that overlap a block.

    The kernel treats a list of tensors as one long vector. A block is a range of consecutive entries of this vector.

    - The first table contains the offset of each tensor in the vector, followed by the end of the last tensor.
    - The second table contains, for each block, the index of the first tensor that overlaps the block.

    Both tables are cached.
    """
    borders = edges(lengths)
    # `side="right"` skips empty pieces, whose start is equal to the start of the next piece.
    first = np.searchsorted(borders, blocks.table[:, 0], side="right") - 1
    return torch.tensor(borders, device=device), torch.tensor(first, device=device)


def opaque(value: int) -> int:
    """Encode an integer from 0 to 2^61 as an odd 64-bit integer greater than 1.

    Triton treats all such integers alike, so a new value does not cause a recompilation.

    Example:
        >>> [opaque(n) - 2**41 for n in (0, 1, 16)]
        [1, 3, 33]
    """
    # The offset of 2^40 keeps the result a 64-bit integer. Small values would be 32-bit integers, another variant.
    return 2 * (value + (1 << 40)) + 1


def opaque_floats(values: Sequence[float]) -> tuple[int, ...]:
    """Encode the lower and the upper 32 bits of each float64 number as two opaque integers.

    Triton would round a float argument to float32, but it passes integers unchanged.

    Example:
        >>> [hex((n >> 1) - 2**40) for n in opaque_floats([1.0])]
        ['0x0', '0x3ff00000']
    """
    halves = struct.unpack(f"<{2 * len(values)}I", struct.pack(f"<{len(values)}d", *values))
    return tuple(opaque(half) for half in halves)


@lru_cache(maxsize=64)
def block_table(blocks: Blocks, device: torch.device) -> Tensor:
    """Return the cached table of the blocks on a device."""
    return torch.tensor(blocks.table, device=device)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device asynchronously."""
    # Only copies from pinned memory are asynchronous.
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def to_host(values: Tensor) -> Tensor:
    """Copy a tensor to the host and wait for its values."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    host.copy_(values, non_blocking=True)
    if values.is_cuda:
        torch.cuda.current_stream(values.device).synchronize()
    return host
