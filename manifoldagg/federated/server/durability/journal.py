"""The journal: an append-only log of the changes of a server, in segments.

The segment `path.N.journal` starts with the record with log sequence number (LSN) N. Its format is described in
[log_format][manifoldagg.federated.server.durability.log_format].

A server locks `path.lock` before it lists the segments, until it closes the journal. This file is never replaced. A
child of `os.fork` does not hold the lock.
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
from typing import Any, NamedTuple

from manifoldagg import tensor_file
from manifoldagg._io import FileLock, close_with
from manifoldagg._validation import KeywordHints, check_choice, check_count, short_repr
from manifoldagg.errors import ArgumentError, CheckpointError
from manifoldagg.federated.pytrees import Tree
from manifoldagg.federated.server.durability.log_format import KIND, VERSION, encode_record, os_errors, pack_payload
from manifoldagg.federated.server.durability.persistent_map import AtomicReference, PersistentOrderedMap
from manifoldagg.federated.server.lock import OwnedLock
from manifoldagg.federated.server.records import LogRecord, PendingLog
from manifoldagg.federated.server.state import ServerState
from manifoldagg.federated.types import Payload

__all__ = ["Journal", "JournalLock", "JournalWriter"]

FSYNC_MODES = ("always", "batch")
LOG = logging.getLogger("manifoldagg")


@dataclass(frozen=True)
class Journal(KeywordHints):
    """Path and sync policy of a server's journal.

    Args:
        path: the path of the segments without `.N.journal`, in an existing folder.
        fsync: `"always"`: the records of a call are synced to the disk before it returns; concurrent calls share a
            sync. `"batch"`: the records are passed to the operating system, and survive the end of the process. If the
            machine stops, up to `fsync_every` of the latest records may be lost.
        fsync_every: the number of records per sync, with `"batch"`.

    Raises:
        ArgumentError: naming the invalid argument.

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
        """Return the path of the segment with this first LSN."""
        return Path(f"{self.path}.{first_lsn}.journal")

    def segments(self) -> list[int]:
        """Return the first LSNs of the existing segments, in order.

        Raises:
            CheckpointError: if the folder cannot be read.
        """
        path = Path(self.path)
        with os_errors(f"{path.parent}: cannot be read"):
            names = os.listdir(path.parent)
        found = (re.fullmatch(rf"{re.escape(path.name)}\.(\d+)\.journal", name) for name in names)
        return sorted(int(match[1]) for match in found if match)


class JournalLock(FileLock):
    """Exclusive lock of a journal until `close`. A `with` block releases it only if the block raises.

    Raises:
        CheckpointError: if another server has locked the journal, or with the system error.
    """

    def __init__(self, journal: Journal) -> None:
        path = Path(f"{journal.path}.lock")
        with os_errors(f"{path}: cannot be opened"):
            try:
                super().__init__(path)
            except BlockingIOError:
                told = "is locked by another process, or by another server of this process"
                raise CheckpointError(f"{journal.path}: {told}") from None

    def __enter__(self) -> "JournalLock":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.close()


class _Position(NamedTuple):
    """Position of a writer: its segment, the end of its last record, and the LSNs to write and to sync next."""

    descriptor: int
    magic: bytes
    first_lsn: int
    end_offset: int
    next_lsn: int
    durable_lsn: int


class JournalWriter:
    """Writer of the records of a server, in the order in which their changes took effect.

    A change and its record are published in the same instant, and the record is pending until it is written. After an
    error or an interrupt, the next write repeats it at the same offset. One thread writes and syncs for all threads.

    Args:
        journal: the path and the sync policy.
        state: the state of the server.
        ancestors: the journals and checkpoints that this journal continues, and the LSN from which it continues each.
        lock: the lock of the journal, which `close` releases.
    """

    def __init__(
        self, journal: Journal, state: AtomicReference[ServerState], ancestors: Mapping[str, int], lock: JournalLock
    ) -> None:
        self.journal = journal
        self._name = os.urandom(16).hex()
        self._ancestors = dict(ancestors)
        self._journal_lock = lock
        self._state = state
        self._write_lock = OwnedLock()
        self._free_list: deque[bytearray] = deque(maxlen=1)
        self._has_failed = self._needs_checkpoint = False
        self._position: _Position | None = None
        self._close_segment: Callable[[], object] = int

    def open_segment(self, first_lsn: int, snapshot: Tree = None) -> None:
        """Continue in a new segment. It starts with a snapshot of the server, unless a checkpoint contains it.

        Raises:
            CheckpointError: naming a value that a file cannot store, or with the system error.
        """
        magic, path = os.urandom(8), self.journal.segment_path(first_lsn)
        header = {"version": VERSION, "name": self._name, "ancestors": self._ancestors}
        tensor_file.save(path, KIND, {**header, "magic": magic, "first_lsn": first_lsn, "snapshot": snapshot})
        with os_errors(f"{path}: cannot be opened"):
            end, descriptor = os.path.getsize(path), os.open(path, os.O_RDWR)
        close, close_previous = close_with(self, descriptor), self._close_segment
        self._position = _Position(descriptor, magic, first_lsn, end, first_lsn, first_lsn)
        self._close_segment = close
        self._needs_checkpoint = False
        close_previous()

    def empty_log(self, first_lsn: int) -> PendingLog:
        """Return a log without pending records, whose first record will have this LSN."""
        records: PersistentOrderedMap[int, LogRecord] = PersistentOrderedMap(None, None, first_lsn, first_lsn)
        return PendingLog(self._name, self._name, records, self._state.value.rejected)

    def pack(self, payload: Payload) -> memoryview:
        """Copy a payload into the bytes of a record; raise `CheckpointError` if a file cannot store it."""
        return pack_payload(payload, self._free_list)

    def held_by_me(self) -> bool:
        """Whether this thread is writing."""
        return self._write_lock.held_by_me()

    def retry_if_failed(self) -> None:
        """Repeat the last write if it failed; raise `CheckpointError` if it fails again."""
        if self._has_failed:
            self.write()

    def write(self) -> None:
        """Write the pending records. A re-entrant call returns immediately; the outer call writes its records.

        Raises:
            CheckpointError: with the system error. The records stay pending, and the next call writes them.
        """
        log = self._state.value.pending_log
        if log is not None and (log.records or self._has_failed) and not self.held_by_me():
            with self._write_lock.lock:
                self._guarded(self._write)

    def rotate(self, lsn: int) -> None:
        """Continue in a new segment and delete older ones, because a checkpoint contains all records before `lsn`."""
        with self._write_lock.lock:
            at = self._position
            try:
                if at is not None and at.next_lsn > at.first_lsn and (not self._needs_checkpoint or lsn >= at.next_lsn):
                    if not self._needs_checkpoint:
                        self._guarded(self._sync)
                    self._rotate(at)
                self.delete_segments(lsn)
            except CheckpointError as error:  # The checkpoint exists, and the records are still pending.
                LOG.error("%s", error)

    def delete_segments(self, lsn: int) -> None:
        """Delete the segments whose records all precede an LSN."""
        for first, after in pairwise(self.journal.segments()):
            if after <= lsn:
                with suppress(OSError):
                    os.unlink(self.journal.segment_path(first))

    def close(self) -> None:
        """Write and sync the pending records, and release the lock, also if this raises `CheckpointError`."""
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
        """Continue in a new segment, or after an error in the current one, if the file of the new one is removed."""
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
        """Call a function that writes, and note whether it failed."""
        try:
            with os_errors(f"journal: {self.journal.path}: could not be written"):
                function()
        except BaseException as error:
            self._has_failed = True
            if isinstance(error, CheckpointError):
                LOG.error("%s", error)
            raise
        self._has_failed = False

    def _write(self) -> None:
        at, log = self._position, self._state.value.pending_log
        if at is None or log is None:
            return
        if self._needs_checkpoint:
            raise OSError("written records may be lost; a checkpoint begins a new segment")
        records = [log.records[lsn] for lsn in log.records if lsn >= at.next_lsn]
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
        self._position = after
        self._state.update(lambda now: (now.log_truncated(after.next_lsn), None))
        if after.next_lsn - after.durable_lsn >= self.journal.fsync_every:
            self._sync()

    def _sync(self) -> None:
        at = self._position
        if at is None or at.durable_lsn == at.next_lsn:
            return
        try:
            os.fsync(at.descriptor)
        except OSError:  # The system may have dropped the data, and the next sync would succeed without it.
            self._needs_checkpoint = True
            raise
        self._position = at._replace(durable_lsn=at.next_lsn)
