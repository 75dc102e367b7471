"""Staleness weights, with which rules reduce the influence of stale updates.

The staleness x of an update is the number of server steps since the client received its model. The rule multiplies its
learning rate, or the weight of the update in a mean, by the staleness weight s(x).
"""

import sys
from dataclasses import dataclass

from manifoldagg._validation import check_number
from manifoldagg.federated.schedules import check_options

__all__ = ["Constant", "Hinge", "Polynomial"]

MAX_STALENESS = sys.float_info.max
"""The largest staleness in the formulas, because Python cannot convert larger integers to floats."""


@dataclass(frozen=True)
class Constant:
    """Constant staleness weight $s(x) = 1$."""

    def __call__(self, staleness: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Polynomial:
    r"""Polynomial staleness weight $s(x) = (x + 1)^{-a}$ for the staleness $x$.

    Args:
        a: the exponent $a \ge 0$. A larger exponent reduces the weight of stale updates more.

    Raises:
        ArgumentError: if `a` is negative.

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
    r"""Staleness weight that is 1 up to a threshold and decreases for staler updates.

    An update with the staleness $x$ has the weight $s(x) = 1$ if $x \le b$, and $s(x) = 1 / (a (x - b) + 1)$ otherwise.

    Args:
        a: the slope $a \ge 0$ of the denominator.
        b: the threshold $b \ge 0$ of the staleness $x$, in versions.

    Raises:
        ArgumentError: if an option is negative.

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
