"""FedAvg: the weighted mean of the displacements of a cohort."""

from dataclasses import dataclass, field
from typing import ClassVar

from manifoldagg._validation import check_count
from manifoldagg.federated.rules._buffer import BufferedRule
from manifoldagg.federated.schedules import Rate
from manifoldagg.federated.types import Update

__all__ = ["FedAvg"]


@dataclass(frozen=True)
class FedAvg(BufferedRule):
    r"""Rule that adds the weighted mean displacement of a cohort.

    $\Theta \leftarrow \Theta + \eta_g\, \dfrac{\sum_i w_i\, \Delta_i}{\sum_i w_i}$ over a cohort of k clients.

    $\Delta_i = \Theta_i - \Theta^{t_i}$ is the displacement from the client's own base, so a straggler from an earlier
    round is averaged like the others. FedProx is this rule with the trainer
    [`Proximal`][manifoldagg.federated.clients.Proximal].

    Suppose that clients perform K steps of gradient descent with rate $\eta$ and proximal term $\mu$ on quadratic
    losses with Hessians $H_i$ and minimisers $a_i$. Then the fixed point is $(\sum w_i P_i)^{-1} \sum w_i P_i a_i$ with
    $P_i = (I - (I - \eta A_i)^K) A_i^{-1} H_i$ and $A_i = H_i + \mu I$. This is not the joint minimiser, unless $K = 1$
    and $\mu = 0$, or all clients have the same minimiser.

    On a curved space, the rule averages $\Delta_i = \log_{\Theta^{t_i}} \Theta_i$ at $\Theta$ and applies exp.
    `transport` and `rungs` are those of [`AsyncCorrected`][manifoldagg.federated.rules.AsyncCorrected].

    Args:
        cohort: the number k of updates per step.
        rate: the global rate $\eta_g$: a number or a function of the version $\tau$.
        weighted: weight updates by the client's share of the data $w_i$. Otherwise, the weights are equal.

    Raises:
        ArgumentError: if an option is out of range. The message names it.

    Source: McMahan et al. 2017; Reddi et al. 2021, Algorithm 1 (for $\eta_g$); Li et al. 2020 (FedProx).

    Cost: an update that moves the model reads 4 words a parameter, writes 1 and makes 0; one that waits reads 4, writes
        1 and makes 2.

    Example:
        >>> import manifoldagg, torch
        >>> model, state = [torch.tensor([0.0])], None
        >>> for weight, client in ((0.25, 1.0), (0.75, 3.0)):
        ...     update, info = [torch.tensor([client])], manifoldagg.UpdateInfo(weight=weight)
        ...     model, state, _ = manifoldagg.aggregate(FedAvg(2), state, model, model, update, info=info)
        >>> model
        [tensor([2.5000])]
    """

    accepts_tensor_lists: ClassVar[bool] = True
    uses_drift: ClassVar[bool] = False
    cohort: int
    rate: Rate = 1.0
    weighted: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("cohort", self.cohort)

    @property
    def buffer_size(self) -> int:
        return self.cohort

    def update_weight(self, update: Update) -> float:
        if not self.weighted:
            return 1.0
        # The total sample count can grow within a cohort, so `weight` may refer to different totals.
        return update.weight if update.share is None else update.share
