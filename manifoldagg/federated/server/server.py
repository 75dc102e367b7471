"""The class `Server`, which stores the global model and applies the updates of clients with an aggregation rule."""

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
from manifoldagg.federated.server.events import Callback
from manifoldagg.federated.server.options import InitialModel, MemoryPolicy, ServerLimits, check_option
from manifoldagg.federated.server.state import ANY_CLIENT, HistoryRow, ServerCore, ServerState
from manifoldagg.federated.server.state_dicts import (
    MODEL_NAMES,
    check_no_model_options,
    decoding_loader,
    field_names,
    initial_model,
    model_space,
    payload_loader,
    resumed_space,
)
from manifoldagg.federated.server.update_processor import UpdateProcessor
from manifoldagg.federated.server.validation import (
    PayloadSchema,
    check_average_space,
    check_rule,
    check_start,
    initial_state,
)
from manifoldagg.federated.step import ModelState, StepPlan
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
"""Types whose instances `receive` never calls. An instance may be callable without being a function that returns a
payload. For example, a module is callable."""
DEFAULT_CLOCK = time.monotonic
# A library does not write to the terminal unless the application adds a handler.
logging.getLogger("manifoldagg").addHandler(logging.NullHandler())


class Server:
    r"""Federated server that dispatches its model to clients and applies their updates with an aggregation rule.

    For each task of a client, call `dispatch` to get a ticket with a copy of the model. When the client returns its
    trained model, pass it with the ticket to `receive` or `receive_model`, which return a receipt. If the client will
    not return a model, call `drop`.

    - The server rejects an invalid update without any change to the model. It logs each rejection to
      `logging.getLogger("manifoldagg")`.
    - The server never shares memory with clients. It dispatches copies of the model and only reads payloads.
    - Every method is atomic and may be called from any thread, signal handler or finaliser. An interrupted method has
      either completed or had no effect, because the state is one immutable record.
    - The server applies one update at a time. `receive`, `receive_model`, `save`, `snapshot`, `averaged` and `close`
      wait for a running update. All other methods return without waiting for it.
    - A rule or an average may read the server while an update runs. It must not call a method that waits for this
      update.

    Args:
        space: the space of the models. P is the number of coordinates of a model.
        rule: the aggregation rule.
        start: the initial model $\Theta^0$ (P,), or an
            [`InitialModel`][manifoldagg.federated.InitialModel] with buffers.
        weights: the definition of the weight $w_i$ of client i, which is its share of the training data:

            - For a mapping from clients to sample counts, $w_i = |D_i| / \sum_j |D_j|$. Here, $|D_i|$ is the sample
              count of client i.
            - For `"uniform"`, $w_i = 1 / N$.
            - For `"observed"`, $w_i = |D_i| / (N \cdot m)$. Here, $|D_i|$ is the sample count that client i reported,
              and m is the mean of all reported counts.

            N is the number of clients that have a ticket or have returned an update. A weighted mean over several
            updates uses the sample counts as weights, or equal weights for `"uniform"`.
        limits: the limits on updates, tickets, queued updates and stored records. If you pass an `UpdateLimits`, the
            other limits keep their defaults.
        durability: the policy for checkpoints and the journal. The constructor does not replace existing files. To
            continue with existing files, call `open` or `resume`.
        memory: the memory limit for older versions and client states.
        averaging: an average over the versions of the model. It receives every new version, in order. It may store
            the models but must not modify them.
        clock: a function that returns the time in seconds, such as the clock of a simulation.

    Raises:
        ArgumentError: if an argument is invalid, or if a file of `durability` already exists. The message starts with
            the name of the argument.
        CheckpointError: if the server cannot create the journal.

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
        check_average_space(averaging, space, first)
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
        """Create a server whose initial model is a PyTorch module or a state dict.

        The server also stores the buffers of the model, such as the running means of batch normalisation.

        Args:
            model: a module or a state dict with the initial values. It is not modified.
            rule: the aggregation rule.
            buffer_policy: the policies of the buffers, as in `InitialModel`. In a state dict, floating tensors that a
                pattern matches are buffers. In a module, the buffers are its own buffers and its frozen parameters. A
                frozen parameter keeps its value unless a pattern matches its name. Each pattern must match a buffer.
            manifolds: a mapping from parameter names or glob patterns to the manifolds of these parameters. All other
                parameters are flat.
            adapters: whether the server aggregates the product of each pair of LoRA factors in a state dict instead of
                the separate factors. See
                [`ParameterSpace.of_state_dict`][manifoldagg.manifolds.ParameterSpace.of_state_dict].
            scaling: the factor by which the model multiplies the products of adapter factors.
            personal: names or glob patterns of parameters and buffers that stay on each client, as in
                [`ParameterSpace.of`][manifoldagg.manifolds.ParameterSpace.of]. The server neither stores nor sends
                these tensors. `resume` has no such option. To resume the server, pass a space that was created with
                `personal` instead of the model.
            **options: keyword arguments of the constructor.

        Raises:
            ArgumentError: if the model has no trainable parameters, or an argument is invalid.

        Warns:
            UserWarning: if the model contains adapter factors but `adapters` is `None`.

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
        space: Manifold | torch.nn.Module | Mapping[str, Tensor],
        rule: Rule,
        start: Float[Tensor, " P"] | InitialModel | None = None,
        *,
        replace: bool = False,
        buffer_policy: BufferPolicy | None = None,
        manifolds: Assignment | None = None,
        adapters: bool | None = None,
        scaling: Scaling = 1.0,
        **options: Any,
    ) -> "Server":
        """Resume a server from its checkpoint or its journal. If neither of them exists, start a new server.

        A program can therefore start and restart a server with the same call, even after a crash before the first
        checkpoint. After a restart, `orphaned_tickets` contains the tickets of the interrupted tasks. Dispatch these
        tasks again, or call `drop` for their tickets.

        Args:
            path: the path of the checkpoint, as in `resume`. `open` only reads this file. To write checkpoints to it,
                also pass the option `durability`.
            space: the space of the models, or a module or a state dict with the initial model, as in `of`. If some
                layers are personal, pass a space.
            rule: the aggregation rule, as in `resume`.
            start: the initial model of a new server in a space, with its buffers, as in the constructor. It is `None`
                if `space` is a module or a state dict. A resumed server ignores the values of the initial model.
            replace: whether to accept another rule or clock than the saved one, as in `resume`.
            buffer_policy: the policies of the buffers of a module or a state dict, as in `of`. A resumed server keeps
                its saved policies unless you pass new ones.
            manifolds: the manifolds of the parameters of a module or a state dict, as in `of`.
            adapters: whether a state dict contains adapter factors, as in `of`.
            scaling: the factor of the products of adapter factors, as in `of`.
            **options: keyword arguments of the constructor.

        Raises:
            CheckpointError: for the same reasons as in `resume`.
            ArgumentError: if an argument is invalid.

        Example:
            >>> import tempfile
            >>> from manifoldagg.federated import CheckpointPolicy
            >>> from manifoldagg.federated.rules import FedAsync
            >>> model, rule = torch.nn.Linear(2, 1), FedAsync(rate=0.5)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     durability = Durability(CheckpointPolicy(folder + "/server", every_updates=1))
            ...     for run in range(2):
            ...         server = Server.open(folder + "/server", model, rule, durability=durability)
            ...         ticket = server.dispatch("ward-7")
            ...         receipt = server.receive_model(ticket, ticket.state_dict(), samples=10)
            ...         server.close()
            >>> receipt.version
            2
        """
        check_rule(rule, "Server.open(path, space, rule, start)")
        journal = check_option("durability", options.get("durability", Durability()), Durability).journal
        has_journal = isinstance(journal, Journal) and bool(journal.segments())
        model_options: dict[str, Any] = {"manifolds": manifolds, "adapters": adapters, "scaling": scaling}
        if isinstance(space, Manifold):
            if start is None:
                raise ArgumentError("start: expected the initial model of the space, got None")
            check_no_model_options(**model_options)
        elif start is not None:
            raise ArgumentError("start: expected None, because the module or the state dict is the initial model")
        if check_path(path).exists() or has_journal:
            return cls.resume(
                path, space, rule, replace=replace, buffer_policy=buffer_policy, **model_options, **options
            )
        if not isinstance(space, Manifold):
            policies = () if buffer_policy is None else buffer_policy
            return cls.of(space, rule, buffer_policy=policies, **model_options, **options)
        if buffer_policy is not None:
            raise ArgumentError("buffer_policy: expected None for a space; pass start=InitialModel(buffer_policy=...)")
        assert start is not None
        return cls(space, rule, start, **options)

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
        """Resume a server from a checkpoint. The state of the resumed server is bit-identical to the saved state.

        - An option that you do not pass in `options` has its saved value. A checkpoint stores the state of the average,
          but not the average itself. It also does not store the clock, `durability`, the spill folder and the callbacks
          of `on_event`. Pass these objects again.
        - If `durability` contains a journal, the server replays the journal records after the checkpoint with the saved
          options. It discards an incomplete last record. Then it starts a new journal with the complete state.
        - During the replay, the average receives the new versions, but callbacks do not receive events.
        - The age of a ticket does not include the time during which no server was running.

        Args:
            path: the path of a file that `save` or an automatic checkpoint has written. The file may be missing if the
                journal contains the complete state.
            model: a module or a state dict with the parameters and buffers of the saved model, or a space that equals
                the saved space. The values in the module or the state dict are ignored.
            rule: a rule that equals the saved rule. Functions in the rule are compared by their names.
            replace: whether to accept another rule or clock than the saved one. If the new rule has the saved class and
                a state of the same structure, the server restores the state of the rule and the client states.
                Otherwise, it discards these states and the buffered updates. The clip and the noise of `Private`
                cannot be replaced, because they determine the privacy loss so far.
            ignore_journal: whether to resume a checkpoint that has a journal without this journal. The updates after
                the checkpoint are then lost.
            buffer_policy: the policies of the buffers, as in `of`. `None` uses the saved policies.
            manifolds: the manifolds of the parameters of a module or a state dict, as in `of`.
            adapters: whether a state dict contains adapter factors, as in `of`.
            scaling: the factor of the products of adapter factors, as in `of`.
            **options: keyword arguments of the constructor.

        Raises:
            CheckpointError: in any of these cases:

                - The file is truncated, altered, or not a checkpoint of a server.
                - The model, the rule or the clock differs from the saved one. Clocks are compared by their names.
                - Another process has locked the journal.
                - The journal was altered, starts after the checkpoint, or belongs to another server.
                - The checkpoint has a journal, but `durability` has no journal.
            ArgumentError: if an argument is invalid.

        Warns:
            RuntimeWarning: in any of these cases:

                - The backend, the processor or the torch version differs from the saved one, so that results may
                  differ bitwise.
                - A replayed update returns another receipt than the original update.

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
        """Create a server from a checkpoint. The server has no files of its own yet."""
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
        """Apply the journal records after a checkpoint, and return the result as a checkpoint."""
        # A temporary server applies the records, because the replay uses another clock and other limits.
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
        """Start a task of a client, and return its ticket with a copy of the current model.

        Args:
            client: the name of the client. It may be any hashable value that equals itself, except a tensor. A server
                with checkpoints or a journal accepts only strings and integers.
            retain_base: whether the server stores the version that the client starts from. If it does not, the client
                must return this model as `base` in its payload.

        Raises:
            ArgumentError: if the name of the client is invalid, if `weights` is a mapping without this client, or if
                `retain_base` is not a boolean.
            BusyError: if `max_in_flight` tickets are already in flight.
            CheckpointError: if the server cannot write the journal.

        Cost: one copy of the model.
        """
        check_choice("retain_base", retain_base, (True, False))
        return self._dispatch(client, retain_base)[0]

    @no_grad
    def dispatch_shared(self, client: Hashable) -> tuple[Ticket, StoredTree | None]:
        """Start a task of a client without copying the current model.

        The method works like `dispatch`, but the ticket contains a message that shares memory with the server. Use it
        only if you convert the message to bytes immediately.

        Returns:
            The ticket and the stored base. The message of the ticket shares memory with the server, so you must not
            write to it. Keep a reference to the stored base until you have read the message. The server may reuse the
            memory after the last reference is deleted.
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
        """Validate the update that a client returns for a ticket, and apply it to the model.

        The method is idempotent. An accepted update closes its ticket. A later call with the same ticket returns the
        original receipt and ignores the new payload. If a response was lost, the client can therefore safely repeat its
        request.

        Args:
            ticket: the ticket or its id.
            payload: the payload of the client, or a function that returns the payload, such as
                `partial(wire.unpack, data)`. The payload must not be modified during the call. The server calls the
                function after it has checked the ticket. If the function raises a `ManifoldAggError`, the server
                rejects the update. Other exceptions propagate.
            client: the client that returns the payload. If you pass it, the server rejects a payload whose ticket was
                issued to another client.
            codec: the codec with which
                [`ErrorFeedback.encode_payload`][manifoldagg.federated.clients.ErrorFeedback] has encoded the payload.
                `None` means that the payload is not encoded.

        Returns:
            The receipt of the update. If `accepted` is false, the model is unchanged, and `reason` starts with the name
            of the invalid field. The client may then send another payload for the same ticket, unless the ticket is
            closed. The server also closes tickets that expire, whose version is too old, or whose base was lost. See
            [Receipts and exceptions](../guide/errors.md#receipts-and-exceptions).

        Raises:
            ArgumentError: if the rule, the average or a signal handler calls this method within an update.
            RuleError: if the rule, or a schedule in the rule, returns an invalid result.
            CheckpointError: if the server cannot write the journal. The update stays applied, and the server accepts no
                other update until it can write the journal again. A repeated call then returns the receipt.
            Exception: if the code of the rule or of `averaging` raises an exception. After an exception of the rule,
                the server is unchanged. After an exception of the average, the update stays applied.

        Warns:
            StabilityWarning: if the step exceeds the stability limit for the observed staleness, which the number of
                tickets in flight bounds. The server warns only once, and never for wrappers such as `Momentum` or for
                `ACE`. If a warning filter turns the warning into an error, the server is unchanged. See
                [`suggest_rate`][manifoldagg.federated.suggest_rate].

        Cost: the cost of the rule's step. Most rules check that the update is finite without another pass over it.
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
        """Validate and apply an update that a client returns as the state dict of its module.

        The method works like `receive`, except for the format of the model. In particular, it is idempotent, and it
        raises the same exceptions.

        Args:
            ticket: the ticket or its id.
            model: the client's model in one of these forms:

                - a state dict. It may omit frozen parameters, and buffers with the policy `"leave"`.
                - the path of a safetensors file, which the server maps into memory. The server rejects the update if
                  the file changes during the call.
                - a sequence of state dicts or paths, which are the control points of a curve. The last one is the
                  client's model and contains the buffers.
                - a function that returns one of these values. The server calls it as in `receive`.
            samples: the number of samples that the client trained on.
            client: the client that returns the model, as in `receive`.
            scaling: the scaling of the client's adapters, if it differs from the scaling of the server. The values are
                as in [`ParameterSpace.of_state_dict`][manifoldagg.manifolds.ParameterSpace.of_state_dict].

        Returns:
            The receipt of the update, as in `receive`. If the server rejects the model, `reason` contains the word
            `model` and the name of the invalid tensor.

        Raises:
            ArgumentError: if the space is not a `ParameterSpace`, or if the rule requires more than models from
                clients.

        Warns:
            UserWarning: if the model is probably a difference of models. If a warning filter turns the warning into an
                error, the server is unchanged.
        """
        load = payload_loader(self._schema, self.rule, model, samples, scaling, self._state.value)
        return self._updates.receive(_id_of(ticket), client, field_names(model), load=load)

    def drop(self, ticket: str | Ticket) -> None:
        """End a task whose update will not arrive, for example because the client has disconnected.

        Args:
            ticket: the ticket of the task, or its id.

        Raises:
            ArgumentError: if the ticket is unknown or already closed.
            CheckpointError: if the server cannot write the journal.
        """
        self._updates.lock.check_process()
        ticket_id = _id_of(ticket)
        self._state.update(lambda now: (now.with_dropped_ticket(ticket_id), None))
        self._updates.flush()

    def expire(self) -> list[str]:
        """Close the tickets that are older than `ServerLimits.timeout` seconds, and return their ids, the oldest first.

        `dispatch` and `receive` also close these tickets, so you need this method only if neither is called for a long
        time. Without a timeout, no ticket expires.
        """
        self._updates.lock.check_process()
        expired = self._updates.expire()
        self._updates.flush()
        return expired

    def on_event(self, callback: Callback) -> Callable[[], None]:
        """Subscribe a callback to all later events of the server, such as accepted updates.

        The server's methods, such as `receive`, call the callback synchronously, so a slow callback delays them. If a
        callback raises an exception, the server logs it and continues.
        For the order of events, and for the effects of concurrent calls and interrupts, see
        [`EventDispatcher`][manifoldagg.federated.server.durability.subscriptions.EventDispatcher].

        Args:
            callback: a function that accepts an [`Event`][manifoldagg.federated.server.events.Event]. It may call all
                methods of the server.

        Returns:
            A function without arguments that unsubscribes the callback.

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
        """Return the current model and its buffers as a state dict, in the dtypes of the initial model.

        The parameters come first, then further names of tied parameters, and then the buffers.

        Raises:
            ArgumentError: if the space is not a `ParameterSpace`.
        """
        now = self._state.value.model_state
        return check_parameter_space(self.space).state_dict(now.current, now.buffers or None)

    def spec(self) -> dict[str, Any]:
        """Return a description of the parameter space that can be encoded as JSON.

        A client can create the same space from it with `ParameterSpace.of_spec`.

        Raises:
            ArgumentError: if the space is not a `ParameterSpace`, or if a parameter has a manifold that another package
                defines.

        Example:
            >>> from manifoldagg.federated.rules import FedAsync
            >>> from manifoldagg.manifolds import ParameterSpace
            >>> server = Server.of(torch.nn.BatchNorm1d(1), FedAsync(rate=0.5))
            >>> ParameterSpace.of_spec(server.spec()) == server.space
            True
        """
        return check_parameter_space(self.space).spec()

    def capped_samples(self, client: Hashable, samples: int) -> int:
        """Return the sample count that serves as the weight of a client in a mean over clients.

        If the server's option `weights` is a mapping, the method returns the client's count in this mapping. Otherwise,
        it returns the reported count `samples`, but at most the median count of the other clients multiplied by
        `UpdateLimits.samples_factor`.
        """
        weights = self._state.value.weights
        # `Weights` caps a count only if its kind is "observed", but this method also caps counts for uniform weights.
        observed = dataclasses.replace(weights, kind="observed")
        return weights.sample_counts.get(client) or observed.capped(client, samples)

    def averaged(self) -> Float[Tensor, " P"]:
        """Return a copy of the average over the model versions as a vector (P,), where P is the number of parameters.

        The method first waits for a running update. If the server was created without `averaging`, the method returns a
        copy of the current model.

        Raises:
            ArgumentError: if the method is called within an update or a journal write.
        """
        self._updates.check_may_wait()
        with self._updates.lock.lock:
            self._updates.notify_average()
            average = None if self._core.averaging is None else self._core.averaging.average
            return self.model if average is None else copy_tensor(average)

    @property
    def version(self) -> int:
        """The version of the model, which is the number of steps that have changed the model so far."""
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
        """The ids of the open tickets that were issued before the server was resumed, with the oldest ticket first.

        A ticket permits a client to return one update.
        """
        return [name for name in self.tickets if name in self._restored_tickets]

    @property
    def history(self) -> list[HistoryRow]:
        """The latest accepted updates as dictionaries, for example for a pandas data frame.

        Each dictionary contains the client, the sample count, the fields of the receipt (the server's answer to the
        update) and the metrics of the rule. The option `ServerLimits.history_size` limits the number of updates in the
        history.
        """
        return [dict(row) for row in self._state.value.history.values()]

    @property
    def rejected(self) -> dict[str, int]:
        """The number of rejected updates for each invalid field."""
        return dict(self._state.value.rejected)

    @property
    def memory(self) -> dict[str, int]:
        """The memory usage of the server in bytes, as a dictionary with these keys:

        - `model`: the current model
        - `state`: the state of the rule, and the buffers of the model
        - `versions`: the older versions of the model in memory
        - `clients`: the client states in memory
        - `spilled`: the older versions and client states that were moved to files
        """
        return self._state.value.memory_usage()

    @no_grad
    def save(self, path: str | Path | None = None) -> None:
        """Write a checkpoint with the complete state of the server, including the average over the model versions.

        The method first waits for a running update. While it writes the file, the server can apply further updates. An
        existing file is replaced atomically.

        If the server has a journal, `save` deletes the records of the changes that the checkpoint contains. However, if
        the server writes automatic checkpoints to another path, `save` keeps all records, because resuming from an
        automatic checkpoint requires them.

        Args:
            path: the path of the file. `None` means the path of the automatic checkpoints. At this path, `save` also
                keeps older files, as `CheckpointPolicy.keep` states.

        Raises:
            ArgumentError: if the folder does not exist, if `path` is `None` for a server without automatic checkpoints,
                if the server was closed, or if the method is called within an update or a journal write.
            CheckpointError: if the file cannot be written, or cannot store a value. Examples of such values are a
                lambda in the rule, and a client whose name is neither a string nor an integer. An existing file is
                unchanged.
            SpillError: if the spill file of a client state was altered.

        Cost: one pass over the complete state.
        """
        self._updates.check_may_wait()
        self._durability.save(path, self._updates.snapshot)

    def snapshot(self) -> ServerSnapshot:
        """Return the content of the checkpoint that `save` would write, as an immutable object.

        Use this method to store the server in your own file, together with other data.

        Raises:
            ArgumentError: if the server was closed, or if the method is called within an update or a journal write.
        """
        self._updates.check_may_wait()
        return self._updates.snapshot()

    def close(self) -> None:
        """Close the server: cancel all tickets, delete the client states, and close all files.

        If an update or the write of a checkpoint is still running, the method waits for it to finish. You can still
        read the model, the receipts and the history of a closed server.

        Raises:
            ArgumentError: if the method is called within an update or a journal write.
            CheckpointError: if the last checkpoint or the journal could not be written. The server is closed
                nevertheless.
        """
        self._updates.check_may_wait()
        try:
            with self._updates.lock.lock:
                try:
                    self._updates.notify_average()
                finally:
                    self._state.update(lambda now: (now.close(), None))
        finally:
            # After an interrupt before this point, the server is still open, and so are its files.
            if self._state.value.is_closed:
                try:
                    self._durability.close()
                finally:
                    self._updates.deliver_events()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Server has locks and tickets in flight: it cannot be copied or pickled; store its `model`")


def _id_of(ticket: str | Ticket) -> str:
    return ticket.id if isinstance(ticket, Ticket) else ticket
