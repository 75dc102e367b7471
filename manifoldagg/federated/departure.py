"""One dispatch: the message that a client leaves with, made without the lock of the server."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from manifoldagg.errors import ArgumentError, check_choice, check_finite, check_shape, is_finite
from manifoldagg.federated.contract import Message, Rule
from manifoldagg.federated.scene import Scene
from manifoldagg.manifolds import Manifold

BASE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Sender:
    """How the clients of one server are sent off.

    Args:
        space: of the models.
        rule: whose message it is.
        narrow: the dtype in which bases are kept; `None` for that of the models.
    """

    space: Manifold
    rule: Rule
    narrow: torch.dtype | None = None

    def check(self, dtype: torch.dtype) -> "Sender":
        """Narrow bases are narrower than models of `dtype`, on a flat space.

        Raises:
            ArgumentError: naming `base_dtype`.
        """
        if self.narrow is not None:
            check_choice("base_dtype", self.narrow, [d for d in BASE_DTYPES if d.itemsize < dtype.itemsize])
            if not self.space.flat:
                raise ArgumentError("base_dtype: expected a flat space; a rounded point would leave its manifold")
        return self

    def rounded(self, current: Tensor) -> Tensor | None:
        """The base in the narrow dtype; `None` where there is none, or where it overflows."""
        if self.narrow is None:
            return None
        base = current.to(self.narrow)
        return base if is_finite(base) else None

    def message(self, scene: Scene, rounded: Tensor | None) -> Message:
        """What the rule sends, in memory of its own; a client starts from exactly what is kept as its base.

        Raises:
            ArgumentError: if the rule answers with no message of this space.
        """
        start = scene.current if rounded is None else rounded.to(scene.current.dtype)
        message = self.rule.message(self.space, scene.state, start, scene.memory)
        if not isinstance(message, Message):
            raise ArgumentError(f"rule: message: expected a Message, got {type(message).__name__}")
        check_shape("rule: message: start", message.start, *self.space.axes)
        check_choice("rule: message: start: dtype", message.start.dtype, (start.dtype,))
        if message.start is not start:
            check_finite("rule: message: start", message.start)
        return replace(
            message,
            start=message.start.detach().clone(),
            tensors=_copies(message.tensors),
            numbers=dict(message.numbers),
            buffers=_copies(scene.buffers),
        )


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
