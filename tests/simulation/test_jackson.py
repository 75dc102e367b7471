"""The closed network in time: its queues against enumerated laws, its order, its doors."""

import collections
import itertools
import math

import numpy as np
import pytest

from manifoldagg.errors import ArgumentError
from manifoldagg.simulation.jackson import JacksonNetwork


def states(clients, tasks):
    """All ways to place tasks at clients."""
    return [x for x in itertools.product(range(tasks + 1), repeat=clients) if sum(x) == tasks]


def stationary(routing, rates, tasks):
    """The exact law of the queues, by enumeration."""
    weights = {
        x: math.prod((p / r) ** k for p, r, k in zip(routing, rates, x, strict=True)) for x in states(len(rates), tasks)
    }
    total = sum(weights.values())
    return {x: weight / total for x, weight in weights.items()}


def left_behind(routing, rates, tasks, steps):
    """The exact law of what a finished task leaves behind, after `steps` tasks from a routed start."""
    law = collections.Counter({(0,) * len(rates): 1.0})
    add = lambda x, i, by: (*x[:i], x[i] + by, *x[i + 1 :])  # noqa: E731
    for _ in range(tasks):
        law = sum(
            (collections.Counter({add(x, i, 1): q * p for x, q in law.items()}) for i, p in enumerate(routing)),
            collections.Counter(),
        )
    for _ in range(steps):
        after = collections.Counter()
        for x, q in law.items():
            busy = sum(r for r, k in zip(rates, x, strict=True) if k)
            for i, rate in enumerate(rates):
                if x[i]:
                    after[add(x, i, -1)] += q * rate / busy
        law = collections.Counter()
        for x, q in after.items():
            for j, p in enumerate(routing):
                law[add(x, j, 1)] += q * p
    return after


NETWORKS = [((0.5, 0.5), (1.0, 3.0), 3), ((0.2, 0.3, 0.5), (1.0, 0.5, 2.0), 2), ((0.6, 0.1, 0.3), (1.0, 1.0, 1.0), 4)]


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(("routing", "rates", "tasks"), NETWORKS)
def test_queue_lengths_have_the_exact_and_the_stationary_distribution(routing, rates, tasks):
    runs, late, soon = 800, 40, 3
    counts = {soon: collections.Counter(), late: collections.Counter()}
    for seed in range(runs):
        network = JacksonNetwork(list(routing), list(rates), np.random.default_rng([tasks, seed]), concurrency=tasks)
        for _ in range(tasks):
            network.dispatch(network.route())
        for step in range(1, late + 1):
            network.next()
            if step in counts:
                counts[step][network.queue_lengths] += 1
            network.dispatch(network.route())
    laws = {step: left_behind(routing, rates, tasks, step) for step in counts}
    # A routed start is not the stationary one, but soon forgotten: what a task leaves behind has the law of m − 1 tasks.
    limit = stationary(routing, rates, tasks - 1)
    assert max(abs(laws[late][x] - q) for x, q in limit.items()) < 1e-4
    for step, law in laws.items():
        assert set(counts[step]) <= set(law)
        for x, q in law.items():
            # Runs are independent: six standard deviations of a binomial count, and a count is an integer.
            assert abs(counts[step][x] - runs * q) <= 6 * math.sqrt(runs * q * (1 - q)) + 1


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(("routing", "rates", "tasks"), NETWORKS)
def test_relative_delays_and_throughput_equal_the_stationary_means(routing, rates, tasks):
    """E[D_i] is the mean queue under m − 1 tasks; tasks finish at the rate of the busy clients under m."""
    runs, warm, length = 60, 40, 200
    delays, speeds = [], []
    for seed in range(runs):
        network = JacksonNetwork(list(routing), list(rates), np.random.default_rng([tasks, seed]), concurrency=tasks)
        for _ in range(tasks):
            network.dispatch(network.route())
        total = np.zeros(len(rates))
        for step in range(warm + length):
            if step == warm:
                begin = network.now
            done = network.next()
            if step >= warm:
                total[done.client] += done.relative_delay
            network.dispatch(network.route())
        delays.append(total / length)
        speeds.append((network.now - begin) / length)
    fewer, full = stationary(routing, rates, tasks - 1), stationary(routing, rates, tasks)
    expected = sum(q * np.array(x) for x, q in fewer.items())
    throughput = sum(q * sum(r for r, k in zip(rates, x, strict=True) if k) for x, q in full.items())
    # Six standard errors, from independent runs.
    assert (np.abs(np.mean(delays, 0) - expected) <= 6 * np.std(delays, 0, ddof=1) / math.sqrt(runs)).all()
    assert abs(np.mean(speeds) - 1 / throughput) <= 6 * np.std(speeds, ddof=1) / math.sqrt(runs)


def test_tasks_at_a_client_finish_in_order_of_arrival():
    network = JacksonNetwork([1.0, 0.0], [1.0, 1.0], np.random.default_rng(0), concurrency=4)
    for work in (1.0, 2.0, 3.0, 4.0):
        network.dispatch(network.route(), work)
    assert network.queue_lengths == (4, 0)
    done = [network.next() for _ in range(4)]
    assert [d.work for d in done] == [1.0, 2.0, 3.0, 4.0]
    assert [d.started for d in done[1:]] == [d.time for d in done[:-1]]


def test_routes_have_the_given_shares():
    network = JacksonNetwork([0.0, 0.25, 0.0, 0.75, 0.0], [1.0] * 5, np.random.default_rng(0), concurrency=1)
    count = 20_000
    times = np.bincount([network.route() for _ in range(count)], minlength=5)
    assert times[[0, 2, 4]].tolist() == [0, 0, 0]
    # Six standard deviations of a binomial count.
    assert abs(times[1] - count / 4) <= 6 * math.sqrt(count * 3 / 16)


def test_closed_network_rejects_additional_tasks():
    network = JacksonNetwork([1.0], [1.0], np.random.default_rng(0), concurrency=2)
    network.dispatch(0)
    network.dispatch(0)
    with pytest.raises(ArgumentError, match="expected fewer than concurrency = 2 tasks in flight"):
        network.dispatch(0)


GENERATOR = np.random.default_rng(0)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: JacksonNetwork([], [], GENERATOR, concurrency=1), "rates: expected a non-empty vector"),
        (
            lambda: JacksonNetwork(0.5, [1.0], GENERATOR, concurrency=1),
            r"routing: expected a non-empty vector, got shape \(\)",
        ),
        (lambda: JacksonNetwork([1.0], None, GENERATOR, concurrency=1), "rates: expected real numbers, got None"),
        (
            lambda: JacksonNetwork([1.0], np.ones((1, 1)), GENERATOR, concurrency=1),
            "rates: expected a non-empty vector",
        ),
        (lambda: JacksonNetwork([1.0], [0.0], GENERATOR, concurrency=1), r"rates\[0\]: expected"),
        (lambda: JacksonNetwork([1.0], [1.0, 1.0], GENERATOR, concurrency=1), "routing: expected 2 shares"),
        (lambda: JacksonNetwork([0.5, 0.6], [1.0, 1.0], GENERATOR, concurrency=1), "sum to 1, got 1.1: off by \\+0.1"),
        (lambda: JacksonNetwork([1.5, -0.5], [1.0, 1.0], GENERATOR, concurrency=1), r"routing\[1\]: expected"),
        (lambda: JacksonNetwork([1.0], [1.0], GENERATOR, concurrency=0), "concurrency: expected"),
        (
            lambda: JacksonNetwork([1.0], [1.0], GENERATOR, concurrency=1).dispatch(1),
            "client: expected one of 0 to 0, got 1",
        ),
        (
            lambda: JacksonNetwork([1.0], [1.0], GENERATOR, concurrency=1).dispatch("a"),
            "client: expected one of 0 to 0, got 'a'",
        ),
    ],
)
def test_invalid_input_is_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
