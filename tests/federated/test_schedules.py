"""Tests of rates that depend on the version, and of weights that depend on the staleness."""

import math
import re
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError, RuleError
from manifoldagg.federated import Payload, Server, Update
from manifoldagg.federated.rules import ACE, ASGD, CA2FL, AsyncFedED, FedAdam, FedAsync, FedAvg, FedBuff, MasFL, OrthoFL
from manifoldagg.federated.schedules import Cosine, Cyclic, rate_at, weight_at
from manifoldagg.federated.staleness import Hinge, Polynomial
from manifoldagg.manifolds import Flat
from tests.federated.fingerprint import fingerprint
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
def test_cosine_ends_at_its_end_value_or_restarts(start, end, period):
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
def test_rule_evaluates_its_rate_once_per_version(make):
    asked = []
    rule = make(lambda version: asked.append(version) or 0.5)
    space, state, model = Flat(3), rule.init(Flat(3), draw(0, 3)), draw(0, 3)
    for i in range(4):
        state, outcome = rule.step(space, state, Update(0, draw(i, 3), model, draw(i + 9, 1, 3)))
        model = model if outcome.model is None else outcome.model
    assert asked == list(range(4 if rule.cohort == 1 and not isinstance(rule, FedBuff) else 2))


@pytest.mark.parametrize("weight", [Polynomial(), Polynomial(3.0), Hinge(), Hinge(0.0)])
def test_staleness_beyond_float_range_has_the_weight_of_the_largest_float(weight):
    largest = weight_at(weight, int(sys.float_info.max))
    assert [weight_at(weight, 10**digits) for digits in (309, 400, 5000)] == [largest] * 3
    assert weight_at(weight, 10**308) >= largest


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
        (lambda: ASGD("1"), "rate: expected a finite number > 0, got '1'"),
        (lambda: ASGD(b"1"), "rate: expected a finite number > 0, got b'1'"),
        (lambda: ASGD(10**400), "rate: expected a finite number > 0, got a huge int"),
        (lambda: ASGD(10**5000), "rate: expected a finite number > 0, got a huge int"),
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
        (lambda: FedAdam(2, lambda version: "slow", beta1=2), "beta1: expected"),
    ],
)
def test_invalid_arguments_are_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


def complains(place):
    raise ArgumentError("place: expected another one")


UNUSABLE = {
    "infinite": (lambda place: math.inf, "expected a finite number >= 0, got inf"),
    "NaN": (lambda place: math.nan, "expected a finite number >= 0, got nan"),
    "negative": (lambda place: -1.0, "expected a finite number >= 0, got -1.0"),
    "a word": (lambda place: "fast", "expected a finite number >= 0, got 'fast'"),
    "nothing": (lambda place: None, "expected a finite number >= 0, got None"),
    "a truth": (lambda place: True, "expected a finite number >= 0, got True"),
    "a tensor": (lambda place: torch.tensor(0.5), "expected a plain number, got tensor(0.5000)"),
    "an array": (lambda place: np.array([0.5]), "expected a plain number, got ndarray of shape (1,)"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_invalid_value_of_schedule_raises_rule_error(name):
    function, words = UNUSABLE[name]
    with pytest.raises(RuleError, match=re.escape(f"rate(3): {words}")):
        rate_at(function, 3)
    with pytest.raises(RuleError, match=re.escape(f"staleness(2): {words}")):
        weight_at(function, 2)


def test_exception_in_schedule_is_propagated():
    with pytest.raises(ZeroDivisionError):
        rate_at(lambda version: 1 / version, 0)
    with pytest.raises(RuleError, match="place: expected another one"):
        weight_at(complains, 0)


SCHEDULED = {
    "ASGD": lambda f: ASGD(f),
    "FedAsync": lambda f: FedAsync(f),
    "FedAsync, staleness": lambda f: FedAsync(staleness=f),
    "FedBuff": lambda f: FedBuff(1, f),
    "FedBuff, staleness": lambda f: FedBuff(1, staleness=f),
    "FedAvg": lambda f: FedAvg(1, f),
    "FedAdam": lambda f: FedAdam(1, f),
    "OrthoFL": lambda f: OrthoFL(f),
    "OrthoFL, staleness": lambda f: OrthoFL(staleness=f),
    "OrthoFL, protocol": lambda f: OrthoFL(protocol=f),
    "AsyncFedED": lambda f: AsyncFedED(f),
    "CA2FL": lambda f: CA2FL(1, f),
    "ACE": lambda f: ACE(f),
    "MasFL": lambda f: MasFL(1, initial="zero", rate=f),
}


@pytest.mark.parametrize("name", SCHEDULED)
def test_step_raises_rule_error_for_invalid_schedule(name):
    rule = SCHEDULED[name](lambda place: math.nan)
    state, model = rule.init(Flat(3), draw(0, 3)), draw(0, 3)
    brought = {key: draw(1, 3) for key in getattr(rule, "tensors", {})}
    update = Update(
        0, model, model, draw(9, 1, 3), tensors=brought, numbers=dict.fromkeys(getattr(rule, "numbers", ()), 0.0)
    )
    with pytest.raises(RuleError, match="nan"):
        rule.step(Flat(3), state, update)


def test_invalid_step_size_raises_rule_error():
    rule = ASGD(1e308)
    model = draw(0, 3)
    with pytest.raises(RuleError, match="rate: step size: expected a finite number >= 0, got inf"):
        rule.step(Flat(3), rule.init(Flat(3), model), Update(0, model, model, draw(9, 1, 3), weight=10.0))


class Once:
    """Schedule with a state. It records its calls. The first call returns a given value, and later calls return 0.5."""

    def __init__(self, first):
        self.first = first
        self.asked = []

    def __call__(self, place):
        self.asked.append(place)
        return self.first if len(self.asked) == 1 else 0.5


@pytest.mark.parametrize("make", [FedAsync, lambda f: FedAsync(staleness=f), lambda f: FedBuff(1, staleness=f)])
@pytest.mark.parametrize("unusable", [math.nan, -1.0, torch.tensor(1.0)])
def test_receive_propagates_rule_error_without_rejection(make, unusable):
    schedule = Once(unusable)
    s = Server(Flat(3), make(schedule), draw(0, 3), weights="uniform")
    tickets = [s.dispatch(name) for name in "ab"]
    before = fingerprint(s)
    with pytest.raises(RuleError):
        s.receive(tickets[0], Payload(draw(1, 1, 3), 1))
    assert fingerprint(s) == before
    assert s.rejected == {}
    # Nobody was blamed: the ticket is good, and the schedule is asked once for what it decides.
    assert s.receive(tickets[0], Payload(draw(1, 1, 3), 1)).accepted
    assert len(schedule.asked) == 2
    # What a client brings is looked at first.
    schedule.asked.clear()
    assert s.receive(tickets[1], Payload(draw(1, 1, 3) * math.nan, 1)).reason.startswith("points: expected finite")


def test_receive_propagates_exception_in_schedule():
    s = Server(Flat(3), FedAsync(lambda version: 1 / version), draw(0, 3))
    ticket = s.dispatch("a")
    with pytest.raises(ZeroDivisionError):
        s.receive(ticket, Payload(draw(1, 1, 3), 1))
    assert s.rejected == {}


def test_schedule_is_evaluated_once_although_clients_join():
    s, asked = None, []

    def rate(version):
        asked.append(version)
        s.dispatch(f"late-{len(asked)}")
        return 0.5

    s = Server(Flat(3), FedAsync(rate), draw(0, 3))
    assert s.receive(s.dispatch("a"), Payload(draw(1, 1, 3), 1)).weight == 1.0
    assert asked == [0]
    # Who joined counts from the next update on.
    assert s.receive(s.dispatch("a"), Payload(draw(1, 1, 3), 1)).weight == 1 / 2
