"""The beginning: a server of the model that a run starts from, or of the checkpoint from which it goes on."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from manifoldagg.errors import ArgumentError, ManifoldAggError
from manifoldagg.federated import Every, Rule, Server
from manifoldagg.federated.repeatable import seeded_model
from manifoldagg.integrations.flower.records import state_dict
from manifoldagg.manifolds import ParameterSpace

__all__ = ["server_of"]

Model = nn.Module | Callable[[], nn.Module] | None


def server_of(
    rule: Rule, model: Model, arrays: ArrayRecord, *, resume: bool, checkpoint: Every | None, **options: Any
) -> Server:
    """A server that starts from arrays, or goes on from its checkpoint.

    Args:
        rule: of the server.
        model: what of the arrays is a parameter; `None`: what their names and dtypes tell.
        arrays: the whole state dict.
        resume: from the checkpoint.
        checkpoint: of the server.
        **options: that the server takes by keyword.

    Raises:
        ArgumentError: if the arrays do not fit the model.
        CheckpointError: if what is there is none, or of another model or rule.
    """
    try:
        state = state_dict(arrays)
        if model is None:
            space = ParameterSpace.of_state_dict(state)
            if not resume:
                point = space.point(state)
                return Server(space, rule, point, carried=space.carried(state), checkpoint=checkpoint, **options)
        else:
            module = _loaded(model, state)
            if not resume:
                return Server.of(module, rule, checkpoint=checkpoint, **options)
            space = ParameterSpace.of(module)
    except ManifoldAggError as error:
        raise ArgumentError(f"initial_arrays: {error}") from error
    assert checkpoint is not None
    # What becomes of the buffers is in the file.
    options.pop("buffers", None)
    return Server.resume(checkpoint.path, space, rule, checkpoint=checkpoint, **options)


def _loaded(model: nn.Module | Callable[[], nn.Module], state: Mapping[str, Tensor]) -> nn.Module:
    """A module of our own with these tensors."""
    module = copy.deepcopy(model) if isinstance(model, nn.Module) else seeded_model(model, 0)
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"model: expected a function that makes a module, it made {type(module).__name__}")
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
