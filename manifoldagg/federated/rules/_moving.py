"""What every rule that moves tangents between points has in common."""

from dataclasses import dataclass, field

from torch import Tensor

from manifoldagg.corrections.place import RUNGS, TRANSPORTS, Place
from manifoldagg.errors import ArgumentError, check_choice, check_count
from manifoldagg.federated.contract import Memory, Message, State
from manifoldagg.federated.intake import check_on
from manifoldagg.federated.rules._reading import widened
from manifoldagg.federated.schedules import check_plain
from manifoldagg.manifolds import Manifold


@dataclass(frozen=True)
class Moving:
    """What every rule that moves tangents has: how they travel on a curved space, and its plain message."""

    transport: str | None = field(default=None, kw_only=True)
    rungs: int = field(default=RUNGS, kw_only=True)

    def __post_init__(self) -> None:
        check_plain(self)
        if self.transport is not None:
            check_choice("transport", self.transport, TRANSPORTS)
        check_count("rungs", self.rungs)

    def message(self, space: Manifold, state: State, current: Tensor, memory: Memory) -> Message:
        return Message(current)

    def check_space(self, space: Manifold, start: Tensor) -> None:
        """Refuse a space on which tangents cannot be brought from one point to another.

        Raises:
            ArgumentError: naming the leaf, and what it lacks.
        """
        if not isinstance(space, Manifold):
            raise ArgumentError(f"space: expected a manifold, got {space!r}")
        if not space.flat:
            point = widened(space, check_on(space, "start", start))
            Place(space, point, point, self.transport, self.rungs)
        elif self.transport is not None:
            raise ArgumentError(f"transport: expected None on a flat space, got {self.transport!r}")
