r"""Distributions of the time that a client needs for one unit of work. Invalid parameters raise an `ArgumentError`.

A delay is drawn by the inverse-transform method as $F^{-1}(U)$. Here, $F$ is the cumulative distribution function of
the delay, and $U$ is a random number with 53 bits that is uniform on [0, 1).

- Each draw uses exactly one value of $U$. Two runs with the same seed therefore use the same values of $U$, even if
  their distributions differ.
- $U$ is at most $1 - 2^{-53}$, so draws are bounded. A normal draw is at most 8.2 standard deviations above its mean.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import TypeAlias, TypeVar

import numpy as np

from manifoldagg._validation import check_number, check_vector, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.simulation.clock import check_generator
from manifoldagg.simulation.measurements import read_measurements

__all__ = [
    "Delay",
    "DelayFactory",
    "Delays",
    "Deterministic",
    "Empirical",
    "Exponential",
    "Gaussian",
    "HalfNormal",
    "LogNormal",
    "Uniform",
    "assign_profiles",
    "set_fields",
]

C = TypeVar("C", bound=int | str)
D = TypeVar("D", bound="Delay")
S = TypeVar("S", bound="_MeanParametrised")
NORMAL = NormalDist()
MIN_PROBABILITY = 2.0**-1022
MAX_PROBABILITY = 1 - 2.0**-53
HALF_NORMAL_SCALE = math.sqrt(math.pi / 2)
"""The scale of a half-normal distribution with mean 1."""


class Delay(ABC):
    """Base class for distributions of the time in seconds that a client needs for one unit of work.

    By default, a task of `work` units takes `work` times as long as one unit. A subclass implements `mean_of_unit`,
    which returns the mean, and `inverse_cdf`, which returns quantiles. Instances must be immutable, so a subclass is
    usually a frozen dataclass.

    Example:
        >>> @dataclass(frozen=True)
        ... class Triangular(Delay):
        ...     longest: float
        ...     def mean_of_unit(self):
        ...         return self.longest / 2
        ...     def inverse_cdf(self, probability):
        ...         left = math.sqrt(probability / 2)
        ...         return self.longest * (left if probability < 0.5 else 1 - math.sqrt((1 - probability) / 2))
        >>> Triangular(4.0).quantile(0.5), Triangular(4.0).expected(work=3.0)
        (2.0, 6.0)
    """

    def __deepcopy__(self, memo: object) -> "Delay":
        return self  # delays are immutable, so a copy of a scheduler shares them

    @abstractmethod
    def mean_of_unit(self) -> float:
        """Return the mean seconds of one unit of work."""

    @abstractmethod
    def inverse_cdf(self, probability: float) -> float:
        """Return a quantile of the time that one unit of work takes.

        An implementation must be non-decreasing in `probability`.

        Args:
            probability: the level of the quantile, a number in [0, 1).

        Returns:
            The quantile in seconds.
        """

    def expected(self, work: float = 1.0) -> float:
        """Return the mean seconds of `work` units."""
        return work * self.mean_of_unit()

    def quantile(self, probability: float) -> float:
        """Return the quantile of the seconds for one unit of work at `probability`.

        Args:
            probability: the probability, in [0, 1). The quantile of 0 is the smallest delay.

        Raises:
            ArgumentError: if `probability` is outside of [0, 1).
        """
        if check_number("probability", probability, at_least=0, at_most=1) == 1:
            raise ArgumentError(f"probability: expected a number below 1, got {short_repr(probability)}")
        return self.inverse_cdf(float(probability))

    def draw(self, generator: np.random.Generator, work: float = 1.0) -> float:
        """Draw the seconds of `work` units from one uniform number of the generator."""
        return work * self.inverse_cdf(generator.random())


@dataclass(frozen=True)
class Deterministic(Delay):
    """Constant delay. A draw still consumes one number of the generator.

    Args:
        seconds: the delay, which must not be negative.

    Example:
        >>> Deterministic(2.0).draw(np.random.default_rng(0), work=3.0)
        6.0
    """

    seconds: float

    def __post_init__(self) -> None:
        set_fields(self, seconds=check_number("seconds", self.seconds, at_least=0))

    def mean_of_unit(self) -> float:
        return self.seconds

    def inverse_cdf(self, probability: float) -> float:
        return self.seconds


@dataclass(frozen=True)
class Gaussian(Delay):
    r"""Normal distribution of delays that is truncated at 0, because delays are not negative.

    Let $c$ be the ratio of `location` and `scale`. Let $\Phi$ and $\varphi$ be the distribution function and the
    density of the standard normal distribution. The quantile function and the mean of the delays are

    $$F^{-1}(u) = \operatorname{location} + \operatorname{scale} \cdot \Phi^{-1}(\Phi(-c) + u \Phi(c)), \quad
      E = \operatorname{location} + \operatorname{scale} \cdot \varphi(c) / \Phi(c).$$

    Args:
        location: the mean before truncation, which must be positive.
        scale: the standard deviation before truncation, which must not be negative.

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
        # Both probabilities use erfc, because 1 minus a probability close to 1 has no correct digits.
        set_fields(self, _cut_mass=math.erfc(c / math.sqrt(2)) / 2, _kept_mass=math.erfc(-c / math.sqrt(2)) / 2)

    @staticmethod
    def fit(delays: Sequence[float] | np.ndarray) -> "Gaussian":
        r"""Fit `location` and `scale` to n measured delays $x_i$, as if the distribution were not truncated at 0.

        $$\operatorname{location} = \mu_R = \frac 1 n \sum_i x_i, \quad
          \operatorname{scale} = \sigma_R = \sqrt{\frac 1 n \sum_i (x_i - \mu_R)^2}.$$

        Truncation removes the negative delays, so the fitted distribution has a mean above $\mu_R$. With a single
        measurement, `scale` is 0 and the delay is constant.

        Source: OrthoFL §5.1.
        """
        x = check_vector("delays", delays, at_least=0)
        return Gaussian(float(x.mean()), float(x.std()))

    def mean_of_unit(self) -> float:
        return (
            self.location + self.scale * NORMAL.pdf(self.location / self.scale) / self._kept_mass
            if self.scale
            else self.location
        )

    def inverse_cdf(self, probability: float) -> float:
        return max(0.0, self.location + self.scale * _normal_quantile(self._cut_mass + probability * self._kept_mass))


@dataclass(frozen=True)
class LogNormal(Delay):
    r"""Log-normal distribution of delays with the mean $a$ and the standard deviation $d$.

    The logarithm of a delay is normally distributed. It has the variance $\sigma^2 = \log(1 + d^2 / a^2)$ and the mean
    $\log a - \sigma^2 / 2$.

    Args:
        mean: the mean a, which must be positive.
        deviation: the standard deviation d, from 0 to $10^6 a$.

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
            self.inverse_cdf(MAX_PROBABILITY)
        except OverflowError:
            raise ArgumentError(
                f"mean: expected finite delays, got {short_repr(mean)} +- {short_repr(deviation)}"
            ) from None

    @staticmethod
    def fit(delays: Sequence[float] | np.ndarray) -> "LogNormal":
        r"""Fit a log-normal distribution to the mean and the standard deviation of n measured delays $x_i$.

        $$\mu_R = \frac 1 n \sum_i x_i, \quad \sigma_R = \sqrt{\frac 1 n \sum_i (x_i - \mu_R)^2}.$$

        The fitted distribution has the mean $\mu_R$ and the standard deviation $\sigma_R$. The logarithm of a delay has
        the variance $v = \log(1 + \sigma_R^2 / \mu_R^2)$ and the mean $\log \mu_R - v / 2$. This fit differs from the
        maximum-likelihood fit, which uses the logarithms $\log x_i$. With a single measurement, $\sigma_R$ is 0 and the
        delay is constant.

        Source: OrthoFL D.4.
        """
        x = check_vector("delays", delays, at_least=0)
        return LogNormal(float(x.mean()), float(x.std()))

    def mean_of_unit(self) -> float:
        return self.mean

    def inverse_cdf(self, probability: float) -> float:
        return math.exp(self._location + self._scale * _normal_quantile(probability)) if probability else 0.0


@dataclass(frozen=True)
class _MeanParametrised(Delay):
    """Base class for distributions with the mean as their only parameter."""

    mean: float

    def __post_init__(self) -> None:
        set_fields(self, mean=check_number("mean", self.mean, above=0))

    @classmethod
    def fit(cls: type[S], delays: Sequence[float] | np.ndarray) -> S:
        r"""Fit the distribution to n measured delays $x_i$ with the mean $a = \frac 1 n \sum_i x_i$.

        The fitted distribution has the mean $a$:

        - For the exponential distribution, this is the maximum-likelihood fit.
        - A half-normal delay is the absolute value of a normal variable with the mean 0. The standard deviation of this
          variable is $a \sqrt{\pi / 2}$.

        Source: OrthoFL D.4. The paper does not state the standard deviation of the half-normal fit.
        """
        return cls(float(check_vector("delays", delays, at_least=0).mean()))

    def mean_of_unit(self) -> float:
        return self.mean


@dataclass(frozen=True)
class HalfNormal(_MeanParametrised):
    r"""Half-normal distribution of delays with the mean $a$.

    A delay is the absolute value of a normal variable with mean 0 and standard deviation $a \sqrt{\pi / 2}$.

    Args:
        mean: the mean a, which must be positive.

    Source: OrthoFL D.4.

    Example:
        >>> round(HalfNormal(10.0).quantile(0.5), 4)
        8.4535
    """

    def inverse_cdf(self, probability: float) -> float:
        # The lower half of the normal distribution is used, because (1 - u) / 2 is exact and (1 + u) / 2 is not.
        return self.mean * HALF_NORMAL_SCALE * abs(_normal_quantile((1 - probability) / 2))


@dataclass(frozen=True)
class Uniform(Delay):
    """Uniform distribution from `low` to `high`.

    Args:
        low: the smallest delay, which must not be negative.
        high: the largest delay, which must be at least `low`.

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
        r"""Fit `low` and `high` to the 5th and the 95th percentile of n measured delays.

        Let $x_{(0)} \le \dots \le x_{(n - 1)}$ be the sorted delays. The p-th percentile is at the position
        $j + \epsilon = (n - 1) p / 100$ among them, where $j$ is an integer and $0 \le \epsilon < 1$. Its value is the
        linear interpolation $(1 - \epsilon) x_{(j)} + \epsilon x_{(j + 1)}$. With a single measurement, both
        percentiles are equal and the delay is constant.

        Source: OrthoFL D.4.
        """
        low, high = np.percentile(check_vector("delays", delays, at_least=0), [5, 95])
        return Uniform(float(low), float(high))

    def mean_of_unit(self) -> float:
        return self.low + (self.high - self.low) / 2

    def inverse_cdf(self, probability: float) -> float:
        return self.low + probability * (self.high - self.low)


@dataclass(frozen=True)
class Exponential(_MeanParametrised):
    r"""Exponential distribution of delays with the mean $a$, which is the inverse of the rate.

    The quantile function is $F^{-1}(u) = -a \log(1 - u)$.

    Args:
        mean: the mean a, which must be positive.

    Example:
        >>> round(Exponential(10.0).quantile(0.5), 4)
        6.9315
    """

    def inverse_cdf(self, probability: float) -> float:
        return -self.mean * math.log1p(-probability)


@dataclass(frozen=True)
class Empirical(Delay):
    r"""Empirical distribution of the times of measured tasks.

    Each draw selects one measured task $i$ at random, and all measured tasks are equally likely. A simulated task of
    `work` units then takes $\operatorname{work} \cdot t_i + c_i$ seconds. The computation time $t_i$ is multiplied by
    the work, but the communication time $c_i$ does not depend on the work.

    Args:
        computation: the computation times $t_i$ in seconds per unit of work, (n,).
        communication: the communication times $c_i$ in seconds per task, (n,). The default is 0.

    Example:
        >>> delay = Empirical((1.0, 3.0), (0.5, 0.25))
        >>> delay.quantile(0.75), delay.expected(), delay.expected(work=2.0)
        (3.25, 2.375, 4.375)
    """

    computation: tuple[float, ...]
    communication: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        computation = check_vector("computation", self.computation, at_least=0)
        none = isinstance(self.communication, tuple | list) and not self.communication
        sent = np.zeros_like(computation) if none else check_vector("communication", self.communication, at_least=0)
        if len(sent) != len(computation):
            raise ArgumentError(f"communication: expected {len(computation)} tasks as in computation, got {len(sent)}")
        order = np.argsort(computation + sent, kind="stable")
        set_fields(self, computation=tuple(computation[order].tolist()), communication=tuple(sent[order].tolist()))

    @property
    def delays(self) -> tuple[float, ...]:
        """The sorted delays of the measured tasks for one unit of work, (n,), in seconds."""
        return tuple(t + c for t, c in zip(self.computation, self.communication, strict=True))

    def expected(self, work: float = 1.0) -> float:
        return work * float(np.mean(self.computation)) + float(np.mean(self.communication))

    def draw(self, generator: np.random.Generator, work: float = 1.0) -> float:
        i = int(generator.random() * len(self.computation))
        return work * self.computation[i] + self.communication[i]

    def mean_of_unit(self) -> float:
        return float(np.mean(self.delays))

    def inverse_cdf(self, probability: float) -> float:
        return self.delays[int(probability * len(self.computation))]

    @staticmethod
    def from_csv(path: Path | str, *, work: float = 1.0, size_ratio: float = 1.0) -> "dict[str, Empirical]":
        """Read the measured times of devices from a CSV file.

        Each row of the file describes one measured task. These columns are required, and other columns are ignored:

        - `client`: the name of the device that ran the task.
        - `computation_s`: the computation time in seconds.
        - `round_s`: the time of the whole task in seconds, including communication.

        Args:
            path: the path of a CSV file with a header.
            work: the number of units of work per measured task. Computation times are divided by this number.
            size_ratio: the bytes of the simulated model divided by the bytes of the measured model. Communication times
                are multiplied by this ratio.

        Returns:
            The distribution of each device, in the order of the first lines of the devices.

        Raises:
            ArgumentError: if the file is invalid. The message names the file and the line.

        Source: OrthoFL D.4.
        """
        check_number("work", work, above=0)
        check_number("size_ratio", size_ratio, at_least=0)
        return {
            device: Empirical(tuple(t / work for t, _ in tasks), tuple(c * size_ratio for _, c in tasks))
            for device, tasks in read_measurements(path).items()
        }


def assign_profiles(profiles: Mapping[str, D], clients: Iterable[C], generator: np.random.Generator) -> dict[C, D]:
    """Draw a delay distribution for each client at random, with replacement.

    Args:
        profiles: the distributions, such as the result of `Empirical.from_csv`.
        clients: the clients.
        generator: the random generator. It draws one number per client.

    Raises:
        ArgumentError: if `profiles` is empty.

    Source: OrthoFL §5.1.

    Example:
        >>> assign_profiles({"pi": Empirical((1.0,))}, range(2), np.random.default_rng(0))[1].delays
        (1.0,)
    """
    check_generator(generator)
    if not profiles:
        raise ArgumentError("profiles: expected at least one profile, got an empty mapping")
    listed = list(profiles.values())
    return {client: listed[int(generator.integers(len(listed)))] for client in clients}


def set_fields(value: object, **fields: object) -> None:
    """Set fields of a frozen dataclass during its construction."""
    for name, content in fields.items():
        object.__setattr__(value, name, content)


def _normal_quantile(probability: float) -> float:
    """Return the standard normal quantile, clamped to be finite at both ends of [0, 1]."""
    return NORMAL.inv_cdf(
        probability
        if MIN_PROBABILITY <= probability <= MAX_PROBABILITY
        else MIN_PROBABILITY
        if probability < MIN_PROBABILITY
        else MAX_PROBABILITY
    )


DelayFactory: TypeAlias = Callable[[Sequence[int], np.random.Generator], Mapping[int, Delay] | Delay]
"""A function of the clients and a random generator that returns one delay for all clients, or one for each client."""
Delays: TypeAlias = Delay | Mapping[int, Delay] | str | Path | DelayFactory | None
"""The type of the argument `delays` of [`run`][manifoldagg.simulation.run]. A string or a path names a CSV file."""
