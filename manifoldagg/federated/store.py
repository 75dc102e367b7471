"""The store: what a server keeps for others, counted by its holders, in memory or past a limit in mapped files."""

import ctypes
import shutil
import sys
import tempfile
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from manifoldagg.errors import ArgumentError, check_count
from manifoldagg.federated.trees import Tree, replaced, size_of, tensors

__all__ = ["Found", "Key", "Store"]

Key = tuple[str, Hashable]
"""A kind (`"version"`, `"base"`, `"client"`) and a name."""
Found = Callable[[], Tree]
"""Gives a tree on its devices, which may take a while."""
SPILLED = "spilled"
TRIMMED = 2**20
"""Bytes that go to files between two requests that freed memory be returned, or a quarter of the limit."""


@dataclass
class Kept:
    """A tree, the bytes of its tensors, how many hold it, and its file where it is in one."""

    tree: Tree
    size: int
    holders: int = 1
    path: Path | None = None
    devices: tuple[torch.device, ...] = ()


class Store:
    """Trees by key, each kept once while something holds it.

    Not for several threads by itself: its owner calls it under a lock, except `spill`, which takes that lock.

    Args:
        limit: bytes of tensors to keep in memory; `None` for all.
        folder: where files go; `None` for the system's folder of temporary files. Whatever happens they are in a new
            folder inside, which is removed with the store.

    Raises:
        ArgumentError: naming what does not fit.

    Example:
        >>> store = Store()
        >>> store.add(("version", 0), torch.zeros(2))
        >>> store.hold(("version", 0))
        >>> store.release(("version", 0)), store.release(("version", 0)), ("version", 0) in store
        (None, tensor([0., 0.]), False)
    """

    def __init__(self, limit: int | None = None, folder: str | Path | None = None) -> None:
        self.limit = None if limit is None else check_count("memory_limit", limit, at_least=0)
        if folder is not None and not (isinstance(folder, str | Path) and Path(folder).is_dir()):
            raise ArgumentError(f"spill: expected a folder that exists, got {folder!r}")
        self._parent = folder
        self._folder: Path | None = None
        self._kept: dict[Key, Kept] = {}
        # What is in memory and may go to a file, the oldest first: to find it no one else is asked.
        self._movable: OrderedDict[Key, Kept] = OrderedDict()
        self._used: Counter[str] = Counter()
        self._files = 0
        self._untrimmed = 0

    def __contains__(self, key: Key | None) -> bool:
        return key in self._kept

    def __getitem__(self, key: Key) -> Tree:
        """The tree, on its devices."""
        return self.found(key)()

    def found(self, key: Key | None) -> Found:
        """What gives the tree, `None` where there is none; it needs no lock, and no longer the file."""
        kept = self._kept.get(key) if key else None
        if kept is None or kept.path is None:
            tree = None if kept is None else kept.tree
            return lambda: tree
        return _mapped(kept, kept.path)

    def add(self, key: Key, tree: Tree) -> None:
        """Keep a tree under a new key, for one holder."""
        kept = Kept(tree, size_of(tree))
        self._kept[key] = kept
        if kept.size:
            self._movable[key] = kept
        self._used[key[0]] += kept.size

    def hold(self, key: Key | None) -> None:
        """Add a holder, where there is something to hold."""
        if key is not None:
            self._kept[key].holders += 1

    def release(self, key: Key | None) -> Tree | None:
        """Take a holder away. The tree goes with the last, its file too, and is returned where it was in memory."""
        if key is None:
            return None
        kept = self._kept[key]
        kept.holders -= 1
        if kept.holders:
            return None
        del self._kept[key]
        self._movable.pop(key, None)
        self._used[_place(key, kept)] -= kept.size
        if kept.path is None:
            return kept.tree
        kept.path.unlink(missing_ok=True)
        return None

    def usage(self, without: Key) -> dict[str, int]:
        """Bytes in memory by kind, but for one key, and bytes in files."""
        used = {kind: self._used[kind] for kind in ("version", "base", "client", SPILLED)}
        if without in self._kept:
            used[_place(without, self._kept[without])] -= self._kept[without].size
        return used

    def spill(self, lock: AbstractContextManager[object], without: Key) -> None:
        """Write the oldest trees but `without` to files, until the others are within the limit.

        The lock is free while a file is written. What cannot be written stays in memory, with a warning: a tree of a
        kind that files do not have for good, the others until a file can be written again.

        Cost: per file, whatever else is kept; what that leaves free goes back to the system every so many bytes.
        """
        while self.limit is not None:
            with lock:
                used = self.usage(without)
                if sum(used.values()) - used[SPILLED] <= self.limit:
                    return
                key = next((key for key in self._movable if key != without), None)
                if key is None:
                    return
                kept = self._movable[key]
            path = None
            try:
                path = self._new_path()
                _save(path, kept.tree)
            except Exception as error:  # a full disk, or a tensor of a kind that files do not have
                if path is not None:
                    path.unlink(missing_ok=True)
                warnings.warn(f"memory_limit: {key} stays in memory: {error}", RuntimeWarning, stacklevel=2)
                if isinstance(error, OSError):
                    return
                with lock:
                    if self._movable.get(key) is kept:
                        del self._movable[key]
                continue
            with lock:
                if self._kept.get(key) is not kept:
                    path.unlink()
                    continue
                del self._movable[key]
                self._used[key[0]] -= kept.size
                self._used[SPILLED] += kept.size
                kept.devices = tuple(tensor.device for tensor in tensors(kept.tree))
                kept.tree = replaced(kept.tree, lambda tensor: tensor.to("meta"))
                kept.path = path
            self._untrimmed += kept.size
            if self._untrimmed > max(self.limit // 4, TRIMMED):
                self._untrimmed = 0
                _trim()

    def close(self) -> None:
        """Forget everything and remove the files."""
        self._kept.clear()
        self._movable.clear()
        self._used.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _new_path(self) -> Path:
        if self._folder is None or not self._folder.exists():
            self._folder = Path(tempfile.mkdtemp(prefix="manifoldagg-", dir=self._parent))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._files += 1
        return self._folder / f"{self._files}.safetensors"


def _place(key: Key, kept: Kept) -> str:
    return key[0] if kept.path is None else SPILLED


@cache
def _returns_memory() -> Callable[[int], int] | None:
    """What makes an allocator return free memory to the system. Only that of glibc needs to be asked."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def _trim() -> None:
    """Let go of freed memory.

    Aligned blocks leave holes too small for the next of their size: a process would grow by what it writes to files.
    """
    returns = _returns_memory()
    if returns is not None:
        returns(0)


def _save(path: Path, tree: Tree) -> None:
    """Each tensor by itself under its number: a file has no storage that is shared or larger than its tensor."""
    lying: dict[str, Tensor] = {}
    places = set()
    for i, tensor in enumerate(tensors(tree)):
        storage = tensor.untyped_storage()
        alone = tensor.is_contiguous() and storage.nbytes() == tensor.nbytes and storage.data_ptr() not in places
        lying[str(i)] = tensor.detach() if alone else tensor.detach().clone(memory_format=torch.contiguous_format)
        places.add(storage.data_ptr())
    save_file(lying, path)


def _mapped(kept: Kept, path: Path) -> Found:
    """The tensors of a file are maps of it, which stay good when it is gone."""
    tree = kept.tree
    devices = kept.devices
    with safe_open(path, framework="pt") as file:
        maps = [file.get_tensor(str(i)) for i in range(len(devices))]

    def placed() -> Tree:
        found = iter([tensor.to(device) for tensor, device in zip(maps, devices, strict=True)])
        return replaced(tree, lambda _: next(found))

    return placed
