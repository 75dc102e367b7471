"""The records in the state of a server: tickets, updates, journal records and subscriptions."""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from immutables import Map

from manifoldagg.federated.model_state import ModelState
from manifoldagg.federated.server.durability.persistent_map import PersistentOrderedMap
from manifoldagg.federated.server.durability.store import InMemoryTree, StoreKey
from manifoldagg.federated.server.events import Callback
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
"""A row of the history."""


class PendingTicket(NamedTuple):
    """A ticket in flight.

    `base_key` is `None` if the server does not store the base. `issued_at` is in seconds of the clock. `custom_start`
    states whether the rule chose another start model than the base.
    """

    client: Hashable
    version: int
    base_key: StoreKey | None
    issued_at: float
    custom_start: bool = False


class ClosedTicket(NamedTuple):
    """A closed ticket: the client and the receipt."""

    client: Hashable
    receipt: Receipt


class AppliedUpdate(NamedTuple):
    """An update and the result of its step, before the server publishes them.

    Attributes:
        reported_samples: the sample count that the client reported, before the cap.
        update: the input of the step.
        after: the model state after the step.
        outcome: the outcome of the step.
        model: the new model; `None` if the model did not move.
        received_at: the time of arrival in seconds of the clock; NaN if neither a subscriber nor a journal needs it.
        seconds: the duration of the step; NaN without subscribers.
        payload: the bytes of the payload for the journal; empty without a journal.
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
    """A model that the average has not yet received."""

    version: int
    model: InMemoryTree


class LogRecord(NamedTuple):
    """A journal record: the kind of the change, the inputs of the change, and the bytes of a payload."""

    kind: str
    content: dict[str, Any]
    payload: bytes | memoryview


class PendingLog(NamedTuple):
    """The pending records of a journal.

    Attributes:
        name: the name of the journal. Each resumed server creates a journal with a new name.
        chain: the checksum of the last record, which also covers the checksum of the previous record.
        records: the records that are not yet written, by log sequence number.
        rejected: the number of rejected updates by field, as in the last record.
    """

    name: str
    chain: str
    records: PersistentOrderedMap[int, LogRecord]
    rejected: Map[str, int]


@dataclass(frozen=True, eq=False)
class Subscription:
    """A subscriber, and the number of the first event that it receives."""

    callback: Callback
    first_event: int


def make_receipt(applied: AppliedUpdate) -> Receipt:
    """Return the receipt of an accepted update."""
    update, numbers = applied.update, applied.outcome.numbers
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
    """Return a row of the history as plain Python values by name. The column `waiting` is the metric `buffered`.

    Example:
        >>> history_row("ward-7", 10, Receipt(True, "", 1, step=0.5), {"rate": 0.25, "buffered": 2.0})["waiting"]
        2
    """
    count = numbers.get("buffered", 0)
    waiting = int(count) if math.isfinite(count) else 0
    line = {"client": client, "samples": samples, **vars(receipt), "waiting": waiting}
    for name, value in numbers.items():
        line.setdefault(name, value)
    return line
