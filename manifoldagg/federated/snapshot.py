"""What a server holds at one moment: immutable values, which the arithmetic of an update reads without the lock."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from torch import Tensor

from manifoldagg.federated.buffers import Packed, Waiting
from manifoldagg.federated.contract import Payload, Point, State, Update
from manifoldagg.federated.store import Found, Key

__all__ = ["Arrival", "Open", "Snapshot"]


@dataclass(frozen=True)
class Snapshot:
    r"""All that an update may change for everybody. Nothing in it is ever written: a step makes the next one.

    Attributes:
        current: $\Theta^\tau$, the model.
        state: the rule's.
        buffers: the model's.
        waiting: the buffers of the updates since the model last moved.
        version: $\tau$, how often the model has moved.
        norms: of the updates that were accepted lately, where somebody asks for them.
    """

    current: Point
    state: State
    buffers: Packed = field(default_factory=Packed)
    waiting: Waiting | None = None
    version: int = 0
    norms: tuple[float, ...] = ()


@dataclass(frozen=True)
class Open:
    """A ticket that is out: whose it is, the version it started from, and where its base is kept, if it is."""

    client: Hashable
    version: int
    base: Key | None


@dataclass(frozen=True)
class Arrival:
    """What an update meets that arrives on a ticket.

    Attributes:
        snapshot: the server's.
        ticket: its own.
        weight: $w_i$.
        share: what the weight is a multiple of.
        base: where it started; gives `None` where the client brings it.
        memory: what is kept for the client.
        spare: memory for the next model, if there is any.
    """

    snapshot: Snapshot
    ticket: Open
    weight: float
    share: float
    base: Found
    memory: Found
    spare: Tensor | None

    def update(self, payload: Payload) -> Update:
        """The payload with what the server knows about it. Base and memory come from their files now."""
        base = self.base() if payload.base is None else payload.base
        return Update(
            client=self.ticket.client,
            base=base.to(self.snapshot.current),
            current=self.snapshot.current,
            points=payload.points,
            staleness=self.snapshot.version - self.ticket.version,
            weight=self.weight,
            samples=payload.samples,
            tensors=payload.tensors,
            numbers=payload.numbers,
            memory=self.memory(),
            share=self.share,
        )
