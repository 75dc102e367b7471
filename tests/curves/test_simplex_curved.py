"""Simplices on curved spaces: Karcher means with derivatives."""

import pytest
import torch
from hypothesis import given, settings

from manifoldagg.curves.simplex import Simplex
from manifoldagg.errors import DivergenceError
from manifoldagg.manifolds import (
    Flat,
    Lorentz,
    ParameterSpace,
    Power,
    Product,
    SpecialOrthogonal,
    Sphere,
    SymmetricPositiveDefinite,
    geodesic,
    norm,
)
from tests.curves.test_simplex import generator, place
from tests.support import draw, rotation, seeds

EPS = 2.0**-52
CURVED = [Sphere(4), SymmetricPositiveDefinite(3)]


def vertices(space, seed, n, radius=0.7):
    """Points within a ball around one."""
    x = space.random_point(generator=generator(seed), dtype=torch.float64)
    steps = [space.random_tangent(x, generator(seed + i + 1)) for i in range(n)]
    return torch.stack([space.exp(x, u * (radius / norm(space, x, u))) for u in steps])


def moved(space, seed, phi):
    """The image of points under an isometry of the space."""
    if isinstance(space, Sphere):
        return phi @ rotation(seed, space.n)
    g = rotation(seed, space.n) @ torch.diag(draw(seed + 1, space.n).div(4).exp())
    return g @ phi @ g.mT


def scale(phi):
    return max(1.0, phi.abs().max().item())


@pytest.mark.parametrize("space", CURVED, ids=str)
@settings(max_examples=5)
@given(seeds)
def test_curved_vertices_and_edges_are_exact(space, seed):
    phi, x = vertices(space, seed, 3), place(seed, 3)
    simplex = Simplex(space, 3)
    # A vertex is the projection of itself on the space: its last digit may differ.
    assert (simplex(phi, torch.eye(3)) - phi).abs().max() <= 4 * EPS * scale(phi)
    edge = torch.stack([x[0], 1 - x[0]])
    found = Simplex(space, 2)(phi[:2], edge)
    # The mean is found to a residual of 1e-12; logs of points with condition up to 100 · e² lose 3 digits.
    assert (found - geodesic(space, phi[0], phi[1], 1 - x[0].item())).abs().max() <= 1e-11 * scale(phi)


@pytest.mark.parametrize("space", CURVED, ids=str)
@settings(max_examples=5)
@given(seeds)
def test_curved_points_are_stationary_and_equivariant(space, seed):
    phi, x, simplex = vertices(space, seed, 3), place(seed, 3), Simplex(space, 3)
    point = simplex(phi, x)
    pull = sum(weight * space.log(point, vertex) for weight, vertex in zip(x, phi, strict=True))
    assert norm(space, point, pull) <= 1e-11 * scale(phi)
    order = torch.randperm(3, generator=generator(seed))
    assert (simplex(phi[order], x[order]) - point).abs().max() <= 1e-11 * scale(phi)
    there = moved(space, seed, phi)
    assert (simplex(there, x) - moved(space, seed, point)).abs().max() <= 1e-11 * scale(there)


@pytest.mark.parametrize("space", [*CURVED, SpecialOrthogonal(3), Lorentz(2)], ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_curved_derivatives_match_finite_differences(space, seed):
    phi, x, simplex = vertices(space, seed, 3), place(seed, 3), Simplex(space, 3)
    u = draw(seed, 3)
    w = torch.stack([space.random_tangent(p, generator(seed + i)) for i, p in enumerate(phi)]) / scale(phi)

    def at(t):
        return simplex(space.exp(phi, t * w), (x + t * u) / (x + t * u).sum())

    zero, one, h = torch.zeros(()).double(), torch.ones(()).double(), 1e-4
    first = torch.func.jvp(at, (zero,), (one,))[1]
    size = scale(first)
    # Central differences: h² times a third derivative of some tens, and the residual 1e-12 over h.
    assert ((at(h * one) - at(-h * one)) / (2 * h) - first).abs().max() <= 1e-6 * size
    second = torch.func.jvp(lambda t: torch.func.jvp(at, (t,), (one,))[1], (zero,), (one,))[1]
    ahead, behind = (torch.func.jvp(at, (e * h * one,), (one,))[1] for e in (1, -1))
    assert ((ahead - behind) / (2 * h) - second).abs().max() <= 1e-5 * scale(second)
    leaf = zero.clone().requires_grad_()
    e = draw(seed + 1, *space.shape)
    (slope,) = torch.autograd.grad((e * at(leaf)).sum(), leaf, create_graph=True)
    assert slope.item() == pytest.approx((e * first).sum().item(), abs=1e-11 * size * scale(e))
    (bend,) = torch.autograd.grad(slope, leaf)
    assert bend.item() == pytest.approx((e * second).sum().item(), abs=1e-9 * scale(second) * scale(e))


@pytest.mark.parametrize("space", CURVED, ids=str)
def test_curved_derivatives_agree_for_every_transform(space):
    phi, x, simplex = vertices(space, 3, 3), place(3, 3, 4), Simplex(space, 3)
    u, w = draw(0, 4, 3), draw(1, 4, *space.shape)
    pushed, axes = simplex.push(phi, x, u), tuple(range(1, w.ndim))
    # Coordinates of points on the space are read; both maps solve the same equations, to rounding.
    close = {"rtol": 0, "atol": 1e-10 * scale(phi)}
    assert torch.allclose((w * pushed).sum(axes), (simplex.pull(phi, x, w) * u).sum(-1), **close)
    assert torch.allclose(torch.func.vmap(lambda p: simplex(phi, p))(x), simplex(phi, x), **close)
    assert torch.allclose(torch.func.vmap(lambda p, v: simplex.push(phi, p, v))(x, u), pushed, **close)
    metric = simplex.metric(phi, x)
    assert torch.allclose(metric, metric.mT, **close)
    assert (torch.linalg.eigvalsh(metric) >= -1e-12).all()
    pulled = simplex.pull_phi(phi, x, w)
    tangent = torch.stack([space.random_tangent(p, generator(5)) for p in phi]) / scale(phi)
    slope = torch.func.jvp(lambda p: simplex(p, x), (phi,), (tangent,))[1]
    assert (pulled * tangent).sum().item() == pytest.approx((w * slope).sum().item(), abs=1e-10 * scale(phi))


def test_curved_simplices_of_products_agree_with_their_factors():
    space = Product({"a": Sphere(3), "b": Flat(2), "c": Power(Sphere(3), (2,))})
    a, b, c = (
        vertices(Sphere(3), 0, 3),
        draw(0, 3, 2),
        torch.stack([vertices(Sphere(3), 1, 3), vertices(Sphere(3), 2, 3)], 1),
    )
    x = place(0, 3, 5)
    found = space.split(Simplex(space, 3)(space.join({"a": a, "b": b, "c": c}), x))
    assert torch.allclose(found["a"], Simplex(Sphere(3), 3)(a, x), atol=1e-13)
    assert torch.allclose(found["b"], x @ b, atol=1e-14)
    for i in range(2):
        assert torch.allclose(found["c"][:, i], Simplex(Sphere(3), 3)(c[:, i].contiguous(), x), atol=1e-13)


def test_a_model_with_a_curved_leaf_has_simplices():
    model = torch.nn.Linear(3, 2).double()
    model.weight.data = torch.nn.functional.normalize(model.weight.data)
    space = ParameterSpace.of(model, {"weight": Sphere(3)})
    start = space.point(model)
    phi = torch.stack([space.exp(start, 0.3 * space.random_tangent(start, generator(i))) for i in range(3)])
    phi.requires_grad_()
    theta = Simplex(space, 3)(phi, place(0, 3))
    rows = theta[:6].reshape(2, 3)
    assert torch.allclose(rows.square().sum(-1), torch.ones(2, dtype=torch.float64), atol=1e-14)
    (slope,) = torch.autograd.grad(theta.square().sum(), phi)
    # The weights stay on their spheres; the bias is a weighted sum.
    assert torch.allclose(slope[:, 6:], 2 * torch.outer(place(0, 3), theta[6:].detach()), atol=1e-13)


def test_single_precision_on_a_sphere():
    phi, x = vertices(Sphere(4), 0, 3).float(), place(0, 3)
    found = Simplex(Sphere(4), 3)(phi, x)
    assert found.dtype == torch.float32
    # Vertices off by 2⁻²⁴ each, and a rounding of the result.
    assert torch.allclose(found.double(), Simplex(Sphere(4), 3)(phi.double(), x), rtol=0, atol=4 * 2.0**-24)
    leaf = phi.clone().requires_grad_()
    assert torch.autograd.grad(Simplex(Sphere(4), 3)(leaf, x).sum(), leaf)[0].dtype == torch.float32


def test_a_mean_that_does_not_converge_raises_an_error():
    ends = torch.tensor([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]], dtype=torch.float64)
    with pytest.raises(DivergenceError, match="move the vertices closer"):
        Simplex(Sphere(3), 2)(ends, torch.tensor([0.5, 0.5]))
    with pytest.raises(DivergenceError, match="expected vertices with a Karcher mean on Sphere"):
        torch.func.vmap(lambda p: Simplex(Sphere(3), 2)(ends, p))(torch.full((2, 2), 0.5))
