r"""Delay distributions: the duration of a unit of work, drawn by inverse-transform sampling.

$F^{-1}(U)$ has the distribution function F when U is uniform on [0, 1). Every draw takes exactly one number from the
generator, so that runs under one seed stay aligned whatever their distributions, and a draw that is slow under one is
slow under all. U has 53 bits: nothing beyond 8.2 standard deviations of a normal distribution is drawn.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import TypeAlias, TypeVar

import numpy as np

from manifoldagg._validation import check_number, check_vector, short_repr
from manifoldagg.errors import ArgumentError

__all__ = [
    "Delay",
    "DelayFactory",
    "Delays",
    "Deterministic",
    "Exponential",
    "Gaussian",
    "HalfNormal",
    "LogNormal",
    "Uniform",
    "set_fields",
]

S = TypeVar("S", bound="_MeanParametrised")
NORMAL = NormalDist()
MIN_PROBABILITY = 2.0**-1022
MAX_PROBABILITY = 1 - 2.0**-53
HALF_NORMAL_SCALE = math.sqrt(math.pi / 2)
"""Of a half-normal distribution with mean 1."""


class Delay(ABC):
    """A distribution of the seconds for one unit of work; `work` units take `work` times as long."""

    def __deepcopy__(self, memo: object) -> "Delay":
        return self  # a value, of which a scheduler has many

    @abstractmethod
    def _mean(self) -> float: ...

    @abstractmethod
    def _invert(self, probability: float) -> float: ...

    def expected(self, work: float = 1.0) -> float:
        """Return the mean seconds of `work` units."""
        return work * self._mean()

    def quantile(self, probability: float) -> float:
        """Return the quantile of the seconds for one unit of work at `probability`.

        Args:
            probability: in [0, 1); 0 is the least delay there is.

        Raises:
            ArgumentError: if `probability` is outside.
        """
        if check_number("probability", probability, at_least=0, at_most=1) == 1:
            raise ArgumentError(f"probability: expected a number below 1, got {short_repr(probability)}")
        return self._invert(float(probability))

    def draw(self, generator: np.random.Generator, work: float = 1.0) -> float:
        """Draw the seconds of `work` units from one uniform number of the generator."""
        return work * self._invert(generator.random())


@dataclass(frozen=True)
class Deterministic(Delay):
    """A constant delay; a draw consumes one number of the generator nevertheless.

    Args:
        seconds: not negative.

    Raises:
        ArgumentError: if `seconds` does not fit.

    Example:
        >>> Deterministic(2.0).draw(np.random.default_rng(0), work=3.0)
        6.0
    """

    seconds: float

    def __post_init__(self) -> None:
        set_fields(self, seconds=check_number("seconds", self.seconds, at_least=0))

    def _mean(self) -> float:
        return self.seconds

    def _invert(self, probability: float) -> float:
        return self.seconds


@dataclass(frozen=True)
class Gaussian(Delay):
    r"""A normal distribution, truncated at 0.

    With c the ratio of `location` and `scale`, $\Phi$ the normal distribution function and $\varphi$ its density,

    $$F^{-1}(u) = \operatorname{location} + \operatorname{scale} \cdot \Phi^{-1}(\Phi(-c) + u \Phi(c)), \quad
      E = \operatorname{location} + \operatorname{scale} \cdot \varphi(c) / \Phi(c).$$

    Args:
        location: the mean before truncation, positive.
        scale: the standard deviation before truncation, not negative.

    Raises:
        ArgumentError: naming the parameter that does not fit.

    Source: OrthoFL §5.1.

    Example:
        >>> delay = Gaussian(10.0, 10.0)
        >>> round(delay.quantile(0.5), 4), round(delay.expected(), 4)
        (12.0017, 12.876)
    """

    location: float
    scale: float
    _cut_mass: float = field(init=False, repr=False, compare=False)
    _kept_mass: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        location = check_number("location", self.location, above=0)
        scale = check_number("scale", self.scale, at_least=0)
        c = location / scale if scale else math.inf
        set_fields(self, location=location, scale=scale)
        # erfc on both sides: 1 - cut would lose all digits of what is cut off.
        set_fields(self, _cut_mass=math.erfc(c / math.sqrt(2)) / 2, _kept_mass=math.erfc(-c / math.sqrt(2)) / 2)

    @staticmethod
    def fit(delays: Sequence[float] | np.ndarray) -> "Gaussian":
        """Fit the mean and the standard deviation before truncation to measured delays.

        Raises:
            ArgumentError: if `delays` are not measurements.
        """
        x = check_vector("delays", delays, at_least=0)
        return Gaussian(float(x.mean()), float(x.std()))

    def _mean(self) -> float:
        return (
            self.location + self.scale * NORMAL.pdf(self.location / self.scale) / self._kept_mass
            if self.scale
            else self.location
        )

    def _invert(self, probability: float) -> float:
        return max(0.0, self.location + self.scale * _normal_quantile(self._cut_mass + probability * self._kept_mass))


@dataclass(frozen=True)
class LogNormal(Delay):
    r"""A log-normal distribution with a given mean a and standard deviation d of the delays themselves.

    Their logarithm has variance $\sigma^2 = \log(1 + d^2 / a^2)$ and mean $\log a - \sigma^2 / 2$.

    Args:
        mean: a, positive.
        deviation: d, from 0 to $10^6 a$.

    Raises:
        ArgumentError: naming the parameter that does not fit.

    Source: OrthoFL D.4.

    Example:
        >>> delay = LogNormal(mean=10.0, deviation=10.0)
        >>> round(delay.quantile(0.5), 4), delay.expected()
        (7.0711, 10.0)
    """

    mean: float
    deviation: float
    _location: float = field(init=False, repr=False, compare=False)
    _scale: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        mean = check_number("mean", self.mean, above=0)
        deviation = check_number("deviation", self.deviation, at_least=0, at_most=1e6 * mean)
        variance = math.log1p((deviation / mean) ** 2)
        set_fields(self, mean=mean, deviation=deviation)
        set_fields(self, _location=math.log(mean) - variance / 2, _scale=math.sqrt(variance))
        try:
            self._invert(MAX_PROBABILITY)
        except OverflowError:
            raise ArgumentError(
                f"mean: expected delays that are finite, got {short_repr(mean)} +- {short_repr(deviation)}"
            ) from None

    @staticmethod
    def fit(delays: Sequence[float] | np.ndarray) -> "LogNormal":
        """Fit the mean and the standard deviation to measured delays.

        Raises:
            ArgumentError: if `delays` are not measurements.
        """
        x = check_vector("delays", delays, at_least=0)
        return LogNormal(float(x.mean()), float(x.std()))

    def _mean(self) -> float:
        return self.mean

    def _invert(self, probability: float) -> float:
        return math.exp(self._location + self._scale * _normal_quantile(probability)) if probability else 0.0


@dataclass(frozen=True)
class _MeanParametrised(Delay):
    """A distribution whose mean says all."""

    mean: float

    def __post_init__(self) -> None:
        set_fields(self, mean=check_number("mean", self.mean, above=0))

    @classmethod
    def fit(cls: type[S], delays: Sequence[float] | np.ndarray) -> S:
        """With the mean of measured delays.

        Raises:
            ArgumentError: if `delays` are not measurements.
        """
        return cls(float(check_vector("delays", delays, at_least=0).mean()))

    def _mean(self) -> float:
        return self.mean


@dataclass(frozen=True)
class HalfNormal(_MeanParametrised):
    r"""The absolute value of a centred normal distribution of scale $a \sqrt{\pi / 2}$, whose mean is a.

    Args:
        mean: a, positive.

    Raises:
        ArgumentError: if `mean` does not fit.

    Source: OrthoFL D.4.

    Example:
        >>> round(HalfNormal(10.0).quantile(0.5), 4)
        8.4535
    """

    def _invert(self, probability: float) -> float:
        # The lower half of the normal distribution: (1 - u) / 2 is exact where (1 + u) / 2 rounds.
        return self.mean * HALF_NORMAL_SCALE * abs(_normal_quantile((1 - probability) / 2))


@dataclass(frozen=True)
class Uniform(Delay):
    """A uniform distribution from `low` to `high`.

    Args:
        low: not negative.
        high: at least `low`.

    Raises:
        ArgumentError: naming the parameter that does not fit.

    Example:
        >>> Uniform(1.0, 3.0).quantile(0.25)
        1.5
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        low = check_number("low", self.low, at_least=0)
        set_fields(self, low=low, high=check_number("high", self.high, at_least=low))

    @staticmethod
    def fit(delays: Sequence[float] | np.ndarray) -> "Uniform":
        """Fit the 5th and the 95th percentile to measured delays.

        Raises:
            ArgumentError: if `delays` are not measurements.

        Source: OrthoFL D.4.
        """
        low, high = np.percentile(check_vector("delays", delays, at_least=0), [5, 95])
        return Uniform(float(low), float(high))

    def _mean(self) -> float:
        return self.low + (self.high - self.low) / 2

    def _invert(self, probability: float) -> float:
        return self.low + probability * (self.high - self.low)


@dataclass(frozen=True)
class Exponential(_MeanParametrised):
    r"""The exponential distribution: $F^{-1}(u) = -a \log(1 - u)$, of mean a, the inverse of the rate.

    Args:
        mean: a, positive.

    Raises:
        ArgumentError: if `mean` does not fit.

    Example:
        >>> round(Exponential(10.0).quantile(0.5), 4)
        6.9315
    """

    def _invert(self, probability: float) -> float:
        return -self.mean * math.log1p(-probability)


def set_fields(value: object, **fields: object) -> None:
    """Set fields of a frozen dataclass during its construction."""
    for name, content in fields.items():
        object.__setattr__(value, name, content)


def _normal_quantile(probability: float) -> float:
    """The quantile of the normal distribution, finite at both ends."""
    return NORMAL.inv_cdf(
        probability
        if MIN_PROBABILITY <= probability <= MAX_PROBABILITY
        else MIN_PROBABILITY
        if probability < MIN_PROBABILITY
        else MAX_PROBABILITY
    )


DelayFactory: TypeAlias = Callable[[Sequence[int], np.random.Generator], Mapping[int, Delay] | Delay]
"""A function that makes one delay for all clients, or one for each of them."""
Delays: TypeAlias = Delay | Mapping[int, Delay] | str | Path | DelayFactory | None
"""What [`run`][manifoldagg.simulation.run] accepts as delays. A string or a path names a CSV file."""
