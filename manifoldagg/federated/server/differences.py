"""Conversion of differences of models to models."""

from collections.abc import Mapping

import torch
from torch import Tensor

from manifoldagg.errors import ArgumentError
from manifoldagg.federated.pytrees import upcast_8bit
from manifoldagg.manifolds import Layout, ParameterSpace

__all__ = ["apply_difference", "check_flat"]

SIGNED_DTYPES = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""A mapping from unsigned dtypes to signed dtypes of the same width. Torch adds only the signed integers. The sums of
signed and unsigned integers have the same bits."""


def check_flat(space: ParameterSpace) -> None:
    """Check that all parameters of a space are flat, so that a difference can be added to a model.

    Raises:
        ArgumentError: if a leaf is curved.
    """
    for name, curved in space.manifolds:
        if not curved.flat:
            given = f"as {name} is a point of {curved}, which does not support sums of points"
            raise ArgumentError(f"difference: expected False, {given}; pass the model without difference=True")


def apply_difference(
    layout: Layout, base: Mapping[str, Tensor], difference: Mapping[str, Tensor], label: str
) -> dict[str, Tensor]:
    """Add a difference of models to the base, entry by entry.

    Args:
        layout: the layout of the models.
        base: the base, whose entries must match the layout.
        difference: the difference of the client's model and the base.
        label: the start of error messages.

    Raises:
        StateDictError: if the entries of the difference do not match the layout.
    """
    layout.check_entries(difference, label)
    return {name: _add(base[name], difference[name]) for name in difference}


def _add(start: Tensor, difference: Tensor) -> Tensor:
    """Add a difference to a tensor of the start model, and round the sum once to the dtype of this tensor.

    A boolean tensor has no difference. In this case, `difference` contains the client's values, and the function
    returns them unchanged.
    """
    step = difference.to(start.device)
    if start.dtype is torch.bool:
        return step
    signed = SIGNED_DTYPES.get(start.dtype)
    if signed is not None:
        return (start.view(signed) + step.view(signed)).view(start.dtype)
    return (upcast_8bit(start) + upcast_8bit(step)).to(start.dtype)
