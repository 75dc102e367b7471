"""Schedulers: who finishes next, the laws of their queues, and copies."""

import collections
import copy
import functools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError, ManifoldAggError
from manifoldagg.simulation import PriorityScheduler
from manifoldagg.simulation.delays import Deterministic, Exponential, LogNormal, Uniform
from manifoldagg.simulation.jackson import JacksonNetwork
from manifoldagg.simulation.schedulers import MAX_WORK, IndependentClients
from manifoldagg.simulation.trace import ReplayScheduler, TaskRecord
from tests.support import seeds

CLIENTS = 5
WORK = [1.0, 3.0, 2.0, 5.0, 2.0]


def independent(seed):
    return IndependentClients({i: Uniform(0.0, 1.0 + i) for i in range(CLIENTS)}, np.random.default_rng(seed))


def priority(seed):
    return PriorityScheduler(CLIENTS, np.random.default_rng(seed))


def network(seed):
    return JacksonNetwork(
        [0.1, 0.3, 0.2, 0.2, 0.2], [1.0, 2.0, 0.5, 1.0, 1.0], np.random.default_rng(seed), concurrency=7
    )


def replay(seed):
    return ReplayScheduler(trace())


@functools.cache
def trace():
    return [TaskRecord.from_completion(done) for done in live(independent(99), 60)]


MAKERS = [independent, priority, network, replay]


def live(scheduler, steps):
    """Completions of a scheduler that is kept busy; who is next is its own business only in a network."""
    if not scheduler.in_flight:
        for i in range(CLIENTS):
            scheduler.dispatch(i, WORK[i])
    seen = []
    for _ in range(steps):
        done = scheduler.next()
        seen.append(done)
        client = scheduler.route() if isinstance(scheduler, JacksonNetwork) else done.client
        scheduler.dispatch(client, WORK[client])
    return seen


@pytest.mark.parametrize("maker", MAKERS)
@given(seeds)
def test_tasks_finish_once_in_order_of_time_with_their_own_fields(maker, seed):
    scheduler = maker(seed)
    seen = live(scheduler, 40)
    assert scheduler.in_flight == CLIENTS
    assert scheduler.now == seen[-1].time
    assert [done.time for done in seen] == sorted(done.time for done in seen)
    for done in seen:
        assert 0 <= done.dispatched <= done.started <= done.time
        assert done.work == WORK[done.client]


@pytest.mark.parametrize("maker", [independent, priority])
@given(seeds)
def test_the_relative_delay_counts_the_others_that_finished_in_between(maker, seed):
    seen = live(maker(seed), 40)
    for i, done in enumerate(seen):
        # One task a client: its last one finished just before this one was dispatched.
        before = [j for j in range(i) if seen[j].client == done.client]
        assert done.relative_delay == i - (before[-1] + 1 if before else 0)


@pytest.mark.parametrize("maker", MAKERS)
@given(seeds, st.integers(0, 30))
def test_a_copy_continues_with_the_same_events_and_leaves_the_scheduler_unchanged(maker, seed, before):
    scheduler, unused = maker(seed), maker(seed)
    live(scheduler, before)
    live(unused, before)
    ahead = live(copy.deepcopy(scheduler), 25)
    assert live(scheduler, 25) == ahead == live(unused, 25)


@pytest.mark.parametrize("maker", MAKERS)
@given(seeds, st.integers(0, 20))
def test_cancelled_tasks_never_finish(maker, seed, before):
    scheduler = maker(seed)
    live(scheduler, before)
    if not scheduler.in_flight:
        live(scheduler, 1)
    held = scheduler.in_flight
    lost = scheduler.cancel(2)
    assert scheduler.cancel(2) == 0
    assert scheduler.in_flight == held - lost
    rest = [scheduler.next().client for _ in range(held - lost)]
    assert 2 not in rest
    with pytest.raises(ManifoldAggError, match="expected a task in flight"):
        scheduler.next()


@pytest.mark.parametrize("maker", MAKERS)
@given(seeds)
def test_peek_returns_the_time_without_effect(maker, seed):
    scheduler, other = maker(seed), maker(seed)
    assert scheduler.peek() == math.inf
    live(scheduler, 1)
    live(other, 1)
    for _ in range(10):
        time = scheduler.peek()
        scheduler.advance(scheduler.now + (time - scheduler.now) / 2)
        done = scheduler.next()
        assert done.time == time
        assert other.next() == done
        if scheduler.in_flight == 0:
            break


def test_ties_are_broken_in_order_of_dispatch():
    clients = IndependentClients(Deterministic(1.0), np.random.default_rng(0))
    for client in (3, 1, 2):
        clients.dispatch(client, 1.0)
    assert [clients.next().client for _ in range(3)] == [3, 1, 2]


@pytest.mark.usefixtures("as_shipped")
def test_a_client_has_one_task_and_clients_are_integers_or_strings():
    clients = IndependentClients(Deterministic(1.0), np.random.default_rng(0))
    clients.dispatch(np.int64(1), 1.0)
    with pytest.raises(ArgumentError, match="client: expected a client without a task in flight, got 1"):
        clients.dispatch(1, 1.0)
    clients.dispatch("1", 1.0)
    assert [clients.next().client for _ in range(2)] == [1, "1"]
    clients.dispatch(1, 2.0)
    assert clients.next().time == 3.0


def test_one_seed_gives_the_same_order_of_slowness_under_any_distribution():
    """Draws invert the same numbers: with one task each, who is slower stays slower."""

    def order(delay):
        clients = IndependentClients(delay, np.random.default_rng(7))
        for client in range(50):
            clients.dispatch(client, 1.0)
        return [clients.next().client for _ in range(50)]

    assert order(Exponential(3.0)) == order(LogNormal(1.0, 2.0)) == order(Uniform(0.0, 1.0))


def test_a_position_is_drawn_with_the_papers_probability():
    """Manifold B.0.1: index i of N, from 0, with probability (N − i)/Σj."""
    scheduler = PriorityScheduler(5, np.random.default_rng(0))
    draws = collections.Counter(scheduler._draw(5) for _ in range(30_000))
    for i in range(5):
        p = (5 - i) / 15
        # Five standard deviations of a binomial count.
        assert abs(draws[i] - 30_000 * p) <= 5 * (30_000 * p * (1 - p)) ** 0.5


class Fixed:
    """A generator that always gives this ticket, counted from the end if negative."""

    def __init__(self, value):
        self.value = value

    def integers(self, high):
        return self.value % high


def test_each_random_number_selects_one_position():
    scheduler = PriorityScheduler(4, np.random.default_rng(0))
    positions = []
    for ticket in range(10):
        scheduler._generator = Fixed(ticket)
        positions.append(scheduler._draw(4))
    assert sorted(positions) == [0] * 4 + [1] * 3 + [2] * 2 + [3]


def test_next_task_starts_before_the_finished_client_is_queued_again():
    scheduler = PriorityScheduler(3, np.random.default_rng(0), workers=1, k=2.0, speed=1.0)
    # Always position 0.
    scheduler._generator = Fixed(-1)
    for client, work in (("big", 9), ("small", 1), ("middle", 4)):
        scheduler.dispatch(client, work)
    first = scheduler.next()
    assert (first.client, first.time) == ("small", 1.0)
    # "middle" (key 4) is being executed already; the newcomer's key is 1 + 2·1 = 3.
    scheduler.dispatch("small", 1)
    assert (scheduler.next().client, scheduler.now) == ("middle", 5.0)
    assert scheduler.next().client == "small"
    last = scheduler.next()
    assert (last.client, last.dispatched, last.started, last.time) == ("big", 0.0, 6.0, 15.0)
    with pytest.raises(ManifoldAggError, match="expected a task in flight"):
        scheduler.next()


@given(seeds, st.integers(1, 4), st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_number_of_running_tasks_equals_the_number_of_workers(seed, workers, works):
    scheduler = PriorityScheduler(len(works), np.random.default_rng(seed), workers=workers, speed=1.0)
    for client, work in enumerate(works):
        scheduler.dispatch(client, work)
    done = [scheduler.next() for _ in works]
    assert sorted(c.client for c in done) == list(range(len(works)))
    for time in {c.started for c in done}:
        running = sum(c.started <= time < c.time for c in done)
        waiting = sum(time < c.started for c in done)
        assert running <= workers
        assert running == workers or waiting == 0 or 0 in works
    # Integer times: the sums are exact.
    assert sum(c.time - c.started for c in done) == sum(works)


def test_worker_starts_the_next_task_after_a_cancellation():
    scheduler = PriorityScheduler(2, np.random.default_rng(0), workers=1, speed=1.0)
    for client in range(2):
        scheduler.dispatch(client, 4.0)
    scheduler.advance(1.0)
    running = copy.deepcopy(scheduler).next().client
    scheduler.cancel(running)
    done = scheduler.next()
    assert (done.client, done.started, done.time) == (1 - running, 1.0, 5.0)


GENERATOR = np.random.default_rng(0)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: PriorityScheduler(0, GENERATOR), "clients: expected"),
        (lambda: PriorityScheduler(1, GENERATOR, workers=0), "workers: expected"),
        (lambda: PriorityScheduler(1, GENERATOR, speed=0.0), "speed: expected"),
        (lambda: PriorityScheduler(1, GENERATOR).dispatch("a", math.nan), "work: expected"),
        (lambda: PriorityScheduler(1, GENERATOR).dispatch(1.0, 1.0), "client: expected an int or a str, got 1.0"),
        (lambda: PriorityScheduler(1, GENERATOR).dispatch(True, 1.0), "client: expected an int or a str, got True"),
        (lambda: PriorityScheduler(1, 0), "generator: expected a numpy.random.Generator, got int"),
        (lambda: IndependentClients({"a": 1.0}, GENERATOR), r"delays\['a'\]: expected a Delay, got 1.0"),
        (
            lambda: IndependentClients({}, GENERATOR).dispatch("a", 1.0),
            "client: expected a client with an entry in `delays`, got 'a'",
        ),
        (lambda: IndependentClients(Deterministic(1.0), GENERATOR).dispatch("a", -1.0), "work: expected"),
        (
            lambda: IndependentClients(Deterministic(1e300), GENERATOR),
            r"delays: expected at most 3.12e\+144 s for one unit of work, got Deterministic\(seconds=1e\+300\)",
        ),
        (lambda: PriorityScheduler(2, GENERATOR, speed=1e-3).dispatch("a", 1e308), "work: expected .* got 1e\\+308"),
        (
            lambda: IndependentClients(Exponential(1.0), GENERATOR).dispatch("a", 1e308),
            "work: expected .* got 1e\\+308",
        ),
    ],
)
def test_invalid_input_is_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("maker", [independent, priority, network])
@pytest.mark.parametrize("task", [(2, -1.0), (None, 1.0), (2, 1e308), (1, 1e308)])
def test_rejected_task_has_no_effect(maker, task):
    scheduler = maker(0)
    scheduler.dispatch(1, 1.0)
    before = copy.deepcopy(scheduler)
    with pytest.raises(ArgumentError):
        scheduler.dispatch(*task)
    assert scheduler.in_flight == before.in_flight == 1
    assert scheduler.next() == before.next()
    assert live(scheduler, 5) == live(before, 5)


@pytest.mark.parametrize("maker", [independent, priority, network])
def test_priorities_of_late_tasks_do_not_overflow(maker):
    scheduler = maker(0)
    scheduler.advance(1.7e308)
    for client in range(CLIENTS):
        scheduler.dispatch(client, MAX_WORK)
    assert [scheduler.next().time for _ in range(CLIENTS)] == [1.7e308] * CLIENTS
