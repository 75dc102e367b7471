"""Tests of `rotate_control`, which rotates control points with their chord."""

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.corrections import OrthoDC, Position, Tangent, rotate_control
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import Flat, Power, Sphere
from tests.support import draw, relative, rotation, seeds

SIZE = 12


@given(seeds, st.floats(-8, 0), st.sampled_from([False, True]))
def test_the_map_equals_the_rotation_by_a_known_angle(seed, exponent, near_opposite):
    """The chord rotates by a known angle in a known plane. The cases include nearly parallel and opposite chords."""
    base, current, phi, a, e = draw(seed, 5, SIZE)
    e = e - (e @ a) / (a @ a) * a
    e = e / e.norm()
    angle = torch.tensor(10.0**exponent).double()
    sine, cosine = angle.sin(), angle.cos() * (-1 if near_opposite else 1)
    unit = a / a.norm()
    chord = 3 * (cosine * unit + sine * e)
    out = rotate_control(phi, base, base + a, current, current + chord)
    x = phi - base - a / 2
    p, q = x @ unit, x @ e
    turned = x + ((cosine - 1) * p - sine * q) * unit + (sine * p + (cosine - 1) * q) * e
    # The plane of two vectors at angle t has the error ε/t. A rotation by 180 degrees in the plane doubles the error.
    allowed = 1e-13 / sine.item() if near_opposite else 1e-13
    assert relative(out - current - chord / 2, turned) <= max(allowed, 1e-13)


@given(seeds)
def test_lengths_and_angles_to_the_chord_are_preserved(seed):
    base, end, current, goal, phi = draw(seed, 5, SIZE)
    out = rotate_control(phi, base, end, current, goal)
    x, y, a, b = phi - (base + end) / 2, out - (current + goal) / 2, end - base, goal - current
    assert y.norm().item() == pytest.approx(x.norm().item(), rel=1e-12)
    assert (y @ b / b.norm()).item() == pytest.approx((x @ a / a.norm()).item(), abs=1e-11)


@given(seeds)
def test_the_reverse_rotation_is_the_inverse(seed):
    base, end, current, goal, phi = draw(seed, 5, SIZE)
    out = rotate_control(phi, base, end, current, goal)
    assert relative(rotate_control(out, current, goal, base, end), phi) <= 1e-11


@given(seeds)
def test_the_rotation_is_equivariant_under_isometries(seed):
    points, q, shift = draw(seed, 5, SIZE), rotation(seed, SIZE), draw(seed + 1, SIZE)
    assert relative(rotate_control(*(points @ q + shift)), rotate_control(*points) @ q + shift) <= 1e-11


@given(seeds)
def test_the_tangent_correction_gives_a_translation(seed):
    space, (base, current, phi, end) = Flat(SIZE), draw(seed, 4, SIZE)
    goal = current + Tangent()(space, base, current, (end - base)[None])[0]
    assert relative(rotate_control(phi, base, end, current, goal), phi + current - base) <= 1e-13


def test_control_points_on_the_chord_remain_on_the_chord():
    space, (base, current, end) = Flat(SIZE), draw(4, 3, SIZE)
    for correction in (Position(), OrthoDC(1.0)):
        goal = current + correction(space, base, current, (end - base)[None])[0]
        middle = rotate_control((base + end) / 2, base, end, current, goal)
        assert relative(middle, (current + goal) / 2) <= 1e-13


def test_opposite_chords_negate_only_the_component_along_the_chord():
    a = draw(3, SIZE)
    base, current, phi = draw(5, 3, SIZE)
    for dtype in (torch.float32, torch.float64):
        given = [t.to(dtype) for t in (phi, base, base + a, current)]
        out = rotate_control(*given, current.to(dtype) - 2 * (given[2] - given[1]))
        x = phi - base - a / 2
        flipped = current - a + x - 2 * (x @ a) / (a @ a) * a
        assert relative(out, flipped) <= 16 * torch.finfo(dtype).eps


def test_chords_of_length_zero_give_a_translation():
    base, end, current, phi = draw(3, 4, SIZE)
    assert relative(rotate_control(phi, base, base, current, end), phi - base + (current + end) / 2) <= 1e-15
    still = rotate_control(phi, base, end, current, current)
    assert relative(still, phi - (base + end) / 2 + current) <= 1e-15


@pytest.mark.parametrize("scale", [1.0, 1e-100, 1e-150, 1e-155, 1e-200])
def test_parallel_chords_do_not_rotate_the_control_point(scale):
    control, chord, zero = torch.tensor([[1.5, 1.0], [2.0, 0.0], [0.0, 0.0]], dtype=torch.float64) * scale
    assert torch.equal(rotate_control(control, zero, chord, zero, chord), control)


@pytest.mark.parametrize("unit", [1e-30, 1e-10, 1e30])
def test_scaling_all_inputs_scales_the_result(unit):
    points = draw(3, 5, SIZE)
    assert relative(rotate_control(*(unit * points)), unit * rotate_control(*points)) <= 1e-12
    narrow = rotate_control(*(unit * points).float())
    assert relative(narrow, unit * rotate_control(*points)) <= 1e-6


def test_the_result_agrees_with_forty_digit_arithmetic():
    with mpmath.workdps(40):
        points = [mpmath.matrix(row.tolist()) for row in draw(6, 5, 3)]
        phi, base, end, current, goal = points
        a, b, x = end - base, goal - current, phi - (base + end) / 2
        a, b = a / mpmath.norm(a), b / mpmath.norm(b)
        dot = lambda u, v: (u.T * v)[0]  # noqa: E731
        c = dot(a, b)
        e = b - c * a
        e = e / mpmath.norm(e)
        s, p, q = mpmath.sqrt(1 - c * c), dot(a, x), dot(e, x)
        y = x + ((c - 1) * p - s * q) * a + (s * p + (c - 1) * q) * e + (current + goal) / 2
        exact = torch.tensor([float(z) for z in y], dtype=torch.float64)
    assert relative(rotate_control(*draw(6, 5, 3)), exact) <= 1e-15


def test_the_rotation_is_differentiable():
    assert torch.autograd.gradcheck(rotate_control, [p.requires_grad_() for p in draw(3, 5, 4).unbind()])


def test_the_result_has_the_shape_and_dtype_of_the_input():
    points = draw(3, 5, 2, 3).bfloat16()
    space = Power(Flat(3), (2,))
    out = rotate_control(*points, space=space)
    assert (out.shape, out.dtype) == ((2, 3), torch.bfloat16)
    wide = rotate_control(*points.double(), space=space)
    assert ((out.double() - wide).abs() <= 0.51 * 2.0**-7 * wide.abs()).all()


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: rotate_control(*draw(1, 5, 3), space=Sphere(3)), "space: expected a flat manifold"),
        (lambda: rotate_control(*draw(1, 4, 3), torch.zeros(2).double()), r"corrected_end: expected shape \(3\)"),
        (
            lambda: rotate_control(*draw(1, 4, 3), torch.full((3,), torch.nan).double()),
            "corrected_end: expected finite",
        ),
    ],
)
def test_invalid_input_is_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


def test_any_scale_gives_the_same_rotation():
    """Inner products of the chords underflow and overflow for points within the range of float64."""
    zero = torch.zeros(2, dtype=torch.float64)
    control, right, up = torch.tensor([[1.0, 1.0], [2.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    for scale in (1e-200, 1e-161, 1e-155, 1e-30, 1.0, 1e100):
        found = rotate_control(scale * control, zero, scale * right, zero, scale * up)
        assert torch.allclose(found / scale, torch.tensor([-1.0, 1.0], dtype=torch.float64), rtol=1e-12)
    with pytest.raises(ArgumentError, match="points: inner products"):
        rotate_control(1e155 * control, zero, 1e155 * right, zero, 1e155 * up)


def test_a_batch_is_rejected():
    points = draw(0, 5, 3, 4)
    with pytest.raises(ArgumentError, match="control: expected shape"):
        rotate_control(*points)
    with pytest.raises(ArgumentError, match="control: expected shape"):
        rotate_control(*points, space=Flat(4))


def test_a_narrow_dtype_of_the_current_model_does_not_round_the_result():
    zero, control, end, goal = torch.zeros(2), torch.tensor([1.001, 1.003]), torch.tensor([2.0, 0.0]), torch.tensor([1.0, 3.0])  # fmt: skip
    narrow = rotate_control(control, zero, end, torch.ones(2, dtype=torch.bfloat16), goal)
    assert torch.equal(narrow, rotate_control(control, zero, end, torch.ones(2), goal))
