"""Karcher means: the points that minimise a weighted sum of squared distances."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from manifoldagg._result_repr import format_result
from manifoldagg._validation import check_count, check_finite, check_number, check_shape, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.kernels.operands import needs_autograd_path
from manifoldagg.manifolds import formulas
from manifoldagg.manifolds.ambient import AmbientSpace
from manifoldagg.manifolds.manifold import Manifold, Point, check_is_manifold
from manifoldagg.manifolds.span import Span

__all__ = ["KarcherMean", "RunningMean", "karcher_mean", "mean_in_span"]


@dataclass(frozen=True)
class KarcherMean:
    r"""The weighted Karcher mean of several points, with a certificate of its accuracy.

    In the following, $m$ is the mean of the points $x_i$ with the weights $w_i$.

    Attributes:
        point: the mean $m$ (*batch, *shape).
        residual: the norm $\|\sum_i w_i \log_m x_i\|$ (*batch,) in float64. It is 0 if $m$ is a stationary point of the
            weighted sum of squared distances. It is NaN if $\log_m x_i$ is undefined for a point, for example for an
            antipode of $m$.
        steps: the number of steps of the iteration.
        converged: whether every residual is within the tolerance, so that $m$ is a stationary point. If the points are
            as close together as `karcher_mean` requires, $m$ is also the minimiser.
    """

    point: Point
    residual: Float[Tensor, "*batch"]
    steps: int
    converged: bool

    def __repr__(self) -> str:
        return format_result(self, point=self.point, residual=self.residual, steps=self.steps, converged=self.converged)


def karcher_mean(
    space: Manifold,
    points: Float[Tensor, "..."],
    weights: Float[Tensor, "..."] | None = None,
    *,
    tolerance: float = 1e-12,
    max_steps: int = 100,
) -> KarcherMean:
    r"""Compute Karcher means, the minimisers of $\sum_i w_i\, d(m, x_i)^2$.

    The method is the fixed-point iteration $m \leftarrow \exp_m s \sum_i w_i \log_m x_i$ in float64, starting at the
    point with the largest weight. The step size $s$ starts at 1 and is halved if the norm of the sum does not decrease.

    - Let $K > 0$ be the largest curvature. If all points are in a ball of radius $\frac14 \pi/\sqrt{K}$, the minimiser
      is unique and the iteration finds it. Without positive curvature, this is always the case. The number of steps
      increases with the distances of the points.
    - Otherwise, the result can be a saddle point and depend on the order of the points. `converged` and `residual`
      report whether it is a stationary point.
    - On a flat space, one step returns the weighted arithmetic mean.
    - On products of spheres and flat leaves, the mean is in the span of the points. If k does not exceed the number of
      coordinates of a sphere, a single mean is computed from k coefficients. This reads the points twice and needs no
      other memory of their size. On flat leaves, the coefficients are the weights, and the residual is 0.
    - If leaves are flat or of low rank, distances are distances of the matrices. The mean is the matrix of the given
      rank nearest to the weighted sum. The residual is the tangent component of the difference.

    Args:
        space: a space with exp, log, inner and project, or a space whose leaves are flat or of low rank.
        points: k points for each mean, (*batch, k, *shape).
        weights: nonnegative weights (*batch, k) or (k,), which are normalised and must not all be 0. The default is
            equal weights.
        tolerance: the tolerance for the residual. It is relative to the largest coordinate of the points, if this is
            larger than 1.
        max_steps: the maximum number of steps.

    Returns:
        The means (*batch, *shape) in the dtype of the points, residuals (*batch,), the number of steps, and whether all
        means converged.

    Raises:
        ArgumentError: if an argument is invalid.

    Source: Karcher 1977; Afsari, Tron, Vidal 2013 for the step of size 1.

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Sphere
        >>> mean = karcher_mean(Sphere(2), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        >>> mean.point, mean.converged
        (tensor([0.7071, 0.7071]), True)
    """
    check_shape("points", points, None, *space.shape, batch=True)
    check_finite("points", points)
    check_number("tolerance", tolerance, at_least=0)
    check_count("max_steps", max_steps)
    spread = points.ndim - len(space.shape)
    w = _normalise_weights(weights, points.shape[:spread], points)
    if space.ambient:
        return _ambient_mean(space, points, w, tolerance)
    if spread == 1 and not needs_autograd_path([points, w]):
        span = Span.of(space, [*points.detach().flatten(1)], start=int(w.argmax()))
        if span is not None:
            return mean_in_span(space, span, w, tolerance=tolerance, max_steps=max_steps)
    # Points of a narrower dtype are on the manifold only up to the rounding of this dtype, so they are projected.
    x = space._project(points.double())
    # A point of the sample is in every ball that contains the sample. If it has all the weight, it is the mean.
    heaviest = w.argmax(-1).reshape(*w.shape[:-1], *(1 for _ in range(len(space.shape) + 1)))
    m = x.take_along_dim(heaviest, spread - 1)
    factor = w.reshape(*w.shape, *(1 for _ in space.shape))

    def weighted_log(m: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the weighted sum of the logs at `m`, and its norm."""
        # A point of weight 0 does not contribute, even if its log is undefined.
        logs = torch.where(factor == 0, 0.0, factor * space._log(m.expand_as(x), x))
        step = logs.sum(spread - 1, keepdim=True)
        return step, formulas.norm(space, m, step)

    # The rounding error of a log is proportional to the coordinates of the points.
    allowed = tolerance * x.detach().abs().flatten(spread - 1).amax(-1).clamp(min=1).unsqueeze(-1)
    step, residual = weighted_log(m)
    steps = 0
    step_size = torch.ones_like(residual)
    # A comparison with NaN is false, so a mean without a log does not prolong the iteration of the other means.
    while steps < max_steps and bool((residual > allowed).any()):
        trial = space._exp(m, step_size.reshape(*step_size.shape, *(1 for _ in space.shape)) * step)
        trial_step, trial_residual = weighted_log(trial)
        steps = steps + 1
        # Curvature can make a full step overshoot. A rejected step is halved.
        better = (trial_residual < residual) | (trial_residual <= allowed) | residual.isnan()
        # After an accepted step, the step size grows again, up to 1. The factor is below 2, so the next step is shorter
        # than a step that was just rejected.
        step_size = torch.where(better, (1.5 * step_size).clamp(max=1), step_size / 2)
        accept = better.reshape(*better.shape, *(1 for _ in space.shape))
        m = torch.where(accept, trial, m)
        step = torch.where(accept, trial_step, step)
        residual = torch.where(better, trial_residual, residual)
    converged = bool((residual <= allowed).all())
    return KarcherMean(m.squeeze(spread - 1).to(points.dtype), residual.squeeze(-1), steps, converged)


def mean_in_span(
    space: Manifold, span: Span, weights: Float[Tensor, " k"], *, tolerance: float, max_steps: int
) -> KarcherMean:
    """Compute the Karcher mean of k points as a linear combination of these points.

    The iteration updates only the k coefficients of the combination, instead of all coordinates of the mean.

    Args:
        space: the manifold.
        span: the linear span of the points.
        weights: the weights of the points, which must sum to 1.
        tolerance: as in `karcher_mean`.
        max_steps: as in `karcher_mean`.
    """
    w = weights.detach().cpu()
    corners = span.point_coefficients
    mean = KarcherMean(corners[0], w.new_zeros(()), 1, True)
    if not span.is_flat:
        mean = karcher_mean(span.spheres, corners, w[span.order], tolerance=tolerance, max_steps=max_steps)
    point = span.point(w, mean.point)
    return KarcherMean(point.view(space.shape), mean.residual.to(point.device), mean.steps, mean.converged)


def _ambient_mean(space: Manifold, points: Tensor, weights: Tensor, tolerance: float) -> KarcherMean:
    """Compute weighted means of the parameters of models with LoRA adapters, and the residuals of these means.

    The mean is the weighted sum of the parameters, but each adapter matrix in this sum is replaced by the nearest
    matrix of its rank. The residual measures the numerical error of this replacement. It is the norm of the tangent
    component of the difference between the sum and the mean, which is 0 for an exact nearest matrix.
    """
    if needs_autograd_path([points, weights]):
        raise ArgumentError("points: expected tensors without gradients for a mean of low-rank leaves, got a gradient")
    means = []
    lengths = []
    k = weights.shape[-1]
    groups = points.reshape(-1, k, *points.shape[weights.ndim :]).double()
    # The kernels need coefficients as numbers, so the means of a batch are computed one after another.
    for rows, w in zip(groups, weights.reshape(-1, k).tolist(), strict=True):
        start = rows[w.index(max(w))]
        ambient = AmbientSpace.of(space, start)
        # The sum is over differences from the point with the largest weight. If this point has all the weight, the mean
        # is bitwise equal to it.
        mean = ambient.combine(start, [*rows], w, minus=[start] * k)
        means.append(mean)
        lengths.append(ambient.tangent_lengths([*rows], w, mean))
    residual = torch.tensor([length for length, _ in lengths], dtype=torch.float64, device=points.device)
    converged = all(length <= tolerance * max(1.0, size) for length, size in lengths)
    shape = points.shape[: weights.ndim - 1]
    point = torch.stack(means).to(points.dtype).view(*shape, *points.shape[weights.ndim :])
    return KarcherMean(point, residual.view(shape), 1, converged)


@dataclass(frozen=True)
class RunningMean:
    r"""A weighted mean of points that arrive one after another and are not stored.

    Each new point $x$ with the weight $w$ updates the mean $m$ by $m \leftarrow \exp_m(\tfrac{w}{W + w} \log_m x)$,
    where $W$ is the total weight of all earlier points. On a flat space, the result is the weighted arithmetic mean. On
    a curved space, the result depends on the order of the points. It differs from the Karcher mean by a term of third
    order in the distances of the points.

    Attributes:
        space: a space with exp and log.
        point: the current mean (*batch, *shape).
        weight: the total weight $W$ of all points so far.

    Source: Sturm 2003, inductive means.

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Flat
        >>> mean = RunningMean(Flat(1), torch.tensor([1.0]))
        >>> mean = mean.with_point(torch.tensor([2.0])).with_point(torch.tensor([6.0]))
        >>> mean.point, mean.weight
        (tensor([3.]), 3.0)
    """

    space: Manifold
    point: Point
    weight: float = 1.0

    def __post_init__(self) -> None:
        check_is_manifold(self.space)
        self.space._check({"point": self.point})
        check_number("weight", self.weight, at_least=0)

    def __repr__(self) -> str:
        return format_result(self, space=self.space, point=self.point, weight=self.weight)

    def with_point(self, x: Point, weight: float = 1.0) -> "RunningMean":
        """Return the mean that includes another point (*batch, *shape) with the given weight.

        Raises:
            ArgumentError: if `x` has another shape or dtype, or `weight` is not a number >= 0.
        """
        self.space._check({"point": self.point, "x": check_shape("x", x, *self.point.shape)})
        total = self.weight + check_number("weight", weight, at_least=0)
        # With the weights 0 and 0, the quotient below would be NaN.
        if weight == 0:
            return self
        return RunningMean(self.space, formulas.geodesic(self.space, self.point, x, weight / total), total)


def _normalise_weights(weights: Tensor | None, shape: torch.Size, like: Tensor) -> Tensor:
    """Check weights, broadcast them to the shape (*batch, k), and divide them by their sums.

    Raises:
        ArgumentError: if there are no points, or if the weights are invalid.
    """
    if shape[-1] == 0:
        raise ArgumentError("points: expected at least one point for each mean, got 0")
    if weights is None:
        return torch.full(shape, 1 / shape[-1], dtype=torch.float64, device=like.device)
    check_shape("weights", weights, shape[-1], batch=True)
    try:
        w = weights.to(like.device, torch.float64).expand(shape)
    except RuntimeError:
        raise ArgumentError(
            f"weights: expected shape {tuple(shape)} or ({shape[-1]},), got {tuple(weights.shape)}"
        ) from None
    # The comparisons reject NaN, which is neither finite nor >= 0.
    total = w.sum(-1, keepdim=True)
    if not bool((torch.isfinite(w) & (w >= 0)).all() and (total > 0).all()):
        raise ArgumentError(
            f"weights: expected finite numbers >= 0 with a positive sum for each mean, got {short_repr(weights)}"
        )
    return w / total
