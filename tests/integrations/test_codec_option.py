"""`Asynchronous(codec=...)`: nodes encode their updates with error feedback, and the server decodes them."""

import pytest
import torch
from flwr.app import Context, RecordDict
from torch import nn

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Payload, Server, rules
from manifoldagg.federated.clients import Codec, ErrorFeedback, Int8, Local, TopK
from manifoldagg.federated.clients.compression import decode_payload
from manifoldagg.integrations.flower import Asynchronous, client_app
from manifoldagg.integrations.flower.client import _NodeState
from manifoldagg.integrations.flower.codec import MessageCodec
from manifoldagg.integrations.flower.records import array_record, codec_from_record
from tests.integrations.engine import running
from tests.integrations.test_client_app import flower_message
from tests.integrations.test_strategy import plain_app

PARAMETERS = 3 * 4 + 4 + 4 * 2 + 2
CODECS = [TopK(0.25), Int8()]


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


class AddsOne:
    """A trainer whose update is 1 for every parameter, plus the index of the parameter."""

    def train(self, space, message, loss, batches, client_state, *, generator):
        return Payload((message.start + 1 + torch.arange(len(message.start)))[None], 10)


def first():
    torch.manual_seed(0)
    return array_record(network().state_dict())


def app(trainer):
    return client_app(trainer, network, lambda context, nth: [(torch.ones(4, 3), torch.tensor([0, 1, 1, 0]))])


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_run_decodes_the_updates_and_reports_their_bytes(codec):
    strategy = Asynchronous(rules.FedAsync(rate=0.5), model=network, updates=6, codec=codec, fraction_evaluate=0.0)
    strategy.poll_interval = 0.02
    with running(app(Local(epochs=1, rate=0.1)), 2) as engine:
        result = strategy.start(engine.grid, first(), num_rounds=2, timeout=60.0)
    assert (strategy.server.updates, strategy.server.rejected) == (12, {})
    for metrics in result.train_metrics_clientapp.values():
        # The header of the wire format has at most 2,000 bytes here.
        data = codec.num_bytes(PARAMETERS)
        assert 6 * data < metrics["received-bytes"] < 6 * (data + 2000)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_node_transmits_the_residual_with_its_next_update(codec):
    server = Server.of(network(), rules.ASGD(1.0), weights="uniform")
    messages = MessageCodec(server, None, False, key="arrays", weighted_by_key="num-examples", codec=codec)
    context = Context(run_id=1, node_id=7, node_config={}, state=RecordDict(), run_config={})
    node, expected = app(AddsOne()), ErrorFeedback(codec)
    for _ in range(3):
        ticket, records = messages.dispatch(7)
        start = server.model
        reply = node(flower_message(RecordDict(records)), context)
        payload = Payload((start + 1 + torch.arange(len(start)))[None], 10)
        expected_points = decode_payload(codec, expected.encode_payload(payload, start), start).points
        assert messages.receive(ticket, reply.content).accepted
        assert torch.equal(server.model, expected_points[0])


def test_another_codec_starts_without_a_residual():
    context = Context(run_id=1, node_id=7, node_config={}, state=RecordDict(), run_config={})
    state = _NodeState(context)
    feedback = state.error_feedback(TopK(0.5))
    feedback.encode(torch.tensor([1.0, 2.0]))
    state.save_error_feedback(feedback)
    assert torch.equal(_NodeState(context).error_feedback(TopK(0.5)).residual, torch.tensor([1.0, 0.0]))
    assert _NodeState(context).error_feedback(TopK(0.25)).residual is None


def test_a_plain_app_is_rejected_with_the_reason():
    server = Server.of(network(), rules.FedAsync(0.5))
    messages = MessageCodec(server, None, False, key="arrays", weighted_by_key="num-examples", codec=Int8())
    ticket, records = messages.dispatch(7)
    assert codec_from_record(RecordDict(records)) == Int8()
    assert codec_from_record(RecordDict({})) is None
    receipt = messages.receive(ticket, RecordDict({"arrays": first()}))
    assert receipt.reason == "wire: expected a reply of `client_app`, as the strategy has a codec"


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"codec": "int8"}, "codec: expected a Codec"),
        ({"codec": Int8}, "codec: expected a Codec"),
        ({"codec": Int8(), "wire": False}, "wire: expected None or True"),
    ],
)
def test_invalid_options_are_rejected(options, words):
    with pytest.raises(ArgumentError, match=words):
        Asynchronous(rules.FedAsync(0.5), **options)


def test_a_codec_that_nodes_do_not_have_is_rejected():
    class Other(Codec):
        def encode(self, update):
            return {"all": update}

        def decode(self, tensors, size, dtype):
            return tensors["all"]

        def num_bytes(self, size, dtype=torch.float32):
            return size * dtype.itemsize

    with pytest.raises(ArgumentError, match="codec: expected one of TopK, Int8"):
        Asynchronous(rules.FedAsync(0.5), codec=Other())


def test_no_bytes_are_reported_without_a_codec():
    strategy = Asynchronous(rules.FedAsync(rate=0.5), model=network, fraction_evaluate=0.0)
    strategy.poll_interval = 0.02
    with running(plain_app(), 2) as engine:
        result = strategy.start(engine.grid, first(), num_rounds=1, timeout=60.0)
    assert "received-bytes" not in result.train_metrics_clientapp[1]
