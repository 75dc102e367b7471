"""Metrics and rounds: Flower's own mean where all tell the same, and no crash where somebody lies."""

import math

import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import CheckpointError
from manifoldagg.integrations.flower.metrics import (
    MAX_METRIC_VALUES,
    MAX_METRICS,
    MAX_NAME_LENGTH,
    bounded_metrics,
    sample_count,
    weighted_mean,
    with_sample_count,
)
from manifoldagg.integrations.flower.rounds import Rounds

FLOATS = st.floats(-1e6, 1e6)
TOLD = st.lists(
    st.tuples(st.integers(1, 10**6), FLOATS, st.lists(FLOATS, min_size=2, max_size=2)), min_size=1, max_size=5
)
VALUES = st.one_of(st.integers(-(2**62), 2**62), st.floats(), st.lists(st.floats(), max_size=3))


@given(TOLD)
def test_mean_equals_flowers_mean_for_equal_metrics(told):
    records = [MetricRecord({"n": n, "loss": loss, "both": both}) for n, loss, both in told]
    contents = [RecordDict({"metrics": record}) for record in records]
    ours, theirs = weighted_mean(contents, "n"), aggregate_metricrecords(contents, "n")
    assert set(ours) == set(theirs) == {"loss", "both"}
    # A mean rounds each of its k sums and the quotient: relative to the largest that is added.
    error = 10 * 2**-52 * 1e6
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=error)
    assert ours["both"] == pytest.approx(theirs["both"], abs=error)


@given(st.lists(st.dictionaries(st.sampled_from(["n", "loss", "other"]), VALUES), max_size=4))
def test_any_metrics_result_in_a_record(told):
    contents = [RecordDict({"metrics": MetricRecord(metrics)}) for metrics in told]
    assert isinstance(weighted_mean(contents, "n"), MetricRecord)


@pytest.mark.parametrize("given_", [0, -1, 0.5, math.nan, math.inf, [3], 10**9 + 1, 1e308])
def test_sample_count_is_a_positive_integer_or_none(given_):
    assert sample_count(RecordDict({"metrics": MetricRecord({"n": given_})}), "n") is None
    assert sample_count(RecordDict({"config": ConfigRecord({"n": 3})}), "n") is None
    assert sample_count(RecordDict({"metrics": MetricRecord({"n": 3.0})}), "n") == 3


def mean(*told):
    return repr(weighted_mean([RecordDict({"m": MetricRecord({"n": n, "x": x})}) for n, x in told], "n").get("x"))


@given(st.permutations([(3, 0.5), (2, []), (1, [0.1, 0.2]), (3, math.nan), (3, math.inf), (2, 1.5), (1e308, 9.0)]))
def test_metrics_with_other_shapes_do_not_hide_the_others(told):
    assert mean(*told) == repr((3 * 0.5 + 2 * 1.5) / 5)


def test_mean_of_different_shapes_and_nonfinite_values():
    assert mean((1, 0.5), (3, [1.0, 2.0])) == "[1.0, 2.0]"
    assert mean((2, [1.0]), (2, 0.5)) == "0.5"
    assert mean((1, [1.0, math.nan]), (3, [math.inf, 4.0]), (1, [3.0, math.nan])) == "[2.0, 4.0]"
    assert mean((1, math.nan), (1, -math.inf)) == "nan"
    assert (mean((9, [])), mean((1e308, 0.5))) == ("[]", "None")


def size_of(content):
    """The number of values, and of the characters of all names."""
    values = [value for record in content.values() for value in record.values()]
    names = [name for record in content.values() for name in record]
    return sum(len(x) if isinstance(x, list | str | bytes) else 1 for x in values), sum(map(len, [*content, *names]))


def test_bounded_records_have_all_but_arrays():
    content = RecordDict({"arrays": ArrayRecord(), "metrics": MetricRecord({"n": 1}), "config": ConfigRecord({"a": 1})})
    assert list(bounded_metrics(content, "n", keeps_config=True)) == ["metrics", "config"]
    assert list(bounded_metrics(content, "n", keeps_config=False)) == ["metrics"]


def test_honest_metrics_are_unchanged():
    content = RecordDict(
        {"metrics": MetricRecord({"n": 3, "loss": 0.5, "by class": [0.25] * 10}), "more": MetricRecord({"x": 1})}
    )
    assert bounded_metrics(content, "n", keeps_config=False) == content


FLOODS = {
    "names": {"metrics": MetricRecord({f"invented-{i}": 0.0 for i in range(5000)} | {"n": 7})},
    "records": {f"record-{i}": MetricRecord({"x": 0.0}) for i in range(5000)} | {"metrics": MetricRecord({"n": 7})},
    "values": {"metrics": MetricRecord({"x": [0.0] * 10**6, "n": 7})},
    "long names": {"y" * 10**5: MetricRecord({"x" * 10**5: 0.0}), "metrics": MetricRecord({"n": 7})},
    "a long name of a record": {"y" * 10**5: MetricRecord({"n": 9}), "metrics": MetricRecord({"n": 7})},
    "control characters": {"metrics": MetricRecord({"loss\nERROR: forged": 0.0, "n": 7})},
    "configuration": {"config": ConfigRecord({"x": b"0" * 10**6}), "metrics": MetricRecord({"n": 7})},
    "many configurations": {f"c{i}": ConfigRecord({f"x{j}": [j] for j in range(100)}) for i in range(100)}
    | {"metrics": MetricRecord({"n": 7})},
}


@pytest.mark.parametrize("records", FLOODS.values(), ids=FLOODS)
@pytest.mark.parametrize("keeps_config", [True, False])
def test_a_node_cannot_fill_the_memory_with_metrics(records, keeps_config):
    found = bounded_metrics(RecordDict(records), "n", keeps_config=keeps_config)
    assert sample_count(found, "n") == 7
    values, characters = size_of(found)
    assert values <= MAX_METRIC_VALUES + MAX_METRICS
    assert characters <= 3 * MAX_METRICS * MAX_NAME_LENGTH
    assert all(name.isprintable() for record in found.values() for name in record)


def test_invented_names_displace_no_metric_that_more_nodes_report():
    invented = [MetricRecord({"n": 1} | {f"node {i}, {j}": 0.0 for j in range(MAX_METRICS - 1)}) for i in range(3)]
    honest = [MetricRecord({"n": 1, "loss": 0.5})] * 2
    contents = [RecordDict({"metrics": record}) for record in (*invented, *honest)]
    found = weighted_mean(contents, "n")
    assert found["loss"] == 0.5
    assert len(found) == MAX_METRICS


def test_names_in_several_records_of_a_node_displace_no_metric_that_more_nodes_report():
    invented = {f"r{i}": MetricRecord({"n": 1} | {f"m{j}": 0.0 for j in range(MAX_METRICS)}) for i in range(3)}
    honest = [RecordDict({"metrics": MetricRecord({"n": 1, "loss": 0.5})})] * 2
    assert weighted_mean([RecordDict(invented), *honest], "n")["loss"] == 0.5


def test_several_records_of_a_node_do_not_increase_its_weight():
    repeated = RecordDict({f"r{i}": MetricRecord({"n": 1, "loss": 3.0}) for i in range(9)})
    honest = RecordDict({"metrics": MetricRecord({"n": 2, "loss": 0.0})})
    assert weighted_mean([repeated, honest], "n") == {"loss": 1.0}


def test_sample_counts_are_replaced_in_a_copy():
    content = RecordDict({"other": MetricRecord({"n": 0}), "metrics": MetricRecord({"n": 10**9, "loss": 0.5})})
    found = with_sample_count(content, "n", 30)
    assert (sample_count(found, "n"), found["metrics"]["loss"], content["metrics"]["n"]) == (30, 0.5, 10**9)


def test_rounds_continue_from_the_updates_of_the_server(tmp_path):
    rounds = Rounds(tmp_path / "server")
    rounds.record("evaluate_metrics_serverapp", 0, MetricRecord({"loss": 0.1}))
    for number in (1, 2, 3):
        rounds.record("train_metrics_clientapp", number, MetricRecord({"loss": math.nan, "all": [1, 2], "n": number}))
        rounds.record("evaluate_metrics_clientapp", number, None)
        rounds.finish_round(10 * number)
    rounds.write()
    for updates, count in ((35, 3), (30, 3), (29, 2), (9, 0)):
        again = Rounds(tmp_path / "server")
        again.read(updates)
        assert (again.count, again.cumulative_updates) == (count, [0, 10, 20, 30][: count + 1])
        assert repr(again.result.train_metrics_clientapp) == repr(
            {n: rounds.result.train_metrics_clientapp[n] for n in range(1, count + 1)}
        )
        assert again.result.evaluate_metrics_serverapp == rounds.result.evaluate_metrics_serverapp
    nowhere = Rounds(tmp_path / "another")
    nowhere.read(7)
    assert nowhere.cumulative_updates == [0]
    (tmp_path / "server.rounds").write_bytes(b"junk")
    with pytest.raises(CheckpointError, match="server.rounds"):
        rounds.read(30)
