"""Tests of persistent maps and of atomic references.

Maps are compared with dicts. References stay consistent under interrupts, threads and reentrant calls.
"""

import gc
import signal
import sys
import threading
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.federated.server.durability.persistent_map import AtomicReference, PersistentOrderedMap

KEYS = st.integers(0, 9)


@given(st.lists(st.tuples(st.sampled_from(["set", "set within", "remove", "remove two", "set last"]), KEYS)))
def test_ordered_map_equals_dict_and_old_versions_are_unchanged(steps):
    mine, theirs, past = PersistentOrderedMap(), {}, []
    for turn, (step, key) in enumerate(steps):
        past.append((mine, dict(theirs)))
        if step == "set":
            mine = mine.set(key, turn)
            theirs[key] = turn
        elif step == "set within":
            mine = mine.set(key, turn, 4)
            theirs[key] = turn
            theirs = dict([*theirs.items()][-4:])
        elif step == "remove two":
            gone = [other for other in (key, key + 1) if other in theirs]
            mine = mine.remove(*gone)
            theirs = {other: value for other, value in theirs.items() if other not in gone}
        elif step == "set last":
            mine = mine.set(key, turn, key)
            theirs[key] = turn
            theirs = dict([*theirs.items()][max(len(theirs) - key, 0) :])
        elif key in theirs:
            mine = mine.remove(key)
            del theirs[key]
    for ordered, plain in [*past, (mine, theirs)]:
        assert [*ordered.items()] == [*plain.items()]
        assert len(ordered) == len(plain)
        if plain:
            assert ordered.first_key == next(iter(plain))


def test_missing_key_raises_key_error():
    for ask in (lambda m: m["a"], lambda m: m.remove("a"), lambda m: m.first_key):
        with pytest.raises(KeyError):
            ask(PersistentOrderedMap())


def test_removed_keys_keep_the_order_of_the_remaining_keys():
    ordered = PersistentOrderedMap().set("first", 0)
    for i in range(1000):
        ordered = ordered.set(i, i).remove(i)
    assert ordered.next_index == 1001
    assert ordered.first_key == "first"
    ordered = ordered.remove("first").set("next", 1)
    assert [*ordered.items()] == [("next", 1)]
    assert ordered.first_key == "next"


def counted(value):
    return value + 1, value


def test_concurrent_updates_lose_no_change():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    place, seen = AtomicReference(0), []
    try:
        threads = [
            threading.Thread(target=lambda: seen.extend([place.update(counted) for _ in range(2000)])) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert place.value == 16_000
    assert sorted(seen) == [*range(16_000)]


def test_reentrant_update_is_applied_first():
    place, within = AtomicReference(()), []

    def change(now):
        if not within:
            within.append(place.update(lambda now: ((*now, "inner"), len(now))))
        return (*now, "outer"), len(now)

    assert place.update(change) == 1
    assert within == [0]
    assert place.value == ("inner", "outer")


def test_exception_in_update_function_keeps_the_value():
    place = AtomicReference(3)
    with pytest.raises(ZeroDivisionError):
        place.update(lambda now: (now // 0, None))
    assert place.value == 3
    assert place.update(lambda now: (now, "same")) == "same"


def test_replaced_values_are_freed():
    class Held:
        pass

    alive = weakref.WeakSet()

    def fresh(_):
        held = Held()
        alive.add(held)
        return held, None

    place = AtomicReference(Held())
    gc.disable()
    try:
        for _ in range(5):
            place.update(fresh)
        assert [*alive] == [place.value]
    finally:
        gc.enable()


def test_stored_exception_keeps_no_later_value_alive():
    class Held:
        pass

    place, alive, kept = AtomicReference(Held()), weakref.WeakSet(), []
    try:
        place.update(lambda now: now.missing)
    except AttributeError as error:
        kept.append(error)
    for _ in range(5):
        held = Held()
        alive.add(held)
        place.update(lambda _, held=held: (held, None))
    del held
    assert kept
    assert len(alive) == 1


@pytest.mark.usefixtures("as_shipped")
def test_signals_leave_updates_atomic():
    """A signal handler raises an exception.

    Each change is then applied completely or not at all, and no earlier change is lost.
    """
    place, done, raised = AtomicReference((0, 0)), 0, 0

    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    try:
        for i in range(2000):
            reached = place.value[0]
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + i % 50))
                for _ in range(50):
                    place.update(lambda now: ((now[0] + 1, now[1] - 1), None))
                    reached += 1
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Stop:
                raised += 1
            value = place.value
            assert value[0] == -value[1]
            assert value[0] - reached in (0, 1)
            done += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert done == 2000
    assert raised > 100
