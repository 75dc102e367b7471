"""Laws of tunnels: their frames, their volumes, what they contain and how they are drawn from."""

import math
import resource
from itertools import pairwise

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.integrate import solve_ivp

from manifoldagg.curves import Bezier
from manifoldagg.curves.frames import rotation_minimising
from manifoldagg.curves.shape import coordinates, curvature_vector, derivative, max_curvature, min_speed, span
from manifoldagg.curves.tunnel import Tunnel, log_ball
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import Flat, Power, Sphere, SymmetricPositiveDefinite, distance
from tests.support import draw, relative, rotation, seeds

EPS = 2.0**-52
KAPPA = 0.5522847498307936
few = settings(max_examples=10)
forms = st.sampled_from(["ambient", "subspace"])
CUBICS = {
    "arc": ([[1, 0, 0], [1, KAPPA, 0], [KAPPA, 1, 0], [0, 1, 0]], 0.3),
    "helix": ([[1, 0, 0], [1, KAPPA, 0.3], [KAPPA, 1, 0.7], [0, 1, 1]], 0.25),
    "random": (draw(0, 4, 3).tolist(), 0.1),
    "straight": ([[0, 0, 0], [1, 2, 2]], 0.2),
}
SPATIAL = [name for name in CUBICS if name in ("helix", "random")]


def case(name, form="ambient"):
    points, radius = CUBICS[name]
    phi = torch.tensor(points, dtype=torch.float64)
    return Tunnel(Bezier(Flat(3), len(phi) - 1), radius, form), phi


def random_case(seed, form, size=5, degree=3):
    """A tunnel of half the radius at which it folds."""
    phi = draw(seed, degree + 1, size)
    control = coordinates(phi)
    radius = 0.5 / max(1.0, max_curvature(control)[1] * control[-1].norm().item())
    return Tunnel(Bezier(Flat(size), degree), radius, form), phi


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def disks(tunnel, phi, points, t):
    """How far points (N, P) are ahead of the disk at each t, and from its centre: (N, T) each, from the definition."""
    center, velocity = tunnel.curve(phi, t), tunnel.curve.velocity(phi, t)
    apart = points[:, None] - center
    ahead = (apart * velocity / velocity.norm(dim=-1, keepdim=True)).sum(-1)
    return ahead, apart.norm(dim=-1)


# Frames


def transported(control, t):
    """The frame by its differential equation r' = -<r, T'> T."""
    k = control.shape[1]

    def slope(s, r):
        at = torch.tensor(s, dtype=torch.float64)
        velocity = derivative(control, at)
        tangent = velocity / velocity.norm()
        change = velocity.norm() * curvature_vector(control, at)
        return -torch.outer(tangent, change @ torch.from_numpy(r).reshape(k, k - 1)).flatten().numpy()

    start = np.eye(k)[:, 1:].ravel()
    solution = solve_ivp(slope, (0, t), start, method="DOP853", rtol=1e-13, atol=1e-14)
    return torch.from_numpy(solution.y[:, -1]).reshape(k, k - 1)


@given(seeds, st.integers(1, 5))
def test_the_frame_is_orthonormal_and_normal(seed, degree):
    control, t, steps = span(draw(seed, degree + 1, 7))[1], draw(seed, 9).sigmoid(), 32
    frame = rotation_minimising(control, t, start=torch.eye(degree).double()[:, 1:], steps=steps)
    tangent = derivative(control, t)
    tangent = tangent / tangent.norm(dim=-1, keepdim=True)
    # Each of steps + 1 double reflections adds a few roundings in each of the columns.
    tolerance = 16 * degree * (steps + 1) * EPS
    assert (frame.mT @ frame - torch.eye(degree - 1)).flatten(1).norm(dim=-1).max() <= tolerance
    assert (tangent[:, None] @ frame).flatten(1).norm(dim=-1).max() <= tolerance


@pytest.mark.parametrize("t", [1 / 3, 1.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_frame_converges_with_fourth_order(seed, t):
    control = span(draw(seed, 4, 6))[1]
    exact, start, at = transported(control, t), torch.eye(3).double()[:, 1:], torch.tensor(t, dtype=torch.float64)
    errors = [
        (rotation_minimising(control, at, start=start, steps=steps) - exact).norm().item() for steps in (16, 64, 256)
    ]
    # Steps in powers of 4 keep t at a third of a step.
    assert abs(math.log(errors[0] / errors[2], 16) - 4) <= 0.1, errors


def test_the_frame_is_rotation_minimising():
    control, start, t = span(draw(0, 4, 3))[1], torch.eye(3).double()[:, 1:], torch.linspace(0.01, 0.99, 40).double()
    twists = []
    for steps in (16, 64):
        call = lambda s, steps=steps: rotation_minimising(control, s, start=start, steps=steps)  # noqa: E731
        frame, change = torch.func.jvp(call, (t,), (torch.ones_like(t),))
        twists.append((frame.mT @ change).abs().max().item())
    # R' has no normal part but for an error of fourth order; by how much depends on where t falls in a step.
    assert math.log(twists[0] / twists[1], 4) >= 3.5
    assert twists[1] <= 1e-6


@given(seeds)
def test_the_frame_is_continuous_at_grid_points(seed):
    control, start = span(draw(seed, 4, 3))[1], torch.eye(3).double()[:, 1:]
    t = torch.tensor([0.25 - 1e-12, 0.25, 1.0 - 1e-12, 1.0]).double()
    frame = rotation_minimising(control, t, start=start, steps=8)
    # |R'| = |b'| |k| <= |b''| / |b'|.
    speed, bend = min_speed(control)[1], 6 * control.diff(n=2, dim=0).norm(dim=-1).max().item()
    assert (frame[0] - frame[1]).norm() + (frame[2] - frame[3]).norm() <= 8e-12 * (1 + bend / speed)


# Numbers of a curve


@few
@given(seeds, st.integers(1, 5))
def test_speed_curvature_and_length_agree_with_a_fine_grid(seed, degree):
    control, t = coordinates(draw(seed, degree + 1, 8)), torch.linspace(0, 1, 4001).double()
    speed, bend = derivative(control, t).norm(dim=-1), curvature_vector(control, t).norm(dim=-1)
    # The true extremum is beyond the grid's, by at most half the grid's largest step.
    step = speed.diff().abs().max().item()
    assert min_speed(control)[1] <= speed.min().item() * (1 + EPS)
    assert speed.min().item() - min_speed(control)[1] <= step
    assert bend.max().item() <= max_curvature(control)[1] * (1 + 1e-12) + 1e-300
    assert max_curvature(control)[1] - bend.max().item() <= bend.diff().abs().max().item() + 1e-300
    nodes, weights = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(300))
    exact = derivative(control, (nodes + 1) / 2).norm(dim=-1) @ weights / 2
    # 300 nodes converge at the rate that complex zeros of |b'|² leave; these draws keep away from them.
    assert Bezier(Flat(control.shape[1]), degree).length(control).item() == pytest.approx(exact.item(), rel=1e-10)


@given(seeds, st.integers(1, 4))
def test_coordinates_preserve_distances(seed, degree):
    phi = draw(seed, degree + 1, 12) + 10
    apart = torch.cdist(coordinates(phi), coordinates(phi), compute_mode="donot_use_mm_for_euclid_dist")
    assert relative(apart, torch.cdist(phi, phi, compute_mode="donot_use_mm_for_euclid_dist")) <= 1e-13


# Volumes


@pytest.mark.parametrize("name", CUBICS)
def test_the_volume_agrees_with_quasi_monte_carlo(name):
    tunnel, phi = case(name)
    radius = tunnel.radius * (phi[-1] - phi[0]).norm()
    low, high = phi.amin(0) - radius, phi.amax(0) + radius
    sobol = torch.from_numpy(stats.qmc.Sobol(3, seed=1).random_base2(13))
    points, box = low + sobol * (high - low), (high - low).prod().item()
    inside = tunnel.contains(phi, points)
    part = inside.double().mean().item()
    # A scrambled net has at most e times the variance of independent draws (Owen 1997).
    assert abs(part - tunnel.volume(phi).item() / box) <= 5 * math.sqrt(math.e * part * (1 - part) / len(points))

    t = torch.linspace(0, 1, 501).double()
    ahead, size = disks(tunnel, phi, points[:2000], t)
    crossing = (ahead[:, :-1] > 0) != (ahead[:, 1:] > 0)
    # Where the foot is in a cell, the distance from its ends is the tube's to second order in the cell.
    cell = (tunnel.curve(phi, t).diff(dim=0).norm(dim=-1).max().item()) ** 2 / radius.item()
    near = torch.minimum(size[:, :-1], size[:, 1:])
    near = torch.where(crossing, near, torch.inf).amin(-1)
    # A foot in the cell before the first or after the last is no crossing: leave the points at the ends out.
    clear = ((near - radius).abs() > 4 * cell) & (ahead[:, [0, -1]].abs().amin(-1) > 1e-9)
    assert clear.sum() > 1800
    assert torch.equal(inside[:2000][clear], (near <= radius)[clear])


@pytest.mark.parametrize("name", SPATIAL)
def test_in_three_dimensions_both_forms_are_the_same_set(name):
    (ambient, phi), (subspace, _) = case(name), case(name, "subspace")
    assert ambient.volume(phi).item() == pytest.approx(subspace.volume(phi).item(), rel=1e-13)
    points = draw(3, 500, 3)
    a, b = ambient.nearest(phi, points)[1], subspace.nearest(phi, points)[1]
    assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)
    x = subspace.sample(200, generator=generator())
    assert ambient.contains(phi, subspace(phi, x)).all()
    place = ambient.nearest(phi, subspace(phi, x))[0]
    scale = (phi[-1] - phi[0]).norm() ** 2
    element = subspace.volume_element(phi, x)
    assert torch.allclose(scale * ambient.volume_element(phi, place), element, rtol=1e-9)


@few
@given(seeds)
def test_the_volume_element_is_the_determinant_of_the_metric(seed):
    tunnel, phi = random_case(seed, "subspace", degree=3)
    tunnel = Tunnel(tunnel.curve, tunnel.radius, "subspace", steps=4)
    x = tunnel.sample(5, generator=generator(seed))
    # Exactly, whatever the frame's own error: that only turns R about the curve.
    root = torch.linalg.det(tunnel.metric(phi, x)).sqrt()
    assert torch.allclose(tunnel.volume_element(phi, x), root, rtol=1e-9)


@pytest.mark.parametrize("form", ["ambient", "subspace"])
def test_the_mean_volume_element_is_the_volume(form):
    tunnel, phi = case("helix", form)
    elements = tunnel.volume_element(phi, tunnel.sample_in(phi, 20000, generator=generator()))
    radius = tunnel.radius * ((phi[-1] - phi[0]).norm().item() if form == "ambient" else 1)
    mean, error = elements.mean().item(), elements.std().item() / math.sqrt(20000)
    assert abs(mean - tunnel.volume(phi).item() / (math.pi * radius**2)) <= 5 * error


def test_logarithms_of_volumes_reach_large_dimensions():
    phi = torch.zeros(2, 10**6).double()
    phi[1, 0] = 3.0
    for value, size, radius, long in [
        (Tunnel(Bezier(Flat(10**6), 1), 0.1).log_volume(phi), 10**6 - 1, 0.3, 3),
        (log_ball(10**9, torch.tensor(7.0).double()), 10**9, 7, 1),
    ]:
        with mpmath.workdps(40):
            half = mpmath.mpf(size) / 2
            parts = [half * mpmath.log(mpmath.pi), -mpmath.loggamma(half + 1), size * mpmath.log(radius)]
            exact = mpmath.log(long) + sum(parts)
            # Three terms are rounded, the radius moves the last by its own rounding.
            assert abs(value.item() - exact) <= 4 * EPS * (sum(map(abs, parts)) + size)


def test_a_straight_tunnel_is_a_cylinder():
    tunnel, phi = case("straight")
    assert tunnel.volume(phi).item() == pytest.approx(3 * math.pi * 0.6**2, rel=1e-14)
    assert tunnel.check(phi) == 0
    along, across = torch.tensor([1.0, 2.0, 2.0]).double() / 3, torch.tensor([0.0, 1.0, -1.0]).double() / math.sqrt(2)
    for s, r, inside in [(1.5, 0.59, True), (1.5, 0.61, False), (0, 0.59, True), (-0.01, 0, False), (3.01, 0.1, False)]:
        point = s * along + r * across
        assert tunnel.contains(phi, point).item() is inside
        gap = math.hypot(max(0, -s, s - 3), max(0, r - 0.6))
        assert tunnel.nearest(phi, point)[1].item() == pytest.approx(gap, abs=1e-15)
    line = Tunnel(Bezier(Flat(3), 1), 0.2, "subspace")
    assert line.domain == (1,)
    assert line.volume(phi).item() == pytest.approx(3, rel=1e-15)
    assert torch.equal(line(phi, torch.tensor([0.5]).double()), phi.mean(0))


# Draws


def quantiles(tunnel, phi, count):
    """Parameters at equal arc lengths."""
    t = torch.linspace(0, 1, 20001).double()
    arc = tunnel.curve(phi, t).diff(dim=0).norm(dim=-1).cumsum(0)
    return t[1:][torch.searchsorted(arc, arc[-1] * torch.arange(1, count).double() / count)]


@pytest.mark.parametrize("form", ["ambient", "subspace"])
def test_samples_by_volume_have_the_density_of_the_volume_element(form):
    tunnel, phi = case("helix", form)
    count, cells = 20000, 20
    x = tunnel.sample_in(phi, count, generator=generator(), uniform="volume")
    # Over a whole disk 1 - <xi, k> is 1 in the mean, so that t is uniform in arc length.
    held = torch.bincount(torch.bucketize(x[:, 0].contiguous(), quantiles(tunnel, phi, cells)), minlength=cells)
    assert ((held - count / cells) ** 2).sum() / (count / cells) <= stats.chi2.isf(1e-6, cells - 1)
    if form == "ambient":
        k = curvature_vector(phi, x[:, 0])
        radius = tunnel.radius * (phi[-1] - phi[0]).norm()
        # <xi, k> has mean -|k|² r² / (m + 2) by this density, m = 2, and 0 in the product.
        bend = (x[:, 1:] * k).sum(-1)
        excess = bend + k.square().sum(-1) * radius**2 / 4
        assert excess.mean().abs() <= 5 * excess.std() / math.sqrt(count)
        assert bend.mean() <= -5 * bend.std() / math.sqrt(count)


@pytest.mark.parametrize("form", ["ambient", "subspace"])
def test_samples_by_volume_are_uniform_on_the_image(form):
    tunnel, phi = case("arc") if form == "ambient" else case("helix", form)
    radius = tunnel.radius * (phi[-1] - phi[0]).norm()
    low, high = phi.amin(0) - radius, phi.amax(0) + radius
    points = low + torch.from_numpy(stats.qmc.Sobol(3, seed=2).random_base2(13)) * (high - low)
    points = points[tunnel.contains(phi, points)]
    drawn = tunnel(phi, tunnel.sample_in(phi, 8000, generator=generator(1), uniform="volume"))
    for seed in range(5):
        direction = draw(seed, 3)
        cut = (points @ direction).median()
        part = ((drawn @ direction) <= cut).double().mean().item()
        assert abs(part - 0.5) <= 5 * 0.5 * math.sqrt(1 / 8000 + 1 / len(points))


@few
@given(seeds, forms, st.sampled_from(["product", "volume"]), st.integers(1, 4))
def test_samples_are_contained_in_the_tunnel(seed, form, uniform, degree):
    tunnel, phi = random_case(seed, form, degree=degree)
    x = tunnel.sample_in(phi, 3, 4, generator=generator(seed), uniform=uniform)
    assert x.shape == (3, 4, *tunnel.domain)
    assert tunnel.contains(phi, tunnel(phi, x)).all()
    limit = tunnel.radius * ((phi[-1] - phi[0]).norm() if form == "ambient" else 1)
    assert (x[..., 1:].norm(dim=-1) <= limit * (1 + 8 * EPS)).all()


def test_samples_are_uniform_in_the_ball():
    tunnel = Tunnel(Bezier(Flat(4), 4), 0.5, "subspace")
    x = tunnel.sample(20000, generator=generator())
    assert stats.kstest(x[:, 0].numpy(), "uniform").pvalue > 1e-6
    assert stats.kstest(((x[:, 1:].norm(dim=-1) / 0.5) ** 3).numpy(), "uniform").pvalue > 1e-6
    # By Archimedes, a coordinate of a uniform direction in three dimensions is uniform.
    direction = x[:, 1:] / x[:, 1:].norm(dim=-1, keepdim=True)
    for axis in direction.T:
        assert stats.kstest((axis / 2 + 0.5).numpy(), "uniform").pvalue > 1e-6


@few
@given(seeds)
def test_ambient_samples_are_normal_to_the_curve(seed):
    tunnel, phi = random_case(seed, "ambient", size=50)
    x = tunnel.sample_in(phi, 10, generator=generator(seed))
    velocity, xi = tunnel.curve.velocity(phi, x[:, 0]), x[:, 1:]
    assert ((velocity * xi).sum(-1).abs() <= 50 * EPS * velocity.norm(dim=-1) * xi.norm(dim=-1)).all()


def test_samples_follow_the_generator_which_is_optional():
    tunnel, phi = case("helix")
    draws = [tunnel.sample_in(phi, 3, generator=generator(5)) for _ in range(2)]
    assert torch.equal(*draws)
    assert tunnel.sample_in(phi).shape == (4,)
    assert case("helix", "subspace")[0].sample(2).shape == (2, 3)


def test_a_million_parameters_need_the_memory_of_a_few_vectors():
    size, batch = 10**6, 2
    tunnel, phi = Tunnel(Bezier(Flat(size), 3), 0.05), draw(0, 4, size, dtype=torch.float32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    x = tunnel.sample_in(phi, batch, generator=generator(), uniform="volume")
    assert x.dtype == torch.float32
    point = tunnel(phi, x)
    assert tunnel.contains(phi, point).all()
    # In KiB: at most 60 vectors of float64 at a time, where a square matrix would be a million of them.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before <= 60 * size * 8 / 1024


# Membership


@few
@given(seeds, forms)
def test_nearest_inverts_the_embedding_for_points_inside(seed, form):
    tunnel, phi = random_case(seed, form, size=4)
    x = tunnel.sample_in(phi, 10, generator=generator(seed))
    place, gap = tunnel.nearest(phi, tunnel(phi, x))
    # Another part of the tunnel may meet the point as well: then the place differs, not what it draws.
    assert relative(tunnel(phi, place), tunnel(phi, x)) <= 1e-13
    assert gap.max() <= 1e-13 * phi.norm()


@few
@given(seeds, forms)
def test_nearest_is_the_nearest_of_all_disks(seed, form):
    tunnel, phi = random_case(seed, form, size=4)
    points = 2 * draw(seed + 1, 20, 4)
    if form == "subspace":
        basis = span(phi)[0]
        points = phi[0] + (points - phi[0]) @ basis.mT @ basis
    place, gap = tunnel.nearest(phi, points)
    assert torch.allclose((tunnel(phi, place) - points).norm(dim=-1), gap, rtol=1e-12, atol=1e-13)
    t = torch.linspace(0, 1, 2001).double()
    ahead, size = disks(tunnel, phi, points, t)
    radius = tunnel.radius * (phi[-1] - phi[0]).norm()
    beyond = ((size.square() - ahead.square()).clamp(min=0).sqrt() - radius).clamp(min=0)
    grid = torch.hypot(ahead, beyond).amin(-1)
    # A disk's points move no faster than |b'| (1 + r max|k|) < 2 |b'| with t.
    step = 2 * tunnel.curve(phi, t).diff(dim=0).norm(dim=-1).max()
    assert (gap <= grid + 1e-12).all()
    assert (grid <= gap + step).all()


def test_points_off_the_subspace_are_not_contained():
    tunnel, phi = Tunnel(Bezier(Flat(4), 3), 0.05, "subspace"), draw(0, 4, 4)
    point = tunnel(phi, torch.tensor([0.3, 0.01, 0.02]).double())
    off = torch.linalg.svd(phi[1:] - phi[0]).Vh[-1]
    assert tunnel.contains(phi, point)
    assert not tunnel.contains(phi, point + 1e-6 * off)
    assert tunnel.nearest(phi, point + 1e-6 * off)[1].item() == pytest.approx(1e-6, rel=1e-6)


@few
@given(seeds, forms)
def test_larger_tunnels_contain_smaller_ones(seed, form):
    tunnel, phi = random_case(seed, form, size=3)
    points = tunnel(phi, tunnel.sample_in(phi, 100, generator=generator(seed)))
    contained = [Tunnel(tunnel.curve, part * tunnel.radius, form).contains(phi, points) for part in (0.3, 0.7, 1)]
    for inner, outer in pairwise(contained):
        assert (inner <= outer).all()
    assert 0 < contained[0].sum() < contained[1].sum() < contained[2].sum()


@few
@given(seeds, forms)
def test_a_tunnel_without_a_radius_is_the_curve(seed, form):
    curve, phi, t = Bezier(Flat(4), 3), draw(seed, 4, 4), draw(seed, 8).sigmoid()
    tunnel = Tunnel(curve, 0, form)
    points = curve(phi, t)
    assert tunnel.contains(phi, points).all()
    # One part in 10⁹ off is thousands of times the allowance of 16 roundings.
    assert not tunnel.contains(phi, points + 1e-9 * draw(seed, 8, 4)).any()
    assert tunnel.volume(phi) == 0
    assert not tunnel.sample_in(phi, 3)[..., 1:].any()
    assert torch.allclose(tunnel.nearest(phi, points)[1], torch.zeros(8).double(), atol=1e-13)


@few
@given(seeds, forms)
def test_tunnels_are_equivariant(seed, form):
    tunnel, phi = random_case(seed, form, size=4)
    q, shift, scale = rotation(seed, 4), draw(seed, 4), 3.0
    moved, points = scale * phi @ q + shift, draw(seed + 1, 20, 4)
    dimension = 4 if form == "ambient" else 3
    grown = tunnel.log_volume(phi) + dimension * math.log(scale)
    assert tunnel.log_volume(moved).item() == pytest.approx(grown.item(), abs=1e-12)
    assert tunnel.check(moved) == pytest.approx(tunnel.check(phi), rel=1e-9)
    a, b = tunnel.nearest(phi, points)[1], tunnel.nearest(moved, scale * points @ q + shift)[1]
    assert torch.allclose(b, scale * a, rtol=1e-11, atol=1e-12)
    if form == "subspace":
        x = tunnel.sample(5, generator=generator(seed))
        assert relative(tunnel(moved, x), scale * tunnel(phi, x) @ q + shift) <= 1e-11


@few
@given(seeds, forms)
def test_a_collapsed_tunnel_is_one_point(seed, form):
    tunnel, point = Tunnel(Bezier(Flat(4), 3), 0.3, form), draw(seed, 4)
    phi = tunnel.collapse(point)
    x = tunnel.sample_in(phi, 5, generator=generator())
    assert torch.allclose(tunnel(phi, x), point.expand(5, 4), rtol=8 * EPS, atol=0)
    if form == "subspace":
        assert x[:, 1:].any()
    assert tunnel.contains(phi, point)
    assert not tunnel.contains(phi, point + 1e-6)
    assert tunnel.volume(phi) == 0


def test_float32_control_points_are_accurate_to_their_rounding():
    for form in ("ambient", "subspace"):
        tunnel, phi = random_case(3, form)
        single = phi.float()
        x = tunnel.sample_in(single, 50, generator=generator())
        assert x.dtype == (torch.float32 if form == "ambient" else torch.float64)
        point = tunnel(single, x)
        assert point.dtype == torch.float32
        assert tunnel.contains(single, point).all()
        assert tunnel.volume(single).item() == pytest.approx(tunnel.volume(phi).item(), rel=1e-5)
        assert not tunnel.contains(single, point + 10).any()


def test_points_of_other_shapes_are_flattened():
    space, phi = Power(Flat(2), (2,)), draw(0, 4, 2, 2)
    tunnel, flat = Tunnel(Bezier(space, 3), 0.02), Tunnel(Bezier(Flat(4), 3), 0.02)
    x = tunnel.sample_in(phi, 6, generator=generator())
    assert torch.allclose(tunnel(phi, x).flatten(1), flat(phi.flatten(1), x), rtol=1e-14)
    assert tunnel.contains(phi, tunnel(phi, x)).all()
    assert tunnel.volume(phi).item() == pytest.approx(flat.volume(phi.flatten(1)).item(), rel=1e-14)


# Folds and cusps


def test_a_fold_is_rejected_with_its_parameter():
    # y = x² from -1 to 1: curvature 2 at its vertex, chord 2.
    phi = torch.tensor([[-1.0, 1.0], [0.0, -1.0], [1.0, 1.0]]).double()
    for form in ("ambient", "subspace"):
        assert Tunnel(Bezier(Flat(2)), 0.2499, form).check(phi) == pytest.approx(0.9996, rel=1e-12)
        for radius in (0.2501, 3.0):
            tunnel = Tunnel(Bezier(Flat(2)), radius, form)
            words = rf"folds at t = 0.5, where its radius {2 * radius:g} times the curvature 2 is {4 * radius:g}"
            for call in (tunnel.check, tunnel.volume, tunnel.sample_in, lambda p, f=tunnel: f.contains(p, p)):
                with pytest.raises(ArgumentError, match=words):
                    call(phi)


@pytest.mark.parametrize(
    ("points", "t"),
    [
        ([[0, 0], [1, 1], [0, 1], [1, 0]], 0.5),
        ([[0, 0], [0, 0], [0, 1], [1, 0]], 0),
        ([[0, 0], [0, 1], [1, 0], [1, 0]], 1),
        ([[0, 0], [3, 3], [1, 1]], 0.6),
    ],
)
def test_a_cusp_is_rejected_with_its_parameter(points, t):
    phi = torch.tensor(points).double()
    tunnel = Tunnel(Bezier(Flat(2), len(phi) - 1), 1e-3)
    for call in (tunnel.check, tunnel.sample_in, tunnel.log_volume):
        with pytest.raises(
            ArgumentError, match=rf"phi: expected a curve with a velocity other than 0, got 0 at t = {t:g}"
        ):
            call(phi)
    assert Tunnel(tunnel.curve, 0).check(phi) == 0


# Derivatives


@given(seeds)
def test_pull_phi_of_an_ambient_tunnel_is_an_outer_product_with_the_weights(seed):
    tunnel, phi = random_case(seed, "ambient")
    x, w = tunnel.sample_in(phi, 3, generator=generator(seed)), draw(seed, 3, 5)
    expected = sum(
        torch.outer(torch.tensor(tunnel.curve.weights(t.item()), dtype=torch.float64), row)
        for t, row in zip(x[:, 0], w, strict=True)
    )
    assert relative(tunnel.pull_phi(phi, x, w), expected) <= 1e-14


@pytest.mark.parametrize("form", ["ambient", "subspace"])
def test_derivatives_match_finite_differences(form):
    tunnel, phi = random_case(0, form, size=4)
    x = tunnel.sample_in(phi, 3, generator=generator())
    assert torch.autograd.gradcheck(tunnel, (phi.requires_grad_(), x.requires_grad_()))
    assert torch.autograd.gradcheck(tunnel.log_volume, (phi,))
    assert torch.autograd.gradcheck(tunnel.volume_element, (phi, x)) or form == "ambient"


@pytest.mark.parametrize("form", ["ambient", "subspace"])
def test_the_mean_loss_over_a_tunnel_is_learned(form):
    tunnel, phi = Tunnel(Bezier(Flat(4), 3), 0.05, form), 0.2 * draw(0, 4, 4)
    phi += torch.linspace(1, 2, 4)[:, None]
    places, losses = generator(), []
    for _ in range(20):
        x = tunnel.sample_in(phi, 8, generator=places)
        points = tunnel(phi, x)
        losses.append(points.square().sum(-1).mean().item())
        phi = phi - 0.2 * tunnel.pull_phi(phi, x, 2 * points / 8)
    assert losses[-1] <= 0.1 * losses[0]


def test_the_profile_of_a_linear_function_is_exact_on_the_curve():
    tunnel, phi = case("helix")
    slope = draw(0, 3)
    t, mean, top = tunnel.profile(phi, lambda theta: theta @ slope, points=5, draws=200, generator=generator())
    assert torch.equal(t, torch.linspace(0, 1, 5).double())
    center = tunnel.curve(phi, t) @ slope
    # A linear function has the centre's value in the mean; its deviations are below r |slope|.
    reach = tunnel.radius * (phi[-1] - phi[0]).norm() * slope.norm()
    assert ((mean - center).abs() <= 5 * reach / math.sqrt(200)).all()
    assert ((top >= mean) & (top <= center + reach)).all()


# Curved spaces


def test_on_a_sphere_points_have_the_distance_of_their_coordinates():
    space = Sphere(4)
    phi = space.project(torch.tensor([[1, 0, 0, 0], [1, 1, 0.5, 0], [0, 1, 0, 0.2]]).double())
    tunnel = Tunnel(Bezier(space, 2), 0.1)
    x = tunnel.sample_in(phi, 12, generator=generator())
    point, center = tunnel(phi, x), tunnel.curve(phi, x[:, 0])
    reach = 0.1 * distance(space, phi[0], phi[-1])
    assert torch.allclose(distance(space, center, point), x[:, 1:].norm(dim=-1), rtol=1e-12)
    assert (x[:, 1:].norm(dim=-1) <= reach * (1 + 8 * EPS)).all()
    assert ((x[:, 1:] * tunnel.curve.velocity(phi, x[:, 0])).sum(-1).abs() <= 1e-15).all()
    assert tunnel.contains(phi, point).all()
    assert not Tunnel(tunnel.curve, 0.02).contains(phi, point[x[:, 1:].norm(dim=-1) > 0.3 * reach]).any()
    assert not tunnel.contains(phi, -point).any()
    assert torch.allclose(tunnel(tunnel.collapse(phi[0]), torch.zeros(5).double()), phi[0], atol=1e-15)


def test_the_ball_of_a_curved_space_has_its_normal_dimensions():
    tunnel, phi = Tunnel(Bezier(Sphere(4), 1), 0.1), torch.eye(4)[:2].double()
    x = tunnel.sample_in(phi, 2000, generator=generator())
    # Two normal dimensions in a sphere of three: the square of the radius is uniform.
    part = x[:, 1:].norm(dim=-1) / (0.1 * math.pi / 2)
    assert stats.kstest(part.square().numpy(), "uniform").pvalue > 1e-6


def test_samples_are_orthogonal_in_the_metric_of_the_space():
    space = SymmetricPositiveDefinite(2)
    phi = space.random_point(3, generator=generator(), dtype=torch.float64)
    tunnel = Tunnel(Bezier(space, 2), 0.1)
    x = tunnel.sample_in(phi, 4, generator=generator())
    center, xi = tunnel.curve(phi, x[:, 0]), x[:, 1:].reshape(4, 2, 2)
    velocity = tunnel.curve.velocity(phi, x[:, 0])
    size = space.inner(center, xi, xi).sqrt() * space.inner(center, velocity, velocity).sqrt()
    assert (space.inner(center, xi, velocity).abs() <= 1e-12 * size).all()
    assert torch.allclose(distance(space, center, tunnel(phi, x)), space.inner(center, xi, xi).sqrt(), rtol=1e-10)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda f, p: f.volume(p), "check: expected a flat space"),
        (lambda f, p: f.check(p), "check: expected a flat space"),
        (lambda f, p: f.volume_element(p, torch.zeros(4)), "volume_element: expected a flat space"),
        (lambda f, p: f.nearest(p, p[0]), "nearest: expected a flat space"),
        (lambda f, p: f.sample_in(p, uniform="volume"), "uniform='volume': expected a flat space"),
        (lambda f, p: f.sample(3), "sample: expected form='subspace', got 'ambient'; use sample_in"),
    ],
)
def test_unsupported_methods_of_curved_spaces_are_rejected_by_name(call, words):
    with pytest.raises(NotImplementedError, match=words):
        call(Tunnel(Bezier(Sphere(3), 1), 0.1), torch.eye(3)[:2])


CURVE, PHI = Bezier(Flat(3), 3), draw(0, 4, 3)
TUNNEL, LINE = Tunnel(CURVE, 0.05, "subspace"), torch.tensor([0.0, 1.0, 2.0, 4.0])[:, None].expand(4, 3)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Tunnel("curve", 0.1), "curve: expected a Bezier, got 'curve'"),
        (lambda: Tunnel(CURVE, -0.1), "radius: expected a finite number >= 0, got -0.1"),
        (lambda: Tunnel(CURVE, float("nan")), "radius: expected a finite number"),
        (lambda: Tunnel(CURVE, 0.1, "ball"), "form: expected one of ambient, subspace; got 'ball'"),
        (lambda: Tunnel(CURVE, 0.1, steps=0), "steps: expected an integer >= 1, got 0"),
        (
            lambda: Tunnel(Bezier(Flat(2), 3), 0.1, "subspace"),
            "form: expected at least 3 dimensions for a curve of degree 3",
        ),
        (lambda: Tunnel(Bezier(Sphere(3), 2), 0.1, "subspace"), "form: expected a flat space for 'subspace'"),
        (lambda: TUNNEL(PHI[:3], torch.zeros(3)), r"phi: expected shape \(4, 3\), got \(3, 3\)"),
        (lambda: TUNNEL(PHI, torch.zeros(4)), r"x: expected trailing shape \(3\), got \(4,\)"),
        (lambda: TUNNEL(PHI, 0.5), r"x: expected a tensor of trailing shape \(3,\), got 0.5"),
        (lambda: TUNNEL(LINE, torch.zeros(3)), "phi: expected control points that span 3 dimensions"),
        (lambda: TUNNEL.volume(LINE), "phi: expected control points that span 3 dimensions"),
        (lambda: TUNNEL.check(PHI * float("nan")), "phi: expected finite values"),
        (lambda: TUNNEL.sample_in(PHI, uniform="ball"), "uniform: expected one of product, volume; got 'ball'"),
        (lambda: TUNNEL.nearest(PHI, PHI[0] / 0), "point: expected finite values"),
        (lambda: TUNNEL.contains(PHI, torch.zeros(2)), r"point: expected trailing shape \(3\), got \(2,\)"),
        (lambda: TUNNEL.profile(PHI, lambda theta: 0.0, points=1), "points: expected an integer >= 2, got 1"),
        (lambda: TUNNEL.profile(PHI, lambda theta: 0.0, draws=0), "draws: expected an integer >= 1, got 0"),
    ],
)
def test_invalid_arguments_are_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


def test_instances_are_compared_and_hashed_by_value():
    assert Tunnel(CURVE, 0.05) == Tunnel(CURVE, 0.05) != Tunnel(CURVE, 0.06)
    assert hash(Tunnel(CURVE, 1)) == hash(Tunnel(CURVE, 1.0))
    assert (TUNNEL.size, TUNNEL.domain, Tunnel(CURVE, 0.1).domain, TUNNEL.space) == (4, (3,), (4,), Flat(3))


def test_vmap_is_supported():
    x = TUNNEL.sample(4, generator=generator())
    assert torch.allclose(torch.func.vmap(lambda place: TUNNEL(PHI, place))(x), TUNNEL(PHI, x), atol=1e-14)


@pytest.mark.parametrize("form", ["ambient", "subspace"])
def test_empty_batches_are_supported(form):
    tunnel, phi = case("helix", form)
    for uniform in ("product", "volume"):
        assert tunnel.sample_in(phi, 2, 0, uniform=uniform).shape == (2, 0, *tunnel.domain)
    assert tunnel(phi, torch.zeros(0, *tunnel.domain)).shape == (0, 3)
    assert tunnel.contains(phi, torch.zeros(0, 3)).shape == (0,)


def test_a_line_of_one_parameter_has_no_normal_space():
    tunnel, phi = Tunnel(Bezier(Flat(1), 2), 0.1), torch.tensor([[0.0], [1.0], [3.0]]).double()
    x = tunnel.sample_in(phi, 9, generator=generator())
    # What is left of xi is the rounding of z less its whole length.
    assert x[:, 1].abs().max() <= 8 * EPS
    assert tunnel.volume(phi).item() == pytest.approx(3, rel=1e-15)
    assert tunnel.contains(phi, torch.tensor([[1.5], [3.01]]).double()).tolist() == [True, False]


def test_a_tunnel_contains_points_with_zero_velocity():
    e = torch.eye(3, dtype=torch.float64)
    tunnel = Tunnel(Bezier(Sphere(3)), 0.1)
    assert tunnel.contains(tunnel.collapse(e[0]), e[0])
    assert tunnel.contains(torch.stack([e[0], e[0], e[1]]), e[0])
