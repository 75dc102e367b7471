"""Availability: who is here when, and what is lost with those who fail."""

import collections
import copy
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError, ManifoldAggError
from manifoldagg.simulation import PriorityScheduler
from manifoldagg.simulation.availability import AvailabilityChange, AvailabilityTrace, churn
from manifoldagg.simulation.delays import Deterministic, Exponential
from manifoldagg.simulation.jackson import JacksonNetwork
from manifoldagg.simulation.schedulers import Completion, IndependentClients
from tests.support import seeds


def constant(seconds=2.0):
    return IndependentClients(Deterministic(seconds), np.random.default_rng(0))


def availability_trace(*changes, scheduler=None, available=()):
    return AvailabilityTrace(
        scheduler or constant(), [AvailabilityChange(*change) for change in changes], available=available
    )


def test_leaving_client_finishes_its_task_and_receives_no_other():
    clients = availability_trace((1.0, "a", "leave"), (9.0, "a", "return"))
    clients.dispatch("a", 1.0)
    assert clients.next() == AvailabilityChange(1.0, "a", "leave", lost_tasks=0)
    with pytest.raises(ArgumentError, match="client: expected a client that is available at 1 s, got 'a'"):
        clients.dispatch("a", 1.0)
    assert clients.next().time == 2.0
    assert clients.next() == AvailabilityChange(9.0, "a", "return")
    clients.dispatch("a", 1.0)
    assert clients.next().time == 11.0


def test_client_that_returns_during_its_last_task_is_not_idle():
    clients = availability_trace((0.5, "a", "leave"), (1.0, "a", "return"), available=["b"])
    assert clients.is_idle("b")
    assert not clients.is_idle("c")
    clients.dispatch("a", 1.0)
    assert [(clients.next().time, clients.is_idle("a")) for _ in range(3)] == [(0.5, False), (1.0, False), (2.0, True)]


def test_tasks_of_a_failed_client_are_lost():
    clients = availability_trace((1.0, "a", "fail"), (1.5, "a", "return"))
    clients.dispatch("a", 1.0)
    assert clients.next() == AvailabilityChange(1.0, "a", "fail", lost_tasks=1)
    assert clients.next().kind == "return"
    clients.dispatch("a", 1.0)
    done = clients.next()
    assert (done.time, done.dispatched, done.relative_delay) == (3.5, 1.5, 0)
    with pytest.raises(ManifoldAggError, match="expected a task in flight"):
        clients.next()


def test_client_joins_at_its_declared_time():
    clients = availability_trace((4.0, "b", "join"), available=["a"])
    assert clients.available == {"a"}
    with pytest.raises(ArgumentError, match="client: expected a client that is available at 0 s, got 'b'"):
        clients.dispatch("b", 1.0)
    assert clients.next() == AvailabilityChange(4.0, "b", "join")
    assert clients.available == {"a", "b"}
    assert clients.now == 4.0


def test_changes_precede_completions_at_the_same_time():
    clients = availability_trace((2.0, "b", "leave"), (2.0, "a", "fail"), (1.0, "c", "leave"))
    clients.dispatch("a", 1.0)
    clients.dispatch("b", 1.0)
    seen = [clients.next() for _ in range(4)]
    assert [event.client for event in seen] == ["c", "b", "a", "b"]
    assert seen[2].lost_tasks == 1
    assert isinstance(seen[3], Completion)


def test_worker_is_free_after_its_client_failed():
    """Manifold's scheduler: one worker, and the client that it trains fails after 1 s."""
    scheduler = PriorityScheduler(2, np.random.default_rng(0), workers=1, speed=1.0)
    clients = availability_trace((1.0, "a", "fail"), scheduler=scheduler, available=["b"])
    clients.dispatch("a", 5.0)
    assert not isinstance(clients.next(), Completion)
    clients.dispatch("b", 5.0)
    done = clients.next()
    assert (done.client, done.started, done.time) == ("b", 1.0, 6.0)


def test_all_queued_tasks_of_a_failed_client_are_lost_and_can_be_routed_again():
    network = JacksonNetwork([0.5, 0.5], [1.0, 1e-9], np.random.default_rng(0), concurrency=3)
    clients = availability_trace((0.0, 1, "fail"), scheduler=network, available=[0])
    for _ in range(3):
        clients.dispatch(1, 1.0)
    assert clients.next().lost_tasks == 3
    assert network.queue_lengths == (0, 0)
    for _ in range(3):
        clients.dispatch(0, 1.0)
    assert [clients.next().client for _ in range(3)] == [0, 0, 0]


def drive(clients, steps):
    """Dispatch whoever answers, joins or returns; what happened."""
    seen = []
    for _ in range(steps):
        event = clients.next()
        seen.append(event)
        back = isinstance(event, AvailabilityChange) and event.kind in ("join", "return")
        if back or (isinstance(event, Completion) and event.client in clients.available):
            clients.dispatch(event.client, 1.0)
    return seen


def unsteady(seed, scheduler):
    changes = churn(range(4), Exponential(5.0), Exponential(2.0), 30.0, np.random.default_rng([seed, 1]))
    changes += [AvailabilityChange(3.0, "late", "join"), AvailabilityChange(8.0, "late", "leave")]
    return AvailabilityTrace(scheduler, changes, available=range(4))


SCHEDULERS = [
    lambda seed: IndependentClients(Exponential(1.0), np.random.default_rng(seed)),
    lambda seed: PriorityScheduler(4, np.random.default_rng(seed), speed=1.0),
]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@given(seeds)
def test_each_task_finishes_is_lost_or_is_in_flight(scheduler, seed):
    inner = scheduler(seed)
    clients = unsteady(seed, inner)
    for client in range(4):
        clients.dispatch(client, 1.0)
    seen = drive(clients, 60)
    assert [event.time for event in seen] == sorted(event.time for event in seen)
    finished = sum(isinstance(event, Completion) for event in seen)
    lost = sum(event.lost_tasks for event in seen if isinstance(event, AvailabilityChange))
    back = sum(isinstance(event, AvailabilityChange) and event.kind in ("join", "return") for event in seen)
    here, refused = set(range(4)), 0
    for event in seen:
        if isinstance(event, Completion):
            refused += event.client not in here
            # Of those away, only one that left may answer; a failed one never does.
            assert event.client in here or event.client == "late"
        elif event.kind in ("join", "return"):
            here.add(event.client)
        else:
            here.discard(event.client)
    assert here == clients.available
    assert 4 + finished - refused + back == finished + lost + inner.in_flight


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@given(seeds, st.integers(0, 30))
def test_a_copy_continues_with_the_same_events_and_leaves_the_trace_unchanged(scheduler, seed, before):
    clients, unused = unsteady(seed, scheduler(seed)), unsteady(seed, scheduler(seed))
    for client in range(4):
        clients.dispatch(client, 1.0)
        unused.dispatch(client, 1.0)
    assert drive(clients, before) == drive(unused, before)
    ahead = drive(copy.deepcopy(clients), 20)
    assert drive(clients, 20) == ahead == drive(unused, 20)
    assert clients.available == unused.available


@given(seeds)
def test_churn_alternates_failures_and_returns(seed):
    changes = churn(["a", "b"], Exponential(2.0), Exponential(1.0), 30.0, np.random.default_rng(seed))
    by_client = collections.defaultdict(list)
    for change in changes:
        by_client[change.client].append(change)
    for mine in by_client.values():
        assert [change.kind for change in mine] == [("fail", "return")[i % 2] for i in range(len(mine))]
        assert [change.time for change in mine] == sorted(change.time for change in mine)
        assert mine[-1].time <= 30.0
    AvailabilityTrace(constant(), changes)


@pytest.mark.usefixtures("as_shipped")
def test_churn_has_the_expected_fraction_of_available_time():
    """A renewal process: the share of time here tends to up / (up + down)."""
    count, until = 200, 40.0
    changes = churn(range(count), Exponential(3.0), Exponential(1.0), until, np.random.default_rng(0))
    # At time 40 the chance to be here is 3/4 + exp(−40·(1/3 + 1))/4: stationary to 1e-23.
    here = set(range(count))
    for change in changes:
        (here.add if change.kind == "return" else here.discard)(change.client)
    # Six standard deviations of a binomial count.
    assert abs(len(here) - count * 0.75) <= 6 * math.sqrt(count * 3 / 16)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: AvailabilityChange(-1.0, "a", "join"), "time: expected"),
        (
            lambda: AvailabilityChange(1.0, "a", "vanish"),
            "kind: expected one of join, leave, fail, return; got 'vanish'",
        ),
        (lambda: AvailabilityChange(1.0, 2.5, "join"), "client: expected an int or a str"),
        (
            lambda: AvailabilityTrace(constant(), [(1.0, "a", "fail")]),
            r"changes\[0\]: expected an AvailabilityChange, got \(1.0",
        ),
        (lambda: availability_trace((1.0, "a", "return")), "got one that is available"),
        (lambda: availability_trace((1.0, "a", "fail"), (2.0, "a", "leave")), "got one that is unavailable"),
        (lambda: availability_trace((1.0, "a", "join"), available=["a"]), "got one that is available"),
        (lambda: availability_trace((1.0, "a", "fail"), (2.0, "a", "join")), "got one that is unavailable"),
        (
            lambda: churn(["a"], Deterministic(0.0), Deterministic(0.0), 1.0, np.random.default_rng(0)),
            "up, down: expected",
        ),
        (
            lambda: churn(["a"], Deterministic(1.0), Deterministic(0.0), math.inf, np.random.default_rng(0)),
            "until: expected",
        ),
    ],
)
def test_invalid_input_is_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


def test_changes_in_the_past_are_rejected():
    scheduler = constant()
    scheduler.dispatch("a", 1.0)
    scheduler.next()
    with pytest.raises(ArgumentError, match="changes: expected times >= 2"):
        availability_trace((1.0, "a", "fail"), scheduler=scheduler)
