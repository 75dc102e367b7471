"""The client of AsyncBezier: learn a curve whose end is the local model."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from manifoldagg.curves import Bezier, Control, Phases, Sampling, Sharpness, Training, fit
from manifoldagg.errors import ArgumentError, check_count, check_number
from manifoldagg.federated.contract import Memory, Message, Payload
from manifoldagg.manifolds import Loss, Manifold


@dataclass(frozen=True)
class Curve:
    """Two-phase learning of a Bézier curve from the server's model; the control points are sent back.

    The options are those of [`fit`][manifoldagg.fit].

    Raises:
        ArgumentError: if a rate or `proximal` is out of range.

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

    def __post_init__(self) -> None:
        check_number("rate", self.rate, above=0)
        if self.control_rate is not None:
            check_number("control_rate", self.control_rate, above=0)
        check_number("proximal", self.proximal, at_least=0)

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
        free = None if self.freeze_end else range(1, self.degree + 1)
        samples = count_samples(batches)
        learned = fit(
            Bezier(space, self.degree),
            loss,
            batches,
            start=message.start,
            phases=Phases(self.epochs, self.steps, self.alternate),
            training=Training(self.optimizer, self.rate, self.proximal, self.sharpness),
            control=Control(self.control_rate, self.control_start, self.control_projection, free),
            sampling=Sampling(self.sampling, self.samples),
            generator=generator,
        )
        return Payload(learned.phi[1:], samples)


def count_samples(batches: Iterable[Any]) -> int:
    """How many samples one pass over `batches` has.

    Asked of `batches.samples`, or of the sampler of a `DataLoader` that batches by itself, where there is one; counted
    over one pass otherwise, where a batch is a tensor, a mapping of tensors, or a sequence that begins with inputs.

    Raises:
        ArgumentError: if a batch has no length to count, `batches.samples` is no count, or `batches` is an iterator.

    Example:
        >>> count_samples([(torch.zeros(5, 3), torch.zeros(5)), (torch.zeros(2, 3), torch.zeros(2))])
        7
        >>> count_samples([torch.zeros(5, 3), {"inputs": torch.zeros(2, 3)}])
        7
    """
    known = getattr(batches, "samples", None)
    if known is not None:
        return check_count("batches: samples", known)
    if isinstance(batches, Iterator):
        raise ArgumentError("batches: expected what can be iterated again, such as a list; got an iterator")
    if isinstance(batches, DataLoader) and batches.batch_size and isinstance(batches.sampler, Sized):
        drawn = len(batches.sampler)
        return drawn - drawn % batches.batch_size if batches.drop_last else drawn
    try:
        return sum(map(length_of, batches))
    except (TypeError, LookupError):
        raise ArgumentError("batches: expected pairs (inputs, targets), or an object with `samples`") from None


def length_of(batch: Any) -> int:
    """How many samples a batch has: the length of its inputs."""
    inputs = batch if hasattr(batch, "shape") or isinstance(batch, Mapping) else batch[0]
    while isinstance(inputs, Mapping | tuple):
        inputs = next(iter(inputs.values()), None) if isinstance(inputs, Mapping) else inputs[0]
    return len(inputs)
