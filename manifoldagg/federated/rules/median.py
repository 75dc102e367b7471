"""Median: a step along the median of each entry of a buffer."""

from dataclasses import dataclass, field
from typing import ClassVar

from manifoldagg.federated.rules._update_buffer import CoordinateWiseRule
from manifoldagg.federated.schedules import Rate, Weight
from manifoldagg.federated.staleness import Polynomial

__all__ = ["Median"]


@dataclass(frozen=True)
class Median(CoordinateWiseRule):
    r"""Median: a step along the median of each entry of a buffer.

    After every K updates, each entry of the model changes by

    $$\Theta \leftarrow \Theta + \eta_g \operatorname{med}_i s(\tau - t_i)\, \Delta_i,
      \qquad \Delta_i = \Theta_i - \Theta^{t_i}.$$

    For even K, the median is the mean of the two middle values. The displacement $\Delta_i$ is measured from the model
    from which the client started. Sample counts are ignored.

    Use this rule when a minority of the updates may be Byzantine. If at most $\lceil K/2 \rceil - 1$ displacements are
    arbitrary, each entry of the step lies between the smallest and the largest value of the other displacements. With
    more arbitrary displacements, the step is unbounded.

    The median has two limits. Attackers can choose each entry within the range of the honest displacements. If clients
    have different data, the median differs from the mean even without attackers.

    Args:
        size: the number K of updates per step.
        rate: the global rate $\eta_g$: a number or a function of the version $\tau$.
        staleness: the staleness weight $s$: any function of an integer.
        transport: the transport of tangents on a curved space: `"parallel"`, `"ladder"` or `"projection"`. The default
            `None` uses parallel transport where a closed form exists, and a ladder otherwise. A flat space accepts only
            `None`.
        rungs: the number of rungs of a ladder.

    Raises:
        ArgumentError: if an option is out of range, or if the space is curved, because entrywise medians depend on the
            coordinates.

    Source: Yin et al. 2018, Algorithm 1 (option I), applied to displacements.

    Cost: a step reads 11 words per parameter, writes 1 and allocates 0. A buffered update reads 5, writes 1 and
    allocates 2. The buffer stores K - 1 displacements.

    Example:
        >>> import manifoldagg, torch
        >>> model, state = [torch.zeros(2)], None
        >>> for update in ([1.0, 2.0], [1e6, -1e6], [3.0, 1.0]):
        ...     update = [torch.tensor(update)]
        ...     model, state, _ = manifoldagg.aggregate(Median(3), state, model, [torch.zeros(2)], update)
        >>> model
        [tensor([3., 1.])]
    """

    needs_flat: ClassVar[str] = "entrywise medians"
    size: int = 10
    rate: Rate = 1.0
    staleness: Weight = field(default_factory=Polynomial)

    @property
    def num_trimmed(self) -> int:
        return (self.size - 1) // 2
