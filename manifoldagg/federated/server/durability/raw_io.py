"""Raw bytes of tensors, complete writes to files, and descriptors that are closed with their owner."""

import os
import weakref
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

__all__ = ["close_with", "tensor_bytes", "write_all"]

CHUNK_BYTES = 2**20
"""Bytes that are summed and written at a time: they are in cache for the second."""
_CLOSERS: "dict[int, weakref.finalize[..., Any]]" = {}
"""The functions that `close_with` returned last, by descriptor."""


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the values of a tensor as contiguous bytes: a copy only if they are not contiguous in CPU memory.

    Example:
        >>> tensor_bytes(torch.tensor([1, 2], dtype=torch.int16)).hex()
        '01000200'
    """
    line = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    # One number, or none, is contiguous whatever its stride, and not a view of bytes then.
    return line.as_strided(line.shape, (1,)).view(torch.uint8).numpy().data


def write_all(write: Callable[[memoryview], int], data: memoryview, checksum: int) -> int:
    """Write all of `data`, also if a system call writes only a part.

    Args:
        write: of a file: takes bytes, and says how many it has taken.
        data: to write.
        checksum: of what was written before.

    Returns:
        The checksum with them.

    Example:
        >>> import io
        >>> write_all(io.BytesIO().write, memoryview(b"abc"), 0) == zlib.crc32(b"abc")
        True
    """
    for start in range(0, len(data), CHUNK_BYTES):
        piece = data[start : start + CHUNK_BYTES]
        checksum = zlib.crc32(piece, checksum)
        while piece:
            piece = piece[write(piece) :]
    return checksum


def close_with(owner: object, file: int) -> "weakref.finalize[..., Any]":
    """Return a function that closes a descriptor, and call it when `owner` is deleted.

    At the end of the process it stays open, because threads and `atexit` functions may still write to it, and the next
    file that is opened would get its number.

    A child of `os.fork` gets the null device in its place, because a lock is held until each copy of its descriptor is
    closed. The number stays in use, so that no write of the child can reach another file.
    """
    close = weakref.finalize(owner, _close, file)
    close.atexit = False
    _CLOSERS[file] = close
    return close


def _close(file: int) -> None:
    with suppress(OSError):
        os.close(file)


def _release_in_child() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for file, close in _CLOSERS.items():
        if close.alive:
            os.dup2(null, file, inheritable=False)
    os.close(null)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)
