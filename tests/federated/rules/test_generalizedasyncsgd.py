"""Tests of Generalized AsyncSGD: its mean over the routing is the mean gradient, exactly and in a queueing network."""

import copy
import pickle
from collections import defaultdict, deque

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from manifoldagg.curves import SAM
from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Message, Payload, Server, Trainer, Update, aggregate
from manifoldagg.federated.clients.local import Gradient
from manifoldagg.federated.rules import ASGD
from manifoldagg.federated.rules.generalizedasyncsgd import GeneralizedAsyncSGD
from manifoldagg.manifolds import Flat, Sphere
from manifoldagg.simulation.jackson import JacksonNetwork
from tests.federated.random_clients import SIZE, SPACE, arrivals
from tests.support import draw, relative, seeds

GOLDEN = {"GeneralizedAsyncSGD": GeneralizedAsyncSGD({"heavy": 0.75, "light": 0.25}, 0.3)}

ROUTING, SPEEDS, TASKS = [0.1, 0.2, 0.3, 0.4], [1.0, 4.0, 2.0, 8.0], 6


def step(rule, i, x, gradient, base=None):
    base = x if base is None else base
    return rule.step(SPACE, rule.init(SPACE, x), Update(i, base, x, (base - gradient)[None]))[1]


@settings(max_examples=6)
@given(seeds, st.floats(0.01, 2))
def test_random_run_equals_transcription_of_the_paper(seed, rate):
    routing = dict(zip(range(5), (0.1, 0.3, 0.2, 0.15, 0.25), strict=True))
    x = draw(seed, SIZE)
    for event in arrivals(GeneralizedAsyncSGD(routing, rate), seed):
        gradient = event.base - event.point
        x = x - rate / (5 * routing[event.client]) * gradient
        # Thirty steps of a few roundings.
        assert relative(event.model, x) <= 1e-13


@settings(max_examples=10)
@given(seeds, st.lists(st.floats(0.01, 1), min_size=1, max_size=5))
def test_the_mean_over_the_routing_is_the_mean_gradient(seed, shares):
    p = [share / sum(shares) for share in shares]
    x, gradients = draw(seed, SIZE), draw(seed + 1, len(p), SIZE)
    rule = GeneralizedAsyncSGD(p, 0.3)
    bases = draw(seed + 2, len(p), SIZE)
    mean = sum(q * (step(rule, i, x, gradients[i], bases[i]).model - x) for i, q in enumerate(p))
    # A share of 1 / 500 magnifies the rounding of x by 100.
    assert (mean + 0.3 * gradients.mean(0)).norm() <= 1e-12


def test_mean_step_at_the_joint_minimiser_is_zero():
    centres = draw(3, 4, SIZE)
    x = centres.mean(0)
    rule = GeneralizedAsyncSGD(ROUTING, 0.5)
    assert sum(p * (step(rule, i, x, x - centres[i]).model - x) for i, p in enumerate(ROUTING)).norm() <= 1e-14
    plain = sum(p * (step(ASGD(0.5), i, x, x - centres[i]).model - x) for i, p in enumerate(ROUTING))
    assert plain.norm() > 0.1


def network():
    return JacksonNetwork(ROUTING, SPEEDS, np.random.default_rng(0), concurrency=TASKS)


def test_network_weights_each_task_by_the_share_of_its_client():
    """The tasks queue at their clients (first in, first out), and the staleness is arbitrary."""
    gradients, queues, done = draw(5, 4, SIZE), defaultdict(deque), [0] * 4
    server, tasks = Server(SPACE, GeneralizedAsyncSGD(ROUTING, 0.01), torch.zeros(SIZE).double()), network()

    def route():
        tasks.dispatch(client := tasks.route())
        queues[client].append(server.dispatch(client))

    for _ in range(TASKS):
        route()
    for _ in range(100):
        client = tasks.next().client
        ticket = queues[client].popleft()
        payload = Payload((ticket.message.start - gradients[client])[None], samples=1)
        assert server.receive(ticket.id, payload).accepted
        done[client] += 1
        route()
    expected = sum(-0.01 * k / (4 * p) * g for k, p, g in zip(done, ROUTING, gradients, strict=True))
    # A hundred steps of a few roundings.
    assert relative(server.model, expected) <= 1e-12
    assert max(row["staleness"] for row in server.history) > TASKS


@pytest.mark.usefixtures("as_shipped")
def test_routing_network_is_unbiased_for_this_rule_and_biased_for_asgd():
    """The gradients do not depend on the model, so the movement is the sum of the task counts times the steps."""
    gradients, rounds, tasks, zero = draw(5, 4, SIZE), 20_000, network(), torch.zeros(SIZE).double()
    rules = GeneralizedAsyncSGD(ROUTING, 1.0), ASGD(1.0)
    weighted, plain = (-torch.stack([step(rule, i, zero, gradients[i]).model for i in range(4)]) for rule in rules)
    done = torch.zeros(4).double()
    for _ in range(TASKS):
        tasks.dispatch(tasks.route())
    for _ in range(rounds):
        done[tasks.next().client] += 1
        tasks.dispatch(tasks.route())
    mean, p = gradients.mean(0), torch.tensor(ROUTING, dtype=torch.float64)
    variance = p @ weighted.square() - mean.square()
    # Five standard errors of independent routes, and the at most m tasks that were routed and are not done.
    bound = 5 * (variance / rounds).sqrt() + 2 * TASKS * weighted.abs().amax(0) / rounds
    assert bool(((done @ weighted / rounds - mean).abs() <= bound).all())
    assert relative(done @ plain / rounds, mean) > 0.25
    assert relative(done @ weighted / rounds, mean) < 0.03


def test_step_is_neither_clamped_nor_weighted_by_staleness():
    x, g = draw(0, 2, SIZE)
    rule = GeneralizedAsyncSGD({"a": 0.01, "b": 0.99}, 4.0)
    state = rule.init(SPACE, x)
    update = Update("a", x, x, (x - g)[None], staleness=50, weight=0.1)
    assert relative(rule.step(SPACE, state, update)[1].model, x - 200 * g) <= 1e-12


def test_the_rate_may_change_with_the_version():
    rule, x = GeneralizedAsyncSGD([1.0], lambda version: 1 / (version + 1)), torch.zeros(SIZE).double()
    state, went = rule.init(SPACE, x), []
    for _ in range(3):
        state, outcome = rule.step(SPACE, state, Update(0, x, x, x[None] - 1))
        went.append(outcome.model[0].item())
    assert went == pytest.approx([-1, -1 / 2, -1 / 3])


def test_rule_copies_its_routing():
    shares = {"a": 0.5, "b": 0.5}
    rule = GeneralizedAsyncSGD(shares)
    shares["a"] = 1e-9
    assert rule.routing == {"a": 0.5, "b": 0.5}
    assert GeneralizedAsyncSGD(np.array([0.25, 0.75])).routing == {0: 0.25, 1: 0.75}


def test_server_rejects_clients_without_routing_probability():
    server = Server(SPACE, GeneralizedAsyncSGD({"a": 1.0, "b": 0.0}), torch.zeros(SIZE))
    for client in ("b", "stranger"):
        receipt = server.receive(server.dispatch(client).id, Payload(torch.ones(1, SIZE), samples=1))
        assert receipt.reason.startswith("client:")
    assert server.receive(server.dispatch("a").id, Payload(torch.ones(1, SIZE), samples=1)).accepted


def loss(theta, batch):
    inputs, targets = batch
    return (inputs @ theta - targets).square().mean()


BATCHES = [(draw(i, 3 + i, 3), draw(10 + i, 3 + i)) for i in range(4)]


def gradient_of(theta, batch):
    inputs, targets = batch
    return 2 * inputs.mT @ (inputs @ theta - targets) / len(targets)


def test_trainer_draws_each_batch_equally_often():
    space, start, trainer = Flat(3), draw(0, 3), Gradient()
    generator, seen = torch.Generator().manual_seed(0), [0] * 4
    for _ in range(80):
        payload = trainer.train(space, Message(start), loss, BATCHES, None, generator=generator)
        g = start - payload.points[0]
        found = [i for i, batch in enumerate(BATCHES) if relative(g, gradient_of(start, batch)) <= 1e-13]
        assert len(found) == 1
        assert payload.samples == len(BATCHES[found[0]][1])
        seen[found[0]] += 1
    # χ² with 3 degrees of freedom is above 21.1 in one of 10,000.
    assert sum((count - 20) ** 2 / 20 for count in seen) < 21.1
    assert isinstance(trainer, Trainer)


def test_batches_without_length_use_the_first_batch():
    start, generator = draw(0, 3), torch.Generator()
    for _ in range(4):
        payload = Gradient().train(Flat(3), Message(start), loss, iter(BATCHES), None, generator=generator)
        assert relative(start - payload.points[0], gradient_of(start, BATCHES[0])) <= 1e-13
    sharp = Gradient(sharpness=SAM(0.1)).train(Flat(3), Message(start), loss, BATCHES[:1], None, generator=generator)
    g = gradient_of(start, BATCHES[0])
    assert relative(start - sharp.points[0], gradient_of(start + 0.1 * g / g.norm(), BATCHES[0])) <= 1e-12


def test_routings_compare_by_value():
    given_ = {"a": 0.25, "b": 0.75}
    rule = GeneralizedAsyncSGD(given_)
    given_["a"] = -3.0
    with pytest.raises(TypeError):
        rule.routing["a"] = -3.0
    assert rule.routing == {"a": 0.25, "b": 0.75}
    same = GeneralizedAsyncSGD({"b": 0.75, "a": 0.25})
    assert (same, hash(same)) == (rule, hash(rule))
    assert pickle.loads(pickle.dumps(rule)) == copy.deepcopy(rule) == rule != GeneralizedAsyncSGD([0.25, 0.75])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(8, 3).double())


def test_loader_without_length_uses_the_first_batch():
    payload = Gradient().train(
        Flat(3), Message(draw(0, 3)), lambda x, batch: (batch @ x).mean(), DataLoader(Stream(), batch_size=4), None,
        generator=torch.Generator(),
    )  # fmt: skip
    assert relative(payload.points[0], draw(0, 3) - 1) <= 1e-15
    assert payload.samples == 4


@pytest.mark.usefixtures("as_shipped")
def test_invalid_arguments_are_rejected_by_name():
    for routing in ([0.5, 0.4], [1.5, -0.5], [], 0.5, [float("nan")], {"a": "1"}):
        with pytest.raises(ArgumentError, match="routing"):
            GeneralizedAsyncSGD(routing)
    with pytest.raises(ArgumentError, match="rate"):
        GeneralizedAsyncSGD([1.0], 0.0)
    with pytest.raises(ArgumentError, match=r"GeneralizedAsyncSGD.*Sphere"):
        GeneralizedAsyncSGD([1.0]).init(Sphere(3), torch.tensor([1.0, 0.0, 0.0]))
    with pytest.raises(ArgumentError, match="batches"):
        Gradient().train(Flat(3), Message(draw(0, 3)), loss, [], None, generator=torch.Generator())
    model = [torch.zeros(2)]
    with pytest.raises(ArgumentError, match="client"):
        aggregate(GeneralizedAsyncSGD([1.0]), None, model, model, model)
