"""Tests of low-rank adapters: a server changes the adapters, and the frozen transformer stays bitwise equal."""

import copy

import pytest
import torch
from torch import nn

import manifoldagg
from manifoldagg.federated import InitialModel, Payload, Server, UpdateInfo, clients
from manifoldagg.federated.clients.asynccurve import AsyncCurve as CurveClient
from manifoldagg.federated.clients.floco import FLOCO as SimplexClient
from manifoldagg.federated.rules import (
    ASGD,
    DCASGD,
    AsyncBezier,
    FedAdam,
    FedAsync,
    FedAvg,
    FedBuff,
    FedOrtho,
    Momentum,
)
from manifoldagg.federated.rules.asynccurve import AsyncCurve
from manifoldagg.federated.rules.floco import FLOCO
from manifoldagg.manifolds import ParameterSpace

CLASSES = 20
DISTILBERT = {"width": 768, "inner": 3072, "layers": 6, "heads": 12, "rank": 8, "words": 64}
SMALL = {"width": 16, "inner": 32, "layers": 2, "heads": 2, "rank": 2, "words": 64}


class LowRank(nn.Module):
    """A frozen linear map plus the product of two thin matrices, the second of which is initially 0."""

    def __init__(self, frozen, rank, scale=2.0):
        super().__init__()
        self.frozen, self.scale = frozen, scale
        self.down = nn.Parameter(torch.randn(rank, frozen.in_features) / frozen.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, x):
        return self.frozen(x) + self.scale * nn.functional.linear(nn.functional.linear(x, self.down), self.up)


class Block(nn.Module):
    def __init__(self, width, inner, heads, rank):
        super().__init__()
        self.heads = heads
        self.q, self.v = LowRank(nn.Linear(width, width), rank), LowRank(nn.Linear(width, width), rank)
        self.k, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, inner), nn.Linear(inner, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x):
        split = (*x.shape[:2], self.heads, -1)
        q, k, v = (part(x).view(split).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.first(x + self.out(mixed))
        return self.second(x + self.narrow(nn.functional.gelu(self.wide(x))))


class Transformer(nn.Module):
    """A transformer that is frozen except for the adapters of queries and values and the two layers of the head."""

    def __init__(self, width, inner, layers, heads, rank, words):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, inner, heads, rank) for _ in range(layers))
        self.hidden, self.head = nn.Linear(width, width), nn.Linear(width, CLASSES)
        for name, parameter in self.named_parameters():
            top, last = name.partition(".")[0], name.rpartition(".")[2]
            parameter.requires_grad_(top in ("hidden", "head") or last in ("down", "up"))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.hidden(x[:, 0]).relu())


def made(sizes):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Transformer(**sizes)


def texts(seed, count, length=6, batch=8):
    """Return texts whose class is the first word modulo the number of classes. Each client has few classes."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(64, (count, length), generator=generator)
    tokens[:, 0] = tokens[:, 0] % 4 + 4 * (seed % 4)
    return [(part, part[:, 0] % CLASSES) for part in tokens.split(batch)]


def bits(state, names):
    return {name: state[name].contiguous().view(torch.uint8).clone() for name in names}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


RULES = {
    "ASGD": (ASGD(0.5), clients.Local(rate=1e-2)),
    "FedAsync": (FedAsync(0.5), clients.Proximal(rate=1e-2)),
    "FedOrtho": (FedOrtho(0.5), clients.Local(rate=1e-2)),
    "DCASGD": (DCASGD(0.5), clients.Local(rate=1e-2)),
    "FedBuff": (FedBuff(2), clients.Local(rate=1e-2)),
    "FedAvg": (FedAvg(2), clients.Local(rate=1e-2)),
    "FedAdam": (FedAdam(2), clients.Local(rate=1e-2)),
    "Momentum": (Momentum(ASGD(0.5), 0.5), clients.Local(rate=1e-2)),
    "AsyncBezier": (AsyncBezier(rate=0.5), clients.Curve(epochs=(1, 1), rate=1e-2)),
    "AsyncCurve": (AsyncCurve(3, 0.5, periodic=3), CurveClient(epochs=1, rate=1e-2)),
    "FLOCO": (FLOCO(2, 2, personalize_from=1), SimplexClient(epochs=1, rate=1e-1)),
}


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("name", RULES)
def test_server_changes_only_the_adapter(name):
    rule, trainer = RULES[name]
    model = made(SMALL)
    space = ParameterSpace.of(model)
    learns = {n for n, parameter in model.named_parameters() if parameter.requires_grad}
    assert {leaf.name for leaf in space.layout.leaves} == learns
    before = copy.deepcopy(model.state_dict())
    frozen = bits(before, before.keys() - learns)
    server = Server(space, rule, InitialModel(space.point(model), space.buffers(model), {"*": "leave"}))
    loss = space.loss(model, nn.functional.cross_entropy)
    tickets = {i: server.dispatch(i) for i in range(3)}
    for turn in range(7):
        i = turn % 3
        message = tickets[i].message
        assert message.start.shape == space.shape
        payload = trainer.train(space, message, loss, texts(i, 16), None, generator=torch.Generator().manual_seed(turn))
        assert payload.points.shape[1:] == space.shape
        assert server.receive(tickets[i].id, payload).accepted
        tickets[i] = server.dispatch(i)
    after = server.state_dict()
    assert same(frozen, bits(after, frozen))
    assert same(frozen, bits(model.state_dict(), frozen))
    moved = {n for n in learns if not torch.equal(after[n], before[n])}
    assert moved == learns
    # A client that holds the frozen part takes the rest.
    other = made(SMALL)
    space.load(other, server.model)
    assert same(bits(after, after), bits(other.state_dict(), after))


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("name", [name for name in RULES if name != "AsyncCurve"])
def test_aggregate_leaves_frozen_entries_bit_identical(name):
    """The state dicts contain all entries. Entries that no client changed stay bitwise equal."""
    rule, _ = RULES[name]
    model = made(SMALL)
    learns = {n for n, parameter in model.named_parameters() if parameter.requires_grad}
    start = copy.deepcopy(model.state_dict())
    frozen = bits(start, start.keys() - learns)
    current, state, generator = start, None, torch.Generator().manual_seed(1)
    several = {"AsyncBezier": 2, "FLOCO": 2}.get(name, 0)
    for i in range(4):
        base = start if i % 2 else current
        updates = [
            {n: t + 0.1 * torch.randn(t.shape, generator=generator) if n in learns else t for n, t in base.items()}
            for _ in range(max(several, 1))
        ]
        update = updates if several else updates[0]
        info = UpdateInfo(staleness=i % 2, weight=0.5)
        current, state, _ = manifoldagg.aggregate(rule, state, current, base, update, info=info)
    assert same(frozen, bits(current, frozen))
    assert all(not torch.equal(current[n], start[n]) for n in learns)


def test_aggregate_accepts_adapter_entries_alone():
    """The step on the trainable entries alone is bitwise equal, so frozen entries need not be sent."""
    model = made(SMALL)
    learns = [n for n, parameter in model.named_parameters() if parameter.requires_grad]
    whole = {n: t.clone() for n, t in model.state_dict().items()}
    current, update = ({n: whole[n] + d * (n in learns) for n in whole} for d in (0.25, 0.5))
    results = [
        manifoldagg.aggregate(FedAsync(0.3), None, *({n: s[n] for n in names} for s in (current, whole, update)))[0]
        for names in (whole, learns)
    ]
    assert same(bits(results[0], learns), bits(results[1], learns))


def test_frozen_part_in_narrow_dtype_is_unchanged():
    model = made(SMALL)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    space = ParameterSpace.of(model)
    assert space.dtype == torch.float32
    frozen = bits(model.state_dict(), space.buffers(model))
    server = Server(space, FedAvg(1), InitialModel(space.point(model), space.buffers(model), {"*": "leave"}))
    ticket = server.dispatch("a")
    assert server.receive(ticket.id, Payload((ticket.message.start + 1)[None], 1)).accepted
    after = server.state_dict()
    assert same(frozen, bits(after, frozen))
    assert {t.dtype for t in after.values()} == {torch.float32, torch.bfloat16}
    # The message and the versions have the size of the adapter.
    assert ticket.message.start.numel() == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.usefixtures("as_shipped")
def test_adapter_learns_from_several_clients():
    model = made(SMALL)
    space = ParameterSpace.of(model)
    loss = space.loss(model, nn.functional.cross_entropy)
    server, trainer = Server(space, FedAsync(0.6), space.point(model)), clients.Local(epochs=2, rate=1e-2)
    everything = [batch for i in range(4) for batch in texts(i, 24)]

    def mean():
        with torch.no_grad():
            return float(sum(loss(server.model, batch) for batch in everything)) / len(everything)

    before = mean()
    tickets = {i: server.dispatch(i) for i in range(4)}
    for turn in range(24):
        i = turn % 4
        payload = trainer.train(space, tickets[i].message, loss, texts(i, 24), None, generator=torch.Generator())
        assert server.receive(tickets[i].id, payload).accepted
        tickets[i] = server.dispatch(i)
    assert mean() < 0.7 * before


@pytest.mark.usefixtures("as_shipped")
def test_adapter_of_the_papers_size_is_supported():
    """OrthoFL trains 753,000 parameters of DistilBERT.

    These are adapters of rank 8 in queries and values of six layers, and the two layers of the head.
    """
    model = made(DISTILBERT)
    space = ParameterSpace.of(model)
    assert space.shape == (6 * 2 * 2 * 8 * 768 + 768 * 769 + 20 * 769,) == (753_428,)
    carried = {n: t for n, t in model.state_dict().items() if n not in {leaf.name for leaf in space.layout.leaves}}
    assert sum(t.numel() for n, t in carried.items() if n.startswith("blocks")) == 6 * 7_087_872
    sums = {n: t.view(torch.int32).sum() for n, t in carried.items()}
    loss = space.loss(model, nn.functional.cross_entropy)
    server, batches = Server(space, AsyncBezier(rate=0.5), space.point(model)), texts(0, 4, batch=4)
    trainer = clients.Curve(steps=(2, 1), rate=1e-3)
    tickets = [server.dispatch(i) for i in range(2)]
    for ticket in tickets:
        payload = trainer.train(
            space, ticket.message, loss, batches, None, generator=torch.Generator().manual_seed(ticket.version)
        )
        assert server.receive(ticket.id, payload).accepted
    with torch.no_grad():
        assert loss(server.model, batches[0]) < loss(tickets[0].message.start, batches[0])
    space.load(model, server.model)
    assert all(torch.equal(model.state_dict()[n].view(torch.int32).sum(), total) for n, total in sums.items())
