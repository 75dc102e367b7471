"""Hyperbolic space: the laws as far as coordinates reach, 40-digit references, and one model against the other."""

import math

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import Lorentz, PoincareBall, distance, norm
from manifoldagg.testing import check_manifold
from tests.support import draw, relative, seeds

EPS = 2.0**-52
lengths = st.one_of(st.floats(-7, 0).map(lambda e: 10.0**e), st.floats(0.1, 5.0))
curvatures = st.sampled_from([-0.25, -1.0, -4.0])

BALLS = [PoincareBall(n, c) for n, c in ((1, -1.0), (2, -4.0), (3, -0.25), (3, -1.0), (30, -1.0), (30, -4.0))]
HYPERBOLOIDS = [Lorentz(n) for n in (1, 2, 3, 30)]
SPACES = [PoincareBall(3), PoincareBall(3, -4.0), Lorentz(3)]


def case(space, seed, t):
    """A point, a tangent of length t in units of the radius of curvature, and the scale that makes it one."""
    generator, root = torch.Generator().manual_seed(seed), math.sqrt(-getattr(space, "curvature", -1.0))
    x = space.random_point(generator=generator, dtype=torch.float64)
    u = space.random_tangent(x, generator)
    return x, u * (t / root / norm(space, x, u)), root


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("space", BALLS, ids=str)
def test_every_law_holds_on_the_ball(space):
    # Points at distance r of the centre lose e^r / 4 of their digits. They are drawn within 1.4, laws walk on by t,
    # the pole ladder by 2t: at t = 4 that is e^9.4, diluted by t / sinh(t); at 5 it is above 50 whatever the formula.
    verdict = check_manifold(space, max_distance=3.5 / math.sqrt(-space.curvature), seeds=2, verbose=False)
    assert verdict.holds, f"\n{verdict}"


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("space", HYPERBOLOIDS, ids=str)
def test_every_law_holds_on_the_hyperboloid(space):
    # A rounded tangent at distance r of the origin is tangent to cosh(r)^3, up to 1e5 where r <= 4.5: t <= 3.
    # Nearer, a fiftieth of that is enough.
    for condition, farthest in ((1e5, 3.0), (2e3, 0.7)):
        verdict = check_manifold(space, condition=condition, max_distance=farthest, seeds=2, verbose=False)
        assert verdict.holds, f"\n{verdict}"


def precise(v):
    return mpmath.matrix(v.tolist())


def dot(a, b):
    return mpmath.fsum(p * q for p, q in zip(a, b, strict=True))


def minkowski(a, b):
    return dot(list(a)[1:], list(b)[1:]) - a[0] * b[0]


def length(a):
    return mpmath.sqrt(dot(a, a))


def miss(found, exact):
    """The error in coordinates relative to the size of what is exact."""
    return length(precise(found) - exact) / length(exact)


def plus(a, b):
    """Möbius addition in the unit ball."""
    ab, aa, bb = dot(a, b), dot(a, a), dot(b, b)
    return ((1 + 2 * ab + bb) * a + (1 - aa) * b) / (1 + 2 * ab + aa * bb)


def gyration(a, b, v):
    """By its definition, which is linear in v: a small v stays in the ball."""
    v = v / (length(v) * 10)
    return plus(-plus(a, b), plus(a, plus(b, v)))


@given(seeds, lengths, curvatures)
def test_the_ball_is_exact(seed, t, curvature):
    space = PoincareBall(3, curvature)
    x, u, root = case(space, seed, t)
    y = space.exp(x, u)
    v = space.random_tangent(x, torch.Generator().manual_seed(seed + 1))
    with mpmath.workdps(40):
        a, b, w, o = precise(root * x), precise(root * y), precise(root * u), precise(v)
        alpha, beta = 1 - dot(a, a), 1 - dot(b, b)
        # A coordinate of exp is exact to ε; 1 - |y|², of which log and transport live, then to ε / (1 - |y|²).
        near = plus(a, mpmath.tanh(length(w) / alpha) / length(w) * w)
        assert miss(root * y, near) <= 16 * EPS * max(1, 1 / length(near))
        apart = plus(-a, b)
        back = alpha * mpmath.atanh(length(apart)) / length(apart) * apart
        bound = 16 * EPS * (1 + 1 / beta)
        assert miss(root * space.log(x, y), back) <= bound
        assert abs(root * distance(space, x, y).item() / (2 * mpmath.atanh(length(apart))) - 1) <= bound
        turned = beta / alpha * length(o) * 10 * gyration(b, -a, o)
        assert miss(space.transport(x, y, v), turned) <= bound


@given(seeds, lengths)
def test_the_hyperboloid_is_exact(seed, t):
    space = Lorentz(3)
    x, u, _ = case(space, seed, t)
    y = space.exp(x, u)
    v = space.random_tangent(x, torch.Generator().manual_seed(seed + 1))

    def point(p):
        space_part = [mpmath.mpf(q) for q in p.tolist()[1:]]
        return mpmath.matrix([mpmath.sqrt(1 + dot(space_part, space_part)), *space_part])

    def tangent(at, p):
        space_part = [mpmath.mpf(q) for q in p.tolist()[1:]]
        return mpmath.matrix([dot(list(at)[1:], space_part) / at[0], *space_part])

    with mpmath.workdps(40):
        a, b = point(x), point(y)
        w, o = tangent(a, u), tangent(a, v)
        # Formulas live of |x|² and of t: they enlarge ε by x_0² and by 1 + t.
        bound = 8 * EPS * float(a[0]) ** 2 * (1 + t)
        r = mpmath.sqrt(minkowski(w, w))
        assert miss(y, mpmath.cosh(r) * a + mpmath.sinh(r) / r * w) <= bound
        r = mpmath.acosh(-minkowski(a, b))
        assert miss(space.log(x, y), r / mpmath.sinh(r) * (b + minkowski(a, b) * a)) <= bound
        assert abs(distance(space, x, y).item() / r - 1) <= bound
        # A tangent at y has coordinates up to y_0 |v|, whatever those of this one are.
        moved = precise(space.transport(x, y, v)) - o - minkowski(b, o) / (1 - minkowski(a, b)) * (a + b)
        assert length(moved) <= bound * b[0] * length(o)


@given(seeds, st.floats(0.01, 3))
def test_the_models_are_isometric(seed, t):
    ball, hyperboloid = PoincareBall(3), Lorentz(3)
    x, u, _ = case(ball, seed, t)
    y = ball.exp(x, u)

    def lifted(p):
        square = (p * p).sum(-1, keepdim=True)
        return torch.cat([1 + square, 2 * p], -1) / (1 - square)

    a, velocity = torch.func.jvp(lifted, (x,), (u,))
    # At distance r of the centre coordinates hold ε e^r / 4, and r <= 1.4 + 3.
    assert distance(hyperboloid, a, lifted(y)).item() == pytest.approx(t, rel=400 * EPS * (1 + 1 / t))
    assert relative(hyperboloid.exp(a, velocity), lifted(y)) <= 2000 * EPS
    v = ball.random_tangent(x, torch.Generator().manual_seed(seed + 1))
    there = torch.func.jvp(lifted, (y,), (ball.transport(x, y, v),))[1]
    assert relative(hyperboloid.transport(a, lifted(y), torch.func.jvp(lifted, (x,), (v,))[1]), there) <= 2000 * EPS


@given(seeds, st.floats(0.1, 2), curvatures)
def test_triangles_satisfy_the_hyperbolic_law_of_cosines(seed, t, curvature):
    space = PoincareBall(3, curvature)
    x, u, root = case(space, seed, t)
    v = torch.linalg.cross(u, draw(seed, 3))
    v = v * (norm(space, x, u) / norm(space, x, v))
    across = root * distance(space, space.exp(x, u), space.exp(x, v)).item()
    assert math.cosh(across) == pytest.approx(math.cosh(t) ** 2, rel=1e-12)


@pytest.mark.parametrize("space", SPACES, ids=str)
@given(seed=seeds, t=st.floats(0.05, 2.0))
def test_derivatives_match_finite_differences(space, seed, t):
    x, u, _ = case(space, seed, t)
    y = space.exp(x, u)
    for call, arguments in ((space.exp, (x, u)), (space.log, (x, y)), (space.transport, (x, y, u))):
        assert torch.autograd.gradcheck(call, tuple(a.clone().requires_grad_() for a in arguments))


@pytest.mark.parametrize("space", SPACES, ids=str)
@given(seed=seeds)
def test_first_and_second_derivatives_at_zero_are_correct(space, seed):
    x, u, root = case(space, seed, 1.0)

    def velocity(s):
        return torch.func.jvp(lambda r: space.exp(x, r * u), (s,), (torch.ones_like(s),))[1]

    zero = torch.zeros((), dtype=torch.float64)
    first, second = torch.func.jvp(velocity, (zero,), (zero + 1,))
    if isinstance(space, Lorentz):
        expected = space.inner(x, u, u) * x
    else:
        a, w = root * x, root * u
        expected = 2 / (1 - a @ a) * ((w @ w) * a - 2 * (a @ w) * w) / root
    assert torch.allclose(first, u, atol=1e-14)
    assert torch.allclose(second, expected, atol=1e-13)
    assert torch.allclose(torch.func.jvp(lambda y: space.log(x, y), (x,), (u,))[1], u, atol=1e-14)
    nothing = torch.zeros_like(u).requires_grad_()
    for value in (norm(space, x, nothing), distance(space, x, x + nothing)):
        assert not torch.autograd.grad(value, nothing)[0].any()


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_vmap_and_jvp_are_supported(space):
    generator = torch.Generator().manual_seed(0)
    x = space.random_point(5, generator=generator, dtype=torch.float64)
    u = space.random_tangent(x, generator)
    y = space.exp(x, u)
    for call in (lambda a, b, c: space.exp(a, c), lambda a, b, c: space.log(a, b), space.transport):
        assert torch.allclose(torch.func.vmap(call)(x, y, u), call(x, y, u), atol=1e-14)
        assert torch.func.jvp(lambda a, f=call: f(a, y, u), (x,), (u,))[1].isfinite().all()


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_float32_is_computed_in_float64(space):
    x, u, _ = case(space, 0, 1e-3)
    y, x, u = space.exp(x, u).float(), x.float(), u.float()
    assert torch.equal(space.log(x, y), space.log(x.double(), y.double()).float())
    assert torch.equal(space.exp(x, u), space.exp(x.double(), u.double()).float())


@pytest.mark.parametrize("space", [PoincareBall(40), Lorentz(40)], ids=str)
def test_random_tangents_are_standard_normal_in_the_metric(space):
    generator = torch.Generator().manual_seed(0)
    x = space.random_point(500, generator=generator, dtype=torch.float64)
    u = space.random_tangent(x, generator)
    # The mean of 20 000 squares of normal numbers has deviation 0.01.
    assert space.inner(x, u, u).mean().item() / 40 == pytest.approx(1, abs=0.04)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(seed=seeds, curvature=curvatures)
def test_points_outside_the_ball_are_projected(dtype, seed, curvature):
    space = PoincareBall(7, curvature)
    points = space.project(draw(seed, 20, 7, dtype=dtype, scale=5.0))
    square = -curvature * points.double().square().sum(-1)
    assert (square < 1).all()
    assert (square > 1 - 16 * torch.finfo(dtype).eps).any()
    assert torch.equal(space.project(points), points)
    assert torch.equal(space.project(0.1 * points), 0.1 * points)
    assert space.log(0 * points, points).isfinite().all()


def test_spaces_are_compared_by_value():
    assert PoincareBall(3) == PoincareBall(3, -1.0) != PoincareBall(3, -2.0)
    assert hash(Lorentz(2)) == hash(Lorentz(2))
    assert Lorentz(2).shape == (3,)
    assert Lorentz(2).injectivity_radius(torch.ones(4, 3)).tolist() == [math.inf] * 4


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: PoincareBall(0), "n: expected an integer >= 1, got 0"),
        (lambda: Lorentz(0), "n: expected an integer >= 1, got 0"),
        (lambda: PoincareBall(2, 0.0), "curvature: expected a finite number < 0, got 0.0"),
        (lambda: PoincareBall(2, 1), "curvature: expected a finite number < 0, got 1"),
        (lambda: PoincareBall(2, math.nan), "curvature: expected a finite number"),
        (lambda: PoincareBall(2, -math.inf), "curvature: expected a finite number"),
        (lambda: PoincareBall(2).exp(torch.zeros(3), torch.zeros(3)), r"x: expected trailing shape \(2\), got \(3,\)"),
        (lambda: Lorentz(2).log(torch.ones(3), torch.ones(2)), r"y: expected trailing shape \(3\), got \(2,\)"),
        (lambda: Lorentz(2).log(torch.ones(3), torch.ones(3).double()), "y: expected torch.float32"),
    ],
)
def test_invalid_arguments_are_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


@pytest.mark.parametrize(
    ("r", "t", "allowed"), [(6.0, 12.0, 1e-11), (10.0, 20.0, 1e-7), (12.0, 12.0, 1e-9), (12.0, 24.0, 1e-4)]
)
def test_geodesics_through_the_centre_of_the_ball_are_accurate(r, t, allowed):
    """From distance r inward by t: as far off as coordinates at that distance are rounded, ε e^|t - r| and ε e^r."""
    ball = PoincareBall(1)
    x = torch.tensor([math.tanh(r / 2)], dtype=torch.float64)
    y = ball.exp(x, -t / 2 * (1 - x * x))
    exact = math.tanh((r - t) / 2)
    scale = 2 / (1 - max(abs(exact), y.abs().item()) ** 2)
    assert abs(y.item() - exact) * scale <= allowed
