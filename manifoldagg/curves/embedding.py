"""Base class for embeddings: low-dimensional subsets of the space of models, such as curves."""

import abc
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from manifoldagg._validation import check_shape
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import Manifold

__all__ = ["Coordinates", "Embedding", "rounding_error"]

Coordinates = float | Float[Tensor, "..."]


class Embedding(abc.ABC):
    r"""Base class for low-dimensional subsets of the space of models, such as curves of models.

    An embedding is a map $\iota_\varphi : M \to M_\Theta$ from coordinates $x \in M$ to models in the space $M_\Theta$.
    For example, the coordinate of a point on a curve is a number, the parameter of the curve. The coordinates of a
    batch of points have the shape (*batch, *domain). Here, `domain` is `()` for a curve, and (m,) for m coordinates.

    The map is defined by a sequence of models $\varphi$, its control points. They are stacked in one tensor (size,
    *space.shape), where `size` is the number of control points. An embedding does not store this tensor. Instead, its
    methods expect it as the argument `phi`.

    All methods are differentiable with respect to $\varphi$ and $x$, unless they state otherwise.
    """

    space: Manifold

    @property
    @abc.abstractmethod
    def size(self) -> int:
        r"""The number of control points $\varphi$."""

    @property
    @abc.abstractmethod
    def domain(self) -> tuple[int, ...]:
        """The shape of the coordinates of one point: () for a curve, whose coordinate is a number."""

    @abc.abstractmethod
    def __call__(self, phi: Float[Tensor, "size ..."], x: Coordinates) -> Float[Tensor, "..."]:
        r"""Compute the points $\iota_\varphi(x)$, (*batch, *space.shape)."""

    @abc.abstractmethod
    def sample(self, *batch: int, generator: torch.Generator | None = None) -> Float[Tensor, "..."]:
        """Draw coordinates (*batch, *domain) in float64, uniform in $M$."""

    def on(self, space: Manifold, degree: int = 2) -> "Embedding":
        """Return this embedding into another space.

        Args:
            space: the new space.
            degree: the degree of the curve, for a tunnel without a curve.

        Raises:
            ArgumentError: if the embedding is not a dataclass with the field `space`, and `space` is another space.
        """
        # Only a field of the constructor can be replaced. The space of a tunnel, for example, follows from its curve.
        template: Any = self
        if "space" in {field.name for field in getattr(self, "__dataclass_fields__", {}).values() if field.init}:
            moved: Embedding = replace(template, space=space)
            return moved
        if self.space != space:
            raise ArgumentError(f"embedding: expected an embedding into {space}, got {self}")
        return self

    def path_coordinates(self, s: Float[Tensor, "*batch"]) -> Float[Tensor, "..."]:
        """Compute the coordinates $x(s)$ of the path from the first to the last control point of the embedding.

        The embedding maps coordinates to models. The model at $x(0)$ is the first control point, and the model at
        $x(1)$ is the last one. The coordinates between them follow a geodesic in coordinate space. If the embedding is
        a curve, its only coordinate is the curve parameter, so $x(s) = s$.

        Args:
            s: parameters (*batch,) in [0, 1].

        Returns:
            Coordinates (*batch, *domain).

        Raises:
            NotImplementedError: if the embedding has no end point.
        """
        if self.domain:
            raise NotImplementedError(f"{type(self).__name__} has no path to an end point")
        return s

    def nearest(self, phi: Float[Tensor, "size ..."], point: Float[Tensor, "..."]) -> tuple[Tensor, Tensor]:
        """Find the nearest point of the embedding, such as a curve of models, for each given point.

        Args:
            phi: the control points of the embedding.
            point: the given points (*batch, *space.shape).

        Returns:
            The coordinates of the nearest points, and their distances from the given points.

        Raises:
            NotImplementedError: if the class of the embedding does not define this method.
        """
        raise NotImplementedError(f"{type(self).__name__} has no nearest")

    def contains(self, phi: Float[Tensor, "size ..."], point: Float[Tensor, "..."]) -> Tensor:
        """Return whether each of the points (*batch, *space.shape) is in the image: (*batch,)."""
        raise NotImplementedError(f"{type(self).__name__} has no contains")

    def collapse(self, point: Float[Tensor, "..."]) -> Float[Tensor, "size ..."]:
        """Return control points for which every point of the embedding is the given point."""
        check_shape("point", point, *self.space.axes)
        return point.expand(self.size, *point.shape).clone()

    def push(
        self, phi: Float[Tensor, "size ..."], x: Float[Tensor, "..."], u: Float[Tensor, "..."]
    ) -> Float[Tensor, "..."]:
        r"""Compute the directional derivative of the embedding at the coordinates `x` (pushforward).

        The direction `u` (*batch, *domain) is a tangent vector in the space of coordinates. The pushforward
        $d\iota_\varphi(x)\, u$ is the rate at which the point $\iota_\varphi(x)$ changes if $x$ moves in this
        direction. It is computed by one Jacobian-vector product.
        """
        # Forward mode does not accept expanded tensors, whose entries share memory.
        pushed: Tensor = torch.func.jvp(lambda at: self(phi, at), (x.contiguous(),), (u.contiguous(),))[1]
        return pushed

    def pull(
        self, phi: Float[Tensor, "size ..."], x: Float[Tensor, "..."], w: Float[Tensor, "..."]
    ) -> Float[Tensor, "..."]:
        r"""Compute the derivative of a loss with respect to the coordinates `x` (pullback).

        The embedding maps the coordinates to models. Given the derivative `w` (*batch, *space.shape) of the loss with
        respect to these models, the method applies the chain rule by one vector-Jacobian product.

        The pullback is the adjoint of the pushforward, which the method `push` computes: $\langle w, \mathrm{push}(u)
        \rangle = \langle \mathrm{pull}(w), u \rangle$ for every direction $u$ in the space of coordinates.
        """
        pulled: Tensor = torch.func.vjp(lambda at: self(phi, at), x)[1](w)[0]
        return pulled

    def pull_phi(
        self, phi: Float[Tensor, "size ..."], x: Coordinates, w: Float[Tensor, "..."]
    ) -> Float[Tensor, "size ..."]:
        """Compute the derivative of a loss with respect to the control points `phi`, by the chain rule.

        The argument `w` is the derivative of the loss with respect to the models at the coordinates `x`. The method
        computes the vector-Jacobian product of `w` and the map from the control points to these models.
        """
        pulled: Tensor = torch.func.vjp(lambda points: self(points, x), phi)[1](w)[0]
        return pulled

    def metric(self, phi: Float[Tensor, "size ..."], x: Float[Tensor, "..."]) -> Float[Tensor, "*batch m m"]:
        r"""Compute the pullback metric $J^\top G J$ at the coordinates $x$, as a positive semi-definite matrix (m, m).

        $J$ is the Jacobian of the embedding $\iota_\varphi$ at $x$, and $G$ is the metric of the space of models. The
        size m is the number of coordinates. For a curve, m = 1.
        """
        batch = x.shape[: x.ndim - len(self.domain)]
        # The pushforwards of the unit vectors are the columns of the Jacobian.
        unit = torch.eye(self.domain[0], dtype=x.dtype, device=x.device) if self.domain else x.new_ones(1)
        columns = [self.push(phi, x, e.expand(x.shape)) for e in unit]
        point = self(phi, x)
        # The metric of the space can depend on the point, so a Gram matrix of the columns alone is not sufficient.
        rows = [[self.space._inner(point, a, b) for b in columns] for a in columns]
        return torch.stack([torch.stack(row, -1) for row in rows], -2).reshape(*batch, len(unit), len(unit))

    def at(self, phi: Float[Tensor, "size ..."]) -> Any:
        r"""Return the embedding with fixed control points $\varphi$, if the class supports it."""
        raise NotImplementedError(f"{type(self).__name__} has no form with fixed control points")

    def _check_phi(self, phi: Tensor) -> None:
        """Check that the embedding has a space, and that `phi` has the shape (size, *space.shape)."""
        self._require_space()
        check_shape("phi", phi, self.size, *self.space.axes)

    def _require_space(self) -> None:
        """Check that the embedding has a space. Tunnels and simplices can be created without one."""
        if self.space is None:
            raise ArgumentError(
                f"space: expected a manifold, got None; call `on(space)` of {type(self).__name__} first"
            )


def rounding_error(phi: Float[Tensor, "control ..."], *others: Tensor) -> float:
    """Return a bound on the rounding errors of the control points `phi`.

    The bound is the largest norm of a control point, multiplied by the machine epsilon of the least precise dtype of
    all arguments.
    """
    # The squares of large float32 entries would overflow, so the norms are accumulated in float64.
    sizes = torch.linalg.vector_norm(phi.detach().flatten(1), dim=1, dtype=torch.float64)
    return max(torch.finfo(x.dtype).eps for x in (phi, *others)) * float(sizes.max())
