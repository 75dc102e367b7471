"""Tests of personal layers: the server never receives them, and its results equal training of the shared part alone."""

import pytest
import torch
from torch import nn

from manifoldagg import wire
from manifoldagg.errors import ArgumentError
from manifoldagg.federated import AsyncAggregator, Payload, Server, UpdateInfo, aggregate, train_client
from manifoldagg.federated.clients import Local, load_personal
from manifoldagg.federated.rules import CA2FL, AsyncCorrected, FedAsync, FedBuff, FedOrtho, Momentum
from manifoldagg.manifolds import ParameterSpace
from tests.support import draw

PERSONAL = ["head.*", "*bn*"]
RULES = [FedAsync(0.5), FedOrtho(0.7), FedBuff(2, 0.5), CA2FL(2, 0.5), Momentum(FedAsync(0.3)), AsyncCorrected()]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.bn = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.relu(self.bn(self.body(x))))


class Body(nn.Module):
    """Module with only the shared part."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)


def model_of(seed, kind=Net):
    torch.manual_seed(seed)
    return kind()


def shared_part(state):
    return {name: x for name, x in state.items() if name.startswith("body.")}


def moved(state, seed):
    """Return a state dict whose floating tensors moved, personal or not."""
    return {
        name: x + 0.1 * draw(seed + i, *x.shape, dtype=torch.float32) if x.is_floating_point() else x + 1
        for i, (name, x) in enumerate(state.items())
    }


def personal_values(state, size):
    """Return the state dict with huge personal tensors, which no result may depend on."""
    return {
        name: torch.full_like(x, size) if x.is_floating_point() and not name.startswith("body.") else x
        for name, x in state.items()
    }


def test_the_space_has_the_shared_part_only():
    model = model_of(0)
    space = ParameterSpace.of(model, personal=PERSONAL)
    assert (
        space
        == ParameterSpace.of(model_of(1, Body))
        == ParameterSpace.of_state_dict(model.state_dict(), personal=PERSONAL)
    )
    assert hash(space) == hash(ParameterSpace.of(model_of(1, Body)))
    assert space.spec() == ParameterSpace.of(model_of(1, Body)).spec()
    assert set(space.personal) == model.state_dict().keys() - {"body.weight", "body.bias"}
    assert space.shape == (16,)
    assert space.buffers(model) == {}
    assert torch.equal(space.point(model), space.point(shared_part(model.state_dict())))
    assert space.state_dict(space.point(model)).keys() == {"body.weight", "body.bias"}


def test_load_keeps_the_personal_part():
    model = model_of(0)
    space, before = (
        ParameterSpace.of(model, personal=PERSONAL),
        {name: x.clone() for name, x in model.state_dict().items()},
    )
    space.load(model, torch.arange(16.0))
    assert torch.equal(space.point(model), torch.arange(16.0))
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items() if not name.startswith("body."))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_aggregate_equals_aggregate_of_the_shared_part(rule):
    start = model_of(0).state_dict()
    space = ParameterSpace.of_state_dict(start, personal=PERSONAL)
    current, alone, state, other = start, shared_part(start), None, None
    for i in range(6):
        base, update = moved(start, i), moved(start, 10 + i)
        info = UpdateInfo(client=i % 2, staleness=1, weight=0.5)
        current, state, numbers = aggregate(
            rule, state, current, personal_values(base, 1e30), personal_values(update, -1e30), info=info, space=space
        )
        alone, other, expected = aggregate(rule, other, alone, shared_part(base), shared_part(update), info=info)
        assert current.keys() == alone.keys()
        assert all(torch.equal(x, alone[name]) for name, x in current.items())
        assert {k: repr(v) for k, v in numbers.items()} == {k: repr(v) for k, v in expected.items()}


def test_aggregate_writes_the_shared_part_of_out():
    start = model_of(0).state_dict()
    space, out = ParameterSpace.of_state_dict(start, personal=PERSONAL), moved(start, 5)
    before = {name: x.clone() for name, x in out.items()}
    expected, _, _ = aggregate(FedAsync(0.5), None, start, start, moved(start, 1), space=space)
    aggregate(FedAsync(0.5), None, start, start, moved(start, 1), space=space, out=out)
    for name, x in out.items():
        assert torch.equal(x, expected[name] if name in expected else before[name])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_server_equals_a_server_of_the_shared_part(rule, tmp_path):
    model, alone = model_of(0), model_of(1, Body)
    alone.load_state_dict(shared_part(model.state_dict()))
    server, other = Server.of(model, rule, personal=PERSONAL), Server.of(alone, rule)
    tickets = [(server.dispatch(i % 3), other.dispatch(i % 3)) for i in range(3)]
    for i in range(9):
        ticket, theirs = tickets.pop(0)
        assert wire.unpack(wire.pack(ticket)).message.nbytes == theirs.message.nbytes
        assert ticket.state_dict().keys() == {"body.weight", "body.bias"}
        update = moved({**model.state_dict(), **ticket.state_dict()}, i)
        receipt = server.receive_model(ticket, personal_values(update, float("nan")), samples=5)
        assert receipt.accepted, receipt.reason
        assert receipt.asdict() == other.receive_model(theirs, shared_part(update), samples=5).asdict()
        assert torch.equal(server.model, other.model)
        tickets.append((server.dispatch(i % 3), other.dispatch(i % 3)))
    assert server.memory == other.memory
    server.save(tmp_path / "server")
    space = ParameterSpace.of(model, personal=PERSONAL)
    resumed = Server.resume(tmp_path / "server", space, rule)
    assert torch.equal(resumed.model, other.model)
    ticket, theirs = resumed.tickets[0], other.tickets[0]
    update = moved({**model.state_dict(), **server.state_dict()}, 99)
    assert resumed.receive_model(ticket, update, samples=5).accepted
    other.receive_model(theirs, shared_part(update), samples=5)
    assert torch.equal(resumed.model, other.model)


def test_an_async_aggregator_equals_that_of_the_shared_part():
    start = model_of(0).state_dict()
    space = ParameterSpace.of_state_dict(start, personal=PERSONAL)
    one, other = AsyncAggregator(FedAsync(0.5), start, space=space), AsyncAggregator(FedAsync(0.5), shared_part(start))
    for i in range(4):
        mine, theirs = one.checkout("a"), other.checkout("a")
        assert mine.keys() == theirs.keys()
        update = moved({**start, **mine}, i)
        assert one.submit("a", update, samples=3) == other.submit("a", shared_part(update), samples=3)
    assert all(torch.equal(x, other.model[name]) for name, x in one.model.items())


class Recorded:
    """A trainer that records its start and moves every parameter and buffer by 1."""

    def __init__(self):
        self.starts = []

    def train(self, space, message, loss, batches, client_state, *, generator):
        self.starts.append(space.state_dict(message.start, message.buffers))
        count = 0 if client_state is None else client_state["count"]
        buffers = {name: message.buffers[name] + 1 for name in message.requested_buffers}
        return Payload((message.start + 1)[None], 10, buffers=buffers, client_state={"count": count + 1})


def test_a_client_trains_all_parameters_and_sends_the_shared_part():
    model, trainer = model_of(0), Recorded()
    server = Server.of(model_of(1), FedAsync(0.5), personal=PERSONAL)
    initial, client_state = {name: x.clone() for name, x in model.state_dict().items()}, None
    for task in range(3):
        ticket, sent = server.dispatch("a"), server.state_dict()
        payload = train_client(
            model,
            ticket.message,
            trainer,
            [],
            client_state=client_state,
            personal=PERSONAL,
            generator=torch.Generator(),
        )
        client_state = payload.client_state
        assert payload.points.shape == (1, 16)
        assert payload.buffers == {}
        started = trainer.starts[-1]
        for name, x in started.items():
            # The shared part is the server's. The personal part goes on from the last task of the client.
            expected = sent[name] if name in sent else initial[name] + task
            assert torch.equal(x, expected), name
        assert client_state["trainer"] == {"count": task + 1}
        assert server.receive(ticket, payload).accepted
    assert all(torch.equal(x, initial[name]) for name, x in model.state_dict().items())
    load_personal(model, client_state)
    for name, x in model.state_dict().items():
        assert torch.equal(x, initial[name] + (0 if name.startswith("body.") else 3)), name


def test_personal_training_is_the_training_of_the_whole_model():
    """With one client and a full step to its model, the shared and personal parts equal those of local training."""
    batches = [(torch.randn(8, 3, generator=torch.Generator().manual_seed(i)), torch.arange(8) % 2) for i in range(3)]
    model, trainer = model_of(0), Local(epochs=2, rate=0.1)
    whole, parts = Server.of(model, FedAsync(1.0)), Server.of(model, FedAsync(1.0), personal=PERSONAL)
    state = None
    for task in range(3):
        ticket, other = whole.dispatch("a"), parts.dispatch("a")
        generators = [torch.Generator().manual_seed(task) for _ in range(2)]
        assert whole.receive(
            ticket, train_client(model, ticket.message, trainer, batches, generator=generators[0])
        ).accepted
        payload = train_client(
            model, other.message, trainer, batches, client_state=state, personal=PERSONAL, generator=generators[1]
        )
        state = payload.client_state
        assert parts.receive(other, payload).accepted
    found = {**parts.state_dict(), **state["personal"]}
    assert found.keys() == whole.state_dict().keys()
    # FedAsync(1.0) computes base + (point - base), which rounds.
    assert all(torch.allclose(x, found[name], rtol=1e-5, atol=1e-6) for name, x in whole.state_dict().items())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(2, 2) for _ in range(3))
        self.b.weight = self.a.weight


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("personal", "words"),
    [
        ("head.*", "personal: expected a sequence of names or glob patterns, got 'head"),
        ({"head.*": 1}, "personal: expected a sequence"),
        ([1], "personal: expected a sequence"),
        (["tail.*"], "personal: 'tail.*' matches no entry"),
        (["*"], "personal: expected a shared parameter"),
    ],
)
def test_invalid_patterns_are_rejected(personal, words):
    model = model_of(0)
    for call in (
        lambda: ParameterSpace.of(model, personal=personal),
        lambda: ParameterSpace.of_state_dict(model.state_dict(), personal=personal),
        lambda: Server.of(model, FedAsync(0.5), personal=personal),
    ):
        with pytest.raises(ArgumentError, match=words.replace("*", r"\*")):
            call()


def test_tied_parameters_are_personal_together():
    model = Tied()
    with pytest.raises(ArgumentError, match="personal: expected all or no names of a tied parameter"):
        ParameterSpace.of(model, personal=["a.weight"])
    space = ParameterSpace.of(model, personal=["?.weight", "c.bias"])
    assert [leaf.name for leaf in space.layout.leaves] == ["a.bias", "b.bias"]
    assert space.layout.aliases == ()


def test_other_client_states_and_rules_with_tensors_are_rejected():
    model = model_of(0)
    message = Server.of(model, FedAsync(0.5), personal=PERSONAL).dispatch("a").message
    generator = torch.Generator()
    with pytest.raises(ArgumentError, match="client_state: expected the client state of a payload"):
        train_client(model, message, Recorded(), [], client_state={"count": 1}, personal=PERSONAL, generator=generator)
    with pytest.raises(ArgumentError, match="client_state: expected tensors of the module"):
        load_personal(nn.Linear(1, 1), {"personal": {"head.bias": torch.zeros(2)}, "trainer": None})
    assert load_personal(model, None) is model
