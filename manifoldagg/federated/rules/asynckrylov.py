"""AsyncKrylov: a step along the chord of a path, without its component that the drift has already covered."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from manifoldagg.corrections import Correction, KrylovDC
from manifoldagg.federated.rules._correction_rule import ScheduledRule
from manifoldagg.federated.rules._step_curve import StepCurve
from manifoldagg.federated.types import State

__all__ = ["AsyncKrylov"]


@dataclass(frozen=True)
class AsyncKrylov(ScheduledRule):
    r"""Rule that steps along the chord of a path under the Krylov correction.

    $\Theta^{\tau+1} = \exp_{\Theta^\tau}(\rho\, \pi v_n)$, with the $\pi$ of KrylovDC.

    A client sends n points of its path, equally many local steps apart, the last of which is its model: a
    [`Trajectory`][manifoldagg.federated.clients.Trajectory] with `pieces=n`. The server goes along the chord; the
    points before the end say how much of the drift the client would have met again. For no further gradient, n models
    are sent instead of one; with n = 1 this is [`ASGD`][manifoldagg.federated.rules.ASGD].

    Options beside those below are those of [`AsyncCorrected`][manifoldagg.federated.rules.AsyncCorrected].

    Args:
        granularity: as in [`KrylovDC`][manifoldagg.corrections.KrylovDC].
        tolerance: as above.

    Raises:
        ArgumentError: naming the option that is out of range.

    Source: of this library.

    Cost: with n points, n + 2 vectors are read twice and one is written.

    Cost: an update that moves the model reads 8 words a parameter, writes 1 and makes 0.

    Example:
        >>> AsyncKrylov(rate=0.5).correction
        KrylovDC(granularity='tensor', tolerance=0.001)
    """

    single_point: ClassVar[bool] = False
    granularity: str = field(default="tensor", kw_only=True)
    tolerance: float = field(default=1e-3, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        KrylovDC(self.granularity, tolerance=self.tolerance)  # which says what does not fit

    @cached_property
    def correction(self) -> Correction:
        return KrylovDC(self.granularity, tolerance=self.tolerance)

    def step_curve(self, state: State) -> StepCurve:
        return StepCurve(self.overshoot, curve_weight=0.0)
