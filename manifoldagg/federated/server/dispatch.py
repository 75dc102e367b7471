"""The dispatch message of a client, built without the lock of the server."""

from dataclasses import replace

import torch
from torch import Tensor

from manifoldagg._validation import check_choice, check_finite, check_shape, is_finite
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.model_state import ModelState
from manifoldagg.federated.pytrees import copy_tensor
from manifoldagg.federated.types import ClientState, Message, Rule
from manifoldagg.manifolds import Manifold

__all__ = ["check_base_dtype", "make_message", "round_base"]

BASE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_base_dtype(space: Manifold, base_dtype: torch.dtype | None, dtype: torch.dtype) -> torch.dtype | None:
    """Validate the dtype of stored bases: narrower than `dtype`; `None` for the dtype of the models.

    Raises:
        ArgumentError: naming `base_dtype`.
    """
    if base_dtype is not None:
        check_choice("base_dtype", base_dtype, [d for d in BASE_DTYPES if d.itemsize < dtype.itemsize])
        if not (space.flat or space.ambient):
            raise ArgumentError(
                "base_dtype: expected a flat space or low rank; a rounded point would leave its manifold"
            )
    return base_dtype


def round_base(current: Tensor, base_dtype: torch.dtype | None) -> Tensor | None:
    """Round the base to the narrow dtype; `None` if there is none, or if it overflows."""
    if base_dtype is None:
        return None
    base = current.to(base_dtype)
    return base if is_finite(base) else None


def make_message(
    space: Manifold,
    rule: Rule,
    model_state: ModelState,
    client_state: ClientState,
    base: Tensor | None,
    *,
    copies: bool = True,
) -> tuple[Message, bool]:
    """Build the rule's message; the client starts from exactly the stored base.

    Args:
        space: the space of the models.
        rule: the rule of the server.
        model_state: the current model state.
        client_state: the state that the server stores for the client.
        base: the stored base; `None` for the current model.
        copies: whether the message has its own memory. Otherwise it shares that of the server and must not be written.

    Returns:
        The message, and whether the client starts from another model than the base.

    Raises:
        ArgumentError: if the rule does not return a message of this space.
    """
    start = model_state.current if base is None else base.to(model_state.current.dtype)
    sent = rule.message(space, model_state.state, start, client_state)
    if not isinstance(sent, Message):
        raise ArgumentError(f"rule: message: expected a Message, got {type(sent).__name__}")
    check_shape("rule: message: start", sent.start, *space.axes)
    check_choice("rule: message: start: dtype", sent.start.dtype, (start.dtype,))
    if sent.start is not start:
        check_finite("rule: message: start", sent.start)
    own = replace(
        sent,
        start=copy_tensor(sent.start) if copies else sent.start,
        tensors={name: copy_tensor(tensor) if copies else tensor for name, tensor in sent.tensors.items()},
        numbers=dict(sent.numbers),
        buffers=dict(model_state.buffers.clone() if copies else model_state.buffers),
        requested_buffers=model_state.buffers.requested_names,
        version=model_state.version,
    )
    return own, sent.start is not start
