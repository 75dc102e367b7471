"""The format that files and messages share: safetensors, and a tree of plain values as JSON that names its tensors."""

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

__all__ = ["KNOWN", "decoded", "dtype_of", "encoded", "entries", "framed", "spans"]

FAST = 2**60
"""Smaller integers have few digits, and are their own hashes."""
DEEPEST = 64
"""So many branches of a tree from somebody else may lie within one another."""
WIDEST = 2**12
"""So many integers may be keys of one dict of theirs: they can be chosen such that each takes as long as all before."""
KNOWN = {
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

Way = tuple[str | int, ...]


def encoded(
    tree: Tree, place: Callable[[Tensor, Way], Any], error: Callable[[str], Exception], *, bounded: bool = False
) -> str:
    """A tree as JSON.

    Args:
        tree: dicts with strings and integers as keys, lists, tuples, dense tensors, numbers, strings, bytes, `None`.
        place: what stands for a tensor, by itself and the way to it.
        error: makes of a message what is raised.
        bounded: refuse what `decoded` would not take from somebody else.

    Raises:
        Exception: of `error`, naming what of the tree is of another type.

    Example:
        >>> from manifoldagg.errors import CheckpointError
        >>> encoded({"m": [torch.ones(2), 3]}, lambda tensor, way: len(tensor), CheckpointError)
        '{"dict": [["m", {"list": [{"tensor": 2}, 3]}]]}'
    """
    try:
        return _Encoder(place, error, bounded).text(tree)
    except RecursionError:
        raise error("cannot be saved: it is nested too deeply, or contains itself") from None


class _Encoder:
    """Makes JSON of a tree.

    The text is put together here and not by `json`, which would keep all other threads from running meanwhile.
    """

    def __init__(self, place: Callable[[Tensor, Way], Any], error: Callable[[str], Exception], bounded: bool) -> None:
        self._place = place
        self._error = error
        self._way: list[str | int] = []
        self._deepest = DEEPEST if bounded else math.inf
        self._largest = FAST if bounded else math.inf
        self._widest = WIDEST if bounded else math.inf

    def text(self, value: Any) -> str:
        kind = type(value)
        # Most of all, in a record of many clients and tickets.
        if kind is str:
            return encode_basestring_ascii(value)
        if kind is int and -FAST < value < FAST:
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
            items = ", ".join([self._below(i, item) for i, item in enumerate(value)])
            return f'{{"{kind.__name__}": [{items}]}}'
        if kind is dict:
            if len(value) > self._widest and sum(not isinstance(key, str) for key in value) > self._widest:
                raise self._refusal(f"a dict with more than {WIDEST} integers as keys")
            items = ", ".join(f"[{self._key(key)}, {self._below(key, item)}]" for key, item in value.items())
            return f'{{"dict": [{items}]}}'
        raise self._refusal(f"a {type(value).__name__}")

    def _below(self, name: str | int, value: Any) -> str:
        self._way.append(name)
        if len(self._way) > self._deepest:
            raise self._error(f"cannot be saved: it has more than {DEEPEST} branches within one another")
        text = self.text(value)
        self._way.pop()
        return text

    def _key(self, key: Any) -> str:
        if isinstance(key, str):
            return json.dumps(key)
        if isinstance(key, int) and not isinstance(key, bool) and abs(key) < self._largest:
            return self._integer(key)
        raise self._refusal(f"a dict with the key {key!r}")

    def _integer(self, value: int) -> str:
        try:
            return int.__repr__(value)
        except ValueError:  # Python limits how many digits it converts
            raise self._refusal("an integer of thousands of digits") from None

    def _tensor(self, tensor: Tensor) -> str:
        plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        if not plain or tensor.is_meta or tensor.is_quantized or tensor.is_nested:
            raise self._refusal(f"a {type(tensor).__name__} that is not dense ({tensor.layout}, {tensor.device})")
        return f'{{"tensor": {json.dumps(self._place(tensor, tuple(self._way)))}}}'

    def _refusal(self, what: str) -> Exception:
        where = "".join(f"[{name!r}]" for name in self._way) or "the tree"
        return self._error(
            f"{where}: expected dicts (by strings or integers), lists, tuples, dense tensors, numbers, strings, bytes "
            f"or None; {what} cannot be saved"
        )


def decoded(node: Any, tensor: Callable[[Any], Tensor], *, bounded: bool = False, depth: int = 0) -> Tree:
    """The tree that a text stands for, once `json` has read it; whatever is not one raises something.

    Args:
        node: what `json` has made of it.
        tensor: for what stands in its place.
        bounded: refuse what is nested deeper, and integers as keys that are larger or more, than what somebody else may
            send.
        depth: of the node.

    Example:
        >>> decoded({"tuple": [1, {"tensor": 2}]}, torch.ones)
        (1, tensor([1., 1.]))
    """
    if not isinstance(node, dict):
        if isinstance(node, list):
            raise ValueError("a list that is not tagged")
        return node
    if bounded and depth > DEEPEST:
        raise ValueError(f"more than {DEEPEST} branches within one another")

    def below(item: Any) -> Tree:
        return decoded(item, tensor, bounded=bounded, depth=depth + 1)

    ((tag, content),) = node.items()
    if tag == "dict":
        if bounded and len(content) > WIDEST and sum(type(key) is int for key, _ in content) > WIDEST:
            raise ValueError(f"a dict with more than {WIDEST} integers as keys")
        branches = {_key(key, bounded): below(item) for key, item in content}
        if len(branches) < len(content):
            raise ValueError("a key that is there twice")
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
        return tensor(content)
    raise ValueError(f"no tag is called {tag}")


def _key(key: Any, bounded: bool) -> str | int:
    if type(key) not in (str, int) or (bounded and type(key) is int and abs(key) >= FAST):
        raise ValueError("a key that is none")
    checked: str | int = key
    return checked


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name.

    Raises:
        ValueError: if there is none that tensors of plain numbers have.

    Example:
        >>> dtype_of("bfloat16")
        torch.bfloat16
    """
    dtype = getattr(torch, name, None)
    # Those of quantised tensors begin with q.
    if not isinstance(dtype, torch.dtype) or str(dtype).startswith("torch.q"):
        raise ValueError(f"no dtype is called {name}")
    return dtype


def entries(listed: Iterable[tuple[str, torch.dtype, Sequence[int], int]]) -> str:
    """The lines of a header: names, dtypes, shapes and bytes of what follows it, one after another.

    Example:
        >>> print(entries([("w", torch.float32, [2], 8)]))
        "w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}
    """
    lines = []
    start = 0
    for name, dtype, shape, length in listed:
        known = KNOWN.get(dtype)
        end = start + length
        fields = f'"dtype":"{known or "U8"}","shape":{list(shape) if known else [length]}'
        lines.append(f'{encode_basestring_ascii(name)}:{{{fields},"data_offsets":[{start},{end}]}}')
        start = end
    return ",".join(lines)


def framed(header: str) -> bytes:
    """A header with its length before it."""
    text = header.encode()
    # Behind it, numbers of eight bytes begin at multiples of eight.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def spans(lines: Mapping[str, Any]) -> list[tuple[int, int, str]]:
    """Where each entry begins and ends, in their order.

    Raises:
        ValueError: if they do not follow one another from 0 on.

    Example:
        >>> spans({"b": {"data_offsets": [8, 9]}, "a": {"data_offsets": [0, 8]}})
        [(0, 8, 'a'), (8, 9, 'b')]
    """
    found = sorted((*line["data_offsets"], name) for name, line in lines.items())
    ends = [0, *(end for _, end, _ in found)]
    if any(not before == begin <= end for (begin, end, _), before in zip(found, ends, strict=False)):
        raise ValueError("its entries do not follow one another")
    return found
