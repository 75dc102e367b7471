"""The curve through an embedding from its first to its last control point.

An embedding is a low-dimensional subset of the space of models, which its control points define. A curve is an
embedding with one dimension. Other embeddings, such as a simplex of models, have several dimensions.
"""

from dataclasses import dataclass

from manifoldagg.curves.embedding import Embedding
from manifoldagg.curves.path import CurveEmbedding, Parameter, Phi, Points, as_parameter
from manifoldagg.manifolds import Manifold

__all__ = ["EndPath"]


@dataclass(frozen=True)
class EndPath(CurveEmbedding):
    r"""The curve through an embedding from its first to its last control point, $s \mapsto \iota_\varphi(x(s))$.

    The embedding $\iota_\varphi$ maps coordinates to models. Its method `path_coordinates` computes the coordinates
    $x(s)$ of the curve, which form a geodesic in the space of coordinates. The curve has the same control points
    $\varphi$ as the embedding.

    Args:
        embedding: an embedding with an end point.

    Source: Manifold §3, where $\omega = x(1)$ is the distinguished local model.

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
