"""Products of named spaces, whose points are stored in one tensor."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from manifoldagg._validation import short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds.delegate import Composite
from manifoldagg.manifolds.manifold import Leaf, Manifold, Point, Scalar, Tangent

__all__ = ["Product"]


@dataclass(frozen=True, init=False)
class Product(Composite):
    r"""The product $M_1 \times \dots \times M_k$ of several manifolds, with the product metric. Each factor has a name.

    A point is one tensor (*batch, P), in which the flattened points of all factors are concatenated. Operations such as
    `exp` and `log` are computed for each factor separately. Inner products are summed over the factors in float64, and
    the injectivity radius is the smallest radius of a factor:

    $$\langle u, v \rangle_x = \sum_i \langle u_i, v_i \rangle_{x_i}, \qquad
      \operatorname{inj}(x) = \min_i \operatorname{inj}(x_i).$$

    Properties of the product follow from the properties of its factors:

    - The product supports an operation, such as `exp`, if all factors support it.
    - The product is `flat` or `symmetric` if all factors are.
    - The logarithm is defined if, in each factor, the distance of the two points is less than the injectivity radius.

    Args:
        factors: a mapping from names to spaces, or (name, space) pairs, in the order of a point.

    Raises:
        ArgumentError: if `factors` is empty, a name is not a string, is empty or is repeated, or a space is not a
            `Manifold`.

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Flat, Sphere
        >>> space = Product({"direction": Sphere(2), "offset": Flat(1)})
        >>> x, y = torch.tensor([1.0, 0.0, 5.0]), torch.tensor([0.0, 1.0, 7.0])
        >>> space.split(space.log(x, y))
        {'direction': tensor([0.0000, 1.5708]), 'offset': tensor([2.])}
    """

    factors: tuple[tuple[str, Manifold], ...]

    def __init__(self, factors: Mapping[str, Manifold] | tuple[tuple[str, Manifold], ...]) -> None:
        # A dict is not hashable, so the factors are stored as a tuple.
        pairs = tuple(factors.items()) if isinstance(factors, Mapping) else factors
        object.__setattr__(self, "factors", _check_factors(pairs))

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(self._sizes),)

    @property
    def spaces(self) -> tuple[Manifold, ...]:
        return tuple(space for _, space in self.factors)

    def split(self, x: Point) -> dict[str, Tensor]:
        """Return the factors of points or tangents by name, as views (*batch, *shape of the factor).

        Raises:
            ArgumentError: if the trailing shape of `x` is not (P,).
        """
        self._check({"x": x})
        return dict(zip((name for name, _ in self.factors), self._split(x), strict=True))

    def join(self, parts: Mapping[str, Tensor]) -> Point:
        """Concatenate one point of each factor into a point (*batch, P) of the product.

        The keys of `parts` are the names of the factors. Tangents are concatenated in the same way. The batch axes of
        all parts are broadcast. This method is the inverse of `split`.

        Raises:
            ArgumentError: if a name is missing or superfluous, or a factor does not have the shape of its space.
        """
        unmatched = sorted(map(str, parts.keys() ^ {name for name, _ in self.factors}))
        if unmatched:
            expected = ", ".join(name for name, _ in self.factors)
            raise ArgumentError(f"parts: expected {expected}; missing or extra: {', '.join(unmatched)}")
        first = next(iter(parts.values()))
        for name, space in self.factors:
            space._check({name: parts[name]})
            if (parts[name].dtype, parts[name].device) != (first.dtype, first.device):
                given = f"{parts[name].dtype} on {parts[name].device}"
                raise ArgumentError(f"{name}: expected {first.dtype} on {first.device} as the other parts, got {given}")
        return self._join([parts[name] for name, _ in self.factors])

    def _inner(self, x: Point, u: Tangent, v: Tangent) -> Scalar:
        # The terms are added in float64, and only the sum is rounded.
        return reduce(torch.add, self._map_leaves("_inner", x.double(), u.double(), v.double())).to(u.dtype)

    def _missing(self, formula: str, *arguments: Any) -> Tensor:
        return self._join(self._map_leaves(f"_{formula}", *arguments))

    def _injectivity_radius(self, x: Point) -> Scalar:
        # A geodesic of the product is a shortest path as long as each of its components is a shortest path.
        return reduce(torch.minimum, self._map_leaves("_injectivity_radius", x))

    def _random_point(self, batch: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Point:
        return self._join([space._random_point(batch, generator, dtype) for space in self.spaces])

    def _random_tangent(self, x: Point, generator: torch.Generator) -> Tangent:
        pairs = zip(self.spaces, self._split(x), strict=True)
        return self._join([space._random_tangent(part, generator) for space, part in pairs])

    def _gradient(self, x: Point, derivative: Tangent) -> Tangent:
        return self._join(self._map_leaves("_gradient", x, derivative))

    def _invariant(self, x: Point) -> Tensor:
        return torch.cat([part.flatten(x.ndim - 1) for part in self._map_leaves("_invariant", x)], -1)

    def leaves(self, x: Tensor) -> tuple[Leaf, ...]:
        found = []
        start = 0
        for (name, space), size, part in zip(self.factors, self._sizes, self._split(x), strict=True):
            # The slices of nested leaves refer to the part of this factor, so they are shifted to the whole point.
            for leaf in space.leaves(part):
                whole = f"{name}.{leaf.name}" if leaf.name else name
                place = slice(start + leaf.part.start, start + leaf.part.stop)
                found.append(Leaf(whole, leaf.space, place, leaf.storage_dtype))
            start += size
        return tuple(found)

    @property
    def _sizes(self) -> list[int]:
        return [math.prod(space.shape) for space in self.spaces]

    def _split(self, x: Tensor) -> list[Tensor]:
        pieces = zip(self.spaces, x.split(self._sizes, -1), strict=True)
        return [piece.view(*x.shape[:-1], *space.shape) for space, piece in pieces]

    def _join(self, parts: Sequence[Tensor]) -> Tensor:
        pairs = list(zip(self.spaces, parts, strict=True))
        # Factors may have fewer batch axes than others, for example a constant point.
        batch = torch.broadcast_shapes(*(part.shape[: part.ndim - len(space.shape)] for space, part in pairs))
        return torch.cat([part.expand(*batch, *space.shape).flatten(len(batch)) for space, part in pairs], -1)

    def _map_leaves(self, formula: str, *tensors: Tensor) -> list[Tensor]:
        """Apply a formula of each factor to the parts of the tensors that belong to this factor."""
        parts = zip(*map(self._split, tensors), strict=True)
        return [getattr(space, formula)(*own) for space, own in zip(self.spaces, parts, strict=True)]


def _check_factors(factors: object) -> tuple[tuple[str, Manifold], ...]:
    """Check that `factors` are (name, space) pairs with distinct names. Return the pairs."""
    if not isinstance(factors, tuple) or not factors:
        expected = "a mapping from names to spaces or a tuple of (name, space) pairs, not empty"
        raise ArgumentError(f"factors: expected {expected}; got {short_repr(factors)}")
    names = set()
    for pair in factors:
        match pair:
            case (str(name), Manifold()) if name and name not in names:
                names.add(name)
            case _:
                expected = "pairs of a new, non-empty name and a space, such as ('direction', Sphere(3))"
                raise ArgumentError(f"factors: expected {expected}; got {short_repr(pair)}")
    return tuple((name, space) for name, space in factors)
