"""The plane through a curve, and the loss landscape in this plane.

The plane contains both ends of the curve, and the control point that is farthest from the line through the ends.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from manifoldagg._io import new_figure
from manifoldagg._result_repr import format_result
from manifoldagg._validation import check_count, check_number, short_repr
from manifoldagg.curves._legend import legend_below
from manifoldagg.curves.embedding import Embedding
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import Flat, Manifold
from manifoldagg.manifolds.formulas import norm

__all__ = ["Plane", "plane"]

PATH_SAMPLES = 101
"""The number of points of a plotted curve."""
MIN_ASPECT_RATIO = 0.5
"""The minimum aspect ratio of the box around the control points, without the margin."""


RANK_TOLERANCE = 1e-7
"""The relative distance below which a point counts as equal to the centre, or as a point of the line."""


@dataclass(frozen=True)
class Plane:
    """The values of a function, such as a loss, on the plane through a curve.

    In the coordinates of the plane, the curve starts at (0, 0) and ends at (chord length, 0). The control point that is
    farthest from the chord has a positive second coordinate.

    Attributes:
        x: the coordinates (columns,) of the grid along the chord, in units of the space.
        y: the coordinates (rows,) of the grid orthogonal to the chord.
        values: the function values (rows, columns) at the grid points.
        control: the control points (n + 1, 2) of the curve. For degrees above 2, they are projected onto the plane.
        path: points (m, 2) of the curve at evenly spaced parameters.
        others: a mapping from names to the points of further curves, projected onto the plane.
    """

    x: Float64[Tensor, " columns"]
    y: Float64[Tensor, " rows"]
    values: Float64[Tensor, "rows columns"]
    control: Float64[Tensor, "control 2"]
    path: Float64[Tensor, "m 2"]
    others: Mapping[str, Float64[Tensor, "m 2"]] = field(default_factory=dict)

    def __repr__(self) -> str:
        return format_result(
            self, values=self.values, minimum=self.values.min(), maximum=self.values.max(), others=[*self.others]
        )

    def plot(
        self,
        axes: Any = None,
        *,
        levels: int = 24,
        label: str = "loss",
        ends: tuple[str, str] = ("base model", "client's model"),
        legend: bool = True,
    ) -> Any:
        """Plot contours, curves, chord and control points.

        Args:
            axes: matplotlib axes. The default is the axes of a new figure.
            levels: the number of contours.
            label: the name of the values.
            ends: the names of the start and the end.
            legend: whether to draw a legend below the plot.

        Returns:
            The axes.
        """
        axes = new_figure().subplots() if axes is None else axes
        from matplotlib.colors import PowerNorm

        # The levels are denser near the minimum, because a loss landscape is flat there.
        low, high = (limit.item() for limit in self.values.aminmax())
        steps = low + (high - low) * torch.linspace(0, 1, levels + 1, dtype=torch.float64) ** 2
        shades = axes.contourf(
            self.x, self.y, self.values, levels=steps, cmap="viridis_r", norm=PowerNorm(0.5, low, high)
        )
        axes.contour(self.x, self.y, self.values, levels=steps, colors="white", linewidths=0.4, alpha=0.6)
        # An inset has the height of the plot, which equal scaling of the axes can change.
        axes.figure.colorbar(shades, cax=axes.inset_axes((1.03, 0.0, 0.04, 1.0)), label=label, format="%.3g")
        chord = self.control[[0, -1]]
        axes.plot(chord[:, 0], chord[:, 1], "--", color="crimson", linewidth=1.8, label="chord")
        axes.plot(self.path[:, 0], self.path[:, 1], color="black", linewidth=2.2, label="learned curve")
        axes.plot(self.control[:, 0], self.control[:, 1], ":", color="black", linewidth=0.8)
        for name, path in self.others.items():
            axes.plot(path[:, 0], path[:, 1], "-.", linewidth=1.4, label=name)
        markers = [(0, "o", ends[0]), (-1, "s", ends[1])]
        markers += [(i, "^", "control point" if i == 1 else "_") for i in range(1, len(self.control) - 1)]
        for i, marker, name in markers:
            style = {"color": "white", "markeredgecolor": "black", "markersize": 8, "linestyle": "none", "zorder": 5}
            axes.plot(self.control[i, 0], self.control[i, 1], marker, label=name, **style)
        axes.set_xlabel("along the chord")
        axes.set_ylabel("across the chord")
        axes.set_aspect("equal")
        if legend:
            legend_below(axes)
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
    r"""Evaluate a function on the plane through the ends of a curve and its farthest control point.

    The origin of the plane is the start $\varphi_0$ of the curve. The first axis points along the chord to the end of
    the curve. The second axis points to the control point that is farthest from the chord. The Gram-Schmidt process
    makes the two axes orthonormal.

    Args:
        curve: a curve with at least three control points on a flat space.
        phi: the control points (n + 1, *space.shape).
        function: a function from a point (*space.shape) to a number, such as the loss over a data set.
        resolution: the number of grid points along each side.
        margin: the width of the margin around the control points, as a fraction of their extent.
        others: a mapping from names to pairs (curve, control points) of further curves on the same space, which are
            projected onto the plane.

    Raises:
        ArgumentError: if the space is curved, the degree is 1, the ends are equal, the control points are on one line,
            or a further curve has another space.

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
    curves = {"curve": (curve, phi)} | dict(others or {})
    for name, (each, points) in curves.items():
        if not (isinstance(each, Embedding) and not each.domain and each.space.flat and each.space == curve.space):
            raise ArgumentError(f"{name}: expected a curve on one flat space, got {short_repr(each)}")
        each._check_phi(points)
    if curve.size < 3:
        raise ArgumentError("curve: expected degree 2 or more, got 1; a line does not span a plane")

    phi = phi.detach()
    # Equal ends leave the direction of the first axis undefined. Points on one line have no second axis.
    view = View.of(curve.space, phi)
    control = view(phi)
    if not bool((phi[-1] != phi[0]).any() and view.axes[1].any()):
        raise ArgumentError("phi: expected points that span a plane, got equal ends or control points on one line")
    low, high = control.aminmax(dim=0)
    extent = high - low
    # The first term is equal for both axes. The second term widens a flat box to the minimum aspect ratio.
    border = margin * extent.max() + (MIN_ASPECT_RATIO * extent.max() - extent).clamp(min=0) / 2
    x, y, values = view.grid(function, phi.dtype, low - border, high + border, resolution)
    t = torch.linspace(0, 1, PATH_SAMPLES, dtype=torch.float64, device=phi.device)
    paths = {name: view.curve(each, points.detach(), t) for name, (each, points) in curves.items()}
    return Plane(x, y, values, control, paths.pop("curve"), paths)


@dataclass(frozen=True, eq=False)
class View:
    r"""An orthonormal coordinate system around a point $c$ of a manifold, in float64.

    The coordinates of a point $x$ of the manifold are the components of $\log_c x$ along k axes. The axes are
    orthonormal tangent vectors $a_1, \dots, a_k$ at $c$.

    Attributes:
        space: the manifold.
        center: the point $c$ (*shape), which has the coordinates 0.
        axes: the axes (k, *shape). An axis whose direction is undefined is the zero vector.
    """

    space: Manifold
    center: Float64[Tensor, "..."]
    axes: Float64[Tensor, "k ..."]

    def __repr__(self) -> str:
        return format_result(self, space=self.space, axes=self.axes)

    @classmethod
    def of(cls, space: Manifold, phi: Tensor) -> "View":
        """Create a coordinate system with two axes, whose plane approximates several points.

        The points `phi` have the shape (n + 1, *space.shape). The origin of the coordinate system is the first point.

        - The first axis points from the origin to the last point. If these two are equal, the axis points to the point
          that is farthest from the origin.
        - The second axis is orthogonal to the first axis. It points to the side of the point that is farthest from the
          first axis. If all points are on one line, the second axis is zero.
        """
        points = phi.double()
        center = points[0]
        centers = center.expand_as(points)
        logs = space._log(centers, points)
        # The tolerance is relative to the size of the curve, so the result does not depend on the unit of length.
        lengths = norm(space, centers, logs)
        tolerance = RANK_TOLERANCE * lengths.max()
        # A closed curve has no chord. Its first axis points to the farthest point instead.
        end = logs[-1] if lengths[-1] > tolerance else logs[lengths.argmax()]
        size = norm(space, center, end)
        first = end / size if size > 0 else torch.zeros_like(end)
        # One step of the Gram-Schmidt process removes the component along the first axis.
        along = space._inner(centers, logs, first.expand_as(logs))
        across = logs - along.reshape(-1, *(1 for _ in end.shape)) * first
        heights = norm(space, centers, across)
        # Below the tolerance, the points are on one line, and the direction of a height is a rounding error.
        k = heights.argmax()
        second = across[k] / heights[k] if heights[k] > tolerance else torch.zeros_like(end)
        return cls(space, center, torch.stack([first, second]))

    def __call__(self, points: Float[Tensor, "m ..."]) -> Float64[Tensor, "m k"]:
        r"""Compute the coordinates $\langle \log_c x, a_i \rangle$ of points (m, *shape)."""
        x = points.detach().double()
        center = self.center.expand_as(x)
        logs = self.space._log(center, x)
        return torch.stack([self.space._inner(center, logs, axis.expand_as(x)) for axis in self.axes], -1).cpu()

    def curve(self, curve: Embedding, phi: Tensor, t: Float64[Tensor, " m"]) -> Float64[Tensor, "m 2"]:
        """Compute the coordinates (m, 2) of points of a curve at the parameters `t`."""
        if not self.space.flat:
            return self(curve(phi, t))
        # A curve in a flat space commutes with affine maps, such as the projection onto the plane.
        flat: Embedding = replace(curve, space=Flat(2))  # type: ignore[type-var]  # every curve is a dataclass
        return flat(self(phi), t.cpu())

    def grid(
        self, function: Callable[[Tensor], float], dtype: torch.dtype, low: Tensor, high: Tensor, resolution: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Evaluate a function on a rectangular grid of the plane, and return the grid coordinates and the values.

        The grid extends from the corner `low` to the corner `high`. The function is called with points of the given
        dtype.
        """
        ends = zip(low.tolist(), high.tolist(), strict=True)
        x, y = (torch.linspace(a, b, resolution, dtype=torch.float64) for a, b in ends)

        def value(a: float, b: float) -> float:
            point = self.space._exp(self.center, a * self.axes[0] + b * self.axes[1])
            # The function gets the dtype of the models, because a loss may not accept float64.
            return function(point.to(dtype))

        # Rows belong to y and columns to x, as matplotlib expects.
        values = [[value(a, b) for a in x.tolist()] for b in y.tolist()]
        return x, y, torch.tensor(values, dtype=torch.float64)
