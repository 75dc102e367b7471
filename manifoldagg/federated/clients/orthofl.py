"""The trainer for OrthoFL with client-side calibration, which trains from a calibrated start model."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from manifoldagg._validation import is_finite
from manifoldagg.corrections import calibrate
from manifoldagg.federated.clients.base import BaseTrainer, TrainingTask
from manifoldagg.federated.clients.local import Local
from manifoldagg.federated.rules.orthofl import interpolate, shift
from manifoldagg.federated.types import Message, Payload, Trainer, check_trainer

__all__ = ["Calibrated"]


@dataclass(frozen=True)
class Calibrated(BaseTrainer):
    r"""Trainer that computes the calibrated start $W_m^{+}$ for [`OrthoFL`][manifoldagg.federated.rules.OrthoFL].

    The client state contains the trained model, the start of this training, and the global model $W^{\tau+}$ at that
    time. A message contains $W^t$, $\beta_t$, and the number of the client's applied updates. The start depends on the
    client's last update:

    - If the server applied the update, the trainer calibrates the update.
    - If the update was lost or rejected, the trainer uses the previous start again.
    - If the message has no count, or the client state is missing, invalid or outdated, the trainer starts from $W^t$.

    Run one task of a client at a time. If two tasks start from the same state, only the model of the last task is
    stored.

    Args:
        trainer: the trainer that runs from the calibrated start.

    Raises:
        ArgumentError: if `trainer` is not a trainer.

    Source: OrthoFL, Algorithm 2.

    Example:
        >>> Calibrated(Local(epochs=5)).trainer.epochs
        5
    """

    trainer: Trainer = field(default_factory=Local)

    def __post_init__(self) -> None:
        check_trainer(self.trainer)

    def num_steps(self, message: Message, num_batches: int) -> int:
        steps = getattr(self.trainer, "num_steps", None)
        return num_batches if steps is None else int(steps(message, num_batches))

    def _train(self, task: TrainingTask) -> Payload:
        message = task.message
        memory: Mapping[str, Any] = task.client_state if _is_valid_state(task.client_state, message.start) else {}
        turn = int(message.numbers.get("num_updates", 0))
        start = message.start
        home = start
        since = turn - memory["num_updates"] if turn and memory else None
        if since == 0:
            start = memory["start"]
            home = memory["global"]
        elif since == 1:
            granularity = "tensor" if message.numbers["by_tensor"] else "model"
            model = memory["model"]
            home = interpolate(message.start, model, message.numbers["rate"])
            shifts = (shift(message.start, memory["global"]), shift(model, memory["start"]))
            start = calibrate(model, *shifts, granularity, space=task.space)
        message = replace(message, start=start)
        inner = memory.get("trainer")
        payload = self.trainer.train(task.space, message, task.loss, task.batches, inner, generator=task.generator)
        kept = {"num_updates": turn, "start": start, "global": home, "trainer": payload.client_state}
        return replace(payload, client_state=kept | {"model": payload.points[-1].detach().clone()})


def _is_valid_state(client_state: Any, start: Tensor) -> bool:
    """Return whether a client state is valid and matches the start model."""
    if (
        not isinstance(client_state, Mapping)
        or not {"num_updates", "trainer"} <= client_state.keys()
        or type(client_state["num_updates"]) is not int
    ):
        return False
    kept = [client_state.get(name) for name in ("start", "global", "model")]
    return all(
        isinstance(x, Tensor)
        and (x.shape, x.dtype, x.device) == (start.shape, start.dtype, start.device)
        and is_finite(x)
        for x in kept
    )
