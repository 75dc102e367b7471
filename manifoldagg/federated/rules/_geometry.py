"""Conversion of client updates to tangent vectors, from which rules compute their steps.

A `Frame` contains tangent vectors at the current server model: the changes of the client's model during the training,
and the change of the server model since the client started.
"""

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
    """Check the number of points of an update.

    Args:
        rule: the rule, which is named in the error message.
        update: the update.
        count: the expected number of points. `None` accepts any positive number.
        description: the expected number in words, for the error message.

    Raises:
        ArgumentError: if the number of points differs from `count`.
    """
    given = len(update.points)
    if given == 0 or given != (count or given):
        expected = f"expected {description}, ({count or 'n'}, P), for {type(rule).__name__}"
        raise ArgumentError(f"points: {expected}, got {given}")


def frame_from_update(
    space: Manifold, update: Update, *, transport: str | None = None, rungs: int = DEFAULT_RUNGS, tensors: bool = False
) -> Frame:
    r"""Convert an update to tangent vectors at the current server model $\Theta^\tau$.

    The result contains a displacement $v_i$ for each model $\varphi_i$ that the client has returned, and the drift $g$
    of the server. Both are changes since the client's start model $\Theta^t$:

    - On flat spaces and for tensors of low rank, $v_i = \varphi_i - \Theta^t$ and $g = \Theta^\tau - \Theta^t$.
    - On other curved spaces, $v_i$ is the tangent vector $\log_{\Theta^t} \varphi_i$ at $\Theta^t$ after its transport
      to $\Theta^\tau$, and $g = -\log_{\Theta^\tau} \Theta^t$.

    Args:
        space: the space of the points.
        update: an update whose base, current model and points are validated.
        transport: the transport on a curved space, as in [`Frame.of`][manifoldagg.corrections.Frame.of]. For low-rank
            leaves, `"projection"` projects the differences onto the tangent space at $\Theta^\tau$.
        rungs: the number of rungs of a ladder.
        tensors: whether each named tensor of the space is a separate segment.

    Raises:
        ArgumentError: if the logarithm of a point is undefined, or if a functorch transform tracks derivatives.
    """
    points = update.points if isinstance(update.points, tuple) else update.points.unbind()
    rows = (update.base, update.current, *points)
    if needs_autograd_path(rows):
        rows = tuple([detach(row) for row in rows])
        if needs_autograd_path(rows):
            raise ArgumentError(
                "update: expected tensors outside of functorch transforms, as a server step is not differentiable"
            )
    base, current, *points = rows
    if space.flat or space.ambient:
        segments = None
        # A tuple of tensors is a point of a parameter space, whose leaves are the same for every point.
        point = base[0] if isinstance(base, tuple) else base
        if tensors:
            segments = {leaf.name: leaf.part.stop - leaf.part.start for leaf in space.leaves(point)} or None
        ambient = FLAT_AMBIENT
        if not space.flat:
            ambient = AmbientSpace.of(space, point) if transport is None else TangentSpace.at(space, current)
            segments = segments or ambient.segments
        if update.is_pseudo_gradient:
            if ambient.leaves:
                raise ArgumentError("points: expected models, as low-rank leaves do not support pseudo-gradients")
            return Frame.of_gradients(points, base, current, segments=segments)
        return Frame.of_points(points, base, current, segments=segments, ambient=ambient)
    # If the space has a projection, the logarithm and the transport are computed in float64.
    base, current, points = (in_float64(space, x) for x in (base, current, update.points.detach()))
    displacements = checked_log(space, base, points, "points: out of reach of the base")
    return Frame.of_tangents(Transporter(space, base, current, transport, rungs), displacements)


def unit_coefficients(k: int) -> Matrix:
    """Return the k × k identity matrix as an array of Python objects."""
    return np.eye(k, dtype=object)


def in_float64(space: Manifold, x: Tensor) -> Tensor:
    """Convert the point `x` to float64, and project it onto the space.

    The projection removes the rounding errors of a narrower dtype. If the space has no projection, the function returns
    `x` unchanged.
    """
    return space._project(x.double()) if "project" in space.capabilities else x


def safe_sqrt(square: float) -> float:
    """Return the square root of a number that rounding may have made slightly negative."""
    return math.sqrt(max(square, 0.0))
