"""ASGD: a linear step along the uncorrected update, independent of the drift."""

from dataclasses import dataclass

from manifoldagg.corrections import Correction, Tangent
from manifoldagg.federated.rules._correction_rule import ScheduledRule

__all__ = ["ASGD"]


@dataclass(frozen=True)
class ASGD(ScheduledRule):
    r"""Rule that adds the uncorrected displacement of an update to the model.

    $\Theta^{\tau+1} = \Theta^\tau + \rho\, v$ with $v = \Theta_i - \Theta^t$, $\rho = S\, w_i\, \eta_g(\tau)$.

    On a curved space, the new model is $\exp_{\Theta^\tau}(\rho\, v)$, with $v = \log_{\Theta^t} \Theta_i$ transported
    to $\Theta^\tau$.

    The options are those of [`AsyncCorrected`][manifoldagg.federated.rules.AsyncCorrected].

    Raises:
        ArgumentError: if an option is out of range. The message names it.

    Source: Dean et al. 2012; Report (5); Manifold (AsyncTan).

    Cost: an update that moves the model reads 3 words a parameter, writes 1 and makes 0.

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
