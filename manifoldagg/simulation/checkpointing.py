"""Checkpoints with the complete state of a simulated run, from which an interrupted run can resume."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from immutables import Map
from torch import Tensor

from manifoldagg import tensor_file
from manifoldagg.errors import ArgumentError, CheckpointError
from manifoldagg.federated import CheckpointPolicy, Message, Rule, Server, Ticket
from manifoldagg.federated.pytrees import Tree, copy_tensor
from manifoldagg.federated.server.durability.checkpoint import LoadedCheckpoint, ServerSnapshot
from manifoldagg.federated.server.durability.checkpoint_writer import CheckpointWriter
from manifoldagg.federated.server.durability.persistent_map import PersistentOrderedMap
from manifoldagg.federated.server.options import check_option
from manifoldagg.federated.types import Averaging, ClientState
from manifoldagg.manifolds import Manifold
from manifoldagg.simulation.client_task import bitwise_equal
from manifoldagg.simulation.cost import Cost, Evaluation, StartEvaluation
from manifoldagg.simulation.dataset import TaskId
from manifoldagg.simulation.evaluation import EvaluationLog
from manifoldagg.simulation.event_loop import DispatchEvent, DropoutEvent, EventLoop
from manifoldagg.simulation.lookahead import Lookahead
from manifoldagg.simulation.metadata import check_compatible
from manifoldagg.simulation.trace import TaskRecord

__all__ = ["EventLog", "LoadedRun", "RunCheckpointer", "RunSnapshot"]

INTERVAL_FACTOR = 20
"""If the interval between checkpoints is in seconds, writing takes at most 1 / `INTERVAL_FACTOR` of the time."""
KIND = "run"


@dataclass
class EventLog:
    """The recorded events of a run. A resumed run replays them to restore the state of its event loop.

    Attributes:
        work: the amount of work of each dispatched task, in order of dispatch.
        trace: the record of each completed task, in order of completion.
        accepted: for each completed task, whether the server accepted its update.
        num_events: the total number of dispatches, completions and dropouts.
    """

    work: list[float] = field(default_factory=list)
    trace: list[TaskRecord[int]] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)
    num_events: int = 0


class RunSnapshot(NamedTuple):
    """The complete state of a run between two events.

    Taking a snapshot requires constant time, because a snapshot references the data of the run instead of copying them.
    The references stay valid, because the run replaces its objects or appends to its logs, but never changes existing
    entries. The fields `num_events`, `num_dispatched`, `num_evaluations` and `num_starts` count the log entries that
    belong to the snapshot. The run may append further entries later.
    """

    metadata: Mapping[str, Any]
    server: ServerSnapshot
    tickets: PersistentOrderedMap[TaskId, Ticket]
    client_states: Map[int, ClientState]
    cost: Cost
    event_log: EventLog
    num_events: int
    num_dispatched: int
    evaluation_log: EvaluationLog
    num_evaluations: int
    num_starts: int
    client_accuracy: list[float]
    seconds: float
    evaluation_seconds: float

    @property
    def updates(self) -> int:
        """The number of updates that the server has received."""
        return self.cost.updates

    def tree(self) -> Tree:
        """Convert the snapshot to a tree of plain values and tensors.

        Raises:
            CheckpointError: if a part of the rule cannot be identified by name, such as a lambda.
        """
        server = self.server.tree()
        pool = _TensorPool(_models_by_version(server))
        answers = self.cost.updates
        trace = self.event_log.trace[:answers]
        return {
            "metadata": dict(self.metadata),
            "server": server,
            "tickets": [
                (*key, ticket.id, ticket.version, pool.encode_message(ticket.version, ticket.message))
                for key, ticket in self.tickets.items()
            ],
            "tensors": pool.tensors,
            "client_states": dict(self.client_states),
            "cost": asdict(self.cost),
            "num_events": self.num_events,
            "work": torch.tensor(self.event_log.work[: self.num_dispatched], dtype=torch.float64),
            "clients": torch.tensor([task.client for task in trace], dtype=torch.int64),
            "times": torch.tensor([task.finished for task in trace], dtype=torch.float64),
            "staleness": torch.tensor([task.staleness for task in trace], dtype=torch.int64),
            "accepted": torch.tensor(self.event_log.accepted[:answers], dtype=torch.bool),
            "evaluations": [asdict(row) for row in self.evaluation_log.evaluations[: self.num_evaluations]],
            "starts": [asdict(row) for row in self.evaluation_log.starts[: self.num_starts]],
            "client_accuracy": self.client_accuracy,
            "seconds": self.seconds,
            "evaluation_seconds": self.evaluation_seconds,
        }

    def write(self, path: str | Path, keep: int, note: Callable[..., None]) -> None:
        """Write the snapshot to a file, and pass the duration in seconds to `note`.

        Raises:
            CheckpointError: if the file cannot be written, or for the same reason as in `tree`.
        """
        begun = time.perf_counter()
        tensor_file.save(path, KIND, self.tree(), keep=keep)
        note(seconds=time.perf_counter() - begun)


class LoadedRun:
    """A checkpoint of a run that was read from a file.

    Args:
        path: the path of the file.
        metadata: all settings of the run that resumes. They must be equal to the settings in the file.

    Raises:
        CheckpointError: if the file is damaged, is not a checkpoint of a run, or belongs to another run. In the last
            case, the message contains the first difference.
    """

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self._path = path
        self._tree: dict[str, Any] = tensor_file.load(path, KIND)
        check_compatible(path, self._tree["metadata"], metadata)
        self.cost = Cost(**self._tree["cost"])
        self.evaluations = [Evaluation(**row) for row in self._tree["evaluations"]]
        # A checkpoint of an earlier version has no start models.
        self.starts = [StartEvaluation(**row) for row in self._tree.get("starts", ())]
        self.client_accuracy: list[float] = self._tree["client_accuracy"]
        self.seconds: float = self._tree["seconds"]
        self.evaluation_seconds: float = self._tree["evaluation_seconds"]

    def server(self, space: Manifold, rule: Rule, averaging: Averaging | None) -> Server:
        """Restore the server and its weight average.

        Raises:
            CheckpointError: if the space or the rule differs from that of the saved run.
        """
        return Server.resume(LoadedCheckpoint(self._path, self._tree["server"]), space, rule, averaging=averaging)

    def client_states(self) -> Map[int, ClientState]:
        """Return the saved client states, by client."""
        return Map(self._tree["client_states"])

    def tickets(self, space: Manifold) -> PersistentOrderedMap[TaskId, Ticket]:
        """Return the tickets of the tasks that were in flight, in order of dispatch."""
        models = _models_by_version(self._tree["server"])
        # The messages need copies, because the server overwrites models that it no longer references.
        own: dict[int, Tensor] = {}
        out: PersistentOrderedMap[TaskId, Ticket] = PersistentOrderedMap()
        for client, nth, name, version, (start, tensors, numbers, buffers, asked) in self._tree["tickets"]:
            if start is None and version not in own:
                own[version] = copy_tensor(models[version])
            message = Message(
                own[version] if start is None else self._tree["tensors"][start],
                {name: self._tree["tensors"][place] for name, place in tensors.items()},
                numbers,
                {name: self._tree["tensors"][place] for name, place in buffers.items()},
                asked,
                version,
            )
            out = out.set(TaskId(client, nth), Ticket(name, version, message, space))
        return out

    def replay(self, event_loop: EventLoop, lookahead: Lookahead) -> EventLog:
        """Replay the saved events on a new event loop and its lookahead.

        Raises:
            CheckpointError: if the events differ from those of the saved run.
        """
        tree = self._tree
        given = deque(tree["work"].tolist())
        answers = deque(
            zip(*(tree[name].tolist() for name in ("clients", "times", "staleness", "accepted")), strict=True)
        )
        ledger = EventLog(num_events=tree["num_events"])
        out: set[TaskId] = set()
        try:
            for _ in range(ledger.num_events):
                event = event_loop.next()
                if isinstance(event, DispatchEvent):
                    work = given.popleft()
                    ledger.work.append(work)
                    key = event_loop.submit(event.client, work)
                    lookahead.on_dispatch(key, work)
                    out.add(key)
                elif isinstance(event, DropoutEvent):
                    lookahead.on_dropout(event.task_ids)
                    out.difference_update(event.task_ids)
                else:
                    client, finished, late, accepted = answers.popleft()
                    if (event.task_id.client, event.completion.time) != (client, finished):
                        raise ArgumentError(
                            f"update {len(ledger.trace) + 1}: expected client {client} at {finished:g} s, got "
                            f"client {event.task_id.client} at {event.completion.time:g} s"
                        )
                    ledger.trace.append(TaskRecord.from_completion(event.completion, late))
                    ledger.accepted.append(accepted)
                    event_loop.acknowledge(accepted)
                    lookahead.on_completion(event.task_id, accepted)
                    out.remove(event.task_id)
            if given or answers or out != {TaskId(client, nth) for client, nth, *_ in tree["tickets"]}:
                raise ArgumentError("the tasks are dispatched to other clients")
        except (ArgumentError, IndexError) as error:
            raise CheckpointError(
                f"{self._path}: the scheduler or the availability differs from the saved run: {error}"
            ) from error
        return ledger


class _TensorPool:
    """The distinct tensors of all messages, except for models that the server stores."""

    def __init__(self, models: Mapping[int, Tensor]) -> None:
        self._models = models
        self.tensors: list[Tensor] = []
        self._indices: dict[int, int] = {}
        self._start_is_model: dict[int, bool] = {}

    def encode_message(self, version: int, message: Message) -> Tree:
        """Encode a message for a client. Each tensor is replaced by its index in `tensors`."""
        start = message.start
        # Usually, the client starts from the server's model of this version. The checkpoint contains this model anyway,
        # so the start model is encoded as `None`.
        if id(start) not in self._start_is_model:
            self._start_is_model[id(start)] = bitwise_equal(self._models[version], start)
        return (
            None if self._start_is_model[id(start)] else self._index(start),
            {name: self._index(tensor) for name, tensor in message.tensors.items()},
            dict(message.numbers),
            {name: self._index(tensor) for name, tensor in message.buffers.items()},
            message.requested_buffers,
        )

    def _index(self, tensor: Tensor) -> int:
        place = self._indices.setdefault(id(tensor), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(tensor)
        return place


def _models_by_version(server: Mapping[str, Any]) -> dict[int, Tensor]:
    """Return the stored models of a server, by version."""
    kept = {key[1]: tree for key, tree in server["stored_trees"] if key[0] == "version"}
    return {**kept, server["version"]: server["model"]}


class RunCheckpointer:
    """A context manager that writes checkpoints of a run at regular intervals.

    If an exception ends the `with` block, the context manager writes a final checkpoint.

    Args:
        policy: the interval and the path of the checkpoints. `None` disables checkpoints.
        num_updates: the number of updates at the start.
    """

    def __init__(self, policy: CheckpointPolicy | None, num_updates: int) -> None:
        self._policy = policy
        self._writer = (
            None
            if policy is None
            else CheckpointWriter(check_option("checkpoint", policy, CheckpointPolicy), self._on_written)
        )
        self._write_seconds = 0.0
        self._last_write = time.monotonic()
        self._snapshot: RunSnapshot | None = None
        if self._writer is not None:
            self._writer.reset(num_updates)

    def maybe_write(self, take_snapshot: Callable[[], RunSnapshot]) -> None:
        """Write a snapshot between two events if one is due."""
        if self._writer is None or self._policy is None:
            return
        self._snapshot = latest = take_snapshot()
        patient = (
            self._policy.every_updates is None
            and time.monotonic() - self._last_write < INTERVAL_FACTOR * self._write_seconds
        )
        if not patient:
            self._writer.maybe_write(latest.updates, lambda: latest)

    def __enter__(self) -> "RunCheckpointer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is None:
            return
        try:
            if error is None or self._snapshot is None:
                self._writer.finish()
            else:
                self._writer.write(self._snapshot)
        except CheckpointError as failed:
            # The result of the run, or the exception that ended it, takes precedence over this error.
            if error is not None:
                error.add_note(f"checkpoint: {failed}")

    def _on_written(self, *, seconds: float) -> None:
        self._write_seconds = seconds
        self._last_write = time.monotonic()
