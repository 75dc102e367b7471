"""The implementation of `aggregate`: one step on models in their own formats, read in place."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manifoldagg._validation import check_choice, check_count, check_number, rename_argument, short_repr
from manifoldagg.errors import ArgumentError, StateDictError
from manifoldagg.federated.buffers import (
    BufferPolicy,
    PackedBuffers,
    PendingBuffers,
    check_buffer_policy,
    resolve_policies,
)
from manifoldagg.federated.model_state import ModelState
from manifoldagg.federated.pytrees import has_structure, upcast_8bit
from manifoldagg.federated.server.input_warnings import (
    warn_if_adapter_factors,
    warn_if_difference,
    warn_if_integers_change,
    warn_if_not_share,
)
from manifoldagg.federated.server.validation import check_rule, initial_state
from manifoldagg.federated.step import StepPlan, step
from manifoldagg.federated.types import ClientState, Rule, State, Update, accepts_tensor_lists, extra_fields
from manifoldagg.federated.weights import check_client
from manifoldagg.kernels.alloc import empty_like, stack
from manifoldagg.kernels.operands import check_no_alias
from manifoldagg.manifolds import ParameterSpace
from manifoldagg.manifolds.assign import Assignment
from manifoldagg.manifolds.layout import Layout
from manifoldagg.manifolds.lora.scaling import Scaling
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
    "UpdateInfo",
    "aggregate_step",
    "check_adapter_options",
    "check_rule_needs_models_only",
    "infer_space",
]

SIGNED_DTYPES = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Integers that torch does not add, and those whose sums have the same bits."""
CURRENT, BASE = "current: ", "base: "
INIT_NAMES = {"space": "current", "start": "current"}
STEP_NAMES = {"points": "update", "space": "current"}
"""The arguments of `aggregate` in place of those of a rule's methods."""


@dataclass(frozen=True)
class AggregateState:
    """A rule's state, with the buffers and client states that a server stores.

    Attributes:
        state: the rule's.
        pending_buffers: of the updates that wait for the model to move.
        client_states: what is kept for each client.
    """

    state: State
    pending_buffers: PendingBuffers | None = None
    client_states: Mapping[Hashable, ClientState] = field(default_factory=dict)


@dataclass(frozen=True)
class UpdateInfo:
    """The server's information about an update, beside its models.

    Attributes:
        client: who trained.
        staleness: in versions.
        weight: the client's share of the data.
        samples: that it trained on.
        share: as in an update: its data in the server's own measure.
    """

    client: Hashable
    staleness: int
    weight: float
    samples: int
    share: float | None = None


class StepResult(NamedTuple):
    """The result of a step: the new model, the next state, the metrics, and whether the model has moved."""

    model: Any
    state: State
    numbers: dict[str, float]
    has_moved: bool


def check_rule_needs_models_only(rule: Rule, usage: str) -> Rule:
    """Check that a rule needs only models from clients.

    Args:
        rule: to check.
        usage: as in `check_rule`.

    Raises:
        ArgumentError: if it needs more, or is not a rule.
    """
    if any(extra_fields(check_rule(rule, usage))):
        raise ArgumentError(f"rule: {type(rule).__name__} requires more than models from clients; use a Server")
    return rule


def aggregate_step(
    rule: Rule,
    state: State,
    current: Model,
    base: Model,
    update: Model | Sequence[Model],
    info: UpdateInfo,
    *,
    buffer_policy: BufferPolicy = (),
    manifolds: Assignment | None = None,
    difference: bool = False,
    adapters: bool | None = None,
    scaling: Scaling = 1.0,
    out: Model | None = None,
) -> StepResult:
    """Apply one step as `aggregate` does, and return whether it has moved the model."""
    with torch.no_grad():
        check_rule_needs_models_only(rule, "aggregate(rule, state, current, base, update)")
        _check_info(info)
        check_choice("difference", difference, (True, False))
        given = _named_models(current, base, update)
        buffer_policy = check_buffer_policy(buffer_policy)
        ours, theirs = scaling if isinstance(scaling, tuple) and len(scaling) == 2 else (scaling, None)
        space = infer_space("current", given[CURRENT], manifolds, buffer_policy, adapters, ours)
        if theirs is not None and not adapters:
            raise ArgumentError("scaling: expected 1 without adapters=True, got two values")
        layout = space.layout
        models = _models_in_layout(space, given, theirs, difference)
        # What is written is what came, not what is made of it.
        written = Layout.of_state_dict(given[CURRENT], list(buffer_policy)) if adapters else layout
        target = None if out is None else open_for_write(written, out, given[CURRENT])
        rows = accepts_tensor_lists(rule, space)
        chosen = resolve_policies(layout.buffers, buffer_policy) if buffer_policy else _default_policies(layout)
        layout.check_parameters("current")
        read: list[Any] = [
            *(layout.tensor_lists(models, reference="" if adapters else CURRENT) if rows else space.points(models))
        ]
        here, then, *brought = read
        label, newest = [*models.items()][-1]
        name = label.removesuffix(": ")
        if not difference:
            warn_if_difference(
                name,
                layout,
                space.gauge_free_norms(newest),
                space.gauge_free_norms(models[BASE]),
                buffers=((key, newest[key]) for key, policy in chosen.items() if policy != "leave"),
                hint="pass difference=True for a difference",
            )
        warn_if_integers_change(name, layout, newest, models[CURRENT], buffer_policy)
        kept = state if isinstance(state, AggregateState) else AggregateState(state)
        before = ModelState(
            current=here,
            state=initial_state(rule, space, here, INIT_NAMES) if kept.state is None else kept.state,
            buffers=PackedBuffers.of(chosen, models[CURRENT]),
            pending_buffers=kept.pending_buffers,
        )
        taken = Update(
            client=info.client,
            base=then if rows else then.to(here.device),
            current=here,
            points=tuple(brought) if rows else stack(brought).to(here.device),
            staleness=info.staleness,
            weight=info.weight,
            samples=info.samples,
            client_state=kept.client_states.get(info.client),
            share=info.share,
        )
        blank: Any = empty_like(here) if not rows else None if target is None else writable_leaves(layout, target)
        if target is not None:
            there = rows and not adapters and blank[0] is target[layout.leaves[0].name]
            if there and not layout.buffers and not layout.aliases:
                check_no_alias(blank, read, layout.sizes)
            else:
                check_no_overlap(written, target, given)
            if there:
                blank.disjoint_from = tuple(read)  # the step need not ask again
        try:
            after, outcome = step(StepPlan(space, rule, chosen, buffers_label="update"), before, taken, newest, blank)
        except Exception as error:
            # Of the models every row is known to fit: one that does not is kept in the state.
            if state is not None and (
                str(error).startswith("rows[") or not has_structure(kept.state, rule.init(space, here))
            ):
                expected = f"what {type(rule).__name__} returned for such models, or None"
                raise ArgumentError(f"state: expected {expected}") from error
            if not isinstance(error, ArgumentError):
                raise
            if rows:
                layout.check_values(models)
            names = STEP_NAMES | ({"points[0]": "update"} if len(brought) == 1 else {})
            error.args = (rename_argument(str(error), names),)
            raise
        new: Mapping[str, Tensor]
        if outcome.model is not None:
            named = layout.to_state_dict if rows else space._state_dict
            new = named(after.current, after.buffers.to_dict() if rows and target is None else after.buffers)
        elif target is None:
            same = [given[CURRENT][leaf.name].clone() for leaf in written.leaves]
            new = written.to_state_dict(same, before.buffers.to_dict())
        else:
            new = given[CURRENT]
        if target is not None:
            copy_into(target, new)
        returned = convert_like(current, new, given[CURRENT]) if out is None else out
        held = _next_state(kept, after, info.client, outcome.client_state)
        return StepResult(returned, held, dict(outcome.numbers), outcome.model is not None)


def _check_info(info: UpdateInfo) -> None:
    check_count("staleness", info.staleness, at_least=0)
    check_count("samples", info.samples)
    check_number("weight", info.weight, above=0)
    check_client(info.client)
    warn_if_not_share("weight", info.weight)


def _named_models(current: Model, base: Model, update: Model | Sequence[Model]) -> ModelsByPrefix:
    """Return the named tensors of each model, the client's last."""
    points = list(update) if _is_curve(current, update) else [update]
    if not points:
        raise ArgumentError("update: expected a model or a sequence of models, got an empty sequence")
    given = {CURRENT: as_tensors("current", current), BASE: as_tensors("base", base)}
    for i, model in enumerate(points):
        name = "update" if len(points) == 1 else f"update[{i}]"
        given[f"{name}: "] = as_tensors(name, model)
    return given


def _models_in_layout(
    space: ParameterSpace, named: ModelsByPrefix, scaling: Scaling | None, difference: bool
) -> ModelsByPrefix:
    """Return the models in the layout's leaves: products of adapter factors, and models instead of differences."""
    theirs = [label for label in named if label not in (CURRENT, BASE)]
    models = {
        label: space.stack_factors(model, label, scaling if label in theirs else None) for label, model in named.items()
    }
    if difference:
        _check_flat(space)
        models |= {label: _apply_difference(space.layout, models[BASE], models[label], label) for label in theirs}
    return models


@lru_cache(maxsize=64)
def _default_policies(layout: Layout) -> dict[str, str]:
    """Return the buffer policies of entries without a policy, resolved once for hundreds of entries."""
    return resolve_policies(layout.buffers, ())


def _next_state(
    before: AggregateState, after: ModelState, client: Hashable, client_state: ClientState | None
) -> State | AggregateState:
    """Return the stored state for the next step: the rule's state alone if there is nothing beside it."""
    memories = {name: tree for name, tree in before.client_states.items() if name != client}
    if client_state is not None:
        memories[client] = client_state
    return (
        AggregateState(after.state, after.pending_buffers, memories)
        if memories or after.pending_buffers is not None
        else after.state
    )


def check_adapter_options(adapters: bool | None, scaling: Scaling) -> None:
    """Check the types of `adapters` and `scaling`, and that `scaling` has adapters to scale.

    Raises:
        ArgumentError: naming the argument that is invalid.
    """
    if adapters is not None:
        check_choice("adapters", adapters, (True, False))
    if not adapters and not (isinstance(scaling, int | float) and not isinstance(scaling, bool) and scaling == 1):
        raise ArgumentError(f"scaling: expected 1 without adapters=True, got {short_repr(scaling)}")


def infer_space(
    name: str,
    model: Mapping[str, Tensor],
    manifolds: Assignment | None,
    buffer_policy: BufferPolicy,
    adapters: bool | None,
    scaling: Scaling,
) -> ParameterSpace:
    """Return the space of a model's tensors.

    Raises:
        ArgumentError: as `ParameterSpace.of_state_dict`. A message about a tensor names the model too.

    Warns:
        UserWarning: if `adapters` is `None` and the model has factors of adapters.
    """
    check_adapter_options(adapters, scaling)
    kept = {"buffers": list(buffer_policy), "adapters": bool(adapters), "scaling": scaling}
    try:
        space = ParameterSpace.of_state_dict(model, manifolds, **kept)
    except StateDictError as error:
        raise StateDictError(f"{name}: {str(error).removeprefix('source: ')}") from None
    if adapters is None:
        warn_if_adapter_factors(name, model)
    return space


def _is_curve(current: Model, update: Model | Sequence[Model]) -> bool:
    """Return whether the update is a sequence of models of the kind of `current`."""
    if isinstance(update, Mapping) or not isinstance(update, Sequence):
        return False
    inner = Mapping if isinstance(current, Mapping) else list | tuple
    return len(update) == 0 or isinstance(update[0], inner)


def _check_flat(space: ParameterSpace) -> None:
    """Check that a point and a difference of points can be added.

    Raises:
        ArgumentError: naming a leaf where they have none.
    """
    for name, curved in space.manifolds:
        if not curved.flat:
            raise ArgumentError(f"difference: expected models, as {name} lives on {curved}, where points have no sums")


def _apply_difference(
    layout: Layout, base: Mapping[str, Tensor], difference: Mapping[str, Tensor], label: str
) -> dict[str, Tensor]:
    """Return the model at this difference from the base.

    Raises:
        ArgumentError: if one of them is not of this layout.
    """
    layout.check_entries(base, "base: ")
    layout.check_entries(difference, label)
    return {name: _add(base[name], difference[name]) for name in difference}


def _add(start: Tensor, difference: Tensor) -> Tensor:
    step = difference.to(start.device)
    if start.dtype is torch.bool:
        return step
    signed = SIGNED_DTYPES.get(start.dtype)
    if signed is not None:
        return (start.view(signed) + step.view(signed)).view(start.dtype)
    return (upcast_8bit(start) + upcast_8bit(step)).to(start.dtype)
