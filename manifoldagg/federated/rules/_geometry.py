"""The frame of an update: tangents at the current model, their corrections and their inner products."""

import math

import numpy as np
from torch import Tensor

from manifoldagg.corrections import Frame
from manifoldagg.corrections.frame import detach
from manifoldagg.corrections.gram import Matrix
from manifoldagg.corrections.transport import DEFAULT_RUNGS, Transporter, checked_log
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.types import Update
from manifoldagg.kernels.operands import needs_autograd_path
from manifoldagg.manifolds import Manifold
from manifoldagg.manifolds.ambient import FLAT_AMBIENT, AmbientSpace
from manifoldagg.manifolds.tangents import TangentSpace

__all__ = [
    "check_points",
    "frame_from_update",
    "in_float64",
    "safe_sqrt",
    "unit_coefficients",
]


def check_points(rule: object, update: Update, count: int | None = 1, description: str = "one model") -> None:
    """Check that an update has `count` points; `None` accepts any positive number.

    Raises:
        ArgumentError: if it has another number, with `description`, the number that the rule expects.
    """
    given = len(update.points)
    if given == 0 or given != (count or given):
        expected = f"expected {description}, ({count or 'n'}, P), for {type(rule).__name__}"
        raise ArgumentError(f"points: {expected}, got {given}")


def frame_from_update(
    space: Manifold, update: Update, *, transport: str | None = None, rungs: int = DEFAULT_RUNGS, tensors: bool = False
) -> Frame:
    r"""Return the rows $v_1, \dots, v_n, g$ of an update, tangent at the current model.

    On a flat space, and where leaves are of low rank, they are differences of the update's own tensors. On a curved one
    $v_i = \log_{\Theta^t} \varphi_i$, transported to $\Theta^\tau$; where the space has a projection, this is done in
    float64.

    Args:
        space: of the points.
        update: with base, current and points, which the server has validated.
        transport: on a curved space, as in [`Frame.of`][manifoldagg.corrections.Frame.of]; where leaves are of low rank
            `"projection"` takes what of the differences is tangent at $\Theta^\tau$.
        rungs: of a ladder.
        tensors: whether the named tensors of such a space are segments.

    Raises:
        ArgumentError: if a point is out of reach, or a derivative is followed.
    """
    points = update.points if isinstance(update.points, tuple) else update.points.unbind()
    rows = (update.base, update.current, *points)
    if needs_autograd_path(rows):
        rows = tuple([detach(row) for row in rows])
        if needs_autograd_path(rows):
            raise ArgumentError("update: a server step has no derivative; call it outside of functorch transforms")
    base, current, *points = rows
    if space.flat or space.ambient:
        segments = None
        # A row of tensors is a point of a parameter space, whose leaves are the same for every point.
        point = base[0] if isinstance(base, tuple) else base
        if tensors:
            segments = {leaf.name: leaf.part.stop - leaf.part.start for leaf in space.leaves(point)} or None
        ambient = FLAT_AMBIENT
        if not space.flat:
            ambient = AmbientSpace.of(space, point) if transport is None else TangentSpace.at(space, current)
            segments = segments or ambient.segments
        if update.is_pseudo_gradient:
            if ambient.leaves:
                raise ArgumentError("points: expected models: of low-rank leaves there are no pseudo-gradients")
            return Frame.of_gradients(points, base, current, segments=segments)
        return Frame.of_points(points, base, current, segments=segments, ambient=ambient)
    base, current, points = (in_float64(space, x) for x in (base, current, update.points.detach()))
    displacements = checked_log(space, base, points, "points: out of reach of the base")
    return Frame.of_tangents(Transporter(space, base, current, transport, rungs), displacements)


def unit_coefficients(k: int) -> Matrix:
    """Return for each of k rows its coefficients as a combination of the rows."""
    return np.eye(k, dtype=object)


def in_float64(space: Manifold, x: Tensor) -> Tensor:
    """Return the float64 point of the space whose rounding is `x`; `x` itself if the space has no projection."""
    return space._project(x.double()) if "project" in space.capabilities else x


def safe_sqrt(square: float) -> float:
    """Return the square root of a square that rounding can leave slightly below zero."""
    return math.sqrt(max(square, 0.0))
