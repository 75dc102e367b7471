"""Laws of Bézier curves on flat spaces, and the identities behind them."""

import math

import numpy as np
import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.interpolate import BPoly

from manifoldagg.curves import Bezier
from manifoldagg.curves.bernstein import basis, product_coefficients
from manifoldagg.curves.bezier import de_casteljau as along_geodesics
from manifoldagg.curves.distance import squared_distance
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import Flat, Manifold, Power, Sphere
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
def test_bernstein_form_equals_de_casteljau(seed, size, degree, t, dtype):
    curve, phi = Bezier(Flat(size), degree), draw(seed, degree + 1, size, dtype=dtype)
    error = (curve(phi, t).double() - de_casteljau(phi.double(), t)).abs()
    # n + 1 products of weights that sum to 1, each rounded: a small multiple of ε times the largest coordinate.
    assert (error <= 4 * (degree + 1) * torch.finfo(dtype).eps * phi.abs().max()).all()


@given(seeds, degrees, st.floats(-0.5, 1.5))
def test_the_geodesic_algorithm_gives_the_same_curve_on_a_flat_space(seed, degree, t):
    curve, phi, t = Bezier(Flat(3), degree), draw(seed, degree + 1, 3), torch.tensor([t, 0.5], dtype=torch.float64)
    # Past the ends weights grow to (2t - 1)^n and cancel.
    assert (along_geodesics(curve.space, phi, t) - curve(phi, t)).abs().max() <= 1e-13 * 2**degree * phi.abs().max()


@given(degrees, times)
def test_weights_are_a_partition_of_unity(degree, t):
    weights = Bezier(Flat(1), degree).weights(t)
    assert sum(weights) == pytest.approx(1, abs=1e-14)
    assert min(weights) >= 0


@given(seeds, degrees, times)
def test_the_curve_is_affine_equivariant(seed, degree, t):
    curve, phi, q, shift = Bezier(Flat(5), degree), draw(seed, degree + 1, 5), rotation(seed, 5), draw(seed, 5)
    assert relative(curve(phi @ q + shift, t), curve(phi, t) @ q + shift) <= 1e-13


@given(seeds, degrees, times)
def test_velocity_is_the_derivative(seed, degree, t):
    curve, phi, t = Bezier(Flat(4), degree), draw(seed, degree + 1, 4), torch.tensor(t, dtype=torch.float64)
    _, slope = torch.func.jvp(lambda s: curve(phi, s), (t,), (torch.ones_like(t),))
    assert torch.allclose(curve.velocity(phi, t), slope, rtol=1e-11, atol=1e-11)


@given(seeds, degrees)
def test_a_batch_of_parameters_equals_a_loop(seed, degree):
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
def test_the_curve_is_in_the_convex_hull_of_its_control_points(seed, degree):
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


@given(seeds, degrees, dtypes)
def test_the_derivative_in_the_control_points_is_an_outer_product(seed, degree, dtype):
    curve, phi = Bezier(Flat(3), degree), draw(seed, degree + 1, 3, dtype=dtype)
    t, w = draw(seed + 1, 2, 4).sigmoid(), draw(seed + 2, 2, 4, 3, dtype=dtype)
    _, pull = torch.func.vjp(lambda points: curve(points, t), phi)
    # Eight products are added, in another order.
    assert relative(curve.pull_phi(phi, t, w), pull(w)[0]) <= 16 * torch.finfo(dtype).eps


@given(seeds, degrees)
def test_push_and_pull_are_adjoint_and_make_the_metric(seed, degree):
    curve, phi, t = Bezier(Flat(3), degree), draw(seed, degree + 1, 3), draw(seed + 1, 5).sigmoid()
    u, w = draw(seed + 2, 5), draw(seed + 3, 5, 3)
    pushed, pulled = curve.push(phi, t, u), curve.pull(phi, t, w)
    assert relative(pushed, curve.velocity(phi, t) * u[:, None]) <= 1e-13
    assert torch.allclose((pushed * w).sum(-1), pulled * u, atol=1e-11)
    metric = curve.metric(phi, t)
    assert metric.shape == (5, 1, 1)
    assert torch.allclose(metric[:, 0, 0], curve.velocity(phi, t).square().sum(-1), rtol=1e-12)


@given(seeds, degrees, dtypes, st.floats(-0.5, 1.5))
def test_elevation_subdivision_and_reversal_preserve_the_curve(seed, degree, dtype, cut):
    curve, phi = Bezier(Flat(3), degree), draw(seed, degree + 1, 3, dtype=dtype)
    t = torch.linspace(0, 1, 9, dtype=torch.float64)
    left, right = curve.split(phi, cut)
    pairs = [
        (Bezier(Flat(3), degree + 3)(curve.elevate(phi, 3), t), curve(phi, t)),
        (curve(curve.reverse(phi), t), curve(phi, 1 - t)),
        (curve(left, t), curve(phi, cut * t)),
        (curve(right, t), curve(phi, cut + (1 - cut) * t)),
    ]
    # A cut past the ends extrapolates: its weights grow to 2^n.
    allowed = 8 * (degree + 4) * 2**degree * torch.finfo(dtype).eps * phi.abs().max()
    assert all((a - b).abs().max() <= allowed for a, b in pairs)
    assert torch.equal(left[0], phi[0])
    assert torch.equal(right[-1], phi[-1])
    assert torch.equal(curve.elevate(phi, 2)[[0, -1]], phi[[0, -1]])
    assert torch.equal(curve.elevate(phi, 0), phi)


@given(seeds, degrees)
def test_scipy_agrees_on_derivatives(seed, degree):
    curve, phi, t = Bezier(Flat(3), degree), draw(seed, degree + 1, 3), np.linspace(0, 1, 7)
    oracle, scale = BPoly(phi.numpy()[:, None], [0, 1]), degree**2 * phi.abs().max().item()
    places = torch.from_numpy(t)
    np.testing.assert_allclose(curve.velocity(phi, places), oracle.derivative(1)(t), atol=1e-13 * scale)
    np.testing.assert_allclose(curve.acceleration(phi, places), oracle.derivative(2)(t), atol=1e-12 * scale)


@given(seeds, degrees, dtypes)
def test_a_length_is_additive_and_between_chord_and_polygon(seed, degree, dtype):
    curve, phi = Bezier(Flat(3), degree), draw(seed, degree + 1, 3, dtype=dtype)
    whole = curve.length(phi)
    slack = 4 * torch.finfo(dtype).eps
    assert (phi[-1] - phi[0]).norm() <= whole * (1 + slack)
    assert whole <= phi.diff(dim=0).norm(dim=1).sum() * (1 + slack)
    parts = curve.length(phi, 0, 0.3) + curve.length(phi, 0.3, 1)
    assert parts.item() == pytest.approx(whole.item(), rel=slack + 1e-12)
    assert curve.length(phi, 0.3, 0.1).item() == pytest.approx(-curve.length(phi, 0.1, 0.3).item(), rel=slack)
    other = curve.length(curve.reverse(phi)), Bezier(Flat(3), degree + 1).length(curve.elevate(phi.double()))
    assert [length.item() for length in other] == pytest.approx([whole.item()] * 2, rel=slack + 1e-12)
    halves = curve.split(phi.double(), 0.4)
    assert sum(curve.length(half).item() for half in halves) == pytest.approx(whole.item(), rel=slack + 1e-12)


@given(seeds)
def test_the_length_of_a_parabola_agrees_with_its_formula(seed):
    """y = x² from 0 to 1, moved and turned: √5/2 + arsinh(2)/4."""
    phi = torch.tensor([[0.0, 0.0, 0.0], [0.5, 0.0, 0.0], [1.0, 1.0, 0.0]], dtype=torch.float64)
    length = Bezier(Flat(3)).length(phi @ rotation(seed, 3) + draw(seed, 3))
    assert length.item() == pytest.approx(math.sqrt(5) / 2 + math.asinh(2) / 4, rel=1e-12)


def test_the_length_of_a_curve_that_turns_back_counts_both_ways():
    """x = 4t(1-t)·a reaches a and returns; its speed has a kink."""
    curve, phi = Bezier(Flat(1)), torch.tensor([[0.0], [2.0], [0.0]], dtype=torch.float64)
    assert curve.length(phi).item() == pytest.approx(2.0, rel=1e-12)
    phi = torch.tensor([[0.0], [1.0], [0.3]], dtype=torch.float64)
    turn = 1 / 1.7
    top = 2 * turn * (1 - turn) + 0.3 * turn**2
    assert curve.length(phi).item() == pytest.approx(2 * top - 0.3, rel=1e-12)


@given(seeds, degrees, dtypes)
def test_parameter_at_length_inverts_the_length(seed, degree, dtype):
    curve, phi = Bezier(Flat(3), degree), draw(seed, degree + 1, 3, dtype=dtype).double()
    part = torch.tensor([[0.0, 1e-9, 0.2], [0.5, 0.9, 1.0]], dtype=torch.float64)
    t = curve.parameter_at_length(phi.to(dtype), part)
    whole = curve.length(phi).item()
    reached = [curve.length(phi, 0, s).item() / whole for s in t.flatten().tolist()]
    assert reached == pytest.approx(part.flatten().tolist(), abs=1e-12)
    assert t[0, 0] == 0
    assert t[1, 2] == 1


def test_the_length_of_a_point_is_zero():
    curve, phi = Bezier(Flat(2)), torch.ones(3, 2)
    assert curve.length(phi) == 0
    assert curve.parameter_at_length(phi, 0.25) == 0.25


@settings(max_examples=5)
@given(seeds, degrees)
def test_the_length_is_differentiable_in_the_control_points(seed, degree):
    curve, phi = Bezier(Flat(2), degree), draw(seed, degree + 1, 2)
    assert torch.autograd.gradcheck(curve.length, (phi.clone().requires_grad_(),), atol=1e-5, rtol=1e-4)
    slope = torch.func.grad(curve.length)(phi)
    # Lengths scale with the curve: Euler's identity.
    assert (slope * phi).sum().item() == pytest.approx(curve.length(phi).item(), rel=1e-9)


def test_the_length_of_a_parabola_is_its_closed_form():
    # y = x²/2 from 0 to 2: b' = (2, 4t).
    phi = torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.0, 2.0]]).double()
    assert Bezier(Flat(2)).length(phi).item() == pytest.approx(math.sqrt(5) + math.asinh(2) / 2, rel=1e-14)


@given(seeds, degrees, st.integers(0, 4))
def test_through_recovers_the_curve_from_its_points(seed, degree, extra):
    curve, phi, m = Bezier(Flat(3), degree), draw(seed, degree + 1, 3), degree + 1 + extra
    t = torch.linspace(0, 1, m, dtype=torch.float64)
    for fixed_ends in (False, True):
        found = curve.through(curve(phi, t), t, fixed_ends=fixed_ends)
        # The Bernstein matrix of evenly spaced points has a condition below 4^n.
        assert relative(found, phi) <= 1e-14 * 4**degree * m
    points = draw(seed + 1, m, 3)
    rest = curve(curve.through(points, t), t) - points
    assert torch.allclose(basis(degree, t).mT @ rest, torch.zeros(degree + 1, 3).double(), atol=1e-10)
    assert torch.equal(curve.through(points, fixed_ends=True)[[0, -1]], points[[0, -1]])


def test_the_parameters_of_points_are_their_chord_lengths():
    points = torch.tensor([[0.0, 0.0], [3.0, 0.0], [3.0, 1.0]])
    curve = Bezier(Flat(2))
    assert torch.allclose(curve(curve.through(points), 0.75), points[1], atol=1e-6)


@given(seeds, degrees, dtypes, st.integers(0, 3))
def test_no_parameter_is_nearer_than_the_nearest(seed, degree, dtype, far):
    curve, phi = Bezier(Flat(3), degree), draw(seed, degree + 1, 3, dtype=dtype)
    points = draw(seed + 1, 2, 2, 3, dtype=dtype, scale=10.0 ** (far - 2))
    t, away = curve.nearest(phi, points)
    assert t.shape == away.shape == (2, 2)
    trace = curve(phi.double(), torch.linspace(0, 1, 2001, dtype=torch.float64))
    sampled = (points.double()[..., None, :] - trace).norm(dim=-1).amin(-1)
    assert (away.double() <= sampled * (1 + 4 * torch.finfo(dtype).eps) + 1e-7).all()
    inside = (t > 0) & (t < 1)
    across = ((curve(phi.double(), t) - points.double()) * curve.velocity(phi.double(), t)).sum(-1)
    assert (across[inside].abs() <= 1e-11 * (1 + points.double().norm(dim=-1)[inside]) * 100).all()


@given(seeds, degrees, st.floats(0, 1))
def test_the_curve_contains_its_points_and_no_others(seed, degree, t):
    curve, phi = Bezier(Flat(4), degree), draw(seed, degree + 1, 4)
    phi = torch.cat([phi[:, :3], torch.zeros(degree + 1, 1)], 1)
    on, off = curve(phi, t), curve(phi, t) + torch.tensor([0.0, 0.0, 0.0, 1e-3])
    assert curve.contains(phi, torch.stack([on, off]), tolerance=1e-12).tolist() == [True, False]
    assert curve.contains(phi, off, tolerance=2e-3)


def test_the_distance_is_differentiable():
    curve, phi, point = Bezier(Flat(3)), draw(0, 3, 3).requires_grad_(), draw(1, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: curve.nearest(a, b)[1], (phi, point))


def test_samples_are_uniform_and_follow_the_generator():
    curve = Bezier(Flat(2))
    t = curve.sample(100, 50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(t, curve.sample(100, 50, generator=torch.Generator().manual_seed(0)))
    assert t.dtype == torch.float64
    # Of 5000 the mean lies within 5 standard deviations of 1/2.
    assert abs(t.mean().item() - 0.5) <= 5 / math.sqrt(12 * 5000)


def test_points_may_have_any_shape():
    space = Power(Flat(2), (3,))
    curve, phi = Bezier(space, 3), draw(0, 4, 3, 2)
    plain, t = Bezier(Flat(6), 3), torch.tensor([0.2, 0.7])
    flat = phi.reshape(4, 6)
    for name in ("__call__", "velocity", "acceleration"):
        assert torch.equal(getattr(curve, name)(phi, t).flatten(1), getattr(plain, name)(flat, t))
    assert curve.length(phi) == plain.length(flat)
    assert torch.equal(curve.split(phi, 0.3)[0].flatten(1), plain.split(flat, 0.3)[0])
    assert torch.equal(curve.elevate(phi).flatten(1), plain.elevate(flat))
    assert torch.equal(curve.nearest(phi, phi[1])[0], plain.nearest(flat, flat[1])[0])
    assert curve.through(draw(1, 4, 3, 2)).shape == (4, 3, 2)


s = sympy.symbols("s")


def exact(matrix):
    return sympy.Matrix(matrix.tolist()).applyfunc(lambda x: sympy.nsimplify(x, rational=True, tolerance=1e-12))


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("n", range(1, 6))
def test_bernstein_weights_satisfy_their_identities(n):
    """sympy: partition of unity, derivative, elevation, subdivision and product of the weights that are used."""
    curve, eye = Bezier(Flat(n + 1), n), torch.eye(n + 1, dtype=torch.float64)
    weights, above = sympy.Matrix(curve.weights(s)), sympy.Matrix(Bezier(Flat(1), n + 1).weights(s))
    lower = [0, *(Bezier(Flat(1), n - 1).weights(s) if n > 1 else [sympy.Integer(1)]), 0]
    half = [weights.subs(s, s / 2), weights.subs(s, (1 + s) / 2)]

    def vanishes(matrix):
        return sympy.Matrix(matrix).applyfunc(sympy.expand).is_zero_matrix

    assert sympy.expand(sum(weights)) == 1
    assert vanishes([weights[i].diff(s) - n * (lower[i] - lower[i + 1]) for i in range(n + 1)])
    assert vanishes(exact(curve.elevate(eye)).T @ above - weights)
    assert all(vanishes(exact(side).T @ weights - part) for side, part in zip(curve.split(eye, 0.5), half, strict=True))
    double = sympy.Matrix(Bezier(Flat(1), 2 * n).weights(s))
    for i in range(n + 1):
        for j in range(i + 1):
            unit = torch.zeros(n + 1, n + 1, dtype=torch.float64)
            unit[i, j] = 1
            assert vanishes([exact(torch.stack(product_coefficients(unit))).dot(double) - weights[i] * weights[j]])


@pytest.mark.usefixtures("as_shipped")
def test_the_chord_distance_of_a_quadratic():
    """sympy: |ι(s) - A|² of control points A, B, C is the polynomial in Gram entries that steps are computed from."""
    a, b, c = (sympy.Matrix(sympy.symbols(f"{name}0:3")) for name in "ABC")
    weights = Bezier(Flat(3)).weights(s)
    offset = weights[0] * a + weights[1] * b + weights[2] * c - a
    u, v = b - a, c - a
    rows = [[u.dot(u), u.dot(v)], [v.dot(u), v.dot(v)]]
    quartic = sum(
        sympy.nsimplify(k, rational=True) * w
        for k, w in zip(squared_distance(rows), Bezier(Flat(1), 4).weights(s), strict=True)
    )
    assert sympy.expand(offset.dot(offset) - quartic) == 0


def test_autocast_does_not_narrow_a_curve():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert Bezier(Flat(2))(draw(0, 3, 2, dtype=torch.float32), 0.3).dtype == torch.float32


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Bezier(Flat(2), 0), "degree: expected an integer >= 1, got 0"),
        (lambda: Bezier(Flat(2), 1.5), "degree: expected an integer"),
        (lambda: Bezier("R2"), "space: expected a Manifold, got 'R2'"),
        (lambda: Bezier(type("Curved", (Manifold,), {"shape": (2,)})()), "space: expected a flat manifold"),
        (lambda: Bezier(Flat(2))(torch.zeros(2, 2), 0.5), r"phi: expected shape \(3, 2\), got \(2, 2\)"),
        (lambda: Bezier(Flat(2))(torch.zeros(4, 3, 2), 0.5), r"phi: expected shape \(3, 2\), got \(4, 3, 2\)"),
        (lambda: Bezier(Flat(2))(torch.zeros(3, 2), float("nan")), "t: expected a finite number, got nan"),
        (lambda: Bezier(Flat(2)).collapse(torch.zeros(3)), r"point: expected shape \(2\), got \(3,\)"),
        (lambda: Bezier(Flat(2)).collapse(torch.zeros(3, 2)), "point: expected shape"),
        (lambda: Bezier(Flat(2)).split(torch.zeros(3, 2), math.inf), "t: expected a finite number, got inf"),
        (lambda: Bezier(Flat(2)).elevate(torch.zeros(3, 2), -1), "times: expected an integer >= 0, got -1"),
        (lambda: Bezier(Flat(2)).length(torch.zeros(3, 2), b=math.nan), "b: expected a finite number, got nan"),
        (lambda: Bezier(Flat(2)).length(torch.full((3, 2), math.inf)), "phi: expected values with finite squares"),
        (
            lambda: Bezier(Flat(2)).parameter_at_length(torch.zeros(3, 2), 1.5),
            r"fraction: expected numbers in \[0, 1\]",
        ),
        (lambda: Bezier(Flat(2)).nearest(torch.zeros(3, 2), torch.zeros(3)), r"point: expected trailing shape \(2\)"),
        (
            lambda: Bezier(Flat(2)).nearest(torch.zeros(3, 2), torch.tensor([math.nan, 0])),
            "phi, point: expected values with fin",
        ),
        (lambda: Bezier(Flat(2)).contains(torch.zeros(3, 2), torch.zeros(2), tolerance=-1), "tolerance: expected"),
        (lambda: Bezier(Flat(2)).through(torch.zeros(2, 2)), "points: expected at least 3 for degree 2, got 2"),
        (lambda: Bezier(Flat(2)).through(torch.zeros(3, 2)), "points: expected finite points that are not all equal"),
        (lambda: Bezier(Flat(2)).through(draw(0, 3, 2), torch.tensor([0.0, 0.5, 0.5])), "parameters: expected 3 diff"),
        (lambda: Bezier(Flat(2)).through(draw(0, 3, 2), torch.tensor([0.0, 0.5])), r"parameters: expected shape \(3\)"),
        (
            lambda: Bezier(Sphere(3)).through(torch.eye(3)),
            r"space: expected a flat space for least squares, got Sphere",
        ),
        (lambda: Bezier(Flat(2)).pull_phi(torch.zeros(3, 2), 0.5, torch.zeros(3)), "w: expected shape"),
    ],
)
def test_invalid_arguments_are_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
