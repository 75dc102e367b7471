"""FedGS: a linear step along an update after removing its conflict with the drift (gradient surgery)."""

from dataclasses import dataclass
from functools import cached_property

from manifoldagg._validation import check_choice
from manifoldagg.corrections import Correction, OrthoDC, Position
from manifoldagg.federated.rules._correction_rule import ScheduledRule

__all__ = ["FedGS"]

UPDATE_FORMS = ("tangent", "position")


@dataclass(frozen=True)
class FedGS(ScheduledRule):
    r"""Rule that removes the conflict of an update with the drift.

    $\Theta^{\tau+1} = \Theta^\tau + \rho\,\pi v$, $\pi$ = OrthoDC with $\vartheta = 0$,
    $\rho = S\, w_i\, \eta_g(\tau)$.

    Further options are those of [`AsyncCorrected`][manifoldagg.federated.rules.AsyncCorrected].

    Args:
        update_form: the update to correct: the `"tangent"` $v$ or the `"position"` $v - g$.

    Raises:
        ArgumentError: if an option is out of range. The message names it.

    Source: Manifold §4.1; Yu et al. 2020.

    Cost: an update that moves the model reads 6 words a parameter, writes 1 and makes 0.

    Example:
        >>> FedGS(rate=1.0).correction
        OrthoDC(threshold=0.0)
    """

    update_form: str = "tangent"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("update_form", self.update_form, UPDATE_FORMS)

    @cached_property
    def correction(self) -> Correction:
        surgery = OrthoDC(0.0)
        return surgery if self.update_form == "tangent" else Position() >> surgery
