"""The client of OrthoFL that calibrates by itself: any local training, from a start of its own making."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from manifoldagg._validation import is_finite
from manifoldagg.corrections import calibrate
from manifoldagg.federated.clients.base import Assignment, Client
from manifoldagg.federated.clients.local import Local
from manifoldagg.federated.rules.orthofl import mixed, shift
from manifoldagg.federated.types import Message, Payload, Trainer, check_trainer

__all__ = ["Calibrated"]


@dataclass(frozen=True)
class Calibrated(Client):
    r"""Train from $W_m^{+}$ of the rule [`OrthoFL`][manifoldagg.federated.rules.OrthoFL], formed here.

    The memory is what the client reached, where it started, and the global model $W^{\tau+}$ then. A message brings
    $W^t$, $\beta_t$, and how many of its answers the server took: if its last one, that is calibrated; if it was lost
    or refused, the client starts where it had. A message without a count is one to start from as it is. So does a
    client whose memory is lost, or does not fit, begin anew, from $W^t$. One task at a time: of two trained from the
    same start it is the last whose model is kept.

    Args:
        trainer: what trains from there.

    Raises:
        ArgumentError: if `trainer` is none.

    Source: OrthoFL, Algorithm 2.

    Example:
        >>> Calibrated(Local(epochs=5)).trainer.epochs
        5
    """

    trainer: Trainer = field(default_factory=Local)

    def __post_init__(self) -> None:
        check_trainer(self.trainer)

    def steps_of(self, message: Message, length: int) -> int:
        steps = getattr(self.trainer, "steps_of", None)
        return length if steps is None else int(steps(message, length))

    def _train(self, given: Assignment) -> Payload:
        message = given.message
        memory: Mapping[str, Any] = given.memory if _fits(given.memory, message.start) else {}
        turn = int(message.numbers.get("turn", 0))
        start = message.start
        home = start
        since = turn - memory["turn"] if turn and memory else None
        if since == 0:
            start = memory["start"]
            home = memory["global"]
        elif since == 1:
            granularity = "tensor" if message.numbers["by_tensor"] else "model"
            model = memory["model"]
            home = mixed(message.start, model, message.numbers["rate"])
            shifts = (shift(message.start, memory["global"]), shift(model, memory["start"]))
            start = calibrate(model, *shifts, granularity, space=given.space)
        message = replace(message, start=start)
        inner = memory.get("trainer")
        payload = self.trainer.train(given.space, message, given.loss, given.batches, inner, generator=given.generator)
        kept = {"turn": turn, "start": start, "global": home, "trainer": payload.client_state}
        return replace(payload, client_state=kept | {"model": payload.points[-1].detach().clone()})


def _fits(memory: Any, start: Tensor) -> bool:
    """Whether a memory is one of a client of this model."""
    if not isinstance(memory, Mapping) or not {"turn", "trainer"} <= memory.keys() or type(memory["turn"]) is not int:
        return False
    kept = [memory.get(name) for name in ("start", "global", "model")]
    return all(
        isinstance(x, Tensor)
        and (x.shape, x.dtype, x.device) == (start.shape, start.dtype, start.device)
        and is_finite(x)
        for x in kept
    )
