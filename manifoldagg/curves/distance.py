r"""At which parameter a Bézier curve has gone a given part of its chord: Manifold (12), solved exactly.

With displacements $v_i = \varphi_i - \varphi_0$ and their Gram matrix $G$, the squared distance from the start is

$$d^2(s) = b(s)^\top G\, b(s), \qquad b_i(s) = \tbinom{n}{i} s^i (1-s)^{n-i},$$

a polynomial of degree 2n whose Bernstein coefficients follow from $G$ by the product rule. A polynomial
changes sign no more often than its Bernstein coefficients do, so splitting [0, 1] until the leftmost piece
with a change has exactly one isolates the smallest root; a safeguarded Newton iteration then finds it.
"""

import math
from collections.abc import Sequence
from itertools import count, pairwise
from typing import Any

from jaxtyping import Float
from torch import Tensor

from manifoldagg.errors import DivergenceError, check_choice, check_number, check_shape
from manifoldagg.kernels import gram

OVERSHOOT = ("clamp", "extend")
NEGLIGIBLE = 1e-150
"""Parts of the chord whose squares leave float64: as good as none."""
ROUNDING = 1e-14
"""Of a sum of products in float64, relative to the sum of their sizes."""

PATIENCE = 60
"""Newton steps before plain bisection, which always ends."""

Gram = Sequence[Sequence[Any]]


def parameter_at_distance(displacements: Float[Tensor, "n P"], rho: float, overshoot: str = "clamp") -> float:
    r"""The smallest $s \ge 0$ with $\|\iota(s) - \varphi_0\| = \rho\,\|\iota(1) - \varphi_0\|$.

    Args:
        displacements: $\varphi_1 - \varphi_0, \dots, \varphi_n - \varphi_0$: (n, P); a quadratic has the
            control point's, then the end point's.
        rho: which part of the chord, $\ge 0$.
        overshoot: `"clamp"` takes min(rho, 1); `"extend"` follows the polynomial past s = 1.

    Returns:
        $s$; for a straight line (n = 1) `rho` itself; 0 for a closed curve (end = start), whose chord has no length,
        and for rho < 1e-150.

    Raises:
        ArgumentError: if `displacements` is no finite (n, P) tensor, `rho` is negative or no number, or
            `overshoot` is unknown.

    Source: Manifold (12). Cost: one pass over the displacements.

    Example:
        A control point that has not left the start: $d(s) = s^2$, so that $s = \sqrt{\rho}$.

        >>> import torch
        >>> parameter_at_distance(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), 0.25)
        0.5
    """
    check_shape("displacements", displacements, None, None)
    return parameter_at_distance_of(gram(displacements)[0].tolist(), rho, overshoot)


def parameter_at_distance_of(inner: Gram, rho: float, overshoot: str = "clamp") -> float:
    """As `parameter_at_distance`, from the n x n Gram matrix of the displacements: no tensor is touched."""
    rho = check_number("rho", rho, at_least=0)
    check_choice("overshoot", overshoot, OVERSHOOT)
    for i, row in enumerate(inner):
        check_number(f"displacements[{i}]: squared norm", row[i])
    chord = inner[-1][-1]
    if overshoot == "clamp":
        rho = min(rho, 1.0)
    if len(inner) == 1:
        return rho
    if chord <= 0 or rho < NEGLIGIBLE:
        return 0.0
    # In units of the chord, so that no product under- or overflows.
    unit = [[entry / chord for entry in row] for row in inner]
    gap = [value - rho * rho for value in _squared_distance(unit)]
    end = 1.0
    if gap[-1] < 0:
        powers = _powers(unit)
        while gap[-1] < 0:
            end *= 2
            gap = [value - rho * rho for value in _bernstein(powers, end)]
            if not math.isfinite(gap[-1]):
                raise DivergenceError(f"rho: {rho:g} chords lie beyond what the curve reaches in float64")
    return _smallest_root(gap, 0.0, end)


def _squared_distance(inner: Gram) -> list[Any]:
    """Bernstein coefficients of d² in degree 2n: Σ_{i+j=m} C(n,i) C(n,j) G_ij / C(2n,m), with G_0j = 0."""
    n = len(inner)
    coefficients: list[Any] = [0.0] * (2 * n + 1)
    for i in range(1, n + 1):
        for j in range(1, n + 1):
            coefficients[i + j] += math.comb(n, i) * math.comb(n, j) * inner[i - 1][j - 1]
    return [value / math.comb(2 * n, m) for m, value in enumerate(coefficients)]


def _powers(inner: Gram) -> list[float]:
    """Coefficients of d² in powers of s: past s = 1 they extrapolate where Bernstein coefficients cancel.

    The curve is Σ_k s^k a_k with a_k = Σ_i (-1)^{k-i} C(n,k) C(k,i) v_i. An a_k that is no larger than its own
    rounding is none: a curve of lower degree stays one however far it is followed.
    """
    n = len(inner)
    to_power = [[(-1) ** (k - i) * math.comb(n, k) * math.comb(k, i) for i in range(1, n + 1)] for k in range(1, n + 1)]
    coefficients = [0.0] * (2 * n + 1)
    size = [sum(abs(row[i]) * math.sqrt(inner[i][i]) for i in range(n)) for row in to_power]
    for k in range(n):
        for m in range(n):
            value = sum(to_power[k][i] * to_power[m][j] * inner[i][j] for i in range(n) for j in range(n))
            if abs(value) > ROUNDING * size[k] * size[m]:
                coefficients[k + m + 2] += value
    return coefficients


def _bernstein(powers: Sequence[float], end: float) -> list[float]:
    """Bernstein coefficients on [0, end] of the polynomial with these powers."""
    n = len(powers) - 1
    scaled = [value * end**m / math.comb(n, m) for m, value in enumerate(powers)]
    return [sum(math.comb(k, m) * scaled[m] for m in range(k + 1)) for k in range(n + 1)]


def _split(coefficients: Sequence[float], t: float) -> tuple[list[float], list[float]]:
    """de Casteljau: the coefficients on [0, t] and on [t, 1]."""
    row, left, right = list(coefficients), [coefficients[0]], [coefficients[-1]]
    while len(row) > 1:
        row = [(1 - t) * a + t * b for a, b in pairwise(row)]
        left.append(row[0])
        right.append(row[-1])
    return left, right[::-1]


def _sign_changes(coefficients: Sequence[float]) -> int:
    signs = [value > 0 for value in coefficients if value != 0]
    return sum(a != b for a, b in pairwise(signs))


def _smallest_root(piece: list[float], low: float, high: float) -> float:
    """The smallest root in (low, high] of a polynomial that starts negative and does not end so."""
    pending = [(piece, low, high)]
    while pending:
        piece, low, high = pending.pop()
        changes = _sign_changes(piece)
        middle = 0.5 * (low + high)
        if changes == 1 and piece[0] < 0:
            return _bracketed_root(piece, low, high)
        if changes == 0:
            if piece[-1] == 0 and piece[0] != 0:
                return high
            continue
        if not low < middle < high:
            return high
        left, right = _split(piece, 0.5)
        pending += [(right, middle, high), (left, low, middle)]
    return high


def _bracketed_root(piece: Sequence[float], low: float, high: float) -> float:
    """The one sign change of `piece` on [low, high], from minus to plus: Newton, with bisection as its guard."""
    n, width = len(piece) - 1, high - low
    slopes = [n * (b - a) for a, b in pairwise(piece)]
    below, above = 0.0, 1.0
    t = 0.5
    for attempt in count():
        value = _evaluate(piece, t)
        if value == 0:
            break
        below, above = (t, above) if value < 0 else (below, t)
        slope = _evaluate(slopes, t)
        step = t - value / slope if slope > 0 else math.nan
        if attempt > PATIENCE or not below < step < above:
            step = 0.5 * (below + above)
        if step in (t, below, above):
            break
        t = step
    return low + width * t


def _evaluate(coefficients: Sequence[float], t: float) -> float:
    """A Bernstein polynomial at `t` in [0, 1], by de Casteljau."""
    row = list(coefficients)
    while len(row) > 1:
        row = [(1 - t) * a + t * b for a, b in pairwise(row)]
    return row[0]
