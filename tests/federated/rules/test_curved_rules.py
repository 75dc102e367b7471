"""Tests of rules on curved parameter spaces.

The steps use exp, log and transport of the space, and some options are rejected.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldagg.corrections import DelayCompensated, OrthoDC, OrthoDyn, Position
from manifoldagg.curves import Bezier
from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Message, Payload, Server, Update, aggregate
from manifoldagg.federated.rules import (
    ASGD,
    DCASGD,
    AsyncBezier,
    AsyncCorrected,
    AsyncKrylov,
    FedAdam,
    FedAsync,
    FedAvg,
    FedBuff,
    FedGS,
    FedOrtho,
    Momentum,
)
from manifoldagg.federated.rules._riemannian_step import parameter_at_distance_on
from manifoldagg.manifolds import (
    Flat,
    ParameterSpace,
    PoincareBall,
    SpecialOrthogonal,
    Sphere,
    Stiefel,
    SymmetricPositiveDefinite,
    check_point,
    distance,
    norm,
)
from tests.support import draw, relative, rotation, seeds

pytestmark = pytest.mark.usefixtures("as_shipped")

TENSORS = {
    "turn": torch.eye(3),
    "directions": torch.ones(2, 4) / 2,
    "w": torch.zeros(2, 3),
    "metric": torch.eye(2),
    "ball": torch.zeros(3),
}
LEAVES = {
    "turn": SpecialOrthogonal(3),
    "directions": Sphere(4),
    "metric": SymmetricPositiveDefinite(2),
    "ball": PoincareBall(3),
}
SPACE = ParameterSpace.of_state_dict({name: t.double() for name, t in TENSORS.items()}, LEAVES)
NARROW = ParameterSpace.of_state_dict(TENSORS, LEAVES)
FRAMES = ParameterSpace.of_state_dict(
    {"frame": torch.eye(4, 2).double(), "b": torch.zeros(2).double()}, {"frame": Stiefel(4, 2)}
)
RULES = [
    FedAsync(0.5),
    ASGD(0.5),
    FedOrtho(0.5),
    FedGS(0.5),
    FedGS(0.5, update_form="position"),
    AsyncBezier(0.5),
    AsyncBezier(0.5, threshold=0.0, decay=1.0),
    AsyncBezier(0.5, threshold=-1.0),
    AsyncCorrected(0.5, correction=OrthoDC(0.5, granularity="tensor")),
    AsyncKrylov(0.5),
    AsyncCorrected(0.5, correction=DelayCompensated(0.3, form="outer")),
    AsyncCorrected(0.5, correction=OrthoDyn(schedule=lambda version: "position")),
    FedBuff(1, 0.5),
    FedAvg(1, 0.5),
    Momentum(ASGD(0.5)),
]


def scene(seed, n=1, space=SPACE, size=0.3, dtype=torch.float64):
    """Return a base, a current point and control points with mutual distances of about `size`."""
    generator = torch.Generator().manual_seed(seed)
    base = space.random_point(generator=generator, dtype=torch.float64)
    at = base.expand(n + 1, -1)
    u = space.random_tangent(at, generator)
    u = size * u / norm(space, at, u)[:, None]
    points = space.project(space.exp(at, u))
    return Update(0, base.to(dtype), points[0].to(dtype), points[1:].to(dtype))


def move(rule, given_, space=SPACE):
    return rule.step(space, rule.init(space, given_.current), given_)[1]


ON_FRAMES = [FedAsync(0.5), AsyncBezier(0.5), FedBuff(1, 0.5)]
CASES = [*((SPACE, rule) for rule in RULES), *((FRAMES, rule) for rule in ON_FRAMES)]


@pytest.mark.parametrize(("space", "rule"), CASES, ids=lambda x: type(x).__name__)
@settings(max_examples=1)
@given(seed=seeds)
def test_step_stays_on_the_space_and_has_the_reported_length(space, rule, seed):
    curves = (2,) if space is FRAMES else (1, 2)
    for n in (1,) if getattr(rule, "single_point", True) else curves:
        given_ = scene(seed, n, space)
        kept = [t.clone() for t in (given_.base, given_.current, given_.points)]
        outcome = move(rule, given_, space)
        check_point(space, outcome.model)
        # A Stiefel log is an iteration, to 1e-10.
        away = float(distance(space, given_.current, outcome.model))
        assert outcome.numbers["norm"] == pytest.approx(away, rel=1e-8)
        assert ("rungs" in outcome.numbers) == (space is FRAMES)
        assert all(torch.equal(a, b) for a, b in zip(kept, (given_.base, given_.current, given_.points), strict=True))


@settings(max_examples=4)
@given(seeds, st.floats(0.1, 1.0))
def test_fedasync_follows_the_geodesic_to_the_client_model(seed, rate):
    given_ = scene(seed)
    expected = SPACE.exp(given_.current, rate * SPACE.log(given_.current, given_.points[0]))
    assert relative(move(FedAsync(rate), given_).model, expected) <= 1e-9
    assert relative(move(FedAsync(1.0), given_).model, given_.points[0]) <= 1e-9


@settings(max_examples=4)
@given(seeds, st.floats(0.1, 1.0))
def test_asgd_and_fedortho_step_along_transported_displacements(seed, rate):
    given_ = scene(seed)
    base, current = given_.base, given_.current
    v = SPACE.transport(base, current, SPACE.log(base, given_.points[0]))
    g = -SPACE.log(current, base)
    assert relative(move(ASGD(rate), given_).model, SPACE.exp(current, rate * v)) <= 1e-9
    bare = v - SPACE.inner(current, v, g) / SPACE.inner(current, g, g) * g
    assert relative(move(FedOrtho(rate), given_).model, SPACE.exp(current, rate * bare)) <= 1e-9
    after = SPACE.log(current, move(FedOrtho(rate), given_).model)
    assert abs(float(SPACE.inner(current, after, g))) <= 1e-9


@settings(max_examples=2)
@given(seeds, st.floats(0.1, 0.9), st.sampled_from([-1.0, 0.0, 1.0]))
def test_asyncbezier_covers_the_rate_of_the_distance_to_the_candidate(seed, rate, threshold):
    """Manifold (12), with distances of the space."""
    given_ = scene(seed, 2)
    base, current = given_.base, given_.current
    rows = SPACE.log(base.expand(2, -1), given_.points)
    u = OrthoDC(threshold)(SPACE, base, current, rows)
    phi = torch.cat([current[None], SPACE.exp(current.expand(2, -1), u)])
    outcome = move(AsyncBezier(rate, threshold=threshold), given_)
    part = distance(SPACE, current, outcome.model) / distance(SPACE, current, phi[-1])
    assert float(part) == pytest.approx(rate, rel=1e-8)
    assert relative(outcome.model, Bezier(SPACE, 2)(phi, outcome.numbers["step"])) <= 1e-9
    # It is the first such place.
    earlier = Bezier(SPACE, 2)(phi, torch.linspace(0, 0.999, 40).double() * outcome.numbers["step"])
    assert bool((distance(SPACE, current.expand_as(earlier), earlier) < rate * distance(SPACE, current, phi[-1])).all())


@settings(max_examples=4)
@given(seeds, st.floats(0.05, 0.95))
def test_pulled_back_rate_of_a_geodesic_equals_the_rate(seed, rho):
    """For equally spaced control points on a geodesic, s = ρ."""
    space = Sphere(4)
    generator = torch.Generator().manual_seed(seed)
    x = space.random_point(generator=generator, dtype=torch.float64)
    u = space.random_tangent(x, generator)
    u = u / u.norm()
    phi = torch.stack([space.exp(x, i / 2 * u) for i in range(3)])
    assert parameter_at_distance_on(Bezier(space, 2), phi, rho) == pytest.approx(rho, rel=1e-9)


def test_pulled_back_rate_is_exact_at_zero_and_one():
    space = Sphere(3)
    x, y, z = torch.eye(3, dtype=torch.float64)
    curve = Bezier(space, 2)
    assert parameter_at_distance_on(curve, torch.stack([x, y, z]), 0.0) == 0.0
    assert parameter_at_distance_on(curve, torch.stack([x, y, x]), 0.5) == 0.0
    assert parameter_at_distance_on(curve, torch.stack([x, (x + z) / 2**0.5, z]), 1.0) == pytest.approx(1.0, abs=1e-8)


@pytest.mark.parametrize("rule", [FedAsync(0.3), FedOrtho(0.3), FedBuff(1, 0.3), AsyncBezier(0.3)], ids=str)
def test_step_is_equivariant_under_rotations(rule):
    space = ParameterSpace.of_state_dict({"x": torch.ones(4).double() / 2}, {"x": Sphere(4)})
    given_, q = scene(3, space=space), rotation(8, 4)
    turned = Update(0, given_.base @ q, given_.current @ q, given_.points @ q)
    assert relative(move(rule, turned, space).model, move(rule, given_, space).model @ q) <= 1e-9


@pytest.mark.parametrize("rule", [FedAsync(0.3), ASGD(0.3), FedOrtho(0.3), FedGS(0.3), FedBuff(1, 0.3)], ids=str)
def test_flat_leaves_move_as_on_a_flat_space_if_curved_leaves_rest(rule):
    given_ = scene(1)
    part = slice(17, 23)
    rows = draw(2, 3, 6)
    base, current, point = (given_.base.clone() for _ in range(3))
    for x, row in zip((base, current, point), rows, strict=True):
        x[part] = row
    model = move(rule, Update(0, base, current, point[None])).model
    flat = Flat(6)
    expected = move(rule, Update(0, rows[0], rows[1], rows[2:]), flat).model
    assert relative(model[part], expected) <= 1e-12
    others = torch.ones(len(model), dtype=torch.bool)
    others[part] = False
    assert relative(model[others], given_.base[others]) <= 1e-14


@pytest.mark.parametrize("rule", [FedAvg(3, 0.8), FedBuff(3, 0.8)], ids=str)
@settings(max_examples=3)
@given(seed=seeds)
def test_buffers_average_transported_logs_at_the_current_point(rule, seed):
    current = scene(seed).current
    state, mean, shares = rule.init(SPACE, current), 0.0, 0.0
    for i in range(3):
        generator = torch.Generator().manual_seed(seed + i)
        base = SPACE.project(SPACE.exp(current, 0.05 * SPACE.random_tangent(current, generator)))
        point = SPACE.project(SPACE.exp(base, 0.05 * SPACE.random_tangent(base, generator)))
        state, outcome = rule.step(SPACE, state, Update(i, base, current, point[None], staleness=i, weight=i + 1.0))
        share = (i + 1) ** -0.5 if isinstance(rule, FedBuff) else i + 1.0
        mean = mean + share * SPACE.transport(base, current, SPACE.log(base, point))
        shares += share
    expected = SPACE.exp(current, 0.8 * mean / (3 if isinstance(rule, FedBuff) else shares))
    assert relative(outcome.model, expected) <= 1e-9


def test_a_cohort_at_one_base_is_a_step_of_the_karcher_mean():
    """At the Karcher mean of the client models, the mean of the logs is zero, so FedAvg does not move."""
    space = ParameterSpace.of_state_dict({"x": torch.ones(3).double() / 3**0.5}, {"x": Sphere(3)})
    mean = torch.tensor([0.0, 0.0, 1.0]).double()
    clients = [
        space.exp(mean, 0.4 * torch.tensor([math.cos(t), math.sin(t), 0.0]).double())
        for t in (0.0, 2 * math.pi / 3, 4 * math.pi / 3)
    ]
    rule = FedAvg(3)
    state = rule.init(space, mean)
    for client in clients:
        state, outcome = rule.step(space, state, Update(0, mean, mean, client[None]))
    assert relative(outcome.model, mean) <= 1e-14


def test_momentum_is_transported_along_the_step():
    """On a great circle, transported momenta add up like angles."""
    space = ParameterSpace.of_state_dict({"x": torch.tensor([1.0, 0.0, 0.0]).double()}, {"x": Sphere(3)})

    def at(angle):
        return torch.tensor([math.cos(angle), math.sin(angle), 0.0], dtype=torch.float64)

    rule, angle, velocity = Momentum(ASGD(1.0), beta=0.5), 0.0, 0.0
    state = rule.init(space, at(0.0))
    for _ in range(4):
        velocity = 0.5 * velocity + 0.1
        state, outcome = rule.step(space, state, Update(0, at(angle), at(angle), at(angle + 0.1)[None]))
        angle += velocity
        assert relative(outcome.model, at(angle)) <= 1e-9
        assert outcome.numbers["norm"] == pytest.approx(velocity, rel=1e-9)


class AheadOfTheModel(Momentum):
    r"""Rule whose clients start at $\exp_\Theta \beta u$, the point to which the momentum alone moves the model."""

    def message(self, space, state, current, client_state):
        u = state.get("velocity", torch.zeros_like(current))
        return Message(space.exp(current, self.beta * u))


def test_rule_may_send_a_point_ahead_of_the_model():
    given_ = scene(3)
    server = Server(SPACE, AheadOfTheModel(ASGD(1.0), beta=0.5), given_.current)
    ticket = server.dispatch("a")
    assert relative(ticket.message.start, given_.current) <= 1e-12
    assert server.receive(ticket.id, Payload(given_.points, 1)).accepted
    start = server.dispatch("a").message.start
    check_point(SPACE, start)
    # The velocity of one step was carried along it, and keeps its length.
    gone = distance(SPACE, given_.current, server.model)
    assert float(distance(SPACE, server.model, start)) == pytest.approx(0.5 * float(gone), rel=1e-9)


@pytest.mark.parametrize("rule", [FedAsync(0.5), FedOrtho(0.5), AsyncBezier(0.5), FedBuff(1)], ids=str)
def test_single_precision_points_are_processed_in_double_precision(rule):
    wide, narrow = scene(4), scene(4, dtype=torch.float32)
    out = torch.empty_like(narrow.current)
    outcome = rule.step(NARROW, rule.init(NARROW, narrow.current), narrow, out=out)[1]
    assert outcome.model is out
    assert out.dtype == torch.float32
    # The inputs were rounded: points of size 1, a handful of times.
    assert relative(out, move(rule, wide).model) <= 20 * 2**-24


def test_small_drift_keeps_its_accuracy():
    """Two float32 points at the distance 1e-4 determine their difference up to a relative error of 1e-3.

    The step must not increase this error.
    """
    wide = scene(5, size=1e-4)
    rounded = Update(0, *(SPACE.project(t.float().double()) for t in (wide.base, wide.current, wide.points)))
    narrow = scene(5, size=1e-4, dtype=torch.float32)
    outcome = FedOrtho(0.5).step(NARROW, {"version": 0}, narrow)[1]
    assert outcome.numbers["norm"] == pytest.approx(move(FedOrtho(0.5), rounded).numbers["norm"], rel=1e-9)
    assert outcome.numbers["cosine"] == pytest.approx(move(FedOrtho(0.5), rounded).numbers["cosine"], rel=1e-7)


@pytest.mark.parametrize("transport", ["ladder", "projection"])
def test_the_transport_is_an_option(transport):
    given_ = scene(6)
    exact = move(ASGD(0.5), given_).model
    other = move(ASGD(0.5, transport=transport), given_).model
    # A projection is wrong to second order in the drift of .3; a ladder on symmetric spaces is exact.
    assert relative(other, exact) <= (1e-8 if transport == "ladder" else 0.1)
    assert (relative(other, exact) > 1e-6) == (transport == "projection")


POINTS = scene(0, 2)
FAR = {name: t.clone().double() for name, t in TENSORS.items()} | {"directions": -torch.ones(2, 4).double() / 2}


def answered(rule, points):
    """Return the receipt of an update from a server that starts at the base."""
    server = Server(SPACE, rule, POINTS.base)
    return server.receive(server.dispatch("a"), Payload(points, 1))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: FedAdam(2).init(SPACE, POINTS.base), r"space: expected flat leaves for the elementwise squares of FedAdam.*turn: .*directions: .*metric: .*ball: "),
        (lambda: DCASGD().init(SPACE, POINTS.base), r"space: expected flat leaves for the elementwise products of DCASGD.*turn: "),
        (lambda: AsyncBezier(threshold="auto").init(SPACE, POINTS.base), r"space: AutoThreshold.*needs flat leaves.*turn: "),
        (lambda: AsyncCorrected(correction=OrthoDyn()).init(SPACE, POINTS.base), "space: OrthoDyn without a schedule.*turn: "),
        (lambda: AsyncCorrected(correction=Position() >> OrthoDyn()).init(SPACE, POINTS.base), "space: OrthoDyn without a schedule"),
        (lambda: AsyncBezier(overshoot="extend").init(SPACE, POINTS.base), "overshoot: expected .clamp., as .extend. needs flat leaves.*turn: "),
        (lambda: ASGD(transport="parallel").init(FRAMES, scene(0, space=FRAMES).base), r"transport: parallel needs transport, which frame: Stiefel"),
        (lambda: FedBuff(2, transport="parallel").init(FRAMES, scene(0, space=FRAMES).base), "transport: parallel needs transport"),
        (lambda: FedAsync().init(SPACE, 2 * POINTS.base), "start: turn: expected a point of"),
        (lambda: answered(FedAsync(), 2 * POINTS.points[:1]).check(), "points: turn: expected a point of"),
        (lambda: move(FedAsync(), Update(0, *[SPACE.point({n: t.double() for n, t in TENSORS.items()})] * 2, SPACE.point(FAR)[None])), "points: out of reach of the base: "),
    ],
)  # fmt: skip
def test_unsupported_options_on_curved_space_raise_argument_error(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


@pytest.mark.parametrize(
    "rule", [ASGD(0.5), FedBuff(2), Momentum(ASGD(0.5)), AsyncBezier(0.5)], ids=lambda rule: type(rule).__name__
)
def test_narrow_leaves_are_on_the_space_up_to_their_rounding(rule):
    space, state = {"w": Stiefel(32, 4)}, None
    model = {"w": torch.linalg.qr(draw(0, 32, 4)).Q.bfloat16()}
    for i in range(3):
        client = {"w": torch.linalg.qr(model["w"].double() + 0.05 * draw(i + 1, 32, 4)).Q}
        client = {"w": (client["w"] * (client["w"] * model["w"]).sum(0).sign()).bfloat16()}
        model, state, _ = aggregate(rule, state, model, model, client, space=ParameterSpace.of_state_dict(model, space))
    w = model["w"].double()
    # Columns of unit length are off by the rounding of their entries.
    assert (w.mT @ w - torch.eye(4)).abs().max() <= 2**-7


def test_momentum_rejects_step_beyond_the_injectivity_radius():
    sphere, start = Sphere(2), torch.tensor([1.0, 0.0]).double()
    client = torch.tensor([[math.cos(2), math.sin(2)]]).double()
    rule = Momentum(ASGD(2.0, overshoot="extend"))
    with pytest.raises(ArgumentError, match="points: expected a step of the rule within the injectivity radius 3.14"):
        rule.step(sphere, rule.init(sphere, start), Update(0, start, start, client))
