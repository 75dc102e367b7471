"""A frame: the displacements of an update and the drift, as tangent vectors at the current model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from manifoldagg.kernels import combine, gram

CANCELLED = 1e-6
"""Which part of a squared norm is left where a correction is said to have cancelled it."""

Matrix = Sequence[Sequence[Any]] | Tensor


@dataclass(frozen=True)
class Frame:
    r"""Rows $v_1, \dots, v_n, g$: displacements from the base $\Theta^t$, and the drift $g = \Theta^\tau - \Theta^t$.

    The rows are differences of stored tensors and are never formed.
    """

    rows: tuple[Tensor, ...]
    minus: tuple[Tensor | None, ...]

    @staticmethod
    def of_points(points: Float[Tensor, "n P"], base: Float[Tensor, " P"], current: Float[Tensor, " P"]) -> "Frame":
        """The frame of control points: $v_i$ = `points[i]` - `base`."""
        return Frame((*points, current), (base,) * (len(points) + 1))

    @staticmethod
    def of_displacements(
        displacements: Float[Tensor, "n P"], base: Float[Tensor, " P"], current: Float[Tensor, " P"]
    ) -> "Frame":
        """The frame of displacements that are at hand as such."""
        return Frame((*displacements, current), (*(None for _ in displacements), base))

    def gram(self) -> Float64[Tensor, "k k"]:
        """Inner products of the rows, the drift last."""
        return gram(self.rows, minus=self.minus)[0]

    def combine(self, base: Tensor | None, coefficients: Sequence[float] | Tensor, out: Tensor | None = None) -> Tensor:
        r"""$\mathrm{base} + \sum_j c_j\, r_j$, rounded once.

        Where the coefficients on rows from $\Theta^t$ sum to 0, $\Theta^t$ drops out: its place is taken by
        $\Theta^\tau$, so that the position reading is the difference $\varphi_i - \Theta^\tau$ to the last digit.
        """
        *head, drift = coefficients
        if self.minus[0] is not None and not isinstance(coefficients, Tensor) and sum(head) + drift == 0:
            return combine(base, self.rows[:-1], head, minus=self.rows[-1], out=out)
        return combine(base, self.rows, coefficients, minus=self.minus, out=out)

    def corrected_gram(self, lines: Matrix, inner: list[list[float]]) -> list[list[float]]:
        r"""$C G C^\top$ for `lines` $C$ and this frame's own Gram matrix `inner`, in floats.

        A corrected row that is a thousandth of its displacement or less has lost digits in $C G C^\top$, which is
        exact to $\varepsilon\,G_{ii}$ only. Then the corrected rows are formed in float64 and read again.
        """
        corrected = congruence(lines, inner)
        if all(corrected[i][i] >= CANCELLED * inner[i][i] for i in range(len(lines))):
            return corrected
        rows = [self.combine(None, line, out=torch.empty_like(self.rows[0], dtype=torch.float64)) for line in lines]
        fresh: list[list[float]] = gram(rows)[0].tolist()
        return fresh


def product(a: Matrix, b: Matrix) -> list[list[Any]]:
    """The matrix product on floats, torch numbers or sympy expressions alike.

    Example:
        >>> product([[1, 2]], [[3], [4]])
        [[11]]
    """
    return [[sum((x * b[k][j] for k, x in enumerate(row)), start=0 * row[0]) for j in range(len(b[0]))] for row in a]


def congruence(c: Matrix, inner: Matrix) -> list[list[Any]]:
    r"""$C G C^\top$: the Gram matrix of the rows $C r$.

    Example:
        >>> congruence([[1, -1]], [[2, 1], [1, 5]])
        [[5]]
    """
    return product(product(c, inner), list(zip(*c, strict=True)))
