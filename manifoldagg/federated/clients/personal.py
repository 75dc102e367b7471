"""Training of a client whose model has personal layers, which the client never sends to the server."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from manifoldagg._validation import short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.types import ClientState, Message, Payload, Trainer
from manifoldagg.manifolds import ParameterSpace
from manifoldagg.manifolds.layout import tensors_of

__all__ = ["load_personal", "train_personal"]

PERSONAL, INNER = "personal", "trainer"
"""The entries of the client state: the personal tensors by name, and the client state of the trainer."""


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
    """Train all parameters of a module, and return a payload with its shared part.

    The client state contains the personal tensors. In the first task, the personal tensors are copied from the module.
    The arguments are the same as in `train_client`.

    Raises:
        ArgumentError: if the client state was returned without `personal`. Also if the rule or the trainer exchanges
            further tensors of the size of a model, because these tensors have no personal part.
    """
    whole, space = ParameterSpace.of(model), ParameterSpace.of(model, personal=personal)
    if message.tensors:
        raise ArgumentError(
            f"personal: expected (), as the rule sends the tensors {short_repr(sorted(message.tensors))}"
        )
    own, memory = _split_state(client_state)
    # Later entries replace earlier ones: the module, then the server's model, then the personal tensors.
    given = {**tensors_of(model), **space.state_dict(message.start, message.buffers or None), **own}
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

    To evaluate the client's own model, first load the server's model, and then call this function. Before the first
    task, there is no client state, and the module is unchanged.

    Args:
        model: a module with the personal tensors.
        client_state: the client state in a payload of `train_client(..., personal=...)`, or `None`.

    Raises:
        ArgumentError: if the client state has no personal tensors, or the module does not have these tensors.

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
    """Return the personal tensors, and the client state of the trainer."""
    if client_state is None:
        return {}, None
    if not isinstance(client_state, Mapping) or client_state.keys() != {PERSONAL, INNER}:
        raise ArgumentError("client_state: expected the client state of a payload that was trained with `personal`")
    return client_state[PERSONAL], client_state[INNER]


def _shared_columns(whole: ParameterSpace, space: ParameterSpace, points: Tensor) -> Tensor:
    """Return the columns of `points` that contain shared parameters, in the dtype of the shared space."""
    shared = {leaf.name for leaf in space.layout.leaves}
    pieces = zip(whole.layout.leaves, points.split(whole.layout.sizes, dim=1), strict=True)
    return torch.cat([piece for leaf, piece in pieces if leaf.name in shared], 1).to(space.dtype)
