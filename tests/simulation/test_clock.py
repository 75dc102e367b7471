"""The clock: order, ties, the passing of time, and states to resume from."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError, CheckpointError, ManifoldAggError
from manifoldagg.simulation import IndependentClients, Uniform, VirtualClock
from tests.support import seeds

BIT_GENERATORS = [np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64]


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
    assert clock.peek() == 3.0
    assert clock.next() == (3.0, "b")
    assert clock.peek() == math.inf
    with pytest.raises(ManifoldAggError, match="no event"):
        clock.next()


def test_a_stated_order_breaks_ties_before_that_of_scheduling():
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
def test_what_is_discarded_does_not_happen_and_the_rest_does(seed, size):
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
def test_cancelling_one_by_one_is_discarding(seed, size):
    draws = np.random.default_rng(seed)
    clock, other = VirtualClock(), VirtualClock()
    counts = [clock.schedule_at(float(time), i) for i, time in enumerate(draws.integers(0, 5, size))]
    other.restore(clock.state())
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
    assert clock.state() == other.state()
    assert [clock.next() for _ in range(len(clock))] == [other.next() for _ in range(len(other))]
    assert clock.peek() == math.inf


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("count", [0, 1, 3, -1, 2.0, "2", None], ids=str)
def test_only_an_event_to_come_can_be_cancelled(count):
    clock = VirtualClock()
    happened, cancelled, left = (clock.schedule_at(float(i), i) for i in range(3))
    clock.next()
    clock.cancel(cancelled)
    assert (happened, cancelled, left) == (0, 1, 2)
    before = clock.state()
    with pytest.raises(ArgumentError, match="event_id: expected an"):
        clock.cancel(count)
    assert clock.state() == before
    assert clock.next() == (2.0, 2)


def test_cancelled_events_do_not_pile_up():
    clock = VirtualClock()
    clock.schedule(1.0, "a")
    for i in range(1000):
        clock.cancel(clock.schedule_at(2.0 + i, "b"))
        assert len(clock) == 1
        assert len(clock._events) <= 3


@pytest.mark.parametrize("kind", BIT_GENERATORS)
@given(seeds, st.integers(0, 30), st.integers(0, 40))
def test_a_state_goes_through_json_and_on_as_if_nothing_had_happened(kind, seed, before, size):
    def live(clock, steps):
        seen = []
        for i in range(steps):
            clock.schedule(float(clock.generator.integers(0, 3, dtype=np.int32)), (i, "client"))
            if clock.generator.random() < 0.6:
                seen.append(clock.next())
        return seen

    clock = VirtualClock(np.random.Generator(kind(seed)))
    live(clock, before)
    state = json.loads(json.dumps(clock.state()))
    assert state == clock.state()
    other = VirtualClock(np.random.Generator(kind(1)))
    other.restore(state)
    assert live(other, size) == live(clock, size)
    assert other.state() == clock.state()


def test_a_saved_clock_goes_on_in_another_one(tmp_path):
    clock = VirtualClock(np.random.default_rng(3))
    clock.schedule(clock.generator.random(), ("a", 1, math.pi))
    clock.save(tmp_path / "clock")
    other = VirtualClock(np.random.default_rng(4))
    other.resume(tmp_path / "clock")
    assert other.state() == clock.state()
    assert (other.next(), other.generator.random()) == (clock.next(), clock.generator.random())
    with pytest.raises(CheckpointError, match="clock: holds a clock, expected a scheduler"):
        IndependentClients(Uniform(0.0, 1.0), np.random.default_rng(0)).resume(tmp_path / "clock")


def spoiled(change):
    clock = VirtualClock(np.random.default_rng(3))
    clock.schedule(1.0, "a")
    clock.schedule(2.0, "b")
    state = json.loads(json.dumps(clock.state()))
    change(state)
    return state


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.clear(),
        lambda state: state.update(now=math.nan),
        lambda state: state.update(now=1.5),
        lambda state: state.update(scheduled=1),
        lambda state: state.update(events=None),
        lambda state: state["events"].append(state["events"][0]),
        lambda state: state["events"][0].pop(),
        lambda state: state["generator"].update(bit_generator="MT19937"),
        lambda state: state["generator"]["state"].pop("inc"),
        lambda state: state["generator"]["state"].update(state="0"),
        lambda state: state["events"][0].__setitem__(0, 10**400),
    ],
)
def test_a_bad_state_is_refused_and_changes_nothing(change):
    clock = VirtualClock()
    clock.schedule(1.0, "c")
    before = clock.state()
    with pytest.raises(ArgumentError, match="state: expected the state of a clock"):
        clock.restore(spoiled(change))
    assert clock.state() == before


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (np.random.MT19937, lambda state: state["state"].update(pos=10**6)),
        (np.random.MT19937, lambda state: state["state"].update(pos=-1)),
        (np.random.MT19937, lambda state: state["state"]["key"].pop()),
        (np.random.MT19937, lambda state: state["state"]["key"].append(0)),
        (np.random.MT19937, lambda state: state["state"]["key"].__setitem__(0, 2**32)),
        (np.random.Philox, lambda state: state.update(buffer_pos=-1)),
        (np.random.Philox, lambda state: state["buffer"].pop()),
    ],
)
def test_a_generator_is_not_sent_outside_its_buffer(kind, change):
    clock = VirtualClock(np.random.Generator(kind(0)))
    before = clock.state()
    state = json.loads(json.dumps(before))
    change(state["generator"])
    with pytest.raises(ArgumentError, match="state: expected the state of a clock"):
        clock.restore(state)
    assert clock.state() == before


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
def test_bad_input_is_refused_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
