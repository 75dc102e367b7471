"""AsyncKrylov: a step along the chord of a training path with the Krylov correction."""

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
    r"""Krylov correction (AsyncKrylov): a step along the chord of a training path, corrected for the drift.

    After each update, the new model is

    $$\Theta^{\tau+1} = \exp_{\Theta^\tau}(\rho\, \pi v_n), \qquad \rho = S\, w_i\, \eta_g(\tau),$$

    where $v_1, \dots, v_n$ are the displacements of n points on the client's training path, after equal numbers of
    local steps. The last point is the client's model. The correction $\pi$ is
    [`KrylovDC`][manifoldagg.corrections.KrylovDC]. It estimates from the earlier points how much of the drift the path
    already contains. The step size $\rho$ is the product of the staleness penalty $S$, the data share $w_i$ and the
    rate $\eta_g$.

    Use this rule when the network can carry n models per update and staleness is large. Clients need the trainer
    [`Trajectory`][manifoldagg.federated.clients.Trajectory] with `pieces=n`, which computes no additional gradients.
    With n = 1, the rule equals [`ASGD`][manifoldagg.federated.rules.ASGD].

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
        granularity: the granularity, as in [`KrylovDC`][manifoldagg.corrections.KrylovDC].
        tolerance: the tolerance, as in `KrylovDC`.

    Raises:
        ArgumentError: if an option is out of range.

    Source: this library. An update with n points reads n + 2 vectors twice and writes one vector.

    Cost: a step reads 8 words per parameter, writes 1 and allocates 0.

    Example:
        >>> AsyncKrylov(rate=0.5).correction
        KrylovDC(granularity='tensor', tolerance=0.001)
    """

    state_entries: ClassVar[frozenset[str] | None] = frozenset({"version"})
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
