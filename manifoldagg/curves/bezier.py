"""Bézier curves of any degree.

A Bézier curve of degree n is defined by n + 1 control points. On a flat space, each point of the curve is a weighted
sum of the control points. On a curved space, de Casteljau's algorithm computes each point by repeated interpolation
along geodesics.
"""

import abc
import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from manifoldagg._validation import check_count, check_number, check_shape, is_finite
from manifoldagg.curves.arc import Speed
from manifoldagg.curves.bernstein import argmin, basis, product_coefficients, sqrt_quadratic_form, weights
from manifoldagg.curves.path import CurveEmbedding, Parameter, Phi, Points, as_parameter
from manifoldagg.errors import ArgumentError
from manifoldagg.kernels import combine, gram
from manifoldagg.manifolds import Manifold
from manifoldagg.manifolds.formulas import geodesic
from manifoldagg.manifolds.manifold import check_is_manifold

__all__ = ["Bezier", "BezierSpline", "check_space", "de_casteljau", "weighted_sum"]

MAX_DEGREE = 1000
"""The largest degree whose binomial coefficients do not overflow."""


class BezierSpline(CurveEmbedding):
    """Base class for curves that consist of one or more Bézier pieces of the same degree.

    Each piece starts at the end point of the previous piece. On a flat space, each point of the curve is a weighted sum
    of the control points. The derivatives of the curve are weighted sums of the differences between control points.
    """

    degree: int

    @property
    @abc.abstractmethod
    def pieces(self) -> int:
        """The number of pieces."""

    @property
    def size(self) -> int:
        return self.pieces * self.degree + 1

    @property
    def breaks(self) -> tuple[float, ...]:
        return tuple(k / self.pieces for k in range(self.pieces + 1))

    def __call__(self, phi: Phi, t: Parameter) -> Points:
        """Compute the point of the curve at `t`.

        Args:
            phi: control points (size, *space.shape).
            t: a number or a tensor (*batch,).

        Returns:
            (*batch, *space.shape), in the dtype of `phi`.

        Raises:
            ArgumentError: if `phi` has another shape, or a number `t` is not finite.
        """
        self._check_phi(phi)
        if self.space.flat:
            return self._derivative(phi, t, 0)
        piece, s = self._locate(as_parameter(t, phi))
        return de_casteljau(
            self.space, phi if self.pieces == 1 else phi[self._control_indices(piece, self.degree + 1)], s
        )

    def velocity(self, phi: Phi, t: Parameter) -> Points:
        r"""Compute the velocity $\iota_\varphi'(t)$ of the curve $\iota_\varphi$ at the parameter `t`.

        On a flat space, the velocity of a curve with one piece of degree n is a Bézier curve of degree n - 1. It is
        called the hodograph:

        $$\iota_\varphi'(t) = n \sum_{i<n} \binom{n-1}{i} t^i (1-t)^{n-1-i} (\varphi_{i+1} - \varphi_i).$$

        On every space, the velocity of this curve is $n \log_{\varphi_0} \varphi_1$ at the start and $-n
        \log_{\varphi_n} \varphi_{n-1}$ at the end. With m pieces, the same holds for the control points of each piece,
        with $mn$ in place of $n$. At a joint of two pieces, the result is the velocity of the piece that starts there.
        The arguments, the result and the errors are the same as in `__call__`.
        """
        self._check_phi(phi)
        return self._derivative(phi, t, 1) if self.space.flat else super().velocity(phi, t)

    def acceleration(self, phi: Phi, t: Parameter) -> Points:
        r"""Compute the covariant acceleration $\nabla_{b'} b'$ of the curve $b = \iota_\varphi$ at `t`.

        On a flat space, this is the second derivative $b''(t)$. If `t` is a joint, where one Bézier piece of the curve
        ends and the next one starts, the result is the acceleration of the next piece.
        """
        self._check_phi(phi)
        return self._derivative(phi, t, 2) if self.space.flat else super().acceleration(phi, t)

    def _derivative(self, phi: Tensor, t: Parameter, order: int) -> Tensor:
        piece, s = self._locate(as_parameter(t, phi))
        coefficients = basis(self.degree - order, s)
        rows = phi
        if order:
            # The derivative of order k has the control points n!/(n-k)! Δ^k φ. The chain rule adds one factor `pieces`
            # per order.
            rows = self.pieces**order * math.perm(self.degree, order) * phi.diff(n=order, dim=0)
        if self.pieces > 1:
            # Each parameter uses the control points of its own piece, so the other coefficients are 0.
            zeros = coefficients.new_zeros(*piece.shape, len(rows))
            coefficients = zeros.scatter(-1, self._control_indices(piece, coefficients.shape[-1]), coefficients)
        return weighted_sum(coefficients, rows)

    def _speed(self, phi: Tensor) -> Speed:
        if not self.space.flat:
            return super()._speed(phi)
        # The speed follows from a small Gram matrix, so the quadrature does not read the control points again.
        n = self.degree
        inner = torch.stack([differences_gram(phi[k * n : (k + 1) * n + 1]) for k in range(self.pieces)])

        def speed(t: Tensor) -> Tensor:
            piece, s = self._locate(t)
            each = inner[0] if self.pieces == 1 else inner[piece]
            # The first two factors convert differences of control points to velocities of the whole curve.
            return self.pieces * n * sqrt_quadratic_form(each, basis(n - 1, s))

        return speed

    def _locate(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return the index of the piece that contains each parameter `t`, and the local parameter on this piece.

        The local parameter increases from 0 to 1 along the piece.
        """
        if self.pieces == 1:
            return torch.zeros_like(t, dtype=torch.long), t
        # With `right=True`, a joint belongs to the piece that starts there.
        joints = torch.tensor(self.breaks[1:-1], dtype=t.dtype, device=t.device)
        piece = torch.bucketize(t.detach(), joints, right=True).clamp(max=self.pieces - 1)
        return piece, t * self.pieces - piece

    def _control_indices(self, piece: Tensor, count: int) -> Tensor:
        """Return the indices of the first `count` control points of each piece: (*batch, count)."""
        return (self.degree * piece).unsqueeze(-1) + torch.arange(count, device=piece.device)


@dataclass(frozen=True)
class Bezier(BezierSpline):
    r"""The Bézier curve with the control points $\varphi_0, \dots, \varphi_n$, by de Casteljau's algorithm.

    The algorithm interpolates along geodesics $\gamma$ between neighbouring points, until one point is left:

    $$\varphi_i^{k}(t) = \gamma(\varphi_i^{k-1}, \varphi_{i+1}^{k-1}; t), \qquad
      \gamma(x, y; t) = \exp_x(t \log_x y), \qquad \iota_\varphi(t) = \varphi_0^n(t).$$

    On a flat space, the curve is computed as $\sum_i \binom{n}{i} t^i (1-t)^{n-i} \varphi_i$. It is then contained in
    the convex hull of its control points.

    The curve starts at $\varphi_0$ and ends at $\varphi_n$: exactly on a flat space, and up to rounding on a curved
    space. If points are equivalence classes of tensors, the end point can be another representative of $\varphi_n$.

    Parameters outside [0, 1] extrapolate the curve. The curve is differentiable with respect to $\varphi$ and $t$.

    Args:
        space: a flat space, or a space with exp and log. Neighbouring points of every level of the algorithm must be
            within the injectivity radius of each other.
        degree: $n \ge 1$. The control points $\varphi$ have the shape (n + 1, *space.shape).

    Raises:
        ArgumentError: if `degree` is not an integer from 1 to 1000, or `space` is curved and lacks exp or log.

    Source: Manifold (8); Park, Ravani 1995.

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Flat
        >>> curve = Bezier(Flat(2), degree=2)
        >>> phi = torch.tensor([[0.0, 0.0], [1.0, 2.0], [2.0, 0.0]])
        >>> curve(phi, 0.5)
        tensor([1., 1.])
        >>> curve.velocity(phi, 0.0)
        tensor([2., 4.])
    """

    space: Manifold
    degree: int = 2

    def __post_init__(self) -> None:
        if check_count("degree", self.degree) > MAX_DEGREE:
            raise ArgumentError(
                f"degree: expected at most {MAX_DEGREE}, so that binomials do not overflow, got {self.degree}"
            )
        check_space(self.space)

    @property
    def pieces(self) -> int:
        return 1

    def weights(self, t: float) -> list[float]:
        """Return the Bernstein weights of the control points at `t` as a list of degree + 1 numbers."""
        return weights(self.degree, t)

    def pull_phi(self, phi: Phi, x: Parameter, w: Points) -> Points:
        r"""Compute the derivative of a loss with respect to the control points (pullback).

        The argument `w` is the derivative of the loss at the point $\iota_\varphi(x)$ of the curve. On a flat space,
        the derivative with respect to control point $i$ is $b_i(x)\, w$, where $b_i(x)$ is the Bernstein weight of this
        control point.

        Args:
            phi: control points (degree + 1, *space.shape).
            x: a number or a tensor (*batch,).
            w: derivatives (*batch, *space.shape).

        Returns:
            The sum of the pullbacks over the batch, in the shape of `phi`.
        """
        self._check_phi(phi)
        if not self.space.flat:
            return super().pull_phi(phi, x, w)
        t = as_parameter(x, phi)
        check_shape("w", w, *t.shape, *phi.shape[1:])
        coefficients = basis(self.degree, t).reshape(-1, self.size)
        # A single pullback is an outer product, which is faster than a matrix product with one row.
        if len(coefficients) == 1:
            return torch.outer(coefficients[0].to(phi.dtype), w.to(phi.dtype).flatten()).reshape(phi.shape)
        return weighted_sum(coefficients.mT, w.reshape(len(coefficients), *phi.shape[1:]))

    def split(self, phi: Phi, t: float) -> tuple[Tensor, Tensor]:
        r"""Split the curve $\iota$ at the parameter `t`, and return the control points of both parts.

        The parts are the curves $s \mapsto \iota(ts)$ and $s \mapsto \iota(t + (1 - t)s)$ for $s$ from 0 to 1. On a
        curved space, a part of a Bézier curve is in general not a Bézier curve itself. The returned curves then have
        the correct end points, but only approximate the parts. If the distances between the control points are of order
        $h$, the error is $O(h^3)$.

        Args:
            phi: control points (degree + 1, *space.shape).
            t: the parameter at which to split the curve.

        Returns:
            Two tensors in the shape of `phi`. The last point of the first tensor is the first point of the second.

        Raises:
            ArgumentError: if `phi` has another shape, or `t` is not finite.

        Example:
            >>> from manifoldagg.manifolds import Flat
            >>> Bezier(Flat(1)).split(torch.tensor([[0.0], [2.0], [0.0]]), 0.5)[0].tolist()
            [[0.0], [1.0], [1.0]]
        """
        self._check_phi(phi)
        t = check_number("t", t)
        n = self.degree
        if self.space.flat:
            left = torch.zeros(n + 1, n + 1, dtype=torch.float64, device=phi.device)
            right = torch.zeros_like(left)
            at = as_parameter(t, phi)
            for k in range(n + 1):
                # By the blossoming principle, control point k of the left part is the point at t of the curve with the
                # first k + 1 control points.
                left[k, : k + 1] = basis(k, at)
                right[k, k:] = basis(n - k, at)
            return weighted_sum(left, phi), weighted_sum(right, phi)
        # The first and the last points of all levels of de Casteljau's algorithm are the control points of the parts.
        row = phi
        before = [phi[0]]
        after = [phi[-1]]
        while len(row) > 1:
            row = geodesic(self.space, row[:-1], row[1:], t)
            before.append(row[0])
            after.append(row[-1])
        return torch.stack(before), torch.stack(after[::-1])

    def elevate(self, phi: Phi, times: int = 1) -> Points:
        r"""Raise the degree of the curve, and return the control points of the new curve.

        The new curve is a `Bezier(space, degree + times)`. On a flat space, it is equal to the old curve. On a curved
        space, it only approximates the old curve between the same end points. If the distances between the control
        points are of order $h$, the error is $O(h^3)$.

        The method raises the degree in steps of one. A step from degree n to n + 1 retains both ends. Let $\varphi_i$
        be the old control points, and let $\gamma(x, y; s)$ be the point at the fraction $s$ of the geodesic from $x$
        to $y$. The new inner control points are $\gamma(\varphi_i, \varphi_{i-1}; \tfrac{i}{n+1})$ for i = 1, …, n.

        Args:
            phi: control points (degree + 1, *space.shape).
            times: the increase of the degree.

        Returns:
            The control points (degree + 1 + times, *space.shape).

        Raises:
            ArgumentError: if `phi` has another shape, or `times` is not an integer >= 0.

        Example:
            >>> from manifoldagg.manifolds import Flat
            >>> Bezier(Flat(1), 1).elevate(torch.tensor([[0.0], [2.0]])).tolist()
            [[0.0], [1.0], [2.0]]
        """
        self._check_phi(phi)
        for n in range(self.size, self.size + check_count("times", times, at_least=0)):
            fraction = torch.arange(1, n, dtype=torch.float64, device=phi.device) / n
            if self.space.flat:
                # Convex combinations in float64 are rounded once to the dtype of the points.
                s = fraction.reshape(-1, *(1 for _ in phi.shape[1:]))
                inner = ((1 - s) * phi[1:].double() + s * phi[:-1].double()).to(phi.dtype)
            else:
                inner = geodesic(self.space, phi[1:], phi[:-1], fraction)
            phi = torch.cat([phi[:1], inner, phi[-1:]])
        return phi

    def through(
        self, points: Points, parameters: Float[Tensor, " m"] | None = None, *, fixed_ends: bool = False
    ) -> Points:
        r"""Fit a Bézier curve to data points $p_j$ by least squares, and return its control points.

        The control points minimise $\sum_j |\iota_\varphi(t_j) - p_j|^2$, where $\iota_\varphi(t_j)$ is the point of
        the curve at the parameter $t_j$. With exactly degree + 1 data points, the curve passes through all of them.

        Args:
            points: data points (m, *space.shape) with m > degree.
            parameters: $t_j$ (m,). The default is proportional to the chord length, from 0 to 1.
            fixed_ends: whether the curve starts exactly at the first data point and ends exactly at the last one.

        Returns:
            The control points (degree + 1, *space.shape), accumulated in float64. If `parameters` is given, they are
            differentiable with respect to `points`.

        Raises:
            ArgumentError: if the space is curved, there are too few points, or `parameters` does not contain m finite
                numbers with enough distinct values to determine the curve.

        Example:
            >>> from manifoldagg.manifolds import Flat
            >>> points = torch.tensor([[0.0], [1.0], [2.0]])
            >>> torch.allclose(Bezier(Flat(1)).through(points), points)
            True
        """
        if not self.space.flat:
            raise ArgumentError(f"space: expected a flat space for least squares, got {self.space}")
        check_shape("points", points, None, *self.space.shape)
        if len(points) <= self.degree:
            raise ArgumentError(f"points: expected at least {self.size} for degree {self.degree}, got {len(points)}")
        rows = list(points.reshape(len(points), math.prod(points.shape[1:])))
        if parameters is None:
            parameters = _chord_parameters(rows)
        check_shape("parameters", parameters, len(points))
        if not bool(parameters.isfinite().all()):
            raise ArgumentError("parameters: expected finite numbers, got NaN or infinity")
        design = basis(self.degree, parameters.detach().cpu())
        # If the design matrix of the free points does not have full rank, several curves fit equally well.
        free = design[:, 1:-1] if fixed_ends else design
        if free.shape[1] and int(torch.linalg.matrix_rank(free)) < free.shape[1]:
            raise ArgumentError(f"parameters: expected {self.size} different numbers, got {parameters.tolist()}")
        # The solution is linear in the points. Solving for the unit vectors gives coefficients, and one combination per
        # control point reads the points.
        target = torch.eye(len(points), dtype=torch.float64)
        # Fixed end points are known, so their contribution is subtracted from the data. The check of the rank
        # above ensures that the least-squares solution is unique.
        if fixed_ends:
            target[:, 0] -= design[:, 0]
            target[:, -1] -= design[:, -1]
        solution = torch.linalg.lstsq(free, target).solution if free.shape[1] else target[:0]
        fitted = [combine(None, rows, row.to(points.device)).reshape(points.shape[1:]) for row in solution]
        return torch.stack([points[0], *fitted, points[-1]] if fixed_ends else fitted)

    def nearest(self, phi: Phi, point: Points) -> tuple[Tensor, Tensor]:
        r"""Find the nearest point of the curve for each given point, as a parameter $t \in [0, 1]$ and a distance.

        On a flat space, the squared distance from a given point to the curve is a polynomial of degree 2n in $t$, where
        n is the degree of the curve. The method compares the values of this polynomial at both ends of the curve and at
        all roots of its derivative. The result is therefore the global minimum, up to the rounding of the coefficients.

        On a curved space, the method evaluates the distance on a grid with 32 values of $t$ per control point. It then
        searches for the minimum near the best value of the grid. It can therefore miss the global minimum.

        Args:
            phi: control points (degree + 1, *space.shape).
            point: points (*batch, *space.shape).

        Returns:
            Parameters (*batch,) in float64, without derivatives, and distances (*batch,). The distances have correct
            first derivatives with respect to `phi` and `point`. Higher derivatives are wrong, because the parameter
            counts as constant.

        Raises:
            ArgumentError: if a shape is invalid, or a squared distance is not finite in float64.
        """
        self._check_phi(phi)
        if not self.space.flat:
            return super().nearest(phi, point)
        points = self._points(point).flatten(1)
        batch = point.shape[: point.ndim - len(self.space.shape)]
        rows = list(phi.flatten(1))
        # The squared distance is a quadratic form in the Bernstein weights, whose matrix is the Gram matrix of φ_i - p.
        # The kernel forms the differences φ_i - p before it multiplies them, so small differences keep their digits.
        squares = [gram([row.detach() for row in rows], minus=p.detach())[0] for p in points]
        if not all(map(is_finite, squares)):
            raise ArgumentError("phi, point: expected values with finite squares in float64, got NaN or infinity")
        t = phi.new_tensor([argmin(product_coefficients(inner.tolist())) for inner in squares], dtype=torch.float64)
        # The distances are computed from vectors, because the polynomial cancels near the curve.
        offsets = [combine(None, rows, b, minus=p) for b, p in zip(basis(self.degree, t), points, strict=True)]
        lengths = [offset.double().norm() for offset in offsets]
        distances = torch.stack(lengths) if lengths else t
        return t.reshape(batch), distances.to(phi.dtype).reshape(batch)


def de_casteljau(space: Manifold, polygon: Float[Tensor, "..."], t: Float[Tensor, "*batch"]) -> Float[Tensor, "..."]:
    r"""Compute points of Bézier curves by de Casteljau's algorithm along geodesics.

    Args:
        space: a space with exp and log.
        polygon: control points (n + 1, *space.shape), or (*batch, n + 1, *space.shape) with one curve per parameter.
        t: parameters (*batch,).

    Returns:
        The points (*batch, *space.shape). Cost: n (n + 1) / 2 geodesics for each parameter.

    Example:
        >>> from manifoldagg.manifolds import Flat
        >>> de_casteljau(Flat(1), torch.tensor([[0.0], [2.0], [0.0]]), torch.tensor(0.5))
        tensor([1.])
    """
    # The axis of the control points counts from the end, because a batch of polygons has further axes before it.
    axis = -1 - len(space.shape)
    # Each level shortens the polygon by one point, until only the point of the curve is left.
    s = t.double().reshape(*t.shape, *(1 for _ in range(-axis)))
    while (n := polygon.shape[axis]) > 1:
        start = polygon.narrow(axis, 0, n - 1)
        step = (s * space._log(start, polygon.narrow(axis, 1, n - 1))).to(polygon.dtype)
        polygon = space._exp(start.expand_as(step), step)
    return polygon.squeeze(axis)


def weighted_sum(weights: Float[Tensor, "*batch k"], points: Float[Tensor, "k ..."]) -> Float[Tensor, "..."]:
    """Compute weighted sums of points in the dtype of the points, even under autocast.

    The weights have the shape (*batch, k), the points have the shape (k, *shape), and the sums have the shape (*batch,
    *shape).
    """
    # Autocast would round the operands of the matrix product to half precision.
    with torch.autocast(points.device.type, enabled=False):
        sums = weights.to(points.dtype) @ points.reshape(len(points), math.prod(points.shape[1:]))
    return sums.reshape(*weights.shape[:-1], *points.shape[1:])


def differences_gram(phi: Float[Tensor, "control ..."]) -> Float[Tensor, "n n"]:
    r"""Compute the Gram matrix of the differences $\varphi_{i+1} - \varphi_i$ between neighbouring control points.

    The matrix is a float64 tensor on the CPU.
    """
    rows = list(phi.reshape(len(phi), math.prod(phi.shape[1:])))
    inner = gram(rows[1:], minus=rows[:-1])[0].cpu()
    if not bool(inner.isfinite().all()):
        raise ArgumentError("phi: expected values with finite squares in float64, got NaN or infinity")
    return inner


def check_space(space: Manifold) -> None:
    """Check that a space supports curves, that is, that the space is flat or has exp and log.

    Raises:
        ArgumentError: if the space does not support curves. The message contains the missing primitive.
    """
    check_is_manifold(space)
    missing = sorted({"exp", "log"} - space.capabilities)
    if missing and not space.flat:
        raise ArgumentError(
            f"space: expected a flat manifold or one with exp and log, got {space}, which has no {missing[0]}"
        )


def _chord_parameters(rows: list[Tensor]) -> Tensor:
    """Return the chord-length parameters of a sequence of points.

    The parameters increase from 0 to 1, in proportion to the distances between neighbouring points.
    """
    with torch.no_grad():
        steps = [gram([b.detach()], minus=a.detach()).sqrt().item() for a, b in pairwise(rows)]
    lengths = torch.tensor([0.0, *steps], dtype=torch.float64).cumsum(0)
    if not 0 < lengths[-1] < math.inf:
        raise ArgumentError(
            f"points: expected finite points that are not all equal, got a total length of {lengths[-1].item()}"
        )
    return lengths / lengths[-1]
