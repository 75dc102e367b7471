"""Bézier curves of any degree."""

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
"""The degree beyond which binomial coefficients overflow."""


class BezierSpline(CurveEmbedding):
    r"""A spline of one or more Bézier curves of one `degree`, with shared joints.

    On a flat space they and their derivatives are sums of control points and of their differences.
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
        """The point of the curve at `t`.

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
        r"""$\iota_\varphi'(t)$, of one piece on a flat space $n \sum_{i<n} \binom{n-1}{i} t^i (1-t)^{n-1-i}
        (\varphi_{i+1} - \varphi_i)$: the hodograph, a Bézier curve of degree n - 1.

        Arguments, result and errors as for a call; at a joint it is that of the piece that begins there. At the ends of
        one piece it is $n \log_{\varphi_0} \varphi_1$ and $-n \log_{\varphi_n} \varphi_{n-1}$.
        """
        self._check_phi(phi)
        return self._derivative(phi, t, 1) if self.space.flat else super().velocity(phi, t)

    def acceleration(self, phi: Phi, t: Parameter) -> Points:
        r"""$\nabla_{\iota'} \iota'$ at $t$, on a flat space $\iota_\varphi''(t)$, the hodograph of the hodograph;
        at a joint that of the piece that begins there.
        """
        self._check_phi(phi)
        return self._derivative(phi, t, 2) if self.space.flat else super().acceleration(phi, t)

    def _derivative(self, phi: Tensor, t: Parameter, order: int) -> Tensor:
        """On a flat space, a curve of degree n - order: weighted sums of consecutive differences of control points."""
        piece, s = self._locate(as_parameter(t, phi))
        shares = basis(self.degree - order, s)
        rows = phi
        if order:
            rows = self.pieces**order * math.perm(self.degree, order) * phi.diff(n=order, dim=0)
        if self.pieces > 1:
            blank = shares.new_zeros(*piece.shape, len(rows))
            shares = blank.scatter(-1, self._control_indices(piece, shares.shape[-1]), shares)
        return weighted_sum(shares, rows)

    def _speed(self, phi: Tensor) -> Speed:
        if not self.space.flat:
            return super()._speed(phi)
        n = self.degree
        inner = torch.stack([differences_gram(phi[k * n : (k + 1) * n + 1]) for k in range(self.pieces)])

        def speed(t: Tensor) -> Tensor:
            piece, s = self._locate(t.cpu())
            each = inner[0] if self.pieces == 1 else inner[piece]
            return self.pieces * n * sqrt_quadratic_form(each, basis(n - 1, s)).to(t.device)

        return speed

    def _locate(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Which piece a parameter belongs to, and where it is in it; before the first and past the last it extends."""
        if self.pieces == 1:
            return torch.zeros_like(t, dtype=torch.long), t
        joints = torch.tensor(self.breaks[1:-1], dtype=t.dtype, device=t.device)
        piece = torch.bucketize(t.detach(), joints, right=True).clamp(max=self.pieces - 1)
        return piece, t * self.pieces - piece

    def _control_indices(self, piece: Tensor, count: int) -> Tensor:
        """The numbers of consecutive points from each piece's first on: (*batch, count)."""
        return (self.degree * piece).unsqueeze(-1) + torch.arange(count, device=piece.device)


@dataclass(frozen=True)
class Bezier(BezierSpline):
    r"""The Bézier curve of $\varphi_0, \dots, \varphi_n$: de Casteljau's algorithm along geodesics,

    $$\varphi_i^{k}(t) = \gamma(\varphi_i^{k-1}, \varphi_{i+1}^{k-1}; t), \qquad
      \gamma(x, y; t) = \exp_x(t \log_x y), \qquad \iota_\varphi(t) = \varphi_0^n(t).$$

    On a flat space that is $\sum_i \binom{n}{i} t^i (1-t)^{n-i} \varphi_i$, which is what is computed there; the curve
    then stays in the convex hull of its control points.

    It starts at $\varphi_0$ and ends at $\varphi_n$: exactly on a flat space, to rounding on others (where points
    are classes of tensors, in another representative). $t$ outside [0, 1] extends it. It is differentiable in
    $\varphi$ and $t$.

    Args:
        space: flat, or with exp and log. Neighbouring control points, and those of every level, must be within each
            other's injectivity radius.
        degree: $n \ge 1$; $\varphi$ has shape (n + 1, *space.shape).

    Raises:
        ArgumentError: if `degree` is not a positive integer, or `space` is curved and has no exp or log.

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
                f"degree: expected at most {MAX_DEGREE}, whose binomials float64 holds, got {self.degree}"
            )
        check_space(self.space)

    @property
    def pieces(self) -> int:
        return 1

    def weights(self, t: float) -> list[float]:
        """Return the degree + 1 Bernstein weights of the control points at `t`, as numbers."""
        return weights(self.degree, t)

    def pull_phi(self, phi: Phi, x: Parameter, w: Points) -> Points:
        r"""Pull a derivative `w` at $\iota_\varphi(x)$ back to the control points: $b_i(x)\, w$ on a flat space.

        Args:
            phi: control points (degree + 1, *space.shape).
            x: a number or a tensor (*batch,).
            w: (*batch, *space.shape); the result is the sum over the batch.
        """
        self._check_phi(phi)
        if not self.space.flat:
            return super().pull_phi(phi, x, w)
        place = as_parameter(x, phi)
        check_shape("w", w, *place.shape, *phi.shape[1:])
        lines = basis(self.degree, place).reshape(-1, self.size)
        if len(lines) == 1:
            return torch.outer(lines[0].to(phi.dtype), w.to(phi.dtype).flatten()).reshape(phi.shape)
        return weighted_sum(lines.mT, w.reshape(len(lines), *phi.shape[1:]))

    def split(self, phi: Phi, t: float) -> tuple[Tensor, Tensor]:
        r"""Return control points of $s \mapsto \iota(ts)$ and $s \mapsto \iota(t + (1 - t)s)$, by de Casteljau.

        On a curved space these agree with the curve to third order in its size; their ends are on it.

        Args:
            phi: control points (degree + 1, *space.shape).
            t: where to cut.

        Returns:
            Two tensors of the shape of `phi`; the last point of the one is the first of the other.

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
                left[k, : k + 1] = basis(k, at)
                right[k, k:] = basis(n - k, at)
            return weighted_sum(left, phi), weighted_sum(right, phi)
        row = phi
        before = [phi[0]]
        after = [phi[-1]]
        while len(row) > 1:
            row = geodesic(self.space, row[:-1], row[1:], t)
            before.append(row[0])
            after.append(row[-1])
        return torch.stack(before), torch.stack(after[::-1])

    def elevate(self, phi: Phi, times: int = 1) -> Points:
        r"""Return control points of the curve in a higher degree: $\gamma(\varphi_i, \varphi_{i-1}; \tfrac{i}{n+1})$.

        They belong to `Bezier(space, degree + times)`. On a curved space the curves agree to third order in their
        size; the ends are the same.

        Args:
            phi: control points (degree + 1, *space.shape).
            times: by how much the degree rises.

        Returns:
            (degree + 1 + times, *space.shape).

        Raises:
            ArgumentError: if `phi` has another shape, or `times` is not an integer or negative.

        Example:
            >>> from manifoldagg.manifolds import Flat
            >>> Bezier(Flat(1), 1).elevate(torch.tensor([[0.0], [2.0]])).tolist()
            [[0.0], [1.0], [2.0]]
        """
        self._check_phi(phi)
        for n in range(self.size, self.size + check_count("times", times, at_least=0)):
            back = torch.arange(1, n, dtype=torch.float64, device=phi.device) / n
            if self.space.flat:
                shares = back.reshape(-1, *(1 for _ in phi.shape[1:]))
                inner = ((1 - shares) * phi[1:].double() + shares * phi[:-1].double()).to(phi.dtype)
            else:
                inner = geodesic(self.space, phi[1:], phi[:-1], back)
            phi = torch.cat([phi[:1], inner, phi[-1:]])
        return phi

    def through(
        self, points: Points, parameters: Float[Tensor, " m"] | None = None, *, fixed_ends: bool = False
    ) -> Points:
        r"""Fit control points to points: $\min_\varphi \sum_j |\iota_\varphi(t_j) - p_j|^2$.

        With degree + 1 points the curve goes through each of them.

        Args:
            points: (m, *space.shape), m > degree.
            parameters: $t_j$ (m,); by chord length from 0 to 1 where not given.
            fixed_ends: start at the first point and end at the last, exactly, and fit the rest.

        Returns:
            (degree + 1, *space.shape), summed in float64; differentiable in `points` at given parameters.

        Raises:
            ArgumentError: if the space is curved, there are too few points, or the parameters are not m finite numbers
                or so few different ones that they do not determine the curve.

        Example:
            >>> from manifoldagg.manifolds import Flat
            >>> points = torch.tensor([[0.0], [1.0], [2.0]])
            >>> torch.allclose(Bezier(Flat(1)).through(points), points)
            True
        """
        if not self.space.flat:
            raise ArgumentError(f"space: least squares need a flat space, got {self.space}")
        check_shape("points", points, None, *self.space.shape)
        if len(points) <= self.degree:
            raise ArgumentError(f"points: expected at least {self.size} for degree {self.degree}, got {len(points)}")
        rows = list(points.reshape(len(points), math.prod(points.shape[1:])))
        if parameters is None:
            parameters = _chord_parameters(rows)
        check_shape("parameters", parameters, len(points))
        if not bool(parameters.isfinite().all()):
            raise ArgumentError("parameters: expected finite numbers")
        shares = basis(self.degree, parameters.detach().cpu())
        free = shares[:, 1:-1] if fixed_ends else shares
        if free.shape[1] and int(torch.linalg.matrix_rank(free)) < free.shape[1]:
            raise ArgumentError(f"parameters: expected {self.size} different numbers, got {parameters.tolist()}")
        target = torch.eye(len(points), dtype=torch.float64)
        if fixed_ends:
            target[:, 0] -= shares[:, 0]
            target[:, -1] -= shares[:, -1]
        lines = torch.linalg.lstsq(free, target).solution if free.shape[1] else target[:0]
        fitted = [combine(None, rows, line.to(points.device)).reshape(points.shape[1:]) for line in lines]
        return torch.stack([points[0], *fitted, points[-1]] if fixed_ends else fitted)

    def nearest(self, phi: Phi, point: Points) -> tuple[Tensor, Tensor]:
        r"""Return the $t \in [0, 1]$ of the nearest point, and the distance, for points (*batch, *space.shape).

        On a flat space the squared distance is a polynomial of degree 2n whose Bernstein coefficients are read from
        one Gram matrix a point: the least of all changes of sign of its derivative, a global minimum up to the rounding
        of the coefficients. On other spaces it is the best of 32 places a control point, refined to rounding, which
        is not certified.

        Returns:
            Parameters (*batch,) in float64, without a derivative, and distances (*batch,), whose first derivatives in
            `phi` and `point` are right; higher ones are not, as they take the parameter for fixed.

        Raises:
            ArgumentError: if a shape does not fit, or the squared distances are not finite in float64.
        """
        self._check_phi(phi)
        if not self.space.flat:
            return super().nearest(phi, point)
        points = self._points(point).flatten(1)
        batch = point.shape[: point.ndim - len(self.space.shape)]
        rows = list(phi.flatten(1))
        squares = [gram([row.detach() for row in rows], minus=p.detach())[0] for p in points]
        if not all(map(is_finite, squares)):
            raise ArgumentError("phi, point: expected finite values whose squares are finite in float64")
        t = phi.new_tensor([argmin(product_coefficients(inner.tolist())) for inner in squares], dtype=torch.float64)
        away = [combine(None, rows, b, minus=p) for b, p in zip(basis(self.degree, t), points, strict=True)]
        lengths = [offset.double().norm() for offset in away]
        found = torch.stack(lengths) if lengths else t
        return t.reshape(batch), found.to(phi.dtype).reshape(batch)


def de_casteljau(space: Manifold, polygon: Float[Tensor, "..."], t: Float[Tensor, "*batch"]) -> Float[Tensor, "..."]:
    r"""Compute the point at `t` of the curve of a polygon, along geodesics.

    Args:
        space: with exp and log.
        polygon: (n + 1, *space.shape), or one for each parameter: (*batch, n + 1, *space.shape).
        t: (*batch,).

    Returns:
        (*batch, *space.shape). Cost: n (n + 1) / 2 geodesics for each parameter.

    Example:
        >>> from manifoldagg.manifolds import Flat
        >>> de_casteljau(Flat(1), torch.tensor([[0.0], [2.0], [0.0]]), torch.tensor(0.5))
        tensor([1.])
    """
    axis = -1 - len(space.shape)
    shares = t.double().reshape(*t.shape, *(1 for _ in range(-axis)))
    while (n := polygon.shape[axis]) > 1:
        start = polygon.narrow(axis, 0, n - 1)
        step = (shares * space._log(start, polygon.narrow(axis, 1, n - 1))).to(polygon.dtype)
        polygon = space._exp(start.expand_as(step), step)
    return polygon.squeeze(axis)


def weighted_sum(weights: Float[Tensor, "*batch k"], points: Float[Tensor, "k ..."]) -> Float[Tensor, "..."]:
    """Compute weighted sums (*batch, *shape) of points (k, *shape), in their dtype, also under autocast."""
    with torch.autocast(points.device.type, enabled=False):
        sums = weights.to(points.dtype) @ points.reshape(len(points), math.prod(points.shape[1:]))
    return sums.reshape(*weights.shape[:-1], *points.shape[1:])


def differences_gram(phi: Float[Tensor, "control ..."]) -> Float[Tensor, "n n"]:
    r"""Compute $\langle \varphi_{i+1} - \varphi_i,\, \varphi_{j+1} - \varphi_j \rangle$ in float64, on the CPU."""
    rows = list(phi.reshape(len(phi), math.prod(phi.shape[1:])))
    inner = gram(rows[1:], minus=rows[:-1])[0].cpu()
    if not bool(inner.isfinite().all()):
        raise ArgumentError("phi: expected finite values whose squares are finite in float64")
    return inner


def check_space(space: Manifold) -> None:
    """Return `space`, which must support curves.

    Raises:
        ArgumentError: saying what is missing.
    """
    check_is_manifold(space)
    missing = sorted({"exp", "log"} - space.capabilities)
    if missing and not space.flat:
        raise ArgumentError(f"space: expected a flat manifold or one with exp and log; {space} has no {missing[0]}")


def _chord_parameters(rows: list[Tensor]) -> Tensor:
    """From 0 to 1, as far apart as neighbouring points are."""
    with torch.no_grad():
        steps = [gram([b.detach()], minus=a.detach()).sqrt().item() for a, b in pairwise(rows)]
    reached = torch.tensor([0.0, *steps], dtype=torch.float64).cumsum(0)
    if not 0 < reached[-1] < math.inf:
        raise ArgumentError(f"points: expected different, finite ones; they are {reached[-1].item()} apart in all")
    return reached / reached[-1]
