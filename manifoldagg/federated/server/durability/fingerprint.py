"""Fingerprints of rules and spaces, which show whether two of them are equal.

A checkpoint stores the fingerprints of the server's rule and space. `Server.resume` compares them with the fingerprints
of its arguments.
"""

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

from manifoldagg._validation import short_repr
from manifoldagg.errors import CheckpointError
from manifoldagg.federated.pytrees import Tree
from manifoldagg.tensor_file import tensor_bytes

__all__ = ["fingerprint", "first_difference", "import_path", "qualified_name", "rule_difference"]

BUILTIN_OWNERS = (types.ModuleType, types.NoneType)
"""The types of `__self__` for built-in functions. Python also reports built-in functions as built-in methods."""
MAX_VALUE_CHARS = 60
"""The largest number of characters of a value in an error message."""


def fingerprint(name: str, value: Any) -> Tree:
    """Return the fingerprint of a value, such as a rule. Equal values have equal fingerprints.

    A fingerprint consists of nested dicts and lists of plain values. It contains the names of functions and classes,
    the fields of objects, and the digests of tensors. It does not contain the code of functions and classes, so it does
    not detect changes of the code.

    Args:
        name: the name of the value in error messages.
        value: the value, such as a rule or a space.

    Raises:
        CheckpointError: if the value contains a lambda or a nested function, which cannot be imported by name, or if
            the value contains itself.

    Example:
        >>> from manifoldagg.federated.schedules import Cosine
        >>> fingerprint("rate", Cosine(1.0, 0.0, 4))["fields"]
        {'start': 1.0, 'end': 0.0, 'period': 4, 'restarts': False}
    """
    try:
        return _fingerprint(name, value)
    except RecursionError:
        raise CheckpointError(f"{name}: expected a value that does not contain itself") from None


def qualified_name(name: str, function: Any) -> str | None:
    """Return the qualified name of a callable, such as `time.monotonic`.

    For a bound method, the name does not depend on the object. For an object with a method `__call__`, the result is
    the name of its class.

    Args:
        name: the name of the callable in error messages.
        function: the callable. If it is `None`, the result is `None`.

    Raises:
        CheckpointError: if the callable is a lambda or a nested function, which cannot be imported by name.

    Example:
        >>> import time
        >>> qualified_name("clock", time.monotonic), qualified_name("clock", [].pop)
        ('time.monotonic', 'list.pop')
    """
    if function is None:
        return None
    if isinstance(function, types.FunctionType):
        return _importable_path(name, function)
    if getattr(function, "__module__", "") is None:
        return str(function.__qualname__)
    return import_path(
        function if isinstance(function, types.MethodType | types.BuiltinFunctionType | type) else type(function)
    )


def first_difference(name: str, saved: Tree, current: Tree, *, are_fields: bool = False) -> str | None:
    """Describe the first difference between two fingerprints. If they are equal, return `None`.

    Args:
        name: the name of the value at the start of the description.
        saved: the fingerprint in the checkpoint.
        current: the fingerprint of the current value.
        are_fields: whether the fingerprints are the fields of an object, which the description names. Recursive calls
            set this argument.

    Example:
        >>> from manifoldagg.federated.staleness import Polynomial
        >>> first_difference("staleness", fingerprint("", Polynomial(0.5)), fingerprint("", Polynomial(0.7)))
        'staleness: a: was 0.5, got 0.7'
    """
    if isinstance(saved, dict) and isinstance(current, dict) and saved.keys() == current.keys():
        for key in saved:
            label = f"{name}: {key}" if are_fields else name
            is_content = key == "fields" and not are_fields
            if difference := first_difference(label, saved[key], current[key], are_fields=is_content):
                return difference
        return None
    if isinstance(saved, list) and isinstance(current, list) and saved and current:
        pairs = enumerate(zip(saved, current, strict=False))
        found = (first_difference(f"{name}[{i}]", old, new) for i, (old, new) in pairs)
        longer = None if len(saved) == len(current) else f"{name}: was {len(saved)} entries, got {len(current)}"
        return next(filter(None, found), longer)
    # NaN does not equal itself, but its string representation does.
    return (
        None
        if saved == current or repr(saved) == repr(current)
        else f"{name}: was {_shorten(saved)}, got {_shorten(current)}"
    )


def rule_difference(saved: Tree, current: Tree, *, replace: bool) -> str | None:
    """Return the reason why a server cannot resume with the current rule. If it can, return `None`.

    Args:
        saved: the fingerprint of the saved rule.
        current: the fingerprint of the current rule.
        replace: whether another rule is acceptable. The clip and the noise of `Private` cannot be replaced, because the
            privacy loss so far depends on them.
    """
    privacy = _privacy_options(saved)
    given = _privacy_options(current)
    if privacy is not None and given is not None and privacy != given and replace:
        return (
            f"rule: (clip, noise) was {privacy}, got {given}: the privacy loss so far depends on the saved "
            "values, so they cannot be replaced; start a new server from the model"
        )
    difference = first_difference("rule", saved, current)
    return None if difference is None or replace else f"{difference}; pass replace=True to replace it"


def _privacy_options(rule: Tree) -> tuple[Tree, Tree] | None:
    """Read the clipping norm and the noise multiplier from the fields of a saved rule.

    If neither the rule nor a rule that it wraps is differentially private, return `None`.
    """
    fields = rule.get("fields", {}) if isinstance(rule, dict) else {}
    if "clip" in fields and "noise" in fields:
        return fields["clip"], fields["noise"]
    return _privacy_options(fields["rule"]) if "rule" in fields else None


def _fingerprint(name: str, value: Any) -> Tree:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, types.FunctionType):
        return {"function": _importable_path(name, value)}
    if isinstance(value, type):
        return {"type": import_path(value)}
    kind = {"class": import_path(type(value))}
    if isinstance(value, types.MethodType | types.BuiltinMethodType):
        owner = value.__self__
        return {
            "method": import_path(value),
            "of": None if isinstance(owner, BUILTIN_OWNERS) else _fingerprint(name, owner),
        }
    if isinstance(value, functools.partial):
        return kind | _fingerprint_fields(name, {"func": value.func, "args": value.args, "keywords": value.keywords})
    if isinstance(value, Enum | torch.dtype | torch.device):
        return kind | {"name": value.name if isinstance(value, Enum) else str(value)}
    if isinstance(value, Tensor | np.ndarray):
        return kind | _tensor_digest(value if isinstance(value, Tensor) else torch.from_numpy(np.atleast_1d(value)))
    if isinstance(value, nn.Module):
        return kind | _fingerprint_fields(name, value.state_dict())
    if is_dataclass(value):
        # Fields that the equality of the dataclass ignores are not part of the fingerprint.
        return kind | _fingerprint_fields(
            name, {field.name: getattr(value, field.name) for field in fields(value) if field.compare}
        )
    if isinstance(value, Mapping):
        return kind | {
            "items": [
                [_fingerprint(name, key), _fingerprint(f"{name}[{short_repr(key)}]", value[key])] for key in value
            ]
        }
    if isinstance(value, list | tuple):
        return kind | {"items": [_fingerprint(f"{name}[{i}]", part) for i, part in enumerate(value)]}
    if isinstance(value, set | frozenset):
        return kind | {"items": sorted((_fingerprint(name, part) for part in value), key=repr)}
    state = value.__getstate__()
    return kind | _fingerprint_fields(name, state if isinstance(state, dict) else {"state": state})


def _fingerprint_fields(name: str, content: Mapping[str, Any]) -> dict[str, Any]:
    return {"fields": {key: _fingerprint(f"{name}: {key}", part) for key, part in content.items()}}


def import_path(value: Any) -> str:
    """Return the import path of a class or a function, such as `time.monotonic`."""
    return f"{value.__module__}.{value.__qualname__}"


def _importable_path(name: str, function: Any) -> str:
    """Return the import path of a function.

    Raises:
        CheckpointError: if importing this path does not return the function.
    """
    module = getattr(function, "__module__", None) or ""
    try:
        found = operator.attrgetter(function.__qualname__)(sys.modules[module])
    except (AttributeError, KeyError):
        found = None
    if found is not function:
        raise CheckpointError(
            f"{name}: expected a function of a module, as a file stores its name, got {short_repr(function)}"
        )
    return import_path(function)


def _tensor_digest(tensor: Tensor) -> dict[str, Any]:
    digest = hashlib.sha256(tensor_bytes(tensor)).hexdigest()
    return {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "digest": digest}


def _shorten(description: Any) -> str:
    if isinstance(description, dict):
        description = next(iter(description.values()), description)
    text = str(description) if isinstance(description, str) else repr(description)
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 1] + "…"
