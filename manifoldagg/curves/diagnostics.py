"""Diagnostics of a path through a loss landscape: its barrier, its gain over the straight line, its curvature."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from manifoldagg._io import new_figure
from manifoldagg._result_repr import format_result
from manifoldagg._validation import check_choice, check_count, check_number, short_repr
from manifoldagg.curves._legend import legend_below
from manifoldagg.curves.arc import arc_length
from manifoldagg.curves.bezier import Bezier
from manifoldagg.curves.path import CurveEmbedding, Phi
from manifoldagg.curves.shape import coordinates, max_curvature, min_speed
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import Flat
from manifoldagg.manifolds.formulas import geodesic, norm

__all__ = ["Barrier", "Curvature", "barrier", "chord_ratio", "curvature"]

PARAMETRISATIONS = ("parameter", "length")
MIN_RELATIVE_SPEED = 1e-12
"""Of the mean speed of a path: what is slower has no direction that rounding has left."""
LEFT_OFFSET = 2.0**-48
"""A corner: more than what a parameter is rounded by, and nothing to a direction."""


@dataclass(frozen=True, eq=False)
class Barrier:
    r"""The losses $L$ along a curve and along its chord, which have the same start and end.

    Attributes:
        t: (m,), the parameters of the curve at which the losses are evaluated.
        fraction: (m,), the fraction of the path before each of these points: `t` itself, or the fraction of the length.
            The chord's losses are evaluated at the same fractions of the chord.
        losses: (m,), the losses along the curve.
        chord: (m,), the losses along the chord, which is a straight line or a geodesic.
    """

    t: Float64[Tensor, " m"]
    fraction: Float64[Tensor, " m"]
    losses: Float64[Tensor, " m"]
    chord: Float64[Tensor, " m"]

    def __repr__(self) -> str:
        return format_result(self, height=self.height, at=self.argmax)

    @property
    def height(self) -> float:
        r"""$\max_t\, L(\iota(t)) - (1 - t) L(\iota(0)) - t L(\iota(1))$, the barrier of the curve: 0 or more."""
        return self._excess(self.losses).max().item()

    @property
    def argmax(self) -> float:
        """The `t` at which the curve is highest above the line between the losses at its ends."""
        return self.t[self._excess(self.losses).argmax()].item()

    @property
    def chord_height(self) -> float:
        """The barrier of the chord."""
        return self._excess(self.chord).max().item()

    @property
    def chord_argmax(self) -> float:
        """The position on the chord of its barrier."""
        return self.fraction[self._excess(self.chord).argmax()].item()

    def plot(
        self,
        axes: Any = None,
        *,
        label: str = "loss",
        name: str = "learned curve",
        color: str = "black",
        legend: bool = True,
    ) -> Any:
        """Plot both profiles, and the line from which their heights are measured.

        Args:
            axes: matplotlib axes. The default is the axes of a new figure.
            label: the name of the values.
            name: the name of the curve.
            color: the colour of the curve.
            legend: whether to draw a legend below the plot.

        Returns:
            The axes.
        """
        axes = new_figure().subplots() if axes is None else axes
        axes.plot(self.fraction, self.chord, "--", color="crimson", linewidth=1.8, label="chord")
        axes.plot(self.fraction, self.losses, color=color, linewidth=2.2, label=name)
        axes.plot([0, 1], self.losses[[0, -1]], ":", color="grey", linewidth=1, label="between the losses at the ends")
        axes.set_xlim(0, 1)
        axes.set_xlabel("fraction of the path")
        axes.set_ylabel(label)
        if legend:
            legend_below(axes)
        return axes

    def _excess(self, losses: Tensor) -> Tensor:
        """Above the line between the ends; there it is 0 whatever the rounding."""
        excess = losses - torch.lerp(losses[0], losses[-1], self.fraction)
        excess[[0, -1]] = 0
        return excess


@dataclass(frozen=True, eq=False)
class Curvature:
    r"""The curvature of a path: the length $k$ of its curvature vector.

    Attributes:
        t: (m,), the parameters at which the curvature is evaluated.
        values: (m,), the curvatures $k(t)$, in 1 / units of the space.
        total: the total turning $\int k\, ds$ in radians, which includes the angles at corners.
    """

    t: Float64[Tensor, " m"]
    values: Float64[Tensor, " m"]
    total: float

    def __repr__(self) -> str:
        return format_result(self, maximum=self.maximum, at=self.argmax, total=self.total)

    @property
    def maximum(self) -> float:
        """The largest of `values`."""
        return self.values.max().item()

    @property
    def argmax(self) -> float:
        """The parameter of the maximum."""
        return self.t[self.values.argmax()].item()


def barrier(
    curve: CurveEmbedding, phi: Phi, function: Callable[[Tensor], float], *, points: int = 101, by: str = "parameter"
) -> Barrier:
    r"""Compute the barrier of the loss along a curve and along its chord:

    $$\max_{t}\; L(\iota_\varphi(t)) - \big( (1 - t)\, L(\iota_\varphi(0)) + t\, L(\iota_\varphi(1)) \big).$$

    The maximum is over a grid that contains both ends, so a barrier is never negative.

    Args:
        curve: a curve on any space. On a curved space the chord is the geodesic between the ends.
        phi: the control points of the curve, (size, *space.shape).
        function: a function from a point (*space.shape) to a number, such as the loss over a data set.
        points: the number of grid points on the curve and on the chord.
        by: `"parameter"` for a grid that is uniform in t, or `"length"` for one that is uniform in the length.

    Raises:
        ArgumentError: naming the invalid argument, or the grid point at which `function` is not a finite number.

    Source: Frankle et al. 2020, section 2, for two unequal ends; Garipov et al. 2018. Cost: 2 `points` - 2 calls of
        `function`.

    Example:
        A ridge between two valleys, and a way around its top.

        >>> import torch
        >>> from manifoldagg.curves import Bezier
        >>> phi = torch.tensor([[-1.0, 0.0], [0.0, 2.0], [1.0, 0.0]])
        >>> found = barrier(Bezier(Flat(2)), phi, lambda theta: torch.exp(-theta.square().sum() * 3).item())
        >>> round(found.chord_height, 3), found.chord_argmax
        (0.95, 0.5)
        >>> round(found.height, 3)
        0.056
    """
    if not isinstance(curve, CurveEmbedding):
        raise ArgumentError(f"curve: expected an embedding of [0, 1] such as Bezier, got {short_repr(curve)}")
    check_count("points", points, at_least=2)
    check_choice("by", by, PARAMETRISATIONS)
    curve._check_phi(phi)
    phi = phi.detach()
    part = torch.linspace(0, 1, points, dtype=torch.float64)
    t = part if by == "parameter" else curve.parameter_at_length(phi, part).cpu()
    start = curve(phi, 0.0)
    end = curve(phi, 1.0)
    ends = [_value(function, start, "t = 0"), _value(function, end, "t = 1")]
    inner = list(zip(t[1:-1].tolist(), part[1:-1].tolist(), strict=True))
    losses = [_value(function, curve(phi, s), f"t = {s:g}") for s, _ in inner]
    chord = [_value(function, geodesic(curve.space, start, end, s), f"{s:g} of the chord") for _, s in inner]
    along, straight = (torch.tensor([ends[0], *values, ends[1]], dtype=torch.float64) for values in (losses, chord))
    return Barrier(t, part, along, straight)


def chord_ratio(profile: Barrier) -> float:
    r"""$\int_0^1 \frac{L(\hat\gamma(\lambda))}{L(\gamma(\lambda))}\, d\lambda$: how many times better than the chord
    $\hat\gamma$ the curve $\gamma$ is, on average.

    It estimates the quality $Q$ of a learned manifold: the Report assumes that the loss a given part $\lambda$ of the
    length along its geodesic is at most $1/Q$ of that at the same part of the chord. (As printed it asks for that at
    every $\lambda$: at the ends the ratio is 1, so that no such $Q$ exceeds 1.)

    Args:
        profile: from [`barrier`][manifoldagg.curves.diagnostics.barrier] with `by="length"`, of a positive loss.

    Returns:
        The mean by the trapezoidal rule; above 1 where the curve is the better way.

    Raises:
        ArgumentError: if a loss is 0 or negative.

    Source: Report, assumption 6.

    Example:
        >>> import torch
        >>> from manifoldagg.curves import Bezier
        >>> phi = torch.tensor([[-1.0, 0.0], [0.0, 2.0], [1.0, 0.0]])
        >>> ridge = lambda theta: 1 + torch.exp(-theta.square().sum() * 3).item()
        >>> round(chord_ratio(barrier(Bezier(Flat(2)), phi, ridge, by="length")), 3)
        1.396
    """
    low = min(profile.losses.min().item(), profile.chord.min().item())
    if low <= 0:
        raise ArgumentError(f"profile: expected positive losses to divide by, got {low:g}")
    return torch.trapezoid(profile.chord / profile.losses, profile.fraction).item()


def curvature(curve: CurveEmbedding, phi: Phi, *, points: int = 101) -> Curvature:
    r"""Compute the curvature of a path with velocity $v$ and covariant acceleration $a$

    $$k = \frac{\| a - \langle a, v \rangle v / \|v\|^2 \|}{\|v\|^2}, \qquad
      \int k\, ds = \int_0^1 k\, \|v\|\, dt + \sum \angle,$$

    the sum being over the corners of a piecewise curve. A geodesic has $k = 0$; where a path rests, $\|v\|$ below 1e-12
    of its mean, it counts as straight.

    Args:
        curve: on any space.
        phi: what draws it, (size, *space.shape).
        points: how many evenly spaced places to look at. The sharpest place of a Bézier curve on a flat space is
            found among the roots of a polynomial, and added to them.

    Returns:
        The curvature at each place, and the total by quadrature.

    Raises:
        ArgumentError: naming the argument that does not fit.

    Cost: on a flat space two passes over `phi`, then small algebra.

    Example:
        The two legs of this control polygon meet at a right angle.

        >>> import torch
        >>> from manifoldagg.curves import Bezier
        >>> found = curvature(Bezier(Flat(2)), torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 0.0]]))
        >>> round(found.total, 6), round(found.maximum, 6), found.argmax
        (1.570796, 1.0, 0.5)
    """
    if not isinstance(curve, CurveEmbedding):
        raise ArgumentError(f"curve: expected an embedding of [0, 1] such as Bezier, got {short_repr(curve)}")
    check_count("points", points, at_least=2)
    curve._check_phi(phi)
    slow = MIN_RELATIVE_SPEED * curve.length(phi.detach()).item()
    phi = phi.detach()
    known = []
    if not curve.space.flat:
        phi = phi.double()
    else:
        # The same curve in as few coordinates as its points need.
        phi = coordinates(phi)
        curve = replace(curve, space=Flat(phi.shape[1]))  # type: ignore[type-var]  # every curve is a dataclass
        known = [max_curvature(phi)[0]] if isinstance(curve, Bezier) and min_speed(phi)[1] > slow else []
    even = torch.linspace(0, 1, points, dtype=torch.float64, device=phi.device)
    places = torch.cat([even, even.new_tensor(known)]).unique()
    with torch.no_grad():
        speed, turning = _turning_rate(curve, phi, places, slow)
        values = turning / torch.where(speed > slow, speed, 1)
        # One radian more, to which the rounding of a path that hardly turns is nothing: it is not to be resolved.
        total = arc_length(lambda t: 1 + _turning_rate(curve, phi, t, slow)[1], curve.breaks).item() - 1
        corners = torch.tensor(curve.breaks[1:-1], dtype=torch.float64, device=phi.device)
        if len(corners):
            total += _joint_angles(curve, phi, corners, slow).sum().item()
    return Curvature(places.cpu(), values.double().cpu(), total)


def _value(function: Callable[[Tensor], float], point: Tensor, label: str) -> float:
    return check_number(f"function at {label}", function(point))


def _turning_rate(curve: CurveEmbedding, phi: Tensor, t: Tensor, slow: float) -> tuple[Tensor, Tensor]:
    """The speed, and by how many radians the direction turns a unit of t; 0 where the path rests."""
    place = t.flatten()
    here = curve(phi, place)
    v = curve.velocity(phi, place)
    a = curve.acceleration(phi, place)
    speed = norm(curve.space, here, v)
    moves = speed > slow
    square = torch.where(moves, speed, 1).square()
    share = (curve.space._inner(here, a, v) / square).reshape(-1, *(1 for _ in phi.shape[1:]))
    turning = torch.where(moves, norm(curve.space, here, a - share * v) / square.sqrt(), 0)
    return speed.reshape(t.shape), turning.reshape(t.shape)


def _joint_angles(curve: CurveEmbedding, phi: Tensor, t: Tensor, slow: float) -> Tensor:
    """Between the directions in which a path comes to places and leaves them, in [0, π]; 0 where it rests."""
    here = curve(phi, t)
    before = curve.velocity(phi, t - LEFT_OFFSET)
    after = curve.velocity(phi, t)
    sizes = [norm(curve.space, here, v) for v in (before, after)]
    # Of equal length, so that half the angle is that between their sum and their difference.
    u, w = (
        size.reshape(-1, *(1 for _ in phi.shape[1:])) * v for size, v in zip(sizes[::-1], (before, after), strict=True)
    )
    angles = 2 * torch.atan2(norm(curve.space, here, w - u), norm(curve.space, here, w + u))
    return torch.where(torch.minimum(*sizes) > slow, angles, 0)
