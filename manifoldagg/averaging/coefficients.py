r"""Coefficients of the mean of several models, which is a linear combination of the models.

Let $x_1, \dots, x_k$ be the same tensor of k checkpoints, or all tensors of each checkpoint as one vector. The weights
$w_i \ge 0$ have the sum 1. A mean is $m = \sum_i c_i x_i$. The norms are $n_i = \|x_i\|$, and the directions are
$u_i = x_i / n_i$. The coefficients $c_i$ follow from the Gram matrix of the $x_i$.

- `arithmetic`: $c_i = w_i$. This is also the point of a simplex with the barycentric coordinates $w$. The method of
  mergekit is `linear`.
- `karcher`: $c_i = \bar n\, a_i / n_i$ with $\bar n = \sum_i w_i n_i$. The point $u = \sum_i a_i u_i$ of the unit
  sphere minimises $\sum_i w_i\, d(u, u_i)^2$ for the angle d. The method of mergekit is `karcher`.
- `slerp`: $c_1 = \sin((1 - t)\theta) / \sin\theta$ and $c_2 = \sin(t\theta) / \sin\theta$, for the angle $\theta$
  between $x_1$ and $x_2$. The methods of mergekit are `slerp` and `nuslerp`.
- `bezier`: $c_i \propto w_i \binom{k-1}{i-1} t^{i-1} (1-t)^{k-i}$ with the sum 1. The models are the control points of
  a curve. mergekit has no such method.
- `radial`: $c_i = \bar n\, w_i / (n_i \|\sum_j w_j u_j\|)$. This is the starting point of mergekit's `karcher`.

`slerp` with the parameter t has the weights $1 - t$ and $t$. For two models, the $a_i$ of `karcher` are the
coefficients of `slerp`. `karcher` interpolates the norms too, and `slerp` does not.

A tensor whose entries are all 0 has no direction. As in mergekit, the directions are averaged without it, and its norm
0 counts in $\bar n$.

mergekit (version 0.1.5) differs in these points:

- Its `karcher` computes in the dtype of the models, and its other methods in float32. Models in float64 are an
  exception. This library computes in float64.
- Its `karcher` has equal weights. It ends after ten steps, or at a step below 1e-5.
- Its `slerp` interpolates linearly if $|\cos\theta| > 0.9995$.

On tensors in float64, the results agree to a relative difference of 1e-12 (`benchmarks/peers/mergekit_equality.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float64
from torch import Tensor

from manifoldagg._validation import check_choice, check_number
from manifoldagg.averaging.karcher import Weights, check_weights
from manifoldagg.curves import bernstein
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import karcher_mean
from manifoldagg.manifolds.span import SpheresInSpan

__all__ = ["METHODS", "InnerProducts", "Mean", "MeanMethod"]

METHODS = ("arithmetic", "karcher", "slerp", "bezier", "radial")
DIRECTIONAL_METHODS = frozenset({"karcher", "slerp", "radial"})
"""The methods whose coefficients depend on the Gram matrix."""
TOLERANCE = 1e-12
"""The tolerance for the residual of a Karcher mean, in radians."""
MAX_STEPS = 200
MIN_SUM_OF_DIRECTIONS = 1e-4
"""The smallest length of the sum of two directions for which their spherical interpolation is accurate."""


@dataclass(frozen=True, eq=False)
class InnerProducts:
    r"""Inner products of k vectors $x_i$, from which small distances between the vectors can be computed accurately.

    If the vectors are close to each other, distances that are computed from their Gram matrix suffer from cancellation.
    The object therefore uses another basis of the same span, and stores the Gram matrix of this basis. The basis
    consists of one vector $x_h$, and of the differences $x_i - x_h$ for all other vectors.

    Args:
        matrix: the Gram matrix D (k, k) of the basis in float64. Row i belongs to $x_i - x_h$, and row h to $x_h$.
        origin: the index h.
    """

    matrix: Float64[Tensor, "k k"]
    origin: int

    def squared_norm(self, coefficients: Float64[Tensor, "*batch k"]) -> Float64[Tensor, "*batch"]:
        r"""Compute $\|\sum_i c_i x_i\|^2$.

        Example:
            >>> products = InnerProducts(torch.tensor([[4.0, 2.0], [2.0, 1.0]], dtype=torch.float64), 0)  # 2 and 3
            >>> products.squared_norm(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 1.0]], dtype=torch.float64))
            tensor([4., 9., 1.], dtype=torch.float64)
        """
        b = self.in_basis(coefficients)
        # Rounding can make the square of a small combination negative.
        return ((b @ self.matrix) * b).sum(-1).clamp(min=0)

    def in_basis(self, coefficients: Float64[Tensor, "*batch k"]) -> Float64[Tensor, "*batch k"]:
        """Convert the coefficients of a combination of the vectors to coefficients of the basis."""
        # Σ c_i x_i = (Σ c_i) x_h + Σ c_i (x_i - x_h), so the coefficient of x_h becomes the sum.
        b = coefficients.clone()
        b[..., self.origin] = coefficients.sum(-1)
        return b

    @cached_property
    def norms(self) -> Float64[Tensor, " k"]:
        """The norms of the vectors."""
        return self.squared_norm(torch.eye(len(self.matrix), dtype=torch.float64)).sqrt()

    def directions(self, indices: Sequence[int]) -> Float64[Tensor, "r k"]:
        r"""Compute the direction $u_g$ of one vector, and the differences $u_i - u_g$ to the directions of others.

        The direction of a vector is $u_i = x_i / \|x_i\|$. The differences are accurate even if the vectors are close
        to each other.

        Args:
            indices: the indices of r vectors with nonzero norms. The first is g.

        Returns:
            The coefficients (r, k) in the basis of this object, that is, $x_h$ and the differences $x_i - x_h$. The
            first row belongs to $u_g$, and the other rows belong to $u_i - u_g$.
        """
        corners = self.in_basis(torch.eye(len(self.matrix), dtype=torch.float64))
        g, *others = indices
        rows = [corners[g] / self.norms[g]]
        for i in others:
            # u_i - u_g = (x_i - x_g) / n_i + (1 / n_i - 1 / n_g) x_g, and `inverse` is the second factor. It is
            # computed from n_g² - n_i² = <x_g - x_i, x_g + x_i>, because a subtraction of the reciprocals would lose
            # digits to cancellation.
            gap = (corners[g] - corners[i]) @ self.matrix @ (corners[g] + corners[i])
            inverse = gap / (self.norms[i] * self.norms[g] * (self.norms[i] + self.norms[g]))
            rows.append((corners[i] - corners[g]) / self.norms[i] + inverse * corners[g])
        return torch.stack(rows)

    def angles(self) -> Float64[Tensor, "r r"]:
        r"""Compute the angles between all pairs of vectors in radians. Vectors with the norm 0 are omitted.

        The angle between the directions $u_i$ and $u_j$ of two vectors is $2 \arcsin(\|u_i - u_j\| / 2)$.
        """
        used = torch.nonzero(self.norms).flatten().tolist()
        if len(used) < 2:
            return torch.zeros(len(used), len(used), dtype=torch.float64)
        # The first row becomes u_g - u_g = 0, so the differences of two rows are the differences of two directions.
        rows = self.directions(used)
        rows[0] = 0.0
        gaps = rows[:, None] - rows[None]
        chords = ((gaps @ self.matrix) * gaps).sum(-1).clamp(min=0).sqrt()
        # For small angles, the arccosine of an inner product would lose half of the digits. Rounding can make half of a
        # chord larger than 1.
        return 2 * torch.asin((chords / 2).clamp(max=1))


@dataclass(frozen=True, eq=False)
class Mean:
    r"""A mean of k models $x_i$, described by the coefficients of the linear combination $\sum_i c_i x_i$.

    Attributes:
        coefficients: the coefficients $c_i$ (k,). For some averaging methods, they differ from the weights $w_i$ of the
            models.
        residual: the error of the mean direction, or `None` for a method that does not average directions. Let $u_i$ be
            the unit vector $x_i / \|x_i\|$, and let $u$ be the unit vector of the mean. The residual is
            $\|\sum_i w_i \log_u u_i\|$ in radians. It is 0 for an exact Karcher mean.
    """

    coefficients: Float64[Tensor, " k"]
    residual: float | None


@dataclass(frozen=True, eq=False)
class MeanMethod:
    """A method of averaging k models, with its weights.

    Args:
        name: one of `METHODS`.
        weights: k weights with the sum 1, or those of the rational Bézier curve.
        t: the parameter of a Bézier curve.
    """

    name: str
    weights: Float64[Tensor, " k"]
    t: float | None = None

    @staticmethod
    def of(name: str, k: int, weights: Weights = None, t: float | None = None) -> "MeanMethod":
        """Validate a method and its weights.

        Raises:
            ArgumentError: naming the invalid argument.

        Example:
            >>> MeanMethod.of("slerp", 2, t=0.25).weights
            tensor([0.7500, 0.2500], dtype=torch.float64)
        """
        check_choice("method", name, METHODS)
        if name == "slerp" and k != 2:
            raise ArgumentError(f"models: expected two models for method='slerp', got {k}; use method='karcher'")
        if name not in ("slerp", "bezier") and t is not None:
            raise ArgumentError(f"t: expected None for method={name!r}, got {t!r}; use weights")
        if name == "bezier" and t is None:
            raise ArgumentError("t: expected a number in [0, 1] for method='bezier', got None")
        if t is not None:
            check_number("t", t, at_least=0, at_most=1)
        if name == "slerp" and t is not None:
            if weights is not None:
                raise ArgumentError("weights: expected None, because t is given; t is the weight of the second model")
            weights = [1.0 - t, t]
        return MeanMethod(name, check_weights(weights, k), t)

    @property
    def needs_gram(self) -> bool:
        """Whether the coefficients of the mean depend on the inner products of the models.

        If they do, the models must be read once for the inner products and once more for the mean.
        """
        return self.name in DIRECTIONAL_METHODS and len(self.used) > 1

    @cached_property
    def barycentric(self) -> Float64[Tensor, " k"]:
        """The weights of the models, normalised to sum to 1.

        For the method `"bezier"`, the models are the control points of a curve, and the mean is the point of this curve
        at the parameter `t`. In this case, the weight of each model is multiplied by its Bernstein polynomial at `t`
        before the normalisation.
        """
        if self.name != "bezier":
            return self.weights
        basis = bernstein.weights(len(self.weights) - 1, float(self.t or 0))
        w = self.weights * torch.tensor(basis, dtype=torch.float64)
        total = w.sum()
        if not bool(total > 0):
            raise ArgumentError(f"weights: expected a positive weight of a control point at t={self.t}, got 0")
        return w / total

    @cached_property
    def used(self) -> list[int]:
        """The indices of the models with a nonzero weight. The other models are not read."""
        return torch.nonzero(self.barycentric).flatten().tolist()

    def solve(self, products: InnerProducts | None) -> Mean:
        """Compute the coefficients of the mean from the inner products of the models.

        Args:
            products: the inner products of the used models, in order.
                `None` is sufficient if `needs_gram` is `False`.

        Raises:
            ArgumentError: if directions are opposite, so that their mean is not defined, or if the iteration does not
                converge.
        """
        w = self.barycentric[self.used]
        if not self.needs_gram or products is None:
            return Mean(self.barycentric, 0.0 if self.name in DIRECTIONAL_METHODS else None)
        norms = products.norms
        directed = torch.nonzero(norms).flatten().tolist()
        if not directed:
            return Mean(self.barycentric, 0.0)
        if self.name == "slerp" and len(directed) < 2:
            return Mean(self.barycentric, 0.0)
        # The first direction is the origin of the span. As in `karcher_mean`, this direction has the largest weight.
        directed.sort(key=lambda i: -float(w[i]))
        parts, residual = self._mean_direction(products, directed, w[directed] / w[directed].sum())
        # The interpolation of `slerp` applies to the models themselves. The other methods average unit vectors, which
        # are multiplied by the mean norm at the end.
        scale = norms[directed].reciprocal() if self.name != "slerp" else torch.ones_like(parts)
        if self.name != "slerp":
            scale *= (w * norms).sum()
        coefficients = torch.zeros_like(self.barycentric)
        coefficients[[self.used[i] for i in directed]] = parts * scale
        return Mean(coefficients, residual)

    def _mean_direction(self, products: InnerProducts, directed: list[int], w: Tensor) -> tuple[Tensor, float]:
        """Compute the mean of the directions of the models on the unit sphere.

        Args:
            products: the inner products of the models.
            directed: the indices of the models with a nonzero norm.
            w: their weights, with the sum 1.

        Returns:
            The coefficients of the directions in the mean direction, and the residual.
        """
        if len(directed) == 1:
            return torch.ones(1, dtype=torch.float64), 0.0
        rows = products.directions(directed)
        # A product of three matrices is symmetric only up to rounding.
        inner = rows @ products.matrix @ rows.mT
        spheres = SpheresInSpan(((inner + inner.mT) / 2)[None])
        corners = torch.eye(len(rows), dtype=torch.float64)
        # Every direction is the first direction plus a difference.
        corners[:, 0] = 1.0
        points = corners[:, None]
        if self.name == "slerp":
            parts = _slerp(spheres, corners, w)
            return parts, _residual(spheres, spheres._project((parts @ corners)[None]), points, w)
        if self.name == "radial":
            total = (w @ corners)[None]
            if not bool(spheres.square(total) > 0):
                raise ArgumentError("models: expected directions whose mean is not 0, got directions that cancel")
            point = spheres._project(total)
            residual = _residual(spheres, point, points, w)
        else:
            mean = karcher_mean(spheres, points, w, tolerance=TOLERANCE, max_steps=MAX_STEPS)
            point = mean.point
            residual = float(mean.residual)
            if not mean.converged:
                got = f"a residual of {residual:.2g} after {mean.steps} steps"
                raise ArgumentError(
                    f"models: expected directions closer to one another, got {got}; use method='radial' or 'arithmetic'"
                )
        # Back from the basis of differences to the directions: the first direction is subtracted once per difference.
        parts = point[0].clone()
        parts[0] -= point[0, 1:].sum()
        return parts, residual


def _residual(spheres: SpheresInSpan, point: Tensor, points: Tensor, w: Tensor) -> float:
    r"""Compute how far a direction $u$ is from satisfying the condition for the Karcher mean of the directions $u_i$.

    This residual is $\|\sum_i w_i \log_u u_i\|$ for the weights $w_i$. It is 0 for the exact Karcher mean.
    """
    logs = (w[:, None, None] * spheres._log(point.expand_as(points), points)).sum(0)
    return float(spheres.square(logs).sqrt())


def _slerp(spheres: SpheresInSpan, corners: Tensor, w: Tensor) -> Tensor:
    r"""Compute the coefficients of the spherical interpolation between two directions.

    The coefficients are $\sin(w_i \theta) / \sin\theta$, where $\theta$ is the angle between the directions and
    $w_1, w_2$ are their weights.

    Args:
        spheres: the span of the directions.
        corners: the two directions (2, 2) in the basis of the span.
        w: their weights (2,), with the sum 1.

    Raises:
        ArgumentError: if the directions are opposite.
    """
    difference = float(spheres.square(corners[1:] - corners[:1]).sqrt())
    total = float(spheres.square(corners.sum(0, keepdim=True)).sqrt())
    if total < MIN_SUM_OF_DIRECTIONS:
        raise ArgumentError(
            "models: expected directions that are not opposite, got an angle of 180 degrees; use method='arithmetic'"
        )
    # For opposite or equal directions, the arccosine of an inner product would lose half of the digits.
    angle = 2 * math.atan2(difference, total)
    return torch.sin(w * angle) / math.sin(angle) if angle > 0 else w.clone()
