"""State of a server as one immutable record, which every change replaces atomically."""

import hashlib
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from immutables import Map

from manifoldagg._validation import other_type_hint, short_repr
from manifoldagg.errors import ArgumentError, BusyError
from manifoldagg.federated.limits import Norms
from manifoldagg.federated.pytrees import size_of
from manifoldagg.federated.server.durability.persistent_map import AtomicReference, PersistentOrderedMap
from manifoldagg.federated.server.durability.store import InMemoryTree, Store, StoredTree, StoreKey
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
from manifoldagg.federated.server.options import ServerLimits
from manifoldagg.federated.step import ModelState
from manifoldagg.federated.types import Averaging, Outcome, Payload, Receipt, Rule, Update
from manifoldagg.federated.weights import Weights, check_client
from manifoldagg.manifolds import Manifold

__all__ = [
    "ANY_CLIENT",
    "AppliedUpdate",
    "ClosedTicket",
    "HistoryRow",
    "LogRecord",
    "PendingLog",
    "PendingTicket",
    "ServerCore",
    "ServerState",
    "StaleTicketError",
    "Subscription",
]

ANY_CLIENT = object()
"""The default of the argument `client`. It accepts the client of any ticket."""
PAYLOAD_HEAD_BYTES = 64
"""The number of bytes at the start of a packed payload. They contain the checksum of the payload."""
UNKNOWN_TICKET = "ticket: unknown, or used already"
SERVER_CLOSED = "server: was closed"


class StaleTicketError(ArgumentError):
    """Error for a ticket whose version is too old. The server closes the ticket."""


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


class ServerState(NamedTuple):
    """Immutable state of a server. Readers need no lock, because all parts of the state are immutable.

    Every method that changes the state returns a new state. If it raises an error, nothing has changed.

    Attributes:
        limits: the limits of the server.
        model_state: the current model with its buffers and the state of the rule.
        weights: the participating clients and their weights.
        store: the current model, the older versions, the rounded bases and the client states.
        tickets: the tickets in flight by id, with the oldest ticket first.
        closed_tickets: the receipts of closed tickets by id, which answer repeated requests.
        history: the rows of the history, by the number of the update.
        rejected: the number of rejected updates for each invalid field.
        has_averaging: whether the server has an average, which receives each new model.
        pending_notifications: the models that the average has not yet received.
        is_closed: whether the server was closed.
        subscriptions: the subscribers of events. Without subscribers, the server stores no events.
        pending_events: the events that the subscribers have not yet received, by number.
        pending_log: the records that are not yet written to the journal. `None` means that there is no journal.
        last_issued_at: the time at which the latest ticket was issued. No ticket in flight has a later time.
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
    last_issued_at: float = -math.inf

    @property
    def current_key(self) -> StoreKey:
        """The store key of the current model."""
        return ("version", self.model_state.version)

    def check_capacity(self) -> None:
        """Check that the server can issue another ticket.

        Raises:
            ArgumentError: if the server was closed.
            BusyError: if `max_in_flight` tickets are in flight.
        """
        if self.is_closed:
            raise ArgumentError(SERVER_CLOSED)
        most = self.limits.max_in_flight
        if most is not None and len(self.tickets) >= most:
            raise BusyError(f"server: busy: {len(self.tickets)} tickets in flight, max_in_flight={most}")

    def with_ticket(self, ticket_id: str, ticket: PendingTicket, base: StoredTree | None) -> "ServerState":
        """Return the state with a new ticket.

        Args:
            ticket_id: the id of the ticket.
            ticket: the ticket.
            base: the model from which the client starts. The store receives it only if it does not yet contain the key
                of the base.

        Raises:
            ArgumentError: if the server was closed.
            BusyError: if `max_in_flight` tickets are in flight.
        """
        self.check_capacity()
        tickets = self.tickets
        now = ticket.issued_at
        if now < self.last_issued_at:  # The clock was set back. `without_expired` requires tickets in order of time.
            for name in [name for name, other in tickets.items() if other.issued_at > now]:
                tickets = tickets.set(name, tickets[name]._replace(issued_at=now))
        key = None if self._is_stale(ticket.version) else ticket.base_key
        after = self._replace(
            weights=self.weights.with_client(ticket.client),
            store=self.store if key is None else self.store.retain(key, base),
            tickets=tickets.set(ticket_id, ticket),
            last_issued_at=now,
        ).with_log_record("dispatched", ticket=ticket_id, pending=tuple(ticket))
        return after.with_event(Dispatched, client=ticket.client, ticket=ticket_id, start_version=ticket.version)

    def admit(self, ticket_id: Any, client: Any) -> PendingTicket | Receipt:
        """Look up the ticket with which a client returns an update, and check that it is valid.

        Args:
            ticket_id: the id of the ticket.
            client: the client that returns the update, or `ANY_CLIENT`.

        Returns:
            The ticket if it is open. If the ticket is closed, its receipt, which is the server's answer.

        Raises:
            StaleTicketError: if the version of the ticket is too old.
            ArgumentError: if the ticket is unknown, if it was issued to another client, or if `client` is not a valid
                name.
        """
        found = self._lookup(ticket_id)
        if found is None:
            raise ArgumentError(SERVER_CLOSED if self.is_closed else UNKNOWN_TICKET)
        if client is not ANY_CLIENT and check_client(client) != found.client:
            hint = other_type_hint(client, [found.client])
            given = f"{short_repr(client)}{hint}"
            raise ArgumentError(f"client: expected the client that the ticket was issued to, got {given}")
        if isinstance(found, ClosedTicket):
            return found.receipt
        if self._is_stale(found.version):
            staleness = self.model_state.version - found.version
            raise StaleTicketError(f"staleness: expected at most {self.limits.update.max_staleness}, got {staleness}")
        # An earlier, lower `max_staleness` may have released the base.
        if found.base_key is not None and found.base_key not in self.store:
            raise StaleTicketError(f"staleness: version {found.version} is no longer retained")
        return found

    def _is_stale(self, version: int) -> bool:
        most = self.limits.update.max_staleness
        return most is not None and self.model_state.version - version > most

    def without_stale_versions(self, keys: Iterable[StoreKey]) -> "ServerState":
        """Remove the stored models whose staleness exceeds `max_staleness`, and return the new state.

        These models are no longer needed, because the server rejects all updates that start from them.

        Args:
            keys: the keys of the store whose models the method checks.
        """
        held = self.store.entries
        stale = [key for key in keys if key in held and key[0] != "client" and self._is_stale(cast(int, key[1]))]
        released = [key for key in stale for _ in range(held[key][1])]
        return self._replace(store=self.store.replaced(released, {})) if released else self

    def pending(self, ticket_id: Any) -> PendingTicket:
        """Return a ticket in flight. If the ticket is not in flight, raise `ArgumentError`."""
        found = self._lookup(ticket_id)
        if not isinstance(found, PendingTicket):
            raise ArgumentError(SERVER_CLOSED if found is None and self.is_closed else UNKNOWN_TICKET)
        return found

    def make_update(self, ticket: PendingTicket, payload: Payload, recorded: Mapping[str, Any] | None = None) -> Update:
        """Combine a validated payload with the server's data about its ticket and client.

        Args:
            ticket: the ticket of the update.
            payload: the validated payload.
            recorded: the sample count and the weights of the original run, during a journal replay. `None` means that
                the server computes them.

        Raises:
            SpillError: if the spill file of the base or of the client state was altered.
        """
        client = ticket.client
        current = self.model_state.current
        if recorded is None:
            samples = self.weights.capped(client, payload.samples)
            weight = self.weights.weight(client, samples)
            share = self.weights.share(client, samples)
        else:
            samples = recorded["samples"]
            weight = recorded["weight"]
            share = recorded["share"]
        base: Any = payload.base if ticket.base_key is None else self.store.load(ticket.base_key)
        return Update(
            client=client,
            base=base.to(current),
            current=current,
            points=payload.points,
            staleness=self.model_state.version - ticket.version,
            weight=weight,
            samples=samples,
            tensors=payload.tensors,
            numbers=payload.numbers,
            client_state=self.store.load(("client", client)),
            share=share,
        )

    def with_update(self, applied: AppliedUpdate) -> tuple["ServerState", Receipt]:
        """Return the state after an applied update, and the receipt of the update.

        Raises:
            ArgumentError: if the ticket was dropped while the server computed the step.
        """
        ticket_id = applied.ticket_id
        client = applied.ticket.client
        # `drop` does not wait for a running update.
        if ticket_id not in self.tickets.entries:
            self.pending(ticket_id)  # This call raises the error.
        receipt = _make_receipt(applied)
        row = _history_row(client, applied.reported_samples, receipt, applied.outcome.numbers)
        closed = ClosedTicket(client, receipt)
        notifications = self.pending_notifications
        if applied.model is not None and self.has_averaging:
            notifications = (*notifications, PendingNotification(receipt.version, applied.model))
        state = self._replace(
            model_state=applied.after,
            store=self._store_after(applied),
            tickets=self.tickets.remove(ticket_id),
            closed_tickets=self.closed_tickets.set(ticket_id, closed, self.limits.receipt_cache_size),
            history=self.history.set(self.history.next_index, row, self.limits.history_size),
            weights=self.weights.with_report(client, applied.update.samples),
            pending_notifications=notifications,
        )
        if self.limits.update.max_staleness is not None and applied.model is not None:
            oldest = applied.after.version - self.limits.update.max_staleness - 1
            state = state.without_stale_versions([("version", oldest), ("base", oldest)])
        if self.pending_log is not None or self.subscriptions:
            state = state._with_acceptance(applied, receipt, row)
        return state, receipt

    def _with_acceptance(self, applied: AppliedUpdate, receipt: Receipt, row: HistoryRow) -> "ServerState":
        """Add the journal record and the event of an accepted update to the state."""
        ticket = applied.ticket
        update = applied.update
        state = self.with_log_record(
            "accepted",
            applied.payload,
            ticket=applied.ticket_id,
            samples=update.samples,
            weight=update.weight,
            share=update.share,
            receipt=dict(vars(receipt)),
            time=applied.received_at,
        )
        if not self.subscriptions:
            return state
        return state.with_event(
            Accepted,
            client=ticket.client,
            ticket=applied.ticket_id,
            receipt=receipt,
            row=MappingProxyType(row),
            latency=applied.received_at - ticket.issued_at,
            seconds=applied.seconds,
            memory=MappingProxyType(state.memory_usage()),
        )

    def _store_after(self, applied: AppliedUpdate) -> Store:
        """Return a new store of models and client states, which includes the results of an update."""
        # The new store removes a released model only if no other ticket refers to it.
        released: list[StoreKey] = []
        retained: dict[StoreKey, StoredTree | None] = {}
        if applied.model is not None:
            released.append(("version", self.model_state.version))
            retained["version", applied.after.version] = applied.model
        memory = applied.outcome.client_state
        if memory is not applied.update.client_state:
            key = ("client", applied.update.client)
            if key in self.store.entries:
                released.append(key)
            if memory is not None:
                retained[key] = InMemoryTree(memory)
        if applied.ticket.base_key is not None:
            released.append(applied.ticket.base_key)
        return self.store.replaced(released, retained)

    def with_event(self, kind: Callable[..., Event], **fields: Any) -> "ServerState":
        """Add a pending event to the state if there are subscribers."""
        if not self.subscriptions:
            return self
        event = kind(version=self.model_state.version, in_flight=len(self.tickets), **fields)
        return self._replace(pending_events=self.pending_events.set(self.pending_events.next_index, event))

    def with_log_record(self, kind: str, payload: bytes | memoryview = b"", **content: Any) -> "ServerState":
        """Add a pending journal record to the state if there is a journal."""
        log = self.pending_log
        if log is None:
            return self
        if log.rejected is not self.rejected:
            content["rejected"] = dict(self.rejected)
        # The start of a packed payload contains its checksum, so the chain need not read the whole payload.
        summary = repr((log.chain, kind, content)).encode() + payload[:PAYLOAD_HEAD_BYTES]
        chain = hashlib.blake2b(summary, digest_size=8).hexdigest()
        record = LogRecord(kind, {**content, "chain": (log.chain, chain)}, payload)
        changes = log.records.set(log.records.next_index, record)
        return self._replace(pending_log=PendingLog(log.name, chain, changes, self.rejected))

    def log_truncated(self, lsn: int) -> "ServerState":
        """Return the state of the server without the journal records that are already in the file.

        Args:
            lsn: the log sequence number of the first record that is not yet in the file.
        """
        if self.pending_log is None:
            return self
        changes = self.pending_log.records
        while changes and changes.first_key < lsn:
            changes = changes.remove(changes.first_key)
        return self._replace(pending_log=self.pending_log._replace(records=changes))

    def without_ticket(self, ticket_id: str, receipt: Receipt | None = None) -> "ServerState":
        """Remove one ticket from the tickets in flight, and return the new state.

        The method also releases the stored model from which the client started, unless other tickets need it.

        Args:
            ticket_id: the id of the ticket.
            receipt: the server's answer to the client, with which the new state answers repeated requests. `None` for a
                dropped ticket.
        """
        ticket = self.tickets[ticket_id]
        closed = self.closed_tickets
        if receipt is not None:
            closed = closed.set(ticket_id, ClosedTicket(ticket.client, receipt), self.limits.receipt_cache_size)
        key = ticket.base_key
        # `without_stale_versions` may have released the base of a stale ticket.
        store = self.store if key is None or key not in self.store else self.store.release(key)
        weights = self.weights.without_ticket(ticket.client)
        return self._replace(
            store=store, tickets=self.tickets.remove(ticket_id), closed_tickets=closed, weights=weights
        )

    def with_dropped_ticket(self, ticket_id: Any) -> "ServerState":
        """Return the state after a ticket was dropped.

        Raises:
            ArgumentError: if the ticket is not in flight.
        """
        client = self.pending(ticket_id).client
        return (
            self.without_ticket(ticket_id)
            .with_log_record("dropped", ticket=ticket_id)
            .with_event(Dropped, client=client, ticket=ticket_id)
        )

    def with_rejection(
        self, ticket_id: Any, reason: str, received_at: float, *, is_final: bool = False, norms: Norms | None = None
    ) -> tuple["ServerState", Receipt]:
        """Record that an update was rejected. Return the new server state and the receipt for the client.

        The new state counts the rejected updates for each invalid field, such as `"points"`.

        Args:
            ticket_id: the id of the ticket.
            reason: the reason for the rejection, which starts with the name of the invalid field.
            received_at: the time at which the update arrived, in seconds of the clock.
            is_final: whether to close the ticket. If the ticket is already closed, the method changes nothing and
                returns the existing receipt.
            norms: the latest norms of the clients after the rejection. `None` means that they are unchanged.
        """
        receipt = Receipt(False, reason, self.model_state.version)
        if is_final and ticket_id not in self.tickets:
            closed = self.closed_tickets.get(ticket_id)
            return self, receipt if closed is None else closed.receipt
        field = reason.partition(":")[0].partition("[")[0]
        state = self._replace(rejected=self.rejected.set(field, self.rejected.get(field, 0) + 1))
        if norms is not None and norms != self.model_state.norms:
            state = state._replace(model_state=replace(self.model_state, norms=norms))
            state = state.with_log_record("norm", norm=norms[-1], window=len(norms))
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

    def without_expired(self, now: float, exclude: Collection[str] = ()) -> tuple["ServerState", list[str]]:
        """Remove expired tickets. Return the new server state and the ids of the removed tickets.

        A ticket permits a client to return one update. It expires if the update does not arrive in time. The tickets in
        `exclude` do not expire, because the server is already processing their updates.
        """
        timeout = self.limits.timeout
        # Most calls find no expired ticket. Checking the oldest ticket first takes constant time.
        if timeout is None or not self.tickets or now - self.tickets[self.tickets.first_key].issued_at <= timeout:
            return self, []
        due = takewhile(lambda name: now - self.tickets[name].issued_at > timeout, self.tickets)
        ended = [name for name in due if name not in exclude]
        receipt = Receipt(False, f"ticket: expired: no update arrived within {timeout:g} s", self.model_state.version)
        state = self
        for ticket_id in ended:
            client, _, _, since, _ = self.tickets[ticket_id]
            state = state.without_ticket(ticket_id, receipt)
            state = state.with_event(Expired, client=client, ticket=ticket_id, latency=now - since)
        if ended:
            state = state.with_log_record("ended", tickets=ended, reason=receipt.reason, time=now)
        return state, ended

    def _lookup(self, ticket_id: Any) -> PendingTicket | ClosedTicket | None:
        if type(ticket_id) is not str:  # The hash function of another class could run arbitrary code.
            return None
        found = self.tickets.entries.get(ticket_id) or self.closed_tickets.entries.get(ticket_id)
        return None if found is None else found[1]

    def close(self) -> "ServerState":
        """Return the state of a closed server, which has no tickets, client states or older models."""
        current = self.store.entries[self.current_key][0]
        state = self._replace(
            store=Store().retain(self.current_key, current),
            tickets=PersistentOrderedMap(),
            pending_notifications=(),
            is_closed=True,
        )
        return state if self.is_closed else state.with_event(Closed)

    def memory_usage(self) -> dict[str, int]:
        """Return the memory usage in bytes, with the keys of `Server.memory`."""
        used = self.store.memory_usage(exclude=self.current_key)
        return {
            "model": size_of(self.model_state.current),
            "state": size_of([self.model_state.state, self.model_state.buffers.vectors]),
            "versions": used["version"] + used["base"],
            "clients": used["client"],
            "spilled": used["spilled"],
        }


class ServerCore(NamedTuple):
    """Parts of a server that its helper objects share."""

    state: AtomicReference[ServerState]
    space: Manifold
    rule: Rule
    clock: Callable[[], float]
    averaging: Averaging | None


def _make_receipt(applied: AppliedUpdate) -> Receipt:
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


def _history_row(client: Hashable, samples: int, receipt: Receipt, numbers: Mapping[str, float]) -> HistoryRow:
    """Return a row of the server's history as a dictionary of plain Python values.

    The entry `buffered` tells whether the update was added to a buffer. The entry `waiting` is the number of updates in
    this buffer.

    Example:
        >>> _history_row("ward-7", 10, Receipt(True, "", 1, step=0.5), {"rate": 0.25, "buffered": 2.0})["waiting"]
        2
    """
    # The receipt and the metrics of the rule use the name `buffered` with different meanings.
    count = numbers.get("buffered", 0)
    waiting = int(count) if math.isfinite(count) else 0
    line = {"client": client, "samples": samples, **vars(receipt), "waiting": waiting}
    for name, value in numbers.items():
        line.setdefault(name, value)
    return line
