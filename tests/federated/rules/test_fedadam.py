"""Tests of FedAdam against a transcription of the paper's loop, and of its limits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Update
from manifoldagg.federated.rules import FedAdam
from manifoldagg.manifolds import Flat, ParameterSpace, Sphere
from tests.support import draw, seeds

GOLDEN = {"FedAdam": FedAdam(2, rate=0.1)}

SIZE = 7
SPACE = Flat(SIZE)


def transcription(rounds, start, *, rate, beta1, beta2, tau, initial):
    """Transcription of Reddi et al. 2021, Algorithm 2 (FedAdam), for plain numbers."""
    x, m, v = list(start), [0.0] * len(start), [initial] * len(start)
    for cohort in rounds:
        total = sum(weight for weight, _ in cohort)
        for j in range(len(x)):
            delta = sum(weight * (client[j] - x[j]) for weight, client in cohort) / total
            m[j] = beta1 * m[j] + (1 - beta1) * delta
            v[j] = beta2 * v[j] + (1 - beta2) * delta**2
        x = [a + rate * b / (math.sqrt(c) + tau) for a, b, c in zip(x, m, v, strict=True)]
    return x


@settings(max_examples=12)
@given(
    seeds, st.integers(1, 3), st.floats(0.001, 1), st.floats(0, 0.95), st.floats(0, 0.999),
    st.sampled_from([1e-3, 0.1]), st.sampled_from([None, 0.0, 0.3]),
)  # fmt: skip
def test_run_equals_transcription_of_the_paper(seed, k, rate, beta1, beta2, epsilon, initial):
    rule = FedAdam(k, rate, beta1=beta1, beta2=beta2, epsilon=epsilon, initial_square=initial)
    model = start = draw(seed, SIZE)
    state, rounds = rule.init(SPACE, start), []
    for r in range(4):
        rounds.append([(0.3 + i, draw(seed + 10 * r + i + 1, SIZE)) for i in range(k)])
        for weight, client in rounds[-1]:
            state, outcome = rule.step(SPACE, state, Update(0, model, model, client[None], weight=weight))
        moved, model = outcome.model - model, outcome.model
        assert outcome.numbers["norm"] == pytest.approx(moved.norm().item(), rel=1e-9)
    first = epsilon**2 if initial is None else initial
    expected = transcription(
        [[(w, c.tolist()) for w, c in cohort] for cohort in rounds],
        start.tolist(), rate=rate, beta1=beta1, beta2=beta2, tau=epsilon, initial=first,
    )  # fmt: skip
    # Four steps of a dozen roundings; m / (√v + ε) magnifies those of a mean by at most its size over ε.
    assert model.tolist() == pytest.approx(expected, rel=1e-10, abs=1e-10)


def test_defaults_equal_those_of_the_paper():
    rule = FedAdam(3)
    assert (rule.beta1, rule.beta2, rule.epsilon, rule.initial_square) == (0.9, 0.99, 1e-3, None)
    assert rule.init(SPACE, draw(0, SIZE))["v"].tolist() == [1e-3**2] * SIZE


def test_first_step_has_no_bias_correction():
    model, client = torch.zeros(SIZE).double(), torch.full((1, SIZE), 1e6).double()
    rule = FedAdam(1, 1.0)
    _, outcome = rule.step(SPACE, rule.init(SPACE, model), Update(0, model, model, client))
    # (1 - β1) / √(1 - β2), up to ε / |Δ| = 1e-9 over √(1 - β2).
    assert outcome.model.tolist() == pytest.approx([0.1 / 0.1] * SIZE, rel=2e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_step_keeps_the_dtype_and_writes_only_to_out(dtype):
    rule, model = FedAdam(1), draw(0, SIZE, dtype=dtype)
    state = rule.init(SPACE, model)
    kept = {key: value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)}
    given_, out = Update(0, model, model.clone(), draw(1, 1, SIZE, dtype=dtype)), torch.empty(SIZE, dtype=dtype)
    after, outcome = rule.step(SPACE, state, given_, out=out)
    assert outcome.model is out
    assert torch.equal(given_.current, model)
    assert all(torch.equal(state[key], value) for key, value in kept.items())
    assert {after[key].dtype for key in ("m", "v")} == {dtype}
    assert torch.equal(rule.step(SPACE, state, given_)[1].model, out)


def test_update_with_overflowing_squares_is_rejected():
    rule, model = FedAdam(1), torch.zeros(SIZE)
    given_ = Update(0, model, model, torch.full((1, SIZE), 1e20))
    with pytest.raises(ArgumentError, match="points: size of the displacement: expected a finite number"):
        rule.step(SPACE, rule.init(SPACE, model), given_)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epsilon": 1e-50}, "epsilon: in torch.float32: expected"),
        ({"epsilon": 1e20}, "epsilon: in torch.float32: expected"),
        ({"initial_square": 1e300}, "initial_square: in torch.float32: expected"),
    ],
)
def test_constants_must_fit_the_dtype_of_the_model(options, words):
    with pytest.raises(ArgumentError, match=words):
        FedAdam(1, **options).init(SPACE, torch.zeros(SIZE))
    assert FedAdam(1, **options).init(SPACE, torch.zeros(SIZE).double())["v"].isfinite().all()


def test_curved_leaves_are_rejected_by_name():
    space = ParameterSpace.of_state_dict({"turn": torch.eye(3), "w": torch.zeros(2)}, {"turn": Sphere(3)})
    with pytest.raises(
        ArgumentError, match=r"space: expected flat leaves for the elementwise squares of FedAdam.*: turn: Power"
    ):
        FedAdam(2).init(space, space.point({"turn": torch.eye(3), "w": torch.zeros(2)}))
