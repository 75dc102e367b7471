"""The class `ModelState`, which contains the model of a server and the state of its rule."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from manifoldagg.federated.buffers import PackedBuffers, PendingBuffers
from manifoldagg.federated.types import Point, State

__all__ = ["ModelState"]


@dataclass(frozen=True)
class ModelState:
    r"""Immutable state of a server model. Each update replaces it by a new object.

    Attributes:
        current: the current model $\Theta^\tau$.
        state: the state of the rule.
        buffers: the buffers of the model.
        pending_buffers: the buffers of the updates that have arrived since the last step that changed the model. `None`
            if there are none.
        version: the version $\tau$, which is the number of steps that have changed the model so far.
        norms: the norms of the latest updates by client, if a limit depends on norms. Otherwise empty.
    """

    current: Point
    state: State
    buffers: PackedBuffers = field(default_factory=PackedBuffers)
    pending_buffers: PendingBuffers | None = None
    version: int = 0
    norms: tuple[tuple[Hashable, float], ...] = ()
