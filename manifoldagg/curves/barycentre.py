"""Barycentric coordinates, and the weighted Karcher mean as a differentiable function of points and weights."""

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
"""Of a Karcher mean: points that need more spread so far that there may be no single one."""


def check_barycentric(coordinates: Any, n: int) -> Tensor:
    """Return coordinates (*batch, n); an `ArgumentError` names a negative one or the sum, unless a transform hides it.

    Both hold up to the square root of the precision of their dtype.
    """
    x = check_shape("x", coordinates, n, batch=True)
    values = x.detach().double()
    slack = math.sqrt(torch.finfo(x.dtype).eps)
    if needs_autograd_path([values]):
        return x
    sums = values.sum(-1)
    for what, found, wrong in (
        ("coordinates >= 0, got", values, ~(values >= -slack)),
        ("coordinates that sum to 1, got a sum of", sums, ~((sums - 1).abs() <= slack)),
    ):
        if bool(wrong.any()):
            where = tuple(wrong.nonzero()[0].tolist())
            raise ArgumentError(f"x: expected barycentric {what} {found[where].item():g} at {where}")
    return x


def weighted_mean(space: Manifold, points: Tensor, weights: Tensor) -> Tensor:
    r"""Compute Karcher means (*batch, *shape) of points (*batch, n, *shape), weights (*batch, n), in float64.

    Right up to the second derivatives in both, under every transform; a `DivergenceError` if one is not found.
    """
    *batch, n = weights.shape
    means = []
    for leaf, (part,) in factor_parts(space, points):
        # The copies of a power come before the points whose mean is taken, as more of a batch.
        copies = part.shape[weights.ndim : part.ndim - len(leaf.space.shape)]
        spread = weights.reshape(*batch, *(1 for _ in copies), n).expand(*batch, *copies, n)
        mean = _leaf_mean(leaf.space, part.movedim(len(batch), len(batch) + len(copies)), spread)
        means.append(mean.flatten(len(batch)))
    return torch.cat(means, -1).reshape(*batch, *space.shape)


def _leaf_mean(space: Manifold, points: Tensor, weights: Tensor) -> Tensor:
    """The same on one leaf."""
    axis = -1 - len(space.shape)
    factor = weights.reshape(*weights.shape, *(1 for _ in space.shape))
    if space.flat:
        return (factor * points).sum(axis)
    # The mean is that of the projections, which differ from the points by rounding: no derivative is lost.
    points = points + (space._project(points.detach()) - points).detach()
    mean: Tensor = _KarcherMeanFunction.apply(space, points.detach(), weights.detach())  # type: ignore[no-untyped-call]
    if not needs_autograd_path([points, weights]):
        return mean

    def equation(u: Tensor, points: Tensor, factor: Tensor) -> Tensor:
        """Zero at u = 0: the normal part of u, less the pull of the points at exp of its tangent part."""
        m = mean.expand_as(u)
        tangent = space._project_tangent(m, u)
        place = space._exp(m, tangent).unsqueeze(axis).expand_as(points)
        return u - tangent - space._project_tangent(m, (factor * space._log(place, points)).sum(axis))

    size = math.prod(space.shape)
    batch = mean.shape[: mean.ndim - len(space.shape)]
    zero = mean.new_zeros(size, *mean.shape)
    frozen = points.detach().expand(size, *points.shape)
    unit = torch.eye(size, dtype=mean.dtype, device=mean.device).expand(*batch, size, size).movedim(-2, 0)
    rows = torch.func.vjp(lambda u: equation(u, frozen, factor.detach()), zero)[1](unit.reshape(zero.shape))[0]
    hessian = rows.flatten(1 + len(batch)).movedim(0, -2).detach()
    u = torch.zeros_like(mean)
    for _ in range(2):
        left = equation(u, points, factor)
        step = torch.linalg.solve(hessian, (left - left.detach()).flatten(len(batch)).unsqueeze(-1))
        u = u - step.squeeze(-1).reshape(mean.shape)
    moved = space._exp(mean, u)
    return mean + (moved - moved.detach())


class _KarcherMeanFunction(torch.autograd.Function):
    """Karcher means as values without derivatives: under vmap, what is mapped over joins the batch."""

    @staticmethod
    def forward(space: Manifold, points: Tensor, weights: Tensor) -> Tensor:
        # A place may be negative by rounding; what is more negative is refused.
        weights = torch.where(weights > -math.sqrt(torch.finfo(torch.float32).eps), weights.clamp(min=0), weights)
        mean = karcher_mean(space, points, weights, max_steps=MAX_STEPS)
        if not mean.converged:
            left = f"in {mean.steps} steps, at the last of which the gradient is {mean.residual.max().item():.1e}"
            raise DivergenceError(f"phi, x: found no Karcher mean on {space} {left}: the vertices lie too far apart")
        return mean.point

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], space: Manifold, *tensors: Tensor) -> tuple[Tensor, int]:
        mapped = [
            t.expand(info.batch_size, *t.shape) if axis is None else t.movedim(axis, 0)
            for t, axis in zip(tensors, in_dims[1:], strict=True)
        ]
        return _KarcherMeanFunction.apply(space, *mapped), 0  # type: ignore[no-untyped-call]
