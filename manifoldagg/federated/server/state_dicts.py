"""Conversion between the server's points and the state dicts of modules and clients."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from manifoldagg._validation import is_finite
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.model_state import ModelState
from manifoldagg.federated.server.input_warnings import warn_if_difference
from manifoldagg.federated.server.records import PendingTicket
from manifoldagg.federated.server.state import ServerState
from manifoldagg.federated.server.validation import PayloadSchema, as_str_dict, check_names, require_dense
from manifoldagg.federated.types import Payload, Rule, check_parameter_space, extra_fields
from manifoldagg.kernels.alloc import stack
from manifoldagg.manifolds import LowRank, ParameterSpace
from manifoldagg.manifolds.layout import EXTRA_STATE
from manifoldagg.manifolds.lora.factors import combine_stacks
from manifoldagg.manifolds.lora.scaling import Scaling

__all__ = ["StateDictConverter"]


class StateDictConverter:
    """Converter between the points of a server and the state dicts of modules and clients.

    Args:
        schema: the schema of the server's payloads.
        rule: the aggregation rule.
    """

    def __init__(self, schema: PayloadSchema, rule: Rule) -> None:
        self._schema = schema
        self._rule = rule

    def state_dict(self, model_state: ModelState) -> dict[str, Tensor]:
        """Return the current model and its buffers.

        Raises:
            ArgumentError: if the space is not a `ParameterSpace`.
        """
        return check_parameter_space(self._schema.space).state_dict(model_state.current, model_state.buffers or None)

    def spec(self) -> dict[str, Any]:
        """Return the specification of the space.

        Raises:
            ArgumentError: if the space is not a `ParameterSpace`, or a leaf has a space of another package.
        """
        return check_parameter_space(self._schema.space).spec()

    def payload_loader(
        self, model: Any, samples: Any, scaling: Scaling | None, state: ServerState
    ) -> Callable[[PendingTicket], Payload]:
        """Return a function that converts a client's state dicts to a payload, for the ticket that it is given.

        Args:
            model: one or more state dicts, or a function that returns them, as in `Server.receive_model`.
            samples: the number of samples that the client trained on.
            scaling: the scaling of the client's adapters, if it differs from that of the server.
            state: the state of the server.

        Raises:
            ArgumentError: if the space is not a `ParameterSpace`, or the rule requires more than models.
        """
        if any(extra_fields(self._rule)):
            raise ArgumentError(
                f"rule: {type(self._rule).__name__} requires more than models from clients; use `receive`"
            )
        check_parameter_space(self._schema.space)

        def load(ticket: PendingTicket) -> Payload:
            if isinstance(model, torch.nn.Module):  # a module can be called too
                raise ArgumentError(f"model: expected a state dict, got {type(model).__name__}: pass its state_dict()")
            key = None if ticket.custom_start else ticket.base_key
            load_base = partial(state.store.load, key)
            models = model() if callable(model) else model
            return _payload(self._schema, models, samples, state.model_state.current, load_base, scaling)

        return load

    @staticmethod
    def field_names(model: Any) -> dict[str, str]:
        """Return the fields of a payload, and the argument that contains them if a client returns state dicts."""
        names = {"points": "model", "buffers": "model"}
        return names if isinstance(model, list | tuple) else {**names, "points[0]": "model"}


def _payload(
    schema: PayloadSchema,
    model: Any,
    samples: Any,
    current: Tensor,
    load_base: Callable[[], Tensor | None],
    scaling: Scaling | None,
) -> Payload:
    """Build the payload of a client's state dicts.

    Args:
        schema: of the server's payloads.
        model: a state dict, or a sequence of them: the control points of a curve, with the client's model last. The
            last one contains the buffers. Entries that the server does not request may be missing and are not read.
        samples: the number of samples that the client trained on.
        current: the server's model (P,), for the check that the update is not a difference of models.
        load_base: returns the model (P,) that the client started from, or `None` if it started from another model. A
            state dict of a narrower dtype has rounded the base. The function restores the rounding error, because
            otherwise every update would contain it.
        scaling: the scaling of the client's adapters, if it differs from that of the server.

    Raises:
        ArgumentError: naming the model, and the tensor in it, that is invalid.

    Warns:
        UserWarning: if the model looks like a difference of models.
    """
    whole = check_parameter_space(schema.space)
    space = _without_buffers(whole)
    given = {"model": model} if isinstance(model, Mapping) else _label_sequence(model)
    most = schema.update_limits.max_points
    if not 1 <= len(given) <= most:
        raise ArgumentError(f"model: expected a state dict, or from 1 to {most} of them, got {len(given)}")
    leaves = space.entries
    models = {}
    for label, state in given.items():
        found = {name: x for name, x in as_str_dict(label, state).items() if name.rpartition(".")[2] != EXTRA_STATE}
        found = dict(whole.shared(found))
        check_names(label, found, leaves, whole.entries)
        own = {name: _require_tensor(f"{label}: {name}", found[name]) for name in leaves}
        models[f"{label}: "] = space.stack_factors(own, f"{label}: ", scaling)
    if schema.accepts_nonfinite and not all(is_finite(x) for own in models.values() for x in own.values()):
        # A rejection would reveal the update: the rule replaces it by a zero update.
        nonfinite = torch.full((len(models), *space.shape), math.nan, dtype=schema.dtype, device=schema.device)
        return Payload(nonfinite, samples, buffers={entry.name: found[entry.name] for entry in schema.buffers})
    points = [point.to(schema.device) for point in space.points(models)]
    narrow = any(entry.dtype.itemsize < schema.dtype.itemsize for entry in leaves.values())
    start = load_base() if narrow else None
    if start is not None:
        points = _restore_rounding(space, points, start.to(points[0]))
    pieces = [space.gauge_free_norms(_split_by_leaf(space, point)) for point in (points[-1], current)]
    buffers = {entry.name: found[entry.name] for entry in schema.buffers if entry.name in found}
    hint = "return the model, which is the base plus the difference"
    warn_if_difference(label, space.layout, *pieces, buffers=buffers.items(), hint=hint)
    return Payload(stack(points), samples, buffers=buffers)


def _restore_rounding(space: ParameterSpace, points: list[Tensor], start: Tensor) -> list[Tensor]:
    """Restore the bits of flat leaves and adapters of the start that the dtypes of a state dict have rounded away."""
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


def _split_by_leaf(space: ParameterSpace, point: Tensor) -> dict[str, Tensor]:
    """Return the numbers of each leaf."""
    pieces = point.split(space.layout.sizes)
    return {leaf.name: piece for leaf, piece in zip(space.layout.leaves, pieces, strict=True)}


def _label_sequence(models: Any) -> dict[str, Any]:
    if type(models) not in (list, tuple):  # another kind may say something else each time that it is read
        raise ArgumentError(f"model: expected a state dict or a sequence of them, got {type(models).__name__}")
    return {f"model[{i}]": model for i, model in enumerate(models)}


def _require_tensor(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise ArgumentError(f"{name}: expected a tensor, got {type(value).__name__}")
    return require_dense(name, value)


@lru_cache(maxsize=64)
def _without_buffers(space: ParameterSpace) -> ParameterSpace:
    """Return the same geometry without buffers."""
    return ParameterSpace(replace(space.layout, buffers=()), space.manifolds, space.adapters)
