"""The class `ModelState`, which contains the model of a server and the state of its rule."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from manifoldagg.federated.buffers import PackedBuffers, PendingBuffers
from manifoldagg.federated.types import Point, State

__all__ = ["ModelState"]


@dataclass(frozen=True)
class ModelState:
    r"""Immutable snapshot of the server model and of the data that a server step updates.

    Each accepted update creates a new snapshot.

    Attributes:
        current: the current model $\Theta^\tau$.
        state: the state of the rule.
        buffers: the buffers of the model, such as running means.
        pending_buffers: the buffers that clients have returned since the model last changed. `None` if there are none.
        version: the version $\tau$, which is the number of steps that have changed the model so far.
        norms: the norm of each client's latest update, as pairs (client, norm). The tuple is empty if no limit of the
            server depends on the norm of an update.
    """

    current: Point
    state: State
    buffers: PackedBuffers = field(default_factory=PackedBuffers)
    pending_buffers: PendingBuffers | None = None
    version: int = 0
    norms: tuple[tuple[Hashable, float], ...] = ()
