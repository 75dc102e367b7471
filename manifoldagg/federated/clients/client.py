"""The function `train_client`, which trains a `torch.nn.Module` for one task of a server."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from manifoldagg._validation import check_instance, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.clients.personal import train_personal
from manifoldagg.federated.types import ClientState, Message, Payload, Trainer, check_trainer
from manifoldagg.manifolds import ParameterSpace
from manifoldagg.manifolds.layout import check_names
from manifoldagg.manifolds.personal import check_patterns
from manifoldagg.manifolds.wrapper_prefixes import without_compile_prefix

__all__ = ["train_client"]


def train_client(
    model: nn.Module,
    message: Message,
    trainer: Trainer,
    batches: Iterable[Any],
    criterion: Callable[[Any, Any], Tensor] = nn.functional.cross_entropy,
    *,
    client_state: ClientState = None,
    personal: Sequence[str] = (),
    generator: torch.Generator,
) -> Payload:
    """Train a PyTorch module for one task of a client, and return the payload for the server.

    Call this function on the client, for example in a custom training loop. The Flower integration also calls it.

    The training starts from the parameters and buffers in the server's message. The module determines only the
    architecture and the mode (training or evaluation). Its tensors are not modified.

    The option `personal` names tensors that the client does not send to the server. In the client's first task, their
    start values come from the module. In later tasks, they come from `client_state`.

    Args:
        model: a module with the same parameters and buffers as the server's model. It may be compiled by
            `torch.compile`.
        message: the server's message for the task. It is `ticket.message` for the result `ticket` of `Server.dispatch`.
        trainer: the trainer, which runs the local training.
        batches: an iterable of pairs (inputs, targets) that can be iterated several times.
        criterion: the loss, a function of (output, target) that returns a scalar.
        client_state: the client state from the client's previous payload. `None` before the client's first payload.
        personal: names or glob patterns of personal parameters and buffers. The client trains these tensors, but does
            not send them to the server. The client state of the payload contains them, and
            [`load_personal`][manifoldagg.federated.clients.load_personal] copies them into a module. Pass the same
            value to `Server.of(..., personal=...)`.
        generator: the random number generator of the trainer.

    Returns:
        The payload for the server.

    Raises:
        ArgumentError: if an argument is invalid, or if the message does not match the module or the trainer.
        DivergenceError: if a loss is not finite.

    Example:
        >>> from manifoldagg.federated import Server, clients
        >>> from manifoldagg.federated.rules import FedAsync
        >>> model = nn.Linear(2, 3)
        >>> server = Server.of(model, FedAsync(rate=0.5))
        >>> ticket = server.dispatch("ward-7")
        >>> batches = [(torch.ones(4, 2), torch.tensor([0, 1, 2, 0]))]
        >>> payload = train_client(model, ticket.message, clients.Local(epochs=2), batches, generator=torch.Generator())
        >>> payload.samples, server.receive(ticket, payload).accepted
        (4, True)
    """
    check_trainer(trainer)
    if not isinstance(message, Message):
        raise ArgumentError(f"message: expected a Message, such as ticket.message, got {short_repr(message)}")
    if not callable(criterion):
        raise ArgumentError(f"criterion: expected a function of outputs and targets, got {short_repr(criterion)}")
    check_instance("generator", generator, torch.Generator, "torch.Generator()")
    patterns = check_patterns(personal)
    space = ParameterSpace.of(model, personal=patterns)
    names = _module_names(space, message)
    message = replace(
        message,
        buffers={names[name]: buffer for name, buffer in message.buffers.items()},
        requested_buffers=tuple(names[name] for name in message.requested_buffers),
    )
    if patterns:
        payload = train_personal(
            model, message, trainer, batches, criterion, patterns, client_state=client_state, generator=generator
        )
    else:
        loss = space.loss(model, criterion)
        payload = trainer.train(space, message, loss, batches, client_state, generator=generator)
    given = {names[name]: name for name in names}
    return replace(payload, buffers={given.get(name, name): buffer for name, buffer in payload.buffers.items()})


def _module_names(space: ParameterSpace, message: Message) -> dict[str, str]:
    """Return the names that the buffers of a message have in the client's module.

    A module that `torch.compile` has compiled has a prefix in its names.

    Raises:
        ArgumentError: if the module has another number of parameters or other buffers than the message.
    """
    if message.start.shape != space.shape:
        raise ArgumentError(
            f"model: expected the server's model with {message.start.numel()} trainable parameters, "
            f"got {space.layout.size}"
        )
    own = [entry.name for entry in space.layout.buffers]
    plain = {without_compile_prefix(name): name for name in own}
    if message.buffers.keys() == plain.keys():
        return plain
    if message.buffers:
        check_names(message.buffers.keys(), set(own), "model: ")
    return {name: name for name in own}
