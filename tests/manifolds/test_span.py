"""Means in the span of the points: by coefficients what the iteration finds, to its last digit, without its scratch."""

import math
from dataclasses import dataclass

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from manifoldagg.averaging import karcher
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import Flat, ParameterSpace, Power, Product, Sphere, SymmetricPositiveDefinite, karcher_mean
from manifoldagg.manifolds.span import Span
from tests.support import draw, relative, seeds

EPS = torch.finfo(torch.float64).eps
MIXED = Product({"a": Flat(7), "b": Sphere(20), "c": Flat(2), "d": Flat(4), "e": Power(Sphere(9), (2, 3))})


def around(space, seed, k, size, dtype=torch.float64):
    """k points within about `size` of one."""
    generator = torch.Generator().manual_seed(seed)
    x = space.random_point(generator=generator, dtype=torch.float64).expand(k, *space.shape)
    u = space.random_tangent(x.contiguous(), generator)
    return space.exp(x, size * u / space.inner(x, u, u).sqrt().amax()).to(dtype)


def iterated(space, points, weights=None, **options):
    """The mean by the iteration on points, which means of batches take."""
    return karcher_mean(space, points[None], weights, **options)


def exact_mean(points, weights):
    """The Karcher mean of unit vectors in 40 digits."""
    with mpmath.workdps(40):
        x = [mpmath.matrix(point.tolist()) for point in points]
        x = [point / mpmath.norm(point) for point in x]
        total = mpmath.fsum(weights.tolist())
        m = x[0]
        for _ in range(60):
            pull = mpmath.zeros(len(m), 1)
            for w, point in zip(weights.tolist(), x, strict=True):
                chord = point - m
                across = chord - mpmath.fdot(m, chord) * m
                length = mpmath.norm(across)
                if length > 0:
                    pull += w / total * mpmath.atan2(length, mpmath.fdot(m, point)) / length * across
            length = mpmath.norm(pull)
            if length < mpmath.mpf(10) ** -30:
                break
            m = mpmath.cos(length) * m + mpmath.sin(length) / length * pull
        return torch.tensor([float(entry) for entry in m], dtype=torch.float64)


@pytest.mark.parametrize("k", [1, 2, 5, 8])
@pytest.mark.parametrize("size", [1e-9, 1e-6, 1e-3, 0.1, 1.0])
def test_a_spherical_mean_is_accurate_to_rounding(k, size):
    points = around(Sphere(40), k, k, size)
    weights = draw(k, k).abs() + 0.1
    exact = exact_mean(points, weights)
    mean = karcher(Sphere(40), points, weights, tolerance=EPS)
    assert mean.converged
    # An entry is a sum in float64, rounded once; its coefficients have a few roundings each, and what the residual left.
    assert (mean.point - exact).abs().max() <= 4 * EPS * exact.abs().max() + 2 * mean.residual


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(seeds, st.integers(1, 8), st.floats(-5, 0))
def test_the_mean_of_narrow_models_is_rounded_once(dtype, seed, k, exponent):
    points = around(Sphere(300), seed, k, 10.0**exponent, dtype)
    weights = draw(seed, k).abs() + 0.1
    mean = karcher(Sphere(300), points, weights).point
    exact = iterated(Sphere(300), points.double(), weights).point[0]
    assert mean.dtype == dtype
    # Half a unit in the last place, or half the smallest number that is not 0.
    unit = torch.finfo(dtype).eps / 2
    least = torch.finfo(dtype).smallest_normal * unit
    assert ((mean.double() - exact).abs() <= (1 + 1e-6) * unit * exact.abs() + least).all()


@given(seeds, st.integers(1, 8), st.floats(-6, 0))
def test_the_mean_on_a_product_is_the_mean_of_each_leaf(seed, k, exponent):
    points = around(MIXED, seed, k, 10.0**exponent)
    weights = draw(seed, k).abs() + 0.1
    assert Span.of(MIXED, [*points], 0) is not None
    mean = karcher(MIXED, points, weights, tolerance=EPS)
    other = iterated(MIXED, points, weights)
    assert mean.converged
    assert relative(mean.point, other.point[0]) <= 32 * EPS + 2 * other.residual
    start = 0
    for space, size in zip(MIXED.spaces, (7, 20, 2, 4, 54), strict=True):
        part = points[:, start : start + size].reshape(k, *space.shape)
        leaf = karcher(space, part, weights, tolerance=EPS).point.flatten()
        assert (mean.point[start : start + size] - leaf).abs().max() <= 32 * EPS * points.abs().max()
        start += size


@given(seeds, st.integers(1, 8))
def test_the_residual_equals_that_of_the_iteration(seed, k):
    points = around(MIXED, seed, k, 1.0)
    for steps in (1, 2, 3):
        mean = karcher_mean(MIXED, points, max_steps=steps, tolerance=0.0)
        other = iterated(MIXED, points, max_steps=steps, tolerance=0.0)
        # Angles keep half the digits where the coefficients nearly cancel; the residual is a sum of those.
        assert mean.residual.item() == pytest.approx(other.residual.item(), rel=1e-9, abs=1e-14)


def test_the_mean_of_equal_models_is_the_model():
    point = around(Sphere(30), 0, 1, 0.0)[0].float()
    for k in (1, 2, 5):
        mean = karcher(Sphere(30), [point.clone() for _ in range(k)])
        assert torch.equal(mean.point, (point.double() / point.double().norm()).float())
        assert mean.residual.item() <= EPS


@given(seeds, st.integers(2, 6))
def test_a_repeated_model_equals_one_with_more_weight(seed, k):
    points = around(Sphere(50), seed, k, 0.5)
    weights = draw(seed, k).abs() + 0.1
    twice = karcher(Sphere(50), [*points, points[0]], [*weights.tolist(), weights[0].item()], tolerance=EPS)
    weights[0] *= 2
    once = karcher(Sphere(50), points, weights, tolerance=EPS)
    # What the residuals left in either, and a few roundings.
    assert relative(twice.point, once.point) <= 8 * EPS + 2 * (twice.residual + once.residual)


def test_antipodes_have_no_mean():
    x = around(Sphere(30), 0, 1, 0.0)[0]
    mean = karcher(Sphere(30), [x, -x])
    assert mean.residual.isnan()
    assert not mean.converged


def test_a_model_with_weight_zero_is_ignored_even_at_the_antipode():
    x = around(Sphere(30), 0, 1, 0.0)[0]
    mean = karcher(Sphere(30), [-x, x], [0.0, 1.0])
    assert mean.converged
    assert relative(mean.point, x) <= EPS


@dataclass(frozen=True)
class Other(Sphere):
    """A sphere with formulas of its own, as far as anyone knows."""


@pytest.mark.parametrize(
    ("space", "k"),
    [(SymmetricPositiveDefinite(3), 2), (Other(9), 2), (Power(Other(9), (2,)), 2), (Sphere(4), 5)],
    ids=str,
)
def test_other_spaces_and_more_points_than_coordinates_use_the_iteration(space, k):
    points = around(space, 0, k, 0.3)
    assert Span.of(space, [*points.flatten(1)], 0) is None
    assert torch.equal(karcher(space, points).point, iterated(space, points, tolerance=1e-12).point[0])


def test_means_are_differentiable():
    points = around(Sphere(9), 0, 3, 0.3).requires_grad_()
    mean = karcher_mean(Sphere(9), points).point
    (slope,) = torch.autograd.grad(mean[0], points)
    assert slope.abs().max() > 0.1
    assert not karcher(Sphere(9), points).point.requires_grad


def test_leaves_of_a_narrow_model_may_be_off_the_sphere_by_rounding():
    state = {"a": draw(0, 5).bfloat16(), "b": around(Sphere(40), 0, 1, 0.0)[0].bfloat16()}
    space = ParameterSpace.of_state_dict(state, {"b": Sphere(40)})
    point = space.point(state)
    span = Span.of(space, [point, point], 0)
    assert span is not None
    assert span.lies_on_space
    point[7] += 1
    with pytest.raises(ArgumentError, match=r"versions\[1\]: b: expected a point of Sphere"):
        karcher(space, [space.point(state), point])


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e200])
def test_nonfinite_entries_of_flat_leaves_are_rejected(bad):
    space = Product({"a": Flat(3), "b": Sphere(9)})
    points = around(space, 0, 2, 0.3)
    points[1, 2] = bad
    if math.isfinite(bad):
        # Too long for its square: the iteration's mean, which needs no square of it.
        assert karcher(space, points).point[2] == pytest.approx(bad / 2)
    else:
        with pytest.raises(ArgumentError, match=r"versions\[1\]: expected finite values"):
            karcher(space, points)


class Allocations(TorchDispatchMode):
    """The bytes of every new storage that operations return."""

    def __init__(self):
        super().__init__()
        self.sizes = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.sizes[storage.data_ptr()] = storage.nbytes()
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_allocates_only_its_result(dtype):
    size = 300_000
    space = Product({"a": Flat(1000), "b": Sphere(size - 1000)})
    points = [*around(space, 0, 3, 0.3, dtype)]
    given = {point.untyped_storage().data_ptr() for point in points}
    with Allocations() as seen:
        mean = karcher(space, points)
    large = {place for place, held in seen.sizes.items() if held >= size} - given
    assert large == {mean.point.untyped_storage().data_ptr()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("gap", [1e-1, 1e-2, 1e-4, 1e-6])
def test_nearly_opposite_points_have_a_mean_on_the_sphere(gap, dtype):
    """Their mean has coefficients as large as 1 / gap on them: what the points themselves are better for."""
    x = torch.tensor([0.6, 0.48, 0.64, 0.0, 0.0, 0.0], dtype=torch.float64)
    points = torch.stack([x, -math.cos(gap) * x + math.sin(gap) * x.roll(3)]).to(dtype)
    mean = karcher(Sphere(6), list(points))
    assert mean.converged
    assert abs(mean.point.double().norm() - 1) <= 2 * torch.finfo(dtype).eps
    copies = Power(Sphere(6), (2,))
    both = [torch.stack([point, x.to(dtype)]) for point in points]
    assert karcher(copies, both).converged
