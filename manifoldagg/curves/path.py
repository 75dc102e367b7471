"""Curves: the common interface of embeddings of [0, 1], and `Path`, a curve with its control points."""

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
"""Places a control point, among which a search on a curved space begins."""


class CurveEmbedding(Embedding):
    r"""An embedding of [0, 1], whose places are numbers $t$; $t$ outside of [0, 1] extends it.

    What is here needs the primitives of the space alone; on a flat space a subclass has closed forms.
    """

    @property
    def domain(self) -> tuple[int, ...]:
        return ()

    @property
    def breaks(self) -> tuple[float, ...]:
        """The parameters between which the curve is smooth."""
        return (0.0, 1.0)

    def velocity(self, phi: Phi, t: Parameter) -> Points:
        r"""Compute $\iota_\varphi'(t)$, a tangent at $\iota_\varphi(t)$: (*batch, *space.shape), by one jvp."""
        return self._point_and_velocity(phi, t)[1]

    def acceleration(self, phi: Phi, t: Parameter) -> Points:
        r"""Compute $\nabla_{\iota'} \iota'$ at $t$, the covariant acceleration: (*batch, *space.shape).

        It is the second derivative of $\log_{\iota(t)} \iota(t + s)$ at s = 0: in normal coordinates the connection
        vanishes at the centre. Two nested jvps.
        """
        self._check_phi(phi)
        place = as_parameter(t, phi)
        here = self(phi, place).detach()
        ones = torch.ones_like(place)

        def velocity(s: Tensor) -> Tensor:
            slope: Tensor = torch.func.jvp(lambda r: self.space._log(here, self(phi, r)), (s,), (ones,))[1]
            return slope

        bend: Tensor = torch.func.jvp(velocity, (place,), (ones,))[1]
        return bend

    def length(self, phi: Phi, a: float = 0.0, b: float = 1.0) -> Float[Tensor, ""]:
        r"""Compute $\int_a^b \|\iota_\varphi'(t)\|\, dt$ to a relative error of 1e-12 in float64, negative for b < a.

        It is differentiable in $\varphi$. On a flat space it costs one pass over $\varphi$: speeds are read from the
        Gram matrix of the differences of control points; what is shorter than 1e-150 there counts as none.

        Args:
            phi: control points (size, *space.shape).
            a: where to begin.
            b: where to end.

        Raises:
            ArgumentError: if `a` or `b` is not finite, or the length is not.
        """
        self._check_phi(phi)
        low, high = sorted((check_number("a", a), check_number("b", b)))
        edges = [low, *(edge for edge in self.breaks if low < edge < high), high]
        length = arc_length(self._speed(phi), edges).to(phi)
        return -length if b < a else length

    def parameter_at_length(self, phi: Phi, fraction: Parameter) -> Float64[Tensor, "*batch"]:
        r"""Find the $t$ with length(0, t) = part · length(0, 1), for traversal at constant speed.

        Args:
            phi: control points (size, *space.shape).
            fraction: of the length, in [0, 1]: a number, or (*batch,) numbers.

        Returns:
            (*batch,) in float64, without a derivative; 0 and 1 exactly for part 0 and 1; `fraction` where the curve is
            a single point.

        Raises:
            ArgumentError: if a part lies outside of [0, 1], or the length is not finite.
        """
        self._check_phi(phi)
        parts = as_parameter(fraction, phi, "fraction")
        if not bool(((parts >= 0) & (parts <= 1)).all()):
            raise ArgumentError(f"fraction: expected numbers in [0, 1], got {short_repr(fraction)}")
        return parameter_at_arc_length(self._speed(phi.detach()), self.breaks, parts.detach()).to(phi.device)

    def nearest(self, phi: Phi, point: Points) -> tuple[Tensor, Tensor]:
        r"""Return the $t \in [0, 1]$ of the nearest point, and the distance, for points (*batch, *space.shape).

        The best of 32 places a control point, then the zero of $\langle \log_{\iota(t)} p,\, \iota'(t)\rangle$
        between its neighbours: exact to rounding where these have one minimum between them. The search is not
        certified: a minimum narrower than the places are apart can be missed.

        Returns:
            Parameters (*batch,) in float64, without a derivative, and distances (*batch,), whose first derivatives in
            `phi` and `point` are right; higher ones are not, as they take the parameter for fixed.
        """
        self._check_phi(phi)
        self.space._check({"phi": phi, "point": point})
        points = self._points(point)
        with torch.no_grad():
            t = self._search(phi.detach(), points.detach())
        batch = point.shape[: point.ndim - len(self.space.shape)]
        return t.reshape(batch), distance(self.space, points, self(phi, t)).reshape(batch)

    def contains(self, phi: Phi, point: Points, *, tolerance: float | None = None) -> Bool[Tensor, "*batch"]:
        r"""Return whether points (*batch, *space.shape) lie within `tolerance` of the curve: (*batch,).

        Where it is not given it is what rounding may do: $\sqrt\varepsilon$ of the coarser dtype on a curved space,
        $4\,$`size`$\,\varepsilon \max_i \|\varphi_i\|$ on a flat one.

        Raises:
            ArgumentError: if `tolerance` is negative or a shape does not fit.
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
        """Return the curve of one `phi`, as a value with methods of $t$ alone."""
        self._check_phi(phi)
        return Path(self, phi)

    def split(self, phi: Phi, t: float) -> tuple[Tensor, Tensor]:
        """Return control points of the parts before and after `t`."""
        raise NotImplementedError(f"{type(self).__name__} has no split")

    def reverse(self, phi: Phi) -> Points:
        r"""Return control points of $t \mapsto \iota_\varphi(1 - t)$: the same ones in reverse order."""
        self._check_phi(phi)
        return phi.flip(0)

    def _speed(self, phi: Tensor) -> Speed:
        """The speed as a function of parameters."""
        return lambda t: norm(self.space, *self._point_and_velocity(phi, t)).to(t.device)

    def _point_and_velocity(self, phi: Tensor, t: Parameter) -> tuple[Tensor, Tensor]:
        """Point and velocity in one jvp."""
        self._check_phi(phi)
        # Forward mode refuses a tensor whose entries share memory.
        place = as_parameter(t, phi).contiguous()
        point, slope = torch.func.jvp(lambda s: self(phi, s), (place,), (torch.ones_like(place),))[:2]
        # Where points are classes of tensors, the representative may turn while the point rests.
        tangent = self.space._project_tangent(point, slope) if "project_tangent" in self.space.capabilities else slope
        return point, tangent

    def _points(self, point: Tensor) -> Tensor:
        """Checked points as one batch (m, *space.shape)."""
        check_shape("point", point, *self.space.axes, batch=True)
        return point.reshape(-1, *point.shape[point.ndim - len(self.space.shape) :])

    def _search(self, phi: Tensor, points: Tensor) -> Tensor:
        places = torch.linspace(0, 1, SEARCH_SAMPLES * self.size + 1, dtype=torch.float64, device=phi.device)
        trace = self(phi, places)
        both = (len(points), len(places), *points.shape[1:])
        away = distance(self.space, points.unsqueeze(1).expand(both), trace.expand(both))
        k = away.nan_to_num(torch.inf).argmin(-1)
        best = places[k]

        def fall(t: Tensor) -> Tensor:
            """Half the rate at which the squared distance shrinks."""
            here, onward = self._point_and_velocity(phi, t)
            return self.space._inner(here, self.space._log(here, points), onward)

        t = find_sign_change(fall, places[(k - 1).clamp(min=0)], places[(k + 1).clamp(max=len(places) - 1)])
        closer = distance(self.space, points, self(phi, t)) < distance(self.space, points, self(phi, best))
        return torch.where(closer, t, best)


C = TypeVar("C", bound=CurveEmbedding)


@dataclass(frozen=True, eq=False)
class Path(Generic[C]):
    r"""The image of one $\varphi$: $t \mapsto \iota_\varphi(t)$, from `curve.at(phi)`.

    Args:
        curve: how control points draw it.
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
        """The point at `t`: (*batch, *space.shape)."""
        return self.curve(self.phi, t)

    def velocity(self, t: Parameter) -> Points:
        """Compute the tangent at `t`."""
        return self.curve.velocity(self.phi, t)

    def acceleration(self, t: Parameter) -> Points:
        """Compute the covariant acceleration at `t`."""
        return self.curve.acceleration(self.phi, t)

    def length(self, a: float = 0.0, b: float = 1.0) -> Float[Tensor, ""]:
        """Compute the length from `a` to `b`."""
        return self.curve.length(self.phi, a, b)

    def parameter_at_length(self, fraction: Parameter) -> Float64[Tensor, "*batch"]:
        """Return the parameter at a `fraction` of the length."""
        return self.curve.parameter_at_length(self.phi, fraction)

    def nearest(self, point: Points) -> tuple[Tensor, Tensor]:
        """Return the parameter of the nearest point, and the distance."""
        return self.curve.nearest(self.phi, point)

    def contains(self, point: Points, *, tolerance: float | None = None) -> Bool[Tensor, "*batch"]:
        """Return whether points lie within `tolerance` of the path."""
        return self.curve.contains(self.phi, point, tolerance=tolerance)

    def split(self, t: float) -> tuple["Path[C]", "Path[C]"]:
        """Return the parts before and after `t`, each over [0, 1]."""
        left, right = self.curve.split(self.phi, t)
        return Path(self.curve, left), Path(self.curve, right)

    def reverse(self) -> "Path[C]":
        """Return the path from its end to its start."""
        return Path(self.curve, self.curve.reverse(self.phi))

    def plot(self, axes: Any = None, function: Callable[[Tensor], float] | None = None, *, resolution: int = 31) -> Any:
        r"""Draw the path and its control polygon in the plane through start, end and farthest control point.

        On a curved space that is a plane of the tangent space at $\varphi_0$, where everything is drawn by its log.

        Args:
            axes: matplotlib axes. The default is the axes of a new figure.
            function: a function of a point, such as a loss. Its contours are drawn below the path.
            resolution: the number of grid points a side, for `function`.

        Returns:
            The axes.

        Raises:
            ArgumentError: if there is a function and the control points span no plane.
        """
        phi = self.phi.detach()
        seen = View.of(self.curve.space, phi)
        control = seen(phi)
        t = torch.linspace(0, 1, 101, dtype=torch.float64, device=phi.device)
        path = seen.curve(self.curve, phi, t)
        if function is None:
            axes = new_figure().subplots() if axes is None else axes
            axes.plot(path[:, 0], path[:, 1], color="black", linewidth=2.2, label="path")
            axes.plot(control[:, 0], control[:, 1], ":^", color="black", linewidth=0.8, label="control points")
            axes.set_xlabel("along the chord")
            axes.set_ylabel("across the chord")
            axes.set_aspect("equal", adjustable="datalim")
            legend_below(axes)
            return axes
        if not bool(seen.axes[1].any()):
            raise ArgumentError("phi: its control points lie on one line: there is no plane to draw a function on")
        low, high = torch.cat([control, path]).aminmax(dim=0)
        reach = 0.25 * (high - low).max()
        x, y, values = seen.grid(function, phi.dtype, low - reach, high + reach, resolution)
        return Plane(x, y, values, control, path).plot(axes, label="function", ends=("start", "end"))


def as_parameter(t: Parameter, phi: Tensor, name: str = "t") -> Float64[Tensor, "*batch"]:
    """Convert a number or a tensor of numbers to float64 on the device of `phi`.

    Raises:
        ArgumentError: if a number is not finite.
    """
    if not isinstance(t, Tensor):
        return torch.tensor(check_number(name, t), dtype=torch.float64, device=phi.device)
    return t.to(phi.device, torch.float64)
