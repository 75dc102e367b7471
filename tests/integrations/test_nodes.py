"""The bookkeeping of nodes: one message a node, nothing lost, nothing done twice, and rests that double."""

from collections import Counter
from itertools import zip_longest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.integrations.flower.nodes import Nodes

NODES = range(4)
STEPS = st.lists(
    st.tuples(st.sampled_from(["meet", "ask", "first", "send", "skip", "well", "badly", "late"]), st.integers(0, 15)),
    max_size=60,
)


class World:
    """Plays steps, and keeps account of every piece of work."""

    def __init__(self):
        self.nodes = Nodes(initial_backoff=1.0, max_backoff=8.0)
        self.now = 0.0
        self.works = Counter()
        self.names = iter(range(10**6))
        self.asked = []
        self.done = []

    def play(self, kind, number):
        self.now += 0.5
        nodes, node = self.nodes, number % len(NODES)
        due = nodes.ready(self.now)
        if kind == "meet":
            here = [n for n in NODES if number >> n & 1]
            new, left = nodes.update_membership(here)
            assert sorted(nodes.present) == here
            assert set(new) <= set(here)
            assert not set(left) & set(here)
            self.done += [work for works in left.values() for work in works]
        elif kind in ("ask", "first") and node in nodes.present:
            work = (node, next(self.names), kind)
            self.asked.append(work)
            nodes.enqueue(node, work, priority=kind == "first")
        elif kind == "send" and due:
            node, work = due[number % len(due)]
            nodes.mark_sent(node, str(next(self.names)), work, deadline=self.now + 3)
        elif kind == "skip" and due:
            node, work = due[number % len(due)]
            nodes.discard(node)
            self.done.append(work)
        elif kind in ("well", "badly") and nodes.outstanding:
            message = nodes.outstanding[number % len(nodes.outstanding)]
            held = nodes.lookup(message)
            assert held == nodes.complete(message, self.now, succeeded=kind == "well")
            assert nodes.lookup(message) is None
            assert nodes.is_backing_off(held[0], self.now) == (kind == "badly")
            self.done.append(held[1])
        elif kind == "late":
            for message in nodes.overdue(self.now):
                self.done.append(nodes.complete(message, self.now, succeeded=False)[1])

    def check(self):
        held = [self.nodes.lookup(message) for message in self.nodes.outstanding]
        busy = [node for node, _ in held]
        assert len(set(busy)) == len(busy)
        due = dict(self.nodes.ready(self.now))
        assert not set(due) & set(busy)
        assert set(due) | set(busy) <= set(self.nodes.present)
        assert all(work[0] == node for node, work in [*held, *due.items()])
        out = self.done + [work for _, work in held]
        assert len(set(out)) == len(out)
        assert set(out) <= set(self.asked)


@given(STEPS)
def test_each_node_has_one_message_and_no_work_is_lost_or_repeated(steps):
    world = World()
    for step in [("meet", 15), *steps]:
        world.play(*step)
        world.check()
    # When everybody has left, all that was ever asked has ended, once.
    world.play("meet", 0)
    world.check()
    assert sorted(world.done) == sorted(world.asked)


@given(st.lists(st.booleans(), max_size=12))
def test_priority_tasks_come_first_but_never_twice_in_a_row(firsts):
    nodes = Nodes()
    nodes.update_membership([1])
    for i, first in enumerate(firsts):
        nodes.enqueue(1, (not first, i), priority=first)
    found = []
    while due := nodes.ready(0.0):
        found.append(due[0][1])
        nodes.mark_sent(1, "message", due[0][1], deadline=1.0)
        nodes.complete("message", now=0.0, succeeded=True)
    early, late = ([i for i, first in enumerate(firsts) if first == kind] for kind in (True, False))
    turns = [work for pair in zip_longest(early, late) for work in pair if work is not None]
    assert [i for _, i in found] == turns


@given(st.integers(1, 100))
def test_backoff_doubles_with_each_failure_up_to_the_maximum(failures):
    nodes = Nodes(initial_backoff=0.1, max_backoff=60.0)
    nodes.update_membership([1])
    nodes.enqueue(1, "work")
    now = 0.0
    for failure in range(failures):
        now += 1.0
        nodes.backoff(1, now)
        rest = min(0.1 * 2**failure, 60.0)
        assert nodes.ready(now + 0.999 * rest) == []
        now += rest * 1.001
        assert nodes.ready(now) == [(1, "work")]
    nodes.mark_sent(1, "message", "work", deadline=now + 1)
    nodes.complete("message", now, succeeded=True)
    nodes.backoff(1, now)
    assert not nodes.is_backing_off(1, now + 0.11)


def test_message_is_overdue_after_its_deadline():
    nodes = Nodes()
    nodes.update_membership([1])
    nodes.enqueue(1, "work")
    nodes.mark_sent(1, "message", "work", deadline=2.0)
    assert (nodes.overdue(1.9), nodes.overdue(2.0)) == ([], ["message"])
    with pytest.raises(KeyError):
        nodes.complete("another", 2.0, succeeded=True)
