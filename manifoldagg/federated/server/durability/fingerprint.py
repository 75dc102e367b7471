"""Descriptions: what a rule or a space is, in plain values that a file can hold and a later process compare."""

import functools
import hashlib
import operator
import sys
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manifoldagg.errors import CheckpointError
from manifoldagg.federated.pytrees import Tree
from manifoldagg.federated.server.durability.raw_io import bytes_of

__all__ = ["called", "describe", "difference", "path_of"]

NOBODY = (types.ModuleType, types.NoneType)
"""To these belong what Python calls built-in functions."""
LONGEST = 60
"""Letters of a value in a message."""


def describe(name: str, value: Any) -> Tree:
    """What a value is: plain ones themselves, functions and classes by name, objects by class and content.

    Two descriptions are equal where the values do the same, as far as names tell. Tensors and modules are told by a
    digest of their content.

    Args:
        name: of the value, for messages.
        value: a rule, a space, a schedule, or what is in one.

    Raises:
        CheckpointError: naming a lambda, or a function within another one: many share such a name.

    Example:
        >>> from manifoldagg.federated.schedules import Cosine
        >>> describe("rate", Cosine(1.0, 0.0, 4))["fields"]
        {'start': 1.0, 'end': 0.0, 'period': 4, 'restarts': False}
        >>> describe("rate", lambda version: 0.5)
        Traceback (most recent call last):
            ...
        manifoldagg.errors.CheckpointError: rate: expected a function of a module, as others can be found by ...
    """
    try:
        return _described(name, value)
    except RecursionError:
        raise CheckpointError(f"{name}: expected what does not contain itself") from None


def called(name: str, function: Any) -> str | None:
    """The qualified name of what is called, whatever object it is bound to; `None` for `None`.

    Args:
        name: of the function, for messages.
        function: to name.

    Raises:
        CheckpointError: naming a lambda, or a function within another one.

    Example:
        >>> import time
        >>> called("clock", time.monotonic), called("clock", [].pop)
        ('time.monotonic', 'list.pop')
    """
    if function is None:
        return None
    if isinstance(function, types.FunctionType):
        return _found(name, function)
    if getattr(function, "__module__", "") is None:
        return str(function.__qualname__)
    return path_of(
        function if isinstance(function, types.MethodType | types.BuiltinFunctionType | type) else type(function)
    )


def difference(name: str, was: Tree, given: Tree) -> str | None:
    """Where two descriptions first differ and how; `None` where they are equal.

    Example:
        >>> from manifoldagg.federated.staleness import Polynomial
        >>> difference("staleness", describe("", Polynomial(0.5)), describe("", Polynomial(0.7)))
        'staleness: a: was 0.5, got 0.7'
    """
    if isinstance(was, dict) and isinstance(given, dict) and was.keys() == given.keys():
        found = (_apart(name, key, was[key], given[key]) for key in was)
        return next((told for told in found if told is not None), None)
    if isinstance(was, list) and isinstance(given, list) and was and given:
        pairs = enumerate(zip(was, given, strict=False))
        found = (difference(f"{name}[{i}]", old, new) for i, (old, new) in pairs)
        longer = None if len(was) == len(given) else f"{name}: was {len(was)} entries, got {len(given)}"
        return next((told for told in found if told is not None), longer)
    # Written out, what is no number is equal too.
    return None if was == given or repr(was) == repr(given) else f"{name}: was {_short(was)}, got {_short(given)}"


def _apart(name: str, key: str, was: Tree, given: Tree) -> str | None:
    """The difference between two entries of descriptions. Fields have names, other entries are the thing itself."""
    if key == "fields" and was.keys() == given.keys():
        found = (difference(f"{name}: {field}", was[field], given[field]) for field in was)
        return next((told for told in found if told is not None), None)
    return difference(name, was, given)


def _described(name: str, value: Any) -> Tree:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, types.FunctionType):
        return {"function": _found(name, value)}
    if isinstance(value, type):
        return {"type": path_of(value)}
    kind = {"class": path_of(type(value))}
    if isinstance(value, types.MethodType | types.BuiltinMethodType):
        owner = value.__self__
        return {"method": path_of(value), "of": None if isinstance(owner, NOBODY) else _described(name, owner)}
    if isinstance(value, functools.partial):
        return kind | _fields(name, {"func": value.func, "args": value.args, "keywords": value.keywords})
    if isinstance(value, Enum):
        return kind | {"name": value.name}
    if isinstance(value, torch.dtype | torch.device):
        return kind | {"name": str(value)}
    if isinstance(value, Tensor):
        return kind | _content(value)
    if isinstance(value, np.ndarray):
        return kind | _content(torch.from_numpy(np.atleast_1d(value)))
    if isinstance(value, nn.Module):
        return kind | _fields(name, value.state_dict())
    if is_dataclass(value):
        # What does not count where values are compared does not count here.
        return kind | _fields(
            name, {field.name: getattr(value, field.name) for field in fields(value) if field.compare}
        )
    if isinstance(value, Mapping):
        return kind | {"items": [[_described(name, key), _described(f"{name}[{key!r}]", value[key])] for key in value]}
    if isinstance(value, list | tuple):
        return kind | {"items": [_described(f"{name}[{i}]", part) for i, part in enumerate(value)]}
    if isinstance(value, set | frozenset):
        return kind | {"items": sorted((_described(name, part) for part in value), key=repr)}
    state = value.__getstate__()
    return kind | _fields(name, state if isinstance(state, dict) else {"state": state})


def _fields(name: str, content: Mapping[str, Any]) -> dict[str, Any]:
    return {"fields": {key: _described(f"{name}: {key}", part) for key, part in content.items()}}


def path_of(value: Any) -> str:
    """The qualified name of a class or a function."""
    return f"{value.__module__}.{value.__qualname__}"


def _found(name: str, function: Any) -> str:
    """The name of a function, under which it is found."""
    module = getattr(function, "__module__", None) or ""
    try:
        found = operator.attrgetter(function.__qualname__)(sys.modules[module])
    except (AttributeError, KeyError):
        found = None
    if found is not function:
        raise CheckpointError(
            f"{name}: expected a function of a module, as others can be found by no name; got {function!r}"
        )
    return path_of(function)


def _content(tensor: Tensor) -> dict[str, Any]:
    digest = hashlib.sha256(bytes_of(tensor)).hexdigest()
    return {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "digest": digest}


def _short(description: Any) -> str:
    if isinstance(description, dict):
        description = next(iter(description.values()), description)
    text = str(description) if isinstance(description, str) else repr(description)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
