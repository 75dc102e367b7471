"""Bézier curves of any degree: the embedding of [0, 1] that follows its control points."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from manifoldagg.errors import ArgumentError, check_count, check_number, check_shape
from manifoldagg.manifolds import Manifold

Parameter = float | Float[Tensor, "*batch"]


@dataclass(frozen=True)
class Bezier:
    r"""The curve $\iota_\varphi(t) = \sum_{i=0}^{n} \binom{n}{i} t^i (1-t)^{n-i}\, \varphi_i$ on a flat space.

    It starts at $\varphi_0$, ends at $\varphi_n$ (both exactly) and stays in the convex hull of its control
    points. It is differentiable in $\varphi$ and $t$; $t$ outside [0, 1] extends the polynomial.

    Args:
        space: a flat space of shape (P,).
        degree: $n \ge 1$; $\varphi$ has shape (n + 1, P).

    Raises:
        ArgumentError: if `degree` is not a positive integer or `space` is curved.

    Source: Manifold (8).

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Flat
        >>> curve = Bezier(Flat(2), degree=2)
        >>> phi = torch.tensor([[0.0, 0.0], [1.0, 2.0], [2.0, 0.0]])
        >>> curve(phi, 0.5)
        tensor([1., 1.])
        >>> curve.velocity(phi, 0.0)
        tensor([2., 4.])
    """

    space: Manifold
    degree: int = 2

    def __post_init__(self) -> None:
        check_count("degree", self.degree)
        if not (isinstance(self.space, Manifold) and self.space.flat):
            raise ArgumentError(f"space: expected a flat manifold, got {self.space}")

    def __call__(self, phi: Float[Tensor, "control P"], t: Parameter) -> Float[Tensor, "*batch P"]:
        """The point of the curve at `t`.

        Args:
            phi: control points (degree + 1, P).
            t: a number or a tensor (*batch,).

        Returns:
            (*batch, P), in the dtype of `phi`.

        Raises:
            ArgumentError: if `phi` has another shape, or a number `t` is not finite.
        """
        self._check(phi)
        return _sum(_bernstein(self.degree, t, phi), phi)

    def velocity(self, phi: Float[Tensor, "control P"], t: Parameter) -> Float[Tensor, "*batch P"]:
        r"""$\iota_\varphi'(t) = n \sum_{i<n} \binom{n-1}{i} t^i (1-t)^{n-1-i} (\varphi_{i+1} - \varphi_i)$.

        The hodograph: a Bézier curve of degree n - 1. Arguments, result and errors as for a call.
        """
        self._check(phi)
        return _sum(_bernstein(self.degree - 1, t, phi), self.degree * phi.diff(dim=0))

    def collapse(self, point: Float[Tensor, " P"]) -> Float[Tensor, "control P"]:
        r"""The control points $\varphi_\Theta$ whose curve is the single point $\Theta$."""
        check_shape("point", point, *self.space.shape)
        return point.expand(self.degree + 1, -1).clone()

    def weights(self, t: float) -> list[float]:
        """The degree + 1 Bernstein weights at `t`, as numbers: what the control points are summed with."""
        return [math.comb(self.degree, i) * t**i * (1 - t) ** (self.degree - i) for i in range(self.degree + 1)]

    def _check(self, phi: Tensor) -> None:
        check_shape("phi", phi, self.degree + 1, *self.space.shape)


def _sum(weights: Tensor, points: Tensor) -> Tensor:
    """The weighted sum of points, in their own dtype under autocast too."""
    with torch.autocast(points.device.type, enabled=False):
        return weights @ points


def _bernstein(degree: int, t: Parameter, like: Tensor) -> Tensor:
    """The Bernstein weights (*batch, degree + 1), computed in float64, in the dtype of `like`."""
    if not isinstance(t, Tensor):
        t = torch.tensor(check_number("t", t), dtype=torch.float64)
    t = t.to(like.device, torch.float64)
    powers = [math.comb(degree, i) * t**i * (1 - t) ** (degree - i) for i in range(degree + 1)]
    return torch.stack(powers, dim=-1).to(like.dtype)
