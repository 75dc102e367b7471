"""Bézier curves on curved spaces: what the space's isometries do to them, slopes, and curvature that is known."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldagg.curves import Bezier
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import (
    Flat,
    Lorentz,
    Manifold,
    PoincareBall,
    Product,
    SpecialOrthogonal,
    Sphere,
    SymmetricPositiveDefinite,
    distance,
    geodesic,
    norm,
)
from manifoldagg.manifolds.grassmann import Grassmann
from tests.curves.test_mutants import TIMES, control_points
from tests.support import draw, relative, rotation, seeds

SPACES = [
    Sphere(3),
    SymmetricPositiveDefinite(2),
    SpecialOrthogonal(3),
    PoincareBall(2),
    Lorentz(2),
    Grassmann(4, 2),
    Product({"turn": Sphere(3), "shift": Flat(2)}),
]
spaces = pytest.mark.parametrize("space", SPACES, ids=lambda space: type(space).__name__)
degrees = st.integers(1, 4)


@spaces
@pytest.mark.parametrize("degree", [2, 3])
def test_elevation_and_subdivision_agree_to_third_order(space, degree):
    curve, raised, errors = Bezier(space, degree), Bezier(space, degree + 1), []
    for h in (0.1, 0.05, 0.025):
        phi = control_points(curve, 0, h)
        left, right = curve.split(phi, 0.3)
        pairs = [
            (raised(curve.elevate(phi), TIMES), curve(phi, TIMES)),
            (curve(left, TIMES), curve(phi, 0.3 * TIMES)),
            (curve(right, TIMES), curve(phi, 0.3 + 0.7 * TIMES)),
        ]
        errors.append(torch.stack([distance(space, a, b).max() for a, b in pairs]))
    slopes = [torch.log2(a / b) for a, b in pairwise(errors)]
    assert (torch.stack(slopes) - 3).abs().max() <= 0.2


@spaces
def test_a_curve_of_degree_one_is_a_geodesic(space):
    curve = Bezier(space, 1)
    phi = control_points(curve, 1)
    ends = [point.expand(5, *point.shape) for point in phi]
    assert distance(space, curve(phi, TIMES), geodesic(space, *ends, TIMES)).max() <= 1e-13
    whole = distance(space, *phi)
    speeds = norm(space, curve(phi, TIMES), curve.velocity(phi, TIMES))
    assert (speeds - whole).abs().max() <= 1e-12
    assert norm(space, curve(phi, TIMES), curve.acceleration(phi, TIMES)).max() <= 1e-11
    assert curve.length(phi).item() == pytest.approx(whole.item(), rel=1e-12)


@settings(max_examples=8)
@given(seeds, degrees)
def test_rotations_of_the_sphere_rotate_the_curve(seed, degree):
    curve, q = Bezier(Sphere(3), degree), rotation(seed, 3)
    phi = control_points(curve, seed)
    for method in (curve, curve.velocity):
        assert relative(method(phi @ q, TIMES), method(phi, TIMES) @ q) <= 1e-12


@settings(max_examples=10)
@given(seeds, st.integers(1, 3))
def test_the_curve_is_equivariant_under_congruences(seed, degree):
    curve, basis = Bezier(SymmetricPositiveDefinite(2), degree), rotation(seed, 2) + 0.1 * draw(seed, 2, 2)
    phi = control_points(curve, seed)
    moved = curve(basis @ phi @ basis.mT, TIMES)
    # Each of up to nine steps of the triangle sees matrices of condition up to 100.
    assert relative(moved, basis @ curve(phi, TIMES) @ basis.mT) <= 1e-11


@settings(max_examples=8)
@given(seeds, st.floats(0.2, 1.4))
def test_the_acceleration_of_a_small_circle_is_its_geodesic_curvature(seed, polar):
    """A circle at polar angle θ, walked at speed sin θ, bends by cos θ sin θ towards its pole."""

    class Circle(Bezier):
        def __call__(self, phi, t):
            t = torch.as_tensor(t, dtype=torch.float64)
            height = torch.full_like(t, math.cos(polar))
            return torch.stack([math.sin(polar) * t.cos(), math.sin(polar) * t.sin(), height], -1) @ turn

    turn, t = rotation(seed, 3), torch.tensor([0.0, 0.7, 2.0], dtype=torch.float64)
    circle, phi = Circle(Sphere(3), 1), torch.zeros(2, 3, dtype=torch.float64)
    bend = circle.acceleration(phi, t)
    speed = circle.velocity(phi, t).norm(dim=-1)
    assert (speed - math.sin(polar)).abs().max() <= 1e-13
    assert (bend.norm(dim=-1) / speed**2 - 1 / math.tan(polar)).abs().max() <= 1e-11
    pole = turn[2].expand(3, 3)
    towards = circle.space.log(circle(phi, t), pole)
    assert relative(bend, towards / towards.norm(dim=-1, keepdim=True) * math.cos(polar) * math.sin(polar)) <= 1e-11


@pytest.mark.parametrize("space", [Sphere(3), SymmetricPositiveDefinite(2), PoincareBall(2)], ids=str)
def test_the_pulled_back_metric_is_the_squared_speed(space):
    curve = Bezier(space)
    phi, t = control_points(curve, 0), TIMES[1:4]
    speed = norm(space, curve(phi, t), curve.velocity(phi, t))
    assert torch.allclose(curve.metric(phi, t).flatten(), speed.square(), rtol=1e-10)
    u, w = draw(0, 3), draw(1, 3, *space.shape)
    paired = (curve.push(phi, t, u) * w).reshape(3, -1).sum(-1)
    assert torch.allclose(paired, curve.pull(phi, t, w) * u, atol=1e-11)


@pytest.mark.parametrize("space", [Sphere(3), SymmetricPositiveDefinite(2), SpecialOrthogonal(3)], ids=str)
def test_the_curve_is_differentiable_in_its_control_points(space):
    curve = Bezier(space)
    phi = control_points(curve, 0)
    tangent = 0.3 * torch.stack([space.random_tangent(p, torch.Generator().manual_seed(i)) for i, p in enumerate(phi)])

    def moved(step):
        return curve(space.exp(phi, step * tangent), 0.4)

    assert torch.autograd.gradcheck(moved, (torch.tensor(0.1, dtype=torch.float64, requires_grad=True),))


def test_the_length_of_a_curve_is_differentiable():
    curve = Bezier(Sphere(3))
    phi = control_points(curve, 0)
    tangent = curve.space.random_tangent(phi, torch.Generator().manual_seed(1))

    def length(step):
        return curve.length(curve.space.exp(phi, step * tangent))

    assert torch.autograd.gradcheck(length, (torch.tensor(0.1, dtype=torch.float64, requires_grad=True),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@spaces
def test_results_have_the_dtype_of_the_control_points(space, dtype):
    curve = Bezier(space)
    phi = control_points(curve, 0).to(dtype)
    for result in (curve(phi, 0.3), curve.velocity(phi, 0.3), curve.length(phi), curve.elevate(phi)):
        assert result.dtype == dtype
        assert result.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_points_of_the_curve_are_contained_in_it(dtype):
    curve = Bezier(Sphere(3), 3)
    phi, wanted = control_points(curve, 0).to(dtype), torch.tensor([[0.0, 0.31], [0.77, 1.0]], dtype=torch.float64)
    points = curve(phi, wanted)
    t, away = curve.nearest(phi, points)
    tolerance = 20 * torch.finfo(dtype).eps
    assert (t - wanted).abs().max() <= tolerance / curve.length(phi).item()
    assert away.max() <= tolerance
    assert curve.contains(phi, points).all()
    assert not curve.contains(phi, curve.space.project(points + 0.1 * torch.eye(3, dtype=dtype)[0])).any()


def test_a_point_without_a_log_is_not_nearest():
    """The antipode of a place on the curve has no log there: others are compared."""
    curve = Bezier(Sphere(3), 1)
    phi = torch.tensor([[1.0, 0.0, 0.0], [math.cos(0.5), math.sin(0.5), 0.0]], dtype=torch.float64)
    t, away = curve.nearest(phi, -phi[0])
    assert t.item() == pytest.approx(1.0, abs=1e-12)
    assert away.item() == pytest.approx(math.pi - 0.5, rel=1e-12)


class NoLog(Manifold):
    capabilities = frozenset({"exp"})
    shape = (2,)

    def __str__(self):
        return "NoLog"


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: Bezier(NoLog()),
            "space: expected a flat manifold or one with exp and log, got NoLog, which has no log",
        ),
        (lambda: Bezier(Sphere(3))(torch.zeros(3, 2), 0.5), r"phi: expected shape \(3, 3\), got \(3, 2\)"),
        (lambda: Bezier(Sphere(3)).velocity(torch.eye(3)[:2], 0.5), r"phi: expected shape"),
        (lambda: Bezier(Sphere(3)).acceleration(torch.eye(3), math.nan), "t: expected a finite number, got nan"),
        (lambda: Bezier(Sphere(3), 1).length(torch.eye(3)[:1] * torch.tensor([[1.0], [-1.0]])), "finite length"),
        (lambda: Bezier(Sphere(3)).nearest(torch.eye(3), torch.zeros(2)), r"point: expected trailing shape \(3\)"),
    ],
)
def test_invalid_arguments_are_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
