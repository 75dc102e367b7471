"""The compiled backend: `native.cpp`, built once for this machine and called without a copy.

The library is kept in the user's cache folder under a name that its source, compiler, flags and processor
determine: other processes find it there.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from manifoldagg._output import whole
from manifoldagg.kernels.blocks import Blocks
from manifoldagg.kernels.rows import Rows

__all__ = ["combine", "partials", "takes", "unavailable"]

SOURCE = Path(__file__).with_name("native.cpp")
# No contraction but the fused operations that are written: every processor rounds alike.
FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
SERIAL = 1 << 17
"""Below so many entries read, starting a thread costs more than it saves."""
STREAM = 1 << 22
"""From so many bytes on, a result is written past the cache."""


def unavailable() -> str | None:
    """Why the backend cannot be used here, in one sentence; `None` if it can. Builds the library at first."""
    found = _library()
    return found if isinstance(found, str) else None


def takes(tensors: Sequence[Tensor]) -> bool:
    """Whether the library can read these tensors of one device: on the CPU, of the four dtypes, plain memory."""
    if not tensors[0].is_cpu:
        return False
    for tensor in tensors:
        if tensor.dtype not in DTYPES or tensor.is_neg() or (tensor.data_ptr() == 0 and tensor.shape[0] > 0):
            return False
    return True


def partials(rows: Rows, blocks: Blocks) -> np.ndarray:
    r"""$\sum_{p \in b} r_i[p]\, r_j[p]$ for each block $b$ and $j \le i$: (B, k(k+1)/2) float64."""
    k = len(rows.plus)
    count = len(blocks.table)
    sums = np.empty((count, k * (k + 1) // 2))
    edges = array("q", (0, rows.size))
    described = _describe((*rows.plus, *rows.minus))
    start = described.buffer_info()[0]
    done = _loaded().manifoldagg_gram(
        *(k, 1, edges.buffer_info()[0], start, start + k * VECTOR, count, blocks.address, sums.ctypes.data),
        _threads(rows, count),
    )
    if not done:
        raise MemoryError("gram: no memory for the scratch of a block")
    return sums


def combine(
    base: Tensor | None, rows: Rows, coefficients: Sequence[Sequence[float]], blocks: Blocks, out: Tensor
) -> Tensor:
    """$out = base + \\sum_j c^{(s)}_j r_j$ on each segment, summed in float64 and rounded once."""
    k = len(rows.plus)
    count = len(blocks.table)
    edges = array("q", (0, rows.size))
    described = _describe((*rows.plus, *rows.minus, base, out))
    numbers = array("d", [c for line in coefficients for c in line])
    start = described.buffer_info()[0]
    done = _loaded().manifoldagg_combine(
        *(k, 1, edges.buffer_info()[0], start, start + k * VECTOR),
        *(start + 2 * k * VECTOR, start + (2 * k + 1) * VECTOR),
        *(numbers.buffer_info()[0], count, blocks.address, _streams(base, rows, out), _threads(rows, count)),
    )
    if not done:
        raise MemoryError("combine: no memory for the scratch of a block")
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
    return out


VECTOR = 24
"""The bytes of a vector's description: address, stride, dtype."""


def _describe(vectors: Sequence[Tensor | None]) -> "array[int]":
    known = {id(None): (0, 1, 0)}
    numbers: list[int] = []
    for vector in vectors:
        if vector is not None and id(vector) not in known:
            known[id(vector)] = (vector.data_ptr(), vector.stride(0), DTYPES[vector.dtype])
        numbers += known[id(vector)]
    return array("q", numbers)


def _streams(base: Tensor | None, rows: Rows, out: Tensor) -> bool:
    """Whether to write past the cache: a large, aligned target that is not read."""
    place = out.data_ptr()
    size = out.itemsize
    if out.shape[0] * size < STREAM or place % size != 0:
        return False
    return all(row is None or row.data_ptr() != place for row in (*rows.tensors, base))


def _threads(rows: Rows, blocks: int) -> int:
    return min(torch.get_num_threads(), blocks) if rows.size * len(rows.plus) > SERIAL else 1


def _loaded() -> ctypes.CDLL:
    found = _library()
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


@cache
def _library() -> ctypes.CDLL | str:
    """The library, built if this machine has not got it yet; or why there is none."""
    compiler = shutil.which(os.environ.get("CXX", "")) or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return "no C++ compiler was found (g++ or clang++, or the one that CXX names)"
    try:
        with _folder() as folder:
            path = folder / f"native-{_key(compiler)}.so"
            if not path.exists():
                _build(compiler, path)
            try:
                return _load(path)
            except (OSError, AttributeError):  # a file that was cut short, or meant for another system
                _build(compiler, path)
                return _load(path)
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
        words = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        return f"{compiler} could not build native.cpp: {words[-1] if words else error!r}"


def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    word = ctypes.c_int64
    address = ctypes.c_void_p
    flag = ctypes.c_bool
    library.manifoldagg_gram.argtypes = (word, word, *[address] * 3, word, address, address, word)
    library.manifoldagg_combine.argtypes = (word, word, *[address] * 6, word, address, flag, word)
    library.manifoldagg_gram.restype = library.manifoldagg_combine.restype = flag
    return library


@contextmanager
def _folder() -> Iterator[Path]:
    """Where libraries are kept: a folder that is this user's alone; where there is none, one for the moment."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = Path(os.environ.get("MANIFOLDAGG_CACHE") or Path(cache) / "manifoldagg").expanduser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = not hasattr(os, "getuid") or folder.stat().st_uid == os.getuid()
        usable = own and os.access(folder, os.W_OK)
    except (OSError, RuntimeError):  # the latter where nobody has a home
        usable = False
    if usable:
        yield folder
    else:
        with tempfile.TemporaryDirectory(prefix="manifoldagg-") as moment:
            yield Path(moment)


def _key(compiler: str) -> str:
    """What a library depends on: source, flags, compiler and processor."""
    binary = Path(compiler).resolve()
    processor = Path("/proc/cpuinfo")
    lines = processor.read_text().splitlines() if processor.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    system = (platform.machine(), platform.libc_ver(), features)
    parts = (SOURCE.read_text(), FLAGS, str(binary), binary.stat().st_mtime_ns, system)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _build(compiler: str, path: Path) -> None:
    with whole(path) as draft:
        command = [compiler, *FLAGS, "-o", str(draft), str(SOURCE)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
