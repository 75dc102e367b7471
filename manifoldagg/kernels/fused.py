"""Goals: combinations of rows of tensors that are formed together, of what was there before any of them was written."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from manifoldagg.kernels.operands import Line, Rows, places
from manifoldagg.kernels.tensor_list import Row, Tensors

__all__ = ["Goal", "apart"]


@dataclass(frozen=True, eq=False)
class Goal:
    r"""A row plus a linear combination of rows, and where it goes: what [`combine`][manifoldagg.kernels.combine] makes.

    Attributes:
        base: a row, or `None` for zero.
        rows: those that are read.
        coefficients: of these rows, one line for all tensors or one for each.
        out: where it goes.
    """

    base: Line | None
    rows: Rows
    coefficients: list[list[float]]
    out: Tensors

    @staticmethod
    def of(
        base: Row | None,
        rows: Sequence[Row],
        coefficients: Sequence[Sequence[float]],
        minus: Sequence[Row | None],
        out: Tensors,
    ) -> "Goal":
        """Leaves out the rows whose coefficients are 0.

        Raises:
            ArgumentError: if a row is no row, or lengths or devices differ.
        """
        used = [j for j in range(len(rows)) if any(line[j] != 0 for line in coefficients)] or [0]
        lines = Rows.of([rows[j] for j in used], [minus[j] for j in used])
        numbers = [[float(line[j]) for j in used] for line in coefficients]
        start = None if base is None else lines.line("base", base)
        lines.line("out", out)  # of which vectors are seen as such pieces
        return Goal(start, lines, numbers, out)

    @property
    def read(self) -> tuple[Line, ...]:
        """The rows that are read."""
        return self.rows.distinct if self.base is None else (*self.rows.distinct, self.base)


def apart(goals: Sequence[Goal]) -> list[bool]:
    """Of each goal whether a later one reads what is where it goes."""
    later: set[int] = set()
    found = []
    for goal in reversed(goals):
        found.append(not later.isdisjoint(goal.out.addresses))
        for row in goal.read:
            later.update(places(row, goal.out.lengths)[0].tolist() if isinstance(row, Tensor) else row.addresses)
    return found[::-1]
