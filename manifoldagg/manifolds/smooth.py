r"""Functions of a squared length $s$ that are smooth at $s = 0$, such as $\cos\sqrt{s}$.

The length $\sqrt{s}$ itself has no derivative at 0, so autograd would return NaN there. For small $s$, the functions
are therefore computed by a power series in $s$.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from manifoldagg.kernels.operands import needs_autograd_path

__all__ = ["angle_per_sine", "cos_of_square", "dot", "series_or", "sinc_of_square"]

SERIES_RADIUS = 1e-3
"""The squared length below which a series is used. Six terms then have an error below 1e-18."""


def dot(u: Tensor, v: Tensor) -> Tensor:
    """Compute dot products along the last axis, (*batch, 1)."""
    return (u * v).sum(-1, keepdim=True)


def cos_of_square(s: Tensor) -> Tensor:
    r"""Compute $\cos\sqrt{s}$ for $s \ge 0$."""
    return series_or(s, [(-1) ** k / math.factorial(2 * k) for k in range(6)], torch.cos)


def sinc_of_square(s: Tensor) -> Tensor:
    r"""Compute $\sin(\sqrt{s}) / \sqrt{s}$ for $s \ge 0$."""
    return series_or(s, [(-1) ** k / math.factorial(2 * k + 1) for k in range(6)], lambda t: torch.sin(t) / t)


def angle_per_sine(s: Tensor, cosine: Tensor) -> Tensor:
    r"""Compute $t / \sin t$ for an angle $t \in [0, \pi)$, given $s = \sin^2 t$ and the cosine of $t$."""
    # arcsin(r)/r = Σ (2k)! / (4^k (k!)² (2k+1)) r^(2k). A small sine belongs to a small angle only if the cosine is
    # positive.
    series = [math.comb(2 * k, k) / (4**k * (2 * k + 1)) for k in range(6)]
    return _series_or(s, series, lambda t: torch.atan2(t, cosine) / t, cosine > 0)


def series_or(s: Tensor, series: Sequence[float], function: Callable[[Tensor], Tensor]) -> Tensor:
    r"""Compute a function of $\sqrt{s}$ that is smooth at $s = 0$.

    Near $s = 0$, the result is a truncated power series in $s$ with the coefficients `series`. Elsewhere, it is the
    value of `function` at $\sqrt{s}$.
    """
    return _series_or(s, series, function, s >= 0)


def _series_or(s: Tensor, series: Sequence[float], function: Callable[[Tensor], Tensor], may_be_near: Tensor) -> Tensor:
    """Compute `series_or`, but use the series only where `may_be_near` is true."""
    if not needs_autograd_path([s]):
        # Only derivatives need the series. The quotients of `function` are accurate except at 0.
        root = s.sqrt()
        return torch.where((root == 0) & may_be_near, series[0], function(root))
    near = (s < SERIES_RADIUS) & may_be_near
    # `where` differentiates both branches. The unused branch gets a harmless argument, because an infinite derivative
    # times a zero gradient would be NaN.
    root = torch.where(near, torch.ones_like(s), s).sqrt()
    return torch.where(near, _polynomial(torch.where(near, s, torch.zeros_like(s)), series), function(root))


def _polynomial(s: Tensor, coefficients: Sequence[float]) -> Tensor:
    # Horner's scheme starts with the highest power, so the smallest terms are added first.
    """Evaluate a polynomial whose coefficients are given in ascending order of the powers."""
    value = torch.zeros_like(s)
    for coefficient in reversed(coefficients):
        value = value * s + coefficient
    return value
