"""Dispatch of training tasks to clients.

Each task has a ticket, which contains a message with the current model and permits the client to return one update. The
server can issue tickets while it applies an update.
"""

import os
from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from manifoldagg._validation import check_choice, check_finite, check_shape, is_finite
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.pytrees import copy_tensor
from manifoldagg.federated.server.durability.manager import DurabilityManager
from manifoldagg.federated.server.durability.store import InMemoryTree, StoredTree
from manifoldagg.federated.server.state import PendingTicket, ServerCore, ServerState
from manifoldagg.federated.step import ModelState
from manifoldagg.federated.types import ClientState, Message, Rule, Ticket
from manifoldagg.manifolds import Manifold

__all__ = ["TicketIssuer", "check_base_dtype", "make_message"]

BASE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_base_dtype(space: Manifold, base_dtype: torch.dtype | None, dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype of stored bases if the space supports it.

    Raises:
        ArgumentError: if the dtype is not narrower than the dtype of the models, or if the space is curved.
    """
    if base_dtype is not None:
        check_choice("base_dtype", base_dtype, [d for d in BASE_DTYPES if d.itemsize < dtype.itemsize])
        if not (space.flat or space.ambient):
            raise ArgumentError(
                "base_dtype: expected a flat space or low rank; a rounded point would leave its manifold"
            )
    return base_dtype


@dataclass(frozen=True)
class TicketIssuer:
    """Issuer of tickets for the current model.

    Args:
        core: the shared parts of the server.
        base_dtype: the dtype of stored bases. `None` means the dtype of the models.
        durability: the checkpoints and the journal of the server.
    """

    core: ServerCore
    base_dtype: torch.dtype | None
    durability: DurabilityManager

    def issue(self, client: Hashable, *, retain_base: bool, copies: bool) -> tuple[Ticket, StoredTree | None]:
        """Issue a ticket for the current model.

        Args:
            client: the client that receives the ticket.
            retain_base: whether the server stores the base of the ticket.
            copies: whether the message contains copies. Otherwise, it shares memory with the server.

        Returns:
            The ticket, and the stored model from which the client starts.

        Raises:
            ArgumentError: if the server was closed, or if the rule returns an invalid message.
            BusyError: if `max_in_flight` tickets are in flight.
        """
        # An attempt fails only if another thread has changed the model in the meantime.
        while (issued := self._try_issue(client, retain_base, copies)) is None:
            pass
        return issued

    def round_base(self, current: Tensor) -> Tensor | None:
        """Round the server's model to `base_dtype`, the dtype in which clients receive it.

        Return `None` if `base_dtype` is not set, or if a value overflows in this dtype.
        """
        if self.base_dtype is None:
            return None
        base = current.to(self.base_dtype)
        return base if is_finite(base) else None

    def _try_issue(self, client: Hashable, retain_base: bool, copies: bool) -> tuple[Ticket, StoredTree | None] | None:
        """Issue a ticket for the current model. If the caller must try again, return `None`."""
        core = self.core
        state = core.state.value
        state.check_capacity()
        key = state.current_key
        stored = state.store.find(key)
        base = None
        if retain_base and self.base_dtype is not None:
            narrow_key = ("base", state.model_state.version)
            narrow = state.store.find(narrow_key)
            # Rounding the model again is faster than reading a spilled base from its file.
            base = narrow.tree if isinstance(narrow, InMemoryTree) else self.round_base(state.model_state.current)
            if base is not None:
                key = narrow_key
                stored = InMemoryTree(base) if narrow is None else narrow
        client_state = state.store.load(("client", client))
        message, custom_start = make_message(
            core.space, core.rule, state.model_state, client_state, base, copies=copies
        )
        ticket_id = os.urandom(16).hex()
        version = state.model_state.version
        ticket = PendingTicket(client, version, key if retain_base else None, core.clock(), custom_start)

        def with_ticket(now: ServerState) -> tuple[ServerState, bool]:
            is_released = now.model_state.version != version and now.store.find(key) is None
            # Another thread has replaced this model, and the store has released it. A checkpoint that was written since
            # then lacks the model, so a replay of the journal after this checkpoint could not restore the ticket.
            if retain_base and is_released and self.durability.journal is not None:
                return now, False
            return now.with_ticket(ticket_id, ticket, stored), True

        if not core.state.update(with_ticket):
            return None
        return Ticket(ticket_id, version, message, core.space), stored


def make_message(
    space: Manifold,
    rule: Rule,
    model_state: ModelState,
    client_state: ClientState,
    base: Tensor | None,
    *,
    copies: bool = True,
) -> tuple[Message, bool]:
    """Build the message of a rule to a client.

    Args:
        space: the space of the models.
        rule: the rule, which may choose the start model and add tensors and numbers.
        model_state: the current model state.
        client_state: the state that the server stores for the client.
        base: the rounded base. `None` means the current model.
        copies: whether the message contains copies. Otherwise, it shares memory with the server and must not be
            written to.

    Returns:
        The message, and whether the rule replaced the base by another start model.

    Raises:
        ArgumentError: if the rule returns an object that is not a message with a valid start model of this space.
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
