"""FedBuff: a step along the mean displacement of a buffer of asynchronous updates."""

from dataclasses import dataclass, field
from typing import ClassVar

from manifoldagg._validation import check_count
from manifoldagg.federated.rules._buffer import BufferedRule
from manifoldagg.federated.schedules import Rate, Weight, weight_at
from manifoldagg.federated.staleness import Polynomial
from manifoldagg.federated.types import Update

__all__ = ["FedBuff"]


@dataclass(frozen=True)
class FedBuff(BufferedRule):
    r"""Buffered asynchronous aggregation (FedBuff): a step along the mean displacement of K updates.

    After every K updates, the new model is

    $$\Theta \leftarrow \Theta + \frac{\eta_g}{K} \sum_{i=1}^K s(\tau - t_i)\, \Delta_i,
      \qquad \Delta_i = \Theta_i - \Theta^{t_i}.$$

    The displacement $\Delta_i$ is measured from the model from which the client started.

    Use this rule when clients finish at different times and single updates are too noisy to apply. With K = 1 and a
    constant $s$, the rule equals [`ASGD`][manifoldagg.federated.rules.ASGD] with $w_i = 1$.

    On a curved space, the rule averages in the same way as [`FedAvg`][manifoldagg.federated.rules.FedAvg]. For
    `transport` and `rungs`, see [`AsyncCorrected`][manifoldagg.federated.rules.AsyncCorrected].

    Args:
        size: the number K of updates per step.
        rate: the global rate $\eta_g$: a number or a function of the version $\tau$.
        staleness: the staleness weight $s$: any function of an integer.
        normalise: whether to divide by $\sum_i s(\tau - t_i)$ instead of K.
        weighted: whether to multiply $s$ by the client's share of the data $w_i$.
        transport: the transport of tangents on a curved space: `"parallel"`, `"ladder"` or `"projection"`. The default
            `None` uses parallel transport where a closed form exists, and a ladder otherwise. A flat space accepts only
            `None`.
        rungs: the number of rungs of a ladder.

    Raises:
        ArgumentError: if an option is out of range.

    Source: Nguyen et al. 2022, Algorithm 1.

    Cost: a step reads 4 words per parameter, writes 1 and allocates 0. A buffered update reads 4, writes 1 and
    allocates 2.

    Example:
        The first buffer has two fresh updates. The second has a fresh update and an update of staleness 1.

        >>> import manifoldagg, torch
        >>> rule, start = FedBuff(2), [torch.tensor([0.0])]
        >>> model, state, _ = manifoldagg.aggregate(rule, None, start, start, [torch.tensor([1.0])])
        >>> model, state, _ = manifoldagg.aggregate(rule, state, model, start, [torch.tensor([2.0])])
        >>> model
        [tensor([1.5000])]
        >>> _, state, _ = manifoldagg.aggregate(rule, state, model, model, [torch.tensor([2.5])])
        >>> manifoldagg.aggregate(rule, state, model, start, [torch.tensor([4.0])], staleness=1)[0]
        [tensor([3.4142])]
    """

    cohort: ClassVar[int] = 1
    accepts_tensor_lists: ClassVar[bool] = True
    uses_drift: ClassVar[bool] = False
    size: int = 10
    rate: Rate = 1.0
    staleness: Weight = field(default_factory=Polynomial)
    normalise: bool = False
    weighted: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("size", self.size)

    @property
    def buffer_size(self) -> int:
        return self.size

    def update_weight(self, update: Update) -> float:
        kept = weight_at(self.staleness, update.staleness)
        if not self.weighted:
            return kept
        # A normalised mean divides by the sum of the weights. `share` is comparable within the buffer, whereas
        # `weight` may refer to different totals.
        return kept * (update.weight if update.share is None or not self.normalise else update.share)

    def divisor(self, total: float) -> float:
        return total if self.normalise else float(self.size)
