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

    Here, $x_i = s(\tau - t_i)\, \Delta_i$, and M are the m displacements with the smallest score. For equal scores, the
    earlier displacement is selected. The score is

    $$\sum_{j \in N_i} \|x_i - x_j\|^2, \qquad N_i \text{ the } K - f - 2 \text{ nearest of the others}.$$

    $m = 1$ is Krum, and $m > 1$ is Multi-Krum. On a curved space, the rule transports the $\Delta_i$ to the model and
    measures distances between tangents. For low-rank leaves, it measures distances between matrices. `transport` and
    `rungs` are those of [`AsyncCorrected`][manifoldagg.federated.rules.AsyncCorrected].

    Breakdown point: if f displacements are arbitrary, the squared distances of a selected displacement to some
    $K - 2f - 2$ of the other displacements sum to at most the smallest score of these among themselves. A colluding
    majority of more than K / 2 clients controls the model. A displacement that is near in norm may still be far in a
    few entries. If models are large and honest displacements differ, an attacker can therefore change some entries a
    lot.

    Args:
        size: the number K of updates per step, with K > 2f + 2.
        num_byzantine: the number f of Byzantine clients.
        num_selected: the number m of selected displacements, at most K - f - 2.
        rate: the global rate $\eta_g$: a number or a function of the version $\tau$.
        staleness: the staleness weight $s$: any function of an int.

    Raises:
        ArgumentError: if an option is out of range. The message names it.

    Source: Blanchard et al. 2017, sections 4 and 5 (Multi-Krum), applied to displacements.

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
        # Row 0 is the last update, row 1 the drift, and the other rows are the stored displacements.
        places = [*range(2, len(frame.rows)), 0]
        scale = np.array(factors)
        inner = gram.matrix[np.ix_(places, places)].astype(float) * np.outer(scale, scale)
        line = [0.0] * len(frame.rows)
        for i in krum_select(inner, self.num_byzantine, self.num_selected):
            line[places[i]] = factors[i] / self.num_selected
        norm = safe_sqrt(Corrected.single(frame, gram, line).inner_products()[0][0])
        return move_to(space, update.current, frame, gram, line), norm, gram


def krum_select(inner: np.ndarray, num_byzantine: int, num_selected: int) -> list[int]:
    r"""Return the indices of the `num_selected` vectors with the smallest Krum scores.

    The score of a vector is the sum of its squared distances to its $K - f - 2$ nearest neighbours. For equal scores,
    the vector with the lower index is selected. `inner` (K, K) are the inner products of the vectors.

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
