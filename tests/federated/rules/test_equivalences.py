"""Tests of special cases in which two rules are equal."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldagg.corrections import OrthoDC, Position, Tangent
from manifoldagg.federated import Update
from manifoldagg.federated.rules import (
    ASGD,
    DCASGD,
    AsyncBezier,
    AsyncCorrected,
    FedAsync,
    FedAvg,
    FedBuff,
    FedGS,
    FedOrtho,
    Momentum,
)
from manifoldagg.federated.staleness import Constant
from manifoldagg.manifolds import Flat
from tests.support import draw, relative, seeds

SPACE = Flat(9)


def update(seed, n=1, dtype=torch.float64, **known):
    base, current = draw(seed, 2, 9, dtype=dtype)
    return Update(0, base, current, draw(seed + 1, n, 9, dtype=dtype), **known)


def move(rule, *updates):
    state = rule.init(SPACE, updates[0].current)
    for given_ in updates:
        state, outcome = rule.step(SPACE, state, given_)
    return outcome.model


@settings(max_examples=10)
@given(seeds, st.floats(0.01, 1), st.integers(0, 9), st.sampled_from([torch.float32, torch.float64]))
def test_a_buffer_of_one_without_staleness_weight_is_asgd_bit_for_bit(seed, rate, late, dtype):
    given_ = update(seed, dtype=dtype, staleness=late)
    assert torch.equal(move(FedBuff(1, rate, staleness=Constant()), given_), move(ASGD(rate), given_))
    assert torch.equal(move(FedAvg(1, rate), given_), move(ASGD(rate), given_))


@settings(max_examples=10)
@given(seeds, st.floats(0.01, 1))
def test_a_control_point_at_the_middle_makes_asyncbezier_fedortho(seed, rate):
    given_ = update(seed)
    middle = (given_.base + given_.points[0]) / 2
    curve = Update(0, given_.base, given_.current, torch.stack([middle, given_.points[0]]))
    assert relative(move(AsyncBezier(rate), curve), move(FedOrtho(rate), given_)) <= 1e-12
    assert relative(move(AsyncBezier(rate, threshold=0.0), curve), move(FedGS(rate), given_)) <= 1e-12
    assert relative(move(AsyncBezier(rate, threshold=-1.0), curve), move(ASGD(rate), given_)) <= 1e-12


@settings(max_examples=10)
@given(seeds, st.floats(0.01, 1))
def test_weights_of_four_fedasync_updates_equal_the_report(seed, alpha):
    r"""Report (7): $\Theta^t + \sum_i \alpha (1 - \alpha)^{k - i} \Delta_{i+1}$, i = 0 … k = 3."""
    base, clients = draw(seed, 9), draw(seed + 1, 4, 9)
    rule, current = FedAsync(alpha), base
    state = rule.init(SPACE, base)
    for late, client in enumerate(clients):
        state, outcome = rule.step(SPACE, state, Update(late, base, current, client[None], staleness=late))
        current = outcome.model
    expected = base + sum(alpha * (1 - alpha) ** (3 - i) * (client - base) for i, client in enumerate(clients))
    assert relative(current, expected) <= 1e-14


@settings(max_examples=8)
@given(seeds, st.floats(0.01, 1))
def test_fresh_updates_give_the_same_step_for_every_rule(seed, rate):
    start, client = draw(seed, 9), draw(seed + 1, 1, 9)
    fresh = Update(0, start, start, client)
    moved = move(ASGD(rate), fresh)
    rules = [FedAsync(rate), FedOrtho(rate), FedGS(rate), AsyncBezier(rate), AsyncBezier(rate, threshold="auto")]
    for rule in [*rules, FedBuff(1, rate), FedAvg(1, rate), DCASGD(rate), DCASGD(rate, variant="constant")]:
        assert relative(move(rule, fresh), moved) <= 1e-15


@settings(max_examples=6)
@given(seeds, st.floats(0.01, 1), st.integers(1, 3))
def test_named_rules_are_a_choice_of_correction(seed, rate, n):
    curve = update(seed, n)
    for threshold in (-1.0, 0.0, 0.3, 1.0):
        named, chosen = AsyncBezier(rate, threshold=threshold), AsyncCorrected(rate, correction=OrthoDC(threshold))
        assert torch.equal(move(named, curve), move(chosen, curve))
    plain = update(seed)
    pairs = [
        (ASGD(rate), Tangent()),
        (FedAsync(rate), Position()),
        (FedOrtho(rate), OrthoDC(1.0)),
        (FedGS(rate, update_form="position"), Position() >> OrthoDC(0.0)),
    ]
    for rule, correction in pairs:
        assert torch.equal(move(rule, plain), move(AsyncCorrected(rate, correction=correction), plain))


@settings(max_examples=10)
@given(seeds, st.floats(0.01, 1))
def test_fedortho_tangent_and_position_corrections_coincide(seed, rate):
    """The two corrections are equal for the threshold 1."""
    given_ = update(seed)
    other = AsyncCorrected(rate, correction=Position() >> OrthoDC(1.0))
    assert relative(move(FedOrtho(rate), given_), move(other, given_)) <= 1e-12


@settings(max_examples=10)
@given(seeds)
def test_zero_momentum_and_zero_compensation_have_no_effect(seed):
    first, second = update(seed), update(seed + 5)
    second = Update(0, second.base, first.current, second.points)
    assert torch.equal(move(Momentum(FedAsync(0.3), beta=0.0), first), move(FedAsync(0.3), first))
    alone = move(ASGD(0.5), second)
    for variant in ("constant", "adaptive"):
        assert relative(move(DCASGD(0.5, variant=variant, strength=0.0), second), alone) <= 1e-15


@pytest.mark.parametrize("size", [2, 5])
@settings(max_examples=6)
@given(seeds)
def test_full_buffer_equals_a_cohort_of_the_same_updates(size, seed):
    base, current = draw(seed, 2, 9)
    updates = [Update(i, base, current, draw(seed + i + 1, 1, 9)) for i in range(size)]
    buffered = move(FedBuff(size, 0.7, staleness=Constant()), *updates)
    assert torch.equal(buffered, move(FedBuff(size, 0.7, staleness=Constant(), normalise=True), *updates))
    assert torch.equal(buffered, move(FedAvg(size, 0.7, weighted=False), *updates))
