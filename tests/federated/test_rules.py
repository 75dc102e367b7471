"""Rules: closed forms of one step, equivalences between rules, and what they refuse."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.corrections import OrthoDC
from manifoldagg.curves import Bezier, parameter_at_distance
from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Rule, Update
from manifoldagg.federated.rules import AsyncBezier, FedAsync, FedGS, FedOrtho
from manifoldagg.federated.rules._step import staleness_penalty
from manifoldagg.federated.staleness import Constant, Hinge, Polynomial
from manifoldagg.manifolds import Flat, Manifold
from tests.support import draw, relative, seeds

SPACE = Flat(9)
RULES = [FedAsync(0.5), FedOrtho(0.5), FedGS(0.5), AsyncBezier(0.5)]


def update(seed, n=1, dtype=torch.float64, **known):
    base, current = draw(seed, 2, 9, dtype=dtype)
    return Update(client=0, base=base, current=current, points=draw(seed + 1, n, 9, dtype=dtype), **known)


def step(rule, given_, state=None):
    state = rule.init(SPACE, given_.base) if state is None else state
    return rule.step(SPACE, state, given_)


@given(seeds, st.floats(0.01, 1), st.integers(0, 9))
def test_fedasync_mixes_models(seed, rate, late):
    given_ = update(seed, staleness=late)
    for staleness in (Constant(), Hinge(0.5, 3.0), Polynomial(0.5)):
        mixing = rate * staleness(late)
        _, outcome = step(FedAsync(rate, staleness=staleness), given_)
        assert relative(outcome.model, (1 - mixing) * given_.current + mixing * given_.points[0]) <= 1e-14


@given(seeds)
def test_fedasync_at_rate_one_is_the_clients_model_bit_for_bit(seed):
    given_ = update(seed, dtype=torch.float32)
    assert torch.equal(step(FedAsync(1.0), given_)[1].model, given_.points[0])


@given(seeds, st.floats(0.01, 1), st.floats(0.01, 1))
def test_linear_rules_step_along_the_corrected_displacement(seed, rate, weight):
    given_ = update(seed, weight=weight)
    v = given_.points - given_.base
    for rule, threshold in ((FedOrtho(rate), 1.0), (FedGS(rate), 0.0)):
        corrected = OrthoDC(threshold)(SPACE, given_.base, given_.current, v)[0]
        _, outcome = step(rule, given_)
        assert relative(outcome.model, given_.current + rate * weight * corrected) <= 1e-14


@given(seeds)
def test_surgery_on_the_position_reads_another_update(seed):
    given_ = update(seed)
    g, v = given_.current - given_.base, given_.points[0] - given_.current
    expected = given_.current + 0.5 * (v - min(0.0, (v @ g).item()) / (g @ g) * g)
    assert relative(step(FedGS(0.5, reading="position"), given_)[1].model, expected) <= 1e-13


@given(seeds, st.integers(1, 4), st.floats(0.01, 1.5), st.sampled_from([-1.0, 0.0, 1.0]), st.floats(0, 1))
def test_asyncbezier_is_the_paper_step_by_step(seed, n, rate, threshold, decay):
    """Manifold Algorithm 1, written out with materialised vectors."""
    given_ = update(seed, n)
    psi = OrthoDC(threshold)(SPACE, given_.base, given_.current, given_.points - given_.base)
    candidate, drift = psi[-1].norm().item(), (given_.current - given_.base).norm().item()
    penalty = min(10.0, 1 + decay * (candidate / drift - 1))
    s = parameter_at_distance(psi, penalty * rate)
    curve = torch.cat([given_.current[None], given_.current + psi])
    _, outcome = step(AsyncBezier(rate, threshold=threshold, decay=decay), given_)
    assert relative(outcome.model, Bezier(SPACE, n)(curve, s)) <= 1e-12
    assert outcome.numbers["step"] == pytest.approx(s, rel=1e-9)
    assert outcome.numbers["norm"] == pytest.approx((outcome.model - given_.current).norm().item(), rel=1e-9)


@given(seeds, st.floats(0.01, 1))
def test_a_control_point_at_the_middle_makes_asyncbezier_fedortho(seed, rate):
    given_ = update(seed)
    middle = (given_.base + given_.points[0]) / 2
    curve = Update(0, given_.base, given_.current, torch.stack([middle, given_.points[0]]))
    assert relative(step(AsyncBezier(rate), curve)[1].model, step(FedOrtho(rate), given_)[1].model) <= 1e-12


@given(seeds, st.sampled_from(RULES), st.sampled_from([torch.float32, torch.float64]))
def test_a_step_writes_only_into_out(seed, rule, dtype):
    given_ = update(seed, dtype=dtype)
    kept = [t.clone() for t in (given_.base, given_.current, given_.points)]
    state = rule.init(SPACE, given_.base)
    out = torch.full((9,), float("nan"), dtype=dtype)
    after, outcome = rule.step(SPACE, state, given_, out=out)
    assert outcome.model is out
    assert torch.equal(out, step(rule, given_)[1].model)
    assert out.dtype == dtype
    assert all(torch.equal(a, b) for a, b in zip(kept, (given_.base, given_.current, given_.points), strict=True))
    assert (state, after) == ({"version": 0}, {"version": 1})


def test_rates_can_follow_the_version():
    asked = []
    rule = FedOrtho(rate=lambda version: asked.append(version) or 0.5)
    state, _ = step(rule, update(0))
    step(rule, update(1), state)
    assert asked == [0, 1]


def test_penalties():
    assert staleness_penalty(0.0, 5.0, 1.0) == 1.0
    assert staleness_penalty(1.0, 5.0, 0.0) == 1.0
    assert staleness_penalty(0.5, 3.0, 1.0) == 2.0
    far = update(0)
    near = Update(0, far.current + 1e-9 * far.base, far.current, far.points)
    assert step(AsyncBezier(0.01, decay=1.0), near)[1].numbers["rate"] == pytest.approx(0.1)
    assert step(AsyncBezier(0.01, decay=1.0, penalty_limit=3.0), near)[1].numbers["rate"] == pytest.approx(0.03)


def test_a_rate_above_one_is_clamped_or_extends():
    given_ = update(0)
    corrected = OrthoDC(1.0)(SPACE, given_.base, given_.current, given_.points - given_.base)[0]
    assert relative(step(FedOrtho(3.0), given_)[1].model, given_.current + corrected) <= 1e-14
    extended = step(FedOrtho(3.0, overshoot="extend"), given_)[1].model
    assert relative(extended, given_.current + 3 * corrected) <= 1e-14


@pytest.mark.parametrize("rule", RULES)
def test_an_update_that_did_not_move_leaves_the_model(rule):
    base = draw(0, 9)
    still = Update(0, base, base, base[None])
    _, outcome = step(rule, still)
    assert torch.equal(outcome.model, base)
    assert math.isnan(outcome.numbers["cosine"])


def test_fedasync_takes_the_clients_model_from_far_away():
    """The base drops out of the position reading to the last digit."""
    given_ = Update(0, *(torch.tensor([x], dtype=torch.float64) for x in (1e20, 3.0)), torch.tensor([[1.0]]).double())
    assert step(FedAsync(1.0), given_)[1].model.item() == 1.0


@given(seeds, st.floats(-12, -3))
def test_small_corrections_keep_their_size(seed, exponent):
    """An update that is nearly the current model, or nearly parallel to the drift, moves by what is left of it."""
    base, current, other = draw(seed, 3, 9)
    near = (current + 10**exponent * other)[None]
    _, outcome = step(FedAsync(1.0), Update(0, base, current, near))
    exact = (near[0] - current).norm().item()
    assert outcome.numbers["norm"] == pytest.approx(exact, rel=1e-9)
    assert (outcome.model - near[0]).norm().item() <= 1e-15 * near.norm().item()
    curve = torch.stack([base + 0.5 * (near[0] - base) + 10**exponent * draw(seed + 1, 9), near[0]])
    _, outcome = step(AsyncBezier(0.3), Update(0, base, current, curve))
    g = current - base
    v = curve - base - ((curve - base) @ g / (g @ g))[:, None] * g
    reached = Bezier(SPACE, 2)(torch.cat([0 * v[:1], v]), outcome.numbers["step"]).norm() / v[-1].norm()
    # v itself is only known to ε‖curve − base‖.
    assert reached.item() == pytest.approx(0.3, rel=1e-9 + 1e-14 / 10**exponent)


@pytest.mark.usefixtures("as_shipped")
def test_a_step_has_no_derivative_and_says_so():
    base, current, point = draw(0, 3, 9)

    def model(p):
        return step(FedOrtho(1.0), Update(0, base, current, p[None]))[1].model

    assert not model(point.clone().requires_grad_()).requires_grad
    with pytest.raises(ArgumentError, match="update: a server step has no derivative"):
        torch.func.jvp(model, (point,), (point,))


def test_staleness_weights():
    assert [Hinge(10.0, 4.0)(x) for x in (0, 4, 5)] == [1.0, 1.0, 1 / 11]
    assert Polynomial(1.0)(1) == 0.5
    assert all(isinstance(rule, Rule) for rule in RULES)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: FedAsync(0.0), "rate: expected a finite number > 0"),
        (lambda: FedAsync(staleness=0.5), "staleness: expected a function of an int, got 0.5"),
        (lambda: FedOrtho(-1.0), "rate: expected"),
        (lambda: step(FedOrtho(lambda version: "fast"), update(0)), "rate: expected a finite number, got 'fast'"),
        (lambda: FedOrtho(decay=2.0), "decay: expected"),
        (lambda: FedGS(reading="sideways"), "reading: expected one of tangent, position"),
        (lambda: AsyncBezier(threshold=-2.0), "threshold: expected"),
        (lambda: AsyncBezier(overshoot="jump"), "overshoot: expected one of"),
        (lambda: AsyncBezier(penalty_limit=0.0), "penalty_limit: expected"),
        (lambda: Hinge(a=-1.0), "a: expected"),
        (lambda: step(FedOrtho(0.5), update(0, n=2)), "points: FedOrtho expects one model"),
        (lambda: step(AsyncBezier(0.5), update(0, n=0)), "points: AsyncBezier expects at least one"),
        (lambda: step(FedOrtho(lambda version: -1.0), update(0)), "rate: step size: expected"),
        (lambda: FedAsync(0.5).init(type("Curved", (Manifold,), {"shape": (2,)})(), torch.zeros(2)), "space: expected a flat"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
