"""Automatic checkpoints: their policy, and the background thread that writes them."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from manifoldagg import tensor_file
from manifoldagg._validation import KeywordHints, check_count, check_number
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.server.lock import OwnedLock

__all__ = ["CheckpointPolicy", "CheckpointWriter", "Checkpointable"]

LOG = logging.getLogger("manifoldagg")


@dataclass(frozen=True)
class CheckpointPolicy(KeywordHints):
    """Policy for automatic checkpoints of a server.

    The server writes a checkpoint after a number of updates, after a time in seconds, or after whichever of the two
    comes first.

    Args:
        path: the path of the file in an existing folder. Older files are named `path.1`, `path.2` and so on.
        every_updates: the number of accepted updates between two checkpoints. `None` disables this interval.
        every_seconds: the time between two checkpoints in seconds. The first accepted update after this time starts a
            checkpoint. `None` disables this interval.
        keep: the number of files to keep, including the latest file.

    Raises:
        ArgumentError: if a number is out of range, if both intervals are `None`, or if the folder does not exist.

    Example:
        >>> CheckpointPolicy("server.checkpoint", every_updates=100, every_seconds=600.0).keep
        2
    """

    path: str | Path
    every_updates: int | None = None
    every_seconds: float | None = None
    keep: int = 2

    def __post_init__(self) -> None:
        # The process may change its directory before it writes.
        object.__setattr__(self, "path", tensor_file.check_path(self.path))
        if self.every_updates is None and self.every_seconds is None:
            raise ArgumentError("every_updates, every_seconds: expected at least one of them")
        if self.every_updates is not None:
            check_count("every_updates", self.every_updates)
        if self.every_seconds is not None:
            check_number("every_seconds", self.every_seconds, above=0)
        check_count("keep", self.keep)


@runtime_checkable  # The tests check annotations at run time.
class Checkpointable(Protocol):
    """Protocol for the immutable content of a checkpoint."""

    @property
    def updates(self) -> int:
        """The number of accepted updates."""

    def write(self, path: str | Path, keep: int, publish: Callable[..., None]) -> None:
        """Write the content to `path`, keep the `keep` latest files, and publish an event."""


class CheckpointWriter:
    """Writer that saves checkpoints in a background thread.

    The thread ends when the queue of checkpoints is empty. If a write fails, the writer logs the error. In addition,
    the next call to `finish` raises the error, unless a later checkpoint was written successfully.

    Args:
        policy: the policy for automatic checkpoints.
        publish: a function that receives the class and the fields of an event.
    """

    def __init__(self, policy: CheckpointPolicy, publish: Callable[..., None]) -> None:
        self._policy = policy
        self._publish = publish
        self.reset(0)
        # The length limit lets a newer checkpoint replace a queued checkpoint.
        self._queue: deque[Checkpointable] = deque(maxlen=1)
        self._is_idle = True
        self._write_lock = OwnedLock()
        self._error: Exception | None = None

    def reset(self, updates: int) -> None:
        """Restart the count of updates and the timer for the next automatic checkpoint.

        Args:
            updates: the number of updates that the server has accepted so far.
        """
        self._last_updates = updates
        self._last_time = time.monotonic()

    def targets(self, path: str | Path) -> bool:
        """Return whether `path` is the path of the policy."""
        return tensor_file.check_path(path) == tensor_file.check_path(self._policy.path)

    def maybe_write(self, updates: int, make_snapshot: Callable[[], Checkpointable]) -> None:
        """Start a checkpoint in the background if an interval of the policy has ended.

        Args:
            updates: the number of accepted updates.
            make_snapshot: a function that returns the content of the checkpoint. It is called only if the checkpoint is
                due.
        """
        every = self._policy
        new_updates = updates - self._last_updates
        is_due = every.every_updates is not None and new_updates >= every.every_updates
        if not is_due and every.every_seconds is not None and new_updates > 0:
            is_due = time.monotonic() - self._last_time >= every.every_seconds
        if not is_due:
            return
        self._queue.append(make_snapshot())
        self.reset(updates)
        # A thread that is not idle writes this checkpoint, because it checks the queue again after setting `_is_idle`.
        if self._is_idle:
            try:
                threading.Thread(target=self._drain, name="manifoldagg-checkpoint").start()
            except RuntimeError as error:  # If no thread can start, `finish` or a later checkpoint writes the queue.
                LOG.error("checkpoint: %s", error)

    def write(self, snapshot: Checkpointable) -> None:
        """Write a checkpoint, and wait for the write to finish. If the write fails, re-raise the error."""
        self.enqueue(snapshot)
        self.finish()

    def enqueue(self, snapshot: Checkpointable) -> None:
        """Add a checkpoint to the queue, and remove an older checkpoint that is still in the queue.

        The next call to `finish` writes the new checkpoint. If the background thread is running, it may write the
        checkpoint earlier.
        """
        self._queue.append(snapshot)
        self.reset(snapshot.updates)

    def held_by_me(self) -> bool:
        """Return whether the current thread is writing a checkpoint."""
        return self._write_lock.held_by_me()

    def finish(self) -> None:
        """Write all queued checkpoints. If the last write has failed, raise its error."""
        if self.held_by_me():
            # A signal handler or a finaliser has interrupted the write of this thread. Waiting would cause a deadlock.
            return
        self._drain()
        error = self._error
        self._error = None
        if error is not None:
            raise error

    def _drain(self) -> None:
        """Write queued checkpoints until the queue is empty. Only one thread writes at a time."""
        with self._write_lock.lock:
            while True:
                try:
                    moment = self._queue.pop()
                except IndexError:
                    if self._is_idle:
                        return
                    self._is_idle = True
                    continue
                self._is_idle = False
                self._write(moment)

    def _write(self, snapshot: Checkpointable) -> None:
        try:
            snapshot.write(self._policy.path, self._policy.keep, self._publish)
            self._error = None
        except Exception as error:
            self._error = error
            LOG.error("checkpoint: %s", error)
        except BaseException:
            if not self._queue:
                self._queue.append(snapshot)
            raise
