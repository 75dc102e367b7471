"""Simplicial complexes of models, which are unions of simplices with shared vertices.

A simplex is the convex hull of its vertices, and the vertices are models. For example, two triangles with a common edge
form a simplicial complex.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from manifoldagg._validation import check_choice, check_count, short_repr
from manifoldagg.curves.barycentre import check_barycentric, weighted_mean
from manifoldagg.curves.embedding import Coordinates
from manifoldagg.curves.simplex import Hull, Simplex
from manifoldagg.errors import ArgumentError
from manifoldagg.kernels.operands import needs_autograd_path
from manifoldagg.manifolds import Manifold

__all__ = ["Complex"]

VolumeMode = Literal["face", "volume"]


@dataclass(frozen=True)
class Complex(Hull):
    r"""A simplicial complex: a union of simplices with shared vertices $\varphi_0, \dots, \varphi_{V-1}$.

    The simplices are called faces. The coordinates of a point are a vector $x \in \mathbb{R}^V$ with one barycentric
    coordinate for each vertex. Only the vertices of a single face may have nonzero coordinates. These coordinates
    define the point $\iota_\varphi(x)$ of the face in the same way as in a
    [`Simplex`][manifoldagg.curves.simplex.Simplex].

    If a point belongs to several faces, all of them define the same point $\iota_\varphi(x)$. On a curved space, the
    derivatives at this point are those of the first face that contains it.

    Args:
        space: as for a simplex.
        faces: the vertex indices of each face. Together they must contain all indices 0, ..., V - 1.

    Raises:
        ArgumentError: if `space` is not a manifold, `faces` is not a tuple of tuples of distinct integers $\ge 0$, a
            vertex is missing, or one face contains another.

    Source: Benton, Maddox, Lotfi, Wilson 2021.

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Flat
        >>> square = Complex(Flat(2), faces=((0, 1, 2), (1, 2, 3)))
        >>> phi = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> square.volume(phi)
        tensor(1., dtype=torch.float64)
        >>> square(phi, torch.tensor([0.0, 0.5, 0.0, 0.5]))
        tensor([1.0000, 0.5000])
    """

    space: Manifold
    faces: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        # The constructor of a simplex raises an error if the space is not a manifold.
        Simplex(self.space, 1)
        if not (isinstance(self.faces, tuple) and self.faces and all(isinstance(f, tuple) and f for f in self.faces)):
            raise ArgumentError(
                f"faces: expected tuples of vertices, at least one of each, got {short_repr(self.faces)}"
            )
        for face in self.faces:
            for vertex in face:
                check_count("faces", vertex, at_least=0)
            if len(set(face)) < len(face):
                raise ArgumentError(f"faces: expected distinct vertices, got {short_repr(face)}")
        # Every control point must be a vertex of a face. Otherwise, it would have no effect on the complex.
        used = set(itertools.chain(*self.faces))
        if len(used) < self.size:
            missing = next(vertex for vertex in itertools.count() if vertex not in used)
            raise ArgumentError(f"faces: expected every vertex from 0 to {self.size - 1}, got no face with {missing}")
        for a, b in itertools.permutations(self.faces, 2):
            if set(a) <= set(b):
                raise ArgumentError(f"faces: expected faces that do not contain each other, got {a} inside {b}")

    @property
    def size(self) -> int:
        return 1 + max(itertools.chain(*self.faces))

    @property
    def components(self) -> tuple[tuple[int, ...], ...]:
        """The vertices of each connected component.

        Example:
            >>> from manifoldagg.manifolds import Flat
            >>> Complex(Flat(2), ((0, 1), (2, 3), (1, 4))).components
            ((0, 1, 4), (2, 3))
        """
        # Each face merges all components that share a vertex with it.
        parts: list[set[int]] = []
        for face in self.faces:
            disjoint = [part for part in parts if part.isdisjoint(face)]
            parts = [*disjoint, set(face).union(*(part for part in parts if part not in disjoint))]
        return tuple(sorted(tuple(sorted(part)) for part in parts))

    def sample(self, *batch: int, generator: torch.Generator | None = None) -> Float64[Tensor, "..."]:
        """Draw random points of this union of simplices, and return their barycentric coordinates (*batch, V).

        For each point, the method first selects one of the simplices with equal probabilities. It then draws a
        uniformly distributed point of this simplex.
        """
        device = None if generator is None else generator.device
        return self._sample_in_faces(
            torch.randint(len(self.faces), batch, generator=generator, device=device), generator
        )

    def sample_in(
        self,
        phi: Float[Tensor, "size ..."],
        *batch: int,
        by: VolumeMode = "volume",
        generator: torch.Generator | None = None,
    ) -> Float64[Tensor, "..."]:
        """Draw the barycentric coordinates (*batch, V) of random points of a complex with given vertices.

        By default, the probability of each face is proportional to its volume, so the points are uniformly distributed
        over the complex.

        Args:
            phi: the vertices (V, *space.shape).
            batch: the shape of the batch.
            by: `"volume"` for probabilities proportional to the volumes, or `"face"` for equal probabilities.
            generator: the random generator.

        Raises:
            ArgumentError: as in `log_volume`, or if every face is degenerate.
        """
        if check_choice("by", by, ("face", "volume")) == "face":
            return self.sample(*batch, generator=generator)
        shares = self._volume_fractions(phi)
        if not bool(shares.any()):
            raise ArgumentError("phi: expected a face with a positive volume, got only degenerate faces")
        # `multinomial` requires its probabilities on the device of the generator.
        shares = shares if generator is None else shares.to(generator.device)
        # `multinomial` does not accept 0 draws, so one additional face is drawn and discarded.
        faces = shares.multinomial(math.prod(batch) + 1, replacement=True, generator=generator)
        return self._sample_in_faces(faces[1:].reshape(batch), generator)

    def log_volumes(self, phi: Float[Tensor, "size ..."]) -> Float64[Tensor, " faces"]:
        """Compute the log-volume (faces,) of each face, as `Simplex.log_volume` does."""
        self._check_phi(phi)
        return torch.stack([Simplex(self.space, len(face)).log_volume(phi[list(face)]) for face in self.faces])

    def volume(self, phi: Float[Tensor, "size ..."]) -> Float64[Tensor, ""]:
        """Compute the volume of the complex on a flat space, which is the sum of the volumes of its faces.

        If several faces overlap, the volume of the overlap is counted once for each of these faces.

        Raises:
            ArgumentError: if the space is curved, `phi` is invalid, or the faces have different dimensions.
        """
        self._check_phi(phi)
        self._check_equal_dimensions()
        return torch.stack([Simplex(self.space, len(face)).volume(phi[list(face)]) for face in self.faces]).sum()

    def log_volume(self, phi: Float[Tensor, "size ..."], *, by: VolumeMode = "volume") -> Float64[Tensor, ""]:
        r"""Compute the log-volume of the complex, which a fit can use as a regulariser.

        Let $V_f$ be the volume of face $f$. By default, the result is $\log \sum_f V_f$, the logarithm of the total
        volume. With `by="face"`, the result is $\sum_f \log V_f$. As a regulariser, this sum also prevents individual
        faces from collapsing, because it is $-\infty$ if the volume of any face is 0.

        Raises:
            ArgumentError: if the space is curved, `phi` is invalid, or the volumes of faces of different dimensions
                would be added.
        """
        if check_choice("by", by, ("face", "volume")) == "face":
            return self.log_volumes(phi).sum()
        self._check_equal_dimensions()
        logs = self.log_volumes(phi)
        # Subtracting the largest logarithm avoids overflow and underflow of the volumes. If all volumes are 0, the
        # subtraction would give NaN.
        largest = logs.detach().amax()
        is_positive = largest > -math.inf
        total = torch.where(is_positive, logs - torch.where(is_positive, largest, 0.0), 0.0).exp().sum().log()
        return torch.where(is_positive, largest + total, -math.inf)

    def log_volume_gradient(
        self, phi: Float[Tensor, "size ..."], *, by: VolumeMode = "volume"
    ) -> Float[Tensor, "size ..."]:
        r"""Compute the gradient of `log_volume` with respect to the vertices, $\sum_f s_f\, \partial \log V_f$.

        In this sum, $V_f$ is the volume of face $f$, and $s_f$ is its weight. By default, the weight is the volume of
        the face divided by the total volume, $s_f = V_f / \sum_g V_g$. With `by="face"`, all weights are 1.
        """
        check_choice("by", by, ("face", "volume"))
        self._check_phi(phi)
        shares = phi.new_ones(len(self.faces), dtype=torch.float64) if by == "face" else self._volume_fractions(phi)
        gradient = torch.zeros_like(phi, dtype=torch.float64)
        for face, share in zip(self.faces, shares, strict=True):
            # A shared vertex receives the sum of the gradients of its faces, accumulated in float64.
            own = Simplex(self.space, len(face)).log_volume_gradient(phi[list(face)].double())
            gradient.index_add_(0, torch.tensor(face, device=phi.device), share * own)
        return gradient.to(phi.dtype)

    def nearest(
        self, phi: Float[Tensor, "size ..."], point: Float[Tensor, "..."]
    ) -> tuple[Float64[Tensor, "..."], Float64[Tensor, "..."]]:
        """Find the point of the simplicial complex that is nearest to each given point.

        The result contains the barycentric coordinates of the nearest points and their distances from the given points.
        If several faces of the complex are equally near, the nearest point on the first of these faces is returned.
        """
        self._check_phi(phi)
        candidates = []
        distances = []
        # The nearest point of a union is the nearest of the nearest points of its parts.
        for face in self.faces:
            x, distance = Simplex(self.space, len(face)).nearest(phi[list(face)], point)
            index = torch.tensor(face, device=x.device)
            candidates.append(x.new_zeros(*x.shape[:-1], self.size).index_copy(-1, index, x))
            distances.append(distance)
        nearest, face_of = torch.stack(distances).min(0)
        chosen = torch.stack(candidates).take_along_dim(face_of[None, ..., None], 0)
        return chosen[0], nearest

    def weights(self, x: Coordinates) -> Float64[Tensor, "..."]:
        """Convert barycentric coordinates `x` to float64, and divide them by their sum.

        The division corrects a sum that differs from 1 by rounding errors. The result (*batch, V) contains the weights
        of the V vertices in their weighted mean.

        Raises:
            ArgumentError: if `x` does not contain barycentric coordinates, or no face contains all vertices with
                nonzero coordinates.
        """
        self._containing_face(x)
        return super().weights(x)

    def _curved_mean(self, phi: Tensor, x: Coordinates, weights: Tensor) -> Tensor:
        # The mean uses only the vertices of the face, so the other vertices need no log. Faces with fewer vertices are
        # padded with their first vertex and the weight 0.
        face = self._containing_face(x).to(phi.device)
        longest = max(map(len, self.faces))
        table = [[*f, *[f[0]] * (longest - len(f))] for f in self.faces]
        used = [[1.0] * len(f) + [0.0] * (longest - len(f)) for f in self.faces]
        corners = torch.tensor(table, device=phi.device)[face]
        weights = weights.gather(-1, corners) * torch.tensor(used, dtype=torch.float64, device=phi.device)[face]
        weights = weights / weights.sum(-1, keepdim=True)
        return weighted_mean(self.space, phi[corners].double(), weights).to(phi.dtype)

    def _membership(self, device: torch.device) -> Tensor:
        """Return the mask (faces, V) of the vertices that belong to each face."""
        return torch.tensor([[vertex in face for vertex in range(self.size)] for face in self.faces], device=device)

    def _containing_face(self, x: Coordinates) -> Tensor:
        """Return the index of the first face that contains each point of the domain: (*batch,)."""
        coordinates = check_barycentric(x, self.size)
        # The weight outside of a face is 0 for the faces that contain the point.
        outside = (coordinates.detach().double().abs().unsqueeze(-2) * ~self._membership(coordinates.device)).sum(-1)
        least, face = outside.min(-1)
        if not needs_autograd_path([least]):
            invalid = least > math.sqrt(torch.finfo(coordinates.dtype).eps)
            if bool(invalid.any()):
                where = tuple(invalid.nonzero()[0].tolist())
                support = tuple(coordinates.detach()[where].nonzero().flatten().tolist())
                raise ArgumentError(f"x: expected vertices of one face, got coordinates on {support} at {where}")
        return face

    def _sample_in_faces(self, face: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw a uniform point of each given face, and return its barycentric coordinates."""
        # Normalised exponential variables are uniformly distributed on a simplex (Dirichlet distribution).
        spacings = torch.empty(*face.shape, self.size, dtype=torch.float64, device=face.device)
        spacings = spacings.exponential_(generator=generator) * self._membership(face.device)[face]
        return spacings / spacings.sum(-1, keepdim=True)

    def _volume_fractions(self, phi: Tensor) -> Tensor:
        """Return the fraction of the total volume of each face, or zeros if the total volume is 0."""
        self._check_equal_dimensions()
        # The softmax of log-volumes is V_f / Σ V without overflow. If all volumes are 0, it is NaN.
        return self.log_volumes(phi.detach()).softmax(0).nan_to_num(0.0)

    def _check_equal_dimensions(self) -> None:
        """Raise an `ArgumentError` if the faces have different dimensions."""
        # Volumes of different dimensions cannot be added.
        sizes = sorted({len(face) - 1 for face in self.faces})
        if len(sizes) > 1:
            raise ArgumentError(f"faces: expected faces of one dimension, whose volumes add up, got dimensions {sizes}")
