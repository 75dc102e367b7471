"""Corrections against several other updates: sequential surgery, and the complement of a span."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from manifoldagg.corrections.algebra import RANK, identity, span_coefficients
from manifoldagg.corrections.correction import Correction
from manifoldagg.corrections.frame import GRANULARITIES, Frame, Matrix
from manifoldagg.errors import ArgumentError, check_choice, check_finite, check_number, check_shape
from manifoldagg.manifolds import check_tangent


@dataclass(frozen=True)
class GradientSurgery(Correction):
    r"""Sequential PCGrad over several updates and the drift.

    Row i starts as $u = v_i$. For each other row $r$ (the displacements, then the drift, as they came in) with
    $\langle u, r\rangle < 0$, $u$ loses its component along $r$. Here the displacements are updates of
    several clients, not the control points of one curve, which this would bend by one another. For one of them it is
    OrthoDC at $\vartheta = 0$.

    Args:
        order: in which the n + 1 rows are gone through; the drift is number n. `None`: as they are.
        granularity: `"model"` or `"tensor"`.

    Raises:
        ArgumentError: if `order` is no permutation (of n + 1 numbers, when it is used).

    Source: Yu et al. 2020, Algorithm 1, which draws the order.

    Example:
        >>> GradientSurgery().coefficients([[1.0, -1.0, 0.0], [-1.0, 4.0, 0.0], [0.0, 0.0, 0.0]])[0]
        [[1, 0.25, 0], [1.0, 1, 0]]
    """

    order: tuple[int, ...] | None = None
    granularity: str = "model"

    def __post_init__(self) -> None:
        check_choice("granularity", self.granularity, GRANULARITIES)
        if self.order is not None and (
            not isinstance(self.order, tuple) or sorted(self.order) != list(range(len(self.order)))
        ):
            raise ArgumentError(f"order: expected a tuple with a permutation of 0, 1, ...; got {self.order!r}")

    def coefficients(
        self, gram: Matrix, state: Any = None, *, displacements: int | None = None
    ) -> tuple[list[list[Any]], Any]:
        n = self._displacements(gram, displacements)
        order = range(n + 1) if self.order is None else self.order
        if len(order) != n + 1:
            raise ArgumentError(f"order: expected a permutation of {n + 1} rows, the drift among them; got {order}")
        lines = identity(n, len(gram))
        for i, line in enumerate(lines):
            for j in order:
                if j == i or gram[j][j] == 0:
                    continue
                along = sum(line[k] * gram[k][j] for k in range(n + 1))
                if along < 0:
                    line[j] = line[j] - along / gram[j][j]
        return lines, state


@dataclass(frozen=True, eq=False)
class Pairwise(Correction):
    r"""What of a displacement lies outside the span of the other clients' most recent updates.

    $$\pi v = v - \sum_j x_j\, o_j, \qquad x = \operatorname{arg\,min}_x \left\| v - \sum_j x_j\, o_j \right\|$$

    by a pivoted Cholesky factorisation of the float64 Gram matrix, with one re-orthogonalisation. An update that adds
    less than `tolerance` of its length to the span of others is taken to lie in it.

    Args:
        others: the updates, m vectors (P,), or tangents at the current point of a curved space.
        granularity: `"model"` or `"tensor"`.
        tolerance: of the rank.

    Raises:
        ArgumentError: if `others` are no tensors or not finite, or an option is out of range; when applied, if they
            do not fit the space.

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
    tolerance: float = RANK

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

    def added(self, displacements: int) -> int:
        return len(self.others)

    def extend(self, frame: Frame, state: Any = None) -> Frame:
        shape = frame.rows[-1].shape if frame.place is None else frame.place.current.shape
        for i, row in enumerate(self.others):
            name = f"others[{i}]"
            if frame.place is None:
                row = row.flatten()
            check_shape(name, row, *shape)
            if frame.place is not None:
                check_tangent(frame.place.space, frame.place.current, row, name=name)
            frame = frame.extended(name, row.flatten())
        return frame

    def coefficients(
        self, gram: Matrix, state: Any = None, *, displacements: int | None = None
    ) -> tuple[list[list[Any]], Any]:
        n = self._displacements(gram, displacements)
        first, k = n + 1, len(gram)
        lines = identity(n, k)
        inner = [[gram[i][j] for j in range(first, k)] for i in range(first, k)]
        for i, line in enumerate(lines):
            along = [gram[i][j] for j in range(first, k)]
            for j, x in enumerate(span_coefficients(inner, along, tolerance=self.tolerance)):
                line[first + j] = -x
        return lines, state
