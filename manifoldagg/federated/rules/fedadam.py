"""FedAdam: an Adam step on the server along the mean displacement of a cohort."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from manifoldagg._validation import check_decay, check_number
from manifoldagg.federated.rules._buffer import BufferMean
from manifoldagg.federated.rules._geometry import safe_sqrt
from manifoldagg.federated.rules.fedavg import FedAvg
from manifoldagg.federated.schedules import Rate
from manifoldagg.federated.types import State
from manifoldagg.kernels import gram
from manifoldagg.kernels.alloc import empty_like
from manifoldagg.manifolds import Manifold

__all__ = ["FedAdam"]


@dataclass(frozen=True)
class FedAdam(FedAvg):
    r"""Adaptive federated optimization (FedAdam): an Adam step on the server along the mean displacement of a cohort.

    Let $\Delta$ be the mean displacement of a cohort, as in [`FedAvg`][manifoldagg.federated.rules.FedAvg]. With the
    learning rate $\eta_g$, the moments $m$ and $v$ and the server model $\Theta$ become

    $$m \leftarrow \beta_1 m + (1 - \beta_1)\, \Delta, \qquad
      v \leftarrow \beta_2 v + (1 - \beta_2)\, \Delta \odot \Delta, \qquad
      \Theta \leftarrow \Theta + \eta_g\, \frac{m}{\sqrt{v} + \epsilon}.$$

    The initial value of $m$ is 0. The rule does not apply a bias correction to the moments.

    Use this rule when the entries of the displacements have very different scales, as in language models.

    Args:
        cohort: the number k of updates per step.
        rate: the global rate $\eta_g$: a number or a function of the version $\tau$.
        transport: the transport of tangents on a curved space: `"parallel"`, `"ladder"` or `"projection"`. The default
            `None` uses parallel transport where a closed form exists, and a ladder otherwise. A flat space accepts only
            `None`.
        rungs: the number of rungs of a ladder.
        weighted: whether to weight updates by the client's share of the data $w_i$. Otherwise, all weights are equal.
        over_selection: the fraction of additional clients in each round, as in
            [`FedAvg`][manifoldagg.federated.rules.FedAvg].
        beta1: the decay $\beta_1$ of the first moment.
        beta2: the decay $\beta_2$ of the second moment.
        epsilon: the constant $\epsilon > 0$, called $\tau$ in the paper. It must be a normal number with a finite
            square in the dtype of the model.
        initial_square: the initial value of $v$. The default is $\epsilon^2$, the smallest value that the paper allows.

    Raises:
        ArgumentError: if an option is out of range, or if the space is curved, because elementwise squares depend on
            the coordinates.

    Source: Reddi et al. 2021, Algorithm 2.

    Cost: a step reads 15 words per parameter, writes 3 and allocates 2. A buffered update reads 7, writes 1 and
    allocates 2.

    Example:
        >>> import manifoldagg, torch
        >>> model, update = [torch.tensor([0.0, 0.0])], [torch.tensor([1.0, -100.0])]
        >>> manifoldagg.aggregate(FedAdam(1, rate=0.5), None, model, model, update)[0]
        [tensor([ 0.4950, -0.4999])]
    """

    rate_kind: ClassVar[str] = ""
    accepts_tensor_lists: ClassVar[bool] = False
    self_checked: ClassVar[tuple[str, ...]] = ("points",)
    needs_flat: ClassVar[str] = "elementwise squares"
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

    def init(self, space: Manifold, start: Tensor) -> State:
        limits = torch.finfo(start.dtype)
        check_number(f"epsilon: in {start.dtype}", self.epsilon, at_least=limits.tiny, at_most=safe_sqrt(limits.max))
        square = self.epsilon**2 if self.initial_square is None else self.initial_square
        check_number(f"initial_square: in {start.dtype}", square, at_most=limits.max)
        zeros = {"m": torch.zeros_like(start), "v": torch.full_like(start, square)}
        return super().init(space, start) | zeros

    def apply_step(
        self, state: State, mean: BufferMean, rate: float, out: Tensor | None
    ) -> tuple[Tensor, float, dict[str, Any]]:
        model = empty_like(mean.current) if out is None else out
        m = empty_like(state["m"])
        v = empty_like(state["v"])
        for delta, reached, current, *news, before, square in mean.iter_chunks(
            model, mean.current, m, v, state["m"], state["v"]
        ):
            update_moments(before, square, delta, (self.beta1, self.beta2), out=news)
            adam_step(current, news[0], news[1], self.epsilon, rate, out=reached)
        return model, model_distance(model, mean.current), {"m": m, "v": v}


def update_moments(
    m: Tensor, square: Tensor, delta: Tensor, betas: tuple[float, float], *, out: Sequence[Tensor]
) -> None:
    r"""Update the first and second moment of Adam with a displacement, and write both to `out`.

    The first moment $m$ (`m`) becomes $\beta_1 m + (1 - \beta_1)\, \Delta$. The second moment $v$ (`square`) becomes
    $\beta_2 v + (1 - \beta_2)\, \Delta \odot \Delta$. Here, $\Delta$ is the displacement (`delta`), and `betas` is
    $(\beta_1, \beta_2)$.

    Example:
        >>> out = torch.empty(2, 1)
        >>> update_moments(torch.zeros(1), torch.ones(1), torch.tensor([2.0]), (0.5, 0.5), out=[*out])
        >>> out
        tensor([[1.0000],
                [2.5000]])
    """
    first, second = out
    torch.lerp(m, delta, 1 - betas[0], out=first)
    torch.mul(delta, delta, out=second).mul_(1 - betas[1]).add_(square, alpha=betas[1])


def adam_step(current: Tensor, m: Tensor, square: Tensor, epsilon: float, rate: float, *, out: Tensor) -> None:
    r"""Compute the model after an Adam step, and write it to `out`.

    The new model is $\Theta + \eta\, m / (\sqrt{v} + \epsilon)$, where $\Theta$ is the current model, $m$ and $v$ are
    the first and second moment, and $\eta$ is the learning rate. The argument `square` is $v$.

    Example:
        >>> out = torch.empty(1)
        >>> adam_step(torch.zeros(1), torch.ones(1), torch.tensor([4.0]), 0.0, 1.0, out=out)
        >>> out
        tensor([0.5000])
    """
    step = torch.sqrt(square, out=out).add_(epsilon)
    torch.div(m, step, out=step).mul_(rate).add_(current)


def model_distance(model: Tensor, current: Tensor) -> float:
    return safe_sqrt(gram([model], minus=current)[0, 0, 0].item())
