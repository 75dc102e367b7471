"""Tests of OrthoFL: bitwise equal protocols, the calibration of Lemma C.1, and clients that join and leave."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from manifoldagg.corrections import calibrate
from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Message, Payload, Server, Update
from manifoldagg.federated.clients.orthofl import Calibrated
from manifoldagg.federated.rules.fedasync import FedAsync
from manifoldagg.federated.rules.orthofl import OrthoFL, shift
from manifoldagg.federated.staleness import Polynomial
from manifoldagg.manifolds import Flat, ParameterSpace, Sphere
from tests.support import draw, relative, seeds

pytestmark = pytest.mark.usefixtures("as_shipped")

GOLDEN = {"OrthoFL": OrthoFL()}

CLIENTS = 5
NET = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
SPACE = ParameterSpace.of(NET)
SIZES = [leaf.size for leaf in SPACE.layout.leaves]
P = sum(SIZES)
START = draw(0, P, dtype=torch.float32)


@dataclass(frozen=True)
class Pull:
    """Trainer whose result depends on the client, the start and the time. It records its starts in `seen`."""

    client: int
    seen: list

    def train(self, space, message, loss, batches, client_state, *, generator):
        self.seen.append(message.start.clone())
        target = draw(100 + self.client, *message.start.shape, dtype=message.start.dtype)
        noise = torch.randn(message.start.shape, generator=generator).to(message.start)
        return Payload((message.start + 0.3 * (target - message.start) + 0.1 * noise)[None], samples=1)


def script(seed, answers, clients=CLIENTS):
    """Return a random sequence of dispatches, updates, lost updates and dropped tickets.

    It does not depend on the protocol.
    """
    rng, out, idle, taken = np.random.default_rng(seed), [], set(range(clients)), 0
    while taken < answers:
        kind = rng.choice(["send", "answer", "lose", "drop"], p=[0.5, 0.4, 0.05, 0.05])
        client = int(rng.integers(clients))
        if (kind == "send") != (client in idle):
            continue
        (idle.discard if kind == "send" else idle.add)(client)
        taken += kind == "answer"
        out.append((kind, client))
    return out


def play(rule, trainer_of, events, space=SPACE, start=START):
    """Return the starts of every client, the models of the server, and the server."""
    server = Server(space, rule, start, weights="uniform")
    starts, models, tickets, memories = {c: [] for c in range(CLIENTS)}, [], {}, {}
    for i, (kind, client) in enumerate(events):
        if kind == "send":
            tickets[client] = server.dispatch(client)
            continue
        ticket = tickets.pop(client)
        if kind == "drop":
            server.drop(ticket.id)
            continue
        generator = torch.Generator().manual_seed(i)
        trainer = trainer_of(Pull(client, starts[client]))
        payload = trainer.train(space, ticket.message, None, [], memories.get(client), generator=generator)
        memories[client] = payload.client_state
        if kind == "lose":
            server.drop(ticket.id)
        else:
            assert server.receive(ticket.id, payload).accepted
            models.append(server.model)
    return starts, models, server


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def segments(v):
    return v.split(SIZES)


def cut(v, along):
    """Return v without its component along `along`, in float64."""
    square = along @ along
    return v if square == 0 else v - (v @ along) / square * along


def by_layer(v, along):
    return torch.cat([cut(a, b) for a, b in zip(segments(v), segments(along), strict=True)])


@pytest.mark.parametrize(("seed", "granularity", "rounds"), [(0, "tensor", 200), (1, "model", 60)])
def test_the_protocols_give_bit_identical_starts_over_200_rounds(seed, granularity, rounds):
    """The run contains dispatches at any time, lost updates and dropped tickets."""
    events = script(seed, rounds)
    starts, models, _ = play(OrthoFL(granularity=granularity), lambda t: t, events)
    assert len(models) == rounds
    for protocol, trainer_of in (
        ("client", Calibrated),
        # The hybrid; clients of the server's protocol may have any trainer.
        (lambda client: "client" if client % 2 else "server", lambda t: t if t.client == 0 else Calibrated(t)),
    ):
        theirs, reached, _ = play(OrthoFL(granularity=granularity, protocol=protocol), trainer_of, events)
        assert same(models, reached)
        assert all(same(starts[c], theirs[c]) for c in starts)
    # They are not just the global model.
    assert not any(torch.equal(start, model) for start in starts[0][1:] for model in models)


@pytest.mark.parametrize(
    "options",
    [{}, {"granularity": "model"}, {"calibration": "none"}, {"calibration": "pairwise"}, {"moving_average": False}],
    ids=str,
)
def test_run_equals_transcription_of_the_paper(options):
    """Transcription of Algorithm 1 in float64. Every client starts its next task immediately."""
    start = START.double()
    rule = OrthoFL(0.6, staleness=Polynomial(0.5), **options)
    whole = options.get("granularity") == "model"
    server = Server(SPACE64, rule, start)
    w, own = start, dict.fromkeys(range(CLIENTS), (start, start, 1))
    tickets = {c: server.dispatch(c) for c in own}
    rng, latest, last = np.random.default_rng(3), {}, dict.fromkeys(own, 0)
    for t in range(1, 41):
        m = int(rng.integers(CLIENTS))
        home, begin, _ = own[m]
        assert relative(tickets[m].message.start, begin) <= 1e-12
        model = begin + 0.3 * (draw(100 + m, P) - begin) + 0.1 * draw(t, P)
        receipt = server.receive(tickets[m].id, Payload(model[None], 1))
        shift, moved = w - home, model - begin
        beta = 0.6 * (t - last[m]) ** -0.5
        new = (1 - beta) * w + beta * model
        if options.get("calibration") == "pairwise":
            others = [u for c, u in latest.items() if c != m]
            nearest = torch.zeros(P).double()
            if others:
                basis = torch.stack(others)
                cuts = [torch.linalg.lstsq(a.T, b).solution @ a for a, b in zip(basis.split(SIZES, 1), segments(moved), strict=True)]  # fmt: skip
                nearest = torch.cat(cuts)
            after = model + shift - nearest
        else:
            after = model + (cut(shift, moved) if whole else by_layer(shift, moved))
        latest[m] = moved
        if options.get("calibration") == "none":
            after = new
        new = new if options.get("moving_average", True) else after
        # Forty steps of a few roundings; the others' updates are far from dependent.
        assert relative(server.model, new) <= 1e-12
        assert receipt.norm == pytest.approx((new - w).norm().item(), rel=1e-9)
        w, own[m], last[m] = new, (new, after, t), t
        tickets[m] = server.dispatch(m)


SPACE64 = ParameterSpace.of(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double())


def test_without_calibration_orthofl_equals_fedasync():
    events = script(5, 60)
    plain = play(OrthoFL(0.6, calibration="none"), lambda t: t, events)
    theirs = play(FedAsync(0.6, staleness=Polynomial(0.5)), lambda t: t, events)
    assert same(plain[1], theirs[1])
    assert all(same(plain[0][c], theirs[0][c]) for c in plain[0])


@given(seeds, st.integers(2, 40), st.floats(-3, 3))
def test_added_shift_is_the_nearest_orthogonal_vector(seed, size, exponent):
    """Lemma C.1: among all w orthogonal to the client's own shift, the added vector is nearest in distance and angle."""
    model, start, home = draw(seed, 3, size)
    v, g = 10.0**exponent * draw(seed + 1, size), model - start
    taken = calibrate(model, shift(home + v, home), shift(model, start), space=Flat(size)) - model
    v = (home + v) - home
    # What is left along g is rounding of the points of size 4 √size.
    slack = 1e-14 * size * (1 + v.norm().item())
    assert abs(float(taken @ g / g.norm())) <= slack
    w = cut(draw(seed + 2, size), g)
    for other in (w, -w, taken + 1e-3 * w, 2 * taken, torch.zeros(size).double()):
        assert (v - taken).norm() <= (v - other).norm() + slack
        # Pythagoras: how much farther any other is.
        assert float((v - other).square().sum()) == pytest.approx(
            float((v - taken).square().sum() + (taken - other).square().sum()), rel=1e-9, abs=1e2 * slack
        )
        assert cosine(v, other) <= cosine(v, taken) + 10 * slack / v.norm().item()


def cosine(a, b):
    return 0.0 if not a.norm() * b.norm() else float(a @ b / (a.norm() * b.norm()))


@given(seeds, st.integers(1, 4))
def test_pairwise_form_projects_onto_the_complement_of_other_updates(seed, k):
    """Lemma C.1 for several updates: v⊥ is nearest to v among all vectors orthogonal to every other update."""
    model, start, home, current = draw(seed, 4, 9)
    others = list(draw(seed + 1, k, 9))
    moved = calibrate(model, shift(current, home), shift(model, start), other_updates=others, space=Flat(9))
    left = moved - start - (current - home)
    basis = torch.stack(others)
    assert relative(left, model - start - torch.linalg.lstsq(basis.T, model - start).solution @ basis) <= 1e-9


def answer(server, ticket, value):
    return server.receive(ticket.id, Payload(torch.as_tensor([value], dtype=torch.float64), 1))


def flat(rule):
    return Server(Flat(2), rule, torch.zeros(2, dtype=torch.float64))


def test_shift_with_zero_sum_is_not_ignored():
    server = flat(OrthoFL(1.0, staleness=Polynomial(0.0)))
    a, b = server.dispatch("a"), server.dispatch("b")
    answer(server, b, [1.0, -1.0])
    answer(server, a, [2.0, 0.0])
    assert server.dispatch("a").message.start.tolist() == [2.0, -1.0]


def test_client_without_progress_receives_the_whole_shift():
    server = flat(OrthoFL(0.5))
    a, b = server.dispatch("a"), server.dispatch("b")
    answer(server, b, [2.0, 4.0])
    answer(server, a, [0.0, 0.0])
    assert server.dispatch("a").message.start.tolist() == [1.0, 2.0]


def test_first_update_is_averaged_like_later_updates():
    server = flat(OrthoFL(0.5))
    assert answer(server, server.dispatch("a"), [2.0, 4.0]).step == 0.5
    assert server.model.tolist() == [1.0, 2.0]


def test_client_that_joins_late_starts_from_the_global_model():
    server = flat(OrthoFL(0.5))
    answer(server, server.dispatch("a"), [2.0, 4.0])
    assert server.dispatch("late").message.start.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("protocol", ["server", "client"])
def test_next_shift_of_absent_client_includes_progress_of_others(protocol):
    server, seen, memory = flat(OrthoFL(1.0, staleness=Polynomial(0.0), protocol=protocol)), [], None

    def works(ticket, reached):
        nonlocal memory

        class Answers:
            def train(self, space, message, *rest, generator):
                seen.append(message.start.tolist())
                return Payload(torch.tensor([reached], dtype=torch.float64), 1)

        payload = Calibrated(Answers()).train(
            server.space, ticket.message, None, [], memory, generator=torch.Generator()
        )
        memory = payload.client_state
        assert server.receive(ticket.id, payload).accepted

    works(server.dispatch("a"), [1.0, 0.0])
    answer(server, server.dispatch("b"), [1.0, 5.0])
    works(server.dispatch("a"), [3.0, 0.0])
    works(server.dispatch("a"), [9.0, 9.0])
    # (1, 5) - (1, 0) is orthogonal to (3, 0) - (1, 0).
    assert seen == [[0.0, 0.0], [1.0, 0.0], [3.0, 5.0]]


@pytest.mark.parametrize("calibration", ["orthogonal", "pairwise"])
def test_old_ticket_changes_only_the_global_model(calibration):
    server = flat(OrthoFL(0.5, calibration=calibration))
    old, new = server.dispatch("a"), server.dispatch("a")
    answer(server, new, [2.0, 0.0])
    start, before = server.dispatch("a").message.start, server.model
    receipt = answer(server, old, [0.0, 8.0])
    assert (receipt.staleness, server.history[-1]["calibrated"]) == (1, 0.0)
    share = 0.5 * 2**-0.5
    assert relative(server.model, (1 - share) * before + share * torch.tensor([0.0, 8.0]).double()) <= 1e-15
    assert torch.equal(server.dispatch("a").message.start, start)


def test_client_without_client_state_starts_from_the_global_model():
    server, trainer = flat(OrthoFL(0.5, protocol="client")), Calibrated(Pull(0, seen := []))
    for _ in range(3):
        before = server.model
        ticket = server.dispatch("a")
        payload = trainer.train(server.space, ticket.message, None, [], None, generator=torch.Generator())
        assert server.receive(ticket.id, payload).accepted
    # From the global model before its last answer, which is what it is sent.
    assert torch.equal(seen[2], ticket.message.start)
    assert not torch.equal(seen[2], before)
    assert ticket.message.numbers["num_updates"] == 2


def test_server_stores_two_models_per_client_or_one():
    for protocol, models in (("server", 2), ("client", 1)):
        server = flat(OrthoFL(protocol=protocol))
        for client in range(3):
            answer(server, server.dispatch(client), [1.0, 2.0])
        assert server.memory["clients"] == 3 * models * 16


def test_step_does_not_modify_its_inputs():
    rule = OrthoFL(0.5, moving_average=False)
    base, current, model = draw(1, 3, 4)
    kept, out = [t.clone() for t in (base, current, model)], torch.empty(4).double()
    state = rule.init(Flat(4), base)
    state, outcome = rule.step(Flat(4), state, Update("a", base, current, model[None], staleness=0), out=out)
    assert outcome.model is out
    assert all(torch.equal(a, b) for a, b in zip((base, current, model), kept, strict=True))
    out.zero_()
    assert outcome.client_state["start"].any()
    assert outcome.client_state["global"].any()


def test_only_trainable_parameters_are_calibrated():
    """The model is an adapter on a frozen layer.

    Points have the size of the adapter, and the frozen layer does not change.
    """
    net = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 2, bias=False), nn.Linear(2, 5, bias=False))
    net[0].requires_grad_(False)
    space = ParameterSpace.of(net)
    server = Server(space, OrthoFL(0.5), space.point(net))
    a, b = server.dispatch("a"), server.dispatch("b")
    assert a.message.start.shape == (20,)
    for ticket, seed in ((b, 1), (a, 2)):
        given_ = Payload(draw(seed, 1, 20, dtype=torch.float32), 1)
        assert server.receive(ticket.id, given_).accepted
    start = server.dispatch("a").message.start
    own, shift = draw(2, 20, dtype=torch.float32) - a.message.start, 0.5 * (draw(1, 20).float() - a.message.start)
    for part in (slice(0, 10), slice(10, 20)):
        left = (start - draw(2, 20).float())[part].double()
        # Roundings of numbers of size 3 in single precision.
        assert relative(left, cut(shift[part].double(), own[part].double())) <= 1e-5


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"rate": 0.0}, "rate"),
        ({"staleness": 0.5}, "staleness"),
        ({"protocol": "peer"}, "protocol"),
        ({"calibration": "some"}, "calibration"),
        ({"granularity": "layer"}, "granularity"),
        ({"weighted": "no"}, "weighted"),
        ({"moving_average": 1}, "moving_average"),
        ({"protocol": "client", "calibration": "pairwise"}, "protocol"),
        ({"protocol": "client", "moving_average": False}, "protocol"),
        ({"calibration": "none", "moving_average": False}, "moving_average"),
    ],
    ids=str,
)
def test_invalid_options_are_rejected_by_name(options, name):
    with pytest.raises(ArgumentError, match=f"^{name}: "):
        OrthoFL(**options)


@pytest.mark.parametrize(
    "spoilt",
    [None, {}, {"num_updates": "one"}, {"start": torch.ones(3)}, {"model": torch.full((2,), torch.nan)}, 3],
    ids=str,
)
def test_invalid_client_state_is_ignored(spoilt):
    """The client starts from the model in the message."""

    @dataclass(frozen=True)
    class Still:
        def train(self, space, message, loss, batches, client_state, *, generator):
            assert client_state is None
            return Payload(message.start[None], 1)

    kept = {name: torch.zeros(2) for name in ("start", "global", "model")} | {"num_updates": 0, "trainer": "kept"}
    memory = kept | spoilt if isinstance(spoilt, dict) and spoilt else spoilt
    message = Message(torch.ones(2), numbers={"num_updates": 1.0, "rate": 0.5, "by_tensor": 1.0})
    payload = Calibrated(Still()).train(Flat(2), message, None, [], memory, generator=torch.Generator())
    assert payload.points.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("trainer", ["x", None, Calibrated], ids=str)
def test_calibrated_rejects_objects_that_are_not_trainers(trainer):
    with pytest.raises(ArgumentError, match="^trainer: "):
        Calibrated(trainer)


def test_curved_space_and_curve_are_rejected():
    with pytest.raises(ArgumentError, match=r"^space: "):
        Server(Sphere(3), OrthoFL(), torch.eye(3)[0])
    server = flat(OrthoFL())
    receipt = server.receive(server.dispatch("a").id, Payload(torch.zeros(2, 2).double(), 1))
    assert (receipt.accepted, receipt.reason[:7]) == (False, "points:")
    far = server.receive(server.dispatch("a").id, Payload(torch.full((1, 2), 1e200, dtype=torch.float64), 1))
    assert not far.accepted
    assert server.dispatch("a").message.start.tolist() == [0.0, 0.0]
    assert isinstance(server.dispatch("a").message, Message)
