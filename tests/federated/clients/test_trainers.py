"""Tests of trainers on flat and curved spaces against `fit` and plain training loops."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

from manifoldagg.curves import SAM, Bezier, Phases, Training, fit, refresh_buffers
from manifoldagg.errors import ArgumentError, StateDictError
from manifoldagg.federated import InitialModel, Message, Server, Trainer, clients, rules
from manifoldagg.federated.clients.base import count_samples
from manifoldagg.manifolds import Flat, ParameterSpace, PoincareBall, SpecialOrthogonal, Sphere, check_point, distance
from manifoldagg.manifolds.optimizers import RiemannianSGD
from manifoldagg.simulation import Batches
from tests.support import draw

SPACE, START = Flat(3), draw(0, 3)
PAIRS = [(draw(i, 5, 3), draw(i, 5)) for i in range(4)]


def loss(theta, batch):
    inputs, targets = batch
    return (inputs @ theta - targets).square().mean()


def seeded():
    return torch.Generator().manual_seed(3)


def test_the_curve_trainer_returns_the_result_of_fit():
    trainer = clients.Curve(degree=3, epochs=(2, 1), rate=0.1, proximal=0.1)
    payload = trainer.train(SPACE, Message(START), loss, PAIRS, None, generator=seeded())
    learned = fit(
        Bezier(SPACE, 3), loss, PAIRS, start=START, phases=Phases((2, 1)), training=Training(rate=0.1, proximal=0.1),
        generator=seeded(),
    )  # fmt: skip
    assert torch.equal(payload.points, learned.phi[1:])
    assert payload.samples == 20


def test_local_trainer_equals_the_first_phase_of_curve():
    curve = clients.Curve(epochs=(2, 1), rate=0.1).train(SPACE, Message(START), loss, PAIRS, None, generator=seeded())
    local = clients.Local(epochs=2, rate=0.1).train(SPACE, Message(START), loss, PAIRS, None, generator=seeded())
    assert local.points.shape == (1, 3)
    assert torch.equal(local.points[0], curve.points[-1])
    steps = clients.Local(steps=8, rate=0.1).train(SPACE, Message(START), loss, PAIRS, None, generator=seeded())
    assert torch.equal(steps.points, local.points)
    assert all(isinstance(t, Trainer) for t in (clients.Local(), clients.Curve()))


def trained(trainer, space=SPACE, start=START, objective=loss, batches=PAIRS):
    return trainer.train(space, Message(start), objective, batches, None, generator=seeded()).points[-1]


OPTIMIZERS = [
    torch.optim.SGD,
    partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.01),
    partial(torch.optim.AdamW, weight_decay=0.1),
    torch.optim.RMSprop,
    torch.optim.Adagrad,
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("mu", [0.0, 0.3])
def test_local_training_equals_plain_loop_of_any_torch_optimiser(optimizer, mu):
    theta = torch.nn.Parameter(START.clone())
    descent = optimizer([theta], lr=0.05)
    for batch in [*PAIRS, *PAIRS]:
        descent.zero_grad()
        (loss(theta, batch) + mu / 2 * (theta - START).square().sum()).backward()
        descent.step()
    # Eight steps of a few roundings.
    found = trained(clients.Local(epochs=2, optimizer=optimizer, rate=0.05, proximal=mu))
    assert torch.allclose(found, theta.detach(), rtol=1e-12, atol=1e-14)


def test_trainers_compare_by_value():
    curve = clients.Curve(steps=(3, 4), sharpness=SAM(0.1))
    assert curve == clients.Curve(2, steps=(3, 4), sharpness=SAM(0.1))
    assert hash(curve) == hash(replace(curve))
    assert replace(curve, degree=3) != curve
    assert repr(clients.Local(rate=0.1)).startswith("Local(epochs=2, steps=None, optimizer=")
    assert repr(clients.ControlVariate()) == "ControlVariate(epochs=2, steps=None, rate=0.01)"


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("make", [clients.Local, clients.Curve, clients.Proximal, clients.FLOCO, clients.Trajectory])
def test_invalid_options_are_rejected_by_the_constructor(make):
    """The error message contains the name that the option has in the constructor."""
    bad = {"rate": -1.0, "proximal": -1.0, "sharpness": SAM}
    if make is clients.Curve:
        bad |= {"degree": 0, "epochs": 3, "steps": (1,), "control_rate": 0, "control_start": "moon"}
        bad |= {"control_projection": 2, "sampling": "sobol", "samples": 0}
    with pytest.raises(ArgumentError, match="^proximal: expected a number >= 0 or an object with `gradient`"):
        make(proximal=clients.LorentzProximal)
    for name, value in bad.items():
        with pytest.raises(ArgumentError, match=f"^{name}: expected"):
            make(**{name: value})


def test_proximal_equals_local_with_proximal_term():
    assert clients.Proximal().proximal == 0.01
    named = trained(clients.Proximal(rate=0.1, proximal=0.5))
    assert torch.equal(named, trained(clients.Local(rate=0.1, proximal=0.5)))
    assert not torch.equal(named, trained(clients.Local(rate=0.1)))


TERM = clients.LorentzProximal(0.3, 0.7, 1.5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_local_training_with_lorentz_term_equals_plain_loop(optimizer):
    """The plain loop differentiates the term of FedMRUR with autograd. The trainer uses the closed form."""
    theta = torch.nn.Parameter(START.clone())
    descent = optimizer([theta], lr=0.05)
    for batch in [*PAIRS, *PAIRS]:
        descent.zero_grad()
        (loss(theta, batch) + TERM(theta, START)).backward()
        descent.step()
    found = trained(clients.Local(epochs=2, optimizer=optimizer, rate=0.05, proximal=TERM))
    assert torch.allclose(found, theta.detach(), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("samples", [1, 3])
def test_curve_with_lorentz_term_equals_plain_loop(samples):
    """The term is evaluated at the same sampled points of the curve as the loss."""
    trainer = clients.Curve(
        epochs=(1, 2), optimizer=torch.optim.SGD, rate=0.05, proximal=TERM, sampling="quadrature", samples=samples
    )
    payload = trainer.train(SPACE, Message(START), loss, PAIRS, None, generator=seeded())
    end = torch.nn.Parameter(START.clone())
    for batch in PAIRS:
        (slope,) = torch.autograd.grad(loss(end, batch) + TERM(end, START), end)
        end.data -= 0.05 * slope
    control = torch.nn.Parameter(torch.lerp(START, end.detach(), 0.5))
    nodes, weights = np.polynomial.legendre.leggauss(samples)
    for batch in [*PAIRS, *PAIRS]:
        total = 0.0
        for z, w in zip(nodes, weights, strict=True):
            s = (1 + z) / 2
            point = (1 - s) ** 2 * START + 2 * s * (1 - s) * control + s * s * end.detach()
            total = total + w / 2 * (loss(point, batch) + TERM(point, START))
        (slope,) = torch.autograd.grad(total, control)
        control.data -= 0.05 * slope
    assert torch.allclose(payload.points, torch.stack([control, end]).detach(), rtol=1e-11, atol=1e-13)


def test_every_trainer_with_a_proximal_option_accepts_the_term():
    """A term with the weight 0 changes nothing, and a term with another weight changes the result."""
    for make in (clients.Local, clients.Proximal, clients.Curve, clients.Trajectory, clients.AsyncCurve):
        without, nothing, something = (
            trained(make(rate=0.1, proximal=given)) for given in (0.0, clients.LorentzProximal(0.0), TERM)
        )
        assert torch.equal(without, nothing)
        assert not torch.equal(without, something)


def test_the_lorentz_term_needs_a_flat_space():
    space = Sphere(3)
    start = torch.eye(3, dtype=torch.float64)[0]
    with pytest.raises(ArgumentError, match="proximal: expected a number on the curved space"):
        trained(clients.Local(rate=0.1, proximal=TERM), space, start)


def test_local_training_can_be_sharpness_aware():
    plain, sharp = (trained(clients.Local(rate=0.1, sharpness=s)) for s in (None, SAM(0.1)))
    assert not torch.equal(plain, sharp)


CURVED = ParameterSpace.of_state_dict(
    {
        "turn": torch.eye(3).double(),
        "ball": torch.zeros(2).double(),
        "way": torch.ones(4).double() / 2,
        "w": torch.zeros(2).double(),
    },
    {"turn": SpecialOrthogonal(3), "ball": PoincareBall(2), "way": Sphere(4)},
)
HOME = CURVED.random_point(generator=torch.Generator().manual_seed(5), dtype=torch.float64)
GOAL = CURVED.random_point(generator=torch.Generator().manual_seed(6), dtype=torch.float64)


def curved_loss(theta, batch):
    return (theta - batch).square().sum()


def by_hand(optimizer, mu, steps=4):
    """Run the training loop with autograd through the distance of the space."""
    theta = torch.nn.Parameter(HOME.clone())
    descent = optimizer([theta])
    for _ in range(steps):
        descent.zero_grad()
        value = curved_loss(theta, GOAL)
        if mu:
            value = value + mu / 2 * distance(CURVED, HOME, theta).square()
        value.backward()
        descent.step()
    return theta.detach()


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("mu", [0.0, 0.7])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.8}], ids=str)
def test_curved_leaves_use_riemannian_sgd_and_geodesic_distance(mu, options):
    trainer = clients.Local(steps=4, optimizer=partial(torch.optim.SGD, **options), rate=0.05, proximal=mu)
    found = trained(trainer, CURVED, HOME, curved_loss, Goals())
    expected = by_hand(lambda parameters: RiemannianSGD(parameters, lr=0.05, space=CURVED, **options), mu)
    # The proximal gradient by autograd through logs, against the log itself.
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9)
    check_point(CURVED, found)
    assert not torch.allclose(found, HOME)


@pytest.mark.usefixtures("as_shipped")
def test_control_points_stay_on_curved_leaves():
    trainer = clients.Curve(steps=(3, 3), optimizer=torch.optim.SGD, rate=0.05, proximal=0.1)
    payload = trainer.train(CURVED, Message(HOME), curved_loss, Goals(), None, generator=seeded())
    assert payload.points.shape == (2, *CURVED.shape)
    check_point(CURVED, payload.points)


@pytest.mark.usefixtures("as_shipped")
def test_an_optimizer_without_a_riemannian_form_is_rejected():
    with pytest.raises(ArgumentError, match="optimizer: expected SGD or Adam"):
        trained(clients.Local(steps=1, optimizer=torch.optim.RMSprop), CURVED, HOME, curved_loss, Goals())


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("optimizer", ["adam", None, torch.optim.SGD([torch.zeros(1)])])
def test_an_invalid_optimizer_is_rejected_by_the_constructor(optimizer):
    with pytest.raises(ArgumentError, match=r"^optimizer: expected a class such as torch\.optim\.Adam, got .{0,120}$"):
        clients.Local(optimizer=optimizer)


class Goals(list):
    samples = 1

    def __init__(self):
        super().__init__([GOAL])


@pytest.mark.usefixtures("as_shipped")
def test_samples_are_counted_for_all_sources_of_batches():
    inputs, labels = torch.zeros(7, 3), torch.zeros(7, dtype=torch.int64)
    assert count_samples(PAIRS) == 20
    assert count_samples(DataLoader(TensorDataset(inputs, labels), batch_size=2)) == 7
    batches = Batches(inputs, labels, 2, np.random.default_rng(0))
    assert (count_samples(batches), len(batches), sum(len(y) for _, y in batches)) == (7, 4, 7)
    with pytest.raises(ArgumentError, match="batches: expected pairs"):
        count_samples([1.0])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(SET)


SET = TensorDataset(torch.zeros(20, 3), torch.zeros(20))
COUNTED = [
    (DataLoader(SET, batch_size=2, sampler=SubsetRandomSampler([0, 1, 2, 3])), 4),
    (DataLoader(SET, batch_size=12, drop_last=True), 12),
    (DataLoader(SET, batch_sampler=[[0, 1], [2]]), 3),
    (DataLoader(Stream(), batch_size=6), 20),
    ([torch.zeros(20, 3), torch.zeros(4, 3)], 24),
    ([{"inputs": torch.zeros(20, 3)}, ({"inputs": torch.zeros(4, 3)}, None)], 24),
]


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(("batches", "samples"), COUNTED)
def test_sample_count_is_that_of_one_pass(batches, samples):
    assert count_samples(batches) == samples


@pytest.mark.usefixtures("as_shipped")
def test_uncountable_batches_are_rejected_before_training():
    def never(theta, batch):
        raise AssertionError

    odd = type("Odd", (list,), {"samples": "7"})(PAIRS)
    for batches, words in (
        (odd, "batches: samples: expected"),
        ([1.0], "batches: expected pairs"),
        (iter(PAIRS), "re-iterable"),
    ):
        with pytest.raises(ArgumentError, match=words):
            trained(clients.Local(), objective=never, batches=batches)


def network(frozen=False):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inner = nn.BatchNorm1d(4).eval() if frozen else nn.BatchNorm1d(4)
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), inner, nn.Linear(4, 2).requires_grad_(False))
    net.register_buffer("mask", torch.tensor([0.0, -float("inf")]))
    net.register_buffer("scratch", torch.zeros(1), persistent=False)
    return net


LABELLED = [(draw(i, 6, 3, dtype=torch.float32) + 2, torch.arange(6) % 2) for i in range(3)]
PAIRED = {
    "Local": (rules.FedAsync(0.5), clients.Local(epochs=1, rate=0.01)),
    "Local, sharp": (rules.FedBuff(1), clients.Local(epochs=1, rate=0.01, sharpness=SAM(0.1))),
    "Proximal": (rules.FedAvg(1), clients.Proximal(epochs=1, rate=0.01)),
    "Epochs": (rules.AsyncFedED(), clients.Epochs(clients.Local(rate=0.01), max_epochs=2)),
    "Gradient": (rules.GeneralizedAsyncSGD([1.0]), clients.Gradient()),
    "Gradient, sharp": (rules.GeneralizedAsyncSGD([1.0]), clients.Gradient(SAM(0.1))),
    "Curve": (rules.AsyncBezier(rate=0.5), clients.Curve(epochs=(1, 1), rate=0.01)),
    "Curve, free": (rules.AsyncBezier(rate=0.5), clients.Curve(epochs=(1, 1), rate=0.01, freeze_end=False)),
    "Trajectory": (rules.AsyncBezier(rate=0.5), clients.Trajectory(epochs=1, rate=0.01)),
    "Trajectory, sharp": (
        rules.AsyncBezier(rate=0.5, pull_back="none", normalise=True, polygon=True),
        clients.Trajectory(epochs=1, rate=0.01, sharpness=SAM(0.1), pieces=2),
    ),
    "AsyncCurve": (rules.AsyncCurve(1, 0.5), clients.AsyncCurve(epochs=1, rate=0.01)),
    "FLOCO": (rules.FLOCO(1, 2, initial_std=0.01), clients.FLOCO(epochs=1)),
    "ControlVariate": (rules.MasFL(1, initial="zero"), clients.ControlVariate(steps=3)),
    "Normalised": (rules.AdaMasFL(1, steps=3, server_steps=9, initial="zero"), clients.Normalised()),
    "Calibrated": (rules.OrthoFL(), clients.Calibrated(clients.Local(epochs=1, rate=0.01))),
    "Scheduled": (rules.FedAsync(0.5), clients.Scheduled(clients.Local(epochs=1, rate=0.01), steps=0.5)),
}
REFRESHED = {
    **dict.fromkeys(
        ("Curve", "Curve, free", "AsyncCurve", "Local, sharp", "Trajectory, sharp"), lambda message, points: points[-1]
    ),
    "FLOCO": lambda message, points: points.mean(0),
    "Gradient, sharp": lambda message, points: message.start,
}


def test_paired_cases_cover_every_trainer():
    every = {getattr(clients, name) for name in clients.__all__ if hasattr(getattr(clients, name), "train")}
    assert {type(trainer) for _, trainer in PAIRED.values()} == every


@pytest.mark.parametrize("name", PAIRED)
def test_every_trainer_returns_the_requested_buffers(name):
    """The statistics belong to the returned model, or to the models of the training path.

    Layers in evaluation mode keep their statistics.
    """
    rule, trainer = PAIRED[name]
    net = network(frozen=True)
    space = ParameterSpace.of(net)
    patterns = {"4.*": "leave", "*": "average"}
    server = Server(space, rule, InitialModel(space.point(net), space.buffers(net), patterns))
    before = {key: tensor.clone() for key, tensor in net.state_dict().items()}
    loss = space.loss(net, nn.functional.cross_entropy)
    ticket = server.dispatch(0)
    asked = set(before) - {leaf.name for leaf in space.layout.leaves} - {"4.weight", "4.bias"}
    assert set(ticket.message.requested_buffers) == asked
    payload = trainer.train(space, ticket.message, loss, LABELLED, None, generator=seeded())
    assert payload.buffers.keys() == asked
    assert server.receive(ticket.id, payload).reason == ""
    moved = {key for key, tensor in payload.buffers.items() if not torch.equal(tensor, before[key])}
    assert moved == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    if name in REFRESHED:
        point = REFRESHED[name](ticket.message, payload.points)
        # A gradient is taken on one of the batches.
        passes = [[batch] for batch in LABELLED] if "Gradient" in name else [LABELLED]
        means = [refresh_buffers(space, net, point, batches)["1.running_mean"] for batches in passes]
        assert any(torch.equal(payload.buffers["1.running_mean"], mean) for mean in means)
    # Neither the loss nor the module nor the message has any of it.
    for kept in (net.state_dict(), loss.buffers, ticket.message.buffers):
        assert all(torch.equal(tensor, before[key]) for key, tensor in kept.items())


def test_tasks_with_a_shared_loss_are_independent():
    """The result of a task, including its statistics, depends only on its own message."""
    net = network()
    space = ParameterSpace.of(net)
    server = Server(space, rules.FedAsync(0.5), InitialModel(space.point(net), space.buffers(net)))
    loss = space.loss(net, nn.functional.cross_entropy)
    messages = [server.dispatch(i).message for i in range(2)]
    sent = [trained_whole(space, message, loss).buffers for message in messages]
    assert all(torch.equal(tensor, sent[1][key]) for key, tensor in sent[0].items())
    mean = messages[0].buffers["1.running_mean"]
    other = trained_whole(space, replace(messages[0], buffers=messages[0].buffers | {"1.running_mean": mean + 1}), loss)
    # Three batches leave 0.9^3 of where the statistics began.
    assert torch.allclose(other.buffers["1.running_mean"] - sent[0]["1.running_mean"], torch.tensor(0.9**3), atol=1e-5)


def trained_whole(space, message, loss):
    return clients.Local(epochs=1, rate=0.01).train(space, message, loss, LABELLED, None, generator=seeded())


def test_a_message_without_buffers_requests_none():
    net = network()
    space = ParameterSpace.of(net)
    message = Server(space, rules.FedAsync(0.5), space.point(net)).dispatch(0).message
    assert message.requested_buffers == ()
    loss = space.loss(net, nn.functional.cross_entropy)
    assert trained_whole(space, message, loss).buffers == {}
    assert all(torch.equal(tensor, net.state_dict()[name]) for name, tensor in loss.buffers.items())


@pytest.mark.usefixtures("as_shipped")
def test_missing_buffers_of_a_loss_are_rejected_before_training():
    net = network()
    space = ParameterSpace.of(net)
    message = Server(space, rules.FedAsync(0.5), InitialModel(space.point(net), space.buffers(net))).dispatch(0).message

    def never(theta, batch):
        raise AssertionError

    words = "loss: expected one with the requested buffers mask, 1.run"
    with pytest.raises(ArgumentError, match=words):
        trained_whole(space, message, never)
    with pytest.raises(ArgumentError, match="requested buffers moon;"):
        trained_whole(space, replace(message, requested_buffers=("moon",)), space.loss(net, never))
    for buffers, words in (
        ({}, "message: buffers: missing: 1.num"),
        ({"mask": torch.zeros(3)}, r"message: buffers: mask: expected shape \(2,\)"),
    ):
        kept = message.buffers | buffers if buffers else {"mask": message.buffers["mask"]}
        with pytest.raises(StateDictError, match=words):
            trained_whole(space, replace(message, buffers=kept), space.loss(net, never))
