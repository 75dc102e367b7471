"""The step on a curved space: the distance along a corrected curve, and the new point."""

import math

import torch
from torch import Tensor

from manifoldagg._validation import check_finite
from manifoldagg.corrections.transport import checked_log
from manifoldagg.curves import Bezier, Piecewise
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.rules._step_curve import StepCurve
from manifoldagg.manifolds import Manifold
from manifoldagg.manifolds.formulas import distance, norm

__all__ = ["exp_projected", "parameter_at_distance_on", "project_if_possible", "step_along_curve", "tangents_at"]

GRID_INTERVALS = 64
"""Into how many parts [0, 1] is cut to find where a distance is reached for the first time."""
EVALUATION_BATCH = 8
"""So many places are looked at together, and the bracket is cut into so many parts each time."""
BRACKET_TOLERANCE = 1e-9
"""Where the distance is as good as linear."""


def step_along_curve(
    space: Manifold, current: Tensor, tangents: Tensor, step_curve: StepCurve, rho: float
) -> tuple[float, Tensor, float]:
    r"""Step on the curve of $\psi_i = \exp_{\Theta^\tau} u_i$ by the given rate.

    One tangent is a geodesic: $s$ is what it is on a line. With more, a pull-back by the chord takes the smallest $s$
    with $d(\Theta^\tau, \iota_\psi(s)) = \rho\, d(\Theta^\tau, \psi_n)$.

    Args:
        space: curved.
        current: $\Theta^\tau$, of its shape.
        tangents: $u_1, \dots, u_n$ at `current`, as the step curve has straightened them.
        step_curve: which curve they make, and what the rate means on it.
        rho: $\rho \ge 0$, what is left of it on this curve.

    Returns:
        $s$, the new point, and its distance from `current`.

    Raises:
        ArgumentError: if a point of the curve is out of reach of `current`.
    """
    if len(tangents) == 1:
        return rho, exp_projected(space, current, rho * tangents[0]), rho * float(norm(space, current, tangents[0]))
    phi = torch.cat([current[None], space._exp(current.expand_as(tangents), tangents)])
    curve = step_curve.curve(space, len(tangents))
    checked_log(space, current, phi[-1], "points: the corrected curve leaves the reach of the current point")
    s = parameter_at_distance_on(curve, phi, rho) if step_curve.pull_back == "chord" else rho
    model = project_if_possible(space, curve(phi, s))
    return s, model, float(distance(space, current, model))


def parameter_at_distance_on(curve: Bezier | Piecewise, phi: Tensor, rho: float) -> float:
    r"""Return the smallest $s \in [0, 1]$ with $d(\varphi_0, \iota_\varphi(s)) = \rho\, d(\varphi_0, \varphi_n)$.

    The first change of sign on 64 equidistant places, whose bracket is cut down until a chord is exact: a curve that
    comes to the distance and leaves it again between two places is not seen.

    Args:
        curve: on any space.
        phi: its control points.
        rho: in [0, 1].

    Returns:
        $s$; 0 where the curve ends where it starts; 1 where it comes to the distance at its end only.

    Raises:
        ArgumentError: if a point of the curve has no distance from its start.

    Source: Manifold (12).

    Example:
        >>> from manifoldagg.manifolds import Sphere
        >>> start, end = torch.eye(2, dtype=torch.float64)
        >>> round(parameter_at_distance_on(Bezier(Sphere(2), 1), torch.stack([start, end]), 0.25), 12)
        0.25
    """
    goal = rho * float(distance(curve.space, phi[0], phi[-1]))
    if goal == 0:
        return 0.0

    def section(low: float, high: float, gap: float, parts: int) -> tuple[float, float, float, float] | None:
        """Return the first of equal sections at whose end the distance is reached, and the remainders at both ends."""
        before = low
        for first in range(0, parts, EVALUATION_BATCH):
            places = [low + (high - low) * (first + i + 1) / parts for i in range(EVALUATION_BATCH)]
            points = curve(phi, torch.tensor(places, dtype=torch.float64, device=phi.device))
            reached = distance(curve.space, phi[0].expand_as(points), points).tolist()
            for place, away in zip(places, reached, strict=True):
                if not math.isfinite(away):
                    raise ArgumentError(f"points: no distance along the corrected curve, at {place:g} of it")
                after = goal - away
                if after <= 0:
                    return before, place, gap, after
                before = place
                gap = after
        return None

    found = section(0.0, 1.0, goal, GRID_INTERVALS)
    low, high, ahead, behind = found or (1.0, 1.0, 0.0, 0.0)
    # Not `bernstein.find_sign_change`: it evaluates one place a step, where a batch of points costs
    # little more than one.
    while found is not None and high - low > BRACKET_TOLERANCE:
        low, high, ahead, behind = found
        found = section(low, high, ahead, EVALUATION_BATCH)
    return low + (high - low) * (ahead / (ahead - behind) if ahead > behind else 1.0)


def exp_projected(space: Manifold, current: Tensor, tangent: Tensor) -> Tensor:
    r"""Return $\exp_{\Theta^\tau} u$, projected onto the space to remove rounding errors."""
    return project_if_possible(space, space._exp(current, tangent))


def project_if_possible(space: Manifold, point: Tensor) -> Tensor:
    """Return the nearest point of the space, if the space has a projection."""
    return space._project(point) if "project" in space.capabilities else point


def tangents_at(space: Manifold, current: Tensor, rows: Tensor) -> Tensor:
    """Return combinations of rows (n, P) as tangents at `current`: (n, *shape)."""
    u = check_finite("points: corrected displacements", rows).view(-1, *current.shape)
    return space._project_tangent(current.expand_as(u), u) if "project_tangent" in space.capabilities else u
