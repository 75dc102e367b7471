"""The state of a server: one immutable record, which every change replaces in one assignment."""

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from itertools import takewhile
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from immutables import Map

from manifoldagg._validation import other_type_hint, short_repr
from manifoldagg.errors import ArgumentError, BusyError
from manifoldagg.federated.limits import Norms
from manifoldagg.federated.model_state import ModelState
from manifoldagg.federated.pytrees import size_of
from manifoldagg.federated.server.durability.persistent_map import AtomicReference, PersistentOrderedMap
from manifoldagg.federated.server.durability.store import InMemoryTree, Store, StoredTree, StoreKey
from manifoldagg.federated.server.events import Accepted, Closed, Dispatched, Dropped, Event, Expired, Rejected
from manifoldagg.federated.server.options import ServerLimits
from manifoldagg.federated.server.records import (
    AppliedUpdate,
    ClosedTicket,
    HistoryRow,
    LogRecord,
    PendingLog,
    PendingNotification,
    PendingTicket,
    Subscription,
    history_row,
    make_receipt,
)
from manifoldagg.federated.types import Averaging, Payload, Receipt, Rule, Update
from manifoldagg.federated.weights import Weights, check_client
from manifoldagg.manifolds import Manifold

__all__ = ["ANY_CLIENT", "ServerCore", "ServerState", "StaleTicketError"]

ANY_CLIENT = object()
"""The default of `client=`, which stands for the client of the ticket."""
PAYLOAD_HEAD_BYTES = 64
"""The number of bytes at the start of a payload that contain its checksum."""
UNKNOWN_TICKET = "ticket: unknown, or used already"
SERVER_CLOSED = "server: was closed"


class StaleTicketError(ArgumentError):
    """Error for a ticket whose version is too old. The server rejects every update for this ticket."""


class ServerState(NamedTuple):
    """The state of a server. All its parts are immutable, so that a reader needs no lock.

    Every change returns a new state, or raises an error and changes nothing.

    Attributes:
        limits: the limits of the server.
        model_state: the current model state.
        weights: the participating clients and their weights.
        store: the current model, older versions, rounded bases and client states.
        tickets: the tickets in flight, the oldest first.
        closed_tickets: the receipts of closed tickets, for repeated requests.
        history: the history rows, by the number of the update.
        rejected: the number of rejected updates, by the invalid field.
        has_averaging: whether an average receives each new model.
        pending_notifications: the models that the average has not received.
        is_closed: whether the server was closed.
        subscriptions: the subscribers of events. Without subscribers, events are not stored.
        pending_events: the events that subscribers have not received, by number.
        pending_log: the records that are not yet in the journal; `None` without a journal.
        last_issued_at: the dispatch time of the latest ticket. The tickets in flight have no later time.
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
        """Raise `ArgumentError` if the server was closed, or `BusyError` if `max_in_flight` tickets are in flight."""
        if self.is_closed:
            raise ArgumentError(SERVER_CLOSED)
        most = self.limits.max_in_flight
        if most is not None and len(self.tickets) >= most:
            raise BusyError(f"server: busy: {len(self.tickets)} tickets in flight, max_in_flight={most}")

    def with_ticket(self, ticket_id: str, ticket: PendingTicket, base: StoredTree | None) -> "ServerState":
        """Return the state with a new ticket. `base` is the tree to store if the store does not contain the base key.

        Raises the same errors as `check_capacity`.
        """
        self.check_capacity()
        tickets, now = self.tickets, ticket.issued_at
        if now < self.last_issued_at:  # The clock went back. The tickets must remain in the order of their times.
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
        """Return a ticket in flight whose update can be applied, or the receipt of a closed ticket.

        Raises:
            StaleTicketError: if the version of the ticket is too old.
            ArgumentError: if the ticket is unknown or belongs to another client, or `client` is not a name.
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
        if found.base_key is not None and found.base_key not in self.store:  # released under an earlier max_staleness
            raise StaleTicketError(f"staleness: version {found.version} is no longer retained")
        return found

    def _is_stale(self, version: int) -> bool:
        """Return whether the staleness of a version exceeds `max_staleness`."""
        most = self.limits.update.max_staleness
        return most is not None and self.model_state.version - version > most

    def without_stale_versions(self, keys: Iterable[StoreKey]) -> "ServerState":
        """Return the state without the trees of stale versions among `keys`."""
        held = self.store.entries
        stale = [key for key in keys if key in held and key[0] != "client" and self._is_stale(cast(int, key[1]))]
        released = [key for key in stale for _ in range(held[key][1])]
        return self._replace(store=self.store.replaced(released, {})) if released else self

    def pending(self, ticket_id: Any) -> PendingTicket:
        """Return a ticket in flight; raise `ArgumentError` if the ticket is not in flight."""
        found = self._lookup(ticket_id)
        if not isinstance(found, PendingTicket):
            raise ArgumentError(SERVER_CLOSED if found is None and self.is_closed else UNKNOWN_TICKET)
        return found

    def make_update(self, ticket: PendingTicket, payload: Payload, recorded: Mapping[str, Any] | None = None) -> Update:
        """Return the update of a validated payload, with the base and the client state.

        In a journal replay, `recorded` contains the sample count and the weights of the original run.

        Raises:
            SpillError: if the file of the base or of the client state was altered.
        """
        client, current = ticket.client, self.model_state.current
        if recorded is None:
            samples = self.weights.capped(client, payload.samples)
            weight, share = self.weights.weight(client, samples), self.weights.share(client, samples)
        else:
            samples, weight, share = recorded["samples"], recorded["weight"], recorded["share"]
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
        """Return the state with an applied update, and its receipt; raise `ArgumentError` if the ticket was closed."""
        ticket_id = applied.ticket_id
        client = applied.ticket.client
        # `drop` and `close` do not wait for a running update.
        if ticket_id not in self.tickets.entries:
            self.pending(ticket_id)  # This raises an error.
        receipt = make_receipt(applied)
        row = history_row(client, applied.reported_samples, receipt, applied.outcome.numbers)
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
        """Return the state with the journal record and the event of an accepted update."""
        ticket, update = applied.ticket, applied.update
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
        """Return the store with the new model and the new client state, without the base of the update."""
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
        """Return the state with a pending event, if there are subscribers."""
        if not self.subscriptions:
            return self
        event = kind(version=self.model_state.version, in_flight=len(self.tickets), **fields)
        return self._replace(pending_events=self.pending_events.set(self.pending_events.next_index, event))

    def with_log_record(self, kind: str, payload: bytes | memoryview = b"", **content: Any) -> "ServerState":
        """Return the state with a pending journal record, if there is a journal."""
        log = self.pending_log
        if log is None:
            return self
        if log.rejected is not self.rejected:
            content["rejected"] = dict(self.rejected)
        # A payload begins with its own checksum.
        summary = repr((log.chain, kind, content)).encode() + payload[:PAYLOAD_HEAD_BYTES]
        chain = hashlib.blake2b(summary, digest_size=8).hexdigest()
        record = LogRecord(kind, {**content, "chain": (log.chain, chain)}, payload)
        changes = log.records.set(log.records.next_index, record)
        return self._replace(pending_log=PendingLog(log.name, chain, changes, self.rejected))

    def log_truncated(self, lsn: int) -> "ServerState":
        """Return the state without the pending records before `lsn`, because these records were written."""
        if self.pending_log is None:
            return self
        changes = self.pending_log.records
        while changes and changes.first_key < lsn:
            changes = changes.remove(changes.first_key)
        return self._replace(pending_log=self.pending_log._replace(records=changes))

    def without_ticket(self, ticket_id: str, receipt: Receipt | None = None) -> "ServerState":
        """Return the state without a ticket in flight. A dropped ticket has no receipt; other receipts are stored."""
        ticket = self.tickets[ticket_id]
        closed = self.closed_tickets
        if receipt is not None:
            closed = closed.set(ticket_id, ClosedTicket(ticket.client, receipt), self.limits.receipt_cache_size)
        key = ticket.base_key
        # The base of a stale ticket was released before.
        store = self.store if key is None or key not in self.store else self.store.release(key)
        weights = self.weights.without_ticket(ticket.client)
        return self._replace(
            store=store, tickets=self.tickets.remove(ticket_id), closed_tickets=closed, weights=weights
        )

    def with_dropped_ticket(self, ticket_id: Any) -> "ServerState":
        """Return the state without a dropped ticket; raise `ArgumentError` if the ticket is not in flight."""
        client = self.pending(ticket_id).client
        return (
            self.without_ticket(ticket_id)
            .with_log_record("dropped", ticket=ticket_id)
            .with_event(Dropped, client=client, ticket=ticket_id)
        )

    def with_rejection(
        self, ticket_id: Any, reason: str, received_at: float, *, is_final: bool = False, norms: Norms | None = None
    ) -> tuple["ServerState", Receipt]:
        """Return the state after a rejection, which is counted by the first field of its reason, and the receipt.

        A final rejection closes the ticket. If the ticket is already closed, the state is unchanged, and the existing
        receipt is returned. `norms` are the next norms of the clients, if the rejection changes them.
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
        """Return the state without the tickets that have expired at time `now`, and the ids of these tickets.

        Tickets in `exclude` do not expire.
        """
        timeout = self.limits.timeout
        # Most calls find no expired ticket. The check of the oldest ticket takes constant time.
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
        if type(ticket_id) is not str:  # The hash of another class may run any code.
            return None
        found = self.tickets.entries.get(ticket_id) or self.closed_tickets.entries.get(ticket_id)
        return None if found is None else found[1]

    def close(self) -> "ServerState":
        """Return the state of a closed server: the current model, the receipts and the history."""
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
        """Return the bytes of the model, the rule's state, older versions, client states and spill files."""
        used = self.store.memory_usage(exclude=self.current_key)
        return {
            "model": size_of(self.model_state.current),
            "state": size_of([self.model_state.state, self.model_state.buffers.vectors]),
            "versions": used["version"] + used["base"],
            "clients": used["client"],
            "spilled": used["spilled"],
        }


class ServerCore(NamedTuple):
    """The parts of a server that its collaborators share."""

    state: AtomicReference[ServerState]
    space: Manifold
    rule: Rule
    clock: Callable[[], float]
    averaging: Averaging | None
