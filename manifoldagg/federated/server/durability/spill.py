"""Spill files: temporary files to which a server moves models and client states when memory is scarce.

The files are unlinked. They have no name, and the operating system deletes them when the process ends.
"""

import mmap
import os
import sys
import tempfile
import zlib
from collections import deque
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor

from manifoldagg._io import write_all
from manifoldagg.errors import SpillError
from manifoldagg.federated.pytrees import Tree, size_of, tensors, tree_map
from manifoldagg.tensor_file import tensor_bytes

__all__ = ["Spill", "SpilledTree", "open_unlinked"]

ALIGNMENT = 64
"""The alignment of tensors in a file in bytes, which is also the alignment of torch's memory."""
MAX_TREES = 2**15
"""The largest number of spilled trees in a process. Linux allows 65,530 memory mappings per process by default, and
other code also needs some of them."""


class Spill:
    """Writer that moves trees from memory to temporary files. A tree is a nested container of tensors.

    The files are unlinked, which means that they have no name. The operating system frees a file when the last
    reference to its tree is deleted, or when the process ends or is killed. After `os.fork`, both processes can load a
    tree. Its file then exists until both of them have deleted their references or have ended.

    Args:
        folder: a folder in the file system of the files. `None` means the system's temporary folder.

    Example:
        >>> spilled = Spill().write({"m": torch.ones(2), "count": 3})
        >>> spilled.size, spilled.load()
        (8, {'m': tensor([1., 1.]), 'count': 3})
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        # The path becomes absolute, because the process may change its working directory before it writes.
        self._folder = Path(tempfile.gettempdir() if folder is None else folder).absolute()

    def write(self, tree: Tree) -> "SpilledTree":
        """Write a tree of tensors to a new file. Tensors that share memory are written separately.

        Raises:
            SpillError: if the tree cannot be written. No file remains in this case. The attribute `temporary` of the
                error tells whether a later attempt may succeed:

                - It is true if the disk is full, if the folder is not accessible, or if the process has no more memory,
                  file descriptors or memory mappings.
                - It is false if the tree contains a sparse, quantised or meta tensor, or a tensor of a subclass.
        """
        for tensor in tensors(tree):
            if reason := _unsupported_reason(tensor):
                raise SpillError(f"spill: a file cannot store a tensor that is {reason}")
        if len(_SPILLED) >= MAX_TREES:
            raise SpillError(f"spill: {self._folder}: the process has {MAX_TREES} spilled trees", temporary=True)
        try:
            return SpilledTree(self._folder, tree)
        except (OSError, MemoryError, torch.OutOfMemoryError) as error:
            raise SpillError(f"spill: {self._folder}: {error}", temporary=True) from error
        except Exception as error:
            raise SpillError(f"spill: a file cannot store this tree: {error}") from error


class SpilledTree:
    """Nested container of tensors that was moved from memory to a temporary file.

    The file is unlinked, which means that it has no name. The operating system frees it when the last reference to this
    object is deleted.

    Args:
        folder: a folder in the file system in which the file is created.
        tree: the container of tensors to write.

    Attributes:
        size: the number of bytes that the tensors occupied in memory before they were moved.
    """

    __slots__ = ("__weakref__", "_checksum", "_devices", "_folder", "_storage", "_template", "size")

    def __init__(self, folder: Path, tree: Tree) -> None:
        found = tensors(tree)
        self.size = size_of(tree)
        self._folder = folder
        self._devices = tuple(tensor.device for tensor in found)
        # The template contains meta tensors, which have the shapes and dtypes of the tensors but no values.
        self._template = tree_map(tree, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
        length = checksum = 0
        with open_unlinked(folder) as file:
            for tensor in found:
                data = tensor_bytes(tensor)
                padding = memoryview(bytes(-data.nbytes % ALIGNMENT))
                checksum = write_all(file.write, padding, write_all(file.write, data, checksum))
                length += data.nbytes + padding.nbytes
            self._storage = _map_file(file, length)
        self._checksum = checksum
        _SPILLED.add(self)

    def load(self, *, copy: bool = True) -> Tree:
        """Load the tree to its original devices.

        Args:
            copy: whether to copy CPU tensors. Otherwise, they refer to the mapped file, and you must not write to them.

        Raises:
            SpillError: if the file was altered, or if there is not enough memory. The attribute `temporary` is true
                only for the lack of memory.

        Cost: one pass over the file for the checksum, and one for the copy.
        """
        data = torch.empty(0, dtype=torch.uint8, device="cpu").set_(self._storage)
        if zlib.crc32(data.numpy().data) != self._checksum:
            raise SpillError(f"spill: {self._folder}: a spilled tree was altered: its checksum differs")
        leaves: deque[Tensor] = deque()
        start = 0
        try:
            for form, device in zip(tensors(self._template), self._devices, strict=True):
                storage = self._storage[start : start + form.nbytes]
                mapped = torch.empty(0, dtype=form.dtype, device="cpu").set_(storage, 0, form.shape, form.stride())
                leaves.append(mapped.to(device, copy=copy))
                start += form.nbytes + -form.nbytes % ALIGNMENT
        except (MemoryError, RuntimeError) as error:
            raise SpillError(f"spill: {self._folder}: a tree cannot be loaded: {error}", temporary=True) from error
        return tree_map(self._template, lambda _: leaves.popleft())

    def __repr__(self) -> str:
        return f"SpilledTree(size={self.size})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a SpilledTree owns its file: it cannot be copied or pickled; store the loaded tree")


_SPILLED: WeakSet[SpilledTree] = WeakSet()
"""The spilled trees of this process."""


class _UnlinkedFile(FileIO):
    def __del__(self) -> None:
        # If an interrupt prevents the `with` statement of the file, the interpreter would warn about an open file.
        self.close()


def open_unlinked(folder: str | Path) -> FileIO:
    """Open a new file without a name, which only the current user can read and write.

    Args:
        folder: a folder in the file system of the file.

    Raises:
        OSError: if the file cannot be created.
    """
    if sys.platform == "linux":
        # Some file systems, such as NFS, cannot create a file without a name. The general method then follows.
        with suppress(OSError):
            # No bytecode runs between the two calls of `map`, so an interrupt cannot leave the descriptor open.
            return next(map(_UnlinkedFile, map(os.open, [folder], [os.O_TMPFILE | os.O_RDWR], [0o600]), ["r+"]))
    # An interrupt within `TemporaryFile` may leave an empty file.
    return tempfile.TemporaryFile(dir=folder, buffering=0)


def _map_file(file: FileIO, length: int) -> Any:
    """Map a file into memory without keeping a file descriptor open.

    Raises:
        OSError: if the process has no more memory or memory mappings.
    """
    if not length:
        return torch.UntypedStorage(0, device="cpu")
    if sys.platform == "win32":
        return torch.frombuffer(mmap.mmap(file.fileno(), length), dtype=torch.uint8).untyped_storage()
    try:
        # `mmap.mmap` would keep a duplicate of the descriptor open. The mapping is shared, because a private mapping
        # would count as committed memory.
        return torch.UntypedStorage.from_file(f"/dev/fd/{file.fileno()}", shared=True, nbytes=length)
    except RuntimeError as error:
        raise OSError(str(error)) from error


def _unsupported_reason(tensor: Tensor) -> str | None:
    """Return the reason why a file cannot store a tensor. If a file can store it, return `None`."""
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        return f"a {type(tensor).__name__}"
    if tensor.layout is not torch.strided:
        return str(tensor.layout)
    return "on the meta device" if tensor.is_meta else "quantised" if tensor.is_quantized else None
