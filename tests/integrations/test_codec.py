"""Packed models: once for each version, shared by its messages, and never longer than the version is current."""

import gc
import weakref

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from torch import nn

from manifoldagg.federated import Payload, Server, rules
from manifoldagg.federated.server.durability.store import InMemoryTree
from manifoldagg.federated.server.events import Rejected
from manifoldagg.integrations.flower import codec as codec_module
from manifoldagg.integrations.flower.codec import MessageCodec
from manifoldagg.integrations.flower.records import RECORD_KEY, array_record, bytes_to_record, state_dict
from manifoldagg.wire import pack
from tests.server_options import grouped


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(3, 3, bias=False)
        self.norm = nn.BatchNorm1d(3)
        self.decode = nn.Linear(3, 3)
        self.decode.weight = self.encode.weight


def narrow():
    return nn.Sequential(nn.Linear(3, 4, dtype=torch.bfloat16), nn.Linear(4, 2))


def double():
    return nn.Linear(3, 4, dtype=torch.float64)


MODELS = {
    "tied": (Tied, {}),
    "bfloat16": (narrow, {}),
    "rounded bases": (double, {"base_dtype": torch.float32}),
    "batch normalisation": (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), {}),
}


def codec_of(model=double, rule=None, **options):
    torch.manual_seed(0)
    server = Server.of(model(), rules.FedAsync(rate=0.5) if rule is None else rule, **grouped(**options))
    return server, MessageCodec(server, None, False, key="arrays", weighted_by_key="num-examples")


def data_of(record):
    return [(name, x.dtype, x.shape, x.stype, x.data) for name, x in record.items()]


def reply(codec, ticket, change=1.0):
    model = {name: x + change if x.is_floating_point() else x for name, x in state_dict(codec.model()).items()}
    metrics = MetricRecord({"num-examples": 10})
    return codec.receive(ticket, RecordDict({"arrays": array_record(model), "metrics": metrics}))


@pytest.mark.parametrize(("model", "options"), MODELS.values(), ids=MODELS)
def test_a_model_is_packed_once_for_each_version(model, options, monkeypatch):
    packed = []
    monkeypatch.setattr(codec_module, "array_record", lambda state: packed.append(1) or array_record(state))
    server, codec = codec_of(model, **options)
    for version in range(3):
        packed.clear()
        sent = [codec.dispatch(node) for node in range(4)]
        assert (len(packed), server.version) == (1, version)
        one, *others = (records["arrays"] for _, records in sent)
        assert all(other[name] is x for other in others for name, x in one.items())
        assert all(other is not one for other in others)
        expected = server.state_dict()
        if "base_dtype" in options:
            expected = {name: x.float().double() for name, x in expected.items()}
        assert data_of(one) == data_of(array_record(expected))
        for ticket, _ in sent[1:]:
            server.drop(ticket)
        assert reply(codec, sent[0][0]).accepted


@pytest.mark.parametrize(("model", "options"), MODELS.values(), ids=MODELS)
def test_model_of_a_round_is_a_copy_of_the_server_model(model, options):
    server, codec = codec_of(model, **options)
    for _ in range(3):
        expected = data_of(array_record(server.state_dict()))
        assert data_of(codec.model()) == expected
        ticket, records = codec.dispatch(7)
        found, sent = codec.model(), records["arrays"]
        assert data_of(found) == expected
        assert [x.data is sent[name].data for name, x in found.items()] == [not options] * len(found)
        before = data_of(sent)
        for name in list(found):
            found[name].data = b""
            found[name] = next(iter(array_record({"x": torch.zeros(1)}).values()))
        assert (data_of(sent), data_of(codec.model())) == (before, expected)
        assert reply(codec, ticket).accepted


def test_a_client_that_replaces_arrays_of_its_message_changes_no_other():
    _, codec = codec_of()
    (_, one), (_, other) = (codec.dispatch(node) for node in (1, 2))
    before = data_of(other["arrays"])
    one["arrays"]["weight"] = next(iter(ArrayRecord([np.zeros(1)]).values()))
    del one["arrays"]["bias"]
    assert data_of(other["arrays"]) == before == data_of(codec.dispatch(3)[1]["arrays"])


def test_packed_model_is_released_with_its_version():
    server, codec = codec_of()
    ticket, records = codec.dispatch(1)
    packed = weakref.ref(records["arrays"]["weight"])
    del records
    gc.collect()
    assert packed() is not None
    assert reply(codec, ticket).accepted
    gc.collect()
    assert packed() is None
    ticket, records = codec.dispatch(1)
    packed = weakref.ref(records["arrays"]["weight"])
    del records
    codec.release()
    gc.collect()
    assert packed() is None
    assert data_of(codec.model()) == data_of(array_record(server.state_dict()))


def test_queued_message_keeps_the_model_of_its_version():
    """Its ticket is gone, so that the server writes newer models into the memory of this version."""
    server, codec = codec_of()
    waiting, records = codec.dispatch(1)
    expected = data_of(array_record(server.state_dict()))
    server.drop(waiting)
    for node in range(4):
        assert reply(codec, codec.dispatch(node)[0]).accepted
    assert data_of(records["arrays"]) == expected


def test_server_does_not_reuse_the_memory_of_a_shared_message():
    server, codec = codec_of()
    ticket, base = server.dispatch_shared(1)
    assert isinstance(base, InMemoryTree)
    assert ticket.message.start is base.tree
    before = ticket.message.start.clone()
    server.drop(ticket)
    for node in range(4):
        assert reply(codec, codec.dispatch(node)[0]).accepted
    assert torch.equal(ticket.message.start, before)


def test_buffered_updates_do_not_change_the_packed_model():
    server, codec = codec_of(rule=rules.FedBuff(size=2))
    ticket, records = codec.dispatch(1)
    assert reply(codec, ticket).buffered
    assert server.version == 0
    assert codec.dispatch(2)[1]["arrays"]["weight"] is records["arrays"]["weight"]


INJECTED = "ward-7\n2026-01-01 ERROR: model.pt was deleted\x1b[2J\u202e" + "x" * 5000


def wire_reply(server, **named):
    ticket = server.dispatch(1)
    payload = Payload(ticket.message.start[None] + 1, samples=10)
    data = pack(payload, spec=server.space, ticket=named.get("ticket", ticket))
    return RecordDict({RECORD_KEY: bytes_to_record(data)})


def named_arrays(name, data=b"junk"):
    odd = Array(dtype="float64", shape=(1,), stype="numpy.ndarray", data=data)
    return RecordDict({"arrays": ArrayRecord({name: odd}), "m": MetricRecord({"num-examples": 10})})


def foreign_leaves(server):
    other = Server.of(nn.ModuleDict({"a" * 3000: nn.Linear(3, 4, dtype=torch.float64)}), rules.FedAsync(rate=0.5))
    payload = Payload(other.dispatch(1).message.start[None], samples=10)
    return RecordDict({RECORD_KEY: bytes_to_record(pack(payload, spec=other.space))})


INJECTIONS = {
    "array name": lambda server: named_arrays(INJECTED),
    "name of an unknown array": lambda server: named_arrays(INJECTED, array_record({"x": torch.ones(1)})["x"].data),
    "ticket": lambda server: wire_reply(server, ticket=INJECTED),
    "samples": lambda server: RecordDict(
        {"arrays": ArrayRecord(), "m": MetricRecord({"num-examples": list(range(10**4))})}
    ),
    "leaves": foreign_leaves,
}


@pytest.mark.parametrize("make", INJECTIONS.values(), ids=INJECTIONS)
def test_text_from_nodes_is_printable_and_short_in_all_reports(make, caplog):
    server, codec = codec_of()
    events = []
    server.on_event(lambda event: events.append(event) if isinstance(event, Rejected) else None)
    ticket, _ = codec.dispatch(7)
    receipt = codec.receive(ticket, make(server))
    assert not receipt.accepted
    texts = [receipt.reason, *(event.reason for event in events), *(record.getMessage() for record in caplog.records)]
    assert len(texts) == 3
    for text in texts:
        assert text.isprintable()
        assert len(text) <= 350
