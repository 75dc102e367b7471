"""The trainer for the rule AsyncBezier, which learns a curve whose end is the local model."""

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

    The loss is evaluated along the curve, and not at its end. Buffers that the server requests are therefore recomputed
    at the end.

    Args:
        degree: the degree of the curve.
        epochs: the number of epochs of each phase, as in [`Phases`][manifoldagg.curves.Phases].
        steps: the number of steps of each phase, in place of `epochs`.
        optimizer: the optimizer class, as in [`Training`][manifoldagg.curves.Training].
        rate: the learning rate of the end.
        control_rate: the learning rate of the control points, as in [`Control`][manifoldagg.curves.Control].
        freeze_end: whether the end is fixed in the second phase.
        control_start: the start of the control points, `"chord"` or `"base"`.
        proximal: $\mu$, the weight of the proximal term.
        alternate: whether the phases alternate.
        control_projection: $\gamma$, the projection of the control points.
        sampling: the kind of [`Sampling`][manifoldagg.curves.Sampling].
        samples: the number of sampled points of the curve for each batch.
        sharpness: `SAM` or `ASAM`, for sharpness-aware gradients.

    Raises:
        ArgumentError: if an option is out of range. The message names it.

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
                f"{amount}: expected ({phases.limits[0]}, 0), because a curve of degree 1 has no interior control "
                f"point, got {phases.limits}"
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
