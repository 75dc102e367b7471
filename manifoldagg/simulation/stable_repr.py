"""What a setting was, in words that are the same in every process."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor

__all__ = ["describe"]


def describe(value: object) -> str | None:
    """What a setting was, in words: no address in memory is in them. Words themselves and `None` stay as they are.

    Example:
        >>> describe(partial(max, 2)), describe("priority:workers=2"), describe(None)
        ('max(2)', 'priority:workers=2', None)
    """
    return value if value is None or isinstance(value, str) else _words(value)


def _words(value: object) -> str:
    if isinstance(value, partial):
        inside = [*map(_words, value.args), *(f"{key}={_words(given)}" for key, given in value.keywords.items())]
        return f"{_words(value.func)}({', '.join(inside)})"
    if is_dataclass(value) and not isinstance(value, type):
        shown = [f"{one.name}={_words(getattr(value, one.name))}" for one in fields(value) if one.repr]
        return f"{type(value).__qualname__}({', '.join(shown)})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_words(key)}: {_words(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        inner = ", ".join(map(_words, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.ndarray | Tensor):
        return _words(value.tolist())
    if isinstance(value, str | int | float | None):
        return repr(value)
    return getattr(value, "__qualname__", type(value).__qualname__)
