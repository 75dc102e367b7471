"""A frame: the displacements of an update and the drift, as tangent vectors at the current model."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from operator import add
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from manifoldagg._validation import check_finite, check_number, check_shape, is_finite
from manifoldagg.corrections.gram import Gram, Matrix, objects, untracked
from manifoldagg.corrections.transport import RUNGS, Passage, Transport
from manifoldagg.errors import ArgumentError
from manifoldagg.kernels import Row, TensorList
from manifoldagg.kernels.alloc import in_huge_pages
from manifoldagg.kernels.fused import LinearCombination
from manifoldagg.kernels.tensor_list import as_float64
from manifoldagg.manifolds import Manifold
from manifoldagg.manifolds.ambient import FLAT_AMBIENT, AmbientSpace
from manifoldagg.manifolds.manifold import check_is_manifold

__all__ = ["GRANULARITIES", "Frame", "require_flat", "room"]

GRANULARITIES = ("model", "tensor")


class Later:
    """In place of `out`: who calls forms the model, once everything else is known to fit."""


LATER = Later()
Target = Row | Later | None
"""Where a model goes: into a row, into a new one, or nowhere yet."""


@dataclass(frozen=True, eq=False)
class Frame:
    r"""Rows $v_1, \dots, v_n, g$, then further ones: tangent vectors at the current point $\Theta^\tau$.

    On a flat space $v_i$ is a displacement from the base $\Theta^t$ and $g = \Theta^\tau - \Theta^t$ the drift:
    differences of stored tensors that are never formed. So they are where leaves are of low rank, as differences of the
    matrices that the factors stand for. On a curved space $v_i$ is transported to the current point
    first, and $g = -\log_{\Theta^\tau} \Theta^t$.

    Attributes:
        rows: vectors (P,), or the tensors of models: row i is `rows[i]` less `minus[i]`, where that is not `None`.
        minus: as many, or `None`.
        segments: the named tensors in a row, with their lengths; `None` is one piece.
        extra: the names of the rows after the drift.
        points: whether the $v_i$ are points less the base, as the drift is.
        passage: from the base of a curved space; `None` on a flat one.
        original: the displacements (n, *shape) at the base, where they are at hand.
        ambient: takes inner products and sums of rows that are tangent to no curved leaf.
        descent: whether every row is minus the tangent, as a pseudo-gradient is: inner products are the same.
        unread: the rows that `gram` does not read, by their places, and how long they are at most.

    Example:
        >>> import torch
        >>> model, base, current = torch.tensor([[3.0, 1.0]]), torch.zeros(2), torch.tensor([0.0, 2.0])
        >>> Frame.of_points(model, base, current).gram().matrix.tolist()
        [[10.0, 2.0], [2.0, 4.0]]
    """

    rows: tuple[Row, ...]
    minus: tuple[Row | None, ...]
    segments: Mapping[str, int] | None = None
    extra: tuple[str, ...] = ()
    points: bool = False
    passage: Passage | None = None
    original: Tensor | None = None
    ambient: AmbientSpace = FLAT_AMBIENT
    descent: bool = False
    unread: Mapping[int, float] = field(default_factory=dict)

    @staticmethod
    def of_points(
        points: Float[Tensor, "n ..."] | Sequence[Row],
        base: Row,
        current: Row,
        *,
        segments: Mapping[str, int] | None = None,
        ambient: AmbientSpace = FLAT_AMBIENT,
    ) -> "Frame":
        """The frame of control points in a flat space, rows: $v_i$ = `points[i]` - `base`.

        Args:
            points: n rows.
            base: $\\Theta^t$.
            current: $\\Theta^\\tau$.
            segments: the named tensors in a row, with their lengths.
            ambient: of a space with leaves of low rank.
        """
        return Frame((*points, current), (base,) * (len(points) + 1), segments, points=True, ambient=ambient)

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
    def of_gradients(
        gradients: Sequence[Row], base: Row, current: Row, *, segments: Mapping[str, int] | None = None
    ) -> "Frame":
        r"""The frame of pseudo-gradients $\Theta^t - \varphi_i$ in a flat space: its rows are $-v_i$ and $-g$.

        Example:
            >>> import torch
            >>> frame = Frame.of_gradients((torch.ones(2),), torch.zeros(2), torch.tensor([3.0, 4.0]))
            >>> frame.move(frame.gram(), [0.5, 0.0])
            tensor([2.5000, 3.5000])
        """
        return Frame((*gradients, base), (*(None for _ in gradients), current), segments, descent=True)

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
        check_is_manifold(space)
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
    def base(self) -> Row:
        r"""$\Theta^t$ as a row; a vector (P,) on a curved space."""
        if self.passage is not None:
            return self.passage.base.flatten()
        return self._ends[0]

    @property
    def current(self) -> Row:
        r"""$\Theta^\tau$, likewise."""
        return self._ends[1] if self.passage is None else self.passage.current.flatten()

    @property
    def _ends(self) -> tuple[Row, Row]:
        """The points whose difference is the drift of a flat space."""
        row, less = self.rows[self.displacements], self.minus[self.displacements]
        assert less is not None
        return (row, less) if self.descent else (less, row)

    def row(self, i: int) -> Float64[Tensor, " P"]:
        """One row, formed in float64."""
        less = self.minus[i]
        full = as_float64(self.rows[i])
        return full if less is None else full - as_float64(less)

    @property
    def size(self) -> int:
        """P, how many numbers a row has."""
        current = self.current
        return sum([piece.numel() for piece in current]) if isinstance(current, tuple) else current.numel()

    @property
    def dtype(self) -> torch.dtype:
        """Of a vector that is kept of the rows: that of the current one; of tensors of a model float32 or float64."""
        current = self.current
        if not isinstance(current, tuple):
            return current.dtype
        wide = any(piece.dtype == torch.float64 for piece in current)
        return torch.float64 if wide else torch.float32

    def blank(self, dtype: torch.dtype | None = None) -> Tensor:
        """A vector (P,) to write into."""
        current = self.current
        device = current[0].device if isinstance(current, tuple) else current.device
        return in_huge_pages(torch.empty(self.size, dtype=dtype or self.dtype, device=device))

    def extended(self, name: str, plus: Row, minus: Row | None = None, *, aside: bool = False) -> "Frame":
        """This frame with one row more.

        Args:
            name: what to call it.
            plus: the row.
            minus: what it is less.
            aside: whether nothing but lengths are asked of it: tensors that know how long they are at most, by their
                `bound`, are not read then. Their inner products are NaN.
        """
        bound = plus.norm_bound if aside and minus is None and isinstance(plus, TensorList) else None
        unread = self.unread if bound is None else {**self.unread, len(self.rows): bound}
        rows = (*self.rows, plus)
        made = replace(self, rows=rows, minus=(*self.minus, minus), extra=(*self.extra, name), unread=unread)
        if bound is not None and self.measured:
            made.__dict__["_lengths"] = [*self.__dict__["_lengths"], bound]
        return made

    @property
    def measured(self) -> bool:
        """Whether it is known how long the rows are, or are at most."""
        return "_lengths" in self.__dict__

    def detached(self) -> "Frame":
        """The same rows, which no derivative follows."""
        minus = tuple([None if row is None else detached(row) for row in self.minus])
        return replace(self, rows=tuple([detached(row) for row in self.rows]), minus=minus)

    def moved(self, displacements: Float[Tensor, "n P"] | Sequence[Row]) -> "Frame":
        """The frame of other tangents at the same current point: its displacements and the drift, without the rest."""
        n = self.displacements
        minus = (*(None for _ in displacements), self.minus[n])
        rows = (*displacements, self.rows[n])
        return replace(self, rows=rows, minus=minus, extra=(), points=False, original=None)

    def require_flat(self, what: str, *, sums: bool = False) -> None:
        """Refuse a curved leaf, by name; one of low rank not, where inner products and `sums` are all that is needed.

        Raises:
            ArgumentError: naming it, and `what` cannot be done there.
        """
        leaves = () if sums else self.ambient.leaves
        leaves = leaves if self.passage is None else self.passage.leaves
        curved = [str(leaf) for leaf in leaves if not leaf.space.flat]
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
        every = [*range(len(self.rows))]
        if self.passage is None:
            lengths = [*self.segments.values()] if apart and self.segments is not None else None
            moving = every if self.ambient.leaves else self._moving()
            rows = [self.rows[i] for i in moving]
            inner = self.ambient.gram(rows, minus=[self.minus[i] for i in moving], segments=lengths)
        else:
            inner = self.passage.gram(torch.stack([self.row(i) for i in range(len(self.rows))]))
            inner = inner if apart else inner.sum(0, keepdim=True)
            moving = every
        parts = objects(inner)
        if len(moving) < len(self.rows):
            read = parts
            parts = np.full((len(read), len(self.rows), len(self.rows)), 0.0, dtype=object)
            for i in self.unread:
                parts[:, i] = parts[:, :, i] = math.nan
            parts[:, np.array(moving)[:, None], moving] = read
        found = Gram(parts, self.extra, tuple(self.segments or ()) if apart else ())
        squares = [untracked(square) for square in np.diagonal(found.matrix)]
        for i, square in enumerate(squares):
            if not math.isfinite(square) and i not in self.unread:
                check_number(self._called()[i], square)
        measured = [math.sqrt(max(0.0, square)) for square in squares]
        self.__dict__["_lengths"] = [self.unread.get(i, length) for i, length in enumerate(measured)]
        return found

    def reach(self, coefficients: Matrix) -> float:
        r"""$\sum_j \max_S |c_{Sj}| \sqrt{G_{jj}}$: the combination is no longer, and no entry of it larger.

        No row is read where `gram` has been asked.
        """
        if not self.measured:
            self.gram()
        most = np.abs(np.atleast_2d(coefficients)).max(axis=0).tolist()
        return float(sum([c * length for c, length in zip(most, self.__dict__["_lengths"], strict=True) if c != 0]))

    def length(self, gram: Gram | None, coefficients: Matrix) -> float:
        """How long a combination of the rows is; where one of them was not read, how long at most.

        Args:
            gram: of the rows; `None` where it is known how long they are at most.
            coefficients: one for each row, or (S, k).
        """
        if gram is None or self.unread:
            return self.reach(coefficients)
        return math.sqrt(max(float(gram.square(coefficients)), 0.0))

    def pieces(self, coefficients: Matrix) -> Iterator[tuple["Frame", Matrix]]:
        """The frame of each tensor by itself, with the coefficients there; of vectors the frame as it is."""
        if not isinstance(self.current, tuple):
            yield self, coefficients
            return
        start = 0
        for j, piece in enumerate(self.current):
            stop = start + piece.numel()
            here = slice(start, stop)
            rows = tuple([_piece(row, j, here) for row in self.rows])
            minus = tuple([None if row is None else _piece(row, j, here) for row in self.minus])
            line = coefficients
            line = line if line.ndim == 1 or len(line) == 1 else line[j : j + 1]
            yield replace(self, rows=rows, minus=minus, segments=None), line.reshape(-1)
            start = stop

    def _moving(self) -> list[int]:
        """The rows that are read: not one that is a row less itself, as the drift is of what is not late."""
        still = [i for i, row in enumerate(self.rows) if row is self.minus[i]]
        return [i for i in range(len(self.rows)) if i not in still and i not in self.unread] or [0]

    def _called(self) -> tuple[str, ...]:
        """What to call the squares of the rows in a message."""
        if self.points:
            given = (*(f"points[{i}]" for i in range(self.displacements)), "current")
            return (*(f"{name}: squared distance from the base" for name in given), *self.extra)
        given = (*(f"displacements[{i}]" for i in range(self.displacements)), "drift", *self.extra)
        return tuple(f"{name}: squared length" for name in given)

    def measure(self, lines: Sequence[Any]) -> Float64[Tensor, "m m"]:
        """Inner products of combinations of the rows, formed in float64, in the metric of the space."""
        rows = [self.exact(line) for line in lines]
        return self.ambient.gram(rows)[0] if self.passage is None else self.passage.gram(torch.stack(rows)).sum(0)

    def combine(self, base: Row | None, coefficients: Sequence[float] | Matrix, out: Any = None) -> Any:
        r"""$\mathrm{base} + \sum_j c_j\, r_j$, rounded once; with (S, k) coefficients, for each segment its own.

        A leaf of low rank takes the matrix of its rank that is nearest.

        Where the coefficients on rows from $\Theta^t$ sum to 0, $\Theta^t$ drops out: its place is taken by
        $\Theta^\tau$, so that the position reading is the difference $\varphi_i - \Theta^\tau$ to the last digit.

        Raises:
            ArgumentError: if a `base` is given on a curved space, where points and tangents are not added.
        """
        if self.passage is not None and base is not None:
            raise ArgumentError("base: expected None on a curved space: a point and a tangent have no sum; use exp")
        lines, segments, minus = self._read(coefficients)
        return self.ambient.combine(base, self.rows, lines, minus=minus, segments=segments, out=out)

    def _read(self, coefficients: Sequence[float] | Matrix) -> tuple[Any, list[int] | None, tuple[Row | None, ...]]:
        """Coefficients as plain numbers, the segments that have each their own, and what the rows are less."""
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
            minus = (self.rows[n],) * (n + 1) + minus[n + 1 :]
        return lines if apart else lines[0], segments, minus

    def formed(self, coefficients: Sequence[float] | Matrix, dtype: torch.dtype | None = None) -> Any:
        r"""$\sum_j c_j\, r_j$ to be kept: a new vector (P,), in `dtype` where it is given.

        Where leaves are of low rank it is a tuple with one tensor a leaf, truncated to what their spaces keep.
        """
        if self.ambient.leaves:
            lines, _, minus = self._read(coefficients)
            return self.ambient.for_state(self.rows, lines, minus=minus, dtype=dtype or self.dtype)
        apart = dtype is not None or isinstance(self.current, tuple)
        return self.combine(None, coefficients, out=self.blank(dtype) if apart else None)

    def exact(self, coefficients: Sequence[float] | Matrix) -> Any:
        r"""$\sum_j c_j\, r_j$ in float64, of low-rank leaves of any rank: what comes between two readings."""
        if self.ambient.leaves:
            lines, _, minus = self._read(coefficients)
            return self.ambient.combine_exact(self.rows, lines, minus=minus)
        return self.combine(None, coefficients, out=self.blank(torch.float64))

    def goal(self, base: Row | None, coefficients: Sequence[float] | Matrix, out: TensorList) -> LinearCombination:
        """What `combine` makes, to be formed in `out` together with others."""
        lines, _, minus = self._read(coefficients)
        return LinearCombination.of(base, self.rows, lines if isinstance(lines[0], list) else [lines], minus, out)

    def kept(self, coefficients: Sequence[float] | Matrix, out: Target = None) -> Any:
        r"""$\sum_j c_j\, r_j$ for a state to keep: a new vector (P,); with `LATER` a `Sum`, which is formed later.

        Args:
            coefficients: one for each row, or (S, k), for each segment its own.
            out: where the model goes, which is formed when this is.
        """
        line = np.asarray(coefficients, dtype=object)
        return Sum(self, line) if isinstance(out, Later) else self.formed(line)

    def move(self, gram: Gram | None, coefficients: Sequence[float] | Matrix, out: Target = None) -> Any:
        r"""$\Theta^\tau + \sum_j c_j\, r_j$ on a flat space, rounded once; formed if all its entries are finite.

        No entry moves by more than $\sum_j |c_j| \sqrt{G_{jj}}$. Where that is less than a quarter of the distance
        between the two largest numbers of each dtype, a finite entry stays one, whatever it is; otherwise the sum is
        formed tensor by tensor and looked at, before anything is written.

        Args:
            gram: of the rows; `None` where it is known how long they are at most.
            coefficients: one for each row, or (S, k), for each segment its own.
            out: where to write; `LATER`: nowhere yet.

        Returns:
            `out`, or a new row; with `LATER` a `Motion` that is formed later.

        Raises:
            ArgumentError: if an entry would not be finite.
        """
        line = np.asarray(coefficients, dtype=object)
        motion = Motion(self, line)
        if self.ambient.leaves:
            formed = motion.formed(None)
            if not is_finite(*(formed if isinstance(formed, tuple) else (formed,))):
                raise ArgumentError("points: the new model would not be finite")
            return formed if not isinstance(out, Tensor) else out.copy_(formed)
        if not (self.reach(line) if gram is None or self.unread else gram.reach(line)) <= room(self.current):
            motion.check()
        return motion if isinstance(out, Later) else motion.formed(out)


@dataclass(frozen=True, eq=False)
class Motion:
    """A combination of the rows of a flat frame, added to the current point: finite, and not formed yet."""

    frame: Frame
    coefficients: Matrix

    def formed(self, out: Row | None) -> Any:
        """The new point, a row: `out` where it is given."""
        return self.frame.combine(self.frame.current, self._line, out=out)

    def goal(self, out: TensorList) -> LinearCombination:
        """The new point, to be formed in `out` together with what else there is."""
        return self.frame.goal(self.frame.current, self._line, out)

    @property
    def _line(self) -> Matrix:
        return -self.coefficients if self.frame.descent else self.coefficients

    def check(self) -> None:
        """Form it tensor by tensor and look at each entry.

        Raises:
            ArgumentError: if one is not finite.
        """
        for frame, line in self.frame.pieces(self.coefficients):
            formed = Motion(frame, line).formed(None)
            if not is_finite(formed):
                raise ArgumentError(f"points: the new model would not be finite in {formed.dtype}")


@dataclass(frozen=True, eq=False)
class Sum:
    """A combination of the rows of a frame that a state keeps, and not formed yet."""

    frame: Frame
    coefficients: Matrix

    def formed(self, out: Row | None = None) -> Any:
        """The sum, in `out` or as a new vector (P,)."""
        if out is None:
            return self.frame.formed(self.coefficients)
        return self.frame.combine(None, self.coefficients, out=out)

    def goal(self, out: TensorList) -> LinearCombination:
        """The sum, to be formed in `out` together with what else there is."""
        return self.frame.goal(None, self.coefficients, out)

    def check(self, dtypes: Sequence[torch.dtype]) -> None:
        """Look at each entry, tensor by tensor, unless the lengths of the rows say that all are finite.

        Args:
            dtypes: in which the tensors are kept.

        Raises:
            ArgumentError: if one is not finite.
        """
        if self.frame.reach(self.coefficients) <= min([torch.finfo(dtype).max for dtype in set(dtypes)]) / 2:
            return
        for dtype, (frame, line) in zip(dtypes, self.frame.pieces(self.coefficients), strict=True):
            if not is_finite(frame.combine(None, line, out=frame.blank(dtype))):
                raise ArgumentError("points: the rule's state would not be finite")


def _piece(row: Row, j: int, here: slice) -> Tensor:
    """Tensor j of a row, as a vector; `here` are its entries among those of all."""
    return row[j].flatten() if isinstance(row, tuple) else row[here]


def detached(row: Row) -> Row:
    """A row that no derivative follows."""
    return TensorList([piece.detach() for piece in row]) if isinstance(row, tuple) else row.detach()


def room(point: Row) -> float:
    """By how much the largest number of the dtypes of a point may grow and still be rounded to itself."""
    if isinstance(point, tuple):
        return min([_room_in(dtype) for dtype in {piece.dtype for piece in point}])
    return _room_in(point.dtype)


@cache
def _room_in(dtype: torch.dtype) -> float:
    # max * eps is twice the distance u of the two largest numbers. From max + u / 2 on it is rounded away, which a
    # rounding by way of float32 comes to a little earlier: u / 4.
    return torch.finfo(dtype).max * torch.finfo(dtype).eps / 8


def require_flat(space: Manifold) -> None:
    """A space on which displacements are differences of points.

    Raises:
        ArgumentError: if `space` is curved or no manifold.
    """
    if not (isinstance(space, Manifold) and space.flat):
        raise ArgumentError(f"space: expected a flat manifold, got {space}")
