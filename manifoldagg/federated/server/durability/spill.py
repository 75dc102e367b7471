"""Spilled trees: one file for each tree, removed with its last reference or at the end of the process."""

import ctypes
import errno
import itertools
import os
import platform
import shutil
import sys
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from manifoldagg._io import write_all
from manifoldagg._validation import short_repr
from manifoldagg.errors import ArgumentError, SpillError
from manifoldagg.federated.pytrees import Tree, size_of, tensors, tree_map
from manifoldagg.tensor_file import tensor_bytes

if sys.platform != "win32":
    import fcntl

__all__ = ["Spill", "SpilledTree", "malloc_trim"]

PREFIX = "manifoldagg-"
ALIGNMENT = 64
"""Bytes to a multiple of which each tensor begins, as torch lays them in memory."""
NO_LOCK_ERRNOS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
"""What a system of files says that has no locks."""


class Spill:
    """Files for trees, in a private folder of this process.

    The folder is made with the first file. It carries a `flock`, which the system takes back when the process ends,
    however it ends: a new spill removes the unlocked folders beside its own. It touches those of this
    host and user only. After `os.fork` the folder stays its maker's: a child reads what is there, and neither writes
    nor removes anything. Systems without `flock` (Windows) keep the folders of processes that were killed.

    Args:
        folder: where the folder goes; `None` for the system's folder of temporary files.

    Raises:
        ArgumentError: if there is no such folder.

    Example:
        >>> spill = Spill()
        >>> filed = spill.write({"m": torch.ones(2), "count": 3})
        >>> filed.size, filed.load()
        (8, {'m': tensor([1., 1.]), 'count': 3})
        >>> path = filed.path
        >>> del filed
        >>> path.exists()
        False
        >>> spill.close()
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        if folder is not None and not (isinstance(folder, str | Path) and Path(folder).is_dir()):
            raise ArgumentError(f"spill: expected a folder that exists, got {short_repr(folder)}")
        # The process may change its directory before it writes.
        self._parent = Path(tempfile.gettempdir() if folder is None else folder).absolute()
        self._folder: _SpillDir | None = None
        self._pid = os.getpid()
        _remove_stale(self._parent)

    def write(self, tree: Tree) -> "SpilledTree":
        """Write the tree to a new file. Each tensor is written separately: views and shared memory become values.

        Raises:
            SpillError: and no file is left. It is `temporary` where the tree could be written later: the disk is full,
                the folder is not accessible, memory is short. It is not where no file can have such a tree: one with
                sparse, quantised or meta tensors, or tensors of a subclass.

        Cost: one pass over the tensors, and a copy of those that are not contiguous or on another device.
        """
        if os.getpid() != self._pid:
            raise SpillError(f"spill: belongs to process {self._pid}, which this one was forked from")
        for tensor in tensors(tree):
            if odd := _unsupported_reason(tensor):
                raise SpillError(f"spill: a file cannot store a tensor that is {odd}")
        try:
            return SpilledTree(self._ensure_folder(), tree)
        except (OSError, MemoryError, torch.OutOfMemoryError) as error:
            raise SpillError(f"spill: {self._parent}: {error}", temporary=True) from error
        except Exception as error:
            raise SpillError(f"spill: a file cannot store this tree: {error}") from error

    def close(self) -> None:
        """Stop writing into the folder, which is removed with the last file in use."""
        self._folder = None

    def _ensure_folder(self) -> "_SpillDir":
        """Return the folder, created if it does not exist or no longer exists."""
        folder = self._folder
        # Somebody who cleans may take a new one for a dead one, until it is locked.
        while folder is None or not folder.path.exists():
            made = _SpillDir(self._parent)
            if made.lock():
                folder = made
        self._folder = folder
        return folder


class SpilledTree:
    """A tree in its own file. The last reference in the creating process removes the file.

    Args:
        folder: of the file.
        tree: to write.

    Attributes:
        size: bytes of memory that the tree held.
    """

    __slots__ = ("_checksum", "_devices", "_folder", "_length", "_name", "_template", "size")

    def __init__(self, folder: "_SpillDir", tree: Tree) -> None:
        # What removes the file is known before there is one: an interrupt leaves nothing.
        self._folder = folder
        self._name = next(folder.names)
        found = tensors(tree)
        self.size = size_of(tree)
        self._devices = tuple(tensor.device for tensor in found)
        # Tensors on no device say where values go, and what shape and dtype they have.
        self._template = tree_map(tree, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
        try:
            self._length, self._checksum = _write_tensors(self.path, found)
        except BaseException:
            # The traceback may reference this object, and with it the file, as long as the error is stored.
            self._remove()
            raise

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self._folder.path / f"{self._name}.tensors"

    def load(self) -> Tree:
        """Load the tree with its tensors mapped from the file, on their devices. Maps outlive the file.

        A file that is cut while its maps are read kills the process: no program can hold a map against that.

        Raises:
            SpillError: naming the file, if it was truncated, altered or deleted; a `temporary` one, if it cannot be
                read now.

        Cost: one pass over the file, for its checksum.
        """
        found = iter(self._map_tensors())
        return tree_map(self._template, lambda _: next(found))

    def _map_tensors(self) -> Iterator[Tensor]:
        data = self._map_verified()
        start = 0
        for form, device in zip(tensors(self._template), self._devices, strict=True):
            # A storage of its own: whoever keeps one tensor is not taken to keep them all.
            storage = data[start : start + form.nbytes]
            yield torch.empty(0, dtype=form.dtype).set_(storage, 0, form.shape, form.stride()).to(device)
            start += _align(form.nbytes)

    def _map_verified(self) -> Any:
        """Map the storage of the file after verifying its bytes."""
        try:
            length = self.path.stat().st_size
            if length < self._length:
                raise SpillError(f"spill: {self.path}: was truncated, from {self._length} bytes to {length}")
            if length > self._length:
                raise SpillError(f"spill: {self.path}: was altered: it has {length} bytes instead of {self._length}")
            if not length:
                return torch.UntypedStorage(0)
            storage: Any = torch.UntypedStorage.from_file(os.fspath(self.path), shared=False, nbytes=length)
        except FileNotFoundError:
            raise SpillError(f"spill: {self.path}: was deleted") from None
        except (OSError, RuntimeError) as error:
            raise SpillError(f"spill: {self.path}: cannot be read: {error}", temporary=True) from error
        values = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (length,), (1,))
        if zlib.crc32(values.numpy().data) != self._checksum:
            raise SpillError(f"spill: {self.path}: was altered: its checksum is another")
        return storage

    def _remove(self) -> None:
        # A file that cannot be removed goes with the folder; an interrupt may come before there is a name.
        with suppress(OSError, AttributeError):
            if os.getpid() == self._folder.pid:
                os.unlink(self.path)

    def __del__(self) -> None:
        self._remove()

    def __repr__(self) -> str:
        return f"SpilledTree({str(self.path)!r}, size={self.size})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a SpilledTree owns its file: it cannot be copied or pickled; store what it loads")


class _SpillDir:
    """A folder for files, removed with its last reference, by `remove`, or at the end of the creating process."""

    def __init__(self, parent: Path) -> None:
        self.pid = os.getpid()
        self.path = parent / f"{PREFIX}{self.pid}-{os.urandom(8).hex()}@{platform.node()}"
        self.names = itertools.count()
        # Before there is a folder, so that an interrupt leaves none.
        weakref.finalize(self, _unless_forked, self.pid, shutil.rmtree, self.path, True)
        self.path.mkdir(mode=0o700)

    def remove(self) -> None:
        """Remove the folder now."""
        _unless_forked(self.pid, shutil.rmtree, self.path, True)

    def lock(self) -> bool:
        """Lock the folder for the life of the process, if the system can; return whether it is not locked elsewhere."""
        if sys.platform != "win32":
            try:
                folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                weakref.finalize(self, _unless_forked, self.pid, os.close, folder)
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, FileNotFoundError):
                return False
            except OSError as error:
                if error.errno not in NO_LOCK_ERRNOS:
                    raise
        return True


def _unless_forked(pid: int, function: Callable[..., object], *args: object) -> None:
    """Call a function only in process `pid`. A fork has the same objects, but neither their folder nor their files."""
    if os.getpid() == pid:
        function(*args)


def _remove_stale(parent: Path) -> None:
    """Remove the folders in `parent` that killed processes of this host and user left."""
    if sys.platform == "win32":
        return
    ours = f"@{platform.node()}"
    with suppress(OSError):
        for name in os.listdir(parent):
            if name.startswith(PREFIX) and name.endswith(ours):
                with suppress(OSError):
                    _remove_if_unlocked(parent / name)


def _remove_if_unlocked(path: Path) -> None:
    """Remove a folder of this user that is not locked.

    Raises:
        OSError: if it is locked, or no folder.
    """
    if sys.platform == "win32":
        return
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if os.fstat(folder).st_uid == os.geteuid():
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(folder)


def _unsupported_reason(tensor: Tensor) -> str | None:
    """Return why a file cannot store a tensor; `None` if it can."""
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        return f"a {type(tensor).__name__}"
    if tensor.layout is not torch.strided:
        return str(tensor.layout)
    if tensor.is_meta:
        return "on the meta device"
    if tensor.is_quantized:
        return "quantised"
    return None


def _write_tensors(path: Path, leaves: Sequence[Tensor]) -> tuple[int, int]:
    """Write tensors one after another to a new file; return its bytes and checksum."""
    length = 0
    checksum = 0
    with FileIO(path, "x") as file:
        for tensor in leaves:
            data = tensor_bytes(tensor)
            checksum = write_all(file.write, data, checksum)
            gap = _align(data.nbytes) - data.nbytes
            checksum = write_all(file.write, memoryview(bytes(gap)), checksum)
            length += data.nbytes + gap
    return length, checksum


def _align(length: int) -> int:
    return length + -length % ALIGNMENT


@cache
def _find_malloc_trim() -> Callable[[int], int] | None:
    """Return the function that makes the allocator release free memory. Only glibc needs it."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def malloc_trim() -> None:
    """Release freed memory to the system.

    Aligned blocks leave holes too small for the next of their size: a process would grow by what it writes to files.
    """
    returns = _find_malloc_trim()
    if returns is not None:
        returns(0)
