"""The idea in five pictures: curve, correction, frame, step, average, for models of two parameters.

Everything that is drawn the library computed: the learned curve, the corrected displacements and their Gram matrix, the
step along a curve, the average of late models.

    python examples/idea.py --out idea        # --out docs/assets/idea renews those of the site
"""

import argparse
import io
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manifoldagg import Bezier, fit
from manifoldagg.averaging import SWA
from manifoldagg.corrections import Frame, OrthoDC, Position, Tangent
from manifoldagg.curves import Control, Phases, Training, parameter_at_distance
from manifoldagg.manifolds import Flat

BLUE, RED, GREEN, GREY = "#3f51b5", "#c62828", "#2e7d32", "#757575"
PLANE = Flat(2)
BASE = torch.tensor([0.0, 0.0])
CURRENT = torch.tensor([1.5, -0.5])
POINTS = torch.tensor([[1.5, 0.7], [-0.3, 1.7]])  # what a client learned from the base: a control point, its model


def valley(theta: Tensor, batch: object = None) -> Tensor:
    """A ring of low loss, a little lower below: on the straight line between two of its points there is a hill."""
    return (theta.square().sum(-1) - 1).square() + 0.05 * theta[..., 1]


def bowl(theta: Tensor) -> Tensor:
    """A quadratic loss, four times as curved up and down as across."""
    return (theta * torch.tensor([0.5, 2.0]) * theta).sum(-1)


def learned_curve(axes: Any) -> str:
    """Two models of low loss, the chord over the hill between them, the curve around it that `fit` learns."""
    curve = Bezier(PLANE, degree=2)
    learned = fit(
        curve,
        valley,
        [None],
        start=torch.tensor([-1.0, 0.0]),
        end=torch.tensor([1.0, 0.0]),
        phases=Phases(steps=(0, 400)),
        training=Training(rate=0.05),
        control=Control(rate=0.05),
        generator=torch.Generator().manual_seed(1),
    )
    times = torch.linspace(0, 1, 51)
    path = curve(learned.phi, times)
    chord = torch.lerp(learned.phi[0], learned.phi[-1], times[:, None])
    highest = [valley(line).max() for line in (chord, path)]
    contours(axes, valley, (-1.7, 1.7), (-2.5, 1.2))
    axes.plot(*chord.T, "--", color=RED, lw=2, label=f"chord: loss up to {highest[0]:.2f}")
    axes.plot(*path.T, color=BLUE, lw=2.5, label=f"learned curve: up to {highest[1]:.2f}")
    for name, point in zip((r"$\varphi_0$", r"$\varphi_1$", r"$\varphi_2$"), learned.phi, strict=True):
        dot(axes, point, name, BLUE)
    axes.legend(loc="upper center", fontsize=9)
    return f"curve: the loss rises to {highest[0]:.2f} on the chord and to {highest[1]:.2f} on the learned curve"


def correction(axes: Any) -> str:
    """One stale displacement, and what three corrections make of it at the current model."""
    v = (POINTS[-1:] - BASE).clone()
    made = {
        "Tangent": (Tangent()(PLANE, BASE, CURRENT, v)[0], GREEN),
        "Position": (Position()(PLANE, BASE, CURRENT, v)[0], RED),
        "OrthoDC": (OrthoDC(0.0)(PLANE, BASE, CURRENT, v)[0], BLUE),
    }
    axes.plot(*torch.stack([BASE, CURRENT]).T, ":", color="black", lw=1.5)
    axes.annotate("drift $g$", (0.75, -0.25), xytext=(-32, -14), textcoords="offset points", fontsize=11)
    arrow(axes, BASE, v[0], "black", "update $v$", (-66, -8))
    for name, (moved, color) in made.items():
        arrow(axes, CURRENT, moved, color, name, (-30, 6))
    dot(axes, BASE, r"base $\Theta^t$", "black", (-52, -12))
    dot(axes, CURRENT, r"current $\Theta^\tau$", "black")
    axes.set(xlim=(-1.6, 2.9), ylim=(-1.0, 2.1))
    drift = CURRENT - BASE
    before, after = float(v[0] @ drift), abs(float(made["OrthoDC"][0] @ drift))
    return f"correction: the inner product of update and drift is {before:.2f}, after OrthoDC {after:.2f}"


def frame(axes: Any) -> str:
    """The rows of a frame and their Gram matrix: all that a decision needs."""
    rows = Frame.of(PLANE, BASE, CURRENT, POINTS - BASE)
    matrix = rows.gram().matrix.astype(float)
    drift = CURRENT - BASE
    for color, label, row in ((GREEN, "$v_1$", POINTS[0]), (BLUE, "$v_2$", POINTS[1]), ("black", "$g$", drift)):
        arrow(axes, BASE, row - BASE, color, label, (6, 4))
    inset = axes.inset_axes((0.6, 0.58, 0.36, 0.38))
    inset.imshow(matrix, cmap="RdBu_r", vmin=-4, vmax=4)
    for i in range(3):
        for j in range(3):
            inset.text(j, i, f"{matrix[i, j]:.2f}", ha="center", va="center", fontsize=9)
    names = ["$v_1$", "$v_2$", "$g$"]
    inset.set(xticks=range(3), yticks=range(3), xticklabels=names, yticklabels=names, title="Gram matrix")
    axes.set(xlim=(-1.0, 4.4), ylim=(-1.0, 2.4))
    return f"frame: two displacements and the drift, {matrix.size} inner products, whatever the number of parameters"


def step(axes: Any) -> str:
    """The corrected curve from the current model, and the place on it that half the way to the candidate away is."""
    ahead = OrthoDC(0.0)(PLANE, BASE, CURRENT, POINTS - BASE)
    share = 0.5
    s = float(parameter_at_distance(ahead, share))
    curve = Bezier(PLANE, degree=2)
    points = torch.cat([CURRENT[None], CURRENT + ahead])
    new, candidate = curve(points, s), points[-1]
    radius = share * float((candidate - CURRENT).norm())
    turn = torch.linspace(0, 2 * torch.pi, 91)
    axes.plot(*(CURRENT[:, None] + radius * torch.stack([turn.cos(), turn.sin()])), ":", color=GREY)
    axes.plot(*curve(points, torch.linspace(0, 1, 51)).T, color=BLUE, lw=2.5)
    axes.plot(*points.T, "--", color=BLUE, lw=0.8)
    dot(axes, CURRENT, r"current $\Theta^\tau$", "black")
    dot(axes, candidate, r"candidate $\hat\Theta$", BLUE, (-86, -4))
    dot(axes, new, rf"new $\Theta^{{\tau+1}}$, $s$ = {s:.2f}", RED, (-118, 6))
    axes.annotate(
        r"$\rho$ of the way", (CURRENT - torch.tensor([0.0, radius])).tolist(), xytext=(-30, 6),
        textcoords="offset points", color=GREY, fontsize=10,
    )  # fmt: skip
    axes.axis("equal")
    return f"step: half the way to the candidate is s = {s:.3f} on the curve"


def average(axes: Any) -> str:
    """The models of a noisy run about a minimum, and the average of the late ones."""
    draw = torch.Generator().manual_seed(3)
    late = SWA(PLANE, start=20)
    models = [torch.tensor([-2.2, 1.4])]
    for version in range(1, 61):
        gradient = models[-1] * torch.tensor([1.0, 4.0])
        models.append(models[-1] - 0.15 * (gradient + 1.8 * torch.randn(2, generator=draw)))
        late.update(version, models[-1])
    assert late.average is not None
    mean = sum(float(bowl(model)) for model in models[20:]) / len(models[20:])
    contours(axes, bowl, (-2.6, 1.8), (-1.4, 1.9))
    axes.plot(*torch.stack(models).T, color=GREY, lw=0.8)
    axes.plot(*torch.stack(models[20:]).T, "o", color=GREEN, ms=4, alpha=0.6, label="late models")
    dot(axes, models[0], r"$\Theta^0$", "black")
    axes.plot(*late.average.tolist(), "*", color=RED, ms=16, mec="white", label="their average", zorder=6)
    axes.legend(loc="lower left", fontsize=9)
    return f"average: its loss is {float(bowl(late.average)):.3f}, that of the late models {mean:.3f} on average"


PICTURES = {"curve": learned_curve, "correction": correction, "frame": frame, "step": step, "average": average}


def contours(axes: Any, loss: Any, x: tuple[float, float], y: tuple[float, float]) -> None:
    """The loss on a rectangle: the lower, the lighter."""
    across, up = torch.meshgrid(torch.linspace(*x, 41), torch.linspace(*y, 41), indexing="xy")
    values = loss(torch.stack([across, up], -1))
    levels = [0.0, 0.05, 0.15, 0.4, 0.8, 1.5, 3.0, 6.0]
    axes.contourf(across, up, values, levels=levels, cmap="Greys", alpha=0.5, extend="max")


def arrow(axes: Any, tail: Tensor, v: Tensor, color: str, label: str, offset: tuple[int, int]) -> None:
    """A displacement from a model, with its name at its head."""
    head = (tail + v).tolist()
    axes.annotate("", head, tail.tolist(), arrowprops={"arrowstyle": "-|>", "color": color, "lw": 2, "shrinkB": 0})
    axes.annotate(label, head, xytext=offset, textcoords="offset points", color=color, fontsize=11)


def dot(axes: Any, point: Tensor, label: str, color: str, offset: tuple[int, int] = (6, -14)) -> None:
    """A model, with its name beside it."""
    axes.plot(*point.tolist(), "o", color=color, ms=6, zorder=5)
    axes.annotate(label, point.tolist(), xytext=offset, textcoords="offset points", color=color, fontsize=11)


def write(figure: Any, path: Path) -> None:
    """A picture as SVG, each of its paths in one line, to a tenth of a point."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    path.write_text(re.sub(r'(?<= d=")[^"]+', lambda found: tenths(" ".join(found[0].split())), drawn.getvalue()))


def tenths(places: str) -> str:
    """The numbers of a path with one digit after the point, where that is none."""
    return re.sub(r"\d+\.\d+", lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), places)


def main() -> None:
    """Draw the five, and three of them side by side; say what each shows."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("idea"), help="the folder of the pictures")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    matplotlib.rcParams["svg.hashsalt"] = "idea"
    labels = {"xlabel": "first parameter", "ylabel": "second parameter"}
    for name, draw in PICTURES.items():
        figure, axes = plt.subplots(figsize=(6, 4.2), layout="constrained")
        axes.set(**labels)
        print(draw(axes))
        write(figure, folder / f"{name}.svg")
    figure, panels = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    verbs = {"correct": correction, "step": step, "average": average}
    for axes, (verb, draw) in zip(panels, verbs.items(), strict=True):
        draw(axes)
        axes.set(**labels, title=verb)
    write(figure, folder / "verbs.svg")
    print(f"six pictures in {folder}")


if __name__ == "__main__":
    main()
