"""Tests of AdaMasFL: its rates depend only on S, K and T, and its trajectories do not depend on the scale of the loss."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError, DivergenceError
from manifoldagg.federated import Message, Payload, Server
from manifoldagg.federated.clients.masfl import Normalised
from manifoldagg.federated.rules.adamasfl import AdaMasFL
from manifoldagg.manifolds import Flat, Sphere
from tests.federated.rules.test_masfl import PROBLEMS, Batches
from tests.support import draw, relative, seeds

pytestmark = pytest.mark.usefixtures("as_shipped")

GOLDEN = {"AdaMasFL": AdaMasFL(2)}

D, CLIENTS = 4, 6
SPACE = Flat(D)


def train_and_send(server, ticket, client, kappa=1.0, dtype=torch.float64):
    h, a = (x.to(dtype) for x in PROBLEMS[client])
    batches = Batches([None])
    payload = Normalised().train(
        SPACE, ticket.message, lambda x, _: kappa * (0.5 * (x - a) @ h @ (x - a)), batches, None,
        generator=torch.Generator(),
    )  # fmt: skip
    receipt = server.receive(ticket.id, payload)
    assert receipt.accepted, receipt.reason
    return payload


def trajectory(rule, kappa, seed, rounds, dtype=torch.float64):
    """Return all models of a run whose clients return updates in random order, often late, and sometimes not at all."""
    server, rng = Server(SPACE, rule, 5 * draw(seed, D, dtype=dtype)), np.random.default_rng(seed)
    tickets, models = {c: server.dispatch(c) for c in range(CLIENTS)}, [server.model]
    while server.version < rounds:
        client = int(rng.integers(CLIENTS))
        if rng.random() < 0.05:
            server.drop(tickets[client].id)
        else:
            train_and_send(server, tickets[client], client, kappa, dtype)
        tickets[client] = server.dispatch(client)
        if server.version == len(models):
            models.append(server.model)
    return torch.stack(models)


@settings(max_examples=6)
@given(
    seeds,
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([16, 40]),
    st.sampled_from([{}, {"eta": 0.05}, {"beta": 0.7}, {"gamma": 0.2}, {"eta": 0.01, "beta": 1.0, "gamma": 0.3}]),
)
def test_run_equals_transcription_of_the_paper(seed, size, steps, horizon, chosen):
    """The transcription computes Algorithms 3 and 4 in float64, with the paper's rates or with others."""
    eta = chosen.get("eta", 1 / (steps * horizon**0.5))
    beta = chosen.get("beta", (size * steps / horizon) ** 0.5)
    gamma = chosen.get("gamma", (size * steps) ** 0.25 / horizon**0.75)
    rule = AdaMasFL(size, steps=steps, server_steps=horizon, clients=CLIENTS, **chosen)
    assert (rule.local_rate, rule.momentum, rule.rate) == pytest.approx((eta, beta, gamma), rel=1e-14)
    theta = draw(seed, D)
    server = Server(SPACE, rule, theta)
    for client in range(CLIENTS):
        train_and_send(server, server.dispatch(client), client)
    c_i = [h @ (theta - a) for h, a in PROBLEMS[:CLIENTS]]
    c = g = sum(c_i) / CLIENTS
    rng = np.random.default_rng(seed)
    for _ in range(5):
        chosen, moved, change = rng.choice(CLIENTS, size, replace=False).tolist(), 0, 0
        for i in chosen:
            h, a = PROBLEMS[i]
            x, mean = theta, 0
            for _ in range(steps):
                gradient = h @ (x - a)
                step = beta * (gradient - c_i[i] + c) + (1 - beta) * g
                x, mean = x - eta * step / step.norm(), mean + gradient / steps
            moved, change = moved + (theta - x) / (eta * steps), change + mean - c_i[i]
            c_i[i] = mean
            train_and_send(server, server.dispatch(i), i)
        theta = theta - gamma * moved / size
        g, c = beta * (change / size + c) + (1 - beta) * g, c + change / CLIENTS
        # Normalising divides roundings of numbers of size 20 by directions that are seldom below 0.1.
        assert relative(server.model, theta) <= 1e-11
        assert relative(server._state.value.model_state.state["g"], g) <= 1e-10
        assert relative(server._state.value.model_state.state["c"], c) <= 1e-10


@pytest.mark.parametrize(
    ("initial", "dtype"), [("gradient", torch.float32), ("gradient", torch.float64), ("zero", torch.float64)]
)
def test_the_scale_of_the_losses_changes_nothing(initial, dtype):
    rule = AdaMasFL(2, steps=2, server_steps=24, initial=initial)
    plain = trajectory(rule, 1.0, 3, 24, dtype)
    # A power of two scales every number exactly.
    for exponent in (60,) if dtype == torch.float32 else (900,):
        assert torch.equal(trajectory(rule, 2.0**exponent, 3, 24, dtype), plain)
    if dtype == torch.float64:
        for kappa in (3.7e-6,):
            # Rounding of κ ∇f, carried through 48 normalised steps.
            assert relative(trajectory(rule, kappa, 3, 24), plain) <= 1e-11


@pytest.mark.parametrize(("size", "steps", "server_steps"), [(1, 1, 30), (2, 3, 40), (3, 2, 24)])
def test_total_distance_is_at_most_the_fourth_root_of_skt(size, steps, server_steps):
    rule = AdaMasFL(size, steps=steps, server_steps=server_steps)
    bound = (size * steps * server_steps) ** 0.25
    lengths = trajectory(rule, 1e3, 1, server_steps).diff(dim=0).norm(dim=1)
    # Each step is γ times a mean of vectors that are no longer than 1, up to rounding of points of size 10.
    assert lengths.max() <= rule.rate * (1 + 1e-12)
    assert lengths.sum() <= bound * (1 + 1e-12)
    # Far from the minimum all clients agree on the way, and one that walks a line reaches the bound.
    server = Server(SPACE, AdaMasFL(1, steps=1, server_steps=16, initial="zero"), torch.zeros(D).double())
    for _ in range(16):
        ticket = server.dispatch("a")
        away = ticket.message.start + torch.tensor([ticket.message.numbers["rate"], 0, 0, 0]).double()
        given_ = Payload(away[None], 1, {"gradient": torch.ones(D).double()}, {"opening": 0.0})
        assert server.receive(ticket.id, given_).accepted
    assert server.model[0].item() == pytest.approx(16**0.25, rel=1e-12)


def test_a_zero_direction_ends_the_local_loop():
    calls = []

    def loss(theta, batch):
        calls.append(batch)
        return (theta - 1).square().sum() / 2

    numbers = {"opening": 0.0, "beta": 1.0, "rate": 0.25, "steps": 6.0}
    start = torch.tensor([0.5, 1.0, 1.0, 1.0]).double()
    message = Message(start, {"direction": torch.zeros(D).double()}, numbers)
    payload = Normalised().train(SPACE, message, loss, Batches([0, 1]), None, generator=torch.Generator())
    assert len(calls) == 3
    assert payload.points.tolist() == [[1.0] * D]
    # The mean of -1/2, -1/4 and 0.
    assert payload.tensors["gradient"].tolist() == [-0.25, 0.0, 0.0, 0.0]


def test_length_of_steps_does_not_depend_on_the_gradient():
    message = Message(torch.zeros(D).double(), {"direction": torch.zeros(D).double()}, {"opening": 0.0, "beta": 1.0, "rate": 0.1, "steps": 5.0})  # fmt: skip
    slope = draw(1, D)
    for scale in (1e-300, 1e-160, 1.0, 1e200):
        payload = Normalised().train(
            SPACE, message, lambda x, _, c=scale: (c * slope * x).sum(), Batches([0]), None, generator=torch.Generator()
        )
        assert relative(payload.points[0], -0.5 * slope / slope.norm()) <= 1e-14


def test_server_rejects_update_beyond_maximum_distance():
    server = Server(SPACE, AdaMasFL(1, steps=4, server_steps=16, initial="zero"), 100 * draw(0, D, dtype=torch.float32))
    for part, accepted in ((1.0, True), (1.01, False)):
        ticket = server.dispatch("a")
        unit = draw(1, D).float() / draw(1, D).norm()
        far = ticket.message.start + part * 0.25 * unit
        given_ = Payload(far[None], 1, {"gradient": unit}, {"opening": 0.0})
        receipt = server.receive(ticket.id, given_)
        assert receipt.accepted is accepted
    assert receipt.reason.startswith("points: expected a distance of at most ")


def test_client_with_two_updates_counts_once_in_the_mean():
    rule = AdaMasFL(2, steps=1, server_steps=16, clients=4, initial="zero")
    server, rate = Server(SPACE, rule, torch.zeros(D).double()), rule.local_rate

    def sent(client, direction, gradient, ticket=None):
        ticket = ticket or server.dispatch(client)
        point = ticket.message.start + rate * torch.tensor(direction).double()
        tensors = {"gradient": torch.full((D,), gradient, dtype=torch.float64)}
        return server.receive(ticket.id, Payload(point[None], 1, tensors, {"opening": 0.0}))

    late = server.dispatch("b")
    assert sent("a", [1.0, 0, 0, 0], 5.0).buffered
    assert sent("a", [0, 1.0, 0, 0], 1.0).buffered
    assert not sent("b", [0, 0, 1.0, 0], 3.0).buffered
    assert relative(server.model, rule.rate / 3 * torch.tensor([1.0, 1, 1, 0]).double()) <= 1e-14
    assert server._state.value.model_state.state["c"].tolist() == [1.0] * D
    # A ticket of before is a displacement from where it started, like any other.
    before = server.model
    sent("a", [0, 0, 0, 1.0], 1.0)
    assert sent("b", [1.0, 0, 0, 0], 3.0, late).staleness == 1
    assert relative(server.model - before, rule.rate / 2 * torch.tensor([1.0, 0, 0, 1]).double()) <= 1e-14


def test_late_clients_first_send_an_initial_gradient():
    server = Server(SPACE, AdaMasFL(1, steps=2, server_steps=20), draw(0, D))
    for client in (0, 0, 0):
        train_and_send(server, server.dispatch(client), client)
    before = server.model
    opening = train_and_send(server, server.dispatch(1), 1)
    assert opening.numbers["opening"] == 1.0
    assert torch.equal(server.model, before)
    store = server._state.value.store
    mean = sum(store.load(("client", i))["control"] for i in range(2)) / 2
    assert relative(server._state.value.model_state.state["c"], mean) <= 1e-14


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"size": 0}, "size"),
        ({"steps": 0}, "steps"),
        ({"size": 4, "steps": 5, "server_steps": 19}, "server_steps"),
        ({"size": 4, "clients": 3}, "clients"),
        ({"initial": "one"}, "initial"),
        ({"eta": 0.0}, "eta"),
        ({"beta": 0.0}, "beta"),
        ({"beta": 1.5}, "beta"),
        ({"gamma": -1.0}, "gamma"),
        ({"gamma": math.inf}, "gamma"),
    ],
    ids=str,
)
def test_invalid_options_are_rejected_by_name(options, name):
    with pytest.raises(ArgumentError, match=f"^{name}: "):
        AdaMasFL(**options)


def test_rates_need_at_least_as_many_rounds_as_steps():
    assert AdaMasFL(4, steps=5, server_steps=20).momentum == 1.0
    assert math.isclose(AdaMasFL(4, steps=5, server_steps=20).rate * 20, (4 * 5 * 20) ** 0.25)


def test_given_momentum_does_not_require_number_of_rounds():
    rule = AdaMasFL(4, steps=5, server_steps=1, beta=0.5)
    assert (rule.momentum, rule.local_rate) == (0.5, 1 / 5)


def test_trainer_names_missing_entries_of_the_message():
    def train(message, space=SPACE, problem=lambda x, _: x.sum()):
        return Normalised().train(space, message, problem, Batches([0]), None, generator=torch.Generator())

    with pytest.raises(ArgumentError, match=r"message: .* rate, steps"):
        train(Message(draw(0, D), numbers={"beta": 1.0, "opening": 0.0}))
    numbers = {"opening": 0.0, "beta": 1.0, "rate": 0.1, "steps": 1.0}
    with pytest.raises(ArgumentError, match=r"^space: "):
        train(Message(torch.eye(3)[0], numbers=numbers), Sphere(3))
    good = Message(draw(0, D), {"direction": draw(1, D)}, numbers)
    with pytest.raises(DivergenceError):
        train(good, problem=lambda x, _: x.sum() * float("inf"))
    with pytest.raises(DivergenceError, match="direction"):
        train(Message(draw(0, D), {"direction": torch.full((D,), float("inf")).double()}, numbers))
    with pytest.raises(ArgumentError, match=r"^space: "):
        Server(Sphere(3), AdaMasFL(1), torch.eye(3)[0])


@pytest.mark.parametrize(("steps", "server_steps"), [(100, 3000), (500, 1000), (1000, 3000)])
def test_steps_from_zero_model_are_within_the_maximum_distance(steps, server_steps):
    """The rounding errors are proportional to the travelled distance, because the base is zero."""
    server = Server(Flat(1), AdaMasFL(1, steps=steps, server_steps=server_steps, initial="zero"), torch.zeros(1))
    ticket = server.dispatch("a")
    trained = Normalised().train(
        Flat(1), ticket.message, lambda x, _: x.sum(), Batches([0]), None, generator=torch.Generator()
    )
    assert server.receive(ticket.id, trained).accepted


def test_a_mean_of_large_gradients_does_not_overflow():
    numbers = {"opening": 0.0, "beta": 0.5, "rate": 0.1, "steps": 4.0}
    message = Message(torch.zeros(1), {"direction": torch.ones(1)}, numbers)
    for dtype, size in ((torch.float32, 1.5e38), (torch.float64, 2.0**1000)):
        given_ = replace(message, start=torch.zeros(1, dtype=dtype), tensors={"direction": torch.ones(1, dtype=dtype)})
        payload = Normalised().train(
            Flat(1), given_, lambda x, _, c=size: c * x.sum(), Batches([0]), None, generator=torch.Generator()
        )
        assert payload.tensors["gradient"].item() == torch.tensor(size, dtype=dtype).item()
    with pytest.raises(DivergenceError, match="mean of the gradients"):
        Normalised().train(
            Flat(1), given_, lambda x, _: 1.5e308 * x.sum(), Batches([0]), None, generator=torch.Generator()
        )


def test_initial_gradient_with_nonfinite_points_is_rejected():
    server = Server(Flat(2), AdaMasFL(1, steps=3, server_steps=100), torch.zeros(2))
    ticket = server.dispatch("a", retain_base=False)
    points, base = torch.full((1, 2), math.nan), torch.full((2,), math.inf)
    payload = Payload(points, 1, {"gradient": torch.ones(2)}, {"opening": 1.0}, base=base)
    assert server.receive(ticket.id, payload).reason == "points: expected finite values, got nan at (0, 0)"
    assert server.receive(ticket.id, replace(payload, points=torch.zeros(1, 2))).reason.startswith(
        "base: expected finite"
    )
