"""Server steps, in which a rule applies one validated client update to the model state.

The function `step` has three phases:

1. Plan: the rule computes the coefficients of the step from small matrices, such as the inner products of models.
2. Check: `step` validates the result of the rule.
3. Commit: `step` computes the new model and the new state of the rule from the coefficients.

The commit phase comes last, so an update that fails a check leaves the model state unchanged.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from manifoldagg._validation import check_choice, check_shape, is_finite
from manifoldagg.corrections.combination import STATE_NOT_FINITE, Combination
from manifoldagg.errors import ArgumentError, RuleError
from manifoldagg.federated.buffers import PackedBuffers, PendingBuffers, accumulate, apply_pending
from manifoldagg.federated.limits import DEFAULT_LIMITS, Norms, UpdateLimits
from manifoldagg.federated.pytrees import combinations, introduces_nonfinite, materialize, unalias
from manifoldagg.federated.types import LinearStep, Outcome, Point, Rule, State, Update, accepts_tensor_lists
from manifoldagg.kernels import Row, combine
from manifoldagg.kernels.operands import Operand, check_target
from manifoldagg.manifolds import Manifold, ParameterSpace

__all__ = ["ModelState", "StepPlan", "measure", "run_rule", "step"]

PLAIN_TYPES = frozenset({int, float, bool, str, type(None)})
"""The types of state entries that are not tensors and therefore need neither a finiteness check nor a copy."""


@dataclass(frozen=True)
class ModelState:
    r"""Immutable snapshot of the server model and of the data that a server step updates.

    Each accepted update creates a new snapshot.

    Attributes:
        current: the current model $\Theta^\tau$.
        state: the state of the rule.
        buffers: the buffers of the model, such as running means.
        pending_buffers: the buffers that clients have returned since the model last changed. `None` if there are none.
        version: the version $\tau$, which is the number of steps that have changed the model so far.
        norms: the norm of each client's latest update, as pairs (client, norm). The tuple is empty if no limit of the
            server depends on the norm of an update.
    """

    current: Point
    state: State
    buffers: PackedBuffers = field(default_factory=PackedBuffers)
    pending_buffers: PendingBuffers | None = None
    version: int = 0
    norms: Norms = ()


@dataclass(frozen=True)
class StepPlan:
    """Configuration of a step, which is the same for all updates of a server.

    Args:
        space: the space of the models.
        rule: the rule that computes the step.
        policies: the policy of each buffer, by name.
        update_limits: the limits on norms and cosines.
        buffers_label: the name of the argument with the buffers, for error messages.

    Raises:
        ArgumentError: if the rule is private, and a buffer policy or a limit would reveal information about a client.
    """

    space: Manifold
    rule: Rule
    policies: Mapping[str, str]
    update_limits: UpdateLimits = DEFAULT_LIMITS
    buffers_label: str = "buffers"

    def __post_init__(self) -> None:
        if self.is_private:
            for name, policy in self.policies.items():
                if policy != "leave":
                    what = "expected 'leave' with Private, which adds no noise to them"
                    raise ArgumentError(f"buffer_policy: {name}: {what}")
            reasons = dict.fromkeys(
                ("norm_factor", "clip_factor"), "updates of some clients would limit those of others"
            )
            reasons |= dict.fromkeys(("max_norm", "min_cosine"), "a rejection would reveal the update of a client")
            for name, what in reasons.items():
                if getattr(self.update_limits, name) is not None:
                    raise ArgumentError(f"limits: update: {name}: expected None with Private: {what}")

    @cached_property
    def is_private(self) -> bool:
        """Whether the rule ensures differential privacy."""
        return bool(getattr(self.rule, "is_private", False))

    @cached_property
    def uses_tensor_lists(self) -> bool:
        """Whether the rule reads models in place as lists of tensors."""
        return accepts_tensor_lists(self.rule, self.space)

    @cached_property
    def narrow_space(self) -> ParameterSpace | None:
        """The space of the models if the clients use narrower dtypes than the server, and `None` otherwise.

        The server then uses this space to check that a new model is finite in the dtypes of the clients.
        """
        return self.space if isinstance(self.space, ParameterSpace) and self.space.is_narrow else None


def step(
    plan: StepPlan,
    before: ModelState,
    update: Update,
    buffers: Mapping[str, Tensor],
    out: Row | None,
    *,
    atomic: bool = False,
) -> tuple[ModelState, Outcome]:
    """Compute the next model state of a server from a client update.

    The new model state shares no memory with the update.

    Args:
        plan: the configuration of the step.
        before: the model state before the step. It is not modified.
        update: a validated update. It is not modified, and the new state contains only copies of its tensors.
        buffers: the buffers of the update.
        out: an output buffer for the new model. `None` allocates new memory, and is possible only if the rule reads
            lists of tensors.
        atomic: whether `out` is written last, after all operations that can fail. If the rule reads lists of tensors,
            `out` may then be one of the models that it reads.

    Returns:
        The next model state, and the outcome with the metrics as floats. If the rule has not changed the client state,
        the outcome contains the same object.

    Raises:
        ManifoldAggError: if the update is invalid, or if the rule returns an invalid result. If `atomic` is false,
            `out` may have changed. Nothing else changes.
    """
    norms = before.norms
    kept = 1.0
    if plan.update_limits.needs_norms:
        try:
            update, kept, norms = plan.update_limits.apply(plan.space, update, norms)
        except ArgumentError:
            if not plan.is_private:
                raise
            # A private rule later replaces an update whose norm is not finite by zero. Raising would reveal the update.
    brought = update if plan.uses_tensor_lists else _without_aliases(before, update, out)
    state, outcome, numbers = run_rule(plan, before.state, brought, out, compute=not atomic)
    if plan.update_limits.uses_clipping:  # The rule may have clipped the update again, so the factors are multiplied.
        numbers["clip"] = kept * numbers.get("clip", 1.0)
    if not plan.uses_tensor_lists and outcome.model is not None:
        _validate_model(plan, outcome.model, out)
    memory = outcome.client_state
    is_plain = type(state) is dict and PLAIN_TYPES.issuperset(map(type, state.values()))
    if not (is_plain and memory is update.client_state):
        state, memory = _own_finite_state(state, outcome, before, update, out)
    after = before.buffers
    waiting = before.pending_buffers
    if plan.policies:
        share = update.weight if update.share is None else update.share
        waiting = accumulate(waiting, buffers, after, share, name=plan.buffers_label)
    model: Any = outcome.model
    if model is not None:
        if waiting is not None:
            after = apply_pending(waiting, after, numbers)
        # The commit phase comes last, so that an error leaves everything unchanged.
        if not plan.uses_tensor_lists:
            model = out
        elif isinstance(model, Combination):
            model = model.compute(out)
    if plan.narrow_space is not None:
        _check_receivable(plan, plan.narrow_space, state, model, before.current)
    if model is None:
        return replace(before, state=state, pending_buffers=waiting, norms=norms), Outcome(None, memory, numbers)
    return ModelState(model, state, after, None, before.version + 1, norms), Outcome(model, memory, numbers)


def run_rule(
    plan: StepPlan, state: State, update: Update, out: Row | None = None, *, compute: bool = True
) -> tuple[State, Outcome, dict[str, float]]:
    """Call a rule, and return its next state, its outcome and the metrics as floats.

    Args:
        plan: the configuration of the step.
        state: the state of the rule.
        update: a validated update.
        out: an output buffer for the new model. `None` allocates new memory.
        compute: whether to compute the linear combinations of a `LinearStep` now. Otherwise, the caller computes them.

    Raises:
        RuleError: if the rule returns an invalid result.
    """
    rule: Any = plan.rule
    lists = plan.uses_tensor_lists
    result = rule.plan(plan.space, state, update) if lists else rule.step(plan.space, state, update, out=out)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Outcome)):
        raise RuleError(f"rule: step: expected a state and an Outcome, got {type(result).__name__}")
    after, outcome = result
    try:
        numbers = {name: float(value) for name, value in outcome.numbers.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise RuleError(f"rule: numbers: expected a mapping from names to numbers: {error}") from None
    if not lists:
        return after, outcome, numbers
    if not (outcome.model is None or isinstance(outcome.model, Combination)):
        expected = "the result of Frame.move because of `accepts_tensor_lists = True`"
        raise RuleError(f"rule: new model: expected {expected}, got {type(outcome.model).__name__}")
    target: Any = out if compute else None
    return measure(after, outcome, numbers, compute=compute, out=target)


def measure(
    state: State, outcome: Outcome, numbers: dict[str, float], *, compute: bool, out: Operand | None = None
) -> tuple[State, Outcome, dict[str, float]]:
    """Check that the vectors of a linear step are finite, and compute the metrics of the step.

    A linear step adds a linear combination of vectors, such as a client's displacement, to the model. The function uses
    the inner products of these vectors for the check and for the metrics.

    Args:
        state: the next state of the rule.
        outcome: the outcome that the method `plan` of the rule has returned.
        numbers: the metrics of the outcome.
        compute: whether to compute the new model and the sums in the state in the same pass as the inner products.
            Otherwise, the caller computes them later. It may then write them to memory that the step reads.
        out: an output buffer for the new model. The function may write to it even if it then rejects the update.

    Returns:
        The next state, the outcome, and the metrics including those of the linear step. If the outcome contains no
        `LinearStep` and the rule has already checked its vectors, these are the unchanged arguments.

    Raises:
        ArgumentError: if an input vector or the new model is not finite, or if the rule rejects the update.

    Cost: one pass over the input vectors. If `compute` is false, the caller needs a second pass to compute the new
    model.
    """
    model = outcome.model
    linear = outcome.linear
    if linear is None:
        # A wrapper of the rule may have returned a new outcome without the linear step. Nothing has then checked the
        # rows of the model.
        if not isinstance(model, Combination) or model.frame.has_norm_bounds:
            return state, outcome, numbers
        linear = LinearStep(model.frame, lambda _: {})
    frame = linear.frame
    pending = combinations([state, model]) if compute else []
    rows = {one: out if one is model and out is not None else one.new_row() for one in pending}
    if out is not None and rows:
        check_target(out, frame.operands, None)
    gram = frame.gram(combinations=[one.fused(row) for one, row in rows.items()])
    numbers = {**numbers, **linear.metrics(gram)}
    if isinstance(model, Combination):
        known = gram if model.frame is frame else None
        if not model.frame.stays_finite(known, model.coefficients):
            model.check_finite(computed=rows.get(model))
        outcome = replace(outcome, model=rows.get(model, model))
    return materialize(state, rows) if compute else state, outcome, numbers


def _without_aliases(before: ModelState, update: Update, out: Row | None) -> Update:
    """Return the update with copies of the tensors that share memory with tensors of the server."""
    mine = [update.base, before.current, before.state, update.client_state, out]
    points, tensors = unalias((update.points, update.tensors), mine)
    if points is update.points and tensors is update.tensors:
        return update
    return replace(update, points=points, tensors=tensors)


def _own_finite_state(
    state: State, outcome: Outcome, before: ModelState, update: Update, out: Row | None
) -> tuple[State, Any]:
    """Compute and check the next states of the rule and the client, without memory shared with the inputs.

    Args:
        state: the next state of the rule, which may contain linear combinations that are not yet computed.
        outcome: the outcome of the rule, which contains the next client state.
        before: the model state before the step.
        update: the update.
        out: the output buffer for the new model.

    Returns:
        The next state of the rule and the next client state, neither of which shares memory with the inputs.

    Raises:
        ArgumentError: if a tensor in one of the states is not finite, unless it was not finite before.
    """
    state = materialize(state)
    if not outcome.state_is_finite and (
        introduces_nonfinite(state, before.state) or introduces_nonfinite(outcome.client_state, update.client_state)
    ):
        raise ArgumentError(f"points: the {STATE_NOT_FINITE}")
    owned: tuple[State, Any] = unalias(
        (state, outcome.client_state), [update.base, before.current, update.points, update.tensors, out]
    )
    return owned


def _validate_model(plan: StepPlan, model: Any, out: Any) -> None:
    if model is not out:
        try:
            check_shape("rule: new model", model, *plan.space.axes)
            check_choice("rule: new model: dtype", model.dtype, (out.dtype,))
        except ArgumentError as error:
            raise RuleError(str(error)) from None
        out.copy_(model.detach())
    if not is_finite(out):
        raise ArgumentError("points: the new model would not be finite")


def _check_receivable(plan: StepPlan, space: ParameterSpace, state: State, model: Any, current: Any) -> None:
    """Check that the new model is finite after its conversion to the dtypes of the clients.

    The check includes the displacements that the rule adds to the model in later steps, such as a momentum.

    Args:
        plan: the configuration of the step.
        space: the space of the models.
        state: the next state of the rule.
        model: the new model. `None` if the step has not changed the model.
        current: the model before the step.

    Raises:
        ArgumentError: if a leaf overflows.
    """
    start = current if model is None else model
    if not isinstance(start, Tensor):  # A list of tensors already has the dtypes that clients receive.
        return
    # If the stored displacements made the model overflow, the server would have to reject all later updates.
    carried = getattr(plan.rule, "carried_displacements", None)
    terms = carried(space, state) if carried is not None and space.flat else ()
    models = [combine(start, [row for _, row in part], [factor for factor, _ in part]) for part in terms]
    for point in models if model is None else (model, *models):
        try:
            space.check_receivable(point)
        except ArgumentError as error:
            raise ArgumentError(f"points: the new model could not be sent to clients: {error}") from None
