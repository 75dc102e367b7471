"""Tunnels, which are sets of models around a curve of low loss.

A tunnel is a union of balls whose centres are the points of the curve. Each ball extends only in the directions that
are orthogonal to the curve.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
"""The number of subintervals of [0, 1] in which `contains` searches for one foot each on a curved space."""

Phi = Float[Tensor, "size ..."]
Generator = torch.Generator | None
Function = Callable[[Tensor], float]


@dataclass(frozen=True)
class Tunnel(Embedding):
    r"""The $\varepsilon$-tunnel of a curve $b$: the union of balls of radius $r$ in the normal spaces of the curve.

    $$r = \varepsilon\, |\varphi_n - \varphi_0| ,$$

    so the tunnel of equal control points is a single point. The coordinates of a point are one tensor $x = (t, \xi)$,
    in one of two forms:

    - *ambient*, (1 + P,): $\iota(t, \xi) = \exp_{b(t)}(\xi)$ with a tangent vector $\xi \perp b'(t)$, $|\xi| \le r$.
      The coordinates contain all entries of $\xi$.
    - *subspace*, (n,): $\iota(t, \xi) = b(t) + |\varphi_n - \varphi_0|\, R(t)\, \xi$ with $\xi \in \mathbb{R}^{n-1}$,
      $|\xi| \le \varepsilon$. $R$ is a rotation-minimising orthonormal frame. At t = 0, $R$ is the Gram-Schmidt frame
      of the control points. The domain $M = [0, 1] \times B_\varepsilon$ does not depend on $\varphi$. This form
      requires a flat space and control points that span n dimensions.

    The points with $\xi = 0$ form the curve. The ends of the tunnel are flat disks. A call does not check that $\xi$ is
    normal to the curve and within the ball. The methods `sample`, `sample_in` and `nearest` return coordinates with
    these properties.

    The start of the tunnel has the coordinates $(0, 0)$, and the end point has the coordinates $\omega = (1, 0)$. In
    the product metric of the domain, the geodesic between these points is $x(s) = (s, 0)$. The path to the end point is
    therefore the curve.

    Args:
        curve: the curve $b$ of degree n. With `None`, only the method `on` can be called. It returns a tunnel in a
            given space.
        radius: $\varepsilon \ge 0$, in units of the chord length.
        form: `"ambient"` or `"subspace"`.
        steps: the number of grid steps for the frame. The error of the frame is of fourth order in 1 / steps.

    Raises:
        ArgumentError: if an argument is invalid, or the subspace form is requested for a curved space or for fewer than
            n dimensions.
        NotImplementedError: if a method has no formula for curved spaces.

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

    curve: Bezier = None  # type: ignore[assignment]  # a tunnel without a space has only the method `on`
    radius: float = 0.1
    form: str = "ambient"
    steps: int = 64
    space: Manifold = field(init=False, repr=False, compare=False)
    _form: "_AmbientForm | _SubspaceForm" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not (self.curve is None or isinstance(self.curve, Bezier)):
            raise ArgumentError(f"curve: expected a Bezier, got {short_repr(self.curve)}")
        object.__setattr__(self, "radius", check_number("radius", self.radius, at_least=0))
        check_choice("form", self.form, tuple(FORMS))
        check_count("steps", self.steps)
        bound = self.curve is not None
        object.__setattr__(self, "space", self.curve.space if bound else None)
        object.__setattr__(self, "_form", FORMS[self.form](self.curve, self.radius, self.steps) if bound else None)

    @property
    def size(self) -> int:
        self._require_space()
        return self.curve.degree + 1

    @property
    def domain(self) -> tuple[int, ...]:
        self._require_space()
        return (1 + self._form.num_coordinates,)

    def on(self, space: Manifold, degree: int = 2) -> "Tunnel":
        """Return a tunnel in the given `space`, with the options of this tunnel.

        Its curve has the same degree as the curve of this tunnel. The argument `degree` is used only if this tunnel has
        no curve.

        Example:
            >>> from manifoldagg.manifolds import Flat
            >>> Tunnel(radius=0.1).on(Flat(3)).size
            3
        """
        return replace(self, curve=Bezier(space, degree if self.curve is None else self.curve.degree))

    def path_coordinates(self, s: Float[Tensor, "*batch"]) -> Float[Tensor, "..."]:
        r"""Return $x(s) = (s, 0)$, (*batch, *domain)."""
        return torch.cat([s[..., None], s.new_zeros(*s.shape, self.domain[0] - 1)], -1)

    def __call__(self, phi: Phi, x: Coordinates) -> Float[Tensor, "..."]:
        r"""Compute points of the tunnel, a tube around a curve, from their coordinates `x`.

        The first coordinate $t$ selects a point of the curve. The other coordinates $\xi$ are the offset from this
        point.

        Args:
            phi: the control points of the curve.
            x: coordinates (*batch, *domain).

        Returns:
            The points (*batch, *space.shape) in the dtype of `phi`.

        Raises:
            ArgumentError: if a shape is invalid. In the subspace form, also if the control points span fewer than n
                dimensions.
        """
        self._check_phi(phi)
        t, xi = self._split(x)
        return self._form.point(phi, self.curve(phi, t), t, xi)

    def sample(self, *batch: int, generator: Generator = None) -> Float64[Tensor, "..."]:
        r"""Draw random coordinates $(t, \xi)$ of the tunnel, a tube around a curve.

        The parameter $t$ of the curve is uniformly distributed in [0, 1]. The offset $\xi$ from the curve is uniformly
        distributed in a ball. The method requires `form="subspace"`.

        Returns:
            Coordinates (*batch, n) in float64, where n is the degree of the curve.

        Raises:
            NotImplementedError: for the ambient form, whose coordinates depend on the control points. Call `sample_in`.
        """
        return self._form.sample(*batch, generator=torch.default_generator if generator is None else generator)

    @torch.no_grad()
    def sample_in(
        self, phi: Phi, *batch: int, generator: Generator = None, uniform: str = "product", validate: bool = True
    ) -> Float[Tensor, "..."]:
        r"""Draw random coordinates $(t, \xi)$ of the tunnel of given control points.

        $t$ is a parameter of the curve $b$, and $\xi$ is a vector in a ball of radius $r$. To draw a uniform point of
        the ball, the method draws a standard normal vector $z$ and a standard exponential variable $E$, and computes $r
        z / \sqrt{|z|^2 + 2E}$. This is the projection of a uniform point on a sphere with two more dimensions.

        With `uniform="volume"`, the density of $t$ is proportional to the speed $|b'(t)|$, and $\xi$ is replaced by
        $-\xi$ with the probability $\frac{1}{2} (1 + \langle \xi, k(t) \rangle)$, where $k$ is the curvature vector.
        The density of $\xi$ is then proportional to $1 - \langle \xi, k(t) \rangle$. Both densities are exact.

        Args:
            phi: the control points.
            *batch: the shape of the batch.
            generator: the random generator; `None` for torch's default generator.
            uniform: `"product"` for coordinates that are uniform in $[0, 1] \times B$, or `"volume"` for points that
                are uniform in the tunnel. Where the tunnel overlaps itself, points count with their multiplicity.
            validate: whether to raise an error if the tunnel folds. Use `False` during a fit, because the curve may be
                too sharply curved in some steps.

        Returns:
            Coordinates (*batch, *domain), in float64 for the subspace form and in the dtype of `phi` for the ambient
            form.

        Raises:
            ArgumentError: for the same reasons as in `check`. On a curved space, also if the velocity is 0 at a drawn
                parameter.
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
        r"""Check that the tunnel around the curve with the control points $\varphi$ does not fold.

        A tunnel is a tube around the curve. A tunnel of radius $r$ folds if $r |k(t)| \ge 1$ at some parameter $t$,
        where $k$ is the curvature vector of the curve. The method computes the maximum of $|k|$ from the roots of a
        polynomial, so it does not miss any $t$. If r = 0, the tunnel is the curve itself, so every curve is valid.

        Returns:
            The number $r \max_t |k(t)|$, which is below 1.

        Raises:
            ArgumentError: if `phi` has another shape or is not finite. Also if, at a parameter t, the tunnel folds, or
                the speed is 0 and $k$ is therefore undefined. The message contains t.
        """
        self._require_flat("check")
        self._check_phi(phi)
        control = coordinates(check_finite("phi", phi))
        r = self.radius * float(control[-1].norm())
        if r == 0:
            return 0.0
        t, speed = min_speed(control)
        # A velocity below its rounding error has no reliable direction, so the normal space is undefined. The velocity
        # is the degree times differences of two control points, each of which has this rounding error.
        if speed <= 2 * self.curve.degree * rounding_error(phi):
            raise ArgumentError(_no_velocity(t))
        self._form.check_span(phi, control)
        t, curvature = max_curvature(control)
        # The negated comparison also rejects NaN.
        if not r * curvature < 1:
            raise ArgumentError(
                f"radius: expected less than {self.radius / (r * curvature):g}, got {self.radius:g}; the tunnel folds "
                f"at t = {t:.6g}, where its radius {r:g} times the curvature {curvature:g} is {r * curvature:g}"
            )
        return r * curvature

    def volume_element(self, phi: Phi, x: Coordinates) -> Float64[Tensor, "*batch"]:
        r"""Compute the volume element of the tunnel at the coordinates $x = (t, \xi)$, in float64.

        The volume element is the square root of the determinant of the pullback metric. Here, $t$ is the parameter of
        the curve $b$, and $\xi$ determines the offset $w$ of the point from $b(t)$. The volume element is

        $$|b'(t)|\,(1 - \langle w, k(t)\rangle), \qquad k = (b'' - \langle b'', T\rangle T)/|b'|^2, \qquad
          T = b'/|b'|,$$

        where $k$ is the curvature vector, and $T$ is the unit tangent. With `form="subspace"`, $\xi$ contains n - 1
        numbers, where n is the degree of the curve. Their unit is the chord length $|\varphi_n - \varphi_0|$, the
        distance between the ends of the curve. The volume element is then multiplied by
        $|\varphi_n - \varphi_0|^{n-1}$.
        """
        self._require_flat("volume_element")
        self._check_phi(phi)
        t, xi = self._split(x)
        control, offset = self._form.offset(phi, t, xi)
        component = (offset * curvature_vector(control, t)).sum(-1)
        # In the subspace form, each of the normal coordinates is in units of the chord length.
        scale = self._form.chord_scale(control) ** self._form.num_normal
        return torch.mul(derivative(control, t).norm(dim=-1), scale * (1 - component))

    def log_volume(self, phi: Phi) -> Float64[Tensor, ""]:
        r"""Compute the log-volume of the tunnel in float64, by the tube formula of Weyl and Hotelling.

        The log-volume is $\log(L\, V_m(r))$. Here, $L$ is the length of the curve, $r$ is the radius of the tunnel, and
        $V_m(r)$ is the volume of an m-dimensional ball of radius $r$. The number m depends on the form of the tunnel:

        - With `form="ambient"`, the tunnel extends in all directions orthogonal to the curve. In a space of P
          dimensions, m = P - 1.
        - With `form="subspace"`, the tunnel is limited to the span of the control points. For a curve of degree n,
          m = n - 1.

        The formula is exact for every regular curve whose curvature $|k|$ satisfies $r \max |k| < 1$. If the tunnel
        overlaps itself, the overlap is counted with its multiplicity. If the radius is 0 and m > 0, the result is
        $-\infty$. The result is differentiable with respect to the control points.

        Raises:
            ArgumentError: for the same reasons as in `check`.
        """
        self.check(phi)
        points = phi.flatten(1)
        # `gram` forms the difference in float64 and is differentiable.
        chord = gram([points[-1]], minus=points[0])[0][0, 0].sqrt()
        length = arc_length(self.curve._speed(phi), self.curve.breaks)
        return (length.log() + log_ball(self._form.num_normal, self.radius * chord)).to(phi.device)

    def volume(self, phi: Phi) -> Float64[Tensor, ""]:
        """Compute the exponential of `log_volume`, which may underflow to 0 or overflow to infinity."""
        return self.log_volume(phi).exp()

    @torch.no_grad()
    def nearest(self, phi: Phi, point: Float[Tensor, "..."]) -> tuple[Tensor, Tensor]:
        r"""Find the nearest point of the tunnel for each given point $y$.

        The tunnel consists of disks that are orthogonal to its curve $b$. The nearest point is in one of the following
        disks, and the method compares all of them:

        - the disk at each parameter t that solves the polynomial equation $\langle y - b(t), b'(t)\rangle = 0$;
        - the disk at each end of the tunnel.

        Args:
            phi: the control points.
            point: points (*batch, *space.shape).

        Returns:
            The coordinates (*batch, *domain) of the nearest points, and the distances (*batch,) in float64. Inside the
            tunnel, the distance is 0 up to rounding. Both tensors are detached from the autograd graph.

        Raises:
            ArgumentError: for the same reasons as in `check`, or if `point` has another shape or is not finite.
        """
        self._require_flat("nearest")
        self.check(phi)
        check_finite("point", check_shape("point", point, *self.space.shape, batch=True))
        batch = point.shape[: point.ndim - len(self.space.shape)]
        axes, control = span(phi)
        offset = point.reshape(math.prod(batch), phi[0].numel()).double() - phi[0].flatten().double()
        # The component orthogonal to the span is the same for all disks, so the search needs only n dimensions.
        within_span = offset @ axes.mT
        orthogonal = offset - within_span @ axes
        r = self.radius * control[-1].norm()
        off = orthogonal.norm(dim=-1, keepdim=True)
        t, normal, distances = nearest_normal_disk(control, within_span, r, off, fills=self._form.fills_normal_space)
        xi = self._form.normal_coordinates(control, t, normal, normal @ axes + orthogonal)
        # A point outside of the tunnel is mapped to the boundary of its disk. The vector is scaled only if it is too
        # long, so a point inside the tunnel keeps its coordinates.
        size = xi.norm(dim=-1, keepdim=True)
        xi = torch.where(size > r, r / size, torch.ones_like(size)) * xi
        if r > 0:
            xi = xi / self._form.chord_scale(control)
        x = torch.cat([t[:, None], xi], -1).reshape(*batch, *self.domain)
        return x.to(self._form.dtype(phi, point)), distances.reshape(batch)

    @torch.no_grad()
    def contains(self, phi: Phi, point: Float[Tensor, "..."]) -> Tensor:
        r"""Return whether each given point is in the tunnel.

        The tunnel of radius $r$ around a curve $b$ contains a point $y$ if a parameter $t$ satisfies two conditions, up
        to rounding errors:

        - The vector $\log_{b(t)} y$ from the curve to the point is orthogonal to the velocity $b'(t)$.
        - The length of this vector is at most $r$.

        On a curved space, the method searches for one such $t$ in each of 64 subintervals of [0, 1]. It can miss a
        point if a subinterval contains several parameters that satisfy the first condition.

        Args:
            phi: the control points $\varphi_i$ of the curve.
            point: points (*batch, *space.shape).

        Returns:
            One Boolean for each point, (*batch,). On a flat space, the tolerance is
            $4 (n + 1)(1 + 2\varepsilon)\,u\,\max_i |\varphi_i|$. Here, n is the degree, $\varepsilon$ is the option
            `radius`, and $u$ is the machine epsilon of the dtype of `phi` or of `point`, whichever is less precise. On
            a curved space, the tolerance is $50\,u\,(1 + r)$, where $u$ is the machine epsilon of the dtype of `phi`.

        Raises:
            ArgumentError: for the same reasons as in `nearest`.
        """
        if self.space.flat:
            distances = self.nearest(phi, point)[1]
            # An offset from the curve is at most ε chords long, which is at most 2ε times the largest control point.
            return distances <= 4 * self.size * (1 + 2 * self.radius) * rounding_error(phi, point)
        self._check_phi(phi)
        self.space._check({"phi": phi, "point": point})
        batch = point.shape[: point.ndim - len(self.space.shape)]
        r = self.radius * _chord(self.space, phi)

        def tangential_component_and_distance(t: Tensor) -> tuple[Tensor, Tensor]:
            center, velocity = self.curve._point_and_velocity(phi, t)
            log = self.space._log(center, point.expand_as(center))
            speed = norm(self.space, center, velocity)
            # Dividing by the speed makes the component a length, so that it can be compared with the tolerance.
            component = self.space._inner(center, log, velocity) / torch.where(speed > 0, speed, 1.0)
            return component, norm(self.space, center, log)

        # At a foot, the tangential component changes its sign. Both ends of the curve are candidates as well.
        grid = torch.linspace(0, 1, NUM_CELLS + 1, dtype=torch.float64, device=phi.device)
        # Every point of the batch has its own copy of the grid, because each search moves to its own parameters.
        grid = grid.reshape(-1, *(1 for _ in batch)).repeat(1, *batch)
        t = find_sign_change(lambda t: tangential_component_and_distance(t)[0], grid[:-1], grid[1:])
        component, size = tangential_component_and_distance(torch.cat([grid[:1], t, grid[-1:]]))
        tolerance = 50 * torch.finfo(phi.dtype).eps * (1 + r)
        return ((component.abs() <= tolerance) & (size <= r + tolerance)).any(0)

    @torch.no_grad()
    def profile(
        self, phi: Phi, function: Function, *, points: int = 11, draws: int = 16, generator: Generator = None
    ) -> tuple[Float64[Tensor, " points"], Float64[Tensor, " points"], Float64[Tensor, " points"]]:
        """Estimate the mean and the maximum of a function on several cross-sections of the tunnel around a curve.

        For each cross-section, the method evaluates the function at random points that are uniformly distributed in it.

        Args:
            phi: the control points.
            function: a function from a point to a number, such as a loss over a data set. It is called
                `points` * `draws` times.
            points: the number of cross-sections. They are evenly spaced in t and include both ends.
            draws: the number of random points in each cross-section.
            generator: the random generator; `None` for torch's default generator.

        Returns:
            The parameters, means and maxima, each (points,).
        """
        check_count("points", points, at_least=2)
        check_count("draws", draws)
        generator = self._check_sampling(phi, generator)
        t = torch.linspace(0, 1, points, dtype=torch.float64, device=phi.device)
        rows = [self(phi, self._sample_at(phi, at.repeat(draws), generator)) for at in t]
        values = torch.tensor([[float(function(theta)) for theta in row] for row in rows], dtype=torch.float64)
        return t.cpu(), values.mean(1), values.amax(1)

    def _sample_at(self, phi: Tensor, t: Tensor, generator: torch.Generator, *, by_volume: bool = False) -> Tensor:
        """Draw a random offset ξ for each curve parameter in `t`, and return the coordinates (t, ξ).

        By default, the offsets are uniformly distributed in a ball around 0. With `by_volume`, their density is
        proportional to the volume element of the tunnel.
        """
        # `tail` determines the exponential variable, and `flip` whether ξ is replaced by -ξ.
        tail, flip = uniform_draws(2, *t.shape, generator=generator).to(t.device)
        xi = self._form.sample_ball(phi, t, tail, generator)
        if by_volume:
            control, offset = self._form.offset(phi, t, xi)
            component = (offset * curvature_vector(control, t)).sum(-1)
            # The reflection makes the density proportional to 1 - ⟨ξ, k⟩, because the ball is symmetric.
            xi = torch.where((2 * flip < 1 + component)[..., None], -xi, xi)
        return torch.cat([t[..., None].to(xi), xi], -1)

    def _check_sampling(self, phi: Tensor, generator: Generator, *, validate: bool = True) -> torch.Generator:
        """Check the control points of a tunnel, and return the random generator to use."""
        self._check_phi(phi)
        if self.space.flat and validate:
            self.check(phi)
        return torch.default_generator if generator is None else generator

    def _split(self, x: Coordinates) -> tuple[Tensor, Tensor]:
        """Split coordinates (*batch, *domain) into the float64 parameters t and the vectors ξ."""
        if not isinstance(x, Tensor):
            raise ArgumentError(f"x: expected a tensor of trailing shape {self.domain}, got {short_repr(x)}")
        check_shape("x", x, *self.domain, batch=True)
        return x[..., 0].double(), x[..., 1:]

    def _require_flat(self, operation: str) -> None:
        if not self.space.flat:
            raise NotImplementedError(f"{operation}: expected a flat space, got {self.space}")


@dataclass(frozen=True)
class _AmbientForm:
    """The coordinates of a tunnel in ambient form, where ξ is a tangent vector normal to the curve.

    Each form defines:

    - `num_coordinates`: the number of entries of ξ;
    - `num_normal`: the dimension of the ball;
    - `fills_normal_space`: whether the ball contains directions orthogonal to the span of the control points;
    - `chord_scale`: the length of a vector ξ of norm 1;
    - `point`: a method that computes the point at (t, ξ);
    - `offset`: a method that returns the vector from the curve to the point, and the control points. Both have the same
      coordinate system;
    - `normal_coordinates`: a method that converts a vector normal to the curve into ξ;
    - `sample_ball`: a method that draws ξ uniformly from the ball.
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
        """Accept all control points."""

    def dtype(self, phi: Tensor, point: Tensor) -> torch.dtype:
        return torch.promote_types(phi.dtype, point.dtype)

    def point(self, phi: Tensor, center: Tensor, t: Tensor, xi: Tensor) -> Tensor:
        return self.curve.space._exp(center, xi.reshape(center.shape).to(center.dtype))

    def offset(self, phi: Tensor, t: Tensor, xi: Tensor) -> tuple[Tensor, Tensor]:
        return phi.flatten(1).double(), xi.double()

    def normal_coordinates(self, control: Tensor, t: Tensor, normal: Tensor, away: Tensor) -> Tensor:
        return away

    def sample(self, *batch: int, generator: torch.Generator) -> Tensor:
        raise NotImplementedError("sample: expected form='subspace', got 'ambient'; use sample_in(phi, ...)")

    def sample_ball(self, phi: Tensor, t: Tensor, tail: Tensor, generator: torch.Generator) -> Tensor:
        space = self.curve.space
        center = self.curve(phi, t)
        # The radius is relative to the chord, which is a geodesic on a curved space.
        r = self.radius * _chord(space, phi)
        if r == 0:
            return center.new_zeros(*t.shape, self.num_coordinates)

        def scaled(factor: Tensor, u: Tensor) -> Tensor:
            return factor.to(u).reshape(*factor.shape, *(1 for _ in space.shape)) * u

        velocity = self.curve.velocity(phi, t)
        square = space._inner(center, velocity, velocity)
        # The negated comparison also catches NaN.
        for stationary in t[~(square > 0)]:
            raise ArgumentError(_no_velocity(stationary.item()))
        xi = space._random_tangent(center, generator)
        # The first subtraction leaves a rounding error along the velocity. The second subtraction removes this error.
        for _ in range(2):
            xi = xi - scaled(space._inner(center, xi, velocity) / square, velocity)
        xi = scaled(r * ball_scale(norm(space, center, xi).double(), tail), xi)
        return xi.reshape(*t.shape, self.num_coordinates)


@dataclass(frozen=True)
class _SubspaceForm:
    """The coordinates (t, ξ) of a tunnel, a tube around a curve, within the span of the control points of the curve.

    The number t selects a point of the curve, and the vector ξ is the offset from this point, orthogonal to the curve.
    The entries of ξ are components in an orthonormal basis that moves along the curve. Their unit of length is the
    distance between the ends of the curve.
    """

    curve: Bezier
    radius: float
    steps: int
    fills_normal_space: ClassVar[bool] = False

    def __post_init__(self) -> None:
        space = self.curve.space
        if not space.flat:
            raise ArgumentError(f"form: expected a flat space for 'subspace', got {space}; use 'ambient'")
        if (n := self.curve.degree) > math.prod(space.shape):
            raise ArgumentError(f"form: expected at least {n} dimensions for a curve of degree {n}, got {space}")

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
        # If the ends are equal, the radius is 0 and the frame may be undefined.
        if not (phi[-1] != phi[0]).any():
            return center
        axes, control = span(phi)
        offset = self._offset_in_span(phi, control, t, xi)
        return center + (offset @ axes).reshape(center.shape).to(center.dtype)

    def offset(self, phi: Tensor, t: Tensor, xi: Tensor) -> tuple[Tensor, Tensor]:
        control = span(phi)[1]
        return control, self._offset_in_span(phi, control, t, xi)

    def normal_coordinates(self, control: Tensor, t: Tensor, normal: Tensor, away: Tensor) -> Tensor:
        return (self._frame(control, t).mT @ normal[..., None]).squeeze(-1)

    def sample(self, *batch: int, generator: torch.Generator) -> Tensor:
        t, tail = uniform_draws(2, *batch, generator=generator)
        return torch.cat([t[..., None], self._ball(tail, generator)], -1)

    def sample_ball(self, phi: Tensor, t: Tensor, tail: Tensor, generator: torch.Generator) -> Tensor:
        return self._ball(tail, generator)

    def check_span(self, phi: Tensor, control: Tensor) -> None:
        # A diagonal entry is the distance of a control point from the span of the previous ones.
        if not control[1:].diagonal().abs().min().item() > 4 * len(phi) * rounding_error(phi):
            raise ArgumentError(
                f"phi: expected control points that span {self.curve.degree} dimensions, got fewer; use form='ambient'"
            )

    def _ball(self, tail: Tensor, generator: torch.Generator) -> Tensor:
        """Draw uniform points of the ball of radius ε in n - 1 dimensions."""
        z = torch.randn(
            *tail.shape, self.num_coordinates, generator=generator, dtype=tail.dtype, device=generator.device
        )
        z = z.to(tail.device)
        return self.radius * ball_scale(z.norm(dim=-1), tail)[..., None] * z

    def _frame(self, control: Tensor, t: Tensor) -> Tensor:
        """Compute the rotation-minimising frame at `t`: orthonormal columns normal to the curve."""
        # All vectors are in the orthonormal basis of the span of the control points in which `control` is given. The
        # first axis of this basis is parallel to b'(0), so the other axes are normal to the curve at t = 0.
        start = torch.eye(control.shape[1]).to(control)[:, 1:]
        return rotation_minimising(control, t, start=start, steps=self.steps)

    def _offset_in_span(self, phi: Tensor, control: Tensor, t: Tensor, xi: Tensor) -> Tensor:
        """Compute the vector from the curve to the point (t, ξ), in the span of the control points."""
        self.check_span(phi, control)
        return torch.mul(self.chord_scale(control), (self._frame(control, t) @ xi.double()[..., None]).squeeze(-1))


FORMS: dict[str, type[_AmbientForm | _SubspaceForm]] = {"ambient": _AmbientForm, "subspace": _SubspaceForm}


def _chord(space: Manifold, phi: Tensor) -> float:
    """Return the length of the chord from the first to the last control point, in float64."""
    return float(distance(space, phi[0].double(), phi[-1].double()))


def _no_velocity(t: float) -> str:
    """Return the error message for a curve whose velocity is 0 at the parameter `t`."""
    return (
        f"phi: expected a curve with a velocity other than 0, got 0 at t = {t:.6g}, where the normal space is undefined"
    )


def log_ball(dimension: int, radius: Float64[Tensor, ""]) -> Float64[Tensor, ""]:
    r"""Compute the logarithm of the volume of an m-dimensional ball with the radius $r$.

    The volume is $V_m(r) = \pi^{m/2} r^m / \Gamma(m/2 + 1)$.

    Example:
        >>> import torch
        >>> log_ball(3, torch.tensor(1.0).double()).exp() / math.pi
        tensor(1.3333, dtype=torch.float64)
    """
    # The logarithm avoids overflow and underflow in large dimensions. `xlogy` is 0 for dimension 0, even if r is 0.
    half = dimension / 2
    return torch.xlogy(radius.new_tensor(dimension), radius) + half * math.log(math.pi) - math.lgamma(half + 1)


def uniform_draws(*shape: int, generator: torch.Generator) -> Float64[Tensor, "..."]:
    """Draw uniform float64 numbers in [0, 1)."""
    return torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device)


def ball_scale(size: Float64[Tensor, "*b"], tail: Float64[Tensor, "*b"]) -> Float64[Tensor, "*b"]:
    r"""Return the factor that scales a standard normal vector to a uniformly distributed point of the unit ball.

    Let $z$ be the normal vector. The factor is $1 / \sqrt{|z|^2 + 2E}$, where $E$ is a random number with the standard
    exponential distribution.

    Args:
        size: the length $|z|$ of the normal vector.
        tail: a uniform random number in [0, 1), from which the function computes $E$.
    """
    # -2 log(1 - U) is twice an exponential variable. `log1p` is accurate for small U. The formula is a case of a
    # theorem of Barthe, Guédon, Mendelson and Naor (2005) on uniform points of a ball.
    factor: Tensor = 1 / (size.square() - 2 * torch.log1p(-tail)).sqrt()
    return factor


def sample_by_length(control: Control, count: int, generator: torch.Generator) -> Float64[Tensor, " count"]:
    """Draw random parameters of a curve, such that the corresponding points are uniform along its length.

    The density of a parameter $t$ is exactly $|b'(t)| / L$, where $b'$ is the velocity of the curve $b$, and $L$ is its
    length. The function uses rejection sampling.

    Args:
        control: the control points of the curve.
        count: the number of parameters.
        generator: the random generator.
    """
    # The velocity is itself a Bézier curve, so its longest control vector is an upper bound on the speed.
    bound = (len(control) - 1) * control.diff(dim=0).norm(dim=-1).max()
    # Each pass draws twice the requested number, because some of the draws are rejected.
    accepted = control.new_zeros(0)
    # A parameter is accepted with the probability speed / bound, so the density of the accepted ones is proportional to
    # the speed.
    while len(accepted) < count:
        t, height = uniform_draws(2, 2 * count, generator=generator).to(control.device)
        accepted = torch.cat([accepted, t[height * bound <= derivative(control, t).norm(dim=-1)]])
    return accepted[:count]
