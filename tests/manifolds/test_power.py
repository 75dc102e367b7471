"""Powers: copies see the primitives as a batch, and one another only in the inner product."""

import math

import pytest
import torch

from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import PRIMITIVES, Flat, Power, Product, SpecialOrthogonal, Sphere, karcher_mean
from manifoldagg.manifolds.power import factor_parts
from manifoldagg.testing import LAWS, check_manifold
from tests.support import draw

ROWS = Power(Sphere(3), (2, 5))


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("space", [ROWS, Power(Power(Sphere(3), (2,)), (2,)), Power(Flat(2), (3,))], ids=str)
def test_every_law_holds(space):
    verdict = check_manifold(space, seeds=1, verbose=False)
    assert verdict.holds, f"\n{verdict}"
    assert len(verdict.findings) == len(LAWS)


def test_inner_products_are_summed_over_copies():
    generator = torch.Generator().manual_seed(0)
    x = ROWS.random_point(4, generator=generator, dtype=torch.float64)
    u, v = ROWS.random_tangent(x, generator), ROWS.random_tangent(x, generator)
    assert x.shape == (4, 2, 5, 3)
    y = ROWS.exp(x, u)
    assert torch.equal(y, Sphere(3).exp(x, u))
    assert torch.equal(ROWS.transport(x, y, v), Sphere(3).transport(x, y, v))
    assert torch.allclose(ROWS.inner(x, u, v), Sphere(3).inner(x, u, v).sum((-2, -1)))
    assert torch.equal(ROWS.injectivity_radius(x), torch.full((4,), math.pi, dtype=torch.float64))


def test_a_power_has_the_properties_of_its_space():
    assert Power(Flat(2), (3,)).flat
    assert not ROWS.flat
    assert ROWS.symmetric
    assert ROWS.capabilities == PRIMITIVES
    assert Power(Sphere(3), (2, 5)) == ROWS
    assert hash(ROWS) == hash(Power(Sphere(3), (2, 5)))
    assert Power(Sphere(3), (5, 2)) != ROWS


def test_a_mean_of_copies_is_the_mean_of_each():
    generator = torch.Generator().manual_seed(1)
    base = ROWS.random_point(1, generator=generator, dtype=torch.float64)
    points = ROWS.exp(base.expand(6, 2, 5, 3), 0.3 * ROWS.random_tangent(base.expand(6, 2, 5, 3), generator))
    mean = karcher_mean(ROWS, points)
    assert mean.converged
    each = karcher_mean(Sphere(3), points.movedim(0, -2))
    assert torch.allclose(mean.point, each.point, atol=1e-12)


def test_leaves_of_products_of_powers_have_their_names():
    space = Product({"table": ROWS, "turn": SpecialOrthogonal(2)})
    x = draw(0, 7, 34)
    assert [(str(leaf), leaf.part, tuple(leaf.select(x).shape)) for leaf in space.leaves(x)] == [
        (f"table: {ROWS}", slice(0, 30), (7, 2, 5, 3)),
        ("turn: SpecialOrthogonal(n=2)", slice(30, 34), (7, 2, 2)),
    ]
    assert [(str(leaf), tuple(part.shape)) for leaf, (part,) in factor_parts(space, x)] == [
        ("table: Sphere(n=3)", (7, 2, 5, 3)),
        ("turn: SpecialOrthogonal(n=2)", (7, 2, 2)),
    ]


def test_the_parts_of_leaves_match_their_names():
    """Of products of products, and of a power of a product, which is one leaf."""
    pair = Product({"a": Sphere(2), "b": Flat(1)})
    x = draw(1, 5, 13)
    space = Product({"one": pair, "rows": Power(pair, (2,)), "rest": Flat(4)})
    leaves = {leaf.name: leaf for leaf in space.leaves(x)}
    assert list(leaves) == ["one.a", "one.b", "rows", "rest"]
    assert torch.equal(torch.cat([x[:, leaf.part] for leaf in leaves.values()], 1), x)
    assert torch.equal(leaves["one.b"].select(x), space.split(x)["one"][:, 2:])
    assert torch.equal(leaves["rows"].select(x), space.split(x)["rows"])
    parts = {leaf.name: part for leaf, (part,) in factor_parts(space, x)}
    assert list(parts) == ["one.a", "one.b", "rows.a", "rows.b", "rest"]
    assert torch.equal(parts["rows.b"], space.split(x)["rows"][..., 2:])
    (whole,) = ROWS.leaves(draw(0, 7, 2, 5, 3))
    assert (whole.name, whole.space, whole.part) == ("", ROWS, slice(0, 30))


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Power(3, (2,)), "space: expected a Manifold"),
        (lambda: Power(Sphere(3), ()), "copies: expected a tuple of positive integers"),
        (lambda: Power(Sphere(3), [2]), "copies: expected a tuple of positive integers"),
        (lambda: Power(Sphere(3), (2, 0)), "copies: expected an integer >= 1"),
        (lambda: ROWS.exp(torch.ones(5, 3), torch.ones(5, 3)), r"x: expected trailing shape \(2, 5, 3\)"),
        (lambda: ROWS.log(torch.ones(2, 5, 3), torch.ones(2, 4, 3)), r"y: expected trailing shape \(2, 5, 3\)"),
        (lambda: ROWS.inner(*torch.ones(2, 2, 5, 3), torch.ones(3)), r"v: expected trailing shape \(2, 5, 3\)"),
    ],
)
def test_invalid_arguments_are_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
