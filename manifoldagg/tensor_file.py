"""Tensor files: trees of plain values and tensors, stored as safetensors files with JSON metadata.

A tree consists of nested dicts, lists and tuples. Each tensor is an entry of the safetensors file, and the name of the
entry is the path of the tensor in the tree. The metadata of the file contain:

- the version of this format
- the kind of the tree, which is a name such as `"rounds"` that the reader checks
- the tree as JSON, with a reference in place of each tensor
- the dtypes and shapes of entries that are compressed, or whose dtypes some safetensors readers do not support
- a checksum of all bytes (messages between a server and its clients have the same format without the checksum)

Reading a file does not execute code.
"""

import json
import math
import os
import zlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from io import BufferedReader
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manifoldagg._io import CHUNK_BYTES, atomic_write, check_path, older_files, os_errors, write_all
from manifoldagg._json_tree import MAX_DIMENSIONS, TreePath, check_bounds, decode, encode, parse_json
from manifoldagg._validation import check_count, short_repr
from manifoldagg.errors import ArgumentError, CheckpointError

__all__ = [
    "TensorEntry",
    "check_path",
    "dumps",
    "load",
    "load_from",
    "load_structure",
    "make_header",
    "parse_entries",
    "parse_header",
    "parse_shape",
    "save",
    "tensor_bytes",
    "unique_name",
    "with_length",
]

FORMAT = "manifoldagg"
VERSION = "1"
HEADER_PREFIX = b'{"__metadata__":{"checksum":"'
"""The first bytes of a file's header, which precede the checksum.

The checksum has eight hexadecimal digits. They are zeros while the checksum is computed.
"""
BLANK_CHECKSUM = b"00000000"
CHECKSUM = slice(len(HEADER_PREFIX), len(HEADER_PREFIX) + len(BLANK_CHECKSUM))
COPY_BYTES = 2**18
"""The number of bytes that `dumps` copies at a time, so that they are still in the CPU cache for their checksum."""
DTYPES = {"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32}
DTYPES |= {"I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
"""The dtypes that every safetensors reader supports. Other dtypes are stored as bytes."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_SIZE = 2**62
"""The upper bound of the number of entries of a tensor. PyTorch computes strides as 64-bit integers."""


class TensorEntry(NamedTuple):
    """Description of a tensor in a file: its dtype and shape in memory, and the location of its stored bytes."""

    name: str
    dtype: torch.dtype
    shape: Sequence[int]
    num_bytes: int
    is_compressed: bool = False
    begin: int = 0

    @property
    def memory(self) -> int:
        """The size in memory, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype that the header declares."""
        return torch.uint8 if self.is_compressed or self.dtype not in DTYPE_NAMES else self.dtype


def save(path: str | Path, kind: str, tree: Any, *, keep: int = 1) -> None:
    """Write a tree to a file, and replace an existing file atomically.

    The function writes the data to a temporary file, syncs this file to the disk, renames it to `path`, and syncs the
    folder:

    - If the process is killed or the machine stops, `path` is either the complete old file or the complete new file.
    - If the function raises an error before the rename, `path` is still the old file. If the sync of the folder fails
      after the rename, `path` is already the new file.
    - Only the current user can read the new file.

    Args:
        path: the path of the file, in an existing folder. Symbolic links are followed.
        kind: the kind of the tree, a name that `load` checks.
        tree: dicts with strings and integers as keys, lists, tuples, dense tensors, numbers, strings, bytes and `None`.
            The tree must not change during the call. Tensors that share memory are written separately.
        keep: the number of files to keep. The latest file is `path`, and older files are `path.1`, `path.2`, …

    Raises:
        ArgumentError: if the folder does not exist.
        CheckpointError: if the tree contains a value of another type, or if the system reports an error.

    Cost: one pass over the tensors, without a second copy in memory.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(folder + "/one", "sums", {"ward-7": [torch.ones(2), math.inf], 7: (1, None)})
        ...     load(folder + "/one", "sums")
        {'ward-7': [tensor([1., 1.]), inf], 7: (1, None)}
    """
    place = check_path(path)
    check_count("keep", keep)
    parts = _serialize(kind, tree)
    with os_errors(f"{place}: could not be written"):
        _atomic_write(place, parts, keep)


def dumps(kind: str, tree: Any, buffer: bytearray | None = None) -> memoryview:
    """Serialize a tree (nested dicts, lists and tuples of tensors and other values) to bytes in the format of `save`.

    The bytes are a copy, so later changes of the tensors do not affect them. The function `load_from` reads the tree
    from a file with these bytes.

    Args:
        kind: the kind of the tree, a name that `load_from` checks.
        tree: the tree, as in `save`.
        buffer: memory for the bytes. Pass the same buffer to repeated calls, because the first write to new memory is
            slow. If the buffer is too short, the function allocates a new one.

    Raises:
        CheckpointError: if the tree contains a value that `save` rejects.
    """
    parts = [*_serialize(kind, tree)]
    size = sum(map(len, parts))
    data = memoryview(bytearray(size) if buffer is None or len(buffer) < size else buffer)[:size]
    end = checksum = 0
    for chunk in (part[i : i + COPY_BYTES] for part in parts for i in range(0, len(part), COPY_BYTES)):
        start, end = end, end + len(chunk)
        data[start:end] = chunk
        checksum = zlib.crc32(data[start:end], checksum)  # Another thread may change the tensors, but not the copy.
    data[8 + CHECKSUM.start : 8 + CHECKSUM.stop] = b"%08x" % checksum
    return data


def load(path: str | Path, kind: str) -> Any:
    """Read a tree from a file that `save` wrote.

    Each tensor is loaded to its original device, or to the CPU if this device is not available.

    Raises:
        CheckpointError: if the file does not exist, is truncated or altered, was not written by `save`, has another
            format version, or contains a tree of another kind. If an older file exists, the message names that file.
    """
    if not isinstance(path, str | Path):
        raise ArgumentError(f"path: expected a path, got {short_repr(path)}")
    try:
        with os_errors("cannot be read"), open(path, "rb") as file:
            return load_from(file, kind, os.fstat(file.fileno()).st_size)
    except CheckpointError as error:
        older = older_files(Path(path))
        hint = f"; an older file is {older[0]}" if older else ""
        raise CheckpointError(f"{path}: {error}{hint}") from error


def load_from(file: BufferedReader, kind: str, size: int, *, allow_trailing: bool = False) -> Any:
    """Read a tree from an open file, starting at the current position.

    Args:
        file: the file. The function advances its position to the end of the tree.
        kind: the expected kind of the tree.
        size: the number of bytes from the current position to the end of the file.
        allow_trailing: whether other bytes may follow the tree.

    Raises:
        CheckpointError: for the same reasons as in `load`.
    """
    metadata, found = _read(file, size, allow_trailing)
    if metadata.get("kind") != kind:
        raise CheckpointError(f"contains a {metadata.get('kind')}, expected a {kind}")

    def tensor(reference: Any) -> Tensor:
        name, device = reference if type(reference) is list else (reference, "cpu")
        entry, data = found.pop(name)
        return data.view(entry.dtype).reshape(entry.shape).to(_available_device(torch.device(device)))

    return _decode_tree(metadata, tensor)


def load_structure(file: BufferedReader, size: int) -> tuple[dict[str, str], Any]:
    """Read the metadata and the structure of a file, without loading its tensors.

    The structure is the tree (nested dicts, lists and tuples) that was saved. A string with the dtype and shape
    replaces each tensor. The memory consumption therefore does not depend on the sizes of the tensors.

    Args:
        file: the file. The function advances its position to the end of the tree.
        size: the number of bytes from the current position to the end of the file. Other bytes may follow the tree.

    Raises:
        CheckpointError: for the same reasons as in `load`. The kind is not checked.
    """
    metadata, found = _read(file, size, allow_trailing=True, retains_data=False)

    def description(reference: Any) -> Any:
        entry, _ = found[reference[0] if type(reference) is list else reference]
        return f"{entry.dtype} {list(entry.shape)}"

    return metadata, _decode_tree(metadata, description)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the values of a tensor as contiguous bytes. Contiguous CPU tensors are not copied.

    Example:
        >>> tensor_bytes(torch.tensor([1, 2], dtype=torch.int16)).hex()
        '01000200'
    """
    line = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    # A tensor with at most one element is contiguous with any stride, but a view of its bytes requires stride 1.
    return line.as_strided(line.shape, (1,)).view(torch.uint8).numpy().data


def unique_name(path: TreePath, used: Container[str]) -> str:
    """Return a name for the tensor at a path of the tree. The name is not in `used`."""
    name = "/".join(map(str, path))
    while name in used or name == "__metadata__":
        name += "'"
    return name


def make_header(entries: Sequence[TensorEntry], metadata: Mapping[str, str], *, is_bounded: bool = False) -> bytes:
    """Return the header of a tensor file, preceded by the length of the header.

    To complete the file, the caller writes the bytes of the tensors after the header, in the order of `entries`.

    Raises:
        ValueError: if `is_bounded` is set and the header exceeds the limits for untrusted data.
    """
    lines: dict[str, Any] = {}
    coded = {}
    begin = 0
    for entry in entries:
        shape = list(entry.shape)
        end = begin + entry.num_bytes
        if entry.stored_dtype is not entry.dtype or entry.is_compressed:
            coded[entry.name] = [str(entry.dtype).removeprefix("torch."), shape, entry.is_compressed]
            shape = [entry.num_bytes]
        lines[entry.name] = {"dtype": DTYPE_NAMES[entry.stored_dtype], "shape": shape, "data_offsets": [begin, end]}
        begin = end
    metadata = {**metadata, "format": FORMAT, "version": VERSION}
    if coded:
        metadata["coded"] = json.dumps(coded)
    text = json.dumps({"__metadata__": metadata, **lines}, separators=(",", ":"))
    if is_bounded:
        check_bounds(text)
    return with_length(text.encode())


def with_length(header: bytes) -> bytes:
    """Return a header with its length as a prefix, padded with spaces to a multiple of 8 bytes."""
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def parse_header(header: bytes | memoryview, *, is_bounded: bool = False) -> tuple[dict[str, str], list[TensorEntry]]:
    """Parse the header of a tensor file.

    The function raises an exception if the header is invalid. For example, a header must not declare gaps between the
    tensors, and the size of an uncompressed tensor must match its dtype and shape.

    Returns:
        The metadata, and the descriptions of the tensors in the order of their bytes.

    Example:
        >>> header = make_header([TensorEntry("w", torch.complex64, [2], 16)], {"kind": "sums"})
        >>> parse_header(header[8:])[1]
        [TensorEntry(name='w', dtype=torch.complex64, shape=(2,), num_bytes=16, is_compressed=False, begin=0)]
    """
    lines = parse_json(str(header, "utf-8"), is_bounded=is_bounded)
    metadata = lines.pop("__metadata__")
    if metadata.get("format") != FORMAT or not all(type(text) is str for text in metadata.values()):
        raise ValueError("the metadata were not written by this package")
    coded = parse_json(metadata.get("coded", "{}"), is_bounded=is_bounded)
    entries = []
    for entry in parse_entries(lines):
        if entry.name in coded:
            dtype, shape, is_compressed = coded.pop(entry.name)
            if entry.dtype is not torch.uint8 or type(is_compressed) is not bool:
                raise ValueError("an invalid encoding")
            entry = TensorEntry(
                entry.name, _parse_dtype(dtype), parse_shape(shape), entry.num_bytes, is_compressed, entry.begin
            )
            _check_length(entry)
        entries.append(entry)
    if coded:
        raise ValueError("an encoding without an entry")
    return metadata, entries


def parse_entries(
    lines: Mapping[str, Any], dtypes: Mapping[str, torch.dtype] = MappingProxyType(DTYPES)
) -> Iterator[TensorEntry]:
    """Yield the entries of a parsed header without its metadata, in the order of their bytes.

    Args:
        lines: the dtype, the shape and the offsets of each tensor, by the name of the tensor.
        dtypes: the supported dtypes, by their names in safetensors files.

    Raises:
        ValueError: if there are gaps between the bytes of the entries, or if the length of an entry does not match its
            dtype and shape.
    """
    position = 0
    for name, line in sorted(lines.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = line["data_offsets"]
        if len(line) != 3 or type(begin) is not int or type(end) is not int or begin > end:
            raise ValueError("an entry with unexpected fields or a negative length")
        if begin != position:
            raise ValueError("the entries are not contiguous")
        entry = TensorEntry(name, dtypes[line["dtype"]], parse_shape(line["shape"]), end - begin, begin=begin)
        _check_length(entry)
        yield entry
        position = end


def _check_length(entry: TensorEntry) -> None:
    # The strides of an empty tensor are products of its other sizes, which must not overflow either.
    if math.prod(max(n, 1) for n in entry.shape) >= MAX_SIZE:
        raise ValueError("an invalid shape")
    if not entry.is_compressed and entry.memory != entry.num_bytes:
        raise ValueError("the shape of an entry does not match its number of bytes")


def parse_shape(shape: Any) -> tuple[int, ...]:
    """Convert a shape from JSON to a tuple.

    Raises:
        ValueError: if the shape is invalid.
    """
    is_short_list = type(shape) is list and len(shape) <= MAX_DIMENSIONS
    if is_short_list and all(type(n) is int and 0 <= n < MAX_SIZE for n in shape):
        return tuple(shape)
    raise ValueError("an invalid shape")


def _parse_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    # Names that begin with q are dtypes of quantised tensors, which the format does not support.
    if not isinstance(dtype, torch.dtype) or str(dtype).startswith("torch.q"):
        raise ValueError(f"unknown dtype {name}")
    return dtype


def _serialize(kind: str, tree: Any) -> Iterator[memoryview]:
    """Return the parts of a file. The checksum in the header is `BLANK_CHECKSUM`."""
    tensors: dict[str, Tensor] = {}

    def add(tensor: Tensor, path: TreePath) -> Any:
        name = unique_name(path, tensors)
        tensors[name] = tensor
        return name if tensor.device.type == "cpu" else [name, str(tensor.device)]

    text = encode(tree, add, CheckpointError)
    metadata = {"checksum": BLANK_CHECKSUM.decode(), "kind": kind, "tree": text}
    listed = [TensorEntry(name, x.dtype, x.shape, x.numel() * x.itemsize) for name, x in tensors.items()]
    # Safetensors readers require that each tensor begins at a multiple of its item size.
    listed.sort(key=lambda entry: -entry.stored_dtype.itemsize)
    head = memoryview(make_header(listed, metadata))
    return chain([head], (tensor_bytes(tensors[entry.name]) for entry in listed))


def _atomic_write(path: Path, parts: Iterator[memoryview], keep: int) -> None:
    with atomic_write(path, keep=keep, is_synced=True) as draft:
        file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            checksum = 0
            for part in parts:
                checksum = write_all(partial(os.write, file), part, checksum)
            os.lseek(file, 8 + CHECKSUM.start, os.SEEK_SET)
            write_all(partial(os.write, file), memoryview(b"%08x" % checksum), 0)
            os.fsync(file)
        finally:
            os.close(file)


def _read(
    file: BufferedReader, size: int, allow_trailing: bool, retains_data: bool = True
) -> tuple[dict[str, str], dict[str, tuple[TensorEntry, Tensor]]]:
    start = file.read(8 + len(HEADER_PREFIX))
    if not HEADER_PREFIX.startswith(start[8:]):
        raise CheckpointError("was not written by this package")
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8 + len(HEADER_PREFIX) or size < 8 + length:
        raise CheckpointError(f"is truncated: it has {size} bytes")
    try:
        header = start[8:] + bytes(_read_exactly(file, length - len(HEADER_PREFIX)).numpy())
        metadata, entries = parse_header(header)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"is altered: {error}") from None
    missing = 8 + length + sum(entry.num_bytes for entry in entries) - size
    if missing > 0 or (missing and not allow_trailing):
        what = "truncated" if missing > 0 else "altered"
        raise CheckpointError(f"is {what}: it has {size} bytes, expected {size + missing}")
    checksum = zlib.crc32(start[:8] + HEADER_PREFIX + BLANK_CHECKSUM + header[CHECKSUM.stop :])
    found = {}
    for entry in entries:
        count = entry.num_bytes if retains_data else CHUNK_BYTES
        for begin in range(0, max(entry.num_bytes, 1), max(count, 1)):
            data = _read_exactly(file, min(count, entry.num_bytes - begin))
            checksum = zlib.crc32(data.numpy().data, checksum)
        found[entry.name] = entry, data
    if b"%08x" % checksum != header[CHECKSUM]:
        raise CheckpointError("is altered: its checksum does not match")
    version = metadata.get("version")
    if version != VERSION:
        raise CheckpointError(f"has format version {version}, and this version of the package reads {VERSION}")
    return metadata, found


def _decode_tree(metadata: Mapping[str, str], load_tensor: Callable[[Any], Any]) -> Any:
    try:
        return decode(json.loads(metadata["tree"]), load_tensor)
    except Exception as error:  # The checksum is valid, so another program wrote the file.
        raise CheckpointError(f"was not written by this package: {error!r}") from None


def _read_exactly(file: BufferedReader, count: int) -> Tensor:
    data = torch.empty(max(count, 0), dtype=torch.uint8, device="cpu")
    if file.readinto(data.numpy().data) != count:
        raise CheckpointError("is altered: it is shorter than its header declares")
    return data


def _available_device(device: torch.device) -> torch.device:
    kind = getattr(torch, device.type, None)
    there = kind is not None and kind.is_available() and (device.index or 0) < kind.device_count()
    return device if there else torch.device("cpu")
