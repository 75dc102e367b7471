"""Rotations against 40-digit references, and where angles vanish or repeat."""

import math

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import SpecialOrthogonal, distance, karcher_mean
from manifoldagg.testing import LAWS, check_manifold
from tests.support import draw, seeds

EPS = 2.0**-52
sizes = st.sampled_from([2, 3, 4])
lengths = st.one_of(st.floats(-7, 0).map(lambda e: 10.0**e), st.floats(0.1, 2))


def case(seed, t, n=3):
    """A point, and a tangent of length `t` at it."""
    space, generator = SpecialOrthogonal(n), torch.Generator().manual_seed(seed)
    x = space.random_point(generator=generator, dtype=torch.float64)
    u = space.random_tangent(x, generator)
    return space, x, u * (t / u.norm())


def precise(v):
    return mpmath.matrix(v.tolist())


def skew(a):
    return (a - a.T) / 2


def polar(x):
    """The rotation that `x` is up to rounding: Newton's iteration doubles its digits."""
    for _ in range(4):
        x = (x + (x.T) ** -1) / 2
    return x


def error(found, exact):
    n = len(found)
    return max(abs(mpmath.mpf(found[i, j].item()) - exact[i, j]) for i in range(n) for j in range(n))


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("n", [2, 3, 5])
def test_every_law_holds(n):
    verdict = check_manifold(SpecialOrthogonal(n), seeds=1, verbose=False)
    assert verdict.holds, f"\n{verdict}"
    assert len(verdict.findings) == sum(primitives <= SpecialOrthogonal.capabilities for primitives, _ in LAWS.values())


@given(seeds, lengths, sizes)
def test_exp_is_exact(seed, t, n):
    space, x, u = case(seed, t, n)
    with mpmath.workdps(40):
        exact = precise(x) * mpmath.expm(skew(precise(x).T * precise(u)))
        assert error(space.exp(x, u), exact) <= 16 * EPS


@given(seeds, lengths, sizes)
def test_log_is_exact(seed, t, n):
    space, x, u = case(seed, t, n)
    y = space.exp(x, u)
    with mpmath.workdps(40):
        a = polar(precise(x))
        # x and y are orthogonal to a few ε, which moves a tangent by as much.
        logarithm = mpmath.logm(a.T * polar(precise(y))).apply(mpmath.re)
        assert error(space.log(x, y), a * logarithm) <= 40 * EPS


@given(seeds, lengths, sizes)
def test_transport_applies_half_of_the_rotation_on_each_side(seed, t, n):
    space, x, u = case(seed, t, n)
    v = space.random_tangent(x, torch.Generator().manual_seed(seed + 1))
    with mpmath.workdps(40):
        a = precise(x)
        half = mpmath.expm(skew(a.T * precise(u)) / 2)
        exact = a * half * skew(a.T * precise(v)) * half
        assert error(space.transport(x, space.exp(x, u), v), exact) <= 40 * EPS * max(1.0, v.norm().item())


@given(seeds)
def test_the_metric_is_invariant_under_rotations_on_both_sides(seed):
    space, x, u = case(seed, 1.0)
    y, (a, b) = (
        space.exp(x, u),
        space.random_point(2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64),
    )
    assert distance(space, a @ x @ b, a @ y @ b).item() == pytest.approx(1.0, rel=1e-13)


def test_the_distance_of_a_plane_rotation_is_sqrt_2_times_its_angle():
    space, angle = SpecialOrthogonal(2), 3.1
    y = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=torch.float64)
    eye = torch.eye(2, dtype=torch.float64)
    assert distance(space, eye, y).item() == pytest.approx(math.sqrt(2) * angle, rel=1e-12)


@given(seeds, st.floats(0.05, 3.5))
def test_derivatives_of_exp_match_finite_differences(seed, t):
    space, x, u = case(seed, t)
    assert torch.autograd.gradcheck(space.exp, (x.requires_grad_(), u.requires_grad_()))


@given(seeds, st.floats(0.05, 2.0))
def test_derivatives_along_the_manifold_match_finite_differences(seed, t):
    space, x, u = case(seed, t)
    y, v = space.exp(x, u), space.random_tangent(x, torch.Generator().manual_seed(seed + 1))

    def log(a, b):
        return space.log(space.exp(x, a), space.exp(y, b))

    def transport(a, b):
        return space.transport(space.exp(x, a), space.exp(y, b), v)

    a, b = draw(seed, 2, 3, 3, scale=0.1)
    for call in (log, transport):
        assert torch.autograd.gradcheck(call, (a.requires_grad_(), b.requires_grad_()))


def test_derivatives_at_zero_and_repeated_angles_are_correct():
    space, eye = SpecialOrthogonal(4), torch.eye(4, dtype=torch.float64)
    turn = torch.block_diag(*2 * [torch.tensor([[0.0, -0.7], [0.7, 0.0]], dtype=torch.float64)])
    for y in (eye, space.exp(eye, turn)):
        zero = torch.zeros(4, 4, dtype=torch.float64, requires_grad=True)

        def log(a, y=y):
            return space.log(eye, space.exp(y, a))

        def transport(a, y=y):
            return space.transport(eye, space.exp(y, a), turn)

        for call in (log, transport):
            assert torch.autograd.gradcheck(call, (zero,))
            assert torch.autograd.gradgradcheck(call, (zero,))
    tangent = space.random_tangent(eye, torch.Generator().manual_seed(0))
    assert torch.allclose(torch.func.jvp(lambda y: space.log(eye, y), (eye,), (tangent,))[1], tangent, atol=1e-14)


def test_vmap_and_jvp_are_supported():
    space, generator = SpecialOrthogonal(3), torch.Generator().manual_seed(0)
    x = space.random_point(5, generator=generator, dtype=torch.float64)
    u = space.random_tangent(x, generator)
    y = space.exp(x, u / u.flatten(1).norm(dim=1)[:, None, None])
    for call in (lambda a, b, c: space.exp(a, c), lambda a, b, c: space.log(a, b), space.transport):
        assert torch.allclose(torch.func.vmap(call)(x, y, u), call(x, y, u), atol=1e-13)
        assert torch.func.jvp(lambda a, f=call: f(a, y, u), (x,), (u,))[1].isfinite().all()


@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_project_returns_the_nearest_rotation(n):
    space, noise = SpecialOrthogonal(n), draw(0, 50, n, n)
    point = space.project(noise)
    assert torch.allclose(point.mT @ point, torch.eye(n, dtype=torch.float64), atol=1e-14)
    assert torch.allclose(torch.linalg.det(point), torch.ones(50, dtype=torch.float64))
    others = space.random_point(1000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    best = (others - noise).square().sum((-2, -1)).amin(0)
    assert ((point - noise).square().sum((-2, -1)) <= best + 1e-12).all()


def test_random_points_are_uniform():
    x = SpecialOrthogonal(3).random_point(20000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    # Entries have mean 0 and variance 1/3; of 20000 the means lie within 5 standard deviations.
    assert x.mean(0).abs().max() <= 5 / math.sqrt(3 * 20000)
    assert (x.square().mean(0) - 1 / 3).abs().max() <= 5 / math.sqrt(20000)


def test_instances_are_compared_and_hashed_by_value():
    assert SpecialOrthogonal(3) == SpecialOrthogonal(3) != SpecialOrthogonal(4)
    assert SpecialOrthogonal(3).injectivity_radius(torch.eye(3)).item() == pytest.approx(math.pi * math.sqrt(2))


EYE = torch.eye(2)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: SpecialOrthogonal(0), "n: expected an integer >= 1, got 0"),
        (lambda: SpecialOrthogonal(2).exp(EYE, torch.ones(2)), r"u: expected trailing shape \(2, 2\), got \(2,\)"),
        (lambda: SpecialOrthogonal(2).log(EYE, EYE.double()), "y: expected torch.float32"),
    ],
)
def test_invalid_arguments_are_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


@given(seeds)
def test_the_derivative_of_project_is_correct_on_and_off_the_manifold(seed):
    space = SpecialOrthogonal(3)
    x = space.random_point(generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for point in (x, x + 0.2 * draw(seed, 3, 3), -x + 0.1 * draw(seed, 3, 3)):
        w, h = draw(seed + 1, 3, 3), 1e-5
        slope = torch.func.jvp(space.project, (point,), (w,))[1]
        difference = (space.project(point + h * w) - space.project(point - h * w)) / (2 * h)
        # Where two singular values nearly cancel, the nearest rotation jumps.
        values = torch.linalg.svdvals(point)
        gap = (values[1] + values[2] * torch.linalg.det(point).sign()).abs().item()
        assert (slope - difference).abs().max() <= 1e-7 / min(1, gap) ** 3


def test_a_mean_of_rotations_has_a_gradient():
    space = SpecialOrthogonal(3)
    x = space.random_point(generator=torch.Generator().manual_seed(0), dtype=torch.float64).expand(3, 3, 3)
    points = space.exp(x, 0.3 * space.random_tangent(x, torch.Generator().manual_seed(1))).requires_grad_()
    (slope,) = torch.autograd.grad(karcher_mean(space, points).point.sum(), points)
    assert slope.isfinite().all()


def test_a_nonfinite_element_does_not_affect_the_batch():
    space = SpecialOrthogonal(3)
    x = space.random_point(2, generator=torch.Generator().manual_seed(0))
    y = x.clone()
    y[0] = math.nan
    assert space.log(x, y)[0].isnan().all()
    assert torch.equal(space.log(x, y)[1], space.log(x[1], x[1]))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_log_and_mean_are_undefined_at_an_angle_of_pi(n):
    space = SpecialOrthogonal(n)
    x = torch.eye(n, dtype=torch.float64)
    turned = torch.diag(torch.tensor([-1.0, -1.0] + [1.0] * (n - 2), dtype=torch.float64))
    near = space.exp(x, space.log(x, space.project(x + 0.1 * draw(0, n, n))))
    logs = space.log(x.expand(2, n, n), torch.stack([turned, near]))
    assert logs[0].isnan().all()
    # In a batch of the same size, because the rounding of matrix products may depend on the batch size.
    assert torch.equal(logs[1], space.log(x.expand(2, n, n), torch.stack([near, near]))[1])
    mean = karcher_mean(space, torch.stack([x, turned]))
    assert mean.residual.isnan()
    assert not mean.converged
