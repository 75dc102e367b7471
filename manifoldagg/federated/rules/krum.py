"""Krum: the displacements of a buffer that have the nearest neighbours."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from manifoldagg._validation import check_count
from manifoldagg.corrections import Corrected, Frame, Gram
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.rules._base import move_to
from manifoldagg.federated.rules._geometry import safe_sqrt
from manifoldagg.federated.rules._update_buffer import StoredBufferRule
from manifoldagg.federated.schedules import Rate, Weight
from manifoldagg.federated.staleness import Polynomial
from manifoldagg.federated.types import Update
from manifoldagg.manifolds import Manifold

__all__ = ["Krum"]


@dataclass(frozen=True)
class Krum(StoredBufferRule):
    r"""Rule that averages the displacements of a buffer that have the nearest neighbours.

    $\Theta \leftarrow \Theta + \dfrac{\eta_g}{m} \sum_{i \in M} x_i$ after every K updates.

    $x_i = s(\tau - t_i)\, \Delta_i$. M are the m of smallest score, of equal ones those that came first:

    $$\sum_{j \in N_i} \|x_i - x_j\|^2, \qquad N_i \text{ the } K - f - 2 \text{ nearest of the others}.$$

    $m = 1$ is Krum, more are Multi-Krum. On a curved space the $\Delta_i$ are transported to the model, and distances
    are those of its tangents; where leaves are of low rank they are matrices. `transport` and `rungs` are those of
    [`AsyncCorrected`][manifoldagg.federated.rules.AsyncCorrected].

    Breakdown point: whatever f of them are, the squared distances of a chosen one to some $K - 2f - 2$ of the others
    sum to no more than the smallest score that these have among themselves. More than K / 2 that agree lead the model
    anywhere. What is near in all entries together may be far in a few: where models are
    long, and honest displacements far apart, there is room for much between them.

    Args:
        size: K > 2f + 2.
        num_byzantine: f.
        num_selected: m, at most K - f - 2.
        rate: $\eta_g$: a number, or a function of the version $\tau$.
        staleness: $s$: any function of an int.

    Raises:
        ArgumentError: naming the option that is out of range.

    Source: Blanchard et al. 2017, sections 4 and 5 (Multi-Krum), of displacements.

    Cost: an update that moves the model reads 7 words a parameter, writes 1 and makes 0; one that waits reads 5,
        writes 1 and makes 2. It holds K - 1 displacements.

    Example:
        >>> import manifoldagg, torch
        >>> rule, model, state = Krum(5, num_byzantine=1), [torch.zeros(1)], None
        >>> for update in (1.0, 1.5, 1e6, 2.0, 2.25):
        ...     update = [torch.tensor([update])]
        ...     model, state, _ = manifoldagg.aggregate(rule, state, model, [torch.zeros(1)], update)
        >>> model
        [tensor([2.])]
    """

    accepts_tensor_lists: ClassVar[bool] = True
    size: int = 10
    num_byzantine: int = 2
    num_selected: int = 1
    rate: Rate = 1.0
    staleness: Weight = field(default_factory=Polynomial)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("num_byzantine", self.num_byzantine, at_least=0)
        check_count("num_selected", self.num_selected)
        if not self.size > 2 * self.num_byzantine + 2:
            if self.num_byzantine == Krum.num_byzantine:  # probably not passed
                least = 2 * self.num_byzantine + 3
                raise ArgumentError(
                    f"size: expected at least {least} with num_byzantine = {self.num_byzantine}, got {self.size}"
                )
            raise ArgumentError(
                f"num_byzantine: expected at most (size - 3) / 2 with size = {self.size}, got {self.num_byzantine}"
            )
        most = self.size - self.num_byzantine - 2
        if self.num_selected > most:
            raise ArgumentError(
                f"num_selected: expected at most size - num_byzantine - 2 = {most}, got {self.num_selected}"
            )

    def combine(
        self,
        space: Manifold,
        update: Update,
        frame: Frame,
        stored: Mapping[str, Any],
        factors: Sequence[float],
        out: Tensor | None,
    ) -> tuple[Any, float, Gram]:
        for name, row in stored.items():
            frame = frame.with_row(name, row)
        gram = self.checked_gram(frame)
        # The last one is the first row, and the drift lies between it and the others.
        places = [*range(2, len(frame.rows)), 0]
        scale = np.array(factors)
        inner = gram.matrix[np.ix_(places, places)].astype(float) * np.outer(scale, scale)
        line = [0.0] * len(frame.rows)
        for i in krum_select(inner, self.num_byzantine, self.num_selected):
            line[places[i]] = factors[i] / self.num_selected
        norm = safe_sqrt(Corrected.single(frame, gram, line).inner_products()[0][0])
        return move_to(space, update.current, frame, gram, line), norm, gram


def krum_select(inner: np.ndarray, num_byzantine: int, num_selected: int) -> list[int]:
    r"""Which of K vectors with these inner products (K, K) have the smallest sums of squared distances to their
    $K - f - 2$ nearest others; of equal ones the first.

    Example:
        >>> x = np.array([[0.0], [9.0], [1.0], [2.25], [1.5]])
        >>> krum_select(x @ x.T, num_byzantine=1, num_selected=2)
        [4, 2]
    """
    squares = inner.diagonal()
    apart = squares[:, None] + squares - 2 * inner
    np.fill_diagonal(apart, np.inf)
    near = np.sort(apart.clip(min=0), axis=1)[:, : len(inner) - num_byzantine - 2]
    return [int(i) for i in np.argsort(near.sum(1), kind="stable")[:num_selected]]
