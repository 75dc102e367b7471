"""The lookahead: exact where all goes on as before, never more than a guess, and cheap where it goes wrong."""

import copy
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.simulation import lookahead as module
from tests.simulation.event_loops import Completed, DropoutEvent, Workload, drive, workloads


def under_way(seen):
    """The tasks under way before each event, and the order in which all answers come from there on."""
    out, states = {}, []
    for event in seen.events:
        states.append(set(out))
        if isinstance(event, Completed):
            del out[event.task_id]
        elif isinstance(event, DropoutEvent):
            for key in event.task_ids:
                del out[key]
        else:
            out[event.task_id] = None
    return states


def check_sound(seen, limit):
    """What is foreseen is under way, at most so many, and nothing twice."""
    states = under_way(seen)
    for place, keys in seen.predicted:
        lost = (
            seen.events[place].task_ids
            if place < len(seen.events) and isinstance(seen.events[place], DropoutEvent)
            else ()
        )
        assert set(keys) <= states[place] - set(lost)
        assert len(set(keys)) == len(keys) <= limit


@given(workloads(), st.integers(1, 9))
def test_predicted_order_of_tasks_is_exact(workload, limit):
    """As long as updates are accepted and clients are given as much as before: for every scheduler, clients that come and go."""
    seen = drive(workload, limit=limit)
    check_sound(seen, limit)
    states = under_way(seen)
    for place, keys in seen.predicted:
        needed = [e.task_id for e in seen.events[place:] if isinstance(e, Completed) and e.task_id in states[place]]
        assert list(keys) == needed[:limit]


@given(workloads(), st.integers(1, 9), st.integers(2, 4))
def test_wrong_assumptions_only_make_the_prediction_inexact(workload, limit, often):
    seen = drive(workload, accepts=lambda nth: nth % often > 0, work=lambda client, nth: 1.0 + nth % often, limit=limit)
    check_sound(seen, limit)
    # Looking ahead changes nothing.
    assert (
        drive(workload, accepts=lambda nth: nth % often > 0, work=lambda client, nth: 1.0 + nth % often).events
        == seen.events
    )


def test_lookahead_copies_the_event_loop_rarely(monkeypatch):
    copies = count()
    real = copy.deepcopy
    monkeypatch.setattr(module.copy, "deepcopy", lambda loop: (next(copies), real(loop))[1])
    workload = Workload("continuous", "independent", tuple(range(12)), 3, 5, 0.0, 0)
    drive(workload, num_updates=300, limit=4)
    assert next(copies) == 1
    seen = drive(workload, num_updates=300, work=lambda client, nth: 1.0 + nth % 7, limit=4)
    # Each twin looked at 12 tasks at least, a quarter of which are 3 events.
    assert 10 < next(copies) < len(seen.events) / 3
