"""Barriers and curvature: what is exact on lines, parabolas, polygons and circles of latitude, and what never changes them."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from manifoldagg.curves.bezier import Bezier
from manifoldagg.curves.diagnostics import Barrier, barrier, chord_ratio, curvature
from manifoldagg.curves.path import CurveEmbedding
from manifoldagg.curves.piecewise import Piecewise
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import Flat, Manifold, Sphere
from tests.support import draw, scales, seeds

SIZE = 5
EPS = torch.finfo(torch.float64).eps


def hill(theta):
    return -theta.double().square().sum().item()


def waves(theta):
    return (1.5 + theta.double().sin().mean()).item()


@given(seeds, st.integers(1, 4))
def test_losses_are_evaluated_on_the_curve_and_on_the_chord(seed, degree):
    curve, phi = Bezier(Flat(SIZE), degree), draw(seed, degree + 1, SIZE)
    found = barrier(curve, phi, waves, points=7)
    t = torch.linspace(0, 1, 7, dtype=torch.float64)
    assert torch.equal(found.t, t)
    assert found.losses.tolist() == [waves(curve(phi, s)) for s in t.tolist()]
    straight = [waves(torch.lerp(phi[0], phi[-1], s)) for s in t]
    assert found.chord.tolist() == pytest.approx(straight, abs=1e-14)


@given(seeds)
def test_the_barrier_of_a_concave_quadratic_is_a_quarter_of_the_squared_chord(seed):
    """-|a + t d|² lies above the line between its ends by t (1 - t) |d|²."""
    phi = draw(seed, 3, SIZE)
    found = barrier(Bezier(Flat(SIZE)), phi, hill, points=5)
    assert found.chord_height == pytest.approx((phi[2] - phi[0]).square().sum().item() / 4, rel=1e-12)
    assert found.chord_argmax == 0.5


@given(seeds, st.integers(1, 3))
def test_a_straight_curve_has_the_barrier_of_its_chord(seed, degree):
    curve = Bezier(Flat(SIZE), degree)
    phi = Bezier(Flat(SIZE), 1).elevate(draw(seed, 2, SIZE), degree - 1)
    found = barrier(curve, phi, waves, points=9)
    assert found.height == pytest.approx(found.chord_height, abs=1e-13)


@given(seeds, scales, st.floats(-10, 10))
def test_barriers_scale_with_the_loss_and_ignore_constants(seed, factor, shift):
    curve, phi = Bezier(Flat(SIZE)), draw(seed, 3, SIZE)
    plain = barrier(curve, phi, hill, points=11)
    other = barrier(curve, phi, lambda theta: factor * hill(theta) + shift, points=11)
    # Values are rounded at their own size, and four of them make an excess.
    slack = 8 * EPS * (factor * plain.losses.abs().max().item() + abs(shift))
    assert other.height == pytest.approx(factor * plain.height, rel=1e-12, abs=slack)
    assert other.chord_height == pytest.approx(factor * plain.chord_height, rel=1e-12, abs=slack)


@given(seeds)
def test_the_reversed_curve_has_the_same_barrier(seed):
    curve, phi = Bezier(Flat(SIZE), 3), draw(seed, 4, SIZE)
    there, back = barrier(curve, phi, waves, points=9), barrier(curve, curve.reverse(phi), waves, points=9)
    assert back.height == pytest.approx(there.height, abs=1e-13)
    assert torch.allclose(back.losses, there.losses.flip(0), atol=1e-14)


@given(seeds, st.integers(2, 6))
def test_no_barrier_is_negative_and_each_end_is_evaluated_once(seed, points):
    calls = []
    found = barrier(
        Bezier(Flat(SIZE)), draw(seed, 3, SIZE), lambda theta: calls.append(theta) or -hill(theta), points=points
    )
    assert len(calls) == 2 * points - 2
    # Along a straight line a convex function has none.
    assert found.height >= 0
    assert found.chord_height == 0
    assert found.chord_argmax in (0.0, 1.0)


@settings(max_examples=8)
@given(seeds)
def test_points_by_length_are_evenly_spaced_on_the_curve(seed):
    curve, phi = Bezier(Flat(SIZE), 3), draw(seed, 4, SIZE)
    found = barrier(curve, phi, hill, points=6, by="length")
    whole = curve.length(phi).item()
    parts = [curve.length(phi, 0.0, t).item() / whole for t in found.t.tolist()]
    assert parts == pytest.approx(found.fraction.tolist(), abs=1e-10)
    assert found.fraction.tolist() == torch.linspace(0, 1, 6, dtype=torch.float64).tolist()


@given(seeds)
def test_on_a_sphere_the_chord_is_the_geodesic(seed):
    space = Sphere(3)
    phi = space.project(torch.tensor([0.0, 0.0, 3.0], dtype=torch.float64) + draw(seed, 3, 3).clamp(-1, 1))
    seen = []
    barrier(Bezier(space), phi, lambda theta: seen.append(theta) or 0.0, points=5)
    chord = torch.stack([seen[0], *seen[5:], seen[1]])
    assert torch.allclose(chord.norm(dim=1), torch.ones(5, dtype=torch.float64), atol=1e-14)
    steps = (chord[1:] * chord[:-1]).sum(1)
    assert torch.allclose(steps, steps[:1].expand(4), atol=1e-14)
    # A great circle lies in a plane through the centre.
    assert abs(torch.linalg.svdvals(chord)[2]) <= 1e-14


@settings(max_examples=8)
@given(seeds, st.integers(3, 20))
def test_a_curve_with_half_the_loss_has_ratio_two(seed, points):
    """Inside 2, at the two ends 1: by the trapezoidal rule 2 - 1 / (points - 1)."""
    phi = draw(seed, 3, SIZE)
    chord = phi[2] - phi[0]

    def loss(theta):
        away = theta - phi[0]
        across = away - (away @ chord) / (chord @ chord) * chord
        return 1.0 if across.norm() > 1e-6 else 2.0

    found = barrier(Bezier(Flat(SIZE)), phi, loss, points=points, by="length")
    ends = torch.tensor([2.0, *[1.0] * (points - 2), 2.0], dtype=torch.float64)
    assert torch.equal(found.losses, ends)
    assert chord_ratio(found) == pytest.approx(2 - 1 / (points - 1), rel=1e-14)


@given(seeds, scales)
def test_the_ratio_does_not_depend_on_the_unit_of_the_loss(seed, unit):
    curve, phi = Bezier(Flat(SIZE)), draw(seed, 3, SIZE)
    ratios = [chord_ratio(barrier(curve, phi, lambda theta, c=c: c * waves(theta), points=9)) for c in (1, unit)]
    assert ratios[1] == pytest.approx(ratios[0], rel=1e-14)
    assert chord_ratio(barrier(curve, phi, lambda theta: unit, points=9)) == 1


@settings(max_examples=10)
@given(seeds, scales)
def test_the_curvature_of_a_parabola_agrees_with_its_formula(seed, scale):
    """With legs a and b, k = 4 |a ∧ b| / |v|³, and the whole turn is the angle between them."""
    phi = draw(seed, 3, SIZE, scale=scale)
    a, b = phi[1] - phi[0], phi[2] - phi[1]
    wedge = (a.square().sum() * b.square().sum() - (a @ b) ** 2).sqrt()
    found = curvature(Bezier(Flat(SIZE)), phi, points=9)
    speeds = Bezier(Flat(SIZE)).velocity(phi, found.t).norm(dim=1)
    # The difference of squares in the wedge loses some digits where the legs are nearly parallel.
    assert found.values.tolist() == pytest.approx((4 * wedge / speeds**3).tolist(), rel=1e-9)
    assert found.total == pytest.approx(math.atan2(wedge.item(), (a @ b).item()), rel=1e-9)
    # It is sharpest where it is slowest: at the foot of the origin on the segment from a to b.
    slowest = min(1.0, max(0.0, (a @ (a - b) / (a - b).square().sum()).item()))
    assert found.argmax == pytest.approx(slowest, abs=1e-9)
    assert found.maximum == pytest.approx((4 * wedge / (2 * torch.lerp(a, b, slowest).norm()) ** 3).item(), rel=1e-9)


@settings(max_examples=5)
@given(seeds, st.integers(2, 4), st.integers(1, 2))
def test_curvature_is_invariant_under_elevation_and_reversal(seed, degree, times):
    curve, phi = Bezier(Flat(SIZE), degree), draw(seed, degree + 1, SIZE)
    found = curvature(curve, phi)
    higher = curvature(Bezier(Flat(SIZE), degree + times), curve.elevate(phi, times))
    back = curvature(curve, curve.reverse(phi))
    for other in (higher, back):
        # Rounding, and its growth in the differences of six points.
        assert other.total == pytest.approx(found.total, rel=1e-10)
        assert other.maximum == pytest.approx(found.maximum, rel=1e-10)
    assert higher.argmax == pytest.approx(found.argmax, abs=1e-7)
    assert 1 - back.argmax == pytest.approx(found.argmax, abs=1e-7)


@settings(max_examples=10)
@given(seeds, st.integers(1, 4), scales)
def test_a_straight_line_has_curvature_zero(seed, degree, scale):
    line = draw(seed, 2, SIZE, scale=scale)
    phi = Bezier(Flat(SIZE), 1).elevate(line, degree - 1)
    found = curvature(Bezier(Flat(SIZE), degree), phi, points=5)
    # Rounding of the control points, 12 times in a second derivative.
    assert found.maximum * (line[1] - line[0]).norm() <= 1e-12
    assert found.total <= 1e-12


@settings(max_examples=10)
@given(st.integers(3, 8))
def test_a_regular_polygon_turns_only_at_its_corners(sides):
    """The way around all sides has all corners but the first: (n - 1) exterior angles of 2π/n."""
    angles = 2 * math.pi * torch.arange(sides + 1, dtype=torch.float64) / sides
    phi = torch.stack([angles.cos(), angles.sin(), torch.zeros_like(angles)], -1)
    found = curvature(Piecewise(Flat(3), 1, sides), phi, points=9)
    assert found.maximum <= 1e-12
    assert found.total == pytest.approx((sides - 1) * 2 * math.pi / sides, abs=1e-12)


def test_curvature_is_zero_at_zero_velocity():
    found = curvature(Bezier(Flat(2)), torch.ones(3, 2))
    assert found.maximum == 0
    assert found.total == pytest.approx(0, abs=1e-15)
    # It stops at the cusp t = 1/2 and goes back.
    found = curvature(Bezier(Flat(1)), torch.tensor([[0.0], [1.0], [0.0]]), points=3)
    assert found.maximum <= 1e-12
    # The same with a corner: a piece of no length between two legs.
    phi = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 0.0], [1.0, 1.0]])
    assert curvature(Piecewise(Flat(2), 1, 3), phi).total == pytest.approx(0, abs=1e-15)


@dataclass(frozen=True)
class Latitude(CurveEmbedding):
    """Once around the pole of a sphere, at the latitude of its only point."""

    space: Manifold

    @property
    def size(self):
        return 1

    def __call__(self, phi, t):
        turn = 2 * math.pi * torch.as_tensor(t, dtype=torch.float64)
        radius, height = (1 - phi[0, 2] ** 2).sqrt(), phi[0, 2].expand(turn.shape)
        return torch.stack([radius * turn.cos(), radius * turn.sin(), height], -1)


@settings(max_examples=3)
@given(st.floats(0.2, 2.9))
def test_a_circle_of_latitude_has_its_geodesic_curvature(angle):
    """At polar angle θ the geodesic curvature is |cot θ|, its integral 2π |cos θ|: by Gauss-Bonnet, 2π less the cap."""
    phi = torch.tensor([[math.sin(angle), 0.0, math.cos(angle)]], dtype=torch.float64)
    found = curvature(Latitude(Sphere(3)), phi, points=5)
    # Speeds of 2π sin θ and two derivatives of the log: some hundred roundings over sin²θ >= 0.04.
    assert found.values.tolist() == pytest.approx([abs(1 / math.tan(angle))] * 5, abs=1e-11)
    assert found.total == pytest.approx(2 * math.pi * abs(math.cos(angle)), abs=1e-11)


@settings(max_examples=2)
@given(seeds, st.integers(1, 2))
def test_a_geodesic_has_curvature_zero(seed, degree):
    space = Sphere(3)
    ends = space.project(torch.tensor([0.0, 0.0, 2.0], dtype=torch.float64) + draw(seed, 2, 3).clamp(-1, 1))
    assume((ends[0] - ends[1]).norm() > 0.1)
    phi = Bezier(space, 1).elevate(ends, degree - 1)
    found = curvature(Bezier(space, degree), phi, points=5)
    assert found.total <= 1e-9


def test_phi_may_require_grad_and_is_not_modified():
    phi = draw(0, 3, SIZE).requires_grad_()
    kept = phi.detach().clone()
    barrier(Bezier(Flat(SIZE)), phi, lambda theta: 0.0 if theta.requires_grad else 1.0, points=3)
    curvature(Bezier(Flat(SIZE)), phi, points=3)
    assert torch.equal(phi, kept)


def test_plot_draws_the_losses():
    found = barrier(Bezier(Flat(4)), draw(0, 3, 4), waves, points=5)
    axes = Figure().subplots()
    found.plot(axes, label="cross-entropy", name="quadratic")
    assert [line.get_label() for line in axes.lines] == ["chord", "quadratic", "between the losses at the ends"]
    assert axes.lines[1].get_ydata().tolist() == found.losses.tolist()
    assert axes.get_ylabel() == "cross-entropy"


PHI = draw(0, 3, 2)
CURVE = Bezier(Flat(2))


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: barrier(Flat(2), PHI, hill), "curve: expected an embedding of .0, 1. such as Bezier, got Flat"),
        (lambda: curvature(Flat(2), PHI), "curve: expected an embedding"),
        (lambda: barrier(CURVE, PHI[:2], hill), r"phi: expected shape \(3, 2\)"),
        (lambda: curvature(CURVE, PHI[:2]), r"phi: expected shape \(3, 2\)"),
        (lambda: barrier(CURVE, PHI, hill, points=1), "points: expected an integer >= 2, got 1"),
        (lambda: curvature(CURVE, PHI, points=1), "points: expected an integer >= 2, got 1"),
        (lambda: barrier(CURVE, PHI, hill, by="time"), "by: expected one of parameter, length; got 'time'"),
        (lambda: barrier(CURVE, PHI, lambda theta: math.nan), "function at t = 0: expected a finite number, got nan"),
        (lambda: barrier(CURVE, PHI, lambda theta: "low"), "function at t = 0: expected a finite number, got 'low'"),
        (
            lambda: barrier(CURVE, PHI, lambda theta: 0.0 if any(torch.equal(theta, p) for p in PHI) else math.inf),
            "function at t = 0.01: expected a finite number, got inf",
        ),
        (lambda: chord_ratio(barrier(CURVE, PHI, hill)), "profile: expected positive losses, got -"),
        (lambda: curvature(CURVE, PHI * math.nan), "phi: expected values with finite squares"),
    ],
)
def test_invalid_arguments_are_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


def test_a_constant_loss_has_its_barrier_at_an_end():
    ones = torch.ones(2, dtype=torch.float64)
    found = Barrier(torch.tensor([0.0, 1.0], dtype=torch.float64), ones - ones, ones, ones)
    assert (found.height, found.argmax) == (0.0, 0.0)
