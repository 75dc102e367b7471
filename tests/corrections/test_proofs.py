"""Proofs of identities of the corrections on symbolic Gram matrices, with the same code that runs on models."""

import itertools

import numpy as np
import pytest
import sympy
import torch

from manifoldagg.corrections import (
    AutoThreshold,
    DelayCompensated,
    GradientSurgery,
    Gram,
    OrthoCorrect,
    OrthoDC,
    OrthoGrad,
    OrthoPos,
    OrthoStrict,
    Pairwise,
    Position,
    Tangent,
)
from manifoldagg.corrections.automatic import regression_slope
from manifoldagg.corrections.gram import detach_scalar
from manifoldagg.corrections.surgery import span_coefficients

pytestmark = pytest.mark.usefixtures("as_shipped")

STRICT = OrthoDC(1.0)


def symbols(rows, negative=()):
    """Return a symbolic Gram matrix with positive squares and real products, negative for the `negative` pairs."""

    def entry(i, j):
        i, j = min(i, j), max(i, j)
        sign = {"positive": True} if i == j else {"negative": True} if (i, j) in negative else {"real": True}
        return sympy.Symbol(f"G{i}{j}", **sign)

    return [[entry(i, j) for j in range(rows)] for i in range(rows)]


def lines_of(correction, inner, extra=()):
    return correction.coefficients(Gram.of(inner, extra=extra))[0].tolist()


def congruence(c, inner):
    c = np.array(c, dtype=object)
    return (c @ np.array(inner, dtype=object) @ c.T).tolist()


def same(a, b):
    return all(sympy.simplify(x - y) == 0 for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True))


def along(line, inner, k):
    return sympy.simplify(sum(c * inner[j][k] for j, c in enumerate(line)))


def test_projected_displacements_are_orthogonal_to_the_drift():
    inner = symbols(3)
    assert all(along(line, inner, 2) == 0 for line in lines_of(STRICT, inner))


def test_position_and_tangent_coincide_at_threshold_one():
    inner = symbols(3)
    alone = lines_of(STRICT, inner)
    for reading in (Position(), Tangent()):
        assert same(lines_of(reading >> STRICT, inner), alone)


def test_projection_satisfies_the_pythagorean_theorem():
    inner = symbols(2)
    lines = lines_of(STRICT, inner)
    left, removed = congruence(lines, inner)[0][0], lines[0][1] ** 2 * inner[1][1]
    assert sympy.simplify(left + removed - inner[0][0]) == 0


def test_the_projection_is_idempotent():
    inner = symbols(2)
    assert same(lines_of(STRICT >> STRICT, inner), lines_of(STRICT, inner))


def test_the_projection_never_lengthens():
    inner = symbols(2)
    shorter = sympy.simplify(inner[0][0] - congruence(lines_of(STRICT, inner), inner)[0][0])
    assert sympy.simplify(shorter - inner[0][1] ** 2 / inner[1][1]) == 0
    assert shorter.is_nonnegative


def test_the_projection_is_linear_and_self_adjoint():
    """For rows u, v, g: P(au + bv) = aPu + bPv, and ⟨Pu, v⟩ = ⟨u, Pv⟩."""
    inner, (a, b) = symbols(3), sympy.symbols("a b", real=True)
    pu, pv = lines_of(STRICT, inner)
    mixed = congruence([[a, b, 0], [0, 0, 1]], inner)
    c = lines_of(STRICT, mixed)[0]
    assert same([[c[0] * a, c[0] * b, c[1]]], [[a * x + b * y for x, y in zip(pu, pv, strict=True)]])
    assert sympy.simplify(along(pu, inner, 1) - along(pv, inner, 0)) == 0


def test_the_projection_ignores_the_scale_of_the_drift_and_is_homogeneous():
    inner, t = symbols(2), sympy.Symbol("t", positive=True)
    line = lines_of(STRICT, inner)[0]
    longer_drift = lines_of(STRICT, congruence([[1, 0], [0, t]], inner))[0]
    assert same([[longer_drift[0], t * longer_drift[1]]], [line])
    longer_v = lines_of(STRICT, congruence([[t, 0], [0, 1]], inner))[0]
    assert same([[t * longer_v[0], longer_v[1]]], [[t * c for c in line]])


def test_thresholded_maps_are_idempotent():
    """A conflicting row becomes orthogonal. Orthogonal and non-conflicting rows do not change."""
    inner, (a, b) = symbols(2, [(0, 1)]), sympy.symbols("a b", positive=True)
    once = lines_of(OrthoDC(0.0), inner)
    assert same(once, lines_of(STRICT, inner))
    assert along(once[0], inner, 1) == 0
    assert same(lines_of(OrthoDC(0.0), [[a, 0], [0, b]]), [[1, 0]])
    agreeing = [[sympy.Integer(5), 2], [2, sympy.Integer(3)]]
    assert lines_of(OrthoDC(0.0) >> OrthoDC(0.0), agreeing) == lines_of(OrthoDC(0.0), agreeing) == [[1, 0]]


def test_among_orthogonal_vectors_the_projection_is_nearest_in_distance():
    """For rows v, w, g with w ⟂ g: ‖v − w‖² − ‖v − Pv‖² = ‖w − Pv‖²."""
    inner = symbols(3)
    inner[1][2] = inner[2][1] = sympy.Integer(0)
    p = lines_of(STRICT, inner)[0]
    away = congruence([[1, -1, 0]], inner)[0][0]
    nearest = congruence([[1 - p[0], 0, -p[2]]], inner)[0][0]
    between = congruence([[p[0], -1, p[2]]], inner)[0][0]
    assert sympy.simplify(away - nearest - between) == 0


def test_among_orthogonal_vectors_the_projection_is_nearest_in_angle():
    """⟨v, w⟩ = ⟨Pv, w⟩ ≤ ‖Pv‖ ‖w‖ = (⟨v, Pv⟩ / ‖Pv‖) ‖w‖, so that cos(v, w) ≤ cos(v, Pv)."""
    inner = symbols(3)
    inner[1][2] = inner[2][1] = sympy.Integer(0)
    p = lines_of(STRICT, inner)[0]
    assert sympy.simplify(along(p, inner, 1) - inner[0][1]) == 0
    assert sympy.simplify(along(p, inner, 0) - congruence([p], inner)[0][0]) == 0


@pytest.mark.parametrize("sign", [-1, 0, 1])
def test_gradient_surgery_is_the_sum_of_two_corrections(sign):
    """PCGrad([v, g]) = OrthoDC₀(v; g) + OrthoDC₀(g; v)."""
    a, b, c = sympy.symbols("a b c", positive=True)
    inner = [[a, sign * c], [sign * c, b]]
    (first,) = lines_of(OrthoDC(0.0), inner)
    (second,) = lines_of(OrthoDC(0.0), [[b, sign * c], [sign * c, a]])
    ours = [first[0] + second[1], first[1] + second[0]]
    surgery = lines_of(GradientSurgery(), [[a, sign * c, 0], [sign * c, b, 0], [0, 0, 0]])
    assert same([ours], [[surgery[0][0] + surgery[1][0], surgery[0][1] + surgery[1][1]]])


@pytest.mark.parametrize("negative", [(), ((0, 1),)])
@pytest.mark.parametrize("threshold", [-1, 0, 1])
def test_ortho_dc_is_ortho_correct_without_alpha(threshold, negative):
    inner = symbols(2, negative) if negative or threshold else [[sympy.Integer(2), 1], [1, sympy.Integer(3)]]
    assert same(lines_of(OrthoDC(threshold), inner), lines_of(OrthoCorrect(0, threshold), inner))


def test_named_corrections_are_special_cases():
    inner, drift = symbols(2, [(0, 1)]), [[5, 2], [2, 3]]
    projected = [1, -inner[0][1] / inner[1][1]]
    assert same([projected], lines_of(OrthoGrad(), inner))
    assert same([projected], lines_of(OrthoPos(), inner))
    assert same([projected], lines_of(OrthoStrict(), inner))
    assert lines_of(OrthoGrad(), drift) == [[1, 0]]
    assert lines_of(OrthoPos(), drift) == [[1, -1]]


@pytest.mark.parametrize(
    ("share", "printed", "clipped"), [("-1/2", "1/2", "1/2"), ("1/3", -1, "-1/3"), ("7/3", -1, -1)]
)
def test_the_printed_position_differs_from_surgery_between_zero_and_one(share, printed, clipped):
    g = sympy.Symbol("g", positive=True)
    inner = [[10 * g, sympy.Rational(share) * g], [sympy.Rational(share) * g, g]]
    assert same(lines_of(OrthoPos(), inner), [[1, sympy.Rational(printed)]])
    assert same(lines_of(OrthoPos(clip=True), inner), [[1, sympy.Rational(clipped)]])
    surgery = lines_of(Position() >> OrthoDC(0.0), inner)
    assert same(surgery, [[1, sympy.Rational(clipped)]])


def test_orthogonality_by_tensor_implies_orthogonality_of_the_model():
    parts = [symbols(2), [[sympy.Symbol(f"H{i}{j}", positive=i == j, real=True) for j in range(2)] for i in range(2)]]
    parts[1][1][0] = parts[1][0][1]
    lines, _ = OrthoDC(1.0, "tensor").coefficients(Gram.of(parts))
    whole = sum(line[0, 0] * part[0][1] + line[0, 1] * part[1][1] for line, part in zip(lines, parts, strict=True))
    assert sympy.simplify(whole) == 0


def test_delay_compensation_is_the_expansion_of_the_gradient():
    """With e = −v: −(e + λ e⊙e⊙g) = v − λ v⊙v⊙g, coordinate by coordinate."""
    v, g, strength = sympy.symbols("v g strength", real=True)
    e = -v
    rows = [v, g, v * v * g]
    inner = [[a * b for b in rows] for a in rows]
    (line,) = lines_of(DelayCompensated(0.5), inner, ["v1*v1*g"])
    found = sum(c * row for c, row in zip(line, rows, strict=True)).subs(0.5, strength)
    assert sympy.simplify(found + e + strength * e * e * g) == 0


def test_delay_compensation_by_the_outer_product_is_the_expansion_of_the_gradient():
    """With e = −v in two dimensions: −(e + λ e eᵀ g) = v − λ ⟨v, g⟩ v, and the diagonal of e eᵀ is the other form."""
    v, g = (sympy.Matrix(sympy.symbols(names, real=True)) for names in ("v1 v2", "g1 g2"))
    strength = sympy.Rational(1, 3)
    inner = [[(a.T * b)[0] for b in (v, g)] for a in (v, g)]
    (line,) = lines_of(DelayCompensated(strength, form="outer"), inner)
    found = line[0] * v + line[1] * g
    outer = v * v.T
    assert sympy.simplify(found - (v - strength * outer * g)) == sympy.zeros(2, 1)
    diagonal = sympy.diag(*outer.diagonal())
    assert diagonal * g == v.multiply_elementwise(v).multiply_elementwise(g)


def test_the_complement_of_a_span_is_orthogonal_to_it():
    """The rows are v, g, o₁, o₂. The code treats symbolic rows as linearly independent."""
    inner = symbols(4)
    (line,) = lines_of(Pairwise(torch.zeros(2, 1)), inner, ["others[0]", "others[1]"])
    assert along(line, inner, 2) == 0
    assert along(line, inner, 3) == 0
    assert line[:2] == [1, 0]


def test_a_span_of_one_vector_gives_the_projection():
    a, b = sympy.symbols("a b", positive=True)
    assert sympy.simplify(span_coefficients([[a]], [b])[0] - b / a) == 0


def test_the_slope_solves_its_least_squares_problem():
    """d/dβ Σ w ‖v − a + βΘ‖² = 0 at the optimal a: β = −Cov/Var."""
    w, x, v = (sympy.symbols(f"{name}0:3", positive=name == "w", real=True) for name in "wxv")
    beta, a = sympy.symbols("beta a", real=True)
    loss = sum(wi * (vi - a + beta * xi) ** 2 for wi, xi, vi in zip(w, x, v, strict=True))
    best = sympy.solve([sympy.diff(loss, beta), sympy.diff(loss, a)], [beta, a], dict=True)[0][beta]
    total = sum(w)
    mx, mv = (sum(wi * z for wi, z in zip(w, zs, strict=True)) / total for zs in (x, v))
    cov = sum(wi * (xi - mx) * (vi - mv) for wi, xi, vi in zip(w, x, v, strict=True))
    var = sum(wi * (xi - mx) ** 2 for wi, xi in zip(w, x, strict=True))
    assert sympy.simplify(best + cov / var) == 0
    assert regression_slope(sympy.Rational(-1, 3), sympy.Integer(1)) == sympy.Rational(1, 3)


def test_projection_is_nearer_if_the_ratio_is_between_zero_and_twice_the_slope():
    """For rows v, g: ‖Pv − (v − βg)‖² − ‖v − (v − βg)‖² = s (s − 2β) ‖g‖²."""
    inner, beta = symbols(2), sympy.Symbol("beta", positive=True)
    p = lines_of(STRICT, inner)[0]
    project = congruence([[0, p[1] + beta]], inner)[0][0]
    keep = congruence([[0, beta]], inner)[0][0]
    s = inner[0][1] / inner[1][1]
    assert sympy.simplify(project - keep - s * (s - 2 * beta) * inner[1][1]) == 0


@pytest.mark.parametrize(("s", "slope_", "chosen"), [(-0.1, 0.5, -1), (0.1, 0.5, 1), (0.9, 0.5, 1), (1.1, 0.5, -1)])
def test_the_automatic_threshold_follows_the_criterion(s, slope_, chosen):
    """The rows are v, g, mean v and base − mean. The state contains the covariance and the variance of the slope."""
    inner = [[sympy.Rational(4), sympy.Rational(s), 0, 0], [sympy.Rational(s), 1, 0, 0], [0] * 4, [0] * 4]
    state = {"covariance": -sympy.Rational(slope_), "variance": sympy.Integer(1)}
    lines, state = AutoThreshold().coefficients(Gram.of(inner, extra=["mean v", "base - mean"]), state)
    assert state["threshold"] == chosen
    assert sympy.simplify(lines[0, 1] - (-sympy.Rational(s) if chosen == 1 else 0)) == 0


def test_composition_is_associative():
    inner = symbols(2, [(0, 1)])
    parts = (Position(), STRICT, Position())
    left, right = (parts[0] >> parts[1]) >> parts[2], parts[0] >> (parts[1] >> parts[2])
    assert same(lines_of(left, inner), lines_of(right, inner))


def test_floats_torch_numbers_and_symbols_agree():
    inner = [[5.0, -2.0, 1.0], [-2.0, 4.0, 0.5], [1.0, 0.5, 3.0]]
    followed = torch.tensor(inner, dtype=torch.float64, requires_grad=True)
    exact = sympy.Matrix(inner).applyfunc(sympy.nsimplify).tolist()
    members = [Tangent(), Position(), OrthoDC(0.2), OrthoPos(clip=True), GradientSurgery(), Position() >> OrthoGrad()]
    for correction, extra in [*itertools.product(members, [()]), (Pairwise(torch.zeros(1, 1)), ["others[0]"])]:
        found = [lines_of(correction, numbers, extra) for numbers in (inner, followed, exact)]
        found[1] = [[detach_scalar(c) for c in line] for line in found[1]]
        for row in zip(*found, strict=True):
            assert all(float(a) == pytest.approx(float(b), abs=1e-14) == pytest.approx(float(c), abs=1e-14) for a, b, c in zip(*row, strict=True))  # fmt: skip
