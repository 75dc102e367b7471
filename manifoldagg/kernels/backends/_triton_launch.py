"""Operands of a Triton launch: each row once, as integers on which Triton does not specialise.

Triton compiles a kernel anew for each pattern of arguments that are 1, or small, or divisible by 16. Addresses, strides
and coefficients would make such patterns without end; so they are passed as `opaque` integers, and what a kernel may
rely on is said in one constant, `is_aligned`.
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
    """The distinct rows of a launch: vectors, or tensor lists.

    Attributes:
        addresses: of each vector, opaque. Of rows in pieces tables on the device: where each piece of each row begins,
            and after them how far apart its entries are; the edges of the pieces; the first piece of each block.
        strides: of each vector, opaque; none where all are 1. Of rows in pieces the number of pieces, opaque.
        dtypes: of each row.
        indices: for each row that was asked for, its number; -1 for `None`.
        num_shared: the rows that were asked for repeatedly are the first `num_shared` ones.
        is_aligned: whether every stride is 1 and every address a multiple of 16 bytes.
        has_pieces: whether the rows are in pieces.
        width: how many neighbouring entries a thread takes at once.
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
        """Number the rows, repeated ones first.

        Args:
            operands: vectors, tuples of tensors of one dtype that lie in one piece each, or `None`.
            lengths: of the tensors, where there are tuples.
            blocks: of the launch, where there are tuples.

        Example:
            >>> a, b = torch.ones(3), torch.ones(3)
            >>> found = LaunchOperands.of([a, None, b, b])
            >>> found.indices, found.num_shared, len(found.addresses)
            ((1, -1, 0, 0), 1, 2)
        """
        rows = {id(x): x for x in operands if x is not None}
        keys: dict[int, Any] = {place: _memory_key(row) for place, row in rows.items()} | {id(None): None}
        asked = [keys[id(x)] for x in operands]
        counts = Counter(key for key in asked if key is not None)
        order = sorted(counts, key=lambda key: counts[key] == 1)
        number: dict[Any, int] = {key: n for n, key in enumerate(order)} | {None: -1}
        places = tuple([number[key] for key in asked])
        shared = sum(n > 1 for n in counts.values())
        addresses, dtypes, strides = zip(*order, strict=True)
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
    """Where a row lies, its dtype, and how far apart its entries are."""
    if isinstance(row, Tensor):
        return row.data_ptr(), row.dtype, row.stride(0)
    return row.addresses, row[0].dtype, 1


def _address_table(
    order: Sequence[tuple[Any, torch.dtype, int]], lengths: tuple[int, ...], device: torch.device
) -> Tensor:
    """(n, pieces + 1): where the pieces of each row begin, and its stride."""
    table = np.empty((len(order), len(lengths) + 1), np.int64)
    for line, (address, dtype, stride) in zip(table, order, strict=True):
        line[:-1] = address if isinstance(address, tuple) else address + edges(lengths)[:-1] * stride * dtype.itemsize
        line[-1] = stride
    return to_device(torch.from_numpy(table), device)


@lru_cache(maxsize=64)
def piece_tables(lengths: tuple[int, ...], blocks: Blocks, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return device tables of the edges of pieces, and of the first piece of each block; they are cached."""
    borders = edges(lengths)
    first = np.searchsorted(borders, blocks.table[:, 0], side="right") - 1
    return torch.tensor(borders, device=device), torch.tensor(first, device=device)


def opaque(value: int) -> int:
    """Encode `value` in 0 ... 2^61 as an odd 64-bit integer, on which Triton does not specialise.

    Example:
        >>> [opaque(n) - 2**41 for n in (0, 1, 16)]
        [1, 3, 33]
    """
    return 2 * (value + (1 << 40)) + 1


def opaque_floats(values: Sequence[float]) -> tuple[int, ...]:
    """Encode each number as two opaque halves of its bits; Triton would round a float to float32.

    Example:
        >>> [hex((n >> 1) - 2**40) for n in opaque_floats([1.0])]
        ['0x0', '0x3ff00000']
    """
    halves = struct.unpack(f"<{2 * len(values)}I", struct.pack(f"<{len(values)}d", *values))
    return tuple(opaque(half) for half in halves)


@lru_cache(maxsize=64)
def block_table(blocks: Blocks, device: torch.device) -> Tensor:
    """Return the table of the blocks on a device; it is cached."""
    return torch.tensor(blocks.table, device=device)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device asynchronously."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def to_host(values: Tensor) -> Tensor:
    """Copy a tensor to the host and wait for its values."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    host.copy_(values, non_blocking=True)
    if values.is_cuda:
        torch.cuda.current_stream(values.device).synchronize()
    return host
