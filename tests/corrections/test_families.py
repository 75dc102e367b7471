"""Tests of properties that all families of corrections share, for every scale and dtype."""

import pytest
import torch
import torchjd.aggregation
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.corrections import (
    AutoThreshold,
    DelayCompensated,
    Frame,
    GradientSurgery,
    Gram,
    OrthoCorrect,
    OrthoDC,
    OrthoDyn,
    OrthoGrad,
    OrthoPos,
    OrthoStrict,
    Pairwise,
    Position,
    Tangent,
)
from manifoldagg.corrections.surgery import span_coefficients
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import Flat, ParameterSpace, Power, Product
from tests.support import draw, numbers, relative, rotation, seeds

SIZE = 12
SPACE = Flat(SIZE)
STATELESS = [
    Tangent(),
    Position(),
    OrthoDC(0.3),
    OrthoDC(1.0),
    OrthoPos(),
    OrthoPos(clip=True),
    OrthoStrict(),
    OrthoCorrect(0.4, -0.2),
    GradientSurgery(),
    Pairwise(draw(77, 2, SIZE)),
]
COMPENSATED = [DelayCompensated(0.1), DelayCompensated(0.1, form="outer")]
"""Corrections whose result depends on the unit of the displacements."""
exponents = st.floats(-30, 30)


def setting(seed, n=3, size=SIZE, dtype=torch.float64):
    base, current = draw(seed, 2, size, dtype=dtype)
    return base, current, draw(seed + 1, n, size, dtype=dtype)


@pytest.mark.parametrize("correction", STATELESS, ids=str)
@given(seeds, exponents)
def test_scaling_all_inputs_scales_the_result(correction, seed, exponent):
    (base, current, v), unit = setting(seed), 10.0**exponent
    found = correction(SPACE, unit * base, unit * current, unit * v)
    assert relative(found, unit * correction(SPACE, base, current, v)) <= 1e-11


@pytest.mark.parametrize(
    "correction", [*(c for c in STATELESS if not isinstance(c, Pairwise)), COMPENSATED[1]], ids=str
)
@given(seeds)
def test_corrections_are_equivariant_under_isometries(correction, seed):
    (base, current, v), q = setting(seed), rotation(seed + 2, SIZE)
    turned = correction(SPACE, base @ q, current @ q, v @ q)
    assert relative(turned, correction(SPACE, base, current, v) @ q) <= 1e-11
    assert relative(correction(SPACE, base + q[0], current + q[0], v), correction(SPACE, base, current, v)) <= 1e-11


@pytest.mark.parametrize("correction", [c for c in STATELESS if not isinstance(c, GradientSurgery)], ids=str)
@given(seeds)
def test_each_control_point_is_corrected_separately(correction, seed):
    base, current, v = setting(seed)
    alone = torch.cat([correction(SPACE, base, current, row[None]) for row in v])
    assert torch.equal(correction(SPACE, base, current, v), alone)


@pytest.mark.parametrize("correction", [*STATELESS, *COMPENSATED], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_dtypes_are_rounded_once(correction, dtype):
    base, current, v = setting(3, dtype=dtype)
    out = correction(SPACE, base, current, v)
    exact = correction(SPACE, base.double(), current.double(), v.double())
    assert out.dtype == dtype
    # The result rounds to float32 first, so the error slightly exceeds half a unit in the last place.
    assert ((out.double() - exact).abs() <= 0.51 * torch.finfo(dtype).eps * exact.abs() + 1e-6).all()


@pytest.mark.parametrize("correction", [*STATELESS, *COMPENSATED], ids=str)
def test_inputs_are_not_modified_and_outputs_share_no_memory(correction):
    base, current, v = setting(3)
    copies = [t.clone() for t in (base, current, v)]
    out = correction(SPACE, base, current, v)
    assert all(torch.equal(a, b) for a, b in zip((base, current, v), copies, strict=True))
    out.zero_()
    assert torch.equal(v, copies[2])


@pytest.mark.parametrize("correction", [*STATELESS, *COMPENSATED], ids=str)
@pytest.mark.parametrize("scale", [1e-45, 1e-38])
def test_float32_denormals_are_not_treated_as_zero(correction, scale):
    base, current, v = (torch.full_like(x, scale) * x.sign() for x in setting(3, dtype=torch.float32))
    out = correction(SPACE, base, current, v).double()
    exact = correction(SPACE, base.double(), current.double(), v.double())
    # A denormal is a multiple of 2⁻¹⁴⁹.
    assert ((out - exact).abs() <= 2.0**-149 + 1e-6 * exact.abs()).all()


def test_float64_denormals_count_as_zero():
    """The squares of denormals underflow to 0, so no correction divides by them."""
    base, current, v = (5e-324 * x.sign() for x in setting(3))
    for correction in STATELESS:
        assert correction(SPACE, base, current, v).isfinite().all()
    assert torch.equal(OrthoStrict()(SPACE, base, current, v), v)


@given(seeds, st.floats(-6, -2), st.sampled_from([OrthoStrict(), OrthoGrad()]), st.sampled_from([-1, 1]))
def test_projections_of_nearly_parallel_float32_vectors_are_orthogonal(seed, exponent, correction, sign):
    base, current, noise = setting(seed, n=1, size=1000, dtype=torch.float32)
    g = current.double() - base.double()
    v = (sign * g + 10**exponent * g.norm() / noise.norm() * noise).float()
    out = correction(Flat(1000), base, current, v)[0].double()
    if sign > 0 and correction == OrthoGrad():
        assert torch.equal(out, v[0].double())
    else:
        assert abs(out @ g) <= 1e-6 * out.norm() * g.norm()


@given(seeds, st.floats(-6, -2))
def test_nearly_dependent_updates_give_an_orthogonal_result(seed, exponent):
    base, current, v = setting(seed, n=1, size=1000, dtype=torch.float32)
    others = draw(seed + 3, 3, 1000, dtype=torch.float32)
    others[2] = (others[0] - others[1] + 10**exponent * others[2]).float()
    out = Pairwise(others)(Flat(1000), base, current, v)[0].double()
    cosines = others.double() @ out / (others.double().norm(dim=1) * out.norm())
    assert cosines.abs().max() <= 1e-6


@given(seeds, st.integers(0, 5))
def test_span_coefficients_are_the_least_squares_solution(seed, rank):
    rows = draw(seed, 5, max(rank, 1)) @ draw(seed + 1, max(rank, 1), SIZE) * (10.0 ** draw(seed + 2, 5, 1))
    v = draw(seed + 3, SIZE)
    x = span_coefficients((rows @ rows.T).tolist(), (rows @ v).tolist())
    unit = rows / rows.norm(dim=1, keepdim=True)
    expected = v - torch.linalg.lstsq(unit.T, v[:, None], driver="gelsd").solution[:, 0] @ unit
    assert sum(c != 0 for c in x) <= max(rank, 1)
    assert relative(v - torch.tensor(x).double() @ rows, expected) <= 1e-6


def test_zero_or_missing_updates_of_others_change_nothing():
    base, current, v = setting(3)
    assert torch.equal(Pairwise(torch.zeros(2, SIZE).double())(SPACE, base, current, v), v)
    assert torch.equal(Pairwise([])(SPACE, base, current, v), v)


@given(seeds)
def test_surgery_of_two_updates_equals_torchjd(seed):
    zero, (v, g) = torch.zeros(SIZE).double(), draw(seed, 2, SIZE)
    reference = torchjd.aggregation.PCGrad()(torch.stack([v, g]))
    assert relative(GradientSurgery()(SPACE, zero, zero, torch.stack([v, g])).sum(0), reference) <= 1e-12
    one_by_one = OrthoDC(0.0)(SPACE, zero, g, v[None]) + OrthoDC(0.0)(SPACE, zero, v, g[None])
    assert relative(one_by_one[0], reference) <= 1e-12


def test_the_order_of_surgery_changes_the_result():
    zero, v = torch.zeros(SIZE).double(), draw(8, 4, SIZE)
    forward, backward = GradientSurgery(), GradientSurgery((3, 2, 1, 0, 4))
    flipped = forward(SPACE, zero, zero, v.flip(0)).flip(0)
    assert relative(backward(SPACE, zero, zero, v), flipped) <= 1e-13
    assert relative(backward(SPACE, zero, zero, v), forward(SPACE, zero, zero, v)) > 1e-3


@given(seeds)
def test_orthogonality_by_tensor_implies_orthogonality_of_the_model(seed):
    space = Product({"a": Flat(3), "b": Flat(4), "c": Flat(5)})
    base, current, v = setting(seed)
    for correction in (OrthoStrict(granularity="tensor"), OrthoDC(1.0, "tensor")):
        out = correction(space, base, current, v)
        g = current - base
        assert (out @ g).abs().max() <= 1e-13 * out.norm() * g.norm()
        for a, b in ((0, 3), (3, 7), (7, 12)):
            assert (out[:, a:b] @ g[a:b]).abs().max() <= 1e-13 * out.norm() * g.norm()


def test_segments_are_the_tensors_of_a_model():
    model = torch.nn.Linear(3, 3).double()
    space = ParameterSpace.of(model)
    base, current, v = setting(3)
    frame = Frame.of(space, base, current, v)
    assert frame.segments == {"weight": 9, "bias": 3}
    assert frame.gram("tensor").parts.shape == (2, 4, 4)
    assert relative(numbers(frame.gram("tensor").total), numbers(frame.gram())) <= 1e-15
    by_tensor = OrthoDC(1.0, "tensor")(space, base, current, v)
    assert relative(by_tensor[:, :9], OrthoDC(1.0)(Flat(9), base[:9], current[:9], v[:, :9])) <= 1e-14


def test_mixed_granularities_compose_sequentially():
    space = Product({"a": Flat(5), "b": Flat(7)})
    base, current, v = setting(3)
    fine, coarse = OrthoDC(0.2, "tensor"), OrthoPos()
    for a, b in ((fine, coarse), (coarse, fine), (fine, fine)):
        once = a(space, base, current, v)
        assert relative((a >> b)(space, base, current, v), b(space, base, current, once)) <= 1e-13


@pytest.mark.parametrize("before", [*STATELESS, *COMPENSATED], ids=str)
@pytest.mark.parametrize("after", [*STATELESS, *COMPENSATED], ids=str)
def test_any_two_corrections_compose(before, after):
    if after == OrthoPos() and before not in (Tangent(), Position()):
        after = OrthoCorrect(1.0, 0.05)  # The printed form is discontinuous at cosine 0, which a projection returns.
    base, current, v = setting(3)
    expected = after(SPACE, base, current, before(SPACE, base, current, v))
    assert relative((before >> after)(SPACE, base, current, v), expected) <= 1e-12
    assert relative((Tangent() >> (before >> after))(SPACE, base, current, v), expected) <= 1e-12
    assert relative(((before >> after) >> Tangent())(SPACE, base, current, v), expected) <= 1e-12


def test_stateful_corrections_compose_with_separate_states():
    base, current, v = setting(3)
    parts, state, states = (DelayCompensated(0.1, adaptive=True), OrthoDyn(), AutoThreshold()), None, [None] * 3
    chain = parts[0] >> parts[1] >> parts[2]
    for factor in (1.0, -2.0, 0.5):
        done = chain.apply(Frame.of(SPACE, base, current, factor * v), state)
        state, u = done.state, factor * v
        for i, part in enumerate(parts):
            one = part.apply(Frame.of(SPACE, base, current, u), states[i])
            states[i], u = one.state, one.displacements()
        assert relative(done.displacements(), u) <= 1e-12


def test_states_are_immutable_values():
    base, current, v = setting(3)
    for correction in (DelayCompensated(0.1, adaptive=True), OrthoDyn(), AutoThreshold()):
        frame = Frame.of(SPACE, base, current, v)
        first = correction.apply(frame).state
        copies = {k: x.clone() if isinstance(x, torch.Tensor) else x for k, x in first.items()}
        a, b = correction.apply(frame, first), correction.apply(frame, first)
        assert torch.equal(a.displacements(), b.displacements())
        assert all(
            torch.equal(first[k], x) if isinstance(x, torch.Tensor) else first[k] == x for k, x in copies.items()
        )


def test_the_weighted_fit_of_the_slope_is_its_least_squares_problem():
    bases, v, correction, state = draw(5, 30, SIZE), draw(6, 30, SIZE), AutoThreshold(decay=0.9), None
    v = v - 0.4 * bases
    for base, row in zip(bases, v, strict=True):
        state = correction.apply(Frame.of(SPACE, base, base + 1, row[None]), state).state
    weights = torch.tensor([0.1 * 0.9 ** (29 - k) for k in range(30)], dtype=torch.float64)
    weights[0] = 0.9**29
    mean_v, mean_base = weights @ v, weights @ bases
    covariance = (weights[:, None] * (v - mean_v) * (bases - mean_base)).sum()
    variance = (weights[:, None] * (bases - mean_base).square()).sum()
    assert state["slope"] == pytest.approx((-covariance / variance).item(), rel=1e-12)
    assert relative(state["displacement"], mean_v) <= 1e-13


def test_a_schedule_selects_the_phase():
    base, current, v = setting(3)
    correction, state = OrthoDyn(lambda version: ("gradient", "tangent", "position")[version // 2]), None
    for expected in (OrthoGrad(), OrthoGrad(), Tangent(), Tangent(), OrthoPos(), OrthoPos()):
        done = correction.apply(Frame.of(SPACE, base, current, v), state)
        state = done.state
        assert torch.equal(done.displacements(), expected(SPACE, base, current, v))


def test_states_of_bfloat16_runs_are_float32():
    base, current, v = setting(3, dtype=torch.bfloat16)
    for correction in (DelayCompensated(0.1, adaptive=True), OrthoDyn(), AutoThreshold()):
        state = correction.apply(Frame.of(SPACE, base, current, v)).state
        assert {x.dtype for x in state.values() if isinstance(x, torch.Tensor)} == {torch.float32}


@pytest.mark.parametrize("correction", [*STATELESS, *COMPENSATED], ids=str)
def test_corrections_are_differentiable(correction):
    inputs = [t.requires_grad_() for t in setting(3, n=2)]
    assert torch.autograd.gradcheck(lambda b, c, d: correction(SPACE, b, c, d), inputs)


def test_any_point_shape_and_zero_displacements_are_accepted():
    space = Power(Flat(3), (2,))
    base, current, v = draw(1, 2, 3), draw(2, 2, 3), draw(3, 4, 2, 3)
    flat = OrthoDC(1.0)(Flat(6), base.flatten(), current.flatten(), v.flatten(1))
    assert torch.equal(OrthoDC(1.0)(space, base, current, v).flatten(1), flat)
    for correction in STATELESS[:9]:
        assert correction(space, base, current, v[:0]).shape == (0, 2, 3)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: OrthoDC(1.0, "layer"), "granularity: expected one of model, tensor"),
        (lambda: OrthoCorrect(float("inf")), "alpha: expected a finite number"),
        (lambda: OrthoCorrect(1.0, 0.5, clip=True), "clip: expected threshold=0 for the continuous form"),
        (lambda: OrthoCorrect(-1.0, clip=True), "alpha: expected a finite number >= 0"),
        (lambda: DelayCompensated(-1.0), "strength: expected"),
        (lambda: DelayCompensated(1.0, decay=2.0), "decay: expected"),
        (lambda: DelayCompensated(form="inner"), "form: expected one of diagonal, outer"),
        (lambda: DelayCompensated(adaptive=True, form="outer"), "adaptive: expected False with form='outer'"),
        (lambda: GradientSurgery((0, 2)), "order: expected a tuple with a permutation"),
        (lambda: GradientSurgery((0, 1))(SPACE, *setting(3)), "order: expected a permutation of 4 rows"),
        (lambda: Pairwise([torch.tensor([1.0, float("nan")])]), r"others\[0\]: expected finite"),
        (lambda: Pairwise([1.0]), r"others\[0\]: expected a tensor"),
        (lambda: Pairwise(torch.zeros(2, 3).double())(SPACE, *setting(3)), r"others\[0\]: expected shape \(12\)"),
        (lambda: OrthoDyn("fast"), "schedule: expected a function"),
        (lambda: OrthoDyn(upper=0.2), "lower: expected"),
        (lambda: OrthoDyn(lambda version: "sideways").apply(Frame.of(SPACE, *setting(3))), r"schedule\(0\): expected one of"),
        (lambda: AutoThreshold(decay=1.0), "decay: expected"),
        (lambda: OrthoDyn()(SPACE, *setting(3)), "expected a stateless correction, got .*; use apply"),
        (lambda: (Tangent() >> AutoThreshold())(SPACE, *setting(3)), "expected a stateless correction"),
        (lambda: (Tangent() >> DelayCompensated(1.0)).coefficients(Gram.of([[1.0] * 3] * 3)), r"gram: expected the name of a row that `extend` added, got 'v1\*v1\*g'"),
        (lambda: Gram.of([]), "gram: expected square matrices of at least 1 rows"),
        (lambda: DelayCompensated(1.0).coefficients(Gram.of([[1.0] * 4] * 4)), "gram: expected the name of a row"),
        (lambda: Frame.of(SPACE, *setting(3)).gram()["head"], "gram: expected the name of a segment, got 'head'; granularity='tensor' computes"),
        (lambda: Frame.of(Product({"a": SPACE}), *setting(3)).gram("tensor")["head"], "the segments are 'a'"),
        (lambda: Tangent()(SPACE, *setting(3), transport="parallel"), "transport: expected None on a flat space"),
        (lambda: Frame.of(SPACE, *setting(3)).gram("layer"), "granularity: expected one of"),
    ],
)  # fmt: skip
def test_invalid_input_is_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


def test_only_corrections_compose():
    with pytest.raises(TypeError):
        Tangent() >> 3
