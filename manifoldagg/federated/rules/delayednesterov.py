"""Delayed Nesterov: an asynchronous outer optimizer whose momentum changes only once every N updates."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from manifoldagg._validation import check_count, check_decay, check_number
from manifoldagg.federated.rules._base import ServerRule
from manifoldagg.federated.rules._geometry import check_points, frame_from_update, safe_sqrt, unit_coefficients
from manifoldagg.federated.schedules import Rate, rate_at
from manifoldagg.federated.types import Outcome, Point, State, Update
from manifoldagg.manifolds import Manifold, ParameterSpace

__all__ = ["DelayedNesterov"]


@dataclass(frozen=True)
class DelayedNesterov(ServerRule):
    r"""Delayed Nesterov: a step for each update, with Nesterov momentum that changes only every N updates.

    An update with the displacement $v$ moves the model along $v$ and a fraction $c$ of the momentum $m$. With the
    learning rate $\eta$ and the momentum coefficient $\beta$, the model becomes

    $$\Theta \leftarrow \Theta + \eta\,(v / N + c\, \beta m).$$

    Every N-th update first adds the mean of the last N displacements to the momentum. It then applies the rest of the
    momentum:

    $$m \leftarrow \beta m + \frac1N \sum v, \qquad
      \Theta \leftarrow \Theta + \eta\,\bigl(v / N + (1 - cN + c)\, \beta m\bigr).$$

    Use this rule as the outer optimizer of asynchronous DiLoCo. With N = 1, the rule is standard Nesterov momentum.

    Args:
        size: the number N of updates between changes of the momentum.
        rate: the rate $\eta$: a number or a function of the version $\tau$.
        beta: the momentum coefficient $\beta \in [0, 1)$.
        activation: the fraction $c \in [0, 1/N]$.
        weighted: whether to multiply $v$ by the worker's share of the data $w_i$.

    Raises:
        ArgumentError: if an option is out of range, or if the space has curved leaves other than low-rank leaves.

    Source: Liu et al. 2024, arXiv 2401.09135, Algorithm 3.

    Cost: a step reads 15 words per parameter, writes 2 and allocates 1.

    Example:
        >>> import manifoldagg, torch
        >>> rule, state, model = DelayedNesterov(2, 1.0, beta=0.5), None, [torch.tensor([0.0])]
        >>> for _ in range(4):
        ...     model, state, _ = manifoldagg.aggregate(rule, state, model, model, [model[0] + 1])
        ...     print(model[0].item())
        0.5
        1.5
        2.0
        3.25
    """

    cohort: ClassVar[int] = 1
    accepts_tensor_lists: ClassVar[bool] = True
    uses_drift: ClassVar[bool] = False
    not_private_because: ClassVar[str] = "every update moves the model"
    needs_linear_leaves: ClassVar[str] = "momenta from other points"
    size: int = 4
    rate: Rate = 0.7
    beta: float = 0.9
    activation: float = field(default=0.0, kw_only=True)
    weighted: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("size", self.size)
        check_decay("beta", self.beta)
        check_number("activation", self.activation, at_least=0, at_most=1 / self.size)

    def init(self, space: Manifold, start: Point) -> State:
        return super().init(space, start) | {"count": 0}

    def carried_displacements(self, space: ParameterSpace, state: State) -> list[list[tuple[float, Tensor]]]:
        """Return the total change of the model that is still to come if all future updates are zero.

        It comes from the momentum, and from the buffered updates that the momentum does not include yet. The server
        checks that the model remains finite after this change.
        """
        rate = rate_at(self.rate, state["version"])
        later = rate * self.beta / (1 - self.beta)
        waits = max(self.size - 1 - state["count"], 0) * self.activation
        factors = {"momentum": rate * waits * self.beta + later * self.beta, "buffer": later / self.size}
        terms = [(factors[name], state[name]) for name in factors if name in state]
        return [terms] if terms else []

    def plan(self, space: Manifold, state: State, update: Update) -> tuple[State, Outcome]:
        check_points(self, update)
        frame = frame_from_update(space, update)
        names = [name for name in ("momentum", "buffer") if name in state]
        for name in names:
            frame = frame.with_row(name, state[name], norm_only=True)
        gram = frame.gram()
        rows = dict(zip(("v", "g", *names), unit_coefficients(len(frame.rows)), strict=True))
        v = rows["v"] * (update.weight if self.weighted else 1.0)
        total = v + rows.get("buffer", 0.0)
        m = rows.get("momentum", 0.0 * v)
        count = state["count"] + 1
        full = count >= self.size  # The count exceeds `size` if the server was resumed with a smaller `size`.
        after = {"version": state["version"] + 1, "count": 0 if full else count}
        if full:
            m = self.beta * m + total / count
        if full or "momentum" in state:
            after["momentum"] = frame.for_state(m) if full else state["momentum"]
        if not full:
            after["buffer"] = frame.for_state(total)
        # A larger momentum would make every later update overflow.
        largest = safe_sqrt(torch.finfo(frame.dtype).max)
        for row in (m, total):
            check_number("points: size of the momentum", frame.combination_norm(gram, row), at_most=largest)
        c = 1 - self.activation * (self.size - 1) if full else self.activation
        rate = rate_at(self.rate, state["version"])
        line = rate * (v / self.size + c * self.beta * m)
        numbers = {
            "cosine": gram.cosine,
            "rate": rate,
            "step": rate / self.size,
            "norm": frame.combination_norm(gram, line),
        }
        model = frame.move(gram, line)
        return after, Outcome(model, update.client_state, numbers | frame.diagnostics)
