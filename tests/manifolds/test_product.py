"""Products: laws, and that a leaf sees only itself."""

import math

import pytest
import torch

from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import PRIMITIVES, Flat, ParameterSpace, Power, Product, Sphere
from manifoldagg.manifolds.delegate import Delegate
from manifoldagg.testing import LAWS, check_manifold
from tests.support import draw


class Grid(Delegate):
    """Flat matrices, and no transport."""

    base_space = Power(Flat(3), (2,))
    capabilities = PRIMITIVES - {"transport"}

    def _transport(self, x, y, u):
        raise self._not_implemented("transport")


MIXED = Product({"a": Sphere(3), "b": Flat(4), "c": Sphere(2)})
NESTED = Product((("inside", MIXED), ("none", Flat(0)), ("one", Flat(1))))
SPACES = [MIXED, NESTED, Product({"only": Sphere(5)}), Product({"p": Flat(2), "q": Flat(3)})]


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("space", SPACES, ids=lambda space: str(space)[:40])
def test_every_law_holds(space):
    verdict = check_manifold(space, seeds=1, verbose=False)
    assert verdict.holds, f"\n{verdict}"
    assert len(verdict.findings) == len(LAWS)


def test_each_leaf_is_computed_separately():
    generator = torch.Generator().manual_seed(0)
    x = MIXED.random_point(2, 5, generator=generator, dtype=torch.float64)
    u, v = MIXED.random_tangent(x, generator), MIXED.random_tangent(x, generator)
    y = MIXED.exp(x, u)
    parts = [MIXED.split(tensor) for tensor in (x, y, u, v)]
    for name, space in MIXED.factors:
        a, b, du, dv = (part[name] for part in parts)
        assert torch.equal(b, space.exp(a, du))
        assert torch.equal(MIXED.split(MIXED.log(x, y))[name], space.log(a, b))
        assert torch.equal(MIXED.split(MIXED.transport(x, y, v))[name], space.transport(a, b, dv))
    inner = sum(space.inner(*(part[name] for part in (parts[0], *parts[2:]))) for name, space in MIXED.factors)
    assert torch.allclose(MIXED.inner(x, u, v), inner, rtol=1e-15)


def test_split_gives_views_and_join_inverts_it():
    space = Product({"grid": Grid(), "number": ParameterSpace.of(torch.nn.Linear(1, 1).double())})
    x = draw(0, 4, 5, 8)
    parts = space.split(x)
    assert parts["grid"].shape == (4, 5, 2, 3)
    assert all(part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for part in parts.values())
    assert torch.equal(space.join(parts), x)
    assert torch.equal(
        space.join({"grid": parts["grid"], "number": torch.ones(2).double()})[..., 6:], torch.ones(4, 5, 2).double()
    )


def test_inner_products_accumulate_in_float64():
    space = Product({str(i): Flat(1) for i in range(3)})
    u = torch.tensor([2.0**12, 2.0**-6, 2.0**-6])
    assert space.inner(u, u, u).item() == torch.tensor(2.0**24 + 2.0**-11).item()
    many = Product({str(i): Flat(1) for i in range(65)})
    u = torch.tensor([2.0**12] + 64 * [0.5])
    assert many.inner(u, u, u).item() == 2.0**24 + 16


@pytest.mark.usefixtures("as_shipped")
def test_capabilities_are_those_of_all_leaves():
    grids = Product({"grid": Grid(), "sphere": Sphere(2)})
    assert grids.capabilities == PRIMITIVES - {"transport"}
    assert (MIXED.flat, MIXED.symmetric, grids.capabilities) == (False, True, PRIMITIVES - {"transport"})
    assert Product({"p": Flat(2)}).flat
    verdict = check_manifold(grids, seeds=1, verbose=False)
    assert verdict.holds, f"\n{verdict}"


def test_the_injectivity_radius_is_the_minimum_over_factors():
    x = MIXED.random_point(3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(MIXED.injectivity_radius(x), torch.full((3,), math.pi))
    assert Product({"p": Flat(2)}).injectivity_radius(torch.zeros(2)).item() == math.inf


def test_instances_are_compared_and_hashed_by_value():
    assert Product({"a": Flat(1), "b": Flat(2)}) == Product((("a", Flat(1)), ("b", Flat(2))))
    assert hash(Product({"a": Flat(1)})) == hash(Product((("a", Flat(1)),)))
    assert Product({"a": Flat(1), "b": Flat(2)}) != Product({"b": Flat(2), "a": Flat(1)})


def test_derivatives_match_finite_differences():
    x = MIXED.random_point(generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = MIXED.random_point(generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.autograd.gradcheck(MIXED.log, (x.requires_grad_(), y.requires_grad_()))


def test_vmap_and_jvp_are_supported():
    generator = torch.Generator().manual_seed(0)
    x, y = (MIXED.random_point(5, generator=generator, dtype=torch.float64) for _ in range(2))
    u = MIXED.random_tangent(x, generator)
    assert torch.allclose(torch.func.vmap(MIXED.log)(x, y), MIXED.log(x, y), atol=1e-15)
    assert torch.func.jvp(lambda a: MIXED.exp(a, u), (x,), (u,))[1].isfinite().all()


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: Product({}),
            "factors: expected a mapping from names to spaces or a tuple of .* pairs, not empty; got",
        ),
        (
            lambda: Product([Sphere(3), Flat(1)]),
            r"factors: expected a mapping .* or a tuple .*; got \[Sphere\(n=3\), Flat",
        ),
        (lambda: Product((Sphere(3), Flat(1))), r"such as \('direction', Sphere\(3\)\); got Sphere\(n=3\)"),
        (lambda: Product({"": Flat(1)}), r"factors: expected pairs of a new, non-empty name and a space, .*got \(''"),
        (lambda: Product((("a", Flat(1)), ("a", Flat(2)))), r"got \('a', Flat\(n=2\)\)"),
        (lambda: Product({"a": 3}), r"got \('a', 3\)"),
        (lambda: Product(("a", Flat(1))), "factors: expected pairs"),
        (lambda: MIXED.exp(torch.zeros(9), torch.zeros(8)), r"u: expected trailing shape \(9\), got \(8,\)"),
        (lambda: MIXED.log(torch.zeros(9), torch.zeros(9).double()), "y: expected torch.float32"),
        (lambda: MIXED.split(torch.zeros(4)), r"x: expected trailing shape \(9\)"),
        (
            lambda: MIXED.join({"a": torch.zeros(3), "d": torch.zeros(2)}),
            "parts: expected .*; missing or extra: b, c, d",
        ),
        (lambda: Product({"a": Flat(2)}).join({"a": torch.zeros(3)}), r"a: expected trailing shape \(2\)"),
        (
            lambda: Product({"a": Flat(1), "b": Flat(1)}).join({"a": torch.zeros(1), "b": torch.zeros(1).double()}),
            "b: expected torch.float32",
        ),
    ],
)
def test_invalid_arguments_are_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
