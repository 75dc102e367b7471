"""Automatic threshold of `OrthoDC`, estimated online from the updates of a server."""

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
    r"""OrthoDC with the threshold $\vartheta \in \{-1, 0, 1\}$ that best predicts a fresh update.

    The correction solves two least-squares problems at each update. The clients do no additional work.

    1. **Estimate how the displacement depends on the starting point.** A client that trains from $\Theta$ returns
       $v(\Theta) \approx a - \beta\,\Theta$. This is exact for gradient descent on a quadratic loss, where $\beta$ is
       the fraction of the way to the minimum that the client covers. Over the updates $(\Theta_k, v_k)$ so far, newest
       first, the estimate is

    $$\min_{a, \beta} \sum_k w_k\, \|v_k - a + \beta\, \Theta_k\|^2, \qquad
    \hat\beta = -\frac{\operatorname{Cov}_w(v, \Theta)}{\operatorname{Var}_w(\Theta)},$$

    clipped to [0, 1]: 0 for no progress, 1 for reaching the minimum. It is 1 while all bases are equal. The weights are
    those of an exponential moving average: $w_k$ decreases by the factor `decay` with each update.

    2. **Choose the threshold whose result is nearest to the prediction.** The model predicts $v^* = v - \hat\beta g$ at
       $\Theta^\tau$, and

    $$\vartheta_\tau = \operatorname{arg\,min}_{\vartheta \in \{-1, 0, 1\}} \|\pi_\vartheta v - v^*\|^2.$$

    Let $s = \langle v, g\rangle / \langle g, g\rangle$. The squared error along the drift is $\hat\beta^2 \|g\|^2$
    without the projection and $(s - \hat\beta)^2 \|g\|^2$ with it. So $\vartheta_\tau = 1$ if and only if
    $0 \le s \le 2 \hat\beta$. Otherwise $\vartheta_\tau = -1$. The result of $\vartheta = 0$ always equals one of the
    two.

    If $\hat\beta$ is exact, no fixed threshold is nearer to $v^*$ at any update. It is exact for clients that share one
    isotropic quadratic loss. All control points use the decision for the end point, which is the last displacement.

    **Measured, not proved:** the effect on a whole run. The benchmark (`examples/corrections.py`) has two quadratic
    clients in the plane and 50 updates. The regret is the additional distance to the joint optimum compared with the
    best fixed threshold, as a percentage of the spread between the best and the worst threshold.

    - If the clients alternate, the median regret at delays 1, 3 and 10 is 0.0 %, -0.2 % and -1.1 % (20 problems), or
      0.0 %, 0.1 % and -1.3 % (200 problems).
    - If the clients arrive in random order, the median regret is 22 %, 13 % and -0.3 % (200 problems). The median
      distances are 0.24, 0.26 and 0.30, and those of the best fixed threshold 0.24, 0.25 and 0.43.

    The correction follows each client's fresh update and does not balance the clients. Constant projection also damps
    the noise of a random order, so it can be better at small delays.

    The state consists of two vectors, the means of $v$ and of the bases, and a few numbers. The frame gets two
    additional rows. One pass reads everything.

    Args:
        decay: the factor by which the weights decrease per update.

    Raises:
        ArgumentError: if `decay` is not in (0, 1). On a curved space, because the fit compares updates from different
            points.

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
        matrix = gram.identity()
        n = gram.num_displacements
        if n == 0:
            return matrix, state
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
            matrix, _ = ALWAYS_PROJECT.coefficients(gram)
            threshold = 1
        numbers = {"covariance": covariance, "variance": variance, "slope": beta, "threshold": threshold}
        return matrix, {**state, **{name: detach_scalar(value) for name, value in numbers.items()}}

    def update_state(self, frame: Frame, coefficients: Matrix, state: Any) -> Any:
        n = frame.num_displacements
        if n == 0:
            return state
        frame = frame.detach()
        wide = torch.promote_types(frame.dtype, torch.float32)
        seen = {"displacement": frame.row(n - 1), "base": as_float64(frame.base)}
        if "base" not in state:
            # The state stores a copy, because the caller may overwrite the tensors.
            means = {name: value.to(wide, copy=True) for name, value in seen.items()}
        else:
            means = {name: state[name].double().lerp(x, 1 - self.decay).to(wide) for name, x in seen.items()}
        return {**state, **means}


def regression_slope(covariance: Any, variance: Any) -> Any:
    r"""Compute $\hat\beta = -\operatorname{Cov} / \operatorname{Var}$, clipped to [0, 1]. It is 1 if the variance is 0.

    Example:
        >>> regression_slope(-1.0, 4.0), regression_slope(1.0, 4.0), regression_slope(0.0, 0.0)
        (0.25, 0.0, 1.0)
    """
    if variance <= 0:
        return 1.0
    return min(max(-covariance / variance, 0.0), 1.0)
