"""The trainer for OrthoFL with client-side calibration: local training from a calibrated start."""

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
    r"""Trainer that computes its start $W_m^{+}$ of [`OrthoFL`][manifoldagg.federated.rules.OrthoFL] on the client.

    The memory is what the client reached, where it started, and the global model $W^{\tau+}$ then. A message brings
    $W^t$, $\beta_t$, and the number of its applied updates. If the last update was applied, it is calibrated; if it was
    lost or rejected, the client starts where it had. A message without a count is one to start from as it is. So does a
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
    """Return whether a client state belongs to a client of this model."""
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
