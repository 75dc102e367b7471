"""Courses to test with: every way to ask, every scheduler, clients that come and go, and one who drives them."""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import rules
from manifoldagg.federated.server.client_sampling import sampler_for
from manifoldagg.simulation import (
    Completion,
    Deterministic,
    Exponential,
    IndependentClients,
    JacksonNetwork,
    PriorityScheduler,
    ReplayScheduler,
    TaskId,
    TaskRecord,
    churn,
)
from manifoldagg.simulation.event_loop import DispatchEvent, DropoutEvent, EventLoop
from manifoldagg.simulation.lookahead import Lookahead

RULES = ["continuous", "some", "cohorts", "drawn", "some drawn", "routed", "some routed"]
SCHEDULERS = ["independent", "ties", "priority", "network", "replay"]


def rule_of(kind, clients, cohort=3):
    shares = np.arange(1, len(clients) + 1) / sum(range(1, len(clients) + 1))
    return {
        "cohorts": rules.Momentum(rules.FedAvg(cohort)),
        "drawn": rules.DeFedAvg(cohort),
        "routed": rules.GeneralizedAsyncSGD(dict(zip(clients, shares.tolist(), strict=True))),
    }.get(kind.removeprefix("some "), rules.FedAsync())


def scheduler_of(kind, clients, generator):
    if kind == "independent":
        return IndependentClients(Exponential(1.0), generator)
    if kind == "ties":
        return IndependentClients({c: Deterministic(1.0 + c % 2) for c in clients}, generator)
    if kind == "priority":
        return PriorityScheduler(len(clients), generator)
    if kind == "network":
        n = max(clients) + 1
        return JacksonNetwork(np.full(n, 1 / n), np.linspace(1, 3, n), generator, concurrency=10_000)
    ends = np.cumsum(generator.exponential(size=400)).tolist()
    return ReplayScheduler([TaskRecord(int(generator.choice(clients)), 1.0, 0.0, 0.0, end, 0) for end in ends])


@dataclass(frozen=True)
class Plot:
    """All that a course follows from."""

    kind: str
    scheduler: str
    clients: tuple[int, ...]
    cohort: int
    tasks: int
    up: float
    seed: int

    def course(self):
        names = iter(range(9))
        generator = lambda: np.random.default_rng([self.seed, next(names)])  # noqa: E731
        clients = list(self.clients)
        some = self.tasks if self.kind.startswith("some") else None
        who = sampler_for(rule_of(self.kind, clients, self.cohort), clients, some, generator())
        changes = churn(clients, Exponential(self.up), Exponential(2.0), 60.0, generator()) if self.up else ()
        return EventLoop(clients, who, scheduler_of(self.scheduler, clients, generator()), changes)


@st.composite
def plots(draw, kinds=RULES, schedulers=SCHEDULERS, stay=False):
    kind = draw(st.sampled_from(kinds))
    # A trace says when the next task of a client was answered, not when one that begins later would be.
    scheduler = draw(st.sampled_from([name for name in schedulers if name != "replay" or kind == "continuous"]))
    clients = draw(st.lists(st.integers(0, 12), min_size=1, max_size=7, unique=True))
    up = 0.0 if stay or scheduler == "replay" else draw(st.sampled_from([0.0, 3.0, 12.0]))
    cohort, tasks, seed = draw(st.tuples(st.integers(2, 5), st.integers(1, 9), st.integers(0, 99)))
    return Plot(kind, scheduler, tuple(clients), cohort, tasks, up, seed)


def steady(client, nth):
    return 1.0 + client % 3


class Asked(NamedTuple):
    """An `DispatchEvent` with what was given, when, and to how many who were here."""

    key: TaskId
    time: float
    present: frozenset
    out: tuple


class Answered(NamedTuple):
    """An `ClosedTicket` with what became of it."""

    key: TaskId
    done: Completion
    accepted: bool


@dataclass
class Seen:
    """What happened in a course: `Asked`, `Answered` and `DropoutEvent`; and what was foreseen before which of them."""

    events: list
    foreseen: list
    over: str = ""

    @property
    def answers(self):
        return [event for event in self.events if isinstance(event, Answered)]

    @property
    def asks(self):
        return [event for event in self.events if isinstance(event, Asked)]


def drive(plot, rounds=40, accepts=lambda nth: True, work=steady, limit=None):
    """Drive a course for so many rounds, or until nobody has a task; with a `limit`, look ahead before all it is told."""
    course = plot.course()
    foresight = Lookahead(course, rounds, lambda client: work(client, 0))
    seen = Seen([], [])
    out = {}
    given = Counter()
    answers = 0
    while answers < rounds:
        try:
            event = course.next()
        except ArgumentError as error:
            seen.over = str(error)
            break
        if limit is not None:
            # What has just been lost is not yet told.
            if isinstance(event, DropoutEvent):
                foresight.on_dropout(event.task_ids)
            seen.foreseen.append((len(seen.events), tuple(foresight.next_tasks(limit))))
        if isinstance(event, DispatchEvent):
            given[event.client] += 1
            units = work(event.client, given[event.client])
            key = course.give(event.client, units)
            out[key] = None
            seen.events.append(Asked(key, course.now, frozenset(course.present), tuple(out)))
            foresight.on_dispatch(key, units)
        elif isinstance(event, DropoutEvent):
            if limit is None:
                foresight.on_dropout(event.task_ids)
            for key in event.task_ids:
                del out[key]
            seen.events.append(event)
        else:
            accepted = accepts(answers)
            answers += 1
            course.settle(accepted)
            foresight.on_completion(event.key, accepted)
            del out[event.key]
            seen.events.append(Answered(event.key, event.done, accepted))
    return seen
