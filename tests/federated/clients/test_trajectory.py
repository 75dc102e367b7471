"""Tests of the trainer that returns its training path: it ends like `Local`, and fits the iterates by least squares."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from manifoldagg.curves import SAM, Bezier, Phases, fit
from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Message, Server, clients, rules
from manifoldagg.federated.clients import Epochs, Local, Trajectory
from manifoldagg.manifolds import Flat, PoincareBall, Product, Sphere, check_point
from tests.support import draw, relative

P = 3
SPACE, START = Flat(P), draw(0, P)
PAIRS = [(draw(i, 5, P), draw(i, 5)) for i in range(4)]
KINDS = {
    "SGD": {"optimizer": torch.optim.SGD, "rate": 0.05},
    "momentum": {"optimizer": partial(torch.optim.SGD, momentum=0.9), "rate": 0.02},
    "Adam": {"rate": 0.05},
    "proximal": {"rate": 0.05, "proximal": 0.3},
    "sharp": {"optimizer": torch.optim.SGD, "rate": 0.05, "sharpness": SAM(0.1)},
}


def loss(theta, batch):
    inputs, targets = batch
    return (inputs @ theta - targets).square().mean()


def sent(trainer, space=SPACE, message=None, objective=loss, batches=PAIRS):
    generator = torch.Generator().manual_seed(3)
    return trainer.train(space, message or Message(START), objective, batches, None, generator=generator)


def iterates(kind, steps):
    """Return the stored iterates θ_0, …, θ_K of a training run."""
    seen = [START]
    local = Local(steps=steps, **KINDS[kind])
    options = local._options()
    watch = lambda point: seen.append(point.clone())  # noqa: E731
    fit(Bezier(SPACE, 1), loss, PAIRS, start=START, **options | {"phases": Phases(steps=(steps, 0), watch=watch)})
    return torch.stack(seen)


@pytest.mark.parametrize("kind", KINDS)
def test_trajectory_ends_at_the_model_of_local_training(kind):
    plain = sent(Local(epochs=2, **KINDS[kind]))
    for options, count in (({"degree": 1}, 1), ({}, 2), ({"degree": 3, "time": "length"}, 3), ({"pieces": 5}, 5)):
        payload = sent(Trajectory(epochs=2, **KINDS[kind], **options))
        assert torch.equal(payload.points[-1:], plain.points)
        assert payload.points.shape == (count, P)
        assert (payload.samples, payload.numbers) == (plain.samples, {})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("time", ["steps", "length"])
@pytest.mark.parametrize("degree", [2, 4])
def test_control_points_are_the_least_squares_fit_to_the_iterates(kind, time, degree):
    path = iterates(kind, 11)
    places = None if time == "length" else torch.linspace(0, 1, 12, dtype=torch.float64)
    stored = Bezier(SPACE, degree).through(path, places, fixed_ends=True)
    points = sent(Trajectory(steps=11, degree=degree, time=time, **KINDS[kind])).points
    # Sums of powers against the Bernstein weights, of degree 4 on eleven steps of unequal length.
    assert relative(points - START, stored[1:] - START) <= 1e-8


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_equal_models_of_shorter_training(kind):
    pieces = sent(Trajectory(steps=8, pieces=4, **KINDS[kind])).points
    for i, point in enumerate(pieces, 1):
        assert torch.equal(point, sent(Local(steps=2 * i, **KINDS[kind])).points[0])


def test_trajectory_needs_no_additional_gradients():
    counts = []
    for trainer in (Local(steps=9), Trajectory(steps=9, degree=3), Trajectory(steps=9, pieces=4)):
        calls = []

        def counted(theta, batch, calls=calls):
            calls.append(None)
            return loss(theta, batch)

        sent(trainer, objective=counted)
        counts.append(len(calls))
    assert counts == [9, 9, 9]


class Stream(IterableDataset):
    """Batches without a length."""

    def __iter__(self):
        return iter([(x, y) for inputs, targets in PAIRS for x, y in zip(inputs, targets, strict=True)])


@pytest.mark.parametrize("batches", [PAIRS, DataLoader(Stream(), batch_size=5)], ids=["list", "stream"])
def test_steps_are_predicted_or_counted(batches):
    options = {"optimizer": torch.optim.SGD, "rate": 0.05}
    pieces = sent(Trajectory(epochs=3, pieces=3, **options), batches=batches).points
    for i, point in enumerate(pieces, 1):
        assert torch.equal(point, sent(Local(epochs=i, **options)).points[0])
    curve = sent(Trajectory(epochs=3, **options), batches=batches).points
    # Of sums of weights, or of powers.
    assert relative(curve, sent(Trajectory(steps=12, **options)).points) <= 1e-13


class Wrong(list):
    samples = 20

    def __len__(self):
        return 3


def test_batches_beyond_their_length_are_rejected():
    for options in ({}, {"pieces": 2}):
        with pytest.raises(ArgumentError, match="steps: expected 6 observed points, got 8"):
            sent(Trajectory(epochs=2, **options), batches=Wrong(PAIRS))
    assert torch.equal(sent(Trajectory(degree=1), batches=Wrong(PAIRS)).points, sent(Local()).points)


def test_zero_epochs_return_the_start_for_every_point():
    for options in ({}, {"time": "length"}, {"pieces": 2}):
        assert torch.equal(sent(Trajectory(epochs=0, **options)).points, START.expand(2, P))


def test_progress_is_returned_on_request():
    asking = Message(START, numbers={"progress": 1.0})
    for trainer, pace in ((Trajectory(steps=7, rate=0.02), 0.14), (Trajectory(epochs=2, rate=0.5, pieces=2), 4.0)):
        assert sent(trainer).numbers == {}
        assert sent(trainer, message=asking).numbers == {"progress": pytest.approx(pace, rel=1e-15)}


def test_server_follows_the_trajectory():
    """A quarter of the path of four pieces ends at the model of a client that trains for a quarter of the steps."""
    training = {"optimizer": torch.optim.SGD, "rate": 0.05}
    server = Server(SPACE, rules.AsyncBezier(rate=0.25, pull_back="none", normalise=True, polygon=True), START)
    ticket = server.dispatch(0)
    receipt = server.receive(ticket.id, sent(Trajectory(steps=8, pieces=4, **training), message=ticket.message))
    assert receipt.reason == ""
    # A step of one rounding.
    assert relative(server.model, sent(Local(steps=2, **training)).points[0]) <= 1e-15
    refused = server.receive(server.dispatch(1).id, sent(Local(steps=2, **training)))
    assert "numbers" in refused.reason


def test_the_epochs_of_the_message_determine_the_path():
    message = Message(START, numbers={"epochs": 3.0})
    found = sent(Epochs(Trajectory(degree=3, rate=0.1)), message=message).points
    assert torch.equal(found, sent(Trajectory(epochs=3, degree=3, rate=0.1)).points)


CURVED = Product({"ball": PoincareBall(2), "way": Sphere(4), "w": Flat(2)})


def test_points_stay_on_a_curved_space():
    generator = torch.Generator().manual_seed(5)
    home, goal = CURVED.random_point(2, generator=generator, dtype=torch.float64)
    batches = [(goal[None], None)]

    def away(theta, batch):
        return (theta - batch[0]).square().sum()

    options = {"steps": 6, "optimizer": torch.optim.SGD, "rate": 0.02}
    plain = sent(Local(**options), CURVED, Message(home), away, batches).points
    for more in ({}, {"degree": 3, "time": "length"}, {"pieces": 4}):
        points = sent(Trajectory(**options, **more), CURVED, Message(home), away, batches).points
        check_point(CURVED, points)
        assert torch.equal(points[-1:], plain)
        server = Server(CURVED, rules.AsyncBezier(rate=0.5), home, weights={0: 1})
        ticket = server.dispatch(0)
        payload = sent(Trajectory(**options, **more), CURVED, ticket.message, away, batches)
        assert server.receive(ticket.id, payload).reason == ""


def test_quadratic_fit_of_gradient_descent_equals_closed_form():
    """For the loss λ x² / 2, the iterates are qᵏ with q = 1 − ηλ, and φ₁ is a ratio of sums."""
    space = Flat(1)
    steps, rate = 20, 0.1
    k = torch.arange(steps + 1, dtype=torch.float64)
    u = k / steps
    q = 1 - rate * 0.7
    weight = 2 * u * (1 - u)
    expected = (weight * (q**k - (1 - u) ** 2 - u**2 * q**steps)).sum() / weight.square().sum()
    trainer = Trajectory(steps=steps, optimizer=torch.optim.SGD, rate=rate)
    message = Message(torch.ones(1, dtype=torch.float64))
    points = sent(trainer, space, message, lambda x, _: 0.35 * x.square().sum(), [(torch.zeros(1, 1), None)]).points
    assert relative(points.flatten(), torch.stack([expected, expected.new_tensor(q**steps)])) <= 1e-13


@pytest.mark.usefixtures("as_shipped")
def test_invalid_options_are_rejected_by_the_constructor():
    bad = {"degree": 0, "time": "loss", "pieces": 0, "rate": -1.0, "epochs": -1}
    for name, value in bad.items():
        with pytest.raises(ArgumentError, match=f"^{name}.*: expected"):
            Trajectory(**{name: value})
    with pytest.raises(ArgumentError, match="degree: expected at most 10, got 11"):
        Trajectory(degree=11)
    with pytest.raises(ArgumentError, match="time: expected steps with pieces, got length"):
        Trajectory(pieces=2, time="length")
    assert replace(Trajectory(), degree=3) == clients.Trajectory(degree=3)
