"""Tests with threads: no update is lost, applied twice or torn, and calls do not wait for unrelated updates."""

import random
import sys
import threading

import pytest
import torch

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import MemoryPolicy, Payload, Receipt, Server, ServerLimits
from manifoldagg.federated.rules import AsyncBezier
from manifoldagg.federated.server.lock import PendingUpdate, UpdateLock
from manifoldagg.manifolds import Flat
from tests.federated.fingerprint import Adds, Listens, versions
from tests.federated.server.durability.spilled import mapped, open_files
from tests.server_options import grouped

THREADS, UPDATES, P = 16, 10_000, 33
LATER = Payload(torch.ones(1, P), 1)
PATIENCE = 60.0
"""Seconds after which a thread that waits is taken to wait for ever."""

pytestmark = pytest.mark.usefixtures("as_shipped")


@pytest.fixture
def eager():
    """Switch threads a thousand times more often than usual."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(interval)


def together(count, work):
    """Run `work(i)` in `count` threads at the same time, and raise the exception of a thread in the caller."""
    errors, gate = [], threading.Barrier(count)

    def guarded(i):
        try:
            gate.wait(PATIENCE)
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


def whole(model, version):
    """Check that all entries of a model of `Adds` equal the version. The entries count the applied displacements of 1."""
    assert model.eq(model[0]).all()
    assert model[0].item() == version
    return True


@pytest.mark.soak
@pytest.mark.usefixtures("eager")
def test_updates_of_16_threads_are_applied_exactly_once():
    """Each displacement is 1. A lost or repeated update gives a wrong count, and a torn update gives unequal entries."""
    s = Server(Flat(P), Adds(), torch.zeros(P, dtype=torch.float64), weights="uniform")
    receipts, refusals, dropped = [], [], []

    def work(name):
        dice = random.Random(name)
        last = 0
        for _ in range(UPDATES // THREADS):
            ticket = s.dispatch((name, dice.randrange(4)))
            assert whole(ticket.message.start, ticket.version)
            assert ticket.version >= last
            if dice.random() < 0.1:
                spare = s.dispatch(name)
                s.drop(spare.id)
                dropped.append(spare.id)
            if dice.random() < 0.1:
                refusals.append(s.receive(ticket.id, Payload(torch.full((1, P), float("nan")), 1)))
            receipt = s.receive(ticket.id, Payload(ticket.message.start[None] + 1, 1))
            assert receipt.accepted
            assert receipt.version > last
            last = receipt.version
            receipts.append(receipt)
            model = s.model
            assert model.eq(model[0]).all()
            assert model[0].item() >= last

    together(THREADS, work)
    assert sorted(receipt.version for receipt in receipts) == list(range(1, UPDATES + 1))
    assert whole(s.model, UPDATES)
    assert s.version == UPDATES
    assert s._state.value.model_state.state == {"steps": UPDATES}
    history = s.history
    assert [row["version"] for row in history] == list(range(1, UPDATES + 1))
    # Client memory counts each client's answers.
    answers = {}
    for row in history:
        answers[row["client"]] = answers.get(row["client"], 0) + 1
    assert all(s._state.value.store.load(("client", client))["answers"] == n for client, n in answers.items())
    assert refusals
    assert not any(receipt.accepted for receipt in refusals)
    assert s.rejected == {"points": len(refusals)}
    assert len(dropped) > 0
    assert versions(s) == [UPDATES]
    assert s.memory["versions"] == 0


@pytest.mark.usefixtures("eager")
def test_only_one_thread_can_use_a_ticket():
    s = Server(Flat(P), Adds(), torch.zeros(P), weights="uniform")
    tickets = [s.dispatch("a") for _ in range(100)]
    outcomes = [[] for _ in tickets]

    def work(i):
        for ticket, outcome in zip(tickets, outcomes, strict=True):
            if i % 4:
                outcome.append(s.receive(ticket.id, Payload(ticket.message.start[None] + 1, 1)))
                continue
            try:
                s.drop(ticket.id)
                outcome.append(True)
            except ArgumentError:
                outcome.append(False)

    together(8, work)
    for outcome in outcomes:
        taken = {receipt.version for receipt in outcome if isinstance(receipt, Receipt) and receipt.accepted}
        # One update, whose receipt everybody gets who asks, or one drop, after which nobody does.
        assert len(taken) + outcome.count(True) == 1
        assert all(isinstance(receipt, bool) or receipt.accepted == bool(taken) for receipt in outcome)
    assert len(s._state.value.tickets) == 0
    assert whole(s.model, s.version)
    assert s.version == len(s.history)
    assert versions(s) == [s.version]


@pytest.mark.usefixtures("eager")
def test_threads_with_spilled_bases_give_the_expected_model(tmp_path):
    s = Server(Flat(64), AsyncBezier(0.5), torch.zeros(64), memory=MemoryPolicy(limit=0, spill=tmp_path))
    accepted = []

    def work(name):
        generator = torch.Generator().manual_seed(name)
        for _ in range(25):
            ticket = s.dispatch(name)
            points = ticket.message.start + torch.randn(2, 64, generator=generator)
            accepted.append(s.receive(ticket.id, Payload(points, 1)).version)

    together(8, work)
    assert sorted(accepted) == list(range(1, 201))
    assert versions(s) == [200]
    assert mapped(tmp_path) == open_files(tmp_path) == []


class Paused(Adds):
    """Rule that blocks in a step until the test releases it."""

    def __init__(self):
        self.inside, self.go, self.steps = threading.Event(), threading.Event(), 0

    def step(self, space, state, update, *, out=None):
        self.steps += 1
        out.fill_(-1.0)
        self.inside.set()
        assert self.go.wait(PATIENCE)
        return super().step(space, state, update, out=out)


def paused(**options):
    """Return a server during an update on ticket `a`, and a function that returns its receipt."""
    rule = Paused()
    s = Server(Flat(P), rule, torch.zeros(P), **grouped(**options))
    ticket, receipts = s.dispatch("a"), []
    points = ticket.message.start[None] + 1
    thread = threading.Thread(target=lambda: receipts.append(s.receive(ticket.id, Payload(points, 1))), daemon=True)
    thread.start()
    assert rule.inside.wait(PATIENCE)

    def finish():
        rule.go.set()
        thread.join(PATIENCE)
        assert not thread.is_alive()
        return receipts[0]

    return s, rule, ticket, finish


def test_dispatch_drop_and_model_do_not_wait_for_an_update():
    s, rule, _, finish = paused(weights={"a": 1, "b": 1})

    def others(_):
        assert whole(s.model, 0)
        ticket = s.dispatch("b")
        assert whole(ticket.message.start, 0)
        assert not s.receive(ticket.id, Payload(torch.ones(1, P + 1), 1)).accepted
        s.drop(ticket.id)
        assert (s.version, s.history, s.rejected["points"]) == (0, [], 1)
        assert s.memory["versions"] == 0

    together(1, others)
    assert finish().version == 1
    assert rule.steps == 1
    assert whole(s.model, 1)


def test_reading_history_does_not_wait_for_an_update():
    s, _, _, finish = paused()
    rows = []
    together(1, lambda _: rows.append(s.history))
    assert rows == [[]]
    assert finish().version == 1
    assert len(s.history) == 1


@pytest.mark.usefixtures("eager")
def test_history_is_consistent_during_updates():
    s = Server(Flat(P), Adds(), torch.zeros(P), weights="uniform", limits=ServerLimits(history_size=50))

    def work(i):
        if i:
            for _ in range(500):
                assert s.receive(s.dispatch(i).id, LATER).accepted
            return
        while s.version < 1000:
            seen = [row["version"] for row in s.history]
            last = seen[-1] if seen else 0
            assert seen == list(range(max(last - 50, 0) + 1, last + 1))

    together(3, work)
    assert [row["version"] for row in s.history] == list(range(951, 1001))


def test_queued_update_does_not_expire():
    clock = [0.0]
    s, _, _, finish = paused(timeout=10.0, clock=lambda: clock[0])
    waits, gone = s.dispatch("b"), s.dispatch("c")
    receipts = []
    thread = threading.Thread(target=lambda: receipts.append(s.receive(waits, LATER)), daemon=True)
    thread.start()
    while waits.id not in s._updates.lock.tickets:
        pass
    clock[0] = 11.0
    assert s.expire() == [gone.id]
    assert finish().version == 1
    thread.join(PATIENCE)
    assert receipts[0].version == 2


def test_payloads_that_are_being_decoded_do_not_fill_the_queue():
    s = Server(Flat(P), Adds(), torch.zeros(P), limits=ServerLimits(max_queued_updates=0))
    slow, quick = s.dispatch("a"), s.dispatch("b")
    begun, go = threading.Event(), threading.Event()

    def unpacked():
        begun.set()
        go.wait(PATIENCE)
        return LATER

    receipts = []
    thread = threading.Thread(target=lambda: receipts.append(s.receive(slow, unpacked)), daemon=True)
    thread.start()
    assert begun.wait(PATIENCE)
    assert s.receive(quick, LATER).accepted
    go.set()
    thread.join(PATIENCE)
    assert receipts[0].accepted


def test_update_beyond_the_queue_limit_is_rejected():
    s, _, _, finish = paused(max_queued_updates=1)
    first, second = s.dispatch("b"), s.dispatch("c")
    receipts = []
    thread = threading.Thread(target=lambda: receipts.append(s.receive(first, LATER)), daemon=True)
    thread.start()
    while sum(update.position is not None for update in s._updates.lock._alive()) < 2:
        pass
    assert s.receive(second, LATER).reason == "server: busy: 2 queued updates, max_queued_updates=1"
    assert finish().version == 1
    thread.join(PATIENCE)
    assert receipts[0].accepted
    assert s.receive(second, LATER).accepted
    assert s._updates.lock._alive() == []


def test_next_update_removes_interrupted_updates_from_the_queue():
    """An interrupted update cannot remove itself from the queue."""
    lock = UpdateLock(None)
    long = PendingUpdate("long")
    with long.alive_lock:
        lock.register(long)
        for name in "abc":
            update = PendingUpdate(name)
            with update.alive_lock:
                lock.register(update)
                assert lock.tickets == ["long", name]
        assert lock.tickets == ["long"]
        assert len(lock._updates) == 2
    assert lock.tickets == []


def test_close_passes_missed_versions_to_averaging():
    class Stops:
        average = None
        heard = 0

        def update(self, version, model):
            if not self.heard:
                self.heard = 1
                raise KeyboardInterrupt
            self.heard = version + 1

        def state(self):
            return {}

        def load(self, state):
            pass

    listener = Stops()
    s = Server(Flat(P), Adds(), torch.zeros(P), averaging=listener)
    with pytest.raises(KeyboardInterrupt):
        s.receive(s.dispatch("a"), LATER)
    s.close()
    assert listener.heard == 2


def test_ticket_dropped_during_its_update_stays_dropped():
    s, _, ticket, finish = paused()
    s.drop(ticket.id)
    receipt = finish()
    assert (receipt.accepted, receipt.reason) == (False, "ticket: unknown, or used already")
    assert whole(s.model, 0)
    assert versions(s) == [0]
    assert s._state.value.model_state.state == {"steps": 0}


@pytest.mark.parametrize("weights", ["uniform", "observed"])
def test_client_that_joins_during_an_update_counts_from_the_next_update(weights):
    """The server does not repeat a step, so a rule calls its functions once per update."""
    s, rule, _, finish = paused(weights=weights)
    assert s.dispatch("b").version == 0
    assert finish().weight == 1.0
    assert rule.steps == 1
    assert whole(s.model, 1)
    assert s.receive(s.dispatch("a"), LATER).weight == 0.5


@pytest.mark.parametrize("call", [Server.averaged, Server.close, lambda s: s.receive(s.dispatch("b").id, LATER)])
def test_reentrant_update_raises_instead_of_deadlock(call):
    class Calls(Listens):
        def update(self, version, model):
            call(s)

    s = Server(Flat(P), Adds(), torch.zeros(P), averaging=Calls())
    with pytest.raises(ArgumentError, match="server: expected a call outside of an update"):
        s.receive(s.dispatch("a").id, LATER)
    assert whole(s.averaged(), 1)


def test_averages_contain_only_complete_updates():
    class Last(Listens):
        def update(self, version, model):
            self.average = model

    s, _, _, finish = paused(averaging=Last())
    averages = []
    reader = threading.Thread(target=lambda: averages.append(s.averaged()), daemon=True)
    reader.start()
    assert finish().version == 1
    reader.join(PATIENCE)
    assert averages[0].eq(1.0).all()
