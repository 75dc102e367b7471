"""The books: all that a server knows, as one immutable record. A change is a new record, entered by one assignment."""

import math
from collections.abc import Callable, Collection, Hashable, Mapping
from itertools import takewhile
from types import MappingProxyType
from typing import Any, NamedTuple

from immutables import Map

from manifoldagg.errors import ArgumentError, BusyError
from manifoldagg.federated.model_state import Snapshot
from manifoldagg.federated.pytrees import size_of
from manifoldagg.federated.server.durability.persistent_map import Ordered
from manifoldagg.federated.server.durability.spill import Filed
from manifoldagg.federated.server.durability.store import Kept, Key, Store
from manifoldagg.federated.server.events import Accepted, Closed, Dispatched, Dropped, Event, Expired, Refused, Watcher
from manifoldagg.federated.types import Outcome, Payload, Receipt, Update
from manifoldagg.federated.weights import Weights, check_client

__all__ = [
    "ANYONE",
    "Answer",
    "Books",
    "Change",
    "Limits",
    "Log",
    "Open",
    "Row",
    "Taken",
    "Told",
    "Watching",
    "row",
]

ANYONE = object()
"""Stands for whichever client a ticket was issued to."""
UNKNOWN = "ticket: unknown, or used already"
CLOSED = "server: was closed"
Row = dict[str, object]
"""A line of the history."""


class Limits(NamedTuple):
    """What a server keeps to.

    Attributes:
        max_staleness: of an update, in versions.
        timeout: of a ticket, in seconds.
        max_tickets: that are out at once.
        history: how many of the latest rows are kept.
        retries: how many of the latest receipts are kept.
    """

    max_staleness: int | None = None
    timeout: float | None = None
    max_tickets: int | None = None
    history: int | None = None
    retries: int | None = None


class Open(NamedTuple):
    """A ticket that is out: whose, from which version, where its base is kept, if it is, and since when in seconds.

    `apart` says whether its client starts from elsewhere than its base, as the rule wants it.
    """

    client: Hashable
    version: int
    base: Key | None
    since: float
    apart: bool = False


class Answer(NamedTuple):
    """What was said on a ticket that is no longer out, and to whom."""

    client: Hashable
    receipt: Receipt


class Taken(NamedTuple):
    """What is made of an update.

    Attributes:
        model: the new one; `None` where it did not move.
        receipt: for the client.
        row: for the history.
        came: when, in seconds of the clock; NaN where nobody asked.
        seconds: that the step took; likewise.
        payload: packed for the journal; empty where there is none.
    """

    model: Kept | None
    receipt: Receipt
    row: Row
    came: float
    seconds: float
    payload: bytes | bytearray = b""


class Told(NamedTuple):
    """A model of which the average has still to hear."""

    version: int
    model: Kept


class Change(NamedTuple):
    """A change, for the journal: what it was, all that it depends on, and the packed payload of an update."""

    kind: str
    content: dict[str, Any]
    payload: bytes | bytearray


class Log(NamedTuple):
    """What the journal has still to be told.

    Attributes:
        name: of the journal.
        changes: that are not written, by number.
        refused: how many updates were, by field, as it was told last.
    """

    name: str
    changes: Ordered[int, Change]
    refused: Map[str, int]


class Watching(NamedTuple):
    """Who is told of events, and from which one on."""

    watcher: Watcher
    since: int


class Books(NamedTuple):
    """The record. Every method returns a new one, or says why there is none; nothing is ever written.

    What it refers to stays as it is while somebody has the record: a reader needs no lock, and no hold to give back.

    Attributes:
        limits: that it keeps to.
        now: the present.
        weights: who takes part.
        store: the present model, older versions, their rounded bases, client memory.
        tickets: that are out, the oldest first.
        answered: receipts by ticket, for those who ask again.
        history: rows by number.
        refused: how many updates, by the field that was wrong.
        averaged: whether there is an average, which is to be told of new models.
        untold: models of which it has still to hear.
        closed: whether no more tickets are issued.
        watching: who is told of events, which are kept for them alone.
        events: of which they have still to hear, by number.
        log: what the journal has still to be told; `None` without one.
    """

    limits: Limits
    now: Snapshot
    weights: Weights
    store: Store
    tickets: Ordered[str, Open] = Ordered()
    answered: Ordered[str, Answer] = Ordered()
    history: Ordered[int, Row] = Ordered()
    refused: Map[str, int] = Map()
    averaged: bool = False
    untold: tuple[Told, ...] = ()
    closed: bool = False
    watching: tuple[Watching, ...] = ()
    events: Ordered[int, Event] = Ordered()
    log: Log | None = None

    @property
    def current(self) -> Key:
        """Where the model is."""
        return ("version", self.now.version)

    def check_free(self) -> None:
        """That a ticket can be issued.

        Raises:
            ArgumentError: if the server was closed.
            BusyError: if as many tickets are out as may be.
        """
        if self.closed:
            raise ArgumentError(CLOSED)
        most = self.limits.max_tickets
        if most is not None and len(self.tickets) >= most:
            raise BusyError(f"server: busy: {len(self.tickets)} tickets are out, of at most {most}")

    def dispatched(self, ticket_id: str, ticket: Open, base: Kept | Filed | None) -> "Books":
        """With a ticket out. `base` is what the ticket names, should nobody keep it any more.

        Raises:
            ArgumentError: if the server was closed.
            BusyError: if as many tickets are out as may be.
        """
        self.check_free()
        after = self._replace(
            weights=self.weights.registered(ticket.client),
            store=self.store if ticket.base is None else self.store.held(ticket.base, base),
            tickets=self.tickets.put(ticket_id, ticket),
        ).logging("dispatched", ticket=ticket_id, open=tuple(ticket))
        return after.noting(Dispatched, client=ticket.client, ticket=ticket_id, start=ticket.version)

    def find(self, ticket_id: Any, client: Any = ANYONE) -> Open | Receipt:
        """A ticket that is out, or the receipt that was given on it.

        Raises:
            ArgumentError: if it is neither, or another client's, or `client` is no name.
        """
        found = self._known(ticket_id)
        if found is None:
            raise ArgumentError(CLOSED if self.closed else UNKNOWN)
        if client is not ANYONE and check_client(client) != found.client:
            raise ArgumentError("client: expected the one that the ticket was issued to")
        return found if isinstance(found, Open) else found.receipt

    def staleness(self, ticket: Open) -> int:
        """Of an update that is taken now, in versions."""
        return self.now.version - ticket.version

    def check_staleness(self, ticket: Open) -> None:
        """That its version is not too old.

        Raises:
            ArgumentError: if it is.
        """
        most = self.limits.max_staleness
        if most is not None and self.staleness(ticket) > most:
            raise ArgumentError(f"staleness: expected at most {most}, got {self.staleness(ticket)}")

    def update_of(self, ticket: Open, payload: Payload, samples: int) -> Update:
        """A payload with what the server knows about it. Base and memory come from their files now.

        Args:
            ticket: on which it came.
            payload: admitted.
            samples: that are believed.

        Raises:
            SpillError: if a file is not what was written.
        """
        base: Any = payload.base if ticket.base is None else self.store.load(ticket.base)
        return Update(
            client=ticket.client,
            base=base.to(self.now.current),
            current=self.now.current,
            points=payload.points,
            staleness=self.staleness(ticket),
            weight=self.weights.weight(ticket.client, samples),
            samples=samples,
            tensors=payload.tensors,
            numbers=payload.numbers,
            memory=self.store.load(("client", ticket.client)),
            share=self.weights.share(ticket.client, samples),
        )

    def entered(self, ticket_id: str, update: Update, after: Snapshot, outcome: Outcome, taken: Taken) -> "Books":
        """With an update taken.

        Args:
            ticket_id: of the update.
            update: that was taken.
            after: what it has made of the present.
            outcome: of the step.
            taken: what else is made of it.

        Raises:
            ArgumentError: if its ticket is not out any more.
        """
        ticket = self._out(ticket_id)
        store = self.store
        untold = self.untold
        if taken.model is not None:
            store = store.held(("version", after.version), taken.model).released(self.current)
            if self.averaged:
                untold = (*untold, Told(after.version, taken.model))
        if outcome.memory is not update.memory:
            key = ("client", update.client)
            if key in store:
                store = store.released(key)
            if outcome.memory is not None:
                store = store.held(key, Kept(outcome.memory))
        books = self._replace(
            now=after,
            weights=self.weights.recorded(update.client, update.samples),
            store=store.released(ticket.base),
            tickets=self.tickets.without(ticket_id),
            answered=self.answered.put(ticket_id, Answer(ticket.client, taken.receipt)).latest(self.limits.retries),
            history=self.history.put(self.history.count, taken.row).latest(self.limits.history),
            untold=untold,
        ).logging(
            "accepted",
            taken.payload,
            ticket=ticket_id,
            samples=update.samples,
            weight=update.weight,
            share=update.share,
            receipt=dict(vars(taken.receipt)),
            time=taken.came,
        )
        if not self.watching:
            return books
        return books.noting(
            Accepted,
            client=ticket.client,
            ticket=ticket_id,
            receipt=taken.receipt,
            row=MappingProxyType(taken.row),
            latency=taken.came - ticket.since,
            seconds=taken.seconds,
            memory=MappingProxyType(books.usage()),
        )

    def noting(self, kind: Callable[..., Event], **fields: Any) -> "Books":
        """With an event of which those who watch, if anybody does, have still to hear."""
        if not self.watching:
            return self
        event = kind(version=self.now.version, out=len(self.tickets), **fields)
        return self._replace(events=self.events.put(self.events.count, event))

    def logging(self, kind: str, payload: bytes | bytearray = b"", **content: Any) -> "Books":
        """With a change of which the journal, if there is one, has still to be told."""
        log = self.log
        if log is None:
            return self
        if log.refused is not self.refused:
            content["refused"] = dict(self.refused)
        changes = log.changes.put(log.changes.count, Change(kind, content, payload))
        return self._replace(log=Log(log.name, changes, self.refused))

    def logged(self, number: int) -> "Books":
        """Without the changes before a number, which are written."""
        if self.log is None:
            return self
        changes = self.log.changes
        while changes and changes.oldest < number:
            changes = changes.without(changes.oldest)
        return self._replace(log=self.log._replace(changes=changes))

    def ended(self, ticket_id: str, receipt: Receipt | None = None) -> "Books":
        """Without a ticket that is out, its receipt to be had again; without any where it was dropped."""
        ticket = self.tickets[ticket_id]
        answered = self.answered
        if receipt is not None:
            answered = answered.put(ticket_id, Answer(ticket.client, receipt)).latest(self.limits.retries)
        tickets = self.tickets.without(ticket_id)
        return self._replace(store=self.store.released(ticket.base), tickets=tickets, answered=answered)

    def dropped(self, ticket_id: Any) -> "Books":
        """Without a ticket that nobody will answer on.

        Raises:
            ArgumentError: if it is not out.
        """
        client = self._out(ticket_id).client
        return (
            self.ended(ticket_id).logging("dropped", ticket=ticket_id).noting(Dropped, client=client, ticket=ticket_id)
        )

    def refusing(self, ticket_id: Any, reason: str, came: float, *, for_good: bool = False) -> tuple["Books", Receipt]:
        """With a refusal counted, by the field that its reason names first; and its receipt.

        Args:
            ticket_id: of the update, whatever it is.
            reason: for the receipt.
            came: when it came, in seconds of the clock; NaN where nobody asked.
            for_good: whether the ticket, which is out, ends.
        """
        field = reason.partition(":")[0].partition("[")[0]
        receipt = Receipt(False, reason, self.now.version)
        books = self._replace(refused=self.refused.set(field, self.refused.get(field, 0) + 1))
        if for_good:
            books = books.ended(ticket_id, receipt).logging("ended", tickets=[ticket_id], reason=reason, time=came)
        if not self.watching:
            return books, receipt
        found = self._known(ticket_id)
        books = books.noting(
            Refused,
            client=None if found is None else found.client,
            ticket=None if found is None else ticket_id,
            field=field,
            reason=reason,
            latency=came - found.since if isinstance(found, Open) else math.nan,
            ended=for_good,
        )
        return books, receipt

    def refusing_for_good(self, ticket_id: str, reason: str, came: float) -> tuple["Books", Receipt]:
        """Without a ticket on which no update can be taken any more; and its receipt, the older one if there is one."""
        if ticket_id in self.tickets:
            return self.refusing(ticket_id, reason, came, for_good=True)
        answer = self.answered.get(ticket_id)
        return self, Receipt(False, reason, self.now.version) if answer is None else answer.receipt

    def expired(self, now: float, but: Collection[str] = ()) -> tuple["Books", list[str]]:
        """Without the tickets that are older than they may be at `now`, but those that are answered; and their ids."""
        timeout = self.limits.timeout
        # To put tickets in order would cost every update, where long ones are between many that were short.
        if timeout is None or not self.tickets or now - self.tickets[self.tickets.oldest].since <= timeout:
            return self, []
        due = takewhile(lambda name: now - self.tickets[name].since > timeout, self.tickets)
        ended = [name for name in due if name not in but]
        receipt = Receipt(False, f"ticket: expired: nobody answered within {timeout:g} s", self.now.version)
        books = self
        for ticket_id in ended:
            client, _, _, since, _ = self.tickets[ticket_id]
            books = books.ended(ticket_id, receipt)
            books = books.noting(Expired, client=client, ticket=ticket_id, latency=now - since)
        if ended:
            books = books.logging("ended", tickets=ended, reason=receipt.reason, time=now)
        return books, ended

    def _known(self, ticket_id: Any) -> Open | Answer | None:
        """What there is of a ticket."""
        if type(ticket_id) is not str:  # one of another class may do what it likes when it is looked up
            return None
        return self.tickets.get(ticket_id) or self.answered.get(ticket_id)

    def _out(self, ticket_id: Any) -> Open:
        """A ticket that is out.

        Raises:
            ArgumentError: if it is not.
        """
        found = self.find(ticket_id)
        if isinstance(found, Receipt):
            raise ArgumentError(UNKNOWN)
        return found

    def close(self) -> "Books":
        """Without anything but the model and what is written of its past."""
        current = self.store.places[self.current][0]
        books = self._replace(
            store=Store().held(self.current, current), tickets=Ordered(), untold=(), closed=True, log=None
        )
        return books if self.closed else books.noting(Closed)

    def usage(self) -> dict[str, int]:
        """Bytes: the model, its state, older versions that tickets hold, client memory, and what is in files."""
        used = self.store.usage(without=self.current)
        return {
            "model": size_of(self.now.current),
            "state": size_of([self.now.state, self.now.buffers.vectors]),
            "versions": used["version"] + used["base"],
            "clients": used["client"],
            "spilled": used["spilled"],
        }


def row(client: Hashable, samples: int, receipt: Receipt, numbers: Mapping[str, float]) -> Row:
    """A line of the history: plain Python values under plain names. What a rule calls `buffered` is called `waiting`.

    Example:
        >>> row("ward-7", 10, Receipt(True, "", 1, step=0.5), {"rate": 0.25, "buffered": 2.0})["waiting"]
        2
    """
    count = numbers.get("buffered", 0)
    waiting = int(count) if math.isfinite(count) else 0
    line = {"client": client, "samples": samples, **vars(receipt), "waiting": waiting}
    for name, value in numbers.items():
        line.setdefault(name, value)
    return line
