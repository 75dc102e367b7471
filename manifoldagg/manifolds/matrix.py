"""Matrix functions, exact to rounding and differentiable where eigenvalues repeat."""

from collections.abc import Callable

import torch
from torch import Tensor

from manifoldagg.kernels.operands import needs_autograd_path

__all__ = ["differentiable_log", "eye", "matrix_exp", "orthogonal_part", "polar", "skew", "sym"]


def matrix_exp(a: Tensor) -> Tensor:
    """Compute $e^A$ (*batch, n, n) to rounding.

    A single matrix whose norm is near 0.05 has only 1e-11 from `torch.matrix_exp` in float64 (torch 2.13); two or
    more at once are exact to rounding, so a single one gets a zero beside it.
    """
    if a.shape[:-2].numel() > 1:
        return torch.matrix_exp(a)
    exponential: Tensor = torch.matrix_exp(torch.stack([a, torch.zeros_like(a)]))
    return exponential[0]


def differentiable_log(value: Tensor, target: Tensor, solve: Callable[[Tensor], Tensor]) -> Tensor:
    r"""Return `value` for $\log M$, with the derivatives of a solution of $e^X = M$.

    Newton's step $X + \mathrm{solve}(M - e^X)$ adds nothing at a solution, and one right order to the derivatives
    of $X$ each time it is taken: two make the first and the second. No eigenvalue difference is divided by. Where
    no derivative is taken there is nothing to add.

    Args:
        value: $\log M$ (*batch, n, n).
        target: $M$ (*batch, n, n), which carries derivatives.
        solve: the inverse of the derivative of exp at `value`.
    """
    if not needs_autograd_path([target]):
        return value
    x = value + solve(target - target.detach())
    residual = target - matrix_exp(x)
    return x + solve(residual - residual.detach())


def polar(z: Tensor, *, proper: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the nearest matrix with orthonormal columns, twice differentiable; singular values; right vectors.

    Of z = q h, h symmetric, a change e of z makes the change q Ω + (1 - q qᵀ) e h⁻¹ of q, where Ω h + h Ω is twice the
    skew part of qᵀ e. It is taken for the residual z - q h, which vanishes, as Newton's step.

    Args:
        z: (*batch, n, p).
        proper: of square matrices, the nearest of determinant 1: h then has a negative eigenvalue where det z < 0.
    """
    with torch.no_grad():
        # An SVD refuses what is not finite, for the whole batch; the residual brings it back.
        left, values, right = torch.linalg.svd(torch.where(z.isfinite(), z, 0.0).detach(), full_matrices=False)
        if proper:
            sign = torch.linalg.det(left @ right).sign()[..., None]
            values = torch.cat([values[..., :-1], values[..., -1:] * sign], -1)
            left = torch.cat([left[..., :-1], left[..., -1:] * sign[..., None]], -1)
    basis = right.mT
    inverse = 1 / values.unsqueeze(-2)
    # Sums of singular values, never differences: repeated ones do no harm.
    pairs = values.unsqueeze(-1) + values.unsqueeze(-2)
    # The product of an SVD is off by some tens of ε; the step takes them away where it would bring no more.
    sound = (values[..., -1:].abs() > 1e-8 * values[..., :1]).unsqueeze(-1)
    start = q = left @ right
    for _ in range(2):
        residual = z - q @ sym(q.mT @ z)
        change = (residual - torch.where(sound, 0.0, residual.detach())) @ basis
        along = basis.mT @ start.mT @ change
        q = q + (start @ basis @ (2 * skew(along) / pairs) + orthogonal_part(start, change) * inverse) @ right
        # An error in qᵀ q is squared.
        q = q @ (3 * eye(right) - q.mT @ q) / 2
    return q, values, basis


def orthogonal_part(x: Tensor, u: Tensor) -> Tensor:
    """Compute the part of `u` orthogonal to the columns of `x`, in two passes for accuracy."""
    once = u - x @ (x.mT @ u)
    return once - x @ (x.mT @ once)


def sym(u: Tensor) -> Tensor:
    """Compute the symmetric part."""
    return (u + u.mT) / 2


def skew(u: Tensor) -> Tensor:
    """Compute the skew part."""
    return (u - u.mT) / 2


def eye(like: Tensor, size: int | None = None) -> Tensor:
    """Return the identity with the columns of `like`, or of another size."""
    return torch.eye(like.shape[-1] if size is None else size, dtype=like.dtype, device=like.device)
