"""Every space under vmap, jvp, jacrev and torch.compile: the values of a loop, and the slopes of a difference."""

import pytest
import torch
from torch import Tensor

from manifoldagg.manifolds import (
    Flat,
    Grassmann,
    Lorentz,
    Manifold,
    PoincareBall,
    Power,
    Product,
    SpecialOrthogonal,
    Sphere,
    Stiefel,
    SymmetricPositiveDefinite,
)

SPACES: list[Manifold] = [
    Flat(3),
    Sphere(4),
    PoincareBall(3, curvature=-0.5),
    Lorentz(3),
    Stiefel(4, 2),
    Grassmann(4, 2),
    SpecialOrthogonal(3),
    SymmetricPositiveDefinite(3),
    Power(Sphere(3), (2,)),
    Product({"a": Sphere(3), "b": SpecialOrthogonal(2)}),
]
each = pytest.mark.parametrize("space", SPACES, ids=str)


def setting(space: Manifold, batch: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Points x and y at moderate distance, and tangents u and v at x."""
    generator = torch.Generator().manual_seed(5)
    x = space.random_point(batch, generator=generator, dtype=torch.float64)
    u, v = (0.3 * space.random_tangent(x, generator) for _ in range(2))
    return x, space.exp(x, u), u, v


def calls(space: Manifold):
    """exp, log and, where there is one, transport as functions of (x, y, u)."""
    yield lambda x, y, u: space.exp(x, u)
    yield lambda x, y, u: space.log(x, y)
    if "transport" in space.capabilities:
        yield space.transport


@each
def test_vmap_equals_a_loop(space):
    x, y, u, _ = setting(space)
    for call in calls(space):
        together = torch.func.vmap(call)(x, y, u)
        assert torch.allclose(together, torch.stack([call(*one) for one in zip(x, y, u, strict=True)]), atol=1e-12)


@each
def test_jvp_is_the_slope_along_a_geodesic(space):
    """Of exp in u, of log in y and of transport in u and x, by central differences; jacrev has the same columns."""
    x, y, u, v = (tensor[0] for tensor in setting(space))
    w, h = space.project_tangent(y, v), 1e-5
    for call in calls(space):
        _, slope = torch.func.jvp(lambda s: call(x, space.exp(y, s * w), u + s * v), (torch.zeros(()).double(),), (torch.ones(()).double(),))  # fmt: skip  # noqa: B023
        ahead, behind = (call(x, space.exp(y, e * h * w), u + e * h * v) for e in (1, -1))
        # The difference is off by h² times a third derivative, and by ε/h.
        assert torch.allclose(slope, (ahead - behind) / (2 * h), atol=1e-8)
        jacobian = torch.func.jacrev(lambda y_, u_: call(x, y_, u_), argnums=(0, 1))(y, u)  # noqa: B023
        axes = len(space.shape)
        columns = sum(torch.tensordot(j, t, dims=axes) for j, t in zip(jacobian, (w, v), strict=True))
        assert torch.allclose(columns, slope, atol=1e-8)


@each
def test_second_derivatives_agree_for_every_nesting_of_modes(space):
    x, y, u, v = (tensor[0] for tensor in setting(space))
    rev, fwd = torch.func.jacrev, torch.func.jacfwd
    for call in calls(space):
        along = lambda s: call(space.exp(x, s * v), y, space.project_tangent(space.exp(x, s * v), u))  # noqa: B023, E731
        zero = torch.zeros(()).double()
        expected = rev(rev(along))(zero)
        for outer, inner in ((fwd, fwd), (fwd, rev), (rev, fwd)):
            assert torch.allclose(outer(inner(along))(zero), expected, atol=1e-9 * (1 + expected.abs().max().item()))


SLOW = (Stiefel, Product)
"""Whose steps and leaves are unrolled into long graphs."""


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    "space", [pytest.param(s, id=str(s), marks=pytest.mark.soak if isinstance(s, SLOW) else ()) for s in SPACES]
)
def test_compiled_values_are_the_same(space):
    x, y, u, _ = setting(space)
    for call in calls(space):
        torch._dynamo.reset()
        assert torch.allclose(torch.compile(call, backend="eager")(x, y, u), call(x, y, u), atol=1e-13)
