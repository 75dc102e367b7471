"""Tests of FADAS against a transcription and a closed form, and of the effect of delays on its rate."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Payload, Server, Update
from manifoldagg.federated.rules.fadas import FADAS
from manifoldagg.manifolds import Sphere
from tests.federated.random_clients import SIZE, SPACE, arrivals
from tests.support import draw, seeds

GOLDEN = {"FADAS": FADAS(2, rate=0.1)}


def transcription(came, start, *, size, rate, beta1, beta2, epsilon, delay_threshold):
    """Transcription of Wang et al. 2024 (ICML), Algorithm 1 with the delay-adaptive rate, for plain numbers."""
    x, n = list(start), len(start)
    m, v, largest, buffer, models = [0.0] * n, [0.0] * n, [0.0] * n, [], []
    for delta, late in came:
        buffer.append((delta, late))
        if len(buffer) == size:
            worst = max(late for _, late in buffer)
            eta = rate if worst <= delay_threshold else min(rate, 1 / worst)
            for j in range(n):
                mean = sum(delta[j] for delta, _ in buffer) / size
                m[j] = beta1 * m[j] + (1 - beta1) * mean
                v[j] = beta2 * v[j] + (1 - beta2) * mean**2
                largest[j] = max(largest[j], v[j])
                x[j] = x[j] + eta * m[j] / (math.sqrt(largest[j]) + epsilon)
            buffer = []
        models.append(list(x))
    return models


@settings(max_examples=8)
@given(
    seeds, st.integers(1, 4), st.floats(0.05, 2), st.floats(0, 0.95), st.floats(0, 0.999),
    st.sampled_from([1e-8, 0.1]), st.integers(0, 3),
)  # fmt: skip
def test_random_run_equals_transcription_of_the_paper(seed, size, rate, beta1, beta2, epsilon, tolerated):
    options = {"beta1": beta1, "beta2": beta2, "epsilon": epsilon, "delay_threshold": tolerated}
    came = arrivals(FADAS(size, rate, **options), seed)
    moves = [((event.point - event.base).tolist(), event.staleness) for event in came]
    expected = transcription(moves, draw(seed, SIZE).tolist(), size=size, rate=rate, **options)
    for event, model in zip(came, expected, strict=True):
        # A dozen roundings a step; m / (√v̂ + ε) magnifies those of a mean by its size over ε where v̂ is tiny.
        assert event.model.tolist() == pytest.approx(model, rel=1e-9, abs=1e-9)


@settings(max_examples=8)
@given(seeds, st.sampled_from([1e-8, 1e-2]))
def test_without_moments_step_is_mean_divided_by_largest_mean(seed, epsilon):
    rule, model = FADAS(2, 0.3, beta1=0.0, beta2=0.0, epsilon=epsilon), draw(seed, SIZE)
    state, means = rule.init(SPACE, model), []
    for r in range(4):
        moves = draw(seed + r + 1, 2, SIZE)
        means.append(moves.mean(0))
        for move in moves:
            state, outcome = rule.step(SPACE, state, Update(0, model, model, (model + move)[None]))
        expected = 0.3 * means[-1] / (torch.stack(means).abs().amax(0) + epsilon)
        # √(Δ²) = |Δ| up to a rounding, displacements up to those of models that are larger by 10 at most.
        assert (outcome.model - model - expected).abs().max() <= 1e-13 / means[-1].abs().min().clamp(1e-2, 1)
        model = outcome.model


@pytest.mark.parametrize(
    ("adaptive", "rates"),
    [("bound", [0.5, 0.5, 0.5, 0.25]), ("scale", [0.5, 0.5, 0.25, 0.125]), ("none", [0.5] * 4)],
)
def test_rate_depends_on_the_largest_staleness_in_the_buffer(adaptive, rates):
    rule, model = FADAS(3, 0.5, adaptive=adaptive), draw(0, SIZE)
    state = rule.init(SPACE, model)
    for late, rate in zip([0, 1, 2, 4], rates, strict=True):
        for staleness in (0, late, 0):
            update = Update(0, model, model, draw(1, 1, SIZE), staleness=staleness)
            state, outcome = rule.step(SPACE, state, update)
        assert (outcome.numbers["rate"], outcome.numbers["step"]) == (rate, rate)
        assert state["max_staleness"] == 0


def test_step_is_divided_by_the_largest_square():
    """After one large displacement, the steps of small displacements stay small."""
    rule, model = FADAS(1, 1.0, beta1=0.0, beta2=0.0), torch.zeros(SIZE).double()
    state, steps = rule.init(SPACE, model), []
    for size in (100.0, 1.0, 1.0):
        state, outcome = rule.step(SPACE, state, Update(0, model, model, torch.full((1, SIZE), size).double()))
        steps.append(outcome.model[0].item())
    assert steps == pytest.approx([1.0, 0.01, 0.01], rel=1e-9)


def test_first_step_has_no_bias_correction():
    rule, model = FADAS(1, 1.0), torch.zeros(SIZE).double()
    _, outcome = rule.step(SPACE, rule.init(SPACE, model), Update(0, model, model, torch.ones(1, SIZE).double()))
    # (1 - β1) / √(1 - β2), up to ε = 1e-8 over √(1 - β2).
    assert outcome.model.tolist() == pytest.approx([0.1 / 0.1] * SIZE, rel=2e-7)
    assert (rule.beta1, rule.beta2, rule.epsilon, rule.delay_threshold) == (0.9, 0.99, 1e-8, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_step_keeps_the_dtype_and_writes_only_to_out(dtype):
    rule, model = FADAS(1), draw(0, SIZE, dtype=dtype)
    state = rule.init(SPACE, model)
    kept = {key: value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)}
    update, out = Update(0, model, model.clone(), draw(1, 1, SIZE, dtype=dtype)), torch.empty(SIZE, dtype=dtype)
    after, outcome = rule.step(SPACE, state, update, out=out)
    assert outcome.model is out
    assert torch.equal(update.current, model)
    assert all(torch.equal(state[key], value) for key, value in kept.items())
    assert all(after[key].dtype == dtype for key in ("m", "v", "largest"))
    assert outcome.numbers["norm"] == pytest.approx((out - model).double().norm().item(), rel=1e-6)


def test_huge_update_does_not_cause_rejection_of_other_updates():
    server = Server(SPACE, FADAS(3), torch.zeros(SIZE))
    for k, move in enumerate((1e25, 0.1, 0.1, 0.1)):
        ticket = server.dispatch(k)
        reason = server.receive(ticket.id, Payload((ticket.message.start + move)[None], 1)).reason
        assert reason.startswith("points") == (k == 0)
    assert server.version == 1


@pytest.mark.parametrize(
    ("dtype", "options", "accepted"),
    [
        (torch.float32, {"initial_square": 1e300}, False),
        (torch.float64, {"initial_square": 1e300}, True),
        (torch.float32, {"epsilon": 1e-50}, False),
        (torch.float64, {"epsilon": 1e-50}, True),
    ],
)
def test_options_must_fit_the_dtype_of_the_model(dtype, options, accepted):
    start, (name,) = torch.zeros(SIZE, dtype=dtype), options
    if accepted:
        assert FADAS(**options).init(SPACE, start)["largest"].isfinite().all()
        return
    with pytest.raises(ArgumentError, match=f"^{name}"):
        FADAS(**options).init(SPACE, start)


@pytest.mark.usefixtures("as_shipped")
def test_invalid_arguments_are_rejected_by_name():
    for options in (
        {"size": 0}, {"rate": 0.0}, {"beta1": 1.0}, {"beta2": -0.1}, {"epsilon": 0.0},
        {"initial_square": -1.0}, {"delay_threshold": -1}, {"adaptive": "maybe"},
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=next(iter(options))):
            FADAS(**options)
    with pytest.raises(ArgumentError, match=r"FADAS.*Sphere"):
        FADAS().init(Sphere(3), torch.tensor([1.0, 0.0, 0.0]))
    rule, model = FADAS(1), torch.zeros(SIZE)
    far = Update(0, model, model, torch.full((1, SIZE), 1e30))
    with pytest.raises(ArgumentError, match="points"):
        rule.step(SPACE, rule.init(SPACE, model), far)
