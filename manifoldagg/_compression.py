"""Lossless compression of tensors with zstandard, and optional rounding of tensors before the compression.

The rounding changes no entry by more than a given error bound, and makes the compressed data smaller.

Before the compression, a byte shuffle stores the first bytes of all numbers together, then the second bytes, and so on.
The shuffled bytes compress better, because the bytes at the same position of each number are often similar.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manifoldagg.errors import ArgumentError, WireError

__all__ = ["MAX_COMPRESSION_RATIO", "compress_planes", "decompress_planes", "round_to_grid"]

MAX_COMPRESSION_RATIO = 100
"""The largest ratio of the sizes of a tensor in memory and in a message. Smaller compressed data are padded."""
CHUNK_BYTES = 2**20
"""The number of bytes that are decompressed at a time."""
MAX_ZSTD_WINDOW = 2**23
"""The largest window of the decompressor in bytes, which limits its memory."""
COMPRESSION_LEVEL = 1
"""The level of zstandard. Higher levels take longer and do not compress weights better."""


def round_to_grid(x: Tensor, error: float) -> Tensor:
    """Round the entries of a tensor to multiples of a power of two, so that no entry changes by more than `error`.

    Integer tensors, 8-bit tensors and entries that are not finite are returned unchanged.
    """
    if not x.is_floating_point() or x.itemsize == 1:
        return x
    # A division by a power of two is exact in floating point, so the error bound is strict.
    step = math.ldexp(1.0, math.frexp(2 * error)[1] - 1) if error < 2.0**1000 else 2.0**1000
    wide = x if x.itemsize > 2 else x.float()
    near = (wide / step).round_().mul_(step).to(x.dtype)
    return torch.where(near.isfinite(), near, x)


def compress_planes(data: memoryview, width: int) -> bytes:
    """Compress an array of numbers with zstandard, after a byte shuffle.

    The byte shuffle stores the first bytes of all numbers together, then the second bytes, and so on.

    Args:
        data: the bytes of the numbers.
        width: the number of bytes of each number.

    Returns:
        The compressed bytes. If they are shorter than the input by more than a factor of `MAX_COMPRESSION_RATIO`, they
        are padded with zeros.
    """
    planes = np.ascontiguousarray(np.frombuffer(data, np.uint8).reshape(-1, width).T)
    made: bytes = _import_zstandard(ArgumentError).ZstdCompressor(COMPRESSION_LEVEL).compress(planes.data)
    return made.ljust(-(-data.nbytes // MAX_COMPRESSION_RATIO), b"\0")


def decompress_planes(data: np.ndarray, out: np.ndarray, width: int) -> None:
    """Decompress the result of `compress_planes` into an array.

    The function limits its memory consumption, because the compressed bytes may come from an untrusted source.

    Args:
        data: the result of `compress_planes`.
        out: the array for the decompressed bytes.
        width: the number of bytes of each number.

    Raises:
        ValueError: if the number of decompressed bytes differs from the size of `out`.
    """
    zstandard = _import_zstandard(WireError, "wire: ")
    if zstandard.frame_content_size(data.data) != len(out):
        raise ValueError("a compressed entry of another size")
    planes = out.reshape(-1, width).T
    count = len(planes[0])
    piece = np.empty(min(count, CHUNK_BYTES), np.uint8)
    with zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW).stream_reader(data.data) as reader:
        for plane in planes:
            for start in range(0, count, CHUNK_BYTES):
                part = piece[: count - start]
                if reader.readinto(part.data) != len(part):
                    raise ValueError("a compressed entry of another size")
                plane[start : start + CHUNK_BYTES] = part


def _import_zstandard(error: type[Exception], prefix: str = "") -> Any:
    try:
        import zstandard
    except ImportError:
        raise error(f"{prefix}compress: expected zstandard to be installed: pip install 'manifoldagg[wire]'") from None
    return zstandard
