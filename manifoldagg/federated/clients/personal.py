"""Training of models with personal tensors, which a client trains but never sends to the server."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from manifoldagg._validation import renamed_arguments, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.types import ClientState, Message, Payload, Trainer
from manifoldagg.manifolds import ParameterSpace
from manifoldagg.manifolds.layout import tensors_of

__all__ = ["load_personal", "train_personal"]

PERSONAL = "personal"
"""The key of the personal tensors in the client state."""
INNER = "trainer"
"""The key of the trainer's own client state in the client state."""


def train_personal(
    model: nn.Module,
    message: Message,
    trainer: Trainer,
    batches: Iterable[Any],
    criterion: Callable[[Any, Any], Tensor],
    personal: Sequence[str],
    *,
    client_state: ClientState,
    generator: torch.Generator,
) -> Payload:
    """Train all tensors of a module, and return an update without the tensors that `personal` names.

    The update contains the trained values of the other tensors. The client state contains those of the personal
    tensors, from which the client's next task starts. In the first task, the personal tensors start from their values
    in the module. The other arguments are the same as in `train_client`.

    Raises:
        ArgumentError: if the client state comes from a task without `personal`, or if the rule or the trainer exchanges
            additional tensors. Such tensors have the size of the shared model, and the personal part would be missing.
    """
    whole = ParameterSpace.of(model)
    space = ParameterSpace.of(model, personal=personal)
    if message.tensors:
        raise ArgumentError(
            f"personal: expected (), as the rule sends the tensors {short_repr(sorted(message.tensors))}"
        )
    own, memory = _split_state(client_state)
    # The server's model replaces the tensors of the module, and the client's personal tensors replace both.
    given = {**tensors_of(model), **space.state_dict(message.start, message.buffers or None), **own}
    with renamed_arguments({"source": "message"}):
        start = whole.point(given, device=message.start.device)
    named_buffers = [entry.name for entry in whole.layout.buffers]
    wanted = (*message.requested_buffers, *(name for name in named_buffers if name in space.personal))
    full = replace(message, start=start, buffers=whole.buffers(given), requested_buffers=wanted)
    payload = trainer.train(whole, full, whole.loss(model, criterion), batches, memory, generator=generator)
    if payload.tensors:
        names = short_repr(sorted(payload.tensors))
        raise ArgumentError(f"personal: expected (), as the trainer returns the tensors {names}")
    trained = {**whole.views(payload.points[-1].detach()), **payload.buffers}
    kept = {name: trained[name].detach().clone() for name in space.personal}
    return replace(
        payload,
        points=_shared_columns(whole, space, payload.points),
        buffers={name: payload.buffers[name] for name in message.requested_buffers},
        client_state={PERSONAL: kept, INNER: payload.client_state},
    )


def load_personal(model: nn.Module, client_state: ClientState) -> nn.Module:
    """Copy the personal tensors of a client state into a module, and return the module.

    Use this function to evaluate a client's own model. First load the server's model into the module, and then call
    this function. Before a client's first task, its state is `None`, and the function does not change the module.

    Args:
        model: a module that has tensors with the names of the personal tensors.
        client_state: the client state from a payload of `train_client(..., personal=...)`, or `None`.

    Raises:
        ArgumentError: if the client state comes from a task without `personal`, or if the module lacks a tensor.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> state = {"personal": {"bias": torch.tensor([3.0])}, "trainer": None}
        >>> load_personal(model, state).bias.item()
        3.0
    """
    own, _ = _split_state(client_state)
    tensors = tensors_of(model)
    if unknown := own.keys() - tensors.keys():
        raise ArgumentError(f"client_state: expected tensors of the module, got {short_repr(sorted(unknown))}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensors[name].copy_(tensor)
    return model


def _split_state(client_state: ClientState) -> tuple[Mapping[str, Tensor], ClientState]:
    """Split a client state into the personal tensors and the client state of the trainer."""
    if client_state is None:
        return {}, None
    if not isinstance(client_state, Mapping) or client_state.keys() != {PERSONAL, INNER}:
        raise ArgumentError("client_state: expected the client state of a payload that was trained with `personal`")
    return client_state[PERSONAL], client_state[INNER]


def _shared_columns(whole: ParameterSpace, space: ParameterSpace, points: Tensor) -> Tensor:
    """Return the columns of `points` that the client sends to the server, in `space.dtype`."""
    shared = {leaf.name for leaf in space.layout.leaves}
    pieces = zip(whole.layout.leaves, points.split(whole.layout.sizes, dim=1), strict=True)
    return torch.cat([piece for leaf, piece in pieces if leaf.name in shared], 1).to(space.dtype)
