"""Arc length of a curve by adaptive quadrature, and the parameter at a given arc length."""

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from manifoldagg.curves.bernstein import find_sign_change
from manifoldagg.errors import ArgumentError

__all__ = ["Speed", "arc_length", "parameter_at_arc_length"]

Speed = Callable[[Tensor], Tensor]

MAX_PANEL_ERROR = 500
"""The tolerance for bisecting a panel, in units of machine epsilon times the total length.

A panel is bisected if its integral differs by more than this tolerance from the sum of the integrals of its halves.
"""

MAX_PANELS = 4096
"""The maximum number of panels, which bounds the cost if rounding errors of the speed prevent convergence."""
MAX_BISECTIONS = 52
"""The number of bisections of [0, 1] that float64 can resolve."""


def arc_length(speed: Speed, edges: Sequence[float]) -> Float[Tensor, ""]:
    """Compute the length of a curve as the integral of its speed, by adaptive quadrature.

    The relative error of the length is 1e-12, provided that `speed` is also accurate to 1e-12. The length is
    differentiable with respect to the tensors on which `speed` depends.

    The function divides the interval of integration into panels, and applies a Gauss-Legendre rule with 16 nodes to
    each panel. It bisects a panel until its integral agrees with the sum of the integrals over its two halves. A kink
    or a cusp of the curve therefore requires only a few more panels.

    Args:
        speed: a function from parameters (m, 16) on the CPU to speeds on any device.
        edges: the ascending edges of the initial panels. The first and the last edge are the limits of integration.
            Every jump of the speed must be an edge.

    Raises:
        ArgumentError: if the length is not finite.

    Example:
        >>> arc_length(lambda t: (2 * t - 1).abs(), [0.0, 1.0])
        tensor(0.5000, dtype=torch.float64)
    """
    cuts = _panels(speed, edges)
    return _quadrature(speed, cuts[:-1], cuts[1:]).sum()


def parameter_at_arc_length(speed: Speed, edges: Sequence[float], fraction: Float[Tensor, "*batch"]) -> Tensor:
    """Compute the parameters at given fractions of the arc length.

    Args:
        speed: as for `arc_length`.
        edges: as for `arc_length`.
        fraction: fractions of the length, in [0, 1].

    Returns:
        The parameters (*batch,) in float64. The fractions 0 and 1 map exactly to the first and the last edge. If the
        length is 0, the parameters are linearly interpolated between these edges.

    Example:
        >>> parameter_at_arc_length(lambda t: 2 * t, [0.0, 1.0], torch.tensor(0.25))
        tensor(0.5000, dtype=torch.float64)
    """
    with torch.no_grad():
        cuts = _panels(speed, edges)
        panels = _quadrature(speed, cuts[:-1], cuts[1:]).double()
        # The panel that contains a target length follows from the cumulative lengths.
        cumulative = torch.cat([panels.new_zeros(1), panels.cumsum(0)])
        fraction = fraction.to(cumulative)
        linear = edges[0] + (edges[-1] - edges[0]) * fraction
        target = (fraction * cumulative[-1]).flatten()
        # The search is limited to one panel. The length of the earlier panels is subtracted once, before the search, so
        # no digits cancel during the search.
        k = (torch.searchsorted(cumulative, target, right=True) - 1).clamp(0, len(panels) - 1)
        remaining = target - cumulative[k]
        t = find_sign_change(lambda t: remaining - _quadrature(speed, cuts[k], t), cuts[k], cuts[k + 1])
        # The ends are set explicitly, because the search is only accurate up to rounding.
        t = torch.where(fraction == 0, edges[0], torch.where(fraction == 1, edges[-1], t.reshape(fraction.shape)))
        return torch.where(cumulative[-1] > 0, t, linear)


def _quadrature(speed: Speed, low: Tensor, high: Tensor) -> Tensor:
    """Compute the integral of the speed over each of several panels [low, high], (m,)."""
    # The nodes and weights of the rule on [-1, 1] are scaled to each panel [low, high]. They are float64, so the sum is
    # accumulated in float64 even if the speeds are less precise.
    half = ((high - low) / 2).unsqueeze(-1)
    nodes, weights = _gauss_legendre()
    values = speed(low.unsqueeze(-1) + half * (1 + nodes)).cpu()
    return (half * weights * values).sum(-1).to(values.dtype)


@cache
def _gauss_legendre() -> tuple[Tensor, Tensor]:
    """Return the nodes and weights of the 16-point Gauss-Legendre rule on [-1, 1]."""
    # With 16 nodes, the rule is exact for polynomials of degree 31.
    nodes, weights = np.polynomial.legendre.leggauss(16)
    return torch.from_numpy(nodes), torch.from_numpy(weights)


def _panels(speed: Speed, edges: Sequence[float]) -> Tensor:
    """Bisect panels until the quadrature converges, and return the edges of all panels."""
    with torch.no_grad():
        cuts = torch.tensor(edges, dtype=torch.float64, device="cpu")
        low = cuts[:-1]
        high = cuts[1:]
        whole = _quadrature(speed, low, high)
        tolerance = MAX_PANEL_ERROR * torch.finfo(whole.dtype).eps
        total = None
        all_cuts = [cuts]
        for _ in range(MAX_BISECTIONS):
            middle = (low + high) / 2
            # One call evaluates the speed in the halves of all panels, because each call has a large overhead.
            left, right = _quadrature(speed, torch.cat([low, middle]), torch.cat([middle, high])).chunk(2)
            all_cuts.append(middle)
            total = (left + right).sum() if total is None else total
            if not bool(total.isfinite()):
                raise ArgumentError(f"phi: expected a curve of finite length in float64, got length {total.item()}")
            # The error is relative to the whole length, so a short panel with a kink may be inaccurate.
            inaccurate = (left + right - whole).abs() > tolerance * total
            if not inaccurate.any() or sum(map(len, all_cuts)) > MAX_PANELS:
                break
            # Only inaccurate panels are bisected again. Their halves are already integrated.
            low = torch.cat([low[inaccurate], middle[inaccurate]])
            high = torch.cat([middle[inaccurate], high[inaccurate]])
            whole = torch.cat([left[inaccurate], right[inaccurate]])
        return torch.cat(all_cuts).sort().values
