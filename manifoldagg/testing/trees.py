"""Functions that compare two trees: one finds bitwise differences, the other finds shared memory.

A tree consists of nested dicts, lists and objects, whose leaves are tensors and other values.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["first_difference", "shared_memory"]

ATOMS = (type, FunctionType, ModuleType, torch.dtype, torch.device, torch.Generator, str, bytes)
"""The types whose instances are compared as a whole, although some of them have attributes."""


def first_difference(name: str, expected: Any, found: Any) -> str:
    """Describe the first bitwise difference between two trees, or return "" if the trees are equal.

    A tree consists of nested dicts, lists, tuples and objects, whose leaves are tensors, arrays and other values. The
    comparison differs from the operator `==` in two ways:

    - A NaN is equal to a NaN with the same bits, and -0.0 differs from 0.0.
    - Dataclasses, and objects without their own `__eq__`, are compared by their attributes.

    Args:
        name: the name of the tree in the description.
        expected: the expected tree.
        found: the tree that is compared with `expected`.

    Example:
        >>> tree = {"m": [torch.zeros(3), 2]}
        >>> first_difference("state", tree, {"m": [torch.tensor([0.0, 0.5, 0.25]), 2]})
        "state['m'][0] differs in 2 of 3 entries, by at most 0.5"
        >>> first_difference("state", tree, {"m": [torch.zeros(3), 2]})
        ''
    """
    if expected is found:
        return ""
    if type(expected) is not type(found):
        return f"{name} is a {type(found).__name__} instead of a {type(expected).__name__}"
    if isinstance(expected, np.ndarray) and expected.dtype != object:
        expected, found = torch.from_numpy(expected), torch.from_numpy(found)
    if isinstance(expected, Tensor):
        return _tensor_difference(name, expected, found)
    branches = _branches(expected)
    others = _branches(found)
    if branches is None or others is None:
        return "" if _equal_values(expected, found) else f"{name} is {found!r} instead of {expected!r}"
    if branches.keys() != others.keys():
        found_names, expected_names = (
            ", ".join(repr(key) for _, key in keys) or "nothing" for keys in (others, branches)
        )
        return f"{name} contains {found_names} instead of {expected_names}"
    pairs = ((f"{name}{step}", key) for key, step in branches.items())
    differences = (first_difference(where, _at(expected, key), _at(found, key)) for where, key in pairs)
    return next((words for words in differences if words), "")


def shared_memory(trees: Mapping[str, Any], others: Mapping[str, Any]) -> str:
    """Return a message about the first tensor in `trees` that shares memory with a tensor in `others`.

    The message contains the paths of both tensors. If no memory is shared, the result is "".

    Args:
        trees: trees by the names that the description uses.
        others: other trees, also by name.

    Example:
        >>> x = torch.zeros(4)
        >>> shared_memory({"the state": {"m": x[2:]}}, {"the model": x[:2]})
        "the state['m'] shares memory with the model"
    """
    other_ranges = [(span, where) for name, tree in others.items() for where, span in _memory(name, tree)]
    for name, tree in trees.items():
        for where, span in _memory(name, tree):
            for other, owner in other_ranges:
                if span.start < other.stop and other.start < span.stop:
                    return f"{where} shares memory with {owner}"
    return ""


def _memory(name: str, tree: Any) -> Iterator[tuple[str, range]]:
    """Yield the path and the memory address range of each tensor in a tree, except sparse tensors."""
    for where, tensor in _tensors(name, tree):
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            yield where, range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())


def _tensors(name: str, tree: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, np.ndarray) and tree.dtype != object:
        yield name, torch.from_numpy(tree)
    else:
        for key, step in (_branches(tree) or {}).items():
            yield from _tensors(f"{name}{step}", _at(tree, key))


def _branches(tree: Any) -> dict[Any, str] | None:
    """Return a dict from the key of each child of a tree to its Python notation, such as `[0]` or `.name`.

    The result is `None` if the value is not a container, such as a list or a dataclass.
    """
    if isinstance(tree, Mapping):
        return {("item", key): f"[{key!r}]" for key in tree}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return {("attribute", name): f".{name}" for name in tree._fields}
    if isinstance(tree, list | tuple):
        return {("item", i): f"[{i}]" for i in range(len(tree))}
    # The generated `__eq__` of a dataclass with tensors raises an exception, because a tensor with several entries
    # has no truth value.
    kind: Any = type(tree)
    by_attributes = is_dataclass(tree) or kind.__eq__ is object.__eq__
    if by_attributes and hasattr(tree, "__dict__") and not isinstance(tree, ATOMS):
        return {("attribute", key): f".{key}" for key in vars(tree)}
    return None


def _at(tree: Any, key: tuple[str, Any]) -> Any:
    kind, inner = key
    return tree[inner] if kind == "item" else getattr(tree, inner)


def _equal_values(a: Any, b: Any) -> bool:
    if isinstance(a, float):
        return repr(a) == repr(b)
    return bool(a == b) or repr(a) == repr(b)


def _tensor_difference(name: str, expected: Tensor, found: Tensor) -> str:
    for what in ("shape", "dtype"):
        expected_value = getattr(expected, what)
        found_value = getattr(found, what)
        if expected_value != found_value:
            return f"{name} has the {what} {found_value} instead of {expected_value}"
    if not expected.numel():
        return ""
    a, b = (x.detach().to_dense() if x.layout is not torch.strided else x.detach() for x in (expected, found))
    bits_a, bits_b = (x.contiguous().reshape(-1).view(torch.uint8).reshape(x.numel(), -1) for x in (a, b))
    num_different = int((bits_a != bits_b).any(-1).sum())
    if not num_different:
        return ""
    words = f"{name} differs in {num_different} of {a.numel()} entries"
    largest = (b.double() - a.double()).abs().max().item() if not a.is_complex() else math.nan
    return f"{words}, by at most {largest:.3g}" if math.isfinite(largest) else words
