"""FedOrtho: a step along the component of an update that is orthogonal to the drift."""

from dataclasses import dataclass
from functools import cached_property

from manifoldagg.corrections import Correction, OrthoDC
from manifoldagg.federated.rules._correction_rule import ScheduledRule

__all__ = ["FedOrtho"]


@dataclass(frozen=True)
class FedOrtho(ScheduledRule):
    r"""Orthogonal projection (FedOrtho): a step along the component of an update that is orthogonal to the drift.

    After each update, the new model is

    $$\Theta^{\tau+1} = \Theta^\tau + \rho\,\pi v, \qquad
      \pi v = v - \frac{\langle v, g \rangle}{\langle g, g \rangle}\, g, \qquad \rho = S\, w_i\, \eta_g(\tau).$$

    The correction $\pi$ removes the component of the displacement $v$ along the drift $g$. It is
    [`OrthoDC`][manifoldagg.corrections.OrthoDC] with threshold 1. The step size $\rho$ is the product of the staleness
    penalty $S$, the client's data share $w_i$ and the rate $\eta_g$.

    Use this rule when stale updates repeat or undo progress that the server has already made.
    [`AsyncCorrected`][manifoldagg.federated.rules.AsyncCorrected] describes the options.

    Raises:
        ArgumentError: if an option is out of range.

    Source: Manifold §4.1.

    Cost: a step reads 6 words per parameter, writes 1 and allocates 0.

    Example:
        >>> FedOrtho(rate=3.0).correction
        OrthoDC(threshold=1.0)
    """

    @cached_property
    def correction(self) -> Correction:
        return OrthoDC(1.0)
