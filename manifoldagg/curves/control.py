"""Trainable control points of an embedding: which points are learned, from which start, as which parameters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from manifoldagg._validation import check_choice, check_finite, check_number, check_shape, short_repr
from manifoldagg.curves.embedding import Embedding
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import Manifold, check_point, formulas
from manifoldagg.manifolds.manifold import check_not_model

__all__ = ["Control", "FreePoints", "initial_points"]


@dataclass(frozen=True)
class Control:
    r"""The settings of the inner points of $\varphi$: which learn, their initial positions, and their parameters.

    Args:
        rate: learning rate of the inner points; that of the ends where not given.
        start: where the inner points are when the second phase begins: evenly on the `"chord"`, or all at the
            `"base"` $\Theta^t$.
        projection: $\gamma \in [0, 1]$: how much of an inner point's displacement from the chord is removed along the
            chord. What is returned is without it. Flat spaces only.
        free: indices of the points that learn; all but the first and the last where not given.
        volume: $\lambda \ge 0$ of $-\lambda \log \operatorname{vol} \varphi$, for an embedding that has a
            `log_volume`.

    Raises:
        ArgumentError: naming the option that is out of range.

    Source: Report, Algorithm 2, for `projection`; Benton et al. 2021 for `volume`.

    Example:
        >>> Control(free=[-1]).indices(4)
        {3}
    """

    rate: float | None = None
    start: str = "chord"
    projection: float = 0.0
    free: Sequence[int] | None = None
    volume: float = 0.0

    def __post_init__(self) -> None:
        if self.rate is not None:
            check_number("control_rate", self.rate, above=0)
        check_choice("control_start", self.start, ("chord", "base"))
        check_number("control_projection", self.projection, at_least=0, at_most=1)
        check_number("volume", self.volume, at_least=0)

    def indices(self, size: int) -> set[int]:
        """Return the indices of the points that learn, from 0.

        Raises:
            ArgumentError: if `free` is not a sequence of different indices of `size` points.
        """
        if self.free is None:
            return {*range(1, size - 1)}
        named = isinstance(self.free, Sequence) and all(isinstance(i, int) and -size <= i < size for i in self.free)
        moving = {i % size for i in self.free} if named else set()
        if not moving or len(moving) < len(self.free):
            raise ArgumentError(f"free: expected different indices of {size} points, got {short_repr(self.free)}")
        return moving

    def check(self, embedding: Embedding, *, alternate: bool) -> bool:
        """Check the indices, and return whether the inner points move relative to the chord.

        Raises:
            ArgumentError: if they should and cannot, or the embedding has no volume.
        """
        if self.volume and not hasattr(embedding, "log_volume"):
            raise ArgumentError(f"volume: {embedding} has no log_volume")
        if not (self.projection or alternate):
            return False
        name = "control_projection" if self.projection else "alternate"
        if not embedding.space.flat or embedding.domain or embedding.size < 3:
            raise ArgumentError(f"{name}: needs a curve with inner control points on a flat space, got {embedding}")
        if not self.indices(embedding.size) >= {*range(1, embedding.size - 1)}:
            raise ArgumentError(f"free: {name} moves all inner points, got {short_repr(self.free)}")
        if self.start == "base":
            raise ArgumentError(f"control_start: {name} begins at the chord, got base")
        return True

    @torch.no_grad()
    def initialize(self, space: Manifold, phi: Tensor) -> None:
        """Write the initial inner points into φ."""
        last = len(phi) - 1
        for i in range(1, last):
            if self.start == "base":
                phi[i] = phi[0]
            elif space.flat:
                phi[i] = torch.lerp(phi[0], phi[-1], i / last)
            else:
                phi[i] = formulas.geodesic(space, phi[0], phi[-1], i / last)


class FreePoints:
    r"""The tensor $\varphi$, and parameters for its last point and for the `free` ones.

    Parameters are views of $\varphi$; neighbouring inner points share one. In the *relative* form (flat spaces) those
    of the inner points are displacements $\delta_i$ from the chord:

    $$\varphi_i = c_i + \delta_i - \gamma \operatorname{proj}_\Delta \delta_i, \qquad
      c_i = \varphi_0 + \tfrac{i}{n} \Delta, \qquad \Delta = \varphi_n - \varphi_0,$$

    so that they follow when the end moves, and with $\gamma = 1$ bend the chord but never run along it.

    Args:
        phi: (size, *space.shape); it is written.
        free: the indices of the points that learn in the second phase.
        projection: $\gamma$ of the relative form; `None` for views.
    """

    def __init__(self, phi: Tensor, free: set[int], projection: float | None = None) -> None:
        self.phi = phi
        self.free = free
        self.projection = projection
        last = len(phi) - 1
        self.end = Parameter(phi[last])
        self.start = Parameter(phi[0])
        self.shift: Parameter | None = None
        if projection is None:
            self.inner = {
                (a, b): Parameter(phi[a:b]) for a, b in _index_intervals([i for i in sorted(free) if 0 < i < last])
            }
        else:
            self.shift = Parameter(phi[1:last] - self._chord(phi[0], phi[last]))
            self.inner = {(1, last): self.shift}

    def groups(self, rate: float, control_rate: float) -> list[dict[str, Any]]:
        """Return parameter groups: the end points, then the inner ones."""
        starts = [self.start] if 0 in self.free and len(self.phi) > 1 else []
        inner = [{"params": list(self.inner.values()), "lr": control_rate}] if self.inner else []
        return [{"params": [self.end, *starts], "lr": rate}, *inner]

    def set_gradients(self, derivative: Tensor) -> None:
        r"""Set the gradients of the free points from a derivative by $\varphi$ (size, *shape)."""
        pulled = derivative
        if self.shift is not None:
            pulled = torch.func.vjp(self._assemble, self.phi[0], self.phi[-1], self.shift.detach())[1](derivative)
            pulled = torch.cat([pulled[0].unsqueeze(0), pulled[2], pulled[1].unsqueeze(0)])
        for (a, b), parameter in self.inner.items():
            parameter.grad = pulled[a:b]
        if len(self.phi) - 1 in self.free:
            self.end.grad = pulled[-1]
        if 0 in self.free and len(self.phi) > 1:
            self.start.grad = pulled[0]

    def refresh(self) -> None:
        """Write the inner points of the relative form into φ; views are always current."""
        if self.shift is not None:
            with torch.no_grad():
                self.phi[1:-1] = self._assemble(self.phi[0], self.phi[-1], self.shift)[1:-1]

    def _assemble(self, start: Tensor, end: Tensor, shift: Tensor) -> Tensor:
        chord = end - start
        square = chord.double() @ chord.double()
        # A closed curve has no chord to remove anything along: 0 / 1 there, whose derivative is 0 too.
        along = (shift.double() @ chord.double() / torch.where(square == 0, 1.0, square)).to(shift.dtype)
        bent = shift - (self.projection or 0.0) * torch.outer(along, chord)
        return torch.cat([start.unsqueeze(0), self._chord(start, end) + bent, end.unsqueeze(0)])

    def _chord(self, start: Tensor, end: Tensor) -> Tensor:
        last = len(self.phi) - 1
        return torch.stack([torch.lerp(start, end, i / last) for i in range(1, last)])


def initial_points(
    embedding: Embedding, start: Tensor | None, end: Tensor | None, phi: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the base, and a new tensor of the initial points of a fit.

    Raises:
        ArgumentError: naming the argument that does not fit.
    """
    space = embedding.space
    if phi is None and start is None:
        raise ArgumentError("start: expected a point, or phi in place of it; got None")
    if phi is not None and end is not None:
        raise ArgumentError("end: phi has its own last point; give one of them")
    given = {name: x for name, x in (("start", start), ("end", end), ("phi", phi)) if x is not None}
    first = next(iter(given.values()))
    for name, x in given.items():
        check_not_model(name, x)
        shape = (embedding.size, *space.axes) if name == "phi" else space.axes
        check_finite(name, check_shape(name, x, *shape))
        if (x.dtype, x.device) != (first.dtype, first.device):
            raise ArgumentError(f"{name}: expected {first.dtype} on {first.device}, got {x.dtype} on {x.device}")
        if not space.flat and "project" in space.capabilities:
            check_point(space, x.detach(), name=name)
    points = embedding.collapse(first.detach()) if phi is None else phi.detach().clone()
    if end is not None:
        points[-1] = end.detach()
    return (points[0].clone() if start is None else start.detach()), points


def _index_intervals(indices: list[int]) -> list[tuple[int, int]]:
    """Consecutive indices as half-open intervals."""
    starts = [i for i in indices if i - 1 not in indices]
    ends = [i + 1 for i in indices if i + 1 not in indices]
    return list(zip(starts, ends, strict=True))
