"""Draw the concepts of the library in five pictures: a curve, a correction, a frame, a step and an average.

The models have two parameters. The library computes all curves, corrections, steps and averages.

    python examples/idea.py --out idea        # --out docs/assets/idea draws the pictures of the site
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

# One colour for each concept, in all pictures.
SERVER = "black"  # models and movements of the server
CLIENT = "#3f51b5"  # what a client returns: models, displacements and learned curves
CORRECTED = "#2e7d32"  # corrected displacements, and the curve that they define
RESULT = "#c62828"  # the new model, and the average
AUXILIARY = "#757575"
PLANE = Flat(2)
BASE = torch.tensor([0.0, 0.0])
CURRENT = torch.tensor([1.5, -0.5])
POINTS = torch.tensor([[1.5, 0.7], [-0.3, 1.7]])  # the control points that a client returns; the second is its model


def valley(theta: Tensor, batch: object = None) -> Tensor:
    """Return a loss that is low on a ring and high in its centre."""
    return (theta.square().sum(-1) - 1).square() + 0.05 * theta[..., 1]


def bowl(theta: Tensor) -> Tensor:
    """Return a quadratic loss whose curvature is four times larger in the second parameter than in the first."""
    return (theta * torch.tensor([0.5, 2.0]) * theta).sum(-1)


def learned_curve(axes: Any) -> str:
    """Draw two models of low loss, the chord between them, and the curve that `fit` learns."""
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
    axes.plot(*chord.T, "--", color=AUXILIARY, lw=2, label=f"chord: loss up to {highest[0]:.2f}")
    axes.plot(*path.T, color=CLIENT, lw=2.5, label=f"learned curve: loss up to {highest[1]:.2f}")
    for name, point in zip((r"$\varphi_0$", r"$\varphi_1$", r"$\varphi_2$"), learned.phi, strict=True):
        dot(axes, point, name, CLIENT, (-20, -14) if name == r"$\varphi_0$" else (6, -14))
    axes.legend(loc="upper center", fontsize=9)
    return f"curve: the loss rises to {highest[0]:.2f} on the chord and to {highest[1]:.2f} on the learned curve"


def correction(axes: Any) -> str:
    """Draw a stale displacement, and the results of three corrections at the current model."""
    v = (POINTS[-1:] - BASE).clone()
    made = {
        "Tangent": (Tangent()(PLANE, BASE, CURRENT, v)[0], "--"),
        "Position": (Position()(PLANE, BASE, CURRENT, v)[0], ":"),
        "OrthoDC": (OrthoDC(0.0)(PLANE, BASE, CURRENT, v)[0], "-"),
    }
    arrow(axes, BASE, CURRENT - BASE, SERVER, "", (0, 0))
    axes.annotate("drift $g$", (0.75, -0.25), xytext=(-34, -16), textcoords="offset points", color=SERVER, fontsize=11)
    arrow(axes, BASE, v[0], CLIENT, "displacement $v$", (-96, -8))
    for name, (moved, style) in made.items():
        arrow(axes, CURRENT, moved, CORRECTED, name, (-30, 6), style)
    dot(axes, BASE, r"base $\Theta^t$", SERVER, (-52, -12))
    dot(axes, CURRENT, r"current $\Theta^\tau$", SERVER)
    axes.set(xlim=(-2.5, 2.9), ylim=(-1.0, 2.1))
    drift = CURRENT - BASE
    before, after = float(v[0] @ drift), abs(float(made["OrthoDC"][0] @ drift))
    return f"correction: the inner product of update and drift is {before:.2f}, after OrthoDC {after:.2f}"


def frame(axes: Any) -> str:
    """Draw the displacements and the drift of a frame, with their Gram matrix."""
    rows = Frame.of(PLANE, BASE, CURRENT, POINTS - BASE)
    matrix = rows.gram().matrix.astype(float)
    drift = CURRENT - BASE
    for color, label, row in ((CLIENT, "$v_1$", POINTS[0]), (CLIENT, "$v_2$", POINTS[1]), (SERVER, "drift $g$", drift)):
        arrow(axes, BASE, row - BASE, color, label, (6, 4))
    inset = axes.inset_axes((0.62, 0.5, 0.36, 0.38))
    inset.imshow(matrix, cmap="Greys", vmin=-4, vmax=8)
    for i in range(3):
        for j in range(3):
            inset.text(j, i, f"{matrix[i, j]:.2f}", ha="center", va="center", fontsize=9)
    names = ["$v_1$", "$v_2$", "$g$"]
    inset.set(xticks=range(3), yticks=range(3), xticklabels=names, yticklabels=names, title="Gram matrix")
    dot(axes, BASE, r"base $\Theta^t$", SERVER, (-52, -12))
    axes.set(xlim=(-1.0, 4.4), ylim=(-1.0, 2.4))
    return f"frame: two displacements and the drift, {matrix.size} inner products, whatever the number of parameters"


def step(axes: Any) -> str:
    """Draw the corrected curve, and the point on it at half the distance of the candidate."""
    ahead = OrthoDC(0.0)(PLANE, BASE, CURRENT, POINTS - BASE)
    share = 0.5
    s = float(parameter_at_distance(ahead, share))
    curve = Bezier(PLANE, degree=2)
    points = torch.cat([CURRENT[None], CURRENT + ahead])
    new, candidate = curve(points, s), points[-1]
    radius = share * float((candidate - CURRENT).norm())
    turn = torch.linspace(0, 2 * torch.pi, 91)
    axes.plot(
        *(CURRENT[:, None] + radius * torch.stack([turn.cos(), turn.sin()])),
        ":",
        color=AUXILIARY,
        label=r"$\rho$ times the distance of $\hat\Theta$",
    )
    axes.plot(*curve(points, torch.linspace(0, 1, 51)).T, color=CORRECTED, lw=2.5, label="corrected curve")
    axes.plot(*points.T, "--", color=CORRECTED, lw=0.8, label="its control polygon")
    dot(axes, CURRENT, r"current $\Theta^\tau$", SERVER)
    dot(axes, candidate, r"candidate $\hat\Theta$", CORRECTED, (-86, -4))
    dot(axes, new, rf"new $\Theta^{{\tau+1}}$, $s$ = {s:.2f}", RESULT, (-118, 6))
    axes.axis("equal")
    axes.legend(loc="lower right", fontsize=8)
    return f"step: half the distance of the candidate is at s = {s:.3f} on the curve"


def average(axes: Any) -> str:
    """Draw the models of a noisy run around a minimum, and the average of the late models."""
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
    axes.plot(*torch.stack(models).T, color=AUXILIARY, lw=0.8, label="run")
    axes.plot(*torch.stack(models[20:]).T, "o", color=SERVER, ms=4, alpha=0.6, label="late models")
    dot(axes, models[0], r"start $\Theta^0$", SERVER)
    axes.plot(*late.average.tolist(), "*", color=RESULT, ms=16, mec="white", label="average", zorder=6)
    axes.legend(loc="lower left", fontsize=9)
    return f"average: its loss is {float(bowl(late.average)):.3f}, that of the late models {mean:.3f} on average"


PICTURES = {"curve": learned_curve, "correction": correction, "frame": frame, "step": step, "average": average}


def contours(axes: Any, loss: Any, x: tuple[float, float], y: tuple[float, float]) -> None:
    """Draw the loss on a rectangle. Lighter regions have a lower loss."""
    across, up = torch.meshgrid(torch.linspace(*x, 41), torch.linspace(*y, 41), indexing="xy")
    values = loss(torch.stack([across, up], -1))
    levels = [0.0, 0.05, 0.15, 0.4, 0.8, 1.5, 3.0, 6.0]
    axes.contourf(across, up, values, levels=levels, cmap="Greys", alpha=0.5, extend="max")
    axes.plot([], [], "s", color="#808080", ms=9, label="high loss")


def arrow(
    axes: Any, tail: Tensor, v: Tensor, color: str, label: str, offset: tuple[int, int], style: str = "-"
) -> None:
    """Draw a displacement from a model, with its label at its head."""
    head = (tail + v).tolist()
    axes.annotate(
        "",
        head,
        tail.tolist(),
        arrowprops={"arrowstyle": "-|>", "color": color, "lw": 2, "ls": style, "shrinkA": 0, "shrinkB": 0},
    )
    axes.annotate(label, head, xytext=offset, textcoords="offset points", color=color, fontsize=11)


def dot(axes: Any, point: Tensor, label: str, color: str, offset: tuple[int, int] = (6, -14)) -> None:
    """Draw a model with its label."""
    axes.plot(*point.tolist(), "o", color=color, ms=6, zorder=5)
    axes.annotate(label, point.tolist(), xytext=offset, textcoords="offset points", color=color, fontsize=11)


def write(figure: Any, path: Path) -> None:
    """Write a figure as SVG, with each path in one line and coordinates rounded to tenths of a point."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    path.write_text(re.sub(r'(?<= d=")[^"]+', lambda found: tenths(" ".join(found[0].split())), drawn.getvalue()))


def tenths(places: str) -> str:
    """Round the coordinates of a path to one decimal place."""
    return re.sub(r"\d+\.\d+", lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), places)


def main() -> None:
    """Draw the five pictures and a figure of three of them, and print what they show."""
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
