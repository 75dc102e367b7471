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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manifoldagg._output import whole
from manifoldagg.kernels.blocks import Blocks
from manifoldagg.kernels.rows import Line, Rows
from manifoldagg.kernels.tensors import DTYPES, VECTOR, Tensors, edges

__all__ = ["combine", "partials", "unavailable"]

SOURCE = Path(__file__).with_name("native.cpp")
# No contraction but the fused operations that are written: every processor rounds alike.
FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")
SERIAL = 1 << 17
"""Below so many entries read, starting a thread costs more than it saves."""
STREAM = 1 << 22
"""From so many bytes on, a result is written past the cache."""


def unavailable() -> str | None:
    """Why the backend cannot be used here, in one sentence; `None` if it can. Builds the library at first."""
    found = _library()
    return found if isinstance(found, str) else None


def partials(rows: Rows, blocks: Blocks) -> np.ndarray | None:
    r"""$\sum_{p \in b} r_i[p]\, r_j[p]$ for each block $b$ and $j \le i$: (B, k(k+1)/2) float64.

    `None` for tensors that are not on the CPU, of another dtype, or no plain memory.
    """
    described = _describe(rows, (*rows.plus, *rows.minus))
    if described is None:
        return None
    k = len(rows.plus)
    pieces, edges, start = described[:3]
    count = len(blocks.table)
    sums = np.empty((count, k * (k + 1) // 2))
    done = _loaded().manifoldagg_gram(
        *(k, pieces, edges, start, start + k * pieces * VECTOR, count, blocks.address, sums.ctypes.data),
        _threads(rows, count),
    )
    if not done:
        raise MemoryError("gram: no memory for the scratch of a block")
    return sums


def combine(
    base: Line | None, rows: Rows, coefficients: Sequence[Sequence[float]], blocks: Blocks, out: Line
) -> Line | None:
    """$out = base + \\sum_j c^{(s)}_j r_j$ on each segment, summed in float64 and rounded once.

    `None`, and nothing is written, as in `partials`.
    """
    described = _describe(rows, (*rows.plus, *rows.minus, base, out))
    if described is None:
        return None
    k = len(rows.plus)
    pieces, edges, start = described[:3]
    row = pieces * VECTOR
    count = len(blocks.table)
    numbers = array("d", [c for line in coefficients for c in line])
    done = _loaded().manifoldagg_combine(
        *(k, pieces, edges, start, start + k * row, start + 2 * k * row, start + (2 * k + 1) * row),
        *(numbers.buffer_info()[0], count, blocks.address, _streams(base, rows, out), _threads(rows, count)),
    )
    if not done:
        raise MemoryError("combine: no memory for the scratch of a block")
    return out


NOTHING = (0, 1, 0)
"""What describes that nothing is subtracted, or added to."""


def _describe(rows: Rows, lines: Sequence[Line | None]) -> tuple[int, int, int, Any] | None:
    """The number of pieces, the addresses of their edges and of what describes them, and what keeps these there."""
    if rows.device.type != "cpu":
        return None
    if rows.lengths is not None:
        return _describe_pieces(rows.lengths, lines)
    known: dict[int, tuple[int, int, int]] = {id(None): NOTHING}
    numbers: list[int] = [0, rows.size]
    for line in lines:
        if id(line) not in known:
            assert isinstance(line, Tensor)
            address = line.data_ptr()
            dtype = DTYPES.get(line.dtype)
            # Zeros that torch never wrote down have no address.
            if dtype is None or line.is_neg() or (address == 0 and rows.size > 0):
                return None
            known[id(line)] = (address, line.stride(0), dtype)
        numbers += known[id(line)]
    memory = array("q", numbers)
    place = memory.buffer_info()[0]
    return 1, place, place + 16, memory


def _describe_pieces(lengths: tuple[int, ...], lines: Sequence[Line | None]) -> tuple[int, int, int, Any] | None:
    borders = edges(lengths)
    nothing = array("q", NOTHING * len(lengths)).tobytes()
    tables = []
    for line in lines:
        if line is None:
            tables.append(nothing)
            continue
        table = line.table if isinstance(line, Tensors) else _pieces(line, borders)
        if table is None:
            return None
        tables.append(table)
    memory = array("q", b"".join(tables))
    return len(lengths), borders.ctypes.data, memory.buffer_info()[0], (memory, borders)


def _pieces(vector: Tensor, borders: np.ndarray) -> bytes | None:
    """A vector beside tuples, described as pieces of the same lengths."""
    dtype = DTYPES.get(vector.dtype)
    address = vector.data_ptr()
    if dtype is None or vector.is_neg() or (address == 0 and borders[-1] > 0):
        return None
    step = vector.stride(0)
    table = np.empty((len(borders) - 1, 3), np.int64)
    table[:, 0] = address + borders[:-1] * (step * vector.itemsize)
    table[:, 1] = step
    table[:, 2] = dtype
    return table.tobytes()


def _streams(base: Line | None, rows: Rows, out: Line) -> bool:
    """Whether to write past the cache: a large target that is not read."""
    read = rows.distinct if base is None else (*rows.distinct, base)
    if isinstance(out, Tensor):
        if rows.size * out.itemsize < STREAM:
            return False
        places = [out.data_ptr()]
    else:
        if rows.size * min(dtype.itemsize for dtype in out.dtypes) < STREAM:
            return False
        places = [*out.addresses]
    apart = set(places)
    return all(apart.isdisjoint((row.data_ptr(),) if isinstance(row, Tensor) else row.addresses) for row in read)


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
