"""Concurrency, buffer and refill: how many clients are in flight, and when the server dispatches again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import rules
from manifoldagg.federated.stability import with_buffer_size
from manifoldagg.simulation import Exponential, Method, run
from tests.simulation.event_loops import SCHEDULERS, Dispatched, drive, workloads
from tests.simulation.executors.runners import LOCAL, METHODS, federation

pytestmark = pytest.mark.filterwarnings("ignore::manifoldagg.errors.StabilityWarning")

KINDS = ["continuous", "some", "some routed", "routed"]
# A trace fixes the time at which each task ends, so a later dispatch cannot replay it.
LIVE = [name for name in SCHEDULERS if name != "replay"]


def batches(seen):
    """The sizes of the groups of dispatches between two other events, with the tasks in flight before each group."""
    found = []
    for event in seen.events:
        if isinstance(event, Dispatched):
            if not found or found[-1] is None:
                found.append([0, len(event.in_flight) - 1])
            found[-1][0] += 1
        else:
            found.append(None)
    return [tuple(group) for group in found if group is not None]


@given(workloads(KINDS, LIVE, stay=True), st.integers(2, 4))
def test_the_server_dispatches_when_enough_slots_are_free(workload, refill):
    slots = workload.concurrency if workload.kind.startswith("some") else len(workload.clients)
    if not workload.kind.endswith("routed"):
        slots = min(slots, len(workload.clients))
    if refill > (workload.concurrency if workload.kind.startswith("some") else refill):
        with pytest.raises(ArgumentError, match="refill: expected at most concurrency"):
            drive(workload, refill=refill)
        return
    seen = drive(workload, refill=refill)
    for count, in_flight in batches(seen):
        assert count >= min(refill, slots) or in_flight == 0
        assert count + in_flight == slots


@given(workloads(KINDS, LIVE), st.integers(1, 4))
def test_clients_that_come_and_go_never_stop_a_run_with_refill(workload, refill):
    if workload.kind.startswith("some") and refill > workload.concurrency:
        return
    plain, seen = drive(workload), drive(workload, refill=refill)
    if refill == 1:
        assert seen == plain
    if not plain.over:
        assert not seen.over


@pytest.mark.parametrize("refill", [1, 3])
def test_a_run_dispatches_in_groups(refill):
    found = run(
        federation(clients=6),
        METHODS["fedasync"],
        num_updates=24,
        eval_every=24,
        concurrency=4,
        refill=refill,
        delays=Exponential(1.0),
    )
    starts = [task.dispatched for task in found.trace if task.dispatched]
    sizes = {starts.count(time) for time in starts}
    assert sizes == {1} if refill == 1 else max(sizes) == 3


def test_buffer_sets_the_updates_of_a_step():
    four = run(federation(), Method("FedBuff", rules.FedBuff(4), LOCAL), num_updates=8)
    again = run(federation(), Method("FedBuff", rules.FedBuff(10), LOCAL), num_updates=8, buffer=4)
    assert again == four
    private = with_buffer_size(rules.Private(rules.FedBuff(10), clip=1.0, noise=1.0, seed=0), 3)
    assert private.rule.size == 3


@pytest.mark.usefixtures("as_shipped")
def test_invalid_terms_are_rejected_by_name():
    for name, options, words in (
        ("fedasync", {"buffer": 3}, "^buffer: expected a rule with a buffer, such as FedBuff, got FedAsync$"),
        ("fedasync", {"refill": 0}, "^refill: expected"),
        ("fedasync", {"concurrency": 2, "refill": 3}, "^refill: expected at most concurrency = 2, got 3$"),
        ("fedavg", {"refill": 2}, "^refill: expected None, as FedAvg decides when clients get tasks$"),
        ("defedavg", {"refill": 2}, "^refill: expected None, as DeFedAvg decides"),
    ):
        with pytest.raises(ArgumentError, match=words):
            run(federation(), METHODS[name], num_updates=2, **options)
