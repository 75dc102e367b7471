"""Staleness weights: factors s(x) for updates with staleness x."""

import sys
from dataclasses import dataclass

from manifoldagg._validation import check_number
from manifoldagg.federated.schedules import check_options

__all__ = ["Constant", "Hinge", "Polynomial"]

MAX_STALENESS = sys.float_info.max
"""The largest staleness in formulas. Python cannot convert larger integers to floats."""


@dataclass(frozen=True)
class Constant:
    """The constant weight $s(x) = 1$."""

    def __call__(self, staleness: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Polynomial:
    """The polynomial weight $s(x) = (x + 1)^{-a}$.

    Example:
        >>> Polynomial(0.5)(3)
        0.5
    """

    a: float = 0.5

    def __post_init__(self) -> None:
        check_options(self)
        check_number("a", self.a, at_least=0)

    def __call__(self, staleness: int) -> float:
        return float(min(staleness + 1, MAX_STALENESS) ** -self.a)


@dataclass(frozen=True)
class Hinge:
    r"""The hinge weight: $s(x) = 1$ if $x \le b$, else $1 / (a (x - b) + 1)$.

    Example:
        >>> Hinge(a=1.0, b=4.0)(7)
        0.25
    """

    a: float = 10.0
    b: float = 4.0

    def __post_init__(self) -> None:
        check_options(self)
        check_number("a", self.a, at_least=0)
        check_number("b", self.b, at_least=0)

    def __call__(self, staleness: int) -> float:
        return 1.0 if staleness <= self.b else 1.0 / (self.a * (min(staleness, MAX_STALENESS) - self.b) + 1)
