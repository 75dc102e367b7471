"""Tests of weight averaging, concurrency and buffer sizes in comparisons."""

import io
import json

import pytest
from rich.console import Console

from manifoldagg.cli.compare import comparison_table
from manifoldagg.errors import ArgumentError
from manifoldagg.experiments.combined_report import load_reports, write_combined_report
from manifoldagg.experiments.compare import compare
from manifoldagg.experiments.default_rates import methods_with_scaled_rates
from manifoldagg.experiments.registry import method, methods
from manifoldagg.experiments.report import write_report
from manifoldagg.experiments.weight_averaging import WeightAveraging
from manifoldagg.federated import rules
from tests.simulation.test_run import clusters

pytestmark = pytest.mark.filterwarnings("ignore::manifoldagg.errors.StabilityWarning")
SIZE = {"clients": 5, "num_updates": 8, "seeds": 2}


@pytest.fixture(scope="module")
def comparison():
    return compare(clusters(), methods("asynccurve,fedbuff:size=2"), **SIZE, averaging="start=0.5,cycle=1")


def test_the_log_and_the_tables_contain_the_average_next_to_the_model(comparison, tmp_path):
    rows = [row for row in comparison.log() if row["method"].startswith("AsyncCurve") and row["seed"] == 0]
    assert [row["average_accuracy"] is None for row in rows] == [True] * 4 + [False] * 5
    last = [run.evaluations[-1] for run in comparison.runs["AsyncCurve"]]
    frame = comparison.frame()
    assert frame.loc["AsyncCurve", "average_mean"] == sum(row.average_accuracy for row in last) / 2
    assert frame.loc["AsyncCurve", "average_loss_mean"] == pytest.approx(sum(row.average_loss for row in last) / 2)
    heads = [column.header for column in comparison_table(comparison).columns]
    assert heads[1:5] == ["final\nacc.", "avg.\nacc.", "loss", "avg.\nloss"]
    assert comparison.settings["averaging"] == "WeightAveraging(start=0.5, cycle=1, period=None)"
    write_report(comparison, tmp_path / "report")
    combined = load_reports([tmp_path / "report"])
    (problem,) = combined.runs
    table = combined.table(problem)
    assert {"final, %", "average, %", "loss", "average loss"} <= set(table)
    means = combined.frame().set_index("method")["average"]
    assert means["AsyncCurve"] == pytest.approx(frame.loc["AsyncCurve", "average_mean"])
    write_combined_report(combined, tmp_path / "combined")
    assert "average, %" in (tmp_path / "combined" / "report.md").read_text()


def test_a_narrow_terminal_shows_the_methods_and_their_averages(comparison):
    screen = io.StringIO()
    Console(width=80, file=screen).print(comparison_table(comparison))
    text = screen.getvalue()
    for words in ("AsyncCurve", "FedBuff", "final", "avg.", "updates", "Gini"):
        assert words in text
    assert "…" not in text


def test_results_do_not_change_without_averaging(comparison):
    plain = compare(clusters(), methods("asynccurve,fedbuff:size=2"), **SIZE)
    assert "averaging" not in plain.settings
    assert all(row["average_accuracy"] is None for row in plain.log())
    assert [column.header for column in comparison_table(plain).columns][1:3] == ["final\nacc.", "best\nacc."]
    for name, runs in plain.runs.items():
        averaged = comparison.runs[name]
        assert [run.accuracy for run in runs] == [run.accuracy for run in averaged]
        assert list(plain.summary()[name]) == list(comparison.summary()[name])[: len(plain.summary()[name])]


def test_start_is_a_fraction_of_the_versions_or_a_version_number():
    settings = WeightAveraging.parse("start=0.75,cycle=5")
    assert settings == WeightAveraging(start=0.75, cycle=5)
    for rule, first in (
        (rules.FedAsync(), 75),
        (rules.FedBuff(size=4), 19),
        (rules.Private(rules.FedBuff(size=4), clip=1.0, noise=1.0, seed=0), 19),
        (rules.FedAvg(cohort=5), 15),
    ):
        assert settings.first_version(rule, num_updates=100) == first
        assert WeightAveraging(start=7).first_version(rule, num_updates=100) == 7


def test_period_sets_the_options_of_rules_that_write_their_average():
    settings = WeightAveraging(start=0.5, cycle=2, period=4)
    plain, curve = settings.apply(methods("fedasync,asynccurve"), 20, range(5))
    assert plain == method("fedasync")
    rule = curve.bind(range(5)).rule
    assert (rule.start, rule.cycle, rule.periodic) == (10, 2, 4)
    found = compare(clusters(), [curve], **SIZE, averaging="start=2,cycle=1,period=4")
    expected = compare(clusters(), methods("asynccurve:start=2,cycle=1,periodic=4"), **SIZE)
    (written,), (other,) = found.runs.values(), expected.runs.values()
    assert [run.accuracy for run in written] == [run.accuracy for run in other]
    with pytest.raises(ArgumentError, match="^swa: period: expected a rule that writes its average"):
        settings.apply(methods("fedasync"), 20, range(5))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("start=1.5", "^swa: start: expected an integer"),
        ("start=-1", "^swa: start: expected a finite number >= 0"),
        ("cycle=0", "^swa: cycle: expected"),
        ("period=0", "^swa: period: expected"),
        ("begin=2", "^swa: no option 'begin'"),
    ],
)
@pytest.mark.usefixtures("as_shipped")
def test_invalid_averaging_settings_are_rejected(text, words):
    with pytest.raises(ArgumentError, match=words):
        compare(clusters(), methods("fedasync"), **SIZE, averaging=text)


def test_buffer_applies_to_rules_with_a_buffer():
    options = {**SIZE, "concurrency": 3, "refill": 2}
    found = compare(clusters(), methods("fedasync,fedbuff"), **options, buffer=4)
    assert (found.settings["buffer"], found.settings["refill"]) == (4, 2)
    by_option = compare(clusters(), methods("fedasync,fedbuff:size=4"), **options)
    assert [run.trace for run in found.runs["FedBuff"]] == [run.trace for run in by_option.runs["FedBuff(size=4)"]]
    assert found.runs["FedAsync"] == by_option.runs["FedAsync"]
    with pytest.raises(ArgumentError, match="^buffer: expected a method with a buffer, such as fedbuff"):
        compare(clusters(), methods("fedasync"), **SIZE, buffer=4)
    with pytest.raises(ArgumentError, match="^methods: Krum: num_byzantine: expected at most"):
        compare(clusters(), methods("krum"), **SIZE, buffer=2)


def test_a_larger_buffer_has_its_own_scaled_rate():
    def rate(name, **options):
        (scaled,), _ = methods_with_scaled_rates(name, clients=100, concurrency=100, **options)
        return scaled.bind(range(100)).rule.rate

    assert rate("fedbuff:size=1", buffer=20) == rate("fedbuff:size=20") > rate("fedbuff:size=1")


def test_averaging_settings_can_be_serialized_as_json(comparison):
    assert json.loads(json.dumps(comparison.results()))["settings"] == comparison.settings
