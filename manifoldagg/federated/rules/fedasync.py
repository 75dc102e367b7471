"""FedAsync: a convex combination of the server model and the client model."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from manifoldagg.corrections import Correction, Position
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.rules._correction_rule import CorrectionRule
from manifoldagg.federated.schedules import Rate, Weight, rate_at, weight_at
from manifoldagg.federated.staleness import Constant
from manifoldagg.federated.types import State, Update

__all__ = ["FedAsync"]


@dataclass(frozen=True)
class FedAsync(CorrectionRule):
    r"""Asynchronous federated averaging (FedAsync): a convex combination of the server model and a client model.

    When client $i$ returns the model $\Theta_i$, the server model $\Theta^\tau$ of version $\tau$ becomes

    $$\Theta^{\tau+1} = (1 - \alpha_\tau)\,\Theta^\tau + \alpha_\tau\,\Theta_i,
      \qquad \alpha_\tau = \min(1, \alpha \cdot s(\tau - t)).$$

    Here, $\alpha$ is the learning rate, and $t$ is the version from which the client started. The staleness weight $s$
    reduces the influence of updates with a large staleness $\tau - t$.

    Use this rule as a simple asynchronous baseline when staleness is small.

    On a curved space, the new model is $\exp_{\Theta^\tau}(\alpha_\tau \log_{\Theta^\tau} \Theta_i)$. For `transport`
    and `rungs`, see [`AsyncCorrected`][manifoldagg.federated.rules.AsyncCorrected].

    Args:
        rate: the rate $\alpha > 0$: a number or a function of the version $\tau$. A number must be at most 1 unless
            `weighted` is set.
        staleness: the staleness weight $s$: `Constant()`, `Hinge(a, b)` or `Polynomial(a)` of
            `manifoldagg.federated.staleness`, or any other function of an integer.
        weighted: whether to multiply $\alpha$ by the client's share of the data $w_i$, as in the experiments of
            Manifold.
        transport: the transport of tangents on a curved space: `"parallel"`, `"ladder"` or `"projection"`. The default
            `None` uses parallel transport where a closed form exists, and a ladder otherwise. A flat space accepts only
            `None`.
        rungs: the number of rungs of a ladder.

    Raises:
        ArgumentError: if `rate` is not a positive number, if `rate` is above 1 without `weighted`, or if `staleness` is
            not callable.

    Source: Xie et al. 2019, Algorithm 1; Manifold (AsyncPos).

    Cost: a step reads 3 words per parameter, writes 1 and allocates 0.

    Example:
        >>> import manifoldagg, torch
        >>> state, base = {"w": torch.tensor([0.0])}, {"w": torch.tensor([0.0])}
        >>> new, _, _ = manifoldagg.aggregate(FedAsync(0.5), None, state, base, {"w": torch.tensor([2.0])})
        >>> new
        {'w': tensor([1.])}
    """

    state_entries: ClassVar[frozenset[str] | None] = frozenset({"version"})
    rate_kind: ClassVar[str] = "share"
    rate: Rate = 0.6  # type: ignore[assignment]  # an option in place of the method
    staleness: Weight = field(default_factory=Constant)
    weighted: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.weighted or callable(self.rate) or self.rate <= 1):
            raise ArgumentError(
                f"rate: expected a share of the way to the client's model, at most 1, got {self.rate:g}; with "
                "weighted=True it is multiplied by the client's share of the data and may be larger"
            )

    @property
    def correction(self) -> Correction:
        return Position()

    def step_size(self, state: State, update: Update, penalty: Callable[[float], float]) -> float:
        kept = weight_at(self.staleness, update.staleness)
        return rate_at(self.rate, state["version"]) * kept * (update.weight if self.weighted else 1.0)
