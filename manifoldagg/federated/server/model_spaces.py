"""The parameter space of a server that is created or resumed from a module or a state dict."""

import glob
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from manifoldagg._validation import check_choice, renamed_arguments, short_repr
from manifoldagg.errors import ArgumentError, StateDictError
from manifoldagg.federated.server.input_warnings import warn_if_adapter_factors
from manifoldagg.manifolds import Manifold, ParameterSpace
from manifoldagg.manifolds.assign import Assignment
from manifoldagg.manifolds.buffer_policies import BufferPolicy
from manifoldagg.manifolds.layout import tensors_of
from manifoldagg.manifolds.lora.scaling import Scaling
from manifoldagg.manifolds.parameters import check_unscaled

__all__ = ["MODEL_NAMES", "initial_model", "model_space", "resumed_space"]

MODEL_NAMES = {"space": "model", "start": "model", "source": "model"}
"""The argument that a caller passes instead of a space and a point."""


def model_space(
    model: torch.nn.Module | Mapping[str, Tensor],
    buffer_policy: BufferPolicy,
    manifolds: Assignment | None,
    adapters: bool | None,
    scaling: Scaling,
    *,
    personal: Sequence[str] = (),
    expected: str = "a torch.nn.Module or a state dict",
    usage: str = "Server.of(model, rule)",
) -> tuple[ParameterSpace, BufferPolicy]:
    """Return the space of a model, and the policies of its buffers. Frozen parameters of a module are left unchanged.

    Args:
        model: a module or a state dict.
        buffer_policy: the policies of the buffers.
        manifolds: a mapping from names or glob patterns to the space of these parameters.
        adapters: whether each pair of factors in a state dict represents one matrix.
        scaling: the factor of the products of adapter factors in the model.
        personal: names or glob patterns of the personal entries.
        expected: the kinds of models, for the message about another object.
        usage: the call with its arguments in the right order, for the same message.

    Raises:
        ArgumentError: if an argument is invalid. The message names it.
    """
    if not isinstance(model, torch.nn.Module | Mapping):
        raise ArgumentError(f"model: expected {expected}, got {short_repr(model)}; write {usage}")
    with renamed_arguments(MODEL_NAMES):
        try:
            if isinstance(model, torch.nn.Module):
                _check_module_options(adapters, scaling)
                space = ParameterSpace.of(model, manifolds, buffer_policy=buffer_policy, personal=personal)
            else:
                space = ParameterSpace.of_state_dict(
                    tensors_of(model),
                    manifolds,
                    buffer_policy=buffer_policy,
                    personal=personal,
                    adapters=False if adapters is None else adapters,
                    scaling=scaling,
                )
        except StateDictError as error:
            raise StateDictError(f"model: {str(error).removeprefix('source: ')}") from None
    if adapters is None and not isinstance(model, torch.nn.Module):
        warn_if_adapter_factors("model", model, "pass adapters=True for their products, or adapters=False")
    space.layout.check_parameters("model")
    return space, dict(space.buffer_policies)


def _check_module_options(adapters: bool | None, scaling: Scaling) -> None:
    """Check that the options for adapters have their defaults, because adapters of a module are not detected.

    Raises:
        ArgumentError: if an option has another value. The message names it.
    """
    if adapters is not None and check_choice("adapters", adapters, (True, False)):
        raise ArgumentError(
            "adapters: expected False for a module, got True; pass the state dict "
            "that get_peft_model_state_dict of PEFT returns"
        )
    check_unscaled(scaling)


def initial_model(
    space: ParameterSpace, model: torch.nn.Module | Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the point of a model and copies of its buffers."""
    with renamed_arguments(MODEL_NAMES):
        return space.points({"model: ": space.stack_factors(tensors_of(model))})[0], space.buffers(model)


def resumed_space(
    model: torch.nn.Module | Mapping[str, Tensor] | Manifold,
    saved_policies: Mapping[str, str],
    buffer_policy: BufferPolicy | None,
    manifolds: Assignment | None,
    adapters: bool | None,
    scaling: Scaling,
) -> tuple[Manifold, BufferPolicy | None]:
    """Return the space of a resumed server and the policies of its buffers, or `None` for the saved policies.

    Args:
        model: a module, a state dict, or the space itself.
        saved_policies: the policies of the checkpoint, by the names of the buffers.
        buffer_policy: the policies that replace the saved ones.
        manifolds: the manifolds, as in `model_space`.
        adapters: the option, as in `model_space`.
        scaling: the scaling, as in `model_space`.

    Raises:
        ArgumentError: if an argument is invalid. The message names it.
    """
    if isinstance(model, Manifold):
        for name, value in (("manifolds", manifolds), ("adapters", adapters), ("scaling", scaling)):
            default = 1.0 if name == "scaling" else None
            if not (value is default or (type(value) is float and value == default)):
                raise ArgumentError(f"{name}: expected {default} if model is a space, got {short_repr(value)}")
        return model, buffer_policy
    # Buffer names may contain special characters of patterns. Patterns in a sequence need not match a buffer.
    saved = [] if isinstance(model, torch.nn.Module) else [glob.escape(name) for name in saved_policies]
    space, policies = model_space(
        model,
        saved if buffer_policy is None else buffer_policy,
        manifolds,
        adapters,
        scaling,
        expected="a torch.nn.Module, a state dict or a Manifold",
        usage="Server.resume(path, model, rule)",
    )
    return space, None if buffer_policy is None else policies
