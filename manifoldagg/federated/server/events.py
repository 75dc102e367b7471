"""What happens at a server, as values: who watches it gets one for each thing."""

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
    """Something that happened.

    Attributes:
        version: of the server's model after it.
        in_flight: how many tickets are out after it.
    """

    version: int
    in_flight: int


@dataclass(frozen=True)
class Dispatched(Event):
    """A client was sent to work.

    Attributes:
        client: who.
        ticket: its id.
        start_version: version of the model that it works on.
    """

    client: Hashable
    ticket: str
    start_version: int


@dataclass(frozen=True)
class Accepted(Event):
    """An update was taken.

    Attributes:
        client: who sent it.
        ticket: on which it came.
        receipt: that its client gets: staleness, weight, and what the step was.
        row: of the server's `history`, with the numbers of the rule; nobody can write it.
        latency: seconds of the server's clock from the dispatch to the answer.
        seconds: that the step took, by the clock of the machine.
        memory: bytes after it, as `server.memory` says.
    """

    client: Hashable
    ticket: str
    receipt: Receipt
    row: Mapping[str, object]
    latency: float
    seconds: float
    memory: Mapping[str, int]


@dataclass(frozen=True)
class Rejected(Event):
    """An update was not taken.

    Attributes:
        client: whom the ticket was issued to; `None` where it is not known.
        ticket: likewise.
        field: that was wrong, as in `server.rejected`.
        reason: as in the receipt.
        latency: seconds of the server's clock from the dispatch to the answer; NaN where the ticket is not known.
        is_final: whether no update can be taken on the ticket any more. Otherwise the client may try again.
    """

    client: Hashable | None
    ticket: str | None
    field: str
    reason: str
    latency: float
    is_final: bool


@dataclass(frozen=True)
class Dropped(Event):
    """A ticket was given back.

    Attributes:
        client: whom it was issued to.
        ticket: its id.
    """

    client: Hashable
    ticket: str


@dataclass(frozen=True)
class Expired(Event):
    """A ticket has ended, as nobody answered in time.

    Attributes:
        client: whom it was issued to.
        ticket: its id.
        latency: seconds since it was issued.
    """

    client: Hashable
    ticket: str
    latency: float


@dataclass(frozen=True)
class CheckpointWritten(Event):
    """A checkpoint is on the disk.

    Attributes:
        path: of the file.
        model_version: version of the model in it; `version` may be past it by now.
        seconds: that it took.
    """

    path: str
    model_version: int
    seconds: float


@dataclass(frozen=True)
class CheckpointFailed(Event):
    """A checkpoint could not be written, or not be made; the older file is as it was.

    Attributes:
        path: of the file.
        reason: why.
    """

    path: str
    reason: str


@dataclass(frozen=True)
class Closed(Event):
    """The server was closed, and every ticket with it."""


Callback: TypeAlias = Callable[[Event], object]
"""What is called with each event."""
