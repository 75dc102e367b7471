"""Conversion of differences of models to models."""

from collections.abc import Mapping

import torch
from torch import Tensor

from manifoldagg.errors import ArgumentError
from manifoldagg.federated.pytrees import upcast_8bit
from manifoldagg.manifolds import Layout, ParameterSpace

__all__ = ["apply_difference", "check_flat"]

SIGNED_DTYPES = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""The signed dtypes for sums of unsigned integers, because torch does not add these. The sums have the same bits."""


def check_flat(space: ParameterSpace) -> None:
    """Raise `ArgumentError` if a leaf of the space is curved, because points of a curved space cannot be added."""
    for name, curved in space.manifolds:
        if not curved.flat:
            given = f"as {name} is a point of {curved}, which does not support sums of points"
            raise ArgumentError(f"difference: expected False, {given}; pass the model without difference=True")


def apply_difference(
    layout: Layout, base: Mapping[str, Tensor], difference: Mapping[str, Tensor], label: str
) -> dict[str, Tensor]:
    """Add a difference to the base, entry by entry.

    The entries of the base match the layout. If the entries of the difference do not match it, the function raises
    `StateDictError`, whose message starts with `label`.
    """
    layout.check_entries(difference, label)
    return {name: _add(base[name], difference[name]) for name in difference}


def _add(start: Tensor, difference: Tensor) -> Tensor:
    """Return the sum, rounded once to the dtype of `start`; for booleans, return the client's value."""
    step = difference.to(start.device)
    if start.dtype is torch.bool:
        return step
    signed = SIGNED_DTYPES.get(start.dtype)
    if signed is not None:
        return (start.view(signed) + step.view(signed)).view(start.dtype)
    return (upcast_8bit(start) + upcast_8bit(step)).to(start.dtype)
