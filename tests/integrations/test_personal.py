"""Personal layers in Flower: messages do not contain them, and nodes keep them and evaluate with them."""

import pytest
import torch
from flwr.app import Context, MetricRecord, RecordDict
from torch import nn

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Payload, Server, rules
from manifoldagg.integrations.flower import Asynchronous, client_app
from manifoldagg.integrations.flower.codec import MessageCodec
from manifoldagg.integrations.flower.records import array_record, state_dict
from tests.integrations.engine import running
from tests.integrations.test_client_app import flower_message
from tests.integrations.test_strategy import plain_app

PERSONAL = ["1.*", "2.*"]
SHARED = {"0.weight", "0.bias"}


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


class AddsOne:
    def train(self, space, message, loss, batches, client_state, *, generator):
        buffers = {name: message.buffers[name] + 1 for name in message.requested_buffers}
        return Payload((message.start + 1)[None], 10, buffers=buffers)


def first():
    torch.manual_seed(0)
    return array_record(Net().state_dict())


def app(seen=None):
    def evaluate(model, context):
        if seen is not None:
            seen.append({name: x.clone() for name, x in model.state_dict().items()})
        return {"loss": 0.0, "num-examples": 1}

    batches = [(torch.ones(4, 3), torch.tensor([0, 1, 1, 0]))]
    return client_app(AddsOne(), Net, lambda context, nth: batches, personal=PERSONAL, evaluate=evaluate)


@pytest.mark.parametrize("wire", [None, True])
def test_a_node_keeps_its_personal_layers_and_evaluates_with_them(wire):
    seen = []
    torch.manual_seed(0)
    server = Server.of(Net(), rules.FedAsync(0.5), personal=PERSONAL)
    messages = MessageCodec(server, wire, False, key="arrays", weighted_by_key="num-examples")
    context, node = Context(1, 7, {}, RecordDict(), {}), app(seen)

    def evaluated():
        records = {"arrays": messages.model()}
        node(flower_message(RecordDict(records), "evaluate"), context)
        return seen[-1]

    initial = evaluated()
    for task in range(1, 4):
        ticket, records = messages.dispatch(7)
        if wire is None:
            assert set(records["arrays"]) == SHARED
        assert messages.receive(ticket, node(flower_message(RecordDict(records)), context).content).accepted
        found = evaluated()
        for name, x in found.items():
            expected = server.state_dict()[name] if name in SHARED else initial[name] + task
            assert torch.equal(x, expected), name


@pytest.mark.parametrize("model", [Net, None])
def test_a_run_sends_and_returns_the_shared_part(model):
    strategy = Asynchronous(rules.FedAsync(rate=0.5), model=model, updates=4, personal=PERSONAL, min_evaluate_nodes=1)
    strategy.poll_interval = 0.02
    seen, checked = [], []

    def evaluate_fn(number, arrays):
        checked.append(set(arrays))
        return MetricRecord({"arrays": len(arrays)})

    with running(app(seen), 2) as engine:
        result = strategy.start(engine.grid, first(), num_rounds=2, timeout=60.0, evaluate_fn=evaluate_fn)
    assert (strategy.server.updates, strategy.server.rejected) == (8, {})
    assert set(result.arrays) == SHARED
    assert checked == [SHARED] * 3
    assert seen


def test_a_plain_app_may_return_all_arrays():
    torch.manual_seed(0)
    complete = Net().state_dict()

    def train(state, part):
        assert set(state) == SHARED
        return {**complete, **{name: x + 1 for name, x in state.items()}}

    strategy = Asynchronous(rules.FedAsync(rate=0.5), model=Net, updates=4, personal=PERSONAL, fraction_evaluate=0.0)
    strategy.poll_interval = 0.02
    with running(plain_app(train), 2) as engine:
        result = strategy.start(engine.grid, first(), num_rounds=1, timeout=60.0)
    assert (strategy.server.updates, strategy.server.rejected) == (4, {})
    assert set(state_dict(result.arrays)) == SHARED


@pytest.mark.usefixtures("as_shipped")
def test_invalid_patterns_are_rejected():
    for call in (
        lambda: Asynchronous(rules.FedAsync(0.5), personal="1.*"),
        lambda: client_app(AddsOne(), Net, lambda context, nth: [], personal="1.*"),
    ):
        with pytest.raises(ArgumentError, match="personal: expected a sequence"):
            call()
