"""Fused linear combinations: several outputs that are computed from the operands as they were before any write."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from manifoldagg.kernels.operands import Operand, Operands, address_ranges
from manifoldagg.kernels.tensor_list import Row, TensorList

__all__ = ["LinearCombination", "must_defer"]


@dataclass(frozen=True, eq=False)
class LinearCombination:
    r"""A row plus a linear combination of rows, and its target; see [`combine`][manifoldagg.kernels.combine].

    Attributes:
        base: a row, or `None` for zero.
        rows: those that are read.
        coefficients: of these rows, one line for all tensors or one for each.
        out: the target; several are computed at once only into tensor lists of the same lengths, or into new memory.
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
        """Build a combination without the rows whose coefficients are 0; `minus` is `None` for operands.

        Raises:
            ArgumentError: if a row is not a row, or lengths or devices differ.
        """
        if len(coefficients) == 1:
            used = [j for j, c in enumerate(coefficients[0]) if c != 0] or [0]
        else:
            used = [j for j in range(len(coefficients[0])) if any(line[j] != 0 for line in coefficients)] or [0]
        if isinstance(rows, Operands):
            lines = rows.select(used)
        else:
            lines = Operands.of([rows[j] for j in used], minus and [minus[j] for j in used])
        numbers = [[float(line[j]) for j in used] for line in coefficients]
        start = next((row for row in lines.distinct if row is base), None)
        if start is None and base is not None:
            start = lines.as_operand("base", base)
        lines.as_operand("out", out)  # of which vectors are seen as such pieces
        return LinearCombination(start, lines, numbers, out)

    @property
    def target(self) -> TensorList:
        """The target as a tensor list, which it is if several combinations are computed in place."""
        assert isinstance(self.out, TensorList)
        return self.out

    @property
    def inputs(self) -> tuple[Operand, ...]:
        """The rows that are read."""
        return self.rows.distinct if self.base is None else (*self.rows.distinct, self.base)


def must_defer(combinations: Sequence[LinearCombination]) -> list[bool]:
    """Return for each combination whether a later one reads its target."""
    later: set[int] = set()
    found = []
    for goal in reversed(combinations):
        found.append(not later.isdisjoint(goal.target.addresses))
        for row in goal.inputs:
            later.update(
                address_ranges(row, goal.target.lengths)[0].tolist() if isinstance(row, Tensor) else row.addresses
            )
    return found[::-1]
