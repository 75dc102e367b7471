"""Tests of CA²FL against a transcription and a closed form, and of clients without a cached update."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Payload, Server, Update
from manifoldagg.federated.rules import FedBuff
from manifoldagg.federated.rules.ca2fl import CA2FL
from manifoldagg.federated.staleness import Constant
from manifoldagg.manifolds import Flat, ParameterSpace, Sphere
from tests.federated.random_clients import SIZE, SPACE, arrivals
from tests.support import draw, relative, seeds

pytestmark = pytest.mark.filterwarnings("ignore::manifoldagg.errors.StabilityWarning")

GOLDEN = {"CA2FL": CA2FL(2, rate=0.5, clients=2)}


def transcription(came, start, *, size, rate, clients, unknown):
    """Transcription of Wang et al. 2024 (ICLR), Algorithm 2. Return the model after each update."""
    x, cached, buffer, models = start, {}, [], []
    for client, delta in came:
        buffer.append((client, delta))
        if len(buffer) == size:
            zero = torch.zeros_like(start)
            if unknown == "mean":
                mean = sum(cached.values()) / len(cached) if cached else zero
                other = mean
            else:
                among = clients or len(cached.keys() | {i for i, _ in buffer})
                mean, other = sum(cached.values()) / among if cached else zero, zero
            v = mean + sum(d - cached.get(i, other) for i, d in buffer) / size
            x = x + rate * v
            for i, d in buffer:
                cached[i] = d
            buffer = []
        models.append(x)
    return models


OPTIONS = [(5, "zero"), (None, "zero"), (None, "mean")]


@pytest.mark.parametrize(("clients", "unknown"), OPTIONS)
@settings(max_examples=4)
@given(seeds, st.integers(1, 4), st.floats(0.1, 1.5))
def test_random_run_equals_transcription_of_the_paper(clients, unknown, seed, size, rate):
    came = arrivals(CA2FL(size, rate, clients=clients, unknown=unknown), seed)
    moves = [(event.client, event.point - event.base) for event in came]
    expected = transcription(moves, draw(seed, SIZE), size=size, rate=rate, clients=clients, unknown=unknown)
    for event, model in zip(came, expected, strict=True):
        # Forty sums of a few roundings each, of displacements of size 3.
        assert relative(event.model, model) <= 1e-13
    assert [e.receipt.buffered for e in came] == [(k + 1) % size > 0 for k in range(len(came))]


@settings(max_examples=6)
@given(seeds, st.integers(1, 5), st.sampled_from(OPTIONS[1:]))
def test_buffer_with_all_clients_gives_their_mean(seed, n, option):
    """h̄ equals the mean of the h_i, so they cancel. The step is that of FedBuff with a constant staleness weight."""
    rule, plain = CA2FL(n, 0.7, unknown=option[1]), FedBuff(n, 0.7, staleness=Constant())
    model, memory = draw(seed, SIZE), [None] * n
    state, other = rule.init(SPACE, model), plain.init(SPACE, model)
    for r in range(3):
        moves = draw(seed + r + 1, n, SIZE)
        for i in range(n):
            base = draw(seed + 7 * i + r, SIZE)
            given_ = Update(i, base, model, (base + moves[i])[None], client_state=memory[i])
            state, outcome = rule.step(SPACE, state, given_)
            other, theirs = plain.step(SPACE, other, given_)
            memory[i] = outcome.client_state
        assert relative(outcome.model - model, 0.7 * moves.mean(0)) <= 1e-13
        assert relative(outcome.model, theirs.model) <= 1e-14
        assert outcome.numbers["norm"] == pytest.approx((outcome.model - model).norm().item(), rel=1e-9)
        model = outcome.model


def alone(rule, *moves):
    """Return the movement of the model at each displacement, one after another."""
    model, memories, went = torch.zeros(SIZE).double(), {}, []
    state = rule.init(SPACE, model)
    for client, move in moves:
        update = Update(client, model, model, (model + move)[None], client_state=memories.get(client))
        state, outcome = rule.step(SPACE, state, update)
        memories[client] = outcome.client_state
        went.append(0 * model if outcome.model is None else outcome.model - model)
        model = model if outcome.model is None else outcome.model
    return went


def test_new_client_counts_once_if_the_mean_replaces_its_cache():
    d = draw(0, SIZE)
    paper, mean = (alone(CA2FL(1, unknown=u), *((i, d) for i in range(4))) for u in ("zero", "mean"))
    assert all(relative(step, d) <= 1e-14 for step in mean)
    assert all(relative(step, (1 + k / (k + 1)) * d) <= 1e-14 for k, step in enumerate(paper))


def test_updates_are_calibrated_with_caches_from_before_the_buffer():
    a, b, c = draw(1, 3, SIZE)
    went = alone(CA2FL(2), (0, a), (0, b), (0, c), (0, a))
    assert relative(went[1], (a + b) / 2) <= 1e-14
    # h = b, the last of the first buffer, for both of the second.
    assert relative(went[3], b + (c - b + a - b) / 2) <= 1e-14


def test_server_stores_one_vector_per_client():
    rule, model, memories = CA2FL(2), torch.zeros(SIZE), {}
    state = rule.init(SPACE, model)
    for k in range(12):
        update = Update(k % 3, model, model, draw(k, 1, SIZE, dtype=torch.float32), client_state=memories.get(k % 3))
        state, outcome = rule.step(SPACE, state, update)
        memories[k % 3] = outcome.client_state
        kept = [value for value in outcome.client_state.values() if isinstance(value, torch.Tensor)]
        assert [(tensor.numel(), tensor.dtype) for tensor in kept] == [(SIZE, torch.float32)]
        assert len(state["held"]) <= 1
    assert not {"buffer", "replaced"} & state.keys()


def test_stored_sum_equals_the_sum_of_the_caches():
    rule, model, memories = CA2FL(3), torch.zeros(SIZE).double(), {}
    state = rule.init(SPACE, model)
    clients = torch.randint(4, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    for k, client in enumerate(clients):
        update = Update(client, model, model, draw(k, 1, SIZE), client_state=memories.get(client))
        state, outcome = rule.step(SPACE, state, update)
        memories[client] = outcome.client_state
    assert relative(state["sum"], sum(memory["cache"] for memory in memories.values())) <= 1e-13
    assert state["cached"] == 4


def test_client_states_in_files_give_the_same_models():
    here, there = (arrivals(CA2FL(2), 3, **options) for options in ({}, {"memory_limit": 0}))
    assert all(torch.equal(a.model, b.model) for a, b in zip(here, there, strict=True))


def told(rule, dtype, *moves):
    """Return the reason of each receipt, for the displacements of several clients."""
    server, took = Server(Flat(1), rule, torch.zeros(1, dtype=dtype)), []
    for client, move in moves:
        ticket = server.dispatch(client)
        took.append(server.receive(ticket.id, Payload((ticket.message.start + move)[None], 1)).reason)
    return took


@pytest.mark.parametrize(("dtype", "far"), [(torch.float32, 3e38), (torch.float64, 1.7e308)])
@pytest.mark.parametrize("size", [1, 3])
def test_huge_update_does_not_cause_rejection_of_other_updates(dtype, far, size):
    reasons = told(CA2FL(size), dtype, ("a", far), ("b", far), *((i, 0.1) for i in range(4)))
    assert all(reason.startswith("points") for reason in reasons[:2])
    assert not any(reasons[2:])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_huge_update_is_replaced_by_the_next_update_of_its_client(size):
    rule, model, memories = CA2FL(size), torch.zeros(1), {}
    state = rule.init(Flat(1), model)
    for k in range(24):
        client = "abcb"[k % 4] if k < 12 else "abc"[k % 3]
        move = 1e10 if k == 5 else 0.1 + k
        update = Update(client, model, model, torch.tensor([[move]]), client_state=memories.get(client))
        state, outcome = rule.step(Flat(1), state, update)
        memories[client] = outcome.client_state
    # In float64, as the sum is: numbers of size 1e10 were added and taken away.
    assert state["sum"].item() == pytest.approx(sum(float(m["cache"]) for m in memories.values()), abs=1e-4)


def test_clients_above_the_expected_number_are_counted():
    step = torch.ones(SIZE).double()
    went = alone(CA2FL(1, clients=2), *((i, step) for _ in range(2) for i in range(5)))
    assert relative(went[-1], step) <= 1e-14


@pytest.mark.usefixtures("as_shipped")
def test_invalid_arguments_are_rejected_by_name():
    for options, words in (
        ({"size": 0}, "size"),
        ({"rate": 0.0}, "rate"),
        ({"clients": 0}, "clients"),
        ({"unknown": "one"}, "unknown"),
        ({"unknown": "mean", "clients": 3}, "clients"),
    ):
        with pytest.raises(ArgumentError, match=words):
            CA2FL(**options)
    rule, model = CA2FL(2), draw(0, SIZE)
    with pytest.raises(ArgumentError, match=r"points.*one model"):
        rule.step(SPACE, rule.init(SPACE, model), Update(0, model, model, draw(1, 2, SIZE)))
    curved = ParameterSpace.of_state_dict({"turn": torch.eye(3), "w": torch.zeros(2)}, {"turn": Sphere(3)})
    with pytest.raises(ArgumentError, match=r"CA2FL.*turn"):
        rule.init(curved, torch.zeros(11))
