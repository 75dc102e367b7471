"""JSON-compatible descriptions (specs) of parameter spaces.

From a spec, another machine can construct an equal parameter space without the model.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from manifoldagg._validation import short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds.flat import Flat
from manifoldagg.manifolds.grassmann import Grassmann
from manifoldagg.manifolds.hyperbolic import Lorentz, PoincareBall
from manifoldagg.manifolds.layout import Entry, Layout
from manifoldagg.manifolds.lora.leaves import Adapters, FactorEntries, ScaledBias
from manifoldagg.manifolds.lora.lowrank import LowRank
from manifoldagg.manifolds.manifold import Manifold
from manifoldagg.manifolds.power import Power
from manifoldagg.manifolds.product import Product
from manifoldagg.manifolds.rotations import SpecialOrthogonal
from manifoldagg.manifolds.sphere import Sphere
from manifoldagg.manifolds.stiefel import Stiefel
from manifoldagg.manifolds.symmetric import SymmetricPositiveDefinite

__all__ = ["SPACES_BY_NAME", "layout_digest", "read_spec", "spec_of"]

FORMAT_VERSION = 1
BUILT_IN_SPACES = (Flat, Grassmann, Lorentz, LowRank, PoincareBall, Power, Product, SpecialOrthogonal, Sphere, Stiefel)
SPACES_BY_NAME: dict[str, type[Manifold]] = {
    space.__name__: space for space in (*BUILT_IN_SPACES, SymmetricPositiveDefinite)
}
"""The spaces that are determined by a name and numbers."""
MAX_AXES = 64
"""The maximum number of axes of a torch tensor."""
MAX_INTEGER = 2**62
"""An exclusive upper bound on sizes."""


def spec_of(
    layout: Layout, manifolds: tuple[tuple[str, Manifold], ...] = (), adapters: Adapters | None = None
) -> dict[str, Any]:
    """Describe a layout, its curved leaves and its adapters with lists, strings and numbers.

    Raises:
        ArgumentError: if the space of a leaf is not a class of this package.

    Example:
        >>> spec_of(Layout((Entry("w", (3,), torch.float32),)))["leaves"]
        [['w', [3], 'float32']]
    """
    spec = {
        "format": FORMAT_VERSION,
        "dtype": _dtype_name(layout.dtype),
        "leaves": [_write_entry(leaf) for leaf in layout.leaves],
        "buffers": [_write_entry(entry) for entry in layout.buffers],
        "aliases": [list(pair) for pair in layout.aliases],
        "manifolds": [[name, _write_value(name, space)] for name, space in manifolds],
    }
    if adapters is None:
        return spec
    pairs = [[_write_entry(pair.first), _write_entry(pair.second), pair.scaling] for pair in adapters.factors]
    return spec | {
        "adapters": {
            "factors": pairs,
            "biases": [[_write_entry(bias.entry), bias.factor_name, bias.scaling] for bias in adapters.biases],
        }
    }


def read_spec(spec: Any) -> tuple[Layout, tuple[tuple[str, Manifold], ...], Adapters | None]:
    """Return the layout, the curved leaves and the adapters that a spec describes.

    Raises:
        ArgumentError: if the spec is invalid or has another format version.
    """
    if not isinstance(spec, Mapping):
        raise ArgumentError(f"spec: expected a result of `spec()` of a server or a space, got {type(spec).__name__}")
    # `True` equals 1 in Python, so the exact type is checked.
    if type(spec.get("format")) is not int or spec["format"] != FORMAT_VERSION:
        raise ArgumentError(
            f"spec: expected format {FORMAT_VERSION}, got {short_repr(spec.get('format'))}, which another version wrote"
        )
    # A spec may come from another machine, so any error in it is reported as an invalid argument.
    try:
        leaves, carried = (tuple(_read_entry(entry) for entry in spec[part]) for part in ("leaves", "buffers"))
        aliases = tuple((str(alias), str(name)) for alias, name in spec["aliases"])
        owners = {leaf.name for leaf in leaves}
        if not {name for _, name in aliases} <= owners:
            raise ValueError("an alias of an unknown leaf")
        _check_unique([*(entry.name for entry in (*leaves, *carried)), *(alias for alias, _ in aliases)])
        curved = tuple((str(name), _read_value(space)) for name, space in spec["manifolds"])
        _check_unique([name for name, _ in curved])
        layout = Layout(leaves, carried, aliases, _read_dtype(spec["dtype"]))
        return layout, curved, _read_adapters(spec["adapters"]) if "adapters" in spec else None
    except ArgumentError as error:
        raise ArgumentError(f"spec: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ArgumentError(f"spec: expected a result of `spec()` of a server or a space, got {error!r}") from None


@lru_cache(maxsize=64)
def layout_digest(layout: Layout, adapters: Adapters | None = None) -> str:
    """Return a hexadecimal digest of the names, shapes, dtypes, adapters and their order.

    Example:
        >>> len(layout_digest(Layout((Entry("w", (3,), torch.float32),))))
        32
    """
    # Sorted keys and fixed separators make the text, and so the digest, equal on all machines.
    text = json.dumps(spec_of(layout, adapters=adapters), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _write_entry(entry: Entry) -> list[Any]:
    """Describe an entry as a list: name, shape and dtype."""
    return [entry.name, list(entry.shape), _dtype_name(entry.dtype)]


def _read_entry(given: Any) -> Entry:
    """Build an entry from the list that describes it.

    Raises:
        ValueError: if the name or the shape is invalid.
    """
    name, shape, dtype = given
    if (
        not isinstance(name, str)
        or len(shape) > MAX_AXES
        or not all(type(n) is int and 0 <= n < MAX_INTEGER for n in shape)
    ):
        raise ValueError(f"an entry with name {str(name)[:100]!r} and an invalid shape")
    # torch also multiplies the other sizes if one of them is 0, and the product must not overflow.
    if math.prod(max(n, 1) for n in shape) >= MAX_INTEGER:
        raise ValueError(f"an entry with name {name[:100]!r} and a size of 2^62 or more")
    return Entry(name, tuple(shape), _read_dtype(dtype))


def _read_adapters(given: Any) -> Adapters:
    pairs = [FactorEntries(_read_entry(a), _read_entry(b), _read_scaling(s)) for a, b, s in given["factors"]]
    biases = [ScaledBias(_read_entry(entry), str(of), _read_scaling(s)) for entry, of, s in given["biases"]]
    return Adapters(tuple(pairs), tuple(biases))


def _read_scaling(given: Any) -> float:
    # The exact type is checked, because `True` is an int in Python.
    if type(given) not in (int, float):
        raise ValueError("a scaling that is not a number")
    return float(given)


def _check_unique(names: list[str]) -> None:
    if len(set(names)) < len(names):
        raise ValueError("a repeated name")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _read_dtype(name: Any) -> torch.dtype:
    # `torch` has many attributes that are not dtypes.
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"the invalid dtype {short_repr(name)}")
    return dtype


def _write_value(name: str, value: Any) -> Any:
    """Convert a space, or an argument of its constructor, to lists, strings and numbers.

    Raises:
        ArgumentError: if the space is not a class of this package.
    """
    if isinstance(value, Manifold):
        if SPACES_BY_NAME.get(type(value).__name__) is not type(value):
            raise ArgumentError(
                f"spec: {name}: expected a space of this package, got {type(value).__name__}; construct the space on "
                "the other machine from the module, with the same `manifolds`"
            )
        arguments = {field.name: _write_value(name, getattr(value, field.name)) for field in fields(value)}  # type: ignore[arg-type]
        return {type(value).__name__: arguments}
    if isinstance(value, tuple):
        return [_write_value(name, part) for part in value]
    # JSON cannot represent NumPy numbers.
    return value.item() if isinstance(value, np.generic) else value


def _read_value(value: Any) -> Any:
    """Convert the result of `_write_value` back to a space or an argument."""
    if isinstance(value, Mapping):
        ((name, arguments),) = value.items()
        return SPACES_BY_NAME[name](**{field: _read_value(part) for field, part in arguments.items()})
    # A spec may come from another machine, so it must not cause an overflow.
    if type(value) is int and abs(value) >= MAX_INTEGER:
        raise ValueError("an integer of 2^62 or more")
    return tuple(_read_value(part) for part in value) if isinstance(value, list) else value
