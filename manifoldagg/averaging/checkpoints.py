"""Readers of checkpoints in safetensors files, which are mapped into memory.

The operating system loads only those parts of a file that the process reads, so a large checkpoint needs little memory.
"""

import json
import math
import mmap
import os
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manifoldagg._io import os_errors
from manifoldagg._json_tree import parse_json
from manifoldagg._validation import short_repr
from manifoldagg.errors import ArgumentError, CheckpointError, StateDictError
from manifoldagg.manifolds.layout import check_memory
from manifoldagg.manifolds.lora.peft import FactorPair
from manifoldagg.manifolds.model_io import as_tensors
from manifoldagg.tensor_file import DTYPES, TensorEntry, parse_entries, tensor_bytes

__all__ = [
    "FOREIGN_DTYPES",
    "CheckpointFiles",
    "FilePool",
    "StoredTensor",
    "as_path",
    "check_alike",
    "merged_adapter_config",
    "open_checkpoint",
]

INDEX_SUFFIX = ".safetensors.index.json"
FILE_SUFFIX = ".safetensors"
DEFAULT_NAMES = ("model", "adapter_model")
"""The names of the files that transformers and PEFT write, without the suffix."""
MAX_HEADER_BYTES = 100_000_000
"""The maximum length of a header in the safetensors format."""
MAX_OPEN_FILES = 200
"""The maximum number of mapped files. A mapping uses two descriptors, and many systems allow 1,024 per process."""
FOREIGN_DTYPES = DTYPES | {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
FOREIGN_DTYPES |= {"U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64}
"""The dtypes in files of other programs."""
ADAPTER_CONFIG = "adapter_config.json"


class MappedFile:
    """A file that is mapped into memory for reading.

    The mapping exists until the object and all tensors that refer to its memory are deleted.

    Args:
        path: the path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self._memory = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        # The array keeps the mapping alive as long as any tensor refers to it.
        self.data = as_tensors(str(path), {"data": np.frombuffer(self._memory, np.uint8)})["data"]

    def prefetch(self, begin: int, end: int) -> None:
        """Ask the operating system to read a range of bytes from the disk, without waiting for it."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, begin, end - begin, os.POSIX_FADV_WILLNEED)

    def release(self, begin: int, end: int) -> None:
        """Remove a range of bytes of the memory-mapped file from the memory of the process.

        The operating system may retain these bytes in its page cache.
        """
        if hasattr(mmap, "MADV_DONTNEED"):
            # `madvise` requires a start at the border of a page. Earlier entries on this page are read again from the
            # page cache.
            start = begin // mmap.PAGESIZE * mmap.PAGESIZE
            self._memory.madvise(mmap.MADV_DONTNEED, start, end - start)


class FilePool:
    """A pool of files that are mapped into memory.

    The operating system limits the number of open files. The pool therefore maps at most `MAX_OPEN_FILES` files at the
    same time. To map another file, it releases the least recently used file.
    """

    def __init__(self) -> None:
        # Tensors in use keep the memory of a released file alive.
        self._map = lru_cache(MAX_OPEN_FILES)(MappedFile)

    def get(self, path: Path) -> MappedFile:
        """Return the mapped file of a path. If necessary, map the file first."""
        return self._map(path)

    def close(self) -> None:
        """Release all files."""
        self._map.cache_clear()


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor of a checkpoint, in a file or in memory.

    Args:
        entry: the name, dtype and shape. `begin` is the position in the file.
        path: the path of the file, or `None` for a tensor in memory.
        source: the pool of the file, or the tensor.
    """

    entry: TensorEntry
    path: Path | None
    source: FilePool | Tensor

    @property
    def size(self) -> int:
        """The number of entries."""
        return math.prod(self.entry.shape)

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return a range of entries of the flattened tensor as a vector on the CPU, without a copy if possible."""
        stop = self.size if stop is None else stop
        if isinstance(self.source, Tensor):
            return self.source.detach().reshape(-1)[start:stop].cpu()
        if start == stop:
            return torch.empty(0, dtype=self.entry.dtype)
        assert self.path is not None
        begin, end = self._range(start, stop)
        data = self.source.get(self.path).data[begin:end]
        # Other programs may store a tensor at an address that is not a multiple of its item size.
        data = data.clone() if begin % self.entry.dtype.itemsize else data
        # The bytes are reinterpreted as entries of this dtype, without a conversion.
        return data.view(self.entry.dtype)

    def prefetch(self, start: int, stop: int) -> None:
        """Ask the operating system to read a range of entries from the disk, without waiting for it."""
        if not isinstance(self.source, Tensor) and self.path is not None and stop > start:
            self.source.get(self.path).prefetch(*self._range(start, stop))

    def release(self, start: int, stop: int) -> None:
        """Release a range of entries from the memory of the process, if the tensor is in a file."""
        if not isinstance(self.source, Tensor) and self.path is not None and stop > start:
            self.source.get(self.path).release(*self._range(start, stop))

    def _range(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of bytes in the file that contains a range of entries."""
        item = self.entry.dtype.itemsize
        return self.entry.begin + start * item, self.entry.begin + stop * item


@dataclass(frozen=True, eq=False)
class CheckpointFiles:
    """A checkpoint, which is one safetensors file, several shards, or a state dict in memory.

    Attributes:
        label: the path of the checkpoint, or `models[i]` for a state dict. Error messages begin with this label.
        tensors: the tensors by name, in the order of the files.
        shards: the names of the tensors in each file, by the name of the file.
        metadata: the metadata of the first file.
        folder: the folder of the files, or `None` for a state dict.
        adapter_config: the configuration of the LoRA adapter, or `None` if there is no valid configuration.
        identity: the properties by which a restarted merge recognises the checkpoint.
    """

    label: str
    tensors: Mapping[str, StoredTensor]
    shards: Mapping[str, Sequence[str]] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    adapter_config: Mapping[str, Any] | None = None
    identity: Any = None

    @property
    def scaling(self) -> list[Any] | None:
        """A list of the scaling factor, the `rank_pattern` and the `alpha_pattern` of the LoRA adapter.

        The adapter multiplies the product of its LoRA factors by the scaling factor. The two patterns define other
        ranks and other values of `lora_alpha` for individual modules. The value is `None` if the checkpoint has no
        adapter configuration.
        """
        return None if self.adapter_config is None else _scaling_of(self.adapter_config)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors of the checkpoint as views of the files, which are mapped into memory.

        A large checkpoint needs little memory, because the operating system loads a page of a file only when the page
        is read. Do not write to the tensors. After reading them, call `check_unchanged`, which raises an error if a
        file has changed in the meantime.
        """
        return {name: tensor.read().view(tensor.entry.shape) for name, tensor in self.tensors.items()}

    def check_unchanged(self, prefix: str = "") -> None:
        """Check that no file of the checkpoint has changed since its header was read.

        If a file has changed, the tensors that were read may belong to two different versions of the file.

        Args:
            prefix: the beginning of the error message.

        Raises:
            CheckpointError: if a file was changed or removed. The message contains the path of the file.
        """
        for path, size, modified, _ in self.identity if self.folder is not None else ():
            try:
                status = os.stat(path)
                changed = (status.st_size, status.st_mtime_ns) != (size, modified)
            except OSError:
                changed = True
            if changed:
                raise CheckpointError(f"{prefix}{path}: expected an unchanged file during the call, got a changed one")


def as_path(name: str, path: Any) -> Path:
    """Return a path argument as a `Path`.

    Raises:
        ArgumentError: if `path` is not a path, or if the operating system does not accept it.
    """
    try:
        text = os.fspath(path)
        if not isinstance(text, str):
            raise TypeError("it consists of bytes")
        os.lstat(text)
    except FileNotFoundError:
        pass
    except (OSError, TypeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ArgumentError(f"{name}: expected a valid path, got {short_repr(path)}: {reason}") from None
    return Path(text)


def open_checkpoint(label: str, model: Any, pool: FilePool) -> CheckpointFiles:
    """Read the headers of a checkpoint.

    Args:
        label: the name of the argument, for error messages.
        model: the path of a safetensors file, of an index or of a folder, or a state dict.
        pool: the pool of the files.

    Raises:
        ArgumentError: if the model is of another type, or the path does not belong to a checkpoint.
        CheckpointError: if a file is invalid. The message contains the path of the file.
    """
    if not isinstance(model, str | os.PathLike):
        return _in_memory(label, model)
    place = as_path(label, model)
    files, weight_map = _find_files(label, place)
    label = str(place)
    tensors: dict[str, StoredTensor] = {}
    shards: dict[str, list[str]] = {}
    metadata: dict[str, str] = {}
    identity = []
    for path in files:
        header, entries, stamp = _read_header(path)
        metadata = metadata or header
        identity.append(stamp)
        shards[path.name] = []
        for entry in entries:
            if weight_map is not None and weight_map.get(entry.name, path.name) != path.name:
                raise CheckpointError(f"{path}: {entry.name}: expected it in {weight_map[entry.name]} as in the index")
            if entry.name in tensors:
                raise CheckpointError(f"{path}: {entry.name}: expected one tensor of this name, got a second one")
            tensors[entry.name] = StoredTensor(entry, path, pool)
            shards[path.name].append(entry.name)
    missing = [name for name in weight_map or {} if name not in tensors]
    if missing:
        raise CheckpointError(f"{label}: {missing[0]}: expected it in {(weight_map or {})[missing[0]]} as in the index")
    folder = files[0].parent
    return CheckpointFiles(label, tensors, shards, metadata, folder, _adapter_config(folder), identity)


def check_alike(checkpoints: Sequence[CheckpointFiles], pairs: Sequence[FactorPair]) -> None:
    """Check that all checkpoints have the tensor names, shapes and dtypes of the first checkpoint.

    The ranks of LoRA factors may differ between the checkpoints. If the checkpoints contain the configurations of their
    adapters, the scaling factors of the adapters must be equal.

    Raises:
        StateDictError: if checkpoints differ. The message has one line for each difference.
    """
    first, *others = checkpoints
    rank_axes = {name: axis for pair in pairs for name, axis in ((pair.first, 0), (pair.second, 1))}
    # All differences are collected, so that one error reports them together.
    lines = []
    for other in others:
        for name, expected in first.tensors.items():
            if name not in other.tensors:
                lines.append(f"{other.label}: {name}: expected this tensor, got a checkpoint without it")
                continue
            given = other.tensors[name].entry
            if _fixed_shape(expected.entry, rank_axes) != _fixed_shape(given, rank_axes):
                place = _place_of(other, name)
                lines.append(f"{place}: {name}: expected shape {(*expected.entry.shape,)}, got {(*given.shape,)}")
            if expected.entry.dtype != given.dtype:
                lines.append(f"{_place_of(other, name)}: {name}: expected {expected.entry.dtype}, got {given.dtype}")
        extra = [name for name in other.tensors if name not in first.tensors]
        lines += [f"{_place_of(other, name)}: {name}: expected only the names of the first model" for name in extra]
        if pairs and None not in (first.scaling, other.scaling) and first.scaling != other.scaling:
            scaling = f"expected the scaling {first.scaling} of the first adapter, got {other.scaling}"
            lines.append(f"{other.label}: {ADAPTER_CONFIG}: {scaling}; use average_adapters with its option scaling")
    if lines:
        count = f"{len(lines)} difference{'s' if lines[1:] else ''}"
        expected_text = f"models: expected the names, shapes and dtypes of {first.label}, got {count}"
        raise StateDictError("\n  ".join([f"{expected_text}:", *lines]))


def _place_of(checkpoint: CheckpointFiles, name: str) -> str:
    """Return the path of the file that contains a tensor, or the label of a state dict."""
    path = checkpoint.tensors[name].path
    return checkpoint.label if path is None else str(path)


def _fixed_shape(entry: TensorEntry, rank_axes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of a tensor. If it is a LoRA factor, omit the dimension of its rank."""
    axis = rank_axes.get(entry.name)
    return tuple(n for i, n in enumerate(entry.shape) if i != axis or len(entry.shape) < 2)


def _in_memory(label: str, model: Any) -> CheckpointFiles:
    """Return a state dict as a checkpoint.

    Raises:
        ArgumentError: if `model` is not a mapping.
    """
    if not isinstance(model, Mapping):
        raise ArgumentError(
            f"{label}: expected a path or a state dict, because other models are files; got {short_repr(model)}"
        )
    state = as_tensors(label, model)
    check_memory(state, f"{label}: ")
    entries = [TensorEntry(name, x.dtype, tuple(x.shape), x.numel() * x.itemsize) for name, x in state.items()]
    tensors = {entry.name: StoredTensor(entry, None, state[entry.name]) for entry in entries}
    # A state dict has no path, so a restarted merge recognises it by a checksum of its contents.
    digest = 0
    for name, x in state.items():
        digest = zlib.crc32(tensor_bytes(x), zlib.crc32(f"{name} {x.dtype} {tuple(x.shape)}".encode(), digest))
    return CheckpointFiles(label, tensors, identity=[digest])


def _find_files(name: str, place: Path) -> tuple[list[Path], dict[str, str] | None]:
    """Find the safetensors files of a checkpoint.

    Returns:
        The paths of the files and, if the checkpoint has an index of shards, the file name of each tensor.
    """
    if place.name.endswith(INDEX_SUFFIX):
        return _read_index(place)
    if place.is_file():
        if place.suffix != FILE_SUFFIX:
            raise ArgumentError(
                f"{name}: expected a {FILE_SUFFIX} file, got {short_repr(str(place))}; convert it first"
            )
        return [place], None
    if not place.is_dir():
        raise ArgumentError(f"{name}: expected an existing file or folder, got {short_repr(str(place))}")
    indices = sorted(place.glob(f"*{INDEX_SUFFIX}"))
    files = sorted(place.glob(f"*{FILE_SUFFIX}"))
    # The default names have precedence, because a folder can also contain other safetensors files.
    defaults = [place / f"{default}{suffix}" for default in DEFAULT_NAMES for suffix in (INDEX_SUFFIX, FILE_SUFFIX)]
    found = [path for path in defaults if path in (*indices, *files)][:1] or (indices if len(indices) == 1 else files)
    if len(found) != 1:
        given = f"{len(files)} files and {len(indices)} indices"
        raise ArgumentError(f"{name}: expected one {FILE_SUFFIX} file or one index in {str(place)!r}, got {given}")
    return _read_index(found[0]) if found[0] in indices else (found, None)


def _read_index(path: Path) -> tuple[list[Path], dict[str, str]]:
    """Read the index of a checkpoint that consists of several shards.

    Returns:
        The paths of the shards, and the file name of each tensor.

    Raises:
        CheckpointError: if the index cannot be read or is invalid.
    """
    try:
        weight_map = parse_json(path.read_text())["weight_map"]
        names = [*dict.fromkeys(weight_map.values())]
        if not names or any(type(name) is not str or Path(name).name != name for name in names):
            raise ValueError("expected names of files in the same folder")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: is not an index of shards: {error}") from None
    return [path.parent / name for name in sorted(names)], weight_map


def _read_header(path: Path) -> tuple[dict[str, str], list[TensorEntry], list[Any]]:
    """Read the header of a safetensors file.

    Returns:
        The metadata, the descriptions of the tensors, and the properties by which a restarted merge recognises the
        file.
    """
    with os_errors(f"{path}: cannot be read"), open(path, "rb") as file:
        status = os.fstat(file.fileno())
        # A file starts with the length of the header in 8 bytes. A damaged length must not cause a huge allocation.
        length = int.from_bytes(start := file.read(8), "little")
        if len(start) < 8 or length > min(MAX_HEADER_BYTES, status.st_size - 8):
            raise CheckpointError(f"{path}: is not a complete safetensors file: it has {status.st_size} bytes")
        header = file.read(length)
    try:
        lines = parse_json(header.decode())
        metadata = lines.pop("__metadata__", {})
        if type(metadata) is not dict or any(type(text) is not str for text in metadata.values()):
            raise ValueError("expected metadata that are strings")
        "".join([*lines, *metadata, *metadata.values()]).encode()  # JSON can contain text that UTF-8 cannot encode.
        # The positions in the header do not include the header itself.
        entries = [entry._replace(begin=entry.begin + 8 + length) for entry in parse_entries(lines, FOREIGN_DTYPES)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not a safetensors file: {error}") from None
    if (end := entries[-1].begin + entries[-1].num_bytes if entries else 8 + length) != status.st_size:
        raise CheckpointError(f"{path}: is not complete: it has {status.st_size} bytes, expected {end}")
    # Size, time and header detect a change without reading the tensors.
    stamp = [str(path.resolve()), status.st_size, status.st_mtime_ns, zlib.crc32(header)]
    return metadata, entries, stamp


def merged_adapter_config(checkpoints: Sequence[CheckpointFiles], tensor_ranks: Sequence[int]) -> dict[str, Any] | None:
    """Return the configuration of a merged LoRA adapter.

    The configuration is that of the first checkpoint, with two changes. The rank is the largest rank of all
    checkpoints, and `lora_alpha` is adjusted so that the scaling of the adapter stays the same. The result is `None` if
    the first checkpoint has no configuration, or if its configuration needs no change.

    Args:
        checkpoints: the checkpoints.
        tensor_ranks: the largest rank of the factors of each checkpoint, for checkpoints without a configuration.
    """
    configs = [checkpoint.adapter_config for checkpoint in checkpoints]
    first = configs[0]
    pairs = zip(configs, tensor_ranks, strict=True)
    rank = max(other if config is None else config["r"] for config, other in pairs)
    if first is None or rank == first["r"]:
        return None
    ratio = rank / first["r"]
    alpha = first["lora_alpha"] * (math.sqrt(ratio) if first.get("use_rslora") else ratio)
    return {**first, "r": rank, "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha}


def _adapter_config(folder: Path) -> dict[str, Any] | None:
    """Read the configuration of the LoRA adapter in a folder, or return `None` if it is missing or invalid."""
    try:
        config: dict[str, Any] = json.loads((folder / ADAPTER_CONFIG).read_text())
        _scaling_of(config)
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError, AttributeError):
        return None
    return config


def _scaling_of(config: Mapping[str, Any]) -> list[Any]:
    """Return the scaling factor of a LoRA adapter, its `rank_pattern` and its `alpha_pattern`."""
    rank = config["r"]
    alpha = config["lora_alpha"]
    factor = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    return [factor, config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}]
