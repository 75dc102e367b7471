"""Laws of simplices: volume, sampling, nearest points, derivatives, flat and curved; and mutants that break them."""

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from manifoldagg.curves.simplex import Simplex
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import (
    Flat,
    Sphere,
    SymmetricPositiveDefinite,
)
from tests.support import draw, dtypes, relative, seeds

EPS = 2.0**-52
dimensions = st.integers(1, 6)
CURVED = [Sphere(4), SymmetricPositiveDefinite(3)]


def generator(seed):
    return torch.Generator().manual_seed(seed)


def place(seed, n, *batch):
    return Simplex(Flat(1), n).sample(*batch, generator=generator(seed))


def cayley_menger(phi):
    """The volume by squared distances, in 40 digits beyond what a thin simplex cancels."""
    k = len(phi) - 1
    with mpmath.workdps(60):
        rows = [[mpmath.mpf(c) for c in row] for row in phi.double().tolist()]
        matrix = mpmath.ones(k + 2)
        matrix[0, 0] = 0
        for i, a in enumerate(rows):
            for j, b in enumerate(rows):
                matrix[i + 1, j + 1] = mpmath.fsum((p - q) ** 2 for p, q in zip(a, b, strict=True))
        square = (-1) ** (k + 1) * mpmath.det(matrix) / (2**k * mpmath.factorial(k) ** 2)
        return mpmath.sqrt(square)


def determinacy(phi):
    """How much a rounding of the unit edges' Gram matrix moves the log of its determinant: k / smallest eigenvalue."""
    edges = (phi[1:] - phi[0]).double()
    unit = edges / edges.norm(dim=1, keepdim=True)
    return len(edges) / torch.linalg.eigvalsh(unit @ unit.mT)[0].item()


def thin(seed, k, size, height):
    """A simplex whose last vertex is near the middle of the others."""
    phi = draw(seed, k + 1, size)
    phi[-1] = phi[:-1].mean(0) + height * phi[-1]
    return phi


@given(seeds, dtypes)
def test_a_simplex_of_two_vertices_is_the_chord(seed, dtype):
    simplex, phi, t = Simplex(Flat(6), 2), draw(seed, 2, 6, dtype=dtype), place(seed, 2)
    # Summed in float64 and rounded once.
    exact = t[0] * phi[0].double() + t[1] * phi[1].double()
    assert (simplex(phi, t) - exact).abs().max() <= torch.finfo(dtype).eps * phi.abs().max()
    assert simplex.volume(phi).item() == pytest.approx((phi[1].double() - phi[0].double()).norm().item(), rel=1e-14)


@given(seeds, dimensions, dtypes)
def test_weights_are_a_partition_of_unity(seed, k, dtype):
    x = place(seed, k + 1, 5).to(dtype)
    weights = Simplex(Flat(1), k + 1).weights(x)
    assert weights.dtype == torch.float64
    assert (weights >= 0).all()
    assert (weights.sum(-1) - 1).abs().max() <= (k + 1) * EPS


@given(seeds, dimensions)
def test_a_batch_equals_a_loop_and_float32_is_rounded_once(seed, k):
    simplex, phi, x = Simplex(Flat(3), k + 1), draw(seed, k + 1, 3, dtype=torch.float32), place(seed, k + 1, 2, 4)
    together = simplex(phi, x)
    assert together.shape == (2, 4, 3)
    assert together.dtype == torch.float32
    assert torch.allclose(together, torch.stack([torch.stack([simplex(phi, p) for p in row]) for row in x]))
    assert (together - x @ phi.double()).abs().max() <= 2.0**-24 * 1.01 * phi.abs().max()
    assert relative(simplex.log_volume_gradient(phi), simplex.log_volume_gradient(phi.double())) <= 2.0**-23


@given(seeds, st.integers(1, 3))
def test_autograd_gives_the_same_gradients(seed, k):
    simplex, phi = Simplex(Flat(k + 2), k + 1), draw(seed, k + 1, k + 2).requires_grad_()
    (slope,) = torch.autograd.grad(simplex.log_volume(phi), phi)
    assert relative(slope, simplex.log_volume_gradient(phi)) <= 1e-13 * determinacy(phi.detach())
    (slope,) = torch.autograd.grad(simplex.volume(phi), phi)
    gradient = simplex.volume(phi).detach() * simplex.log_volume_gradient(phi)
    assert relative(slope, gradient) <= 1e-13 * determinacy(phi.detach())


FLAT_ONES = [
    torch.zeros(3, 4),
    torch.tensor([[1.0, 2.0], [1.0, 2.0], [0.0, 1.0]]),
    torch.tensor([[0.1, 0.3], [0.2, 0.6], [0.3, 0.9], [0.7, 2.1]]),
    torch.arange(12.0).reshape(4, 3) / 7,
    draw(0, 5, 3),
    draw(0, 3, 4, scale=1e-170),
]


@pytest.mark.parametrize("phi", FLAT_ONES)
def test_a_degenerate_simplex_has_volume_zero_and_finite_gradients(phi):
    simplex, phi = Simplex(Flat(phi.shape[1]), len(phi)), phi.double().requires_grad_()
    assert simplex.log_volume(phi).item() == -math.inf
    assert simplex.volume(phi).item() == 0
    assert not simplex.log_volume_gradient(phi).any()
    for value in (simplex.log_volume(phi), simplex.volume(phi)):
        assert not torch.autograd.grad(value, phi)[0].any()
    x, distance = simplex.nearest(phi, phi.detach().mean(0) + 1)
    assert torch.isfinite(x).all()
    assert torch.isfinite(torch.autograd.grad(distance.sum(), phi)[0]).all()
    assert simplex.contains(phi, phi.detach().mean(0))


def test_a_single_vertex_is_a_simplex():
    simplex, phi = Simplex(Flat(2), 1), draw(0, 1, 2)
    assert torch.equal(simplex(phi, torch.ones(1)), phi[0])
    assert torch.equal(simplex.sample(3), torch.ones(3, 1, dtype=torch.float64))
    assert (simplex.volume(phi).item(), simplex.log_volume(phi).item()) == (1, 0)
    assert not simplex.log_volume_gradient(phi).any()
    x, distance = simplex.nearest(phi, phi[0] + torch.tensor([3.0, 4.0]))
    assert (x.tolist(), distance.item()) == ([1.0], pytest.approx(5, rel=1e-14))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_volumes_of_a_million_parameters_are_accurate(dtype):
    small = draw(0, 5, 1000, dtype=dtype)
    large = small.repeat(1, 1000)
    simplex = Simplex(Flat(10**6), 5)
    expected = Simplex(Flat(1000), 5).log_volume(small).item() + 4 * math.log(1000) / 2
    # Nearly orthogonal edges: a Gram entry of 1e6 products keeps 1e-12, whatever the order of the sum.
    assert simplex.log_volume(large).item() == pytest.approx(expected, abs=1e-11)
    assert simplex.log_volume_gradient(large).dtype == dtype
    assert (large.double() * simplex.log_volume_gradient(large).double()).sum().item() == pytest.approx(4, abs=1e-5)


@settings(max_examples=10)
@given(seeds, dimensions)
def test_nearest_agrees_with_scipy(seed, k):
    simplex, phi, point = Simplex(Flat(3), k + 1), draw(seed, k + 1, 3), draw(seed + 1, 3, scale=2.0)
    _, distance = simplex.nearest(phi, point)
    a, b = phi.numpy(), point.numpy()
    found = minimize(
        lambda x: ((x @ a - b) ** 2).sum(),
        np.full(k + 1, 1 / (k + 1)),
        jac=lambda x: 2 * a @ (x @ a - b),
        bounds=[(0, 1)] * (k + 1),
        constraints={"type": "eq", "fun": lambda x: x.sum() - 1, "jac": np.ones_like},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 200},
    )
    # SLSQP stops at some 1e-7 of the square.
    assert distance.item() ** 2 <= found.fun + 1e-7
    assert distance.item() ** 2 == pytest.approx(found.fun, abs=1e-5)


@settings(max_examples=10)
@given(seeds, st.integers(1, 4), st.floats(-12, 0))
def test_nearest_is_accurate_on_thin_simplices(seed, k, exponent):
    phi = thin(seed, k, k + 2, 10.0**exponent)
    simplex, x = Simplex(Flat(k + 2), k + 1), place(seed, k + 1, 4)
    _, distances = simplex.nearest(phi, x @ phi)
    # Least squares is backward stable: what remains is rounding of the coordinates, however thin the simplex.
    assert distances.max() <= 64 * (k + 2) * EPS * phi.norm(dim=-1).max()
    assert simplex.contains(phi, x @ phi).all()


@given(seeds, st.integers(1, 4))
def test_the_distance_has_the_derivative_of_the_minimum(seed, k):
    simplex, phi, point = Simplex(Flat(5), k + 1), draw(seed, k + 1, 5), draw(seed + 1, 5, scale=3.0)
    leaf, end = phi.clone().requires_grad_(), point.clone().requires_grad_()
    x, distance = simplex.nearest(leaf, end)
    assert not x.requires_grad
    slope, pull = torch.autograd.grad(distance, (leaf, end))
    unit = (point - x @ phi) / distance.detach()
    assert torch.allclose(pull, unit, atol=1e-13)
    assert torch.allclose(slope, -torch.outer(x, unit), atol=1e-13)
    h, u = 1e-6, draw(seed + 2, k + 1, 5)
    ahead, behind = (simplex.nearest(phi + e * h * u, point)[1] for e in (1, -1))
    # The distance has second derivatives of about 1 / distance, which may jump where the face changes.
    assert (ahead - behind).item() / (2 * h) == pytest.approx((slope * u).sum().item(), abs=1e-4 * u.norm().item() ** 2)


@settings(max_examples=10)
@given(seeds, dimensions, dtypes)
def test_a_simplex_contains_its_points_and_no_others(seed, k, dtype):
    simplex, phi = Simplex(Flat(k + 1), k + 1), draw(seed, k + 1, k + 1, dtype=dtype)
    inside = simplex(phi, place(seed, k + 1, 4))
    assert simplex.contains(phi, inside).all()
    normal = torch.linalg.svd((phi[1:] - phi[0]).double()).Vh[-1]
    outside = inside.double() + 1e-3 * normal
    assert not simplex.contains(phi, outside).any()
    # Off the simplex by 1e-3 and by the rounding of single precision.
    assert simplex.contains(phi, outside, 1.01e-3).all()
    assert not simplex.contains(phi, outside, 0.99e-3).any()


@given(seeds, dimensions)
def test_a_new_vertex_adds_a_coordinate(seed, k):
    simplex, phi, point, x = Simplex(Flat(3), k), draw(seed, k, 3), draw(seed + 1, 3), place(seed, k)
    more, larger = simplex.add_vertex(phi, point)
    assert larger == Simplex(Flat(3), k + 1)
    assert torch.equal(more[:-1], phi)
    assert torch.equal(more[-1], point)
    assert torch.allclose(larger(more, torch.cat([x, x.new_zeros(1)])), simplex(phi, x), atol=1e-15)


@settings(max_examples=8)
@given(seeds, st.integers(1, 4))
def test_push_pull_and_metric_are_consistent(seed, k):
    simplex, phi, x = Simplex(Flat(5), k + 1), draw(seed, k + 1, 5), place(seed, k + 1, 3)
    u, w = draw(seed + 1, 3, k + 1), draw(seed + 2, 3, 5)
    pushed = simplex.push(phi, x, u)
    assert torch.allclose((w * pushed).sum(-1), (simplex.pull(phi, x, w) * u).sum(-1), atol=1e-12)
    flat = u - u.mean(-1, keepdim=True)
    assert torch.allclose(simplex.push(phi, x, flat), flat @ phi, atol=1e-12)
    # What changes the sum alone changes nothing.
    assert simplex.push(phi, x, x).abs().max() <= 1e-14 * phi.abs().max()
    metric = simplex.metric(phi, x)
    arms = phi - simplex(phi, x).unsqueeze(-2)
    assert torch.allclose(metric, arms @ arms.mT, atol=1e-12)
    assert torch.equal(metric, metric.mT)
    assert (torch.linalg.eigvalsh(metric) >= -1e-13 * metric.abs().max()).all()


def test_ensembles_have_no_derivatives_and_store_one_model():
    simplex, phi = Simplex(Flat(3), 3), draw(0, 3, 3, dtype=torch.float32).requires_grad_()
    seen = []
    out = simplex.ensemble(phi, lambda theta: seen.append(theta.shape) or theta.softmax(0), 5, generator=generator(0))
    assert seen == [(3,)] * 5
    assert not out.requires_grad
    assert out.dtype == torch.float32
    assert out.sum().item() == pytest.approx(1, abs=1e-6)


def test_instances_are_compared_by_value_and_vmap_is_supported():
    assert Simplex(Flat(2), 3) == Simplex(Flat(2), 3) != Simplex(Flat(2), 4)
    assert {Simplex(Flat(2), 3)} == {Simplex(Flat(2), 3)}
    assert Simplex(Flat(2), 3).domain == (3,)
    simplex, phi = Simplex(Flat(2), 3), draw(0, 3, 2)
    assert torch.equal(simplex.collapse(phi[0]), phi[0].expand(3, 2))
    x = place(0, 3, 2)
    assert torch.allclose(torch.func.vmap(lambda p: simplex(phi, p))(x), simplex(phi, x), atol=1e-15)
    assert torch.func.vmap(simplex.log_volume)(draw(0, 4, 3, 2)).shape == (4,)
    with pytest.raises(ArgumentError, match="x: expected barycentric"):
        simplex(phi, torch.tensor([0.5, 0.6, 0.1], requires_grad=True))


TRIANGLE, PHI = Simplex(Flat(2), 3), torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
THIRDS, BALL = torch.full((3,), 1 / 3), Simplex(Sphere(2), 3)
NAN = float("nan")


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Simplex(Flat(2), 0), "vertices: expected an integer >= 1, got 0"),
        (lambda: Simplex(Flat(2), 2.0), "vertices: expected an integer >= 1, got 2.0"),
        (lambda: Simplex("R2", 3), "space: expected a Manifold, got 'R2'"),
        (lambda: TRIANGLE(PHI[:2], THIRDS), r"phi: expected shape \(3, 2\), got \(2, 2\)"),
        (lambda: TRIANGLE(PHI, THIRDS[:2]), r"x: expected trailing shape \(3\), got \(2,\)"),
        (lambda: TRIANGLE(PHI, 0.5), r"x: expected a floating tensor of trailing shape \(3\), got float"),
        (lambda: TRIANGLE(PHI, torch.tensor([1, 0, 0])), "x: expected a floating tensor"),
        (lambda: TRIANGLE(PHI, torch.tensor([1.5, -0.5, 0.0])), r"coordinates >= 0, got -0.5 at \(1,\)"),
        (lambda: TRIANGLE(PHI, torch.tensor([NAN, 0.5, 0.5])), r"coordinates >= 0, got nan at \(0,\)"),
        (lambda: TRIANGLE(PHI, torch.ones(2, 3)), r"coordinates that sum to 1, got a sum of 3 at \(0,\)"),
        (lambda: BALL(torch.eye(2)[[0, 1, 1]], -THIRDS), "x: expected barycentric coordinates >= 0"),
        (lambda: TRIANGLE.pull_phi(PHI, THIRDS, torch.ones(3)), r"w: expected shape \(2\), got \(3,\)"),
        (lambda: TRIANGLE.pull_phi(PHI, THIRDS.expand(4, 3), torch.ones(2)), r"w: expected shape \(4, 2\)"),
        (lambda: TRIANGLE.volume(PHI[0]), r"phi: expected shape \(3, 2\), got \(2,\)"),
        (lambda: TRIANGLE.volume(PHI * NAN), "phi: expected vertices with finite"),
        (lambda: TRIANGLE.log_volume_gradient(PHI / 0), "phi: expected vertices with finite"),
        (lambda: TRIANGLE.volume(PHI.double() * 1e200), "finite squared edge lengths"),
        (lambda: BALL.volume(PHI), "space: expected a flat space for volumes"),
        (lambda: BALL.log_volume_gradient(PHI), "space: expected a flat space"),
        (lambda: BALL.nearest(PHI, PHI[1]), "space: expected a flat space for nearest points"),
        (lambda: BALL.contains(PHI, PHI[1]), "space: expected a flat space"),
        (lambda: TRIANGLE.nearest(PHI, torch.ones(3)), r"point: expected trailing shape \(2\), got \(3,\)"),
        (lambda: TRIANGLE.nearest(PHI, torch.tensor([NAN, 0.0])), "phi, point: expected values with finite distances"),
        (
            lambda: Simplex(Flat(2), 1).nearest(PHI[:1] * NAN, PHI[0]),
            "phi, point: expected values with finite distances",
        ),
        (lambda: TRIANGLE.contains(PHI, PHI[0], -1.0), "tolerance: expected a finite number >= 0, got -1.0"),
        (lambda: TRIANGLE.add_vertex(PHI, PHI), r"point: expected shape \(2\), got \(3, 2\)"),
        (lambda: TRIANGLE.add_vertex(PHI, PHI[0].double()), "point: expected torch.float32 on cpu"),
        (lambda: TRIANGLE.ensemble(PHI, torch.sum, 0), "draws: expected an integer >= 1, got 0"),
        (lambda: TRIANGLE.ensemble(PHI, lambda theta: 1.0, 2), "predict: expected a floating tensor"),
        (lambda: TRIANGLE.ensemble(PHI, lambda theta: theta.long(), 2), "predict: expected a floating tensor"),
    ],
)
def test_invalid_arguments_are_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


@pytest.mark.usefixtures("as_shipped")
def test_predictions_of_different_shapes_are_rejected():
    sizes = iter([2, 3])
    with pytest.raises(ArgumentError, match=r"predict: expected shape \(2\), got \(3,\)"):
        TRIANGLE.ensemble(PHI, lambda theta: torch.zeros(next(sizes)), 2)
