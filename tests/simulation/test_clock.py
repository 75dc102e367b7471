"""The clock and the scheduler that it drives."""

import collections

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError, ManifoldAggError
from manifoldagg.simulation import PriorityScheduler, VirtualClock
from tests.support import seeds


@given(st.lists(st.floats(0, 1e6)))
def test_events_come_in_order_of_time_ties_in_order_of_scheduling(delays):
    clock = VirtualClock()
    for i, delay in enumerate(delays):
        clock.schedule(delay, i)
    seen = [clock.next() for _ in delays]
    assert seen == sorted(seen)
    assert clock.now == max(delays, default=0.0)
    assert len(clock) == 0


def test_delays_count_from_now():
    clock = VirtualClock()
    clock.schedule(2.0, "a")
    clock.next()
    clock.schedule(1.0, "b")
    assert clock.next() == (3.0, "b")
    with pytest.raises(ManifoldAggError, match="no event"):
        clock.next()


def test_a_position_is_drawn_with_the_papers_probability():
    """SPEC §7: index i of N, from 0, with probability (N − i)/Σj."""
    scheduler = PriorityScheduler(5, np.random.default_rng(0))
    draws = collections.Counter(scheduler._draw(5) for _ in range(30_000))
    for i in range(5):
        p = (5 - i) / 15
        # Five standard deviations of a binomial count.
        assert abs(draws[i] - 30_000 * p) <= 5 * (30_000 * p * (1 - p)) ** 0.5


def test_every_ticket_of_the_draw_has_its_position():
    class Fixed:
        def __init__(self, value):
            self.value = value

        def integers(self, high):
            assert high == 10
            return self.value

    scheduler = PriorityScheduler(4, np.random.default_rng(0))
    positions = []
    for ticket in range(10):
        scheduler._generator = Fixed(ticket)
        positions.append(scheduler._draw(4))
    assert sorted(positions) == [0] * 4 + [1] * 3 + [2] * 2 + [3]


def test_keys_are_fixed_at_the_push_and_tasks_taken_before_the_finished_client_returns():
    class First:
        """Always position 0."""

        def integers(self, high):
            return high - 1

    scheduler = PriorityScheduler(3, np.random.default_rng(0), workers=1, k=2.0, speed=1.0)
    scheduler._generator = First()
    for client, work in (("big", 9), ("small", 1), ("middle", 4)):
        scheduler.dispatch(client, work)
    first = scheduler.next()
    assert (first.client, first.time) == ("small", 1.0)
    # "middle" (key 4) is being executed already; the newcomer's key is 1 + 2·1 = 3.
    scheduler.dispatch("small", 1)
    assert (scheduler.next().client, scheduler.now) == ("middle", 5.0)
    assert scheduler.next().client == "small"
    assert (scheduler.next().client, scheduler.now) == ("big", 15.0)
    with pytest.raises(ManifoldAggError, match="no task"):
        scheduler.next()


@given(seeds, st.integers(1, 4), st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_every_client_finishes_once_and_time_never_runs_back(seed, workers, works):
    scheduler = PriorityScheduler(len(works), np.random.default_rng(seed), workers=workers)
    for client, work in enumerate(works):
        scheduler.dispatch(client, work)
    done = [scheduler.next() for _ in works]
    assert sorted(c.client for c in done) == list(range(len(works)))
    assert [c.time for c in done] == sorted(c.time for c in done)


def test_the_same_generator_gives_the_same_order():
    def order():
        scheduler = PriorityScheduler(9, np.random.default_rng(4))
        for client in range(9):
            scheduler.dispatch(client, client + 1)
        seen = []
        for _ in range(50):
            seen.append(scheduler.next())
            scheduler.dispatch(seen[-1].client, seen[-1].client + 1)
        return seen

    assert order() == order()


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: VirtualClock().schedule(-1.0, "a"), "delay: expected a finite number >= 0, got -1.0"),
        (lambda: PriorityScheduler(0, np.random.default_rng(0)), "clients: expected"),
        (lambda: PriorityScheduler(1, np.random.default_rng(0), workers=0), "workers: expected"),
        (lambda: PriorityScheduler(1, np.random.default_rng(0), speed=0.0), "speed: expected"),
        (lambda: PriorityScheduler(1, np.random.default_rng(0)).dispatch("a", float("nan")), "work: expected"),
    ],
)
def test_bad_input_is_refused_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
