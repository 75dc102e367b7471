"""AsyncCorrected: a step along the client's curve with any correction."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from manifoldagg._validation import short_repr
from manifoldagg.corrections import Correction, Tangent
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.rules._correction_rule import ScheduledRule

__all__ = ["AsyncCorrected"]

TANGENT = Tangent()


@dataclass(frozen=True)
class AsyncCorrected(ScheduledRule):
    r"""Corrected asynchronous step: a step along the client's curve with any correction.

    After each update, the new model is the point

    $$\Theta^{\tau+1} = \iota_\psi(s), \qquad \psi = \exp_{\varphi_{\Theta^\tau}}(\pi v),
      \qquad \rho = S\, w_i\, \eta_g(\tau),$$

    on the curve $\iota_\psi$, whose control points $\psi$ come from the corrected displacements $\pi v$. A plain model
    is a curve with one control point. The position $s$ on the curve follows from the step size $\rho$: the distance
    from $\Theta^\tau$ to the new model is the fraction $\rho$ of the distance to the end of the curve. The step size is
    the product of the staleness penalty $S$, the client's data share $w_i$ and the rate $\eta_g$.

    Use this rule to try a correction of your own, or a composition of corrections. The rule's state contains the state
    of the correction. A correction with `granularity="tensor"` uses one matrix per named tensor.

    Args:
        rate: the global rate $\eta_g$: a number or a function of the version $\tau$, such as a schedule of
            `manifoldagg.federated.schedules`.
        decay: the strength $\alpha \in [0, 1]$ of the staleness penalty
            $S = 1 + \alpha (\|\Theta^\tau - \hat\Theta\| / \|\Theta^t - \Theta^\tau\| - 1)$, where $\hat\Theta$ is the
            end of the curve. With 0, $S = 1$.
        penalty_limit: the upper limit of $S$.
        overshoot: the behaviour for $\rho > 1$. `"clamp"` limits $\rho$ to 1. `"extend"` follows the curve beyond its
            end, which requires a flat space.
        correction: the correction $\pi$, such as `OrthoDyn()` or `Position() >> OrthoDC(0.0)`.
        dominance: an optional [`Dominance`][manifoldagg.federated.rules.Dominance] penalty for clients that
            return updates often.
        transport: the transport of tangents on a curved space: `"parallel"`, `"ladder"` or `"projection"`. The default
            `None` uses parallel transport where a closed form exists, and a ladder otherwise. A flat space accepts only
            `None`. For low-rank leaves, see below.
        rungs: the number of rungs of a ladder.

    Raises:
        ArgumentError: if an option is out of range, or if the correction does not support a leaf of the space.

    Low-rank leaves support two values of `transport`:

    - `None` computes with inner products and sums of the matrices, and truncates the new matrix.
    - `"projection"` projects the differences onto the tangent space at the current model, and applies a retraction.

    Both values give the same result at a leaf whose matrix has a lower rank than its factors. The metric `ambient`
    counts these leaves.

    Source: Manifold (9)-(12), Algorithm 1.

    Cost: a step reads 8 words per parameter, writes 1 and allocates 0.

    Example:
        >>> from manifoldagg.corrections import OrthoDyn
        >>> AsyncCorrected(rate=0.5, correction=OrthoDyn(upper=0.6)).correction.upper
        0.6
    """

    single_point: ClassVar[bool] = False
    correction: Correction = field(default=TANGENT, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        given: Any = self.correction
        if not isinstance(given, Correction):
            hint = f"; write {given.__name__}()" if isinstance(given, type) else ""
            raise ArgumentError(f"correction: expected a Correction, got {short_repr(given)}{hint}")
