"""The journal: what a server takes, appended to a file as it happens.

A journal is a line of files, `path.0.journal` and so on, each called by the number of its first change; what is in them
say the [frames][manifoldagg.federated.server.durability.log_format].

Who has a journal holds a lock on `path.lock`, which is never replaced, from before it looks for files until it is
closed.
"""

import logging
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from manifoldagg._validation import check_choice, check_count
from manifoldagg.errors import ArgumentError, CheckpointError
from manifoldagg.federated.pytrees import Tree
from manifoldagg.federated.server.durability import tensor_file
from manifoldagg.federated.server.durability.log_format import KIND, frame, unreadable
from manifoldagg.federated.server.durability.persistent_map import Atomic, Ordered
from manifoldagg.federated.server.lock import Lock
from manifoldagg.federated.server.state import Books, Log

if sys.platform != "win32":
    import fcntl

__all__ = ["Appender", "Hold", "Journal"]

SUFFIX = ".journal"
SYNCS = ("always", "batch")
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
        object.__setattr__(self, "path", tensor_file.check_path(self.path))
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
            raise unreadable(place.parent, error) from error
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
        tensor_file.write(
            place, KIND, {"name": self.name, "mark": mark, "first": first, "moment": moment, "after": after}
        )
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
            for part in frame(at.mark, number, at.synced, change):
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
