"""Warnings about models that are valid but that the caller has probably passed by mistake."""

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
from manifoldagg.manifolds.lora.peft import find_first_factor

__all__ = [
    "warn_about_update",
    "warn_if_adapter_factors",
    "warn_if_difference",
    "warn_if_integers_change",
]

MAX_NORM_RATIO = 0.1
"""The threshold of the warning about differences. The ratio is the norm of a tensor in the update, divided by its norm
in the base. The difference of two models after a few epochs usually has a smaller ratio. In contrast, training rarely
shrinks all tensors of a model to this ratio. For example, a weight decay of 1e-4 per step needs 23,000 steps."""
MAX_NORM_RATIO_OF_ONE_TENSOR = 0.01
"""The threshold if only one tensor of the base is nonzero, because training can shrink a single tensor further."""
MIN_PARAMETERS = 32
"""The smallest number of parameters for the warning, because training may move a smaller model close to zero."""
SAMPLE_SIZE = 2**12
"""The number of entries of a tensor that the first, fast pass reads."""
POLICY_HINT = "space=ParameterSpace.of_state_dict(model, buffer_policy=...)"


def warn_about_update(
    name: str,
    space: ParameterSpace,
    update: Mapping[str, Tensor],
    base: Mapping[str, Tensor],
    current: Mapping[str, Tensor],
    hint: str | None,
) -> None:
    """Warn about two probable mistakes in the update of a client.

    - The update looks like a difference of two models instead of a model.
    - The update changes an integer buffer without an aggregation policy, so that the server ignores the change.

    Args:
        name: the argument that contains the update, for the message.
        space: the space of the models.
        update: the client's model.
        base: the model from which the client started.
        current: the server's model.
        hint: how to pass a difference, for the message. `None` if the caller has declared the update as a difference.

    Raises:
        ArgumentError: if the update is certainly a difference, as in `warn_if_difference`.
    """
    if hint is not None:
        read = ((key, update[key]) for key, policy in space.policies.items() if policy != "leave")
        warn_if_difference(name, space, update, base, buffers=read, hint=hint)
    if space.layout.buffers:
        warn_if_integers_change(name, space, update, current)


def warn_if_difference(
    name: str,
    space: ParameterSpace,
    update: Mapping[str, Tensor],
    base: Mapping[str, Tensor],
    *,
    buffers: Iterable[tuple[str, Any]],
    hint: str,
) -> None:
    """Warn if an update looks like a difference of two models instead of a model.

    The function warns if every tensor of the update has a much smaller norm than the same tensor of the model from
    which the client started. Call it before the validation of buffers, which may also reject a difference, but with
    a less helpful message.

    Args:
        name: the argument that contains the update, for the message.
        space: the space of the models.
        update: the parameters of the client's model.
        base: the parameters from which the client started.
        buffers: the names and values of the client's buffers that the server reads.
        hint: how to pass a difference, for the message.

    Raises:
        ArgumentError: if such an update also contains a negative variance. It is then certainly not a model.
    """
    layout = space.layout
    if layout.size < MIN_PARAMETERS:
        return
    if space.adapters is not None:
        update = space.gauge_free_norms(update)
        base = space.gauge_free_norms(base)
    longest = 0.0
    where = ""
    num_nonzero = 0
    for looked in (SAMPLE_SIZE, None):
        for leaf in layout.leaves:
            theirs = _norm(update[leaf.name], looked)
            before = _norm(base[leaf.name], looked)
            # A tensor that is zero in the base, such as an initial bias, has no ratio. Other checks reject NaN.
            part = theirs / before if before else 0.0
            if not part < MAX_NORM_RATIO:
                return
            num_nonzero += before > 0
            if part >= longest and before:
                longest = part
                where = leaf.name
    # Both passes counted each nonzero tensor, so a count of 2 means one tensor.
    if where and longest < (MAX_NORM_RATIO if num_nonzero > 2 else MAX_NORM_RATIO_OF_ONE_TENSOR):
        given = f"what looks like a difference of models: {where} has {longest:.2g} x the norm of its base"
        message = f"{name}: expected the model itself, got {given}; {hint}"
        if any(key.endswith(VARIANCE_SUFFIX) and _has_negative(tensor) for key, tensor in buffers):
            raise ArgumentError(message)
        warn_caller(message)


def warn_if_adapter_factors(name: str, model: Iterable[str], hint: str) -> None:
    """Warn if a model contains LoRA factors, because the server would average the factors separately.

    With the option `adapters`, the server averages the products of the factors instead.

    Args:
        name: the argument that contains the model, for the message.
        model: the names of the model's tensors.
        hint: how to set the option, for the message.
    """
    found = find_first_factor(model)
    if found is not None:
        warn_caller(f"{name}: {found}: the factors of adapters would be averaged separately; {hint}")


def warn_if_integers_change(
    name: str, space: ParameterSpace, update: Mapping[str, Tensor], current: Mapping[str, Tensor]
) -> None:
    """Warn if a client has changed an integer buffer for which no aggregation policy was set.

    The server ignores such a change. Counters, such as the number of batches, cause no warning.
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
    """Return whether a value is a dense floating-point tensor with a negative entry."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        return False
    try:
        return bool((upcast_8bit(require_dense("buffers", tensor)) < 0).any())
    except ArgumentError:
        return False


def _norm(tensor: Tensor, limit: int | None) -> float:
    """Return the norm of at most the first `limit` entries of a tensor. `None` means all entries.

    If the norm is not finite, return infinity.
    """
    # `reshape` copies a tensor that is not contiguous. The sample of such a tensor is therefore from its first row.
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() or limit is None else tensor.detach()[:1].reshape(-1)
    looked = flat[:limit]
    if looked.dtype.itemsize == 1:
        looked = looked.float()
    size = float(torch.linalg.vector_norm(looked, dtype=torch.float64))
    return size if math.isfinite(size) else math.inf
