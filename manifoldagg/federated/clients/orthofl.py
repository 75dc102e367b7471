"""Client trainer for the rule OrthoFL with calibration on the client.

The trainer adds the progress of other clients to the client's own model, and trains from the resulting model.
"""

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
    r"""Trainer that calibrates a client's start model on the client, for the rule OrthoFL.

    Use this trainer if the rule [`OrthoFL`][manifoldagg.federated.rules.OrthoFL] has the option `protocol="client"`.
    After each applied update, the client continues from its own trained model $W_m$ and adds the progress of the other
    clients. The calibrated start is

    $$W_m^{+} = W_m + \Delta - \frac{\langle \Delta, \Delta_m\rangle}{\langle \Delta_m, \Delta_m\rangle}\,\Delta_m,
      \qquad \Delta = W^t - W^{\tau+}, \quad \Delta_m = W_m - W_m^{\tau+}.$$

    The symbols have these meanings:

    - $W_m$ is the model that the client $m$ returned in its previous task, and $W_m^{\tau+}$ is the model from which
      that task started. Their difference $\Delta_m$ is the progress of the client.
    - $W^t$ is the global model directly before the server applied this update, and $t$ is its version.
    - $W^{\tau+}$ is the global model directly after the server applied the client's update before that, when the
      version was $\tau$. $\Delta$ is the progress of the other clients since then.
    - $\beta_t$ is the weight with which the server averaged the update into the global model. The trainer computes the
      new global model $W^{t+} = (1 - \beta_t)\,W^t + \beta_t W_m$, which is the $W^{\tau+}$ of the next calibration.

    Before the client's first update, both $W^{\tau+}$ and $W_m^{\tau+}$ are the first model that the client received.
    With `granularity="tensor"` of the rule, the formula for $W_m^{+}$ applies to each named tensor separately.

    The server sends $W^t$, $\beta_t$ and the number of updates of this client that it applied. The client state stores
    $W_m$, $W_m^{\tau+}$, $W^{\tau+}$ and the previous number of applied updates. The trainer compares the two numbers:

    - If the server applied the previous update, the trainer starts from $W_m^{+}$.
    - If the previous update was lost or rejected, the trainer starts from $W_m^{\tau+}$ again.
    - If the message contains no number, or if the client state is missing, invalid or outdated, the trainer starts from
      the model in the message.

    Do not run several tasks of a client at the same time. Two tasks that start from the same client state overwrite
    each other's result, and only the model of the task that ends last is stored.

    Args:
        trainer: the trainer that runs from the calibrated start.

    Raises:
        ArgumentError: if `trainer` is not a trainer.

    Source: OrthoFL (3)-(7), Algorithm 2.

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
