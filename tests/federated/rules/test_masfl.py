r"""Tests of MasFL and its trainer: the paper's algorithm, the mean of control variates, and no bias under delays.

The clients have different losses $f_i = \tfrac12 (x - a_i)^\top H_i (x - a_i)$. Averages of local models therefore do
not converge to the joint minimiser $(\sum H_i)^{-1} \sum H_i a_i$.
"""

import math
from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError, DivergenceError
from manifoldagg.federated import Message, Payload, Server
from manifoldagg.federated.clients.masfl import ControlVariate
from manifoldagg.federated.rules.fedavg import FedAvg
from manifoldagg.federated.rules.masfl import MasFL
from manifoldagg.manifolds import Flat, Sphere
from tests.support import draw, relative, rotation, seeds

pytestmark = pytest.mark.usefixtures("as_shipped")

GOLDEN = {"MasFL": MasFL(2)}

D, CLIENTS = 4, 9
SPACE = Flat(D)


def hessian(i):
    q = rotation(i, D)
    return q @ torch.diag(torch.linspace(1.0, 1.5 + (i % 3) / 2, D, dtype=torch.float64)) @ q.T


PROBLEMS = [(hessian(i), 3 * draw(50 + i, D)) for i in range(CLIENTS)]
JOINT = torch.linalg.solve(sum(h for h, _ in PROBLEMS), sum(h @ a for h, a in PROBLEMS))


class Batches(list):
    samples = 1


def loss(theta, batch):
    h, a = batch
    return 0.5 * (theta - a) @ h @ (theta - a)


def train_and_send(server, trainer, ticket, client):
    batches = Batches([PROBLEMS[client]])
    payload = trainer.train(SPACE, ticket.message, loss, batches, None, generator=torch.Generator())
    receipt = server.receive(ticket.id, payload)
    assert receipt.accepted, receipt.reason
    return receipt


def rounds(server, trainer, delay, count, after=None):
    """Run cohorts in turn.

    While one cohort returns, `delay` further cohorts are in flight, so the staleness equals the delay.
    """
    order, size = (
        np.random.default_rng(delay),
        server.rule.cohort if isinstance(server.rule, FedAvg) else server.rule.size,
    )
    idle, away, stale = deque(order.permutation(CLIENTS).tolist()), deque(), set()
    for _ in range(count):
        while len(away) < size * (delay + 1):
            client = idle.popleft()
            away.append((client, server.dispatch(client)))
        for _ in range(size):
            client, ticket = away.popleft()
            stale.add(train_and_send(server, trainer, ticket, client).staleness)
            idle.append(client)
        if after:
            after(server)
    return stale


def opened(rule, start=None, trainer=None):
    """Return a server whose clients have all sent their initial gradient, if the rule requires it."""
    server = Server(SPACE, rule, draw(7, D) if start is None else start)
    for client in range(CLIENTS):
        if rule.initial == "gradient":
            receipt = train_and_send(
                server, trainer or ControlVariate(steps=5, rate=0.05), server.dispatch(client), client
            )
            assert (receipt.buffered, receipt.version) == (True, 0)
    return server


def control_variates(server):
    store = server._state.value.store
    return {c: store.load(("client", c))["control"] for c in range(CLIENTS) if ("client", c) in store}


def state(server):
    return server._state.value.model_state.state


def test_trainer_takes_the_steps_of_the_paper():
    start, direction, control = draw(1, 3, D)
    numbers = {"opening": 0.0, "beta": 0.3}
    h, a = PROBLEMS[0]
    theirs, total = start, 0
    for _ in range(6):
        gradient = h @ (theirs - a)
        theirs, total = theirs - 0.1 * (0.3 * (gradient - control) + direction), total + gradient
    message = Message(start, {"direction": direction, "control": control}, numbers)
    batches = Batches([PROBLEMS[0]])
    for trainer in (ControlVariate(steps=6, rate=0.1), ControlVariate(epochs=6, rate=0.1)):
        payload = trainer.train(SPACE, message, loss, batches, None, generator=torch.Generator())
        assert relative(payload.points[0], theirs) <= 1e-14
        assert relative(payload.tensors["gradient"], total / 6) <= 1e-14
        assert dict(payload.numbers) == {"opening": 0.0}
    bare = Message(start, {"direction": direction}, numbers)
    payload = ControlVariate(steps=1, rate=0.1).train(SPACE, bare, loss, batches, None, generator=torch.Generator())
    assert relative(payload.points[0], start - 0.1 * (0.3 * h @ (start - a) + direction)) <= 1e-14


def test_initial_task_returns_the_mean_gradient_at_the_start():
    message = Message(draw(1, D), numbers={"opening": 1.0, "beta": 0.3})
    batches = Batches(PROBLEMS[:3])
    payload = ControlVariate(epochs=2, rate=0.1).train(SPACE, message, loss, batches, None, generator=torch.Generator())
    assert torch.equal(payload.points[0], message.start)
    assert relative(payload.tensors["gradient"], sum(h @ (message.start - a) for h, a in PROBLEMS[:3]) / 3) <= 1e-14


@settings(max_examples=6)
@given(seeds, st.floats(0.05, 1), st.floats(0.01, 0.5), st.sampled_from(["gradient", "zero"]))
def test_run_equals_transcription_of_the_paper(seed, beta, gamma, initial):
    """Transcription of Algorithm 1 in float64, with given gradients and clients in any order."""
    n, size = 5, 3
    server = Server(SPACE, MasFL(size, gamma, beta, clients=n, initial=initial), draw(seed, D))
    theta, c_i = draw(seed, D), [torch.zeros(D).double() for _ in range(n)]

    def send(client, gradient, opening):
        ticket = server.dispatch(client)
        assert ticket.message.numbers == {"opening": opening, "beta": beta}
        given_ = Payload(theta[None], 1, {"gradient": gradient}, {"opening": opening})
        assert server.receive(ticket.id, given_).accepted
        return ticket.message

    if initial == "gradient":
        for i in range(n):
            c_i[i] = draw(seed + i + 1, D)
            send(i, c_i[i], 1.0)
    c = sum(c_i) / n
    g = c if initial == "gradient" else torch.zeros(D).double()
    rng = np.random.default_rng(seed)
    for t in range(6):
        chosen = rng.choice(n, size, replace=False).tolist()
        fresh = {i: draw(seed + 10 * t + i + 10, D) for i in chosen}
        for i in chosen:
            message = send(i, fresh[i], 0.0)
            assert relative(message.tensors["direction"], beta * c + (1 - beta) * g) <= 1e-13
            assert relative(message.tensors.get("control", torch.zeros(D).double()), c_i[i]) <= 1e-13
        change = sum(fresh[i] - c_i[i] for i in chosen)
        g = beta * (change / size + c) + (1 - beta) * g
        theta, c = theta - gamma * g, c + change / n
        for i in chosen:
            c_i[i] = fresh[i]
        # A few roundings a step of numbers of one size.
        assert relative(server.model, theta) <= 1e-13
        assert relative(state(server)["c"], c) <= 1e-13
        assert server.history[-1]["norm"] == pytest.approx(gamma * g.norm().item(), rel=1e-12)


@pytest.mark.parametrize("delay", [0, 3, 8])
@pytest.mark.parametrize("initial", ["gradient", "zero"])
def test_c_equals_the_mean_of_the_control_variates(delay, initial):
    size = 1 if delay == 8 else 2
    server = opened(MasFL(size, 0.05, 0.3, clients=CLIENTS, initial=initial))

    def check(server):
        kept = control_variates(server)
        # Roundings of up to 25 sums.
        assert relative(state(server)["c"], sum(kept.values()) / CLIENTS) <= 1e-13

    assert delay in rounds(server, ControlVariate(steps=5, rate=0.01), delay, 25, check)


class Plain:
    """Trainer that takes five steps of gradient descent with the rate 0.2."""

    def train(self, space, message, loss, batches, client_state, *, generator):
        ((h, a),), theta = batches, message.start
        for _ in range(5):
            theta = theta - 0.2 * h @ (theta - a)
        return Payload(theta[None], 1)


PULLS = [torch.eye(D).double() - torch.linalg.matrix_power(torch.eye(D).double() - 0.2 * h, 5) for h, _ in PROBLEMS]
FEDAVG = torch.linalg.solve(sum(PULLS), sum(p @ a for p, (_, a) in zip(PULLS, PROBLEMS, strict=True)))
"""Where FedAvg over all clients rests."""


@pytest.mark.parametrize(("delay", "rate", "count"), [(0, 0.1, 200), (3, 0.05, 260), (8, 0.03, 340)])
def test_masfl_reaches_the_joint_optimum_under_delays_unlike_fedavg(delay, rate, count):
    trainer = ControlVariate(steps=2, rate=0.02)
    server = opened(MasFL(1, rate, 0.3, clients=CLIENTS), trainer=trainer)
    stale = rounds(server, trainer, delay, count)
    assert stale == set(range(delay + 1))
    reached = (server.model - JOINT).norm().item()
    average, late = Server(SPACE, FedAvg(1, 0.05), JOINT, weights="uniform"), []
    rounds(average, Plain(), delay, 180, lambda s: late.append(s.model))
    # It begins at the optimum and leaves it. The mean over ten turns of all clients, so that it is not the last cohort's model.
    missed = (torch.stack(late[-10 * CLIENTS :]).mean(0) - JOINT).norm().item()
    print(f"delay {delay}: MasFL {reached:.1e}, FedAvg {missed:.3f} of {JOINT.norm():.2f}")
    # The error falls by 5 to 10 % a round, and would go on to fall.
    assert reached <= 1e-6
    # Clients in turn, with small steps, rest near where all clients together do, 0.22 from the optimum.
    assert missed == pytest.approx((FEDAVG - JOINT).norm().item(), rel=0.1)
    assert missed >= 0.2


def test_model_at_joint_optimum_does_not_move():
    server = opened(MasFL(2, 0.1, 0.3, clients=CLIENTS), start=JOINT)
    rounds(server, ControlVariate(steps=10, rate=0.1), 3, 20)
    # Roundings of gradients of size 10.
    assert (server.model - JOINT).norm() <= 1e-12


def test_late_client_sends_initial_gradient_and_joins_the_mean():
    rule = MasFL(1, 0.1, 0.5)
    server = Server(SPACE, rule, draw(7, D))
    trainer = ControlVariate(steps=2, rate=0.05)
    for client in (0, 1, 0, 1, 0):
        train_and_send(server, trainer, server.dispatch(client), client)
    assert server.version == 3
    before, g = server.model, state(server)["g"].clone()
    ticket = server.dispatch(2)
    assert (ticket.message.numbers["opening"], dict(ticket.message.tensors)) == (1.0, {})
    receipt = train_and_send(server, trainer, ticket, 2)
    assert (receipt.buffered, server.version) == (True, 3)
    assert torch.equal(server.model, before)
    assert torch.equal(state(server)["g"], g)
    kept = control_variates(server)
    assert relative(kept[2], PROBLEMS[2][0] @ (before - PROBLEMS[2][1])) <= 1e-14
    assert relative(state(server)["c"], sum(kept.values()) / 3) <= 1e-14
    train_and_send(server, trainer, server.dispatch(2), 2)
    assert relative(state(server)["c"], sum(control_variates(server).values()) / 3) <= 1e-14


def test_model_does_not_move_before_all_initial_gradients():
    server = Server(SPACE, MasFL(1, 0.1, 0.5, clients=3), draw(7, D))
    trainer = ControlVariate(steps=2, rate=0.05)
    for client in (0, 1, 0, 0):
        assert train_and_send(server, trainer, server.dispatch(client), client).buffered
    failed = server.dispatch(2)
    server.drop(failed.id)
    assert train_and_send(server, trainer, server.dispatch(1), 1).buffered
    train_and_send(server, trainer, server.dispatch(2), 2)
    assert torch.equal(state(server)["g"], state(server)["c"])
    assert relative(state(server)["c"], sum(control_variates(server).values()) / 3) <= 1e-14
    assert not train_and_send(server, trainer, server.dispatch(1), 1).buffered


def test_zero_starts_with_late_clients_keep_the_mean():
    server = Server(SPACE, MasFL(2, 0.1, 0.5, initial="zero"), draw(7, D))
    for client in (0, 1, 1, 2, 3, 0):
        train_and_send(server, ControlVariate(steps=2, rate=0.05), server.dispatch(client), client)
    assert server.version == 3
    assert relative(state(server)["c"], sum(control_variates(server).values()) / 4) <= 1e-14


def sent(server, client, gradient, ticket=None):
    ticket = ticket or server.dispatch(client)
    tensors = {"gradient": torch.full((D,), gradient, dtype=torch.float64)}
    given_ = Payload(torch.zeros(1, D).double(), 1, tensors, {"opening": 0.0})
    receipt = server.receive(ticket.id, given_)
    assert receipt.accepted, receipt.reason
    return receipt


def test_only_the_last_update_of_a_client_in_a_buffer_counts():
    server = Server(SPACE, MasFL(2, 1.0, 1.0, clients=4, initial="zero"), torch.zeros(D).double())
    old = server.dispatch("a")
    sent(server, "a", 5.0)
    assert sent(server, "a", 1.0, old).buffered
    assert not sent(server, "b", 3.0).buffered
    assert state(server)["c"].tolist() == [1.0] * D
    assert server.model.tolist() == [-2.0] * D
    # An old ticket that comes back after the step is an answer like any other.
    late = server.dispatch("a")
    sent(server, "a", 2.0)
    sent(server, "b", 3.0)
    assert sent(server, "a", 6.0, late).staleness == 1
    sent(server, "c", 0.0)
    assert state(server)["c"].tolist() == [(6.0 + 3.0) / 4] * D


@pytest.mark.parametrize(
    ("tensors", "numbers", "name"),
    [
        ({}, {"opening": 1.0}, "tensors"),
        ({"gradient": draw(0, D) * float("nan")}, {"opening": 1.0}, "tensors: gradient"),
        ({"gradient": draw(0, D)}, {}, "numbers"),
        ({"gradient": draw(0, D)}, {"opening": 0.5}, "numbers: opening"),
        ({"gradient": draw(0, D)}, {"opening": 0.0}, "numbers: opening"),
    ],
)
def test_server_rejects_invalid_payload_and_keeps_its_state(tensors, numbers, name):
    server = Server(SPACE, MasFL(1), draw(7, D))
    before = {key: str(value) for key, value in state(server).items()}
    receipt = server.receive(server.dispatch("a").id, Payload(draw(0, 1, D), 1, tensors, numbers))
    assert not receipt.accepted
    assert receipt.reason.startswith(f"{name}: ")
    assert {key: str(value) for key, value in state(server).items()} == before


def test_update_that_overflows_the_sum_is_rejected_before_buffering():
    server = Server(SPACE, MasFL(3, initial="zero"), torch.zeros(D).double())
    sent(server, "a", 1.7e308)
    given_ = {"gradient": torch.full((D,), 1.7e308, dtype=torch.float64)}
    receipt = server.receive(server.dispatch("b").id, Payload(draw(0, 1, D), 1, given_, {"opening": 0.0}))
    assert (receipt.accepted, receipt.reason[:35]) == (False, "tensors: gradient: sum over the buf")
    assert state(server)["pending"]["clients"] == ["a"]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"size": 0}, "size"),
        ({"rate": -1.0}, "rate"),
        ({"beta": 0.0}, "beta"),
        ({"beta": 1.5}, "beta"),
        ({"size": 3, "clients": 2}, "clients"),
        ({"initial": "one"}, "initial"),
    ],
    ids=str,
)
def test_invalid_options_are_rejected_by_name(options, name):
    with pytest.raises(ArgumentError, match=f"^{name}: "):
        MasFL(**options)


def test_trainer_names_missing_entries_of_the_message():
    def train(message, problem=loss, space=SPACE):
        batches = Batches([PROBLEMS[0]])
        return ControlVariate(steps=1).train(space, message, problem, batches, None, generator=torch.Generator())

    with pytest.raises(ArgumentError, match=r"message: .* beta, opening"):
        train(Message(draw(0, D)))
    with pytest.raises(ArgumentError, match=r"message: .* direction"):
        train(Message(draw(0, D), numbers={"beta": 1.0, "opening": 0.0}))
    good = Message(draw(0, D), {"direction": draw(1, D)}, {"beta": 1.0, "opening": 0.0})
    with pytest.raises(DivergenceError, match="step 0"):
        train(good, lambda theta, batch: (theta * float("inf")).sum())
    with pytest.raises(ArgumentError, match=r"^space: "):
        train(good, space=Sphere(D))
    with pytest.raises(ArgumentError, match=r"^space: "):
        Server(Sphere(3), MasFL(1), torch.eye(3)[0])
    for options in ({"steps": 0}, {"epochs": 0}, {"rate": 0.0}):
        with pytest.raises(ArgumentError, match=f"^{next(iter(options))}: "):
            ControlVariate(**options)


def test_gradient_without_finite_step_is_not_buffered():
    server = Server(Flat(1), MasFL(2, 100.0, 1.0, initial="zero"), torch.zeros(1))
    for client, gradient in (("a", 3e38), ("b", 1.0), ("c", 1.0)):
        given_ = Payload(torch.zeros(1, 1), 1, {"gradient": torch.tensor([gradient])}, {"opening": 0.0})
        reason = server.receive(server.dispatch(client).id, given_).reason
        assert reason.startswith("tensors: gradient: model") == (client == "a")
        assert (reason == "") == (client != "a")
    assert server.version == 1


def test_huge_update_is_replaced_by_the_next_update_of_its_client():
    server = Server(Flat(1), MasFL(1, 1e-12, 0.5, initial="zero", clients=2), torch.zeros(1))
    for client, gradient in (("b", 1.0), ("a", 1e10), ("a", -1.0), ("b", 1.0)):
        given_ = Payload(torch.zeros(1, 1), 1, {"gradient": torch.tensor([gradient])}, {"opening": 0.0})
        assert server.receive(server.dispatch(client).id, given_).accepted
    assert state(server)["c"].item() == 0
    assert all(tensor.dtype == torch.float32 for tensor in server.dispatch("a").message.tensors.values())


def test_server_rejects_initial_gradient_that_it_did_not_request():
    server = Server(SPACE, MasFL(1, initial="zero"), draw(7, D))
    given_ = Payload(draw(0, 1, D), 1, {"gradient": draw(0, D)}, {"opening": 1.0})
    assert server.receive(server.dispatch("a").id, given_).reason == "numbers: opening: expected 0, got 1"


@given(st.integers(1, 20), st.integers(1, 20), st.floats(0.01, 100), st.floats(0, 20), st.integers(1, 10**6))
def test_the_rates_of_theorem_1_satisfy_its_condition(size, steps, smoothness, delay, spare):
    """MasFL, Theorem 1: at the bound on the local rate, 1 - 4a - sqrt(SK / T) = 0."""
    least = size * steps * ((1 + math.sqrt(1 + 16 * delay**2)) / 2) ** 2
    total = math.ceil(least) + spare
    beta, gamma, eta = MasFL.theory(size, steps, total, smoothness, delay)
    assert beta == pytest.approx(math.sqrt(size * steps / total), rel=1e-14)
    assert gamma == pytest.approx(math.sqrt(size * steps / total) / (4 * smoothness), rel=1e-14)
    a = delay**2 * beta**2 + 20 * math.e**2 * eta**2 * steps**2 * smoothness**2
    assert 1 - 4 * a - beta == pytest.approx(0, abs=1e-12)


@pytest.mark.usefixtures("as_shipped")
def test_theorem_1_gives_the_required_number_of_steps():
    with pytest.raises(ArgumentError, match="T: expected at least 17 for these S, K and max_delay, got 16"):
        MasFL.theory(4, 4, 16, 1.0, 0)
    assert MasFL.theory(4, 4, 17, 1.0, 0).eta > 0
    for name, value in {"S": 0, "K": 0, "T": 0, "L": 0.0, "max_delay": -1.0}.items():
        with pytest.raises(ArgumentError, match=f"^{name}: expected"):
            MasFL.theory(**({"S": 2, "K": 2, "T": 100, "L": 1.0, "max_delay": 1.0} | {name: value}))
