"""Reading and writing of models as state dicts or lists of arrays, in place and in their original container."""

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
"""What most models consist of."""
_is_cpu = attrgetter("is_cpu")

Array = Tensor | np.ndarray | np.generic
Model = Mapping[Any, Array] | Sequence[Array]
"""A state dict, or a list of arrays."""
ModelsByPrefix = Mapping[str, Mapping[str, Tensor]]
"""The tensors of several models, each by what messages about it begin with."""


def as_tensors(name: str, model: Any, *, writable: bool = False) -> dict[str, Tensor]:
    """Return the entries of a model as tensors over the same memory, `writable` or read-only."""
    entries = model if isinstance(model, Mapping) else dict(_entries(name, model))
    keys = [*entries] if set(map(type, entries)) <= {str} else [*map(str, entries)]
    found = dict(zip(keys, entries.values(), strict=True))
    if len(found) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ArgumentError(f"{name}: expected names that differ as strings, got {short_repr(twice)} twice")
    if EXTRA_STATE in "".join(keys):
        found = {key: x for key, x in found.items() if key.rpartition(".")[2] != EXTRA_STATE}
    if not set(map(type, found.values())) <= TENSOR_TYPES:
        for key, array in found.items():
            if isinstance(array, np.ndarray | np.generic):
                found[key] = _tensor_over(f"{name}: {key}", array, writable)
            elif not isinstance(array, Tensor):
                raise ArgumentError(f"{name}: {key}: expected a tensor or an array, got {type(array).__name__}")
    return found


def _tensor_over(name: str, array: Any, writable: bool) -> Tensor:
    """A tensor over the memory of an array; over a copy where torch knows no such memory."""
    apart = not (isinstance(array, np.ndarray) and array.dtype.isnative and min(array.strides, default=0) >= 0)
    if writable and (apart or not array.flags.writeable):
        raise ArgumentError(f"{name}: expected a writable array in the byte order of this machine")
    try:
        if apart:
            return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=")))
        # torch has no tensors that are read only, and warns of arrays that are.
        return torch.from_numpy(array if array.flags.writeable else np.asarray(_ReadOnlyArray(array)))
    except (TypeError, ValueError):
        raise ArgumentError(f"{name}: expected a numeric array, got dtype {array.dtype}") from None


def open_for_write(layout: Layout, out: Model, current: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return writable tensors of a model, checked so that only an overlap can make a write fail.

    Raises:
        ArgumentError: if they are not those of the layout, on the devices of `current`.
    """
    target = as_tensors("out", out, writable=True)
    layout.check_entries(target, "out: ")
    if not (all(map(_is_cpu, target.values())) and all(map(_is_cpu, current.values()))):
        for name, tensor in target.items():
            if tensor.device != current[name].device:
                raise ArgumentError(f"out: {name}: expected device {current[name].device}, got {tensor.device}")
    asked = (Tensor.is_inference, Tensor.is_conj, Tensor.is_neg)
    if any(any(map(ask, target.values())) for ask in asked) or not all(map(Tensor.data_ptr, target.values())):
        _check_writable(target)
    return target


def _check_writable(target: Mapping[str, Tensor]) -> None:
    for name, tensor in target.items():
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise ArgumentError(f"out: {name}: expected a tensor that was not made in inference mode")
        if tensor.is_conj() or tensor.is_neg():
            raise ArgumentError(f"out: {name}: expected a tensor to write into, got a conjugated or negated view")
        if tensor.numel() and not tensor.data_ptr():
            raise ArgumentError(f"out: {name}: expected a tensor with memory, got zeros that are not written down")


def check_no_overlap(layout: Layout, target: Mapping[str, Tensor], models: ModelsByPrefix) -> None:
    """Check that the tensors of a model share memory neither with one another nor with another entry of `models`.

    Raises:
        ArgumentError: if they do.
    """
    names = [entry.name for entry in (*layout.leaves, *layout.buffers)]
    names += [alias for alias, name in layout.aliases if target[alias].data_ptr() != target[name].data_ptr()]
    written = TensorList([target[name] for name in names])
    read = [TensorList([model[name] for name in names]) for model in models.values()]
    # Adapters of other ranks are copied before anything is written.
    check_no_alias(written, [row for row in read if row.lengths == written.lengths], written.lengths)


def writable_leaves(layout: Layout, target: Mapping[str, Tensor]) -> TensorList:
    """Return the leaves of a model for writing; leaves that the kernels cannot write are replaced."""
    row = TensorList([target[leaf.name] for leaf in layout.leaves])
    if row.is_contiguous and len(row.devices) == 1 and all(dtype.itemsize > 1 for dtype in row.dtypes):
        return row
    return TensorList([torch.empty(x.shape, dtype=x.dtype, device=row[0].device) for x in row])


def copy_into(target: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    """Copy the values that were not written in place; no failure is possible here."""
    there = [name for name, tensor in target.items() if new[name] is not tensor]
    if there:  # in one call, as hundreds of them take half the time
        torch._foreach_copy_([target[name] for name in there], [new[name] for name in there])


def convert_like(current: Model, new: Mapping[str, Tensor], current_tensors: Mapping[str, Tensor]) -> Any:
    """Convert `new` to the kind of `current`: container, order, devices, and arrays."""
    plain = (
        type(current) is dict and [*current] == [*current_tensors] and set(map(type, current.values())) <= TENSOR_TYPES
    )
    if plain and all(map(_is_cpu, current_tensors.values())):
        return {key: new[str(key)] for key in current}  # on the devices of `now`, as all that is made of it
    entries: dict[Any, Any] = {}
    for key, array in _entries("current", current):
        if str(key) not in new:  # what a module keeps beside its tensors
            entries[key] = copy.deepcopy(array)
            continue
        tensor = new[str(key)]
        if tensor.device != current_tensors[str(key)].device:
            tensor = tensor.to(current_tensors[str(key)].device)
        entries[key] = tensor if isinstance(array, Tensor) else tensor.numpy().astype(array.dtype, copy=False)
    if isinstance(current, dict):
        same = copy.copy(current)
        same.update(entries)
        return same
    if isinstance(current, Mapping):
        return entries
    return tuple(entries.values()) if isinstance(current, tuple) else list(entries.values())


def _entries(name: str, model: Any) -> Iterable[tuple[Any, Any]]:
    """Key and array of each entry of a model."""
    if isinstance(model, Mapping):
        return model.items()
    if isinstance(model, Sequence) and not isinstance(model, str):
        return enumerate(model)
    hint = ": pass its state_dict()" if isinstance(model, torch.nn.Module) else ""
    raise ArgumentError(f"{name}: expected a state dict or a list of arrays, got {type(model).__name__}{hint}")


class _ReadOnlyArray:
    """A read-only array, for those who will not write into it; it lives as long as what is made of it."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}
