"""Evidence: how sure a mean over seeds is, and whether methods differ over many tasks and seeds."""

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from manifoldagg._validation import check_number
from manifoldagg.errors import ArgumentError

__all__ = ["ENOUGH", "Mean", "Pair", "compared", "holm", "mean_of"]

ENOUGH = 15
"""Pairs of task and seed from which on methods are tested: of fewer little could be said."""
DECIMALS = 12
"""Of a difference; what comes after them is noise."""


@dataclass(frozen=True)
class Mean:
    """A mean with its interval of 95 %.

    Attributes:
        value: the mean.
        half: half the length of the interval; `None` for a single value.
        count: of how many.
    """

    value: float
    half: float | None
    count: int

    @property
    def low(self) -> float | None:
        """Where the interval begins."""
        return None if self.half is None else self.value - self.half

    @property
    def high(self) -> float | None:
        """Where it ends."""
        return None if self.half is None else self.value + self.half


def mean_of(values: Sequence[float]) -> Mean:
    r"""The mean, and Student's interval $\bar x \pm t_{0.975,\, n-1}\, s / \sqrt n$.

    It holds the mean over all seeds in 95 of 100 comparisons, if what seeds give is about normal.

    Raises:
        ArgumentError: if there is no value.

    Example:
        >>> found = mean_of([1.0, 2.0, 3.0])
        >>> found.value, round(found.half, 3)
        (2.0, 2.484)
    """
    if not values:
        raise ArgumentError("values: expected at least one, got none")
    n = len(values)
    if n == 1:
        return Mean(float(values[0]), None, 1)
    from scipy.stats import t

    return Mean(statistics.fmean(values), float(t.ppf(0.975, n - 1)) * statistics.stdev(values) / math.sqrt(n), n)


@dataclass(frozen=True)
class Pair:
    """Two methods on the same tasks and seeds.

    Attributes:
        first: a method.
        second: another.
        count: tasks and seeds that both have.
        better: how often the first was.
        worse: how often the second was.
        difference: the median of the first's score less the second's.
        p: of Wilcoxon's signed-rank test, two-sided; `None` where there are fewer than 15 of them.
        adjusted: the same after Holm's correction, over all tests that were made.
    """

    first: str
    second: str
    count: int
    better: int
    worse: int
    difference: float
    p: float | None = None
    adjusted: float | None = None


def compared(scores: Mapping[str, Mapping[Hashable, float]]) -> list[Pair]:
    """All pairs of methods, each on the tasks and seeds that both have; those that have none are left out.

    No method is chosen beforehand to be compared with the others, so that all p-values are corrected together.

    Differences are rounded to 12 decimals: shares of as many samples that differ by as much are ties, whatever the last
    bits say. Pairs that are equal do not count in the test. It is exact for up to 50 differences of which no two are of
    one size, and for up to 13 in any case; else the normal approximation, with the variance corrected for ties.

    Args:
        scores: by method, the score for each pair of task and seed.

    Source: Wilcoxon 1945; Holm 1979; Demšar 2006 for why.

    Example:
        >>> one = {("digits", seed): 0.01 * seed for seed in range(1, 16)}
        >>> pair, = compared({"A": one, "B": dict.fromkeys(one, 0.0)})
        >>> pair.count, pair.better, pair.p == 2**-14
        (15, 15, True)
    """
    found = []
    for first, second in combinations(scores, 2):
        both = [key for key in scores[first] if key in scores[second]]
        if not both:
            continue
        differences = [round(scores[first][key] - scores[second][key], DECIMALS) for key in both]
        found.append(
            Pair(
                first,
                second,
                len(both),
                sum(x > 0 for x in differences),
                sum(x < 0 for x in differences),
                statistics.median(differences),
                _signed_rank(differences) if len(both) >= ENOUGH else None,
            )
        )
    made = [i for i, pair in enumerate(found) if pair.p is not None]
    for i, adjusted in zip(made, holm([found[i].p or 0.0 for i in made]), strict=True):
        found[i] = replace(found[i], adjusted=adjusted)
    return found


def holm(p: Sequence[float]) -> list[float]:
    r"""Holm's step-down correction: $\max_{j \le i} \min(1, (m - j + 1)\, p_{(j)})$ for the i-th smallest of m.

    Args:
        p: p-values.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    for i, value in enumerate(p):
        check_number(f"p[{i}]", value, at_least=0, at_most=1)
    adjusted = list(map(float, p))
    largest = 0.0
    for place, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        largest = max(largest, min(1.0, (len(p) - place) * p[i]))
        adjusted[i] = largest
    return adjusted


def _signed_rank(differences: Sequence[float]) -> float:
    counted = [x for x in differences if x]
    if not counted:
        return 1.0
    from scipy.stats import wilcoxon

    # With zeros among them it would not be exact, also where no two are of one size.
    return float(wilcoxon(counted).pvalue)
