"""Sharpness-aware minimisation: gradients at an ascent point, which favour flat minima."""

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
    """Base class of the choice of the ascent point near `theta`."""

    def perturb(self, space: Manifold, theta: Point, derivative: Tensor) -> Point:
        """Return the ascent point (*shape) of `theta` for the derivative (*shape) of the loss by coordinates.

        Raises:
            ArgumentError: if it has no meaning on `space`.
        """


@dataclass(frozen=True)
class SAM:
    r"""Ascent by a radius: $\exp_\theta(\rho\, g / \|g\|_\theta)$, $g$ the gradient of the loss.

    On a flat space that is $\theta + \rho g / \|g\|$. To first order it is the highest point within $\rho$. Where
    $g = 0$ it is $\theta$.

    Args:
        radius: $\rho > 0$.

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
    r"""Ascent in proportion to the parameters: $\theta + \rho\, T^2 g / \|T g\|$, elementwise.

    $T = |\theta| + \eta$. With $\eta = 0$ it goes along when coordinates are rescaled. On flat spaces only.

    Args:
        radius: $\rho > 0$, relative to the parameters: a tenfold of what SAM takes is usual.
        eta: $\eta \ge 0$, the least scale.

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
            raise ArgumentError(f"sharpness: ASAM scales coordinates, which {space} does not have; use SAM")
        scale = theta.abs() + self.eta
        scaled = scale * derivative
        return theta + scale * _scale_to_radius(self.radius, scaled, formulas.norm(space, theta, scaled))


def sharpness_aware_gradient(
    space: Manifold, loss: Loss, theta: Point, batch: Any, sharpness: Sharpness | None = None
) -> tuple[Tensor, Tensor]:
    r"""Compute the loss at $\theta$, and its derivative by coordinates at the ascent point of `sharpness`.

    With sharpness, $\theta' =$ `perturb` of the derivative at $\theta$, and the result is the derivative at
    $\theta'$; on a curved space the gradient there, carried back to $\theta$. It costs a second pass of the model.

    Args:
        space: where $\theta$ lives.
        loss: `loss(theta, batch)` to a scalar.
        theta: (*shape); neither written nor differentiated further.
        batch: what the loss takes.
        sharpness: [`SAM`][manifoldagg.curves.sharpness.SAM], [`ASAM`][manifoldagg.curves.sharpness.ASAM], or nothing.

    Returns:
        The loss at `theta`, a scalar, and the derivative (*shape).

    Raises:
        ArgumentError: if the loss is not a scalar that depends on `theta`, or `sharpness` has no meaning on `space`.
        DivergenceError: if the loss uphill is not finite.

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Flat
        >>> square = lambda theta, batch: theta.square().sum()
        >>> sharpness_aware_gradient(Flat(1), square, torch.tensor([1.0]), None, SAM(radius=0.5))
        (tensor(1.), tensor([3.]))
    """
    value, derivative = _loss_and_derivative(loss, theta, batch)
    if sharpness is None or not bool(torch.isfinite(value)):
        return value, derivative
    with torch.no_grad():
        uphill = sharpness.perturb(space, theta.detach(), derivative)
    there, slope = _loss_and_derivative(loss, uphill, batch)
    if not bool(torch.isfinite(there)):
        raise DivergenceError(f"the loss is {there.item()} uphill, at {sharpness}; try a smaller radius")
    if not space.flat:
        with torch.no_grad():
            slope = transport_momentum(space, uphill, theta.detach(), space._gradient(uphill, slope))
        slope = lower(space, theta, slope)
    return value, slope


def _loss_and_derivative(loss: Callable[[Tensor, Any], Tensor], theta: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        theta = theta.detach().requires_grad_()
        value = loss(theta, batch)
        if not (isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad):
            given = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ArgumentError(f"loss: expected a scalar tensor that depends on theta, got {given}")
        (slope,) = torch.autograd.grad(value, theta)
    return value.detach(), slope


def _scale_to_radius(radius: float, u: Tensor, length: Tensor) -> Tensor:
    """`u` scaled from this length to the radius; 0 stays 0."""
    return radius * u / torch.where(length == 0, 1.0, length)
