r"""Bounds on the gradient norm as functions of a routing: per update (G) and per unit of time (H).

$B = 2M^2 + \sigma^2$ is the noise, L the smoothness, A the gap $f(w_0) - f^*$, and $\eta$ the rate of the server. A run
has T + 1 rounds. As in the paper, a *round* is the interval between two consecutive updates.

$$G = \frac{A}{\eta (T+1)} + \frac{\eta L B}{n^2} \sum_i \frac{1}{p_i}
      + \frac{\eta^2 L^2 B m}{n^2} \sum_i \frac{E[X_i]}{p_i^2}, \quad
  H = \frac{1}{\lambda} (\frac{A}{\eta (T+1)} + \frac{\eta L B}{n^2} \sum_i \frac{1}{p_i}
      + \frac{\eta^2 L^2 B m}{n^2} \sum_i \frac{E[\xi_i]}{p_i^2}) .$$

Both formulas are defined for every p > 0, even if $\sum_i p_i \ne 1$. With $\rho_i = p_i / \mu_i$, the means $E[X]$ and
$E[\xi]$ depend only on the ratios of p, and $\lambda = Z_{n,m-1} / Z_{n,m}$ is homogeneous of degree -1. The partial
derivatives ignore the constraint $\sum_i p_i = 1$. For routings, only the differences of the partial derivatives
matter.
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
    """Base class for convergence bounds of asynchronous training, as functions of the routing.

    A routing assigns each client its share of the tasks. A convergence bound is an upper bound on the mean squared norm
    of the gradient during a run, scaled by a factor that the subclass defines. A bound object stores the constants of
    the formula, such as the learning rate. Call it with a routing to evaluate the bound.

    Args:
        rates: the service rates of the clients, (n,), in tasks per unit of time.
        concurrency: m, the number of tasks in the network at any time.
        rate: η, the learning rate of the server. The bounds hold only for small rates, which is not checked.
        smoothness: L, the smoothness constant of the loss.
        noise: B = 2M² + σ², where M² is the heterogeneity of the clients and σ² the variance of their gradients.
        gap: A, the initial loss minus the lowest loss. For `TimeBound` with `rounds=1`, `gap` is the mean decrease of
            the loss per update.

    Raises:
        ArgumentError: if an argument is invalid.
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
            raise ArgumentError("noise: expected a number > 0 if the gap is 0, got 0, so that the bound is 0")

    def __call__(self, p: np.ndarray | Sequence[float]) -> float:
        """Evaluate the bound at a routing.

        Args:
            p: positive shares, (n,), whose sum is 1 up to 1e-6. They are not rescaled.

        Raises:
            ArgumentError: if p is not a routing with positive shares.
            DivergenceError: if a share is so small that the bound overflows.
        """
        return self._value(self._check_routing(p))

    def unnormalised(self, p: np.ndarray | Sequence[float]) -> float:
        """Evaluate the formula of the convergence bound at positive task shares that need not sum to 1.

        The method `gradient` computes the derivatives of this formula.

        Args:
            p: positive numbers, (n,). If their sum is 1, the result is the bound at this routing.

        Raises:
            ArgumentError: if an entry is not positive.
            DivergenceError: if the bound overflows.
        """
        return self._value(positive_vector("p", p, self.clients))

    def gradient(self, p: np.ndarray | Sequence[float]) -> np.ndarray:
        """Compute the partial derivatives of the convergence bound with respect to the shares $p_j$ of a routing.

        The derivatives treat the shares as independent variables. In fact, the shares of a routing always sum to 1.
        Therefore, only the differences between the derivatives are meaningful.

        Returns:
            The derivatives of the method `unnormalised`, (n,).

        Raises:
            ArgumentError: if p is not a routing with positive shares.
            DivergenceError: if the bound or its gradient overflows.

        Cost: O(nm) in one forward pass, because the Jacobian of the means with respect to log p is symmetric.
        """
        return self.value_and_gradient(p)[1]

    def value_and_gradient(self, p: np.ndarray | Sequence[float]) -> tuple[float, np.ndarray]:
        """Compute the bound and its gradient together, at the cost of the gradient alone."""
        return self._value_and_slope(self._check_routing(p))

    def logit_gradient(self, theta: np.ndarray | Sequence[float]) -> np.ndarray:
        r"""Compute the gradient of the convergence bound with respect to the logits $\theta$ of a routing.

        The logits define the shares $p = \operatorname{softmax}(\theta)$ of the routing. Unlike the shares, the logits
        have no constraints, so an unconstrained optimiser can vary them. Let $g$ be the gradient of the bound with
        respect to $p$. Entry $j$ of the result is $p_j (g_j - \langle p, g \rangle)$.

        Args:
            theta: the logits, (n,).

        Raises:
            ArgumentError: if theta does not have n finite entries, or if a share underflows to 0.

        Source: Queue, appendix E.
        """
        p = positive_vector("softmax(theta)", softmax(check_vector("theta", theta)), self.clients)
        gradient = self._value_and_slope(p)[1]
        slope: np.ndarray = p * (gradient - float(p @ gradient))
        return slope

    def over_concurrency(self, routing: np.ndarray | Sequence[float]) -> Iterator[tuple[float, float]]:
        r"""Yield the convergence bound at a routing for the concurrencies m = 1, 2, 3, ..., without end.

        The concurrency is the number of tasks in the network. For each m, the iterator yields a pair of numbers:

        1. the bound for m;
        2. a number that is not larger than the bound for m or for any larger concurrency.

        A search for the best concurrency can stop when the second number exceeds the smallest bound found so far.

        The second number is the bound for m, with the throughput replaced by its upper limit
        $1 / \max_i (p_i / \mu_i)$. Here, $p_i$ are the shares and $\mu_i$ the service rates of the clients. For larger
        concurrencies, the throughput stays below this limit, and the mean queue lengths in the bound increase.

        Raises:
            ArgumentError: if `routing` is not a routing with positive shares.

        Cost: O(n) operations for each step of the iterator.
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
        r"""Evaluate the formula of the subclass, given the throughput and the mean queue lengths.

        Args:
            p: the shares of the clients, (n,).
            concurrency: m, the number of tasks in the network.
            throughput: $\lambda$, the number of completed tasks per unit of time.
            others: $E[X]$, the mean numbers of other tasks at each client at the dispatch of a task, (n,).
            means: $E[\xi]$, the mean numbers of tasks at each client at a random time, (n,).
        """
        raise NotImplementedError

    def _slope(
        self, p: np.ndarray, value: float, throughput: float, others: MeanAndProduct, means: MeanAndProduct
    ) -> np.ndarray:
        r"""Compute the gradient of the convergence bound from the queue lengths of the clients.

        Args:
            p: the shares of the clients, (n,).
            value: the bound at p.
            throughput: $\lambda$, the number of completed tasks per unit of time.
            others: a pair of vectors for the queue lengths X at the dispatch of a task. The first vector is the mean of
                X. The second vector is the product of the covariance matrix of X with the vector $1 / p^2$.
            means: the same pair for the queue lengths $\xi$ at a random time.
        """
        raise NotImplementedError

    def _error_terms(self, p: np.ndarray, concurrency: int, delays: np.ndarray) -> float:
        """Compute the sum of the noise term and the staleness term, which all bounds contain."""
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
    r"""The bound G on the gradient norm, for runs with a limited number of updates.

    G is an upper bound on $\frac18$ of the mean of $\| \nabla f \|^2$ over the updates of a run, where f is the loss.
    Let $p_i$ be the share of the tasks that client i gets, and let $X_i$ be the number of other tasks at client i when
    a task is dispatched. The bound is

    $$G(p) = \frac{A}{\eta (T+1)} + \frac{\eta L B}{n^2} \sum_i \frac{1}{p_i}
      + \frac{\eta^2 L^2 B m}{n^2} \sum_i \frac{E[X_i]}{p_i^2}, \quad X \sim \pi_{n,m-1}$$

    Here, $\pi_{n,m-1}$ is the stationary distribution of m - 1 tasks at n clients. The constants of the learning
    problem are the gap A, the noise B and the smoothness L. The constants of the run are the learning rate $\eta$, the
    concurrency m and the number T of updates.

    Args:
        rates: the service rates $\mu_i$ of the clients, (n,), in tasks per unit of time.
        concurrency: m, the number of tasks in the network at any time.
        rate: $\eta$, the learning rate of the server. The bound holds only for small rates, which is not checked.
        smoothness: L, the smoothness constant of the loss.
        noise: B = 2M² + σ², where M² is the heterogeneity of the clients and σ² the variance of their gradients.
        gap: A, the initial loss minus the lowest loss.
        num_updates: T >= 0, the number of updates of the run.

    Source: Queue (5), appendix E.

    Example:
        >>> bound = UpdateBound([1.0, 2.0], concurrency=3, rate=0.1, smoothness=1.0, noise=1.0, gap=1.0, num_updates=9)
        >>> round(bound([0.5, 0.5]), 12)  # 1/(0.1 · 10) + 0.1 + 0.01 · 3 · 2
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
    r"""The bound H on the gradient norm per unit of time.

    H is an upper bound on $\frac18$ of the mean of $\| \nabla f \|^2$, multiplied by the mean duration of an update.
    Minimise H if the duration of a run is limited, and `UpdateBound` if the number of updates is limited. Here,
    $\lambda$ is the throughput, and $E[\xi_i]$ is the mean number of tasks at client i:

    $$H(p) = \frac{1}{\lambda} (\frac{\bar A}{\eta} + \frac{\eta L B}{n^2} \sum_i \frac{1}{p_i}
      + \frac{\eta^2 L^2 B m}{n^2} \sum_i \frac{E[\xi_i]}{p_i^2}), \quad \xi \sim \pi_{n,m}$$

    The paper defines $\bar A$ as the expected decrease of the loss in a round, averaged over the rounds
    $k = 0, \dots, T$. The state of the network has the stationary distribution:

    $$\bar A = \frac{1}{T+1} \sum_{k=0}^{T} \sum_x \pi_{n,m}(x)\, E[f(w_k) - f(w_{k+1}) \mid Y_k = x].$$

    If the decrease does not depend on the state of the network, the sum over k telescopes, and $\bar A \le A / (T+1)$
    with the gap $A = f(w_0) - f^*$. This class uses $\bar A = A / (T+1)$, that is `gap / rounds`.

    Args:
        rates: the service rates $\mu_i$ of the clients, (n,), in tasks per unit of time.
        concurrency: m, the number of tasks in the network at any time.
        rate: $\eta$, the learning rate of the server. The bound holds only for small rates, which is not checked.
        smoothness: L, the smoothness constant of the loss.
        noise: B = 2M² + σ², where M² is the heterogeneity of the clients and σ² the variance of their gradients.
        gap: A, the initial loss minus the lowest loss. With `rounds=1`, the mean decrease of the loss per update.
        rounds: T + 1 >= 1, the number of rounds of the run. With `rounds=1`, `gap` is $\bar A$ itself. The
            paper's experiments use $\bar A = 15$.

    Source: Queue (12), appendices D and F. The gradient is derived again with
    $\partial \log \lambda / \partial \log p_j = E[X_j] - E[\xi_j]$.

    Example:
        >>> bound = TimeBound([1.0, 1.0], concurrency=3, rate=0.1, smoothness=1.0, noise=1.0, gap=1.0)
        >>> round(bound([0.5, 0.5]), 12)  # (10 + 0.1 + 0.01 · 3 · 3) · 4 / 6
        6.793333333333
        >>> run = TimeBound([1.0, 1.0], concurrency=3, rate=0.1, smoothness=1.0, noise=1.0, gap=1.0, rounds=10)
        >>> round(run([0.5, 0.5]), 12)  # (10 / 10 + 0.1 + 0.01 · 3 · 3) · 4 / 6
        0.793333333333
    """

    rounds: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "rounds", check_count("rounds", self.rounds))

    def _formula(
        self, p: np.ndarray, concurrency: int, throughput: float, others: np.ndarray, means: np.ndarray
    ) -> float:
        decrease = self.gap / self.rounds
        return (decrease / self.rate + self._error_terms(p, concurrency, means)) / throughput

    def _slope(
        self, p: np.ndarray, value: float, throughput: float, others: MeanAndProduct, means: MeanAndProduct
    ) -> np.ndarray:
        slope: np.ndarray = self._error_terms_slope(p, *means) / throughput + value * (means[0] - others[0]) / p
        return slope


def softmax(theta: np.ndarray) -> np.ndarray:
    """Compute shares proportional to exp(theta), with the sum 1."""
    shares: np.ndarray = np.exp(theta - theta.max())
    shares /= shares.sum()
    return shares
