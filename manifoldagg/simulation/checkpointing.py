"""Checkpointing of a run: snapshots that are written at an interval, and when an exception ends the run."""

import time
from collections.abc import Callable
from types import TracebackType

from manifoldagg.errors import CheckpointError
from manifoldagg.federated import CheckpointPolicy
from manifoldagg.federated.server.durability.checkpoint import CheckpointWriter
from manifoldagg.simulation.snapshot import RunSnapshot

__all__ = ["RunCheckpointer"]

INTERVAL_FACTOR = 20
"""If only seconds determine when to write, writing takes at most one part in this many of the time."""


class RunCheckpointer:
    """Writes snapshots of a run at an interval, and the last one when an exception ends the run.

    Args:
        policy: when, and where to; `None`: never.
        num_updates: how many there were when it began.

    Raises:
        ArgumentError: if `policy` does not say so.
    """

    def __init__(self, policy: CheckpointPolicy | None, num_updates: int) -> None:
        self._policy = policy
        self._writer = None if policy is None else CheckpointWriter(policy, self._on_written)
        self._write_seconds = 0.0
        self._last_write = time.monotonic()
        self._snapshot: RunSnapshot | None = None
        if self._writer is not None:
            self._writer.reset(num_updates)

    def maybe_write(self, take_snapshot: Callable[[], RunSnapshot]) -> None:
        """Write a snapshot between two events if one is due."""
        if self._writer is None or self._policy is None:
            return
        self._snapshot = latest = take_snapshot()
        patient = (
            self._policy.every_updates is None
            and time.monotonic() - self._last_write < INTERVAL_FACTOR * self._write_seconds
        )
        if not patient:
            self._writer.maybe_write(latest.updates, lambda: latest)

    def __enter__(self) -> "RunCheckpointer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is None:
            return
        try:
            if error is None or self._snapshot is None:
                self._writer.finish()
            else:
                self._writer.write(self._snapshot)
        except CheckpointError as failed:
            # What has come of the run, or has ended it, counts for more.
            if error is not None:
                error.add_note(f"checkpoint: {failed}")

    def _on_written(self, *, seconds: float) -> None:
        self._write_seconds = seconds
        self._last_write = time.monotonic()
