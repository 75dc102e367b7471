"""The memory floor of other benchmarks: vectors are streamed through the processor without other work."""

import ctypes
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

SOURCE = Path(__file__).with_name("streams.cpp")
STREAMS = 32
"""The maximum number of vectors of one stream."""


class Floor:
    """Streams in C++ over contiguous float32 vectors of the same length, compiled at construction."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "streams.so"
            flags = ("-std=c++20", "-O3", "-march=native", "-fPIC", "-shared", "-pthread")
            subprocess.run(["g++", *flags, "-o", str(library), str(SOURCE)], check=True)
            self.library = ctypes.CDLL(str(library))

    def read(self, vectors: Sequence[Tensor], threads: int) -> None:
        """Read each vector once."""
        self.library.streams_read(*_listed(vectors), ctypes.c_int64(vectors[0].numel()), ctypes.c_int64(threads))

    def read_write(self, vectors: Sequence[Tensor], out: Tensor, threads: int) -> None:
        """Read each vector once and write one vector."""
        size = ctypes.c_int64(out.numel())
        target = ctypes.c_void_p(out.data_ptr())
        self.library.streams_read_write(*_listed(vectors), target, size, ctypes.c_int64(threads))

    def multiply_add(self, count: int, threads: int) -> None:
        """Multiply and add float64 numbers in registers, `count` times on each thread."""
        self.library.streams_multiply_add(ctypes.c_int64(count), ctypes.c_int64(threads))


def _listed(vectors: Sequence[Tensor]) -> tuple[ctypes.c_int64, ctypes.Array[ctypes.c_void_p]]:
    if len(vectors) > STREAMS:
        raise ValueError(f"vectors: expected at most {STREAMS}, got {len(vectors)}")
    places = (ctypes.c_void_p * len(vectors))(*[vector.data_ptr() for vector in vectors])
    return ctypes.c_int64(len(vectors)), places
