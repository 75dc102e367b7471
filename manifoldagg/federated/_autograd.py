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
    """Disable gradient tracking and inference mode while the decorated function runs.

    Use this decorator in place of those of torch for functions that a server calls once per update. One call through
    the decorators of torch takes as long as the server's own work for the update.

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
