"""Any trainer, with rates and steps that change as the server's model does."""

import math
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

from manifoldagg.errors import ArgumentError
from manifoldagg.federated.clients.base import Assignment, Client
from manifoldagg.federated.schedules import Rate, check_options, rate_at
from manifoldagg.federated.types import Message, Payload, Trainer, check_trainer

__all__ = ["Scheduled"]

HELD = {"rate": ("trainer", "local"), "steps": ("trainer",)}
"""What trainers call a trainer that they hold, by the option that it has for them: what a message says of steps goes
before what is held as `local`."""


@dataclass(frozen=True)
class Scheduled(Client):
    r"""A trainer whose rates are multiplied by $r(\tau)$ and whose steps by $s(\tau)$, where $\tau$ is the version.

    With K steps of the trainer the task has $\max(1, \lceil s(\tau) K \rceil)$; of both phases of a curve each has its
    own K, and one that has none keeps none. With `rate` falling to 0 local training comes to rest as the
    server does; with `steps` falling, and a rule that takes what comes whole, clients drift less and less: *fewer
    steps at full weight*.

    Args:
        trainer: a dataclass with a `rate`, and for s with `steps`; or what holds one as `trainer` or `local`.
        rate: r, a number or a function of the version, such as [`Cosine`][manifoldagg.federated.schedules.Cosine]. It
            must stay above 0.
        steps: s, likewise.

    Raises:
        ArgumentError: naming the option that is out of range, or what the trainer does not have.

    Source: Li, Huang, Yang, Wang, Zhang 2020, Theorem 1: with a constant local rate FedAvg rests away from the optimum;
        Wang, Joshi 2019 (AdaComm) for fewer and fewer local steps.

    Example:
        >>> import torch
        >>> from manifoldagg.federated import schedules, clients
        >>> trainer = Scheduled(clients.Local(epochs=4), steps=schedules.Cosine(1.0, 0.0, 100))
        >>> [trainer.steps_of(Message(torch.zeros(1), version=version), 10) for version in (0, 50, 100)]
        [40, 20, 1]
    """

    trainer: Trainer
    rate: Rate = 1.0
    steps: Rate = 1.0

    def __post_init__(self) -> None:
        check_options(self)
        if not is_dataclass(check_trainer(self.trainer)):
            raise ArgumentError(f"trainer: expected a dataclass, got {self.trainer!r}")
        for option in HELD:
            if getattr(self, option) != 1:
                _holder(self.trainer, option)

    def steps_of(self, message: Message, length: int) -> int:
        return int(self._at(message, lambda: length).steps_of(message, length))

    def _train(self, given: Assignment) -> Payload:
        def length() -> int:
            return sum(1 for _ in given.batches) if given.length is None else given.length

        trainer = self._at(given.message, length)
        asked = given.space, given.message, given.loss, given.batches, given.memory
        payload: Payload = trainer.train(*asked, generator=given.generator)
        return payload

    def _at(self, message: Message, length: Callable[[], int]) -> Any:
        """The trainer that this message is for; how many batches a pass has is asked where that counts."""
        trainer: Any = self.trainer
        if (rate := self._share("rate", message)) != 1:
            names = ("rate", "control_rate")
            own = _holder(trainer, "rate")
            rates = {name: rate * value for name in names if (value := getattr(own, name, None)) is not None}
            trainer = _with(trainer, own, replace(own, **rates))
        if (share := self._share("steps", message)) != 1:
            own = _holder(trainer, "steps")
            trainer = _with(trainer, own, replace(own, steps=_fewer(share, own, length)))
        return trainer

    def _share(self, option: str, message: Message) -> float:
        share = getattr(self, option)
        if callable(share) and message.version is None:
            raise ArgumentError(f"message: version: expected one, as {option} is a function of it; got None")
        return rate_at(share, message.version or 0)


def _holder(trainer: Any, option: str) -> Any:
    """The trainer that has the option: itself, or one that it holds."""
    held = trainer
    while not hasattr(held, option):
        within = [getattr(held, name) for name in HELD[option] if hasattr(held, name)]
        if not within:
            raise ArgumentError(f"{option}: expected 1: {type(trainer).__name__} has no {option} to multiply")
        held = within[0]
    return held


def _with(trainer: Any, own: Any, other: Any) -> Any:
    """`trainer` with `other` in place of `own`."""
    if trainer is own:
        return other
    name = next(name for name in HELD["rate"] if hasattr(trainer, name))
    return replace(trainer, **{name: _with(getattr(trainer, name), own, other)})


def _fewer(share: float, trainer: Any, length: Callable[[], int]) -> int | tuple[int, ...]:
    """Its steps, or those of each of its phases, times a share."""
    whole, each = (trainer.epochs, length()) if trainer.steps is None else (trainer.steps, 1)
    if isinstance(whole, tuple):
        return tuple(_part(share, each * amount) for amount in whole)
    return _part(share, each * whole)


def _part(share: float, steps: int) -> int:
    return max(min(steps, 1), math.ceil(share * steps))
