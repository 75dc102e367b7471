"""Frames: the displacements of an update and the drift, as tangent vectors at the current model."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, reduce
from operator import add
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from manifoldagg._result_repr import format_result
from manifoldagg._validation import check_finite, check_number, check_shape, is_finite, short_repr
from manifoldagg.corrections.gram import Gram, Matrix, as_object_array
from manifoldagg.corrections.transport import DEFAULT_RUNGS, Transport, Transporter
from manifoldagg.errors import ArgumentError
from manifoldagg.kernels import Operands, Row, TensorList, as_operands, combine, gram, gram_combine
from manifoldagg.kernels.alloc import empty_like, in_huge_pages
from manifoldagg.kernels.fused import LinearCombination
from manifoldagg.kernels.operands import Operand
from manifoldagg.kernels.tensor_list import as_float64
from manifoldagg.manifolds import Manifold, check_tangent
from manifoldagg.manifolds.ambient import FLAT_AMBIENT, AmbientSpace
from manifoldagg.manifolds.manifold import check_is_manifold

__all__ = ["GRANULARITIES", "Combination", "Frame", "overflow_headroom", "require_flat"]

GRANULARITIES = ("model", "tensor")
STATE_NOT_FINITE = "rule's state would not be finite"


@dataclass(frozen=True, eq=False)
class Frame:
    r"""The displacements of an update and the drift of the server, as tangent vectors at the current model
    $\Theta^\tau$.

    The rows are $v_1, \dots, v_n, g$, followed by any additional rows of a correction.

    - On a flat space, $v_i$ is a displacement from the base $\Theta^t$, and $g = \Theta^\tau - \Theta^t$ is the drift.
      Both are differences of stored tensors. The frame never materialises them.
    - For a low-rank leaf, the rows are differences of the matrices that the factors represent. These are not
      materialised either.
    - On a curved space, $v_i$ is transported to the current point first, and $g = -\log_{\Theta^\tau} \Theta^t$.

    Attributes:
        rows: the minuends, as vectors (P,) or as the tensors of models. Row i is `rows[i] - minus[i]`, or `rows[i]` if
            `minus[i]` is `None`.
        minus: the subtrahends, with one row or `None` for each entry of `rows`.
        segments: the names of the tensors in a row, with their lengths. `None` means one segment.
        extra: the names of the rows after the drift.
        rows_are_points: whether the $v_i$ are points minus the base, as the drift is.
        transporter: the transport from the base of a curved space; `None` on a flat space.
        base_displacements: the displacements (n, *shape) at the base, if they are known.
        ambient: the space that computes inner products and sums of rows that are not tangent to a curved leaf.
        is_pseudo_gradient: whether every row is minus the tangent, as in a pseudo-gradient. The sign does not change
            inner products.
        unmeasured: the indices of the rows that `gram` does not read, with upper bounds on their norms.

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
    rows_are_points: bool = False
    transporter: Transporter | None = None
    base_displacements: Tensor | None = None
    ambient: AmbientSpace = FLAT_AMBIENT
    is_pseudo_gradient: bool = False
    unmeasured: Mapping[int, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        return format_result(
            self, rows=len(self.rows), extra=self.extra, segments=None if self.segments is None else len(self.segments)
        )

    @staticmethod
    def of_points(
        points: Float[Tensor, "n ..."] | Sequence[Row],
        base: Row,
        current: Row,
        *,
        segments: Mapping[str, int] | None = None,
        ambient: AmbientSpace = FLAT_AMBIENT,
    ) -> "Frame":
        r"""Build the frame of control points in a flat space, with the rows $v_i$ = `points[i] - base`.

        Args:
            points: n rows.
            base: $\\Theta^t$.
            current: $\\Theta^\\tau$.
            segments: the names of the tensors in a row, with their lengths.
            ambient: the ambient space, if the space has low-rank leaves.
        """
        return Frame((*points, current), (base,) * (len(points) + 1), segments, rows_are_points=True, ambient=ambient)

    @staticmethod
    def of_displacements(
        displacements: Float[Tensor, "n P"],
        base: Float[Tensor, " P"],
        current: Float[Tensor, " P"],
        *,
        segments: Mapping[str, int] | None = None,
    ) -> "Frame":
        """Build the frame of given displacements in a flat space."""
        return Frame((*displacements, current), (*(None for _ in displacements), base), segments)

    @staticmethod
    def of_gradients(
        gradients: Sequence[Row], base: Row, current: Row, *, segments: Mapping[str, int] | None = None
    ) -> "Frame":
        r"""Build the frame of pseudo-gradients $\Theta^t - \varphi_i$ in a flat space, with the rows $-v_i$ and $-g$.

        Example:
            >>> import torch
            >>> frame = Frame.of_gradients((torch.ones(2),), torch.zeros(2), torch.tensor([3.0, 4.0]))
            >>> frame.move(frame.gram(), [0.5, 0.0]).compute()
            tensor([2.5000, 3.5000])
        """
        return Frame((*gradients, base), (*(None for _ in gradients), current), segments, is_pseudo_gradient=True)

    @staticmethod
    def of(
        space: Manifold,
        base: Float[Tensor, "..."],
        current: Float[Tensor, "..."],
        displacements: Float[Tensor, "..."],
        *,
        transport: str | None = None,
        rungs: int = DEFAULT_RUNGS,
        flat: bool | None = None,
    ) -> "Frame":
        r"""Build the frame of displacements from `base`, on any space.

        Args:
            space: the space of the points. Its named tensors or factors are the segments.
            base: $\Theta^t$, of the space's shape.
            current: $\Theta^\tau$, of the space's shape.
            displacements: (n, *shape), tangents at `base`.
            transport: the method that transports the tangents to the current point of a curved space: `"parallel"`,
                `"ladder"` or `"projection"`. By default, a leaf with parallel transport in closed form uses it, and
                other leaves use a ladder. `transports` lists the choice for each leaf.
            rungs: the number of rungs of a ladder.
            flat: whether rows are differences of points. By default, they are on a flat space.

        Raises:
            ArgumentError: if an argument has the wrong shape, is not finite or is not on the space, or if the space
                lacks a required operation.

        Example:
            >>> import torch
            >>> from manifoldagg.manifolds import Flat
            >>> frame = Frame.of(Flat(2), torch.zeros(2), torch.tensor([0.0, 2.0]), torch.tensor([[3.0, 1.0]]))
            >>> frame.names, frame.gram().matrix.tolist()
            (('v1', 'g'), [[10.0, 2.0], [2.0, 4.0]])
        """
        check_is_manifold(space)
        if transport is not None and flat is None and space.flat:
            raise ArgumentError(f"transport: expected None on a flat space, got {short_repr(transport)}")
        check_shape("base", base, *space.axes)
        for name, tensor, lead in (("current", current, ()), ("displacements", displacements, (None,))):
            check_shape(name, tensor, *lead, *base.shape)
        for name, tensor in (("base", base), ("current", current), ("displacements", displacements)):
            check_finite(name, tensor)
        if space.flat if flat is None else flat:
            require_flat(space)
            segments = {leaf.name: leaf.part.stop - leaf.part.start for leaf in space.leaves(base)}
            frame = Frame.of_displacements(
                displacements.flatten(1), base.flatten(), current.flatten(), segments=segments
            )
            return replace(frame, base_displacements=displacements)
        transporter = Transporter(space, base, current, transport, rungs).check()
        check_tangent(space, base, displacements, name="displacements")
        return Frame.of_tangents(transporter, displacements)

    @staticmethod
    def of_tangents(transporter: Transporter, displacements: Float[Tensor, "..."]) -> "Frame":
        """Build the frame of tangents at the base of a curved space, without validating them.

        Args:
            transporter: the transport from the base to the current point.
            displacements: (n, *shape), valid tangents at the base.

        Raises:
            ArgumentError: if the base is beyond the injectivity radius of the current point.
        """
        segments = {leaf.name: leaf.part.stop - leaf.part.start for leaf in transporter.leaves}
        # The drift is computed first, because its error message names the point that is out of reach.
        drift = transporter.drift.flatten()
        rows = (*transporter.to_current(displacements).flatten(1), drift)
        return Frame(rows, (None,) * len(rows), segments, transporter=transporter, base_displacements=displacements)

    @cached_property
    def num_displacements(self) -> int:
        """The number n of rows that are displacements."""
        return len(self.rows) - 1 - len(self.extra)

    @cached_property
    def operands(self) -> Operands:
        """The rows of a flat frame as validated operands of the kernels."""
        return as_operands(self.rows, self.minus)

    @property
    def is_flat(self) -> bool:
        """Whether the rows are rows of a flat space, whose linear combinations can be evaluated lazily."""
        return self.transporter is None and not self.ambient.leaves

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the rows: `v1`, ..., `vn`, `g`, then the names of the additional rows."""
        return (*(f"v{i + 1}" for i in range(self.num_displacements)), "g", *self.extra)

    @property
    def transports(self) -> tuple[Transport, ...]:
        """The transport method of each leaf of a curved space; empty on a flat one."""
        return () if self.transporter is None else self.transporter.transports

    @property
    def base(self) -> Row:
        r"""$\Theta^t$ as a row; a vector (P,) on a curved space."""
        if self.transporter is not None:
            return self.transporter.base.flatten()
        base: Any = (self.rows if self.is_pseudo_gradient else self.minus)[self.num_displacements]
        return base  # type: ignore[no-any-return]

    @cached_property
    def current(self) -> Row:
        r"""$\Theta^\tau$ as a row; a vector (P,) on a curved space."""
        if self.transporter is not None:
            return self.transporter.current.flatten()
        current: Any = (self.minus if self.is_pseudo_gradient else self.rows)[self.num_displacements]
        return current  # type: ignore[no-any-return]

    @property
    def diagnostics(self) -> dict[str, float]:
        """The number of ladder rungs on a curved space, or the truncation errors of low-rank leaves."""
        if self.transporter is None:
            return self.ambient.diagnostics
        used = [kind.rungs for kind in self.transports if kind.method == "ladder"]
        return {"rungs": float(max(used))} if used else {}

    def row(self, i: int) -> Float64[Tensor, " P"]:
        """Compute one row as a float64 vector."""
        less = self.minus[i]
        full = as_float64(self.rows[i])
        return full if less is None else full - as_float64(less)

    @property
    def size(self) -> int:
        """The number P of entries of a row."""
        current = self.current
        return sum([piece.numel() for piece in current]) if isinstance(current, tuple) else current.numel()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of vectors computed from the rows.

        It is the dtype of the current model. If the model is a list of tensors, it is float64 if a tensor is float64,
        else float32.
        """
        current = self.current
        if not isinstance(current, tuple):
            return current.dtype
        wide = any(piece.dtype == torch.float64 for piece in current)
        return torch.float64 if wide else torch.float32

    def empty_vector(self, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate an uninitialised vector (P,)."""
        current = self.current
        device = current[0].device if isinstance(current, tuple) else current.device
        return in_huge_pages(torch.empty(self.size, dtype=dtype or self.dtype, device=device))

    def with_row(self, name: str, plus: Row, minus: Row | None = None, *, norm_only: bool = False) -> "Frame":
        """Return this frame with an additional row.

        Args:
            name: the name of the row.
            plus: the row, or its minuend.
            minus: the subtrahend of the row.
            norm_only: whether only the norm of the row is needed. A tensor list with a `norm_bound` is then not read,
                and its inner products are NaN.
        """
        bound = plus.norm_bound if norm_only and minus is None and isinstance(plus, TensorList) else None
        unmeasured = self.unmeasured if bound is None else {**self.unmeasured, len(self.rows): bound}
        rows = (*self.rows, plus)
        frame = replace(self, rows=rows, minus=(*self.minus, minus), extra=(*self.extra, name), unmeasured=unmeasured)
        if bound is not None and self.has_norm_bounds:
            frame.__dict__["_norm_bounds"] = [*self.__dict__["_norm_bounds"], bound]
        return frame

    @property
    def has_norm_bounds(self) -> bool:
        """Whether the norms of the rows, or upper bounds on them, are known."""
        return "_norm_bounds" in self.__dict__

    def detach(self) -> "Frame":
        """Return this frame with its rows detached from the autograd graph."""
        minus = tuple([None if row is None else detach(row) for row in self.minus])
        return replace(self, rows=tuple([detach(row) for row in self.rows]), minus=minus)

    def with_displacements(self, displacements: Float[Tensor, "n P"] | Sequence[Row]) -> "Frame":
        """Return the frame with other tangents at the current point, and without the additional rows."""
        n = self.num_displacements
        minus = (*(None for _ in displacements), self.minus[n])
        rows = (*displacements, self.rows[n])
        return replace(self, rows=rows, minus=minus, extra=(), rows_are_points=False, base_displacements=None)

    def require_flat(self, operation: str, *, sums_only: bool = False) -> None:
        """Check that no leaf is curved.

        Args:
            operation: the name of the operation for the error message.
            sums_only: whether the operation needs only inner products and sums. Low-rank leaves then pass the check.

        Raises:
            ArgumentError: if a leaf is curved. The message names the leaf and `operation`.
        """
        leaves = () if sums_only else self.ambient.leaves
        leaves = leaves if self.transporter is None else self.transporter.leaves
        curved = [str(leaf) for leaf in leaves if not leaf.space.flat]
        if curved:
            raise ArgumentError(f"space: {operation} needs flat leaves; these are curved: {', '.join(curved)}")

    def gram(self, granularity: str = "model", combinations: Sequence[LinearCombination] = ()) -> Gram:
        """Compute the inner products of the rows, for the whole model or for each segment.

        Args:
            granularity: `"model"` for one matrix, or `"tensor"` for one matrix per segment.
            combinations: linear combinations of the rows of a flat frame that the same pass computes, for the whole
                model. If the method raises an exception, the caller must discard them.

        Raises:
            ArgumentError: if `granularity` is invalid, or if the squared norm of a row overflows.
        """
        per_segment = granularity == "tensor"
        if granularity not in GRANULARITIES:
            raise ArgumentError(
                f"granularity: expected one of {', '.join(GRANULARITIES)}; got {short_repr(granularity)}"
            )
        every = [*range(len(self.rows))]
        if self.transporter is None:
            lengths = [*self.segments.values()] if per_segment and self.segments is not None else None
            if self.ambient.leaves:
                measured = every
                inner = self.ambient.gram(self.rows, minus=self.minus, segments=lengths)
            else:
                # A row minus itself is zero and is not read. An example is the drift of a fresh update.
                measured = [i for i in every if self.rows[i] is not self.minus[i] and i not in self.unmeasured] or [0]
                rows = self.operands if len(measured) == len(every) else self.operands.select(measured)
                inner = gram_combine(rows, combinations) if combinations else gram(rows, segments=lengths)
        else:
            inner = self.transporter.gram(torch.stack([self.row(i) for i in range(len(self.rows))]))
            inner = inner if per_segment else inner.sum(0, keepdim=True)
            measured = every
        parts = as_object_array(inner)
        if len(measured) < len(self.rows):
            products = parts
            parts = np.full((len(products), len(self.rows), len(self.rows)), 0.0, dtype=object)
            for i in self.unmeasured:
                parts[:, i] = parts[:, :, i] = math.nan
            parts[:, np.array(measured)[:, None], measured] = products
        result = Gram(parts, self.extra, tuple(self.segments or ()) if per_segment else ())
        squares = [x.detach() if isinstance(x, Tensor) else x for x in result.matrix.diagonal()]
        for i, square in enumerate(squares):
            if not math.isfinite(square) and i not in self.unmeasured:
                check_number(self._square_labels()[i], square)
        self.remember_norms(squares)
        return result

    def remember_norms(self, squares: Sequence[Any]) -> None:
        """Store bounds on the norms of the rows, given the diagonal of their Gram matrix."""
        known = self.unmeasured
        self.__dict__["_norm_bounds"] = [
            known[i] if i in known else math.sqrt(max(0.0, square)) for i, square in enumerate(squares)
        ]

    def norm_bound(self, coefficients: Matrix) -> float:
        r"""Compute $\sum_j \max_S |c_{Sj}| \sqrt{G_{jj}}$, an upper bound on the norm of the combination.

        The method reads the rows only if `gram` has not been called before.
        """
        if not self.has_norm_bounds:
            self.gram()
        most = np.abs(np.atleast_2d(coefficients)).max(axis=0).tolist()
        return float(sum([c * length for c, length in zip(most, self.__dict__["_norm_bounds"], strict=True) if c != 0]))

    def combination_norm(self, gram: Gram | None, coefficients: Matrix) -> float:
        """Return the norm of a linear combination of the rows, or an upper bound if some rows are unmeasured.

        Args:
            gram: the Gram matrix of the rows; `None` if bounds on the norms of the rows are known.
            coefficients: one for each row, or (S, k) with one row for each segment.
        """
        if gram is None or self.unmeasured:
            return self.norm_bound(coefficients)
        return math.sqrt(max(float(gram.squared_norm(coefficients)), 0.0))

    def split_by_tensor(self, coefficients: Matrix) -> Iterator[tuple["Frame", Matrix]]:
        """Yield the frame of each tensor with its coefficients. A frame of vectors is yielded whole."""
        if not isinstance(self.current, tuple):
            yield self, coefficients
            return
        start = 0
        for j, piece in enumerate(self.current):
            stop = start + piece.numel()
            here = slice(start, stop)
            rows = tuple([_tensor_part(row, j, here) for row in self.rows])
            minus = tuple([None if row is None else _tensor_part(row, j, here) for row in self.minus])
            line = coefficients
            line = line if line.ndim == 1 or len(line) == 1 else line[j : j + 1]
            yield replace(self, rows=rows, minus=minus, segments=None), line.reshape(-1)
            start = stop

    def _square_labels(self) -> tuple[str, ...]:
        """Return the names of the squared norms of the rows for error messages."""
        if self.rows_are_points:
            given = (*(f"points[{i}]" for i in range(self.num_displacements)), "current")
            return (*(f"{name}: squared distance from the base" for name in given), *self.extra)
        given = (*(f"displacements[{i}]" for i in range(self.num_displacements)), "drift", *self.extra)
        return tuple(f"{name}: squared length" for name in given)

    def inner_products(self, coefficients: Sequence[Any]) -> Float64[Tensor, "m m"]:
        """Compute the inner products of linear combinations of the rows in float64, in the metric of the space."""
        rows = [self.materialize_exact(line) for line in coefficients]
        return (
            self.ambient.gram(rows)[0] if self.transporter is None else self.transporter.gram(torch.stack(rows)).sum(0)
        )

    def combine(self, base: Row | None, coefficients: Sequence[float] | Matrix, out: Any = None) -> Any:
        r"""Compute $\mathrm{base} + \sum_j c_j\, r_j$, rounded once. Coefficients (S, k) apply by segment.

        The result on a low-rank leaf is the nearest matrix of the leaf's rank.

        If the coefficients of the rows that start at $\Theta^t$ sum to 0, $\Theta^t$ cancels. The rows are then formed
        as differences from $\Theta^\tau$. The position reading is therefore exactly the difference
        $\varphi_i - \Theta^\tau$.

        Raises:
            ArgumentError: if `base` is given on a curved space, where a point and a tangent cannot be added.
        """
        if self.transporter is not None and base is not None:
            raise ArgumentError("base: expected None on a curved space: a point and a tangent have no sum; use exp")
        numbers, segments, minus = self._resolve_coefficients(coefficients)
        if self.ambient.leaves:
            return self.ambient.combine(base, self.rows, numbers, minus=minus, segments=segments, out=out)
        rows = self.operands if minus is self.minus else self._operands_from_current()
        return combine(base, rows, numbers, segments=segments, out=out)

    def _operands_from_current(self) -> Operands:
        """Return the operands of rows that are differences from the current model instead of the base."""
        rows = self.operands
        n = self.num_displacements
        return rows.with_minus((rows.plus[n],) * (n + 1) + rows.minus[n + 1 :])

    def _resolve_coefficients(
        self, coefficients: Sequence[float] | Matrix
    ) -> tuple[Any, list[int] | None, tuple[Row | None, ...]]:
        """Return the coefficients as plain numbers, the lengths of the segments they apply to, and the subtrahends."""
        given = np.asarray(coefficients, dtype=object)
        apart = given.ndim == 2
        numbers = given.tolist() if apart else [given.tolist()]
        segments = [*self.segments.values()] if apart and self.segments is not None else None
        minus = self.minus
        n = self.num_displacements
        # The sum runs from left to right, so that mirrored terms cancel exactly. A compensated sum need not cancel
        # them.
        if self.rows_are_points and not any(reduce(add, line[: n + 1]) for line in numbers):
            for line in numbers:
                line[n] = 0.0
            minus = (self.rows[n],) * (n + 1) + minus[n + 1 :]
        return numbers if apart else numbers[0], segments, minus

    def materialize(self, coefficients: Sequence[float] | Matrix, dtype: torch.dtype | None = None) -> Any:
        r"""Compute $\sum_j c_j\, r_j$ as a new vector (P,), in `dtype` if it is given.

        If the space has low-rank leaves, the result is a tuple with one tensor per leaf, truncated to the rank that the
        leaf's space retains.
        """
        if self.ambient.leaves:
            numbers, _, minus = self._resolve_coefficients(coefficients)
            return self.ambient.for_state(self.rows, numbers, minus=minus, dtype=dtype or self.dtype)
        apart = dtype is not None or isinstance(self.current, tuple)
        return self.combine(None, coefficients, out=self.empty_vector(dtype) if apart else None)

    def materialize_exact(self, coefficients: Sequence[float] | Matrix) -> Any:
        r"""Compute $\sum_j c_j\, r_j$ in float64, without truncating the rank of low-rank leaves."""
        if self.ambient.leaves:
            numbers, _, minus = self._resolve_coefficients(coefficients)
            return self.ambient.combine_exact(self.rows, numbers, minus=minus)
        return self.combine(None, coefficients, out=self.empty_vector(torch.float64))

    def combination(self, base: Row | None, coefficients: Sequence[float] | Matrix, out: Operand) -> LinearCombination:
        """Return the unevaluated result of `combine`. It is computed into `out`, together with other combinations."""
        numbers, _, minus = self._resolve_coefficients(coefficients)
        numbers = numbers if isinstance(numbers[0], list) else [numbers]
        rows = self.operands if minus is self.minus else self._operands_from_current()
        return LinearCombination.of(base, rows, numbers, None, out)

    def for_state(self, coefficients: Sequence[float] | Matrix) -> "Combination | Any":
        r"""Return $\sum_j c_j\, r_j$ for the state of a rule.

        Args:
            coefficients: one for each row, or (S, k) with one row for each segment.

        Returns:
            On a flat space a `Combination`, which the step computes at its end. On other spaces a new row.
        """
        line = np.asarray(coefficients, dtype=object)
        return Combination(self, line, from_current=False) if self.is_flat else self.materialize(line)

    def move(self, gram: Gram | None, coefficients: Sequence[float] | Matrix) -> "Combination | Any":
        r"""Return the new model $\Theta^\tau + \sum_j c_j\, r_j$, and check that all its entries are finite.

        No entry moves by more than $\sum_j |c_j| \sqrt{G_{jj}}$. If this bound is less than a quarter of the distance
        between the two largest numbers of each dtype, a finite entry stays finite. Otherwise the sum is computed and
        checked tensor by tensor, in temporary memory.

        Args:
            gram: the Gram matrix of the rows; `None` if bounds on the norms of the rows are known.
            coefficients: one for each row, or (S, k) with one row for each segment.

        Returns:
            A `Combination`, which the step computes at its end. If the space has low-rank leaves, a new row.

        Raises:
            ArgumentError: if an entry would not be finite.
        """
        line = np.asarray(coefficients, dtype=object)
        new = Combination(self, line, from_current=True)
        if self.ambient.leaves:
            formed = new.compute()
            if not is_finite(*_tensors_of(formed)):
                raise ArgumentError("points: the new model would not be finite")
            return formed
        if not self.stays_finite(gram, line):
            new.check_finite()
        return new

    def stays_finite(self, gram: Gram | None, coefficients: Matrix) -> bool:
        """Return whether the bounds on the row norms imply that the current model plus the combination is finite.

        The arguments are those of `move`.
        """
        bounds_only = gram is None or self.unmeasured
        bound = self.norm_bound(coefficients) if bounds_only else gram.norm_bound(coefficients)  # type: ignore[union-attr]
        return bound <= overflow_headroom(self.current)


@dataclass(frozen=True, eq=False)
class Combination:
    r"""A linear combination $\sum_j c_j\, r_j$ of the rows of a flat frame that has not been computed.

    A rule returns its new model and the sums in its state in this form. The step computes them when all its checks
    have passed, so that a rejected update has written nothing.

    Attributes:
        frame: the frame of the rows.
        coefficients: $c$, (k,) or (S, k) with one row for each segment.
        from_current: whether the combination is added to the current model.
    """

    frame: Frame
    coefficients: Matrix
    from_current: bool

    def compute(self, out: Row | None = None) -> Any:
        """Compute the combination, rounded once, into `out` if it is given.

        Returns:
            `out`, or a new row: like the current model for a new model, else a vector (P,).
        """
        if self.from_current:
            # The rows of a pseudo-gradient frame are minus the tangents.
            line = -self.coefficients if self.frame.is_pseudo_gradient else self.coefficients
            return self.frame.combine(self.frame.current, line, out=out)
        return (
            self.frame.materialize(self.coefficients)
            if out is None
            else self.frame.combine(None, self.coefficients, out)
        )

    def new_row(self) -> Operand:
        """Allocate memory for the result of `compute`."""
        current = self.frame.current
        if isinstance(current, Tensor):
            like: Any = current if self.from_current else self.frame.rows[0]
            return empty_like(like)
        if not self.from_current:
            return self.frame.empty_vector()
        return (current if isinstance(current, TensorList) else TensorList(current)).new_empty()

    def fused(self, out: Operand) -> LinearCombination:
        """Return the combination as an operand of `combine_many`, which computes several in one pass."""
        if not self.from_current:
            return self.frame.combination(None, self.coefficients, out)
        line = -self.coefficients if self.frame.is_pseudo_gradient else self.coefficients
        return self.frame.combination(self.frame.current, line, out)

    def check_finite(self, dtypes: Sequence[torch.dtype] | None = None, computed: Row | None = None) -> None:
        """Check that all entries are finite.

        If neither the result is known nor the norms of the rows imply it, the combination is computed tensor by tensor
        in temporary memory.

        Args:
            dtypes: the dtype of each tensor of a sum; a new model has the dtypes of the current one.
            computed: the result of `compute`, if it is known.

        Raises:
            ArgumentError: if an entry is not finite.
        """
        if dtypes is not None:
            largest = min([torch.finfo(dtype).max for dtype in set(dtypes)])
            if self.frame.norm_bound(self.coefficients) <= largest / 2:
                return
        for part in self._compute_parts(dtypes) if computed is None else _tensors_of(computed):
            if not is_finite(part):
                what = f"new model would not be finite in {part.dtype}" if self.from_current else STATE_NOT_FINITE
                raise ArgumentError(f"points: the {what}")

    def _compute_parts(self, dtypes: Sequence[torch.dtype] | None) -> Iterator[Tensor]:
        """Compute the combination tensor by tensor, in temporary memory."""
        for j, (frame, line) in enumerate(self.frame.split_by_tensor(self.coefficients)):
            out = None if dtypes is None else frame.empty_vector(dtypes[j])
            yield Combination(frame, line, self.from_current).compute(out)


def _tensors_of(row: Row) -> tuple[Tensor, ...]:
    return row if isinstance(row, tuple) else (row,)


def _tensor_part(row: Row, j: int, entries: slice) -> Tensor:
    """Return tensor j of a row as a vector. `entries` is its range among the entries of all tensors."""
    return row[j].flatten() if isinstance(row, tuple) else row[entries]


def detach(row: Row) -> Row:
    """Detach a row from the autograd graph."""
    return TensorList([piece.detach() for piece in row]) if isinstance(row, tuple) else row.detach()


def overflow_headroom(point: Row) -> float:
    """Return an increment of the largest number of the dtypes that is rounded away, so that the sum stays finite."""
    if isinstance(point, tuple):
        return min([_dtype_headroom(dtype) for dtype in {piece.dtype for piece in point}])
    return _dtype_headroom(point.dtype)


@cache
def _dtype_headroom(dtype: torch.dtype) -> float:
    # max * eps is twice the spacing u of the two largest numbers. An increment below u / 2 is rounded away. Rounding by
    # way of float32 shifts this limit slightly, so the bound is u / 4.
    return torch.finfo(dtype).max * torch.finfo(dtype).eps / 8


def require_flat(space: Manifold) -> None:
    """Check that displacements of `space` are differences of points.

    Raises:
        ArgumentError: if `space` is curved or not a manifold.
    """
    if not (isinstance(space, Manifold) and space.flat):
        raise ArgumentError(f"space: expected a flat manifold, got {space}")
