"""Sampling of places of an embedding for a batch: uniform, stratified, or fixed by a quadrature."""

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
    r"""A sampling of `samples` (weight, place) pairs with $\mathbb{E} \sum_k w_k f(x_k) = \int_M f$ for uniform $P$.

    Args:
        kind: how places are drawn:

            - `"uniform"`: independent, of weight 1 / samples.
            - `"stratified"`, on a curve: one, uniform, in each of `samples` equal parts of [0, 1].
            - `"quadrature"`, on a curve: the Gauss-Legendre nodes of [0, 1]; nothing is drawn, and the sum is exact
              for polynomials of degree 2·samples - 1.
        samples: places for each batch.

    Raises:
        ArgumentError: naming the option that does not fit.

    Example:
        >>> from manifoldagg.curves.bezier import Bezier
        >>> from manifoldagg.manifolds import Flat
        >>> places = Sampling("quadrature", samples=2).coordinates(Bezier(Flat(1)), torch.zeros(3, 1))
        >>> [(weight, round(t, 4)) for weight, t in places]
        [(0.5, 0.2113), (0.5, 0.7887)]
    """

    kind: str = "uniform"
    samples: int = 1

    def __post_init__(self) -> None:
        check_choice("sampling", self.kind, ("uniform", "stratified", "quadrature"))
        check_count("samples", self.samples)

    def check(self, embedding: Embedding) -> None:
        """Check that strata and quadratures are used for embeddings of [0, 1] only.

        Raises:
            ArgumentError: if `embedding` has other places.
        """
        if self.kind != "uniform" and embedding.domain:
            raise ArgumentError(f"sampling: {self.kind} needs a curve, whose places are numbers; got {embedding}")

    def coordinates(
        self, embedding: Embedding, phi: Tensor, generator: torch.Generator | None = None
    ) -> Iterator[tuple[float, Coordinates]]:
        r"""Return the weights and places for one batch.

        Args:
            embedding: with `sample`; where it has `sample_in`, as a tunnel, that draws them.
            phi: the points that draw it.
            generator: draws; torch's default generator where not given.
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
                    # An ambient tunnel's places depend on its curve.
                    drawn = embedding.sample_in(phi, 1, generator=generator, validate=False)  # type: ignore[attr-defined]
                yield 1 / self.samples, drawn[0]
            else:
                u = torch.rand((), generator=generator, device=None if generator is None else generator.device).item()
                yield 1 / self.samples, u if self.kind == "uniform" else (k + u) / self.samples
