"""HeLoCo: an outer step with momentum that rotates stale displacements towards the momentum."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from manifoldagg._validation import check_decay, check_number
from manifoldagg.federated.rules._base import ServerRule
from manifoldagg.federated.rules._geometry import check_points, frame_from_update, safe_sqrt, unit_coefficients
from manifoldagg.federated.schedules import Rate, Weight, rate_at, weight_at
from manifoldagg.federated.staleness import Constant
from manifoldagg.federated.types import Outcome, State, Update
from manifoldagg.manifolds import Manifold, ParameterSpace

__all__ = ["HeLoCo"]


@dataclass(frozen=True)
class HeLoCo(ServerRule):
    r"""HeLoCo: an outer step with momentum, where stale displacements are rotated towards the momentum for each tensor.

    After each update with the displacement $v$ and the staleness weight $\rho$, the momentum $m$ and the model become

    $$G = \rho\,\pi v, \qquad m \leftarrow \beta m + (1 - \beta)\, G, \qquad
      \Theta \leftarrow \Theta + \eta\,(G + \beta m).$$

    For a tensor with $c = \cos(v, m)$ and the confidence $q = \|v\| / (\|v\| + \kappa \|m\|)$, the correction is

    $$\pi v = \begin{cases} v & c \ge c_\mathrm{ok} \\
    \|v\|\, \dfrac{u}{\|u\|}, \quad u = (1 - \lambda)\, \dfrac{v}{\|v\|} + \lambda\, \dfrac{m}{\|m\|}, \quad
    \lambda = \min(1, k_d (1 - c)\, q) & 0 \le c < c_\mathrm{ok} \\
    v - b\, c\, \|v\|\, \dfrac{m}{\|m\|}, \quad b = \min(b_\mathrm{max}, -k_s\, c\, q) & c < 0. \end{cases}$$

    The first case leaves displacements that agree with the momentum unchanged. The second case rotates a displacement
    towards the momentum, and the third case shrinks its component against the momentum. If $v$ or $m$ is zero, $\pi v =
    v$.

    Use this rule as the outer optimizer of asynchronous DiLoCo when workers have different speeds.

    With `look_ahead`, workers start at $\bar\Theta = \Theta + \eta \beta m$. The server stores $\bar\Theta$ as its
    model, and $v$ is the displacement from $\bar\Theta$. The step is then $\bar\Theta \leftarrow \bar\Theta + \eta\,(G
    + 2 \beta m - \beta m_\text{before})$, where $m_\text{before}$ is the momentum before the update. If the rate
    changes, the rule subtracts the previous look-ahead at the new rate.

    Args:
        rate: the rate $\eta$: a number or a function of the version $\tau$.
        beta: the momentum coefficient $\beta \in [0, 1)$.
        staleness: the weight $\rho$: a function of the staleness.
        weighted: whether to multiply $\rho$ by the worker's share of the data $w_i$.
        cosine_threshold: the threshold $c_\mathrm{ok} \in [0, 1]$.
        shrink_strength: the strength $k_s \ge 0$.
        max_shrink: the limit $b_\mathrm{max} \in [0, 1]$.
        rotation_strength: the strength $k_d \ge 0$.
        confidence_scale: the scale $\kappa \ge 0$.
        look_ahead: whether the server model is $\bar\Theta$. Otherwise, the model is $\Theta$, and workers start there.

    Raises:
        ArgumentError: if an option is out of range, or if the space has curved leaves other than low-rank leaves.

    Source: Al Asif et al. 2026, arXiv 2606.00271, (5), (7)-(15), (18), (19).

    Cost: a step reads 12 words per parameter, writes 2 and allocates 1.

    Example:
        >>> import manifoldagg, torch
        >>> rule, state, model = HeLoCo(0.5, look_ahead=False), None, [torch.zeros(2)]
        >>> for v in ([1.0, 0.0], [-1.0, 1.0]):
        ...     update = [model[0] + torch.tensor(v)]
        ...     model, state, _ = manifoldagg.aggregate(rule, state, model, model, update)
        >>> model
        [tensor([0.1995, 0.5450])]
    """

    state_entries: ClassVar[frozenset[str] | None] = frozenset({"version", "momentum"})
    cohort: ClassVar[int] = 1
    accepts_tensor_lists: ClassVar[bool] = True
    uses_drift: ClassVar[bool] = False
    needs_linear_leaves: ClassVar[str] = "momenta from other points"
    rate: Rate = 0.7
    beta: float = 0.9
    staleness: Weight = field(default_factory=Constant)
    weighted: bool = False
    cosine_threshold: float = field(default=0.2, kw_only=True)
    shrink_strength: float = field(default=0.5, kw_only=True)
    max_shrink: float = field(default=0.5, kw_only=True)
    rotation_strength: float = field(default=1.0, kw_only=True)
    confidence_scale: float = field(default=3.0, kw_only=True)
    look_ahead: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_decay("beta", self.beta)
        for name in ("cosine_threshold", "max_shrink"):
            check_number(name, getattr(self, name), at_least=0, at_most=1)
        for name in ("shrink_strength", "rotation_strength", "confidence_scale"):
            check_number(name, getattr(self, name), at_least=0)

    def carried_displacements(self, space: ParameterSpace, state: State) -> list[list[tuple[float, Tensor]]]:
        """Return the total change of the model that the momentum still causes if all future updates are zero.

        The server checks that the model remains finite after this change.
        """
        if "momentum" not in state:
            return []
        first = 2 * self.beta - 1 if self.look_ahead else self.beta
        factor = rate_at(self.rate, state["version"]) * self.beta * first / (1 - self.beta)
        return [[(factor, state["momentum"])]]

    def plan(self, space: Manifold, state: State, update: Update) -> tuple[State, Outcome]:
        check_points(self, update)
        frame = frame_from_update(space, update, tensors=True)
        known = "momentum" in state
        here = frame.current  # The row `here - here` is the initial momentum 0.
        frame = frame.with_row("momentum", state["momentum"] if known else here, None if known else here)
        gram = frame.gram("tensor")
        share = weight_at(self.staleness, update.staleness) * (update.weight if self.weighted else 1.0)
        rate = rate_at(self.rate, state["version"])
        v, _, m = unit_coefficients(3)
        turned = [self.correction_coefficients(part[0, 0], part[0, 2], part[2, 2]) for part in gram.parts]
        step = np.array([share * (a * v + b * m) for a, b in turned])
        kept = self.beta * m + (1 - self.beta) * step
        # A larger momentum would make every later update overflow.
        largest = safe_sqrt(torch.finfo(frame.dtype).max)
        check_number("points: size of the momentum", safe_sqrt(gram.squared_norm(kept)), at_most=largest)
        line = rate * (step + self.beta * (2 * kept - m if self.look_ahead else kept))
        numbers = {
            "cosine": gram.cosine,
            "rate": rate,
            "step": rate * share,
            "norm": safe_sqrt(gram.squared_norm(line)),
        }
        model = frame.move(gram, line)
        after = {"version": state["version"] + 1, "momentum": frame.for_state(kept)}
        return after, Outcome(model, update.client_state, numbers | frame.diagnostics)

    def correction_coefficients(
        self, update_square: float, product: float, momentum_square: float
    ) -> tuple[float, float]:
        """Return the coefficients a and b of the corrected update $a v + b m$ of one tensor.

        Here, $v$ is the client's update of the tensor, and $m$ is the server's momentum. If the cosine between $v$ and
        $m$ is below `cosine_threshold`, the correction turns $v$ towards $m$. Otherwise, it does not change $v$.

        Example:
            >>> HeLoCo(confidence_scale=0.0, max_shrink=1.0).correction_coefficients(
            ...     update_square=1.0, product=-1.0, momentum_square=1.0
            ... )
            (1.0, 0.5)
        """
        size = safe_sqrt(update_square)
        length = safe_sqrt(momentum_square)
        if size == 0 or length == 0:
            return 1.0, 0.0
        c = max(-1.0, min(1.0, product / size / length))
        confidence = size / (size + self.confidence_scale * length)
        if c >= self.cosine_threshold:
            return 1.0, 0.0
        if c < 0:
            return 1.0, -min(-self.shrink_strength * c * confidence, self.max_shrink) * c * size / length
        part = min(self.rotation_strength * (1 - c) * confidence, 1.0)
        mixed = safe_sqrt((1 - part) ** 2 + part**2 + 2 * part * (1 - part) * c)
        return (1 - part) / mixed, part * size / length / mixed
