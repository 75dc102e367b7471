"""The codec of files and messages: safetensors, and a tree of plain values as JSON that names its tensors."""

import json
import math
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from json.encoder import encode_basestring_ascii
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manifoldagg.federated.pytrees import Tree

__all__ = ["SAFETENSORS_DTYPES", "decode", "encode", "header_entries", "offsets", "parse_dtype", "with_length"]

MAX_FAST_INT = 2**60
"""Smaller integers have few digits, and are their own hashes."""
MAX_DEPTH = 64
"""The nesting limit of an untrusted tree."""
MAX_INT_KEYS = 2**12
"""So many integers may be keys of one dict of theirs: they can be chosen such that each takes as long as all before."""
SAFETENSORS_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
"""What every reader of safetensors knows; others are bytes there, and it stands elsewhere what they are."""

TreePath = tuple[str | int, ...]


def encode(
    tree: Tree,
    tensor_ref: Callable[[Tensor, TreePath], Any],
    make_error: Callable[[str], Exception],
    *,
    is_bounded: bool = False,
) -> str:
    """Encode a tree as JSON.

    Args:
        tree: dicts with strings and integers as keys, lists, tuples, dense tensors, numbers, strings, bytes, `None`.
        tensor_ref: what stands for a tensor, by itself and the way to it.
        make_error: makes of a message what is raised.
        is_bounded: reject trees that `decode` rejects from untrusted sources.

    Raises:
        Exception: of `make_error`, naming what of the tree is of another type.

    Example:
        >>> from manifoldagg.errors import CheckpointError
        >>> encode({"m": [torch.ones(2), 3]}, lambda tensor, way: len(tensor), CheckpointError)
        '{"dict": [["m", {"list": [{"tensor": 2}, 3]}]]}'
    """
    try:
        return _Encoder(tensor_ref, make_error, is_bounded).text(tree)
    except RecursionError:
        raise make_error("cannot be saved: it is nested too deeply, or contains itself") from None


class _Encoder:
    """Encoder from trees to JSON.

    The text is put together here and not by `json`, which would keep all other threads from running meanwhile.
    """

    def __init__(
        self, tensor_ref: Callable[[Tensor, TreePath], Any], make_error: Callable[[str], Exception], is_bounded: bool
    ) -> None:
        self._tensor_ref = tensor_ref
        self._make_error = make_error
        self._path: list[str | int] = []
        self._max_depth = MAX_DEPTH if is_bounded else math.inf
        self._max_int = MAX_FAST_INT if is_bounded else math.inf
        self._max_int_keys = MAX_INT_KEYS if is_bounded else math.inf

    def text(self, value: Any) -> str:
        kind = type(value)
        # Most of all, in a record of many clients and tickets.
        if kind is str:
            return encode_basestring_ascii(value)
        if kind is int and -MAX_FAST_INT < value < MAX_FAST_INT:
            return str(value)
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, bool | str):
            return json.dumps(value)
        if isinstance(value, int):
            return self._integer(value)
        if isinstance(value, float):
            return float.__repr__(value) if math.isfinite(value) else f'{{"float": "{float.__repr__(value)}"}}'
        if isinstance(value, bytes):
            return f'{{"bytes": "{b64encode(value).decode()}"}}'
        if isinstance(value, Tensor):
            return self._tensor(value)
        if kind is list or kind is tuple:
            items = ", ".join([self._child(i, item) for i, item in enumerate(value)])
            return f'{{"{kind.__name__}": [{items}]}}'
        if kind is dict:
            if len(value) > self._max_int_keys and sum(not isinstance(key, str) for key in value) > self._max_int_keys:
                raise self._type_error(f"a dict with more than {MAX_INT_KEYS} integers as keys")
            items = ", ".join(f"[{self._key(key)}, {self._child(key, item)}]" for key, item in value.items())
            return f'{{"dict": [{items}]}}'
        raise self._type_error(f"a {type(value).__name__}")

    def _child(self, name: str | int, value: Any) -> str:
        self._path.append(name)
        if len(self._path) > self._max_depth:
            raise self._make_error(f"cannot be saved: it has more than {MAX_DEPTH} nested branches")
        text = self.text(value)
        self._path.pop()
        return text

    def _key(self, key: Any) -> str:
        if isinstance(key, str):
            return json.dumps(key)
        if isinstance(key, int) and not isinstance(key, bool) and abs(key) < self._max_int:
            return self._integer(key)
        raise self._type_error(f"a dict with the key {key!r}")

    def _integer(self, value: int) -> str:
        try:
            return int.__repr__(value)
        except ValueError:  # Python limits how many digits it converts
            raise self._type_error("an integer of thousands of digits") from None

    def _tensor(self, tensor: Tensor) -> str:
        plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        if not plain or tensor.is_meta or tensor.is_quantized or tensor.is_nested:
            raise self._type_error(f"a {type(tensor).__name__} that is not dense ({tensor.layout}, {tensor.device})")
        return f'{{"tensor": {json.dumps(self._tensor_ref(tensor, tuple(self._path)))}}}'

    def _type_error(self, what: str) -> Exception:
        where = "".join(f"[{name!r}]" for name in self._path) or "the tree"
        return self._make_error(
            f"{where}: expected dicts (by strings or integers), lists, tuples, dense tensors, numbers, strings, bytes "
            f"or None; {what} cannot be saved"
        )


def decode(node: Any, load_tensor: Callable[[Any], Tensor], *, is_bounded: bool = False, depth: int = 0) -> Tree:
    """Decode the tree of a parsed JSON value; an invalid value raises an exception.

    Args:
        node: what `json` has made of it.
        load_tensor: for what stands in its place.
        is_bounded: refuse what is nested deeper, and integers as keys that are larger or more, than what somebody else
            may send.
        depth: of the node.

    Example:
        >>> decode({"tuple": [1, {"tensor": 2}]}, torch.ones)
        (1, tensor([1., 1.]))
    """
    if not isinstance(node, dict):
        if isinstance(node, list):
            raise ValueError("a list that is not tagged")
        return node
    if is_bounded and depth > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} nested branches")

    def below(item: Any) -> Tree:
        return decode(item, load_tensor, is_bounded=is_bounded, depth=depth + 1)

    ((tag, content),) = node.items()
    if tag == "dict":
        if is_bounded and len(content) > MAX_INT_KEYS and sum(type(key) is int for key, _ in content) > MAX_INT_KEYS:
            raise ValueError(f"a dict with more than {MAX_INT_KEYS} integers as keys")
        branches = {_key(key, is_bounded): below(item) for key, item in content}
        if len(branches) < len(content):
            raise ValueError("a duplicate key")
        return branches
    if tag == "list":
        return [below(item) for item in content]
    if tag == "tuple":
        return tuple([below(item) for item in content])
    if tag == "float":
        number = float(content)
        # The one that is equal to itself in a tuple, as in receipts.
        return math.nan if math.isnan(number) else number
    if tag == "bytes":
        return b64decode(content, validate=True)
    if tag == "tensor":
        return load_tensor(content)
    raise ValueError(f"unknown tag {tag}")


def _key(key: Any, is_bounded: bool) -> str | int:
    if type(key) not in (str, int) or (is_bounded and type(key) is int and abs(key) >= MAX_FAST_INT):
        raise ValueError("an invalid key")
    checked: str | int = key
    return checked


def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name.

    Raises:
        ValueError: if there is none that tensors of plain numbers have.

    Example:
        >>> parse_dtype("bfloat16")
        torch.bfloat16
    """
    dtype = getattr(torch, name, None)
    # Those of quantised tensors begin with q.
    if not isinstance(dtype, torch.dtype) or str(dtype).startswith("torch.q"):
        raise ValueError(f"unknown dtype {name}")
    return dtype


def header_entries(listed: Iterable[tuple[str, torch.dtype, Sequence[int], int]]) -> str:
    """Return the header entries: names, dtypes, shapes and byte ranges of contiguous tensors.

    Example:
        >>> print(header_entries([("w", torch.float32, [2], 8)]))
        "w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}
    """
    lines = []
    start = 0
    for name, dtype, shape, length in listed:
        known = SAFETENSORS_DTYPES.get(dtype)
        end = start + length
        fields = f'"dtype":"{known or "U8"}","shape":{list(shape) if known else [length]}'
        lines.append(f'{encode_basestring_ascii(name)}:{{{fields},"data_offsets":[{start},{end}]}}')
        start = end
    return ",".join(lines)


def with_length(header: str) -> bytes:
    """Return a header prefixed with its length."""
    text = header.encode()
    # Behind it, numbers of eight bytes begin at multiples of eight.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def offsets(lines: Mapping[str, Any]) -> list[tuple[int, int, str]]:
    """Return the begin and end of each entry, in their order.

    Raises:
        ValueError: if they do not follow one another from 0 on.

    Example:
        >>> offsets({"b": {"data_offsets": [8, 9]}, "a": {"data_offsets": [0, 8]}})
        [(0, 8, 'a'), (8, 9, 'b')]
    """
    found = sorted((*line["data_offsets"], name) for name, line in lines.items())
    ends = [0, *(end for _, end, _ in found)]
    if any(not before == begin <= end for (begin, end, _), before in zip(found, ends, strict=False)):
        raise ValueError("its entries are not contiguous")
    return found
