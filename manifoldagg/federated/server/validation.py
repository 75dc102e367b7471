"""Validation of rules, initial models and payloads."""

import heapq
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from numbers import Integral, Real
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from manifoldagg._validation import (
    check_choice,
    check_finite,
    check_shape,
    closest_match,
    one_line,
    renamed_arguments,
    short_repr,
)
from manifoldagg.averaging.karcher import check_model
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.limits import UpdateLimits
from manifoldagg.federated.types import (
    Averaging,
    Payload,
    Point,
    Rule,
    State,
    accepts_tensor_lists,
    check_rule_protocol,
    extra_fields,
)
from manifoldagg.kernels.operands import needs_autograd_path
from manifoldagg.manifolds import Manifold, ParameterSpace, check_point
from manifoldagg.manifolds.layout import MASTER_DTYPES, Entry
from manifoldagg.manifolds.manifold import check_is_manifold
from manifoldagg.manifolds.wrapper_prefixes import wrapper_hint

__all__ = [
    "PayloadSchema",
    "as_str_dict",
    "check_average_space",
    "check_names",
    "check_rule",
    "check_samples",
    "check_start",
    "initial_state",
    "raise_nonfinite",
    "require_dense",
    "validate_payload",
]

MAX_LISTED = 5
"""The largest number of invalid names that an error message lists."""
FIELDS = attrgetter("points", "samples", "tensors", "numbers", "buffers", "base")
IS_FUNCTORCH_WRAPPED = torch._C._functorch.is_functorch_wrapped_tensor

FLOWER_RULES = {
    "FedAvgM": "Momentum",
    "FedMedian": "Median",
    "FedProx": "FedAvg",
    "FedTrimmedAvg": "TrimmedMean",
    "MultiKrum": "Krum",
}
"""A mapping from Flower strategies to rules with other names."""
T = TypeVar("T")


def check_rule(rule: Rule, usage: str = "") -> Rule:
    """Return `rule` if it implements the protocol [`Rule`][manifoldagg.federated.Rule].

    Args:
        rule: the rule to check.
        usage: a call with the arguments in the right order. The message contains it if `rule` is a model.

    Raises:
        ArgumentError: if `rule` is not a rule. If `rule` is a string or a Flower strategy, the message suggests the
            closest rule.
    """
    given: object = rule
    if isinstance(given, str):
        from manifoldagg.federated import rules  # This import is slow, and only the error message needs it.

        near = closest_match(given, rules.__all__)
        hint = "" if near is None else f"; did you mean rules.{near}(...)?"
        raise ArgumentError(f"rule: expected a rule of manifoldagg.federated.rules, got {short_repr(given)}{hint}")
    _check_no_flower_strategy(given)
    is_model = isinstance(given, torch.nn.Module | Mapping | Sequence | Tensor | np.ndarray | Manifold)
    return check_rule_protocol(rule, f"write {usage}" if usage and is_model else "")


def _check_no_flower_strategy(given: object) -> None:
    """Raise `ArgumentError` if the value is a Flower strategy instead of an aggregation rule.

    The function compares class names, because Flower may not be installed.
    """
    kind = given if isinstance(given, type) else type(given)
    theirs = [base.__name__ for base in kind.__mro__ if base.__module__.partition(".")[0] == "flwr"]
    if "Strategy" not in theirs:
        return
    from manifoldagg.federated import rules

    # Only the most derived Flower class identifies the strategy, because most strategies derive from Flower's FedAvg.
    name = FLOWER_RULES.get(theirs[0], theirs[0])
    is_known = name in rules.__all__
    instead = f"manifoldagg.federated.rules.{name}" if is_known else "a rule from the table in docs/guide/rules.md"
    raise ArgumentError(
        f"rule: expected a rule of manifoldagg.federated.rules, got Flower's strategy {kind.__name__}; use {instead}"
    )


@dataclass(frozen=True)
class PayloadSchema:
    """Schema of the payloads that a server accepts.

    Args:
        space: the space of the points.
        dtype: the dtype of the points.
        device: the device of the server.
        tensors: the number of points in each additional tensor, by name. `None` means one point without a batch
            dimension.
        numbers: the names of the additional numbers.
        buffers: the names, shapes and dtypes of the buffers that a client returns.
        update_limits: the limits on the sample count and the number of control points.
        self_checked: the fields whose finiteness the rule checks during the step. The server skips its own check.
        accepts_nonfinite: whether the rule accepts points that are not finite.
    """

    space: Manifold
    dtype: torch.dtype
    device: torch.device
    tensors: Mapping[str, int | None]
    numbers: tuple[str, ...]
    buffers: tuple[Entry, ...]
    update_limits: UpdateLimits
    self_checked: frozenset[str]
    accepts_nonfinite: bool = False

    @classmethod
    def of(
        cls, space: Manifold, rule: Rule, start: Tensor, buffers: tuple[Entry, ...], update_limits: UpdateLimits
    ) -> "PayloadSchema":
        """Return the schema of the payloads that a rule requires.

        The models in a payload must have the dtype of the initial model `start`. The server moves them to the device of
        `start`.
        """
        tensors, numbers = extra_fields(rule)
        names = frozenset(getattr(rule, "self_checked", ())) if space.flat else frozenset()
        checked = {f"tensors: {name}" for name in tensors if name in names}
        # If a point is not finite, its norm in the Gram matrix is not finite either, so the rule detects it.
        if "points" in names or accepts_tensor_lists(rule, space):
            checked |= {"points", "base"}
        private = bool(getattr(rule, "is_private", False))
        return cls(
            space, start.dtype, start.device, tensors, numbers, buffers, update_limits, frozenset(checked), private
        )

    def check_values(self, field: str, tensor: Tensor, *, is_point: bool = True) -> Tensor:
        """Check the values of a tensor in a client's update, and return the tensor.

        - If the tensor contains points of a curved manifold, they must be on the manifold.
        - Otherwise, the values must be finite. The method skips this check if the aggregation rule performs it.

        Args:
            field: the name of the tensor in the update.
            tensor: the tensor.
            is_point: whether the tensor contains models.

        Raises:
            ArgumentError: if the values are invalid. The message starts with `field`.
        """
        if is_point and not self.space.flat:
            return check_point(self.space, tensor, name=field)
        return tensor if field in self.self_checked else check_finite(field, tensor)

    @cached_property
    def axes(self) -> list[int | None]:
        """The shape of one point, in which `None` accepts any size."""
        return self.space.axes

    @cached_property
    def buffer_labels(self) -> dict[str, str]:
        """The label of each buffer in error messages, by the name of the buffer."""
        return {entry.name: f"buffers: {entry.name}" for entry in self.buffers}


def validate_payload(schema: PayloadSchema, payload: Payload, *, requires_base: bool) -> Payload:
    """Validate a payload from an untrusted client, and convert it to plain numbers and plain tensors.

    The conversion is necessary, because the methods of an untrusted object may raise exceptions, or return a different
    value on each call. The tensors of the result are on the device of the server. A tensor that needs no conversion is
    not copied.

    Args:
        schema: the schema of the payloads.
        payload: the payload of the client.
        requires_base: whether the payload must contain the base, because the server has not stored it.

    Raises:
        ArgumentError: if a field is invalid. The message starts with the name of the first invalid field.
    """
    if not issubclass(type(payload), Payload):
        raise ArgumentError(f"payload: expected a Payload, got {type(payload).__name__}")
    given, samples, tensors, numbers, buffers, base = _call_untrusted("payload", partial(FIELDS, payload))
    points = _check_vectors(schema, "points", given, None)
    # The number of points is checked before their values, because reading the values of too many points is slow.
    count = points.shape[0]
    most = schema.update_limits.max_points
    if count == 0:
        listed = ", ".join(map(str, ("n", *schema.space.shape)))
        raise ArgumentError(f"points: expected ({listed}) with n >= 1, got {tuple(points.shape)}")
    if count > most:
        raise ArgumentError(f"points: expected at most {most} control points, got {count}")
    if requires_base != (base is not None):
        expected = "the point that the client started from, which the server has not stored"
        raise ArgumentError(f"base: expected {expected if requires_base else 'no base, as the server has stored it'}")
    points = schema.check_values("points", points)
    samples = check_samples(samples, schema.update_limits.max_samples)
    further: dict[str, Any] = {}
    is_empty = type(tensors) is type(numbers) is type(buffers) is dict and not (tensors or numbers or buffers)
    if not is_empty or schema.tensors or schema.numbers or schema.buffers:
        further["tensors"] = _check_tensors(schema, tensors)
        further["numbers"] = _check_numbers(schema, numbers)
        further["buffers"] = _check_buffers(schema, buffers)
    if requires_base:
        base = schema.check_values("base", _check_vectors(schema, "base", base))
    return Payload(points, samples, base=base, **further)


def raise_nonfinite(schema: PayloadSchema, payload: Payload) -> None:
    """Explain why a step has failed, if the reason is a self-checked field that is not finite.

    Raises:
        ArgumentError: if such a field is not finite. The message starts with the name of the field.
    """
    fields = {"points": payload.points, "base": payload.base}
    fields |= {f"tensors: {name}": tensor for name, tensor in payload.tensors.items()}
    for field, tensor in fields.items():
        if field in schema.self_checked and tensor is not None:
            check_finite(field, tensor)


def check_start(space: Manifold, start: Tensor) -> Tensor:
    """Validate the initial model of a server and return a copy.

    Raises:
        ArgumentError: if the model is empty, is not finite, is not on the manifold, or has a dtype in which the server
            cannot store models.
    """
    for name, kind, value in (("space", "Manifold", space), ("start", "point", start)):
        if isinstance(value, Rule):
            rule = type(value).__name__
            raise ArgumentError(f"{name}: expected a {kind}, got {rule}; write Server(space, rule, start)")
    check_is_manifold(space, "Server.of(model, rule)")
    given: object = start
    if isinstance(given, torch.nn.Module | Mapping):
        hint = "write Server.of(model, rule), or space.point(model)"
        raise ArgumentError(f"start: expected a point, got {short_repr(given)}; {hint}")
    check_finite("start", check_shape("start", start, *space.axes))
    if not start.numel():
        raise ArgumentError("start: expected a model with parameters, got an empty model")
    dtypes = (space.dtype,) if isinstance(space, ParameterSpace) else MASTER_DTYPES
    check_choice("start: dtype", start.dtype, dtypes)
    if not space.flat:
        check_point(space, start, name="start")
    return start.detach().clone(memory_format=torch.contiguous_format)


def check_average_space(averaging: Averaging | None, space: Manifold, start: Tensor) -> None:
    """Check that an average over the models of a server has a space that contains these models.

    Args:
        averaging: the average. If it has no attribute `space`, the function does not check it.
        space: the space of the server.
        start: the initial model of the server.

    Raises:
        ArgumentError: if `start` is not a point of the average's space.
    """
    own = getattr(averaging, "space", None)
    if not isinstance(own, Manifold) or own == space:
        return
    try:
        check_model(own, start, "start")
    except ArgumentError as error:
        expected = f"an average over models in {short_repr(space)}, got one over models in {short_repr(own)}"
        raise ArgumentError(f"averaging: expected {expected}") from error


def initial_state(rule: Rule, space: Manifold, start: Point, names: Mapping[str, str]) -> State:
    """Return the state of a rule before the first step.

    Args:
        rule: the rule.
        space: the space of the models.
        start: the initial model.
        names: a mapping from the arguments `space` and `start` to the arguments of the caller, for error messages.

    Raises:
        ArgumentError: if the rule does not support the space.
    """
    with renamed_arguments(names, "rule: "):
        return rule.init(space, start)


def _call_untrusted(name: str, function: Callable[[], T]) -> T:
    """Call a function that may run the code of an untrusted object, and convert its exceptions to `ArgumentError`."""
    try:
        return function()
    except Exception as error:
        raise ArgumentError(f"{name}: expected a readable value; its code raised {type(error).__name__}") from error


def _check_vectors(schema: PayloadSchema, name: str, value: Any, *batch: int | None) -> Tensor:
    """Check the shape and the dtype of a tensor of points, and move it to the device of the server.

    The shape is (*batch, *axes), where `axes` is the shape of one point. The tensor must be dense.
    """
    # `type` is safe, whereas the `__class__` of an untrusted object may be wrong or raise an exception.
    tensor = require_dense(name, value) if issubclass(type(value), Tensor) else value
    check_shape(name, tensor, *batch, *schema.axes)
    if tensor.dtype != schema.dtype:
        raise ArgumentError(f"{name}: expected {schema.dtype}, got {tensor.dtype}")
    return tensor.to(schema.device)


def _plain_tensor(name: str, tensor: Tensor) -> Tensor:
    """Convert a tensor to the class `torch.Tensor` without a gradient."""
    if type(tensor) is not Tensor:
        # A subclass with its own dispatch, such as a fake or distributed tensor, may have no readable memory.
        if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            raise ArgumentError(f"{name}: expected a plain tensor with values, got a {type(tensor).__name__}")
        with torch._C.DisableTorchFunctionSubclass():
            tensor = Tensor.as_subclass(tensor, Tensor)
    if IS_FUNCTORCH_WRAPPED(tensor):
        raise ArgumentError(f"{name}: expected a tensor with values, got a tensor of a functorch transform")
    return tensor.detach() if tensor.requires_grad else tensor


def check_samples(value: Any, max_samples: int) -> int:
    """Return a sample count as a plain integer.

    Raises:
        ArgumentError: if the count is not an integer from 1 to `max_samples`.
    """
    number = value if type(value) is int else _call_untrusted("samples", partial(_as_int, value))
    if number is None or not 1 <= number <= max_samples:
        raise ArgumentError(f"samples: expected an integer from 1 to {max_samples}, got {short_repr(value)}")
    return number


def _as_int(value: Any) -> int | None:
    """Convert an untrusted value to a plain integer. If it is not an integer, return `None`."""
    if isinstance(value, bool) or not isinstance(value, int | Integral):
        return None
    # `operator.index` may return a subclass of int; `int.__index__` returns a plain integer.
    number = int.__index__(operator.index(value))
    # The methods `__int__` and `__index__` of an untrusted class may return different integers.
    return number if int(value) == value.__index__() == number else None


def _check_tensors(schema: PayloadSchema, given: Any) -> dict[str, Tensor]:
    given = _check_mapping("tensors", given, schema.tensors)
    found = {}
    for name, count in schema.tensors.items():
        field = f"tensors: {name}"
        vectors = _check_vectors(schema, field, given[name], *([] if count is None else [count]))
        found[name] = schema.check_values(field, vectors, is_point=False)
    return found


def _check_numbers(schema: PayloadSchema, given: Any) -> dict[str, float]:
    given = _check_mapping("numbers", given, schema.numbers)
    found = {}
    for name in schema.numbers:
        value = given[name]
        # `check_number` would propagate exceptions in the code of the number.
        number = value if type(value) is float else _call_untrusted(f"numbers: {name}", partial(_as_float, value))
        if not math.isfinite(number):
            raise ArgumentError(f"numbers: {name}: expected a finite number, got {short_repr(value)}")
        found[name] = number
    return found


def _as_float(value: Any) -> float:
    """Convert an untrusted value to a float.

    If the number is too large, return infinity. If the value is not a real number, return NaN.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _check_buffers(schema: PayloadSchema, given: Any) -> dict[str, Tensor]:
    given = _check_mapping("buffers", given, schema.buffer_labels)
    # Models have hundreds of buffers. One check of all plain tensors is faster than one check for each tensor.
    is_tracked = needs_autograd_path([value for value in given.values() if type(value) is Tensor])
    found = {}
    for entry, label in zip(schema.buffers, schema.buffer_labels.values(), strict=True):
        value = given[entry.name]
        is_tensor = issubclass(type(value), Tensor)
        if is_tensor:
            value = require_dense(label, value, untracked=type(value) is Tensor and not is_tracked)
        if not is_tensor or value.dtype != entry.dtype:
            what = value.dtype if is_tensor else type(value).__name__
            raise ArgumentError(f"{label}: expected a tensor of {entry.dtype}, got {what}")
        if value.shape != entry.shape:
            raise ArgumentError(f"{label}: expected shape {entry.shape}, got {tuple(value.shape)}")
        found[entry.name] = value if value.device == schema.device else value.to(schema.device)
    return found


def require_dense(name: str, value: Tensor, *, untracked: bool = False) -> Tensor:
    """Return an untrusted tensor as a plain, dense tensor with values.

    Args:
        name: the name of the tensor in error messages.
        value: the tensor.
        untracked: whether the caller has checked that neither autograd nor a functorch transform tracks the tensor.

    Raises:
        ArgumentError: if the tensor is sparse or nested, or if it has no values, such as a meta tensor.
    """
    is_plain = type(value) is Tensor and not IS_FUNCTORCH_WRAPPED(value) and not value.requires_grad
    tensor = value if is_plain else _plain_tensor(name, value)
    if not untracked and needs_autograd_path([tensor]):
        raise ArgumentError(f"{name}: expected a tensor with values, got a tensor of a functorch transform")
    if tensor.is_nested:
        raise ArgumentError(f"{name}: expected a dense tensor with values, got a nested tensor")
    if tensor.layout is not torch.strided or tensor.is_meta:
        what = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}"
        raise ArgumentError(f"{name}: expected a dense tensor with values, got a tensor {what}")
    if tensor.is_contiguous():
        last = tensor.storage_offset() + tensor.numel() - 1
    else:
        last = tensor.storage_offset() + sum((n - 1) * by for n, by in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() and tensor.untyped_storage().nbytes() < (last + 1) * tensor.itemsize:
        raise ArgumentError(f"{name}: expected a dense tensor with values, got a tensor whose storage was freed")
    return tensor


def as_str_dict(name: str, mapping: Any) -> dict[str, Any]:
    """Convert an untrusted mapping to a dict whose keys are plain strings.

    Raises:
        ArgumentError: if the value is not a mapping, or if a key is not a string.
    """
    if not issubclass(type(mapping), Mapping):
        raise ArgumentError(f"{name}: expected a mapping from names, got {type(mapping).__name__}")
    found: dict[Any, Any] = mapping if type(mapping) is dict else _call_untrusted(name, partial(dict, mapping))
    if set(map(type, found)) <= {str}:
        return found
    others = [key for key in found if not isinstance(key, str)]
    if others:
        raise ArgumentError(f"{name}: unknown: {_join_names(others)}")
    # Keys of a subclass of `str` are converted to plain strings, because a subclass may override methods.
    return {str.__str__(key): value for key, value in found.items()}


def _check_mapping(name: str, value: Any, expected: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Convert an untrusted mapping to a dict, and check that it has the expected keys.

    Raises:
        ArgumentError: if the value is not a mapping, or if a key is missing or unknown.
    """
    found = as_str_dict(name, value)
    if found or expected:
        check_names(name, found, expected, expected)
    return found


def check_names(name: str, found: Collection[str], expected: Collection[str], known: Collection[str]) -> None:
    """Check the names of a mapping.

    Args:
        name: the name of the mapping in error messages.
        found: the names in the mapping.
        expected: the names that must be in the mapping.
        known: the names that may be in the mapping.

    Raises:
        ArgumentError: if an expected name is missing, or if a name is not known. The message lists these names.
    """
    names = set(found)
    for problem, odd in (("missing", set(expected) - names), ("unknown", names - set(known))):
        if odd:
            raise ArgumentError(f"{name}: {problem}: {_join_names(odd)}{wrapper_hint(names, expected)}")


def _join_names(names: Collection[object]) -> str:
    further = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(heapq.nsmallest(MAX_LISTED, map(_short_name, names))) + further


def _short_name(name: Any) -> str:
    return one_line(str.__str__(name), 40) if issubclass(type(name), str) else short_repr(name, 40)
