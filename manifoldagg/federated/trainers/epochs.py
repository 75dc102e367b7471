"""The client of AsyncFedED: local training for as many epochs as the server asks."""

import math
from dataclasses import dataclass, field, replace

from manifoldagg.errors import ArgumentError, check_count, check_number
from manifoldagg.federated.contract import Payload
from manifoldagg.federated.trainers.base import Assignment, Client
from manifoldagg.federated.trainers.local import Local

__all__ = ["Epochs"]


@dataclass(frozen=True)
class Epochs(Client):
    """[`Local`][manifoldagg.federated.trainers.Local] training for the message's number `epochs`.

    Args:
        local: how to train; its own `epochs` and `steps` do not count.
        at_most: so many epochs, however many the server asks for.

    Raises:
        ArgumentError: if `local` is no `Local`, or `at_most` no positive integer.

    Source: Wang et al. 2022 (AsyncFedED), whose server sends K with the model.

    Example:
        >>> Epochs(Local(rate=0.1), at_most=8).local.rate
        0.1
    """

    local: Local = field(default_factory=Local)
    at_most: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.local, Local):
            raise ArgumentError(f"local: expected a Local, got {self.local!r}")
        if self.at_most is not None:
            check_count("at_most", self.at_most)

    def _train(self, given: Assignment) -> Payload:
        number = given.message.numbers.get("epochs", math.nan)
        asked = check_number("message: numbers: epochs", number, at_least=1)
        if asked != int(asked):
            raise ArgumentError(f"message: numbers: epochs: expected an integer >= 1, got {asked!r}")
        epochs = int(asked) if self.at_most is None else min(int(asked), self.at_most)
        return replace(self.local, epochs=epochs, steps=None)._train(given)
