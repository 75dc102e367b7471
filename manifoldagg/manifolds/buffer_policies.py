"""Buffer policies, which determine how a server updates the tensors of a model that are not trained.

- `"average"`: the server moves the buffer towards the value that a client returns.
- `"latest"`: the server replaces the buffer by the value that a client returns.
- `"leave"`: the server does not change the buffer.
"""

import fnmatch
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from manifoldagg._validation import check_choice, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds.layout import Entry, matches_any

__all__ = ["BufferPolicy", "check_buffer_policy", "is_batch_counter", "named_policies", "resolve_policies"]

POLICIES = ("average", "latest", "leave")
COUNTER = "num_batches_tracked"
BufferPolicy = Mapping[str, str] | Sequence[str]
"""A mapping from names or glob patterns to policies, or a sequence of patterns with the policy `"average"`."""


def check_buffer_policy(patterns: Any) -> BufferPolicy:
    """Check that the argument `buffer_policy` has a valid type, and return it.

    The argument determines how a server updates the buffers of a model. It is a mapping from names or glob patterns to
    policies, such as `"average"`, or a sequence of glob patterns that have this policy.

    Raises:
        ArgumentError: if `patterns` has another type. A single string is not a sequence of patterns.
    """
    is_valid = isinstance(patterns, Iterable) and not isinstance(patterns, str)
    if not is_valid or not all(isinstance(pattern, str) for pattern in patterns):
        raise ArgumentError(
            f"buffer_policy: expected a sequence of glob patterns, or a mapping from them, got {short_repr(patterns)}"
        )
    return patterns if isinstance(patterns, Mapping) else list(patterns)


def resolve_policies(entries: Sequence[Entry], patterns: BufferPolicy, names: Collection[str] = ()) -> dict[str, str]:
    """Return the policy of each buffer, which determines how the server updates the buffer.

    - `"average"`, the default: the server moves the buffer towards the value that a client returns.
    - `"latest"`: the server replaces the buffer by the value that a client returns, but never decreases a counter.
    - `"leave"`: the server does not change the buffer.

    The user assigns policies to names and to glob patterns (`patterns`). A name has precedence over a pattern, and an
    earlier pattern over a later one.

    Only floating dtypes of at least 16 bits can be averaged. For another dtype, `"average"` is replaced by `"latest"`
    if the buffer is an integer counter with the name `num_batches_tracked`, and by `"leave"` otherwise. One client
    therefore cannot overwrite the indices or masks of all clients.

    Args:
        entries: the buffers.
        patterns: the argument `buffer_policy`.
        names: the names of all tensors of the model, for error messages.

    Raises:
        ArgumentError: if `patterns` or a policy is invalid, or a pattern matches no buffer.

    Example:
        >>> import torch
        >>> counter = Entry("1.num_batches_tracked", (), torch.int64)
        >>> entries = [Entry("1.running_mean", (4,), torch.float32), counter]
        >>> resolve_policies(entries, {"*running*": "leave"})
        {'1.running_mean': 'leave', '1.num_batches_tracked': 'latest'}
    """
    given = check_buffer_policy(patterns)
    named = dict(given) if isinstance(given, Mapping) else dict.fromkeys(given, "average")
    for pattern, policy in named.items():
        check_choice(f"buffer_policy: {pattern}", policy, POLICIES)
        if not any(_matches(entry.name, pattern) for entry in entries):
            parameter = next((name for name in names if _matches(name, pattern)), None)
            other = "entry of the model" if parameter is None else f"buffer, but the trainable parameter {parameter}"
            raise ArgumentError(f"buffer_policy: {short_repr(pattern)} matches no {other}")
    chosen = {}
    for entry in entries:
        policy = "average"
        if named:  # otherwise hundreds of names without a pattern take a millisecond
            matches = (policy for pattern, policy in named.items() if fnmatch.fnmatchcase(entry.name, pattern))
            policy = named.get(entry.name) or next(matches, "average")
        # Integers and float8 numbers cannot represent an average.
        if policy == "average" and not (entry.dtype.is_floating_point and entry.dtype.itemsize > 1):
            policy = "latest" if is_batch_counter(entry.name, entry.dtype) else "leave"
        chosen[entry.name] = policy
    return chosen


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


def is_batch_counter(name: str, dtype: torch.dtype) -> bool:
    """Return whether a buffer counts batches, so that its value never decreases.

    Example:
        >>> is_batch_counter("1.num_batches_tracked", torch.int64), is_batch_counter("position_ids", torch.int64)
        (True, False)
    """
    return name.rpartition(".")[2] == COUNTER and not (dtype.is_floating_point or dtype.is_complex)


def named_policies(
    entries: Sequence[Entry], patterns: BufferPolicy, names: Collection[str] = ()
) -> tuple[tuple[str, str], ...]:
    """Return the pairs (name, policy) of the entries that a pattern matches.

    The arguments are those of `resolve_policies`.

    Raises:
        ArgumentError: as in `resolve_policies`.

    Example:
        >>> import torch
        >>> entries = [Entry("mask", (4,), torch.float32), Entry("count", (), torch.int64)]
        >>> named_policies(entries, {"m*": "leave"})
        (('mask', 'leave'),)
    """
    if not patterns:
        return ()
    resolved = resolve_policies(entries, patterns, names)
    return tuple((name, policy) for name, policy in resolved.items() if name in patterns or matches_any(name, patterns))
