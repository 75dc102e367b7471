"""The durability of a server: when it writes checkpoints, and its journal."""

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
    """Files from which a server can be resumed.

    A server with files accepts only strings and integers as the names of clients.

    Args:
        checkpoint: the path and the frequency of automatic checkpoints, which a background thread writes. Without a
            journal, a crash loses the updates after the last checkpoint.
        journal: the path of a journal, or a [`Journal`][manifoldagg.federated.Journal] with a path and a sync policy.
            The server appends each change before it returns the receipt, and `Server.resume` replays the changes. The
            server locks the journal until `Server.close`.

    Raises:
        ArgumentError: if an argument has another type, or the folder of a path does not exist.

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
    """Writer of the checkpoints and the journal of a server.

    Attributes:
        journal: the writer of the journal; `None` without a journal.
        checkpoints: the writer of automatic checkpoints; `None` without automatic checkpoints.
    """

    def __init__(self, core: ServerCore, options: Mapping[str, Any], publish: Callable[..., None]) -> None:
        self._core = core
        self._options = options
        self._publish = publish
        self._save_lock = OwnedLock()
        self.checkpoints: CheckpointWriter | None = None
        self.journal: JournalWriter | None = None

    def start(self, durability: Durability, weights: Any, *, is_resumed: bool = False) -> None:
        """Create the writers of the files, before other threads can access the server.

        `weights` is the argument of the server. If `is_resumed`, the caller starts the journal.

        Raises:
            CheckpointError: if a file cannot store a value, or the journal cannot be written.
            ArgumentError: if a client is neither a string nor an integer, or the journal exists.
        """
        if durability == Durability():
            return
        check_storable(self._core, weights)
        if durability.checkpoint is not None:
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
        """Start a new journal with the complete state. The arguments are as in `JournalWriter`."""
        writer = JournalWriter(journal, self._core.state, ancestors, journal_lock)
        writer.start(first_lsn, self.make_snapshot().tree())
        self.journal = writer

    def check_client(self, client: Any) -> None:
        """Raise `ArgumentError` if there are files and they cannot store the name of a client."""
        if self.checkpoints is not None or self.journal is not None:
            check_storable_client(client)

    def check_idle(self) -> None:
        """Raise `ArgumentError` within a journal write, because the owner of the update lock may wait for the write."""
        if self.journal is not None and self.journal.held_by_me():
            raise ArgumentError(
                "server: expected a call outside of a journal write; call this after the write has returned"
            )

    def make_snapshot(self) -> ServerSnapshot:
        """Return the content of a checkpoint. The caller holds the update lock and has notified the average."""
        core, averaging = self._core, self._core.averaging
        stored = None if averaging is None else (import_path(type(averaging)), averaging.state())
        rotate = None if self.journal is None else self.journal.rotate
        return ServerSnapshot(core, core.state.value, self._options, core.clock(), stored, rotate)

    def maybe_write_checkpoint(self) -> None:
        """Start a checkpoint in the background if it is due.

        A checkpoint contains the state of the average, so it waits until the average has received every version.
        """
        state = self._core.state.value
        if self.checkpoints is not None and not state.pending_notifications and not state.is_closed:
            self.checkpoints.maybe_write(state.history.next_index, self.make_snapshot)

    def save(
        self,
        path: str | Path | None,
        take_snapshot: Callable[[Callable[[ServerSnapshot], None] | None], ServerSnapshot],
    ) -> None:
        """Write a checkpoint to `path`, as `Server.save` does.

        `take_snapshot` returns a snapshot between two updates. If it receives a function, the function receives the
        snapshot before the next update.
        """
        writer = self.checkpoints
        if path is None and writer is None:
            raise ArgumentError("path: expected a path, as the server has no `checkpoint`")
        uses_writer = writer is not None and (path is None or writer.targets(path))
        # A handler or a finaliser within a save must not wait for that save.
        is_nested = self._save_lock.held_by_me() or (writer is not None and writer.held_by_me())
        # Saves run one at a time, so that no older state replaces a newer one, up to which the journal was truncated.
        with nullcontext() if is_nested else self._save_lock.lock:
            if uses_writer and writer is not None:
                take_snapshot(writer.enqueue)
                writer.finish()
            elif path is not None:
                snapshot = take_snapshot(None)
                if writer is not None or is_nested:
                    snapshot = snapshot._replace(on_written=None)
                snapshot.write(path, 1, self._publish)
