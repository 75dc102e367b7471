"""Mutants of the rules for stale clients, each with the laws that must detect it."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from manifoldagg.federated import Message, Update
from manifoldagg.federated.rules import asyncfeded, ca2fl, defedavg, fadas, generalizedasyncsgd
from manifoldagg.manifolds import Flat
from tests.federated.mutants import Catalogue
from tests.support import draw, relative

pytestmark = pytest.mark.usefixtures("as_shipped")

SPACE = Flat(6)
ZERO = torch.zeros(6).double()
RIGHT = {
    "CA2FL": ca2fl.CA2FL,
    "FADAS": fadas.FADAS,
    "AsyncFedED": asyncfeded.AsyncFedED,
    "GeneralizedAsyncSGD": generalizedasyncsgd.GeneralizedAsyncSGD,
    "DeFedAvg": defedavg.DeFedAvg,
}
CATALOGUE = Catalogue(RIGHT)
LAWS, MUTANTS, law, caught_by = CATALOGUE.laws, CATALOGUE.mutants, CATALOGUE.law, CATALOGUE.caught_by


def went(rule, *moves, base=None):
    """Return the movement of the model for each displacement (client, move, options).

    The entry is `None` if the update is buffered.
    """
    model, memories, steps = ZERO, {}, []
    state = rule.init(SPACE, model)
    for client, move, *facts in moves:
        start = model if base is None else base
        update = Update(client, start, model, (start + move)[None], client_state=memories.get(client))
        state, outcome = rule.step(SPACE, state, replace(update, **dict(*facts)))
        memories[client] = outcome.client_state
        steps.append(None if outcome.model is None else outcome.model - model)
        model = model if outcome.model is None else outcome.model
    return steps


A, B, C, D = draw(0, 4, 6)


@law
def ca2fl_with_everyone_in_every_buffer_is_their_mean(k):
    rule = k.CA2FL(2, clients=2)
    steps = went(rule, (0, A), (1, B), (1, C), (0, D), (0, B), (1, C))
    for step, mean in zip(steps[1::2], ((A + B) / 2, (C + D) / 2, (B + C) / 2), strict=True):
        assert relative(step, mean) <= 1e-13


@law
def ca2fl_remembers_who_is_not_there(k):
    steps = went(k.CA2FL(1, clients=4), (0, A), (1, B), (0, C))
    for step, v in zip(steps, (A, A / 4 + B, (A + B) / 4 + C - A), strict=True):
        assert relative(step, v) <= 1e-13


@law
def ca2fl_calibrates_by_what_was_held_before(k):
    steps = went(k.CA2FL(2, clients=1), (0, A), (0, B), (0, C), (0, D))
    assert relative(steps[1], (A + B) / 2) <= 1e-13
    assert relative(steps[3], B + (C + D) / 2 - B) <= 1e-13


@law
def ca2fl_keeps_the_last_of_several(k):
    steps = went(k.CA2FL(2, clients=2), (0, A), (0, B), (1, C), (1, C))
    assert relative(steps[3], B / 2 + C) <= 1e-13


@law
def fadas_is_the_papers_loop(k):
    m, v, largest = 0.0, torch.zeros(6).double(), torch.zeros(6).double()
    steps = went(k.FADAS(1, 0.3, epsilon=1e-3), *((0, size * A) for size in (5.0, 1.0, 0.1)))
    for size, step in zip((5.0, 1.0, 0.1), steps, strict=True):
        m, v = 0.9 * m + 0.1 * size * A, 0.99 * v + 0.01 * (size * A) ** 2
        largest = torch.maximum(largest, v)
        assert relative(step, 0.3 * m / (largest.sqrt() + 1e-3)) <= 1e-12


@law
def fadas_without_moments_divides_by_the_largest(k):
    steps = went(k.FADAS(1, 1.0, beta1=0.0, beta2=0.0), (0, 4 * A), (0, A))
    assert relative(steps[1], A.sign() / 4) <= 1e-6


@law
def fadas_minds_the_stalest_of_a_buffer(k):
    def rates(rule):
        first = went(rule, (0, A, {"staleness": 0}), (0, A, {"staleness": 0}))[1].norm()
        lates = [{"staleness": 4}, {"staleness": 0}, {"staleness": 0}, {"staleness": 0}]
        steps = went(rule, *((0, A, late) for late in lates))
        return (steps[1].norm() / first).item(), (steps[3].norm() / first).item()

    options = {"beta1": 0.0, "beta2": 0.0}
    assert rates(k.FADAS(2, 0.5, **options)) == pytest.approx((0.5, 1.0), rel=1e-6)
    assert rates(k.FADAS(2, 0.1, **options)) == pytest.approx((1.0, 1.0), rel=1e-6)


@law
def displacements_are_against_the_clients_base(k):
    for rule in (k.CA2FL(1), k.DeFedAvg(1)):
        assert relative(went(rule, (0, A), (1, A), base=3 * D)[0], A) <= 1e-13
    far, near = (went(k.FADAS(1, epsilon=1.0), (0, A), base=base)[0] for base in (D, ZERO))
    assert relative(far, near) <= 1e-13
    (near,) = went(k.AsyncFedED(), (0, A), base=D)
    assert relative(near, A / 2) <= 1e-13


@law
def asyncfeded_is_the_papers_step(k):
    rule, current = k.AsyncFedED(0.7, epsilon=0.5, gain=2.0, epochs=4, warm_up=0), A / A.norm()
    update = Update(0, ZERO, current, 0.8 * current[None])
    _, outcome = rule.step(SPACE, {"version": 0}, update)
    # γ = 1 / .8, and ⌊2 (1 - 1.25)⌋ = -1.
    assert relative(outcome.model - current, 0.7 / 1.75 * 0.8 * current) <= 1e-13
    assert outcome.client_state["epochs"] == 3
    assert rule.message(Flat(1), {"version": 1}, current, outcome.client_state).numbers == {"epochs": 3.0}
    _, outcome = rule.step(SPACE, {"version": 0}, replace(update, points=0.01 * current[None]))
    assert outcome.client_state["epochs"] == 1


@law
def asyncfeded_warms_up(k):
    steps = went(k.AsyncFedED(), *((0, A) for _ in range(11)))
    assert relative(steps[9], A / 2) <= 1e-13
    assert relative(steps[10], A) <= 1e-13


@law
def generalized_asyncsgd_is_unbiased(k):
    routing, gradients = (0.1, 0.3, 0.6), (A, B, C)
    rule = k.GeneralizedAsyncSGD(routing, 2.0)
    steps = [went(rule, (i, -g, {"staleness": i}))[0] for i, g in enumerate(gradients)]
    mean = sum(p * step for p, step in zip(routing, steps, strict=True))
    assert relative(mean, -2 * (A + B + C) / 3) <= 1e-13


@law
def defedavg_weighs_all_clients_alike(k):
    moves = (A, B, C, D)
    steps = [
        went(k.DeFedAvg(2), *((i, moves[i], {"weight": 0.1 + i, "staleness": i}) for i in pair))[1]
        for pair in itertools.combinations(range(4), 2)
    ]
    assert relative(sum(steps) / 6, sum(moves) / 4) <= 1e-13


@law
def defedavg_draws_every_client_once(k):
    generator = np.random.default_rng(0)
    seen = {tuple(sorted(k.DeFedAvg(2).draw("abc", generator))) for _ in range(100)}
    assert seen == {("a", "b"), ("a", "c"), ("b", "c")}


@caught_by("CA2FL", "ca2fl_remembers_who_is_not_there")
class CA2FLNeverFillsItsCache(ca2fl.CA2FL):
    def step(self, space, state, update, *, out=None):
        after, outcome = super().step(space, state, replace(update, client_state=None), out=out)
        after.pop("sum", None)
        return after, replace(outcome, client_state=None)


@caught_by("CA2FL", "ca2fl_with_everyone_in_every_buffer_is_their_mean", "ca2fl_remembers_who_is_not_there")
class CA2FLForgetsTheMean(ca2fl.CA2FL):
    def step(self, space, state, update, *, out=None):
        after, outcome = super().step(space, {k: v for k, v in state.items() if k != "sum"}, update, out=out)
        return after, outcome


@caught_by("CA2FL", "ca2fl_calibrates_by_what_was_held_before")
class CA2FLCalibratesByItsOwnBuffer(ca2fl.CA2FL):
    def step(self, space, state, update, *, out=None):
        memory = update.client_state and {**update.client_state, "round": -1}
        return super().step(space, state, replace(update, client_state=memory), out=out)


@caught_by("CA2FL", "ca2fl_keeps_the_last_of_several")
class CA2FLKeepsTheFirstOfSeveral(ca2fl.CA2FL):
    def step(self, space, state, update, *, out=None):
        again = update.client_state and update.client_state["round"] == state["version"]
        after, outcome = super().step(space, state, update, out=out)
        if again and "sum" in after:
            after["sum"] = after["sum"] + update.client_state["cache"] - outcome.client_state["cache"]
        return after, outcome


@caught_by("CA2FL", "ca2fl_remembers_who_is_not_there")
class CA2FLForgetsHowManyThereAre(ca2fl.CA2FL):
    def step(self, space, state, update, *, out=None):
        return ca2fl.CA2FL(self.size, self.rate).step(space, state, update, out=out)


@caught_by("CA2FL", "displacements_are_against_the_clients_base")
class CA2FLAgainstTheCurrentModel(ca2fl.CA2FL):
    def step(self, space, state, update, *, out=None):
        return super().step(space, state, replace(update, base=update.current), out=out)


@caught_by("FADAS", "fadas_is_the_papers_loop", "fadas_without_moments_divides_by_the_largest")
class FADASDividesByThePresentSquare(fadas.FADAS):
    def step(self, space, state, update, *, out=None):
        return super().step(space, state | {"largest": torch.zeros_like(state["largest"])}, update, out=out)


@caught_by("FADAS", "fadas_is_the_papers_loop")
class FADASCorrectsBias(fadas.FADAS):
    def apply_step(self, state, mean, rate, out):
        t = state["version"] + 1
        rate = rate * (1 - self.beta2**t) ** 0.5 / (1 - self.beta1**t)
        return super().apply_step(state, mean, rate, out)


@caught_by("FADAS", "fadas_minds_the_stalest_of_a_buffer")
class FADASScalesItsRate(fadas.FADAS):
    def delay_adapted_rate(self, rate, max_staleness):
        return rate / max_staleness if max_staleness > self.delay_threshold else rate


@caught_by("FADAS", "fadas_minds_the_stalest_of_a_buffer")
class FADASMindsTheLastOnly(fadas.FADAS):
    def step(self, space, state, update, *, out=None):
        return super().step(space, state | {"max_staleness": 0}, update, out=out)


@caught_by("FADAS", "fadas_minds_the_stalest_of_a_buffer")
class FADASNeverForgetsADelay(fadas.FADAS):
    def step(self, space, state, update, *, out=None):
        late = max(state["max_staleness"], update.staleness)
        after, outcome = super().step(space, state, update, out=out)
        return after | {"max_staleness": late}, outcome


@caught_by("FADAS", "displacements_are_against_the_clients_base")
class FADASAgainstTheCurrentModel(fadas.FADAS):
    def step(self, space, state, update, *, out=None):
        return super().step(space, state, replace(update, base=update.current), out=out)


@caught_by("AsyncFedED", "asyncfeded_is_the_papers_step")
class AsyncFedEDTurnsTheRatioOver(asyncfeded.AsyncFedED):
    def step(self, space, state, update, *, out=None):
        moved = update.points[0] - update.base
        turned = update.base + moved / moved.norm() * (update.current - update.base).norm()
        other = replace(update, current=update.base + moved, points=turned[None])
        state, outcome = super().step(space, state, other)
        rate = outcome.numbers["rate"]
        return state, replace(outcome, model=update.current + rate * moved)


@caught_by("AsyncFedED", "asyncfeded_is_the_papers_step")
class AsyncFedEDRoundsItsEpochs(asyncfeded.AsyncFedED):
    def step(self, space, state, update, *, out=None):
        state, outcome = super().step(space, state, update, out=out)
        change = round(self.gain * (self.target - outcome.numbers["distance"]))
        return state, replace(outcome, client_state={"epochs": max(1, self.next_epochs(update.client_state) + change)})


@caught_by("AsyncFedED", "asyncfeded_is_the_papers_step")
class AsyncFedEDAsksForNoEpochs(asyncfeded.AsyncFedED):
    def step(self, space, state, update, *, out=None):
        state, outcome = super().step(space, state, update, out=out)
        change = math.floor(self.gain * (self.target - outcome.numbers["distance"]))
        return state, replace(outcome, client_state={"epochs": self.next_epochs(update.client_state) + change})


@caught_by("AsyncFedED", "asyncfeded_is_the_papers_step")
class AsyncFedEDNeverTells(asyncfeded.AsyncFedED):
    def message(self, space, state, current, client_state):
        return Message(current, numbers={"epochs": float(self.epochs)})


@caught_by("AsyncFedED", "asyncfeded_warms_up", "displacements_are_against_the_clients_base")
class AsyncFedEDIsWarm(asyncfeded.AsyncFedED):
    def step(self, space, state, update, *, out=None):
        return replace(self, warm_up=0).cold(space, state, update, out=out)

    def cold(self, space, state, update, *, out=None):
        return super().step(space, state, update, out=out)


@caught_by("AsyncFedED", "asyncfeded_warms_up")
class AsyncFedEDCountsRoundsFromOne(asyncfeded.AsyncFedED):
    def step(self, space, state, update, *, out=None):
        after, outcome = super().step(space, {"version": state["version"] + 1}, update, out=out)
        return {"version": after["version"] - 1}, outcome


@caught_by("GeneralizedAsyncSGD", "generalized_asyncsgd_is_unbiased")
class GeneralizedAsyncSGDForgetsTheRouting(generalizedasyncsgd.GeneralizedAsyncSGD):
    def step_size(self, state, update, penalty):
        return self.rate


@caught_by("GeneralizedAsyncSGD", "generalized_asyncsgd_is_unbiased")
class GeneralizedAsyncSGDForgetsTheNumber(generalizedasyncsgd.GeneralizedAsyncSGD):
    def step_size(self, state, update, penalty):
        return self.rate / self.routing[update.client]


@caught_by("GeneralizedAsyncSGD", "generalized_asyncsgd_is_unbiased")
class GeneralizedAsyncSGDIsClamped(generalizedasyncsgd.GeneralizedAsyncSGD):
    overshoot = "clamp"


@caught_by("GeneralizedAsyncSGD", "generalized_asyncsgd_is_unbiased")
class GeneralizedAsyncSGDMindsStaleness(generalizedasyncsgd.GeneralizedAsyncSGD):
    def step_size(self, state, update, penalty):
        return super().step_size(state, update, penalty) / (1 + update.staleness)


@caught_by("DeFedAvg", "defedavg_weighs_all_clients_alike")
class DeFedAvgWeighsByData(defedavg.DeFedAvg):
    def update_weight(self, update):
        return update.weight


@caught_by("DeFedAvg", "defedavg_weighs_all_clients_alike")
class DeFedAvgMindsStaleness(defedavg.DeFedAvg):
    def update_weight(self, update):
        return (1 + update.staleness) ** -0.5


@caught_by("DeFedAvg", "displacements_are_against_the_clients_base")
class DeFedAvgAgainstTheCurrentModel(defedavg.DeFedAvg):
    def step(self, space, state, update, *, out=None):
        return super().step(space, state, replace(update, base=update.current), out=out)


@caught_by("DeFedAvg", "defedavg_draws_every_client_once")
class DeFedAvgDrawsWithReplacement(defedavg.DeFedAvg):
    def draw(self, clients, generator):
        return [clients[i] for i in generator.integers(len(clients), size=self.cohort)]


test_every_law_holds, test_every_mutant_is_caught_by_its_laws = CATALOGUE.tests()


def test_there_are_enough_mutants():
    assert len(MUTANTS) >= 20
    assert {name for changes, _ in MUTANTS.values() for name in changes} == set(RIGHT)
    assert {law for _, laws in MUTANTS.values() for law in laws} == set(LAWS)
