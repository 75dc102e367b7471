"""What has a state that its future depends on, in a file."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from manifoldagg.federated.server.durability import tensor_file

__all__ = ["Resumable"]


class Resumable(ABC):
    """Clocks, schedulers and availability traces: what was saved goes on bit for bit, in another process too."""

    kind: ClassVar[str]
    """What its files hold."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """All that the future depends on, as a tree that JSON can hold."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a `state`.

        Raises:
            ArgumentError: if it is none of this; all stays as it was.
        """

    def save(self, path: str | Path) -> None:
        """Write the state into a file of the format of a server's checkpoints, whole or not at all.

        Raises:
            ArgumentError: if there is no such folder.
            CheckpointError: with what the system says.
        """
        tensor_file.save(path, self.kind, self.state())

    def resume(self, path: str | Path) -> None:
        """Go on from what `save` wrote. This was made with the same arguments as that one.

        Raises:
            ArgumentError: if the state is none of this; all stays as it was, here and below.
            CheckpointError: if the file is truncated, altered, or none of this kind; an older one is named.
        """
        self.restore(tensor_file.load(path, self.kind))
