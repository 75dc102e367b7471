"""Base classes for manifolds that are built from other manifolds.

`Composite` is the base class of products, which consist of several manifolds. `Delegate` is the base class of powers
and wrappers, which pass their computations on to one other manifold.
"""

import abc
from typing import Any

from torch import Tensor

from manifoldagg.manifolds.manifold import Leaf, Manifold, Point, Tangent

__all__ = ["Composite", "Delegate"]


class Composite(Manifold):
    """Base class for manifolds that consist of several component manifolds, the `spaces`.

    A composite manifold supports an operation, such as `exp`, if all its components support it.
    """

    @property
    @abc.abstractmethod
    def spaces(self) -> tuple[Manifold, ...]:
        """The component spaces."""

    @property
    def capabilities(self) -> frozenset[str]:  # type: ignore[override]  # a property of the space, not of the class
        return frozenset.intersection(*(space.capabilities for space in self.spaces))

    @property
    def flat(self) -> bool:  # type: ignore[override]  # as above
        return all(space.flat for space in self.spaces)

    @property
    def ambient(self) -> bool:  # type: ignore[override]  # as above
        """Whether every component space is ambient or flat, and not all are flat."""
        return not self.flat and all(space.flat or space.ambient for space in self.spaces)

    @property
    def symmetric(self) -> bool:  # type: ignore[override]  # as above
        return all(space.symmetric for space in self.spaces)


class Delegate(Composite):
    """Base class for manifolds that delegate their computations to another manifold, the `base_space`.

    A subclass overrides only those formulas that differ from the formulas of the base space.
    """

    @property
    @abc.abstractmethod
    def base_space(self) -> Manifold:
        """The space to which this space delegates."""

    @property
    def spaces(self) -> tuple[Manifold, ...]:
        return (self.base_space,)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base_space.shape

    def _missing(self, formula: str, *arguments: Any) -> Tensor:
        # `Manifold` calls this method for every formula that a class does not define, so all formulas are delegated
        # here.
        value: Tensor = getattr(self.base_space, f"_{formula}")(*arguments)
        return value

    # `Manifold` has defaults for the next two formulas, so it does not call `_missing` for them.
    def _gradient(self, x: Point, derivative: Tangent) -> Tangent:
        return self.base_space._gradient(x, derivative)

    def _invariant(self, x: Point) -> Tensor:
        return self.base_space._invariant(x)

    def leaves(self, x: Tensor) -> tuple[Leaf, ...]:
        return self.base_space.leaves(x)
