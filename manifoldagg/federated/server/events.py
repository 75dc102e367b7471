"""Events that a server sends to its subscribers."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from manifoldagg.federated.types import Receipt

__all__ = [
    "Accepted",
    "Callback",
    "CheckpointFailed",
    "CheckpointWritten",
    "Closed",
    "Dispatched",
    "Dropped",
    "Event",
    "Expired",
    "Rejected",
]


@dataclass(frozen=True)
class Event:
    """Base class of events.

    Attributes:
        version: the version of the server's model after the event.
        in_flight: the number of tickets in flight after the event.
    """

    version: int
    in_flight: int


@dataclass(frozen=True)
class TicketEvent(Event):
    """Base class of the events of one ticket.

    Attributes:
        client: the client that the ticket was issued to.
        ticket: the id of the ticket.
    """

    client: Hashable
    ticket: str


@dataclass(frozen=True)
class Dispatched(TicketEvent):
    """Event: a task was dispatched to a client.

    Attributes:
        start_version: the version of the dispatched model.
    """

    start_version: int


@dataclass(frozen=True)
class Accepted(TicketEvent):
    """Event: an update was accepted.

    Attributes:
        receipt: the receipt for the client.
        row: the row of the server's `history`, with the metrics of the rule. It is read-only.
        latency: the seconds from the dispatch to the update, in the server's clock.
        seconds: the duration of the step in seconds, in the clock of the machine.
        memory: the memory usage in bytes after the update, as in `server.memory`.
    """

    receipt: Receipt
    row: Mapping[str, object]
    latency: float
    seconds: float
    memory: Mapping[str, int]


@dataclass(frozen=True)
class Rejected(Event):
    """Event: an update was rejected.

    Attributes:
        client: the client of the ticket; `None` if the ticket is unknown.
        ticket: the id of the ticket; `None` if the ticket is unknown.
        field: the invalid field, as in `server.rejected`.
        reason: the reason in the receipt.
        latency: the seconds from the dispatch to the update, in the server's clock; NaN if the ticket is unknown.
        is_final: whether the ticket is closed. Otherwise, the client may send another update.
    """

    client: Hashable | None
    ticket: str | None
    field: str
    reason: str
    latency: float
    is_final: bool


@dataclass(frozen=True)
class Dropped(TicketEvent):
    """Event: a ticket was dropped."""


@dataclass(frozen=True)
class Expired(TicketEvent):
    """Event: a ticket expired because its update did not arrive in time.

    Attributes:
        latency: the age of the ticket in seconds.
    """

    latency: float


@dataclass(frozen=True)
class CheckpointWritten(Event):
    """Event: a checkpoint was written.

    Attributes:
        path: the path of the file.
        model_version: the version of the model in the checkpoint. `version` may be higher.
        seconds: the duration of the write.
    """

    path: str
    model_version: int
    seconds: float


@dataclass(frozen=True)
class CheckpointFailed(Event):
    """Event: a checkpoint could not be written. The older file is unchanged.

    Attributes:
        path: the path of the file.
        reason: the reason of the failure.
    """

    path: str
    reason: str


@dataclass(frozen=True)
class Closed(Event):
    """Event: the server was closed."""


Callback: TypeAlias = Callable[[Event], object]
"""A function that receives each event."""
