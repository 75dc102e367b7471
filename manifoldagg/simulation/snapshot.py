"""The stand of a run: all that it needs to go on, taken between two events, written down beside its work."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from immutables import Map
from torch import Tensor

from manifoldagg.errors import ArgumentError, CheckpointError
from manifoldagg.federated import Message, Rule, Server, Ticket
from manifoldagg.federated.pytrees import Tree, copy_tensor
from manifoldagg.federated.server.durability import tensor_file
from manifoldagg.federated.server.durability.checkpoint import LoadedCheckpoint, ServerSnapshot
from manifoldagg.federated.server.durability.persistent_map import PersistentOrderedMap
from manifoldagg.federated.types import ClientState
from manifoldagg.manifolds import Manifold
from manifoldagg.simulation.cost import Evaluation, Spent
from manifoldagg.simulation.evaluation import Marks
from manifoldagg.simulation.event_loop import Ask, Course, Lost
from manifoldagg.simulation.federated_dataset import Key
from manifoldagg.simulation.in_flight import same_bits
from manifoldagg.simulation.lookahead import Foresight
from manifoldagg.simulation.run_metadata import check_same
from manifoldagg.simulation.trace import Record

__all__ = ["Halt", "Ledger", "Stand"]

KIND = "run"


@dataclass
class Ledger:
    """What happened in the course of a run: with the seed, all that the course follows from.

    Attributes:
        work: of each task that was given.
        trace: the task of each answer.
        accepted: whether its update was.
        events: of all kinds.
    """

    work: list[float] = field(default_factory=list)
    trace: list[Record[int]] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)
    events: int = 0


class Stand(NamedTuple):
    """Where a run stands between two events. It is taken in no time: what it refers to is replaced, or only grows.

    Attributes:
        about: what the run follows from.
        server: all that it knows.
        out: the tickets that are out.
        memories: by client, what its last answer left with it.
        spent: so far.
        ledger: of which what came later does not count,
        events: nor these,
        asked: nor tasks.
        marks: likewise,
        evaluated: so many.
        by_client: accuracies of the best model.
        seconds: of wall-clock time, evaluation apart.
        evaluation_seconds: likewise, of evaluation.
    """

    about: Mapping[str, Any]
    server: ServerSnapshot
    out: PersistentOrderedMap[Key, Ticket]
    memories: Map[int, ClientState]
    spent: Spent
    ledger: Ledger
    events: int
    asked: int
    marks: Marks
    evaluated: int
    by_client: list[float]
    seconds: float
    evaluation_seconds: float

    @property
    def updates(self) -> int:
        """How many answers there were."""
        return self.spent.round

    def tree(self) -> Tree:
        """All of it in plain values and tensors.

        Raises:
            CheckpointError: naming what of the rule has no name.
        """
        server = self.server.tree()
        pool = _Pool(_models(server))
        answers = self.spent.round
        trace = self.ledger.trace[:answers]
        return {
            "about": dict(self.about),
            "server": server,
            "out": [
                (*key, ticket.id, ticket.version, pool.message(ticket.version, ticket.message))
                for key, ticket in self.out.items()
            ],
            "tensors": pool.tensors,
            "memories": dict(self.memories),
            "spent": asdict(self.spent),
            "events": self.events,
            "work": torch.tensor(self.ledger.work[: self.asked], dtype=torch.float64),
            "clients": torch.tensor([task.client for task in trace], dtype=torch.int64),
            "times": torch.tensor([task.finished for task in trace], dtype=torch.float64),
            "staleness": torch.tensor([task.staleness for task in trace], dtype=torch.int64),
            "accepted": torch.tensor(self.ledger.accepted[:answers], dtype=torch.bool),
            "rows": [asdict(row) for row in self.marks.rows[: self.evaluated]],
            "by_client": self.by_client,
            "seconds": self.seconds,
            "evaluation_seconds": self.evaluation_seconds,
        }

    def write(self, path: str | Path, keep: int, note: Callable[..., None]) -> None:
        """Write it into a file, and note how long that took.

        Raises:
            CheckpointError: naming what cannot be saved, or with what the system says.
        """
        begun = time.perf_counter()
        tensor_file.save(path, KIND, self.tree(), keep=keep)
        note(seconds=time.perf_counter() - begun)


class Halt:
    """Where a run stopped, as it was read.

    Args:
        path: of the file.
        about: what the run that is to go on follows from.

    Attributes:
        spent: by then.
        rows: of the evaluations.
        by_client: accuracies of the best model.
        seconds: of wall-clock time, evaluation apart.
        evaluation_seconds: likewise, of evaluation.

    Raises:
        CheckpointError: if the file is truncated, altered or none of a run, or of another one, naming the difference.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._path = path
        self._tree: dict[str, Any] = tensor_file.load(path, KIND)
        check_same(path, self._tree["about"], about)
        self.spent = Spent(**self._tree["spent"])
        self.rows = [Evaluation(**row) for row in self._tree["rows"]]
        self.by_client: list[float] = self._tree["by_client"]
        self.seconds: float = self._tree["seconds"]
        self.evaluation_seconds: float = self._tree["evaluation_seconds"]

    def server(self, space: Manifold, rule: Rule) -> Server:
        """As it was.

        Raises:
            CheckpointError: if space or rule are others, naming the first difference.
        """
        return Server.resume(LoadedCheckpoint(self._path, self._tree["server"]), space, rule)

    def memories(self) -> Map[int, ClientState]:
        """What clients had kept for themselves."""
        return Map(self._tree["memories"])

    def out(self, space: Manifold) -> PersistentOrderedMap[Key, Ticket]:
        """The tickets that were out, in order."""
        models = _models(self._tree["server"])
        # The server writes a model that nobody needs any more.
        own: dict[int, Tensor] = {}
        out: PersistentOrderedMap[Key, Ticket] = PersistentOrderedMap()
        for client, nth, name, version, (start, tensors, numbers, buffers, asked) in self._tree["out"]:
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
            out = out.set(Key(client, nth), Ticket(name, version, message, space))
        return out

    def replay(self, course: Course, foresight: Foresight) -> Ledger:
        """Let a course at its beginning, and what looks ahead on it, come to where the run was.

        Raises:
            CheckpointError: if it goes otherwise than it went.
        """
        tree = self._tree
        given = deque(tree["work"].tolist())
        answers = deque(
            zip(*(tree[name].tolist() for name in ("clients", "times", "staleness", "accepted")), strict=True)
        )
        ledger = Ledger(events=tree["events"])
        out: set[Key] = set()
        try:
            for _ in range(ledger.events):
                event = course.next()
                if isinstance(event, Ask):
                    work = given.popleft()
                    ledger.work.append(work)
                    key = course.give(event.client, work)
                    foresight.gave(key, work)
                    out.add(key)
                elif isinstance(event, Lost):
                    foresight.lost(event.keys)
                    out.difference_update(event.keys)
                else:
                    client, finished, late, accepted = answers.popleft()
                    if (event.key.client, event.done.time) != (client, finished):
                        raise ArgumentError(
                            f"answer {len(ledger.trace) + 1} was of client {client} at {finished:g} s, and is now of "
                            f"{event.key.client} at {event.done.time:g} s"
                        )
                    ledger.trace.append(Record.of(event.done, late))
                    ledger.accepted.append(accepted)
                    course.settle(accepted)
                    foresight.settled(event.key, accepted)
                    out.remove(event.key)
            if given or answers or out != {Key(client, nth) for client, nth, *_ in tree["out"]}:
                raise ArgumentError("other clients are asked")
        except (ArgumentError, IndexError) as error:
            raise CheckpointError(
                f"{self._path}: the scheduler or the participation goes otherwise than before: {error}"
            ) from error
        return ledger


class _Pool:
    """Tensors of messages, each written once, however many refer to it; and none that the server keeps.

    Args:
        models: of the server, by version.
    """

    def __init__(self, models: Mapping[int, Tensor]) -> None:
        self._models = models
        self.tensors: list[Tensor] = []
        self._places: dict[int, int] = {}
        self._starts: dict[int, bool] = {}

    def message(self, version: int, message: Message) -> Tree:
        """A message in plain values; its start is none where it is the server's model of that version."""
        start = message.start
        if id(start) not in self._starts:
            self._starts[id(start)] = same_bits(self._models[version], start)
        return (
            None if self._starts[id(start)] else self._place(start),
            {name: self._place(tensor) for name, tensor in message.tensors.items()},
            dict(message.numbers),
            {name: self._place(tensor) for name, tensor in message.buffers.items()},
            message.requested_buffers,
        )

    def _place(self, tensor: Tensor) -> int:
        place = self._places.setdefault(id(tensor), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(tensor)
        return place


def _models(server: Mapping[str, Any]) -> dict[int, Tensor]:
    """The models that a server has written down, by version."""
    kept = {key[1]: tree for key, tree in server["kept"] if key[0] == "version"}
    return {**kept, server["version"]: server["model"]}
