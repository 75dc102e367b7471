"""Tests of FedAvg: means, weights, stragglers, and buffered updates."""

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldagg.federated import Rule, Update
from manifoldagg.federated.rules import FedAvg
from manifoldagg.manifolds import Flat
from tests.support import draw, relative, seeds

GOLDEN = {"FedAvg": FedAvg(2)}

SPACE = Flat(9)


def cohort(seed, k, dtype=torch.float64):
    current = draw(seed, 9, dtype=dtype)
    weights = (0.1 + torch.rand(k, generator=torch.Generator().manual_seed(seed))).tolist()
    return [
        Update(i, draw(seed + 100 + i, 9, dtype=dtype), current, draw(seed + i + 1, 1, 9, dtype=dtype), weight=w)
        for i, w in enumerate(weights)
    ]


def play(rule, updates):
    state = rule.init(SPACE, updates[0].current)
    for given_ in updates:
        state, outcome = rule.step(SPACE, state, given_)
    return state, outcome


@settings(max_examples=15)
@given(seeds, st.integers(1, 6), st.floats(0.1, 2.0), st.booleans())
def test_fedavg_step_is_the_weighted_mean_of_displacements(seed, k, rate, weighted):
    updates = cohort(seed, k)
    _, outcome = play(FedAvg(k, rate, weighted=weighted), updates)
    shares = [u.weight if weighted else 1.0 for u in updates]
    mean = sum(w * (u.points[0] - u.base) for w, u in zip(shares, updates, strict=True)) / sum(shares)
    assert relative(outcome.model, updates[0].current + rate * mean) <= 1e-14
    assert outcome.numbers["norm"] == pytest.approx(rate * mean.norm().item(), rel=1e-9)


@given(seeds, st.integers(1, 5))
def test_clients_of_one_base_are_averaged_as_models(seed, k):
    updates = [Update(u.client, u.current, u.current, u.points, weight=u.weight) for u in cohort(seed, k)]
    mean = sum(u.weight * u.points[0] for u in updates) / sum(u.weight for u in updates)
    assert relative(play(FedAvg(k), updates)[1].model, mean) <= 1e-14


@settings(max_examples=6)
@given(seeds, st.integers(2, 4))
def test_the_order_and_the_unit_of_weights_do_not_matter(seed, k):
    updates = cohort(seed, k)
    model = play(FedAvg(k), updates)[1].model
    for order in itertools.permutations(updates):
        # Each of k sums rounds once.
        assert relative(play(FedAvg(k), list(order))[1].model, model) <= 1e-15 * 4 * k
    scaled = [Update(u.client, u.base, u.current, u.points, weight=1e3 * u.weight) for u in updates]
    assert relative(play(FedAvg(k), scaled)[1].model, model) <= 1e-15 * 4 * k


@settings(max_examples=10)
@given(seeds)
def test_new_round_starts_after_each_step(seed):
    first, second = cohort(seed, 3), cohort(seed + 50, 3)
    rule = FedAvg(3)
    state, outcome = play(rule, first)
    moved = [Update(u.client, u.base, outcome.model, u.points, weight=u.weight) for u in second]
    for given_ in moved:
        state, again = rule.step(SPACE, state, given_)
    assert torch.equal(again.model, play(rule, moved)[1].model)
    assert state == {"version": 2, "count": 0, "total": 0.0}


def test_buffered_update_writes_nothing_and_reports_the_buffer_length():
    updates, rule = cohort(0, 4, torch.float32), FedAvg(4)
    state, waiting = rule.init(SPACE, updates[0].current), []
    for given_ in updates:
        kept, inputs = copy.deepcopy(state), copy.deepcopy(given_)
        out = torch.full((9,), 7.0)
        after, outcome = rule.step(SPACE, state, given_, out=out)
        assert state.keys() == kept.keys()
        assert all(torch.equal(torch.as_tensor(state[key]), torch.as_tensor(kept[key])) for key in state)
        assert all(torch.equal(getattr(given_, name), getattr(inputs, name)) for name in ("base", "current", "points"))
        assert outcome.model is (None if len(waiting) < 3 else out)
        assert bool((out == 7).all()) == (outcome.model is None)
        waiting.append(outcome.numbers["buffered"])
        state = after
    assert waiting == [1, 2, 3, 0]
    assert isinstance(rule, Rule)
    assert rule.cohort == 4


def test_cohort_is_averaged_by_known_data_shares():
    updates = [replace(u, share=share) for u, share in zip(cohort(0, 3), (5.0, 1.0, 2.0), strict=True)]
    mean = sum(u.share * (u.points[0] - u.base) for u in updates) / 8
    assert relative(play(FedAvg(3), updates)[1].model, updates[0].current + mean) <= 1e-14


def test_step_returns_the_client_state_unchanged():
    rule = FedAvg(2)
    given_ = Update(0, *draw(0, 2, 9), draw(1, 1, 9), client_state={"kept": 1.0})
    assert rule.step(SPACE, rule.init(SPACE, draw(0, 9)), given_)[1].client_state == {"kept": 1.0}
