"""Conversion of updates that are differences of models to models."""

from collections.abc import Mapping

import torch
from torch import Tensor

from manifoldagg.errors import ArgumentError
from manifoldagg.federated.pytrees import upcast_8bit
from manifoldagg.manifolds import Layout, ParameterSpace

__all__ = ["apply_difference", "check_flat"]

SIGNED_DTYPES = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""The signed dtypes for sums of unsigned integers, which torch does not support. The sums have the same bits."""


def check_flat(space: ParameterSpace) -> None:
    """Check that a point and a difference of points can be added.

    Raises:
        ArgumentError: if the space has a curved leaf, where they have no sum. The message names the leaf.
    """
    for name, curved in space.manifolds:
        if not curved.flat:
            given = f"as {name} is a point of {curved}, which does not support sums of points"
            raise ArgumentError(f"difference: expected False, {given}; pass the model without difference=True")


def apply_difference(
    layout: Layout, base: Mapping[str, Tensor], difference: Mapping[str, Tensor], label: str
) -> dict[str, Tensor]:
    """Return the sum of the base, whose entries match the layout, and the difference.

    Raises:
        StateDictError: if the difference does not match the layout. The message starts with `label`.
    """
    layout.check_entries(difference, label)
    return {name: _add(base[name], difference[name]) for name in difference}


def _add(start: Tensor, difference: Tensor) -> Tensor:
    """Return the sum, rounded once to the dtype of `start`. For booleans, return the client's value."""
    step = difference.to(start.device)
    if start.dtype is torch.bool:
        return step
    signed = SIGNED_DTYPES.get(start.dtype)
    if signed is not None:
        return (start.view(signed) + step.view(signed)).view(start.dtype)
    return (upcast_8bit(start) + upcast_8bit(step)).to(start.dtype)
