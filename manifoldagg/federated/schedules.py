"""Learning-rate schedules, which are functions of the version of the server model.

The version counts the steps of the server model. A rule accepts a constant rate, a schedule of this module, or any
other function that maps the version to a number.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, get_args

import numpy as np
from torch import Tensor

from manifoldagg._validation import check_choice, check_count, check_number, short_repr
from manifoldagg.errors import ArgumentError, ManifoldAggError, RuleError

__all__ = ["Cosine", "Cyclic", "Rate", "Weight", "rate_at", "weight_at"]

Rate = float | Callable[[int], float]
"""A learning rate: a number, or a function of the version."""
Weight = Callable[[int], float]
"""A staleness weight: a function of the staleness, such as the classes of `manifoldagg.federated.staleness`."""


@dataclass(frozen=True)
class Cyclic:
    r"""Cyclic learning-rate schedule with a triangular shape.

    In each period of $T$ versions, the learning rate increases linearly from its minimum $a$ to its maximum $b$ and
    then decreases linearly to $a$. At version $\tau$ of the server model, the learning rate is

    $$\eta(\tau) = a + (b - a)\left(1 - \left|\frac{2 (\tau \bmod T)}{T} - 1\right|\right).$$

    Args:
        low: the smallest rate $a \ge 0$.
        high: the largest rate $b \ge a$.
        period: the period $T \ge 2$, in versions.

    Raises:
        ArgumentError: if an option is out of range.

    Source: Smith 2017 (Cyclical Learning Rates for Training Neural Networks), the triangular schedule.

    Example:
        >>> [Cyclic(0.0, 1.0, 4)(version) for version in range(6)]
        [0.0, 0.5, 1.0, 0.5, 0.0, 0.5]
    """

    low: float
    high: float
    period: int

    def __post_init__(self) -> None:
        check_options(self)
        check_number("low", self.low, at_least=0)
        check_number("high", self.high, at_least=self.low, above=0)
        check_count("period", self.period, at_least=2)

    def __call__(self, version: int) -> float:
        return self.low + (self.high - self.low) * (1 - abs(2 * (version % self.period) / self.period - 1))


@dataclass(frozen=True)
class Cosine:
    r"""Cosine learning-rate schedule.

    During the first $T$ steps of the server, the learning rate follows half a period of a cosine from $a$ to $b$.
    Afterwards, it remains constant at $b$. After $\tau$ steps, at version $\tau$ of the server model, it is

    $$\eta(\tau) = b + \tfrac12 (a - b)\left(1 + \cos \frac{\pi \min(\tau, T)}{T}\right).$$

    Args:
        start: the first rate $a > 0$.
        end: the last rate $b \ge 0$.
        period: the period $T \ge 1$, in versions.
        restarts: whether the schedule restarts every $T$ versions, with $\tau \bmod T$ in place of $\min(\tau, T)$.

    Raises:
        ArgumentError: if an option is out of range.

    Source: Loshchilov and Hutter 2017 (SGDR: Stochastic Gradient Descent with Warm Restarts).

    Example:
        >>> [round(Cosine(1.0, 0.0, 4)(version), 3) for version in range(6)]
        [1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    """

    start: float
    end: float
    period: int
    restarts: bool = False

    def __post_init__(self) -> None:
        check_options(self)
        check_number("start", self.start, above=0)
        check_number("end", self.end, at_least=0)
        check_count("period", self.period)

    def __call__(self, version: int) -> float:
        place = version % self.period if self.restarts else min(version, self.period)
        return self.end + 0.5 * (self.start - self.end) * (1 + math.cos(math.pi * (place / self.period)))


def check_rate(rate: Rate, name: str = "rate") -> Rate:
    """Return `rate` if it is a positive number or a function of the version.

    Raises:
        ArgumentError: if `rate` is neither of them, or if it is a class instead of an instance.
    """
    if not callable(rate):
        return check_number(name, rate, above=0)
    check_function(name, rate)
    return rate


def rate_at(rate: Rate, version: int) -> float:
    r"""Return the rate $\eta(\tau)$ at the version $\tau$ as a number.

    Args:
        rate: a number, or a function of the version.
        version: the version $\tau \ge 0$ of the model.

    Raises:
        RuleError: if `rate` is a function that does not return a finite number $\ge 0$. Exceptions of the function
            propagate.

    Example:
        >>> rate_at(lambda version: 1 / (version + 1), 3)
        0.25
    """
    return _evaluate("rate", rate, version) if callable(rate) else float(rate)


def weight_at(weight: Weight, staleness: int) -> float:
    """Return the staleness weight $s(x)$ at the staleness $x$ as a number.

    Args:
        weight: a function of the staleness, such as those of `manifoldagg.federated.staleness`.
        staleness: the staleness of the update, in versions.

    Raises:
        RuleError: if `weight` does not return a finite number >= 0. Exceptions of `weight` propagate.

    Example:
        >>> weight_at(lambda staleness: 0.5**staleness, 2)
        0.25
    """
    return _evaluate("staleness", weight, staleness)


def _evaluate(name: str, function: Callable[[int], float], argument: int) -> float:
    try:
        given = function(argument)
        where = f"{name}({short_repr(argument)})"
        _check_plain_number(where, given)
        return check_number(where, given, at_least=0)
    except ManifoldAggError as error:
        raise RuleError(str(error)) from error


def check_function(name: str, function: Callable[[int], float]) -> None:
    """Check that `function` is a callable and not a class.

    Raises:
        ArgumentError: if `function` is not callable, or if it is a class instead of an instance.
    """
    if isinstance(function, type):
        raise ArgumentError(f"{name}: expected an instance, got the class {function.__name__}")
    if not callable(function):
        raise ArgumentError(f"{name}: expected a function of an int, got {short_repr(function)}")


def check_options(options: Any) -> None:
    """Check that the options of a rule, schedule or trainer, which is a dataclass, match their type annotations.

    The function checks the options that are booleans, numbers, learning rates (type `Rate`) or functions of the
    staleness (type `Weight`). It rejects tensors and arrays in place of numbers, because they are mutable.

    Raises:
        ArgumentError: if an option is invalid.
    """
    for option in fields(options):
        value = getattr(options, option.name)
        kinds = (option.type, *get_args(option.type))
        if int in kinds or float in kinds:
            _check_plain_number(option.name, value)
        if option.type is bool:
            check_choice(option.name, value, (True, False))
        elif option.type == Rate:
            check_rate(value, option.name)
        elif option.type == Weight:
            check_function(option.name, value)


def _check_plain_number(name: str, value: Any) -> None:
    if isinstance(value, Tensor | np.ndarray):
        raise ArgumentError(f"{name}: expected a plain number, got {short_repr(value)}")
