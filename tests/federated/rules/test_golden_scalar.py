"""Tests of one scalar with four clients and two tasks in flight, for which public frameworks return seven results.

The clients A and B start from 0 and reach 1 and 2. D starts from the model after these updates and adds 1. C also
started from 0, and reaches 4.
"""

import pytest
import torch

from manifoldagg import aggregate
from manifoldagg.federated import Update
from manifoldagg.federated.rules import FedBuff
from manifoldagg.federated.staleness import Constant
from manifoldagg.manifolds import Flat

SPACE = Flat(1)


def scalar(x):
    return torch.tensor([x], dtype=torch.float64)


def play(rule):
    """Return the model after the update of B and after the update of C."""
    zero = scalar(0.0)
    state = rule.init(SPACE, zero)
    state, outcome = rule.step(SPACE, state, Update("A", zero, zero, scalar(1.0)[None]))
    assert (outcome.model, outcome.numbers["buffered"]) == (None, 1)
    state, outcome = rule.step(SPACE, state, Update("B", zero, zero, scalar(2.0)[None]))
    first = outcome.model
    assert (state["version"], outcome.numbers["buffered"]) == (1, 0)
    state, outcome = rule.step(SPACE, state, Update("D", first, first, (first + 1)[None]))
    assert outcome.model is None
    state, outcome = rule.step(SPACE, state, Update("C", zero, first, scalar(4.0)[None], staleness=1))
    return first.item(), outcome.model.item()


def test_scalar_example_equals_the_result_of_the_paper():
    assert play(FedBuff(2)) == (1.5, pytest.approx(1.5 + (1 + 4 / 2**0.5) / 2, rel=1e-15))
    assert round(play(FedBuff(2))[1], 4) == 3.4142


@pytest.mark.parametrize(
    ("rule", "answer"),
    [
        (FedBuff(2, normalise=True), 1.5 + (1 + 4 * 0.5**0.5) / (1 + 0.5**0.5)),
        (FedBuff(2, staleness=Constant()), 4.0),
        (FedBuff(2, rate=0.5), 0.75 + (1 + 4 * 0.5**0.5) / 4),
    ],
)
def test_options_reproduce_other_conventions(rule, answer):
    assert play(rule)[1] == pytest.approx(answer, rel=1e-15)


def test_aggregate_gives_the_same_scalar_results():
    rule, zero, state = FedBuff(2), [scalar(0.0)], None
    model, state, numbers = aggregate(rule, state, zero, zero, [scalar(1.0)])
    assert (model[0].item(), numbers["buffered"]) == (0.0, 1)
    model, state, _ = aggregate(rule, state, model, zero, [scalar(2.0)])
    first = model
    model, state, _ = aggregate(rule, state, model, model, [scalar(2.5)])
    model, _, _ = aggregate(rule, state, model, zero, [scalar(4.0)], staleness=1)
    assert first[0].item() == 1.5
    assert model[0].item() == pytest.approx(2 + 2**0.5, rel=1e-15)
