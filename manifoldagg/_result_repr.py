"""One-line representations of result objects.

A representation contains floats with three significant digits, and the shapes of tensors instead of their entries.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from manifoldagg._validation import short_repr

__all__ = ["format_result"]

MAX_ENTRIES = 4
"""The maximum number of entries of a container that are written out."""


def format_result(result: object, **shown: object) -> str:
    """Represent a result by its class and some named values, for its `__repr__`.

    Args:
        result: the object, of which only the name of the class is read.
        **shown: the values in the order in which they appear.

    Example:
        >>> import torch
        >>> format_result(ValueError(), height=0.14159, at=0.5, point=torch.ones(2, 3), steps=12)
        'ValueError(height=0.142, at=0.5, point=Tensor of shape (2, 3), steps=12)'
    """
    return f"{type(result).__name__}({', '.join(f'{name}={_format(value)}' for name, value in shown.items())})"


def _format(value: Any) -> str:
    if isinstance(value, Tensor) and value.ndim == 0 and not value.is_complex():
        value = value.item()
    if isinstance(value, float):
        return f"{value:.3g}"
    if not isinstance(value, Mapping | list | tuple) or any(isinstance(entry, Tensor) for entry in _entries(value)):
        return short_repr(value)
    if len(value) > MAX_ENTRIES:
        return f"{type(value).__name__} of {len(value):,} entries"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_format(entry)}" for key, entry in value.items()) + "}"
    inside = ", ".join(map(_format, value))
    return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(value) == 1)})"


def _entries(container: Any) -> list[Any]:
    return [*container.values()] if isinstance(container, Mapping) else [*container]
