"""Tests that `Scheduled` equals the inner trainer with the scaled rates and numbers of steps."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg import wire
from manifoldagg.errors import ArgumentError, RuleError
from manifoldagg.experiments.registry import method
from manifoldagg.federated import Message, Server, clients, rules, schedules
from manifoldagg.manifolds import Flat
from tests.support import draw

SPACE, START = Flat(3), draw(0, 3)
BATCHES = [(draw(i, 5, 3), draw(i, 5)) for i in range(3)]
SGD = {"optimizer": torch.optim.SGD, "rate": 0.1}
SHARES = st.sampled_from([0.25, 0.5, 1.0, 2.0])


def loss(theta, batch):
    inputs, targets = batch
    return (inputs @ theta - targets).square().mean()


def trained(trainer, message, batches=BATCHES):
    return trainer.train(SPACE, message, loss, batches, None, generator=torch.Generator().manual_seed(0)).points


# Each with what it is at a rate and a number of steps, of which it has 12, or as many for each of two phases.
PLAIN = {
    clients.Local(epochs=4, **SGD): lambda t, r, n: replace(t, rate=r * t.rate, steps=n),
    clients.Proximal(steps=12, **SGD): lambda t, r, n: replace(t, rate=r * t.rate, steps=n),
    clients.Trajectory(epochs=4, **SGD): lambda t, r, n: replace(t, rate=r * t.rate, steps=n),
    clients.Curve(epochs=(4, 4), **SGD): lambda t, r, n: replace(t, rate=r * t.rate, steps=(n, n)),
    clients.Curve(steps=(12, 12), control_rate=0.05, **SGD): lambda t, r, n: replace(
        t, rate=r * t.rate, control_rate=r * 0.05, steps=(n, n)
    ),
}


@pytest.mark.parametrize("trainer", PLAIN, ids=lambda trainer: type(trainer).__name__)
@given(version=st.integers(0, 9), rate=SHARES, steps=SHARES)
def test_scheduled_trainer_equals_trainer_with_scaled_options(trainer, version, rate, steps):
    scheduled = clients.Scheduled(trainer, lambda v: rate / (v + 1), lambda v: steps if v == version else 7.0)
    plain = PLAIN[trainer](trainer, rate / (version + 1), int(12 * steps))
    message = Message(START, version=version)
    assert torch.equal(trained(scheduled, message), trained(plain, message))
    assert scheduled.num_steps(message, 3) == plain.num_steps(message, 3)


@given(version=st.integers(0, 9), rate=SHARES, steps=SHARES)
def test_scheduled_scales_the_options_of_nested_trainers(version, rate, steps):
    message = Message(START, version=version)
    local = clients.Local(epochs=4, **SGD)
    held = clients.Scheduled(clients.Calibrated(local), rate, steps)
    plain = clients.Calibrated(PLAIN[local](local, rate, int(12 * steps)))
    assert torch.equal(trained(held, message), trained(plain, message))
    assert held.num_steps(message, 3) == plain.num_steps(message, 3)


def test_at_least_one_step_is_taken_except_in_empty_phases():
    message = Message(START, version=5)
    assert clients.Scheduled(clients.Local(), steps=1e-9).num_steps(message, 3) == 1
    ends = clients.Scheduled(clients.Curve(epochs=(2, 0)), steps=lambda version: 0.0)
    assert ends.num_steps(message, 3) == 1


def test_batches_without_length_are_counted():
    class Endless:
        def __iter__(self):
            return iter(BATCHES)

    trainer = clients.Scheduled(clients.Local(epochs=2, **SGD), steps=0.5)
    message = Message(START, version=0)
    assert torch.equal(trained(trainer, message, Endless()), trained(trainer, message))


@pytest.mark.parametrize(
    ("options", "scheduled"),
    [({"epochs": 2}, {"rate": 0.5}), ({"steps": 4}, {"steps": 0.5}), ({"steps": 4}, {"rate": 0.5, "steps": 0.5})],
)
def test_batches_are_not_counted_if_steps_are_given(options, scheduled):
    class Counted:
        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter(BATCHES)

    local = clients.Local(**options, **SGD)
    plain = replace(local, steps=2) if "steps" in scheduled else local
    passes = []
    for trainer in (plain, clients.Scheduled(local, **scheduled)):
        batches = Counted()
        trained(trainer, Message(START, version=0), batches)
        passes.append(batches.passes)
    assert passes[0] == passes[1]


def test_scheduled_uses_the_version_of_the_server():
    server = Server(SPACE, rules.FedAsync(0.5), START)
    trainer = clients.Scheduled(clients.Local(steps=8, **SGD), steps=schedules.Cosine(1.0, 0.0, 4))
    taken = []
    for _ in range(6):
        ticket = wire.unpack(wire.pack(server.dispatch("a")))
        assert ticket.message.version == ticket.version
        taken.append(trainer.num_steps(ticket.message, 3))
        server.receive(ticket, trainer.train(SPACE, ticket.message, loss, BATCHES, None, generator=torch.Generator()))
    assert taken == [8, 7, 4, 2, 1, 1]


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"trainer": clients.Local}, "trainer: expected an instance with `train`, got <class"),
        ({"trainer": SimpleNamespace(train=clients.Local().train)}, "trainer: expected a dataclass"),
        ({"trainer": 3}, "trainer: expected an instance"),
        ({"trainer": clients.Gradient(), "rate": 0.5}, "rate: expected 1, because Gradient has no rate"),
        ({"trainer": clients.Normalised(), "steps": 0.5}, "steps: expected 1, because Normalised has no steps"),
        ({"trainer": clients.Epochs(), "steps": 0.5}, "steps: expected 1, because Epochs has no steps"),
        ({"trainer": clients.FLOCO(), "steps": 0.5}, "steps: expected 1, because FLOCO has no steps"),
        ({"trainer": clients.Local(), "rate": -1.0}, "rate: expected"),
        ({"trainer": clients.Local(), "steps": schedules.Cosine}, "steps: expected an instance, got the class"),
    ],
)
def test_meaningless_options_are_rejected(options, complaint):
    with pytest.raises(ArgumentError, match=complaint):
        clients.Scheduled(**options)


def test_invalid_values_of_a_schedule_are_named():
    falling = clients.Scheduled(clients.Local(), rate=lambda version: 1.0)
    with pytest.raises(ArgumentError, match="message: version: expected an int, because rate is a function of it"):
        trained(falling, Message(START))
    with pytest.raises(ArgumentError, match="rate: expected"):
        trained(clients.Scheduled(clients.Local(), rate=lambda version: 0.0), Message(START, version=0))
    with pytest.raises(RuleError, match="-1"):
        trained(clients.Scheduled(clients.Local(), rate=lambda version: -1.0), Message(START, version=0))


def test_method_string_can_specify_scheduled_trainer():
    text = "asyncbezier:trainer=scheduled,trainer.trainer=curve,trainer.trainer.degree=3"
    falling = "trainer.rate=cosine,trainer.rate.start=1,trainer.rate.end=0.1,trainer.rate.period=50"
    fewer = "trainer.steps=cosine,trainer.steps.start=1,trainer.steps.end=0,trainer.steps.period=50"
    made = method(f"{text},{falling},{fewer}").trainer
    assert made.trainer.degree == 3
    assert (made.rate, made.steps) == (schedules.Cosine(1.0, 0.1, 50), schedules.Cosine(1.0, 0.0, 50))
