"""The plane through a curve, and a function over it: the picture of a loss landscape."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from manifoldagg.curves.embedding import Embedding
from manifoldagg.errors import ArgumentError, check_count, check_number
from manifoldagg.kernels import combine, gram
from manifoldagg.manifolds import Flat

PATH = 101
"""Points of a drawn curve."""
SQUARENESS = 0.5
"""The shorter side of the control points' box counts as at least this part of the longer one."""


@dataclass(frozen=True)
class Plane:
    r"""Values of a function over the plane that a curve spans.

    The plane has the curve's start at (0, 0), its end at (chord, 0), and the control point farthest from the
    chord above it.

    Attributes:
        x: (columns,) coordinates along the chord, in units of the space.
        y: (rows,) coordinates across it.
        values: (rows, columns), the function at each grid point.
        control: (n + 1, 2), the control points in the plane (projected, for degree above 2).
        path: (m, 2), points of the curve at evenly spaced parameters.
        others: name to the same of further curves, projected where they leave the plane.
    """

    x: Float64[Tensor, " columns"]
    y: Float64[Tensor, " rows"]
    values: Float64[Tensor, "rows columns"]
    control: Float64[Tensor, "control 2"]
    path: Float64[Tensor, "m 2"]
    others: Mapping[str, Float64[Tensor, "m 2"]] = field(default_factory=dict)

    def plot(
        self,
        axes: Any,
        *,
        levels: int = 24,
        label: str = "loss",
        ends: tuple[str, str] = ("base model", "client's model"),
    ) -> None:
        """Draw contours, curves, chord and control points into matplotlib `axes`; `ends` are called so."""
        from matplotlib.colors import PowerNorm

        # Levels crowd towards the minimum, where a landscape is flat.
        low, high = self.values.min().item(), self.values.max().item()
        steps = low + (high - low) * torch.linspace(0, 1, levels + 1, dtype=torch.float64) ** 2
        shades = axes.contourf(
            self.x, self.y, self.values, levels=steps, cmap="viridis_r", norm=PowerNorm(0.5, low, high)
        )
        axes.contour(self.x, self.y, self.values, levels=steps, colors="white", linewidths=0.4, alpha=0.6)
        axes.figure.colorbar(shades, ax=axes, label=label, format="%.3g")
        chord = self.control[[0, -1]]
        axes.plot(chord[:, 0], chord[:, 1], "--", color="crimson", linewidth=1.8, label="chord")
        axes.plot(self.path[:, 0], self.path[:, 1], color="black", linewidth=2.2, label="learned curve")
        axes.plot(self.control[:, 0], self.control[:, 1], ":", color="black", linewidth=0.8)
        for name, path in self.others.items():
            axes.plot(path[:, 0], path[:, 1], "-.", linewidth=1.4, label=name)
        marks = [(0, "o", ends[0]), (-1, "s", ends[1])]
        marks += [(i, "^", "control point" if i == 1 else "_") for i in range(1, len(self.control) - 1)]
        for i, mark, name in marks:
            style = {"color": "white", "markeredgecolor": "black", "markersize": 8, "linestyle": "none", "zorder": 5}
            axes.plot(self.control[i, 0], self.control[i, 1], mark, label=name, **style)
        axes.set_xlabel("along the chord")
        axes.set_ylabel("across the chord")
        axes.set_aspect("equal")


def plane(
    curve: Embedding,
    phi: Float[Tensor, "control ..."],
    function: Callable[[Tensor], float],
    *,
    resolution: int = 31,
    margin: float = 0.25,
    others: Mapping[str, tuple[Embedding, Tensor]] | None = None,
) -> Plane:
    r"""Evaluate `function` over the plane through the ends of a curve and its farthest control point.

    Coordinates by Gram-Schmidt on the Gram matrix of the displacements from $\varphi_0$: the first axis is the
    chord's, the second that of the control point farthest from it.

    Args:
        curve: with three control points or more, on a flat space.
        phi: control points (n + 1, *space.shape).
        function: a point (*space.shape) to a number, such as a loss over a data set.
        resolution: grid points a side.
        margin: how far the grid reaches beyond the control points, as a part of their extent.
        others: name to (curve, control points) of further curves of that space, which are projected onto the plane.

    Raises:
        ArgumentError: if the space is curved, the degree is 1, the ends coincide, the control points lie on one line,
            or another curve is of another space.

    Source: Manifold, Figure 1. Cost: `resolution`² calls of `function`.

    Example:
        >>> import torch
        >>> from manifoldagg.curves.bezier import Bezier
        >>> phi = torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 0.0]])
        >>> picture = plane(Bezier(Flat(2)), phi, lambda theta: theta.square().sum().item(), resolution=5)
        >>> picture.control.tolist()
        [[0.0, 0.0], [1.0, 1.0], [2.0, 0.0]]
    """
    check_count("resolution", resolution, at_least=2)
    check_number("margin", margin, at_least=0)
    drawn = {"curve": (curve, phi)} | dict(others or {})
    for name, (each, points) in drawn.items():
        if not (isinstance(each, Embedding) and not each.domain and each.space.flat and each.space == curve.space):
            raise ArgumentError(f"{name}: expected a curve on one flat space, got {each}")
        each._check_phi(points)
    if curve.size < 3:
        raise ArgumentError("curve: expected degree 2 or more, a line spans no plane")

    phi = phi.detach()
    start, rows = phi[0].flatten(), list(phi[1:].flatten(1))
    inner = gram(rows, minus=start)[0]
    chord = inner[-1, -1].sqrt()
    along = inner[-1] / chord if chord > 0 else torch.zeros_like(inner[-1])
    across = (inner.diagonal() - along.square()).clamp(min=0)
    across[-1] = 0
    k = int(across.argmax())
    height = across[k].sqrt()
    if not (chord > 0 and height > 1e-7 * inner[k, k].sqrt()):
        raise ArgumentError("phi: its ends coincide, or its control points lie on one line: they span no plane")
    # Unit vectors of the plane as coefficients on the rows: the chord's, and row k's part orthogonal to it.
    first = torch.zeros(len(rows), dtype=torch.float64)
    first[-1] = 1 / chord
    second = -along[k] / height * first
    second[k] += 1 / height

    control = torch.zeros(len(phi), 2, dtype=torch.float64)
    control[1:, 0] = along
    control[1:, 1] = inner @ second
    control[-1, 1] = 0
    low, high = control.amin(0), control.amax(0)
    extent = high - low
    reach = margin * extent.max() + (SQUARENESS * extent.max() - extent).clamp(min=0) / 2
    x, y = (
        torch.linspace(a, b, resolution, dtype=torch.float64) for a, b in zip(low - reach, high + reach, strict=True)
    )
    values = [
        [function(combine(start, rows, a * first + b * second, minus=start).reshape(phi.shape[1:])) for a in x]
        for b in y
    ]
    t = torch.linspace(0, 1, PATH, dtype=torch.float64)
    paths = {"curve": _within(curve, control, t)}
    for name, (each, points) in (others or {}).items():
        both = gram([*rows, *points.detach().flatten(1)], minus=start)[0][: len(rows), len(rows) :]
        paths[name] = _within(each, torch.stack([first @ both, second @ both], -1), t)
    return Plane(x, y, torch.tensor(values, dtype=torch.float64), control, paths.pop("curve"), paths)


def _within(curve: Embedding, control: Tensor, t: Tensor) -> Tensor:
    """The curve of control points in the plane: on a flat space it is projected as they are."""
    flat: Embedding = replace(curve, space=Flat(2))  # type: ignore[type-var]  # every curve is a dataclass
    return flat(control, t)
