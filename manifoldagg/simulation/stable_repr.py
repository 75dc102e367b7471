"""A representation of settings that is equal in every process."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor

__all__ = ["stable_repr"]


def stable_repr(value: object) -> str | None:
    """Represent a setting as text without memory addresses. Strings and `None` are unchanged.

    Example:
        >>> stable_repr(partial(max, 2)), stable_repr("priority:workers=2"), stable_repr(None)
        ('max(2)', 'priority:workers=2', None)
    """
    return value if value is None or isinstance(value, str) else _repr(value)


def _repr(value: object) -> str:
    if isinstance(value, partial):
        inside = [*map(_repr, value.args), *(f"{key}={_repr(given)}" for key, given in value.keywords.items())]
        return f"{_repr(value.func)}({', '.join(inside)})"
    if is_dataclass(value) and not isinstance(value, type):
        shown = [f"{one.name}={_repr(getattr(value, one.name))}" for one in fields(value) if one.repr]
        return f"{type(value).__qualname__}({', '.join(shown)})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_repr(key)}: {_repr(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        inner = ", ".join(map(_repr, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.ndarray | Tensor):
        return _repr(value.tolist())
    if isinstance(value, str | int | float | None):
        return repr(value)
    return getattr(value, "__qualname__", type(value).__qualname__)
