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
from manifoldagg.federated.server.durability.persistent_map import AtomicReference
from manifoldagg.federated.server.lock import OwnedLock
from manifoldagg.federated.server.state import ServerState
from manifoldagg.federated.types import Averaging, Rule
from manifoldagg.manifolds import Manifold

__all__ = ["Durability", "DurabilityManager"]


@dataclass(frozen=True)
class Durability(KeywordHints):
    """Files from which a server can be resumed. Both kinds require clients that are strings or integers.

    Args:
        checkpoint: the path and the frequency of checkpoints in the background. Updates after the last checkpoint are
            lost in a crash unless there is a journal.
        journal: the path of a journal. Each change is appended before its receipt is returned, so that
            `Server.resume` can replay it. A [`Journal`][manifoldagg.federated.Journal] also sets the sync policy. The
            journal is locked until `Server.close`.

    Raises:
        ArgumentError: if an argument has another type, or a path is not in an existing folder.

    Example:
        >>> policy = CheckpointPolicy("server.checkpoint", every_updates=1000)
        >>> Durability(policy, journal="server").journal.fsync
        'always'
    """

    checkpoint: CheckpointPolicy | None = None
    journal: str | Path | Journal | None = None

    def __post_init__(self) -> None:
        if self.checkpoint is not None and not isinstance(self.checkpoint, CheckpointPolicy):
            raise ArgumentError(f"checkpoint: expected CheckpointPolicy, got {short_repr(self.checkpoint)}")
        if self.journal is not None:
            object.__setattr__(self, "journal", Journal.of(self.journal))


class DurabilityManager:
    """Writer of the checkpoints and the journal of a server.

    Args:
        state: the state of the server.
        space: the space of the models.
        rule: the aggregation rule.
        options: the limits and other options that a checkpoint stores.
        clock: the clock of the server.
        averaging: the average of the server, whose state a checkpoint stores.
        publish: records and delivers an event.

    Attributes:
        journal: the writer of the journal; `None` without one.
        checkpoints: the writer of automatic checkpoints; `None` without them.
    """

    def __init__(
        self,
        state: AtomicReference[ServerState],
        space: Manifold,
        rule: Rule,
        options: Mapping[str, Any],
        clock: Callable[[], float],
        averaging: Averaging | None,
        publish: Callable[..., None],
    ) -> None:
        self._state = state
        self._space = space
        self._rule = rule
        self._options = options
        self._clock = clock
        self._averaging = averaging
        self._publish = publish
        self._save_lock = OwnedLock()
        self.checkpoints: CheckpointWriter | None = None
        self.journal: JournalWriter | None = None

    def start(self, durability: Durability, weights: Any, *, is_resumed: bool = False) -> None:
        """Start to write checkpoints, and a new journal, before other threads can access the server.

        Args:
            durability: the files.
            weights: the weights of the clients, as the caller gave them.
            is_resumed: whether the caller starts the journal, because it continues an existing one.

        Raises:
            CheckpointError: if a file cannot store the space, the rule or the clock, or the journal cannot be written.
            ArgumentError: if a client is neither a string nor an integer, or the journal exists.
        """
        if durability == Durability():
            return
        check_storable(self._space, self._rule, weights, self._clock)
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
        """Start a new journal with the complete state, and delete the older files of its path.

        Args:
            journal: the path and the sync policy.
            first_lsn: the number of the first record.
            ancestors: the journals that this one continues, and the number of the first record after each.
            journal_lock: the lock of the journal, which the writer then owns.

        Raises:
            CheckpointError: if the journal cannot be written.
        """
        writer = JournalWriter(journal, self._state, ancestors, journal_lock)
        writer.open_segment(first_lsn, self.make_snapshot().tree())
        writer.delete_segments(first_lsn)
        self._state.update(lambda now: (now._replace(pending_log=writer.empty_log(first_lsn)), None))
        self.journal = writer

    def check_client(self, client: Any) -> None:
        """Check that the files can store the name of a client.

        Raises:
            ArgumentError: if there are files, and the name is neither a string nor an integer.
        """
        if self.checkpoints is not None or self.journal is not None:
            check_storable_client(client)

    def check_idle(self) -> None:
        """Reject calls from a handler within a journal write, because the lock owner may wait for that write.

        Raises:
            ArgumentError: if the calling thread is writing the journal.
        """
        if self.journal is not None and self.journal.held_by_me():
            raise ArgumentError("server: its journal is being written; call this after that has returned")

    def make_snapshot(self) -> ServerSnapshot:
        """Return the content of a checkpoint, within the update lock, after the average has received every version."""
        averaging = self._averaging
        stored = None if averaging is None else (import_path(type(averaging)), averaging.state())
        rotate = None if self.journal is None else self.journal.rotate
        return ServerSnapshot(
            self._state.value, self._space, self._rule, self._options, self._clock, self._clock(), stored, rotate
        )

    def maybe_write_checkpoint(self) -> None:
        """Start a checkpoint in the background if one is due.

        A checkpoint contains the state of the average, so it waits until the average has received every version.
        """
        state = self._state.value
        if self.checkpoints is not None and not state.pending_notifications and not state.is_closed:
            self.checkpoints.maybe_write(state.history.next_index, self.make_snapshot)

    def save(
        self,
        path: str | Path | None,
        take_snapshot: Callable[[Callable[[ServerSnapshot], None] | None], ServerSnapshot],
    ) -> None:
        """Write a checkpoint now.

        Args:
            path: as in `Server.save`.
            take_snapshot: returns a snapshot between two updates, after passing it to a function if one is given.

        Raises:
            ArgumentError: if `path` is missing.
            CheckpointError: if the content cannot be stored, or the file cannot be written.
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

    def close_journal(self) -> None:
        """Write and sync the pending records, and release the lock of the journal.

        Raises:
            CheckpointError: if they cannot be written. The journal is closed then too.
        """
        if self.journal is not None:
            self.journal.close()

    def finish_checkpoints(self) -> None:
        """Wait until the started checkpoints are written.

        Raises:
            CheckpointError: if the last one could not be written.
        """
        if self.checkpoints is not None:
            self.checkpoints.finish()
