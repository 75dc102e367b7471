"""Gini and Theil are the formulas of the paper."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.simulation import gini, theil

values = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1e6)), min_size=1, max_size=30).filter(any)


@given(values)
def test_gini_is_the_mean_absolute_difference(x):
    n, mean = len(x), math.fsum(x) / len(x)
    direct = math.fsum(abs(a - b) for a in x for b in x) / (2 * n * n * mean)
    assert gini(x) == pytest.approx(direct, abs=1e-13)
    assert 0 <= gini(x) <= 1 - 1 / n + 1e-15


@given(values)
def test_theil_is_the_relative_entropy(x):
    n, mean = len(x), math.fsum(x) / len(x)
    direct = math.fsum(a / mean * math.log(a / mean) for a in x if a > 0) / n
    assert theil(x) == pytest.approx(direct, abs=1e-13)
    assert 0 <= theil(x) <= math.log(n) + 1e-13


@given(values, st.sampled_from([1e-300, 0.1, 1e300]), st.randoms())
def test_indices_are_invariant_under_scaling_and_order(x, unit, random):
    other = [unit * a for a in x]
    random.shuffle(other)
    for measure in (gini, theil):
        # 1e-300 times 1e-6 is still a normal number; only the last digits differ.
        assert measure(other) == pytest.approx(measure(x), abs=1e-12)


@given(st.floats(0, 1e300), st.integers(1, 20))
def test_indices_of_equal_values_are_zero(value, n):
    assert gini([value] * n) == 0
    assert theil([value] * n) == pytest.approx(0, abs=1e-15)


@given(st.integers(1, 50))
def test_indices_are_largest_if_one_client_has_everything(n):
    x = [0.0] * (n - 1) + [3.0]
    assert gini(x) == pytest.approx(1 - 1 / n)
    assert theil(x) == pytest.approx(math.log(n))


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("measure", [gini, theil])
@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ([], "values: expected a non-empty vector"),
        (np.ones((2, 2)), "values: expected a non-empty vector"),
        ([1.0, -0.5], r"values\[1\]: expected a finite number >= 0, got -0.5"),
        ([float("nan")], r"values\[0\]"),
        ([1.0, float("inf")], r"values\[1\]"),
        (["a"], "values: expected real numbers"),
    ],
)
def test_invalid_input_is_rejected_by_name(measure, bad, words):
    with pytest.raises(ArgumentError, match=words):
        measure(bad)
