"""Crews: the bits of a run do not depend on who trains, how many, or who is done first."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.simulation import run
from tests.simulation.crews import METHODS, SCENARIOS, Posted, Shuffled, federation

ROUNDS = 14


def trained(method, scenario="plain", executor=None, rounds=ROUNDS):
    """A run, and the payloads of its answers."""
    seen = []
    one = run(federation(), METHODS[method], rounds=rounds, executor=executor, watch=seen.append, **SCENARIOS[scenario])
    return one, [event.payload for event in seen]


def same(a, b):
    one, payloads = a
    other, others = b
    assert one == other
    assert len(payloads) == len(others)
    for p, q in zip(payloads, others, strict=True):
        assert torch.equal(p.points, q.points)
        assert p.buffers.keys() == q.buffers.keys()
        assert all(torch.equal(tensor, q.buffers[name]) for name, tensor in p.buffers.items())
        assert (p.memory is None) == (q.memory is None)
    return True


QUEUED = ("routed", "defedavg", "remembers, drawn")
CASES = [(method, scenario) for method in METHODS for scenario in SCENARIOS if scenario != "queues" or method in QUEUED]


@pytest.fixture(scope="module")
def alone():
    """Runs that train here."""
    return {case: trained(*case) for case in CASES}


@given(
    case=st.sampled_from(CASES),
    seed=st.integers(0, 2**32),
    workers=st.sampled_from([1, 2, 5, None]),
    kind=st.sampled_from([Shuffled, Posted]),
)
def test_any_order_of_completion_gives_the_same_bits(alone, case, seed, workers, kind):
    executor = kind(seed, workers)
    assert same(trained(*case, executor), alone[case])
    executor.shutdown()


@pytest.mark.parametrize("method", ["fedasync", "routed", "remembers"])
def test_threads_give_the_same_bits(alone, method):
    with ThreadPoolExecutor(1) as pool:
        assert same(trained(method, "plain", pool), alone[method, "plain"])
    assert same(trained(method, "plain", partial(ThreadPoolExecutor, 3)), alone[method, "plain"])


def test_some_tasks_of_these_runs_diverge_and_start_from_what_the_one_before_left(alone):
    one, payloads = alone["remembers", "plain"]
    assert one.refused > 0
    assert max(payload.memory["count"] for payload in payloads) == 3
