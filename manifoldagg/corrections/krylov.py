"""Krylov delay compensation, which corrects a stale update with an estimate of the curvature of the loss.

The curvature is estimated from several points of the client's training path.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from manifoldagg._validation import check_choice, check_number
from manifoldagg.corrections.correction import Correction
from manifoldagg.corrections.frame import GRANULARITIES
from manifoldagg.corrections.gram import Gram, Matrix
from manifoldagg.errors import ArgumentError

__all__ = ["KrylovDC"]


@dataclass(frozen=True)
class KrylovDC(Correction):
    r"""A correction that removes the part of the displacement that the drift already covers.

    The client reports n points $\theta_j$ of its training path, with an equal number of local steps between them. The
    displacements are $v_j = \theta_j - \Theta^t$, and the steps of the path are $w_j = v_j - v_{j-1}$ with $v_0 = 0$.

    On a quadratic loss, gradient descent maps each step to the next step by one symmetric matrix $B$, so that
    $w_{j+1} = B\, w_j$. If no local step overshoots the minimum, the eigenvalues of $B$ are in [0, 1]. Suppose that the
    client had started from the current model $\Theta^\tau = \Theta^t + g$. Its displacements would then have been
    $v_j + (B^j - I)\, g$.

    The matrix $B$ is unknown, but the steps determine its action on their span, because they form a Krylov sequence of
    $B$. The Rayleigh-Ritz method therefore approximates $B$ on the span of $w_1, \dots, w_{n-1}$. It returns
    approximate eigenvalues $\beta_i$, clipped to [0, 1], and orthonormal eigenvectors $q_i$. The correction is

    $$\pi v_j = v_j - \sum_i (1 - \beta_i^j)\, \langle q_i, g\rangle\, q_i.$$

    Properties:

    - Along a stiff direction, $\beta_i = 0$, because the client converges to the same point from any start. The
      correction then equals `Position`.
    - Along a flat direction, $\beta_i = 1$. The correction then equals `Tangent`, as it does outside the span.
    - The correction is bounded: $\|\pi v_j - v_j\| \le \|g\|$.
    - On a quadratic loss, the correction is exact for a drift within the span. This requires that $n - 1$ is the number
      of distinct eigenvalues that the first gradient excites.

    A single displacement has no earlier step to compare with, so it is left unchanged. The trainer
    [`Trajectory`][manifoldagg.federated.clients.Trajectory] with `pieces=n` reports the n points of the path.

    Args:
        granularity: `"tensor"` for a separate span with n - 1 directions in each named tensor, or `"model"`.
        tolerance: the relative rank tolerance. A direction is discarded as noise if its squared length is below this
            fraction of the largest squared length.

    Raises:
        ArgumentError: if an option is out of range, or if autograd tracks the rows.

    Source: this library. Report §3 describes `Position` and `Tangent`.

    Example:
        The client's loss is stiff along the first axis and flat along the second. The drift has components along both.

        >>> import torch
        >>> from manifoldagg.manifolds import Flat
        >>> base, current = torch.zeros(2).double(), torch.tensor([1.0, 1.0]).double()
        >>> path = torch.tensor([[2.0, 1.0], [2.0, 2.0], [2.0, 3.0]]).double()
        >>> KrylovDC("model")(Flat(2), base, current, path)[-1].round(decimals=9)
        tensor([1., 3.], dtype=torch.float64)
    """

    granularity: str = "tensor"
    tolerance: float = field(default=1e-3, kw_only=True)

    def __post_init__(self) -> None:
        check_choice("granularity", self.granularity, GRANULARITIES)
        check_number("tolerance", self.tolerance, above=0, at_most=1)

    def coefficients(self, gram: Gram, state: Any = None) -> tuple[Matrix, Any]:
        parts = gram.parts if self.granularity == "tensor" else gram.matrix[None]
        if isinstance(parts[0, 0, 0], Tensor):
            raise ArgumentError(
                "displacements: expected tensors without autograd for KrylovDC, got tracked ones; detach them, "
                "or call it outside of transforms"
            )
        n = gram.num_displacements
        inner = parts.astype(float)
        matrix = np.stack([gram.identity()] * len(inner))
        if n > 1:
            # Normalise by the longest displacement. If all displacements are zero, nothing is subtracted.
            square = inner[:, :n, :n].diagonal(axis1=1, axis2=2).max(1)
            inner = inner[:, :n] / np.where(square > 0, square, 1.0)[:, None, None]
            # The matrix of the differences w_j in terms of the displacements v_j.
            legs = np.eye(n) - np.eye(n, k=-1)
            values, vectors = ritz_pairs(legs @ inner[:, :, :n] @ legs.T, self.tolerance)
            # The inner products of the drift with the steps that span the subspace, which are all but the last step.
            along = legs[:-1] @ inner[:, :, n, None]
            # Displacement v_j includes j steps, so the covered fraction along q_i is 1 - β_i^j.
            taken = 1 - values[:, None, :] ** np.arange(1, n + 1)[:, None]
            back = vectors.swapaxes(-1, -2)
            matrix[:, :, :n] -= (taken * (back @ along).swapaxes(-1, -2)) @ back @ legs[:-1]
        return matrix if self.granularity == "tensor" else matrix[0], state


def ritz_pairs(inner: Any, tolerance: float) -> tuple[Any, Any]:
    """Approximate the eigenvalues and eigenvectors of the matrix that maps each training step to the next step.

    A step is the difference of two successive iterates of gradient descent. On a quadratic loss, one symmetric matrix
    maps every step to the next step, and on other losses, this holds approximately. The Rayleigh-Ritz method
    approximates the matrix on the span of all steps but the last. The approximate eigenvalues (Ritz values) are clipped
    to [0, 1].

    Args:
        inner: (..., n, n) inner products of the steps.
        tolerance: as in `KrylovDC`.

    Returns:
        The values (..., n - 1), and a matrix (..., n - 1, n - 1). Its columns express the Ritz vectors q in terms of
        all steps but the last. The sum of all q qᵀ is the projection on the span. For a discarded direction, q is 0.

    Example:
        >>> import numpy as np
        >>> ritz_pairs(np.array([[4.0, 1.0], [1.0, 0.25]]), 1e-3)
        (array([0.25]), array([[0.5]]))
    """
    squares, axes = np.linalg.eigh(inner[..., :-1, :-1])
    # The eigenvectors of the Gram matrix, divided by the roots of the eigenvalues, express an orthonormal basis of the
    # span in terms of the steps. Small eigenvalues are noise, so their directions are discarded.
    seen = squares > tolerance * squares[..., -1:]
    basis = axes * np.where(seen, 1 / np.sqrt(np.where(seen, squares, 1.0)), 0.0)[..., None, :]
    # For a symmetric map, these products are symmetric. Noise or a loss that is not quadratic makes them asymmetric.
    image = basis.swapaxes(-1, -2) @ inner[..., :-1, 1:] @ basis
    values, turn = np.linalg.eigh((image + image.swapaxes(-1, -2)) / 2)
    return values.clip(0, 1), basis @ turn
