"""Confidence intervals over seeds, and paired tests of methods over data sets and seeds."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd
from scipy import stats

from manifoldagg._validation import check_choice, check_number
from manifoldagg.errors import ArgumentError

__all__ = ["MIN_PAIRS", "MeanCI", "compare_pairs", "compare_with", "holm", "interval_columns", "mean_ci"]

MIN_PAIRS = 15
"""The minimum number of pairs of problem and seed for which two methods are tested."""
DECIMALS = 12
"""Differences are rounded to this number of decimals, because further digits are rounding errors."""
TEST_COLUMNS = ("first", "second", "count", "wins", "losses", "median_difference", "p_value")


@dataclass(frozen=True)
class MeanCI:
    """The mean of `count` values with its 95 % confidence interval.

    `half_width` is half the width of the interval. It is `None` if there is only one value.
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
    r"""Compute the mean of n values and its 95 % confidence interval from Student's t distribution.

    The interval is $\bar x \pm t_{0.975,\, n-1}\, s / \sqrt n$, where $\bar x$ is the mean and $s$ the sample standard
    deviation. If the values are approximately normally distributed, the interval contains the true mean with
    probability 0.95.

    Raises:
        ArgumentError: if there is no value.

    Example:
        >>> found = mean_ci([1.0, 2.0, 3.0])
        >>> found.value, round(found.half_width, 3)
        (2.0, 2.484)
    """
    n = len(values)
    if not n:
        raise ArgumentError("values: expected at least one value, got an empty sequence")
    half_width = float(stats.t.ppf(0.975, n - 1) * stats.sem(values)) if n > 1 else None
    return MeanCI(statistics.fmean(values), half_width, n)


def interval_columns(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the mean of values as the column `name`, and its 95 % interval as `name_low` and `name_high`.

    Without a value, all columns are NaN. With one value, the interval is NaN.

    Example:
        >>> interval_columns("loss", [2.0])
        {'loss': 2.0, 'loss_low': nan, 'loss_high': nan}
    """
    mean = mean_ci(values) if len(values) else MeanCI(math.nan, None, 0)
    half_width = math.nan if mean.half_width is None else mean.half_width
    return {name: mean.value, f"{name}_low": mean.value - half_width, f"{name}_high": mean.value + half_width}


def compare_with(scores: pd.DataFrame, method: str) -> pd.DataFrame:
    r"""Test whether one method scores higher than the others, with Wilcoxon's one-sided signed-rank test.

    The function performs one test for each of the other methods. Two scores form a pair if they belong to the same
    problem and seed. Let $d$ be the score of `method` minus the score of the other method in a pair. The null
    hypothesis is that the distribution of $d$ is symmetric about 0. The alternative is that $d$ tends to be positive.

    - Holm's correction covers the tests of `method` with all other methods.
    - Methods with fewer than 15 pairs of scores are not tested.
    - Equal scores, rounding and the choice of the exact test are as in `compare_pairs`.

    Choose `method` before you see the scores. Otherwise, use the two-sided tests of `compare_pairs`.

    Args:
        scores: a column for each method and a row for each pair of problem and seed. A missing score is NaN.
        method: the method that is expected to score higher.

    Returns:
        The columns of `compare_pairs`, with `method` as `first`. A row exists for each other method with a common row.

    Raises:
        ArgumentError: if `scores` has no column `method`.

    Source: OrthoFL §5.2; Wilcoxon 1945; Holm 1979.

    Example:
        >>> scores = pd.DataFrame({"A": [0.01 * seed for seed in range(1, 16)], "B": 0.0})
        >>> [compare_with(scores, name)["p_value"][0] for name in "AB"] == [2**-15, 1.0]
        True
    """
    check_choice("method", method, tuple(scores))
    return _compare(scores, [(method, other) for other in scores if other != method], "greater")


def compare_pairs(scores: pd.DataFrame) -> pd.DataFrame:
    """Test whether the scores of any two methods differ, with Wilcoxon's two-sided signed-rank test.

    The test uses the differences between two methods' scores on the same problem with the same seed.

    - Two methods with fewer than 15 pairs of scores are not tested.
    - Differences of 0 are ignored.
    - Differences are rounded to 12 decimals, so that differences that are equal up to rounding errors count as ties.
    - The p-value is exact for up to 50 differences without ties, and for up to 13 differences with ties. Otherwise,
      SciPy uses the normal approximation with the variance corrected for ties.
    - Holm's correction for multiple tests covers all tested pairs of methods.

    Args:
        scores: a column for each method and a row for each pair of problem and seed. A missing score is NaN.

    Returns:
        A row for each pair of methods with a common row: `first`, `second`, the `count` of common rows, `wins` and
        `losses` of the first method, the `median_difference` (first minus second), `p_value` and `adjusted_p_value`.
        The p-values are NaN if there is no test.

    Source: Wilcoxon 1945; Holm 1979; Demšar 2006 (recommends these tests).

    Example:
        >>> scores = pd.DataFrame({"A": [0.01 * seed for seed in range(1, 16)], "B": 0.0})
        >>> (pair,) = compare_pairs(scores).itertuples()
        >>> pair.count, pair.wins, pair.p_value == 2**-14
        (15, 15, True)
    """
    return _compare(scores, list(combinations(scores, 2)), "two-sided")


def holm(p_values: Sequence[float]) -> list[float]:
    r"""Adjust m p-values for multiple tests with Holm's step-down correction.

    The i-th smallest p-value becomes $\max_{j \le i} \min(1, (m - j + 1)\, p_{(j)})$, where $p_{(j)}$ is the j-th
    smallest p-value.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    for i, value in enumerate(p_values):
        check_number(f"p_values[{i}]", value, at_least=0, at_most=1)
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    adjusted = np.empty_like(p)
    adjusted[order] = np.maximum.accumulate(np.minimum(1.0, np.arange(len(p), 0, -1) * p[order]))
    return [float(value) for value in adjusted]


def _compare(scores: pd.DataFrame, pairs: Sequence[tuple[str, str]], alternative: str) -> pd.DataFrame:
    rows = []
    for first, second in pairs:
        x = (scores[first] - scores[second]).dropna().round(DECIMALS)
        if len(x):
            p_value = _wilcoxon_p_value(x.to_numpy(), alternative) if len(x) >= MIN_PAIRS else np.nan
            rows.append((first, second, len(x), int((x > 0).sum()), int((x < 0).sum()), float(x.median()), p_value))
    found = pd.DataFrame(rows, columns=list(TEST_COLUMNS))
    tested = found["p_value"].dropna()
    return found.assign(adjusted_p_value=pd.Series(holm(tested.to_list()), index=tested.index, dtype=np.float64))


def _wilcoxon_p_value(differences: np.ndarray, alternative: str) -> float:
    # With zeros, SciPy does not use the exact test.
    counted = differences[differences != 0]
    return float(stats.wilcoxon(counted, alternative=alternative).pvalue) if counted.size else 1.0
