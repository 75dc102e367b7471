"""What a correction is: a small matrix, computed from a Gram matrix, that takes a stale update to the present."""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from manifoldagg.corrections.algebra import congruence, identity, product, top_left, total
from manifoldagg.corrections.frame import CANCELLED, Frame, Matrix, require_flat
from manifoldagg.corrections.place import RUNGS
from manifoldagg.errors import ArgumentError, check_finite
from manifoldagg.kernels.rows import is_transformed
from manifoldagg.manifolds import Manifold

__all__ = ["Composition", "Corrected", "Correction", "identity", "require_flat"]

Lines = list[list[list[Any]]]


@dataclass(frozen=True, eq=False)
class Corrected:
    r"""What a correction made of a frame.

    Attributes:
        frame: with the rows that the correction added.
        lines: $C$ for each segment, or one for all: (S, n, k).
        state: the next one, of a correction that keeps one.
    """

    frame: Frame
    lines: Lines
    state: Any

    def displacements(self) -> Float[Tensor, "n P"]:
        r"""The corrected rows, tangent at $\Theta^\tau$, each rounded once to the dtype of the frame's rows."""
        rows = []
        for i in range(len(self.lines[0])):
            line = [lines[i] for lines in self.lines]
            if any(isinstance(c, Tensor) for piece in line for c in piece):
                zero = self.frame.rows[0].new_zeros((), dtype=torch.float64)
                weights = torch.stack([torch.stack([zero + c for c in piece]) for piece in line])
                rows.append(self.frame.combine(None, weights if len(line) > 1 else weights[0]))
            else:
                row = self.frame.combine(None, line if len(line) > 1 else line[0])
                rows.append(row if is_transformed([row]) else check_finite("corrected displacements", row))
        return torch.stack(rows) if rows else self.frame.rows[0].new_empty(0, *self.frame.rows[0].shape)


class Correction(abc.ABC):
    r"""A map $\pi(\Theta^t, \Theta^\tau, v)$ from displacements at the base to tangents at the current model.

    It acts on each control point by itself, so that a curve keeps its start at $\Theta^\tau$. What it needs besides
    $v$ and $g$ it adds to the frame as rows; what it remembers it returns as the next state.
    """

    granularity: str = "model"
    keeps_state: ClassVar[bool] = False

    def derives(self, frame: Frame | None = None) -> bool:
        """Whether it makes rows of the displacements (on such a frame)."""
        return False

    def added(self, displacements: int) -> int:
        """How many rows it adds to a frame of so many displacements."""
        return 0

    def extend(self, frame: Frame, state: Any = None) -> Frame:
        """`frame` with the rows that it adds."""
        return frame

    @abc.abstractmethod
    def coefficients(
        self, gram: Matrix, state: Any = None, *, displacements: int | None = None
    ) -> tuple[list[list[Any]], Any]:
        r"""$C$ such that corrected row i is $\sum_j C_{ij} r_j$, and the next state.

        Args:
            gram: the (k, k) inner products of $v_1, \dots, v_n, g$ and the correction's own rows: floats, torch
                numbers or sympy expressions, indexed `gram[i][j]`.
            state: of a correction that keeps one; `None` at first.
            displacements: n; where not given, all rows but the drift and those that the correction adds.

        Returns:
            (n, k) numbers of the same kind, and the state.
        """

    def remember(self, frame: Frame, lines: Lines, state: Any) -> Any:
        """The state with its tensors brought up to date, given what was made of the frame."""
        return state

    def segmented(self, grams: Sequence[Matrix], state: Any, displacements: int) -> tuple[Lines, Any]:
        """The coefficients for each segment; a correction of the whole model sums the Gram matrices first."""
        if self.granularity == "tensor":
            return [self.coefficients(gram, state, displacements=displacements)[0] for gram in grams], state
        lines, state = self.coefficients(total(grams), state, displacements=displacements)
        return [lines for _ in grams], state

    def apply(self, frame: Frame, state: Any = None) -> Corrected:
        """Correct the displacements of a frame.

        Args:
            frame: of displacements and the drift.
            state: what the last call returned, of a correction that keeps one. It is not changed.

        Raises:
            ArgumentError: if inner products overflow float64, or the correction cannot work on such a frame.

        Cost: one pass that reads the rows (beside those that the correction makes); `displacements` is another.
        """
        extended, numbers = self._read(frame, state)
        lines, state = self.segmented(numbers, state, frame.displacements)
        return Corrected(extended, lines, self.remember(extended, lines, state))

    def loses(self, grams: Sequence[Matrix], displacements: int) -> bool:
        """Whether inner products of what is corrected first are rounding, so that nothing can be decided from them."""
        return False

    def _read(self, frame: Frame, state: Any) -> tuple[Frame, list[Any]]:
        """The frame with this correction's rows, and its Gram matrices: floats, or torch numbers where followed."""
        if frame.extra:
            raise ArgumentError(f"frame: expected displacements and the drift alone, got also {', '.join(frame.extra)}")
        extended = self.extend(frame, state)
        inner = extended.gram(self.granularity)
        check_finite("displacements and drift: inner products", inner.detach())
        grams = inner if self.granularity == "tensor" else inner[None]
        return extended, list(grams) if is_transformed([inner]) else grams.tolist()

    def __call__(
        self,
        space: Manifold,
        base: Float[Tensor, "..."],
        current: Float[Tensor, "..."],
        displacements: Float[Tensor, "..."],
        *,
        transport: str | None = None,
        rungs: int = RUNGS,
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

    def __rshift__(self, after: "Correction") -> "Correction":
        """`a >> b`: first `a`, then `b` on what `a` made of the rows."""
        if not isinstance(after, Correction):
            return NotImplemented
        return Composition(self, after)

    def _displacements(self, gram: Matrix, given: int | None) -> int:
        """n, from the size of a Gram matrix."""
        for n in range(len(gram)) if given is None else [given]:
            if len(gram) >= n + 1 and (given is not None or n + 1 + self.added(n) == len(gram)):
                return n
        raise ArgumentError(f"gram: a {len(gram)} x {len(gram)} matrix does not fit the rows of {self}")


@dataclass(frozen=True)
class Composition(Correction):
    r"""One correction after another: $C = C_b(\bar C_a G \bar C_a^\top)\, \bar C_a$; $\bar C_a$ keeps the drift.

    Where `after` makes rows of the displacements, one of the two keeps a state, or `before` leaves so little of a
    displacement that $\bar C_a G \bar C_a^\top$ is rounding, what `before` made of them is formed in between, which
    takes another pass.
    """

    before: Correction
    after: Correction

    @property
    def granularity(self) -> str:  # type: ignore[override]  # of its parts
        """Finer where one of the two is."""
        return "tensor" if "tensor" in (self.before.granularity, self.after.granularity) else "model"

    @property
    def keeps_state(self) -> bool:  # type: ignore[override]  # as above
        """Whether one of the two does."""
        return self.before.keeps_state or self.after.keeps_state

    def derives(self, frame: Frame | None = None) -> bool:
        return self.before.derives(frame) or self.after.derives(frame)

    def staged(self, frame: Frame) -> bool:
        """Whether what `before` makes has to be formed."""
        return (
            self.keeps_state
            or self.after.derives(frame)
            or (isinstance(self.before, Composition) and self.before.staged(frame))
            or (frame.place is not None and self.before.derives(frame))
        )

    def added(self, displacements: int) -> int:
        return self.before.added(displacements) + self.after.added(displacements)

    def extend(self, frame: Frame, state: Any = None) -> Frame:
        first, second = state or (None, None)
        return self.after.extend(self.before.extend(frame, first), second)

    def coefficients(
        self, gram: Matrix, state: Any = None, *, displacements: int | None = None
    ) -> tuple[list[list[Any]], Any]:
        lines, state = self.segmented([gram], state, self._displacements(gram, displacements))
        return lines[0], state

    def segmented(self, grams: Sequence[Matrix], state: Any, displacements: int) -> tuple[Lines, Any]:
        if self.after.derives():
            raise ArgumentError(f"{self.after} makes rows of what {self.before} returns: use apply, not coefficients")
        first, second = state or (None, None)
        n, size = displacements, len(grams[0])
        inner = n + 1 + self.before.added(n)
        lines, first = self.before.segmented([top_left(gram, inner) for gram in grams], first, n)
        rest = [identity(size, size)[n], *identity(size, size)[inner:]]
        carried = [[*([*row, *(0 for _ in range(size - inner))] for row in line), *rest] for line in lines]
        moved = [congruence(c, gram) for c, gram in zip(carried, grams, strict=True)]
        outer, second = self.after.segmented(moved, second, n)
        state = None if first is None and second is None else (first, second)
        return [product(a, b) for a, b in zip(outer, carried, strict=True)], state

    def loses(self, grams: Sequence[Matrix], displacements: int) -> bool:
        n, size = displacements, displacements + 1 + self.before.added(displacements)
        inner = [top_left(gram, size) for gram in grams]
        for lines, gram in zip(self.before.segmented(inner, None, n)[0], inner, strict=True):
            moved = congruence(lines, gram)
            if any(bool(moved[i][i] < CANCELLED * gram[i][i]) for i in range(n)):
                return True
        return self.before.loses(inner, n)

    def apply(self, frame: Frame, state: Any = None) -> Corrected:
        if not self.staged(frame):
            extended, numbers = self._read(frame, state)
            if not self.loses(numbers, frame.displacements):
                return Corrected(extended, self.segmented(numbers, state, frame.displacements)[0], None)
        first, second = state or (None, None)
        middle = self.before.apply(frame, first)
        end = self.after.apply(frame.moved(middle.displacements()), second)
        return Corrected(end.frame, end.lines, (middle.state, end.state) if self.keeps_state else None)
