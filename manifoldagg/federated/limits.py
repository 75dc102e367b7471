"""Limits of a server: how far an update may go, and that it stays on the manifold."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manifoldagg.errors import ArgumentError, check_choice, check_count, check_finite, check_number, check_shape
from manifoldagg.kernels import gram
from manifoldagg.manifolds import MASTER_DTYPES, Manifold, ParameterSpace, check_point, distance

WIDEST = 10**6
"""The longest window of norms: a median over it is taken with every update."""


@dataclass(frozen=True)
class Checks:
    r"""Limits on what a client may send; what is beyond them is refused.

    The norm of an update is the largest distance of its points from its base, $\max_i d(\Theta^t, \varphi_i)$.

    Args:
        max_norm: the largest norm.
        norm_factor: the largest norm in medians of the norms that were accepted lately.
        norm_window: how many accepted norms are lately.
        norm_after: how many there must be before `norm_factor` holds.
        max_samples: the largest sample count that is believed.
        max_points: how many control points an update may have: the cost of a step grows with their square and more.

    Raises:
        ArgumentError: naming the limit that is out of range.

    Example:
        >>> Checks(norm_factor=10.0).refuse(25.0, accepted=[1.0, 2.0, 3.0, 2.0, 2.0])
        Traceback (most recent call last):
            ...
        manifoldagg.errors.ArgumentError: points: expected a norm <= 20 (10 x the median of those accepted), got 25
    """

    max_norm: float | None = None
    norm_factor: float | None = None
    norm_window: int = 101
    norm_after: int = 5
    max_samples: int = 10**9
    max_points: int = 16

    def __post_init__(self) -> None:
        for name in ("max_norm", "norm_factor"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), above=0)
        for name in ("norm_window", "norm_after", "max_samples", "max_points"):
            check_count(name, getattr(self, name))
        if self.norm_window > WIDEST:
            raise ArgumentError(f"norm_window: expected at most {WIDEST}")
        if self.norm_after > self.norm_window:
            raise ArgumentError(f"norm_after: expected at most norm_window = {self.norm_window}, got {self.norm_after}")

    @staticmethod
    def given(checks: "Checks | None") -> "Checks":
        """The checks; those of no limits for `None`.

        Raises:
            ArgumentError: if they are none.
        """
        if checks is not None and not isinstance(checks, Checks):
            raise ArgumentError(f"checks: expected Checks, got {checks!r}")
        return Checks() if checks is None else checks

    @property
    def measure(self) -> bool:
        """Whether the norm of an update is asked for."""
        return self.max_norm is not None or self.norm_factor is not None

    def refuse(self, norm: float, accepted: Sequence[float]) -> None:
        """Say no to a norm over a limit, or to one that is no number.

        Raises:
            ArgumentError: naming the limit.
        """
        check_number("points: norm", norm)
        if self.max_norm is not None and norm > self.max_norm:
            raise ArgumentError(f"points: expected a norm <= {self.max_norm:g}, got {norm:g}")
        if self.norm_factor is None or len(accepted) < self.norm_after:
            return
        limit = self.norm_factor * statistics.median(accepted)
        # A median of 0 says nothing about what an update of another size should be.
        if norm > limit > 0:
            why = f"{self.norm_factor:g} x the median of those accepted"
            raise ArgumentError(f"points: expected a norm <= {limit:g} ({why}), got {norm:g}")


UNLIMITED = Checks()


def check_start(space: Manifold, start: Tensor) -> Tensor:
    """A first model, of its own memory: of a master dtype, finite, on the manifold.

    Raises:
        ArgumentError: naming what does not fit.
    """
    if not isinstance(space, Manifold):
        raise ArgumentError(f"space: expected a manifold, got {type(space).__name__}")
    check_finite("start", check_shape("start", start, *space.axes))
    dtypes = (space.dtype,) if isinstance(space, ParameterSpace) else MASTER_DTYPES
    check_choice("start: dtype", start.dtype, dtypes)
    return check_on(space, "start", start.detach()).clone(memory_format=torch.contiguous_format)


def check_on(space: Manifold, name: str, points: Tensor) -> Tensor:
    """`points` (*batch, *shape), which must lie on the manifold.

    A leaf of a parameter space that is narrower than its master lies there up to the rounding of its own dtype.

    Raises:
        ArgumentError: naming the leaf and how far it is off.
    """
    if space.flat:
        return points
    if not isinstance(space, ParameterSpace):
        return check_point(space, points, name=name)
    curved = dict(space.manifolds)
    for leaf, part in zip(space.layout.leaves, points.split(space.layout.sizes, -1), strict=True):
        if leaf.name in curved:
            rounding = None if leaf.dtype == points.dtype else math.sqrt(torch.finfo(leaf.dtype).eps)
            piece = part.unflatten(-1, leaf.shape)
            check_point(curved[leaf.name], piece, name=f"{name}: {leaf.name}", tolerance=rounding)
    return points


def norm_of(space: Manifold, base: Tensor, points: Tensor) -> float:
    r"""$\max_i d(\Theta^t, \varphi_i)$; infinite where there is no such number."""
    if space.flat:
        squares = gram(list(points.flatten(1)), minus=base.flatten()).diagonal(dim1=-2, dim2=-1)
        largest = squares.max().sqrt().item()
    else:
        largest = distance(space, base.expand_as(points), points).max().item()
    return math.inf if math.isnan(largest) else largest
