"""The model state of a server: an immutable value that each step replaces."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from manifoldagg.federated.buffers import PackedBuffers, PendingBuffers
from manifoldagg.federated.types import Point, State

__all__ = ["ModelState"]


@dataclass(frozen=True)
class ModelState:
    r"""The immutable part of the server state that an update may change for all clients. A step returns the next one.

    Attributes:
        current: the model $\Theta^\tau$.
        state: the state of the rule.
        buffers: the buffers of the model.
        pending_buffers: the buffers of the updates since the last move of the model.
        version: the version $\tau$, which is the number of moves of the model.
        norms: the latest norm of each recent client, if a limit needs them.
    """

    current: Point
    state: State
    buffers: PackedBuffers = field(default_factory=PackedBuffers)
    pending_buffers: PendingBuffers | None = None
    version: int = 0
    norms: tuple[tuple[Hashable, float], ...] = ()
