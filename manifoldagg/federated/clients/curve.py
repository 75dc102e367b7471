"""Client trainer for the rule AsyncBezier.

The trainer learns a curve from the server model to the local model. It can also learn another continuous set of models,
such as a simplex whose vertices are models.
"""

from dataclasses import dataclass
from typing import Any

import torch

from manifoldagg._validation import check_choice, check_count, renamed_arguments, short_repr
from manifoldagg.curves import (
    Bezier,
    Control,
    CurveEmbedding,
    Embedding,
    Phases,
    ProximalTerm,
    Sampling,
    Sharpness,
    Training,
    Tunnel,
)
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.clients.base import BaseTrainer, TrainingTask
from manifoldagg.federated.types import Message, Payload
from manifoldagg.manifolds.optimizers import Optimizer

__all__ = ["Curve"]

CONTROL_NAMES = {"rate": "control_rate", "start": "control_start", "projection": "control_projection"}
"""The names of the options of the trainer, by the names of the options of `Control`."""


@dataclass(frozen=True)
class Curve(BaseTrainer):
    r"""Trainer that learns a curve or another embedding in two phases.

    By default, the embedding is a Bézier curve. It starts at the server's model $\Theta^t$, and its last control point
    is the local model, called the end. The trainer minimises the mean loss $\ell$ over points $\iota_\varphi(S)$ of
    the embedding, where $\varphi$ are the control points and $S$ is a random position. A proximal term penalises the
    distance $d$ from the server's model:

    $$\min_\varphi \mathbb{E}_{S \sim P} \left[ \ell(\iota_\varphi(S)) + \tfrac{\mu}{2}\, d(\iota_\varphi(S),
      \Theta^t)^2 \right], \qquad \varphi_0 = \Theta^t.$$

    The distribution $P$ of $S$ depends on the phase:

    - In the first phase, $S$ is always the end.
    - In the second phase, $P$ is the uniform distribution on the domain of the embedding: $[0, 1]$, a tunnel, or a
      simplex.

    The payload contains all control points except the first. If the server requests buffers, the trainer recomputes
    them at the end, because the second phase does not evaluate the loss there.

    Args:
        degree: the degree of the curve. If `embedding` is a tunnel without a curve, the curve of the tunnel has this
            degree.
        epochs: the number of epochs of each phase, as in [`Phases`][manifoldagg.curves.Phases].
        steps: the number of steps of each phase, in place of `epochs`.
        optimizer: the optimizer class, as in [`Training`][manifoldagg.curves.Training].
        rate: the learning rate of the end.
        control_rate: the learning rate of the control points, as in [`Control`][manifoldagg.curves.Control].
        freeze_end: whether the end is fixed in the second phase.
        control_start: the initial inner control points of the second phase. `"chord"` spaces them equally between
            $\Theta^t$ and the end, and `"base"` sets all of them to $\Theta^t$.
        proximal: the weight $\mu$, or a [`ProximalTerm`][manifoldagg.curves.ProximalTerm] in place of the squared
            distance.
        alternate: whether the phases alternate.
        control_projection: the fraction $\gamma \in [0, 1]$ of the motion along the chord that is removed from the
            inner control points, as in [`Control`][manifoldagg.curves.Control].
        sampling: the kind of [`Sampling`][manifoldagg.curves.Sampling].
        samples: the number of sampled points of the curve for each batch.
        sharpness: `SAM` or `ASAM`, for sharpness-aware gradients.
        embedding: an [`Embedding`][manifoldagg.curves.Embedding] in place of the curve, such as `Tunnel(radius=0.1)` or
            `Simplex(vertices=3)`. The trainer constructs the embedding in the space of the models. A tunnel must have
            the ambient form, because the second phase starts at the chord, and the subspace form is undefined for a
            chord. Except for a tunnel, the rule must have the same embedding.

    Raises:
        ArgumentError: if an option is out of range. The error message contains the name of the option.

    Source: Manifold (6), Algorithm 2.

    Example:
        >>> from manifoldagg.curves import Tunnel
        >>> Curve(degree=2, epochs=(2, 2), proximal=1e-3).degree
        2
        >>> Curve(embedding=Tunnel(radius=0.1)).embedding.radius
        0.1
    """

    degree: int = 2
    epochs: tuple[int, int] = (2, 2)
    steps: tuple[int, int] | None = None
    optimizer: Optimizer = torch.optim.Adam
    rate: float = 1e-3
    control_rate: float | None = None
    freeze_end: bool = True
    control_start: str = "chord"
    proximal: float | ProximalTerm = 0.0
    alternate: bool = False
    control_projection: float = 0.0
    sampling: str = "uniform"
    samples: int = 1
    sharpness: Sharpness | None = None
    embedding: Embedding | None = None

    def __post_init__(self) -> None:
        check_count("degree", self.degree)
        check_choice("freeze_end", self.freeze_end, (True, False))
        phases = self._options(self.degree + 1)["phases"]
        if self.embedding is not None:
            self._check_embedding()
        elif self.degree == 1 and self.freeze_end and phases.limits[1]:
            amount = "epochs" if self.steps is None else "steps"
            raise ArgumentError(
                f"{amount}: expected ({phases.limits[0]}, 0), because a curve of degree 1 has no interior control "
                f"point, got {phases.limits}"
            )

    def _check_embedding(self) -> None:
        given = self.embedding
        if not isinstance(given, Embedding):
            raise ArgumentError(f"embedding: expected an Embedding, got {short_repr(given)}")
        if isinstance(given, Tunnel) and given.form != "ambient":
            raise ArgumentError(f"embedding: expected a tunnel with form='ambient', got form={given.form!r}")
        if self.sampling != "uniform" and not isinstance(given, CurveEmbedding):
            raise ArgumentError(f"sampling: expected 'uniform' for {type(given).__name__}, got {self.sampling!r}")

    def _options(self, size: int) -> dict[str, Any]:
        free = None if self.freeze_end else range(1, size)
        with renamed_arguments(CONTROL_NAMES):
            control = Control(self.control_rate, self.control_start, self.control_projection, free)
        with renamed_arguments({"kind": "sampling"}):
            sampling = Sampling(self.sampling, self.samples)
        return {
            "phases": Phases(self.epochs, self.steps, self.alternate),
            "training": Training(self.optimizer, self.rate, self.proximal, self.sharpness),
            "control": control,
            "sampling": sampling,
        }

    def num_steps(self, message: Message, num_batches: int) -> int:
        return sum(self.epochs) * num_batches if self.steps is None else sum(self.steps)

    def _train(self, task: TrainingTask) -> Payload:
        samples = task.samples
        template: Embedding = Bezier(task.space, self.degree) if self.embedding is None else self.embedding
        embedding = template.on(task.space, self.degree)
        learned = task.fit(embedding, **self._options(embedding.size))
        return Payload(learned.phi[1:], samples, buffers=task.buffers(at=learned.phi[-1]))
