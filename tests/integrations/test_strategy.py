"""`Asynchronous`: runs on Flower's own grid and link state, with nodes that are threads."""

import ctypes
import shutil
import threading
import time
from collections import Counter

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.superlink.grid.inmemory_grid import InMemoryGrid
from torch import nn

from manifoldagg.errors import ArgumentError, CheckpointError
from manifoldagg.federated import (
    CheckpointPolicy,
    Durability,
    MemoryPolicy,
    Payload,
    Server,
    ServerLimits,
    UpdateLimits,
    rules,
)
from manifoldagg.federated import clients as trainers
from manifoldagg.federated.types import extra_fields
from manifoldagg.integrations.flower import Asynchronous, client_app, dispatcher
from manifoldagg.integrations.flower.codec import MessageCodec
from manifoldagg.integrations.flower.metrics import weighted_mean
from manifoldagg.integrations.flower.records import RECORD_KEY, array_record, bytes_to_record, state_dict
from manifoldagg.integrations.flower.rounds import Rounds
from manifoldagg.wire import pack
from tests.federated.rules.registered import golden
from tests.integrations.engine import running

GOLDEN = golden()
PLAIN = {name: rule for name, rule in GOLDEN.items() if extra_fields(rule) == ({}, ())}


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


def plain_app(train=halfway, evaluate=None, seen=None):
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
        if evaluate is not None:
            evaluate(part)
        metrics = MetricRecord({"num-examples": part + 1, "part": part})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def asynchronous(rule=None, *, model=Net, **options):
    strategy = Asynchronous(rules.FedAsync(rate=0.5) if rule is None else rule, model=model, **options)
    strategy.poll_interval = 0.02
    return strategy


def metrics_of(accepted, **metrics):
    """The metrics of a round without rejected updates and failed tasks."""
    return MetricRecord({**metrics, "accepted": accepted, "rejected": 0, "failed": 0})


def test_unmodified_client_app_runs_for_the_given_rounds():
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
    assert result.train_metrics_clientapp == {n: metrics_of(3, loss=0.5) for n in (1, 2)}
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


def kept(rule):
    """What becomes of the buffers: they are left alone by a rule that adds no noise to them."""
    return {"buffer_policy": {"*": "leave"}} if getattr(rule, "is_private", False) else {}


def tells_more(rule):
    """Whether it tells clients more than a model: such messages go whole, to nodes that run `client_app`."""
    message = Server.of(Net(), rule, **kept(rule)).dispatch(0).message
    return bool(message.tensors or message.numbers)


def test_rules_without_further_inputs_accept_plain_models():
    with running(plain_app(), 3) as engine:
        nodes = sorted(engine.grid.get_node_ids())
        taken = {}
        for name, rule in PLAIN.items():
            if tells_more(rule):
                continue
            if isinstance(rule, rules.GeneralizedAsyncSGD):
                rule = rules.GeneralizedAsyncSGD(dict.fromkeys(nodes, 1 / 3))
            strategy = asynchronous(rule, fraction_evaluate=0.0, **kept(rule))
            strategy.start(engine.grid, first(), num_rounds=2, timeout=60.0)
            taken[name] = (strategy.server.updates, strategy.server.rejected)
    assert taken == {name: (6, {}) for name in taken}
    assert len(taken) > 20


def test_model_is_recognised_by_its_arrays():
    with running(plain_app(), 2) as engine:
        strategy = asynchronous(model=None, updates=3)
        strategy.start(engine.grid, first(), num_rounds=1)
    space = strategy.server.space
    assert {entry.name for entry in space.layout.buffers} >= {"1.num_batches_tracked", "1.running_mean"}
    # The latest, which is one more than what its client started with.
    assert strategy.server.state_dict()["1.num_batches_tracked"].item() in (1, 2, 3)


def test_failing_malicious_and_hanging_nodes_do_not_affect_other_nodes():
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

    strategy = asynchronous(updates=4, task_timeout=0.7, min_evaluate_nodes=1)
    with running(plain_app(train), 4) as engine:
        try:
            result = strategy.start(engine.grid, first(), num_rounds=4, timeout=60.0)
        finally:
            released.set()
        numbers = dict(engine.nodes)
    server = strategy.server
    assert (server.updates, server.rejected) == (16, {"model": 1})
    assert all(x.isfinite().all() for x in state_dict(result.arrays).values())
    # The liar got the model anew, and was taken then; who fails was asked again, now and then.
    assert {numbers[row["client"]] for row in server.history} >= {0, 2}
    assert 1 < counts[1] < counts[0]
    assert set(result.train_metrics_clientapp) == {1, 2, 3, 4}


def test_rounds_end_at_the_timeout_without_replies():
    def train(state, part):
        raise RuntimeError("of my own")

    strategy = asynchronous()
    with running(plain_app(train), 2) as engine:
        result = strategy.start(engine.grid, first(), num_rounds=2, timeout=0.3)
    assert strategy.server.updates == 0
    counts = [(x["accepted"], x["rejected"], set(x) & {"loss"}) for x in result.train_metrics_clientapp.values()]
    assert counts == [(0, 0, set())] * 2
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


def test_nodes_without_routing_or_weight_receive_no_tasks():
    with running(plain_app(), 3) as engine:
        one, two, _ = sorted(engine.grid.get_node_ids())
        for rule, weights in (
            (rules.GeneralizedAsyncSGD({one: 0.5, two: 0.5}), "uniform"),
            (rules.FedAsync(rate=0.5), {one: 10, two: 10}),
        ):
            strategy = asynchronous(rule, updates=6, weights=weights)
            strategy.start(engine.grid, first(), num_rounds=1)
            assert {row["client"] for row in strategy.server.history} == {one, two}


class Watched(InMemoryGrid):
    """A grid that is looked at, with a node that Flower does not know."""

    def __init__(self, grid, phantom=False):
        self.__dict__.update(vars(grid))
        self.phantom = phantom
        self.pulled = []
        self.flying = Counter()
        self.most = 0

    def get_node_ids(self):
        return [*super().get_node_ids(), *([7] if self.phantom else [])]

    def push_messages(self, messages):
        messages = list(messages)
        found = list(super().push_messages(messages))
        for message in messages:
            if message.metadata.message_id in found:
                self.flying[message.metadata.dst_node_id] += 1
        self.most = max(self.most, *self.flying.values(), 0)
        return found

    def pull_messages(self, names):
        self.pulled.append(len(names))
        replies = super().pull_messages(names)
        for reply in replies:
            self.flying[reply.metadata.src_node_id] -= 1
        return replies


def test_each_node_has_one_message_and_replies_are_pulled_in_limited_batches(monkeypatch):
    with running(plain_app(), 4) as engine:
        grid = Watched(engine.grid)
        asynchronous().start(grid, first(), num_rounds=3)
        assert (grid.most, max(grid.pulled)) == (1, 4)
        monkeypatch.setattr(dispatcher, "MAX_REPLY_BYTES", 3 * sum(len(x.data) for x in first().values()))
        grid = Watched(engine.grid)
        asynchronous().start(grid, first(), num_rounds=3)
        # Arrays are packed as they came, so a reply is as large as a message.
        assert (grid.most, max(grid.pulled)) == (1, 3)


def test_unknown_node_is_skipped():
    with running(plain_app(), 2) as engine:
        grid = Watched(engine.grid, phantom=True)
        strategy = asynchronous(updates=6, fraction_evaluate=0.0)
        strategy.start(grid, first(), num_rounds=1)
    assert (strategy.server.updates, grid.flying[7]) == (6, 0)


@pytest.mark.parametrize("concurrency", [None, 4])
def test_new_tasks_are_sent_when_enough_slots_are_free(concurrency):
    with running(plain_app(), 4) as engine:
        grid = Watched(engine.grid)
        options = {"concurrency": concurrency, "refill": 4, "updates": 12, "fraction_evaluate": 0.0}
        strategy = asynchronous(rules.FedBuff(size=10), buffer=2, **options)
        strategy.start(grid, first(), num_rounds=1)
    assert strategy.server.version == 6
    # All four slots are filled together, so the staleness is that of synchronous rounds of four updates.
    assert [row["staleness"] for row in strategy.server.history] == [0, 0, 1, 1] * 3


def test_evaluation_ends_at_its_timeout():
    released = threading.Event()

    def evaluate(part):
        if part == 1:
            released.wait()

    strategy = asynchronous(task_timeout=0.7)
    with running(plain_app(evaluate=evaluate), 3) as engine:
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
    assert result.train_metrics_clientapp == {n: metrics_of(4, records=4) for n in (1, 2)}
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


def test_incomplete_override_does_not_end_the_run():
    strategy = Careless(rules.FedAsync(rate=0.5), model=Net)
    with running(plain_app(), 3) as engine:
        strategy.start(engine.grid, first(), num_rounds=1, timeout=0.5)
    assert (strategy.server.updates, strategy.server.tickets) == (0, [])


def play(folder, rounds, *, stop_at=None, die_at=None, resume=False, journal=None, **every):
    """One node, whose training has no noise; the server is stopped, or dies, in a round's evaluation."""

    def look(number, arrays):
        if number == stop_at:
            strategy.stop()
        if number == die_at:
            # The files that a process leaves if it is killed here. A background thread may write temporary files.
            shutil.copytree(folder, f"{folder}-killed", ignore=shutil.ignore_patterns("*.tmp"))
            raise KeyboardInterrupt
        return MetricRecord({"size": float(sum(np.abs(x.numpy()).sum() for x in arrays.values()))})

    checkpoint = CheckpointPolicy(folder / "server", **(every or {"every_updates": 1}))
    options = {"min_available_nodes": 1, "min_evaluate_nodes": 1, "updates": 2}
    options["durability"] = Durability(checkpoint, None if journal is None else folder / journal)
    strategy = asynchronous(rules.FedAsync(rate=0.5), resume=resume, **options)
    with running(plain_app(), 1) as engine:
        try:
            result = strategy.start(engine.grid, first(), num_rounds=rounds, evaluate_fn=look)
        except KeyboardInterrupt:
            result = None
    if result is None:  # what a killed process leaves is what is on the disk
        strategy.server.close()
    return strategy, result


def test_stopped_or_killed_run_resumes_bit_for_bit(tmp_path):
    for name in "abc":
        (tmp_path / name).mkdir()
    _, whole = play(tmp_path / "a", 4)
    stopped, part = play(tmp_path / "b", 4, stop_at=2, every_updates=1000)
    assert (stopped.server.updates, list(part.evaluate_metrics_serverapp)) == (4, [0, 1, 2])
    _, again = play(tmp_path / "b", 4, resume=True)
    _, none = play(tmp_path / "c", 4, die_at=3)
    assert none is None
    _, risen = play(tmp_path / "c", 4, resume=True)
    _, reborn = play(tmp_path / "c-killed", 4, resume=True)
    for found in (again, risen, reborn):
        assert {name: x.data for name, x in found.arrays.items()} == {n: x.data for n, x in whole.arrays.items()}
        assert found.train_metrics_clientapp == whole.train_metrics_clientapp
        # The evaluation in which the server died is made then.
        assert found.evaluate_metrics_serverapp == whole.evaluate_metrics_serverapp
    over, last = play(tmp_path / "b", 4, resume=True)
    assert (over.server.updates, last.train_metrics_clientapp) == (8, whole.train_metrics_clientapp)


def test_run_killed_before_the_first_checkpoint_resumes_from_the_journal(tmp_path):
    for name in "abc":
        (tmp_path / name).mkdir()
    _, whole = play(tmp_path / "a", 4)
    options = {"journal": "lines", "resume": True, "every_updates": 1000}
    _, none = play(tmp_path / "c", 4, die_at=2, **options)
    assert none is None
    assert not (tmp_path / "c-killed" / "server").exists()
    strategy, found = play(tmp_path / "c-killed", 4, **options)
    assert (strategy.server.updates, strategy.server.tickets) == (8, [])
    assert {name: x.data for name, x in found.arrays.items()} == {n: x.data for n, x in whole.arrays.items()}
    assert found.train_metrics_clientapp == whole.train_metrics_clientapp


@pytest.mark.parametrize("where", ["evaluate_fn", "train_metrics_aggr_fn", "SystemExit"])
def test_exceptions_lose_no_update(where, tmp_path):
    def count(records, key):
        if where == "train_metrics_aggr_fn" and strategy.server.updates >= 4:
            raise KeyError("of my own")
        return weighted_mean(records, key)

    def look(number, arrays):
        if where in ("evaluate_fn", "SystemExit") and number == 2:
            raise SystemExit if where == "SystemExit" else KeyError("of my own")
        return MetricRecord({"updates": strategy.server.updates})

    options = {
        "updates": 2,
        "durability": Durability(CheckpointPolicy(tmp_path / "server", every_updates=1000)),
        "resume": True,
    }
    strategy = asynchronous(train_metrics_aggr_fn=count, **options)
    with running(plain_app(), 2) as engine:
        with pytest.raises((KeyError, SystemExit)):
            strategy.start(engine.grid, first(), num_rounds=3, evaluate_fn=look)
        assert (strategy.server.updates, strategy.server.tickets) == (4, [])
        state = strategy.server.state_dict()
        strategy.server.close()
        strategy = asynchronous(**options)
        where = ""
        models = []
        result = strategy.start(
            engine.grid, first(), num_rounds=3, evaluate_fn=lambda n, x: models.append((n, x)) or look(n, x)
        )
    assert result.evaluate_metrics_serverapp == {n: MetricRecord({"updates": 2 * n}) for n in range(4)}
    number, model = models[0]
    assert number == 2
    assert all(torch.equal(x, state[name]) for name, x in state_dict(model).items())


def test_exceptions_at_the_start_propagate(tmp_path):
    checkpoint = CheckpointPolicy(tmp_path / "server", every_updates=1)
    with running(plain_app(), 2) as engine:
        with pytest.raises(ArgumentError, match=r"^initial_arrays"):
            asynchronous(durability=Durability(checkpoint)).start(engine.grid, first(Narrow))
        with pytest.raises(KeyError):
            asynchronous(durability=Durability(checkpoint)).start(
                engine.grid, first(), evaluate_fn=lambda n, x: {}["loss"]
            )
    assert not list(tmp_path.glob("server*"))


def test_new_run_discards_the_rounds_of_another_run(tmp_path):
    path = tmp_path / "server"
    older = Rounds(path)
    older.record("evaluate_metrics_serverapp", 0, MetricRecord({"older": 1}))
    older.finish_round(1)
    older.write()
    found = []

    def train(state, part):
        rounds = Rounds(path)
        rounds.read(10**6)
        found.append((rounds.cumulative_updates, rounds.result.evaluate_metrics_serverapp))
        return state

    strategy = asynchronous(
        updates=2, durability=Durability(CheckpointPolicy(path, every_updates=1000)), fraction_evaluate=0.0
    )
    with running(plain_app(train), 2) as engine:
        strategy.start(engine.grid, first(), num_rounds=1, evaluate_fn=lambda n, x: MetricRecord({"n": n}))
    assert found[0] == ([0], {0: MetricRecord({"n": 0})})


def test_stop_ends_only_the_current_run():
    strategy = asynchronous(updates=2, fraction_evaluate=0.0)
    with running(plain_app(), 2) as engine:
        for _ in range(2):
            strategy.stop()
            strategy.start(engine.grid, first(), num_rounds=2)
            assert strategy.server.updates == 4


def test_run_without_remaining_work_does_not_wait_for_nodes(tmp_path):
    class Empty(Asynchronous):
        def _connect(self, *arguments):
            raise AssertionError("nodes are waited for")

    checkpoint = CheckpointPolicy(tmp_path / "server", every_updates=1)
    with running(plain_app(), 0) as engine:
        strategy = Empty(rules.FedAsync(rate=0.5), model=Net, durability=Durability(checkpoint))
        result = strategy.start(engine.grid, first(), num_rounds=0, evaluate_fn=lambda n, x: MetricRecord({"n": n}))
    assert result.evaluate_metrics_serverapp == {0: MetricRecord({"n": 0})}
    assert result.arrays == first()
    assert (tmp_path / "server").exists()


class Zeroed(Asynchronous):
    """Returns another model than the server has."""

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        if arrays is not None:
            arrays = array_record({name: torch.zeros_like(x) for name, x in state_dict(arrays).items()})
        return arrays, metrics


def test_result_contains_the_values_of_overrides():
    models = {}
    strategy = Zeroed(rules.FedAsync(rate=0.5), model=Net)
    with running(plain_app(), 2) as engine:
        result = strategy.start(engine.grid, first(), num_rounds=2, evaluate_fn=models.__setitem__)
    assert result.arrays is models[2]
    assert not any(x.any() for x in state_dict(result.arrays).values())


def test_malicious_metrics_do_not_affect_other_nodes():
    lies = [{"num-examples": 1e308, "loss": 100}, {"num-examples": 1, "loss": []}, {"num-examples": 1, "loss": np.nan}]
    app = ClientApp()

    def told(message, context):
        part = context.node_config["partition-id"]
        return MetricRecord(lies[part] if part < 3 else {"num-examples": 10, "loss": 0.5})

    @app.train()
    def training(message, context):
        return Message(RecordDict({**message.content, "metrics": told(message, context)}), reply_to=message)

    @app.evaluate()
    def evaluating(message, context):
        return Message(RecordDict({"metrics": told(message, context)}), reply_to=message)

    strategy = asynchronous(updates=6)
    with running(app, 4) as engine:
        result = strategy.start(engine.grid, first(), num_rounds=2, timeout=60.0)
    assert strategy.server.rejected.keys() == {"samples"}
    assert {x["loss"] for x in result.train_metrics_clientapp.values()} == {0.5}
    assert result.evaluate_metrics_clientapp == {n: MetricRecord({"loss": 0.5}) for n in (1, 2)}


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


def test_models_in_half_precision_are_sent_in_a_wider_dtype():
    with running(plain_app(), 2) as engine:
        strategy = asynchronous(model=Narrow, updates=4)
        result = strategy.start(engine.grid, first(Narrow), num_rounds=1)
    assert (strategy.server.updates, strategy.server.rejected) == (4, {})
    assert strategy.server.state_dict()["0.weight"].dtype is torch.bfloat16
    assert state_dict(result.arrays)["0.weight"].dtype is torch.float32


def batches(context, nth):
    generator = torch.Generator().manual_seed(nth)
    return [(torch.randn(8, 3, generator=generator), torch.arange(8) % 2)]


@pytest.mark.parametrize(
    ("rule", "trainer"), [(GOLDEN["AsyncCurve"], trainers.AsyncCurve()), (rules.FedAsync(rate=0.5), trainers.Local())]
)
def test_client_app_returns_all_inputs_of_a_rule(rule, trainer):
    with running(client_app(trainer, Net, batches), 2) as engine:
        strategy = asynchronous(rule, updates=4)
        result = strategy.start(engine.grid, first(), num_rounds=1, timeout=60.0)
    assert (strategy.server.updates, strategy.server.rejected) == (4, {})
    assert "loss" in result.evaluate_metrics_clientapp[1]


@pytest.fixture(scope="module")
def finished():
    with running(plain_app(), 2) as engine:
        strategy = asynchronous(fraction_evaluate=0.0)
        strategy.start(engine.grid, first(), num_rounds=1)
    return strategy


def content(arrays, metrics=None, **more):
    told = {"num-examples": 10} if metrics is None else metrics
    return RecordDict({"arrays": arrays, "metrics": MetricRecord(told), **more})


def changed(**arrays):
    return ArrayRecord({**first(), **arrays})


def returned(ticket):
    """What a node may answer, which is taken but for what is wrong around it."""
    return Payload(ticket.message.start[None], samples=1, buffers=ticket.message.buffers)


def array(data, stype="numpy.ndarray"):
    return Array(dtype="float32", shape=(2,), stype=stype, data=data)


HUGE = b"\x93NUMPY\x01\x00v\x00" + b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,)}".ljust(118)
BAD = {
    "nothing": RecordDict(),
    "no metrics": RecordDict({"arrays": first()}),
    "no samples": content(first(), {"loss": 0.5}),
    "samples that are none": content(first(), {"num-examples": 0.5}),
    "two models": content(first(), more=first()),
    "a missing tensor": content(ArrayRecord({name: x for name, x in first().items() if name != "0.bias"})),
    "an unknown tensor": content(changed(another=array(first()["0.bias"].data))),
    "numbers for names": content(ArrayRecord([x.numpy() for x in first().values()])),
    "another shape": content(changed(**{"0.bias": Array(np.zeros(9, np.float32))})),
    "another dtype": content(changed(**{"0.bias": Array(np.zeros(4))})),
    "a counter that is none": content(changed(**{"1.num_batches_tracked": Array(np.zeros((), np.float32))})),
    "NaN": content(changed(**{"0.bias": Array(np.full(4, np.nan, np.float32))})),
    "a header that lies": content(changed(**{"0.bias": array(HUGE)})),
    "a pickle": content(changed(**{"0.bias": array(b"\x80\x04K\x01.")})),
    "another form": content(changed(**{"0.bias": array(b"", "pickle")})),
    "junk of the wire": RecordDict({RECORD_KEY: bytes_to_record(b"of my own making")}),
    "no bytes of the wire": RecordDict({RECORD_KEY: bytes_to_record(b"")}),
    "a payload of another space": RecordDict(
        {RECORD_KEY: bytes_to_record(pack(Payload(torch.zeros(1, 3), samples=1)))}
    ),
}


@pytest.mark.parametrize("came", BAD.values(), ids=BAD)
def test_invalid_replies_are_rejected_without_effect(finished, came):
    server = finished.server
    before = (server.updates, server.version, {name: x.clone() for name, x in server.state_dict().items()})
    ticket = server.dispatch(7)
    receipt = finished._codec.receive(ticket.id, came)
    assert not receipt.accepted
    assert receipt.reason
    server.drop(ticket)
    assert (server.updates, server.version) == before[:2]
    assert all(torch.equal(x, before[2][name]) for name, x in server.state_dict().items())


READ_MODELS = {name: rule for name, rule in PLAIN.items() if not tells_more(rule)}


@pytest.mark.parametrize("rule", READ_MODELS.values(), ids=READ_MODELS)
def test_the_memory_of_an_update_is_neither_written_nor_retained(rule):
    if isinstance(rule, rules.GeneralizedAsyncSGD):
        rule = rules.GeneralizedAsyncSGD(dict.fromkeys(range(3), 1 / 3))
    server = Server.of(Net(), rule, **kept(rule))
    codec = MessageCodec(server, None, False, key="arrays", weighted_by_key="num-examples")
    state = server.state_dict()
    for turn in range(3):
        ticket = server.dispatch(turn)
        model = array_record({name: x + 1 for name, x in state.items()})
        before = {name: bytes(bytearray(x.data)) for name, x in model.items()}
        assert codec.receive(ticket.id, content(model)).accepted
        assert {name: x.data for name, x in model.items()} == before
        after = server.state_dict()
        # Overwrite the values in the immutable bytes. A tensor of the server that shares their memory would change.
        for array in model.values():
            values = np.frombuffer(array.data, np.uint8)
            start = len(values) - int(np.prod(array.shape)) * np.dtype(array.dtype).itemsize
            ctypes.memset(values.ctypes.data + start, 255, len(values) - start)
        assert all(torch.equal(x, after[name]) for name, x in server.state_dict().items())
    assert all(x.isfinite().all() for x in server.state_dict().values())


def test_payload_with_another_ticket_is_rejected(finished):
    server = finished.server
    other = server.dispatch(8)

    def receive(named):
        ticket = server.dispatch(7)
        data = pack(returned(ticket), spec=server.space, ticket=named or ticket)
        return finished._codec.receive(ticket.id, RecordDict({RECORD_KEY: bytes_to_record(data)}))

    assert receive(other).reason.startswith("ticket: expected the ticket ")
    assert receive(None).accepted
    server.drop(other)


def test_plain_model_for_a_rule_with_further_inputs_is_rejected_by_name():
    rule = next(rule for rule in GOLDEN.values() if any(extra_fields(rule)))
    strategy = asynchronous(rule, wire=None, fraction_evaluate=0.0)
    with running(plain_app(lambda state, part: state), 2) as engine:
        strategy.start(engine.grid, first(), num_rounds=1, timeout=0.5)
    receipt = strategy._codec.receive(strategy.server.dispatch(7).id, content(first()))
    assert "expected a reply of `client_app`" in receipt.reason


@pytest.mark.usefixtures("as_shipped")
def test_invalid_arguments_are_rejected_by_name(tmp_path):
    fedasync = rules.FedAsync(rate=0.5)
    more = next(rule for rule in GOLDEN.values() if any(extra_fields(rule)))
    for options, words in (
        ({"rule": rules.FedAsync}, "rule: expected an instance"),
        ({"model": 3}, "model: expected a module or a function"),
        ({"updates": 0}, "updates: expected"),
        ({"concurrency": 0}, "concurrency: expected"),
        ({"rule": rules.FedAvg(2), "concurrency": 3}, "concurrency: expected None, as FedAvg waits"),
        ({"rule": rules.FedAvg(2), "refill": 2}, "^refill: expected None, as FedAvg decides"),
        ({"concurrency": 2, "refill": 3}, "^refill: expected at most concurrency = 2, got 3"),
        ({"buffer": 3}, "^buffer: expected a rule with a buffer, such as FedBuff, got FedAsync"),
        ({"task_timeout": 0}, "task_timeout: expected"),
        ({"rule": more, "wire": False}, "wire: expected None or True"),
        ({"fraction_evaluate": 1.5}, "fraction_evaluate: expected"),
        ({"min_evaluate_nodes": -1}, "min_evaluate_nodes: expected"),
        ({"seed": -1}, "seed: expected"),
        ({"durability": "server"}, "durability: expected Durability"),
        ({"resume": True}, "resume: expected a checkpoint in `durability`"),
        ({"wire": "yes"}, "^wire: expected one of None, True, False; got 'yes'"),
        ({"compress": "x"}, "^compress: expected one of True, False"),
        ({"replace": 1}, "^replace: expected one of True, False"),
        ({"max_in_flight": 3}, "^max_in_flight: expected one of the options .*use concurrency for the number of tasks"),
        ({"fraction_train": 1.0}, "^fraction_train: expected one of the options model, .*: use concurrency for"),
        ({"min_train_nodes": 2}, "^min_train_nodes: expected one of .*updates for the number of updates per round$"),
        ({"limit": 3}, r"^limit: .*concurrency.*limits.*: did you mean limits\?$"),
        ({"limits": ServerLimits(max_in_flight=3)}, "^limits: max_in_flight: expected None; use concurrency for"),
        ({"num_rounds": 3}, "^num_rounds: .*: pass it to start"),
        ({"limits": 3}, "^limits: expected ServerLimits or UpdateLimits, got 3; to combine them, write ServerLimits"),
        ({"weights": "x"}, "^weights: expected one of observed, uniform; got 'x'"),
        ({"memory": 16}, "^memory: expected MemoryPolicy"),
        ({"buffer_policy": "*mean"}, "^buffer_policy: expected a sequence"),
    ):
        with pytest.raises(ArgumentError, match=words):
            Asynchronous(**{"rule": fedasync, **options})
    missing = ArrayRecord({name: x for name, x in first().items() if name != "0.bias"})
    for model, arrays, words in (
        (Net, missing, "initial_arrays: missing: 0.bias"),
        (Net, changed(another=first()["0.bias"]), "initial_arrays: unknown: another"),
        (Net, changed(**{"0.bias": Array(np.zeros(9, np.float32))}), "initial_arrays: 0.bias: expected shape"),
        (Net, changed(**{"0.bias": Array(np.full(4, np.nan, np.float32))}), "initial_arrays: .*finite"),
        (None, changed(**{"0.bias": array(HUGE)}), "initial_arrays: wire: 0.bias"),
        (None, ArrayRecord(), "initial_arrays: expected floating parameters"),
        (Net, Net().state_dict(), "initial_arrays: expected an ArrayRecord, got OrderedDict"),
        (lambda: 3, first(), "model: expected a function that returns a module"),
    ):
        with pytest.raises(ArgumentError, match=f"^{words}"):
            Asynchronous(fedasync, model=model).start(None, arrays)
    with pytest.raises(ArgumentError, match="^buffer_policy: 'odd' matches no entry of the model"):
        Asynchronous(fedasync, model=Net, buffer_policy={"odd": "leave"}).start(None, first())
    for options, words in (({"num_rounds": -1}, "num_rounds: expected"), ({"timeout": 0}, "timeout: expected")):
        with pytest.raises(ArgumentError, match=words):
            Asynchronous(fedasync).start(None, first(), **options)


def test_base_dtype_is_accepted_before_the_model_is_known():
    for dtype in (torch.float32, torch.bfloat16):
        memory = MemoryPolicy(base_dtype=dtype)
        assert asynchronous(memory=memory).server_options == {"memory": memory}


@pytest.mark.usefixtures("as_shipped")
def test_another_rule_resumes_from_a_checkpoint_with_replace(tmp_path):
    options = {"durability": Durability(CheckpointPolicy(tmp_path / "server", every_updates=1)), "resume": True}
    slow, fast = rules.FedAsync(rate=0.5), rules.FedAsync(rate=1.0)
    with running(plain_app(), 2) as engine:
        for rule, replace, rounds in ((slow, True, 1), (fast, True, 2), (fast, False, 3)):
            strategy = asynchronous(rule, replace=replace, **options)
            strategy.start(engine.grid, first(), num_rounds=rounds, timeout=60.0)
            assert (strategy.server.rule, strategy.server.updates) == (rule, 2 * rounds)
        with pytest.raises(CheckpointError, match="replace=True"):
            asynchronous(slow, **options).start(engine.grid, first(), num_rounds=4)


def test_given_module_is_not_modified():
    model = Net()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with running(plain_app(), 2) as engine:
        asynchronous(model=model).start(engine.grid, first(), num_rounds=1)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_slowly_evaluating_node_continues_to_train():
    trained, evaluated = Counter(), Counter()

    def train(state, part):
        trained[part] += 1
        time.sleep(0.02)
        return halfway(state, part)

    def evaluate(part):
        evaluated[part] += 1
        time.sleep(0.4 * (part == 2))

    strategy = asynchronous(updates=2)
    with running(plain_app(train, evaluate), 3) as engine:
        strategy.start(engine.grid, first(), num_rounds=15, timeout=60.0)
    assert evaluated[0] > evaluated[2]
    # One model to evaluate at a time, and training between two of them.
    assert trained[2] >= evaluated[2] - 1 > 0


def test_node_in_backoff_does_not_occupy_a_slot():
    trained = Counter()

    def train(state, part):
        trained[part] += 1
        if part < 2:
            raise ValueError("out of order")
        return halfway(state, part)

    strategy = asynchronous(concurrency=2, updates=40, fraction_evaluate=0.0)
    with running(plain_app(train), 4) as engine:
        strategy.start(engine.grid, first(), num_rounds=1, timeout=30.0)
    assert strategy.server.updates == 40
    # Rests of .1, .2, .4, .8 s ...: few of the tasks fail.
    assert trained[0] + trained[1] < 20


def test_reply_in_time_counts_even_if_the_server_was_busy():
    trained = Counter()

    def train(state, part):
        trained[part] += 1
        return halfway(state, part)

    def busy(number, arrays):
        time.sleep(1.3)

    strategy = asynchronous(updates=3, task_timeout=1.0, fraction_evaluate=0.0)
    with running(plain_app(train), 3) as engine:
        strategy.start(engine.grid, first(), num_rounds=3, evaluate_fn=busy)
    # At the end one a node may be under way.
    assert strategy.server.updates >= sum(trained.values()) - 3


def test_unreadable_reply_does_not_idle_the_node(monkeypatch):
    monkeypatch.setattr(dispatcher, "LOST_REPLY_TIMEOUT", 0.2)
    trained = Counter()

    def train(state, part):
        trained[part] += 1
        time.sleep(0.05)
        return halfway(state, part)

    with running(plain_app(train), 4) as engine:
        pull, lost = engine.grid.pull_messages, []

        def once(names):
            replies = list(pull(names))
            if len(replies) > 1 and not lost:
                lost.extend(replies)
                raise ValueError("one of them is junk")
            return replies

        monkeypatch.setattr(engine.grid, "pull_messages", once)
        strategy = asynchronous(updates=24, fraction_evaluate=0.0)
        strategy.poll_interval = 0.3
        strategy.start(engine.grid, first(), num_rounds=1, timeout=20.0)
    assert lost
    assert strategy.server.updates == 24
    assert min(trained.values()) > 2


class Unreadable(InMemoryGrid):
    """A grid on which a call raises if it pulls a reply of `culprit`. The other replies of the call are lost, too."""

    def __init__(self, grid, culprit, times):
        self.__dict__.update(vars(grid))
        self.culprit, self.times = culprit, times
        self.raised, self.lost, self.calls = 0, 0, []

    def pull_messages(self, names):
        names = list(names)
        self.calls.append((self.raised, len(names)))
        replies = list(super().pull_messages(names))
        if self.raised < self.times and any(reply.metadata.src_node_id == self.culprit for reply in replies):
            self.raised += 1
            self.lost += len(replies) - 1
            raise ValueError("junk")
        return replies


@pytest.mark.parametrize("times", [1, 10**6], ids=["once", "always"])
def test_after_an_unreadable_reply_other_replies_are_pulled_together(times, monkeypatch):
    monkeypatch.setattr(dispatcher, "LOST_REPLY_TIMEOUT", 0.2)

    def train(state, part):
        time.sleep(0.02)
        return halfway(state, part)

    with running(plain_app(train), 4) as engine:
        grid = Unreadable(engine.grid, next(iter(engine.nodes)), times)
        strategy = asynchronous(updates=100, fraction_evaluate=0.0)
        strategy.start(grid, first(), num_rounds=1, timeout=60.0)
    assert strategy.server.updates == 100
    assert grid.raised > 0
    assert max(count for raised, count in grid.calls if raised) > 1
    # Only the first unreadable reply of a node takes others with it.
    assert grid.lost <= 3


@pytest.mark.parametrize("weights", ["observed", "uniform"])
def test_a_node_that_claims_many_samples_does_not_dominate_the_metrics(weights):
    app = ClientApp()

    @app.train()
    def training(message, context):
        liar = context.node_config["partition-id"] == 0
        metrics = MetricRecord({"num-examples": 10**9 if liar else 10, "loss": 100.0 if liar else 1.0})
        return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluating(message, context):
        liar = context.node_config["partition-id"] == 0
        metrics = MetricRecord({"num-examples": 10**9 if liar else 10, "accuracy": 1.0 if liar else 0.0})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    strategy = asynchronous(updates=40, weights=weights, limits=UpdateLimits(samples_factor=2.0))
    with running(app, 8) as engine:
        result = strategy.start(engine.grid, first(), num_rounds=2, timeout=60.0)
    # The liar counts as 20 samples of about 90 in an evaluation, and of 20 + 10 n in a round.
    assert result.train_metrics_clientapp[2]["loss"] < 60
    assert result.evaluate_metrics_clientapp[2]["accuracy"] == pytest.approx(20 / 90)


def test_given_sample_counts_weight_the_metrics():
    strategy = asynchronous(weights={1: 30, 2: 10})
    strategy.server = Server.of(Net(), rules.FedAsync(rate=0.5), weights={1: 30, 2: 10})
    contents = [(1, 10**9, 1.0), (2, 1, 0.0)]
    pairs = [(node, RecordDict({"m": MetricRecord({"num-examples": n, "x": x})})) for node, n, x in contents]
    assert weighted_mean(strategy._with_capped_samples(pairs), "num-examples") == {"x": 0.75}


def test_metrics_of_a_node_are_bounded_in_the_result_and_its_file(tmp_path, caplog):
    app = ClientApp()

    @app.train()
    def training(message, context):
        metrics = MetricRecord({f"{context.node_id}-{i}": 0.0 for i in range(5000)} | {"num-examples": 10})
        content = {"arrays": message.content["arrays"], "metrics": metrics, "config": ConfigRecord({"x": b"0" * 10**6})}
        return Message(RecordDict(content), reply_to=message)

    @app.evaluate()
    def evaluating(message, context):
        metrics = MetricRecord({f"{context.node_id}-{i}": 0.0 for i in range(5000)} | {"num-examples": 10})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    path = tmp_path / "server"
    strategy = asynchronous(durability=Durability(CheckpointPolicy(path, every_updates=1000)))
    with running(app, 2) as engine:
        result = strategy.start(engine.grid, first(), num_rounds=2, timeout=60.0)
    for table in (result.train_metrics_clientapp, result.evaluate_metrics_clientapp):
        assert all(len(metrics) <= 110 for metrics in table.values())
    assert path.with_name("server.rounds").stat().st_size < 50_000
    assert "metrics dropped (1 so far): 4900 metrics exceed the limits" in caplog.text


def test_over_selection_is_rejected_because_flower_cannot_cancel_tasks():
    with pytest.raises(ArgumentError, match="rule: over_selection: expected 0, as Flower cannot cancel a task"):
        Asynchronous(rules.FedAvg(2, over_selection=0.3))
