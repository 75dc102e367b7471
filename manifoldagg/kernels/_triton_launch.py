"""What a launch hands to the Triton kernels: each tensor once, as integers on which Triton does not specialise.

Triton compiles a kernel anew for each pattern of arguments that are 1, or small, or divisible by 16. Addresses, strides
and coefficients would make such patterns without end; so they are passed as `opaque` integers, and what a kernel may
rely on is said in one constant, `aligned`.
"""

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from manifoldagg.kernels.blocks import Blocks

__all__ = ["Operands", "block_table", "opaque", "opaque_floats", "to_device", "to_host"]


@dataclass(frozen=True)
class Operands:
    """The tensors of a launch.

    Attributes:
        addresses: of each tensor, opaque.
        strides: of each tensor, opaque; none where all are 1.
        dtypes: of each tensor.
        places: for each tensor that was asked for, its number; -1 for `None`.
        shared: the tensors that were asked for repeatedly are the first `shared` ones.
        aligned: whether every stride is 1 and every address a multiple of 16 bytes.
        width: how many neighbouring entries a thread takes at once.
    """

    addresses: tuple[int, ...]
    strides: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    places: tuple[int, ...]
    shared: int
    aligned: bool
    width: int

    @staticmethod
    def of(wanted: Sequence[Any]) -> "Operands":
        """Number the tensors, those that appear repeatedly first.

        Example:
            >>> a, b = torch.ones(3), torch.ones(3)
            >>> found = Operands.of([a, None, b, b])
            >>> found.places, found.shared, len(found.addresses)
            ((1, -1, 0, 0), 1, 2)
        """
        keys = {
            id(x): (x.data_ptr(), x.dtype, x.stride(0)) for x in {id(x): x for x in wanted}.values() if x is not None
        }
        asked = [keys.get(id(x)) for x in wanted]
        counts = Counter(key for key in asked if key is not None)
        repeated = [key for key, n in counts.items() if n > 1]
        order = [*repeated, *(key for key, n in counts.items() if n == 1)]
        number: dict[object, int] = {key: n for n, key in enumerate(order)} | {None: -1}
        addresses, dtypes, strides = zip(*order, strict=True)
        unit = all(stride == 1 for stride in strides)
        aligned = unit and not any(address % 16 for address in addresses)
        return Operands(
            tuple(map(opaque, addresses)),
            () if unit else tuple(map(opaque, strides)),
            dtypes,
            tuple([number[key] for key in asked]),
            len(repeated),
            aligned,
            16 // min([dtype.itemsize for dtype in dtypes]) if aligned else 1,
        )


def opaque(value: int) -> int:
    """An odd integer of 64 bits, not 32, that stands for `value` in 0 ... 2^61.

    Example:
        >>> [opaque(n) - 2**41 for n in (0, 1, 16)]
        [1, 3, 33]
    """
    return 2 * (value + (1 << 40)) + 1


def opaque_floats(values: Sequence[float]) -> tuple[int, ...]:
    """The bits of each number, as two opaque halves: Triton would round a float to float32.

    Example:
        >>> [hex((n >> 1) - 2**40) for n in opaque_floats([1.0])]
        ['0x0', '0x3ff00000']
    """
    halves = struct.unpack(f"<{2 * len(values)}I", struct.pack(f"<{len(values)}d", *values))
    return tuple(opaque(half) for half in halves)


@lru_cache(maxsize=64)
def block_table(blocks: Blocks, device: torch.device) -> Tensor:
    """The table of the blocks on a device: it goes there once."""
    return torch.tensor(blocks.table, device=device)


def to_device(values: Sequence[Sequence[float]], device: torch.device) -> Tensor:
    """A float64 tensor on a device, without waiting for it."""
    host = torch.tensor(values, dtype=torch.float64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def to_host(values: Tensor) -> Tensor:
    """A tensor on the host, once its values are there."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    host.copy_(values, non_blocking=True)
    if values.is_cuda:
        torch.cuda.current_stream(values.device).synchronize()
    return host
