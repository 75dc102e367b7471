"""The wire: what servers and clients send each other, as bytes, and back.

The bytes are those of a safetensors file. Its entries are the tensors, under the names of the model where a `spec`
tells them (`start/0.weight`, `points/0/0.weight`, `buffers/1.running_mean`); its metadata are JSON: the version of this
format, what kind of value it is, its ticket, a digest of the model's layout, and all that is no tensor. Nothing in it
is ever executed. Whatever other bytes come, `unpack` raises a [`WireError`][manifoldagg.errors.WireError]: all sizes
agree before a tensor is made, and what comes of bytes is at most `RATIO` times as large.

A NaN that is no entry of a tensor, as in `numbers`, in `memory` or in a receipt, is one NaN: its sign and further bits
do not travel.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manifoldagg._validation import check_choice, check_number
from manifoldagg.errors import ArgumentError, WireError
from manifoldagg.federated.server.durability.raw_io import bytes_of
from manifoldagg.federated.server.durability.tree_codec import KNOWN, decoded, dtype_of, encoded, entries, framed, spans
from manifoldagg.federated.server.validation import stored
from manifoldagg.federated.types import Message, Payload, Receipt, Ticket
from manifoldagg.kernels.alloc import in_huge_pages
from manifoldagg.manifolds import Layout, ParameterSpace
from manifoldagg.manifolds.spec import layout_digest
from manifoldagg.manifolds.wrapper_prefixes import wrapper_hint

__all__ = ["RATIO", "pack", "ticket_of", "unpack"]

FORMAT = "manifoldagg"
VERSION = "1"
LONGEST = 2**24
"""Bytes of a header."""
MOST = 2**20
"""Brackets and commas in it: how many values it can have."""
RATIO = 100
"""So many times smaller a tensor may be on the wire than in memory, and no more: what is smaller is filled up."""
SMALL = 512
"""Bytes of a tensor below which nothing is compressed."""
PIECE = 2**20
"""Bytes that are decompressed at a time."""
WINDOW = 2**23
"""Bytes that a decompressor may look back, which it keeps beside them."""
AXES = 32
LEVEL = 1
"""Of zstandard: higher ones take longer and save no more on weights."""
KINDS: dict[str, type] = {kind.__name__.lower(): kind for kind in (Message, Payload, Receipt, Ticket)}
Spec = ParameterSpace | Mapping[str, Any]
SPLIT = ("start", "points", "base")
"""Fields that travel under the names of the model."""


def pack(
    value: Message | Payload | Receipt | Ticket,
    *,
    spec: Spec | None = None,
    ticket: str | Ticket | None = None,
    compress: bool = False,
    error: float = 0.0,
) -> bytes:
    r"""The bytes of a value.

    Every field travels bit for bit, in its own dtype; `space` of a ticket does not. Among plain numbers there is one
    NaN. Names are those of the model where `spec` is given; a ticket brings its own.

    Args:
        value: to send.
        spec: what `spec()` of the server returns, or its space.
        ticket: which the value answers; see [`ticket_of`][manifoldagg.wire.ticket_of].
        compress: without loss, by zstandard (`pip install 'manifoldagg[wire]'`), the bytes of numbers sorted by their
            weight.
        error: how far each number of `points` and `tensors` of a payload may move, $|\hat x_i - x_i| \le$ `error`: they
            go to the nearest multiple of the largest power of two that keeps to this, and are compressed. What is not
            finite stays as it is, and so do leaves of `points` that `spec` tells to be curved; `tensors` have none. All
            else travels without loss.

    Raises:
        ArgumentError: naming the argument that does not fit. A message is not rounded: its client would start elsewhere
            than the server has it.
        WireError: naming what of the value cannot travel.

    Cost: one pass over the tensors, which reads them and writes the bytes; with `compress`, more.

    Example:
        >>> from manifoldagg.federated import Payload
        >>> model = torch.nn.Linear(3, 1)
        >>> space = ParameterSpace.of(model)
        >>> data = pack(Payload(space.point(model)[None], samples=10, numbers={"loss": 0.5}), spec=space.spec())
        >>> import safetensors.torch
        >>> {name: tuple(x.shape) for name, x in sorted(safetensors.torch.load(data).items())}
        {'points/0/bias': (1,), 'points/0/weight': (1, 3)}
        >>> payload = unpack(data)
        >>> payload.points.shape, payload.samples, payload.numbers
        (torch.Size([1, 4]), 10, {'loss': 0.5})
    """
    kind = type(value).__name__.lower()
    if KINDS.get(kind) is not type(value) or not isinstance(value, Message | Payload | Receipt | Ticket):
        raise ArgumentError(f"value: expected a Message, Payload, Receipt or Ticket, got {type(value).__name__}")
    if spec is None and isinstance(value, Ticket) and isinstance(value.space, ParameterSpace):
        spec = value.space
    space = None if spec is None else _space(spec)
    check_choice("compress", compress, (True, False))
    check_number("error", error, at_least=0)
    if error and not isinstance(value, Payload):
        raise ArgumentError(f"error: expected 0 for a {type(value).__name__}: only payloads are rounded")
    if not isinstance(ticket, str | Ticket | None):
        raise ArgumentError(f"ticket: expected one, or its id, got {type(ticket).__name__}")
    writer = _Writer(space.layout if space else None)
    text = encoded(_fields(value), writer.place, _refusal, bounded=True)
    metadata = {"format": FORMAT, "version": VERSION, "kind": kind, "value": text}
    told = value if isinstance(value, Ticket) else ticket
    if told is not None:
        metadata["ticket"] = told.id if isinstance(told, Ticket) else told
    if space:
        metadata["layout"] = layout_digest(space.layout, space.adapters)
        if writer.named:
            metadata["leaves"] = json.dumps([leaf.name for leaf in space.layout.leaves])
    curved = {name for name, _ in space.manifolds} if space else set()
    parts = [_part(name, leaf, tensor, compress, error, curved) for name, leaf, tensor in writer.found]
    coded = {part.name: part.code for part in parts if part.code}
    if coded:
        metadata["coded"] = json.dumps(coded)
    # Readers want each entry to begin at a multiple of the size of its numbers.
    parts.sort(key=lambda part: -part.dtype.itemsize)
    listed = entries((part.name, part.dtype, part.shape, len(part.data)) for part in parts)
    head = framed(f'{{"__metadata__":{json.dumps(metadata)}{"," if listed else ""}{listed}}}')
    _check_size(head[8:], _refusal)
    return b"".join([head, *(part.data for part in parts)])


def unpack(data: bytes | bytearray | memoryview, *, spec: Spec | None = None) -> Any:
    """The value that was packed: a message, a payload, a receipt or a ticket, its tensors on the CPU.

    Args:
        data: whatever came.
        spec: of the space in which it must be; a ticket gets this space, for its `state_dict`.

    Raises:
        WireError: if it is not what `pack` returned, was made by a newer version, or is not of this space.
        ArgumentError: if `data` are no bytes, or `spec` is none.

    Cost: one pass over the tensors, each of which gets memory of its own.

    Example:
        >>> unpack(pack(Receipt(True, "", version=3))).version
        3
        >>> unpack(b"of my own making")
        Traceback (most recent call last):
            ...
        manifoldagg.errors.WireError: wire: expected what `pack` returns: its header is longer than all of it
    """
    space = None if spec is None else _space(spec)
    view = _view(data)
    try:
        reader = _Reader(view, space)
        content = decoded(reader.text("value"), reader.tensor, bounded=True)
        if reader.left:
            raise ValueError("it has entries that nothing names")
        return _value(reader.kind, content, space)
    except WireError:
        raise
    except Exception as error:
        raise WireError(f"wire: expected what `pack` returns: {_short(error)}") from None


def ticket_of(data: bytes | bytearray | memoryview) -> str | None:
    """The id of the ticket that bytes were packed with, `None` where there is none; nothing but the header is read.

    Raises:
        WireError: if the header is none.

    Example:
        >>> ticket_of(pack(Receipt(True, "", version=3), ticket="7f0c"))
        '7f0c'
    """
    view = _view(data)
    try:
        return _Reader(view).metadata.get("ticket")
    except WireError:
        raise
    except Exception as error:
        raise WireError(f"wire: expected what `pack` returns: {_short(error)}") from None


@dataclass(frozen=True)
class _Part:
    """An entry: what the header says, its bytes, and what they are where they are not simply the numbers."""

    name: str
    dtype: torch.dtype
    shape: Sequence[int]
    data: Any
    code: list[Any] | None = None


class _Writer:
    """Finds names for the tensors of a value, and those of the model for its leaves."""

    def __init__(self, layout: Layout | None) -> None:
        self._layout = layout
        self._used: set[str] = set()
        self.found: list[tuple[str, str | None, Tensor]] = []
        self.named = False

    def place(self, tensor: Tensor, way: tuple[str | int, ...]) -> Any:
        """What stands for a tensor in the text."""
        field = str(way[0])
        _check_stored("/".join(map(str, way)), tensor)
        if self._layout is None or field not in SPLIT:
            name = "/".join(map(str, way))
            while name in self._used:
                name += "'"
            self._add(name, None, tensor)
            return name
        size = self._layout.size
        rows = tensor[None] if field != "points" else tensor
        if rows.ndim != 2 or rows.shape[1] != size or not self._layout.leaves:
            raise ArgumentError(f"{field}: expected points of {size} numbers, as `spec` says, got {_shape(tensor)}")
        if not len(rows):
            raise ArgumentError(f"{field}: expected one or more, got {_shape(tensor)}")
        for i, row in enumerate(rows.detach()):
            before = f"points/{i}" if field == "points" else field
            for leaf, piece in zip(self._layout.leaves, row.split(self._layout.sizes), strict=True):
                self._add(f"{before}/{leaf.name}", leaf.name, piece.view(leaf.shape))
        self.named = True
        return [field, list(tensor.shape)]

    def _add(self, name: str, leaf: str | None, tensor: Tensor) -> None:
        self._used.add(name)
        self.found.append((name, leaf, tensor))


class _Reader:
    """Reads a header, all of which is checked before anything is made of it, and tensors where it says."""

    def __init__(self, view: memoryview, space: ParameterSpace | None = None) -> None:
        length = int.from_bytes(view[:8], "little")
        if len(view) < 8 or length > len(view) - 8:
            raise ValueError("its header is longer than all of it")
        if length > LONGEST:
            raise ValueError(f"a header of more than {LONGEST} bytes")
        head = bytes(view[8 : 8 + length])
        _check_size(head, ValueError)
        lines = _json(head.decode())
        self.metadata: dict[str, str] = lines.pop("__metadata__")
        if self.metadata.get("format") != FORMAT or not all(type(text) is str for text in self.metadata.values()):
            raise ValueError("its metadata are not those of this package")
        if self.metadata["version"] != VERSION:
            told = f"is of version {self.metadata['version'][:20]!r}, and this package reads {VERSION}"
            raise WireError(f"wire: {told}")
        self.kind = self.metadata["kind"]
        self._body = np.frombuffer(view, np.uint8)[8 + length :]
        self.left = {name: _Entry(line) for name, line in lines.items()}
        follow = spans(lines)
        if (follow[-1][1] if follow else 0) != len(self._body):
            raise ValueError("its entries are not all that follows the header")
        coded = self.text("coded") if "coded" in self.metadata else {}
        for name, code in coded.items():
            self.left[name].decode(code)
        self.leaves: list[str] = self.text("leaves") if "leaves" in self.metadata else []
        if type(self.leaves) is not list or len(set(self.leaves)) < len(self.leaves):
            raise ValueError("leaves that are none")
        self._layout = space.layout if space else None
        if space:
            _check_layout(self.metadata.get("layout"), self.leaves, space)

    def text(self, name: str) -> Any:
        """What the metadata have under a name, as JSON."""
        found = self.metadata[name]
        # Here as well: in the header they may be written as escapes.
        _check_values(found, ValueError)
        return _json(found)

    def tensor(self, place: Any) -> Tensor:
        """The tensor that a text names, or the points whose leaves have names."""
        if isinstance(place, str):
            entry = self.left.pop(place)
            return self._made([entry], entry.shape)
        field, shape = place
        sizes = _sizes(shape)
        count = sizes[0] if field == "points" else 1
        # Without names of leaves any count of points would have its entries.
        if field not in SPLIT or not self.leaves or count * len(self.leaves) > len(self.left):
            raise ValueError("points of which there are no entries")
        before = [f"points/{i}" for i in range(count)] if field == "points" else [field]
        rows = [self.left.pop(f"{row}/{leaf}") for row in before for leaf in self.leaves]
        if self._layout and [entry.shape for entry in rows] != count * [leaf.shape for leaf in self._layout.leaves]:
            raise WireError("wire: layout: expected the shapes of the tensors as in `spec`")
        if len({entry.dtype for entry in rows}) != 1 or math.prod(sizes) != sum(entry.size for entry in rows):
            raise ValueError("points that are not what their entries hold")
        return self._made(rows, sizes)

    def _made(self, rows: list["_Entry"], shape: tuple[int, ...]) -> Tensor:
        """A tensor of these entries, one after another."""
        raw = in_huge_pages(torch.empty(sum(entry.nbytes for entry in rows), dtype=torch.uint8, device="cpu"))
        place = raw.numpy()
        start = 0
        for entry in rows:
            came = self._body[entry.begin : entry.end]
            if entry.compressed:
                _expand(came, place[start : start + entry.nbytes], entry.dtype.itemsize)
            else:
                place[start : start + entry.nbytes] = came
            start += entry.nbytes
        if rows[0].dtype is torch.bool and place.max(initial=0) > 1:
            raise ValueError("a truth value that is neither")
        return raw.view(rows[0].dtype).reshape(shape)


class _Entry:
    """A line of the header."""

    def __init__(self, line: Mapping[str, Any]) -> None:
        if set(line) != {"dtype", "shape", "data_offsets"}:
            raise ValueError("a line with other fields")
        self.dtype = BY_NAME[line["dtype"]]
        self.shape = _sizes(line["shape"])
        self.begin, self.end = line["data_offsets"]
        if type(self.begin) is not int or type(self.end) is not int or not 0 <= self.begin <= self.end:
            raise ValueError("an entry that ends before it begins")
        self.compressed = False
        self._check(self.end - self.begin)

    @property
    def size(self) -> int:
        """How many numbers."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes they take in memory."""
        return self.size * self.dtype.itemsize

    def decode(self, code: Any) -> None:
        """Take the bytes for numbers of another dtype, perhaps compressed."""
        name, shape, self.compressed = code
        if self.dtype is not torch.uint8 or type(self.compressed) is not bool:
            raise ValueError("a code that is none")
        self.dtype = dtype_of(name)
        self.shape = _sizes(shape)
        length = self.end - self.begin
        if not self.compressed:
            self._check(length)
        elif self.nbytes > RATIO * length:
            raise WireError(f"wire: expected tensors at most {RATIO} times as large as what came of them")

    def _check(self, length: int) -> None:
        if self.nbytes != length:
            raise ValueError("an entry whose shape is not that of its bytes")


BY_NAME = {name: dtype for dtype, name in KNOWN.items()}


def _part(name: str, leaf: str | None, tensor: Tensor, compress: bool, error: float, curved: set[str]) -> _Part:
    """An entry of the bytes, rounded and compressed where that is asked for."""
    shape = list(tensor.shape)
    if error and leaf not in curved and name.partition("/")[0] in ("points", "tensors"):
        tensor = _rounded(tensor.detach(), error)
    data = bytes_of(tensor)
    told = [str(tensor.dtype).removeprefix("torch."), shape]
    if (compress or error) and data.nbytes >= SMALL:
        smaller = _compressed(data, tensor.dtype.itemsize)
        if len(smaller) < data.nbytes:
            return _Part(name, torch.uint8, [len(smaller)], smaller, [*told, True])
    if tensor.dtype not in KNOWN:
        return _Part(name, torch.uint8, [data.nbytes], data, [*told, False])
    return _Part(name, tensor.dtype, shape, data)


def _rounded(x: Tensor, error: float) -> Tensor:
    """The nearest multiples of a power of two: exact in floating numbers, so that the bound is kept to the last bit."""
    if not x.is_floating_point() or x.itemsize == 1:
        return x
    step = math.ldexp(1.0, math.frexp(2 * error)[1] - 1) if error < 2.0**1000 else 2.0**1000
    wide = x if x.itemsize > 2 else x.float()
    near = (wide / step).round_().mul_(step).to(x.dtype)
    return torch.where(near.isfinite(), near, x)


def _compressed(data: memoryview, width: int) -> bytes:
    """The bytes by their place in a number, compressed; filled up where that takes less than a share of them."""
    planes = np.ascontiguousarray(np.frombuffer(data, np.uint8).reshape(-1, width).T)
    made: bytes = _zstandard(ArgumentError).ZstdCompressor(LEVEL).compress(planes.data)
    return made.ljust(-(-data.nbytes // RATIO), b"\0")


def _expand(came: np.ndarray, place: np.ndarray, width: int) -> None:
    """Undo `_compressed`, piece by piece: as many bytes as were said come of it, before they are made."""
    zstandard = _zstandard(_refusal)
    if zstandard.frame_content_size(came.data) != len(place):
        raise ValueError("a compressed entry of another size")
    planes = place.reshape(-1, width).T
    count = len(planes[0])
    piece = np.empty(min(count, PIECE), np.uint8)
    with zstandard.ZstdDecompressor(max_window_size=WINDOW).stream_reader(came.data) as reader:
        for plane in planes:
            for start in range(0, count, PIECE):
                part = piece[: count - start]
                if reader.readinto(part.data) != len(part):
                    raise ValueError("a compressed entry of another size")
                plane[start : start + PIECE] = part


def _zstandard(error: Callable[[str], Exception]) -> Any:
    try:
        import zstandard
    except ImportError:
        raise error("compress: expected zstandard to be installed: pip install 'manifoldagg[wire]'") from None
    return zstandard


def _fields(value: Message | Payload | Receipt | Ticket) -> dict[str, Any]:
    """The fields by name, as plain values; those of a ticket's message are its own."""
    if isinstance(value, Ticket):
        own = {"id": value.id, "of": _plain(value.version)}
        return _of_type(own, TICKET) | _fields(value.message)
    found = {field.name: getattr(value, field.name) for field in fields(value)}
    for name in found.keys() - {"memory"}:
        found[name] = _plain(found[name])
    return _of_type(found, EXPECTED[type(value)])


def _of_type(found: dict[str, Any], expected: Mapping[str, Callable[[Any], bool]]) -> dict[str, Any]:
    try:
        return _checked(found, expected)
    except ValueError as error:
        raise WireError(f"wire: {error}") from None


def _plain(value: Any) -> Any:
    """Numbers of NumPy as those of Python, sequences and mappings as plain ones."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    return tuple(value) if isinstance(value, list) else value


def _value(kind: str, content: Any, space: ParameterSpace | None) -> Any:
    """The value with these fields, each of which must be of its type."""
    if kind == "ticket":
        own = _checked({name: content.pop(name) for name in TICKET}, TICKET)
        return Ticket(own["id"], own["of"], _value("message", content, space), space)
    made = _checked(content, EXPECTED[KINDS[kind]])
    for name in SPLIT:
        given = made.get(name)
        if given is not None and (given.ndim < 1 + (name == "points") or _is_other(given, space)):
            raise WireError(f"wire: {name}: expected points of the space, got shape {tuple(given.shape)}")
    if kind == "payload" and made["base"] is not None and made["base"].shape != made["points"].shape[1:]:
        raise WireError("wire: base: expected the shape of a point")
    return KINDS[kind](**made)


def _is_other(points: Tensor, space: ParameterSpace | None) -> bool:
    return space is not None and points.shape[-1] != space.layout.size


def _checked(content: Any, expected: Mapping[str, Callable[[Any], bool]]) -> dict[str, Any]:
    if type(content) is not dict or content.keys() != expected.keys():
        raise ValueError("a value with other fields")
    for name, fits in expected.items():
        if not fits(content[name]):
            raise ValueError(f"{name}: expected another type")
    return content


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda x: type(x) is kind


def _floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _number(x: Any) -> bool:
    return type(x) in (int, float)


def _named(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: type(x) is dict and all(type(name) is str and fits(part) for name, part in x.items())


_tensors = _named(lambda x: isinstance(x, Tensor))
RECEIPT = {"accepted": _is(bool), "reason": _is(str), "version": _is(int), "staleness": _is(int)}
RECEIPT |= dict.fromkeys(("weight", "cosine", "step", "norm"), _number)
RECEIPT |= dict.fromkeys(("buffered", "clipped"), _is(bool))
EXTRA = {"tensors": _tensors, "numbers": _named(_number), "buffers": _tensors}
MESSAGE = {"start": _floating, "asked": lambda x: type(x) is tuple and all(type(name) is str for name in x), **EXTRA}
MESSAGE |= {"version": lambda x: x is None or (type(x) is int and x >= 0)}
PAYLOAD = {"points": _floating, "samples": _is(int), "memory": lambda x: True, **EXTRA}
PAYLOAD |= {"base": lambda x: x is None or _floating(x)}
EXPECTED: dict[type, Mapping[str, Callable[[Any], bool]]] = {Message: MESSAGE, Payload: PAYLOAD, Receipt: RECEIPT}
TICKET = {"id": _is(str), "of": _is(int)}


def _check_layout(told: str | None, leaves: list[str], space: ParameterSpace) -> None:
    """The layout must be that of the other side, as far as it is told."""
    names = [leaf.name for leaf in space.layout.leaves]
    if leaves and leaves != names:
        raise WireError(f"wire: layout: expected the names of the tensors as in `spec`{wrapper_hint(leaves, names)}")
    if told is not None and told != layout_digest(space.layout, space.adapters):
        raise WireError("wire: layout: expected names, shapes, dtypes and order of the tensors as in `spec`")


def _refusal(what: str) -> WireError:
    return WireError(f"wire: {what}")


def _space(spec: Spec) -> ParameterSpace:
    return spec if isinstance(spec, ParameterSpace) else ParameterSpace.of_spec(spec)


def _view(data: Any) -> memoryview:
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ArgumentError(f"data: expected bytes, got {type(data).__name__}")
    try:
        view = memoryview(data)
    except ValueError:
        raise ArgumentError("data: expected bytes, got a memoryview that was released") from None
    try:
        return view.cast("B")
    except (TypeError, ValueError):  # those that do not lie one after another, are none, or of another machine's order
        return memoryview(view.tobytes())


def _check_size(head: bytes, error: Callable[[str], Exception]) -> None:
    """A header that can be read without much memory."""
    if len(head) > LONGEST:
        raise error(f"a header of more than {LONGEST} bytes")
    _check_values(head.decode("latin-1"), error)


def _check_values(text: str, error: Callable[[str], Exception]) -> None:
    if sum(map(text.count, "[{,")) > MOST:
        raise error(f"a header of more than {MOST} values")


def _check_stored(name: str, tensor: Tensor) -> None:
    try:
        stored(name, tensor)
    except ArgumentError as error:
        raise _refusal(str(error)) from None


def _json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_once, parse_constant=_refuse)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name that is there twice")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _sizes(shape: Any) -> tuple[int, ...]:
    if type(shape) is not list or len(shape) > AXES or not all(type(n) is int and 0 <= n < 2**62 for n in shape):
        raise ValueError("a shape that is none")
    return tuple(shape)


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _short(error: Exception) -> str:
    """What went wrong in one line: what came may be long."""
    text = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
    return repr(text[:200])[1:-1]
