"""Client trainer for the rule FLOCO.

The trainer learns the vertices of a simplex of models. It minimises the mean loss of models that it samples from the
simplex.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from manifoldagg._validation import check_number
from manifoldagg.curves import Control, Phases, ProximalTerm, Sampling, Sharpness, Simplex, Training
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.clients.base import BaseTrainer, TrainingTask
from manifoldagg.federated.types import Message, Payload
from manifoldagg.manifolds.optimizers import Optimizer

__all__ = ["FLOCO", "Region"]


@dataclass(frozen=True)
class Region(Simplex):
    r"""Region of a simplex: a smaller copy of the simplex around a centre.

    The region consists of the points $(1 - \lambda)\, c + \lambda\, y$ for all points $y$ of the simplex, where $c$ is
    the centre and $\lambda$ is the relative size. A point of a simplex with n vertices is given by its barycentric
    coordinates, which are n non-negative weights that sum to 1.

    Args:
        space: a flat space.
        vertices: the number n of vertices.
        centre: the n barycentric coordinates of the centre $c$.
        share: the size $\lambda \in [0, 1]$ of the region relative to the simplex. The value 1 selects the whole
            simplex.

    Example:
        >>> from manifoldagg.manifolds import Flat
        >>> x = Region(Flat(2), 3, centre=(1.0, 0.0, 0.0), share=0.1).sample(100)
        >>> bool((x[:, 0] >= 0.9).all() and (x >= 0).all())
        True
    """

    centre: tuple[float, ...] = field(kw_only=True)
    share: float = 1.0

    def sample(self, *batch: int, generator: torch.Generator | None = None) -> Float64[Tensor, "..."]:
        """Sample coordinates (*batch, n) uniformly in the region."""
        y = super().sample(*batch, generator=generator)
        return torch.lerp(torch.tensor(self.centre, dtype=y.dtype, device=y.device), y, self.share)


@dataclass(frozen=True)
class FLOCO(BaseTrainer):
    r"""Trainer that learns a simplex of models, in the region of the simplex that belongs to the client.

    Each vertex $\Phi_j$ of the simplex is a model. A point with the coordinates $x_j \ge 0$, $\sum_j x_j = 1$ is the
    model $\sum_j x_j \Phi_j$. The trainer minimises the mean loss $\mathbb{E}_x\, \ell(\sum_j x_j \Phi_j)$ over the
    vertices, where $x$ is a random point of the client's region.

    - The rule [`FLOCO`][manifoldagg.federated.rules.FLOCO] sends the vertices, and the centre and the radius of the
      region. Without a centre, the region is the whole simplex.
    - The trainer returns the trained vertices in its payload (the update of the client).
    - The client's own model is the model at the centre, `Simplex(space, n)(vertices, centre)`.

    Args:
        epochs: the number of passes over the client's batches.
        optimizer: the optimizer class, as in [`Training`][manifoldagg.curves.Training].
        rate: the learning rate.
        samples: the number of sampled points $x$ for each batch.
        proximal: the weight $\mu$ of the proximal term $\tfrac{\mu}{2}\, \|\sum_j x_j \Phi_j - \Theta^t\|^2$, where
            $\Theta^t$ is the server's model. Alternatively, another
            [`ProximalTerm`][manifoldagg.curves.ProximalTerm].
        sharpness: `SAM` or `ASAM` of `manifoldagg.curves`, for sharpness-aware gradients.

    Raises:
        ArgumentError: if an option is out of range. The error message contains the name of the option.

    Source: Grinwald, Wiesner, Nakajima 2024, Algorithm 1.

    Example:
        >>> FLOCO(epochs=5, rate=0.02).samples
        1
    """

    epochs: int = 2
    optimizer: Optimizer = torch.optim.SGD
    rate: float = 1e-2
    samples: int = 1
    proximal: float | ProximalTerm = 0.0
    sharpness: Sharpness | None = None

    def __post_init__(self) -> None:
        self._options()

    def _options(self) -> dict[str, Any]:
        return {
            "phases": Phases((0, self.epochs)),
            "training": Training(self.optimizer, self.rate, self.proximal, self.sharpness),
            "sampling": Sampling(samples=self.samples),
        }

    def num_steps(self, message: Message, num_batches: int) -> int:
        return self.epochs * num_batches

    def _train(self, task: TrainingTask) -> Payload:
        if "vertices" not in task.message.tensors:
            raise ArgumentError("message: expected vertices, as the rule FLOCO sends, got a message without them")
        samples = task.samples
        vertices = task.message.tensors["vertices"]
        centre = task.message.tensors.get("centre")
        n = len(vertices)
        simplex = Simplex(task.space, n)
        if centre is not None:
            share = 0.5 * check_number("message: radius", task.message.numbers["radius"], above=0, at_most=2)
            simplex = Region(task.space, n, centre=tuple(centre.tolist()), share=share)
        learned = task.fit(simplex, phi=vertices, control=Control(free=range(n)), **self._options())
        # The server uses the centroid of the vertices as its model.
        return Payload(learned.phi, samples, buffers=task.buffers(at=learned.phi.mean(0)))
