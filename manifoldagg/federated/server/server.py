"""The server: the owner of the model, its versions and its client states, for every rule."""

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from jaxtyping import Float
from torch import Tensor

from manifoldagg._validation import (
    check_choice,
    check_count,
    rename_argument,
    renamed_arguments,
    short_repr,
    suggests_keywords,
)
from manifoldagg.errors import ArgumentError, ManifoldAggError, RuleError, SpillError
from manifoldagg.federated._autograd import no_grad
from manifoldagg.federated.buffers import initial_buffers
from manifoldagg.federated.limits import UpdateLimits
from manifoldagg.federated.model_state import ModelState
from manifoldagg.federated.pytrees import copy_tensor
from manifoldagg.federated.server.dispatch import check_base_dtype, make_message, round_base
from manifoldagg.federated.server.durability.checkpoint import (
    CheckpointPolicy,
    CheckpointWriter,
    LoadedCheckpoint,
    ServerSnapshot,
    check_storable,
    check_storable_client,
)
from manifoldagg.federated.server.durability.eviction import Evictor
from manifoldagg.federated.server.durability.fingerprint import import_path
from manifoldagg.federated.server.durability.journal import Journal, JournalLock, JournalWriter, locked_journal
from manifoldagg.federated.server.durability.log_format import pack_payload
from manifoldagg.federated.server.durability.persistent_map import AtomicReference
from manifoldagg.federated.server.durability.recovery import UNSET, JournalReplay, recover
from manifoldagg.federated.server.durability.spill import Spill
from manifoldagg.federated.server.durability.store import InMemoryTree, Store, StoredTree
from manifoldagg.federated.server.durability.subscriptions import EventDispatcher
from manifoldagg.federated.server.durability.tensor_file import check_path
from manifoldagg.federated.server.events import Callback
from manifoldagg.federated.server.lock import OwnedLock, PendingUpdate, UpdateLock
from manifoldagg.federated.server.model_spaces import MODEL_NAMES, initial_model, model_space, resumed_space
from manifoldagg.federated.server.state import (
    ANY_CLIENT,
    AppliedUpdate,
    HistoryRow,
    PendingTicket,
    ServerLimits,
    ServerState,
    StaleTicketError,
)
from manifoldagg.federated.server.state_dicts import payload_from_state_dict, payload_names
from manifoldagg.federated.server.validation import (
    PayloadSchema,
    check_rule,
    check_start,
    initial_state,
    raise_nonfinite,
    validate_payload,
)
from manifoldagg.federated.stability import warn_if_unstable
from manifoldagg.federated.step import StepPlan, step
from manifoldagg.federated.types import (
    Averaging,
    Payload,
    Receipt,
    Rule,
    Ticket,
    check_averaging,
    check_parameter_space,
    extra_fields,
)
from manifoldagg.federated.weights import Weights
from manifoldagg.kernels.alloc import empty_like
from manifoldagg.manifolds import Manifold
from manifoldagg.manifolds.assign import Assignment
from manifoldagg.manifolds.buffer_policies import BufferPolicy
from manifoldagg.manifolds.layout import Entry
from manifoldagg.manifolds.lora.scaling import Scaling

__all__ = ["Server"]

Load = Callable[[PendingTicket], Any]
"""A function that returns the payload of a ticket."""
Packed = bytes | bytearray
"""A payload, packed for the journal; empty without a journal."""
Recorded = Mapping[str, Any]
"""The journal record of an accepted update, with its sample count and weights."""
Names = Mapping[str, str]
"""The fields of a payload, and the arguments of the caller that contain them."""
NOT_CALLED = (Payload, torch.nn.Module, type)
"""Kinds of payloads that `receive` does not call, although they may be callable."""
DEFAULT_CLOCK = time.monotonic
"""The default clock, as the constructor binds it."""
LOG = logging.getLogger("manifoldagg")
# A library does not write to the terminal unless the application adds a handler.
LOG.addHandler(logging.NullHandler())


class Request(NamedTuple):
    """The arguments of a call of `receive`, before any check, and the time of the call in seconds of the clock."""

    ticket_id: Any
    client: Hashable
    names: Names
    received_at: float


class Server:
    r"""Server of a rule: it dispatches models, applies updates and rejects invalid ones.

    - A rejected update changes nothing. Rejections are logged to `logging.getLogger("manifoldagg")`.
    - Dispatched models are copies and payloads are only read, so that no memory is shared with callers.
    - The state is one immutable record, replaced in a single instruction. Every method may be called from any thread,
      signal handler or finaliser. It takes effect atomically, also if it is interrupted.
    - Updates are applied one at a time. Only other updates wait for a running one. A client that joins during an update
      counts from the next update on.
    - Rules and averages may read the server. They must not call methods that wait for the running update.
    - `on_event` subscribes a callback to all events.

    Args:
        space: the space of the models.
        rule: the aggregation rule.
        start: the initial model $\Theta^0$ (P,).
        weights: a client's share of the data $w_i$: a mapping client to samples, for
            $w_i = |D_i| / \sum_j |D_j|$; `"uniform"`, 1 / N; or `"observed"`, $|D_i| / (N \cdot$ mean of the
            $|D|$ seen$)$, with N the clients that have contributed or have a ticket. Means weigh by the samples.
        max_staleness: the largest accepted staleness in versions.
        update_limits: limits on norms, cosines, sample counts and control points.
        averaging: an average that receives every new version, in order; it may store the models and must not write
            them.
        buffers: the initial buffers of the model, as from `space.buffers`. Clients then return their buffers, except
            those with the policy `"leave"`. Without it the server has no buffers.
        buffer_policy: the policies of the buffers, by name or glob pattern: `"average"` (with the rule's step; the
            default), `"latest"` or `"leave"`. Integers and booleans stay the server's by default, but for counters.
        base_dtype: a narrower dtype for the stored start models. Clients start from the rounded model, and the drift is
            measured from it, so that it is never exactly zero. Flat spaces only. A model that overflows is not rounded.
        memory_limit: bytes of memory for older versions and client states. The oldest are evicted to files in the
            folder `spill` (`None`: the system's temporary folder), mapped when they are needed, and removed with their
            last reference. The freed memory is released to the system.
        history_size: the number of latest rows that `history` stores; `None` for all.
        timeout: seconds after which a ticket without an update expires; see `expire`.
        clock: a function that returns seconds, such as that of a simulation.
        max_in_flight: the number of tickets in flight beyond which `dispatch` raises `BusyError`.
        max_queued_updates: the number of queued updates beyond which updates are rejected as busy. An update whose
            payload is still being unpacked is not counted; the host must bound the number of those.
        receipt_cache_size: the number of latest receipts that are stored for repeated requests.
        checkpoint: the path and the frequency of checkpoints in the background. Clients must be strings or integers.
        journal: the path of a journal. Each change is appended before its receipt is returned, so that `resume` can
            replay it. A [`Journal`][manifoldagg.federated.server.durability.journal.Journal] also sets the sync policy.
            Clients must be strings or integers. An existing journal is not modified. The journal is locked until
            `close`.

    Raises:
        ArgumentError: naming the argument that does not fit.
        CheckpointError: if the journal cannot be begun.

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
        >>> server.receive(ticket, Payload(torch.tensor([[2.0, 4.0]]), samples=10)) is receipt
        True
        >>> server.receive("of my own making", Payload(torch.tensor([[2.0, 4.0]]), samples=10)).reason
        'ticket: unknown, or used already'
    """

    @suggests_keywords("Server")
    @no_grad
    def __init__(
        self,
        space: Manifold,
        rule: Rule,
        start: Float[Tensor, " P"],
        *,
        weights: str | Mapping[Any, int] = "observed",
        max_staleness: int | None = None,
        update_limits: UpdateLimits | None = None,
        averaging: Averaging | None = None,
        buffers: Mapping[str, Tensor] | None = None,
        buffer_policy: BufferPolicy = (),
        base_dtype: torch.dtype | None = None,
        memory_limit: int | None = None,
        spill: str | Path | None = None,
        history_size: int | None = 10_000,
        timeout: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_in_flight: int | None = None,
        max_queued_updates: int | None = None,
        receipt_cache_size: int = 10_000,
        checkpoint: CheckpointPolicy | None = None,
        journal: str | Path | Journal | None = None,
    ) -> None:
        kept_in = None if journal is None else Journal.of(journal)
        first = check_start(space, start)
        check_rule(rule, "Server(space, rule, start)")
        update_limits = UpdateLimits.of(update_limits, space)
        kept, policies = initial_buffers(space, buffers, buffer_policy)
        sent = tuple(Entry(name, tuple(x.shape), x.dtype) for name, x in kept.items() if policies[name] != "leave")
        self.space = space
        self.rule = rule
        self._averaging = check_averaging(averaging)
        self._base_dtype = check_base_dtype(space, base_dtype, first.dtype)
        self._schema = PayloadSchema.of(space, rule, first, sent, update_limits)
        self._step_plan = StepPlan(space, rule, policies, update_limits)
        memory_limit = None if memory_limit is None else check_count("memory_limit", memory_limit, at_least=0)
        self._spill = Spill(spill)
        if not callable(clock):
            raise ArgumentError(f"clock: expected a function that returns seconds, got {short_repr(clock)}")
        self._clock = clock
        if max_queued_updates is not None:
            max_queued_updates = check_count("max_queued_updates", max_queued_updates, at_least=0)
        self._update_lock = UpdateLock(max_queued_updates)
        self._save_lock = OwnedLock()
        self._free_list: deque[Tensor] = deque(maxlen=1)
        # An average may store models, so that their memory is not reused.
        self._recycle = self._free_list.append if averaging is None else None
        self._pid = os.getpid()
        self._warned_unstable = False
        self._restored_tickets: frozenset[str] = frozenset()
        self._limits = ServerLimits.of(max_staleness, timeout, max_in_flight, history_size, receipt_cache_size)
        now = ModelState(first, initial_state(rule, space, first.clone(), {"space": "space", "start": "start"}), kept)
        shares = Weights.of(weights, update_limits.samples_factor)
        store = Store().retain(("version", 0), InMemoryTree(first, self._recycle))
        self._state = AtomicReference(
            ServerState(self._limits, now, shares, store, has_averaging=averaging is not None)
        )
        self._dispatcher = EventDispatcher(self._state)
        self._evictor = Evictor(self._state, memory_limit, self._spill)
        self._options = {
            "update_limits": asdict(update_limits),
            "base_dtype": None if base_dtype is None else str(base_dtype).removeprefix("torch."),
            "memory_limit": memory_limit,
            "max_queued_updates": max_queued_updates,
            "policies": policies,
        }
        self._checkpoint_writer = None if checkpoint is None else CheckpointWriter(checkpoint, self._dispatcher.publish)
        self._journal: JournalWriter | None = None
        if checkpoint is not None or journal is not None:
            check_storable(space, rule, weights, clock)
        if kept_in is not None:
            with locked_journal(kept_in) as hold:
                if kept_in.segments():
                    raise ArgumentError(f"journal: {kept_in.path}: already exists; resume with `Server.open`")
                self._start_journal(kept_in, 0, {}, hold)

    @classmethod
    @suggests_keywords("Server.of", __init__)
    def of(
        cls,
        model: torch.nn.Module | Mapping[str, Tensor],
        rule: Rule,
        *,
        buffer_policy: BufferPolicy = (),
        manifolds: Assignment | None = None,
        adapters: bool | None = None,
        scaling: Scaling = 1.0,
        **server_options: Any,
    ) -> "Server":
        """Create a server from a module or a state dict: it starts from its parameters and stores its buffers.

        Args:
            model: a module or a state dict. It is not modified.
            rule: the aggregation rule.
            buffer_policy: the policies of the buffers, as in the constructor. Frozen parameters of a module are left
                unchanged unless they match. For a state dict, this and the following arguments are as in
                [`aggregate`][manifoldagg.aggregate].
            manifolds: name or glob pattern to the space of those parameters.
            adapters: whether pairs of factors in a state dict are one matrix each.
            scaling: the factor of their products in the model.
            **server_options: keyword arguments of the constructor.

        Raises:
            ArgumentError: if the model has no trainable parameters, or an argument is invalid.

        Warns:
            UserWarning: if the model has factors of adapters and `adapters` is `None`.

        Example:
            >>> from manifoldagg.federated.rules import FedAsync
            >>> server = Server.of(torch.nn.BatchNorm1d(1), FedAsync(rate=0.5))
            >>> ticket = server.dispatch("ward-7")
            >>> model = ticket.state_dict()
            >>> model["running_mean"] += 2
            >>> server.receive_model(ticket, model, samples=10).accepted, server.state_dict()["running_mean"]
            (True, tensor([1.]))
        """
        space, policies = model_space(model, buffer_policy, manifolds, adapters, scaling)
        check_rule(rule, "Server.of(model, rule)")
        start, buffers = initial_model(space, model)
        with renamed_arguments(MODEL_NAMES):
            return cls(space, rule, start, buffers=buffers, buffer_policy=policies, **server_options)

    @classmethod
    @suggests_keywords("Server.resume", __init__)
    @no_grad
    def resume(
        cls,
        path: str | Path | LoadedCheckpoint,
        model: torch.nn.Module | Mapping[str, Tensor] | Manifold,
        rule: Rule,
        *,
        replace: bool = False,
        manifolds: Assignment | None = None,
        adapters: bool | None = None,
        scaling: Scaling = 1.0,
        **options: Any,
    ) -> "Server":
        """Resume a server from a checkpoint, bit for bit.

        The saved options are the defaults of `options`. Files do not store `averaging` (only its state), `clock`,
        `spill`, `checkpoint`, `journal` and callbacks of `on_event`; pass them again. Tickets keep their ages; the time
        without a running server does not count.

        The records of a `journal` after the checkpoint are replayed with the saved options. Only `averaging` receives
        them again. An incomplete last record is discarded. Then a new journal starts with the complete state.

        Args:
            path: a file of `save` or `checkpoint=`. It may be missing if the journal contains the complete state.
            model: a module or a state dict with the same parameters and buffers as the saved model, or a space that
                equals the saved one. Its values are ignored.
            rule: a rule that equals the saved one. Functions in the rule, and `clock`, are compared by their names.
            replace: accept another rule or clock. A rule of the same class resumes with its state and the client
                states. Otherwise these are initialised, and buffered updates are lost. The clip and the noise of
                `Private` cannot be replaced, as its participations so far were counted with them.
            manifolds: as in `of`, for a module or a state dict.
            adapters: as in `of`, for a state dict.
            scaling: as in `of`, for a state dict.
            **options: keyword arguments of the constructor.

        Raises:
            CheckpointError: if the file is truncated, altered or not a checkpoint; if the model, rule or clock differs
                from the saved one; if another process has locked the journal; if the journal belongs to another server,
                begins after the checkpoint, or was altered; if the checkpoint has a journal and `journal` is missing.
            ArgumentError: if an argument is invalid.

        Warns:
            RuntimeWarning: if the backend, the processor or the torch version differs, as results may then differ
                bitwise; if a replayed update returns another receipt.

        Example:
            >>> import tempfile, torch
            >>> from manifoldagg.federated import Payload
            >>> from manifoldagg.federated.rules import FedAsync
            >>> from manifoldagg.manifolds import Flat
            >>> server = Server(Flat(2), FedAsync(rate=0.5), torch.zeros(2))
            >>> ticket = server.dispatch("ward-7")
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     server.save(folder + "/server")
            ...     server = Server.resume(folder + "/server", Flat(2), FedAsync(rate=0.5))
            >>> server.receive(ticket, Payload(torch.tensor([[2.0, 4.0]]), samples=10)).version, server.model
            (1, tensor([1., 2.]))
        """
        check_rule(rule, "Server.resume(path, model, rule)")
        check_choice("replace", replace, (True, False))
        given = options.pop("journal", UNSET)
        journal = None if given is None or given is UNSET else Journal.of(given)
        with nullcontext() if journal is None else locked_journal(journal) as hold:
            saved, story = recover(path, journal, journal_unset=given is UNSET)
            replace = replace and not (story is not None and story.records)
            space = resumed_space(model, saved.buffer_policies, options, manifolds, adapters, scaling)
            clock, label = options.get("clock", DEFAULT_CLOCK), "space" if model is space else "model"
            saved.check_compatible(space, rule, clock, replace=replace, label=label)
            if story is not None and story.records:
                saved = cls._replay(saved, story, space, rule, options)
            server = cls._from_checkpoint(saved, space, rule, options)
            if journal is not None and story is not None and hold is not None:
                server._start_journal(journal, story.next_lsn, {**story.ancestors, story.name: story.next_lsn}, hold)
        if server._checkpoint_writer is not None:
            server._checkpoint_writer.reset(server.updates)
        return server

    @classmethod
    @suggests_keywords("Server.open", __init__)
    def open(
        cls,
        path: str | Path,
        space: Manifold,
        rule: Rule,
        start: Float[Tensor, " P"],
        *,
        replace: bool = False,
        **options: Any,
    ) -> "Server":
        """Start a server, or resume it if its checkpoint or its `journal` exists.

        The same call starts a process and restarts it after a crash at any instant, also before the first checkpoint.
        Dispatch again to the clients of `orphaned_tickets`, or `drop` these tickets.

        Args:
            path: as in `resume`.
            space: the space of the models.
            rule: as in `resume`.
            start: the initial model (P,). A resumed server ignores it, and the options `buffers` and `buffer_policy`.
            replace: as in `resume`.
            **options: keyword arguments of the constructor, such as `checkpoint` with the same path, and `journal`.

        Raises:
            CheckpointError: as `resume`.
            ArgumentError: if an argument is invalid.
        """
        check_rule(rule, "Server.open(path, space, rule, start)")
        journal = options.get("journal")
        if not check_path(path).exists() and (journal is None or not Journal.of(journal).segments()):
            return cls(space, rule, start, **options)
        options = {name: value for name, value in options.items() if name not in ("buffers", "buffer_policy")}
        return cls.resume(path, space, rule, replace=replace, **options)

    @classmethod
    def _from_checkpoint(
        cls, checkpoint: LoadedCheckpoint, space: Manifold, rule: Rule, options: Mapping[str, Any]
    ) -> "Server":
        """Build a server with the saved state."""
        with renamed_arguments(MODEL_NAMES):
            server = cls(space, rule, checkpoint.model, **checkpoint.server_options(options))
        state = checkpoint.restore_state(server._state.value, server._clock(), options.get("weights"), server._recycle)
        checkpoint.restore_averaging(server._averaging)
        server._state.update(lambda _: (state, None))
        server._restored_tickets = frozenset(state.tickets)
        server._evictor.evict()
        return server

    @classmethod
    def _replay(
        cls,
        checkpoint: LoadedCheckpoint,
        replay: JournalReplay,
        space: Manifold,
        rule: Rule,
        options: Mapping[str, Any],
    ) -> LoadedCheckpoint:
        """Return the state after the replay of all journal records."""
        given = {name: options[name] for name in ("averaging", "spill") if name in options}
        replay.time = checkpoint.time
        replayed = {"clock": replay.clock, "update_limits": checkpoint.replay_limits}
        server = cls._from_checkpoint(checkpoint, space, rule, {**given, **replayed})

        def apply_update(payload: Payload, was: Mapping[str, Any]) -> Receipt:
            server._state.value.pending(was["ticket"])
            receipt = server._apply(Request(was["ticket"], ANY_CLIENT, {}, math.nan), payload, b"", recorded=was)
            try:
                server._after_update()
            except Exception:  # the update stays applied, as in the original run
                LOG.exception("averaging: raised for version %d", receipt.version)
            return receipt

        replay.replay(server._state, apply_update, partial(round_base, base_dtype=server._base_dtype))
        after = checkpoint.with_replayed(server.snapshot().tree())
        server.close()
        return after

    @no_grad
    def dispatch(self, client: Hashable, *, retain_base: bool = True) -> Ticket:
        """Dispatch the current model to a client.

        Args:
            client: any hashable name that equals itself, but not a tensor.
            retain_base: whether to store the version that it starts from. Otherwise its payload must contain the base.

        Raises:
            ArgumentError: if `client` is an invalid name, or missing from the weights that were given up front; or if
                `retain_base` is not a boolean.
            BusyError: if `max_in_flight` tickets are in flight.
            CheckpointError: if the journal cannot be written.

        Cost: one copy of the model, which is read once and written once: a client's model is its own.
        """
        check_choice("retain_base", retain_base, (True, False))
        return self._dispatch(client, retain_base)[0]

    @no_grad
    def _dispatch_shared(self, client: Hashable) -> tuple[Ticket, StoredTree | None]:
        """Dispatch as `dispatch`, without a copy of the model.

        Returns:
            The ticket, whose message shares the memory of the server; and the stored base. A caller must not write the
            message, and must hold the stored base while it reads the message: the server reuses the memory afterwards.
        """
        return self._dispatch(client, True, copies=False)

    def _dispatch(
        self, client: Hashable, retain_base: bool, *, copies: bool = True
    ) -> tuple[Ticket, StoredTree | None]:
        self._check_process()
        self._expire()
        client = self._state.value.weights.check(client)
        if self._checkpoint_writer is not None or self._journal is not None:
            check_storable_client(client)
        if self._journal is not None:
            self._journal.retry_if_failed()
        # The loop repeats only if another thread has moved the model in the meantime.
        while (issued := self._issue_ticket(client, retain_base, copies)) is None:
            pass
        if self._journal is not None:
            self._journal.write()
        self._dispatch_events()
        return issued

    def _issue_ticket(
        self, client: Hashable, retain_base: bool, copies: bool
    ) -> tuple[Ticket, StoredTree | None] | None:
        """Issue a ticket for the current model; `None`, without any change, if its version is no longer retained.

        A concurrent checkpoint may not contain that version, so that a journal replay would not find it.
        """
        state = self._state.value
        state.check_capacity()
        place = state.current_key
        kept = state.store.find(place)
        base = None
        if retain_base and self._base_dtype is not None:
            narrow = ("base", state.model_state.version)
            held = state.store.find(narrow)
            # A base in a file is rounded again, which is faster than reading the file.
            base = (
                held.tree if isinstance(held, InMemoryTree) else round_base(state.model_state.current, self._base_dtype)
            )
            if base is not None:
                place = narrow
                kept = InMemoryTree(base) if held is None else held
        memory = state.store.load(("client", client))
        sent, apart = make_message(self.space, self.rule, state.model_state, memory, base, copies=copies)
        ticket_id = os.urandom(16).hex()
        ticket = PendingTicket(client, state.model_state.version, place if retain_base else None, self._clock(), apart)

        def with_ticket(now: ServerState) -> tuple[ServerState, bool]:
            passed = now.model_state.version != ticket.version and now.store.find(place) is None
            if retain_base and passed and self._journal is not None:
                return now, False
            return now.with_ticket(ticket_id, ticket, kept), True

        if not self._state.update(with_ticket):
            return None
        return Ticket(ticket_id, ticket.version, sent, self.space), kept

    @no_grad
    def receive(
        self, ticket: str | Ticket, payload: Payload | Callable[[], Payload], *, client: Hashable = ANY_CLIENT
    ) -> Receipt:
        """Process the update that a client returns for a ticket. The payload must not be written before this returns.

        `receive` is idempotent. Calling it again with an answered ticket returns the original receipt and ignores the
        new payload.

        Args:
            ticket: or its id.
            payload: the payload of the client, or a function that returns it, such as `partial(wire.unpack, data)`. The
                function is called after the ticket was validated. If it raises a `ManifoldAggError`, the update is
                rejected; other exceptions propagate.
            client: the client that returns it. The server rejects another client than that of the ticket.

        Returns:
            A receipt. With `accepted=False` its `reason` names the field, and nothing has changed; why it is not an
            exception: [Receipts and exceptions](../guide/errors.md#receipts-and-exceptions). The client may retry,
            unless the ticket is closed because it has expired, its version is too old, or its base was lost. Exceptions
            of the rule's code propagate and change nothing. Those of `averaging` are raised after the update.

        Raises:
            ArgumentError: if it is called from within an update.
            RuleError: if the rule, or a schedule in it, returns an invalid result.
            CheckpointError: if the journal cannot be written. The update stays applied, and a retry returns its receipt
                once the journal can be written. Until then no other update is accepted.

        Warns:
            StabilityWarning: once, if the step is above the stability limit of the concurrency. If the warning is
                raised as an error, nothing has changed. See [`suggest_rate`][manifoldagg.federated.suggest_rate].

        Cost: that of the rule's step. With a rule that works on rows nothing else reads or writes a model: the Gram
        matrix shows whether the update is finite, and a rejected update costs no more than an accepted one.
        """
        # By its type, because `__class__` of an untrusted object may be wrong or raise.
        if callable(payload) and not issubclass(type(payload), NOT_CALLED):
            return self._receive(ticket, client, {}, load=lambda _: payload())
        return self._receive(ticket, client, {}, payload)

    @no_grad
    def receive_model(
        self,
        ticket: str | Ticket,
        model: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]] | Callable[[], Any],
        *,
        samples: int,
        client: Hashable = ANY_CLIENT,
        scaling: Scaling | None = None,
    ) -> Receipt:
        """Process an update that a client returns as a state dict: the module's parameters and buffers.

        Args:
            ticket: as in `receive`.
            model: a state dict, or for a curve a sequence of them: the control points, with the client's model last,
                which contains the buffers. Frozen parameters and buffers with the policy `"leave"` may be missing. Or a
                function that returns either, as in `receive`.
            samples: the number of samples that the client trained on.
            client: as in `receive`.
            scaling: the scaling of the client's adapters, if it differs from that of the server, as in
                [`ParameterSpace.of_state_dict`][manifoldagg.manifolds.ParameterSpace.of_state_dict].

        Returns:
            A receipt, as `receive`. The `reason` of a rejection names `model` and the tensor that is invalid.

        Raises:
            ArgumentError: if the space is not a `ParameterSpace`, or the rule requires more than models.

        Warns:
            UserWarning: if the model looks like a difference of models. If the warning is raised as an error, nothing
                has changed.
        """
        if any(extra_fields(self.rule)):
            raise ArgumentError(
                f"rule: {type(self.rule).__name__} requires more than models from clients; use `receive`"
            )
        check_parameter_space(self.space)
        state = self._state.value

        def load(found: PendingTicket) -> Payload:
            base = None if found.custom_start else found.base_key
            if isinstance(model, torch.nn.Module):  # which can be called too
                raise ArgumentError(f"model: expected a state dict, got {type(model).__name__}: pass its state_dict()")
            came = model() if callable(model) else model
            began = partial(state.store.load, base)
            return payload_from_state_dict(
                self._schema, came, samples, state.model_state.current, began, scaling=scaling
            )

        return self._receive(ticket, client, payload_names(model), load=load)

    def _receive(
        self, ticket: str | Ticket, client: Hashable, names: Names, payload: Any = None, load: Load | None = None
    ) -> Receipt:
        """Process an update, write its journal record, and deliver its events.

        If `load` is given, it is called with the ticket and returns the payload.
        """
        ticket_id = ticket.id if isinstance(ticket, Ticket) else ticket
        try:
            receipt = self._process(ticket_id, client, names, payload, load)
            if self._journal is not None:
                self._journal.write()
        except Exception:  # an interrupt does not deliver events
            self._dispatch_events()
            raise
        if self._state.value.subscriptions:
            self._dispatch_events()
        return receipt

    def _process(self, ticket_id: Any, client: Hashable, names: Names, payload: Any, load: Load | None) -> Receipt:
        """Look the ticket up, validate the payload, and apply the update when it is its turn."""
        self._check_process()
        if self._limits.timeout is not None:
            self._expire()
        if self._journal is not None:
            self._check_journal_idle()
        pending = PendingUpdate(ticket_id if type(ticket_id) is str else "")
        with pending.alive_lock:
            self._update_lock.register(pending)
            state = self._state.value
            received_at = self._clock() if state.subscriptions or self._journal is not None else math.nan
            request = Request(ticket_id, client, names, received_at)
            try:
                found = state.admit(ticket_id, client)
                if isinstance(found, PendingTicket):
                    payload = payload if load is None else load(found)
                    payload = validate_payload(self._schema, payload, requires_base=found.base_key is None)
                    packed = b"" if self._journal is None else pack_payload(payload)
                    self._update_lock.enqueue(pending)
            except ManifoldAggError as error:
                return self._reject(request, error)
            if isinstance(found, Receipt):
                self._finish_interrupted()
                return found
            del state  # An update that waits must not retain the models of this state.
            self._update_lock.check()
            with self._update_lock.lock:
                return self._apply_or_reject(request, payload, packed)

    def _apply_or_reject(self, request: Request, payload: Payload, packed: Packed) -> Receipt:
        """Apply or reject an update, whose call owns the update lock."""
        if self._averaging is not None:  # versions that an interrupt withheld from the average come first
            self._notify_average()
        if self._journal is not None:
            self._journal.retry_if_failed()
        try:
            receipt = self._apply(request, payload, packed)
        except RuleError:
            raise
        except ManifoldAggError as error:
            receipt = self._reject(request, error)
        self._after_update()
        return receipt

    def _apply(self, request: Request, payload: Payload, packed: Packed, recorded: Recorded | None = None) -> Receipt:
        """Take the step of an update and publish its result. A journal replay passes the recorded weights."""
        state = self._state.value
        begun = time.perf_counter() if state.subscriptions else math.nan
        # While the update waited, its ticket may have been answered, dropped or become too old.
        ticket = state.admit(request.ticket_id, request.client)
        if isinstance(ticket, Receipt):
            return ticket
        update = state.make_update(ticket, payload, recorded)
        # Only the owner of the update lock removes memory from the list.
        out = self._free_list.pop() if self._free_list else empty_like(state.model_state.current)
        model = InMemoryTree(out, self._recycle, size=out.untyped_storage().nbytes())
        try:
            after, outcome = step(self._step_plan, state.model_state, update, payload.buffers, out)
        except Exception:
            raise_nonfinite(self._schema, payload)
            raise
        if recorded is None and not self._warned_unstable:
            self._warned_unstable = warn_if_unstable(
                self.rule,
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
        return self._state.update(lambda now: now.with_update(applied))

    def _reject(self, request: Request, error: ManifoldAggError) -> Receipt:
        """Count a rejection under the caller's name of the argument.

        The ticket is closed if it can accept no update: its version is too old, or the file of its base was lost.
        """
        reason = rename_argument(str(error), request.names)
        is_final = isinstance(error, StaleTicketError) or (isinstance(error, SpillError) and not error.temporary)
        receipt = self._state.update(
            lambda now: now.with_rejection(
                request.ticket_id, reason, request.received_at, is_final=is_final, norms=getattr(error, "norms", None)
            )
        )
        LOG.warning("rejected, ticket closed: %s" if is_final else "rejected: %s", receipt.reason)
        return receipt

    def drop(self, ticket: str | Ticket) -> None:
        """Drop a ticket, whose update will not arrive.

        Args:
            ticket: or its id.

        Raises:
            ArgumentError: if the ticket is unknown or was used.
        """
        self._check_process()
        ticket_id = ticket.id if isinstance(ticket, Ticket) else ticket
        self._state.update(lambda now: (now.with_dropped_ticket(ticket_id), None))
        if self._journal is not None:
            self._journal.write()
        self._dispatch_events()

    def expire(self) -> list[str]:
        """Expire the tickets without an update for `timeout` seconds. `dispatch` and `receive` do so too.

        Returns:
            Their ids, the oldest first; none without a `timeout`.
        """
        self._check_process()
        due = self._expire()
        if self._journal is not None:
            self._journal.write()
        return due

    def on_event(self, callback: Callback) -> Callable[[], None]:
        """Subscribe a callback to all later events.

        - Subscribers receive one event at a time, in the order of the changes, before the call that caused it returns.
          If another thread is delivering events, it also delivers the new ones; the call does not wait.
        - Callbacks may call all methods of the server. The resulting events are delivered next.
        - An `Exception` of a callback is logged to `logging.getLogger("manifoldagg")` and undoes nothing.
        - `KeyboardInterrupt`, `SystemExit` and `asyncio.CancelledError` propagate out of the call as interrupts. The
          change stays in effect, and the next call resumes delivery. A callback that raises one of them at every event
          blocks later events until it is unsubscribed.

        Args:
            callback: called with an [`Event`][manifoldagg.federated.server.events.Event]: `Dispatched`, `Accepted`,
                `Rejected`, `Dropped`, `Expired`, `CheckpointWritten`, `CheckpointFailed` or `Closed`. It should be
                faster than the rate of events, because pending events are stored.

        Returns:
            A function that unsubscribes the callback.

        Raises:
            ArgumentError: if `callback` cannot be called.

        Example:
            >>> from manifoldagg.federated.rules import FedAsync
            >>> from manifoldagg.manifolds import Flat
            >>> server = Server(Flat(2), FedAsync(rate=0.5), torch.zeros(2))
            >>> stop = server.on_event(lambda event: print(type(event).__name__, event.version))
            >>> receipt = server.receive(server.dispatch("ward-7"), Payload(torch.ones(1, 2), samples=10))
            Dispatched 0
            Accepted 1
            >>> stop()
            >>> ticket = server.dispatch("ward-7")
        """
        return self._dispatcher.subscribe(callback)

    @property
    def model(self) -> Float[Tensor, " P"]:
        """A copy of the current model (P,)."""
        state = self._state.value
        return copy_tensor(state.model_state.current)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the current model as a state dict, in the model's own dtypes, with the buffers that the server stores.

        Raises:
            ArgumentError: if the space is not a `ParameterSpace`.
        """
        space = check_parameter_space(self.space)
        state = self._state.value
        return space.state_dict(state.model_state.current, state.model_state.buffers or None)

    def spec(self) -> dict[str, Any]:
        """The specification of the server's space, as JSON values, from which a client builds the same space.

        Raises:
            ArgumentError: if the space is not a `ParameterSpace`, or a leaf lives on a space of another package.

        Example:
            >>> from manifoldagg.federated.rules import FedAsync
            >>> from manifoldagg.manifolds import ParameterSpace
            >>> server = Server.of(torch.nn.BatchNorm1d(1), FedAsync(rate=0.5))
            >>> ParameterSpace.of_spec(server.spec()) == server.space
            True
        """
        return check_parameter_space(self.space).spec()

    def averaged(self) -> Float[Tensor, " P"]:
        """A copy of the average (P,), or of the current model without an average. It waits for a running update.

        Raises:
            ArgumentError: if it is called from within an update, or the writing of the journal.
        """
        self._check_may_wait()
        with self._update_lock.lock:
            self._notify_average()
            average = None if self._averaging is None else self._averaging.average
            return self.model if average is None else copy_tensor(average)

    @property
    def version(self) -> int:
        """The number of times that the model has moved."""
        return self._state.value.model_state.version

    @property
    def updates(self) -> int:
        """The number of accepted updates."""
        return self._state.value.history.next_index

    @property
    def tickets(self) -> list[str]:
        """The ids of the tickets in flight, the oldest first."""
        return list(self._state.value.tickets)

    @property
    def orphaned_tickets(self) -> list[str]:
        """The ids of the tickets in flight that were issued before the server was resumed, the oldest first."""
        return [name for name in self.tickets if name in self._restored_tickets]

    @property
    def history(self) -> list[HistoryRow]:
        """One flat row, suitable for a data frame, for each of the latest `history_size=` accepted updates.

        A row has the client, its samples, the receipt and the rule's numbers.
        """
        return [dict(row) for row in self._state.value.history.values()]

    @property
    def rejected(self) -> dict[str, int]:
        """The number of rejected updates, by the invalid field."""
        return dict(self._state.value.rejected)

    @property
    def memory(self) -> dict[str, int]:
        """The bytes of the `model`, the `state`, older `versions` and `clients`; both in files: `spilled`."""
        return self._state.value.memory_usage()

    @no_grad
    def save(self, path: str | Path | None = None) -> None:
        """Write a checkpoint and replace the existing file atomically.

        It contains the model, its buffers, the rule's state, the client states, the tickets in flight with their bases,
        the receipts, weights, history, and the state of `averaging`. It waits for a running update; further updates run
        while the file is written. The journal retains the records after the checkpoint of `checkpoint=`; without
        `checkpoint=`, those after the last saved one.

        Args:
            path: the path of the file. `None` or an equal path: the path of `checkpoint=`, with its number of older
                files, after the checkpoint that is being written.

        Raises:
            ArgumentError: if there is no such folder, or none is said, the server was closed, or it is called from
                within an update or the writing of the journal.
            CheckpointError: naming what cannot be saved (a lambda in the rule, a client that is neither a string nor an
                integer), or with what the system says: then the older file is as it was.
            SpillError: if the file of a client state was altered.

        Cost: one pass over the complete state.
        """
        self._check_may_wait()
        writer = self._checkpoint_writer
        if path is None and writer is None:
            raise ArgumentError("path: expected a path, as the server has no `checkpoint`")
        ours = writer if writer is not None and (path is None or writer.targets(path)) else None
        # A handler or a finaliser within a save must not wait for that save.
        within = self._save_lock.held_by_me() or (writer is not None and writer.held_by_me())
        # One at a time, so that no older state replaces a newer one, up to which the journal was truncated.
        with nullcontext() if within else self._save_lock.lock:
            if ours is not None:
                self._snapshot(ours.enqueue)
                ours.finish()
            elif path is not None:
                moment = self._snapshot()
                if writer is not None or within:
                    moment = moment._replace(on_written=None)
                moment.write(path, 1, self._dispatcher.publish)

    def snapshot(self) -> ServerSnapshot:
        """Return the immutable content that `save` writes, for callers that store more in the same file.

        Raises:
            ArgumentError: if the server was closed, or it is called from within an update, or from within the writing
                of its journal.
        """
        self._check_may_wait()
        return self._snapshot()

    def _snapshot(self, enqueue: Callable[[ServerSnapshot], None] | None = None) -> ServerSnapshot:
        """Pass the snapshot of a checkpoint on, after a running update and before the next one."""
        with self._update_lock.lock:
            self._notify_average()
            moment = self._make_snapshot()
            if moment.server_state.is_closed:
                raise ArgumentError("server: was closed")
            if enqueue is not None:
                enqueue(moment)
        return moment

    def close(self) -> None:
        """Close the server: drop every ticket, discard client states and remove all files. The model stays readable.

        It waits for a checkpoint that is being written.

        Raises:
            ArgumentError: if it is called from within an update, or the writing of the journal.
            CheckpointError: if the last checkpoint could not be written, or whatever else was in its way. The server is
                closed then too.
        """
        self._check_may_wait()
        with self._update_lock.lock:
            try:
                self._notify_average()
                if self._journal is not None:
                    self._journal.close()
            finally:
                self._state.update(lambda now: (now.close(), None))
                self._spill.close()
        self._dispatch_events()
        if self._checkpoint_writer is not None:
            self._checkpoint_writer.finish()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Server has locks and tickets in flight: it cannot be copied or pickled; store its `model`")

    def _make_snapshot(self) -> ServerSnapshot:
        """Create a snapshot within the update lock, after the average has received every version."""
        averaging = self._averaging
        told = None if averaging is None else (import_path(type(averaging)), averaging.state())
        cut = None if self._journal is None else self._journal.rotate
        return ServerSnapshot(
            self._state.value, self.space, self.rule, self._options, self._clock, self._clock(), told, cut
        )

    def _start_journal(
        self, journal: Journal, first_lsn: int, ancestors: Mapping[str, int], journal_lock: JournalLock
    ) -> None:
        """Start a new journal with the complete state, before other threads can access the server."""
        appender = JournalWriter(journal, self._state, ancestors, journal_lock)
        appender.open_segment(first_lsn, self._make_snapshot().tree())
        appender.delete_segments(first_lsn)
        self._state.update(lambda now: (now._replace(pending_log=appender.empty_log(first_lsn)), None))
        self._journal = appender

    def _expire(self) -> list[str]:
        """Expire old tickets, except those whose updates are queued."""
        timeout = self._limits.timeout
        if timeout is None:
            return []
        time = self._clock()
        due = self._state.update(lambda now: now.without_expired(time, exclude=self._update_lock.tickets))
        if due:
            LOG.warning("tickets expired after %g s: %d", timeout, len(due))
            self._dispatch_events()
        return due

    def _finish_interrupted(self) -> None:
        """Complete the work that an interrupt left after a recorded update."""
        if self._state.value.pending_notifications and not self._update_lock.held_by_me():
            with self._update_lock.lock:
                self._after_update()

    def _after_update(self) -> None:
        """Run the follow-up work of a recorded update."""
        try:
            if self._averaging is not None:
                self._notify_average()
        finally:
            if self._evictor.limit is not None:
                self._evictor.evict()
            if self._checkpoint_writer is not None:
                state = self._state.value
                if not state.pending_notifications and not state.is_closed:
                    self._checkpoint_writer.maybe_write(state.history.next_index, self._make_snapshot)

    def _notify_average(self) -> None:
        """Pass new versions to the average; not again after an error, but again after an interrupt."""
        while self._averaging is not None and (untold := self._state.value.pending_notifications):
            failed = None
            try:
                self._averaging.update(untold[0].version, untold[0].model.tree)
            except Exception as error:
                failed = error
            self._state.update(lambda now: (now._replace(pending_notifications=now.pending_notifications[1:]), None))
            if failed is not None:
                raise failed

    def _dispatch_events(self) -> None:
        """Deliver pending events to subscribers; within an update they are deferred to its end."""
        if self._state.value.subscriptions and not self._update_lock.held_by_me():
            self._dispatcher.drain()

    def _check_process(self) -> None:
        """Reject calls in a forked process: its state is a copy that clients do not know."""
        if os.getpid() != self._pid:
            raise ArgumentError(
                f"server: belongs to process {self._pid}, of which this is a fork; it can only be read here"
            )

    def _check_journal_idle(self) -> None:
        """Reject calls from a handler within a journal write, because the lock owner may wait for that write."""
        if self._journal is not None and self._journal.held_by_me():
            raise ArgumentError("server: its journal is being written; call this after that has returned")

    def _check_may_wait(self) -> None:
        """Reject calls that may not wait for a running update."""
        self._check_process()
        self._update_lock.check()
        self._check_journal_idle()
