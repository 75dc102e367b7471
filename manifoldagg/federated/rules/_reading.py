"""What a rule reads of an update: a frame of tangents at the current model, corrected, and its inner products."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manifoldagg.corrections import Composition, Correction, Frame
from manifoldagg.corrections.algebra import congruence, top_left, total
from manifoldagg.corrections.correction import Lines
from manifoldagg.corrections.frame import CANCELLED
from manifoldagg.corrections.place import RUNGS, leaves_of
from manifoldagg.errors import ArgumentError, check_number
from manifoldagg.federated.contract import Update
from manifoldagg.kernels import gram
from manifoldagg.kernels.rows import is_transformed
from manifoldagg.manifolds import Manifold, Validated, check_point

Numbers = list[list[float]]


@dataclass(frozen=True, eq=False)
class Reading:
    r"""A corrected update.

    Attributes:
        frame: with the rows that the correction added.
        lines: $C$ for each segment, or one for all: (S, n, k).
        inner: of $v_1, \dots, v_n, g$ as they came: (n + 1, n + 1).
        moved: of the corrected rows: (n, n).
        state: the next one of the correction.
    """

    frame: Frame
    lines: Lines
    inner: Numbers
    moved: Numbers
    state: Any


def frame_of(
    space: Manifold, update: Update, *, transport: str | None = None, rungs: int = RUNGS, tensors: bool = False
) -> Frame:
    r"""The rows $v_1, \dots, v_n, g$ of an update, tangent at the current model.

    On a flat space they are differences of the update's own tensors. On a curved one $v_i = \log_{\Theta^t} \varphi_i$,
    transported to $\Theta^\tau$; where the space has a projection, this is done in float64.

    Args:
        space: of the points.
        update: with base, current and points.
        transport: on a curved space, as in [`Frame.of`][manifoldagg.corrections.Frame.of].
        rungs: of a ladder.
        tensors: whether the named tensors of a flat space are segments.

    Raises:
        ArgumentError: if a point is off the space or out of reach, or a derivative is followed.
    """
    given = {"base": update.base.detach(), "current": update.current.detach(), "points": update.points.detach()}
    if is_transformed([*given.values()]):
        raise ArgumentError("update: a server step has no derivative; call it outside of functorch transforms")
    if space.flat:
        base, current, points = given.values()
        segments = [leaf.part.stop - leaf.part.start for leaf in leaves_of(space, base)] if tensors else None
        return Frame.of_points(points, base, current, segments=segments)
    for name, x in given.items():
        check_point(space, x, name=name)
    base, current, points = (widened(space, x) for x in given.values())
    try:
        displacements = Validated(space).log(base.expand_as(points), points)
    except ArgumentError as error:
        raise ArgumentError(f"points: out of reach of the base: {error}") from None
    return Frame.of(space, base, current, displacements, transport=transport, rungs=rungs)


def widened(space: Manifold, x: Tensor) -> Tensor:
    """The point of the space in float64 that `x` is the rounding of; `x` itself where there is no projection."""
    return space.project(x.double()) if "project" in space.capabilities else x


def read(correction: Correction, frame: Frame, state: Any = None) -> Reading:
    """Correct a frame: one `gram`, unless the correction has to form rows in between.

    Raises:
        ArgumentError: if a point is so far away that squares overflow, or the correction refuses the frame.
    """
    n = frame.displacements
    staged = isinstance(correction, Composition) and correction.staged(frame)
    extended = frame if staged else correction.extend(frame, state)
    grams = matrices(extended, correction.granularity)
    inner = top_left(total(grams), n + 1)
    check_distances(inner)
    if staged or correction.loses(grams, n):
        corrected = correction.apply(frame, state)
        extended, lines, state = corrected.frame, corrected.lines, corrected.state
        grams = matrices(extended, "model" if len(lines) == 1 else "tensor")
    else:
        lines, state = correction.segmented(grams, state, n)
        state = correction.remember(extended, lines, state)
    moved = corrected_gram(extended, lines, grams)
    for i in range(n):
        check_number(f"points[{i}]: squared length of the corrected displacement", moved[i][i])
    return Reading(extended, lines, inner, moved, state)


def matrices(frame: Frame, granularity: str) -> list[Numbers]:
    """The Gram matrices of a frame: of each segment, or one."""
    inner = frame.gram(granularity).tolist()
    return inner if granularity == "tensor" else [inner]


def check_distances(inner: Numbers) -> None:
    """Squared distances from the base are finite.

    Raises:
        ArgumentError: naming the point.
    """
    *points, current = range(len(inner))
    for i, name in [*((i, f"points[{i}]") for i in points), (current, "current")]:
        check_number(f"{name}: squared distance from the base", inner[i][i])


def corrected_gram(frame: Frame, lines: Lines, grams: list[Numbers]) -> Numbers:
    r"""$\sum_s C_s G_s C_s^\top$; where that has lost digits, from the corrected rows, formed in float64."""
    moved = total([congruence(c, inner) for c, inner in zip(lines, grams, strict=True)])
    if all(moved[i][i] >= CANCELLED * sum(inner[i][i] for inner in grams) for i in range(len(moved))):
        return [[*row] for row in moved]
    rows = []
    for i in range(len(moved)):
        line = [[*c[i]] for c in lines]
        blank = torch.empty_like(frame.rows[0], dtype=torch.float64)
        rows.append(frame.combine(None, line if len(line) > 1 else line[0], out=blank))
    fresh: Numbers = (gram(rows)[0] if frame.place is None else frame.place.gram(torch.stack(rows)).sum(0)).tolist()
    return fresh


def cosine(inner: Numbers) -> float:
    """cos(v_n, g) in [-1, 1], from the inner products of v_1, ..., v_n, g; NaN where one of the two is zero."""
    scale = root(inner[-2][-2]) * root(inner[-1][-1])
    return max(-1.0, min(1.0, inner[-2][-1] / scale)) if scale > 0 else math.nan


def root(square: float) -> float:
    """The length with this square, which rounding can leave slightly below zero."""
    return math.sqrt(max(square, 0.0))


def rungs_of(frame: Frame) -> dict[str, float]:
    """How many rungs the ladders of a curved space had, where there were any."""
    used = [kind.rungs for kind in frame.transports if kind.method == "ladder"]
    return {"rungs": float(max(used))} if used else {}
