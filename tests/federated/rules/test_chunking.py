"""Tests that rules which process a model in chunks return the same results and rejections as without chunks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldagg.corrections import OrthoDyn
from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Update
from manifoldagg.federated.rules import FADAS, AdaMasFL, AsyncCurve, FedAdam, MasFL
from manifoldagg.kernels import chunking
from manifoldagg.manifolds import Flat
from tests.support import draw, relative, seeds

P = 300
SPACE = Flat(P)


def walked(rule, dtype, count=6):
    """Return the states and models of a rule whose clients take turns."""
    start = draw(0, P, dtype=dtype)
    state, current, memories, seen = rule.init(SPACE, start), start, {}, []
    for i in range(count):
        base, current = current, current + 0.01 * draw(i, P, dtype=dtype)
        points = base + 1e-3 * draw(i + 20, 1, P, dtype=dtype)
        tensors = {"gradient": draw(i + 40, P, dtype=dtype)} if rule.__class__.__name__.endswith("MasFL") else {}
        numbers = {"opening": 0.0} if tensors else {}
        given_ = Update(
            i % 2, base, current, points, tensors=tensors, numbers=numbers, client_state=memories.get(i % 2)
        )
        state, outcome = rule.step(SPACE, state, given_)
        memories[i % 2] = outcome.client_state
        current = current if outcome.model is None else outcome.model
        seen += [current, *(x for x in state.values() if isinstance(x, torch.Tensor))]
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "rule",
    [FADAS(2), FedAdam(2), MasFL(2, initial="zero"), AdaMasFL(2, steps=50, server_steps=100, initial="zero")],
    ids=lambda rule: type(rule).__name__,
)
def test_chunk_size_does_not_change_the_results(rule, dtype, monkeypatch):
    whole = walked(rule, dtype)
    monkeypatch.setattr(chunking, "CHUNK_SIZE", 64)
    pieces = walked(rule, dtype)
    assert len(whole) == len(pieces)
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))


@settings(max_examples=40)
@given(seeds, st.floats(20, 38.5), st.floats(20, 38.5), st.booleans(), st.floats(-3, 3))
def test_update_is_buffered_exactly_if_its_step_is_finite(seed, first, second, large, rate):
    """Test with MasFL in float32 and gradients of any length.

    Some cases are decided by bounds, and others by a trial step.
    """
    rule = MasFL(3, 10.0**rate, 0.9, initial="zero")
    start = torch.full((P,), 3e38) if large else draw(seed, P, dtype=torch.float32)
    state, total = rule.init(SPACE, start), torch.zeros(P).double()
    for i, exponent in enumerate((first, second)):
        gradient = (draw(seed + i + 1, P) * min(10.0**exponent, 3e37)).float()
        given_ = Update(i, start, start, start[None], tensors={"gradient": gradient}, numbers={"opening": 0.0})
        after = total + gradient.double()
        g = (0.9 * after / 3).float()
        model = (start.double() - 10.0**rate * g.double()).float()
        fits = bool(g.isfinite().all() and model.isfinite().all())
        if not fits:
            with pytest.raises(ArgumentError, match="^tensors: gradient: "):
                rule.step(SPACE, state, given_)
            continue
        state, outcome = rule.step(SPACE, state, given_)
        assert outcome.model is None
        total = after
    assert bool(total.any()) == bool(state["pending"])


@given(seeds, st.floats(-9, -1))
def test_nearly_opposite_chords_rotate_in_their_plane(seed, exponent):
    """With a position correction, the chord is v - g. If the drift g is slightly more than 2 v, the chord is nearly -v."""
    base, v, aside, x = draw(seed, 4, 9)
    v = v / v.norm()
    aside = aside - (aside @ v) * v
    aside = 10.0**exponent * aside / aside.norm()
    current = base + 2 * v - aside
    rule = AsyncCurve(1, 0.5, correction=OrthoDyn(schedule=lambda _: "position"))
    control = base + v / 2 + x
    given_ = Update(0, base, current, torch.stack([control, base + v]), numbers={"batches": 1.0})
    _, outcome = rule.step(Flat(9), rule.init(Flat(9), base), given_)
    unit = aside / aside.norm()
    chord = -v + aside
    cosine, sine = (chord @ v) / chord.norm(), (chord @ unit) / chord.norm()
    p, q = x @ v, x @ unit
    turned = x + ((cosine - 1) * p - sine * q) * v + (sine * p + (cosine - 1) * q) * unit
    s = 0.5
    expected = current + 2 * s * (1 - s) * (chord / 2 + turned) + s * s * chord
    # The plane of two chords at angle t is known to ε/t.
    assert relative(outcome.model, expected) <= 1e-13 / math.sin(10.0**exponent)
    assert outcome.numbers["norm"] == pytest.approx((outcome.model - current).norm().item(), rel=1e-9)
