"""Krylov delay compensation: the curvature along a client's training path corrects its stale update."""

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
    r"""Subtract the part of the displacement that the drift already covers, by the curvature along the training path.

    The displacements are points of a path, $v_j = \theta_j - \Theta^t$, equally many local steps apart, with the legs
    $w_j = v_j - v_{j-1}$. On a quadratic loss, gradient descent takes a leg to the next by one symmetric matrix,
    $w_{j+1} = B\, w_j$, with eigenvalues in [0, 1] as long as no step goes beyond the minimum; and from the current
    model, $\Theta^\tau = \Theta^t + g$, as many steps would have made the displacements $v_j + (B^j - I)\, g$. So the
    legs are a Krylov sequence of $B$. The Rayleigh-Ritz method has the best of $B$ that can be known on the span of
    $w_1, \dots, w_{n-1}$: values $\beta_i$, clipped to [0, 1], and orthonormal vectors $q_i$, with which

    $$\pi v_j = v_j - \sum_i (1 - \beta_i^j)\, \langle q_i, g\rangle\, q_i.$$

    Along a stiff direction ($\beta_i = 0$: the client ends where it does from wherever it starts) that is the position
    reading of an update, along a flat one ($\beta_i = 1$) the tangent reading, and so it is for what of the drift the
    path has not been through. $\|\pi v_j - v_j\| \le \|g\|$. On a quadratic loss it is exact for a drift
    within the span, if the path has run through all of it: if $n - 1$ is the number of different eigenvalues that the
    first gradient meets.

    One point is not a path, and is left as it is. Nothing is asked of a client but where it came by, such as
    [`Trajectory`][manifoldagg.federated.clients.Trajectory] sends with `pieces=n`.

    Args:
        granularity: `"tensor"`: each named tensor has a span of its own, so that there are n - 1 directions in each;
            or `"model"`.
        tolerance: directions of the span in which the squared length of the legs is less than this part of the most are
            left out, as rounding and noise.

    Raises:
        ArgumentError: naming the option that is out of range; where a derivative is followed.

    Source: of this library; position and tangent readings are those of Report §3.

    Example:
        A client whose loss is stiff along the first axis and flat along the second; the drift has gone along both.

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
            raise ArgumentError("KrylovDC: the directions of a path have no derivative: call it outside of transforms")
        n = gram.num_displacements
        inner = parts.astype(float)
        lines = np.stack([gram.identity()] * len(inner))
        if n > 1:
            # In units of the way that was gone; there is nothing to be taken off where it is none.
            square = inner[:, :n, :n].diagonal(axis1=1, axis2=2).max(1)
            inner = inner[:, :n] / np.where(square > 0, square, 1.0)[:, None, None]
            # Each leg from the displacements.
            legs = np.eye(n) - np.eye(n, k=-1)
            values, vectors = ritz_pairs(legs @ inner[:, :, :n] @ legs.T, self.tolerance)
            along = legs[:-1] @ inner[:, :, n, None]
            taken = 1 - values[:, None, :] ** np.arange(1, n + 1)[:, None]
            back = vectors.swapaxes(-1, -2)
            lines[:, :, :n] -= (taken * (back @ along).swapaxes(-1, -2)) @ back @ legs[:-1]
        return lines if self.granularity == "tensor" else lines[0], state


def ritz_pairs(inner: Any, tolerance: float) -> tuple[Any, Any]:
    r"""Compute Ritz values of the symmetric map of each leg to the next, in [0, 1], and their vectors.

    Args:
        inner: (..., n, n) inner products of the legs.
        tolerance: as in `KrylovDC`.

    Returns:
        (..., n - 1) values, and in the columns of (..., n - 1, n - 1) combinations q of the legs before the last, with
        the projection on the span as the sum of all q qᵀ: where directions are left out, some q are 0.

    Example:
        >>> import numpy as np
        >>> ritz_pairs(np.array([[4.0, 1.0], [1.0, 0.25]]), 1e-3)
        (array([0.25]), array([[0.5]]))
    """
    squares, axes = np.linalg.eigh(inner[..., :-1, :-1])
    seen = squares > tolerance * squares[..., -1:]
    basis = axes * np.where(seen, 1 / np.sqrt(np.where(seen, squares, 1.0)), 0.0)[..., None, :]
    # Of legs from a symmetric map their products are symmetric; what is not comes from noise, and of other losses.
    image = basis.swapaxes(-1, -2) @ inner[..., :-1, 1:] @ basis
    values, turn = np.linalg.eigh((image + image.swapaxes(-1, -2)) / 2)
    return values.clip(0, 1), basis @ turn
