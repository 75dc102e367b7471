"""Rates that follow the version, and weights that follow the staleness."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Update
from manifoldagg.federated.rules import ASGD, FedAdam, FedAsync, FedAvg, FedBuff
from manifoldagg.federated.schedules import Cosine, Cyclic, rate_at
from manifoldagg.manifolds import Flat
from tests.support import draw

pytestmark = pytest.mark.usefixtures("as_shipped")


@given(st.floats(0, 1), st.floats(0.01, 2), st.integers(2, 9))
def test_a_cycle_repeats_and_is_its_own_mirror_image(low, rise, period):
    rate = Cyclic(low, low + rise, period)
    values = [rate(version) for version in range(3 * period + 1)]
    assert values == [rate(version + period) for version in range(3 * period + 1)]
    # Two roundings of numbers no larger than 3.
    assert values == pytest.approx(values[::-1], abs=1e-15)
    assert values[0] == low
    assert max(values) <= low + rise
    if period % 2 == 0:
        assert values[period // 2] == low + rise


@given(st.floats(0.01, 2), st.floats(0, 2), st.integers(1, 9))
def test_a_cosine_goes_from_start_to_end_and_stays_or_begins_again(start, end, period):
    once, again = Cosine(start, end, period), Cosine(start, end, period, restarts=True)
    assert once(0) == again(0) == again(period) == pytest.approx(start, rel=1e-15)
    assert once(period) == once(period + 7) == pytest.approx(end, abs=1e-15)
    assert once(period) == pytest.approx(end)
    assert Cosine(start, end, 10**400)(period) == pytest.approx(start)
    middle = [once(version) + once(period - version) for version in range(period + 1)]
    assert middle == pytest.approx([start + end] * (period + 1), rel=1e-14)


def test_numbers_and_functions_are_rates():
    assert rate_at(0.5, 3) == 0.5
    assert rate_at(lambda version: 1 / (1 + version), 3) == 0.25


@pytest.mark.parametrize("make", [ASGD, FedAsync, lambda rate: FedBuff(2, rate), lambda rate: FedAvg(2, rate)])
def test_a_rule_asks_for_its_rate_once_a_version(make):
    asked = []
    rule = make(lambda version: asked.append(version) or 0.5)
    space, state, model = Flat(3), rule.init(Flat(3), draw(0, 3)), draw(0, 3)
    for i in range(4):
        state, outcome = rule.step(space, state, Update(0, draw(i, 3), model, draw(i + 9, 1, 3)))
        model = model if outcome.model is None else outcome.model
    assert asked == list(range(4 if rule.cohort == 1 and not isinstance(rule, FedBuff) else 2))


def test_a_schedule_gives_the_rate_of_each_step():
    rule, model = ASGD(Cosine(1.0, 0.0, 4)), draw(0, 3)
    state, rates = rule.init(Flat(3), model), []
    for i in range(5):
        state, outcome = rule.step(Flat(3), state, Update(0, model, model, draw(i, 1, 3)))
        rates.append(outcome.numbers["rate"])
    assert rates == pytest.approx([0.5 * (1 + math.cos(math.pi * i / 4)) for i in range(5)], abs=1e-15)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ASGD(0.0), "rate: expected a finite number > 0"),
        (lambda: Cyclic(0.5, 0.1, 4), "high: expected"),
        (lambda: Cyclic(0.0, 0.0, 4), "high: expected"),
        (lambda: Cyclic(-0.1, 0.1, 4), "low: expected"),
        (lambda: Cyclic(0.0, 0.1, 1), "period: expected an integer >= 2"),
        (lambda: Cosine(0.0, 0.1, 4), "start: expected"),
        (lambda: Cosine(0.1, -0.1, 4), "end: expected"),
        (lambda: Cosine(0.1, 0.0, 0), "period: expected"),
        (lambda: Cosine(0.1, 0.0, 4, restarts=1), "restarts: expected one of True, False"),
        (lambda: ASGD(Cyclic), "rate: expected an instance, got the class Cyclic"),
        (lambda: ASGD(torch.tensor(0.5)), "rate: expected a plain number, got tensor"),
        (lambda: ASGD(np.array(0.5)), "rate: expected a plain number, got array"),
        (lambda: rate_at(lambda version: math.inf, 0), "rate: expected a finite number >= 0"),
        (lambda: FedAdam(2, lambda version: "slow", beta1=2), "beta1: expected"),
    ],
)
def test_bad_input_is_refused_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
