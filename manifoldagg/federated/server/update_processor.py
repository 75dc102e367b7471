"""The class that validates the updates of clients, applies them to the model, and publishes the results."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from manifoldagg._validation import rename_argument
from manifoldagg.errors import ArgumentError, ManifoldAggError, RuleError, SpillError
from manifoldagg.federated.server.durability.checkpoint import ServerSnapshot
from manifoldagg.federated.server.durability.eviction import Evictor
from manifoldagg.federated.server.durability.log_format import pack_payload
from manifoldagg.federated.server.durability.manager import DurabilityManager
from manifoldagg.federated.server.durability.store import InMemoryTree
from manifoldagg.federated.server.durability.subscriptions import EventDispatcher
from manifoldagg.federated.server.lock import PendingUpdate, UpdateLock
from manifoldagg.federated.server.state import ANY_CLIENT, AppliedUpdate, PendingTicket, ServerCore, StaleTicketError
from manifoldagg.federated.server.validation import PayloadSchema, raise_nonfinite, validate_payload
from manifoldagg.federated.stability import warn_if_unstable
from manifoldagg.federated.step import StepPlan, step
from manifoldagg.federated.types import Payload, Receipt
from manifoldagg.kernels.alloc import empty_like

__all__ = ["UpdateProcessor"]

Load = Callable[[PendingTicket], Any]
"""A function from a ticket to the payload that the client returned for this ticket."""
Names = Mapping[str, str]
"""A mapping from the fields of a payload to the arguments of the caller that contain them, for error messages."""
LOG = logging.getLogger("manifoldagg")


class Request(NamedTuple):
    """Unvalidated information about the update that a client returns to `Server.receive`.

    Attributes:
        ticket_id: the id of the ticket, which permits the client to return one update.
        client: the client that returns the update, or `ANY_CLIENT`.
        names: the caller's argument name for each field of the update. Error messages use these names.
        received_at: the time of the call, in seconds of the server's clock.
    """

    ticket_id: Any
    client: Hashable
    names: Names
    received_at: float


@dataclass(eq=False)
class UpdateProcessor:
    """Processor of clients' updates. It validates them, and applies them to the server's model one at a time.

    Args:
        core: the parts of the server.
        schema: the description of a valid update.
        plan: the aggregation rule and its options.
        evictor: the object that moves older models to files.
        durability: the manager of the checkpoints and the journal.
        dispatcher: the dispatcher of events.
        free_list: the memory of models that the server no longer needs. The next step writes the new model to it.

    Attributes:
        lock: the lock that serialises updates.
        recycle: the function that adds the memory of a model to `free_list`. If the server averages the model versions,
            the average may refer to older models. Their memory is then not reused, and `recycle` is `None`.
    """

    core: ServerCore
    schema: PayloadSchema
    plan: StepPlan
    evictor: Evictor
    durability: DurabilityManager
    dispatcher: EventDispatcher
    free_list: deque[Tensor]

    def __post_init__(self) -> None:
        limits = self.core.state.value.limits
        self._timeout = limits.timeout
        self._warned_unstable = False
        self.lock = UpdateLock(limits.max_queued_updates)
        self.recycle = self.free_list.append if self.core.averaging is None else None

    def receive(
        self, ticket_id: Any, client: Hashable, names: Names, payload: Any = None, load: Load | None = None
    ) -> Receipt:
        """Process an update, write its journal record, and deliver its events.

        Args:
            ticket_id: the id of the ticket.
            client: the client that returns the update, or `ANY_CLIENT`.
            names: a mapping from the fields of the payload to the arguments of the caller, for error messages.
            payload: the payload, unless `load` returns it.
            load: a function that returns the payload. The method calls it after it has checked the ticket.

        Returns:
            The receipt, which may be a rejection.

        Raises:
            RuleError: if the rule returns an invalid result.
            CheckpointError: if the journal cannot be written.
        """
        journal = self.durability.journal
        try:
            receipt = self._process(ticket_id, client, names, payload, load)
            if journal is not None:
                journal.write()
        except Exception:  # After an interrupt such as KeyboardInterrupt, the next call delivers the events.
            self.deliver_events()
            raise
        if self.core.state.value.subscriptions:
            self.deliver_events()
        return receipt

    def replay(self, payload: Payload, recorded: Mapping[str, Any]) -> Receipt:
        """Apply the update of a journal record, with the sample count and the weights of the record."""
        self.core.state.value.pending(recorded["ticket"])
        request = Request(recorded["ticket"], ANY_CLIENT, {}, math.nan)
        receipt = self._apply(request, payload, b"", recorded=recorded)
        try:
            self._after_update()
        except Exception:  # The update stays applied, as in the original run.
            LOG.exception("averaging: the average raised an exception for version %d", receipt.version)
        return receipt

    def expire(self) -> list[str]:
        """Close the tickets that have exceeded their timeout, and return their ids.

        A ticket does not expire while the server processes its update.
        """
        if self._timeout is None:
            return []
        now = self.core.clock()
        expired = self.core.state.update(lambda state: state.without_expired(now, exclude=self.lock.tickets))
        if expired:
            LOG.warning("tickets expired after %g s: %d", self._timeout, len(expired))
            self.deliver_events()
        return expired

    def check_may_wait(self) -> None:
        """Check that this call may wait for a running update.

        Raises:
            ArgumentError: if the call is made in a forked process, within an update, or within a journal write. Waiting
                would cause a deadlock there.
        """
        self.lock.check_process()
        self.lock.check()
        self.durability.check_idle()

    def snapshot(self, enqueue: Callable[[ServerSnapshot], None] | None = None) -> ServerSnapshot:
        """Return the content of a checkpoint. The method waits for a running update.

        Args:
            enqueue: a function that receives the content before the next update starts. `None` means that the content
                is only returned.

        Raises:
            ArgumentError: if the server was closed.
        """
        with self.lock.lock:
            self.notify_average()
            snapshot = self.durability.make_snapshot()
            if snapshot.server_state.is_closed:
                raise ArgumentError("server: was closed")
            if enqueue is not None:
                enqueue(snapshot)
        return snapshot

    def notify_average(self) -> None:
        """Add the new versions of the model to the average over all versions, in order.

        If adding a version fails, the method re-raises the exception, and the next call skips this version. If an
        interrupt such as `KeyboardInterrupt` ends the method, the next call starts again with the same version.
        """
        while self.core.averaging is not None and (pending := self.core.state.value.pending_notifications):
            failure = None
            try:
                self.core.averaging.update(pending[0].version, pending[0].model.tree)
            except Exception as error:
                failure = error
            self.core.state.update(
                lambda now: (now._replace(pending_notifications=now.pending_notifications[1:]), None)
            )
            if failure is not None:
                raise failure

    def flush(self) -> None:
        """Write the pending journal records, and deliver the pending events."""
        if self.durability.journal is not None:
            self.durability.journal.write()
        self.deliver_events()

    def deliver_events(self) -> None:
        """Deliver the pending events to the subscribers.

        A call within an update does nothing, because the server delivers the events at the end of the update.
        """
        if self.core.state.value.subscriptions and not self.lock.held_by_me():
            self.dispatcher.drain()

    def _process(self, ticket_id: Any, client: Hashable, names: Names, payload: Any, load: Load | None) -> Receipt:
        """Check the ticket, validate the payload, wait for the update lock, and apply the update."""
        self.lock.check_process()
        if self._timeout is not None:
            self.expire()
        journal = self.durability.journal
        if journal is not None:
            self.durability.check_idle()
        pending = PendingUpdate(ticket_id if type(ticket_id) is str else "")
        with pending.alive_lock:
            self.lock.register(pending)
            state = self.core.state.value
            received_at = self.core.clock() if state.subscriptions or journal is not None else math.nan
            request = Request(ticket_id, client, names, received_at)
            try:
                ticket = state.admit(ticket_id, client)
                if isinstance(ticket, PendingTicket):
                    payload = payload if load is None else load(ticket)
                    payload = validate_payload(self.schema, payload, requires_base=ticket.base_key is None)
                    packed = b"" if journal is None else pack_payload(payload, journal.free_list)
                    self.lock.enqueue(pending)
            except ManifoldAggError as error:
                return self._reject(request, error)
            if isinstance(ticket, Receipt):
                self._finish_interrupted()
                return ticket
            del state  # The reference would keep the models of this state in memory while the update waits.
            self.lock.check()
            with self.lock.lock:
                return self._apply_or_reject(request, payload, packed)

    def _apply_or_reject(self, request: Request, payload: Payload, packed: bytes | memoryview) -> Receipt:
        """Apply or reject an update. The calling thread must own the update lock."""
        if self.core.averaging is not None:  # After an interrupt, the average may lack earlier versions.
            self.notify_average()
        if self.durability.journal is not None:
            self.durability.journal.retry_if_failed()
        try:
            receipt = self._apply(request, payload, packed)
        except RuleError:
            raise
        except ManifoldAggError as error:
            receipt = self._reject(request, error)
        self._after_update()
        return receipt

    def _apply(
        self, request: Request, payload: Payload, packed: bytes | memoryview, recorded: Mapping[str, Any] | None = None
    ) -> Receipt:
        """Compute the aggregation step of an update, and publish the new state of the server."""
        # During a journal replay, `recorded` contains the sample count and the weights of the original run.
        state = self.core.state.value
        begun = time.perf_counter() if state.subscriptions else math.nan
        # While this update waited, its ticket may have been closed or dropped, or its version may have become too old.
        ticket = state.admit(request.ticket_id, request.client)
        if isinstance(ticket, Receipt):
            return ticket
        update = state.make_update(ticket, payload, recorded)
        # Only the owner of the update lock calls `pop`, so the list cannot become empty after the check.
        out = self.free_list.pop() if self.free_list else empty_like(state.model_state.current)
        model = InMemoryTree(out, self.recycle, size=out.untyped_storage().nbytes())
        try:
            after, outcome = step(self.plan, state.model_state, update, payload.buffers, out)
        except Exception:
            raise_nonfinite(self.schema, payload)
            raise
        if recorded is None and not self._warned_unstable:
            self._warned_unstable = warn_if_unstable(
                self.plan.rule,
                outcome.numbers,
                update.staleness,
                num_in_flight=len(state.tickets.entries),
                weight=update.weight,
                num_clients=state.weights.num_clients,
            )
        applied = AppliedUpdate(
            ticket_id=request.ticket_id,
            ticket=ticket,
            reported_samples=payload.samples,
            update=update,
            after=after,
            outcome=outcome,
            model=None if outcome.model is None else model,
            received_at=request.received_at,
            seconds=time.perf_counter() - begun,
            payload=packed,
        )
        return self.core.state.update(lambda now: now.with_update(applied))

    def _reject(self, request: Request, error: ManifoldAggError) -> Receipt:
        """Record the rejection of an update, and return the receipt for the client."""
        # The reason starts with the name of the invalid field. The caller knows this field by the name of an argument.
        reason = rename_argument(str(error), request.names)
        # A start model that is too old or lost also prevents any later update, so the server closes the ticket.
        is_final = isinstance(error, StaleTicketError) or (isinstance(error, SpillError) and not error.temporary)
        receipt = self.core.state.update(
            lambda now: now.with_rejection(
                request.ticket_id, reason, request.received_at, is_final=is_final, norms=getattr(error, "norms", None)
            )
        )
        LOG.warning("rejected, ticket closed: %s" if is_final else "rejected: %s", receipt.reason)
        return receipt

    def _finish_interrupted(self) -> None:
        """Complete the work after an update whose call an interrupt has ended early."""
        if self.core.state.value.pending_notifications and not self.lock.held_by_me():
            with self.lock.lock:
                self._after_update()

    def _after_update(self) -> None:
        """Notify the average, evict stored trees to files, and start a checkpoint if one is due."""
        try:
            if self.core.averaging is not None:
                self.notify_average()
        finally:
            if self.evictor.limit is not None:
                self.evictor.evict()
            if self.durability.checkpoints is not None:
                self.durability.maybe_write_checkpoint()
