"""Base classes for rules that step along displacements after a correction for the drift."""

import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, ClassVar

from manifoldagg._validation import check_choice, check_number, short_repr
from manifoldagg.corrections import Corrected, Correction, Frame, Gram, Position, Tangent
from manifoldagg.curves.distance import OVERSHOOT
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.rules._geometry import frame_from_update
from manifoldagg.federated.rules._gram_rule import GramRule
from manifoldagg.federated.rules.dominance import Dominance
from manifoldagg.federated.schedules import Rate, rate_at
from manifoldagg.federated.types import ClientState, Point, State, Update
from manifoldagg.manifolds import Manifold

__all__ = ["CorrectionRule", "ScheduledRule"]


FIXED_COEFFICIENTS: dict[type, tuple[float, ...]] = {Tangent: (1.0, 0.0), Position: (1.0, -1.0)}
"""The coefficients of $(v, g)$ for corrections that do not depend on inner products."""


@cache
def _corrects_alone(kind: type["CorrectionRule"]) -> bool:
    """Return whether a class inherits all methods that turn corrected displacements into a step."""
    methods = ("coefficients", "correct", "next_state", "step_curve")
    return all(getattr(kind, name) is getattr(CorrectionRule, name) for name in methods)


class CorrectionRule(GramRule):
    """Base class for rules that correct the displacements of an update for the drift of the server model.

    The drift is the change of the server model since the client started. The rule replaces each displacement by a
    linear combination of the displacements, the drift and, for some corrections, further vectors. The corrected
    displacements define a curve, such as a straight line, along which the rule moves the server model. If the
    correction has a state, the rule stores it as the entry `correction` of its own state.

    If the terms of a linear combination nearly cancel, its norm cannot be computed accurately from inner products. The
    rule then computes this norm in a second pass over the parameters.
    """

    @property
    @abc.abstractmethod
    def correction(self) -> Correction:
        """The correction, which maps displacements at the base to tangents at the current model."""

    @property
    def granularity(self) -> str:  # type: ignore[override]  # of the correction
        """The granularity of the correction."""
        return self.correction.granularity

    @cached_property
    def fixed_coefficients(self) -> tuple[float, ...] | None:  # type: ignore[override]  # of the correction
        """The coefficients of the correction if they are the same for all updates, and `None` otherwise.

        With fixed coefficients, a step needs one pass over the parameters instead of two. The value is also `None` if a
        subclass overrides a method that computes the step, because its step may depend on the update in another way.
        """
        return FIXED_COEFFICIENTS.get(type(self.correction)) if _corrects_alone(type(self)) else None

    def coefficients(self, gram: Gram, state: State) -> tuple[Any, State]:
        lines, memory = self.correction.coefficients(gram, state.get("correction"))
        return lines, {**state, "correction": memory} if self.correction.keeps_state else state

    def correct(self, frame: Frame, state: State) -> Corrected:
        return self.correction.apply(frame, state.get("correction"))

    def next_state(self, state: State, update: Update, corrected: Corrected) -> dict[str, Any]:
        return {"correction": corrected.state} if self.correction.keeps_state else {}

    def init(self, space: Manifold, start: Point) -> State:
        state = super().init(space, start)
        if not space.flat:
            if self.overshoot == "extend" and not self.single_point and not space.ambient:
                curved = ", ".join(str(leaf) for leaf in space.leaves(start) if not leaf.space.flat)
                raise ArgumentError(
                    f"overshoot: expected 'clamp', as 'extend' needs flat leaves; got curved leaves: {curved}"
                )
            still = Update(None, start, start, start[None])
            self.correction.apply(frame_from_update(space, still, transport=self.transport, rungs=self.rungs))
        return state


@dataclass(frozen=True)
class ScheduledRule(CorrectionRule):
    r"""Base class for correction rules whose step size follows a learning-rate schedule.

    The step size is $\rho = S \cdot w_i \cdot \eta_g(\tau)$. It is the product of the staleness penalty $S$, the
    client's share $w_i$ of the training data, and the learning rate $\eta_g(\tau)$ at version $\tau$ of the server
    model. [`AsyncCorrected`][manifoldagg.federated.rules.AsyncCorrected] describes the options.
    """

    rate_kind: ClassVar[str] = "step"
    rate: Rate = 1.0  # type: ignore[assignment]  # an option in place of the method
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

    @cached_property
    def fixed_coefficients(self) -> tuple[float, ...] | None:  # type: ignore[override]  # of the correction
        """The coefficients of the correction, or `None` if the step depends on inner products.

        The step depends on the inner products of the displacement and the drift in two cases: if the coefficients
        depend on them, or if `decay`, the strength of the staleness penalty, is positive.
        """
        return None if self.decay else super().fixed_coefficients

    def step_size(self, state: State, update: Update, penalty: Callable[[float], float]) -> float:
        version = state["version"]
        rate = rate_at(self.rate, version)
        if self.dominance is not None:
            rate = self.dominance.scaled_rate(rate, self.dominance.count_updates(update.client_state), version + 1)
        scale = penalty(self.decay) if self.decay else 1.0
        return min(scale, self.penalty_limit) * update.weight * rate

    def client_state(self, update: Update) -> ClientState:
        return update.client_state if self.dominance is None else self.dominance.next_client_state(update.client_state)
