"""Steps along geodesics and curves on a curved space."""

import math

import torch
from torch import Tensor

from manifoldagg._validation import check_finite
from manifoldagg.corrections.transport import checked_log
from manifoldagg.curves import CurveEmbedding
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.rules._step_curve import StepCurve
from manifoldagg.manifolds import Manifold
from manifoldagg.manifolds.formulas import distance, norm

__all__ = ["exp_projected", "parameter_at_distance_on", "project_if_possible", "step_along_curve", "tangents_at"]

GRID_INTERVALS = 64
"""The number of equal intervals of [0, 1] in the search for the first crossing of a distance."""
EVALUATION_BATCH = 8
"""The number of points per evaluation of the curve. Each refinement divides the bracket into as many sections."""
BRACKET_TOLERANCE = 1e-9
"""The width below which the distance is linear in the bracket, up to rounding."""


def step_along_curve(
    space: Manifold, current: Tensor, tangents: Tensor, step_curve: StepCurve, rho: float
) -> tuple[float, Tensor, float]:
    r"""Move the current model $\Theta^\tau$ along the curve with the control points $\psi_i = \exp_{\Theta^\tau} u_i$.

    The tangent vectors $u_1, \dots, u_n$ are the corrected displacements. The option `pull_back` of `step_curve`
    determines the parameter $s$ of the new model $\iota_\psi(s)$ from the rate $\rho$:

    - With the pull-back `"chord"`, $s$ is the smallest value with
      $d(\Theta^\tau, \iota_\psi(s)) = \rho\, d(\Theta^\tau, \psi_n)$.
    - With the pull-back `"length"`, the length of the curve up to $s$ is $\rho$ times the length of the whole curve.
    - With any other pull-back, $s = \rho$.

    For a single tangent vector without an embedding, the curve is a geodesic, and $s = \rho$ with every pull-back.

    Args:
        space: a curved space, or a flat one if the step is along the path of an embedding.
        current: the point $\Theta^\tau$.
        tangents: the tangents $u_1, \dots, u_n$ at `current`, after `StepCurve.straighten`.
        step_curve: the type of the curve, and the meaning of the rate on it.
        rho: the effective rate $\rho \ge 0$ on this curve.

    Returns:
        The parameter $s$, the new point, and its distance from `current`.

    Raises:
        ArgumentError: if the log at `current` of a point of the curve is undefined.
    """
    if len(tangents) == 1 and step_curve.embedding is None:
        return rho, exp_projected(space, current, rho * tangents[0]), rho * float(norm(space, current, tangents[0]))
    phi = torch.cat([current[None], space._exp(current.expand_as(tangents), tangents)])
    curve = step_curve.curve(space, len(tangents))
    checked_log(space, current, phi[-1], "points: the corrected curve leaves the reach of the current point")
    s = rho
    if step_curve.pull_back == "chord":
        s = parameter_at_distance_on(curve, phi, rho)
    elif step_curve.pull_back == "length":
        s = float(curve.parameter_at_length(phi, rho))
    model = project_if_possible(space, curve(phi, s))
    return s, model, float(distance(space, current, model))


def parameter_at_distance_on(curve: CurveEmbedding, phi: Tensor, rho: float) -> float:
    r"""Return the parameter at which a curve first reaches a given distance from its start.

    The curve $\iota_\varphi$ leads from $\varphi_0$ to $\varphi_n$. The given distance is the fraction $\rho$ of the
    distance between these points. The result is the smallest $s \in [0, 1]$ with
    $d(\varphi_0, \iota_\varphi(s)) = \rho\, d(\varphi_0, \varphi_n)$.

    The function divides [0, 1] into 64 equal intervals, and selects the first interval at whose end the curve has
    reached the distance. In this interval, it finds $s$ up to rounding errors. If the curve exceeds the distance only
    in the interior of an interval, the function does not find this crossing.

    Args:
        curve: a curve on any space.
        phi: the control points of the curve.
        rho: the fraction $\rho \in [0, 1]$ of the distance.

    Returns:
        The parameter $s$. It is 0 if the curve ends at its start, and 1 if only the end reaches the distance.

    Raises:
        ArgumentError: if the distance of a point of the curve from its start is not finite.

    Source: Manifold (12).

    Example:
        >>> from manifoldagg.curves import Bezier
        >>> from manifoldagg.manifolds import Sphere
        >>> start, end = torch.eye(2, dtype=torch.float64)
        >>> round(parameter_at_distance_on(Bezier(Sphere(2), 1), torch.stack([start, end]), 0.25), 12)
        0.25
    """
    goal = rho * float(distance(curve.space, phi[0], phi[-1]))
    if goal == 0:
        return 0.0

    def section(low: float, high: float, gap: float, parts: int) -> tuple[float, float, float, float] | None:
        """Divide [low, high] into `parts` equal sections, and return the first whose end reaches the distance `goal`.

        Returns:
            The two ends of the section, and `goal` minus the distance at each end. `None` if there is no such section.
        """
        before = low
        for first in range(0, parts, EVALUATION_BATCH):
            places = [low + (high - low) * (first + i + 1) / parts for i in range(EVALUATION_BATCH)]
            points = curve(phi, torch.tensor(places, dtype=torch.float64, device=phi.device))
            reached = distance(curve.space, phi[0].expand_as(points), points).tolist()
            for place, away in zip(places, reached, strict=True):
                if not math.isfinite(away):
                    raise ArgumentError(
                        f"points: expected a finite distance along the corrected curve, got {away:g} at s = {place:g}"
                    )
                after = goal - away
                if after <= 0:
                    return before, place, gap, after
                before = place
                gap = after
        return None

    found = section(0.0, 1.0, goal, GRID_INTERVALS)
    low, high, ahead, behind = found or (1.0, 1.0, 0.0, 0.0)
    # `bernstein.find_sign_change` evaluates one parameter per step. A batch of points costs little more
    # than one point, so this search evaluates batches.
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
    """Return linear combinations of frame rows, (n, P), as tangents at `current`, (n, *shape)."""
    u = check_finite("points: corrected displacements", rows).view(-1, *current.shape)
    return space._project_tangent(current.expand_as(u), u) if "project_tangent" in space.capabilities else u
