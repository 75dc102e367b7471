"""Sharpness-aware minimisation, a training method that finds flat minima of the loss.

At each step, the method evaluates the gradient not at the current model but at the ascent point. The ascent point is a
nearby point at which the loss is approximately maximal.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from manifoldagg._validation import check_number
from manifoldagg.errors import ArgumentError, DivergenceError
from manifoldagg.manifolds import Loss, Manifold, formulas
from manifoldagg.manifolds.manifold import Point
from manifoldagg.manifolds.optimizers import lower, transport_momentum

__all__ = ["ASAM", "SAM", "Sharpness", "sharpness_aware_gradient"]


@runtime_checkable
class Sharpness(Protocol):
    """Interface for methods that select the ascent point of sharpness-aware training.

    The ascent point is a point near the current model at which the loss is approximately maximal. Training evaluates
    the gradient at this point.
    """

    def perturb(self, space: Manifold, theta: Point, derivative: Tensor) -> Point:
        """Return the ascent point: a point near the current model at which the loss is approximately maximal.

        Args:
            space: the space of the model.
            theta: the current model (*shape).
            derivative: the partial derivatives of the loss at `theta` (*shape), as autograd computes them.

        Returns:
            The ascent point (*shape).

        Raises:
            ArgumentError: if the method is not defined on `space`.
        """


@dataclass(frozen=True)
class SAM:
    r"""Sharpness-aware minimisation (SAM) with the ascent point $\exp_\theta(\rho\, g / \|g\|_\theta)$.

    SAM evaluates the gradient for the training step at the ascent point instead of the current model $\theta$. Let $g$
    be the gradient of the loss at $\theta$. To first order, the ascent point maximises the loss within the distance
    $\rho$ of $\theta$. On a flat space, it is $\theta + \rho g / \|g\|$. If $g = 0$, it is $\theta$.

    Args:
        radius: $\rho > 0$, the distance of the ascent point.

    Raises:
        ArgumentError: if `radius` is not a positive number.

    Source: Foret et al. 2021; Yun, Yang 2023 for curved spaces.

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Flat
        >>> SAM(radius=0.5).perturb(Flat(2), torch.zeros(2), torch.tensor([3.0, 4.0]))
        tensor([0.3000, 0.4000])
    """

    radius: float = 0.05

    def __post_init__(self) -> None:
        check_number("radius", self.radius, above=0)

    def perturb(self, space: Manifold, theta: Point, derivative: Tensor) -> Point:
        gradient = space._gradient(theta, derivative)
        return space._exp(theta, _scale_to_radius(self.radius, gradient, formulas.norm(space, theta, gradient)))


@dataclass(frozen=True)
class ASAM:
    r"""Adaptive sharpness-aware minimisation (ASAM), which scales the perturbation of each parameter by its magnitude.

    A training step from the model $\theta$ uses the gradient at the ascent point $\theta + \rho\, T^2 g / \|T g\|$.
    Here, $\rho$ is the radius of the perturbation, and $g$ is the gradient of the loss at $\theta$. The vector
    $T = |\theta| + \eta$ contains the scales of the parameters, and $\eta$ is the minimum scale. All products are
    elementwise. With $\eta = 0$, the method is invariant to a rescaling of the parameters. It requires a flat space.

    Args:
        radius: $\rho > 0$, relative to the parameters. A common value is ten times the radius of SAM.
        eta: $\eta \ge 0$, the minimum scale.

    Raises:
        ArgumentError: if `radius` is not a positive number or `eta` is negative.

    Source: Kwon et al. 2021, (7).

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Flat
        >>> ASAM(radius=0.5, eta=0.0).perturb(Flat(2), torch.tensor([0.0, 2.0]), torch.tensor([3.0, 4.0]))
        tensor([0., 3.])
    """

    radius: float = 0.5
    eta: float = 0.01

    def __post_init__(self) -> None:
        check_number("radius", self.radius, above=0)
        check_number("eta", self.eta, at_least=0)

    def perturb(self, space: Manifold, theta: Point, derivative: Tensor) -> Point:
        if not space.flat:
            raise ArgumentError(f"sharpness: expected a flat space for ASAM, got {space}; use SAM")
        scale = theta.abs() + self.eta
        # In the coordinates θ / scale, the derivative is `scaled`, and the ascent step has the length ρ.
        scaled = scale * derivative
        return theta + scale * _scale_to_radius(self.radius, scaled, formulas.norm(space, theta, scaled))


def sharpness_aware_gradient(
    space: Manifold, loss: Loss, theta: Point, batch: Any, sharpness: Sharpness | None = None
) -> tuple[Tensor, Tensor]:
    r"""Compute the loss at the point $\theta$, and the derivative for a step of sharpness-aware training.

    This derivative is evaluated at the ascent point $\theta'$, a point near $\theta$ with a larger loss. The method
    `sharpness.perturb` computes $\theta'$ from the derivative at $\theta$. The function therefore needs two forward and
    backward passes. On a curved space, it transports the derivative from $\theta'$ to $\theta$.

    Args:
        space: the space of $\theta$.
        loss: a function `loss(theta, batch)` that returns a scalar.
        theta: the point (*shape). It is not modified, and the result has no derivatives with respect to it.
        batch: the second argument of the loss.
        sharpness: [`SAM`][manifoldagg.curves.sharpness.SAM], [`ASAM`][manifoldagg.curves.sharpness.ASAM], or `None`
            for the derivative at $\theta$.

    Returns:
        The scalar loss at `theta`, and the derivative (*shape).

    Raises:
        ArgumentError: if the loss is not a scalar that depends on `theta`, or `sharpness` is not defined on `space`.
        DivergenceError: if the loss at the ascent point is not finite.

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Flat
        >>> square = lambda theta, batch: theta.square().sum()
        >>> sharpness_aware_gradient(Flat(1), square, torch.tensor([1.0]), None, SAM(radius=0.5))
        (tensor(1.), tensor([3.]))
    """
    value, derivative = _loss_and_derivative(loss, theta, batch)
    # If the loss is not finite, the ascent point is undefined. The caller reports the loss.
    if sharpness is None or not bool(torch.isfinite(value)):
        return value, derivative
    # As in Foret et al. 2021, the derivative of the ascent point with respect to θ is ignored.
    with torch.no_grad():
        ascent_point = sharpness.perturb(space, theta.detach(), derivative)
    ascent_loss, slope = _loss_and_derivative(loss, ascent_point, batch)
    if not bool(torch.isfinite(ascent_loss)):
        raise DivergenceError(
            f"loss: expected a finite value at the ascent point of {sharpness}, got {ascent_loss.item()}; "
            "reduce the radius"
        )
    # A gradient at θ' is a tangent vector there. It must be transported to θ, where the step is taken. `lower` then
    # converts it back to a derivative in coordinates, as autograd computes it.
    if not space.flat:
        with torch.no_grad():
            slope = transport_momentum(space, ascent_point, theta.detach(), space._gradient(ascent_point, slope))
        slope = lower(space, theta, slope)
    return value, slope


def _loss_and_derivative(loss: Callable[[Tensor, Any], Tensor], theta: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """Compute the loss at `theta` and its derivative, both detached from the autograd graph.

    Raises:
        ArgumentError: if the loss is not a scalar that depends on `theta`.
    """
    with torch.enable_grad():
        # A detached copy is a leaf of its own, so the derivative is not added to the gradient of the caller's tensor.
        theta = theta.detach().requires_grad_()
        value = loss(theta, batch)
        if not (isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad):
            given = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ArgumentError(f"loss: expected a scalar tensor that depends on theta, got {given}")
        (slope,) = torch.autograd.grad(value, theta)
    return value.detach(), slope


def _scale_to_radius(radius: float, u: Tensor, length: Tensor) -> Tensor:
    """Scale the vector `u` of the given length to the length `radius`. A zero vector stays zero."""
    # At a stationary point, the gradient has no direction. The ascent point is then θ itself.
    return radius * u / torch.where(length == 0, 1.0, length)
