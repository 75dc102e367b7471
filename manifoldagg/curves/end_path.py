"""The path through an embedding from its start to its end point, as a curve.

Embeddings such as tunnels and simplices have more than one dimension. The path is a curve inside the embedding. It
leads from the first to the last control point.
"""

from dataclasses import dataclass

from manifoldagg.curves.embedding import Embedding
from manifoldagg.curves.path import CurveEmbedding, Parameter, Phi, Points, as_parameter
from manifoldagg.manifolds import Manifold

__all__ = ["EndPath"]


@dataclass(frozen=True)
class EndPath(CurveEmbedding):
    r"""The curve from the start to the end point of an embedding: $s \mapsto \iota_\varphi(x(s))$.

    The method `path_coordinates` of the embedding computes the coordinates $x(s)$, which form a geodesic of the domain.
    The curve starts at the first control point $\varphi_0$. It ends at the last control point, whose coordinates are
    $\omega = x(1)$. The curve and the embedding have the same control points $\varphi$.

    Args:
        embedding: an embedding with an end point.

    Source: Manifold §3, where $\omega$ is the distinguished local model.

    Example:
        >>> import torch
        >>> from manifoldagg.curves.simplex import Simplex
        >>> from manifoldagg.manifolds import Flat
        >>> path = EndPath(Simplex(Flat(2), vertices=3))
        >>> path(torch.tensor([[0.0, 0.0], [4.0, 4.0], [2.0, 0.0]]), 0.25)
        tensor([0.5000, 0.0000])
    """

    embedding: Embedding

    @property
    def space(self) -> Manifold:  # type: ignore[override]  # of the embedding
        """The space of the embedding."""
        return self.embedding.space

    @property
    def size(self) -> int:
        return self.embedding.size

    def __call__(self, phi: Phi, t: Parameter) -> Points:
        self._check_phi(phi)
        return self.embedding(phi, self.embedding.path_coordinates(as_parameter(t, phi)))
