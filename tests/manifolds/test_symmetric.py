"""Positive definite matrices against 40-digit references, and where eigenvalues repeat."""

import math

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import SymmetricPositiveDefinite, distance
from manifoldagg.testing import check_manifold
from tests.support import draw, seeds

EPS = 2.0**-52
CONDITION = 500
sizes = st.sampled_from([1, 2, 3])
lengths = st.one_of(st.floats(-7, 0).map(lambda e: 10.0**e), st.floats(0.1, 2))


def case(seed, t, n=3):
    """A point, and a tangent of length `t` at it."""
    space, generator = SymmetricPositiveDefinite(n), torch.Generator().manual_seed(seed)
    x = space.random_point(generator=generator, dtype=torch.float64)
    u = space.random_tangent(x, generator)
    return space, x, u * (t / space.inner(x, u, u).sqrt())


def precise(v):
    return mpmath.matrix(v.tolist())


def spectral(x, function):
    values, basis = mpmath.eigsy(x)
    return basis * mpmath.diag([function(value) for value in values]) * basis.T


def roots(x):
    return spectral(x, mpmath.sqrt), spectral(x, lambda value: 1 / mpmath.sqrt(value))


def error(found, exact):
    n = len(found)
    return max(abs(mpmath.mpf(found[i, j].item()) - exact[i, j]) for i in range(n) for j in range(n))


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_law_holds_to_a_distance_of_2(n):
    """Further out a float does not determine the point: at t = 10 the condition number of y is up to 1e2 e^14."""
    space = SymmetricPositiveDefinite(n)
    verdict = check_manifold(space, condition=CONDITION, max_distance=2.0, seeds=1, verbose=False)
    assert verdict.holds, f"\n{verdict}"


@given(seeds, lengths, sizes)
def test_exp_is_exact(seed, t, n):
    space, x, u = case(seed, t, n)
    with mpmath.workdps(40):
        root, inverse = roots(precise(x))
        exact = root * mpmath.expm(inverse * precise(u) * inverse) * root
        assert error(space.exp(x, u), exact) <= 40 * EPS * x.norm().item() * math.exp(t)


@given(seeds, lengths, sizes)
def test_log_is_exact(seed, t, n):
    space, x, u = case(seed, t, n)
    y = space.exp(x, u)
    with mpmath.workdps(40):
        root, inverse = roots(precise(x))
        exact = root * spectral(inverse * precise(y) * inverse, mpmath.log) * root
        # The tangent's own size, enlarged by the condition of x and that of the whitened y.
        bound = 40 * EPS * x.norm().item() * t * torch.linalg.cond(x).item() * math.exp(2 * t)
        assert error(space.log(x, y), exact) <= bound


@given(seeds, lengths)
def test_transport_is_a_congruence(seed, t):
    space, x, u = case(seed, t)
    y, v = space.exp(x, u), space.random_tangent(x, torch.Generator().manual_seed(seed + 1))
    with mpmath.workdps(40):
        root, inverse = roots(precise(x))
        e = root * spectral(inverse * precise(y) * inverse, mpmath.sqrt) * inverse
        bound = 40 * EPS * v.norm().item() * torch.linalg.cond(x).item() * math.exp(2 * t)
        assert error(space.transport(x, y, v), e * precise(v) * e.T) <= bound


@given(seeds)
def test_lengths_are_invariant_under_congruence(seed):
    space, x, u = case(seed, 1.0)
    y, a = space.exp(x, u), torch.linalg.qr(draw(seed, 3, 3)).Q * torch.tensor([0.5, 1.0, 2.0]).double()
    moved = distance(space, a @ x @ a.mT, a @ y @ a.mT)
    assert moved.item() == pytest.approx(1.0, rel=1e-10)
    assert distance(space, x.inverse(), y.inverse()).item() == pytest.approx(1.0, rel=1e-10)


@given(seeds, st.floats(0.05, 2))
def test_derivatives_match_finite_differences(seed, t):
    space, x, u = case(seed, t, 2)
    y = space.exp(x, u)
    for call, other in ((space.exp, u), (space.log, y), (lambda a, b: space.transport(a, b, u), y)):
        arguments = (x.clone().requires_grad_(), other.clone().requires_grad_())
        # Finite differences of step 1e-6 lose the square of the condition number of x.
        assert torch.autograd.gradcheck(call, arguments, eps=1e-7, atol=1e-3, rtol=1e-4)


def test_derivatives_at_repeated_eigenvalues_are_correct():
    space, x = SymmetricPositiveDefinite(3), torch.diag(torch.tensor([2.0, 2.0, 3.0], dtype=torch.float64))
    y = (4 * x).requires_grad_()
    for call in (space.log, lambda a, b: space.transport(a, b, x), lambda a, b: space.exp(a, b)):
        arguments = (x.clone().requires_grad_(), y.detach().clone().requires_grad_())
        assert torch.autograd.gradcheck(call, arguments)
        assert torch.autograd.gradgradcheck(call, arguments)
    assert torch.autograd.gradgradcheck(space.log, (x.clone().requires_grad_(), x.clone().requires_grad_()))


def test_derivatives_at_the_point_itself():
    space, x, u = case(0, 1.0)
    slope = torch.func.jvp(lambda y: space.log(x, y), (x,), (u,))[1]
    assert torch.allclose(slope, u, atol=1e-12)
    slope = torch.func.jacrev(lambda v: space.exp(x, v))(0 * u)
    assert torch.allclose(torch.einsum("ijkl,kl->ij", slope, u), u, atol=1e-12)
    half = torch.func.hessian(lambda y: space.inner(x, space.log(x, y), space.log(x, y)))(x)
    # At y = x the Hessian of the squared distance is twice the metric.
    assert torch.einsum("ijkl,ij,kl->", half, u, u).item() == pytest.approx(2.0, rel=1e-10)


def test_vmap_and_jvp_are_supported():
    space, generator = SymmetricPositiveDefinite(3), torch.Generator().manual_seed(0)
    x, y = (space.random_point(5, generator=generator, dtype=torch.float64) for _ in range(2))
    u = space.random_tangent(x, generator)
    for call in (lambda a, b, c: space.exp(a, c), lambda a, b, c: space.log(a, b), space.transport):
        assert torch.allclose(torch.func.vmap(call)(x, y, u), call(x, y, u), rtol=1e-10)
        assert torch.func.jvp(lambda a, f=call: f(a, y, u), (x,), (u,))[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_project_returns_positive_definite_matrices(dtype):
    space, noise = SymmetricPositiveDefinite(4), draw(0, 20, 4, 4, dtype=dtype)
    point = space.project(noise)
    assert torch.linalg.cholesky_ex(point).info.eq(0).all()
    assert torch.linalg.cholesky_ex(space.project(torch.zeros(4, 4))).info == 0
    x = space.random_point(5, generator=torch.Generator().manual_seed(0), dtype=dtype)
    assert torch.equal(space.project(x), x)
    values = torch.linalg.eigvalsh(space.random_point(200, generator=torch.Generator().manual_seed(0)).double())
    assert (values[:, -1] / values[:, 0]).max() <= 100 * (1 + 1e-3)


def test_instances_are_compared_and_hashed_by_value():
    assert SymmetricPositiveDefinite(3) == SymmetricPositiveDefinite(3) != SymmetricPositiveDefinite(4)
    assert SymmetricPositiveDefinite(2).injectivity_radius(torch.eye(2)).item() == math.inf


EYE = torch.eye(2)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: SymmetricPositiveDefinite(0), "n: expected an integer >= 1, got 0"),
        (
            lambda: SymmetricPositiveDefinite(2).exp(EYE, torch.ones(2)),
            r"u: expected trailing shape \(2, 2\), got \(2,\)",
        ),
        (lambda: SymmetricPositiveDefinite(2).log(EYE, EYE.double()), "y: expected torch.float32"),
        (lambda: SymmetricPositiveDefinite(2).log(EYE, -EYE), "y: expected positive definite matrices"),
        (lambda: SymmetricPositiveDefinite(2).exp(EYE - 1, EYE), "x: expected positive definite matrices"),
        (lambda: SymmetricPositiveDefinite(2).log(EYE * math.nan, EYE), "x: expected positive definite matrices"),
    ],
)
def test_invalid_arguments_are_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
