"""The desk of a run: where tickets are issued, and those that are out."""

from dataclasses import replace

import torch
from torch import Tensor

from manifoldagg.federated import Message, Server, Ticket
from manifoldagg.federated.server.durability.persistent_map import PersistentOrderedMap
from manifoldagg.simulation.federated_dataset import Key

__all__ = ["Desk", "same_bits"]


class Desk:
    """Where tickets are issued: those of one version share the tensors of their messages that are equal.

    Args:
        server: that issues them.
        out: those of another desk, to go on from.

    Attributes:
        out: the tickets of the tasks that are under way; replaced and never written.
        latest: the message of the last one.
    """

    def __init__(self, server: Server, out: PersistentOrderedMap[Key, Ticket]) -> None:
        self._server = server
        self._version = -1
        self._shared: dict[str, Tensor] = {}
        self.out = out
        self.latest: Message
        for ticket in out.values():
            self.latest = ticket.message

    def dispatch(self, client: int) -> Ticket:
        """A ticket for a client."""
        ticket = self._server.dispatch(client)
        if ticket.version != self._version:
            self._version = ticket.version
            self._shared = {}
        sent = ticket.message
        self.latest = replace(
            sent,
            start=self._share("start", sent.start),
            tensors={name: self._share(f"tensors: {name}", tensor) for name, tensor in sent.tensors.items()},
            buffers={name: self._share(f"buffers: {name}", tensor) for name, tensor in sent.buffers.items()},
        )
        return replace(ticket, message=self.latest)

    def give(self, key: Key, ticket: Ticket) -> None:
        """A ticket is out, for a task."""
        self.out = self.out.set(key, ticket)

    def take(self, key: Key) -> Ticket:
        """The ticket of a task that is not under way any more."""
        ticket = self.out[key]
        self.out = self.out.remove(key)
        return ticket

    def _share(self, name: str, tensor: Tensor) -> Tensor:
        first = self._shared.setdefault(name, tensor)
        return first if same_bits(first, tensor) else tensor


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same in every bit: a negative zero is another one.

    Example:
        >>> same_bits(torch.zeros(2), torch.zeros(2)), same_bits(torch.zeros(2), -torch.zeros(2))
        (True, False)
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
