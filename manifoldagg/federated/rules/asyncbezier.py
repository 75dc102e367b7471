"""AsyncBezier: step along the curve that a client learned, moved to the current model."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from manifoldagg.corrections import AutoThreshold, Correction, OrthoDC
from manifoldagg.errors import ArgumentError, check_number
from manifoldagg.federated.rules._step import ScheduledRule

__all__ = ["AsyncBezier"]

AUTO = "auto"


@dataclass(frozen=True)
class AsyncBezier(ScheduledRule):
    r"""$\Theta^{\tau+1} = \iota_\psi(s)$ on the corrected curve $\psi = \exp_{\varphi_{\Theta^\tau}}(\pi v)$.

    $\pi$ is OrthoDC, control point by control point; the candidate is $\hat\Theta = \iota_\psi(1)$; the rate
    $\rho = S\, w_i\, \eta_g(\tau)$ is pulled back to the smallest $s$ with

    $$d(\iota_\psi(s), \Theta^\tau) = \rho\, d(\hat\Theta, \Theta^\tau).$$

    Options beside `threshold` are those of
    [`AsyncCorrected`][manifoldagg.federated.rules.AsyncCorrected]; `decay=1` is AsyncBezierED.

    Args:
        threshold: $\vartheta \in [-1, 1]$ of OrthoDC; `"auto"` chooses -1, 0 or 1 at each update, on a flat space, by
            [`AutoThreshold`][manifoldagg.corrections.AutoThreshold].

    Raises:
        ArgumentError: naming the option that is out of range.

    Source: Manifold (9)-(12), Algorithm 1. Cost: with n control points, n + 2 vectors are read twice and one
    is written.

    Cost: an update that moves the model reads 8 words a parameter, writes 1 and makes 0.

    Example:
        >>> AsyncBezier(threshold=1.0, rate=0.5).correction
        OrthoDC(threshold=1.0)
        >>> AsyncBezier(threshold="auto").correction
        AutoThreshold(decay=0.95)
    """

    plain: ClassVar[bool] = False
    threshold: float | str = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.threshold, str):
            if self.threshold != AUTO:
                raise ArgumentError(f"threshold: expected a number in [-1, 1] or {AUTO!r}, got {self.threshold!r}")
        else:
            check_number("threshold", self.threshold, at_least=-1, at_most=1)

    @cached_property
    def correction(self) -> Correction:
        return AutoThreshold() if isinstance(self.threshold, str) else OrthoDC(self.threshold)
