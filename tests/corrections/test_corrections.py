"""Tests of the corrections: proofs on symbolic Gram matrices, and properties on random numbers."""

import math

import numpy as np
import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.corrections import (
    AutoThreshold,
    Correction,
    DelayCompensated,
    Frame,
    Gram,
    OrthoDC,
    OrthoDyn,
    Position,
    Tangent,
)
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import Flat
from tests.support import draw, numbers, relative, rotation, scales, seeds

thresholds = st.sampled_from([-1.0, -0.5, 0.0, 0.3, 1.0])


def setting(seed, size=12, k=3, dtype=torch.float64):
    base, current = draw(seed, 2, size, dtype=dtype)
    return Flat(size), base, current, draw(seed + 1, k, size, dtype=dtype)


def symbolic(n=2):
    """Return the Gram matrix of v₁ … v_n, g with symbols as entries."""
    return Gram.of([[sympy.Symbol(f"G{min(i, j)}{max(i, j)}", real=True) for j in range(n + 1)] for i in range(n + 1)])


def test_threshold_one_gives_orthogonality_to_the_drift_symbolically():
    inner = symbolic()
    lines, _ = OrthoDC(1.0).coefficients(inner)
    for line in lines:
        assert sympy.simplify(line @ inner.matrix[:, 2]) == 0


def test_threshold_one_gives_equal_tangent_and_position_symbolically():
    inner = symbolic()
    after_position, _ = (Position() >> OrthoDC(1.0)).coefficients(inner)
    after_tangent, _ = (Tangent() >> OrthoDC(1.0)).coefficients(inner)
    alone, _ = OrthoDC(1.0).coefficients(inner)
    for i in range(2):
        for j in range(3):
            assert sympy.simplify(after_position[i, j] - alone[i, j]) == 0
            assert sympy.simplify(after_tangent[i, j] - alone[i, j]) == 0


def test_pythagoras_and_idempotence_symbolically():
    inner = symbolic(1)
    lines, _ = OrthoDC(1.0).coefficients(inner)
    left = inner.corrected(lines).matrix[0, 0]
    removed = lines[0, 1] ** 2 * inner.matrix[1, 1]
    assert sympy.simplify(left + removed - inner.matrix[0, 0]) == 0
    twice, _ = (OrthoDC(1.0) >> OrthoDC(1.0)).coefficients(inner)
    assert all(sympy.simplify(a - b) == 0 for a, b in zip(twice[0], lines[0], strict=True))


@given(seeds)
def test_tangent_and_position_equal_their_formulas(seed):
    space, base, current, v = setting(seed)
    assert torch.equal(Tangent()(space, base, current, v), v)
    assert relative(Position()(space, base, current, v), v - (current - base)) <= 1e-15


@given(seeds, thresholds, scales)
def test_only_conflicting_displacements_are_projected(seed, threshold, scale):
    space, base, current, v = setting(seed)
    v = scale * v
    g = current - base
    found = OrthoDC(threshold)(space, base, current, v)
    for row, out in zip(v, found, strict=True):
        cosine = (row @ g / (row.norm() * g.norm())).item()
        projected = row - (row @ g) / (g @ g) * g
        expected = projected if threshold == 1 or (cosine <= threshold and threshold != -1) else row
        assert relative(out, expected) <= 1e-13


@given(seeds, thresholds)
def test_the_projection_is_idempotent_homogeneous_and_rotation_equivariant(seed, threshold):
    space, base, current, v = setting(seed)
    correct = OrthoDC(threshold)
    once, q = correct(space, base, current, v), rotation(seed + 2, 12)
    # A projected row has cosine 0 up to rounding, so a second projection changes it by at most about ε.
    assert relative(correct(space, base, current, once), once) <= 1e-13
    assert relative(correct(space, base, current, 1024 * v), 1024 * once) <= 1e-13
    assert relative(correct(space, base, base + 8 * (current - base), v), once) <= 1e-13
    assert relative(correct(space, base @ q, current @ q, v @ q), once @ q) <= 1e-12


@given(seeds)
def test_the_projection_is_linear_self_adjoint_and_shortens(seed):
    space, base, current, (u, v, w) = setting(seed)

    def project(x):
        return OrthoDC(1.0)(space, base, current, x[None])[0]

    assert relative(project(2 * u - 3 * v), 2 * project(u) - 3 * project(v)) <= 1e-13
    assert (project(u) @ w).item() == pytest.approx((u @ project(w)).item(), abs=1e-12)
    assert project(u).norm() <= u.norm() * (1 + 1e-14)


@given(seeds, seeds)
def test_the_projection_is_the_nearest_orthogonal_vector(seed, other):
    """Lemma C.1 of OrthoFL states this for the distance and for the angle."""
    space, base, current, v = setting(seed, k=1)
    found = OrthoDC(1.0)(space, base, current, v)[0]
    g = current - base
    rival = draw(other, 12)
    rival = rival - (rival @ g) / (g @ g) * g
    assert (found - v[0]).norm() <= (rival - v[0]).norm() + 1e-12
    angles = torch.nn.functional.cosine_similarity(v, torch.stack([found, rival]))
    assert angles[0] >= angles[1] - 1e-12


@given(seeds, thresholds)
def test_zero_displacements_and_zero_drifts_are_unchanged(seed, threshold):
    space, base, current, v = setting(seed)
    assert torch.equal(OrthoDC(threshold)(space, base, base, v), v)
    assert not OrthoDC(threshold)(space, base, current, 0 * v).any()


@given(seeds, st.floats(0.01, 100), st.sampled_from([-1, 1]))
def test_the_threshold_decides_for_displacements_parallel_to_the_drift(seed, factor, sign):
    space, base, current, _ = setting(seed)
    v = sign * factor * (current - base)[None]
    assert OrthoDC(1.0)(space, base, current, v).norm() <= 1e-14 * v.norm()
    assert torch.equal(OrthoDC(-1.0)(space, base, current, v), v)
    kept = OrthoDC(0.0)(space, base, current, v)
    assert torch.equal(kept, v) if sign > 0 else kept.norm() <= 1e-14 * v.norm()


@given(seeds, st.floats(-6, -2))
def test_the_projection_of_nearly_parallel_float32_vectors_is_orthogonal(seed, exponent):
    space, base, current, noise = setting(seed, size=1000, k=1, dtype=torch.float32)
    g = current.double() - base.double()
    v = (g + 10**exponent * g.norm() / noise.norm() * noise).float()
    out = OrthoDC(1.0)(space, base, current, v)[0].double()
    assert abs(out @ g) <= 1e-6 * out.norm() * g.norm()


@given(seeds)
def test_each_control_point_is_corrected_separately(seed):
    space, base, current, v = setting(seed)
    joint = OrthoDC(0.0)(space, base, current, v)
    alone = torch.cat([OrthoDC(0.0)(space, base, current, row[None]) for row in v])
    assert torch.equal(joint, alone)


@given(seeds)
def test_gradient_surgery_is_the_sum_of_two_corrections(seed):
    """PCGrad([v, g]) = OrthoDC₀(v; g) + OrthoDC₀(g; v)."""
    space, zero, _, (v, g, _) = setting(seed)
    zero = 0 * zero

    def surgery(a, b):
        return a - min(0.0, (a @ b).item()) / (b @ b) * b

    ours = OrthoDC(0.0)(space, zero, g, v[None]) + OrthoDC(0.0)(space, zero, v, g[None])
    assert relative(ours[0], surgery(v, g) + surgery(g, v)) <= 1e-13


@given(seeds, st.floats(-30, 30))
def test_scaling_all_inputs_scales_the_result(seed, exponent):
    space, base, current, v = setting(seed)
    unit = 10.0**exponent
    found = OrthoDC(0.3)(space, unit * base, unit * current, unit * v)
    assert relative(found, unit * OrthoDC(0.3)(space, base, current, v)) <= 1e-12


def test_displacements_cancelled_to_rounding_do_not_conflict():
    space, base, current, _ = setting(0)
    v = 3 * (current - base)[None]
    out = (OrthoDC(1.0) >> OrthoDC(0.5))(space, base, current, v)
    assert out.norm() <= 1e-14 * v.norm()


def test_the_projection_is_linear_at_zero():
    space, base, current, v = setting(0, k=1)
    _, slope = torch.func.jvp(lambda d: OrthoDC(1.0)(space, base, current, d), (0 * v,), (v,))
    assert relative(slope, OrthoDC(1.0)(space, base, current, v)) <= 1e-14


@pytest.mark.usefixtures("as_shipped")
def test_overflow_of_float64_is_rejected():
    with pytest.raises(ArgumentError, match=r"displacements\[0\]: squared length: expected a finite"):
        OrthoDC(1.0)(
            Flat(1), torch.zeros(1).double(), torch.ones(1).double(), torch.full((1, 1), 3e200, dtype=torch.float64)
        )


def test_coefficients_of_torch_numbers_are_differentiable():
    space, base, current, v = setting(0)
    inputs = [t.clone().requires_grad_() for t in (base, current, v)]
    for correction in (Tangent(), Position(), OrthoDC(1.0), OrthoDC(0.3), Position() >> OrthoDC(0.0)):
        assert torch.autograd.gradcheck(lambda b, c, d, f=correction: f(space, b, c, d), inputs)
        assert relative(correction(space, *inputs).detach(), correction(space, base, current, v)) <= 1e-14


def test_a_frame_of_points_equals_the_frame_of_displacements():
    space, base, current, v = setting(3)
    points = base + v
    a, b = Frame.of_points(points, base, current), Frame.of_displacements(points - base, base, current)
    assert relative(numbers(a.gram()), numbers(b.gram())) <= 1e-15
    assert space.shape == (12,)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: OrthoDC(1.5), "threshold: expected a finite number >= -1 and <= 1, got 1.5"),
        (lambda: OrthoDC(float("nan")), "threshold: expected"),
        (lambda: Tangent()("R", torch.zeros(2), torch.zeros(2), torch.zeros(1, 2)), "space: expected a Manifold, got 'R'"),
        (lambda: Tangent()(Flat(2), torch.zeros(2), torch.zeros(2), torch.zeros(2)), "displacements: expected shape"),
        (lambda: Tangent()(Flat(2), torch.zeros(3), torch.zeros(2), torch.zeros(1, 2)), "base: expected shape"),
        (lambda: Tangent()(Flat(2), torch.zeros(2), torch.full((2,), torch.inf), torch.zeros(1, 2)), "current: expected finite"),
    ],
)  # fmt: skip
def test_invalid_input_is_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


def test_a_state_shares_no_memory_with_the_inputs():
    base, current = draw(0, 2, 4)
    state = AutoThreshold().apply(Frame.of(Flat(4), base, current, draw(1, 2, 4))).state
    kept = state["base"].clone()
    base.zero_()
    assert torch.equal(state["base"], kept)


def test_states_are_detached_from_autograd():
    base, current = draw(0, 2, 4)
    v = draw(1, 2, 4).requires_grad_()
    for correct in (AutoThreshold(), OrthoDyn(), DelayCompensated(0.3, adaptive=True)):
        state = None
        for _ in range(3):
            state = correct.apply(Frame.of(Flat(4), base, current, v), state).state
        assert not any(isinstance(value, torch.Tensor) and value.requires_grad for value in state.values())


def test_frames_with_additional_rows_are_rejected():
    base, current = draw(0, 2, 4)
    frame = Frame.of(Flat(4), base, current, draw(1, 1, 4)).with_row("mine", draw(2, 4))
    with pytest.raises(ArgumentError, match="frame: expected displacements and the drift alone, got also mine"):
        Position().apply(frame)


def test_a_curved_frame_of_a_flat_space_gives_the_same_result():
    state, other = None, None
    for seed in range(4):
        base, current = draw(seed, 2, 4)
        v = draw(seed + 10, 2, 4)
        flat = AutoThreshold().apply(Frame.of(Flat(4), base, current, v), state)
        curved = AutoThreshold().apply(Frame.of(Flat(4), base, current, v, flat=False), other)
        state, other = flat.state, curved.state
        assert relative(flat.displacements(), curved.displacements()) <= 1e-12
        assert state["slope"] == pytest.approx(other["slope"], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("threshold", [0.0, 0.3])
@pytest.mark.parametrize("distance", [1e-7, 1e-9, 1e-11])
def test_the_remainder_of_a_cancelled_displacement_is_recomputed(threshold, distance):
    """After a drift of order 1, the position of a model near the current one cancels almost all digits."""
    for seed in range(20):
        base, (current, offset) = torch.zeros(3, dtype=torch.float64), draw(seed, 2, 3)
        model = current + distance * offset
        joint = (Position() >> OrthoDC(threshold))(Flat(3), base, current, (model - base)[None])
        left = (model - current)[None]
        alone = OrthoDC(threshold)(Flat(3), base, current, left)
        assert (joint - alone).norm() <= 1e-6 * left.norm() + 1e-15


def test_overflow_is_rejected():
    half = torch.float16
    with pytest.raises(ArgumentError, match="corrected displacements: expected finite values"):
        Position()(
            Flat(1), torch.zeros(1, dtype=half), torch.tensor([-6e4], dtype=half), torch.tensor([[6e4]], dtype=half)
        )


def test_the_norm_bound_bounds_every_combination():
    rows = draw(3, 4, 12)
    gram = Frame.of(Flat(12), rows[0], rows[1], rows[2:]).gram()
    for seed in range(20):
        line = draw(seed, 3).numpy().astype(object)
        assert math.sqrt(line @ gram.matrix @ line) <= gram.norm_bound(line) * (1 + 1e-14)
    aligned = Gram.of([[4.0, -2.0], [-2.0, 1.0]])  # v = -2 g
    assert aligned.norm_bound(np.array([1.0, -3.0], dtype=object)) == 5.0
    parts = Gram.of([[[4.0, 0.0], [0.0, 9.0]], [[1.0, 0.0], [0.0, math.inf]]])
    assert parts.norm_bound(np.array([[1.0, 1.0], [1.0, 0.0]], dtype=object)) == 6.0
    assert parts.norm_bound(np.array([1.0, 1e-3], dtype=object)) == math.inf


@pytest.mark.parametrize("result", [[1.0, 0.0], np.ones(2), np.ones((2, 2)), np.ones((1, 3))])
def test_wrong_shape_of_coefficients_raises_an_error(result):
    class Wrong(Correction):
        def coefficients(self, gram, state=None):
            return result, state

    frame = Frame.of(Flat(2), torch.zeros(2), torch.ones(2), torch.ones(1, 2))
    with pytest.raises(ArgumentError, match=r"correction: Wrong.coefficients: expected an array of shape \(1, 2\)"):
        Wrong().apply(frame)
