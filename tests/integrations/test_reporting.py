"""Reports of a run: no rejected update and no failed task is missing from the log and from the metrics of the rounds."""

import logging
import re
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg import tensor_file
from manifoldagg.errors import ArgumentError, CheckpointError
from manifoldagg.federated import CheckpointPolicy, Durability, ServerLimits, UpdateLimits, rules
from manifoldagg.federated.server.events import Accepted, CheckpointFailed, Dispatched, Rejected
from manifoldagg.integrations.flower import Asynchronous
from manifoldagg.integrations.flower.reporting import MAX_LISTED_NODES, RunReport
from tests.integrations.engine import running
from tests.integrations.test_strategy import asynchronous, first, halfway, plain_app

LINE = re.compile(r"node (\d+): (update rejected|training failed|evaluation failed) \((\d+) so far\): (.*)")
UNLOGGED = re.compile(r"^Not shown above \((\d+)\): node ")


def app_with(update):
    """A `ClientApp` whose replies `update` changes, given the state dict, the metrics and the partition."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        metrics = {"num-examples": 10, "loss": 0.5}
        state = dict(message.content["arrays"].to_torch_state_dict())
        update(state, metrics, context.node_config["partition-id"])
        records = {"arrays": ArrayRecord(state), "metrics": MetricRecord(metrics)}
        return Message(RecordDict(records), reply_to=message)

    return app


def break_reply(state, metrics, part):
    if part == 0:
        state["0.bias"] = state["0.bias"] * float("nan")
    elif part == 1:
        del state["0.bias"]
    elif part == 2:
        del metrics["num-examples"]
    else:
        time.sleep(0.1)  # so that there is time for several rejections in a round


def messages(caplog, level=logging.NOTSET):
    return [record.getMessage() for record in caplog.records if record.name == "flwr" and record.levelno >= level]


def num_reported(lines):
    """The number of events that a log reports: those with a line, and those that other lines count."""
    logged = sum(LINE.fullmatch(line) is not None for line in lines)
    return logged + sum(int(count) for line in lines for count in UNLOGGED.findall(line))


def test_the_log_and_the_metrics_contain_every_rejected_update(caplog):
    strategy = asynchronous(updates=4, fraction_evaluate=0.0)
    with caplog.at_level(logging.INFO, "flwr"), running(app_with(break_reply), 4) as engine:
        result = strategy.start(engine.grid, first(), num_rounds=4, timeout=60.0)
        parts = dict(engine.nodes)
    rejected = strategy.server.rejected
    assert set(rejected) == {"model", "samples"}
    assert sum(rejected.values()) >= 12
    lines = messages(caplog, logging.WARNING)
    assert num_reported(lines) == sum(rejected.values())
    reasons = {parts[int(found[1])]: found[4] for found in map(LINE.fullmatch, lines) if found}
    assert reasons[0] == "model: 0.bias: expected finite values, got NaN or infinity"
    assert reasons[1] == "model: missing: 0.bias"
    assert reasons[2].startswith("samples: expected the metric 'num-examples', an integer from 1 to ")
    total = Counter()
    for metrics in result.train_metrics_clientapp.values():
        assert (metrics["accepted"], metrics["failed"], metrics["loss"]) == (4, 0, 0.5)
        by_field = {key.removeprefix("rejected-"): n for key, n in metrics.items() if key.startswith("rejected-")}
        assert metrics["rejected"] == sum(by_field.values())
        total.update(by_field)
    assert total == rejected


def test_a_round_without_accepted_updates_has_metrics(caplog):
    def update(state, metrics, part):
        state["0.bias"] = state["0.bias"] * float("nan")

    strategy = asynchronous(fraction_evaluate=0.0)
    with caplog.at_level(logging.INFO, "flwr"), running(app_with(update), 2) as engine:
        result = strategy.start(engine.grid, first(), num_rounds=2, timeout=1.0)
    metrics = result.train_metrics_clientapp
    assert {n: x["accepted"] for n, x in metrics.items()} == {1: 0, 2: 0}
    assert sum(x["rejected"] for x in metrics.values()) == strategy.server.rejected["model"] > 2
    assert {x["rejected"] - x["rejected-model"] for x in metrics.values()} == {0}
    lines = messages(caplog)
    assert "round 1: timeout of 1 s, with 0 of 2 updates" in lines
    assert any(re.fullmatch(r"aggregate_train: 0 updates accepted, \d+ rejected \(model \d+\), .*", x) for x in lines)


def test_the_round_line_has_counts_staleness_and_seconds(caplog):
    strategy = asynchronous(updates=6)
    with caplog.at_level(logging.INFO, "flwr"), running(plain_app(), 3) as engine:
        started = time.monotonic()
        strategy.start(engine.grid, first(), num_rounds=2, evaluate_fn=lambda n, x: MetricRecord({"size": n}))
        elapsed = time.monotonic() - started
    lines = messages(caplog)
    pattern = re.compile(
        r"aggregate_train: 6 updates accepted, 0 rejected, 0 tasks failed; "
        r"staleness mean (\d+\.\d\d), max (\d+); (\d+\.\d\d) s"
    )
    rounds = [found for found in map(pattern.fullmatch, lines) if found]
    history = [row["staleness"] for row in strategy.server.history]
    for found, stale in zip(rounds, (history[:6], history[6:12]), strict=True):
        assert (found[1], int(found[2])) == (f"{sum(stale) / 6:.2f}", max(stale))
    # Two decimals round each of two numbers up by at most 0.005 s.
    assert sum(float(found[3]) for found in rounds) <= elapsed + 0.01
    assert "Initial global evaluation results: {'size': 0}" in lines
    for number in (1, 2):
        place = lines.index(f"[ROUND {number}/2]")
        assert (
            "\t└──> Aggregated MetricRecord: {'loss': 0.5, 'accepted': 6, 'rejected': 0, 'failed': 0}" in lines[place:]
        )
        assert f"aggregate_evaluate: Received 3 results and 0 failures (round {number})" in lines[place:]
        place = lines.index(f"\t└──> MetricRecord: {{'size': {number}}}")
        assert lines[place - 1] == "Global evaluation"


def test_failed_tasks_are_counted_apart_from_rejected_updates(caplog):
    released = threading.Event()

    def train(state, part):
        if part == 1:
            raise RuntimeError("out of memory")
        if part == 2:
            released.wait()
        time.sleep(0.2)
        return halfway(state, part)

    def evaluate(part):
        if part == 1:
            raise RuntimeError("no validation data")

    strategy = asynchronous(updates=12, task_timeout=1.5, min_evaluate_nodes=1)
    with caplog.at_level(logging.INFO, "flwr"), running(plain_app(train, evaluate), 3) as engine:
        try:
            result = strategy.start(engine.grid, first(), num_rounds=1, timeout=60.0)
        finally:
            released.set()
        parts = dict(engine.nodes)
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["accepted"], metrics["rejected"], strategy.server.rejected) == (12, 0, {})
    assert metrics["failed"] == metrics["failed-error"] + metrics["failed-timeout"]
    found = [match for match in map(LINE.fullmatch, messages(caplog, logging.WARNING)) if match]
    kinds = {(parts[int(match[1])], match[2], match[4].partition(":")[0]) for match in found}
    assert kinds >= {(1, "training failed", "error"), (2, "training failed", "timeout")}
    assert (1, "evaluation failed", "error") in kinds
    assert any("out of memory" in match[4] for match in found)


@pytest.mark.parametrize(
    ("limits", "seconds", "field"),
    [
        (UpdateLimits(max_staleness=0), 0.1, "staleness"),
        (ServerLimits(timeout=0.3), 0.8, "ticket"),
    ],
)
def test_stale_updates_and_updates_of_expired_tickets_count_as_rejected(limits, seconds, field, caplog):
    def train(state, part):
        time.sleep(seconds * (part == 1))
        return halfway(state, part)

    strategy = asynchronous(updates=1, fraction_evaluate=0.0, limits=limits)
    with running(plain_app(train), 2) as engine:

        def look(number, arrays):
            time.sleep(0.05)
            if any(
                f"rejected-{field}" in metrics for metrics in strategy._rounds.result.train_metrics_clientapp.values()
            ):
                strategy.stop()

        result = strategy.start(engine.grid, first(), num_rounds=500, timeout=60.0, evaluate_fn=look)
    rejected = [metrics["rejected"] for metrics in result.train_metrics_clientapp.values() if metrics["rejected"]]
    assert len(rejected) == 1
    assert num_reported(messages(caplog, logging.WARNING)) == rejected[0]


def test_a_user_function_aggregates_and_its_keys_keep_their_values(caplog):
    def count(records, key):
        return MetricRecord({"records": len(records), "rejected": -1.0})

    strategy = asynchronous(train_metrics_aggr_fn=count, fraction_evaluate=0.0)
    with running(plain_app(), 2) as engine:
        result = strategy.start(engine.grid, first(), num_rounds=1)
    assert result.train_metrics_clientapp[1] == MetricRecord(
        {"records": 2, "rejected": -1.0, "accepted": 2, "failed": 0}
    )
    assert "aggregate_train: the aggregated metrics hide the server's own: rejected" in messages(caplog)


def test_a_second_reply_to_a_task_is_a_rejected_update(caplog):
    class Twice(Asynchronous):
        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            found = super().aggregate_train(server_round, replies)
            return found if found[0] is not None or not replies else super().aggregate_train(server_round, replies)

    strategy = Twice(rules.FedAsync(rate=0.5), updates=3, fraction_evaluate=0.0)
    with running(plain_app(), 2) as engine:
        result = strategy.start(engine.grid, first(), num_rounds=1)
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["accepted"], metrics["rejected"], metrics["rejected-ticket"]) == (3, 2, 2)
    assert any("ticket: the task of this reply has already ended" in line for line in messages(caplog))


def test_an_unreadable_reply_is_a_failed_task(caplog):
    with running(plain_app(), 2) as engine:
        pull, broken = engine.grid.pull_messages, []

        def once(names):
            if len(names) == 1 and not broken:
                broken.extend(names)
                raise ValueError("invalid reply")
            return pull(names)

        engine.grid.pull_messages = once
        strategy = asynchronous(concurrency=1, updates=3, fraction_evaluate=0.0)
        result = strategy.start(engine.grid, first(), num_rounds=1, timeout=60.0)
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["failed"], metrics["failed-unreadable"]) == (1, 1)
    assert any("training failed (1 so far): unreadable: ValueError: invalid reply" in x for x in messages(caplog))


def test_a_stopped_round_is_reported(caplog):
    counts = Counter()

    def update(state, metrics, part):
        counts[part] += 1
        if counts[part] > 2:
            strategy.stop()
        state["0.bias"] = state["0.bias"] * float("nan")

    strategy = asynchronous(fraction_evaluate=0.0)
    with caplog.at_level(logging.INFO, "flwr"), running(app_with(update), 2) as engine:
        strategy.start(engine.grid, first(), num_rounds=1, timeout=60.0)
    lines = messages(caplog)
    assert "round 1: stopped before its end" in lines
    assert num_reported(lines) == strategy.server.rejected["model"] > 0


@given(
    st.lists(st.tuples(st.integers(0, 8), st.sampled_from(["model", "samples", "error"]), st.booleans()), max_size=60),
    st.integers(1, 60),
)
def test_lines_and_counts_add_up_to_the_events(events, length):
    """Whatever happens, each event has a line or is in a count, and the round lines count all of them."""
    logger, records = logging.getLogger("flwr"), []
    handler = logging.Handler()
    handler.emit = records.append
    logger.addHandler(handler)
    try:
        report, counts = RunReport(), Counter()
        for number, (node, kind, in_evaluation) in enumerate(events):
            if kind == "error":
                report.fail(node, kind, "raised", in_evaluation=in_evaluation)
            else:
                report.reject(node, f"{kind}: expected something else")
            if number % length == 0:
                counts.update(report.metrics(0))
                report.end_round(0, 1.0)
        counts.update(report.metrics(0))
        report.end_round(0, 1.0)
    finally:
        logger.removeHandler(handler)
    lines = [record.getMessage() for record in records]
    in_training = [event for event in events if not (event[1] == "error" and event[2])]
    assert counts["rejected"] + counts["failed"] == len(in_training)
    assert num_reported(lines) == len(events)
    assert all(line.count("once") + line.count("times") <= MAX_LISTED_NODES for line in lines)
    first_ones = {(node, kind) for node, kind, _ in events if kind != "error"}
    assert {
        (int(x[1]), x[4].partition(":")[0]) for x in map(LINE.fullmatch, lines) if x and "rej" in x[2]
    } == first_ones


def test_a_persistent_failure_has_few_lines(caplog):
    report = RunReport()
    for _ in range(1000):
        report.reject(7, "model: expected finite values")
    assert [int(LINE.fullmatch(line)[3]) for line in messages(caplog)] == [2**k for k in range(10)]
    report.flush()
    assert messages(caplog)[-1] == "Not shown above (990): node 7: update rejected 990 times"


def test_a_reason_of_a_node_stays_on_one_line(caplog):
    RunReport().fail(7, "error", "first\nINFO: second" + "x" * 1000)
    (line,) = messages(caplog)
    assert "\n" not in line
    assert len(line) < 400


def test_events_of_every_run_reach_the_subscribers_once(tmp_path):
    events = []
    options = {"updates": 2, "fraction_evaluate": 0.0, "min_available_nodes": 1}
    checkpoint = CheckpointPolicy(tmp_path / "server", every_updates=1000)
    strategy = asynchronous(on_event=[events.append], durability=Durability(checkpoint), resume=True, **options)
    with running(plain_app(), 1) as engine:
        for rounds in (1, 3):
            events.clear()
            before = strategy.server.updates if rounds > 1 else 0
            strategy.start(engine.grid, first(), num_rounds=rounds, timeout=60.0)
            assert isinstance(events[0], Dispatched)
            accepted = [event for event in events if isinstance(event, Accepted)]
            assert len(accepted) == strategy.server.updates - before
            assert accepted[0].version == before + 1
        events.clear()
        older = strategy.server
        strategy.start(engine.grid, first(), num_rounds=3)
        older.close()
    assert not [event for event in events if type(event).__name__ == "Closed"]


def test_a_rejected_update_is_an_event():
    events = []
    strategy = asynchronous(updates=2, fraction_evaluate=0.0, on_event=[events.append])
    with running(app_with(break_reply), 4) as engine:
        strategy.start(engine.grid, first(), num_rounds=1, timeout=60.0)
    found = Counter(event.field for event in events if isinstance(event, Rejected))
    assert found == strategy.server.rejected
    assert found


def test_an_exception_of_a_subscriber_is_logged_where_flower_shows_it(caplog):
    def broken(event):
        raise OSError("disk full")

    strategy = asynchronous(updates=4, fraction_evaluate=0.0, on_event=[broken])
    with running(plain_app(), 2) as engine:
        strategy.start(engine.grid, first(), num_rounds=1)
    lines = [line for line in messages(caplog) if line.startswith("on_event: ")]
    assert lines[0].endswith("broken raised an exception (1 so far)")
    assert len(lines) < 6
    assert strategy.server.updates >= 4


def test_a_checkpoint_that_fails_in_the_background_is_logged_where_flower_shows_it(caplog, monkeypatch, tmp_path):
    def full(path, *_, **__):
        raise CheckpointError(f"{path}: disk full")

    monkeypatch.setattr(tensor_file, "save", full)
    report = RunReport()
    report.on_event(CheckpointFailed(1, 0, "server", "disk full"))
    assert messages(caplog) == ["checkpoint: server: disk full"]
    caplog.clear()
    checkpoint = CheckpointPolicy(tmp_path / "server", every_updates=1)
    with running(plain_app(), 2) as engine:
        strategy = asynchronous(durability=Durability(checkpoint), fraction_evaluate=0.0)
        strategy.start(engine.grid, first(), num_rounds=1)
    assert any(line.startswith("checkpoint: ") and "disk full" in line for line in messages(caplog, logging.ERROR))


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("on_event", "words"),
    [
        (print, r"expected a list of functions, got .*; write on_event=\[callback\]"),
        ("print", "expected a list of functions, got 'print'"),
        (None, "expected a list of functions, got None"),
        ([print, 3], "expected a list of functions, got 3 in it"),
    ],
)
def test_subscribers_are_a_list_of_functions(on_event, words):
    with pytest.raises(ArgumentError, match=f"^on_event: {words}$"):
        Asynchronous(rules.FedAsync(rate=0.5), on_event=on_event)


def test_a_callable_object_may_subscribe():
    class Callback(SimpleNamespace):
        def __call__(self, event):
            self.last = event

    callback = Callback()
    strategy = asynchronous(updates=1, fraction_evaluate=0.0, on_event=(callback,))
    with running(plain_app(), 2) as engine:
        strategy.start(engine.grid, first(), num_rounds=1)
    assert callback.last.version >= 1
