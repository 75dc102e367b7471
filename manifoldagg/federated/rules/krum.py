"""Krum: of a buffer the displacements that have the nearest neighbours."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from manifoldagg._validation import check_count
from manifoldagg.corrections import Frame, Gram
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.rules._base import follow
from manifoldagg.federated.rules._geometry import along, moved, root
from manifoldagg.federated.rules._update_buffer import HeldRule
from manifoldagg.federated.schedules import Rate, Weight
from manifoldagg.federated.staleness import Polynomial
from manifoldagg.federated.types import Target, Update
from manifoldagg.manifolds import Manifold

__all__ = ["Krum"]


@dataclass(frozen=True)
class Krum(HeldRule):
    r"""$\Theta \leftarrow \Theta + \dfrac{\eta_g}{m} \sum_{i \in M} x_i$ after every K updates.

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
        liars: f.
        select: m, at most K - f - 2.
        rate: $\eta_g$: a number, or a function of the version $\tau$.
        staleness: $s$: any function of an int.

    Raises:
        ArgumentError: naming the option that is out of range.

    Source: Blanchard et al. 2017, sections 4 and 5 (Multi-Krum), of displacements.

    Cost: an update that moves the model reads 7 words a parameter, writes 1 and makes 0; one that waits reads 5,
        writes 1 and makes 2. It holds K - 1 displacements.

    Example:
        >>> import manifoldagg, torch
        >>> rule, model, state = Krum(5, liars=1), [torch.zeros(1)], None
        >>> for update in (1.0, 1.5, 1e6, 2.0, 2.25):
        ...     update = [torch.tensor([update])]
        ...     model, state, _ = manifoldagg.aggregate(rule, state, model, [torch.zeros(1)], update)
        >>> model
        [tensor([2.])]
    """

    accepts_tensor_lists: ClassVar[bool] = True
    size: int = 10
    liars: int = 2
    select: int = 1
    rate: Rate = 1.0
    staleness: Weight = field(default_factory=Polynomial)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("liars", self.liars, at_least=0)
        check_count("select", self.select)
        if not self.size > 2 * self.liars + 2:
            raise ArgumentError(f"liars: expected size > 2 liars + 2, got size {self.size}, liars {self.liars}")
        most = self.size - self.liars - 2
        if self.select > most:
            raise ArgumentError(f"select: expected at most size - liars - 2 = {most}, got {self.select}")

    def reached(
        self, space: Manifold, update: Update, frame: Frame, held: Mapping[str, Any], kept: Sequence[float], out: Target
    ) -> tuple[Any, float, Gram]:
        for name, row in held.items():
            frame = frame.with_row(name, row)
        gram = self.read(frame)
        # The last one is the first row, and the drift lies between it and the others.
        places = [*range(2, len(frame.rows)), 0]
        scale = np.array(kept)
        inner = gram.matrix[np.ix_(places, places)].astype(float) * np.outer(scale, scale)
        line = [0.0] * len(frame.rows)
        for i in nearest(inner, self.liars, self.select):
            line[places[i]] = kept[i] / self.select
        norm = root(moved(along(frame, gram, line))[0][0])
        return follow(space, update.current, frame, gram, line, out), norm, gram


def nearest(inner: np.ndarray, liars: int, select: int) -> list[int]:
    r"""Which of K vectors with these inner products (K, K) have the smallest sums of squared distances to their
    $K - f - 2$ nearest others; of equal ones the first.

    Example:
        >>> x = np.array([[0.0], [9.0], [1.0], [2.25], [1.5]])
        >>> nearest(x @ x.T, liars=1, select=2)
        [4, 2]
    """
    squares = inner.diagonal()
    apart = squares[:, None] + squares - 2 * inner
    np.fill_diagonal(apart, np.inf)
    near = np.sort(apart.clip(min=0), axis=1)[:, : len(inner) - liars - 2]
    return [int(i) for i in np.argsort(near.sum(1), kind="stable")[:select]]
