"""Means of single entries of a model: batch counters, and parameters on manifolds."""

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from manifoldagg.averaging.karcher import karcher
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import KarcherMean, Manifold

__all__ = ["is_batch_counter", "labelled_karcher_mean", "largest_counter"]

VERSION_LABEL = re.compile(r"^versions\[(\d+)\]")
"""The name of a model in error messages of `karcher`."""


def is_batch_counter(name: str) -> bool:
    """Return whether a name belongs to the batch counter of a batch normalisation layer.

    Example:
        >>> is_batch_counter("1.num_batches_tracked"), is_batch_counter("1.running_mean")
        (True, False)
    """
    return name.rpartition(".")[2] == "num_batches_tracked"


def largest_counter(counters: Sequence[Tensor]) -> Tensor:
    """Return the elementwise maximum of several counters as a new tensor, on the device of the first counter.

    Example:
        >>> largest_counter([torch.tensor(3), torch.tensor(8)])
        tensor(8)
    """
    return torch.stack([x.detach().to(counters[0].device) for x in counters]).amax(0)


def labelled_karcher_mean(space: Manifold, name: str, points: Mapping[str, Tensor], weights: Tensor) -> KarcherMean:
    """Compute the Karcher mean of the values that a parameter has in several models.

    Args:
        space: the manifold of the parameter.
        name: the name of the parameter.
        points: the values of the parameter in all models. The keys are the prefixes of error messages about each value.
        weights: the normalised weights of the models.

    Raises:
        ArgumentError: if a value is invalid, or if the iteration does not converge. The message contains the name of
            the parameter. For an invalid value, it also contains the name of the model.
    """
    labels = [*points]
    try:
        mean = karcher(space, [*points.values()], weights)
    except ArgumentError as error:
        error.args = (VERSION_LABEL.sub(lambda match: labels[int(match[1])], str(error)),)
        raise
    if not mean.converged:
        got = f"got a residual of {float(mean.residual):.2g} after {mean.steps} steps"
        raise ArgumentError(f"models: {name}: expected points closer to one another on {space}, {got}")
    return mean
