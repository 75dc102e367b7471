"""The checkpoint: a server's record written down, beside its work, and the record that goes on from there."""

import glob
import logging
import platform
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from immutables import Map
from torch import Tensor

from manifoldagg._validation import check_count, check_number
from manifoldagg.errors import ArgumentError, CheckpointError, SpillError
from manifoldagg.federated.buffers import Packed, Waiting, packed, unpacked
from manifoldagg.federated.limits import Checks
from manifoldagg.federated.model_state import Snapshot
from manifoldagg.federated.pytrees import Tree, covers
from manifoldagg.federated.server.durability import tensor_file
from manifoldagg.federated.server.durability.fingerprint import called, describe, difference, path_of
from manifoldagg.federated.server.durability.persistent_map import Ordered
from manifoldagg.federated.server.durability.store import Kept, Key, Store
from manifoldagg.federated.server.events import CheckpointFailed, CheckpointWritten
from manifoldagg.federated.server.lock import Lock
from manifoldagg.federated.server.state import Answer, Books, Open, Row
from manifoldagg.federated.types import Averaging, Receipt, Rule
from manifoldagg.federated.weights import Weights
from manifoldagg.kernels.backends import selection
from manifoldagg.manifolds import Manifold
from manifoldagg.manifolds.manifold import check_is_manifold

__all__ = ["Every", "Moment", "Saved", "Writer", "check_name"]

KIND = "server"
LOG = logging.getLogger("manifoldagg")


@dataclass(frozen=True)
class Every:
    """When a server writes a checkpoint by itself: after so many updates or seconds, whichever comes first.

    Args:
        path: of the file, in a folder that exists; older ones are `path.1`, `path.2`, …
        updates: so many accepted updates after the last one.
        seconds: with the first accepted update so many seconds after the last one.
        keep: how many files are kept.

    Raises:
        ArgumentError: naming what does not fit.

    Example:
        >>> Every("server.checkpoint", updates=100, seconds=600.0).keep
        2
    """

    path: str | Path
    updates: int | None = None
    seconds: float | None = None
    keep: int = 2

    def __post_init__(self) -> None:
        # The process may change its directory before it writes.
        object.__setattr__(self, "path", tensor_file.check_path(self.path))
        if self.updates is None and self.seconds is None:
            raise ArgumentError("updates, seconds: expected at least one of them")
        if self.updates is not None:
            check_count("updates", self.updates)
        if self.seconds is not None:
            check_number("seconds", self.seconds, above=0)
        check_count("keep", self.keep)


@runtime_checkable
class Writable(Protocol):
    """What a checkpoint is made of: nothing in it is ever written, so that it may be written down later."""

    @property
    def updates(self) -> int:
        """How many there were."""

    def write(self, path: str | Path, keep: int, note: Callable[..., None]) -> None:
        """Write it into a file, of which so many are kept, and note the event."""


class Moment(NamedTuple):
    """What a checkpoint is made of. It is taken in no time, as nothing in it is ever written, and written down later.

    Attributes:
        books: the record, of which the average has heard.
        space: of the models.
        rule: that steps.
        options: of the server beside its limits, by the names of its keywords.
        clock: of the server.
        time: in its seconds.
        averaging: the class of what averages, and its state; `None` without one.
        written: called with the place in the journal up to which a checkpoint holds, once it is written.
    """

    books: Books
    space: Manifold
    rule: Rule
    options: Mapping[str, Any]
    clock: Callable[[], float]
    time: float
    averaging: tuple[str, Tree] | None
    written: Callable[[int], None] | None = None

    @property
    def updates(self) -> int:
        """How many were accepted."""
        return self.books.history.count

    def tree(self) -> Tree:
        """All of it in plain values and tensors.

        Raises:
            CheckpointError: naming what of the rule or the space, or what is called, has no name.
            SpillError: if what is kept for a client is in a file that is not what was written.
        """
        books = self.books
        now = books.now
        kept, lost = _kept(books)
        tickets = [(name, *ticket) for name, ticket in books.tickets.items() if ticket.base not in lost]
        return {
            "space": describe("space", self.space),
            "rule": describe("rule", self.rule),
            "machine": _machine(now.current),
            "options": {**books.limits._asdict(), **self.options},
            "clock": called("clock", self.clock),
            "time": self.time,
            "model": now.current,
            "state": now.state,
            "buffers": unpacked(now.buffers),
            "waiting": None if now.waiting is None else {**vars(now.waiting), "latest": unpacked(now.waiting.latest)},
            "version": now.version,
            "norms": now.norms,
            "weights": books.weights.state(),
            "kept": kept,
            "tickets": tickets,
            "answered": [(name, client, dict(vars(receipt))) for name, (client, receipt) in books.answered.items()],
            "history": _table([*books.history.values()]),
            "updates": books.history.count,
            "refused": dict(books.refused),
            "averaging": self.averaging,
            "journal": None if books.log is None else (books.log.name, books.log.changes.count),
        }

    def write(self, path: str | Path, keep: int, note: Callable[..., None]) -> None:
        """Write it into a file, and note the event.

        Raises:
            ArgumentError: if there is no such folder.
            CheckpointError: naming what cannot be saved, or with what the system says.
        """
        begun = time.perf_counter()
        try:
            tensor_file.write(path, KIND, self.tree(), keep=keep)
        except Exception as error:
            note(CheckpointFailed, path=str(path), reason=str(error))
            raise
        seconds = time.perf_counter() - begun
        if self.written is not None and self.books.log is not None:
            self.written(self.books.log.changes.count)
        note(CheckpointWritten, path=str(path), written=self.books.now.version, seconds=seconds)


class Saved:
    """A checkpoint that was read.

    Args:
        path: of the file.
        tree: of a [`Moment`][manifoldagg.federated.server.durability.checkpoint.Moment], where the file holds more than
            that and was read already.

    Raises:
        CheckpointError: if the file is truncated, altered, or no checkpoint of a server; an older one is named.
    """

    def __init__(self, path: str | Path, tree: Tree = None) -> None:
        self.path = path
        self._tree: dict[str, Any] = tensor_file.read(path, KIND) if tree is None else tree
        self.model: Tensor = self._tree["model"]
        self._same = True
        self._goes_on = True

    @property
    def journal(self) -> tuple[str, int] | None:
        """The journal that was written beside it, and the place up to which it holds what is there."""
        told: tuple[str, int] | None = self._tree.get("journal")
        return told

    @property
    def identity(self) -> list[Any]:
        """By which it is told from others of its server."""
        return [self._tree["version"], self._tree["updates"], self._tree["time"]]

    @property
    def time(self) -> float:
        """When it was taken, in seconds of the clock."""
        time: float = self._tree["time"]
        return time

    @property
    def clock(self) -> str | None:
        """What the clock was called."""
        clock: str | None = self._tree["clock"]
        return clock

    def check(self, space: Manifold, rule: Rule, clock: Callable[[], float], *, replace: bool) -> None:
        """That it was of this space, rule and clock. Where bits may differ as the machine does, it warns.

        A rule of the same class goes on with the state of the one that it replaces, another one begins anew.

        Raises:
            CheckpointError: naming where the two differ.
        """
        check_is_manifold(space)
        told = difference("space", self._tree["space"], describe("space", space))
        if told is not None:
            raise CheckpointError(f"{self.path}: {told}")
        was = self._tree["rule"]
        given = describe("rule", rule)
        told = difference("rule", was, given)
        if told is None and not replace:
            told = difference("clock", self._tree["clock"], called("clock", clock))
        if told is not None and not replace:
            raise CheckpointError(f"{self.path}: {told}; with replace=True it takes over")
        self._same = was["class"] == given["class"]
        here = _machine(self.model)
        for name, before in self._tree["machine"].items():
            if before != here[name]:
                warnings.warn(
                    f"{self.path}: {name}: was {before}, is {here[name]} here: the same bits are not promised",
                    RuntimeWarning,
                    stacklevel=3,
                )

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords of the server: those that are given before those that were saved."""
        saved = dict(self._tree["options"])
        saved["checks"] = Checks(**saved["checks"])
        dtype = saved["base_dtype"]
        saved["base_dtype"] = None if dtype is None else getattr(torch, dtype)
        policies = saved.pop("policies")
        if policies:
            saved["carried"] = dict(packed(self._tree["buffers"]))
            # As patterns, whatever is in the names.
            saved["buffers"] = {glob.escape(name): policy for name, policy in policies.items()}
        return {**saved, **given}

    def books(self, fresh: Books, time: float, weights: Any, freed: Callable[[Tensor], object] | None) -> Books:
        """The record.

        Args:
            fresh: of a server that was made of these options and has done nothing yet.
            time: in seconds of the clock. The ages of tickets go on from what they were.
            weights: as given; `None` for what was saved.
            freed: what gets the memory of models that nobody needs any more.

        Raises:
            ArgumentError: if updates wait whose buffers were to be treated otherwise.
        """
        tree = self._tree
        limits = fresh.limits
        self._goes_on = self._same and covers(tree["state"], fresh.now.state)
        now = Snapshot(
            fresh.now.current,
            tree["state"] if self._goes_on else fresh.now.state,
            fresh.now.buffers,
            self._waiting(fresh.now.buffers),
            tree["version"],
            tree["norms"],
        )
        later = time - tree["time"]
        tickets: Ordered[str, Open] = Ordered()
        for name, *fields in tree["tickets"]:
            ticket = Open(*fields)
            tickets = tickets.put(name, ticket._replace(since=ticket.since + later))
        answered: Ordered[str, Answer] = Ordered()
        for name, client, receipt in tree["answered"]:
            answered = answered.put(name, Answer(client, Receipt(**receipt)))
        rows = list(_rows(tree["history"]))
        # Numbered as they were: older ones are gone.
        first = tree["updates"] - len(rows)
        history: Ordered[int, Row] = Ordered(first=first, after=first)
        for row in rows:
            history = history.put(history.count, row)
        return fresh._replace(
            now=now,
            weights=Weights.of_state(tree["weights"], weights, fresh.weights.factor),
            store=self._store(fresh, tickets, freed),
            tickets=tickets,
            answered=answered.latest(limits.retries),
            history=history.latest(limits.history),
            refused=Map(tree["refused"]),
        )

    def load(self, averaging: Averaging | None) -> None:
        """Let what averages go on.

        Raises:
            ArgumentError: if it is not what was saved.
        """
        saved = self._tree["averaging"]
        if saved is None:
            return
        name, state = saved
        if averaging is None or path_of(type(averaging)) != name:
            given = None if averaging is None else path_of(type(averaging))
            raise ArgumentError(f"averaging: expected a {name}, whose state was saved, got {given}")
        averaging.load(state)

    def _waiting(self, buffers: Packed) -> Waiting | None:
        waiting = self._tree["waiting"]
        if waiting is None or not self._goes_on:
            return None
        latest = packed(waiting["latest"])
        if latest.groups != buffers.groups:
            raise ArgumentError("buffers: expected the policies of the updates that wait")
        return Waiting(**{**waiting, "latest": latest})

    def _store(self, fresh: Books, tickets: Mapping[str, Open], freed: Callable[[Tensor], object] | None) -> Store:
        current = ("version", self._tree["version"])
        # The same that the other books have: with the last reference to it, the memory of the model is used again.
        store = Store().held(current, fresh.store.find(fresh.current))
        holders = Counter(ticket.base for ticket in tickets.values())
        for _ in range(holders[current]):
            store = store.held(current)
        for key, tree in self._tree["kept"]:
            if key[0] == "client":
                holders[key] = int(self._goes_on)
            kept = Kept(tree, freed if key[0] == "version" else None)
            for _ in range(holders[key]):
                store = store.held(key, kept)
        return store


class Writer:
    """Writes checkpoints in a thread of its own, one after another, while the server goes on.

    A thread lives as long as there is something to write. What goes wrong is logged, and raised by `finish` unless a
    later checkpoint was written.

    Args:
        every: when, and where to.
        note: notes an event.

    Raises:
        ArgumentError: if `every` does not say so.
    """

    def __init__(self, every: Every, note: Callable[..., None]) -> None:
        if not isinstance(every, Every):
            raise ArgumentError(f"checkpoint: expected Every, got {every!r}")
        self._every = every
        self._note = note
        self.begin(0)
        # What was not begun when the next one came is not written.
        self._next: deque[Writable] = deque(maxlen=1)
        self._idle = True
        self._working = Lock()
        self._error: Exception | None = None

    def begin(self, updates: int) -> None:
        """Count from here on, after so many accepted updates."""
        self._updates = updates
        self._begun = time.monotonic()

    def is_of(self, path: str | Path) -> bool:
        """Whether this is where it writes to."""
        return tensor_file.check_path(path) == tensor_file.check_path(self._every.path)

    def look(self, updates: int, moment: Callable[[], Writable]) -> None:
        """Begin a checkpoint where one is due, after so many accepted updates."""
        if not self._due(updates - self._updates):
            return
        self._next.append(moment())
        self.begin(updates)
        # Who is not idle looks once more after it has said that it is.
        if self._idle:
            try:
                threading.Thread(target=self._work, name="manifoldagg-checkpoint").start()
            except RuntimeError as error:  # the system has no more threads; `finish`, or the next one, writes it
                LOG.error("checkpoint: %s", error)

    def write(self, moment: Writable) -> None:
        """Write a checkpoint now, after what is being written.

        Raises:
            CheckpointError: as `finish`.
        """
        self.put(moment)
        self.finish()

    def put(self, moment: Writable) -> None:
        """Have a checkpoint written next, in place of an earlier one that waits; by `finish`, or by who is writing."""
        self._next.append(moment)
        self.begin(moment.updates)

    def is_mine(self) -> bool:
        """Whether this thread is writing."""
        return self._working.is_mine()

    def finish(self) -> None:
        """Wait until what was begun is written.

        Raises:
            CheckpointError: if the last one could not be written, or whatever else was in its way.
        """
        if self.is_mine():
            return  # from a handler or a finaliser within the writing, which then goes on
        self._work()
        error = self._error
        self._error = None
        if error is not None:
            raise error

    def _due(self, updates: int) -> bool:
        every = self._every
        if every.updates is not None and updates >= every.updates:
            return True
        return updates > 0 and every.seconds is not None and time.monotonic() - self._begun >= every.seconds

    def _work(self) -> None:
        """Write what there is, as the only one."""
        with self._working.lock:
            while True:
                try:
                    moment = self._next.pop()
                except IndexError:
                    if self._idle:
                        return
                    self._idle = True
                    continue
                self._idle = False
                self._write(moment)

    def _write(self, moment: Writable) -> None:
        try:
            moment.write(self._every.path, self._every.keep, self._note)
            self._error = None
        except Exception as error:
            self._error = error
            LOG.error("checkpoint: %s", error)
        except BaseException:
            if not self._next:
                self._next.append(moment)
            raise


def check_name(client: Any) -> None:
    """A name that a file can hold.

    Raises:
        ArgumentError: if it is neither a string nor an integer.
    """
    if type(client) is not str and type(client) is not int:
        raise ArgumentError(f"client: expected a string or an integer, as checkpoints are written; got {client!r}")


def _machine(model: Tensor) -> dict[str, str]:
    """What the bits depend on beside the program."""
    device = model.device
    processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    if device.type == "cuda":
        processor = torch.cuda.get_device_name(device)
    backend = selection.backend_for(device).__name__.rpartition(".")[2]
    return {"backend": backend, "processor": processor, "torch": torch.__version__}


def _kept(books: Books) -> tuple[list[tuple[Key, Tree]], set[Key]]:
    """What is kept beside the model, the longest there first; and which of it is lost, that only tickets name."""
    store = books.store
    kept = []
    lost = set()
    for key in [*(key for key in store.places if key not in store.movable), *store.movable]:
        if key == books.current:
            continue
        try:
            kept.append((key, store.load(key)))
        except SpillError as error:
            if error.temporary or key[0] == "client":
                raise
            # No update can be taken on these tickets any more.
            LOG.warning("checkpoint: without the tickets on %s %s: %s", *key, error)
            lost.add(key)
    return kept, lost


def _table(rows: list[Row]) -> dict[str, Any]:
    """Rows as lines of values; most have the same names, which are written once."""
    heads: dict[tuple[str, ...], int] = {}
    lines = [[heads.setdefault(tuple(row), len(heads)), *row.values()] for row in rows]
    return {"heads": [*heads], "lines": lines}


def _rows(table: Mapping[str, Any]) -> Iterator[Row]:
    for head, *values in table["lines"]:
        yield dict(zip(table["heads"][head], values, strict=True))
