"""Products of named spaces: one tensor that holds a point of each."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds.manifold import Manifold, Point, Scalar, Tangent


@dataclass(frozen=True, init=False)
class Product(Manifold):
    r"""The product $M_1 \times \dots \times M_k$ of named leaves, with the product metric.

    A point is one tensor (*batch, P): the flattened points of the leaves, one after the other, $P$ the sum of their
    sizes. Every primitive acts leaf by leaf on views, and

    $$\langle u, v \rangle_x = \sum_i \langle u_i, v_i \rangle_{x_i}, \qquad
      \operatorname{inj}(x) = \min_i \operatorname{inj}(x_i),$$

    summed in float64. `capabilities` are those that all leaves have; the product is `flat` or `symmetric` where all
    leaves are. A log needs each leaf within its own radius only.

    Args:
        factors: name to space, or (name, space) pairs; their order is the order in a point.

    Raises:
        ArgumentError: if there is no factor, a name is no string, empty or repeated, or a space is no `Manifold`.

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
        pairs = tuple(factors.items()) if isinstance(factors, Mapping) else factors
        object.__setattr__(self, "factors", _checked(pairs))

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(self._sizes),)

    @property
    def capabilities(self) -> frozenset[str]:  # type: ignore[override]  # a property of the leaves, not of the class
        """What every leaf can do."""
        return reduce(frozenset.intersection, (space.capabilities for _, space in self.factors))

    @property
    def flat(self) -> bool:  # type: ignore[override]  # as above
        """Whether every leaf is."""
        return all(space.flat for _, space in self.factors)

    @property
    def symmetric(self) -> bool:  # type: ignore[override]  # as above
        """Whether every leaf is."""
        return all(space.symmetric for _, space in self.factors)

    def split(self, x: Point) -> dict[str, Tensor]:
        """The leaves of points or tangents, by name: views (*batch, *leaf shape).

        Raises:
            ArgumentError: if `x` has another trailing shape than (P,).
        """
        self._check(x=x)
        pieces = x.split(self._sizes, -1)
        return {
            name: piece.view(*x.shape[:-1], *space.shape)
            for (name, space), piece in zip(self.factors, pieces, strict=True)
        }

    def join(self, parts: Mapping[str, Tensor]) -> Point:
        """The points or tangents (*batch, P) with these leaves: the inverse of `split`; batches are broadcast.

        Raises:
            ArgumentError: if names are missing or extra, naming them, or a leaf does not have its space's shape.
        """
        odd = sorted(map(str, parts.keys() ^ {name for name, _ in self.factors}))
        if odd:
            raise ArgumentError(f"parts: missing or extra leaves: {', '.join(odd)}")
        first, batches = next(iter(parts.values())), []
        for name, space in self.factors:
            space._check(**{name: parts[name]})
            if (parts[name].dtype, parts[name].device) != (first.dtype, first.device):
                raise ArgumentError(f"{name}: expected {first.dtype} on {first.device} as the other leaves")
            batches.append(parts[name].shape[: parts[name].ndim - len(space.shape)])
        batch = torch.broadcast_shapes(*batches)
        return torch.cat(
            [
                parts[name].expand(*batch, *space.shape).reshape(*batch, size)
                for (name, space), size in zip(self.factors, self._sizes, strict=True)
            ],
            -1,
        )

    def inner(self, x: Point, u: Tangent, v: Tangent) -> Scalar:
        self._check(x=x, u=u, v=v)
        parts = self._leafwise(Manifold.inner, x.double(), u.double(), v.double())
        return reduce(torch.add, parts.values()).to(u.dtype)

    def exp(self, x: Point, u: Tangent) -> Point:
        self._check(x=x, u=u)
        return self.join(self._leafwise(Manifold.exp, x, u))

    def log(self, x: Point, y: Point) -> Tangent:
        self._check(x=x, y=y)
        return self.join(self._leafwise(Manifold.log, x, y))

    def transport(self, x: Point, y: Point, u: Tangent) -> Tangent:
        self._check(x=x, y=y, u=u)
        return self.join(self._leafwise(Manifold.transport, x, y, u))

    def project_tangent(self, x: Point, u: Tangent) -> Tangent:
        self._check(x=x, u=u)
        return self.join(self._leafwise(Manifold.project_tangent, x, u))

    def project(self, x: Point) -> Point:
        self._check(x=x)
        return self.join(self._leafwise(Manifold.project, x))

    def retract(self, x: Point, u: Tangent) -> Point:
        self._check(x=x, u=u)
        return self.join(self._leafwise(Manifold.retract, x, u))

    def injectivity_radius(self, x: Point) -> Scalar:
        self._check(x=x)
        return reduce(torch.minimum, self._leafwise(Manifold.injectivity_radius, x).values())

    def random_point(self, *batch: int, generator: torch.Generator, dtype: torch.dtype | None = None) -> Point:
        return self.join(
            {name: space.random_point(*batch, generator=generator, dtype=dtype) for name, space in self.factors}
        )

    def random_tangent(self, x: Point, generator: torch.Generator) -> Tangent:
        parts = self.split(x)
        return self.join({name: space.random_tangent(parts[name], generator) for name, space in self.factors})

    def gradient(self, x: Point, derivative: Tangent) -> Tangent:
        self._check(x=x, derivative=derivative)
        return self.join(self._leafwise(Manifold.gradient, x, derivative))

    def invariant(self, x: Point) -> Tensor:
        batch = x.shape[:-1]
        return torch.cat([part.flatten(len(batch)) for part in self._leafwise(Manifold.invariant, x).values()], -1)

    def leaves(self, x: Tensor) -> Iterator[tuple[str, Manifold, Tensor]]:
        parts = self.split(x)
        for name, space in self.factors:
            for inner, leaf, part in space.leaves(parts[name]):
                yield f"{name}.{inner}" if inner else name, leaf, part

    @property
    def _sizes(self) -> list[int]:
        return [math.prod(space.shape) for _, space in self.factors]

    def _leafwise(self, primitive: Callable[..., Tensor], *tensors: Tensor) -> dict[str, Tensor]:
        """What each leaf makes of its parts of the tensors, by a method of the same name."""
        parts = [self.split(tensor) for tensor in tensors]
        return {
            name: getattr(space, primitive.__name__)(*(part[name] for part in parts)) for name, space in self.factors
        }


def _checked(factors: object) -> tuple[tuple[str, Manifold], ...]:
    """`factors` as (name, space) pairs with distinct names."""
    if not isinstance(factors, tuple) or not factors:
        raise ArgumentError(f"factors: expected a mapping or a tuple with at least one space, got {factors!r}")
    names = set()
    for pair in factors:
        match pair:
            case (str(name), Manifold()) if name and name not in names:
                names.add(name)
            case _:
                raise ArgumentError(f"factors: expected pairs of a new, non-empty name and a space, got {pair!r}")
    return tuple((name, space) for name, space in factors)
