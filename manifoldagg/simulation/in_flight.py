"""The tasks in flight of a run, and the tickets that the server issued for them."""

from dataclasses import replace

import torch
from torch import Tensor

from manifoldagg.federated import Message, Server, Ticket
from manifoldagg.federated.server.durability.persistent_map import PersistentOrderedMap
from manifoldagg.simulation.federated_dataset import TaskId

__all__ = ["InFlightTasks", "bitwise_equal"]


class InFlightTasks:
    """The tickets in flight; messages of one version share their equal tensors.

    Args:
        server: that issues them.
        tickets: those of an interrupted run, to continue from.

    Attributes:
        tickets: the tickets of the tasks in flight; replaced and never written.
        last_message: the message of the last one.
    """

    def __init__(self, server: Server, tickets: PersistentOrderedMap[TaskId, Ticket]) -> None:
        self._server = server
        self._version = -1
        self._shared: dict[str, Tensor] = {}
        self.tickets = tickets
        self.last_message: Message
        for ticket in tickets.values():
            self.last_message = ticket.message

    def dispatch(self, client: int) -> Ticket:
        """Issue a ticket for a client."""
        ticket = self._server.dispatch(client)
        if ticket.version != self._version:
            self._version = ticket.version
            self._shared = {}
        sent = ticket.message
        self.last_message = replace(
            sent,
            start=self._deduplicate("start", sent.start),
            tensors={name: self._deduplicate(f"tensors: {name}", tensor) for name, tensor in sent.tensors.items()},
            buffers={name: self._deduplicate(f"buffers: {name}", tensor) for name, tensor in sent.buffers.items()},
        )
        return replace(ticket, message=self.last_message)

    def add(self, task_id: TaskId, ticket: Ticket) -> None:
        """Add a ticket in flight for a task."""
        self.tickets = self.tickets.set(task_id, ticket)

    def pop(self, task_id: TaskId) -> Ticket:
        """Remove and return the ticket of a task."""
        ticket = self.tickets[task_id]
        self.tickets = self.tickets.remove(task_id)
        return ticket

    def _deduplicate(self, name: str, tensor: Tensor) -> Tensor:
        first = self._shared.setdefault(name, tensor)
        return first if bitwise_equal(first, tensor) else tensor


def bitwise_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are bitwise equal; positive and negative zero differ.

    Example:
        >>> bitwise_equal(torch.zeros(2), torch.zeros(2)), bitwise_equal(torch.zeros(2), -torch.zeros(2))
        (True, False)
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
