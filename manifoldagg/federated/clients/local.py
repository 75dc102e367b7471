"""Client trainers for local epochs with an optional proximal term, and for a single gradient step."""

import math
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from manifoldagg._validation import check_count, check_number, short_repr
from manifoldagg.curves import Bezier, Phases, ProximalTerm, Sharpness, Training
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.clients.base import BaseTrainer, TrainingTask
from manifoldagg.federated.types import Message, Payload
from manifoldagg.manifolds.optimizers import Optimizer

__all__ = ["Epochs", "Gradient", "Local", "Proximal"]


@dataclass(frozen=True)
class Local(BaseTrainer):
    r"""Trainer that minimises the client's loss, with an optional proximal term.

    The trainer starts from the server's model $\Theta^t$ and minimises
    $\ell(\theta) + \tfrac{\mu}{2}\, d(\theta, \Theta^t)^2$ over the local model $\theta$. Here, $\ell$ is the client's
    loss, $\mu$ is the weight of the proximal term, and $d$ is the distance in the space. On a curved space, the
    optimizer takes Riemannian steps, so the models stay on the space.

    Related classes:

    - [`LorentzProximal`][manifoldagg.federated.clients.LorentzProximal] is the proximal term of FedMRUR.
    - [`Curve`][manifoldagg.federated.clients.Curve] trains a curve of models instead of a single model.

    Args:
        epochs: the number of passes over the client's batches.
        steps: the number of optimizer steps. If `steps` is given, the trainer ignores `epochs`.
        optimizer: the optimizer class, as in [`Training`][manifoldagg.curves.Training].
        rate: the learning rate.
        proximal: the weight $\mu$ of the squared distance, or a
            [`ProximalTerm`][manifoldagg.curves.ProximalTerm] in place of the squared distance.
        sharpness: `SAM` or `ASAM` of `manifoldagg.curves`, for sharpness-aware gradients.

    Raises:
        ArgumentError: if an option is out of range. The error message contains the name of the option.

    Source: Manifold (6) with the position S = 1, the end of the curve; FedProx (Li et al. 2020).

    Example:
        >>> Local(epochs=2, rate=1e-3, proximal=1e-3).epochs
        2
    """

    epochs: int = 2
    steps: int | None = None
    optimizer: Optimizer = torch.optim.Adam
    rate: float = 1e-3
    proximal: float | ProximalTerm = 0.0
    sharpness: Sharpness | None = None

    def __post_init__(self) -> None:
        self._options()

    def _options(self) -> dict[str, Any]:
        return {
            "phases": Phases.first(self.epochs, self.steps),
            "training": Training(self.optimizer, self.rate, self.proximal, self.sharpness),
        }

    def num_steps(self, message: Message, num_batches: int) -> int:
        return self.epochs * num_batches if self.steps is None else self.steps

    def _train(self, task: TrainingTask) -> Payload:
        samples = task.samples
        points = self._points(task)
        return Payload(points, samples, buffers=self._buffers(task, points[-1]))

    def _buffers(self, task: TrainingTask, end: Tensor) -> dict[str, Tensor]:
        # The loss is evaluated at perturbed points and never at the model itself if gradients are sharpness-aware, so
        # the statistics must be recomputed at the model.
        return task.buffers(at=None if self.sharpness is None else end)

    def _points(self, task: TrainingTask) -> Tensor:
        return task.fit(Bezier(task.space, 1), **self._options()).phi[1:]


@dataclass(frozen=True)
class Proximal(Local):
    r"""Trainer that minimises the client's loss with a proximal term, as in FedProx.

    `Proximal` equals [`Local`][manifoldagg.federated.clients.Local], except that the default weight of its proximal
    term is $\mu = 0.01$ in place of 0. Together with the rule [`FedAvg`][manifoldagg.federated.rules.FedAvg], it
    implements FedProx.

    Args:
        epochs: the number of passes over the client's batches.
        steps: the number of optimizer steps. If `steps` is given, the trainer ignores `epochs`.
        optimizer: the optimizer class, as in [`Training`][manifoldagg.curves.Training].
        rate: the learning rate.
        proximal: the weight $\mu$ of the squared distance, or a [`ProximalTerm`][manifoldagg.curves.ProximalTerm] in
            place of the squared distance.
        sharpness: `SAM` or `ASAM` of `manifoldagg.curves`, for sharpness-aware gradients.

    Source: Li et al. 2020. Their experiments use the weights 0.001, 0.01, 0.1 and 1.

    Example:
        >>> Proximal(steps=10).proximal
        0.01
    """

    proximal: float | ProximalTerm = 0.01


@dataclass(frozen=True)
class Epochs(BaseTrainer):
    """Trainer that runs as many local epochs as the server requests for the task.

    It calls the trainer [`Local`][manifoldagg.federated.clients.Local]. Use it with a rule that sends the number of
    epochs with each model, such as [`AsyncFedED`][manifoldagg.federated.rules.AsyncFedED].

    Args:
        local: the local training. Its own options `epochs` and `steps` are ignored.
        max_epochs: an upper limit for the number of epochs in the message.

    Raises:
        ArgumentError: if `local` is not a `Local`, or `max_epochs` is not a positive integer.

    Source: Wang et al. 2022 (AsyncFedED), where the server sends the number K of epochs with the model.

    Example:
        >>> Epochs(Local(rate=0.1), max_epochs=8).local.rate
        0.1
    """

    local: Local = field(default_factory=Local)
    max_epochs: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.local, Local):
            raise ArgumentError(f"local: expected a Local, got {short_repr(self.local)}")
        if self.max_epochs is not None:
            check_count("max_epochs", self.max_epochs)

    def num_steps(self, message: Message, num_batches: int) -> int:
        return self._trainer_for(message).num_steps(message, num_batches)

    def _train(self, task: TrainingTask) -> Payload:
        return self._trainer_for(task.message)._train(task)

    def _trainer_for(self, message: Message) -> Local:
        """Return the trainer for the number of epochs in the message."""
        number = message.numbers.get("epochs", math.nan)
        asked = check_number("message: numbers: epochs", number, at_least=1)
        if asked != int(asked):
            raise ArgumentError(f"message: numbers: epochs: expected an integer >= 1, got {asked!r}")
        epochs = int(asked) if self.max_epochs is None else min(int(asked), self.max_epochs)
        return replace(self.local, epochs=epochs, steps=None)


@dataclass(frozen=True)
class Gradient(BaseTrainer):
    r"""Trainer that takes one gradient step with the learning rate 1.

    The trainer computes the gradient $g = \nabla \ell(\Theta^t)$ of the loss at the server's model on a single batch.
    It returns the model $\Theta^t - g$, and the number of samples of this batch. If the number of batches is known, the
    trainer draws the batch uniformly at random. Otherwise, it uses the first batch.

    The server computes $g$ as $\Theta^t$ minus the returned model. The rounding of this model changes $g$ by at most
    $\frac\varepsilon2 \|\Theta^t\|$, where $\varepsilon$ is the machine precision.

    Args:
        sharpness: `SAM` or `ASAM` of `manifoldagg.curves`, for a sharpness-aware gradient.

    Source: Queue, Algorithm 2.

    Example:
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
        self._single_step_trainer()

    def _single_step_trainer(self) -> Local:
        return Local(steps=1, optimizer=torch.optim.SGD, rate=1.0, sharpness=self.sharpness)

    def num_steps(self, message: Message, num_batches: int) -> int:
        return 1

    def _train(self, task: TrainingTask) -> Payload:
        count = task.num_batches or 1
        place = 0
        if count > 1:
            place = int(torch.randint(count, (), generator=task.generator, device=task.generator.device))
        drawn = list(islice(task.batches, place, place + 1))
        if not drawn:
            raise ArgumentError("batches: expected at least one batch, got 0")
        task = replace(task, batches=drawn)
        samples = task.samples
        points = self._single_step_trainer()._points(task)
        # The points encode a gradient, so the statistics belong to the point where the gradient was evaluated.
        apart = None if self.sharpness is None else task.message.start
        return Payload(points, samples, buffers=task.buffers(at=apart))
