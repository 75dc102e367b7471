r"""Bounds on the gradient norm as functions of a routing: per update (G) and per unit of time (H).

With $B = 2M^2 + \sigma^2$ the noise, L the smoothness, A the gap $f(w_0) - f^*$, $\eta$ the rate of the server,

$$G = \frac{A}{\eta (T+1)} + \frac{\eta L B}{n^2} \sum_i \frac{1}{p_i}
      + \frac{\eta^2 L^2 B m}{n^2} \sum_i \frac{E[X_i]}{p_i^2}, \quad
  H = \frac{1}{\lambda} (\frac{A}{\eta} + \frac{\eta L B}{n^2} \sum_i \frac{1}{p_i}
      + \frac{\eta^2 L^2 B m}{n^2} \sum_i \frac{E[\xi_i]}{p_i^2}) .$$

Both are formulas in p > 0 that do not need $\sum_i p_i = 1$: with $\rho_i = p_i / \mu_i$, $E[X]$ and $E[\xi]$ depend on
the ratios of p only, and $\lambda = Z_{n,m-1} / Z_{n,m}$ is of degree -1. Their derivatives as such are the free
partial derivatives; routings see the part of them that sums to 0.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from manifoldagg._validation import check_count, check_number, check_vector
from manifoldagg.errors import ArgumentError, DivergenceError
from manifoldagg.routing._arguments import ContentEquality, ShortRepr, positive_vector, rate_vector, routing_vector
from manifoldagg.routing.mean_values import directional_mean_values, mean_values

__all__ = ["Bound", "TimeBound", "UpdateBound", "softmax"]

MeanAndProduct = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False, repr=False)
class Bound(ContentEquality, ShortRepr):
    """Base class of bounds: the constants of a problem, with the bound as a function of the routing.

    Args:
        rates: of the clients, (n,), tasks per unit of time.
        concurrency: m, in the network at any time.
        rate: η, by which the server multiplies updates. That the bounds hold only for small ones is not checked.
        smoothness: L.
        noise: B = 2M² + σ², of the heterogeneity M² of the clients and the variance σ² of their gradients.
        gap: A.

    Raises:
        ArgumentError: naming what does not fit.
    """

    rates: np.ndarray | Sequence[float]
    concurrency: int
    rate: float
    smoothness: float
    noise: float
    gap: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "rates", rate_vector(self.rates))
        object.__setattr__(self, "concurrency", check_count("concurrency", self.concurrency))
        for name in ("rate", "smoothness"):
            object.__setattr__(self, name, check_number(name, getattr(self, name), above=0))
        for name in ("noise", "gap"):
            object.__setattr__(self, name, check_number(name, getattr(self, name), at_least=0))
        if self.noise == self.gap == 0:
            raise ArgumentError("noise: expected a number > 0 where the gap is 0, got 0: nothing is left to bound")

    def __call__(self, p: np.ndarray | Sequence[float]) -> float:
        """Evaluate the bound at a positive routing p, (n,), whose sum is 1 up to 1e-6; it is not rescaled.

        Raises:
            ArgumentError: if p is no such routing.
            DivergenceError: if a share is so small that the bound overflows.
        """
        return self._value(self._check_routing(p))

    def unnormalised(self, p: np.ndarray | Sequence[float]) -> float:
        """Evaluate the formula at any p > 0, (n,), whose sum need not be 1; `gradient` differentiates it.

        Raises:
            ArgumentError: if an entry is not positive.
            DivergenceError: as the call.
        """
        return self._value(positive_vector("p", p, self.clients))

    def gradient(self, p: np.ndarray | Sequence[float]) -> np.ndarray:
        r"""Compute the free partial derivatives $\partial / \partial p_j$ of `unnormalised`, (n,).

        Along routings only the differences of its entries matter.

        Raises:
            ArgumentError: if p is not a routing with positive shares.
            DivergenceError: as the call.

        Cost: O(nm), one sweep forward, as the Jacobian of the means in log p is symmetric.
        """
        return self.value_and_gradient(p)[1]

    def value_and_gradient(self, p: np.ndarray | Sequence[float]) -> tuple[float, np.ndarray]:
        """Compute the value and the gradient at the cost of one."""
        return self._value_and_slope(self._check_routing(p))

    def logit_gradient(self, theta: np.ndarray | Sequence[float]) -> np.ndarray:
        r"""Compute the gradient at $p = \operatorname{softmax}(\theta)$: $p_j (g_j - \langle p, g \rangle)$, (n,).

        Raises:
            ArgumentError: if theta does not fit, or is so extreme that a share is 0.

        Source: Queue, appendix E.
        """
        p = positive_vector("softmax(theta)", softmax(check_vector("theta", theta)), self.clients)
        gradient = self._value_and_slope(p)[1]
        slope: np.ndarray = p * (gradient - float(p @ gradient))
        return slope

    def over_concurrency(self, routing: np.ndarray | Sequence[float]) -> Iterator[tuple[float, float]]:
        r"""Yield the bound for m = 1, 2, 3, ..., and a lower bound for that many tasks *and more*.

        Without end, O(n) a step. The lower bound is certain: means and throughput grow with the tasks, and the
        throughput stays below $1 / \max_i \rho_i$.

        Raises:
            ArgumentError: if `routing` is not a routing with positive shares.
        """
        p = self._check_routing(routing)
        loads = p / np.asarray(self.rates)
        scale = float(loads.max())
        before = np.zeros_like(p)
        for tasks, (rate, means) in enumerate(mean_values(loads / scale), start=1):
            value = self._formula(p, tasks, rate / scale, before, means)
            yield value, self._formula(p, tasks, 1 / scale, before, means)
            before = means

    @property
    def clients(self) -> int:
        """The number of clients n."""
        return len(self.rates)

    def _check_routing(self, p: np.ndarray | Sequence[float]) -> np.ndarray:
        return routing_vector(p, self.clients, positive=True)

    def _value(self, p: np.ndarray) -> float:
        loads = p / np.asarray(self.rates)
        scale = float(loads.max())
        means = np.zeros_like(p)
        for rate, after in islice(mean_values(loads / scale), self.concurrency):
            before = means
            means = after
            throughput = rate / scale
        return self._formula(p, self.concurrency, throughput, before, means)

    def _value_and_slope(self, p: np.ndarray) -> tuple[float, np.ndarray]:
        loads = p / np.asarray(self.rates)
        scale = float(loads.max())
        before = last = (0.0, np.zeros_like(p), np.zeros_like(p))
        with np.errstate(all="ignore"):
            for step in islice(directional_mean_values(loads / scale, 1 / p**2), self.concurrency):
                before = last
                last = step
            value = self._formula(p, self.concurrency, last[0] / scale, before[1], last[1])
            gradient = self._slope(p, value, last[0] / scale, before[1:], last[1:])
        if not np.isfinite(gradient).all():
            raise DivergenceError(f"the gradient of the bound overflows at a smallest share of {p.min():g}")
        return value, gradient

    def _formula(
        self, p: np.ndarray, concurrency: int, throughput: float, others: np.ndarray, means: np.ndarray
    ) -> float:
        """The bound from λ, E[X] and E[ξ]."""
        raise NotImplementedError

    def _slope(
        self, p: np.ndarray, value: float, throughput: float, others: MeanAndProduct, means: MeanAndProduct
    ) -> np.ndarray:
        """Its gradient, from each of E[X] and E[ξ] with its covariance applied to 1/p²."""
        raise NotImplementedError

    def _error_terms(self, p: np.ndarray, concurrency: int, delays: np.ndarray) -> float:
        """The sum of the two terms that every bound has: of gradients, and of their staleness."""
        with np.errstate(all="ignore"):
            noise, stale = self._factors(concurrency)
            value = noise * float((1 / p).sum()) + stale * float((delays / p / p).sum())
        if not math.isfinite(value):
            raise DivergenceError(f"the bound overflows at a smallest share of {p.min():g}")
        return value

    def _error_terms_slope(self, p: np.ndarray, delays: np.ndarray, moved: np.ndarray) -> np.ndarray:
        noise, stale = self._factors(self.concurrency)
        slope: np.ndarray = (stale * (moved - 2 * delays / p / p) - noise / p) / p
        return slope

    def _factors(self, concurrency: int) -> tuple[float, float]:
        noise = self.rate * self.smoothness * self.noise / self.clients**2
        return noise, noise * self.rate * self.smoothness * concurrency


@dataclass(frozen=True, eq=False, repr=False)
class UpdateBound(Bound):
    r"""The bound G on an eighth of the mean of $\| \nabla f \|^2$ over the updates, as a function of the routing.

    $$G(p) = \frac{A}{\eta (T+1)} + \frac{\eta L B}{n^2} \sum_i \frac{1}{p_i}
      + \frac{\eta^2 L^2 B m}{n^2} \sum_i \frac{E[X_i]}{p_i^2}, \quad X \sim \pi_{n,m-1}$$

    Args:
        rates: and the other constants as in `Bound`.
        num_updates: T >= 0, the updates that there will be.

    Source: Queue (5), appendix E.

    Example:
        >>> bound = UpdateBound([1.0, 2.0], concurrency=3, rate=0.1, smoothness=1.0, noise=1.0, gap=1.0, num_updates=9)
        >>> round(bound([0.5, 0.5]), 12)  # 1/(.1 · 10) + .1 + .01 · 3 · 2
        1.16
        >>> bound.gradient([0.5, 0.5]).round(3).tolist()
        [-0.271, -0.169]
    """

    num_updates: int

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "num_updates", check_count("num_updates", self.num_updates, at_least=0))

    def _formula(
        self, p: np.ndarray, concurrency: int, throughput: float, others: np.ndarray, means: np.ndarray
    ) -> float:
        return self.gap / (self.rate * (self.num_updates + 1)) + self._error_terms(p, concurrency, others)

    def _slope(
        self, p: np.ndarray, value: float, throughput: float, others: MeanAndProduct, means: MeanAndProduct
    ) -> np.ndarray:
        return self._error_terms_slope(p, *others)


@dataclass(frozen=True, eq=False, repr=False)
class TimeBound(Bound):
    r"""The bound H on an eighth of the mean of $\| \nabla f \|^2$ times the duration of an update.

    $$H(p) = \frac{1}{\lambda} (\frac{A}{\eta} + \frac{\eta L B}{n^2} \sum_i \frac{1}{p_i}
      + \frac{\eta^2 L^2 B m}{n^2} \sum_i \frac{E[\xi_i]}{p_i^2}), \quad \xi \sim \pi_{n,m}$$

    Args:
        rates: and the other constants as in `Bound`.

    Source: Queue (12), appendix F, whose gradient is written anew here:
    $\partial \log \lambda / \partial \log p_j = E[X_j] - E[\xi_j]$.

    Example:
        >>> bound = TimeBound([1.0, 1.0], concurrency=3, rate=0.1, smoothness=1.0, noise=1.0, gap=1.0)
        >>> round(bound([0.5, 0.5]), 12)  # (10 + .1 + .01 · 3 · 3) · 4 / 6
        6.793333333333
    """

    def _formula(
        self, p: np.ndarray, concurrency: int, throughput: float, others: np.ndarray, means: np.ndarray
    ) -> float:
        return (self.gap / self.rate + self._error_terms(p, concurrency, means)) / throughput

    def _slope(
        self, p: np.ndarray, value: float, throughput: float, others: MeanAndProduct, means: MeanAndProduct
    ) -> np.ndarray:
        slope: np.ndarray = self._error_terms_slope(p, *means) / throughput + value * (means[0] - others[0]) / p
        return slope


def softmax(theta: np.ndarray) -> np.ndarray:
    """Compute shares in the ratios of exp(theta)."""
    shares: np.ndarray = np.exp(theta - theta.max())
    shares /= shares.sum()
    return shares
