"""Tests of `examples/privacy.py`: the accountant against integration, and the measured leakage of a canary's update."""

import math
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("dp_accounting")
pytest.importorskip("sklearn")

from manifoldagg.federated.rules import FedBuff, Private
from manifoldagg.federated.staleness import Constant
from manifoldagg.integrations.accounting import epsilon

AUDIT = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[3] / "examples" / "privacy.py")))
NUM_CLIENTS, NOISE, DELTA, RUNS = 4, 2.0, 1e-5, 500


@pytest.fixture(scope="module")
def updates():
    return AUDIT.canary_updates(NUM_CLIENTS)


def measured(make_rule, updates):
    return AUDIT.measured_epsilon(*AUDIT.attack_scores(make_rule, updates, RUNS), DELTA)


@pytest.mark.parametrize("setting", AUDIT.SETTINGS, ids=lambda setting: setting.source)
def test_the_accountant_agrees_with_integration_and_is_below_the_published_bound(setting):
    found = epsilon(setting.noise, participations=setting.participations, delta=setting.delta)
    integrated = AUDIT.integrated_epsilon(setting.noise, setting.participations, setting.delta)
    # The quadrature has a relative error of 1e-10 in delta, and the accountant's solver one of 1e-6 in epsilon.
    assert found == pytest.approx(integrated, rel=1e-5)
    # A published bound is at most 35 percent above the exact value.
    assert 1.0 <= setting.bound / found <= 1.35


def test_example_has_three_settings():
    assert len(AUDIT.SETTINGS) == 3


@pytest.mark.parametrize("error", [0.9, 1.1])
def test_another_noise_has_another_epsilon(error):
    one = AUDIT.SETTINGS[1]
    wrong = AUDIT.integrated_epsilon(error * one.noise, one.participations, one.delta)
    assert wrong != pytest.approx(epsilon(one.noise, participations=1, delta=one.delta), rel=0.05)


def test_the_measured_leakage_is_above_zero_and_below_the_bound(updates):
    """With the accountant's noise of one release, an attacker who knows all other updates cannot do better."""
    assert updates[2].norm() > 0.5  # the canary's update is clipped
    found = measured(AUDIT.private_rule(0.5, NUM_CLIENTS), updates)
    assert 0.5 < found <= epsilon(0.5, participations=1, delta=DELTA)


def test_more_noise_leaks_less(updates):
    much = measured(AUDIT.private_rule(8.0, NUM_CLIENTS), updates)
    assert much <= epsilon(8.0, participations=1, delta=DELTA)
    assert much < measured(AUDIT.private_rule(0.5, NUM_CLIENTS), updates)


def less_noise(seed):
    return Private(FedBuff(NUM_CLIENTS, staleness=Constant()), clip=0.5, noise=NOISE / 8, seed=seed)


def the_same_noise_in_each_run(seed):
    return less_noise(0)


def longer_updates(seed):
    """Return updates of eight times the clip, with noise for the clip."""
    return replace(less_noise(seed), clip=4.0)


@pytest.mark.parametrize("make_rule", [less_noise, the_same_noise_in_each_run, longer_updates])
def test_the_audit_detects_a_server_that_is_not_private(make_rule, updates):
    assert measured(make_rule, updates) > epsilon(NOISE, participations=1, delta=DELTA)


def test_the_statistics_are_those_of_two_normal_distributions():
    """Two unit normal distributions at distance 1 satisfy (epsilon, delta) for noise 1, and are not equal."""
    generator = torch.Generator().manual_seed(0)
    with_canary, without = torch.randn(2, 20_000, generator=generator)
    found = AUDIT.measured_epsilon(with_canary + 1.0, without, DELTA)
    assert 1.0 < found <= epsilon(1.0, participations=1, delta=DELTA)
    assert AUDIT.measured_epsilon(with_canary, without, DELTA) <= 0.1
    assert AUDIT.measured_epsilon(without + 10.0, without, DELTA) >= math.log(1000)
