"""Connect two independently trained networks by a chord, learned curves, a tunnel and two simplices.

    python examples/mode_connectivity.py --data folder/with/mnist --out pictures

The networks have different seeds and different orders of batches. The loss is high on the straight line between the
networks, and a curve with a learned control point avoids this region. All weights of a network are one point of a flat
space.

The script prints a table with these columns for each path:

- accuracies on held-out images at both ends, in the middle and at the worst point;
- the barrier, which is the largest increase of the loss above the line between the losses of the ends;
- Q, the mean ratio of the loss on the chord to the loss on the path, at the same fraction of their length.

It also draws the planes of both curves and the losses along all paths.
"""

import argparse
import functools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from torch import Tensor, nn

from manifoldagg import Bezier, ParameterSpace, fit
from manifoldagg.curves import (
    Barrier,
    Complex,
    Control,
    CurveEmbedding,
    Embedding,
    Phases,
    Piecewise,
    Plane,
    Training,
    Tunnel,
    barrier,
    chord_ratio,
    plane,
)
from manifoldagg.experiments import load_dataset, read_images
from manifoldagg.manifolds import Loss

BATCH = 64
TRAINING = Training(rate=2e-3)
COLOURS = {"chord": "crimson", "quadratic": "black", "cubic": "#0072b2", "tunnel": "#009e73", "simplices": "#e69f00"}


@dataclass(frozen=True)
class Data:
    """The training batches, and the held-out images with their labels."""

    batches: list[tuple[Tensor, Tensor]]
    held_out: tuple[Tensor, Tensor]


def network() -> nn.Module:
    """Return a CNN with 9,802 parameters and without BatchNorm for grey images of at least 8 x 8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(256, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def load(folder: Path | None, part: float) -> Data:
    """Load a fraction `part` of the 10,000 test images of MNIST, or of the digits of scikit-learn."""
    if folder is None or not folder.is_dir():
        why = "no --data given" if folder is None else f"there is no folder {folder}"
        print(f"{why}: the 8 x 8 digits of scikit-learn in place of MNIST")
        digits = load_dataset("digits")
        inputs = digits.inputs
        labels = digits.labels
    else:
        inputs, labels = read_images(folder)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))[: int(part * len(inputs))]
    held = order[: len(order) // 5]
    batches = [(inputs[i], labels[i]) for i in order[len(order) // 5 :].split(BATCH)]
    return Data(batches, (inputs[held], labels[held]))


def trained(space: ParameterSpace, loss: Loss, data: Data, seed: int, epochs: int) -> Tensor:
    """Train a network with its own seed and order of batches, as the end point of a curve of degree 1."""
    torch.manual_seed(seed)
    start = space.point(network())
    batches = [data.batches[i] for i in torch.randperm(len(data.batches))]
    return fit(Bezier(space, 1), loss, batches, start=start, phases=Phases.first(epochs), training=TRAINING).phi[-1]


@dataclass(frozen=True)
class Way:
    """A path between the two networks, with its loss and error profiles, and accuracies of models sampled around it."""

    name: str
    length: float
    loss: Barrier
    error: Barrier
    inside: list[float]

    def row(self) -> str:
        """Format a row of the table."""
        start, middle, end = (100 - 100 * self.error.losses[i].item() for i in (0, len(self.error.losses) // 2, -1))
        worst = 100 - 100 * self.error.losses.max().item()
        drawn = f"{fmean(self.inside):>8.1f} {min(self.inside):>7.1f}" if self.inside else f"{'':>8} {'':>7}"
        return (
            f"{self.name:<10} {self.length:>7.1f} {self.loss.height:>8.3f} {start:>6.1f} {middle:>7.1f} {worst:>6.1f} "
            f"{end:>6.1f} {drawn} {chord_ratio(self.loss):>6.2f}"
        )


@dataclass(frozen=True)
class Judge:
    """An evaluation of models on the held-out images: cross-entropy and error rate."""

    space: ParameterSpace
    model: nn.Module
    images: Tensor
    labels: Tensor

    @torch.no_grad()
    def loss(self, theta: Tensor) -> float:
        """Return the cross-entropy of a model."""
        return nn.functional.cross_entropy(self._outputs(theta), self.labels).item()

    @torch.no_grad()
    def error(self, theta: Tensor) -> float:
        """Return the fraction of misclassified images."""
        return (self._outputs(theta).argmax(1) != self.labels).double().mean().item()

    def way(self, name: str, curve: CurveEmbedding, phi: Tensor, drawn: Iterable[Tensor] = (), *, points: int) -> Way:
        """Evaluate a path at points that divide its length equally."""
        loss, error = (barrier(curve, phi, f, points=points, by="length") for f in (self.loss, self.error))
        inside = [100 - 100 * self.error(theta) for theta in drawn]
        return Way(name, curve.length(phi).item(), loss, error, inside)

    def _outputs(self, theta: Tensor) -> Tensor:
        return self.space.load(self.model, theta)(self.images)


def picture(planes: dict[str, Plane], ways: Sequence[Way], file: Path) -> None:
    """Draw the planes of the curves and the losses along all paths."""
    figure = Figure(figsize=(6.2 * len(planes) + 5, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    *left, right = figure.subplots(1, len(planes) + 1, width_ratios=[6.2] * len(planes) + [5])
    for axes, (name, drawn) in zip(left, planes.items(), strict=True):
        drawn.plot(axes, label="held-out cross-entropy", ends=("first network", "second network"))
        axes.set_title(f"the plane of the {name} curve")
    for way in ways:
        style = "--" if way.name == "chord" else "-"
        right.plot(way.loss.fraction, way.loss.losses, style, color=COLOURS[way.name], linewidth=1.8, label=way.name)
    right.set_yscale("log")
    right.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    right.yaxis.set_major_formatter("{x:g}")
    right.yaxis.set_minor_formatter("{x:g}")
    right.set_xlim(0, 1)
    right.set_xlabel("position on the path, by length")
    right.set_ylabel("held-out cross-entropy")
    right.set_title("loss along each path")
    right.grid(alpha=0.25, which="both")
    right.legend(loc="best", fontsize="small")
    figure.savefig(file)


def main() -> None:
    """Train and connect two networks, print the table and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, help="a folder of IDX files, such as MNIST; by default the digits of scikit-learn"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/mode-connectivity"), help="the folder of the figure")
    parser.add_argument("--epochs", type=int, default=12, help="the number of epochs for each network")
    parser.add_argument("--curve-epochs", type=int, default=10, help="the number of epochs for each path")
    parser.add_argument("--radius", type=float, default=0.1, help="the radius of the tunnel, in chord lengths")
    parser.add_argument("--quick", action="store_true", help="a few steps on little data that test the script")
    options = parser.parse_args()
    epochs, curve_epochs, points, resolution, draws, part = (
        (1, 1, 5, 4, 2, 0.05) if options.quick else (options.epochs, options.curve_epochs, 21, 21, 20, 1.0)
    )
    torch.set_num_threads(1)  # The network is too small to benefit from more threads.
    began = time.perf_counter()
    data = load(options.data, part)
    model = network()
    space = ParameterSpace.of(model)
    loss = space.loss(model, nn.functional.cross_entropy)
    judge = Judge(space, network(), *data.held_out)
    a, b = (trained(space, loss, data, seed, epochs) for seed in (1, 2))

    def learn(embedding: Embedding, **given: Any) -> Tensor:
        """Fit an embedding that contains the two networks, and return its points."""
        generator = torch.Generator().manual_seed(0)
        phases = Phases((0, curve_epochs))
        return fit(embedding, loss, data.batches, phases=phases, training=TRAINING, generator=generator, **given).phi

    line, quadratic, cubic = (Bezier(space, degree) for degree in (1, 2, 3))
    tunnel = Tunnel(quadratic, options.radius)
    # Each triangle connects one network with a common edge. Neither triangle contains the chord.
    simplices = Complex(space, faces=((0, 2, 3), (1, 2, 3)))
    bent = Piecewise(space, degree=1, pieces=2)
    phi2, phi3, phi_t = (learn(embedding, start=a, end=b) for embedding in (quadratic, cubic, tunnel))
    vertices = torch.stack([a, b, quadratic(phi2, 0.5), cubic(phi3, 0.5)])
    phi_s = learn(simplices, phi=vertices, control=Control(free=[2, 3], volume=1e-3))
    middle = phi_s[2:].mean(0)

    generator = torch.Generator().manual_seed(1)
    from_tunnel = tunnel(phi_t, tunnel.sample_in(phi_t, draws, generator=generator))
    from_simplices = simplices(phi_s, simplices.sample(draws, generator=generator))
    way = functools.partial(judge.way, points=points)
    ways = [
        way("chord", line, torch.stack([a, b])),
        way("quadratic", quadratic, phi2),
        way("cubic", cubic, phi3),
        way("tunnel", quadratic, phi_t, from_tunnel),
        way("simplices", bent, torch.stack([a, middle, b]), from_simplices),
    ]
    print(f"{'':<27} accuracy on {len(data.held_out[1])} held-out images, %")
    print(
        f"{'way':<10} {'length':>7} {'barrier':>8} {'start':>6} {'middle':>7} {'worst':>6} {'end':>6} "
        f"{'inside':>8} {'worst':>7} {'Q':>6}"
    )
    print(*(found.row() for found in ways), sep="\n")
    print(f"inside: {draws} models drawn from the tunnel and from the simplices")

    options.out.mkdir(parents=True, exist_ok=True)
    planes = {
        "quadratic": plane(
            quadratic, phi2, judge.loss, resolution=resolution, others={"cubic, projected": (cubic, phi3)}
        ),
        "cubic": plane(cubic, phi3, judge.loss, resolution=resolution),
    }
    picture(planes, ways, options.out / "mode_connectivity.png")
    print(f"{options.out / 'mode_connectivity.png'} ({time.perf_counter() - began:.0f} s)")
    straight, curved = (found.loss.height for found in ways[:2])
    print(f"Seen: between the networks the loss rises by {straight:.2g} on the chord, by {curved:.2g} on a curve.")


if __name__ == "__main__":
    main()
