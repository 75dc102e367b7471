"""The course: who is asked when, for every way to ask, every scheduler, and clients that come and go."""

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
from tests.simulation.event_loops import Answered, Asked, drive, plots

OFTEN = st.integers(2, 5)


def never_first(often):
    return lambda nth: nth % often > 0


def alone(changes=(), clients=(0, 1), tasks=None, seconds=2.0):
    scheduler = IndependentClients(Deterministic(seconds), np.random.default_rng(0))
    return EventLoop(list(clients), AsyncSampler(tasks, np.random.default_rng(0)), scheduler, changes)


@given(plots(), OFTEN)
def test_tasks_of_a_client_are_answered_in_order_and_once(plot, often):
    seen = drive(plot, accepts=never_first(often))
    out = {client: [] for client in plot.clients}
    given_ = Counter()
    time = 0.0
    for event in seen.events:
        if isinstance(event, Asked):
            assert event.key.task_index == given_[event.key.client]
            given_[event.key.client] += 1
            out[event.key.client].append(event.key)
        elif isinstance(event, Answered):
            assert event.key == out[event.key.client].pop(0)
            assert event.done.time >= time
            time = event.done.time
        else:
            client = event.keys[0].client
            assert list(event.keys) == out[client]
            out[client] = []


@given(plots(), OFTEN)
def test_only_who_is_here_is_asked(plot, often):
    for event in drive(plot, accepts=never_first(often)).asks:
        assert event.key.client in event.present


@given(plots(), OFTEN)
def test_an_answer_counts_from_the_moment_of_asking(plot, often):
    """Also where the task has waited for its client."""
    seen = drive(plot, accepts=never_first(often))
    asked = {}
    answers = 0
    for event in seen.events:
        if isinstance(event, Asked):
            asked[event.key] = (event.time, answers)
        elif isinstance(event, Answered):
            time, before = asked[event.key]
            assert (event.done.dispatched, event.done.relative_delay) == (time, answers - before)
            assert time <= event.done.started <= event.done.time
            answers += 1


@given(plots(["continuous"]), OFTEN)
def test_who_has_answered_is_asked_again(plot, often):
    """Whatever became of the update: one task for everybody who is here, and none for anybody else but their last."""
    seen = drive(plot, accepts=never_first(often))
    for event in seen.asks:
        busy = Counter(key.client for key in event.out)
        assert max(busy.values()) == 1
    for before, after in zip(seen.events, seen.events[1:], strict=False):
        if isinstance(before, Answered) and not plot.up:
            assert isinstance(after, Asked)
            assert after.key.client == before.key.client


@given(plots(["some"]), OFTEN)
def test_so_many_are_under_way_and_nobody_twice(plot, often):
    seen = drive(plot, accepts=never_first(often))
    for event, following in zip(seen.events, seen.events[1:], strict=False):
        if isinstance(event, Asked):
            busy = Counter(key.client for key in event.out)
            assert max(busy.values()) == 1
            assert len(busy) <= plot.tasks
            if not isinstance(following, Asked):
                assert len(busy) == plot.tasks or event.present <= busy.keys()


@given(plots(["cohorts"]), OFTEN)
def test_everybody_waits_for_the_cohort(plot, often):
    seen = drive(plot, accepts=never_first(often))
    accepted = 0
    for event, following in zip(seen.events, seen.events[1:], strict=False):
        if isinstance(event, Answered):
            accepted = (accepted + event.accepted) % plot.cohort
        elif isinstance(event, Asked):
            # Nobody is asked in vain: what is under way does not fill more than the cohort.
            assert len(event.out) <= plot.cohort - accepted
            assert len({key.client for key in event.out}) == len(event.out)
            if not isinstance(following, Asked):
                assert len(event.out) == min(plot.cohort - accepted, len(event.present))


@given(plots(["cohorts"], stay=True))
def test_a_cohort_that_is_answered_is_of_one_version(plot):
    seen = drive(plot)
    for i, event in enumerate(seen.answers):
        assert event.done.relative_delay == i % plot.cohort or len(plot.clients) < plot.cohort


@given(plots(["cohorts"], stay=True), OFTEN)
def test_others_come_first_in_place_of_who_was_refused(plot, often):
    """Between two steps of the model nobody is asked again while somebody was not asked."""
    seen = drive(plot, accepts=never_first(often))
    accepted, asked = 0, Counter()
    for event in seen.events:
        if isinstance(event, Asked):
            asked[event.key.client] += 1
            if asked[event.key.client] > 1:
                assert set(asked) == set(plot.clients)
        else:
            accepted += event.accepted
            if event.accepted and accepted % plot.cohort == 0:
                asked = Counter()


@given(plots(["drawn", "some drawn"]), OFTEN)
def test_the_rule_draws_whenever_the_model_moves(plot, often):
    seen = drive(plot, accepts=never_first(often))
    accepted, drawn = 0, []
    first = True
    for event in seen.events:
        if isinstance(event, Asked):
            drawn.append(event.key.client)
            out, present = event.out, event.present
            continue
        if drawn:
            assert len(set(drawn)) == len(drawn)
            if first:
                assert len(drawn) == (min(plot.tasks, len(present)) if plot.kind == "some drawn" else len(present))
            else:
                assert len(drawn) == min(plot.cohort, len(present))
                # The model has moved, or nobody had a task.
                assert accepted % plot.cohort == 0 or len(out) == len(drawn)
            drawn, first = [], False
        accepted += isinstance(event, Answered) and event.accepted


@given(plots(["routed", "some routed"]), OFTEN)
def test_as_many_tasks_are_routed_as_ever(plot, often):
    seen = drive(plot, accepts=never_first(often))
    tasks = plot.tasks if plot.kind == "some routed" else len(plot.clients)
    for event, following in zip(seen.events, seen.events[1:], strict=False):
        if isinstance(event, Asked) and not isinstance(following, Asked):
            assert len(event.out) == tasks


def test_draws_are_uniform_and_routes_have_their_shares():
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


def test_who_leaves_finishes_and_who_fails_loses():
    changes = [
        AvailabilityChange(1.0, 0, "leave"),
        AvailabilityChange(3.0, 1, "fail"),
        AvailabilityChange(5.0, 2, "join"),
        AvailabilityChange(6.0, 1, "return"),
    ]
    course = alone(changes, clients=(0, 1, 2))
    told = []
    while len(told) < 7:
        event = course.next()
        if isinstance(event, DispatchEvent):
            told.append(("ask", course.now, tuple(course.submit(event.client, 1.0))))
        elif isinstance(event, CompletionEvent):
            told.append(("answer", course.now, tuple(event.task_id)))
            course.acknowledge(True)
        else:
            told.append(("lost", course.now, tuple(event.task_ids[0])))
    assert told == [
        ("ask", 0.0, (0, 0)),
        ("ask", 0.0, (1, 0)),
        ("answer", 2.0, (0, 0)),
        ("answer", 2.0, (1, 0)),
        ("ask", 2.0, (1, 1)),
        ("lost", 3.0, (1, 1)),
        ("ask", 5.0, (2, 0)),
    ]


def test_who_returns_at_its_last_task_is_not_asked_twice():
    course = alone([AvailabilityChange(0.5, 0, "leave"), AvailabilityChange(1.0, 0, "return")], clients=(0,))
    keys = []
    while len(keys) < 3:
        event = course.next()
        if isinstance(event, DispatchEvent):
            keys.append(tuple(course.submit(0, 1.0)))
        else:
            course.acknowledge(True)
            keys.append(event.completion.time)
    assert keys == [(0, 0), 2.0, (0, 1)]


def play(course, told):
    while True:
        event = course.next()
        told.append(event)
        if isinstance(event, DispatchEvent):
            course.give(event.client, 1.0)
        elif isinstance(event, CompletionEvent):
            course.settle(True)


def test_nobody_left_is_said_with_the_number_of_answers():
    told = []
    with pytest.raises(ArgumentError, match="nobody has a task any more after 5 answers"):
        play(alone([AvailabilityChange(5.0, 0, "fail"), AvailabilityChange(5.0, 1, "leave")]), told)
    assert sum(isinstance(event, DropoutEvent) for event in told) == 1


def test_what_is_told_out_of_turn_is_refused_and_changes_nothing():
    course = alone()
    assert course.next() == DispatchEvent(0)
    for call, words in (
        (course.next, "course: expected `give` or `settle` first"),
        (lambda: course.submit(1, 1.0), "client: expected the one of the last Ask"),
        (lambda: course.submit(0, -1.0), "work: expected"),
        (lambda: course.acknowledge(True), "course: expected an Answer to settle"),
    ):
        with pytest.raises(ArgumentError, match=words):
            call()
    assert course.submit(0, 1.0) == (0, 0)
    assert course.next() == DispatchEvent(1)
    assert course.submit(1, 1.0) == (1, 0)
    event = course.next()
    with pytest.raises(ArgumentError, match="client: expected the one of the last Ask, got 0"):
        course.submit(0, 1.0)
    course.acknowledge(True)
    assert (event.task_id, course.next()) == ((0, 0), DispatchEvent(0))


@pytest.mark.usefixtures("as_shipped")
def test_what_does_not_fit_is_refused_by_name():
    clients = [0, 1, 2, 3]
    generator = np.random.default_rng(0)
    used = IndependentClients(Deterministic(1.0), generator)
    used.dispatch(0, 1.0)
    for call, words in (
        (
            lambda: EventLoop(clients, AsyncSampler(None, generator), used),
            "scheduler: expected a new one, .* with 1 task",
        ),
        (lambda: alone([AvailabilityChange(1.0, 9, "leave")]), "availability: .*client=9.* takes no part"),
        (lambda: alone([AvailabilityChange(1.0, 0, "return")]), "changes: .* cannot happen to a client that is here"),
        (lambda: alone(["leave"]), r"changes\[0\]: expected a Change"),
    ):
        with pytest.raises(ArgumentError, match=words):
            call()
