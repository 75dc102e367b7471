"""Momentum: heavy-ball or Nesterov momentum on the steps of another rule."""

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
from manifoldagg.manifolds import Manifold, ParameterSpace
from manifoldagg.manifolds.formulas import norm
from manifoldagg.manifolds.optimizers import transport_momentum

__all__ = ["Momentum"]


@dataclass(frozen=True)
class Momentum(WrapperRule):
    r"""Wrapper that adds heavy-ball or Nesterov momentum to another rule.

    If the wrapped rule steps from $\Theta$ to $\Theta'$, the velocity $u$ and the model become

    $$u \leftarrow \beta u + (\Theta' - \Theta), \qquad \Theta \leftarrow \Theta + u.$$

    With `nesterov=True`, the model becomes $\Theta \leftarrow \Theta' + \beta u$ with the new velocity $u$. An update
    that the wrapped rule only buffers does not change $u$.

    Use this rule when the steps of a rule are noisy, or as the outer optimizer of DiLoCo: `Momentum(FedAvg(k, 0.7),
    nesterov=True)`.

    On a curved space, $u \leftarrow \beta u + \log_\Theta \Theta'$ and $\Theta \leftarrow \exp_\Theta u$. The velocity
    is then transported along this step. The logarithm is defined only for steps within the injectivity radius, so the
    wrapper rejects longer steps. For low-rank leaves, $u$ is a sum of matrices that is truncated to the `state_rank` of
    their spaces.

    If the squared norm of $u$ would overflow in the dtype of the model, the wrapper rejects the update.

    Args:
        rule: the wrapped rule.
        beta: the momentum coefficient $\beta \in [0, 1)$.
        nesterov: whether to use Nesterov momentum. The wrapped rule must have a method `plan`, and the space must be
            flat.

    Raises:
        ArgumentError: if `rule` is not a rule, if `beta` is out of range, or if the rule does not support `nesterov`.

    Source: Report §4; SlowMo with one inner rule (Wang et al. 2020); Douillard et al. 2023 (DiLoCo).

    Cost: a step reads 6 words per parameter, writes 2 and allocates 1. A buffered update reads 3, writes 1 and
    allocates 1. These numbers are for the wrapped rules `ASGD` and `FedBuff`.

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

    def carried_displacements(self, space: ParameterSpace, state: State) -> list[list[tuple[float, Tensor]]]:
        """Return the total change of the model that is still to come if all future updates are zero.

        It comes from the momentum, and from the updates that the wrapped rule has stored for its next step. The server
        checks that the model remains finite after this change.
        """
        inner = getattr(self.rule, "carried_displacements", None)
        terms = [] if inner is None else inner(space, state["rule"])
        repeated = 1 / (1 - self.beta)
        own = []
        if "velocity" in state:
            own.append((repeated * self.beta ** (2 if self.nesterov else 1), state["velocity"]))
        return [[(repeated * c, row) for c, row in part] + own for part in terms or [[]] if part or own]

    @property
    def self_checked(self) -> tuple[str, ...]:
        """The names of the inputs that the server does not check for NaN and infinity, because the wrapped rule does.

        The tuple is empty unless the wrapped rule is differentially private. If the server checked the inputs of a
        private rule, the rejection of an update would reveal private data.
        """
        return tuple(getattr(self.rule, "self_checked", ())) if self.is_private else ()

    @property
    def tensors(self) -> Mapping[str, int | None]:
        """The additional tensors that the wrapped rule requires in a payload."""
        return getattr(self.rule, "tensors", {})

    @property
    def numbers(self) -> Sequence[str]:
        """The additional numbers that the wrapped rule requires in a payload."""
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
        """Plan a step as one linear combination of the wrapped rule's rows and the velocity."""
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
        """Check that the squared norm of the next velocity does not overflow.

        Args:
            frame: the rows of the step.
            velocity: the coefficients of the next velocity.
            gram: the inner products of the rows without the velocity, if they are known.

        Returns:
            The frame and its inner products. The inner products are `None` if upper bounds of the norms suffice for the
            check.
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
    """Check that a step on a curved space follows the shortest path between the models before and after it.

    `Momentum` computes its velocity from the logarithm of the step, which is the initial tangent vector of the shortest
    path. A step that is longer than the injectivity radius may follow another path. The logarithm is then shorter than
    the step, and the velocity would be wrong.

    Raises:
        ArgumentError: if the logarithm is not finite, or if the step is longer than the injectivity radius and the
            logarithm is shorter than the step.
    """
    shortest = float(norm(space, x, check_finite("points: log of the rule's step", log)))
    radius = float(space._injectivity_radius(x)) if "injectivity_radius" in space.capabilities else math.inf
    if step_norm > max(radius, (1 + tolerance) * shortest):
        raise ArgumentError(
            f"points: expected a step of the rule within the injectivity radius {radius:.3g}, "
            f"got a step of length {step_norm:.3g}"
        )
