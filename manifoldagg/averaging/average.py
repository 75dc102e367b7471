"""The average of models that are state dicts or lists of tensors or arrays, read in place."""

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from manifoldagg._validation import is_finite
from manifoldagg.averaging.karcher import Weights, check_weights, karcher
from manifoldagg.errors import ArgumentError, StateDictError
from manifoldagg.kernels import TensorList, combine, gram
from manifoldagg.manifolds import Manifold, ParameterSpace
from manifoldagg.manifolds.assign import Assignment
from manifoldagg.manifolds.layout import Entry, Layout
from manifoldagg.manifolds.lora.peft import find_first_factor
from manifoldagg.manifolds.model_io import (
    Model,
    ModelsByPrefix,
    as_tensors,
    check_no_overlap,
    convert_like,
    copy_into,
    open_for_write,
)

__all__ = ["average"]

VERSION_LABEL = re.compile(r"^versions\[(\d+)\]")
"""What messages of `karcher` call a model."""


@torch.no_grad()
def average(
    models: Sequence[Model],
    weights: Weights = None,
    *,
    manifolds: Assignment | None = None,
    out: Model | None = None,
) -> Any:
    r"""Compute the $m$ that minimises $\sum_i w_i\, d(m, \Theta_i)^2$: $\sum_i w_i \Theta_i$ for flat entries.

    A model is a state dict, or a list of tensors or NumPy arrays; the result is of the kind of the first, in its order,
    dtypes and devices, another mapping than a `dict` a `dict`. Sums are taken in float64 and rounded once, to bfloat16
    and float16 by way of float32. Entries on a manifold get their Karcher mean. Parameters of the same memory, shape
    and strides in the first model are tied, and count once.

    The statistics of batch normalisation, and complex numbers, are averaged as they are; statistics of the averaged
    model itself takes [`refresh_buffers`][manifoldagg.curves.refresh_buffers]. Single integers and booleans, and
    counters of batches, are those of the heaviest model, of several the first. Others, such as masks, must be equal.

    Args:
        models: k of them, with the same names, shapes and dtypes.
        weights: k numbers, such as how many samples each was trained on: not negative, not all zero; they are
            normalised. Equal where not given. Of a model without weight the flat parameters are not read.
        manifolds: name or pattern to the space of those entries, as in
            [`ParameterSpace.of_state_dict`][manifoldagg.manifolds.ParameterSpace.of_state_dict]; of a list `"0"`, `"1"`
            and so on.
        out: a model like the first, one of `models` or another, each entry in memory of its own, to which the result is
            copied when it is known to be finite.

    Returns:
        The mean: a new model, or `out`. Of models that lie farther apart on a manifold than
        [`karcher_mean`][manifoldagg.manifolds.karcher_mean] says it is a point of rest, and the sum need not be least.

    Raises:
        ArgumentError: naming the argument, or the model and the tensor in it, that does not fit; or if models lie so
            far apart on a manifold that no mean is found. `out` is as it was then.

    Warns:
        UserWarning: where there are factors of adapters, which would be averaged apart: that is what
            [`average_adapters`][manifoldagg.averaging.average_adapters] is for.

    Cost: flat entries are read once, and those on spheres of at least k dimensions twice, where they lie; no memory is
    taken but that of the result. Copied are tensors that are not contiguous or lie on another device than the first,
    arrays of foreign byte order, and entries on other manifolds.

    Source: McMahan et al. 2017, Algorithm 1; Manifold, Algorithm 1 (its last lines).

    Example:
        >>> import numpy as np
        >>> one, two = {"w": torch.tensor([0.0, 3.0])}, {"w": torch.tensor([4.0, 7.0])}
        >>> average([one, two], weights=[30, 10])
        {'w': tensor([1., 4.])}
        >>> average([[np.array([1.0, 0.0])], [np.array([0.0, 1.0])]])
        [array([0.5, 0.5])]
        >>> from manifoldagg.manifolds import Sphere
        >>> average([{"v": torch.tensor([1.0, 0.0])}, {"v": torch.tensor([0.0, 1.0])}], manifolds={"v": Sphere(2)})
        {'v': tensor([0.7071, 0.7071])}
    """
    given = _named_models(models)
    first, *_ = given.values()
    shares = check_weights(weights, len(given))
    space = _parameter_space(first, manifolds)
    layout = space.layout
    target = None if out is None else open_for_write(layout, out, first)
    label, *_ = given
    rows = layout.tensor_lists(given, reference=label)
    others = _copied_entries(layout, given, int(shares.argmax()))
    if target is not None:
        check_no_overlap(layout, target, given)
    means = _mean_buffers(layout, given, shares)
    leaves = _mean_parameters(space, given, rows, shares)
    if not (_is_finite(leaves) and is_finite(*map(_as_real, means.values()))):
        _check_values(layout, given, shares)
        raise StateDictError("models: expected a finite mean; entries are as large as their dtypes allow")
    new = layout.to_state_dict(leaves, means | others)
    if target is None:
        return convert_like(models[0], new, first)
    copy_into(target, new)
    return out


def _named_models(models: Any) -> ModelsByPrefix:
    many = isinstance(models, Sequence) and not isinstance(models, str)
    if not many or not models:
        given = "none" if many else type(models).__name__
        raise ArgumentError(f"models: expected a sequence of at least one model, got {given}")
    return {f"models[{i}]: ": as_tensors(f"models[{i}]", model) for i, model in enumerate(models)}


def _parameter_space(first: Mapping[str, Tensor], manifolds: Assignment | None) -> ParameterSpace:
    """The space of the first model's tensors."""
    try:
        space = ParameterSpace.of_state_dict(first, manifolds)
    except StateDictError as error:
        raise StateDictError(f"models[0]: {error}") from None
    space.layout.check_parameters("models[0]")
    factor = find_first_factor(first)
    if factor is not None:
        told = f"models[0]: {factor}: factors of adapters are averaged apart; average_adapters averages their products"
        warnings.warn(told, UserWarning, stacklevel=4)
    return space


def _copied_entries(layout: Layout, models: ModelsByPrefix, heaviest: int) -> dict[str, Tensor]:
    """What has no mean, and is the same in all models but for counters."""
    found = {}
    label = [*models][heaviest]
    for entry in layout.buffers:
        if _has_mean(entry):
            continue
        chosen = models[label][entry.name]
        for other, model in models.items() if not entry.is_counter else ():
            if not torch.equal(model[entry.name].to(chosen.device), chosen):
                told = f"expected {entry.dtype} equal to that of {label.removesuffix(': ')}, as it has no mean"
                raise StateDictError(f"{other}{entry.name}: {told}")
        found[entry.name] = chosen.detach().clone()
    return found


def _mean_buffers(layout: Layout, models: ModelsByPrefix, weights: Tensor) -> dict[str, Tensor]:
    """Of what is carried: statistics, and complex numbers."""
    entries = [entry for entry in layout.buffers if _has_mean(entry)]
    if not entries:
        return {}
    first, *_ = models.values()
    device = first[entries[0].name].device
    rows = [TensorList([_as_real(model[entry.name]).to(device) for entry in entries]) for model in models.values()]
    found = zip(entries, combine(None, rows, weights), strict=True)
    return {entry.name: torch.view_as_complex(x) if entry.dtype.is_complex else x for entry, x in found}


def _has_mean(entry: Entry) -> bool:
    return entry.dtype.is_floating_point or entry.dtype.is_complex


def _as_real(x: Tensor) -> Tensor:
    return torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach()


def _mean_parameters(
    space: ParameterSpace, models: ModelsByPrefix, rows: Sequence[TensorList], weights: Tensor
) -> tuple[Tensor, ...]:
    """The mean of the parameters, new tensors: of a product it is that of each factor."""
    leaves = space.layout.leaves
    curved = dict(space.manifolds)
    if not curved:
        return combine(None, rows, weights)
    flat = [i for i, leaf in enumerate(leaves) if leaf.name not in curved]
    found: dict[int, Tensor] = {}
    if flat:
        found |= zip(flat, combine(None, [TensorList([row[i] for i in flat]) for row in rows], weights), strict=True)
    for i, leaf in enumerate(leaves):
        if leaf.name in curved:
            points = {f"{label}{leaf.name}": row[i].detach() for label, row in zip(models, rows, strict=True)}
            found[i] = _labelled_karcher_mean(curved[leaf.name], leaf.name, points, weights)
    return tuple(found[i] for i in range(len(leaves)))


def _labelled_karcher_mean(space: Manifold, name: str, points: Mapping[str, Tensor], weights: Tensor) -> Tensor:
    """The Karcher mean of a leaf, by what messages about each point begin with."""
    labels = [*points]
    try:
        mean = karcher(space, [*points.values()], weights)
    except ArgumentError as error:
        error.args = (VERSION_LABEL.sub(lambda found: labels[int(found[1])], str(error)),)
        raise
    if not mean.converged:
        told = f"the residual of their mean is {float(mean.residual):.2g} after {mean.steps} steps"
        raise ArgumentError(f"models: {name}: expected points nearer to one another on {space}; {told}")
    return mean.point


def _is_finite(leaves: tuple[Tensor, ...]) -> bool:
    """Whether every entry is; the sum of their squares says so of all at once, where it does not overflow."""
    return bool(gram([leaves]).isfinite()) or is_finite(*leaves)


def _check_values(layout: Layout, models: ModelsByPrefix, weights: Tensor) -> None:
    """The models that have a weight are finite.

    Raises:
        StateDictError: naming the first tensor that is not.
    """
    used = {label: model for (label, model), share in zip(models.items(), weights.tolist(), strict=True) if share > 0}
    layout.check_values(used)
    for label, model in used.items():
        for entry in layout.buffers:
            if _has_mean(entry) and not is_finite(_as_real(model[entry.name])):
                raise StateDictError(f"{label}{entry.name}: expected finite values, got NaN or infinity")
