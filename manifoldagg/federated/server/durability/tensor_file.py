"""Tensor files: a tree of plain values and tensors in one file, written atomically.

A file is a safetensors file. Its metadata are the version of this format, what kind of thing it holds and a checksum
over all of it; the tree is JSON, in the entry `tree`, and names the other entries where its tensors are. Nothing in
a file is ever executed.
"""

import contextlib
import errno
import glob
import json
import os
import shutil
import sys
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manifoldagg._validation import check_count, short_repr
from manifoldagg.errors import ArgumentError, CheckpointError
from manifoldagg.federated.pytrees import Tree
from manifoldagg.federated.server.durability.raw_io import tensor_bytes, write_all
from manifoldagg.federated.server.durability.tree_codec import (
    decode,
    encode,
    header_entries,
    offsets,
    parse_dtype,
    with_length,
)

if sys.platform != "win32":
    import fcntl

__all__ = ["check_path", "dumps", "fsync_dir", "load", "load_from", "save"]

FORMAT = 1
HEADER_PREFIX = b'{"__metadata__":{"checksum":"'
"""How the header of every version begins: eight hexadecimal digits follow, read as zeros where they are computed."""
BLANK_CHECKSUM = b"00000000"
TEMP_SUFFIX = ".tmp"
NO_LINK_ERRNOS = {errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
"""Error numbers of file systems without hard links."""


def save(path: str | Path, kind: str, tree: Tree, *, keep: int = 1) -> None:
    """Write a tree to a file and replace an existing one.

    The file is renamed after it is complete and synced to the disk. If the process is killed or the machine stops,
    either the older or the new file exists. An error leaves the older file and no other; if only the sync of the folder
    fails, the new file remains.

    Only the user of the process can read the file.

    Args:
        path: of the file, in a folder that exists. A link is followed.
        kind: what the tree is; `load` asks for the same.
        tree: dicts with strings and integers as keys, lists, tuples, dense tensors, numbers, strings, bytes and `None`.
            It is not written meanwhile. Tensors that share memory are written one by one.
        keep: how many files to keep: the last one under `path`, older ones under `path.1`, `path.2`, …

    Raises:
        ArgumentError: if there is no such folder.
        CheckpointError: naming what of the tree is of another type, or what the system says.

    Cost: one pass over the tensors, no second copy of them in memory.

    Example:
        >>> import math, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(folder + "/one", "sums", {"ward-7": [torch.ones(2), math.inf], 7: (1, None)})
        ...     load(folder + "/one", "sums")
        {'ward-7': [tensor([1., 1.]), inf], 7: (1, None)}
    """
    place = check_path(path)
    check_count("keep", keep)
    parts = _serialize(kind, tree)
    try:
        _remove_stale(place)
        _atomic_write(place, parts, keep)
    except OSError as error:
        raise CheckpointError(f"{place}: could not be written: {error.strerror or error}") from error


def dumps(kind: str, tree: Tree) -> bytearray:
    """Return the bytes of the file that `save` would write, for `load_from`.

    Raises:
        CheckpointError: naming what of the tree is of another type.

    Cost: one copy of the tensors, and a pass over it.
    """
    data = bytearray().join(_serialize(kind, tree))
    start = 8 + len(HEADER_PREFIX)
    data[start : start + len(BLANK_CHECKSUM)] = b"%08x" % zlib.crc32(data)
    return data


def load(path: str | Path, kind: str) -> Tree:
    """Return the tree that `save` wrote. Tensors return to their devices if these are available, else to the CPU.

    Args:
        path: of the file.
        kind: what it must hold.

    Raises:
        CheckpointError: if there is no such file, or it is truncated, altered, not from `save`, from a newer version
            of this package, or holds another kind. An older file beside it is named, and not read.
    """
    if not isinstance(path, str | Path):
        raise ArgumentError(f"path: expected a path, got {short_repr(path)}")
    try:
        with open(path, "rb") as file:
            return load_from(file, kind, os.fstat(file.fileno()).st_size)
    except OSError as error:
        why = f"cannot be read: {error.strerror or error}"
    except CheckpointError as error:
        why = str(error)
    raise CheckpointError(f"{path}: {why}{_older_file_hint(Path(path))}")


def check_path(path: str | Path) -> Path:
    """Return the path of a file as an absolute path without links, in an existing folder.

    Raises:
        ArgumentError: if it cannot be that of a file.
    """
    if not isinstance(path, str | Path):
        raise ArgumentError(f"path: expected a path, got {short_repr(path)}")
    place = Path(os.path.realpath(path))
    if not place.parent.is_dir() or place.is_dir():
        raise ArgumentError(f"path: expected that of a file in a folder that exists, got {short_repr(str(path))}")
    return place


def load_from(file: BufferedReader, kind: str, size: int, *, allow_trailing: bool = False) -> Tree:
    """Return the tree that starts at the position of an open file, and advance the file past it.

    Args:
        file: to read.
        kind: what it must hold.
        size: bytes that there are from here on.
        allow_trailing: whether something else may follow.

    Raises:
        CheckpointError: as `load`.
    """
    start = file.read(8 + len(HEADER_PREFIX))
    if not HEADER_PREFIX.startswith(start[8:]):
        raise CheckpointError("was not written by this package")
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8 + len(HEADER_PREFIX) or size < 8 + length:
        raise CheckpointError(f"is truncated: it has {size} bytes")
    try:
        header = start[8:] + bytes(_read_exactly(file, length - len(HEADER_PREFIX)).numpy())
        told = header[len(HEADER_PREFIX) :][: len(BLANK_CHECKSUM)]
        lines = json.loads(header)
        metadata = lines.pop("__metadata__")
        follow = offsets(lines)
        end = follow[-1][1] if follow else 0
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"is altered: {error}") from None
    missing = 8 + length + end - size
    if missing > 0 or (missing and not allow_trailing):
        what = "truncated" if missing > 0 else "altered"
        raise CheckpointError(f"is {what}: it has {size} bytes, expected {size + missing}")
    checksum = zlib.crc32(
        start[:8] + HEADER_PREFIX + BLANK_CHECKSUM + header[len(HEADER_PREFIX) + len(BLANK_CHECKSUM) :]
    )
    found = {}
    for begin, end, name in follow:
        found[name] = _read_exactly(file, end - begin)
        checksum = zlib.crc32(found[name].numpy().data, checksum)
    if b"%08x" % checksum != told:
        raise CheckpointError("is altered: its checksum is another one")
    if metadata["format"] != str(FORMAT):
        raise CheckpointError(f"has format {metadata['format']}, and this version of the package reads {FORMAT}: newer")
    if metadata["kind"] != kind:
        raise CheckpointError(f"holds a {metadata['kind']}, expected a {kind}")
    try:
        text = bytes(found.pop("tree").numpy())
        data = {int(name): values for name, values in found.items()}

        def tensor(content: Any) -> Tensor:
            index, name, shape, device = content
            values = data.pop(index).view(parse_dtype(name)).reshape(shape)
            return values.to(_available_device(torch.device(device)))

        return decode(json.loads(text), tensor)
    except Exception as error:  # the checksum is valid, so that another program wrote it
        raise CheckpointError(f"was not written by this package: {error!r}") from None


def fsync_dir(folder: Path) -> None:
    """Sync a directory to the disk, if the system supports it."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _serialize(kind: str, tree: Tree) -> Iterator[memoryview]:
    """Yield the parts of a file with an empty checksum."""
    tensors: list[Tensor] = []

    def listed(tensor: Tensor, way: tuple[str | int, ...]) -> list[Any]:
        tensors.append(tensor)
        return [len(tensors) - 1, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), str(tensor.device)]

    text = encode(tree, listed, CheckpointError).encode()
    # Readers want each entry to begin at a multiple of the size of its numbers, and no gaps.
    order = sorted(range(len(tensors)), key=lambda i: -tensors[i].itemsize)
    head = _make_header(kind, [(str(i), tensors[i]) for i in order], len(text))
    return chain([head], (tensor_bytes(tensors[i]) for i in order), [memoryview(text)])


def _available_device(device: torch.device) -> torch.device:
    """Return the device if it is available, else the CPU."""
    kind = getattr(torch, device.type, None)
    there = kind is not None and kind.is_available() and (device.index or 0) < kind.device_count()
    return device if there else torch.device("cpu")


def _make_header(kind: str, tensors: list[tuple[str, Tensor]], length: int) -> memoryview:
    """Return the header of a file with these tensors and `length` bytes of text, with an empty checksum."""
    listed = [(name, x.dtype, list(x.shape), x.numel() * x.itemsize) for name, x in tensors]
    lines = header_entries([*listed, ("tree", torch.uint8, [length], length)])
    metadata = f'{BLANK_CHECKSUM.decode()}","format":"{FORMAT}","kind":{json.dumps(kind)}}}'
    return memoryview(with_length(f"{HEADER_PREFIX.decode()}{metadata},{lines}}}"))


def _atomic_write(path: Path, parts: Iterable[memoryview], keep: int) -> None:
    """Write a temporary file next to `path`, sync it to the disk, and rename it."""
    with _temp_file(path) as (name, file):
        write = partial(os.write, file)
        checksum = 0
        for part in parts:
            checksum = write_all(write, part, checksum)
        os.lseek(file, 8 + len(HEADER_PREFIX), os.SEEK_SET)
        write_all(write, memoryview(b"%08x" % checksum), 0)
        os.fsync(file)
        _rotate(path, keep)
        os.replace(name, path)
        fsync_dir(path.parent)


@contextlib.contextmanager
def _temp_file(path: Path) -> Iterator[tuple[Path, int]]:
    """Create a new file next to `path`. It is removed afterwards, unless it was renamed."""
    name = _temp_name(path)
    file = -1
    try:
        while file < 0:
            file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            _flock(file, blocking=True)
            # Who sweeps may have been first, and taken it for one that was left.
            if os.fstat(file).st_nlink == 0:
                os.close(file)
                file = -1
        yield name, file
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name)
        if file >= 0:
            os.close(file)


def _temp_name(path: Path) -> Path:
    """Return a unique file name."""
    return path.with_name(f"{path.name}.{os.urandom(8).hex()}{TEMP_SUFFIX}")


def _flock(file: int, *, blocking: bool) -> bool:
    """Lock a file exclusively until it is closed; the system releases the lock of a killed process."""
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
    except OSError:  # another process holds the lock, or the file system has no locks
        return False
    return True


def _remove_stale(path: Path) -> None:
    """Remove the temporary files of killed processes."""
    for name in path.parent.glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * 16}{TEMP_SUFFIX}"):
        # Those of others may go meanwhile, or may not be opened.
        with contextlib.suppress(OSError):
            file = os.open(name, os.O_RDWR)
            try:
                if _flock(file, blocking=False):
                    os.unlink(name)
            finally:
                os.close(file)


def _rotate(path: Path, keep: int) -> None:
    """Rotate older files: link the file at `path` to the next older name; `path` exists at all times."""
    latest = _backup_path(path, 1)
    if keep == 1 or not path.exists() or (latest.exists() and path.samefile(latest)):
        return
    for i in range(keep - 1, 1, -1):
        if _backup_path(path, i - 1).exists():
            os.replace(_backup_path(path, i - 1), _backup_path(path, i))
    link = _temp_name(path)
    try:
        try:
            os.link(path, link)
        except OSError as error:
            if error.errno not in NO_LINK_ERRNOS:
                raise
            os.close(os.open(link, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            shutil.copyfile(path, link)
        os.replace(link, latest)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(link)


def _backup_path(path: Path, i: int) -> Path:
    return path.with_name(f"{path.name}.{i}")


def _read_exactly(file: BufferedReader, count: int) -> Tensor:
    """Read exactly this number of bytes into new memory."""
    data = torch.empty(max(count, 0), dtype=torch.uint8, device="cpu")
    if file.readinto(data.numpy().data) != count:
        raise CheckpointError("is altered: it ends before its header says")
    return data


def _older_file_hint(path: Path) -> str:
    """Return a hint that names an older file."""
    older = [name for name in path.parent.glob(f"{glob.escape(path.name)}.*") if name.suffix[1:].isdecimal()]
    return f"; an older one is {min(older, key=lambda name: int(name.suffix[1:]))}" if older else ""
