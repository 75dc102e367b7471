"""Construction of the server from the initial model of a run or from a checkpoint."""

import copy
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from manifoldagg._validation import closest_match, short_repr
from manifoldagg.errors import ArgumentError, ManifoldAggError
from manifoldagg.federated import Durability, InitialModel, Rule, Server, ServerLimits
from manifoldagg.federated.clients.determinism import seeded_model
from manifoldagg.federated.rules import FedAsync
from manifoldagg.federated.server.events import Callback
from manifoldagg.integrations.flower.records import state_dict
from manifoldagg.manifolds import Flat, ParameterSpace
from manifoldagg.manifolds.buffer_policies import BufferPolicy

__all__ = ["ModelSource", "build_server", "check_callbacks", "check_options"]

ModelSource: TypeAlias = nn.Module | Callable[[], nn.Module] | None
"""A module, or a function that returns a module. With `None`, names and dtypes of the arrays define the parameters."""
CONCURRENCY_HINT = "use concurrency for the number of tasks in flight"
FLOWER_EQUIVALENTS = {
    **dict.fromkeys(
        ("fraction_train", "min_train_nodes"), f"{CONCURRENCY_HINT}, updates for the number of updates per round"
    ),
    **dict.fromkeys(("num_rounds", "train_config", "evaluate_config", "evaluate_fn"), "pass it to start"),
    "max_in_flight": CONCURRENCY_HINT,
}
"""Hints for options that this strategy lacks, although Flower's strategies or `Server` have them."""


def check_callbacks(callbacks: Any) -> tuple[Callback, ...]:
    """Check event callbacks, and return them as a tuple.

    Args:
        callbacks: the value of the option `on_event`.

    Raises:
        ArgumentError: if `callbacks` is not a list or tuple of functions.
    """
    hint = "; write on_event=[callback]" if callable(callbacks) else ""
    if not isinstance(callbacks, list | tuple):
        raise ArgumentError(f"on_event: expected a list of functions, got {short_repr(callbacks)}{hint}")
    for callback in callbacks:
        if not callable(callback):
            raise ArgumentError(f"on_event: expected a list of functions, got {short_repr(callback)} in it")
    return tuple(callbacks)


def check_options(options: Mapping[str, Any], strategy_options: Collection[str]) -> None:
    """Check the names and values of the options that the strategy passes to the server.

    Values that depend on the model are not checked.

    Args:
        options: the options by name.
        strategy_options: the names of the options of the strategy itself.

    Raises:
        ArgumentError: if an option is unknown or has an invalid value. For an unknown option, the message lists the
            known options.
    """
    parameters = inspect.signature(Server).parameters.values()
    known = [
        p.name
        for p in parameters
        if p.kind is p.KEYWORD_ONLY and p.name not in {*FLOWER_EQUIVALENTS, *strategy_options}
    ]
    for name in options:
        if name not in known:
            listed = [*strategy_options, *known]
            near = closest_match(name, listed)
            meant = FLOWER_EQUIVALENTS.get(name, "" if near is None else f"did you mean {near}?")
            raise ArgumentError(f"{name}: expected one of the options {', '.join(listed)}{meant and f': {meant}'}")
    if ServerLimits.of(options.get("limits", ServerLimits())).max_in_flight is not None:
        raise ArgumentError(f"limits: max_in_flight: expected None; {CONCURRENCY_HINT}")
    Server(Flat(1), FedAsync(), torch.zeros(1, dtype=torch.float64), **options)


def build_server(
    rule: Rule,
    model: ModelSource,
    arrays: ArrayRecord,
    *,
    buffer_policy: BufferPolicy,
    durability: Durability,
    resume: bool,
    replace: bool,
    personal: Sequence[str] = (),
    **options: Any,
) -> Server:
    """Build a server from initial arrays, or resume the server from a checkpoint or a journal.

    Args:
        rule: the aggregation rule.
        model: the module that determines which arrays are parameters. With `None`, the names and dtypes of the arrays
            determine which arrays are parameters.
        arrays: the complete state dict of the initial model.
        buffer_policy: the policies of the buffers.
        durability: the checkpoints and the journal.
        resume: whether to resume the server if a checkpoint or a journal exists.
        replace: whether the rule and the clock may differ from those in the checkpoint.
        personal: names or glob patterns of the parameters and buffers that remain on each node.
        **options: keyword arguments of the server.

    Raises:
        ArgumentError: if an argument is invalid, such as arrays that do not match the model.
        CheckpointError: if the checkpoint is invalid, or belongs to another model or rule.
    """
    module = None if model is None else _make_module(model)
    try:
        state = state_dict(arrays)
        source = state if module is None else _load_state(module, state)
        if module is None:
            space = ParameterSpace.of_state_dict(state, personal=personal)
        else:
            space = ParameterSpace.of(module, personal=personal)
        start = space.point(source)
        carried = space.buffers(source)
    except ManifoldAggError as error:
        raise ArgumentError(f"initial_arrays: {str(error).removeprefix('source: ')}") from error
    space.layout.check_parameters("initial_arrays" if module is None else "model", module)
    if module is not None:  # The buffer policy of the space leaves frozen parameters unchanged.
        buffer_policy = dict(ParameterSpace.of(module, buffer_policy=buffer_policy, personal=personal).buffer_policies)
    initial = InitialModel(start, carried, buffer_policy)
    if resume and durability.checkpoint is not None:
        path = durability.checkpoint.path
        return Server.open(path, space, rule, initial, durability=durability, replace=replace, **options)
    return Server(space, rule, initial, durability=durability, **options)


def _make_module(model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    module = copy.deepcopy(model) if isinstance(model, nn.Module) else seeded_model(model, 0)
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"model: expected a function that returns a module, got {type(module).__name__}")
    return module


def _load_state(module: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    own = module.state_dict()
    for problem, odd in (("missing", own.keys() - state.keys()), ("unknown", state.keys() - own.keys())):
        if odd:
            raise ArgumentError(f"{problem}: {', '.join(sorted(odd)[:5])}")
    for name, tensor in own.items():
        if isinstance(tensor, Tensor) and tensor.shape != state[name].shape:
            raise ArgumentError(f"{name}: expected shape {tuple(tensor.shape)}, got {tuple(state[name].shape)}")
    with torch.no_grad():
        module.load_state_dict(state)
    return module
