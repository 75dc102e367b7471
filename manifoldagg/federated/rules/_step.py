"""The server step of Manifold (9)-(12), shared by every rule that moves along a corrected curve."""

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from manifoldagg.corrections.correction import Correction, require_flat
from manifoldagg.corrections.frame import Frame, congruence, product
from manifoldagg.curves import Bezier
from manifoldagg.curves.distance import OVERSHOOT, parameter_at_distance_of
from manifoldagg.errors import ArgumentError, check_choice, check_number
from manifoldagg.federated.contract import Memory, Message, Outcome, State, Update
from manifoldagg.kernels import is_transformed
from manifoldagg.manifolds import Manifold

Rate = float | Callable[[int], float]


class CurveRule(abc.ABC):
    """An asynchronous rule: correct the displacements, choose the rate, step along the curve they make.

    One `gram` reads the update, algebra on its few numbers decides, one `combine` writes the new model. Where a
    correction cancels nearly all of a displacement, a second `gram` reads what is left of it.
    """

    cohort: ClassVar[int] = 1
    plain: ClassVar[bool] = True
    overshoot: str = "clamp"

    @property
    @abc.abstractmethod
    def correction(self) -> Correction:
        """How displacements at the base become tangents at the current model."""

    @abc.abstractmethod
    def step_size(self, version: int, update: Update, penalty: Callable[[float], float]) -> float:
        r"""$\rho$: which part of the way to the candidate to go. `penalty(alpha)` is $S$ of Manifold (10)."""

    def init(self, space: Manifold, start: Tensor) -> State:
        require_flat(space)
        return {"version": 0}

    def message(self, state: State, current: Tensor, memory: Memory) -> Message:
        return Message(current)

    def step(
        self, space: Manifold, state: State, update: Update, *, out: Tensor | None = None
    ) -> tuple[State, Outcome]:
        require_flat(space)
        n = len(update.points)
        if n == 0 or (self.plain and n != 1):
            expected = "one model, (1, P)" if self.plain else "at least one control point, (n, P)"
            raise ArgumentError(f"points: {type(self).__name__} expects {expected}; got {n} points")
        frame = Frame.of_points(update.points.detach(), update.base.detach(), update.current.detach())
        if is_transformed(frame.rows):
            raise ArgumentError("update: a server step has no derivative; call it outside of functorch transforms")
        inner = frame.gram().tolist()
        for i, name in enumerate([*(f"points[{i}]" for i in range(n)), "current"]):
            check_number(f"{name}: squared distance from the base", inner[i][i])
        lines, _ = self.correction.coefficients(inner)
        read = inner
        if self.correction.loses([inner], n):
            corrected = self.correction.apply(frame)
            frame, lines = corrected.frame, corrected.lines[0]
            read = frame.gram().tolist()
        moved = frame.corrected_gram(lines, read)
        whole = _root(moved[-1][-1])

        def penalty(strength: float) -> float:
            return staleness_penalty(strength, whole, _root(inner[n][n]))

        rho = check_number("rate: step size", self.step_size(state["version"], update, penalty), at_least=0)
        s = parameter_at_distance_of(moved, rho, self.overshoot)
        weights = Bezier(space, n).weights(s)[1:]
        (line,) = product([weights], lines)
        model = frame.combine(update.current, line, out=out)
        numbers = {
            "cosine": _cosine(inner),
            "rate": rho,
            "step": s,
            "norm": _root(congruence([weights], moved)[0][0]),
        }
        return {"version": state["version"] + 1}, Outcome(model, update.memory, numbers)


@dataclass(frozen=True)
class ScheduledRule(CurveRule):
    r"""A `CurveRule` with $\rho = S \cdot w_i \cdot \eta_g(\tau)$.

    Args:
        rate: $\eta_g$: a number, or a function of the version $\tau$.
        decay: $\alpha \in [0, 1]$, the strength of the staleness penalty $S$.
        penalty_limit: the largest $S$.
        overshoot: what a $\rho$ above 1 means: `"clamp"` it to 1 or `"extend"` the curve.

    Raises:
        ArgumentError: naming the option that is out of range.
    """

    rate: Rate = 1.0
    decay: float = 0.0
    penalty_limit: float = 10.0
    overshoot: str = "clamp"

    def __post_init__(self) -> None:
        if not callable(self.rate):
            check_number("rate", self.rate, above=0)
        check_number("decay", self.decay, at_least=0, at_most=1)
        check_number("penalty_limit", self.penalty_limit, above=0)
        check_choice("overshoot", self.overshoot, OVERSHOOT)

    def step_size(self, version: int, update: Update, penalty: Callable[[float], float]) -> float:
        rate = check_number("rate", self.rate(version)) if callable(self.rate) else self.rate
        return min(penalty(self.decay), self.penalty_limit) * update.weight * rate


def staleness_penalty(strength: float, candidate: float, drift: float) -> float:
    r"""$S = 1 + \alpha\,(\|\Theta^\tau - \hat\Theta\| / \|\Theta^t - \Theta^\tau\| - 1)$: Manifold (10).

    Args:
        strength: $\alpha$.
        candidate: $\|\Theta^\tau - \hat\Theta\|$, how far the candidate is.
        drift: $\|\Theta^t - \Theta^\tau\|$; where it is 0, S is 1 by convention.

    Example:
        >>> staleness_penalty(1.0, candidate=1.0, drift=4.0)
        0.25
    """
    return 1.0 if strength == 0 or drift == 0 else 1 + strength * (candidate / drift - 1)


def _root(square: float) -> float:
    """The norm of a corrected row: rounding can leave its square slightly below zero."""
    return math.sqrt(max(square, 0.0))


def _cosine(inner: list[list[float]]) -> float:
    """cos(v_n, g) in [-1, 1]; NaN where one of them is zero."""
    scale = _root(inner[-2][-2]) * _root(inner[-1][-1])
    return max(-1.0, min(1.0, inner[-2][-1] / scale)) if scale > 0 else math.nan
