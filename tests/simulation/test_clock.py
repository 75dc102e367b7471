"""The clock: order, ties, cancellation and the passing of time."""

import copy
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError, ManifoldAggError
from manifoldagg.simulation import VirtualClock
from tests.support import seeds


@given(st.lists(st.floats(0, 1e6)))
def test_events_are_sorted_by_time_and_then_by_scheduling(delays):
    clock = VirtualClock()
    for i, delay in enumerate(delays):
        clock.schedule(delay, i)
    seen = [clock.next() for _ in delays]
    assert seen == sorted(seen)
    assert clock.now == max(delays, default=0.0)
    assert len(clock) == 0


def test_delays_are_relative_to_now():
    clock = VirtualClock()
    clock.schedule(2.0, "a")
    clock.next()
    clock.schedule(1.0, "b")
    assert clock.peek() == 3.0
    assert clock.next() == (3.0, "b")
    assert clock.peek() == math.inf
    with pytest.raises(ManifoldAggError, match="expected a scheduled event"):
        clock.next()


def test_explicit_order_precedes_the_order_of_scheduling():
    clock = VirtualClock()
    for order, event in ((2, "c"), (1, "a"), (1, "b")):
        clock.schedule_at(1.0, event, order=order)
    assert [clock.next()[1] for _ in range(3)] == ["a", "b", "c"]


def test_time_passes_up_to_the_next_event():
    clock = VirtualClock()
    clock.schedule(2.0, "a")
    clock.advance(1.5)
    clock.schedule(0.25, "b")
    assert clock.next() == (1.75, "b")
    with pytest.raises(ArgumentError, match="time: expected a finite number >= 1.75 and <= 2"):
        clock.advance(2.5)
    with pytest.raises(ArgumentError, match=r"time: .* got 1"):
        clock.advance(1.0)
    assert clock.now == 1.75


@given(seeds, st.integers(0, 30))
def test_discarded_events_do_not_occur(seed, size):
    draws = np.random.default_rng(seed).integers(0, 5, size)
    clock, odd = VirtualClock(), VirtualClock()
    for i, draw in enumerate(draws):
        clock.schedule(float(draw), i)
        if i % 2:
            odd.schedule(float(draw), i)
    gone = clock.cancel_where(lambda i: i % 2 == 0)
    assert gone == sorted(range(0, size, 2), key=lambda i: (draws[i], i))
    assert [clock.next() for _ in range(len(clock))] == [odd.next() for _ in range(len(odd))]


@given(seeds, st.integers(0, 30))
def test_cancelling_each_event_equals_discarding_all(seed, size):
    draws = np.random.default_rng(seed)
    clock = VirtualClock()
    counts = [clock.schedule_at(float(time), i) for i, time in enumerate(draws.integers(0, 5, size))]
    other = copy.deepcopy(clock)
    for i in draws.permutation(size)[: size // 2]:
        clock.cancel(counts[i])
        assert other.cancel_where(lambda event, i=i: event == i) == [i]
        assert (len(clock), clock.peek()) == (len(other), other.peek())
        if len(clock) and draws.random() < 0.3:
            happened = clock.next()
            assert happened == other.next()
            break
    for i in range(2):
        clock.schedule(1.0, size + i)
        other.schedule(1.0, size + i)
    before = [clock.next() for _ in range(len(clock) // 2)]
    assert before == [other.next() for _ in before]
    assert [clock.next() for _ in range(len(clock))] == [other.next() for _ in range(len(other))]
    assert clock.peek() == math.inf


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("count", [0, 1, 3, -1, 2.0, "2", None], ids=str)
def test_only_pending_events_can_be_cancelled(count):
    clock = VirtualClock()
    happened, cancelled, left = (clock.schedule_at(float(i), i) for i in range(3))
    clock.next()
    clock.cancel(cancelled)
    assert (happened, cancelled, left) == (0, 1, 2)
    before = len(clock), clock.peek(), clock.now
    with pytest.raises(ArgumentError, match="event_id: expected an"):
        clock.cancel(count)
    assert (len(clock), clock.peek(), clock.now) == before
    assert clock.next() == (2.0, 2)


def test_cancelled_events_do_not_accumulate():
    clock = VirtualClock()
    clock.schedule(1.0, "a")
    for i in range(1000):
        clock.cancel(clock.schedule_at(2.0 + i, "b"))
        assert len(clock) == 1
        assert len(clock._events) <= 3


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: VirtualClock().schedule(-1.0, "a"), "delay: expected a finite number >= 0, got -1.0"),
        (lambda: VirtualClock().schedule(math.nan, "a"), "delay: expected a finite number >= 0, got nan"),
        (lambda: VirtualClock().schedule_at(math.inf, "a"), "time: expected a finite number >= 0, got inf"),
        (lambda: VirtualClock(7), "generator: expected a numpy.random.Generator, got int"),
    ],
)
def test_invalid_input_is_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
