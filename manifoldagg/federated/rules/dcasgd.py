"""DC-ASGD: a step along an update with a first-order correction for the drift."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from manifoldagg._validation import check_choice, check_number
from manifoldagg.corrections import Correction, DelayCompensated
from manifoldagg.federated.rules._correction_rule import ScheduledRule

__all__ = ["DCASGD"]

DEFAULT_STRENGTHS = {"constant": 0.04, "adaptive": 2.0}


@dataclass(frozen=True)
class DCASGD(ScheduledRule):
    r"""Delay-compensated ASGD (DC-ASGD): a step along an update with a first-order correction for the drift.

    After each update, the new model is

    $$\Theta^{\tau+1} = \Theta^\tau + \rho\,(v - \lambda\, v \odot v \odot g), \qquad \rho = S\, w_i\, \eta_g(\tau).$$

    The rule treats the displacement $v$ as a negative gradient and approximates the change of the gradient along the
    drift $g$. The product $v \odot v$ stands in for the diagonal of the Hessian. The step size $\rho$ is the product of
    the staleness penalty $S$, the client's data share $w_i$ and the rate $\eta_g$.

    There are two variants:

    - `"constant"` (DC-ASGD-c): $\lambda$ is a number.
    - `"adaptive"` (DC-ASGD-a): $\lambda = \lambda_0 / \sqrt{m + 10^{-7}}$ for each entry, with the moving average $m
      \leftarrow \beta\, m + (1 - \beta)\, v \odot v$. The initial value of $m$ is 0.

    Use this rule when clients return gradients or short local training, and staleness is moderate.

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
        variant: the variant, `"adaptive"` or `"constant"`.
        strength: the strength $\lambda_0$ or $\lambda$. The default is 2 for `"adaptive"` and 0.04 for `"constant"`.
        square_decay: the decay $\beta$ of the squares.

    Raises:
        ArgumentError: if an option is out of range, or if the space is curved, because elementwise products depend on
            the coordinates.

    Source: Zheng et al. 2017; Report (12). The product is computed in float64.

    Cost: a step reads 13 words per parameter, writes 3 and allocates 2.

    Example:
        >>> import manifoldagg, torch
        >>> current, base, update = ([torch.tensor([x])] for x in (1.0, 0.0, 2.0))
        >>> rule = DCASGD(1.0, variant="constant", strength=0.25)
        >>> manifoldagg.aggregate(rule, None, current, base, update)[0]
        [tensor([2.])]
    """

    state_entries: ClassVar[frozenset[str] | None] = frozenset({"version", "correction"})
    needs_flat: ClassVar[str] = "elementwise products"
    variant: str = field(default="adaptive", kw_only=True)
    strength: float | None = field(default=None, kw_only=True)
    square_decay: float = field(default=0.95, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("variant", self.variant, DEFAULT_STRENGTHS)
        if self.strength is not None:
            check_number("strength", self.strength, at_least=0)
        check_number("square_decay", self.square_decay, at_least=0, at_most=1)

    @cached_property
    def correction(self) -> Correction:
        strength = DEFAULT_STRENGTHS[self.variant] if self.strength is None else self.strength
        return DelayCompensated(strength, adaptive=self.variant == "adaptive", decay=self.square_decay)
