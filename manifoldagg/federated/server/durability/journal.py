"""The journal: an append-only file of the changes of a server.

A journal is a sequence of files, `path.0.journal` and so on, each named after the number of its first record. Their
format is that of the [frames][manifoldagg.federated.server.durability.log_format].

A server locks `path.lock` before it looks for files and until it closes the journal. This file is never replaced. A
child of `os.fork` does not hold the lock.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from manifoldagg import tensor_file
from manifoldagg._io import close_with
from manifoldagg._validation import KeywordHints, check_choice, check_count, short_repr
from manifoldagg.errors import ArgumentError, CheckpointError
from manifoldagg.federated.pytrees import Tree
from manifoldagg.federated.server.durability.log_format import KIND, encode_record, read_error
from manifoldagg.federated.server.durability.persistent_map import AtomicReference, PersistentOrderedMap
from manifoldagg.federated.server.lock import OwnedLock
from manifoldagg.federated.server.state import LogRecord, PendingLog, ServerState

if sys.platform != "win32":
    import fcntl

__all__ = ["Journal", "JournalLock", "JournalWriter"]

SUFFIX = ".journal"
FSYNC_MODES = ("always", "batch")
LOG = logging.getLogger("manifoldagg")


@dataclass(frozen=True)
class Journal(KeywordHints):
    """Path and sync policy of a server's journal.

    Args:
        path: of the files, `path.0.journal` and so on, in a folder that exists.
        fsync: `"always"`: the records of a call are synced to the disk before it returns; calls of several threads
            share a sync. `"batch"`: the records are passed to the system, and survive the end of the process. If the
            machine stops, up to `fsync_every` of the latest records may be lost.
        fsync_every: the number of records in one sync, with `"batch"`.

    Raises:
        ArgumentError: naming what does not fit.

    Example:
        >>> Journal("server", fsync="batch", fsync_every=1000).fsync
        'batch'
    """

    path: str | Path
    fsync: str = "always"
    fsync_every: int = 100

    def __post_init__(self) -> None:
        # The process may change its directory before it writes.
        object.__setattr__(self, "path", tensor_file.check_path(self.path))
        check_choice("fsync", self.fsync, FSYNC_MODES)
        check_count("fsync_every", self.fsync_every)

    @classmethod
    def of(cls, value: Any) -> "Journal":
        """Return the `Journal` of an argument: a path, or a `Journal`.

        Raises:
            ArgumentError: if it is neither.
        """
        if isinstance(value, str | Path):
            return cls(value)
        if not isinstance(value, Journal):
            raise ArgumentError(f"journal: expected a path or a Journal, got {short_repr(value)}")
        return value

    def segment_path(self, first_lsn: int) -> Path:
        """The path of the segment that starts with a record number."""
        place = Path(self.path)
        return place.with_name(f"{place.name}.{first_lsn}{SUFFIX}")

    def segments(self) -> list[int]:
        """Return the first record numbers of the existing segments, in order.

        Raises:
            CheckpointError: if the folder cannot be read.
        """
        place = Path(self.path)
        begin = f"{place.name}."
        try:
            names = os.listdir(place.parent)
        except OSError as error:
            raise read_error(place.parent, error) from error
        found = (name[len(begin) : -len(SUFFIX)] for name in names if name.startswith(begin) and name.endswith(SUFFIX))
        return sorted(int(number) for number in found if number.isdecimal())


class JournalLock:
    """Exclusive lock of a journal, until it is closed.

    Args:
        journal: the journal to lock.

    Raises:
        CheckpointError: with the system error.
    """

    def __init__(self, journal: Journal) -> None:
        place = Path(journal.path)
        lock = place.with_name(f"{place.name}.lock")
        try:
            file = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise CheckpointError(f"{lock}: cannot be opened: {error.strerror or error}") from error
        self.close = close_with(self, file)
        self.file = file
        with suppress(OSError):
            os.chmod(lock, 0o600)  # Earlier versions of the package let other users hold the lock.


@contextmanager
def locked_journal(journal: Journal) -> Iterator[JournalLock]:
    """Lock a journal exclusively, and release the lock if the body raises.

    Raises:
        CheckpointError: if another server has locked it, or with the system error.
    """
    lock = JournalLock(journal)
    try:
        _flock(lock.file, Path(journal.path))
        yield lock
    except BaseException:
        lock.close()
        raise


class _Position(NamedTuple):
    """The position of a writer: the file, its first number, its end, the next number, and the number on disk."""

    descriptor: int
    magic: bytes
    first_lsn: int
    end_offset: int
    next_lsn: int
    durable_lsn: int


class JournalWriter:
    """Writer that appends journal records in the order in which the changes took effect.

    A change is entered with what it changes, in the same instant, and leaves when it is written: whatever goes wrong in
    between, it is written again to the same place of the file. Who writes does it for all whose changes wait.

    Args:
        journal: where to, and how.
        state: of the server.
        ancestors: the journals and checkpoints that this journal continues, and the number of the record from which on.
        journal_lock: of the journal, closed with this.

    Cost: of a change, its bytes written once; with `"always"` a sync, which those share that come meanwhile.
    """

    def __init__(
        self,
        journal: Journal,
        state: AtomicReference[ServerState],
        ancestors: Mapping[str, int],
        journal_lock: JournalLock,
    ) -> None:
        self.journal = journal
        self._name = os.urandom(16).hex()
        self._ancestors = dict(ancestors)
        self._journal_lock = journal_lock
        self._state = state
        self._write_lock = OwnedLock()
        self._has_failed = False
        self._needs_checkpoint = False
        self._position: _Position | None = None
        self._close_segment: Callable[[], object] = int

    def open_segment(self, first_lsn: int, snapshot: Tree = None) -> None:
        """Continue in a new file.

        Args:
            first_lsn: number of its first change.
            snapshot: the whole record before it; `None` where a checkpoint holds that.

        Raises:
            CheckpointError: naming what cannot be saved, or with what the system says.
        """
        mark = os.urandom(8)
        place = self.journal.segment_path(first_lsn)
        tensor_file.save(
            place,
            KIND,
            {
                "name": self._name,
                "magic": mark,
                "first_lsn": first_lsn,
                "snapshot": snapshot,
                "ancestors": self._ancestors,
            },
        )
        try:
            end = os.path.getsize(place)
            file = os.open(place, os.O_RDWR)
        except OSError as error:
            raise CheckpointError(f"{place}: cannot be opened: {error.strerror or error}") from error
        close, before = close_with(self, file), self._close_segment
        self._position = _Position(file, mark, first_lsn, end, first_lsn, first_lsn)
        self._close_segment = close
        self._needs_checkpoint = False
        before()

    def empty_log(self, first_lsn: int) -> PendingLog:
        """Return the empty log of pending records from a number on."""
        records: PersistentOrderedMap[int, LogRecord] = PersistentOrderedMap(None, None, first_lsn, first_lsn)
        return PendingLog(self._name, self._name, records, self._state.value.rejected)

    def held_by_me(self) -> bool:
        """Whether this thread is writing."""
        return self._write_lock.held_by_me()

    def retry_if_failed(self) -> None:
        """Check that earlier records were written, and retry if writing failed.

        Raises:
            CheckpointError: if it cannot be. Nothing more should be entered then.
        """
        if self._has_failed:
            self.write()

    def write(self) -> None:
        """Flush pending records. A re-entrant call returns immediately; the outer call flushes for it.

        Raises:
            CheckpointError: with what the system says. What was entered stays, and is written with the next call.
        """
        log = self._state.value.pending_log
        if log is None or not (log.records or self._has_failed) or self.held_by_me():
            return
        with self._write_lock.lock:
            self._guarded(self._write)

    def rotate(self, lsn: int) -> None:
        """Continue in a new file, because a checkpoint contains all earlier records, and remove older files."""
        with self._write_lock.lock:
            at = self._position
            try:
                if at is not None and at.next_lsn > at.first_lsn and (not self._needs_checkpoint or lsn >= at.next_lsn):
                    if not self._needs_checkpoint:
                        self._guarded(self._sync)
                    self._rotate(at)
                self.delete_segments(lsn)
            except CheckpointError as error:  # the checkpoint is there, and so are the changes
                LOG.error("%s", error)

    def delete_segments(self, lsn: int) -> None:
        """Remove the files whose records all precede a position."""
        files = self.journal.segments()
        for first, after in pairwise(files):
            if after <= lsn:
                with suppress(OSError):
                    os.unlink(self.journal.segment_path(first))

    def close(self) -> None:
        """Flush pending records, sync them to the disk, and stop writing.

        Raises:
            CheckpointError: with what the system says. It is closed then too.
        """
        with self._write_lock.lock:
            try:
                if self._position is not None:
                    self._guarded(self._write)
                    self._guarded(self._sync)
            finally:
                self._position = None
                self._close_segment()
                self._journal_lock.close()

    def _rotate(self, position: _Position) -> None:
        """Continue in a new file, or in the older one if a conflicting file does not exist."""
        try:
            self.open_segment(position.next_lsn)
        except BaseException:
            if self._position is position:
                try:
                    os.unlink(self.journal.segment_path(position.next_lsn))
                except FileNotFoundError:
                    pass
                except OSError:
                    self._needs_checkpoint = self._has_failed = True
            raise

    def _guarded(self, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            self._has_failed = True
            if not isinstance(error, OSError):
                raise
            told = f"journal: {self.journal.path}: could not be written: {error.strerror or error}"
            LOG.error("%s", told)
            raise CheckpointError(told) from error
        self._has_failed = False

    def _write(self) -> None:
        at = self._position
        log = self._state.value.pending_log
        if at is None or log is None:
            return
        if self._needs_checkpoint:
            raise OSError("what was written may be lost; a checkpoint begins a new file")
        changes = [log.records[number] for number in log.records if number >= at.next_lsn]
        end = at.end_offset
        os.lseek(at.descriptor, end, os.SEEK_SET)
        for number, change in enumerate(changes, at.next_lsn):
            for part in encode_record(at.magic, number, at.durable_lsn, change):
                end += len(part)
                _write_all(at.descriptor, part)
        after = at._replace(end_offset=end, next_lsn=at.next_lsn + len(changes))
        if self.journal.fsync == "always":
            os.fsync(at.descriptor)
            after = after._replace(durable_lsn=after.next_lsn)
        self._position = after
        self._state.update(lambda now: (now.log_truncated(after.next_lsn), None))
        if after.next_lsn - after.durable_lsn >= self.journal.fsync_every:
            self._sync()

    def _sync(self) -> None:
        """Sync written records to the disk."""
        at = self._position
        if at is None or at.durable_lsn == at.next_lsn:
            return
        try:
            os.fsync(at.descriptor)
        except OSError:
            # The system may have dropped what it could not write, and would not say so again.
            self._needs_checkpoint = True
            raise
        self._position = at._replace(durable_lsn=at.next_lsn)


def _write_all(file: int, part: memoryview) -> None:
    while part:
        part = part[os.write(file, part) :]


def _flock(file: int, path: Path) -> None:
    """Lock a journal exclusively, until the lock is closed.

    Raises:
        CheckpointError: if the lock is held elsewhere.
    """
    if sys.platform == "win32":
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(f"{path}: is locked by another process, or by another server of this process") from None
    except OSError:  # this file system does not know
        return
