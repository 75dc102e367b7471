"""Flower and the simulator give the same model, bit for bit, where clients answer one at a time and in the same order."""

import sys
from dataclasses import replace

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from manifoldagg.experiments.registry import method
from manifoldagg.federated import Message as Order
from manifoldagg.federated import Server, train_client
from manifoldagg.federated.clients.determinism import deterministic, task_generator
from manifoldagg.integrations.flower import Asynchronous, client_app
from manifoldagg.integrations.flower.records import array_record, state_dict
from manifoldagg.manifolds import ParameterSpace
from manifoldagg.simulation import FederatedDataset, run
from tests.simulation.executors.test_client_task import dropping
from tests.simulation.test_run import clusters, dirichlet

CLIENTS = 3
FIRST = 100
"""The id of the first node; others follow."""
ANSWERS = 9


class InOrder(Grid):
    """A grid whose nodes answer one at a time, in a given order."""

    def __init__(self, app, order):
        self.app = app
        self.order = list(order)
        self.contexts = {
            FIRST + part: Context(1, FIRST + part, {"partition-id": part}, RecordDict(), {}) for part in range(CLIENTS)
        }
        self.held = {}
        self.pushed = 0

    def get_node_ids(self):
        return list(self.contexts)

    def push_messages(self, messages):
        names = []
        for message in messages:
            assert message.metadata.dst_node_id not in self.held
            self.pushed += 1
            message.metadata.__dict__["_message_id"] = f"message {self.pushed}"
            self.held[message.metadata.dst_node_id] = message
            names.append(message.metadata.message_id)
        return names

    def pull_messages(self, message_ids):
        node = FIRST + self.order.pop(0)
        message = self.held.pop(node)
        assert message.metadata.message_id in message_ids
        return [self.app(message, self.contexts[node])]

    def set_run(self, run): ...
    def run(self): ...
    def create_message(self, *given, **named): ...
    def send_and_receive(self, *given, **named): ...


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    """What a process that runs a ServerApp is told."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def federation(model=None):
    made = clusters() if model is None else replace(clusters(), model=model)
    return FederatedDataset.split(made, CLIENTS, partition=dirichlet(5.0), seed=0)


def simulated(of, asked, monkeypatch):
    """The order of the answers in a simulation, and the model in the end."""
    servers = []

    class Kept(Server):
        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            servers.append(self)

    monkeypatch.setattr(sys.modules["manifoldagg.simulation.engine"], "Server", Kept)
    found = run(of, asked, num_updates=ANSWERS)
    assert found.rejected == 0
    assert len(set(found.clients)) == CLIENTS
    return found, servers[0]


def ours(of, trainer):
    return client_app(trainer, of.dataset.model, lambda x, nth: of.batches(x.node_config["partition-id"], nth), seed=0)


def by_hand(of, trainer):
    """An app that knows nothing of this package but how to train: it gets and returns state dicts."""
    app = ClientApp()
    count = {}

    @app.train()
    def train(message, context):
        client = context.node_config["partition-id"]
        nth = count[client] = count.get(client, -1) + 1
        model = of.model()
        space = ParameterSpace.of(model)
        state = message.content["arrays"].to_torch_state_dict()
        asked = tuple(entry.name for entry in space.layout.buffers)
        order = Order(space.point(state), buffers=space.buffers(state), requested_buffers=asked)
        generator = task_generator(0, client, nth)
        with deterministic(generator):
            payload = train_client(model, order, trainer, of.batches(client, nth), generator=generator)
        arrays = ArrayRecord(space.state_dict(payload.points[-1], dict(payload.buffers)))
        metrics = MetricRecord({"num-examples": payload.samples})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


PLAIN = ["fedasync:epochs=2", "fedbuff:size=2,epochs=2", "fedavg:cohort=3,epochs=2"]
CURVES = ["asyncbezier:epochs=2+1"]
MORE = ["orthofl:protocol=client", "masfl:steps=3", "floco:cohort=3,epochs=1", "asyncfeded"]
CASES = [
    *((name, app, False) for name in PLAIN for app in (by_hand, ours)),
    *((name, ours, False) for name in CURVES),
    *((name, ours, None) for name in (*CURVES, *MORE)),
    *((name, ours, True) for name in (*PLAIN, *CURVES, *MORE)),
]


@pytest.mark.parametrize("model", [None, dropping], ids=["plain", "drawing-with-statistics"])
@pytest.mark.parametrize(("name", "app", "wire"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_flower_and_the_simulator_give_the_same_model(name, app, wire, model, monkeypatch):
    of = federation(model)
    asked = method(name).bind(range(CLIENTS))
    found, server = simulated(of, asked, monkeypatch)
    weights = {FIRST + client: len(part) for client, part in enumerate(of.train)}
    strategy = Asynchronous(
        asked.rule, model=of.model, updates=ANSWERS, wire=wire, weights=weights, fraction_evaluate=0.0
    )
    strategy.poll_interval = 0.0
    result = strategy.start(InOrder(app(of, asked.trainer), found.clients), array_record(of.model().state_dict()), 1)
    ended = state_dict(result.arrays)
    expected = server.state_dict()
    assert ended.keys() == expected.keys()
    assert all(torch.equal(ended[key], expected[key]) for key in expected)
    assert strategy.server.version == server.version > 0
    rows = [(row["client"], row["staleness"]) for row in strategy.server.history]
    assert rows == [(FIRST + client, late) for client, late in zip(found.clients, found.staleness, strict=True)]
