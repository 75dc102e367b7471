"""Tests of OrthoFL's relative time to a common target, with censored runs, and of one-sided signed-rank tests."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from typer.testing import CliRunner

from manifoldagg.cli.app import app
from manifoldagg.errors import ArgumentError
from manifoldagg.experiments.combined_report import load_reports, write_combined_report
from manifoldagg.experiments.relative_time import common_target, relative_times
from manifoldagg.experiments.report import LoggedRun
from manifoldagg.experiments.statistics import compare_pairs, compare_with, holm
from manifoldagg.simulation import Evaluation
from tests.experiments.test_report_data import report


def logged(times, accuracies):
    rows = [
        Evaluation(updates=i, time=time, accuracy=accuracy, loss=1.0, gini=0.0, theil=0.0)
        for i, (time, accuracy) in enumerate(zip(times, accuracies, strict=True))
    ]
    return LoggedRun(Path("x"), rows, [1.0])


def one(found, method):
    (row,) = (row for row in found.itertuples() if row.method == method)
    return row


def test_the_target_is_a_fraction_of_the_lowest_mean_final_accuracy():
    methods = {
        "A": {0: logged([0, 1], [0.1, 0.9]), 1: logged([0, 1], [0.1, 0.7])},
        "B": {0: logged([0, 1], [0.95, 0.6]), 1: logged([0, 1], [0.1, 1.0])},
    }
    assert common_target(methods) == pytest.approx(0.95 * 0.8)
    assert common_target(methods, 0.5) == pytest.approx(0.4)
    with pytest.raises(ArgumentError, match="^fraction: "):
        common_target(methods, 0.0)


def test_relative_times_are_paired_by_seed_and_censored_runs_give_a_bound():
    base = {0: logged([0, 10, 20], [0.1, 0.5, 0.8]), 1: logged([0, 10, 20], [0.1, 0.8, 0.8])}
    fast = {0: logged([0, 5, 40], [0.1, 0.8, 0.9]), 1: logged([0, 5, 40], [0.1, 0.2, 0.6])}
    found = relative_times({"p": {"FedAvg": base, "Fast": fast}})
    # The target is 0.95 times 0.75. With seed 0, `Fast` needs 5 s and the baseline 20 s.
    # With seed 1, `Fast` ends after 40 s without reaching the target.
    row = one(found, "Fast")
    assert row.target == pytest.approx(0.95 * 0.75)
    assert (row.seeds, row.num_censored, row.num_pairs, row.num_unpaired) == (2, 1, 1, 0)
    assert row.relative_time == 5 / 20
    assert np.isnan(row.relative_time_low)
    assert row.relative_time_bound == (5 / 20 + 40 / 10) / 2
    row = one(found, "FedAvg")
    assert (row.relative_time, row.relative_time_bound, row.num_censored, row.num_pairs) == (1.0, 1.0, 0, 2)


def test_a_seed_without_a_time_of_the_baseline_is_unpaired():
    base = {0: logged([0, 10], [0.1, 0.8]), 1: logged([0, 10], [0.1, 0.2]), 2: logged([0, 10], [0.9, 0.8])}
    other = {seed: logged([0, 5], [0.1, 0.9]) for seed in range(4)}
    row = one(relative_times({"p": {"Base": base, "Other": other}}, "Base"), "Other")
    assert (row.seeds, row.num_pairs, row.num_unpaired, row.num_censored) == (4, 1, 3, 0)
    assert row.relative_time == 0.5
    row = one(relative_times({"p": {"Base": base, "Other": {3: other[3]}}}, "Base"), "Other")
    assert np.isnan([row.relative_time, row.relative_time_bound]).all()


@given(st.lists(st.floats(0.1, 100), min_size=2, max_size=6), st.floats(0.01, 10), st.floats(0.01, 10))
def test_relative_time_depends_only_on_the_ratio_of_the_time_units(steps, unit, factor):
    times = [0.0, *np.cumsum(steps)]
    accuracies = np.linspace(0.1, 0.9, len(times))
    runs = {
        "FedAvg": {0: logged(unit * np.array(times), accuracies)},
        "Other": {0: logged(unit * factor * np.array(times), accuracies)},
    }
    assert one(relative_times({"p": runs}), "Other").relative_time == pytest.approx(factor)


SHARES = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90), st.integers(0, 90)), min_size=15, max_size=30)


@given(SHARES)
def test_one_sided_tests_equal_scipy_with_holm_adjustment_over_all_pairs(counts):
    scores = pd.DataFrame([[count / 90 for count in row] for row in counts], columns=list("ABC"))
    found = compare_with(scores, "B")
    assert found[["first", "second"]].to_numpy().tolist() == [["B", "A"], ["B", "C"]]
    for pair in found.itertuples():
        d = np.array([row[1] - row["ABC".index(pair.second)] for row in counts])
        d = d[d != 0]
        assert pair.p_value == (stats.wilcoxon(d, alternative="greater").pvalue if d.size else 1.0)
    assert found["adjusted_p_value"].to_list() == holm(found["p_value"].to_list())


def test_one_sided_p_value_is_half_the_two_sided_one_in_the_tested_direction():
    scores = pd.DataFrame({"A": [i / 20 for i in range(1, 16)], "B": 0.0})
    assert compare_with(scores, "A")["p_value"][0] == 2**-15 == compare_pairs(scores)["p_value"][0] / 2
    assert compare_with(scores, "B")["p_value"][0] == 1.0
    assert compare_with(scores[:14], "A")["p_value"].isna().all()
    with pytest.raises(ArgumentError, match="^method: "):
        compare_with(scores, "C")


@pytest.mark.usefixtures("as_shipped")
def test_the_report_has_relative_times_and_one_sided_tests(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    worth = {
        "FedAvg": (2, lambda seed: [0.0, 0.1, 0.57 + seed / 1000]),
        "Fast": (1, lambda seed: [0.0, 0.6, 0.7 + seed / 90]),
        "Slow": (1, lambda seed: [0.0, 0.1, 0.9 if seed else 0.2]),
    }
    report(tmp_path / "a", worth, seeds=range(15))
    done = CliRunner().invoke(app, ["report", "a", "--proposed", "Fast"])
    assert done.exit_code == 0, done.output
    joined = load_reports(["a"])
    times = pd.read_csv("combined/relative_time.csv")
    pd.testing.assert_frame_equal(times, joined.relative_times("FedAvg"))
    assert one(times, "Slow").num_censored == 1
    pd.testing.assert_frame_equal(pd.read_csv("combined/one_sided.csv"), joined.one_sided_tests("Fast", "updates"))
    text = re.sub(" +", " ", Path("combined/report.md").read_text())
    assert "| Slow | 1 ± 0 | 14 of 15 | 1 | > 1 |" in text
    assert "tests whether Fast is better than each other method" in text
    assert "over all 2 tests" in text
    names = [file.name for file in write_combined_report(joined, "combined", baseline="Slow")]
    assert "relative_time.csv" in names
    assert "one_sided.csv" not in names
    wrong = CliRunner().invoke(app, ["report", "a", "--proposed", "x"])
    assert "proposed: no method 'x'" in str(wrong.exception)
