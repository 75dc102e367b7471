"""Orthogonal corrections: remove from an update what lies along the drift."""

from dataclasses import dataclass
from typing import Any

from manifoldagg.corrections.correction import Correction, identity
from manifoldagg.corrections.frame import Matrix
from manifoldagg.errors import check_number


@dataclass(frozen=True)
class OrthoDC(Correction):
    r"""Remove the component along the drift from each displacement that conflicts with it.

    $$\pi v = \begin{cases} v - \dfrac{\langle v, g\rangle}{\langle g, g\rangle}\, g & \cos(v, g) \le \vartheta\\
    v & \text{otherwise} \end{cases}$$

    The projection solves $\min_u \|u - v\|$ over $u \perp g$. With $\vartheta = 1$ it is always made, and the
    tangent and the position reading of an update coincide; $\vartheta = 0$ is gradient surgery; with
    $\vartheta = -1$ it is never made. Where $v$ or $g$ is zero there is nothing to remove.

    Args:
        threshold: $\vartheta \in [-1, 1]$.

    Raises:
        ArgumentError: if `threshold` is outside [-1, 1].

    Source: Manifold, Algorithm 3.

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Flat
        >>> base, current = torch.zeros(2), torch.tensor([1.0, 0.0])
        >>> OrthoDC(1.0)(Flat(2), base, current, torch.tensor([[3.0, 4.0]]))
        tensor([[0., 4.]])
    """

    threshold: float = 1.0

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, at_least=-1, at_most=1)

    def coefficients(self, gram: Matrix, state: Any = None) -> tuple[list[list[Any]], Any]:
        n = len(gram) - 1
        lines, drift = identity(n), gram[n][n]
        for i in range(n):
            if drift != 0 and self._conflicts(gram[i][i], gram[i][n], drift):
                lines[i][n] = -gram[i][n] / drift
        return lines, state

    def _conflicts(self, square: Any, along: Any, drift: Any) -> bool:
        """Whether cos(v, g), clipped to [-1, 1], is at most the threshold."""
        if abs(self.threshold) == 1:
            return self.threshold == 1
        if square <= 0:  # no displacement, or one that cancelled down to rounding
            return False
        return bool(along <= self.threshold * square**0.5 * drift**0.5)
