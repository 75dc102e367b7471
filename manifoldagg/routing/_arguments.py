"""Validation functions and base classes for routing, the assignment of tasks to clients.

The functions validate arrays with one number per client, such as service rates, and return read-only float64 vectors.
The base classes define `repr`, equality and hashes for dataclasses with such vectors.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from manifoldagg._result_repr import format_result
from manifoldagg._validation import check_vector
from manifoldagg.errors import ArgumentError

__all__ = ["MAX_RATE", "MIN_RATE", "ContentEquality", "positive_vector", "rate_vector", "routing_vector"]

Numbers = np.ndarray | Sequence[float]
SUM_TOLERANCE = 1e-6
MIN_RATE = 1e-300
MAX_RATE = 1e300
"""With rates between `MIN_RATE` and `MAX_RATE`, the mean service times are finite floats."""


def rate_vector(values: Numbers) -> np.ndarray:
    """Validate the service rates of clients in tasks per unit of time, and return them as a vector.

    All rates must be between `MIN_RATE` and `MAX_RATE`. The mean service times, which are the reciprocals of the rates,
    then neither overflow nor underflow.

    Raises:
        ArgumentError: if a rate is not between `MIN_RATE` and `MAX_RATE`.
    """
    rates = check_vector("rates", values)
    return _check_entries(
        "rates", rates, (rates >= MIN_RATE) & (rates <= MAX_RATE), f"a positive number, {MIN_RATE:g} to {MAX_RATE:g}"
    )


def positive_vector(name: str, values: Numbers, clients: int) -> np.ndarray:
    """Validate positive numbers, one for each client, and return them as a vector.

    Raises:
        ArgumentError: if the length differs from `clients`, or an entry is not positive.
    """
    p = _check_length(name, check_vector(name, values), clients)
    return _check_entries(name, p, p > 0, "a positive share (the bounds are infinite if a client gets no task)")


def routing_vector(values: Numbers, clients: int, *, positive: bool = False) -> np.ndarray:
    """Validate the shares of a routing, and return them as a vector without rescaling.

    A routing has one nonnegative share for each client. The shares must sum to 1, up to a tolerance of 1e-6.

    Raises:
        ArgumentError: if a share is negative, or the sum is not 1. The message contains the index of the share or the
            difference of the sum from 1.
    """
    p = _check_length("routing", check_vector("routing", values), clients)
    _check_entries("routing", p, p >= 0, "a share >= 0")
    excess = float(p.sum()) - 1
    if abs(excess) > SUM_TOLERANCE:
        side = "too much" if excess > 0 else "too little"
        raise ArgumentError(f"routing: expected shares that sum to 1, got {1 + excess:.9g}: {abs(excess):.3g} {side}")
    return positive_vector("routing", p, clients) if positive else p


def _check_length(name: str, x: np.ndarray, clients: int) -> np.ndarray:
    if len(x) != clients:
        raise ArgumentError(f"{name}: expected {clients} entries, one for each of the rates, got {len(x)}")
    return x


def _check_entries(name: str, x: np.ndarray, valid: np.ndarray, expected: str) -> np.ndarray:
    """Check that all entries of `x` are valid, make `x` read-only, and return `x`."""
    for i in np.flatnonzero(~valid)[:1]:
        raise ArgumentError(f"{name}[{i}]: expected {expected}, got {x[i]}")
    x.flags.writeable = False
    return x


class ShortRepr:
    """Base class for dataclasses that contain arrays, with a `repr` of one short line.

    The `repr` shows the shape of each array instead of its entries, and omits the fields that have their default
    values. Subclasses must be dataclasses with `repr=False`.
    """

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        values = ((field, getattr(self, field.name)) for field in fields)
        shown = {f.name: x for f, x in values if f.default is dataclasses.MISSING or x != f.default}
        return format_result(self, **shown)


class ContentEquality:
    """Base class for frozen dataclasses that contain arrays, with equality and hashes based on the contents.

    The methods that `dataclass` generates do not work with NumPy arrays, because `==` compares arrays elementwise.
    """

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._content() == other._content()

    def __hash__(self) -> int:
        return hash((type(self), self._content()))

    def _content(self) -> tuple[object, ...]:
        fields = (getattr(self, field.name) for field in dataclasses.fields(self))  # type: ignore[arg-type]
        return tuple(x.tobytes() if isinstance(x, np.ndarray) else x for x in fields)
