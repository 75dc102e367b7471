"""Tests of AsyncFedED: a manual computation, a transcription, curved spaces, and its trainer."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Message, Payload, Server, Trainer, Update
from manifoldagg.federated.clients import Local, Proximal
from manifoldagg.federated.clients.local import Epochs
from manifoldagg.federated.rules.asyncfeded import AsyncFedED
from manifoldagg.manifolds import Flat, Sphere, distance
from manifoldagg.testing import check_rule
from tests.federated.random_clients import SIZE, SPACE, Sent, life
from tests.support import draw, relative, seeds

GOLDEN = {"AsyncFedED": AsyncFedED(warm_up=0)}

PLANE = Flat(2)


def test_run_of_two_clients_equals_manual_computation():
    def answer(ticket, x, y):
        start = ticket.message.start
        return server.receive(ticket.id, Payload((start + torch.tensor([x, y], dtype=torch.float64))[None], samples=1))

    def epochs(ticket):
        return ticket.message.numbers["epochs"]

    def model():
        return pytest.approx([3.0, height], rel=1e-14)

    server = Server(PLANE, AsyncFedED(gain=2.0, epochs=3, warm_up=0), torch.zeros(2).double())
    first, second = server.dispatch("a"), server.dispatch("b")
    assert (epochs(first), epochs(second)) == (3, 3)
    # a: no drift, γ = 0, η = 1; K = 3 + ⌊2 · 1⌋.
    answer(first, 3.0, 4.0)
    assert server.model.tolist() == [3.0, 4.0]
    third = server.dispatch("a")
    assert epochs(third) == 5
    # b: drift 5, moved 10, γ = 1/2, η = 2/3; K = 3 + ⌊2 · 1/2⌋.
    answer(second, 0.0, 10.0)
    height = 4 + 20 / 3
    assert server.model.tolist() == model()
    assert epochs(server.dispatch("b")) == 4
    # a: drift 20/3, moved 20/9, γ = 3, η = 1/4; K = 5 + ⌊2 · (1 - 3)⌋ = 1.
    answer(third, 0.0, 20 / 9)
    height += 5 / 9
    assert server.model.tolist() == model()
    late = server.dispatch("a")
    assert epochs(late) == 1
    # b: γ = 5/9, η = 9/14; a: drift 9/14 · 1, moved 1/14, γ = 9, and never fewer epochs than 1.
    answer(server.dispatch("b"), 0.0, 1.0)
    answer(late, 0.0, 1 / 14)
    assert epochs(server.dispatch("a")) == 1


@given(seeds, st.floats(0.01, 1.0))
@settings(max_examples=20)
def test_with_weights_the_step_is_multiplied_by_the_share_of_the_data(seed, weight):
    base, current = draw(seed, 2, SIZE)
    given_ = Update("a", base, current, base + draw(seed + 1, 1, SIZE), weight=weight, staleness=1)
    steps = {}
    for weighted in (False, True):
        rule = AsyncFedED(0.5, warm_up=0, weighted=weighted)
        steps[weighted] = rule.step(SPACE, rule.init(SPACE, base), given_)[1]
    plain, scaled = steps[False], steps[True]
    assert relative(scaled.model - current, weight * (plain.model - current)) <= 1e-12
    for name in ("rate", "step", "norm"):
        assert scaled.numbers[name] == pytest.approx(weight * plain.numbers[name], rel=1e-14)
    # The staleness and the epochs do not depend on the weight.
    assert [scaled.numbers[name] for name in ("distance", "epochs")] == [
        plain.numbers[n] for n in ("distance", "epochs")
    ]
    assert plain.numbers["rate"] == pytest.approx(
        0.5 / (float((current - base).norm() / (given_.points[0] - base).norm()) + 1), rel=1e-12
    )


def test_the_weighted_rule_satisfies_the_laws():
    assert check_rule(AsyncFedED(warm_up=1, weighted=True), seeds=1, verbose=False).holds


def transcription(happened, start, *, rate, epsilon, target, gain, epochs, warm_up):
    """Transcription of Wang et al. 2022 with Manifold (47), one update at a time."""
    x, counts, version = start, {}, 0
    for event in happened:
        if isinstance(event, Sent):
            yield event, counts.get(event.client, epochs)
            continue
        delta = event.point - event.base
        gamma = (x - event.base).norm().item() / delta.norm().item() if version >= warm_up else target
        yield event, x + rate / (gamma + epsilon) * delta
        # From the server's own model: a floor makes a whole number of a rounding.
        x, version = event.model, version + 1
        counts[event.client] = max(1, counts.get(event.client, epochs) + math.floor(gain * (target - gamma)))


@settings(max_examples=8)
@given(seeds, st.floats(0.1, 1), st.floats(0.1, 2), st.floats(0, 3), st.floats(0, 3), st.integers(0, 12))
def test_random_run_equals_transcription_of_the_paper(seed, rate, epsilon, target, gain, warm_up):
    options = {"epsilon": epsilon, "target": target, "gain": gain, "epochs": 4, "warm_up": warm_up}
    happened = life(AsyncFedED(rate, **options), seed)
    for event, expected in transcription(happened, draw(seed, SIZE), rate=rate, **options):
        if isinstance(event, Sent):
            assert event.message.numbers == {"epochs": expected}
        else:
            # A few roundings, of a step of at most ten displacements.
            assert relative(event.model, expected) <= 1e-14


def test_the_warm_up_is_the_first_ten_rounds():
    rule, base, current = AsyncFedED(), draw(0, SIZE), draw(1, SIZE)
    update = Update(0, base, current, draw(2, 1, SIZE), client_state={"epochs": 7})
    told = [rule.step(SPACE, {"version": version}, update)[1] for version in (0, 9, 10)]
    gamma = (current - base).norm() / (update.points[0] - base).norm()
    assert [out.numbers["distance"] for out in told] == pytest.approx([1, 1, gamma.item()], rel=1e-12)
    assert [out.numbers["rate"] for out in told] == pytest.approx([0.5, 0.5, 1 / (gamma.item() + 1)], rel=1e-12)
    assert [out.client_state["epochs"] for out in told] == [7, 7, 7 + math.floor(1 - gamma)]


def test_zero_displacement_changes_neither_model_nor_client_state():
    base, current = draw(0, SIZE), draw(1, SIZE)
    rule = AsyncFedED(warm_up=0)
    for here in (base, current):
        update = Update(0, base, here, base[None], client_state={"epochs": 3, "kept": 1.0})
        _, outcome = rule.step(SPACE, {"version": 0}, update)
        assert torch.equal(outcome.model, here)
        assert outcome.client_state == {"epochs": 3, "kept": 1.0}


def test_infinite_drift_gives_one_epoch():
    rule, base = AsyncFedED(warm_up=0), torch.zeros(SIZE).double()
    for gain in (0.0, 1.0, 1e9):
        update = Update(0, base, torch.full_like(base, 1e153), torch.full_like(base, 1e-153)[None])
        _, outcome = replace(rule, gain=gain).step(SPACE, {"version": 0}, update)
        assert outcome.client_state["epochs"] == (rule.epochs if gain == 0 else 1)


@settings(max_examples=10)
@given(seeds)
def test_distances_on_a_sphere_are_geodesic(seed):
    space = Sphere(4)
    base, current, point = (space.project(draw(seed + i, 4)) for i in range(3))
    rule = AsyncFedED(0.3, warm_up=0)
    assert math.pi - max(distance(space, base, current), distance(space, base, point)) > 0
    _, outcome = rule.step(space, rule.init(space, base), Update(0, base, current, point[None]))
    gamma = (distance(space, base, current) / distance(space, base, point)).item()
    assert outcome.numbers["distance"] == pytest.approx(gamma, rel=1e-9)
    tangent = space.transport(base, current, space.log(base, point))
    assert relative(outcome.model, space.exp(current, 0.3 / (gamma + 1) * tangent)) <= 1e-12


PAIRS = [(draw(i, 5, 3), draw(i, 5)) for i in range(4)]
QUIET = partial(torch.optim.SGD, momentum=0.9)


def loss(theta, batch):
    inputs, targets = batch
    return (inputs @ theta - targets).square().mean()


def trained(trainer, **numbers):
    message = Message(draw(0, 3), numbers=numbers)
    return trainer.train(Flat(3), message, loss, PAIRS, None, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("make", [Local, Proximal])
def test_trainer_runs_the_requested_epochs(make):
    local = make(epochs=9, optimizer=QUIET, rate=0.05)
    for epochs in (1, 3):
        payload = trained(Epochs(local), epochs=float(epochs))
        assert torch.equal(payload.points, trained(replace(local, epochs=epochs)).points)
        assert payload.samples == 20
    assert torch.equal(trained(Epochs(replace(local, steps=1)), epochs=3.0).points, payload.points)
    assert torch.equal(trained(Epochs(local, max_epochs=3), epochs=8.0).points, payload.points)
    assert isinstance(Epochs(), Trainer)


def test_number_of_epochs_is_bounded():
    rule, x, memory = AsyncFedED(gain=1e300, target=1e10, warm_up=0), draw(0, SIZE), None
    for k in range(3):
        _, outcome = rule.step(SPACE, {"version": k}, Update(0, x, x, x[None] + 1, client_state=memory))
        memory = outcome.client_state
        assert outcome.numbers["epochs"] == rule.message(SPACE, {}, x, memory).numbers["epochs"] == 2.0**53


@pytest.mark.usefixtures("as_shipped")
def test_invalid_arguments_are_rejected_by_name():
    for numbers in ({}, {"epochs": 0.0}, {"epochs": 1.5}, {"epochs": math.nan}, {"epochs": math.inf}):
        with pytest.raises(ArgumentError, match="epochs"):
            trained(Epochs(), **numbers)
    for options in ({"local": 3}, {"max_epochs": 0}):
        with pytest.raises(ArgumentError, match=next(iter(options))):
            Epochs(**options)
    for options in (
        {"rate": 0.0}, {"epsilon": 0.0}, {"target": -1.0}, {"gain": math.nan}, {"epochs": 0}, {"epochs": 10**400}, {"warm_up": -1},
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=next(iter(options))):
            AsyncFedED(**options)
    with pytest.raises(ArgumentError, match=r"points.*one model"):
        AsyncFedED().step(SPACE, {"version": 0}, Update(0, draw(0, SIZE), draw(0, SIZE), draw(1, 2, SIZE)))
