"""The weighted Karcher mean of several models, with the residual that measures its accuracy.

The Karcher mean is the point that minimises the weighted sum of squared distances to the models. On a flat space, it is
the arithmetic mean.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from manifoldagg._validation import check_count, check_finite, check_number, check_shape, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import KarcherMean, Manifold, check_point, karcher_mean
from manifoldagg.manifolds.manifold import check_is_manifold, check_not_model
from manifoldagg.manifolds.mean import mean_in_span
from manifoldagg.manifolds.span import Span

__all__ = ["Weights", "check_model", "check_versions", "check_weights", "karcher"]

Versions = Float[Tensor, "k ..."] | Sequence[Float[Tensor, "..."]]
Weights = Float[Tensor, " k"] | np.ndarray | Sequence[float] | None


@torch.no_grad()
def karcher(
    space: Manifold, versions: Versions, weights: Weights = None, *, tolerance: float = 1e-12, max_steps: int = 100
) -> KarcherMean:
    r"""Compute the weighted Karcher mean of several models.

    The Karcher mean is the point $m$ that minimises the weighted sum of squared distances
    $\sum_i w_i\, d(m, \Theta_i)^2$ to the models $\Theta_i$. The algorithm depends on the space:

    - On a product of flat spaces and spheres, the mean is a linear combination of the models. Its coefficients follow
      from the Gram matrix of the models. The combination is computed in float64 and rounded once.
    - On other spaces, and for models that are far apart on a sphere,
      [`karcher_mean`][manifoldagg.manifolds.karcher_mean] computes the mean by iteration. It needs memory for copies
      of the models in float64.

    Args:
        space: the space. Unless it is flat, it needs `exp`, `log`, `inner` and `project`.
        versions: k models, a tensor (k, *space.shape) or a sequence of tensors (*space.shape).
        weights: k numbers >= 0, not all zero. They are normalised. The default is equal weights.
        tolerance: the tolerance for the root mean square of the P entries of the residual. It is relative to the
            largest coordinate of the models if this coordinate exceeds 1. If the mean is iterative, the tolerance
            applies to each leaf separately.
        max_steps: the largest number of iterations.

    Returns:
        The mean in the dtype of the models, the number of steps, and whether the residual is within the tolerance. The
        residual $\|\sum_i w_i \log_m \Theta_i\|$ is computed before the mean is rounded.

    Raises:
        ArgumentError: if an argument is invalid. The message starts with the name of the argument.

    Source: Manifold, Algorithm 1 (its last lines).

    Example:
        >>> from manifoldagg.manifolds import Flat
        >>> karcher(Flat(2), [torch.tensor([1.0, 1.0]), torch.tensor([4.0, 7.0])], [2, 1]).point
        tensor([2., 3.])
    """
    check_is_manifold(space)
    points = _check_structure(space, versions)
    shares = check_weights(weights, len(points))
    check_number("tolerance", tolerance, at_least=0)
    check_count("max_steps", max_steps)
    span = _span(space, points, shares)
    # The norms in the Gram matrix can prove that the points are finite and on their spheres. Otherwise, their values
    # are read once more.
    if span is None or not span.lies_on_space:
        for i, point in enumerate(points):
            _check_values(space, point, f"versions[{i}]")
    return _mean_of_checked(space, points, shares, span, tolerance, max_steps)


def _span(space: Manifold, points: list[Tensor], weights: Tensor) -> Span | None:
    """Return the span of the points, or `None` if their mean cannot be computed in the span."""
    return Span.of(space, [point.flatten() for point in points], start=int(weights.argmax()))


def _mean_of_checked(
    space: Manifold, points: list[Tensor], weights: Tensor, span: Span | None, tolerance: float, max_steps: int
) -> KarcherMean:
    """Compute the Karcher mean of points that have already been validated."""
    # The tolerance refers to the root mean square of P entries. The norm is larger by the factor √P.
    absolute_tolerance = tolerance * math.sqrt(max(points[0].numel(), 1))
    if span is not None:
        return mean_in_span(space, span, weights, tolerance=absolute_tolerance, max_steps=max_steps)
    leaves = space.leaves(points[0])
    if len(leaves) == 1:
        w = weights.to(points[0].device)
        return karcher_mean(space, torch.stack(points), w, tolerance=absolute_tolerance, max_steps=max_steps)
    # Each tensor (leaf) has its own iteration, because the tolerance is relative to the coordinates of the tensor.
    means = []
    for leaf in leaves:
        parts = [point.flatten()[leaf.part].view(leaf.space.shape) for point in points]
        means.append(
            _mean_of_checked(leaf.space, parts, weights, _span(leaf.space, parts, weights), tolerance, max_steps)
        )
    point = torch.cat([mean.point.flatten() for mean in means]).view(points[0].shape)
    # Leaves are orthogonal to each other, so the squares of their residuals add up.
    residual = torch.stack([mean.residual for mean in means]).norm()
    return KarcherMean(point, residual, max(mean.steps for mean in means), all(mean.converged for mean in means))


def check_versions(space: Manifold, versions: Versions, name: str = "versions") -> list[Tensor]:
    """Check that all models are finite points of the space with the same shape, dtype and device.

    Returns:
        The models as detached tensors.

    Raises:
        ArgumentError: if there is no model, or if a model is invalid. The message describes the first invalid model.
    """
    points = _check_structure(space, versions, name)
    for i, point in enumerate(points):
        _check_values(space, point, f"{name}[{i}]")
    return points


def check_model(space: Manifold, point: Tensor, name: str, *, like: Tensor | None = None) -> Tensor:
    """Check that a model is a valid point of the space, and has the shape, dtype and device of `like`.

    Returns:
        The model as a detached tensor.

    Raises:
        ArgumentError: if the model is invalid.
    """
    model = _check_like(space, point, name, like)
    _check_values(space, model, name)
    return model


def _check_structure(space: Manifold, versions: Versions, name: str = "versions") -> list[Tensor]:
    """Check the shapes, dtypes and devices of the models, but not their values.

    Returns:
        The models as detached tensors.
    """
    is_sequence = versions.ndim > 0 if isinstance(versions, Tensor) else isinstance(versions, Sequence)
    if not is_sequence or len(versions) == 0:
        given = "none" if is_sequence else "a number" if isinstance(versions, Tensor) else type(versions).__name__
        raise ArgumentError(
            f"{name}: expected at least one model, a tensor (k, ...) or a sequence of them; got {given}"
        )
    return [_check_like(space, point, f"{name}[{i}]", versions[0]) for i, point in enumerate(versions)]


def _check_like(space: Manifold, point: Any, name: str, like: Tensor | None) -> Tensor:
    """Check that a model has the shape of the space, and the shape, dtype and device of `like`.

    Returns:
        The model as a detached tensor.
    """
    check_not_model(name, point)
    model = check_shape(name, point, *space.axes)
    if like is not None and (model.shape, model.dtype, model.device) != (like.shape, like.dtype, like.device):
        expected, given = ((*x.shape, x.dtype, x.device.type) for x in (like, model))
        raise ArgumentError(f"{name}: expected {expected} like the previous models, got {given}")
    return model.detach()


def _check_values(space: Manifold, point: Tensor, name: str) -> None:
    """Check that a model is finite and on the space.

    Raises:
        ArgumentError: if it is not.
    """
    check_finite(name, point)
    if not space.flat and "project" in space.capabilities:
        check_point(space, point, name=name)


def check_weights(weights: Weights, k: int) -> Float[Tensor, " k"]:
    """Check k weights, and return them in float64, normalised to the sum 1.

    Raises:
        ArgumentError: if `weights` are not k finite numbers >= 0 with a positive sum.
    """
    given: Any = [1.0] * k if weights is None else weights
    try:
        # A conversion to real numbers would silently drop imaginary parts, so complex numbers are tested first. Arrays
        # are copied, because torch cannot read every array.
        given = np.array(given, np.complex128, order="C") if isinstance(given, np.ndarray) else given
        z = torch.as_tensor(given, dtype=torch.complex128, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ArgumentError(f"weights: expected {k} numbers, got {short_repr(weights)}") from None
    if z.shape != (k,):
        raise ArgumentError(f"weights: expected one for each of {k} models, got shape {tuple(z.shape)}")
    numbers = z.tolist()  # Python checks a few numbers faster than torch.
    if not all(0 <= x.real < math.inf and x.imag == 0 for x in numbers) or not any(x.real for x in numbers):
        raise ArgumentError(f"weights: expected finite numbers >= 0 with a positive sum, got {short_repr(weights)}")
    w = z.real
    total = w.sum()
    # The sum of finite weights can overflow. Their ratios do not.
    if float(total) == math.inf:
        w = w / w.max()
        total = w.sum()
    return w / total
