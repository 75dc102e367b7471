"""Conversion of manifolds of the package geoopt (`geoopt.Manifold`) to manifolds of manifoldagg (`Manifold`).

If manifoldagg has an equivalent class, the conversion returns an instance of this class. Otherwise, it returns a
`GeooptManifold`, a wrapper that calls the methods of the geoopt manifold.
"""

import copy
import math
import pickle
import warnings
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from manifoldagg._validation import check_number, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds.flat import Flat
from manifoldagg.manifolds.hyperbolic import Lorentz, PoincareBall
from manifoldagg.manifolds.manifold import PRIMITIVES, Manifold, NamedTensors, Point, Scalar, Tangent
from manifoldagg.manifolds.power import Power
from manifoldagg.manifolds.product import Product
from manifoldagg.manifolds.sphere import Sphere
from manifoldagg.manifolds.stiefel import Stiefel
from manifoldagg.manifolds.symmetric import SymmetricPositiveDefinite

with warnings.catch_warnings():
    # The import emits one warning for each function that geoopt compiles.
    warnings.simplefilter("ignore")
    import geoopt  # type: ignore[import-untyped]

__all__ = ["GeooptManifold", "from_geoopt", "is_geoopt"]

BALLS = (
    geoopt.PoincareBall,
    geoopt.PoincareBallExact,
    geoopt.SphereProjection,
    geoopt.SphereProjectionExact,
    geoopt.Stereographic,
    geoopt.StereographicExact,
)
EXACT = {geoopt.SphereExact: geoopt.Sphere, geoopt.EuclideanStiefelExact: geoopt.EuclideanStiefel}
PRODUCTS = (geoopt.ProductManifold, geoopt.StereographicProductManifold)
UNSUPPORTED = {
    geoopt.Scaled: "its expmap is scaled, but its inner is not",
    geoopt.CanonicalStiefel: "its proju is not a projection and its expmap is not geodesic; use EuclideanStiefel",
    geoopt.BirkhoffPolytope: "its proju is not a projection, its expmap is a retraction, its projx does not converge",
    geoopt.UpperHalf: "its points are complex",
    geoopt.BoundedDomain: "its points are complex",
}
METHODS = {"inner": "inner", "exp": "expmap", "log": "logmap", "transport": "transp", "retract": "retr"}
METHODS |= {"project": "projx", "project_tangent": "proju", "gradient": "egrad2rgrad"}
"""The names of geoopt's methods for the primitives."""

GEOOPT_PRIMITIVES = PRIMITIVES - {"inverse_retract"}
"""The primitives that geoopt provides."""

ASSUMED_PRIMITIVES = frozenset({"inner", "project", "project_tangent", "random_tangent"})


def from_geoopt(
    manifold: geoopt.Manifold | geoopt.ManifoldTensor,
    shape: tuple[int, ...] | None = None,
    *,
    capabilities: Collection[str] | None = None,
    injectivity_radius: float | None = None,
) -> Manifold:
    r"""Convert a geoopt manifold, or the manifold of a geoopt tensor, to a space of this package.

    If this package has an equivalent space, the result is this space, whose formulas are exact to rounding:

    | geoopt, also with the suffix `Exact` | result |
    | --- | --- |
    | `Euclidean` with any `ndim` | `Flat(n)`, or `Power(Flat(n), copies)` |
    | `Sphere` | `Sphere(n)` |
    | `PoincareBall`, `Stereographic` with $k < 0$ | `PoincareBall(n, curvature=k)` |
    | `Lorentz` with $k = 1$ | `Lorentz(n - 1)` |
    | `EuclideanStiefel` | `Stiefel(n, p)` |
    | `SymmetricPositiveDefinite`, affine-invariant | `SymmetricPositiveDefinite(n)` |
    | `ProductManifold` | `Product`, with factors "0", "1", ... |

    Otherwise, the result is a `GeooptManifold`, which calls geoopt's formulas. It declares only the primitives that
    satisfy the laws of a manifold:

    - `SphereProjection`, and `Stereographic` with $k \ge 0$: all primitives of geoopt. `retract` is exp.
    - A `Sphere` in a subspace: all except exp, log and transport. geoopt's gradients at 0 are NaN, and its transp is a
      projection.
    - Other classes: inner, projx, proju, egrad2rgrad and random. Their expmap may be a retraction, and their transp may
      be a projection. The argument `capabilities` declares more primitives.

    The space is a copy. A learned curvature is read once and has no gradient.

    Args:
        manifold: a geoopt manifold, or a `ManifoldTensor` or `ManifoldParameter` with a manifold and a shape.
        shape: the shape of a whole leaf. Axes before those of the manifold are axes of copies. The shape () of a single
            number stands for a point of `Flat(1)`. With `None`, the sizes are not fixed. The shape of the space then
            contains -1, and `random_point` is not available.
        capabilities: for a class that is not part of geoopt, the primitives that satisfy the laws. Use
            [`check_manifold`][manifoldagg.testing.check_manifold] to verify them.
        injectivity_radius: for a class that is not part of geoopt, the injectivity radius, which must be the same at
            every point. It may be infinite.

    Raises:
        ArgumentError: if `manifold` is not a geoopt manifold, has several curvatures, or violates the laws of a space.
            Also if `shape` does not fit the manifold, or if `capabilities` or `injectivity_radius` is given for a class
            of geoopt.

    Example:
        >>> from_geoopt(geoopt.PoincareBall(), (1000, 16))
        Power(space=PoincareBall(n=16, curvature=-1.0), copies=(1000,))
    """
    if isinstance(manifold, geoopt.ManifoldTensor):
        if shape is not None and shape != tuple(manifold.shape):
            raise ArgumentError(f"shape: expected {tuple(manifold.shape)} of the tensor, got {short_repr(shape)}")
        shape = tuple(manifold.shape)
        manifold = manifold.manifold
    if not isinstance(manifold, geoopt.Manifold):
        raise ArgumentError(f"manifold: expected a geoopt manifold or a tensor on one, got {short_repr(manifold)}")
    # The properties of geoopt's own classes are tested here. A caller may declare them only for other classes.
    known = _is_known(manifold, has_claims=capabilities is not None or injectivity_radius is not None)
    if known and type(manifold) in PRODUCTS:
        leaves = zip(manifold.manifolds, manifold.shapes, strict=True)
        product = Product(tuple((str(i), from_geoopt(*leaf)) for i, leaf in enumerate(leaves)))
        # A point of a product is a vector, so only the last axis of a leaf belongs to it.
        copies = () if shape is None else _check_sizes("shape", manifold, shape)[:-1]
        return Power(product, copies) if copies else product
    snapshot = _freeze_known(manifold) if known else _freeze_declared(manifold, capabilities, injectivity_radius)
    module = snapshot.module
    if shape is None:
        if module.ndim == 0:
            raise ArgumentError(f"shape: expected the shape of a leaf for {snapshot}, got None")
        return GeooptManifold(snapshot, (-1,) * int(module.ndim))
    sizes = _check_sizes("shape", module, shape) or (1,)
    # All axes of a Euclidean leaf belong to the manifold. For other manifolds, leading axes are axes of copies.
    own = 0 if type(module) is geoopt.Euclidean else len(sizes) - module.ndim
    space = snapshot.space(sizes[own:])
    return Power(space, sizes[:own]) if own else space


@dataclass(frozen=True, repr=False)
class FrozenGeooptManifold:
    """An immutable and hashable copy of a geoopt manifold (`geoopt.Manifold`), in float64.

    A geoopt manifold is a `torch.nn.Module`, so its parameters, such as a learned curvature, can change later. The copy
    never changes. Two copies are equal if their classes and all their values are equal.

    Attributes:
        module: the copy of the geoopt manifold.
        declared: the names of the operations, such as `"exp"`, that the geoopt manifold computes correctly. `None` if
            this package has an equivalent manifold, which replaces the geoopt manifold.
        radius: the injectivity radius, or `None` if it is unknown.
        symmetric: whether geodesic reflections are isometries.
        content: the class and the values of `module`, as a hashable key for comparisons.
    """

    module: Any = field(compare=False)
    declared: frozenset[str] | None = None
    radius: float | None = None
    symmetric: bool = False
    content: Hashable = field(init=False)

    def __post_init__(self) -> None:
        # A later change of the original, such as a step of a learned curvature, must not change the space.
        module = copy.deepcopy(self.module).cpu().double().requires_grad_(False)
        # A frozen dataclass rejects ordinary assignments.
        object.__setattr__(self, "module", module)
        object.__setattr__(self, "content", _content_key(module))

    def __repr__(self) -> str:
        numbers = [f"{name}={value.item():g}" for name, value in self.module.state_dict().items() if value.ndim == 0]
        return f"geoopt.{type(self.module).__name__}({', '.join(numbers)})"

    def space(self, sizes: tuple[int, ...]) -> Manifold:
        """Return the space of points with this shape."""
        if self.declared is None:
            return NATIVE_SPACES[type(self.module)](self.module, *sizes)
        return GeooptManifold(self, sizes)


@dataclass(frozen=True)
class GeooptManifold(Manifold):
    """A wrapper that implements the interface `Manifold` with the methods of a geoopt manifold (`geoopt.Manifold`).

    - The wrapper calls the methods of the geoopt manifold in float64, and converts the results to the dtype of the
      points.
    - `random_point` seeds geoopt's random numbers from the given generator, so equal generators return equal points.
    - `random_tangent` returns tangents that are standard normal in the metric. Its cost grows at least quadratically
      with the size of a point, because it computes the inner products of all pairs of coordinate directions.

    Args:
        manifold: the geoopt manifold with its declared properties.
        sizes: the shape of a point. If it contains -1, each call is delegated to a space with the size of its
            arguments, if possible an equivalent space of this package. `random_point` is then missing.

    Example:
        >>> sphere = from_geoopt(geoopt.Sphere())
        >>> sphere.shape, sphere.log(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
        ((-1,), tensor([0.0000, 1.5708]))
    """

    manifold: FrozenGeooptManifold
    sizes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sizes

    @property
    def capabilities(self) -> frozenset[str]:  # type: ignore[override]  # of the manifold, not of the class
        """The primitives of geoopt that are known or declared to satisfy the laws."""
        if self._has_open_sizes:
            return self.manifold.space((2,) * len(self.sizes)).capabilities - {"random_point"}
        return self.manifold.declared or frozenset()

    @property
    def symmetric(self) -> bool:  # type: ignore[override]  # as above
        return self.manifold.symmetric

    def _gradient(self, x: Point, derivative: Tangent) -> Tangent:
        return self._missing("gradient", x, derivative)

    def _injectivity_radius(self, x: Point) -> Scalar:
        self._require("injectivity_radius")
        if self._has_open_sizes:
            return self._sized_space(x)._injectivity_radius(x)
        return x.new_full(self._batch_shape(x.shape), self.manifold.radius or math.nan)

    def _random_point(self, batch: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Point:
        self._require("random_point")
        module = self.manifold.module
        radius = self.manifold.radius or math.inf
        # Coordinates are infinite at the centre of projection of the sphere. A standard deviation of a twelfth of the
        # injectivity radius keeps the points away from this centre.
        is_projected_sphere = type(module) is geoopt.StereographicExact and radius < math.inf
        seed = int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device))
        # geoopt draws from torch's global generator, whose state must not change. The draw is on the CPU, so the
        # generators of devices need not be saved.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            options = {"std": radius / 12} if is_projected_sphere else {}
            draw = module.random(*batch, *self.sizes, dtype=torch.float64, **options)
        point: Tensor = draw.detach().as_subclass(Tensor)
        return point.to(generator.device, dtype)

    def _random_tangent(self, x: Point, generator: torch.Generator) -> Tangent:
        self._require("random_tangent")
        if self._has_open_sizes:
            return self._sized_space(x)._random_tangent(x, generator)
        a = x.detach().double()
        size = math.prod(self.sizes)
        batch = self._batch_shape(x.shape)
        # B maps the coordinates e_i to the tangents P e_i. B (B*B)^(-1/2) is an isometry on the range of B*B.
        units = torch.eye(size, dtype=a.dtype, device=a.device).reshape(size, *(1 for _ in batch), *self.sizes)
        tangents = self._project_tangent(a, units.expand(size, *x.shape))
        gram = torch.stack([self._inner(a, tangent, tangents) for tangent in tangents], -1).movedim(0, -1)
        values, basis = torch.linalg.eigh(gram)
        # Directions in the null space of the projection have eigenvalues that are only rounding errors.
        is_positive = values > size * torch.finfo(a.dtype).eps * values.amax(-1, keepdim=True)
        # The inverse root of infinity is 0, which removes these directions.
        weights = torch.where(is_positive, values, math.inf).rsqrt()
        noise = torch.randn(*batch, size, 1, generator=generator, dtype=a.dtype, device=generator.device).to(x.device)
        weighted = (basis * weights.unsqueeze(-2)) @ (basis.mT @ noise)
        along = weighted.squeeze(-1).movedim(-1, 0).reshape(size, *batch, *(1 for _ in self.sizes))
        return self._project_tangent(a, (along * tangents).sum(0)).to(x.dtype)

    def _check(
        self, points: NamedTensors, *, tangents: NamedTensors | None = None, vectors: NamedTensors | None = None
    ) -> None:
        super()._check(points, tangents=tangents, vectors=vectors)
        if self._has_open_sizes:
            # A space with the size of the first tensor checks that all tensors have this size.
            first = next(iter((points | (vectors or {})).values()))
            self._sized_space(first)._check(points, tangents=tangents, vectors=vectors)

    @property
    def _has_open_sizes(self) -> bool:
        return -1 in self.sizes

    def _sized_space(self, x: Tensor) -> Manifold:
        """Return the space of points that have the size of `x`."""
        return self.manifold.space(_check_sizes("x", self.manifold.module, x.shape[x.ndim - len(self.sizes) :]))

    def _missing(self, formula: str, *arguments: Any) -> Tensor:
        """Compute a formula with the corresponding method of geoopt."""
        self._require("project_tangent" if formula == "gradient" else formula)
        x, *others = arguments
        if self._has_open_sizes:
            result: Tensor = getattr(self._sized_space(x), f"_{formula}")(x, *others)
            return result
        module = self.manifold.module
        # geoopt's formulas use the curvature tensor of the module, so it must be on the device of the points.
        method = getattr(module if x.is_cpu else copy.deepcopy(module).to(x.device), METHODS[formula])
        parts = torch.broadcast_tensors(*(tensor.as_subclass(Tensor).double() for tensor in (x, *others)))
        # Without keepdim, `inner` of Stereographic returns another shape for a batch.
        value: Tensor = method(*parts, keepdim=True) if formula == "inner" else method(*parts)
        return value.reshape(self._batch_shape(parts[0].shape) if formula == "inner" else parts[0].shape).to(x.dtype)

    def _require(self, primitive: str) -> None:
        """Raise a `NotImplementedError` if the space does not have a primitive."""
        if primitive not in self.capabilities:
            raise self._not_implemented(primitive)

    def _batch_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(shape[: len(shape) - len(self.sizes)])


NATIVE_SPACES: dict[Any, Callable[..., Manifold]] = {
    geoopt.Euclidean: lambda _, *sizes: Power(Flat(sizes[-1]), sizes[:-1]) if sizes[1:] else Flat(*sizes),
    geoopt.Sphere: lambda _, n: Sphere(n),
    geoopt.Stereographic: lambda manifold, n: PoincareBall(n, curvature=manifold.k.item()),
    geoopt.Lorentz: lambda _, n: Lorentz(n - 1),
    geoopt.EuclideanStiefel: lambda _, n, p: Stiefel(n, p),
    geoopt.SymmetricPositiveDefinite: lambda _, n, m: SymmetricPositiveDefinite(n),
}


def is_geoopt(value: object) -> bool:
    """Return whether `from_geoopt` can convert the object."""
    return isinstance(value, geoopt.Manifold | geoopt.ManifoldTensor)


def _is_known(manifold: Any, *, has_claims: bool) -> bool:
    """Return whether the class of a manifold is one of geoopt's own classes.

    Args:
        manifold: the manifold.
        has_claims: whether the caller declares properties of the manifold.

    Raises:
        ArgumentError: if the class is not supported, or if the caller declares properties of one of geoopt's own
            classes.
    """
    kind = type(manifold)
    for unsupported, reason in UNSUPPORTED.items():
        if kind is unsupported or (isinstance(manifold, unsupported) and not has_claims):
            name = f"geoopt.{unsupported.__name__}"
            raise ArgumentError(f"manifold: expected a manifold that satisfies the laws, got {name}: {reason}")
    known = kind in {*NATIVE_SPACES, *EXACT, *BALLS, *PRODUCTS}
    if known and has_claims:
        raise ArgumentError(f"capabilities: expected None for geoopt.{kind.__name__}, whose properties are known")
    return known


def _freeze_known(manifold: Any) -> FrozenGeooptManifold:
    """Return an immutable copy of a manifold that belongs to one of geoopt's own classes.

    Classes with the same geometry are replaced by one class, so that their copies compare equal. For example, the copy
    of a `SphereExact` is a `Sphere`.

    Raises:
        ArgumentError: if the curvature or the metric of the manifold is not supported.
    """
    kind = type(manifold)
    if kind in BALLS:
        k = _curvature(manifold)
        if k.item() < 0:
            return FrozenGeooptManifold(geoopt.Stereographic(k))
        radius = math.pi / math.sqrt(k.item()) if k.item() > 0 else math.inf
        return FrozenGeooptManifold(geoopt.StereographicExact(k), GEOOPT_PRIMITIVES, radius, symmetric=True)
    if kind is geoopt.Lorentz:
        k = _curvature(manifold)
        if k.item() != 1:
            # geoopt's expmap with velocity 0 moves a point by 1e-8, and its logmap has no correct digits below 1e-4.
            raise ArgumentError(f"manifold: expected geoopt.Lorentz with k = 1, got {k:g}; use a PoincareBall")
        return FrozenGeooptManifold(geoopt.Lorentz(k))
    if isinstance(manifold, geoopt.Sphere) and manifold.projector is not None:
        return _subsphere(manifold.projector)
    if isinstance(manifold, geoopt.SymmetricPositiveDefinite) and manifold.default_metric.value != "AIM":
        given = f"{manifold.default_metric.value}, for which expmap and inner still use AIM"
        raise ArgumentError(f"manifold: expected geoopt.SymmetricPositiveDefinite with the metric AIM, got {given}")
    return FrozenGeooptManifold(EXACT[kind]() if kind in EXACT else manifold)


def _freeze_declared(manifold: Any, capabilities: Collection[str] | None, radius: float | None) -> FrozenGeooptManifold:
    """Return an immutable copy of a manifold whose class the user has derived from `geoopt.Manifold`.

    Such a class can inherit methods that are wrong for its geometry. The user therefore lists the correct methods in
    `capabilities`.

    Args:
        manifold: the manifold.
        capabilities: the names of the primitives that are correct, or `None` for the default.
        radius: the injectivity radius, or `None` if it is unknown.

    Raises:
        ArgumentError: if a declared property is invalid.
    """
    if not isinstance(manifold.ndim, int):
        raise ArgumentError(f"manifold: expected an integer ndim, got {short_repr(manifold.ndim)}")
    if not isinstance(capabilities, Collection | None):
        raise ArgumentError(f"capabilities: expected names of primitives, got {short_repr(capabilities)}")
    # The base class of geoopt does not implement `random`, so only a class that overrides it can draw points.
    draws = {"random_point"} if type(manifold).random is not geoopt.Manifold.random else set()
    declared = ASSUMED_PRIMITIVES | draws if capabilities is None else frozenset(capabilities)
    if radius is not None:
        radius = radius if radius == math.inf else check_number("injectivity_radius", radius, above=0)
        declared |= {"injectivity_radius"}
    elif "injectivity_radius" in declared:
        raise ArgumentError("injectivity_radius: expected a number, got None although it is one of the capabilities")
    unknown = sorted(map(str, declared - GEOOPT_PRIMITIVES))
    if unknown:
        raise ArgumentError(
            f"capabilities: expected some of {', '.join(sorted(GEOOPT_PRIMITIVES))}; got {', '.join(unknown)}"
        )
    if "random_tangent" in declared and not {"inner", "project_tangent"} <= declared:
        raise ArgumentError(
            "capabilities: expected inner and project_tangent with random_tangent, got random_tangent alone"
        )
    return FrozenGeooptManifold(manifold, declared, radius)


def _curvature(manifold: Any) -> Tensor:
    """Return the curvature of a manifold as a float64 tensor without a gradient.

    Raises:
        ArgumentError: if the manifold has several curvatures, or a curvature that is not finite.
    """
    if manifold.k.numel() != 1:
        raise ArgumentError(f"manifold: expected one curvature, got {manifold.k.tolist()}")
    return torch.tensor(check_number("manifold: k", manifold.k.item()), dtype=torch.float64)


def _subsphere(projector: Tensor) -> FrozenGeooptManifold:
    """Return the unit sphere of the subspace onto which the matrix `projector` projects.

    The function first corrects the rounding errors of the matrix, so that it is symmetric and idempotent.

    Raises:
        ArgumentError: if `projector` is not a single matrix.
    """
    if projector.ndim != 2:
        raise ArgumentError(
            f"manifold: expected a Sphere in one subspace, got projectors of shape {tuple(projector.shape)}"
        )
    sphere = geoopt.Sphere()
    p = projector.detach().double()
    for _ in range(2):
        # The polynomial 3p² - 2p³ maps eigenvalues near 0 and 1 to these values with quadratic convergence.
        p = 3 * p @ p - 2 * p @ p @ p
    # The products of matrices are symmetric only up to rounding.
    sphere.projector = (p + p.mT) / 2
    return FrozenGeooptManifold(
        sphere, ASSUMED_PRIMITIVES | {"retract", "injectivity_radius", "random_point"}, math.pi, symmetric=True
    )


def _check_sizes(name: str, manifold: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Check that a point of a geoopt manifold can have the given shape, and return the shape as a tuple.

    A shape with additional leading axes, for a batch of points, is also valid.

    Raises:
        ArgumentError: if the shape is invalid. The message starts with `name`.
    """
    # `type` instead of `isinstance` rejects booleans, which are a subclass of int.
    if not isinstance(shape, tuple | list) or not all(type(n) is int and n > 0 for n in shape):
        raise ArgumentError(f"{name}: expected a shape of positive integers, got {short_repr(shape)}")
    sizes = tuple(shape)
    kind = type(manifold)
    ndim = manifold.ndim
    if len(sizes) < ndim:
        raise ArgumentError(f"{name}: expected a shape of at least {ndim} axes for {manifold}, got {sizes}")
    # A tensor on the meta device has a shape and no values, so geoopt checks only the shape.
    fits, reason = manifold.check_point(torch.empty(sizes, device="meta"), explain=True)
    square = kind is not geoopt.SymmetricPositiveDefinite or sizes[-1] == sizes[-2]
    if not (fits and square and (kind is not geoopt.Lorentz or sizes[-1] > 1)):
        raise ArgumentError(f"{name}: expected a shape that fits {manifold}, got {sizes}" + f": {reason}" * (not fits))
    return sizes


def _content_key(value: Any) -> Hashable:
    """Return a hashable key that contains the classes, numbers and tensors of a value."""
    match value:
        case nn.Module():
            # The attributes of `nn.Module` itself, such as hooks, do not describe the geometry.
            own = vars(value).keys() - vars(nn.Module()).keys() | {"_parameters", "_buffers", "_modules"}
            return type(value), _content_key({name: vars(value)[name] for name in own})
        case Tensor():
            # torch hashes tensors by identity, so the key contains their bytes.
            return str(value.dtype), tuple(value.shape), value.detach().numpy().tobytes()
        case dict():
            # Sorting makes the key independent of the order of insertion.
            return tuple((key, _content_key(value[key])) for key in sorted(value, key=str))
        case list() | tuple():
            return tuple(_content_key(item) for item in value)
        case Hashable():
            return value
        case _:
            return pickle.dumps(value)
