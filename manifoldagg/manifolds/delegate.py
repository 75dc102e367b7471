"""A space that does what another does, but for what it says itself."""

import abc
from collections.abc import Iterator

import torch
from torch import Tensor

from manifoldagg.manifolds.manifold import Manifold, Point, Scalar, Tangent


class Delegate(Manifold):
    """Checks shapes at its door and hands every primitive, and what the space declares, to the space `inside`."""

    @property
    @abc.abstractmethod
    def inside(self) -> Manifold:
        """The space that is asked."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.inside.shape

    @property
    def capabilities(self) -> frozenset[str]:  # type: ignore[override]  # a property of the space, not of the class
        """What the space inside can do."""
        return self.inside.capabilities

    @property
    def flat(self) -> bool:  # type: ignore[override]  # as above
        """Whether the space inside is."""
        return self.inside.flat

    @property
    def symmetric(self) -> bool:  # type: ignore[override]  # as above
        """Whether the space inside is."""
        return self.inside.symmetric

    def inner(self, x: Point, u: Tangent, v: Tangent) -> Scalar:
        self._check(x=x, u=u, v=v)
        return self.inside.inner(x, u, v)

    def exp(self, x: Point, u: Tangent) -> Point:
        self._check(x=x, u=u)
        return self.inside.exp(x, u)

    def log(self, x: Point, y: Point) -> Tangent:
        self._check(x=x, y=y)
        return self.inside.log(x, y)

    def transport(self, x: Point, y: Point, u: Tangent) -> Tangent:
        self._check(x=x, y=y, u=u)
        return self.inside.transport(x, y, u)

    def project_tangent(self, x: Point, u: Tangent) -> Tangent:
        self._check(x=x, u=u)
        return self.inside.project_tangent(x, u)

    def project(self, x: Point) -> Point:
        self._check(x=x)
        return self.inside.project(x)

    def retract(self, x: Point, u: Tangent) -> Point:
        self._check(x=x, u=u)
        return self.inside.retract(x, u)

    def injectivity_radius(self, x: Point) -> Scalar:
        self._check(x=x)
        return self.inside.injectivity_radius(x)

    def random_point(self, *batch: int, generator: torch.Generator, dtype: torch.dtype | None = None) -> Point:
        return self.inside.random_point(*batch, generator=generator, dtype=dtype)

    def random_tangent(self, x: Point, generator: torch.Generator) -> Tangent:
        self._check(x=x)
        return self.inside.random_tangent(x, generator)

    def gradient(self, x: Point, derivative: Tangent) -> Tangent:
        self._check(x=x, derivative=derivative)
        return self.inside.gradient(x, derivative)

    def invariant(self, x: Point) -> Tensor:
        return self.inside.invariant(x)

    def leaves(self, x: Tensor) -> Iterator[tuple[str, Manifold, Tensor]]:
        return self.inside.leaves(x)
