"""The event loop: who is asked when, for every way to ask, every scheduler, and clients that come and go."""

import math
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import rules
from manifoldagg.federated.server.client_sampling import (
    AsyncSampler,
    AvailableClients,
    CohortSampler,
    RoutedSampler,
    RuleSampler,
)
from manifoldagg.simulation import AvailabilityChange, Deterministic, IndependentClients
from manifoldagg.simulation.event_loop import CompletionEvent, DispatchEvent, DropoutEvent, EventLoop
from tests.simulation.event_loops import Completed, Dispatched, drive, workloads

OFTEN = st.integers(2, 5)


def never_first(often):
    return lambda nth: nth % often > 0


def alone(changes=(), clients=(0, 1), concurrency=None, seconds=2.0):
    scheduler = IndependentClients(Deterministic(seconds), np.random.default_rng(0))
    return EventLoop(list(clients), AsyncSampler(concurrency, np.random.default_rng(0)), scheduler, changes)


@given(workloads(), OFTEN)
def test_tasks_of_a_client_complete_once_and_in_order(workload, often):
    seen = drive(workload, accepts=never_first(often))
    out = {client: [] for client in workload.clients}
    given_ = Counter()
    time = 0.0
    for event in seen.events:
        if isinstance(event, Dispatched):
            assert event.task_id.task_index == given_[event.task_id.client]
            given_[event.task_id.client] += 1
            out[event.task_id.client].append(event.task_id)
        elif isinstance(event, Completed):
            assert event.task_id == out[event.task_id.client].pop(0)
            assert event.completion.time >= time
            time = event.completion.time
        else:
            client = event.task_ids[0].client
            assert list(event.task_ids) == out[client]
            out[client] = []


@given(workloads(), OFTEN)
def test_only_available_clients_receive_tasks(workload, often):
    for event in drive(workload, accepts=never_first(often)).dispatches:
        assert event.task_id.client in event.available


@given(workloads(), OFTEN)
def test_staleness_counts_from_the_dispatch(workload, often):
    """Also where the task has waited for its client."""
    seen = drive(workload, accepts=never_first(often))
    asked = {}
    answers = 0
    for event in seen.events:
        if isinstance(event, Dispatched):
            asked[event.task_id] = (event.time, answers)
        elif isinstance(event, Completed):
            time, before = asked[event.task_id]
            assert (event.completion.dispatched, event.completion.relative_delay) == (time, answers - before)
            assert time <= event.completion.started <= event.completion.time
            answers += 1


@given(workloads(["continuous"]), OFTEN)
def test_client_receives_another_task_after_its_update(workload, often):
    """Whatever became of the update: one task for everybody who is here, and none for anybody else but their last."""
    seen = drive(workload, accepts=never_first(often))
    for event in seen.dispatches:
        busy = Counter(key.client for key in event.in_flight)
        assert max(busy.values()) == 1
    for before, after in zip(seen.events, seen.events[1:], strict=False):
        if isinstance(before, Completed) and not workload.up:
            assert isinstance(after, Dispatched)
            assert after.task_id.client == before.task_id.client


@given(workloads(["some"]), OFTEN)
def test_concurrency_limits_the_tasks_in_flight_with_one_per_client(workload, often):
    seen = drive(workload, accepts=never_first(often))
    for event, following in zip(seen.events, seen.events[1:], strict=False):
        if isinstance(event, Dispatched):
            busy = Counter(key.client for key in event.in_flight)
            assert max(busy.values()) == 1
            assert len(busy) <= workload.concurrency
            if not isinstance(following, Dispatched):
                assert len(busy) == workload.concurrency or event.available <= busy.keys()


@given(workloads(["cohorts"]), OFTEN)
def test_clients_wait_until_the_cohort_is_complete(workload, often):
    seen = drive(workload, accepts=never_first(often))
    accepted = 0
    for event, following in zip(seen.events, seen.events[1:], strict=False):
        if isinstance(event, Completed):
            accepted = (accepted + event.accepted) % workload.cohort
        elif isinstance(event, Dispatched):
            # Nobody is asked in vain: what is under way does not fill more than the cohort.
            assert len(event.in_flight) <= workload.cohort - accepted
            assert len({key.client for key in event.in_flight}) == len(event.in_flight)
            if not isinstance(following, Dispatched):
                assert len(event.in_flight) == min(workload.cohort - accepted, len(event.available))


@given(workloads(["cohorts"], stay=True))
def test_updates_of_a_cohort_have_one_version(workload):
    seen = drive(workload)
    for i, event in enumerate(seen.completions):
        assert event.completion.relative_delay == i % workload.cohort or len(workload.clients) < workload.cohort


@given(workloads(["cohorts"], stay=True), OFTEN)
def test_other_clients_replace_rejected_clients_first(workload, often):
    """Between two steps of the model nobody is asked again while somebody was not asked."""
    seen = drive(workload, accepts=never_first(often))
    accepted, asked = 0, Counter()
    for event in seen.events:
        if isinstance(event, Dispatched):
            asked[event.task_id.client] += 1
            if asked[event.task_id.client] > 1:
                assert set(asked) == set(workload.clients)
        else:
            accepted += event.accepted
            if event.accepted and accepted % workload.cohort == 0:
                asked = Counter()


@given(workloads(["drawn", "some drawn"]), OFTEN)
def test_rule_samples_clients_after_each_step(workload, often):
    seen = drive(workload, accepts=never_first(often))
    accepted, drawn = 0, []
    first = True
    for event in seen.events:
        if isinstance(event, Dispatched):
            drawn.append(event.task_id.client)
            out, present = event.in_flight, event.available
            continue
        if drawn:
            assert len(set(drawn)) == len(drawn)
            if first:
                assert len(drawn) == (
                    min(workload.concurrency, len(present)) if workload.kind == "some drawn" else len(present)
                )
            else:
                assert len(drawn) == min(workload.cohort, len(present))
                # The model has moved, or nobody had a task.
                assert accepted % workload.cohort == 0 or len(out) == len(drawn)
            drawn, first = [], False
        accepted += isinstance(event, Completed) and event.accepted


@given(workloads(["routed", "some routed"]), OFTEN)
def test_routing_keeps_the_number_of_tasks_in_flight(workload, often):
    seen = drive(workload, accepts=never_first(often))
    tasks = workload.concurrency if workload.kind == "some routed" else len(workload.clients)
    for event, following in zip(seen.events, seen.events[1:], strict=False):
        if isinstance(event, Dispatched) and not isinstance(following, Dispatched):
            assert len(event.in_flight) == tasks


def test_samples_are_uniform_and_routes_have_their_shares():
    clients = [3, 5, 7, 8]
    here = AvailableClients(clients)
    generator = np.random.default_rng(0)
    n = 1200
    pairs = Counter(frozenset(CohortSampler(2, generator).start(here)) for _ in range(n))
    first = Counter(RuleSampler(rules.DeFedAvg(2).draw, 2, 1, generator).start(here)[0] for _ in range(n))
    some = AsyncSampler(3, generator)
    some.start(here)
    idle = Counter()
    for _ in range(n):
        # Whoever answers and the one that is idle are as likely.
        busy = next(iter(some._busy))
        (drawn,) = some.on_completion(busy, True, here)
        idle[drawn == busy] += 1
    routed = RoutedSampler({3: 0.1, 5: 0.4, 7: 0.3, 8: 0.2}, n, generator)
    here.discard(5)
    shares = Counter(routed.start(here))
    expected = [
        (pairs, {frozenset(pair): 1 / 6 for pair in combinations(clients, 2)}),
        (first, dict.fromkeys(clients, 1 / 4)),
        (idle, {True: 1 / 2, False: 1 / 2}),
        (shares, {3: 1 / 6, 7: 1 / 2, 8: 1 / 3}),
    ]
    for counts, law in expected:
        assert set(counts) <= set(law)
        for name, p in law.items():
            # Six standard deviations of a binomial count.
            assert abs(counts[name] - n * p) <= 6 * math.sqrt(n * p * (1 - p))


def test_leaving_clients_finish_and_failed_clients_lose_their_tasks():
    changes = [
        AvailabilityChange(1.0, 0, "leave"),
        AvailabilityChange(3.0, 1, "fail"),
        AvailabilityChange(5.0, 2, "join"),
        AvailabilityChange(6.0, 1, "return"),
    ]
    loop = alone(changes, clients=(0, 1, 2))
    told = []
    while len(told) < 7:
        event = loop.next()
        if isinstance(event, DispatchEvent):
            told.append(("ask", loop.now, tuple(loop.submit(event.client, 1.0))))
        elif isinstance(event, CompletionEvent):
            told.append(("answer", loop.now, tuple(event.task_id)))
            loop.acknowledge(True)
        else:
            told.append(("lost", loop.now, tuple(event.task_ids[0])))
    assert told == [
        ("ask", 0.0, (0, 0)),
        ("ask", 0.0, (1, 0)),
        ("answer", 2.0, (0, 0)),
        ("answer", 2.0, (1, 0)),
        ("ask", 2.0, (1, 1)),
        ("lost", 3.0, (1, 1)),
        ("ask", 5.0, (2, 0)),
    ]


def test_client_that_returns_during_its_task_receives_no_second_task():
    loop = alone([AvailabilityChange(0.5, 0, "leave"), AvailabilityChange(1.0, 0, "return")], clients=(0,))
    keys = []
    while len(keys) < 3:
        event = loop.next()
        if isinstance(event, DispatchEvent):
            keys.append(tuple(loop.submit(0, 1.0)))
        else:
            loop.acknowledge(True)
            keys.append(event.completion.time)
    assert keys == [(0, 0), 2.0, (0, 1)]


def play(loop, told):
    while True:
        event = loop.next()
        told.append(event)
        if isinstance(event, DispatchEvent):
            loop.submit(event.client, 1.0)
        elif isinstance(event, CompletionEvent):
            loop.acknowledge(True)


def test_error_without_available_clients_contains_the_number_of_updates():
    told = []
    with pytest.raises(ArgumentError, match="expected a client with a task after 5 updates"):
        play(alone([AvailabilityChange(5.0, 0, "fail"), AvailabilityChange(5.0, 1, "leave")]), told)
    assert sum(isinstance(event, DropoutEvent) for event in told) == 1


def test_calls_in_the_wrong_order_are_rejected_without_effect():
    loop = alone()
    assert loop.next() == DispatchEvent(0)
    for call, words in (
        (loop.next, "event_loop: expected `submit` or `acknowledge` first"),
        (lambda: loop.submit(1, 1.0), "client: expected the client of the last DispatchEvent"),
        (lambda: loop.submit(0, -1.0), "work: expected"),
        (lambda: loop.acknowledge(True), "event_loop: expected a CompletionEvent to acknowledge"),
    ):
        with pytest.raises(ArgumentError, match=words):
            call()
    assert loop.submit(0, 1.0) == (0, 0)
    assert loop.next() == DispatchEvent(1)
    assert loop.submit(1, 1.0) == (1, 0)
    event = loop.next()
    with pytest.raises(ArgumentError, match="client: expected the client of the last DispatchEvent, got 0"):
        loop.submit(0, 1.0)
    loop.acknowledge(True)
    assert (event.task_id, loop.next()) == ((0, 0), DispatchEvent(0))


@pytest.mark.usefixtures("as_shipped")
def test_invalid_arguments_are_rejected_by_name():
    clients = [0, 1, 2, 3]
    generator = np.random.default_rng(0)
    used = IndependentClients(Deterministic(1.0), generator)
    used.dispatch(0, 1.0)
    for call, words in (
        (
            lambda: EventLoop(clients, AsyncSampler(None, generator), used),
            "scheduler: expected a new scheduler, got one .* with 1 task",
        ),
        (
            lambda: alone([AvailabilityChange(1.0, 9, "leave")]),
            "availability: expected changes of participating clients, got .*client=9",
        ),
        (lambda: alone([AvailabilityChange(1.0, 0, "return")]), "changes: .* got one that is available"),
        (lambda: alone(["leave"]), r"changes\[0\]: expected an AvailabilityChange"),
    ):
        with pytest.raises(ArgumentError, match=words):
            call()
