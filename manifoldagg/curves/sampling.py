"""Sampling of coordinates of an embedding for a batch: uniform, stratified, or by a quadrature rule."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from manifoldagg._validation import check_choice, check_count
from manifoldagg.curves.embedding import Coordinates, Embedding
from manifoldagg.errors import ArgumentError

__all__ = ["Sampling"]


@dataclass(frozen=True)
class Sampling:
    r"""A sampling of (weight, coordinates) pairs for a batch, with $\mathbb{E} \sum_k w_k f(x_k) = \int_M f$.

    Args:
        kind: the method:

            - `"uniform"`: independent uniform coordinates with the weights 1 / samples.
            - `"stratified"`: one uniform parameter in each of `samples` equal subintervals of [0, 1]. It requires a
              curve.
            - `"quadrature"`: the nodes and weights of the Gauss-Legendre rule on [0, 1], without randomness. The sum is
              exact for polynomials of degree 2·samples - 1. It requires a curve.
        samples: the number of coordinates for each batch.

    Raises:
        ArgumentError: if an option is invalid.

    Example:
        >>> from manifoldagg.curves.bezier import Bezier
        >>> from manifoldagg.manifolds import Flat
        >>> nodes = Sampling("quadrature", samples=2).coordinates(Bezier(Flat(1)), torch.zeros(3, 1))
        >>> [(weight, round(t, 4)) for weight, t in nodes]
        [(0.5, 0.2113), (0.5, 0.7887)]
    """

    kind: str = "uniform"
    samples: int = 1

    def __post_init__(self) -> None:
        check_choice("sampling", self.kind, ("uniform", "stratified", "quadrature"))
        check_count("samples", self.samples)

    def check(self, embedding: Embedding) -> None:
        """Check that stratified sampling and quadrature are used only for curves.

        Raises:
            ArgumentError: if `embedding` is not an embedding of [0, 1].
        """
        if self.kind != "uniform" and embedding.domain:
            raise ArgumentError(f"sampling: expected uniform, or a curve with {self.kind}, got {embedding}")

    def coordinates(
        self, embedding: Embedding, phi: Tensor, generator: torch.Generator | None = None
    ) -> Iterator[tuple[float, Coordinates]]:
        r"""Yield the weights and coordinates for one batch.

        Args:
            embedding: the embedding. If its `sample` is not implemented, as for some tunnels, `sample_in` is called.
            phi: the control points of the embedding.
            generator: the random generator; `None` for torch's default generator.
        """
        if self.kind == "quadrature":
            nodes, weights = np.polynomial.legendre.leggauss(self.samples)
            yield from ((float(w) / 2, (1 + float(z)) / 2) for w, z in zip(weights, nodes, strict=True))
            return
        for k in range(self.samples):
            if embedding.domain:
                try:
                    drawn = embedding.sample(1, generator=generator)
                except NotImplementedError:
                    # The coordinates of an ambient tunnel depend on its control points.
                    drawn = embedding.sample_in(phi, 1, generator=generator, validate=False)  # type: ignore[attr-defined]
                yield 1 / self.samples, drawn[0]
            else:
                u = torch.rand((), generator=generator, device=None if generator is None else generator.device).item()
                yield 1 / self.samples, u if self.kind == "uniform" else (k + u) / self.samples
