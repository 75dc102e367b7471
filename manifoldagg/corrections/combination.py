"""Deferred linear combinations, which a server computes only after all checks of a step have passed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manifoldagg._validation import is_finite
from manifoldagg.corrections.gram import Matrix
from manifoldagg.corrections.rows import FrameRows
from manifoldagg.errors import ArgumentError
from manifoldagg.kernels import Row, TensorList
from manifoldagg.kernels.alloc import empty_like
from manifoldagg.kernels.fused import LinearCombination
from manifoldagg.kernels.operands import Operand

__all__ = ["STATE_NOT_FINITE", "Combination"]

STATE_NOT_FINITE = "rule's state would not be finite"
"""The text of the error if an entry of a rule's state overflows."""


@dataclass(frozen=True, eq=False)
class Combination:
    r"""A deferred linear combination $\sum_j c_j\, r_j$ of the rows $r_j$ of a frame.

    A rule returns its new model and the sums in its state in this form. The server computes them after all checks have
    passed, so a rejected update does not write to memory.

    Attributes:
        frame: the frame of the rows.
        coefficients: $c$, (k,) or (S, k) with one row for each segment.
        from_current: whether the combination is added to the current model, or is a vector of its own.
    """

    frame: FrameRows
    coefficients: Matrix
    from_current: bool

    def compute(self, out: Row | None = None) -> Any:
        """Compute the combination, rounded once. If `out` is given, the result is written there.

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
        current = self.frame.current
        if isinstance(current, Tensor):
            like: Any = current if self.from_current else self.frame.rows[0]
            return empty_like(like)
        if not self.from_current:
            return self.frame.empty_vector()
        return (current if isinstance(current, TensorList) else TensorList(current)).new_empty()

    def fused(self, out: Operand) -> LinearCombination:
        """Return the combination in the form that `combine_many` computes together with other combinations."""
        if not self.from_current:
            return self.frame.combination(None, self.coefficients, out)
        line = -self.coefficients if self.frame.is_pseudo_gradient else self.coefficients
        return self.frame.combination(self.frame.current, line, out)

    def check_finite(self, dtypes: Sequence[torch.dtype] | None = None, computed: Row | None = None) -> None:
        """Check that all entries of the result are finite.

        The check first uses the norms of the rows. If these do not suffice and `computed` is not given, the method
        computes the result tensor by tensor in temporary memory.

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
        for part in self._compute_parts(dtypes) if computed is None else tensors_of(computed):
            if not is_finite(part):
                what = f"new model would not be finite in {part.dtype}" if self.from_current else STATE_NOT_FINITE
                raise ArgumentError(f"points: the {what}")

    def _compute_parts(self, dtypes: Sequence[torch.dtype] | None) -> Iterator[Tensor]:
        for j, (frame, line) in enumerate(self.frame.split_by_tensor(self.coefficients)):
            out = None if dtypes is None else frame.empty_vector(dtypes[j])
            yield Combination(frame, line, self.from_current).compute(out)


def tensors_of(row: Row) -> tuple[Tensor, ...]:
    """Return the tensors of a row."""
    return row if isinstance(row, tuple) else (row,)
