"""Conversion of models to dicts of named tensors that share the memory of the models, and conversion back to models.

A model is a list or a dict of tensors or NumPy arrays, such as a state dict.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manifoldagg._validation import short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.kernels import TensorList
from manifoldagg.kernels.operands import check_no_alias
from manifoldagg.manifolds.layout import EXTRA_STATE, Layout

__all__ = [
    "Array",
    "Model",
    "ModelsByPrefix",
    "as_tensors",
    "check_no_overlap",
    "convert_like",
    "copy_into",
    "open_for_write",
    "writable_leaves",
]

TENSOR_TYPES = {Tensor, torch.nn.Parameter}
"""The types of tensors that need no conversion."""
_is_cpu = attrgetter("is_cpu")

Array = Tensor | np.ndarray | np.generic
Model = Mapping[Any, Array] | Sequence[Array]
"""A state dict, or a list of arrays."""
ModelsByPrefix = Mapping[str, Mapping[str, Tensor]]
"""The tensors of several models. Error messages about a model start with its key."""


def as_tensors(name: str, model: Any, *, writable: bool = False) -> dict[str, Tensor]:
    """Return the entries of a model as tensors that share its memory.

    Args:
        name: the name of the argument in error messages.
        model: a state dict, or a list of tensors or arrays.
        writable: whether all arrays must be writable.

    Raises:
        ArgumentError: if an entry is not a tensor or a numeric array, or two names are equal as strings.
    """
    entries = model if isinstance(model, Mapping) else dict(_entries(name, model))
    keys = [*entries] if set(map(type, entries)) <= {str} else [*map(str, entries)]
    tensors = dict(zip(keys, entries.values(), strict=True))
    if len(tensors) < len(keys):
        duplicate = next(key for key in keys if keys.count(key) > 1)
        raise ArgumentError(f"{name}: expected names that differ as strings, got {short_repr(duplicate)} twice")
    # One search in the joined names is faster than a test of each name.
    if EXTRA_STATE in "".join(keys):
        tensors = {key: x for key, x in tensors.items() if key.rpartition(".")[2] != EXTRA_STATE}
    if not set(map(type, tensors.values())) <= TENSOR_TYPES:
        for key, array in tensors.items():
            if isinstance(array, np.ndarray | np.generic):
                tensors[key] = _tensor_over(f"{name}: {key}", array, writable)
            elif not isinstance(array, Tensor):
                raise ArgumentError(f"{name}: {key}: expected a tensor or an array, got {type(array).__name__}")
    return tensors


def _tensor_over(name: str, array: Any, writable: bool) -> Tensor:
    """Return a tensor that shares the memory of a NumPy array.

    If torch cannot represent the array, for example because of a negative stride, the result is a copy.

    Raises:
        ArgumentError: if the array is not numeric, or `writable` is true and the tensor could not write to the array.
    """
    # torch supports neither a foreign byte order nor negative strides.
    needs_copy = not (isinstance(array, np.ndarray) and array.dtype.isnative and min(array.strides, default=0) >= 0)
    if writable and (needs_copy or not array.flags.writeable):
        raise ArgumentError(f"{name}: expected a writable array in native byte order with nonnegative strides")
    try:
        if needs_copy:
            return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=")))
        # torch has no read-only tensors, and warns if an array is read-only. The wrapper avoids the warning.
        return torch.from_numpy(array if array.flags.writeable else np.asarray(_ReadOnlyArray(array)))
    except (TypeError, ValueError):
        raise ArgumentError(f"{name}: expected a numeric array, got dtype {array.dtype}") from None


def open_for_write(layout: Layout, out: Model, current: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Check that the tensors of the model `out` can be overwritten, and return them.

    The function does not check whether they share memory with other tensors. `check_no_overlap` checks this.

    Raises:
        ArgumentError: if the tensors do not match the layout or the devices of `current`, or are not writable.
    """
    target = as_tensors("out", out, writable=True)
    layout.check_entries(target, "out: ")
    if not (all(map(_is_cpu, target.values())) and all(map(_is_cpu, current.values()))):
        for name, tensor in target.items():
            if tensor.device != current[name].device:
                raise ArgumentError(f"out: {name}: expected device {current[name].device}, got {tensor.device}")
    # These tests of all tensors are fast. `_check_writable` finds the invalid tensor. It accepts an empty tensor, which
    # also has a null data pointer.
    predicates = (Tensor.is_inference, Tensor.is_conj, Tensor.is_neg)
    if any(any(map(is_set, target.values())) for is_set in predicates) or not all(
        map(Tensor.data_ptr, target.values())
    ):
        _check_writable(target)
    return target


def _check_writable(target: Mapping[str, Tensor]) -> None:
    """Check that torch and the kernels can write to each of several tensors.

    Raises:
        ArgumentError: if a tensor is not writable. The message contains the name of the first such tensor.
    """
    for name, tensor in target.items():
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise ArgumentError(f"out: {name}: expected a normal tensor, got one that was created in inference mode")
        if tensor.is_conj() or tensor.is_neg():
            raise ArgumentError(f"out: {name}: expected a writable tensor, got a conjugated or negated view")
        if tensor.numel() and not tensor.data_ptr():
            raise ArgumentError(f"out: {name}: expected a tensor with memory, got one with a null data pointer")


def check_no_overlap(layout: Layout, target: Mapping[str, Tensor], models: ModelsByPrefix) -> None:
    """Check that the tensors of `target`, which will be overwritten, do not share memory with other tensors.

    There are two exceptions. A tensor of `target` may share its memory with tensors of the same name in `models`. The
    tensors of a tied parameter may share their memory with each other.

    Args:
        layout: the layout of all models.
        target: the tensors that will be overwritten, by name.
        models: the models that are read at the same time.

    Raises:
        ArgumentError: if tensors share memory in any other way.
    """
    names = [entry.name for entry in (*layout.leaves, *layout.buffers)]
    # Tied names may share memory. If they do not, both are written and must be checked.
    names += [alias for alias, name in layout.aliases if target[alias].data_ptr() != target[name].data_ptr()]
    written = TensorList([target[name] for name in names])
    read = [TensorList([model[name] for name in names]) for model in models.values()]
    # Adapters of other ranks are copied before the first write, so they cannot overlap.
    check_no_alias(written, [row for row in read if row.lengths == written.lengths], written.lengths)


def writable_leaves(layout: Layout, target: Mapping[str, Tensor]) -> TensorList:
    """Return tensors to which the kernels can write new values for the parameters of a model.

    If possible, these tensors are the parameters themselves. Otherwise, they are uninitialised tensors of the same
    shapes.
    """
    row = TensorList([target[leaf.name] for leaf in layout.leaves])
    if row.is_contiguous and len(row.devices) == 1 and all(dtype.itemsize > 1 for dtype in row.dtypes):
        return row
    return TensorList([torch.empty(x.shape, dtype=x.dtype, device=row[0].device) for x in row])


def copy_into(target: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    """Copy the tensors of `new` that were not written in place to the tensors of `target`."""
    names = [name for name, tensor in target.items() if new[name] is not tensor]
    if names:  # one call for hundreds of tensors takes half the time
        torch._foreach_copy_([target[name] for name in names], [new[name] for name in names])


def convert_like(current: Model, new: Mapping[str, Tensor], current_tensors: Mapping[str, Tensor]) -> Any:
    """Convert `new` to the container type, order, devices and array types of `current`."""
    is_plain_dict = (
        type(current) is dict and [*current] == [*current_tensors] and set(map(type, current.values())) <= TENSOR_TYPES
    )
    if is_plain_dict and all(map(_is_cpu, current_tensors.values())):
        return {key: new[str(key)] for key in current}  # the new tensors are on the device of `current`
    entries: dict[Any, Any] = {}
    for key, array in _entries("current", current):
        if str(key) not in new:  # the extra state of a module is not a tensor
            entries[key] = copy.deepcopy(array)
            continue
        tensor = new[str(key)]
        if tensor.device != current_tensors[str(key)].device:
            tensor = tensor.to(current_tensors[str(key)].device)
        # For arrays in a foreign byte order, `astype` restores this order.
        entries[key] = tensor if isinstance(array, Tensor) else tensor.numpy().astype(array.dtype, copy=False)
    if isinstance(current, dict):
        converted = copy.copy(current)
        converted.update(entries)
        return converted
    if isinstance(current, Mapping):
        return entries
    return tuple(entries.values()) if isinstance(current, tuple) else list(entries.values())


def _entries(name: str, model: Any) -> Iterable[tuple[Any, Any]]:
    """Return the pairs (name, array) of a state dict, or the pairs (index, array) of a list.

    Raises:
        ArgumentError: if `model` is neither of these.
    """
    if isinstance(model, Mapping):
        return model.items()
    if isinstance(model, Sequence) and not isinstance(model, str):
        return enumerate(model)
    hint = ": pass its state_dict()" if isinstance(model, torch.nn.Module) else ""
    raise ArgumentError(f"{name}: expected a state dict or a list of arrays, got {type(model).__name__}{hint}")


class _ReadOnlyArray:
    """A wrapper through which torch reads a read-only NumPy array without a warning."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        # The interface declares the memory as writable, so no code may write to it. An array that is created from this
        # wrapper keeps the original array alive.
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}
