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

    A client sends n points of its path after equal numbers of local steps; the last point is its model. The trainer is
    [`Trajectory`][manifoldagg.federated.clients.Trajectory] with `pieces=n`. The server steps along the chord. The
    points before the end determine how much of the drift the client's path already contains. The rule needs no further
    gradients, but each client sends n models instead of one. With n = 1, this is
    [`ASGD`][manifoldagg.federated.rules.ASGD].

    Further options are those of [`AsyncCorrected`][manifoldagg.federated.rules.AsyncCorrected].

    Args:
        granularity: the granularity, as in [`KrylovDC`][manifoldagg.corrections.KrylovDC].
        tolerance: the tolerance, as in `KrylovDC`.

    Raises:
        ArgumentError: if an option is out of range. The message names it.

    Source: this library. With n points, an update reads n + 2 vectors twice and writes one.

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
        KrylovDC(self.granularity, tolerance=self.tolerance)  # validates the options

    @cached_property
    def correction(self) -> Correction:
        return KrylovDC(self.granularity, tolerance=self.tolerance)

    def step_curve(self, state: State) -> StepCurve:
        return StepCurve(self.overshoot, curve_weight=0.0)
