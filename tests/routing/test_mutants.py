"""Deliberately wrong recursions: the comparisons with all states and with differences must catch each."""

import numpy as np
import pytest

from manifoldagg.routing import ClosedNetwork, TimeBound, UpdateBound
from tests.routing.exact import Enumerated, floats

P, RATES, TASKS = np.array([0.2, 0.5, 0.3]), np.array([1.0, 1.5, 4.0]), 5
CONSTANTS = {"rate": 0.1, "smoothness": 1.0, "noise": 2.0, "gap": 1.0}


def means_are_exact():
    network = ClosedNetwork(P, RATES, TASKS)
    one, two = Enumerated(P, RATES, TASKS), Enumerated(P, RATES, TASKS - 1)
    ours = np.array([*network.mean_tasks, *network.relative_delay, network.throughput])
    exact = [*floats(one.means()), *floats(two.means()), float(two.constant / one.constant)]
    return np.allclose(ours, exact, rtol=1e-12, atol=0)


def covariance_is_exact():
    network = ClosedNetwork(P, RATES, TASKS)
    return np.allclose(network.covariance, floats(Enumerated(P, RATES, TASKS - 1).covariance()), rtol=1e-12, atol=1e-13)


def gradients_are_slopes():
    for bound in (TimeBound(RATES, TASKS, **CONSTANTS), UpdateBound(RATES, TASKS, **CONSTANTS, num_updates=9)):
        for gradient, e in zip(bound.gradient(P), np.eye(3), strict=True):
            slope = (bound.unnormalised(P + 1e-5 * e) - bound.unnormalised(P - 1e-5 * e)) / 2e-5
            if abs(slope / gradient - 1) > 1e-6:
                return False
    return True


def recursion(work, share):
    """Means by another a_i and another λ_k."""

    def mean_values(loads):
        means, k = np.zeros_like(loads), 0
        while True:
            k += 1
            a = work(loads, means)
            rate = share(k) / a.sum()
            means = rate * a
            yield float(rate), means

    return mean_values


def sweep(project, carry):
    """Derivatives with another projection and another memory."""

    def directional_mean_values(loads, direction):
        means, moved, k = np.zeros_like(loads), np.zeros_like(loads), 0
        while True:
            k += 1
            a = loads * (1 + means)
            rate = k / a.sum()
            means = rate * a
            moved = direction * means + carry * rate * loads * moved
            moved = moved - project * means * moved.sum() / k
            yield float(rate), means, moved

    return directional_mean_values


def printed_diagonal(loads, tasks):
    """Queue (9) for all pairs."""
    z = np.zeros(tasks + 1)
    z[0] = 1
    for load in loads:
        for k in range(1, tasks + 1):
            z[k] += load * z[k - 1]
    means = np.array([sum(x**k * z[tasks - k] for k in range(1, tasks + 1)) for x in loads]) / z[tasks]
    pairs = [(k, j) for k in range(1, tasks + 1) for j in range(1, tasks + 1 - k)]
    second = [[sum(x**k * y**j * z[tasks - k - j] for k, j in pairs) / z[tasks] for y in loads] for x in loads]
    return np.array(second) - np.outer(means, means)


MEANS, SLOPES = "manifoldagg.routing.network.mean_values", "manifoldagg.routing.bounds.directional_mean_values"
MUTANTS = {
    "no arrival": (MEANS, recursion(lambda r, x: r * (1e-9 + x + (x.sum() == 0)), lambda k: k), means_are_exact),
    "two arrivals": (MEANS, recursion(lambda r, x: r * (2 + x), lambda k: k), means_are_exact),
    "a task too many": (MEANS, recursion(lambda r, x: r * (1 + x), lambda k: k + 1), means_are_exact),
    "squared loads": (MEANS, recursion(lambda r, x: r * r * (1 + x), lambda k: k), means_are_exact),
    "printed diagonal": ("manifoldagg.routing.network.covariance", printed_diagonal, covariance_is_exact),
    "no projection": (SLOPES, sweep(0, 1), gradients_are_slopes),
    "no memory": (SLOPES, sweep(1, 0), gradients_are_slopes),
}


@pytest.mark.parametrize("law", [means_are_exact, covariance_is_exact, gradients_are_slopes])
def test_the_library_satisfies_all_laws(law):
    assert law()


@pytest.mark.parametrize(
    ("place", "right", "law"),
    [
        (MEANS, recursion(lambda r, x: r * (1 + x), lambda k: k), means_are_exact),
        (SLOPES, sweep(1, 1), gradients_are_slopes),
    ],
)
def test_the_mutant_factories_also_make_correct_networks(place, right, law, monkeypatch):
    monkeypatch.setattr(place, right)
    assert law()


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name, monkeypatch, record_property):
    place, wrong, law = MUTANTS[name]
    monkeypatch.setattr(place, wrong)
    assert not law()
    record_property("caught", (f"routing: {name}", [law.__name__]))
