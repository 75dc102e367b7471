"""Tensor files: trees of plain values and tensors, as safetensors files with JSON metadata.

The entries of a file are its tensors, under their paths in the tree. The metadata are the version of this format, the
kind of the tree, the tree as JSON, the encodings of entries that a safetensors reader may not know, and in a file a
checksum of all its bytes. Reading a file never executes anything.
"""

import json
import math
import os
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from manifoldagg._io import atomic_write, check_path, older_files, write_all
from manifoldagg._validation import check_count, short_repr
from manifoldagg.errors import ArgumentError, CheckpointError

__all__ = [
    "TensorEntry",
    "check_path",
    "decode",
    "dumps",
    "encode",
    "load",
    "load_from",
    "make_header",
    "parse_header",
    "parse_json",
    "parse_shape",
    "save",
    "tensor_bytes",
    "unique_name",
    "with_length",
]

FORMAT = "manifoldagg"
VERSION = "1"
HEADER_PREFIX = b'{"__metadata__":{"checksum":"'
"""How the header of a file begins. Eight hexadecimal digits follow. They are zeros while the checksum is computed."""
BLANK_CHECKSUM = b"00000000"
CHECKSUM = slice(len(HEADER_PREFIX), len(HEADER_PREFIX) + len(BLANK_CHECKSUM))
DTYPES = {"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32}
DTYPES |= {"I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
"""The dtypes that every safetensors reader knows. Other dtypes are stored as bytes."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_DIMENSIONS = 64
"""The largest number of dimensions of a tensor, as in torch."""
MAX_BLOCKING_VALUES = 2**12
"""The largest number of values that are written as JSON without letting other threads run."""

# Limits of data from an untrusted source (`is_bounded`).
MAX_HEADER_BYTES = 2**24
MAX_HEADER_VALUES = 2**20
"""The largest number of brackets and commas in JSON, and therefore of values."""
MAX_DEPTH = 64
MAX_KEY = 2**60
"""Larger integers are not their own hashes, and converting many digits takes quadratic time."""
MAX_INT_KEYS = 2**12
"""The largest number of integer keys of one dict. Integers can be chosen to collide, which takes quadratic time."""

TreePath = tuple[str | int, ...]


class TensorEntry(NamedTuple):
    """A tensor in a file: its dtype and shape in memory, and the number and position of its bytes in the file."""

    name: str
    dtype: torch.dtype
    shape: Sequence[int]
    num_bytes: int
    is_compressed: bool = False
    begin: int = 0

    @property
    def memory(self) -> int:
        """The number of bytes in memory."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype in the header."""
        return torch.uint8 if self.is_compressed or self.dtype not in DTYPE_NAMES else self.dtype


def save(path: str | Path, kind: str, tree: Any, *, keep: int = 1) -> None:
    """Write a tree to a file, which only the user of the process can read, and replace an existing file.

    The file is renamed after it is complete and synced to the disk. If the process is killed or the machine stops,
    either the older or the new file exists. An error leaves the older file and no other; if only the sync of the folder
    fails, the new file remains.

    Args:
        path: of the file, in a folder that exists. A link is followed.
        kind: what the tree is; `load` checks it.
        tree: dicts with strings and integers as keys, lists, tuples, dense tensors, numbers, strings, bytes and `None`.
            It must not change meanwhile. Tensors that share memory are written one by one.
        keep: how many files to keep: the last one under `path`, older ones under `path.1`, `path.2`, …

    Raises:
        ArgumentError: if there is no such folder.
        CheckpointError: naming a value of another type in the tree, or with the system error.

    Cost: one pass over the tensors, no second copy of them in memory.

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
    try:
        _atomic_write(place, parts, keep)
    except OSError as error:
        raise CheckpointError(f"{place}: could not be written: {error.strerror or error}") from error


def dumps(kind: str, tree: Any) -> bytearray:
    """Return the bytes of the file that `save` would write, for `load_from`; raises errors as `save` does."""
    data = bytearray().join(_serialize(kind, tree))
    data[8 + CHECKSUM.start : 8 + CHECKSUM.stop] = b"%08x" % zlib.crc32(data)
    return data


def load(path: str | Path, kind: str) -> Any:
    """Return the tree that `save` wrote. Tensors return to their devices if these are available, else to the CPU.

    Raises:
        CheckpointError: if the file does not exist, is truncated or altered, was not written by `save`, has another
            version of the format, or holds another kind. The message names an older file next to it, which is not read.
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
    older = older_files(Path(path))
    raise CheckpointError(f"{path}: {why}" + (f"; an older one is {older[0]}" if older else ""))


def load_from(file: BufferedReader, kind: str, size: int, *, allow_trailing: bool = False) -> Any:
    """Return the tree that starts at the position of an open file, and advance the file past it.

    Args:
        file: to read.
        kind: what it must hold.
        size: the number of bytes from this position on.
        allow_trailing: whether other bytes may follow.

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
        found[entry.name] = raw, entry = _read_exactly(file, entry.num_bytes), entry
        checksum = zlib.crc32(raw.numpy().data, checksum)
    if b"%08x" % checksum != header[CHECKSUM]:
        raise CheckpointError("is altered: its checksum is another one")
    if metadata.get("version") != VERSION:
        told = f"has version {metadata.get('version')} of the format, and this version of the package reads {VERSION}"
        raise CheckpointError(told)
    if metadata.get("kind") != kind:
        raise CheckpointError(f"holds a {metadata.get('kind')}, expected a {kind}")

    def tensor(reference: Any) -> Tensor:
        name, device = reference if type(reference) is list else (reference, "cpu")
        raw, entry = found.pop(name)
        return raw.view(entry.dtype).reshape(entry.shape).to(_available_device(torch.device(device)))

    try:
        return decode(json.loads(metadata["tree"]), tensor)
    except Exception as error:  # The checksum is valid, so another program wrote the file.
        raise CheckpointError(f"was not written by this package: {error!r}") from None


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the values of a tensor as contiguous bytes: a copy only if they are not contiguous in CPU memory.

    Example:
        >>> tensor_bytes(torch.tensor([1, 2], dtype=torch.int16)).hex()
        '01000200'
    """
    line = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    # A tensor of at most one number is contiguous for any stride, but only stride 1 permits a view of its bytes.
    return line.as_strided(line.shape, (1,)).view(torch.uint8).numpy().data


def encode(
    tree: Any,
    tensor_ref: Callable[[Tensor, TreePath], Any],
    make_error: Callable[[str], Exception],
    *,
    is_bounded: bool = False,
) -> str:
    """Encode a tree, as of `save`, as JSON. A value that JSON does not have is an object whose key begins with `$`.

    Args:
        tree: the tree.
        tensor_ref: returns the reference to a tensor, given the tensor and its path in the tree.
        make_error: returns the exception to raise for a value of another type, given its message.
        is_bounded: reject trees that `decode` rejects from an untrusted source.

    Example:
        >>> encode({"m": [torch.ones(2), (3, math.inf)], "n": {1: b""}}, lambda tensor, path: len(tensor), ValueError)
        '{"m": [{"$tensor": 2}, {"$tuple": [3, {"$float": "inf"}]}], "n": {"$dict": [[1, {"$bytes": ""}]]}}'
    """
    encoder = _Encoder(tensor_ref, make_error, is_bounded)
    try:
        node = encoder.node(tree)
        if encoder.num_values <= MAX_BLOCKING_VALUES:
            return json.dumps(node)
        # `dumps` is faster, but blocks all other threads until it returns.
        return "".join(json.JSONEncoder().iterencode(node))
    except RecursionError:
        raise make_error("cannot be saved: it is nested too deeply, or contains itself") from None


@dataclass
class _Encoder:
    """Conversion of a tree to values that `json` writes."""

    tensor_ref: Callable[[Tensor, TreePath], Any]
    make_error: Callable[[str], Exception]
    is_bounded: bool
    path: list[str | int] = field(default_factory=list)
    num_values: int = 0

    def node(self, value: Any) -> Any:
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, int):
            return self._integer(value)
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$float": float.__repr__(value)}
        if isinstance(value, bytes):
            return {"$bytes": b64encode(value).decode()}
        if isinstance(value, Tensor):
            return {"$tensor": self._tensor(value)}
        kind = type(value)
        if kind is list or kind is tuple:
            items = [self._child(i, item) for i, item in enumerate(value)]
            return items if kind is list else {"$tuple": items}
        if kind is not dict:
            raise self._type_error(f"a {kind.__name__}")
        if all(type(key) is str and key[:1] != "$" for key in value):
            return {key: self._child(key, item) for key, item in value.items()}
        self._check_keys(value)
        return {"$dict": [[key, self._child(key, item)] for key, item in value.items()]}

    def _child(self, name: str | int, value: Any) -> Any:
        self.num_values += 1
        self.path.append(name)
        if self.is_bounded and len(self.path) > MAX_DEPTH:
            raise self.make_error(f"cannot be saved: it has more than {MAX_DEPTH} nested branches")
        node = self.node(value)
        self.path.pop()
        return node

    def _integer(self, value: int) -> int:
        try:
            int.__repr__(value)
        except ValueError:  # Python limits the number of digits that it converts.
            raise self._type_error("an integer of thousands of digits") from None
        return value

    def _check_keys(self, branches: dict[Any, Any]) -> None:
        numbers = [key for key in branches if not isinstance(key, str)]
        for key in numbers:
            if not isinstance(key, int) or isinstance(key, bool) or (self.is_bounded and abs(key) >= MAX_KEY):
                raise self._type_error(f"a dict with the key {key!r}")
            self._integer(key)
        if self.is_bounded and len(numbers) > MAX_INT_KEYS:
            raise self._type_error(f"a dict with more than {MAX_INT_KEYS} integers as keys")

    def _tensor(self, tensor: Tensor) -> Any:
        is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        if not is_plain or tensor.is_meta or tensor.is_quantized or tensor.is_nested or tensor.ndim > MAX_DIMENSIONS:
            raise self._type_error(f"a {type(tensor).__name__} that is not dense ({tensor.layout}, {tensor.device})")
        return self.tensor_ref(tensor, tuple(self.path))

    def _type_error(self, what: str) -> Exception:
        where = "".join(f"[{name!r}]" for name in self.path) or "the tree"
        return self.make_error(
            f"{where}: expected dicts (by strings or integers), lists, tuples, dense tensors, numbers, strings, bytes "
            f"or None; {what} cannot be saved"
        )


def decode(node: Any, load_tensor: Callable[[Any], Tensor], *, is_bounded: bool = False, depth: int = 0) -> Any:
    """Decode the tree of a parsed JSON value; an invalid value raises an exception.

    Args:
        node: the value that `json` has parsed.
        load_tensor: returns the tensor of a reference.
        is_bounded: reject deep nesting, and large or many integer keys, as an untrusted source may send.
        depth: of the node in the tree.
    """
    kind = type(node)
    if kind is not dict and kind is not list:
        return node
    if is_bounded and depth > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} nested branches")
    child = partial(decode, load_tensor=load_tensor, is_bounded=is_bounded, depth=depth + 1)
    if kind is list:
        return [child(item) for item in node]
    if not next(iter(node), "").startswith("$"):
        return {key: child(item) for key, item in node.items()}
    ((tag, content),) = node.items()
    if tag == "$tensor":
        return load_tensor(content)
    if tag == "$tuple":
        return tuple([child(item) for item in content])
    if tag == "$bytes":
        return b64decode(content, validate=True)
    if tag == "$float":
        # `math.nan` is one object, which is equal to itself in a tuple, as in receipts.
        return math.nan if math.isnan(float(content)) else float(content)
    if tag != "$dict" or not all(type(key) in (str, int) for key, _ in content):
        raise ValueError(f"an unknown tag {tag}, or an invalid key")
    if is_bounded:
        numbers = [key for key, _ in content if type(key) is int]
        if len(numbers) > MAX_INT_KEYS or not all(-MAX_KEY < key < MAX_KEY for key in numbers):
            raise ValueError(f"a dict with more than {MAX_INT_KEYS} integers as keys, or with larger ones")
    branches = {key: child(item) for key, item in content}
    if len(branches) < len(content):
        raise ValueError("a duplicate key")
    return branches


def unique_name(path: TreePath, used: Container[str]) -> str:
    """Return an unused name of an entry, for the tensor at a path."""
    name = "/".join(map(str, path))
    while name in used or name == "__metadata__":
        name += "'"
    return name


def make_header(entries: Sequence[TensorEntry], metadata: Mapping[str, str], *, is_bounded: bool = False) -> bytes:
    """Return the header of a file, after its length. The bytes of the entries follow it in their order.

    Raises:
        ValueError: if `is_bounded` and `parse_header` would reject the header from an untrusted source.
    """
    lines: dict[str, Any] = {}
    coded = {}
    begin = 0
    for entry in entries:
        shape, end = list(entry.shape), begin + entry.num_bytes
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
        _check_bounds(text)
    return with_length(text.encode())


def with_length(header: bytes) -> bytes:
    """Return a header prefixed with its length, and padded so that the bytes of tensors begin at a multiple of 8."""
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def parse_header(header: bytes | memoryview, *, is_bounded: bool = False) -> tuple[dict[str, str], list[TensorEntry]]:
    """Return the metadata of a header, and its entries in the order of their bytes.

    An invalid header raises an exception. The bytes of an entry begin where those of the entry before end, and their
    number is that of the dtype and the shape, unless they are compressed.

    Example:
        >>> header = make_header([TensorEntry("w", torch.complex64, [2], 16)], {"kind": "sums"})
        >>> parse_header(header[8:])[1]
        [TensorEntry(name='w', dtype=torch.complex64, shape=(2,), num_bytes=16, is_compressed=False, begin=0)]
    """
    lines = parse_json(str(header, "utf-8"), is_bounded=is_bounded)
    metadata = lines.pop("__metadata__")
    if metadata.get("format") != FORMAT or not all(type(text) is str for text in metadata.values()):
        raise ValueError("its metadata are not those of this package")
    coded = parse_json(metadata.get("coded", "{}"), is_bounded=is_bounded)
    entries = []
    position = 0
    for name, line in sorted(lines.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = line["data_offsets"]
        if len(line) != 3 or type(begin) is not int or type(end) is not int or begin > end:
            raise ValueError("an entry with other fields or a negative length")
        if begin != position:
            raise ValueError("its entries are not contiguous")
        entry = TensorEntry(name, DTYPES[line["dtype"]], parse_shape(line["shape"]), end - begin, begin=begin)
        _check_length(entry)
        if name in coded:
            dtype, shape, is_compressed = coded.pop(name)
            if entry.dtype is not torch.uint8 or type(is_compressed) is not bool:
                raise ValueError("an invalid encoding")
            entry = TensorEntry(name, _parse_dtype(dtype), parse_shape(shape), end - begin, is_compressed, begin)
            _check_length(entry)
        entries.append(entry)
        position = end
    if coded:
        raise ValueError("an encoding without an entry")
    return metadata, entries


def parse_json(text: str, *, is_bounded: bool = False) -> Any:
    """Return a JSON value without duplicate names and non-finite numbers; other text raises an exception."""
    if is_bounded:
        _check_bounds(text)
    return json.loads(text, object_pairs_hook=_reject_duplicate_names, parse_constant=_reject_constant)


def _reject_duplicate_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a duplicate name")
    return found


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _check_bounds(text: str) -> None:
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of more than {MAX_HEADER_BYTES} bytes")
    if sum(map(text.count, "[{,")) > MAX_HEADER_VALUES:
        raise ValueError(f"a header of more than {MAX_HEADER_VALUES} values")


def _check_length(entry: TensorEntry) -> None:
    if not entry.is_compressed and entry.memory != entry.num_bytes:
        raise ValueError("an entry whose shape is not that of its bytes")


def parse_shape(shape: Any) -> tuple[int, ...]:
    """Return a shape in JSON as a tuple; an invalid shape raises a `ValueError`."""
    if type(shape) is list and len(shape) <= MAX_DIMENSIONS and all(type(n) is int and 0 <= n < 2**62 for n in shape):
        return tuple(shape)
    raise ValueError("an invalid shape")


def _parse_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    # The dtypes of quantised tensors begin with q.
    if not isinstance(dtype, torch.dtype) or str(dtype).startswith("torch.q"):
        raise ValueError(f"unknown dtype {name}")
    return dtype


def _serialize(kind: str, tree: Any) -> Iterator[memoryview]:
    """Yield the parts of a file with a blank checksum."""
    tensors: dict[str, Tensor] = {}

    def add(tensor: Tensor, path: TreePath) -> Any:
        name = unique_name(path, tensors)
        tensors[name] = tensor
        return name if tensor.device.type == "cpu" else [name, str(tensor.device)]

    text = encode(tree, add, CheckpointError)
    metadata = {"checksum": BLANK_CHECKSUM.decode(), "kind": kind, "tree": text}
    listed = [TensorEntry(name, x.dtype, x.shape, x.numel() * x.itemsize) for name, x in tensors.items()]
    # Readers require that an entry begins at a multiple of the size of its numbers.
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


def _read_exactly(file: BufferedReader, count: int) -> Tensor:
    """Read exactly this number of bytes into new memory."""
    data = torch.empty(max(count, 0), dtype=torch.uint8, device="cpu")
    if file.readinto(data.numpy().data) != count:
        raise CheckpointError("is altered: it ends before its header says")
    return data


def _available_device(device: torch.device) -> torch.device:
    """Return the device if it is available, else the CPU."""
    kind = getattr(torch, device.type, None)
    there = kind is not None and kind.is_available() and (device.index or 0) < kind.device_count()
    return device if there else torch.device("cpu")
