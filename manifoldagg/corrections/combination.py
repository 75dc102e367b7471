"""Linear combinations of vectors that the server computes only after it has checked an update.

The vectors are the changes of a client's model during training, and the change of the server's model in that time. An
aggregation rule returns the new model of the server as such a combination.
"""

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
    r"""A linear combination $\sum_j c_j\, r_j$ that the server computes only after it has checked an update.

    The vectors $r_j$ are the rows of a `Frame`: the changes of the client's model during training (its displacements),
    and the change of the server's model in that time (the drift). An aggregation rule returns its new model in this
    form, and also vectors of its new state, such as a momentum. If the server rejects the update, it does not compute
    them. The model and the state then stay unchanged.

    Attributes:
        frame: the frame that contains the rows.
        coefficients: $c$, (k,) for k rows, or (S, k) with one row of coefficients for each of S segments.
        from_current: whether the current model is added to the combination.
    """

    frame: FrameRows
    coefficients: Matrix
    from_current: bool

    def compute(self, out: Row | None = None) -> Any:
        """Compute the combination and round each entry once.

        Args:
            out: the row to which the result is written. By default, a new row is allocated.

        Returns:
            `out`, or the new row. A new model has the form of the current model, and a sum is a vector (P,).
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
        """Allocate the row that `compute` or `fused` writes."""
        current = self.frame.current
        if isinstance(current, Tensor):
            # The new model has the dtype of the current model. A sum has the dtype of the rows.
            like: Any = current if self.from_current else self.frame.rows[0]
            return empty_like(like)
        if not self.from_current:
            return self.frame.empty_vector()
        return (current if isinstance(current, TensorList) else TensorList(current)).new_empty()

    def fused(self, out: Operand) -> LinearCombination:
        """Return a `LinearCombination`, with which a kernel later computes this combination and writes it to `out`.

        The function `combine_many` computes several such objects in one pass over their vectors.
        """
        if not self.from_current:
            return self.frame.combination(None, self.coefficients, out)
        line = -self.coefficients if self.frame.is_pseudo_gradient else self.coefficients
        return self.frame.combination(self.frame.current, line, out)

    def check_finite(self, dtypes: Sequence[torch.dtype] | None = None, computed: Row | None = None) -> None:
        """Check that all entries of this linear combination are finite.

        If `dtypes` is given, the method first computes an upper bound on the entries from the norms of the combined
        vectors. If the bound shows that no entry overflows in any of these dtypes, the check is complete. Otherwise,
        the method computes the linear combination and checks every entry.

        Args:
            dtypes: the dtype of each tensor of a sum. Omit it for a new model, which has the dtypes of the current
                model.
            computed: the result of `compute`, if it has been computed already. Otherwise, the method computes the
                entries when it needs them, one tensor at a time in temporary memory.

        Raises:
            ArgumentError: if an entry is not finite.
        """
        if dtypes is not None:
            # The factor 1/2 allows for the rounding errors of the bound and of the sum.
            largest = min([torch.finfo(dtype).max for dtype in set(dtypes)])
            if self.frame.norm_bound(self.coefficients) <= largest / 2:
                return
        # The bound was too large to exclude an overflow, so the entries themselves are checked.
        for part in self._compute_parts(dtypes) if computed is None else tensors_of(computed):
            if not is_finite(part):
                what = f"new model would not be finite in {part.dtype}" if self.from_current else STATE_NOT_FINITE
                raise ArgumentError(f"points: the {what}")

    def _compute_parts(self, dtypes: Sequence[torch.dtype] | None) -> Iterator[Tensor]:
        # One tensor at a time needs temporary memory for the largest tensor only, instead of the whole model.
        """Yield the result tensor by tensor. `dtypes` are the dtypes of the tensors of a sum."""
        for j, (frame, line) in enumerate(self.frame.split_by_tensor(self.coefficients)):
            out = None if dtypes is None else frame.empty_vector(dtypes[j])
            yield Combination(frame, line, self.from_current).compute(out)


def tensors_of(row: Row) -> tuple[Tensor, ...]:
    """Return the tensors of a row as a tuple. A vector is a single tensor."""
    return row if isinstance(row, tuple) else (row,)
