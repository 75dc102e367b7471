"""Personal entries: tensors of a model that remain on each client.

They are not part of a parameter space, so a server does not aggregate them.
"""

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from manifoldagg._validation import short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds.layout import Layout, matches_any

__all__ = ["check_patterns", "personal_names", "without_entries", "without_names"]

T = TypeVar("T")


def check_patterns(patterns: Any) -> tuple[str, ...]:
    """Return names or glob patterns as a tuple.

    Raises:
        ArgumentError: if `patterns` is not a sequence of strings.
    """
    is_valid = isinstance(patterns, Iterable) and not isinstance(patterns, str | Mapping)
    if not is_valid or not all(isinstance(pattern, str) for pattern in patterns):
        raise ArgumentError(f"personal: expected a sequence of names or glob patterns, got {short_repr(patterns)}")
    return tuple(patterns)


def personal_names(layout: Layout, patterns: Any) -> tuple[str, ...]:
    """Return the names of all tensors of a model that match at least one of several names or glob patterns.

    A tied parameter has several names. Either all of its names must match, or none.

    Args:
        layout: the layout of the complete model.
        patterns: names or glob patterns of parameters and buffers.

    Returns:
        The names in the order of the layout.

    Raises:
        ArgumentError: if `patterns` is not a sequence of strings, a pattern matches no entry, all parameters are
            personal, or only some names of a tied parameter are personal.

    Example:
        >>> import torch
        >>> layout = Layout.of(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
        >>> personal_names(layout, ["1.*"])
        ('1.weight', '1.bias', '1.running_mean', '1.running_var', '1.num_batches_tracked')
    """
    patterns = check_patterns(patterns)
    names = [*layout.entries]
    for pattern in patterns:
        if not any(name == pattern or fnmatch.fnmatchcase(name, pattern) for name in names):
            raise ArgumentError(f"personal: {short_repr(pattern)} matches no entry of the model")
    found = [name for name in names if name in patterns or matches_any(name, patterns)]
    # A tied parameter is one tensor, which cannot be shared and personal at the same time.
    for alias, name in layout.aliases:
        if (alias in found) != (name in found):
            raise ArgumentError(
                f"personal: expected all or no names of a tied parameter, got one of {name} and {alias}"
            )
    if found and all(leaf.name in found for leaf in layout.leaves):
        raise ArgumentError(f"personal: expected a shared parameter, but {short_repr(patterns)} match all parameters")
    return tuple(found)


def without_entries(layout: Layout, names: Sequence[str]) -> Layout:
    """Return the layout without the entries of these names."""
    if not names:
        return layout
    excluded = set(names)
    return replace(
        layout,
        leaves=tuple(leaf for leaf in layout.leaves if leaf.name not in excluded),
        buffers=tuple(entry for entry in layout.buffers if entry.name not in excluded),
        aliases=tuple(pair for pair in layout.aliases if pair[0] not in excluded),
    )


def without_names(tensors: Mapping[str, T], names: Sequence[str]) -> Mapping[str, T]:
    """Return the mapping without the entries of these names."""
    if not names:
        return tensors
    excluded = set(names)
    return {name: tensor for name, tensor in tensors.items() if name not in excluded}
