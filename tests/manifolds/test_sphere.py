"""The sphere against 40-digit references, scipy's slerp, and where others break."""

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial import geometric_slerp

from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import Sphere, distance, geodesic, karcher_mean, norm
from tests.support import draw, seeds

EPS = 2.0**-52
angles = st.one_of(st.floats(-7, 0).map(lambda e: 10.0**e), st.floats(0.1, math.pi - 1e-3))


def case(seed, t, n=4):
    """A point, a unit tangent, and the mpmath images of both."""
    space, generator = Sphere(n), torch.Generator().manual_seed(seed)
    x = space.random_point(generator=generator, dtype=torch.float64)
    u = space.random_tangent(x, generator)
    return space, x, u * (t / u.norm())


def precise(v):
    return mpmath.matrix(v.tolist())


def inner(a, b):
    return mpmath.fsum(p * q for p, q in zip(a, b, strict=True))


def exact_exp(x, u):
    t = mpmath.sqrt(inner(u, u))
    return mpmath.cos(t) * x + mpmath.sin(t) / t * u


def exact_log(x, y):
    """For points that are unit up to rounding, which the formula takes as directions."""
    x, y = x / mpmath.sqrt(inner(x, x)), y / mpmath.sqrt(inner(y, y))
    v = y - inner(x, y) * x
    s = mpmath.sqrt(inner(v, v))
    return mpmath.atan2(s, inner(x, y)) / s * v


def error(found, exact):
    return max(abs(mpmath.mpf(a) - b) for a, b in zip(found.tolist(), exact, strict=True))


@given(seeds, angles)
def test_exp_is_exact(seed, t):
    space, x, u = case(seed, t)
    with mpmath.workdps(40):
        assert error(space.exp(x, u), exact_exp(precise(x), precise(u))) <= 8 * EPS


@given(seeds, angles)
def test_log_is_accurate_to_the_rounding_of_the_points(seed, t):
    space, x, u = case(seed, t)
    y = space.exp(x, u)
    with mpmath.workdps(40):
        # x and y are unit to 2ε: that moves a tangent by as much, and near the cut locus by 1/(π - t) times more.
        assert error(space.log(x, y), exact_log(precise(x), precise(y))) <= 8 * EPS * max(1.0, t) / min(
            1.0, math.pi - t
        )


@given(seeds, angles)
def test_transport_rotates_the_plane_of_the_geodesic(seed, t):
    space, x, u = case(seed, t)
    v = space.random_tangent(x, torch.Generator().manual_seed(seed + 1))
    with mpmath.workdps(40):
        a, w, b = precise(x), precise(u), precise(v)
        length = mpmath.sqrt(inner(w, w))
        e = w / length
        turned = b + inner(e, b) * ((mpmath.cos(length) - 1) * e - mpmath.sin(length) * a)
        bound = 8 * EPS * v.norm().item() * (1 + 1 / (math.pi - t))
        assert error(space.transport(x, space.exp(x, u), v), turned) <= bound


@given(seeds, angles)
def test_the_distance_of_small_angles_is_accurate(seed, t):
    space, x, u = case(seed, t)
    assert distance(space, x, space.exp(x, u)).item() == pytest.approx(t, rel=1e-14 * (1 + 1 / t) / min(1, math.pi - t))


@given(seeds, st.floats(0.01, 3))
def test_scipy_agrees(seed, t):
    space, x, u = case(seed, t)
    y, parts = space.exp(x, u), torch.linspace(0, 1, 5, dtype=torch.float64)
    ours = torch.stack([geodesic(space, x, y, s) for s in parts])
    np.testing.assert_allclose(ours.numpy(), geometric_slerp(x.numpy(), y.numpy(), parts.numpy()), atol=1e-12)


@given(seeds, st.floats(0.05, 2.8))
def test_derivatives_match_finite_differences(seed, t):
    space, x, u = case(seed, t)
    y = space.exp(x, u)
    assert torch.autograd.gradcheck(space.exp, (x.clone().requires_grad_(), u.clone().requires_grad_()))
    assert torch.autograd.gradcheck(space.log, (x.clone().requires_grad_(), y.clone().requires_grad_()))


@given(seeds)
def test_first_and_second_derivatives_at_zero_are_correct(seed):
    space, x, u = case(seed, 1.0)
    first = torch.func.jacrev(lambda v: space.exp(x, v))(0 * u)
    assert torch.allclose(first, torch.eye(4, dtype=torch.float64), atol=1e-14)
    second = torch.func.hessian(lambda v: space.exp(x, v) @ x)(0 * u)
    assert torch.allclose(second, -torch.eye(4, dtype=torch.float64), atol=1e-13)
    slope = torch.func.jacrev(lambda y: space.log(x, y))(x)
    assert torch.allclose(slope @ u, u, atol=1e-14)
    at_zero = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    (flat,) = torch.autograd.grad(norm(space, x, at_zero), at_zero)
    assert not flat.any()


def test_vmap_and_compile_are_supported():
    space, x, u = Sphere(4), draw(0, 5, 4), draw(1, 5, 4)
    x = space.project(x)
    u = space.project_tangent(x, u)
    y = space.exp(x, u)
    for call in (lambda a, b, c: space.exp(a, c), lambda a, b, c: space.log(a, b), space.transport):
        assert torch.allclose(torch.func.vmap(call)(x, y, u), call(x, y, u), atol=1e-15)
        tangents = torch.func.jvp(lambda a, f=call: f(a, y, u), (x,), (u,))[1]
        assert tangents.isfinite().all()


@given(seeds, st.integers(2, 8), st.integers(2, 5))
def test_steps_of_a_mean_stay_on_the_sphere(seed, n, k):
    """Each of them, log and then exp, would take a point farther from it by more than a factor of 2."""
    space, generator = Sphere(n), torch.Generator().manual_seed(seed)
    points = space.random_point(k, generator=generator, dtype=torch.float64)
    mean = points[0]
    for _ in range(60):
        mean = space.exp(mean, space.log(mean.expand_as(points), points).mean(0))
        assert abs(mean.norm() - 1) <= 16 * EPS


@given(seeds, st.integers(2, 8), st.integers(2, 6))
def test_exp_of_zero_preserves_every_bit(seed, n, k):
    x = Sphere(n).random_point(k, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(Sphere(n).exp(x, torch.zeros_like(x)), x)


@given(seeds, st.integers(3, 8), st.integers(2, 6))
def test_the_mean_of_points_of_a_half_sphere_converges(seed, n, k):
    """There is one, with more points than coordinates or fewer."""
    space, generator = Sphere(n), torch.Generator().manual_seed(seed)
    points = space.random_point(k, generator=generator, dtype=torch.float64)
    points = torch.where(points[:, :1] < 0, -points, points)
    points = space.project(points + 0.2 * torch.eye(n, dtype=torch.float64)[0])
    mean = karcher_mean(space, points, max_steps=10_000)
    assert mean.converged
    assert mean.residual <= 1e-12
    least = distance(space, mean.point.expand_as(points), points).square().sum()
    for other in points:
        assert least <= distance(space, other.expand_as(points), points).square().sum() + 1e-9


def test_float32_is_computed_in_float64():
    space, x, u = case(0, 1e-3)
    y = space.exp(x, u)
    rounded = space.log(x.float(), y.float())
    assert torch.equal(rounded, space.log(x.float().double(), y.float().double()).float())


def test_log_at_the_cut_locus_is_nan():
    space, x, _ = case(0, 1.0)
    assert space.log(x, -x).isnan().all()
    assert space.transport(x, -x, x).isnan().all()


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Sphere(0), "n: expected an integer >= 1, got 0"),
        (lambda: Sphere(3).exp(torch.ones(3), torch.ones(2)), r"u: expected trailing shape \(3\), got \(2,\)"),
        (lambda: Sphere(3).log(torch.ones(3), torch.ones(3).double()), "y: expected torch.float32"),
    ],
)
def test_invalid_arguments_are_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
