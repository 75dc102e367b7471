"""The trainers for MasFL and AdaMasFL, which take steps with momentum and a control variate."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from manifoldagg._validation import check_count, check_number, is_finite
from manifoldagg.corrections.frame import require_flat
from manifoldagg.curves import Phases, sharpness_aware_gradient
from manifoldagg.curves.phases import Schedule
from manifoldagg.errors import ArgumentError, DivergenceError
from manifoldagg.federated.clients.base import BaseTrainer, TrainingTask
from manifoldagg.federated.types import Message, Payload
from manifoldagg.kernels import combine, gram

__all__ = ["ControlVariate", "Normalised"]


@dataclass(frozen=True)
class ControlVariate(BaseTrainer):
    r"""Trainer of MasFL, with momentum and a control variate.

    The trainer takes K steps
    $\theta \leftarrow \theta - \eta \big(\beta\,(\nabla F(\theta) - c_i + c) + (1 - \beta)\, g\big)$.

    The message contains $\beta c + (1 - \beta) g$, $\beta$, and $c_i$. If $c_i$ is missing, it is 0. The payload
    contains the local model and the mean `gradient` of the K steps. If the number `opening` in the message is not 0,
    the trainer only computes the mean of K gradients at the start, and takes no steps.

    Args:
        epochs: the number of passes over the client's batches.
        steps: K, in place of `epochs`.
        rate: $\eta$.

    Raises:
        ArgumentError: if an option is out of range. The message names it.

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

    def num_steps(self, message: Message, num_batches: int) -> int:
        return self.epochs * num_batches if self.steps is None else self.steps

    def _train(self, task: TrainingTask) -> Payload:
        def advance(theta: Tensor, step: Tensor) -> bool:
            combine(theta, [step], [-self.rate], out=theta)
            return True

        return _control_variate_steps(task, Phases.first(self.epochs, self.steps), advance)


@dataclass(frozen=True)
class Normalised(BaseTrainer):
    r"""Trainer of AdaMasFL, with normalised steps.

    The trainer takes K steps $\theta \leftarrow \theta - \eta\, g_i / \|g_i\|$ with
    $g_i = \beta (\nabla F - c_i + c) + (1 - \beta) g$.

    The message contains K and $\eta$, so the trainer has no options. The payload contains the local model and the mean
    `gradient`. If $\|g_i\| = 0$, the training ends, and the mean includes the gradients up to this step. Before a norm
    is computed, the vector is scaled by a power of 2 close to its largest entry. The norms of very large or very small
    gradients therefore neither overflow nor underflow.

    Source: MasFL, Algorithm 4.

    Example:
        >>> from manifoldagg.federated import Message
        >>> from manifoldagg.manifolds import Flat
        >>> start, direction = torch.zeros(2), torch.tensor([3.0, 4.0])
        >>> numbers = {"opening": 0.0, "beta": 1.0, "rate": 0.5, "steps": 2.0}
        >>> message = Message(start, {"direction": direction}, numbers)
        >>> batches = [(torch.zeros(1, 2),)]
        >>> loss = lambda theta, batch: (batch[0] @ theta).sum()
        >>> Normalised().train(Flat(2), message, loss, batches, None, generator=torch.Generator()).points
        tensor([[-0.6000, -0.8000]])
    """

    def num_steps(self, message: Message, num_batches: int) -> int:
        return _rate_and_steps(message)[1]

    def _train(self, task: TrainingTask) -> Payload:
        rate, steps = _rate_and_steps(task.message)

        def advance(theta: Tensor, step: Tensor) -> bool:
            low, high = step.aminmax()
            peak = max(-low.item(), high.item())
            if not math.isfinite(peak):
                raise DivergenceError("the direction of a local step is not finite")
            if peak == 0:
                return False
            # Scaling by a power of 2 is exact. The power is at most 2^1000, so that it is finite for a subnormal peak.
            unit = combine(None, [step], [2.0 ** min(1000, -math.frexp(peak)[1])], out=step)
            combine(theta, [unit], [-rate / math.sqrt(gram([unit])[0, 0, 0].item())], out=theta)
            return True

        return _control_variate_steps(task, Phases.first(0, steps), advance)


def _rate_and_steps(message: Message) -> tuple[float, int]:
    r"""Return $\eta$ and K of a message of AdaMasFL."""
    if missing := {"rate", "steps"} - message.numbers.keys():
        raise ArgumentError(f"message: expected one of AdaMasFL, got numbers without {', '.join(sorted(missing))}")
    return message.numbers["rate"], int(message.numbers["steps"])


def _control_variate_steps(task: TrainingTask, phases: Phases, advance: Callable[[Tensor, Tensor], bool]) -> Payload:
    r"""Run local steps along $\beta (\nabla F - c_i + c) + (1 - \beta) g$, scaled by `advance`.

    Args:
        task: the task, with a message of a rule with control variates, on a flat space.
        phases: the number of steps, all in the first phase.
        advance: a function that moves its first argument in place along its second argument. If it returns `False`, the
            loop ends.

    Returns:
        The payload with the local model, the mean `gradient` and the number `opening`.

    Raises:
        ArgumentError: if the message is from another rule, if the loss is not a scalar, or if the space is curved.
        DivergenceError: if a loss or a gradient is not finite.
    """
    message = task.message
    require_flat(task.space)
    if missing := {"beta", "opening"} - message.numbers.keys():
        raise ArgumentError(
            f"message: expected one of MasFL or AdaMasFL, got numbers without {', '.join(sorted(missing))}"
        )
    opening = message.numbers["opening"]
    if not opening and "direction" not in message.tensors:
        raise ArgumentError("message: expected one of MasFL or AdaMasFL, got tensors without direction")
    theta = message.start.detach().clone()
    total = torch.zeros_like(theta, dtype=torch.float64)
    count = 0
    for _, batch in Schedule(task.batches, phases):
        value, slope = sharpness_aware_gradient(task.space, task.loss, theta, batch)
        if not (torch.isfinite(value) and is_finite(slope)):
            raise DivergenceError(f"the loss is {value.item()}, or its gradient not finite, at step {count}")
        total.add_(slope)
        count += 1
        if not opening:
            rows = [message.tensors["direction"], slope]
            coefficients = [1.0, message.numbers["beta"]]
            step = combine(None, rows, coefficients, minus=[None, message.tensors.get("control")])
            if not advance(theta, step):
                break
    if not is_finite(theta):
        raise DivergenceError("the local model is not finite; try a smaller rate")
    gradient = combine(None, [total], [1 / count], out=torch.empty_like(theta))
    if not is_finite(gradient):
        raise DivergenceError("the mean of the gradients overflows; try a smaller loss")
    return Payload(theta[None], task.samples, {"gradient": gradient}, {"opening": opening})
