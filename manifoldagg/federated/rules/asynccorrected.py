"""AsyncCorrected: the step of AsyncBezier with an arbitrary correction."""

from dataclasses import dataclass, field
from typing import ClassVar

from manifoldagg._validation import short_repr
from manifoldagg.corrections import Correction, Tangent
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.rules._correction_rule import ScheduledRule

__all__ = ["AsyncCorrected"]

TANGENT = Tangent()


@dataclass(frozen=True)
class AsyncCorrected(ScheduledRule):
    r"""Rule that steps along the curve of a client under an arbitrary correction.

    $\Theta^{\tau+1} = \iota_\psi(s)$ on the curve $\psi = \exp_{\varphi_{\Theta^\tau}}(\pi v)$, for any $\pi$.

    What a correction remembers is kept in the rule's state; one that works on each named tensor by itself
    (`granularity="tensor"`) has its own matrix for each. A plain model is a curve of one point. The rate is
    $\rho = S\, w_i\, \eta_g(\tau)$.

    Args:
        rate: $\eta_g$: a number, or a function of the version $\tau$, such as `manifoldagg.federated.schedules` has.
        decay: $\alpha \in [0, 1]$, the strength of the staleness penalty $S$ of Manifold (10).
        penalty_limit: the largest $S$.
        overshoot: what a $\rho$ above 1 means: `"clamp"` it to 1 or `"extend"` the curve (of a flat space).
        correction: $\pi$, such as `OrthoDyn()` or `Position() >> OrthoDC(0.0)`.
        dominance: a penalty on clients that return updates often.
        transport: how tangents travel on a curved space: `"parallel"`, `"ladder"`, `"projection"`; `None` is parallel
            where a leaf has it in closed form, a ladder elsewhere. Where leaves are of low rank `None` takes inner
            products and sums of the matrices and truncates the new one; `"projection"` takes what of the differences is
            tangent at the current model, and its retraction. At a leaf whose model has a lower rank than its factors
            both are the same: the number `ambient` says at how many.
        rungs: of a ladder.

    Raises:
        ArgumentError: naming the option that is out of range; where a correction does not work on a space, naming the
            leaf.

    Source: Manifold (9)-(12), Algorithm 1.

    Cost: an update that moves the model reads 8 words a parameter, writes 1 and makes 0.

    Example:
        >>> from manifoldagg.corrections import OrthoDyn
        >>> AsyncCorrected(rate=0.5, correction=OrthoDyn(upper=0.6)).correction.upper
        0.6
    """

    single_point: ClassVar[bool] = False
    correction: Correction = field(default=TANGENT, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.correction, Correction):
            raise ArgumentError(f"correction: expected a Correction, got {short_repr(self.correction)}")
