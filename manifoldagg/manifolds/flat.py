"""Euclidean space, the space of all parameters without a manifold of their own."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from manifoldagg._validation import check_count
from manifoldagg.manifolds.embedded import Embedded
from manifoldagg.manifolds.manifold import PRIMITIVES, Point, Scalar, Tangent

__all__ = ["Flat"]


@dataclass(frozen=True)
class Flat(Embedded):
    r"""Euclidean space $\mathbb{R}^n$ with the dot product as its metric.

    The exponential map is addition, the logarithm is subtraction, and parallel transport is the identity.

    Args:
        n: the dimension.

    Raises:
        ArgumentError: if `n` is not an integer >= 0.

    Example:
        >>> import torch
        >>> space = Flat(2)
        >>> space.log(torch.tensor([1.0, 1.0]), torch.tensor([4.0, 5.0]))
        tensor([3., 4.])
    """

    n: int
    flat: ClassVar[bool] = True
    symmetric: ClassVar[bool] = True
    capabilities: ClassVar[frozenset[str]] = PRIMITIVES

    def __post_init__(self) -> None:
        check_count("n", self.n, at_least=0)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return (self.n,)

    def _exp(self, x: Point, u: Tangent) -> Point:
        return x + u

    def _log(self, x: Point, y: Point) -> Tangent:
        return y - x

    def _transport(self, x: Point, y: Point, u: Tangent) -> Tangent:
        # The transport is the identity, but the batch axes of the three arguments are still broadcast.
        return u.expand(torch.broadcast_shapes(x.shape, y.shape, u.shape))

    def _project_tangent(self, x: Point, u: Tangent) -> Tangent:
        return u

    def _project(self, x: Point) -> Point:
        return x

    def _retract(self, x: Point, u: Tangent) -> Point:
        return self._exp(x, u)

    def _inverse_retract(self, x: Point, y: Point) -> Tangent:
        return self._log(x, y)

    def _injectivity_radius(self, x: Point) -> Scalar:
        return x.new_full(x.shape[: x.ndim - len(self.shape)], math.inf)
