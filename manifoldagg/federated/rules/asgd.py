"""ASGD: a step along the uncorrected displacement of an update."""

from dataclasses import dataclass

from manifoldagg.corrections import Correction, Tangent
from manifoldagg.federated.rules._correction_rule import ScheduledRule

__all__ = ["ASGD"]


@dataclass(frozen=True)
class ASGD(ScheduledRule):
    r"""Asynchronous SGD (ASGD): a step along the uncorrected displacement of an update.

    After each update, the new model is

    $$\Theta^{\tau+1} = \Theta^\tau + \rho\, v, \qquad v = \Theta_i - \Theta^t, \qquad \rho = S\, w_i\, \eta_g(\tau).$$

    The step size $\rho$ is the product of the staleness penalty $S$, the client's data share $w_i$ and the rate
    $\eta_g$.

    Use this rule as the baseline for corrections, or when updates have little staleness.

    On a curved space, $v = \log_{\Theta^t} \Theta_i$ is transported to $\Theta^\tau$, and the new model is
    $\exp_{\Theta^\tau}(\rho\, v)$. [`AsyncCorrected`][manifoldagg.federated.rules.AsyncCorrected] describes the
    options.

    Raises:
        ArgumentError: if an option is out of range.

    Source: Dean et al. 2012; Report (5); Manifold (AsyncTan).

    Cost: a step reads 3 words per parameter, writes 1 and allocates 0.

    Example:
        >>> import manifoldagg, torch
        >>> current, base, update = ([torch.tensor([x])] for x in (5.0, 1.0, 2.0))
        >>> manifoldagg.aggregate(ASGD(0.5), None, current, base, update)[0]
        [tensor([5.5000])]
    """

    @property
    def correction(self) -> Correction:
        return Tangent()

    @property
    def uses_drift(self) -> bool:  # type: ignore[override]  # of an option
        return self.decay > 0
