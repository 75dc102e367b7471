"""Tests of FedBuff: displacements from the client's base, staleness weights, and one step for every K updates."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Update
from manifoldagg.federated.rules import FedAdam, FedAvg, FedBuff
from manifoldagg.federated.staleness import Constant, Hinge, Polynomial
from manifoldagg.manifolds import Flat
from tests.support import draw, relative, seeds

GOLDEN = {"FedBuff": FedBuff(3, rate=0.5)}

SPACE = Flat(9)


def run(rule, seed, steps):
    """Return the model after several updates, from the rule and from the paper's loop."""
    model = theirs = draw(seed, 9)
    versions, total, weights, count = [model], torch.zeros(9).double(), 0.0, 0
    state, lateness = rule.init(SPACE, model), torch.Generator().manual_seed(seed)
    for i in range(steps):
        late = int(torch.randint(len(versions), (), generator=lateness))
        base, client = versions[-1 - late], draw(seed + i + 1, 9)
        given_ = Update(i, base, model, client[None], staleness=late, weight=0.5 + 0.1 * i)
        state, outcome = rule.step(SPACE, state, given_)
        s = rule.staleness(late) * (given_.weight if rule.weighted else 1.0)
        total, weights, count = total + s * (client - base), weights + s, count + 1
        if count == rule.size:
            theirs = theirs + rule.rate * total / (weights if rule.normalise else rule.size)
            total, weights, count = torch.zeros(9).double(), 0.0, 0
            model = outcome.model
            versions.append(model)
        else:
            assert outcome.model is None
    return model, theirs


@settings(max_examples=8)
@given(seeds, st.integers(1, 4), st.floats(0.1, 1.5), st.booleans(), st.booleans())
def test_run_equals_transcription_of_the_paper(seed, size, rate, normalise, weighted):
    for staleness in (Polynomial(0.5), Constant(), Hinge(0.5, 1.0)):
        rule = FedBuff(size, rate, staleness=staleness, normalise=normalise, weighted=weighted)
        # Errors of a few roundings a step, carried along by displacements of size 4.
        assert relative(*run(rule, seed, 3 * size)) <= 1e-13


@given(seeds, st.integers(1, 5))
def test_displacement_is_relative_to_the_client_base(seed, late):
    """The step does not depend on the current model of the server."""
    base, client, elsewhere = draw(seed, 3, 9)
    rule = FedBuff(1)
    moves = [
        rule.step(SPACE, rule.init(SPACE, x), Update(0, base, x, client[None], staleness=late))[1].model - x
        for x in (base, elsewhere)
    ]
    assert relative(*moves) <= 1e-14
    assert relative(moves[0], (late + 1) ** -0.5 * (client - base)) <= 1e-14


def test_norm_of_cancelling_updates_is_accurate():
    base, v, rest = draw(0, 9), draw(1, 9), draw(2, 9)
    rule = FedBuff(2, staleness=Constant())
    state, _ = rule.step(SPACE, rule.init(SPACE, base), Update(0, base, base, (base + v)[None]))
    _, outcome = rule.step(SPACE, state, Update(1, base, base, (base - v + 1e-9 * rest)[None]))
    # The sum of the two is known to 1e-16, 1e-7 of it.
    assert outcome.numbers["norm"] == pytest.approx(0.5e-9 * rest.norm().item(), rel=1e-6)


def test_a_single_precision_buffer_rounds_once_an_update():
    base = torch.zeros(9)
    rule, clients = FedBuff(8, staleness=Constant()), draw(1, 8, 9, dtype=torch.float32)
    state = rule.init(SPACE, base)
    for client in clients:
        state, outcome = rule.step(SPACE, state, Update(0, base, base, client[None]))
    exact = clients.double().mean(0)
    # Seven rounded sums, each no larger than the sum of sizes, and a rounded model.
    assert (outcome.model - exact).abs().max() <= 8 * 2**-24 * clients.double().abs().sum(0).max() / 8 + 2**-24
    assert outcome.model.dtype == torch.float32


@pytest.mark.usefixtures("as_shipped")
def test_outcome_reports_the_numbers_of_the_step():
    base, current = draw(0, 2, 9)
    rule = FedBuff(2, 0.5)
    first = Update(0, base, current, draw(1, 1, 9), staleness=3)
    state, outcome = rule.step(SPACE, rule.init(SPACE, base), first)
    v, g = first.points[0] - base, current - base
    assert outcome.numbers["cosine"] == pytest.approx((v @ g / v.norm() / g.norm()).item(), rel=1e-12)
    assert (outcome.numbers["weight"], outcome.numbers["buffered"]) == (0.5, 1)
    assert "norm" not in outcome.numbers
    still = Update(0, current, current, current[None])
    _, outcome = rule.step(SPACE, state, still)
    assert math.isnan(outcome.numbers["cosine"])
    assert (outcome.numbers["rate"], outcome.numbers["buffered"]) == (0.5, 0)
    assert outcome.numbers["norm"] == pytest.approx(0.5 * 0.5 * 0.5 * v.norm().item(), rel=1e-12)


@pytest.mark.parametrize(("dtype", "far"), [(torch.float32, 3e38), (torch.float64, 3e153)])
@pytest.mark.parametrize("rule", [FedBuff(3), FedAvg(3), FedAdam(3)], ids=lambda rule: type(rule).__name__)
def test_displacement_that_could_overflow_the_sum_is_rejected(rule, dtype, far):
    base = torch.zeros(9, dtype=dtype)
    state = rule.init(SPACE, base)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="points: size of the displacement"):
            rule.step(SPACE, state, Update(0, base, base, torch.full((1, 9), far, dtype=dtype)))
        state, _ = rule.step(SPACE, state, Update(0, base, base, torch.ones(1, 9, dtype=dtype)))
    assert rule.step(SPACE, state, Update(0, base, base, torch.ones(1, 9, dtype=dtype)))[1].model.isfinite().all()


@pytest.mark.parametrize("shares", [(2.0**-150, 2.0**-150), (5e-324, 5e-324), (2.0**-140, 2.0**-139), (0.0, 1e-300)])
def test_normalised_small_weights_lose_no_update(shares):
    base, rule = torch.zeros(9), FedBuff(2, normalise=True, staleness=shares.__getitem__)
    state = rule.init(SPACE, base)
    for late, size in enumerate((1.0, 2.0)):
        state, outcome = rule.step(SPACE, state, Update(0, base, base, torch.full((1, 9), size), staleness=late))
    mean = (1 * (shares[0] / shares[1]) + 2) / (shares[0] / shares[1] + 1)
    assert outcome.model.tolist() == pytest.approx([mean] * 9, rel=2**-22)
