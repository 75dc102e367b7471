r"""Client drift on quadratics $\tfrac12 (x - a_i)^\top H_i (x - a_i)$: fixed points of rules.

The tests compute the fixed points of steps along a chord, along a fitted curve and along the whole path. Client i has
the minimum $a_i$ and the Hessian $H_i$. Its k-th iterate of gradient descent with the rate $\eta_i$ is
$\theta_k = a_i + E_i^k (x - a_i)$, where $E_i = I - \eta_i H_i$. As the server's rate $\rho$ tends to 0, a step along a
curve tends to $\rho$ times its velocity at the start, $D_i (x - a_i)$. The fixed point is therefore the solution x of
$\sum_i w_i D_i (x - a_i) = 0$. For a chord, $D_i = E_i^K - I$. For a path of K steps, $D_i = -K \eta_i H_i$.
"""

import functools

import pytest
import sympy
import torch

from manifoldagg.curves.bernstein import basis, weights
from manifoldagg.federated import Update
from manifoldagg.federated.rules import AsyncBezier, Dominance
from manifoldagg.manifolds import Flat
from tests.support import draw, relative, rotation

pytestmark = pytest.mark.usefixtures("as_shipped")

P = 3
CLIENTS = range(4)
STEPS = 10
RATE = 0.15
SPACE = Flat(P)
ONE = torch.eye(P, dtype=torch.float64)
WEIGHTS = [0.1, 0.2, 0.3, 0.4]
HESSIANS = [q @ torch.diag(torch.linspace(0.1, 1.0 + i, P, dtype=torch.float64)) @ q.T
            for i, q in ((i, rotation(i, P)) for i in CLIENTS)]  # fmt: skip
CENTRES = [3 * draw(70 + i, P) for i in CLIENTS]


@functools.cache
def powers(i, rate, steps):
    shrink = ONE - rate * HESSIANS[i]
    return torch.stack([torch.linalg.matrix_power(shrink, k) for k in range(steps + 1)])


def iterates(i, x, rate=RATE, steps=STEPS):
    return CENTRES[i] + powers(i, rate, steps) @ (x - CENTRES[i])


def fitted(theta, n):
    """Return the control points, except the first, of the fit of degree n with the end points of the path."""
    b = basis(n, torch.linspace(0, 1, len(theta), dtype=torch.float64))
    ends = b[:, [0, n]] @ theta[[0, -1]]
    inner = torch.linalg.lstsq(b[:, 1:n], theta - ends).solution
    return torch.cat([inner, theta[-1:]])


def by_length(theta, pieces):
    """Return the points that divide the path into pieces of equal length."""
    gone = torch.cat([torch.zeros(1), (theta[1:] - theta[:-1]).norm(dim=1).cumsum(0)])
    points = []
    for i in range(1, pieces + 1):
        goal = gone[-1] * i / pieces
        k = min(int((gone < goal).sum()), len(theta) - 1)
        points.append(torch.lerp(theta[k - 1], theta[k], (goal - gone[k - 1]) / (gone[k] - gone[k - 1])))
    return torch.stack(points)


def chord(theta):
    return theta[-1:]


def path(theta):
    return theta[1:]


READ = {
    "chord": (chord, {}),
    "degree 2": (functools.partial(fitted, n=2), {}),
    "degree 3": (functools.partial(fitted, n=3), {}),
    "path": (path, {"polygon": True}),
    "path by length": (functools.partial(by_length, pieces=40), {"polygon": True}),
}


def velocity(i, name, rate=RATE, steps=STEPS):
    """Return D_i, with one column for each direction, from the points that a client returns."""
    points, _ = READ[name]
    moved = []
    for direction in ONE:
        theta = iterates(i, CENTRES[i] + direction, rate, steps)
        sent = points(theta)
        moved.append(len(sent) * (sent[0] - theta[0]))
    return torch.stack(moved, dim=1)


def balance(matrices):
    total = sum(w * d for w, d in zip(WEIGHTS, matrices, strict=True))
    return torch.linalg.solve(total, sum(w * d @ a for w, d, a in zip(WEIGHTS, matrices, CENTRES, strict=True)))


OPTIMUM = balance(HESSIANS)


def rests(name):
    return balance([velocity(i, name) for i in CLIENTS])


@functools.cache
def bias(name):
    return (rests(name) - OPTIMUM).norm().item()


def rule(name, rate, **options):
    options = {"pull_back": "none"} | READ[name][1] | options
    return AsyncBezier(rate, threshold=-1.0, **options)


def step(moving, i, x, theta, points, state=None, **known):
    state = moving.init(SPACE, x) if state is None else state
    return moving.step(SPACE, state, Update(i, x, x, points(theta), **{"weight": WEIGHTS[i]} | known))[1].model - x


def total(name, rate, x, **options):
    """Return the sum of the steps for one update of each client from x, divided by the rate."""
    moving = rule(name, rate, **options)
    return sum(step(moving, i, x, iterates(i, x), READ[name][0]) for i in CLIENTS) / rate


def test_fixed_point_of_chords_does_not_depend_on_the_server_rate():
    x = balance([ONE - torch.linalg.matrix_power(ONE - RATE * h, STEPS) for h in HESSIANS])
    size = total("chord", 1.0, OPTIMUM).norm()
    for rate in (1.0, 0.5, 0.01):
        # Four steps, and a linear system of condition below 100.
        assert total("chord", rate, x).norm() <= 1e-12 * size
    assert (x - OPTIMUM).norm() > 0.1


def test_fixed_point_of_paths_is_the_joint_optimum():
    scale = sum(w * (h @ (OPTIMUM - a)).norm() for w, h, a in zip(WEIGHTS, HESSIANS, CENTRES, strict=True))
    # To the first corner, of which there are ten, a path is the gradient.
    for rate in (1e-3, 0.5 / STEPS, 1.0 / STEPS):
        assert total("path", rate, OPTIMUM).norm() <= 1e-12 * scale
    assert total("path", 8.0, OPTIMUM).norm() > 1e-3 * scale


@pytest.mark.parametrize("name", ["degree 2", "degree 3"])
def test_fit_converges_to_its_fixed_point_as_the_rate_vanishes(name):
    x = rests(name)
    sizes = [total(name, rate, x).norm().item() for rate in (1e-2, 1e-3, 1e-4)]
    # A curve leaves its tangent by the square of the parameter.
    assert sizes[0] / sizes[1] == pytest.approx(10, rel=0.05)
    assert sizes[1] / sizes[2] == pytest.approx(10, rel=0.05)


def test_fit_by_steps_reduces_the_bias_and_fit_by_length_does_not():
    assert bias("degree 2") < 0.5 * bias("chord")
    assert bias("degree 3") < 0.5 * bias("degree 2")
    assert bias("path") <= 1e-12
    speed = sum(
        w * (iterates(i, OPTIMUM)[1:] - iterates(i, OPTIMUM)[:-1]).norm(dim=1).sum() * away / away.norm()
        for i, (w, h, a) in enumerate(zip(WEIGHTS, HESSIANS, CENTRES, strict=True))
        for away in [h @ (a - OPTIMUM)]
    )
    # Before the first step ends a path by length is along the gradient, as far as all steps together.
    assert relative(total("path by length", 1e-3, OPTIMUM), speed) <= 1e-9
    assert speed.norm() > 0.1 * total("chord", 1e-3, OPTIMUM).norm()


def test_chord_pull_back_weights_a_path_by_its_chord():
    expected = sum(
        w * (iterates(i, OPTIMUM)[-1] - OPTIMUM).norm() * away / away.norm()
        for i, (w, h, a) in enumerate(zip(WEIGHTS, HESSIANS, CENTRES, strict=True))
        for away in [h @ (a - OPTIMUM)]
    )
    assert relative(total("path", 1e-3, OPTIMUM, pull_back="chord"), expected) <= 1e-9
    assert expected.norm() > 0.1 * total("chord", 1e-3, OPTIMUM).norm()


def paced(normalise, rates, steps):
    moving = rule("path", 0.02, normalise=normalise)
    state = moving.init(SPACE, OPTIMUM)
    if normalise:
        state = {"version": 1000, "progress": 0.7}
    return sum(
        step(moving, i, OPTIMUM, iterates(i, OPTIMUM, rates[i], steps[i]), path, state,
             numbers={"progress": rates[i] * steps[i]})
        for i in CLIENTS
    ).norm()  # fmt: skip


def test_dividing_by_progress_removes_the_bias_of_unequal_progress():
    rates = [0.05, 0.1, 0.15, 0.2]
    steps = [20, 5, 10, 12]
    biased = paced(False, rates, steps)
    assert paced(True, rates, steps) <= 1e-12 * biased
    assert paced(True, [0.1] * 4, [10] * 4) <= 1e-12 * biased
    assert paced(False, [0.05, 0.1, 0.2, 0.25], [20, 10, 5, 4]) <= 1e-12 * biased


def test_dominance_removes_the_bias_of_unequal_arrivals():
    arrivals = [40, 30, 20, 10]

    def moved(**options):
        moving = rule("path", 0.02, **options)
        return sum(
            count * step(moving, i, OPTIMUM, iterates(i, OPTIMUM), path, {"version": 99}, client_state={"updates": count - 1})
            for i, count in enumerate(arrivals)
        ).norm()  # fmt: skip

    assert moved(dominance=Dominance(4, smoothed=False)) <= 1e-12 * moved()


def run(name, rate, rounds):
    """Return the mean model of the last round.

    The clients take turns, and each starts from the model after its previous update.
    """
    moving = rule(name, rate)
    model = rests(name)
    state = moving.init(SPACE, model)
    bases = [model for _ in CLIENTS]
    last = []
    for tau in range(rounds * len(CLIENTS)):
        i = tau % len(CLIENTS)
        given_ = Update(i, bases[i], model, READ[name][0](iterates(i, bases[i])), weight=WEIGHTS[i])
        state, outcome = moving.step(SPACE, state, given_)
        model = bases[i] = outcome.model
        last = [*last, model][-len(CLIENTS) :]
    return torch.stack(last).mean(0)


@pytest.mark.parametrize("name", ["chord", "degree 2", "path"])
def test_run_of_stale_clients_converges_to_the_fixed_point(name):
    expected = rests(name)
    errors = [(run(name, rate, rounds) - expected).norm().item() for rate, rounds in ((0.2, 40), (0.1, 80))]
    # The way there is proportional to the rate, and errors of order rate² are left beside it.
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.15)
    assert errors[1] < 0.1 * bias("chord")


@pytest.mark.parametrize("steps", [4, 7])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_fit_velocity_converges_to_that_of_the_smooth_path(n, steps):
    r"""For a curvature h and $z = \eta h$: $D_n(z) = K \log(1 - z) + O(z^{n+1})$, in rational arithmetic.

    $(1 - z)^k = \sum_j \binom{k}{j} (-z)^j$ is a polynomial of degree n in k up to $z^n$, which the fit reproduces.
    """
    z = sympy.symbols("z")
    theta = [sympy.expand((1 - z) ** k) for k in range(steps + 1)]
    places = [sympy.Rational(k, steps) for k in range(steps + 1)]
    rows = [weights(n, u) for u in places]
    free = sympy.Matrix([row[1:n] for row in rows])
    left = sympy.Matrix([t - row[0] * theta[0] - row[n] * theta[-1] for t, row in zip(theta, rows, strict=True)])
    control = list((free.T * free).LUsolve(free.T * left)) if n > 1 else []
    velocity_ = sympy.expand(n * ([*control, theta[-1]][0] - theta[0]))
    smooth = [0, *(sympy.Rational(-steps, j) for j in range(1, n + 2))]
    found = [velocity_.coeff(z, j) for j in range(n + 2)]
    assert found[: n + 1] == smooth[: n + 1]
    assert found[n + 1] != smooth[n + 1]


def test_bias_of_quadratic_fit_is_a_known_fraction_of_the_chord_bias():
    for steps in (5, 20):
        errors = {}
        for name in ("chord", "degree 2"):
            rates = (1e-4, 1e-5)
            places = [balance([velocity(i, name, rate, steps) for i in CLIENTS]) for rate in rates]
            # The bias is proportional to the local rate; twice the smaller, less the larger, is free of its square.
            errors[name] = (10 * (places[1] - OPTIMUM) - 0.1 * (places[0] - OPTIMUM)) / 9
        assert relative(errors["chord"], -(steps - 1) * errors["degree 2"]) <= 1e-2
