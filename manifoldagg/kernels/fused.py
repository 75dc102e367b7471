"""Linear combinations of vectors that one call of the kernels computes together.

For example, an optimizer step overwrites momenta and parameters, and both results depend on the old values. All
combinations of a call therefore read the old values, even if a result overwrites them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from manifoldagg.kernels.operands import Operand, Operands, address_ranges
from manifoldagg.kernels.tensor_list import Row, TensorList

__all__ = ["LinearCombination", "must_defer"]


@dataclass(frozen=True, eq=False)
class LinearCombination:
    """A deferred call of [`combine`][manifoldagg.kernels.combine]: a base row plus a weighted sum of rows.

    Attributes:
        base: the row to which the weighted sum is added, or `None` for zero.
        rows: the rows of the weighted sum.
        coefficients: a single list with one coefficient for each row, or one such list for each tensor of the rows.
        out: the row that receives the result. `gram_combine` expects newly allocated memory. `combine_many` expects a
            list of tensors (a `TensorList`). In one call, all combinations need tensors of the same lengths.
    """

    base: Operand | None
    rows: Operands
    coefficients: list[list[float]]
    out: Operand

    @staticmethod
    def of(
        base: Row | None,
        rows: Sequence[Row] | Operands,
        coefficients: Sequence[Sequence[float]],
        minus: Sequence[Row | None] | None,
        out: Operand,
    ) -> "LinearCombination":
        """Build a linear combination of vectors (rows), and omit the rows whose coefficients are 0.

        If `minus[i]` is not `None`, it is subtracted from row i. An `Operands` object contains rows together with the
        vectors to subtract. If `rows` is such an object, `minus` must be `None`.

        Raises:
            ArgumentError: if a row is not a valid row, or if lengths or devices differ.
        """
        if len(coefficients) == 1:
            # At least one row remains, because the operands determine sizes and devices.
            used = [j for j, c in enumerate(coefficients[0]) if c != 0] or [0]
        else:
            used = [j for j in range(len(coefficients[0])) if any(line[j] != 0 for line in coefficients)] or [0]
        if isinstance(rows, Operands):
            operands = rows.select(used)
        else:
            operands = Operands.of([rows[j] for j in used], minus and [minus[j] for j in used])
        numbers = [[float(line[j]) for j in used] for line in coefficients]
        # The base may be one of the rows. Using the same object tells the backend to read it once.
        start = next((row for row in operands.distinct if row is base), None)
        if start is None and base is not None:
            start = operands.as_operand("base", base)
        operands.as_operand("out", out)  # validates the target, and registers its lengths
        return LinearCombination(start, operands, numbers, out)

    @property
    def target(self) -> TensorList:
        """The target, which must be a tensor list if several combinations are computed in place."""
        assert isinstance(self.out, TensorList)
        return self.out

    @property
    def inputs(self) -> tuple[Operand, ...]:
        """The distinct rows that the combination reads."""
        return self.rows.distinct if self.base is None else (*self.rows.distinct, self.base)


def must_defer(combinations: Sequence[LinearCombination]) -> list[bool]:
    """Determine which results must not be written before all linear combinations are computed.

    The combinations are computed in the given order. A result must be deferred if it overwrites memory that a later
    combination reads. The function returns one boolean for each combination.
    """
    later: set[int] = set()
    deferred = []
    # Backwards, `later` contains all addresses that the following combinations read.
    for combination in reversed(combinations):
        # Start addresses are sufficient, because an operand is either identical to a target or disjoint from it.
        deferred.append(not later.isdisjoint(combination.target.addresses))
        for row in combination.inputs:
            later.update(
                address_ranges(row, combination.target.lengths)[0].tolist()
                if isinstance(row, Tensor)
                else row.addresses
            )
    return deferred[::-1]
