"""FedGS: a step along an update without the component that conflicts with the drift."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from manifoldagg._validation import check_choice
from manifoldagg.corrections import Correction, OrthoDC, Position
from manifoldagg.federated.rules._correction_rule import ScheduledRule

__all__ = ["FedGS"]

UPDATE_FORMS = ("tangent", "position")


@dataclass(frozen=True)
class FedGS(ScheduledRule):
    r"""Federated gradient surgery (FedGS): a step along an update without the component that conflicts with the drift.

    After each update, the new model is

    $$\Theta^{\tau+1} = \Theta^\tau + \rho\,\pi v, \qquad
      \pi v = v - \frac{\min(0, \langle v, g \rangle)}{\langle g, g \rangle}\, g,
      \qquad \rho = S\, w_i\, \eta_g(\tau).$$

    The displacement $v$ and the drift $g$ conflict if their inner product is negative. Otherwise, $\pi v = v$. The
    correction $\pi$ is [`OrthoDC`][manifoldagg.corrections.OrthoDC] with threshold 0. The step size $\rho$ is the
    product of the staleness penalty $S$, the client's data share $w_i$ and the rate $\eta_g$.

    Use this rule when stale updates undo the progress of other clients.

    Args:
        rate: the global rate $\eta_g$: a number or a function of the version $\tau$, such as a schedule of
            `manifoldagg.federated.schedules`.
        decay: the strength $\alpha \in [0, 1]$ of the staleness penalty $S$, which
            [`AsyncCorrected`][manifoldagg.federated.rules.AsyncCorrected] defines. With 0, $S = 1$.
        penalty_limit: the upper limit of $S$.
        overshoot: the behaviour for $\rho > 1$. `"clamp"` limits $\rho$ to 1. `"extend"` steps beyond the client's
            model, which requires a flat space.
        update_form: the vector to correct: `"tangent"` is $v$, and `"position"` is $v - g$.
        transport: the transport of tangents on a curved space: `"parallel"`, `"ladder"` or `"projection"`. The default
            `None` uses parallel transport where a closed form exists, and a ladder otherwise. A flat space accepts only
            `None`.
        rungs: the number of rungs of a ladder.
        dominance: an optional [`Dominance`][manifoldagg.federated.rules.Dominance] penalty for clients that return
            updates often.

    Raises:
        ArgumentError: if an option is out of range.

    Source: Manifold §4.1; Yu et al. 2020.

    Cost: a step reads 6 words per parameter, writes 1 and allocates 0.

    Example:
        >>> FedGS(rate=1.0).correction
        OrthoDC(threshold=0.0)
    """

    state_entries: ClassVar[frozenset[str] | None] = frozenset({"version"})
    update_form: str = "tangent"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("update_form", self.update_form, UPDATE_FORMS)

    @cached_property
    def correction(self) -> Correction:
        surgery = OrthoDC(0.0)
        return surgery if self.update_form == "tangent" else Position() >> surgery
