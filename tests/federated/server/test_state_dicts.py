"""Tests of servers with state dicts: created from a module, and updated with state dicts of clients."""

import copy
import os
import re
import warnings

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from manifoldagg import AsyncAggregator, aggregate, average
from manifoldagg.errors import ArgumentError, CheckpointError
from manifoldagg.federated import Payload, Server, ServerLimits, UpdateLimits, rules
from manifoldagg.federated.server.state_dicts import payload_loader
from manifoldagg.federated.types import extra_fields
from manifoldagg.manifolds import Flat, ParameterSpace
from tests.federated.fingerprint import bits
from tests.federated.rules.registered import golden

CASES = {name: rule for name, rule in golden().items() if not getattr(rule, "is_private", False)}
PLAIN = {name: rule for name, rule in CASES.items() if extra_fields(rule) == ({}, ())}


def net(seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 2).bfloat16())
    model[2].requires_grad_(False)
    model.register_buffer("mask", torch.tensor([0.0, -float("inf")]))
    return model


def moved(model, seed):
    """Return a state dict with small changes, as a client could return it."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, tensor in model.items():
        noise = 0.1 * torch.rand(tensor.shape, generator=generator)
        if name.endswith("num_batches_tracked"):
            state[name] = tensor + 1 + seed
        elif name.startswith("2.") or name == "mask":
            state[name] = tensor.clone()
        else:
            state[name] = (tensor + noise).to(tensor.dtype)
    return state


def as_payload(space, states, asked, samples, start):
    """Return the payload of a client that trains from the rounded model.

    The rounding error of the start is added to the points.
    """
    rounded = space.state_dict(start) | {name: states[-1][name] for name in space.buffers(states[-1])}
    lost = start - space.point(rounded)
    points = torch.stack([space.point(state) + lost for state in states])
    return Payload(points, samples, buffers={name: states[-1][name] for name in asked})


@pytest.mark.parametrize("name", PLAIN)
def test_state_dict_gives_the_same_result_as_its_payload(name):
    rule = PLAIN[name]
    twins = [Server.of(net(), rule, weights="uniform") for _ in range(2)]
    space = twins[0].space
    counts = [rule.vertices] if hasattr(rule, "vertices") else [1, 1] if getattr(rule, "single_point", True) else [1, 2]
    for turn, count in enumerate(counts):
        here = twins[1].model
        tickets = [server.dispatch("heavy") for server in twins]
        # Who is sent elsewhere, as by OrthoFL, starts from what it is sent.
        start = here if torch.equal(tickets[1].message.start, here) else space.point(tickets[1].state_dict())
        states = [moved(tickets[0].state_dict(), 10 * turn + i) for i in range(count)]
        kept = bits(states[-1])
        given = states[0] if count == 1 else states
        receipts = [
            twins[0].receive_model(tickets[0], given, samples=4),
            twins[1].receive(tickets[1], as_payload(space, states, tickets[1].message.requested_buffers, 4, start)),
        ]
        assert receipts[0].reason == ""
        assert repr(receipts[0]) == repr(receipts[1])
        assert bits(twins[0].state_dict()) == bits(twins[1].state_dict())
        assert bits(states[-1]) == kept
    if not receipts[0].buffered:
        assert twins[0].state_dict()["1.num_batches_tracked"] == states[-1]["1.num_batches_tracked"]


@pytest.mark.parametrize("name", [name for name in CASES if name not in PLAIN])
def test_receive_model_raises_for_rule_that_requires_more_than_models(name):
    server = Server.of(net(), CASES[name])
    ticket = server.dispatch("a")
    with pytest.raises(ArgumentError, match="rule: .* requires more than models from clients; use `receive`"):
        server.receive_model(ticket, ticket.state_dict(), samples=1)
    server.drop(ticket)


def test_server_of_module_keeps_its_buffers_and_frozen_parameters():
    """The buffers follow those of the clients. Frozen parameters do not change, and clients do not send them."""
    model = net()
    server = Server.of(model, rules.FedAsync(0.5), limits=ServerLimits(history_size=3))
    assert bits(server.state_dict()) == bits(model.state_dict())
    message = server.dispatch("a").message
    assert message.requested_buffers == ("mask", "1.running_mean", "1.running_var", "1.num_batches_tracked")
    assert message.buffers.keys() == {*message.requested_buffers, "2.weight", "2.bias"}
    for tensor in model.state_dict().values():
        tensor.zero_()
    assert server.state_dict()["1.running_var"].tolist() == [1.0] * 8
    named = Server.of(net(), rules.FedAsync(0.5), buffer_policy={"1.*": "leave", "2.bias": "latest"})
    assert named.dispatch("a").message.requested_buffers == ("mask", "2.bias")
    listed = Server.of(net(), rules.FedAsync(0.5), buffer_policy=["2.*"])
    assert "2.weight" in listed.dispatch("a").message.requested_buffers


def test_base_of_narrow_model_is_the_rounded_model():
    """Nine of ten clients change nothing, and one adds the last bit of bfloat16.

    Each round moves the model by a tenth of it.
    """
    model = nn.Linear(4, 1, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    server = Server.of(model, rules.ASGD(rate=1.0), weights=dict.fromkeys(range(10), 1))
    for _ in range(20):
        tickets = [server.dispatch(client) for client in range(10)]
        for client, ticket in enumerate(tickets):
            state = ticket.state_dict()
            state["weight"] = state["weight"] + (2**-7 if client == 0 else 0)
            server.receive_model(ticket, state, samples=1).check()
    torch.testing.assert_close(server.model, torch.full((4,), 1 + 2 * 2**-7))
    ticket = server.dispatch(0)
    assert server.receive_model(ticket, ticket.state_dict(), samples=1).norm < 1e-7


@pytest.mark.usefixtures("as_shipped")
def test_names_are_matched_literally_and_a_single_string_is_rejected():
    model = nn.ModuleDict({"head[0]": nn.Linear(2, 2), "tail": nn.Linear(2, 2)})
    model["head[0]"].requires_grad_(False)
    server = Server.of(model, rules.FedAsync(0.5))
    assert server._updates.plan.policies["head[0].weight"] == "leave"
    for buffers in ("latest", "*mask", 3, None):
        with pytest.raises(ArgumentError, match="^buffer_policy: expected a sequence of glob patterns"):
            Server.of(net(), rules.FedAsync(0.5), buffer_policy=buffers)


def test_negative_variance_is_rejected():
    server = Server.of(net(), rules.FedAsync(1.0))
    ticket = server.dispatch("a")
    state = ticket.state_dict()
    state["1.running_var"] = state["1.running_var"] - 5
    reason = server.receive_model(ticket, state, samples=1).reason
    assert reason.startswith("model: 1.running_var: expected finite values >= 0")
    assert (server.state_dict()["1.running_var"] >= 0).all()


@pytest.mark.usefixtures("as_shipped")
def test_objects_that_are_not_modules_are_rejected():
    frozen = nn.Linear(2, 2).requires_grad_(False)
    for model, words in (
        (nn.ReLU(), "model: expected floating parameters, got none$"),
        (frozen, "model: expected trainable parameters, got a module whose parameters are all frozen"),
        (
            {"w.running_mean": torch.ones(1)},
            "model: expected floating parameters, got none; w.running_mean is torch.flo",
        ),
        ([torch.zeros(2)], "got list of 1 tensor; pass a dict from names to tensors$"),
        ([net()], "model: expected a torch.nn.Module or a state dict, got list of 1 module"),
        ({0: torch.ones(2)}, "model: expected strings as names, got 0"),
        ({"steps": torch.tensor(3)}, "model: expected floating parameters, got none; steps is torch.int64"),
    ):
        with pytest.raises(ArgumentError, match=words):
            Server.of(model, rules.FedAsync())
    with pytest.raises(ArgumentError, match="start: expected a model with parameters, got an empty model"):
        Server(ParameterSpace.of(nn.ReLU()), rules.FedAsync(), torch.zeros(0))


def test_server_of_accepts_a_state_dict():
    model = nn.BatchNorm1d(2)
    one, other = (Server.of(each, rules.FedAsync(0.5)) for each in (model, model.state_dict()))
    assert one.space == other.space
    assert torch.equal(one.model, other.model)
    assert [*one.state_dict()] == [*other.state_dict()] == [*model.state_dict()]


def test_entries_that_were_not_requested_are_optional_and_ignored():
    server = Server.of(net(), rules.FedAsync(0.5))
    before = bits(server.state_dict())
    ticket = server.dispatch("a")
    state = {name: tensor for name, tensor in ticket.state_dict().items() if not name.startswith("2.")}
    assert server.receive_model(ticket.id, state, samples=1).accepted
    ticket = server.dispatch("a")
    state = ticket.state_dict() | {"2.weight": torch.full((1,), float("nan")), "_extra_state": {"version": 3}}
    assert server.receive_model(ticket.id, state, samples=1).reason == ""
    after = bits(server.state_dict())
    assert all(after[name] == before[name] for name in ("2.weight", "2.bias"))
    # Without buffers of its own it takes none.
    bare = Server(server.space, rules.FedAsync(0.5), server.model)
    assert bare.receive_model(bare.dispatch("a"), net().state_dict(), samples=1).accepted


class Hostile(dict):
    def items(self):
        raise RuntimeError

    keys = __iter__ = __getitem__ = items


STATE = net().state_dict()
FREED = torch.ones(8, 3)
FREED.untyped_storage().resize_(0)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({}, "model: missing: 0.bias, 0.weight"),
        ([], "model: expected from 1 to 16 state dicts, got 0"),
        ([STATE] * 17, "model: expected from 1 to 16 state dicts, got 17"),
        (
            type("Odd", (list,), {"__iter__": 3})([STATE]),
            "model: expected a state dict, a path or a sequence of them, got Odd",
        ),
        (None, "model: expected a state dict, a path or a sequence of them, got NoneType"),
        (torch.ones(3), "model: expected a state dict, a path or a sequence of them, got Tensor"),
        ([STATE, 3], "model[1]: expected a mapping from names, got int"),
        (STATE | {"extra": torch.ones(2)}, "model: unknown: extra"),
        (STATE | {3: torch.ones(2)}, "model: unknown: 3"),
        (STATE | {"0.weight": 3}, "model: 0.weight: expected a tensor, got int"),
        (STATE | {"0.weight": torch.ones(3, 8)}, "model: 0.weight: expected shape (8, 3), got (3, 8)"),
        (STATE | {"0.weight": torch.ones(8, 3).double()}, "model: 0.weight: expected torch.float32, got torch.float64"),
        (STATE | {"0.weight": torch.full((8, 3), float("nan"))}, "model: 0.weight: expected finite values"),
        (STATE | {"0.weight": torch.ones(8, 3, device="meta")}, "model: 0.weight: expected a dense tensor with values"),
        (
            lambda: STATE | {"0.weight": FREED},
            "model: 0.weight: expected a dense tensor with values, got a tensor whose storage",
        ),
        ({n: x for n, x in STATE.items() if "1." not in n}, "model: missing: 1.bias, 1.weight"),
        ({n: x for n, x in STATE.items() if n != "1.running_var"}, "model: missing: 1.running_var"),
        (STATE | {"1.running_var": torch.full((8,), float("nan"))}, "model: 1.running_var: expected finite values"),
        (Hostile(STATE), "model: expected a readable value; its code raised RuntimeError"),
        ([STATE, STATE], "model: expected one model, (1, P), for FedAsync, got 2"),
    ],
)
def test_invalid_model_is_rejected_by_name_and_client_may_retry(model, words):
    server = Server.of(net(), rules.FedAsync(0.5))
    ticket = server.dispatch("a")
    before = bits(server.state_dict())
    # Who prints a tensor without memory ends the process.
    receipt = server.receive_model(ticket, model() if callable(model) else model, samples=2)
    assert not receipt.accepted
    assert receipt.reason.startswith(words)
    assert bits(server.state_dict()) == before
    assert server.rejected == {words.partition(":")[0].partition("[")[0]: 1}
    assert server.receive_model(ticket, STATE, samples=2).accepted


def test_model_that_looks_like_a_difference_is_rejected():
    server = Server.of(net(), rules.FedAsync(0.5))
    ticket = server.dispatch("a")
    start = ticket.state_dict()
    difference = {name: 0.05 * tensor if tensor.is_floating_point() else tensor for name, tensor in start.items()}
    difference["mask"] = start["mask"]
    before = bits(server.state_dict())
    with pytest.raises(UserWarning, match="model: expected the model itself, got what looks like a difference"):
        server.receive_model(ticket, difference, samples=1)
    assert bits(server.state_dict()) == before
    with pytest.warns(UserWarning, match="model: expected the model itself, got what looks like a difference"):
        assert server.receive_model(ticket, difference, samples=1).accepted


@pytest.mark.usefixtures("as_shipped")
def test_a_difference_with_a_negative_variance_is_rejected_as_a_difference():
    server = Server.of(net(), rules.FedAsync(0.5))
    ticket = server.dispatch("a")
    start = ticket.state_dict()
    difference = {name: 0.05 * tensor if tensor.is_floating_point() else tensor for name, tensor in start.items()}
    difference |= {"mask": start["mask"], "1.running_var": torch.full((8,), -0.1)}
    before = bits(server.state_dict())
    reason = server.receive_model(ticket, difference, samples=1).reason
    assert server.receive_model(ticket, lambda: difference, samples=1).reason == reason  # as from a codec
    assert re.fullmatch(
        r"model: expected the model itself, got what looks like a difference of models: \S+ has 0\.05 x the norm of its "
        r"base; return the model, which is the base plus the difference",
        reason,
    )
    assert server.rejected == {"model": 2}
    assert bits(server.state_dict()) == before
    assert server.receive_model(ticket, start, samples=1).accepted


def test_state_dicts_require_a_space_with_named_tensors():
    server = Server(Flat(2), rules.FedAsync(), torch.zeros(2))
    with pytest.raises(ArgumentError, match="space: expected a ParameterSpace, got Flat"):
        server.receive_model(server.dispatch("a"), {}, samples=1)


def test_receive_model_checks_the_client_and_repeats_the_receipt():
    server = Server.of(net(), rules.FedAsync(0.5), limits=UpdateLimits(max_samples=9))
    ticket = server.dispatch("a")
    assert "client" in server.receive_model(ticket, STATE, samples=1, client="b").reason
    assert server.receive_model(ticket, STATE, samples=10, client="a").reason.startswith("samples: expected")
    receipt = server.receive_model(ticket, STATE, samples=1, client="a")
    assert receipt.accepted
    # Of what comes with a retry nothing is looked at.
    assert server.receive_model(ticket, {}, samples=0, client="a") is receipt
    assert server.version == 1


def test_plain_torch_training_loop_learns_with_a_server():
    """The clients only load, train and return a state dict."""
    server = Server.of(net(), rules.FedAsync(0.5), weights="uniform")
    inputs = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
    labels = (inputs[:, 0] > 0).long()
    client = net()

    def loss(state):
        copy_ = copy.deepcopy(client).eval()
        copy_.load_state_dict(state)
        with torch.no_grad():
            return float(nn.functional.cross_entropy(run(copy_, inputs), labels))

    def run(model, x):
        return model[3](model[:3](x).bfloat16()).float()

    before = loss(server.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(10):
            ticket = server.dispatch("a")
            client.load_state_dict(ticket.state_dict())
            descent = torch.optim.SGD([p for p in client.parameters() if p.requires_grad], lr=0.1)
            for part in range(0, 64, 16):
                descent.zero_grad()
                nn.functional.cross_entropy(run(client, inputs[part : part + 16]), labels[part : part + 16]).backward()
                descent.step()
            assert server.receive_model(ticket, client.state_dict(), samples=64, client="a").accepted
    assert loss(server.state_dict()) < 0.8 * before
    assert server.state_dict()["1.num_batches_tracked"] == 40


@pytest.mark.parametrize("rule", [rules.FedOrtho(0.5), rules.AsyncBezier(0.5)], ids=lambda rule: type(rule).__name__)
def test_receive_model_accepts_a_path_of_a_state_dict(rule, tmp_path):
    twins = [Server.of(net(), rule) for _ in range(2)]
    count = 1 if isinstance(rule, rules.FedOrtho) else 2
    for turn in range(2):
        tickets = [server.dispatch("ward-7") for server in twins]
        states = [moved(tickets[0].state_dict(), 10 * turn + i) for i in range(count)]
        paths = [tmp_path / f"{turn}-{i}.safetensors" for i in range(count)]
        for state, path in zip(states, paths, strict=True):
            save_file(state, path)
        data = [path.read_bytes() for path in paths]
        single = count == 1
        receipts = [
            twins[0].receive_model(tickets[0], states[0] if single else states, samples=4),
            twins[1].receive_model(tickets[1], str(paths[0]) if single else paths, samples=4),
        ]
        assert receipts[0].accepted
        assert receipts[0] == receipts[1]
        assert bits(twins[0].state_dict()) == bits(twins[1].state_dict())
        assert [path.read_bytes() for path in paths] == data


def test_a_damaged_file_is_rejected_and_may_be_sent_again(tmp_path):
    server = Server.of(net(), rules.FedAsync(0.5))
    ticket = server.dispatch("ward-7")
    path = tmp_path / "update.safetensors"
    save_file(moved(ticket.state_dict(), 0), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    receipt = server.receive_model(ticket, path, samples=4)
    assert not receipt.accepted
    assert "is not complete" in receipt.reason
    receipt = server.receive_model(ticket, tmp_path / "missing.safetensors", samples=4)
    assert "model: expected an existing file" in receipt.reason
    path.write_bytes(whole)
    assert server.receive_model(ticket, path, samples=4).accepted


def test_the_rejection_of_a_damaged_file_names_the_argument_and_not_the_file(tmp_path):
    """Otherwise, `Server.rejected` would have an entry for each file name."""
    server = Server.of(net(), rules.FedAsync(0.5))
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(b"x" * 40)
    receipt = server.receive_model(server.dispatch("ward-7"), path, samples=4)
    assert receipt.reason.startswith(f"model: {path}: ")
    assert server.rejected == {"model": 1}


def test_an_aggregator_reads_an_update_from_a_file(tmp_path):
    twins = [AsyncAggregator(rules.FedOrtho(0.5), nn.Linear(3, 2).state_dict() | {"bias": torch.ones(2)})]
    twins.append(AsyncAggregator(rules.FedOrtho(0.5), twins[0].model))
    state = moved(twins[0].checkout("ward-7"), 0)
    twins[1].checkout("ward-7")
    save_file(state, tmp_path / "update.safetensors")
    made = [
        twins[0].submit("ward-7", state, samples=4),
        twins[1].submit("ward-7", tmp_path / "update.safetensors", samples=4),
    ]
    assert made[0] == made[1]
    assert bits(twins[0].model) == bits(twins[1].model)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head, self.last = nn.Embedding(5, 3), nn.Linear(3, 5), nn.Linear(3, 5, bias=False)
        self.head.weight = self.last.weight = self.embed.weight


@pytest.mark.parametrize("kept", ["embed.weight", "head.weight", "last.weight"])
def test_a_file_may_contain_one_name_of_a_tied_parameter(kept, tmp_path):
    """`safetensors.torch.save_model` and `save_pretrained` of transformers write such files."""
    model, trained = Tied(), Tied()
    path = tmp_path / "update.safetensors"
    save_file({kept: trained.embed.weight, "head.bias": trained.head.bias}, path)
    server, aggregator = Server.of(model, rules.FedAsync(1.0)), AsyncAggregator(rules.FedAsync(1.0), model.state_dict())
    assert server.receive_model(server.dispatch("a"), path, samples=1).accepted
    aggregator.checkout("a")
    aggregator.submit("a", path, samples=1)
    for found in (server.state_dict(), aggregator.model):
        assert all(torch.allclose(x, trained.state_dict()[name]) for name, x in found.items())
    save_file({"head.bias": trained.head.bias}, path)
    receipt = server.receive_model(server.dispatch("b"), path, samples=1)
    assert receipt.reason == "model: missing: embed.weight, head.weight, last.weight"


def test_error_about_a_mask_with_infinity_names_the_buffer_policy():
    state = {"w": torch.ones(2), "mask": torch.tensor([0.0, -torch.inf])}
    rule = rules.FedAsync(0.5)
    words = "mask: expected finite values, .*; for a mask, pass buffer_policy={'mask': 'leave'} to Server.of or "
    for call in (
        lambda: Server.of(state, rule),
        lambda: AsyncAggregator(rule, state),
        lambda: aggregate(rule, None, state, state, state),
    ):
        with pytest.raises(ArgumentError, match=words):
            call()
    with pytest.raises(ArgumentError, match="mask: .*; for a mask, remove 'mask' from all models$"):
        average([state, state])
    with pytest.raises(ArgumentError, match="mask: expected finite values, got NaN or infinity$"):
        Server.of(state | {"mask": torch.tensor([-torch.inf, torch.nan])}, rule)
    assert Server.of(state, rule, buffer_policy={"mask": "leave"}).state_dict()["mask"].tolist() == [0.0, -torch.inf]


class Rewrites(rules.FedOrtho):
    """A rule during whose step another process overwrites the file of the update."""

    path = None

    def plan(self, space, state, update):
        result = super().plan(space, state, update)
        data = bytearray(self.path.read_bytes())
        data[-4:] = b"\xff" * 4  # This is NaN in float32.
        with open(self.path, "r+b") as file:
            file.write(data)
        os.utime(self.path, ns=(5, 5))
        return result


def test_an_update_whose_file_changes_during_the_call_is_rejected(tmp_path):
    path = Rewrites.path = tmp_path / "update.safetensors"
    aggregator = AsyncAggregator(Rewrites(0.5), nn.Linear(3, 2).state_dict())
    before = bits(aggregator.model)
    state = moved(aggregator.checkout("ward-7"), 0)
    save_file(state, path)
    with pytest.raises(CheckpointError, match=r"^update: .*: expected an unchanged file during the call"):
        aggregator.submit("ward-7", path, samples=4)
    assert bits(aggregator.model) == before
    aggregator.submit("ward-7", state, samples=4)


def test_a_server_copies_the_buffers_of_a_file(tmp_path):
    server = Server.of(net(), rules.FedAsync(0.5))
    ticket = server.dispatch("ward-7")
    path = tmp_path / "update.safetensors"
    save_file(moved(ticket.state_dict(), 0), path)
    load = payload_loader(server._schema, server.rule, path, 4, None, server._state.value)
    payload = load(server._state.value.tickets[ticket.id])
    expected = {name: x.clone() for name, x in payload.buffers.items()}
    path.write_bytes(bytes(path.stat().st_size))
    assert bits(payload.buffers) == bits(expected)
