"""Tests of rules: closed forms of one step, equivalences between rules, and rejected inputs."""

import copy
import importlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from manifoldagg.corrections import AutoThreshold, DelayCompensated, Frame, OrthoCorrect, OrthoDC, OrthoDyn, Position
from manifoldagg.curves import Bezier, parameter_at_distance
from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Rule, Update
from manifoldagg.federated.rules import (
    ASGD,
    DCASGD,
    AsyncBezier,
    AsyncCorrected,
    Dominance,
    FedAdam,
    FedAsync,
    FedAvg,
    FedBuff,
    FedGS,
    FedOrtho,
    Momentum,
)
from manifoldagg.federated.rules._gram_rule import staleness_penalty
from manifoldagg.federated.staleness import Constant, Hinge, Polynomial
from manifoldagg.manifolds import Flat, Manifold, ParameterSpace
from tests.support import draw, relative, seeds

GOLDEN = {
    "FedAsync": FedAsync(0.5, staleness=Polynomial(0.5)),
    "ASGD": ASGD(0.7),
    "a dominant client": ASGD(0.7, dominance=Dominance(2)),
    "FedOrtho": FedOrtho(0.7),
    "FedGS": FedGS(0.7),
    "AsyncBezier": AsyncBezier(0.7, threshold=0.0),
    "AsyncBezierED": AsyncBezier(0.7, decay=1.0),
    "AsyncCorrected": AsyncCorrected(0.7, correction=OrthoCorrect(0.5, 0.0)),
    "with a state": AsyncCorrected(0.7, correction=OrthoDyn()),
    "Momentum": Momentum(FedBuff(2), beta=0.5),
}

SPACE = Flat(9)
MOVING = [FedAsync(0.5), ASGD(0.5), FedOrtho(0.5), FedGS(0.5), AsyncBezier(0.5), FedBuff(1, 0.5), FedAvg(1, 0.5)]
RULES = [
    *MOVING,
    DCASGD(0.5),
    DCASGD(0.5, variant="constant"),
    AsyncBezier(0.5, threshold="auto"),
    AsyncCorrected(0.5, correction=OrthoDyn()),
    FedAdam(1),
    Momentum(FedOrtho(0.5), beta=0.5),
]


def update(seed, n=1, dtype=torch.float64, **known):
    base, current = draw(seed, 2, 9, dtype=dtype)
    return Update(client=0, base=base, current=current, points=draw(seed + 1, n, 9, dtype=dtype), **known)


def step(rule, given_, state=None):
    state = rule.init(SPACE, given_.base) if state is None else state
    return rule.step(SPACE, state, given_)


@given(seeds, st.floats(0.01, 1), st.integers(0, 9))
def test_fedasync_interpolates_models(seed, rate, late):
    given_ = update(seed, staleness=late)
    for staleness in (Constant(), Hinge(0.5, 3.0), Polynomial(0.5)):
        mixing = rate * staleness(late)
        _, outcome = step(FedAsync(rate, staleness=staleness), given_)
        assert relative(outcome.model, (1 - mixing) * given_.current + mixing * given_.points[0]) <= 1e-14


@given(seeds)
def test_fedasync_at_rate_one_returns_the_client_model(seed):
    given_ = update(seed, dtype=torch.float32)
    assert torch.equal(step(FedAsync(1.0), given_)[1].model, given_.points[0])


def test_fedasync_rate_without_weights_is_at_most_one():
    with pytest.raises(ArgumentError) as caught:
        FedAsync(rate=3.0)
    assert str(caught.value) == (
        "rate: expected a share of the way to the client's model, at most 1, got 3; with weighted=True it is multiplied "
        "by the client's share of the data and may be larger"
    )
    assert FedAsync(rate=3.0, weighted=True).rate == 3.0
    assert FedAsync(rate=lambda version: 3.0).rate(0) == 3.0


@given(seeds, st.floats(0.01, 1), st.floats(0.01, 1))
def test_linear_rules_step_along_the_corrected_displacement(seed, rate, weight):
    given_ = update(seed, weight=weight)
    v = given_.points - given_.base
    for rule, threshold in ((FedOrtho(rate), 1.0), (FedGS(rate), 0.0)):
        corrected = OrthoDC(threshold)(SPACE, given_.base, given_.current, v)[0]
        _, outcome = step(rule, given_)
        assert relative(outcome.model, given_.current + rate * weight * corrected) <= 1e-14


@given(seeds)
def test_surgery_on_the_position_uses_the_position_difference(seed):
    given_ = update(seed)
    g, v = given_.current - given_.base, given_.points[0] - given_.current
    expected = given_.current + 0.5 * (v - min(0.0, (v @ g).item()) / (g @ g) * g)
    assert relative(step(FedGS(0.5, update_form="position"), given_)[1].model, expected) <= 1e-13


@given(seeds, st.integers(1, 4), st.floats(0.01, 1.5), st.sampled_from([-1.0, 0.0, 1.0]), st.floats(0, 1))
def test_asyncbezier_equals_transcription_of_the_paper(seed, n, rate, threshold, decay):
    """Transcription of Manifold, Algorithm 1, with explicit vectors."""
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
    versions = [tree["rule"] if isinstance(rule, Momentum) else tree for tree in (state, after)]
    assert [tree["version"] for tree in versions] == [0, 1]


class Counting:
    """Counter of kernel calls, which also records the size of new tensors."""

    def __init__(self, monkeypatch):
        self.calls = {"gram": 0, "combine": 0}
        for module in ("corrections.rows", "manifolds.ambient"):
            for name in self.calls:
                original = getattr(importlib.import_module(f"manifoldagg.{module}"), name, None)
                if original is not None:
                    monkeypatch.setattr(f"manifoldagg.{module}.{name}", self.counted(name, original))

    def counted(self, name, kernel):
        def call(*args, **options):
            self.calls[name] += 1
            return kernel(*args, **options)

        return call


class Allocations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.sizes = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.sizes[storage.data_ptr()] = storage.nbytes()
        return out


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("rule", MOVING, ids=lambda rule: type(rule).__name__)
def test_step_calls_gram_and_combine_once_without_temporaries(rule, monkeypatch):
    size = 600_000
    base, current, point = draw(0, 3, size, dtype=torch.float32)
    space = Flat(size)
    state, out = rule.init(space, base), torch.empty(size)
    given_ = Update(0, base, current, point[None])
    counting = Counting(monkeypatch)
    with Allocations() as seen:
        rule.step(space, state, given_, out=out)
    assert counting.calls == {"gram": 1, "combine": 1}
    known = {t.untyped_storage().data_ptr() for t in (base, out)}
    # base, current and point are rows of one tensor.
    assert all(nbytes < 4 * size for pointer, nbytes in seen.sizes.items() if pointer not in known)


def test_buffering_step_allocates_only_its_buffer():
    size = 600_000
    base, current, point = draw(0, 3, size, dtype=torch.float32)
    rule, space = FedBuff(3), Flat(size)
    state, _ = rule.step(space, rule.init(space, base), Update(0, base, current, point[None]))
    with Allocations() as seen:
        after, _ = rule.step(space, state, Update(0, base, current, point[None]))
    known = {t.untyped_storage().data_ptr() for t in (base, state["buffer"])}
    large = [nbytes for pointer, nbytes in seen.sizes.items() if pointer not in known and nbytes >= 4 * size]
    assert large == [4 * size]
    assert after["buffer"].data_ptr() != state["buffer"].data_ptr()


TENSORS = ParameterSpace.of_state_dict({"a": torch.zeros(2, 3).double(), "b": torch.zeros(5).double()})


@given(seeds, st.sampled_from([-0.5, 0.0, 1.0]), st.integers(1, 3))
def test_tensor_granularity_corrects_each_tensor_separately(seed, threshold, n):
    base, current = draw(seed, 2, 11)
    points = draw(seed + 1, n, 11)
    finer = OrthoDC(threshold, granularity="tensor")
    rule = AsyncCorrected(0.3, correction=finer)
    _, outcome = rule.step(TENSORS, rule.init(TENSORS, base), Update(0, base, current, points))
    v = points - base
    parts = [OrthoDC(threshold)(Flat(b - a), base[a:b], current[a:b], v[:, a:b]) for a, b in ((0, 6), (6, 11))]
    psi = torch.cat(parts, 1)
    s = parameter_at_distance(psi, 0.3)
    expected = Bezier(Flat(11), n)(torch.cat([current[None], current + psi]), s)
    assert relative(outcome.model, expected) <= 1e-12
    assert outcome.numbers["step"] == pytest.approx(s, rel=1e-9)


def test_cancellation_in_every_tensor_triggers_recomputation():
    base, current = draw(0, 2, 11)
    near = base + 0.7 * (current - base) + 1e-9 * draw(3, 11)
    rule = AsyncCorrected(1.0, correction=OrthoDC(1.0, granularity="tensor"))
    _, outcome = rule.step(TENSORS, rule.init(TENSORS, base), Update(0, base, current, near[None]))
    # The displacement itself is known to 1e-16, which is 1e-7 of what is left.
    assert outcome.numbers["norm"] == pytest.approx((outcome.model - current).norm().item(), rel=1e-6)


STATEFUL = [
    OrthoDyn(),
    AutoThreshold(),
    DelayCompensated(2.0, adaptive=True),
    Position() >> OrthoDyn(),
    OrthoDC(0.0) >> DelayCompensated(),
    OrthoDC(0.5, granularity="tensor") >> OrthoDyn(schedule=lambda version: "gradient" if version < 2 else "position"),
]


@pytest.mark.parametrize("correction", STATEFUL, ids=lambda correction: type(correction).__name__)
def test_corrections_with_memory_use_the_state_of_the_rule(correction):
    rule = AsyncCorrected(0.5, correction=correction)
    state, theirs = rule.init(TENSORS, torch.zeros(11).double()), None
    current = torch.zeros(11).double()
    for i in range(6):
        base, points = current - 0.1 * draw(i, 11), draw(100 + i, 1, 11)
        kept = copy.deepcopy(state)
        frame = Frame.of(TENSORS, base, current, points - base)
        corrected = correction.apply(frame, theirs)
        theirs = corrected.state
        before, (state, outcome) = state, rule.step(TENSORS, state, Update(0, base, current, points))
        assert relative(outcome.model, current + 0.5 * corrected.displacements()[0]) <= 1e-12
        assert same(before, kept)
        current = outcome.model
    assert ("correction" in state) == correction.keeps_state


def same(a, b):
    """Return whether two trees have equal entries."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@given(seeds, st.floats(0.1, 0.9))
def test_momentum_repeats_previous_steps(seed, beta):
    rule = Momentum(ASGD(0.5), beta=beta)
    state, model, velocity = rule.init(SPACE, torch.zeros(9)), draw(seed, 9), 0.0
    for i in range(4):
        base, point = draw(seed + i, 2, 9)
        velocity = beta * velocity + 0.5 * (point - base)
        state, outcome = rule.step(SPACE, state, Update(0, base, model, point[None]))
        assert relative(outcome.model, model + velocity) <= 1e-14
        assert outcome.numbers["norm"] == pytest.approx(velocity.norm().item(), rel=1e-12)
        model = outcome.model


def test_momentum_buffers_like_its_inner_rule():
    rule = Momentum(FedBuff(2), beta=0.5)
    state = rule.init(SPACE, torch.zeros(9))
    state, outcome = rule.step(SPACE, state, update(0))
    assert (outcome.model, "velocity" in state, rule.cohort) == (None, False, 1)
    state, outcome = rule.step(SPACE, state, update(0))
    assert torch.equal(state["velocity"], outcome.model - update(0).current) or "velocity" in state
    assert Momentum(FedAvg(3)).cohort == 3


@pytest.mark.parametrize("smoothed", [True, False])
def test_dominance_reduces_the_rate_of_frequent_clients(smoothed):
    """Report: the rate is multiplied by 1 / (N p_i), at most 1. p_i includes the current update."""
    rule = ASGD(0.6, dominance=Dominance(4, smoothed=smoothed))
    state, memories, counts = rule.init(SPACE, torch.zeros(9)), {}, {}
    for k, client in enumerate("aababacaad", 1):
        given_ = update(k, client_state=memories.get(client))
        state, outcome = rule.step(SPACE, state, given_)
        memories[client] = outcome.client_state
        counts[client] = counts.get(client, 0) + 1
        part = (counts[client] + 1) / (k + 4) if smoothed else counts[client] / k
        assert outcome.numbers["rate"] == pytest.approx(min(1.0, 0.6 / (4 * part)), rel=1e-12)
        assert memories[client] == {"updates": counts[client]}


def test_rates_can_follow_the_version():
    asked = []
    rule = FedOrtho(rate=lambda version: asked.append(version) or 0.5)
    state, _ = step(rule, update(0))
    step(rule, update(1), state)
    assert asked == [0, 1]


def test_staleness_penalty_scales_the_rate():
    assert staleness_penalty(0.0, 5.0, 1.0) == 1.0
    assert staleness_penalty(1.0, 5.0, 0.0) == 1.0
    assert staleness_penalty(0.5, 3.0, 1.0) == 2.0
    far = update(0)
    near = Update(0, far.current + 1e-9 * far.base, far.current, far.points)
    assert step(AsyncBezier(0.01, decay=1.0), near)[1].numbers["rate"] == pytest.approx(0.1)
    assert step(AsyncBezier(0.01, decay=1.0, penalty_limit=3.0), near)[1].numbers["rate"] == pytest.approx(0.03)


def test_rate_above_one_is_clamped_or_extrapolates():
    given_ = update(0)
    corrected = OrthoDC(1.0)(SPACE, given_.base, given_.current, given_.points - given_.base)[0]
    assert relative(step(FedOrtho(3.0), given_)[1].model, given_.current + corrected) <= 1e-14
    extended = step(FedOrtho(3.0, overshoot="extend"), given_)[1].model
    assert relative(extended, given_.current + 3 * corrected) <= 1e-14


@pytest.mark.parametrize("rule", RULES)
def test_zero_update_does_not_change_the_model(rule):
    base = draw(0, 9)
    still = Update(0, base, base, base[None])
    _, outcome = step(rule, still)
    assert torch.equal(outcome.model, base)
    assert math.isnan(outcome.numbers["cosine"])


def test_fedasync_with_distant_base_is_accurate():
    """The base cancels exactly in the position form."""
    given_ = Update(0, *(torch.tensor([x], dtype=torch.float64) for x in (1e20, 3.0)), torch.tensor([[1.0]]).double())
    assert step(FedAsync(1.0), given_)[1].model.item() == 1.0


@given(seeds, st.floats(-12, -3))
def test_small_corrections_are_accurate(seed, exponent):
    """An update near the current model, or nearly parallel to the drift, moves the model by the small remainder."""
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
def test_differentiating_a_step_raises_an_error():
    base, current, point = draw(0, 3, 9)

    def model(p):
        return step(FedOrtho(1.0), Update(0, base, current, p[None]))[1].model

    assert not model(point.clone().requires_grad_()).requires_grad
    with pytest.raises(ArgumentError, match="update: expected tensors outside of functorch transforms"):
        torch.func.jvp(model, (point,), (point,))


def test_staleness_weights_equal_their_formulas():
    assert [Hinge(10.0, 4.0)(x) for x in (0, 4, 5)] == [1.0, 1.0, 1 / 11]
    assert Polynomial(1.0)(1) == 0.5
    assert all(isinstance(rule, Rule) for rule in RULES)


def update_far():
    return Update(0, torch.zeros(9), torch.zeros(9), torch.full((1, 9), 3e38))


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: FedAsync(0.0), "rate: expected a finite number > 0"),
        (lambda: FedAsync(staleness=Polynomial), "staleness: expected an instance, got the class Polynomial"),
        (lambda: FedAsync(weighted=1), "weighted: expected one of True, False; got 1"),
        (lambda: FedAvg(2, weighted=None), "weighted: expected one of True, False"),
        (lambda: FedBuff(2, normalise="no"), "normalise: expected one of True, False"),
        (lambda: Dominance(2, smoothed=0.5), "smoothed: expected one of True, False"),
        (lambda: Dominance(2).next_client_state([3]), "client_state: expected a mapping or None"),
        (lambda: Dominance(2).next_client_state({"updates": "many"}), r"client_state\['updates'\]: expected an integer"),
        (lambda: ASGD(decay=torch.tensor(0.5)), "decay: expected a plain number"),
        (lambda: DCASGD(variant=["constant"]), r"variant: expected one of constant, adaptive; got \['constant'\]"),
        (lambda: step(Momentum(ASGD(1.0)), update_far()), "points: size of the velocity"),
        (lambda: FedAsync(staleness=0.5), "staleness: expected a function of an int, got 0.5"),
        (lambda: FedOrtho(-1.0), "rate: expected"),
        (lambda: FedOrtho(decay=2.0), "decay: expected"),
        (lambda: FedGS(update_form="sideways"), "update_form: expected one of tangent, position"),
        (lambda: AsyncBezier(threshold=-2.0), "threshold: expected"),
        (lambda: AsyncBezier(overshoot="jump"), "overshoot: expected one of"),
        (lambda: AsyncBezier(penalty_limit=0.0), "penalty_limit: expected"),
        (lambda: Hinge(a=-1.0), "a: expected"),
        (lambda: step(FedOrtho(0.5), update(0, n=2)), "points: expected one model, .* for FedOrtho, got 2"),
        (lambda: step(AsyncBezier(0.5), update(0, n=0)), "points: expected at least one control point, .* for AsyncBezier, got 0"),
        (lambda: FedAsync(0.5).init(type("Curved", (Manifold,), {"shape": (2,)})(), torch.zeros(2)), "needs exp, inner, log, which"),
        (lambda: FedAsync(0.5).init("flat", torch.zeros(2)), "space: expected a Manifold, got 'flat'"),
        (lambda: FedAsync().init(torch.nn.Linear(1, 1), torch.zeros(2)), r"got Linear: write ParameterSpace.of\(model\)"),
        (lambda: FedAsync().init({"w": torch.zeros(2)}, torch.zeros(2)), r"got dict: write ParameterSpace.of_state_dict\("),
        (lambda: FedAsync(transport="boat"), "transport: expected one of parallel, ladder, projection"),
        (lambda: FedAsync(transport="ladder").init(SPACE, torch.zeros(9)), "transport: expected None on a flat space"),
        (lambda: ASGD(rungs=0), "rungs: expected an integer >= 1"),
        (lambda: ASGD(dominance=0.5), "dominance: expected a Dominance"),
        (lambda: Dominance(0), "clients: expected an integer >= 1"),
        (lambda: DCASGD(variant="b"), "variant: expected one of constant, adaptive"),
        (lambda: DCASGD(strength=-1.0), "strength: expected"),
        (lambda: DCASGD(square_decay=2.0), "square_decay: expected"),
        (lambda: AsyncBezier(threshold="automatic"), "threshold: expected a number in"),
        (lambda: AsyncCorrected(correction=1.0), "correction: expected a Correction, got 1.0"),
        (lambda: FedAvg(0), "cohort: expected an integer >= 1"),
        (lambda: FedAvg(2, -1.0), "rate: expected a finite number > 0"),
        (lambda: FedBuff(2.5), "size: expected an integer >= 1"),
        (lambda: FedBuff(2, staleness=1), "staleness: expected a function of an int"),
        (lambda: step(FedBuff(2), update(0, n=2)), "points: expected one model, .* for FedBuff, got 2"),
        (lambda: step(FedBuff(1, normalise=True, staleness=lambda x: 0.0), update(0)), "weight: sum over the buffer: expected"),
        (lambda: step(FedAvg(1), update(0, weight=math.nan)), "weight: expected a finite number >= 0"),
        (lambda: FedAdam(2, beta1=1.0), r"beta1: expected a number in \[0, 1\)"),
        (lambda: FedAdam(2, beta2=-0.1), "beta2: expected"),
        (lambda: FedAdam(2, epsilon=0.0), "epsilon: expected a finite number > 0"),
        (lambda: FedAdam(2, initial_square=-1.0), "initial_square: expected"),
        (lambda: Momentum(ASGD), "rule: expected an instance, got the class ASGD"),
        (lambda: Momentum(ASGD(), beta=1.0), r"beta: expected a number in \[0, 1\)"),
        (lambda: step(ASGD(1.0), Update(0, torch.zeros(9), torch.zeros(9), torch.full((1, 9), 3e38) * 1e200)), "points"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
