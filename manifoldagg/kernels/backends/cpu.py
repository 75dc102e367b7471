"""The CPU backend, which calls the compiled code of `native.cpp` on the memory of tensors without copying it.

Wheels for Linux on x86-64 include prebuilt libraries for the processor levels x86-64-v3 and x86-64-v4. If neither is
suitable, the backend compiles a library at the first use and stores it in the user's cache directory. The file name of
the compiled library contains a hash of the source code, the compiler, the compiler flags and the processor. Other
processes reuse the library if all of these are the same.
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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manifoldagg._io import atomic_write
from manifoldagg.kernels.backends.tensor_reader import load_reader
from manifoldagg.kernels.blocks import Blocks
from manifoldagg.kernels.fused import LinearCombination
from manifoldagg.kernels.operands import Operand, Operands, blocks_of
from manifoldagg.kernels.tensor_list import NULL_DESCRIPTOR, TensorList, describe_vector, edges, set_reader

__all__ = ["block_products", "combine", "combine_many", "gram_combine", "origin", "pairwise_sum", "unavailable"]

SOURCE = Path(__file__).with_name("native.cpp")
SOURCES = (SOURCE, SOURCE.with_name("tensor_reader.cpp"))
# Without automatic contraction, only explicit fused operations are fused. Every processor then rounds in the same way.
COMPILER_FLAGS = (
    *("-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-pthread"),
    *os.environ.get("MANIFOLDAGG_COMPILER_FLAGS", "").split(),  # for example sanitizer flags
)
X86_64_V3_FEATURES = frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"))
CPU_LEVELS = {
    "x86_64_v4": X86_64_V3_FEATURES | {f"avx512{part}" for part in ("f", "bw", "cd", "dq", "vl")},
    "x86_64_v3": X86_64_V3_FEATURES,
}
"""The processor features, as named by Linux, of the CPU levels with prebuilt libraries, from best to worst."""
TESTED_PLATFORM = ("Linux", "x86_64")
"""The platform on which the library is tested."""
MAX_SERIAL_ENTRIES = 1 << 22
"""The maximum number of entries that the calling thread processes alone.

A second thread would save about 1 ms. If all cores are busy, waiting for this thread would cost 20 ms (measured with
three rows of 10^6 entries).
"""
MIN_STREAMING_BYTES = 1 << 22
"""The smallest result that is written with streaming stores, which bypass the cache."""


def unavailable() -> str | None:
    """Return the reason why the CPU backend is unavailable, or `None` if it is available.

    The first call loads the compiled library, and builds it if necessary.
    """
    found = _find_library()
    return found if isinstance(found, str) else None


def origin() -> str:
    """Describe the origin of the library, such as "as shipped for x86_64_v3"."""
    path = Path(_require_library()._name)
    if path.parent == SOURCE.parent:
        return f"as shipped for {path.stem.removeprefix('native-')}"
    system = platform.system()
    machine = platform.machine()
    tested = (system, machine) == TESTED_PLATFORM
    return "built on this machine" if tested else f"built on this machine, untested on {system} {machine}"


def block_products(rows: Operands, blocks: Blocks) -> np.ndarray | None:
    r"""Compute the inner products of all pairs of rows, separately for each block of consecutive entries.

    For the rows $r_i$ and $r_j$, the product over a block $b$ is the sum $\sum_{p \in b} r_i[p]\, r_j[p]$ over the
    entries $p$ of this block.

    Returns:
        A float64 array (B, k(k+1)/2) for B blocks and k rows, with one column for each pair of rows $i$ and $j \le i$.
        `None` if the compiled code cannot read a tensor. It cannot read tensors on other devices, unsupported dtypes,
        negative views, and lazily allocated zero tensors.
    """
    if rows.tables is None:
        return None
    k = len(rows.plus)
    count = len(blocks.table)
    width = k * (k + 1) // 2
    memory = array("d", bytes(8 * count * width))
    # A small problem is faster on the calling thread, because starting a thread costs more than it saves.
    threads = min(torch.get_num_threads(), count) if rows.size * k > MAX_SERIAL_ENTRIES else 1
    done = _require_library().manifoldagg_gram(
        k, *rows.tables, count, blocks.table_address, memory.buffer_info()[0], threads
    )
    if not done:
        raise MemoryError("gram: no memory for the scratch of a block")
    return np.frombuffer(memory).reshape(count, width)


def combine(
    base: Operand | None, rows: Operands, coefficients: Sequence[Sequence[float]], blocks: Blocks, out: Operand
) -> Operand | None:
    r"""Add a linear combination of rows to a base row, and write the result into `out`.

    In each segment $s$ of the entries, such as a layer, the result is $out = base + \sum_j c^{(s)}_j\, r_j$ with the
    rows $r_j$ and the coefficients $c^{(s)}_j$. Each entry is computed in float64 and rounded once.

    Returns:
        `out`, or `None` if the compiled code cannot read a tensor. In this case, nothing is written.
    """
    if rows.tables is None:
        return None
    # If the base is also a row, `prepare` has already stored its descriptors.
    start = rows.described[id(base)][1] if id(base) in rows.described else _describe(base, rows.lengths)
    target = out.describe() if isinstance(out, TensorList) else describe_vector(out, rows.lengths)
    if not (start and target):
        return None
    count = len(blocks.table)
    threads = min(torch.get_num_threads(), count) if rows.size * len(rows.plus) > MAX_SERIAL_ENTRIES else 1
    # `array` has a stable address, in contrast to a list. It is alive until the call returns.
    numbers = array("d", [c for line in coefficients for c in line])
    read = rows.distinct if base is None else (*rows.distinct, base)
    # The first test is cheap: with at most 8 bytes per entry, a shorter target cannot reach the limit.
    stream = 8 * rows.size >= MIN_STREAMING_BYTES and _use_streaming_store(read, rows.size, out)
    done = _require_library().manifoldagg_combine(
        *(len(rows.plus), *rows.tables, start, target, numbers.buffer_info()[0]),
        *(count, blocks.table_address, stream, threads),
    )
    if not done:
        raise MemoryError("combine: no memory for the scratch of a block")
    return out


def combine_many(combinations: Sequence[LinearCombination], deferred: Sequence[bool]) -> bool | None:
    """Compute several linear combinations of rows in one pass over the rows.

    All combinations use the values that the rows have before the call, even if a combination overwrites one of the
    rows.

    Args:
        combinations: linear combinations of tensor lists of equal lengths.
        deferred: for each combination, whether a later combination reads the memory of its target. Within each tile,
            the library writes such a target after it has computed all combinations.

    Returns:
        `True`. If the compiled code cannot read a tensor, as in `block_products`, the result is `None`, and nothing is
        written.
    """
    like = combinations[0].target
    goals = _describe_goals(combinations, deferred, like.lengths)
    if goals is None:
        return None
    blocks = blocks_of(like.lengths, like.size)
    read = {id(row) for goal in combinations for row in goal.inputs}
    # Rows that several combinations share are read once, so only distinct rows count.
    busy = like.size * len(read) > MAX_SERIAL_ENTRIES
    done = _require_library().manifoldagg_combine_many(
        *(len(combinations), goals[0].buffer_info()[0], len(like), edges(like.lengths).tobytes()),
        *(len(blocks.table), blocks.table_address, min(torch.get_num_threads(), len(blocks.table)) if busy else 1),
    )
    if not done:
        raise MemoryError("combine: no memory for the scratch of a block")
    return True


def gram_combine(rows: Operands, blocks: Blocks, combinations: Sequence[LinearCombination]) -> np.ndarray | None:
    """Compute inner products of rows and several linear combinations of rows in one pass over the rows.

    The function writes each linear combination into its target, and returns the inner products.

    Args:
        rows: the rows of the products.
        blocks: the blocks of one segment.
        combinations: linear combinations of rows in the same pieces, with a single coefficient for all entries of a
            row. Their targets must not share memory with the operands.

    Returns:
        The array of `block_products`. If the compiled code cannot read a tensor, the result is `None`, and nothing is
        written.
    """
    if rows.tables is None or any(goal.rows.lengths != rows.lengths for goal in combinations):
        return None
    goals = _describe_goals(combinations, [False] * len(combinations), rows.lengths)
    if goals is None:
        return None
    k = len(rows.plus)
    count = len(blocks.table)
    width = k * (k + 1) // 2
    memory = array("d", bytes(8 * count * width))
    threads = min(torch.get_num_threads(), count) if rows.size * k > MAX_SERIAL_ENTRIES else 1
    done = _require_library().manifoldagg_gram_combine(
        *(k, *rows.tables, count, blocks.table_address, memory.buffer_info()[0], threads),
        *(len(combinations), goals[0].buffer_info()[0]),
    )
    if not done:
        raise MemoryError("gram: no memory for the scratch of a block")
    return np.frombuffer(memory).reshape(count, width)


def pairwise_sum(block_sums: np.ndarray, blocks: Blocks) -> np.ndarray:
    """Compute the sum of each segment of a vector from the sums of its blocks, and compensate for rounding errors.

    A segment, such as a layer, consists of blocks of consecutive entries. This is the compiled version of
    `reduction.pairwise_sum`. The results are bitwise identical, but do not include the remaining rounding errors.

    Args:
        block_sums: (B, n) float64, one row for each of B blocks. They may be overwritten, because they serve as scratch
            memory.
        blocks: the blocks, with the segment of each block.

    Returns:
        (S, n), one row for each of S segments.
    """
    # The library computes addresses from the width alone, so the array must be contiguous.
    block_sums = np.ascontiguousarray(block_sums)
    width = block_sums.shape[1]
    total = np.zeros((len(blocks.segment_bounds), width))
    _require_library().manifoldagg_pairwise_sum(
        width, len(blocks.table), blocks.table_address, block_sums.ctypes.data, total.ctypes.data
    )
    return total


def _describe_goals(
    combinations: Sequence[LinearCombination], deferred: Sequence[bool], lengths: tuple[int, ...] | None
) -> "tuple[array[int], list[Any]] | None":
    """Encode linear combinations as a table of integers for `native.cpp`.

    Returns:
        The table, and a list of the objects to which the addresses in the table refer. The caller must keep these
        objects alive during the native call. The result is `None` if `native.cpp` cannot read a tensor.
    """
    table = array("q")
    owners: list[Any] = []
    for goal, aside in zip(combinations, deferred, strict=True):
        rows = goal.rows.prepare()
        if rows.tables is None:
            return None
        described = (*rows.tables[2:], _describe(goal.base, lengths), _describe(goal.out, lengths))
        if not all(described):
            return None
        numbers = array("d", [c for line in goal.coefficients for c in line])
        # A deferred target is read again by a later combination, so it should stay in the cache.
        stream = not aside and _use_streaming_store(goal.inputs, rows.size, goal.out)
        # These addresses point into the bytes objects of `described`, which `owners` keeps alive.
        places = [ctypes.cast(ctypes.c_char_p(part), ctypes.c_void_p).value or 0 for part in described]
        table.extend([len(rows.plus), len(goal.coefficients) > 1, aside, stream, *places, numbers.buffer_info()[0]])
        owners += [rows, described, numbers]  # retain the rows, which may be copies
    return table, owners


def _describe(row: Operand | None, lengths: tuple[int, ...] | None) -> bytes:
    """Encode the address, stride and dtype of each tensor, or return `b""` if unsupported."""
    if row is None:
        return NULL_DESCRIPTOR * (1 if lengths is None else len(lengths))
    return row.describe() if isinstance(row, TensorList) else describe_vector(row, lengths)


def _use_streaming_store(read: Sequence[Operand], size: int, out: Operand) -> bool:
    """Return whether the result should be written with streaming stores, which bypass the cache.

    Streaming stores are faster if the target row is large and is not also an operand.
    """
    itemsize = out.itemsize if isinstance(out, Tensor) else max(dtype.itemsize for dtype in out.dtypes)
    if size * itemsize < MIN_STREAMING_BYTES:
        return False
    # A target that is also read is in the cache already, and a streaming store would evict it.
    apart = set(_addresses(out))
    return all(apart.isdisjoint(_addresses(row)) for row in read)


def _addresses(row: Operand) -> Sequence[int]:
    """Return the address of a vector, or of each tensor in a tensor list."""
    return (row.data_ptr(),) if isinstance(row, Tensor) else row.addresses


@cache
def _require_library() -> ctypes.CDLL:
    """Return the library, or raise a `RuntimeError` that says why it is unavailable."""
    found = _find_library()
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


@cache
def _find_library() -> ctypes.CDLL | str:
    """Return the compiled library, or a string that states why it is unavailable."""
    found = _load_or_build()
    if not isinstance(found, str):
        # The library also contains a function that reads the attributes of all tensors of a list.
        set_reader(load_reader(Path(found._name)))
    return found


def _load_or_build() -> ctypes.CDLL | str:
    """Load the prebuilt library, the library in the cache directory, or a newly compiled library.

    The function tries these libraries in the given order. If none of them can be loaded, the result is a string that
    states the reason.
    """
    shipped = _find_prebuilt(SOURCE.parent, _cpu_features().split())
    if shipped is not None:
        return shipped
    compiler = shutil.which(os.environ.get("CXX", "")) or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return "found no C++ compiler (g++, clang++ or $CXX), and the package has no library for this processor"
    try:
        with _cache_dir() as folder:
            path = folder / f"native-{_build_key(compiler)}.so"
            # The file name contains a hash of everything that determines the machine code, so a library is never stale.
            if not path.exists():
                _build(compiler, path)
            try:
                return _load(path)
            except (OSError, AttributeError):  # the file is truncated, or built for another system
                _build(compiler, path)
                return _load(path)
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
        words = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        return f"{compiler} could not build native.cpp: {words[-1] if words else error!r}"


def _find_prebuilt(folder: Path, features: Iterable[str]) -> ctypes.CDLL | None:
    """Load the prebuilt library for the highest CPU level that the processor supports.

    A CPU level, such as x86-64-v3, is a set of processor features. If no prebuilt library can be loaded, the result is
    `None`.
    """
    for level, needed in CPU_LEVELS.items():
        path = folder / f"native-{level}.so"
        if needed.issubset(features) and path.exists():
            with suppress(OSError, AttributeError):
                return _load(path)
    return None


def _load(path: Path) -> ctypes.CDLL:
    # `CDLL` releases the GIL during a call, so other Python threads continue while the kernels run.
    """Load a library, and declare the C signatures of its functions.

    Raises:
        OSError: if the file is not a library for this system.
        AttributeError: if the library has no function with one of the expected names.
    """
    library = ctypes.CDLL(str(path))
    word = ctypes.c_int64
    address = ctypes.c_void_p
    flag = ctypes.c_bool
    # Without declared types, ctypes would pass integers as 32-bit C ints and truncate addresses.
    library.manifoldagg_gram.argtypes = (word, word, *[address] * 3, word, address, address, word)
    library.manifoldagg_combine.argtypes = (word, word, *[address] * 6, word, address, flag, word)
    library.manifoldagg_combine_many.argtypes = (word, address, word, address, word, address, word)
    library.manifoldagg_gram_combine.argtypes = (*library.manifoldagg_gram.argtypes, word, address)
    for name in ("gram", "combine", "combine_many", "gram_combine"):
        getattr(library, f"manifoldagg_{name}").restype = flag
    library.manifoldagg_pairwise_sum.argtypes = (word, word, address, address, address)
    library.manifoldagg_pairwise_sum.restype = None
    return library


@contextmanager
def _cache_dir() -> Iterator[Path]:
    """Return a context manager that provides a directory for compiled libraries.

    This is the user's cache directory if it is writable and belongs to the user. Otherwise, it is a temporary
    directory, which is deleted at the end of the context.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = Path(os.environ.get("MANIFOLDAGG_CACHE") or Path(cache) / "manifoldagg").expanduser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A library from the directory of another user could contain any code.
        own = not hasattr(os, "getuid") or folder.stat().st_uid == os.getuid()
        usable = own and os.access(folder, os.W_OK)
    except (OSError, RuntimeError):  # RuntimeError: the home directory is unknown
        usable = False
    if usable:
        yield folder
    else:
        with tempfile.TemporaryDirectory(prefix="manifoldagg-") as moment:
            yield Path(moment)


def _build_key(compiler: str) -> str:
    """Return a hash of everything that determines the compiled library.

    The hash covers the source code, the compiler, the compiler flags and the processor.
    """
    # The modification time of the compiler detects an update, without the cost of running the compiler.
    binary = Path(compiler).resolve()
    system = (platform.machine(), platform.libc_ver(), _cpu_features())
    parts = ([source.read_text() for source in SOURCES], COMPILER_FLAGS, str(binary), binary.stat().st_mtime_ns, system)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _cpu_features() -> str:
    """Return the line of `/proc/cpuinfo` that lists the features of the processor.

    If the line does not exist, return the name of the processor.
    """
    processor = Path("/proc/cpuinfo")
    lines = processor.read_text().splitlines() if processor.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _build(compiler: str, path: Path) -> None:
    # Several processes may build at the same time. The atomic rename lets each of them see a complete file.
    """Compile the sources to a shared library at `path`."""
    with atomic_write(path) as draft:
        command = [compiler, *COMPILER_FLAGS, "-o", str(draft), *map(str, SOURCES)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
