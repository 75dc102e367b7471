r"""Curves along which server steps move the model.

The curve of an update starts at the current server model $\Theta$. It is a Bézier curve with the control points
$\Theta, \Theta + u_1, \dots, \Theta + u_n$, or a polygonal path with these vertices. The $u_k$ are the changes of the
model that the client has returned, after a correction for the steps of the server in the meantime. For a given step
size, the module computes a point on the curve. On flat spaces, it needs only the inner products of the $u_k$.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, pairwise
from operator import add, mul
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manifoldagg._validation import check_number
from manifoldagg.curves import Bezier, CurveEmbedding, Embedding, Piecewise
from manifoldagg.curves.arc import arc_length, parameter_at_arc_length
from manifoldagg.curves.bernstein import basis, sqrt_quadratic_form, weights
from manifoldagg.curves.distance import NEGLIGIBLE, parameter_at_distance_from_gram
from manifoldagg.curves.end_path import EndPath
from manifoldagg.errors import DivergenceError
from manifoldagg.manifolds import Manifold

__all__ = ["PULL_BACK_MODES", "StepCurve"]

PULL_BACK_MODES = ("chord", "none", "conflict_free_prefix", "length")

InnerProducts = Sequence[Sequence[float]]


@dataclass(frozen=True)
class StepCurve:
    r"""Curve along which a server step moves the model.

    The curve starts at the current server model $\Theta$. Its other control points (or vertices, with `polygon`) are
    $\Theta + u_k$, where the $u_k$ are the corrected displacements of an update. The options determine the shape of the
    curve, and the point that a step with the size $\rho$ reaches.

    Args:
        overshoot: the behaviour for $\rho > 1$. `"clamp"` limits $\rho$ to 1, and `"extend"` follows the curve beyond
            its end.
        pull_back: the quantity of which $\rho$ is a fraction:

            - `"chord"`: the distance from the start to the end.
            - `"length"`: the length of the curve.
            - `"none"`: the parameter range.
            - `"conflict_free_prefix"`: the parameter at which the curve first turns against the drift.
        curve_weight: the weight $\kappa$. At each parameter, the curve is $\kappa$ times the original curve plus
            $1 - \kappa$ times its chord.
        polygon: whether the points are the vertices of a polygon. Otherwise, they are the control points of a Bézier
            curve.
        embedding: an embedding whose path to its end point is the curve. The step then computes the control points
            and evaluates the embedding, because the weights of the displacements are not known in advance.

    Example:
        >>> StepCurve(pull_back="none").weights(2, 0.5)
        [0.5, 0.25]
        >>> StepCurve(polygon=True).weights(2, 0.75)
        [0.5, 0.5]
    """

    overshoot: str = "clamp"
    pull_back: str = "chord"
    curve_weight: float = 1.0
    polygon: bool = False
    embedding: Embedding | None = None

    def weights(self, n: int, s: float) -> list[float]:
        """Return the weights of $u_1, …, u_n$ in the point of the curve at the parameter s."""
        line = _polygon_weights(n, s) if self.polygon else weights(n, s)[1:]
        if self.curve_weight != 1:
            # A Bézier curve or a polygon with equidistant points on the chord traverses it at constant speed.
            line = [self.curve_weight * weight for weight in line]
            line[-1] += (1 - self.curve_weight) * s
        return line

    def position(
        self, inner: InnerProducts, drift_products: Sequence[float], rho: float
    ) -> tuple[float, list[float], float]:
        r"""Return the point of the curve that a server step with the size $\rho$ reaches.

        The control points (or vertices) of the curve are the current model plus vectors $u_1, …, u_n$. The method
        represents the point as the current model plus a linear combination $\sum_i w_i u_i$.

        Args:
            inner: the inner products of the $u_i$, which are the corrected displacements of an update.
            drift_products: the inner products of the original displacements with the drift.
            rho: the step size.

        Returns:
            The parameter $s$ of the position on the curve, the weights $w_i$, and the norm of the linear combination.

        Example:
            >>> StepCurve().position([[4.0]], [1.0], 0.25)
            (0.25, [0.25], 0.5)
        """
        n = len(inner)
        if n == 1 and self.curve_weight == 1 and not self.polygon:
            s = self.position_on_line(rho)
            weights = [s]
        else:
            s = self.parameter(inner, self.effective_rate(rho, drift_products))
            weights = self.weights(n, s)
        # From Python 3.12 on, `sum` uses compensated summation. `reduce` gives the same bits in every version.
        images = [reduce(add, map(mul, weights, column)) for column in zip(*inner, strict=True)]
        return s, weights, math.sqrt(max(reduce(add, map(mul, images, weights)), 0.0))

    def position_on_line(self, rho: float) -> float:
        r"""Return the position that a step with the size $\rho$ reaches on a straight line from 0 to 1.

        The result is $\min(\rho, 1)$ if `overshoot` is `"clamp"`, and $\rho$ otherwise.
        """
        return min(rho, 1.0) if self.overshoot == "clamp" else rho

    def effective_rate(self, rho: float, drift_products: Sequence[float]) -> float:
        """Return the step size after applying the options `overshoot` and `pull_back`.

        - `overshoot="clamp"` limits the step size to 1.
        - `pull_back="conflict_free_prefix"` also multiplies it by the result of `conflict_free_fraction`: the fraction
          of the client's path before the first segment against the drift (the change of the server model since the
          client started). The argument `drift_products` is passed to this method.
        """
        return self.position_on_line(rho) * self.conflict_free_fraction(drift_products)

    def parameter(self, inner: InnerProducts, rho: float) -> float:
        r"""Return the parameter s for a rate, from the inner products of the corrected displacements."""
        if self.pull_back not in ("chord", "length") or self.curve_weight == 0:
            return rho
        inner = self._straightened_gram(inner)
        if self.pull_back == "length":
            return _polygon_parameter_at_length(inner, rho) if self.polygon else _parameter_at_length(inner, rho)
        return (
            _polygon_parameter_at_distance(inner, rho)
            if self.polygon
            else parameter_at_distance_from_gram(inner, rho, self.overshoot)
        )

    def conflict_free_fraction(self, drift_products: Sequence[float]) -> float:
        """Return the fraction of the client's path before the first segment that conflicts with the server's drift.

        The drift is the change of the server model since the client started. The n displacements $v_k$ that the client
        has returned define a path of n segments, from $v_{k-1}$ to $v_k$ with $v_0 = 0$. A segment conflicts if the
        inner product of $v_k - v_{k-1}$ and the drift is negative.

        The fraction is the number of segments before the first conflict, but at least one, divided by n. Each client
        therefore contributes to the model. If `curve_weight` is below 1, the path is first straightened as in
        `straighten`. With other values of `pull_back` than `"conflict_free_prefix"`, the result is 1.
        """
        if self.pull_back != "conflict_free_prefix":
            return 1.0
        n = len(drift_products)
        for k, (before, after) in enumerate(pairwise([0.0, *self._straightened_products(drift_products)])):
            if after < before:
                return max(k, 1) / n
        return 1.0

    def straighten(self, tangents: Tensor) -> Tensor:
        r"""Move the points of the curve towards the straight line from its start to its end.

        For the points $u_1, \dots, u_n$ and the weight $\kappa$ (`curve_weight`), the new points are
        $\kappa u_i + (1 - \kappa) \tfrac{i}{n} u_n$. All points are tangent vectors, with the shape (n, ...). If
        $\kappa = 0$, the new curve is the straight line. The method then returns only $u_n$, with the shape (1, ...).
        """
        if self.curve_weight == 0:
            return tangents[-1:]
        if self.curve_weight == 1:
            return tangents
        n = len(tangents)
        places = tangents.new_tensor([(i + 1) / n for i in range(n)]).view(n, *[1] * (tangents.ndim - 1))
        return self.curve_weight * tangents + (1 - self.curve_weight) * places * tangents[-1]

    def curve(self, space: Manifold, n: int) -> CurveEmbedding:
        """Return the curve on a space that starts at the current model and has n further points."""
        if self.embedding is not None:
            return EndPath(self.embedding.on(space))
        return Piecewise(space, degree=1, pieces=n) if self.polygon else Bezier(space, n)

    def _straightened_products(self, products: Sequence[float]) -> list[float]:
        n = len(products)
        return [
            self.curve_weight * a + (1 - self.curve_weight) * (i + 1) / n * products[-1] for i, a in enumerate(products)
        ]

    def _straightened_gram(self, inner: InnerProducts) -> InnerProducts:
        """Return the inner products of the points of the straightened curve."""
        if self.curve_weight == 1:
            return inner
        rows = [self._straightened_products(row) for row in inner]
        columns = [self._straightened_products(column) for column in zip(*rows, strict=True)]
        return [list(row) for row in zip(*columns, strict=True)]


def _polygon_weights(n: int, s: float) -> list[float]:
    """Return the weights of the n vertices after the start in the point at the parameter s."""
    piece = min(int(s * n), n - 1)
    part = s * n - piece
    line = [0.0] * n
    line[piece] = part
    if piece > 0:
        line[piece - 1] = 1 - part
    return line


def _polygon_parameter_at_distance(inner: InnerProducts, rho: float) -> float:
    r"""Return the parameter at which a path of line segments first reaches a given distance from its start.

    The given distance is the fraction $\rho \le 1$ of the distance between the start and the end of the path. All
    distances are straight-line distances.

    Example:
        >>> _polygon_parameter_at_distance([[1.0, 0.0], [0.0, 1.0]], 0.5)
        0.25
    """
    n = len(inner)
    chord = inner[-1][-1]
    if chord <= 0 or rho < NEGLIGIBLE:
        return 0.0
    # Distances are relative to the chord, so that squares neither underflow nor overflow.
    goal = rho * rho
    # The squared distance is convex on a segment, so a value that is reached inside a segment is reached at its end.
    piece = next((k for k in range(n) if inner[k][k] / chord >= goal), n - 1)
    end: Any = inner[piece][piece] / chord
    start = inner[piece - 1][piece - 1] / chord if piece else 0.0
    product = inner[piece - 1][piece] / chord if piece else 0.0
    # |(1 - r) p + r q|² = goal is equivalent to a r² + 2 b r = c with c >= 0. The solution is the root r >= 0.
    a = start - 2 * product + end
    b = product - start
    c = max(goal - start, 0.0)
    root = math.sqrt(max(b * b + a * c, 0.0))
    # The root has two equivalent formulas. This uses the one without cancellation.
    part = 0.0
    if b < 0 < a:
        part = (root - b) / a
    elif b + root > 0:
        part = c / (b + root)
    return (piece + min(part, 1.0)) / n


def _parameter_at_length(inner: InnerProducts, rho: float) -> float:
    r"""Return the $s \ge 0$ for which a Bézier curve on [0, s] is $\rho$ times as long as the curve on [0, 1].

    Let $u_0, \dots, u_n$ be the control points, and let D be the Gram matrix of their differences $u_k - u_{k-1}$. The
    speed of the curve at s is $\sqrt{b(s)^\top D\, b(s)}$ with $b_k(s) = n \tbinom{n-1}{k} s^k (1-s)^{n-1-k}$ for
    $k = 0, \dots, n - 1$. The arc length is the integral of the speed.

    Example:
        >>> round(_parameter_at_length([[0.0, 0.0], [0.0, 1.0]], 0.25), 12)
        0.5
    """
    n = len(inner)
    if n == 1:
        return rho
    squares = _unit_difference_gram(inner)

    def speed(t: Tensor) -> Tensor:
        return n * sqrt_quadratic_form(squares, basis(n - 1, t))

    if rho <= 1:
        return float(parameter_at_arc_length(speed, [0.0, 1.0], torch.tensor(rho, dtype=torch.float64)))
    goal = rho * float(arc_length(speed, [0.0, 1.0]))
    if goal == 0:
        return rho
    end = 1.0
    reached = 0.0
    while reached < goal:
        end *= 2
        reached = float(arc_length(speed, [0.0, end]))
        if not math.isfinite(reached):
            raise DivergenceError(f"rho: expected a length that the curve reaches in float64, got {rho:g} lengths")
    return float(parameter_at_arc_length(speed, [0.0, end], torch.tensor(goal / reached, dtype=torch.float64)))


def _polygon_parameter_at_length(inner: InnerProducts, rho: float) -> float:
    r"""Return the smallest s up to which a polygon has the fraction $\rho \le 1$ of its length.

    Example:
        >>> _polygon_parameter_at_length([[1.0, 1.0], [1.0, 10.0]], 0.625)
        0.75
    """
    n = len(inner)
    lengths = _unit_difference_gram(inner).diagonal().clamp(min=0).sqrt().tolist()
    ends = list(accumulate(lengths))
    if ends[-1] == 0:
        return rho
    goal = rho * ends[-1]
    piece = next((k for k in range(n) if ends[k] >= goal), n - 1)
    start = ends[piece - 1] if piece else 0.0
    return (piece + (min((goal - start) / lengths[piece], 1.0) if lengths[piece] else 0.0)) / n


def _unit_difference_gram(inner: InnerProducts) -> Tensor:
    """Return the Gram matrix of the differences between consecutive points, up to a positive factor."""
    scale = max(check_number(f"displacements[{i}]: squared norm", row[i]) for i, row in enumerate(inner))
    # Inner products relative to the largest squared norm neither underflow nor overflow when they are subtracted.
    table = np.pad(np.array(inner, dtype=float) / (scale if scale > 0 else 1.0), ((1, 0), (1, 0)))
    return torch.from_numpy(np.diff(np.diff(table, axis=0), axis=1))
