"""One step of a rule: a validated update applied to a model state."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from manifoldagg._validation import check_choice, check_shape, is_finite
from manifoldagg.corrections.frame import DEFERRED, PendingStep
from manifoldagg.errors import ArgumentError, RuleError
from manifoldagg.federated.buffers import accumulate, apply_pending
from manifoldagg.federated.limits import DEFAULT_LIMITS, UpdateLimits
from manifoldagg.federated.model_state import ModelState
from manifoldagg.federated.pytrees import introduces_nonfinite, materialize, unalias
from manifoldagg.federated.types import Outcome, Rule, Update, accepts_tensor_lists
from manifoldagg.kernels import Row
from manifoldagg.manifolds import Manifold

__all__ = ["StepConfig", "step"]


@dataclass(frozen=True)
class StepConfig:
    """The configuration of a step.

    Args:
        space: of the models.
        rule: that steps.
        policies: of the buffers, by name.
        update_limits: limits on norms and cosines.
        buffers_label: what messages call those of an update.
    """

    space: Manifold
    rule: Rule
    policies: Mapping[str, str]
    update_limits: UpdateLimits = DEFAULT_LIMITS
    buffers_label: str = "buffers"

    def __post_init__(self) -> None:
        if getattr(self.rule, "is_private", False):
            for name, policy in self.policies.items():
                if policy != "leave":
                    what = "expected 'leave' with Private, which adds no noise to them"
                    raise ArgumentError(f"buffer_policy: {name}: {what}")
            for name in ("norm_factor", "clip_factor"):
                if getattr(self.update_limits, name) is not None:
                    what = "updates of some clients would limit those of others"
                    raise ArgumentError(f"update_limits: {name}: expected None with Private: {what}")

    @cached_property
    def uses_tensor_lists(self) -> bool:
        """Whether the rule reads models in place, as lists of tensors."""
        return accepts_tensor_lists(self.rule, self.space)


def step(
    config: StepConfig, before: ModelState, update: Update, buffers: Mapping[str, Tensor], out: Row | None
) -> tuple[ModelState, Outcome]:
    """Apply one update by a rule, in memory of its own.

    Args:
        config: on which it is taken.
        before: what it meets. Nothing in it is written.
        update: checked. It is not written, and what is kept of it is a copy.
        buffers: that it brought.
        out: memory for the new model, written last and not read elsewhere. A rule that takes rows may have a
            model there that it reads itself, or `None` for new memory.

    Returns:
        The next model state, and the validated outcome. An unchanged client state is the same object
        where it is what it was.

    Raises:
        ManifoldAggError: naming what does not fit. Nothing but `out` has changed then.
    """
    norms = before.norms
    kept = 1.0
    if config.update_limits.needs_norms:
        update, kept, norms = config.update_limits.apply(config.space, update, norms)
    brought = update
    if not config.uses_tensor_lists:
        # A rule may write `out` while it reads the points. As a combination is written, each entry is read before.
        mine = [update.base, before.current, before.state, update.client_state, out]
        points, tensors = unalias((update.points, update.tensors), mine)
        apart = points is update.points and tensors is update.tensors
        brought = update if apart else replace(update, points=points, tensors=tensors)
    answer = config.rule.step(config.space, before.state, brought, out=DEFERRED if config.uses_tensor_lists else out)
    state, outcome, numbers = _parse_result(answer)
    if config.update_limits.uses_clipping:  # a rule may have scaled it once more
        numbers["clip"] = kept * numbers.get("clip", 1.0)
    model: Any = outcome.model
    if not (model is None or config.uses_tensor_lists):
        model = _validate_model(config, model, out)
    if not outcome.state_is_finite and (
        introduces_nonfinite(state, before.state) or introduces_nonfinite(outcome.client_state, update.client_state)
    ):
        raise ArgumentError("points: the rule's state would not be finite")
    # What is kept may share memory neither with what clients hold nor with models that will be recycled.
    foreign = [update.base, before.current, update.points, update.tensors, out]
    state, memory = unalias((state, outcome.client_state), foreign)
    after = before.buffers
    waiting = before.pending_buffers
    if config.policies:
        share = update.weight if update.share is None else update.share
        waiting = accumulate(waiting, buffers, after, share, name=config.buffers_label)
    if model is None:
        return replace(before, state=state, pending_buffers=waiting, norms=norms), Outcome(None, memory, numbers)
    if waiting is not None:
        after = apply_pending(waiting, after, numbers)
    if config.uses_tensor_lists:  # last: whatever could fail has not
        model = _materialize(model, out)
    return ModelState(model, state, after, None, before.version + 1, norms), Outcome(model, memory, numbers)


def _parse_result(result: Any) -> tuple[Any, Outcome, dict[str, float]]:
    """Return the next state, the outcome and its metrics from the result of a rule."""
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Outcome)):
        raise RuleError(f"rule: step: expected a state and an Outcome, got {type(result).__name__}")
    state, outcome = result
    try:
        numbers = {name: float(value) for name, value in outcome.numbers.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise RuleError(f"rule: numbers: expected a mapping from names to numbers: {error}") from None
    return materialize(state), outcome, numbers


def _materialize(pending_step: Any, out: Row | None) -> Any:
    """Write the new model of a rule that works on rows into `out`."""
    if not isinstance(pending_step, PendingStep):
        given = type(pending_step).__name__
        raise RuleError(
            f"rule: new model: expected the result of Frame.move, as `accepts_tensor_lists = True` says, got {given}"
        )
    return pending_step.materialize(out)


def _validate_model(config: StepConfig, model: Tensor, out: Any) -> Any:
    """Validate the new model and write it into `out`."""
    if model is not out:
        try:
            check_shape("rule: new model", model, *config.space.axes)
            check_choice("rule: new model: dtype", model.dtype, (out.dtype,))
        except ArgumentError as error:
            raise RuleError(str(error)) from None
        out.copy_(model.detach())
    if not is_finite(out):
        raise ArgumentError("points: the new model would not be finite")
    return out
