"""G and H: against their formulas over all states, their derivatives, closed forms, and the figure of the paper."""

import copy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError, DivergenceError
from manifoldagg.routing import ClosedNetwork, TimeBound, UpdateBound, balanced, optimise_concurrency, uniform
from tests.routing.exact import Digits, Enumerated, networks

seeds = st.integers(0, 2**32 - 1)
CONSTANTS = {"rate": 0.02, "smoothness": 1.5, "noise": 7.0, "gap": 3.0}
KINDS = ["update", "time"]


def make(kind, rates, tasks, **changes):
    constants = CONSTANTS | changes
    return (
        TimeBound(rates, tasks, **constants)
        if kind == "time"
        else UpdateBound(rates, tasks, **constants, num_updates=40)
    )


def draw(seed, clients=8, tasks=40):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, clients + 1))
    return 0.02 + 0.9 * rng.dirichlet(np.ones(n)), np.exp(rng.normal(size=n)), int(rng.integers(1, tasks + 1))


def normalised(case):
    p, rates, m = case
    return p / p.sum(), rates, m


@pytest.mark.parametrize("kind", KINDS)
@given(networks())
def test_bounds_equal_their_formulas_summed_over_all_states(kind, case):
    p, rates, m = case
    n, (eta, smooth, noise, gap) = len(p), CONSTANTS.values()
    all_tasks, others = Enumerated(p, rates, m), Enumerated(p, rates, m - 1)
    means = np.array([float(x) for x in (all_tasks if kind == "time" else others).means()])
    errors = eta * smooth * noise / n**2 * (1 / p).sum() + (eta * smooth / n) ** 2 * noise * m * (means / p**2).sum()
    value = gap / (41 * eta) + errors
    if kind == "time":
        value = (gap / eta + errors) * float(all_tasks.constant / others.constant)
    assert make(kind, rates, m)(p) == pytest.approx(value, rel=1e-13, abs=0)


@pytest.mark.parametrize("kind", KINDS)
@given(seeds)
def test_gradients_are_unconstrained_partial_derivatives(kind, seed):
    p, rates, m = draw(seed)
    bound = make(kind, rates, m)
    p = p / p.sum()
    gradient, h = bound.gradient(p), 1e-4
    for j in range(len(p)):
        e = np.eye(len(p))[j] * p[j]
        # Four points: h⁴ times a fifth derivative in log p, which m bounds, and rounding ε/h of the value.
        slope = (
            8 * (bound.unnormalised(p + h * e) - bound.unnormalised(p - h * e))
            - bound.unnormalised(p + 2 * h * e)
            + bound.unnormalised(p - 2 * h * e)
        ) / 12
        assert slope / h == pytest.approx(gradient[j] * p[j], rel=1e-8, abs=1e-10 * bound(p))


@pytest.mark.parametrize("kind", KINDS)
@given(seeds)
def test_gradients_equal_their_formulas_with_covariances(kind, seed):
    p, rates, m = normalised(draw(seed))
    n, (eta, smooth, noise, _) = len(p), CONSTANTS.values()
    bound, network = make(kind, rates, m), ClosedNetwork(p, rates, m)
    first, second = eta * smooth * noise / n**2, (eta * smooth / n) ** 2 * noise * m
    delays, matrix = network.relative_delay, network.covariance
    if kind == "time":
        delays, matrix = network.mean_tasks, ClosedNetwork(p, rates, m + 1).covariance
    gradient = -first / p**2 + second * (matrix @ (1 / p**2) / p - 2 * delays / p**3)
    if kind == "time":
        gradient = gradient / network.throughput + bound(p) * (network.mean_tasks - network.relative_delay) / p
    np.testing.assert_allclose(bound.gradient(p), gradient, rtol=0, atol=1e-12 * np.abs(gradient).max())


@pytest.mark.parametrize("kind", KINDS)
@given(seeds)
def test_logit_gradients_follow_the_chain_rule(kind, seed):
    p, rates, m = normalised(draw(seed))
    bound, theta, h = make(kind, rates, m), np.log(p) + 3.0, 1e-4
    gradient = bound.logit_gradient(theta)
    assert abs(gradient.sum()) <= 1e-13 * np.abs(gradient).sum()

    def at(t):
        return bound(np.exp(t) / np.exp(t).sum())

    for j, e in enumerate(np.eye(len(p))):
        slope = (8 * (at(theta + h * e) - at(theta - h * e)) - at(theta + 2 * h * e) + at(theta - 2 * h * e)) / 12
        assert slope / h == pytest.approx(gradient[j], rel=1e-8, abs=1e-10 * bound(p))


def test_gradients_of_a_large_network_agree_with_sixty_digits():
    rng = np.random.default_rng(1)
    rates = np.exp(0.5 * rng.normal(size=300))
    p, m = rng.dirichlet(np.full(300, 5.0)), 2000
    digits = Digits(p / rates, m)
    weights = [1 / x**2 for x in map(digits.loads[0].__class__, p.tolist())]
    # E[x_j Σ w x] = Σ_k ρ_j^k Z_{m-k}/Z_m (E_{m-k}[Σ w x] + k w_j), the law of what is left when k tasks are at j.
    total = [0] * (m + 1)
    for i, w in enumerate(weights):
        total = [t + w * x for t, x in zip(total, digits.unscaled_means(i), strict=True)]
    bound = make("time", rates, m)
    gradient, value = bound.gradient(p), bound(p)
    eta, smooth, noise, _ = CONSTANTS.values()
    for j in (0, int(np.argmax(p / rates)), int(np.argmin(p / rates))):
        power, product = 1, 0
        for k in range(1, m + 1):
            power *= digits.loads[j]
            product += power * (total[m - k] + k * weights[j] * digits.z[m - k])
        mean, fewer = digits.mean(j), digits.mean(j, fewer=1)
        moved = float(product / digits.z[m] - mean * total[m] / digits.z[m])
        first, second = eta * smooth * noise / 300**2, (eta * smooth / 300) ** 2 * noise * m
        exact = (-first / p[j] ** 2 + second * (moved / p[j] - 2 * float(mean) / p[j] ** 3)) / float(digits.throughput)
        exact += value * float(mean - fewer) / p[j]
        # Relative to the terms that are added.
        size = second * float(mean) / p[j] ** 3 / float(digits.throughput) + value / p[j]
        assert abs(gradient[j] - exact) <= 1e-11 * size


@given(seeds)
def test_uniform_and_balanced_routings_have_closed_forms(seed):
    _, rates, m = draw(seed)
    n, (eta, smooth, noise, gap) = len(rates), CONSTANTS.values()
    start = gap / (eta * 41)
    value = start + eta * smooth * noise + (eta * smooth) ** 2 * noise * m * (m - 1)
    assert make("update", rates, m)(uniform(n)) == pytest.approx(value, rel=1e-13, abs=0)
    throughput = ClosedNetwork(uniform(n), rates, m).throughput
    value = (gap / eta + eta * smooth * noise + (eta * smooth) ** 2 * noise * m * m) / throughput
    assert make("time", rates, m)(uniform(n)) == pytest.approx(value, rel=1e-13, abs=0)
    total = rates.sum()
    errors = eta * smooth * noise * total / n**2 * (1 / rates).sum()
    stale = (eta * smooth * total) ** 2 * noise * m / n**3 * (1 / rates**2).sum()
    assert make("update", rates, m)(balanced(rates)) == pytest.approx(
        start + errors + (m - 1) * stale, rel=1e-12, abs=0
    )
    value = (gap / eta + errors + m * stale) * (m + n - 1) / (total * m)
    assert make("time", rates, m)(balanced(rates)) == pytest.approx(value, rel=1e-12, abs=0)


@given(seeds)
def test_bounds_are_invariant_under_permutations_and_units_of_time(seed):
    p, rates, m = normalised(draw(seed))
    order = np.random.default_rng(seed).permutation(len(p))
    for kind in KINDS:
        bound = make(kind, rates, m)
        assert make(kind, rates[order], m)(p[order]) == pytest.approx(bound(p), rel=1e-13, abs=0)
        # H is an integral over time, G does not see it.
        assert make(kind, 8 * rates, m)(p) == bound(p) / (8 if kind == "time" else 1)


@given(seeds)
def test_update_bounds_increase_with_the_concurrency(seed):
    p, rates, m = normalised(draw(seed))
    assert make("update", rates, m)(p) < make("update", rates, m + 1)(p)
    assert optimise_concurrency(make("update", rates, m), p) == 1


@pytest.mark.parametrize("kind", KINDS)
@given(seeds)
def test_over_concurrency_yields_the_bound(kind, seed):
    p, rates, m = normalised(draw(seed))
    pairs = [pair for pair, _ in zip(make(kind, rates, 1).over_concurrency(p), range(m + 5), strict=False)]
    assert pairs[m - 1][0] == make(kind, rates, m)(p)
    values, least = np.array(pairs).T
    for k in range(m + 5):
        assert least[k] <= values[k:].min() * (1 + 1e-13)


@given(seeds)
def test_the_best_concurrency_is_the_global_minimum(seed):
    p, rates, _ = normalised(draw(seed))
    bound = make("time", rates, 1, noise=200.0)
    best = optimise_concurrency(bound, p)
    values = [replace(bound, concurrency=m)(p) for m in range(1, 2 * best + 20)]
    assert int(np.argmin(values)) + 1 == best
    assert optimise_concurrency(bound, p, max_concurrency=3) == int(np.argmin(values[:3])) + 1


# A/B between these, for L = 1 and rates exp(i/100).
RATIO = (0.00277678, 0.00311799)


def figure_2(ratio, spread=100):
    rates = np.exp(np.arange(1, 51) / spread)
    bounds = [TimeBound(rates, 1, rate, 1.0, 1.0, ratio) for rate in (0.015, 0.02, 0.03)]
    return [optimise_concurrency(bound) for bound in bounds]


def test_figure_2_holds_for_a_narrow_range_of_gap_over_noise():
    for ratio in np.linspace(*RATIO, 7):
        assert figure_2(ratio) == [22, 16, 10]
    assert figure_2(RATIO[0] * 0.999) != [22, 16, 10]
    assert figure_2(RATIO[1] * 1.001) != [22, 16, 10]


@pytest.mark.parametrize("kind", KINDS)
def test_bounds_are_immutable_values(kind):
    bound = make(kind, [1.0, 2.0], 3)
    assert bound == make(kind, (1, 2), 3) == copy.deepcopy(bound)
    assert len({bound, make(kind, [1.0, 2.0], 3)}) == 1
    assert bound != make(kind, [1.0, 2.0], 4)
    assert make("update", [1.0], 1) != make("time", [1.0], 1)


CHANGES = [
    ({"rate": 0}, "rate: expected a finite number > 0"),
    ({"rate": float("nan")}, "rate: expected a finite number > 0"),
    ({"smoothness": -1}, "smoothness: expected a finite number > 0"),
    ({"noise": -1}, "noise: expected a finite number >= 0"),
    ({"gap": float("inf")}, "gap: expected a finite number >= 0"),
    ({"noise": 0, "gap": 0}, "noise: expected a number > 0"),
]


@pytest.mark.parametrize(("changes", "message"), CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_invalid_constants_are_rejected(kind, changes, message, as_shipped):
    with pytest.raises(ArgumentError, match=message):
        make(kind, [1.0, 2.0], 3, **changes)


@pytest.mark.parametrize("kind", KINDS)
def test_invalid_routings_are_rejected(kind, as_shipped):
    bound = make(kind, [1.0, 2.0], 3)
    for function in (bound, bound.gradient, bound.value_and_gradient):
        with pytest.raises(ArgumentError, match=r"routing: expected shares that sum to 1, got 1.25: 0.25 too much"):
            function([0.5, 0.75])
        with pytest.raises(ArgumentError, match=r"routing\[0\]: expected a positive share"):
            function([0.0, 1.0])
        with pytest.raises(ArgumentError, match="routing: expected 2 entries"):
            function([1.0])
    with pytest.raises(ArgumentError, match=r"p\[1\]: expected a positive share"):
        bound.unnormalised([0.5, -0.1])
    with pytest.raises(ArgumentError, match="theta: expected real numbers"):
        bound.logit_gradient(["a", "b"])
    with pytest.raises(ArgumentError, match=r"softmax\(theta\)\[0\]: expected a positive share"):
        bound.logit_gradient([-2000.0, 0.0])
    with pytest.raises(DivergenceError, match="smallest share of 1e-170"):
        make(kind, [1e-170, 1.0], 30)([1e-170, 1.0])
    with pytest.raises(ArgumentError, match="num_updates: expected an integer >= 0"):
        UpdateBound([1.0], 1, 0.1, 1.0, 1.0, 1.0, -1)


def test_without_noise_the_bound_decreases_with_the_concurrency(monkeypatch):
    monkeypatch.setattr("manifoldagg.routing.optimise.MAX_CONCURRENCY", 500)
    bound = make("time", [1.0, 2.0], 3, noise=0)
    with pytest.raises(
        ArgumentError,
        match="max_concurrency: expected an integer, got None; the bound may still decrease after 500 tasks",
    ):
        optimise_concurrency(bound, [1 / 3, 2 / 3])
    assert optimise_concurrency(bound, [1 / 3, 2 / 3], max_concurrency=70) == 70
    # A bottleneck brings the throughput to its limit, where rounding alone could settle it; a single client waits.
    with pytest.raises(ArgumentError, match="max_concurrency: expected an integer, got None"):
        optimise_concurrency(bound, [0.9, 0.1])
    assert optimise_concurrency(make("time", [1.0], 3, noise=0)) == 1


@pytest.mark.parametrize("rounds", [1, 7, 3000])
def test_the_gap_of_h_is_spread_over_the_rounds(rounds):
    """Queue, Appendix D: A is a mean over the T + 1 rounds of decreases, whose sum is at most f(w0) - f*."""
    rates, p = np.array([1.0, 2.0, 5.0]), np.array([0.2, 0.3, 0.5])
    constants = {"rate": 0.1, "smoothness": 2.0, "noise": 3.0}
    bound = TimeBound(rates, 4, **constants, gap=6.0, rounds=rounds)
    network = ClosedNetwork(p, rates, 4)
    noise = 0.1 * 2.0 * 3.0 / 9 * (1 / p).sum()
    stale = (0.1 * 2.0) ** 2 * 3.0 * 4 / 9 * (network.mean_tasks / p**2).sum()
    expected = (6.0 / rounds / 0.1 + noise + stale) / network.throughput
    assert bound(p) == pytest.approx(expected, rel=1e-12)
    mean = TimeBound(rates, 4, **constants, gap=6.0 / rounds)
    np.testing.assert_allclose(bound.gradient(p), mean.gradient(p), rtol=1e-12)


def test_rounds_default_to_the_papers_constant():
    bound = TimeBound([1.0], 1, 0.1, 1.0, 1.0, 15.0)
    assert bound == replace(bound, rounds=1) != replace(bound, rounds=2)
    assert "rounds" not in repr(bound)
    assert "rounds=2" in repr(replace(bound, rounds=2))
    with pytest.raises(ArgumentError, match="rounds"):
        replace(bound, rounds=0)
