"""Tests of the curves and rates of AsyncBezier: the end of a step on a curve or polygon, and what limits or scales it."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.integrate
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldagg.corrections import OrthoDC
from manifoldagg.curves import Bezier, Piecewise
from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Payload, Server, Update
from manifoldagg.federated.clients import Trajectory
from manifoldagg.federated.rules import ASGD, AsyncBezier, AsyncCorrected, FedOrtho
from manifoldagg.federated.rules._step_curve import StepCurve
from manifoldagg.manifolds import Flat, Sphere, distance
from manifoldagg.testing import check_rule
from tests.federated.mutants import Catalogue
from tests.federated.rules.memory_traffic import SIZE, counted
from tests.support import draw, relative, seeds

GOLDEN = {
    "AsyncBezier by the parameter": AsyncBezier(0.5, threshold=0.0, pull_back="none", curve_weight=0.5),
    "AsyncBezier of corners": AsyncBezier(0.5, threshold=-1.0, polygon=True),
    "AsyncBezier while it agrees": AsyncBezier(0.5, threshold=-1.0, pull_back="conflict_free_prefix", polygon=True),
    "AsyncBezier that bends": AsyncBezier(0.5, threshold=-1.0, pull_back="none", curve_weight="auto"),
    "AsyncBezier of one pace": AsyncBezier(0.5, threshold=-1.0, pull_back="none", normalise=True),
}

pytestmark = pytest.mark.usefixtures("as_shipped")

P = 6
SPACE = Flat(P)
CATALOGUE = Catalogue({"AsyncBezier": AsyncBezier})
LAWS, MUTANTS, law, caught_by = CATALOGUE.laws, CATALOGUE.mutants, CATALOGUE.law, CATALOGUE.caught_by


def update(seed, n=2, **known):
    base, current = draw(seed, 2, P)
    return Update(0, base, current, base + draw(seed + 1, n, P), **known)


def step(rule, given_, state=None, space=SPACE):
    state = rule.init(space, given_.current) if state is None else state
    return rule.step(space, state, given_)


def legs(along):
    return [after - before for before, after in itertools.pairwise([0.0, *along])]


def chords(rows, kappa):
    """Return the points of the straightened curve, computed explicitly."""
    n = len(rows)
    return torch.stack([kappa * row + (1 - kappa) * (i + 1) / n * rows[-1] for i, row in enumerate(rows)])


def path(space, rows, polygon, size=P):
    phi = torch.cat([torch.zeros(1, size, dtype=torch.float64), rows])
    curve = Piecewise(space, degree=1, pieces=len(rows)) if polygon else Bezier(space, len(rows))
    return curve.at(phi)


options = {
    "n": st.integers(1, 5),
    "rho": st.floats(0.01, 1.5),
    "kappa": st.sampled_from([0.0, 0.3, 1.0]),
    "polygon": st.booleans(),
    "threshold": st.sampled_from([-1.0, 0.0, 1.0]),
}


@given(seed=seeds, **options)
def test_without_a_pull_back_the_rate_is_the_parameter(seed, n, rho, kappa, polygon, threshold):
    given_ = update(seed, n, weight=0.5)
    rows = OrthoDC(threshold)(SPACE, given_.base, given_.current, given_.points - given_.base)
    rule = AsyncBezier(2 * rho, threshold=threshold, pull_back="none", curve_weight=kappa, polygon=polygon)
    _, outcome = step(rule, given_)
    s = min(rho, 1.0)
    expected = given_.current + path(SPACE, chords(rows, kappa), polygon)(s)
    assert outcome.numbers["step"] == s
    assert relative(outcome.model, expected) <= 1e-13
    assert outcome.numbers["norm"] == pytest.approx((expected - given_.current).norm().item(), rel=1e-9)


@given(seed=seeds, **options)
def test_pulled_back_rate_is_the_first_parameter_at_the_distance(seed, n, rho, kappa, polygon, threshold):
    given_ = update(seed, n)
    rows = OrthoDC(threshold)(SPACE, given_.base, given_.current, given_.points - given_.base)
    _, outcome = step(AsyncBezier(rho, threshold=threshold, curve_weight=kappa, polygon=polygon), given_)
    curve = path(SPACE, chords(rows, kappa), polygon)
    goal = min(rho, 1.0) * rows[-1].norm().item()
    s = outcome.numbers["step"]
    assert relative(outcome.model, given_.current + curve(s)) <= 1e-13
    assert (outcome.model - given_.current).norm().item() == pytest.approx(goal, rel=1e-9)
    earlier = curve(s * torch.linspace(0, 1, 200, dtype=torch.float64)[:-1]).norm(dim=-1)
    # Of a curve that touches the distance, or runs along it, rounding chooses the place.
    assert earlier.max().item() <= goal * (1 + 1e-9)


@given(seed=seeds, **options)
def test_length_pull_back_covers_the_given_fraction_of_the_length(seed, n, rho, kappa, polygon, threshold):
    given_ = update(seed, n)
    rows = OrthoDC(threshold)(SPACE, given_.base, given_.current, given_.points - given_.base)
    rule = AsyncBezier(rho, threshold=threshold, pull_back="length", curve_weight=kappa, polygon=polygon)
    _, outcome = step(rule, given_)
    curve = path(SPACE, chords(rows, kappa), polygon)
    s = outcome.numbers["step"]
    assert relative(outcome.model, given_.current + curve(s)) <= 1e-13
    assert float(curve.length(0.0, s) / curve.length()) == pytest.approx(min(rho, 1.0), rel=1e-9)


@given(seed=seeds, n=st.integers(2, 5), rho=st.floats(0.05, 2))
@settings(max_examples=20)
def test_the_length_pull_back_agrees_with_quadrature_of_the_hodograph(seed, n, rho):
    """Transcription of Manifold (11): geodesics of the pulled-back metric have constant speed."""
    rows = np.concatenate([np.zeros((1, P)), draw(seed, n, P).numpy()])

    def speed(t):
        weights = [math.comb(n - 1, k) * t**k * (1 - t) ** (n - 1 - k) for k in range(n)]
        return float(np.linalg.norm(n * np.diff(rows, axis=0).T @ weights))

    def length(s):
        return scipy.integrate.quad(speed, 0, s, epsabs=1e-13, epsrel=1e-12, limit=200)[0]

    s = scipy.optimize.brentq(lambda s: length(s) - rho * length(1), 0, 4, xtol=1e-13)
    curve = StepCurve(overshoot="extend", pull_back="length")
    assert curve.parameter((rows[1:] @ rows[1:].T).tolist(), rho) == pytest.approx(s, rel=1e-9)


@pytest.mark.parametrize(
    ("control", "parameter"),
    [(0.0, lambda rho: rho**0.5), (0.5, lambda rho: rho), (1.0, lambda rho: 1 - (1 - rho) ** 0.5)],
)
@pytest.mark.parametrize("rho", [0.0, 0.1, 0.75, 1.0])
def test_length_of_a_straight_curve_equals_its_chord(control, parameter, rho):
    inner = [[9 * control**2, 9 * control], [9 * control, 9.0]]
    for pull_back in ("chord", "length"):
        s = StepCurve(pull_back=pull_back).parameter(inner, rho)
        assert s == pytest.approx(parameter(rho), rel=1e-12, abs=1e-15)


@given(seeds, st.integers(1, 3), st.floats(0.01, 1))
def test_the_length_pull_back_does_not_depend_on_the_degree(seed, n, rho):
    given_ = update(seed, n)
    rule = AsyncBezier(rho, threshold=-1.0, pull_back="length")
    elevated = Bezier(SPACE, n).elevate(torch.cat([given_.base[None], given_.points]), 2)[1:]
    assert relative(step(rule, given_)[1].model, step(rule, replace(given_, points=elevated))[1].model) <= 1e-10


@given(seeds, st.floats(0.01, 1))
def test_a_closed_curve_has_a_length_but_no_chord(seed, rho):
    control = draw(seed, P)
    inner = [[float(control @ control), 0.0], [0.0, 0.0]]
    assert StepCurve().parameter(inner, rho) == 0
    # The curve 2s(1 - s)B goes to B/2 and back, each way at a symmetric speed: half of the length is at 1/2.
    s = StepCurve(pull_back="length").parameter(inner, rho)
    covered = 4 * s * (1 - s) if s <= 0.5 else 2 - 4 * s * (1 - s)
    assert covered / 2 == pytest.approx(rho, rel=1e-9)


@pytest.mark.parametrize("polygon", [False, True])
@pytest.mark.parametrize("scale", [0.0, 1e-150, 1e-30, 1e140])
def test_length_pull_back_is_scale_invariant(polygon, scale):
    rows = scale * torch.tensor([[1.0, 0.0], [1.0, 3.0]], dtype=torch.float64)
    s = StepCurve(pull_back="length", polygon=polygon).parameter((rows @ rows.T).tolist(), 0.25)
    unit = rows / scale if scale else rows
    curve = path(Flat(2), unit, polygon, 2)
    assert s == (0.25 if scale == 0 else pytest.approx(float(curve.parameter_at_length(0.25)), rel=1e-9))


@pytest.mark.parametrize("pull_back", ["length"])
@pytest.mark.parametrize("polygon", [False, True])
def test_the_length_pull_back_satisfies_the_laws_of_rules(pull_back, polygon):
    rule = AsyncBezier(0.5, threshold=0.0, pull_back=pull_back, polygon=polygon)
    assert check_rule(rule, num_points=3, seeds=2, verbose=False).holds


@given(seed=seeds, **options)
def test_conflict_free_prefix_ends_before_the_first_conflicting_segment(seed, n, rho, kappa, polygon, threshold):
    given_ = update(seed, n)
    v = given_.points - given_.base
    products = legs((chords(v, kappa) @ (given_.current - given_.base)).tolist())
    agreeing = len(list(itertools.takewhile(lambda product: product >= 0, products)))
    rule = AsyncBezier(rho, threshold=threshold, pull_back="conflict_free_prefix", curve_weight=kappa, polygon=polygon)
    _, outcome = step(rule, given_)
    if kappa > 0:  # the legs of a chord are equal to rounding, and so are their products
        assert outcome.numbers["step"] == pytest.approx(min(rho, 1.0) * max(agreeing, 1) / n, rel=1e-15)
    rows = OrthoDC(threshold)(SPACE, given_.base, given_.current, v)
    expected = given_.current + path(SPACE, chords(rows, kappa), polygon)(outcome.numbers["step"])
    assert relative(outcome.model, expected) <= 1e-13


def test_conflict_free_prefix_of_a_fresh_update_is_the_whole_curve():
    base = draw(0, P)
    _, outcome = step(
        AsyncBezier(0.5, threshold=0.5, pull_back="conflict_free_prefix"), Update(0, base, base, draw(1, 3, P))
    )
    assert outcome.numbers["step"] == 0.5


@given(seeds, st.integers(1, 5), st.floats(0.01, 1.5), st.sampled_from(["chord", "none"]), st.booleans())
def test_curve_straightened_to_its_chord_gives_the_linear_step(seed, n, rate, pull_back, polygon):
    given_ = update(seed, n, weight=0.7)
    end = replace(given_, points=given_.points[-1:])
    for threshold, linear in ((-1.0, ASGD), (1.0, FedOrtho)):
        rule = AsyncBezier(rate, threshold=threshold, pull_back=pull_back, curve_weight=0, polygon=polygon)
        assert torch.equal(step(rule, given_)[1].model, step(linear(rate), end)[1].model)


@given(seeds, st.floats(0.01, 1))
def test_collinear_points_give_the_chord_for_every_interpretation(seed, rate):
    given_ = update(seed, 1)
    line = torch.stack([torch.lerp(given_.base, given_.points[0], (i + 1) / 4) for i in range(4)])
    for pull_back in ("chord", "none"):
        for polygon in (False, True):
            rule = AsyncBezier(rate, threshold=-1.0, pull_back=pull_back, polygon=polygon)
            _, outcome = step(rule, replace(given_, points=line))
            assert relative(outcome.model, step(ASGD(rate), given_)[1].model) <= 1e-12


def test_rate_above_one_extrapolates_the_curve_if_allowed():
    given_ = update(4)
    curve = path(SPACE, given_.points - given_.base, polygon=False)
    rule = AsyncBezier(1.5, threshold=-1.0, pull_back="none", overshoot="extend")
    weights = torch.tensor([2 * 1.5 * -0.5, 1.5**2], dtype=torch.float64)
    assert relative(step(rule, given_)[1].model, given_.current + weights @ (given_.points - given_.base)) <= 1e-13
    clamped = step(replace(rule, overshoot="clamp"), given_)[1].model
    assert relative(clamped, given_.current + curve(1.0)) <= 1e-13


@pytest.mark.parametrize("inner", [[[0.0]], [[0.0, 0.0], [0.0, 0.0]], [[4.0, 0.0], [0.0, 0.0]]])
def test_closed_polygon_does_not_move_the_model(inner):
    assert StepCurve(polygon=True).parameter(inner, 0.5) == 0


def test_polygon_may_repeat_its_start_or_a_corner():
    rows = torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 4.0], [6.0, 8.0]])
    course = StepCurve(polygon=True)
    inner = (rows @ rows.T).tolist()
    assert course.parameter(inner, 0.25) == pytest.approx(0.375)
    assert course.parameter(inner, 0.5) == pytest.approx(0.5)
    assert course.parameter(inner, 0.75) == pytest.approx(0.875)
    assert course.parameter([[1e300, 0.0], [0.0, 1e300]], 1e-160) == 0


@pytest.mark.parametrize("polygon", [False, True])
@pytest.mark.parametrize("pull_back", ["chord", "none", "conflict_free_prefix", "length"])
@pytest.mark.parametrize("kappa", [0.0, 0.4, 1.0])
def test_step_on_a_sphere_follows_its_curve(polygon, pull_back, kappa):
    space = Sphere(P)
    here, *points = (draw(9, 4, P) / draw(9, 4, P).norm(dim=1, keepdim=True)).unbind()
    points = space.exp(here.expand(3, -1), 0.3 * space.log(here.expand(3, -1), torch.stack(points)))
    given_ = Update(0, here, here, points)
    bent = space.exp(here.expand(3, -1), chords(space.log(here.expand(3, -1), points), kappa))
    curve = (Piecewise(space, degree=1, pieces=3) if polygon else Bezier(space, 3)).at(torch.cat([here[None], bent]))
    rule = AsyncBezier(0.5, threshold=-1.0, pull_back=pull_back, curve_weight=kappa, polygon=polygon)
    _, outcome = step(rule, given_, space=space)
    # Of a geodesic, formed in one step there and by three here, a few roundings.
    assert relative(outcome.model, curve(outcome.numbers["step"])) <= 1e-12
    if pull_back == "chord":
        assert float(distance(space, here, outcome.model) / distance(space, here, points[-1])) == pytest.approx(0.5)
    elif pull_back == "length":
        covered = curve.length(0.0, outcome.numbers["step"]) / curve.length()
        assert float(covered) == pytest.approx(0.5, rel=1e-9)
    else:
        assert outcome.numbers["step"] == 0.5


def test_conflict_free_prefix_on_a_sphere_uses_the_transported_drift():
    space = Sphere(3)
    base = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    u = torch.tensor([[0.1, 0.0, 0.0], [0.2, 0.1, 0.0], [0.1, 0.2, 0.0]], dtype=torch.float64)
    ahead, back = (space.exp(base, x * u[0]) for x in (1.0, -1.0))
    points = space.exp(base.expand(3, -1), u)
    rule = AsyncBezier(0.6, threshold=-1.0, pull_back="conflict_free_prefix", polygon=True)
    assert step(rule, Update(0, base, ahead, points), space=space)[1].numbers["step"] == pytest.approx(0.4)
    assert step(rule, Update(0, base, back, points), space=space)[1].numbers["step"] == pytest.approx(0.2)


@given(seeds)
def test_automatic_curve_weight_depends_on_the_mean_cosine(seed):
    rule = AsyncBezier(0.5, threshold=-1.0, pull_back="none", curve_weight="auto")
    state = None
    products, lengths = [], []
    for i in range(5):
        given_ = update(seed + 7 * i)
        kappa = 1 - sum(products) / sum(lengths) if lengths else 0.0
        fixed = AsyncBezier(0.5, threshold=-1.0, pull_back="none", curve_weight=min(max(kappa, 0.0), 1.0))
        state, outcome = step(rule, given_, state)
        assert relative(outcome.model, step(fixed, given_)[1].model) <= 1e-12
        v = given_.points[-1] - given_.base
        g = given_.current - given_.base
        products = [0.98 * x for x in products] + [(v @ g).item()]
        lengths = [0.98 * x for x in lengths] + [(v.norm() * g.norm()).item()]


def test_run_without_staleness_follows_its_chords():
    rule = AsyncBezier(0.5, threshold=-1.0, pull_back="none", curve_weight="auto")
    server = Server(SPACE, rule, draw(0, P))
    straight = Server(SPACE, ASGD(0.5), draw(0, P))
    for i in range(4):
        points = server.model + draw(i + 1, 3, P)
        assert server.receive(server.dispatch("a"), Payload(points, 1)).accepted
        assert straight.receive(straight.dispatch("a"), Payload(points[-1:], 1)).accepted
        assert torch.equal(server.model, straight.model)


@law
def progress_is_divided_by_the_mean_of_those_before(k):
    rule = k.AsyncBezier(0.1, threshold=-1.0, pull_back="none", normalise=True)
    state = None
    paces = [2.0, 1.0, 6.0, 3.0]
    for i, pace in enumerate(paces):
        given_ = update(i, 2, numbers={"progress": pace})
        state, outcome = step(rule, given_, state)
        mean = sum(paces[:i]) / i if i else pace
        assert outcome.numbers["step"] == pytest.approx(0.1 * mean / pace, rel=1e-12)
        assert state["progress"] == pytest.approx(sum(paces[: i + 1]) / (i + 1), rel=1e-12)


@law
def the_mean_progress_follows_a_run_that_slows_down(k):
    rule = k.AsyncBezier(0.1, threshold=-1.0, pull_back="none", normalise=True)
    given_ = update(0, numbers={"progress": 1.0})
    state, _ = step(rule, given_, {"version": 5000, "progress": 2.0})
    assert state["progress"] == pytest.approx(1.99)


@law
def the_rate_is_the_parameter(k):
    given_ = update(2)
    assert step(k.AsyncBezier(0.3, threshold=-1.0, pull_back="none"), given_)[1].numbers["step"] == 0.3


@law
def half_the_length_is_half_the_way_along_the_curve(k):
    given_ = update(2)
    curve = path(SPACE, given_.points - given_.base, polygon=False)
    _, outcome = step(k.AsyncBezier(0.5, threshold=-1.0, pull_back="length"), given_)
    expected = given_.current + curve(float(curve.parameter_at_length(0.5)))
    assert relative(outcome.model, expected) <= 1e-10


@law
def whoever_disagrees_from_the_start_takes_one_leg(k):
    base, current = draw(3, 2, P)
    points = base - torch.outer(torch.arange(1.0, 5.0), current - base)
    rule = k.AsyncBezier(0.5, threshold=-1.0, pull_back="conflict_free_prefix", polygon=True)
    _, outcome = step(rule, Update(0, base, current, points))
    assert outcome.numbers["step"] == 0.125


@law
def corners_are_reached_one_after_the_other(k):
    given_ = update(5, 4)
    for i in range(4):
        rule = k.AsyncBezier((i + 1) / 4, threshold=-1.0, pull_back="none", polygon=True)
        expected = given_.current + given_.points[i] - given_.base
        assert relative(step(rule, given_)[1].model, expected) <= 1e-14


@law
def a_curve_weight_of_one_half_is_halfway_to_the_chord(k):
    given_ = update(6, 3)
    curve, half, chord = (
        step(k.AsyncBezier(0.4, threshold=-1.0, pull_back="none", curve_weight=bend), given_)[1].model
        for bend in (1.0, 0.5, 0.0)
    )
    assert relative(half, (curve + chord) / 2) <= 1e-14


@law
def a_run_that_agrees_with_itself_is_not_bent(k):
    rule = k.AsyncBezier(0.4, threshold=-1.0, pull_back="none", curve_weight="auto")
    base = draw(8, P)
    ahead = torch.stack([draw(9, P), torch.ones(P, dtype=torch.float64)])
    agreeing = Update(0, base, base + 1, base + ahead)
    opposed = Update(0, base, base - 1, base + ahead)
    for given_, bend in ((agreeing, 0.0), (opposed, 1.0)):
        state, _ = step(rule, given_)
        fixed = AsyncBezier(0.4, threshold=-1.0, pull_back="none", curve_weight=bend)
        assert relative(step(rule, given_, state)[1].model, step(fixed, given_)[1].model) <= 1e-12


@caught_by("AsyncBezier", "progress_is_divided_by_the_mean_of_those_before")
class CountsItsOwnProgressInTheMean(AsyncBezier):
    def step_size(self, state, update, penalty):
        own = self.next_state(state, update, None) if self.normalise else {}
        return super().step_size(state | own, update, penalty)


@caught_by("AsyncBezier", "progress_is_divided_by_the_mean_of_those_before")
class MultipliesByTheProgress(AsyncBezier):
    def step_size(self, state, update, penalty):
        pace = update.numbers.get("progress", 1.0)
        return super().step_size(
            state, replace(update, numbers={"progress": state.get("progress", pace) ** 2 / pace}), penalty
        )


@caught_by("AsyncBezier", "the_mean_progress_follows_a_run_that_slows_down")
class RemembersAllProgress(AsyncBezier):
    def next_state(self, state, update, corrected):
        pace = update.numbers.get("progress", 1.0)
        count = state["version"] + 1
        return {"progress": state.get("progress", 0.0) * (count - 1) / count + pace / count} if self.normalise else {}


@caught_by("AsyncBezier", "the_rate_is_the_parameter", "corners_are_reached_one_after_the_other")
class AlwaysPullsBack(AsyncBezier):
    def step_curve(self, state):
        course = super().step_curve(state)
        return replace(course, pull_back="chord") if course.pull_back == "none" and course.curve_weight == 1 else course


@caught_by("AsyncBezier", "half_the_length_is_half_the_way_along_the_curve")
class MeasuresTheChordInPlaceOfTheLength(AsyncBezier):
    def step_curve(self, state):
        course = super().step_curve(state)
        return replace(course, pull_back="chord") if course.pull_back == "length" else course


class Stops(StepCurve):
    def conflict_free_fraction(self, drift_products):
        return super().conflict_free_fraction(drift_products) if legs(drift_products)[0] >= 0 else 0.0


@caught_by("AsyncBezier", "whoever_disagrees_from_the_start_takes_one_leg")
class StopsAtOnce(AsyncBezier):
    def step_curve(self, state):
        return Stops(**vars(super().step_curve(state)))


@caught_by("AsyncBezier", "corners_are_reached_one_after_the_other", "whoever_disagrees_from_the_start_takes_one_leg")
class ForgetsHowPointsAreRead(AsyncBezier):
    def step_curve(self, state):
        course = super().step_curve(state)
        return replace(course, polygon=False, pull_back="none")


@caught_by(
    "AsyncBezier", "a_curve_weight_of_one_half_is_halfway_to_the_chord", "a_run_that_agrees_with_itself_is_not_bent"
)
class InvertsTheCurveWeight(AsyncBezier):
    def step_curve(self, state):
        course = super().step_curve(state)
        return (
            course
            if course.curve_weight == 1 and not isinstance(self.curve_weight, str)
            else replace(course, curve_weight=1 - course.curve_weight**2)
        )


test_every_law_holds, test_every_mutant_is_caught_by_its_laws = CATALOGUE.tests()


@pytest.mark.parametrize("name", GOLDEN)
def test_step_reads_and_writes_each_vector_once(name):
    rule = GOLDEN[name]
    server = Server(Flat(SIZE), rule, draw(0, SIZE, dtype=torch.float32))
    tickets = [server.dispatch(client) for client in "ab"]
    for i, ticket in enumerate(tickets):
        points = ticket.message.start + draw(i, 2, SIZE, dtype=torch.float32)
        with counted() as words:
            receipt = server.receive(ticket, Payload(points, 1, numbers=dict(ticket.message.numbers)))
        assert receipt.accepted, receipt.reason
        assert (words.grams, words.combines) == (1, 1)


def test_progress_is_requested_and_validated():
    server = Server(SPACE, AsyncBezier(0.5, threshold=-1.0, pull_back="none", normalise=True), draw(0, P))
    ticket = server.dispatch("a")
    assert ticket.message.numbers == {"progress": 1.0}
    points = draw(1, 2, P)
    for wrong in ({}, *({"progress": pace} for pace in (0.0, -1.0, math.nan, math.inf, 1e-200, 1e200))):
        receipt = server.receive(ticket, Payload(points, 1, numbers=wrong))
        assert not receipt.accepted
        assert "progress" in receipt.reason
    assert server.receive(ticket, Payload(points, 1, numbers={"progress": 1e-100})).accepted
    assert server.receive(server.dispatch("b"), Payload(points, 1, numbers={"progress": 1e100})).accepted
    assert Server(SPACE, AsyncBezier(), draw(0, P)).dispatch("a").message.numbers == {}


@pytest.mark.parametrize("lie", [1e-100, 1e100])
def test_one_false_progress_value_has_bounded_influence(lie):
    rule = AsyncBezier(0.1, threshold=-1.0, pull_back="none", normalise=True)
    server = Server(SPACE, rule, draw(0, P), weights=dict.fromkeys(range(10), 1))

    def send(client, pace):
        ticket = server.dispatch(client)
        points = ticket.message.start + draw(client, 2, P)
        return server.receive(ticket, Payload(points, 1, numbers={"progress": pace})).check().step

    assert [send(client % 10, 1.0) for client in range(100)] == pytest.approx([0.01] * 100)
    assert send(9, lie) == pytest.approx(0.01 * (100 if lie < 1 else 0.01))
    # The mean of a hundred has one in it that counts for a hundred, or for nothing.
    assert send(0, 1.0) == pytest.approx(0.01 * (1.98 if lie > 1 else 0.99), rel=0.02)


def test_progress_requested_later_starts_with_the_first_value():
    rule = AsyncBezier(0.5, threshold=-1.0, pull_back="none", normalise=True)
    start = draw(0, P)
    update = Update(client="a", base=start, current=start, points=(draw(1, P),), numbers={"progress": 4.0})
    state, outcome = rule.step(SPACE, {"version": 500}, update)
    assert (state["progress"], outcome.numbers["step"]) == (4.0, 0.5)


def test_trajectory_returns_its_progress_and_its_corners():
    rule = AsyncBezier(0.5, threshold=-1.0, pull_back="none", polygon=True, normalise=True)
    start = draw(0, P)
    server = Server(SPACE, rule, start)
    trainer = Trajectory(pieces=4, steps=8, optimizer=torch.optim.SGD, rate=0.1)
    ticket = server.dispatch("a")
    data = [(torch.zeros(1, P), torch.zeros(1))]
    payload = trainer.train(
        SPACE, ticket.message, lambda x, batch: x.square().sum() / 2, data, None, generator=torch.Generator()
    )
    assert payload.numbers == {"progress": pytest.approx(0.8)}
    server.receive(ticket, payload).check()
    # Halfway along the path are four of its eight steps.
    assert relative(server.model, 0.9**4 * start) <= 1e-14


@settings(max_examples=5)
@given(seeds)
def test_defaults_equal_those_of_the_paper(seed):
    given_ = update(seed, 3)
    plain = step(AsyncCorrected(0.7, correction=OrthoDC(0.0)), given_)[1]
    assert torch.equal(step(AsyncBezier(0.7, threshold=0.0), given_)[1].model, plain.model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pull_back": "arc"}, "pull_back: expected one of"),
        ({"curve_weight": -0.1}, "curve_weight: expected"),
        ({"curve_weight": 1.5}, "curve_weight: expected"),
        ({"curve_weight": "none"}, r"curve_weight: expected a number in \[0, 1\] or 'auto', got 'none'"),
        ({"normalise": None}, "normalise: expected"),
        ({"polygon": "yes"}, "polygon: expected"),
        (
            {"overshoot": "extend", "polygon": True},
            "overshoot: expected 'clamp', as a polygon has no extension",
        ),
        (
            {"overshoot": "extend", "pull_back": "conflict_free_prefix"},
            "overshoot: expected 'clamp'.*the conflict-free prefix",
        ),
    ],
)
def test_invalid_options_are_rejected(options, message):
    with pytest.raises(ArgumentError, match=message):
        AsyncBezier(**options)
