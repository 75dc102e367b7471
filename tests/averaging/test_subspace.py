"""Tests of subspaces that are fitted to the models of a run: exact recovery and local optimality."""

import math

import matplotlib.image
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldagg.averaging import Subspace, fit_subspace
from manifoldagg.averaging._flat_fit import Residuals, nearest_on_faces
from manifoldagg.curves import Bezier, Complex, Simplex, Tunnel
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import Flat, ParameterSpace, Power, SpecialOrthogonal, Sphere, Stiefel, distance
from tests.support import draw, seeds

P = 23
SPACE = Flat(P)


def ordered(seed, n):
    """Return sorted random parameters from 0 to 1."""
    t = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).sort().values
    t[0], t[-1] = 0, 1
    return t


def recovery_error(found, planted):
    """Return the largest distance of a planted point to the nearest found point."""
    return torch.cdist(planted.flatten(1), found.flatten(1)).amin(1).max().item()


@given(seeds, st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]))
@settings(max_examples=10)
def test_points_on_a_curve_recover_the_curve(seed, degree, power):
    curve = Bezier(SPACE, degree)
    phi = draw(seed, degree + 1, P) + 3 * torch.arange(degree + 1.0)[:, None]
    points = curve(phi, ordered(seed, 20))
    found = fit_subspace(points, curve, power=power)
    assert found.converged
    # The fit stops at a mean distance of about 1e-13 of the size of the points.
    assert found.residuals.mean() <= 1e-12 * points.norm(dim=1).max()
    assert min(recovery_error(found.phi, phi), recovery_error(found.phi.flip(0), phi)) <= 1e-9 * phi.norm()
    assert torch.allclose(curve(found.phi, found.coordinates), points, atol=1e-10 * phi.norm())


@given(seeds, st.sampled_from([1, 2, 4, 7]))
@settings(max_examples=10)
def test_points_of_a_simplex_recover_the_simplex(seed, vertices):
    simplex = Simplex(SPACE, vertices)
    phi = draw(seed, vertices, P)
    inside = simplex.sample(12, generator=torch.Generator().manual_seed(seed))
    points = simplex(phi, torch.cat([inside, torch.eye(vertices, dtype=torch.float64)]))
    found = fit_subspace(points, simplex)
    assert found.converged
    assert recovery_error(found.phi, phi) <= 1e-12 * phi.norm()
    assert found.residuals.max() <= 1e-12 * phi.norm()
    assert torch.allclose(simplex(found.phi, found.coordinates), points, atol=1e-12 * phi.norm())


def test_a_simplex_without_data_at_its_vertices_contains_all_points():
    simplex = Simplex(SPACE, 3)
    phi = draw(1, 3, P)
    points = simplex(phi, simplex.sample(12, generator=torch.Generator().manual_seed(2)))
    found = fit_subspace(points, simplex)
    assert found.converged
    assert found.residuals.mean() <= 1e-12 * phi.norm()
    # A point lies on each facet, so no smaller homothetic simplex contains all points.
    assert (found.coordinates.amin(0).abs() <= 1e-12).all()


@pytest.mark.parametrize("form", ["ambient", "subspace"])
def test_points_of_a_tunnel_recover_the_tunnel(form):
    tunnel = Tunnel(Bezier(SPACE, 2), 0.1, form)
    phi = draw(4, 3, P) + 4 * torch.arange(3.0)[:, None]
    places = tunnel.sample_in(phi, 15, generator=torch.Generator().manual_seed(0))
    points = tunnel(phi, places)
    found = fit_subspace(points, tunnel)
    assert found.converged
    assert found.residuals.mean() <= 1e-12 * phi.norm()
    assert tunnel.nearest(found.phi, points)[1].max() <= 1e-11 * phi.norm()
    assert torch.allclose(tunnel(found.phi, found.coordinates), points, atol=1e-9)


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize(
    "embedding",
    [
        Bezier(SPACE, 1),
        Bezier(SPACE, 2),
        Simplex(SPACE, 1),
        Simplex(SPACE, 3),
        Tunnel(Bezier(SPACE, 2), 0.02, "subspace"),
    ],
    ids=["line", "curve", "point", "triangle", "tunnel"],
)
def test_the_fit_is_a_local_minimum(embedding, power):
    """Perturbations may decrease the sum by a relative 1e-6, the tolerance of the descent."""
    points = Bezier(SPACE, 2)(draw(0, 3, P, scale=3.0), ordered(1, 14)) + draw(2, 14, P, scale=0.3)
    found = fit_subspace(points, embedding, power=power, tolerance=1e-8)
    assert found.converged

    def value(phi):
        return embedding.nearest(phi, points)[1].double().pow(power).sum().item()

    here = value(found.phi)
    assert here == pytest.approx(found.residuals.pow(power).sum().item(), rel=1e-9)
    for seed in range(6):
        step = draw(seed, *found.phi.shape)
        for h in (1e-2, -1e-2, 2e-3, -2e-3):
            assert value(found.phi + h * step / step.norm()) >= here * (1 - 1e-6)


def test_a_fitted_point_is_the_mean_for_power_2_and_the_geometric_median_for_power_1():
    points = draw(0, 9, P)
    points[-1] += 100
    point = Simplex(SPACE, 1)
    assert torch.allclose(fit_subspace(points, point, power=2).phi[0], points.mean(0), atol=1e-9)
    median = fit_subspace(points, point, tolerance=1e-12).phi[0]
    pull = torch.nn.functional.normalize(points - median, dim=1).sum(0)
    assert pull.norm() <= 1e-3
    assert (median - points[:-1].mean(0)).norm() < 0.1 * (points.mean(0) - points[:-1].mean(0)).norm()


def test_sums_of_distances_are_robust_to_outliers():
    line = Bezier(SPACE, 1)
    phi = torch.stack([torch.zeros(P), torch.full((P,), 5.0)]).double()
    points = line(phi, torch.linspace(0, 1, 15, dtype=torch.float64))
    points[7] += draw(0, P, scale=1.0)
    found = fit_subspace(points, line, tolerance=1e-12)
    others = torch.cat([found.residuals[:7], found.residuals[8:]])
    assert others.max() <= 1e-6 * found.residuals[7]
    assert fit_subspace(points, line, power=2).residuals[0] > 1e-3 * found.residuals[7]


def test_nearest_coordinates_equal_those_of_the_embedding():
    for embedding in (Bezier(SPACE, 3), Simplex(SPACE, 4), Simplex(SPACE, 7), Tunnel(Bezier(SPACE, 2), 0.05)):
        points = draw(1, 12, P)
        found = fit_subspace(points, embedding, max_steps=3)
        x, away = embedding.nearest(found.phi, points)
        assert torch.allclose(found.residuals, away.double(), atol=1e-9)
        assert torch.allclose(embedding(found.phi, found.coordinates), embedding(found.phi, x), atol=1e-5)


@given(seeds, st.integers(1, 6), st.integers(1, 8))
def test_face_enumeration_equals_the_search_from_face_to_face(seed, size, k):
    corners, points = draw(seed, size, k), draw(seed + 1, 9, k, scale=2.0)
    places, distances = nearest_on_faces(corners, points)
    assert torch.allclose(distances, Simplex(Flat(k), size).nearest(corners, points)[1], atol=1e-9)
    assert torch.allclose((places @ corners - points).norm(dim=-1), distances, atol=1e-12)
    assert (places >= 0).all()
    assert torch.allclose(places.sum(-1), torch.ones(9, dtype=torch.float64), atol=1e-12)


def test_the_gradient_of_the_normal_equations_equals_that_of_the_sum():
    """The gradient is half the derivative of the sum of squares with optimal coordinates, by central differences."""
    points, h = draw(0, 9, 5), 1e-5
    for embedding in (
        Bezier(Flat(5), 2), Simplex(Flat(5), 3), Tunnel(Bezier(Flat(5), 2), 0.05), Tunnel(Bezier(Flat(5), 2), 0.05, "subspace"),
    ):  # fmt: skip
        phi = draw(8, 3, 5) + torch.arange(3.0, dtype=torch.float64)[:, None]

        def value(phi, embedding=embedding):
            return Residuals(embedding, phi, points).distances.square().sum()

        slope = Residuals(embedding, phi, points).normal_equations(torch.ones(9, dtype=torch.float64))[1]
        for seed in range(5):
            step = draw(seed, 3, 5)
            expected = (value(phi + h * step) - value(phi - h * step)) / (2 * h)
            assert -2 * (slope @ step.flatten()).item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("space", "kind"), [(Sphere(6), "curve"), (Sphere(6), "simplex"), (Power(Sphere(4), (3,)), "curve")], ids=str
)
def test_points_on_a_curved_space_recover_the_subspace(space, kind):
    generator = torch.Generator().manual_seed(3)
    x = space.random_point(generator=generator, dtype=torch.float64).expand(3, *space.shape)
    phi = space.exp(x, 0.15 * space.random_tangent(x, generator))
    embedding = Bezier(space, 2) if kind == "curve" else Simplex(space, 3)
    places = ordered(2, 10) if kind == "curve" else torch.cat(
        [torch.eye(3, dtype=torch.float64), embedding.sample(7, generator=generator)]
    )  # fmt: skip
    points = embedding(phi, places)
    found = fit_subspace(points, embedding)
    spread = distance(space, points[:1].expand_as(points), points).max()
    assert found.residuals.max() <= 1e-6 * spread
    assert torch.allclose(distance(space, embedding(found.phi, found.coordinates), points), found.residuals, atol=1e-12)


def test_the_fit_on_a_curved_space_is_a_local_minimum():
    space = Sphere(5)
    generator = torch.Generator().manual_seed(0)
    x = space.random_point(generator=generator, dtype=torch.float64).expand(12, 5)
    points = space.exp(x, 0.3 * space.random_tangent(x, generator))
    curve = Bezier(space, 2)
    found = fit_subspace(points, curve, power=2)
    assert found.converged
    least = curve.nearest(found.phi, points)[1].square().sum().item()
    assert least <= found.residuals.square().sum().item() * (1 + 1e-9)
    for seed in range(10):
        step = space.random_tangent(found.phi, torch.Generator().manual_seed(seed))
        moved = space.exp(found.phi, 1e-2 * step / step.norm())
        # The descent stops at a relative decrease of 1e-6 and may need ten more iterations.
        assert curve.nearest(moved, points)[1].square().sum().item() >= least * (1 - 1e-4)


def test_the_average_is_the_point_at_the_mean_coordinates():
    triangle = Simplex(SPACE, 3)
    phi = draw(0, 3, P)
    points = triangle(phi, torch.cat([torch.eye(3).double(), torch.full((2, 3), 1 / 3, dtype=torch.float64)]))
    found = fit_subspace(points, triangle)
    assert torch.allclose(found.average(), points.mean(0), atol=1e-12)
    assert torch.allclose(found.average([0, 1, 0, 0, 0]), points[1], atol=1e-12)
    curve = Bezier(SPACE, 2)
    bent = fit_subspace(curve(phi, ordered(0, 9)), curve)
    assert torch.allclose(bent.average(), curve(bent.phi, bent.coordinates.mean()), atol=1e-12)
    for form in ("ambient", "subspace"):
        tunnel = Tunnel(Bezier(SPACE, 2), 0.05, form)
        inside = fit_subspace(curve(phi, ordered(0, 9)), tunnel)
        assert bool(tunnel.contains(inside.phi, inside.average()))


def test_equal_models_collapse_the_subspace():
    for space, x in ((SPACE, draw(0, P)), (Sphere(3), torch.eye(3, dtype=torch.float64)[0])):
        for embedding in (Bezier(space, 2), Simplex(space, 3)):
            found = fit_subspace(x.expand(4, *x.shape), embedding)
            assert found.converged
            assert torch.allclose(embedding(found.phi, found.coordinates), x.expand(4, *x.shape), atol=1e-15)
            assert found.residuals.abs().max() <= 1e-15


@pytest.mark.parametrize("seed", [2, 3, 8])
@pytest.mark.parametrize("space", [SpecialOrthogonal(4), Stiefel(5, 2)], ids=str)
def test_models_equal_up_to_rounding_collapse_the_subspace(space, seed):
    x = space.random_point(generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for embedding in (Bezier(space, 2), Simplex(space, 3)):
        found = fit_subspace(x.expand(6, *x.shape), embedding)
        assert (found.steps, found.converged, found.value) == (0, True, 0.0)
        assert torch.equal(found.phi, x.expand(3, *x.shape))


@pytest.mark.parametrize("size", [1e-99, 1e99])
@pytest.mark.parametrize("embedding", [Bezier(SPACE, 2), Simplex(SPACE, 3)], ids=["curve", "simplex"])
def test_a_fit_scales_with_its_points(embedding, size):
    points = draw(0, 6, P)
    found, scaled = (fit_subspace(part * points, embedding, max_steps=5) for part in (1.0, size))
    # The descent amplifies the rounding errors of five steps by at most 1e6.
    assert torch.allclose(scaled.residuals / size, found.residuals, rtol=1e-9)


def test_empty_points_are_accepted():
    found = fit_subspace(torch.zeros(5, 0), Bezier(Flat(0), 1))
    assert (found.phi.shape, found.value, found.converged) == ((2, 0), 0.0, True)


def test_inference_mode_does_not_change_the_fit():
    with torch.inference_mode():
        points = torch.nn.functional.normalize(1 + 0.2 * draw(0, 7, 4), dim=-1)
        inside = fit_subspace(points, Simplex(Sphere(4), 2), power=2, max_steps=1)
    outside = fit_subspace(points.clone(), Simplex(Sphere(4), 2), power=2, max_steps=1)
    assert torch.equal(inside.phi, outside.phi)


def test_a_given_start_is_used_and_float32_models_give_float32_subspaces():
    curve = Bezier(SPACE, 2)
    phi = draw(0, 3, P)
    points = curve(phi, ordered(0, 9)).float()
    found = fit_subspace(points, curve, start=phi.float())
    assert found.phi.dtype == torch.float32
    assert found.residuals.max() <= 1e-5
    assert recovery_error(found.phi.double(), phi) <= 1e-4
    listed = fit_subspace(list(points), curve, start=phi.float())
    assert torch.equal(listed.phi, found.phi)


def test_models_of_a_network_are_accepted_as_points():
    model = torch.nn.Linear(4, 3)
    space = ParameterSpace.of(model, {"weight": Sphere(4)})
    generator = torch.Generator().manual_seed(0)
    base = space.random_point(generator=generator, dtype=torch.float32).expand(6, -1)
    points = space.exp(base, 0.1 * space.random_tangent(base, generator))
    found = fit_subspace(points, Simplex(space, 2), max_steps=20)
    assert found.phi.dtype == torch.float32
    space.load(model, found.average())


@pytest.mark.parametrize(
    "embedding",
    [
        Bezier(SPACE, 2),
        Simplex(SPACE, 3),
        Tunnel(Bezier(SPACE, 2), 0.05, "subspace"),
        Bezier(Sphere(4), 2),
        Simplex(Sphere(4), 2),
    ],
    ids=["curve", "simplex", "tunnel", "curved curve", "curved simplex"],
)
def test_a_subspace_is_plotted(embedding, tmp_path):
    space = embedding.space
    if space.flat:
        points = Bezier(SPACE, 2)(draw(0, 3, P), ordered(0, 9)) + draw(1, 9, P, scale=0.02)
    else:
        x = torch.eye(4, dtype=torch.float64)[0].expand(9, 4)
        points = space.exp(x, 0.2 * space.random_tangent(x, torch.Generator().manual_seed(0)))
    found = fit_subspace(points, embedding, max_steps=30)
    found.plot().figure.savefig(tmp_path / "subspace.png")
    height, width, _ = matplotlib.image.imread(tmp_path / "subspace.png").shape
    assert width > height > 500
    # A projection to the plane does not increase distances in a flat space.
    assert torch.allclose(found.view(points), found.projected_points, atol=1e-9)
    if space.flat:
        apart = torch.cdist(points, points)
        assert (torch.cdist(found.projected_points, found.projected_points) <= apart + 1e-9).all()


def test_a_result_is_immutable():
    found = fit_subspace(draw(0, 5, P), Simplex(SPACE, 2))
    assert isinstance(found, Subspace)
    with pytest.raises(AttributeError):
        found.phi = None
    assert found.value == pytest.approx(found.residuals.sum().item())


POINTS = draw(0, 6, P)
POLES = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: fit_subspace(POINTS, Complex(SPACE, ((0, 1),))),
            "embedding: expected a Bezier, Simplex or Tunnel",
        ),
        (lambda: fit_subspace(POINTS, Bezier(Flat(4))), r"points\[0\]: expected shape"),
        (lambda: fit_subspace(POINTS, Bezier(SPACE), power=3), "power: expected one of 1, 2"),
        (lambda: fit_subspace(POINTS, Bezier(SPACE), tolerance=-1), "tolerance: expected a finite number >= 0"),
        (lambda: fit_subspace(POINTS, Bezier(SPACE), max_steps=0), "max_steps: expected an integer >= 1"),
        (lambda: fit_subspace(POINTS[:2], Bezier(SPACE)), "points: expected at least 3"),
        (lambda: fit_subspace([], Bezier(SPACE)), "points: expected at least one model"),
        (lambda: fit_subspace(POINTS * math.nan, Bezier(SPACE)), r"points\[0\]: expected finite values"),
        (lambda: fit_subspace(POINTS * 1e-170, Bezier(SPACE)), "points: expected distances .* 1e-100 and"),
        (lambda: fit_subspace(POINTS * 1e200, Simplex(SPACE, 2)), "points: expected distances"),
        (lambda: fit_subspace(POLES, Bezier(Sphere(2), 1)), "points: expected distances"),
        (lambda: fit_subspace(POINTS[:, :3], Bezier(SPACE)), r"points\[0\]: expected shape"),
        (lambda: fit_subspace(POINTS, Bezier(SPACE), start=POINTS), "start: expected shape"),
        (
            lambda: fit_subspace(torch.eye(3), Bezier(Sphere(3)), start=torch.eye(3)),
            "start: expected None unless the space is flat",
        ),
        (
            lambda: fit_subspace(2 * torch.eye(3), Bezier(Sphere(3))),
            r"points\[0\]: expected a point of Sphere",
        ),
        (
            lambda: fit_subspace(torch.eye(3), Tunnel(Bezier(Sphere(3)), 0.1)),
            "embedding: expected a space that is flat",
        ),
        (lambda: fit_subspace(POINTS, Simplex(SPACE, 2)).average([1.0]), "weights: expected one for each of 6"),
    ],
)
def test_invalid_input_is_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
