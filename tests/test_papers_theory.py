"""Tests of convergence rates and bounds of the papers on short simulated runs. `theory.py` makes longer runs."""

import importlib
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldagg.federated import clients, rules
from tests.support import seeds

PAPERS = Path(__file__).parent.parent / "benchmarks" / "papers"
pytestmark = [
    pytest.mark.filterwarnings("ignore::manifoldagg.errors.StabilityWarning"),
    pytest.mark.usefixtures("as_shipped"),
]


@pytest.fixture(scope="module")
def theory():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PAPERS)
        yield importlib.import_module("theory")


def slope(theory, mean, lengths=(64, 128, 256)):
    """Return the slope of the logarithms of the means of runs of these lengths, for one seed."""
    return theory.slope(lengths, [mean(length, 0) for length in lengths])


def test_theorem_1_of_masfl_squared_gradient_decreases_as_inverse_root_of_t(theory):
    assert -0.65 <= slope(theory, theory.masfl) <= -0.4


def test_theorem_2_of_masfl_gradient_decreases_as_inverse_fourth_root_of_t(theory):
    assert -0.35 <= slope(theory, theory.adamasfl) <= -0.15


@pytest.mark.parametrize("name", ["AsyncBezier", "tangent", "OrthoDC"])
def test_theorem_1_of_manifold_squared_gradient_decreases_as_inverse_root_of_t(theory, name):
    assert slope(theory, lambda length, seed: theory.manifold(name, length, seed)) <= -0.4


@given(seeds, st.sampled_from([0.0, 1.0]))
@settings(max_examples=5)
def test_assumption_7_of_manifold_holds_with_the_measured_constants(theory, seed, spread):
    found = theory.quality(16, seed, spread=spread)
    assert found["Tangent"].q == 1
    assert found["Tangent"].d == 0
    for one in found.values():
        assert len(one.corrected) == 16
        np.testing.assert_array_equal(one.transported, found["Tangent"].transported)
        scale = np.abs(one.corrected).max() + abs(one.q) * np.abs(one.transported).max()
        assert (one.corrected >= one.q * one.transported - one.d - 1e-9 * scale).all()


def test_constant_learning_rates_do_not_give_the_rate_of_the_theorem(theory):
    def mean(server_steps, seed):
        problem = theory.Quadratics.draw(seed)
        rule = rules.MasFL(theory.COHORT, 0.125, 0.5, clients=theory.CLIENTS)
        trainer = clients.ControlVariate(steps=theory.STEPS, rate=0.01)
        # After the transient, only the noise remains, which does not decrease with T.
        norms = theory.gradient_norms(problem, rule, trainer, theory.STEPS, seed, server_steps=server_steps)
        return np.square(norms[32:]).mean()

    assert slope(theory, mean) > -0.3


@given(seeds, st.integers(20, 300))
def test_bounds_g_and_h_of_queue_hold_for_a_simulated_run(theory, seed, num_updates):
    run = theory.queue(num_updates, seed)
    assert run.per_update <= run.bound_g
    assert run.per_time <= run.bound_h


@given(seeds, st.floats(-8, 3))
def test_lemma_i_2_and_proposition_1_of_orthofl_hold(theory, seed, exponent):
    step = theory.orthofl_step(seed, scale=2.0**exponent)
    assert step.pre >= step.pre_bound - 1e-12
    assert step.one_step >= step.one_step_bound - 1e-12


@given(seeds, st.floats(0, 2))
def test_lemma_i_1_of_orthofl_bounds_a_gradient_step_from_both_sides(seed, part):
    generator = torch.Generator().manual_seed(seed)
    c, b, s = torch.randn(3, 10, generator=generator, dtype=torch.float64)
    smoothness = float(c.abs().max())
    rate = part / smoothness

    def loss(theta):
        return float((c * torch.cos(theta + b)).sum())

    gradient = -c * torch.sin(s + b)
    square = float(gradient @ gradient)
    change = loss(s - rate * gradient) - loss(s) + rate * square
    # This is inequality (14). Inequalities (12) and (13) are its two sides.
    assert abs(change) <= smoothness / 2 * rate**2 * square * (1 + 1e-9) + 1e-12
    if 0 < rate <= 1 / smoothness:
        assert loss(s - rate * gradient) <= loss(s) - rate / 2 * square + 1e-12


@given(seeds, st.integers(2, 20), st.sampled_from([0.0, 0.1, 1.0]))
def test_local_drift_is_bounded_by_equation_63_of_the_report(theory, seed, num_steps, proximal):
    rate = min(0.05, 0.99 / (max(proximal, 1e-3) * num_steps))
    moved, bound = theory.local_drift(num_steps, seed, rate=rate, proximal=proximal)
    assert moved <= bound
    # The bound is not vacuous, because it has the order of the squared drift.
    assert math.sqrt(bound) <= 100 * math.sqrt(moved)
