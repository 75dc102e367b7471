"""The client of FLOCO: learn all vertices of a simplex from models drawn in a region of it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from manifoldagg.curves import Control, Phases, Sampling, Sharpness, Simplex, Training, fit
from manifoldagg.errors import ArgumentError, check_number
from manifoldagg.federated.contract import Memory, Message, Payload
from manifoldagg.federated.trainers.curve import count_samples
from manifoldagg.manifolds import Loss, Manifold


@dataclass(frozen=True)
class Region(Simplex):
    r"""A simplex whose places are drawn from $(1 - \lambda)\, c + \lambda\, y$, $y$ uniform in it.

    Args:
        space: flat.
        vertices: n.
        centre: $c$, barycentric coordinates.
        share: $\lambda \in [0, 1]$: 1 is the whole simplex.

    Example:
        >>> from manifoldagg.manifolds import Flat
        >>> x = Region(Flat(2), 3, centre=(1.0, 0.0, 0.0), share=0.1).sample(100)
        >>> bool((x[:, 0] >= 0.9).all() and (x >= 0).all())
        True
    """

    centre: tuple[float, ...]
    share: float = 1.0

    def sample(self, *batch: int, generator: torch.Generator | None = None) -> Float64[Tensor, "..."]:
        """Places (*batch, n), uniform in the region."""
        y = super().sample(*batch, generator=generator)
        return torch.lerp(torch.tensor(self.centre, dtype=y.dtype, device=y.device), y, self.share)


@dataclass(frozen=True)
class FLOCO:
    r"""Minimise $\mathbb{E}_x\, \ell(\sum_j x_j \Phi_j)$ over the vertices $\Phi_j$, $x$ drawn in the client's region.

    The vertices, the centre of the region and its radius come with the message of the rule
    [`FLOCO`][manifoldagg.federated.rules.FLOCO]; without a centre $x$ is uniform in the simplex. A client's own model
    is that at the centre, `Simplex(space, n)(vertices, centre)`.

    Args:
        epochs: passes over the client's batches.
        optimizer: any optimiser of `torch.optim`.
        rate: its learning rate.
        samples: places $x$ for each batch.
        proximal: $\mu$ of $\tfrac{\mu}{2}\, \|\sum_j x_j \Phi_j - \Theta^t\|^2$.
        sharpness: `SAM` or `ASAM` of `manifoldagg.curves`.

    Source: Grinwald, Wiesner, Nakajima 2024, Algorithm 1.

    Example:
        >>> FLOCO(epochs=5, rate=0.02).samples
        1
    """

    epochs: int = 2
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    rate: float = 1e-2
    samples: int = 1
    proximal: float = 0.0
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
        """Learn the vertices, from those of the message.

        Returns:
            The vertices as the points of the payload, and how many samples `batches` hold.

        Raises:
            ArgumentError: as [`fit`][manifoldagg.fit]; if the message has no vertices.
            DivergenceError: if a loss is not finite.
        """
        if "vertices" not in message.tensors:
            raise ArgumentError("message: expected vertices, as from the rule FLOCO")
        vertices, centre = message.tensors["vertices"], message.tensors.get("centre")
        n = len(vertices)
        simplex = Simplex(space, n)
        if centre is not None:
            share = 0.5 * check_number("message: radius", message.numbers["radius"], above=0, at_most=2)
            simplex = Region(space, n, centre=tuple(centre.tolist()), share=share)
        learned = fit(
            simplex,
            loss,
            batches,
            start=message.start,
            phi=vertices,
            phases=Phases((0, self.epochs)),
            training=Training(self.optimizer, self.rate, self.proximal, self.sharpness),
            control=Control(free=range(n)),
            sampling=Sampling(samples=self.samples),
            generator=generator,
        )
        return Payload(learned.phi, count_samples(batches))
