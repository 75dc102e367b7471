"""The two readings of a stale update: what it moved (tangent), and where it went (position)."""

from dataclasses import dataclass
from typing import Any

from manifoldagg.corrections.correction import Correction, identity
from manifoldagg.corrections.frame import Matrix


@dataclass(frozen=True)
class Tangent(Correction):
    r"""Trust the displacement: $\pi v = v$ (ASGD).

    Source: Manifold (AsyncTan).
    """

    def coefficients(self, gram: Matrix, state: Any = None) -> tuple[list[list[Any]], Any]:
        return identity(len(gram) - 1), state


@dataclass(frozen=True)
class Position(Correction):
    r"""Trust the model that was reached: $\pi v = v - g$, the displacement from the current model to it (FedAsync).

    Source: Manifold (AsyncPos).

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Flat
        >>> base, current, model = torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([3.0])
        >>> Position()(Flat(1), base, current, (model - base)[None])
        tensor([[2.]])
    """

    def coefficients(self, gram: Matrix, state: Any = None) -> tuple[list[list[Any]], Any]:
        return identity(len(gram) - 1, drift=-1.0), state
