"""`Asynchronous`: runs on Flower's own grid and link state, with nodes that are threads."""

import threading
from collections import Counter

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from manifoldagg.federated import rules
from manifoldagg.integrations.flower import Asynchronous
from manifoldagg.integrations.flower.records import array_record, state_dict
from tests.integrations.engine import running


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


class Narrow(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 4, dtype=torch.bfloat16), nn.Linear(4, 2))


def first(model=Net):
    torch.manual_seed(0)
    return array_record(model().state_dict())


def halfway(state, part):
    """Training of no noise: parameters go halfway to what its data say, counters go on."""
    return {name: (x + 1 + part) / 2 if x.is_floating_point() else x + 1 for name, x in state.items()}


def plain_app(train=halfway, exam=None, seen=None):
    """An app as Flower's users write it, around what is done with a state dict; it notes what it is asked."""
    app = ClientApp()
    seen = [] if seen is None else seen

    def part_of(message, context):
        part = context.node_config["partition-id"]
        seen.append((part, message.metadata.message_type, dict(message.content["config"])))
        return part

    @app.train()
    def training(message, context):
        part = part_of(message, context)
        state = train(message.content["arrays"].to_torch_state_dict(), part)
        metrics = MetricRecord({"num-examples": 10, "loss": 0.5})
        return Message(RecordDict({"arrays": ArrayRecord(state), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluating(message, context):
        part = part_of(message, context)
        if exam is not None:
            exam(part)
        metrics = MetricRecord({"num-examples": part + 1, "part": part})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def asynchronous(rule=None, *, model=Net, **options):
    strategy = Asynchronous(rules.FedAsync(rate=0.5) if rule is None else rule, model=model, **options)
    strategy.interval = 0.02
    return strategy


def test_an_unmodified_app_runs_for_so_many_rounds():
    seen, asked = [], []

    def look(number, arrays):
        seen.append(number)
        return MetricRecord({"tensors": len(arrays)})

    strategy = asynchronous()
    configs = {"train_config": ConfigRecord({"lr": 0.1}), "evaluate_config": ConfigRecord({"batches": 3})}
    with running(plain_app(seen=asked), 3) as engine:
        result = strategy.start(engine.grid, first(), num_rounds=2, evaluate_fn=look, **configs)
    assert seen == [0, 1, 2]
    assert (strategy.server.updates, strategy.server.version, strategy.server.tickets) == (6, 6, [])
    assert result.train_metrics_clientapp == {n: MetricRecord({"loss": 0.5}) for n in (1, 2)}
    parts = {n: x["part"] for n, x in result.evaluate_metrics_clientapp.items()}
    assert parts == {n: pytest.approx((0 * 1 + 1 * 2 + 2 * 3) / 6, rel=1e-15) for n in (1, 2)}
    assert result.evaluate_metrics_serverapp == {n: MetricRecord({"tensors": 9}) for n in (0, 1, 2)}
    for _, kind, config in asked:
        assert config["server-round"] in (1, 2)
        assert config == {**configs[f"{kind}_config"], "server-round": config["server-round"]}
    state = state_dict(result.arrays)
    assert state["1.num_batches_tracked"].dtype is torch.int64
    assert {name: x.shape for name, x in state.items()} == {name: x.shape for name, x in Net().state_dict().items()}
    assert all(torch.equal(x, strategy.server.state_dict()[name]) for name, x in state.items())


def test_a_model_is_known_by_its_arrays_alone():
    with running(plain_app(), 2) as engine:
        strategy = asynchronous(model=None, updates=3)
        strategy.start(engine.grid, first(), num_rounds=1)
    space = strategy.server.space
    assert {entry.name for entry in space.layout.carried} >= {"1.num_batches_tracked", "1.running_mean"}
    # The latest, which is one more than what its client started with.
    assert strategy.server.state_dict()["1.num_batches_tracked"].item() in (1, 2, 3)


def test_who_fails_lies_or_hangs_costs_nobody_else_anything():
    counts = Counter()
    released = threading.Event()

    def train(state, part):
        counts[part] += 1
        if part == 1:
            raise RuntimeError("of my own")
        if part == 2 and counts[part] == 1:
            return {name: x * float("nan") if x.is_floating_point() else x for name, x in state.items()}
        if part == 3 and counts[part] == 1:
            released.wait()
        return halfway(state, part)

    strategy = asynchronous(updates=4, patience=0.7, min_evaluate_nodes=1)
    with running(plain_app(train), 4) as engine:
        try:
            result = strategy.start(engine.grid, first(), num_rounds=4, timeout=60.0)
        finally:
            released.set()
        numbers = dict(engine.nodes)
    server = strategy.server
    assert (server.updates, server.refused) == (16, {"model": 1})
    assert all(x.isfinite().all() for x in state_dict(result.arrays).values())
    # The liar got the model anew, and was taken then; who fails was asked again, now and then.
    assert {numbers[row["client"]] for row in server.history} >= {0, 2}
    assert 1 < counts[1] < counts[0]
    assert set(result.train_metrics_clientapp) == {1, 2, 3, 4}


def test_rounds_end_when_nobody_answers():
    def train(state, part):
        raise RuntimeError("of my own")

    strategy = asynchronous()
    with running(plain_app(train), 2) as engine:
        result = strategy.start(engine.grid, first(), num_rounds=2, timeout=0.3)
    assert strategy.server.updates == 0
    assert result.train_metrics_clientapp == {}
    assert all(torch.equal(x, state_dict(first())[name]) for name, x in state_dict(result.arrays).items())


@pytest.mark.parametrize("rule", [rules.FedAsync(rate=0.5), rules.FedAvg(2)], ids=["continuous", "cohorts"])
def test_nodes_join_and_leave(rule):
    """One leaves with a task in its hands, for which a rule with a cohort would wait; another joins."""
    left, joined = [], []
    released = threading.Event()

    def train(state, part):
        if not left:
            left.append(part)
            # A grid that knows it no longer.
            engine.leave(next(node for node, p in engine.nodes.items() if p == part))
            joined.append(engine.join())
            released.wait()
        return halfway(state, part)

    strategy = asynchronous(rule, updates=2, fraction_evaluate=0.0)
    with running(plain_app(train), 3) as engine:
        try:
            strategy.start(engine.grid, first(), num_rounds=20, timeout=60.0)
        finally:
            released.set()
        parts = dict(engine.nodes)
    clients = {row["client"] for row in strategy.server.history}
    assert strategy.server.updates == 40
    assert left[0] not in {parts[client] for client in clients}
    assert joined[0] in clients


def test_who_is_not_in_a_routing_or_has_no_weight_is_not_asked():
    with running(plain_app(), 3) as engine:
        one, two, _ = sorted(engine.grid.get_node_ids())
        for rule, weights in (
            (rules.GeneralizedAsyncSGD({one: 0.5, two: 0.5}), "uniform"),
            (rules.FedAsync(rate=0.5), {one: 10, two: 10}),
        ):
            strategy = asynchronous(rule, updates=6, weights=weights)
            strategy.start(engine.grid, first(), num_rounds=1)
            assert {row["client"] for row in strategy.server.history} == {one, two}


def test_an_exam_is_over_when_its_time_is():
    released = threading.Event()

    def exam(part):
        if part == 1:
            released.wait()

    strategy = asynchronous(patience=0.7)
    with running(plain_app(exam=exam), 3) as engine:
        try:
            result = strategy.start(engine.grid, first(), num_rounds=1, timeout=60.0)
        finally:
            released.set()
    assert result.evaluate_metrics_clientapp[1]["part"] == pytest.approx((0 * 1 + 2 * 3) / 4, rel=1e-15)


def test_a_fraction_of_the_nodes_evaluates_and_functions_aggregate():
    asked, told = [], []

    def count(records, key):
        told.append((len(records), key, {name for record in records for name in record}))
        return MetricRecord({"records": len(records)})

    strategy = asynchronous(
        fraction_evaluate=0.5, min_evaluate_nodes=1, train_metrics_aggr_fn=count, evaluate_metrics_aggr_fn=count
    )
    with running(plain_app(seen=asked), 4) as engine:
        result = strategy.start(engine.grid, first(), num_rounds=2)
    assert sum(kind == "evaluate" for _, kind, _ in asked) == 4
    assert result.train_metrics_clientapp == {n: MetricRecord({"records": 4}) for n in (1, 2)}
    assert result.evaluate_metrics_clientapp == {n: MetricRecord({"records": 2}) for n in (1, 2)}
    assert set(map(str, told)) == {str((n, "num-examples", {"metrics"})) for n in (2, 4)}


class Decaying(Asynchronous):
    """As Flower's own guide overrides a strategy."""

    def configure_train(self, server_round, arrays, config, grid):
        if server_round > 1:
            config["lr"] *= 0.5
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        self.kept = [*getattr(self, "kept", []), *([server_round] if arrays is not None else [])]
        return arrays, metrics


def test_methods_are_overridden_as_with_flowers_own():
    asked = []
    strategy = Decaying(rules.FedAsync(rate=0.5), model=Net, fraction_evaluate=0.0)
    given = ConfigRecord({"lr": 1.0})
    with running(plain_app(seen=asked), 2) as engine:
        strategy.start(engine.grid, first(), num_rounds=4, train_config=given)
    rates = {(config["server-round"], config["lr"]) for _, _, config in asked}
    assert rates >= {(1, 1.0)}
    assert rates <= {(n, 0.5 ** (n - 1)) for n in range(1, 5)}
    assert (strategy.kept, dict(given)) == ([1, 2, 3, 4], {"lr": 1.0})


class Careless(Asynchronous):
    """Takes nothing, and sends every other node nothing."""

    def configure_train(self, *arguments):
        return list(super().configure_train(*arguments))[::2]

    def aggregate_train(self, server_round, replies):
        return super().aggregate_train(server_round, []) if not replies else (None, None)


def test_what_an_override_leaves_out_is_no_end():
    strategy = Careless(rules.FedAsync(rate=0.5), model=Net)
    with running(plain_app(), 3) as engine:
        strategy.start(engine.grid, first(), num_rounds=1, timeout=0.5)
    assert (strategy.server.updates, strategy.server.tickets) == (0, [])


def test_stopping_from_another_thread_ends_a_run_at_once():
    released = threading.Event()

    def train(state, part):
        strategy.stop()
        released.wait()
        return state

    strategy = asynchronous()
    with running(plain_app(train), 2) as engine:
        try:
            result = strategy.start(engine.grid, first(), num_rounds=3)
        finally:
            released.set()
    assert (strategy.server.updates, strategy.server.tickets, result.train_metrics_clientapp) == (0, [], {})
    assert set(result.arrays) == set(first())


def test_narrow_models_travel_in_wider_numbers():
    with running(plain_app(), 2) as engine:
        strategy = asynchronous(model=Narrow, updates=4)
        result = strategy.start(engine.grid, first(Narrow), num_rounds=1)
    assert (strategy.server.updates, strategy.server.refused) == (4, {})
    assert strategy.server.state_dict()["0.weight"].dtype is torch.bfloat16
    assert state_dict(result.arrays)["0.weight"].dtype is torch.float32
