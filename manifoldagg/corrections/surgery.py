"""Corrections that remove conflicts between the updates of several clients.

`GradientSurgery` removes the component of an update along another update if their inner product is negative. `Pairwise`
removes the whole component of an update in the span of the other updates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from manifoldagg._validation import check_choice, check_finite, check_number, check_shape, short_repr
from manifoldagg.corrections.correction import Correction, by_granularity
from manifoldagg.corrections.frame import GRANULARITIES, Frame
from manifoldagg.corrections.gram import Gram, Matrix
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import check_tangent

__all__ = ["GradientSurgery", "Pairwise"]

RANK_TOLERANCE = 1e-7
"""The default rank tolerance: the fraction of a row's norm that must be outside the span of the other rows.

A row with a smaller fraction counts as linearly dependent.
"""


@dataclass(frozen=True)
class GradientSurgery(Correction):
    """Gradient surgery (PCGrad) between the updates of several clients and the drift of the server's model.

    Each displacement $v_i$ is the change of one client's model during training. The drift is the change of the server's
    model since the clients started. To correct $v_i$, the correction starts with $u = v_i$. It then visits the drift
    and the other displacements, one after another. If the inner product of $u$ and the visited vector $r$ is negative,
    the correction removes the component along $r$ from $u$. The vectors $r$ are always the original ones, even if they
    have been corrected already.

    For a single displacement, the correction equals OrthoDC with the threshold 0. Do not use it if the displacements
    belong to the control points of a single curve. The correction would then deform the curve.

    Args:
        order: the order in which the n + 1 rows are processed; the drift has index n. By default, the order of the
            rows.
        granularity: `"model"` or `"tensor"`.

    Raises:
        ArgumentError: if `order` is not a permutation. Also when the correction is applied, if `order` does not have
            n + 1 numbers.

    Source: Yu et al. 2020, Algorithm 1, which draws a random order.

    Example:
        >>> gram = Gram.of([[1.0, -1.0, 0.0], [-1.0, 4.0, 0.0], [0.0, 0.0, 0.0]])
        >>> GradientSurgery().coefficients(gram)[0].tolist()
        [[1, 0.25, 0], [1.0, 1, 0]]
    """

    order: tuple[int, ...] | None = None
    granularity: str = "model"

    def __post_init__(self) -> None:
        check_choice("granularity", self.granularity, GRANULARITIES)
        if self.order is not None and (
            not isinstance(self.order, tuple) or sorted(self.order) != list(range(len(self.order)))
        ):
            raise ArgumentError(
                f"order: expected a tuple with a permutation of 0, 1, ...; got {short_repr(self.order)}"
            )

    @by_granularity
    def coefficients(self, gram: Gram, state: Any = None) -> tuple[Matrix, Any]:
        inner = gram.matrix
        n = gram.num_displacements
        order = range(n + 1) if self.order is None else self.order
        if len(order) != n + 1:
            raise ArgumentError(f"order: expected a permutation of {n + 1} rows, including the drift, got {order}")
        matrix = gram.identity()
        for i, line in enumerate(matrix):
            for j in order:
                # A zero row, such as the drift of a fresh update, has no direction to project along.
                if j == i or inner[j, j] == 0:
                    continue
                # The inner product of the row j with the displacement as it is now, after the projections so far.
                along = line[: n + 1] @ inner[: n + 1, j]
                # The projection uses the original row j, not its corrected form, as in Algorithm 1 of the paper.
                if along < 0:
                    line[j] = line[j] - along / inner[j, j]
        return matrix, state


@dataclass(frozen=True, eq=False)
class Pairwise(Correction):
    r"""A correction that removes the component of a displacement in the span of the other clients' updates.

    For the most recent updates $o_1, \dots, o_m$ of the other clients, a displacement $v$ becomes

    $$\pi v = v - \sum_j x_j\, o_j, \qquad x = \operatorname{arg\,min}_x \left\| v - \sum_j x_j\, o_j \right\|$$

    The result is therefore orthogonal to all $o_j$. The coefficients $x_j$ come from a pivoted Cholesky factorisation
    of the Gram matrix in float64. The factorisation ignores an update $o_j$ that is linearly dependent. This is the
    case if its distance from the span of the updates already included is at most `tolerance` times its norm.

    Args:
        others: the updates: m vectors (P,), or tangents at the current point of a curved space.
        granularity: `"model"` or `"tensor"`.
        tolerance: the relative rank tolerance.

    Raises:
        ArgumentError: if `others` are not tensors or not finite, or if an option is out of range. Also when the
            correction is applied, if `others` have the wrong shape for the space.

    Source: OrthoFL §5.3, Lemma C.1.

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Flat
        >>> others = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [2.0, 1.0, 0.0]])
        >>> base, current = torch.zeros(3), torch.ones(3)
        >>> Pairwise(others)(Flat(3), base, current, torch.tensor([[3.0, 4.0, 5.0]]))
        tensor([[0., 0., 5.]])
    """

    others: Sequence[Float[Tensor, "..."]] | Float[Tensor, "..."]
    granularity: str = "model"
    tolerance: float = RANK_TOLERANCE

    def __post_init__(self) -> None:
        if not isinstance(self.others, Tensor):
            object.__setattr__(self, "others", tuple(self.others))
        check_choice("granularity", self.granularity, GRANULARITIES)
        check_number("tolerance", self.tolerance, above=0, at_most=1)
        if isinstance(self.others, Tensor) and self.others.ndim == 0:
            raise ArgumentError("others: expected a sequence of updates, got one number")
        for i, row in enumerate(self.others):
            if not isinstance(row, Tensor):
                raise ArgumentError(f"others[{i}]: expected a tensor, got {type(row).__name__}")
            check_finite(f"others[{i}]", check_shape(f"others[{i}]", row, *row.shape))

    def extend(self, frame: Frame, state: Any = None) -> Frame:
        passage = frame.transporter
        if passage is None:
            frame.require_flat("Pairwise, against updates that are vectors,")
        shape = (frame.size,) if passage is None else passage.current.shape
        for i, row in enumerate(self.others):
            name = f"others[{i}]"
            if passage is None:
                row = check_shape(name, row.flatten(), *shape)
            else:
                check_tangent(passage.space, passage.current, check_shape(name, row, *shape), name=name)
            frame = frame.with_row(name, row.flatten())
        return frame

    @by_granularity
    def coefficients(self, gram: Gram, state: Any = None) -> tuple[Matrix, Any]:
        matrix = gram.identity()
        others = [gram.row_index(f"others[{j}]") for j in range(len(self.others))]
        span = gram.matrix[others][:, others]
        for i, line in enumerate(matrix):
            along = gram.matrix[i, others]
            for j, x in zip(others, span_coefficients(span, along, tolerance=self.tolerance), strict=True):
                line[j] = -x
        return matrix, state


def span_coefficients(inner: Any, products: Any, *, tolerance: float = RANK_TOLERANCE) -> list[Any]:
    r"""Solve the least-squares problem $\min_x \|v - \sum_j x_j r_j\|$ for $x$ from inner products.

    The vector $v$ and the rows $r_j$ are given only by their inner products. The method is a root-free pivoted Cholesky
    factorisation $L D L^\top$ of the Gram matrix of the rows $r_j$:

    - The next pivot is the row with the largest component outside the span of the previous pivots, relative to its own
      norm. The scale of a row therefore has no effect.
    - If this relative component is at most `tolerance`, the row counts as linearly dependent and gets the coefficient
      0.
    - One step of iterative refinement recovers the digits that the factorisation lost. It has the effect of a
      re-orthogonalisation.
    - Symbolic numbers, which cannot be compared, are processed in the given order as independent rows.

    Args:
        inner: (m, m) inner products of the rows.
        products: m inner products with $v$.
        tolerance: the rank tolerance, relative to the norm of a row.

    Returns:
        m numbers.

    Example:
        >>> span_coefficients([[4.0, 0.0], [0.0, 1.0]], [2.0, 3.0])
        [0.5, 3.0]
    """
    m = len(products)
    zero = 0 * products[0] if m else 0
    left = [inner[i][i] for i in range(m)]
    pivots: list[int] = []
    columns: list[list[Any]] = []
    for _ in range(m):
        # The remainder of a dependent row is a difference of nearly equal squares. Rounding leaves about ε times the
        # square, which is √ε times the norm. The tolerance must therefore be larger than √ε.
        new = [j for j in range(m) if j not in pivots and not _at_most(left[j], tolerance**2 * inner[j][j])]
        if not new:
            break
        p = new[0]
        for j in new[1:]:
            # Compare left[j] / inner[j][j], the fraction outside the span, without a division.
            if not _at_most(left[j] * inner[p][p], left[p] * inner[j][j]):
                p = j
        before = list(zip(pivots, columns, strict=True))
        # L D Lᵀ needs no square root of a pivot, which rounding may have made negative.
        column = [(inner[i][p] - sum(left[q] * c[i] * c[p] for q, c in before)) / left[p] for i in range(m)]
        for j in new:
            if j != p:
                left[j] = left[j] - column[j] * column[j] * left[p]
        pivots.append(p)
        columns.append(column)

    def solve(right: Any) -> list[Any]:
        x = [zero for _ in range(m)]
        y: list[Any] = []
        # The forward substitution processes the pivots in the order of their elimination.
        for p in pivots:
            y.append(right[p] - sum(c[p] * z for c, z in zip(columns, y, strict=False)))
        # The backward substitution. Dependent rows were no pivots, so their coefficients stay 0.
        for k in reversed(range(len(pivots))):
            p = pivots[k]
            x[p] = y[k] / left[p] - sum(columns[k][q] * x[q] for q in pivots[k + 1 :])
        return x

    x = solve(products)
    # The Gram matrix squares the condition number of the rows. One step of refinement recovers the digits that the
    # factorisation lost.
    residual = [b - sum(inner[i][j] * x[j] for j in range(m)) for i, b in enumerate(products)]
    return [a + b for a, b in zip(x, solve(residual), strict=True)]


def _at_most(a: Any, b: Any) -> bool:
    """Return whether a ≤ b. The result is `False` for symbolic numbers that cannot be compared."""
    try:
        return bool(a <= b)
    except TypeError:
        return False
