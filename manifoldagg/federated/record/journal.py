"""The journal: what a server takes, appended to a file as it happens, and the record that goes on from there.

A journal is a line of files, `path.0.journal` and so on, each called by the number of its first change. A file begins
with an archive, which is there whole or not at all: the name of the journal, a mark that nobody can guess and, where no
checkpoint holds it, the whole record. Then come changes in frames: the mark, the number, how many changes were on the
disk when it was written, the lengths of what follows, a checksum; what the change depends on as JSON; the payload of an
update as an archive with a checksum of its own. Nothing in a file is ever executed.

What is bad at the end, and of which no later frame says that it was on the disk, was being written when the machine
stopped, and is cut. Anything else that is bad was altered.

Who has a journal holds a lock on `path.lock`, which is never replaced, from before it looks for files until it is
closed.
"""

import json
import logging
import math
import mmap
import os
import struct
import sys
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from immutables import Map
from torch import Tensor

from manifoldagg.errors import ArgumentError, CheckpointError, ManifoldAggError, check_choice, check_count
from manifoldagg.federated.contract import Payload, Receipt
from manifoldagg.federated.lock import Lock
from manifoldagg.federated.record import archive
from manifoldagg.federated.record.books import Books, Change, Log, Open
from manifoldagg.federated.record.checkpoint import Saved
from manifoldagg.federated.record.format import decoded, encoded
from manifoldagg.federated.record.persistent import Atomic, Ordered
from manifoldagg.federated.record.store import Kept
from manifoldagg.federated.trees import Tree

if sys.platform != "win32":
    import fcntl

__all__ = ["UNSAID", "Appender", "Hold", "Journal", "Living", "Story", "packed", "recovered"]

KIND = "journal"
PAYLOAD = "payload"
SUFFIX = ".journal"
SYNCS = ("always", "batch")
UNSAID = object()
"""Stands for a journal of which nothing was said, which is not to be without one."""
HEAD = struct.Struct("<8sQQQQL")
"""Of a frame: mark, number, how many were on the disk, bytes of JSON, bytes of the payload, checksum but of these."""
FIELDS = ("points", "samples", "tensors", "numbers", "buffers", "base")
LOG = logging.getLogger("manifoldagg")


@dataclass(frozen=True)
class Journal:
    """Where a server appends what it takes, and when that is brought to the disk.

    Args:
        path: of the files, `path.0.journal` and so on, in a folder that exists.
        fsync: `"always"`: before a call returns what it has changed is on the disk; calls of several threads share a
            sync. `"batch"`: it is with the system, and outlives the process; with the machine up to `every` of the
            latest changes may be lost (tickets that were issued, dropped or ended, and updates).
        every: so many changes are brought to the disk together, with `"batch"`.

    Raises:
        ArgumentError: naming what does not fit.

    Example:
        >>> Journal("server", fsync="batch", every=1000).fsync
        'batch'
    """

    path: str | Path
    fsync: str = "always"
    every: int = 100

    def __post_init__(self) -> None:
        # The process may change its directory before it writes.
        object.__setattr__(self, "path", archive.check_path(self.path))
        check_choice("fsync", self.fsync, SYNCS)
        check_count("every", self.every)

    @classmethod
    def of(cls, given: Any) -> "Journal":
        """What is given as `journal`: a path, or one of these.

        Raises:
            ArgumentError: if it is neither.
        """
        if isinstance(given, str | Path):
            return cls(given)
        if not isinstance(given, Journal):
            raise ArgumentError(f"journal: expected a path or a Journal, got {given!r}")
        return given

    def file(self, first: int) -> Path:
        """Of the changes from a number on."""
        place = Path(self.path)
        return place.with_name(f"{place.name}.{first}{SUFFIX}")

    def files(self) -> list[int]:
        """The first numbers of the files that there are, in order.

        Raises:
            CheckpointError: if the folder cannot be read.
        """
        place = Path(self.path)
        begin = f"{place.name}."
        try:
            names = os.listdir(place.parent)
        except OSError as error:
            raise _unreadable(place.parent, error) from error
        found = (name[len(begin) : -len(SUFFIX)] for name in names if name.startswith(begin) and name.endswith(SUFFIX))
        return sorted(int(number) for number in found if number.isdecimal())


class Hold:
    """A journal that nobody else has, until it is closed.

    Args:
        journal: which.

    Raises:
        CheckpointError: if another server has it, or with what the system says.
    """

    def __init__(self, journal: Journal) -> None:
        place = Path(journal.path)
        lock = place.with_name(f"{place.name}.lock")
        try:
            file = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise CheckpointError(f"{lock}: cannot be opened: {error.strerror or error}") from error
        self.close = weakref.finalize(self, _closed, file)
        self.file = file
        try:
            _claim(file, place)
        except BaseException:
            self.close()
            raise


class _At(NamedTuple):
    """Where an appender is: in which file, what its first number is, its end, the next number, how many are on disk."""

    file: int
    mark: bytes
    first: int
    end: int
    number: int
    synced: int


class Appender:
    """Appends what the books have entered, in the order in which it took effect.

    A change is entered with what it changes, in the same instant, and leaves when it is written: whatever goes wrong in
    between, it is written again to the same place of the file. Who writes does it for all whose changes wait.

    Args:
        journal: where to, and how.
        books: of the server.
        name: of the journal.
        hold: of the journal, closed with this.

    Cost: of a change, its bytes written once; with `"always"` a sync, which those share that come meanwhile.
    """

    def __init__(self, journal: Journal, books: Atomic[Books], name: str, hold: Hold) -> None:
        self.journal = journal
        self.name = name
        self._hold = hold
        self._books = books
        self._lock = Lock()
        self._failed = False
        self._lost = False
        self._at: _At | None = None
        self._close: Callable[[], object] = int

    def begin(self, first: int, moment: Tree = None, after: list[Any] | None = None) -> None:
        """Go on in a new file.

        Args:
            first: number of its first change.
            moment: the whole record before it; `None` where a checkpoint holds that.
            after: what the record went on from, if that was not of this journal.

        Raises:
            CheckpointError: naming what cannot be saved, or with what the system says.
        """
        mark = os.urandom(8)
        place = self.journal.file(first)
        archive.write(place, KIND, {"name": self.name, "mark": mark, "first": first, "moment": moment, "after": after})
        try:
            file = os.open(place, os.O_RDWR)
        except OSError as error:
            raise CheckpointError(f"{place}: cannot be opened: {error.strerror or error}") from error
        close = weakref.finalize(self, _closed, file)
        try:
            at = _At(file, mark, first, os.lseek(file, 0, os.SEEK_END), first, first)
        except BaseException as error:
            close()
            if isinstance(error, OSError):
                raise CheckpointError(f"{place}: cannot be opened: {error.strerror or error}") from error
            raise
        before = self._close
        self._at = at
        self._close = close
        self._lost = False
        before()

    def log(self, number: int) -> Log:
        """What it has still to be told, from a number on: nothing yet."""
        return Log(self.name, Ordered(first=number, after=number), self._books.value.refused)

    def is_mine(self) -> bool:
        """Whether this thread is writing."""
        return self._lock.is_mine()

    def check(self) -> None:
        """That what was entered before could be written; where it could not it is tried again.

        Raises:
            CheckpointError: if it cannot be. Nothing more should be entered then.
        """
        if self._failed:
            self.write()

    def write(self) -> None:
        """Write what was entered. Who comes from within the writing leaves it to that.

        Raises:
            CheckpointError: with what the system says. What was entered stays, and is written with the next call.
        """
        log = self._books.value.log
        if log is None or not (log.changes or self._failed) or self.is_mine():
            return
        with self._lock.lock:
            self._trying(self._write)

    def cut(self, place: int) -> None:
        """Go on in a new file, as a checkpoint holds all changes before a place, and remove older files."""
        with self._lock.lock:
            at = self._at
            try:
                if at is not None and at.number > at.first and (not self._lost or place >= at.number):
                    if not self._lost:
                        self._trying(self._sync)
                    self._renew(at)
                self.clear(place)
            except CheckpointError as error:  # the checkpoint is there, and so are the changes
                LOG.error("%s", error)

    def clear(self, place: int) -> None:
        """Remove the files that have no change from a place on."""
        files = self.journal.files()
        for first, after in pairwise(files):
            if after <= place:
                with suppress(OSError):
                    os.unlink(self.journal.file(first))

    def close(self) -> None:
        """Write what was entered, bring it to the disk, and write nothing any more.

        Raises:
            CheckpointError: with what the system says. It is closed then too.
        """
        with self._lock.lock:
            try:
                if self._at is not None:
                    self._trying(self._write)
                    self._trying(self._sync)
            finally:
                self._at = None
                self._close()
                self._hold.close()

    def _renew(self, at: _At) -> None:
        """Go on in a new file, or in the older one: then one that says otherwise must not be there."""
        try:
            self.begin(at.number)
        except BaseException:
            if self._at is at:
                try:
                    os.unlink(self.journal.file(at.number))
                except FileNotFoundError:
                    pass
                except OSError:
                    self._lost = self._failed = True
            raise

    def _trying(self, act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:
            self._failed = True
            if not isinstance(error, OSError):
                raise
            told = f"journal: {self.journal.path}: could not be written: {error.strerror or error}"
            LOG.error("%s", told)
            raise CheckpointError(told) from error
        self._failed = False

    def _write(self) -> None:
        at = self._at
        log = self._books.value.log
        if at is None or log is None:
            return
        if self._lost:
            raise OSError("what was written may be lost; a checkpoint begins a new file")
        changes = [log.changes[number] for number in log.changes if number >= at.number]
        end = at.end
        os.lseek(at.file, end, os.SEEK_SET)
        for number, change in enumerate(changes, at.number):
            for part in _frame(at, number, change):
                end += len(part)
                _written(at.file, part)
        after = at._replace(end=end, number=at.number + len(changes))
        if self.journal.fsync == "always":
            os.fsync(at.file)
            after = after._replace(synced=after.number)
        self._at = after
        self._books.update(lambda now: (now.logged(after.number), None))
        if after.number - after.synced >= self.journal.every:
            self._sync()

    def _sync(self) -> None:
        """Bring to the disk what is written."""
        at = self._at
        if at is None or at.synced == at.number:
            return
        try:
            os.fsync(at.file)
        except OSError:
            # The system may have dropped what it could not write, and would not say so again.
            self._lost = True
            raise
        self._at = at._replace(synced=at.number)


class Told(NamedTuple):
    """A change that is in a file: its number, what it was, and where its payload lies."""

    number: int
    kind: str
    content: dict[str, Any]
    path: Path
    place: int
    length: int


class Story:
    """What a journal tells beyond what a checkpoint holds.

    Attributes:
        name: of the journal.
        number: of the next change.
        time: of the last one, in seconds of the clock.
        after: what the journal goes on from, where that is not of this journal.
    """

    def __init__(self, name: str, number: int, time: float, after: list[Any] | None = None) -> None:
        self.name = name
        self.number = number
        self.time = time
        self.after = after
        self.told: list[Told] = []
        self._vouched = 0

    def now(self) -> float:
        """The clock of who lives through it."""
        return self.time

    def read(self, journal: Journal) -> None:
        """Find the changes from `number` on.

        Raises:
            CheckpointError: naming a change that is missing, or a file that was altered.
        """
        files = journal.files()
        begun = [first for first in files if first <= self.number]
        if not begun:
            raise CheckpointError(
                f"{journal.path}: begins with change {files[0]}, and the checkpoint holds what was before "
                f"{self.number}: it is an older one"
            )
        files = [first for first in files if first >= begun[-1]]
        for first, after in zip(files, [*files[1:], None], strict=True):
            found, vouched = _indexed(journal.file(first), first)
            self._vouched = vouched if after is None else after
            self.told += [told for told in found if told.number >= self.number + len(self.told)]
            last = found[-1].number + 1 if found else first
            if last < self._vouched and self._vouched > self.number:
                raise _altered(journal.file(first), last)

    def live(self, server: "Living") -> None:
        """Let a server go through all of it once more.

        Raises:
            CheckpointError: naming the change that was altered, or that the rule does not take any more.

        Warns:
            RuntimeWarning: if a receipt is another than that which was given.
        """
        wanted = {told.content["open"][1]: told.number for told in self.told if told.kind == "dispatched"}
        models: dict[int, Kept] = {}
        warned = False
        for told in self.told:
            content = told.content
            if told.kind == "accepted":
                try:
                    payload = _payload(told)
                except OSError as error:  # what is there may be sound
                    raise _unreadable(told.path, error) from error
                except CheckpointError as error:
                    if told.number < self._vouched:
                        raise _altered(told.path, told.number) from error
                    LOG.warning("%s: cut before change %d, which was being written", told.path, told.number)
                    break
                books = server.books.value
                version = books.now.version
                if wanted.get(version, -1) > told.number:
                    current = books.store.find(books.current)
                    assert isinstance(current, Kept)
                    models[version] = current
                try:
                    receipt = server.take(payload, content)
                except ManifoldAggError as error:
                    raise CheckpointError(f"{told.path}: change {told.number}: {error}") from error
                if not warned and repr(dict(vars(receipt))) != repr(content["receipt"]):
                    warned = True
                    warnings.warn(
                        f"{told.path}: change {told.number}: its receipt was {Receipt(**content['receipt'])}, "
                        f"and is {receipt} now: the rule does not repeat itself here",
                        RuntimeWarning,
                        stacklevel=4,
                    )
            else:
                _relive(server, told, models)
            if "refused" in content:
                server.books.update(partial(_refused, Map(content["refused"])))
            models = {version: kept for version, kept in models.items() if wanted[version] > told.number}
            self.number = told.number + 1
            time = content.get("time", content["open"][3] if told.kind == "dispatched" else math.nan)
            self.time = self.time if math.isnan(time) else max(self.time, time)


class Living(NamedTuple):
    """What of a server lives through a story.

    Attributes:
        books: of the server.
        take: takes an update as it was taken.
        narrow: rounds a model to what is kept of it for clients.
    """

    books: Atomic[Books]
    take: Callable[[Payload, dict[str, Any]], Receipt]
    narrow: Callable[[Tensor], Tensor | None]


def recovered(path: str | Path | Saved, journal: Journal | None, *, unsaid: bool = False) -> tuple[Saved, Story | None]:
    """The latest whole record that there is, and what the journal tells beyond it; `None` without a journal.

    Args:
        path: of a checkpoint, which need not be there yet where the journal begins with the record; or what was read.
        journal: which its caller holds, or `None` to go on without one.
        unsaid: whether nothing was said of one.

    Raises:
        CheckpointError: if either cannot be read, or they do not belong together.
    """
    files = [] if journal is None else journal.files()
    if isinstance(path, Saved):
        saved: Saved | None = path
    elif files and isinstance(path, str | Path) and not os.path.lexists(path):
        saved = None
    else:
        saved = Saved(path)
    if journal is None:
        if unsaid and saved is not None and saved.journal is not None:
            raise CheckpointError(
                f"{saved.path}: a journal was written beside it: give it as `journal`, or journal=None to go on "
                "without what was taken since"
            )
        assert saved is not None
        return saved, None
    if not files:
        assert saved is not None
        if saved.journal is not None:
            raise CheckpointError(f"{journal.path}: there is no journal, and one was written beside {saved.path}")
        return saved, Story(os.urandom(16).hex(), 0, saved.time, saved.identity)
    heads = {first: _opened(journal.file(first))[0] for first in files}
    name = heads[files[-1]]["name"]
    after = heads[files[-1]]["after"]
    number = -1
    if saved is not None:
        ours = after == saved.identity if saved.journal is None else saved.journal[0] == name
        if not ours or any(head["name"] != name for head in heads.values()):
            raise CheckpointError(f"{journal.path}: is the journal of another server than {saved.path}")
        number = -1 if saved.journal is None else saved.journal[1]
    whole = [first for first in files if heads[first]["moment"] is not None and first >= number]
    if whole:
        number = whole[-1]
        saved = Saved(journal.file(number), heads[number]["moment"])
    if saved is None:
        raise CheckpointError(f"{path}: is not there, and {journal.path} does not begin with the whole record")
    if number < 0:
        number = 0
    story = Story(name, number, saved.time, after)
    story.read(journal)
    return saved, story


def packed(payload: Payload) -> bytearray:
    """A payload for the journal: its bytes are taken now, and it may be written afterwards.

    Raises:
        CheckpointError: naming what no file can hold.
    """
    return archive.packed(PAYLOAD, {name: getattr(payload, name) for name in FIELDS})


def _refused(refused: Map[str, int], now: Books) -> tuple[Books, None]:
    return now._replace(refused=refused), None


def _relive(server: Living, told: Told, models: dict[int, Kept]) -> None:
    """Do what was done with tickets."""
    content = told.content
    books = server.books

    def ended(now: Books) -> tuple[Books, None]:
        receipt = Receipt(False, content["reason"], now.now.version)
        for name in content["tickets"]:
            if name in now.tickets:  # unless its base was lost, and it was not saved
                now = now.ended(name, receipt)
        return now, None

    def dropped(now: Books) -> tuple[Books, None]:
        return now.ended(content["ticket"]) if content["ticket"] in now.tickets else now, None

    if told.kind == "ended":
        books.update(ended)
    elif told.kind == "dropped":
        books.update(dropped)
    else:
        ticket = Open(*content["open"])
        now = books.value
        base: Any = None if ticket.base is None else now.store.find(ticket.base)
        if ticket.base is not None and base is None:
            # Its version had moved on when the ticket was entered.
            base = models.get(ticket.version) or now.store.find(now.current)
            if ticket.base[0] == "base":
                base = Kept(server.narrow(base.load()))
        books.update(lambda now: (now.dispatched(content["ticket"], ticket, base), None))


def _payload(told: Told) -> Payload:
    """What came with an update.

    Raises:
        CheckpointError: if it was altered.
        OSError: if it cannot be read.
    """
    with open(told.path, "rb") as file:
        file.seek(told.place)
        return Payload(**archive.read_from(file, PAYLOAD, told.length))


def _opened(path: Path) -> tuple[dict[str, Any], int]:
    """What a file begins with, and where that ends."""
    try:
        with open(path, "rb") as file:
            head: dict[str, Any] = archive.read_from(file, KIND, os.fstat(file.fileno()).st_size, more=True)
            return head, file.tell()
    except OSError as error:
        raise _unreadable(path, error) from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _indexed(path: Path, first: int) -> tuple[list[Told], int]:
    """The changes in a file up to one that is bad, and how many were on the disk as far as any frame says.

    Raises:
        CheckpointError: if it cannot be read, or was not written by this package.
    """
    try:
        return _searched(path, first)
    except OSError as error:
        raise _unreadable(path, error) from error


def _searched(path: Path, first: int) -> tuple[list[Told], int]:
    head, place = _opened(path)
    mark = head["mark"]
    if head["first"] != first:
        raise CheckpointError(f"{path}: begins with change {head['first']}: it has another's name")
    found: list[Told] = []
    vouched = first
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        while (frame := _read(data, place, mark)) is not None and frame[0] == first + len(found):
            number, synced, text, begin, length = frame
            kind, content = _content(path, number, text)
            found.append(Told(number, kind, content, path, begin, length))
            vouched = max(vouched, synced)
            place = begin + length
        if place < len(data):
            LOG.warning("%s: %d bytes after change %d are no change", path, len(data) - place, first + len(found) - 1)
        while (place := data.find(mark, place)) >= 0:
            frame = _read(data, place, mark)
            vouched = vouched if frame is None else max(vouched, frame[1])
            place += 1
    return found, vouched


def _read(data: mmap.mmap, place: int, mark: bytes) -> tuple[int, int, bytes, int, int] | None:
    """The frame at a place: number, how many were on the disk, JSON, where its payload begins and how long it is."""
    if place + HEAD.size > len(data):
        return None
    given, number, synced, length, payload, checksum = HEAD.unpack_from(data, place)
    begin = place + HEAD.size
    if given != mark or begin + length > len(data):
        return None
    text = data[begin : begin + length]
    if zlib.crc32(text, zlib.crc32(data[place : begin - 4])) != checksum or begin + length + payload > len(data):
        return None
    return number, synced, text, begin + length, payload


def _content(path: Path, number: int, text: bytes) -> tuple[str, dict[str, Any]]:
    try:
        kind, content = decoded(json.loads(text), _no_tensor)
        return kind, content
    except Exception as error:  # it was written so by somebody who can make a checksum
        raise CheckpointError(f"{path}: change {number} was not written by this package: {error!r}") from None


def _no_tensor(_: Any) -> Tensor:
    raise ValueError("a tensor")


def _frame(at: _At, number: int, change: Change) -> Iterator[memoryview]:
    """The parts of a frame."""
    text = encoded((change.kind, change.content), lambda tensor, way: None, CheckpointError).encode()
    head = HEAD.pack(at.mark, number, at.synced, len(text), len(change.payload), 0)[:-4]
    checksum = zlib.crc32(text, zlib.crc32(head))
    yield memoryview(head + checksum.to_bytes(4, "little") + text)
    yield memoryview(change.payload)


def _written(file: int, part: memoryview) -> None:
    while part:
        part = part[os.write(file, part) :]


def _closed(file: int) -> None:
    with suppress(OSError):
        os.close(file)


def _claim(file: int, path: Path) -> None:
    """That nobody else has the lock of a journal, until it is closed.

    Raises:
        CheckpointError: if somebody does.
    """
    if sys.platform == "win32":
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(f"{path}: another process has this journal, or another server of this one") from None
    except OSError:  # this file system does not know
        return


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: cannot be read: {error.strerror or error}")


def _altered(path: Path, number: int) -> CheckpointError:
    return CheckpointError(f"{path}: change {number} is altered: it was on the disk when later ones were written")
