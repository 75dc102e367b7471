"""FedOrtho: a step along the component of an update that is orthogonal to the drift."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from manifoldagg.corrections import Correction, OrthoDC
from manifoldagg.federated.rules._correction_rule import ScheduledRule

__all__ = ["FedOrtho"]


@dataclass(frozen=True)
class FedOrtho(ScheduledRule):
    r"""Orthogonal projection (FedOrtho): a step along the component of an update that is orthogonal to the drift.

    The displacement $v$ leads from the client's start model to the model that the client returned. The drift $g$ leads
    from the same start model to the current server model $\Theta^\tau$. The new model is

    $$\Theta^{\tau+1} = \Theta^\tau + \rho\,\pi v, \qquad
      \pi v = v - \frac{\langle v, g \rangle}{\langle g, g \rangle}\, g, \qquad \rho = S\, w_i\, \eta_g(\tau).$$

    The correction $\pi$ is [`OrthoDC`][manifoldagg.corrections.OrthoDC] with threshold 1. The step size $\rho$ is the
    product of the staleness penalty $S$, the client's share $w_i$ of the training data and the learning rate $\eta_g$.

    Use this rule when stale updates repeat or undo progress that the server has already made.

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

    Source: Manifold §4.1.

    Cost: a step reads 6 words per parameter, writes 1 and allocates 0.

    Example:
        >>> FedOrtho(rate=3.0).correction
        OrthoDC(threshold=1.0)
    """

    state_entries: ClassVar[frozenset[str] | None] = frozenset({"version"})

    @cached_property
    def correction(self) -> Correction:
        return OrthoDC(1.0)
