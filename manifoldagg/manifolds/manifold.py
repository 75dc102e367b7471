"""The manifold base class: a shape, a few primitives, and the declaration of the supported capabilities."""

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
"""The names that a space can declare in its `capabilities`."""

CHECKED_METHODS = PRIMITIVES | {"gradient", "invariant"}
"""The methods that check their tensors, and call the formula of the same name with an underscore."""


@dataclass(frozen=True)
class Leaf:
    """A named part of the points of a space, with its own space.

    Attributes:
        name: empty where the part is the whole.
        space: of the part.
        part: its slice of a flattened point.
        storage_dtype: the dtype in which a model keeps it, where that is narrower than a point's.
    """

    name: str
    space: "Manifold"
    part: slice
    storage_dtype: torch.dtype | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.space}" if self.name else str(self.space)

    def select(self, points: Tensor) -> Tensor:
        """Return the part of points or tangents (*batch, *shape): a view (*batch, *leaf.space.shape)."""
        return points[..., self.part].view(*points.shape[:-1], *self.space.shape) if self.name else points


class Manifold(abc.ABC):
    r"""A Riemannian manifold $M$ whose points are tensors of shape `(*batch, *shape)`.

    The methods without an underscore check shapes, dtypes and devices, and call the formula of the same name with one:
    `exp` calls `_exp`. A space writes the formulas it can and names them in `capabilities`; the others raise
    `NotImplementedError` with the name of what is missing. Code that has checked its tensors calls the formulas.

    The names are theorems: $\exp$ is geodesic with
    $d\exp_x|_0 = \mathrm{id}$, $\log$ is its inverse inside the injectivity radius, `transport` is an
    isometry, `project_tangent` is idempotent and metric-orthogonal. What is less than that has another name:
    `retract` agrees with $\exp$ to second order only, and `inverse_retract` undoes it.

    `flat` says that points and tangents are added as vectors, `ambient` that points are added in a vector space that
    they lie in, from which `project` brings the sum back, `symmetric` that geodesic reflections are isometries, `open`
    that its points are an open set of their coordinates.
    A manifold is a frozen value: hashable, and equal by content.

    Raises:
        ArgumentError: where a class has a method of its own in place of its formula.
    """

    capabilities: ClassVar[frozenset[str]] = frozenset()
    flat: ClassVar[bool] = False
    ambient: ClassVar[bool] = False
    symmetric: ClassVar[bool] = False
    open: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in CHECKED_METHODS:
            if name in vars(cls) and f"_{name}" not in vars(cls):
                raise ArgumentError(
                    f"{cls.__name__}: write _{name}, which {name} calls once it has checked its tensors"
                )

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of one point; -1 for an axis of any length."""

    @property
    def axes(self) -> list[int | None]:
        """The shape of one point for `check_shape`: None for an axis of any length."""
        shape = self.shape
        return [None if n < 0 else n for n in shape] if -1 in shape else [*shape]

    def inner(self, x: Point, u: Tangent, v: Tangent) -> Scalar:
        r"""Compute $\langle u, v \rangle_x$, one number for each point: (*batch,)."""
        self._check({"x": x}, vectors={"u": u, "v": v})
        return self._inner(x, u, v)

    def exp(self, x: Point, u: Tangent) -> Point:
        r"""Compute $\exp_x u$, the point at time 1 of the geodesic from `x` with velocity `u`."""
        self._check({"x": x}, tangents={"u": u})
        return self._exp(x, u)

    def log(self, x: Point, y: Point) -> Tangent:
        r"""Compute $\log_x y$: the shortest tangent at `x` whose exponential is `y`."""
        self._check({"x": x, "y": y})
        return self._log(x, y)

    def transport(self, x: Point, y: Point, u: Tangent) -> Tangent:
        r"""Compute $P_{x \to y} u$: parallel transport along the geodesic from `x` to `y`, an isometry."""
        self._check({"x": x, "y": y}, tangents={"u": u})
        return self._transport(x, y, u)

    def project_tangent(self, x: Point, u: Tangent) -> Tangent:
        """Return the tangent at `x` nearest to `u`."""
        self._check({"x": x}, vectors={"u": u})
        return self._project_tangent(x, u)

    def project(self, x: Point) -> Point:
        """Return the point of the manifold nearest to `x`."""
        self._check({}, vectors={"x": x})
        return self._project(x)

    def retract(self, x: Point, u: Tangent) -> Point:
        r"""Compute a cheaper approximation of $\exp_x u$, with an error of third order in the length of `u`."""
        self._check({"x": x}, tangents={"u": u})
        return self._retract(x, u)

    def inverse_retract(self, x: Point, y: Point) -> Tangent:
        """Compute the tangent at `x` that `retract` maps to a near `y`, more cheaply than the log."""
        self._check({"x": x, "y": y})
        return self._inverse_retract(x, y)

    def injectivity_radius(self, x: Point) -> Scalar:
        """Return the radius around `x` within which the exponential map is one-to-one: (*batch,)."""
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
        r"""Return the tangent $g$ with $\langle g, v\rangle_x = e \cdot v$ for every tangent $v$, $e$ the derivative.

        $e$ is a derivative by coordinates.
        """
        self._check({"x": x}, vectors={"derivative": derivative})
        return self._gradient(x, derivative)

    def invariant(self, x: Point) -> Tensor:
        """Return a value shared by all representatives of a point: `x` itself, unless points are classes."""
        self._check({}, vectors={"x": x})
        return self._invariant(x)

    def leaves(self, x: Tensor) -> tuple["Leaf", ...]:
        """Return the named parts of points like `x` (*batch, *shape), in the order of storage.

        They are the tensors of a parameter space, the factors of a product, their own leaves where they are such; or
        the space itself, without a name.
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
        """The one of a metric that is the dot product of coordinates."""
        return self._project_tangent(x, derivative)

    def _invariant(self, x: Tensor) -> Tensor:
        return x

    def _missing(self, formula: str, *arguments: Any) -> Tensor:
        """What answers for a formula that the class has not written: here nobody, in a space made of others they."""
        raise self._not_implemented(formula)

    def _check(
        self, points: NamedTensors, *, tangents: NamedTensors | None = None, vectors: NamedTensors | None = None
    ) -> None:
        """Trailing shapes are the space's, dtypes and devices agree: of points, tangents at "x", any vectors."""
        # Written out: the compiler of torch 2.6 knows no union of dicts.
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
    """Check that an argument that expects a point is not a module or a state dict.

    Args:
        name: the name of the argument.
        point: the value of the argument.

    Raises:
        ArgumentError: if it is a model, with its type and size and the call that returns its point.

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
        space: what was given.
        hint: what to write in place of a module or a state dict, where it is no space of its parameters.

    Raises:
        ArgumentError: naming it; of a module or a state dict, with what to write.
    """
    if isinstance(space, Manifold):
        return
    if isinstance(space, torch.nn.Module | Mapping):  # which would say all its layers
        made = "of(model)" if isinstance(space, torch.nn.Module) else "of_state_dict(model)"
        told = f"{type(space).__name__}: write {hint or f'ParameterSpace.{made}'}"
    else:
        told = short_repr(space)
    raise ArgumentError(f"space: expected a Manifold, got {told}")
