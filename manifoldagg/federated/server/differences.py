"""Updates that are differences of models: the models that they stand for."""

from collections.abc import Mapping

import torch
from torch import Tensor

from manifoldagg.errors import ArgumentError
from manifoldagg.federated.pytrees import upcast_8bit
from manifoldagg.manifolds import Layout, ParameterSpace

__all__ = ["apply_difference", "check_flat"]

SIGNED_DTYPES = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""The signed dtypes whose sums have the same bits as those of integers that torch does not add."""


def check_flat(space: ParameterSpace) -> None:
    """Check that a point and a difference of points can be added.

    Raises:
        ArgumentError: naming a leaf where they have no sum.
    """
    for name, curved in space.manifolds:
        if not curved.flat:
            given = f"as {name} is a point of {curved}, where points have no sums"
            raise ArgumentError(f"difference: expected False, {given}; pass the model without difference=True")


def apply_difference(
    layout: Layout, base: Mapping[str, Tensor], difference: Mapping[str, Tensor], label: str
) -> dict[str, Tensor]:
    """Return the model at this difference from the base, whose entries match the layout.

    Raises:
        StateDictError: after `label`, if the difference does not match the layout.
    """
    layout.check_entries(difference, label)
    return {name: _add(base[name], difference[name]) for name in difference}


def _add(start: Tensor, difference: Tensor) -> Tensor:
    """Return the sum, rounded once to the dtype of `start`; a boolean is the client's own."""
    step = difference.to(start.device)
    if start.dtype is torch.bool:
        return step
    signed = SIGNED_DTYPES.get(start.dtype)
    if signed is not None:
        return (start.view(signed) + step.view(signed)).view(start.dtype)
    return (upcast_8bit(start) + upcast_8bit(step)).to(start.dtype)
