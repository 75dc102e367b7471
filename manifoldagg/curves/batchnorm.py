"""Recomputation of BatchNorm statistics for a model on a curve.

A BatchNorm layer collects its running statistics during training. A model on a curve was never trained, so its
statistics must be computed from data before the model is evaluated.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from manifoldagg._validation import check_finite, check_shape
from manifoldagg.errors import ArgumentError, DivergenceError
from manifoldagg.manifolds import ModelLoss, ParameterSpace
from manifoldagg.manifolds.layout import tensors_of

__all__ = ["batch_norm_layers", "evaluation_mode", "refresh_buffers", "refreshed_buffers"]


def refresh_buffers(
    space: ParameterSpace, model: nn.Module, point: Float[Tensor, " P"], batches: Iterable[Any]
) -> dict[str, Tensor]:
    """Compute the buffers of a model for given parameters, with BatchNorm statistics averaged over batches of data.

    Use this function for parameters that were not trained themselves, such as the mean of two trained models. All
    layers except BatchNorm are in evaluation mode, so dropout is inactive and no random numbers are drawn.

    Args:
        space: the space of the model's parameters.
        model: a module with the layout of the space. Its parameters, buffers and training modes do not change.
        point: the parameters (P,) for which the statistics are computed.
        batches: the inputs of the model. A batch is a tensor, a tuple or list whose first element is the input, such as
            (inputs, targets), or a mapping of keyword arguments. All batches have the same weight, as in
            `torch.optim.swa_utils.update_bn`. If the model has no BatchNorm layers, the batches are not read.

    Returns:
        Buffers and frozen parameters by name, as from [`buffers`][manifoldagg.manifolds.ParameterSpace.buffers]. They
        are valid buffers for `space.state_dict(point, buffers)`.

    Raises:
        ArgumentError: if `point` is not in the space, a batch has another type, or `batches` is empty.
        StateDictError: if `model` does not have the layout of the space.
        DivergenceError: if a statistic is not finite. The message contains its name.

    Source: Izmailov et al. 2018, after (2).

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        >>> space = ParameterSpace.of(model)
        >>> point = torch.zeros(10)
        >>> buffers = refresh_buffers(space, model, point, [torch.ones(4, 2)])
        >>> _ = model.load_state_dict(space.state_dict(point, buffers))
        >>> model[1].running_mean, int(model[1].num_batches_tracked)
        (tensor([0., 0.]), 1)
    """
    check_finite("point", check_shape("point", point, *space.shape))
    return refreshed_buffers(space.loss(model, _no_loss), point, batches, batch_norm_layers(model))


def refreshed_buffers(
    loss: ModelLoss, point: Float[Tensor, " P"], batches: Iterable[Any], norms: Sequence[_BatchNorm]
) -> dict[str, Tensor]:
    """Compute the buffers of a model for given parameters, with new statistics for its BatchNorm layers.

    The function runs the model on all batches, and averages the BatchNorm statistics over them. The result contains all
    other buffers with their current values. The function does not modify the model.

    Args:
        loss: a loss that contains the model.
        point: the parameters (P,) of the model.
        batches: the inputs of the model, as in [`refresh_buffers`][manifoldagg.curves.refresh_buffers].
        norms: the BatchNorm layers of the model. If there are none, `batches` is not read.

    Raises:
        ArgumentError: if a batch does not have a type that [`refresh_buffers`][manifoldagg.curves.refresh_buffers]
            accepts, or `batches` is empty.
        DivergenceError: if a statistic is not finite. The message contains its name.
    """
    if not norms:
        return loss.buffers
    # The replacements are reset and then updated, so the buffers of the model itself do not change.
    fresh = loss.with_buffers()
    for norm in norms:
        # Without a momentum, the first batch has the weight 1 / (number of batches so far) = 1. It replaces the initial
        # values, as long as the counter starts at 0.
        for buffer, value in ((norm.running_mean, 0), (norm.running_var, 1), (norm.num_batches_tracked, 0)):
            if buffer is not None:
                fresh.replacement_of(buffer).fill_(value)
    # An iterable may have no length, so whether it is empty is only known after the loop.
    read = False
    with evaluation_mode(loss.model), torch.no_grad():
        for norm in norms:
            # Only in training mode does a layer compute the statistics of a batch.
            norm.training = True
            # If the momentum is None, BatchNorm computes the arithmetic mean over the batches.
            norm.momentum = None
        for batch in batches:
            args, options = _call_arguments(batch)
            fresh.output(point.detach(), *args, **options)
            read = True
    if not read:
        raise ArgumentError("batches: expected at least one batch, got an empty iterable")
    buffers = fresh.buffers
    statistics = {id(buffer) for norm in norms for buffer in (norm.running_mean, norm.running_var)}
    # A NaN in the inputs or an overflow would silently make every later prediction NaN.
    for name, tensor in tensors_of(loss.model).items():
        if id(tensor) in statistics and not bool(buffers[name].isfinite().all()):
            raise DivergenceError(f"{name}: expected finite statistics at this point, got NaN or infinity")
    return buffers


def batch_norm_layers(model: nn.Module) -> list[_BatchNorm]:
    """Return the BatchNorm layers that track running statistics."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm) and module.running_mean is not None]


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put all modules of a model into evaluation mode for the duration of a `with` block.

    At the end of the block, the modules return to their previous modes. The momentum of each BatchNorm layer is
    restored too.
    """
    modes = [(module, module.training, getattr(module, "momentum", None)) for module in model.modules()]
    try:
        for module, *_ in modes:
            module.training = False
        yield
    finally:
        for module, mode, momentum in modes:
            module.training = mode
            if isinstance(module, _BatchNorm):
                module.momentum = momentum


def _no_loss(output: Any, target: Any) -> Tensor:
    """Replace the criterion of a loss whose value is never computed."""
    # Only the outputs of the layers are needed.
    raise NotImplementedError


def _call_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments with which a batch calls the model.

    Raises:
        ArgumentError: if the batch has an unsupported type.
    """
    if isinstance(batch, Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple | list) and batch:
        return (batch[0],), {}
    raise ArgumentError(
        f"batches: expected tensors, tuples or lists that begin with the inputs, or mappings of keyword arguments; "
        f"got {type(batch).__name__}"
    )
