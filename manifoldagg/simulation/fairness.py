"""Fairness metrics: the inequality of a quantity over clients."""

from collections.abc import Sequence

import numpy as np

from manifoldagg._validation import check_vector

__all__ = ["gini", "theil"]


def gini(values: np.ndarray | Sequence[float]) -> float:
    r"""$\mathrm{Gini}(x) = \frac{1}{2 N^2 \bar x} \sum_{i,j} |x_i - x_j|$: 0 for equality, (N - 1)/N at most.

    Args:
        values: (N,), not negative. All zero counts as equality, its limit from equal positive values.

    Raises:
        ArgumentError: if `values` is empty, negative or not finite.

    Source: Manifold (48), no small-sample correction. Cost: one sort.

    Example:
        >>> gini([1.0, 1.0]), gini([0.0, 1.0])
        (0.0, 0.5)
    """
    x = np.sort(_normalize(values))
    total = x.sum()
    if total == 0:
        return 0.0
    n = len(x)
    # In sorted order, x_k is the larger one of k pairs and the smaller one of n - 1 - k.
    return max(0.0, float((2 * np.arange(n) - n + 1) @ x / (n * total)))


def theil(values: np.ndarray | Sequence[float]) -> float:
    r"""$\mathrm{Theil}(x) = \frac{1}{N \bar x} \sum_i x_i \ln(x_i / \bar x)$: 0 for equality, ln N at most.

    Args:
        values: (N,), not negative; 0 ln 0 = 0. All zero counts as equality.

    Raises:
        ArgumentError: if `values` is empty, negative or not finite.

    Source: Manifold (49), natural logarithm.

    Example:
        >>> theil([1.0, 1.0]), round(theil([0.0, 1.0]), 6)
        (0.0, 0.693147)
    """
    x = _normalize(values)
    total = x.sum()
    if total == 0:
        return 0.0
    positive = x[x > 0] / total
    return max(0.0, float(positive @ np.log(positive * len(x))))


def _normalize(values: np.ndarray | Sequence[float]) -> np.ndarray:
    x = check_vector("values", values, at_least=0)
    # Relative to the largest, so that sums neither overflow nor vanish.
    return x / x.max() if x.max() > 0 else x
