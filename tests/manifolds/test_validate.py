"""Validation: what is off the manifold is named with its distance, and what is on it passes untouched."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import (
    PRIMITIVES,
    Flat,
    Lorentz,
    PoincareBall,
    Power,
    Product,
    SpecialOrthogonal,
    Sphere,
    SymmetricPositiveDefinite,
    Validated,
    check_point,
    check_tangent,
)
from tests.support import draw, dtypes, seeds

SPACES = [
    Flat(3),
    Sphere(4),
    PoincareBall(3),
    Lorentz(3),
    SpecialOrthogonal(3),
    SymmetricPositiveDefinite(3),
    Product({"a": Sphere(3), "b": Power(SpecialOrthogonal(2), (3,))}),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
@given(seed=seeds, dtype=dtypes)
def test_results_of_the_space_pass_validation_unchanged(space, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    x = space.random_point(2, 3, generator=generator, dtype=dtype)
    u = space.random_tangent(x, generator)
    assert check_point(space, x) is x
    assert check_tangent(space, x, u) is u
    short = 0.5 * u / (1 + space.inner(x, u, u).sqrt().reshape(2, 3, *(1 for _ in space.shape)))
    guarded = Validated(space)
    y = guarded.exp(x, short)
    assert torch.equal(y, space.exp(x, short))
    assert torch.equal(guarded.log(x, y), space.log(x, y))
    assert torch.equal(guarded.transport(x, y, u), space.transport(x, y, u))
    assert torch.equal(guarded.retract(x, short), space.retract(x, short))


@given(seeds, st.floats(1e-6, 1.0))
def test_the_message_contains_the_distance_of_a_point(seed, off):
    x = Sphere(5).project(draw(seed, 5)) * (1 + off)
    with pytest.raises(ArgumentError, match=r"model: expected a point of Sphere\(n=5\), got one (\S+) away") as info:
        check_point(Sphere(5), x, name="model")
    said = float(str(info.value).split("got one ")[1].split(" away")[0])
    assert said == pytest.approx(off * Sphere(5).project(x).abs().max().item(), rel=1e-2)


@given(seeds, st.floats(1e-6, 1.0))
def test_the_message_contains_the_size_of_a_normal_part(seed, part):
    x = Sphere(5).project(draw(seed, 5))
    u = Sphere(5).project_tangent(x, draw(seed + 1, 5))
    with pytest.raises(ArgumentError, match="u: expected a tangent .* with a normal part of") as info:
        check_tangent(Sphere(5), x, u / u.abs().max() + part * x)
    said = float(str(info.value).split("normal part of ")[1].split(" ")[0])
    assert said == pytest.approx(part * x.abs().max().item(), rel=1e-2)


def test_the_message_contains_the_name_of_the_leaf():
    space = Product({"head": Flat(2), "turn": Power(SpecialOrthogonal(2), (3,))})
    x = space.random_point(generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[5] += 0.25
    with pytest.raises(ArgumentError, match=r"x: turn: expected a point of SpecialOrthogonal\(n=2\),"):
        check_point(space, x)


def test_the_tolerance_is_configurable():
    x = torch.tensor([1.0, 0.0, 0.0]) * 1.01
    assert check_point(Sphere(3), x, tolerance=0.02) is x
    assert Validated(Sphere(3), tolerance=0.02).project_tangent(x, x) is not None


def test_logs_beyond_the_cut_locus_are_rejected_for_each_leaf():
    x = torch.tensor([1.0, 0.0])
    with pytest.raises(ArgumentError, match=r"y: .* within 3\.14 of x, got one without a log"):
        Validated(Sphere(2)).log(x, -x)
    with pytest.raises(ArgumentError, match=r"y: .* within 3\.14 of x, got one without a log"):
        Validated(Sphere(2)).transport(x, -x, torch.tensor([0.0, 1.0]))
    # Two leaves at 3 each are together farther than π, and both have their log.
    pair = Product({"a": Sphere(2), "b": Sphere(2)})
    far = torch.tensor([math.cos(3.0), math.sin(3.0)]).repeat(2)
    assert pair.inner(x.repeat(2), *[Validated(pair).log(x.repeat(2), far)] * 2).sqrt() > math.pi


def test_a_log_beyond_the_injectivity_radius_is_reported():
    class Boastful(Sphere):
        def _log(self, x, y):
            return 2 * super()._log(x, y)

    x, y = torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 0.1]) / math.sqrt(1.01)
    with pytest.raises(ArgumentError, match=r"y: .* within 3\.14 of x, got one at 6\.08"):
        Validated(Boastful(2)).log(x, y)


def test_missing_primitives_are_not_validated():
    class Shy(Sphere):
        capabilities = PRIMITIVES - {"project", "project_tangent", "injectivity_radius", "inner"}

        def _project(self, x):
            raise self._not_implemented("project")

    x = torch.tensor([1.0, 0.0])
    assert torch.equal(Validated(Shy(2)).exp(x, x), Sphere(2).exp(x, x))


@pytest.mark.parametrize(
    ("space", "x"),
    [
        (PoincareBall(2), [1.0002, 0.0]),
        (PoincareBall(2, curvature=-1e7), [5e-4, 0.0]),
        (SymmetricPositiveDefinite(2), [[1.0, 0.0], [0.0, -1e-4]]),
        (SymmetricPositiveDefinite(2), [[1e-5, 5e-5], [0.0, 1e-5]]),
    ],
)
def test_points_outside_an_open_set_are_rejected(space, x):
    with pytest.raises(ArgumentError, match="x: expected a point of"):
        check_point(space, torch.tensor(x))


def test_a_large_tangent_does_not_hide_a_wrong_one():
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    with pytest.raises(ArgumentError, match="normal part of 1 "):
        check_tangent(Sphere(2), x, torch.tensor([[0.0, 1e5], [1.0, 0.0]]))


def test_validated_spaces_are_compared_by_value():
    assert Validated(Sphere(3)) == Validated(Sphere(3))
    assert hash(Validated(Sphere(3))) == hash(Validated(Sphere(3)))
    assert Validated(Flat(2)).flat
    assert Validated(Sphere(3)).capabilities == PRIMITIVES


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s, x, u: Validated(None), "space: expected a Manifold"),
        (lambda s, x, u: s.exp(x * math.nan, u), "x: expected finite values"),
        (lambda s, x, u: s.exp(x, u * math.inf), "u: expected finite values"),
        (lambda s, x, u: s.inner(x, u, u * math.nan), "v: expected finite values"),
        (lambda s, x, u: s.exp(2 * x, u), "x: expected a point of"),
        (lambda s, x, u: s.log(x, 2 * x), "y: expected a point of"),
        (lambda s, x, u: s.retract(x, x), "u: expected a tangent of"),
        (lambda s, x, u: s.transport(x, x, x), "u: expected a tangent of"),
        (lambda s, x, u: s.injectivity_radius(2 * x), "x: expected a point of"),
        (lambda s, x, u: s.random_tangent(2 * x, torch.Generator()), "x: expected a point of"),
        (lambda s, x, u: s.project(x * math.nan), "x: expected finite values"),
        (lambda s, x, u: s.exp(x[:2], u), "x: expected trailing shape"),
        (lambda s, x, u: s.exp(x, u.double()), "u: expected torch.float32"),
    ],
)
def test_invalid_arguments_are_rejected_by_name(call, words):
    x, u = torch.tensor([0.6, 0.8, 0.0]), torch.tensor([0.0, 0.0, 1.0])
    with pytest.raises(ArgumentError, match=words):
        call(Validated(Sphere(3)), x, u)
