"""Tunnels: a curve with a ball in its normal space at every point."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from manifoldagg._validation import check_choice, check_count, check_finite, check_number, check_shape, short_repr
from manifoldagg.curves.arc import arc_length
from manifoldagg.curves.bernstein import find_sign_change
from manifoldagg.curves.bezier import Bezier
from manifoldagg.curves.embedding import Coordinates, Embedding, rounding_error
from manifoldagg.curves.frames import rotation_minimising
from manifoldagg.curves.shape import (
    Control,
    coordinates,
    curvature_vector,
    derivative,
    max_curvature,
    min_speed,
    nearest_normal_disk,
    span,
)
from manifoldagg.errors import ArgumentError
from manifoldagg.kernels import gram
from manifoldagg.manifolds import Manifold
from manifoldagg.manifolds.formulas import distance, norm

__all__ = ["Tunnel", "log_ball"]

NUM_CELLS = 64
"""Pieces of [0, 1] in each of which a curved space's membership looks for one foot."""

Phi = Float[Tensor, "size ..."]
Generator = torch.Generator | None
Function = Callable[[Tensor], float]


@dataclass(frozen=True)
class Tunnel(Embedding):
    r"""The $\varepsilon$-tunnel of a curve $b$: at each $b(t)$ the ball of radius $r$ in the normal space of $b'(t)$.

    $$r = \varepsilon\, |\varphi_n - \varphi_0| ,$$

    so that a collapsed $\varphi$ draws a single point. A place is one tensor $x = (t, \xi)$:

    - *ambient*, (1 + P,): $\iota(t, \xi) = \exp_{b(t)}(\xi)$ with a tangent $\xi \perp b'(t)$, $|\xi| \le r$, all
      coordinates of a point in one row. Nothing is larger than a place.
    - *subspace*, (n,): the control points span n dimensions, $\xi \in \mathbb{R}^{n-1}$ is in units of the chord,
      $|\xi| \le \varepsilon$, so that $M = [0, 1] \times B_\varepsilon$ does not depend on $\varphi$, and
      $\iota(t, \xi) = b(t) + |\varphi_n - \varphi_0|\, R(t)\, \xi$ with $R$ the rotation-minimising orthonormal frame
      that starts as the frame of Gram and Schmidt on the control points. Flat spaces only.

    Lines of constant $\xi$ follow the curve; $\xi = 0$ is the curve. The ends are flat. A call takes $x$ as it comes:
    that $\xi$ is normal and short is a property of places that are drawn or found here.

    Args:
        curve: $b$, of degree n.
        radius: $\varepsilon \ge 0$, in units of the chord.
        form: `"ambient"` or `"subspace"`.
        steps: grid steps of the frame; its error is of fourth order in 1 / steps.

    Raises:
        ArgumentError: where an argument does not fit, or a subspace is asked for in a curved space or in one of fewer
            than n dimensions. `NotImplementedError` where a curved space has no such formula.

    Source: Dold et al. 2025; Weyl 1939, Hotelling 1939 (volumes).

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Flat
        >>> tunnel = Tunnel(Bezier(Flat(2), degree=2), radius=0.1, form="subspace")
        >>> phi = torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.0, 1.0]])
        >>> tunnel(phi, torch.tensor([0.0, 0.1]))
        tensor([0.0000, 0.2236])
        >>> bool(tunnel.contains(phi, torch.tensor([0.5, 0.1])))
        True
    """

    curve: Bezier
    radius: float
    form: str = "ambient"
    steps: int = 64
    space: Manifold = field(init=False, repr=False, compare=False)
    _form: "_AmbientForm | _SubspaceForm" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.curve, Bezier):
            raise ArgumentError(f"curve: expected a Bezier, got {short_repr(self.curve)}")
        object.__setattr__(self, "radius", check_number("radius", self.radius, at_least=0))
        check_choice("form", self.form, tuple(FORMS))
        check_count("steps", self.steps)
        object.__setattr__(self, "space", self.curve.space)
        object.__setattr__(self, "_form", FORMS[self.form](self.curve, self.radius, self.steps))

    @property
    def size(self) -> int:
        return self.curve.degree + 1

    @property
    def domain(self) -> tuple[int, ...]:
        return (1 + self._form.num_coordinates,)

    def __call__(self, phi: Phi, x: Coordinates) -> Float[Tensor, "..."]:
        """The point at a place `x` (*batch, *domain): (*batch, *space.shape), in the dtype of `phi`.

        Raises:
            ArgumentError: if a shape does not fit, or (subspace) the control points span less than n dimensions.
        """
        self._check_phi(phi)
        t, xi = self._split(x)
        return self._form.point(phi, self.curve(phi, t), t, xi)

    def sample(self, *batch: int, generator: Generator = None) -> Float64[Tensor, "..."]:
        """Draw places (*batch, n) of the subspace form, uniform in the product of [0, 1] and the ball.

        Raises:
            NotImplementedError: for the ambient form, whose normal spaces are those of one `phi`: see `sample_in`.
        """
        return self._form.sample(*batch, generator=torch.default_generator if generator is None else generator)

    @torch.no_grad()
    def sample_in(
        self, phi: Phi, *batch: int, generator: Generator = None, uniform: str = "product", validate: bool = True
    ) -> Float[Tensor, "..."]:
        r"""Draw places of the tunnel of one $\varphi$.

        A normal vector $z$ is made uniform in the ball as $r z / \sqrt{|z|^2 + 2E}$, $E$ standard exponential: the
        shadow of a sphere of two dimensions more, which needs no count of dimensions. By volume, $t$ has the density
        $|b'(t)|$, and $\xi$ is turned to $-\xi$ with probability $\frac{1}{2} (1 + \langle \xi, k(t) \rangle)$, which
        makes its density $1 - \langle \xi, k(t) \rangle$; both exactly.

        Args:
            phi: control points.
            *batch: of the result.
            generator: torch's default one where not given.
            uniform: `"product"`: in $[0, 1] \times B$; `"volume"`: in the image, counted with multiplicity.
            validate: refuse a tunnel that folds; while one is learned, its curve may bend more sharply for some steps.

        Returns:
            (*batch, *domain): float64 for the subspace form, the dtype of `phi` for the ambient one.

        Raises:
            ArgumentError: as `check`; on a curved space if the velocity is 0 where a place is drawn.
        """
        check_choice("uniform", uniform, ("product", "volume"))
        if uniform == "volume":
            self._require_flat("uniform='volume'")
        generator = self._check_sampling(phi, generator, validate=validate or uniform == "volume")
        if uniform == "volume":
            t = sample_by_length(coordinates(phi), math.prod(batch), generator).reshape(batch)
        else:
            t = uniform_draws(*batch, generator=generator).to(phi.device)
        return self._sample_at(phi, t, generator, by_volume=uniform == "volume")

    def check(self, phi: Phi) -> float:
        r"""Check that the tunnel of $\varphi$ is regular, and return $r \max_t |k(t)|$, which is below 1.

        Both $\min |b'|$ and $\max |k|$ are found among the roots of polynomials, not on a grid. Where r = 0 the tunnel
        is the curve, whatever that is.

        Raises:
            ArgumentError: if `phi` has another shape or is not finite, the tunnel folds, or $b'(t) = 0$, naming t.
        """
        self._require_flat("check")
        self._check_phi(phi)
        control = coordinates(check_finite("phi", phi))
        reach = self.radius * float(control[-1].norm())
        if reach == 0:
            return 0.0
        t, speed = min_speed(control)
        if speed <= 2 * self.curve.degree * rounding_error(phi):
            raise ArgumentError(f"phi: the curve stands still at t = {t:.6g}, where it has no normal space")
        self._form.check_span(phi, control)
        t, bend = max_curvature(control)
        if not reach * bend < 1:
            raise ArgumentError(
                f"radius: the tunnel folds at t = {t:.6g}, its radius {reach:g} times the curvature {bend:g} being "
                f"{reach * bend:g}; expected below 1, a radius below {self.radius / (reach * bend):g}"
            )
        return reach * bend

    def volume_element(self, phi: Phi, x: Coordinates) -> Float64[Tensor, "*batch"]:
        r"""Compute the volume of the image of a unit of places: $|b'(t)|\,(1 - \langle \xi, k(t)\rangle)$, in float64.

        $k = (b'' - \langle b'', T\rangle T)/|b'|^2$ is the curvature vector. In the subspace form, whose $\xi$ is in
        chords, times $|\varphi_n - \varphi_0|^{n-1}$: the root of the determinant of the pullback metric.
        """
        self._require_flat("volume_element")
        self._check_phi(phi)
        t, xi = self._split(x)
        control, offset = self._form.offset(phi, t, xi)
        bend = (offset * curvature_vector(control, t)).sum(-1)
        scale = self._form.chord_scale(control) ** self._form.num_normal
        return torch.mul(derivative(control, t).norm(dim=-1), scale * (1 - bend))

    def log_volume(self, phi: Phi) -> Float64[Tensor, ""]:
        r"""Compute $\log(L\, V_m(r))$, $L$ the curve's length and $V_m$ the volume of a ball in m normal dimensions.

        Weyl and Hotelling: exact for every regular curve with $r \max |k| < 1$, counted with multiplicity where the
        tunnel meets itself. m is n - 1 for the subspace form and P - 1 for the ambient one. In float64 and
        differentiable in $\varphi$; $-\infty$ for a radius of 0 (but for m = 0).

        Raises:
            ArgumentError: as `check`.
        """
        self.check(phi)
        points = phi.flatten(1)
        chord = gram([points[-1]], minus=points[0])[0][0, 0].sqrt()
        length = arc_length(self.curve._speed(phi), self.curve.breaks)
        return length.log() + log_ball(self._form.num_normal, self.radius * chord)

    def volume(self, phi: Phi) -> Float64[Tensor, ""]:
        """Compute the exponential of `log_volume`: 0 or infinite outside the range of float64."""
        return self.log_volume(phi).exp()

    @torch.no_grad()
    def nearest(self, phi: Phi, point: Float[Tensor, "..."]) -> tuple[Tensor, Tensor]:
        r"""Return the place nearest to a point, and their distance.

        It lies at a foot of the point on the curve, $\langle y - b(t), b'(t)\rangle = 0$, or in an end: of all roots of
        that polynomial and both ends the one whose disk is nearest. No derivatives.

        Args:
            phi: control points.
            point: (*batch, *space.shape).

        Returns:
            Places (*batch, *domain), and distances (*batch,) in float64, 0 in the tunnel up to rounding.

        Raises:
            ArgumentError: as `check`, or if `point` has another shape or is not finite.
        """
        self._require_flat("nearest")
        self.check(phi)
        check_finite("point", check_shape("point", point, *self.space.shape, batch=True))
        batch = point.shape[: point.ndim - len(self.space.shape)]
        lines, control = span(phi)
        away = point.reshape(math.prod(batch), phi[0].numel()).double() - phi[0].flatten().double()
        inside = away @ lines.mT
        away = away - inside @ lines
        reach = self.radius * control[-1].norm()
        off = away.norm(dim=-1, keepdim=True)
        t, normal, distances = nearest_normal_disk(control, inside, reach, off, fills=self._form.fills_normal_space)
        xi = self._form.normal_coordinates(control, t, normal, normal @ lines + away)
        size = xi.norm(dim=-1, keepdim=True)
        xi = torch.where(size > reach, reach / size, torch.ones_like(size)) * xi
        if reach > 0:
            xi = xi / self._form.chord_scale(control)
        x = torch.cat([t[:, None], xi], -1).reshape(*batch, *self.domain)
        return x.to(self._form.dtype(phi, point)), distances.reshape(batch)

    @torch.no_grad()
    def contains(self, phi: Phi, point: Float[Tensor, "..."]) -> Tensor:
        r"""Return whether points (*batch, *space.shape) lie in the tunnel: (*batch,).

        For some t, $\log_{b(t)} y$ is orthogonal to $b'(t)$ and no longer than $r$: the ends are flat. Points at
        most $4 (n + 1)(1 + 2\varepsilon)\,u\,\max_i |\varphi_i|$ away, $u$ the rounding of the coarser dtype, count as
        inside; on a curved space $50\,u\,(1 + r)$, and one foot is looked for in each of 64 pieces of the curve.

        Raises:
            ArgumentError: as `nearest`.
        """
        if self.space.flat:
            away = self.nearest(phi, point)[1]
            return away <= 4 * self.size * (1 + 2 * self.radius) * rounding_error(phi, point)
        self._check_phi(phi)
        self.space._check({"phi": phi, "point": point})
        batch = point.shape[: point.ndim - len(self.space.shape)]
        reach = self.radius * _chord(self.space, phi)

        def look(t: Tensor) -> tuple[Tensor, Tensor]:
            center, velocity = self.curve._point_and_velocity(phi, t)
            away = self.space._log(center, point.expand_as(center))
            speed = norm(self.space, center, velocity)
            ahead = self.space._inner(center, away, velocity) / torch.where(speed > 0, speed, 1.0)
            return ahead, norm(self.space, center, away)

        grid = torch.linspace(0, 1, NUM_CELLS + 1, dtype=torch.float64, device=phi.device)
        grid = grid.reshape(-1, *(1 for _ in batch)).repeat(1, *batch)
        t = find_sign_change(lambda t: look(t)[0], grid[:-1], grid[1:])
        ahead, size = look(torch.cat([grid[:1], t, grid[-1:]]))
        slack = 50 * torch.finfo(phi.dtype).eps * (1 + reach)
        return ((ahead.abs() <= slack) & (size <= reach + slack)).any(0)

    @torch.no_grad()
    def profile(
        self, phi: Phi, function: Function, *, points: int = 11, draws: int = 16, generator: Generator = None
    ) -> tuple[Float64[Tensor, " points"], Float64[Tensor, " points"], Float64[Tensor, " points"]]:
        """Compute the mean and maximum of a function over cross-sections, from points drawn uniformly from each ball.

        Args:
            phi: control points.
            function: a point to a number, such as a loss over a data set; called `points` * `draws` times.
            points: cross-sections, evenly spaced in t, both ends among them.
            draws: from each.
            generator: torch's default one where not given.

        Returns:
            Parameters, means and maxima, each (points,).
        """
        check_count("points", points, at_least=2)
        check_count("draws", draws)
        generator = self._check_sampling(phi, generator)
        t = torch.linspace(0, 1, points, dtype=torch.float64, device=phi.device)
        rows = [self(phi, self._sample_at(phi, at.repeat(draws), generator)) for at in t]
        values = torch.tensor([[float(function(theta)) for theta in row] for row in rows], dtype=torch.float64)
        return t.cpu(), values.mean(1), values.amax(1)

    def _sample_at(self, phi: Tensor, t: Tensor, generator: torch.Generator, *, by_volume: bool = False) -> Tensor:
        """Places at parameters `t`, uniform in the ball or by the volume element."""
        tail, coin = uniform_draws(2, *t.shape, generator=generator).to(t.device)
        xi = self._form.sample_ball(phi, t, tail, generator)
        if by_volume:
            control, offset = self._form.offset(phi, t, xi)
            bend = (offset * curvature_vector(control, t)).sum(-1)
            xi = torch.where((2 * coin < 1 + bend)[..., None], -xi, xi)
        return torch.cat([t[..., None].to(xi), xi], -1)

    def _check_sampling(self, phi: Tensor, generator: Generator, *, validate: bool = True) -> torch.Generator:
        self._check_phi(phi)
        if self.space.flat and validate:
            self.check(phi)
        return torch.default_generator if generator is None else generator

    def _split(self, x: Coordinates) -> tuple[Tensor, Tensor]:
        if not isinstance(x, Tensor):
            raise ArgumentError(f"x: expected a tensor of trailing shape {self.domain}, got {short_repr(x)}")
        check_shape("x", x, *self.domain, batch=True)
        return x[..., 0].double(), x[..., 1:]

    def _require_flat(self, operation: str) -> None:
        if not self.space.flat:
            raise NotImplementedError(f"{operation} needs a flat space, where a tunnel has formulas; got {self.space}")


@dataclass(frozen=True)
class _AmbientForm:
    """ξ is a normal tangent, all coordinates of it: as large as a point.

    Each form defines `num_coordinates`, the number of coordinates of ξ; `num_normal`, the dimension of the ball normal
    to the curve; `fills_normal_space`, whether that ball fills the space normal to the control points' span;
    `chord_scale`, the length of a unit of ξ; and `point`, the point at (t, ξ). `offset` returns the vector from the
    curve to that point and the control points, in common coordinates. `normal_coordinates` returns the ξ of a vector
    normal to the curve, and `sample_ball` draws a ξ from the ball.
    """

    curve: Bezier
    radius: float
    steps: int
    fills_normal_space: ClassVar[bool] = True

    @property
    def num_coordinates(self) -> int:
        return math.prod(self.curve.space.shape)

    @property
    def num_normal(self) -> int:
        return self.num_coordinates - 1

    def chord_scale(self, control: Tensor) -> float:
        return 1.0

    def check_span(self, phi: Tensor, control: Tensor) -> None:
        """Any will do."""

    def dtype(self, phi: Tensor, point: Tensor) -> torch.dtype:
        return torch.promote_types(phi.dtype, point.dtype)

    def point(self, phi: Tensor, center: Tensor, t: Tensor, xi: Tensor) -> Tensor:
        return self.curve.space._exp(center, xi.reshape(center.shape).to(center.dtype))

    def offset(self, phi: Tensor, t: Tensor, xi: Tensor) -> tuple[Tensor, Tensor]:
        return phi.flatten(1).double(), xi.double()

    def normal_coordinates(self, control: Tensor, t: Tensor, normal: Tensor, away: Tensor) -> Tensor:
        return away

    def sample(self, *batch: int, generator: torch.Generator) -> Tensor:
        raise NotImplementedError("an ambient place depends on phi: use sample_in(phi, ...)")

    def sample_ball(self, phi: Tensor, t: Tensor, tail: Tensor, generator: torch.Generator) -> Tensor:
        space = self.curve.space
        center = self.curve(phi, t)
        reach = self.radius * _chord(space, phi)
        if reach == 0:
            return center.new_zeros(*t.shape, self.num_coordinates)

        def times(factor: Tensor, u: Tensor) -> Tensor:
            return factor.to(u).reshape(*factor.shape, *(1 for _ in space.shape)) * u

        velocity = self.curve.velocity(phi, t)
        square = space._inner(center, velocity, velocity)
        for still in t[~(square > 0)]:
            raise ArgumentError(f"phi: the curve stands still at t = {still:.6g}, where it has no normal space")
        xi = space._random_tangent(center, generator)
        # Twice: what the first subtraction leaves along the velocity is rounding of a longer vector.
        for _ in range(2):
            xi = xi - times(space._inner(center, xi, velocity) / square, velocity)
        xi = times(reach * ball_scale(norm(space, center, xi).double(), tail), xi)
        return xi.reshape(*t.shape, self.num_coordinates)


@dataclass(frozen=True)
class _SubspaceForm:
    """ξ is in chords, in a frame that follows the curve within the span of its n + 1 control points."""

    curve: Bezier
    radius: float
    steps: int
    fills_normal_space: ClassVar[bool] = False

    def __post_init__(self) -> None:
        space = self.curve.space
        if not space.flat:
            raise ArgumentError(f"form: a subspace needs a flat space, got {space}; use 'ambient'")
        if (n := self.curve.degree) > math.prod(space.shape):
            raise ArgumentError(f"form: a curve of degree {n} does not span {n} dimensions in {space}")

    @property
    def num_coordinates(self) -> int:
        return self.curve.degree - 1

    @property
    def num_normal(self) -> int:
        return self.num_coordinates

    def chord_scale(self, control: Tensor) -> Tensor:
        chord: Tensor = control[-1].norm()
        return chord

    def dtype(self, phi: Tensor, point: Tensor) -> torch.dtype:
        return torch.float64

    def point(self, phi: Tensor, center: Tensor, t: Tensor, xi: Tensor) -> Tensor:
        if not (phi[-1] != phi[0]).any():
            return center
        lines, control = span(phi)
        offset = self._within(phi, control, t, xi)
        return center + (offset @ lines).reshape(center.shape).to(center.dtype)

    def offset(self, phi: Tensor, t: Tensor, xi: Tensor) -> tuple[Tensor, Tensor]:
        control = span(phi)[1]
        return control, self._within(phi, control, t, xi)

    def normal_coordinates(self, control: Tensor, t: Tensor, normal: Tensor, away: Tensor) -> Tensor:
        return (self._frame(control, t).mT @ normal[..., None]).squeeze(-1)

    def sample(self, *batch: int, generator: torch.Generator) -> Tensor:
        t, tail = uniform_draws(2, *batch, generator=generator)
        return torch.cat([t[..., None], self._ball(tail, generator)], -1)

    def sample_ball(self, phi: Tensor, t: Tensor, tail: Tensor, generator: torch.Generator) -> Tensor:
        return self._ball(tail, generator)

    def check_span(self, phi: Tensor, control: Tensor) -> None:
        if not control[1:].diagonal().abs().min().item() > 4 * len(phi) * rounding_error(phi):
            raise ArgumentError(
                f"phi: expected control points spanning {self.curve.degree} dimensions, or form='ambient'"
            )

    def _ball(self, tail: Tensor, generator: torch.Generator) -> Tensor:
        z = torch.randn(
            *tail.shape, self.num_coordinates, generator=generator, dtype=tail.dtype, device=generator.device
        )
        z = z.to(tail.device)
        return self.radius * ball_scale(z.norm(dim=-1), tail)[..., None] * z

    def _frame(self, control: Tensor, t: Tensor) -> Tensor:
        # The first axis of the span is that of b'(0).
        start = torch.eye(control.shape[1]).to(control)[:, 1:]
        return rotation_minimising(control, t, start=start, steps=self.steps)

    def _within(self, phi: Tensor, control: Tensor, t: Tensor, xi: Tensor) -> Tensor:
        self.check_span(phi, control)
        return torch.mul(self.chord_scale(control), (self._frame(control, t) @ xi.double()[..., None]).squeeze(-1))


FORMS: dict[str, type[_AmbientForm | _SubspaceForm]] = {"ambient": _AmbientForm, "subspace": _SubspaceForm}


def _chord(space: Manifold, phi: Tensor) -> float:
    return float(distance(space, phi[0].double(), phi[-1].double()))


def log_ball(dimension: int, radius: Float64[Tensor, ""]) -> Float64[Tensor, ""]:
    r"""Compute $\log V_m(r)$, $V_m(r) = \pi^{m/2} r^m / \Gamma(m/2 + 1)$, the volume of a ball of m dimensions.

    Example:
        >>> import torch
        >>> log_ball(3, torch.tensor(1.0).double()).exp() / math.pi
        tensor(1.3333, dtype=torch.float64)
    """
    half = dimension / 2
    return torch.xlogy(radius.new_tensor(dimension), radius) + half * math.log(math.pi) - math.lgamma(half + 1)


def uniform_draws(*shape: int, generator: torch.Generator) -> Float64[Tensor, "..."]:
    """Draw numbers uniform in [0, 1)."""
    return torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device)


def ball_scale(size: Float64[Tensor, "*b"], tail: Float64[Tensor, "*b"]) -> Float64[Tensor, "*b"]:
    """Return the factor that maps a standard normal vector of this length to a uniform point of the unit ball."""
    factor: Tensor = 1 / (size.square() - 2 * torch.log1p(-tail)).sqrt()
    return factor


def sample_by_length(control: Control, count: int, generator: torch.Generator) -> Float64[Tensor, " count"]:
    r"""Draw parameters with the density $|b'(t)| / L$, exactly: by rejection below the hodograph's longest vector."""
    bound = (len(control) - 1) * control.diff(dim=0).norm(dim=-1).max()
    kept = control.new_zeros(0)
    while len(kept) < count:
        t, height = uniform_draws(2, 2 * count, generator=generator).to(control.device)
        kept = torch.cat([kept, t[height * bound <= derivative(control, t).norm(dim=-1)]])
    return kept[:count]
