"""Closed queueing networks, which predict the delays and the throughput of a routing.

In a closed network, a fixed number of tasks circulates among the clients. All predictions are for the stationary state,
which the network approaches after a long time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Literal

import numpy as np

from manifoldagg._validation import check_choice, check_count, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.routing._arguments import ContentEquality, ShortRepr, rate_vector, routing_vector
from manifoldagg.routing.covariance import covariance, variance
from manifoldagg.routing.mean_values import mean_values
from manifoldagg.routing.simulate import Simulation, simulate

__all__ = ["ClosedNetwork"]


@dataclass(frozen=True, eq=False, repr=False)
class ClosedNetwork(ContentEquality, ShortRepr):
    r"""A closed network of n FIFO clients with service rates $\mu$, in which m tasks circulate.

    The network is a model of an asynchronous server. When a client completes a task, the server dispatches a new task,
    which it routes to client i with probability $p_i$. Let $x_i$ be the number of tasks at client i. With k tasks, the
    stationary distribution of the state x is $\pi_{n,k}(x) \propto \prod_i \rho_i^{x_i}$, where
    $\rho_i = p_i / \mu_i$. The properties describe two random states:

    - At a random time, the state of all m tasks is $\xi \sim \pi_{n,m}$. It determines `throughput` $\lambda$,
      `mean_tasks` $E[\xi]$ and `distribution`.
    - At the dispatch of a task, the state of the other m - 1 tasks is $X \sim \pi_{n,m-1}$. It determines
      `relative_delay` $E[D] = E[X]$, and `covariance` and `variance` of X.

    Args:
        routing: p, (n,), nonnegative, with sum 1 up to 1e-6. The routing is not rescaled.
        rates: $\mu$, (n,), positive, in tasks per unit of time. Service times are exponential.
        concurrency: m >= 1, the number of tasks that are queued or in service, over all clients.

    Raises:
        ArgumentError: if an argument is invalid. If the shares do not sum to 1, the message contains the difference.

    Source: Queue, proposition 2.1, theorem 3.1, (13).

    Cost: O(nm) for all properties, and O(nm + n²) for the covariance. Each property is computed once.

    Example:
        >>> network = ClosedNetwork([0.25, 0.75], [1.0, 3.0], concurrency=5)
        >>> round(network.throughput, 12), network.relative_delay.round(12).tolist()
        (3.333333333333, [2.0, 2.0])
        >>> ClosedNetwork([0.5, 0.6], [1.0, 1.0], concurrency=2)
        Traceback (most recent call last):
            ...
        manifoldagg.errors.ArgumentError: routing: expected shares that sum to 1, got 1.1: 0.1 too much
    """

    routing: np.ndarray | Sequence[float]
    rates: np.ndarray | Sequence[float]
    concurrency: int

    def __post_init__(self) -> None:
        rates = rate_vector(self.rates)
        object.__setattr__(self, "rates", rates)
        object.__setattr__(self, "routing", routing_vector(self.routing, len(rates)))
        object.__setattr__(self, "concurrency", check_count("concurrency", self.concurrency))

    @property
    def throughput(self) -> float:
        r"""The throughput $\lambda$: the total number of tasks that the clients complete per unit of time.

        Each completed task is one update of the server model. Let $Z_{n,k}$ be the normalising constant of the
        stationary distribution for n clients and k tasks. With m tasks, $\lambda = Z_{n,m-1} / Z_{n,m}$.
        """
        return float(self._throughputs[-1] / self._scale)

    @property
    def relative_delay(self) -> np.ndarray:
        """The mean relative delays $E[D_i]$ (n,) of the clients, in updates of the server model.

        The delay of a task is the number of updates that the server receives from other tasks while this task is in
        progress. $E[D_i]$ is the mean delay of the tasks of client i, multiplied by $p_i$, the client's share of all
        tasks. The random variable $D_i$ is the delay of a task if client i executes it, and 0 otherwise.

        $E[D_i]$ is also the mean number of other tasks at client i when a task is dispatched. The sum over all clients
        is m - 1, where m is the number of tasks in progress.
        """
        return self._mean_value_steps[1]

    @property
    def mean_tasks(self) -> np.ndarray:
        r"""An array (n,) with the mean number $E[\xi_i]$ of queued and running tasks at each client.

        The sum over all clients is the number m of tasks in the network.
        """
        return self._mean_value_steps[2]

    @property
    def utilisation(self) -> np.ndarray:
        r"""An array (n,) with the fraction of the time in which each client is busy.

        Entry i is $P(\xi_i > 0) = \lambda p_i / \mu_i$, where $\xi_i$ is the number of tasks at client i, and $\lambda$
        is the throughput. The client gets the share $p_i$ of the tasks, and has the service rate $\mu_i$.
        """
        return _read_only(self._throughputs[-1] * self._loads)

    @cached_property
    def covariance(self) -> np.ndarray:
        r"""The covariance matrix (n, n) of the queue lengths of the clients at the dispatch of a task.

        The queue length $X_i$ is the number of tasks at client i. It does not include the dispatched task. The matrix
        is also a Jacobian: $\operatorname{Cov}[X_i, X_j] = \partial E[X_i] / \partial \log p_j$, where $p_j$ is the
        fraction of the tasks that client j gets. It therefore shows how the mean queue lengths change with the routing.

        Source: Queue (7). The code corrects the formula for E[X_i²] in the paper.
        """
        return _read_only(covariance(self._loads, self.concurrency - 1))

    @cached_property
    def variance(self) -> np.ndarray:
        r"""The variances (n,) of the queue lengths of the clients at the dispatch of a task.

        The queue length $X_i$ of client i does not include the dispatched task. For n clients and m tasks, the
        variances are computed in O(nm) time, without the covariance matrix.
        """
        return _read_only(variance(self._loads, self.concurrency - 1))

    def distribution(self, client: int, *, others: bool = False) -> np.ndarray:
        r"""Compute the probability distribution of the number $\xi_i$ of tasks at client i.

        Entry k of the result is the probability $P(\xi_i = k)$. In a network with m tasks, it is the product of two
        factors:

        - the probability that client i has at least k tasks, $P(\xi_i \ge k) = \prod_{j<k} \rho_i \lambda_{m-j}$;
        - the probability that client i is idle if the network has only m - k tasks,
          $\prod_{j \le m-k} \lambda_j / \lambda'_j$.

        Here, $\rho_i$ is the share of client i divided by its service rate. The throughput with j tasks is $\lambda_j$,
        and it is $\lambda'_j$ if client i is removed from the network. The computation contains no subtractions, so
        even very small probabilities have a small relative error.

        Args:
            client: the index i, from 0.
            others: whether to return the distribution at the dispatch of a task instead. It is the distribution of the
                number $X_i$ of other tasks at client i.

        Returns:
            The probabilities for k = 0, ..., m, (m + 1,). With `others`, the probabilities $P(X_i = k)$ for k = 0, ...,
            m - 1, (m,).

        Raises:
            ArgumentError: if the index is invalid.

        Cost: O(nm).

        Example:
            >>> ClosedNetwork([0.5, 0.5], [1.0, 1.0], concurrency=3).distribution(0).round(12).tolist()
            [0.25, 0.25, 0.25, 0.25]
        """
        i = check_count("client", client, at_least=0)
        if i >= len(self._loads):
            raise ArgumentError(f"client: expected at most {len(self._loads) - 1}, got {client}")
        tasks = self.concurrency - others
        rates = self._throughputs[:tasks]
        tail = np.concatenate([[1.0], np.cumprod(self._loads[i] * rates[::-1])])
        rest = np.delete(self._loads, i)
        idle = np.zeros(tasks + 1)
        idle[0] = 1.0
        if rest.any():
            without = np.fromiter((rate for rate, _ in mean_values(rest)), np.float64, tasks)
            idle[1:] = np.cumprod(rates / without)
        return _read_only(tail * idle[::-1])

    def simulate(
        self, num_updates: int, generator: np.random.Generator, start: Literal["cold", "stationary"] = "cold"
    ) -> Simulation:
        """Simulate the network event by event, as a check of the exact values.

        Args:
            num_updates: the number of completions.
            generator: the random generator.
            start: the initial state. `"cold"` dispatches all m tasks at time 0 according to the routing. `"stationary"`
                draws the state of the other m - 1 tasks at the first dispatch from its exact distribution. All means
                per update are then unbiased.

        Raises:
            ArgumentError: if an argument is invalid.

        Example:
            >>> network = ClosedNetwork([0.25, 0.75], [1.0, 3.0], concurrency=5)
            >>> run = network.simulate(2000, np.random.default_rng(0), start="stationary")
            >>> bool(abs(run.throughput / network.throughput - 1) < 0.1)
            True
        """
        num_updates = check_count("num_updates", num_updates)
        check_choice("start", start, ("cold", "stationary"))
        if not isinstance(generator, np.random.Generator):
            raise ArgumentError(f"generator: expected a numpy.random.Generator, got {short_repr(generator)}")
        utilisation = self._throughputs[self.concurrency - 2] * self._loads if start == "stationary" else None
        return simulate(
            np.asarray(self.routing), np.asarray(self.rates), self.concurrency, num_updates, generator, utilisation
        )

    @cached_property
    def _scale(self) -> float:
        return float(np.max(np.asarray(self.routing) / np.asarray(self.rates)))

    @cached_property
    def _loads(self) -> np.ndarray:
        loads: np.ndarray = np.asarray(self.routing) / np.asarray(self.rates)
        return loads / self._scale

    @cached_property
    def _mean_value_steps(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The throughputs for 1, ..., m tasks, and the mean queue lengths for m - 1 and m tasks."""
        # The largest of the scaled loads is 1. These throughputs are therefore the true ones, multiplied by `_scale`.
        rates = np.empty(self.concurrency)
        before = means = np.zeros_like(self._loads)
        for k, (rate, after) in enumerate(islice(mean_values(self._loads), self.concurrency)):
            rates[k] = rate
            before = means
            means = after
        return rates, _read_only(before), _read_only(means)

    @property
    def _throughputs(self) -> np.ndarray:
        return self._mean_value_steps[0]


def _read_only(values: np.ndarray) -> np.ndarray:
    values.flags.writeable = False
    return values
