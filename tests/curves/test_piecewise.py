"""Piecewise curves: each piece is a Bézier curve, joints are shared, smooth ones have one velocity."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldagg.curves import Bezier
from manifoldagg.curves.piecewise import Piecewise
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import Flat, Manifold, Sphere, SymmetricPositiveDefinite, distance, norm
from tests.support import draw, dtypes, relative, seeds

degrees, counts = st.integers(1, 4), st.integers(1, 4)
CURVED = pytest.mark.parametrize("space", [Sphere(3), SymmetricPositiveDefinite(2)], ids=str)
S = torch.tensor([0.0, 0.3, 0.9], dtype=torch.float64)


def around(space, seed, count, size=0.3):
    generator = torch.Generator().manual_seed(seed)
    x = space.random_point(generator=generator, dtype=torch.float64).expand(count, *space.shape).contiguous()
    u = space.random_tangent(x, generator)
    return space.exp(x, size * u / norm(space, x, u).reshape(-1, *(1 for _ in space.shape)))


@given(seeds, degrees, counts, dtypes)
def test_each_piece_is_a_bezier_curve(seed, degree, pieces, dtype):
    curve, phi = Piecewise(Flat(3), degree, pieces), draw(seed, degree * pieces + 1, 3, dtype=dtype)
    for k in range(pieces):
        piece = curve.piece(phi, k)
        t = (k + S) / pieces
        # s = t·m - k has lost what k has digits; derivatives enlarge it by the degree.
        allowed = 1e2 * degree**3 * pieces**2 * torch.finfo(dtype).eps * phi.abs().max().item()
        assert (curve(phi, t) - piece(S)).abs().max() <= allowed
        assert (curve.velocity(phi, t[1:]) - pieces * piece.velocity(S[1:])).abs().max() <= pieces * allowed
        bend = pieces**2 * piece.acceleration(S[1:])
        assert (curve.acceleration(phi, t[1:]) - bend).abs().max() <= pieces**2 * allowed


@CURVED
def test_each_piece_is_a_bezier_curve_on_a_curved_space(space):
    curve = Piecewise(space, 2, 3)
    phi, t = around(space, 0, 7), (S[1:, None] + torch.arange(3)) / 3
    points, slopes, bends = curve(phi, t), curve.velocity(phi, t), curve.acceleration(phi, t)
    for k in range(3):
        piece = curve.piece(phi, k)
        assert distance(space, points[:, k], piece(S[1:])).max() <= 1e-13
        assert relative(slopes[:, k], 3 * piece.velocity(S[1:])) <= 1e-12
        assert relative(bends[:, k], 9 * piece.acceleration(S[1:])) <= 1e-10


@given(seeds, degrees, counts, dtypes)
def test_ends_and_joints_are_exact(seed, degree, pieces, dtype):
    curve, phi = Piecewise(Flat(3), degree, pieces), draw(seed, degree * pieces + 1, 3, dtype=dtype)
    assert torch.equal(curve(phi, 0.0), phi[0])
    assert torch.equal(curve(phi, 1.0), phi[-1])
    joints = curve(phi, torch.arange(pieces + 1) / pieces)
    # k/m in float32 is off by ε, which the speed enlarges.
    speed = 2 * pieces * degree * phi.abs().max()
    assert (joints - phi[::degree]).abs().max() <= 4 * torch.finfo(torch.float32).eps * speed


@given(seeds, st.integers(2, 4), counts)
def test_the_velocity_at_smooth_joints_is_continuous(seed, degree, pieces):
    curve, phi = Piecewise(Flat(3), degree, pieces), draw(seed, degree * pieces + 1, 3)
    before = phi.clone()
    smooth = curve.smooth(phi)
    assert torch.equal(phi, before)
    for k in range(pieces - 1):
        left, right = curve.piece(smooth, k), curve.piece(smooth, k + 1)
        assert torch.allclose(left.velocity(1.0), right.velocity(0.0), atol=1e-12)
    assert torch.allclose(curve.smooth(smooth), smooth, atol=1e-13)
    assert torch.equal(smooth[: degree + 1], phi[: degree + 1])
    assert torch.equal(smooth[::degree], phi[::degree])


@CURVED
@pytest.mark.parametrize("degree", [2, 3])
def test_the_velocity_at_smooth_joints_is_continuous_on_a_curved_space(space, degree):
    curve = Piecewise(space, degree, 3)
    smooth = curve.smooth(around(space, 1, 3 * degree + 1, 0.1))
    for k in range(2):
        left, right = curve.piece(smooth, k), curve.piece(smooth, k + 1)
        assert relative(left.velocity(1.0), right.velocity(0.0)) <= 1e-10


@settings(max_examples=10)
@given(seeds, degrees, counts)
def test_lengths_are_additive_and_can_be_inverted(seed, degree, pieces):
    curve, phi = Piecewise(Flat(3), degree, pieces), draw(seed, degree * pieces + 1, 3)
    whole = curve.length(phi).item()
    assert sum(curve.piece(phi, k).length().item() for k in range(pieces)) == pytest.approx(whole, rel=1e-12)
    assert (curve.length(phi, 0.1, 0.45) + curve.length(phi, 0.45, 0.8)).item() == pytest.approx(
        curve.length(phi, 0.1, 0.8).item(), rel=1e-12
    )
    part = torch.tensor([0.0, 0.2, 0.7, 1.0], dtype=torch.float64)
    t = curve.parameter_at_length(phi, part)
    reached = [curve.length(phi, 0, s).item() / whole for s in t.tolist()]
    assert reached == pytest.approx(part.tolist(), abs=1e-12)
    assert curve.length(curve.reverse(phi)).item() == pytest.approx(whole, rel=1e-12)


@CURVED
def test_lengths_are_additive_on_a_curved_space(space):
    curve = Piecewise(space, 2, 2)
    phi = around(space, 2, 5)
    assert sum(curve.piece(phi, k).length().item() for k in range(2)) == pytest.approx(
        curve.length(phi).item(), rel=1e-11
    )


@settings(max_examples=10)
@given(seeds, degrees, counts)
def test_nearest_returns_the_best_of_all_pieces(seed, degree, pieces):
    curve, phi, points = Piecewise(Flat(3), degree, pieces), draw(seed, degree * pieces + 1, 3), draw(seed + 1, 2, 2, 3)
    t, away = curve.nearest(phi, points)
    assert t.shape == away.shape == (2, 2)
    assert torch.allclose((curve(phi, t) - points).norm(dim=-1), away, atol=1e-11)
    trace = curve(phi, torch.linspace(0, 1, 1001, dtype=torch.float64))
    assert (away <= (points[..., None, :] - trace).norm(dim=-1).amin(-1) + 1e-9).all()
    assert curve.contains(phi, phi[::degree], tolerance=1e-12).all()


def test_it_is_differentiable_and_an_embedding():
    curve, phi, t = Piecewise(Flat(2), 2, 3), draw(0, 7, 2), torch.tensor([0.1, 0.5, 0.8], dtype=torch.float64)
    assert torch.autograd.gradcheck(curve, (phi.clone().requires_grad_(), t.clone().requires_grad_()))
    assert torch.autograd.gradcheck(lambda p: curve.length(p), (phi.clone().requires_grad_(),), atol=1e-5)
    assert torch.allclose(curve.metric(phi, t).flatten(), curve.velocity(phi, t).square().sum(-1))
    assert torch.allclose(curve.push(phi, t, torch.ones_like(t)), curve.velocity(phi, t))
    assert torch.equal(curve.collapse(phi[0]), phi[0].expand(7, 2))
    assert (curve.size, curve.domain, curve.sample(3).shape) == (7, (), (3,))
    assert curve == Piecewise(Flat(2), 2, 3) != Piecewise(Flat(2), 3, 2)


def test_one_piece_equals_the_bezier_curve():
    phi, t = draw(0, 4, 3), torch.linspace(-0.3, 1.3, 9)
    assert torch.allclose(Piecewise(Flat(3), 3, 1)(phi, t), Bezier(Flat(3), 3)(phi, t), atol=1e-14)


def test_parameters_outside_the_interval_extrapolate_the_outer_pieces():
    curve, phi = Piecewise(Flat(3), 2, 2), draw(0, 5, 3)
    assert torch.allclose(curve(phi, -0.1), curve.piece(phi, 0)(-0.2))
    assert torch.allclose(curve(phi, 1.1), curve.piece(phi, 1)(1.2))


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Piecewise(Flat(2), 0), "degree: expected an integer >= 1, got 0"),
        (lambda: Piecewise(Flat(2), 2, 0), "pieces: expected an integer >= 1, got 0"),
        (lambda: Piecewise("R2"), "space: expected a Manifold, got 'R2'"),
        (lambda: Piecewise(type("Curved", (Manifold,), {"shape": (2,)})()), "space: expected a flat manifold or"),
        (lambda: Piecewise(Flat(2))(torch.zeros(4, 2), 0.5), r"phi: expected shape \(5, 2\), got \(4, 2\)"),
        (lambda: Piecewise(Flat(2), 1).smooth(torch.zeros(3, 2)), "degree: expected 2 or more for smooth joints"),
        (lambda: Piecewise(Flat(2)).piece(torch.zeros(5, 2), 2), "k: expected an index from 0 to 1, got 2"),
    ],
)
def test_invalid_arguments_are_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


def test_a_joint_belongs_to_the_piece_that_begins_there():
    """Whatever k/m times m rounds to: 1/49 · 49 < 1."""
    phi = torch.arange(50.0, dtype=torch.float64)[:, None].clone()
    phi[2:] += 10
    curve = Piecewise(Flat(1), 1, 49)
    for k in range(49):
        assert curve.velocity(phi, k / 49).item() == pytest.approx(49 * (phi[k + 1] - phi[k]).item())
