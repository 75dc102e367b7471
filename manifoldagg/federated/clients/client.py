"""One task of a client: training a module from a message, the same in a simulation, in Flower or in a custom loop."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from manifoldagg.federated.types import ClientState, Message, Payload, Trainer
from manifoldagg.manifolds import ParameterSpace

__all__ = ["train_client"]


def train_client(
    model: nn.Module,
    message: Message,
    trainer: Trainer,
    batches: Iterable[Any],
    criterion: Callable[[Any, Any], Tensor] = nn.functional.cross_entropy,
    *,
    client_state: ClientState = None,
    generator: torch.Generator,
) -> Payload:
    """Train a module from a message, as [`Trainer.train`][manifoldagg.federated.Trainer] in the module's own space.

    The module lends its code and its mode, train or eval. Its tensors stay as they are: parameters and buffers are
    those of the message.

    Args:
        model: with the parameters that the server's model has.
        message: of a ticket.
        trainer: what the client does with it.
        batches: pairs (inputs, targets) in a re-iterable object.
        criterion: (output, target) to a scalar.
        client_state: what the last payload of this client left with it.
        generator: draws whatever the trainer draws.

    Returns:
        The payload for the server.

    Raises:
        ArgumentError: if the message does not fit the module or the trainer.
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
    space = ParameterSpace.of(model)
    return trainer.train(space, message, space.loss(model, criterion), batches, client_state, generator=generator)
