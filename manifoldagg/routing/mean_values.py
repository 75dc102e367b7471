r"""Mean-value analysis of a closed network: recursions in the number of tasks.

A closed Jackson network of n clients has $\pi_k(x) \propto \prod_i \rho_i^{x_i}$ on the states with k tasks,
$\rho_i = p_i / \mu_i$. With $Z_k$ its normalising constant, $\lambda_k = Z_{k-1} / Z_k$ and $L_i(k)$ the mean of $x_i$,

$$a_i = \rho_i (1 + L_i(k-1)), \quad \lambda_k = k / \sum_i a_i, \quad L_i(k) = \lambda_k a_i :$$

positive terms only, so nothing cancels, and no constant that over- or underflows is ever formed.
"""

from collections.abc import Iterator
from itertools import count

import numpy as np

__all__ = ["directional_mean_values", "mean_values"]


def mean_values(loads: np.ndarray) -> Iterator[tuple[float, np.ndarray]]:
    r"""Yield $(\lambda_k, L(k))$ for k = 1, 2, ... without end, in O(n) per step.

    Args:
        loads: $\rho$, (n,), not negative, not all 0.

    Source: Queue (8) and (13), whose values these are, by Reiser and Lavenberg's recursion.

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
    r"""Yield $(\lambda_k, L(k), C(k) w)$ for k = 1, 2, ..., C(k) the covariance with k tasks, in O(n) per step.

    $C_{ij} = \partial L_i / \partial \log \rho_j$ is symmetric, so that the adjoint of the recursion applied to w *is*
    its derivative in the direction $\dot{\log \rho} = w$: one sweep forward, no tape,

    $$\dot a_i = w_i a_i + \rho_i \dot L_i(k-1), \quad
      \dot L_i = \lambda_k \dot a_i - L_i \sum_j \lambda_k \dot a_j / k .$$

    Args:
        loads: $\rho$, (n,).
        direction: w, (n,).

    Source: Queue (7) for the covariance as a derivative.
    """
    moved = np.zeros_like(loads)
    # A constant weight has no effect, as the tasks are fixed; without the busiest client's, less is subtracted below.
    weights = direction - direction[loads.argmax()]
    for tasks, (rate, means) in enumerate(mean_values(loads), start=1):
        moved = weights * means + (rate * loads) * moved
        moved -= means * (float(moved.sum()) / tasks)
        yield rate, means, moved
