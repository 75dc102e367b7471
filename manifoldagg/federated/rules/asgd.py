"""ASGD: a step along the uncorrected displacement of an update."""

from dataclasses import dataclass
from typing import ClassVar

from manifoldagg.corrections import Correction, Tangent
from manifoldagg.federated.rules._correction_rule import ScheduledRule

__all__ = ["ASGD"]


@dataclass(frozen=True)
class ASGD(ScheduledRule):
    r"""Asynchronous SGD (ASGD): a step along the uncorrected displacement of an update.

    Client $i$ receives the server model $\Theta^t$ of version $t$ and returns the model $\Theta_i$. The current server
    model is then $\Theta^\tau$, and the new model is

    $$\Theta^{\tau+1} = \Theta^\tau + \rho\, v, \qquad v = \Theta_i - \Theta^t, \qquad \rho = S\, w_i\, \eta_g(\tau).$$

    The step size $\rho$ is the product of the staleness penalty $S$, the client's share $w_i$ of the training data and
    the learning rate $\eta_g$.

    Use this rule as the baseline for rules with corrections, or when updates have little staleness.

    On a curved space, $v = \log_{\Theta^t} \Theta_i$ is transported to $\Theta^\tau$, and the new model is
    $\exp_{\Theta^\tau}(\rho\, v)$.

    Args:
        rate: the global rate $\eta_g$: a number or a function of the version $\tau$, such as a schedule of
            `manifoldagg.federated.schedules`.
        decay: the strength $\alpha \in [0, 1]$ of the staleness penalty $S$, which
            [`AsyncCorrected`][manifoldagg.federated.rules.AsyncCorrected] defines. With 0, $S = 1$.
        penalty_limit: the upper limit of $S$.
        overshoot: the behaviour for $\rho > 1$. `"clamp"` limits $\rho$ to 1. `"extend"` steps beyond the client's
            model, which requires a flat space.
        transport: the transport of tangents on a curved space: `"parallel"`, `"ladder"` or `"projection"`. The default
            `None` uses parallel transport where a closed form exists, and a ladder otherwise. A flat space accepts only
            `None`.
        rungs: the number of rungs of a ladder.
        dominance: an optional [`Dominance`][manifoldagg.federated.rules.Dominance] penalty for clients that return
            updates often.

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

    state_entries: ClassVar[frozenset[str] | None] = frozenset({"version"})

    @property
    def correction(self) -> Correction:
        return Tangent()

    @property
    def uses_drift(self) -> bool:  # type: ignore[override]  # of an option
        return self.decay > 0
