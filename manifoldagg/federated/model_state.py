"""The model state of a server: an immutable object that each step replaces."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from manifoldagg.federated.buffers import PackedBuffers, PendingBuffers
from manifoldagg.federated.types import Point, State

__all__ = ["ModelState"]


@dataclass(frozen=True)
class ModelState:
    r"""Immutable state of a server model. Each step returns a new state.

    Attributes:
        current: the model $\Theta^\tau$.
        state: the state of the rule.
        buffers: the buffers of the model.
        pending_buffers: the buffers of the updates that arrived since the model last moved.
        version: the version $\tau$, which is the number of times that the model has moved.
        norms: the latest norms of recent clients, if a limit needs norms.
    """

    current: Point
    state: State
    buffers: PackedBuffers = field(default_factory=PackedBuffers)
    pending_buffers: PendingBuffers | None = None
    version: int = 0
    norms: tuple[tuple[Hashable, float], ...] = ()
