"""Power manifolds, which are products of several copies of one manifold.

For example, if each row of an embedding table is a point of a hyperbolic space, the table is a point of a power of this
space.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from manifoldagg._validation import check_count, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds.delegate import Delegate
from manifoldagg.manifolds.manifold import Leaf, Manifold, Point, Scalar, Tangent, check_is_manifold

__all__ = ["Power", "factor_parts"]


@dataclass(frozen=True)
class Power(Delegate):
    r"""The power $M^k$, which consists of $k$ copies of one manifold $M$, with the product metric.

    The copies form an array of shape $(k_1, \dots, k_m)$, so that $k = k_1 \cdots k_m$. A point has the shape
    (*batch, *copies, *space.shape), and the primitives of $M$ treat the copies as batch axes. Inner products are summed
    over the copies, and the injectivity radius is the minimum over the copies:

    $$\langle u, v\rangle_x = \sum_i \langle u_i, v_i\rangle_{x_i}, \qquad
      \operatorname{inj}(x) = \min_i \operatorname{inj}(x_i).$$

    The logarithm $\log_x y$ is defined if, for each $i$, the distance from $x_i$ to $y_i$ is below the injectivity
    radius of $M$ at $x_i$.

    Args:
        space: the space of one copy.
        copies: the number of copies along each leading axis.

    Raises:
        ArgumentError: if `space` is not a manifold, or `copies` is not a tuple of positive integers.

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Sphere
        >>> rows = Power(Sphere(2), (3,))
        >>> rows.shape
        (3, 2)
        >>> x = torch.tensor([1.0, 0.0]).expand(3, 2)
        >>> u = torch.tensor([0.0, 1.0]).expand(3, 2)
        >>> rows.inner(x, u, u)
        tensor(3.)
    """

    space: Manifold
    copies: tuple[int, ...]

    def __post_init__(self) -> None:
        check_is_manifold(self.space)
        if not isinstance(self.copies, tuple) or not self.copies:
            raise ArgumentError(f"copies: expected a tuple of positive integers, got {short_repr(self.copies)}")
        for count in self.copies:
            check_count("copies", count)

    @property
    def base_space(self) -> Manifold:
        return self.space

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.copies, *self.space.shape)

    def _inner(self, x: Point, u: Tangent, v: Tangent) -> Scalar:
        # Thousands of copies are summed in float64, and the sum is rounded once.
        return self.space._inner(x.double(), u.double(), v.double()).sum(self._axes).to(u.dtype)

    def _injectivity_radius(self, x: Point) -> Scalar:
        return self.space._injectivity_radius(x).amin(self._axes)

    def _random_point(self, batch: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Point:
        return self.space._random_point((*batch, *self.copies), generator, dtype)

    def leaves(self, x: Tensor) -> tuple[Leaf, ...]:
        # The leaves of the space belong to one copy. A power is a leaf of its own.
        return Manifold.leaves(self, x)

    @property
    def _axes(self) -> tuple[int, ...]:
        return tuple(range(-len(self.copies), 0))


def factor_parts(space: Manifold, *tensors: Tensor) -> list[tuple[Leaf, list[Tensor]]]:
    """Split points or tangents (*batch, *shape) into the named parts (leaves) of a manifold.

    For example, the leaves of the parameter space of a model are its parameters. A leaf can consist of several points
    of one manifold, such as the rows of an embedding table. The function then returns these points as a batch, together
    with the manifold of one point.

    Returns:
        A list of pairs: a leaf, and its part of each tensor.

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Sphere
        >>> [(str(leaf), part.shape) for leaf, (part,) in factor_parts(Power(Sphere(2), (3,)), torch.zeros(5, 3, 2))]
        [('Sphere(n=2)', torch.Size([5, 3, 2]))]
    """
    found = []
    for leaf in space.leaves(tensors[0]):
        parts = [leaf.select(tensor) for tensor in tensors]
        if not isinstance(leaf.space, Power):
            found.append((leaf, parts))
            continue
        # The space of a copy can be a product or another power, so it is divided in the same way.
        for inner, below in factor_parts(leaf.space.space, *parts):
            name = ".".join(filter(None, (leaf.name, inner.name)))
            found.append((replace(inner, name=name, storage_dtype=leaf.storage_dtype or inner.storage_dtype), below))
    return found
