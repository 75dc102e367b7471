"""Recipes: values that go to other processes as what makes them, and are made and kept where they are used."""

import copyreg
import pickle
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from manifoldagg.errors import ArgumentError
from manifoldagg.federated.clients.determinism import single_threaded
from manifoldagg.federated.server.durability.raw_io import tensor_bytes

__all__ = ["checksum", "reduce_by_factory"]


def reduce_by_factory(
    value: Any, factory: Callable[[], Any] | None, checksum_of: Callable[[Any], int]
) -> tuple[Any, ...]:
    """What `__reduce__` returns: the origin and a checksum, or the value itself where nobody could recall its origin.

    Args:
        value: to pickle.
        factory: what makes it.
        checksum_of: its checksum.
    """
    try:
        recipe = pickle.dumps(factory)
    except Exception:
        recipe = b""
    if factory is None or not recipe:
        return copyreg.__newobj__, (type(value),), vars(value)  # type: ignore[attr-defined]
    return _rebuild, (recipe, checksum_of, checksum_of(value))


def checksum(*parts: Tensor | np.ndarray) -> int:
    """Of the values of all of them.

    Example:
        >>> checksum(np.ones(2), np.zeros(1)) == checksum(np.array([1.0, 1.0, 0.0]))
        True
    """
    value = 0
    for part in parts:
        value = zlib.crc32(tensor_bytes(part) if isinstance(part, Tensor) else part.tobytes(), value)
    return value


@lru_cache(maxsize=4)
def _rebuild(pickled_factory: bytes, checksum_of: Callable[[Any], int], expected: int) -> Any:
    origin = pickle.loads(pickled_factory)
    with single_threaded():
        value = origin()
    if checksum_of(value) != expected:
        raise ArgumentError(
            f"dataset: {origin!r} made other data in another process: expected a function that makes the same "
            "each time, and data that nobody writes"
        )
    return value
