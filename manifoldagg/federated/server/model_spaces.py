"""The parameter space of a server that is created or resumed with a module or a state dict."""

import glob
from collections.abc import Mapping

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
"""The argument `model` in error messages, where the code checks a space or a point."""


def model_space(
    model: torch.nn.Module | Mapping[str, Tensor],
    buffer_policy: BufferPolicy,
    manifolds: Assignment | None,
    adapters: bool | None,
    scaling: Scaling,
    *,
    expected: str = "a torch.nn.Module or a state dict",
    usage: str = "Server.of(model, rule)",
) -> tuple[ParameterSpace, BufferPolicy]:
    """Return the space of a model and the policies of the buffers.

    The model and the next four arguments are as in `Server.of`. If `model` has another type, the error message contains
    `expected`, the allowed types, and `usage`, the call with the arguments in the right order.

    Raises:
        ArgumentError: if an argument is invalid. The message names it.
    """
    if not isinstance(model, torch.nn.Module | Mapping):
        raise ArgumentError(f"model: expected {expected}, got {short_repr(model)}; write {usage}")
    with renamed_arguments(MODEL_NAMES):
        try:
            if isinstance(model, torch.nn.Module):
                _check_module_options(adapters, scaling)
                space = ParameterSpace.of(model, manifolds, buffer_policy=buffer_policy)
            else:
                space = ParameterSpace.of_state_dict(
                    tensors_of(model),
                    manifolds,
                    buffer_policy=buffer_policy,
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
    """Check that the options for adapters have their defaults, because a space of a module has no adapters."""
    if adapters is not None and check_choice("adapters", adapters, (True, False)):
        raise ArgumentError(
            "adapters: expected False for a module, got True; pass the state dict "
            "that get_peft_model_state_dict of PEFT returns"
        )
    check_unscaled(scaling)


def initial_model(
    space: ParameterSpace, model: torch.nn.Module | Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the point of a model, and copies of the buffers."""
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
    """Return the space of a resumed server, and the policies of the buffers; `None` for the saved policies.

    The arguments are as in `Server.resume`. `saved_policies` contains the policies of the checkpoint by buffer name.

    Raises:
        ArgumentError: if an argument is invalid. The message names it.
    """
    if isinstance(model, Manifold):
        for name, value in (("manifolds", manifolds), ("adapters", adapters), ("scaling", scaling)):
            default = 1.0 if name == "scaling" else None
            if not (value is default or (type(value) is float and value == default)):
                raise ArgumentError(f"{name}: expected {default} if model is a space, got {short_repr(value)}")
        return model, buffer_policy
    # A buffer name may contain special characters of glob patterns. In a sequence, a pattern may match no buffer.
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
