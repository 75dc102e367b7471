"""Routings that minimise a bound: certificates, other optimisers, and the sections of the paper."""

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError, DivergenceError
from manifoldagg.routing import ClosedNetwork, TimeBound, UpdateBound, balanced, optimise_routing, uniform

seeds = st.integers(0, 2**32 - 1)
CONSTANTS = {"rate": 0.01, "smoothness": 1.0, "noise": 209.0, "gap": 15.0}  # §5.2: B = 2 · 10² + 3²
SLOW, MEDIUM, FAST = slice(0, 10), slice(10, 20), slice(20, 30)
CLUSTERS = np.repeat([0.01, 0.1, 1.0], 10)


def draw(seed):
    rng = np.random.default_rng(seed)
    rates = np.exp(rng.normal(size=rng.integers(2, 7)))
    kind = [TimeBound, UpdateBound][rng.integers(2)]
    updates = {"num_updates": 100} if kind is UpdateBound else {}
    return kind(rates, int(rng.integers(1, 30)), **CONSTANTS, **updates)


@settings(max_examples=12)
@given(seeds)
def test_the_optimum_is_stationary_and_not_worse_than_its_starts(seed):
    bound = draw(seed)
    best = optimise_routing(bound)
    assert best.converged
    assert best.p.sum() == pytest.approx(1, rel=1e-14, abs=0)
    assert best.value == bound(best.p)
    for p in (uniform(bound.clients), balanced(bound.rates)):
        assert best.value <= bound(p) * (1 + 1e-12)
    slope = bound.gradient(best.p)
    certificate = np.linalg.norm(best.p * (slope - best.p @ slope)) / best.value
    assert certificate == pytest.approx(best.gradient_norm, rel=0.1, abs=1e-12)
    # The free derivatives are all the same on the simplex.
    assert np.abs(best.p * (slope - slope.mean())).max() <= 1e-6 * best.value


@settings(max_examples=8)
@given(seeds)
def test_one_start_ends_where_another_optimiser_does_not_improve(seed):
    bound = draw(seed)
    best = optimise_routing(bound, tolerance=1e-9)

    def objective(theta):
        p = np.exp(theta - theta.max())
        return np.log(bound(p / p.sum()))

    found = scipy.optimize.minimize(objective, np.log(best.p), method="Nelder-Mead", options={"maxfev": 200})
    # Second order in a certificate of 1e-9; the values themselves are rounded.
    assert found.fun >= np.log(best.value) - 1e-13


@pytest.mark.parametrize("ratio", [1.0, 1.1, 3.0])
@pytest.mark.parametrize("tasks", [2, 20])
def test_for_two_clients_no_share_on_a_grid_is_better(ratio, tasks):
    for bound in (
        UpdateBound([1.0, ratio], tasks, **CONSTANTS, num_updates=1000),
        TimeBound([1.0, ratio], tasks, **CONSTANTS),
    ):
        grid = min(bound([q, 1 - q]) for q in np.linspace(0.01, 0.99, 197))
        assert optimise_routing(bound).value <= grid


def test_loose_tolerances_and_short_runs_are_reported():
    bound = TimeBound(CLUSTERS, 30, **CONSTANTS)
    none = optimise_routing(bound, starts=["uniform"], steps=0)
    assert (none.converged, none.start) == (False, "uniform")
    np.testing.assert_allclose(none.p, 1 / 30, rtol=1e-14)
    exact = optimise_routing(bound, starts=[balanced(CLUSTERS)], tolerance=1e-11)
    assert exact.converged
    assert exact.start == "given 0"
    assert exact.gradient_norm <= 1e-11


@pytest.mark.filterwarnings("error")
def test_starts_with_an_infinite_bound_are_skipped():
    # Balanced, the slow client has a share of 0; uniform, the bound is finite.
    bound = TimeBound([1e300, 1e-300], 4, **CONSTANTS)
    best = optimise_routing(bound)
    assert best.value <= bound([0.5, 0.5])
    with pytest.raises(DivergenceError, match="at any of the starts balanced"):
        optimise_routing(bound, starts=["balanced"])
    with pytest.raises(DivergenceError, match="at any of the starts given 0"):
        optimise_routing(TimeBound([1.0, 1.0], 4, **CONSTANTS), starts=[[1e-200, 1.0]])


def test_invalid_starts_are_rejected(as_shipped):
    bound = TimeBound([1.0, 2.0], 3, **CONSTANTS)
    with pytest.raises(
        ArgumentError, match="starts: expected one of uniform, balanced, slowest, middle, fastest; got 'best'"
    ):
        optimise_routing(bound, starts=["best"])
    with pytest.raises(ArgumentError, match="starts: expected at least one"):
        optimise_routing(bound, starts=[])
    with pytest.raises(ArgumentError, match=r"routing: .* 0.1 too much"):
        optimise_routing(bound, starts=[[0.5, 0.6]])
    with pytest.raises(ArgumentError, match="tolerance: expected"):
        optimise_routing(bound, tolerance=0)


def test_section_5_1_gives_the_slowest_client_most_tasks():
    for spread in (100, 190):
        rates = np.exp(np.arange(1, 21) / spread)
        bound = UpdateBound(rates, 100, **CONSTANTS, num_updates=3000)
        best = optimise_routing(bound)
        # More than 40 %; the others alike, and the less the faster they are.
        assert 0.5 < best.p[0] < 0.53
        assert (np.diff(best.p[1:]) < 0).all()
        assert best.p[1] < 1.1 * best.p[-1]
        assert best.value < bound(uniform(20)) / 2
        assert best.value < bound(balanced(rates)) / 2
        slower = [ClosedNetwork(p, rates, 100).throughput for p in (uniform(20), best.p)]
        assert slower[0] > 5 * slower[1]


def test_section_5_1_is_nearly_uniform_with_few_tasks():
    rates = np.exp(np.arange(1, 21) / 100)
    shares = [
        optimise_routing(UpdateBound(rates, m, **CONSTANTS, num_updates=3000), starts=["uniform", "slowest"]).p[0]
        for m in (2, 20, 100, 300)
    ]
    assert shares == sorted(shares)
    assert shares[0] < 1.1 / 20


def test_section_5_2_orders_the_throughputs():
    time, update = TimeBound(CLUSTERS, 30, **CONSTANTS), UpdateBound(CLUSTERS, 30, **CONSTANTS, num_updates=3000)
    routings = [balanced(CLUSTERS), optimise_routing(time).p, uniform(30), optimise_routing(update).p]
    completed = [3000 * ClosedNetwork(p, CLUSTERS, 30).throughput for p in routings]
    assert completed == sorted(completed, reverse=True)
    # The paper counts 17,000, 3,200, 690 and 145.
    assert completed[0] == pytest.approx(16932, abs=1)
    assert completed[1] == pytest.approx(7044, abs=1)
    assert completed[2] == pytest.approx(687, abs=1)
    assert completed[3] == pytest.approx(104, abs=1)


def test_section_5_2_prints_a_routing_that_is_not_optimal():
    bound = TimeBound(CLUSTERS, 30, **CONSTANTS)
    printed = np.repeat([0.0068, 0.0449, 0.0487], 10)
    assert printed.sum() == pytest.approx(1.004)
    best, alike = optimise_routing(bound), optimise_routing(bound, starts=["uniform"])
    assert bound(printed / printed.sum()) > 1.38 * best.value
    np.testing.assert_allclose(alike.p, np.repeat([0.0023, 0.0276, 0.0702], 10), atol=5e-5)
    # Identical clients keep identical shares from a symmetric start, and a start without the symmetry does better.
    assert np.ptp(alike.p[FAST]) < 1e-12
    assert best.value < alike.value * (1 - 5e-5)
    assert np.ptp(best.p[FAST]) > 0.1
    assert np.ptp(best.p[SLOW]) < 1e-6
    assert np.ptp(best.p[MEDIUM]) < 1e-5


def test_ties_between_slowest_clients_break_for_the_update_bound():
    bound = UpdateBound(CLUSTERS, 30, **CONSTANTS, num_updates=3000)
    best, alike = optimise_routing(bound), optimise_routing(bound, starts=["uniform"])
    assert best.start == "slowest"
    assert best.value < 0.53 * alike.value
    assert best.p[0] > 9 * best.p[1]


def test_starts_end_in_different_minima():
    bound = TimeBound(CLUSTERS, 300, **CONSTANTS)
    ends = {name: optimise_routing(bound, starts=[name]) for name in ("uniform", "balanced", "middle")}
    assert all(end.converged for end in ends.values())
    values = [end.value for end in ends.values()]
    np.testing.assert_allclose(values, [11538.78, 4614.12, 4258.74], atol=0.01)
    best = optimise_routing(bound)
    assert best.start == "middle"
    assert best.value == min(values)
