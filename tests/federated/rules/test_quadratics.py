r"""Exact fixed points: clients with quadratic losses $\tfrac12 (x - a_i)^\top H_i (x - a_i)$ with different minima.

K steps of gradient descent of rate η with the proximal term μ take the model x to $x + P_i (a_i - x)$, where
$P_i = (I - (I - \eta A_i)^K) A_i^{-1} H_i$ and $A_i = H_i + \mu I$. Every rule that is linear in its models therefore has a
fixed point or a cycle, which is the solution of a linear system.
"""

import functools

import pytest
import torch

from manifoldagg.federated import Message, Update, clients
from manifoldagg.federated.rules import ASGD, FedAsync, FedAvg, FedBuff
from manifoldagg.federated.staleness import Constant, Polynomial
from manifoldagg.manifolds import Flat
from tests.support import draw, relative, rotation

pytestmark = pytest.mark.usefixtures("as_shipped")

D, CLIENTS, STEPS, RATE = 4, 3, 5, 0.2
SPACE, ONE = Flat(D), torch.eye(D, dtype=torch.float64)
WEIGHTS = [0.2, 0.3, 0.5]


def hessian(i):
    q = rotation(i, D)
    return q @ torch.diag(torch.linspace(0.3, 2.0 + i, D, dtype=torch.float64)) @ q.T


PROBLEMS = [(hessian(i), 3 * draw(50 + i, D)) for i in range(CLIENTS)]


@functools.cache
def pull(i, mu):
    """Return the matrix P_i."""
    h, _ = PROBLEMS[i]
    a = h + mu * ONE
    return (ONE - torch.linalg.matrix_power(ONE - RATE * a, STEPS)) @ torch.linalg.solve(a, h)


def answer(i, x, mu=0.0):
    """Return the model that client i trains from x, in closed form."""
    return x + pull(i, mu) @ (PROBLEMS[i][1] - x)


def loss(theta, batch):
    h, a = batch
    return 0.5 * (theta - a) @ h @ (theta - a)


def trained(i, x, mu):
    """Return the model that client i trains from x with the trainer."""
    make = clients.Proximal if mu else clients.Local
    trainer = make(steps=STEPS, optimizer=torch.optim.SGD, rate=RATE, proximal=mu)
    payload = trainer.train(SPACE, Message(x), loss, [PROBLEMS[i]], None, generator=torch.Generator())
    return payload.points[0]


def fixed_point(mu):
    total = sum(w * pull(i, mu) for i, w in enumerate(WEIGHTS))
    return torch.linalg.solve(total, sum(w * pull(i, mu) @ PROBLEMS[i][1] for i, w in enumerate(WEIGHTS)))


@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_trainers_equal_the_closed_form(mu):
    for i in range(CLIENTS):
        x = draw(i, D)
        # Five steps of a few roundings.
        assert relative(trained(i, x, mu), answer(i, x, mu)) <= 1e-14


@pytest.mark.parametrize("mu", [0.0, 0.5], ids=["FedAvg", "FedProx"])
def test_fedavg_with_trained_clients_stays_at_its_fixed_point(mu):
    rule, model = FedAvg(CLIENTS), fixed_point(mu)
    state = rule.init(SPACE, model)
    for i, weight in enumerate(WEIGHTS):
        given_ = Update(i, model, model, trained(i, model, mu)[None], weight=weight)
        state, outcome = rule.step(SPACE, state, given_)
    # The condition of the linear system is below 10.
    assert relative(outcome.model, model) <= 1e-13
    joint = torch.linalg.solve(
        sum(w * h for w, (h, _) in zip(WEIGHTS, PROBLEMS, strict=True)),
        sum(w * h @ a for w, (h, a) in zip(WEIGHTS, PROBLEMS, strict=True)),
    )
    assert relative(model, joint) > 0.01


@pytest.mark.parametrize("rule", [FedAvg(CLIENTS), FedAvg(CLIENTS, 0.5)], ids=str)
@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_fedavg_converges_to_the_fixed_point_of_the_linear_system(rule, mu):
    model = start = draw(7, D)
    state = rule.init(SPACE, model)
    for _ in range(60):
        for i, weight in enumerate(WEIGHTS):
            state, outcome = rule.step(SPACE, state, Update(i, model, model, answer(i, model, mu)[None], weight=weight))
        model = outcome.model
    # The error is multiplied by I - η_g Σ w_i P_i in each round, beside roundings that it damps.
    once = ONE - rule.rate * sum(w * pull(i, mu) for i, w in enumerate(WEIGHTS))
    left = torch.linalg.matrix_power(once, 60) @ (start - fixed_point(mu))
    assert relative(model, fixed_point(mu) + left) <= 1e-13
    assert left.norm() < 1e-3 * (start - fixed_point(mu)).norm()


def cycle(mixing, position):
    """Return the models z_0, z_1, z_2 of a cycle.

    Client j returns at version j of each round, and its base is the version after its previous update.
    """
    left = torch.zeros(CLIENTS * D, CLIENTS * D, dtype=torch.float64)
    right = torch.zeros(CLIENTS * D, dtype=torch.float64)
    for j in range(CLIENTS):
        p, (_, a), after = pull(j, 0.0), PROBLEMS[j], (j + 1) % CLIENTS
        rows = slice(j * D, (j + 1) * D)
        columns = slice(after * D, (after + 1) * D)
        left[rows, columns] += ONE
        if position:  # z⁺ = (1 - α) z + α (b + P (a - b)), and b = z⁺
            left[rows, rows] -= (1 - mixing) * ONE
            left[rows, columns] -= mixing * (ONE - p)
        else:  # z⁺ = z + ρ P (a - b), and b = z⁺
            left[rows, rows] -= ONE
            left[rows, columns] += mixing * p
        right[rows] = mixing * p @ a
    return torch.linalg.solve(left, right).view(CLIENTS, D)


def arrivals(rule, rounds, weight=1.0):
    """Return the models of the last round of clients that take turns."""
    model = draw(3, D)
    state, bases, last = rule.init(SPACE, model), [model] * CLIENTS, []
    for tau in range(rounds * CLIENTS):
        j = tau % CLIENTS
        last = [*last, model][-CLIENTS:]
        late = min(tau, CLIENTS - 1)
        given_ = Update(j, bases[j], model, answer(j, bases[j])[None], staleness=late, weight=weight)
        state, outcome = rule.step(SPACE, state, given_)
        model = bases[j] = outcome.model
    return torch.stack(last)


@pytest.mark.parametrize("staleness", [Constant(), Polynomial(0.5)], ids=str)
def test_fedasync_converges_to_the_cycle_of_the_linear_system(staleness):
    expected = cycle(0.4 * staleness(CLIENTS - 1), position=True)
    assert relative(arrivals(FedAsync(0.4, staleness=staleness), 90), expected) <= 1e-10
    assert relative(expected[0], expected[1]) > 1e-3


@pytest.mark.parametrize("rule", [ASGD(0.5), FedBuff(1, 0.5, staleness=Constant())], ids=lambda r: type(r).__name__)
def test_asgd_converges_to_the_cycle_of_the_linear_system(rule):
    expected = cycle(0.5, position=False)
    assert relative(arrivals(rule, 90), expected) <= 1e-10
    assert relative(expected[0], expected[1]) > 1e-3


def test_weights_scale_the_steps_of_asgd():
    assert relative(arrivals(ASGD(0.8), 90, weight=0.5), cycle(0.4, position=False)) <= 1e-10
