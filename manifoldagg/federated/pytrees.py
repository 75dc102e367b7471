"""Pytrees: nested dicts, lists and tuples whose leaves are tensors, numbers or other values."""

from collections.abc import Callable, Mapping
from itertools import chain, repeat
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manifoldagg._threads import prefers_numpy
from manifoldagg._validation import is_finite
from manifoldagg.corrections.combination import Combination
from manifoldagg.kernels.alloc import clone, empty_like

__all__ = [
    "Tree",
    "combinations",
    "copy_tensor",
    "has_structure",
    "introduces_nonfinite",
    "materialize",
    "size_of",
    "tensors",
    "tree_map",
    "unalias",
    "upcast_8bit",
]

Tree = Any
NO_ROWS: Mapping[Combination, Any] = MappingProxyType({})


def tensors(tree: Tree) -> list[Tensor]:
    """Return the tensors of a tree, in the order in which `tree_map` visits them.

    Example:
        >>> tensors({"m": torch.ones(2), "count": 3})
        [tensor([1., 1.])]
    """
    found = []
    ahead = [tree]
    while ahead:
        branch = ahead.pop()
        if isinstance(branch, Tensor):
            found.append(branch)
        elif isinstance(branch, dict):
            ahead += reversed(branch.values())
        elif isinstance(branch, list | tuple):
            ahead += reversed(branch)
    return found


def tree_map(tree: Tree, function: Callable[[Tensor], Tensor]) -> Tree:
    """Apply a function to each tensor of a pytree, and return the pytree of the results.

    If the function returns every tensor of a subtree unchanged, the result contains the original subtree, not a copy.

    Example:
        >>> tree_map({"m": [torch.ones(2)], "count": 3}, torch.neg)
        {'m': [tensor([-1., -1.])], 'count': 3}
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        branches = {name: tree_map(branch, function) for name, branch in tree.items()}
        return tree if all(branches[name] is tree[name] for name in tree) else branches
    if isinstance(tree, list | tuple):
        items = [tree_map(branch, function) for branch in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return tree


def has_structure(tree: Tree, template: Tree) -> bool:
    """Return whether a pytree has all keys of a template, and tensors of the same shapes.

    The pytree and the template are nested dicts. The pytree may have additional keys. If a value of the template is
    neither a dict nor a tensor, the value of the pytree is not checked.

    Example:
        >>> template = {"m": torch.zeros(2)}
        >>> has_structure({"m": torch.ones(2), "count": 3}, template), has_structure({"m": 3}, template)
        (True, False)
    """
    if isinstance(template, Tensor):
        return isinstance(tree, Tensor) and tree.shape == template.shape
    if not isinstance(template, dict):
        return True
    return isinstance(tree, dict) and all(
        name in tree and has_structure(tree[name], template[name]) for name in template
    )


def copy_tensor(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, detached from the autograd graph.

    Example:
        >>> copy_tensor(torch.ones(2, requires_grad=True))
        tensor([1., 1.])
    """
    tensor = tensor.detach()
    if not prefers_numpy(tensor):
        return clone(tensor)
    # NumPy copies in the calling thread. For a medium-sized tensor, starting the worker threads of torch would take
    # longer than the copy.
    copy = empty_like(tensor)
    np.copyto(copy.numpy(), tensor.numpy())
    return copy


def unalias(tree: Tree, others: Tree) -> Tree:
    """Return a pytree whose tensors share no memory with the tensors of the pytree `others`.

    The function copies only the tensors that share memory with a tensor of `others`.

    Example:
        >>> x = torch.zeros(2)
        >>> unalias({"mine": x[:1]}, x)["mine"].data_ptr() == x.data_ptr()
        False
    """
    mine = _storages(tree)
    if not mine:
        return tree
    taken = _storages(others).keys()
    if taken.isdisjoint(mine):
        return tree
    return tree_map(tree, lambda x: x if taken.isdisjoint(_storages(x)) else copy_tensor(x))


def combinations(tree: Tree) -> list[Combination]:
    """List the linear combinations in a pytree that have not been computed yet.

    They are `Combination` objects, which store the vectors and the coefficients of a linear combination.
    """
    if isinstance(tree, Combination):
        return [tree]
    branches = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return [leaf for branch in branches for leaf in combinations(branch)]


def materialize(tree: Tree, computed: Mapping[Combination, Any] = NO_ROWS) -> Tree:
    """Return a copy of nested dicts in which each `Combination` is replaced by its value.

    A `Combination` is a linear combination of vectors that has not been computed yet.

    Args:
        tree: the nested dicts.
        computed: a mapping from combinations to their values, if these are already known.

    Example:
        >>> materialize({"count": 3, "rule": {"version": 1}})
        {'count': 3, 'rule': {'version': 1}}
    """
    if isinstance(tree, Combination):
        return computed[tree] if tree in computed else tree.compute()
    return {name: materialize(branch, computed) for name, branch in tree.items()} if isinstance(tree, dict) else tree


def size_of(tree: Tree) -> int:
    """Return the number of bytes that the tensors of a pytree occupy in memory.

    For a view, the function counts the whole storage. If several tensors share a storage, it counts this storage once.

    Example:
        >>> x = torch.zeros(8)
        >>> size_of([{"a": x[:2], "b": x[2:]}])
        32
    """
    return sum(_storages(tree).values())


def introduces_nonfinite(new: Tree, old: Tree) -> bool:
    """Return whether a pytree contains NaN or infinity in a tensor that was finite before.

    The function compares each tensor of `new` with the tensor at the same position of `old`. If `old` has no tensor at
    this position, any NaN or infinity in `new` counts. Objects that are identical in both pytrees are skipped.

    Example:
        >>> x = torch.tensor([float("inf")])
        >>> introduces_nonfinite({"m": x}, {"m": torch.zeros(1)}), introduces_nonfinite({"m": x + 1}, {"m": x})
        (True, False)
    """
    ahead = [(new, old)]
    while ahead:
        now, before = ahead.pop()
        if now is before:
            continue
        if isinstance(now, Tensor):
            if not _is_finite(now) and not (isinstance(before, Tensor) and not _is_finite(before)):
                return True
        elif isinstance(now, dict):
            earlier = before if isinstance(before, dict) else {}
            ahead += [(branch, earlier.get(name)) for name, branch in now.items()]
        elif isinstance(now, list | tuple):
            ahead.extend(
                zip(now, chain(before if isinstance(before, list | tuple) else (), repeat(None)), strict=False)
            )
    return False


def upcast_8bit(tensor: Tensor) -> Tensor:
    """Convert an 8-bit floating-point tensor to float32, and return any other tensor unchanged.

    Torch has no arithmetic in 8-bit floating-point dtypes, so such tensors must be converted before a computation.
    """
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def _is_finite(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    for part in _dense_parts(tensor.detach()):
        real = torch.view_as_real(part.resolve_conj()) if part.is_complex() else part
        if real.is_floating_point() and not real.is_meta and not is_finite(upcast_8bit(real)):
            return False
    return True


def _storages(tree: Tree) -> dict[int, int]:
    """Map the address of each non-empty storage in a pytree to its size in bytes."""
    held: dict[int, int] = {}
    for tensor in tensors(tree):
        for part in (tensor,) if tensor.layout is torch.strided else _dense_parts(tensor):
            storage = part.untyped_storage()
            if address := storage.data_ptr():
                held[address] = storage.nbytes()
    return held


def _dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)
