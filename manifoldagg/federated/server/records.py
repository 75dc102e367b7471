"""The records in the state of a server: tickets, updates, journal records and subscriptions."""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from immutables import Map

from manifoldagg.federated.server.durability.persistent_map import PersistentOrderedMap
from manifoldagg.federated.server.durability.store import InMemoryTree, StoreKey
from manifoldagg.federated.server.events import Callback
from manifoldagg.federated.step import ModelState
from manifoldagg.federated.types import Outcome, Receipt, Update

__all__ = [
    "AppliedUpdate",
    "ClosedTicket",
    "HistoryRow",
    "LogRecord",
    "PendingLog",
    "PendingNotification",
    "PendingTicket",
    "Subscription",
    "history_row",
    "make_receipt",
]

HistoryRow = dict[str, object]
"""A row of `Server.history`, as a dictionary from column names to values."""


class PendingTicket(NamedTuple):
    """Open ticket, which permits a client to return one update.

    Attributes:
        client: the client that the ticket was issued to.
        version: the version of the server's model when the ticket was issued.
        base_key: the key under which the server stores the model of this version, possibly in a narrower dtype. `None`
            if the server does not store it.
        issued_at: the time at which the ticket was issued, in seconds of the server's clock.
        custom_start: whether the rule has chosen a different start model for the client.
    """

    client: Hashable
    version: int
    base_key: StoreKey | None
    issued_at: float
    custom_start: bool = False


class ClosedTicket(NamedTuple):
    """Closed ticket, with its client and the receipt for repeated requests."""

    client: Hashable
    receipt: Receipt


class AppliedUpdate(NamedTuple):
    """Update and the result of its step, before the server publishes them.

    Attributes:
        ticket_id: the id of the ticket.
        ticket: the ticket of the update.
        reported_samples: the sample count that the client reported, before the server capped it.
        update: the update that the rule received.
        after: the model state after the step.
        outcome: the outcome of the rule.
        model: the new model. `None` if the step did not change the model.
        received_at: the time of arrival, in seconds of the clock. NaN if there are no subscribers and no journal.
        seconds: the duration of the step in seconds. NaN if there are no subscribers.
        payload: the bytes of the payload for the journal. Empty if there is no journal.
    """

    ticket_id: str
    ticket: PendingTicket
    reported_samples: int
    update: Update
    after: ModelState
    outcome: Outcome
    model: InMemoryTree | None
    received_at: float
    seconds: float
    payload: bytes | memoryview = b""


class PendingNotification(NamedTuple):
    """New version of the model that the average has not yet received."""

    version: int
    model: InMemoryTree


class LogRecord(NamedTuple):
    """Record of one change in the journal of a server.

    Attributes:
        kind: the kind of the change, such as `"dispatched"`.
        content: the details that a server needs to repeat the change, such as the id of a ticket.
        payload: the client's update as bytes, if the change is an accepted update. Otherwise, it is empty.
    """

    kind: str
    content: dict[str, Any]
    payload: bytes | memoryview


class PendingLog(NamedTuple):
    """Journal records that the server has not yet written to the file.

    Attributes:
        name: the name of the journal. Each resumed server starts a journal with a new name.
        chain: the checksum of the latest record. It also covers all earlier records, because the input of each checksum
            includes the previous checksum.
        records: the unwritten records, by log sequence number.
        rejected: the number of rejected updates up to the latest record, by the name of the invalid field.
    """

    name: str
    chain: str
    records: PersistentOrderedMap[int, LogRecord]
    rejected: Map[str, int]


@dataclass(frozen=True, eq=False)
class Subscription:
    """Callback of a subscriber, and the number of the first event that the callback receives."""

    callback: Callback
    first_event: int


def make_receipt(applied: AppliedUpdate) -> Receipt:
    """Return the receipt of an accepted update."""
    update = applied.update
    numbers = applied.outcome.numbers
    return Receipt(
        accepted=True,
        reason="",
        version=applied.after.version,
        staleness=update.staleness,
        weight=update.weight,
        cosine=numbers.get("cosine", math.nan),
        step=numbers.get("step", math.nan),
        norm=numbers.get("norm", math.nan),
        buffered=applied.model is None,
        clipped=update.samples < applied.reported_samples or numbers.get("clip", 1.0) < 1,
    )


def history_row(client: Hashable, samples: int, receipt: Receipt, numbers: Mapping[str, float]) -> HistoryRow:
    """Return a row of the server's history as a dictionary of plain Python values.

    The entry `buffered` tells whether the update was added to a buffer. The entry `waiting` is the number of updates in
    this buffer.

    Example:
        >>> history_row("ward-7", 10, Receipt(True, "", 1, step=0.5), {"rate": 0.25, "buffered": 2.0})["waiting"]
        2
    """
    # The receipt and the metrics of the rule use the name `buffered` with different meanings.
    count = numbers.get("buffered", 0)
    waiting = int(count) if math.isfinite(count) else 0
    line = {"client": client, "samples": samples, **vars(receipt), "waiting": waiting}
    for name, value in numbers.items():
        line.setdefault(name, value)
    return line
