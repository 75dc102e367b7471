"""Tests of FLOCO: the centroid of averaged vertices, the regions of clients, and the learned simplex."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import manifoldagg
from manifoldagg.curves import Simplex
from manifoldagg.errors import ArgumentError
from manifoldagg.federated import MemoryPolicy, Message, Payload, Rule, Server, Trainer, Update, UpdateInfo
from manifoldagg.federated.clients import floco as client
from manifoldagg.federated.rules import FedAvg
from manifoldagg.federated.rules.floco import FLOCO, min_energy_scale, principal_axes, project_to_simplex
from manifoldagg.manifolds import Flat, Sphere
from tests.support import draw, relative, seeds

GOLDEN = {"FLOCO": FLOCO(2, 2)}

P = 8
SPACE = Flat(P)


def play(rule, updates, start):
    state, memories = rule.init(SPACE, start), {}
    for given_ in updates:
        state, outcome = rule.step(SPACE, state, given_)
        memories[given_.client] = outcome.client_state
    return state, outcome, memories


@settings(max_examples=15)
@given(seeds, st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_the_model_is_the_centroid_of_the_averaged_vertices(seed, k, n, weighted):
    start = draw(seed, P)
    weights = (0.1 + torch.rand(k, generator=torch.Generator().manual_seed(seed))).tolist()
    updates = [Update(i, start, start, draw(seed + i + 1, n, P), weight=w) for i, w in enumerate(weights)]
    rule = FLOCO(k, n, weighted=weighted, initial_std=0.3)
    state, outcome, _ = play(rule, updates, start)
    shares = torch.tensor(weights if weighted else [1.0] * k).double()
    mean = torch.einsum("k,knp->np", shares / shares.sum(), torch.stack([u.points for u in updates]))
    # Some roundings of numbers of size 1 for each client.
    assert relative(state["vertices"], mean) <= 1e-14
    assert relative(outcome.model, mean.mean(0)) <= 1e-14
    assert outcome.numbers["norm"] == pytest.approx(float((mean.mean(0) - start).norm()), rel=1e-9)
    assert outcome.numbers["buffered"] == 0


@settings(max_examples=5)
@given(seeds, st.integers(1, 4))
def test_floco_equals_fedavg_of_the_centroids(seed, n):
    """Two servers receive the updates of the same random run, including old tickets."""
    start, generator = draw(seed, P), torch.Generator().manual_seed(seed)
    ours, theirs = (Server(SPACE, rule, start, weights="uniform") for rule in (FLOCO(2, n, initial_std=0.1), FedAvg(2)))
    open_ = {}
    for i in range(14):
        who = int(torch.randint(5, (), generator=generator))
        if who not in open_:
            open_[who] = [s.dispatch(who).id for s in (ours, theirs)]
            continue
        points = draw(seed + i, n, P)
        mine, other = open_.pop(who)
        first = ours.receive(mine, Payload(points, 1))
        second = theirs.receive(other, Payload(points.mean(0, keepdim=True), 1))
        assert (first.accepted, first.buffered, first.staleness) == (True, second.buffered, second.staleness)
        assert relative(ours.model, theirs.model) <= 1e-13


def test_floco_with_one_vertex_equals_fedavg():
    start, state, other = [draw(0, 3), draw(1, 2, 2)], None, None
    ours = theirs = start
    for i in range(4):
        update = [draw(i, 3), draw(i + 9, 2, 2)]
        ours, state, _ = manifoldagg.aggregate(
            FLOCO(2, 1), state, ours, start, [update], info=UpdateInfo(weight=0.3 + i / 5)
        )
        theirs, other, _ = manifoldagg.aggregate(
            FedAvg(2), other, theirs, start, update, info=UpdateInfo(weight=0.3 + i / 5)
        )
        assert all(relative(a, b) <= 1e-14 for a, b in zip(ours, theirs, strict=True))


def test_initial_vertices_are_around_the_start():
    start = draw(0, P)
    spread = FLOCO(1, 4, initial_std=0.5, seed=3).init(SPACE, start)["vertices"]
    assert relative(spread.mean(0), start) <= 1e-15
    assert 0.2 < float((spread - start).std()) < 0.8
    assert torch.equal(spread, FLOCO(1, 4, initial_std=0.5, seed=3).init(SPACE, start)["vertices"])
    assert not torch.equal(spread, FLOCO(1, 4, initial_std=0.5, seed=4).init(SPACE, start)["vertices"])
    assert torch.equal(FLOCO(1, 4).init(SPACE, start)["vertices"], start.expand(4, P))


@given(seeds, st.integers(1, 7), st.floats(-2, 2))
def test_projection_is_the_nearest_point_of_the_simplex(seed, n, exponent):
    x = 10.0**exponent * draw(seed, 5, n)
    y = project_to_simplex(x, 0.7)
    assert (y >= 0).all()
    # Entries of size 1 from differences of numbers of size |x| / z, which also bound the terms below.
    slack = 1e-14 * (1 + float(x.abs().max()) / 0.7)
    assert (y.sum(-1) - 1).abs().max() <= 10 * slack
    # The gap makes no acute angle with a way to a vertex.
    gaps = torch.einsum("bn,bvn->bv", x / 0.7 - y, torch.eye(n).double() - y.unsqueeze(1))
    assert gaps.max() <= 100 * slack


@settings(max_examples=10)
@given(seeds, st.integers(2, 6), st.integers(1, 4))
def test_axes_and_coordinates_equal_singular_value_decomposition(seed, m, n):
    signals = draw(seed, m, 20)
    signals = signals - signals.mean(0)
    axes, places = principal_axes([*signals], n)
    vt = np.linalg.svd(signals.numpy(), full_matrices=False).Vh
    rank = min(n, m - 1)
    # Gram matrices square the condition: half the digits of small values; these are of one size.
    assert np.abs(np.abs(axes[:rank].numpy()) - np.abs(vt[:rank])).max() <= 1e-7
    assert relative(signals @ axes.T, places) <= 1e-7
    assert not axes[rank:].any()
    assert relative(principal_axes([*(-signals)], n)[0], -axes) <= 1e-12


def test_scale_maximises_the_spread_of_the_clients():
    places = draw(3, 6, 3)
    z = min_energy_scale(places)

    def energy(scale):
        return float(torch.pdist(project_to_simplex(places, scale)).clamp(min=1e-4).pow(-2).sum())

    reach = float(places.norm(dim=1).max())
    assert energy(z) == min(energy(reach * k / 1000) for k in range(1, 1001))
    assert min_energy_scale(10 * places) == pytest.approx(10 * z)
    assert min_energy_scale(torch.zeros(4, 3).double()) == 1


def grouped(i, model):
    """Return the vertices of client i.

    Clients 0, 1, 2 move in three directions, and clients 3, 4, 5 move in the same three.
    """
    return (model + torch.eye(P).double()[i % 3] + 0.01 * draw(i, P)).expand(3, P)


def test_clients_with_similar_updates_get_similar_regions():
    server = Server(SPACE, FLOCO(6, 3, personalize_from=1, radius=0.4), torch.zeros(P).double(), weights="uniform")
    late = None
    for version in range(4):
        tickets = {i: server.dispatch(i) for i in range(6)}
        if version == 1:
            late = server.dispatch("late")
        for i, ticket in tickets.items():
            assert ("centre" in ticket.message.tensors) == (version == 3)
            assert relative(ticket.message.tensors["vertices"].mean(0), ticket.message.start) <= 1e-14
            assert server.receive(ticket.id, Payload(grouped(i, ticket.message.start), 1)).accepted
    centres = torch.stack([server.dispatch(i).message.tensors["centre"] for i in range(6)])
    kept = torch.stack([t.message.tensors["centre"] for t in tickets.values()])
    assert torch.equal(centres, kept)
    assert torch.allclose(centres.sum(1), torch.ones(6).double())
    assert (centres >= 0).all()
    # Those that pull together are together, the groups apart.
    gaps = torch.cdist(centres, centres)
    together = torch.arange(6).unsqueeze(0) % 3 == torch.arange(6).unsqueeze(1) % 3
    assert gaps[together].max() < 0.1
    assert gaps[~together].min() > 0.5
    # A late joiner has the whole simplex, until it answers; then its own place, from its old ticket too.
    assert "centre" not in server.dispatch("later").message.tensors
    assert server.receive(late.id, Payload(grouped(1, late.message.start), 1)).staleness == 3
    placed = server.dispatch("late").message
    assert (placed.tensors["centre"] - centres[1]).norm() < 0.1
    assert placed.numbers == {"radius": 0.4}


def test_cohort_waits_for_another_client_after_a_failure():
    server = Server(SPACE, FLOCO(2, 2), torch.zeros(P))
    lost, a, b = (server.dispatch(name) for name in ("lost", "a", "b"))
    server.drop(lost.id)
    assert server.receive(a.id, Payload(torch.ones(2, P), 1)).buffered
    receipt = server.receive(b.id, Payload(3 * torch.ones(2, P), 1))
    assert (receipt.buffered, receipt.version, server.model.tolist()) == (False, 1, [2.0] * P)


def test_step_does_not_modify_its_inputs():
    rule, start = FLOCO(3, 2, personalize_from=0), draw(0, P)
    state = rule.init(SPACE, start)
    for i in range(7):
        given_ = Update(i % 2, start, start, draw(i, 2, P), client_state={"kept": 1.0})
        kept, points, base = copy.deepcopy(state), given_.points.clone(), start.clone()
        after, outcome = rule.step(SPACE, state, given_, out=torch.empty(P, dtype=torch.float64))
        assert str(kept) == str(state)
        assert torch.equal(points, given_.points)
        assert torch.equal(base, start)
        assert outcome.client_state["kept"] == 1
        state = after
    assert isinstance(rule, Rule)


@given(seeds, st.floats(0.01, 1.0))
def test_a_region_is_a_small_copy_of_the_simplex(seed, share):
    centre = project_to_simplex(draw(seed, 4))
    drawn = client.Region(SPACE, 4, centre=tuple(centre.tolist()), share=share)
    x = drawn.sample(400, generator=torch.Generator().manual_seed(seed))
    assert (x >= 0).all()
    assert (x.sum(1) - 1).abs().max() <= 1e-14
    assert ((x - centre).abs().sum(1) <= 2 * share + 1e-14).all()
    # Dirichlet(1) of 4: mean 1/4, variance 3/80; five deviations of a mean of 400.
    mean = (1 - share) * centre + share / 4
    assert (x.mean(0) - mean).abs().max() <= 5 * share * (3 / 80 / 400) ** 0.5


PAIRS = [(draw(i, 5, P), draw(i + 50, 5)) for i in range(3)]


def loss(theta, batch):
    inputs, targets = batch
    return (inputs @ theta - targets).square().mean()


@pytest.mark.parametrize("centre", [None, (0.2, 0.5, 0.3)])
def test_trainer_equals_plain_training_loop(centre):
    base, vertices = draw(1, P), draw(2, 3, P)
    tensors = {"vertices": vertices} | ({"centre": torch.tensor(centre, dtype=torch.float64)} if centre else {})
    message = Message(base, tensors, {"radius": 0.4})
    trainer = client.FLOCO(epochs=3, rate=0.05, proximal=0.2)
    payload = trainer.train(SPACE, message, loss, PAIRS, None, generator=torch.Generator().manual_seed(5))
    phi, generator = vertices.clone(), torch.Generator().manual_seed(5)
    for batch in [*PAIRS, *PAIRS, *PAIRS]:
        y = torch.empty(3, dtype=torch.float64).exponential_(generator=generator)
        x = y / y.sum()
        x = 0.8 * tensors["centre"] + 0.2 * x if centre else x
        theta = (x @ phi).requires_grad_()
        (g,) = torch.autograd.grad(loss(theta, batch), theta)
        phi = phi - 0.05 * torch.outer(x, g + 0.2 * (theta.detach() - base))
    assert relative(payload.points, phi) <= 1e-13
    assert payload.samples == 15
    assert torch.equal(vertices, draw(2, 3, P))
    assert isinstance(trainer, Trainer)


@pytest.mark.usefixtures("as_shipped")
def test_rule_and_trainer_learn_a_simplex_of_low_loss():
    truth, rule = draw(20, P), FLOCO(3, 3, initial_std=0.5, personalize_from=6, radius=0.5)
    server, losses = Server(SPACE, rule, torch.zeros(P, dtype=torch.float64)), []
    data = [[(x, x @ truth) for x in draw(30 + i, 12, P).split(4)] for i in range(3)]
    for turn in range(20):
        tickets = {i: server.dispatch(i) for i in range(3)}
        for i, ticket in tickets.items():
            generator = torch.Generator().manual_seed(10 * turn + i)
            trainer = client.FLOCO(epochs=3, rate=0.1)
            payload = trainer.train(SPACE, ticket.message, loss, data[i], None, generator=generator)
            assert server.receive(ticket.id, payload).accepted
        losses.append(float(sum(loss(server.model, batch) for part in data for batch in part)))
    message = server.dispatch(0).message
    vertices = message.tensors["vertices"]
    corners = [float(sum(loss(v, batch) for part in data for batch in part)) for v in vertices]
    assert losses[-1] < 0.05 * losses[0]
    assert max(corners) < 0.3 * losses[0]
    own = Simplex(SPACE, 3)(vertices, message.tensors["centre"])
    assert sum(float(loss(own, batch)) for batch in data[0]) < 0.05 * losses[0]


def test_entries_of_any_size_are_projected_on_the_simplex():
    for far in (1e10, 4e15, 1e16, 1e300):
        y = project_to_simplex(torch.tensor([far, far - 2.0 * (far < 1e16), -far], dtype=torch.float64))
        # Halves at most where the entries are the same number.
        assert y.tolist() == ([1.0, 0.0, 0.0] if far < 1e16 else [0.5, 0.5, 0.0])
    assert project_to_simplex(torch.tensor([1e300, 0.0], dtype=torch.float64), 1e-300).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("late", [0, 2])
def test_unchanged_vertices_with_rounded_bases_do_not_move_the_model(late):
    start = torch.full((P,), 1.003) + 0.1 * draw(0, P, dtype=torch.float32)
    server = Server(SPACE, FLOCO(2, 3, initial_std=0.1), start, memory=MemoryPolicy(base_dtype=torch.bfloat16))
    away = [server.dispatch(i) for i in range(2 * late)]
    for i in range(100):
        away.append(server.dispatch(i % 5))
        ticket = away.pop(0)
        message = ticket.message
        # A rounding of the vertices; the base is off by 4e-3.
        assert relative(message.tensors["vertices"].mean(0), message.start) <= 1e-6
        receipt = server.receive(ticket.id, Payload(message.tensors["vertices"], 1))
        assert (receipt.accepted, receipt.staleness <= late) == (True, True)
    assert relative(server.model, start) <= 1e-6


def test_update_with_overflowing_length_is_rejected():
    server = Server(SPACE, FLOCO(2, 2, personalize_from=0), torch.zeros(P).double())
    for k, size in enumerate((1.0, 1e200, -1.0, 2.0, 3.0)):
        receipt = server.receive(server.dispatch(k).id, Payload(torch.full((2, P), size, dtype=torch.float64), 1))
        assert receipt.reason.startswith("points[0]: squared distance") == (k == 1)
        assert receipt.accepted == (k != 1)
    assert server.dispatch(4).message.tensors["centre"].sum().item() == pytest.approx(1)


@pytest.mark.usefixtures("as_shipped")
def test_invalid_options_and_inputs_are_rejected():
    for options, name in (
        ({"cohort": 0}, "cohort"),
        ({"cohort": 1, "vertices": 0}, "vertices"),
        ({"cohort": 1, "radius": 0}, "radius"),
        ({"cohort": 1, "radius": 2.5}, "radius"),
        ({"cohort": 1, "personalize_from": -1}, "personalize_from"),
        ({"cohort": 1, "initial_std": -1}, "initial_std"),
        ({"cohort": 1, "seed": -1}, "seed"),
        ({"cohort": 1, "seed": 2**64}, "seed"),
        ({"cohort": 1, "weighted": "no"}, "weighted"),
    ):
        with pytest.raises(ArgumentError, match=f"^{name}: expected"):
            FLOCO(**options)
    with pytest.raises(ArgumentError, match="^initial_std: "):
        FLOCO(1, initial_std=1e300, seed=2**64 - 1).init(SPACE, torch.zeros(P))
    with pytest.raises(
        ArgumentError,
        match="space: expected flat leaves for the simplices of models of FLOCO, got curved leaves: Sphere",
    ):
        FLOCO(1).init(Sphere(3), torch.eye(3)[0])
    server = Server(SPACE, FLOCO(2, 3), torch.zeros(P))
    ticket = server.dispatch("a")
    receipt = server.receive(ticket.id, Payload(torch.ones(2, P), 1))
    assert receipt.reason == "points: expected 3 vertices, (3, P), for FLOCO, got 2"
    assert server.receive(ticket.id, Payload(torch.full((3, P), 3e38), 1)).accepted
    ticket = server.dispatch("b")
    assert server.receive(ticket.id, Payload(torch.full((3, P), 3e38), 1)).reason.startswith("points: sum over")
    assert server.receive(ticket.id, Payload(-torch.full((3, P), 3e38), 1)).accepted
    with pytest.raises(ArgumentError, match="message: expected vertices"):
        client.FLOCO().train(SPACE, Message(draw(0, P)), loss, PAIRS, None, generator=torch.Generator())
