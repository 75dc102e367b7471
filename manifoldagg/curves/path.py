"""The base class for curves, and `Path`, a curve with fixed control points."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from manifoldagg._io import new_figure
from manifoldagg._result_repr import format_result
from manifoldagg._validation import check_number, check_shape, short_repr
from manifoldagg.curves._legend import legend_below
from manifoldagg.curves.arc import Speed, arc_length, parameter_at_arc_length
from manifoldagg.curves.bernstein import find_sign_change
from manifoldagg.curves.embedding import Embedding, rounding_error
from manifoldagg.curves.plane import Plane, View
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds.formulas import distance, norm

__all__ = ["CurveEmbedding", "Parameter", "Path", "Phi", "Points", "as_parameter"]

Parameter = float | Float[Tensor, "*batch"]
Phi = Float[Tensor, "control ..."]
Points = Float[Tensor, "..."]

SEARCH_SAMPLES = 32
"""The number of parameters per control point at which `nearest` evaluates the distance on a curved space."""


class CurveEmbedding(Embedding):
    """Base class for curves, which are embeddings of the interval [0, 1].

    Parameters $t$ outside [0, 1] extrapolate the curve. The methods of this class use only the basic operations of a
    manifold, such as exp and log, so they work on every space. Subclasses add closed-form solutions for flat spaces.
    """

    @property
    def domain(self) -> tuple[int, ...]:
        return ()

    @property
    def breaks(self) -> tuple[float, ...]:
        """The parameters between which the curve is smooth, including 0 and 1."""
        return (0.0, 1.0)

    def velocity(self, phi: Phi, t: Parameter) -> Points:
        r"""Compute the velocity $\iota_\varphi'(t)$ of the curve $\iota_\varphi$ at the parameter `t`.

        The velocity (*batch, *space.shape) is a tangent vector at the point $\iota_\varphi(t)$. It is computed by one
        Jacobian-vector product.
        """
        return self._point_and_velocity(phi, t)[1]

    def acceleration(self, phi: Phi, t: Parameter) -> Points:
        r"""Compute the covariant acceleration $\nabla_{\iota'} \iota'$ of the curve $\iota$ at the parameter `t`.

        The result (*batch, *space.shape) is the second derivative of $\log_{\iota(t)} \iota(t + s)$ with respect to
        $s$ at $s = 0$. This derivative is equal to the covariant one, because the logarithm defines normal coordinates.
        Their Christoffel symbols vanish at the centre $\iota(t)$.

        Cost: two nested Jacobian-vector products.
        """
        self._check_phi(phi)
        parameter = as_parameter(t, phi)
        # The centre is constant, because the derivative is taken in normal coordinates at a fixed point.
        center = self(phi, parameter).detach()
        ones = torch.ones_like(parameter)

        def velocity(s: Tensor) -> Tensor:
            slope: Tensor = torch.func.jvp(lambda r: self.space._log(center, self(phi, r)), (s,), (ones,))[1]
            return slope

        acceleration: Tensor = torch.func.jvp(velocity, (parameter,), (ones,))[1]
        return acceleration

    def length(self, phi: Phi, a: float = 0.0, b: float = 1.0) -> Float[Tensor, ""]:
        r"""Compute the length $\int_a^b \|\iota_\varphi'(t)\|\, dt$ of the curve $\iota_\varphi$ from `a` to `b`.

        Args:
            phi: control points (size, *space.shape).
            a: the first parameter.
            b: the last parameter.

        Returns:
            The length, with a relative error of 1e-12 in float64. It is differentiable with respect to the control
            points $\varphi$. If b < a, the length is negative. On a flat space, distances below 1e-150 between
            neighbouring control points count as 0.

        Raises:
            ArgumentError: if `a`, `b` or the length is not finite.

        Cost: one pass over the control points on a flat space.
        """
        self._check_phi(phi)
        low, high = sorted((check_number("a", a), check_number("b", b)))
        # The speed may jump at a joint, so every joint must be the edge of a panel.
        edges = [low, *(edge for edge in self.breaks if low < edge < high), high]
        length = arc_length(self._speed(phi), edges).to(phi)
        # The integral from a to b changes its sign if the limits are exchanged.
        return -length if b < a else length

    def parameter_at_length(self, phi: Phi, fraction: Parameter) -> Float64[Tensor, "*batch"]:
        """Compute the parameters $t$ at which the curve reaches given fractions of its length.

        If the fractions are evenly spaced, the points at these parameters traverse the curve at constant speed.

        Args:
            phi: control points (size, *space.shape).
            fraction: fractions of the length in [0, 1], a number or a tensor (*batch,).

        Returns:
            Parameters (*batch,) in float64, without derivatives. The fractions 0 and 1 map exactly to 0 and 1. If the
            length is 0, the parameters are equal to the fractions.

        Raises:
            ArgumentError: if a fraction is outside of [0, 1], or the length is not finite.
        """
        self._check_phi(phi)
        fractions = as_parameter(fraction, phi, "fraction")
        if not bool(((fractions >= 0) & (fractions <= 1)).all()):
            raise ArgumentError(f"fraction: expected numbers in [0, 1], got {short_repr(fraction)}")
        return parameter_at_arc_length(self._speed(phi.detach()), self.breaks, fractions.detach()).to(phi.device)

    def nearest(self, phi: Phi, point: Points) -> tuple[Tensor, Tensor]:
        r"""Find the nearest point of the curve for each given point, as a parameter $t \in [0, 1]$ and a distance.

        The method first evaluates the distance on a grid with 32 values of $t$ per control point. It then refines the
        best of these values between its two neighbours on the grid. If the distance has only one minimum there, the
        result is exact up to rounding. The method can miss a minimum that is narrower than the spacing of the grid.

        At the nearest point of the curve $\iota$, the logarithm of the given point $p$ is orthogonal to the velocity
        $\iota'$. The refinement therefore computes a root of $\langle \log_{\iota(t)} p,\, \iota'(t)\rangle$.

        Args:
            phi: control points (size, *space.shape).
            point: points (*batch, *space.shape).

        Returns:
            Parameters (*batch,) in float64, without derivatives, and distances (*batch,). The distances have correct
            first derivatives with respect to `phi` and `point`. Higher derivatives are wrong, because the parameter
            counts as constant.
        """
        self._check_phi(phi)
        self.space._check({"phi": phi, "point": point})
        points = self._points(point)
        with torch.no_grad():
            t = self._search(phi.detach(), points.detach())
        batch = point.shape[: point.ndim - len(self.space.shape)]
        return t.reshape(batch), distance(self.space, points, self(phi, t)).reshape(batch)

    def contains(self, phi: Phi, point: Points, *, tolerance: float | None = None) -> Bool[Tensor, "*batch"]:
        r"""Return whether each given point is within the distance `tolerance` of the curve.

        Args:
            phi: control points (size, *space.shape).
            point: points (*batch, *space.shape).
            tolerance: the maximum distance. The default allows for rounding errors. Let $\varepsilon$ be the machine
                epsilon of the dtype of `phi` or of `point`, whichever is less precise. On a flat space, the default is
                $4\,$`size`$\,\varepsilon \max_i \|\varphi_i\|$ for the control points $\varphi_i$. On a curved space,
                it is $\sqrt\varepsilon$.

        Returns:
            One Boolean for each point, (*batch,).

        Raises:
            ArgumentError: if `tolerance` is negative, or a shape is invalid.
        """
        if tolerance is None:
            eps = max(torch.finfo(phi.dtype).eps, torch.finfo(point.dtype).eps)
            tolerance = 4 * self.size * rounding_error(phi, point) if self.space.flat else eps**0.5
        check_number("tolerance", tolerance, at_least=0)
        return self.nearest(phi, point)[1] <= tolerance

    def sample(self, *batch: int, generator: torch.Generator | None = None) -> Float64[Tensor, "*batch"]:
        device = None if generator is None else generator.device
        return torch.rand(*batch, generator=generator, dtype=torch.float64, device=device)

    def at(self, phi: Phi) -> "Path[Self]":
        """Return the curve with fixed control points, whose methods depend only on $t$."""
        self._check_phi(phi)
        return Path(self, phi)

    def split(self, phi: Phi, t: float) -> tuple[Tensor, Tensor]:
        """Return the control points of the parts before and after `t`."""
        raise NotImplementedError(f"{type(self).__name__} has no split")

    def reverse(self, phi: Phi) -> Points:
        r"""Return the control points of the reversed curve $t \mapsto \iota_\varphi(1 - t)$."""
        self._check_phi(phi)
        return phi.flip(0)

    def _speed(self, phi: Tensor) -> Speed:
        """Return a function that computes the speed of the curve at given parameters."""
        return lambda t: norm(self.space, *self._point_and_velocity(phi, t))

    def _point_and_velocity(self, phi: Tensor, t: Parameter) -> tuple[Tensor, Tensor]:
        """Compute points (*batch, *space.shape) of the curve and the velocities there, by one jvp."""
        self._check_phi(phi)
        # Forward mode does not accept a tensor whose entries share memory, such as an expanded one.
        parameter = as_parameter(t, phi).contiguous()
        point, slope = torch.func.jvp(lambda s: self(phi, s), (parameter,), (torch.ones_like(parameter),))[:2]
        # If points are equivalence classes of tensors, the representative can move within its class. The projection
        # removes this component of the derivative.
        tangent = self.space._project_tangent(point, slope) if "project_tangent" in self.space.capabilities else slope
        return point, tangent

    def _points(self, point: Tensor) -> Tensor:
        """Check the shape of points, and return them as one batch (m, *space.shape)."""
        check_shape("point", point, *self.space.axes, batch=True)
        return point.reshape(-1, *point.shape[point.ndim - len(self.space.shape) :])

    def _search(self, phi: Tensor, points: Tensor) -> Tensor:
        """Return the parameters (m,) of the nearest points of the curve for m given points."""
        # The grid includes both ends, where the nearest point need not be orthogonal to the curve.
        grid = torch.linspace(0, 1, SEARCH_SAMPLES * self.size + 1, dtype=torch.float64, device=phi.device)
        samples = self(phi, grid)
        shape = (len(points), len(grid), *points.shape[1:])
        # Points beyond the cut locus have no log. Their distance is NaN and counts as infinite.
        distances = distance(self.space, points.unsqueeze(1).expand(shape), samples.expand(shape))
        k = distances.nan_to_num(torch.inf).argmin(-1)
        best = grid[k]

        def decrease(t: Tensor) -> Tensor:
            center, velocity = self._point_and_velocity(phi, t)
            return self.space._inner(center, self.space._log(center, points), velocity)

        # The squared distance decreases along the curve as long as this inner product is positive, so a minimum is a
        # change from positive to negative.
        t = find_sign_change(decrease, grid[(k - 1).clamp(min=0)], grid[(k + 1).clamp(max=len(grid) - 1)])
        # If there are several minima between the neighbours, the root can be farther away than the sample.
        closer = distance(self.space, points, self(phi, t)) < distance(self.space, points, self(phi, best))
        return torch.where(closer, t, best)


C = TypeVar("C", bound=CurveEmbedding)


@dataclass(frozen=True, eq=False)
class Path(Generic[C]):
    r"""A curve with fixed control points, $t \mapsto \iota_\varphi(t)$.

    The method `curve.at(phi)` returns such an object. Its methods have the same names as those of the curve, but need
    no control points as an argument.

    Args:
        curve: the embedding.
        phi: control points (size, *space.shape).

    Example:
        >>> import torch
        >>> from manifoldagg.curves import Bezier
        >>> from manifoldagg.manifolds import Flat
        >>> path = Bezier(Flat(2), degree=2).at(torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 0.0]]))
        >>> path(0.5), path.velocity(0.5)
        (tensor([1.0000, 0.5000]), tensor([2., 0.]))
        >>> path.length()
        tensor(2.2956)
    """

    curve: C
    phi: Tensor

    def __repr__(self) -> str:
        return format_result(self, curve=self.curve, phi=self.phi)

    def __call__(self, t: Parameter) -> Points:
        """Compute the point at `t`, (*batch, *space.shape)."""
        return self.curve(self.phi, t)

    def velocity(self, t: Parameter) -> Points:
        """Compute the velocity at `t`."""
        return self.curve.velocity(self.phi, t)

    def acceleration(self, t: Parameter) -> Points:
        """Compute the covariant acceleration at `t`."""
        return self.curve.acceleration(self.phi, t)

    def length(self, a: float = 0.0, b: float = 1.0) -> Float[Tensor, ""]:
        """Compute the length from `a` to `b`."""
        return self.curve.length(self.phi, a, b)

    def parameter_at_length(self, fraction: Parameter) -> Float64[Tensor, "*batch"]:
        """Compute the parameter at a `fraction` of the length."""
        return self.curve.parameter_at_length(self.phi, fraction)

    def nearest(self, point: Points) -> tuple[Tensor, Tensor]:
        """Compute the parameter of the nearest point, and the distance."""
        return self.curve.nearest(self.phi, point)

    def contains(self, point: Points, *, tolerance: float | None = None) -> Bool[Tensor, "*batch"]:
        """Return whether points are within `tolerance` of the path."""
        return self.curve.contains(self.phi, point, tolerance=tolerance)

    def split(self, t: float) -> tuple["Path[C]", "Path[C]"]:
        """Return the parts before and after `t`, each over [0, 1]."""
        left, right = self.curve.split(self.phi, t)
        return Path(self.curve, left), Path(self.curve, right)

    def reverse(self) -> "Path[C]":
        """Return the path from its end to its start."""
        return Path(self.curve, self.curve.reverse(self.phi))

    def plot(self, axes: Any = None, function: Callable[[Tensor], float] | None = None, *, resolution: int = 31) -> Any:
        """Plot the curve and its control polygon in a plane.

        The plane contains both ends of the curve, and the control point that is farthest from the line through the
        ends. On a curved space, the plot shows the logarithms of all points at the first control point, because these
        logarithms are vectors of a single tangent space.

        Args:
            axes: matplotlib axes. The default is the axes of a new figure.
            function: a function of a point, such as a loss, whose contours are drawn behind the curve.
            resolution: the number of grid points along each side, for `function`.

        Returns:
            The axes.

        Raises:
            ArgumentError: if `function` is given and the control points do not span a plane.
        """
        phi = self.phi.detach()
        view = View.of(self.curve.space, phi)
        control = view(phi)
        t = torch.linspace(0, 1, 101, dtype=torch.float64, device=phi.device)
        path = view.curve(self.curve, phi, t)
        if function is None:
            axes = new_figure().subplots() if axes is None else axes
            axes.plot(path[:, 0], path[:, 1], color="black", linewidth=2.2, label="path")
            axes.plot(control[:, 0], control[:, 1], ":^", color="black", linewidth=0.8, label="control points")
            axes.set_xlabel("along the chord")
            axes.set_ylabel("across the chord")
            axes.set_aspect("equal", adjustable="datalim")
            legend_below(axes)
            return axes
        if not bool(view.axes[1].any()):
            raise ArgumentError("phi: expected control points that span a plane, got points on one line")
        low, high = torch.cat([control, path]).aminmax(dim=0)
        # One margin for both axes keeps the scales of the axes equal.
        margin = 0.25 * (high - low).max()
        x, y, values = view.grid(function, phi.dtype, low - margin, high + margin, resolution)
        return Plane(x, y, values, control, path).plot(axes, label="function", ends=("start", "end"))


def as_parameter(t: Parameter, phi: Tensor, name: str = "t") -> Float64[Tensor, "*batch"]:
    """Convert a number or a tensor of numbers to float64 on the device of `phi`.

    Raises:
        ArgumentError: if a number is not finite.
    """
    if not isinstance(t, Tensor):
        return torch.tensor(check_number(name, t), dtype=torch.float64, device=phi.device)
    return t.to(phi.device, torch.float64)
