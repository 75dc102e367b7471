"""Averages of models, given as state dicts or as lists of tensors or arrays."""

import os
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor

from manifoldagg._result_repr import format_result
from manifoldagg._validation import check_choice, is_finite
from manifoldagg.averaging.certificate import MergeInfo
from manifoldagg.averaging.entries import is_batch_counter, labelled_karcher_mean, largest_counter
from manifoldagg.averaging.karcher import Weights, check_weights
from manifoldagg.averaging.merge import merge
from manifoldagg.errors import ArgumentError, StateDictError
from manifoldagg.kernels import TensorList, combine, gram
from manifoldagg.manifolds import KarcherMean, ParameterSpace
from manifoldagg.manifolds.assign import Assignment
from manifoldagg.manifolds.layout import Entry, Layout
from manifoldagg.manifolds.lora.peft import find_first_factor
from manifoldagg.manifolds.model_io import (
    TENSOR_TYPES,
    Model,
    ModelsByPrefix,
    as_tensors,
    check_no_overlap,
    convert_like,
    copy_into,
    open_for_write,
)

__all__ = ["AverageInfo", "average"]

PathLike = str | os.PathLike[str]
PATH_TYPES = (str, os.PathLike)
STATE_DICT_TYPES = (dict, OrderedDict)


@dataclass(frozen=True)
class AverageInfo:
    """Information about an average of models: the weights, and the convergence of each mean on a manifold.

    Attributes:
        weights: the normalised weights of the models, with sum 1.
        residuals: the norm of the residual of each Karcher mean, by the name of the tensor. Flat tensors are not
            included, because their mean has a closed form.
        steps: the number of iterations of each Karcher mean, by the name of the tensor.
    """

    weights: tuple[float, ...]
    residuals: Mapping[str, float]
    steps: Mapping[str, int]

    def __repr__(self) -> str:
        return format_result(self, weights=self.weights, residuals=self.residuals, steps=self.steps)


@overload
def average(
    models: Sequence[Model],
    weights: Weights = ...,
    *,
    manifolds: Assignment | None = ...,
    out: Model | None = ...,
    return_info: Literal[False] = ...,
) -> Any: ...


@overload
def average(
    models: Sequence[Model],
    weights: Weights = ...,
    *,
    manifolds: Assignment | None = ...,
    out: Model | None = ...,
    return_info: Literal[True],
) -> tuple[Any, AverageInfo]: ...


@overload
def average(
    models: Sequence[Model | PathLike],
    weights: Weights = ...,
    *,
    manifolds: Assignment | None = ...,
    out: PathLike,
    return_info: Literal[False] = ...,
    **options: Any,
) -> Path: ...


@overload
def average(
    models: Sequence[Model | PathLike],
    weights: Weights = ...,
    *,
    manifolds: Assignment | None = ...,
    out: PathLike,
    return_info: Literal[True],
    **options: Any,
) -> tuple[Path, MergeInfo]: ...


@torch.no_grad()
def average(
    models: Sequence[Any],
    weights: Weights = None,
    *,
    manifolds: Assignment | None = None,
    out: Any = None,
    return_info: bool = False,
    **options: Any,
) -> Any:
    r"""Average models with weights.

    The result is the model $m$ that minimises the weighted sum of squared distances
    $\sum_i w_i\, d(m, \Theta_i)^2$ to the models $\Theta_i$. For flat entries, the minimiser is the weighted mean
    $\sum_i w_i \Theta_i$. For entries on a manifold, it is the Karcher mean. Sums are computed in float64 and rounded
    once. The rounding to bfloat16 and float16 goes by way of float32.

    A model is a state dict, or a list of tensors or NumPy arrays. The result has the type, the order, the dtypes and
    the devices of the first model. If the first model is a mapping other than a dict, the result is a `dict`. If
    parameters of the first model are tied, that is, if they share memory, shape and strides, they are averaged once.

    If a model or `out` is a path of safetensors files, [`merge`][manifoldagg.averaging.merge] computes the mean and
    writes the result to files.

    Buffers are averaged as follows:

    - Statistics of batch normalisation and complex numbers are averaged. To compute the statistics of the averaged
      model itself, use [`refresh_buffers`][manifoldagg.curves.refresh_buffers].
    - `num_batches_tracked` is the largest value of all models.
    - Other single integers and booleans are copied from the model with the largest weight. If several models have this
      weight, the first of these models is used.
    - Larger integer and boolean tensors, such as masks, must be equal in all models.

    Args:
        models: k models with the same names, shapes and dtypes.
        weights: k nonnegative numbers with a positive sum, such as numbers of training samples. The function normalises
            the weights. The default is equal weights. The flat parameters of a model with weight 0 are not read.
        manifolds: a mapping from names or patterns to the space of these entries, as in
            [`ParameterSpace.of_state_dict`][manifoldagg.manifolds.ParameterSpace.of_state_dict]. The entries of a list
            have the names `"0"`, `"1"` and so on.
        out: a model in the format of the first model, into which the result is written. This may be one of `models`.
            The entries must not share memory. `out` is written only after the result is known to be finite.
        return_info: whether to also return an [`AverageInfo`][manifoldagg.averaging.AverageInfo], or a
            [`MergeInfo`][manifoldagg.averaging.MergeInfo] for files.
        **options: further options of [`merge`][manifoldagg.averaging.merge] for files, such as `method="karcher"`.

    Returns:
        The mean as a new model, or `out`. For files, the path of the result. With `return_info=True`, the mean and its
        information. If the models on a manifold are farther apart than
        [`karcher_mean`][manifoldagg.manifolds.karcher_mean] allows, the mean is a stationary point that may not be the
        minimiser.

    Raises:
        ArgumentError: if an argument or a tensor of a model is invalid, or if the models on a manifold are so far apart
            that no mean is found. `out` is then unchanged.

    Warns:
        UserWarning: if a model contains the factors of adapters, which would be averaged separately. Use
            [`average_adapters`][manifoldagg.averaging.average_adapters] for adapters.

    Cost: flat entries are read once in place. Entries on spheres of at least k dimensions are read twice in place. Only
    the result is allocated. The function copies noncontiguous tensors, tensors on another device than the first model,
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
        >>> mean, info = average([one, two], weights=[30, 10], return_info=True)
        >>> info.weights
        (0.75, 0.25)
    """
    check_choice("return_info", return_info, (False, True))
    if isinstance(out, PATH_TYPES) or any(isinstance(model, PATH_TYPES) for model in _iterable(models)):
        if out is None:
            raise ArgumentError("out: expected the path of a file or folder, because models are in files; got None")
        merged = merge(models, weights, out=out, manifolds=manifolds, **options)
        return (Path(out), merged) if return_info else Path(out)
    if options:
        raise ArgumentError(f"{next(iter(options))}: expected models in files or a path as out, got state dicts")
    named, tensors = _named_models(models)
    first, *_ = named.values()
    shares = check_weights(weights, len(named))
    space = _parameter_space(first, manifolds)
    layout = space.layout
    # All checks precede the first write, so an error leaves `out` unchanged.
    target = None if out is None else open_for_write(layout, out, first)
    rows = _tensor_lists(layout, named, tensors)
    copied = _copied_entries(layout, named, int(shares.argmax()))
    if target is not None:
        check_no_overlap(layout, target, named)
    means = _mean_buffers(layout, named, shares)
    leaves, curved = _mean_parameters(space, named, rows, shares)
    # The inputs are not checked before the sum. NaN and infinity propagate to the mean, so one check of the mean
    # suffices. The inputs are only read again to name the invalid tensor.
    floating = [x for x in (*means.values(), *copied.values()) if x.is_floating_point() or x.is_complex()]
    if not (_is_finite(leaves) and is_finite(*map(_as_real, floating))):
        _check_values(layout, named, shares)
        raise StateDictError(
            "models: expected a finite mean, got an overflow; entries are as large as their dtypes allow"
        )
    new = layout.to_state_dict(leaves, means | copied)
    if target is None:
        result = new if _is_like(new, models[0], rows[0], layout) else convert_like(models[0], new, first)
    else:
        copy_into(target, new)
        result = out
    if not return_info:
        return result
    residuals = {name: float(mean.residual) for name, mean in curved.items()}
    return result, AverageInfo(tuple(shares.tolist()), residuals, {name: mean.steps for name, mean in curved.items()})


def _iterable(models: Any) -> Sequence[Any]:
    """Return models that can be inspected without consuming them, or an empty tuple."""
    return models if isinstance(models, list | tuple) else ()


def _named_models(models: Any) -> tuple[ModelsByPrefix, list[TensorList]]:
    """Convert models to mappings from names to tensors, and to tensor lists.

    Returns:
        The mappings by the prefixes of error messages about the models, and the tensor lists. From the second model on,
        the tensor list of a model is empty, unless the model is a dict with the names and the order of the first model,
        and its tensors need no conversion.
    """
    is_sequence = isinstance(models, Sequence) and not isinstance(models, str)
    if not is_sequence or not models:
        given = "none" if is_sequence else type(models).__name__
        raise ArgumentError(f"models: expected a sequence of at least one model, got {given}")
    first = as_tensors("models[0]", models[0])
    names = [*first]
    named: dict[str, Mapping[str, Tensor]] = {"models[0]: ": first}
    lists = [TensorList(first.values())]
    for i, model in enumerate(models[1:], 1):
        is_aligned = type(model) in STATE_DICT_TYPES and [*model] == names
        row = TensorList(model.values() if is_aligned else ())
        # A state dict of tensors needs no conversion, and a copy would take longer than the mean.
        named[f"models[{i}]: "] = model if row.form else as_tensors(f"models[{i}]", model)
        lists.append(row if row.form else TensorList())
    return named, lists


def _tensor_lists(layout: Layout, models: ModelsByPrefix, lists: Sequence[TensorList]) -> list[TensorList]:
    """Return the parameters of each model as a tensor list.

    The function checks that all models have the layout of the first model, that is, the same names, shapes and dtypes.
    """
    # Lists with the same known form have equal shapes and dtypes, and do not need the slower checks of
    # `Layout.tensor_lists`.
    forms = {row.form for row in lists}
    if layout.aliases or len(forms) > 1 or b"" in forms:
        label, *_ = models
        return layout.tensor_lists(models, reference=label)
    if not layout.buffers:
        return [*lists]
    names = {leaf.name for leaf in layout.leaves}
    first, *_ = models.values()
    places = [i for i, name in enumerate(first) if name in names]
    return [TensorList([row[i] for i in places]) for row in lists]


def _parameter_space(first: Mapping[str, Tensor], manifolds: Assignment | None) -> ParameterSpace:
    """Return the parameter space of a model, and warn if the model contains LoRA factors."""
    try:
        space = ParameterSpace.of_state_dict(first, manifolds)
    except StateDictError as error:
        raise StateDictError(f"models[0]: {error}") from None
    space.layout.check_parameters("models[0]")
    factor = find_first_factor(first)
    if factor is not None:
        # `average` averages the two factors separately. The product of these means is not the mean of the products.
        message = f"models[0]: {factor}: factors of adapters are averaged separately"
        # The stack contains this function, `average`, the wrapper of `no_grad`, and the caller.
        warnings.warn(f"{message}; average_adapters averages their products", UserWarning, stacklevel=4)
    return space


def _copied_entries(layout: Layout, models: ModelsByPrefix, heaviest: int) -> dict[str, Tensor]:
    """Return the integers, booleans and batch counters of the result, which are not averages."""
    entries = {}
    label = [*models][heaviest]
    for entry in layout.buffers:
        if _has_mean(entry):
            continue
        # A batch counter is the maximum over all models. Other values are those of the model with the largest weight.
        if is_batch_counter(entry.name):
            entries[entry.name] = largest_counter([model[entry.name] for model in models.values()])
            continue
        # A larger integer tensor, such as a mask, has no mean. A copy of one value would hide a difference between
        # models.
        value = models[label][entry.name]
        for other, model in models.items() if not entry.is_counter else ():
            if not torch.equal(model[entry.name].to(value.device), value):
                expected = f"expected {entry.dtype} equal to that of {label.removesuffix(': ')}, as it has no mean"
                raise StateDictError(f"{other}{entry.name}: {expected}")
        entries[entry.name] = value.detach().clone()
    return entries


def _mean_buffers(layout: Layout, models: ModelsByPrefix, weights: Tensor) -> dict[str, Tensor]:
    """Return the means of the buffers that have a mean: statistics and complex numbers."""
    entries = [entry for entry in layout.buffers if _has_mean(entry)]
    if not entries:
        return {}
    first, *_ = models.values()
    device = first[entries[0].name].device
    # A mean is linear, so the real and the imaginary parts of complex numbers are averaged separately.
    rows = [TensorList([_as_real(model[entry.name]).to(device) for entry in entries]) for model in models.values()]
    pairs = zip(entries, combine(None, rows, weights), strict=True)
    return {entry.name: torch.view_as_complex(x) if entry.dtype.is_complex else x for entry, x in pairs}


def _has_mean(entry: Entry) -> bool:
    """Return whether a buffer is averaged."""
    return _is_continuous(entry) and not is_batch_counter(entry.name)


def _is_continuous(entry: Entry) -> bool:
    """Return whether an entry has a floating or complex dtype."""
    return entry.dtype.is_floating_point or entry.dtype.is_complex


def _as_real(x: Tensor) -> Tensor:
    """Detach a tensor, and convert complex numbers to pairs of real numbers."""
    return torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach()


def _mean_parameters(
    space: ParameterSpace, models: ModelsByPrefix, rows: Sequence[TensorList], weights: Tensor
) -> tuple[tuple[Tensor, ...], dict[str, KarcherMean]]:
    """Return the means of the parameters as new tensors, and the Karcher means by name."""
    leaves = space.layout.leaves
    curved = dict(space.manifolds)
    if not curved:
        return combine(None, rows, weights), {}
    # One call of the kernel combines all flat parameters.
    flat = [i for i, leaf in enumerate(leaves) if leaf.name not in curved]
    result: dict[int, Tensor] = {}
    if flat:
        result |= zip(flat, combine(None, [TensorList([row[i] for i in flat]) for row in rows], weights), strict=True)
    means: dict[str, KarcherMean] = {}
    for i, leaf in enumerate(leaves):
        if leaf.name in curved:
            points = {f"{label}{leaf.name}": row[i].detach() for label, row in zip(models, rows, strict=True)}
            means[leaf.name] = labelled_karcher_mean(curved[leaf.name], leaf.name, points, weights)
            result[i] = means[leaf.name].point
    return tuple(result[i] for i in range(len(leaves))), means


def _is_like(new: dict[str, Tensor], model: Model, row: TensorList, layout: Layout) -> bool:
    """Return whether the average already has the type, order and device of a model."""
    if layout.buffers or not row.form:  # A list with a form is on the CPU.
        return False
    return type(model) is dict and [*new] == [*model] and set(map(type, model.values())) <= TENSOR_TYPES


def _is_finite(leaves: tuple[Tensor, ...]) -> bool:
    """Return whether all entries of all tensors are finite."""
    # A finite sum of squares proves this in a single pass. Otherwise, the squares may have overflowed, so the tensors
    # are checked one by one.
    return bool(gram([leaves]).isfinite()) or is_finite(*leaves)


def _check_values(layout: Layout, models: ModelsByPrefix, weights: Tensor) -> None:
    """Check that all models with a positive weight are finite.

    Raises:
        StateDictError: if a tensor is not finite.
    """
    used = {label: model for (label, model), share in zip(models.items(), weights.tolist(), strict=True) if share > 0}
    layout.check_values(used, "remove {name!r} from all models")
    for label, model in used.items():
        for entry in layout.buffers:
            if _is_continuous(entry) and not is_finite(_as_real(model[entry.name])):
                raise StateDictError(f"{label}{entry.name}: expected finite values, got NaN or infinity")
