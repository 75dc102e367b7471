"""The pulled-back rate is the smallest root of the chord-distance polynomial."""

import math

import mpmath
import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.curves import Bezier, parameter_at_distance
from manifoldagg.curves.distance import squared_distance
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import Flat
from tests.support import draw, rotation, scales, seeds

ratios = st.floats(0, 1)


def distance(displacements, s):
    """‖ι(s) − φ₀‖ for many s at once."""
    n = len(displacements)
    phi = torch.cat([torch.zeros_like(displacements[:1]), displacements])
    return Bezier(Flat(displacements.shape[1]), n)(phi, s).norm(dim=-1)


@given(seeds, st.integers(1, 6), st.integers(1, 4), st.floats(0, 3), st.sampled_from(["clamp", "extend"]), scales)
def test_the_result_is_the_smallest_parameter_at_the_distance(seed, n, size, rho, overshoot, scale):
    v = draw(seed, n, size, scale=scale)
    s = parameter_at_distance(v, rho, overshoot)
    wanted = (min(rho, 1.0) if overshoot == "clamp" else rho) * v[-1].norm().item()
    # Where the curve has far to go compared with the chord, its own length bounds the rounding.
    reach = v.norm(dim=1).max().item() * max(1.0, s) ** n
    assert distance(v, torch.tensor(s, dtype=torch.float64)).item() == pytest.approx(
        wanted, rel=1e-9, abs=1e-12 * reach
    )
    before = distance(v, torch.linspace(0, s, 4001, dtype=torch.float64)[:-1])
    assert (before <= wanted * (1 + 1e-9) + 1e-12 * reach).all()


@given(seeds, ratios, scales)
def test_a_control_point_at_the_start_gives_the_square_root(seed, rho, scale):
    end = draw(seed, 5, scale=scale)
    assert parameter_at_distance(torch.stack([0 * end, end]), rho) == pytest.approx(math.sqrt(rho), abs=1e-14)


@given(seeds, ratios, scales)
def test_a_control_point_at_the_middle_gives_rho(seed, rho, scale):
    end = draw(seed, 5, scale=scale)
    assert parameter_at_distance(torch.stack([end / 2, end]), rho) == pytest.approx(rho, abs=1e-14)


@given(seeds, ratios, scales)
def test_a_control_point_at_the_end_gives_one_minus_the_root_of_one_minus_rho(seed, rho, scale):
    end = draw(seed, 5, scale=scale)
    found = parameter_at_distance(torch.stack([end, end]), rho)
    # d′ vanishes at the end: an ε in the Gram matrix moves s by √ε there.
    assert found == pytest.approx(1 - math.sqrt(1 - rho), abs=1e-7 if rho > 0.999 else 1e-12)


@given(seeds, st.integers(1, 5), ratios)
def test_the_result_is_invariant_under_isometries_and_scaling(seed, n, rho):
    v, q = draw(seed, n, 6), rotation(seed + 1, 6)
    s = parameter_at_distance(v, rho)
    for other in (v @ q, 1e-30 * v, 1e30 * v):
        t = parameter_at_distance(other, rho)
        assert distance(v, torch.tensor(t)).item() == pytest.approx(distance(v, torch.tensor(s)).item(), rel=1e-5)


@given(st.integers(1, 8), st.sampled_from([1.0, 1.5, 10.0, 1e3, 1e6, 1e9]))
def test_a_straight_line_is_extrapolated_without_limit(n, rho):
    line = torch.arange(1, n + 1, dtype=torch.float64)[:, None] / n * torch.tensor([[0.3, -1.7, 2.9]]).double()
    assert parameter_at_distance(line, rho, "extend") == pytest.approx(rho, rel=1e-9)


@given(seeds, st.floats(1, 100))
def test_the_polynomial_is_extrapolated_beyond_the_end(seed, rho):
    v = draw(seed, 3, 5)
    s = parameter_at_distance(v, rho, "extend")
    assert distance(v, torch.tensor(s, dtype=torch.float64)).item() == pytest.approx(
        rho * v[-1].norm().item(), rel=1e-8
    )


def test_the_ends_are_exact():
    v = draw(0, 2, 7)
    assert parameter_at_distance(v, 0.0) == 0.0
    assert parameter_at_distance(torch.stack([v[1] / 2, v[1]]), 1.0) == 1.0
    assert parameter_at_distance(torch.stack([v[1], v[1]]), 1.0) == 1.0
    assert parameter_at_distance(v[:1], 7.0) == 1.0
    assert parameter_at_distance(v[:1], 7.0, overshoot="extend") == 7.0
    assert parameter_at_distance(torch.stack([v[0], 0 * v[0]]), 0.5) == 0.0
    assert parameter_at_distance(torch.zeros(2, 3), 0.5) == 0.0
    assert parameter_at_distance(v, 5e-324) == 0.0


def test_a_curve_that_returns_gives_the_first_crossing():
    v = torch.tensor([[10.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    with mpmath.workdps(40):
        exact = mpmath.findroot(lambda s: 20 * s * (1 - s) + s * s - 1, 0.05)
    assert parameter_at_distance(v, 1.0) == pytest.approx(float(exact), rel=1e-13)


def test_the_polynomial_is_the_squared_distance():
    """sympy, for degrees up to 5: Σ coefficients · Bernstein polynomials = b(s)ᵀ G b(s)."""
    s = sympy.symbols("s")
    for n in range(1, 6):
        inner = [[sympy.Symbol(f"g{min(i, j)}{max(i, j)}") for j in range(n)] for i in range(n)]
        weights = [sympy.binomial(n, i) * s**i * (1 - s) ** (n - i) for i in range(1, n + 1)]
        direct = sum(weights[i] * inner[i][j] * weights[j] for i in range(n) for j in range(n))
        ours = sum(
            sympy.nsimplify(c, rational=True) * sympy.binomial(2 * n, m) * s**m * (1 - s) ** (2 * n - m)
            for m, c in enumerate(squared_distance(inner))
        )
        assert sympy.expand(direct - ours) == 0


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: parameter_at_distance(torch.ones(2, 3), -0.5), "rho: expected a finite number >= 0, got -0.5"),
        (lambda: parameter_at_distance(torch.ones(2, 3), float("nan")), "rho: expected"),
        (lambda: parameter_at_distance(torch.ones(2, 3), 0.5, "bounce"), "overshoot: expected one of clamp, extend"),
        (lambda: parameter_at_distance(torch.ones(3), 0.5), "displacements: expected shape"),
        (lambda: parameter_at_distance([[1.0]], 0.5), "displacements: expected a floating tensor"),
        (lambda: parameter_at_distance(torch.full((2, 3), float("nan")), 0.5), r"displacements\[0\]"),
    ],
)
def test_invalid_arguments_are_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
