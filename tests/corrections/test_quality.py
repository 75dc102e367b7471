"""Tests of the quality of a correction: properties of its constants, and a reference computation on a flat space."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.corrections import (
    AutoThreshold,
    CorrectionQuality,
    Frame,
    OrthoDC,
    Position,
    Tangent,
    correction_quality,
)
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import Flat, Sphere
from tests.support import seeds

CORRECTIONS = (Tangent(), Position(), OrthoDC(0.0), OrthoDC(1.0), AutoThreshold())


def draw(seed, count=6, size=5):
    """Draw the gradient of a random quadratic loss, and updates on a flat space."""
    generator = torch.Generator().manual_seed(seed)
    curvature = torch.rand(size, generator=generator, dtype=torch.float64) + 0.1
    minimum, *points = torch.randn(1 + 3 * count, size, generator=generator, dtype=torch.float64)
    updates = [tuple(points[3 * i : 3 * i + 3]) for i in range(count)]
    return lambda model: curvature * (model - minimum), updates


@given(seeds)
def test_the_uncorrected_update_has_quality_one(seed):
    gradient, updates = draw(seed)
    found = correction_quality(Flat(5), Tangent(), updates, gradient)
    np.testing.assert_array_equal(found.corrected, found.transported)
    assert found.d == 0
    assert found.q == 1 or (math.isnan(found.q) and (found.transported <= 0).all())


@given(seeds, st.sampled_from(CORRECTIONS))
def test_descents_are_inner_products_with_the_negative_gradient(seed, correction):
    """A stateful correction receives the updates in order."""
    gradient, updates = draw(seed)
    found = correction_quality(Flat(5), correction, updates, gradient)
    state = None
    for i, (base, current, displacement) in enumerate(updates):
        slope = gradient(current).numpy()
        done = correction.apply(Frame.of(Flat(5), base, current, displacement[None]), state)
        state, expected = done.state, done.displacements()
        assert found.corrected[i] == pytest.approx(-slope @ expected[0].numpy(), rel=1e-9, abs=1e-9)
        assert found.transported[i] == pytest.approx(-slope @ displacement.numpy(), rel=1e-9, abs=1e-9)


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=20))
def test_the_inequality_holds_for_all_updates_and_the_constants_are_tight(pairs):
    corrected, transported = np.array(pairs).T
    found = CorrectionQuality(corrected, transported)
    if not (transported > 1e-100).any():
        assert (transported <= 0).all() <= math.isnan(found.q)
        return
    transported = np.where(np.abs(transported) < 1e-100, 0.0, transported)
    found = CorrectionQuality(corrected, transported)
    slack = corrected - found.q * transported
    scale = np.abs(corrected).max() + abs(found.q) * np.abs(transported).max() + 1e-300
    assert (slack >= -found.d - 1e-12 * scale).all()
    useful = transported > 0
    assert np.abs(slack[useful] / transported[useful]).min() <= 1e-12 * (1 + abs(found.q))
    if found.d > 0:
        assert slack.min() == pytest.approx(-found.d)
        assert transported[slack.argmin()] <= 1e-12 * scale


@given(seeds)
def test_transport_on_a_sphere_preserves_the_descent_of_the_transported_gradient(seed):
    """If the gradient at the current model is the transported gradient of the base, the descent is that at the base."""
    space = Sphere(4)
    generator = torch.Generator().manual_seed(seed)
    base, current = (space.project(torch.randn(4, generator=generator, dtype=torch.float64)) for _ in range(2))
    step, slope = (
        space.project_tangent(base, torch.randn(4, generator=generator, dtype=torch.float64)) for _ in range(2)
    )
    found = correction_quality(
        space, Tangent(), [(base, current, step)], lambda model: space.transport(base, model, slope)
    )
    assert found.transported[0] == pytest.approx(-float(slope @ step), rel=1e-9, abs=1e-9)
    assert found.corrected[0] == pytest.approx(found.transported[0], rel=1e-12, abs=1e-12)


def test_a_correction_that_reverses_a_useful_update_has_a_negative_quality():
    found = CorrectionQuality(np.array([1.0, -2.0]), np.array([1.0, 4.0]))
    assert found.q == -0.5
    assert found.d == 0


def test_an_update_that_increases_the_loss_gives_a_positive_d():
    found = CorrectionQuality(np.array([1.0, -3.0]), np.array([2.0, -4.0]))
    assert found.q == 0.5
    assert found.d == 1.0
    assert repr(found) == "CorrectionQuality(updates=2, q=0.5, d=1)"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"updates": []}, "updates: expected at least one update"),
        ({"gradient": lambda model: torch.zeros(3)}, "gradient: expected"),
        ({"gradient": lambda model: model + math.nan}, "gradient: expected finite"),
        ({"updates": [(torch.zeros(2), torch.zeros(3), torch.zeros(2))]}, "current: expected"),
        ({"updates": [(torch.zeros(2), torch.zeros(2))]}, "updates: 0: expected a triple"),
    ],
)
@pytest.mark.usefixtures("as_shipped")
def test_invalid_arguments_are_rejected(fields, message):
    given = {"updates": [(torch.zeros(2), torch.ones(2), torch.ones(2))], "gradient": lambda model: model} | fields
    with pytest.raises(ArgumentError, match=message):
        correction_quality(Flat(2), Tangent(), given["updates"], given["gradient"])
