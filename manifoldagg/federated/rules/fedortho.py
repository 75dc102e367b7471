"""FedOrtho: a linear step along the component of an update that is orthogonal to the drift."""

from dataclasses import dataclass
from functools import cached_property

from manifoldagg.corrections import Correction, OrthoDC
from manifoldagg.federated.rules._correction_rule import ScheduledRule

__all__ = ["FedOrtho"]


@dataclass(frozen=True)
class FedOrtho(ScheduledRule):
    r"""Rule that projects an update orthogonally to the drift.

    $\Theta^{\tau+1} = \Theta^\tau + \rho\,\pi v$, $\pi$ = OrthoDC with $\vartheta = 1$,
    $\rho = S\, w_i\, \eta_g(\tau)$.

    The options are those of [`AsyncCorrected`][manifoldagg.federated.rules.AsyncCorrected].

    Raises:
        ArgumentError: if an option is out of range. The message names it.

    Source: Manifold §4.1.

    Cost: an update that moves the model reads 6 words a parameter, writes 1 and makes 0.

    Example:
        >>> FedOrtho(rate=3.0).correction
        OrthoDC(threshold=1.0)
    """

    @cached_property
    def correction(self) -> Correction:
        return OrthoDC(1.0)
