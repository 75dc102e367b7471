"""Proximal terms, which penalise the distance of a model from the point at which its training started.

Methods such as FedProx add a proximal term to the loss of each client. The term keeps the model of the client close to
the model of the server.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from manifoldagg._validation import check_number, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import Manifold
from manifoldagg.manifolds.optimizers import lower

__all__ = ["ProximalTerm", "add_proximal_gradient", "check_proximal"]


@runtime_checkable
class ProximalTerm(Protocol):
    r"""Interface for proximal terms, which training on a flat space adds to the loss.

    A proximal term $r(\theta, \Theta^t)$ penalises the distance of the model $\theta$ from the model $\Theta^t$ at the
    start of training. An example is [`LorentzProximal`][manifoldagg.federated.clients.LorentzProximal], the proximal
    term of FedMRUR.

    The proximal term of FedProx, $\tfrac{\mu}{2}\, d(\theta, \Theta^t)^2$ with the distance $d$, does not need this
    interface. To use it, pass the number $\mu \ge 0$ as the option `proximal`. This also works on curved spaces.
    """

    def gradient(self, theta: Tensor, base: Tensor) -> Tensor:
        r"""Return the gradient in $\theta$.

        Args:
            theta: $\theta$, the current point of training, (P,).
            base: $\Theta^t$, the point where training started, (P,).

        Returns:
            A new tensor (P,) in the dtype of `theta`.
        """


def check_proximal(proximal: float | ProximalTerm) -> None:
    """Check that an option `proximal` is a number >= 0 or a proximal term.

    Raises:
        ArgumentError: if `proximal` is neither.
    """
    # A class has the method of the protocol too, so `isinstance` alone would accept a class in place of an object.
    if isinstance(proximal, type) or not isinstance(proximal, int | float | ProximalTerm):
        raise ArgumentError(
            f"proximal: expected a number >= 0 or an object with `gradient`, got {short_repr(proximal)}"
        )
    if not isinstance(proximal, ProximalTerm):
        check_number("proximal", proximal, at_least=0)


@torch.no_grad()
def add_proximal_gradient(
    space: Manifold, derivative: Tensor, theta: Tensor, base: Tensor, proximal: float | ProximalTerm
) -> Tensor:
    r"""Add the derivative of the proximal term to the derivative of the loss, and return the sum.

    Args:
        space: the space of the points. It must be flat if `proximal` is a `ProximalTerm`.
        derivative: the derivative of the loss, (*shape).
        theta: $\theta$, (*shape).
        base: $\Theta^t$, (*shape).
        proximal: $\mu$, or a proximal term.
    """
    if isinstance(proximal, ProximalTerm):
        return derivative + proximal.gradient(theta.flatten(), base.flatten()).view_as(derivative)
    if not proximal:
        return derivative
    # The gradient of d²/2 is -log_θ(Θ^t). `lower` converts it to a derivative in coordinates on a curved space.
    to_base = space._log(theta, base)
    return derivative - proximal * (to_base if space.flat else lower(space, theta, to_base))
