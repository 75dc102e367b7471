"""Matrix functions, exact to rounding and differentiable where eigenvalues repeat."""

from collections.abc import Callable

import torch
from torch import Tensor

from manifoldagg.kernels import is_transformed


def matrix_exp(a: Tensor) -> Tensor:
    """$e^A$ (*batch, n, n) to rounding.

    A single matrix whose norm is near 0.05 has only 1e-11 from `torch.matrix_exp` in float64 (torch 2.13); two or
    more at once are exact to rounding, so a single one gets a zero beside it.
    """
    if a.shape[:-2].numel() > 1:
        return torch.matrix_exp(a)
    exponential: Tensor = torch.matrix_exp(torch.stack([a, torch.zeros_like(a)]))
    return exponential[0]


def differentiable_log(value: Tensor, target: Tensor, solve: Callable[[Tensor], Tensor]) -> Tensor:
    r"""$\log M$, equal to a `value` that carries no derivative, with the derivatives of a solution of $e^X = M$.

    Newton's step $X + \mathrm{solve}(M - e^X)$ adds nothing at a solution, and one right order to the derivatives
    of $X$ each time it is taken: two make the first and the second. No eigenvalue difference is divided by. Where
    no derivative is taken there is nothing to add.

    Args:
        value: $\log M$ (*batch, n, n).
        target: $M$ (*batch, n, n), which carries derivatives.
        solve: the inverse of the derivative of exp at `value`.
    """
    if not is_transformed([target]):
        return value
    x = value + solve(target - target.detach())
    residual = target - matrix_exp(x)
    return x + solve(residual - residual.detach())
