"""Client trainer `Scheduled`, which changes the options of another trainer during a run.

It multiplies the learning rate and the number of local steps by factors that depend on the version of the server model.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

from manifoldagg._validation import short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.clients.base import BaseTrainer, TrainingTask
from manifoldagg.federated.schedules import Rate, check_options, rate_at
from manifoldagg.federated.types import Message, Payload, Trainer, check_trainer

__all__ = ["Scheduled"]

INNER_TRAINER_FIELDS = {"rate": ("trainer", "local"), "steps": ("trainer",)}
"""For each option, the fields in which the wrapper looks for a nested trainer. The option `steps` does not apply to a
trainer in the field `local`, because the message determines the number of epochs of such a trainer."""


@dataclass(frozen=True)
class Scheduled(BaseTrainer):
    r"""Wrapper that changes the learning rate and the number of steps of a trainer during a run.

    The options `rate` and `steps` are factors. They can be functions of the version of the server model:

    - The wrapper multiplies each learning rate of the trainer by `rate`.
    - It changes a number $K \ge 1$ of steps to $\max(1, \lceil s K \rceil)$, where $s$ is the factor `steps`. If the
      trainer has several phases, as for a curve of models, this applies to each phase. A phase without steps remains
      empty.

    Decreasing schedules have two uses:

    - A decreasing factor `rate` makes the local training converge together with the server.
    - A decreasing factor `steps` reduces the client drift, so that the rule can apply updates at full weight.

    Args:
        trainer: a dataclass with a field `rate`, and also a field `steps` if `steps` is not 1. A trainer that contains
            such a dataclass in a field `trainer` or `local` is also allowed. The field `local` supports only `rate`.
        rate: the factor of the learning rates: a number, or a function of the version such as
            [`Cosine`][manifoldagg.federated.schedules.Cosine]. It must be positive at every version.
        steps: the factor of the number of steps: a number or a function of the version. A function may return 0.

    Raises:
        ArgumentError: if an option is out of range, or if the trainer lacks the field that an option multiplies.

    Source: Li, Huang, Yang, Wang, Zhang 2020, Theorem 1 (with a constant local rate, FedAvg does not converge
    to the optimum); Wang, Joshi 2019 (AdaComm, a decreasing number of local steps).

    Example:
        >>> import torch
        >>> from manifoldagg.federated import schedules, clients
        >>> trainer = Scheduled(clients.Local(epochs=4), steps=schedules.Cosine(1.0, 0.0, 100))
        >>> [trainer.num_steps(Message(torch.zeros(1), version=version), 10) for version in (0, 50, 100)]
        [40, 20, 1]
    """

    trainer: Trainer
    rate: Rate = 1.0
    steps: Rate = 1.0

    def __post_init__(self) -> None:
        check_options(self)
        if not is_dataclass(check_trainer(self.trainer)):
            raise ArgumentError(f"trainer: expected a dataclass, got {short_repr(self.trainer)}")
        for option in INNER_TRAINER_FIELDS:
            if getattr(self, option) != 1:
                _owner_of(self.trainer, option)

    def num_steps(self, message: Message, num_batches: int) -> int:
        return int(self._trainer_for(message, lambda: num_batches).num_steps(message, num_batches))

    def _train(self, task: TrainingTask) -> Payload:
        def length() -> int:
            return sum(1 for _ in task.batches) if task.num_batches is None else task.num_batches

        trainer = self._trainer_for(task.message, length)
        asked = task.space, task.message, task.loss, task.batches, task.client_state
        payload: Payload = trainer.train(*asked, generator=task.generator)
        return payload

    def _trainer_for(self, message: Message, count_batches: Callable[[], int]) -> Any:
        """Return a copy of the trainer with the learning rate and steps for `message.version`."""
        trainer: Any = self.trainer
        if (rate := self._factor("rate", message)) != 1:
            names = ("rate", "control_rate")
            own = _owner_of(trainer, "rate")
            rates = {name: rate * value for name in names if (value := getattr(own, name, None)) is not None}
            trainer = _replace_owner(trainer, own, replace(own, **rates))
        if (share := self._factor("steps", message)) != 1:
            own = _owner_of(trainer, "steps")
            trainer = _replace_owner(trainer, own, replace(own, steps=_scaled_phase_steps(share, own, count_batches)))
        return trainer

    def _factor(self, option: str, message: Message) -> float:
        share = getattr(self, option)
        if callable(share) and message.version is None:
            raise ArgumentError(f"message: version: expected an int, because {option} is a function of it, got None")
        return rate_at(share, message.version or 0)


def _owner_of(trainer: Any, option: str) -> Any:
    """Return the trainer that has an option: `trainer` itself, or a trainer nested in it."""
    held = trainer
    while not hasattr(held, option):
        within = [getattr(held, name) for name in INNER_TRAINER_FIELDS[option] if hasattr(held, name)]
        if not within:
            raise ArgumentError(f"{option}: expected 1, because {type(trainer).__name__} has no {option} to multiply")
        held = within[0]
    return held


def _replace_owner(trainer: Any, owner: Any, replacement: Any) -> Any:
    """Return a copy of `trainer` in which `replacement` takes the place of `owner`."""
    if trainer is owner:
        return replacement
    name = next(name for name in INNER_TRAINER_FIELDS["rate"] if hasattr(trainer, name))
    return replace(trainer, **{name: _replace_owner(getattr(trainer, name), owner, replacement)})


def _scaled_phase_steps(share: float, trainer: Any, count_batches: Callable[[], int]) -> int | tuple[int, ...]:
    """Return the number of steps of a trainer, or of each of its phases, multiplied by a factor."""
    # `count_batches` may iterate over the batches, so it is called only if the trainer counts epochs.
    whole, each = (trainer.epochs, count_batches()) if trainer.steps is None else (trainer.steps, 1)
    if isinstance(whole, tuple):
        return tuple(_scale_steps(share, each * amount) for amount in whole)
    return _scale_steps(share, each * whole)


def _scale_steps(share: float, steps: int) -> int:
    return max(min(steps, 1), math.ceil(share * steps))
