"""The client of every rule that takes a plain model: local training, with an optional proximal term."""

from dataclasses import dataclass
from typing import Any

import torch

from manifoldagg.curves import Bezier, Phases, Sharpness, Training
from manifoldagg.federated.contract import Payload
from manifoldagg.federated.trainers.base import Assignment, Client
from manifoldagg.manifolds.optimizers import Optimizer

__all__ = ["Local", "Proximal"]


@dataclass(frozen=True)
class Local(Client):
    r"""Minimise $\ell(\theta) + \tfrac{\mu}{2}\, d(\theta, \Theta^t)^2$ from the server's model.

    It is the first phase of [`Curve`][manifoldagg.federated.trainers.Curve] alone: a curve of degree 1, whose end is
    the one point that is sent back. The distance is that of the space; on a curved one the steps are Riemannian, and
    points stay on it.

    Args:
        epochs: passes over the client's batches.
        steps: optimiser steps in place of `epochs`.
        optimizer: of [`Training`][manifoldagg.curves.Training], as all that follow.
        rate: its learning rate.
        proximal: $\mu$.
        sharpness: `SAM` or `ASAM` of `manifoldagg.curves`.

    Raises:
        ArgumentError: naming the option that is out of range.

    Source: Manifold (6) with S = 1; FedProx (Li et al. 2020).

    Example:
        >>> Local(epochs=2, rate=1e-3, proximal=1e-3).epochs
        2
    """

    epochs: int = 2
    steps: int | None = None
    optimizer: Optimizer = torch.optim.Adam
    rate: float = 1e-3
    proximal: float = 0.0
    sharpness: Sharpness | None = None

    def __post_init__(self) -> None:
        self._options()

    def _options(self) -> dict[str, Any]:
        return {
            "phases": Phases.first(self.epochs, self.steps),
            "training": Training(self.optimizer, self.rate, self.proximal, self.sharpness),
        }

    def _train(self, given: Assignment) -> Payload:
        samples = given.samples
        learned = given.fit(Bezier(given.space, 1), **self._options())
        return Payload(learned.phi[1:], samples)


@dataclass(frozen=True)
class Proximal(Local):
    r"""Minimise $\ell(\theta) + \tfrac{\mu}{2}\, d(\theta, \Theta^t)^2$ with $\mu = 0.01$ unless given otherwise.

    It is [`Local`][manifoldagg.federated.trainers.Local] with another default. With the rule
    [`FedAvg`][manifoldagg.federated.rules.FedAvg] it is FedProx.

    Source: Li et al. 2020, whose experiments take $\mu$ from .001, .01, .1 and 1.

    Example:
        >>> Proximal(steps=10).proximal
        0.01
    """

    proximal: float = 0.01
