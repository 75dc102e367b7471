"""A decorator that disables gradients and inference mode in a function."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

__all__ = ["no_grad"]

P = ParamSpec("P")
T = TypeVar("T")
set_grad_enabled = torch._C._set_grad_enabled
"""The C function of torch. The public class `torch.set_grad_enabled` runs Python code, which an interrupt can stop
halfway."""


def no_grad(function: Callable[P, T]) -> Callable[P, T]:
    """Run the decorated function without gradient tracking and outside of inference mode.

    In inference mode, torch would create tensors that autograd cannot use later.

    Use this decorator instead of `torch.no_grad` for functions that a server calls once per update. The overhead of
    `torch.no_grad` is as large as the server's own work for an update.

    Example:
        >>> no_grad(torch.is_grad_enabled)(), torch.is_grad_enabled()
        (False, True)
    """

    @wraps(function)
    def plain(*args: P.args, **named: P.kwargs) -> T:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return plain(*args, **named)
        before = torch.is_grad_enabled()
        try:
            set_grad_enabled(False)
            return function(*args, **named)
        finally:
            set_grad_enabled(before)

    return plain
