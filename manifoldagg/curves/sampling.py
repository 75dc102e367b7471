"""At which places of an embedding a batch meets it: drawn uniformly, in strata, or fixed by a quadrature."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from manifoldagg.curves.embedding import Coordinates, Embedding
from manifoldagg.errors import ArgumentError, check_choice, check_count

SAMPLINGS = ("uniform", "stratified", "quadrature")


def check_sampling(embedding: Embedding, sampling: str, samples: int) -> None:
    """Strata and quadratures are of [0, 1].

    Raises:
        ArgumentError: naming the argument that does not fit.
    """
    check_choice("sampling", sampling, SAMPLINGS)
    check_count("samples", samples)
    if sampling != "uniform" and embedding.domain:
        raise ArgumentError(f"sampling: {sampling} needs a curve, whose places are numbers; got {embedding}")


def places(
    embedding: Embedding, phi: Tensor, sampling: str, samples: int, generator: torch.Generator | None
) -> Iterator[tuple[float, Coordinates]]:
    r"""(weight, place) `samples` times, with $\mathbb{E} \sum_k w_k f(x_k) = \int_M f$ for the uniform $P$.

    - `"uniform"`: independent, of weight 1 / samples.
    - `"stratified"`: one, uniform, in each of `samples` equal parts of [0, 1].
    - `"quadrature"`: the Gauss–Legendre nodes of [0, 1]; nothing is drawn, and the sum is exact for polynomials of
      degree 2·samples - 1.

    Args:
        embedding: with `sample`; where it has `sample_in`, as a tunnel, that draws them.
        phi: the points that draw it.
        sampling: which of the three.
        samples: how many.
        generator: draws; torch's default generator where not given.

    Example:
        >>> from manifoldagg.curves.bezier import Bezier
        >>> from manifoldagg.manifolds import Flat
        >>> [(weight, round(t, 4)) for weight, t in places(Bezier(Flat(1)), torch.zeros(3, 1), "quadrature", 2, None)]
        [(0.5, 0.2113), (0.5, 0.7887)]
    """
    if sampling == "quadrature":
        nodes, weights = np.polynomial.legendre.leggauss(samples)
        yield from ((float(w) / 2, (1 + float(z)) / 2) for w, z in zip(weights, nodes, strict=True))
        return
    for k in range(samples):
        if embedding.domain:
            try:
                drawn = embedding.sample(1, generator=generator)
            except NotImplementedError:
                # An ambient tunnel's places depend on its curve.
                drawn = embedding.sample_in(phi, 1, generator=generator, validate=False)  # type: ignore[attr-defined]
            yield 1 / samples, drawn[0]
        else:
            u = torch.rand((), generator=generator, device=None if generator is None else generator.device).item()
            yield 1 / samples, u if sampling == "uniform" else (k + u) / samples
