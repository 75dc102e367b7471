"""Journal of a server: an append-only log of all changes, which consists of files that are called segments.

Each record of the journal has a log sequence number (LSN). The segment `path.N.journal` starts with the record whose
LSN is N. The module [log_format][manifoldagg.federated.server.durability.log_format] describes the format of the
segments.
"""

import logging
import os
import re
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from manifoldagg import tensor_file
from manifoldagg._io import FileLock, close_with, os_errors
from manifoldagg._validation import KeywordHints, check_choice, check_count
from manifoldagg.errors import CheckpointError
from manifoldagg.federated.pytrees import Tree
from manifoldagg.federated.server.durability.log_format import KIND, VERSION, encode_record
from manifoldagg.federated.server.durability.persistent_map import AtomicReference, PersistentOrderedMap
from manifoldagg.federated.server.lock import OwnedLock
from manifoldagg.federated.server.state import LogRecord, PendingLog, ServerState

__all__ = ["Journal", "JournalLock", "JournalWriter"]

FSYNC_MODES = ("always", "batch")
CLOSED = -1
"""The file descriptor of a segment that was closed. The operating system never uses this number."""
LOG = logging.getLogger("manifoldagg")


@dataclass(frozen=True)
class Journal(KeywordHints):
    """Path and sync policy of a server's journal.

    Args:
        path: the path of the journal in an existing folder. The files of the journal have this path and the suffix
            `.N.journal`, where N is the number of their first record.
        fsync: the time at which the server syncs records to the disk with `fsync`.

            - `"always"`: a method that changes the server syncs its record before it returns. Concurrent calls share a
              sync. If a signal handler or a finaliser calls such a method within a journal write, the interrupted write
              syncs its record.
            - `"batch"`: the server syncs after every `fsync_every` records. If the process crashes, no record is lost.
              If the machine crashes, up to `fsync_every` of the latest records may be lost.
        fsync_every: the number of records per sync, for `"batch"`.

    Raises:
        ArgumentError: if an argument is invalid. The message starts with the name of the argument.

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

    def segment_path(self, first_lsn: int) -> Path:
        """Return the path of the segment whose first record has this LSN."""
        return Path(f"{self.path}.{first_lsn}.journal")

    def segments(self) -> list[int]:
        """Return the first LSN of each existing segment, in ascending order.

        Raises:
            CheckpointError: if the folder cannot be read.
        """
        path = Path(self.path)
        with os_errors(f"{path.parent}: cannot be read"):
            names = os.listdir(path.parent)
        found = (re.fullmatch(rf"{re.escape(path.name)}\.(\d+)\.journal", name) for name in names)
        return sorted(int(match[1]) for match in found if match)


class JournalLock(FileLock):
    """Exclusive lock on the file `path.lock`, which prevents two servers from writing to the same journal.

    A `with` statement releases the lock only if its block raises an exception. Otherwise, the lock is held until
    `close`, because the journal writer needs the lock after the block.

    Args:
        journal: the journal to lock.

    Raises:
        CheckpointError: if another server has locked the journal, or the file cannot be opened.
    """

    def __init__(self, journal: Journal) -> None:
        path = Path(f"{journal.path}.lock")
        with os_errors(f"{path}: cannot be opened"):
            try:
                super().__init__(path)
            except BlockingIOError:
                problem = "is locked by another process, or by another server of this process"
                raise CheckpointError(f"{journal.path}: {problem}") from None

    def __enter__(self) -> "JournalLock":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.close()


class _Position(NamedTuple):
    """Position of a journal writer in the current segment, which is a file of the journal.

    Attributes:
        descriptor: the file descriptor of the segment.
        magic: the magic number at the start of each record of the segment.
        first_lsn: the log sequence number (LSN) of the first record of the segment.
        end_offset: the offset in bytes at which the next record is written.
        next_lsn: the LSN of the first record that is not yet written.
        durable_lsn: the LSN of the first record that is not yet synced to the disk.
        needs_checkpoint: whether earlier records may be lost, so that only a checkpoint makes the journal valid again.
    """

    descriptor: int
    magic: bytes
    first_lsn: int
    end_offset: int
    next_lsn: int
    durable_lsn: int
    needs_checkpoint: bool = False

    @property
    def is_open(self) -> bool:
        """Whether the segment is open."""
        return self.descriptor != CLOSED


class JournalWriter:
    """Writer that appends the changes of a server to its journal, in the order of the changes.

    Each change of the server adds a journal record in memory. The method `write` appends all of these pending records
    to the file, including those of other threads. If a write fails or is interrupted, the next call overwrites the
    incomplete records, so that the file contains each record only once.

    Args:
        journal: the path and the sync policy of the journal.
        state: the state of the server, which contains the pending records.
        ancestors: a mapping from the names of the journals and checkpoints that this journal continues. The value is
            the LSN of the first record that the ancestor does not contain.
        lock: the lock of the journal, which `close` releases.

    Attributes:
        free_list: a reusable buffer for the bytes of a payload.
    """

    def __init__(
        self, journal: Journal, state: AtomicReference[ServerState], ancestors: Mapping[str, int], lock: JournalLock
    ) -> None:
        self.journal = journal
        self.free_list: deque[bytearray] = deque(maxlen=1)
        self._name = os.urandom(16).hex()
        self._ancestors = dict(ancestors)
        self._journal_lock = lock
        self._state = state
        self._write_lock = OwnedLock()
        self._has_failed = False
        # The LSN after the records of calls that interrupted a write and returned before their records were written.
        self._nested_lsn = 0
        self._position: _Position | None = None
        self._close_segment: Callable[[], object] = int

    def start(self, first_lsn: int, snapshot: Tree) -> None:
        """Start a new journal, which begins with a snapshot of the server.

        A journal consists of numbered files whose names start with its path. The method deletes the files of an earlier
        journal with the same path, because the snapshot replaces them.

        Args:
            first_lsn: the log sequence number of the first record.
            snapshot: the content of a checkpoint of the server before this record.
        """
        self.open_segment(first_lsn, snapshot)
        self._delete_segments(first_lsn)
        records: PersistentOrderedMap[int, LogRecord] = PersistentOrderedMap.of((), first_lsn)
        log = PendingLog(self._name, self._name, records, self._state.value.rejected)
        self._state.update(lambda now: (now._replace(pending_log=log), None))

    def open_segment(self, first_lsn: int, snapshot: Tree = None) -> None:
        """Create a new journal file, to which the writer appends all later records.

        Args:
            first_lsn: the log sequence number of the first record in the file.
            snapshot: the content of a checkpoint of the server before this record. `None` if a checkpoint file contains
                it.
        """
        magic = os.urandom(8)
        path = self.journal.segment_path(first_lsn)
        header = {"version": VERSION, "name": self._name, "ancestors": self._ancestors}
        tensor_file.save(path, KIND, {**header, "magic": magic, "first_lsn": first_lsn, "snapshot": snapshot})
        with os_errors(f"{path}: cannot be opened"):
            end = os.path.getsize(path)
            descriptor = os.open(path, os.O_RDWR)
        close = close_with(self, descriptor)
        close_previous = self._close_segment
        self._position = _Position(descriptor, magic, first_lsn, end, first_lsn, first_lsn)
        self._close_segment = close
        close_previous()

    def held_by_me(self) -> bool:
        """Return whether the current thread is writing to the journal."""
        return self._write_lock.held_by_me()

    def retry_if_failed(self) -> None:
        """Repeat the last write if it has failed. If it fails again, raise `CheckpointError`."""
        if self._has_failed or self._is_behind(0):
            self.write()

    def write(self) -> None:
        """Write the pending records to the file.

        A signal handler or a finaliser may interrupt this method and call it again. The inner call returns immediately,
        and the interrupted call writes the records of both calls.

        Raises:
            CheckpointError: if the records cannot be written. They stay pending, and the next call writes them.
        """
        log = self._state.value.pending_log
        if log is None or not (log.records or self._has_failed):
            return
        if not self.held_by_me():
            self._write_until(log.records.next_index)
            return
        # Another call can interrupt this loop. The last value that the loop stores covers its record, too.
        while self._nested_lsn != (next_lsn := self._next_pending_lsn()):
            self._nested_lsn = next_lsn

    def rotate(self, lsn: int) -> None:
        """Start a new journal file after a checkpoint, and delete the old journal files that are no longer needed.

        A journal file is no longer needed if the checkpoint contains all its changes. If writing fails, the method logs
        the error and does not raise it, because the server can still be resumed from the existing files.

        Args:
            lsn: a log sequence number. The checkpoint contains all changes before it.
        """
        with self._write_lock.lock:
            at = self._position
            if at is None or not at.is_open:
                return
            try:
                if at.next_lsn > at.first_lsn and (not at.needs_checkpoint or lsn >= at.next_lsn):
                    if not at.needs_checkpoint:
                        self._guarded(self._sync)
                    self._rotate(at)
                self._delete_segments(lsn)
            except CheckpointError as error:  # No record is lost, because unwritten records stay pending.
                LOG.error("%s", error)
        if self._is_behind(0):
            with suppress(CheckpointError):  # `_guarded` logs the error.
                self._write_until(0)

    def close(self) -> None:
        """Write and sync the pending records, and release the lock of the journal.

        Raises:
            CheckpointError: if the records cannot be written. The lock is released nevertheless.
        """
        with self._write_lock.lock:
            at = self._position
            try:
                if at is not None and at.is_open:
                    try:
                        self._guarded(self._write)
                    finally:
                        self._guarded(self._sync)
            finally:
                if self._position is not None:
                    self._position = self._position._replace(descriptor=CLOSED)
                self._has_failed = False
                self._close_segment()
                self._journal_lock.close()

    def _delete_segments(self, lsn: int) -> None:
        """Delete the segments whose records are all before `lsn`."""
        for first, after in pairwise(self.journal.segments()):
            if after <= lsn:
                with suppress(OSError):
                    os.unlink(self.journal.segment_path(first))

    def _rotate(self, position: _Position) -> None:
        """Start a new journal file. If this fails, delete the new file and continue in the current file."""
        try:
            self.open_segment(position.next_lsn)
        except BaseException:
            if self._position is position:
                try:
                    os.unlink(self.journal.segment_path(position.next_lsn))
                except FileNotFoundError:
                    pass
                except OSError:
                    self._position = position._replace(needs_checkpoint=True)
                    self._has_failed = True
            raise

    def _guarded(self, function: Callable[[], None]) -> None:
        """Call a function that writes to the disk, and record whether it has failed."""
        try:
            with os_errors(f"journal: {self.journal.path}: could not be written"):
                function()
        except BaseException as error:
            self._has_failed = True
            if isinstance(error, CheckpointError):
                LOG.error("%s", error)
            raise

    def _next_pending_lsn(self) -> int:
        """Return the LSN of the next record that the server will publish."""
        log = self._state.value.pending_log
        return 0 if log is None else log.records.next_index

    def _is_behind(self, lsn: int) -> bool:
        """Return whether a record before `lsn`, or of a call that interrupted a write, is not yet written."""
        position = self._position
        return position is not None and position.next_lsn < max(lsn, self._nested_lsn)

    def _write_until(self, lsn: int) -> None:
        """Write all records before `lsn`, and those of calls that interrupt the write."""
        # Other threads may write between two passes. Their writes include the records of this thread.
        while self._has_failed or self._is_behind(lsn):
            with self._write_lock.lock:
                if self._has_failed or self._is_behind(lsn):
                    self._guarded(self._write)

    def _write(self) -> None:
        at = self._position
        log = self._state.value.pending_log
        if at is None or log is None:
            return
        records = [log.records[lsn] for lsn in log.records if lsn >= at.next_lsn]
        if not (records or self._has_failed):
            return
        if not at.is_open:
            raise OSError("the server was closed")
        if at.needs_checkpoint:
            raise OSError("earlier records may be lost; write a checkpoint to start a new segment")
        end = os.lseek(at.descriptor, at.end_offset, os.SEEK_SET)
        for lsn, record in enumerate(records, at.next_lsn):
            for part in encode_record(at.magic, lsn, at.durable_lsn, record):
                end += len(part)
                while part:
                    part = part[os.write(at.descriptor, part) :]
        after = at._replace(end_offset=end, next_lsn=at.next_lsn + len(records))
        if self.journal.fsync == "always":
            os.fsync(at.descriptor)
            after = after._replace(durable_lsn=after.next_lsn)
        elif after.next_lsn - after.durable_lsn >= self.journal.fsync_every:
            self._sync_earlier_records(at)
            after = after._replace(durable_lsn=after.next_lsn)
        self._position = after
        self._has_failed = False
        self._state.update(lambda now: (now.log_truncated(after.next_lsn), None))

    def _sync(self) -> None:
        at = self._position
        if at is not None and at.durable_lsn != at.next_lsn:
            self._sync_earlier_records(at)
            self._position = at._replace(durable_lsn=at.next_lsn)

    def _sync_earlier_records(self, position: _Position) -> None:
        """Sync the file. If this fails, and the file contains earlier records without a sync, require a checkpoint."""
        try:
            os.fsync(position.descriptor)
        except OSError:
            # The system may have discarded the earlier records, so that the next sync would succeed without them.
            if position.durable_lsn < position.next_lsn:
                self._position = position._replace(needs_checkpoint=True)
            raise
