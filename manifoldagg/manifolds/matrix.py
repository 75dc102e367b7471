"""Matrix functions with small rounding errors, whose derivatives are correct even for repeated eigenvalues.

If two eigenvalues are equal, autograd through an eigendecomposition returns infinity or NaN. The polar factor (`polar`)
and the matrix logarithm (`differentiable_log`) are therefore computed without autograd. A few Newton steps are then
applied to the computed value. Autograd differentiates only these steps, which change the value only by rounding errors.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from manifoldagg.kernels.operands import needs_autograd_path

__all__ = ["differentiable_log", "eye", "matrix_exp", "orthogonal_part", "polar", "skew", "sym"]


def matrix_exp(a: Tensor) -> Tensor:
    """Compute the matrix exponential $e^A$ of a matrix or a batch of matrices (*batch, n, n), accurate to rounding."""
    if a.shape[:-2].numel() > 1:
        return torch.matrix_exp(a)
    # `torch.matrix_exp` (torch 2.13) is accurate for a batch of two or more matrices. For a single matrix with a norm
    # near 0.05, its error is 1e-11 in float64. A zero matrix is therefore added to a single matrix.
    exponential: Tensor = torch.matrix_exp(torch.stack([a, torch.zeros_like(a)]))
    return exponential[0]


def differentiable_log(value: Tensor, target: Tensor, solve: Callable[[Tensor], Tensor]) -> Tensor:
    r"""Make a matrix logarithm $X = \log M$ differentiable with respect to $M$, given its value.

    The function executes two Newton steps for the equation $e^X = M$. Each step replaces $X$ by
    $X + \mathrm{solve}(M - e^X)$, where the linear function `solve` is the inverse of the derivative of $e^X$. The
    steps do not change the value, because $M - e^X$ is 0. The first step makes the first derivatives correct, and the
    second step makes the second derivatives correct. Repeated eigenvalues are allowed, because the steps do not divide
    by differences of eigenvalues.

    Args:
        value: $\log M$ (*batch, n, n), without derivatives.
        target: $M$ (*batch, n, n), with derivatives.
        solve: the inverse of the derivative of the matrix exponential at `value`, a linear function.

    Returns:
        $X$ with first and second derivatives, or `value` itself if no derivatives are required.
    """
    if not needs_autograd_path([target]):
        return value
    x = value + solve(target - target.detach())
    residual = target - matrix_exp(x)
    return x + solve(residual - residual.detach())


def polar(z: Tensor, *, proper: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the polar factor of a matrix z, which is the nearest matrix with orthonormal columns.

    The first and second derivatives are correct even if singular values are equal. The value is computed by an SVD,
    which autograd does not differentiate. Two Newton steps follow, and autograd differentiates only these steps.

    Args:
        z: matrices (*batch, n, p).
        proper: whether the polar factor q must have determinant 1, for square matrices. If det z < 0, the symmetric
            matrix h with z = q h then has a negative eigenvalue.

    Returns:
        The polar factor with correct first and second derivatives, the singular values, and the right singular vectors.
    """
    with torch.no_grad():
        # An SVD raises an error for the whole batch if one matrix is not finite. Such a matrix is replaced here. The
        # residual later makes its result NaN.
        left, values, right = torch.linalg.svd(torch.where(z.isfinite(), z, 0.0).detach(), full_matrices=False)
        if proper:
            sign = torch.linalg.det(left @ right).sign()[..., None]
            values = torch.cat([values[..., :-1], values[..., -1:] * sign], -1)
            left = torch.cat([left[..., :-1], left[..., -1:] * sign[..., None]], -1)
    basis = right.mT
    inverse = 1 / values.unsqueeze(-2)
    # The denominators are sums of singular values and not differences, so repeated values cause no division by 0.
    pairs = values.unsqueeze(-1) + values.unsqueeze(-2)
    # The product of the SVD factors has an error of some tens of ε. For well-conditioned matrices, the Newton step also
    # corrects the value. For other matrices, it would increase the error, so only derivatives are corrected.
    well_conditioned = (values[..., -1:].abs() > 1e-8 * values[..., :1]).unsqueeze(-1)
    start = q = left @ right
    # Let z = q h with a symmetric h. A change e of z changes q by q Ω + (1 - q qᵀ) e h⁻¹, where the skew matrix Ω
    # solves Ω h + h Ω = qᵀ e - eᵀ q. Each step applies this change with the residual of z = q h as e. Up to
    # rounding, the residual is 0, so the steps change only the derivatives. Each step makes the derivatives of one more
    # order correct.
    for _ in range(2):
        residual = z - q @ sym(q.mT @ z)
        change = (residual - torch.where(well_conditioned, 0.0, residual.detach())) @ basis
        along = basis.mT @ start.mT @ change
        q = q + (start @ basis @ (2 * skew(along) / pairs) + orthogonal_part(start, change) * inverse) @ right
        # A Newton step for orthonormal columns, which squares the error of qᵀ q.
        q = q @ (3 * eye(right) - q.mT @ q) / 2
    return q, values, basis


def orthogonal_part(x: Tensor, u: Tensor) -> Tensor:
    """Compute the component of `u` that is orthogonal to the columns of `x`, which must be orthonormal.

    The projection is applied twice, because one projection leaves a rounding error.
    """
    once = u - x @ (x.mT @ u)
    return once - x @ (x.mT @ once)


def sym(u: Tensor) -> Tensor:
    """Compute the symmetric part of each matrix."""
    return (u + u.mT) / 2


def skew(u: Tensor) -> Tensor:
    """Compute the skew-symmetric part of each matrix."""
    return (u - u.mT) / 2


def eye(like: Tensor, size: int | None = None) -> Tensor:
    """Return an identity matrix with the dtype and device of `like`.

    Args:
        like: any matrix.
        size: the number of rows of the result. The default is the number of columns of `like`.
    """
    return torch.eye(like.shape[-1] if size is None else size, dtype=like.dtype, device=like.device)
