"""Mutants of MasFL, AdaMasFL and their trainers, each with the laws that must detect it."""

from dataclasses import replace

import pytest
import torch

from manifoldagg.federated import Message, Outcome, Payload, Server
from manifoldagg.federated.clients.masfl import ControlVariate, Normalised
from manifoldagg.federated.rules.adamasfl import AdaMasFL
from manifoldagg.federated.rules.masfl import MasFL
from manifoldagg.federated.rules.orthofl import interpolate
from manifoldagg.kernels import combine
from manifoldagg.manifolds import Flat
from tests.federated.mutants import Catalogue
from tests.support import draw, relative

pytestmark = pytest.mark.usefixtures("as_shipped")

D = 4
SPACE = Flat(D)
RIGHT = {kind.__name__: kind for kind in (MasFL, AdaMasFL, ControlVariate, Normalised)}
CATALOGUE = Catalogue(RIGHT)
LAWS, MUTANTS, law, caught_by = CATALOGUE.laws, CATALOGUE.mutants, CATALOGUE.law, CATALOGUE.caught_by


class Batches(list):
    samples = 1


def problem(i):
    return torch.diag(torch.linspace(0.5, 1.0 + i % 3, D).double()), 3 * draw(50 + i, D)


def loss(theta, batch):
    h, a = batch
    return 0.5 * (theta - a) @ h @ (theta - a)


def train_and_send(server, trainer, ticket, client, kappa=1.0):
    payload = trainer.train(
        SPACE, ticket.message, lambda x, b: kappa * loss(x, b), Batches([problem(client)]), None,
        generator=torch.Generator(),
    )  # fmt: skip
    receipt = server.receive(ticket.id, payload)
    assert receipt.accepted, receipt.reason
    return receipt


def run(rule, trainer, cohorts, kappa=1.0, clients=4):
    server = Server(SPACE, rule, draw(7, D))
    if rule.initial == "gradient":
        for client in range(clients):
            train_and_send(server, trainer, server.dispatch(client), client, kappa)
    for cohort in cohorts:
        for client, ticket in [(client, server.dispatch(client)) for client in cohort]:
            train_and_send(server, trainer, ticket, client, kappa)
    return server


COHORTS = [(0, 1), (2, 3), (1, 2), (0, 3), (0, 2), (1, 3)]


@law
def masfl_is_the_papers_loop(k):
    theta, eta, gamma, beta = draw(7, D), 0.05, 0.1, 0.4
    c_i = [h @ (theta - a) for h, a in map(problem, range(4))]
    c = g = sum(c_i) / 4
    for cohort in COHORTS:
        change = 0
        for i in cohort:
            (h, a), x, mean = problem(i), theta, 0
            for _ in range(3):
                gradient = h @ (x - a)
                x, mean = x - eta * (beta * (gradient - c_i[i] + c) + (1 - beta) * g), mean + gradient / 3
            change, c_i[i] = change + mean - c_i[i], mean
        g, c = beta * (change / 2 + c) + (1 - beta) * g, c + change / 4
        theta = theta - gamma * g
    server = run(k.MasFL(2, gamma, beta, clients=4), k.ControlVariate(steps=3, rate=eta), COHORTS)
    assert relative(server.model, theta) <= 1e-12


@law
def c_is_the_mean_of_all_who_joined(k):
    for initial in ("gradient", "zero"):
        server = run(k.MasFL(2, 0.1, 0.4, initial=initial), k.ControlVariate(steps=2, rate=0.05), COHORTS[:3] * 2)
        if initial == "gradient":
            train_and_send(server, ControlVariate(steps=2, rate=0.05), server.dispatch(4), 4)
        store = server._state.value.store
        kept = [store.load(("client", c))["control"] for c in range(5) if ("client", c) in store]
        assert len(kept) == 4 + (initial == "gradient")
        assert relative(server._state.value.model_state.state["c"], sum(kept) / len(kept)) <= 1e-13


@law
def masfl_waits_for_distinct_clients(k):
    server = Server(SPACE, k.MasFL(2, initial="zero"), draw(7, D))
    trainer = ControlVariate(steps=1)
    assert [train_and_send(server, trainer, server.dispatch(c), c).buffered for c in (0, 0, 1)] == [True, True, False]


@law
def no_scale_of_the_losses_matters(k):
    rule = k.AdaMasFL(2, steps=3, server_steps=8, clients=4)
    plain = run(rule, k.Normalised(), COHORTS).model
    for kappa in (2.0**-20, 2.0**20):
        assert torch.equal(run(rule, k.Normalised(), COHORTS, kappa).model, plain)


@law
def a_step_is_the_rate_at_most(k):
    rule = k.AdaMasFL(1, steps=3, server_steps=16, initial="zero")
    server, lengths = Server(SPACE, rule, draw(7, D)), []
    for c in (0, 1, 0, 1, 2):
        lengths.append(train_and_send(server, k.Normalised(), server.dispatch(c), c).norm)
    assert max(lengths) <= 3**0.25 / 16**0.75 * (1 + 1e-12)
    # Gradients of the first, long way agree.
    assert lengths[0] >= 0.99 * 3**0.25 / 16**0.75


@law
def a_zero_direction_ends_the_loop(k):
    numbers = {"opening": 0.0, "beta": 1.0, "rate": 0.25, "steps": 6.0}
    calls, zero = [], torch.zeros(D).double()

    def square(theta, batch):
        calls.append(batch)
        return (theta - 0.25 * torch.tensor([1.0, 0, 0, 0]).double()).square().sum()

    payload = k.Normalised().train(
        SPACE, Message(zero, {"direction": zero}, numbers), square, Batches([0]), None, generator=torch.Generator()
    )
    assert (len(calls), payload.points.tolist()) == (2, [[0.25, 0, 0, 0]])


@caught_by("MasFL", "masfl_is_the_papers_loop")
class MasFLUsesTheNewMean(MasFL):
    """Mutant that computes g with the updated c."""

    def apply_step(self, state, update, g, out):
        control, sum_ = update.client_state["control"], state["pending"].get("sum", 0.0)
        change = sum_ + update.tensors["gradient"] - control
        g.add_(self.beta * change / 4)
        return super().apply_step(state, update, g, out)


@caught_by("MasFL", "masfl_is_the_papers_loop")
class MasFLMovesAlongTheOldMomentum(MasFL):
    def apply_step(self, state, update, g, out):
        return super().apply_step(state, update, state["g"], out)


@caught_by("MasFL", "c_is_the_mean_of_all_who_joined", "masfl_is_the_papers_loop")
class MasFLDividesByTheCohort(MasFL):
    def step(self, space, state, update, *, out=None):
        after, outcome = super().step(space, state, update, out=out)
        if outcome.model is None:
            return after, outcome
        return after | {"c": 2 * after["c"] - state["c"]}, outcome


@caught_by("MasFL", "c_is_the_mean_of_all_who_joined")
class MasFLForgetsWhoJoined(MasFL):
    def step(self, space, state, update, *, out=None):
        after, outcome = super().step(space, state, update, out=out)
        return after | {"joined": min(after["joined"], 3)}, outcome


@caught_by("MasFL", "masfl_waits_for_distinct_clients")
class MasFLCountsAnswers(MasFL):
    def step(self, space, state, update, *, out=None):
        return super().step(space, state, replace(update, client=object()), out=out)


@caught_by("MasFL", "c_is_the_mean_of_all_who_joined", "masfl_is_the_papers_loop")
class MasFLNeverStoresClientState(MasFL):
    """Mutant that never replaces the first control variate of a client."""

    def step(self, space, state, update, *, out=None):
        after, outcome = super().step(space, state, update, out=out)
        return after, Outcome(outcome.model, update.client_state or outcome.client_state, outcome.numbers)


@caught_by("ControlVariate", "masfl_is_the_papers_loop")
class ControlVariateForgetsItsOwn(ControlVariate):
    def train(self, space, message, loss, batches, client_state, *, generator):
        tensors = {name: t for name, t in message.tensors.items() if name != "control"}
        return super().train(space, replace(message, tensors=tensors), loss, batches, client_state, generator=generator)


@caught_by("AdaMasFL", "a_step_is_the_rate_at_most")
class AdaMasFLForgetsToDivide(AdaMasFL):
    """Mutant that uses displacements as directions."""

    def apply_step(self, state, update, g, out):
        model = combine(update.current, [update.points[0]], [self.rate], minus=update.base, out=out)
        return model, {"norm": float((model - update.current).norm())}


@caught_by("AdaMasFL", "a_step_is_the_rate_at_most", "no_scale_of_the_losses_matters")
class AdaMasFLMovesAlongTheMomentum(AdaMasFL):
    def apply_step(self, state, update, g, out):
        model = interpolate(update.current, update.current - g, self.rate, out=out)
        return model, {"norm": float((model - update.current).norm())}


@caught_by("Normalised", "no_scale_of_the_losses_matters", "a_zero_direction_ends_the_loop")
class NormalisedWithAnEpsilon(Normalised):
    """Mutant that divides by ‖g‖ + ε and does not stop at g = 0."""

    def train(self, space, message, loss, batches, client_state, *, generator):
        theta, total, steps = message.start.clone(), 0, int(message.numbers["steps"])
        for i in range(steps):
            x = theta.clone().requires_grad_()
            (slope,) = torch.autograd.grad(loss(x, batches[i % len(batches)]), x)
            total = total + slope
            if not message.numbers["opening"]:
                beta = message.numbers["beta"]
                step = message.tensors["direction"] + beta * (slope - message.tensors.get("control", 0))
                theta = theta - message.numbers["rate"] * step / (step.norm() + 1e-6)
        return Payload(theta[None], 1, {"gradient": total / steps}, {"opening": message.numbers["opening"]})


test_every_law_holds, test_every_mutant_is_caught_by_its_laws = CATALOGUE.tests()


def test_every_law_catches_a_mutant():
    assert {law for _, laws in MUTANTS.values() for law in laws} == set(LAWS)
    assert {name for changes, _ in MUTANTS.values() for name in changes} == set(RIGHT)
