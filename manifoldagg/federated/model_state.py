"""What an update meets: immutable values, of which a step makes the next ones."""

from dataclasses import dataclass, field

from manifoldagg.federated.buffers import PackedBuffers, PendingBuffers
from manifoldagg.federated.types import Point, State

__all__ = ["ModelState"]


@dataclass(frozen=True)
class ModelState:
    r"""All that an update may change for everybody. Nothing in it is ever written: a step makes the next one.

    Attributes:
        current: $\Theta^\tau$, the model.
        state: the rule's.
        buffers: the model's.
        pending_buffers: the buffers of the updates since the model last moved.
        version: $\tau$, how often the model has moved.
        norms: of the updates that were accepted lately, where somebody asks for them.
    """

    current: Point
    state: State
    buffers: PackedBuffers = field(default_factory=PackedBuffers)
    pending_buffers: PendingBuffers | None = None
    version: int = 0
    norms: tuple[float, ...] = ()
