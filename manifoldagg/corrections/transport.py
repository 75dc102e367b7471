"""Transport on curved spaces: how tangents at the base come to the current point, and are measured there."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from manifoldagg.errors import ArgumentError, check_choice, check_count, check_finite
from manifoldagg.kernels import gram
from manifoldagg.manifolds import Manifold, Validated, check_point, check_tangent, pole_ladder
from manifoldagg.manifolds.manifold import Leaf

__all__ = ["RUNGS", "TRANSPORTS", "Passage", "Transport", "leaves_of"]

TRANSPORTS = {"parallel": {"transport"}, "ladder": {"exp", "log"}, "projection": {"project_tangent"}}
"""The ways to bring a tangent from one point to another, and the primitives that they need."""

RUNGS = 4


class Transport(NamedTuple):
    """How one leaf was transported: `"none"` (flat), `"parallel"`, `"projection"`, or `"ladder"` with its rungs."""

    leaf: str
    method: str
    rungs: int = 0


@dataclass(frozen=True, eq=False)
class Passage:
    r"""The way of tangents from the base $\Theta^t$ to the current point $\Theta^\tau$ of a curved space.

    Args:
        space: with inner, exp and log, and what the transport needs.
        base: $\Theta^t$, of the space's shape.
        current: $\Theta^\tau$, of the space's shape.
        transport: `"parallel"`; `"ladder"`, `rungs` times the pole ladder of a `rungs`-th of the tangent; or
            `"projection"`, which is no isometry. `None`: parallel on the leaves that have it in closed form, a ladder
            on the others.
        rungs: of a ladder.

    Raises:
        ArgumentError: if an option is out of range, a leaf lacks a primitive, or a point is off the space or out of
            reach of the other.
    """

    space: Manifold
    base: Tensor
    current: Tensor
    transport: str | None = None
    rungs: int = RUNGS

    def __post_init__(self) -> None:
        if self.transport is not None:
            check_choice("transport", self.transport, TRANSPORTS)
        check_count("rungs", self.rungs)
        for leaf, method, _ in self.transports:
            space = next(found.space for found in self.leaves if found.name == leaf)
            lacks = sorted(({"inner", "exp", "log"} | TRANSPORTS.get(method, set())) - space.capabilities)
            if lacks:
                where, rest = f"{leaf}: {space}" if leaf else str(space), " or ".join(set(TRANSPORTS) - {method})
                advice = f"; try transport={rest}" if lacks == ["transport"] else ""
                raise ArgumentError(
                    f"transport: {method} needs {', '.join(lacks)}, which {where} does not have{advice}"
                )
        for name, point in (("base", self.base), ("current", self.current)):
            check_point(self.space, point, name=name)

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """The factors of the space, in the order in which they lie in a point."""
        return leaves_of(self.space, self.base)

    @property
    def transports(self) -> tuple[Transport, ...]:
        """What brings the tangents of each leaf to the current point."""
        found = []
        for leaf in self.leaves:
            method = self.transport or ("parallel" if "transport" in leaf.space.capabilities else "ladder")
            kind = Transport(leaf.name, "none") if leaf.space.flat else Transport(leaf.name, method)
            found.append(kind._replace(rungs=self.rungs) if kind.method == "ladder" else kind)
        return tuple(found)

    @cached_property
    def drift(self) -> Tensor:
        r"""$g = -\log_{\Theta^\tau} \Theta^t$."""
        return -self.log(self.base, "base")

    def log(self, points: Tensor, name: str) -> Tensor:
        r"""$\log_{\Theta^\tau}$ of points within reach."""
        try:
            return Validated(self.space).log(self.current.expand_as(points), points)
        except ArgumentError as error:
            raise ArgumentError(f"{name}: out of reach of the current point: {error}") from None

    def arrive(self, displacements: Tensor) -> Tensor:
        r"""Tangents (n, *shape) at the base, transported to the current point."""
        check_tangent(self.space, self.base, displacements, name="displacements")
        return self._carry(self.base, self.current, displacements)

    def position(self, displacements: Tensor) -> Tensor:
        r"""$\log_{\Theta^\tau} \exp_{\Theta^t} v$ for tangents at the base."""
        reached = self.space.exp(self.base.expand_as(displacements), displacements)
        return self.log(reached, "displacements: the points reached")

    def depart(self, tangents: Tensor) -> Tensor:
        """Tangents (n, *shape) at the current point, taken back to the base."""
        return self._carry(self.current, self.base, tangents)

    def gram(self, rows: Tensor) -> Tensor:
        """Inner products of tangents (k, P) at the current point, in float64, for each leaf: (S, k, k)."""
        grams = []
        for leaf, x in self._parts(self.current):
            part = rows[:, leaf.part]
            grams.append(gram(part)[0] if leaf.space.flat else _inner(leaf.space, x, part))
        return torch.stack(grams)

    def _carry(self, start: Tensor, end: Tensor, u: Tensor) -> Tensor:
        carried = []
        for (leaf, x), (_, y), kind in zip(self._parts(start), self._parts(end), self.transports, strict=True):
            v = u.flatten(1)[:, leaf.part].view(len(u), *x.shape)
            x, y = x.expand_as(v), y.expand_as(v)
            if kind.method == "parallel":
                v = leaf.space.transport(x, y, v)
            elif kind.method == "ladder":
                v = kind.rungs * pole_ladder(leaf.space, x, y, v / kind.rungs, rungs=kind.rungs)
            elif kind.method == "projection":
                v = leaf.space.project_tangent(y, v)
            carried.append(v.flatten(1))
        return check_finite("displacements: transported", torch.cat(carried, 1).view(u.shape))

    def _parts(self, x: Tensor) -> Iterator[tuple[Leaf, Tensor]]:
        """The leaves with their parts of a point, each in its own shape."""
        for leaf in self.leaves:
            yield leaf, x.flatten()[leaf.part].view(leaf.space.shape) if leaf.name else x


def leaves_of(space: Manifold, point: Tensor) -> tuple[Leaf, ...]:
    """The named tensors of a parameter space, the factors of a product, or the space itself."""
    return space.leaves(point)


def _inner(space: Manifold, x: Tensor, rows: Tensor) -> Tensor:
    """The Gram matrix of tangents (k, size) at `x` in the metric of the space."""
    k = len(rows)
    u, (i, j) = rows.view(k, *x.shape).double(), torch.tril_indices(k, k)
    values = space.inner(x.double().expand(len(i), *x.shape), u[i], u[j]).reshape(len(i), -1).sum(1)
    lower = values.new_zeros(k, k).index_put((i, j), values)
    return lower + lower.tril(-1).mT
