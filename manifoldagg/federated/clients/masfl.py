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
    r"""Trainer for the rule MasFL, which takes gradient steps with momentum and a control variate.

    The trainer takes K steps from the server's model. In the formula, $\theta$ is the local model, $\nabla F$ is the
    gradient of the client's loss on a batch, and $\eta$ is the learning rate:

    $$\theta \leftarrow \theta - \eta \big(\beta\,(\nabla F(\theta) - c_i + c) + (1 - \beta)\, g\big).$$

    The remaining symbols come from the server's message:

    - $c_i$ is the control variate of this client. It is 0 if the message does not contain it.
    - $c$ is the mean of the control variates of all clients, and $g$ is the momentum. The message contains their
      combination $\beta c + (1 - \beta) g$ as one tensor.
    - $\beta$ is the momentum coefficient.
    - The number `opening` is not 0 if the server requests an initial gradient. In this case, the trainer takes no
      steps. It only computes the mean of K gradients at the server's model.

    The payload contains the local model, and the mean of the K gradients as the tensor `gradient`.

    Args:
        epochs: the number of passes over the client's batches.
        steps: the number K of steps. If `steps` is given, the trainer ignores `epochs`.
        rate: the learning rate $\eta > 0$.

    Raises:
        ArgumentError: if an option is out of range. The error message contains the name of the option.

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
    r"""Trainer for the rule AdaMasFL, which takes steps of a fixed length.

    The trainer takes K steps of the length $\eta$ from the server's model:

    $$\theta \leftarrow \theta - \eta\, \frac{g_i}{\|g_i\|}, \qquad
      g_i = \beta\, (\nabla F(\theta) - c_i + c) + (1 - \beta)\, g.$$

    $\theta$ is the local model, and $\nabla F$ is the gradient of the client's loss on a batch. The control variates
    $c_i$ and $c$, the momentum $g$ and its parameter $\beta$ come from the server's message, as in
    [`ControlVariate`][manifoldagg.federated.clients.ControlVariate]. The message also contains K and $\eta$, so the
    trainer has no options.

    The payload contains the local model, and the mean of the gradients as the tensor `gradient`. If $\|g_i\| = 0$, the
    training ends early, and the mean includes the gradients up to this step.

    The norm of a very large or very small gradient neither overflows nor underflows. To achieve this, the trainer
    scales the vector by a power of 2, close to the inverse of the largest entry, before it computes the norm.

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
    r"""Return the learning rate $\eta$ and the number K of steps in a message of AdaMasFL."""
    if missing := {"rate", "steps"} - message.numbers.keys():
        raise ArgumentError(f"message: expected one of AdaMasFL, got numbers without {', '.join(sorted(missing))}")
    return message.numbers["rate"], int(message.numbers["steps"])


def _control_variate_steps(task: TrainingTask, phases: Phases, advance: Callable[[Tensor, Tensor], bool]) -> Payload:
    r"""Run local training steps along the direction $\beta (\nabla F - c_i + c) + (1 - \beta) g$.

    Here, $\nabla F$ is the gradient of the client's loss on a batch. The server determines the client's control variate
    $c_i$, the mean control variate $c$, the momentum $g$ and the weight $\beta \in (0, 1]$ of the new gradient.

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
