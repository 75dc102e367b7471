"""The server step of Manifold (9)-(12), shared by every rule that moves along a corrected curve."""

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from manifoldagg._validation import check_choice, check_number, short_repr
from manifoldagg.corrections import Correction, Gram
from manifoldagg.curves.distance import OVERSHOOT
from manifoldagg.errors import ArgumentError, RuleError
from manifoldagg.federated.rules._base import TangentRule
from manifoldagg.federated.rules._geometry import (
    check_points,
    combination_norm,
    corrected_gram,
    cosine,
    diagnostics,
    frame_from_update,
    safe_sqrt,
)
from manifoldagg.federated.rules._riemannian_step import step_along_curve, tangents_at
from manifoldagg.federated.rules._step_curve import StepCurve
from manifoldagg.federated.rules.dominance import Dominance
from manifoldagg.federated.schedules import Rate, rate_at
from manifoldagg.federated.types import ClientState, Outcome, Point, State, Update
from manifoldagg.kernels.alloc import empty_like
from manifoldagg.manifolds import Manifold

__all__ = ["CurveRule", "ScheduledRule", "staleness_penalty"]


class CurveRule(TangentRule):
    """An asynchronous rule that corrects the displacements, chooses the rate, and steps along their curve.

    One `gram` reads the update, algebra on its few numbers decides, one `combine` writes the new model. Where a
    correction cancels nearly all of a displacement, a second `gram` reads what is left of it.
    """

    cohort: ClassVar[int] = 1
    accepts_tensor_lists: ClassVar[bool] = True
    single_point: ClassVar[bool] = True
    not_private_because: ClassVar[str] = "every single update moves the model; FedBuff(1) is such a rule that can be"
    overshoot: str = "clamp"

    @property
    @abc.abstractmethod
    def correction(self) -> Correction:
        """The map from displacements at the base to tangents at the current model."""

    @abc.abstractmethod
    def step_size(self, state: State, update: Update, penalty: Callable[[float], float]) -> float:
        r"""Return $\rho$, the part of the distance to the candidate. `penalty(alpha)` is $S$ of Manifold (10)."""

    def step_curve(self, state: State) -> StepCurve:
        """The curve of the corrected displacements, and the meaning of the rate on it."""
        return StepCurve(self.overshoot)

    def state_update(self, state: State, update: Update, original_gram: Gram) -> dict[str, Any]:
        """Return further entries of the next state, beside the version and the state of the correction.

        Args:
            state: before the step.
            update: that was taken.
            original_gram: the inner products of its displacements and the drift.
        """
        return {}

    def client_state(self, update: Update) -> ClientState:
        """Return the next client state."""
        return update.client_state

    def init(self, space: Manifold, start: Point) -> State:
        state = super().init(space, start)
        if not space.flat:
            if self.overshoot == "extend" and not self.single_point and not space.ambient:
                curved = ", ".join(str(leaf) for leaf in space.leaves(start) if not leaf.space.flat)
                raise ArgumentError(
                    f"overshoot: extend follows a polynomial, which needs flat leaves; not so: {curved}"
                )
            still = Update(None, start, start, start[None])
            self.correction.apply(frame_from_update(space, still, transport=self.transport, rungs=self.rungs))
        return state

    def plan(self, space: Manifold, state: State, update: Update) -> tuple[State, Outcome]:
        if self.single_point:
            check_points(self, update)
        else:
            check_points(self, update, None, "at least one control point")
        n = len(update.points)
        correction = self.correction
        tensors = correction.granularity == "tensor"
        frame = frame_from_update(space, update, transport=self.transport, rungs=self.rungs, tensors=tensors)
        corrected = correction.apply(frame, state.get("correction"))
        numbers = {"cosine": cosine(corrected.original_gram)}
        inner = corrected_gram(corrected)

        def penalty(strength: float) -> float:
            if strength == 0:
                return 1.0
            return staleness_penalty(
                strength, safe_sqrt(inner[-1][-1]), safe_sqrt(corrected.original_gram.matrix[n, n])
            )

        rho = self.step_size(state, update, penalty)
        memory = self.client_state(update)
        if not 0 <= rho < math.inf:
            raise RuleError(f"rate: step size: expected a finite number >= 0, got {rho!r}")
        numbers["rate"] = rho
        course = self.step_curve(state)
        reach = course.effective_rate(rho, corrected.original_gram.matrix[:n, n].tolist())
        if frame.transporter is None:
            s = course.parameter(inner, reach)
            line = course.weights(n, s)
            model = corrected.move(line)
            norm = combination_norm(line, inner)
            numbers |= {"step": s, "norm": norm} | diagnostics(frame)
        else:
            here = frame.transporter.current
            u = tangents_at(space, here, corrected.displacements())
            s, reached, norm = step_along_curve(space, here, course.straighten(u), course, reach)
            model = empty_like(update.current).copy_(reached)
            numbers |= {"step": s, "norm": norm} | diagnostics(frame)
        after = {"version": state["version"] + 1} | self.state_update(state, update, corrected.original_gram)
        if correction.keeps_state:
            after["correction"] = corrected.state
        return after, Outcome(model, memory, numbers)


@dataclass(frozen=True)
class ScheduledRule(CurveRule):
    r"""A `CurveRule` with $\rho = S \cdot w_i \cdot \eta_g(\tau)$.

    What the options mean says [`AsyncCorrected`][manifoldagg.federated.rules.AsyncCorrected].
    """

    rate_kind: ClassVar[str] = "step"
    rate: Rate = 1.0
    decay: float = 0.0
    penalty_limit: float = 10.0
    overshoot: str = "clamp"
    dominance: Dominance | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("decay", self.decay, at_least=0, at_most=1)
        check_number("penalty_limit", self.penalty_limit, above=0)
        check_choice("overshoot", self.overshoot, OVERSHOOT)
        if self.dominance is not None and not isinstance(self.dominance, Dominance):
            raise ArgumentError(f"dominance: expected a Dominance, got {short_repr(self.dominance)}")

    def step_size(self, state: State, update: Update, penalty: Callable[[float], float]) -> float:
        version = state["version"]
        rate = rate_at(self.rate, version)
        if self.dominance is not None:
            rate = self.dominance.scaled_rate(rate, self.dominance.count_updates(update.client_state), version + 1)
        return min(penalty(self.decay), self.penalty_limit) * update.weight * rate

    def client_state(self, update: Update) -> ClientState:
        return update.client_state if self.dominance is None else self.dominance.next_client_state(update.client_state)


def staleness_penalty(strength: float, candidate: float, drift: float) -> float:
    r"""Return $S = 1 + \alpha\,(\|\Theta^\tau - \hat\Theta\| / \|\Theta^t - \Theta^\tau\| - 1)$: Manifold (10).

    Args:
        strength: $\alpha$.
        candidate: $\|\Theta^\tau - \hat\Theta\|$, how far the candidate is.
        drift: $\|\Theta^t - \Theta^\tau\|$; where it is 0, S is 1 by convention.

    Example:
        >>> staleness_penalty(1.0, candidate=1.0, drift=4.0)
        0.25
    """
    return 1.0 if drift == 0 else 1 + strength * (candidate / drift - 1)
