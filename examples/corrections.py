"""Compare corrections of stale updates from two clients with different optima.

Each client has a quadratic loss in the plane. The clients alternate, and every update starts from the model of `delay`
versions ago. The script prints the distance of each method to the joint optimum after 50 updates. It also prints the
regret of `AutoThreshold`, relative to the best fixed threshold, and draws the trajectories.

    python examples/corrections.py
"""

import argparse
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from manifoldagg.corrections import (
    AutoThreshold,
    Correction,
    DelayCompensated,
    Frame,
    OrthoDC,
    Position,
    Tangent,
    calibrate,
)
from manifoldagg.manifolds import Flat

PLANE = Flat(2)
DELAYS = (1, 3, 10)
UPDATES, LOCAL_STEPS, LOCAL_RATE, SERVER_RATE = 50, 5, 0.2, 0.5
FIXED = ("ASGD = OrthoDC(-1)", "OrthoDC(0)", "OrthoDC(1)")
METHODS: dict[str, Correction] = {
    "FedAsync": Position(),
    "ASGD = OrthoDC(-1)": Tangent(),
    "DC-ASGD": DelayCompensated(0.5),
    "OrthoDC(0)": OrthoDC(0.0),
    "OrthoDC(1)": OrthoDC(1.0),
    "AutoThreshold": AutoThreshold(),
}


@dataclass(frozen=True)
class Problem:
    r"""Clients with the losses $\frac12 (x - m_i)^\top H_i (x - m_i)$."""

    hessians: tuple[Tensor, ...]
    minima: tuple[Tensor, ...]
    start: Tensor

    @property
    def optimum(self) -> Tensor:
        """The minimum of the sum of the losses."""
        pulls = [h @ m for h, m in zip(self.hessians, self.minima, strict=True)]
        return torch.linalg.solve(torch.stack(self.hessians).sum(0), torch.stack(pulls).sum(0))

    def loss(self, x: Tensor, client: int) -> Tensor:
        """Return the loss of one client at points (..., 2)."""
        away = x - self.minima[client]
        return (away @ self.hessians[client] * away).sum(-1) / 2

    def train(self, client: int, x: Tensor) -> Tensor:
        """Take `LOCAL_STEPS` steps of gradient descent from `x`."""
        for _ in range(LOCAL_STEPS):
            x = x - LOCAL_RATE * self.hessians[client] @ (x - self.minima[client])
        return x


def problem(seed: int) -> Problem:
    """Draw a problem at random.

    The curvatures are 1 and 0.1 to 0.5 along random axes. The minima are near (1, 0) and (-1, 0), and the start has the
    distance 3 from the origin.
    """
    draw = np.random.default_rng(seed)
    hessians, minima = [], []
    for client in range(2):
        a, flat = draw.uniform(0, math.pi), 10 ** draw.uniform(-1, -0.3)
        axes = torch.tensor([[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]], dtype=torch.float64)
        hessians.append(axes @ torch.tensor([1.0, flat], dtype=torch.float64).diag() @ axes.T)
        minima.append(polar(1.0, math.pi * client + draw.uniform(-0.5, 0.5)))
    return Problem(tuple(hessians), tuple(minima), polar(3.0, draw.uniform(0, 2 * math.pi)))


def polar(radius: float, angle: float) -> Tensor:
    """Return the point with these polar coordinates."""
    return radius * torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)


Turns = Callable[[int], int]


def take_turns(update: int) -> int:
    """Return the client of an update if both clients are equally fast."""
    return update % 2


def by_chance(seed: int) -> Turns:
    """Return a random order of the clients. Each update comes from either client with probability 1/2."""
    order = np.random.default_rng(seed + 1000).integers(2, size=UPDATES).tolist()
    return lambda update: order[update]


def run(task: Problem, correction: Correction, delay: int, turns: Turns = take_turns) -> Tensor:
    """Run a correction and return the models of the server, (UPDATES + 1, 2)."""
    models, state = [task.start], None
    for update in range(UPDATES):
        base, current = models[max(0, update - delay)], models[-1]
        displacement = task.train(turns(update), base) - base
        corrected = correction.apply(Frame.of(PLANE, base, current, displacement[None]), state)
        state = corrected.state
        models.append(current + SERVER_RATE * corrected.displacements()[0])
    return torch.stack(models)


def run_orthofl(task: Problem, delay: int, turns: Turns = take_turns, rate: float = 0.6, power: float = 0.5) -> Tensor:
    """Run OrthoFL's moving average and return the models of the server.

    Each client continues from its own calibrated model of `delay` versions ago.
    """
    models = [task.start]
    handed = [[(0, task.start)], [(0, task.start)]]
    for update in range(UPDATES):
        client, current = turns(update), models[-1]
        version, start = next(job for job in reversed(handed[client]) if job[0] <= max(0, update - delay))
        model = task.train(client, start)
        weight = rate * (update - version + 1) ** -power
        models.append((1 - weight) * current + weight * model)
        handed[client].append((update + 1, calibrate(model, current - models[version], model - start)))
    return torch.stack(models)


def distance(task: Problem, models: Tensor) -> float:
    """Return the distance of the last model to the joint optimum."""
    return float((models[-1] - task.optimum).norm())


def distances(
    seed: int, delay: int, *, chance: bool = False, names: Iterable[str] = tuple(METHODS)
) -> dict[str, float]:
    """Return the final distance of each correction to the joint optimum."""
    task, turns = problem(seed), by_chance(seed) if chance else take_turns
    return {name: distance(task, run(task, METHODS[name], delay, turns)) for name in names}


def regret(found: dict[str, float]) -> float:
    """Return the regret of `AutoThreshold`: its excess over the best fixed threshold, relative to the spread."""
    fixed = [found[name] for name in FIXED]
    return (found["AutoThreshold"] - min(fixed)) / (max(fixed) - min(fixed))


def table(seeds: int) -> tuple[str, dict[str, list[float]]]:
    """Return a table of median distances and median regrets, and the median distances by method."""
    middle = statistics.median
    turns = {delay: [distances(seed, delay) for seed in range(seeds)] for delay in DELAYS}
    lines = [f"distance to the joint optimum after {UPDATES} updates, median of {seeds} problems"]
    lines.append(f"{'':<26}" + "".join(f"{f'delay {delay}':>10}" for delay in DELAYS))
    medians = {name: [middle(found[name] for found in turns[delay]) for delay in DELAYS] for name in METHODS}
    tasks = [problem(seed) for seed in range(seeds)]
    medians["OrthoFL"] = [middle(distance(task, run_orthofl(task, delay)) for task in tasks) for delay in DELAYS]
    lines += [f"{name:<26}" + "".join(f"{value:>10.3f}" for value in values) for name, values in medians.items()]
    lines += ["", "median regret of AutoThreshold, in parts of the spread of fixed thresholds"]
    names = ("AutoThreshold", *FIXED)
    chance = {delay: [distances(seed, delay, chance=True, names=names) for seed in range(seeds)] for delay in DELAYS}
    for label, runs in (("clients take turns", turns), ("clients come by chance", chance)):
        lines.append(f"{label:<26}" + "".join(f"{middle(map(regret, runs[delay])):>10.1%}" for delay in DELAYS))
    return "\n".join(lines), medians


def draw(task: Problem, path: Path) -> None:
    """Draw the contours of the two losses and the trajectory of each method, with one panel for each delay."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = {
        "FedAsync": ("tab:green", 1.2),
        "ASGD = OrthoDC(-1)": ("tab:blue", 1.2),
        "DC-ASGD": ("tab:cyan", 1.2),
        "OrthoDC(0)": ("tab:orange", 1.2),
        "OrthoDC(1)": ("tab:red", 1.2),
        "OrthoFL": ("tab:purple", 1.2),
        "AutoThreshold": ("black", 2.0),
    }
    corners = torch.stack([task.start, task.optimum, *task.minima])
    x, y = ((corners.amin(0) + corners.amax(0)) / 2).tolist()
    span = float((corners.amax(0) - corners.amin(0)).max()) / 2 + 0.6
    axis = torch.linspace(-4 * span, 4 * span, 321, dtype=torch.float64)
    xs, ys = torch.meshgrid(axis, axis, indexing="xy")
    grid = torch.stack([xs, ys], -1)
    size = 5.2
    figure, panels = plt.subplots(
        1, len(DELAYS), figsize=(size * len(DELAYS), size + 0.8), layout="constrained", sharey=True
    )
    for panel, delay in zip(panels, DELAYS, strict=True):
        for client, colour in enumerate(("goldenrod", "slategray")):
            levels = [0.05, 0.2, 0.5, 1.0, 1.75, 2.75, 4.0]
            panel.contour(
                xs.numpy(),
                ys.numpy(),
                task.loss(grid, client).numpy(),
                levels=levels,
                colors=colour,
                linewidths=0.8,
                alpha=0.45,
                zorder=1,
            )
            name = f"minimum of client {'AB'[client]}"
            panel.plot(*task.minima[client].tolist(), "^", color=colour, ms=10, mec="black", zorder=5, label=name)
        panel.plot(*task.start.tolist(), "s", color="white", mec="black", ms=8, label="start", zorder=6)
        panel.plot(*task.optimum.tolist(), "*", color="gold", ms=17, mec="black", label="joint optimum", zorder=6)
        for name, (colour, width) in shown.items():
            models = run_orthofl(task, delay) if name == "OrthoFL" else run(task, METHODS[name], delay)
            # The line shows only every second model, because the model oscillates between the two clients.
            panel.plot(*models[::2].T.tolist(), color=colour, linewidth=width, label=name, alpha=0.85, zorder=3)
            panel.plot(*models[-1].tolist(), "o", color=colour, ms=7, mec="white", zorder=7)
        panel.set(title=f"delay {delay}", aspect="equal", xlabel="first parameter")
        panel.set(xlim=(x - span, x + span), ylim=(y - span, y + span))
    panels[0].set_ylabel("second parameter")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    """Print the table and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/corrections.png"), help="the path of the figure (PNG)")
    parser.add_argument("--seeds", type=int, default=20, help="the number of random problems")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the problem in the figure")
    options = parser.parse_args()
    text, medians = table(options.seeds)
    print(text)
    path = options.out.with_suffix(".png")
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(problem(options.seed), path)
    print(f"\nwrote {path}")
    plain, chosen = medians["ASGD = OrthoDC(-1)"][-1], medians["AutoThreshold"][-1]
    print(
        f"Seen: {DELAYS[-1]} versions late, plain updates end {plain:.2g} from the optimum, AutoThreshold {chosen:.2g}."
    )


if __name__ == "__main__":
    main()
