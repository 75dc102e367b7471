"""Two models of hyperbolic space: the Poincaré ball and the hyperboloid (Lorentz model).

Their formulas are accurate at very small and at very large distances.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from manifoldagg._validation import check_count, check_number, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds.manifold import PRIMITIVES, Manifold, Point, Scalar, Tangent
from manifoldagg.manifolds.smooth import dot, series_or

__all__ = ["Lorentz", "PoincareBall"]

MAX_SAMPLE_RADIUS = 0.6
"""The maximum norm of a random point of a ball, in units of the radius."""


@dataclass(frozen=True)
class PoincareBall(Manifold):
    r"""The Poincaré ball $\{x \in \mathbb{R}^n : k|x|^2 < 1\}$ of curvature $-k$.

    The metric is $\langle u, v\rangle_x = \lambda_x^2\, u \cdot v$ with $\lambda_x = 2 / (1 - k|x|^2)$. The following
    formulas are for $k = 1$. For other curvatures, coordinates are scaled by $\sqrt{k}$. With $\alpha = 1 - |x|^2$,
    $\beta = 1 - |y|^2$, $d = y - x$, $q = |d|^2 / \alpha\beta$ and $p = \tanh(|u|/\alpha)\, u/|u|$:

    $$\exp_x u = x + \alpha\,\frac{p + |p|^2 x}{1 + 2\,x \cdot p + |x|^2|p|^2}, \qquad
      \log_x y = \frac{\operatorname{arsinh}\sqrt{q}}{\sqrt{q}}\,\frac{\alpha d - |d|^2 x}{\beta\sqrt{1 + q}},$$

    $$P_{x \to y} v = \frac{\beta}{\alpha}\Bigl(v + 2\,\frac{(\alpha\, d \cdot v - |d|^2\, x \cdot v)\,x
      - ((\beta + |d|^2)\, x \cdot v + |x|^2\, d \cdot v)\,d}{|d|^2 + \alpha\beta}\Bigr).$$

    These are the Möbius addition $x \oplus p$, its inverse, and the gyration $\operatorname{gyr}[y, -x]$. They are
    written in terms of $d$, so that they are accurate for small distances. `retract` uses $p = v / \sqrt{1 + |v|^2}$
    with $v = u / \alpha$ instead of the hyperbolic tangent. All primitives are computed in float64 and cast back. They
    are smooth at $u = 0$ and $y = x$.

    Coordinates limit the accuracy far from the centre:

    - A point at distance $r$ from the centre has the distance $1 - \sqrt{k}|x| \approx 2e^{-\sqrt{k}r}$ from the
      boundary, in units of the radius. Rounding its coordinates displaces it by about $\varepsilon e^{\sqrt{k}r}/4$.
    - At $\sqrt{k}r \approx 38$ (in float32: 18), a point is rounded to the boundary, where results are infinite or NaN.
    - `project` moves points outside of the ball to the distance $4\varepsilon$ inside the boundary, because an open
      ball has no nearest point.

    Args:
        n: the dimension, at least 1.
        curvature: the curvature $-k < 0$.

    Raises:
        ArgumentError: if `n` is not a positive integer, or `curvature` is not a negative number.

    Source: Ungar 2008; Ganea et al. 2018.

    Example:
        >>> import torch
        >>> PoincareBall(2).exp(torch.zeros(2), torch.tensor([0.5, 0.0]))
        tensor([0.4621, 0.0000])
    """

    n: int
    curvature: float = -1.0
    open: ClassVar[bool] = True
    capabilities: ClassVar[frozenset[str]] = PRIMITIVES - {"inverse_retract"}
    symmetric: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("n", self.n)
        if check_number("curvature", self.curvature) >= 0:
            raise ArgumentError(f"curvature: expected a finite number < 0, got {short_repr(self.curvature)}")

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return (self.n,)

    def _inner(self, x: Point, u: Tangent, v: Tangent) -> Scalar:
        a = self._to_unit_ball(x)
        return (dot(u.double(), v.double()) * (2 / (1 - dot(a, a))).square()).squeeze(-1).to(u.dtype)

    def _exp(self, x: Point, u: Tangent) -> Point:
        # 1 - tanh² is computed as 1 / cosh², because the difference cancels for long tangents.
        return self._mobius_add(x, u, _tanhc_of_square, lambda square: _cosh_of_square(square).square().reciprocal())

    def _log(self, x: Point, y: Point) -> Tangent:
        a = self._to_unit_ball(x)
        b = self._to_unit_ball(y)
        d = b - a
        alpha = 1 - dot(a, a)
        beta = 1 - dot(b, b)
        square = dot(d, d)
        # q = sinh²(r/2) is accurate for small and large distances r. The equivalent artanh |(-x) ⊕ y| loses all digits
        # if its argument is close to 1.
        q = square / (alpha * beta)
        return self._from_unit_ball(_arsinhc_of_square(q) * (alpha * d - square * a) / (beta * (1 + q).sqrt()), x)

    def _transport(self, x: Point, y: Point, u: Tangent) -> Tangent:
        a = self._to_unit_ball(x)
        b = self._to_unit_ball(y)
        v = u.double()
        d = b - a
        square = dot(a, a)
        beta = 1 - dot(b, b)
        dd = dot(d, d)
        alpha = 1 - square
        av = dot(a, v)
        dv = dot(d, v)
        plane = (alpha * dv - dd * av) * a - ((beta + dd) * av + square * dv) * d
        # The denominator 1 - 2 x·y + |x|²|y|² is computed as a sum of positive terms. β/α is the ratio of the conformal
        # factors.
        return (beta / alpha * (v + 2 * plane / (dd + alpha * beta))).to(u.dtype)

    def _project_tangent(self, x: Point, u: Tangent) -> Tangent:
        return u

    def _project(self, x: Point) -> Point:
        a = self._to_unit_ball(x)
        eps = torch.finfo(x.dtype).eps
        square = dot(a, a)
        # Rounding the coordinates to the dtype of x changes the norm by less than ε, so projected points stay inside.
        outside = square >= (1 - 2 * eps) ** 2
        # The square is replaced for points inside, because the derivative of the root at 0 would make the result NaN.
        length = torch.where(outside, square, torch.ones_like(square)).sqrt()
        return torch.where(outside, self._from_unit_ball((1 - 4 * eps) / length * a, x), x)

    def _retract(self, x: Point, u: Tangent) -> Point:
        # t / √(1 + t²) = t - t³/2 + ... agrees with tanh t = t - t³/3 + ... to second order.
        return self._mobius_add(x, u, lambda square: (1 + square).rsqrt(), lambda square: (1 + square).reciprocal())

    def _gradient(self, x: Point, derivative: Tangent) -> Tangent:
        a = self._to_unit_ball(x)
        # The metric is λ² times the Euclidean metric, so the gradient is the derivative divided by λ².
        return (((1 - dot(a, a)) / 2).square() * derivative.double()).to(x.dtype)

    def _injectivity_radius(self, x: Point) -> Scalar:
        return x.new_full(x.shape[:-1], math.inf)

    def _random_point(self, batch: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Point:
        """Draw points with uniform coordinates in the ball with 0.6 times the radius."""
        noise = torch.randn(*batch, self.n, generator=generator, dtype=dtype, device=generator.device)
        level = torch.rand(*batch, 1, generator=generator, dtype=torch.float64, device=generator.device)
        a = noise.double()
        # The volume of a ball is proportional to the n-th power of its radius, so the radius of a uniform point is the
        # n-th root of a uniform number.
        return self._from_unit_ball(MAX_SAMPLE_RADIUS * level ** (1 / self.n) * a / dot(a, a).sqrt(), noise)

    def _random_tangent(self, x: Point, generator: torch.Generator) -> Tangent:
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype, device=generator.device).to(x.device)
        a = self._to_unit_ball(x)
        return ((1 - dot(a, a)) / 2 * noise.double()).to(x.dtype)

    def _mobius_add(
        self, x: Tensor, u: Tensor, shorten: Callable[[Tensor], Tensor], rest: Callable[[Tensor], Tensor]
    ) -> Tensor:
        r"""Compute `exp` or `retract` as the Möbius sum $x \oplus p$ of the point `x` and a point $p$.

        The point $p$ has the direction of the tangent `u`. The two methods differ only in the norm of $p$, which is
        always below 1 and depends on the norm of `u`.

        Args:
            x: points $x$.
            u: tangents $u$ at $x$. In the unit ball, $p = s v$ with $v = u / (1 - |x|^2)$.
            shorten: a function that computes the factor $s$ from $|v|^2$.
            rest: a function that computes $1 - |p|^2$ from $|v|^2$ without cancellation.
        """
        a = self._to_unit_ball(x)
        v = self._to_unit_ball(u)
        square = dot(a, a)
        alpha = 1 - square
        speed = dot(v, v) / alpha.square()
        factor = shorten(speed)
        pp = factor.square() * speed
        ap = factor / alpha * dot(a, v)
        one_minus_pp = rest(speed)
        # The sum is x + α (p + |p|² x) / (1 + 2 x·p + |x|²|p|²). If x·p < 0, the denominator is computed as
        # |x + p|² + α (1 - |p|²), and p + |p|² x as (x + p) - (1 - |p|²) x, because the original forms cancel.
        p = factor / alpha * v
        total = a + p
        inward = ap < 0
        scale = alpha / torch.where(inward, dot(total, total) + alpha * one_minus_pp, 1 + 2 * ap + square * pp)
        return self._from_unit_ball(a + scale * torch.where(inward, total - one_minus_pp * a, p + pp * a), x)

    def _to_unit_ball(self, x: Tensor) -> Tensor:
        """Scale to the ball of radius 1 and curvature -1, in float64."""
        return x.double() if self.curvature == -1 else math.sqrt(-self.curvature) * x.double()

    def _from_unit_ball(self, a: Tensor, like: Tensor) -> Tensor:
        """Scale back from the ball of radius 1, in the dtype of `like`."""
        return (a if self.curvature == -1 else a / math.sqrt(-self.curvature)).to(like.dtype)


@dataclass(frozen=True)
class Lorentz(Manifold):
    r"""The hyperboloid $\{x \in \mathbb{R}^{n+1} : \langle x, x\rangle = -1, x_0 > 0\}$ of curvature $-1$.

    The inner product is $\langle u, v\rangle = -u_0v_0 + \vec u \cdot \vec v$, where the first coordinate is time. With
    $t^2 = \langle u, u\rangle$:

    $$\exp_x u = \cosh t\; x + \tfrac{\sinh t}{t}\, u, \qquad
      P_{x \to y} u = u + \tfrac{\langle y, u\rangle}{1 - \langle x, y\rangle}\,(x + y).$$

    The log is computed at the origin and then transported to $x$. The boost that maps $x$ to the origin maps $y$ to the
    space coordinates $\vec z = \vec d - (d_0 - \vec x \cdot \vec d / (1 + x_0))\,\vec x$ with $d = y - x$. The log at
    the origin is $\vec z \operatorname{arsinh}|\vec z| / |\vec z|$.

    Numerical properties:

    - All primitives are computed in float64 and cast back. They are smooth at $u = 0$ and $y = x$.
    - The time coordinate is recomputed from the space coordinates: $x_0 = \sqrt{1 + |\vec x|^2}$ and
      $u_0 = \vec x \cdot \vec u / x_0$. Only `inner` and `project_tangent` read the time coordinate, because they
      accept vectors that are not tangent.
    - `project` does not change the space coordinates. `retract` is $\sqrt{1 + t^2}\; x + u$.
    - Coordinates limit the accuracy at a distance $r$ from the origin, where $x_0 = \cosh r$. Rounding a tangent at $x$
      with relative error $\varepsilon$ changes $\langle u, u\rangle$ by $\varepsilon x_0^2$, and the result of
      `project_tangent` by $\varepsilon x_0^3$.

    Args:
        n: the dimension of the hyperboloid, at least 1. Points have n + 1 coordinates.

    Raises:
        ArgumentError: if `n` is not a positive integer.

    Source: Nickel, Kiela 2018.

    Example:
        >>> import torch
        >>> Lorentz(1).exp(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
        tensor([1.5431, 1.1752])
    """

    n: int
    capabilities: ClassVar[frozenset[str]] = PRIMITIVES - {"inverse_retract"}
    symmetric: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("n", self.n)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return (self.n + 1,)

    def _inner(self, x: Point, u: Tangent, v: Tangent) -> Scalar:
        return _minkowski(u.double(), v.double()).squeeze(-1).to(u.dtype)

    def _exp(self, x: Point, u: Tangent) -> Point:
        a0, a = _time_and_space(x)
        v = u[..., 1:].double()
        # The time coordinate of a tangent follows from its space coordinates.
        v0 = dot(a, v) / a0
        square = _squared_norm(a0, a, v, v0)
        cosh = _cosh_of_square(square)
        sinhc = _sinhc_of_square(square)
        return torch.cat([cosh * a0 + sinhc * v0, torch.addcmul(cosh * a, sinhc, v)], -1).to(x.dtype)

    def _log(self, x: Point, y: Point) -> Tangent:
        a0, a = _time_and_space(x)
        b0, b = _time_and_space(y)
        d = b - a
        ad = dot(a, d)
        # b₀ - a₀ is computed as (|b|² - |a|²) / (a₀ + b₀), which does not cancel for large coordinates.
        d0 = (dot(d, d) + 2 * ad) / (a0 + b0)
        z = torch.addcmul(d, d0 - ad / (1 + a0), a, value=-1)
        # |z| = sinh r. Unlike arcosh, arsinh is smooth at r = 0.
        return (_arsinhc_of_square(dot(z, z)) * _from_origin(a0, a, z)).to(x.dtype)

    def _transport(self, x: Point, y: Point, u: Tangent) -> Tangent:
        a0, a = _time_and_space(x)
        b0, b = _time_and_space(y)
        v = u[..., 1:].double()
        d = b - a
        # <y, u> is computed as <y - x, u>, which is accurate if y is close to x.
        yu = dot(d, v) - dot(d, a + b) / (a0 + b0) * dot(a, v) / a0
        # The denominator is 1 - <x, y> = 1 + cosh r >= 2.
        transported = v + yu / (1 + a0 * b0 - dot(a, b)) * (a + b)
        # The time coordinate is computed from the space coordinates, so the result is tangent despite rounding.
        return torch.cat([dot(b, transported) / b0, transported], -1).to(u.dtype)

    def _project_tangent(self, x: Point, u: Tangent) -> Tangent:
        a = torch.cat(_time_and_space(x), -1)
        v = u.double()
        # The first pass leaves a component ε|u| along x. The second pass reduces it to ε times the projected length.
        for _ in range(2):
            v = v + _minkowski(a, v) * a
        return v.to(u.dtype)

    def _project(self, x: Point) -> Point:
        return _point(x[..., 1:].double()).to(x.dtype)

    def _retract(self, x: Point, u: Tangent) -> Point:
        a0, a = _time_and_space(x)
        v = u[..., 1:].double()
        return _point((1 + _squared_norm(a0, a, v, dot(a, v) / a0)).sqrt() * a + v).to(x.dtype)

    def _gradient(self, x: Point, derivative: Tangent) -> Tangent:
        # The inverse of the metric diag(-1, 1, ..., 1) changes the sign of the time coordinate.
        return self._project_tangent(x, torch.cat([-derivative[..., :1], derivative[..., 1:]], -1))

    def _injectivity_radius(self, x: Point) -> Scalar:
        return x.new_full(x.shape[:-1], math.inf)

    def _random_point(self, batch: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Point:
        """Draw random points by applying the exponential map to normally distributed tangents at the origin.

        The mean squared length of these tangents is 1.
        """
        noise = torch.randn(*batch, self.n, generator=generator, dtype=dtype, device=generator.device)
        v = noise.double() / math.sqrt(self.n)
        # The space coordinates of exp at the origin are sinh|v| v/|v|.
        return _point(_sinhc_of_square(dot(v, v)) * v).to(noise.dtype)

    def _random_tangent(self, x: Point, generator: torch.Generator) -> Tangent:
        shape = (*x.shape[:-1], self.n)
        noise = torch.randn(shape, generator=generator, dtype=x.dtype, device=generator.device).to(x.device)
        return _from_origin(*_time_and_space(x), noise.double()).to(x.dtype)


def _minkowski(u: Tensor, v: Tensor) -> Tensor:
    """Compute the inner product of the Lorentz model, (*batch, 1)."""
    return dot(u[..., 1:], v[..., 1:]) - u[..., :1] * v[..., :1]


def _time_and_space(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the time coordinate and the space coordinates of a point of the hyperboloid, in float64.

    The time coordinate is recomputed from the space coordinates. Rounding errors of the given time coordinate therefore
    have no effect.
    """
    a = x[..., 1:].double()
    return (1 + dot(a, a)).sqrt(), a


def _squared_norm(a0: Tensor, a: Tensor, v: Tensor, v0: Tensor) -> Tensor:
    """Compute <v, v> of a tangent with the space coordinates `v` and the time coordinate `v0`."""
    # |v|² - v₀² cancels far from the origin. Boosted to the origin, the tangent has v₀ = 0 and all terms are positive.
    at_origin = torch.addcmul(v, v0 / (1 + a0), a, value=-1)
    return dot(at_origin, at_origin)


def _point(a: Tensor) -> Tensor:
    """Return the point of the hyperboloid with the given space coordinates."""
    return torch.cat([(1 + dot(a, a)).sqrt(), a], -1)


def _from_origin(a0: Tensor, a: Tensor, v: Tensor) -> Tensor:
    """Transport a tangent with the space coordinates `v` from the origin to a point."""
    av = dot(a, v)
    return torch.cat([av, torch.addcmul(v, av / (1 + a0), a)], -1)


def _cosh_of_square(s: Tensor) -> Tensor:
    """Compute cosh √s."""
    return series_or(s, [1 / math.factorial(2 * k) for k in range(6)], torch.cosh)


def _sinhc_of_square(s: Tensor) -> Tensor:
    """Compute sinh(√s) / √s."""
    return series_or(s, [1 / math.factorial(2 * k + 1) for k in range(6)], lambda t: torch.sinh(t) / t)


def _tanhc_of_square(s: Tensor) -> Tensor:
    """Compute tanh(√s) / √s."""
    series = [1, -1 / 3, 2 / 15, -17 / 315, 62 / 2835, -1382 / 155925]
    return series_or(s, series, lambda t: torch.tanh(t) / t)


def _arsinhc_of_square(s: Tensor) -> Tensor:
    """Compute arsinh(√s) / √s."""
    series = [(-1) ** k * math.comb(2 * k, k) / (4**k * (2 * k + 1)) for k in range(6)]
    return series_or(s, series, lambda t: torch.asinh(t) / t)
