"""Diagnostics of a curve in a loss landscape.

The diagnostics are the loss barrier along the curve, a comparison of the losses on the curve and on its chord, and the
curvature. The chord is the straight line or geodesic between the ends of the curve.
"""

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
"""The minimum ratio of the speed to the mean speed. Below this ratio, rounding destroys the direction of a curve."""
LEFT_OFFSET = 2.0**-48
"""The distance from a corner at which the velocity before the corner is evaluated.

The distance is larger than the rounding error of the parameter, but too small to change the direction.
"""


@dataclass(frozen=True, eq=False)
class Barrier:
    """The losses along a curve and along its chord.

    The chord is the direct path between the ends of the curve: a straight line or, on a curved space, a geodesic.

    Attributes:
        t: the parameters (m,) of the points on the curve at which the losses are evaluated.
        fraction: the positions (m,) of these points, from 0 to 1. With `by="parameter"` in the function `barrier`, they
            are equal to `t`. With `by="length"`, they are fractions of the length of the curve.
        losses: the losses (m,) at the points on the curve.
        chord: the losses (m,) on the chord, whose points are at the fractions `fraction` of the chord length.
    """

    t: Float64[Tensor, " m"]
    fraction: Float64[Tensor, " m"]
    losses: Float64[Tensor, " m"]
    chord: Float64[Tensor, " m"]

    def __repr__(self) -> str:
        return format_result(self, height=self.height, at=self.argmax)

    @property
    def height(self) -> float:
        r"""The barrier of the curve: the largest excess of the loss over the linear interpolation between the two ends.

        Let $L(\lambda)$ be the loss at the position $\lambda$ on the curve, where 0 is the start and 1 is the end. The
        barrier is

        $$\max_\lambda\, L(\lambda) - \big( (1 - \lambda)\, L(0) + \lambda\, L(1) \big) \ge 0.$$

        The maximum is over the positions in the attribute `fraction`.
        """
        return self._excess(self.losses).max().item()

    @property
    def argmax(self) -> float:
        """The parameter `t` at which the barrier of the curve occurs."""
        return self.t[self._excess(self.losses).argmax()].item()

    @property
    def chord_height(self) -> float:
        """The barrier of the chord."""
        return self._excess(self.chord).max().item()

    @property
    def chord_argmax(self) -> float:
        """The fraction of the chord at which the barrier of the chord occurs."""
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
        """Plot the losses along the curve and along its chord.

        A dotted line connects the losses at both ends of the curve. The barrier of each path is its largest height
        above this line.

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
        """Return the losses minus the linear interpolation between the losses at both ends."""
        excess = losses - torch.lerp(losses[0], losses[-1], self.fraction)
        # Rounding of the interpolation must not cause a barrier at an end.
        excess[[0, -1]] = 0
        return excess


@dataclass(frozen=True, eq=False)
class Curvature:
    r"""The curvature of a curve at several parameters, and its total turning.

    The curvature $k(t)$ is the angle by which the direction of the curve turns per unit of length.

    Attributes:
        t: the parameters (m,) at which the curvature is evaluated.
        values: the curvatures $k(t)$, (m,). Their unit is the reciprocal of the unit of length of the space.
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
        """The parameter at which the curvature is largest."""
        return self.t[self.values.argmax()].item()


def barrier(
    curve: CurveEmbedding, phi: Phi, function: Callable[[Tensor], float], *, points: int = 101, by: str = "parameter"
) -> Barrier:
    r"""Compute the loss barrier of a curve $\iota_\varphi$, and the barrier of its chord for comparison.

    The barrier is the largest excess of the loss $L$ over the linear interpolation between the losses at both ends:

    $$\max_{t}\; L(\iota_\varphi(t)) - \big( (1 - t)\, L(\iota_\varphi(0)) + t\, L(\iota_\varphi(1)) \big)$$

    The maximum is taken over a grid of parameters that contains both ends, so a barrier is never negative.

    Args:
        curve: a curve on any space. On a curved space the chord is the geodesic between the ends.
        phi: the control points of the curve, (size, *space.shape).
        function: a function from a point (*space.shape) to a number, such as the loss over a data set.
        points: the number of grid points on the curve and on the chord.
        by: `"parameter"` for a grid that is uniform in $t$, or `"length"` for a grid that is uniform in the arc length.
            With `"length"`, the interpolation is linear in the arc length, and not in $t$.

    Raises:
        ArgumentError: if an argument is invalid, or `function` does not return a finite number at a grid point.

    Source: Frankle et al. 2020, section 2, for two unequal ends; Garipov et al. 2018.

    Cost: 2 `points` - 2 calls of `function`.

    Example:
        The chord crosses a ridge between two valleys, and the curve avoids its top.

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
    # The chord is evaluated at the same fractions as the curve.
    part = torch.linspace(0, 1, points, dtype=torch.float64)
    t = part if by == "parameter" else curve.parameter_at_length(phi, part).cpu()
    start = curve(phi, 0.0)
    end = curve(phi, 1.0)
    ends = [_value(function, start, "t = 0"), _value(function, end, "t = 1")]
    # Curve and chord share their ends, so the losses there are evaluated once.
    inner = list(zip(t[1:-1].tolist(), part[1:-1].tolist(), strict=True))
    losses = [_value(function, curve(phi, s), f"t = {s:g}") for s, _ in inner]
    chord = [_value(function, geodesic(curve.space, start, end, s), f"{s:g} of the chord") for _, s in inner]
    on_curve, on_chord = (torch.tensor([ends[0], *values, ends[1]], dtype=torch.float64) for values in (losses, chord))
    return Barrier(t, part, on_curve, on_chord)


def chord_ratio(profile: Barrier) -> float:
    r"""Compute the mean ratio of the loss $L$ on the chord of a curve to the loss on the curve itself.

    $$\int_0^1 \frac{L(\hat\gamma(\lambda))}{L(\gamma(\lambda))}\, d\lambda,$$

    where $\gamma(\lambda)$ is the point of the curve at the fraction $\lambda$ of its length, and $\hat\gamma(\lambda)$
    is the point of the chord at the same fraction of its length.

    The ratio estimates the quality $Q$ of a learned manifold. Assumption 6 of the Report states that
    $L(\gamma(\lambda))$ is at most $1/Q$ times $L(\hat\gamma(\lambda))$ for every $\lambda$. At the ends, both losses
    are equal, so the assumption as printed does not hold for any $Q > 1$. In contrast, the mean ratio is always defined
    for a positive loss.

    Args:
        profile: the result of [`barrier`][manifoldagg.curves.diagnostics.barrier] with `by="length"`, for a positive
            loss.

    Returns:
        The mean ratio by the trapezoidal rule. It is above 1 if the curve has a lower loss than the chord.

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
    # A ratio of losses has no meaning if a loss can be 0 or negative.
    low = min(profile.losses.min().item(), profile.chord.min().item())
    if low <= 0:
        raise ArgumentError(f"profile: expected positive losses, got {low:g}")
    return torch.trapezoid(profile.chord / profile.losses, profile.fraction).item()


def curvature(curve: CurveEmbedding, phi: Phi, *, points: int = 101) -> Curvature:
    r"""Compute the curvature of a curve at several parameters, and its total turning.

    The curvature $k$ is the angle by which the direction of the curve turns per unit of length. It follows from the
    velocity $v$ and the covariant acceleration $a$ of the curve:

    $$k = \frac{\| a - \langle a, v \rangle v / \|v\|^2 \|}{\|v\|^2}.$$

    The total turning is the integral of the curvature over the length of the curve, plus the angles $\alpha_j$ at the
    corners of a piecewise curve:

    $$\int_0^1 k\, \|v\|\, dt + \sum_j \alpha_j.$$

    A geodesic has the curvature 0. If the speed $\|v\|$ is below 1e-12 times its mean, rounding errors dominate the
    direction of $v$, so the curvature is set to 0.

    Args:
        curve: a curve on any space.
        phi: the control points of the curve, (size, *space.shape).
        points: the number of evenly spaced parameters. For a Bézier curve on a flat space, the exact parameter of the
            maximum curvature is added.

    Returns:
        The curvature at each parameter, and the total turning by quadrature.

    Raises:
        ArgumentError: if an argument is invalid.

    Cost: two passes over `phi` on a flat space, and operations on small matrices.

    Example:
        The two sides of this control polygon are orthogonal.

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
    # The length is the integral of the speed over [0, 1], and therefore equals the mean speed.
    min_norm = MIN_RELATIVE_SPEED * curve.length(phi.detach()).item()
    phi = phi.detach()
    sharpest = []
    if not curve.space.flat:
        phi = phi.double()
    else:
        # The coordinates in the span of the control points have at most n entries instead of P.
        phi = coordinates(phi)
        curve = replace(curve, space=Flat(phi.shape[1]))  # type: ignore[type-var]  # every curve is a dataclass
        sharpest = [max_curvature(phi)[0]] if isinstance(curve, Bezier) and min_speed(phi)[1] > min_norm else []
    grid = torch.linspace(0, 1, points, dtype=torch.float64, device=phi.device)
    # `unique` also sorts the parameters.
    parameters = torch.cat([grid, grid.new_tensor(sharpest)]).unique()
    with torch.no_grad():
        speed, turning = _turning_rate(curve, phi, parameters, min_norm)
        values = turning / torch.where(speed > min_norm, speed, 1)
        # The tolerance of the quadrature is relative. An offset of one radian prevents it from resolving the rounding
        # errors of an almost straight path.
        total = arc_length(lambda t: 1 + _turning_rate(curve, phi, t, min_norm)[1], curve.breaks).item() - 1
        corners = torch.tensor(curve.breaks[1:-1], dtype=torch.float64, device=phi.device)
        if len(corners):
            total += _joint_angles(curve, phi, corners, min_norm).sum().item()
    return Curvature(parameters.cpu(), values.double().cpu(), total)


def _value(function: Callable[[Tensor], float], point: Tensor, label: str) -> float:
    """Evaluate the function at a point, and check that the result is a finite number."""
    return check_number(f"function at {label}", function(point))


def _turning_rate(curve: CurveEmbedding, phi: Tensor, t: Tensor, min_norm: float) -> tuple[Tensor, Tensor]:
    """Compute the speed of a curve, and its turning rate in radians per unit of the parameter `t`.

    If the speed is below `min_norm`, the direction of the velocity is undefined, so the turning rate is set to 0.
    """
    parameters = t.flatten()
    point = curve(phi, parameters)
    v = curve.velocity(phi, parameters)
    a = curve.acceleration(phi, parameters)
    speed = norm(curve.space, point, v)
    moves = speed > min_norm
    square = torch.where(moves, speed, 1).square()
    # The turning rate is k |v| = |a - (<a, v> / |v|²) v| / |v|.
    coefficient = (curve.space._inner(point, a, v) / square).reshape(-1, *(1 for _ in phi.shape[1:]))
    turning = torch.where(moves, norm(curve.space, point, a - coefficient * v) / square.sqrt(), 0)
    return speed.reshape(t.shape), turning.reshape(t.shape)


def _joint_angles(curve: CurveEmbedding, phi: Tensor, t: Tensor, min_norm: float) -> Tensor:
    """Compute the angle in [0, π] by which a piecewise curve turns at each joint `t`.

    If the speed before or after a joint is at most `min_norm`, the direction is undefined, and the angle is set to 0.
    """
    point = curve(phi, t)
    before = curve.velocity(phi, t - LEFT_OFFSET)
    after = curve.velocity(phi, t)
    sizes = [norm(curve.space, point, v) for v in (before, after)]
    # Both vectors are scaled to equal length. The tangent of half the angle is then |w - u| / |w + u|, so no digits
    # cancel at small angles.
    u, w = (
        size.reshape(-1, *(1 for _ in phi.shape[1:])) * v for size, v in zip(sizes[::-1], (before, after), strict=True)
    )
    angles = 2 * torch.atan2(norm(curve.space, point, w - u), norm(curve.space, point, w + u))
    return torch.where(torch.minimum(*sizes) > min_norm, angles, 0)
