"""Checkpoints: the conversion of the state of a server to the content of a file, and back."""

import glob
import logging
import platform
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from immutables import Map
from torch import Tensor

from manifoldagg import tensor_file
from manifoldagg._validation import short_repr, warn_caller
from manifoldagg.errors import ArgumentError, CheckpointError, SpillError
from manifoldagg.federated.buffers import PackedBuffers, PendingBuffers
from manifoldagg.federated.pytrees import Tree, has_structure
from manifoldagg.federated.server.durability.fingerprint import (
    fingerprint,
    first_difference,
    import_path,
    qualified_name,
    rule_difference,
)
from manifoldagg.federated.server.durability.persistent_map import PersistentOrderedMap
from manifoldagg.federated.server.durability.store import InMemoryTree, Store, StoreKey
from manifoldagg.federated.server.events import CheckpointFailed, CheckpointWritten
from manifoldagg.federated.server.options import InitialModel, MemoryPolicy, ServerLimits
from manifoldagg.federated.server.state import ClosedTicket, HistoryRow, PendingTicket, ServerCore, ServerState
from manifoldagg.federated.step import ModelState
from manifoldagg.federated.types import Averaging, Receipt, Rule
from manifoldagg.federated.weights import Weights
from manifoldagg.kernels.backends import selection
from manifoldagg.manifolds import Manifold
from manifoldagg.manifolds.buffer_policies import BufferPolicy
from manifoldagg.manifolds.manifold import check_is_manifold

__all__ = ["LoadedCheckpoint", "ServerSnapshot", "check_storable_client"]

KIND = "server"
LOG = logging.getLogger("manifoldagg")


class ServerSnapshot(NamedTuple):
    """Immutable content of a checkpoint. The snapshot refers to the state of the server without copying it.

    Attributes:
        core: the space, the rule, the clock and other parts of the server.
        server_state: the state of the server. The average has received all versions up to this state.
        options: the limits, the memory policy and the buffer policies as plain values.
        time: the time of the snapshot, in seconds of the server's clock.
        averaging: the import path of the average's class, and the state of the average. `None` if there is no average.
        on_written: a function that is called after the file was written. Its argument is the log sequence number of the
            first journal record that the checkpoint does not contain.
    """

    core: ServerCore
    server_state: ServerState
    options: Mapping[str, Any]
    time: float
    averaging: tuple[str, Tree] | None
    on_written: Callable[[int], None] | None = None

    @property
    def updates(self) -> int:
        """The number of accepted updates."""
        return self.server_state.history.next_index

    def tree(self) -> Tree:
        """Return the content of the file as a tree of plain values and tensors.

        Raises:
            CheckpointError: if a file cannot store the rule, the space, the clock or the name of a client.
            SpillError: if the spill file of a client state was altered.
        """
        state = self.server_state
        now = state.model_state
        for client in state.weights.reported if set(map(type, state.weights.reported)) - {str, int} else ():
            try:
                check_storable_client(client)
            except ArgumentError as error:
                raise CheckpointError(str(error)) from None
        kept, lost = _stored_trees(state)
        tickets = [(name, *ticket) for name, ticket in state.tickets.items() if ticket.base_key not in lost]
        return {
            "space": fingerprint("space", self.core.space),
            "rule": fingerprint("rule", self.core.rule),
            "machine": _machine_info(now.current),
            "options": self.options,
            "clock": qualified_name("clock", self.core.clock),
            "time": self.time,
            "model": now.current,
            "state": now.state,
            "buffers": now.buffers.tree(),
            "pending_buffers": None if now.pending_buffers is None else now.pending_buffers.tree(),
            "version": now.version,
            "norms": now.norms,
            "weights": state.weights.state(),
            "stored_trees": kept,
            "tickets": tickets,
            "closed_tickets": [
                (name, client, dict(vars(receipt))) for name, (client, receipt) in state.closed_tickets.items()
            ],
            "history": _encode_rows([*state.history.values()]),
            "updates": state.history.next_index,
            "rejected": dict(state.rejected),
            "averaging": self.averaging,
            "journal": None
            if state.pending_log is None
            else (state.pending_log.name, state.pending_log.records.next_index, state.pending_log.chain),
        }

    def write(self, path: str | Path, keep: int, publish: Callable[..., None]) -> None:
        """Write the content of the checkpoint to a file, and publish a `CheckpointWritten` event.

        If the write fails, the method publishes a `CheckpointFailed` event instead, and raises the error.

        Args:
            path: the path of the file.
            keep: the number of files to keep, as in `tensor_file.save`.
            publish: a function that receives the class and the fields of the event.

        Raises:
            CheckpointError: if the file cannot be written, or if it cannot store a value.
        """
        begun = time.perf_counter()
        try:
            tensor_file.save(path, KIND, self.tree(), keep=keep)
        except Exception as error:
            publish(CheckpointFailed, path=str(path), reason=str(error))
            raise
        seconds = time.perf_counter() - begun
        if self.on_written is not None and self.server_state.pending_log is not None:
            self.on_written(self.server_state.pending_log.records.next_index)
        publish(CheckpointWritten, path=str(path), model_version=self.server_state.model_state.version, seconds=seconds)


class LoadedCheckpoint:
    """Content of a checkpoint file.

    Args:
        path: the path of the file.
        tree: the result of `ServerSnapshot.tree`. If you pass it, the file is not read.

    Attributes:
        model: the saved model.
        time: the time of the snapshot, in seconds of the clock.
        buffer_policies: the saved policies of the buffers, by name.
        position: the name of the journal, the log sequence number of the first record after the checkpoint, and the
            chained checksum of all previous records. If the server had no journal, these values are a unique name of
            the checkpoint, 0 and an empty string.

    Raises:
        CheckpointError: if the file is truncated, altered, or not a checkpoint of a server. If an older file exists,
            the message contains its path.
    """

    def __init__(self, path: str | Path, tree: Tree = None) -> None:
        self.path = path
        self._tree: dict[str, Any] = tensor_file.load(path, KIND) if tree is None else tree
        self.model: Tensor = self._tree["model"]
        self.time: float = self._tree["time"]
        self.buffer_policies: dict[str, str] = self._tree["options"]["policies"]
        identity = f"{self._tree['version']}, {self._tree['updates']}, {self.time!r}"
        self.position: tuple[str, int, str] = self._tree.get("journal") or (identity, 0, "")
        self._is_same_rule_class = True
        self._keeps_rule_state = True

    @property
    def limits(self) -> ServerLimits:
        """The saved limits."""
        return ServerLimits.of_tree(self._tree["options"]["limits"])

    @property
    def memory(self) -> MemoryPolicy:
        """The saved memory policy, without the folder of spill files."""
        return MemoryPolicy.of_tree(self._tree["options"]["memory"])

    @property
    def replay_limits(self) -> ServerLimits:
        """The limits for a journal replay: the saved limits, without those on the norm and direction of an update.

        A replay must accept every update that the original run accepted. On another processor, however, different
        rounding may move the norm or the direction of an update just beyond its limit.
        """
        limits = self.limits
        update = replace(
            limits.update,
            # A finite limit still measures norms, because the limits after the replay depend on their median.
            max_norm=sys.float_info.max if limits.update.needs_norms else None,
            norm_factor=None,
            min_cosine=None if limits.update.min_cosine is None else -1.0,
        )
        return replace(limits, update=update)

    def with_replayed(self, tree: dict[str, Any]) -> "LoadedCheckpoint":
        """Return a copy of this checkpoint that contains the state of the server after a journal replay.

        The copy keeps the original clock and options, which the server changes only for the duration of the replay.

        Args:
            tree: the content of a checkpoint of the server after the replay, as `ServerSnapshot.tree` returns it.
        """
        return LoadedCheckpoint(self.path, {**tree, "clock": self._tree["clock"], "options": self._tree["options"]})

    def check_compatible(
        self, space: Manifold, rule: Rule, clock: Callable[[], float], *, replace: bool, label: str = "space"
    ) -> None:
        """Check that the space, the rule and the clock equal the saved ones.

        Args:
            space: the space of the models.
            rule: the aggregation rule.
            clock: the clock.
            replace: whether to accept another rule or clock, as in `Server.resume`.
            label: the caller's name of the argument `space`, for error messages.

        Raises:
            CheckpointError: if a value differs. The message describes the first difference.

        Warns:
            RuntimeWarning: if the backend, the processor or the torch version differs from the saved one.
        """
        check_is_manifold(space)
        difference = first_difference(label, self._tree["space"], fingerprint(label, space))
        if difference is not None:
            raise CheckpointError(f"{self.path}: {difference}")
        saved = self._tree["rule"]
        given = fingerprint("rule", rule)
        difference = rule_difference(saved, given, replace=replace)
        if difference is None and not replace:
            difference = first_difference("clock", self._tree["clock"], qualified_name("clock", clock))
            difference = None if difference is None else f"{difference}; pass replace=True to replace it"
        if difference is not None:
            raise CheckpointError(f"{self.path}: {difference}")
        self._is_same_rule_class = saved["class"] == given["class"]
        here = _machine_info(self.model)
        for name, before in self._tree["machine"].items():
            if before != here[name]:
                warn_caller(
                    f"{self.path}: {name}: was {before}, is {here[name]} here: results may differ bitwise",
                    RuntimeWarning,
                )

    def server_arguments(self, policies: BufferPolicy | None) -> tuple[InitialModel, dict[str, Any]]:
        """Return the arguments with which the constructor of `Server` restores the saved model and options.

        The results are the initial model, and the keyword arguments `limits` and `memory`. `policies` defines how the
        server aggregates the buffers of the model. `None` keeps the saved policies.
        """
        start = InitialModel(self.model)
        if self.buffer_policies:
            # Names are escaped, because they may contain special characters of glob patterns.
            saved = {glob.escape(name): policy for name, policy in self.buffer_policies.items()}
            buffers = dict(PackedBuffers.of_tree(self._tree["buffers"]))
            start = InitialModel(self.model, buffers, saved if policies is None else policies)
        return start, {"limits": self.limits, "memory": self.memory}

    def restore_state(
        self, fresh: ServerState, time: float, weights: Any, on_free: Callable[[Tensor], object] | None
    ) -> ServerState:
        """Return the saved state of the server.

        Args:
            fresh: the state of a new server with the same model and options.
            time: the current time, in seconds of the clock. The method shifts the times of the tickets, so that the
                tickets keep their ages.
            weights: the argument `weights` of the server. `None` means the saved weights.
            on_free: a function that receives the memory of a model after the last reference to the model is deleted.
                `None` if this memory is not reused.
        """
        tree = self._tree
        self._keeps_rule_state = self._is_same_rule_class and has_structure(tree["state"], fresh.model_state.state)
        now = ModelState(
            fresh.model_state.current,
            tree["state"] if self._keeps_rule_state else fresh.model_state.state,
            fresh.model_state.buffers,
            self._pending_buffers(fresh.model_state.buffers),
            tree["version"],
            tree["norms"],
        )
        later = time - tree["time"]
        saved_tickets = [(name, PendingTicket(*fields)) for name, *fields in tree["tickets"]]
        # If the clock was set back before the snapshot, the age is negative. The age then becomes zero.
        tickets = {name: each._replace(issued_at=min(each.issued_at + later, time)) for name, each in saved_tickets}
        closed = [(name, ClosedTicket(client, Receipt(**receipt))) for name, client, receipt in tree["closed_tickets"]]
        # The limits of the new server may be smaller than those of the saved server.
        rows = deque(_decode_rows(tree["history"]), fresh.limits.history_size)
        # The rows keep their numbers, which start above 0 if the server has discarded older rows.
        first = tree["updates"] - len(rows)
        state = fresh._replace(
            model_state=now,
            weights=Weights.of_state(tree["weights"], weights, fresh.weights.cap_factor),
            store=self._restore_store(fresh, tickets, on_free),
            tickets=PersistentOrderedMap.of(tickets.items()),
            closed_tickets=PersistentOrderedMap.of(deque(closed, fresh.limits.receipt_cache_size)),
            history=PersistentOrderedMap.of(enumerate(rows, first), first),
            rejected=Map(tree["rejected"]),
            last_issued_at=time,
        )
        return state.without_stale_versions(state.store.entries)

    def restore_averaging(self, averaging: Averaging | None) -> None:
        """Restore the saved state of the average.

        Raises:
            ArgumentError: if `averaging` is not an instance of the saved class.
        """
        saved = self._tree["averaging"]
        if saved is None:
            return
        name, state = saved
        if averaging is None or import_path(type(averaging)) != name:
            given = None if averaging is None else import_path(type(averaging))
            raise ArgumentError(f"averaging: expected an instance of {name}, as in the checkpoint, got {given}")
        averaging.load(state)

    def _pending_buffers(self, buffers: PackedBuffers) -> PendingBuffers | None:
        tree = self._tree["pending_buffers"]
        if tree is None or not self._keeps_rule_state:
            return None
        pending = PendingBuffers.of_tree(tree)
        if pending.latest.groups != buffers.groups:
            raise ArgumentError(
                "buffer_policy: expected the saved policies, because the buffered updates depend on them"
            )
        return pending

    def _restore_store(
        self, fresh: ServerState, tickets: Mapping[str, PendingTicket], on_free: Callable[[Tensor], object] | None
    ) -> Store:
        current = ("version", self._tree["version"])
        # `fresh` already stores the current model in an object that releases its memory to the free list of the server.
        store = Store().retain(current, fresh.store.find(fresh.current_key))
        holders = Counter(ticket.base_key for ticket in tickets.values())
        for _ in range(holders[current]):
            store = store.retain(current)
        for key, tree in self._tree["stored_trees"]:
            if key[0] == "client":
                holders[key] = int(self._keeps_rule_state)
            kept = InMemoryTree(tree, on_free if key[0] == "version" else None)
            for _ in range(holders[key]):
                store = store.retain(key, kept)
        return store


def check_storable(core: ServerCore, weights: Any) -> None:
    """Check that checkpoints can store the space, the rule, the clock and the names of the known clients.

    A new server calls this function, so that an unsupported value raises an error before training starts.

    Args:
        core: the parts of the server.
        weights: the argument `weights` of the server. If it is a mapping, its keys are the known clients. Otherwise, no
            client is known yet.

    Raises:
        CheckpointError: if a file cannot store the space, the rule or the clock.
        ArgumentError: if the name of a client is neither a string nor an integer.
    """
    fingerprint("space", core.space)
    fingerprint("rule", core.rule)
    for client in weights if isinstance(weights, Mapping) else ():
        check_storable_client(client)
    qualified_name("clock", core.clock)


def check_storable_client(client: Any) -> None:
    """Check that a checkpoint can store the name of a client.

    Raises:
        ArgumentError: if the name is neither a string nor an integer.
    """
    if type(client) is not str and type(client) is not int:
        raise ArgumentError(
            f"client: expected a string or an integer, as a checkpoint stores it, got {short_repr(client)}"
        )


def _machine_info(model: Tensor) -> dict[str, str]:
    """Return the properties of the machine on which the rounding of results depends."""
    device = model.device
    processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    if device.type == "cuda":
        processor = torch.cuda.get_device_name(device)
    backend = selection.backend_for(device).__name__.rpartition(".")[2]
    return {"backend": backend, "processor": processor, "torch": torch.__version__}


def _stored_trees(state: ServerState) -> tuple[list[tuple[StoreKey, Tree]], set[StoreKey]]:
    """Return the stored models and client states, and the keys of unreadable models."""
    store = state.store
    kept = []
    lost = set()
    # The entries that can be moved to files come last, with the oldest first. A restored store has the same order.
    for key in [*(key for key in store.entries if key not in store.evictable), *store.evictable]:
        if key == state.current_key:  # The checkpoint contains the current model separately.
            continue
        try:
            kept.append((key, store.load(key, copy=False)))
        except SpillError as error:
            if error.temporary or key[0] == "client":
                raise
            # The temporary file of this start model was altered. The server rejects all updates for the tickets with
            # this base, so the checkpoint omits the tickets.
            LOG.warning("checkpoint: omits the tickets whose base is %s %s: %s", *key, error)
            lost.add(key)
    return kept, lost


def _encode_rows(rows: list[HistoryRow]) -> dict[str, Any]:
    """Encode the rows of the history as lists of values. Rows with the same columns share the list of column names."""
    heads: dict[tuple[str, ...], int] = {}
    lines = [[heads.setdefault(tuple(row), len(heads)), *row.values()] for row in rows]
    return {"heads": [*heads], "lines": lines}


def _decode_rows(tree: Mapping[str, Any]) -> Iterator[HistoryRow]:
    """Yield the rows that `_encode_rows` has encoded."""
    for head, *values in tree["lines"]:
        yield dict(zip(tree["heads"][head], values, strict=True))
