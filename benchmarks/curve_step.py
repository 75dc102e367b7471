"""Cost of one step of curve fitting, compared with a plain training step of the same model on the same batch.

Five methods take steps with Adam, in turns in one process. Ratios are computed for each repetition:

- *plain*: forward pass, backward pass and step of the network alone.
- *local*: the trainer `Local`, whose steps are those of `fit` in its first phase.
- *path*: the trainer `Trajectory`, which fits a curve to these steps. Its ratio is relative to *local*.
- *ours*: `fit`, whose optimiser works on flat control points. A step samples S, forms the model at S, calls
  `functional_call`, and passes the gradient to the control points.
- *layers*: each layer stores its control points as parameters and mixes them in every forward pass. Autograd
  differentiates the mixing.

The end points are fixed in the last two methods. Memory is measured for a wide linear model with small activations. It
is the peak size of all tensors: parameters, control points, gradients, moments of Adam and scratch memory. The table
shows bytes and multiples of one model.
"""

import argparse
import gc
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timing import ratio
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from manifoldagg import Bezier, ParameterSpace, fit
from manifoldagg.curves import Phases, Training
from manifoldagg.federated import Message, clients
from manifoldagg.federated.clients.determinism import single_threaded

RATE = 1e-4
WIDTH = 2048
Step = Callable[[int], None]
Make = Callable[[], nn.Sequential]


class CurveLayer(nn.Module):
    """A layer whose weights are a point on a curve. The control points are parameters of the layer."""

    def __init__(self, layer: nn.Module, degree: int) -> None:
        super().__init__()
        self.layer = layer
        self.weights = [1.0]
        self.names = [name for name, _ in layer.named_parameters()]
        self.points = nn.ParameterDict()
        for name, parameter in list(layer.named_parameters()):
            for i in range(degree + 1):
                self.points[f"{name}{i}"] = nn.Parameter(parameter.detach().clone(), requires_grad=0 < i < degree)
            delattr(layer, name)

    def forward(self, inputs: Tensor) -> Tensor:
        """Apply the layer at the point of the curve with these Bernstein weights."""
        for name in self.names:
            mixed = sum(w * self.points[f"{name}{i}"] for i, w in enumerate(self.weights))
            setattr(self.layer, name, mixed)
        return self.layer(inputs)


def cnn() -> nn.Sequential:
    """A network with two convolutions and two dense layers for 28 x 28 grey images."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 49, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def wide() -> nn.Sequential:
    """A network with 4 million parameters and few activations."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))


def descend(model: nn.Module, batch: tuple[Tensor, Tensor], prepare: Callable[[], None] = lambda: None) -> Step:
    """Take steps of Adam on the trainable parameters of `model`."""
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=RATE)
    losses: list[float] = []

    def steps(count: int) -> None:
        for _ in range(count):
            prepare()
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            losses.append(loss.item())
            optimiser.step()

    return steps


def plain(make: Make, batch: tuple[Tensor, Tensor], degree: int) -> Step:
    """Take steps of the network alone."""
    return descend(make(), batch)


def ours(make: Make, batch: tuple[Tensor, Tensor], degree: int) -> Step:
    """Take steps of `fit` in its second phase."""
    model = make()
    space = ParameterSpace.of(model)
    curve = Bezier(space, degree)
    loss = space.loss(model, nn.functional.cross_entropy)
    start = space.point(model)

    def steps(count: int) -> None:
        fit(curve, loss, [batch], start=start, phases=Phases(steps=(0, count)), training=Training(rate=RATE))

    return steps


def trained(trainer: clients.Local, make: Make, batch: tuple[Tensor, Tensor]) -> Step:
    """Take steps of a trainer from the initial model."""
    model = make()
    space = ParameterSpace.of(model)
    loss = space.loss(model, nn.functional.cross_entropy)
    message = Message(space.point(model))
    generator = torch.Generator()

    def steps(count: int) -> None:
        replace(trainer, steps=count).train(space, message, loss, [batch], None, generator=generator)

    return steps


def local(make: Make, batch: tuple[Tensor, Tensor], degree: int) -> Step:
    """Take steps of `Local`."""
    return trained(clients.Local(rate=RATE), make, batch)


def path(make: Make, batch: tuple[Tensor, Tensor], degree: int) -> Step:
    """Take steps of `Trajectory`."""
    return trained(clients.Trajectory(rate=RATE, degree=degree), make, batch)


def layers(make: Make, batch: tuple[Tensor, Tensor], degree: int) -> Step:
    """Take steps of a network of `CurveLayer`s."""
    model = make()
    curve = Bezier(ParameterSpace.of(model), degree)
    wrapped = nn.Sequential(*(CurveLayer(m, degree) if list(m.parameters()) else m for m in model))
    mixers = [m for m in wrapped if isinstance(m, CurveLayer)]

    def prepare() -> None:
        weights = curve.weights(torch.rand(()).item())
        for mixer in mixers:
            mixer.weights = weights

    return descend(wrapped, batch, prepare)


WAYS = {"plain": plain, "local": local, "path": path, "ours": ours, "layers": layers}
BESIDE = dict.fromkeys(WAYS, "plain") | {"path": "local"}
"""The reference of each ratio."""


def seconds(steps: Step, count: int) -> float:
    """Return the processor time per step in seconds. Processor time is less sensitive to other programs."""
    started = time.process_time()
    steps(count)
    return (time.process_time() - started) / count


def peak(make: Callable[[], Step]) -> int:
    """Return the peak memory of all tensors during three steps in bytes, as recorded by the allocator."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        make()(3)
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(sizes))


def timing(degree: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds per step of each method, and the ratio to its reference in the same repetition."""
    batch = torch.rand(options.batch, 1, 28, 28), torch.randint(10, (options.batch,))
    ways = {name: way(cnn, batch, degree) for name, way in WAYS.items()}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for steps in ways.values():
        steps(options.steps)
    for turn in range(options.repetitions):
        # Each repetition starts with another method.
        first = turn % len(ways)
        names = list(ways)[first:] + list(ways)[:first]
        for name in names:
            taken[name].append(seconds(ways[name], options.steps))
    return {
        name: {
            "milliseconds": 1000 * statistics.median(times),
            "ratio": dict(zip(("low", "median", "high"), ratio(times, taken[BESIDE[name]]), strict=True)),
        }
        for name, times in taken.items()
    }


def memory(degree: int) -> dict[str, Any]:
    """Return the peak memory of each method for the wide model, in bytes and in models."""
    batch = torch.rand(1, WIDTH), torch.randint(WIDTH, (1,))
    size = 4 * sum(p.numel() for p in wide().parameters())
    most = {name: peak(partial(way, wide, batch, degree)) for name, way in WAYS.items()}
    return {name: {"bytes": count, "models": count / size} for name, count in most.items()}


def main() -> None:
    """Print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=31)
    parser.add_argument("--steps", type=int, default=20, help="consecutive steps in each repetition")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--degrees", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    torch.manual_seed(0)
    parameters = sum(p.numel() for p in cnn().parameters())
    lines = [
        f"CNN of {parameters} parameters, batch {options.batch}, Adam, one thread, torch {torch.__version__}; "
        f"{options.repetitions} repetitions of {options.steps} steps",
        f"{'degree':>6}  {'way':<7} {'ms/step':>8} {'ratio':>7} {'quartiles':>16} {'peak MB':>9} {'models':>7}",
    ]
    print(*lines, sep="\n", flush=True)
    numbers = {}
    for degree in options.degrees:
        with single_threaded():
            times = timing(degree, options)
            held = memory(degree)
        numbers[str(degree)] = {"time": times, "memory": held}
        for name in WAYS:
            t = times[name]
            m = held[name]
            spread = f"{t['ratio']['low']:.3f} to {t['ratio']['high']:.3f}"
            lines.append(
                f"{degree:>6}  {name:<7} {t['milliseconds']:>8.2f} {t['ratio']['median']:>7.3f} {spread:>16} "
                f"{m['bytes'] / 1e6:>9.1f} {m['models']:>7.2f}"
            )
            print(lines[-1], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    settings = {
        "repetitions": options.repetitions,
        "steps": options.steps,
        "batch": options.batch,
        "parameters": parameters,
        "torch": torch.__version__,
        "machine": platform.platform(),
    }
    (options.out / "curve_step.txt").write_text("\n".join(lines) + "\n")
    (options.out / "curve_step.json").write_text(
        json.dumps({"settings": settings, "degrees": numbers}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
