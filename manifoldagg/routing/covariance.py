r"""The covariance of all queues of a closed network in O(nm + n²), without a cancelling difference quotient.

For $\rho_i \ne \rho_j$, $E[x_i x_j] = (\rho_j L_i - \rho_i L_j) / (\rho_i - \rho_j)$, so that

$$-\frac{C_{ij}}{L_i L_j} = \frac{g_i - g_j}{\rho_i - \rho_j}, \quad g_i = \rho_i (1 + 1 / L_i) :$$

a difference quotient of one function, worthless for near ties as it stands. But with the clients in the order of
$\rho$ it is the average of the quotients of *neighbours*, weighted by the gaps between them, and all of these are
positive. Each neighbour's comes from a recursion of positive terms,
$E_k[x_i x_j] = \rho_i \lambda_k (E_{k-1}[x_i x_j] + L_j(k-1))$, which holds for equal $\rho_i$ as well. No threshold
between ties, near ties and others is needed. Rows of C sum to 0, which gives the diagonal as a sum of positive terms.

The quotient of neighbours is $1 - E[x_i x_j] / (L_i L_j)$, of two numbers rounded m times: entries off the diagonal are
never positive, and right up to an *absolute* error of order $\epsilon m L_i L_j$. One that is much smaller than
$L_i L_j$, as of two idle clients beside a busy one, has few digits or is 0.
"""

from itertools import islice

import numpy as np

from manifoldagg.routing.mean_values import directional_mean_values

__all__ = ["covariance", "variance"]


def covariance(loads: np.ndarray, concurrency: int) -> np.ndarray:
    r"""Compute $C_{ij} = \operatorname{Cov}[x_i, x_j]$ for $x \sim \pi_{n,m}$, (n, n); symmetric, its rows sum to 0.

    Args:
        loads: $\rho$, (n,), not negative, not all 0.
        concurrency: m >= 0.

    Source: Queue (7), (9); (9) is not used, as its diagonal is $E[x_i^2] = \sum_k (2k-1) \rho_i^k Z_{m-k}/Z_m$.
    Cost: O(nm + n²), independent of ties.

    Example:
        >>> covariance(np.ones(2), 1).tolist()
        [[0.25, -0.25], [-0.25, 0.25]]
    """
    n = len(loads)
    if concurrency == 0 or n == 1:
        return np.zeros((n, n))
    distinct, place = np.unique(loads, return_inverse=True)
    # Pairs of equal clients, then of neighbours: (ρ_u, ρ_u), (ρ_u, ρ_{u+1}).
    first = np.concatenate([distinct, distinct[:-1]])
    second = np.concatenate([np.arange(len(distinct)), np.arange(1, len(distinct))])
    crowd = np.bincount(place).astype(np.float64)
    products = np.zeros_like(first)
    means = np.zeros_like(distinct)
    for k in range(1, concurrency + 1):
        work = distinct * (1 + means)
        rate = k / float(crowd @ work)
        products = rate * first * (products + means[second])
        means = rate * work
    return _assemble(distinct, place, means, products)


def variance(loads: np.ndarray, concurrency: int) -> np.ndarray:
    r"""Compute $\operatorname{Var}[x_i]$ for $x \sim \pi_{n,m}$, (n,), in O(nm) time and O(n) memory.

    $E_k[x_i^2] = \rho_i \lambda_k (E_{k-1}[x_i^2] + 2 L_i(k-1) + 1)$, less $L_i^2$. The busiest client can hold almost
    all tasks almost surely, and little would be left of that difference: its variance comes from its covariances.

    Example:
        >>> variance(np.ones(2), 1).tolist()
        [0.25, 0.25]
    """
    squares = np.zeros_like(loads)
    means = np.zeros_like(loads)
    busiest = int(loads.argmax())
    covariances = np.zeros_like(loads)
    direction = np.zeros_like(loads)
    direction[busiest] = 1.0
    for rate, after, moved in islice(directional_mean_values(loads, direction), concurrency):
        squares = rate * loads * (squares + 2 * means + 1)
        means = after
        covariances = moved
    found: np.ndarray = squares - means * means
    found[busiest] = -np.delete(covariances, busiest).sum()
    return found


def _assemble(distinct: np.ndarray, place: np.ndarray, means: np.ndarray, products: np.ndarray) -> np.ndarray:
    """The matrix of all clients from the products of equal and of neighbouring ones."""
    u = len(distinct)
    gaps = np.diff(distinct)
    # A client without tasks has no covariance, whatever its quotient.
    scale = means[:-1] * means[1:]
    quotients = np.divide(scale - products[u:], scale, out=np.zeros(u - 1), where=scale > 0)
    # All are positive; where they are small, rounding is not.
    quotients = quotients.clip(min=0.0)
    # Row i, column j - 1: the rise of g from ρ_i to ρ_j, a sum over the neighbours between them.
    rises = np.cumsum(np.triu(np.broadcast_to(gaps * quotients, (u - 1, u - 1))), axis=1)
    spans = np.triu(distinct[1:] - distinct[:-1, None])
    upper = np.divide(rises, spans, out=np.zeros_like(rises), where=spans > 0)
    upper *= -means[:-1, None] * means[1:]
    matrix = np.zeros((u, u))
    matrix[:-1, 1:] = upper
    matrix += matrix.T
    np.fill_diagonal(matrix, (products[:u] - means * means).clip(max=0.0))
    matrix = np.ascontiguousarray(matrix[np.ix_(place, place)])
    np.fill_diagonal(matrix, 0.0)
    np.fill_diagonal(matrix, -matrix.sum(axis=1))
    return matrix
