"""Event loops to test with: every client sampler, every scheduler, clients that come and go, and a driver."""

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
class Workload:
    """All that an event loop follows from."""

    kind: str
    scheduler: str
    clients: tuple[int, ...]
    cohort: int
    concurrency: int
    up: float
    seed: int

    def event_loop(self, refill=None):
        names = iter(range(9))
        generator = lambda: np.random.default_rng([self.seed, next(names)])  # noqa: E731
        clients = list(self.clients)
        some = self.concurrency if self.kind.startswith("some") else None
        who = sampler_for(rule_of(self.kind, clients, self.cohort), clients, some, generator(), refill=refill)
        changes = churn(clients, Exponential(self.up), Exponential(2.0), 60.0, generator()) if self.up else ()
        return EventLoop(clients, who, scheduler_of(self.scheduler, clients, generator()), changes)


@st.composite
def workloads(draw, kinds=RULES, schedulers=SCHEDULERS, stay=False):
    kind = draw(st.sampled_from(kinds))
    # A trace says when the next task of a client was answered, not when one that begins later would be.
    scheduler = draw(st.sampled_from([name for name in schedulers if name != "replay" or kind == "continuous"]))
    clients = draw(st.lists(st.integers(0, 12), min_size=1, max_size=7, unique=True))
    up = 0.0 if stay or scheduler == "replay" else draw(st.sampled_from([0.0, 3.0, 12.0]))
    cohort, concurrency, seed = draw(st.tuples(st.integers(2, 5), st.integers(1, 9), st.integers(0, 99)))
    return Workload(kind, scheduler, tuple(clients), cohort, concurrency, up, seed)


def steady(client, nth):
    return 1.0 + client % 3


class Dispatched(NamedTuple):
    """A `DispatchEvent` with its task, its time, the available clients and the tasks in flight."""

    task_id: TaskId
    time: float
    available: frozenset
    in_flight: tuple


class Completed(NamedTuple):
    """A `CompletionEvent`, and whether the update was accepted."""

    task_id: TaskId
    completion: Completion
    accepted: bool


@dataclass
class History:
    """The events of a loop, `Dispatched`, `Completed` and `DropoutEvent`, and the tasks that were predicted before them."""

    events: list
    predicted: list
    over: str = ""

    @property
    def completions(self):
        return [event for event in self.events if isinstance(event, Completed)]

    @property
    def dispatches(self):
        return [event for event in self.events if isinstance(event, Dispatched)]


def drive(workload, num_updates=40, accepts=lambda nth: True, work=steady, limit=None, refill=None):
    """Drive an event loop for so many updates, or until no client has a task; with a `limit`, look ahead before each event."""
    loop = workload.event_loop(refill)
    lookahead = Lookahead(loop, lambda ahead: ahead.num_completed >= num_updates, lambda client: work(client, 0))
    seen = History([], [])
    out = {}
    given = Counter()
    answers = 0
    while answers < num_updates:
        try:
            event = loop.next()
        except ArgumentError as error:
            seen.over = str(error)
            break
        if limit is not None:
            # What has just been lost is not yet told.
            if isinstance(event, DropoutEvent):
                lookahead.on_dropout(event.task_ids)
            seen.predicted.append((len(seen.events), tuple(lookahead.next_tasks(limit))))
        if isinstance(event, DispatchEvent):
            given[event.client] += 1
            units = work(event.client, given[event.client])
            key = loop.submit(event.client, units)
            out[key] = None
            seen.events.append(Dispatched(key, loop.now, frozenset(loop.available), tuple(out)))
            lookahead.on_dispatch(key, units)
        elif isinstance(event, DropoutEvent):
            if limit is None:
                lookahead.on_dropout(event.task_ids)
            for key in event.task_ids:
                del out[key]
            seen.events.append(event)
        else:
            accepted = accepts(answers)
            answers += 1
            loop.acknowledge(accepted)
            lookahead.on_completion(event.task_id, accepted)
            del out[event.task_id]
            seen.events.append(Completed(event.task_id, event.completion, accepted))
    return seen
