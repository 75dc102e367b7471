"""Closed networks: against all states, tagged tasks and 60 digits, and by their laws."""

import ast
import copy
import itertools
import pickle
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import manifoldagg.routing
from manifoldagg.errors import ArgumentError
from manifoldagg.routing import ClosedNetwork, balanced, uniform
from manifoldagg.routing.covariance import covariance, variance
from manifoldagg.routing.mean_values import directional_mean_values, mean_values
from tests.routing.exact import Digits, Enumerated, floats, networks, tagged_delay

# A step of the recursion rounds a few times; 64 of them in all small cases.
SMALL = 64 * np.finfo(np.float64).eps
seeds = st.integers(0, 2**32 - 1)


def step(recursion, k):
    """The k-th of a recursion without end."""
    return next(itertools.islice(recursion, k - 1, None))


def draw_network(seed, clients=12, tasks=60):
    rng = np.random.default_rng(seed)
    n, m = int(rng.integers(2, clients + 1)), int(rng.integers(2, tasks + 1))
    return rng.dirichlet(np.full(n, 2.0)), np.exp(rng.normal(size=n)), m


@given(networks())
def test_means_and_throughput_equal_sums_over_all_states(case):
    p, rates, m = case
    network = ClosedNetwork(p, rates, m)
    all_tasks, others = Enumerated(p, rates, m), Enumerated(p, rates, m - 1)
    np.testing.assert_allclose(network.mean_tasks, floats(all_tasks.means()), rtol=SMALL)
    np.testing.assert_allclose(network.relative_delay, floats(others.means()), rtol=SMALL)
    np.testing.assert_allclose(network.throughput, float(others.constant / all_tasks.constant), rtol=SMALL)
    busy = [float(all_tasks.mean(lambda x, i=i: x[i] > 0)) for i in range(len(p))]
    np.testing.assert_allclose(network.utilisation, busy, rtol=SMALL)


@given(networks())
def test_covariance_equals_the_sum_over_all_states(case):
    p, rates, m = case
    network = ClosedNetwork(p, rates, m)
    exact = floats(Enumerated(p, rates, m - 1).covariance()).reshape(len(p), len(p))
    # E[xx'] - E[x]E[x'] with both up to m².
    np.testing.assert_allclose(network.covariance, exact, rtol=0, atol=SMALL * m**2)
    np.testing.assert_allclose(network.variance, exact.diagonal(), rtol=0, atol=SMALL * m**2)


@given(networks(), st.integers(0, 3))
def test_distribution_equals_the_sum_over_all_states(case, client):
    p, rates, m = case
    network, client = ClosedNetwork(p, rates, m), client % len(p)
    exact = floats(Enumerated(p, rates, m).distribution(client))
    np.testing.assert_allclose(network.distribution(client), exact, rtol=SMALL)
    others = floats(Enumerated(p, rates, m - 1).distribution(client))
    np.testing.assert_allclose(network.distribution(client, others=True), others, rtol=SMALL)


@pytest.mark.parametrize(
    ("p", "rates", "m"),
    [([0.2, 0.3, 0.5], [1.0, 3.0, 2.0], 4), ([0.6, 0.4], [1.0, 1.0], 6), ([0.25] * 4, [4.0, 1.0, 1.0, 2.0], 3)],
)
def test_relative_delay_is_the_mean_number_of_rounds_of_a_tagged_task(p, rates, m):
    # The linear system has a condition number of some hundreds.
    np.testing.assert_allclose(ClosedNetwork(p, rates, m).relative_delay, tagged_delay(p, rates, m), rtol=1e-12)


def test_the_second_moment_corrects_the_printed_formula():
    p, rates, m = [0.3, 0.7], [1.0, 1.0], 4
    exact = Enumerated(p, rates, m - 1)
    z = [float(Enumerated(p, rates, k).constant) for k in range(m)]
    pairs = [(k, j) for k in range(1, m) for j in range(1, m) if k + j < m]
    printed = sum(p[0] ** (k + j) * z[m - 1 - k - j] for k, j in pairs) / z[m - 1]
    second = float(exact.mean(lambda x: x[0] ** 2))
    ours = ClosedNetwork(p, rates, m)
    assert ours.variance[0] + ours.relative_delay[0] ** 2 == pytest.approx(second, rel=1e-14, abs=0)
    assert abs(printed / second - 1) > 0.3


@pytest.fixture(scope="module", params=["spread", "near ties"])
def large(request):
    """n = 1000, m = 5000, or 300 clients that are nearly alike, and the same to 60 digits."""
    rng = np.random.default_rng(7)
    spread = request.param == "spread"
    loads = np.exp(rng.normal(size=1000)) if spread else 1 - 1e-3 * rng.random(300)
    loads[5] = loads[6]
    loads /= loads.max()
    return loads, Digits(loads, 5000)


def test_a_thousand_clients_and_five_thousand_tasks_agree_with_sixty_digits(large):
    loads, digits = large
    p = loads / loads.sum()
    network = ClosedNetwork(p, np.ones(len(p)), 5000)
    order = np.argsort(loads)
    # p was rounded again, and the bottleneck's queue multiplies that by up to Var/L.
    assert network.throughput / loads.sum() == pytest.approx(float(digits.throughput), rel=1e-14, abs=0)
    some = [0, 5, *order[[0, 1, 150, 151, -2, -1]]]
    np.testing.assert_allclose(
        step(mean_values(loads), 5000)[1][some], [float(digits.mean(i)) for i in some], rtol=1e-14
    )


def test_large_covariances_agree_with_sixty_digits(large):
    loads, digits = large
    o = np.argsort(loads)
    pairs = [(5, 6), (0, 5), (o[-1], o[-2]), (o[0], o[1]), (o[0], o[-1]), (o[150], o[151]), (o[3], o[250])]
    pairs += [(i, i) for i in (0, 5, o[-1], o[-2], o[0])]
    matrix, diagonal = covariance(loads, 5000), variance(loads, 5000)
    for i, j in pairs:
        exact = float(digits.covariance(i, j))
        size = np.sqrt(diagonal[i] * diagonal[j])
        # The bottleneck holds L = 5000 tasks with a variance of about 100: L² ε is 5e-11 of it at worst.
        assert abs(matrix[i, j] - exact) <= 4e-12 * size
        if i == j:
            assert diagonal[i] == pytest.approx(exact, rel=4e-12, abs=0)


@pytest.mark.parametrize("tasks", [3, 300, 3000])
def test_small_covariances_have_their_sign_and_an_absolute_error(tasks):
    # Idle clients beside a bottleneck: their covariances are far below the product of their means.
    loads = np.array([1.0, 1e-3, 1e-3, 2e-3, 3e-3, 4e-3])
    matrix, digits, means = covariance(loads, tasks), Digits(loads, tasks), step(mean_values(loads), tasks)[1]
    for i in range(1, 6):
        for j in range(1, i):
            assert matrix[i, j] <= 0
            slack = 4 * np.finfo(float).eps * tasks * means[i] * means[j]
            assert abs(matrix[i, j] - float(digits.covariance(i, j))) <= slack


@pytest.mark.parametrize("gap", [0.0, 1e-15, 1e-13, 1e-12, 1e-10, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1])
@pytest.mark.parametrize("tasks", [7, 400])
def test_nearly_equal_loads_do_not_lose_digits(gap, tasks):
    loads = np.array([1.0, 1 - gap, 1 - 2 * gap, 0.5, 0.5 * (1 - gap)])
    matrix, digits = covariance(loads, tasks), Digits(loads, tasks)
    size = np.sqrt(matrix.diagonal())
    for i in range(5):
        for j in range(5):
            # Whatever the gap: nothing is divided by it.
            assert abs(matrix[i, j] - float(digits.covariance(i, j))) <= 1e-15 * tasks * size[i] * size[j]


@given(seeds, st.floats(-4, 1))
def test_proportional_routing_has_equal_queues_and_a_closed_form(seed, exponent):
    rng = np.random.default_rng(seed)
    rates, m = 10.0**exponent * np.exp(rng.normal(size=rng.integers(1, 30))), int(rng.integers(1, 300))
    n, network = len(rates), ClosedNetwork(balanced(rates), rates, m)
    # p and ρ are rounded, and a queue of m/n tasks multiplies that by 1 + m/n.
    rtol = 16 * np.finfo(float).eps * (1 + m / n)
    np.testing.assert_allclose(network.relative_delay, (m - 1) / n, rtol=rtol)
    assert network.throughput == pytest.approx(rates.sum() * m / (m + n - 1), rel=rtol, abs=0)


@given(seeds)
def test_tasks_are_conserved(seed):
    p, rates, m = draw_network(seed)
    network = ClosedNetwork(p, rates, m)
    assert network.relative_delay.sum() == pytest.approx(m - 1, rel=1e-14, abs=0)
    assert network.mean_tasks.sum() == pytest.approx(m, rel=1e-14, abs=0)
    assert (p @ (1 / rates)) * network.throughput == pytest.approx(network.utilisation.sum(), rel=1e-14, abs=0)
    # Sums of n terms of the size of a variance.
    assert np.abs(network.covariance.sum(axis=1)).max() <= 1e-14 * network.variance.max() * len(p)
    np.testing.assert_array_equal(network.covariance, network.covariance.T)
    np.testing.assert_allclose(network.covariance.diagonal(), network.variance, rtol=1e-12 * m, atol=1e-300)


@given(seeds)
def test_covariances_of_clients_are_not_positive_and_the_matrix_is_semidefinite(seed):
    network = ClosedNetwork(*draw_network(seed))
    matrix = network.covariance - np.diag(network.covariance.diagonal())
    assert matrix.max() <= 0
    assert np.linalg.eigvalsh(network.covariance).min() >= -1e-13 * network.variance.max()


@given(seeds)
def test_throughput_and_queues_increase_with_the_concurrency(seed):
    p, rates, m = draw_network(seed)
    few, more = ClosedNetwork(p, rates, m), ClosedNetwork(p, rates, m + 1)
    assert few.throughput <= more.throughput * (1 + 1e-14)
    assert more.throughput <= (1 + 1e-14) / np.max(p / rates)
    assert (few.mean_tasks <= more.mean_tasks * (1 + 1e-13)).all()
    np.testing.assert_array_equal(few.mean_tasks, more.relative_delay)


@given(seeds, st.integers(-40, 40))
def test_permutations_of_clients_and_units_of_time_are_equivariant(seed, exponent):
    p, rates, m = draw_network(seed)
    one, slow = ClosedNetwork(p, rates, m), ClosedNetwork(p, rates * 2.0**exponent, m)
    # Powers of two round nothing.
    assert slow.throughput == one.throughput * 2.0**exponent
    np.testing.assert_array_equal(slow.relative_delay, one.relative_delay)
    np.testing.assert_array_equal(slow.covariance, one.covariance)
    order = np.random.default_rng(seed).permutation(len(p))
    other = ClosedNetwork(p[order], rates[order], m)
    np.testing.assert_allclose(other.relative_delay, one.relative_delay[order], rtol=1e-13 * m)
    np.testing.assert_allclose(other.covariance, one.covariance[np.ix_(order, order)], rtol=0, atol=1e-14 * m**2)


@given(seeds)
def test_the_derivative_of_the_delay_is_the_covariance(seed):
    p, rates, m = draw_network(seed, clients=6, tasks=20)
    network, h = ClosedNetwork(p, rates, m), 1e-4
    for j in range(len(p)):
        sides = []
        for sign in (1, -1):
            q = p * np.exp(sign * h * np.eye(len(p))[j])
            sides.append(ClosedNetwork(q / q.sum(), rates, m).relative_delay)
        slope = (sides[0] - sides[1]) / (2 * h)
        # h²/6 times a third cumulant, which is at most m³, and rounding m ε / h.
        np.testing.assert_allclose(slope, network.covariance[:, j], rtol=0, atol=h**2 * m**3 / 6 + 1e-11 * m)


@given(seeds)
def test_directional_mean_values_equal_the_covariance_times_the_direction(seed):
    p, rates, m = draw_network(seed)
    direction = np.random.default_rng(seed).normal(size=len(p))
    loads = p / rates / np.max(p / rates)
    moved = step(directional_mean_values(loads, direction), m)[2]
    matrix = covariance(loads, m)
    np.testing.assert_allclose(moved, matrix @ direction, rtol=0, atol=1e-14 * m * np.abs(matrix).max())


def test_tails_of_distributions_are_accurate():
    network = ClosedNetwork([0.5, 0.25, 0.25], [1.0, 4.0, 4.0], 400)
    tail = network.distribution(1)[300]
    digits = Digits([0.5, 0.0625, 0.0625], 400)
    rest = Digits([0.5, 0.0625], 400)
    exact = Decimal("0.0625") ** 300 * rest.z[100] / digits.z[400]
    assert 0 < tail < 1e-200
    # 300 factors are rounded.
    assert tail == pytest.approx(float(exact), rel=300 * 4e-16, abs=0)


def test_a_single_client_has_all_tasks_and_unused_clients_have_no_tasks():
    alone = ClosedNetwork([1.0], [3.0], 5)
    assert (alone.throughput, alone.mean_tasks.tolist(), alone.covariance.tolist()) == (3.0, [5.0], [[0.0]])
    assert alone.distribution(0).tolist() == [0, 0, 0, 0, 0, 1]
    unused, used = ClosedNetwork([0.5, 0.0, 0.5], [1.0, 2.0, 3.0], 5), ClosedNetwork([0.5, 0.5], [1.0, 3.0], 5)
    assert unused.relative_delay[[0, 2]].tolist() == used.relative_delay.tolist()
    assert unused.relative_delay[1] == 0
    assert not unused.covariance[1].any()
    np.testing.assert_allclose(unused.covariance[np.ix_([0, 2], [0, 2])], used.covariance, rtol=1e-14)
    assert unused.distribution(1).tolist() == [1, 0, 0, 0, 0, 0]
    assert unused.simulate(100, np.random.default_rng(0), "stationary").completions[1] == 0


def test_extreme_rates_stay_finite():
    network = ClosedNetwork([0.5, 0.5], [1e300, 1e-300], 50)
    # The slow client has all, and is never idle.
    assert network.throughput == 2e-300
    assert network.mean_tasks.tolist() == [0.0, 50.0]
    assert np.isfinite(network.covariance).all()


def test_a_network_is_an_immutable_value():
    p = np.array([0.5, 0.5])
    network = ClosedNetwork(p, [1.0, 2.0], 3)
    p[0] = 0.9
    assert network.routing.tolist() == [0.5, 0.5]
    assert network == ClosedNetwork([0.5, 0.5], (1, 2), 3)
    assert network != ClosedNetwork([0.5, 0.5], [1.0, 2.0], 4)
    assert len({network, ClosedNetwork([0.5, 0.5], [1.0, 2.0], 3)}) == 1
    for twin in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert twin == network
        assert twin.throughput == network.throughput
    for array in (network.routing, network.relative_delay, network.mean_tasks, network.covariance, network.variance):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1.0


DOORS = [
    (([0.5, 0.6], [1, 1], 2), "routing: expected shares that sum to 1, got 1.1: 0.1 too much"),
    (([0.5, 0.4], [1, 1], 2), "routing: .* got 0.9: 0.1 too little"),
    (([0.5, 0.5 + 1e-5], [1, 1], 2), "1e-05 too much"),
    (([1.5, -0.5], [1, 1], 2), r"routing\[1\]: expected a share >= 0, got -0.5"),
    (([0.5, float("nan")], [1, 1], 2), r"routing\[1\]: expected a finite number, got nan"),
    (([1.0], [1, 1], 2), "routing: expected 2 entries"),
    (([[0.5, 0.5]], [1, 1], 2), "routing: expected a non-empty vector"),
    ((["a", "b"], [1, 1], 2), "routing: expected real numbers"),
    (([0.5, 0.5], [1, 0], 2), r"rates\[1\]: expected a positive number"),
    (([0.5, 0.5], [-1, 1], 2), r"rates\[0\]: expected a positive number"),
    (([0.5, 0.5], [1, float("inf")], 2), r"rates\[1\]: expected a finite number"),
    (([0.5, 0.5], [1, 1e-310], 2), r"rates\[1\]: expected a positive number"),
    (([0.5, 0.5], [], 2), "rates: expected a non-empty vector"),
    (([0.5, 0.5], None, 2), "rates: expected real numbers"),
    (([0.5, 0.5], [1, 1j], 2), "rates: expected real numbers"),
    (([0.5, 0.5], [True, True], 2), "rates: expected real numbers"),
    (([0.5, 0.5], [1, 1], 0), "concurrency: expected an integer >= 1, got 0"),
    (([0.5, 0.5], [1, 1], 2.5), "concurrency: expected an integer >= 1, got 2.5"),
    (([0.5, 0.5], [1, 1], float("nan")), "concurrency: expected an integer"),
]


@pytest.mark.parametrize(("arguments", "message"), DOORS)
def test_invalid_arguments_are_rejected_by_name(arguments, message, as_shipped):
    with pytest.raises(ArgumentError, match=message):
        ClosedNetwork(*arguments)


def test_invalid_arguments_of_methods_are_rejected(as_shipped):
    network = ClosedNetwork([0.5, 0.5], [1.0, 1.0], 2)
    for client in (-1, 2, 0.5):
        with pytest.raises(ArgumentError, match="client: expected"):
            network.distribution(client)
    with pytest.raises(ArgumentError, match="num_updates: expected"):
        network.simulate(0, np.random.default_rng(0))
    with pytest.raises(ArgumentError, match="start: expected one of cold, stationary"):
        network.simulate(1, np.random.default_rng(0), "warm")
    with pytest.raises(ArgumentError, match=r"generator: expected a numpy.random.Generator"):
        network.simulate(1, 7)
    with pytest.raises(ArgumentError, match="clients: expected"):
        uniform(0)


def test_routing_imports_only_numpy_and_scipy():
    allowed = {"numpy", "scipy", "matplotlib"}
    allowed |= {f"manifoldagg.{name}" for name in ("errors", "_validation", "_io", "_result_repr")}
    for path in Path(manifoldagg.routing.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                standard = name.split(".")[0] in {*__import__("sys").stdlib_module_names}
                ours = name.startswith("manifoldagg.routing")
                assert standard or ours or any(name == a or name.startswith(a + ".") for a in allowed), (path, name)
