"""The plane through a curve, and a function over it: the picture of a loss landscape."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from manifoldagg.curves.embedding import Embedding
from manifoldagg.errors import ArgumentError, check_count, check_number
from manifoldagg.manifolds import Flat, Manifold
from manifoldagg.manifolds.formulas import norm

__all__ = ["Plane", "plane"]

PATH = 101
"""Points of a drawn curve."""
SQUARENESS = 0.5
"""The shorter side of the control points' box counts as at least this part of the longer one."""


TINY = 1e-7
"""Of the largest: a shorter distance has no direction worth drawing."""


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
        axes: Any = None,
        *,
        levels: int = 24,
        label: str = "loss",
        ends: tuple[str, str] = ("base model", "client's model"),
    ) -> Any:
        """Draw contours, curves, chord and control points; `ends` are called so.

        Args:
            axes: of matplotlib; those of a new figure where not given.
            levels: how many contours.
            label: what the values are.
            ends: what start and end are.

        Returns:
            The axes.
        """
        from matplotlib.colors import PowerNorm

        axes = new_axes(axes)
        # Levels crowd towards the minimum, where a landscape is flat.
        low, high = (limit.item() for limit in self.values.aminmax())
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
        return axes


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

    Coordinates by Gram-Schmidt on the displacements from $\varphi_0$: the first axis is the chord's, the second that of
    the control point farthest from it.

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
    seen = View(curve.space, phi)
    if not bool((phi[-1] != phi[0]).any() and seen.second.any()):
        raise ArgumentError("phi: its ends coincide, or its control points lie on one line: they span no plane")
    low = seen.control.amin(0)
    high = seen.control.amax(0)
    extent = high - low
    reach = margin * extent.max() + (SQUARENESS * extent.max() - extent).clamp(min=0) / 2
    x, y, values = seen.grid(function, low, high, reach, resolution)
    t = torch.linspace(0, 1, PATH, dtype=torch.float64, device=phi.device)
    paths = {name: seen.curve(each, points.detach(), t) for name, (each, points) in drawn.items()}
    return Plane(x, y, values, seen.control, paths.pop("curve"), paths)


class View:
    """The plane of the tangent space at the first of some points in which they lie or are seen, in float64.

    Its first axis points to the last point, or to the farthest where the ends meet; the second to what is farthest from
    that line, and is zero where nothing is.

    Args:
        space: of the points.
        phi: (n + 1, *space.shape).
    """

    def __init__(self, space: Manifold, phi: Tensor) -> None:
        self.space = space
        self.start = phi[0]
        rows = self._logs(phi)
        here = phi[0].double()
        lengths = norm(space, here.expand_as(rows), rows)
        tiny = TINY * lengths.max()
        end = rows[-1] if lengths[-1] > tiny else rows[lengths.argmax()]
        size = norm(space, here, end)
        self.first = end / size if size > 0 else torch.zeros_like(end)
        self.second = torch.zeros_like(end)
        along = self._inner(rows, self.first)
        across = rows - along.reshape(-1, *(1 for _ in end.shape)) * self.first
        heights = norm(space, here.expand_as(rows), across)
        k = heights.argmax()
        if heights[k] > tiny:
            self.second = across[k] / heights[k]
        self.control = torch.stack([along, self._inner(rows, self.second)], -1).cpu()

    def points(self, points: Tensor) -> Float64[Tensor, "m 2"]:
        """Where points are seen."""
        logs = self._logs(points)
        return torch.stack([self._inner(logs, self.first), self._inner(logs, self.second)], -1).cpu()

    def curve(self, curve: Embedding, phi: Tensor, t: Float64[Tensor, " m"]) -> Float64[Tensor, "m 2"]:
        """Where a curve is seen: on a flat space that is the curve of the control points as they are seen."""
        if not self.space.flat:
            return self.points(curve(phi, t))
        flat: Embedding = replace(curve, space=Flat(2))  # type: ignore[type-var]  # every curve is a dataclass
        return flat(self.points(phi), t.cpu())

    def grid(
        self, function: Callable[[Tensor], float], low: Tensor, high: Tensor, reach: Tensor, resolution: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Coordinates from `low` to `high` and `reach` beyond, and the function over them."""
        ends = zip((low - reach).tolist(), (high + reach).tolist(), strict=True)
        x, y = (torch.linspace(a, b, resolution, dtype=torch.float64) for a, b in ends)

        def value(a: float, b: float) -> float:
            place = self.space._exp(self.start.double(), a * self.first + b * self.second)
            return function(place.to(self.start.dtype))

        values = [[value(a, b) for a in x.tolist()] for b in y.tolist()]
        return x, y, torch.tensor(values, dtype=torch.float64)

    def _logs(self, points: Tensor) -> Tensor:
        return self.space._log(self.start.double().expand_as(points), points.double())

    def _inner(self, tangents: Tensor, axis: Tensor) -> Tensor:
        here = self.start.double().expand_as(tangents)
        return self.space._inner(here, tangents, axis.expand_as(tangents))


def new_axes(axes: Any) -> Any:
    """`axes`, or where there are none those of a figure of their own, which pyplot does not know."""
    if axes is not None:
        return axes
    from matplotlib.figure import Figure

    return Figure(layout="constrained").add_subplot()
