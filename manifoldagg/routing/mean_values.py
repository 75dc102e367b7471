r"""Mean-value analysis, which computes the throughput and the mean queue lengths of a closed network.

In a closed Jackson network of n clients with k tasks, let $x_i$ be the number of tasks at client i. The state x has the
stationary distribution $\pi_k(x) \propto \prod_i \rho_i^{x_i}$. Here, $\rho_i = p_i / \mu_i$ is the load of client i,
whose share of the tasks is $p_i$ and whose service rate is $\mu_i$. Let $Z_k$ be the normalising constant of this
distribution, $\lambda_k = Z_{k-1} / Z_k$ the throughput and $L_i(k)$ the mean of $x_i$. Then

$$a_i = \rho_i (1 + L_i(k-1)), \quad \lambda_k = k / \sum_i a_i, \quad L_i(k) = \lambda_k a_i .$$

These equations are a recursion in the number k of tasks. All terms are positive, so there is no cancellation. The
recursion does not compute the normalising constants, which can overflow or underflow.
"""

from collections.abc import Iterator
from itertools import count

import numpy as np

__all__ = ["directional_mean_values", "mean_values"]


def mean_values(loads: np.ndarray) -> Iterator[tuple[float, np.ndarray]]:
    r"""Yield the throughput and the mean queue lengths of a closed network for k = 1, 2, ... tasks.

    The iterator is infinite. Each step costs O(n), where n is the number of clients.

    Args:
        loads: $\rho$, (n,), nonnegative and not all 0.

    Source: Queue (8) and (13) for the values; Reiser and Lavenberg for the recursion.

    Example:
        >>> [(rate, means.tolist()) for (rate, means), _ in zip(mean_values(np.ones(2)), range(2))]
        [(0.5, [0.5, 0.5]), (0.6666666666666666, [1.0, 1.0])]
    """
    means = np.zeros_like(loads)
    for tasks in count(1):
        work = loads * (1 + means)
        rate = tasks / float(work.sum())
        means = rate * work
        yield rate, means


def directional_mean_values(loads: np.ndarray, direction: np.ndarray) -> Iterator[tuple[float, np.ndarray, np.ndarray]]:
    r"""Yield the mean values of a closed network and a directional derivative, for k = 1, 2, ... tasks.

    Each step yields the throughput $\lambda_k$, the vector $L(k)$ of mean queue lengths, and the product $C(k)\, w$.
    Here, $C(k)$ is the covariance matrix of the queue lengths, and w is a vector. The gradient of a bound needs this
    product.

    The covariance matrix is the symmetric Jacobian $C_{ij} = \partial L_i / \partial \log \rho_j$, where $\rho_j$ is
    the load of client j. The product with w is therefore the derivative of L in the direction w of $\log \rho$. One
    forward pass computes it in O(n) per step:

    $$\dot a_i = w_i a_i + \rho_i \dot L_i(k-1), \quad
      \dot L_i = \lambda_k \dot a_i - L_i \sum_j \lambda_k \dot a_j / k .$$

    Args:
        loads: $\rho$, (n,).
        direction: w, (n,).

    Source: Queue (7) for the covariance as a derivative.
    """
    product = np.zeros_like(loads)
    # The number of tasks is fixed, so a constant can be subtracted from all weights. If the weight of the busiest
    # client is 0, the subtraction below loses fewer digits.
    weights = direction - direction[loads.argmax()]
    for tasks, (rate, means) in enumerate(mean_values(loads), start=1):
        product = weights * means + (rate * loads) * product
        product -= means * (float(product.sum()) / tasks)
        yield rate, means, product
