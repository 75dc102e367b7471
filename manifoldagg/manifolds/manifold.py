"""Base class for manifolds, and the named parts (leaves) of their points."""

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from manifoldagg._validation import check_shape, short_repr
from manifoldagg.errors import ArgumentError

__all__ = ["CHECKED_METHODS", "PRIMITIVES", "Leaf", "Manifold", "check_is_manifold", "check_not_model"]

Point = Float[Tensor, "..."]
Tangent = Float[Tensor, "..."]
Scalar = Float[Tensor, "..."]
NamedTensors = dict[str, Tensor]

PRIMITIVES = frozenset(
    {
        "inner",
        "exp",
        "log",
        "transport",
        "project_tangent",
        "project",
        "retract",
        "inverse_retract",
        "injectivity_radius",
        "random_point",
        "random_tangent",
    }
)
"""The primitives that a space can list in its `capabilities`."""

CHECKED_METHODS = PRIMITIVES | {"gradient", "invariant"}
"""The methods that check their arguments and then call the formula of the same name with an underscore."""


@dataclass(frozen=True)
class Leaf:
    """A named part of the points of a manifold. The values of this part are themselves points of a manifold.

    For example, each parameter of a model is a leaf of the parameter space of the model.

    Attributes:
        name: the name of the leaf, which is empty if the leaf is the whole point.
        space: the manifold of the leaf.
        part: the slice of the flattened point that contains the leaf.
        storage_dtype: the dtype in which a model stores the leaf, or `None` if it is the dtype of the point.
    """

    name: str
    space: "Manifold"
    part: slice
    storage_dtype: torch.dtype | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.space}" if self.name else str(self.space)

    def select(self, points: Tensor) -> Tensor:
        """Select the entries of one part (leaf) of a manifold, such as one parameter of a model.

        Args:
            points: points or tangents of the whole manifold.

        Returns:
            A view of `points` with the shape (*batch, *leaf.space.shape).
        """
        return points[..., self.part].view(*points.shape[:-1], *self.space.shape) if self.name else points


class Manifold(abc.ABC):
    r"""Base class for Riemannian manifolds whose points are tensors of shape `(*batch, *shape)`.

    Each public method checks shapes, dtypes and devices, and then calls the formula of the same name with an
    underscore: `exp` calls `_exp`. A subclass implements formulas and lists them in `capabilities`. Calling a missing
    formula raises `NotImplementedError`. Code whose tensors are already checked calls the formulas directly.

    The primitives satisfy these laws:

    - `exp` follows geodesics, and $d\exp_x|_0 = \mathrm{id}$.
    - `log` is the inverse of `exp` inside the injectivity radius.
    - `transport` is an isometry.
    - `project_tangent` is idempotent and orthogonal in the metric.
    - `retract` agrees with `exp` to second order, and `inverse_retract` inverts `retract`.

    Class attributes declare further properties:

    - `flat`: points and tangents are added as vectors.
    - `ambient`: points are elements of a vector space, and `project` maps a sum of points back to the manifold.
    - `symmetric`: geodesic reflections are isometries.
    - `open`: the points are an open set of coordinates.

    A manifold is a frozen, hashable value. Two manifolds with equal attributes are equal.

    Raises:
        ArgumentError: if a subclass overrides a method without an underscore instead of its formula.
    """

    capabilities: ClassVar[frozenset[str]] = frozenset()
    flat: ClassVar[bool] = False
    ambient: ClassVar[bool] = False
    symmetric: ClassVar[bool] = False
    open: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Overriding the public method alone would bypass the checks, and code that calls the formula would not see it.
        for name in CHECKED_METHODS:
            if name in vars(cls) and f"_{name}" not in vars(cls):
                raise ArgumentError(
                    f"{cls.__name__}: expected the formula _{name}, got {name}, which checks its tensors and calls it"
                )

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of one point. The length -1 denotes an axis of any length."""

    @property
    def axes(self) -> list[int | None]:
        """The shape of one point as `check_shape` expects it, with `None` for an axis of any length."""
        shape = self.shape
        return [None if n < 0 else n for n in shape] if -1 in shape else [*shape]

    def inner(self, x: Point, u: Tangent, v: Tangent) -> Scalar:
        r"""Compute the inner product $\langle u, v \rangle_x$ for each point, (*batch,)."""
        self._check({"x": x}, vectors={"u": u, "v": v})
        return self._inner(x, u, v)

    def exp(self, x: Point, u: Tangent) -> Point:
        r"""Compute the exponential map $\exp_x u$.

        The result is the point at time 1 on the geodesic that starts at `x` with the velocity `u`.
        """
        self._check({"x": x}, tangents={"u": u})
        return self._exp(x, u)

    def log(self, x: Point, y: Point) -> Tangent:
        r"""Compute $\log_x y$, the shortest tangent at `x` whose exponential is `y`."""
        self._check({"x": x, "y": y})
        return self._log(x, y)

    def transport(self, x: Point, y: Point, u: Tangent) -> Tangent:
        r"""Compute $P_{x \to y} u$, the parallel transport along the geodesic from `x` to `y`."""
        self._check({"x": x, "y": y}, tangents={"u": u})
        return self._transport(x, y, u)

    def project_tangent(self, x: Point, u: Tangent) -> Tangent:
        """Return the tangent at `x` that is nearest to `u`."""
        self._check({"x": x}, vectors={"u": u})
        return self._project_tangent(x, u)

    def project(self, x: Point) -> Point:
        """Return the point of the manifold that is nearest to `x`."""
        self._check({}, vectors={"x": x})
        return self._project(x)

    def retract(self, x: Point, u: Tangent) -> Point:
        r"""Compute an approximation of the exponential map $\exp_x u$ that is cheaper than `exp`.

        Its error is of third order in the length of the tangent `u`.
        """
        self._check({"x": x}, tangents={"u": u})
        return self._retract(x, u)

    def inverse_retract(self, x: Point, y: Point) -> Tangent:
        """Compute the tangent at `x` that `retract` maps to the nearby point `y`.

        This method is a cheaper approximation of `log`.
        """
        self._check({"x": x, "y": y})
        return self._inverse_retract(x, y)

    def injectivity_radius(self, x: Point) -> Scalar:
        """Return the radius around `x` within which the exponential map is injective, (*batch,)."""
        self._check({"x": x})
        return self._injectivity_radius(x)

    def random_point(self, *batch: int, generator: torch.Generator, dtype: torch.dtype | None = None) -> Point:
        """Draw points of shape (*batch, *shape)."""
        return self._random_point(batch, generator, dtype or torch.get_default_dtype())

    def random_tangent(self, x: Point, generator: torch.Generator) -> Tangent:
        """Draw a standard normal tangent at each point of `x`."""
        self._check({"x": x})
        return self._random_tangent(x, generator)

    def gradient(self, x: Point, derivative: Tangent) -> Tangent:
        r"""Convert the derivative of a function with respect to coordinates to its Riemannian gradient.

        If the derivative at the point $x$ is $e$, the gradient is the tangent $g$ at $x$ with
        $\langle g, v\rangle_x = e \cdot v$ for every tangent $v$.
        """
        self._check({"x": x}, vectors={"derivative": derivative})
        return self._gradient(x, derivative)

    def invariant(self, x: Point) -> Tensor:
        """Return a tensor that depends only on the point that `x` represents, and not on the representation.

        For example, different orthonormal bases of a subspace represent the same point of the Grassmann manifold. Its
        invariant is the projector onto the subspace. If each point has only one representation, the invariant is `x`
        itself.
        """
        self._check({}, vectors={"x": x})
        return self._invariant(x)

    def leaves(self, x: Tensor) -> tuple["Leaf", ...]:
        """Return the leaves of the manifold, which are the named parts of its points, in the order of storage.

        - The leaves of a parameter space are the parameters of the model.
        - The leaves of a product of manifolds are the leaves of its factors.
        - Any other manifold has one leaf: the whole point. Its name is empty.

        Args:
            x: any points (*batch, *shape). Only their shape is used.
        """
        return (Leaf("", self, slice(0, x.shape[x.ndim - len(self.shape) :].numel())),)

    def _inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return self._missing("inner", x, u, v)

    def _exp(self, x: Tensor, u: Tensor) -> Tensor:
        return self._missing("exp", x, u)

    def _log(self, x: Tensor, y: Tensor) -> Tensor:
        return self._missing("log", x, y)

    def _transport(self, x: Tensor, y: Tensor, u: Tensor) -> Tensor:
        return self._missing("transport", x, y, u)

    def _project_tangent(self, x: Tensor, u: Tensor) -> Tensor:
        return self._missing("project_tangent", x, u)

    def _project(self, x: Tensor) -> Tensor:
        return self._missing("project", x)

    def _retract(self, x: Tensor, u: Tensor) -> Tensor:
        return self._missing("retract", x, u)

    def _inverse_retract(self, x: Tensor, y: Tensor) -> Tensor:
        return self._missing("inverse_retract", x, y)

    def _injectivity_radius(self, x: Tensor) -> Tensor:
        return self._missing("injectivity_radius", x)

    def _random_point(self, batch: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        return self._missing("random_point", batch, generator, dtype)

    def _random_tangent(self, x: Tensor, generator: torch.Generator) -> Tensor:
        return self._missing("random_tangent", x, generator)

    def _gradient(self, x: Tensor, derivative: Tensor) -> Tensor:
        """Compute the gradient for a metric that equals the dot product of coordinates."""
        return self._project_tangent(x, derivative)

    def _invariant(self, x: Tensor) -> Tensor:
        return x

    def _missing(self, formula: str, *arguments: Any) -> Tensor:
        """Raise `NotImplementedError`, because the class does not implement an operation (`formula`).

        Classes that combine or wrap other manifolds override this method. They then call the operation of those
        manifolds.
        """
        raise self._not_implemented(formula)

    def _check(
        self, points: NamedTensors, *, tangents: NamedTensors | None = None, vectors: NamedTensors | None = None
    ) -> None:
        """Check that the arguments of a method have valid shapes and the same dtype and device.

        Args:
            points: the points by name.
            tangents: the tangents at the point with the name "x", by name.
            vectors: other vectors with the shape of a point, by name.

        Raises:
            ArgumentError: if an argument is invalid. The message starts with its name.
        """
        # The compiler of torch 2.6 does not support the union operator of dicts.
        tensors = {**points, **(tangents or {}), **(vectors or {})}
        first = next(iter(tensors.values()))
        axes = self.axes
        for name, tensor in tensors.items():
            check_shape(name, tensor, *axes, batch=True)
            if tensor.device != first.device or tensor.dtype != first.dtype:
                expected = f"{first.dtype} on {first.device}"
                given = f"{tensor.dtype} on {tensor.device}"
                raise ArgumentError(f"{name}: expected {expected} as the other arguments, got {given}")

    def _not_implemented(self, primitive: str) -> NotImplementedError:
        return NotImplementedError(f"{self} has no {primitive}")


def check_not_model(name: str, point: object) -> None:
    """Check that an argument is a point, and not a module or a state dict.

    Args:
        name: the name of the argument.
        point: the value of the argument.

    Raises:
        ArgumentError: if the argument is a model. The message suggests the call that returns its point.

    Example:
        >>> check_not_model("end", torch.nn.Linear(2, 3))
        Traceback (most recent call last):
            ...
        manifoldagg.errors.ArgumentError: end: expected a point, got Linear with 9 parameters; write space.point(model)
    """
    if isinstance(point, torch.nn.Module | Mapping):
        raise ArgumentError(f"{name}: expected a point, got {short_repr(point)}; write space.point(model)")


def check_is_manifold(space: object, hint: str = "") -> None:
    """Check that `space` is a manifold.

    Args:
        space: the value to check.
        hint: the code that the message suggests for a module or a state dict. The default is a call that returns its
            space.

    Raises:
        ArgumentError: if `space` is not a manifold.
    """
    if isinstance(space, Manifold):
        return
    if isinstance(space, torch.nn.Module | Mapping):  # its representation would contain all layers
        constructor = "of(model)" if isinstance(space, torch.nn.Module) else "of_state_dict(model)"
        given = f"{type(space).__name__}: write {hint or f'ParameterSpace.{constructor}'}"
    else:
        given = short_repr(space)
    raise ArgumentError(f"space: expected a Manifold, got {given}")
