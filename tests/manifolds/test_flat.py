"""Laws of a manifold, on the flat ones."""

import pytest
import torch
from hypothesis import given

from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import Flat, Layout, Manifold, ParameterSpace
from tests.support import draw, dtypes, scales, seeds, small_sizes


@given(seeds, small_sizes, dtypes, scales)
def test_log_inverts_exp(seed, n, dtype, scale):
    space, x, u = Flat(n), draw(seed, 4, n, dtype=dtype), draw(seed + 1, 4, n, dtype=dtype, scale=scale)
    eps = torch.finfo(dtype).eps
    assert ((space.log(x, space.exp(x, u)) - u).abs() <= 2 * eps * (x.abs() + u.abs())).all()


@given(seeds, small_sizes)
def test_transport_is_an_isometry(seed, n):
    space = Flat(n)
    x, y, u, v = draw(seed, 4, n)
    assert torch.equal(space.inner(y, space.transport(x, y, u), space.transport(x, y, v)), space.inner(x, u, v))


@given(seeds, small_sizes)
def test_inner_products_accumulate_in_float64(seed, n):
    u, v = draw(seed, 2, n, dtype=torch.float32)
    assert torch.equal(Flat(n).inner(u, u, v), (u.double() @ v.double()).float()) or n > 1
    exact = sum(a * b for a, b in zip(u.tolist(), v.tolist(), strict=True))
    size = sum(abs(a * b) for a, b in zip(u.tolist(), v.tolist(), strict=True))
    assert abs(Flat(n).inner(u, u, v).item() - exact) <= 2.0**-24 * abs(exact) + n * 2.0**-51 * size


def test_random_points_follow_the_generator():
    space = Flat(3)
    points = [space.random_point(5, generator=torch.Generator().manual_seed(7)) for _ in range(2)]
    assert points[0].shape == (5, 3)
    assert torch.equal(points[0], points[1])
    tangent = space.random_tangent(points[0], torch.Generator().manual_seed(8))
    assert tangent.shape == (5, 3)
    assert space.injectivity_radius(points[0]).tolist() == [float("inf")] * 5


def test_spaces_are_compared_by_value():
    assert Flat(3) == Flat(3) != Flat(4)
    assert hash(ParameterSpace(Layout(()))) == hash(ParameterSpace(Layout(())))


def test_a_missing_primitive_is_reported_by_name():
    class Bare(Manifold):
        shape = (2,)

    with pytest.raises(NotImplementedError, match="has no transport"):
        Bare().transport(torch.zeros(2), torch.zeros(2), torch.zeros(2))


def test_a_space_that_overrides_a_method_instead_of_its_formula_is_rejected():
    with pytest.raises(ArgumentError, match=r"Hasty: expected the formula _exp, got exp"):

        class Hasty(Flat):
            def exp(self, x, u):
                return x + u


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Flat(-1), "n: expected an integer >= 0, got -1"),
        (lambda: Flat(2.5), "n: expected an integer"),
        (lambda: Flat(2).exp(torch.zeros(3), torch.zeros(3)), r"x: expected trailing shape \(2\), got \(3,\)"),
        (lambda: Flat(2).exp(torch.zeros(2), torch.zeros(2).double()), "u: expected torch.float32"),
        (lambda: Flat(2).log(torch.zeros(2), [0.0, 0.0]), "y: expected a floating tensor"),
        (lambda: Flat(2).log(torch.zeros(2), torch.zeros(2).int()), "y: expected a floating tensor"),
    ],
)
def test_invalid_arguments_are_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
