"""Tests of a server under faults: forks, forged ids, lost receipts, full disks and damaged files."""

import atexit
import errno
import gc
import os
import queue
import signal
import threading
from contextlib import suppress

import pytest
import torch

from manifoldagg.averaging import SWA
from manifoldagg.errors import ArgumentError, BusyError, ManifoldAggError
from manifoldagg.federated import Payload
from manifoldagg.manifolds import Flat
from tests.federated.fingerprint import Adds, versions
from tests.federated.server.durability.spilled import alter, mapped, needs_maps
from tests.federated.server.hostile import PATIENCE, P, forked, outside, quiet, scene, watched

ONE = torch.ones(1, P, dtype=torch.float64)

pytestmark = pytest.mark.usefixtures("as_shipped", "watchful")


@pytest.fixture
def watchful():
    """Wake every thread that waits forever."""
    with watched():
        yield


class Paused(Adds):
    """Rule that blocks in a step until the test releases it."""

    def __init__(self):
        self.inside = threading.Event()
        self.go = threading.Event()
        self.stops = False

    def step(self, space, state, update, *, out=None):
        if self.stops:
            self.inside.set()
            assert self.go.wait(PATIENCE)
        return super().step(space, state, update, out=out)


@pytest.fixture
def busy():
    """Return a scene during an update in another thread, and a function that returns its receipt."""
    rule = Paused()
    made = scene(lambda: rule, max_queued_updates=1)
    rule.stops = True
    receipts = []
    thread = threading.Thread(target=lambda: receipts.append(made.receive()), daemon=True)
    thread.start()
    assert rule.inside.wait(PATIENCE)

    def finish():
        rule.go.set()
        thread.join(PATIENCE)
        return receipts[0]

    yield made, finish
    finish()


def test_child_forked_during_an_update_gets_an_error(busy):
    made, finish = busy
    other = made.server.dispatch("b")

    def child():
        words = []
        for call in (
            lambda: made.receive(other),
            lambda: made.server.dispatch("c"),
            lambda: made.server.drop(other.id),
            made.server.averaged,
            made.server.expire,
        ):
            with pytest.raises(ManifoldAggError) as error:
                call()
            words.append(str(error.value))
        return words, made.server.model.tolist(), made.server.version

    words, model, version = forked(child)
    assert all("process" in each for each in words)
    assert (model, version) == ([2.0] * P, 2)
    assert finish().accepted
    assert made.receive(other).accepted
    quiet(made)


@needs_maps
def test_a_forked_child_frees_none_of_its_parents_files(tmp_path):
    made = scene(memory_limit=0, spill=tmp_path)
    before = mapped(tmp_path)
    assert before

    def child():
        # As at the end of a process, but without what the test run itself has to say then.
        made.server._state = None
        gc.collect()
        atexit._run_exitfuncs()

    forked(child)
    assert mapped(tmp_path) == before
    assert made.receive().accepted
    quiet(made)
    made.server.close()


def test_a_killed_server_leaves_no_file(tmp_path):
    def child():
        made = scene(memory_limit=0, spill=tmp_path)
        assert made.server.memory["spilled"] > 0
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(EOFError):
        forked(child)
    assert list(tmp_path.rglob("*")) == []


def test_retry_returns_a_lost_receipt():
    made = scene()
    receipt = made.receive()
    after = outside(made.server)
    for ticket in (made.ticket.id, made.ticket):
        for payload in (made.payload(), Payload(ONE * 9, 5), Payload(ONE * float("nan"), 1), None):
            assert made.server.receive(ticket, payload) is receipt
            assert made.server.receive(ticket, payload, client="a") is receipt
    assert outside(made.server) == after


def test_update_of_another_client_is_rejected_and_ticket_stays_open():
    made = scene()
    for client in ("b", None, ["a"], torch.zeros(1)):
        refused = made.server.receive(made.ticket.id, made.payload(), client=client)
        assert refused.reason.startswith("client: ")
    receipt = made.server.receive(made.ticket.id, made.payload(), client="a")
    assert receipt.accepted
    assert made.server.receive(made.ticket.id, made.payload(), client="b").reason.startswith("client: ")
    assert made.server.receive(made.ticket.id, made.payload(), client="a") is receipt
    assert made.server.version == 3


def test_ticket_ids_cannot_be_guessed():
    server = scene().server
    ids = [server.dispatch(i).id for i in range(64)]
    # Of 64 random digits that two share by chance there are few.
    heads = {each[:8] for each in ids}
    tails = {each[-8:] for each in ids}
    assert len(heads) == len(tails) == len(ids)
    forged = [ids[0][:-1] + digit for digit in "0123456789abcdef"]
    assert all(guess in ids or "unknown" in server.receive(guess, None).reason for guess in forged)


def test_number_of_cached_receipts_is_bounded():
    made = scene(receipt_cache_size=3)
    tickets = [made.server.dispatch("a") for _ in range(5)]
    receipts = [made.receive(ticket) for ticket in tickets]
    again = [made.receive(ticket) for ticket in tickets]
    assert again[2:] == receipts[2:]
    assert all(receipt.reason == "ticket: unknown, or used already" for receipt in again[:2])
    assert made.server.version == 7


def test_ticket_above_max_staleness_ends():
    made = scene(max_staleness=0)
    version = made.server.version
    late = made.server.dispatch("late")
    assert made.receive().accepted
    receipt = made.receive(late)
    assert receipt.reason == "staleness: expected at most 0, got 1"
    assert version not in versions(made.server)
    assert made.receive(late) is receipt
    with pytest.raises(ArgumentError, match="ticket: unknown"):
        made.server.drop(late.id)
    assert made.server.rejected == {"staleness": 1}


def test_unanswered_ticket_expires_on_the_servers_clock():
    made = scene()
    made.clock.now = 59.0
    late = made.server.dispatch("late")
    made.clock.now = 60.5
    made.server.expire()
    refused = made.receive()
    assert refused.reason == "ticket: expired: no update arrived within 60 s"
    assert made.receive() is refused
    assert versions(made.server) == [2]
    assert made.receive(late).accepted
    assert made.server.memory["versions"] == 0


def test_expired_ticket_is_rejected_without_call_of_expire():
    made = scene()
    made.clock.now = 60.5
    assert made.receive().reason.startswith("ticket: expired")
    made.server.expire()
    assert versions(made.server) == [2]


def test_number_of_tickets_in_flight_is_limited():
    made = scene(max_in_flight=4)
    more = [made.server.dispatch("b"), made.server.dispatch("c")]
    before = outside(made.server)
    with pytest.raises(BusyError, match="server: busy: 4 tickets in flight, max_in_flight=4"):
        made.server.dispatch("d")
    assert outside(made.server) == before
    made.server.drop(more[0].id)
    assert made.receive(made.server.dispatch("d")).accepted


def test_number_of_queued_updates_is_limited(busy):
    made, finish = busy
    others = [made.server.dispatch(name) for name in "bc"]
    receipts = queue.Queue()
    for ticket in others:
        threading.Thread(target=lambda ticket=ticket: receipts.put(made.receive(ticket)), daemon=True).start()
    # One at least does not wait, and keeps its ticket.
    refused = receipts.get(timeout=PATIENCE)
    assert refused.reason == "server: busy: 2 queued updates, max_queued_updates=1"
    finish()
    receipts.get(timeout=PATIENCE)
    assert all(made.receive(ticket).accepted for ticket in others)
    assert made.server.version == 5
    quiet(made)


class Fails(SWA):
    """Average that fails for one version."""

    def update(self, version, model):
        if version == 3:
            raise OSError("no average today")
        super().update(version, model)


def test_exception_in_averaging_keeps_the_receipt():
    made = scene(averaging=Fails(Flat(P)))
    with pytest.raises(OSError, match="no average today"):
        made.receive()
    receipt = made.receive()
    assert (receipt.accepted, receipt.version) == (True, 3)
    assert made.server.version == 3
    assert [row["version"] for row in made.told] == [1, 2, 3]
    quiet(made)


def full_disk(patch):
    """Make every write to a file fail."""

    def write(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr("manifoldagg.federated.server.durability.spill.write_all", write)


def test_warning_raised_as_error_keeps_the_receipt(tmp_path, monkeypatch):
    made = scene(memory_limit=0, spill=tmp_path)
    full_disk(monkeypatch)
    with suppress(RuntimeWarning):
        made.receive()
    receipt = made.receive()
    assert (receipt.accepted, receipt.version) == (True, 3)
    assert made.server.memory["clients"] > 0
    monkeypatch.undo()
    # With room on the disk everything goes there again.
    quiet(made)
    assert made.server.memory["clients"] == 0


@pytest.mark.parametrize("fault", [{}, {"byte": 0}, {"value": 7}], ids=str)
def test_damaged_file_ends_only_the_tickets_that_need_it(fault, tmp_path):
    made = scene(memory_limit=0, spill=tmp_path)
    late = made.server.dispatch("late")
    assert made.receive(made.server.dispatch("c")).accepted
    good = made.server.dispatch("good")
    assert alter(made.server, **fault) > 1
    receipt = made.receive(late)
    assert "altered" in receipt.reason
    assert str(tmp_path) in receipt.reason
    assert made.receive(late) is receipt
    assert made.receive(good).accepted
    assert made.server.rejected == {"spill": 1}
    assert made.server.version == 4
