"""ACE: a transcription of the algorithm, the rounding error of the running sum, stability, and mutants."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Payload, Server, Update, suggest_rate
from manifoldagg.federated.rules.ace import ACE
from manifoldagg.manifolds import Flat, ParameterSpace, Sphere
from tests.federated.mutants import Catalogue
from tests.federated.random_clients import SIZE, SPACE, arrivals
from tests.support import draw, relative, seeds

GOLDEN = {"ACE": ACE(0.5, clients=2)}
CATALOGUE = Catalogue({"ACE": ACE})
LAWS, MUTANTS, law, caught_by = CATALOGUE.laws, CATALOGUE.mutants, CATALOGUE.law, CATALOGUE.caught_by
A, B, C, D = draw(0, 4, SIZE)
ZERO = torch.zeros(SIZE).double()


def steps(rule, *moves, base=None):
    """Return the movement of the model at each displacement of a client."""
    model, memories, moved = ZERO, {}, []
    state = rule.init(SPACE, model)
    for client, move in moves:
        start = model if base is None else base
        update = Update(client, start, model, (start + move)[None], client_state=memories.get(client))
        state, outcome = rule.step(SPACE, state, update)
        memories[client] = outcome.client_state
        moved.append(outcome.model - model)
        model = outcome.model
    return moved


def sum_errors(rule, seed, updates=600, clients=7):
    """Return the errors of the running sum of one entry after each update, as multiples of 3 T M 2**-53."""
    generator = torch.Generator().manual_seed(seed)
    model, memories, largest, errors = torch.zeros(1), {}, 0.0, []
    state = rule.init(Flat(1), model)
    for k in range(updates):
        client = int(torch.randint(clients, (), generator=generator))
        # The sizes cover 12 orders of magnitude, so that float64 cannot represent the sums exactly.
        size = 10.0 ** (12 * torch.rand((), generator=generator, dtype=torch.float64) - 6)
        point = (size * torch.randn(1, 1, generator=generator, dtype=torch.float64)).float()
        state, outcome = rule.step(
            Flat(1), state, Update(client, model, model, point, client_state=memories.get(client))
        )
        memories[client] = outcome.client_state
        latest = [memory["latest"].item() for memory in memories.values()]
        largest = max(largest, math.fsum(map(abs, latest)))
        errors.append(abs(state["sum"].item() - math.fsum(latest)) / (3 * (k + 1) * largest * 2**-53))
    return errors


@law
def the_model_moves_by_the_mean_of_the_latest_displacements(k):
    moved = steps(k.ACE(0.5, clients=2), (0, A), (1, B), (0, C), (0, D))
    for step, mean in zip(moved, (A / 2, (A + B) / 2, (C + B) / 2, (D + B) / 2), strict=True):
        assert relative(step, 0.5 * mean) <= 1e-13


@law
def a_client_without_an_update_counts_as_zero(k):
    for count, step in enumerate(steps(k.ACE(clients=4), *((i, A) for i in range(4))), start=1):
        assert relative(step, count / 4 * A) <= 1e-13


@law
def without_a_number_the_clients_with_an_update_count(k):
    moved = steps(k.ACE(), (0, A), (1, B), (2, C), (0, D), (1, D))
    means = (A, (A + B) / 2, (A + B + C) / 3, (D + B + C) / 3, (D + D + C) / 3)
    for step, mean in zip(moved, means, strict=True):
        assert relative(step, mean) <= 1e-13


@law
def displacements_are_from_the_base_of_the_client(k):
    assert relative(steps(k.ACE(), (0, A), base=3 * D)[0], A) <= 1e-13


@law
def the_sum_is_within_its_rounding_bound(k):
    assert max(sum_errors(k.ACE(), 0)) <= 1


@caught_by("ACE", "the_model_moves_by_the_mean_of_the_latest_displacements", "the_sum_is_within_its_rounding_bound")
class ACEAddsEveryUpdate(ACE):
    def step(self, space, state, update, *, out=None):
        memory = update.client_state and {"latest": 0 * update.client_state["latest"]}
        return super().step(space, state, replace(update, client_state=memory), out=out)


@caught_by(
    "ACE",
    "the_model_moves_by_the_mean_of_the_latest_displacements",
    "a_client_without_an_update_counts_as_zero",
    "without_a_number_the_clients_with_an_update_count",
    "the_sum_is_within_its_rounding_bound",
)
class ACEForgetsOtherClients(ACE):
    def step(self, space, state, update, *, out=None):
        after, outcome = super().step(space, {k: v for k, v in state.items() if k != "sum"}, update, out=out)
        return after, outcome


@caught_by(
    "ACE",
    "the_model_moves_by_the_mean_of_the_latest_displacements",
    "a_client_without_an_update_counts_as_zero",
)
class ACECountsOnlyClientsWithAnUpdate(ACE):
    def _num_clients(self, cached):
        return cached


@caught_by("ACE", "without_a_number_the_clients_with_an_update_count")
class ACECountsUpdates(ACE):
    def step(self, space, state, update, *, out=None):
        after, outcome = super().step(space, state, update, out=out)
        return after | {"cached": state["cached"] + 1}, outcome


@caught_by("ACE", "displacements_are_from_the_base_of_the_client")
class ACEFromTheCurrentModel(ACE):
    def step(self, space, state, update, *, out=None):
        return super().step(space, state, replace(update, base=update.current), out=out)


@caught_by("ACE", "the_sum_is_within_its_rounding_bound")
class ACESumsInSinglePrecision(ACE):
    def step(self, space, state, update, *, out=None):
        after, outcome = super().step(space, state, update, out=out)
        if outcome.model.dtype == torch.float64:
            return after, outcome
        return after | {"sum": after["sum"].float().double()}, outcome


test_every_law_holds, test_every_mutant_is_caught_by_its_laws = CATALOGUE.tests()


@pytest.mark.parametrize("clients", [None, 5])
@settings(max_examples=5)
@given(seed=seeds, rate=st.floats(0.1, 1.5))
def test_a_server_agrees_with_a_transcription_of_the_algorithm(clients, seed, rate):
    model, latest = draw(seed, SIZE), {}
    for event in arrivals(ACE(rate, clients=clients), seed):
        latest[event.client] = event.point - event.base
        model = model + rate / (clients or len(latest)) * sum(latest.values())
        # Forty sums of a few roundings each, of displacements of size 3.
        assert relative(event.model, model) <= 1e-13
        model = event.model


@settings(max_examples=3)
@given(seed=seeds)
def test_the_rounding_error_of_the_sum_is_below_the_documented_bound(seed):
    errors = sum_errors(ACE(), seed)
    assert max(errors) <= 1
    assert max(errors) > 0


def test_stored_displacements_may_be_in_files():
    in_memory, on_disk = (arrivals(ACE(0.5), 3, **options) for options in ({}, {"memory_limit": 0}))
    assert all(torch.equal(a.model, b.model) for a, b in zip(in_memory, on_disk, strict=True))


def test_the_server_stores_one_vector_for_each_client():
    rule, model, memories = ACE(), torch.zeros(SIZE), {}
    state = rule.init(SPACE, model)
    for k in range(6):
        update = Update(k % 3, model, model, draw(k, 1, SIZE, dtype=torch.float32), client_state=memories.get(k % 3))
        state, outcome = rule.step(SPACE, state, update)
        memories[k % 3] = outcome.client_state
        assert [(x.numel(), x.dtype) for x in outcome.client_state.values()] == [(SIZE, torch.float32)]
    assert state.keys() == {"version", "cached", "sum"}


@pytest.mark.parametrize(("dtype", "far"), [(torch.float32, 3e38), (torch.float64, 1.7e308)])
def test_a_displacement_whose_square_overflows_is_rejected(dtype, far):
    server = Server(Flat(1), ACE(), torch.zeros(1, dtype=dtype))
    reasons = []
    for client, move in (("a", far), ("b", 0.1), ("a", 0.1)):
        ticket = server.dispatch(client)
        reasons.append(server.receive(ticket.id, Payload((ticket.message.start + move)[None], 1)).reason)
    assert reasons[0].startswith("points")
    assert reasons[1:] == ["", ""]


def growth_in_fixed_order(rho, n):
    """Return the growth factor of x' = x - (rho / n) * sum of the n bases of ages n - 1 to 2 n - 2."""
    step = np.eye(2 * n - 1, k=-1)
    step[0, 0] += 1
    step[0, n - 1 :] -= rho / n
    return max(abs(np.linalg.eigvals(step)))


def growth_in_random_order(rho, n):
    """Return the growth factor of the second moments of x, the n bases in flight and the n latest displacements."""
    size = 2 * n + 1
    total = np.zeros((size**2,) * 2)
    for i in range(n):
        step = np.eye(size)
        step[1 + n + i] = -np.eye(size)[1 + i]
        step[0] += rho / n * step[1 + n :].sum(0)
        step[1 + i] = step[0]
        total += np.kron(step, step) / n
    return max(abs(np.linalg.eigvals(total)))


@pytest.mark.parametrize("n", [5, 10, 30])
def test_the_suggested_rate_is_half_of_the_documented_limit_in_fixed_order(n):
    rate = suggest_rate(ACE(), num_clients=n, concurrency=n)
    assert rate == 1 / (2 * n)
    assert growth_in_fixed_order(2 * rate, n) < 1 < growth_in_fixed_order(3.1 * rate, n)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_suggested_rate_is_a_quarter_of_the_documented_limit_in_random_order(n):
    rate = suggest_rate(ACE(), num_clients=n, concurrency=n)
    assert growth_in_random_order(rate, n) < 1
    # The limit is above 2 / N for few clients.
    assert growth_in_random_order(4 * rate, n) < 1 < growth_in_random_order(8 * rate, n)


@pytest.mark.usefixtures("as_shipped")
def test_invalid_options_and_points_are_rejected():
    for options, name in (({"rate": 0.0}, "rate"), ({"clients": 0}, "clients")):
        with pytest.raises(ArgumentError, match=name):
            ACE(**options)
    model = draw(0, SIZE)
    with pytest.raises(ArgumentError, match=r"points.*one model"):
        ACE().step(SPACE, ACE().init(SPACE, model), Update(0, model, model, draw(1, 2, SIZE)))
    curved = ParameterSpace.of_state_dict({"turn": torch.eye(3), "w": torch.zeros(2)}, {"turn": Sphere(3)})
    with pytest.raises(ArgumentError, match=r"ACE.*turn"):
        ACE().init(curved, torch.zeros(11))
