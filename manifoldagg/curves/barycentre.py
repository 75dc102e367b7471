"""Barycentric coordinates, and weighted means on curved spaces.

Barycentric coordinates are nonnegative weights that sum to 1. The weighted Karcher mean generalises the weighted
arithmetic mean to curved spaces. It is the point with the smallest weighted sum of squared distances to the given
points. The means in this module are differentiable with respect to the points and the weights.
"""

import math
from typing import Any

import torch
from torch import Tensor

from manifoldagg._validation import check_shape
from manifoldagg.errors import ArgumentError, DivergenceError
from manifoldagg.kernels.operands import needs_autograd_path
from manifoldagg.manifolds import Manifold, karcher_mean
from manifoldagg.manifolds.power import factor_parts

__all__ = ["check_barycentric", "weighted_mean"]

MAX_STEPS = 500
"""The maximum number of steps of a Karcher mean.

If more steps are needed, the points may be too far apart for a unique mean.
"""


def check_barycentric(coordinates: Any, n: int) -> Tensor:
    """Check that barycentric coordinates are nonnegative and sum to 1, and return them.

    The coordinates have the shape (*batch, n). The tolerance of both checks is the square root of the machine epsilon
    of their dtype. Inside `torch.func` transforms, only the shape is checked, because the values are not accessible.

    Raises:
        ArgumentError: if a coordinate is negative, or a sum is not 1.
    """
    x = check_shape("x", coordinates, n, batch=True)
    values = x.detach().double()
    tolerance = math.sqrt(torch.finfo(x.dtype).eps)
    if needs_autograd_path([values]):
        return x
    sums = values.sum(-1)
    # The negated comparisons are also true for NaN.
    for what, checked, invalid in (
        ("coordinates >= 0, got", values, ~(values >= -tolerance)),
        ("coordinates that sum to 1, got a sum of", sums, ~((sums - 1).abs() <= tolerance)),
    ):
        if bool(invalid.any()):
            where = tuple(invalid.nonzero()[0].tolist())
            raise ArgumentError(f"x: expected barycentric {what} {checked[where].item():g} at {where}")
    return x


def weighted_mean(space: Manifold, points: Tensor, weights: Tensor) -> Tensor:
    """Compute the weighted Karcher mean of n points on a manifold, for each entry of a batch.

    The points have the shape (*batch, n, *shape), and the weights have the shape (*batch, n). The means have the shape
    (*batch, *shape) and the dtype float64. The function is twice differentiable, even inside `torch.func` transforms.
    On a curved space, autograd does not compute third and higher derivatives correctly.

    Raises:
        DivergenceError: if a mean is not found.
    """
    *batch, n = weights.shape
    means = []
    for leaf, (part,) in factor_parts(space, points):
        # A power of a manifold has one mean per copy, so the axes of the copies become batch axes.
        copies = part.shape[weights.ndim : part.ndim - len(leaf.space.shape)]
        leaf_weights = weights.reshape(*batch, *(1 for _ in copies), n).expand(*batch, *copies, n)
        mean = _leaf_mean(leaf.space, part.movedim(len(batch), len(batch) + len(copies)), leaf_weights)
        means.append(mean.flatten(len(batch)))
    return torch.cat(means, -1).reshape(*batch, *space.shape)


def _leaf_mean(space: Manifold, points: Tensor, weights: Tensor) -> Tensor:
    """Compute weighted Karcher means on a manifold that is not a product of manifolds."""
    axis = -1 - len(space.shape)
    factor = weights.reshape(*weights.shape, *(1 for _ in space.shape))
    # On a flat space, the mean has a closed form.
    if space.flat:
        return (factor * points).sum(axis)
    # Projection changes the points only by rounding. Detaching this change keeps the derivatives exact.
    points = points + (space._project(points.detach()) - points).detach()
    mean: Tensor = _KarcherMeanFunction.apply(space, points.detach(), weights.detach())  # type: ignore[no-untyped-call]
    if not needs_autograd_path([points, weights]):
        return mean

    # At the mean m, the weighted sum of the logarithms log_m(p_i) of the points p_i is 0. The derivatives of the mean
    # follow from implicit differentiation of this equation.
    def equation(u: Tensor, points: Tensor, factor: Tensor) -> Tensor:
        """Compute the residual of the equation that defines the mean, at the offset `u` from it."""
        # Let v be the component of u that is tangent to the manifold at m. The function evaluates the weighted sum of
        # the logarithms at the base point exp_m(v), and projects it onto the tangent space at m. The result is this
        # projection, with a minus sign, plus the normal component of u. It is 0 at u = 0. The normal component makes
        # the derivative with respect to u invertible.
        m = mean.expand_as(u)
        tangent = space._project_tangent(m, u)
        base = space._exp(m, tangent).unsqueeze(axis).expand_as(points)
        return u - tangent - space._project_tangent(m, (factor * space._log(base, points)).sum(axis))

    size = math.prod(space.shape)
    batch = mean.shape[: mean.ndim - len(space.shape)]
    # One vjp with a batch of unit vectors computes all rows of the Hessian at u = 0.
    zero = mean.new_zeros(size, *mean.shape)
    frozen = points.detach().expand(size, *points.shape)
    unit = torch.eye(size, dtype=mean.dtype, device=mean.device).expand(*batch, size, size).movedim(-2, 0)
    rows = torch.func.vjp(lambda u: equation(u, frozen, factor.detach()), zero)[1](unit.reshape(zero.shape))[0]
    hessian = rows.flatten(1 + len(batch)).movedim(0, -2).detach()
    u = torch.zeros_like(mean)
    # The residual minus its detached copy is 0, so a Newton step does not change the value. Each step makes the
    # derivatives of one more order correct.
    for _ in range(2):
        residual = equation(u, points, factor)
        step = torch.linalg.solve(hessian, (residual - residual.detach()).flatten(len(batch)).unsqueeze(-1))
        u = u - step.squeeze(-1).reshape(mean.shape)
    point = space._exp(mean, u)
    # The value is exactly the mean. Only the derivatives come from `point`.
    return mean + (point - point.detach())


class _KarcherMeanFunction(torch.autograd.Function):
    """Autograd function for Karcher means, with a `vmap` rule but without derivatives."""

    # `karcher_mean` branches on the values of tensors, which `vmap` does not support. The class therefore defines its
    # own rule. `_leaf_mean` adds the derivatives to the result.
    @staticmethod
    def forward(space: Manifold, points: Tensor, weights: Tensor) -> Tensor:
        # Rounding can make a weight slightly negative. `karcher_mean` rejects every negative weight.
        weights = torch.where(weights > -math.sqrt(torch.finfo(torch.float32).eps), weights.clamp(min=0), weights)
        mean = karcher_mean(space, points, weights, max_steps=MAX_STEPS)
        if not mean.converged:
            found = f"a gradient of {mean.residual.max().item():.1e} after {mean.steps} steps"
            raise DivergenceError(
                f"phi, x: expected vertices with a Karcher mean on {space}, got {found}; move the vertices closer"
            )
        return mean.point

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save nothing, because the backward pass is not used."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], space: Manifold, *tensors: Tensor) -> tuple[Tensor, int]:
        mapped = [
            t.expand(info.batch_size, *t.shape) if axis is None else t.movedim(axis, 0)
            for t, axis in zip(tensors, in_dims[1:], strict=True)
        ]
        return _KarcherMeanFunction.apply(space, *mapped), 0  # type: ignore[no-untyped-call]
