"""Matrices of a few numbers, on floats, torch numbers and sympy expressions alike."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

Matrix = Sequence[Sequence[Any]] | Tensor

RANK = 1e-7
"""The part of a row's length that must be new for it to count as a direction of its own."""


def identity(rows: int, columns: int) -> list[list[Any]]:
    """Ones on the diagonal, zeros elsewhere.

    Example:
        >>> identity(1, 3)
        [[1, 0, 0]]
    """
    return [[int(i == j) for j in range(columns)] for i in range(rows)]


def product(a: Matrix, b: Matrix) -> list[list[Any]]:
    """The matrix product.

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


def total(matrices: Sequence[Matrix]) -> Matrix:
    """The sum of matrices of one shape."""
    first, *others = matrices
    if not others:
        return first
    return [[sum((m[i][j] for m in others), start=x) for j, x in enumerate(row)] for i, row in enumerate(first)]


def untracked(value: Any) -> Any:
    """A number without the derivatives that follow it."""
    return value.detach() if isinstance(value, Tensor) else value


def top_left(matrix: Matrix, size: int) -> list[list[Any]]:
    """The first `size` rows and columns."""
    return [[matrix[i][j] for j in range(size)] for i in range(size)]


def span_coefficients(inner: Matrix, along: Sequence[Any], *, tolerance: float = RANK) -> list[Any]:
    r"""The $x$ that solves $\min_x \|v - \sum_j x_j r_j\|$, from $\langle r_i, r_j\rangle$ and $\langle v, r_j\rangle$.

    A root-free pivoted Cholesky factorisation $L D L^\top$ of the Gram matrix: the next pivot is the row with the
    largest part outside the span of those before it, relative to its own length, so that the units of a row do not
    matter. What is left of a row below `tolerance` is rounding and gets coefficient 0. The solution is refined once by
    its residual, which is one re-orthogonalisation. Numbers that cannot be compared (symbols) are taken in the given
    order, as independent.

    Args:
        inner: (m, m) inner products of the rows.
        along: m inner products with $v$.
        tolerance: of the rank, relative to the length of a row.

    Returns:
        m numbers.

    Example:
        >>> span_coefficients([[4.0, 0.0], [0.0, 1.0]], [2.0, 3.0])
        [0.5, 3.0]
    """
    m, zero = len(along), 0 * along[0] if len(along) else 0
    left = [inner[i][i] for i in range(m)]
    pivots, columns = list[int](), list[list[Any]]()
    for _ in range(m):
        new = [j for j in range(m) if j not in pivots and not _at_most(left[j], tolerance**2 * inner[j][j])]
        if not new:
            break
        p = new[0]
        for j in new[1:]:
            if not _at_most(left[j] * inner[p][p], left[p] * inner[j][j]):
                p = j
        before = list(zip(pivots, columns, strict=True))
        column = [(inner[i][p] - sum(left[q] * c[i] * c[p] for q, c in before)) / left[p] for i in range(m)]
        for j in new:
            if j != p:
                left[j] = left[j] - column[j] * column[j] * left[p]
        pivots.append(p)
        columns.append(column)

    def solve(right: Sequence[Any]) -> list[Any]:
        x, y = [zero for _ in range(m)], list[Any]()
        for p in pivots:
            y.append(right[p] - sum(c[p] * z for c, z in zip(columns, y, strict=False)))
        for k in reversed(range(len(pivots))):
            p, later = pivots[k], pivots[k + 1 :]
            x[p] = y[k] / left[p] - sum(columns[k][q] * x[q] for q in later)
        return x

    x = solve(along)
    residual = [b - sum(inner[i][j] * x[j] for j in range(m)) for i, b in enumerate(along)]
    return [a + b for a, b in zip(x, solve(residual), strict=True)]


def _at_most(a: Any, b: Any) -> bool:
    """Whether a ≤ b; not, where this cannot be decided."""
    try:
        return bool(a <= b)
    except TypeError:
        return False
