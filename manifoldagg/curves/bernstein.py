r"""Polynomials on the interval [0, 1] in Bernstein form, $p(t) = \sum_i \binom{n}{i} t^i (1-t)^{n-i} c_i$.

The numbers $c_i$ are the Bernstein coefficients of the polynomial $p$ of degree $n$. The module computes the products,
derivatives, roots and minima of such polynomials. On [0, 1], the Bernstein form is more accurate than the form in
powers of $t$, because its basis polynomials are nonnegative and sum to 1.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from operator import ne
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

__all__ = [
    "argmin",
    "basis",
    "derivative_coefficients",
    "find_sign_change",
    "product_coefficients",
    "roots",
    "sqrt_quadratic_form",
    "weights",
]

MAX_BISECTIONS = 52
"""The number of bisections of [0, 1] that float64 can resolve."""

MAX_ITERATIONS = 100
"""The maximum number of interpolation steps. The same number of bisections shortens a bracket by the factor 2^-100."""


def weights(degree: int, t: Any) -> list[Any]:
    r"""Compute the Bernstein weights $\binom{n}{i} t^i (1-t)^{n-i}$ of degree $n$ at $t$, for i = 0, …, n.

    The parameter $t$ can be a number, an array, a tensor or a symbolic variable. If the degree is -1, the result is an
    empty list.

    Example:
        >>> weights(2, 0.5)
        [0.25, 0.5, 0.25]
    """
    rest = 1 - t
    return [count * t**i * rest ** (degree - i) for i, count in enumerate(_binomials(degree))]


def basis(degree: int, t: Float[Tensor, "*batch"]) -> Float64[Tensor, "*batch n"]:
    """Compute the Bernstein weights of a given degree at `t`, as one float64 tensor.

    The tensor is differentiable with respect to `t`.

    Example:
        >>> basis(2, torch.tensor(0.5))
        tensor([0.2500, 0.5000, 0.2500], dtype=torch.float64)
    """
    t = t.double()
    return torch.stack(weights(degree, t), dim=-1) if degree >= 0 else t.new_zeros(*t.shape, 0)


def sqrt_quadratic_form(inner: Float64[Tensor, "..."], at: Float64[Tensor, "..."]) -> Float64[Tensor, "..."]:
    r"""Compute $\sqrt{w^\top G\, w}$ for a batch of vectors $w$ and positive semi-definite matrices $G$.

    Where the result is 0, its derivative is set to 0.

    Args:
        inner: the matrices $G$, (..., n, n).
        at: the vectors $w$, (..., n).
    """
    value = torch.einsum("...i,...ij,...j->...", at, inner, at)
    # The argument of the root is replaced before the root is taken. Otherwise the derivative at 0 would be NaN.
    positive = value > 0
    return torch.where(positive, torch.where(positive, value, 1.0).sqrt(), 0.0)


def product_coefficients(table: Sequence[Sequence[Any]] | Tensor) -> list[Any]:
    r"""Compute the Bernstein coefficients of the product of two polynomials of the degrees p and q.

    Let $b_i$ and $d_j$ be the Bernstein coefficients of the two polynomials. The argument `table` contains their
    products $a_{ij} = b_i d_j$. The product of the polynomials has the degree p + q and the Bernstein coefficients

    $$c_m = \sum_{i+j=m} \binom{p}{i} \binom{q}{j}\, a_{ij} / \binom{p+q}{m}.$$

    The entries $a_{ij}$ need not be such products. The $c_m$ are then the Bernstein coefficients of the polynomial
    $\sum_{ij} a_{ij}\, B_i^p(t)\, B_j^q(t)$, where $B_i^p$ is the $i$-th Bernstein polynomial of degree p. For example,
    the squared norm of the points of a Bézier curve has this form. Its table is the Gram matrix of the control points.

    Args:
        table: p + 1 rows of q + 1 entries $a_{ij}$: numbers, symbols or arrays.

    Source: Farouki, Rajan 1988.

    Example:
        >>> product_coefficients([[1.0, 0.0], [0.0, 1.0]])
        [1.0, 0.0, 1.0]
    """
    # Multiplied by its binomial, a Bernstein coefficient is the coefficient of t^i (1-t)^(n-i). In this basis, a
    # product of polynomials is a convolution.
    p = len(table) - 1
    q = len(table[0]) - 1
    across = _binomials(q)
    sums: list[Any] = [0.0] * (p + q + 1)
    for i, (row, down) in enumerate(zip(table, _binomials(p), strict=True)):
        for j, entry in enumerate(row):
            sums[i + j] += down * across[j] * entry
    return [value / count for value, count in zip(sums, _binomials(p + q), strict=True)]


def derivative_coefficients(coefficients: Sequence[float]) -> list[float]:
    """Compute the Bernstein coefficients of the derivative, whose degree is lower by 1.

    Example:
        >>> derivative_coefficients([0.0, 0.5, 2.0])
        [1.0, 3.0]
    """
    n = len(coefficients) - 1
    return [n * (b - a) for a, b in pairwise(coefficients)]


def roots(coefficients: Sequence[float]) -> Iterator[float]:
    """Yield the parameters in [0, 1] at which a polynomial changes its sign, in ascending order.

    A value of 0 counts as negative. The function bisects the interval until the Bernstein coefficients of the
    polynomial on each subinterval have at most one sign change. By Descartes' rule of signs, each subinterval then
    contains at most one root. Newton's method with a bisection safeguard computes this root.

    Source: Lane, Riesenfeld 1981.

    Example:
        >>> list(roots([0.25, -0.25, 0.25])), list(roots([1.0, 1.0]))
        ([0.5, 0.5], [])
    """
    pending = [(list(coefficients), 0.0, 1.0)]
    while pending:
        piece, low, width = pending.pop()
        signs = [value > 0 for value in piece]
        changes = sum(map(ne, signs, signs[1:]))
        # At the resolution of float64, sign changes cannot be separated. An odd number of them counts as one.
        if changes == 1 or (changes > 1 and width <= 0.5**MAX_BISECTIONS and signs[0] != signs[-1]):
            yield low + width * _isolated_root(piece)
        elif changes > 1 and width > 0.5**MAX_BISECTIONS:
            width /= 2
            left, right = _subdivide(piece)
            # The stack is last in, first out, so the left half comes first and the roots are ascending.
            pending.append((right, low + width, width))
            pending.append((left, low, width))


def argmin(coefficients: Sequence[float]) -> float:
    """Return a parameter in [0, 1] at which a polynomial has its global minimum on this interval.

    The function compares the values of the polynomial at both ends of the interval and at all roots of its derivative.
    The only errors are therefore rounding errors.

    Example:
        >>> round(argmin([1.0, -1.0, 2.0]), 12)
        0.4
    """
    return min((0.0, 1.0, *roots(derivative_coefficients(coefficients))), key=lambda t: _evaluate(coefficients, t)[0])


def find_sign_change(
    function: Callable[[Tensor], Tensor], low: Float64[Tensor, "*batch"], high: Float64[Tensor, "*batch"]
) -> Float64[Tensor, "*batch"]:
    """Find a sign change for a batch of scalar functions, each in its own interval [`low`, `high`].

    The search uses Chandrupatla's method. It combines inverse quadratic interpolation with bisection, so it converges
    fast and always terminates. If a function has the same sign at both ends of its interval, the result is `high` for a
    positive sign and `low` for a negative sign.

    Args:
        function: an elementwise function from (*batch,) to (*batch,).
        low: the lower ends of the intervals.
        high: the upper ends of the intervals.

    Source: Chandrupatla 1997.

    Example:
        >>> find_sign_change(lambda t: 0.25 - t**2, torch.zeros(1).double(), torch.ones(1).double())
        tensor([0.5000], dtype=torch.float64)
    """
    # x is the latest iterate, y the other end of the bracket, and z the previous iterate.
    x = low
    y = high
    fx = function(x)
    fy = function(y)
    positive = fx > 0
    changes = positive != (fy > 0)
    resolution = torch.finfo(fx.dtype).eps
    t = torch.full_like(low, 0.5)
    for _ in range(MAX_ITERATIONS):
        # The smallest fraction of the bracket that changes the iterate. If it exceeds 1/2, the bracket is resolved.
        least = resolution / (y - x).abs()
        done = ~changes | (least > 0.5) | (fx == 0) | (fy == 0)
        if bool(done.all()):
            break
        iterate = torch.where(done, x, x + t.maximum(least).minimum(1 - least) * (y - x))
        value = function(iterate)
        # If the sign is the same as at x, the root is between the iterate and y, so x leaves the bracket.
        same = (value > 0) == (fx > 0)
        z = torch.where(same, x, y)
        fz = torch.where(same, fx, fy)
        y = torch.where(same, y, x)
        fy = torch.where(same, fy, fx)
        x = iterate
        fx = value
        # Inverse quadratic interpolation is used only where it is monotonic between the three iterates. Chandrupatla's
        # criterion in `xi` and `phi` tests this.
        xi = (x - y) / (z - y)
        phi = (fx - fy) / (fz - fy)
        reliable = (phi**2 < xi) & ((1 - phi) ** 2 < 1 - xi)
        quadratic = fx / (fy - fx) * fz / (fy - fz) + (z - x) / (y - x) * fx / (fz - fx) * fy / (fz - fy)
        # If two values are equal, a quotient is NaN or infinite. The interpolation then counts as unreliable.
        t = torch.where(reliable, quadratic, 0.5)
    return torch.where(changes, torch.where(fx.abs() <= fy.abs(), x, y), torch.where(positive, high, low))


@lru_cache(maxsize=64)
def _binomials(n: int) -> tuple[int, ...]:
    """Return the binomial coefficients C(n, 0), ..., C(n, n)."""
    return tuple(math.comb(n, i) for i in range(n + 1))


def _subdivide(coefficients: Sequence[float]) -> tuple[list[float], list[float]]:
    """Compute the coefficients on [0, 1/2] and on [1/2, 1] by de Casteljau's algorithm."""
    left = list(coefficients)
    right = [left[-1]]
    for k in range(1, len(left)):
        for i in range(len(left) - 1, k - 1, -1):
            left[i] = 0.5 * (left[i - 1] + left[i])
        right.append(left[-1])
    return left, right[::-1]


def _isolated_root(piece: Sequence[float]) -> float:
    """Compute the root of a polynomial that changes its sign exactly once on [0, 1]."""
    rises = piece[-1] > 0
    # If no coefficient is negative, the polynomial is positive inside the interval and 0 at one end.
    if min(piece) == 0:
        return 0.0 if rises else 1.0
    below = 0.0
    above = 1.0
    t = 0.5
    attempt = 0
    while True:
        value, slope = _evaluate(piece, t)
        if value == 0:
            return t
        # `below` and `above` bracket the root. A Newton step outside of the bracket is replaced by a bisection.
        if (value > 0) == rises:
            above = t
        else:
            below = t
        attempt += 1
        step = t - value / slope if slope else math.nan
        # The Newton step is below the resolution of t. The bracket can still be wide because Newton's method may
        # approach the root from one side.
        if step == t:
            return t
        # After `MAX_ITERATIONS` Newton steps, only bisection is used, which always terminates.
        if attempt > MAX_ITERATIONS or not below < step < above:
            step = 0.5 * (below + above)
        if step in (t, below, above):
            return t
        t = step


def _evaluate(coefficients: Sequence[float], t: float) -> tuple[float, float]:
    """Evaluate a polynomial in Bernstein form and its derivative at `t` in [0, 1].

    De Casteljau's algorithm is numerically stable on this interval, because it computes only convex combinations of the
    coefficients.
    """
    row = list(coefficients)
    n = len(row) - 1
    rest = 1 - t
    # One interpolation before the last, two values remain. Their difference is the derivative, up to the factor n.
    for k in range(n, 1, -1):
        left = row[0]
        for i in range(k):
            right = row[i + 1]
            row[i] = rest * left + t * right
            left = right
    return (rest * row[0] + t * row[1], n * (row[1] - row[0])) if n else (row[0], 0.0)
