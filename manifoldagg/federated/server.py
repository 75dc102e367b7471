"""The server: one owner of the model, its versions and its clients, for every rule."""

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from manifoldagg.errors import ArgumentError, ManifoldAggError
from manifoldagg.federated.buffers import Patterns, of_model
from manifoldagg.federated.contract import (
    Averaging,
    Payload,
    Receipt,
    Rule,
    Ticket,
    by_rows,
    check_averaging,
    check_rule,
    extras,
)
from manifoldagg.federated.dispatch import check_base_dtype, message, rounded
from manifoldagg.federated.intake import UNLIMITED, Checks, Form, admit, blame, check_start
from manifoldagg.federated.ledger import Ledger, Row
from manifoldagg.federated.snapshot import Snapshot
from manifoldagg.federated.step import Terms, step
from manifoldagg.federated.store import Store
from manifoldagg.federated.trees import copied
from manifoldagg.federated.weights import Weights
from manifoldagg.manifolds import Manifold, ParameterSpace
from manifoldagg.manifolds.layout import Entry

__all__ = ["Server"]

P = ParamSpec("P")
T = TypeVar("T")


def without_derivatives(call: Callable[P, T]) -> Callable[P, T]:
    """`call` under `no_grad` and outside of inference mode; their two decorators would cost as much as the books."""

    @wraps(call)
    def plain(*args: P.args, **named: P.kwargs) -> T:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return plain(*args, **named)
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        try:
            return call(*args, **named)
        finally:
            torch.set_grad_enabled(before)

    return plain


class Server:
    r"""Drives a rule: hands out models, takes updates, refuses what does not fit.

    A refused update leaves everything as it was, its ticket too: the client may try again, or you `drop` it.
    Models that go out are copies and payloads are only read: nobody else holds the server's memory. Every method
    may be called from any thread, and takes effect in one moment between its call and its return. Updates are
    taken one at a time; while the arithmetic of one runs, `dispatch`, `drop` and `model` do not wait for it. Clients
    that join meanwhile count in its weight: it is done again, once; those that join during that count from the next
    update on. Rules and `averaging` may read the model, and must not call what waits for the update that calls them.

    Args:
        space: where the models live.
        rule: how the model moves.
        start: $\Theta^0$ (P,).
        weights: a client's share of the data $w_i$: a mapping client to samples, for
            $w_i = |D_i| / \sum_j |D_j|$; `"uniform"`, 1 / N; or `"observed"`, $|D_i| / (N \cdot$ mean of the
            $|D|$ seen$)$, with N the clients that were ever dispatched to. Means over a cohort weigh by the samples.
        max_staleness: refuse what is staler than so many versions.
        checks: limits on norms, sample counts and control points.
        averaging: what listens to every new version, in order; it may keep the models and must not write them.
        carried: the model's buffers at the start, as from `space.carried`; clients then send theirs, but those that are
            left. Without it the server keeps none and takes none.
        buffers: what becomes of them, by name or glob pattern: `"average"` (with the rule's step; the default),
            `"latest"` or `"leave"`. What is no floating tensor is never averaged: the latest is taken.
        base_dtype: keep what clients start from in this narrower dtype. They start from the rounded model, and the
            drift is measured from it: it is never quite zero. Flat spaces only; what overflows is kept as it is.
        memory_limit: bytes in memory for older versions and client memory. The oldest go to files, mapped when they are
            needed and removed with their last holder, in the folder `spill` (`None`: the system's temporary one). The
            memory that they leave goes back to the system, where its allocator would keep it.
        history: how many of the latest rows `history` keeps; `None` for all.
        on_update: called with the row of each accepted update, once it is entered: one at a time, in order, in the
            thread that calls `receive`. It may ask the server for anything that does not wait for the update. What it
            raises comes out of `receive`, and undoes nothing.

    Raises:
        ArgumentError: naming the argument that does not fit.

    Example:
        >>> import torch
        >>> from manifoldagg.federated import Payload
        >>> from manifoldagg.federated.rules import FedAsync
        >>> from manifoldagg.manifolds import Flat
        >>> server = Server(Flat(2), FedAsync(rate=0.5), torch.zeros(2))
        >>> ticket = server.dispatch("ward-7")
        >>> receipt = server.receive(ticket.id, Payload(torch.tensor([[2.0, 4.0]]), samples=10))
        >>> receipt.accepted, receipt.version, server.model
        (True, 1, tensor([1., 2.]))
        >>> server.receive(ticket.id, Payload(torch.tensor([[2.0, 4.0]]), samples=10)).reason
        'ticket: unknown, or used already'
    """

    @without_derivatives
    def __init__(
        self,
        space: Manifold,
        rule: Rule,
        start: Float[Tensor, " P"],
        *,
        weights: str | Mapping[Any, int] = "observed",
        max_staleness: int | None = None,
        checks: Checks | None = None,
        averaging: Averaging | None = None,
        carried: Mapping[str, Tensor] | None = None,
        buffers: Patterns = (),
        base_dtype: torch.dtype | None = None,
        memory_limit: int | None = None,
        spill: str | Path | None = None,
        history: int | None = 10_000,
        on_update: Callable[[Row], object] | None = None,
    ) -> None:
        first = check_start(space, start)
        tensors, numbers = extras(check_rule(rule))
        checks = UNLIMITED if checks is None else checks
        if not isinstance(checks, Checks):
            raise ArgumentError(f"checks: expected Checks, got {checks!r}")
        if on_update is not None and not callable(on_update):
            raise ArgumentError(f"on_update: expected a function of a row, got {on_update!r}")
        kept, policies = of_model(space, carried, buffers)
        sent = tuple(Entry(name, tuple(x.shape), x.dtype) for name, x in kept.items() if policies[name] != "leave")
        self.space = space
        self.rule = rule
        self._averaging = check_averaging(averaging)
        self._on_update = on_update
        self._base_dtype = check_base_dtype(space, base_dtype, first.dtype)
        rows = by_rows(rule, space)
        measured = frozenset(getattr(rule, "measured", ())) if space.flat else frozenset()
        self._form = Form(space, first.dtype, first.device, tensors, numbers, sent, checks, rows, measured)
        self._terms = Terms(space, rule, policies, checks)
        self._turn = threading.Lock()
        self._taking: int | None = None
        self._ledger = Ledger(
            Snapshot(first, rule.init(space, first.clone()), kept),
            Weights(weights),
            Store(memory_limit, spill),
            max_staleness=max_staleness,
            recycle=averaging is None,
            history=history,
        )

    @without_derivatives
    def dispatch(self, client: Hashable, *, keep: bool = True) -> Ticket:
        """Send a client to work on the current model.

        Args:
            client: any hashable name.
            keep: keep the version that it starts from. Otherwise its payload must bring the base.

        Raises:
            ArgumentError: if `client` is unhashable, or missing from the weights that were given up front.

        Cost: one copy of the model, which is read once and written once: a client's model is its own.
        """
        books = self._ledger
        books.weights.check(client)
        with books.lock:
            ticket_id, now, memory, narrow = books.depart(client)
        try:
            base = narrow() if keep else None
            if keep and base is None:
                base = rounded(now.current, self._base_dtype)
            sent = message(self.space, self.rule, now, memory(), base)
            if base is not None or not keep:
                with books.lock:
                    books.rebase(ticket_id, base)
        except BaseException:
            with books.lock:
                books.stay(client, ticket_id)
            raise
        return Ticket(ticket_id, now.version, sent)

    @without_derivatives
    def receive(self, ticket_id: str, payload: Payload) -> Receipt:
        """Take what a client returns on a ticket. The payload must not be written before this returns.

        Returns:
            A receipt. With `accepted=False` its `reason` names the field and nothing has changed. What the rule's own
            code raises comes out and changes nothing either; what `averaging` and `on_update` raise comes after the
            update.

        Raises:
            ArgumentError: if it is called from within an update.

        Cost: what the rule says of its step. With a rule that takes rows nothing else reads or writes a model: its
        Gram matrix tells whether what came is finite, and what is refused costs no more than what is taken.
        """
        books = self._ledger
        try:
            with books.lock:
                ticket = books.expect(ticket_id)
            brought = admit(self._form, payload, based=ticket.base is None)
        except ManifoldAggError as error:
            with books.lock:
                return books.refuse(error)
        with self._in_turn():
            try:
                receipt, row = self._take(ticket_id, brought)
            except ManifoldAggError as error:
                with books.lock:
                    return books.refuse(error)
            try:
                if self._averaging is not None and not receipt.buffered:
                    self._averaging.update(receipt.version, books.now.current)
            finally:
                books.spill()
                if self._on_update is not None:
                    self._on_update(dict(row))
        return receipt

    def drop(self, ticket_id: str) -> None:
        """Give a ticket back: nobody will answer on it.

        Raises:
            ArgumentError: if the ticket is unknown or was used.
        """
        with self._ledger.lock:
            self._ledger.find(ticket_id)
            self._ledger.discard(ticket_id)

    @property
    def model(self) -> Float[Tensor, " P"]:
        """A copy of the current model (P,)."""
        with self._current() as now:
            return copied(now.current)

    def state_dict(self) -> dict[str, Tensor]:
        """The current model as a state dict, in the model's own dtypes, with the buffers that the server keeps.

        Raises:
            ArgumentError: if the space is no `ParameterSpace`.
        """
        if not isinstance(self.space, ParameterSpace):
            raise ArgumentError(f"space: expected a ParameterSpace, got {type(self.space).__name__}")
        with self._current() as now:
            return self.space.state_dict(now.current, now.buffers or None)

    def averaged(self) -> Float[Tensor, " P"]:
        """A copy of the average (P,); of the current model where nothing was averaged. Waits for a running update.

        Raises:
            ArgumentError: if it is called from within an update.
        """
        with self._in_turn():
            average = None if self._averaging is None else self._averaging.average
            return self.model if average is None else copied(average)

    @property
    def version(self) -> int:
        """How often the model has moved."""
        return self._ledger.now.version

    @property
    def history(self) -> list[Row]:
        """A flat row, fit for a data frame, for each of the latest accepted updates, at most `history=` of them.

        A row has the client, its samples, the receipt and the rule's numbers. Nobody waits for the reader.
        """
        # A deque is copied in one piece, without the lock.
        return [dict(row) for row in self._ledger.history.copy()]

    @property
    def refused(self) -> dict[str, int]:
        """How many updates were refused, by the field that was wrong."""
        with self._ledger.lock:
            return dict(self._ledger.refused)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of the `model`, the `state`, older `versions` and `clients` in memory; of both in files: `spilled`."""
        with self._ledger.lock:
            return self._ledger.usage()

    def close(self) -> None:
        """Drop every ticket, forget what was kept for clients and remove all files. The model stays readable."""
        with self._in_turn(), self._ledger.lock:
            self._ledger.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Server has locks and tickets that are out: it is not copied or pickled; keep its `model`")

    def _take(self, ticket_id: str, payload: Payload) -> tuple[Receipt, Row]:
        """One update, in its turn."""
        books = self._ledger
        entered = None
        again = True
        while entered is None:
            with books.lock:
                arrival = books.arrive(ticket_id, payload.samples)
            blank = arrival.spare
            try:
                blank = torch.empty_like(arrival.snapshot.current) if blank is None else blank
                update = arrival.update(payload)
                try:
                    after, outcome = step(self._terms, arrival.snapshot, update, payload.buffers, blank)
                except Exception:
                    blame(self._form, payload)
                    raise
                with books.lock:
                    entered = books.enter(ticket_id, update, after, outcome, again=again)
            finally:
                with books.lock:
                    books.leave(arrival, blank)
            # Clients that join without end must not keep it from ever being taken.
            again = False
        return entered

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Alone among updates; an error where the thread would wait for itself."""
        if self._taking == threading.get_ident():
            raise ArgumentError("server: an update cannot wait for itself; call this after `receive` has returned")
        with self._turn:
            self._taking = threading.get_ident()
            try:
                yield
            finally:
                self._taking = None

    @contextmanager
    def _current(self) -> Iterator[Snapshot]:
        """The present, whose model is not recycled meanwhile."""
        with self._ledger.lock:
            now = self._ledger.look()
        try:
            yield now
        finally:
            with self._ledger.lock:
                self._ledger.release(("version", now.version))
