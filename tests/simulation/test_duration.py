"""Runs that end by virtual time: the same updates as without the limit, up to that time."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import CheckpointPolicy
from manifoldagg.simulation import AvailabilityChange, Deterministic, run
from tests.simulation.executors.runners import METHODS, WORKLOADS, federation
from tests.simulation.test_resume import Stop, stopping

METHOD = METHODS["fedasync"]


@pytest.fixture(scope="module")
def whole():
    return {name: run(federation(), METHOD, num_updates=12, **WORKLOADS[name]) for name in ("plain", "churn")}


@given(name=st.sampled_from(["plain", "churn"]), count=st.integers(0, 11), exact=st.booleans(), ahead=st.booleans())
def test_a_run_has_the_updates_up_to_its_duration(whole, name, count, exact, ahead):
    """An update at exactly this time counts."""
    times = whole[name].times
    before = times[count - 1] if count else 0.0
    duration = before if exact and count else (before + times[count]) / 2
    expected = [task for task in whole[name].trace if task.finished <= duration]
    with ThreadPoolExecutor(2) as pool:
        found = run(
            federation(), METHOD, duration=duration, eval_every=5, executor=pool if ahead else None, **WORKLOADS[name]
        )
    assert found.trace == expected
    assert found.evaluated_at == sorted({0, *range(5, len(expected) + 1, 5), len(expected)})
    assert found.accuracy == [whole[name].accuracy[updates] for updates in found.evaluated_at]


def test_the_first_limit_ends_a_run(whole):
    times = whole["plain"].times
    assert run(federation(), METHOD, num_updates=3, duration=times[-1]).times == times[:3]
    assert run(federation(), METHOD, num_updates=12, duration=times[4]).times == [t for t in times if t <= times[4]]
    assert run(federation(), METHOD, num_updates=12, duration=math.nextafter(0, 1)).evaluated_at == [0]


def test_a_duration_may_exceed_the_last_task():
    changes = [AvailabilityChange(2.5, client, "leave") for client in federation().trainable_clients]
    given = {"delays": Deterministic(0.25), "availability": changes}
    found = run(federation(), METHOD, duration=1000.0, **given)
    assert 2.5 <= found.times[-1] < 1000.0
    with pytest.raises(ArgumentError, match=f"expected a client with a task after {len(found.trace)} updates"):
        run(federation(), METHOD, num_updates=len(found.trace) + 1, **given)


def test_a_run_with_a_duration_resumes_with_the_same_bits(whole, tmp_path):
    policy = CheckpointPolicy(tmp_path / "run", every_updates=2)
    duration = whole["plain"].times[8]
    given = {"duration": duration, "eval_every": 5, "checkpoint": policy, "resume": True}
    with pytest.raises(Stop):
        run(federation(), METHOD, progress=stopping(6), **given)
    found = run(federation(), METHOD, **given)
    assert found == run(federation(), METHOD, duration=duration, eval_every=5)
    assert [astuple(task) for task in found.trace] == [
        astuple(t) for t in whole["plain"].trace if t.finished <= duration
    ]
    again = []
    assert run(federation(), METHOD, on_update=again.append, **given) == found
    assert len(again) <= 1


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("duration", [0.0, -1.0, math.nan, math.inf, "3"])
def test_a_duration_that_is_not_positive_is_rejected(duration):
    with pytest.raises(ArgumentError, match="duration: expected"):
        run(federation(), METHOD, duration=duration)
    with pytest.raises(ArgumentError, match="num_updates, duration: expected at least one of them"):
        run(federation(), METHOD)
