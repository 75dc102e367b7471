r"""Arc length on [0, 1] by quadrature, and its inverse."""

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

ROUGH = 500
"""In units of rounding: by how much of the length the two halves of a panel may differ from the whole."""

MAX_PANELS = 4096
MAX_BISECTIONS = 52
"""Halvings of [0, 1] until float64 ends."""


def arc_length(speed: Speed, edges: Sequence[float]) -> Float[Tensor, ""]:
    r"""Integrate $\int |v|$ over [first edge, last edge] to a relative error of 1e-12, if the speed is as exact.

    Composite Gauss-Legendre of 16 nodes; a panel is halved until its halves agree with it, so that kinks and cusps cost
    a few panels more. It is differentiable in what `speed` depends on.

    Args:
        speed: parameters (m, 16) to speeds.
        edges: ascending; where the speed may jump there must be one.

    Raises:
        ArgumentError: if the length is not finite.

    Example:
        >>> arc_length(lambda t: (2 * t - 1).abs(), [0.0, 1.0])
        tensor(0.5000, dtype=torch.float64)
    """
    cuts = _panels(speed, edges)
    return _quadrature(speed, cuts[:-1], cuts[1:]).sum()


def parameter_at_arc_length(speed: Speed, edges: Sequence[float], fraction: Float[Tensor, "*batch"]) -> Tensor:
    r"""Return the parameters at fractions of the arc length: the inverse of `arc_length`.

    Args:
        speed: as for `arc_length`.
        edges: as there.
        fraction: in [0, 1].

    Returns:
        (*batch,) in float64; 0 and 1 exactly at part 0 and 1; where there is no length, `fraction` between the ends.

    Example:
        >>> parameter_at_arc_length(lambda t: 2 * t, [0.0, 1.0], torch.tensor(0.25))
        tensor(0.5000, dtype=torch.float64)
    """
    with torch.no_grad():
        cuts = _panels(speed, edges)
        pieces = _quadrature(speed, cuts[:-1], cuts[1:]).double()
        reached = torch.cat([pieces.new_zeros(1), pieces.cumsum(0)])
        fraction = fraction.to(reached)
        straight = edges[0] + (edges[-1] - edges[0]) * fraction
        wanted = (fraction * reached[-1]).flatten()
        # Within one panel: the sum of those before it is not subtracted from one of its own size.
        k = (torch.searchsorted(reached, wanted, right=True) - 1).clamp(0, len(pieces) - 1)
        rest = wanted - reached[k]
        t = find_sign_change(lambda t: rest - _quadrature(speed, cuts[k], t), cuts[k], cuts[k + 1])
        t = torch.where(fraction == 0, edges[0], torch.where(fraction == 1, edges[-1], t.reshape(fraction.shape)))
        return torch.where(reached[-1] > 0, t, straight)


def _quadrature(speed: Speed, low: Tensor, high: Tensor) -> Tensor:
    """The integral of `speed` over each [low, high]."""
    half = ((high - low) / 2).unsqueeze(-1)
    nodes, weights = _gauss_legendre()
    values = speed(low.unsqueeze(-1) + half * (1 + nodes.to(low.device)))
    return (half * weights.to(low.device) * values).sum(-1).to(values.dtype)


@cache
def _gauss_legendre() -> tuple[Tensor, Tensor]:
    """Nodes and weights of Gauss-Legendre on [-1, 1], exact up to degree 31: made late, as their maker loads late."""
    nodes, weights = np.polynomial.legendre.leggauss(16)
    return torch.from_numpy(nodes), torch.from_numpy(weights)


def _panels(speed: Speed, edges: Sequence[float]) -> Tensor:
    """Edges between which the quadrature is as exact as the speed."""
    with torch.no_grad():
        cuts = torch.tensor(edges, dtype=torch.float64)
        low = cuts[:-1]
        high = cuts[1:]
        whole = _quadrature(speed, low, high)
        tolerance = ROUGH * torch.finfo(whole.dtype).eps
        total = None
        found = [cuts]
        for _ in range(MAX_BISECTIONS):
            middle = (low + high) / 2
            left, right = _quadrature(speed, torch.cat([low, middle]), torch.cat([middle, high])).chunk(2)
            found.append(middle)
            total = (left + right).sum() if total is None else total
            if not bool(total.isfinite()):
                raise ArgumentError(f"phi: expected a curve of finite length in float64, got length {total.item()}")
            # Against the whole length: a short panel with a kink may be as rough as it likes.
            rough = (left + right - whole).abs() > tolerance * total
            if not rough.any() or sum(map(len, found)) > MAX_PANELS:
                break
            low = torch.cat([low[rough], middle[rough]])
            high = torch.cat([middle[rough], high[rough]])
            whole = torch.cat([left[rough], right[rough]])
        return torch.cat(found).sort().values
