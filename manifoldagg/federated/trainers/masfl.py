"""The client of MasFL: local steps with momentum and a control variate, and the mean gradient on the way."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manifoldagg.corrections.frame import require_flat
from manifoldagg.curves.phases import Phases, Schedule
from manifoldagg.curves.sharpness import sharp_gradient
from manifoldagg.errors import ArgumentError, DivergenceError, check_count, check_number, is_finite
from manifoldagg.federated.contract import Memory, Message, Payload
from manifoldagg.federated.trainers.curve import count_samples
from manifoldagg.kernels import combine
from manifoldagg.manifolds import Loss, Manifold


@dataclass(frozen=True)
class ControlVariate:
    r"""K steps $\theta \leftarrow \theta - \eta \big(\beta\,(\nabla F(\theta) - c_i + c) + (1 - \beta)\, g\big)$.

    The message brings $\beta c + (1 - \beta) g$, $c_i$ (0 where it has none) and $\beta$; the mean of the K gradients
    goes back. Where the rule asks for an opening, K gradients are taken at the start and the client stays there.

    Args:
        epochs: passes over the client's batches.
        steps: K in place of `epochs`.
        rate: $\eta$.

    Raises:
        ArgumentError: naming the option that is out of range.

    Source: MasFL, Algorithm 2.

    Example:
        >>> ControlVariate(steps=10, rate=0.1).steps
        10
    """

    epochs: int = 2
    steps: int | None = None
    rate: float = 1e-2

    def __post_init__(self) -> None:
        check_count("epochs" if self.steps is None else "steps", self.epochs if self.steps is None else self.steps)
        check_number("rate", self.rate, above=0)

    def train(
        self,
        space: Manifold,
        message: Message,
        loss: Loss,
        batches: Iterable[Any],
        memory: Memory,
        *,
        generator: torch.Generator,
    ) -> Payload:
        """Train from `message.start`.

        Returns:
            The local model, the mean `gradient`, and whether this was an `opening`.

        Raises:
            ArgumentError: if the message is not of MasFL or AdaMasFL, the loss is no scalar, or `space` curved.
            DivergenceError: if a loss or a gradient is not finite.
        """

        def advance(theta: Tensor, step: Tensor) -> bool:
            combine(theta, [step], [-self.rate], out=theta)
            return True

        amount = self.epochs if self.steps is None else self.steps
        return descend(
            space, message, loss, batches, amount, advance, count_steps=self.steps is not None, generator=generator
        )


def descend(
    space: Manifold,
    message: Message,
    loss: Loss,
    batches: Iterable[Any],
    amount: int,
    advance: Callable[[Tensor, Tensor], bool],
    *,
    count_steps: bool,
    generator: torch.Generator,
) -> Payload:
    r"""Local steps along $\beta (\nabla F - c_i + c) + (1 - \beta) g$, however long `advance` makes them.

    Args:
        space: flat.
        message: of a rule with control variates.
        loss: `loss(theta, batch)` to a scalar.
        batches: what can be iterated again and again.
        amount: of steps, or of passes over `batches`.
        advance: moves its first argument along the second in place; `False` ends the loop.
        count_steps: whether `amount` is steps.
        generator: that a shuffling `batches` may draw from.

    Returns:
        As [`ControlVariate`][manifoldagg.federated.trainers.ControlVariate].
    """
    require_flat(space)
    if missing := {"beta", "opening"} - message.numbers.keys():
        raise ArgumentError(f"message: expected one of MasFL or AdaMasFL; numbers lack {', '.join(sorted(missing))}")
    opening, beta, control = message.numbers["opening"], message.numbers["beta"], message.tensors.get("control")
    if not opening and "direction" not in message.tensors:
        raise ArgumentError("message: expected one of MasFL or AdaMasFL; tensors lack direction")
    phases = Phases.first(0, amount) if count_steps else Phases.first(amount)
    theta, total, count = message.start.detach().clone(), torch.zeros_like(message.start, dtype=torch.float64), 0
    for _, batch in Schedule(batches, phases):
        value, slope = sharp_gradient(space, loss, theta, batch)
        if not (torch.isfinite(value) and is_finite(slope)):
            raise DivergenceError(f"the loss is {value.item()}, or its gradient not finite, at step {count}")
        total, count = total.add_(slope), count + 1
        if not opening:
            step = combine(None, [message.tensors["direction"], slope], [1.0, beta], minus=[None, control])
            if not advance(theta, step):
                break
    if not is_finite(theta):
        raise DivergenceError("the local model left the finite numbers; try a smaller rate")
    gradient = combine(None, [total], [1 / count], out=torch.empty_like(theta))
    if not is_finite(gradient):
        raise DivergenceError("the mean of the gradients overflows; try a smaller loss")
    return Payload(theta[None], count_samples(batches), {"gradient": gradient}, {"opening": opening})
