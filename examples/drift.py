"""What a server makes of the way that clients went, and not only of where they came.

First two clients in the plane whose quadratic losses disagree: a real server, trained by `Trajectory`. As its rate
falls to zero it comes to rest where its steps balance, which along chords is not the optimum of the sum. Then digits:
softmax regression over 20 clients that hold few labels each, with exponential delays. All methods of the second table
are run side by side, so that one pass of a client's data serves them all; the server's steps are those of the rules.

    python examples/drift.py

`--grid` searches the rates of the second table again, which takes minutes.
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

# Two clients in the plane.

LOCAL_STEPS = 10
LOCAL_RATE = 0.2
PLANE = Flat(2)
HESSIANS = (torch.tensor([[1.9, 0.3], [0.3, 0.15]]), torch.tensor([[0.2, 0.0], [0.0, 1.2]]))
MINIMA = (torch.tensor([-1.0, 1.2]), torch.tensor([1.2, -0.8]))


@dataclass(frozen=True)
class Way:
    """One way to use local training: what a client sends, and how the server goes along it.

    Attributes:
        rule: of the server, given its rate.
        trainer: of the clients, given how many steps they take.
        fewer: whether steps become fewer as the rate falls, at full weight, instead of counting for less.
    """

    rule: Callable[[Callable[[int], float]], Rule]
    trainer: Callable[[int], clients.Local]
    fewer: bool = False


def local(steps: int) -> clients.Local:
    """Local training that sends its end."""
    return clients.Local(steps=steps, optimizer=torch.optim.SGD, rate=LOCAL_RATE)


def fitted(degree: int) -> Callable[[int], clients.Local]:
    """Local training that sends a Bézier curve."""
    return lambda steps: clients.Trajectory(degree=degree, steps=steps, optimizer=torch.optim.SGD, rate=LOCAL_RATE)


def corners(steps: int) -> clients.Local:
    """Local training that sends its path."""
    return clients.Trajectory(pieces=LOCAL_STEPS, steps=steps, optimizer=torch.optim.SGD, rate=LOCAL_RATE)


WAYS = {
    "chord": Way(ASGD, local),
    # Of less than one step the server takes a part.
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
    """The loss of one client at points (..., 2)."""
    hessian, minimum = data
    away = x - minimum
    return (away @ hessian * away).sum(-1) / 2


def optimum() -> Tensor:
    """Where the sum of the two losses is least."""
    pulls = sum(h @ m for h, m in zip(HESSIANS, MINIMA, strict=True))
    return torch.linalg.solve(sum(HESSIANS), pulls)


def settle(way: Way, updates: int) -> tuple[Tensor, int]:
    """The model after clients have taken turns, its rate falling from .5 to 0; and how many gradients that took."""

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
    """Where each way comes to rest, and its gradients."""
    return {name: settle(way, updates) for name, way in WAYS.items()}


def draw(found: dict[str, tuple[Tensor, int]], path: Path) -> None:
    """The local paths from the joint optimum, their chords and fits; and where each way rests."""
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
    """The iterates of gradient descent."""
    found = [x]
    for _ in range(LOCAL_STEPS):
        found.append(found[-1] - LOCAL_RATE * HESSIANS[client] @ (found[-1] - MINIMA[client]))
    return torch.stack(found)


def control_points(degree: int, steps: int) -> Tensor:
    """The matrix that makes the control points after the start of iterates: (degree, steps + 1)."""
    b = basis(degree, torch.linspace(0, 1, steps + 1, dtype=torch.float64))
    ends = torch.zeros(2, steps + 1, dtype=torch.float64)
    ends[0, 0] = ends[1, -1] = 1
    rest = torch.eye(steps + 1, dtype=torch.float64) - b[:, [0, degree]] @ ends
    return torch.cat([torch.linalg.pinv(b[:, 1:degree]) @ rest, ends[1:]]).float()


# Digits.

CLIENTS = 20
STEPS = 20
PIECES = 10
FEATURES = 65
LABELS = 10
FIT = control_points(2, STEPS)


@dataclass(frozen=True)
class Method:
    """A column of the second table.

    Attributes:
        rule: of the server, given its rate.
        points: what of the iterates less the start, (steps + 1, P), a client sends.
        slows: whether the local rate falls with the server's.
        fewer: whether local steps do.
    """

    rule: Callable[[Callable[[int], float]], Rule]
    points: Callable[[Tensor], Tensor]
    slows: bool = False
    fewer: bool = False


def curved(**options: object) -> Callable[[Callable[[int], float]], Rule]:
    """AsyncBezier without a correction."""
    return lambda rate: AsyncBezier(rate, threshold=-1.0, **options)


def end(path: Tensor) -> Tensor:
    """A model alone."""
    return path[-1:]


def fit(path: Tensor) -> Tensor:
    """The control points of a quadratic curve."""
    return FIT @ path


def pieces(path: Tensor) -> Tensor:
    """Points of the path."""
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
    """Softmax regression on digits, whose clients hold few labels each; each client counts alike.

    Args:
        decay: of the weights in the loss. Without it a model that fits every client exists, at infinity.
        seed: of who has what and who comes when.
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
        """Of the client's loss at many models at once, (runs, features, labels)."""
        x, y = self.data[client]
        scores = (x @ w.transpose(0, 1).reshape(FEATURES, -1)).view(len(x), len(w), LABELS)
        wrong = (scores.softmax(-1) - one_hot(y, LABELS)[:, None]) / len(x)
        return (x.T @ wrong.view(len(x), -1)).view(FEATURES, len(w), LABELS).transpose(0, 1) + self.decay * w

    def loss(self, w: Tensor) -> Tensor:
        """The mean of the clients' losses at one model."""
        return sum(cross_entropy(x @ w, y) for x, y in self.data) / len(self.data) + self.decay / 2 * w.square().sum()

    def least(self) -> float:
        """The least mean loss."""
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
        """Who comes, in order of time: each client again after an exponential delay."""
        generator = np.random.default_rng([self.seed, 1])
        due = [(generator.exponential(), client) for client in range(len(self.data))]
        heapq.heapify(due)
        for _ in range(updates):
            now, client = due[0]
            yield client
            heapq.heapreplace(due, (now + generator.exponential(), client))


def falling(rate: float, updates: int) -> Callable[[int], float]:
    """A rate that falls to zero on a line."""
    return lambda version: rate * (1 - version / updates)


def compare(digits: Digits, settings: list[Setting], updates: int) -> tuple[list[float], list[float]]:
    """The loss over the least one, and the gradients an update, of (method, local rate, server rate) each."""
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
            # A part of a step is one of a smaller rate.
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
"""The best local rates and server rates of `GRID`, by `--grid`."""


def search(decay: float, seed: int, updates: int) -> dict[str, tuple[float, float]]:
    """The best local rate and server rate of each method on a seed."""
    settings = [(name, *rates) for name in METHODS for rates in GRID]
    losses, _ = compare(Digits(decay, seed), settings, updates)
    found = sorted(zip(losses, settings, strict=True), reverse=True)
    return {name: (local_rate, rate) for _, (name, local_rate, rate) in found}


def table(seed: int, updates: int, best: dict[float, dict[str, tuple[float, float]]]) -> str:
    """The losses and gradients of the methods at their best rates."""
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
    """Print both tables, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/drift.png"), help="the picture, a PNG")
    parser.add_argument("--seed", type=int, default=0, help="of the digits")
    parser.add_argument("--grid", action="store_true", help="search the rates of the digits again, on seed 0")
    parser.add_argument("--quick", action="store_true", help="a few updates, to see that it runs")
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
