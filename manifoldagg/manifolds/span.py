"""Spans of points of flat and spherical leaves: a mean is computed by coefficients and a Gram matrix."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from manifoldagg.kernels import combine, gram
from manifoldagg.manifolds.manifold import Manifold, Point, Scalar, Tangent
from manifoldagg.manifolds.power import Power
from manifoldagg.manifolds.smooth import angle_per_sine, cos_of_square, sinc_of_square
from manifoldagg.manifolds.sphere import Sphere

__all__ = ["Span"]

MAX_NORM_RATIO = 2.0
"""A factor by which norms may miss 1: their squares are sums about that of one row, and keep their digits so."""


@dataclass(frozen=True, eq=False)
class Span:
    r"""The span of k points of a space of flat or sphere leaves, in rows $p_h$ and $p_j - p_h$, $h$ the `origin`.

    The difference of two near points keeps its digits so, which their cosine would lose.

    Args:
        rows: the points (P,), as they are given.
        origin: $h$.
        lengths: of the segments, one for each sphere and for each run of flat entries.
        tolerances: by how much a model may miss the sphere that a segment is; NaN where it is flat.
        sphere_grams: Gram matrices (S', k, k) of the segments that are spheres, row and column 0 being $p_h$ and the
            others in the order of the points.
    """

    rows: Sequence[Float[Tensor, " P"]]
    origin: int
    lengths: tuple[int, ...]
    tolerances: Float64[Tensor, " S"]
    sphere_grams: Float64[Tensor, "R k k"]

    @staticmethod
    def of(space: Manifold, rows: Sequence[Float[Tensor, " P"]], start: int) -> "Span | None":
        r"""Return the span of flattened points of a space, or `None` if the leaves do not allow it or it does not pay.

        It is no gain where a sphere has fewer coordinates than there are points, and no help where a norm is far from
        1, or not finite, or where points of a sphere are more than a right angle apart: squares of coefficients c are
        rounded by $c^2 \epsilon$, and between points that are nearly opposite a mean has coefficients without bound.
        """
        lengths: list[int] = []
        tolerances: list[float] = []
        for leaf in space.leaves(rows[0].view(space.shape)):
            within = leaf.space
            size = leaf.part.stop - leaf.part.start
            while isinstance(within, Power):
                within = within.space
            if within.flat:
                if tolerances and math.isnan(tolerances[-1]):
                    lengths[-1] += size
                else:
                    lengths.append(size)
                    tolerances.append(math.nan)
            # Of a subclass the formulas may be others.
            elif type(within) is Sphere and within.n >= len(rows):
                lengths += [within.n] * (size // within.n)
                tolerances += [math.sqrt(torch.finfo(leaf.storage_dtype or rows[0].dtype).eps)] * (size // within.n)
            else:
                return None
        allowed = torch.tensor(tolerances, dtype=torch.float64, device="cpu")
        found = Span(rows, start, tuple(lengths), allowed, allowed.new_zeros(0, len(rows), len(rows)))
        if found.is_flat:
            return found
        inner = gram(found.plus, minus=found.minus, segments=lengths)
        # A row of a flat leaf may be too long for its square; what is not finite is looked at by others.
        if not bool(inner.isfinite().all()):
            return None
        found = Span(rows, start, found.lengths, allowed, inner[~allowed.isnan()])
        near = (
            (found.cosines >= 0).all() & (found.norms > 1 / MAX_NORM_RATIO).all() & (found.norms < MAX_NORM_RATIO).all()
        )
        return found if bool(near) else None

    @property
    def is_flat(self) -> bool:
        """Whether every leaf is flat."""
        return bool(self.tolerances.isnan().all())

    @property
    def lies_on_space(self) -> bool:
        """Whether every point is known to be finite and on its spheres."""
        allowed = self.tolerances[~self.tolerances.isnan()]
        return not self.is_flat and bool(((self.norms - 1).abs() <= allowed).all())

    @cached_property
    def order(self) -> list[int]:
        """The points in the order of the rows: $h$ first."""
        return [self.origin, *(i for i in range(len(self.rows)) if i != self.origin)]

    @property
    def plus(self) -> list[Tensor]:
        """The minuends of the rows."""
        return [self.rows[i] for i in self.order]

    @property
    def minus(self) -> list[Tensor | None]:
        """The subtrahends of the rows."""
        return [None, *[self.rows[self.origin]] * (len(self.rows) - 1)]

    @cached_property
    def spheres(self) -> "_Spheres":
        """The product of the spheres, in coefficients."""
        return _Spheres(self.sphere_grams)

    @cached_property
    def norms(self) -> Float64[Tensor, "k R"]:
        """The norms of the points on each sphere, in the order of the rows."""
        return self.spheres.square(self.point_coefficients).squeeze(-1).sqrt()

    @property
    def cosines(self) -> Float64[Tensor, "R k k"]:
        """The inner products of the points on each sphere, in the order of the rows."""
        corners = self.point_coefficients.transpose(0, 1)
        return corners @ self.sphere_grams @ corners.mT

    @property
    def point_coefficients(self) -> Float64[Tensor, "k R k"]:
        """The coefficients of the points on each sphere."""
        k = len(self.rows)
        corners = torch.eye(k, dtype=torch.float64, device="cpu")
        corners[:, 0] = 1.0
        return corners.unsqueeze(1).expand(k, len(self.sphere_grams), k)

    def point(self, weights: Float64[Tensor, " k"], spherical: Float64[Tensor, "R k"]) -> Float[Tensor, " P"]:
        """Return the weighted mean on flat leaves, and the point of the coefficients on spheres, rounded once."""
        if self.is_flat:
            # Of the points themselves: no difference overflows where no point does.
            return combine(None, self.rows, weights)
        lines = weights[self.order].expand(len(self.lengths), -1).clone()
        lines[:, 0] = 1.0
        lines[~self.tolerances.isnan()] = spherical
        return combine(None, self.plus, lines, minus=self.minus, segments=self.lengths)


@dataclass(frozen=True, eq=False)
class _Spheres(Manifold):
    r"""The product of R unit spheres of any dimension, each seen from k vectors that span what is looked at of it.

    A point (R, k) holds the coefficients on these vectors, and $\langle a, b \rangle = a^\top B\, b$. The formulas are
    those of [`Sphere`][manifoldagg.manifolds.Sphere].

    Args:
        products: B, the Gram matrices (R, k, k).
    """

    products: Float64[Tensor, "R k k"]
    capabilities: ClassVar[frozenset[str]] = frozenset({"inner", "exp", "log", "project"})

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.products.shape[:2])

    def dot(self, u: Tensor, v: Tensor) -> Tensor:
        """The inner product on each sphere (*batch, R, 1)."""
        return ((u.unsqueeze(-2) @ self.products).squeeze(-2) * v).sum(-1, keepdim=True)

    def square(self, u: Tensor) -> Tensor:
        """The squared length on each sphere (*batch, R, 1), which rounding can leave slightly below zero."""
        return self.dot(u, u).clamp(min=0)

    def _inner(self, x: Point, u: Tangent, v: Tangent) -> Scalar:
        return self.dot(u, v).sum((-2, -1))

    def _exp(self, x: Point, u: Tangent) -> Point:
        square = self.square(u)
        # By how much a point misses the sphere would nearly double with each step of a mean's iteration.
        return self._project(cos_of_square(square) * x + sinc_of_square(square) * u)

    def _log(self, x: Point, y: Point) -> Tangent:
        chord = y - x
        across = chord - self.dot(x, chord) * x
        return angle_per_sine(self.square(across), self.dot(x, y)) * across

    def _project(self, x: Point) -> Point:
        return x / self.square(x).sqrt()
