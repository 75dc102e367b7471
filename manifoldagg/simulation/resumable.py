"""Resumable objects: saving and restoring their state in a file."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from manifoldagg import tensor_file

__all__ = ["Resumable"]


class Resumable(ABC):
    """Base class of clocks, schedulers and availability traces, which resume bit for bit in any process."""

    kind: ClassVar[str]
    """What its files hold."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the complete dynamic state as a JSON-compatible tree."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Resume from a `state`.

        Raises:
            ArgumentError: if the state is not one of this object; all stays as it was.
        """

    def save(self, path: str | Path) -> None:
        """Write the state atomically to a file in the format of a server's checkpoints.

        Raises:
            ArgumentError: if there is no such folder.
            CheckpointError: with what the system says.
        """
        tensor_file.save(path, self.kind, self.state())

    def resume(self, path: str | Path) -> None:
        """Resume from a file that `save` wrote; the constructor's arguments must be equal.

        Raises:
            ArgumentError: if the state is not one of this object; all stays as it was, here and below.
            CheckpointError: if the file is truncated, altered, or none of this kind; an older one is named.
        """
        self.restore(tensor_file.load(path, self.kind))
