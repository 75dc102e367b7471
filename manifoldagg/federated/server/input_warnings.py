"""Warnings about models that fit in shape but are probably not what was meant."""

import math
import warnings
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from manifoldagg.federated.buffers import BufferPolicy
from manifoldagg.manifolds.layout import Layout, matches_any
from manifoldagg.manifolds.lora.peft import find_first_factor

__all__ = ["warn_if_adapter_factors", "warn_if_difference", "warn_if_integers_change"]

MAX_NORM_RATIO = 0.1
"""Training hardly shrinks all tensors of a model to this part: weight decay of 1e-4 a step alone needs 23,000 steps.
The difference of a few epochs is usually shorter."""
MAX_NORM_RATIO_OF_ONE_TENSOR = 0.01
"""The same where one tensor alone tells: it may come from far away."""
MIN_PARAMETERS = 32
"""A model of fewer numbers than this may be trained to nearly 0."""
SAMPLE_SIZE = 2**12
"""How many numbers of a tensor are looked at first."""


def warn_if_difference(name: str, layout: Layout, update: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> None:
    """Warn of an update that is far shorter than its base in every tensor: a difference of models.

    Cost: a few numbers of one tensor, where it is none.
    """
    if layout.size < MIN_PARAMETERS:
        return
    longest = 0.0
    where = ""
    telling = 0
    for looked in (SAMPLE_SIZE, None):
        for leaf in layout.leaves:
            theirs = _norm(update[leaf.name], looked)
            before = _norm(base[leaf.name], looked)
            # A tensor that was 0, such as an initial bias, gives no evidence; other checks reject NaN.
            part = theirs / before if before else 0.0
            if not part < MAX_NORM_RATIO:
                return
            telling += before > 0
            if part >= longest and before:
                longest = part
                where = leaf.name
    # Both looks have counted each.
    if where and longest < (MAX_NORM_RATIO if telling > 2 else MAX_NORM_RATIO_OF_ONE_TENSOR):
        told = f"as {where} has {longest:.2g} x the norm of its base; expected the model itself"
        warnings.warn(f"{name}: looks like a difference of models, {told}", UserWarning, stacklevel=4)


def warn_if_adapter_factors(name: str, model: Iterable[str]) -> None:
    """Warn of adapter factors in a model without `adapters`: they would be averaged separately."""
    found = find_first_factor(model)
    if found is not None:
        told = "factors of adapters would be averaged apart; say adapters=True for their products, or adapters=False"
        warnings.warn(f"{name}: {found}: {told}", UserWarning, stacklevel=5)


def warn_if_integers_change(
    name: str, layout: Layout, update: Mapping[str, Tensor], current: Mapping[str, Tensor], buffer_policy: BufferPolicy
) -> None:
    """Warn of changing integers without a buffer policy: parameters would be replaced, not averaged.

    A single integer is a counter.
    """
    for entry in layout.buffers:
        if entry.dtype.is_floating_point or entry.dtype.is_complex or entry.dtype is torch.bool:
            continue
        if entry.is_counter or matches_any(entry.name, buffer_policy):
            continue
        mine = current[entry.name]
        if not torch.equal(update[entry.name].to(mine.device), mine):
            told = (
                f"{entry.dtype} is not averaged but becomes the client's; "
                "name it in `buffer_policy` if it is no parameter"
            )
            warnings.warn(f"{name}: {entry.name}: {told}", UserWarning, stacklevel=4)


def _norm(tensor: Tensor, limit: int | None) -> float:
    """Return the norm of the first numbers, or of all."""
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() or limit is None else tensor.detach()[:1].reshape(-1)
    looked = flat[:limit]
    if looked.dtype.itemsize == 1:
        looked = looked.float()
    size = float(torch.linalg.vector_norm(looked, dtype=torch.float64))
    return size if math.isfinite(size) else math.inf
