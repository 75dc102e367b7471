"""The server: the owner of the model, its versions and its client states, for every rule."""

import dataclasses
import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from jaxtyping import Float
from torch import Tensor

from manifoldagg._validation import check_choice, renamed_arguments, short_repr, suggests_keywords
from manifoldagg.errors import ArgumentError
from manifoldagg.federated._autograd import no_grad
from manifoldagg.federated.buffers import initial_buffers
from manifoldagg.federated.clients.compression import Codec
from manifoldagg.federated.limits import UpdateLimits
from manifoldagg.federated.model_state import ModelState
from manifoldagg.federated.pytrees import copy_tensor
from manifoldagg.federated.server.dispatch import TicketIssuer, check_base_dtype
from manifoldagg.federated.server.durability.checkpoint import LoadedCheckpoint, ServerSnapshot
from manifoldagg.federated.server.durability.eviction import Evictor
from manifoldagg.federated.server.durability.journal import Journal, JournalLock
from manifoldagg.federated.server.durability.manager import Durability, DurabilityManager
from manifoldagg.federated.server.durability.persistent_map import AtomicReference
from manifoldagg.federated.server.durability.recovery import JournalReplay, recover
from manifoldagg.federated.server.durability.spill import Spill
from manifoldagg.federated.server.durability.store import InMemoryTree, Store, StoredTree
from manifoldagg.federated.server.durability.subscriptions import EventDispatcher
from manifoldagg.federated.server.encoded_payloads import decoding_loader
from manifoldagg.federated.server.events import Callback
from manifoldagg.federated.server.model_spaces import MODEL_NAMES, initial_model, model_space, resumed_space
from manifoldagg.federated.server.options import InitialModel, MemoryPolicy, ServerLimits, check_option
from manifoldagg.federated.server.records import HistoryRow
from manifoldagg.federated.server.state import ANY_CLIENT, ServerState
from manifoldagg.federated.server.state_dicts import StateDictConverter
from manifoldagg.federated.server.update_processor import UpdateProcessor
from manifoldagg.federated.server.validation import PayloadSchema, check_rule, check_start, initial_state
from manifoldagg.federated.step import StepPlan
from manifoldagg.federated.types import Averaging, Payload, Receipt, Rule, Ticket, check_averaging
from manifoldagg.federated.weights import Weights
from manifoldagg.manifolds import Manifold
from manifoldagg.manifolds.assign import Assignment
from manifoldagg.manifolds.buffer_policies import BufferPolicy
from manifoldagg.manifolds.layout import Entry
from manifoldagg.manifolds.lora.scaling import Scaling
from manifoldagg.tensor_file import check_path

__all__ = ["Server"]

NOT_CALLED = (Payload, torch.nn.Module, type)
"""Kinds of payloads that `receive` does not call, although they may be callable."""
DEFAULT_CLOCK = time.monotonic
"""The default clock, as the constructor binds it."""
# A library does not write to the terminal unless the application adds a handler.
logging.getLogger("manifoldagg").addHandler(logging.NullHandler())


class Server:
    r"""Server of a rule: it dispatches models, applies updates and rejects invalid ones.

    - A rejected update changes nothing. Rejections are logged to `logging.getLogger("manifoldagg")`.
    - Dispatched models are copies and payloads are only read, so that no memory is shared with callers.
    - The state is one immutable record, replaced in a single instruction. Every method may be called from any thread,
      signal handler or finaliser. It takes effect atomically, also if it is interrupted.
    - Updates are applied one at a time. Only other updates wait for a running one. A client that joins during an update
      counts from the next update on.
    - Rules and averages may read the server. They must not call methods that wait for the running update.

    Args:
        space: the space of the models.
        rule: the aggregation rule.
        start: the initial model $\Theta^0$ (P,), or an
            [`InitialModel`][manifoldagg.federated.InitialModel] with buffers.
        weights: a client's share of the data $w_i$: a mapping client to samples, for
            $w_i = |D_i| / \sum_j |D_j|$; `"uniform"`, 1 / N; or `"observed"`, $|D_i| / (N \cdot$ mean of the
            $|D|$ seen$)$, with N the clients that have contributed or have a ticket. Means weigh by the samples.
        limits: the limits on updates, tickets, the queue and stored records. `UpdateLimits` alone limit only updates.
        durability: the checkpoints and the journal. An existing journal is not modified.
        memory: the memory for older versions and client states.
        averaging: an average that receives every new version, in order; it may store the models and must not write
            them.
        clock: a function that returns seconds, such as that of a simulation.

    Raises:
        ArgumentError: naming the argument that is invalid.
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
        start: Float[Tensor, " P"] | InitialModel,
        *,
        weights: str | Mapping[Any, int] = "observed",
        limits: ServerLimits | UpdateLimits = ServerLimits(),
        durability: Durability = Durability(),
        memory: MemoryPolicy = MemoryPolicy(),
        averaging: Averaging | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        start = InitialModel.of(start)
        first = check_start(space, start.point)
        check_rule(rule, "Server(space, rule, start)")
        limits = ServerLimits.of(limits)
        limits.update.check_space(space)
        check_option("durability", durability, Durability)
        check_option("memory", memory, MemoryPolicy)
        if not callable(clock):
            raise ArgumentError(f"clock: expected a function that returns seconds, got {short_repr(clock)}")
        buffers, policies = initial_buffers(space, start.buffers, start.buffer_policy)
        sent = tuple(Entry(name, tuple(x.shape), x.dtype) for name, x in buffers.items() if policies[name] != "leave")
        self.space = space
        self.rule = rule
        self._averaging = check_averaging(averaging)
        base_dtype = check_base_dtype(space, memory.base_dtype, first.dtype)
        self._clock = clock
        self._restored_tickets: frozenset[str] = frozenset()
        rule_state = initial_state(rule, space, first.clone(), {"space": "space", "start": "start"})
        model_state = ModelState(first, rule_state, buffers)
        shares = Weights.of(weights, limits.update.samples_factor)
        self._state = AtomicReference(
            ServerState(limits, model_state, shares, Store(), has_averaging=averaging is not None)
        )
        schema = PayloadSchema.of(space, rule, first, sent, limits.update)
        self._state_dicts = StateDictConverter(schema, rule)
        self._dispatcher = EventDispatcher(self._state)
        self._evictor = Evictor(self._state, memory.limit, Spill(memory.spill))
        options = {"limits": limits.tree(), "memory": memory.tree(), "policies": policies}
        self._durability = DurabilityManager(
            self._state, space, rule, options, clock, averaging, self._dispatcher.publish
        )
        self._issuer = TicketIssuer(self._state, space, rule, base_dtype, self._durability, clock)
        self._updates = UpdateProcessor(
            self._state,
            schema,
            StepPlan(space, rule, policies, limits.update),
            averaging,
            self._evictor,
            self._durability,
            self._dispatcher,
            clock,
        )
        stored = Store().retain(("version", 0), InMemoryTree(first, self._updates.recycle))
        self._state.update(lambda now: (now._replace(store=stored), None))
        self._durability.start(durability, weights)

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
        personal: Sequence[str] = (),
        **options: Any,
    ) -> "Server":
        """Create a server from a module or a state dict: it starts from its parameters and stores its buffers.

        Args:
            model: a module or a state dict. It is not modified.
            rule: the aggregation rule.
            buffer_policy: the policies of the buffers, as in `InitialModel`. Frozen parameters of a module are left
                unchanged unless they match. For a state dict, this and the following arguments are as in
                [`aggregate`][manifoldagg.aggregate].
            manifolds: name or glob pattern to the space of those parameters.
            adapters: whether pairs of factors in a state dict are one matrix each.
            scaling: the factor of their products in the model.
            personal: names or glob patterns of parameters and buffers that remain on each client, as in
                [`ParameterSpace.of`][manifoldagg.manifolds.ParameterSpace.of]. The server does not store or send them.
                To resume, pass the space with `personal` in place of the model.
            **options: keyword arguments of the constructor.

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
        space, policies = model_space(model, buffer_policy, manifolds, adapters, scaling, personal=personal)
        check_rule(rule, "Server.of(model, rule)")
        point, buffers = initial_model(space, model)
        with renamed_arguments(MODEL_NAMES):
            return cls(space, rule, InitialModel(point, buffers, policies), **options)

    @classmethod
    @suggests_keywords("Server.open", __init__)
    def open(
        cls,
        path: str | Path,
        space: Manifold,
        rule: Rule,
        start: Float[Tensor, " P"] | InitialModel,
        *,
        replace: bool = False,
        **options: Any,
    ) -> "Server":
        """Start a server, or resume it if its checkpoint or its journal exists.

        The same call starts a process and restarts it after a crash at any instant, also before the first checkpoint.
        Dispatch again to the clients of `orphaned_tickets`, or `drop` these tickets.

        Args:
            path: as in `resume`.
            space: the space of the models.
            rule: as in `resume`.
            start: the initial model, as in the constructor. A resumed server ignores it.
            replace: as in `resume`.
            **options: keyword arguments of the constructor, such as `durability` with a checkpoint of the same path.

        Raises:
            CheckpointError: as `resume`.
            ArgumentError: if an argument is invalid.
        """
        check_rule(rule, "Server.open(path, space, rule, start)")
        journal = check_option("durability", options.get("durability", Durability()), Durability).journal
        has_journal = isinstance(journal, Journal) and bool(journal.segments())
        if not check_path(path).exists() and not has_journal:
            return cls(space, rule, start, **options)
        return cls.resume(path, space, rule, replace=replace, **options)

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
        ignore_journal: bool = False,
        buffer_policy: BufferPolicy | None = None,
        manifolds: Assignment | None = None,
        adapters: bool | None = None,
        scaling: Scaling = 1.0,
        **options: Any,
    ) -> "Server":
        """Resume a server from a checkpoint, bit for bit.

        The saved options are the defaults of `options`. Files do not store `averaging` (only its state), `clock`,
        `durability`, the spill folder and callbacks of `on_event`; pass them again. Tickets keep their ages; the time
        without a running server does not count.

        The records of the journal after the checkpoint are replayed with the saved options. Only `averaging` receives
        them again. An incomplete last record is discarded. Then a new journal starts with the complete state.

        Args:
            path: a file of `save` or of automatic checkpoints. It may be missing if the journal contains the complete
                state.
            model: a module or a state dict with the same parameters and buffers as the saved model, or a space that
                equals the saved one. Its values are ignored.
            rule: a rule that equals the saved one. Functions in the rule, and `clock`, are compared by their names.
            replace: accept another rule or clock. A rule of the same class resumes with its state and the client
                states. Otherwise these are initialised, and buffered updates are lost. The clip and the noise of
                `Private` cannot be replaced, as its participations so far were counted with them.
            ignore_journal: resume without the updates that only the journal of the checkpoint contains.
            buffer_policy: as in `of`; `None` for the saved policies.
            manifolds: as in `of`, for a module or a state dict.
            adapters: as in `of`, for a state dict.
            scaling: as in `of`, for a state dict.
            **options: keyword arguments of the constructor.

        Raises:
            CheckpointError: if the file is truncated, altered or not a checkpoint; if the model, rule or clock differs
                from the saved one; if another process has locked the journal; if the journal belongs to another server,
                begins after the checkpoint, or was altered; if the checkpoint has a journal and `durability` has none.
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
        check_choice("ignore_journal", ignore_journal, (True, False))
        durability = check_option("durability", options.pop("durability", Durability()), Durability)
        journal = durability.journal if isinstance(durability.journal, Journal) else None
        with nullcontext() if journal is None else JournalLock(journal) as lock:
            checkpoint, replay = recover(path, journal, ignore_journal=ignore_journal)
            has_records = replay is not None and bool(replay.records)
            space, policies = resumed_space(
                model, checkpoint.buffer_policies, buffer_policy, manifolds, adapters, scaling
            )
            checkpoint.check_compatible(
                space,
                rule,
                options.get("clock", DEFAULT_CLOCK),
                replace=replace and not has_records,
                label="space" if model is space else "model",
            )
            if replay is not None and has_records:
                checkpoint = cls._replayed(checkpoint, replay, space, rule, options)
            server = cls._restored(checkpoint, space, rule, options, policies)
            server._durability.start(durability, options.get("weights"), is_resumed=True)
            if journal is not None and replay is not None and lock is not None:
                ancestors = {**replay.ancestors, replay.name: replay.next_lsn}
                server._durability.start_journal(journal, replay.next_lsn, ancestors, lock)
        if server._durability.checkpoints is not None:
            server._durability.checkpoints.reset(server.updates)
        return server

    @classmethod
    def _restored(
        cls,
        checkpoint: LoadedCheckpoint,
        space: Manifold,
        rule: Rule,
        options: Mapping[str, Any],
        policies: BufferPolicy | None = None,
    ) -> "Server":
        """Build a server with the saved state, and without files."""
        start, saved = checkpoint.server_arguments(policies)
        with renamed_arguments(MODEL_NAMES):
            server = cls(space, rule, start, **{**saved, **options})
        state = checkpoint.restore_state(
            server._state.value, server._clock(), options.get("weights"), server._updates.recycle
        )
        checkpoint.restore_averaging(server._averaging)
        server._state.update(lambda _: (state, None))
        server._restored_tickets = frozenset(state.tickets)
        server._evictor.evict()
        return server

    @classmethod
    def _replayed(
        cls,
        checkpoint: LoadedCheckpoint,
        replay: JournalReplay,
        space: Manifold,
        rule: Rule,
        options: Mapping[str, Any],
    ) -> LoadedCheckpoint:
        """Return the state after the replay of all journal records."""
        replay.time = checkpoint.time
        spill = options.get("memory", MemoryPolicy()).spill
        replayed = {
            "averaging": options.get("averaging"),
            "clock": replay.clock,
            "limits": checkpoint.replay_limits,
            "memory": dataclasses.replace(checkpoint.memory, spill=spill),
        }
        server = cls._restored(checkpoint, space, rule, replayed)
        replay.replay(server._state, server._updates.replay, server._issuer.round_base)
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
    def dispatch_shared(self, client: Hashable) -> tuple[Ticket, StoredTree | None]:
        """Dispatch as `dispatch`, without a copy of the model, for callers that serialise the model at once.

        Returns:
            The ticket, whose message shares the memory of the server; and the stored base. A caller must not write the
            message, and must hold the stored base while it reads the message: the server reuses the memory afterwards.
        """
        return self._dispatch(client, True, copies=False)

    def _dispatch(
        self, client: Hashable, retain_base: bool, *, copies: bool = True
    ) -> tuple[Ticket, StoredTree | None]:
        self._updates.lock.check_process()
        self._updates.expire()
        client = self._state.value.weights.check(client)
        self._durability.check_client(client)
        journal = self._durability.journal
        if journal is not None:
            journal.retry_if_failed()
        issued = self._issuer.issue(client, retain_base=retain_base, copies=copies)
        if journal is not None:
            journal.write()
        self._updates.deliver_events()
        return issued

    @no_grad
    def receive(
        self,
        ticket: str | Ticket,
        payload: Payload | Callable[[], Payload],
        *,
        client: Hashable = ANY_CLIENT,
        codec: Codec | None = None,
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
            codec: the codec of a payload that
                [`ErrorFeedback.encode_payload`][manifoldagg.federated.clients.ErrorFeedback] has encoded.

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
        if codec is not None:
            load = decoding_loader(codec, payload, self.space, self._state.value)
            return self._updates.receive(_id_of(ticket), client, {}, load=load)
        # By its type, because `__class__` of an untrusted object may be wrong or raise.
        if callable(payload) and not issubclass(type(payload), NOT_CALLED):
            return self._updates.receive(_id_of(ticket), client, {}, load=lambda _: payload())
        return self._updates.receive(_id_of(ticket), client, {}, payload)

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
        load = self._state_dicts.payload_loader(model, samples, scaling, self._state.value)
        return self._updates.receive(_id_of(ticket), client, self._state_dicts.field_names(model), load=load)

    def drop(self, ticket: str | Ticket) -> None:
        """Drop a ticket, whose update will not arrive.

        Args:
            ticket: or its id.

        Raises:
            ArgumentError: if the ticket is unknown or was used.
            CheckpointError: if the journal cannot be written.
        """
        self._updates.lock.check_process()
        ticket_id = _id_of(ticket)
        self._state.update(lambda now: (now.with_dropped_ticket(ticket_id), None))
        if self._durability.journal is not None:
            self._durability.journal.write()
        self._updates.deliver_events()

    def expire(self) -> list[str]:
        """Expire the tickets without an update for `timeout` seconds. `dispatch` and `receive` do so too.

        Returns:
            Their ids, the oldest first; none without a `timeout`.
        """
        self._updates.lock.check_process()
        expired = self._updates.expire()
        if self._durability.journal is not None:
            self._durability.journal.write()
        return expired

    def on_event(self, callback: Callback) -> Callable[[], None]:
        """Subscribe a callback to all later events.

        Subscribers receive one event at a time, in the order of the changes, before the call that caused it returns. An
        exception of a callback is logged and undoes nothing.

        Args:
            callback: a function of an [`Event`][manifoldagg.federated.server.events.Event], as in
                [`EventDispatcher`][manifoldagg.federated.server.durability.subscriptions.EventDispatcher]. It may call
                all methods of the server. It should be faster than the rate of events, because pending events are
                stored.

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
        state = self._state.value
        return self._state_dicts.state_dict(state.model_state)

    def spec(self) -> dict[str, Any]:
        """Return the specification of the space, as JSON values, from which a client builds the same space.

        Raises:
            ArgumentError: if the space is not a `ParameterSpace`, or a leaf has a space of another package.

        Example:
            >>> from manifoldagg.federated.rules import FedAsync
            >>> from manifoldagg.manifolds import ParameterSpace
            >>> server = Server.of(torch.nn.BatchNorm1d(1), FedAsync(rate=0.5))
            >>> ParameterSpace.of_spec(server.spec()) == server.space
            True
        """
        return self._state_dicts.spec()

    def capped_samples(self, client: Hashable, samples: int) -> int:
        """Return the sample count that a mean over clients should use for a client's report.

        This is the count that `weights` contains, or the report with the cap of `UpdateLimits.samples_factor`.

        Args:
            client: the name of the client.
            samples: the number of samples that it reports.
        """
        weights = self._state.value.weights
        # The server does not cap reports that its own weights do not use.
        observed = dataclasses.replace(weights, kind="observed")
        return weights.sample_counts.get(client) or observed.capped(client, samples)

    def averaged(self) -> Float[Tensor, " P"]:
        """Return a copy of the average (P,), or of the current model without an average. It waits for a running update.

        Raises:
            ArgumentError: if it is called from within an update, or the writing of the journal.
        """
        self._updates.check_may_wait()
        with self._updates.lock.lock:
            self._updates.notify_average()
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
        while the file is written. The journal retains the records after the latest automatic checkpoint; without
        automatic checkpoints, those after the last saved one.

        Args:
            path: the path of the file. `None` or an equal path: the path of the automatic checkpoints, with its number
                of older files, after the checkpoint that is being written.

        Raises:
            ArgumentError: if the folder does not exist, `path` is missing, the server was closed, or it is called from
                within an update or the writing of the journal.
            CheckpointError: if the content cannot be stored (a lambda in the rule, a client that is neither a string
                nor an integer), or the file cannot be written. The older file is then unchanged.
            SpillError: if the file of a client state was altered.

        Cost: one pass over the complete state.
        """
        self._updates.check_may_wait()
        self._durability.save(path, self._updates.snapshot)

    def snapshot(self) -> ServerSnapshot:
        """Return the immutable content that `save` writes, for callers that store more in the same file.

        Raises:
            ArgumentError: if the server was closed, or it is called from within an update, or from within the writing
                of its journal.
        """
        self._updates.check_may_wait()
        return self._updates.snapshot()

    def close(self) -> None:
        """Close the server: drop every ticket, discard client states and remove all files. The model stays readable.

        It waits for a checkpoint that is being written.

        Raises:
            ArgumentError: if it is called from within an update, or the writing of the journal.
            CheckpointError: if the last checkpoint or the journal could not be written. The server is closed then too.
        """
        self._updates.check_may_wait()
        with self._updates.lock.lock:
            try:
                self._updates.notify_average()
                self._durability.close_journal()
            finally:
                self._state.update(lambda now: (now.close(), None))
        self._updates.deliver_events()
        self._durability.finish_checkpoints()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Server has locks and tickets in flight: it cannot be copied or pickled; store its `model`")


def _id_of(ticket: str | Ticket) -> str:
    return ticket.id if isinstance(ticket, Ticket) else ticket
