"""The step: what a checked update makes of a snapshot. A server takes it, and so does `aggregate`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from manifoldagg._validation import check_choice, check_shape, is_finite
from manifoldagg.corrections.frame import DEFERRED, PendingStep
from manifoldagg.errors import ArgumentError, RuleError
from manifoldagg.federated.buffers import collect, settle
from manifoldagg.federated.limits import UNLIMITED, Checks
from manifoldagg.federated.model_state import Snapshot
from manifoldagg.federated.pytrees import disjoint, settled, spoils
from manifoldagg.federated.types import Outcome, Rule, Update, by_rows
from manifoldagg.kernels import Row
from manifoldagg.manifolds import Manifold

__all__ = ["Terms", "step"]


@dataclass(frozen=True)
class Terms:
    """On which terms updates are taken.

    Args:
        space: of the models.
        rule: that steps.
        policies: of the buffers, by name.
        checks: limits on norms and cosines.
        buffers: what messages call those of an update.
    """

    space: Manifold
    rule: Rule
    policies: Mapping[str, str]
    checks: Checks = UNLIMITED
    buffers: str = "buffers"

    def __post_init__(self) -> None:
        if getattr(self.rule, "private", False):
            for name, policy in self.policies.items():
                if policy != "leave":
                    raise ArgumentError(f"buffers: {name}: expected 'leave' with Private, which adds no noise to them")
            for name in ("norm_factor", "clip_factor"):
                if getattr(self.checks, name) is not None:
                    what = "what some clients send would decide on others"
                    raise ArgumentError(f"checks: {name}: expected None with Private: {what}")

    @cached_property
    def rows(self) -> bool:
        """Whether the rule takes models as they lie in memory."""
        return by_rows(self.rule, self.space)


def step(
    terms: Terms, before: Snapshot, update: Update, buffers: Mapping[str, Tensor], out: Row | None
) -> tuple[Snapshot, Outcome]:
    """Take one update, as a rule does, in memory of its own.

    Args:
        terms: on which it is taken.
        before: what it meets. Nothing in it is written.
        update: checked. It is not written, and what is kept of it is a copy.
        buffers: that it brought.
        out: where the new model goes, last of all, in memory that nobody else reads. A rule that takes rows may have a
            model there that it reads itself, or `None` for new memory.

    Returns:
        The next snapshot, and the outcome, of which nothing can fail any more. The client's memory is the same object
        where it is what it was.

    Raises:
        ManifoldAggError: naming what does not fit. Nothing but `out` has changed then.
    """
    norms = before.norms
    kept = 1.0
    if terms.checks.measured:
        update, kept, norms = terms.checks.passed(terms.space, update, norms)
    brought = update
    if not terms.rows:
        # A rule may write `out` while it reads the points. As a combination is written, each entry is read before.
        mine = [update.base, before.current, before.state, update.memory, out]
        points, tensors = disjoint((update.points, update.tensors), mine)
        apart = points is update.points and tensors is update.tensors
        brought = update if apart else replace(update, points=points, tensors=tensors)
    answer = terms.rule.step(terms.space, before.state, brought, out=DEFERRED if terms.rows else out)
    state, outcome, numbers = _answered(answer)
    if terms.checks.clips:  # a rule may have scaled it once more
        numbers["clip"] = kept * numbers.get("clip", 1.0)
    model: Any = outcome.model
    if not (model is None or terms.rows):
        model = _checked(terms, model, out)
    if not outcome.sound and (spoils(state, before.state) or spoils(outcome.memory, update.memory)):
        raise ArgumentError("points: the rule's state would not be finite")
    # What is kept may share memory neither with what clients hold nor with models that will be recycled.
    foreign = [update.base, before.current, update.points, update.tensors, out]
    state, memory = disjoint((state, outcome.memory), foreign)
    after = before.buffers
    waiting = before.waiting
    if terms.policies:
        share = update.weight if update.share is None else update.share
        waiting = collect(waiting, buffers, after, share, name=terms.buffers)
    if model is None:
        return replace(before, state=state, waiting=waiting, norms=norms), Outcome(None, memory, numbers)
    if waiting is not None:
        after = settle(waiting, after, numbers)
    if terms.rows:  # last: whatever could fail has not
        model = _formed(model, out)
    return Snapshot(model, state, after, None, before.version + 1, norms), Outcome(model, memory, numbers)


def _answered(answer: Any) -> tuple[Any, Outcome, dict[str, float]]:
    """The next state, the outcome and its numbers, of what a rule has answered."""
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Outcome)):
        raise RuleError(f"rule: step: expected a state and an Outcome, got {type(answer).__name__}")
    state, outcome = answer
    try:
        numbers = {name: float(value) for name, value in outcome.numbers.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise RuleError(f"rule: numbers: expected a mapping from names to numbers: {error}") from None
    return settled(state), outcome, numbers


def _formed(motion: Any, out: Row | None) -> Any:
    """The new model of a rule that takes rows, in `out`."""
    if not isinstance(motion, PendingStep):
        given = type(motion).__name__
        raise RuleError(f"rule: new model: expected what Frame.move makes, as `rows = True` says, got {given}")
    return motion.materialize(out)


def _checked(terms: Terms, model: Tensor, out: Any) -> Any:
    """The new model, in `out`."""
    if model is not out:
        try:
            check_shape("rule: new model", model, *terms.space.axes)
            check_choice("rule: new model: dtype", model.dtype, (out.dtype,))
        except ArgumentError as error:
            raise RuleError(str(error)) from None
        out.copy_(model.detach())
    if not is_finite(out):
        raise ArgumentError("points: the new model would not be finite")
    return out
