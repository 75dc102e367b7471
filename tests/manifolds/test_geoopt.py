"""Manifolds of geoopt: which of our spaces they are, and what is declared of the others."""

import copy
import math
import pickle
import subprocess
import sys

import pytest
import torch

from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import (
    Flat,
    Lorentz,
    PoincareBall,
    Power,
    Product,
    Sphere,
    SymmetricPositiveDefinite,
    distance,
    norm,
)
from manifoldagg.manifolds.geoopt import GEOOPT_PRIMITIVES, GeooptManifold, from_geoopt, geoopt
from manifoldagg.manifolds.stiefel import Stiefel
from manifoldagg.testing import LAWS, check_manifold
from tests.support import draw

# A check of every shape takes longer than the law.
AS_SHIPPED = pytest.mark.usefixtures("as_shipped")
ASSUMED_PRIMITIVES = {"inner", "project", "project_tangent", "random_tangent"}


def exact(number):
    """A curvature that geoopt keeps in float64."""
    return torch.tensor(number, dtype=torch.float64)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


class Retracting(geoopt.Manifold):
    """A sphere whose expmap is its retraction and whose transp is a projection, as geoopt's own classes have it."""

    name, ndim, reversible = "Retracting", 1, False

    def __init__(self, radius=1.0):
        super().__init__()
        self.register_buffer("radius", torch.as_tensor(radius))

    def inner(self, x, u, v=None, *, keepdim=False):
        return (u * (u if v is None else v)).sum(-1, keepdim=keepdim)

    def projx(self, x):
        return x / x.norm(dim=-1, keepdim=True) * self.radius

    def proju(self, x, u):
        return u - (x * u).sum(-1, keepdim=True) / self.radius**2 * x

    def retr(self, x, u):
        return self.projx(x + u)

    expmap = retr
    egrad2rgrad = proju

    def transp(self, x, y, v):
        return self.proju(y, v)

    def logmap(self, x, y):
        return self.proju(x, y - x)

    def random(self, *size, dtype=None, device=None):
        return geoopt.ManifoldTensor(self.projx(torch.randn(*size, dtype=dtype)), manifold=self)

    def _check_point_on_manifold(self, x, *, atol=1e-5, rtol=1e-5):
        return True, None

    def _check_vector_on_tangent(self, x, u, *, atol=1e-5, rtol=1e-5):
        return True, None


class Forgetful(geoopt.Euclidean):
    """A plane with another unit of length along each axis, but with the gradient of one with the same."""

    def __init__(self):
        super().__init__(ndim=1)

    def inner(self, x, u, v=None, *, keepdim=False):
        return (self.units(u) * u * (u if v is None else v)).sum(-1, keepdim=keepdim)

    def units(self, u):
        return torch.arange(1, u.shape[-1] + 1, dtype=u.dtype)


class Stretched(Forgetful):
    """The same with the right gradient: flat, and all its formulas are right."""

    def egrad2rgrad(self, x, u):
        return u / self.units(u)


class Bare(geoopt.Manifold):
    """A class that does not say how many axes a point has."""

    name = "Bare"
    retr = expmap = projx = proju = egrad2rgrad = inner = transp = logmap = None
    _check_point_on_manifold = _check_vector_on_tangent = None


SUBSPACE = draw(3, 5, 3)


@pytest.mark.parametrize(
    ("manifold", "shape", "space"),
    [
        (geoopt.Euclidean(), (4,), Flat(4)),
        (geoopt.Euclidean(), (), Flat(1)),
        (geoopt.Euclidean(), (5, 4), Power(Flat(4), (5,))),
        (geoopt.Euclidean(2), (3, 5, 4), Power(Flat(4), (3, 5))),
        (geoopt.Sphere(), (4,), Sphere(4)),
        (geoopt.SphereExact(), (7, 4), Power(Sphere(4), (7,))),
        (geoopt.PoincareBall(), (3,), PoincareBall(3)),
        (geoopt.PoincareBallExact(exact(2.5)), (2, 3), Power(PoincareBall(3, curvature=-2.5), (2,))),
        (geoopt.PoincareBall(0.5, learnable=True), (3,), PoincareBall(3, geoopt.PoincareBall(0.5).k.item())),
        (geoopt.Stereographic(-0.5), (3,), PoincareBall(3, curvature=-0.5)),
        (geoopt.StereographicExact(-2), (3,), PoincareBall(3, curvature=-2.0)),
        (geoopt.Lorentz(), (4,), Lorentz(3)),
        (geoopt.EuclideanStiefel(), (5, 2), Stiefel(5, 2)),
        (geoopt.Stiefel(canonical=False), (3, 5, 2), Power(Stiefel(5, 2), (3,))),
        (geoopt.EuclideanStiefelExact(), (5, 2), Stiefel(5, 2)),
        (geoopt.SymmetricPositiveDefinite(), (3, 3), SymmetricPositiveDefinite(3)),
    ],
)
def test_an_equivalent_space_is_converted(manifold, shape, space):
    assert from_geoopt(manifold, shape) == space
    assert from_geoopt(manifold, torch.Size(shape)) == space


@pytest.mark.parametrize("kind", [geoopt.ProductManifold, geoopt.StereographicProductManifold])
def test_a_geoopt_product_is_converted_to_a_product(kind):
    factors = [(geoopt.PoincareBall(), (2, 3)), (geoopt.Stereographic(-1.0), 2)]
    ours = Product({"0": Power(PoincareBall(3), (2,)), "1": PoincareBall(2)})
    assert from_geoopt(kind(*factors)) == from_geoopt(kind(*factors), (8,)) == ours
    assert from_geoopt(kind(*factors), (4, 8)) == Power(ours, (4,))


def test_a_scalar_factor_of_a_product_is_flat():
    manifold = geoopt.ProductManifold((geoopt.Sphere(), 3), (geoopt.Euclidean(), ()))
    assert from_geoopt(manifold) == Product({"0": Sphere(3), "1": Flat(1)})


@pytest.mark.parametrize("kind", [geoopt.ManifoldTensor, geoopt.ManifoldParameter])
def test_a_manifold_tensor_determines_manifold_and_shape(kind):
    tensor = kind(torch.eye(4)[:2].clone(), manifold=geoopt.Sphere())
    assert from_geoopt(tensor) == from_geoopt(tensor, (2, 4)) == Power(Sphere(4), (2,))


PAIRS = [
    (geoopt.Euclidean(1), (3,)),
    (geoopt.PoincareBall(exact(2.0)), (4,)),
    (geoopt.Stereographic(exact(-0.3)), (4,)),
    (geoopt.Lorentz(exact(1.0)), (4,)),
    (geoopt.SymmetricPositiveDefinite(), (3, 3)),
    (geoopt.SphereProjection(exact(2.0)), (3,)),
    (geoopt.ProductManifold((geoopt.PoincareBall(exact(2.0)), (2, 2)), (geoopt.Euclidean(1), 2)), (6,)),
]


@pytest.mark.parametrize(("manifold", "shape"), PAIRS, ids=lambda value: str(value)[:30])
def test_results_agree_with_geoopt_if_its_formulas_are_exact(manifold, shape):
    space, dtype = from_geoopt(manifold, shape), torch.float64
    x = space.random_point(50, generator=generator(), dtype=dtype)
    u, v = (space.random_tangent(x, generator(seed)) for seed in (1, 2))
    size = norm(space, x, u).reshape(-1, *(1 for _ in shape))
    u = 0.7 * u / size
    y, noise = space.exp(x, u), x + 0.01
    pairs = {
        "inner": (space.inner(x, u, v), manifold.inner(x, u, v, keepdim=True).reshape(50)),
        "exp": (y, manifold.expmap(x, u)),
        "log": (space.log(x, y), manifold.logmap(x, y)),
        "transport": (space.transport(x, y, v), manifold.transp(x, y, v)),
        "distance": (distance(space, x, y), manifold.dist(x, y)),
        "project": (space.project(noise), manifold.projx(noise)),
        "project_tangent": (space.project_tangent(x, noise), manifold.proju(x, noise)),
    }
    for name, (ours, theirs) in pairs.items():
        # geoopt subtracts products of coordinates as large as 10², and divides by the distance: 10² ε / 0.7 is 3e-14.
        gap = (ours - theirs).abs().max() / theirs.abs().max().clamp(min=1)
        assert gap <= 1e-12, (name, gap)


@pytest.mark.parametrize(
    ("manifold", "shape"),
    [(geoopt.Sphere(), (4,)), (geoopt.EuclideanStiefel(), (5, 2))],
    ids=["Sphere", "EuclideanStiefel"],
)
def test_exp_and_projections_agree_with_geoopt(manifold, shape):
    space = from_geoopt(manifold, shape)
    x = space.random_point(50, generator=generator(), dtype=torch.float64)
    u, noise = space.random_tangent(x, generator(1)), x + 0.01
    for ours, theirs in [
        (space.exp(x, u), manifold.expmap(x, u)),
        (space.project(noise), manifold.projx(noise)),
        (space.project_tangent(x, noise), manifold.proju(x, noise)),
    ]:
        # Coordinates within 1, matrices of norm up to 5: a few dozen roundings.
        assert (ours - theirs).abs().max() <= 100 * 2.0**-52


SPHERICAL = [
    (geoopt.SphereProjection(exact(1.0)), [torch.float32, torch.float64]),
    (geoopt.StereographicExact(exact(2.0)), [torch.float64]),
    (geoopt.Stereographic(0.0), [torch.float64]),
]


@AS_SHIPPED
@pytest.mark.parametrize(("manifold", "dtypes"), SPHERICAL, ids=["1", "2", "0"])
def test_every_law_holds_for_stereographic_spheres_and_their_flat_limit(manifold, dtypes):
    space = from_geoopt(manifold, (3,))
    assert isinstance(space, GeooptManifold)
    assert space.capabilities == GEOOPT_PRIMITIVES
    verdict = check_manifold(space, seeds=1, dtypes=dtypes, verbose=False)
    assert verdict.holds, f"\n{verdict}"
    assert len(verdict.findings) == sum(primitives <= GEOOPT_PRIMITIVES for primitives, _ in LAWS.values())


def test_a_stereographic_sphere_is_isometric_to_the_sphere():
    space, sphere = from_geoopt(geoopt.SphereProjection(), (3,)), Sphere(4)
    x, y = space.random_point(2, 50, generator=generator(), dtype=torch.float64)

    def lift(z):
        square = z.square().sum(-1, keepdim=True)
        return torch.cat([1 - square, 2 * z], -1) / (1 + square)

    assert torch.allclose(distance(space, x, y), distance(sphere, lift(x), lift(y)), rtol=1e-12)


@AS_SHIPPED
@pytest.mark.parametrize(
    "manifold",
    [geoopt.Sphere(intersection=SUBSPACE), geoopt.SphereExact(complement=SUBSPACE[:, :2].float())],
    ids=["intersection", "complement in float32"],
)
def test_a_sphere_in_a_subspace_satisfies_its_declared_laws(manifold):
    space = from_geoopt(manifold, (5,))
    assert space.capabilities == ASSUMED_PRIMITIVES | {"retract", "injectivity_radius", "random_point"}
    verdict = check_manifold(space, seeds=1, dtypes=[torch.float64], verbose=False)
    assert verdict.holds, f"\n{verdict}"
    assert "projections_are_idempotent" in {finding.law for finding in verdict.findings}
    # It is totally geodesic in the sphere around it, whose exponential and retraction are therefore its own.
    x = space.random_point(20, generator=generator(), dtype=torch.float64)
    u = space.random_tangent(x, generator(1))
    y, moved = Sphere(5).exp(x, u), space.retract(x, u)
    assert torch.allclose(space.project(y), y, rtol=0, atol=1e-14)
    assert torch.allclose(moved, Sphere(5).retract(x, u), rtol=0, atol=1e-14)


@AS_SHIPPED
def test_an_unknown_class_declares_only_the_assumed_primitives():
    space = from_geoopt(Retracting(2.0), (3,))
    assert space.capabilities == ASSUMED_PRIMITIVES | {"random_point"}
    for name, call in {
        "exp": lambda x: space.exp(x, x),
        "log": lambda x: space.log(x, x),
        "transport": lambda x: space.transport(x, x, x),
        "retract": lambda x: space.retract(x, x),
        "injectivity_radius": lambda x: space.injectivity_radius(x),
    }.items():
        with pytest.raises(NotImplementedError, match=f"geoopt.Retracting.* has no {name}"):
            call(torch.ones(3))
    # Laws need to know how far a draw may go: with that, everything declared is tried.
    space = from_geoopt(Retracting(2.0), (3,), injectivity_radius=math.tau)
    verdict = check_manifold(space, seeds=1, dtypes=[torch.float64], verbose=False)
    assert verdict.holds, f"\n{verdict}"
    assert {"inner_is_an_inner_product", "project_tangent_is_orthogonal"} <= {
        finding.law for finding in verdict.findings
    }


def test_a_subclass_of_a_known_class_is_treated_as_unknown():
    class Derived(geoopt.PoincareBall):
        def expmap(self, x, u, **_):
            return x

    assert from_geoopt(Derived(), (3,)).capabilities == ASSUMED_PRIMITIVES | {"random_point"}


@AS_SHIPPED
def test_declared_capabilities_are_used_and_can_be_checked():
    space = from_geoopt(Stretched(), (3,), capabilities=GEOOPT_PRIMITIVES, injectivity_radius=math.inf)
    assert space.capabilities == GEOOPT_PRIMITIVES
    verdict = check_manifold(space, seeds=1, dtypes=[torch.float64], verbose=False)
    assert verdict.holds, f"\n{verdict}"
    assert len(verdict.findings) == sum(primitives <= GEOOPT_PRIMITIVES for primitives, _ in LAWS.values())


@AS_SHIPPED
@pytest.mark.parametrize(
    ("manifold", "radius", "law"),
    [
        (Retracting(), math.pi, "log_inverts_exp"),
        (Retracting(), math.pi, "transport_is_an_isometry"),
        (Forgetful(), math.inf, "the_gradient_represents_the_derivative"),
    ],
)
def test_wrongly_declared_capabilities_are_detected(manifold, radius, law):
    space = from_geoopt(manifold, (3,), capabilities=GEOOPT_PRIMITIVES, injectivity_radius=radius)
    assert check_manifold(space, seeds=1, dtypes=[torch.float64], laws=[law], verbose=False).broken_laws == [law]


def test_a_corrected_subclass_of_an_unsupported_class_can_declare_capabilities():
    class Mended(geoopt.CanonicalStiefel):
        def proju(self, x, u):
            return u - x @ (x.mT @ u + u.mT @ x) / 2

    with pytest.raises(
        ArgumentError, match="manifold: expected a manifold that satisfies the laws, got geoopt.CanonicalStiefel"
    ):
        from_geoopt(Mended(), (4, 2))
    space = from_geoopt(Mended(), (4, 2), capabilities={"project", "project_tangent"})
    assert space.capabilities == {"project", "project_tangent"}
    x = space.project(draw(0, 4, 2))
    u = space.project_tangent(x, draw(1, 4, 2))
    assert (x.mT @ u + u.mT @ x).abs().max() <= 1e-14


@pytest.mark.parametrize("manifold", [Stretched(), geoopt.SphereProjection()], ids=["Stretched", "SphereProjection"])
def test_random_tangents_are_standard_normal_in_the_metric(manifold):
    space, count = from_geoopt(manifold, (2,)), 20000
    x = space.random_point(generator=generator(), dtype=torch.float64).expand(count, 2)
    u = space.random_tangent(x, generator(1))
    eye = torch.eye(2, dtype=torch.float64)
    gram = torch.stack([torch.stack([space.inner(x[0], a, b) for a in eye]) for b in eye])
    white = u @ torch.linalg.cholesky(gram)
    # Means and covariances of 20000 draws lie within 5 standard deviations, 1/√n and at most √2/√n.
    assert white.mean(0).abs().max() <= 5 / math.sqrt(count)
    assert (white.mT @ white / count - eye).abs().max() <= 5 * math.sqrt(2 / count)


def test_random_point_does_not_change_the_global_generator():
    space, before = from_geoopt(Retracting(), (3,)), torch.get_rng_state()
    x = space.random_point(2, generator=generator(), dtype=torch.float64)
    assert type(x) is torch.Tensor
    assert x.shape == (2, 3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert torch.equal(space.random_point(2, generator=generator(), dtype=torch.float64), x)


OPEN = [
    (geoopt.Sphere(), (3,)),
    (geoopt.Euclidean(1), (3,)),
    (geoopt.Euclidean(2), (2, 3)),
    (geoopt.PoincareBall(), (3,)),
    (geoopt.Lorentz(), (3,)),
    (geoopt.EuclideanStiefel(), (4, 2)),
    (geoopt.SymmetricPositiveDefinite(), (2, 2)),
    (geoopt.SphereProjection(), (3,)),
    (Retracting(), (3,)),
]


@pytest.mark.parametrize(("manifold", "shape"), OPEN, ids=lambda value: str(value)[:30])
def test_without_a_shape_each_call_uses_the_space_of_its_size(manifold, shape):
    space, sized = from_geoopt(manifold), from_geoopt(manifold, shape)
    assert space.shape == (-1,) * len(shape)
    assert space.capabilities == sized.capabilities - {"random_point"}
    x = sized.random_point(5, generator=generator(), dtype=torch.float64)
    u = sized.random_tangent(x, generator(1))
    assert torch.equal(space.random_tangent(x, generator(1)), u)
    assert torch.equal(space.inner(x, u, u), sized.inner(x, u, u))
    assert torch.equal(space.project(x), sized.project(x))
    assert torch.equal(space.gradient(x, x), sized.gradient(x, x))
    if "log" in space.capabilities:
        y = sized.exp(x, 0.1 * u)
        assert torch.equal(space.exp(x, 0.1 * u), y)
        assert torch.equal(space.log(x, y), sized.log(x, y))
        assert torch.equal(space.injectivity_radius(x), sized.injectivity_radius(x))
    with pytest.raises(NotImplementedError, match="has no random_point"):
        space.random_point(generator=generator())


def test_float32_is_computed_in_float64():
    space = from_geoopt(geoopt.SphereProjection(), (3,))
    x = space.random_point(4, generator=generator(), dtype=torch.float32)
    u = space.random_tangent(x, generator(1))
    assert space.exp(x, u).dtype is torch.float32
    assert torch.equal(space.exp(x, u), space.exp(x.double(), u.double()).float())
    assert torch.equal(space.inner(x, u, u), space.inner(x.double(), u.double(), u.double()).float())


def test_batches_broadcast_and_inner_returns_one_number_per_point():
    space = from_geoopt(geoopt.SphereProjection(), (3,))
    x = space.random_point(6, 1, generator=generator(), dtype=torch.float64)
    u = space.random_tangent(x.expand(6, 4, 3), generator(1))
    together = space.inner(x, u, u)
    assert together.shape == (6, 4)
    assert torch.allclose(together[2, 1], space.inner(x[2, 0], u[2, 1], u[2, 1]))
    assert space.exp(x, u).shape == (6, 4, 3)


def test_manifold_parameters_give_plain_tensors_with_gradients():
    manifold = geoopt.SphereProjection(exact(1.0))
    x = geoopt.ManifoldParameter(0.1 * torch.ones(3, dtype=torch.float64), manifold=manifold)
    y = from_geoopt(x).exp(x, torch.ones(3, dtype=torch.float64))
    assert type(y) is torch.Tensor
    y.sum().backward()
    assert x.grad.isfinite().all()


VALUES = [
    (lambda: geoopt.SphereProjection(2.0), (3,)),
    (lambda: geoopt.Sphere(intersection=SUBSPACE), (5,)),
    (lambda: Retracting(3.0), (3,)),
    (lambda: geoopt.Sphere(), None),
    (lambda: geoopt.SymmetricPositiveDefinite(), None),
]


@pytest.mark.parametrize(("make", "shape"), VALUES)
def test_instances_are_compared_and_hashed_by_value(make, shape):
    space, again = from_geoopt(make(), shape), from_geoopt(make(), shape)
    assert space == again
    assert hash(space) == hash(again)
    assert len({space, again, copy.deepcopy(space), pickle.loads(pickle.dumps(space))}) == 1
    assert space != from_geoopt(Retracting(3.5), (3,))


def test_equal_geometries_of_different_classes_are_equal():
    assert from_geoopt(geoopt.SphereProjection(exact(1.0)), (3,)) == from_geoopt(geoopt.Stereographic(1.0), (3,))
    assert from_geoopt(geoopt.SphereExact()) == from_geoopt(geoopt.Sphere())
    assert from_geoopt(geoopt.Stereographic(1.0), (3,)) != from_geoopt(geoopt.Stereographic(2.0), (3,))
    assert from_geoopt(geoopt.PoincareBall()) != from_geoopt(geoopt.PoincareBall(2.0))
    assert from_geoopt(geoopt.Euclidean(1)) != from_geoopt(geoopt.Euclidean(2))
    assert from_geoopt(Retracting(), (3,)) != from_geoopt(Retracting(), (3,), injectivity_radius=1.0)


def test_later_changes_of_the_manifold_have_no_effect():
    for manifold, tensor in ((Retracting(2.0), "radius"), (geoopt.Stereographic(1.0, learnable=True), "k")):
        space, same = from_geoopt(manifold, (3,)), from_geoopt(copy.deepcopy(manifold), (3,))
        before, point = hash(space), torch.tensor([3.0, 0.0, 4.0])
        projected = space.project(point)
        with torch.no_grad():
            getattr(manifold, tensor).fill_(7.0)
        assert space == same
        assert hash(space) == before
        assert torch.equal(space.project(point), projected)
        assert space != from_geoopt(manifold, (3,))


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("import manifoldagg.manifolds.geoopt", ""),
        ("import sys, manifoldagg, manifoldagg.manifolds; print('geoopt' in sys.modules)", "False"),
    ],
)
def test_geoopt_is_imported_lazily_and_without_warnings(code, answer):
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, answer, "")


def two_curvatures():
    manifold = geoopt.Stereographic()
    manifold.k = torch.nn.Parameter(torch.ones(2))
    return manifold


X = torch.ones(3)


@AS_SHIPPED
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: from_geoopt(Sphere(3)), r"manifold: expected a geoopt manifold or a tensor on one, got Sphere\(n=3\)"),
        (lambda: from_geoopt(torch.ones(3)), "manifold: expected a geoopt manifold"),
        (lambda: from_geoopt(geoopt.Sphere, (3,)), "manifold: expected a geoopt manifold"),
        (lambda: from_geoopt(geoopt.Scaled(geoopt.Sphere(), 2.0), (3,)), "geoopt.Scaled:? .*inner is not"),
        (lambda: from_geoopt(geoopt.Stiefel(), (3, 2)), "geoopt.CanonicalStiefel:? .*proju is not a projection"),
        (lambda: from_geoopt(geoopt.BirkhoffPolytope(), (3, 3)), "geoopt.BirkhoffPolytope"),
        (lambda: from_geoopt(geoopt.UpperHalf(), (3, 3)), "geoopt.UpperHalf:? .*complex"),
        (lambda: from_geoopt(geoopt.BoundedDomain(), (3, 3)), "geoopt.BoundedDomain:? .*complex"),
        (lambda: from_geoopt(geoopt.Stiefel(), (3, 2), capabilities={"inner"}), "geoopt.CanonicalStiefel"),
        (lambda: from_geoopt(geoopt.ProductManifold((geoopt.BirkhoffPolytope(), (2, 2)))), "geoopt.BirkhoffPolytope"),
        (lambda: from_geoopt(geoopt.Lorentz(2.0), (3,)), "geoopt.Lorentz with k = 1, got 2"),
        (lambda: from_geoopt(geoopt.Lorentz(math.nan), (3,)), "manifold: k: expected a finite number, got nan"),
        (lambda: from_geoopt(two_curvatures(), (2,)), r"manifold: expected one curvature, got \[1.0, 1.0\]"),
        (lambda: from_geoopt(Bare(), (2,)), "manifold: expected an integer ndim, got None"),
        (
            lambda: from_geoopt(geoopt.Sphere(intersection=draw(0, 2, 5, 3)), (5,)),
            r"manifold: expected a Sphere in one subspace, got projectors of shape \(2, 5, 5\)",
        ),
        (
            lambda: from_geoopt(geoopt.Euclidean()),
            r"shape: expected the shape of a leaf for geoopt.Euclidean\(\), got None",
        ),
        (lambda: from_geoopt(geoopt.Sphere(), 3), "shape: expected a shape of positive integers, got 3"),
        (lambda: from_geoopt(geoopt.Sphere(), (2, 0)), "shape: expected a shape of positive integers"),
        (lambda: from_geoopt(geoopt.Sphere(), (2.0,)), "shape: expected a shape of positive integers"),
        (lambda: from_geoopt(geoopt.Sphere(), ()), "shape: expected a shape of at least 1 axes"),
        (lambda: from_geoopt(geoopt.Sphere(), (1,)), "shape: expected a shape that fits .*isolated points"),
        (lambda: from_geoopt(geoopt.Sphere(intersection=SUBSPACE), (4,)), "shape: expected a shape that fits"),
        (lambda: from_geoopt(geoopt.EuclideanStiefel(), (2, 3)), "shape: expected a shape that fits .*2, 3"),
        (lambda: from_geoopt(geoopt.SymmetricPositiveDefinite(), (2, 3)), "shape: expected a shape that fits .*2, 3"),
        (lambda: from_geoopt(geoopt.Lorentz(), (1,)), "shape: expected a shape that fits Lorentz"),
        (lambda: from_geoopt(geoopt.ProductManifold((geoopt.Sphere(), 3)), (4,)), "shape: expected a shape that fits"),
        (
            lambda: from_geoopt(geoopt.ManifoldTensor(X / X.norm(), manifold=geoopt.Sphere()), (4,)),
            r"shape: expected \(3,\) of the tensor, got \(4,\)",
        ),
        (lambda: from_geoopt(geoopt.Sphere(), (3,), capabilities={"inner"}), "capabilities: expected None"),
        (lambda: from_geoopt(geoopt.Sphere(), (3,), injectivity_radius=1.0), "expected None for geoopt.Sphere"),
        (lambda: from_geoopt(Retracting(), (3,), capabilities={"expmap"}), "capabilities: .*; got expmap"),
        (lambda: from_geoopt(Retracting(), (3,), capabilities=3), "capabilities: expected names of primitives, got 3"),
        (
            lambda: from_geoopt(Retracting(), (3,), capabilities={"random_tangent"}),
            "capabilities: expected inner and project_tangent with random_tangent",
        ),
        (lambda: from_geoopt(Retracting(), (3,), capabilities={"injectivity_radius"}), "injectivity_radius: expected"),
        (lambda: from_geoopt(Retracting(), (3,), injectivity_radius=0.0), "injectivity_radius: .*> 0, got 0"),
        (lambda: from_geoopt(Retracting(), (3,)).inner(X, X, torch.ones(4)), r"v: expected trailing shape \(3\)"),
        (lambda: from_geoopt(Retracting(), (3,)).inner(X, X, X.double()), "v: expected torch.float32"),
        (lambda: from_geoopt(geoopt.Sphere()).log(X, torch.ones(4)), r"y: expected trailing shape \(3\), got \(4,\)"),
        (lambda: from_geoopt(geoopt.EuclideanStiefel()).project(X), r"x: expected trailing shape \(any, any\)"),
        (lambda: from_geoopt(geoopt.EuclideanStiefel()).project(torch.ones(2, 3)), "x: expected a shape that fits"),
    ],
)
def test_invalid_arguments_are_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


@pytest.mark.parametrize("metric", ["SM", "LEM"])
def test_metrics_other_than_aim_are_rejected(metric):
    with pytest.warns(UserWarning, match="not fully implemented"):
        manifold = geoopt.SymmetricPositiveDefinite(metric)
    with pytest.raises(ArgumentError, match=f"manifold: .*with the metric AIM, got {metric}"):
        from_geoopt(manifold, (3, 3))
