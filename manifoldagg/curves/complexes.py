"""Simplicial complexes: simplices that share vertices, as one embedding."""

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
    r"""A simplicial complex on vertices $\varphi_0, \dots, \varphi_{V-1}$, which its simplices share.

    A place is $x \in \mathbb{R}^V$, barycentric coordinates of all vertices that vanish outside one face;
    $\iota_\varphi(x)$ is the point of that face's [`Simplex`][manifoldagg.curves.simplex.Simplex], and two faces agree
    where they meet. On a curved space a place on several faces has the derivatives of the first that holds it.

    Args:
        space: as for a simplex.
        faces: the vertices of each face, by their numbers; together 0, ..., V - 1.

    Raises:
        ArgumentError: if `space` is no manifold, or `faces` are no tuples of distinct integers $\ge 0$, leave a vertex
            out, or one lies in another.

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
        used = set(itertools.chain(*self.faces))
        if len(used) < self.size:
            missing = next(vertex for vertex in itertools.count() if vertex not in used)
            raise ArgumentError(f"faces: expected every vertex from 0 to {self.size - 1}, but {missing} is in none")
        for a, b in itertools.permutations(self.faces, 2):
            if set(a) <= set(b):
                raise ArgumentError(f"faces: expected none inside another, {a} is inside {b}")

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
        parts: list[set[int]] = []
        for face in self.faces:
            apart = [part for part in parts if part.isdisjoint(face)]
            parts = [*apart, set(face).union(*(part for part in parts if part not in apart))]
        return tuple(sorted(tuple(sorted(part)) for part in parts))

    def sample(self, *batch: int, generator: torch.Generator | None = None) -> Float64[Tensor, "..."]:
        """Draw places (*batch, V): a face with equal probability, and a uniform place on it."""
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
        r"""Draw places (*batch, V) whose points are uniform in the image: a face is drawn by its volume.

        Args:
            phi: all vertices (V, *space.shape).
            batch: how many.
            by: `"volume"`, or `"face"` for `sample`.
            generator: of the draws.

        Raises:
            ArgumentError: as for `log_volume`, or if every face is degenerate.
        """
        if check_choice("by", by, ("face", "volume")) == "face":
            return self.sample(*batch, generator=generator)
        shares = self._volume_fractions(phi)
        if not bool(shares.any()):
            raise ArgumentError("phi: expected a face that is not degenerate, whose volume could be drawn from")
        shares = shares if generator is None else shares.to(generator.device)
        # One draw more than is wanted: multinomial refuses none.
        faces = shares.multinomial(math.prod(batch) + 1, replacement=True, generator=generator)
        return self._sample_in_faces(faces[1:].reshape(batch), generator)

    def log_volumes(self, phi: Float[Tensor, "size ..."]) -> Float64[Tensor, " faces"]:
        """Compute the log-volume of each face, as of a [`Simplex`][manifoldagg.curves.simplex.Simplex]."""
        self._check_phi(phi)
        return torch.stack([Simplex(self.space, len(face)).log_volume(phi[list(face)]) for face in self.faces])

    def volume(self, phi: Float[Tensor, "size ..."]) -> Float64[Tensor, ""]:
        """Compute the sum of the faces' volumes on a flat space, for faces of one dimension; overlaps count twice."""
        self._check_phi(phi)
        self._check_equal_dimensions()
        return torch.stack([Simplex(self.space, len(face)).volume(phi[list(face)]) for face in self.faces]).sum()

    def log_volume(self, phi: Float[Tensor, "size ..."], *, by: VolumeMode = "volume") -> Float64[Tensor, ""]:
        r"""Compute a regulariser: $\log \sum_f V_f$ or, `by="face"`, $\sum_f \log V_f$, which opens every face.

        Raises:
            ArgumentError: if the space is curved, `phi` does not fit, or volumes of faces of several dimensions are
                to be added.
        """
        if check_choice("by", by, ("face", "volume")) == "face":
            return self.log_volumes(phi).sum()
        self._check_equal_dimensions()
        logs = self.log_volumes(phi)
        top = logs.detach().amax()
        solid = top > -math.inf
        total = torch.where(solid, logs - torch.where(solid, top, 0.0), 0.0).exp().sum().log()
        return torch.where(solid, top + total, -math.inf)

    def log_volume_gradient(
        self, phi: Float[Tensor, "size ..."], *, by: VolumeMode = "volume"
    ) -> Float[Tensor, "size ..."]:
        r"""Compute the gradient of `log_volume`.

        It is $\sum_f s_f\, \partial \log V_f$ with $s_f = V_f / \sum V$, or with $s_f = 1$ for `by="face"`.
        """
        check_choice("by", by, ("face", "volume"))
        self._check_phi(phi)
        shares = phi.new_ones(len(self.faces), dtype=torch.float64) if by == "face" else self._volume_fractions(phi)
        gradient = torch.zeros_like(phi, dtype=torch.float64)
        for face, share in zip(self.faces, shares, strict=True):
            own = Simplex(self.space, len(face)).log_volume_gradient(phi[list(face)].double())
            gradient.index_add_(0, torch.tensor(face, device=phi.device), share * own)
        return gradient.to(phi.dtype)

    def nearest(
        self, phi: Float[Tensor, "size ..."], point: Float[Tensor, "..."]
    ) -> tuple[Float64[Tensor, "..."], Float64[Tensor, "..."]]:
        """Return the nearest place over all faces, and its distance; ties go to the first face."""
        self._check_phi(phi)
        places = []
        distances = []
        for face in self.faces:
            x, distance = Simplex(self.space, len(face)).nearest(phi[list(face)], point)
            places.append(x.new_zeros(*x.shape[:-1], self.size).index_copy(-1, torch.tensor(face, device=x.device), x))
            distances.append(distance)
        nearest, face_of = torch.stack(distances).min(0)
        chosen = torch.stack(places).take_along_dim(face_of[None, ..., None], 0)
        return chosen[0], nearest

    def weights(self, x: Coordinates) -> Float64[Tensor, "..."]:
        """Return the float64 weights of the vertices at `x` (*batch, V), which lies on a face: `x` over its sum."""
        self._containing_face(x)
        return super().weights(x)

    def _curved_mean(self, phi: Tensor, x: Coordinates, weights: Tensor) -> Tensor:
        # The face's own vertices alone, the first repeated without weight to the length of the longest.
        face = self._containing_face(x).to(phi.device)
        longest = max(map(len, self.faces))
        table = [[*f, *[f[0]] * (longest - len(f))] for f in self.faces]
        used = [[1.0] * len(f) + [0.0] * (longest - len(f)) for f in self.faces]
        corners = torch.tensor(table, device=phi.device)[face]
        weights = weights.gather(-1, corners) * torch.tensor(used, dtype=torch.float64, device=phi.device)[face]
        weights = weights / weights.sum(-1, keepdim=True)
        return weighted_mean(self.space, phi[corners].double(), weights).to(phi.dtype)

    def _membership(self, device: torch.device) -> Tensor:
        """Which vertices (V,) each face has: (faces, V)."""
        return torch.tensor([[vertex in face for vertex in range(self.size)] for face in self.faces], device=device)

    def _containing_face(self, x: Coordinates) -> Tensor:
        """The first face that holds each place: (*batch,)."""
        place = check_barycentric(x, self.size)
        outside = (place.detach().double().abs().unsqueeze(-2) * ~self._membership(place.device)).sum(-1)
        least, face = outside.min(-1)
        if not needs_autograd_path([least]):
            wrong = least > math.sqrt(torch.finfo(place.dtype).eps)
            if bool(wrong.any()):
                where = tuple(wrong.nonzero()[0].tolist())
                support = tuple(place.detach()[where].nonzero().flatten().tolist())
                raise ArgumentError(f"x: expected vertices of one face, got coordinates on {support} at {where}")
        return face

    def _sample_in_faces(self, face: Tensor, generator: torch.Generator | None) -> Tensor:
        """Uniform places in faces (*batch,): exponential variables of their vertices, by their sum."""
        spacings = torch.empty(*face.shape, self.size, dtype=torch.float64, device=face.device)
        spacings = spacings.exponential_(generator=generator) * self._membership(face.device)[face]
        return spacings / spacings.sum(-1, keepdim=True)

    def _volume_fractions(self, phi: Tensor) -> Tensor:
        """The part of the total volume that each face has; zeros where there is none."""
        self._check_equal_dimensions()
        return self.log_volumes(phi.detach()).softmax(0).nan_to_num(0.0)

    def _check_equal_dimensions(self) -> None:
        sizes = sorted({len(face) - 1 for face in self.faces})
        if len(sizes) > 1:
            raise ArgumentError(f"faces: volumes are added for faces of one dimension, got dimensions {sizes}")
