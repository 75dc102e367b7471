r"""The curve parameter at a given part of the chord of a Bézier curve: Manifold (12), solved exactly.

With displacements $v_i = \varphi_i - \varphi_0$ and their Gram matrix $G$, the squared distance from the start is

$$d^2(s) = b(s)^\top G\, b(s), \qquad b_i(s) = \tbinom{n}{i} s^i (1-s)^{n-i},$$

a polynomial of degree 2n whose Bernstein coefficients follow from $G$ by the product rule, and whose first crossing
of $\rho^2\, d^2(1)$ is isolated by the signs of its coefficients.
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
"""Parts of the chord whose squares leave float64: as good as none."""
ROUNDING = 1e-14
"""Of a sum of products in float64, relative to the sum of their sizes."""

Gram = Sequence[Sequence[Any]]


def parameter_at_distance(displacements: Float[Tensor, "n P"], rho: float, overshoot: str = "clamp") -> float:
    r"""Find the smallest $s \ge 0$ with $\|\iota(s) - \varphi_0\| = \rho\,\|\iota(1) - \varphi_0\|$.

    Args:
        displacements: $\varphi_1 - \varphi_0, \dots, \varphi_n - \varphi_0$: (n, P); a quadratic has the
            control point's, then the end point's.
        rho: which part of the chord, $\ge 0$.
        overshoot: `"clamp"` takes min(rho, 1); `"extend"` follows the polynomial past s = 1.

    Returns:
        $s$; for a straight line (n = 1) `rho` itself; 0 for a closed curve (end = start), whose chord has no length,
        and for rho < 1e-150.

    Raises:
        ArgumentError: if `displacements` is not a finite (n, P) tensor, `rho` is negative or no number, or
            `overshoot` is unknown.

    Source: Manifold (12). Cost: one pass over the displacements.

    Example:
        A control point that has not left the start: $d(s) = s^2$, so that $s = \sqrt{\rho}$.

        >>> import torch
        >>> parameter_at_distance(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), 0.25)
        0.5
    """
    check_shape("displacements", displacements, None, None)
    rho = check_number("rho", rho, at_least=0)
    check_choice("overshoot", overshoot, OVERSHOOT)
    return parameter_at_distance_from_gram(gram(displacements)[0].tolist(), rho, overshoot)


def parameter_at_distance_from_gram(inner: Gram, rho: float, overshoot: str = "clamp") -> float:
    """Compute `parameter_at_distance` from the n x n Gram matrix of the displacements, without tensors.

    `rho` and `overshoot` are those of a caller who has checked them; squared norms are checked here.
    """
    for i, row in enumerate(inner):
        if not math.isfinite(row[i]):
            check_number(f"displacements[{i}]: squared norm", row[i])
    chord = inner[-1][-1]
    if overshoot == "clamp":
        rho = min(rho, 1.0)
    # A line has s = rho whatever its length, also where the squares below would underflow.
    if len(inner) == 1:
        return rho
    if chord <= 0 or rho < NEGLIGIBLE:
        return 0.0
    # In units of the chord, so that no product under- or overflows, and the chord's own square is exactly 1.
    unit = [[entry / chord for entry in row] for row in inner]
    # Of what is still ahead, so that the start is positive and a curve that only touches the distance has reached it.
    # Coefficients are as exact as their sizes; where d' vanishes at the place, an ε in them moves s by √ε.
    square = rho * rho
    ahead = [square - value for value in squared_distance(unit)]
    end = 1.0
    if ahead[-1] > 0:
        # Not by Bernstein weights past 1: they alternate and grow like (2s)^2n, and their sum would cancel.
        powers = _monomial_coefficients(unit)
        while ahead[-1] > 0:
            end *= 2
            ahead = [square - value for value in _bernstein_coefficients(powers, end)]
            if not math.isfinite(ahead[-1]):
                raise DivergenceError(f"rho: {rho:g} chords lie beyond what the curve reaches in float64")
    # The first of several places: a curve may leave and come back. Where rounding hides the change it is at the end.
    return end * next(roots(ahead), 1.0)


def squared_distance(inner: Gram) -> list[Any]:
    """Compute Bernstein coefficients of d², of degree 2n, from the Gram matrix of the displacements; v_0 is 0."""
    zeros = [0.0] * (len(inner) + 1)
    return product_coefficients([zeros, *([0.0, *row] for row in inner)])


def _monomial_coefficients(inner: Gram) -> list[float]:
    """Coefficients of d² in powers of s: past s = 1 they extrapolate where Bernstein coefficients cancel.

    The curve is Σ_k s^k a_k with a_k = Σ_i (-1)^{k-i} C(n,k) C(k,i) v_i.
    """
    n = len(inner)
    to_power = [[(-1) ** (k - i) * math.comb(n, k) * math.comb(k, i) for i in range(1, n + 1)] for k in range(1, n + 1)]
    coefficients = [0.0] * (2 * n + 1)
    size = [sum(abs(row[i]) * math.sqrt(inner[i][i]) for i in range(n)) for row in to_power]
    for k in range(n):
        for m in range(n):
            value = sum(to_power[k][i] * to_power[m][j] * inner[i][j] for i in range(n) for j in range(n))
            # An a_k that is no larger than its own rounding is none: s^2k would amplify it, and a curve of lower
            # degree must stay one however far it is followed.
            if abs(value) > ROUNDING * size[k] * size[m]:
                coefficients[k + m + 2] += value
    return coefficients


def _bernstein_coefficients(powers: Sequence[float], end: float) -> list[float]:
    """Bernstein coefficients on [0, end] of the polynomial with these powers."""
    n = len(powers) - 1
    scaled = [value * end**m / math.comb(n, m) for m, value in enumerate(powers)]
    return [sum(math.comb(k, m) * scaled[m] for m in range(k + 1)) for k in range(n + 1)]
