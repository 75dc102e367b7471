"""The keeper of a run: has written down where it stands, beside its work and when something ends it."""

import time
from collections.abc import Callable
from types import TracebackType

from manifoldagg.errors import CheckpointError
from manifoldagg.federated import CheckpointPolicy
from manifoldagg.federated.server.durability.checkpoint import CheckpointWriter
from manifoldagg.simulation.snapshot import Stand

__all__ = ["Keeper"]

SHARE = 20
"""Where seconds alone say when to write, that takes no more than one part in so many of the time."""


class Keeper:
    """Writes down where a run stands, beside its work; and where it stood last, when something ends it.

    Args:
        every: when, and where to; `None`: never.
        answers: how many there were when it began.

    Raises:
        ArgumentError: if `every` does not say so.
    """

    def __init__(self, every: CheckpointPolicy | None, answers: int) -> None:
        self._every = every
        self._writer = None if every is None else CheckpointWriter(every, self._note)
        self._seconds = 0.0
        self._written = time.monotonic()
        self._stand: Stand | None = None
        if self._writer is not None:
            self._writer.reset(answers)

    def look(self, stand: Callable[[], Stand]) -> None:
        """The run is between two events."""
        if self._writer is None or self._every is None:
            return
        self._stand = latest = stand()
        patient = self._every.every_updates is None and time.monotonic() - self._written < SHARE * self._seconds
        if not patient:
            self._writer.maybe_write(latest.updates, lambda: latest)

    def __enter__(self) -> "Keeper":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is None:
            return
        try:
            if error is None or self._stand is None:
                self._writer.finish()
            else:
                self._writer.write(self._stand)
        except CheckpointError as failed:
            # What has come of the run, or has ended it, counts for more.
            if error is not None:
                error.add_note(f"checkpoint: {failed}")

    def _note(self, *, seconds: float) -> None:
        self._seconds = seconds
        self._written = time.monotonic()
