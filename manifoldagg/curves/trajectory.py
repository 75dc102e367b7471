"""Curves from a stream of points: the nearest curve, or points of the path, without storing the stream."""

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
"""The degree beyond which sums of powers in float64 determine control points less well than float32 rounds them."""

SINGULAR_TOLERANCE = 1e-6
"""Of singular values, of weights of at most 1: its square, of the normal equations, leaves four digits of float64."""


class PathFit:
    r"""A streaming fit of the Bézier curve nearest to a path with points $\theta_1, \dots, \theta_K$.

    $$\min_\varphi \sum_k \|\iota_\varphi(u_k) - \theta_k\|^2, \qquad \varphi_0 = \theta_0, \quad \varphi_n = \theta_K,
        \qquad u_k = x_k / x_K,$$

    $x_k$ the steps, or the length, until then. It is what
    [`Bezier.through`][manifoldagg.curves.Bezier.through] makes of stored points with `fixed_ends=True`. With the
    Bernstein weights $b_l$ of the free points and $G = \sum_k b\, b^\top(u_k)$,

    $$\varphi_i = \theta_0 + \tfrac{i}{n} (\theta_K - \theta_0) + \sum_l G^{-1}_{il} \sum_k b_l(u_k)
        \big(\theta_k - \theta_0 - u_k (\theta_K - \theta_0)\big).$$

    Kept are n - 1 sums in float64 where K is known, $S_l = \sum_k b_l(u_k) (\theta_k - \theta_0)$. Where it is not, nor
    the length, $M_j = \sum_k (x_k / x)^j (\theta_k - \theta_0)$ for j = 1 … n, scaled to the latest $x$ as it grows. On
    a curved space differences from $\theta_0$ are logs at it, and the squares are taken of tangents there.

    Points that determine no curve of this degree give the chord: fewer between the ends than there are free ones, or
    all too near to the ends or to one another; a path of no length, or of one whose square overflows.

    Args:
        space: flat, or with exp and log.
        start: $\theta_0$ (*space.shape); it is not written.
        degree: n, at most 10.
        time: `"steps"` or `"length"`.
        steps: K, where it is known and the time is by steps.

    Raises:
        ArgumentError: naming the argument that does not fit.

    Cost: for each sum a point is read, and the sum read and written; by length a point is read twice more.

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
                raise ArgumentError(f"steps: expected None by length, got {steps}")
        self.space = space
        self.degree = degree
        self.start = start.detach()
        self.steps = steps
        # A chord has nothing free: nothing is summed for it.
        count = 0 if degree == 1 else degree if steps is None else degree - 1
        self._sums = [start.new_zeros(start.numel(), dtype=torch.float64) for _ in range(count)]
        self._parameters = [0.0]
        self._last = self.start.clone() if time == "length" and self._sums else None

    def observe(self, point: Float[Tensor, "..."]) -> None:
        r"""Add the next point $\theta_k$ (*space.shape), which is neither stored nor modified."""
        before = self._parameters[-1]
        now = before + (1.0 if self._last is None else self._step(self._last, point))
        self._parameters.append(now)
        if not self._sums:
            return
        row, minus = self._displacement(point)
        for total, (kept, taken) in zip(self._sums, self._factors(before, now), strict=True):
            combine(None, [total, row], [kept, taken], minus=[None, minus], out=total)

    def points(self, end: Float[Tensor, "..."]) -> Float[Tensor, "degree ..."]:
        r"""Return $\varphi_1, \dots, \varphi_n$.

        Args:
            end: $\theta_K$ (*space.shape), the last point that was seen; $\varphi_n$ is a copy of it.

        Raises:
            ArgumentError: if there were more points than `steps`, or fewer.
            DivergenceError: if a control point is not finite.
        """
        if self._sums and self.steps is not None:
            _check_num_observed(len(self._parameters) - 1, self.steps)
        found = end.detach().expand(self.degree, *end.shape).clone()
        row, minus = self._displacement(end.detach())
        for phi, line in zip(found[:-1], self._solution_weights().tolist(), strict=True):
            rows = [row, *self._sums]
            less = [minus, *(None for _ in self._sums)]
            if self.space.flat:
                combine(self.start.flatten(), rows, line, minus=less, out=phi.view(-1))
            else:
                tangent = combine(None, rows, line, minus=less).view_as(phi)
                phi.copy_(self._transported(tangent))
        if not is_finite(found):
            raise DivergenceError("the curve fitted to the path leaves the finite numbers; try a smaller rate")
        return found

    def _displacement(self, point: Tensor) -> tuple[Tensor, Tensor | None]:
        r"""$\log_{\theta_0} \theta_k$ as a row, and what is to be subtracted from it."""
        if self.space.flat:
            return point.flatten(), self.start.flatten()
        return self.space._log(self.start, point).flatten(), None

    def _transported(self, tangent: Tensor) -> Tensor:
        point = self.space._exp(self.start, tangent)
        return self.space._project(point) if "project" in self.space.capabilities else point

    def _step(self, last: Tensor, point: Tensor) -> float:
        """How far it is from the point before, which this one replaces."""
        if self.space.flat:
            away = math.sqrt(gram([point.flatten()], minus=[last.flatten()]).item())
        else:
            away = distance(self.space, last, point).item()
        last.copy_(point)
        return away

    def _factors(self, before: float, now: float) -> list[tuple[float, float]]:
        """For every sum, what it is multiplied by, and what the displacement added to it is."""
        if self.steps is None:
            shrunk = before / now if now else 1.0
            return [(shrunk**j, 1.0) for j in range(1, self.degree + 1)]
        # More points than K are refused at the end.
        place = min(now / self.steps, 1.0) if self.steps else 1.0
        return [(1.0, weight) for weight in weights(self.degree, place)[1:-1]]

    def _solution_weights(self) -> Float64[Tensor, "free terms"]:
        """What the free points are in terms of the chord and of the sums."""
        n = self.degree
        shares = torch.zeros(n - 1, 1 + len(self._sums), dtype=torch.float64)
        shares[:, 0] = torch.arange(1, n, dtype=torch.float64) / n
        if n == 1 or not 0 < self._parameters[-1] < math.inf:
            return shares
        u = torch.tensor(self._parameters, dtype=torch.float64) / self._parameters[-1]
        lines = basis(n, u)[:, 1:-1]
        if int(torch.linalg.matrix_rank(lines, atol=SINGULAR_TOLERANCE)) == n - 1:
            table = _monomial_to_bernstein(n) if self.steps is None else torch.eye(n - 1, dtype=torch.float64)
            sides = torch.cat([-(lines.mT @ u).unsqueeze(1), table], dim=1)
            shares += torch.linalg.solve(lines.mT @ lines, sides)
        return shares


class PathPoints:
    r"""The points of a path of K steps at i/m of them, i = 1 … m: the corners of a polygon.

    Between two points of the path that is the geodesic's; the last one is the end, bit for bit. They are the control
    points but the first of `Piecewise(space, degree=1, pieces=m)`.

    Args:
        space: flat, or with exp and log.
        start: where the path begins (*space.shape); it is not written.
        pieces: m.
        steps: K, how many points will be seen.

    Raises:
        ArgumentError: naming the argument that does not fit.

    Cost: m vectors, one more where m does not divide K, and no arithmetic but for the points between two.

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
        """Add the next point (*space.shape), which is neither stored nor modified."""
        m = self.pieces
        while self._found < m and (self._found + 1) * self.steps <= (self._num_observed + 1) * m:
            # In m-ths of a step from the point before, so that nothing is rounded.
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
        """Return all m points.

        Args:
            end: the last point that was seen.

        Raises:
            ArgumentError: if there were more points than `steps`, or fewer.
        """
        _check_num_observed(self._num_observed, self.steps)
        return self._points


def check_path(degree: int, time: str) -> None:
    """Check the embedding for a fit to a path.

    Raises:
        ArgumentError: naming the argument that is out of range.
    """
    if check_count("degree", degree) > MAX_DEGREE:
        raise ArgumentError(f"degree: expected at most {MAX_DEGREE}, got {degree}")
    check_choice("time", time, ("steps", "length"))


def _check_num_observed(seen: int, steps: int) -> None:
    if seen != steps:
        raise ArgumentError(f"steps: expected {steps} points, as was said at the start; saw {seen}")


def _monomial_to_bernstein(n: int) -> Float64[Tensor, "free n"]:
    r"""Coefficients of $u^1, \dots, u^n$ in the Bernstein weights between the ends."""
    table = torch.zeros(n - 1, n, dtype=torch.float64)
    for i in range(1, n):
        for j in range(i, n + 1):
            table[i - 1, j - 1] = (-1) ** (j - i) * math.comb(n, i) * math.comb(n - i, j - i)
    return table
