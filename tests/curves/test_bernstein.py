"""Roots and least values of polynomials in Bernstein form, and changes of sign of other functions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.curves import bernstein
from manifoldagg.curves.bernstein import argmin, basis, find_sign_change, roots
from tests.support import draw, seeds

EPS = 2.0**-52


@given(st.lists(st.integers(1, 31), min_size=1, max_size=6, unique=True))
def test_every_root_is_found(places):
    degree, places = len(places), torch.tensor(places, dtype=torch.float64) / 32
    power = np.polynomial.polynomial.polyfromroots(places.numpy())
    coefficients = [
        sum(math.comb(i, k) / math.comb(degree, k) * power[k] for k in range(i + 1)) for i in range(degree + 1)
    ]
    found = torch.tensor(list(roots(coefficients)), dtype=torch.float64)
    slope = (places[:, None] - places + torch.eye(degree)).prod(-1).abs()
    # What rounds the coefficients moves a root by that over the slope at it.
    allowed = 64 * EPS * (1 + np.abs(power).max() / slope)
    assert ((found - places.sort().values).abs() <= allowed[places.argsort()]).all()


def test_a_polynomial_without_sign_change_has_no_root():
    assert list(roots([1.0, 2.0, 1.0])) == []
    assert list(roots([0.0, 0.0, 0.0])) == []
    assert list(roots([2.0])) == []
    # A value of 0 counts as negative: coming from above it is a change, coming from below it is none.
    assert list(roots([1.0, 0.0])) == [1.0]
    assert list(roots([-1.0, 0.0])) == []


@given(st.floats(1e-300, 1e-3))
def test_a_small_root_is_accurate(place):
    assert next(roots([-place, 1 - place])) == pytest.approx(place, rel=1e-13, abs=0)


def test_newton_terminates_after_convergence(monkeypatch):
    """Quadratically, also where it came from one side alone and the bracket has stayed wide on the other."""
    evaluate = bernstein._evaluate
    places = []
    monkeypatch.setattr(bernstein, "_evaluate", lambda piece, t: places.append(t) or evaluate(piece, t))
    for seed in range(200):
        falling = sorted(draw(seed, 5).tolist(), reverse=True)
        middle = 0.5 * (falling[0] + falling[-1])
        places.clear()
        assert len(list(roots([value - middle for value in falling]))) == 1
        assert len(places) <= 12


def test_an_odd_number_of_inseparable_roots_counts_as_one():
    tiny = 2.0**-60
    # t (t - tiny) (t - 2 tiny): three changes that halving does not tell apart are one.
    assert [t < 2**-50 for t in roots([-0.0, 2 * tiny**2 / 3, -tiny, 1.0])] == [True]


@given(seeds, st.integers(1, 9))
def test_a_minimum_is_global(seed, degree):
    coefficients = draw(seed, 8, degree + 1)
    t = torch.tensor([argmin(row) for row in coefficients.tolist()], dtype=torch.float64)
    values = (basis(degree, torch.linspace(0, 1, 4001)) @ coefficients.mT).amin(0)
    assert ((basis(degree, t) * coefficients).sum(-1) <= values + 1e-13).all()


def test_find_sign_change_is_accurate_to_rounding():
    places = torch.tensor([0.0, 1e-9, 0.3, 0.999, 1.0], dtype=torch.float64)
    low, high = torch.zeros(5, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    found = find_sign_change(lambda t: (places - t) * (1 + 50 * t**4), low, high)
    assert (found - places).abs().max() <= 2**-50
    assert find_sign_change(lambda t: 1 + t, low, high).tolist() == [1.0] * 5
    assert find_sign_change(lambda t: -1 - t, low, high).tolist() == [0.0] * 5
    assert torch.equal(find_sign_change(lambda t: (t - places) * (1 + 50 * t**4), low, high)[1:4], found[1:4])
