"""Curves that are fitted to a stream of points, such as the models of a training run.

A fit processes one point after another, and does not store all points.
"""

import math

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from manifoldagg._validation import check_choice, check_count, is_finite
from manifoldagg.curves.bernstein import basis, weights
from manifoldagg.curves.bezier import check_space
from manifoldagg.errors import ArgumentError, DivergenceError
from manifoldagg.kernels import combine, gram
from manifoldagg.manifolds import Manifold
from manifoldagg.manifolds.formulas import distance, geodesic

__all__ = ["PathFit", "PathPoints", "check_path"]

MAX_DEGREE = 10
"""The largest degree for which float64 sums of powers give control points that are accurate in float32."""

SINGULAR_TOLERANCE = 1e-6
"""The tolerance for singular values of the design matrix. Normal equations square it, which leaves four digits."""


class PathFit:
    r"""A streaming least-squares fit of a Bézier curve to a path with the points $\theta_1, \dots, \theta_K$.

    $$\min_\varphi \sum_k \|\iota_\varphi(u_k) - \theta_k\|^2, \qquad \varphi_0 = \theta_0, \quad \varphi_n = \theta_K,
        \qquad u_k = x_k / x_K,$$

    where $x_k$ is the number of steps or the path length up to $\theta_k$. The result equals
    [`Bezier.through`][manifoldagg.curves.Bezier.through] on stored points with `fixed_ends=True`. With the Bernstein
    weights $b_l$ of the free points and $G = \sum_k b\, b^\top(u_k)$, the control points are

    $$\varphi_i = \theta_0 + \tfrac{i}{n} (\theta_K - \theta_0) + \sum_l G^{-1}_{il} \sum_k b_l(u_k)
        \big(\theta_k - \theta_0 - u_k (\theta_K - \theta_0)\big).$$

    They are linear in the points, so the object needs to store only a few sums, in float64:

    - If K is known, it stores the n - 1 sums $S_l = \sum_k b_l(u_k) (\theta_k - \theta_0)$.
    - Otherwise, it stores the n sums $M_j = \sum_k (x_k / x)^j (\theta_k - \theta_0)$ for j = 1 … n. They are rescaled
      to the latest $x$ at each step.

    On a curved space, logarithms at $\theta_0$ replace the differences from $\theta_0$, and norms are those of the
    tangent space at $\theta_0$.

    If the points do not determine a curve of this degree, the result is the chord. This happens in these cases:

    - there are too few points between the ends;
    - the points are too close to the ends or to each other;
    - the path length is 0, or its square overflows.

    Args:
        space: a flat space, or a space with exp and log.
        start: $\theta_0$ (*space.shape). It is not modified.
        degree: n, at most 10.
        time: the parameter $x_k$: `"steps"` or `"length"`.
        steps: K, if it is known and `time` is `"steps"`.

    Raises:
        ArgumentError: if an argument is invalid.

    Cost: for each sum, one read of the point and one read and write of the sum. With `"length"`, two more reads of the
    point.

    Example:
        >>> from manifoldagg.manifolds import Flat
        >>> path = PathFit(Flat(1), torch.zeros(1), degree=2)
        >>> for point in (torch.tensor([3.0]), torch.tensor([4.0])):
        ...     path.observe(point)
        >>> path.points(torch.tensor([4.0]))
        tensor([[4.],
                [4.]])
    """

    def __init__(
        self,
        space: Manifold,
        start: Float[Tensor, "..."],
        degree: int = 2,
        time: str = "steps",
        steps: int | None = None,
    ) -> None:
        check_space(space)
        check_path(degree, time)
        if steps is not None:
            check_count("steps", steps, at_least=0)
            if time != "steps":
                raise ArgumentError(f"steps: expected None with time='length', got {steps}")
        self.space = space
        self.degree = degree
        self.start = start.detach()
        self.steps = steps
        # A curve of degree 1 has no free points and needs no sums.
        count = 0 if degree == 1 else degree if steps is None else degree - 1
        self._sums = [start.new_zeros(start.numel(), dtype=torch.float64) for _ in range(count)]
        self._parameters = [0.0]
        self._last = self.start.clone() if time == "length" and self._sums else None

    def observe(self, point: Float[Tensor, "..."]) -> None:
        r"""Add the next point $\theta_k$ (*space.shape) of the path to the fit.

        The fit stores only weighted sums of the points. It does not modify the point or retain a reference to it.
        """
        before = self._parameters[-1]
        # Without a stored last point, the parameter counts steps.
        now = before + (1.0 if self._last is None else self._step(self._last, point))
        self._parameters.append(now)
        if not self._sums:
            return
        row, minus = self._displacement(point)
        for total, (scale, weight) in zip(self._sums, self._factors(before, now), strict=True):
            combine(None, [total, row], [scale, weight], minus=[None, minus], out=total)

    def points(self, end: Float[Tensor, "..."]) -> Float[Tensor, "degree ..."]:
        r"""Compute the control points $\varphi_1, \dots, \varphi_n$.

        Args:
            end: $\theta_K$ (*space.shape), the last observed point. It is copied to $\varphi_n$.

        Raises:
            ArgumentError: if the number of observed points differs from `steps`.
            DivergenceError: if a control point is not finite.
        """
        if self._sums and self.steps is not None:
            _check_num_observed(len(self._parameters) - 1, self.steps)
        # The last control point is a copy of the end. The others are overwritten below.
        points = end.detach().expand(self.degree, *end.shape).clone()
        # One combination for each control point reads the end and all sums once.
        row, minus = self._displacement(end.detach())
        for phi, coefficients in zip(points[:-1], self._solution_weights().tolist(), strict=True):
            rows = [row, *self._sums]
            subtrahends = [minus, *(None for _ in self._sums)]
            if self.space.flat:
                combine(self.start.flatten(), rows, coefficients, minus=subtrahends, out=phi.view(-1))
            else:
                tangent = combine(None, rows, coefficients, minus=subtrahends).view_as(phi)
                phi.copy_(self._exp_projected(tangent))
        if not is_finite(points):
            raise DivergenceError(
                "points: expected a fitted curve with finite control points, got NaN or infinity; reduce the rate"
            )
        return points

    def _displacement(self, point: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return two tensors whose difference is the displacement of a point from the start."""
        # On a flat space, the kernels compute the difference. On a curved space, the displacement is a logarithm, so
        # nothing is subtracted.
        if self.space.flat:
            return point.flatten(), self.start.flatten()
        return self.space._log(self.start, point).flatten(), None

    def _exp_projected(self, tangent: Tensor) -> Tensor:
        """Compute the exponential of a tangent at the start, and project the result to the manifold."""
        # The combination of tangents is rounded, so the point is projected back to the manifold.
        point = self.space._exp(self.start, tangent)
        return self.space._project(point) if "project" in self.space.capabilities else point

    def _step(self, last: Tensor, point: Tensor) -> float:
        """Return the distance from `last` to `point`, and copy `point` into `last`."""
        if self.space.flat:
            length = math.sqrt(gram([point.flatten()], minus=[last.flatten()]).item())
        else:
            length = distance(self.space, last, point).item()
        last.copy_(point)
        return length

    def _factors(self, before: float, now: float) -> list[tuple[float, float]]:
        """Return two factors for each sum: for its old value and for the new displacement."""
        if self.steps is None:
            # Rescaling (x_k / x)^j to the new x multiplies the old sum by (x_before / x)^j. The powers stay in [0, 1],
            # so the sums do not overflow.
            ratio = before / now if now else 1.0
            return [(ratio**j, 1.0) for j in range(1, self.degree + 1)]
        # `points` raises an error if there were more than K points.
        u = min(now / self.steps, 1.0) if self.steps else 1.0
        return [(1.0, weight) for weight in weights(self.degree, u)[1:-1]]

    def _solution_weights(self) -> Float64[Tensor, "free terms"]:
        """Return the weights of the chord and of the stored sums in each free control point."""
        n = self.degree
        coefficients = torch.zeros(n - 1, 1 + len(self._sums), dtype=torch.float64)
        coefficients[:, 0] = torch.arange(1, n, dtype=torch.float64) / n
        if n == 1 or not 0 < self._parameters[-1] < math.inf:
            return coefficients
        # The design matrix has one row per observed point, but depends only on the parameters, which are stored
        # numbers.
        u = torch.tensor(self._parameters, dtype=torch.float64) / self._parameters[-1]
        design = basis(n, u)[:, 1:-1]
        # If the points do not determine the curve, the coefficients remain those of the chord.
        if int(torch.linalg.matrix_rank(design, atol=SINGULAR_TOLERANCE)) == n - 1:
            table = _monomial_to_bernstein(n) if self.steps is None else torch.eye(n - 1, dtype=torch.float64)
            # The first column subtracts the chord from the data. The others express the stored sums in Bernstein
            # weights.
            right_sides = torch.cat([-(design.mT @ u).unsqueeze(1), table], dim=1)
            coefficients += torch.linalg.solve(design.mT @ design, right_sides)
        return coefficients


class PathPoints:
    """A polyline with m edges that approximates a path of K steps, such as the models of a training run.

    For i = 0, …, m, vertex i is the point of the path after step i K / m. If this number is not an integer, the vertex
    is interpolated along the geodesic between the two adjacent points of the path. The last vertex is bitwise equal to
    the end of the path.

    The method `observe` receives the points of the path one after another. The m + 1 vertices are the control points of
    `Piecewise(space, degree=1, pieces=m)`. The method `points` returns all of them except the first one.

    Args:
        space: a flat space, or a space with exp and log.
        start: the first point of the path (*space.shape). It is not modified.
        pieces: m, the number of edges.
        steps: K, the number of points that will be observed.

    Raises:
        ArgumentError: if an argument is invalid.

    Cost: the memory of m points, or of m + 1 points if m does not divide K. Only interpolated vertices need arithmetic.

    Example:
        >>> from manifoldagg.manifolds import Flat
        >>> path = PathPoints(Flat(1), torch.zeros(1), pieces=2, steps=3)
        >>> for x in (1.0, 4.0, 9.0):
        ...     path.observe(torch.tensor([x]))
        >>> path.points(torch.tensor([9.0])).flatten()
        tensor([2.5000, 9.0000])
    """

    def __init__(self, space: Manifold, start: Float[Tensor, "..."], pieces: int, steps: int) -> None:
        check_space(space)
        self.space = space
        self.pieces = check_count("pieces", pieces)
        self.steps = check_count("steps", steps, at_least=0)
        self._points = start.detach().expand(pieces, *start.shape).clone()
        self._last = start.detach().clone() if steps % pieces else None
        self._num_observed = 0
        self._found = 0

    def observe(self, point: Float[Tensor, "..."]) -> None:
        """Add the next point of the path that the polygon approximates.

        If the point is a vertex of the polygon, the method copies it. It does not modify the point or retain a
        reference to it.

        Args:
            point: the point (*space.shape).
        """
        m = self.pieces
        # Vertex i is the path at the position i K / m. This comparison of integers has no rounding error.
        while self._found < m and (self._found + 1) * self.steps <= (self._num_observed + 1) * m:
            # In units of 1/m, the position between two points is an exact integer.
            ahead = (self._found + 1) * self.steps - self._num_observed * m
            corner = point
            if self._last is not None and ahead < m:
                corner = geodesic(self.space, self._last, point, ahead / m)
            self._points[self._found] = corner
            self._found += 1
        self._num_observed += 1
        if self._last is not None:
            self._last.copy_(point)

    def points(self, end: Float[Tensor, "..."]) -> Float[Tensor, "pieces ..."]:
        """Return all m vertices.

        Args:
            end: the last observed point.

        Raises:
            ArgumentError: if the number of observed points differs from `steps`.
        """
        _check_num_observed(self._num_observed, self.steps)
        return self._points


def check_path(degree: int, time: str) -> None:
    """Check the arguments `degree` and `time` of a fit to a path.

    Raises:
        ArgumentError: if one of them is invalid.
    """
    if check_count("degree", degree) > MAX_DEGREE:
        raise ArgumentError(f"degree: expected at most {MAX_DEGREE}, got {degree}")
    check_choice("time", time, ("steps", "length"))


def _check_num_observed(num_observed: int, steps: int) -> None:
    """Raise an `ArgumentError` if the number of observed points is not `steps`."""
    if num_observed != steps:
        raise ArgumentError(f"steps: expected {steps} observed points, got {num_observed}")


def _monomial_to_bernstein(n: int) -> Float64[Tensor, "free n"]:
    r"""Return the coefficients of $u^1, \dots, u^n$ in the Bernstein weights of the free points."""
    # b_i(u) = C(n, i) u^i (1 - u)^(n-i), with the last factor expanded by the binomial theorem.
    table = torch.zeros(n - 1, n, dtype=torch.float64)
    for i in range(1, n):
        for j in range(i, n + 1):
            table[i - 1, j - 1] = (-1) ** (j - i) * math.comb(n, i) * math.comb(n - i, j - i)
    return table
