"""Events that a server publishes to its subscribers."""

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
    """Base class for all events of a server.

    Attributes:
        version: the version of the server's model after the event.
        in_flight: the number of tickets in flight after the event. Each ticket permits a client to return one update.
    """

    version: int
    in_flight: int


@dataclass(frozen=True)
class TicketEvent(Event):
    """Base class for events that concern one ticket.

    Attributes:
        client: the client that the ticket was issued to.
        ticket: the id of the ticket.
    """

    client: Hashable
    ticket: str


@dataclass(frozen=True)
class Dispatched(TicketEvent):
    """Event that the server publishes after it has dispatched a task to a client.

    Attributes:
        start_version: the version of the dispatched model.
    """

    start_version: int


@dataclass(frozen=True)
class Accepted(TicketEvent):
    """Event that the server publishes after it has accepted an update.

    Attributes:
        receipt: the receipt for the client.
        row: the new row of `Server.history`, with the metrics of the rule. The mapping is read-only.
        latency: the time from the dispatch to the arrival of the update in seconds, measured by the server's clock.
        seconds: the duration of the step in seconds, measured by the clock of the machine.
        memory: the memory usage in bytes after the update, as in `Server.memory`.
    """

    receipt: Receipt
    row: Mapping[str, object]
    latency: float
    seconds: float
    memory: Mapping[str, int]


@dataclass(frozen=True)
class Rejected(Event):
    """Event that the server publishes after it has rejected an update.

    Attributes:
        client: the client of the ticket. `None` if the ticket is unknown.
        ticket: the id of the ticket, which permits a client to return one update. `None` if the ticket is unknown.
        field: the name of the invalid field of the update, such as `"points"`.
        reason: the reason for the rejection, as in the server's answer to the client.
        latency: the time from the dispatch to the arrival of the update in seconds, measured by the server's clock. NaN
            if the ticket is unknown or already closed.
        is_final: whether the rejection has closed the ticket. Otherwise, the client may send another update.
    """

    client: Hashable | None
    ticket: str | None
    field: str
    reason: str
    latency: float
    is_final: bool


@dataclass(frozen=True)
class Dropped(TicketEvent):
    """Event that the server publishes after `Server.drop` has ended a task."""


@dataclass(frozen=True)
class Expired(TicketEvent):
    """Event that the server publishes after a ticket has expired.

    A ticket expires if the server accepts no update for it within `ServerLimits.timeout` seconds.

    Attributes:
        latency: the age of the ticket in seconds, measured by the server's clock.
    """

    latency: float


@dataclass(frozen=True)
class CheckpointWritten(Event):
    """Event that the server publishes after it has written a checkpoint.

    Attributes:
        path: the path of the file.
        model_version: the version of the model in the checkpoint. The server's current `version` may be higher.
        seconds: the duration of the write in seconds.
    """

    path: str
    model_version: int
    seconds: float


@dataclass(frozen=True)
class CheckpointFailed(Event):
    """Event that the server publishes after it has failed to write a checkpoint.

    An older checkpoint at the same path is unchanged.

    Attributes:
        path: the path of the file.
        reason: the message of the error.
    """

    path: str
    reason: str


@dataclass(frozen=True)
class Closed(Event):
    """Event that the server publishes after it was closed."""


Callback: TypeAlias = Callable[[Event], object]
"""A function that receives each event. Its result is ignored."""
