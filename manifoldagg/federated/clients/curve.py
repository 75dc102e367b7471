"""The trainer for AsyncBezier: it learns a curve whose end is the local model."""

from dataclasses import dataclass
from typing import Any

import torch

from manifoldagg._validation import check_choice, check_count
from manifoldagg.curves import Bezier, Control, Phases, Sampling, Sharpness, Training
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.clients.base import BaseTrainer, TrainingTask
from manifoldagg.federated.types import Message, Payload
from manifoldagg.manifolds.optimizers import Optimizer

__all__ = ["Curve"]


@dataclass(frozen=True)
class Curve(BaseTrainer):
    r"""Trainer that learns a Bézier curve in two phases and returns its control points except the first.

    The loss is taken along the curve, not at its end: buffers that the server asks for are taken anew there.

    Args:
        degree: of the curve.
        epochs: of [`Phases`][manifoldagg.curves.Phases], as `steps` and `alternate`.
        steps: in place of `epochs`.
        optimizer: of [`Training`][manifoldagg.curves.Training], as `rate`, `proximal` and `sharpness`.
        rate: of the end.
        control_rate: `rate` of [`Control`][manifoldagg.curves.Control], as `start` and `projection` of the control
            points.
        freeze_end: whether the last point rests in the second phase.
        control_start: `"chord"` or `"base"`.
        proximal: $\mu$.
        alternate: whether the phases take turns.
        control_projection: $\gamma$.
        sampling: the kind of [`Sampling`][manifoldagg.curves.Sampling].
        samples: places for each batch.
        sharpness: `SAM` or `ASAM`.

    Raises:
        ArgumentError: naming the option that is out of range.

    Source: Manifold, Algorithm 2.

    Example:
        >>> Curve(degree=2, epochs=(2, 2), proximal=1e-3).degree
        2
    """

    degree: int = 2
    epochs: tuple[int, int] = (2, 2)
    steps: tuple[int, int] | None = None
    optimizer: Optimizer = torch.optim.Adam
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
        check_count("degree", self.degree)
        check_choice("freeze_end", self.freeze_end, (True, False))
        phases = self._options()["phases"]
        if self.degree == 1 and self.freeze_end and phases.limits[1]:
            amount = "epochs" if self.steps is None else "steps"
            raise ArgumentError(
                f"{amount}: expected none in the second phase, such as {phases.limits[0]}+0: a curve of degree 1 has "
                f"no point between its ends; got {phases.limits[0]}+{phases.limits[1]}"
            )

    def _options(self) -> dict[str, Any]:
        free = None if self.freeze_end else range(1, self.degree + 1)
        return {
            "phases": Phases(self.epochs, self.steps, self.alternate),
            "training": Training(self.optimizer, self.rate, self.proximal, self.sharpness),
            "control": Control(self.control_rate, self.control_start, self.control_projection, free),
            "sampling": Sampling(self.sampling, self.samples),
        }

    def num_steps(self, message: Message, num_batches: int) -> int:
        return sum(self.epochs) * num_batches if self.steps is None else sum(self.steps)

    def _train(self, task: TrainingTask) -> Payload:
        samples = task.samples
        learned = task.fit(Bezier(task.space, self.degree), **self._options())
        return Payload(learned.phi[1:], samples, buffers=task.buffers(at=learned.phi[-1]))
