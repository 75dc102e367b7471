"""Tests of combined reports: loading, comparison at equal cost, confidence intervals, and invalid folders."""

import json
import math
import re
from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from rich.console import Console
from scipy import stats
from typer.testing import CliRunner

from manifoldagg.cli.app import app
from manifoldagg.cli.compare import comparison_table
from manifoldagg.cli.report import report_tables
from manifoldagg.errors import ArgumentError
from manifoldagg.experiments import plots
from manifoldagg.experiments.combined_report import load_reports, write_combined_report
from manifoldagg.experiments.compare import compare
from manifoldagg.experiments.registry import method
from manifoldagg.experiments.report import write_report
from manifoldagg.experiments.statistics import compare_pairs, holm, mean_ci
from manifoldagg.simulation import Evaluation
from manifoldagg.simulation.cost import AXES
from tests.simulation.test_run import clusters

SETTINGS = {
    "data": {"name": "digits", "checksum": "00000001"},
    "clients": 4,
    "num_updates": 3,
    "model": "cnn",
    "target": 0.5,
    "eval_every": 1,
    "tuning": None,
}


def report(folder, methods, seeds=(0, 1, 2), data=None, **settings):
    """Write a report without running a comparison.

    `methods` maps each method to the cost of a round in gradients and the accuracies after each round.
    If `num_updates` is given, the last accuracy is that of update `num_updates`.
    """
    folder.mkdir()
    given = {
        name: {seed: worth(seed) if callable(worth) else worth for seed in seeds}
        for name, (_, worth) in methods.items()
    }
    most = max(len(rounds) for runs in given.values() for rounds in runs.values()) - 1
    told = SETTINGS | {"num_updates": most} | settings | {"seeds": list(seeds)} | ({"data": data} if data else {})
    told["methods"] = {name: {"rule": f"{name}()", "trainer": "Local()"} for name in methods}
    lines, runs = [], {}
    for name, (cost, _) in methods.items():
        runs[name] = {"runs": [{"client_accuracy": [0.25, 0.5, 1.0]} for _ in seeds]}
        for seed in seeds:
            for i, accuracy in enumerate(given[name][seed]):
                row = Evaluation(
                    updates=i if i < most else told["num_updates"],
                    time=2.0 * i,
                    gradients=cost * i,
                    bytes_down=100 * i,
                    bytes_up=50 * cost * i,
                    accuracy=accuracy,
                    loss=1.0 if i else None,
                    gini=0.1,
                    theil=0.01,
                )
                lines.append(json.dumps({"method": name, "seed": seed} | asdict(row)) + "\n")
    (folder / "results.json").write_text(json.dumps({"settings": told, "methods": runs}))
    (folder / "log.jsonl").write_text("".join(lines))
    return folder


ONE = {"Cheap": (1, [0.0, 0.25, 0.5, 0.75]), "Dear": (3, [0.0, 0.5, 0.75, 1.0])}


def test_methods_are_compared_at_the_largest_common_budget_without_interpolation(tmp_path):
    joined = load_reports([report(tmp_path / "a", ONE)])
    budgets = {"updates": 3, "time": 6.0, "gradients": 3, "bytes": 450}
    assert {axis: joined.budget("digits", axis) for axis in AXES} == budgets
    cheap, dear = joined.frame().itertuples()
    assert (cheap.final, dear.final) == (0.75, 1.0)
    assert [getattr(cheap, f"at_{axis}") for axis in AXES] == [0.75] * 4
    # A budget of 3 gradients pays for one round. A budget of 450 bytes pays for one round of 250 bytes.
    assert (dear.at_updates, dear.at_time, dear.at_gradients, dear.at_bytes) == (1.0, 1.0, 0.5, 0.5)
    assert (cheap.updates_to_target, cheap.time_to_target, cheap.num_reached) == (2, 4.0, 3)
    assert (dear.spent_updates, dear.spent_time, dear.spent_gradients, dear.spent_bytes) == (3, 6.0, 9, 750)
    assert (cheap.loss, cheap.gini) == (1.0, pytest.approx(0.1))


def test_differences_to_the_baseline_are_paired_by_seed_at_equal_cost(tmp_path):
    worth = {
        "Ours": (1, lambda seed: [0.0, 0.5, 0.5 + seed / 10]),
        "Other": (2, lambda seed: [0.0, 0.4, 0.6]),
        "Frugal": (0, [0.0, 0.1, 0.2]),
    }
    joined = load_reports(
        [report(tmp_path / "a", worth), report(tmp_path / "b", {"Other": worth["Other"]}, seeds=(3,))]
    )
    other, frugal = joined.differences("Ours").itertuples()
    assert [(one.problem, one.method, one.baseline) for one in (other, frugal)] == [
        ("digits", "Other", "Ours"),
        ("digits", "Frugal", "Ours"),
    ]

    def interval(one, axis):
        return tuple(getattr(one, f"at_{axis}{end}") for end in ("", "_low", "_high"))

    def mean(values):
        found = mean_ci(values)
        return found.value, found.low, found.high

    # After the last update, `Other` has 0.6 and `Ours` has 0.5, 0.6 and 0.7.
    # A budget of 2 gradients pays for one round of `Other` and two rounds of `Ours`.
    assert interval(other, "updates") == mean([0.6 - 0.5, 0.6 - 0.6, 0.6 - 0.7])
    assert interval(other, "gradients") == mean([0.4 - 0.5, 0.4 - 0.6, 0.4 - 0.7])
    assert (frugal.at_gradients, frugal.seeds) == (pytest.approx(0.2 - 0.0), 3)
    there = {one.method: one.at_bytes for one in joined.differences("Frugal").itertuples()}
    assert there["Ours"] == -frugal.at_bytes


@pytest.mark.usefixtures("as_shipped")
def test_baseline_without_common_runs_is_rejected(tmp_path):
    joined = load_reports([report(tmp_path / "a", ONE), report(tmp_path / "b", {"Alone": ONE["Dear"]}, clients=5)])
    with pytest.raises(ArgumentError, match="baseline: no method 'Chep'; did you mean Cheap?"):
        joined.differences("Chep")
    with pytest.raises(
        ArgumentError,
        match="baseline: expected a method with a problem and a seed in common with another method, got A",
    ):
        write_combined_report(joined, tmp_path / "joined", baseline="Alone")
    assert not (tmp_path / "joined").exists()


def test_unreached_targets_are_nan_and_counted(tmp_path):
    worth = {"A": (1, lambda seed: [0.0, 0.6 if seed == 1 else 0.1])}
    joined = load_reports([report(tmp_path / "a", worth)])
    (row,) = joined.frame().itertuples()
    assert (row.num_reached, row.updates_to_target) == (1, 1)
    assert math.isnan(row.updates_to_target_high)
    assert joined.table("digits")["updates to 50%"].to_list() == ["1 (1 of 3)"]
    joined = load_reports([report(tmp_path / "b", {"A": (1, [0.0, 0.1])})])
    (row,) = joined.frame().itertuples()
    assert row.num_reached == 0
    assert math.isnan(row.updates_to_target)
    assert math.isnan(row.time_to_target)
    assert joined.table("digits")["s to 50%"].to_list() == ["never"]


def test_reports_with_different_seeds_methods_and_data_are_combined(tmp_path):
    other = {"name": "digits", "checksum": "00000002"}
    folders = [
        report(tmp_path / "a", ONE),
        report(tmp_path / "b", {"Cheap": ONE["Cheap"]}, seeds=(3, 4)),
        report(tmp_path / "c", {"Third": ONE["Dear"]}),
        report(tmp_path / "d", ONE, data=other, model="mlp", target=0.9),
    ]
    joined = load_reports(folders)
    assert [(row.problem, row.method, row.seeds) for row in joined.frame().itertuples()] == [
        ("digits (00000001, model cnn)", "Cheap", 5),
        ("digits (00000001, model cnn)", "Dear", 3),
        ("digits (00000001, model cnn)", "Third", 3),
        ("digits (00000002, model mlp)", "Cheap", 3),
        ("digits (00000002, model mlp)", "Dear", 3),
    ]
    # Each problem has its own target.
    assert list(joined.notes) == []
    assert joined.targets == {"digits (00000001, model cnn)": 0.5, "digits (00000002, model mlp)": 0.9}


def test_differing_settings_are_noted_and_the_reports_are_combined(tmp_path):
    a = report(tmp_path / "a", ONE)
    b = report(tmp_path / "b", {"Third": ONE["Dear"]}, num_updates=9, target=0.6, tuning={"seeds": [100]})
    c = report(tmp_path / "c", {"Cheap": ONE["Cheap"]}, seeds=(7,))
    tree = json.loads((c / "results.json").read_text())
    tree["settings"]["methods"]["Cheap"]["rule"] = "Cheap(rate=2)"
    (c / "results.json").write_text(json.dumps(tree))
    assert list(load_reports([a, b, c]).notes) == [
        f"num_updates: 3 in {a}, 9 in {b}",
        f"target: 0.5 in {a}, 0.6 in {b}",
        f"tuning: none in {a}, searched in {b}",
        f"Cheap: differs between {a} and {c}: rule Cheap() and Cheap(rate=2)",
    ]


def test_reports_with_different_partitions_or_delays_are_separate_problems(tmp_path):
    folders = [
        report(tmp_path / "a", ONE, partition="iid"),
        report(tmp_path / "b", ONE, partition="dirichlet"),
        report(tmp_path / "c", ONE, partition="dirichlet", delays="exponential"),
    ]
    joined = load_reports(folders)
    assert list(joined.runs) == [
        "digits (partition iid, delays none)",
        "digits (partition dirichlet, delays none)",
        "digits (partition dirichlet, delays exponential)",
    ]
    assert list(joined.notes) == []


def test_a_run_in_two_reports_is_rejected(tmp_path):
    a, b = report(tmp_path / "a", ONE), report(tmp_path / "b", {"Dear": ONE["Dear"]}, seeds=(2, 3))
    with pytest.raises(ArgumentError, match=f"folders: {a} and {b} both have Dear on digits, seed 2"):
        load_reports([a, b])


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("results.json", None, r"folders: .*/a/results.json cannot be read"),
        ("results.json", lambda text: text[:-1], r"/a: expected a report of `manifoldagg compare`; JSONDecodeError"),
        ("results.json", lambda text: "[]", r"compare`; TypeError"),
        ("results.json", lambda text: text.replace('"checksum"', '"sum"'), r"compare`; KeyError\('checksum'\)"),
        ("results.json", lambda text: text.replace("[0, 1, 2]", "[0, 1]"), r"compare`; ValueError"),
        ("log.jsonl", None, r"folders: .*/a/log.jsonl cannot be read"),
        ("log.jsonl", lambda text: "".join(text.splitlines(True)[:8]), r"KeyError\(\('Cheap', 2\)\)"),
        (
            "log.jsonl",
            lambda text: "".join(text.splitlines(True)[:-2]),
            "the log of Dear, seed 2 has updates 0 to 1 of 3",
        ),
        (
            "log.jsonl",
            lambda text: "".join(text.splitlines(True)[1:]),
            "the log of Cheap, seed 0 has updates 1 to 3 of 3",
        ),
        ("results.json", lambda text: text.replace('"num_updates": 3', '"num_updates": "3"'), r"compare`; ValueError"),
        ("log.jsonl", lambda text: text[:-3] + "\n", r"compare`; JSONDecodeError"),
        ("log.jsonl", lambda text: text.replace('"loss": null, ', "", 1), "missing 1 required .* 'loss'"),
        ("log.jsonl", lambda text: "[1]\n" + text, "compare`; TypeError"),
    ],
)
def test_invalid_report_folders_are_rejected(tmp_path, file, change, words):
    path = report(tmp_path / "a", ONE) / file
    if change is None:
        path.unlink()
    else:
        path.write_text(change(path.read_text()))
    with pytest.raises(ArgumentError, match=words):
        load_reports([tmp_path / "a"])


def test_runs_with_a_duration_may_end_before_num_updates(tmp_path):
    folder = report(tmp_path / "a", ONE, duration=100.0)
    path = folder / "results.json"
    path.write_text(path.read_text().replace('"num_updates": 3', '"num_updates": 50'))
    assert set(load_reports([folder]).frame()["method"]) == {"Cheap", "Dear"}


@pytest.mark.usefixtures("as_shipped")
def test_invalid_combined_reports_are_rejected_without_writing_files(tmp_path):
    joined = load_reports([report(tmp_path / "a", ONE)])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    with pytest.raises(ArgumentError, match="^out: .*mine exists and is not a report"):
        write_combined_report(joined, tmp_path / "mine")
    with pytest.raises(ArgumentError, match="axis: expected one of updates, time, gradients, bytes; got 'update'"):
        write_combined_report(joined, tmp_path / "new", axis="update")
    with pytest.raises(ArgumentError, match="folders: expected at least one report"):
        load_reports([])
    assert {path.name for path in tmp_path.iterdir()} == {"a", "mine"}


def test_a_combined_report_is_written_atomically(tmp_path, monkeypatch):
    worth = {
        "A|B": (2, lambda seed: [0.0, 0.5 + seed / 100]),
        "C": (1, lambda seed: [0.0, 0.4 + seed / 90]),
        "D": (1, [0.1, 0.2]),
    }
    joined = load_reports([report(tmp_path / "a", worth, seeds=range(15), clients=4)])
    folder = tmp_path / "joined"
    files = write_combined_report(joined, folder, axis="gradients", baseline="A|B")
    names = ["report.md", "report.tex", "table.csv", "pairs.csv", "baseline.csv", "relative_time.csv"]
    names += ["accuracy.png", "clients.png"]
    assert [file.name for file in files] == names
    assert sorted(folder.iterdir()) == sorted(files)
    assert all(file.read_bytes()[:4] == b"\x89PNG" for file in files[6:])
    text = re.sub(" +", " ", files[0].read_text())
    assert r"A|B & 15 & 57.0 ± 2.5 & 57.0 ± 2.5 & 0.0 ± 0.0 &" in files[1].read_text()
    assert r"| A\|B | 15 | 57.0 ± 2.5 | 57.0 ± 2.5 | 0.0 ± 0.0 |" in text
    assert "at 1 gradients, %" in text
    assert "over all 3 tests" in text
    assert "Settings that differ" not in text
    table = pd.read_csv(files[2])
    pd.testing.assert_frame_equal(table, joined.frame(), check_dtype=False)
    assert list(table["method"]) == ["A|B", "C", "D"]
    assert math.isnan(table["updates_to_target"][2])
    assert r"difference to the accuracy of A\|B at equal cost, in percentage points" in text
    assert "| D | -37.00 ± 2.48 | -37.00 ± 2.48 | " in text
    beside = pd.read_csv(files[4])
    pd.testing.assert_frame_equal(beside, joined.differences("A|B"))
    assert [(line.method, line.baseline, line.seeds) for line in beside.itertuples()] == [
        ("C", "A|B", 15),
        ("D", "A|B", 15),
    ]
    pd.testing.assert_frame_equal(pd.read_csv(files[3]), joined.tests("gradients"))
    (grid,) = report_tables(joined)
    console = Console(width=80, record=True)
    console.print(grid)
    assert "57.0 ± 2.5" in console.export_text()
    before = files[0].read_bytes()
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_combined_report(joined, folder)
    assert files[0].read_bytes() == before


def test_each_problem_has_its_figures_and_too_few_pairs_are_reported(tmp_path):
    folders = [report(tmp_path / "a", ONE)]
    folders.append(report(tmp_path / "b", {"Cheap": ONE["Cheap"]}, data={"name": "a/b c", "checksum": "2"}))
    folders.append(report(tmp_path / "c", {"Alone": ONE["Cheap"]}, data={"name": "a b/c", "checksum": "3"}))
    folders.append(report(tmp_path / "d", {"Other": ONE["Dear"]}, eval_every=5))
    files = write_combined_report(load_reports(folders), tmp_path / "joined")
    pictures_ = {file.name for file in files if file.suffix == ".png"}
    ends = ("digits", "a-b-c", "a-b-c-")
    assert pictures_ == {f"{kind}-{end}.png" for kind in ("accuracy", "clients") for end in ends}
    text = files[0].read_text()
    assert "No methods have the 15 pairs of problem and seed that a test requires: at most 3." in text
    assert "- eval\\_every: 1 in" in text


def test_a_report_of_a_comparison_is_loaded_unchanged(tmp_path):
    found = compare(clusters(), [method("fedasync"), method("fedgs")], clients=3, num_updates=2, seeds=1)
    assert comparison_table(found).title == "clusters: 3 clients, 2 updates, 1 seed"
    write_report(found, tmp_path / "a")
    text = (tmp_path / "a" / "results.json").read_text()
    assert json.loads(text) == json.loads(json.dumps(found.results()))
    assert f'"seeds": {found.settings["seeds"]}' in text
    joined = load_reports([tmp_path / "a"])
    for name, runs in found.runs.items():
        for seed, one in enumerate(runs):
            logged = joined.runs["clusters"][name][seed]
            assert (logged.evaluations, logged.client_accuracy) == (one.evaluations, one.client_accuracy)


@pytest.mark.usefixtures("as_shipped")
def test_report_command_combines_reports_and_rejects_invalid_arguments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report(tmp_path / "a", ONE)
    report(tmp_path / "b", {"Third": ONE["Cheap"]}, num_updates=9)
    call = CliRunner().invoke
    done = call(app, ["report", "a", "b", "--axis", "bytes", "--baseline", "Dear"])
    assert done.exit_code == 0
    for words in (
        "digits",
        "Third",
        "75.0 ± 0.0",
        "Settings differ: num_updates: 3 in a, 9 in b",
        "Written to combined: ",
    ):
        assert words in done.output
    wrong = [(["a", "a"], "a and a both"), (["c"], "c/results.json cannot be read"), (["a", "--axis", "x"], "axis: ")]
    wrong.append((["a", "--baseline", "x"], "baseline: no method 'x'"))
    wrong.append((["a", "--out", "b"], "out: b exists and is not a report"))
    for arguments, words in wrong:
        assert words in str(call(app, ["report", *arguments]).exception)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "combined"}


def test_mean_ci_is_a_student_t_interval(tmp_path):
    values = [0.81, 0.84, 0.9, 0.7]
    found = mean_ci(values)
    low, high = stats.t.interval(0.95, 3, loc=np.mean(values), scale=stats.sem(values))
    assert (found.low, found.high) == (pytest.approx(low, rel=1e-12), pytest.approx(high, rel=1e-12))
    one = mean_ci([0.5])
    assert (one.value, one.half_width, one.low, one.high) == (0.5, None, None, None)


P = st.lists(st.floats(0, 1), max_size=8)


@given(P)
def test_holm_adjustment_equals_the_step_down_procedure(p):
    """At each level, the procedure rejects the smallest p-values while the i-th of m is at most level / (m - i)."""
    adjusted = holm(p)
    for level in (0.01, 0.05, 0.3, 0.9):
        rejected = set()
        for place, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
            if p[i] * (len(p) - place) > level:
                break
            rejected.add(i)
        assert {i for i, value in enumerate(adjusted) if value <= level} == rejected
    assert all(a >= b for a, b in zip(adjusted, p, strict=True))


def test_holm_adjustment_of_known_p_values():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_signed_rank_test_equals_scipy_and_a_known_p_value():
    draw = np.random.default_rng(0)
    scores = {name: {("digits", i): float(x) for i, x in enumerate(draw.normal(size=20))} for name in "ABC"}
    found = [*compare_pairs(pd.DataFrame(scores)).itertuples()]
    assert [(pair.first, pair.second, pair.count) for pair in found] == [("A", "B", 20), ("A", "C", 20), ("B", "C", 20)]
    for pair in found:
        x, y = (np.array(list(scores[name].values())) for name in (pair.first, pair.second))
        assert pair.p_value == stats.wilcoxon(x, y).pvalue
        assert (pair.wins, pair.losses) == ((x > y).sum(), (x < y).sum())
        assert pair.median_difference == pytest.approx(np.median(x - y))
    assert [pair.adjusted_p_value for pair in found] == holm([pair.p_value for pair in found])
    # All fifteen differences have the same sign. Two of the 2^15 sign patterns are as extreme.
    signs = {("digits", i): 1.0 + i for i in range(15)}
    (pair,) = compare_pairs(pd.DataFrame({"A": signs, "B": 0.0})).itertuples()
    assert (pair.p_value, pair.adjusted_p_value) == (2 / 2**15, 2 / 2**15)


COUNTS = st.lists(st.tuples(st.integers(0, 360), st.integers(0, 360)), min_size=15, max_size=60)


@given(COUNTS)
def test_signed_rank_test_of_fractions_equals_the_test_of_counts(counts):
    """Rounding of the fractions must not matter. Equal differences are ties, and differences of zero do not count."""
    scores = {name: {("digits", i): pair[j] / 360 for i, pair in enumerate(counts)} for j, name in enumerate("AB")}
    (pair,) = compare_pairs(pd.DataFrame(scores)).itertuples()
    differences = np.array([a - b for a, b in counts])
    counted = differences[differences != 0]
    assert pair.p_value == (stats.wilcoxon(counted).pvalue if counted.size else 1.0)
    assert (pair.wins, pair.losses) == ((differences > 0).sum(), (differences < 0).sum())
    assert pair.median_difference == pytest.approx(np.median(differences) / 360, abs=1e-12)


def test_signed_rank_test_is_exact_with_zero_differences_and_approximate_with_ties():
    def p(counts):
        scores = {("digits", i): (100 + count) / 360 for i, count in enumerate(counts)}
        return compare_pairs(pd.DataFrame({"A": scores, "B": 100 / 360}))["p_value"][0]

    # There are fourteen distinct positive differences and one difference of zero.
    assert p([*range(15)]) == 2 / 2**14
    # Fifteen equal differences share one rank. The sum of their signs is 15, and its standard deviation is sqrt(15).
    assert p([7] * 15) == pytest.approx(2 * stats.norm.sf(15**0.5), rel=1e-12)


def test_fewer_than_fifteen_pairs_give_no_p_value_and_equal_methods_give_one():
    scores = {("digits", i): float(i) for i in range(15)}
    few = {key: value for key, value in scores.items() if key != ("digits", 3)}
    found = compare_pairs(pd.DataFrame({"A": scores, "B": scores, "C": few, "D": {("mnist", 0): 1.0}}))
    assert found[["first", "second", "count"]].to_numpy().tolist() == [["A", "B", 15], ["A", "C", 14], ["B", "C", 14]]
    assert found["p_value"].isna().to_list() == found["adjusted_p_value"].isna().to_list() == [False, True, True]
    assert (found["p_value"][0], found["adjusted_p_value"][0], found["median_difference"][0]) == (1.0, 1.0, 0.0)


def test_targets_are_formatted_without_rounding(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, _: said.extend(text.get_text() for text in figure.axes[0].texts)
    )
    joined = load_reports([report(tmp_path / "a", ONE, target=0.925)])
    assert "updates to 92.5%" in joined.table("digits")
    plots.draw_accuracy(
        tmp_path / "x.png", {"A": [joined.runs["digits"]["Cheap"][0].evaluations]}, target=0.999, title=""
    )
    assert said == ["target\n99.9%"]
    assert [plots.format_percent(i / 1000) for i in (70, 290, 850, 999, 1000)] == ["7%", "29%", "85%", "99.9%", "100%"]


def test_axis_unit_depends_on_the_largest_value():
    assert plots.axis_unit("bytes", 999) == (1, "B", "sent down and up")
    assert plots.axis_unit("bytes", 1e9)[:2] == (1e9, "GB")
    assert plots.axis_unit("gradients", 0)[:2] == (1, "")
    assert plots.axis_unit("time", 1e12)[:2] == (1, "s")


def test_load_reports_rejects_a_single_path(tmp_path):
    with pytest.raises(ArgumentError, match=r"folders: expected a list of folders, got .*; write \["):
        load_reports(str(tmp_path))
