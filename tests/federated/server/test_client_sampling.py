"""Asking: which way belongs to a rule. Its laws are those of a course, in `tests/simulation/test_event_loop.py`."""

import numpy as np
import pytest

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import rules
from manifoldagg.federated.server.client_sampling import Cohorts, Continuous, Drawn, Routed, asking
from tests.simulation.event_loops import rule_of


def test_a_rule_that_wraps_another_asks_as_that_one():
    clients = [0, 1, 2]
    generator = np.random.default_rng(0)
    for kind, made in (("cohorts", Cohorts), ("drawn", Drawn), ("routed", Routed), ("continuous", Continuous)):
        rule = rule_of(kind, clients)
        assert type(asking(rule, clients, None, generator)) is made
        assert type(asking(rules.Momentum(rule), clients, None, generator)) is made


@pytest.mark.usefixtures("as_shipped")
def test_what_does_not_fit_is_refused_by_name():
    clients = [0, 1, 2, 3]
    generator = np.random.default_rng(0)
    for call, words in (
        (lambda: asking(rules.FedAsync(), clients, 0, generator), "tasks: expected"),
        (
            lambda: asking(rules.FedAvg(2), clients, 3, generator),
            "tasks: expected None, as FedAvg waits for a cohort of 2",
        ),
        (
            lambda: asking(rules.GeneralizedAsyncSGD([0.5, 0.5, 0.0]), clients, None, generator),
            "rule: routing: expected a share for each client that takes part; none for 2, 3$",
        ),
        (
            lambda: asking(rules.GeneralizedAsyncSGD([0.125] * 8), clients, None, generator),
            "rule: routing: expected the clients that take part; none of them: 4, 5, 6, 7$",
        ),
    ):
        with pytest.raises(ArgumentError, match=words):
            call()
