"""The state: all that a server knows, as one immutable record. A change is a new record, entered by one assignment."""

import math
from collections.abc import Callable, Collection, Hashable, Mapping
from itertools import takewhile
from types import MappingProxyType
from typing import Any, NamedTuple

from immutables import Map

from manifoldagg.errors import ArgumentError, BusyError
from manifoldagg.federated.model_state import ModelState
from manifoldagg.federated.pytrees import size_of
from manifoldagg.federated.server.durability.persistent_map import PersistentOrderedMap
from manifoldagg.federated.server.durability.spill import SpilledTree
from manifoldagg.federated.server.durability.store import InMemoryTree, Store, StoreKey
from manifoldagg.federated.server.events import (
    Accepted,
    Callback,
    Closed,
    Dispatched,
    Dropped,
    Event,
    Expired,
    Rejected,
)
from manifoldagg.federated.types import Outcome, Payload, Receipt, Update
from manifoldagg.federated.weights import Weights, check_client

__all__ = [
    "ANY_CLIENT",
    "AppliedUpdate",
    "ClosedTicket",
    "HistoryRow",
    "LogRecord",
    "PendingLog",
    "PendingNotification",
    "PendingTicket",
    "ServerLimits",
    "ServerState",
    "Subscription",
    "history_row",
]

ANY_CLIENT = object()
"""Stands for whichever client a ticket was issued to."""
UNKNOWN_TICKET = "ticket: unknown, or used already"
SERVER_CLOSED = "server: was closed"
HistoryRow = dict[str, object]
"""A line of the history."""


class ServerLimits(NamedTuple):
    """What a server keeps to.

    Attributes:
        max_staleness: of an update, in versions.
        timeout: of a ticket, in seconds.
        max_in_flight: that are out at once.
        history_size: how many of the latest rows are kept.
        receipt_cache_size: how many of the latest receipts are kept.
    """

    max_staleness: int | None = None
    timeout: float | None = None
    max_in_flight: int | None = None
    history_size: int | None = None
    receipt_cache_size: int | None = None


class PendingTicket(NamedTuple):
    """A ticket that is out: whose, from which version, where its base is kept, if it is, and since when in seconds.

    `custom_start` says whether its client starts from elsewhere than its base, as the rule wants it.
    """

    client: Hashable
    version: int
    base_key: StoreKey | None
    issued_at: float
    custom_start: bool = False


class ClosedTicket(NamedTuple):
    """What was said on a ticket that is no longer out, and to whom."""

    client: Hashable
    receipt: Receipt


class AppliedUpdate(NamedTuple):
    """What is made of an update.

    Attributes:
        model: the new one; `None` where it did not move.
        receipt: for the client.
        row: for the history.
        received_at: when, in seconds of the clock; NaN where nobody asked.
        seconds: that the step took; likewise.
        payload: packed for the journal; empty where there is none.
    """

    model: InMemoryTree | None
    receipt: Receipt
    row: HistoryRow
    received_at: float
    seconds: float
    payload: bytes | bytearray = b""


class PendingNotification(NamedTuple):
    """A model of which the average has still to hear."""

    version: int
    model: InMemoryTree


class LogRecord(NamedTuple):
    """A change, for the journal: what it was, all that it depends on, and the packed payload of an update."""

    kind: str
    content: dict[str, Any]
    payload: bytes | bytearray


class PendingLog(NamedTuple):
    """What the journal has still to be told.

    Attributes:
        name: of the journal.
        records: that are not written, by number.
        rejected: how many updates were, by field, as it was told last.
    """

    name: str
    records: PersistentOrderedMap[int, LogRecord]
    rejected: Map[str, int]


class Subscription(NamedTuple):
    """Who is told of events, and from which one on."""

    callback: Callback
    first_event: int


class ServerState(NamedTuple):
    """The record. Every method returns a new one, or says why there is none; nothing is ever written.

    What it refers to stays as it is while somebody has the record: a reader needs no lock, and no hold to give back.

    Attributes:
        limits: that it keeps to.
        model_state: the present.
        weights: who takes part.
        store: the present model, older versions, their rounded bases, client memory.
        tickets: that are out, the oldest first.
        closed_tickets: receipts by ticket, for those who ask again.
        history: rows by number.
        rejected: how many updates, by the field that was wrong.
        has_averaging: whether there is an average, which is to be told of new models.
        pending_notifications: models of which it has still to hear.
        is_closed: whether no more tickets are issued.
        subscriptions: who is told of events, which are kept for them alone.
        pending_events: of which they have still to hear, by number.
        pending_log: what the journal has still to be told; `None` without one.
    """

    limits: ServerLimits
    model_state: ModelState
    weights: Weights
    store: Store
    tickets: PersistentOrderedMap[str, PendingTicket] = PersistentOrderedMap()
    closed_tickets: PersistentOrderedMap[str, ClosedTicket] = PersistentOrderedMap()
    history: PersistentOrderedMap[int, HistoryRow] = PersistentOrderedMap()
    rejected: Map[str, int] = Map()
    has_averaging: bool = False
    pending_notifications: tuple[PendingNotification, ...] = ()
    is_closed: bool = False
    subscriptions: tuple[Subscription, ...] = ()
    pending_events: PersistentOrderedMap[int, Event] = PersistentOrderedMap()
    pending_log: PendingLog | None = None

    @property
    def current_key(self) -> StoreKey:
        """Where the model is."""
        return ("version", self.model_state.version)

    def check_capacity(self) -> None:
        """That a ticket can be issued.

        Raises:
            ArgumentError: if the server was closed.
            BusyError: if as many tickets are out as may be.
        """
        if self.is_closed:
            raise ArgumentError(SERVER_CLOSED)
        most = self.limits.max_in_flight
        if most is not None and len(self.tickets) >= most:
            raise BusyError(f"server: busy: {len(self.tickets)} tickets in flight, max_in_flight={most}")

    def with_ticket(
        self, ticket_id: str, ticket: PendingTicket, base: InMemoryTree | SpilledTree | None
    ) -> "ServerState":
        """With a ticket out. `base` is what the ticket names, should nobody keep it any more.

        Raises:
            ArgumentError: if the server was closed.
            BusyError: if as many tickets are out as may be.
        """
        self.check_capacity()
        after = self._replace(
            weights=self.weights.with_client(ticket.client),
            store=self.store if ticket.base_key is None else self.store.retain(ticket.base_key, base),
            tickets=self.tickets.set(ticket_id, ticket),
        ).with_log_record("dispatched", ticket=ticket_id, pending=tuple(ticket))
        return after.with_event(Dispatched, client=ticket.client, ticket=ticket_id, start_version=ticket.version)

    def find(self, ticket_id: Any, client: Any = ANY_CLIENT) -> PendingTicket | Receipt:
        """A ticket that is out, or the receipt that was given on it.

        Raises:
            ArgumentError: if it is neither, or another client's, or `client` is no name.
        """
        found = self._lookup(ticket_id)
        if found is None:
            raise ArgumentError(SERVER_CLOSED if self.is_closed else UNKNOWN_TICKET)
        if client is not ANY_CLIENT and check_client(client) != found.client:
            raise ArgumentError("client: expected the one that the ticket was issued to")
        return found if isinstance(found, PendingTicket) else found.receipt

    def staleness(self, ticket: PendingTicket) -> int:
        """Of an update that is taken now, in versions."""
        return self.model_state.version - ticket.version

    def check_staleness(self, ticket: PendingTicket) -> None:
        """That its version is not too old.

        Raises:
            ArgumentError: if it is.
        """
        most = self.limits.max_staleness
        if most is not None and self.staleness(ticket) > most:
            raise ArgumentError(f"staleness: expected at most {most}, got {self.staleness(ticket)}")

    def make_update(self, ticket: PendingTicket, payload: Payload, samples: int) -> Update:
        """A payload with what the server knows about it. Base and memory come from their files now.

        Args:
            ticket: on which it came.
            payload: admitted.
            samples: that are believed.

        Raises:
            SpillError: if a file is not what was written.
        """
        base: Any = payload.base if ticket.base_key is None else self.store.load(ticket.base_key)
        return Update(
            client=ticket.client,
            base=base.to(self.model_state.current),
            current=self.model_state.current,
            points=payload.points,
            staleness=self.staleness(ticket),
            weight=self.weights.weight(ticket.client, samples),
            samples=samples,
            tensors=payload.tensors,
            numbers=payload.numbers,
            client_state=self.store.load(("client", ticket.client)),
            share=self.weights.share(ticket.client, samples),
        )

    def with_update(
        self, ticket_id: str, update: Update, after: ModelState, outcome: Outcome, applied: AppliedUpdate
    ) -> "ServerState":
        """With an update taken.

        Args:
            ticket_id: of the update.
            update: that was taken.
            after: what it has made of the present.
            outcome: of the step.
            applied: what else is made of it.

        Raises:
            ArgumentError: if its ticket is not out any more.
        """
        ticket = self._pending(ticket_id)
        store = self.store
        untold = self.pending_notifications
        if applied.model is not None:
            store = store.retain(("version", after.version), applied.model).release(self.current_key)
            if self.has_averaging:
                untold = (*untold, PendingNotification(after.version, applied.model))
        if outcome.client_state is not update.client_state:
            key = ("client", update.client)
            if key in store:
                store = store.release(key)
            if outcome.client_state is not None:
                store = store.retain(key, InMemoryTree(outcome.client_state))
        state = self._replace(
            model_state=after,
            weights=self.weights.with_report(update.client, update.samples),
            store=store.release(ticket.base_key),
            tickets=self.tickets.remove(ticket_id),
            closed_tickets=self.closed_tickets.set(ticket_id, ClosedTicket(ticket.client, applied.receipt)).tail(
                self.limits.receipt_cache_size
            ),
            history=self.history.set(self.history.next_index, applied.row).tail(self.limits.history_size),
            pending_notifications=untold,
        ).with_log_record(
            "accepted",
            applied.payload,
            ticket=ticket_id,
            samples=update.samples,
            weight=update.weight,
            share=update.share,
            receipt=dict(vars(applied.receipt)),
            time=applied.received_at,
        )
        if not self.subscriptions:
            return state
        return state.with_event(
            Accepted,
            client=ticket.client,
            ticket=ticket_id,
            receipt=applied.receipt,
            row=MappingProxyType(applied.row),
            latency=applied.received_at - ticket.issued_at,
            seconds=applied.seconds,
            memory=MappingProxyType(state.memory_usage()),
        )

    def with_event(self, kind: Callable[..., Event], **fields: Any) -> "ServerState":
        """With an event of which those who watch, if anybody does, have still to hear."""
        if not self.subscriptions:
            return self
        event = kind(version=self.model_state.version, in_flight=len(self.tickets), **fields)
        return self._replace(pending_events=self.pending_events.set(self.pending_events.next_index, event))

    def with_log_record(self, kind: str, payload: bytes | bytearray = b"", **content: Any) -> "ServerState":
        """With a change of which the journal, if there is one, has still to be told."""
        log = self.pending_log
        if log is None:
            return self
        if log.rejected is not self.rejected:
            content["rejected"] = dict(self.rejected)
        changes = log.records.set(log.records.next_index, LogRecord(kind, content, payload))
        return self._replace(pending_log=PendingLog(log.name, changes, self.rejected))

    def log_truncated(self, lsn: int) -> "ServerState":
        """Without the changes before a number, which are written."""
        if self.pending_log is None:
            return self
        changes = self.pending_log.records
        while changes and changes.first_key < lsn:
            changes = changes.remove(changes.first_key)
        return self._replace(pending_log=self.pending_log._replace(records=changes))

    def without_ticket(self, ticket_id: str, receipt: Receipt | None = None) -> "ServerState":
        """Without a ticket that is out, its receipt to be had again; without any where it was dropped."""
        ticket = self.tickets[ticket_id]
        answered = self.closed_tickets
        if receipt is not None:
            answered = answered.set(ticket_id, ClosedTicket(ticket.client, receipt)).tail(
                self.limits.receipt_cache_size
            )
        tickets = self.tickets.remove(ticket_id)
        return self._replace(store=self.store.release(ticket.base_key), tickets=tickets, closed_tickets=answered)

    def with_dropped_ticket(self, ticket_id: Any) -> "ServerState":
        """Without a ticket that nobody will answer on.

        Raises:
            ArgumentError: if it is not out.
        """
        client = self._pending(ticket_id).client
        return (
            self.without_ticket(ticket_id)
            .with_log_record("dropped", ticket=ticket_id)
            .with_event(Dropped, client=client, ticket=ticket_id)
        )

    def with_rejection(
        self, ticket_id: Any, reason: str, received_at: float, *, is_final: bool = False
    ) -> tuple["ServerState", Receipt]:
        """With a refusal counted, by the field that its reason names first; and its receipt.

        Args:
            ticket_id: of the update, whatever it is.
            reason: for the receipt.
            received_at: when it came, in seconds of the clock; NaN where nobody asked.
            is_final: whether the ticket, which is out, ends.
        """
        field = reason.partition(":")[0].partition("[")[0]
        receipt = Receipt(False, reason, self.model_state.version)
        state = self._replace(rejected=self.rejected.set(field, self.rejected.get(field, 0) + 1))
        if is_final:
            state = state.without_ticket(ticket_id, receipt).with_log_record(
                "ended", tickets=[ticket_id], reason=reason, time=received_at
            )
        if not self.subscriptions:
            return state, receipt
        found = self._lookup(ticket_id)
        state = state.with_event(
            Rejected,
            client=None if found is None else found.client,
            ticket=None if found is None else ticket_id,
            field=field,
            reason=reason,
            latency=received_at - found.issued_at if isinstance(found, PendingTicket) else math.nan,
            is_final=is_final,
        )
        return state, receipt

    def with_final_rejection(self, ticket_id: str, reason: str, received_at: float) -> tuple["ServerState", Receipt]:
        """Without a ticket on which no update can be taken any more; and its receipt, the older one if there is one."""
        if ticket_id in self.tickets:
            return self.with_rejection(ticket_id, reason, received_at, is_final=True)
        answer = self.closed_tickets.get(ticket_id)
        return self, Receipt(False, reason, self.model_state.version) if answer is None else answer.receipt

    def without_expired(self, now: float, exclude: Collection[str] = ()) -> tuple["ServerState", list[str]]:
        """Without the tickets that are older than they may be at `now`, but those that are answered; and their ids."""
        timeout = self.limits.timeout
        # To put tickets in order would cost every update, where long ones are between many that were short.
        if timeout is None or not self.tickets or now - self.tickets[self.tickets.first_key].issued_at <= timeout:
            return self, []
        due = takewhile(lambda name: now - self.tickets[name].issued_at > timeout, self.tickets)
        ended = [name for name in due if name not in exclude]
        receipt = Receipt(False, f"ticket: expired: nobody answered within {timeout:g} s", self.model_state.version)
        state = self
        for ticket_id in ended:
            client, _, _, since, _ = self.tickets[ticket_id]
            state = state.without_ticket(ticket_id, receipt)
            state = state.with_event(Expired, client=client, ticket=ticket_id, latency=now - since)
        if ended:
            state = state.with_log_record("ended", tickets=ended, reason=receipt.reason, time=now)
        return state, ended

    def _lookup(self, ticket_id: Any) -> PendingTicket | ClosedTicket | None:
        """What there is of a ticket."""
        if type(ticket_id) is not str:  # one of another class may do what it likes when it is looked up
            return None
        return self.tickets.get(ticket_id) or self.closed_tickets.get(ticket_id)

    def _pending(self, ticket_id: Any) -> PendingTicket:
        """A ticket that is out.

        Raises:
            ArgumentError: if it is not.
        """
        found = self.find(ticket_id)
        if isinstance(found, Receipt):
            raise ArgumentError(UNKNOWN_TICKET)
        return found

    def close(self) -> "ServerState":
        """Without anything but the model and what is written of its past."""
        current = self.store.entries[self.current_key][0]
        state = self._replace(
            store=Store().retain(self.current_key, current),
            tickets=PersistentOrderedMap(),
            pending_notifications=(),
            is_closed=True,
            pending_log=None,
        )
        return state if self.is_closed else state.with_event(Closed)

    def memory_usage(self) -> dict[str, int]:
        """Bytes: the model, its state, older versions that tickets hold, client memory, and what is in files."""
        used = self.store.memory_usage(exclude=self.current_key)
        return {
            "model": size_of(self.model_state.current),
            "state": size_of([self.model_state.state, self.model_state.buffers.vectors]),
            "versions": used["version"] + used["base"],
            "clients": used["client"],
            "spilled": used["spilled"],
        }


def history_row(client: Hashable, samples: int, receipt: Receipt, numbers: Mapping[str, float]) -> HistoryRow:
    """A line of the history: plain Python values under plain names. What a rule calls `buffered` is called `waiting`.

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
