"""Conversion of modules, state dicts and encoded payloads to spaces, initial models and payloads."""

import glob
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from manifoldagg._validation import check_choice, check_instance, is_finite, renamed_arguments, short_repr
from manifoldagg.averaging.checkpoints import CheckpointFiles, FilePool, open_checkpoint
from manifoldagg.errors import ArgumentError, CheckpointError, StateDictError
from manifoldagg.federated.clients.compression import Codec, check_codec, decode_payload
from manifoldagg.federated.server.input_warnings import warn_if_adapter_factors, warn_if_difference
from manifoldagg.federated.server.options import InitialModel
from manifoldagg.federated.server.state import PendingTicket, ServerState
from manifoldagg.federated.server.validation import PayloadSchema, as_str_dict, check_names, require_dense
from manifoldagg.federated.types import Payload, Rule, check_parameter_space, extra_fields
from manifoldagg.kernels.alloc import stack
from manifoldagg.manifolds import LowRank, Manifold, ParameterSpace
from manifoldagg.manifolds.assign import Assignment
from manifoldagg.manifolds.buffer_policies import BufferPolicy
from manifoldagg.manifolds.layout import EXTRA_STATE, Layout, tensors_of
from manifoldagg.manifolds.lora.factors import combine_stacks
from manifoldagg.manifolds.lora.scaling import Scaling
from manifoldagg.manifolds.parameters import check_unscaled

__all__ = [
    "MODEL_NAMES",
    "check_no_model_options",
    "decoding_loader",
    "field_names",
    "initial_model",
    "map_paths",
    "model_space",
    "payload_loader",
    "resumed_space",
]

MODEL_NAMES = {"space": "model", "start": "model", "source": "model"}
"""A mapping from argument names of checks to the argument `model`, which error messages contain instead."""


def model_space(
    model: torch.nn.Module | Mapping[str, Tensor],
    buffer_policy: BufferPolicy,
    manifolds: Assignment | None,
    adapters: bool | None,
    scaling: Scaling,
    personal: Sequence[str] = (),
    *,
    is_resumed: bool = False,
) -> tuple[ParameterSpace, BufferPolicy]:
    """Return the parameter space of a model, and the aggregation policies of its buffers.

    The arguments are as in `Server.of`. If `is_resumed` is true, error messages refer to `Server.resume` instead of
    `Server.of`.
    """
    kinds = "a torch.nn.Module or a state dict"
    usage = "Server.of(model, rule)"
    if is_resumed:
        kinds = "a torch.nn.Module, a state dict or a Manifold"
        usage = "Server.resume(path, model, rule)"
    given: object = model
    if not isinstance(given, torch.nn.Module | Mapping):
        hint = "pass a dict from names to tensors" if isinstance(given, list | tuple) else f"write {usage}"
        raise ArgumentError(f"model: expected {kinds}, got {short_repr(given)}; {hint}")
    with renamed_arguments(MODEL_NAMES):
        try:
            if isinstance(model, torch.nn.Module):
                _check_module_options(adapters, scaling)
                space = ParameterSpace.of(model, manifolds, buffer_policy=buffer_policy, personal=personal)
            else:
                space = ParameterSpace.of_state_dict(
                    tensors_of(model),
                    manifolds,
                    buffer_policy=buffer_policy,
                    personal=personal,
                    adapters=False if adapters is None else adapters,
                    scaling=scaling,
                )
        except StateDictError as error:
            raise StateDictError(f"model: {str(error).removeprefix('source: ')}") from None
    if adapters is None and not isinstance(model, torch.nn.Module):
        warn_if_adapter_factors("model", model, "pass adapters=True for their products, or adapters=False")
    space.layout.check_parameters("model", model)
    return space, dict(space.buffer_policies)


def _check_module_options(adapters: bool | None, scaling: Scaling) -> None:
    """Check that the options for adapters are not set, because they apply only to state dicts."""
    if adapters is not None and check_choice("adapters", adapters, (True, False)):
        raise ArgumentError(
            "adapters: expected False for a module, got True; pass the state dict "
            "that get_peft_model_state_dict of PEFT returns"
        )
    check_unscaled(scaling)


def initial_model(
    space: ParameterSpace, model: torch.nn.Module | Mapping[str, Tensor], policies: BufferPolicy
) -> InitialModel:
    """Return the initial model of a server with copies of the parameters and buffers of a model."""
    with renamed_arguments(MODEL_NAMES):
        (point,) = space.points({"model: ": space.stack_factors(tensors_of(model))})
        return InitialModel(point, space.buffers(model), policies)


def resumed_space(
    model: torch.nn.Module | Mapping[str, Tensor] | Manifold,
    saved_policies: Mapping[str, str],
    buffer_policy: BufferPolicy | None,
    manifolds: Assignment | None,
    adapters: bool | None,
    scaling: Scaling,
) -> tuple[Manifold, BufferPolicy | None]:
    """Return the parameter space of a resumed server, and the policies that replace its saved buffer policies.

    A buffer policy defines how the server aggregates a buffer of the model, such as a running mean.

    Args:
        model: the model or the space, as in `Server.resume`.
        saved_policies: the policies in the checkpoint, by the name of the buffer.
        buffer_policy: the new policies, as in `Server.resume`. `None` keeps the saved policies.
        manifolds: the manifolds of the parameters, as in `Server.resume`.
        adapters: whether the model contains adapters, as in `Server.resume`.
        scaling: the scaling of the adapters, as in `Server.resume`.

    Returns:
        The space, and the new policies. The policies are `None` if the server keeps the saved policies.
    """
    if isinstance(model, Manifold):
        check_no_model_options(manifolds, adapters, scaling)
        return model, buffer_policy
    # Saved names are escaped, because they may contain special characters of glob patterns. Names that the model lacks
    # are omitted, so that the error message compares the spaces.
    names = [name for name in saved_policies if name in model] if isinstance(model, Mapping) else []
    saved = [glob.escape(name) for name in names]
    policies = saved if buffer_policy is None else buffer_policy
    space, policies = model_space(model, policies, manifolds, adapters, scaling, is_resumed=True)
    return space, None if buffer_policy is None else policies


def check_no_model_options(manifolds: Assignment | None, adapters: bool | None, scaling: Scaling) -> None:
    """Check that the options `manifolds`, `adapters` and `scaling` have their defaults.

    If a caller passes a space instead of a model, it must not set these options, because the space already contains
    their values.

    Raises:
        ArgumentError: if an option has another value.
    """
    for name, value in (("manifolds", manifolds), ("adapters", adapters), ("scaling", scaling)):
        default = 1.0 if name == "scaling" else None
        if not (value is default or (type(value) is float and value == default)):
            raise ArgumentError(f"{name}: expected {default} if model is a space, got {short_repr(value)}")


def payload_loader(
    schema: PayloadSchema, rule: Rule, model: Any, samples: Any, scaling: Scaling | None, state: ServerState
) -> Callable[[PendingTicket], Payload]:
    """Return a function from a ticket to the payload with the client's model.

    Args:
        schema: the schema of the server's payloads.
        rule: the rule of the server.
        model: the client's model, as in `Server.receive_model`.
        samples: the number of samples that the client trained on.
        scaling: the scaling of the client's adapters, as in `Server.receive_model`.
        state: the state of the server, which contains the bases of the tickets.

    Raises:
        ArgumentError: if the space is not a `ParameterSpace`, or if the rule requires more than models from clients.
    """
    if any(extra_fields(rule)):
        raise ArgumentError(f"rule: {type(rule).__name__} requires more than models from clients; use `receive`")
    check_parameter_space(schema.space)

    def load(ticket: PendingTicket) -> Payload:
        if isinstance(model, torch.nn.Module):  # This check comes first, because a module is callable.
            raise ArgumentError(f"model: expected a state dict, got {type(model).__name__}: pass its state_dict()")
        return _payload(schema, model() if callable(model) else model, samples, scaling, ticket, state)

    return load


def decoding_loader(
    codec: Codec, payload: Payload | Callable[[], Payload], space: Manifold, state: ServerState
) -> Callable[[PendingTicket], Payload]:
    """Return a function from a ticket to the decoded payload of the client.

    Args:
        codec: the codec with which `ErrorFeedback.encode_payload` has encoded the payload.
        payload: the encoded payload, or a function that returns it, as in `Server.receive`.
        space: the space of the server.
        state: the state of the server, which contains the bases of the tickets.

    Raises:
        ArgumentError: if `codec` is not a codec, or if the space has curved leaves, on which points and displacements
            cannot be added.
    """
    check_codec(codec)
    if not (space.flat or space.ambient):
        raise ArgumentError(
            f"codec: expected None, as displacements on {space} cannot be added; send uncompressed models"
        )

    def load(ticket: PendingTicket) -> Payload:
        if ticket.base_key is None or ticket.custom_start:
            raise ArgumentError("codec: expected None, as the client did not start from a model that the server stores")
        given: Any = payload
        given = check_instance("payload", given if isinstance(given, Payload) else given(), Payload)
        return decode_payload(codec, given, state.store.load(ticket.base_key))

    return load


def map_paths(label: str, models: Any, layout: Layout) -> tuple[Any, list[CheckpointFiles]]:
    """Replace each checkpoint path by a state dict whose tensors are mapped into memory.

    A checkpoint may contain a tied parameter under only one of its names, because safetensors files do not store ties.

    Args:
        label: the name of the argument in error messages.
        models: a model, a path, or a sequence of them.
        layout: the layout of the models, which contains the names of tied parameters.

    Returns:
        The models, and the checkpoints of the paths. After the models have been read, the caller must check that these
        checkpoints are unchanged.
    """
    if isinstance(models, str | os.PathLike):
        try:
            checkpoint = open_checkpoint(label, models, FilePool())
            return layout.with_tied_names(checkpoint.state_dict()), [checkpoint]
        except CheckpointError as error:  # Its message starts with the path, which would be the field of a rejection.
            raise CheckpointError(f"{label}: {error}") from None
    if type(models) in (list, tuple) and any(isinstance(model, str | os.PathLike) for model in models):
        mapped = [map_paths(f"{label}[{i}]", model, layout) for i, model in enumerate(models)]
        return [model for model, _ in mapped], [checkpoint for _, found in mapped for checkpoint in found]
    return models, []


def field_names(model: Any) -> dict[str, str]:
    """Return a mapping from the fields of a payload to the argument `model`, for error messages."""
    names = {"points": "model", "buffers": "model"}
    return names if isinstance(model, list | tuple) else {**names, "points[0]": "model"}


def _payload(
    schema: PayloadSchema,
    model: Any,
    samples: Any,
    scaling: Scaling | None,
    ticket: PendingTicket,
    state: ServerState,
) -> Payload:
    """Build a payload, which is the content of an update, from the state dict of a client.

    Args:
        schema: the schema of the server's payloads.
        model: a state dict or its path. For a curve, a sequence of state dicts or paths, of which the last one contains
            the buffers.
        samples: the number of samples that the client trained on.
        scaling: the scaling of the client's adapters, if it differs from the scaling of the server.
        ticket: the ticket of the client.
        state: the state of the server, which contains the current model and the base of the ticket.
    """
    whole = check_parameter_space(schema.space)
    space = _without_buffers(whole)
    model, checkpoints = map_paths("model", model, whole.layout)
    if isinstance(model, Mapping):
        given = {"model": model}
    elif type(model) in (list, tuple):
        given = {f"model[{i}]": part for i, part in enumerate(model)}
    else:  # Other sequences are rejected, because they may return other items in each iteration.
        raise ArgumentError(f"model: expected a state dict, a path or a sequence of them, got {type(model).__name__}")
    most = schema.update_limits.max_points
    if not 1 <= len(given) <= most:
        raise ArgumentError(f"model: expected from 1 to {most} state dicts, got {len(given)}")
    leaves = space.entries
    models = {}
    for label, part in given.items():
        found = {name: x for name, x in as_str_dict(label, part).items() if name.rpartition(".")[2] != EXTRA_STATE}
        found = dict(whole.shared(found))
        check_names(label, found, leaves, whole.entries)
        own = {name: _require_tensor(f"{label}: {name}", found[name]) for name in leaves}
        models[f"{label}: "] = space.stack_factors(own, f"{label}: ", scaling)
    if schema.accepts_nonfinite and not all(is_finite(x) for own in models.values() for x in own.values()):
        # A private rule replaces such an update by zero, because a rejection would reveal information about the client.
        nonfinite = torch.full((len(models), *space.shape), math.nan, dtype=schema.dtype, device=schema.device)
        return Payload(nonfinite, samples, buffers={entry.name: found[entry.name] for entry in schema.buffers})
    points = [point.to(schema.device) for point in space.points(models)]
    # If the client's dtype is narrower than the dtype of the server, the client has trained from a rounded start model.
    # Without a correction, every update would contain the rounding error.
    narrow = any(entry.dtype.itemsize < schema.dtype.itemsize for entry in leaves.values())
    start = state.store.load(ticket.base_key) if narrow and not ticket.custom_start else None
    if start is not None:
        points = _restore_rounding(space, points, start.to(points[0]))
    names = [leaf.name for leaf in space.layout.leaves]
    split = (
        dict(zip(names, x.split(space.layout.sizes), strict=True)) for x in (points[-1], state.model_state.current)
    )
    buffers = {entry.name: found[entry.name] for entry in schema.buffers if entry.name in found}
    hint = "return the model, which is the base plus the difference"
    warn_if_difference(label, space, *split, buffers=buffers.items(), hint=hint)
    # From here on, the payload must not depend on files, which another process may change. The points are copies.
    if checkpoints:
        buffers = {name: x.clone() for name, x in buffers.items()}
    for checkpoint in checkpoints:
        checkpoint.check_unchanged("model: ")
    return Payload(stack(points), samples, buffers=buffers)


def _restore_rounding(space: ParameterSpace, points: list[Tensor], start: Tensor) -> list[Tensor]:
    """Correct a client's control points for the rounding of the model from which it started."""
    # The client's dtype is narrower than the dtype of the server. The correction is the exact start model minus the
    # rounded one. It applies to flat and low-rank parameters, and other curved parameters remain unchanged.
    (began,) = space.points({"": space.stack_factors(space.state_dict(start))})
    curved = dict(space.manifolds)
    found = []
    for point in points:
        back = point.clone()
        pieces = (x.split(space.layout.sizes) for x in (back, point, start, began))
        for leaf, place, mine, was, rounded in zip(space.layout.leaves, *pieces, strict=True):
            where = curved.get(leaf.name)
            if where is None:
                place.copy_(mine + (was - rounded))
            elif isinstance(where, LowRank):
                terms = [x.view(where.shape) for x in (mine, was, rounded)]
                whole = where.project(combine_stacks([1.0, 1.0, -1.0], terms, where.m))
                place.copy_(whole.flatten())
        found.append(back)
    return found


def _require_tensor(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise ArgumentError(f"{name}: expected a tensor, got {type(value).__name__}")
    return require_dense(name, value)


@lru_cache(maxsize=64)
def _without_buffers(space: ParameterSpace) -> ParameterSpace:
    return ParameterSpace(replace(space.layout, buffers=()), space.manifolds, space.adapters)
