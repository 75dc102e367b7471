"""Conversion between the state of a rule and the state of a PyTorch optimizer.

The state of a rule is a tree of dicts and tuples, which belongs to a whole model. In contrast, a PyTorch optimizer
stores one flat dict per parameter, and its checkpoints contain only tensors and numbers.

The function `flatten_state` converts the tree to flat dicts. The name of an entry is the path of a leaf in the tree,
such as `correction.0.length`. The kind of the leaf determines what each parameter stores, and a suffix of the name:

| leaf | stored for each parameter | suffix of the name |
| --- | --- | --- |
| number | the number | |
| row, a list with one tensor per parameter | the tensor of this parameter | |
| vector, a flat tensor with the entries of all parameters | the part of this parameter | `VECTOR_SUFFIX` |
| list with one number per parameter | the number of this parameter | `PER_PARAMETER_SUFFIX` |
| string or `None` | an integer that encodes the string, and 0 for `None` | `STRING_SUFFIX` |
| empty dict | 0 | `EMPTY_SUFFIX` |

One more entry, `RULE_ENTRY`, contains the encoded name of the class of the rule. The function `unflatten_state`
restores the tree.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from manifoldagg._validation import short_repr
from manifoldagg.corrections.combination import Combination
from manifoldagg.errors import ArgumentError, RuleError
from manifoldagg.federated import Rule
from manifoldagg.federated.server.durability.fingerprint import import_path
from manifoldagg.kernels import TensorList

__all__ = [
    "RULE_ENTRY",
    "NormBound",
    "check_state",
    "common",
    "flatten_state",
    "rule_key",
    "unflatten_state",
]

_version = attrgetter("_version")

PER_PARAMETER_SUFFIX = "[]"
VECTOR_SUFFIX = "()"
STRING_SUFFIX = "@"
EMPTY_SUFFIX = "{}"
RULE_ENTRY = "of" + STRING_SUFFIX
"""The name of the entry that identifies the class of the rule."""

ParamState = Mapping[str, Any]
"""The stored state of one parameter."""


def common(state: ParamState) -> dict[str, Any]:
    """Return the part of a parameter's state that is the same for all parameters of a model.

    Args:
        state: the stored state of one parameter.

    Returns:
        The entries of the state. The values that differ between parameters are replaced by `None`.
    """
    return {
        name: None if isinstance(x, Tensor) or name.endswith(PER_PARAMETER_SUFFIX) else x for name, x in state.items()
    }


def rule_key(rule: Rule) -> int:
    """Encode the class name of an update rule, and those of the rules that it wraps, as an integer.

    The optimizer state contains this integer, so that the state of another rule can be rejected.
    """
    # The bytes of the integer are the names in UTF-8.
    return _encode_string(_rule_name(rule))


def check_state(name: str, state: ParamState, rule: Rule, initial_state: Any, shape: torch.Size) -> None:
    """Check that the stored state of a parameter belongs to a rule and is complete.

    Args:
        name: the name of the state in error messages.
        state: the stored state of the parameter.
        rule: the rule that will use the state.
        initial_state: the initial state of this rule, which determines the required entries.
        shape: the shape of the parameter.

    Raises:
        ArgumentError: if a rule of another class stored the state, if a tensor has a wrong shape, or if an entry is
            missing.
    """
    given = state.get(RULE_ENTRY)
    if given != rule_key(rule):
        got = _decode_string(given) if type(given) is int else "a state of another optimizer"
        raise ArgumentError(f"{name}: expected the state of {_rule_name(rule)}, got {got}")
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape != shape:
            raise ArgumentError(f"{name}: {key}: expected shape {tuple(shape)}, got {tuple(value.shape)}")
    for leaf in flatten_state(initial_state, [shape.numel()]):
        stem = _without_suffix(leaf)
        if not any(_without_suffix(key) == stem or key.startswith(f"{stem}.") for key in state):
            raise ArgumentError(f"{name}: expected the entry {stem} of {type(rule).__name__}, got a state without it")


def _rule_name(rule: Any) -> str:
    parts = [getattr(rule, part.name) for part in fields(rule)] if is_dataclass(rule) else []
    wrapped = ", ".join(_rule_name(part) for part in parts if hasattr(part, "init") and hasattr(part, "step"))
    return import_path(type(rule)) + (f"({wrapped})" if wrapped else "")


def _without_suffix(name: str) -> str:
    for suffix in (VECTOR_SUFFIX, PER_PARAMETER_SUFFIX, STRING_SUFFIX, EMPTY_SUFFIX):
        name = name.removesuffix(suffix)
    return name


def _encode_string(text: str) -> int:
    return int.from_bytes(text.encode())


def _decode_string(number: int) -> str:
    return number.to_bytes((number.bit_length() + 7) // 8).decode(errors="replace")


def flatten_state(tree: Any, lengths: Sequence[int]) -> dict[str, Any]:
    """Return the leaves of the state of a rule as a flat dict.

    Args:
        tree: the state that the rule returned.
        lengths: the number of elements of each parameter.

    Returns:
        The leaves by name. A leaf is a number, a `Combination` that has not been computed, or a list with one element
            per parameter.

    Raises:
        RuleError: if a leaf has an unsupported type.
    """
    return dict(_iter_leaves("", tree, lengths))


def _iter_leaves(name: str, tree: Any, lengths: Sequence[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping) and not tree and name:
        yield name + EMPTY_SUFFIX, 0
    elif isinstance(tree, Mapping):
        for key, branch in tree.items():
            yield from _iter_leaves(f"{name}.{key}" if name else str(key), branch, lengths)
    elif isinstance(tree, Combination) or type(tree) in (int, float, bool):
        yield name, tree
    elif isinstance(tree, Tensor) and tree.ndim == 1 and len(tree) == sum(lengths):
        yield name + VECTOR_SUFFIX, list(tree.split([*lengths]))
    elif isinstance(tree, TensorList):
        yield name, list(tree)
    elif isinstance(tree, list) and len(tree) == len(lengths) and all(isinstance(x, int | float) for x in tree):
        yield name + PER_PARAMETER_SUFFIX, tree
    elif isinstance(tree, tuple):
        for i, branch in enumerate(tree):
            yield from _iter_leaves(f"{name}.{i}", branch, lengths)
    elif tree is None or isinstance(tree, str):
        yield name + STRING_SUFFIX, _encode_string(tree or "")
    else:
        raise RuleError(
            f"rule: state: {name}: expected a number, a string, None, a vector of the model, or a list with one entry "
            f"per parameter, got {short_repr(tree)}"
        )


@dataclass(frozen=True, eq=False)
class NormBound:
    """Upper bound on the norm of a list of tensors, which is valid until one of the tensors is written.

    Attributes:
        row: the list, with one tensor for each parameter.
        norm: the upper bound.
        versions: the version counter of each tensor when the bound was computed. PyTorch increases it at each write.
    """

    row: TensorList
    norm: float
    versions: tuple[int, ...]

    @staticmethod
    def of(row: TensorList, norm: float) -> "NormBound | None":
        """Return the bound of a new row.

        Args:
            row: the row, after its numbers were rounded to the dtypes of the tensors.
            norm: an upper bound of the norm before rounding.

        Returns:
            The bound, or `None` if PyTorch does not count writes to the tensors. This is the case in inference mode.
        """
        if any(map(Tensor.is_inference, row)):
            return None
        rounded = 1 + max([torch.finfo(dtype).eps for dtype in row.dtypes])
        return NormBound(row, rounded * norm, tuple(map(_version, row)))

    def applies_to(self, row: TensorList) -> bool:
        """Return whether this upper bound on the norm of a list of tensors is valid for the list `row`.

        The bound is valid if `row` contains the same tensor objects as the list for which it was computed, and if these
        tensors have not been modified since then.
        """
        same = len(row) == len(self.row) and all(map(is_, row, self.row))
        return same and tuple(map(_version, row)) == self.versions


def unflatten_state(states: Sequence[ParamState], bounds: Mapping[str, NormBound]) -> Any:
    """Return the state of a rule as a tree, from the stored states of all parameters.

    Args:
        states: the stored state of each parameter.
        bounds: the known upper bounds of the norms of rows, by name. A valid bound is attached to its row.

    Returns:
        The state, or `None` if no state is stored yet.
    """
    if not states[0]:
        return None
    tree: dict[str, Any] = {}
    for name, value in states[0].items():
        if name == RULE_ENTRY:
            continue
        leaf: Any = value
        if name.endswith(VECTOR_SUFFIX):
            name = name.removesuffix(VECTOR_SUFFIX)
            leaf = torch.cat([one[name + VECTOR_SUFFIX].reshape(-1) for one in states])
        elif name.endswith(PER_PARAMETER_SUFFIX):
            name = name.removesuffix(PER_PARAMETER_SUFFIX)
            leaf = [one[name + PER_PARAMETER_SUFFIX] for one in states]
        elif isinstance(value, Tensor):
            leaf = TensorList([one[name] for one in states])
            bound = bounds.get(name)
            if bound is not None and bound.applies_to(leaf):
                leaf.norm_bound = bound.norm
        elif name.endswith(STRING_SUFFIX):
            name = name.removesuffix(STRING_SUFFIX)
            leaf = _decode_string(value) or None
        elif name.endswith(EMPTY_SUFFIX):
            name = name.removesuffix(EMPTY_SUFFIX)
            leaf = {}
        *path, last = name.split(".")
        branch = tree
        for step in path:
            branch = branch.setdefault(step, {})
        branch[last] = leaf
    return _restore_tuples(tree)


def _restore_tuples(tree: Any) -> Any:
    """Convert each dict whose keys are decimal numbers back to a tuple."""
    if not isinstance(tree, dict):
        return tree
    # The names of the entries contain the indices of tuples as decimal numbers. The items are sorted by index, because
    # a loaded state may contain them in a different order.
    branches = {name: _restore_tuples(branch) for name, branch in tree.items()}
    if branches and all(name.isdigit() for name in branches):
        return tuple([branches[place] for place in sorted(branches, key=int)])
    return branches
