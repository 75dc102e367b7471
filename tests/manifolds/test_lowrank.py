"""Matrices of low rank against dense matrices, SciPy's SVD and pymanopt, in every gauge."""

import numpy as np
import pymanopt
import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg import ParameterSpace
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import LowRank, Power, Product, Sphere, Validated
from manifoldagg.manifolds.lora.factors import JointBasis, balance, combine_stacks, truncate
from manifoldagg.testing import check_manifold
from tests.support import LargestTensor, draw, rotation, seeds

EPS = 2.0**-52
CASES = {LowRank: [LowRank(5, 4, 2)]}
SPACES = [LowRank(5, 4, 2), LowRank(3, 6, 1), LowRank(9, 7, 3), LowRank(3, 3, 3)]
sizes = st.sampled_from(SPACES)
conditions = st.floats(0, 6).map(lambda e: 10.0**e)
lengths = st.floats(-6, -0.5).map(lambda e: 10.0**e)


def case(seed, space, t=1.0, batch=()):
    """A point whose factors are well conditioned, so that errors are those of the gauge, and two tangents of length t."""
    generator = torch.Generator().manual_seed(seed)
    x = space.random_point(*batch, generator=generator, dtype=torch.float64)
    x = torch.cat([torch.linalg.qr(part).Q for part in x.split([space.m, space.n], -2)], -2)
    tangents = [space.random_tangent(x, generator) for _ in range(2)]
    return x, *(u * (t / space.inner(x, u, u).sqrt())[..., None, None] for u in tangents)


def gauge(seed, size, condition):
    """An invertible matrix of that condition, whose inverse is exact but for rounding."""
    values = torch.logspace(0, -1, size, base=condition, dtype=torch.float64) if size > 1 else torch.ones(1).double()
    left, right = rotation(seed, size), rotation(seed + 1, size)
    return left * values @ right, right.mT / values @ left.mT


def turned(space, x, g, inverse):
    """The same point, or tangent, in another gauge."""
    return torch.cat([x[..., : space.m, :] @ g, x[..., space.m :, :] @ inverse.mT], -2)


def dense(space, x):
    """The matrix of a stack of factors of any rank."""
    return x[..., : space.m, :] @ x[..., space.m :, :].mT


def ambient(space, x, u):
    """The matrix of a tangent."""
    return u[..., : space.m, :] @ x[..., space.m :, :].mT + x[..., : space.m, :] @ u[..., space.m :, :].mT


def projected(space, x, z):
    """The projection of a dense matrix to the tangents at a point, as it is printed."""
    left = torch.linalg.qr(x[..., : space.m, :]).Q
    right = torch.linalg.qr(x[..., space.m :, :]).Q
    down, across = left @ (left.mT @ z), (z @ right) @ right.mT
    return down + across - left @ (left.mT @ across)


def best(z, rank):
    """The best matrix of a rank by SciPy, and its error."""
    u, values, v = scipy.linalg.svd(z.numpy(), full_matrices=False)
    near = (u[:, :rank] * values[:rank]) @ v[:rank]
    return torch.from_numpy(near), float(np.linalg.norm(values[rank:]))


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("space", SPACES, ids=str)
def test_every_law_holds(space):
    verdict = check_manifold(space, seeds=2, max_distance=0.1, verbose=False)
    assert verdict.holds, f"\n{verdict}"
    assert len(verdict.findings) == 8


@given(seeds, sizes, lengths)
def test_primitives_agree_with_dense_matrices(seed, space, t):
    x, u, v = case(seed, space, t)
    xi, eta, whole = ambient(space, x, u), ambient(space, x, v), dense(space, x)
    assert (space.inner(x, u, v) - (xi * eta).sum()).abs() <= 40 * EPS * t**2
    raw = draw(seed, *space.shape)
    tangent = space.project_tangent(x, raw)
    assert (ambient(space, x, tangent) - ambient(space, x, raw)).norm() <= 40 * EPS * raw.norm()
    assert (x[: space.m].mT @ tangent[: space.m]).norm() <= 40 * EPS * raw.norm()
    moved = dense(space, space.retract(x, u))
    # That Y is of the rank, and sees the tangent, makes it the orthographic retraction.
    assert torch.linalg.matrix_rank(moved, rtol=1e-12) == space.rank
    assert (projected(space, x, moved - whole) - xi).norm() <= 100 * EPS
    other = space.random_point(generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    back = ambient(space, x, space.inverse_retract(x, other))
    expected = projected(space, x, dense(space, other) - whole)
    assert (back - expected).norm() <= 100 * EPS * (1 + dense(space, other).norm())


@given(seeds, sizes)
def test_the_gradient_is_the_projected_gradient_of_the_dense_matrix(seed, space):
    x, _, _ = case(seed, space)
    z = draw(seed, space.m, space.n)
    # Of <X, Z>, by the factors: Z A^T and Z^T B.
    derivative = torch.cat([z @ x[space.m :], z.mT @ x[: space.m]])
    found = space.gradient(x, derivative)
    assert (ambient(space, x, found) - projected(space, x, z)).norm() <= 100 * EPS * z.norm()
    automatic = torch.func.grad(lambda point: (dense(space, point) * z).sum())(x)
    assert (automatic - derivative).norm() <= 10 * EPS * z.norm()


@given(seeds, sizes, lengths, conditions)
def test_primitives_do_not_depend_on_the_gauge(seed, space, t, condition):
    x, u, v = case(seed, space, t)
    y = space.retract(x, u)
    g, h = gauge(seed, space.rank, condition), gauge(seed + 2, space.rank, condition)
    allowed = 100 * EPS * condition
    xg, ug, vg, yh = turned(space, x, *g), turned(space, u, *g), turned(space, v, *g), turned(space, y, *h)
    assert (space.inner(xg, ug, vg) - space.inner(x, u, v)).abs() <= allowed * t**2
    raw = draw(seed, *space.shape)
    raw = raw / raw.norm()
    tangent = space.project_tangent(xg, turned(space, raw, *g))
    assert (ambient(space, xg, tangent) - ambient(space, x, raw)).norm() <= allowed
    assert (dense(space, space.retract(xg, ug)) - dense(space, y)).norm() <= allowed
    assert (ambient(space, xg, space.inverse_retract(xg, yh)) - ambient(space, x, u)).norm() <= allowed
    e = torch.cat([raw[: space.m] @ g[1].mT, raw[space.m :] @ g[0]])
    gradients = ambient(space, xg, space.gradient(xg, e)), ambient(space, x, space.gradient(x, raw))
    assert (gradients[0] - gradients[1]).norm() <= allowed
    # A sum with a gap between its singular values, or else no truncation of it is known.
    other, _, _ = case(seed + 3, space)
    wide, plain = (torch.cat([part, -0.4 * other], -1) for part in (xg, x))
    near, _ = best(dense(space, plain), space.rank)
    assert (dense(space, space.project(wide)) - near).norm() <= allowed
    gram = JointBasis.of([xg, yh], space.m).gram(torch.tensor([[0.0, 1.0], [-1.0, 1.0]]))
    rows = torch.stack([dense(space, y), dense(space, y) - dense(space, x)]).flatten(1)
    assert (gram - rows @ rows.mT).abs().max() <= allowed


def test_the_trace_formula_loses_more_digits():
    """Of the same matrices in the same gauge, in float64: its error has the square of the condition."""
    space, condition = LowRank(40, 30, 4), 1e6
    x, _, _ = case(0, space)
    worst, ours = 0.0, 0.0
    for seed in range(10):
        y = turned(space, x, *gauge(seed, 4, condition))
        b, a = y[: space.m], y[space.m :].mT
        plain = torch.trace((b.mT @ b) @ (a @ a.mT))
        worst = max(worst, abs(plain.item() - 4))
        ours = max(ours, abs(JointBasis.of([y], space.m).gram(torch.ones(1, 1)).item() - 4))
    assert ours <= 100 * EPS * condition
    assert worst >= 1e4 * EPS * condition


@pytest.mark.parametrize("t", [1e-3, 1e-6])
def test_inner_products_of_small_displacements_are_accurate(t):
    """A difference of traces has none left where the square of the displacement is below rounding."""
    space = LowRank(40, 30, 4)
    x, u, _ = case(1, space, t)
    y = space.retract(x, u)
    square = JointBasis.of([x, turned(space, y, *gauge(3, 4, 10.0))], space.m).gram(torch.tensor([[-1.0, 1.0]])).item()
    exact = (dense(space, y) - dense(space, x)).norm().item() ** 2
    assert abs(square / exact - 1) <= 2000 * EPS / t
    b, a = torch.cat([y[:40], -x[:40]], -1), torch.cat([y[40:], x[40:]], -1)
    traces = torch.trace((b.mT @ b) @ (a.mT @ a)).item()
    assert abs(traces / exact - 1) >= 100 * abs(square / exact - 1)


@given(seeds, sizes, st.integers(1, 8))
def test_truncation_is_optimal_in_the_frobenius_norm(seed, space, columns):
    x = draw(seed, space.m + space.n, columns)
    found = truncate(x, space.m, space.rank)
    near, error = best(dense(space, x), space.rank)
    size = x.norm() ** 2
    assert (dense(space, found.point) - near).norm() <= 100 * EPS * size
    assert abs(found.error.item() - error) <= 100 * EPS * size
    assert (dense(space, found.point) + dense(space, found.remainder) - dense(space, x)).norm() <= 100 * EPS * size
    b, a = found.point[: space.m], found.point[space.m :]
    assert (b.mT @ b - a.mT @ a).abs().max() <= 100 * EPS * size
    assert found.point.shape == space.shape
    assert not found.is_tied
    # What projects to the rank is that point, and a point is its own projection.
    if columns != space.rank:
        assert (dense(space, space.project(x)) - near).norm() <= 100 * EPS * size
    assert torch.equal(space.project(found.point), found.point)


@given(seeds, st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_sums_of_any_ranks_agree_with_dense_matrices(seed, ranks):
    m, n = 8, 9
    points = [draw(seed + i, m + n, rank) for i, rank in enumerate(ranks)]
    coefficients = draw(seed, len(ranks))
    exact = sum(c * x[:m] @ x[m:].mT for c, x in zip(coefficients, points, strict=True))
    stack = combine_stacks(coefficients.tolist(), points, m)
    size = sum(x.norm() ** 2 for x in points)
    assert (stack[:m] @ stack[m:].mT - exact).norm() <= 20 * EPS * size
    near, error = best(exact, 2)
    found = JointBasis.of(points, m).combine(coefficients, 2)
    assert (found.point[:m] @ found.point[m:].mT - near).norm() <= 1e4 * EPS * size
    assert abs(found.error.item() - error) <= 100 * EPS * size


def test_a_sum_is_exact_if_the_rank_suffices():
    space = LowRank(40, 30, 6)
    points = [draw(i, 70, 3) for i in range(2)]
    found = truncate(combine_stacks([0.25, 0.75], points, 40), 40, 6)
    exact = 0.25 * dense(space, points[0]) + 0.75 * dense(space, points[1])
    assert (dense(space, found.point) - exact).norm() <= 100 * EPS * exact.norm()
    assert found.error <= 100 * EPS * exact.norm()


def test_balance_preserves_the_matrix_and_equalises_the_factors():
    space = LowRank(7, 5, 3)
    x, _, _ = case(0, space)
    y = balance(turned(space, x, *gauge(1, 3, 1e3)), 7)
    assert (dense(space, y) - dense(space, x)).norm() <= 1e5 * EPS
    assert (y[:7].mT @ y[:7] - y[7:].mT @ y[7:]).norm() <= 100 * EPS


def test_equal_singular_values_at_the_truncation_are_reported():
    eye = torch.cat([torch.eye(3), torch.eye(3)])
    assert truncate(eye, 3, 2).is_tied
    assert not truncate(eye, 3, 3).is_tied
    assert not truncate(torch.zeros(6, 3), 3, 2).is_tied
    assert not truncate(torch.cat([torch.diag(torch.tensor([3.0, 2.0, 1.0])), torch.eye(3)]), 3, 2).is_tied


@given(seeds, sizes)
def test_retract_agrees_with_exp_to_second_order(seed, space):
    """It and the nearest matrix of the rank to X + ξ, which is known to be, are apart by the third power of ξ."""
    if space.rank == min(space.m, space.n):
        return
    x, u, _ = case(seed, space)
    gaps = []
    for h in (0.02, 0.01):
        near, _ = best(dense(space, x) + h * ambient(space, x, u), space.rank)
        gaps.append((dense(space, space.retract(x, h * u)) - near).norm().item())
    assert np.log2(gaps[0] / gaps[1]) >= 2.8


@given(seeds, sizes)
def test_matrices_of_full_rank_are_flat(seed, space):
    """Where the rank is that of any matrix, all that there is is addition."""
    space = LowRank(space.m, space.n, min(space.m, space.n))
    x, u, v = case(seed, space, 0.1)
    y = space.retract(x, u)
    assert (dense(space, y) - dense(space, x) - ambient(space, x, u)).norm() <= 100 * EPS
    z = space.retract(x, v)
    assert (ambient(space, z, space.inverse_retract(z, y)) - dense(space, y) + dense(space, z)).norm() <= 1e3 * EPS


def test_pymanopt_agrees():
    space, theirs = LowRank(6, 5, 2), pymanopt.manifolds.FixedRankEmbedded(6, 5, 2)
    for seed in range(5):
        x, u, v = case(seed, space)
        x = turned(space, x, *gauge(seed, 2, 3.0))
        u, v = (space.random_tangent(x, torch.Generator().manual_seed(seed + i)) for i in (1, 2))
        point = tuple(np.linalg.svd(dense(space, x).numpy(), full_matrices=False))
        point = point[0][:, :2], point[1][:2], point[2][:2]
        tangents = [theirs.projection(point, ambient(space, x, w).numpy()) for w in (u, v)]
        assert space.inner(x, u, v).item() == pytest.approx(theirs.inner_product(point, *tangents), abs=1e-12)
        other = dense(space, space.random_point(generator=torch.Generator().manual_seed(9), dtype=torch.float64))
        whole = theirs.embedding(point, theirs.projection(point, other.numpy() - dense(space, x).numpy()))
        factors = truncate(torch.cat([other, torch.eye(5)]), 6, 2).point
        expected = torch.from_numpy(whole[0] @ whole[1] @ whole[2].T)
        assert torch.allclose(ambient(space, x, space.inverse_retract(x, factors)), expected, atol=1e-12)
        # Its retraction is the nearest matrix: equal to third order.
        moved = theirs.retraction(point, 1e-4 * tangents[0])
        near = torch.from_numpy((moved[0] * moved[1]) @ moved[2])
        size = ambient(space, x, u).norm().item() / dense(space, x).norm().item()
        assert (dense(space, space.retract(x, 1e-4 * u)) - near).norm() <= 1e-11 * (1 + size) ** 3


def test_initial_factors_of_a_fine_tuning_are_valid_points():
    """B = 0: there is no smooth point, and nothing is not a number."""
    space = LowRank(5, 4, 2)
    x = torch.cat([torch.zeros(5, 2), draw(0, 4, 2)]).double()
    u = draw(1, 9, 2)
    xi = u[:5] @ x[5:].mT
    assert space.inner(x, u, u).item() == pytest.approx(xi.square().sum().item(), rel=1e-13)
    assert (ambient(space, x, space.project_tangent(x, u)) - xi).norm() <= 100 * EPS
    step = torch.cat([u[:5], torch.zeros(4, 2).double()])
    assert (dense(space, space.retract(x, step)) - xi).norm() <= 100 * EPS
    assert (dense(space, space.retract(x, u))).isfinite().all()
    y = space.retract(x, step)
    assert (ambient(space, x, space.inverse_retract(x, y)) - xi).norm() <= 100 * EPS
    g = space.gradient(x, u)
    assert g.isfinite().all()
    assert (g[5:] == 0).all()
    assert space.random_tangent(x, torch.Generator().manual_seed(0)).isfinite().all()
    # Through all of it: a point of no rank at all.
    zero = torch.zeros_like(x)
    for found in (
        space.inner(zero, u, u),
        space.retract(zero, u),
        space.inverse_retract(zero, y),
        space.gradient(zero, u),
    ):
        assert found.isfinite().all()
    assert (dense(space, space.retract(zero, u)) == 0).all()
    assert (space.project(torch.zeros(9, 5)) == 0).all()


@pytest.mark.parametrize("lacking", ["B", "A"])
def test_a_rank_deficient_factor_preserves_the_tangent(lacking):
    space = LowRank(6, 5, 3)
    x, raw = draw(3, 11, 3), draw(4, 11, 3)
    part = x[:6] if lacking == "B" else x[6:]
    part[:, 2] = part[:, 0] - 2 * part[:, 1]
    xi = ambient(space, x, raw)
    u = space.project_tangent(x, raw)
    assert (ambient(space, x, u) - xi).norm() <= 1e3 * EPS * xi.norm()
    assert (space.project_tangent(x, u) - u).norm() <= 1e3 * EPS * u.norm()
    assert space.inner(x, raw, raw).item() == pytest.approx(xi.square().sum().item(), rel=1e-12)
    # Its derivative is still the tangent.
    ahead, behind = (dense(space, space.retract(x, e * 1e-5 * u)) for e in (1, -1))
    assert ((ahead - behind) / 2e-5 - xi).norm() <= 1e-7 * xi.norm()


def test_a_retraction_to_zero_is_valid():
    space = LowRank(5, 4, 2)
    x, _, _ = case(0, space)
    back = space.inverse_retract(x, torch.zeros_like(x))
    assert (ambient(space, x, back) + dense(space, x)).norm() <= 40 * EPS
    assert dense(space, space.retract(x, back)).norm() <= 40 * EPS


def test_a_batch_equals_separate_calls():
    space = LowRank(6, 5, 2)
    x, u, v = case(0, space, 0.1, batch=(2, 3))
    y = space.retract(x, u)
    wide = torch.cat([x, y], -1)
    calls = {
        "inner": lambda i: space.inner(x[i], u[i], v[i]),
        "retract": lambda i: space.retract(x[i], u[i]),
        "inverse_retract": lambda i: space.inverse_retract(x[i], y[i]),
        "gradient": lambda i: space.gradient(x[i], v[i]),
        "project": lambda i: space.invariant(space.project(wide[i])),
        "gram": lambda i: JointBasis.of([x[i], y[i]], 6).gram(torch.eye(2)),
    }
    for name, call in calls.items():
        assert (call(...)[1, 2] - call((1, 2))).abs().max() <= 40 * EPS, name
    one = space.inverse_retract(x[0, 0].expand(2, 3, 11, 2), y)
    assert (space.inverse_retract(x[0, 0], y) - one).abs().max() <= 40 * EPS


def test_no_tensor_has_the_size_of_the_matrix():
    space = LowRank(2000, 3000, 2)
    x, u, v = case(0, space, 0.1)
    y = space.retract(x, u)
    with LargestTensor() as seen:
        for _ in (space.inner(x, u, v), space.project_tangent(x, v), space.retract(x, u), space.gradient(x, v)):
            pass
        space.inverse_retract(x, y)
        space.project(torch.cat([x, y, u], -1))
        space.random_tangent(space.random_point(generator=torch.Generator()), torch.Generator())
        JointBasis.of([x, y, u], 2000).combine(torch.ones(3), 2)
    # Three of rank 2 side by side.
    assert seen.numel == 5000 * 6


@given(seeds, sizes)
def test_float32_is_computed_in_float64(seed, space):
    x, u, v = (part.float() for part in case(seed, space, 0.1))
    y = space.retract(x, u)
    pairs = [
        (space.inner(x, u, v), space.inner(x.double(), u.double(), v.double())),
        (space.project_tangent(x, v), space.project_tangent(x.double(), v.double())),
        (y, space.retract(x.double(), u.double())),
        (space.inverse_retract(x, y), space.inverse_retract(x.double(), y.double())),
        (space.gradient(x, v), space.gradient(x.double(), v.double())),
    ]
    for found, exact in pairs:
        assert found.dtype == torch.float32
        # Rounded once: half a unit in the last place of the largest entry.
        assert (found - exact).abs().max() <= 2.0**-24 * exact.abs().max()
    generators = [torch.Generator().manual_seed(seed) for _ in range(2)]
    single = space.random_point(generator=generators[0], dtype=torch.float32)
    assert torch.equal(single, space.random_point(generator=generators[1], dtype=torch.float64).float())


def test_random_tangents_are_standard_normal():
    space = LowRank(5, 4, 2)
    x, _, _ = case(0, space)
    many = x.expand(20000, 9, 2)
    u = space.random_tangent(many, torch.Generator().manual_seed(1))
    dimension = 2 * (5 + 4 - 2)
    # The square of a standard normal has mean d and variance 2 d: 5 standard deviations.
    assert abs(space.inner(many, u, u).mean().item() - dimension) <= 5 * (2 * dimension / 20000) ** 0.5


def test_derivatives_match_finite_differences():
    space = LowRank(4, 3, 2)
    x, u, v = case(0, space, 0.3)
    y = space.retract(x, v)
    for call, arguments in ((space.inner, (x, u, v)), (space.retract, (x, u)), (space.inverse_retract, (x, y))):
        assert torch.autograd.gradcheck(call, tuple(part.clone().requires_grad_() for part in arguments))


def test_products_powers_and_parameter_spaces_can_contain_low_rank_leaves():
    """`inverse_retract` is there where every part has it, and the spec tells the space to another machine."""
    leaf = LowRank(3, 2, 1)
    mixed = Product({"adapter": leaf, "copies": Power(leaf, (2,)), "head": Sphere(3)})
    assert mixed.capabilities == leaf.capabilities
    generator = torch.Generator().manual_seed(0)
    x = mixed.random_point(generator=generator, dtype=torch.float64)
    u = 0.01 * mixed.random_tangent(x, generator)
    assert (mixed.inverse_retract(x, mixed.retract(x, u)) - u).abs().max() <= 1e-12
    space = ParameterSpace.of_state_dict({"w": torch.ones(5, 1), "b": torch.ones(2)}, {"w": leaf})
    again = ParameterSpace.of_spec(space.spec())
    assert again == space
    assert dict(again.manifolds)["w"] == leaf


def test_validated_low_rank_accepts_horizontal_tangents():
    space = LowRank(5, 4, 2)
    x, u, _ = case(0, space, 0.1)
    guarded = Validated(space)
    assert torch.equal(guarded.retract(x, u), space.retract(x, u))
    with pytest.raises(ArgumentError, match="u: expected a tangent of"):
        guarded.retract(x, torch.cat([x[:5], torch.zeros(4, 2).double()]))
    with pytest.raises(ArgumentError, match="x: expected finite values"):
        guarded.retract(x / 0, u)


X = torch.ones(5, 1)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: LowRank(0, 1, 1), ArgumentError, "m: expected an integer >= 1, got 0"),
        (lambda: LowRank(2, 1.5, 1), ArgumentError, "n: expected an integer >= 1, got 1.5"),
        (lambda: LowRank(2, 3, 0), ArgumentError, "rank: expected an integer >= 1, got 0"),
        (lambda: LowRank(2, 3, 3), ArgumentError, r"rank: expected at most min\(m, n\) = 2, got 3"),
        (
            lambda: LowRank(2, 3, 1).retract(X, X[:4]),
            ArgumentError,
            r"u: expected trailing shape \(5, 1\), got \(4, 1\)",
        ),
        (lambda: LowRank(2, 3, 1).inverse_retract(X, X.double()), ArgumentError, "y: expected torch.float32"),
        (lambda: LowRank(2, 3, 1).project(X.mT), ArgumentError, r"x: expected trailing shape \(5, any\), got \(1, 5\)"),
        (lambda: LowRank(2, 3, 1).inner(X, X, X.long()), ArgumentError, "v: expected a floating tensor"),
        (lambda: JointBasis.of([], 2), ArgumentError, "points: expected at least one stack"),
        (lambda: LowRank(2, 3, 1).exp(X, X), NotImplementedError, "has no exp"),
        (lambda: LowRank(2, 3, 1).log(X, X), NotImplementedError, "has no log"),
        (lambda: LowRank(2, 3, 1).transport(X, X, X), NotImplementedError, "has no transport"),
        (lambda: LowRank(2, 3, 1).injectivity_radius(X), NotImplementedError, "has no injectivity_radius"),
    ],
)
def test_invalid_arguments_are_rejected_by_name(call, error, words):
    with pytest.raises(error, match=words):
        call()
