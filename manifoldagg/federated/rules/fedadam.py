"""FedAdam: the mean of a cohort as a gradient for Adam on the server."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from manifoldagg.corrections import Frame
from manifoldagg.errors import check_decay, check_number
from manifoldagg.federated.contract import State, Update
from manifoldagg.federated.rules._buffer import BufferedRule
from manifoldagg.federated.rules._flat import check_flat
from manifoldagg.federated.rules._moments import moments, quotient_step
from manifoldagg.federated.rules._reading import Numbers, root
from manifoldagg.federated.rules.fedavg import FedAvg
from manifoldagg.federated.schedules import Rate
from manifoldagg.manifolds import Manifold


@dataclass(frozen=True)
class FedAdam(FedAvg):
    r"""$\Theta \leftarrow \Theta + \eta_g\, \dfrac{m}{\sqrt{v} + \epsilon}$ on the mean $\Delta$ of a cohort, with

    $$m \leftarrow \beta_1 m + (1 - \beta_1)\, \Delta, \qquad
      v \leftarrow \beta_2 v + (1 - \beta_2)\, \Delta \odot \Delta,$$

    without a correction of bias; m begins at 0.

    Args:
        cohort: k, and $\Delta$ as in [`FedAvg`][manifoldagg.federated.rules.FedAvg].
        rate: $\eta_g$: a number, or a function of the version $\tau$.
        weighted: by each client's share of the data $w_i$; equally otherwise.
        beta1: $\beta_1$.
        beta2: $\beta_2$.
        epsilon: $\epsilon > 0$, the paper's $\tau$; a normal number in the dtype of the model, with a finite square.
        initial_square: where v begins; $\epsilon^2$, the least that the paper allows, where not given.

    Raises:
        ArgumentError: naming the option that is out of range; where the space is curved, naming its curved leaves:
            squares by coordinates depend on the coordinates.

    Source: Reddi et al. 2021, Algorithm 2.

    Example:
        >>> import manifoldagg, torch
        >>> model, update = [torch.tensor([0.0, 0.0])], [torch.tensor([1.0, -100.0])]
        >>> manifoldagg.aggregate(FedAdam(1, rate=0.5), None, model, model, update)[0]
        [tensor([ 0.4950, -0.4999])]
    """

    rate: Rate = 0.01
    beta1: float = field(default=0.9, kw_only=True)
    beta2: float = field(default=0.99, kw_only=True)
    epsilon: float = field(default=1e-3, kw_only=True)
    initial_square: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_decay("beta1", self.beta1)
        check_decay("beta2", self.beta2)
        check_number("epsilon", self.epsilon, above=0)
        if self.initial_square is not None:
            check_number("initial_square", self.initial_square, at_least=0)

    def check_space(self, space: Manifold, start: Tensor) -> None:
        super().check_space(space, start)
        check_flat(space, start, "elementwise squares, of FedAdam,")

    def init(self, space: Manifold, start: Tensor) -> State:
        limits = torch.finfo(start.dtype)
        check_number(f"epsilon: in {start.dtype}", self.epsilon, at_least=limits.tiny, at_most=root(limits.max))
        square = self.epsilon**2 if self.initial_square is None else self.initial_square
        check_number(f"initial_square: in {start.dtype}", square, at_most=limits.max)
        moments = {"m": torch.zeros_like(start), "v": torch.full_like(start, square)}
        return BufferedRule.init(self, space, start) | moments

    def move(
        self,
        space: Manifold,
        state: State,
        update: Update,
        frame: Frame,
        mean: list[float],
        inner: Numbers,
        rate: float,
        out: Tensor | None,
    ) -> tuple[Tensor, float, dict[str, Any]]:
        current = update.current.detach()
        delta = frame.combine(None, mean, out=out)
        m, v = moments(state, delta, self.beta1, self.beta2)
        model, norm = quotient_step(current, m, v, self.epsilon, rate, out=delta)
        return model, norm, {"m": m, "v": v}
