"""Serialization of the values that a server and its clients exchange: messages, payloads, tickets and receipts.

The bytes have the format of a [tensor file][manifoldagg.tensor_file] without a checksum. If the caller of `pack` passes
a `spec`, the tensors have the parameter names of the model, such as `start/0.weight`, `points/0/0.weight` and
`buffers/1.running_mean`. The metadata then contain a digest of the model layout. They also contain the identifier of
the ticket, if there is one.

The function `unpack` is safe for untrusted data:

- No code is executed.
- Invalid bytes raise a [`WireError`][manifoldagg.errors.WireError].
- All sizes are checked before a tensor is allocated. A tensor is at most `MAX_COMPRESSION_RATIO` times as large as its
  serialized bytes.

By default, `pack` preserves each bit of a tensor. The sign and the payload bits of a NaN outside of tensors are lost,
for example in `numbers`, `client_state` or a receipt.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manifoldagg import tensor_file
from manifoldagg._compression import MAX_COMPRESSION_RATIO, compress_planes, decompress_planes, round_to_grid
from manifoldagg._json_tree import decode, encode, parse_json
from manifoldagg._validation import check_choice, check_number
from manifoldagg.errors import ArgumentError, WireError
from manifoldagg.federated.server.validation import require_dense
from manifoldagg.federated.types import Message, Payload, Receipt, Ticket
from manifoldagg.kernels.alloc import in_huge_pages
from manifoldagg.manifolds import Layout, ParameterSpace
from manifoldagg.manifolds.spec import layout_digest
from manifoldagg.manifolds.wrapper_prefixes import wrapper_hint

__all__ = ["MAX_COMPRESSION_RATIO", "pack", "ticket_of", "unpack"]

MIN_COMPRESSED_BYTES = 512
"""The size in bytes below which a tensor is not compressed."""
KINDS: dict[str, type] = {kind.__name__.lower(): kind for kind in (Message, Payload, Receipt, Ticket)}
Spec = ParameterSpace | Mapping[str, Any]
SPLIT_FIELDS = ("start", "points", "base")
"""The fields that contain models. With a `spec`, each model is stored as one tensor per parameter."""


def pack(
    value: Message | Payload | Receipt | Ticket,
    *,
    spec: Spec | None = None,
    ticket: str | Ticket | None = None,
    compress: bool = False,
    error: float = 0.0,
) -> bytes:
    r"""Serialize a message, a payload, a receipt or a ticket to bytes.

    The server sends a message to a client, the client returns a payload, and the server replies with a receipt. A
    ticket contains a message and permits the client to return one payload.

    - By default, tensors keep their dtype and every bit of their values. The option `error` permits rounding.
    - The option `spec` describes the parameters of the model. With this option, a model is serialized as one named
      tensor for each parameter, and not as a single vector. The description itself is not serialized.
    - A ticket already contains this description, so it needs no `spec`.

    Args:
        value: the value to serialize.
        spec: the result of the server's `spec()`, or the space of the server.
        ticket: the ticket that the value belongs to, or its identifier. The receiver can read the identifier with
            [`ticket_of`][manifoldagg.wire.ticket_of].
        compress: whether to compress tensors losslessly with zstandard (`pip install 'manifoldagg[wire]'`).
        error: the largest rounding error of each number in the `points` and `tensors` of a payload,
            $|\hat x_i - x_i| \le$ `error`. Numbers are rounded to multiples of the largest power of two that satisfies
            this bound, and then compressed. Non-finite numbers are not rounded, nor are parameters in `points` that lie
            on a curved manifold.

    Raises:
        ArgumentError: if an argument is invalid. For a message, `error` must be 0, because the client would otherwise
            start from a different model than the server's base.
        WireError: if the value contains an object that cannot be serialized.

    Cost: one pass that reads the tensors and writes the bytes. Compression takes additional time.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> space = ParameterSpace.of(model)
        >>> data = pack(Payload(space.point(model)[None], samples=10, numbers={"loss": 0.5}), spec=space.spec())
        >>> import safetensors.torch
        >>> sorted(safetensors.torch.load(data))
        ['points/0/bias', 'points/0/weight']
        >>> payload = unpack(data)
        >>> payload.points.shape, payload.samples, payload.numbers
        (torch.Size([1, 4]), 10, {'loss': 0.5})
    """
    kind = type(value).__name__.lower()
    if KINDS.get(kind) is not type(value):
        raise ArgumentError(f"value: expected a Message, Payload, Receipt or Ticket, got {type(value).__name__}")
    if spec is None and isinstance(value, Ticket) and isinstance(value.space, ParameterSpace):
        spec = value.space
    space = None if spec is None else _as_space(spec)
    check_choice("compress", compress, (True, False))
    check_number("error", error, at_least=0)
    if error and not isinstance(value, Payload):
        raise ArgumentError(f"error: expected 0 for a {type(value).__name__}: only payloads are rounded")
    if not isinstance(ticket, str | Ticket | None):
        raise ArgumentError(f"ticket: expected a Ticket or the id of a ticket, got {type(ticket).__name__}")
    writer = _TensorWriter(space.layout if space else None)
    text = encode(_to_fields(kind, value), writer.add_tensor, _wire_error, is_bounded=True)
    metadata = {"kind": kind, "tree": text}
    told = value if isinstance(value, Ticket) else ticket
    if told is not None:
        metadata["ticket"] = told.id if isinstance(told, Ticket) else told
    if space:
        metadata["layout"] = layout_digest(space.layout, space.adapters)
        if writer.has_leaf_names:
            metadata["leaves"] = json.dumps([leaf.name for leaf in space.layout.leaves])
    curved = {name for name, _ in space.manifolds} if space else set()
    parts = [
        _encode_tensor(name, leaf, tensor, compress, error, curved) for name, (leaf, tensor) in writer.tensors.items()
    ]
    # Safetensors readers require that each tensor begins at a multiple of its item size.
    parts.sort(key=lambda part: -part[0].stored_dtype.itemsize)
    try:
        head = tensor_file.make_header([entry for entry, _ in parts], metadata, is_bounded=True)
    except ValueError as reason:
        raise _wire_error(str(reason)) from None
    return b"".join([head, *(data for _, data in parts)])


def unpack(data: bytes | bytearray | memoryview, *, spec: Spec | None = None) -> Any:
    """Deserialize a message, a payload, a receipt or a ticket. All tensors are on the CPU.

    Args:
        data: the bytes.
        spec: the result of the server's `spec()`, or the space of the server. The function checks that the bytes match
            this space. A returned ticket stores the space, because its method `state_dict` requires it.

    Raises:
        WireError: if the bytes were not returned by `pack`, have another format version, or do not match the space.
        ArgumentError: if `data` or `spec` has an invalid type.

    Cost: one pass over the tensors. Each tensor is allocated separately.

    Example:
        >>> unpack(pack(Receipt(True, "", version=3))).version
        3
        >>> unpack(b"not a packed value")
        Traceback (most recent call last):
            ...
        manifoldagg.errors.WireError: wire: expected the result of `pack`: the header is longer than the data
    """
    space = None if spec is None else _as_space(spec)
    view = _as_byte_view(data)
    with _as_wire_errors():
        reader = _TensorReader(view, space)
        content = decode(reader.json_value("tree"), reader.read_tensor, is_bounded=True)
        if reader.unread_entries:
            raise ValueError("unreferenced entries")
        return _from_fields(reader.kind, content, space)


def ticket_of(data: bytes | bytearray | memoryview) -> str | None:
    """Return the ticket identifier that the result of `pack` contains, or `None` if it contains none.

    The function reads only the header of the bytes, not the tensors.

    Args:
        data: the result of `pack`.

    Raises:
        WireError: if the header is invalid.

    Example:
        >>> ticket_of(pack(Receipt(True, "", version=3), ticket="7f0c"))
        '7f0c'
    """
    view = _as_byte_view(data)
    with _as_wire_errors():
        return _TensorReader(view).metadata.get("ticket")


class _TensorWriter:
    """A collection of the tensors in a value that `pack` serializes. Each tensor has a unique name."""

    def __init__(self, layout: Layout | None) -> None:
        self._layout = layout
        self.tensors: dict[str, tuple[str | None, Tensor]] = {}
        self.has_leaf_names = False

    def add_tensor(self, tensor: Tensor, path: tuple[str | int, ...]) -> Any:
        """Add a tensor, and return the reference to store in the metadata."""
        field = str(path[0])
        name = tensor_file.unique_name(path, self.tensors)
        try:
            require_dense(name, tensor)
        except ArgumentError as error:
            raise _wire_error(str(error)) from None
        if self._layout is None or field not in SPLIT_FIELDS:
            self.tensors[name] = None, tensor
            return name
        size = self._layout.size
        rows = tensor[None] if field != "points" else tensor
        got = f"got {tuple(tensor.shape)}"
        if rows.ndim != 2 or rows.shape[1] != size or not self._layout.leaves:
            raise ArgumentError(f"{field}: expected points of {size} numbers because of `spec`, {got}")
        if not len(rows):
            raise ArgumentError(f"{field}: expected at least one point, {got}")
        for i, row in enumerate(rows.detach()):
            before = f"points/{i}" if field == "points" else field
            for leaf, piece in zip(self._layout.leaves, row.split(self._layout.sizes), strict=True):
                self.tensors[f"{before}/{leaf.name}"] = leaf.name, piece.view(leaf.shape)
        self.has_leaf_names = True
        return [field, list(tensor.shape)]


class _TensorReader:
    """Reader of the tensors in a message that `pack` has serialized to bytes.

    The constructor validates the complete header of the bytes before any tensor is allocated.
    """

    def __init__(self, view: memoryview, space: ParameterSpace | None = None) -> None:
        length = int.from_bytes(view[:8], "little")
        if len(view) < 8 or length > len(view) - 8:
            raise ValueError("the header is longer than the data")
        self.metadata, entries = tensor_file.parse_header(view[8 : 8 + length], is_bounded=True)
        if self.metadata["version"] != tensor_file.VERSION:
            found = self.metadata["version"][:20]
            raise _wire_error(f"expected format version {tensor_file.VERSION!r}, got {found!r}")
        self.kind = self.metadata["kind"]
        self._body = np.frombuffer(view, np.uint8)[8 + length :]
        if sum(entry.num_bytes for entry in entries) != len(self._body):
            raise ValueError("the entries do not cover the data after the header")
        if any(entry.memory > MAX_COMPRESSION_RATIO * entry.num_bytes for entry in entries):
            raise _wire_error(f"expected tensors at most {MAX_COMPRESSION_RATIO} times as large as their bytes")
        self.unread_entries = {entry.name: entry for entry in entries}
        self.leaves: list[str] = self.json_value("leaves") if "leaves" in self.metadata else []
        if type(self.leaves) is not list or len(set(self.leaves)) < len(self.leaves):
            raise ValueError("invalid leaves")
        self._layout = space.layout if space else None
        if space:
            _check_layout(self.metadata.get("layout"), self.leaves, space)

    def json_value(self, name: str) -> Any:
        return parse_json(self.metadata[name], is_bounded=True)

    def read_tensor(self, reference: Any) -> Tensor:
        """Read the tensor of a reference. A model is assembled from the tensors of its parameters."""
        if isinstance(reference, str):
            entry = self.unread_entries.pop(reference)
            return self._assemble([entry], entry.shape)
        field, shape = reference
        sizes = tensor_file.parse_shape(shape)
        count = sizes[0] if field == "points" else 1
        # Each point must have at least one entry. Otherwise, a small file could request a huge number of points.
        if field not in SPLIT_FIELDS or not self.leaves or count * len(self.leaves) > len(self.unread_entries):
            raise ValueError("points without entries")
        before = [f"points/{i}" for i in range(count)] if field == "points" else [field]
        rows = [self.unread_entries.pop(f"{row}/{leaf}") for row in before for leaf in self.leaves]
        if self._layout and [entry.shape for entry in rows] != count * [leaf.shape for leaf in self._layout.leaves]:
            raise _wire_error("layout: expected the shapes of the tensors as in `spec`")
        size = sum(math.prod(entry.shape) for entry in rows)
        if len({entry.dtype for entry in rows}) != 1 or math.prod(sizes) != size:
            raise ValueError("the shape of the points does not match their entries")
        return self._assemble(rows, sizes)

    def _assemble(self, rows: list[tensor_file.TensorEntry], shape: Sequence[int]) -> Tensor:
        raw = in_huge_pages(torch.empty(sum(entry.memory for entry in rows), dtype=torch.uint8, device="cpu"))
        place = raw.numpy()
        start = 0
        for entry in rows:
            stored = self._body[entry.begin : entry.begin + entry.num_bytes]
            if entry.is_compressed:
                decompress_planes(stored, place[start : start + entry.memory], entry.dtype.itemsize)
            else:
                place[start : start + entry.memory] = stored
            start += entry.memory
        if rows[0].dtype is torch.bool and place.max(initial=0) > 1:
            raise ValueError("an invalid boolean")
        return raw.view(rows[0].dtype).reshape(shape)


def _encode_tensor(
    name: str, leaf: str | None, tensor: Tensor, compress: bool, error: float, curved: set[str]
) -> tuple[tensor_file.TensorEntry, Any]:
    if error and leaf not in curved and name.partition("/")[0] in ("points", "tensors"):
        tensor = round_to_grid(tensor.detach(), error)
    data: Any = tensor_file.tensor_bytes(tensor)
    is_compressed = False
    if (compress or error) and data.nbytes >= MIN_COMPRESSED_BYTES:
        smaller = compress_planes(data, tensor.dtype.itemsize)
        is_compressed = len(smaller) < data.nbytes
        data = smaller if is_compressed else data
    return tensor_file.TensorEntry(name, tensor.dtype, tensor.shape, len(data), is_compressed), data


def _to_fields(kind: str, value: Message | Payload | Receipt | Ticket) -> dict[str, Any]:
    source = value.message if isinstance(value, Ticket) else value
    found = {field.name: getattr(source, field.name) for field in fields(source)}
    if isinstance(value, Ticket):
        found |= {"id": value.id, "start_version": value.version}
    found = {name: part if name == "client_state" else _to_builtin(part) for name, part in found.items()}
    try:
        return _check_fields(kind, found)
    except ValueError as error:
        raise _wire_error(str(error)) from None


def _to_builtin(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {name: _to_builtin(part) for name, part in value.items()}
    return tuple(value) if isinstance(value, list) else value


def _from_fields(kind: str, content: Any, space: ParameterSpace | None) -> Any:
    made = _check_fields(kind, content)
    for name in SPLIT_FIELDS:
        given = made.get(name)
        if given is None:
            continue
        if given.ndim < 1 + (name == "points") or (space is not None and given.shape[-1] != space.layout.size):
            raise _wire_error(f"{name}: expected points of the space, got shape {tuple(given.shape)}")
    if kind == "payload" and made["base"] is not None and made["base"].shape != made["points"].shape[1:]:
        raise _wire_error("base: expected the shape of a point")
    if kind == "ticket":
        return Ticket(made.pop("id"), made.pop("start_version"), Message(**made), space)
    return KINDS[kind](**made)


def _check_fields(kind: str, content: Any) -> dict[str, Any]:
    expected = FIELDS[kind]
    if type(content) is not dict or content.keys() != expected.keys():
        raise ValueError(f"expected the fields of a {kind}")
    for name, fits in expected.items():
        value = content[name]
        if not (type(value) is fits if isinstance(fits, type) else fits(value)):
            raise ValueError(f"{name}: expected another type")
    return content


def _is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _is_number(x: Any) -> bool:
    return type(x) in (int, float)


def _is_dict_of(predicate: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: type(x) is dict and all(type(name) is str and predicate(part) for name, part in x.items())


_is_tensor_dict = _is_dict_of(lambda x: isinstance(x, Tensor))
EXTRA_FIELDS = {"tensors": _is_tensor_dict, "numbers": _is_dict_of(_is_number), "buffers": _is_tensor_dict}
MESSAGE_FIELDS = {
    "start": _is_floating,
    "requested_buffers": lambda x: type(x) is tuple and all(type(name) is str for name in x),
    "version": lambda x: x is None or (type(x) is int and x >= 0),
}
PAYLOAD_FIELDS = {"points": _is_floating, "base": lambda x: x is None or _is_floating(x), "samples": int}
RECEIPT_FIELDS = {"accepted": bool, "reason": str, "version": int, "staleness": int, "buffered": bool, "clipped": bool}
FIELDS: dict[str, dict[str, Any]] = {
    "message": {**MESSAGE_FIELDS, **EXTRA_FIELDS},
    "payload": {**PAYLOAD_FIELDS, **EXTRA_FIELDS, "client_state": lambda x: True},
    "receipt": {**RECEIPT_FIELDS, **dict.fromkeys(("weight", "cosine", "step", "norm"), _is_number)},
    "ticket": {**MESSAGE_FIELDS, **EXTRA_FIELDS, "id": str, "start_version": int},
}
"""The fields of each kind of value. Each field has the required type, or a predicate that a valid value satisfies."""


def _check_layout(digest: str | None, leaves: list[str], space: ParameterSpace) -> None:
    """Check that the names and the layout digest in the metadata match the space."""
    names = [leaf.name for leaf in space.layout.leaves]
    if leaves and leaves != names:
        raise _wire_error(f"layout: expected the names of the tensors as in `spec`{wrapper_hint(leaves, names)}")
    if digest is not None and digest != layout_digest(space.layout, space.adapters):
        raise _wire_error("layout: expected names, shapes, dtypes and order of the tensors as in `spec`")


def _wire_error(reason: str) -> WireError:
    return WireError(f"wire: {reason}")


def _as_space(spec: Spec) -> ParameterSpace:
    return spec if isinstance(spec, ParameterSpace) else ParameterSpace.of_spec(spec)


def _as_byte_view(data: Any) -> memoryview:
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ArgumentError(f"data: expected bytes, got {type(data).__name__}")
    try:
        view = memoryview(data)
    except ValueError:
        raise ArgumentError("data: expected bytes, got a memoryview that was released") from None
    try:
        return view.cast("B")
    except (TypeError, ValueError):  # The memory is not contiguous, or its format has another byte order.
        return memoryview(view.tobytes())


@contextmanager
def _as_wire_errors() -> Iterator[None]:
    """Convert any exception that the `with` block raises to a `WireError` with a short one-line message."""
    try:
        yield
    except WireError:
        raise
    except Exception as error:
        text = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise _wire_error(f"expected the result of `pack`: {repr(text[:200])[1:-1]}") from None
