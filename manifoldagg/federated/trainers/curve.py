"""The client of AsyncBezier: learn a curve whose end is the local model."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch

from manifoldagg.curves import Bezier, Sharpness, fit
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.contract import Memory, Message, Payload
from manifoldagg.manifolds import Loss, Manifold


@dataclass(frozen=True)
class Curve:
    """Two-phase learning of a Bézier curve from the server's model; the control points are sent back.

    The options are those of [`fit`][manifoldagg.fit].

    Source: Manifold, Algorithm 2.

    Example:
        >>> Curve(degree=2, epochs=(2, 2), proximal=1e-3).degree
        2
    """

    degree: int = 2
    epochs: tuple[int, int] = (2, 2)
    steps: tuple[int, int] | None = None
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam
    rate: float = 1e-3
    control_rate: float | None = None
    freeze_end: bool = True
    control_start: str = "chord"
    proximal: float = 0.0
    alternate: bool = False
    control_projection: float = 0.0
    sampling: str = "uniform"
    samples: int = 1
    sharpness: Sharpness | None = None

    def train(
        self,
        space: Manifold,
        message: Message,
        loss: Loss,
        batches: Iterable[Any],
        memory: Memory,
        *,
        generator: torch.Generator,
    ) -> Payload:
        """Learn the curve from `message.start`.

        Returns:
            The control points but the first, and how many samples `batches` hold.

        Raises:
            ArgumentError: as [`fit`][manifoldagg.fit].
            DivergenceError: if a loss is not finite.
        """
        options = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "degree"}
        curve = Bezier(space, self.degree)
        learned = fit(curve, loss, batches, start=message.start, generator=generator, **options)
        return Payload(learned.phi[1:], count_samples(batches))


def count_samples(batches: Iterable[Any]) -> int:
    """How many samples one pass over `batches` has.

    Asked of `batches.samples` or `len(batches.dataset)` (a `DataLoader`) where there is one; counted over one
    pass of (inputs, targets) otherwise.

    Raises:
        ArgumentError: if a batch has no length to count.
    """
    known = getattr(batches, "samples", None)
    if known is not None:
        return int(known)
    if hasattr(batches, "dataset"):
        return len(batches.dataset)
    try:
        return sum(len(batch[0]) for batch in batches)
    except (TypeError, LookupError):
        raise ArgumentError("batches: expected pairs (inputs, targets), or an object with `samples`") from None
