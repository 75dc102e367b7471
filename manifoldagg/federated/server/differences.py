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
    """Check that a space supports updates that are differences of models.

    On a curved manifold, the sum of a model and a difference would leave the manifold.

    Raises:
        ArgumentError: if a parameter has a curved manifold.
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
    """Add a client's difference to a tensor of the start model, in the dtype of this tensor."""
    step = difference.to(start.device)
    if start.dtype is torch.bool:  # Booleans have no difference, so `difference` contains the client's values.
        return step
    signed = SIGNED_DTYPES.get(start.dtype)
    if signed is not None:
        return (start.view(signed) + step.view(signed)).view(start.dtype)
    # The sum has the wider of the two dtypes, so it is rounded only once to the dtype of `start`.
    return (upcast_8bit(start) + upcast_8bit(step)).to(start.dtype)
