"""The model state of a server: an immutable value that each step replaces."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from manifoldagg.federated.buffers import PackedBuffers, PendingBuffers
from manifoldagg.federated.types import Point, State

__all__ = ["ModelState"]


@dataclass(frozen=True)
class ModelState:
    r"""Everything that an update may change for all clients. It is immutable: a step returns the next one.

    Attributes:
        current: $\Theta^\tau$, the model.
        state: the rule's.
        buffers: the model's.
        pending_buffers: the buffers of the updates since the model last moved.
        version: $\tau$, how often the model has moved.
        norms: the latest norm of each recent client, if a limit needs them.
    """

    current: Point
    state: State
    buffers: PackedBuffers = field(default_factory=PackedBuffers)
    pending_buffers: PendingBuffers | None = None
    version: int = 0
    norms: tuple[tuple[Hashable, float], ...] = ()
