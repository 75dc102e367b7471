"""Lazy pickling: values that are pickled as their factory, and built and cached in the receiving process."""

import copyreg
import pickle
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from manifoldagg._validation import short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.clients.determinism import single_threaded
from manifoldagg.tensor_file import tensor_bytes

__all__ = ["checksum", "reduce_by_factory"]


def reduce_by_factory(
    value: Any, factory: Callable[[], Any] | None, checksum_of: Callable[[Any], int]
) -> tuple[Any, ...]:
    """Return the `__reduce__` value: the factory and a checksum, or the value if the factory cannot be pickled.

    Args:
        value: to pickle.
        factory: what makes it.
        checksum_of: its checksum.
    """
    try:
        pickled_factory = pickle.dumps(factory)
    except Exception:
        pickled_factory = b""
    if factory is None or not pickled_factory:
        return copyreg.__newobj__, (type(value),), vars(value)  # type: ignore[attr-defined]
    return _rebuild, (pickled_factory, checksum_of, checksum_of(value))


def checksum(*parts: Tensor | np.ndarray) -> int:
    """Return a checksum of all values.

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
    factory = pickle.loads(pickled_factory)
    with single_threaded():
        value = factory()
    if checksum_of(value) != expected:
        raise ArgumentError(
            f"dataset: {short_repr(factory)} made other data in another process: expected a "
            "deterministic function, and data that is never modified"
        )
    return value
