"""Subspaces against 40-digit references, whatever basis stands for them, and where angles vanish, repeat or are right."""

import math

import mpmath
import pymanopt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import Sphere, distance, karcher_mean
from manifoldagg.manifolds.grassmann import Grassmann
from manifoldagg.testing import LAWS, check_manifold
from tests.support import draw, rotation, seeds

EPS = 2.0**-52
sizes = st.sampled_from([(2, 1), (5, 2), (4, 3), (6, 3)])
lengths = st.one_of(st.floats(-7, 0).map(lambda e: 10.0**e), st.floats(0.1, 1.4))


def case(seed, t, size):
    """A point, and a tangent of length `t` at it."""
    space, generator = Grassmann(*size), torch.Generator().manual_seed(seed)
    x = space.random_point(generator=generator, dtype=torch.float64)
    u = space.random_tangent(x, generator)
    return space, x, u * (t / u.norm())


def other(space, x, seed):
    """Another tangent, of length 1."""
    v = space.random_tangent(x, torch.Generator().manual_seed(seed + 1))
    return v / v.norm()


def with_angles(n, p, *angles):
    """The first p axes of n, and the tangent that turns them by these angles into the next axes."""
    x, u = torch.eye(n, p, dtype=torch.float64), torch.zeros(n, p, dtype=torch.float64)
    for i, angle in enumerate(angles):
        u[p + i, i] = angle
    return x, u


def precise(v):
    return mpmath.matrix(v.tolist())


def orthonormal(x):
    """The orthonormal columns that `x` has up to rounding: Newton's iteration doubles their digits."""
    for _ in range(4):
        x = x * (3 * mpmath.eye(x.cols) - x.T * x) / 2
    return x


def of_root(s, function, at_zero):
    """A function of the square root of a positive semidefinite matrix."""
    values, basis = mpmath.eigsy((s + s.T) / 2)
    roots = [mpmath.sqrt(max(value, 0)) for value in values]
    # The functions here are even: below 1e-18 they are their values at 0 to 36 digits.
    return basis * mpmath.diag([function(r) if r > 1e-18 else mpmath.mpf(at_zero) for r in roots]) * basis.T


def exact_exp(x, u):
    return x * of_root(u.T * u, mpmath.cos, 1) + u * of_root(u.T * u, lambda r: mpmath.sin(r) / r, 1)


def exact_log(x, y):
    """By tangents of the angles, which need no aligned basis."""
    slope = y * (x.T * y) ** -1 - x
    return slope * of_root(slope.T * slope, lambda r: mpmath.atan(r) / r, 1)


def exact_transport(x, y, u):
    """Along the geodesic in its own basis, then into that of `y`."""
    d = exact_log(x, y)
    sine = d * of_root(d.T * d, lambda r: mpmath.sin(r) / r, 1)
    versine = d * of_root(d.T * d, lambda r: (1 - mpmath.cos(r)) / r**2, 0.5)
    return (u - x * (sine.T * u) - versine * (d.T * u)) * (y.T * exact_exp(x, d)).T


def error(found, exact):
    rows, columns = found.shape
    return max(abs(mpmath.mpf(found[i, j].item()) - exact[i, j]) for i in range(rows) for j in range(columns))


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("size", [(3, 1), (4, 3), (5, 2), (6, 3)])
def test_every_law_holds(size):
    verdict = check_manifold(Grassmann(*size), seeds=1, verbose=False)
    assert verdict.holds, f"\n{verdict}"
    assert len(verdict.findings) == len(LAWS)


def test_pymanopt_agrees():
    """On exp, log and distance; its transport is a projection."""
    theirs = pymanopt.manifolds.Grassmann(6, 3)
    for seed in range(5):
        space, x, u = case(seed, 1.2, (6, 3))
        y = space.exp(x, u)
        assert torch.allclose(space.invariant(y), space.invariant(torch.from_numpy(theirs.exp(x.numpy(), u.numpy()))))
        assert torch.allclose(space.log(x, y), torch.from_numpy(theirs.log(x.numpy(), y.numpy())), atol=1e-12)
        # By arccosines of the cosines, which keep half of the digits.
        assert distance(space, x, y).item() == pytest.approx(theirs.dist(x.numpy(), y.numpy()), rel=1e-7)


@given(seeds, st.one_of(lengths, st.floats(1.4, 20)), sizes)
def test_exp_is_exact(seed, t, size):
    space, x, u = case(seed, t, size)
    y = space.exp(x, u)
    # An angle of t radians is known to t ε.
    allowed = 20 * EPS * max(1.0, t)
    with mpmath.workdps(40):
        assert error(y, exact_exp(precise(x), precise(u))) <= allowed
    assert (y.mT @ y - torch.eye(space.p)).abs().max() <= 3 * allowed


@given(seeds, lengths, sizes)
def test_log_transport_and_distance_are_exact_for_every_basis(seed, t, size):
    space, x, u = case(seed, t, size)
    y, v = space.exp(x, u) @ rotation(seed, space.p), other(space, x, seed)
    log, moved = space.log(x, y), space.transport(x, y, v)
    with mpmath.workdps(40):
        # x and y are orthonormal to a few ε, which moves a tangent by as much.
        a, b = orthonormal(precise(x)), orthonormal(precise(y))
        cosines = mpmath.eigsy(b.T * a * a.T * b, eigvals_only=True)
        length = mpmath.sqrt(sum(mpmath.acos(mpmath.sqrt(min(value, 1))) ** 2 for value in cosines))
        # Twice what 700 draws showed; the product of an SVD, which is not quite a polar factor, makes five times as much.
        assert error(log, exact_log(a, b)) <= 8 * EPS
        assert error(moved, exact_transport(a, b, precise(v))) <= 6 * EPS
        assert abs(distance(space, x, y).item() - length) <= 8 * EPS
    assert (x.mT @ log).abs().max() <= 4 * EPS * max(1.0, t)
    assert (y.mT @ moved).abs().max() <= 8 * EPS


@given(seeds, lengths, sizes)
def test_results_depend_only_on_subspaces(seed, t, size):
    space, x, u = case(seed, t, size)
    v, y = other(space, x, seed), space.exp(x, u)
    q, r = rotation(seed + 1, space.p), rotation(seed + 2, space.p)
    pairs = [
        (space.exp(x @ q, u @ q), y @ q),
        (space.log(x @ q, y @ r), space.log(x, y) @ q),
        (space.transport(x @ q, y @ r, v @ q), space.transport(x, y, v) @ r),
        (space.project_tangent(x @ q, y @ q), space.project_tangent(x, y) @ q),
        (space.retract(x @ q, u @ q), space.retract(x, u) @ q),
        (space.inner(x @ q, u @ q, v @ q), space.inner(x, u, v)),
        (space.invariant(x @ q), space.invariant(x)),
        (x.mT @ space.project_tangent(x, u + 1e6 * x), torch.zeros(space.p, space.p)),
    ]
    for found, expected in pairs:
        assert (found - expected).abs().max() <= 40 * EPS


@given(seeds, lengths, sizes)
def test_primitives_are_equivariant_under_rotations(seed, t, size):
    space, x, u = case(seed, t, size)
    v, y, turn = other(space, x, seed), space.exp(x, u), rotation(seed + 1, space.n)
    pairs = [
        (space.exp(turn @ x, turn @ u), turn @ y),
        (space.log(turn @ x, turn @ y), turn @ space.log(x, y)),
        (space.transport(turn @ x, turn @ y, turn @ v), turn @ space.transport(x, y, v)),
        (space.retract(turn @ x, turn @ u), turn @ space.retract(x, u)),
    ]
    for found, expected in pairs:
        assert (found - expected).abs().max() <= 40 * EPS


@given(seeds, lengths, st.integers(2, 6))
def test_lines_agree_with_the_sphere_up_to_sign(seed, t, n):
    space, x, u = case(seed, t, (n, 1))
    sphere, v, y = Sphere(n), other(space, x, seed), space.exp(x, u)
    a, b, w = x[:, 0], y[:, 0], v[:, 0]
    assert (b - sphere.exp(a, u[:, 0])).abs().max() <= 8 * EPS
    assert (space.log(x, -y)[:, 0] - sphere.log(a, b)).abs().max() <= 8 * EPS
    assert (-space.transport(x, -y, v)[:, 0] - sphere.transport(a, b, w)).abs().max() <= 8 * EPS


@given(seeds, lengths, sizes)
def test_orthogonal_complements_have_the_same_distance(seed, t, size):
    space, x, u = case(seed, t, size)
    dual = Grassmann(space.n, space.n - space.p)
    a, b = (torch.linalg.qr(point, mode="complete").Q[:, space.p :] for point in (x, space.exp(x, u)))
    assert distance(dual, a, b).item() == pytest.approx(t, rel=0, abs=40 * EPS)


@pytest.mark.parametrize("gap", [1e-1, 1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("count", [1, 2])
def test_log_is_accurate_for_angles_close_to_a_right_angle(gap, count):
    right, turn = math.pi / 2 - gap, rotation(3, 6)
    space, (x, u) = Grassmann(6, 2), with_angles(6, 2, right, right if count == 2 else 0.3)
    x, u = turn @ x, turn @ u
    y = space.exp(x, u) @ rotation(4, 2)
    assert (space.log(x, y) - u).abs().max() <= 20 * EPS / (gap if count == 2 else 1)
    assert distance(space, x, y).item() == pytest.approx(u.norm().item(), rel=20 * EPS)


def test_log_at_a_right_angle_is_nan_only_for_that_element():
    space, x = Grassmann(4, 2), torch.eye(4, 2, dtype=torch.float64)
    y = torch.stack([torch.eye(4, dtype=torch.float64)[:, [0, 2]], x, torch.full_like(x, math.nan)])
    for found in (space.log(x, y), space.transport(x, y, torch.zeros_like(x))):
        assert found.isnan().flatten(1).all(1).tolist() == [True, False, True]
        assert (found[1] == 0).all()
    assert space.project(y).isnan().flatten(1).all(1).tolist() == [False, False, True]


def along(space, x, y, v):
    """log and transport of points that stay on the manifold, as functions of displacements of both."""

    def moved(a, b):
        return space.exp(x, space.project_tangent(x, a)), space.exp(y, space.project_tangent(y, b))

    return lambda a, b: space.log(*moved(a, b)), lambda a, b: space.transport(*moved(a, b), v)


@pytest.mark.parametrize(("seed", "t", "size"), [(0, 0.05, (3, 1)), (1, 1.0, (4, 2)), (2, 3.0, (4, 3))])
def test_derivatives_match_finite_differences(seed, t, size):
    space, x, u = case(seed, t, size)
    assert torch.autograd.gradcheck(space.exp, (x.clone().requires_grad_(), u.clone().requires_grad_()))
    assert torch.autograd.gradcheck(space.retract, (x.clone().requires_grad_(), u.clone().requires_grad_()))
    assert torch.autograd.gradcheck(space.project, (draw(seed, *size).requires_grad_(),))


@pytest.mark.parametrize(
    ("seed", "t", "size"), [(0, 0.05, (3, 1)), (1, 0.7, (4, 2)), (2, 1.3, (4, 3)), (3, 1.3, (5, 2))]
)
def test_derivatives_along_the_manifold_match_finite_differences(seed, t, size):
    space, x, u = case(seed, t, size)
    a, b = (part.requires_grad_() for part in draw(seed, 2, *size, scale=0.05))
    for call in along(space, x, space.exp(x, u) @ rotation(seed, space.p), other(space, x, seed)):
        assert torch.autograd.gradcheck(call, (a, b))


@pytest.mark.parametrize("angles", [(0.0, 0.0), (0.7, 0.7), (0.7, 0.0)])
def test_first_and_second_derivatives_at_zero_and_repeated_angles_are_correct(angles):
    space, (x, u) = Grassmann(4, 2), with_angles(4, 2, *angles)
    y, (a, b) = space.exp(x, u) @ rotation(0, 2), torch.zeros(2, 4, 2, dtype=torch.float64).unbind()
    calls = (*along(space, x, y, other(space, x, 0)), lambda a, b: space.exp(x + a, u + b))
    for call in (*calls, lambda a, b: space.project(x + a), lambda a, b: space.retract(x + a, u + b)):
        assert torch.autograd.gradcheck(call, (a.requires_grad_(), b.requires_grad_()))
        assert torch.autograd.gradgradcheck(call, (a, b), fast_mode=True)


@given(seeds, sizes)
def test_the_derivative_of_log_at_its_point_is_the_identity(seed, size):
    space, x, u = case(seed, 1.0, size)
    y = x @ rotation(seed, space.p)
    slope = torch.func.jvp(lambda y: space.log(x, y), (y,), (u @ rotation(seed, space.p),))[1]
    assert (slope - u).abs().max() <= 20 * EPS


@given(seeds, sizes)
def test_the_derivative_of_project_at_a_point_removes_the_symmetric_part(seed, size):
    space, x, _ = case(seed, 1.0, size)
    e = draw(seed, *size)
    across, turn = e - x @ (x.mT @ e), x.mT @ e
    slope = torch.func.jvp(space.project, (x,), (e,))[1]
    assert (slope - across - x @ (turn - turn.mT) / 2).abs().max() <= 20 * EPS * e.abs().max()
    weights = draw(seed + 1, *size)
    point = x.clone().requires_grad_()
    (slope_back,) = torch.autograd.grad((space.project(point) * weights).sum(), point)
    assert ((slope_back * e).sum() - (slope * weights).sum()).abs() <= 100 * EPS * weights.norm() * e.norm()


def test_function_transforms_are_supported():
    space, generator = Grassmann(5, 2), torch.Generator().manual_seed(0)
    x = space.random_point(3, generator=generator, dtype=torch.float64)
    u = space.random_tangent(x, generator) / 4
    y = space.exp(x, u) @ rotation(0, 2)
    calls = {
        "exp": lambda x, y, u: space.exp(x, u),
        "log": lambda x, y, u: space.log(x, y),
        "transport": space.transport,
        "project": lambda x, y, u: space.project(x + u),
        "retract": lambda x, y, u: space.retract(x, u),
    }
    for name, call in calls.items():
        assert torch.allclose(torch.func.vmap(call)(x, y, u), call(x, y, u), rtol=0, atol=40 * EPS), name
        one = x[0], y[0], u[0]
        back, ahead = torch.func.jacrev(call)(*one), torch.func.jacfwd(call)(*one)
        assert torch.allclose(back, ahead, rtol=0, atol=1e-14), name
        twice = torch.func.jacfwd(torch.func.jacrev(call))(*one)
        assert torch.allclose(twice, torch.func.jacrev(torch.func.jacrev(call))(*one), rtol=0, atol=1e-13), name


@pytest.mark.usefixtures("as_shipped")
def test_it_compiles_as_one_graph():
    (space, x, u), turn = case(0, 0.5, (5, 2)), rotation(0, 2)

    def everything(x, u):
        y = space.exp(x, u) @ turn
        return torch.stack([space.log(x, y), space.transport(x, y, u), space.project(x + u), space.retract(x, u)])

    compiled = torch.compile(everything, backend="aot_eager", fullgraph=True, dynamic=False)
    assert torch.allclose(compiled(x, u), everything(x, u), rtol=0, atol=40 * EPS)


def test_one_point_broadcasts_against_a_batch():
    space, x, u = case(0, 0.5, (5, 2))
    many = torch.stack([0.2 * u, u])
    y = space.exp(x, many)
    assert y.shape == (2, 5, 2)
    assert torch.allclose(space.log(x, y), many, rtol=0, atol=20 * EPS)
    assert torch.allclose(space.transport(x, y, u)[1], space.transport(x, y[1], u), rtol=0, atol=20 * EPS)


@given(seeds, st.floats(1e-3, 1.4), sizes)
def test_float32_is_computed_in_float64(seed, t, size):
    space, x, u = case(seed, t, size)
    y, v, ulp = space.exp(x, u), other(space, x, seed), 2.0**-23
    for found, exact in [
        (space.exp(x.float(), u.float()), y),
        (space.log(x.float(), y.float()), u),
        (space.transport(x.float(), y.float(), v.float()), space.transport(x, y, v)),
    ]:
        assert found.dtype == torch.float32
        # What rounding x, y and u moves: three roundings of entries at most 1, seen under angles up to 1.4.
        assert (found - exact).abs().max() <= 6 * ulp


@given(seeds, st.integers(1, 4))
def test_project_returns_the_nearest_basis(seed, p):
    space, noise = Grassmann(4, p), draw(seed, 4, p)
    point = space.project(noise)
    assert (point.mT @ point - torch.eye(p)).abs().max() <= 8 * EPS
    others = space.random_point(1000, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    best = (others - noise).square().sum((-2, -1)).min()
    assert (point - noise).square().sum() <= best + 100 * EPS
    # Optimality: of noise = q h the factor h is symmetric and positive semidefinite, and nothing is left across q.
    h = point.mT @ noise
    assert (h - h.mT).abs().max() <= 40 * EPS * noise.norm()
    assert (noise - point @ h).abs().max() <= 40 * EPS * noise.norm()
    assert torch.linalg.eigvalsh(h).min() >= -40 * EPS * noise.norm()


@pytest.mark.parametrize("condition", [1e4, 1e8, 1e12, 1e16])
def test_project_is_orthonormal_for_almost_dependent_columns(condition):
    stretch = torch.diag(torch.tensor([1.0, 1 / condition, 1 / condition], dtype=torch.float64))
    point = Grassmann(5, 3).project(torch.linalg.qr(draw(0, 5, 3)).Q @ stretch @ rotation(1, 3))
    assert (point.mT @ point - torch.eye(3)).abs().max() <= 8 * EPS


@given(seeds, sizes)
def test_retract_agrees_with_exp_to_second_order(seed, size):
    space, x, u = case(seed, 1.0, size)
    gaps = [(space.log(x, space.retract(x, h * u)) - h * u).norm().item() for h in (0.1, 0.01)]
    assert math.log10(gaps[0] / gaps[1]) == pytest.approx(3, abs=0.2)
    values, basis = torch.linalg.eigh(torch.eye(space.p) + u.mT @ u)
    assert (space.retract(x, u) - (x + u) @ basis / values.sqrt() @ basis.mT).abs().max() <= 20 * EPS


@pytest.mark.parametrize("seed", [0, 1])
def test_the_mean_of_subspaces_does_not_depend_on_their_bases(seed):
    space, x, _ = case(seed, 1.0, (6, 3))
    # Within a quarter of π/2 of x: the mean is unique.
    tangents = torch.stack([0.35 * other(space, x, seed + i) for i in range(5)])
    points = space.exp(x, tangents)
    turned = points @ torch.linalg.qr(draw(seed, 5, 3, 3)).Q
    found, again = (karcher_mean(space, p, tolerance=1e-13) for p in (points, turned))
    assert all([found.converged, again.converged])
    # The objective is convex there with a modulus above 1/2: two stationary points are no farther apart than this.
    assert (space.invariant(found.point) - space.invariant(again.point)).abs().max() <= 8e-13
    assert (space.log(found.point, turned).mean(0)).norm() <= 1e-12


def test_random_points_are_uniform_and_equal_in_both_precisions():
    space = Grassmann(4, 2)
    x = space.random_point(20000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    # Entries of the projector have the mean of p/n times the identity and variance below 1/4: 5 standard deviations.
    assert (space.invariant(x).mean(0) - torch.eye(4) / 2).abs().max() <= 5 / math.sqrt(4 * 20000)
    single = space.random_point(20000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(single, x.to(torch.get_default_dtype()))
    u = space.random_tangent(x, torch.Generator().manual_seed(1))
    # A standard normal in p (n - p) = 4 dimensions: its square has mean 4 and variance 8.
    assert abs(space.inner(x, u, u).mean().item() - 4) <= 5 * math.sqrt(8 / 20000)


def test_the_whole_space_is_a_single_point():
    space, x, y = Grassmann(3, 3), rotation(0, 3), rotation(1, 3)
    assert space.injectivity_radius(x).item() == math.inf
    assert distance(space, x, y).item() <= EPS
    assert space.project_tangent(x, draw(0, 3, 3)).abs().max() <= EPS
    assert (space.exp(x, torch.zeros_like(x)) == x).all()


def test_instances_are_compared_and_hashed_by_value():
    assert Grassmann(3, 2) == Grassmann(3, 2) != Grassmann(3, 1)
    assert Grassmann(3, 2).injectivity_radius(torch.eye(3)[:, :2]).item() == pytest.approx(math.pi / 2)


X = torch.eye(3)[:, :2]


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Grassmann(0, 1), "n: expected an integer >= 1, got 0"),
        (lambda: Grassmann(3, 0), "p: expected an integer >= 1, got 0"),
        (lambda: Grassmann(3, 4), "p: expected an integer from 1 to n = 3, got 4"),
        (lambda: Grassmann(3, True), "p: expected an integer >= 1, got True"),
        (lambda: Grassmann(3, 2).exp(X, torch.ones(3)), r"u: expected trailing shape \(3, 2\), got \(3,\)"),
        (lambda: Grassmann(3, 2).project(X.mT), r"x: expected trailing shape \(3, 2\), got \(2, 3\)"),
        (lambda: Grassmann(3, 2).log(X, X.double()), "y: expected torch.float32"),
        (lambda: Grassmann(3, 2).transport(X, X, X.long()), "u: expected a floating tensor"),
    ],
)
def test_invalid_arguments_are_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
