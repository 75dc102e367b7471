"""Automatic threshold of OrthoDC, chosen online from the updates of a server."""

from dataclasses import dataclass, field
from typing import Any

import torch

from manifoldagg._validation import check_number, check_shape
from manifoldagg.corrections.correction import Correction
from manifoldagg.corrections.frame import Frame
from manifoldagg.corrections.gram import Gram, Matrix, detach_scalar
from manifoldagg.corrections.orthogonal import OrthoDC
from manifoldagg.kernels.tensor_list import as_float64

__all__ = ["AutoThreshold"]

ALWAYS_PROJECT = OrthoDC(1.0)


@dataclass(frozen=True)
class AutoThreshold(Correction):
    r"""OrthoDC with the $\vartheta \in \{-1, 0, 1\}$ that best predicts a fresh update.

    Two problems of least squares are solved at each update, and nothing is asked of the clients.

    1. *What would the client have done from here?* A client that trains from $\Theta$ returns
    $v(\Theta) \approx a - \beta\,\Theta$: on a quadratic loss, gradient descent does, with $\beta$ the part of the way
    to its minimum that it goes. Over the updates $(\Theta_k, v_k)$ so far, newest first,

    $$\min_{a, \beta} \sum_k w_k\, \|v_k - a + \beta\, \Theta_k\|^2, \qquad
    \hat\beta = -\frac{\operatorname{Cov}_w(v, \Theta)}{\operatorname{Var}_w(\Theta)},$$

    clipped to [0, 1] (from standing still to reaching the minimum), 1 while the bases do not vary. The weights are
    those of a running mean: $w_k$ falls by `decay` with each update.

    2. *Which of the three is nearest to it?* The model predicts $v^* = v - \hat\beta g$ at $\Theta^\tau$, and

    $$\vartheta_\tau = \operatorname{arg\,min}_{\vartheta \in \{-1, 0, 1\}} \|\pi_\vartheta v - v^*\|^2.$$

    With $s = \langle v, g\rangle / \langle g, g\rangle$, keeping $v$ errs by $\hat\beta^2 \|g\|^2$ and projecting it by
    $(s - \hat\beta)^2 \|g\|^2$, so that $\vartheta_\tau = 1$ exactly where $0 \le s \le 2 \hat\beta$: where what is
    left to do along the drift, $s - \hat\beta$, is no more than what a stale client does not know to be done. Else
    $\vartheta_\tau = -1$; $\vartheta = 0$ does what one of the two does. If $\hat\beta$ is exact, no fixed threshold is
    nearer at any update; it is exact for clients that share one isotropic quadratic loss. All control points follow the
    choice for the end point, the last displacement.

    **Measured, not proved:** what this does to a run. The regret is what is lost, in distance to the joint optimum
    after 50 updates, against the best fixed threshold, as a part of the spread from best to worst. For two quadratic
    clients in the plane that take turns (`examples/corrections.py`, 20 problems) its median is 0.0 %, -0.2 % and -1.1 %
    at delays 1, 3 and 10 (200 problems: 0.0, 0.1 and -1.3 %). Where clients come by chance it is 22, 13 and -0.3 % of
    200 problems (distances .24, .26 and .30, against .24, .25 and .43 of the best): it follows each client's
    fresh update and does not weigh one client against another, while always projecting also damps the chance of who
    comes.

    The state is two vectors (the means of $v$ and of the bases) and a few numbers; the frame gets two rows, and one
    pass reads everything.

    Args:
        decay: of the weights, per update.

    Raises:
        ArgumentError: if `decay` is not in (0, 1); when applied to a curved space: the fit compares updates from
            different points.

    Example:
        >>> import torch
        >>> from manifoldagg.corrections import Frame
        >>> from manifoldagg.manifolds import Flat
        >>> base, current, v = torch.zeros(2), torch.tensor([1.0, 0.0]), torch.tensor([[1.0, 2.0]])
        >>> AutoThreshold().apply(Frame.of(Flat(2), base, current, v)).displacements()
        tensor([[0., 2.]])
    """

    decay: float = field(default=0.95, kw_only=True)

    keeps_state = True

    def __post_init__(self) -> None:
        check_number("decay", self.decay, above=0, at_most=1 - 2**-30)

    def extend(self, frame: Frame, state: Any = None) -> Frame:
        frame.require_flat("AutoThreshold, a fit to updates from different points,")
        if state is None or "base" not in state:
            return frame.with_row("mean v", frame.base, frame.base).with_row("base - mean", frame.base, frame.base)
        for name in ("displacement", "base"):
            check_shape(f"state[{name!r}]", state[name], frame.size)
        ends = (state["base"], frame.base) if frame.is_pseudo_gradient else (frame.base, state["base"])
        return frame.with_row("mean v", state["displacement"]).with_row("base - mean", *ends)

    def coefficients(self, gram: Gram, state: Any = None) -> tuple[Matrix, Any]:
        lines = gram.identity()
        n = gram.num_displacements
        if n == 0:
            return lines, state
        inner = gram.matrix
        mean = gram.row_index("mean v")
        moved = gram.row_index("base - mean")
        end = n - 1
        if state is None or "covariance" not in state:
            covariance = variance = 0 * inner[n, n]
            state = {}
        else:
            gain = 1 - self.decay
            covariance = self.decay * (state["covariance"] + gain * (inner[end, moved] - inner[mean, moved]))
            variance = self.decay * (state["variance"] + gain * inner[moved, moved])
        beta = regression_slope(covariance, variance)
        threshold = -1
        if inner[n, n] != 0 and 0 <= inner[end, n] / inner[n, n] <= 2 * beta:
            lines, _ = ALWAYS_PROJECT.coefficients(gram)
            threshold = 1
        numbers = {"covariance": covariance, "variance": variance, "slope": beta, "threshold": threshold}
        return lines, {**state, **{name: detach_scalar(value) for name, value in numbers.items()}}

    def update_state(self, frame: Frame, coefficients: Matrix, state: Any) -> Any:
        n = frame.num_displacements
        if n == 0:
            return state
        frame = frame.detach()
        wide = torch.promote_types(frame.dtype, torch.float32)
        seen = {"displacement": frame.row(n - 1), "base": as_float64(frame.base)}
        if "base" not in state:
            # A copy: the caller may write into the tensors that were handed in.
            means = {name: value.to(wide, copy=True) for name, value in seen.items()}
        else:
            means = {name: state[name].double().lerp(x, 1 - self.decay).to(wide) for name, x in seen.items()}
        return {**state, **means}


def regression_slope(covariance: Any, variance: Any) -> Any:
    r"""Compute $\hat\beta = -\operatorname{Cov} / \operatorname{Var}$ in [0, 1]; 1 if the variance is 0.

    Example:
        >>> regression_slope(-1.0, 4.0), regression_slope(1.0, 4.0), regression_slope(0.0, 0.0)
        (0.25, 0.0, 1.0)
    """
    if variance <= 0:
        return 1.0
    return min(max(-covariance / variance, 0.0), 1.0)
