"""JSON encoding of nested dicts, lists and tuples of plain values and tensors.

A value without a JSON counterpart is encoded as a JSON object with a single key, which states the type of the value:

- `$tuple`: a tuple, encoded as a list.
- `$bytes`: bytes, encoded as base64 text.
- `$float`: an infinite number or a NaN, encoded as text.
- `$dict`: a dict with an integer key or a key that begins with `$`, encoded as a list of `[key, value]` pairs.
- `$tensor`: a tensor, encoded as a reference. The caller stores the tensor and chooses the reference.
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
JSON_CONSTANTS = {None: "null", False: "false", True: "true"}
_to_json = json.JSONEncoder().encode

# Limits for data from an untrusted source. They apply if `is_bounded` is set.
MAX_HEADER_BYTES = 2**24
MAX_HEADER_VALUES = 2**20
"""The largest total number of `[`, `{` and `,` in a JSON text, which limits the number of values in it."""
MAX_DEPTH = 64
MAX_KEY = 2**60
"""The upper bound of the absolute values of integer keys, for two reasons.

- Python's hash of an integer below this bound is the integer itself, so distinct keys have distinct hashes.
- Parsing an integer takes time quadratic in its number of digits.
"""
MAX_INT_KEYS = 2**12
"""The largest number of integer keys of one dict. Keys that collide in the hash table take quadratic time to insert."""

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
        tensor_ref: a function of a tensor and its path in the tree. It returns the JSON value that refers to the
            tensor.
        make_error: a function of an error message. It returns the exception to raise for an unsupported value.
        is_bounded: whether to reject trees that exceed the limits for untrusted data.

    Example:
        >>> encode({"m": [torch.ones(2), (3, math.inf)], "n": {1: b""}}, lambda tensor, path: len(tensor), ValueError)
        '{"m": [{"$tensor": 2}, {"$tuple": [3, {"$float": "inf"}]}], "n": {"$dict": [[1, {"$bytes": ""}]]}}'
    """
    try:
        return _Encoder(tensor_ref, make_error, is_bounded).text(tree)
    except RecursionError:
        raise make_error("the tree cannot be saved: it is nested too deeply, or contains itself") from None


@dataclass
class _Encoder:
    tensor_ref: Callable[[Tensor, TreePath], Any]
    make_error: Callable[[str], Exception]
    is_bounded: bool
    path: list[str | int] = field(default_factory=list)

    def text(self, value: Any) -> str:
        """Return the JSON text of a value.

        The text is joined from the texts of the parts of the value, because a single call of `json.dumps` for a large
        tree would block all other threads.
        """
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, str):
            return _to_json(value)
        if value is None or isinstance(value, bool):
            return JSON_CONSTANTS[value]
        if isinstance(value, int):
            return self._integer(value)
        if isinstance(value, float):
            text = float.__repr__(value)
            return text if math.isfinite(value) else f'{{"$float": "{text}"}}'
        if type(value) in (list, tuple, dict):
            return self._branch(value)
        if isinstance(value, bytes):
            return f'{{"$bytes": "{b64encode(value).decode()}"}}'
        if isinstance(value, Tensor):
            return f'{{"$tensor": {json.dumps(self._tensor(value))}}}'
        raise self._type_error(f"a {type(value).__name__}")

    def _branch(self, value: list[Any] | tuple[Any, ...] | dict[Any, Any]) -> str:
        if not isinstance(value, dict):
            items = f"[{', '.join([self._child(i, item) for i, item in enumerate(value)])}]"
            return items if isinstance(value, list) else f'{{"$tuple": {items}}}'
        if all(type(key) is str and key[:1] != "$" for key in value):
            return f"{{{', '.join([f'{_to_json(key)}: {self._child(key, item)}' for key, item in value.items()])}}}"
        self._check_keys(value)
        pairs = [f"[{_to_json(key)}, {self._child(key, item)}]" for key, item in value.items()]
        return f'{{"$dict": [{", ".join(pairs)}]}}'

    def _child(self, name: str | int, value: Any) -> str:
        self.path.append(name)
        if self.is_bounded and len(self.path) > MAX_DEPTH:
            raise self.make_error(f"the tree cannot be saved: it has more than {MAX_DEPTH} nested branches")
        text = self.text(value)
        self.path.pop()
        return text

    def _integer(self, value: int) -> str:
        try:
            return int.__repr__(value)
        except ValueError:  # Python limits the number of digits of an integer that it converts to text.
            raise self._type_error("an integer of thousands of digits") from None

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
    """Convert parsed JSON back to the tree (nested dicts, lists and tuples) that `encode` has converted to JSON.

    If the JSON value is invalid, the function raises an exception. The type of this exception is not specified.

    Args:
        node: the parsed JSON value.
        load_tensor: a function that returns the tensor for a reference.
        is_bounded: whether to reject trees that exceed the limits for untrusted data.
        depth: the depth of `node` in the tree, which recursive calls set.
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
        # Two tuples or receipts that contain a NaN compare equal only if it is the same object, such as `math.nan`.
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
    """Parse a JSON text, and reject duplicate names and non-finite numbers, which `json.loads` accepts.

    Args:
        text: the JSON text.
        is_bounded: whether to reject texts that exceed the limits for untrusted data.

    Raises:
        ValueError: if the text is rejected or is not valid JSON.
        RecursionError: if the text is nested too deeply.
    """
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
    """Check that a JSON text from an untrusted source is small enough to be parsed.

    Raises:
        ValueError: if the text is longer than `MAX_HEADER_BYTES`, or may contain more than `MAX_HEADER_VALUES` values.
    """
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of more than {MAX_HEADER_BYTES} bytes")
    if sum(map(text.count, "[{,")) > MAX_HEADER_VALUES:
        raise ValueError(f"a header of more than {MAX_HEADER_VALUES} values")
