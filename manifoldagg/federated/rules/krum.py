"""Krum: a step along the displacements in a buffer that are closest to their neighbours."""

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
    r"""Krum: a step along the displacements in a buffer that are closest to their neighbours.

    After every K updates, the new model is

    $$\Theta \leftarrow \Theta + \frac{\eta_g}{m} \sum_{i \in M} x_i, \qquad x_i = s(\tau - t_i)\, \Delta_i,$$

    where M contains the m displacements with the smallest scores. The score of $x_i$ is the sum of its squared
    distances to its $K - f - 2$ nearest neighbours:

    $$\sum_{j \in N_i} \|x_i - x_j\|^2, \qquad |N_i| = K - f - 2.$$

    If two scores are equal, the rule selects the earlier displacement. With $m = 1$ the rule is Krum, and with $m > 1$
    it is Multi-Krum.

    Use this rule when up to f of K updates may be Byzantine and the honest displacements are similar to each other.

    Limits:

    - Suppose that f displacements are arbitrary, and let x be the displacement with the smallest score. The squared
      distances from x to some $K - 2f - 2$ honest displacements sum to at most $\min_h s_h$. Here, $s_h$ is the score
      of the honest displacement h among the honest displacements alone.
    - A colluding majority of more than K / 2 clients controls the model.
    - Two displacements with a small distance can still differ strongly in a few entries. In large models with
      heterogeneous clients, an attacker can use this to change single entries.

    On a curved space, the rule transports the $\Delta_i$ to the current model and measures distances between tangents.
    For low-rank leaves, it measures distances between matrices. For `transport` and `rungs`, see
    [`AsyncCorrected`][manifoldagg.federated.rules.AsyncCorrected].

    Args:
        size: the number K of updates per step, with K > 2f + 2.
        num_byzantine: the number f of Byzantine clients.
        num_selected: the number m of selected displacements, at most K - f - 2.
        rate: the global rate $\eta_g$: a number or a function of the version $\tau$.
        staleness: the staleness weight $s$: any function of an integer.
        transport: the transport of tangents on a curved space: `"parallel"`, `"ladder"` or `"projection"`. The default
            `None` uses parallel transport where a closed form exists, and a ladder otherwise. A flat space accepts only
            `None`.
        rungs: the number of rungs of a ladder.

    Raises:
        ArgumentError: if an option is out of range.

    Source: Blanchard et al. 2017, sections 4 and 5 (Multi-Krum), applied to displacements.

    Cost: a step reads 7 words per parameter, writes 1 and allocates 0. A buffered update reads 5, writes 1 and
    allocates 2. The buffer stores K - 1 displacements.

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
            # If `num_byzantine` has its default, the user probably passed only `size`. The message then names `size`.
            if self.num_byzantine == Krum.num_byzantine:
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
        # Row 0 is the last update, row 1 is the drift, and the other rows are the stored displacements.
        places = [*range(2, len(frame.rows)), 0]
        scale = np.array(factors)
        inner = gram.matrix[np.ix_(places, places)].astype(float) * np.outer(scale, scale)
        line = [0.0] * len(frame.rows)
        for i in krum_select(inner, self.num_byzantine, self.num_selected):
            line[places[i]] = factors[i] / self.num_selected
        norm = safe_sqrt(Corrected.single(frame, gram, line).inner_products()[0][0])
        return move_to(space, update.current, frame, gram, line), norm, gram


def krum_select(inner: np.ndarray, num_byzantine: int, num_selected: int) -> list[int]:
    """Select the vectors with the smallest Krum scores, and return their indices.

    Let K be the number of vectors, and let f be `num_byzantine`. The Krum score of a vector is the sum of its squared
    distances to its $K - f - 2$ nearest neighbours. If two vectors have the same score, the function selects the one
    with the lower index.

    Args:
        inner: the inner products of the K vectors, (K, K).
        num_byzantine: the number f of Byzantine vectors.
        num_selected: the number of indices to return.

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
