"""FedAsync: mix the model that a client reached into the server's."""

from collections.abc import Callable
from dataclasses import dataclass, field

from manifoldagg.corrections import Correction, Position
from manifoldagg.errors import ArgumentError, check_number
from manifoldagg.federated.contract import Update
from manifoldagg.federated.rules._step import CurveRule
from manifoldagg.federated.staleness import Constant


@dataclass(frozen=True)
class FedAsync(CurveRule):
    r"""$\Theta^{\tau+1} = (1 - \alpha_\tau)\,\Theta^\tau + \alpha_\tau\,\Theta_i$ with
    $\alpha_\tau = \alpha \cdot s(\tau - t)$.

    Args:
        rate: $\alpha > 0$; the product $\alpha_\tau$ is clamped to 1.
        staleness: $s$, such as `Constant()`, `Hinge(a, b)` or `Polynomial(a)` of
            `manifoldagg.federated.staleness`, or any function of an int.
        weighted: multiply $\alpha_\tau$ by the client's share of the data $w_i$, as the experiments of
            Manifold do.

    Raises:
        ArgumentError: if `rate` is not a positive number, or `staleness` cannot be called.

    Source: Xie et al. 2019, Algorithm 1; Manifold (AsyncPos).

    Example:
        >>> import manifoldagg, torch
        >>> state, base = {"w": torch.tensor([0.0])}, {"w": torch.tensor([0.0])}
        >>> new, _, _ = manifoldagg.aggregate(FedAsync(0.5), None, state, base, {"w": torch.tensor([2.0])})
        >>> new
        {'w': tensor([1.])}
    """

    rate: float = 0.6
    staleness: Callable[[int], float] = field(default_factory=Constant)
    weighted: bool = False

    def __post_init__(self) -> None:
        check_number("rate", self.rate, above=0)
        if not callable(self.staleness):
            raise ArgumentError(f"staleness: expected a function of an int, got {self.staleness!r}")

    @property
    def correction(self) -> Correction:
        return Position()

    def step_size(self, version: int, update: Update, penalty: Callable[[float], float]) -> float:
        return self.rate * self.staleness(update.staleness) * (update.weight if self.weighted else 1.0)
