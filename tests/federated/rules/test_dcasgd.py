"""Tests of DC-ASGD, constant and adaptive, against a transcription with plain numbers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Update
from manifoldagg.federated.rules import ASGD, DCASGD
from manifoldagg.manifolds import Flat, ParameterSpace, SpecialOrthogonal
from tests.support import draw, relative, seeds

GOLDEN = {"DCASGD": DCASGD(0.7, variant="constant"), "adaptive DCASGD": DCASGD(0.7)}

SIZE = 6
SPACE = Flat(SIZE)


def play(rule, seed, rounds, weight=0.7):
    """Return the model after each of several stale updates."""
    models = [draw(seed, SIZE)]
    state = rule.init(SPACE, models[0])
    for i in range(rounds):
        base = models[max(0, len(models) - 1 - i % 3)]
        given_ = Update(0, base, models[-1], draw(seed + i + 1, 1, SIZE), weight=weight)
        state, outcome = rule.step(SPACE, state, given_)
        models.append(outcome.model)
    return models


def transcription(seed, rounds, *, rate, strength, adaptive, decay, weight=0.7):
    """Transcription of Zheng et al.

    2017, Algorithm 2. The gradient is -v, and the adaptive variant uses the mean square of the gradient.
    """
    models, square = [draw(seed, SIZE).tolist()], [0.0] * SIZE
    for i in range(rounds):
        base, now = models[max(0, len(models) - 1 - i % 3)], models[-1]
        client, new = draw(seed + i + 1, 1, SIZE)[0].tolist(), []
        for j in range(SIZE):
            gradient = -(client[j] - base[j])
            square[j] = decay * square[j] + (1 - decay) * gradient**2
            lam = strength / math.sqrt(square[j] + 1e-7) if adaptive else strength
            new.append(now[j] - rate * weight * (gradient + lam * gradient * gradient * (now[j] - base[j])))
        models.append(new)
    return models


@settings(max_examples=12)
@given(seeds, st.floats(0.01, 1), st.floats(0, 2), st.booleans(), st.floats(0, 0.99))
def test_run_equals_transcription_of_the_paper(seed, rate, strength, adaptive, decay):
    variant = "adaptive" if adaptive else "constant"
    models = play(DCASGD(rate, variant=variant, strength=strength, square_decay=decay), seed, 5)
    expected = transcription(seed, 5, rate=rate, strength=strength, adaptive=adaptive, decay=decay)
    for model, theirs in zip(models, expected, strict=True):
        # Models grow with the squares of displacements, so that errors are relative to the largest entry.
        assert relative(model, torch.tensor(theirs, dtype=torch.float64)) <= 1e-11


def test_defaults_equal_those_of_the_paper():
    adaptive, constant = DCASGD().correction, DCASGD(variant="constant").correction
    assert (adaptive.strength, adaptive.adaptive, adaptive.decay) == (2.0, True, 0.95)
    assert (constant.strength, constant.adaptive) == (0.04, False)


def test_only_the_adaptive_variant_has_a_state():
    given_ = Update(0, *draw(0, 2, SIZE), draw(1, 1, SIZE))
    for rule, keys in ((DCASGD(), {"version", "correction"}), (DCASGD(variant="constant"), {"version"})):
        state, _ = rule.step(SPACE, rule.init(SPACE, given_.base), given_)
        assert state.keys() == keys


@settings(max_examples=10)
@given(seeds)
def test_compensation_is_zero_without_drift(seed):
    base, point = draw(seed, 2, SIZE)
    fresh = Update(0, base, base, point[None])
    plain = ASGD(0.5).step(SPACE, {"version": 0}, fresh)[1].model
    for variant in ("constant", "adaptive"):
        assert relative(DCASGD(0.5, variant=variant).step(SPACE, {"version": 0}, fresh)[1].model, plain) <= 1e-15


def test_update_with_overflowing_squares_is_rejected():
    zero = torch.zeros(SIZE)
    with pytest.raises(ArgumentError, match="points: expected displacements whose mean square is finite"):
        DCASGD().step(SPACE, {"version": 0}, Update(0, zero, zero, torch.full((1, SIZE), 1e25)))


def test_curved_leaves_are_rejected_by_name():
    tensors = {"turn": torch.eye(3), "w": torch.zeros(2)}
    space = ParameterSpace.of_state_dict(tensors, {"turn": SpecialOrthogonal(3)})
    for variant in ("constant", "adaptive"):
        with pytest.raises(ArgumentError, match=r"got curved leaves: turn: SpecialOrthogonal\(n=3\)"):
            DCASGD(variant=variant).init(space, space.point(tensors))
