"""DC-ASGD: a linear step along an update with a first-order correction for the drift."""

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
    r"""Rule with first-order delay compensation.

    $\Theta^{\tau+1} = \Theta^\tau + \rho\,(v - \lambda\, v \odot v \odot g)$, $\rho = S\, w_i\, \eta_g(\tau)$.

    With `"constant"` (DC-ASGD-c), $\lambda$ is a number. With `"adaptive"` (DC-ASGD-a), it is

    $$\lambda_0 / \sqrt{m + 10^{-7}}, \qquad m \leftarrow \beta\, m + (1 - \beta)\, v \odot v,$$

    elementwise, where $m$ is initially 0. The rule treats the displacement $v$ as a negative gradient.

    Further options are those of [`AsyncCorrected`][manifoldagg.federated.rules.AsyncCorrected].

    Args:
        variant: the variant, `"adaptive"` or `"constant"`.
        strength: the strength $\lambda_0$ or $\lambda$. The default is 2 for `"adaptive"` and 0.04 for `"constant"`.
        square_decay: the decay $\beta$ of the squares.

    Raises:
        ArgumentError: if an option is out of range (the message names it) or the space is curved (the message names its
            curved leaves), because elementwise products depend on the coordinates.

    Source: Zheng et al. 2017; Report (12). The product is a further float64 row, and $m$ is the state.

    Cost: an update that moves the model reads 13 words a parameter, writes 3 and makes 2.

    Example:
        >>> import manifoldagg, torch
        >>> current, base, update = ([torch.tensor([x])] for x in (1.0, 0.0, 2.0))
        >>> rule = DCASGD(1.0, variant="constant", strength=0.25)
        >>> manifoldagg.aggregate(rule, None, current, base, update)[0]
        [tensor([2.])]
    """

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
