"""Sampling of coordinates for the fit of an embedding.

An embedding, such as a curve, maps coordinates to models. For each batch of data, the fit selects one or more
coordinates and averages the losses of the corresponding models.
"""

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
    r"""A method that selects the weighted coordinates at which a fit evaluates the loss for each batch.

    The weights $w_k$ and coordinates $x_k$ define the weighted mean $\sum_k w_k f(x_k)$ of a function $f$ of the
    coordinates, such as the loss. Every method except `"length"` samples the domain $M$ of the coordinates uniformly.
    The expectation of the weighted mean is then $\int_M f$. For `"quadrature"`, this equation is exact only if $f$ is a
    polynomial of limited degree. With `"length"`, the points $\iota_\varphi(x_k)$ are uniformly distributed along a
    curve of length $L$:

    $$\mathbb{E} \sum_k w_k f(x_k) = \frac1L \int_0^1 f(t)\, \|\iota_\varphi'(t)\|\, dt, \qquad
      L = \int_0^1 \|\iota_\varphi'(t)\|\, dt.$$

    Args:
        kind: the kind of sampling:

            - `"uniform"`: independent uniform coordinates with the weights 1 / samples.
            - `"stratified"`: one uniform parameter in each of `samples` equal subintervals of [0, 1]. It requires a
              curve.
            - `"quadrature"`: the nodes and weights of the Gauss-Legendre rule on [0, 1], without randomness. The sum is
              exact for polynomials of degree 2·samples - 1. It requires a curve.
            - `"length"`: independent parameters of points that are uniform along the length of the curve, with the
              weights 1 / samples. It requires a curve, and one pass over the control points for each batch. If the
              length is 0, the parameters are uniform.

              The distribution of the points is $U(\mathcal{M}_\varphi)$ in the objective (19) of the Report. As in the
              Report, training differentiates the loss at the sampled points, and treats their parameters as constants.
              The gradient therefore ignores that the distribution changes with $\varphi$.
        samples: the number of coordinates for each batch.

    Raises:
        ArgumentError: if an option is invalid.

    Source: Report (19), for `"length"`.

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
        check_choice("kind", self.kind, ("uniform", "stratified", "quadrature", "length"))
        check_count("samples", self.samples)

    def check(self, embedding: Embedding) -> None:
        """Check that the sampling is uniform if the embedding is not a curve.

        Raises:
            ArgumentError: if `embedding` is not a curve, and the sampling is not uniform.
        """
        if self.kind != "uniform" and embedding.domain:
            raise ArgumentError(f"sampling: expected uniform, or a curve with {self.kind}, got {embedding}")

    def coordinates(
        self, embedding: Embedding, phi: Tensor, generator: torch.Generator | None = None
    ) -> Iterator[tuple[float, Coordinates]]:
        r"""Yield the weights and coordinates for one batch.

        Args:
            embedding: the embedding. If its method `sample` is not implemented, its method `sample_in` is called.
            phi: the control points of the embedding.
            generator: the random generator; `None` for torch's default generator.
        """
        if self.kind == "quadrature":
            nodes, weights = np.polynomial.legendre.leggauss(self.samples)
            # The rule on [-1, 1] is mapped to [0, 1], which halves the weights.
            yield from ((float(w) / 2, (1 + float(z)) / 2) for w, z in zip(weights, nodes, strict=True))
            return
        if self.kind == "length":
            device = None if generator is None else generator.device
            fractions = torch.rand(self.samples, generator=generator, dtype=torch.float64, device=device)
            # A uniform fraction of the length gives a point that is uniform on the curve.
            parameters = embedding.parameter_at_length(phi, fractions)  # type: ignore[attr-defined]  # a curve
            yield from ((1 / self.samples, t) for t in parameters.tolist())
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
                # Stratified sampling divides [0, 1] into equal intervals and draws one parameter in each of them.
                u = torch.rand((), generator=generator, device=None if generator is None else generator.device).item()
                yield 1 / self.samples, u if self.kind == "uniform" else (k + u) / self.samples
