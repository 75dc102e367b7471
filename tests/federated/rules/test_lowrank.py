"""Tests of rules on low-rank leaves: every step is the step on the dense matrices, followed by one truncation."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldagg.corrections import DelayCompensated, OrthoDC, OrthoDyn, Pairwise, Position
from manifoldagg.errors import ArgumentError
from manifoldagg.federated import MemoryPolicy, Payload, Server, ServerLimits, Update, aggregate
from manifoldagg.federated.limits import UpdateLimits
from manifoldagg.federated.rules import (
    ACE,
    ASGD,
    CA2FL,
    DCASGD,
    FADAS,
    FLOCO,
    AdaMasFL,
    AsyncBezier,
    AsyncCorrected,
    AsyncCurve,
    AsyncFedED,
    AsyncKrylov,
    DeFedAvg,
    DelayedNesterov,
    FedAdam,
    FedAsync,
    FedAvg,
    FedBuff,
    FedGS,
    FedOrtho,
    GeneralizedAsyncSGD,
    HeLoCo,
    Krum,
    MasFL,
    Momentum,
    OrthoFL,
    RadialDirectional,
)
from manifoldagg.federated.stability import updates_per_step
from manifoldagg.manifolds import Flat, LowRank, ParameterSpace, Power, Product, Sphere
from manifoldagg.manifolds.ambient import AmbientSpace
from tests.manifolds.test_lowrank import best, conditions, gauge, turned
from tests.support import LargestTensor, draw, relative, seeds

pytestmark = pytest.mark.usefixtures("as_shipped")

EPS = 2.0**-52
FULL = {"q": LowRank(5, 4, 4), "head": Flat(3), "both": Power(LowRank(3, 4, 3), (2,))}
THIN = {"q": LowRank(6, 5, 2), "head": Flat(3), "both": Power(LowRank(4, 3, 1), (2,))}
RULES = [
    FedAsync(0.5),
    ASGD(0.5),
    FedOrtho(0.5),
    FedGS(0.5),
    FedGS(0.5, update_form="position"),
    AsyncKrylov(0.5),
    AsyncBezier(rate=0.5),
    AsyncBezier(rate=0.5, threshold=0.0, pull_back="none", curve_weight="auto"),
    AsyncCorrected(0.5, correction=OrthoDC(0.5, granularity="tensor")),
    AsyncCorrected(0.5, correction=OrthoDyn()),
    AsyncCorrected(0.5, correction=Position() >> OrthoDyn()),
    AsyncCorrected(0.5, correction=DelayCompensated(0.3, form="outer")),
    FedBuff(3, 0.5),
    FedAvg(2, 0.5),
    DeFedAvg(2, 0.5),
    CA2FL(2, 0.5),
    CA2FL(3, 0.5, unknown="mean"),
    ACE(0.5),
    AsyncFedED(warm_up=1),
    OrthoFL(),
    OrthoFL(calibration="pairwise", granularity="model"),
    OrthoFL(moving_average=False),
    Momentum(ASGD(0.5)),
    Momentum(FedBuff(2)),
    HeLoCo(0.5),
    DelayedNesterov(2, 0.5, activation=0.25),
    RadialDirectional(2, 0.5),
]


def named(rule):
    return f"{type(rule).__name__}-{RULES.index(rule)}"


def many(rule):
    """Return the number of points in an update of a rule."""
    return {AsyncBezier: 2, AsyncKrylov: 3}.get(type(rule), 1)


def dense_space(leaves):
    """Return the space of the dense matrices that the leaves represent."""
    sizes = {name: leaf.invariant(torch.zeros(leaf.shape)).numel() for name, leaf in leaves.items()}
    return Product({name: Flat(size) for name, size in sizes.items()})


def dense(space, x):
    """Return the dense matrices of a low-rank point, as a point of the dense space."""
    return space.invariant(x)


def drawn(space, seed, *batch):
    return space.random_point(*batch, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def played(rule, space, seed, turns=6, seen=lambda x: x, on=None):
    """What a rule makes of updates of a space, as `seen`, on the space `on`."""
    on = on or space
    models = [drawn(space, seed)]
    here = seen(models[0])
    state, memory, outcomes, after = rule.init(on, here), {}, [], [here]
    for turn in range(turns):
        client, late = turn % 3, turn % 2 if len(after) > 1 else 0
        base = after[-1 - late]
        count = many(rule)
        points = torch.stack([seen(drawn(space, seed + 7 * turn + i)) for i in range(count)])
        given_ = Update(client, base, after[-1], points, staleness=late, client_state=memory.get(client))
        state, outcome = rule.step(on, state, given_)
        memory[client] = outcome.client_state
        outcomes.append(outcome)
        if outcome.model is not None:
            after.append(outcome.model)
    return outcomes, memory


@pytest.mark.parametrize("rule", RULES, ids=named)
@settings(max_examples=2)
@given(seed=seeds)
def test_low_rank_step_equals_the_step_on_dense_matrices(rule, seed):
    space = Product(FULL)
    outcomes, memory = played(rule, space, seed)
    expected, kept = played(rule, space, seed, seen=lambda x: dense(space, x), on=dense_space(FULL))
    for mine, theirs in zip(outcomes, expected, strict=True):
        assert (mine.model is None) == (theirs.model is None)
        told = {name: value for name, value in mine.numbers.items() if name in theirs.numbers}
        # Lengths and cosines of displacements of size 10, after six steps.
        assert told == pytest.approx(theirs.numbers, rel=1e-10, abs=1e-12, nan_ok=True)
        assert set(mine.numbers) - set(told) == {"truncated", "state_truncated", "tied"}
        if mine.model is not None:
            assert relative(dense(space, mine.model), theirs.model) <= 1e-12
    for client, tree in memory.items():
        if isinstance(tree, dict) and "start" in tree:
            assert relative(dense(space, tree["start"]), kept[client]["start"]) <= 1e-12


@pytest.mark.parametrize(
    "rule",
    [
        FedAsync(0.5),
        FedOrtho(0.5),
        AsyncBezier(rate=0.5),
        FedBuff(1, 0.5),
        FedAvg(1, 0.5),
        DeFedAvg(1, 0.5),
        CA2FL(1, 0.5),
        ACE(0.5),
        Krum(3, 0, rate=0.5),
        AsyncFedED(0.5),
        Momentum(FedBuff(1, 0.5)),
    ],
    ids=str,
)
@settings(max_examples=5)
@given(seed=seeds)
def test_step_beyond_the_rank_is_the_nearest_matrix_of_the_rank(rule, seed):
    space = LowRank(6, 5, 2)
    # The first point of the first update is the initial model, so an update of one point changes nothing in turn 0.
    turns = 1 if many(rule) > 1 else max(2, updates_per_step(rule))
    (*_, outcome), _ = played(rule, space, seed, turns)
    whole = Flat(30)
    (*_, expected), _ = played(rule, space, seed, turns, seen=lambda x: dense(space, x).flatten(-2), on=whole)
    near, error = best(expected.model.view(6, 5), 2)
    assert error > 0
    assert relative(dense(space, outcome.model), near) <= 1e-10
    assert outcome.numbers["truncated"] == pytest.approx(error, rel=1e-10)


@pytest.mark.parametrize("rule", RULES, ids=named)
@settings(max_examples=3)
@given(seed=seeds, condition=conditions)
def test_step_does_not_depend_on_the_gauge(rule, seed, condition):
    space = LowRank(6, 5, 4)
    count = many(rule)
    base, current, *points = drawn(space, seed, count + 2)
    turn = [gauge(seed + i, space.rank, condition) for i in range(count + 2)]
    other = [turned(space, x, *g) for x, g in zip((base, current, *points), turn, strict=True)]
    models = []
    for b, c, p in ((base, current, points), (other[0], other[1], other[2:])):
        state, outcome = rule.step(space, rule.init(space, c), Update(0, b, c, torch.stack([*p])))
        while outcome.model is None:
            state, outcome = rule.step(space, state, Update(0, b, c, torch.stack([*p])))
        models.append(dense(space, outcome.model))
    size = max(dense(space, x).norm() for x in (base, current, *points))
    # The matrices that the turned factors stand for, rounded as they are, differ by that much already.
    assert (models[0] - models[1]).norm() <= 100 * EPS * condition * size + 100 * EPS * size


@settings(max_examples=5)
@given(seed=seeds)
def test_independent_leaves_move_independently(seed):
    space = Product(THIN)
    rule = FedAsync(0.5)
    base, current, point = drawn(space, seed, 3)
    _, outcome = rule.step(space, rule.init(space, base), Update(0, base, current, point[None]))
    parts = [space.split(x) for x in (base, current, point, outcome.model)]
    for name, leaf in THIN.items():
        b, c, p, model = (part[name] for part in parts)
        alone = rule.step(leaf, rule.init(leaf, b), Update(0, b, c, p[None]))[1].model
        assert torch.equal(alone, model)


def test_unmoved_leaf_and_adopted_client_model_are_bitwise_equal():
    space = Product(THIN)
    base, current, point = drawn(space, 3, 3)
    still = {**space.split(point), "q": space.split(base)["q"]}
    point, current = space.join(still), space.join({**space.split(current), "q": still["q"]})
    rule = FedOrtho(0.5)
    outcome = rule.step(space, rule.init(space, base), Update(0, base, current.clone(), point[None]))[1]
    assert torch.equal(space.split(outcome.model)["q"], still["q"])
    rule = FedAsync(1.0)
    model = rule.step(space, rule.init(space, base), Update(0, base, current, point[None]))[1].model
    for name in ("q", "both"):
        assert torch.equal(space.split(model)[name], space.split(point)[name])


@pytest.mark.parametrize("rule", [FedOrtho(0.5), AsyncBezier(rate=0.5, threshold=0.0), AsyncFedED(warm_up=0)], ids=str)
def test_zero_drift_is_exactly_zero(rule):
    """Equal factors have exactly the difference 0, for an adapter at its initialisation (B = 0) and in general."""
    space = LowRank(6, 5, 2)
    for start in (drawn(space, 1), torch.cat([torch.zeros(6, 2), draw(1, 5, 2)]).double()):
        point = drawn(space, 2)
        _, outcome = rule.step(space, rule.init(space, start), Update(0, start, start.clone(), point[None]))
        assert outcome.numbers["cosine"] != outcome.numbers["cosine"]
        s = outcome.numbers["step"]
        if not isinstance(rule, AsyncBezier):
            near, _ = best(dense(space, start) + s * (dense(space, point) - dense(space, start)), 2)
            assert relative(dense(space, outcome.model), near) <= 1e-12


def test_step_allocates_no_full_matrix():
    space = Product({"q": LowRank(10**5, 10**5, 2), "head": Flat(10)})
    base, current, *points = drawn(space, 0, 5)
    for rule in (FedOrtho(0.5), AsyncBezier(rate=0.5), Momentum(FedBuff(1))):
        n = 3 if isinstance(rule, AsyncBezier) else 1
        with LargestTensor() as largest:
            rule.step(space, rule.init(space, base), Update(0, base, current, torch.stack(points[:n])))
        # Five points and their differences side by side, rank 2 each, of 10^5 rows.
        assert largest.numel <= 2 * 10**5 * 2 * 6


@pytest.mark.parametrize(
    "rule", [Momentum(FedAsync(0.5)), CA2FL(2), ACE(0.5), FedBuff(7), AsyncCorrected(correction=OrthoDyn())]
)
def test_ranks_do_not_increase(rule):
    space = Product({"q": LowRank(40, 30, 2, state_rank=5), "head": Flat(3)})
    current = drawn(space, 0)
    state, memory, left_out = rule.init(space, current), {}, 0.0
    for turn in range(50):
        point = current + 0.1 * drawn(space, turn)
        given_ = Update(turn % 3, current, current, point[None], client_state=memory.get(turn % 3))
        state, outcome = rule.step(space, state, given_)
        memory[turn % 3] = outcome.client_state
        left_out += outcome.numbers["state_truncated"]
        current = current if outcome.model is None else outcome.model
    assert current.shape == space.shape
    pieces = [x for x in tensors([state, memory]) if x.ndim == 2]
    assert pieces
    assert all(x.shape == (70, x.shape[1]) and x.shape[1] <= 5 for x in pieces)
    assert left_out > 0


def tensors(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    branches = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [x for branch in branches for x in tensors(branch)]


SPACE = ParameterSpace.of_state_dict(
    {"q": torch.zeros(9, 2), "head": torch.zeros(3, 2), "both": torch.zeros(2, 7, 2)},
    {"q": LowRank(5, 4, 2), "both": LowRank(4, 3, 2)},
)


def driven(server, turns, seed):
    for turn in range(turns):
        ticket = server.dispatch(turn % 2)
        points = ticket.message.start + 0.1 * draw(seed + turn, 1, *SPACE.shape, dtype=torch.float32)
        receipt = server.receive(ticket, Payload(points, 1))
        assert receipt.accepted, receipt.reason


@pytest.mark.parametrize(
    "rule", [FedBuff(2), CA2FL(2), ACE(0.5), Momentum(ASGD(0.5)), OrthoFL(calibration="pairwise")], ids=str
)
def test_resumed_server_is_bitwise_equal(rule, tmp_path):
    start = draw(0, *SPACE.shape, dtype=torch.float32)
    server = Server(
        SPACE,
        rule,
        start,
        limits=ServerLimits(UpdateLimits(norm_factor=100.0)),
        memory=MemoryPolicy(base_dtype=torch.bfloat16),
    )
    driven(server, 5, 0)
    server.save(tmp_path / "server")
    other = Server.resume(tmp_path / "server", SPACE, rule)
    for each in (server, other):
        driven(each, 5, 10)
    assert torch.equal(server.model, other.model)
    assert server.history == other.history
    assert {"truncated", "state_truncated", "tied"} <= set(server.history[-1])


@pytest.mark.parametrize("rule", [FedAsync(0.5), FedOrtho(0.5), FedBuff(1), AsyncBezier(rate=0.5)], ids=str)
def test_aggregate_equals_the_step_of_a_server(rule):
    start = draw(0, *SPACE.shape, dtype=torch.float32)
    server = Server(SPACE, rule, start, weights="uniform")
    ticket = server.dispatch(0)
    points = start + draw(1, 1, *SPACE.shape, dtype=torch.float32)
    assert server.receive(ticket, Payload(points, 1)).accepted
    now, theirs = SPACE.state_dict(start), SPACE.state_dict(points[0])
    kept = copy.deepcopy(now)
    new, _, numbers = aggregate(rule, None, now, now, theirs, space=SPACE)
    assert all(torch.equal(x, kept[name]) for name, x in now.items())
    assert all(torch.equal(x, new[name]) for name, x in server.state_dict().items())
    assert numbers["truncated"] == server.history[-1]["truncated"]


def test_leaves_of_clients_may_have_different_ranks():
    """Only the final sum is truncated."""
    leaves = {"q": LowRank(6, 5, 2), "head": Flat(3)}
    space, wide = Product(leaves), Product({**leaves, "q": LowRank(6, 5, 4)})
    current, point = drawn(space, 0), drawn(wide, 1)
    rule = FedAsync(0.5)
    given_ = Update(0, current, current, (tuple(wide.split(point).values()),))
    model = rule.step(space, rule.init(space, current), given_)[1].model
    q, head = space.split(model).values()
    mean = (dense(space, current) + dense(wide, point)) / 2
    near, _ = best(mean[:30].view(6, 5), 2)
    assert relative(dense(leaves["q"], q), near) <= 1e-12
    assert relative(head, mean[30:]) <= 1e-15


@given(seeds)
def test_equal_singular_values_at_the_truncation_are_reported(seed):
    space = LowRank(3, 3, 1)
    x, y = (torch.cat([e, e])[:, None] for e in torch.eye(3, dtype=torch.float64)[:2])
    rule = FedAsync(0.5)
    numbers = rule.step(space, rule.init(space, x), Update(0, x, x, y[None]))[1].numbers
    assert numbers["tied"] == 1
    assert numbers["truncated"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (DCASGD(), "space: expected flat leaves for the elementwise products of DCASGD"),
        (FedAdam(2), "space: expected flat leaves for the elementwise squares of FedAdam"),
        (FADAS(2), "space: expected flat leaves for the elementwise squares of FADAS"),
        (FLOCO(2), "space: expected flat leaves for the simplices of models of FLOCO"),
        (MasFL(2), "space: expected flat leaves for the control variates of MasFL"),
        (AdaMasFL(2), "space: expected flat leaves for the control variates of AdaMasFL"),
        (AsyncCurve(2), "space: expected flat leaves for the rotated control points of AsyncCurve"),
        (GeneralizedAsyncSGD([1.0]), "space: expected flat leaves for the gradients of GeneralizedAsyncSGD"),
        (Momentum(FedAdam(2)), "space: expected flat leaves for the elementwise squares of FedAdam"),
        (AsyncBezier(threshold="auto"), "space: AutoThreshold, .* needs flat leaves"),
        (AsyncCorrected(correction=DelayCompensated()), "space: DelayCompensated, .* needs flat leaves"),
        (AsyncCorrected(correction=Pairwise(torch.ones(1, 52))), "space: Pairwise, .* needs flat leaves"),
        (OrthoFL(protocol="client"), "protocol: expected 'server' for low-rank leaves, got 'client'"),
        (
            ASGD(transport="parallel"),
            "transport: expected None or 'projection' for low-rank leaves, got 'parallel'",
        ),
    ],
    ids=lambda x: type(x).__name__ if not isinstance(x, str) else "",
)
def test_low_rank_leaves_reject_rules_that_need_entries(rule, words):
    with pytest.raises(ArgumentError, match=words) as refused:
        Server(SPACE, rule, torch.ones(SPACE.shape))
    if "leaves;" in words or words.endswith("flat leaves"):
        assert "q: LowRank(m=5, n=4, rank=2" in str(refused.value)


def test_low_rank_step_rejects_values_that_are_not_finite():
    space = LowRank(4, 3, 2)
    x = drawn(space, 0)
    rule = FedAsync(0.5)
    state = rule.init(space, x)
    for bad, words in ((float("nan"), r"points\[0\]: squared distance"), (1e200, r"points\[0\]: squared distance")):
        with pytest.raises(ArgumentError, match=words):
            rule.step(space, state, Update(0, x, x, torch.full_like(x, bad)[None]))
    rule, narrow = FedBuff(1, rate=1e60), x.float()
    with pytest.raises(ArgumentError, match="points: the new model would not be finite"):
        rule.step(space, rule.init(space, narrow), Update(0, narrow, narrow, torch.full_like(narrow, 1e9)[None]))
    with pytest.raises(ArgumentError, match="points: expected a finite sum at LowRank"):
        AmbientSpace.of(space, x).combine(x, [drawn(space, 1)], [float("nan")])


def test_nested_low_rank_leaves_and_curved_siblings_are_rejected():
    pair = Product({"a": LowRank(3, 2, 1), "b": Flat(2)})
    nested = ParameterSpace.of_state_dict({"w": torch.zeros(2, 7)}, {"w": pair})
    with pytest.raises(ArgumentError, match=r"space: expected leaves that are flat or LowRank, got w: Power"):
        FedAsync().init(nested, torch.zeros(nested.shape))
    mixed = Product({"a": LowRank(3, 2, 1), "b": Sphere(3)})
    with pytest.raises(ArgumentError, match="a: LowRank.* does not have"):
        FedAsync().init(mixed, mixed.random_point(generator=torch.Generator()))


@given(st.sampled_from([0, -1]), st.integers(-3, 0))
def test_state_rank_must_be_a_positive_integer(a, b):
    with pytest.raises(ArgumentError, match="state_rank"):
        LowRank(3, 2, 1, state_rank=min(a, b))


def test_flat_spaces_have_no_separate_ambient_space():
    assert AmbientSpace.of(Flat(3), torch.zeros(3)).leaves == ()
    assert not Flat(3).ambient
    assert Product(THIN).ambient
    assert not Product({"x": Sphere(3), "y": LowRank(3, 2, 1)}).ambient
