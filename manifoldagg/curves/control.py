"""Trainable control points of a curve of models, or of another map from coordinates to models.

The class `Control` selects the control points to train, and sets their initial values. The class `FreePoints`
represents the control points as parameters of an optimiser.
"""

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
    r"""Settings for training the inner control points of an embedding, such as a curve of models.

    The control points are a sequence of models that define the embedding. The inner control points are all of them
    except the first and the last one.

    Args:
        rate: the learning rate of the inner points. The default is the learning rate of the end points.
        start: the initial inner points of the second phase. `"chord"` spaces them equally on the chord, which is the
            geodesic from the first to the last control point. `"base"` sets all of them to the first control point.
        projection: $\gamma \in [0, 1]$, the fraction of the motion along the chord that is removed from the inner
            points. The fit returns the points after this removal. The option requires a flat space.
        free: the indices of the trainable points. The default is all points except the first and the last.
        volume: $\lambda \ge 0$, the weight of the regulariser $-\lambda \log \operatorname{vol} \varphi$. The option
            requires an embedding with the method `log_volume`.

    Raises:
        ArgumentError: if an option is invalid.

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
            check_number("rate", self.rate, above=0)
        check_choice("start", self.start, ("chord", "base"))
        check_number("projection", self.projection, at_least=0, at_most=1)
        check_number("volume", self.volume, at_least=0)

    def indices(self, size: int) -> set[int]:
        """Return the nonnegative indices of the trainable points.

        Raises:
            ArgumentError: if `free` is not a sequence of distinct indices of `size` points.
        """
        if self.free is None:
            return {*range(1, size - 1)}
        # Negative indices count from the end, and two indices of one point are an error.
        is_valid = isinstance(self.free, Sequence) and all(isinstance(i, int) and -size <= i < size for i in self.free)
        trainable = {i % size for i in self.free} if is_valid else set()
        if not trainable or len(trainable) < len(self.free):
            raise ArgumentError(f"free: expected different indices of {size} points, got {short_repr(self.free)}")
        return trainable

    def check(self, embedding: Embedding, *, alternate: bool) -> bool:
        """Check that a fit of an embedding can use the settings.

        Returns:
            Whether the inner points are stored as displacements from the chord.

        Raises:
            ArgumentError: if the embedding lacks a property that the settings require: a curve on a flat space, inner
                points that are all trainable, or a method `log_volume`.
        """
        if self.volume and not hasattr(embedding, "log_volume"):
            raise ArgumentError(f"volume: expected an embedding with log_volume, got {embedding}")
        if not (self.projection or alternate):
            return False
        name = "control_projection" if self.projection else "alternate"
        if not embedding.space.flat or embedding.domain or embedding.size < 3:
            raise ArgumentError(f"{name}: expected a curve with inner control points on a flat space, got {embedding}")
        if not self.indices(embedding.size) >= {*range(1, embedding.size - 1)}:
            raise ArgumentError(f"free: expected all inner points because of {name}, got {short_repr(self.free)}")
        if self.start == "base":
            raise ArgumentError(f"control_start: expected chord because of {name}, got base")
        return True

    @torch.no_grad()
    def initialize(self, space: Manifold, phi: Tensor) -> None:
        """Set the inner control points of `phi` to their initial values, in place."""
        last = len(phi) - 1
        for i in range(1, last):
            if self.start == "base":
                phi[i] = phi[0]
            elif space.flat:
                phi[i] = torch.lerp(phi[0], phi[-1], i / last)
            else:
                phi[i] = formulas.geodesic(space, phi[0], phi[-1], i / last)


class FreePoints:
    r"""The control points $\varphi$ of a fit, with optimiser parameters for the last point and the `free` points.

    By default, each parameter is a view of $\varphi$, and consecutive inner points share one parameter. With
    `projection`, which requires a flat space, the parameter of the inner points contains their displacements $\delta_i$
    from equally spaced points $c_i$ of the chord $\Delta$:

    $$\varphi_i = c_i + \delta_i - \gamma \operatorname{proj}_\Delta \delta_i, \qquad
      c_i = \varphi_0 + \tfrac{i}{n} \Delta, \qquad \Delta = \varphi_n - \varphi_0.$$

    If the end point moves, the inner points then move with it. With $\gamma = 1$, the displacements can bend the curve,
    but cannot move a point along the chord.

    Args:
        phi: the points (size, *space.shape). The tensor is modified in place.
        free: the indices of the points that are trained in the second phase.
        projection: $\gamma$, or `None` for parameters that are views of $\varphi$.
    """

    def __init__(self, phi: Tensor, free: set[int], projection: float | None = None) -> None:
        self.phi = phi
        self.free = free
        self.projection = projection
        last = len(phi) - 1
        # `phi[last]` is a view, so an optimiser step on this parameter changes φ in place.
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
        """Return the parameter groups of the end points and of the inner points."""
        # With a single control point, the end is also the start and must not be in two groups.
        starts = [self.start] if 0 in self.free and len(self.phi) > 1 else []
        inner = [{"params": list(self.inner.values()), "lr": control_rate}] if self.inner else []
        return [{"params": [self.end, *starts], "lr": rate}, *inner]

    def set_gradients(self, derivative: Tensor) -> None:
        """Set the `grad` of each trained parameter, given the derivative of the objective.

        Args:
            derivative: the derivative (size, *shape) of the objective with respect to all control points.
        """
        pulled = derivative
        if self.shift is not None:
            # The end point also moves the inner points along the chord, so its gradient includes their derivatives.
            # The vector-Jacobian product of `_assemble` computes all gradients.
            pulled = torch.func.vjp(self._assemble, self.phi[0], self.phi[-1], self.shift.detach())[1](derivative)
            # The result is in the order of the arguments: start, end, displacements. The points are in the order of φ.
            pulled = torch.cat([pulled[0].unsqueeze(0), pulled[2], pulled[1].unsqueeze(0)])
        for (a, b), parameter in self.inner.items():
            parameter.grad = pulled[a:b]
        if len(self.phi) - 1 in self.free:
            self.end.grad = pulled[-1]
        if 0 in self.free and len(self.phi) > 1:
            self.start.grad = pulled[0]

    def refresh(self) -> None:
        """Recompute the inner points of φ if the parameters contain displacements from the chord."""
        if self.shift is not None:
            with torch.no_grad():
                self.phi[1:-1] = self._assemble(self.phi[0], self.phi[-1], self.shift)[1:-1]

    def _assemble(self, start: Tensor, end: Tensor, shift: Tensor) -> Tensor:
        """Compute all control points from the two ends and the displacements of the inner points.

        Each displacement is measured from the corresponding point of the chord between the ends.
        """
        chord = end - start
        # Float64 avoids overflow and underflow of the squares of float32 entries.
        square = chord.double() @ chord.double()
        # The chord of a closed curve is 0. The quotient is then computed as 0 / 1, so its derivative is 0, not NaN.
        along = (shift.double() @ chord.double() / torch.where(square == 0, 1.0, square)).to(shift.dtype)
        bent = shift - (self.projection or 0.0) * torch.outer(along, chord)
        return torch.cat([start.unsqueeze(0), self._chord(start, end) + bent, end.unsqueeze(0)])

    def _chord(self, start: Tensor, end: Tensor) -> Tensor:
        """Return the equally spaced inner points of the chord from `start` to `end`."""
        last = len(self.phi) - 1
        return torch.stack([torch.lerp(start, end, i / last) for i in range(1, last)])


def initial_points(
    embedding: Embedding, start: Tensor | None, end: Tensor | None, phi: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the base point of a fit, and a new tensor with the initial control points.

    Raises:
        ArgumentError: if an argument is missing or invalid.
    """
    space = embedding.space
    if phi is None and start is None:
        raise ArgumentError("start: expected a point, or phi instead, got None")
    if phi is not None and end is not None:
        raise ArgumentError("end: expected None together with phi, got a point; phi contains the last point")
    given = {name: x for name, x in (("start", start), ("end", end), ("phi", phi)) if x is not None}
    first = next(iter(given.values()))
    for name, x in given.items():
        check_not_model(name, x)
        shape = (embedding.size, *space.axes) if name == "phi" else space.axes
        check_finite(name, check_shape(name, x, *shape))
        if (x.dtype, x.device) != (first.dtype, first.device):
            raise ArgumentError(f"{name}: expected {first.dtype} on {first.device}, got {x.dtype} on {x.device}")
        # On a flat space, every finite tensor is a point. Elsewhere, exp and log are undefined off the manifold.
        if not space.flat and "project" in space.capabilities:
            check_point(space, x.detach(), name=name)
    # Without initial points, all control points equal the start, so the embedding is a single point.
    points = embedding.collapse(first.detach()) if phi is None else phi.detach().clone()
    if end is not None:
        points[-1] = end.detach()
    return (points[0].clone() if start is None else start.detach()), points


def _index_intervals(indices: list[int]) -> list[tuple[int, int]]:
    """Return the half-open intervals of consecutive indices in an ascending list."""
    starts = [i for i in indices if i - 1 not in indices]
    ends = [i + 1 for i in indices if i + 1 not in indices]
    return list(zip(starts, ends, strict=True))
