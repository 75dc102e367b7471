"""The ledger: everything of a server that changes, read and entered in one go under one lock."""

import math
import secrets
import threading
from collections import Counter, deque
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from manifoldagg.errors import ArgumentError, ManifoldAggError, check_count
from manifoldagg.federated.contract import Outcome, Receipt, Update
from manifoldagg.federated.snapshot import Arrival, Open, Snapshot
from manifoldagg.federated.store import Found, Key, Store
from manifoldagg.federated.trees import size_of
from manifoldagg.federated.weights import Weights

__all__ = ["Ledger", "Row", "row"]

Row = dict[str, object]
"""A line of the history."""


class Ledger:
    """The books of a server. Whoever calls a method holds `lock`; no method does more than a few look-ups.

    Args:
        first: the first snapshot; the ledger owns its model.
        weights: who takes part.
        store: for versions and client memory.
        max_staleness: of an update.
        recycle: whether the memory of a model that was freed may become that of a later one.
        history: how many of the latest rows to keep; `None` for all.
    """

    def __init__(
        self,
        first: Snapshot,
        weights: Weights,
        store: Store,
        *,
        max_staleness: int | None,
        recycle: bool,
        history: int | None,
    ) -> None:
        if max_staleness is not None:
            check_count("max_staleness", max_staleness, at_least=0)
        if history is not None:
            check_count("history", history, at_least=0)
        self.lock = threading.Lock()
        self.now = first
        self.weights = weights
        self.store = store
        self.history: deque[Row] = deque(maxlen=history)
        self.refused: Counter[str] = Counter()
        self.tickets: dict[str, Open] = {}
        self.spare: Tensor | None = None
        self.closed = False
        self._max_staleness = max_staleness
        self._recycle = recycle
        self._token = secrets.token_hex(8)
        self._issued = 0
        store.add(self.current, first.current)

    @property
    def current(self) -> Key:
        """Where the model is."""
        return ("version", self.now.version)

    def look(self) -> Snapshot:
        """The present, its version held."""
        self.store.hold(self.current)
        return self.now

    def depart(self, client: Hashable) -> tuple[str, Snapshot, Found, Found]:
        """Register `client` and give it a ticket on the present, with what is kept for it and the rounded base.

        Raises:
            ArgumentError: if the server was closed.
        """
        if self.closed:
            raise ArgumentError("server: was closed")
        memory = self.store.found(("client", client))
        rounded = self.store.found(("base", self.now.version))
        self.weights.register(client)
        ticket_id = f"{self._token}-{self._issued}"
        self._issued += 1
        self.tickets[ticket_id] = Open(client, self.now.version, self.current)
        return ticket_id, self.look(), memory, rounded

    def rebase(self, ticket_id: str, base: Tensor | None) -> None:
        """Keep `base` for a ticket in place of its version; `None` where its client brings it."""
        ticket = self.tickets.get(ticket_id)
        if ticket is None:  # the server was closed meanwhile
            return
        key = None if base is None else ("base", ticket.version)
        if key in self.store:
            self.store.hold(key)
        elif key is not None:
            self.store.add(key, base)
        self.tickets[ticket_id] = replace(ticket, base=key)
        self.release(ticket.base)

    def stay(self, client: Hashable, ticket_id: str) -> None:
        """Undo `depart`."""
        self.weights.forget(client)
        if ticket_id in self.tickets:
            self.discard(ticket_id)

    def find(self, ticket_id: Any) -> Open:
        """A ticket that is out.

        Raises:
            ArgumentError: if it is unknown, or was used.
        """
        if not isinstance(ticket_id, str) or ticket_id not in self.tickets:
            raise ArgumentError("ticket: unknown, or used already")
        return self.tickets[ticket_id]

    def expect(self, ticket_id: Any) -> Open:
        """The ticket of an update that may be taken.

        Raises:
            ArgumentError: if it is unknown or used, or its version too old.
        """
        ticket = self.find(ticket_id)
        staleness = self.now.version - ticket.version
        if self._max_staleness is not None and staleness > self._max_staleness:
            raise ArgumentError(f"staleness: expected at most {self._max_staleness}, got {staleness}")
        return ticket

    def arrive(self, ticket_id: str, samples: int) -> Arrival:
        """What an update meets, its base held until `leave`."""
        ticket = self.expect(ticket_id)
        arrival = Arrival(
            snapshot=self.now,
            ticket=ticket,
            weight=self.weights.of(ticket.client, samples),
            share=self.weights.share(ticket.client, samples),
            base=self.store.found(ticket.base),
            memory=self.store.found(("client", ticket.client)),
            spare=self.spare,
        )
        self.store.hold(ticket.base)
        self.spare = None
        return arrival

    def leave(self, arrival: Arrival, blank: Tensor | None) -> None:
        """Give back what `arrive` held, and the memory for a model unless it was entered."""
        if blank is not None and blank is not self.now.current:
            self.spare = blank
        self.release(arrival.ticket.base)

    def enter(
        self, ticket_id: str, update: Update, after: Snapshot, outcome: Outcome, *, again: bool
    ) -> tuple[Receipt, Row] | None:
        """Enter a step; `None`, and nothing is changed, where clients that joined meanwhile have changed its weight.

        Args:
            ticket_id: of the update.
            update: that was taken.
            after: what it has made of the present.
            outcome: of the step.
            again: whether it may be done again. Otherwise its weight stays as it arrived.

        Raises:
            ArgumentError: if the ticket was dropped meanwhile.
        """
        self.find(ticket_id)
        # Whatever can fail comes before the first change.
        moved = outcome.model is not None
        receipt = Receipt(
            accepted=True,
            reason="",
            version=after.version,
            staleness=update.staleness,
            weight=update.weight,
            cosine=outcome.numbers.get("cosine", math.nan),
            step=outcome.numbers.get("step", math.nan),
            norm=outcome.numbers.get("norm", math.nan),
            buffered=not moved,
        )
        line = row(update.client, update.samples, receipt, outcome.numbers)
        before = self.current
        if again and self.weights.of(update.client, update.samples) != update.weight:
            return None
        self.weights.record(update.client, update.samples)
        if moved:
            self.store.add(("version", after.version), after.current)
        self.now = after
        self.history.append(line)
        if outcome.memory is not update.memory:
            key = ("client", update.client)
            if key in self.store:
                self.store.release(key)
            if outcome.memory is not None:
                self.store.add(key, outcome.memory)
        self.release(before if moved else None, self.tickets.pop(ticket_id).base)
        return receipt, line

    def refuse(self, error: ManifoldAggError) -> Receipt:
        """Count a refusal by the field that its reason names first."""
        reason = str(error)
        self.refused[reason.partition(":")[0].partition("[")[0]] += 1
        return Receipt(False, reason, self.now.version)

    def discard(self, ticket_id: str) -> None:
        """A ticket is used up, or given back."""
        self.release(self.tickets.pop(ticket_id).base)

    def release(self, *keys: Key | None) -> None:
        """Take a holder of each away; the memory of a model that nobody holds any more is spare."""
        for key in keys if not self.closed else ():
            freed = self.store.release(key)
            if self._recycle and key is not None and key[0] == "version" and freed is not None:
                self.spare = freed

    def spill(self) -> None:
        """Bring what is held for clients within the limit. The one method that takes `lock` itself."""
        if self.store.limit is not None:
            self.store.spill(self.lock, without=self.current)

    def close(self) -> None:
        """Let go of everything but the model and what is written of its past."""
        self.closed = True
        self.tickets.clear()
        self.store.close()
        self.store.add(self.current, self.now.current)

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
