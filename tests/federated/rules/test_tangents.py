"""Tests of rules in the tangent space of low-rank leaves (`transport="projection"`).

They use dense projections and small steps as references.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from manifoldagg.corrections import OrthoDC, OrthoDyn, Position
from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Payload, Server, Update
from manifoldagg.federated.rules import (
    ASGD,
    AsyncBezier,
    AsyncCorrected,
    AsyncFedED,
    AsyncKrylov,
    FedAsync,
    FedAvg,
    FedBuff,
    FedGS,
    FedOrtho,
    Momentum,
)
from manifoldagg.manifolds import Flat, LowRank, Power, Product
from tests.manifolds.test_lowrank import conditions, dense, gauge, projected, turned
from tests.support import draw, relative, seeds

pytestmark = pytest.mark.usefixtures("as_shipped")

EPS = 2.0**-52
SPACE = LowRank(6, 5, 2)
MIXED = Product({"q": SPACE, "head": Flat(3), "both": Power(LowRank(4, 3, 1), (2,))})
OPTION = {"transport": "projection"}
RULES = [
    FedAsync(0.5, **OPTION),
    ASGD(0.5, **OPTION),
    FedOrtho(0.5, **OPTION),
    FedGS(0.5, **OPTION),
    AsyncBezier(rate=0.5, **OPTION),
    AsyncCorrected(0.5, correction=OrthoDC(0.5, granularity="tensor"), **OPTION),
    AsyncKrylov(0.5, **OPTION),
    AsyncCorrected(0.5, correction=Position() >> OrthoDyn(), **OPTION),
    FedBuff(3, 0.5, **OPTION),
    FedAvg(2, 0.5, **OPTION),
    AsyncFedED(warm_up=0, **OPTION),
    Momentum(ASGD(0.5, **OPTION)),
]


def near(space, seed, count, size=0.3):
    """Return a current point, a base and further points with mutual distances of about `size`."""
    generator = torch.Generator().manual_seed(seed)
    current = space.random_point(generator=generator, dtype=torch.float64)
    others = space.random_point(count, generator=generator, dtype=torch.float64)
    return current, *(current + size * (others - current))


def taken(rule, space, base, current, points):
    """Return the outcome of the first update that moves the model."""
    state = rule.init(space, current)
    for _ in range(3):
        state, outcome = rule.step(space, state, Update(0, base, current, torch.stack([*points])))
        if outcome.model is not None:
            return outcome
    raise AssertionError(rule)


@settings(max_examples=10)
@given(seeds)
def test_steps_are_orthographic_retractions_of_projected_differences(seed):
    current, base, point, far = near(SPACE, seed, 3)
    x, b, p, q = (dense(SPACE, y) for y in (current, base, point, far))

    def tangent(z):
        return projected(SPACE, current, z)

    def arrives(rule, points, expected):
        outcome = taken(rule, SPACE, base, current, points)
        moved = dense(SPACE, outcome.model) - x
        # Of its rank, and seen from X as the tangent: there is one such matrix.
        assert relative(tangent(moved), expected) <= 1e-9
        assert outcome.numbers["norm"] == pytest.approx(float(expected.norm()), rel=1e-9)
        assert outcome.numbers["ambient"] == 0
        return outcome

    arrives(FedAsync(0.5, **OPTION), [point], 0.5 * tangent(p - x))
    v, g = tangent(p - b), tangent(x - b)
    arrives(ASGD(0.5, **OPTION), [point], 0.5 * v)
    outcome = arrives(FedOrtho(0.5, **OPTION), [point], 0.5 * (v - (v * g).sum() / (g * g).sum() * g))
    assert outcome.numbers["cosine"] == pytest.approx(float((v * g).sum() / v.norm() / g.norm()), rel=1e-9)
    arrives(FedBuff(3, 0.5, **OPTION), [point], 0.5 * v)
    w = tangent(q - b)
    rule = AsyncBezier(rate=0.5, threshold=-1.0, pull_back="none", **OPTION)
    arrives(rule, [point, far], 2 * 0.5 * 0.5 * v + 0.25 * w)


SMOOTH = [rule for rule in RULES if not isinstance(rule, FedGS | AsyncFedED) and "threshold=0.5" not in str(rule)]


@pytest.mark.parametrize("rule", SMOOTH, ids=lambda rule: type(rule).__name__)
@settings(max_examples=3)
@given(seed=seeds)
def test_step_equals_the_dense_step_to_third_order(rule, seed):
    """If the distances are halved, the difference between the two steps is divided by eight."""
    plain = Momentum(ASGD(0.5)) if isinstance(rule, Momentum) else replace(rule, transport=None)
    apart = []
    for size in (1e-3, 5e-4):
        current, base, *points = near(MIXED, seed, 3, size)
        points = points if isinstance(rule, AsyncBezier | AsyncKrylov) else points[:1]
        one, other = (MIXED.invariant(taken(r, MIXED, base, current, points).model) for r in (rule, plain))
        apart.append(float((one - other).norm()))
    assert apart[0] > 0
    assert apart[0] / apart[1] >= 6


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@settings(max_examples=3)
@given(seed=seeds, condition=conditions)
def test_step_does_not_depend_on_the_gauge(rule, seed, condition):
    given_ = near(SPACE, seed, 4 if isinstance(rule, AsyncBezier) else 2, 0.1)
    others = [turned(SPACE, x, *gauge(seed + i, 2, condition)) for i, x in enumerate(given_)]
    models = []
    for current, base, *points in (given_, others):
        models.append(dense(SPACE, taken(rule, SPACE, base, current, points).model))
    values = torch.linalg.svdvals(dense(SPACE, given_[0]))[:2]
    # Of a point near a lower rank tangents are less well known.
    allowed = 100 * EPS * (1 + condition) * (values[0] / values[1]) ** 2 * (1 + values[0])
    assert (models[0] - models[1]).norm() <= allowed


@pytest.mark.parametrize("rule", RULES[:4], ids=lambda rule: type(rule).__name__)
def test_step_at_lower_rank_equals_the_dense_step_and_reports_it(rule):
    """Test with an adapter at its initialisation, B = 0."""
    current, base, point = near(MIXED, 0, 2)
    parts = MIXED.split(current)
    parts["q"] = torch.cat([torch.zeros(6, 2).double(), parts["q"][6:]])
    current = MIXED.join(parts)
    alone = SPACE, *(MIXED.split(x)["q"] for x in (base, current, point))
    for space, b, c, p, leaves in ((MIXED, base, current, point, 1), (*alone, 1)):
        outcome = taken(rule, space, b, c, [p])
        assert outcome.numbers["ambient"] == leaves
    plain = replace(rule, transport=None)
    assert torch.equal(outcome.model, taken(plain, SPACE, *alone[1:3], [alone[3]]).model)


def test_server_moves_from_lower_rank_into_the_tangent_space(tmp_path):
    start = torch.cat([torch.zeros(6, 2), draw(0, 5, 2, dtype=torch.float32)])
    rule = FedBuff(2, **OPTION)
    server = Server(SPACE, rule, start)

    def drive(server, seeds):
        for seed in seeds:
            ticket = server.dispatch(seed % 2)
            points = ticket.message.start + 0.1 * draw(seed, 1, 11, 2, dtype=torch.float32)
            receipt = server.receive(ticket, Payload(points, 1))
            assert receipt.accepted, receipt.reason

    drive(server, range(7))
    assert [row["ambient"] for row in server.history] == [1, 1, 0, 0, 0, 0, 0]
    server.save(tmp_path / "server")
    other = Server.resume(tmp_path / "server", SPACE, rule)
    for each in (server, other):
        drive(each, range(7, 12))
    assert torch.equal(server.model, other.model)


def test_zero_update_leaves_the_model_bitwise_equal():
    current, base, _ = near(MIXED, 0, 2)
    outcome = taken(FedAsync(0.5, **OPTION), MIXED, base, current, [current.clone()])
    assert torch.equal(outcome.model, current)


def test_projection_transport_is_rejected_on_flat_space():
    with pytest.raises(ArgumentError, match="transport: expected None on a flat space"):
        FedAsync(**OPTION).init(Flat(3), torch.zeros(3))
