"""Setup of the server: from the initial model of a run, or from a checkpoint."""

import copy
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from manifoldagg._validation import closest_match
from manifoldagg.errors import ArgumentError, ManifoldAggError
from manifoldagg.federated import CheckpointPolicy, Rule, Server
from manifoldagg.federated.buffers import check_buffer_policy
from manifoldagg.federated.clients.determinism import seeded_model
from manifoldagg.federated.rules import FedAsync
from manifoldagg.federated.server.durability.journal import Journal
from manifoldagg.federated.server.state_dicts import freeze_policies
from manifoldagg.integrations.flower.records import state_dict
from manifoldagg.manifolds import Flat, ParameterSpace

__all__ = ["build_server", "check_options"]

ModelSource = nn.Module | Callable[[], nn.Module] | None
CONCURRENCY_HINT = "use concurrency for the number of tasks in flight"
FLOWER_EQUIVALENTS = {
    **dict.fromkeys(
        ("fraction_train", "min_train_nodes"), f"{CONCURRENCY_HINT}, updates for the number of updates per round"
    ),
    **dict.fromkeys(("num_rounds", "train_config", "evaluate_config", "evaluate_fn"), "start takes it"),
    "max_in_flight": CONCURRENCY_HINT,
    "buffers": "the arrays have them",
}
"""What there is in place of options of Flower's strategies, and of a server."""


def check_options(options: Mapping[str, Any], strategy_options: Collection[str]) -> None:
    """Check options for a server: their names, and all values that can be checked without a model.

    Args:
        options: by name.
        strategy_options: the names of options that the strategy has beside them.

    Raises:
        ArgumentError: naming an option that there is not, with what there is, or one whose value does not fit.
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
    alone = dict(options)
    check_buffer_policy(alone.pop("buffer_policy", ()))
    if (journal := alone.pop("journal", None)) is not None:
        Journal.of(journal)
    Server(Flat(1), FedAsync(), torch.zeros(1, dtype=torch.float64), **alone)


def build_server(
    rule: Rule,
    model: ModelSource,
    arrays: ArrayRecord,
    *,
    resume: bool,
    replace: bool,
    checkpoint: CheckpointPolicy | None,
    **options: Any,
) -> Server:
    """Build a server from initial arrays, or resume it from its checkpoint.

    Args:
        rule: of the server.
        model: what of the arrays is a parameter; `None`: what their names and dtypes tell.
        arrays: the whole state dict.
        resume: from the checkpoint.
        replace: take another rule, or another clock, than its own.
        checkpoint: of the server.
        **options: that the server takes by keyword.

    Raises:
        ArgumentError: naming the arrays, if they do not fit the model, or what else does not.
        CheckpointError: if what is there is none, or of another model or rule.
    """
    module = None if model is None else _make_module(model)
    try:
        state = state_dict(arrays)
        source = state if module is None else _load_state(module, state)
        space = ParameterSpace.of_state_dict(state) if module is None else ParameterSpace.of(module)
        if not resume:
            start, carried = space.point(source), space.buffers(source)
    except ManifoldAggError as error:
        raise ArgumentError(f"initial_arrays: {error}") from error
    space.layout.check_parameters("initial_arrays" if module is None else "model")
    buffers = options.pop("buffer_policy", ())
    if resume:
        assert checkpoint is not None
        # What becomes of the buffers is in the file.
        return Server.resume(checkpoint.path, space, rule, replace=replace, checkpoint=checkpoint, **options)
    buffers = buffers if module is None else freeze_policies(module, buffers)
    return Server(space, rule, start, buffers=carried, buffer_policy=buffers, checkpoint=checkpoint, **options)


def _make_module(model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """A module of our own."""
    module = copy.deepcopy(model) if isinstance(model, nn.Module) else seeded_model(model, 0)
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"model: expected a function that makes a module, it made {type(module).__name__}")
    return module


def _load_state(module: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """The module, with these tensors."""
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
