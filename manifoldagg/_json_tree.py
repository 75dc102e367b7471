"""JSON encoding of trees of plain values and tensors.

A value that JSON cannot represent is encoded as an object with a single name that begins with `$`:

- `$tuple`: a tuple, encoded as a list.
- `$bytes`: bytes, encoded as base64 text.
- `$float`: a number that is not finite.
- `$dict`: a dict whose keys are integers or begin with `$`, encoded as pairs of keys and values.
- `$tensor`: a reference to a tensor, chosen by the caller.
"""

import json
import math
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["TreePath", "check_bounds", "decode", "encode", "parse_json"]

MAX_DIMENSIONS = 64
"""The largest number of dimensions of a tensor. PyTorch has the same limit."""
MAX_BLOCKING_VALUES = 2**12
"""The largest number of values per call of `json.dumps`, which blocks all other threads."""

# Limits of data from an untrusted source (`is_bounded`).
MAX_HEADER_BYTES = 2**24
MAX_HEADER_VALUES = 2**20
"""The largest number of brackets and commas in JSON. This number bounds the number of values."""
MAX_DEPTH = 64
MAX_KEY = 2**60
"""The upper bound of integer keys.

Keys below this bound equal their hashes, so distinct keys do not collide. Parsing many digits takes quadratic time.
"""
MAX_INT_KEYS = 2**12
"""The largest number of integer keys of one dict. Inserting keys with colliding hashes takes quadratic time."""

TreePath = tuple[str | int, ...]
"""The keys and indices from the root of a tree to a value."""


def encode(
    tree: Any,
    tensor_ref: Callable[[Tensor, TreePath], Any],
    make_error: Callable[[str], Exception],
    *,
    is_bounded: bool = False,
) -> str:
    """Encode a tree as JSON.

    Args:
        tree: dicts with strings and integers as keys, lists, tuples, dense tensors, numbers, strings, bytes and `None`.
        tensor_ref: a function that returns the reference to a tensor, given the tensor and its path in the tree.
        make_error: a function that returns the exception to raise for an unsupported value, given the message.
        is_bounded: whether to reject trees that exceed the limits for untrusted data.

    Example:
        >>> encode({"m": [torch.ones(2), (3, math.inf)], "n": {1: b""}}, lambda tensor, path: len(tensor), ValueError)
        '{"m": [{"$tensor": 2}, {"$tuple": [3, {"$float": "inf"}]}], "n": {"$dict": [[1, {"$bytes": ""}]]}}'
    """
    encoder = _Encoder(tensor_ref, make_error, is_bounded)
    try:
        return _write_json(encoder.node(tree), encoder.large)
    except RecursionError:
        raise make_error("the tree cannot be saved: it is nested too deeply, or contains itself") from None


def _write_json(node: Any, large: set[int]) -> str:
    """Convert a value to JSON. Large values are written in pieces, because `json.dumps` blocks all other threads."""
    if id(node) not in large:
        return json.dumps(node)
    if isinstance(node, list):
        return f"[{', '.join([_write_json(item, large) for item in node])}]"
    return f"{{{', '.join([f'{json.dumps(name)}: {_write_json(item, large)}' for name, item in node.items()])}}}"


@dataclass
class _Encoder:
    tensor_ref: Callable[[Tensor, TreePath], Any]
    make_error: Callable[[str], Exception]
    is_bounded: bool
    path: list[str | int] = field(default_factory=list)
    num_values: int = 0
    large: set[int] = field(default_factory=set)

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
        if type(value) in (list, tuple, dict):
            return self._branch(value)
        raise self._type_error(f"a {type(value).__name__}")

    def _branch(self, value: list[Any] | tuple[Any, ...] | dict[Any, Any]) -> Any:
        before = self.num_values
        node: Any
        if not isinstance(value, dict):
            items: Any = [self._child(i, item) for i, item in enumerate(value)]
            node = items if isinstance(value, list) else {"$tuple": items}
        elif all(type(key) is str and key[:1] != "$" for key in value):
            node = items = {key: self._child(key, item) for key, item in value.items()}
        else:
            self._check_keys(value)
            items = [[key, self._child(key, item)] for key, item in value.items()]
            node = {"$dict": items}
        if self.num_values - before > MAX_BLOCKING_VALUES:
            self.large |= {id(node), id(items)}
        return node

    def _child(self, name: str | int, value: Any) -> Any:
        self.num_values += 1
        self.path.append(name)
        if self.is_bounded and len(self.path) > MAX_DEPTH:
            raise self.make_error(f"the tree cannot be saved: it has more than {MAX_DEPTH} nested branches")
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
            raise self._type_error(f"a dict with more than {MAX_INT_KEYS} integer keys")

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


def decode(node: Any, load_tensor: Callable[[Any], Any], *, is_bounded: bool = False, depth: int = 0) -> Any:
    """Decode a tree from parsed JSON. An invalid value raises an exception.

    Args:
        node: the parsed JSON value.
        load_tensor: a function that returns the tensor of a reference.
        is_bounded: whether to reject trees that exceed the limits for untrusted data.
        depth: the depth of the node in the tree.
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
        # `math.nan` is a single object, so tuples and receipts that contain it compare equal.
        return math.nan if math.isnan(float(content)) else float(content)
    if tag != "$dict" or not all(type(key) in (str, int) for key, _ in content):
        raise ValueError(f"an unknown tag {tag}, or an invalid key")
    if is_bounded:
        numbers = [key for key, _ in content if type(key) is int]
        if len(numbers) > MAX_INT_KEYS or not all(-MAX_KEY < key < MAX_KEY for key in numbers):
            raise ValueError(f"a dict with more than {MAX_INT_KEYS} integer keys, or with a key beyond 2^60")
    branches = {key: child(item) for key, item in content}
    if len(branches) < len(content):
        raise ValueError("a duplicate key")
    return branches


def parse_json(text: str, *, is_bounded: bool = False) -> Any:
    """Parse JSON. Duplicate names, non-finite numbers and invalid text raise an exception."""
    if is_bounded:
        check_bounds(text)
    return json.loads(text, object_pairs_hook=_reject_duplicate_names, parse_constant=_reject_constant)


def _reject_duplicate_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a duplicate name")
    return found


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def check_bounds(text: str) -> None:
    """Check that JSON from an untrusted source is small enough to be parsed.

    Raises:
        ValueError: if the text is too long or contains too many values.
    """
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of more than {MAX_HEADER_BYTES} bytes")
    if sum(map(text.count, "[{,")) > MAX_HEADER_VALUES:
        raise ValueError(f"a header of more than {MAX_HEADER_VALUES} values")
