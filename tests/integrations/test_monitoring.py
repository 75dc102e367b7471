"""Watching from elsewhere: what logs, TensorBoard and Prometheus themselves say of a server."""

import logging
import math
import re
import sys
import time
from pathlib import Path

import pytest
import torch

from manifoldagg import tensor_file
from manifoldagg.errors import ArgumentError, CheckpointError
from manifoldagg.federated import Payload, Server, ServerLimits
from manifoldagg.federated.rules import FedBuff, FedOrtho
from manifoldagg.integrations.monitoring import PROMETHEUS_METRICS, to_logging, to_prometheus, to_tensorboard
from manifoldagg.manifolds import Flat


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def payload(value=1.0):
    return Payload(torch.full((1, 2), value), 1)


def run(watcher, folder, monkeypatch, rule=None):
    """Every event there is, in a life of its own: what was taken is 3 s old, the second of them stale."""
    clock = Clock()
    server = Server(
        Flat(2), FedOrtho(0.5) if rule is None else rule, torch.zeros(2), clock=clock, limits=ServerLimits(timeout=10.0)
    )
    server.on_event(watcher)
    first, second, third = (server.dispatch(name) for name in ("a", "b", "c\n"))
    server.dispatch("late")
    clock.now = 3.0
    assert not server.receive(third, payload(math.nan)).accepted
    assert server.receive(first, payload()).accepted
    assert server.receive(second, payload()).staleness == (rule is None)
    server.drop(third)
    clock.now = 11.0
    server.expire()
    server.save(folder / "saved")

    def full(*_, **__):
        raise CheckpointError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(tensor_file, "save", full)
        with pytest.raises(CheckpointError):
            server.save(folder / "saved")
    server.close()
    return server


def test_a_log_has_a_line_for_each_event(tmp_path, monkeypatch, caplog):
    logger = logging.getLogger("hospital")
    with caplog.at_level(logging.INFO, "hospital"):
        run(to_logging(logger), tmp_path, monkeypatch)
    records = [record for record in caplog.records if record.name == "hospital"]
    lines = [record.getMessage() for record in records]
    kinds = [
        *["Dispatched"] * 4,
        "Rejected",
        *["Accepted"] * 2,
        "Dropped",
        "Expired",
        "CheckpointWritten",
        "CheckpointFailed",
    ]
    assert [line.split()[0] for line in lines] == [*kinds, "Closed"]
    assert [type(record.event).__name__ for record in records] == [*kinds, "Closed"]
    warned = {record.event.__class__.__name__ for record in records if record.levelno == logging.WARNING}
    assert warned == {"Rejected", "Expired", "CheckpointFailed"}
    assert "\n" not in "".join(lines)
    assert "latency=3 " in lines[6]
    assert "staleness=1 " in lines[6]
    assert "field='points'" in lines[4]
    assert len(max(lines, key=len)) < 250


def test_disabled_log_levels_create_no_records(tmp_path, monkeypatch):
    logger = logging.getLogger("silent")
    logger.setLevel(logging.WARNING)
    made = []
    logger.addFilter(lambda record: made.append(record.levelno) or False)
    run(to_logging(logger), tmp_path, monkeypatch)
    assert made == [logging.WARNING] * 3


def test_tensorboard_receives_each_metric_by_version(tmp_path, monkeypatch):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with tensorboard.SummaryWriter(tmp_path / "runs") as writer:
        server = run(to_tensorboard(writer), tmp_path, monkeypatch)
    read = accumulator.EventAccumulator(str(tmp_path / "runs"))
    read.Reload()

    def curve(tag):
        return [(point.step, point.value) for point in read.Scalars(tag)]

    assert curve("updates/staleness") == [(1, 0.0), (2, 1.0)]
    assert curve("updates/latency") == [(1, 3.0), (2, 3.0)]
    assert curve("updates/weight") == [(i + 1, pytest.approx(row["weight"])) for i, row in enumerate(server.history)]
    # The first update met no drift: its cosine is no number.
    assert [step for step, _ in curve("updates/cosine")] == [2]
    assert curve("rejected/points") == [(0, 1.0)]
    assert curve("tickets") == [(0, float(n)) for n in (1, 2, 3, 4, 4)] + [(1, 3.0)] + [
        *[(2, 2.0), (2, 1.0)],
        *[(2, 0.0)] * 4,
    ]
    assert curve("memory/model") == [(1, 8.0), (2, 8.0)]
    tags = read.Tags()["scalars"]
    assert {"updates/seconds", "updates/rate", "updates/norm"} <= set(tags)
    assert not {"updates/client", "updates/accepted", "updates/reason", "updates/version"} & set(tags)


def test_prometheus_counts_all_events(tmp_path, monkeypatch):
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    server = run(to_prometheus(registry), tmp_path, monkeypatch)

    def value(name, **labels):
        return registry.get_sample_value(f"manifoldagg_{name}", labels)

    totals = {
        "dispatched": 4,
        "accepted": 2,
        "dropped": 1,
        "expired": 1,
        "checkpoints_written": 1,
        "checkpoints_failed": 1,
    }
    assert {name: value(f"{name}_total") for name in totals} == totals
    assert value("rejected_total", field="points") == server.rejected["points"] == 1
    assert (value("staleness_versions_count"), value("staleness_versions_sum")) == (2, 1)
    assert (value("staleness_versions_bucket", le="0.0"), value("staleness_versions_bucket", le="1.0")) == (1, 2)
    assert (value("latency_seconds_bucket", le="2.0"), value("latency_seconds_bucket", le="5.0")) == (0, 2)
    assert value("step_seconds_count") == 2
    assert value("step_seconds_sum") > 0
    assert (value("version"), value("tickets"), value("memory_bytes", kind="model")) == (2, 0, 8)


PAGE = Path(__file__).parents[2] / "docs" / "guide" / "monitoring.md"
STABLE = {
    "manifoldagg_accepted_total": ("counter", "updates", ""),
    "manifoldagg_checkpoints_failed_total": ("counter", "checkpoints", ""),
    "manifoldagg_checkpoints_written_total": ("counter", "checkpoints", ""),
    "manifoldagg_dispatched_total": ("counter", "tickets", ""),
    "manifoldagg_dropped_total": ("counter", "tickets", ""),
    "manifoldagg_expired_total": ("counter", "tickets", ""),
    "manifoldagg_last_checkpoint_timestamp_seconds": ("gauge", "seconds", ""),
    "manifoldagg_latency_seconds": ("histogram", "seconds", ""),
    "manifoldagg_memory_bytes": ("gauge", "bytes", "kind"),
    "manifoldagg_rejected_total": ("counter", "updates", "field"),
    "manifoldagg_staleness_versions": ("histogram", "versions", ""),
    "manifoldagg_step_seconds": ("histogram", "seconds", ""),
    "manifoldagg_tickets": ("gauge", "tickets", ""),
    "manifoldagg_version": ("gauge", "versions", ""),
}
"""The metrics that dashboards and alerts of users contain: a change of this table breaks them."""


def test_the_guide_lists_the_stable_names_kinds_units_and_labels():
    section = PAGE.read_text().partition("## Names and units of the Prometheus metrics")[2]
    rows = re.findall(r"^\| `(manifoldagg_\w+)` \| (\w+) \| (\w+) \| (?:`(\w+)`|–) \|", section, flags=re.M)
    assert {name: (kind, unit, label) for name, kind, unit, label in rows} == STABLE


def test_the_exported_metrics_are_the_documented_ones(tmp_path, monkeypatch):
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    run(to_prometheus(registry), tmp_path, monkeypatch)
    found, labels = {}, {}
    for family in registry.collect():
        found[family.name] = family.type
        # Prometheus adds the label `le` to the buckets of a histogram.
        labels[family.name] = {label for sample in family.samples for label in sample.labels} - {"le"}
    expected = {name.removesuffix("_total"): facts for name, facts in STABLE.items()}
    assert found == {name: kind for name, (kind, _, _) in expected.items()}
    assert labels == {name: {label} - {""} for name, (_, _, label) in expected.items()}
    # Prometheus recommends that the name of a time or a size ends with its unit.
    assert all(name.endswith(unit) for name, (_, unit, _) in expected.items() if unit in ("seconds", "bytes"))
    units = {metric.name: metric.unit for metric in PROMETHEUS_METRICS}
    assert units == {name: unit for name, (_, unit, _) in expected.items()}


def test_the_time_of_the_last_checkpoint_is_a_unix_time(tmp_path):
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    server = Server(Flat(2), FedBuff(1), torch.zeros(2))
    server.on_event(to_prometheus(registry))
    name = "manifoldagg_last_checkpoint_timestamp_seconds"
    assert registry.get_sample_value(name) == 0
    before = time.time()
    server.save(tmp_path / "checkpoint")
    assert before <= registry.get_sample_value(name) <= time.time()


def test_a_second_registration_in_a_registry_is_rejected():
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    to_prometheus(registry)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        to_prometheus(registry)


def test_update_in_progress_at_the_subscription_has_no_times():
    """NaN would stay in the sum for ever."""
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()

    class Begins(FedBuff):
        def step(self, *given, **named):
            if not begun:
                begun.append(server.on_event(to_prometheus(registry)))
            return super().step(*given, **named)

    begun = []
    server = Server(Flat(2), Begins(2), torch.zeros(2))
    for name in "ab":
        assert server.receive(server.dispatch(name), payload()).accepted
    assert registry.get_sample_value("manifoldagg_accepted_total") == 2
    assert registry.get_sample_value("manifoldagg_latency_seconds_count") == 1
    assert math.isfinite(registry.get_sample_value("manifoldagg_latency_seconds_sum"))


def test_error_without_prometheus_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'manifoldagg\[prometheus\]'"):
        to_prometheus()


def test_tensorboard_rejects_a_path_instead_of_a_writer(tmp_path):
    with pytest.raises(ArgumentError, match=r"writer: expected a SummaryWriter, got .*; write SummaryWriter\(folder\)"):
        to_tensorboard(str(tmp_path))
