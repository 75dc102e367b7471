"""Statistics: confidence intervals over seeds, and paired tests of methods over data sets and seeds."""

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from manifoldagg._validation import check_number
from manifoldagg.errors import ArgumentError

__all__ = ["MIN_PAIRS", "MeanCI", "PairedTest", "compare_pairs", "holm", "mean_ci"]

MIN_PAIRS = 15
"""The smallest number of pairs of problem and seed in a test of two methods."""
DECIMALS = 12
"""Of a difference; what comes after them is noise."""


@dataclass(frozen=True)
class MeanCI:
    """A mean with its 95 % confidence interval.

    Attributes:
        value: the mean.
        half_width: half the length of the interval; `None` for a single value.
        count: of how many.
    """

    value: float
    half_width: float | None
    count: int

    @property
    def low(self) -> float | None:
        """The lower end of the interval."""
        return None if self.half_width is None else self.value - self.half_width

    @property
    def high(self) -> float | None:
        """The upper end of the interval."""
        return None if self.half_width is None else self.value + self.half_width


def mean_ci(values: Sequence[float]) -> MeanCI:
    r"""Compute the mean and Student's interval $\bar x \pm t_{0.975,\, n-1}\, s / \sqrt n$.

    It holds the mean over all seeds in 95 of 100 comparisons, if what seeds give is about normal.

    Raises:
        ArgumentError: if there is no value.

    Example:
        >>> found = mean_ci([1.0, 2.0, 3.0])
        >>> found.value, round(found.half_width, 3)
        (2.0, 2.484)
    """
    if not values:
        raise ArgumentError("values: expected at least one, got none")
    n = len(values)
    if n == 1:
        return MeanCI(float(values[0]), None, 1)
    from scipy.stats import t

    return MeanCI(statistics.fmean(values), float(t.ppf(0.975, n - 1)) * statistics.stdev(values) / math.sqrt(n), n)


@dataclass(frozen=True)
class PairedTest:
    """A paired test of two methods on the same problems and seeds.

    Attributes:
        first: a method.
        second: another.
        count: the number of common pairs of problem and seed.
        wins: how often the first was.
        losses: how often the second was.
        median_difference: the median of the first's score less the second's.
        p_value: of Wilcoxon's signed-rank test, two-sided; `None` where there are fewer than 15 of them.
        adjusted_p_value: the same after Holm's correction, over all tests that were made.
    """

    first: str
    second: str
    count: int
    wins: int
    losses: int
    median_difference: float
    p_value: float | None = None
    adjusted_p_value: float | None = None


def compare_pairs(scores: Mapping[str, Mapping[Hashable, float]]) -> list[PairedTest]:
    """Test all pairs of methods on their common problems and seeds; pairs without any are left out.

    No method is chosen beforehand to be compared with the others, so that all p-values are corrected together.

    Differences are rounded to 12 decimals: shares of as many samples that differ by as much are ties, whatever the last
    bits say. Pairs that are equal do not count in the test. It is exact for up to 50 differences of which no two are of
    one size, and for up to 13 in any case; else the normal approximation, with the variance corrected for ties.

    Args:
        scores: by method, the score for each pair of problem and seed.

    Source: Wilcoxon 1945; Holm 1979; Demšar 2006 for why.

    Example:
        >>> one = {("digits", seed): 0.01 * seed for seed in range(1, 16)}
        >>> pair, = compare_pairs({"A": one, "B": dict.fromkeys(one, 0.0)})
        >>> pair.count, pair.wins, pair.p_value == 2**-14
        (15, 15, True)
    """
    found = []
    for first, second in combinations(scores, 2):
        both = [key for key in scores[first] if key in scores[second]]
        if not both:
            continue
        differences = [round(scores[first][key] - scores[second][key], DECIMALS) for key in both]
        found.append(
            PairedTest(
                first,
                second,
                len(both),
                sum(x > 0 for x in differences),
                sum(x < 0 for x in differences),
                statistics.median(differences),
                _wilcoxon_p_value(differences) if len(both) >= MIN_PAIRS else None,
            )
        )
    made = [i for i, pair in enumerate(found) if pair.p_value is not None]
    for i, adjusted in zip(made, holm([found[i].p_value or 0.0 for i in made]), strict=True):
        found[i] = replace(found[i], adjusted_p_value=adjusted)
    return found


def holm(p_values: Sequence[float]) -> list[float]:
    r"""Apply Holm's step-down correction: $\max_{j \le i} \min(1, (m - j + 1)\, p_{(j)})$ for the i-th smallest of m.

    Args:
        p_values: p-values.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    for i, value in enumerate(p_values):
        check_number(f"p_values[{i}]", value, at_least=0, at_most=1)
    adjusted = list(map(float, p_values))
    largest = 0.0
    for place, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def _wilcoxon_p_value(differences: Sequence[float]) -> float:
    counted = [x for x in differences if x]
    if not counted:
        return 1.0
    from scipy.stats import wilcoxon

    # With zeros among them it would not be exact, also where no two are of one size.
    return float(wilcoxon(counted).pvalue)
