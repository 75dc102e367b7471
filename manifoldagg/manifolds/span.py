"""Karcher means on products of spheres and flat spaces, computed as linear combinations of the points.

A step of the iteration changes one coefficient for each point, instead of all coordinates of the mean. The points
themselves are read only twice: once for their inner products, and once for the mean.
"""

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
"""The maximum ratio of a norm to 1. Larger norms would make squared norms from the Gram matrix inaccurate."""


@dataclass(frozen=True, eq=False)
class Span:
    """The linear span of k points of a product of spheres and flat spaces.

    The basis consists of one point $p_h$, which the caller chooses, and of the differences $p_j - p_h$ for all other
    points. With differences, the distances between nearby points can be computed without cancellation.

    Args:
        rows: the points (P,).
        origin: the index $h$.
        lengths: the lengths of the segments. Each sphere and each run of flat entries is a segment.
        tolerances: the allowed deviation of a norm from 1 for each segment; NaN for a flat segment.
        sphere_grams: the Gram matrices (R, k, k) of the R spherical segments. Row and column 0 belong to $p_h$, and the
            others are in the order of the points.
    """

    rows: Sequence[Float[Tensor, " P"]]
    origin: int
    lengths: tuple[int, ...]
    tolerances: Float64[Tensor, " S"]
    sphere_grams: Float64[Tensor, "R k k"]

    @staticmethod
    def of(space: Manifold, rows: Sequence[Float[Tensor, " P"]], start: int) -> "Span | None":
        r"""Return the span of several points, or `None` if their mean cannot be computed efficiently in the span.

        The result is `None` in the following cases:

        - A factor of the manifold is neither flat nor a sphere.
        - A sphere has fewer coordinates than the number of points.
        - The norm of a point is not finite, or the norm of its part on a sphere is not between 0.5 and 2.
        - Two points of a sphere form an angle of more than $\pi/2$. This limit excludes almost antipodal points, whose
          mean would have large rounding errors.
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
                    # Adjacent flat leaves form one segment, because they need no inner products of their own.
                    lengths[-1] += size
                else:
                    lengths.append(size)
                    tolerances.append(math.nan)
            # The exact class is required, because a subclass may have other formulas.
            elif type(within) is Sphere and within.n >= len(rows):
                lengths += [within.n] * (size // within.n)
                tolerances += [math.sqrt(torch.finfo(leaf.storage_dtype or rows[0].dtype).eps)] * (size // within.n)
            else:
                return None
        allowed = torch.tensor(tolerances, dtype=torch.float64, device="cpu")
        found = Span(rows, start, tuple(lengths), allowed, allowed.new_zeros(0, len(rows), len(rows)))
        if found.is_flat:
            return found
        # One pass over the points computes all inner products that the iteration needs.
        inner = gram(found.plus, minus=found.minus, segments=lengths)
        # If the square of a flat segment overflows, the general algorithm computes the mean.
        if not bool(inner.isfinite().all()):
            return None
        found = Span(rows, start, found.lengths, allowed, inner[~allowed.isnan()])
        # With nonnegative cosines, no two points are almost antipodal, so the coefficients c of the mean stay bounded.
        # The rounding errors of the mean are proportional to c² times the machine epsilon.
        near = (
            (found.cosines >= 0).all() & (found.norms > 1 / MAX_NORM_RATIO).all() & (found.norms < MAX_NORM_RATIO).all()
        )
        return found if bool(near) else None

    @property
    def is_flat(self) -> bool:
        return bool(self.tolerances.isnan().all())

    @property
    def lies_on_space(self) -> bool:
        """Whether every point is finite and on its spheres; `False` for flat spaces."""
        allowed = self.tolerances[~self.tolerances.isnan()]
        return not self.is_flat and bool(((self.norms - 1).abs() <= allowed).all())

    @cached_property
    def order(self) -> list[int]:
        """The indices of the points in the order of the basis, with the origin first."""
        return [self.origin, *(i for i in range(len(self.rows)) if i != self.origin)]

    @property
    def plus(self) -> list[Tensor]:
        """The minuends of the basis vectors."""
        return [self.rows[i] for i in self.order]

    @property
    def minus(self) -> list[Tensor | None]:
        """The subtrahends of the basis vectors. `None` represents a row of zeros."""
        return [None, *[self.rows[self.origin]] * (len(self.rows) - 1)]

    @cached_property
    def spheres(self) -> "SpheresInSpan":
        """The product of the spheres, in the coordinates of the span."""
        return SpheresInSpan(self.sphere_grams)

    @cached_property
    def norms(self) -> Float64[Tensor, "k R"]:
        """The norms of the points on each sphere, in the order of the basis."""
        return self.spheres.square(self.point_coefficients).squeeze(-1).sqrt()

    @property
    def cosines(self) -> Float64[Tensor, "R k k"]:
        """The inner products of the points on each sphere, in the order of the basis."""
        corners = self.point_coefficients.transpose(0, 1)
        return corners @ self.sphere_grams @ corners.mT

    @property
    def point_coefficients(self) -> Float64[Tensor, "k R k"]:
        """The coefficients of the points on each sphere."""
        k = len(self.rows)
        corners = torch.eye(k, dtype=torch.float64, device="cpu")
        # Every point is the origin plus its own difference. The first row is the origin itself.
        corners[:, 0] = 1.0
        return corners.unsqueeze(1).expand(k, len(self.sphere_grams), k)

    def point(self, weights: Float64[Tensor, " k"], spherical: Float64[Tensor, "R k"]) -> Float[Tensor, " P"]:
        """Return the linear combination of the points with the given coefficients.

        Args:
            weights: the coefficients of the points on flat leaves. Their sum must be 1.
            spherical: the coefficients of the basis vectors on each sphere.
        """
        if self.is_flat:
            # The points themselves are combined, because differences of large points could overflow.
            return combine(None, self.rows, weights)
        # On a flat leaf, p_h + Σ w_j (p_j - p_h) is the weighted mean, because the weights sum to 1.
        coefficients = weights[self.order].expand(len(self.lengths), -1).clone()
        coefficients[:, 0] = 1.0
        coefficients[~self.tolerances.isnan()] = spherical
        return combine(None, self.plus, coefficients, minus=self.minus, segments=self.lengths)


@dataclass(frozen=True, eq=False)
class SpheresInSpan(Manifold):
    r"""The product of R unit spheres, whose points are linear combinations of fixed vectors.

    For each sphere, k vectors are fixed. A point is stored as the matrix (R, k) of its coefficients, with one row for
    each sphere. Let $B$ (k, k) be the Gram matrix of the k vectors of one sphere. The inner product of two linear
    combinations with the coefficients $a$ and $b$ is then $a^\top B\, b$. With this inner product, all formulas are the
    same as in [`Sphere`][manifoldagg.manifolds.Sphere].

    Args:
        products: the Gram matrices B of the vectors, (R, k, k).
    """

    products: Float64[Tensor, "R k k"]
    capabilities: ClassVar[frozenset[str]] = frozenset({"inner", "exp", "log", "project"})

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.products.shape[:2])

    def dot(self, u: Tensor, v: Tensor) -> Tensor:
        return ((u.unsqueeze(-2) @ self.products).squeeze(-2) * v).sum(-1, keepdim=True)

    def square(self, u: Tensor) -> Tensor:
        """Compute the squared norm of a tangent on each of R spheres, in the shape (*batch, R, 1)."""
        # Rounding errors can make a computed squared norm negative.
        return self.dot(u, u).clamp(min=0)

    def _inner(self, x: Point, u: Tangent, v: Tangent) -> Scalar:
        return self.dot(u, v).sum((-2, -1))

    def _exp(self, x: Point, u: Tangent) -> Point:
        square = self.square(u)
        # Without the projection, the distance from the sphere would almost double in each step of a mean.
        return self._project(cos_of_square(square) * x + sinc_of_square(square) * u)

    def _log(self, x: Point, y: Point) -> Tangent:
        # The difference is accurate for nearby points, as in `Sphere`.
        chord = y - x
        across = chord - self.dot(x, chord) * x
        return angle_per_sine(self.square(across), self.dot(x, y)) * across

    def _project(self, x: Point) -> Point:
        return x / self.square(x).sqrt()
