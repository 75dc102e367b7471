"""Curves fitted to points that go by: what least squares make of the stored points, and points of the path itself."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.curves import Bezier, Phases, Piecewise, Training, fit
from manifoldagg.curves.trajectory import PathFit, PathPoints
from manifoldagg.errors import ArgumentError, DivergenceError
from manifoldagg.manifolds import Flat, ParameterSpace, PoincareBall, SpecialOrthogonal, Sphere, geodesic
from tests.federated.rules.memory_traffic import SIZE, counted
from tests.support import draw, dtypes, relative, rotation, scales, seeds

P = 5
degrees = st.integers(1, 6)
times = st.sampled_from(["steps", "length"])


def walk(seed, steps, dtype=torch.float64, scale=1.0):
    """The points of a random path (steps + 1, P), far from zero."""
    return (draw(seed, P) + scale * draw(seed + 1, steps + 1, P).cumsum(0)).to(dtype)


def streamed(path, degree, time="steps", space=None, *, told=False, kind=PathFit):
    """The control points of what sees a path, all of them; with `told` it knows beforehand how long that is."""
    steps = len(path) - 1 if told else None
    seen = kind(space or Flat(P), path[0], degree, time, steps)
    for point in path[1:]:
        moving = point.clone()
        seen.observe(moving)
        # Nothing of it is kept.
        moving.fill_(math.nan)
    return torch.cat([path[:1], seen.points(path[-1])])


def places(path, time):
    if time == "steps":
        return torch.linspace(0, 1, len(path), dtype=torch.float64)
    reached = torch.cat([torch.zeros(1), path.double().diff(dim=0).norm(dim=1).cumsum(0)])
    return reached / reached[-1]


def elevated_chord(start, end, degree):
    return torch.stack([torch.lerp(start, end, i / degree) for i in range(degree + 1)])


@given(seeds, degrees, st.integers(0, 30), times, dtypes, scales)
def test_the_streamed_fit_equals_least_squares_on_stored_points(seed, degree, more, time, dtype, scale):
    path = walk(seed, degree + more, dtype, scale)
    phi = streamed(path, degree, time)
    stored = Bezier(Flat(P), degree).through(path.double(), places(path, time), fixed_ends=True)
    assert torch.equal(phi[0], path[0])
    assert torch.equal(phi[-1], path[-1])
    # Sums of powers determine a degree of 6 to 1e-10 on equal steps; random lengths of few steps are worse by the
    # square of a condition of up to 100. In float32 points are rounded where they are, not where the path began.
    rounding = torch.finfo(dtype).eps * path.double().norm(dim=1).max() / (stored - stored[0]).norm()
    assert relative(phi.double() - phi[0].double(), stored - stored[0]) <= max(1e-6, 4 * rounding.item())


@given(seeds, degrees, st.integers(0, 30), dtypes)
def test_a_known_number_of_steps_gives_the_same_fit(seed, degree, more, dtype):
    path = walk(seed, degree + more, dtype)
    phi = streamed(path, degree, told=True)
    stored = Bezier(Flat(P), degree).through(path.double(), places(path, "steps"), fixed_ends=True)
    # The condition of weights of degree 6 on six steps, squared; and points are rounded where they are.
    assert relative(phi.double(), stored) <= 1e-12 + torch.finfo(dtype).eps
    assert torch.equal(phi[[0, -1]], path[[0, -1]])


@pytest.mark.parametrize("time", ["steps", "length"])
@pytest.mark.parametrize("degree", [2, 3, 10])
def test_fits_of_long_paths_are_accurate(degree, time):
    path = walk(3, 150)
    stored = Bezier(Flat(P), degree).through(path, places(path, time), fixed_ends=True)
    # As measured for 1,000 points, with a factor of 10 to 30.
    bound = {2: 1e-13, 3: 1e-12, 10: 2e-6}[degree]
    assert relative(streamed(path, degree, time) - path[0], stored - path[0]) <= bound


@given(seeds, degrees, st.integers(0, 20))
def test_points_of_a_curve_recover_the_curve(seed, degree, more):
    curve = Bezier(Flat(P), degree)
    phi = draw(seed, degree + 1, P)
    path = curve(phi, torch.linspace(0, 1, degree + more + 1, dtype=torch.float64))
    # As many points as are free, at the highest degree, on equal steps: a condition of 1e3, squared.
    assert relative(streamed(path, degree), phi) <= 1e-8


@given(seeds, degrees)
def test_a_quadratic_interpolates_one_inner_point(seed, degree):
    start, middle, end = path = walk(seed, 2)
    phi = streamed(path, 2)
    assert relative(phi[1], 2 * middle - (start + end) / 2) <= 1e-13


@given(seeds, degrees, st.integers(6, 20))
def test_a_fit_by_steps_is_affine_equivariant(seed, degree, steps):
    path = walk(seed, steps)
    matrix = draw(seed + 2, 3, P)
    shift = draw(seed + 3, 3)
    moved = path @ matrix.T + shift
    there = streamed(moved, degree, space=Flat(3))
    # The condition of a degree of 6 on six steps.
    assert relative(there, streamed(path, degree) @ matrix.T + shift) <= 1e-7


@pytest.mark.parametrize("scale", [1e-150, 1e-30, 1e150])
def test_a_fit_by_length_is_scale_equivariant(scale):
    path = walk(9, 12)
    # The path is moved to begin at 0, of which nothing is rounded.
    path = path - path[0]
    assert relative(streamed(scale * path, 3, "length") / scale, streamed(path, 3, "length")) <= 1e-9


def test_repeated_points_count_twice_in_a_fit_by_length():
    path = walk(9, 8).repeat_interleave(2, dim=0)[1:]
    stored = Bezier(Flat(P), 3).through(path, places(path, "length"), fixed_ends=True)
    assert relative(streamed(path, 3, "length"), stored) <= 1e-9


@given(seeds, st.integers(2, 6), times)
def test_too_few_points_for_a_curve_give_the_chord(seed, degree, time):
    for steps in range(1, degree):
        path = walk(seed, steps)
        chord = elevated_chord(path[0], path[-1], degree)
        assert relative(streamed(path, degree, time), chord) <= 1e-15
        assert relative(streamed(path, degree, told=True), chord) <= 1e-15


@pytest.mark.parametrize("time", ["steps", "length"])
@pytest.mark.parametrize("degree", [1, 2, 5])
def test_a_path_of_length_zero_gives_its_point(degree, time):
    still = draw(1, P).expand(9, P)
    assert torch.equal(streamed(still[:1], degree, time), still[: degree + 1])
    assert torch.equal(streamed(still, degree, time), still[: degree + 1])
    assert torch.equal(streamed(still[:1], degree, told=True), still[: degree + 1])


def test_equal_points_give_the_chord_in_a_fit_by_length():
    """Three different places between the ends are free points enough for degree 4, two are not."""
    corners = draw(2, 5, P)
    for count, degree in ((5, 4), (4, 4), (3, 3)):
        path = corners[:count].repeat_interleave(3, dim=0)
        chord = elevated_chord(path[0], path[-1], degree)
        assert (relative(streamed(path, degree, "length"), chord) <= 1e-14) == (count < degree + 1)


def test_rapidly_growing_steps_do_not_overflow():
    path = torch.outer(10.0 ** torch.arange(0, 150, 10, dtype=torch.float64), draw(4, P))
    # Seen from its end it begins with a jump; and there are no squares of lengths above 1e154.
    for far in (path, 1e100 * path):
        assert relative(streamed(far, 2, "length"), elevated_chord(far[0], far[-1], 2)) <= 1e-15
    with pytest.raises(DivergenceError, match="points: expected a fitted curve with finite control points"):
        streamed(torch.tensor([[0.0], [3e38], [0.0]]), 2, space=Flat(1))


def test_a_step_allocates_nothing_and_reads_each_point_as_documented():
    for degree, time, steps, sums in (
        (2, "steps", 9, 1),
        (2, "steps", None, 2),
        (3, "steps", 9, 2),
        (2, "length", None, 2),
    ):
        start = draw(1, SIZE, dtype=torch.float32)
        point, other = draw(2, 2, SIZE, dtype=torch.float32)
        with counted() as words:
            path = PathFit(Flat(SIZE), start, degree, time, steps)
        # Float64 is two words; by length the point before is kept too.
        assert words.counts[2] == 2 * sums + (time == "length")
        path.observe(point)
        with counted() as words:
            path.observe(other)
        assert (words.grams, words.combines) == (time == "length", sums)
        more = {"steps": (0, 0), "length": (3, 1)}[time]
        # Each sum is read and written, the point and the start with it.
        assert words.counts == (4 * sums + more[0], 2 * sums + more[1], 0)


class FromZero(PathFit):
    def _displacement(self, point):
        return point, None


class WithoutScale(PathFit):
    def _factors(self, before, now):
        return [(1.0, taken) for _, taken in super()._factors(before, now)]


class ScaledAlike(PathFit):
    def _factors(self, before, now):
        return [(before / now, taken) for _, taken in super()._factors(before, now)]


class EndIsFree(PathFit):
    def _solution_weights(self):
        shares = super()._solution_weights()
        shares[:, 0] -= torch.arange(1, self.degree, dtype=torch.float64) / self.degree
        return shares


class OneStepLate(PathFit):
    def _factors(self, before, now):
        return super()._factors(before, before)


class LengthOfSquares(PathFit):
    def _step(self, last, point):
        return super()._step(last, point) ** 2


WRONG = {FromZero: "steps", WithoutScale: "length", ScaledAlike: "length", EndIsFree: "told", OneStepLate: "told"}
WRONG |= {LengthOfSquares: "length"}


@pytest.mark.parametrize("kind", WRONG)
def test_mutants_of_the_fit_differ_from_least_squares(kind):
    path = walk(1, 12)
    told = WRONG[kind] == "told"
    time = "steps" if told else WRONG[kind]
    stored = Bezier(Flat(P), 3).through(path, places(path, time), fixed_ends=True)
    assert relative(streamed(path, 3, time, told=told), stored) <= 1e-10
    assert relative(streamed(path, 3, time, told=told, kind=kind), stored) >= 1e-3


SPACES = [Sphere(P), PoincareBall(P), SpecialOrthogonal(3)]


def curved_walk(space, steps=12):
    generator = torch.Generator().manual_seed(7)
    points = [space.random_point(generator=generator, dtype=torch.float64)]
    for _ in range(steps):
        points.append(space.exp(points[-1], 0.05 * space.random_tangent(points[-1], generator)))
    return torch.stack(points)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_on_a_curved_space_the_fit_uses_tangents_at_the_start(space):
    path = curved_walk(space)
    tangents = torch.stack([space.log(path[0], point) for point in path]).flatten(1)
    phi = streamed(path, 3, space=space)
    line = Bezier(Flat(tangents.shape[1]), 3).through(tangents, places(tangents, "steps"), fixed_ends=True)
    for found, tangent in zip(phi[1:-1], line[1:-1], strict=True):
        expected = space.exp(path[0], tangent.view(space.shape))
        assert (found - expected).abs().max() <= 1e-12
    assert torch.equal(phi[-1], path[-1])


@pytest.mark.parametrize("space", SPACES, ids=str)
@pytest.mark.parametrize("time", ["steps", "length"])
def test_the_fit_of_a_geodesic_is_the_chord(space, time):
    path = curved_walk(space)
    line = geodesic(space, path[0], path[-1], torch.linspace(0, 1, 20, dtype=torch.float64))
    phi = streamed(line, 3, time, space)
    for i in range(4):
        assert (phi[i] - geodesic(space, path[0], path[-1], i / 3)).abs().max() <= 1e-10


def test_on_a_curved_space_lengths_use_its_distance():
    space = Sphere(P)
    path = curved_walk(space)
    turned = rotation(5, P)
    assert relative(streamed(path @ turned, 3, "length", space), streamed(path, 3, "length", space) @ turned) <= 1e-12
    assert relative(streamed(path, 3, "length", space), streamed(path, 3, "steps", space)) >= 1e-4


def test_each_leaf_is_fitted_separately():
    space = ParameterSpace.of_state_dict({"a": torch.ones(3).double(), "b": torch.ones(2).double()}, {"a": Sphere(3)})
    generator = torch.Generator().manual_seed(1)
    start = space.random_point(generator=generator, dtype=torch.float64)
    path = [start]
    for _ in range(8):
        path.append(space.exp(path[-1], 0.1 * space.random_tangent(path[-1], generator)))
    path = torch.stack(path)
    phi = streamed(path, 2, space=space)
    assert relative(phi[:, :3], streamed(path[:, :3], 2, space=Sphere(3))) <= 1e-14
    assert relative(phi[:, 3:], streamed(path[:, 3:], 2, space=Flat(2))) <= 1e-14


def cornered(path, pieces, space=None):
    seen = PathPoints(space or Flat(P), path[0], pieces, len(path) - 1)
    for point in path[1:]:
        seen.observe(point.clone())
    return seen.points(path[-1])


@given(seeds, st.integers(1, 9), st.integers(1, 40))
def test_vertices_are_at_equal_fractions_of_the_steps(seed, pieces, steps):
    path = walk(seed, steps)
    whole = Piecewise(Flat(P), degree=1, pieces=steps)
    shares = torch.arange(1, pieces + 1, dtype=torch.float64) / pieces
    points = cornered(path, pieces)
    assert relative(points, whole(path, shares)) <= 1e-13
    assert torch.equal(points[-1], path[-1])
    for i in range(1, pieces + 1):
        if (i * steps) % pieces == 0:
            assert torch.equal(points[i - 1], path[i * steps // pieces])


def test_vertices_on_a_curved_space_are_on_geodesics():
    space = Sphere(P)
    path = curved_walk(space, steps=3)
    first, last = cornered(path, 2, space)
    assert relative(first, geodesic(space, path[1], path[2], 0.5)) <= 1e-15
    assert torch.equal(last, path[-1])


def test_vertices_without_steps_are_the_start_and_other_numbers_are_rejected():
    start = draw(0, P)
    assert torch.equal(cornered(start[None], 3), start.expand(3, P))
    path = PathPoints(Flat(P), start, 2, steps=3)
    path.observe(start)
    with pytest.raises(ArgumentError, match="steps: expected 3 observed points, got 1"):
        path.points(start)
    curve = PathFit(Flat(P), start, 2, steps=1)
    for _ in range(3):
        curve.observe(start)
    with pytest.raises(ArgumentError, match="steps: expected 1 observed points, got 3"):
        curve.points(start)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: PathFit(Flat(P), draw(0, P), 0), "degree: expected"),
        (lambda: PathFit(Flat(P), draw(0, P), 11), "degree: expected at most 10, got 11"),
        (lambda: PathFit(Flat(P), draw(0, P), 2, "loss"), "time: expected one of steps, length"),
        (lambda: PathFit(Flat(P), draw(0, P), 2, "length", 3), "steps: expected None with time='length', got 3"),
        (lambda: PathFit(Flat(P), draw(0, P), 2, "steps", -3), "steps: expected"),
        (lambda: PathFit("space", draw(0, P)), "space: expected a Manifold"),
        (lambda: PathPoints(Flat(P), draw(0, P), 0, 3), "pieces: expected"),
        (lambda: PathPoints(Flat(P), draw(0, P), 2, -1), "steps: expected"),
    ],
)
def test_invalid_arguments_are_rejected_by_name(make, words):
    with pytest.raises(ArgumentError, match=words):
        make()


def test_watch_receives_the_end_after_every_step_of_the_first_phase():
    seen = []
    held = set()

    def watch(point):
        held.add(point.data_ptr())
        seen.append(point.clone())

    ends = []
    callback = lambda step, value, phi: ends.append(phi[-1])  # noqa: E731
    phases = Phases(steps=(3, 2), watch=watch, callback=callback)
    target = draw(1, P)
    result = fit(
        Bezier(Flat(P)), lambda theta, batch: (theta - batch).square().sum(), [target], start=draw(0, P),
        phases=phases, training=Training(rate=0.1), generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    assert len(result.losses) == 5
    assert torch.equal(torch.stack(seen), torch.stack(ends[:3]))
    assert len(held) == 1
