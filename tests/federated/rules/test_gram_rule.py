"""Tests of `GramRule`, whose subclasses implement only two methods, on every kind of model and space."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given

from manifoldagg import Server, aggregate
from manifoldagg.corrections import OrthoDC
from manifoldagg.errors import RuleError
from manifoldagg.federated import GramRule, Payload, Update
from manifoldagg.federated.rules import ASGD, AsyncBezier, AsyncCorrected, FedOrtho
from manifoldagg.manifolds import Flat, ParameterSpace, Sphere
from tests.federated.fingerprint import bits
from tests.support import draw, seeds

CORRECTION = OrthoDC(1.0)
MODEL = {"w": torch.zeros(2, 3), "b": torch.zeros(2)}


class Ortho(GramRule):
    """FedOrtho(0.5) as a `GramRule` with two methods."""

    def coefficients(self, gram, state):
        return CORRECTION.coefficients(gram)[0], state

    def rate(self, state, update):
        return 0.5 * update.weight


class OrthoByTensor(Ortho):
    granularity = "tensor"

    def coefficients(self, gram, state):
        return OrthoDC(1.0, granularity="tensor").coefficients(gram)[0], state


class OrthoOfCurves(Ortho):
    single_point = False


def models(seed, count):
    return [
        {"w": w.view(2, 3), "b": b}
        for w, b in zip(
            draw(seed, count, 6, dtype=torch.float32), draw(seed + 1, count, 2, dtype=torch.float32), strict=True
        )
    ]


@pytest.mark.parametrize(
    ("mine", "shipped", "points"),
    [
        (Ortho(), FedOrtho(0.5), 1),
        (OrthoByTensor(), AsyncCorrected(0.5, correction=OrthoDC(1.0, granularity="tensor")), 1),
        (OrthoOfCurves(), AsyncBezier(0.5, threshold=1.0), 2),
    ],
    ids=["model", "tensor", "curve"],
)
@given(seed=seeds)
def test_rule_of_two_methods_equals_the_library_rule(mine, shipped, points, seed):
    current, base, *update = models(seed, 2 + points)
    given = update[0] if points == 1 else update
    results = [aggregate(rule, None, current, base, given, staleness=1) for rule in (mine, shipped)]
    assert bits(results[0]) == bits(results[1])


def test_rule_of_two_methods_equals_the_library_rule_on_a_sphere():
    space, generator = Sphere(5), torch.Generator().manual_seed(0)
    start = space.random_point(generator=generator, dtype=torch.float64)
    servers = [Server(space, rule, start, weights={"a": 1, "b": 1}) for rule in (Ortho(), FedOrtho(0.5))]
    tickets = [[s.dispatch(client) for client in "ab"] for s in servers]
    for i in range(2):
        tangent = space.random_tangent(start[None].clone(), generator=generator)
        points = space.exp(start[None].clone(), 0.1 * tangent)
        for s, mine in zip(servers, tickets, strict=True):
            assert s.receive(mine[i], Payload(points, 1)).accepted
    assert bits(servers[0].model) == bits(servers[1].model)


@dataclass(frozen=True)
class Mean(GramRule):
    """Rule that scales each displacement to the mean squared length of all displacements so far."""

    def coefficients(self, gram, state):
        count = state["version"] + 1
        mean = state.get("mean", 0.0) * (count - 1) / count + gram.matrix[0, 0] / count
        return [math.sqrt(mean / gram.matrix[0, 0]), 0.0], {**state, "mean": mean}


def test_state_of_gram_rule_is_stored_and_version_is_counted():
    model, state = [torch.zeros(1)], None
    for length in (3.0, 1.0):
        model, state, _ = aggregate(Mean(), state, model, model, [model[0] + length])
    assert state == {"version": 2, "mean": 5.0}
    assert model[0].item() == pytest.approx(3 + math.sqrt(5))


class Returns(GramRule):
    def __init__(self, coefficients, rate=1.0):
        super().__init__()
        object.__setattr__(self, "given", (coefficients, rate))

    def coefficients(self, gram, state):
        return self.given[0], state

    def rate(self, state, update):
        return self.given[1]


class ReturnsAnyRate(Returns):
    def step_size(self, state, update, penalty):
        # The tests check the annotations of `GramRule.step_size`, which this method overrides.
        return self.rate(state, update)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (Returns([1.0]), r"coefficients: expected 2 numbers, one for each of v1, g, got shape \(1,\)"),
        (Returns([1.0, 0.0, 0.0]), r"coefficients: expected 2 numbers"),
        (Returns(1.0), r"coefficients: expected 2 numbers, one for each of v1, g, got shape \(\)"),
        (Returns([1.0, 0.0], -1.0), "rate: step size: expected a finite number >= 0, got -1.0"),
        (Returns([math.nan, 0.0]), r"coefficients: expected finite numbers, got \[nan, 0.0\]"),
        (Returns([[1.0, -math.inf]]), r"coefficients: expected finite numbers, got \[\[1.0, -inf\]\]"),
        (Returns(["1", 0.0]), r"coefficients: expected finite numbers, got \['1', 0.0\]"),
        (Returns([10**400, 0.0]), "coefficients: expected finite numbers"),
        (Returns([1.0, 0.0], math.nan), "rate: step size: expected a finite number >= 0"),
        (ReturnsAnyRate([1.0, 0.0], "a"), "rate: step size: expected a finite number >= 0, got 'a'"),
        (ReturnsAnyRate([1.0, 0.0], None), "rate: step size: expected a finite number >= 0, got None"),
        (ReturnsAnyRate([1.0, 0.0], np.ones(2)), "rate: step size: expected a finite number >= 0"),
        (ReturnsAnyRate([1.0, 0.0], torch.ones(2)), "rate: step size: expected a finite number >= 0"),
    ],
)
def test_invalid_result_of_gram_rule_raises_rule_error(rule, words):
    with pytest.raises(RuleError, match=words):
        aggregate(rule, None, MODEL, MODEL, MODEL)


def test_coefficients_that_are_not_finite_raise_rule_error_in_a_server_and_change_nothing():
    server = Server(Flat(4), Returns([1.0, math.nan]), torch.zeros(4))
    ticket = server.dispatch("a")
    with pytest.raises(RuleError, match="coefficients: expected finite numbers"):
        server.receive(ticket, Payload(torch.ones(1, 4), 1))
    assert (server.version, server.rejected, server.model.tolist()) == (0, {}, [0.0] * 4)


@pytest.mark.parametrize("result", [([1.0, 0.0], None), [1.0, 0.0], None])
def test_coefficients_without_a_state_raise_rule_error(result):
    class Forgets(GramRule):
        def coefficients(self, gram, state):
            return result

    with pytest.raises(RuleError, match="coefficients: expected a tuple of coefficients and a dict, got"):
        aggregate(Forgets(), None, MODEL, MODEL, MODEL)


def test_numpy_numbers_are_accepted_as_coefficients():
    class Arrays(Ortho):
        def coefficients(self, gram, state):
            return np.array(CORRECTION.coefficients(gram)[0], dtype=float), state

        def rate(self, state, update):
            return np.float64(0.5 * update.weight)

    current, base, update = models(11, 3)
    results = [aggregate(rule, None, current, base, update, staleness=1) for rule in (Arrays(), FedOrtho(0.5))]
    assert bits(results[0]) == bits(results[1])


def test_gram_rule_without_coefficients_cannot_be_constructed():
    with pytest.raises(TypeError, match="coefficients"):
        GramRule()


class Logs(ASGD):
    """Subclass that overrides only `step`, like a wrapper that observes the steps."""

    seen = ()

    def step(self, space, state, update, *, out=None):
        Logs.seen = (*Logs.seen, update.client)
        return super().step(space, state, update, out=out)


def test_a_step_that_a_subclass_overrides_is_called_and_gives_the_same_bits():
    Logs.seen = ()
    points = draw(3, 1, 4, dtype=torch.float32)
    servers = [Server(Flat(4), rule, torch.zeros(4)) for rule in (Logs(0.5), ASGD(0.5))]
    for s in servers:
        assert s.receive(s.dispatch("a"), Payload(points, 1)).accepted
    assert Logs.seen == ("a",)
    assert bits(servers[0].model) == bits(servers[1].model)
    new = [aggregate(rule, None, MODEL, MODEL, models(5, 1)[0])[0] for rule in (Logs(0.5), ASGD(0.5))]
    assert len(Logs.seen) == 2
    assert bits(new[0]) == bits(new[1])


def test_plan_defers_the_computation_to_step():
    space = ParameterSpace.of_state_dict(MODEL)
    start = torch.zeros(8)
    update = Update("a", start, start + 1, draw(7, 1, 8, dtype=torch.float32))
    rule = Ortho()
    _, planned = rule.plan(space, rule.init(space, start), update)
    out = torch.full((8,), math.nan)
    _, done = rule.step(space, rule.init(space, start), update, out=out)
    assert done.model is out
    assert bits(planned.model.compute()) == bits(out)


def test_a_field_that_hides_the_method_rate_is_rejected():
    with pytest.raises(TypeError, match=r"Scaled.rate: expected a method rate\(state, update\), got a field"):

        @dataclass(frozen=True)
        class Scaled(Ortho):
            rate: float = 0.5


def test_a_field_rate_is_allowed_with_a_step_size():
    @dataclass(frozen=True)
    class Scaled(Ortho):
        rate: float = 0.25

        def step_size(self, state, update, penalty):
            return self.rate * update.weight

    base, current, client = models(0, 3)
    ours = aggregate(Scaled(), None, current, base, client)[0]
    expected = aggregate(FedOrtho(0.25), None, current, base, client)[0]
    assert bits(ours) == bits(expected)
