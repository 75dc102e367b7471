"""A space that does what another does, but for what it says itself."""

import abc

import torch
from torch import Tensor

from manifoldagg.manifolds.manifold import Leaf, Manifold, Point, Scalar, Tangent

__all__ = ["Delegate"]


class Delegate(Manifold):
    """Hands every formula, and what the space declares, to the space `inside`."""

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

    def _inner(self, x: Point, u: Tangent, v: Tangent) -> Scalar:
        return self.inside._inner(x, u, v)

    def _exp(self, x: Point, u: Tangent) -> Point:
        return self.inside._exp(x, u)

    def _log(self, x: Point, y: Point) -> Tangent:
        return self.inside._log(x, y)

    def _transport(self, x: Point, y: Point, u: Tangent) -> Tangent:
        return self.inside._transport(x, y, u)

    def _project_tangent(self, x: Point, u: Tangent) -> Tangent:
        return self.inside._project_tangent(x, u)

    def _project(self, x: Point) -> Point:
        return self.inside._project(x)

    def _retract(self, x: Point, u: Tangent) -> Point:
        return self.inside._retract(x, u)

    def _injectivity_radius(self, x: Point) -> Scalar:
        return self.inside._injectivity_radius(x)

    def _random_point(self, batch: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Point:
        return self.inside._random_point(batch, generator, dtype)

    def _random_tangent(self, x: Point, generator: torch.Generator) -> Tangent:
        return self.inside._random_tangent(x, generator)

    def _gradient(self, x: Point, derivative: Tangent) -> Tangent:
        return self.inside._gradient(x, derivative)

    def _invariant(self, x: Point) -> Tensor:
        return self.inside._invariant(x)

    def leaves(self, x: Tensor) -> tuple[Leaf, ...]:
        return self.inside.leaves(x)
