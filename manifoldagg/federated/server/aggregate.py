"""The function `aggregate`: one server step on plain state dicts or lists of arrays."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from manifoldagg._validation import rename_argument, short_repr, suggests_keywords
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.buffers import PackedBuffers, PendingBuffers
from manifoldagg.federated.pytrees import has_structure, upcast_8bit
from manifoldagg.federated.server.input_warnings import warn_about_update, warn_if_adapter_factors
from manifoldagg.federated.server.options import UpdateInfo
from manifoldagg.federated.server.validation import check_rule
from manifoldagg.federated.step import ModelState, StepPlan, step
from manifoldagg.federated.types import ClientState, Rule, State, Update, check_parameter_space, extra_fields
from manifoldagg.kernels.alloc import empty_like, stack
from manifoldagg.kernels.operands import check_no_alias
from manifoldagg.manifolds import Layout, ParameterSpace
from manifoldagg.manifolds.layout import ModelSignature, layout_of, signature_of
from manifoldagg.manifolds.lora.peft import find_first_factor
from manifoldagg.manifolds.model_io import (
    Model,
    ModelsByPrefix,
    as_tensors,
    check_no_overlap,
    convert_like,
    copy_into,
    open_for_write,
    writable_leaves,
)

__all__ = [
    "AggregateState",
    "StepResult",
    "aggregate",
    "aggregate_step",
    "check_rule_needs_models_only",
    "inferred_space",
]

CURRENT = "current: "
BASE = "base: "
INIT_NAMES = {"space": "current", "start": "current"}
STEP_NAMES = {"points": "update", "space": "current"}
"""Mappings from the argument names of a rule's methods to those of `aggregate`. Error messages contain the latter."""
USAGE = "aggregate(rule, state, current, base, update)"
ADAPTERS_HINT = (
    "pass space=ParameterSpace.of_state_dict(model, adapters=True) for their products, or the same with adapters=False"
)
DEFAULT_INFO = UpdateInfo()
NO_BUFFERS = PackedBuffers()
SIGNED_DTYPES = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""A mapping from unsigned dtypes to signed dtypes of the same width. Torch adds only the signed integers. The sums of
signed and unsigned integers have the same bits."""
SPACE_KEYWORDS = {
    name: f"pass space=ParameterSpace.of_state_dict(model, {name}=...)"
    for name in ("buffer_policy", "manifolds", "adapters", "scaling")
}
INFO_KEYWORDS = {
    name: f"pass info=UpdateInfo({name}=...)" for name in ("client", "weight", "samples", "difference", "share")
}
"""Hints for options that are not keywords of `aggregate`, because they belong to the space or to `UpdateInfo`."""


@dataclass(frozen=True)
class AggregateState:
    """State for the next call to `aggregate`, if this call needs more than the state of the aggregation rule.

    `aggregate` returns this object in two cases:

    - The rule stores a state for each client.
    - The rule waits for further updates before it changes the model. Until then, this object stores the model buffers
      of the updates, such as running means.

    Otherwise, `aggregate` returns the state of the rule itself.

    Attributes:
        state: the state of the rule.
        pending_buffers: the model buffers of the updates since the last step that changed the model.
        client_states: the state that the rule stores for each client, by the name of the client.
    """

    state: State
    pending_buffers: PendingBuffers | None = None
    client_states: Mapping[Hashable, ClientState] = field(default_factory=dict)

    @classmethod
    def of(cls, state: State) -> "AggregateState":
        """Convert the state of a rule to an `AggregateState`. Return an `AggregateState` unchanged."""
        return state if isinstance(state, AggregateState) else cls(state)


class StepResult(NamedTuple):
    """Result of one aggregation step.

    Attributes:
        model: the new model.
        state: the state for the next step.
        numbers: the metrics of the step, by name.
        has_moved: whether the step changed the model. A buffered rule changes the model only when its buffer is full.
    """

    model: Any
    state: State
    numbers: dict[str, float]
    has_moved: bool


@suggests_keywords("aggregate", moved=INFO_KEYWORDS | SPACE_KEYWORDS)
def aggregate(
    rule: Rule,
    state: State,
    current: Model,
    base: Model,
    update: Model | Sequence[Model],
    *,
    info: UpdateInfo = DEFAULT_INFO,
    staleness: int | None = None,
    space: ParameterSpace | None = None,
    out: Model | None = None,
) -> tuple[Any, State, dict[str, float]]:
    r"""Apply the model of one client to the server's model, with one step of an aggregation rule.

    A model is a state dict, or a list of tensors or NumPy arrays. The client's model may be stale, because the server's
    model may have changed since the client started to train. The function returns a new model and modifies only the
    argument `out`.

    - The new model has the same type, order of entries, dtypes and devices as the server's model `current`.
    - For models in float32 or float64, the result is bit-identical to the result of a [`Server`][manifoldagg.Server].
      For narrower dtypes, the function rounds the new model in every call, whereas a server stores a float32 master
      model.
    - Tensors that share storage are tied parameters and count as one parameter.

    Args:
        rule: the aggregation rule, such as `FedAsync(0.6)` or `AsyncBezier(threshold=1.0, rate=0.5)`.
        state: the state that the previous call returned. It includes the client states. Pass `None` in the first call.
        current: the server's current model $\Theta^\tau$, where $\tau$ is its version.
        base: the model $\Theta^t$ of version t from which the client started. You must store this model yourself.
        update: the client's model. For a curve, pass the sequence of its control points
            $\varphi_1, \dots, \varphi_n$, which are models. The last control point is the client's model.
        info: further information about the update, such as the client's name and its share of the data.
        staleness: the staleness $\tau - t$ in versions, as a shortcut for `info=UpdateInfo(staleness=...)`.
        space: the space of the models, with buffer policies, manifolds and adapters. The default is
            [`ParameterSpace.of_state_dict(current)`][manifoldagg.manifolds.ParameterSpace.of_state_dict]. In this
            space, entries named `running_mean`, `running_var` or `num_batches_tracked` are buffers. All other
            floating-point entries are parameters of a flat space.
        out: a model in the format of `current`, to which the function writes the new model. It may be another argument
            of the call, such as `current`. The entries of `out` must not share memory with each other. If the function
            raises an error, `out` is unchanged.

    Returns:
        The new model (which is `out` if you pass it), the state for the next call, and the metrics of the step as a
        dictionary of floats. While a buffered rule collects updates, the new model is a copy of `current`. The common
        metrics are:

        - `cosine`: the cosine of the angle between the displacement of the update and the drift of the server's model
          from `base`. It is NaN if one of them is zero.
        - `step`: the position of the new model on the curve of the update.
        - `norm`: the distance between the new model and `current`.
        - `rate`: the step size of the rule, after staleness weights and penalties.
        - `weight`: the weight of the update in the mean of a buffer or cohort.
        - `buffered`: the number of updates in the buffer, including this update.

        A rule reports only the metrics that it computes. The section Metrics of docs/guide/training_loop.md lists all
        metrics and their rules.

    Raises:
        ArgumentError: if an argument is invalid. The message starts with the names of the argument and the tensor. A
            server returns a receipt instead, as
            [Receipts and exceptions](../guide/errors.md#receipts-and-exceptions) explains.
        RuleError: if the rule, or a schedule in the rule, returns an invalid result.

    Warns:
        UserWarning: in any of these cases:

            - The update is probably a difference of models.
            - An integer tensor with several entries changes, but the space has no policy for it.
            - The model contains adapter factors, but you did not pass `space`.

            If a warning filter turns the warning into an error, the call changes nothing.

    Cost: on flat spaces, most rules read and write the tensors in place, so that only the new model needs memory. The
    docstring of each rule states how many words it reads and writes. The function copies some inputs:

    - 8-bit tensors, and tensors that are not contiguous
    - tensors that are not on the device of the first tensor
    - arrays in foreign byte order

    If the update is a difference, the function first computes the client's models. All other rules, and all rules on
    curved spaces, copy every model into a vector.

    Example:
        >>> import numpy as np
        >>> from manifoldagg.federated.rules import FedAsync
        >>> current, base, update = [np.array([1.0])], [np.array([0.0])], [np.array([3.0])]
        >>> new, state, metrics = aggregate(FedAsync(0.5), None, current, base, update)
        >>> new, metrics["norm"]
        ([array([2.])], 1.0)
        >>> _ = aggregate(FedAsync(0.5), state, current, base, update, out=current)
        >>> current
        [array([2.])]
    """
    if staleness is not None:
        shortcut = UpdateInfo(staleness=staleness)
        if info is not DEFAULT_INFO and isinstance(info, UpdateInfo) and info.staleness != staleness:
            given = f"{short_repr(info.staleness)}, as in `info`, or no value, got {short_repr(staleness)}"
            raise ArgumentError(f"staleness: expected {given}")
        info = shortcut if info is DEFAULT_INFO else info
    model, state, metrics, _ = aggregate_step(rule, state, current, base, update, info, space, out)
    return model, state, metrics


def check_rule_needs_models_only(rule: Rule, usage: str = USAGE) -> Rule:
    """Return `rule` if it is a rule whose clients return only models.

    Args:
        rule: the rule to check.
        usage: a call with the arguments in the right order. The message contains it if `rule` is a model.

    Raises:
        ArgumentError: if `rule` is not a rule, or if it requires further tensors or numbers from clients.
    """
    if any(extra_fields(check_rule(rule, usage))):
        raise ArgumentError(f"rule: {type(rule).__name__} requires more than models from clients; use a Server")
    return rule


class _Inputs(NamedTuple):
    """Validated arguments of one call to `aggregate`.

    Attributes:
        plan: the aggregation rule and its options, in the format of the function `step`.
        space: the space of the models.
        given: the current model, the base model and the models of the update, as the caller passed them.
        models: the same models in the layout of the space. The two factors of a LoRA adapter are stacked into one
            tensor. If the update is a difference, the sum of the base model and the difference replaces it.
        points: the same models in the format that the rule reads, which is a list of tensors or a vector.
        name: the name of the argument that contains the client's model, such as `update[1]` for a curve.
    """

    plan: StepPlan
    space: ParameterSpace
    given: ModelsByPrefix
    models: ModelsByPrefix
    points: list[Any]
    name: str


def aggregate_step(
    rule: Rule,
    state: State,
    current: Model,
    base: Model,
    update: Model | Sequence[Model],
    info: UpdateInfo,
    space: ParameterSpace | None,
    out: Model | None = None,
    *,
    difference_option: str = "info=UpdateInfo(difference=True)",
) -> StepResult:
    """Apply one aggregation step as in `aggregate`, and also return whether the step changed the model.

    If the update looks like the difference of two models but `info` does not declare a difference, the function warns.
    The warning recommends `difference_option`, which is the argument that declares a difference.
    """
    if isinstance(space, ParameterSpace) and space.personal:
        current, base, update, out = [_shared(space, model) for model in (current, base, update, out)]
    with torch.no_grad():
        inputs = _read_inputs(rule, current, base, update, info, space)
        plan = inputs.plan
        space = inputs.space
        here = inputs.points[0]
        target = None
        memory = None if plan.uses_tensor_lists else empty_like(here)
        if out is not None:
            target, memory = _open_target(inputs, out, memory)
        kept = AggregateState.of(state)
        before, received = _step_inputs(inputs, info, kept)
        newest = inputs.models[f"{inputs.name}: "]
        start = inputs.models[BASE]
        now = inputs.models[CURRENT]
        hint = None if info.difference else f"pass {difference_option} for a difference"
        warn_about_update(inputs.name, space, newest, start, now, hint)
        try:
            after, outcome = step(plan, before, received, newest, memory, atomic=out is not None)
        except Exception as error:
            _raise_explained(error, inputs, state)
        new = _new_model(inputs, before, after, outcome.model is not None, current, target)
        memories = {name: tree for name, tree in kept.client_states.items() if name != info.client}
        if outcome.client_state is not None:
            memories[info.client] = outcome.client_state
        # Without pending buffers and client states, the plain state of the rule is sufficient for the next call.
        is_plain = not memories and after.pending_buffers is None
        following = after.state if is_plain else AggregateState(after.state, after.pending_buffers, memories)
        return StepResult(new if out is None else out, following, dict(outcome.numbers), outcome.model is not None)


def _shared(space: ParameterSpace, models: Any) -> Any:
    """Remove the personal entries from a state dict, or from each state dict of a sequence."""
    if isinstance(models, Mapping):
        return space.shared(models)
    is_curve = isinstance(models, list | tuple) and all(isinstance(model, Mapping) for model in models)
    return [space.shared(model) for model in models] if is_curve else models


def _read_inputs(
    rule: Any, current: Model, base: Model, update: Model | Sequence[Model], info: UpdateInfo, space: Any
) -> _Inputs:
    """Check the arguments, and convert the models to the format that the rule reads."""
    if not isinstance(info, UpdateInfo):
        raise ArgumentError(f"info: expected an UpdateInfo, got {short_repr(info)}")
    if space is not None:
        check_parameter_space(space)
    reference = CURRENT if space is None else None
    try:
        given: ModelsByPrefix = _named_models(current, base, update)
        if space is None:
            space, has_factors = inferred_space(signature_of(given[CURRENT], CURRENT))
            if has_factors:
                warn_if_adapter_factors("current", given[CURRENT], ADAPTERS_HINT)
    except ArgumentError:
        # If the rule is also invalid, the caller has probably swapped the arguments. This message then says so.
        check_rule_needs_models_only(rule)
        raise
    try:
        plan = _cached_plan(rule, space, space.buffer_policies)
    except TypeError:  # The rule cannot be hashed.
        plan = _make_plan(rule, space, space.buffer_policies)
    if plan.rule is not rule:  # The cache returned the plan of an equal rule.
        plan = replace(plan, rule=rule)
    models = given
    if space.adapters is not None or info.difference or info.scaling is not None:
        models = _models_in_layout(space, given, info)
    lists = plan.uses_tensor_lists
    points: list[Any] = [*(space.layout.tensor_lists(models, reference=reference) if lists else space.points(models))]
    return _Inputs(plan, space, given, models, points, [*given][-1].removesuffix(": "))


@lru_cache(maxsize=64)
def inferred_space(signature: ModelSignature) -> tuple[ParameterSpace, bool]:
    """Infer the parameter space of models from the names, shapes and dtypes of their tensors.

    The function also returns whether the models contain adapter factors, such as the factors of LoRA.
    """
    return ParameterSpace(layout_of(signature)), find_first_factor(signature.names) is not None


def _make_plan(rule: Rule, space: ParameterSpace, buffer_policies: tuple[tuple[str, str], ...]) -> StepPlan:
    # `buffer_policies` is only a key of the cache, because equal spaces may have different policies.
    check_rule_needs_models_only(rule)
    space.layout.check_parameters("current")
    return StepPlan(space, rule, space.policies, buffers_label="update")


_cached_plan = lru_cache(maxsize=16)(_make_plan)


def _named_models(current: Model, base: Model, update: Any) -> ModelsByPrefix:
    points = [update] if isinstance(update, Mapping) or not _is_curve(current, update) else list(update)
    if not points:
        raise ArgumentError("update: expected a model or a sequence of models, got an empty sequence")
    given = {CURRENT: as_tensors("current", current), BASE: as_tensors("base", base)}
    for i, model in enumerate(points):
        name = "update" if len(points) == 1 else f"update[{i}]"
        given[f"{name}: "] = as_tensors(name, model)
    return given


def _is_curve(current: Model, update: Any) -> bool:
    """Return whether the update is a sequence of models in the format of `current`."""
    if not isinstance(update, Sequence):
        return False
    inner = Mapping if isinstance(current, Mapping) else list | tuple
    return len(update) == 0 or isinstance(update[0], inner)


def _models_in_layout(space: ParameterSpace, named: ModelsByPrefix, info: UpdateInfo) -> ModelsByPrefix:
    """Stack the adapter factors of each model, and add the base to differences."""
    if info.scaling is not None and space.adapters is None:
        given = f"got {short_repr(info.scaling)}; {ADAPTERS_HINT}"
        raise ArgumentError(f"scaling: expected None, as the space has no adapters, {given}")
    theirs = [label for label in named if label not in (CURRENT, BASE)]
    models = {
        label: space.stack_factors(model, label, info.scaling if label in theirs else None)
        for label, model in named.items()
    }
    space.state_layout(named[CURRENT], CURRENT)
    if info.difference:
        _check_flat(space)
        space.layout.check_entries(models[BASE], BASE)
        models |= {label: _apply_difference(space.layout, models[BASE], models[label], label) for label in theirs}
    return models


def _check_flat(space: ParameterSpace) -> None:
    """Check that a space supports updates that are differences of models.

    On a curved manifold, the sum of a model and a difference would leave the manifold.

    Raises:
        ArgumentError: if a parameter has a curved manifold.
    """
    for name, curved in space.manifolds:
        if not curved.flat:
            given = f"as {name} is a point of {curved}, which does not support sums of points"
            raise ArgumentError(f"difference: expected False, {given}; pass the model without difference=True")


def _apply_difference(
    layout: Layout, base: Mapping[str, Tensor], difference: Mapping[str, Tensor], label: str
) -> dict[str, Tensor]:
    """Add a difference of models to the base, entry by entry.

    Args:
        layout: the layout of the models.
        base: the base, whose entries must match the layout.
        difference: the difference of the client's model and the base.
        label: the start of error messages.

    Raises:
        StateDictError: if the entries of the difference do not match the layout.
    """
    layout.check_entries(difference, label)
    return {name: _add(base[name], difference[name]) for name in difference}


def _add(start: Tensor, difference: Tensor) -> Tensor:
    """Add a client's difference to a tensor of the start model, in the dtype of this tensor."""
    step = difference.to(start.device)
    if start.dtype is torch.bool:  # Booleans have no difference, so `difference` contains the client's values.
        return step
    signed = SIGNED_DTYPES.get(start.dtype)
    if signed is not None:
        return (start.view(signed) + step.view(signed)).view(start.dtype)
    # The sum has the wider of the two dtypes, so it is rounded only once to the dtype of `start`.
    return (upcast_8bit(start) + upcast_8bit(step)).to(start.dtype)


def _open_target(inputs: _Inputs, out: Model, memory: Any) -> tuple[dict[str, Tensor], Any]:
    """Return the writable tensors of `out` by name, and the memory to which the step writes."""
    plan, space, given, _, points, _ = inputs
    written = space.state_layout(given[CURRENT])
    target = open_for_write(written, out, given[CURRENT])
    in_place = False
    if plan.uses_tensor_lists:
        memory = writable_leaves(space.layout, target)
        in_place = memory[0] is target[space.layout.leaves[0].name]
    if in_place and not space.layout.buffers and not space.layout.aliases:
        check_no_alias(memory, points, space.layout.sizes)
    else:
        check_no_overlap(written, target, given)
    if in_place:
        memory.disjoint_from = tuple(points)  # The step then skips the same check.
    return target, memory


def _step_inputs(inputs: _Inputs, info: UpdateInfo, kept: AggregateState) -> tuple[ModelState, Update]:
    plan, space, _, models, (here, base, *points), _ = inputs
    state = kept.state
    if state is None:
        try:
            state = plan.rule.init(space, here)
        except ArgumentError as error:
            error.args = (rename_argument(str(error), INIT_NAMES, "rule: "), *error.args[1:])
            raise
    else:
        entries = vars(type(plan.rule)).get("state_entries")
        if entries is not None and not (isinstance(state, dict) and entries >= state.keys()):
            raise _foreign_state(plan.rule)
    buffers = PackedBuffers.of(plan.policies, models[CURRENT]) if plan.policies else NO_BUFFERS
    rows = plan.uses_tensor_lists
    update = Update(
        client=info.client,
        base=base if rows else base.to(here.device),
        current=here,
        points=tuple(points) if rows else stack(points).to(here.device),
        staleness=info.staleness,
        weight=info.weight,
        samples=info.samples,
        client_state=kept.client_states.get(info.client),
        share=info.share,
    )
    return ModelState(here, state, buffers, kept.pending_buffers), update


def _raise_explained(error: Exception, inputs: _Inputs, state: State) -> NoReturn:
    """Re-raise an error of a step. The message names the invalid argument of `aggregate`."""
    plan, space, _, models, (here, _, *points), _ = inputs
    own = AggregateState.of(state).state
    # All models have been checked, so a row that does not match belongs to the state. A rule that declares the entries
    # of its state finds all of them in its own state.
    in_state = str(error).startswith("rows[") or (
        isinstance(error, KeyError) and "state_entries" in vars(type(plan.rule))
    )
    if state is not None and (in_state or not has_structure(own, plan.rule.init(space, here))):
        raise _foreign_state(plan.rule) from error
    if isinstance(error, ArgumentError):
        if plan.uses_tensor_lists:
            space.layout.check_values(models)
        names = STEP_NAMES | ({"points[0]": "update"} if len(points) == 1 else {})
        error.args = (rename_argument(str(error), names),)
    raise error


def _foreign_state(rule: Rule) -> ArgumentError:
    return ArgumentError(f"state: expected a state that {type(rule).__name__} returned for such models, or None")


def _new_model(
    inputs: _Inputs, before: ModelState, after: ModelState, has_moved: bool, current: Model, target: Any
) -> Any:
    """Return the new model in the format of `current`, or write it to `target`."""
    plan, space, given, _, _, _ = inputs
    new: Mapping[str, Tensor] = given[CURRENT]
    if not has_moved:
        if target is None:
            written = space.state_layout(new)
            new = written.to_state_dict([new[leaf.name].clone() for leaf in written.leaves], before.buffers.to_dict())
    elif not plan.uses_tensor_lists:
        new = space._state_dict(after.current, after.buffers)
    else:
        buffers: Mapping[str, Tensor] = {}
        if plan.policies:
            buffers = after.buffers if target is not None else after.buffers.to_dict()
        new = space.layout.to_state_dict(after.current, buffers)
    if target is None:
        return convert_like(current, new, given[CURRENT])
    copy_into(target, new)
    return None
