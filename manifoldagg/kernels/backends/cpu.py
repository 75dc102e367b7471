"""The compiled CPU backend: `native.cpp`, called without copies.

Wheels for Linux on x86-64 carry libraries for two levels of the processor. Where there is none for this one it is built
once, and kept in the user's cache folder under a name that its source, compiler, flags and processor determine: other
processes find it there.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from struct import Struct

import numpy as np
import torch
from torch import Tensor

from manifoldagg._io import atomic_write
from manifoldagg.kernels.blocks import Blocks
from manifoldagg.kernels.fused import LinearCombination
from manifoldagg.kernels.operands import Operand, Operands, blocks_of
from manifoldagg.kernels.tensor_list import CPU, NATIVE_DTYPES, TensorList, edges

__all__ = ["block_products", "combine", "combine_many", "origin", "unavailable"]

SOURCE = Path(__file__).with_name("native.cpp")
# No contraction but the fused operations that are written: every processor rounds alike.
COMPILER_FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")
X86_64_V3_FEATURES = frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"))
CPU_LEVELS = {
    "x86_64_v4": X86_64_V3_FEATURES | {f"avx512{part}" for part in ("f", "bw", "cd", "dq", "vl")},
    "x86_64_v3": X86_64_V3_FEATURES,
}
"""What Linux says of a processor for which a library may lie beside the source, the best first."""
MAX_SERIAL_ENTRIES = 1 << 22
"""Up to so many entries read the caller works alone. Two threads would save it a millisecond; on a machine whose cores
are busy they cost 20, until the other one has got a core (measured: 10^6 entries of three rows)."""
MIN_STREAMING_BYTES = 1 << 22
"""From so many bytes on, a result is written past the cache."""


def unavailable() -> str | None:
    """Return why the backend is unavailable, in one sentence, or `None`; the first call builds the library."""
    found = _find_library()
    return found if isinstance(found, str) else None


def origin() -> str:
    """Describe the origin of the library in a few words."""
    path = Path(_require_library()._name)
    if path.parent == SOURCE.parent:
        return f"as shipped for {path.stem.removeprefix('native-')}"
    return "built on this machine"


def block_products(rows: Operands, blocks: Blocks) -> np.ndarray | None:
    r"""Compute $\sum_{p \in b} r_i[p]\, r_j[p]$ for each block $b$ and $j \le i$: (B, k(k+1)/2) float64.

    `None` for tensors that are not on the CPU, of another dtype, or no plain memory.
    """
    tables = _descriptors(rows, rows.distinct)
    if tables is None:
        return None
    k = len(rows.plus)
    count = len(blocks.table)
    width = k * (k + 1) // 2
    memory = array("d", bytes(8 * count * width))
    done = _require_library().manifoldagg_gram(
        *_row_arguments(rows, tables),
        *(count, blocks.table_address, memory.buffer_info()[0], _num_threads(rows, count)),
    )
    if not done:
        raise MemoryError("gram: no memory for the scratch of a block")
    return np.frombuffer(memory).reshape(count, width)


def combine(
    base: Operand | None, rows: Operands, coefficients: Sequence[Sequence[float]], blocks: Blocks, out: Operand
) -> Operand | None:
    r"""Compute $out = base + \sum_j c^{(s)}_j r_j$ on each segment, summed in float64 and rounded once.

    `None`, and nothing is written, as in `block_products`.
    """
    read = rows.distinct if base is None else (*rows.distinct, base)
    tables = _descriptors(rows, (*read, out))
    if tables is None:
        return None
    count = len(blocks.table)
    numbers = array("d", [c for line in coefficients for c in line])
    done = _require_library().manifoldagg_combine(
        *_row_arguments(rows, tables),
        *(tables[id(base)], tables[id(out)], numbers.buffer_info()[0]),
        *(count, blocks.table_address, _use_streaming_store(read, rows.size, out), _num_threads(rows, count)),
    )
    if not done:
        raise MemoryError("combine: no memory for the scratch of a block")
    return out


def combine_many(combinations: Sequence[LinearCombination], deferred: Sequence[bool]) -> bool | None:
    """Compute each output from the operands before any write; `deferred` outputs are read by later ones.

    `None`, and nothing is written, as in `block_products`.
    """
    like = combinations[0].out
    count = len(like)
    parts: list[bytes] = []
    words: list[list[int]] = []
    numbers = array("d")
    for goal, aside in zip(combinations, deferred, strict=True):
        tables = _descriptors(goal.rows, (*goal.inputs, goal.out), like.lengths)
        if tables is None:
            return None
        k = len(goal.rows.plus)
        stream = not aside and _use_streaming_store(goal.inputs, like.size, goal.out)
        words.append([k, len(goal.coefficients) > 1, aside, stream, len(parts), len(numbers)])
        parts += [tables[id(row)] for row in (*goal.rows.plus, *goal.rows.minus, goal.base, goal.out)]
        for line in goal.coefficients:
            numbers.extend(line)
    described = b"".join(parts)
    place = ctypes.cast(ctypes.c_char_p(described), ctypes.c_void_p).value or 0
    first = numbers.buffer_info()[0]
    table = array("q")
    for k, *flags, start, number in words:
        places = [place + len(NULL_DESCRIPTOR) * count * (start + row) for row in (0, k, 2 * k, 2 * k + 1)]
        table.extend([k, *flags, *places, first + 8 * number])
    blocks = blocks_of(like.lengths, like.size)
    read = {id(row) for goal in combinations for row in goal.inputs}
    busy = like.size * len(read) > MAX_SERIAL_ENTRIES
    done = _require_library().manifoldagg_combine_many(
        *(len(combinations), table.buffer_info()[0], count, edges(like.lengths).tobytes()),
        *(len(blocks.table), blocks.table_address, min(torch.get_num_threads(), len(blocks.table)) if busy else 1),
    )
    if not done:
        raise MemoryError("combine: no memory for the scratch of a block")
    return True


_pack_pair = Struct("2q").pack
_pack_triple = Struct("3q").pack
NULL_DESCRIPTOR = _pack_triple(0, 1, 0)
"""What describes that nothing is subtracted, or added to."""


def _descriptors(
    rows: Operands, operands: Sequence[Operand], lengths: tuple[int, ...] | None = None
) -> dict[int, bytes] | None:
    """Return the description of each row and of `None` by its `id`; `None` if the library cannot read one of them."""
    if rows.device != CPU:
        return None
    lengths = lengths or rows.lengths
    tables = {id(None): NULL_DESCRIPTOR if lengths is None else NULL_DESCRIPTOR * len(lengths)}
    for row in operands:
        table = rows.descriptors.get(id(row)) if lengths is rows.lengths else None
        if table is None:
            table = row.descriptors if isinstance(row, TensorList) else _vector_descriptors(row, lengths)
        if table is None:
            return None
        tables[id(row)] = table
    if lengths is rows.lengths:
        # Rows that are not among the operands, such as a new `out`, are not kept: their `id` may be used again.
        rows.descriptors.update((id(row), tables[id(row)]) for row in rows.distinct if id(row) in tables)
    return tables


def _vector_descriptors(vector: Tensor, lengths: tuple[int, ...] | None) -> bytes | None:
    dtype = NATIVE_DTYPES.get(vector.dtype)
    address = vector.data_ptr()
    # Zeros that torch never wrote down have no address.
    if dtype is None or vector.is_neg() or (address == 0 and vector.shape[0] > 0):
        return None
    step = vector.stride(0)
    if lengths is None:
        return _pack_triple(address, step, dtype)
    table = np.empty((len(lengths), 3), np.int64)
    table[:, 0] = address + edges(lengths)[:-1] * (step * vector.itemsize)
    table[:, 1] = step
    table[:, 2] = dtype
    return table.tobytes()


def _row_arguments(rows: Operands, tables: dict[int, bytes]) -> tuple[int, int, bytes, bytes, bytes]:
    """Return the number of rows, the number of pieces and their edges, and the descriptions of the rows."""
    plus, minus = (b"".join([tables[id(row)] for row in group]) for group in (rows.plus, rows.minus))
    if rows.lengths is None:
        return len(rows.plus), 1, _pack_pair(0, rows.size), plus, minus
    return len(rows.plus), len(rows.lengths), edges(rows.lengths).tobytes(), plus, minus


def _use_streaming_store(read: Sequence[Operand], size: int, out: Operand) -> bool:
    """Return whether to write past the cache: a large target that is not read."""
    width = out.itemsize if isinstance(out, Tensor) else max(dtype.itemsize for dtype in out.dtypes)
    if size * width < MIN_STREAMING_BYTES:
        return False
    apart = set(_addresses(out))
    return all(apart.isdisjoint(_addresses(row)) for row in read)


def _addresses(row: Operand) -> Sequence[int]:
    return (row.data_ptr(),) if isinstance(row, Tensor) else row.addresses


def _num_threads(rows: Operands, blocks: int) -> int:
    return min(torch.get_num_threads(), blocks) if rows.size * len(rows.plus) > MAX_SERIAL_ENTRIES else 1


@cache
def _require_library() -> ctypes.CDLL:
    found = _find_library()
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


@cache
def _find_library() -> ctypes.CDLL | str:
    """The library, built if there is none yet for this machine; or why there is none."""
    shipped = _find_prebuilt(SOURCE.parent, _cpu_features().split())
    if shipped is not None:
        return shipped
    compiler = shutil.which(os.environ.get("CXX", "")) or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        asked = "g++ or clang++, or the one that CXX names"
        return f"no C++ compiler was found ({asked}), and no library for this processor came with the package"
    try:
        with _cache_dir() as folder:
            path = folder / f"native-{_build_key(compiler)}.so"
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


def _find_prebuilt(folder: Path, features: Iterable[str]) -> ctypes.CDLL | None:
    """The library in a folder that does the most with these features, if one there loads."""
    for level, needed in CPU_LEVELS.items():
        path = folder / f"native-{level}.so"
        if needed.issubset(features) and path.exists():
            with suppress(OSError, AttributeError):
                return _load(path)
    return None


def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    word = ctypes.c_int64
    address = ctypes.c_void_p
    flag = ctypes.c_bool
    library.manifoldagg_gram.argtypes = (word, word, *[address] * 3, word, address, address, word)
    library.manifoldagg_combine.argtypes = (word, word, *[address] * 6, word, address, flag, word)
    library.manifoldagg_combine_many.argtypes = (word, address, word, address, word, address, word)
    for call in (library.manifoldagg_gram, library.manifoldagg_combine, library.manifoldagg_combine_many):
        call.restype = flag
    return library


@contextmanager
def _cache_dir() -> Iterator[Path]:
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


def _build_key(compiler: str) -> str:
    """What a library depends on: source, flags, compiler and processor."""
    binary = Path(compiler).resolve()
    system = (platform.machine(), platform.libc_ver(), _cpu_features())
    parts = (SOURCE.read_text(), COMPILER_FLAGS, str(binary), binary.stat().st_mtime_ns, system)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _cpu_features() -> str:
    """What the processor can do, as Linux tells it."""
    processor = Path("/proc/cpuinfo")
    lines = processor.read_text().splitlines() if processor.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _build(compiler: str, path: Path) -> None:
    with atomic_write(path) as draft:
        command = [compiler, *COMPILER_FLAGS, "-o", str(draft), str(SOURCE)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
