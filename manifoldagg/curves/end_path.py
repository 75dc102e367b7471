"""The curve from the first to the last control point of an embedding.

An embedding is a low-dimensional subset of the space of models, such as a simplex. A few models, the control points,
define this subset. The curve connects the first and the last of them within the subset.
"""

from dataclasses import dataclass

from manifoldagg.curves.embedding import Embedding
from manifoldagg.curves.path import CurveEmbedding, Parameter, Phi, Points, as_parameter
from manifoldagg.manifolds import Manifold

__all__ = ["EndPath"]


@dataclass(frozen=True)
class EndPath(CurveEmbedding):
    r"""The curve of models from the first to the last control point of an embedding.

    An embedding $\iota_\varphi$ is a map from coordinates to models, with control points $\varphi$. The curve is
    $s \mapsto \iota_\varphi(x(s))$, where the coordinates $x(s)$ follow a geodesic in coordinate space. The method
    `path_coordinates` of the embedding computes $x(s)$.

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
