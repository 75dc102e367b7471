"""The laws of Bézier curves, each a function of a curve and a seed: they hold for the true ones, and catch wrong ones.

A law returns the largest violation and what it may be.
"""

import math

import pytest
import torch

from manifoldagg.curves import Bezier
from manifoldagg.manifolds import (
    Flat,
    PoincareBall,
    SpecialOrthogonal,
    Sphere,
    SymmetricPositiveDefinite,
    distance,
    geodesic,
    norm,
)
from tests.curves.mutants import MUTANTS

ROUNDING = 1e-12
"""Of points whose coordinates are near 1 after some tens of operations of spaces that are exact to 1e-14."""

LAWS = {}
TIMES = torch.tensor([0.0, 0.2, 0.5, 0.85, 1.0], dtype=torch.float64)


def law(function):
    LAWS[function.__name__] = function
    return function


def control_points(curve, seed, size=0.4):
    """degree + 1 points at `size` from one point."""
    space, generator = curve.space, torch.Generator().manual_seed(seed)
    x = space.random_point(generator=generator, dtype=torch.float64)
    x = x.expand(curve.degree + 1, *x.shape).contiguous()
    u = space.random_tangent(x, generator)
    return space.exp(x, size * u / norm(space, x, u).reshape(-1, *(1 for _ in space.shape)))


def apart(curve, x, y):
    """The largest distance of two batches of points; infinite where there is none."""
    log = curve.space.log(x, y.expand_as(x))
    return norm(curve.space, x, log).max().item() if log.isfinite().all() else math.inf


def size(curve, x, u):
    return norm(curve.space, x, u).max().item()


@law
def points_lie_on_the_space(curve, seed):
    points = curve(control_points(curve, seed), TIMES)
    return (curve.space.project(points) - points).abs().max().item(), ROUNDING


@law
def a_curve_starts_and_ends_at_its_end_points(curve, seed):
    phi = control_points(curve, seed)
    return max(apart(curve, curve(phi, 0.0), phi[0]), apart(curve, curve(phi, 1.0), phi[-1])), ROUNDING


@law
def a_collapsed_curve_is_one_point(curve, seed):
    point = control_points(curve, seed)[0]
    return apart(curve, curve(curve.collapse(point), TIMES), point), ROUNDING


@law
def a_curve_is_the_geodesic_between_curves_of_lower_degree(curve, seed):
    """Up to degree 1, which is a geodesic; also past the ends."""
    phi, t = control_points(curve, seed), torch.tensor([-0.2, *TIMES, 1.2], dtype=torch.float64)
    if curve.degree == 1:
        return apart(curve, curve(phi, t), geodesic(curve.space, *(p.expand(7, *p.shape) for p in phi), t)), ROUNDING
    lower = Bezier(curve.space, curve.degree - 1)
    between = geodesic(curve.space, lower(phi[:-1], t), lower(phi[1:], t), t)
    return apart(curve, curve(phi, t), between), ROUNDING


@law
def a_batch_of_parameters_is_a_loop(curve, seed):
    phi, t = control_points(curve, seed), TIMES[1:].reshape(2, 2)
    loop = torch.stack([torch.stack([curve(phi, s) for s in row]) for row in t])
    return apart(curve, curve(phi, t), loop), ROUNDING


@law
def a_velocity_is_the_derivative(curve, seed):
    """log of what lies h ahead and behind: h² of truncation, ε/h of rounding."""
    phi, h = control_points(curve, seed), 1e-4
    here = curve(phi, TIMES)
    ahead, behind = (curve.space.log(here, curve(phi, TIMES + s * h)) for s in (1, -1))
    return size(curve, here, curve.velocity(phi, TIMES) - (ahead - behind) / (2 * h)), 1e-5


@law
def the_first_velocity_points_to_the_first_control_point(curve, seed):
    phi, n = control_points(curve, seed), curve.degree
    first = curve.velocity(phi, 0.0) - n * curve.space.log(phi[0], phi[1])
    last = curve.velocity(phi, 1.0) + n * curve.space.log(phi[-1], phi[-2])
    return max(size(curve, phi[0], first), size(curve, phi[-1], last)), 10 * ROUNDING


@law
def an_acceleration_is_the_second_derivative(curve, seed):
    """h² of truncation, ε/h² of rounding."""
    phi, h = control_points(curve, seed), 1e-3
    here = curve(phi, TIMES)
    ahead, behind = (curve.space.log(here, curve(phi, TIMES + s * h)) for s in (1, -1))
    found = curve.acceleration(phi, TIMES)
    tangent = curve.space.project_tangent(here, found) - found
    return size(curve, here, found - (ahead + behind) / h**2) + tangent.abs().max().item(), 1e-3


@law
def a_derivative_reaches_the_control_points_by_the_chain_rule(curve, seed):
    phi = control_points(curve, seed).requires_grad_()
    points = curve(phi, TIMES)
    w = torch.randn(points.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    (expected,) = torch.autograd.grad(points, phi, w)
    return (curve.pull_phi(phi.detach(), TIMES, w) - expected).abs().max().item(), 10 * ROUNDING


@law
def parts_follow_the_curve(curve, seed):
    """Exactly where the space is flat; else to third order, between ends that are exact."""
    h = 0.05
    phi = control_points(curve, seed, h)
    left, right = curve.split(phi, 0.3)
    ends = torch.stack([left[0], left[-1], right[0], right[-1]])
    joint = curve(phi, 0.3)
    exact = apart(curve, ends, torch.stack([phi[0], joint, joint, phi[-1]]))
    rest = max(
        apart(curve, curve(left, TIMES), curve(phi, 0.3 * TIMES)),
        apart(curve, curve(right, TIMES), curve(phi, 0.3 + 0.7 * TIMES)),
    )
    return max(exact / ROUNDING, rest / (ROUNDING if curve.space.flat else 4 * h**3)), 1.0


@law
def an_elevated_curve_follows_the_curve(curve, seed):
    h = 0.05
    phi = control_points(curve, seed, h)
    raised = Bezier(curve.space, curve.degree + 1)(curve.elevate(phi), TIMES)
    return apart(curve, raised, curve(phi, TIMES)), ROUNDING if curve.space.flat else 4 * h**3


@law
def a_reversed_curve_runs_backwards(curve, seed):
    phi = control_points(curve, seed)
    return apart(curve, curve(curve.reverse(phi), TIMES), curve(phi, 1 - TIMES)), ROUNDING


@law
def a_length_is_the_sum_of_small_distances(curve, seed):
    """Chords of length h are shorter than their arcs by h³: h² in all."""
    phi = control_points(curve, seed)
    points = curve(phi, torch.linspace(0.1, 0.8, 1001, dtype=torch.float64))
    walked = distance(curve.space, points[:-1], points[1:]).sum().item()
    return abs(curve.length(phi, 0.1, 0.8).item() - walked), 1e-5


@law
def a_length_lies_between_chord_and_polygon(curve, seed):
    """Exactly where the space is flat; else to third order in the size of the curve."""
    h = 0.05
    phi = control_points(curve, seed, h)
    length = curve.length(phi).item()
    chord = distance(curve.space, phi[0], phi[-1]).item()
    polygon = distance(curve.space, phi[:-1], phi[1:]).sum().item()
    return max(chord - length, length - polygon), ROUNDING if curve.space.flat else 4 * h**3


@law
def the_parameter_at_a_part_of_the_length_inverts_it(curve, seed):
    phi = control_points(curve, seed)
    part = torch.tensor([0.3, 0.8], dtype=torch.float64)
    t = curve.parameter_at_length(phi, part)
    reached = torch.stack([curve.length(phi, 0.0, s) for s in t.tolist()])
    return (reached - part * curve.length(phi)).abs().max().item(), ROUNDING


@law
def no_place_is_nearer_than_the_nearest(curve, seed):
    """A point of the curve is found there, and of a point off it no sample is nearer."""
    phi = control_points(curve, seed)
    on, off = curve(phi, 0.37), control_points(curve, seed + 1000, 0.3)[1]
    t, away = curve.nearest(phi, torch.stack([on, off]))
    trace = curve(phi, torch.linspace(0, 1, 501, dtype=torch.float64))
    sampled = distance(curve.space, off.expand_as(trace), trace).min().item()
    drawn = distance(curve.space, torch.stack([on, off]), curve(phi, t)) - away
    return max(away[0].item(), away[1].item() - sampled, drawn.abs().max().item()), 1e-11


SPACES = [Flat(3), Sphere(3), SymmetricPositiveDefinite(2), SpecialOrthogonal(3), PoincareBall(2)]


@pytest.mark.parametrize("space", SPACES, ids=lambda space: type(space).__name__)
@pytest.mark.parametrize("name", LAWS)
def test_every_law_holds(name, space):
    for seed, degree in enumerate((1, 2, 3) if space.flat else (1, 3)):
        found, allowed = LAWS[name](Bezier(space, degree), seed)
        assert found <= allowed, f"degree {degree}"


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught(name, record_property):
    curve, laws = MUTANTS[name]
    broken = []
    for each in laws:
        found, allowed = LAWS[each](curve, 0)
        if not found <= allowed:
            broken.append(each)
    assert set(laws) <= set(broken), f"{name} is not caught by {set(laws) - set(broken)}"
    record_property("caught", (name, broken))


def test_every_law_catches_a_mutant():
    needed = {each for _, laws in MUTANTS.values() for each in laws}
    assert needed == set(LAWS)
