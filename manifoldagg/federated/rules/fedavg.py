"""FedAvg: a step along the weighted mean displacement of a cohort."""

from dataclasses import dataclass, field
from typing import ClassVar

from manifoldagg._validation import check_count, check_number
from manifoldagg.federated.rules._buffer import BufferedRule
from manifoldagg.federated.schedules import Rate
from manifoldagg.federated.types import Update

__all__ = ["FedAvg"]


@dataclass(frozen=True)
class FedAvg(BufferedRule):
    r"""Federated averaging (FedAvg): a step along the weighted mean displacement of a cohort.

    After the updates of $k$ clients, the new model is

    $$\Theta \leftarrow \Theta + \eta_g\, \frac{\sum_i w_i\, \Delta_i}{\sum_i w_i},
      \qquad \Delta_i = \Theta_i - \Theta^{t_i}.$$

    The displacement $\Delta_i$ is measured from the model from which client $i$ started. An update from an earlier
    round therefore counts like any other update.

    Use this rule when the server can wait for all clients of a round. FedProx is this rule with the trainer
    [`Proximal`][manifoldagg.federated.clients.Proximal].

    On a curved space, $\Delta_i = \log_{\Theta^{t_i}} \Theta_i$ is transported to $\Theta$, and the step is the
    exponential map of the scaled mean. For `transport` and `rungs`, see
    [`AsyncCorrected`][manifoldagg.federated.rules.AsyncCorrected].

    FedAvg with several local steps does not minimise the joint loss. Suppose that client $i$ has a quadratic loss with
    Hessian $H_i$ and minimiser $a_i$. Each client performs K steps of gradient descent with rate $\eta$ and proximal
    term $\mu$. Then the fixed point is

    $$\Bigl(\sum_i w_i P_i\Bigr)^{-1} \sum_i w_i P_i a_i, \qquad
      P_i = (I - (I - \eta A_i)^K)\, A_i^{-1} H_i, \qquad A_i = H_i + \mu I.$$

    The fixed point equals the joint minimiser if $K = 1$ and $\mu = 0$, or if all clients have the same minimiser.

    Args:
        cohort: the number $k$ of updates per step.
        rate: the global rate $\eta_g$: a number or a function of the version $\tau$.
        transport: the transport of tangents on a curved space: `"parallel"`, `"ladder"` or `"projection"`. The default
            `None` uses parallel transport where a closed form exists, and a ladder otherwise. A flat space accepts only
            `None`.
        rungs: the number of rungs of a ladder.
        weighted: whether to weight updates by the client's share of the data $w_i$. Otherwise, all weights are equal.
        over_selection: the fraction of additional clients in each round. A driver dispatches to
            $\lceil (1 + \text{over\_selection})\, k \rceil$ clients and cancels the tasks that are in flight when $k$
            updates have arrived. Stragglers then do not delay a round. The step itself does not change.

    Raises:
        ArgumentError: if an option is out of range.

    Source: McMahan et al. 2017; Reddi et al. 2021, Algorithm 1 (for $\eta_g$); Li et al. 2020 (FedProx);
    Bonawitz et al. 2019, Section 2 (for `over_selection`).

    Cost: a step reads 4 words per parameter, writes 1 and allocates 0. A buffered update reads 4, writes 1 and
    allocates 2.

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
    over_selection: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("cohort", self.cohort)
        check_number("over_selection", self.over_selection, at_least=0)

    @property
    def buffer_size(self) -> int:
        return self.cohort

    def update_weight(self, update: Update) -> float:
        if not self.weighted:
            return 1.0
        # The total sample count can grow within a cohort, so `weight` may refer to different totals.
        return update.weight if update.share is None else update.share
