r"""Convergence rates and bounds of four papers, compared with simulated runs on quadratic losses.

    python benchmarks/papers/theory.py [--seeds 5] [--longest 4096]

The clients have losses $f_i(\theta) = \frac12 (\theta - a_i)^\top H_i (\theta - a_i)$ with diagonal $H_i$, so the
smoothness L is 1 and the gradient of the mean loss f is known exactly. Gradients have normal noise.

- MasFL, Theorem 1: with $\beta = \sqrt{SK/T}$ and $\gamma = \beta / 4L$, the mean of $\|\nabla f\|^2$ over T server
  steps is $O(T^{-1/2})$.
- MasFL, Theorem 2: with the rates of AdaMasFL, the mean of $\|\nabla f\|$ is $O(T^{-1/4})$.
- Queue (5) and (12): the mean of $\|\nabla f\|^2$ over updates is at most 8 G, and its mean weighted by the durations
  of the updates is at most 8 H.
- OrthoFL (18): a lower bound of the loss of the baseline minus the loss of OrthoFL after one step.
- Report (63): the mean squared distance after K local steps is at most $5 K^2 \eta_l^2 (4 G^2 + \sigma_l^2)$.
- Manifold, Theorem 1: with $\eta_l \propto 1 / \sqrt T$, the mean of $\|\nabla f\|^2$ is $O(T^{-1/2})$, for AsyncBezier
  and for the tangent and OrthoDC corrections.
- Manifold, Assumption 7: the constants Q and D of corrections, for the stale updates of a run.

The slopes are least-squares fits of the logarithms over the longer half of the runs. `tests/test_papers_theory.py`
tests the same statements on shorter runs.
"""

import argparse
import heapq
import math
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.ticker import NullFormatter, NullLocator
from torch import Tensor

from manifoldagg._io import new_figure
from manifoldagg.corrections import (
    AutoThreshold,
    Correction,
    CorrectionQuality,
    DelayCompensated,
    OrthoDC,
    Position,
    Tangent,
    correction_quality,
)
from manifoldagg.errors import StabilityWarning
from manifoldagg.federated import Server, ServerLimits, clients, rules
from manifoldagg.manifolds import Flat
from manifoldagg.routing import TimeBound, UpdateBound

CLIENTS, SIZE, NOISE = 8, 20, 0.5
"""The number of clients, the number of parameters, and the standard deviation of the noise of a gradient."""
COHORT, STEPS = 2, 2
"""S and K of MasFL."""
COLOURS = ("#0072b2", "#d55e00", "#009e73")


@dataclass(frozen=True)
class Quadratics:
    r"""Quadratic losses of clients, with smoothness 1.

    Args:
        minima: the minima $a_i$ (clients, size).
        curvatures: the diagonals of $H_i$ (clients, size), at most 1.
        noise: the standard deviation of the noise of a gradient, $\sqrt{E \|\xi\|^2}$.
    """

    minima: Tensor
    curvatures: Tensor
    noise: float = NOISE

    @classmethod
    def draw(cls, seed: int, *, spread: float = 1.0, num_clients: int = CLIENTS, size: int = SIZE) -> "Quadratics":
        """Draw losses. With `spread=0`, all clients have the same loss."""
        generator = torch.Generator().manual_seed(seed)
        common = torch.rand(1, size, generator=generator, dtype=torch.float64)
        own = torch.rand(num_clients, size, generator=generator, dtype=torch.float64)
        minima = spread * torch.randn(num_clients, size, generator=generator, dtype=torch.float64) / math.sqrt(size)
        return cls(minima, common + (own - common) * min(1.0, spread))

    def gradient(self, theta: Tensor) -> Tensor:
        """Return the gradient of the mean loss."""
        return (self.curvatures * (theta - self.minima)).mean(0)

    def value(self, theta: Tensor) -> float:
        """Return the mean loss."""
        return float((self.curvatures * (theta - self.minima).square()).sum() / (2 * len(self.minima)))

    @property
    def minimum(self) -> Tensor:
        """The minimum of the mean loss."""
        return (self.curvatures * self.minima).sum(0) / self.curvatures.sum(0)

    def loss(self, client: int) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the loss of a client, with a vector of noise as the batch."""
        a, h = self.minima[client], self.curvatures[client]
        return lambda theta, noise: (h * (theta - a).square()).sum() / 2 + noise @ theta

    def batches(self, count: int, generator: torch.Generator) -> list[Tensor]:
        """Draw the noise of `count` gradients."""
        scale = self.noise / math.sqrt(self.minima.shape[1])
        return [*torch.randn(count, self.minima.shape[1], generator=generator, dtype=torch.float64) * scale]


def start_of(problem: Quadratics, distance: float = 2.0) -> Tensor:
    """Return an initial model at this distance from the minimum."""
    size = problem.minima.shape[1]
    return problem.minimum + distance / math.sqrt(size)


def gradient_norms(
    problem: Quadratics,
    rule: Any,
    trainer: Any,
    num_steps: int,
    seed: int,
    *,
    server_steps: int,
    on_update: Callable[[Tensor, Tensor, Tensor], None] | None = None,
) -> list[float]:
    r"""Run a server with one task per client, and return $\|\nabla f\|$ at each of its versions.

    Tasks complete in a random order, and the client immediately receives the next task.

    Args:
        problem: the losses.
        rule: the rule of the server.
        trainer: the trainer of the clients.
        num_steps: the number of batches of a task.
        seed: the seed of the order and of the noise.
        server_steps: the number T of server steps.
        on_update: a function of the base, the current model and the displacement of each update, before the step.
    """
    generator = torch.Generator().manual_seed(seed)
    limits = ServerLimits(history_size=0, receipt_cache_size=0)
    server = Server(Flat(problem.minima.shape[1]), rule, start_of(problem), weights="uniform", limits=limits)
    count = len(problem.minima)
    tickets = [server.dispatch(client) for client in range(count)]
    states: list[Any] = [None] * count
    norms = [problem.gradient(server.model).norm().item()]
    while server.version < server_steps:
        client = int(torch.randint(count, (), generator=generator))
        batches = problem.batches(num_steps, generator)
        payload = trainer.train(
            server.space, tickets[client].message, problem.loss(client), batches, states[client], generator=generator
        )
        before = server.version
        if on_update is not None:
            start = tickets[client].message.start
            on_update(start, server.model, payload.points[-1] - start)
        server.receive(tickets[client], payload).check()
        if server.version != before:
            norms.append(problem.gradient(server.model).norm().item())
        tickets[client] = server.dispatch(client)
    return norms[:server_steps]


def masfl(server_steps: int, seed: int) -> float:
    r"""Return the mean of $\|\nabla f\|^2$ over a run of MasFL with the rates of its Theorem 1."""
    beta = math.sqrt(COHORT * STEPS / server_steps)
    rule = rules.MasFL(COHORT, beta / 4, beta, clients=CLIENTS)
    trainer = clients.ControlVariate(steps=STEPS, rate=0.01)
    norms = gradient_norms(Quadratics.draw(seed), rule, trainer, STEPS, seed, server_steps=server_steps)
    return float(np.square(norms).mean())


def adamasfl(server_steps: int, seed: int) -> float:
    r"""Return the mean of $\|\nabla f\|$ over a run of AdaMasFL with the rates of Theorem 2."""
    rule = rules.AdaMasFL(COHORT, steps=STEPS, server_steps=server_steps, clients=CLIENTS)
    norms = gradient_norms(Quadratics.draw(seed), rule, clients.Normalised(), STEPS, seed, server_steps=server_steps)
    return float(np.mean(norms))


MANIFOLD: dict[str, Callable[[], Any]] = {
    "AsyncBezier": partial(rules.AsyncBezier, rate=CLIENTS / 2),
    "tangent": partial(rules.ASGD, rate=CLIENTS / 2),
    "OrthoDC": partial(rules.FedOrtho, rate=CLIENTS / 2),
}
"""Rules with a server rate of 1/2 for the weight 1/N."""


def manifold(name: str, server_steps: int, seed: int) -> float:
    r"""Return the mean of $\|\nabla f\|^2$ over a run of a rule of Manifold, with a local rate of $1 / \sqrt T$.

    All clients have the same loss, because the theorem assumes that each client's gradient is unbiased.
    """
    rate = 1 / math.sqrt(server_steps)
    sgd = torch.optim.SGD
    if name == "AsyncBezier":
        trainer: Any = clients.Curve(steps=(STEPS, STEPS), optimizer=sgd, rate=rate)
    else:
        trainer = clients.Local(steps=STEPS, optimizer=sgd, rate=rate)
    problem = Quadratics.draw(seed, spread=0.0)
    norms = gradient_norms(problem, MANIFOLD[name](), trainer, 2 * STEPS, seed, server_steps=server_steps)
    return float(np.square(norms).mean())


CORRECTIONS: dict[str, Correction] = {
    "Tangent": Tangent(),
    "Position": Position(),
    "OrthoDC(0)": OrthoDC(0.0),
    "OrthoDC(1)": OrthoDC(1.0),
    "AutoThreshold": AutoThreshold(),
    "DelayCompensated(2)": DelayCompensated(2.0),
}
"""The corrections whose quality is measured."""


def quality(server_steps: int, seed: int, *, spread: float) -> dict[str, CorrectionQuality]:
    """Measure the quality of each correction for the same updates, which come from a run of ASGD.

    Args:
        server_steps: the number of updates.
        seed: the seed of the losses and of the run.
        spread: the standard deviation of the minima of the clients. With 0, all clients have the same loss.
    """
    problem, updates = Quadratics.draw(seed, spread=spread), []
    gradient_norms(
        problem,
        rules.ASGD(rate=CLIENTS / 2),
        clients.Local(steps=STEPS, optimizer=torch.optim.SGD, rate=0.1),
        STEPS,
        seed,
        server_steps=server_steps,
        on_update=lambda *update: updates.append(update),
    )
    space = Flat(problem.minima.shape[1])
    return {
        name: correction_quality(space, correction, updates, problem.gradient)
        for name, correction in CORRECTIONS.items()
    }


def quality_table(server_steps: int, seeds: int) -> str:
    """Return a table with the constants of each correction, over all updates of all seeds."""
    rows = [
        "| clients | correction | Q | D | median of the ratios | ratios below 0, % |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for label, spread in (("equal losses", 0.0), ("different losses", 1.0)):
        runs = [quality(server_steps, seed, spread=spread) for seed in range(seeds)]
        for name in CORRECTIONS:
            parts = [(run[name].corrected, run[name].transported) for run in runs]
            pooled = CorrectionQuality(*(np.concatenate(part) for part in zip(*parts, strict=True)))
            useful = pooled.transported > 0
            ratios = pooled.corrected[useful] / pooled.transported[useful]
            below = 100 * float((ratios < 0).mean())
            rows.append(
                f"| {label} | {name} | {pooled.q:.2f} | {pooled.d:.2f} | {np.median(ratios):.2f} | {below:.1f} |"
            )
    return "\n".join(rows) + "\n"


@dataclass(frozen=True)
class QueueRun:
    r"""Results of Generalized AsyncSGD on a closed network, and its bounds.

    Attributes:
        per_update: the mean of $\|\nabla f(w_t)\|^2$ over the updates.
        per_time: the mean over the updates of $\|\nabla f(w_t)\|^2$ times the duration of the update.
        bound_g: 8 G.
        bound_h: 8 H, with the mean decrease of the loss per update as its gap.
    """

    per_update: float
    per_time: float
    bound_g: float
    bound_h: float


def queue(num_updates: int, seed: int, *, rate: float = 0.02, concurrency: int = 12) -> QueueRun:
    """Simulate Generalized AsyncSGD with exponential service times and first-in, first-out queues."""
    generator = np.random.default_rng(seed)
    problem = Quadratics.draw(seed)
    minima, curvatures = problem.minima.numpy(), problem.curvatures.numpy()
    service = np.linspace(1.0, 4.0, CLIENTS)
    routing = np.linspace(1.0, 2.0, CLIENTS)
    routing /= routing.sum()
    w = start_of(problem).numpy().copy()
    gap = problem.value(torch.from_numpy(w)) - problem.value(problem.minimum)
    queues: list[deque[np.ndarray]] = [deque() for _ in range(CLIENTS)]
    finish: list[tuple[float, int]] = []

    def assign(now: float) -> None:
        client = int(generator.choice(CLIENTS, p=routing))
        queues[client].append(w.copy())
        if len(queues[client]) == 1:
            heapq.heappush(finish, (now + generator.exponential(1 / service[client]), client))

    for _ in range(concurrency):
        assign(0.0)
    squares, durations, now = [], [], 0.0
    heterogeneity = 0.0
    for _ in range(num_updates + 1):
        before = now
        now, client = heapq.heappop(finish)
        gradients = curvatures * (w - minima)
        mean = gradients.mean(0)
        squares.append(float(mean @ mean))
        durations.append(now - before)
        heterogeneity = max(heterogeneity, float(np.square(gradients - mean).sum(1).max()))
        old = queues[client].popleft()
        noise = generator.standard_normal(SIZE) * problem.noise / math.sqrt(SIZE)
        gradient = curvatures[client] * (old - minima[client]) + noise
        w -= rate / (CLIENTS * routing[client]) * gradient
        if queues[client]:
            heapq.heappush(finish, (now + generator.exponential(1 / service[client]), client))
        assign(now)
    constants = {"rate": rate, "smoothness": 1.0, "noise": 2 * heterogeneity + problem.noise**2}
    bound_g = UpdateBound(service, concurrency, **constants, gap=gap, num_updates=num_updates)
    decrease = max(0.0, gap - problem.value(torch.from_numpy(w)) + problem.value(problem.minimum)) / (num_updates + 1)
    bound_h = TimeBound(service, concurrency, **constants, gap=decrease)
    return QueueRun(
        float(np.mean(squares)),
        float(np.mean(np.multiply(squares, durations))),
        8 * bound_g(routing),
        8 * bound_h(routing),
    )


def local_drift(num_steps: int, seed: int, *, rate: float = 0.02, proximal: float = 0.1) -> tuple[float, float]:
    r"""Return the squared distance after K local steps with a proximal term, and the bound of Report (63).

    The loss is $\sum_j c_j \sin(\theta_j + b_j)$, whose gradient is at most $G = \|c\|$.
    """
    generator = torch.Generator().manual_seed(seed)
    c, b, start = torch.randn(3, SIZE, generator=generator, dtype=torch.float64)
    trainer = clients.Local(steps=num_steps, optimizer=torch.optim.SGD, rate=rate, proximal=proximal)
    noise = [*NOISE / math.sqrt(SIZE) * torch.randn(num_steps, SIZE, generator=generator, dtype=torch.float64)]
    server = Server(Flat(SIZE), rules.ASGD(), start)
    payload = trainer.train(
        server.space,
        server.dispatch(0).message,
        lambda theta, xi: (c * torch.sin(theta + b)).sum() + xi @ theta,
        noise,
        None,
        generator=generator,
    )
    moved = float((payload.points[-1] - start).square().sum())
    return moved, 5 * num_steps**2 * rate**2 * (4 * float(c.square().sum()) + NOISE**2)


@dataclass(frozen=True)
class OrthoFLStep:
    """One step of OrthoFL and of its baseline on a client with the loss F and smoothness L, in the notation of I.2.

    Attributes:
        one_step: the loss of the baseline minus that of OrthoFL, after one step.
        one_step_bound: the right side of (18).
        pre: the loss of the baseline minus that of OrthoFL, before the step.
        pre_bound: the right side of (17).
    """

    one_step: float
    one_step_bound: float
    pre: float
    pre_bound: float


def orthofl_step(seed: int, *, scale: float = 1.0) -> OrthoFLStep:
    r"""Evaluate Lemma I.2 and (18) for random models, with the loss $\sum_j c_j \cos(\theta_j + b_j)$."""
    generator = torch.Generator().manual_seed(seed)
    c, b, global_old, client_old, global_new, client_new = scale * torch.randn(
        6, SIZE, generator=generator, dtype=torch.float64
    )
    beta, part = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
    smoothness = float(c.abs().max())
    rate = part / smoothness

    def loss(theta: Tensor) -> float:
        return float((c * torch.cos(theta + b)).sum())

    def gradient(theta: Tensor) -> Tensor:
        return -c * torch.sin(theta + b)

    shift, change = global_new - global_old, client_new - client_old
    length = float(change.norm())
    u = change / length
    alpha = float(shift @ u)
    delta = shift - alpha * u
    gap = global_old - client_old
    rho = float(gap @ u)
    d = gap - rho * u
    orthofl = client_new + delta
    baseline = (1 - beta) * global_new + beta * client_new
    at = gradient(client_new)
    along = rho + alpha - length
    pre_bound = (
        -(1 - beta) * (abs(along) * abs(float(at @ u)) + float(at.norm() * d.norm()))
        - beta * float(at.norm() * delta.norm())
        - smoothness / 2 * ((1 - beta) ** 2 * (along**2 + float((d + delta).square().sum())) + float(delta @ delta))
    )
    pre = loss(baseline) - loss(orthofl)
    g_baseline, g_orthofl = gradient(baseline), gradient(orthofl)
    return OrthoFLStep(
        loss(baseline - rate * g_baseline) - loss(orthofl - rate * g_orthofl),
        pre
        - rate * (1 + smoothness * rate / 2) * float(g_baseline @ g_baseline)
        + rate * (1 - smoothness * rate / 2) * float(g_orthofl @ g_orthofl),
        pre,
        pre_bound,
    )


def slope(lengths: Sequence[int], means: Sequence[float]) -> float:
    """Return the least-squares slope of the logarithms."""
    return float(np.polyfit(np.log(lengths), np.log(means), 1)[0])


def label_ticks(axis: Any, values: Sequence[int]) -> None:
    """Label only these values of a logarithmic horizontal axis, and only powers of 10 of the vertical axis."""
    axis.set_xticks(values, [f"{value:,}" for value in values])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_minor_formatter(NullFormatter())


def main() -> None:
    """Run all experiments, print and store the table, and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--longest", type=int, default=4096, help="the number of server steps of the longest run")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "results" / "papers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", StabilityWarning)
    lengths = [options.longest >> k for k in range(4, -1, -1)]
    late = lengths[len(lengths) // 2 :]
    rows = ["| statement | quantity | theory | measured |", "| --- | --- | ---: | ---: |"]
    figure = new_figure(9.6, 6.0)
    axes = figure.subplots(2, 3)

    def curve(axis: Any, name: str, of: Callable[[int, int], float], colour: str, order: float) -> None:
        means = [float(np.mean([of(length, seed) for seed in range(options.seeds)])) for length in lengths]
        measured = slope(late, means[len(means) - len(late) :])
        axis.loglog(lengths, means, "o-", color=colour, label=f"{name}, slope {measured:.2f}", ms=4)
        rows.append(f"| {axis.get_title()} | {name}, slope | {order:.2f} | {measured:.2f} |")
        print(rows[-1], flush=True)

    def reference(axis: Any, order: float) -> None:
        low = min(line.get_ydata()[-1] for line in axis.lines)
        values = [0.7 * low * (length / lengths[-1]) ** order for length in lengths]
        axis.loglog(lengths, values, "--", color="0.5", label=f"slope {order:g}")
        axis.set_xlabel("server steps T")
        label_ticks(axis, lengths)
        axis.legend(loc="lower left", fontsize="x-small", frameon=False)

    axes[0, 0].set_title("MasFL, Theorem 1", fontsize="small")
    curve(axes[0, 0], "MasFL", masfl, COLOURS[0], -0.5)
    axes[0, 0].set_ylabel("mean of $\\|\\nabla f\\|^2$")
    reference(axes[0, 0], -0.5)
    axes[0, 1].set_title("MasFL, Theorem 2", fontsize="small")
    curve(axes[0, 1], "AdaMasFL", adamasfl, COLOURS[0], -0.25)
    axes[0, 1].set_ylabel("mean of $\\|\\nabla f\\|$")
    reference(axes[0, 1], -0.25)
    axes[0, 2].set_title("Manifold, Theorem 1", fontsize="small")
    for name, colour in zip(MANIFOLD, COLOURS, strict=True):
        curve(axes[0, 2], name, partial(manifold, name), colour, -0.5)
    axes[0, 2].set_ylabel("mean of $\\|\\nabla f\\|^2$")
    reference(axes[0, 2], -0.5)

    axis = axes[1, 0]
    axis.set_title("Queue (5) and (12)", fontsize="small")
    runs = [[queue(length, seed) for seed in range(options.seeds)] for length in lengths]
    for field, label, colour, style in (
        ("per_update", "per update", COLOURS[0], "o-"),
        ("bound_g", "8 G", COLOURS[0], "--"),
        ("per_time", "per update, times duration", COLOURS[1], "o-"),
        ("bound_h", "8 H", COLOURS[1], "--"),
    ):
        values = [float(np.mean([getattr(one, field) for one in group])) for group in runs]
        axis.loglog(lengths, values, style, color=colour, label=label, ms=4)
    for field, bound in (("per_update", "bound_g"), ("per_time", "bound_h")):
        least = min(getattr(one, bound) / getattr(one, field) for group in runs for one in group)
        rows.append(f"| Queue | smallest ratio of 8 {bound[-1].upper()} to the run | at least 1 | {least:.1f} |")
        print(rows[-1], flush=True)
    axis.set_xlabel("updates T")
    axis.set_ylabel("mean of $\\|\\nabla f\\|^2$")
    label_ticks(axis, lengths)
    axis.set_ylim(bottom=1e-2 * axis.get_ylim()[0])  # room for the legend
    axis.legend(loc="lower left", fontsize="x-small", frameon=False)

    axis = axes[1, 1]
    axis.set_title("OrthoFL (18)", fontsize="small")
    steps = [orthofl_step(seed, scale=2.0 ** (seed % 8 - 5)) for seed in range(400)]
    slack = [one.one_step - one.one_step_bound for one in steps]
    squares = [2.0 ** (2 * (seed % 8 - 5)) for seed in range(400)]
    axis.loglog(squares, np.maximum(slack, 1e-16), ".", color=COLOURS[0], ms=3)
    axis.set_xlabel("squared scale of the models")
    axis.set_ylabel("left side minus right side")
    worst = min(slack)
    rows.append(f"| OrthoFL (18) | smallest left side minus right side, 400 draws | at least 0 | {worst:.1e} |")
    worst = min(one.pre - one.pre_bound for one in steps)
    rows.append(f"| OrthoFL (17) | smallest left side minus right side, 400 draws | at least 0 | {worst:.1e} |")
    print(*rows[-2:], sep="\n", flush=True)

    axis = axes[1, 2]
    axis.set_title("Report (63)", fontsize="small")
    counts = [2, 4, 8, 16, 32]
    drifts = [[local_drift(count, seed) for seed in range(20)] for count in counts]
    moved, bounds = np.array(drifts).mean(1).T
    axis.loglog(counts, moved, "o-", color=COLOURS[0], label="squared distance", ms=4)
    axis.loglog(counts, bounds, "--", color=COLOURS[0], label="bound")
    axis.set_xlabel("local steps K")
    label_ticks(axis, counts)
    axis.legend(fontsize="x-small", frameon=False)
    least = float((np.array(drifts)[..., 1] / np.array(drifts)[..., 0]).min())
    rows.append(f"| Report (63) | smallest ratio of the bound to the squared distance | at least 1 | {least:.1f} |")
    print(rows[-1], flush=True)

    qualities = quality_table(options.longest // 16, options.seeds)
    print(qualities)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "theory.md").write_text("\n".join(rows) + "\n")
    (options.out / "quality.md").write_text(qualities)
    figure.savefig(options.out / "theory.png")


if __name__ == "__main__":
    main()
