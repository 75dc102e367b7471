"""Orthogonal corrections, which remove the component of an update along the drift.

The drift is the change of the server's model since the client started. If an update points against the drift, adding
the update would partly undo the progress of the server.
"""

from dataclasses import dataclass, field
from typing import Any

from manifoldagg._validation import check_choice, check_number
from manifoldagg.corrections.correction import Correction, by_granularity
from manifoldagg.corrections.frame import GRANULARITIES
from manifoldagg.corrections.gram import Gram, Matrix
from manifoldagg.errors import ArgumentError

__all__ = ["OrthoCorrect", "OrthoDC", "OrthoGrad", "OrthoPos", "OrthoStrict"]


@dataclass(frozen=True)
class OrthoDC(Correction):
    r"""A correction that removes the component along the drift from displacements that conflict with the drift.

    $$\pi v = \begin{cases} v - \dfrac{\langle v, g\rangle}{\langle g, g\rangle}\, g & \cos(v, g) \le \vartheta\\
    v & \text{otherwise} \end{cases}$$

    The drift $g$ is the change of the server model since the client started. The projection is the nearest vector to
    $v$ that is orthogonal to $g$. The threshold $\vartheta$ selects the displacements that are projected:

    - With $\vartheta = 1$, all displacements are projected. `Position` and `Tangent` differ only along $g$, so both
      have the same projection.
    - With $\vartheta = 0$, the displacements with a negative or zero inner product with $g$ are projected (gradient
      surgery).
    - With $\vartheta = -1$, no displacement is projected.

    If $v$ or $g$ is zero, $v$ is returned unchanged.

    Args:
        threshold: $\vartheta \in [-1, 1]$.
        granularity: `"model"`, or `"tensor"` to project each named tensor separately. A displacement that is orthogonal
            to the drift in each tensor is also orthogonal as a whole.

    Raises:
        ArgumentError: if `threshold` is outside [-1, 1], or if `granularity` is invalid.

    Source: Manifold, Algorithm 3.

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Flat
        >>> base, current = torch.zeros(2), torch.tensor([1.0, 0.0])
        >>> OrthoDC(1.0)(Flat(2), base, current, torch.tensor([[3.0, 4.0]]))
        tensor([[0., 4.]])
    """

    threshold: float = 1.0
    granularity: str = "model"

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, at_least=-1, at_most=1)
        check_choice("granularity", self.granularity, GRANULARITIES)

    def __repr__(self) -> str:
        finer = "" if self.granularity == "model" else f", granularity={self.granularity!r}"
        return f"OrthoDC(threshold={self.threshold}{finer})"

    @by_granularity
    def coefficients(self, gram: Gram, state: Any = None) -> tuple[Matrix, Any]:
        return projection_coefficients(gram, self.threshold), state


@dataclass(frozen=True)
class OrthoCorrect(Correction):
    r"""A correction that projects conflicting displacements, and subtracts a part of the drift from the others.

    A displacement $v$ conflicts with the drift $g$ if the cosine of their angle is at most the threshold $\vartheta$:

    $$\pi v = \begin{cases} v - \dfrac{\langle v, g\rangle}{\langle g, g\rangle}\, g & \cos(v, g) \le \vartheta\\
    v - \alpha\, g & \text{otherwise} \end{cases}$$

    With $\alpha = 0$, this is [`OrthoDC`][manifoldagg.corrections.OrthoDC].

    The published formula with $\vartheta = 0$ is discontinuous: if $v$ is almost orthogonal to $g$, rounding errors
    decide which case applies. The option `clip` makes the correction continuous. It subtracts
    $\min(\langle v, g\rangle / \langle g, g\rangle,\, \alpha)\, g$ from every displacement.

    If $v$ or $g$ is zero, the angle is undefined and $v$ is returned unchanged.

    Args:
        alpha: $\alpha$, the multiple of the drift that is subtracted from a displacement without a conflict. The value
            1 corresponds to `Position`, and 0 corresponds to `Tangent`.
        threshold: $\vartheta \in [-1, 1]$.
        clip: whether to use the continuous form. It requires $\vartheta = 0$ and $\alpha \ge 0$.
        granularity: `"model"` or `"tensor"`.

    Raises:
        ArgumentError: if an option is out of range.

    Source: Report §3, with the sign convention of displacements.

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Flat
        >>> base, current, v = torch.zeros(2), torch.tensor([1.0, 0.0]), torch.tensor([[0.5, 4.0]])
        >>> OrthoCorrect(1.0, 0.0)(Flat(2), base, current, v)
        tensor([[-0.5000,  4.0000]])
        >>> OrthoCorrect(1.0, 0.0, clip=True)(Flat(2), base, current, v)
        tensor([[0., 4.]])
    """

    alpha: float = 0.0
    threshold: float = 0.0
    clip: bool = field(default=False, kw_only=True)
    granularity: str = field(default="model", kw_only=True)

    def __post_init__(self) -> None:
        check_number("alpha", self.alpha, **({"at_least": 0} if self.clip else {}))
        check_number("threshold", self.threshold, at_least=-1, at_most=1)
        check_choice("granularity", self.granularity, GRANULARITIES)
        if self.clip and self.threshold != 0:
            raise ArgumentError(f"clip: expected threshold=0 for the continuous form, got threshold={self.threshold}")

    @by_granularity
    def coefficients(self, gram: Gram, state: Any = None) -> tuple[Matrix, Any]:
        return projection_coefficients(gram, self.threshold, self.alpha, self.clip), state


def OrthoGrad(*, clip: bool = False, granularity: str = "model") -> OrthoCorrect:
    """Return a correction that applies gradient surgery to the displacements of a stale update.

    A displacement is the change of the client's model during training, and the drift is the change of the server's
    model in that time. If their inner product is negative or zero, the correction removes the component of the
    displacement along the drift. It leaves all other displacements unchanged. The result is an `OrthoCorrect` with
    `alpha=0` and `threshold=0`.

    Args:
        clip: whether to use the continuous form, as in `OrthoCorrect`.
        granularity: `"model"` for one correction of the whole model, or `"tensor"` for a separate correction of each
            tensor.

    Source: Report §3.

    Example:
        >>> OrthoGrad().coefficients(Gram.of([[5.0, 1.0], [1.0, 2.0]]))[0].tolist()
        [[1, 0]]
    """
    return OrthoCorrect(0.0, 0.0, clip=clip, granularity=granularity)


def OrthoPos(*, clip: bool = False, granularity: str = "model") -> OrthoCorrect:
    r"""Return a correction that subtracts the drift from a displacement, or removes the component along the drift.

    A displacement $v$ is the change of the client's model during training, and the drift $g$ is the change of the
    server's model in that time. They conflict if their inner product is negative or zero:

    - If $\langle v, g\rangle \le 0$, the correction removes the component of $v$ along $g$.
    - Otherwise, the correction returns $v - g$.

    The result is an `OrthoCorrect` with `alpha=1` and `threshold=0`.

    Args:
        clip: whether to use the continuous form, as in `OrthoCorrect`. This form equals gradient surgery on $v - g$.
            The other form differs from gradient surgery on $v - g$ if $0 < \langle v, g\rangle < \langle g, g\rangle$.
        granularity: `"model"` for one correction of the whole model, or `"tensor"` for a separate correction of each
            tensor.

    Source: Report §3.

    Example:
        >>> OrthoPos().coefficients(Gram.of([[5.0, 1.0], [1.0, 2.0]]))[0].tolist()
        [[1, -1.0]]
    """
    return OrthoCorrect(1.0, 0.0, clip=clip, granularity=granularity)


def OrthoStrict(*, granularity: str = "model") -> OrthoCorrect:
    """Return a correction that removes the component along the drift from every displacement.

    A displacement is the change of the client's model during training, and the drift is the change of the server's
    model in that time. The correction does this at any angle between the two, and not only if they conflict. The result
    is an `OrthoCorrect` with `threshold=1`.

    Args:
        granularity: `"model"` for one correction of the whole model, or `"tensor"` for a separate correction of each
            tensor.

    Source: Report §3.

    Example:
        >>> OrthoStrict().coefficients(Gram.of([[5.0, 1.0], [1.0, 2.0]]))[0].tolist()
        [[1, -0.5]]
    """
    return OrthoCorrect(0.0, 1.0, granularity=granularity)


def projection_coefficients(gram: Gram, threshold: float, alpha: float = 0.0, clip: bool = False) -> Matrix:
    """Return the coefficient matrix of `OrthoCorrect`."""
    matrix = gram.identity()
    inner = gram.matrix
    n = gram.num_displacements
    drift = inner[n, n]
    for i in range(n if drift != 0 else 0):
        share = inner[i, n] / drift
        if conflicts(threshold, inner[i, i], inner[i, n], drift):
            matrix[i, n] = -share
        elif alpha != 0 and inner[i, i] > 0:
            # The smaller of share and α tends to 0 at the boundary of the conflict. The result is therefore continuous,
            # and rounding cannot change it by much.
            matrix[i, n] = -share if clip and share <= alpha else -alpha
    return matrix


def conflicts(threshold: float, squared_norm: Any, drift_product: Any, drift: Any) -> bool:
    r"""Return whether a displacement $v$ conflicts with the drift $g$ of the server's model.

    This is the case if the cosine of the angle between $v$ and $g$ is at most the threshold $\vartheta$. If
    $\vartheta = 1$, the result is always `True`. If $\vartheta = -1$, the result is always `False`, even if $v$ is
    exactly opposite to $g$.

    Args:
        threshold: $\vartheta$.
        squared_norm: $\langle v, v\rangle$.
        drift_product: $\langle v, g\rangle$.
        drift: $\langle g, g\rangle > 0$.

    Example:
        >>> conflicts(0.5, squared_norm=1.0, drift_product=1.0, drift=4.0)
        True
    """
    # Rounding can make |cos| slightly larger than 1. The thresholds 1 and -1 are therefore decided without the cosine.
    if abs(threshold) == 1:
        return threshold == 1
    if threshold == 0:  # no root or product is rounded, so the sign is exact
        return bool(drift_product <= 0)
    if squared_norm <= 0:  # the displacement is zero, or as small as rounding errors
        return False
    # The product of the squares can overflow or underflow although the product of the norms does not. The roots are
    # therefore separate.
    return bool(drift_product <= threshold * squared_norm**0.5 * drift**0.5)
