"""Transport of tangent vectors on curved spaces, from the base of an update to the current model.

The displacements of an update are tangents at the base, which is the model at which the client started. On a curved
space, tangent vectors at different points cannot be added. This module therefore transports the displacements to the
current model of the server, where a correction can combine them.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from manifoldagg._result_repr import format_result
from manifoldagg._validation import check_choice, check_count, check_finite
from manifoldagg.errors import ArgumentError
from manifoldagg.kernels import gram
from manifoldagg.manifolds import Manifold, check_point, formulas
from manifoldagg.manifolds.manifold import Leaf
from manifoldagg.manifolds.validate import check_injectivity_radius

__all__ = ["DEFAULT_RUNGS", "TRANSPORTS", "Transport", "Transporter", "checked_log"]

TRANSPORTS = {"parallel": {"transport"}, "ladder": {"exp", "log"}, "projection": {"project_tangent"}}
"""The transport methods, and the primitives that each method needs."""

DEFAULT_RUNGS = 4


class Transport(NamedTuple):
    """The transport method of one leaf, which is a named part of a space.

    Attributes:
        leaf: the name of the leaf.
        method: `"none"` for a flat leaf, which needs no transport. Otherwise, `"parallel"` for parallel transport,
            `"ladder"` for the pole ladder, or `"projection"` for an orthogonal projection.
        rungs: the number of rungs of a ladder; 0 for the other methods.
    """

    leaf: str
    method: str
    rungs: int = 0


@dataclass(frozen=True, eq=False)
class Transporter:
    r"""Transport of tangents on a curved space, from the base $\Theta^t$ to the current model $\Theta^\tau$.

    Tangents at different points of a curved space cannot be added. The changes of a client's model are tangents at the
    base, where the client started. They must be transported before the server can add them to its current model. The
    constructor does not validate its arguments. Call `check` to validate them.

    Args:
        space: the space, with `inner`, `exp`, `log` and the primitives of the transport method.
        base: $\Theta^t$, of the space's shape.
        current: $\Theta^\tau$, of the space's shape.
        transport: the transport method. `"parallel"` is parallel transport in closed form. `"ladder"` approximates it
            by the pole ladder: it transports the fraction 1 / `rungs` of the tangent along `rungs` segments, and
            multiplies the result by `rungs`. `"projection"` projects the tangent orthogonally, which is not an
            isometry. The default for each leaf is `"parallel"` if it has a closed form, and `"ladder"` otherwise.
        rungs: the number of rungs of a ladder.
    """

    space: Manifold
    base: Tensor
    current: Tensor
    transport: str | None = None
    rungs: int = DEFAULT_RUNGS

    def __repr__(self) -> str:
        return format_result(
            self, space=self.space, base=self.base, current=self.current, transport=self.transport, rungs=self.rungs
        )

    def check(self) -> "Transporter":
        """Validate the options and the points, and return this transporter.

        Raises:
            ArgumentError: if an option is out of range, if a leaf lacks a primitive, or if a point is not on the space.
        """
        if self.transport is not None:
            check_choice("transport", self.transport, TRANSPORTS)
        check_count("rungs", self.rungs)
        for leaf, kind in zip(self.leaves, self.transports, strict=True):
            # Every method needs log for the drift, exp for the step, and inner for the Gram matrix.
            lacks = sorted(({"inner", "exp", "log"} | TRANSPORTS.get(kind.method, set())) - leaf.space.capabilities)
            if lacks:
                rest = " or ".join(set(TRANSPORTS) - {kind.method})
                advice = f"; try transport={rest}" if lacks == ["transport"] else ""
                raise ArgumentError(
                    f"transport: {kind.method} needs {', '.join(lacks)}, which {leaf} does not have{advice}"
                )
        for name, point in (("base", self.base), ("current", self.current)):
            check_point(self.space, point, name=name)
        return self

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """The leaves of the space, in storage order."""
        return self.space.leaves(self.base)

    @cached_property
    def transports(self) -> tuple[Transport, ...]:
        """The transport method of each leaf."""
        found = []
        for leaf in self.leaves:
            method = self.transport or ("parallel" if "transport" in leaf.space.capabilities else "ladder")
            # Tangents at different points of a flat leaf are the same vectors.
            method = "none" if leaf.space.flat else method
            found.append(Transport(leaf.name, method, self.rungs if method == "ladder" else 0))
        return tuple(found)

    @cached_property
    def drift(self) -> Tensor:
        r"""The drift $g = -\log_{\Theta^\tau} \Theta^t$, a tangent at the current point."""
        # The drift leads from the base to the current point. The logarithm at the current point leads the other way.
        return -self.log(self.base, "base")

    def log(self, points: Tensor, name: str) -> Tensor:
        r"""Compute $\log_{\Theta^\tau}$ of points within the injectivity radius."""
        return checked_log(self.space, self.current, points, f"{name}: out of reach of the current point")

    def to_current(self, displacements: Tensor) -> Tensor:
        r"""Transport tangents (n, *shape) at the base to the current point."""
        return self._transport(self.base, self.current, displacements)

    def position(self, displacements: Tensor) -> Tensor:
        r"""Compute the tangents that lead from the server's current model to the client's models.

        A displacement $v$ leads from the base $\Theta^t$, where the client started, to the client's model
        $\exp_{\Theta^t} v$. From the current model $\Theta^\tau$, the tangent $\log_{\Theta^\tau} \exp_{\Theta^t} v$
        leads to the same model.

        Args:
            displacements: $v$ (n, *shape), tangents at the base.
        """
        # On a curved space, the transported displacement minus the drift would have an error of third order.
        reached = self.space._exp(self.base.expand_as(displacements), displacements)
        return self.log(reached, "displacements: the points reached")

    def to_base(self, tangents: Tensor) -> Tensor:
        """Transport tangents (n, *shape) at the current point back to the base."""
        return self._transport(self.current, self.base, tangents)

    def gram(self, rows: Tensor) -> Tensor:
        """Compute the inner products of k tangents at the current model, for each leaf (named part) of the space.

        The result is a float64 tensor (S, k, k) on the CPU for a space with S leaves.
        """
        # Leaves are orthogonal to each other, so the matrix of the space is the sum of the matrices of its leaves.
        tangents = rows.view(len(rows), *self.current.shape)
        grams = []
        for leaf in self.leaves:
            part = leaf.select(tangents)
            grams.append(
                gram(part.flatten(1))[0] if leaf.space.flat else _inner(leaf.space, leaf.select(self.current), part)
            )
        return torch.stack(grams)

    def _transport(self, start: Tensor, end: Tensor, u: Tensor) -> Tensor:
        """Transport tangents (n, *shape) from one point to another, leaf by leaf.

        Raises:
            ArgumentError: if a result is not finite.
        """
        carried = []
        for leaf, kind in zip(self.leaves, self.transports, strict=True):
            v = leaf.select(u)
            # All tangents of the batch have the same base, so the points are expanded without a copy.
            x = leaf.select(start).expand_as(v)
            y = leaf.select(end).expand_as(v)
            if kind.method == "parallel":
                v = leaf.space._transport(x, y, v)
            elif kind.method == "ladder":
                # The error of a rung is of third order in the tangent. A fraction of the tangent therefore has a much
                # smaller error, even with few rungs.
                v = kind.rungs * formulas.pole_ladder(leaf.space, x, y, v / kind.rungs, rungs=kind.rungs)
            elif kind.method == "projection":
                v = leaf.space._project_tangent(y, v)
            carried.append(v.flatten(1))
        return check_finite("displacements: transported", torch.cat(carried, 1).view(u.shape))


def checked_log(space: Manifold, x: Tensor, points: Tensor, name: str) -> Tensor:
    r"""Compute $\log_x$ of points (n, *shape) on the space.

    Raises:
        ArgumentError: if a point has no logarithm or is beyond the injectivity radius. The message starts with `name`.
    """
    log = space._log(x.expand_as(points), points)
    try:
        check_injectivity_radius(space, x, log)
    except ArgumentError as error:
        raise ArgumentError(f"{name}: {error}") from None
    return log


def _inner(space: Manifold, x: Tensor, tangents: Tensor) -> Tensor:
    """Compute the matrix (k, k) of Riemannian inner products of k tangents at the point `x`, on the CPU."""
    k = len(tangents)
    # Each pair is computed once, so that the matrix is exactly symmetric even if the metric rounds.
    i, j = torch.tril_indices(k, k)
    u = tangents.double()
    values = space._inner(x.double().expand(len(i), *x.shape), u[i], u[j]).reshape(len(i), -1).sum(1)
    # The strictly lower triangle is mirrored, so the diagonal is counted once.
    lower = values.new_zeros(k, k).index_put((i, j), values)
    return (lower + lower.tril(-1).mT).cpu()
