"""Orthonormal frames: exp against 40 digits, log as its inverse with a truthful certificate, derivatives of both."""

import math

import mpmath
import numpy as np
import pymanopt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import SpecialOrthogonal, Sphere, distance, norm, pole_ladder, stiefel
from manifoldagg.manifolds.manifold import PRIMITIVES
from manifoldagg.manifolds.stiefel import Stiefel
from manifoldagg.testing import LAWS, check_manifold
from tests.support import draw, rotation, seeds

EPS = 2.0**-52
TRIANGLE = "distance_is_a_metric"
shapes = st.sampled_from([(2, 1), (3, 1), (3, 2), (3, 3), (4, 4), (5, 2), (10, 4)])
lengths = st.one_of(st.floats(-7, 0).map(lambda e: 10.0**e), st.floats(0.1, 0.9 * math.pi))


def case(seed, t, n, p, *, rank=None):
    """A point, and a tangent of length `t` at it, with at most `rank` directions that leave the span of the point."""
    space, generator = Stiefel(n, p), torch.Generator().manual_seed(seed)
    x = space.random_point(generator=generator, dtype=torch.float64)
    noise = draw(seed + 1, n, p)
    if rank is not None:
        noise = noise[:, :rank] @ draw(seed + 2, rank, p)
        noise = noise - x @ (x.mT @ noise)
    u = space.project_tangent(x, noise)
    return space, x, u * (t / u.norm())


def exact_exp(x, u):
    """exp_x u in 40 digits, of the frame that `x` and the tangent that `u` is up to rounding."""
    x, u = mpmath.matrix(x.tolist()), mpmath.matrix(u.tolist())
    eye, p = mpmath.eye(x.cols), x.cols
    for _ in range(3):
        x = x + x * (eye - x.T * x) / 2
    for _ in range(2):
        u = u - x * (x.T * u + u.T * x) / 2
    a, s = x.T * u, u.T * u
    exponent = mpmath.zeros(2 * p)
    exponent[:p, :p], exponent[:p, p:], exponent[p:, :p], exponent[p:, p:] = a, -s, eye, a
    power = mpmath.expm(exponent)
    return (x * power[:p, :p] + u * power[p:, :p]) * mpmath.expm(-a)


def error(found, exact):
    n, p = found.shape
    return max(abs(mpmath.mpf(found[i, j].item()) - exact[i, j]) for i in range(n) for j in range(p))


def slow(n, p, *dtypes):
    return pytest.param(n, p, list(dtypes), marks=pytest.mark.soak)


BOTH = torch.float32, torch.float64


@pytest.mark.parametrize(
    ("n", "p", "dtypes"),
    [
        (5, 2, [torch.float64]),
        *(slow(n, p, *BOTH) for n, p in [(2, 1), (3, 1), (3, 2), (3, 3), (4, 4), (5, 2), (10, 4)]),
    ],
)
def test_every_law_holds(n, p, dtypes):
    space = Stiefel(n, p)
    most = check_manifold(space, seeds=1, dtypes=dtypes, laws=LAWS.keys() - {TRIANGLE}, verbose=False)
    # The law measures points up to 1.5 t apart, and further than π no logarithm is known to be the shortest.
    rest = check_manifold(space, seeds=1, dtypes=dtypes, laws={TRIANGLE}, max_distance=2.0, verbose=False)
    assert most.holds, f"\n{most}"
    assert rest.holds, f"\n{rest}"
    assert len(most.findings) + len(rest.findings) == sum(kinds <= space.capabilities for kinds, _ in LAWS.values())


@pytest.mark.parametrize(("n", "p"), [(3, 1), (3, 3), (4, 3)])
def test_the_first_laws_hold_for_every_kind_of_shape(n, p):
    laws = {
        "log_inverts_exp",
        "exp_lands_on_the_manifold",
        "projections_are_idempotent",
        "geodesics_are_reversible",
    }
    verdict = check_manifold(Stiefel(n, p), seeds=1, laws=laws, verbose=False)
    assert verdict.holds, f"\n{verdict}"


@given(seeds, st.floats(-7, 1).map(lambda e: 10.0**e), shapes, st.sampled_from([None, 1]))
def test_exp_is_exact(seed, t, shape, rank):
    if rank is not None and shape[0] == shape[1]:
        rank = None
    space, x, u = case(seed, t, *shape, rank=rank)
    with mpmath.workdps(40):
        # The rounding of an exponential grows with its exponent.
        assert error(space.exp(x, u), exact_exp(x, u)) <= 16 * EPS * max(1.0, t)


def test_exp_agrees_with_pymanopt():
    space, x, u = case(0, 1.3, 6, 3)
    theirs = pymanopt.manifolds.Stiefel(6, 3)
    # Of x and u: the canonical metric gives half the square of the part along x.
    assert theirs.inner_product(x.numpy(), u.numpy(), u.numpy()) == pytest.approx(1.3**2, rel=1e-14)
    assert (x.mT @ u).norm() > 0.1
    assert np.abs(space.exp(x, u).numpy() - theirs.exp(x.numpy(), u.numpy())).max() <= 100 * EPS


@pytest.mark.parametrize("t", [1e-7, 1e-3, 1.0, 3.0])
def test_frames_of_one_column_agree_with_the_sphere(t):
    space, x, u = case(1, t, 4, 1)
    sphere, y = Sphere(4), space.exp(x, u)
    assert torch.allclose(y[:, 0], sphere.exp(x[:, 0], u[:, 0]), rtol=0, atol=8 * EPS)
    # Near π the direction is what is left of y beside -x.
    assert torch.allclose(space.log(x, y)[:, 0], sphere.log(x[:, 0], y[:, 0]), rtol=0, atol=16 * EPS / (math.pi - t))


@pytest.mark.parametrize("t", [1e-7, 1e-3, 1.0, 4.0, 4.3])
def test_square_frames_agree_with_rotations(t):
    space, x, u = case(2, t, 4, 4)
    group, y = SpecialOrthogonal(4), space.exp(x, u)
    assert torch.allclose(y, group.exp(x, u), rtol=0, atol=32 * EPS * max(1.0, t))
    assert torch.allclose(space.log(x, y), group.log(x, y), rtol=0, atol=100 * EPS)


@given(seeds, lengths, shapes, st.sampled_from([None, 1]))
def test_log_inverts_exp_up_to_nine_tenths_of_the_injectivity_radius(seed, t, shape, rank):
    if rank is not None and shape[0] == shape[1]:
        rank = None
    space, x, u = case(seed, t, *shape, rank=rank)
    found = space.log(x, space.exp(x, u), certificate=True)
    assert found.converged
    assert found.residual <= 100 * EPS
    # x and y are frames to a few ε; the derivative of exp is at least sin(t)/t, and 0.1 at the end of the range.
    assert (found.tangent - u).norm() <= 200 * EPS / max(0.1, math.sin(t) / t)


@given(seeds, st.floats(0.1, 0.9 * math.pi))
def test_log_converges_for_equal_angles(seed, t):
    space, x, _ = case(seed, 1.0, 5, 2)
    out = torch.linalg.qr(torch.cat([x, draw(seed, 5, 3)], -1)).Q[:, 2:4]
    u = out * (t / math.sqrt(2))
    assert (space.log(x, space.exp(x, u)) - u).norm() <= 200 * EPS / max(0.1, math.sin(t) / t)


def test_larger_frames_need_no_more_steps():
    space, x, u = case(3, 0.9 * math.pi, 40, 8)
    assert (space.log(x, space.exp(x, u)) - u).norm() <= 100 * EPS


def test_the_certificate_describes_the_result():
    space, generator = Stiefel(3, 3), torch.Generator().manual_seed(0)
    x = space.random_point(4, generator=generator, dtype=torch.float64)
    u = space.random_tangent(x, generator)
    y = space.exp(x, u / norm(space, x, u)[:, None, None])
    y[1, :, 0] *= -1
    y[2, 0, 0] = math.nan
    found = space.log(x, y, certificate=True)
    assert found.converged.tolist() == [True, False, False, True]
    assert found.residual.dtype is torch.float64
    assert found.residual[1] > 0.1
    assert found.residual[2].isnan()
    measured = (space.exp(x, found.tangent) - y).flatten(1).norm(dim=1)
    assert torch.allclose(found.residual, measured, rtol=1e-10, atol=50 * EPS, equal_nan=True)
    plain = space.log(x, y)
    assert plain.isnan().all(-1).all(-1).tolist() == [False, True, True, False]
    assert torch.equal(plain[::3], found.tangent[::3])


def test_a_tangent_that_may_not_be_shortest_is_not_a_log():
    space, x, u = case(4, 1.2 * math.pi, 10, 4)
    y = space.exp(x, u)
    found = space.log(x, y, certificate=True)
    assert not found.converged
    assert space.log(x, y).isnan().all()
    # It did find a geodesic.
    assert found.residual <= 100 * EPS
    antipode = Stiefel(4, 2).log(torch.eye(4)[:, :2], -torch.eye(4)[:, :2])
    assert antipode.isnan().all()


def test_log_accepts_frames_that_are_orthonormal_in_half_precision():
    space, x, u = case(5, 1.0, 5, 2)
    found = space.log(x.bfloat16(), space.exp(x, u).bfloat16())
    assert found.dtype is torch.bfloat16
    # Entries of x and y are off by 2^-9, and the derivative of the inverse is at most 1.2 there.
    assert (found.double() - u).norm() <= 2 * 1.2 * math.sqrt(10) * 2**-9


@pytest.mark.parametrize(("n", "p", "t"), [(5, 2, 1.0), (3, 2, 2.5), (3, 3, 2.0), (3, 1, 2.0), (5, 2, 0.0)])
def test_derivatives_match_finite_differences(n, p, t):
    space, x, u = case(6, t, n, p)
    y, zeros = space.exp(x, u), torch.zeros(2, n, p, dtype=torch.float64)

    def log(a, b):
        return space.log(space.exp(x, a), space.exp(y, b))

    assert torch.autograd.gradcheck(log, tuple(zeros.clone().requires_grad_()), fast_mode=True)
    assert torch.autograd.gradcheck(space.exp, (x.clone().requires_grad_(), u.clone().requires_grad_()), fast_mode=True)


def test_second_derivatives_match_finite_differences():
    space, x, u = case(7, 1.0, 3, 2)
    y, zeros = space.exp(x, u), torch.zeros(2, 3, 2, dtype=torch.float64)

    def log(a, b):
        return space.log(space.exp(x, a), space.exp(y, b))

    assert torch.autograd.gradgradcheck(log, tuple(zeros.requires_grad_()), fast_mode=True)


def test_derivatives_at_zero_and_repeated_singular_values_are_correct():
    space, x, u = case(8, 1.0, 6, 2, rank=1)
    assert torch.autograd.gradcheck(lambda w: space.exp(x, w), (torch.zeros_like(u).requires_grad_(),))
    assert torch.autograd.gradcheck(lambda w: space.exp(x, w), (u.clone().requires_grad_(),))
    # Directions that leave the span of x and y.
    assert torch.autograd.gradcheck(lambda y: space.log(x, y), (space.exp(x, u).requires_grad_(),), fast_mode=True)
    tangent = space.random_tangent(x, torch.Generator().manual_seed(0))
    slope = torch.func.jvp(lambda y: space.log(x, y), (x,), (tangent,))[1]
    assert torch.allclose(slope, tangent, rtol=0, atol=100 * EPS)


def test_vmap_jvp_and_jacrev_are_supported():
    space, generator = Stiefel(4, 2), torch.Generator().manual_seed(0)
    x = space.random_point(3, generator=generator, dtype=torch.float64)
    u, w = space.random_tangent(x, generator) / 3, space.random_tangent(x, generator)
    y, h = space.exp(x, u), 1e-5
    for call, at, towards in ((space.exp, u, w), (space.log, y, space.project_tangent(y, w))):
        assert torch.allclose(torch.func.vmap(call)(x, at), call(x, at), rtol=0, atol=1e-14)
        jacobian = torch.func.vmap(torch.func.jacrev(call, argnums=1))(x, at)
        slope = torch.einsum("bijkl,bkl->bij", jacobian, towards)
        forward = torch.func.jvp(lambda b, call=call: call(x, b), (at,), (towards,))[1]
        difference = (call(x, at + h * towards) - call(x, at - h * towards)) / (2 * h)
        assert torch.allclose(slope, forward, rtol=0, atol=1e-13)
        # Third derivatives times h², and ε/h.
        assert torch.allclose(slope, difference, rtol=0, atol=1e-8)


@pytest.mark.usefixtures("as_shipped")
def test_it_compiles(monkeypatch):
    # Tracing takes as long as there are steps; at a short distance three are enough.
    monkeypatch.setattr(stiefel, "MAX_NEWTON_STEPS", 3)
    monkeypatch.setattr(stiefel, "TRIAL_STEPS", 1)
    space, x, u = case(9, 0.1, 3, 2)
    y = space.exp(x, u)
    for call, at in ((space.exp, u), (space.log, y)):
        compiled = torch.compile(call, backend="eager")
        assert torch.allclose(compiled(x, at), call(x, at), rtol=0, atol=1e-14)


@given(seeds, st.floats(0.01, 2.5))
def test_distances_are_invariant_under_rotations_on_both_sides(seed, t):
    space, x, u = case(seed, t, 5, 2)
    a, b = rotation(seed, 5), rotation(seed + 1, 2)
    y = space.exp(x, u)
    assert torch.allclose(space.exp(a @ x @ b, a @ u @ b), a @ y @ b, rtol=0, atol=50 * EPS)
    assert torch.allclose(space.log(a @ x @ b, a @ y @ b), a @ u @ b, rtol=0, atol=500 * EPS)


@given(seeds, shapes)
def test_project_returns_the_nearest_frame(seed, shape):
    space, x = Stiefel(*shape), draw(seed, *shape)
    point = space.project(x)
    assert torch.allclose(point.mT @ point, torch.eye(shape[1], dtype=torch.float64), rtol=0, atol=20 * EPS)
    # x = PH with H symmetric and positive: the polar decomposition is unique.
    stretch = point.mT @ x
    assert torch.allclose(point @ stretch, x, rtol=0, atol=100 * EPS)
    assert torch.allclose(stretch, stretch.mT, rtol=0, atol=100 * EPS)
    assert torch.linalg.eigvalsh(stretch).min() > -100 * EPS


@pytest.mark.parametrize("shape", [(5, 2), (3, 3), (4, 1)])
def test_project_is_differentiable_on_and_off_the_manifold(shape):
    space, x, _ = case(10, 1.0, *shape)
    for point in (x, 2 * x, x + 0.3 * draw(0, *shape)):
        assert torch.autograd.gradcheck(space.project, (point.clone().requires_grad_(),))
        assert torch.autograd.gradgradcheck(space.project, (point.clone().requires_grad_(),))
    # At a frame it is the projection to the tangents.
    noise = draw(1, *shape)
    slope = torch.func.jvp(space.project, (x,), (noise,))[1]
    assert torch.allclose(slope, space.project_tangent(x, noise), rtol=0, atol=50 * EPS)


@pytest.mark.parametrize("shape", [(5, 2), (3, 3), (4, 1)])
def test_retract_agrees_with_exp_to_second_order(shape):
    space, x, u = case(11, 1.0, *shape)
    steps = torch.logspace(-2, -1, 5, dtype=torch.float64)
    errors = torch.stack([(space.retract(x, h * u) - space.exp(x, h * u)).norm() for h in steps])
    slope = (errors[-1] / errors[0]).log() / (steps[-1] / steps[0]).log()
    assert abs(slope.item() - 3) <= 0.2


def test_the_pole_ladder_converges_to_an_isometry():
    space, x, u = case(12, 1.0, 5, 2)
    v = space.random_tangent(x, torch.Generator().manual_seed(0))
    v, y = v / v.norm(), space.exp(x, u)
    errors = []
    for rungs in (2, 4, 8):
        moved = rungs * pole_ladder(space, x, y, v / rungs, rungs=rungs)
        errors.append(abs(moved.norm().item() - 1))
    # A rung is wrong by fourth order in 1 / rungs, so that all of them, scaled back, are by second: 4 each time.
    assert errors[0] > 1e-6
    assert 2.5 <= errors[0] / errors[1] <= 6
    assert 2.5 <= errors[1] / errors[2] <= 6


def test_random_points_are_uniform():
    space = Stiefel(3, 2)
    x = space.random_point(20000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.allclose(x.mT @ x, torch.eye(2, dtype=torch.float64).expand(20000, 2, 2), rtol=0, atol=20 * EPS)
    # Entries have mean 0 and variance 1/3; of 20000 the means lie within 5 standard deviations.
    assert x.mean(0).abs().max() <= 5 / math.sqrt(3 * 20000)
    assert (x.square().mean(0) - 1 / 3).abs().max() <= 5 / math.sqrt(20000)
    assert space.random_point(generator=torch.Generator().manual_seed(0)).dtype is torch.get_default_dtype()


def test_instances_are_compared_and_hashed_by_value():
    assert Stiefel(3, 2) == Stiefel(3, 2) != Stiefel(3, 1)
    assert hash(Stiefel(3, 2)) == hash(Stiefel(3, 2))
    assert Stiefel.capabilities == PRIMITIVES - {"transport", "inverse_retract"}
    for space, radius in (
        (Stiefel(3, 2), math.pi),
        (Stiefel(3, 3), math.pi * math.sqrt(2)),
        (Stiefel(1, 1), math.inf),
    ):
        assert space.injectivity_radius(torch.eye(*space.shape)).item() == pytest.approx(radius)


def test_the_one_by_one_manifold_has_two_points():
    space, x = Stiefel(1, 1), torch.tensor([[[1.0]], [[-1.0]]])
    assert torch.equal(space.exp(x, torch.ones_like(x)), x)
    assert distance(space, x, x).tolist() == [0, 0]
    assert space.log(x, -x).isnan().all()


def test_transport_is_not_implemented():
    x = torch.eye(3)[:, :2]
    with pytest.raises(NotImplementedError, match="transport"):
        Stiefel(3, 2).transport(x, x, x)


FRAME = torch.eye(3)[:, :2]


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Stiefel(0, 1), "n: expected an integer >= 1, got 0"),
        (lambda: Stiefel(3, 0), "p: expected an integer >= 1, got 0"),
        (lambda: Stiefel(3, 1.5), "p: expected an integer >= 1, got 1.5"),
        (lambda: Stiefel(3, 4), "p: expected an integer <= n = 3, got 4"),
        (lambda: Stiefel(3, 2).exp(FRAME, torch.ones(2)), r"u: expected trailing shape \(3, 2\), got \(2,\)"),
        (lambda: Stiefel(3, 2).log(FRAME, FRAME.double()), "y: expected torch.float32"),
        (lambda: Stiefel(3, 2).project(FRAME.mT), r"x: expected trailing shape \(3, 2\), got \(2, 3\)"),
        (lambda: Stiefel(3, 2).retract(FRAME, FRAME.int()), "u: expected a floating tensor"),
    ],
)
def test_invalid_arguments_are_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


def test_one_point_broadcasts_against_a_batch():
    space, generator = Stiefel(4, 2), torch.Generator().manual_seed(0)
    x = space.random_point(generator=generator, dtype=torch.float64)
    y = space.exp(x.expand(5, 4, 2), 0.3 * space.random_tangent(x.expand(5, 4, 2), generator))
    assert torch.allclose(space.log(x, y), space.log(x.expand(5, 4, 2), y), atol=1e-14)
