"""Tests of the stability limit of delayed steps, the suggested rates, and the warning above the limit."""

import math
import re
import warnings
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError, StabilityWarning
from manifoldagg.federated import AsyncAggregator, Payload, Server, stability_limit, suggest_rate
from manifoldagg.federated.rules import (
    ASGD,
    FADAS,
    AsyncKrylov,
    DeFedAvg,
    FedAdam,
    FedAsync,
    FedAvg,
    FedBuff,
    FedOrtho,
    Median,
    Momentum,
    OrthoFL,
    Private,
)
from manifoldagg.federated.staleness import Hinge, Polynomial
from manifoldagg.manifolds import Flat

pytestmark = pytest.mark.usefixtures("as_shipped")


def growth_of_second_moments(rho, m, k):
    """Return the spectral radius of E[z zᵀ] → E[M z zᵀ Mᵀ] for z = (x, b₁, …, b_m).

    The function enumerates all sets of k clients.
    """
    total = np.zeros(((m + 1) ** 2,) * 2)
    chosen_sets = list(combinations(range(1, m + 1), k))
    for chosen in chosen_sets:
        step = np.eye(m + 1)
        step[0, list(chosen)] -= rho / k
        for i in chosen:
            step[i] = step[0]
        total += np.kron(step, step) / len(chosen_sets)
    return max(abs(np.linalg.eigvals(total)))


@pytest.mark.parametrize(("m", "k"), [(m, k) for m in range(1, 6) for k in range(1, m + 1)])
def test_second_moments_shrink_below_the_limit_and_grow_above_it(m, k):
    limit = stability_limit(m, k)
    assert growth_of_second_moments(0.99 * limit, m, k) < 1 < growth_of_second_moments(1.01 * limit, m, k)


@given(st.integers(1, 10**6))
def test_the_limit_of_single_updates_is_the_root_of_a_quadratic(m):
    rho = stability_limit(m)
    assert m * rho**2 == pytest.approx(rho + 2, rel=1e-12)


@given(st.integers(1, 300), st.integers(1, 300))
def test_the_limit_falls_with_the_concurrency_and_rises_with_the_buffer(m, k):
    assert stability_limit(m + 1, k) <= stability_limit(m, k) or k > 1
    assert stability_limit(m, m + k) == stability_limit(m, m) == 2.0
    assert stability_limit(m, 1) <= stability_limit(m, min(k, m)) * (1 + 1e-12)


def growth_in_fixed_order(rho, m):
    """Return the spectral radius of x' = x - ρ x_{t-m+1}."""
    step = np.eye(m, k=-1)
    step[0, 0] += 1
    step[0, m - 1] -= rho
    return max(abs(np.linalg.eigvals(step)))


@pytest.mark.parametrize("m", [1, 2, 3, 5, 10, 40])
def test_the_limit_for_a_fixed_order_is_the_published_one(m):
    limit = 2 * math.sin(math.pi / (2 * (2 * m - 1)))
    assert growth_in_fixed_order(0.99 * limit, m) < 1 < growth_in_fixed_order(1.01 * limit, m)
    assert math.pi / (2 * m) < limit <= stability_limit(m) * (1 + 1e-12)


@given(st.integers(1, 10**6))
def test_a_suggested_step_is_within_two_thirds_of_the_limit_for_a_fixed_order(m):
    rho = suggest_rate(ASGD(), num_clients=m, concurrency=m) / m
    assert rho == pytest.approx(1 / (m + 1))
    assert rho <= 2 / 3 * 2 * math.sin(math.pi / (2 * (2 * m - 1)))
    assert rho <= stability_limit(m) / 3.8


@given(st.integers(1, 1000), st.integers(1, 1000))
def test_a_suggested_step_on_a_buffer_is_stable_in_a_fixed_order(m, k):
    rho = suggest_rate(FedBuff(k), num_clients=m, concurrency=m)
    versions_in_flight = math.ceil(m / k)
    assert rho <= 2 * math.sin(math.pi / (2 * (2 * versions_in_flight - 1))) * (1 + 1e-12)
    assert rho <= stability_limit(m, k)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (FedOrtho(), 30 / 10),
        (AsyncKrylov(), 30 / 10),
        (FedAsync(), 1 / 10),
        (FedAsync(weighted=True), 30 / 10),
        (FedAsync(staleness=Polynomial(0.5)), 3 / 10),  # the weight of a staleness of 8 is 1/3
        (FedAsync(staleness=lambda staleness: 0.0), 1.0),
        (FedAsync(staleness=Hinge(a=1e9, b=0.0), weighted=True), 30.0),
        (OrthoFL(), 3 / 10),
        (FedBuff(3), 3 / 9),
        (FedBuff(20), 1.0),
        (Median(3), 3 / 9),
        (FedAvg(9), 1.0),
        (DeFedAvg(3), 3 / 9),
        (Private(FedBuff(3), clip=1.0, noise=0.1, seed=0), 3 / 9),
        (Momentum(FedOrtho(), beta=0.5), 15 / 10),
    ],
    ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", str(value)),  # pytest-xdist needs the same ids in every process
)
def test_suggested_rates_by_family(rule, expected):
    assert suggest_rate(rule, num_clients=30, concurrency=9) == pytest.approx(expected)


@pytest.mark.parametrize("rule", [FedAdam(3), FADAS(3)])
def test_a_rate_of_another_unit_is_not_suggested(rule):
    name = type(rule).__name__
    with pytest.raises(ArgumentError) as caught:
        suggest_rate(rule, 10, 5)
    assert str(caught.value) == (
        "rule: expected a rule whose rate is a multiple of an update (rate_kind 'share', 'step', 'mean' or 'latest'), got "
        f"{name}; search its rate with `manifoldagg compare --tune`"
    )


def test_impossible_numbers_are_rejected():
    with pytest.raises(ArgumentError, match=r"^concurrency: expected at most num_clients=3, got 4$"):
        suggest_rate(ASGD(), 3, 4)
    with pytest.raises(ArgumentError, match="^num_clients: "):
        suggest_rate(ASGD(), 0, 1)
    with pytest.raises(ArgumentError, match="^concurrency: "):
        stability_limit(0)
    with pytest.raises(ArgumentError, match="^buffer_size: "):
        stability_limit(3, buffer_size=0)


def train_quadratic(rule, m, steps, seed, answer):
    """Run a server whose clients train to the minimum 0 and return in random order. Return |x| after each step."""
    server = Server(Flat(1), rule, torch.ones(1, dtype=torch.float64), weights="uniform")
    order = np.random.default_rng(seed)
    tickets = [server.dispatch(client) for client in range(m)]
    sizes = []
    for step in range(steps):
        i = int(order.integers(m)) if answer == "random" else step % m
        server.receive(tickets[i].id, Payload(torch.zeros(1, 1, dtype=torch.float64), samples=1)).check()
        tickets[i] = server.dispatch(i)
        sizes.append(abs(server.model.item()))
    return sizes


@pytest.mark.parametrize("answer", ["random", "in turn"])
@pytest.mark.parametrize("m", [1, 2, 5, 10])
def test_a_server_converges_at_the_suggested_rate(m, answer):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rule = ASGD(suggest_rate(ASGD(), m, m))
        assert train_quadratic(rule, m, 60 * m, 0, answer)[-1] < 1e-4


@pytest.mark.parametrize("m", [3, 10])
def test_server_above_the_limit_diverges_and_warns_once(m):
    with pytest.warns(StabilityWarning, match="^rate: ") as caught:
        sizes = train_quadratic(ASGD(1.2 * m * stability_limit(m), overshoot="extend"), m, 40 * m, 0, "in turn")
    assert sizes[-1] > 1e3
    (warning,) = caught
    # The staleness grows from 0, so that the first step above the limit comes before all m clients have returned.
    step = 1.2 * stability_limit(m)
    first = next(k for k in range(1, m + 1) if step > stability_limit(k))
    assert str(warning.message) == (
        f"rate: ASGD takes a step of size {step:.3g}, above the stability limit of {stability_limit(first):.3g} at an "
        f"observed concurrency of {first}, so training may diverge; use a lower rate, such as {m / (m + 1):.3g}, or a lower "
        "concurrency"
    )


def test_rate_of_kind_share_and_lost_client_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_quadratic(FedAsync(1.0), 10, 50, 0, "random")
        # Nine of ten clients never return: their tickets are in flight, but no update is stale.
        server = Server(Flat(1), ASGD(10.0), torch.ones(1), weights="uniform")
        tickets = [server.dispatch(client) for client in range(10)]
        for _ in range(3):
            server.receive(tickets[0].id, Payload(torch.zeros(1, 1), samples=1)).check()
            tickets[0] = server.dispatch(0)
        # One late update: the other clients are idle, so that its staleness says nothing of the concurrency.
        for ticket in tickets[2:]:
            server.drop(ticket.id)
        server.receive(tickets[1].id, Payload(torch.zeros(1, 1), samples=1)).check()


@pytest.mark.parametrize("weights", ["observed", dict.fromkeys(range(1, 10), 10) | {0: 1000}])
def test_a_single_client_with_many_samples_does_not_warn(weights):
    """The step of this client is above the limit, but the step of an average client is not."""
    m = 10
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        server = Server(Flat(1), ASGD(0.4 * m, overshoot="extend"), torch.ones(1), weights=weights)
        tickets = [server.dispatch(client) for client in range(m)]
        sizes = []
        for i in [*range(1, m), 0] * 3:
            samples = 10 if i else 1000
            server.receive(tickets[i].id, Payload(torch.zeros(1, 1), samples=samples)).check()
            sizes.append(server.history[-1]["rate"])
            tickets[i] = server.dispatch(i)
    assert max(sizes) > 1 > stability_limit(m) > 0.4


def test_an_update_is_not_applied_if_the_warning_is_an_error():
    server = Server(Flat(1), ASGD(12.0), torch.ones(1), weights="uniform")
    tickets = [server.dispatch(client) for client in range(12)]
    warned = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for ticket in tickets:
            before = server.version
            try:
                server.receive(ticket.id, Payload(torch.zeros(1, 1), samples=1)).check()
            except StabilityWarning:
                warned += 1
                assert server.version == before
                assert ticket.id in server.tickets
    assert warned


def test_the_aggregator_warns_as_the_server_does():
    m = 5
    aggregator = AsyncAggregator(ASGD(m), [torch.ones(1)], weights="uniform")
    for client in range(m):
        aggregator.checkout(client)

    def submit(client):
        aggregator.submit(client, [torch.zeros(1)], samples=1)
        aggregator.checkout(client)

    for client in range(3):
        submit(client)
    with pytest.warns(
        StabilityWarning,
        match=r"^rate: ASGD takes a step of size 1, above the stability limit of 0\.843 at an observed concurrency of 4, so",
    ):
        submit(3)
    submit(4)


def test_several_tasks_of_a_client_lower_the_suggested_rate():
    server = Server(Flat(2), FedOrtho(0.5), torch.zeros(2))
    *early, late = [server.dispatch("a") for _ in range(30)][:11]
    for ticket in early:
        server.receive(ticket, Payload(torch.ones(1, 2), 1))
    # 20 tasks are in flight, so that the suggested rate is 1 / 21.
    with pytest.warns(StabilityWarning, match=r"use a lower rate, such as 0\.0476"):
        server.receive(late, Payload(torch.ones(1, 2), 1))
