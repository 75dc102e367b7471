"""Tests of the client sampler of each rule. The laws of samplers are in `tests/simulation/test_event_loop.py`."""

import numpy as np
import pytest

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import rules
from manifoldagg.federated.server.client_sampling import (
    AsyncSampler,
    CohortSampler,
    RoutedSampler,
    RuleSampler,
    sampler_for,
)
from tests.simulation.event_loops import rule_of


def test_wrapper_rule_samples_clients_like_its_inner_rule():
    clients = [0, 1, 2]
    generator = np.random.default_rng(0)
    for kind, made in (
        ("cohorts", CohortSampler),
        ("drawn", RuleSampler),
        ("routed", RoutedSampler),
        ("continuous", AsyncSampler),
    ):
        rule = rule_of(kind, clients)
        assert type(sampler_for(rule, clients, None, generator)) is made
        assert type(sampler_for(rules.Momentum(rule), clients, None, generator)) is made


@pytest.mark.usefixtures("as_shipped")
def test_invalid_arguments_raise_error_with_their_name():
    clients = [0, 1, 2, 3]
    generator = np.random.default_rng(0)
    for call, words in (
        (lambda: sampler_for(rules.FedAsync(), clients, 0, generator), "concurrency: expected"),
        (
            lambda: sampler_for(rules.FedAvg(2), clients, 3, generator),
            "concurrency: expected None, as FedAvg waits for a cohort of 2",
        ),
        (
            lambda: sampler_for(rules.GeneralizedAsyncSGD([0.5, 0.5, 0.0]), clients, None, generator),
            "rule: routing: expected a share for each participating client; missing for 2, 3$",
        ),
        (
            lambda: sampler_for(rules.GeneralizedAsyncSGD([0.125] * 8), clients, None, generator),
            "rule: routing: expected the participating clients, got unknown ones: 4, 5, 6, 7$",
        ),
    ):
        with pytest.raises(ArgumentError, match=words):
            call()
