"""The entrywise median of a buffer, which a minority of clients cannot move out of the others' range."""

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

    The median is that of each entry; of an even number the mean of the two in the middle.
    $\Delta_i = \Theta_i - \Theta^{t_i}$ against the model that the client started from; sample counts do not weigh.

    Breakdown point: with at most $\lceil K/2 \rceil - 1$ displacements that are whatever they are, each entry of the
    step lies between the smallest and the largest of the others'. With one more it is anything. Within that range it
    may still be led anywhere, entry by entry; and where clients hold different data the median is not the mean, with
    no liar at all.

    Args:
        size: K.
        rate: $\eta_g$: a number, or a function of the version $\tau$.
        staleness: $s$: any function of an int.

    Raises:
        ArgumentError: naming the option that is out of range; where the space is curved, naming its curved leaves:
            medians of entries depend on the coordinates.

    Source: Yin et al. 2018, Algorithm 1 (option I), of displacements.

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

    needs_flat: ClassVar[str] = "medians of entries"
    size: int = 10
    rate: Rate = 1.0
    staleness: Weight = field(default_factory=Polynomial)

    @property
    def num_trimmed(self) -> int:
        return (self.size - 1) // 2
