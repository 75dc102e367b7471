"""Mutants of rules, each with the laws that must detect it."""

import copy
import math
from dataclasses import dataclass, replace

import pytest
import torch

from manifoldagg.corrections import DelayCompensated, OrthoDC, Position, Tangent
from manifoldagg.federated import Outcome, Update
from manifoldagg.federated import rules as shipped
from manifoldagg.federated.staleness import Constant
from manifoldagg.manifolds import Flat
from tests.federated.mutants import Catalogue
from tests.support import draw, relative

pytestmark = pytest.mark.usefixtures("as_shipped")

SPACE = Flat(6)
RIGHT = {name: getattr(shipped, name) for name in shipped.__all__}
CATALOGUE = Catalogue(RIGHT)
LAWS, MUTANTS, law, caught_by = CATALOGUE.laws, CATALOGUE.mutants, CATALOGUE.law, CATALOGUE.caught_by


def update(seed, n=1, **known):
    base, current = draw(seed, 2, 6)
    return Update(0, base, current, draw(seed + 1, n, 6), **known)


def play(rule, *updates):
    """Return the state after several updates, and the last outcome."""
    state = rule.init(SPACE, updates[0].current)
    for given_ in updates:
        state, outcome = rule.step(SPACE, state, given_)
    return state, outcome


def moved(rule, *updates):
    return play(rule, *updates)[1].model - updates[-1].current


def plain(tree):
    """Return a tree with lists of numbers in place of tensors."""
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map(plain, tree))
    return tree.tolist() if isinstance(tree, torch.Tensor) else tree


def displacement(given_):
    return given_.points[-1] - given_.base


@law
def asgd_takes_the_displacement_times_weight_and_rate(k):
    given_ = update(0, weight=0.5, staleness=2)
    assert relative(moved(k.ASGD(0.5), given_), 0.25 * displacement(given_)) <= 1e-14


@law
def fedasync_mixes_the_models(k):
    given_ = update(1, staleness=3)
    rule = k.FedAsync(0.5, staleness=lambda x: 1 / (1 + x))
    assert relative(moved(rule, given_), 0.125 * (given_.points[0] - given_.current)) <= 1e-13


@law
def fedortho_leaves_the_drift_alone(k):
    for seed in (2, 3, 4, 5):
        given_ = update(seed)
        g = given_.current - given_.base
        assert abs(float(moved(k.FedOrtho(0.5), given_) @ g)) <= 1e-13


@law
def fedgs_removes_conflicts_only(k):
    for seed in range(8):
        given_ = update(seed)
        g, v = given_.current - given_.base, displacement(given_)
        expected = v - min(0.0, float(v @ g)) / float(g @ g) * g
        assert relative(moved(k.FedGS(1.0), given_), expected) <= 1e-13


@law
def asyncbezier_goes_its_part_of_the_chord(k):
    given_ = update(6, 2)
    full = moved(k.AsyncBezier(1.0), given_).norm()
    assert float(moved(k.AsyncBezier(0.3), given_).norm() / full) == pytest.approx(0.3, rel=1e-9)


@law
def the_penalty_is_the_papers(k):
    given_ = update(7)
    g, psi = given_.current - given_.base, moved(k.AsyncBezier(1.0), given_)
    penalty = 1 + 0.5 * (psi.norm() / g.norm() - 1)
    assert relative(moved(k.AsyncBezier(0.2, decay=0.5), given_), 0.2 * penalty * psi) <= 1e-12


@law
def rates_are_those_of_the_version(k):
    _, outcome = play(k.ASGD(lambda version: 0.1 * (version + 1)), update(8), update(9), update(10))
    assert outcome.numbers["rate"] == pytest.approx(0.3)


@law
def fedbuff_answers_the_golden_scalar(k):
    def point(x):
        return torch.tensor([x, 0, 0, 0, 0, 0], dtype=torch.float64)

    rule, zero = k.FedBuff(2), point(0.0)
    state, outcome = play(rule, Update(0, zero, zero, point(1.0)[None]), Update(0, zero, zero, point(2.0)[None]))
    model = outcome.model
    assert model is not None
    assert model[0] == 1.5
    state, _ = rule.step(SPACE, state, Update(0, model, model, (model + point(1.0))[None]))
    state, outcome = rule.step(SPACE, state, Update(0, zero, model, point(4.0)[None], staleness=1))
    assert float(outcome.model[0]) == pytest.approx(2 + math.sqrt(2), rel=1e-14)


@law
def a_normalised_fedbuff_weighs_by_the_data(k):
    """The first update has 1 sample of 1 known sample, and the second has 3 of 4.

    Their mean has the weights 1 to 3, although other totals were known when they arrived.
    """
    first, second = update(40, weight=1.0, share=1.0), update(42, weight=0.75, share=3.0)
    rule = k.FedBuff(2, staleness=Constant(), normalise=True, weighted=True)
    assert relative(moved(rule, first, second), (displacement(first) + 3 * displacement(second)) / 4) <= 1e-13
    rule = replace(rule, normalise=False)
    assert relative(moved(rule, first, second), (displacement(first) + 0.75 * displacement(second)) / 2) <= 1e-13


@law
def asynccorrected_moves_as_its_correction_says(k):
    given_ = update(44)
    assert (
        relative(moved(k.AsyncCorrected(1.0, correction=Position()), given_), given_.points[0] - given_.current)
        <= 1e-13
    )


@law
def waiting_rules_wait(k):
    given_ = update(11)
    for rule in (k.FedBuff(3), k.FedAvg(3), k.FedAdam(3)):
        state = rule.init(SPACE, given_.current)
        for waiting in (1, 2, 0):
            state, outcome = rule.step(SPACE, state, given_)
            assert (outcome.model is None) == (waiting > 0)
            assert outcome.numbers["buffered"] == waiting


@law
def fedavg_is_the_weighted_mean_again_and_again(k):
    for weighted in (True, False):
        rule = k.FedAvg(2, weighted=weighted)
        updates = [update(12, weight=0.2), replace(update(14, weight=0.6), current=update(12).current)]
        shares = [0.25, 0.75] if weighted else [0.5, 0.5]
        mean = sum(s * displacement(u) for s, u in zip(shares, updates, strict=True))
        assert relative(moved(rule, *updates), mean) <= 1e-13
        assert relative(moved(rule, *updates, *updates), mean) <= 1e-13


@law
def fedadam_is_the_papers_loop(k):
    rule, x = k.FedAdam(1, 0.3), draw(16, 6)
    state, m, v = rule.init(SPACE, x), 0.0, 1e-6
    for i in range(3):
        given_ = Update(0, x, x, draw(17 + i, 1, 6))
        delta = displacement(given_)
        m, v = 0.9 * m + 0.1 * delta, 0.99 * v + 0.01 * delta**2
        expected = x + 0.3 * m / (v**0.5 + 1e-3)
        state, outcome = rule.step(SPACE, state, given_)
        x = outcome.model
        assert relative(x, expected) <= 1e-13


@law
def dcasgd_is_the_papers_loop(k):
    square = 0.0
    rule = k.DCASGD(1.0)
    state = rule.init(SPACE, draw(0, 6))
    for seed in (20, 22, 24):
        given_ = update(seed)
        v, g = displacement(given_), given_.current - given_.base
        square = 0.95 * square + 0.05 * v * v
        state, outcome = rule.step(SPACE, state, given_)
        expected = given_.current + v - 2 / (square + 1e-7) ** 0.5 * v * v * g
        assert relative(outcome.model, expected) <= 1e-12


@law
def steps_leave_their_input_alone(k):
    for rule in (k.ASGD(0.5), k.FedBuff(3), k.FedAvg(3), k.FedAdam(1), k.DCASGD(0.5), k.Momentum(RIGHT["ASGD"](0.5))):
        state, given_ = rule.init(SPACE, draw(0, 6)), update(26)
        for _ in range(2):
            kept = copy.deepcopy((state, given_.base, given_.current, given_.points))
            after, _ = rule.step(SPACE, state, given_)
            assert plain(kept) == plain((state, given_.base, given_.current, given_.points))
            state = after


@law
def momentum_is_a_geometric_sum(k):
    given_ = update(28)
    step = displacement(given_)
    rule = k.Momentum(RIGHT["ASGD"](1.0), beta=0.5)
    assert relative(moved(rule, given_, given_, given_), 1.75 * step) <= 1e-13


@caught_by("ASGD", "asgd_takes_the_displacement_times_weight_and_rate")
class ASGDForgetsTheWeight(shipped.ASGD):
    def step_size(self, state, update, penalty):
        return super().step_size(state, replace(update, weight=1.0), penalty)


@caught_by("ASGD", "asgd_takes_the_displacement_times_weight_and_rate")
class ASGDReadsPositions(shipped.ASGD):
    @property
    def correction(self):
        return Position()


@caught_by("ASGD", "rates_are_those_of_the_version")
class ASGDNeverCounts(shipped.ASGD):
    def step(self, space, state, update, *, out=None):
        return state, super().step(space, state, update, out=out)[1]


@caught_by("FedAsync", "fedasync_mixes_the_models")
class FedAsyncReadsDisplacements(shipped.FedAsync):
    @property
    def correction(self):
        return Tangent()


@caught_by("FedAsync", "fedasync_mixes_the_models")
class FedAsyncIgnoresStaleness(shipped.FedAsync):
    def step_size(self, state, update, penalty):
        return super().step_size(state, replace(update, staleness=0), penalty)


@caught_by("FedAsync", "fedasync_mixes_the_models")
class FedAsyncCountsStalenessFromOne(shipped.FedAsync):
    def step_size(self, state, update, penalty):
        return super().step_size(state, replace(update, staleness=update.staleness + 1), penalty)


@caught_by("FedOrtho", "fedortho_leaves_the_drift_alone")
class FedOrthoRemovesConflictsOnly(shipped.FedOrtho):
    @property
    def correction(self):
        return OrthoDC(0.0)


@caught_by("FedGS", "fedgs_removes_conflicts_only")
class FedGSAlwaysProjects(shipped.FedGS):
    @property
    def correction(self):
        return OrthoDC(1.0)


@caught_by("AsyncBezier", "asyncbezier_goes_its_part_of_the_chord")
class AsyncBezierTakesTheRateForTheParameter(shipped.AsyncBezier):
    def step(self, space, state, update, *, out=None):
        v = OrthoDC(1.0)(space, update.base, update.current, update.points - update.base)
        s = self.rate
        weights = [2 * s * (1 - s), s * s] if len(v) == 2 else [s]
        model = update.current + sum(w * row for w, row in zip(weights, v, strict=True))
        return {"version": 1}, Outcome(model, None, {})


@caught_by("AsyncBezier", "the_penalty_is_the_papers")
class AsyncBezierTurnsThePenaltyOver(shipped.AsyncBezier):
    def step_size(self, state, update, penalty):
        return super().step_size(state, update, lambda strength: 1 / penalty(strength))


@caught_by("AsyncBezier", "the_penalty_is_the_papers")
class AsyncBezierAlwaysPenalisesInFull(shipped.AsyncBezier):
    def step_size(self, state, update, penalty):
        return super().step_size(state, update, lambda strength: penalty(min(1.0, 2 * strength)))


@caught_by("FedBuff", "fedbuff_answers_the_golden_scalar")
class FedBuffAgainstTheCurrentModel(shipped.FedBuff):
    def step(self, space, state, update, *, out=None):
        return super().step(space, state, replace(update, base=update.current), out=out)


@caught_by("FedBuff", "fedbuff_answers_the_golden_scalar")
class FedBuffIgnoresStaleness(shipped.FedBuff):
    def update_weight(self, update):
        return 1.0


@caught_by("FedBuff", "fedbuff_answers_the_golden_scalar")
class FedBuffNormalises(shipped.FedBuff):
    def divisor(self, total):
        return total


@caught_by("AsyncCorrected", "asynccorrected_moves_as_its_correction_says")
class AsyncCorrectedForgetsItsCorrection(shipped.AsyncCorrected):
    def step(self, space, state, update, *, out=None):
        return super(type(self), replace(self, correction=Tangent())).step(space, state, update, out=out)


@caught_by("FedBuff", "a_normalised_fedbuff_weighs_by_the_data")
class FedBuffDividesByTotalsThatChange(shipped.FedBuff):
    def update_weight(self, update):
        return self.staleness(update.staleness) * (update.weight if self.weighted else 1.0)


@caught_by("FedBuff", "fedbuff_answers_the_golden_scalar")
class FedBuffSums(shipped.FedBuff):
    def divisor(self, total):
        return 1.0


@caught_by("FedBuff", "fedbuff_answers_the_golden_scalar", "waiting_rules_wait")
class FedBuffWaitsForOneMore(shipped.FedBuff):
    @property
    def buffer_size(self):
        return self.size + 1


@caught_by("FedBuff", "steps_leave_their_input_alone")
class FedBuffWritesIntoItsOldState(shipped.FedBuff):
    def step(self, space, state, update, *, out=None):
        after, outcome = super().step(space, state, update, out=out)
        if "buffer" in state and "buffer" in after:
            after["buffer"] = state["buffer"].copy_(after["buffer"])
        return after, outcome


@caught_by("FedAvg", "fedavg_is_the_weighted_mean_again_and_again")
class FedAvgForgetsWeights(shipped.FedAvg):
    def update_weight(self, update):
        return 1.0


@caught_by("FedAvg", "fedavg_is_the_weighted_mean_again_and_again")
class FedAvgDividesByTheNumber(shipped.FedAvg):
    def divisor(self, total):
        return float(self.cohort)


@caught_by("FedAvg", "fedavg_is_the_weighted_mean_again_and_again")
class FedAvgKeepsTheLastRound(shipped.FedAvg):
    def step(self, space, state, update, *, out=None):
        after, outcome = super().step(space, state, update, out=out)
        return (after if outcome.model is None else after | {"buffer": state["buffer"]}), outcome


@caught_by("FedAdam", "fedadam_is_the_papers_loop")
class FedAdamCorrectsBias(shipped.FedAdam):
    def apply_step(self, state, mean, rate, out):
        t = state["version"] + 1
        rate = rate * (1 - self.beta2**t) ** 0.5 / (1 - self.beta1**t)
        return super().apply_step(state, mean, rate, out)


@caught_by("FedAdam", "fedadam_is_the_papers_loop")
class FedAdamSwapsItsBetas(shipped.FedAdam):
    def apply_step(self, state, mean, rate, out):
        other = shipped.FedAdam(self.cohort, beta1=self.beta2, beta2=self.beta1)
        return other.apply_step(state, mean, rate, out)


@caught_by("FedAdam", "fedadam_is_the_papers_loop")
class FedAdamBeginsAtZero(shipped.FedAdam):
    def init(self, space, start):
        return super().init(space, start) | {"v": torch.zeros_like(start)}


@caught_by("DCASGD", "dcasgd_is_the_papers_loop")
class DCASGDForgetsTheMeanSquare(shipped.DCASGD):
    def step(self, space, state, update, *, out=None):
        after, outcome = super().step(space, {"version": state["version"]}, update, out=out)
        return after, outcome


@caught_by("DCASGD", "dcasgd_is_the_papers_loop")
class DCASGDCompensatesTheOtherWay(shipped.DCASGD):
    @property
    def correction(self):
        @dataclass(frozen=True)
        class Backwards(DelayCompensated):
            def coefficients(self, gram, state=None):
                lines, state = super().coefficients(gram, state)
                lines[:, gram.num_displacements + 1 :] *= -1
                return lines, state

        return Backwards(2.0, adaptive=True)


@caught_by("DCASGD", "dcasgd_is_the_papers_loop")
class DCASGDIsConstant(shipped.DCASGD):
    @property
    def correction(self):
        return DelayCompensated(2.0)


@caught_by("Momentum", "momentum_is_a_geometric_sum")
class MomentumDampsTheStepToo(shipped.Momentum):
    def step(self, space, state, update, *, out=None):
        after, outcome = super().step(space, state, update, out=out)
        return after | {"velocity": (1 - self.beta) * after["velocity"]}, outcome


test_every_law_holds, test_every_mutant_is_caught_by_its_laws = CATALOGUE.tests()


def test_there_are_enough_mutants():
    assert len(MUTANTS) >= 12
    assert {name for changes, _ in MUTANTS.values() for name in changes} >= {
        *("ASGD", "DCASGD", "FedAsync", "FedOrtho", "FedGS", "FedBuff", "FedAvg", "FedAdam", "AsyncBezier"),
    }
    assert {law for _, laws in MUTANTS.values() for law in laws} == set(LAWS)
