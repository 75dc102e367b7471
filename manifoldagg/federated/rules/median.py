"""The entrywise median of a buffer, which a minority of clients cannot move out of the range of the others."""

from dataclasses import dataclass, field
from typing import ClassVar

from manifoldagg.federated.rules._update_buffer import CoordinateWiseRule
from manifoldagg.federated.schedules import Rate, Weight
from manifoldagg.federated.staleness import Polynomial

__all__ = ["Median"]


@dataclass(frozen=True)
class Median(CoordinateWiseRule):
    r"""Rule that steps along the entrywise median of a buffer.

    $\Theta \leftarrow \Theta + \eta_g \operatorname{med}_i s(\tau - t_i)\, \Delta_i$ after every K updates.

    The rule computes the median of each entry. For even K, it is the mean of the two middle values.
    $\Delta_i = \Theta_i - \Theta^{t_i}$ is the displacement from the model that the client started from. The rule
    ignores sample counts.

    Breakdown point: if at most $\lceil K/2 \rceil - 1$ displacements are arbitrary, each entry of the step is between
    the smallest and the largest value of the other displacements. With one more, it is unbounded. Attackers can still
    choose each entry within that range. If clients have different data, the median differs from the mean even without
    attackers.

    Args:
        size: the number K of updates per step.
        rate: the global rate $\eta_g$: a number or a function of the version $\tau$.
        staleness: the staleness weight $s$: any function of an int.

    Raises:
        ArgumentError: if an option is out of range (the message names it) or the space is curved (the message names its
            curved leaves), because entrywise medians depend on the coordinates.

    Source: Yin et al. 2018, Algorithm 1 (option I), applied to displacements.

    Cost: an update that moves the model reads 11 words a parameter, writes 1 and makes 0; one that waits reads 5,
        writes 1 and makes 2. It holds K - 1 displacements.

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
