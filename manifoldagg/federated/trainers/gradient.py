"""The client of Generalized AsyncSGD: one stochastic gradient at the server's model."""

from collections.abc import Sized
from dataclasses import dataclass, replace
from itertools import islice

import torch

from manifoldagg.curves import Sharpness
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.contract import Payload
from manifoldagg.federated.trainers.base import Assignment, Client
from manifoldagg.federated.trainers.local import Local

__all__ = ["Gradient"]


@dataclass(frozen=True)
class Gradient(Client):
    r"""$g = \nabla \ell(\Theta^t)$ on one batch, returned as the model $\Theta^t - g$ with the samples of that batch.

    The batch is drawn uniformly where the number of batches is known, else it is the first: a list of batches would
    answer with the same one every time. A model of rounded numbers keeps a gradient up to
    $\frac\varepsilon2 \|\Theta\|$, what a step with it is rounded by anyway.

    Args:
        sharpness: the gradient of `SAM` or `ASAM` of `manifoldagg.curves` in place of the plain one.

    Source: Queue, Algorithm 2.

    Example:
        >>> import torch
        >>> from manifoldagg.federated import Message
        >>> from manifoldagg.manifolds import Flat
        >>> start, batch = torch.tensor([1.0, 2.0]), (torch.ones(4, 1), torch.ones(4))
        >>> payload = Gradient().train(
        ...     Flat(2), Message(start), lambda theta, batch: theta.square().sum(), [batch], None,
        ...     generator=torch.Generator(),
        ... )
        >>> payload.points, payload.samples
        (tensor([[-1., -2.]]), 4)
    """

    sharpness: Sharpness | None = None

    def __post_init__(self) -> None:
        self._step()

    def _step(self) -> Local:
        return Local(steps=1, optimizer=torch.optim.SGD, rate=1.0, sharpness=self.sharpness)

    def _train(self, given: Assignment) -> Payload:
        try:
            count = len(given.batches) if isinstance(given.batches, Sized) else 1
        except TypeError:  # a loader has a length that it does not know
            count = 1
        place = 0
        if count > 1:
            place = int(torch.randint(count, (), generator=given.generator, device=given.generator.device))
        drawn = list(islice(given.batches, place, place + 1))
        if not drawn:
            raise ArgumentError("batches: expected at least one, got none")
        return self._step()._train(replace(given, batches=drawn))
