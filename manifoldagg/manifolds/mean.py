"""Karcher means: the points that minimise a weighted sum of squared distances."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from manifoldagg._result_repr import format_result
from manifoldagg._validation import check_count, check_finite, check_number, check_shape
from manifoldagg.errors import ArgumentError
from manifoldagg.kernels.operands import needs_autograd_path
from manifoldagg.manifolds import formulas
from manifoldagg.manifolds.ambient import AmbientSpace
from manifoldagg.manifolds.manifold import Manifold, Point, check_is_manifold
from manifoldagg.manifolds.span import Span

__all__ = ["KarcherMean", "RunningMean", "karcher_mean", "mean_in_span"]


@dataclass(frozen=True)
class KarcherMean:
    r"""A mean and its certificate.

    Attributes:
        point: $m$ (*batch, *shape).
        residual: $\|\sum_i w_i \log_m x_i\|$ (*batch,) in float64: 0 where the objective is stationary, NaN where a
            point has no log at $m$ (an antipode).
        steps: how many were taken.
        converged: whether every residual is within the tolerance: the objective is stationary there, and least if the
            points lie as near to one another as `karcher_mean` says.
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
    r"""Compute the minimiser of $\sum_i w_i\, d(m, x_i)^2$.

    By the fixed point $m \leftarrow \exp_m s \sum_i w_i \log_m x_i$, with $s = 1$, halved where the sum does not
    become shorter. It starts at the heaviest point, runs in float64
    and is cast back. Where all points of one mean lie in a ball within a quarter of $\pi/\sqrt{K}$, $K > 0$ the
    largest curvature, the minimiser is unique and found; without positive curvature it always is, in more steps
    the farther they lie apart. Outside,
    `converged` and `residual` say what was reached: a point of rest, which may be a saddle and depend on the order of
    the points. On a flat space one step gives the weighted arithmetic mean.

    The mean of k points of a product of spheres and flat leaves lies in their span. One mean of at most as many points
    as a sphere has coordinates is therefore found by its k coefficients: the points are read twice and nothing else of
    their size is held. On flat leaves the coefficients are the weights, which leave no residual.

    Where leaves are flat or of low rank, distances are those of the matrices: the mean is the matrix of the rank that
    is nearest to the weighted sum, and the residual is the part of what is left out that is tangent at it.

    Args:
        space: with exp, log, inner and project, or with leaves that are flat or of low rank.
        points: (*batch, k, *shape): k points for each mean.
        weights: (*batch, k) or (k,), not negative, not all zero; they are normalised. Equal where not given.
        tolerance: on the residual, relative to the largest coordinate of the points where that is over 1.
        max_steps: give up after so many.

    Returns:
        The means (*batch, *shape), residuals (*batch,), steps, and whether all converged.

    Raises:
        ArgumentError: naming the argument that does not fit.

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
    # Points of a narrower dtype lie on the manifold only up to its rounding; in float64 that would show.
    x = space._project(points.double())
    # A start among the points lies in every ball that holds them, and is the mean where one has all the weight.
    heaviest = w.argmax(-1).reshape(*w.shape[:-1], *(1 for _ in range(len(space.shape) + 1)))
    m = x.take_along_dim(heaviest, spread - 1)
    factor = w.reshape(*w.shape, *(1 for _ in space.shape))

    def pull(m: Tensor) -> tuple[Tensor, Tensor]:
        """The weighted sum of the logs at `m`, and its norm."""
        # A point of weight 0 has no say, even where its log has no value.
        logs = torch.where(factor == 0, 0.0, factor * space._log(m.expand_as(x), x))
        step = logs.sum(spread - 1, keepdim=True)
        return step, formulas.norm(space, m, step)

    allowed = tolerance * x.detach().abs().flatten(spread - 1).amax(-1).clamp(min=1).unsqueeze(-1)
    step, residual = pull(m)
    steps = 0
    share = torch.ones_like(residual)
    while steps < max_steps and bool((residual > allowed).any()):
        there = space._exp(m, share.reshape(*share.shape, *(1 for _ in space.shape)) * step)
        onward, left = pull(there)
        steps = steps + 1
        # Where curvature makes a whole step overshoot, half of it is tried.
        better = (left < residual) | (left <= allowed) | residual.isnan()
        share = torch.where(better, (1.5 * share).clamp(max=1), share / 2)
        keep = better.reshape(*better.shape, *(1 for _ in space.shape))
        m = torch.where(keep, there, m)
        step = torch.where(keep, onward, step)
        residual = torch.where(better, left, residual)
    done = bool((residual <= allowed).all())
    return KarcherMean(m.squeeze(spread - 1).to(points.dtype), residual.squeeze(-1), steps, done)


def mean_in_span(
    space: Manifold, span: Span, weights: Float[Tensor, " k"], *, tolerance: float, max_steps: int
) -> KarcherMean:
    """Compute the mean of the points of a span, with weights of sum 1, as a combination of them."""
    w = weights.detach().cpu()
    corners = span.point_coefficients
    found = KarcherMean(corners[0], w.new_zeros(()), 1, True)
    if not span.is_flat:
        found = karcher_mean(span.spheres, corners, w[span.order], tolerance=tolerance, max_steps=max_steps)
    point = span.point(w, found.point)
    return KarcherMean(point.view(space.shape), found.residual.to(point.device), found.steps, found.converged)


def _ambient_mean(space: Manifold, points: Tensor, weights: Tensor, tolerance: float) -> KarcherMean:
    """The points nearest to weighted sums in the space around them, and what of the rest is tangent there."""
    if needs_autograd_path([points, weights]):
        raise ArgumentError("points: expected no derivative to be followed, a mean of low-rank leaves has none here")
    means = []
    lengths = []
    k = weights.shape[-1]
    every = points.reshape(-1, k, *points.shape[weights.ndim :]).double()
    for rows, w in zip(every, weights.reshape(-1, k).tolist(), strict=True):
        start = rows[w.index(max(w))]
        ambient = AmbientSpace.of(space, start)
        # Of differences to the heaviest: a point that has all the weight is the mean, bit for bit.
        mean = ambient.combine(start, [*rows], w, minus=[start] * k)
        means.append(mean)
        lengths.append(ambient.tangent_lengths([*rows], w, mean))
    residual = torch.tensor([length for length, _ in lengths], dtype=torch.float64, device=points.device)
    done = all(length <= tolerance * max(1.0, size) for length, size in lengths)
    shape = points.shape[: weights.ndim - 1]
    point = torch.stack(means).to(points.dtype).view(*shape, *points.shape[weights.ndim :])
    return KarcherMean(point, residual.view(shape), 1, done)


@dataclass(frozen=True)
class RunningMean:
    r"""A streaming mean of points, none of which is stored.

    $m \leftarrow \exp_m(\tfrac{w}{W + w} \log_m x)$, $W$ the weight so far: the weighted arithmetic mean on
    a flat space; elsewhere it depends on the order, and differs from the Karcher mean by a term of third order in the
    spread of the points.

    Attributes:
        space: with exp and log.
        point: (*batch, *shape), the mean so far.
        weight: $W$, of all points so far.

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
        """Return the mean with one more point (*batch, *shape) of this weight.

        Raises:
            ArgumentError: if `x` does not fit the mean, or `weight` is negative or no number.
        """
        self.space._check({"point": self.point, "x": check_shape("x", x, *self.point.shape)})
        total = self.weight + check_number("weight", weight, at_least=0)
        if weight == 0:
            return self
        return RunningMean(self.space, formulas.geodesic(self.space, self.point, x, weight / total), total)


def _normalise_weights(weights: Tensor | None, shape: torch.Size, like: Tensor) -> Tensor:
    """The weights in float64 with sum 1, one for each point."""
    if shape[-1] == 0:
        raise ArgumentError("points: expected at least one point for each mean, got none")
    if weights is None:
        return torch.full(shape, 1 / shape[-1], dtype=torch.float64, device=like.device)
    check_shape("weights", weights, shape[-1], batch=True)
    try:
        w = weights.to(like.device, torch.float64).expand(shape)
    except RuntimeError:
        raise ArgumentError(
            f"weights: expected shape {tuple(shape)} or ({shape[-1]},), got {tuple(weights.shape)}"
        ) from None
    total = w.sum(-1, keepdim=True)
    if not bool((torch.isfinite(w) & (w >= 0)).all() and (total > 0).all()):
        raise ArgumentError("weights: expected finite numbers >= 0 with a positive sum for each mean")
    return w / total
