"""Tests of events: each event is published once, in order, and callbacks do not affect the server."""

import asyncio
import gc
import json
import logging
import math
import random
import threading

import pytest
import torch

from manifoldagg import tensor_file
from manifoldagg.errors import ArgumentError, BusyError, CheckpointError
from manifoldagg.federated import CheckpointPolicy, Payload, Server, ServerLimits, UpdateLimits
from manifoldagg.federated.rules import FedOrtho
from manifoldagg.federated.server.events import (
    Accepted,
    CheckpointFailed,
    CheckpointWritten,
    Closed,
    Dispatched,
    Dropped,
    Expired,
    Rejected,
)
from manifoldagg.manifolds import Flat
from tests.federated.fingerprint import Adds, Gathers, fingerprint
from tests.federated.server.hostile import Scene, everywhere, outside, quiet, scene, watched
from tests.federated.server.test_threads import PATIENCE, eager, paused, together  # noqa: F401
from tests.server_options import grouped

P = 2


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def payload(value=1.0):
    return Payload(torch.full((1, P), value), 1)


def heard(rule=None, **options):
    """Return a server, its clock, and the list of its events."""
    clock = Clock()
    s = Server(Flat(P), Adds() if rule is None else rule, torch.zeros(P), clock=clock, **grouped(**options))
    told = []
    s.on_event(told.append)
    return s, clock, told


def test_every_event_is_published_with_its_fields(tmp_path):
    s, clock, told = heard(
        FedOrtho(0.5), timeout=10.0, max_staleness=1, checkpoint=CheckpointPolicy(tmp_path / "often", every_updates=3)
    )
    old, ticket = s.dispatch("old"), s.dispatch("ward-7")
    assert told == [Dispatched(0, 1, "old", old.id, 0), Dispatched(0, 2, "ward-7", ticket.id, 0)]
    told.clear()
    clock.now = 4.0
    assert not s.receive(ticket, payload(math.nan)).accepted
    receipt = s.receive(ticket, payload())
    refused, accepted = told
    assert (refused.client, refused.ticket, refused.field, refused.latency) == ("ward-7", ticket.id, "points", 4.0)
    assert refused.reason.startswith("points: expected finite")
    assert (refused.version, refused.in_flight, refused.is_final) == (0, 2, False)
    assert (accepted.client, accepted.ticket, accepted.receipt, accepted.latency) == ("ward-7", ticket.id, receipt, 4.0)
    assert (accepted.version, accepted.in_flight, accepted.memory) == (1, 1, s.memory)
    assert 0 < accepted.seconds < PATIENCE
    assert accepted.row == s.history[0]
    assert json.loads(json.dumps(dict(accepted.row)))["client"] == "ward-7"
    with pytest.raises(TypeError):
        accepted.row["client"] = "changed"
    # What was answered already, or never heard of.
    told.clear()
    assert s.receive(ticket, payload()) is receipt
    assert told == []
    assert not s.receive("of my own making", payload()).accepted
    (unknown,) = told
    assert (unknown.client, unknown.ticket, unknown.field, unknown.is_final) == (None, None, "ticket", False)
    assert math.isnan(unknown.latency)
    s.receive(s.dispatch("a"), payload())
    told.clear()
    assert not s.receive(old, payload()).accepted
    (stale,) = told
    assert (stale.client, stale.field, stale.latency, stale.is_final, stale.in_flight) == (
        "old",
        "staleness",
        4.0,
        True,
        0,
    )
    late, spare = s.dispatch("late"), s.dispatch("spare")
    told.clear()
    s.drop(spare)
    clock.now += 11.0
    s.expire()
    assert told == [Dropped(2, 1, "spare", spare.id), Expired(2, 0, "late", late.id, 11.0)]
    told.clear()
    s.save(tmp_path / "now")
    s.receive(s.dispatch("b"), payload())
    s.close()
    s.close()
    written = [event for event in told if isinstance(event, CheckpointWritten)]
    assert [(event.path, event.model_version) for event in written] == [
        (str(tmp_path / name), v) for name, v in (("now", 2), ("often", 3))
    ]
    assert all(0 < event.seconds < PATIENCE for event in written)
    assert [event for event in told if isinstance(event, Closed)] == [Closed(3, 0)]


@pytest.mark.usefixtures("as_shipped")
def test_invalid_ticket_publishes_rejection_without_ticket():
    s, _, told = heard()
    for odd in (["no", "name"], type("Str", (str,), {"__hash__": None})("odd"), 7):
        assert not s.receive(odd, payload()).accepted
    assert [(event.client, event.ticket, event.field) for event in told] == [(None, None, "ticket")] * 3


def test_failed_checkpoint_publishes_an_event(tmp_path, monkeypatch):
    s, _, told = heard(rule=Adds(), checkpoint=CheckpointPolicy(tmp_path / "often", every_updates=1))

    def full(*_, **__):
        raise CheckpointError("disk full")

    monkeypatch.setattr(tensor_file, "save", full)
    with pytest.raises(CheckpointError, match="disk full"):
        s.save(tmp_path / "now")
    assert told == [CheckpointFailed(0, 0, str(tmp_path / "now"), "disk full")]
    s.receive(s.dispatch("a"), payload())
    with pytest.raises(CheckpointError, match="disk full"):
        s.close()
    assert CheckpointFailed(1, 0, str(tmp_path / "often"), "disk full") in told


def test_buffered_updates_publish_events():
    s, _, told = heard(Gathers(2))
    for name in "ab":
        s.receive(s.dispatch(name).id, payload())
    taken = [event for event in told if isinstance(event, Accepted)]
    assert [(event.receipt.buffered, event.version) for event in taken] == [(True, 0), (False, 1)]


def test_unsubscribed_callback_receives_no_further_events():
    s, _, told = heard()
    again = []
    stop = s.on_event(again.append)
    s.drop(s.dispatch("a"))
    stop()
    stop()
    s.drop(s.dispatch("a"))
    assert told[:2] == again
    assert len(told) == 4


def test_callback_unsubscribed_by_another_callback_misses_the_current_event():
    s, _, told = heard()
    ended = []
    s.on_event(lambda event: stop())
    stop = s.on_event(ended.append)
    s.on_event(told.append)
    s.dispatch("a")
    assert ended == []
    assert len(told) == 2


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_interrupt_in_callback_delivers_event_once_to_other_callbacks(kind):
    s, _, told = heard()
    tried, later = [], []

    def leaves(event):
        tried.append(event)
        raise kind

    stop = s.on_event(leaves)
    s.on_event(later.append)
    for _ in range(3):
        with pytest.raises(kind):
            s.dispatch("a")
    assert len(s.tickets) == 3
    assert [event.in_flight for event in told] == [1]
    assert [event.in_flight for event in tried] == [1, 1, 1]
    assert later == []
    stop()
    assert [event.in_flight for event in told] == [event.in_flight for event in later] == [1, 2, 3]
    assert not s._state.value.pending_events


def test_each_subscription_of_same_callback_ends_separately():
    s, _, told = heard()
    stop = s.on_event(told.append)
    s.dispatch("a")
    stop()
    s.dispatch("a")
    assert [event.in_flight for event in told] == [1, 1, 2]


def test_events_without_subscribers_are_not_stored():
    s = Server(Flat(P), Adds(), torch.zeros(P))
    s.dispatch("a")
    assert s._state.value.pending_events.next_index == 0
    told = []

    def once(event):
        told.append(event)
        s.dispatch("b")
        stop()

    stop = s.on_event(once)
    s.dispatch("a")
    assert [event.client for event in told] == ["a"]
    assert not s._state.value.pending_events
    s.dispatch("a")
    assert s._state.value.pending_events.next_index == 2


def test_new_subscriber_receives_only_later_events():
    s, _, told = heard()
    later = []

    def comes(event):
        if event.in_flight == 1:
            s.dispatch("b")
            s.on_event(later.append)

    s.on_event(comes)
    s.dispatch("a")
    s.dispatch("c")
    assert [event.client for event in told] == ["a", "b", "c"]
    assert [event.client for event in later] == ["c"]


@pytest.mark.usefixtures("as_shipped")
def test_exception_in_callback_is_logged_and_update_is_kept(caplog):
    def fails(event):
        raise RuntimeError("full disk")

    s = Server(Flat(P), Adds(), torch.zeros(P))
    s.on_event(fails)
    told = []
    s.on_event(told.append)
    with caplog.at_level(logging.CRITICAL, "manifoldagg"):
        ticket = s.dispatch("a")
    before = fingerprint(s)
    assert not s.receive(ticket, payload(math.nan)).accepted
    assert fingerprint(s) == before
    assert s.receive(ticket, payload()).accepted
    assert [type(event) for event in told] == [Dispatched, Rejected, Accepted]
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.exc_info[1].args for record in errors] == [("full disk",)] * 2
    assert "fails" in errors[0].getMessage()


def test_callback_sees_the_state_of_its_event_and_may_call_the_server(tmp_path):
    s, _, told = heard()
    lines = []

    def acts(event):
        lines.append(f"{type(event).__name__} {event.version} {s.version}")
        if isinstance(event, Accepted):
            assert s.history[-1] == event.row
            s.save(tmp_path / "saved")
            assert s.averaged().tolist() == s.model.tolist()
            if event.version < 3:
                s.receive(s.dispatch("b"), payload(event.version + 1.0))
            lines.append("heard")

    s.on_event(acts)
    ticket = s.dispatch("a")
    s.receive(ticket, payload())
    assert s.version == 3
    # What it brings about comes next, not in the middle of what it hears.
    assert lines == [
        "Dispatched 0 0",
        "Accepted 1 1",
        "heard",
        *("CheckpointWritten 1 2", "Dispatched 1 2", "Accepted 2 2", "heard"),
        *("CheckpointWritten 2 3", "Dispatched 2 3", "Accepted 3 3", "heard"),
        "CheckpointWritten 3 3",
    ]
    assert [type(event).__name__ + f" {event.version}" for event in told] == [
        " ".join(line.split()[:2]) for line in lines if line != "heard"
    ]


def test_exception_in_averaging_does_not_suppress_events():
    class Fails:
        average = None

        def update(self, version, model):
            raise RuntimeError("full disk")

        def state(self):
            return {}

        def load(self, state):
            pass

    s, _, told = heard(averaging=Fails())
    with pytest.raises(RuntimeError, match="full disk"):
        s.receive(s.dispatch("a"), payload())
    assert [type(event) for event in told] == [Dispatched, Accepted]


def test_events_caused_by_a_rule_are_published_in_order():
    class Sends(Adds):
        def step(self, *given, **named):
            s.dispatch("b")
            assert len(told) == 1
            return super().step(*given, **named)

    s, _, told = heard(Sends())
    s.receive(s.dispatch("a"), payload())
    assert [(type(event).__name__, event.client, event.in_flight) for event in told] == [
        ("Dispatched", "a", 1),
        ("Dispatched", "b", 2),
        ("Accepted", "a", 1),
    ]


def test_expired_tickets_publish_events_during_an_update():
    s, clock, told = heard(timeout=1.0, max_in_flight=1, weights={"a": 1})
    s.dispatch("a")
    clock.now = 2.0
    with pytest.raises(ArgumentError, match="client"):
        s.dispatch("b")
    assert [type(event) for event in told] == [Dispatched, Expired]
    s.dispatch("a")
    with pytest.raises(BusyError):
        s.dispatch("a")
    assert len(told) == 3


def test_resumed_server_has_no_subscribers(tmp_path):
    s, clock, told = heard()
    ticket = s.dispatch("a")
    s.save(tmp_path / "server")
    told.clear()
    other = Server.resume(tmp_path / "server", Flat(P), Adds(), clock=clock)
    rows = []
    other.on_event(rows.append)
    clock.now += 5.0
    other.receive(ticket, payload())
    assert told == []
    assert [(event.client, event.latency) for event in rows] == [("a", 5.0)]


class Slow:
    """Callback that blocks in its first event until the test releases it."""

    def __init__(self):
        self.inside, self.go, self.told, self.now = threading.Event(), threading.Event(), [], 0

    def __call__(self, event):
        self.now += 1
        assert self.now == 1
        self.inside.set()
        assert self.go.wait(PATIENCE)
        self.told.append(event)
        self.now -= 1


def test_slow_callback_blocks_only_the_publishing_thread():
    s = Server(Flat(P), Adds(), torch.zeros(P))
    slow = Slow()
    s.on_event(slow)
    teller = threading.Thread(target=lambda: s.dispatch("first"), daemon=True)
    teller.start()
    assert slow.inside.wait(PATIENCE)

    def others(_):
        assert s.receive(s.dispatch("second"), payload()).accepted

    together(1, others)
    assert slow.told == []
    slow.go.set()
    teller.join(PATIENCE)
    assert [type(event) for event in slow.told] == [Dispatched, Dispatched, Accepted]
    assert not s._state.value.pending_events


def test_callback_does_not_block_the_next_update():
    """A slow callback blocks the publishing thread, but not the update lock."""
    s, _, _, finish = paused()
    told = []
    s.on_event(told.append)
    together(1, lambda _: s.drop(s.dispatch("b")))
    assert [type(event) for event in told] == [Dispatched, Dropped]
    assert finish().accepted
    (_, _, taken) = told
    # Nobody asked when it began.
    assert math.isnan(taken.latency)
    assert math.isnan(taken.seconds)


def replayed(told):
    """Return the version and the tickets in flight that follow from the events.

    Check that each event is consistent with the earlier ones.
    """
    version, out, refused = 0, {}, {}
    for event in told:
        match event:
            case Dispatched():
                assert event.start_version <= version
                out[event.ticket] = event.client
            case Accepted():
                version += not event.receipt.buffered
                assert out.pop(event.ticket) == event.client == event.row["client"]
            case Rejected():
                refused[event.field] = refused.get(event.field, 0) + 1
                if event.is_final:
                    del out[event.ticket]
            case Dropped() | Expired():
                assert out.pop(event.ticket) == event.client
        assert (event.version, event.in_flight) == (version, len(out))
    return version, out, refused


@pytest.mark.usefixtures("as_shipped", "eager")
def test_events_of_8_threads_are_complete_and_ordered():
    s = Server(
        Flat(P),
        Adds(),
        torch.zeros(P),
        weights="uniform",
        limits=ServerLimits(UpdateLimits(max_norm=1e6, max_staleness=5)),
    )
    told, inside = [], []

    def hears(event):
        inside.append(None)
        assert len(inside) == 1
        told.append(event)
        inside.pop()

    s.on_event(hears)

    def work(name):
        dice = random.Random(name)
        for _ in range(200):
            ticket = s.dispatch((name, dice.randrange(3)))
            if dice.random() < 0.2:
                s.drop(ticket)
            elif dice.random() < 0.2:
                s.receive(ticket, payload(math.inf))
            else:
                s.receive(ticket, Payload(ticket.message.start[None] + 1, 1))

    together(8, work)
    version, out, refused = replayed(told)
    assert version == s.version > 500
    assert set(out) == set(s._state.value.tickets)
    assert refused == s.rejected
    assert [event.row for event in told if isinstance(event, Accepted)] == s.history


def everything(made):
    """Return a scene that records every event."""
    events = []
    made.server.on_event(events.append)
    made.events = events
    return made


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("act", ["receive", "dispatch", "drop"])
def test_next_call_publishes_events_of_interrupted_call_in_order(act):
    def do(made):
        if act == "receive":
            made.receive()
        elif act == "dispatch":
            made.server.dispatch("c")
        else:
            made.server.drop(made.ticket)

    def check(made):
        made.server.drop(made.server.dispatch("next"))
        told = list({id(event): event for event in made.events}.values())
        out = len(made.server._state.value.tickets)
        # Twice over at most where it was interrupted, and nothing left out.
        kinds = [type(event) for event in told]
        assert kinds[-2:] == [Dispatched, Dropped]
        assert told[-1].in_flight == out
        happened = kinds[:-2]
        assert happened in ([], [{"receive": Accepted, "dispatch": Dispatched, "drop": Dropped}[act]])
        # Everything that was entered was told.
        assert bool(happened) == ((out, made.server.version) != (2, 2))
        assert not made.server._state.value.pending_events
        quiet(made)

    with watched(PATIENCE):
        assert everywhere(lambda: everything(scene()), do, check) > 20


@pytest.mark.usefixtures("as_shipped")
def test_event_of_dispatch_in_signal_handler_is_published_next():
    def make():
        made = scene()
        made.inside, made.lines = [], []

        def hears(event):
            assert not made.inside
            made.inside.append(event)
            made.lines.append(type(event).__name__)
            made.inside.clear()

        made.server.on_event(hears)
        return made

    def handler(made):
        return lambda *_: made.server.drop(made.server.dispatch("third"))

    def check(made):
        assert sorted(made.lines) == ["Accepted", "Dispatched", "Dropped"]
        assert made.lines.index("Dispatched") < made.lines.index("Dropped")
        quiet(made)

    with watched(PATIENCE):
        everywhere(make, Scene.receive, check, handler)


def test_server_with_subscribers_is_freed_with_its_last_reference():
    """No part of the server waits for the garbage collector."""
    s, _, _ = heard()
    s.receive(s.dispatch("a"), payload())
    gone = []
    s.rule = type("Mortal", (), {"__del__": lambda self: gone.append(True)})()
    gc.disable()
    try:
        del s
        assert gone == [True]
    finally:
        gc.enable()


def test_subscribers_do_not_change_the_results():
    plain, seen = scene(), everything(scene())
    for made in (plain, seen):
        made.receive()
        made.server.receive(made.server.dispatch("c"), payload(math.nan))
        made.server.drop(made.server.dispatch("d"))
    assert outside(plain.server) == outside(seen.server)
