"""Monte-Carlo against the exact values, from both starts."""

import numpy as np
import pytest

from manifoldagg.routing import ClosedNetwork
from manifoldagg.routing.simulate import sample_stationary
from tests.routing.exact import Enumerated

P, RATES, TASKS = [0.2, 0.5, 0.3], [1.0, 1.5, 4.0], 6


def runs(network, start, rounds, count):
    return [network.simulate(rounds, np.random.default_rng([7, k]), start) for k in range(count)]


def within_error(samples, exact):
    """Whether the mean of independent samples is less than 4.5 standard errors (of some 20 samples) away."""
    samples = np.array(samples)
    error = samples.std(axis=0, ddof=1) / np.sqrt(len(samples))
    return (np.abs(samples.mean(axis=0) - exact) <= 4.5 * error).all()


def test_a_stationary_start_is_unbiased_over_few_rounds():
    network = ClosedNetwork(P, RATES, TASKS)
    samples = runs(network, "stationary", 20, 600)
    assert within_error([run.others for run in samples], network.relative_delay)
    assert within_error([run.time / 20 for run in samples], 1 / network.throughput)
    assert within_error([run.completions / 20 for run in samples], P)
    # E of tasks times duration over E of the duration.
    assert within_error([(run.mean_tasks - network.mean_tasks) * run.time for run in samples], 0)


def test_a_cold_start_is_biased_over_few_rounds():
    network = ClosedNetwork(P, RATES, 40)
    samples = runs(network, "cold", 10, 300)
    assert not within_error([run.others for run in samples], network.relative_delay)


@pytest.mark.parametrize("start", ["cold", "stationary"])
def test_long_runs_agree_with_theory(start):
    network = ClosedNetwork(P, RATES, TASKS)
    samples = runs(network, start, 5000, 24)
    # Start and end weigh m/5000, the error of 24 runs about 1/400.
    assert within_error([run.throughput for run in samples], network.throughput)
    assert within_error([run.mean_tasks for run in samples], network.mean_tasks)
    assert within_error([run.relative_delay for run in samples], network.relative_delay)


def test_measured_delays_and_queues_have_equal_sums():
    run = ClosedNetwork(P, RATES, TASKS).simulate(20000, np.random.default_rng(3), "cold")
    # Tasks of the start and of the end: each at most its delay of some ten rounds.
    np.testing.assert_allclose(run.relative_delay, run.others, atol=TASKS * 100 / 20000)
    assert run.others.sum() == pytest.approx(TASKS - 1, rel=1e-12, abs=0)
    assert run.mean_tasks.sum() == pytest.approx(TASKS, rel=1e-12, abs=0)
    assert run.completions.sum() == run.num_updates == 20000


@pytest.mark.parametrize("rates", [[1.0, 1.5, 4.0], [2.0, 5.0, 3.0], [50.0, 1.0, 2.0]])
def test_stationary_states_have_the_exact_distribution(rates):
    tasks, count = 4, 6000
    exact = Enumerated(P, rates, tasks)
    utilisation = ClosedNetwork(P, rates, tasks).utilisation
    generator = np.random.default_rng(11)
    seen = {}
    for _ in range(count):
        x = tuple(sample_stationary(utilisation, tasks, generator).tolist())
        seen[x] = seen.get(x, 0) + 1
    assert set(seen) <= set(exact.law)
    # Rare states together; χ² with k degrees of freedom is below k + 4.5 √(2k) + 10 but for one in 10⁵.
    common = [x for x, w in exact.law.items() if w * count >= 10]
    expected = np.array([float(exact.law[x]) for x in common] + [0.0]) * count
    observed = np.array([seen.get(x, 0) for x in common] + [0.0])
    expected[-1], observed[-1] = count - expected.sum(), count - observed.sum()
    keep = expected > 0.5
    chi, k = ((observed - expected)[keep] ** 2 / expected[keep]).sum(), len(common)
    assert chi < k + 4.5 * np.sqrt(2 * k) + 10


def test_equal_generators_give_equal_runs():
    network = ClosedNetwork(P, RATES, TASKS)
    one, two = (network.simulate(500, np.random.default_rng(5), "stationary") for _ in range(2))
    assert one.time == two.time
    np.testing.assert_array_equal(one.mean_tasks, two.mean_tasks)


def test_a_single_task_has_no_delay():
    run = ClosedNetwork(P, RATES, 1).simulate(200, np.random.default_rng(0), "stationary")
    assert not run.relative_delay.any()
    assert not run.others.any()
