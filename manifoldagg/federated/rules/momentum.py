"""Momentum for any rule."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from manifoldagg._validation import check_decay, check_finite, check_number
from manifoldagg.corrections import Frame, Gram
from manifoldagg.corrections.combination import Combination
from manifoldagg.corrections.gram import Matrix
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.rules._base import commit
from manifoldagg.federated.rules._geometry import frame_from_update, in_float64, safe_sqrt
from manifoldagg.federated.rules._riemannian_step import exp_projected, tangents_at
from manifoldagg.federated.rules._wrapper import WrapperRule
from manifoldagg.federated.schedules import check_options
from manifoldagg.federated.types import (
    ClientState,
    LinearStep,
    Message,
    Outcome,
    Point,
    Rule,
    State,
    Update,
    accepts_tensor_lists,
    check_rule_protocol,
)
from manifoldagg.kernels.alloc import empty_like
from manifoldagg.manifolds import Manifold
from manifoldagg.manifolds.formulas import norm
from manifoldagg.manifolds.optimizers import transport_momentum

__all__ = ["Momentum"]


@dataclass(frozen=True)
class Momentum(WrapperRule):
    r"""Wrapper that adds momentum to a rule.

    If the wrapped rule steps from $\Theta$ to $\Theta'$, then $u \leftarrow \beta u + (\Theta' - \Theta)$ and
    $\Theta \leftarrow \Theta + u$.

    On a curved space, $u \leftarrow \beta u + \log_\Theta \Theta'$ and $\Theta \leftarrow \exp_\Theta u$, and $u$ is
    transported along this step. The log is the shortest geodesic from $\Theta$ to $\Theta'$, so the wrapper rejects a
    step beyond the injectivity radius. It also rejects a $u$ whose squared norm overflows in the dtype of the model. A
    buffered update does not change $u$. For low-rank leaves, $u$ is a sum of matrices, truncated to the `state_rank` of
    their spaces.

    Args:
        rule: the wrapped rule.
        beta: the momentum coefficient $\beta \in [0, 1)$.
        nesterov: use $\Theta \leftarrow \Theta' + \beta u$ with the new $u$. The rule must support `plan`. For example,
            `Momentum(FedAvg(k, 0.7), nesterov=True)` is the outer step of DiLoCo.

    Raises:
        ArgumentError: if `rule` is not a rule, `beta` is out of range, or the rule does not support `nesterov`.

    Source: Report §4; SlowMo with one inner rule (Wang et al. 2020); Douillard et al. 2023 (DiLoCo).

    Cost: an update that moves the model reads 6 words a parameter, writes 2 and makes 1; one that waits reads 3,
        writes 1 and makes 1, with `ASGD` or a buffer in it.

    Example:
        >>> import manifoldagg, torch
        >>> from manifoldagg.federated.rules import ASGD
        >>> model, state, rule = [torch.tensor([0.0])], None, Momentum(ASGD(1.0), beta=0.5)
        >>> for _ in range(3):
        ...     model, state, _ = manifoldagg.aggregate(rule, state, model, model, [model[0] + 1])
        >>> model
        [tensor([4.2500])]
    """

    not_private_because: ClassVar[str] = "it applies the step of the wrapped rule; use Momentum(Private(rule))"
    rule: Rule
    beta: float = 0.9
    nesterov: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_options(self)
        check_rule_protocol(self.rule)
        check_decay("beta", self.beta)
        if self.nesterov and not self.accepts_tensor_lists:
            raise ArgumentError(f"nesterov: expected a rule that supports `plan`, got {type(self.rule).__name__}")

    @property
    def is_private(self) -> bool:
        """Whether the wrapped rule is private."""
        return bool(getattr(self.rule, "is_private", False))

    def carried_displacements(self, state: State) -> list[list[tuple[float, Tensor]]]:
        """Return the sum of later steps if all later updates are zero, as lists of terms."""
        inner = getattr(self.rule, "carried_displacements", None)
        terms = [] if inner is None else inner(state["rule"])
        repeated = 1 / (1 - self.beta)
        own = []
        if "velocity" in state:
            own.append((repeated * self.beta ** (2 if self.nesterov else 1), state["velocity"]))
        return [[(repeated * c, row) for c, row in part] + own for part in terms or [[]] if part or own]

    @property
    def self_checked(self) -> tuple[str, ...]:
        """The inputs whose finiteness a private rule checks itself, because a rejection would reveal them."""
        return tuple(getattr(self.rule, "self_checked", ())) if self.is_private else ()

    @property
    def tensors(self) -> Mapping[str, int | None]:
        """The further tensors of a payload that the wrapped rule requires."""
        return getattr(self.rule, "tensors", {})

    @property
    def numbers(self) -> Sequence[str]:
        """The further numbers of a payload that the wrapped rule requires."""
        return getattr(self.rule, "numbers", ())

    def init(self, space: Manifold, start: Point) -> State:
        if self.nesterov and not space.flat:
            raise ArgumentError("nesterov: expected a flat space, as it adds a step and a velocity")
        return {"rule": self.rule.init(space, start)}

    def message(self, space: Manifold, state: State, current: Tensor, client_state: ClientState) -> Message:
        return self.rule.message(space, state["rule"], current, client_state)

    def step(
        self, space: Manifold, state: State, update: Update, *, out: Tensor | None = None
    ) -> tuple[State, Outcome]:
        if accepts_tensor_lists(self.rule, space):
            return commit(self.plan(space, state, update), out)
        inner, outcome = self.rule.step(space, state["rule"], update, out=out)
        after = {**state, "rule": inner}
        reached: Any = outcome.model
        if reached is None:
            return after, outcome
        current = update.current.detach()
        told: dict[str, float] = {}
        if space.flat or space.ambient:
            frame = frame_from_update(space, replace(update, base=current, points=(reached,)))
            line = [1.0, 0.0]
            if "velocity" in state:
                frame = frame.with_row("velocity", state["velocity"])
                line.append(self.beta)
            ambient = frame.ambient
            velocity = after["velocity"] = frame.materialize(line)
            model = reached if len(line) == 2 else ambient.combine(current, [velocity], [1.0], out=out)
            moved = safe_sqrt(ambient.gram([velocity])[0, 0, 0].item())
            told = {name: value + outcome.numbers.get(name, 0.0) for name, value in ambient.diagnostics.items()}
            largest = safe_sqrt(torch.finfo(current.dtype).max)
            check_number("points: size of the velocity", moved, at_most=largest)
        else:
            here = in_float64(space, current)
            u = space._log(here, in_float64(space, reached))
            check_log(space, here, u, outcome.numbers.get("norm", 0.0), math.sqrt(torch.finfo(current.dtype).eps))
            if "velocity" in state:
                velocity = check_finite("state['velocity']", state["velocity"])
                # Rounding moved the point after the velocity was computed. The projection restores tangency.
                u = u + self.beta * tangents_at(space, here, velocity[None])[0]
            moved = float(norm(space, here, u))
            model = empty_like(current) if out is None else out
            model.copy_(exp_projected(space, here, u))
            after["velocity"] = transport_momentum(space, here, in_float64(space, model), u)
        return after, replace(outcome, model=model, numbers={**outcome.numbers, **told, "norm": moved})

    def plan(self, space: Manifold, state: State, update: Update) -> tuple[State, Outcome]:
        """Plan a step with coefficients on the rows of the wrapped rule's step."""
        rule: Any = self.rule
        inner, outcome = rule.plan(space, state["rule"], update)
        after = {**state, "rule": inner}
        inner_step: Any = outcome.model
        if inner_step is None:
            return after, outcome
        frame = inner_step.frame
        step = velocity = inner_step.coefficients
        if "velocity" in state:
            frame = frame.with_row("velocity", state["velocity"], norm_only=True)
            step = np.concatenate([step, np.zeros_like(step[..., :1])], axis=-1)
            velocity = step.copy()
            velocity[..., -1] = self.beta
        line = step + self.beta * velocity if self.nesterov else velocity
        linear = outcome.linear
        if linear is None or linear.frame is not inner_step.frame:
            frame, gram = self._measured(frame, velocity, None)
            after["velocity"] = frame.for_state(velocity)
            moved = {**outcome.numbers, "norm": frame.combination_norm(gram, line)}
            return after, replace(outcome, model=frame.move(gram, line), numbers=moved)

        def metrics(gram: Gram) -> dict[str, float]:
            inner_metrics: dict[str, float] = linear.metrics_within(gram)
            rows, known = self._measured(frame, velocity, gram)
            return inner_metrics | {"norm": rows.combination_norm(known, line)}

        after["velocity"] = frame.for_state(velocity)
        model = Combination(frame, line, from_current=True)
        return after, replace(outcome, model=model, linear=LinearStep(frame, metrics))

    def _measured(self, frame: Frame, velocity: Matrix, gram: Gram | None) -> tuple[Frame, Gram | None]:
        """Check the norm of the next velocity. Return the frame and its inner products.

        The inner products are `None` if bounds on the norm are sufficient.

        Args:
            frame: the rows of the step.
            velocity: the coefficients of the next velocity.
            gram: inner products of the rows without the velocity, if they are known.
        """
        largest = safe_sqrt(torch.finfo(frame.dtype).max)
        if frame.unmeasured and frame.has_norm_bounds and frame.norm_bound(velocity) <= largest:
            return frame, None
        if gram is None or frame.unmeasured:
            frame = replace(frame, unmeasured={})
            gram = frame.gram("tensor" if velocity.ndim == 2 else "model")
        check_number("points: size of the velocity", safe_sqrt(gram.squared_norm(velocity)), at_most=largest)
        return frame, gram


def check_log(space: Manifold, x: Tensor, log: Tensor, step_norm: float, tolerance: float) -> None:
    """Check that a log has the length of the rule's step, which fails outside the injectivity radius.

    Raises:
        ArgumentError: if the log is not finite, or is shorter than the step.
    """
    shortest = float(norm(space, x, check_finite("points: log of the rule's step", log)))
    radius = float(space._injectivity_radius(x)) if "injectivity_radius" in space.capabilities else math.inf
    if step_norm > max(radius, (1 + tolerance) * shortest):
        raise ArgumentError(
            f"points: expected a step of the rule within the injectivity radius {radius:.3g}, "
            f"got a step of length {step_norm:.3g}"
        )
