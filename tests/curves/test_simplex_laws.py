"""Laws of simplices as functions of the kind of simplex, and mutants that break them."""

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings

from manifoldagg.curves.simplex import Simplex
from manifoldagg.manifolds import Flat
from tests.curves.test_simplex import EPS, cayley_menger, determinacy, dimensions, generator, place, thin
from tests.support import draw, rotation, seeds

LAWS = {}


def law(function):
    LAWS[function.__name__] = function
    return function


@law
def volume_is_that_of_cayley_and_menger(kind, seed, k):
    for height in (1.0, 1e-2, 1e-5):
        phi = thin(seed, k, k + 3, height)
        simplex, exact = kind(Flat(k + 3), k + 1), cayley_menger(phi)
        # A Gram entry rounds at most P + 2 times.
        allowed = 2 * (k + 5) * EPS * determinacy(phi)
        assert abs(simplex.volume(phi).item() / exact - 1) <= allowed
        assert abs(simplex.log_volume(phi).item() - mpmath.log(exact)) <= allowed + 4 * EPS * abs(mpmath.log(exact))


@law
def a_corner_of_the_cube_is_one_of_k_factorial_parts(kind, seed, k):
    corner = torch.cat([torch.zeros(1, k), torch.eye(k)])
    assert kind(Flat(k), k + 1).volume(corner).item() == pytest.approx(1 / math.factorial(k), rel=4 * k * EPS)


@law
def volume_moves_with_isometries_and_grows_with_the_kth_power(kind, seed, k):
    size = k + 2
    simplex, phi, shift = kind(Flat(size), k + 1), draw(seed, k + 1, size), draw(seed + 1, size)
    moved = 3 * (phi @ rotation(seed, size) + shift)
    # The moved vertices round by ε of coordinates near 10, relative to edges of about 1.
    allowed = 100 * size * EPS * determinacy(phi)
    assert abs(simplex.log_volume(moved) - simplex.log_volume(phi) - k * math.log(3)) <= allowed


@law
def the_gradient_of_the_log_volume_is_its_derivative(kind, seed, k):
    simplex, phi = kind(Flat(k + 2), k + 1), draw(seed, k + 1, k + 2)
    gradient, slack = simplex.log_volume_gradient(phi), 1e-13 * determinacy(phi)
    assert abs((phi * gradient).sum().item() - k) <= slack * max(1, gradient.norm().item())
    assert gradient.sum(0).abs().max() <= slack * gradient.abs().max()
    direction = draw(seed + 1, k + 1, k + 2)
    # Central differences: third derivatives have the size of the gradient cubed; a step of 1e-5 of its inverse.
    h = 1e-5 / gradient.norm().item()
    slope = (simplex.log_volume(phi + h * direction) - simplex.log_volume(phi - h * direction)) / (2 * h)
    expected = (gradient * direction).sum()
    assert abs(slope - expected) <= (1e-8 * direction.norm() ** 3 + slack * 1e5) * gradient.norm()


@law
def samples_have_the_moments_of_dirichlet(kind, seed, k):
    n, draws = k + 1, 20000
    x = kind(Flat(1), n).sample(draws, generator=generator(seed % 1000))
    assert (x >= 0).all()
    assert (x.sum(-1) - 1).abs().max() <= n * EPS

    def moment(*powers):
        return math.prod(map(math.factorial, powers)) * math.gamma(n) / math.gamma(n + sum(powers))

    # Means of independent draws lie within 6 of their standard deviations.
    for found, mean, square in (
        (x, moment(1), moment(2)),
        (x.square(), moment(2), moment(4)),
        (x[:, 0] * x[:, -1], moment(1, 1), moment(2, 2)),
    ):
        assert (found.mean(0) - mean).abs().max() <= 6 * math.sqrt((square - mean**2) / draws)


@law
def vertices_are_exact(kind, seed, k):
    simplex, phi = kind(Flat(5), k + 1), draw(seed, k + 1, 5)
    assert torch.equal(simplex(phi, torch.eye(k + 1)), phi)
    for x, vertex in zip(torch.eye(k + 1), phi, strict=True):
        assert torch.equal(simplex(phi, x), vertex)


@law
def points_are_affine_in_the_vertices_and_in_the_place(kind, seed, k):
    simplex, phi, x, y = kind(Flat(4), k + 1), draw(seed, k + 1, 4), place(seed, k + 1), place(seed + 1, k + 1)
    q, shift = draw(seed + 2, 4, 4), draw(seed + 3, 4)
    # Sums of at most 5 products of numbers below about 10.
    assert torch.allclose(simplex(phi @ q + shift, x), simplex(phi, x) @ q + shift, rtol=0, atol=1e-13)
    middle = simplex(phi, 0.25 * x + 0.75 * y)
    assert torch.allclose(middle, 0.25 * simplex(phi, x) + 0.75 * simplex(phi, y), rtol=0, atol=1e-13)


@law
def pulling_to_the_vertices_is_the_derivative(kind, seed, k):
    simplex, phi = kind(Flat(4), k + 1), draw(seed, k + 1, 4)
    x, w = place(seed, k + 1, 3), draw(seed + 1, 3, 4)
    pulled = torch.func.vjp(lambda points: simplex(points, x), phi)[1](w)[0]
    assert torch.allclose(simplex.pull_phi(phi, x, w), pulled, rtol=0, atol=1e-14)
    assert torch.allclose(simplex.pull_phi(phi, x[0], w[0]), torch.outer(x[0], w[0]), rtol=0, atol=1e-14)


@law
def the_nearest_place_satisfies_its_conditions(kind, seed, k):
    size = max(1, k)
    simplex, phi = kind(Flat(size), k + 1), draw(seed, k + 1, size)
    points = torch.cat([draw(seed + 1, 6, size, scale=2.0), place(seed, k + 1, 2) @ phi])
    x, distances = simplex.nearest(phi, points)
    assert (x >= 0).all()
    assert torch.allclose(x.sum(-1), torch.ones(8, dtype=torch.float64), rtol=0, atol=4 * (k + 1) * EPS)
    gaps = x @ phi - points
    reach = (phi.norm(dim=-1).max() + points.norm(dim=-1).max()).item()
    assert torch.allclose(gaps.norm(dim=-1), distances, rtol=1e-14, atol=8 * (k + 1) * EPS * reach)
    slopes = gaps @ phi.mT
    level = (x * slopes).sum(-1, keepdim=True)
    # No vertex lies below the supporting plane at the nearest point, and those in use lie on it.
    allowed = 100 * (k + 1) * EPS * reach**2 * math.sqrt(determinacy(phi))
    assert (slopes >= level - allowed).all()
    assert (x * (slopes - level)).abs().max() <= allowed
    assert distances[6:].max() <= allowed / reach


@law
def an_ensemble_is_the_mean_of_its_predictions(kind, seed, k):
    simplex, phi = kind(Flat(3), k + 1), draw(seed, k + 1, 3)
    found = simplex.ensemble(phi, lambda theta: theta.square().outer(theta), 7, generator=generator(seed))
    thetas = simplex(phi, simplex.sample(7, generator=generator(seed)))
    assert torch.allclose(found, torch.einsum("ni,nj->ij", thetas.square(), thetas) / 7, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", LAWS)
@settings(max_examples=10)
@given(seeds, dimensions)
def test_every_law_holds(name, seed, k):
    LAWS[name](Simplex, seed, k)


MUTANTS = {}


def caught_by(*laws):
    def register(kind):
        MUTANTS[kind.__name__] = (kind, laws)
        return kind

    return register


VOLUME_LAWS = ("volume_is_that_of_cayley_and_menger", "a_corner_of_the_cube_is_one_of_k_factorial_parts")


@caught_by("volume_is_that_of_cayley_and_menger", "volume_moves_with_isometries_and_grows_with_the_kth_power")
class VolumeIsSquared(Simplex):
    def log_volume(self, phi):
        return 2 * super().log_volume(phi)

    def volume(self, phi):
        return super().volume(phi) ** 2


@caught_by(*VOLUME_LAWS)
class VolumeWithoutFactorial(Simplex):
    def log_volume(self, phi):
        return super().log_volume(phi) + math.lgamma(self.vertices)

    def volume(self, phi):
        return self.log_volume(phi).exp()


@caught_by(*VOLUME_LAWS)
class VolumeByTheFactorialOfTheVertices(Simplex):
    def volume(self, phi):
        return super().volume(phi) / self.vertices


@caught_by("volume_is_that_of_cayley_and_menger", "volume_moves_with_isometries_and_grows_with_the_kth_power")
class VolumeOfTheConeFromTheOrigin(Simplex):
    def log_volume(self, phi):
        return torch.linalg.slogdet(phi[1:] @ phi[1:].mT)[1] / 2 - math.lgamma(self.vertices)

    def volume(self, phi):
        return self.log_volume(phi).exp()


@caught_by("samples_have_the_moments_of_dirichlet")
class UniformsByTheirSum(Simplex):
    def sample(self, *batch, generator=None):
        x = torch.rand(*batch, self.vertices, generator=generator, dtype=torch.float64)
        return x / x.sum(-1, keepdim=True)


@caught_by("vertices_are_exact")
class BarycentricOffByOne(Simplex):
    def weights(self, x):
        return super().weights(x).roll(1, -1)


@caught_by("points_are_affine_in_the_vertices_and_in_the_place")
class BarycentricBySquares(Simplex):
    def weights(self, x):
        return super().weights(x.square() / x.square().sum(-1, keepdim=True))


@caught_by("the_gradient_of_the_log_volume_is_its_derivative")
class GradientWithTheWrongSign(Simplex):
    def log_volume_gradient(self, phi):
        return -super().log_volume_gradient(phi)


@caught_by("the_gradient_of_the_log_volume_is_its_derivative")
class GradientForgetsTheFirstVertex(Simplex):
    def log_volume_gradient(self, phi):
        gradient = super().log_volume_gradient(phi)
        gradient[0] = 0
        return gradient


@caught_by("pulling_to_the_vertices_is_the_derivative")
class PullsTheSameToEveryVertex(Simplex):
    def pull_phi(self, phi, x, w):
        return super().pull_phi(phi, torch.full_like(x, 1 / self.vertices), w)


@caught_by("the_nearest_place_satisfies_its_conditions")
class NearestCutsWhatIsNegative(Simplex):
    def nearest(self, phi, point):
        edges = (phi[1:] - phi[0]).mT
        rest = torch.linalg.lstsq(edges, (point - phi[0]).mT).solution.mT
        x = torch.cat([1 - rest.sum(-1, keepdim=True), rest], -1).clamp(min=0)
        x = x / x.sum(-1, keepdim=True)
        return x, (x @ phi - point).norm(dim=-1)


@caught_by("the_nearest_place_satisfies_its_conditions")
class NearestIsAVertex(Simplex):
    def nearest(self, phi, point):
        distances, x = torch.cdist(point, phi).min(-1)
        return torch.eye(self.vertices, dtype=phi.dtype)[x], distances


@caught_by("an_ensemble_is_the_mean_of_its_predictions")
class EnsembleIsTheMeanModel(Simplex):
    def ensemble(self, phi, predict, num_draws, *, generator=None):
        return predict(self(phi, self.sample(num_draws, generator=generator)).mean(0))


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught_by_its_laws(name, record_property):
    kind, laws = MUTANTS[name]
    broken = []
    for each in LAWS:
        try:
            LAWS[each](kind, 1, 3)
        except AssertionError:
            broken.append(each)
    assert set(laws) <= set(broken)
    record_property("caught", (name, broken))
