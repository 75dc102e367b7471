"""A frame: the displacements of an update and the drift, as tangent vectors at the current model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from manifoldagg.corrections.gram import Gram, Matrix, untracked
from manifoldagg.corrections.transport import RUNGS, Passage, Transport
from manifoldagg.errors import ArgumentError, check_finite, check_number, check_shape
from manifoldagg.kernels import combine, gram
from manifoldagg.manifolds import Manifold

__all__ = ["GRANULARITIES", "Frame", "require_flat"]

GRANULARITIES = ("model", "tensor")


@dataclass(frozen=True, eq=False)
class Frame:
    r"""Rows $v_1, \dots, v_n, g$, then further ones: tangent vectors at the current point $\Theta^\tau$.

    On a flat space $v_i$ is a displacement from the base $\Theta^t$ and $g = \Theta^\tau - \Theta^t$ the drift:
    differences of stored tensors that are never formed. On a curved space $v_i$ is transported to the current point
    first, and $g = -\log_{\Theta^\tau} \Theta^t$.

    Attributes:
        rows: vectors (P,): row i is `rows[i]` less `minus[i]`, where that is not `None`.
        minus: as many vectors or `None`.
        segments: the named tensors in a row, with their lengths; `None` is one piece.
        extra: the names of the rows after the drift.
        points: whether the $v_i$ are points less the base, as the drift is.
        passage: from the base of a curved space; `None` on a flat one.
        original: the displacements (n, *shape) at the base, where they are at hand.

    Example:
        >>> import torch
        >>> model, base, current = torch.tensor([[3.0, 1.0]]), torch.zeros(2), torch.tensor([0.0, 2.0])
        >>> Frame.of_points(model, base, current).gram().matrix.tolist()
        [[10.0, 2.0], [2.0, 4.0]]
    """

    rows: tuple[Tensor, ...]
    minus: tuple[Tensor | None, ...]
    segments: Mapping[str, int] | None = None
    extra: tuple[str, ...] = ()
    points: bool = False
    passage: Passage | None = None
    original: Tensor | None = None

    @staticmethod
    def of_points(
        points: Float[Tensor, "n P"],
        base: Float[Tensor, " P"],
        current: Float[Tensor, " P"],
        *,
        segments: Mapping[str, int] | None = None,
    ) -> "Frame":
        """The frame of control points in a flat space: $v_i$ = `points[i]` - `base`."""
        return Frame((*points, current), (base,) * (len(points) + 1), segments, points=True)

    @staticmethod
    def of_displacements(
        displacements: Float[Tensor, "n P"],
        base: Float[Tensor, " P"],
        current: Float[Tensor, " P"],
        *,
        segments: Mapping[str, int] | None = None,
    ) -> "Frame":
        """The frame of displacements in a flat space that are at hand as such."""
        return Frame((*displacements, current), (*(None for _ in displacements), base), segments)

    @staticmethod
    def of(
        space: Manifold,
        base: Float[Tensor, "..."],
        current: Float[Tensor, "..."],
        displacements: Float[Tensor, "..."],
        *,
        transport: str | None = None,
        rungs: int = RUNGS,
        flat: bool | None = None,
    ) -> "Frame":
        r"""The frame of displacements from `base`, on any space.

        Args:
            space: of the points. Its named tensors or factors are the segments.
            base: $\Theta^t$, of the space's shape.
            current: $\Theta^\tau$, of the space's shape.
            displacements: (n, *shape), tangents at `base`.
            transport: how they come to the current point of a curved space: `"parallel"`, `"ladder"` or
                `"projection"`. `None`: parallel where a leaf has it in closed form, a ladder elsewhere;
                `transports` says which.
            rungs: of a ladder.
            flat: whether to use differences of points; `None`: where the space is flat.

        Raises:
            ArgumentError: if an argument does not fit, is not finite or not on the space, or the space cannot do what
                is asked.

        Example:
            >>> import torch
            >>> from manifoldagg.manifolds import Flat
            >>> frame = Frame.of(Flat(2), torch.zeros(2), torch.tensor([0.0, 2.0]), torch.tensor([[3.0, 1.0]]))
            >>> frame.names, frame.gram().matrix.tolist()
            (('v1', 'g'), [[10.0, 2.0], [2.0, 4.0]])
        """
        if not isinstance(space, Manifold):
            raise ArgumentError(f"space: expected a manifold, got {space!r}")
        if transport is not None and flat is None and space.flat:
            raise ArgumentError(
                f"transport: expected None on a flat space, where nothing is to be done; got {transport!r}"
            )
        check_shape("base", base, *space.axes)
        for name, tensor, lead in (("current", current, ()), ("displacements", displacements, (None,))):
            check_shape(name, tensor, *lead, *base.shape)
        for name, tensor in (("base", base), ("current", current), ("displacements", displacements)):
            check_finite(name, tensor)
        n = len(displacements)
        segments = {leaf.name: leaf.part.stop - leaf.part.start for leaf in space.leaves(base)}
        if space.flat if flat is None else flat:
            require_flat(space)
            frame = Frame.of_displacements(
                displacements.flatten(1), base.flatten(), current.flatten(), segments=segments
            )
            return replace(frame, original=displacements)
        passage = Passage(space, base, current, transport, rungs)
        drift = passage.drift.flatten()  # first: it says by name what is out of reach
        rows = (*passage.arrive(displacements).flatten(1), drift)
        return Frame(rows, (None,) * (n + 1), segments, passage=passage, original=displacements)

    @property
    def displacements(self) -> int:
        """n, how many rows are displacements."""
        return len(self.rows) - 1 - len(self.extra)

    @property
    def names(self) -> tuple[str, ...]:
        """`v1`, ..., `vn`, `g`, and those of the further rows."""
        return (*(f"v{i + 1}" for i in range(self.displacements)), "g", *self.extra)

    @property
    def transports(self) -> tuple[Transport, ...]:
        """How each leaf of a curved space was transported; empty on a flat one."""
        return () if self.passage is None else self.passage.transports

    @property
    def base(self) -> Tensor:
        r"""$\Theta^t$ as a vector (P,)."""
        if self.passage is not None:
            return self.passage.base.flatten()
        base = self.minus[self.displacements]
        assert base is not None  # the drift of a flat space is a difference of points
        return base

    @property
    def current(self) -> Tensor:
        r"""$\Theta^\tau$ as a vector (P,)."""
        return self.rows[self.displacements] if self.passage is None else self.passage.current.flatten()

    def row(self, i: int) -> Float64[Tensor, " P"]:
        """One row, formed in float64."""
        less = self.minus[i]
        full = self.rows[i].double()
        return full if less is None else full - less.double()

    def extended(self, name: str, plus: Float[Tensor, " P"], minus: Float[Tensor, " P"] | None = None) -> "Frame":
        """This frame with one row more."""
        return replace(self, rows=(*self.rows, plus), minus=(*self.minus, minus), extra=(*self.extra, name))

    def detached(self) -> "Frame":
        """The same rows, which no derivative follows."""
        minus = tuple(None if row is None else row.detach() for row in self.minus)
        return replace(self, rows=tuple(row.detach() for row in self.rows), minus=minus)

    def moved(self, displacements: Float[Tensor, "n P"]) -> "Frame":
        """The frame of other tangents at the same current point: its displacements and the drift, without the rest."""
        n = self.displacements
        minus = (*(None for _ in displacements), self.minus[n])
        return Frame((*displacements, self.rows[n]), minus, self.segments, passage=self.passage)

    def require_flat(self, what: str) -> None:
        """Refuse a curved leaf, by name.

        Raises:
            ArgumentError: naming it, and `what` cannot be done there.
        """
        curved = [str(leaf) for leaf in self.passage.leaves if not leaf.space.flat] if self.passage else []
        if curved:
            raise ArgumentError(f"space: {what} needs flat leaves; these are curved: {', '.join(curved)}")

    def gram(self, granularity: str = "model") -> Gram:
        """Inner products of the rows: of the `"model"`, or of each `"tensor"`, that is segment.

        Raises:
            ArgumentError: if `granularity` is another word, or a row is so long that its square overflows.
        """
        apart = granularity == "tensor"
        if granularity not in GRANULARITIES:
            raise ArgumentError(f"granularity: expected one of {', '.join(GRANULARITIES)}; got {granularity!r}")
        if self.passage is None:
            lengths = [*self.segments.values()] if apart and self.segments is not None else None
            inner = gram(self.rows, minus=self.minus, segments=lengths)
        else:
            inner = self.passage.gram(torch.stack([self.row(i) for i in range(len(self.rows))]))
            inner = inner if apart else inner.sum(0, keepdim=True)
        found = Gram.of(inner, extra=self.extra, segments=tuple(self.segments or ()) if apart else ())
        for i in range(len(self.rows)):
            square = untracked(found.matrix[i, i])
            if not math.isfinite(square):
                check_number(self._called()[i], square)
        return found

    def _called(self) -> tuple[str, ...]:
        """What to call the squares of the rows in a message."""
        if self.points:
            given = (*(f"points[{i}]" for i in range(self.displacements)), "current")
            return (*(f"{name}: squared distance from the base" for name in given), *self.extra)
        given = (*(f"displacements[{i}]" for i in range(self.displacements)), "drift", *self.extra)
        return tuple(f"{name}: squared length" for name in given)

    def measure(self, rows: Sequence[Float64[Tensor, " P"]]) -> Float64[Tensor, "m m"]:
        """Inner products of other tangents at the current point, in the metric of the space."""
        return gram(rows)[0] if self.passage is None else self.passage.gram(torch.stack([*rows])).sum(0)

    def combine(self, base: Tensor | None, coefficients: Sequence[float] | Matrix, out: Tensor | None = None) -> Tensor:
        r"""$\mathrm{base} + \sum_j c_j\, r_j$, rounded once; with (S, k) coefficients, for each segment its own.

        Where the coefficients on rows from $\Theta^t$ sum to 0, $\Theta^t$ drops out: its place is taken by
        $\Theta^\tau$, so that the position reading is the difference $\varphi_i - \Theta^\tau$ to the last digit.

        Raises:
            ArgumentError: if a `base` is given on a curved space, where points and tangents are not added.
        """
        if self.passage is not None and base is not None:
            raise ArgumentError("base: expected None on a curved space: a point and a tangent have no sum; use exp")
        given = np.asarray(coefficients, dtype=object)
        apart = given.ndim == 2
        lines = given.tolist() if apart else [given.tolist()]
        segments = [*self.segments.values()] if apart and self.segments is not None else None
        minus = self.minus
        n = self.displacements
        # One by one from the first: so mirrored terms cancel to the last digit, as compensated sums need not.
        if self.points and not any(reduce(add, line[: n + 1]) for line in lines):
            for line in lines:
                line[n] = 0.0
            minus = (*(self.rows[n] for _ in range(n + 1)), *minus[n + 1 :])
        return combine(base, self.rows, lines if apart else lines[0], minus=minus, segments=segments, out=out)


def require_flat(space: Manifold) -> None:
    """A space on which displacements are differences of points.

    Raises:
        ArgumentError: if `space` is curved or no manifold.
    """
    if not (isinstance(space, Manifold) and space.flat):
        raise ArgumentError(f"space: expected a flat manifold, got {space}")
