r"""The parameter at which a Bézier curve reaches a given fraction of its chord length.

Let $\varphi_0, \dots, \varphi_n$ be the control points of the curve, $v_i = \varphi_i - \varphi_0$ their displacements
from the start, and $G$ the Gram matrix of these displacements. The squared distance of the curve from its start is then
a polynomial of degree 2n in the parameter $s$:

$$d^2(s) = b(s)^\top G\, b(s), \qquad b_i(s) = \tbinom{n}{i} s^i (1-s)^{n-i}.$$

The curve reaches the fraction $\rho$ of its chord length at the first root of the equation $d^2(s) = \rho^2\, d^2(1)$,
which is (12) of Manifold. The signs of the Bernstein coefficients isolate this root, so no other root can be returned
by mistake.
"""

import math
from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from manifoldagg._validation import check_choice, check_number, check_shape
from manifoldagg.curves.bernstein import product_coefficients, roots
from manifoldagg.errors import DivergenceError
from manifoldagg.kernels import gram

__all__ = ["OVERSHOOT", "parameter_at_distance", "parameter_at_distance_from_gram", "squared_distance"]

OVERSHOOT = ("clamp", "extend")
NEGLIGIBLE = 1e-150
"""The fraction of the chord whose square underflows in float64. Smaller fractions count as 0."""
ROUNDING = 1e-14
"""The rounding error of a sum of products in float64, relative to the sum of their magnitudes."""

Gram = Sequence[Sequence[Any]]


def parameter_at_distance(displacements: Float[Tensor, "n P"], rho: float, overshoot: str = "clamp") -> float:
    r"""Find the first parameter at which a curve is $\rho$ chord lengths away from its start.

    The chord length is the distance from the start $\varphi_0$ of the curve $\iota$ to its end $\iota(1)$. The result
    is the smallest $s \ge 0$ with $\|\iota(s) - \varphi_0\| = \rho\,\|\iota(1) - \varphi_0\|$.

    Args:
        displacements: $\varphi_1 - \varphi_0, \dots, \varphi_n - \varphi_0$, (n, P). For a quadratic curve, these are
            the displacements of the control point and of the end point.
        rho: the fraction of the chord length, $\ge 0$.
        overshoot: `"clamp"` replaces `rho` by min(rho, 1). `"extend"` extrapolates the polynomial beyond s = 1.

    Returns:
        The parameter $s$. For a straight line (n = 1), $s$ equals `rho`. For a closed curve, whose chord length is 0,
        and for rho < 1e-150, $s$ is 0.

    Raises:
        ArgumentError: if `displacements` is not a finite (n, P) tensor, `rho` is not a number >= 0, or `overshoot` is
            unknown.
        DivergenceError: if the extrapolated curve does not reach the distance in float64.

    Source: Manifold (12). Cost: one pass over the displacements.

    Example:
        If the control point is equal to the start, then $d(s) = s^2$ and $s = \sqrt{\rho}$.

        >>> import torch
        >>> parameter_at_distance(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), 0.25)
        0.5
    """
    check_shape("displacements", displacements, None, None)
    rho = check_number("rho", rho, at_least=0)
    check_choice("overshoot", overshoot, OVERSHOOT)
    return parameter_at_distance_from_gram(gram(displacements)[0].tolist(), rho, overshoot)


def parameter_at_distance_from_gram(inner: Gram, rho: float, overshoot: str = "clamp") -> float:
    """Find the first parameter at which a curve has a given distance from its start, using a Gram matrix.

    The distance is `rho` times the distance between both ends of the curve. The Gram matrix contains the inner products
    of the vectors from the start to the other control points. The function does not check the other arguments.

    Args:
        inner: the Gram matrix (n, n).
        rho: as in `parameter_at_distance`.
        overshoot: as in `parameter_at_distance`.

    Raises:
        ArgumentError: if an entry on the diagonal of the Gram matrix is not finite.
        DivergenceError: if the extrapolated curve does not reach the distance in float64.
    """
    for i, row in enumerate(inner):
        if not math.isfinite(row[i]):
            check_number(f"displacements[{i}]: squared norm", row[i])
    chord = inner[-1][-1]
    if overshoot == "clamp":
        rho = min(rho, 1.0)
    # For a straight line, s = rho. This also holds if the squares below would underflow.
    if len(inner) == 1:
        return rho
    if chord <= 0 or rho < NEGLIGIBLE:
        return 0.0
    # In units of the chord, no product underflows or overflows, and the squared length of the chord is exactly 1.
    unit = [[entry / chord for entry in row] for row in inner]
    # The polynomial ρ² - d² is positive at the start, and 0 counts as negative. A curve that only touches the
    # distance therefore counts as reaching it. If d' = 0 at the root, an error ε of the coefficients changes s by √ε.
    square = rho * rho
    difference = [square - value for value in squared_distance(unit)]
    end = 1.0
    if difference[-1] > 0:
        # Beyond 1 the Bernstein weights alternate in sign and grow like (2s)^2n, so their sum would cancel. Powers of s
        # do not have this problem.
        powers = _monomial_coefficients(unit)
        while difference[-1] > 0:
            end *= 2
            difference = [square - value for value in _bernstein_coefficients(powers, end)]
            if not math.isfinite(difference[-1]):
                raise DivergenceError(f"rho: expected a distance that the curve reaches in float64, got {rho:g} chords")
    # The curve can cross the distance several times. The result is the first crossing, or the end if rounding hides
    # every crossing.
    return end * next(roots(difference), 1.0)


def squared_distance(inner: Gram) -> list[Any]:
    """Compute the Bernstein coefficients of the squared distance from the start.

    Args:
        inner: the Gram matrix of the displacements.
    """
    # The displacement v_0 of the start is 0, so its row and column of the Gram matrix are 0.
    zeros = [0.0] * (len(inner) + 1)
    return product_coefficients([zeros, *([0.0, *row] for row in inner)])


def _monomial_coefficients(inner: Gram) -> list[float]:
    """Compute the coefficients of the squared distance from the start, in powers of s."""
    # The displacement of the curve from its start is Σ_k s^k a_k. Each coefficient a_k is the linear combination
    # Σ_i (-1)^{k-i} C(n,k) C(k,i) v_i, where v_i is the displacement of control point i from the start.
    n = len(inner)
    to_power = [[(-1) ** (k - i) * math.comb(n, k) * math.comb(k, i) for i in range(1, n + 1)] for k in range(1, n + 1)]
    coefficients = [0.0] * (2 * n + 1)
    # By the Cauchy-Schwarz inequality, `size[k] * size[m]` bounds the sum of the magnitudes of the terms.
    size = [sum(abs(row[i]) * math.sqrt(inner[i][i]) for i in range(n)) for row in to_power]
    for k in range(n):
        for m in range(n):
            value = sum(to_power[k][i] * to_power[m][j] * inner[i][j] for i in range(n) for j in range(n))
            # Coefficients below their rounding error count as 0. Otherwise s^2k would amplify the error, and a curve of
            # lower degree would not remain one under extrapolation.
            if abs(value) > ROUNDING * size[k] * size[m]:
                coefficients[k + m + 2] += value
    return coefficients


def _bernstein_coefficients(powers: Sequence[float], end: float) -> list[float]:
    """Convert the coefficients of powers of s to Bernstein coefficients on [0, end]."""
    n = len(powers) - 1
    scaled = [value * end**m / math.comb(n, m) for m, value in enumerate(powers)]
    return [sum(math.comb(k, m) * scaled[m] for m in range(k + 1)) for k in range(n + 1)]
