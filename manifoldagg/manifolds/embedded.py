"""Embedded manifolds: spaces whose metric is the dot product of coordinates."""

import torch

from manifoldagg.manifolds.manifold import Manifold, Point, Scalar, Tangent

__all__ = ["Embedded"]


class Embedded(Manifold):
    r"""Base class for manifolds whose metric is the dot product of coordinates, $\langle u, v\rangle_x = u \cdot v$.

    These manifolds are submanifolds of $\mathbb{R}^N$, such as spheres, and quotients of such submanifolds. Random
    points and tangents are computed by projecting normally distributed coordinates.
    """

    def _inner(self, x: Point, u: Tangent, v: Tangent) -> Scalar:
        dims = tuple(range(-len(self.shape), 0))
        # The sum over all coordinates is accumulated in float64 and rounded once.
        return (u.double() * v.double()).sum(dims).to(torch.promote_types(u.dtype, v.dtype))

    def _random_point(self, batch: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Point:
        noise = torch.randn(*batch, *self.shape, generator=generator, dtype=dtype, device=generator.device)
        return self._project(noise)

    def _random_tangent(self, x: Point, generator: torch.Generator) -> Tangent:
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype, device=generator.device)
        return self._project_tangent(x, noise.to(x.device))
