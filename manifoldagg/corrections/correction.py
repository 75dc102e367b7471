"""The correction base class: a small matrix, computed from a Gram matrix, that is applied to a stale update."""

import abc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from manifoldagg._result_repr import format_result
from manifoldagg._validation import check_finite
from manifoldagg.corrections.frame import Frame
from manifoldagg.corrections.gram import Gram, Matrix, lost_to_cancellation
from manifoldagg.corrections.transport import DEFAULT_RUNGS
from manifoldagg.errors import ArgumentError
from manifoldagg.kernels import Row
from manifoldagg.kernels.operands import needs_autograd_path
from manifoldagg.manifolds import Manifold

__all__ = ["Composition", "Corrected", "Correction", "by_granularity"]

AuxiliaryRow = tuple[str, Tensor, Tensor | None]


@dataclass(frozen=True, eq=False)
class Corrected:
    r"""The result of a correction of a frame.

    Attributes:
        frame: with the rows that the correction added.
        gram: of its rows.
        coefficients: $C$, (n, k), or (S, n, k) with one for each segment.
        state: the next one, of a correction that keeps one.
        original_gram: the Gram matrix of the displacements as they came; not `gram` where rows were formed on the way.
        auxiliary: inner products (S, k + 1) of a vector that was read beside them with the rows, and with itself.
    """

    frame: Frame
    gram: Gram
    coefficients: Matrix
    state: Any
    original_gram: Gram
    auxiliary: Matrix | None = None

    def __repr__(self) -> str:
        return format_result(self, coefficients=self.coefficients, gram=self.gram)

    @cached_property
    def corrected_gram(self) -> Gram:
        r"""$\bar C G \bar C^\top$: the Gram matrix of the corrected displacements and the drift."""
        return self.gram.corrected(self.coefficients)

    def row_coefficients(self, weights: Any) -> Matrix:
        r"""Compute $\sum_i w_i C_{ij}$, (k,) or (S, k): corrected rows as a combination of the frame's rows."""
        line: Matrix = np.asarray(weights, dtype=object) @ self.coefficients
        return line

    def combine(self, base: Row | None, weights: Any, out: Any = None) -> Any:
        r"""Compute $\mathrm{base} + \sum_i w_i \sum_j C_{ij} r_j$, rounded once."""
        return self.frame.combine(base, self.row_coefficients(weights), out=out)

    @staticmethod
    def single(frame: Frame, gram: Gram, coefficients: Sequence[float]) -> "Corrected":
        """Return one combination of the rows of a frame in this form."""
        return Corrected(frame, gram, np.array([coefficients], dtype=object), None, gram)

    def inner_products(self) -> list[list[float]]:
        r"""Compute the inner products of the corrected rows, n x n.

        If $C G C^\top$ is no larger than rounding errors, they are computed from the rows, in float64.

        Raises:
            ArgumentError: if a row is so long that its square overflows.
        """
        parts = self.gram.transform(self.coefficients)
        inner: list[list[float]] = (parts[0] if len(parts) == 1 else parts.sum(0)).tolist()
        if lost_to_cancellation(inner, self.gram.matrix):
            inner = self.frame.inner_products([self.coefficients[..., i, :] for i in range(len(inner))]).tolist()
        for i, row in enumerate(inner):
            if not math.isfinite(row[i]):
                raise ArgumentError(f"points[{i}]: squared length of the corrected displacement overflows")
        return inner

    def lost_to_cancellation(self) -> bool:
        """Return whether a corrected displacement, or a segment of it, is no larger than rounding errors."""
        n = self.gram.num_displacements
        left = self.corrected_gram.parts[:, :n, :n]
        return any(lost_to_cancellation(*pair) for pair in zip(left, self.gram.parts, strict=True))

    def move(self, weights: Any) -> Any:
        r"""Return the new model $\Theta^\tau + \sum_i w_i \sum_j C_{ij} r_j$.

        See [`Frame.move`][manifoldagg.corrections.Frame.move].
        """
        return self.frame.move(self.gram, np.asarray(weights, dtype=object) @ self.coefficients)

    def rows(self) -> list[Row]:
        r"""Compute the corrected rows, each rounded once to the frame's dtype; low-rank leaves are exact."""
        form = self.frame.materialize_exact if self.frame.ambient.leaves else self.frame.materialize
        rows = [form(self.coefficients[..., i, :]) for i in range(self.coefficients.shape[-2])]
        for row in rows:
            for piece in row if isinstance(row, tuple) else (row,):
                if not needs_autograd_path([piece]):
                    check_finite("corrected displacements", piece)
        return rows

    def displacements(self) -> Float[Tensor, "n P"]:
        r"""Compute the corrected rows, tangent at $\Theta^\tau$, each rounded once to the frame's dtype.

        Raises:
            ArgumentError: naming a leaf of low rank: what is added to one is not a vector.
        """
        if self.frame.ambient.leaves:
            raise ArgumentError("space: displacements of low-rank leaves are no vectors: use `rows` or `combine`")
        rows: list[Any] = self.rows()
        return torch.stack(rows) if rows else self.frame.empty_vector()[None][:0]


class Correction(abc.ABC):
    r"""A map $\pi(\Theta^t, \Theta^\tau, v)$ from displacements at the base to tangents at the current model.

    It acts on each control point by itself, so that a curve keeps its start at $\Theta^\tau$. One that is algebra has
    `coefficients` alone; what it needs besides $v$ and $g$ it adds to the frame as rows, in `extend`; tensors that it
    remembers it makes in `update_state`. A state is returned, never changed.

    Attributes:
        granularity: `"tensor"` where it asks the Gram matrix for its segments, such as `gram["head.weight"]`.
        keeps_state: whether there is something to remember.

    Example:
        Take half of the displacement where it conflicts with the drift in the last layer.

        >>> import torch
        >>> from manifoldagg.manifolds import Flat, Product
        >>> class HalveConflicts(Correction):
        ...     granularity = "tensor"
        ...     def coefficients(self, gram, state=None):
        ...         lines, n, last = gram.identity(), gram.num_displacements, gram["head"].matrix
        ...         for i in range(n):
        ...             lines[i, i] = 0.5 if last[i, n] < 0 else 1.0
        ...         return lines, state
        >>> space = Product({"body": Flat(1), "head": Flat(1)})
        >>> base, current = torch.zeros(2), torch.ones(2)
        >>> HalveConflicts()(space, base, current, torch.tensor([[4.0, -2.0], [-4.0, 2.0]]))
        tensor([[ 2., -1.],
                [-4.,  2.]])
    """

    granularity: str = "model"
    keeps_state: ClassVar[bool] = False

    @abc.abstractmethod
    def coefficients(self, gram: Gram, state: Any = None) -> tuple[Matrix, Any]:
        r"""Return $C$ such that corrected row i is $\sum_j C_{ij} r_j$, and the next state.

        Args:
            gram: the inner products of $v_1, \dots, v_n, g$ and the correction's own rows.
            state: of a correction that keeps one; `None` at first.

        Returns:
            (n, k) numbers of the same kind, or (S, n, k) with a matrix for each segment; and the state.
        """

    def extend(self, frame: Frame, state: Any = None) -> Frame:
        """Return `frame` with additional rows."""
        return frame

    def update_state(self, frame: Frame, coefficients: Matrix, state: Any) -> Any:
        """Return the state with its tensors updated, given the corrected frame."""
        return state

    def adds_rows(self, frame: Frame) -> bool:
        """Return whether the correction adds rows to such a frame; the default is whether it has an `extend`."""
        return type(self).extend is not Correction.extend

    def apply(
        self, frame: Frame, state: Any = None, *, granularity: str | None = None, auxiliary: AuxiliaryRow | None = None
    ) -> Corrected:
        """Correct the displacements of a frame.

        Args:
            frame: of displacements and the drift.
            state: what the last call returned, of a correction that keeps one. It is not changed.
            granularity: to read segments for what comes after; its own where not given.
            auxiliary: the name of a vector of a flat space, the vector, and what it is less: it is not corrected, and
                read in the same pass as the rows.

        Raises:
            ArgumentError: if inner products overflow float64, or the correction cannot work on such a frame.

        Cost: one pass that reads the rows (beside those that the correction makes); `displacements` is another.
        """
        if frame.extra:
            raise ArgumentError(f"frame: expected displacements and the drift alone, got also {', '.join(frame.extra)}")
        frame = self.extend(frame, state)
        seen = frame if auxiliary is None else frame.with_row(*auxiliary)
        gram = seen.gram(granularity or self.granularity)
        products = None
        if auxiliary is not None:
            products = gram.parts[:, -1]
            gram = Gram(gram.parts[:, :-1, :-1], frame.extra, gram.segments)
        lines, state = self.coefficients(gram, state)
        if self.keeps_state:
            state = self.update_state(frame, lines, state)
        return Corrected(frame, gram, lines, state, gram, products)

    def __call__(
        self,
        space: Manifold,
        base: Float[Tensor, "..."],
        current: Float[Tensor, "..."],
        displacements: Float[Tensor, "..."],
        *,
        transport: str | None = None,
        rungs: int = DEFAULT_RUNGS,
    ) -> Float[Tensor, "..."]:
        r"""The corrected displacements, tangent at `current`.

        Args:
            space: of the points.
            base: $\Theta^t$, where the update started, of the space's shape.
            current: $\Theta^\tau$, where the server is.
            displacements: $v$, tangents at `base`: (n, *shape), a row for each control point.
            transport: as in [`Frame.of`][manifoldagg.corrections.Frame.of], of a curved space.
            rungs: of a ladder.

        Returns:
            (n, *shape), a new tensor.

        Raises:
            ArgumentError: if an argument does not fit, is not finite or not on the space, the space cannot do what
                is asked, or the correction keeps a state: use `apply` then.

        Cost: on a flat space one pass that reads everything, one that writes the result.
        """
        if self.keeps_state:
            raise ArgumentError(
                f"{self} keeps a state between updates: use apply(frame, state), which returns the next"
            )
        frame = Frame.of(space, base, current, displacements, transport=transport, rungs=rungs)
        return self.apply(frame).displacements().reshape(displacements.shape)

    def __rshift__(self, other: "Correction") -> "Correction":
        """`a >> b`: first `a`, then `b` on what `a` made of the rows."""
        if not isinstance(other, Correction):
            return NotImplemented
        return Composition((*_parts(self), *_parts(other)))


@dataclass(frozen=True)
class Composition(Correction):
    r"""A sequence of corrections: $C = C_b(\bar C_a G \bar C_a^\top)\, \bar C_a$; $\bar C_a$ preserves the drift.

    Where the next one makes rows of the displacements or keeps a state, or so little of a displacement is left that
    $\bar C_a G \bar C_a^\top$ is rounding, what has been made of them is formed in between, which takes another pass.

    Attributes:
        parts: from the first to the last.
    """

    parts: tuple[Correction, ...]

    @property
    def granularity(self) -> str:  # type: ignore[override]  # of its parts
        """The finest granularity of the corrections."""
        return "tensor" if any(part.granularity == "tensor" for part in self.parts) else "model"

    @property
    def keeps_state(self) -> bool:  # type: ignore[override]  # as above
        """Whether a correction has state."""
        return any(part.keeps_state for part in self.parts)

    def adds_rows(self, frame: Frame) -> bool:
        return any(part.adds_rows(frame) for part in self.parts)

    def coefficients(self, gram: Gram, state: Any = None) -> tuple[Matrix, Any]:
        states = [*(state or (None for _ in self.parts))]
        lines, states[0] = self.parts[0].coefficients(gram, states[0])
        for i, part in enumerate(self.parts[1:], 1):
            after, states[i] = part.coefficients(gram.corrected(lines), states[i])
            lines = after @ gram.with_drift(lines)
        return lines, tuple(states) if self.keeps_state else None

    def apply(
        self, frame: Frame, state: Any = None, *, granularity: str | None = None, auxiliary: AuxiliaryRow | None = None
    ) -> Corrected:
        finest = granularity or self.granularity
        states = [*(state or (None for _ in self.parts))]
        done = self.parts[0].apply(frame, states[0], granularity=finest, auxiliary=auxiliary)
        states[0] = done.state
        for i, part in enumerate(self.parts[1:], 1):
            if part.keeps_state or part.adds_rows(done.frame) or done.lost_to_cancellation():
                moved = done.frame.with_displacements(done.rows())
                formed = part.apply(moved, states[i], granularity=finest, auxiliary=auxiliary)
                done = replace(formed, original_gram=done.original_gram)
                states[i] = done.state
            else:
                lines, _ = part.coefficients(done.corrected_gram)
                done = replace(done, coefficients=lines @ done.gram.with_drift(done.coefficients))
        return replace(done, state=tuple(states) if self.keeps_state else None)


def _parts(correction: Correction) -> tuple[Correction, ...]:
    return correction.parts if isinstance(correction, Composition) else (correction,)


Rule = TypeVar("Rule", bound=Callable[..., tuple[Matrix, Any]])


def by_granularity(coefficients: Rule) -> Rule:
    """Decorate `coefficients` to run on each segment if `granularity` is `"tensor"`, else on the whole model."""

    @wraps(coefficients)
    def each(self: Any, gram: Gram, state: Any = None) -> tuple[Matrix, Any]:
        if self.granularity == "model":
            return coefficients(self, gram, state)
        return np.stack([coefficients(self, part, state)[0] for part in gram]), state

    return each  # type: ignore[return-value]  # of the same signature
