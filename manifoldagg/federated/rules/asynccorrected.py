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

    The rule's state includes the state of the correction. A correction with `granularity="tensor"` uses a separate
    matrix for each named tensor. A plain model is a curve of one point. The rate is $\rho = S\, w_i\, \eta_g(\tau)$.

    Args:
        rate: the global rate $\eta_g$: a number or a function of the version $\tau$, such as those in
            `manifoldagg.federated.schedules`.
        decay: the strength $\alpha \in [0, 1]$ of the staleness penalty $S$ of Manifold (10).
        penalty_limit: the upper limit of $S$.
        overshoot: the meaning of $\rho > 1$: `"clamp"` limits it to 1, `"extend"` extends the curve (on a flat space).
        correction: the correction $\pi$, such as `OrthoDyn()` or `Position() >> OrthoDC(0.0)`.
        dominance: an optional penalty on clients that return updates often.
        transport: the transport of tangents on a curved space: `"parallel"`, `"ladder"` or `"projection"`. `None` uses
            parallel transport for leaves with a closed form, and a ladder for other leaves. For low-rank leaves, `None`
            uses inner products and sums of the matrices and truncates the new matrix; `"projection"` uses the
            tangential part of the differences at the current model, and a retraction. Both are equal at a leaf whose
            model has a lower rank than its factors. The metric `ambient` counts these leaves.
        rungs: the number of rungs of a ladder.

    Raises:
        ArgumentError: if an option is out of range (the message names it), or if the correction does not support a leaf
            of the space (the message names the leaf).

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
