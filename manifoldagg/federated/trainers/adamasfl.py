"""The client of AdaMasFL: local steps of one length, whatever the scale of the loss."""

import math
from dataclasses import dataclass

from torch import Tensor

from manifoldagg.curves import Phases
from manifoldagg.errors import ArgumentError, DivergenceError
from manifoldagg.federated.contract import Payload
from manifoldagg.federated.trainers.base import Assignment, Client
from manifoldagg.federated.trainers.masfl import controlled_steps
from manifoldagg.kernels import combine, gram

__all__ = ["Normalised"]


@dataclass(frozen=True)
class Normalised(Client):
    r"""K steps $\theta \leftarrow \theta - \eta\, g_i / \|g_i\|$, $g_i = \beta (\nabla F - c_i + c) + (1 - \beta) g$.

    K and $\eta$ come with the message, so there is nothing to choose; the local model and the mean `gradient` go back.
    $\|g_i\| = 0$ ends the local loop, and the mean is over the gradients taken by then. Lengths are measured in powers
    of 2 of the largest entry: no scale of the loss overflows or vanishes.

    Source: MasFL, Algorithm 4.

    Example:
        >>> import torch
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

    def _train(self, given: Assignment) -> Payload:
        numbers = given.message.numbers
        if missing := {"rate", "steps"} - numbers.keys():
            raise ArgumentError(f"message: expected one of AdaMasFL; numbers lack {', '.join(sorted(missing))}")

        def advance(theta: Tensor, step: Tensor) -> bool:
            low, high = step.aminmax()
            peak = max(-low.item(), high.item())
            if not math.isfinite(peak):
                raise DivergenceError("the direction of a local step is not finite")
            if peak == 0:
                return False
            # A power of 2 rounds nothing. It is at most 2^1000, so that it is finite itself for a subnormal peak.
            unit = combine(None, [step], [2.0 ** min(1000, -math.frexp(peak)[1])], out=step)
            combine(theta, [unit], [-numbers["rate"] / math.sqrt(gram([unit])[0, 0, 0].item())], out=theta)
            return True

        return controlled_steps(given, Phases.first(0, int(numbers["steps"])), advance)
