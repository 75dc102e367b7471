"""The options for the checkpoints and the journal of a server, and the class that manages these files."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manifoldagg._validation import KeywordHints, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.server.durability.checkpoint import ServerSnapshot, check_storable, check_storable_client
from manifoldagg.federated.server.durability.checkpoint_writer import CheckpointPolicy, CheckpointWriter
from manifoldagg.federated.server.durability.fingerprint import import_path
from manifoldagg.federated.server.durability.journal import Journal, JournalLock, JournalWriter
from manifoldagg.federated.server.lock import OwnedLock
from manifoldagg.federated.server.options import check_option
from manifoldagg.federated.server.state import ServerCore

__all__ = ["Durability", "DurabilityManager"]


@dataclass(frozen=True)
class Durability(KeywordHints):
    """Options for the files from which a server can be resumed after a crash.

    These files are the checkpoints and the journal. A server with such files accepts only strings and integers as names
    of clients, because the files must store these names.

    Args:
        checkpoint: the path and the intervals of automatic checkpoints, which a background thread writes. A crash loses
            the updates after the last checkpoint, unless the server also has a journal. `None` disables automatic
            checkpoints.
        journal: the path of a journal, or a [`Journal`][manifoldagg.federated.Journal] with a path and a sync policy.
            The server appends each change to the journal before it returns the receipt. `Server.resume` replays the
            changes after the last checkpoint. The server locks the journal until `Server.close`. `None` disables the
            journal.

    Raises:
        ArgumentError: if an argument has an unsupported type, or if the folder of a path does not exist.

    Example:
        >>> policy = CheckpointPolicy("server.checkpoint", every_updates=1000)
        >>> Durability(policy, journal="server").journal.fsync
        'always'
    """

    checkpoint: CheckpointPolicy | None = None
    journal: str | Path | Journal | None = None

    def __post_init__(self) -> None:
        if self.checkpoint is not None:
            check_option("checkpoint", self.checkpoint, CheckpointPolicy)
        if isinstance(self.journal, str | Path):
            object.__setattr__(self, "journal", Journal(self.journal))
        elif not isinstance(self.journal, Journal | None):
            raise ArgumentError(f"journal: expected a path or a Journal, got {short_repr(self.journal)}")


class DurabilityManager:
    """Manager of the checkpoints and the journal of a server.

    Args:
        core: the parts of the server.
        options: the limits, the memory policy and the buffer policies as plain values, which checkpoints store.
        publish: a function that receives the class and the fields of an event.

    Attributes:
        journal: the writer of the journal. `None` if there is no journal.
        checkpoints: the writer of automatic checkpoints. `None` if there are no automatic checkpoints.
    """

    def __init__(self, core: ServerCore, options: Mapping[str, Any], publish: Callable[..., None]) -> None:
        self._core = core
        self._options = options
        self._publish = publish
        self._save_lock = OwnedLock()
        self.checkpoints: CheckpointWriter | None = None
        self.journal: JournalWriter | None = None

    def start(self, durability: Durability, weights: Any, *, is_resumed: bool = False) -> None:
        """Create the writers of the checkpoints and the journal.

        Call this method before other threads can access the server.

        Args:
            durability: the options for the files.
            weights: the argument `weights` of the server.
            is_resumed: whether the server was resumed. The caller then starts the journal with `start_journal`.

        Raises:
            CheckpointError: if a file cannot store a value, or if the journal cannot be written.
            ArgumentError: if the name of a client is neither a string nor an integer, or if a new server would replace
                an existing checkpoint or journal.
        """
        if durability == Durability():
            return
        check_storable(self._core, weights)
        if durability.checkpoint is not None:
            path = Path(durability.checkpoint.path)
            if not is_resumed and path.exists():
                raise ArgumentError(f"checkpoint: {path}: already exists; resume with `Server.open`")
            self.checkpoints = CheckpointWriter(durability.checkpoint, self._publish)
        journal = durability.journal
        if isinstance(journal, Journal) and not is_resumed:
            with JournalLock(journal) as lock:
                if journal.segments():
                    raise ArgumentError(f"journal: {journal.path}: already exists; resume with `Server.open`")
                self.start_journal(journal, 0, {}, lock)

    def start_journal(
        self, journal: Journal, first_lsn: int, ancestors: Mapping[str, int], journal_lock: JournalLock
    ) -> None:
        """Start a new journal, whose first segment contains the complete state of the server.

        Args:
            journal: the path and the sync policy of the journal.
            first_lsn: the log sequence number of the first record.
            ancestors: the journals and checkpoints that the new journal continues, as in `JournalWriter`.
            journal_lock: the lock of the journal.
        """
        writer = JournalWriter(journal, self._core.state, ancestors, journal_lock)
        writer.start(first_lsn, self.make_snapshot().tree())
        self.journal = writer

    def check_client(self, client: Any) -> None:
        """Check that the files can store the name of a client.

        Raises:
            ArgumentError: if there are files, and the name is neither a string nor an integer.
        """
        if self.checkpoints is not None or self.journal is not None:
            check_storable_client(client)

    def check_idle(self) -> None:
        """Check that the current thread is not in the middle of a journal write.

        This can happen in a signal handler or a finaliser that interrupts the write. The handler must not wait for an
        update in another thread. That update may itself wait for the end of the write, which would be a deadlock.

        Raises:
            ArgumentError: if the current thread is writing to the journal.
        """
        if self.journal is not None and self.journal.held_by_me():
            raise ArgumentError(
                "server: expected a call outside of a journal write; call this after the write has returned"
            )

    def make_snapshot(self) -> ServerSnapshot:
        """Return the content of a checkpoint as an immutable snapshot of the server.

        The caller must hold the update lock, so that no update runs at the same time. If the server averages its model
        versions, the average must already include the latest version.
        """
        core = self._core
        averaging = self._core.averaging
        stored = None if averaging is None else (import_path(type(averaging)), averaging.state())
        rotate = None if self.journal is None else self.journal.rotate
        return ServerSnapshot(core, core.state.value, self._options, core.clock(), stored, rotate)

    def maybe_write_checkpoint(self) -> None:
        """Start to write a checkpoint in the background if one is due."""
        state = self._core.state.value
        # A checkpoint also contains the average over the model versions. It must include the latest version, so the
        # method starts no checkpoint before the average has received all versions.
        if self.checkpoints is not None and not state.pending_notifications and not state.is_closed:
            self.checkpoints.maybe_write(state.history.next_index, self.make_snapshot)

    def close(self) -> None:
        """Finish the last checkpoint, and close the journal.

        The method first waits for a running `save`. The lock of the journal is released last, so that another process
        cannot resume the server while a file of this server is still being written.

        Raises:
            CheckpointError: if the checkpoint or the journal could not be written. The files are closed nevertheless.
        """
        with self._save_lock.lock:
            try:
                if self.checkpoints is not None:
                    self.checkpoints.finish()
            finally:
                if self.journal is not None:
                    self.journal.close()

    def save(
        self,
        path: str | Path | None,
        take_snapshot: Callable[[Callable[[ServerSnapshot], None] | None], ServerSnapshot],
    ) -> None:
        """Write a checkpoint as `Server.save` describes.

        Args:
            path: the path of the file. `None` means the path of the automatic checkpoints.
            take_snapshot: a function that waits for a running update and returns a snapshot. If its argument is a
                function, it calls this function with the snapshot before the next update starts.

        Raises:
            ArgumentError: if `path` is `None` and there are no automatic checkpoints.
        """
        writer = self.checkpoints
        if path is None and writer is None:
            raise ArgumentError("path: expected a path, as the server has no `checkpoint`")
        uses_writer = writer is not None and (path is None or writer.targets(path))
        # A signal handler or a finaliser that interrupts a save must not wait for this save.
        is_nested = self._save_lock.held_by_me() or (writer is not None and writer.held_by_me())
        # Saves run one at a time. Otherwise, an older state could replace a newer one for which the journal has already
        # deleted its records.
        with nullcontext() if is_nested else self._save_lock.lock:
            if uses_writer and writer is not None:
                take_snapshot(writer.enqueue)
                writer.finish()
            elif path is not None:
                snapshot = take_snapshot(None)
                if writer is not None or is_nested:
                    snapshot = snapshot._replace(on_written=None)
                snapshot.write(path, 1, self._publish)
