"""Tests of buffers and dtypes: the policy of each buffer acts in the same way in the server and in `aggregate`."""

import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import InitialModel, Payload, Server, aggregate
from manifoldagg.federated.buffers import PackedBuffers, accumulate, apply_pending
from manifoldagg.federated.rules import FedAsync
from manifoldagg.manifolds import Flat, ParameterSpace
from manifoldagg.manifolds.buffer_policies import resolve_policies
from manifoldagg.manifolds.layout import Entry
from tests.federated.fingerprint import Adds, Gathers, bits
from tests.support import draw, seeds

NAN = float("nan")
ENTRIES = [
    Entry("1.running_mean", (2,), torch.float32),
    Entry("1.running_var", (2,), torch.float32),
    Entry("1.num_batches_tracked", (), torch.int64),
    Entry("mask", (2,), torch.bool),
]


def net():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1).bfloat16())
    model.register_buffer("mask", torch.tensor([True, False]))
    return model


def start(rule=None, buffer_policy=()):
    model = net()
    space = ParameterSpace.of(model)
    return space, Server(
        space, rule or FedAsync(0.25), InitialModel(space.point(model), space.buffers(model), buffer_policy)
    )


def send(space, server, mean, count=5, rule=None):
    brought = {
        "1.running_mean": torch.full((2,), float(mean)),
        "1.running_var": torch.full((2,), 3.0),
        "1.num_batches_tracked": torch.tensor(count),
        "mask": torch.tensor([False, True]),
    }
    left = {name for name, policy in server._updates.plan.policies.items() if policy == "leave"}
    sent = {name: tensor for name, tensor in brought.items() if name not in left}
    ticket = server.dispatch("a")
    receipt = server.receive(ticket.id, Payload(ticket.message.start[None], 1, buffers=sent))
    assert receipt.reason == ""
    return {name: server.state_dict()[name] for name in brought}


def test_buffer_policies_match_names_and_patterns():
    assert resolve_policies(ENTRIES, ()) == {
        "1.running_mean": "average",
        "1.running_var": "average",
        "1.num_batches_tracked": "latest",
        "mask": "leave",
    }
    given = {"*running*": "latest", "1.*": "leave", "1.running_var": "average", "*": "leave"}
    assert list(resolve_policies(ENTRIES, given).values()) == ["latest", "average", "leave", "leave"]
    assert list(resolve_policies(ENTRIES, ["*running*"]).values()) == ["average", "average", "latest", "leave"]
    kinds = (torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e5m2)
    odd = [Entry(f"position_ids.{kind}", (3,), kind) for kind in kinds]
    assert set(resolve_policies(odd, ()).values()) == {"leave"}
    assert set(resolve_policies(odd, {"*": "average"}).values()) == {"leave"}
    assert set(resolve_policies(odd, {"*": "latest"}).values()) == {"latest"}


class Positions(nn.Module):
    """Module whose forward pass needs its integer buffers for positions and batch counts."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2, momentum=None)
        self.embedding = nn.Embedding(4, 2)
        self.register_buffer("position_ids", torch.arange(4))

    def forward(self):
        return self.norm(self.embedding(self.position_ids))


def test_integer_buffers_of_attacker_do_not_break_other_clients():
    server = Server.of(Positions(), FedAsync(0.5))
    hostile = Positions().state_dict() | {"position_ids": torch.tensor([9, -1, 2, 3])}
    for count in (-1, -(2**63), 0):
        hostile["norm.num_batches_tracked"] = torch.tensor(count)
        server.receive_model(server.dispatch("attacker"), hostile, samples=1).check()
        client = Positions()
        client.load_state_dict(server.dispatch("ward").state_dict())
        client()
        assert client.position_ids.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("policy", [(), {"*tracked": "latest"}])
@pytest.mark.parametrize("size", [1, 2])
def test_counters_never_decrease(size, policy):
    space, server = start(Gathers(size, patient=False), policy)
    sent = [3, 5, 1, 4, -7, 5, 6, 2, 9, 8]
    after = [send(space, server, 0.0, count)["1.num_batches_tracked"].item() for count in sent]
    applied = [max(sent[: i + 1 - (i + 1) % size], default=0) for i in range(len(sent))]
    assert after == applied


def test_counters_have_a_largest_value():
    """Above the limit, the client's next batch would make the counter negative."""
    model = nn.BatchNorm1d(2)
    server = Server.of(model, FedAsync(0.5))
    state = model.state_dict() | {"num_batches_tracked": torch.tensor(2**63 - 1)}
    receipt = server.receive_model(server.dispatch("a"), state, samples=1)
    assert receipt.reason == "model: num_batches_tracked: expected a counter <= 2^53"
    state["num_batches_tracked"] = torch.tensor(2**53)
    assert server.receive_model(server.dispatch("a"), state, samples=1).accepted


def test_averaged_buffers_follow_the_step_and_counters_are_maximised():
    space, server = start()
    after = send(space, server, mean=8.0)
    assert after["1.running_mean"].tolist() == [2.0, 2.0]
    assert after["1.running_var"].tolist() == [1.5, 1.5]
    assert after["1.num_batches_tracked"].item() == 5
    assert after["mask"].tolist() == [True, False]


def test_policies_latest_and_leave():
    space, server = start(buffer_policy={"*mean": "latest", "*var": "leave", "*tracked": "leave"})
    after = send(space, server, mean=8.0)
    assert after["1.running_mean"].tolist() == [8.0, 8.0]
    assert after["1.running_var"].tolist() == [1.0, 1.0]
    assert after["1.num_batches_tracked"].item() == 0


def test_buffering_rule_averages_the_buffers_of_all_updates():
    space, server = start(Gathers(3, patient=False))
    assert send(space, server, mean=3.0, count=1)["1.running_mean"].tolist() == [0.0, 0.0]
    assert send(space, server, mean=6.0, count=2)["1.num_batches_tracked"].item() == 0
    after = send(space, server, mean=9.0, count=7)
    assert after["1.running_mean"].tolist() == [6.0, 6.0]
    assert after["1.num_batches_tracked"].item() == 7


@pytest.mark.parametrize("patient", [True, False])
def test_buffered_buffers_are_copies(patient):
    _, server = start(Gathers(2, patient))
    message = server.dispatch("a").message
    mine = {name: torch.full_like(message.buffers[name], 3) for name in message.requested_buffers}
    server.receive(server.dispatch("a").id, Payload(server.model[None], 1, buffers=mine))
    theirs = {name: tensor.clone() for name, tensor in mine.items()}
    for tensor in mine.values():
        tensor.fill_(0)
    assert server.receive(server.dispatch("b").id, Payload(server.model[None], 1, buffers=theirs)).accepted
    assert server.state_dict()["1.running_mean"].tolist() == [3.0, 3.0]


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.float16])
def test_buffers_of_any_dtype_are_checked_for_nan(dtype):
    net = nn.Linear(1, 1)
    net.register_buffer("odd", torch.zeros(2).to(dtype))
    space = ParameterSpace.of(net)
    policy = "average" if dtype == torch.float16 else "latest"
    start = InitialModel(space.point(net), space.buffers(net), {"odd": policy})
    server = Server(space, FedAsync(0.5), start)
    ticket = server.dispatch("a")
    bad, good = (Payload(server.model[None], 1, buffers={"odd": torch.full((2,), x).to(dtype)}) for x in (NAN, 2.0))
    assert server.receive(ticket.id, bad).reason.startswith("buffers: odd: expected finite values")
    assert server.receive(ticket.id, good).accepted
    expected = 1.0 if dtype == torch.float16 else 2.0
    assert server.state_dict()["odd"].to(torch.complex64).tolist() == [expected] * 2


def test_buffered_buffers_are_weighted():
    now = PackedBuffers.of({"b": "average"}, {"b": torch.zeros(1)})
    waiting = accumulate(None, {"b": torch.tensor([1.0])}, now, 0.25)
    waiting = accumulate(waiting, {"b": torch.tensor([5.0])}, now, 0.75)
    assert apply_pending(waiting, now, {})["b"].tolist() == [4.0]
    assert apply_pending(waiting, now, {"step": 0.5})["b"].tolist() == [2.0]
    assert apply_pending(waiting, now, {"step": 7.0})["b"].tolist() == [4.0]
    assert apply_pending(waiting, now, {"step": float("nan")})["b"].tolist() == [4.0]
    assert now["b"].tolist() == [0.0]


@given(seeds)
def test_the_buffers_of_a_single_update_are_its_own_bit_for_bit(seed):
    mine, theirs = draw(seed, 2, 3, dtype=torch.float32)
    now = PackedBuffers.of({"b": "average"}, {"b": mine})
    waiting = accumulate(None, {"b": theirs}, now, 0.3)
    assert torch.equal(apply_pending(waiting, now, {})["b"], theirs)


def test_infinities_of_a_mask_are_kept_and_others_are_rejected():
    mask = torch.tensor([0.0, -float("inf")])
    # Another buffer that lies in the same vector is not to blame.
    now = PackedBuffers.of({"even": "average", "mask": "average"}, {"even": torch.ones(3), "mask": mask})
    waiting = accumulate(None, {"even": torch.ones(3), "mask": mask.clone()}, now, 1.0)
    waiting = accumulate(waiting, {"even": torch.ones(3), "mask": mask.clone()}, now, 1.0)
    assert torch.equal(apply_pending(waiting, now, {"step": 0.5})["mask"], mask)
    with pytest.raises(
        ArgumentError, match="buffers: mask: expected finite values, or the values of the current model"
    ):
        accumulate(None, {"even": torch.ones(3), "mask": -mask}, now, 1.0)


def test_packed_buffers_are_a_mapping_of_copies():
    given = {
        "a": torch.arange(6.0).view(2, 3),
        "n": torch.tensor(7),
        "b": torch.ones(4, dtype=torch.bfloat16)[::2],
        "c": torch.zeros(0),
        "d": torch.full((1,), 2.0),
        "mask": torch.tensor([True, False]),
    }
    chosen = dict.fromkeys(given, "average") | {"n": "latest", "mask": "leave"}
    packed = PackedBuffers.of(chosen, given)
    assert list(packed) == list(given)
    assert len(packed.vectors) == 4
    assert all(packed[name].shape == given[name].shape for name in given)
    assert bits(packed) == bits(given) == bits(pickle.loads(pickle.dumps(packed)))
    before = bits(given)
    for tensor in packed.clone().values():
        tensor.fill_(1)
    assert bits(packed) == before
    for tensor in given.values():
        tensor.fill_(1)
    assert bits(packed) == before


def test_accumulate_rejects_buffers_with_other_policies():
    now = {name: PackedBuffers.of({"b": name}, {"b": torch.zeros(1)}) for name in ("average", "latest")}
    waiting = accumulate(None, {"b": torch.ones(1)}, now["average"], 1.0)
    with pytest.raises(ArgumentError, match="buffers: expected the buffers and policies of the buffered updates"):
        accumulate(waiting, {"b": torch.ones(1)}, now["latest"], 1.0)


class Counted(TorchDispatchMode):
    """Counter of the operators that read or write entries."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func not in (torch.ops.aten.view.default, torch.ops.aten.detach.default)
        return func(*args, **(kwargs or {}))


def test_number_of_operators_does_not_grow_with_the_buffers():
    """All buffers of one dtype are checked, added and copied as one vector."""
    counts = []
    for layers in (1, 50):
        net = nn.Sequential(nn.Linear(2, 2), *(nn.BatchNorm1d(2, affine=False) for _ in range(layers)))
        space = ParameterSpace.of(net)
        server = Server(space, FedAsync(0.25), InitialModel(space.point(net), space.buffers(net)))
        ticket = server.dispatch("a")
        payload = Payload(ticket.message.start[None], 1, buffers=ticket.message.buffers)
        with Counted() as counted:
            assert server.receive(ticket.id, payload).accepted
        counts.append(counted.count)
    assert counts[0] == counts[1]


def test_message_contains_the_buffers():
    space, server = start()
    send(space, server, mean=8.0)
    message = server.dispatch("a").message
    assert message.buffers["1.running_mean"].tolist() == [2.0, 2.0]
    message.buffers["1.running_mean"].fill_(9.0)
    assert server.state_dict()["1.running_mean"].tolist() == [2.0, 2.0]


def test_ticket_state_dict_loads_into_the_client_module():
    space, server = start(buffer_policy={"1.*": "leave", "*": "average"})
    send(space, server, mean=8.0)
    ticket = server.dispatch("a")
    theirs = net()
    theirs.load_state_dict(ticket.state_dict())
    assert bits(theirs.state_dict()) == bits(server.state_dict()) == bits(ticket.state_dict())
    assert "space" not in repr(ticket)
    assert ticket == replace(ticket, space=None)
    bare = Server(space, FedAsync(0.5), space.point(theirs)).dispatch("a")
    assert bare.state_dict().keys() == dict(theirs.named_parameters()).keys()
    with pytest.raises(ArgumentError, match="space: expected a ParameterSpace, got Flat"):
        Server(Flat(2), FedAsync(0.5), torch.zeros(2)).dispatch("a").state_dict()


def test_dtypes_of_buffers_are_restored_from_float32_masters():
    model = net()
    nn.init.ones_(model[2].weight)
    space = ParameterSpace.of(model)
    server = Server(space, FedAsync(2**-9), space.point(model))
    before = server.state_dict()
    assert {name: t.dtype for name, t in before.items()} == {name: model.state_dict()[name].dtype for name in before}
    assert before["2.weight"].dtype == torch.bfloat16
    assert server.model.dtype == torch.float32
    # A step of 2^-9 from 1 is half of what bf16 could round up: only a master sees it, until 32 have added up.
    for _ in range(32):
        ticket = server.dispatch("a")
        server.receive(ticket.id, Payload(ticket.message.start[None] + 1, 1))
    assert server.state_dict()["2.weight"].tolist() == [[1.0625, 1.0625]]


def test_server_without_buffers_rejects_buffers():
    model = net()
    space = ParameterSpace.of(model)
    server = Server(space, Adds(), space.point(model))
    ticket = server.dispatch("a")
    given = Payload(space.point(model)[None], 1, buffers=space.buffers(model))
    assert server.receive(ticket.id, given).reason.startswith("buffers: unknown: 1.num_batches_tracked")
    assert server.receive(ticket.id, Payload(space.point(model)[None], 1)).accepted
    assert set(server.state_dict()) == {"0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"}


def test_aggregate_supports_the_same_policies():
    model = {name: t.float() if t.is_floating_point() else t for name, t in net().state_dict().items()}
    other = {name: t + 1 if t.is_floating_point() else t for name, t in model.items()}
    for policy, expected in (("average", 0.25), ("latest", 1.0), ("leave", 0.0)):
        space = ParameterSpace.of_state_dict(model, buffer_policy={"*mean": policy, "*var": "leave"})
        new, _, _ = aggregate(FedAsync(0.25), None, model, model, other, space=space)
        assert new["1.running_mean"].tolist() == [expected] * 2
        assert new["1.running_var"].tolist() == [1.0, 1.0]
    state, rule = None, Gathers(2)
    for expected in (0.0, 1.0):
        kept = bits(model)
        new, state, _ = aggregate(
            rule, state, model, model, other, space=ParameterSpace.of_state_dict(model, buffer_policy=["*running*"])
        )
        assert new["1.running_mean"].tolist() == [expected] * 2
        assert bits(model) == kept
    assert state["steps"] == 1


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: start(buffer_policy={"*mean": "mean"}), r"buffer_policy: \*mean: expected one of average, latest, leave; got 'mean'"),
        (lambda: start(buffer_policy={"*avg": "leave"}), r"buffer_policy: '\*avg' matches no entry of the model"),
        (lambda: start(buffer_policy=["*avg"]), r"buffer_policy: '\*avg' matches no entry of the model"),
        (lambda: start(buffer_policy=["0.*"]), r"buffer_policy: '0\.\*' matches no buffer, but the trainable parameter 0.weight"),
        (lambda: started_with({}), "buffers: missing: "),
        (lambda: started_with({"1.running_mean": torch.zeros(3)}), r"buffers: 1.running_mean: expected shape \(2,\)"),
        (lambda: started_with({"1.num_batches_tracked": torch.tensor(0.0)}), "buffers: 1.num_batches_tracked: expected torch.int64"),
    ],
)  # fmt: skip
def test_invalid_buffers_are_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


def started_with(changed):
    model = net()
    space = ParameterSpace.of(model)
    kept = {**space.buffers(model), **changed} if changed else {}
    return Server(space, Adds(), InitialModel(space.point(model), kept))
