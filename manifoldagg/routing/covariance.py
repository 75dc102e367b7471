r"""The covariance matrix of the queue lengths of a closed network, in O(nm + n²) operations and without cancellation.

For $\rho_i \ne \rho_j$, $E[x_i x_j] = (\rho_j L_i - \rho_i L_j) / (\rho_i - \rho_j)$, so that

$$-\frac{C_{ij}}{L_i L_j} = \frac{g_i - g_j}{\rho_i - \rho_j}, \quad g_i = \rho_i (1 + 1 / L_i) .$$

If $\rho_i$ is close to $\rho_j$, this difference quotient of the function g loses all digits. The module avoids the
loss as follows:

- The clients are sorted by $\rho$. *Neighbours* are consecutive clients in this order. The quotient of any two clients
  is a weighted average of the quotients of the neighbours between them. The weights are the differences of $\rho$
  between these neighbours. All of these quotients are positive.
- The product moments of neighbours follow from a recursion with positive terms,
  $E_k[x_i x_j] = \rho_i \lambda_k (E_{k-1}[x_i x_j] + L_j(k-1))$. The recursion also holds if $\rho_i = \rho_j$, so
  equal clients need no special case.
- The rows of C sum to 0. The diagonal is therefore a sum of positive terms.

The quotient of neighbours is $1 - E[x_i x_j] / (L_i L_j)$, and its error grows with m. Entries off the diagonal are
never positive. Their *absolute* error is of order $\epsilon m L_i L_j$. If an entry is much smaller than $L_i L_j$, it
has few correct digits or is 0. An example is the entry of two idle clients in a network with a busy client.
"""

from itertools import islice

import numpy as np

from manifoldagg.routing.mean_values import directional_mean_values

__all__ = ["covariance", "variance"]


def covariance(loads: np.ndarray, concurrency: int) -> np.ndarray:
    r"""Compute the covariance matrix (n, n) of the queue lengths of the clients in a closed network.

    The entries are $C_{ij} = \operatorname{Cov}[x_i, x_j]$, where the queue lengths $x$ have the stationary
    distribution $\pi_{n,m}$ for n clients and m tasks. The matrix is symmetric. Its rows sum to 0, because the total
    number of tasks is constant.

    Args:
        loads: $\rho$, (n,), nonnegative and not all 0.
        concurrency: m >= 0.

    Source: Queue (7). Queue (9) is not used: its diagonal should be
    $E[x_i^2] = \sum_k (2k-1) \rho_i^k Z_{m-k}/Z_m$.
    Cost: O(nm + n²), independent of ties.

    Example:
        >>> covariance(np.ones(2), 1).tolist()
        [[0.25, -0.25], [-0.25, 0.25]]
    """
    n = len(loads)
    if concurrency == 0 or n == 1:
        return np.zeros((n, n))
    distinct, place = np.unique(loads, return_inverse=True)
    # First the pairs of equal loads (ρ_u, ρ_u), then the pairs of neighbours (ρ_u, ρ_{u+1}).
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
    r"""Compute the variances of the queue lengths of the clients in a closed network, (n,).

    The queue lengths $x$ have the stationary distribution $\pi_{n,m}$ for n clients and m tasks. Let $L_i(k)$ be the
    mean of $x_i$ with k tasks, $\lambda_k$ the throughput and $\rho_i$ the load of client i. The variance is the
    difference $E_m[x_i^2] - L_i(m)^2$. The second moments follow from the recursion $E_k[x_i^2] = \rho_i \lambda_k
    (E_{k-1}[x_i^2] + 2 L_i(k-1) + 1)$.

    If the busiest client has almost all tasks, its difference loses digits to cancellation. The variance of the busiest
    client is therefore computed as the negative sum of its covariances with the other clients.

    Cost: O(nm) time and O(n) memory.

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
    variances: np.ndarray = squares - means * means
    variances[busiest] = -np.delete(covariances, busiest).sum()
    return variances


def _assemble(distinct: np.ndarray, place: np.ndarray, means: np.ndarray, products: np.ndarray) -> np.ndarray:
    """Compute the covariance of all clients from product moments E[xᵢ xⱼ].

    Args:
        distinct: the u distinct loads in increasing order.
        place: the index of each client's load in `distinct`.
        means: the mean queue length for each distinct load.
        products: the product moments of two clients with the same load (u entries), followed by those of two clients
            with neighbouring loads (u - 1 entries).
    """
    u = len(distinct)
    gaps = np.diff(distinct)
    # If a client has no tasks, its covariance is 0 and its quotient is undefined.
    scale = means[:-1] * means[1:]
    quotients = np.divide(scale - products[u:], scale, out=np.zeros(u - 1), where=scale > 0)
    # The exact quotients are positive. Rounding can make a small quotient negative.
    quotients = quotients.clip(min=0.0)
    # Row i, column j - 1: the increase of g from ρ_i to ρ_j, summed over all neighbours from i to j.
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
