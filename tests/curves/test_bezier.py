"""Laws of Bézier curves on flat spaces."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.interpolate import BPoly

from manifoldagg.curves import Bezier
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import Flat, Manifold
from tests.support import draw, dtypes, relative, rotation, seeds, small_sizes

degrees = st.integers(1, 6)
times = st.floats(0, 1)


def de_casteljau(phi, t):
    while len(phi) > 1:
        phi = (1 - t) * phi[:-1] + t * phi[1:]
    return phi[0]


@given(seeds, small_sizes, degrees, dtypes)
def test_end_points_are_exact(seed, size, degree, dtype):
    curve, phi = Bezier(Flat(size), degree), draw(seed, degree + 1, size, dtype=dtype)
    assert torch.equal(curve(phi, 0.0), phi[0])
    assert torch.equal(curve(phi, 1.0), phi[-1])


@given(seeds, small_sizes, degrees, times, dtypes)
def test_bernstein_form_is_de_casteljau(seed, size, degree, t, dtype):
    curve, phi = Bezier(Flat(size), degree), draw(seed, degree + 1, size, dtype=dtype)
    error = (curve(phi, t).double() - de_casteljau(phi.double(), t)).abs()
    # n + 1 products of weights that sum to 1, each rounded: a small multiple of ε times the largest coordinate.
    assert (error <= 4 * (degree + 1) * torch.finfo(dtype).eps * phi.abs().max()).all()


@given(degrees, times)
def test_weights_are_a_partition_of_unity(degree, t):
    weights = Bezier(Flat(1), degree).weights(t)
    assert sum(weights) == pytest.approx(1, abs=1e-14)
    assert min(weights) >= 0


@given(seeds, degrees, times)
def test_the_curve_turns_with_its_control_points(seed, degree, t):
    curve, phi, q, shift = Bezier(Flat(5), degree), draw(seed, degree + 1, 5), rotation(seed, 5), draw(seed, 5)
    assert relative(curve(phi @ q + shift, t), curve(phi, t) @ q + shift) <= 1e-13


@given(seeds, degrees, times)
def test_velocity_is_the_derivative(seed, degree, t):
    curve, phi, t = Bezier(Flat(4), degree), draw(seed, degree + 1, 4), torch.tensor(t, dtype=torch.float64)
    _, slope = torch.func.jvp(lambda s: curve(phi, s), (t,), (torch.ones_like(t),))
    assert torch.allclose(curve.velocity(phi, t), slope, rtol=1e-11, atol=1e-11)


@given(seeds, degrees)
def test_a_batch_of_parameters_is_a_loop(seed, degree):
    curve, phi, t = Bezier(Flat(3), degree), draw(seed, degree + 1, 3), draw(seed, 2, 5).sigmoid()
    for method in (curve, curve.velocity):
        batch = method(phi, t)
        assert batch.shape == (2, 5, 3)
        loop = torch.stack([torch.stack([method(phi, s) for s in row]) for row in t])
        assert relative(batch, loop) <= 1e-14


@given(seeds, small_sizes, degrees, times)
def test_a_collapsed_curve_is_one_point(seed, size, degree, t):
    curve, point = Bezier(Flat(size), degree), draw(seed, size)
    phi = curve.collapse(point)
    assert phi.shape == (degree + 1, size)
    assert torch.allclose(curve(phi, t), point, rtol=1e-14, atol=0)
    assert not curve.velocity(phi, t).any()


@given(seeds, degrees)
def test_the_curve_stays_in_the_hull_of_its_control_points(seed, degree):
    curve, phi, direction = Bezier(Flat(3), degree), draw(seed, degree + 1, 3), draw(seed + 1, 3)
    heights, limits = curve(phi, torch.linspace(0, 1, 33)) @ direction, phi @ direction
    slack = 1e-14 * limits.abs().max()
    assert limits.min() - slack <= heights.min()
    assert heights.max() <= limits.max() + slack


@given(seeds, degrees)
def test_scipy_agrees(seed, degree):
    phi, t = draw(seed, degree + 1, 3), np.linspace(0, 1, 7)
    ours = Bezier(Flat(3), degree)(phi, torch.from_numpy(t)).numpy()
    np.testing.assert_allclose(ours, BPoly(phi.numpy()[:, None], [0, 1])(t), rtol=1e-12, atol=1e-13)


@given(seeds, degrees, times)
def test_the_curve_is_differentiable_in_its_control_points(seed, degree, t):
    curve, phi = Bezier(Flat(2), degree), draw(seed, degree + 1, 2).requires_grad_()
    slope = torch.func.jacrev(lambda p: curve(p, t))(phi)
    expected = torch.einsum("i,jk->jik", torch.tensor(curve.weights(t), dtype=torch.float64), torch.eye(2).double())
    assert torch.allclose(slope, expected, atol=1e-14)


def test_autocast_does_not_narrow_a_curve():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert Bezier(Flat(2))(draw(0, 3, 2, dtype=torch.float32), 0.3).dtype == torch.float32


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Bezier(Flat(2), 0), "degree: expected an integer >= 1, got 0"),
        (lambda: Bezier(Flat(2), 1.5), "degree: expected an integer"),
        (lambda: Bezier("R2"), "space: expected a flat manifold, got R2"),
        (lambda: Bezier(type("Curved", (Manifold,), {"shape": (2,)})()), "space: expected a flat manifold"),
        (lambda: Bezier(Flat(2))(torch.zeros(2, 2), 0.5), r"phi: expected shape \(3, 2\), got \(2, 2\)"),
        (lambda: Bezier(Flat(2))(torch.zeros(4, 3, 2), 0.5), r"phi: expected shape \(3, 2\), got \(4, 3, 2\)"),
        (lambda: Bezier(Flat(2))(torch.zeros(3, 2), float("nan")), "t: expected a finite number, got nan"),
        (lambda: Bezier(Flat(2)).collapse(torch.zeros(3)), r"point: expected shape \(2\), got \(3,\)"),
        (lambda: Bezier(Flat(2)).collapse(torch.zeros(3, 2)), "point: expected shape"),
    ],
)
def test_bad_input_is_refused_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
