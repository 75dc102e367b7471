"""What a rule keeps, as torch keeps it: for each parameter by name tensors, and numbers that all of them share.

A state is a tree of dicts and tuples. Its leaves are named by their way through the tree, `correction.0.length`. Rows
are kept piece by piece, each beside its parameter; vectors likewise, under a name that ends in `VECTOR`. A list has one
number for each parameter, under a name that ends in `EACH`. A word is the number that its letters make, `None` is 0,
under a name that ends in `WORD`: checkpoints of torch take tensors and numbers.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from manifoldagg.corrections.frame import Sum
from manifoldagg.errors import RuleError
from manifoldagg.kernels import Tensors

__all__ = ["flattened", "restored", "shared"]

EACH = "[]"
VECTOR = "()"
WORD = "@"

Kept = Mapping[str, Any]
"""What is kept beside one parameter."""


def shared(kept: Kept) -> dict[str, Any]:
    """What all parameters of a model have in common: the numbers, and the names of the rest."""
    return {name: None if isinstance(x, Tensor) or name.endswith(EACH) else x for name, x in kept.items()}


def flattened(tree: Any, lengths: Sequence[int]) -> dict[str, Any]:
    """The leaves of a state by name: numbers, `Sum`s, and lists with a tensor or a number for each parameter.

    Args:
        tree: what a rule returned.
        lengths: how many entries each parameter has.

    Raises:
        RuleError: if there is a leaf that is none of these.
    """
    return dict(_leaves("", tree, lengths))


def _leaves(name: str, tree: Any, lengths: Sequence[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, branch in tree.items():
            yield from _leaves(f"{name}.{key}" if name else str(key), branch, lengths)
    elif isinstance(tree, Sum) or type(tree) in (int, float, bool):
        yield name, tree
    elif isinstance(tree, Tensor) and tree.ndim == 1 and len(tree) == sum(lengths):
        yield name + VECTOR, list(tree.split([*lengths]))
    elif isinstance(tree, Tensors):
        yield name, list(tree)
    elif isinstance(tree, list) and len(tree) == len(lengths) and all(isinstance(x, int | float) for x in tree):
        yield name + EACH, tree
    elif isinstance(tree, tuple):
        for i, branch in enumerate(tree):
            yield from _leaves(f"{name}.{i}", branch, lengths)
    elif tree is None or isinstance(tree, str):
        yield name + WORD, int.from_bytes((tree or "").encode())
    else:
        raise RuleError(f"rule: state: {name}: expected numbers, words and what is as long as a model, got {tree!r}")


def restored(kept: Sequence[Kept]) -> Any:
    """The tree of which these are the leaves, each beside its parameter; `None` where nothing is kept."""
    if not kept[0]:
        return None
    tree: dict[str, Any] = {}
    for name, value in kept[0].items():
        leaf: Any = value
        if name.endswith(VECTOR):
            name = name.removesuffix(VECTOR)
            leaf = torch.cat([one[name + VECTOR].reshape(-1) for one in kept])
        elif name.endswith(EACH):
            name = name.removesuffix(EACH)
            leaf = [one[name + EACH] for one in kept]
        elif isinstance(value, Tensor):
            leaf = Tensors([one[name] for one in kept])
        elif name.endswith(WORD):
            name = name.removesuffix(WORD)
            leaf = value.to_bytes((value.bit_length() + 7) // 8).decode() or None
        *way, last = name.split(".")
        branch = tree
        for step in way:
            branch = branch.setdefault(step, {})
        branch[last] = leaf
    return _joined(tree)


def _joined(tree: Any) -> Any:
    """The tree with tuples where the names are places."""
    if not isinstance(tree, dict):
        return tree
    branches = {name: _joined(branch) for name, branch in tree.items()}
    return tuple(branches.values()) if branches and all(name.isdigit() for name in branches) else branches
