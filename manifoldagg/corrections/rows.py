"""Inner products, norms and linear combinations of the vectors from which the correction of a stale update is computed.

These vectors are the rows of a frame, which is the input of a correction. They are the changes of a client's model
during training (displacements), the change of the server's model in that time (drift), and any additional vectors. On a
flat space, a frame refers to the models before and after each change. To save memory, it does not store their
difference.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, reduce
from operator import add
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from manifoldagg._result_repr import format_result
from manifoldagg._validation import check_number, short_repr
from manifoldagg.corrections.gram import Gram, Matrix, as_object_array
from manifoldagg.corrections.transport import Transport, Transporter
from manifoldagg.errors import ArgumentError
from manifoldagg.kernels import Operands, Row, TensorList, as_operands, combine, gram, gram_combine
from manifoldagg.kernels.alloc import in_huge_pages
from manifoldagg.kernels.fused import LinearCombination
from manifoldagg.kernels.operands import Operand
from manifoldagg.kernels.tensor_list import as_float64
from manifoldagg.manifolds.ambient import FLAT_AMBIENT, AmbientSpace

__all__ = ["GRANULARITIES", "FrameRows", "detach", "overflow_headroom"]

GRANULARITIES = ("model", "tensor")
Self = TypeVar("Self", bound="FrameRows")
"""The class of a frame, for methods that return a frame of the same class."""


@dataclass(frozen=True, eq=False)
class FrameRows:
    """The rows of a [`Frame`][manifoldagg.corrections.Frame], which documents the attributes."""

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
        """Whether the space of the models has neither curved nor low-rank parameters.

        On such a space, a new model is a linear combination of stored tensors. The server can therefore check a
        client's update first, and compute the new model only afterwards.
        """
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
        # A pseudo-gradient frame stores the drift as base - current, so minuend and subtrahend exchange their roles.
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
        """Diagnostics of numerical approximations, which the server includes in its response to an update.

        - On a curved space, a pole ladder can approximate parallel transport. The entry `rungs` is its number of steps.
        - Low-rank parameters, such as LoRA adapters, are truncated to their rank. The entries then describe the errors
          of this truncation. They are documented at `AmbientSpace`.

        If there are no such approximations, the dict is empty.
        """
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
        """The default dtype of new vectors, such as a linear combination of client updates.

        If the server's model is stored as a single vector, the dtype is that of this vector. If the model is stored as
        several tensors, the dtype is float64 if any tensor is float64, and float32 otherwise.
        """
        current = self.current
        if not isinstance(current, tuple):
            return current.dtype
        # Vectors of a model with several tensors have at least float32, which represents bf16 and fp16 exactly.
        wide = any(piece.dtype == torch.float64 for piece in current)
        return torch.float64 if wide else torch.float32

    def empty_vector(self, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate an uninitialised vector (P,) on the device of the rows."""
        current = self.current
        device = current[0].device if isinstance(current, tuple) else current.device
        return in_huge_pages(torch.empty(self.size, dtype=dtype or self.dtype, device=device))

    def with_row(self: Self, name: str, plus: Row, minus: Row | None = None, *, norm_only: bool = False) -> Self:
        """Return this frame with an additional row.

        Args:
            name: the name of the row.
            plus: the row, or its minuend.
            minus: the subtrahend of the row.
            norm_only: whether only the norm of the row is needed. If `plus` is a tensor list with a `norm_bound`, the
                bound replaces the norm. `gram` then does not read the row, and the inner products of the row are NaN.
        """
        bound = plus.norm_bound if norm_only and minus is None and isinstance(plus, TensorList) else None
        unmeasured = self.unmeasured if bound is None else {**self.unmeasured, len(self.rows): bound}
        rows = (*self.rows, plus)
        frame = replace(self, rows=rows, minus=(*self.minus, minus), extra=(*self.extra, name), unmeasured=unmeasured)
        # `replace` does not copy cached attributes. The known bounds are extended, so that no pass is repeated.
        if bound is not None and self.has_norm_bounds:
            frame.__dict__["_norm_bounds"] = [*self.__dict__["_norm_bounds"], bound]
        return frame

    @property
    def has_norm_bounds(self) -> bool:
        """Whether `gram` has already measured the norms of the rows, or upper bounds on them."""
        return "_norm_bounds" in self.__dict__

    def detach(self: Self) -> Self:
        """Return this frame with its rows detached from the autograd graph."""
        minus = tuple([None if row is None else detach(row) for row in self.minus])
        return replace(self, rows=tuple([detach(row) for row in self.rows]), minus=minus)

    def with_displacements(self: Self, displacements: Float[Tensor, "n P"] | Sequence[Row]) -> Self:
        """Return a frame with the same drift, the given displacements, and without additional rows.

        Args:
            displacements: tangents at the current point.
        """
        n = self.num_displacements
        minus = (*(None for _ in displacements), self.minus[n])
        # Only the drift is still a difference. The displacements are tangents without a subtrahend.
        rows = (*displacements, self.rows[n])
        return replace(self, rows=rows, minus=minus, extra=(), rows_are_points=False, base_displacements=None)

    def require_flat(self, operation: str, *, sums_only: bool = False) -> None:
        """Check that no leaf is curved.

        Args:
            operation: the name of the operation for the error message.
            sums_only: whether the operation needs only inner products and sums. Low-rank leaves are then accepted.

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
            combinations: linear combinations of the rows of a flat frame, for the whole model. The same pass computes
                them. If the method raises an exception, the caller must discard their results.

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
                # A row minus itself is zero and is not read. An example is the drift of a fresh update. At least one
                # row remains, because the kernels need its size and device.
                measured = [i for i in every if self.rows[i] is not self.minus[i] and i not in self.unmeasured] or [0]
                rows = self.operands if len(measured) == len(every) else self.operands.select(measured)
                inner = gram_combine(rows, combinations) if combinations else gram(rows, segments=lengths)
        else:
            # The metric of a curved leaf is not a dot product, so it needs the tangents themselves.
            inner = self.transporter.gram(torch.stack([self.row(i) for i in range(len(self.rows))]))
            # A curved space always has one matrix per leaf, because each leaf has its own metric.
            inner = inner if per_segment else inner.sum(0, keepdim=True)
            measured = every
        parts = as_object_array(inner)
        if len(measured) < len(self.rows):
            products = parts
            parts = np.full((len(products), len(self.rows), len(self.rows)), 0.0, dtype=object)
            # NaN marks unknown products, so that their accidental use cannot go unnoticed.
            for i in self.unmeasured:
                parts[:, i] = parts[:, :, i] = math.nan
            # This pair of indices selects the submatrix of the measured rows.
            parts[:, np.array(measured)[:, None], measured] = products
        result = Gram(parts, self.extra, tuple(self.segments or ()) if per_segment else ())
        # The product of two rows is at most the product of their norms, so a check of the diagonal is sufficient.
        squares = [x.detach() if isinstance(x, Tensor) else x for x in result.matrix.diagonal()]
        for i, square in enumerate(squares):
            if not math.isfinite(square) and i not in self.unmeasured:
                check_number(self._square_labels()[i], square)
        self.remember_norms(squares)
        return result

    def remember_norms(self, squares: Sequence[Any]) -> None:
        """Store the norms of the rows for later calls of `norm_bound`.

        `squares` contains the squared norms, which are the diagonal of the Gram matrix.
        """
        # Rounding can make the square of a zero row slightly negative.
        known = self.unmeasured
        self.__dict__["_norm_bounds"] = [
            known[i] if i in known else math.sqrt(max(0.0, square)) for i, square in enumerate(squares)
        ]

    def norm_bound(self, coefficients: Matrix) -> float:
        r"""Compute an upper bound on the norm of a linear combination of the rows.

        The bound is $\sum_j \max_S |c_{Sj}| \sqrt{G_{jj}}$, where $G$ is the Gram matrix of the rows. Row $j$ has the
        coefficient $c_{Sj}$ in segment $S$ of the model, such as a named tensor. The method uses the norms from an
        earlier call of `gram`. If there was no such call, the method calls `gram`, which reads the rows.
        """
        if not self.has_norm_bounds:
            self.gram()
        # Only the norm of a whole row is known, so the largest coefficient of all segments is used.
        most = np.abs(np.atleast_2d(coefficients)).max(axis=0).tolist()
        return float(sum([c * length for c, length in zip(most, self.__dict__["_norm_bounds"], strict=True) if c != 0]))

    def combination_norm(self, gram: Gram | None, coefficients: Matrix) -> float:
        """Return the norm of a linear combination of the rows, or an upper bound on this norm.

        The rows are the vectors of the frame, such as client updates. If their inner products are known, the result is
        the norm itself. Otherwise, it is an upper bound that requires only the norms of the rows.

        Args:
            gram: the Gram matrix of the rows; `None` if bounds on the norms of the rows are known.
            coefficients: one for each row, or (S, k) with one row for each segment.
        """
        if gram is None or self.unmeasured:
            return self.norm_bound(coefficients)
        # Rounding can make the squared norm of a small combination negative.
        return math.sqrt(max(float(gram.squared_norm(coefficients)), 0.0))

    def split_by_tensor(self: Self, coefficients: Matrix) -> Iterator[tuple[Self, Matrix]]:
        """Split a linear combination of the rows into one linear combination for each tensor of the model.

        The rows are vectors with one entry for each parameter, such as the change of a client's model. For each tensor,
        the method yields an object with only those entries of the rows that belong to the tensor, and their
        coefficients. The caller can then compute one tensor at a time.

        Args:
            coefficients: one for each row, or (S, k) with separate coefficients for each of S tensors.
        """
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
            # One row of coefficients, for the whole model or for its only segment, serves all tensors.
            line = line if line.ndim == 1 or len(line) == 1 else line[j : j + 1]
            yield replace(self, rows=rows, minus=minus, segments=None), line.reshape(-1)
            start = stop

    def _square_labels(self) -> tuple[str, ...]:
        """Return the text by which an error message names the squared norm of each row."""
        if self.rows_are_points:
            given = (*(f"points[{i}]" for i in range(self.num_displacements)), "current")
            return (*(f"{name}: squared distance from the base" for name in given), *self.extra)
        given = (*(f"displacements[{i}]" for i in range(self.num_displacements)), "drift", *self.extra)
        return tuple(f"{name}: squared length" for name in given)

    def inner_products(self, coefficients: Sequence[Any]) -> Float64[Tensor, "m m"]:
        """Compute the inner products of linear combinations of the rows, in float64."""
        rows = [self.materialize_exact(line) for line in coefficients]
        return (
            self.ambient.gram(rows)[0] if self.transporter is None else self.transporter.gram(torch.stack(rows)).sum(0)
        )

    def combine(self, base: Row | None, coefficients: Sequence[float] | Matrix, out: Any = None) -> Any:
        r"""Compute the sum $\mathrm{base} + \sum_j c_j\, r_j$ over the rows $r_j$ of the frame, rounded once.

        The rows are the displacements $v_i$ of a client's update, the drift $g$ of the server's model, and any rows
        that a correction added. For a low-rank parameter, the result is the nearest matrix of the same rank.

        If the update consists of models $\varphi_i$, then $v_i = \varphi_i - \Theta^t$ and
        $g = \Theta^\tau - \Theta^t$. Here, $\Theta^t$ is the model at which the client started, and $\Theta^\tau$ is
        the current model. If the coefficients of these rows sum to 0, $\Theta^t$ cancels. The method then subtracts
        $\Theta^\tau$ in its place, so that $g$ becomes 0. For example, it computes $v_i - g$ exactly as
        $\varphi_i - \Theta^\tau$.

        Args:
            base: the row to which the combination is added, or `None` for zero.
            coefficients: $c$, one for each row, or (S, k) with separate coefficients for each of S segments of the
                model.
            out: the row to which the result is written. By default, a new row is allocated.

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
        """Return the operands with the current model, instead of the base, as the subtrahend."""
        rows = self.operands
        n = self.num_displacements
        return rows.with_minus((rows.plus[n],) * (n + 1) + rows.minus[n + 1 :])

    def _resolve_coefficients(
        self, coefficients: Sequence[float] | Matrix
    ) -> tuple[Any, list[int] | None, tuple[Row | None, ...]]:
        """Return the arguments of a kernel call: coefficients, segment lengths and subtrahends."""
        given = np.asarray(coefficients, dtype=object)
        apart = given.ndim == 2
        numbers = given.tolist() if apart else [given.tolist()]
        segments = [*self.segments.values()] if apart and self.segments is not None else None
        minus = self.minus
        n = self.num_displacements
        # Summing from left to right cancels mirrored terms exactly. A compensated sum need not cancel them.
        if self.rows_are_points and not any(reduce(add, line[: n + 1]) for line in numbers):
            # The base cancels, so the current model is subtracted instead, and the drift relative to it is 0.
            for line in numbers:
                line[n] = 0.0
            minus = (self.rows[n],) * (n + 1) + minus[n + 1 :]
        return numbers if apart else numbers[0], segments, minus

    def materialize(self, coefficients: Sequence[float] | Matrix, dtype: torch.dtype | None = None) -> Any:
        r"""Compute the linear combination $\sum_j c_j\, r_j$ of the rows $r_j$ in new memory.

        The rows are the changes of a client's model during training, the change of the server's model in that time, and
        any additional vectors, such as a moving average of earlier updates.

        Args:
            coefficients: $c$, one for each row, or (S, k) with separate coefficients for each of S segments of the
                model.
            dtype: the dtype of the result. The default is the dtype of the rows, or the attribute `dtype` of the frame
                if the model consists of several tensors.

        Returns:
            A vector (P,). If the space has low-rank parameters, the result is a tuple with one tensor for each
            parameter. Its low-rank matrices are truncated to the rank at which a rule stores vectors such as a
            momentum.
        """
        if self.ambient.leaves:
            numbers, _, minus = self._resolve_coefficients(coefficients)
            return self.ambient.for_state(self.rows, numbers, minus=minus, dtype=dtype or self.dtype)
        # Without a target, the kernel returns a row in the form of the first row: a list of tensors, or a vector of its
        # dtype.
        apart = dtype is not None or isinstance(self.current, tuple)
        return self.combine(None, coefficients, out=self.empty_vector(dtype) if apart else None)

    def materialize_exact(self, coefficients: Sequence[float] | Matrix) -> Any:
        r"""Compute $\sum_j c_j\, r_j$ in float64, without truncating the rank of low-rank leaves."""
        if self.ambient.leaves:
            numbers, _, minus = self._resolve_coefficients(coefficients)
            return self.ambient.combine_exact(self.rows, numbers, minus=minus)
        return self.combine(None, coefficients, out=self.empty_vector(torch.float64))

    def combination(self, base: Row | None, coefficients: Sequence[float] | Matrix, out: Operand) -> LinearCombination:
        """Prepare a call of `combine` with these arguments, without computing the result.

        A function such as `combine_many` can then compute several prepared results in one pass over their vectors.
        """
        numbers, _, minus = self._resolve_coefficients(coefficients)
        numbers = numbers if isinstance(numbers[0], list) else [numbers]
        rows = self.operands if minus is self.minus else self._operands_from_current()
        return LinearCombination.of(base, rows, numbers, None, out)

    def stays_finite(self, gram: Gram | None, coefficients: Matrix) -> bool:
        """Return whether the new model of [`Frame.move`][manifoldagg.corrections.Frame.move] is certain to be finite.

        The arguments are those of `Frame.move`. The method computes only an upper bound on the change of each entry. If
        the result is `False`, the new model may still be finite, but its entries must be checked.
        """
        bounds_only = gram is None or self.unmeasured
        bound = self.norm_bound(coefficients) if bounds_only else gram.norm_bound(coefficients)  # type: ignore[union-attr]
        return bound <= overflow_headroom(self.current)


def _tensor_part(row: Row, j: int, entries: slice) -> Tensor:
    """Return the entries of `row` for tensor j of the model, as a vector."""
    # In a row that is a single vector, tensor j occupies the range `entries`.
    return row[j].flatten() if isinstance(row, tuple) else row[entries]


def detach(row: Row) -> Row:
    """Detach a row from the autograd graph."""
    return TensorList([piece.detach() for piece in row]) if isinstance(row, tuple) else row.detach()


def overflow_headroom(point: Row) -> float:
    """Return a bound below which an increment cannot make a finite entry of `point` overflow."""
    if isinstance(point, tuple):
        return min([_dtype_headroom(dtype) for dtype in {piece.dtype for piece in point}])
    return _dtype_headroom(point.dtype)


@cache
def _dtype_headroom(dtype: torch.dtype) -> float:
    # max * eps is twice the spacing u of the two largest numbers. An increment below u / 2 is rounded away. Rounding
    # through float32 shifts this limit slightly, so the bound is u / 4.
    """Return the bound of `overflow_headroom` for one dtype."""
    return torch.finfo(dtype).max * torch.finfo(dtype).eps / 8
