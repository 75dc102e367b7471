"""Tests of FedMRUR's proximal term against arithmetic with 50 digits."""

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError, DivergenceError
from manifoldagg.federated.clients.lorentzproximal import LorentzProximal
from tests.support import draw, relative, seeds

EPS = 2**-52
TERM = LorentzProximal(0.3, 0.7, 1.5)


def exactly(term, theta, base):
    """Return the value and the gradient by the printed formula.

    The formula is the Minkowski form of the difference of two lifted points.
    """
    with mpmath.workdps(50):
        mu, sigma, beta = (mpmath.mpf(x) for x in (term.weight, term.variance, term.offset))
        x, y = ([mpmath.mpf(v) for v in t.tolist()] for t in (theta, base))
        r, q = (mpmath.sqrt(beta + sum(v * v for v in t)) for t in (x, y))
        square = -((r - q) ** 2) + sum((a - b) ** 2 for a, b in zip(x, y, strict=True))
        value = mu / 2 * mpmath.exp(square / sigma)
        slope = [2 * value / sigma * (a - b - (r - q) * a / r) for a, b in zip(x, y, strict=True)]
        return float(value), torch.tensor([float(v) for v in slope], dtype=torch.float64)


def radial(seed):
    """Return two points on a ray from 0, for which the two squares in the formula cancel."""
    base = draw(seed, 7)
    return (1 + 1e-3) * base, base


CASES = {
    "apart": lambda seed: tuple(0.4 * draw(seed, 2, 7)),
    "near, and far from 0": lambda seed: (1e3 * draw(seed, 7) + 1e-4 * draw(seed + 1, 7), 1e3 * draw(seed, 7)),
    "radial": radial,
    "at 0": lambda seed: (draw(seed, 7), torch.zeros(7, dtype=torch.float64)),
}


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=10)
@given(seeds)
def test_value_and_gradient_equal_50_digit_arithmetic(case, seed):
    theta, base = CASES[case](seed)
    value, slope = exactly(TERM, theta, base)
    square = float((theta - base).square().sum())
    # d² is right to about ten roundings of ‖δ‖², which the exponential turns into relative errors; θ − Θ is exact to ε.
    slack = 16 * EPS * (1 + square / TERM.variance)
    assert float(TERM(theta, base)) == pytest.approx(value, rel=slack)
    scale = TERM.weight / TERM.variance * 2 * value / TERM.weight * square**0.5
    assert (TERM.gradient(theta, base) - slope).norm() <= slack * scale


@given(seeds, st.floats(-3, 3))
def test_term_at_the_base_is_half_the_weight_with_zero_gradient(seed, exponent):
    base = 10.0**exponent * draw(seed, 9)
    assert TERM(base, base) == 0.15
    assert not TERM.gradient(base, base).any()


@settings(max_examples=10)
@given(seeds)
def test_the_gradient_is_the_derivative_of_the_value(seed):
    theta, base = draw(seed, 2, 6)
    leaf = theta.clone().requires_grad_()
    (slope,) = torch.autograd.grad(TERM(leaf, base), leaf)
    assert relative(slope, TERM.gradient(theta, base)) <= 1e-14
    assert TERM(theta, base) > 0.15


@settings(max_examples=10)
@given(seeds)
def test_term_equals_its_quadratic_approximation_to_second_order(seed):
    """The difference between the term and its quadratic approximation is of third order in the step."""
    base, step = draw(seed, 6), draw(seed + 1, 6)
    for h in (1e-3, 1e-4):
        square = (step @ step - (step @ base) ** 2 / (TERM.offset + base @ base)) * h * h
        rest = float(TERM(base + h * step, base) - 0.15 - 0.15 / TERM.variance * square)
        assert abs(rest) <= 10 * (h * float(step.norm())) ** 3


def test_gradient_of_narrow_models_has_their_accuracy():
    theta, base = draw(1, 9, dtype=torch.float32), draw(2, 9, dtype=torch.float32)
    wide = TERM.gradient(theta.double(), base.double())
    assert TERM.gradient(theta, base).dtype == torch.float32
    assert torch.equal(TERM.gradient(theta, base), wide.float())


def test_without_a_weight_the_term_is_zero():
    theta, base = 1e3 * draw(0, 2, 5)
    theta.requires_grad_()
    none = LorentzProximal(0.0, 1e-3)
    (slope,) = torch.autograd.grad(none(theta, base), theta)
    assert (none(theta, base).item(), slope.abs().max(), none.gradient(theta, base).abs().max()) == (0, 0, 0)


@pytest.mark.usefixtures("as_shipped")
def test_invalid_options_and_inputs_are_rejected():
    for options, name in (((-1.0,), "weight"), ((1.0, 0.0), "variance"), ((1.0, 1.0, 0.0), "offset")):
        with pytest.raises(ArgumentError, match=f"^{name}: expected"):
            LorentzProximal(*options)
    far = 1e3 * draw(0, 2, 5)
    with pytest.raises(DivergenceError, match="try a larger variance"):
        LorentzProximal(1.0).gradient(*far)
    assert LorentzProximal(1.0)(*far) == float("inf")
