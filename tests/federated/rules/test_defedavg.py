"""Tests of DeFedAvg-nIID: a transcription, special cases, and unbiased client sampling."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Payload, Server, Update
from manifoldagg.federated.rules import FedAvg, FedBuff
from manifoldagg.federated.rules.defedavg import DeFedAvg
from manifoldagg.federated.staleness import Constant
from tests.federated.random_clients import SIZE, SPACE, arrivals
from tests.support import draw, relative, seeds

GOLDEN = {"DeFedAvg": DeFedAvg(2)}


# The law holds for any rate, also for those above the stability limit.
@pytest.mark.filterwarnings("ignore::manifoldagg.errors.StabilityWarning")
@settings(max_examples=6)
@given(seeds, st.integers(1, 4), st.floats(0.1, 1.5))
def test_random_run_equals_transcription_of_the_paper(seed, k, rate):
    x, buffer = draw(seed, SIZE), []
    for event in arrivals(DeFedAvg(k, rate), seed):
        buffer.append(event.point - event.base)
        if len(buffer) == k:
            x, buffer = x + rate * sum(buffer) / k, []
        assert event.receipt.buffered == bool(buffer)
        # Thirty steps of a few roundings.
        assert relative(event.model, x) <= 1e-13


@settings(max_examples=3)
@given(seeds)
def test_defedavg_equals_fedavg_and_fedbuff_with_constant_weights(seed):
    rules = [DeFedAvg(3, 0.7), FedAvg(3, 0.7, weighted=False), FedBuff(3, 0.7, staleness=Constant())]
    lives = [[event.model for event in arrivals(rule, seed)] for rule in rules]
    assert all(torch.equal(a, b) for life in lives[1:] for a, b in zip(lives[0], life, strict=True))


@settings(max_examples=8)
@given(seeds, st.integers(1, 4))
def test_mean_over_random_cohorts_equals_mean_over_all_clients(seed, k):
    x, moves = draw(seed, SIZE), draw(seed + 1, 4, SIZE)
    went = []
    for cohort in itertools.combinations(range(4), k):
        rule = DeFedAvg(k)
        state = rule.init(SPACE, x)
        for i in cohort:
            state, outcome = rule.step(SPACE, state, Update(i, x, x, (x + moves[i])[None], weight=0.1 + i))
        went.append(outcome.model - x)
    assert relative(torch.stack(went).mean(0), moves.mean(0)) <= 1e-13


def test_all_cohorts_are_equally_likely():
    rule, generator, draws = DeFedAvg(2), np.random.default_rng(0), 6000
    seen = Counter(frozenset(rule.draw("abcd", generator)) for _ in range(draws))
    assert all(len(cohort) == 2 for cohort in seen)
    assert len(seen) == 6
    # χ² with 5 degrees of freedom is above 25.7 in one of 10,000.
    assert sum((count - draws / 6) ** 2 / (draws / 6) for count in seen.values()) < 25.7


def test_the_same_generator_draws_the_same_cohorts():
    drawn = [[DeFedAvg(3).draw(range(9), g) for _ in range(4)] for g in (np.random.default_rng(1) for _ in range(2))]
    assert drawn[0] == drawn[1]


def test_slow_client_counts_as_often_as_it_is_sampled():
    """Client 0 returns its updates twelve rounds late, and the other clients return immediately.

    Each client moves in its own direction.
    """
    rule, generator, moves = DeFedAvg(2, 0.6), np.random.default_rng(2), draw(9, 3, SIZE)
    server, late, drawn = Server(SPACE, rule, torch.zeros(SIZE).double()), [], Counter()

    def answer(client, ticket):
        payload = Payload((ticket.message.start + moves[client])[None], samples=1)
        assert server.receive(ticket.id, payload).accepted

    for now in range(30):
        cohort = [(client, server.dispatch(client)) for client in rule.draw(range(3), generator)]
        drawn.update(client for client, _ in cohort)
        late += [(now + 12, *task) for task in cohort if task[0] == 0]
        for task in [task for task in cohort if task[0] != 0]:
            answer(*task)
        while late and late[0][0] <= now:
            answer(*late.pop(0)[1:])
    for _, client, ticket in late:
        answer(client, ticket)
    assert sum(drawn.values()) == 60
    # Thirty steps of a few roundings.
    assert relative(server.model, 0.6 / 2 * sum(drawn[i] * moves[i] for i in range(3))) <= 1e-13
    assert max(row["staleness"] for row in server.history) >= 6


@pytest.mark.usefixtures("as_shipped")
def test_invalid_arguments_are_rejected_by_name():
    with pytest.raises(ArgumentError, match="cohort"):
        DeFedAvg(0)
    for clients in ([0, 1], [0, 1, 1, 2], [[0], [1], [2]], {0, 1, 2}, 3):
        with pytest.raises(ArgumentError, match="clients"):
            DeFedAvg(3).draw(clients, np.random.default_rng(0))
