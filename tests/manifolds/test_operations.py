"""Ladders and means: orders by slope, certificates by stationarity."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import (
    Flat,
    PoincareBall,
    RunningMean,
    Sphere,
    SymmetricPositiveDefinite,
    distance,
    geodesic,
    karcher_mean,
    norm,
    pole_ladder,
    schild_ladder,
)
from tests.support import draw, relative, rotation, seeds

SPHERE = Sphere(4)


def around(seed, radius, k=6, space=SPHERE):
    """k points within `radius` of a centre."""
    generator = torch.Generator().manual_seed(seed)
    centre = space.random_point(generator=generator, dtype=torch.float64).expand(k, -1)
    u = space.random_tangent(centre, generator)
    return space.exp(
        centre, radius * torch.rand(k, 1, generator=generator, dtype=torch.float64) * u / u.norm(dim=-1, keepdim=True)
    )


def slope(error, scales):
    """The exponent with which an error falls."""
    a, b = (error(h) for h in scales)
    return math.log(a / b) / math.log(scales[0] / scales[1])


@given(seeds)
def test_schild_ladder_has_order_three_and_projection_order_two(seed):
    generator = torch.Generator().manual_seed(seed)
    x = SPHERE.random_point(generator=generator, dtype=torch.float64)
    u, v = (SPHERE.random_tangent(x, generator) for _ in range(2))
    u, v = u / u.norm(), v / v.norm()

    def apart(transport, h):
        y = SPHERE.exp(x, h * u)
        return (transport(x, y, h * v) - SPHERE.transport(x, y, h * v)).norm().item()

    def along(h):
        return apart(lambda a, b, w: schild_ladder(SPHERE, a, b, w), h)

    def projected(h):
        return apart(lambda a, b, w: SPHERE.project_tangent(b, w), h)

    # Relative to a tangent of length h, a projection is off by h², an error of h³ in all; so is one rung of Schild.
    assert slope(along, (0.02, 0.01)) == pytest.approx(3, abs=0.2)
    assert slope(projected, (0.02, 0.01)) == pytest.approx(3, abs=0.2)


@given(seeds, st.integers(1, 5))
def test_the_pole_ladder_is_exact_on_the_sphere_for_any_number_of_rungs(seed, rungs):
    generator = torch.Generator().manual_seed(seed)
    x = SPHERE.random_point(generator=generator, dtype=torch.float64)
    u, v = (0.4 * SPHERE.random_tangent(x, generator).sign() @ torch.eye(4).double() for _ in range(2))
    u, v = SPHERE.project_tangent(x, u), SPHERE.project_tangent(x, v)
    y = SPHERE.exp(x, u)
    assert relative(pole_ladder(SPHERE, x, y, v, rungs=rungs), SPHERE.transport(x, y, v)) <= 1e-12


@given(seeds, st.floats(0.01, 0.7))
def test_a_mean_is_stationary_and_a_local_minimum(seed, radius):
    points = around(seed, radius)
    weights = draw(seed, 6).abs()
    mean = karcher_mean(SPHERE, points, weights)
    assert mean.converged
    assert mean.residual.item() <= 1e-12

    def cost(m):
        return (weights * distance(SPHERE, m.expand(6, -1), points).square()).sum().item()

    generator = torch.Generator().manual_seed(seed + 1)
    for _ in range(5):
        beside = SPHERE.exp(mean.point, 1e-3 * SPHERE.random_tangent(mean.point, generator))
        assert cost(mean.point) < cost(beside)


@given(seeds, st.floats(0.01, 0.7))
def test_a_mean_is_symmetric_and_equivariant(seed, radius):
    points, weights, q = around(seed, radius), draw(seed, 6).abs(), rotation(seed, 4)
    mean = karcher_mean(SPHERE, points, weights).point
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    assert relative(karcher_mean(SPHERE, points[order], weights[order]).point, mean) <= 1e-11
    assert relative(karcher_mean(SPHERE, points @ q, weights).point, mean @ q) <= 1e-11
    assert relative(karcher_mean(SPHERE, points, 7 * weights).point, mean) <= 1e-11


@given(seeds, st.floats(0, 1))
def test_the_mean_of_two_points_is_on_their_geodesic(seed, part):
    x, y = around(seed, 0.7, k=2)
    mean = karcher_mean(SPHERE, torch.stack([x, y]), torch.tensor([1 - part, part], dtype=torch.float64))
    assert relative(mean.point, geodesic(SPHERE, x, y, part)) <= 1e-11


@given(seeds, st.integers(1, 5))
def test_a_flat_mean_is_the_weighted_mean(seed, k):
    points, weights = draw(seed, k, 7), draw(seed + 1, k).abs()
    mean = karcher_mean(Flat(7), points, weights)
    assert relative(mean.point, weights @ points / weights.sum()) <= 1e-14
    assert mean.steps <= 2


def test_a_batch_of_means_equals_separate_means():
    points = torch.stack([around(seed, 0.5) for seed in range(6)]).reshape(2, 3, 6, 4)
    weights = draw(0, 2, 3, 6).abs()
    means = karcher_mean(SPHERE, points, weights)
    assert means.point.shape == (2, 3, 4)
    assert means.residual.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            assert relative(means.point[i, j], karcher_mean(SPHERE, points[i, j], weights[i, j]).point) <= 1e-12
    shared = karcher_mean(SPHERE, points, weights[0, 0])
    assert relative(shared.point[1, 2], karcher_mean(SPHERE, points[1, 2], weights[0, 0]).point) <= 1e-12


def test_float32_points_have_float32_means():
    points = around(0, 0.5).float()
    mean = karcher_mean(SPHERE, points)
    assert mean.point.dtype == torch.float32
    assert mean.residual.dtype == torch.float64
    assert mean.converged


def test_missing_convergence_is_reported():
    mean = karcher_mean(SPHERE, around(0, 0.7), max_steps=1)
    assert not mean.converged
    assert mean.steps == 1
    assert mean.residual.item() > 1e-12


@given(seeds, st.integers(1, 6))
def test_a_running_mean_is_the_weighted_mean_on_a_flat_space(seed, k):
    points, weights = draw(seed, k, 7), draw(seed + 1, k).abs() + 0.1
    running = RunningMean(Flat(7), points[0], weights[0].item())
    for point, weight in zip(points[1:], weights[1:].tolist(), strict=True):
        running = running.with_point(point, weight)
    assert relative(running.point, karcher_mean(Flat(7), points, weights).point) <= 1e-14
    assert running.weight == pytest.approx(weights.sum().item())


@given(seeds)
def test_a_running_mean_differs_from_the_mean_at_third_order(seed):
    gaps = []
    for radius in (0.04, 0.02):
        points = around(seed, radius, k=4)
        running = RunningMean(SPHERE, points[0])
        for point in points[1:]:
            running = running.with_point(point)
        gaps.append(distance(SPHERE, running.point, karcher_mean(SPHERE, points).point).item())
    assert math.log2(gaps[0] / gaps[1]) == pytest.approx(3, abs=0.2)


def test_a_running_mean_ignores_points_with_weight_zero():
    x, y = around(0, 0.5, k=2)
    assert RunningMean(SPHERE, x).with_point(y, 0.0) == RunningMean(SPHERE, x)


def test_large_coordinates_converge_to_their_own_rounding():
    assert karcher_mean(Flat(3), 1e8 + draw(0, 4, 3)).converged


@pytest.mark.parametrize("far", [2.0, 4.0, 6.0])
def test_the_mean_of_distant_hyperbolic_points_converges(far):
    """Three points around the centre, at distances where a whole step overshoots."""
    ball, angles = PoincareBall(2), torch.arange(3, dtype=torch.float64) * 2 * math.pi / 3 + 0.1
    points = ball.exp(torch.zeros(3, 2).double(), far / 2 * torch.stack([angles.cos(), angles.sin()], -1))
    mean = karcher_mean(ball, points, max_steps=300)
    assert mean.converged
    assert mean.point.norm() <= 1e-11


def test_the_mean_of_distant_positive_definite_matrices_converges():
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(5, 3, 3, generator=generator, dtype=torch.float64)).Q
    points = (basis * torch.tensor([2.0, 0.0, -2.0]).double().exp()) @ basis.mT
    mean = karcher_mean(SymmetricPositiveDefinite(3), points, tolerance=1e-10)
    assert mean.converged


def test_a_mean_ignores_points_with_weight_zero():
    x = torch.tensor([1.0, 0.0, 0.0, 0.0])
    mean = karcher_mean(SPHERE, torch.stack([x, -x]), torch.tensor([1.0, 0.0]))
    assert mean.converged
    assert torch.equal(mean.point, x)


def test_distance_and_mean_are_undefined_without_a_log():
    x = torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert distance(SPHERE, x, -x).isnan()
    mean = karcher_mean(SPHERE, torch.stack([x, -x]))
    assert not mean.converged
    assert mean.residual.isnan()


def test_norms_agree_with_the_inner_product():
    u = draw(0, 3, 4)
    assert torch.allclose(norm(Flat(4), u, u), u.norm(dim=-1))


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: karcher_mean(SPHERE, torch.ones(4)), r"points: expected trailing shape \(any, 4\)"),
        (lambda: karcher_mean(SPHERE, torch.ones(0, 4)), "points: expected at least one point"),
        (lambda: karcher_mean(SPHERE, torch.ones(2, 4), torch.ones(3)), "weights: expected trailing shape"),
        (lambda: karcher_mean(SPHERE, torch.ones(2, 4), torch.ones(5, 2)), "weights: expected shape"),
        (
            lambda: karcher_mean(SPHERE, torch.ones(2, 4), torch.tensor([1.0, -1.0])),
            "weights: expected finite numbers >= 0",
        ),
        (lambda: karcher_mean(SPHERE, torch.ones(2, 4), torch.zeros(2)), "weights: expected finite numbers >= 0"),
        (lambda: karcher_mean(SPHERE, torch.ones(2, 4), tolerance=-1.0), "tolerance: expected"),
        (lambda: karcher_mean(SPHERE, torch.ones(2, 4), max_steps=0), "max_steps: expected"),
        (lambda: karcher_mean(SPHERE, torch.full((2, 4), math.nan)), "points: expected finite values"),
        (lambda: RunningMean(None, torch.ones(3)), "space: expected a Manifold"),
        (lambda: RunningMean(SPHERE, torch.ones(4)).with_point(torch.ones(5, 4)), r"x: expected shape \(4\)"),
        (lambda: RunningMean(SPHERE, torch.ones(2, 4)).with_point(torch.ones(4)), r"x: expected shape \(2, 4\)"),
        (lambda: RunningMean(SPHERE, torch.ones(3)), "point: expected trailing shape"),
        (lambda: RunningMean(SPHERE, torch.ones(4)).with_point(torch.ones(3)), "x: expected shape"),
        (lambda: RunningMean(SPHERE, torch.ones(4)).with_point(torch.ones(4), -1.0), "weight: expected"),
        (lambda: pole_ladder(SPHERE, *torch.ones(3, 4), rungs=0), "rungs: expected"),
    ],
)
def test_invalid_arguments_are_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
