"""Compare servers that use the local training path of a client with servers that use only its final model.

The first experiment has two clients in the plane with different quadratic losses. A server receives their updates while
its rate decreases to zero. Its model converges to the point where the updates balance. For chords, this point is not
the optimum of the sum of the losses.

The second experiment trains softmax regression on the digits with 20 clients, few labels per client, and exponential
delays. All methods of the second table run in parallel and share the passes over the data. The server steps are those
of the rules.

    python examples/drift.py

The option `--grid` repeats the search for the rates of the second table, which takes minutes.
"""

import argparse
import heapq
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from manifoldagg.curves.bernstein import basis
from manifoldagg.federated import Rule, Server, Update, clients
from manifoldagg.federated.rules import ASGD, AsyncBezier, AsyncKrylov
from manifoldagg.manifolds import Flat
from manifoldagg.simulation import dirichlet_partition

# The first experiment: two clients in the plane.

LOCAL_STEPS = 10
LOCAL_RATE = 0.2
PLANE = Flat(2)
HESSIANS = (torch.tensor([[1.9, 0.3], [0.3, 0.15]]), torch.tensor([[0.2, 0.0], [0.0, 1.2]]))
MINIMA = (torch.tensor([-1.0, 1.2]), torch.tensor([1.2, -0.8]))


@dataclass(frozen=True)
class Way:
    """A method of the first experiment.

    Attributes:
        rule: a function that returns the rule of the server for a rate.
        trainer: a function that returns the trainer of the clients for a number of local steps.
        fewer: whether a lower rate reduces the number of local steps instead of the weight of an update.
    """

    rule: Callable[[Callable[[int], float]], Rule]
    trainer: Callable[[int], clients.Local]
    fewer: bool = False


def local(steps: int) -> clients.Local:
    """Return a trainer that sends the final model."""
    return clients.Local(steps=steps, optimizer=torch.optim.SGD, rate=LOCAL_RATE)


def fitted(degree: int) -> Callable[[int], clients.Local]:
    """Return a function that makes a trainer which sends a Bézier curve fitted to its path."""
    return lambda steps: clients.Trajectory(degree=degree, steps=steps, optimizer=torch.optim.SGD, rate=LOCAL_RATE)


def corners(steps: int) -> clients.Local:
    """Return a trainer that sends its path."""
    return clients.Trajectory(pieces=LOCAL_STEPS, steps=steps, optimizer=torch.optim.SGD, rate=LOCAL_RATE)


WAYS = {
    "chord": Way(ASGD, local),
    # If the rate requires less than one local step, the server applies a fraction of the step.
    "fewer steps, full weight": Way(
        lambda rate: ASGD(lambda version: min(1.0, rate(version) * LOCAL_STEPS)), local, fewer=True
    ),
    "fit of degree 2": Way(lambda rate: AsyncBezier(rate, threshold=-1.0, pull_back="none"), fitted(2)),
    "fit of degree 3": Way(lambda rate: AsyncBezier(rate, threshold=-1.0, pull_back="none"), fitted(3)),
    "fit of degree 2, pulled back": Way(lambda rate: AsyncBezier(rate, threshold=-1.0), fitted(2)),
    "path": Way(lambda rate: AsyncBezier(rate, threshold=-1.0, pull_back="none", polygon=True), corners),
}


CLIENT_DATA = tuple(zip(HESSIANS, MINIMA, strict=True))


def loss(x: Tensor, data: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of one client at points (..., 2)."""
    hessian, minimum = data
    away = x - minimum
    return (away @ hessian * away).sum(-1) / 2


def optimum() -> Tensor:
    """Return the minimum of the sum of the two losses."""
    pulls = sum(h @ m for h, m in zip(HESSIANS, MINIMA, strict=True))
    return torch.linalg.solve(sum(HESSIANS), pulls)


def settle(way: Way, updates: int) -> tuple[Tensor, int]:
    """Train with alternating clients while the rate decreases from 0.5 to 0. Return the model and the gradients."""

    def rate(version: int) -> float:
        return 0.5 * (1 - version / updates)

    server = Server(PLANE, way.rule(rate), torch.zeros(2))
    tickets = [server.dispatch(client) for client in (0, 1)]
    gradients = 0
    for update in range(updates):
        client = update % 2
        ticket = tickets[client]
        steps = math.ceil(rate(ticket.version) * LOCAL_STEPS) if way.fewer else LOCAL_STEPS
        gradients += steps
        data = [CLIENT_DATA[client]]
        payload = way.trainer(steps).train(PLANE, ticket.message, loss, data, None, generator=torch.Generator())
        server.receive(ticket, payload).check()
        tickets[client] = server.dispatch(client)
    return server.model, gradients


def rests(updates: int) -> dict[str, tuple[Tensor, int]]:
    """Return the final model and the number of gradients of each method."""
    return {name: settle(way, updates) for name, way in WAYS.items()}


def draw(found: dict[str, tuple[Tensor, int]], path: Path) -> None:
    """Draw the local paths from the joint optimum with their chords and fits, and the final model of each method."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11.5, 6), layout="constrained")
    centre = optimum()
    axis = torch.linspace(-2.5, 2.5, 201)
    xs, ys = torch.meshgrid(axis, axis, indexing="xy")
    grid = torch.stack([xs, ys], -1)
    for client, colour in enumerate(("goldenrod", "slategray")):
        for panel in (left, right):
            panel.contour(xs, ys, loss(grid, CLIENT_DATA[client]), levels=40, colors=colour, linewidths=0.8, alpha=0.4)
            panel.plot(*MINIMA[client].tolist(), "^", color=colour, ms=9, mec="black")
        right.plot([], [], color=colour, lw=0.8, label=f"loss of client {'AB'[client]}")
        steps = local_path(client, centre)
        left.plot(*steps.T.tolist(), ".-", color=colour, lw=1, label=f"path of client {'AB'[client]}")
        left.plot(*steps[[0, -1]].T.tolist(), "--", color="tab:blue", lw=1.2, label="chord" if client else None)
        control = control_points(2, LOCAL_STEPS) @ steps
        curve = basis(2, torch.linspace(0, 1, 50)).float() @ torch.cat([centre[None], control])
        left.plot(*curve.T.tolist(), color="tab:red", lw=1.2, label="fit of degree 2" if client else None)
    for panel in (left, right):
        panel.plot(*centre.tolist(), "*", color="gold", ms=16, mec="black", label="joint optimum", zorder=4)
        panel.set(aspect="equal", xlabel="first parameter", ylabel="second parameter")
    for (name, (model, _)), mark in zip(found.items(), "oXsDvP", strict=True):
        right.plot(*model.tolist(), mark, ms=8, mec="white", label=name, zorder=5)
    away = 1.3 * max(float((model - centre).abs().max()) for model, _ in found.values())
    x, y = centre.tolist()
    right.set(xlim=(x - away, x + away), ylim=(y - away, y + away), title="convergence points of the server")
    left.set(xlim=(-1.0, 0.3), ylim=(-1.1, 0.0), title="training paths from the joint optimum")
    for panel in (left, right):
        panel.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def local_path(client: int, x: Tensor) -> Tensor:
    """Return the iterates of gradient descent on the loss of a client."""
    found = [x]
    for _ in range(LOCAL_STEPS):
        found.append(found[-1] - LOCAL_RATE * HESSIANS[client] @ (found[-1] - MINIMA[client]))
    return torch.stack(found)


def control_points(degree: int, steps: int) -> Tensor:
    """Return the matrix (degree, steps + 1) that maps iterates to the control points after the start."""
    b = basis(degree, torch.linspace(0, 1, steps + 1, dtype=torch.float64))
    ends = torch.zeros(2, steps + 1, dtype=torch.float64)
    ends[0, 0] = ends[1, -1] = 1
    rest = torch.eye(steps + 1, dtype=torch.float64) - b[:, [0, degree]] @ ends
    return torch.cat([torch.linalg.pinv(b[:, 1:degree]) @ rest, ends[1:]]).float()


# The second experiment: digits.

CLIENTS = 20
STEPS = 20
PIECES = 10
FEATURES = 65
LABELS = 10
FIT = control_points(2, STEPS)


@dataclass(frozen=True)
class Method:
    """A method of the second experiment, which is a row of the second table.

    Attributes:
        rule: a function that returns the rule of the server for a rate.
        points: a function that selects what a client sends from its iterates minus the start, (steps + 1, P).
        slows: whether the local rate decreases with the server rate.
        fewer: whether the number of local steps decreases with the server rate.
    """

    rule: Callable[[Callable[[int], float]], Rule]
    points: Callable[[Tensor], Tensor]
    slows: bool = False
    fewer: bool = False


def curved(**options: object) -> Callable[[Callable[[int], float]], Rule]:
    """Return a function that makes `AsyncBezier` without a correction for a rate."""
    return lambda rate: AsyncBezier(rate, threshold=-1.0, **options)


def end(path: Tensor) -> Tensor:
    """Return the final model."""
    return path[-1:]


def fit(path: Tensor) -> Tensor:
    """Return the control points of a quadratic curve fitted to the path."""
    return FIT @ path


def pieces(path: Tensor) -> Tensor:
    """Return `PIECES` points of the path."""
    return path[:: STEPS // PIECES][1:]


METHODS = {
    "chord": Method(ASGD, end),
    "chord, local rate falling": Method(ASGD, end, slows=True),
    "fewer steps, full weight": Method(lambda rate: ASGD(1.0), end, fewer=True),
    "fit, pulled back": Method(curved(), fit),
    "fit": Method(curved(pull_back="none"), fit),
    "path, 10 pieces": Method(curved(pull_back="none", polygon=True), pieces),
    "path, while it agrees": Method(curved(pull_back="conflict_free_prefix", polygon=True), pieces),
    "fit, curve_weight auto": Method(curved(pull_back="none", curve_weight="auto"), fit),
    "chord, path read": Method(lambda rate: AsyncKrylov(rate, granularity="model"), pieces),
}
LOCAL_RATES = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4)
SERVER_RATES = (0.25, 0.5, 1.0)
GRID = tuple(itertools.product(LOCAL_RATES, SERVER_RATES))
Setting = tuple[str, float, float]


class Digits:
    """Softmax regression on the digits. Each client has few labels, and all clients have equal weights.

    Args:
        decay: the weight decay of the loss. Without weight decay, the infimum of the loss is only reached at infinity.
        seed: the seed of the partition and of the delays.
    """

    def __init__(self, decay: float, seed: int) -> None:
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        generator = np.random.default_rng(seed)
        parts = dirichlet_partition(labels, CLIENTS, 0.1, generator)
        inputs = torch.from_numpy(np.c_[pixels / 16, np.ones(len(pixels))]).float()
        targets = torch.from_numpy(labels).long()
        self.decay = decay
        self.seed = seed
        self.data = [(inputs[part], targets[part]) for part in parts if len(part)]

    def gradient(self, w: Tensor, client: int) -> Tensor:
        """Return the gradient of the loss of a client at several models at once, (runs, features, labels)."""
        x, y = self.data[client]
        scores = (x @ w.transpose(0, 1).reshape(FEATURES, -1)).view(len(x), len(w), LABELS)
        wrong = (scores.softmax(-1) - one_hot(y, LABELS)[:, None]) / len(x)
        return (x.T @ wrong.view(len(x), -1)).view(FEATURES, len(w), LABELS).transpose(0, 1) + self.decay * w

    def loss(self, w: Tensor) -> Tensor:
        """Return the mean of the losses of all clients at one model."""
        return sum(cross_entropy(x @ w, y) for x, y in self.data) / len(self.data) + self.decay / 2 * w.square().sum()

    def least(self) -> float:
        """Return the minimum of the mean loss."""
        w = torch.zeros(FEATURES, LABELS, requires_grad=True)
        descent = torch.optim.LBFGS([w], max_iter=1000, tolerance_grad=1e-6, tolerance_change=0, history_size=30,
                                    line_search_fn="strong_wolfe")  # fmt: skip

        def closure() -> Tensor:
            descent.zero_grad()
            value = self.loss(w)
            value.backward()
            return value

        descent.step(closure)
        return self.loss(w.detach()).item()

    def arrivals(self, updates: int) -> Iterable[int]:
        """Yield the clients in order of their completion times. Each task of a client has an exponential delay."""
        generator = np.random.default_rng([self.seed, 1])
        due = [(generator.exponential(), client) for client in range(len(self.data))]
        heapq.heapify(due)
        for _ in range(updates):
            now, client = due[0]
            yield client
            heapq.heapreplace(due, (now + generator.exponential(), client))


def falling(rate: float, updates: int) -> Callable[[int], float]:
    """Return a rate that decreases linearly to zero."""
    return lambda version: rate * (1 - version / updates)


def compare(digits: Digits, settings: list[Setting], updates: int) -> tuple[list[float], list[float]]:
    """Return the excess loss and the gradients per update for each setting (method, local rate, server rate)."""
    space = Flat(FEATURES * LABELS)
    methods = [METHODS[name] for name, _, _ in settings]
    schedules = [falling(rate, updates) for _, _, rate in settings]
    rules = [method.rule(schedule) for method, schedule in zip(methods, schedules, strict=True)]
    rates = torch.tensor([rate for _, rate, _ in settings])
    server = torch.tensor([rate for _, _, rate in settings])
    slows = torch.tensor([method.slows for method in methods])
    fewer = torch.tensor([method.fewer for method in methods])
    models = torch.zeros(len(settings), FEATURES * LABELS)
    states = [rule.init(space, model) for rule, model in zip(rules, models, strict=True)]
    started = dict.fromkeys(range(len(digits.data)), (models, 0))
    taken = torch.zeros(len(settings))
    for version, client in enumerate(digits.arrivals(updates)):
        bases, since = started[client]
        left = 1 - since / updates
        local_rates = torch.where(slows, rates * left, rates)
        steps = torch.where(fewer, (server * left).clamp(max=1) * STEPS, torch.tensor(float(STEPS)))
        theta = bases.view(-1, FEATURES, LABELS)
        path = [bases]
        for k in range(STEPS):
            # A fraction of a step is a step with a smaller rate.
            share = (local_rates * (steps - k).clamp(0, 1))[:, None, None]
            theta = theta - share * digits.gradient(theta, client)
            path.append(theta.flatten(1))
        paths = torch.stack(path, dim=1) - bases[:, None]
        taken += steps.ceil()
        moved = []
        for i, (method, rule) in enumerate(zip(methods, rules, strict=True)):
            given = Update(client, bases[i], models[i], bases[i] + method.points(paths[i]), staleness=version - since)
            states[i], outcome = rule.step(space, states[i], given)
            moved.append(outcome.model)
        models = torch.stack(moved)
        started[client] = (models, version + 1)
    least = digits.least()
    losses = [digits.loss(model.view(FEATURES, LABELS)).item() - least for model in models]
    return losses, (taken / updates).tolist()


DECAYS = (0.0, 0.01)
BEST: dict[float, dict[str, tuple[float, float]]] = {
    0.0: {name: (0.2, 1.0) if "agrees" in name else (0.4, 1.0) for name in METHODS},
    0.01: {
        "chord": (0.0125, 1.0),
        "chord, local rate falling": (0.0125, 1.0),
        "fewer steps, full weight": (0.05, 0.25),
        "fit, pulled back": (0.0125, 1.0),
        "fit": (0.0125, 1.0),
        "path, 10 pieces": (0.05, 0.25),
        "path, while it agrees": (0.05, 0.5),
        "fit, curve_weight auto": (0.0125, 1.0),
        "chord, path read": (0.025, 1.0),
    },
}
"""The best local rates and server rates of `GRID`, as computed by `--grid`."""


def search(decay: float, seed: int, updates: int) -> dict[str, tuple[float, float]]:
    """Return the best local rate and server rate of each method for a seed."""
    settings = [(name, *rates) for name in METHODS for rates in GRID]
    losses, _ = compare(Digits(decay, seed), settings, updates)
    found = sorted(zip(losses, settings, strict=True), reverse=True)
    return {name: (local_rate, rate) for _, (name, local_rate, rate) in found}


def table(seed: int, updates: int, best: dict[float, dict[str, tuple[float, float]]]) -> str:
    """Return a table of the losses and gradients of the methods at their best rates."""
    found = {}
    for decay in DECAYS:
        settings = [(name, *best[decay][name]) for name in METHODS]
        found[decay] = list(zip(*compare(Digits(decay, seed), settings, updates), settings, strict=True))
    lines = [f"digits, softmax regression, {updates} updates of {STEPS} local steps: loss over the least, seed {seed}"]
    lines.append(f"{'':<28}" + "".join(f"{f'decay {decay:g}':>12}{'rates':>12}{'gradients':>11}" for decay in DECAYS))
    for i, name in enumerate(METHODS):
        cells = [
            f"{loss_:>12.4f}{f'{setting[1]:g}, {setting[2]:g}':>12}{gradients:>11.1f}"
            for loss_, gradients, setting in (found[decay][i] for decay in DECAYS)
        ]
        lines.append(f"{name:<28}" + "".join(cells))
    return "\n".join(lines)


def main() -> None:
    """Print both tables and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/drift.png"), help="the path of the figure (PNG)")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the second experiment")
    parser.add_argument("--grid", action="store_true", help="search the rates of the second experiment with seed 0")
    parser.add_argument("--quick", action="store_true", help="a few updates that test the script")
    options = parser.parse_args()
    plane, updates = (12, 10) if options.quick else (200, 1500)
    found = rests(plane)
    print(f"two clients that disagree: distance from the joint optimum after {plane} updates, and gradients an update")
    for name, (model, gradients) in found.items():
        print(f"{name:<30}{(model - optimum()).norm().item():>8.4f}{gradients / plane:>8.1f}")
    path = options.out.with_suffix(".png")
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(found, path)
    print(f"wrote {path}")
    best = {decay: search(decay, 0, updates) for decay in DECAYS} if options.grid else BEST
    print(f"\n{table(options.seed, updates, best)}")
    chord, path_ = ((found[name][0] - optimum()).norm().item() for name in ("chord", "path"))
    print(f"\nSeen: a server that goes along chords rests {chord:.2g} from the joint optimum, along paths {path_:.2g}.")


if __name__ == "__main__":
    main()
