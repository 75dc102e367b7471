"""Decoding of payloads that clients have compressed relative to the base of their tickets."""

from collections.abc import Callable
from typing import Any

from manifoldagg._validation import check_instance
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.clients.compression import Codec, check_codec, decode_payload
from manifoldagg.federated.server.records import PendingTicket
from manifoldagg.federated.server.state import ServerState
from manifoldagg.federated.types import Payload
from manifoldagg.manifolds import Manifold

__all__ = ["decoding_loader"]


def decoding_loader(
    codec: Codec, payload: Payload | Callable[[], Payload], space: Manifold, state: ServerState
) -> Callable[[PendingTicket], Payload]:
    """Return a function from a ticket to the decoded payload of the client.

    Args:
        codec: the codec with which `ErrorFeedback.encode_payload` has encoded the payload.
        payload: the encoded payload, or a function that returns it, as in `Server.receive`.
        space: the space of the server.
        state: the state of the server, which contains the bases of the tickets.

    Raises:
        ArgumentError: if `codec` is not a codec, or if the space has curved leaves, on which points and displacements
            cannot be added.
    """
    check_codec(codec)
    if not (space.flat or space.ambient):
        raise ArgumentError(
            f"codec: expected None, as displacements on {space} cannot be added; send uncompressed models"
        )

    def load(ticket: PendingTicket) -> Payload:
        if ticket.base_key is None or ticket.custom_start:
            raise ArgumentError("codec: expected None, as the client did not start from a model that the server stores")
        given: Any = payload
        given = check_instance("payload", given if isinstance(given, Payload) else given(), Payload)
        return decode_payload(codec, given, state.store.load(ticket.base_key))

    return load
