"""Warnings about arguments that are valid but probably a mistake."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from manifoldagg._validation import warn_caller
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.buffers import VARIANCE_SUFFIX
from manifoldagg.federated.pytrees import upcast_8bit
from manifoldagg.federated.server.validation import require_dense
from manifoldagg.manifolds import ParameterSpace
from manifoldagg.manifolds.layout import Layout
from manifoldagg.manifolds.lora.peft import find_first_factor

__all__ = [
    "warn_about_update",
    "warn_if_adapter_factors",
    "warn_if_difference",
    "warn_if_integers_change",
]

MAX_NORM_RATIO = 0.1
"""The largest ratio of the norms of a tensor in the update and in the base for a warning. The difference after a few
epochs is usually smaller. Training rarely shrinks all tensors of a model to this ratio. For example, a weight decay of
1e-4 per step needs 23,000 steps."""
MAX_NORM_RATIO_OF_ONE_TENSOR = 0.01
"""The largest ratio if only one tensor of the base is nonzero, because training can shrink a single tensor further."""
MIN_PARAMETERS = 32
"""A model with fewer parameters may be trained to nearly zero."""
SAMPLE_SIZE = 2**12
"""The number of entries of a tensor that the first pass reads."""
POLICY_HINT = "space=ParameterSpace.of_state_dict(model, buffer_policy=...)"


def warn_about_update(
    name: str,
    space: ParameterSpace,
    update: Mapping[str, Tensor],
    base: Mapping[str, Tensor],
    current: Mapping[str, Tensor],
    hint: str | None,
) -> None:
    """Warn about a client's model that is probably a difference of models, or that changes integers.

    The arguments are as in `warn_if_difference`. `current` is the server's model. If the update is a difference, `hint`
    is `None`.
    """
    if hint is not None:
        read = ((key, update[key]) for key, policy in space.policies.items() if policy != "leave")
        pair = (update, base)
        if space.adapters is not None:
            pair = (space.gauge_free_norms(update), space.gauge_free_norms(base))
        warn_if_difference(name, space.layout, *pair, buffers=read, hint=hint)
    if space.layout.buffers:
        warn_if_integers_change(name, space, update, current)


def warn_if_difference(
    name: str,
    layout: Layout,
    update: Mapping[str, Tensor],
    base: Mapping[str, Tensor],
    *,
    buffers: Iterable[tuple[str, Any]],
    hint: str,
) -> None:
    """Warn about an update whose tensors all have a much smaller norm than in the base.

    Such an update is probably a difference of models. Call this function before the checks of buffers, because a
    difference of models usually has negative variances.

    Args:
        name: the argument with the update, for the message.
        layout: the layout of the model.
        update: the parameters of the client's model.
        base: the parameters that the client started from.
        buffers: the names and values of the client's buffers that the server reads.
        hint: how to send a difference, for the message.

    Raises:
        ArgumentError: if such an update also has a negative variance, which is impossible for a model.
    """
    if layout.size < MIN_PARAMETERS:
        return
    longest = 0.0
    where = ""
    num_nonzero = 0
    for looked in (SAMPLE_SIZE, None):
        for leaf in layout.leaves:
            theirs = _norm(update[leaf.name], looked)
            before = _norm(base[leaf.name], looked)
            # A tensor that is zero in the base, such as an initial bias, gives no evidence. Other checks reject NaN.
            part = theirs / before if before else 0.0
            if not part < MAX_NORM_RATIO:
                return
            num_nonzero += before > 0
            if part >= longest and before:
                longest = part
                where = leaf.name
    # Each tensor was counted in both passes, so a count of 2 means one tensor.
    if where and longest < (MAX_NORM_RATIO if num_nonzero > 2 else MAX_NORM_RATIO_OF_ONE_TENSOR):
        given = f"what looks like a difference of models: {where} has {longest:.2g} x the norm of its base"
        message = f"{name}: expected the model itself, got {given}; {hint}"
        if any(key.endswith(VARIANCE_SUFFIX) and _has_negative(tensor) for key, tensor in buffers):
            raise ArgumentError(message)
        warn_caller(message)


def warn_if_adapter_factors(name: str, model: Iterable[str], hint: str) -> None:
    """Warn about adapter factors in a model without `adapters`, because the server would average them separately."""
    found = find_first_factor(model)
    if found is not None:
        warn_caller(f"{name}: {found}: the factors of adapters would be averaged separately; {hint}")


def warn_if_integers_change(
    name: str, space: ParameterSpace, update: Mapping[str, Tensor], current: Mapping[str, Tensor]
) -> None:
    """Warn about changed integer buffers without a policy, because the server ignores the change.

    Counters, which have a single integer, are excluded.
    """
    named = dict(space.buffer_policies)
    for entry in space.layout.buffers:
        if entry.dtype.is_floating_point or entry.dtype.is_complex or entry.dtype is torch.bool:
            continue
        if entry.is_counter or entry.name in named:
            continue
        mine = current[entry.name]
        if not torch.equal(update[entry.name].to(mine.device), mine):
            hint = f"the server ignores changes of {entry.dtype} values; to set a policy, pass {POLICY_HINT}"
            warn_caller(f"{name}: {entry.name}: {hint}")


def _has_negative(tensor: Any) -> bool:
    """Return whether a dense floating-point tensor has a negative entry; `False` for other values."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        return False
    try:
        return bool((upcast_8bit(require_dense("buffers", tensor)) < 0).any())
    except ArgumentError:
        return False


def _norm(tensor: Tensor, limit: int | None) -> float:
    """Return the norm of the first `limit` entries; `None` means all entries."""
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() or limit is None else tensor.detach()[:1].reshape(-1)
    looked = flat[:limit]
    if looked.dtype.itemsize == 1:
        looked = looked.float()
    size = float(torch.linalg.vector_norm(looked, dtype=torch.float64))
    return size if math.isfinite(size) else math.inf
