"""Embeddings: a small space drawn into the space of models by a few of its points."""

import abc
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from manifoldagg._validation import check_shape
from manifoldagg.manifolds import Manifold

__all__ = ["Coordinates", "Embedding", "rounding_error"]

Coordinates = float | Float[Tensor, "..."]


class Embedding(abc.ABC):
    r"""$\iota_\varphi : M \to M_\Theta$, drawn by $\varphi$: `size` points of $M_\Theta$.

    $\varphi$ is one tensor (size, *space.shape). A place $x \in M$ is a tensor (*batch, *domain): `domain` is `()`
    for a curve, whose places are numbers, and (m,) where they have m coordinates. Everything is differentiable in
    $\varphi$ and in $x$.

    An embedding is a frozen value; what it draws is $\varphi$, which it does not hold.
    """

    space: Manifold

    @property
    @abc.abstractmethod
    def size(self) -> int:
        r"""How many points $\varphi$ has."""

    @property
    @abc.abstractmethod
    def domain(self) -> tuple[int, ...]:
        """The shape of one place: () for a number."""

    @abc.abstractmethod
    def __call__(self, phi: Float[Tensor, "size ..."], x: Coordinates) -> Float[Tensor, "..."]:
        r"""$\iota_\varphi(x)$: (*batch, *space.shape)."""

    @abc.abstractmethod
    def sample(self, *batch: int, generator: torch.Generator | None = None) -> Float[Tensor, "..."]:
        """Places (*batch, *domain) in float64, uniform in $M$."""

    def nearest(self, phi: Float[Tensor, "size ..."], point: Float[Tensor, "..."]) -> tuple[Tensor, Tensor]:
        r"""The place $x$ whose $\iota_\varphi(x)$ is nearest to a point, and their distance."""
        raise NotImplementedError(f"{type(self).__name__} has no nearest")

    def contains(self, phi: Float[Tensor, "size ..."], point: Float[Tensor, "..."]) -> Tensor:
        r"""Whether points (*batch, *space.shape) lie in the image: (*batch,)."""
        raise NotImplementedError(f"{type(self).__name__} has no contains")

    def collapse(self, point: Float[Tensor, "..."]) -> Float[Tensor, "size ..."]:
        r"""The $\varphi_\Theta$ that draws all of $M$ onto the single point $\Theta$."""
        check_shape("point", point, *self.space.axes)
        return point.expand(self.size, *point.shape).clone()

    def push(
        self, phi: Float[Tensor, "size ..."], x: Float[Tensor, "..."], u: Float[Tensor, "..."]
    ) -> Float[Tensor, "..."]:
        r"""$d\iota_\varphi(x)\, u$: what a tangent `u` (*batch, *domain) is drawn as; one jvp."""
        pushed: Tensor = torch.func.jvp(lambda place: self(phi, place), (x.contiguous(),), (u.contiguous(),))[1]
        return pushed

    def pull(
        self, phi: Float[Tensor, "size ..."], x: Float[Tensor, "..."], w: Float[Tensor, "..."]
    ) -> Float[Tensor, "..."]:
        r"""$d\iota_\varphi(x)^* w$: what a derivative `w` (*batch, *space.shape) is in the coordinates of $M$; one vjp.

        $\langle w, \mathrm{push}(u) \rangle = \langle \mathrm{pull}(w), u \rangle$ in coordinates.
        """
        pulled: Tensor = torch.func.vjp(lambda place: self(phi, place), x)[1](w)[0]
        return pulled

    def pull_phi(
        self, phi: Float[Tensor, "size ..."], x: Coordinates, w: Float[Tensor, "..."]
    ) -> Float[Tensor, "size ..."]:
        r"""What a derivative `w` at $\iota_\varphi(x)$ is for the points of $\varphi$: what learns them."""
        pulled: Tensor = torch.func.vjp(lambda points: self(points, x), phi)[1](w)[0]
        return pulled

    def metric(self, phi: Float[Tensor, "size ..."], x: Float[Tensor, "..."]) -> Float[Tensor, "*batch m m"]:
        r"""The pullback metric $J^\top G J$ at $x$, with m = 1 for a curve: symmetric, positive semi-definite."""
        batch = x.shape[: x.ndim - len(self.domain)]
        unit = torch.eye(self.domain[0], dtype=x.dtype, device=x.device) if self.domain else x.new_ones(1)
        columns = [self.push(phi, x, e.expand(x.shape)) for e in unit]
        point = self(phi, x)
        rows = [[self.space._inner(point, a, b) for b in columns] for a in columns]
        return torch.stack([torch.stack(row, -1) for row in rows], -2).reshape(*batch, len(unit), len(unit))

    def at(self, phi: Float[Tensor, "size ..."]) -> Any:
        r"""The image of one $\varphi$, where the embedding has such a view."""
        raise NotImplementedError(f"{type(self).__name__} has no bound form")

    def _check_phi(self, phi: Tensor) -> None:
        check_shape("phi", phi, self.size, *self.space.axes)


def rounding_error(phi: Float[Tensor, "control ..."], *others: Tensor) -> float:
    """How far rounding to the coarsest of the dtypes moves a control point."""
    sizes = torch.linalg.vector_norm(phi.detach().flatten(1), dim=1, dtype=torch.float64)
    return max(torch.finfo(x.dtype).eps for x in (phi, *others)) * float(sizes.max())
