"""Hyperbolic space in two models, with closed forms that are stable at very small and very large distances."""

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
"""How far from the centre of a ball its points are drawn, in radii."""


@dataclass(frozen=True)
class PoincareBall(Manifold):
    r"""The ball $\{x \in \mathbb{R}^n : k|x|^2 < 1\}$ of curvature $-k$, conformal to $\mathbb{R}^n$.

    $\langle u, v\rangle_x = \lambda_x^2\, u \cdot v$ with $\lambda_x = 2 / (1 - k|x|^2)$. For $k = 1$ (the others
    follow by the scale $\sqrt{k}$) with $\alpha = 1 - |x|^2$, $\beta = 1 - |y|^2$, $d = y - x$,
    $q = |d|^2 / \alpha\beta$ and $p = \tanh(|u|/\alpha)\, u/|u|$:

    $$\exp_x u = x + \alpha\,\frac{p + |p|^2 x}{1 + 2\,x \cdot p + |x|^2|p|^2}, \qquad
      \log_x y = \frac{\operatorname{arsinh}\sqrt{q}}{\sqrt{q}}\,\frac{\alpha d - |d|^2 x}{\beta\sqrt{1 + q}},$$

    $$P_{x \to y} v = \frac{\beta}{\alpha}\Bigl(v + 2\,\frac{(\alpha\, d \cdot v - |d|^2\, x \cdot v)\,x
      - ((\beta + |d|^2)\, x \cdot v + |x|^2\, d \cdot v)\,d}{|d|^2 + \alpha\beta}\Bigr).$$

    They are $x \oplus p$, the inverse of that, and the gyration $\operatorname{gyr}[y, -x]$, written in $d$, so that a
    small distance keeps its digits. Everything is computed in float64 and cast back, and is smooth at $u = 0$ and
    $y = x$.

    `retract` takes $p = v / \sqrt{1 + |v|^2}$, $v = u / \alpha$, in place of the hyperbolic tangent.

    A point at distance $r$ of the centre is $1 - \sqrt{k}|x| \approx 2e^{-\sqrt{k}r}$ of a radius away from the
    boundary: whatever the formula, rounding its coordinates moves it by about $\varepsilon e^{\sqrt{k}r}/4$.
    At $\sqrt{k}r \approx 38$ float64 rounds it onto the boundary (float32: 18), which is not of the space: what starts
    there is infinite or NaN. `project` brings what is outside back to $4\varepsilon$ of the boundary, as an open ball
    has no nearest point.

    Args:
        n: the dimension, at least 1.
        curvature: $-k$, negative.

    Raises:
        ArgumentError: if `n` is not a positive integer, or `curvature` no negative number.

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
        # 1 - tanh² = 1 / cosh²: the difference would cancel far out.
        return self._mobius_add(x, u, _tanhc_of_square, lambda square: _cosh_of_square(square).square().reciprocal())

    def _log(self, x: Point, y: Point) -> Tangent:
        a = self._to_unit_ball(x)
        b = self._to_unit_ball(y)
        d = b - a
        alpha = 1 - dot(a, a)
        beta = 1 - dot(b, b)
        apart = dot(d, d)
        # q = sinh²(r/2) keeps its digits at both ends; artanh |(-x) ⊕ y|, the same distance, has none left near 1.
        q = apart / (alpha * beta)
        return self._from_unit_ball(_arsinhc_of_square(q) * (alpha * d - apart * a) / (beta * (1 + q).sqrt()), x)

    def _transport(self, x: Point, y: Point, u: Tangent) -> Tangent:
        a = self._to_unit_ball(x)
        b = self._to_unit_ball(y)
        v = u.double()
        d = b - a
        square = dot(a, a)
        beta = 1 - dot(b, b)
        apart = dot(d, d)
        alpha = 1 - square
        outward = dot(a, v)
        onward = dot(d, v)
        plane = (alpha * onward - apart * outward) * a - ((beta + apart) * outward + square * onward) * d
        # 1 - 2 x·y + |x|²|y|² as a sum of positive terms; β/α is the quotient of the conformal factors.
        return (beta / alpha * (v + 2 * plane / (apart + alpha * beta))).to(u.dtype)

    def _project_tangent(self, x: Point, u: Tangent) -> Tangent:
        return u

    def _project(self, x: Point) -> Point:
        a = self._to_unit_ball(x)
        eps = torch.finfo(x.dtype).eps
        square = dot(a, a)
        # Rounding a coordinate to x's dtype moves a length by less than ε: what was brought back stays inside.
        outside = square >= (1 - 2 * eps) ** 2
        # Inside, the root of 0 would make the derivative NaN, though its branch is not taken.
        length = torch.where(outside, square, torch.ones_like(square)).sqrt()
        return torch.where(outside, self._from_unit_ball((1 - 4 * eps) / length * a, x), x)

    def _retract(self, x: Point, u: Tangent) -> Point:
        # t / √(1 + t²) = t - t³/2 + ..., where tanh t = t - t³/3 + ...: exp to second order.
        return self._mobius_add(x, u, lambda square: (1 + square).rsqrt(), lambda square: (1 + square).reciprocal())

    def _gradient(self, x: Point, derivative: Tangent) -> Tangent:
        a = self._to_unit_ball(x)
        return (((1 - dot(a, a)) / 2).square() * derivative.double()).to(x.dtype)

    def _injectivity_radius(self, x: Point) -> Scalar:
        return x.new_full(x.shape[:-1], math.inf)

    def _random_point(self, batch: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Point:
        """Draw uniformly, in coordinates, from the ball of six tenths of the radius."""
        noise = torch.randn(*batch, self.n, generator=generator, dtype=dtype, device=generator.device)
        level = torch.rand(*batch, 1, generator=generator, dtype=torch.float64, device=generator.device)
        a = noise.double()
        # The volume within a radius grows with its n-th power.
        return self._from_unit_ball(MAX_SAMPLE_RADIUS * level ** (1 / self.n) * a / dot(a, a).sqrt(), noise)

    def _random_tangent(self, x: Point, generator: torch.Generator) -> Tangent:
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype, device=generator.device).to(x.device)
        a = self._to_unit_ball(x)
        return ((1 - dot(a, a)) / 2 * noise.double()).to(x.dtype)

    def _mobius_add(
        self, x: Tensor, u: Tensor, shorten: Callable[[Tensor], Tensor], rest: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """x + p with the addition of Möbius.

        p is v = u / (1 - |x|²), times what `shorten` makes of |v|², so that it ends within 1; `rest` is 1 - |p|².
        """
        a = self._to_unit_ball(x)
        v = self._to_unit_ball(u)
        square = dot(a, a)
        alpha = 1 - square
        speed = dot(v, v) / alpha.square()
        short = shorten(speed)
        far = short.square() * speed
        onward = short / alpha * dot(a, v)
        left = rest(speed)
        # x + α (p + |p|² x) / (1 + 2 x·p + |x|²|p|²); inward, its denominator |x + p|² + α (1 - |p|²) does not cancel.
        p = short / alpha * v
        # Here p + |p|² x is (x + p) - (1 - |p|²) x, and 1 - |p|² comes in closed form.
        both = a + p
        inward = onward < 0
        scale = alpha / torch.where(inward, dot(both, both) + alpha * left, 1 + 2 * onward + square * far)
        return self._from_unit_ball(a + scale * torch.where(inward, both - left * a, p + far * a), x)

    def _to_unit_ball(self, x: Tensor) -> Tensor:
        """In the ball of radius 1 and curvature -1."""
        return x.double() if self.curvature == -1 else math.sqrt(-self.curvature) * x.double()

    def _from_unit_ball(self, a: Tensor, like: Tensor) -> Tensor:
        """Back from the ball of radius 1."""
        return (a if self.curvature == -1 else a / math.sqrt(-self.curvature)).to(like.dtype)


@dataclass(frozen=True)
class Lorentz(Manifold):
    r"""The hyperboloid $\{x \in \mathbb{R}^{n+1} : \langle x, x\rangle = -1, x_0 > 0\}$ of curvature $-1$.

    $\langle u, v\rangle = -u_0v_0 + \vec u \cdot \vec v$, the time coordinate first. With $t^2 = \langle u, u\rangle$:

    $$\exp_x u = \cosh t\; x + \tfrac{\sinh t}{t}\, u, \qquad
      P_{x \to y} u = u + \tfrac{\langle y, u\rangle}{1 - \langle x, y\rangle}\,(x + y),$$

    and $\log$ is taken at the origin, where it is $\vec z \operatorname{arsinh}|\vec z| / |\vec z|$: the boost that
    takes $x$ there takes $y$ to $\vec z = \vec d - (d_0 - \vec x \cdot \vec d / (1 + x_0))\,\vec x$, $d = y - x$.

    Everything is computed in float64 and cast back, and is smooth at $u = 0$ and $y = x$. Points and tangents are
    read from their space coordinates; of the time coordinate, which then follows
    ($x_0 = \sqrt{1 + |\vec x|^2}$, $u_0 = \vec x \cdot \vec u / x_0$), only `inner` and `project_tangent` take notice,
    as they know vectors that are not tangent. `project` keeps the space coordinates;
    `retract` is $\sqrt{1 + t^2}\; x + u$.

    Rounding a tangent at $x$ to $\varepsilon$ changes its $\langle u, u\rangle$ by $\varepsilon x_0^2$ and what
    `project_tangent` makes of it by $\varepsilon x_0^3$, $x_0 = \cosh r$ at distance $r$ of the origin: whatever the
    formula, $n + 1$ rounded coordinates hold no more.

    Args:
        n: the dimension of the hyperboloid, at least 1; points have n + 1 coordinates.

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
        along = dot(a, v) / a0
        square = _squared_norm(a0, a, v, along)
        far = _cosh_of_square(square)
        onward = _sinhc_of_square(square)
        # `along` is the time coordinate that the velocity must have to be tangent.
        return torch.cat([far * a0 + onward * along, torch.addcmul(far * a, onward, v)], -1).to(x.dtype)

    def _log(self, x: Point, y: Point) -> Tangent:
        a0, a = _time_and_space(x)
        b0, b = _time_and_space(y)
        d = b - a
        onward = dot(a, d)
        # b₀ - a₀ = (|b|² - |a|²) / (a₀ + b₀), with no difference of large numbers.
        d0 = (dot(d, d) + 2 * onward) / (a0 + b0)
        z = torch.addcmul(d, d0 - onward / (1 + a0), a, value=-1)
        # |z| = sinh r: unlike arcosh, arsinh is smooth at r = 0.
        return (_arsinhc_of_square(dot(z, z)) * _from_origin(a0, a, z)).to(x.dtype)

    def _transport(self, x: Point, y: Point, u: Tangent) -> Tangent:
        a0, a = _time_and_space(x)
        b0, b = _time_and_space(y)
        v = u[..., 1:].double()
        d = b - a
        # <y, u> = <y - x, u>, which keeps its digits where y is near.
        ahead = dot(d, v) - dot(d, a + b) / (a0 + b0) * dot(a, v) / a0
        # 1 - <x, y> = 1 + cosh r >= 2: no pole.
        moved = v + ahead / (1 + a0 * b0 - dot(a, b)) * (a + b)
        # The time coordinate from the others: what comes out is tangent, whatever was rounded.
        return torch.cat([dot(b, moved) / b0, moved], -1).to(u.dtype)

    def _project_tangent(self, x: Point, u: Tangent) -> Tangent:
        a = torch.cat(_time_and_space(x), -1)
        v = u.double()
        # Twice: after one pass what is left along x is ε|u|, after two it is ε of what remains.
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
        # The inverse of the metric diag(-1, 1, ..., 1) turns the sign of time.
        return self._project_tangent(x, torch.cat([-derivative[..., :1], derivative[..., 1:]], -1))

    def _injectivity_radius(self, x: Point) -> Scalar:
        return x.new_full(x.shape[:-1], math.inf)

    def _random_point(self, batch: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Point:
        """Draw from the image, under exp at the origin, of a normal tangent with mean square length 1."""
        noise = torch.randn(*batch, self.n, generator=generator, dtype=dtype, device=generator.device)
        v = noise.double() / math.sqrt(self.n)
        # exp at the origin has the space coordinates sinh|v| v/|v|.
        return _point(_sinhc_of_square(dot(v, v)) * v).to(noise.dtype)

    def _random_tangent(self, x: Point, generator: torch.Generator) -> Tangent:
        shape = (*x.shape[:-1], self.n)
        noise = torch.randn(shape, generator=generator, dtype=x.dtype, device=generator.device).to(x.device)
        return _from_origin(*_time_and_space(x), noise.double()).to(x.dtype)


def _minkowski(u: Tensor, v: Tensor) -> Tensor:
    return dot(u[..., 1:], v[..., 1:]) - u[..., :1] * v[..., :1]


def _time_and_space(x: Tensor) -> tuple[Tensor, Tensor]:
    """The time and the space coordinates of a point, in float64: the former from the latter."""
    a = x[..., 1:].double()
    return (1 + dot(a, a)).sqrt(), a


def _squared_norm(a0: Tensor, a: Tensor, v: Tensor, along: Tensor) -> Tensor:
    """<v, v> of the tangent at a point with these space coordinates and time coordinate, taken at the origin."""
    # |v|² - v₀² cancels far out; boosted to the origin the same tangent has v₀ = 0, and the sum has no minus.
    at_origin = torch.addcmul(v, along / (1 + a0), a, value=-1)
    return dot(at_origin, at_origin)


def _point(a: Tensor) -> Tensor:
    """The point of the hyperboloid with these space coordinates."""
    return torch.cat([(1 + dot(a, a)).sqrt(), a], -1)


def _from_origin(a0: Tensor, a: Tensor, v: Tensor) -> Tensor:
    """The space coordinates of a tangent at the origin, transported to a point."""
    outward = dot(a, v)
    return torch.cat([outward, torch.addcmul(v, outward / (1 + a0), a)], -1)


def _cosh_of_square(s: Tensor) -> Tensor:
    return series_or(s, [1 / math.factorial(2 * k) for k in range(6)], torch.cosh)


def _sinhc_of_square(s: Tensor) -> Tensor:
    return series_or(s, [1 / math.factorial(2 * k + 1) for k in range(6)], lambda t: torch.sinh(t) / t)


def _tanhc_of_square(s: Tensor) -> Tensor:
    series = [1, -1 / 3, 2 / 15, -17 / 315, 62 / 2835, -1382 / 155925]
    return series_or(s, series, lambda t: torch.tanh(t) / t)


def _arsinhc_of_square(s: Tensor) -> Tensor:
    series = [(-1) ** k * math.comb(2 * k, k) / (4**k * (2 * k + 1)) for k in range(6)]
    return series_or(s, series, lambda t: torch.asinh(t) / t)
