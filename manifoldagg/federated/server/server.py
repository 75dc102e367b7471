"""The server: it owns the model, the older versions and the client states, and applies updates with any rule."""

import dataclasses
import logging
import time
from collections import deque
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
from manifoldagg.federated.server.options import InitialModel, MemoryPolicy, ServerLimits, check_option
from manifoldagg.federated.server.records import HistoryRow
from manifoldagg.federated.server.state import ANY_CLIENT, ServerCore, ServerState
from manifoldagg.federated.server.state_dicts import (
    MODEL_NAMES,
    field_names,
    initial_model,
    model_space,
    payload_loader,
    resumed_space,
)
from manifoldagg.federated.server.update_processor import UpdateProcessor
from manifoldagg.federated.server.validation import PayloadSchema, check_rule, check_start, initial_state
from manifoldagg.federated.step import StepPlan
from manifoldagg.federated.types import (
    Averaging,
    Payload,
    Receipt,
    Rule,
    Ticket,
    check_averaging,
    check_parameter_space,
)
from manifoldagg.federated.weights import Weights
from manifoldagg.manifolds import Manifold
from manifoldagg.manifolds.assign import Assignment
from manifoldagg.manifolds.buffer_policies import BufferPolicy
from manifoldagg.manifolds.layout import Entry
from manifoldagg.manifolds.lora.scaling import Scaling
from manifoldagg.tensor_file import check_path

__all__ = ["Server"]

NOT_CALLED = (Payload, torch.nn.Module, type)
"""The types of payloads that `receive` does not call, although they may be callable."""
DEFAULT_CLOCK = time.monotonic
# A library does not write to the terminal unless the application adds a handler.
logging.getLogger("manifoldagg").addHandler(logging.NullHandler())


class Server:
    r"""Server of a rule: it dispatches models to clients, applies their updates, and rejects invalid updates.

    - A rejected update changes nothing. Rejections are logged to `logging.getLogger("manifoldagg")`.
    - Clients never share memory with the server: dispatched models are copies, and payloads are only read.
    - Every method is atomic and may be called from any thread, signal handler or finaliser. The state is one immutable
      record, so that an interrupted method has either completed or had no effect.
    - Updates are applied one at a time. `receive`, `receive_model`, `save`, `snapshot`, `averaged` and `close` wait for
      a running update. Other methods do not wait for it.
    - Rules and averages may read the server. They must not call methods that wait for the running update.

    Args:
        space: the space of the models.
        rule: the aggregation rule.
        start: the initial model $\Theta^0$ (P,), or an
            [`InitialModel`][manifoldagg.federated.InitialModel] with buffers.
        weights: the share $w_i$ of each client in the data:

            - a mapping from clients to sample counts: $w_i = |D_i| / \sum_j |D_j|$
            - `"uniform"`: $w_i = 1 / N$
            - `"observed"`: $w_i = |D_i| / (N \cdot m)$, where m is the mean of the reported sample counts

            N is the number of clients that have a ticket or have returned an update. Means over several updates use
            sample counts as weights.
        limits: the limits on updates, tickets, the queue and stored records. An `UpdateLimits` limits only updates.
        durability: the checkpoints and the journal. An existing journal is not modified.
        memory: the memory for older versions and client states.
        averaging: an average that receives every new version, in order. It may store the models but must not write
            them.
        clock: a function that returns seconds, such as the clock of a simulation.

    Raises:
        ArgumentError: if an argument is invalid. The message names it.
        CheckpointError: if the journal cannot be started.

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
        >>> server.receive("an invalid id", Payload(torch.tensor([[2.0, 4.0]]), samples=10)).reason
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
        start = start if isinstance(start, InitialModel) else InitialModel(start)
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
        check_averaging(averaging)
        base_dtype = check_base_dtype(space, memory.base_dtype, first.dtype)
        rule_state = initial_state(rule, space, first.clone(), {"space": "space", "start": "start"})
        self.space = space
        self.rule = rule
        self._restored_tickets: frozenset[str] = frozenset()
        self._schema = PayloadSchema.of(space, rule, first, sent, limits.update)
        free_list: deque[Tensor] = deque(maxlen=1)
        stored = InMemoryTree(first, free_list.append if averaging is None else None)
        self._state = AtomicReference(
            ServerState(
                limits,
                ModelState(first, rule_state, buffers),
                Weights.of(weights, limits.update.samples_factor),
                Store().retain(("version", 0), stored),
                has_averaging=averaging is not None,
            )
        )
        self._core = ServerCore(self._state, space, rule, clock, averaging)
        self._dispatcher = EventDispatcher(self._state)
        self._evictor = Evictor(self._state, memory.limit, Spill(memory.spill))
        options = {"limits": dataclasses.asdict(limits), "memory": memory.tree(), "policies": policies}
        self._durability = DurabilityManager(self._core, options, self._dispatcher.publish)
        self._issuer = TicketIssuer(self._core, base_dtype, self._durability)
        plan = StepPlan(space, rule, policies, limits.update)
        self._updates = UpdateProcessor(
            self._core, self._schema, plan, self._evictor, self._durability, self._dispatcher, free_list
        )
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
        """Create a server whose initial model is a module or a state dict, with its buffers.

        Args:
            model: a module or a state dict. It is not modified.
            rule: the aggregation rule.
            buffer_policy: the policies of the buffers, as in `InitialModel`. Frozen parameters of a module are left
                unchanged unless a pattern matches their names.
            manifolds: a mapping from names or glob patterns to the spaces of these parameters.
            adapters: whether each pair of factors in a state dict is one matrix, as in
                [`aggregate`][manifoldagg.aggregate].
            scaling: the factor of the products of adapter factors in the model.
            personal: names or glob patterns of parameters and buffers that remain on each client, as in
                [`ParameterSpace.of`][manifoldagg.manifolds.ParameterSpace.of]. The server does not store or send them.
                To resume, pass the space with `personal` instead of the model.
            **options: keyword arguments of the constructor.

        Raises:
            ArgumentError: if the model has no trainable parameters, or an argument is invalid.

        Warns:
            UserWarning: if the model has adapter factors and `adapters` is `None`.

        Example:
            >>> from manifoldagg.federated.rules import FedAsync
            >>> server = Server.of(torch.nn.BatchNorm1d(1), FedAsync(rate=0.5))
            >>> ticket = server.dispatch("ward-7")
            >>> model = ticket.state_dict()
            >>> model["running_mean"] += 2
            >>> server.receive_model(ticket, model, samples=10).accepted, server.state_dict()["running_mean"]
            (True, tensor([1.]))
        """
        space, policies = model_space(model, buffer_policy, manifolds, adapters, scaling, personal)
        check_rule(rule, "Server.of(model, rule)")
        start = initial_model(space, model, policies)
        with renamed_arguments(MODEL_NAMES):
            return cls(space, rule, start, **options)

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
        """Resume a server if its checkpoint or its journal exists. Otherwise, start a new server.

        The same call starts a server and restarts it after a crash at any time, even before the first checkpoint.
        After a restart, `orphaned_tickets` lists the interrupted tasks: dispatch them again, or `drop` their tickets.

        Args:
            path: the checkpoint, as in `resume`. To write checkpoints to this path, set the option `durability`.
            space: the space of the models.
            rule: the aggregation rule, as in `resume`.
            start: the initial model. A resumed server ignores it.
            replace: whether to accept another rule or clock, as in `resume`.
            **options: keyword arguments of the constructor.

        Raises:
            CheckpointError: for the same reasons as in `resume`.
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
        """Resume a server from a checkpoint. The resumed server is bit-identical to the saved one.

        - The saved options are the defaults of `options`. Files do not store the average (only its state), the clock,
          `durability`, the spill folder and the callbacks of `on_event`. Pass them again.
        - With a journal, the server replays the records after the checkpoint with the saved options. An incomplete last
          record is discarded. Then a new journal starts with the complete state. Only the average receives replayed
          versions again; callbacks do not receive replayed events.
        - Tickets keep their ages. The time without a running server does not count.

        Args:
            path: a file of `save` or of automatic checkpoints. It may be missing if the journal contains the complete
                state.
            model: a module or a state dict with the same parameters and buffers as the saved model, whose values are
                ignored; or a space that equals the saved space. For a module or a state dict, `manifolds`, `adapters`
                and `scaling` are as in `of`.
            rule: a rule that equals the saved rule. Functions in the rule, and the clock, are compared by their names.
            replace: whether to accept another rule or clock. A rule of the same class resumes with its state and the
                client states. Another class starts without them, and buffered updates are lost. The clip and the noise
                of `Private` cannot be replaced, because they determine the privacy loss so far.
            ignore_journal: whether to resume without the updates that only the journal of the checkpoint contains.
            buffer_policy: the policies of the buffers, as in `of`; `None` for the saved policies.
            **options: keyword arguments of the constructor.

        Raises:
            CheckpointError: in any of these cases:

                - The file is truncated, altered, or not a checkpoint of a server.
                - The model, the rule or the clock differs from the saved one.
                - Another process has locked the journal.
                - The journal was altered, starts after the checkpoint, or belongs to another server.
                - The checkpoint has a journal, but `durability` has none.
            ArgumentError: if an argument is invalid.

        Warns:
            RuntimeWarning: if the backend, the processor or the torch version differs, because results may then differ
                bitwise; or if a replayed update returns another receipt.

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
                server._durability.start_journal(journal, replay.next_lsn, replay.lineage, lock)
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
        """Create a server without files from a checkpoint."""
        start, saved = checkpoint.server_arguments(policies)
        with renamed_arguments(MODEL_NAMES):
            server = cls(space, rule, start, **{**saved, **options})
        core = server._core
        state = checkpoint.restore_state(
            core.state.value, core.clock(), options.get("weights"), server._updates.recycle
        )
        checkpoint.restore_averaging(core.averaging)
        core.state.update(lambda _: (state, None))
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
        """Return the checkpoint of the state after all journal records."""
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
        """Dispatch a copy of the current model to a client, and return the ticket of the task.

        Args:
            client: the name of the client: any hashable value that equals itself, but not a tensor.
            retain_base: whether the server stores the version that the client starts from. Otherwise, the payload of
                the client must contain this base.

        Raises:
            ArgumentError: if `client` is not a valid name or is not in a mapping `weights`, or if `retain_base` is not
                a boolean.
            BusyError: if `max_in_flight` tickets are in flight.
            CheckpointError: if the journal cannot be written.

        Cost: one copy of the model.
        """
        check_choice("retain_base", retain_base, (True, False))
        return self._dispatch(client, retain_base)[0]

    @no_grad
    def dispatch_shared(self, client: Hashable) -> tuple[Ticket, StoredTree | None]:
        """Dispatch the current model like `dispatch`, but without a copy, for callers that serialise it immediately.

        Returns:
            The ticket, whose message shares memory with the server and must not be written; and the stored base. Keep a
            reference to the base until you have read the message. Afterwards, the server reuses the memory.
        """
        return self._dispatch(client, True, copies=False)

    def _dispatch(
        self, client: Hashable, retain_base: bool, *, copies: bool = True
    ) -> tuple[Ticket, StoredTree | None]:
        self._updates.lock.check_process()
        self._updates.expire()
        client = self._state.value.weights.check(client)
        self._durability.check_client(client)
        if self._durability.journal is not None:
            self._durability.journal.retry_if_failed()
        issued = self._issuer.issue(client, retain_base=retain_base, copies=copies)
        self._updates.flush()
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
        """Process the update that a client returns for a ticket.

        `receive` is idempotent. Calling it again with an answered ticket returns the original receipt and ignores the
        new payload.

        Args:
            ticket: the ticket or its id.
            payload: the payload of the client, which must not be written during the call. Or a function that returns
                the payload, such as `partial(wire.unpack, data)`. The function is called after the ticket was checked.
                If the function raises a `ManifoldAggError`, the update is rejected. Other exceptions propagate.
            client: the client that returns the payload. The server rejects the update if the ticket was issued to
                another client.
            codec: the codec of a payload that
                [`ErrorFeedback.encode_payload`][manifoldagg.federated.clients.ErrorFeedback] has encoded.

        Returns:
            A receipt. If `accepted` is false, its `reason` names the invalid field, and nothing has changed. The client
            may send another payload, unless the ticket is closed. Expired tickets, tickets of too old versions and
            tickets whose base was lost are closed. See
            [Receipts and exceptions](../guide/errors.md#receipts-and-exceptions).

        Raises:
            ArgumentError: if the method is called from within an update.
            RuleError: if the rule, or a schedule in it, returns an invalid result.
            CheckpointError: if the journal cannot be written. The update stays applied, and a retry returns its receipt
                when the journal can be written again. Until then, the server accepts no other update.
            Exception: an exception in the code of the rule, which leaves the server unchanged; or an exception in
                `averaging`, after which the update stays applied.

        Warns:
            StabilityWarning: once, if the step exceeds the stability limit for the number of tickets in flight. If the
                warning is raised as an error, nothing has changed. See
                [`suggest_rate`][manifoldagg.federated.suggest_rate].

        Cost: the cost of the rule's step. Most rules do not require another pass to check that the update is finite.
        """
        if codec is not None:
            load = decoding_loader(codec, payload, self.space, self._state.value)
            return self._updates.receive(_id_of(ticket), client, {}, load=load)
        # `issubclass` of the type is safe, whereas `__class__` of an untrusted object may be wrong or raise.
        if callable(payload) and not issubclass(type(payload), NOT_CALLED):
            return self._updates.receive(_id_of(ticket), client, {}, load=lambda _: payload())
        return self._updates.receive(_id_of(ticket), client, {}, payload)

    @no_grad
    def receive_model(
        self,
        ticket: str | Ticket,
        model: Mapping[str, Tensor] | str | Path | Sequence[Mapping[str, Tensor] | str | Path] | Callable[[], Any],
        *,
        samples: int,
        client: Hashable = ANY_CLIENT,
        scaling: Scaling | None = None,
    ) -> Receipt:
        """Process an update that a client returns as a state dict of its module.

        Args:
            ticket: the ticket or its id.
            model: the state dict of the client's model, which may omit frozen parameters and buffers with the policy
                `"leave"`. Or the path of a safetensors file, which the server maps into memory. For a curve, a sequence
                of state dicts or paths: the control points, of which the last is the client's model and contains the
                buffers. Or a function that returns one of these, as in `receive`.
            samples: the number of samples that the client trained on.
            client: the client that returns the model, as in `receive`.
            scaling: the scaling of the client's adapters, if it differs from the scaling of the server, as in
                [`ParameterSpace.of_state_dict`][manifoldagg.manifolds.ParameterSpace.of_state_dict].

        Returns:
            A receipt, as in `receive`. The `reason` of a rejection names `model` and the invalid tensor.

        Raises:
            ArgumentError: if the space is not a `ParameterSpace`, or the rule requires more than models.

        Warns:
            UserWarning: if the model is probably a difference of models. If the warning is raised as an error, nothing
                has changed.
        """
        load = payload_loader(self._schema, self.rule, model, samples, scaling, self._state.value)
        return self._updates.receive(_id_of(ticket), client, field_names(model), load=load)

    def drop(self, ticket: str | Ticket) -> None:
        """Drop a ticket whose update will not arrive. The argument is the ticket or its id.

        Raises:
            ArgumentError: if the ticket is unknown or was used.
            CheckpointError: if the journal cannot be written.
        """
        self._updates.lock.check_process()
        ticket_id = _id_of(ticket)
        self._state.update(lambda now: (now.with_dropped_ticket(ticket_id), None))
        self._updates.flush()

    def expire(self) -> list[str]:
        """Expire the tickets that are older than `timeout` seconds, and return their ids, the oldest first.

        `dispatch` and `receive` also expire tickets. Without a `timeout`, no ticket expires.
        """
        self._updates.lock.check_process()
        expired = self._updates.expire()
        self._updates.flush()
        return expired

    def on_event(self, callback: Callback) -> Callable[[], None]:
        """Subscribe a callback to all later events.

        A callback receives one event at a time, in the order of the changes, before the call that caused the event
        returns. An exception of a callback is logged and undoes nothing. See
        [`EventDispatcher`][manifoldagg.federated.server.durability.subscriptions.EventDispatcher] for details.

        Args:
            callback: a function of an [`Event`][manifoldagg.federated.server.events.Event]. It may call all methods of
                the server. A slow callback delays the calls that cause events.

        Returns:
            A function that unsubscribes the callback.

        Raises:
            ArgumentError: if `callback` is not callable.

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
        return copy_tensor(self._state.value.model_state.current)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the current model as a state dict, in the dtypes of the original model, with its buffers.

        Raises:
            ArgumentError: if the space is not a `ParameterSpace`.
        """
        now = self._state.value.model_state
        return check_parameter_space(self.space).state_dict(now.current, now.buffers or None)

    def spec(self) -> dict[str, Any]:
        """Return the specification of the space as JSON values. A client can build the same space from it.

        Raises:
            ArgumentError: if the space is not a `ParameterSpace`, or a leaf has a manifold of another package.

        Example:
            >>> from manifoldagg.federated.rules import FedAsync
            >>> from manifoldagg.manifolds import ParameterSpace
            >>> server = Server.of(torch.nn.BatchNorm1d(1), FedAsync(rate=0.5))
            >>> ParameterSpace.of_spec(server.spec()) == server.space
            True
        """
        return check_parameter_space(self.space).spec()

    def capped_samples(self, client: Hashable, samples: int) -> int:
        """Return the sample count of a client for weighted means over clients.

        This is the count in a mapping `weights`. For other weights, it is the reported count `samples`, capped by
        `UpdateLimits.samples_factor`.
        """
        weights = self._state.value.weights
        # The server does not cap reports that its own weights do not use.
        observed = dataclasses.replace(weights, kind="observed")
        return weights.sample_counts.get(client) or observed.capped(client, samples)

    def averaged(self) -> Float[Tensor, " P"]:
        """Return a copy of the average (P,), or of the current model if the server has no average.

        The method waits for a running update.

        Raises:
            ArgumentError: if the method is called from within an update or a journal write.
        """
        self._updates.check_may_wait()
        with self._updates.lock.lock:
            self._updates.notify_average()
            average = None if self._core.averaging is None else self._core.averaging.average
            return self.model if average is None else copy_tensor(average)

    @property
    def version(self) -> int:
        """The version of the model, which is the number of times that the model has moved."""
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
        """The rows of the latest `history_size` accepted updates, for a data frame.

        A row contains the client, the sample count, the fields of the receipt and the metrics of the rule.
        """
        return [dict(row) for row in self._state.value.history.values()]

    @property
    def rejected(self) -> dict[str, int]:
        """The number of rejected updates, by the invalid field."""
        return dict(self._state.value.rejected)

    @property
    def memory(self) -> dict[str, int]:
        """The memory of the `model`, the rule's `state`, older `versions` and `clients` in bytes.

        `spilled` is the size of the versions and client states in files.
        """
        return self._state.value.memory_usage()

    @no_grad
    def save(self, path: str | Path | None = None) -> None:
        """Write a checkpoint and replace the existing file atomically.

        The checkpoint contains the complete state of the server and the state of the average. `save` waits for a
        running update. Later updates run while the file is written.

        The journal deletes the records before the checkpoint. If the server has automatic checkpoints, the journal
        deletes them only if `path` is the path of the automatic checkpoints.

        Args:
            path: the path of the file; `None` for the path of the automatic checkpoints. Saving to this path also keeps
                older files.

        Raises:
            ArgumentError: if the folder does not exist, `path` is missing, the server was closed, or the method is
                called from within an update or a journal write.
            CheckpointError: if a value cannot be stored, such as a lambda in the rule or a client that is neither a
                string nor an integer; or if the file cannot be written. The older file is then unchanged.
            SpillError: if the file of a client state was altered.

        Cost: one pass over the complete state.
        """
        self._updates.check_may_wait()
        self._durability.save(path, self._updates.snapshot)

    def snapshot(self) -> ServerSnapshot:
        """Return the immutable content that `save` writes, for callers that store more in the same file.

        Raises:
            ArgumentError: if the server was closed, or the method is called from within an update or a journal write.
        """
        self._updates.check_may_wait()
        return self._updates.snapshot()

    def close(self) -> None:
        """Close the server: drop all tickets, delete the client states and close all files. The model stays readable.

        The method waits for a running update and for a checkpoint that is being written.

        Raises:
            ArgumentError: if the method is called from within an update or a journal write.
            CheckpointError: if the last checkpoint or the journal could not be written. The server is closed then too.
        """
        self._updates.check_may_wait()
        with self._updates.lock.lock:
            try:
                self._updates.notify_average()
                if self._durability.journal is not None:
                    self._durability.journal.close()
            finally:
                self._state.update(lambda now: (now.close(), None))
        self._updates.deliver_events()
        if self._durability.checkpoints is not None:
            self._durability.checkpoints.finish()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Server has locks and tickets in flight: it cannot be copied or pickled; store its `model`")


def _id_of(ticket: str | Ticket) -> str:
    return ticket.id if isinstance(ticket, Ticket) else ticket
