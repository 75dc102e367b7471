"""Tests of the journal: acknowledged updates survive any crash bitwise, and altered files are reported."""

import errno
import itertools
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from manifoldagg import _io, tensor_file
from manifoldagg.averaging import SWA
from manifoldagg.errors import ArgumentError, CheckpointError
from manifoldagg.federated import (
    CheckpointPolicy,
    Durability,
    InitialModel,
    Journal,
    Payload,
    Server,
    ServerLimits,
    UpdateLimits,
)
from manifoldagg.federated import limits as limits_module
from manifoldagg.federated.rules import AsyncBezier, FedAsync, FedBuff, Momentum
from manifoldagg.federated.server.durability import journal, log_format, recovery
from manifoldagg.manifolds import Flat, ParameterSpace
from tests.federated.faults import Disk, Killed, each
from tests.federated.fingerprint import Adds, Gathers
from tests.federated.rules.registered import golden
from tests.federated.server.durability.scripted_run import SIZE, Life, Wall, carrying, content, payload
from tests.server_options import grouped
from tests.support import draw

SPACE = Flat(SIZE)
RULES = golden()
FILE, LINES = "server", "lines"


def fresh(rule=None, **options):
    return Server(SPACE, rule or Adds(), draw(0, SIZE, dtype=torch.float32), **grouped(**options))


def state(server):
    """Return the whole state of a server, with the ids of its tickets."""
    now = server._state.value
    return content(server) | {"ids": [[*now.tickets], [*now.closed_tickets]]}


def known(states):
    """Return states without the number of rejections, which is only written with the next change."""
    return [{name: what for name, what in one.items() if name != "rejected"} for one in states]


def crash(server):
    """Release the files and locks of a server, as the operating system does for a killed process."""
    close = server._durability.journal._close_segment
    if close.detach():
        with suppress(OSError):
            os.close(server._durability.journal._position.descriptor)
    if released := server._durability.journal._journal_lock._close.detach():
        os.close(*released[2])


def back(folder, server, **options):
    """Return the server that a later process resumes from the files."""
    options = {"journal": folder / LINES, **options}
    return Server.resume(folder / FILE, server.space, server.rule, **grouped(**options))


@pytest.mark.parametrize("name", RULES)
def test_journal_restores_every_rule_bitwise(tmp_path, name, as_shipped):
    life = Life(fresh(RULES[name], averaging=SWA(SPACE, start=2), journal=tmp_path / LINES))
    twin = Life(fresh(RULES[name], averaging=SWA(SPACE, start=2)))
    for events, fsync in [(7, "batch"), (5, "always")]:
        assert life.go(events) == twin.go(events)
        before = state(life.server)
        crash(life.server)
        averaging = SWA(SPACE, start=2)
        life.server = back(
            tmp_path, life.server, averaging=averaging, journal=Journal(tmp_path / LINES, fsync, fsync_every=3)
        )
        assert known([state(life.server), content(life.server)]) == known([before, content(twin.server)])
    assert life.go(4) == twin.go(4)
    assert known([content(life.server)]) == known([content(twin.server)])


STEPS = st.lists(st.sampled_from(["go", "go", "go", "save", "crash", "elsewhere"]), min_size=2, max_size=9)
SOME = {
    "FedBuff": (FedBuff(3), {}),
    "narrow": (AsyncBezier(0.5), {"base_dtype": torch.bfloat16, "memory_limit": 60}),
    "Momentum": (
        Momentum(FedAsync(0.5)),
        {"update_limits": UpdateLimits(clip_factor=1.2, samples_factor=3.0), "max_staleness": 2},
    ),
    "bounded": (Gathers(2, patient=False), {"history_size": 3, "receipt_cache_size": 2, "weights": "uniform"}),
}


@pytest.mark.parametrize("name", SOME)
@settings(max_examples=max(settings().max_examples // 3, 8))
@given(steps=STEPS)
def test_run_with_crashes_and_checkpoints_equals_uninterrupted_run(tmp_path_factory, name, steps):
    folder = tmp_path_factory.mktemp("life")
    rule, options = SOME[name]
    life = Life(fresh(rule, journal=folder / LINES, **options))
    twin = Life(fresh(rule, **options))
    for step in [*steps, "crash", "go"]:
        if step == "go":
            assert life.go(5) == twin.go(5)
        elif step == "save":
            life.server.save(folder / FILE)
            assert len(life.server._durability.journal.journal.segments()) == 1
        else:
            before = state(life.server)
            crash(life.server)
            if step == "elsewhere":  # without the checkpoint, where a resume has begun the journal anew
                (folder / FILE).unlink(missing_ok=bool(journal.Journal(folder / LINES).segments()))
                with suppress(CheckpointError):
                    life.server = back(folder, life.server)
                    assert state(life.server) == before
                    continue
                return
            life.server = back(folder, life.server)
            assert state(life.server) == before
    assert content(life.server) == content(twin.server)


def test_journal_restores_buffers(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    space = ParameterSpace.of(net)
    policies = {"*running_mean": "average", "*running_var": "latest", "*tracked": "leave"}

    life = Life(Server.of(net, FedBuff(3), buffer_policy=policies, durability=Durability(journal=tmp_path / LINES)))
    life.go(9, carrying)
    before = state(life.server)
    crash(life.server)
    other = back(tmp_path, life.server)
    assert state(other) == before
    assert other.space == space
    assert all(torch.equal(x, life.server.state_dict()[name]) for name, x in other.state_dict().items())


def answer(seed, base=None):
    return Payload(draw(seed, 1, SIZE, dtype=torch.float32), 1 + seed % 5, base=base)


SAVES = 5
"""The step of a script that saves."""


class Script:
    """A fixed sequence of steps of a server. `told` contains the result of each step, by the number of completed steps."""

    def __init__(self, server, folder):
        self.server = server
        self.folder = folder
        self.over = 0
        self.out = []

    def steps(self):
        yield lambda: self.out.append(self.server.dispatch("a"))
        yield lambda: self.out.append(self.server.dispatch("b", retain_base=False))
        yield lambda: self.server.receive(self.out[0], answer(1)).check()
        yield lambda: self.server.receive(self.out[1], Payload(torch.full((1, SIZE), torch.nan), 1))
        yield lambda: self.server.receive(self.out[1], answer(2, self.out[1].message.start)).check()
        yield lambda: self.server.save(self.folder / FILE)
        yield lambda: self.out.append(self.server.dispatch("a"))
        yield lambda: self.server.receive(self.out[2], answer(3)).check()
        yield lambda: self.out.append(self.server.dispatch("c"))
        yield lambda: self.server.drop(self.out[3])

    def run(self):
        for step in itertools.islice(self.steps(), self.over, None):
            step()
            self.over += 1


def seen():
    """Return the state after each step of a script."""
    script = Script(fresh(FedBuff(2)), None)
    states = [content(script.server)]
    for i, step in enumerate(script.steps()):
        if i != SAVES:
            step()
        states.append(content(script.server))
    return states


@contextmanager
def disked(monkeypatch, disk):
    with monkeypatch.context() as patch:
        for module in (journal, log_format, _io, recovery, tensor_file):
            patch.setattr(module, "os", disk)
        yield


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Disable `os.fsync`, because the machine does not stop in these tests."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


def test_fault_at_any_call_loses_no_acknowledged_update(tmp_path, monkeypatch, as_shipped):
    states = known(seen())
    scripts = []

    def run(disk):
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        script = Script(fresh(FedBuff(2), journal=tmp_path / LINES), tmp_path)
        scripts[:] = [script]
        with disked(monkeypatch, disk):
            try:
                script.run()
            except Killed:
                # The disk has closed its own files; the first was opened before.
                crash(script.server)
                disk._open.discard(script.server._durability.journal._position.descriptor)
                raise

    met = set()
    for disk, call, error in each(run, faults=(errno.ENOSPC, "short", "killed", "torn")):
        (script,) = scripts
        met.add((call, disk.fault))
        if disk.dead:
            (now,) = known([content(back(tmp_path, script.server))])
            assert now in states[script.over : script.over + 2], (disk.at, call)
            continue
        if error is not None:
            assert isinstance(error, CheckpointError)
            assert "could not be written" in str(error) or "cannot be opened" in str(error)
            if script.over + 1 < len(states) and not script.out[: script.over]:
                script.out.append(script.server.dispatch("a"))
        server = script.server
        left = server.dispatch("d")
        server.receive(left, answer(9)).check()
        before = state(server)
        crash(server)
        assert state(back(tmp_path, server)) == before, (disk.at, call)
    assert {("write", "torn"), ("write", errno.ENOSPC), ("fsync", "killed"), ("replace", "killed")} <= met
    assert ("unlink", "killed") in met


@pytest.mark.parametrize("saved", [True, False])
def test_fault_at_any_call_of_resume_loses_nothing(tmp_path, monkeypatch, saved, as_shipped):
    left, folder = tmp_path / "left", tmp_path / "resumed"
    left.mkdir()
    script = Script(fresh(FedBuff(2), journal=left / LINES), left)
    for i, step in enumerate(script.steps()):
        if saved or i != SAVES:
            step()
    crash(script.server)
    before = content(script.server)

    def run(disk):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(left, folder)
        # What is open stays so until the process is buried.
        with disked(monkeypatch, disk), monkeypatch.context() as patch:
            patch.setattr(_io, "_close", lambda file: None)
            try:
                back(folder, script.server)
            finally:
                disk.bury()
                disk._open.clear()

    met = set()
    for disk, call, error in each(run, faults=(errno.ENOSPC, "short", "killed", "torn")):
        met.add((call, disk.fault))
        assert error is None or isinstance(error, CheckpointError), (disk.at, call)
        server = back(folder, script.server)
        assert known([content(server)]) == known([before]), (disk.at, call)
        crash(server)
    assert {("write", "torn"), ("fsync", "killed"), ("replace", "killed"), ("unlink", "killed")} <= met


def worked(server, steps):
    """Run steps of all kinds, one after another."""
    for i in range(steps):
        if i % 2:
            server.receive(server.tickets[0], answer(i)).check()
        else:
            server.dispatch(i)
        yield


def ended(folder, steps=6):
    """Return the journal file after several steps, the state after each step, and the end positions of the records."""
    server = fresh(journal=folder / LINES)
    (path,) = folder.glob("*.journal")
    states, ends = [state(server)], [path.stat().st_size]
    for _ in worked(server, steps):
        states.append(state(server))
        ends.append(path.stat().st_size)
    crash(server)
    return path, states, ends


def test_torn_tail_of_any_length_is_truncated(tmp_path, caplog, as_shipped):
    path, states, ends = ended(tmp_path)
    whole = path.read_bytes()
    for length in [*range(ends[-3], ends[-3] + 60, 3), *range(ends[-3], ends[-1], 41), *ends[-3:], ends[-1] - 1]:
        other = tmp_path / str(length)
        other.mkdir(exist_ok=True)
        for name in other.iterdir():
            name.unlink()
        (other / path.name).write_bytes(whole[:length])
        over = max(i for i, end in enumerate(ends) if end <= length)
        server = back(other, fresh())
        assert state(server) == states[over], length
        # And once more: what was cut does not come back.
        crash(server)
        assert state(back(other, server)) == states[over]
    assert "whose write was incomplete" in caplog.text or "are not a record" in caplog.text


@pytest.mark.parametrize("mask", [0x01, 0xFF])
def test_flipped_bit_is_truncated_at_the_end_and_reported_elsewhere(tmp_path, mask, as_shipped):
    path, states, ends = ended(tmp_path)
    whole = path.read_bytes()
    for i in [
        *range(ends[-3], ends[-3] + 60, 5),
        *range(ends[-3], ends[-1], 67),
        ends[-1] - 1,
        *range(0, ends[-3], 509),
    ]:
        other = tmp_path / str(i)
        other.mkdir(exist_ok=True)
        altered = bytearray(whole)
        altered[i] ^= mask
        (other / path.name).write_bytes(altered)
        if i >= ends[-2]:
            assert state(back(other, fresh())) == states[-2]
            continue
        number = sum(end <= i for end in ends) - 1
        told = rf"lines\.0\.journal: (record {number} is corrupted|record {number} was not written)"
        with pytest.raises(CheckpointError, match=told if i >= ends[0] else r"lines\.0\.journal"):
            back(other, fresh())
        assert sorted(name.name for name in other.iterdir()) == [path.name, f"{LINES}.lock"]
        assert (other / path.name).read_bytes() == altered


@pytest.mark.parametrize("junk", ["cut", "zeros", "noise in the first", "noise in the last"])
def test_batched_sync_loses_at_most_the_documented_updates(tmp_path, monkeypatch, junk):
    every = 4
    server = fresh(journal=Journal(tmp_path / LINES, "batch", fsync_every=every))
    (path,) = tmp_path.glob("*.journal")
    synced, states = [path.stat().st_size], [state(server)]
    sizes = [path.stat().st_size]
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(path.stat().st_size))
    for _ in worked(server, 10):
        states.append(state(server))
        sizes.append(path.stat().st_size)
    assert len(synced) == 1 + 10 // every
    crash(server)
    whole = path.read_bytes()
    kept = synced[-1]
    # Where the process alone ends, nothing is lost.
    (tmp_path / "copy").mkdir()
    shutil.copy(path, tmp_path / "copy")
    assert state(back(tmp_path / "copy", server)) == states[-1]
    left = bytearray(whole if junk.startswith("noise") else whole[:kept])
    if junk == "zeros":
        left += bytes(len(whole) - kept)
    elif junk == "noise in the first":
        left[kept + 50] ^= 1
    elif junk == "noise in the last":
        left[-20] ^= 1
    path.write_bytes(left)
    found = states.index(state(back(tmp_path, server)))
    assert found == (len(states) - 2 if junk == "noise in the last" else sizes.index(kept))
    assert len(states) - 1 - found < every


def test_journal_order_of_threads_is_the_order_of_application(tmp_path):
    server = fresh(
        AsyncBezier(0.5), journal=tmp_path / LINES, checkpoint=CheckpointPolicy(tmp_path / FILE, every_updates=7)
    )

    def work(name):
        for i in range(12):
            ticket = server.dispatch(name)
            if i % 5 == 4:
                server.drop(ticket)
            else:
                server.receive(ticket, payload(server.rule, ticket, 100 * name + i)).check()

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server._durability.checkpoints.finish()
    before = state(server)
    crash(server)
    other = back(tmp_path, server)
    assert state(other) == before
    assert [row["version"] for row in other.history] == [*range(1, other.version + 1)]


MEANWHILE = []


class Overtaken(FedAsync):
    """Rule that runs a function of the list `MEANWHILE` while a message is created. The function moves the model."""

    def message(self, *given):
        if MEANWHILE:
            MEANWHILE.pop()()
        return super().message(*given)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("held", [False, True])
def test_ticket_dispatched_during_update_is_restored_after_crash(tmp_path, dtype, held):
    server = fresh(Overtaken(0.5), journal=tmp_path / LINES, base_dtype=dtype)
    first = server.dispatch("a")
    if held:
        server.dispatch("c")
    MEANWHILE.append(lambda: server.receive(first, answer(1)).check())
    late = server.dispatch("b")
    # A version that nobody has any more may be in no checkpoint: who leaves then has the next one.
    assert (late.version, server.version) == (0 if held else 1, 1)
    before = state(server)
    crash(server)
    other = back(tmp_path, server)
    assert state(other) == before
    assert repr(other.receive(late, answer(2))) == repr(fresh_twin(server, late))


def fresh_twin(server, ticket):
    """Return the receipt that the server itself returns without its journal."""
    server._durability.journal = None
    return server.receive(ticket, answer(2))


def test_replayed_tickets_keep_their_age_and_expired_tickets_stay_expired(tmp_path):
    wall = Wall(100.0)
    server = fresh(timeout=10.0, clock=wall, journal=tmp_path / LINES)
    old = server.dispatch("a")
    wall.now = 106.0
    young = server.dispatch("b")
    wall.now = 111.0
    assert server.expire() == [old.id]
    crash(server)
    later = Wall(6000.0)
    other = back(tmp_path, server, clock=later)
    assert other.receive(old, answer(1)).reason.startswith("ticket: expired")
    later.now += 4.9
    assert other.expire() == []
    later.now += 0.2
    assert other.expire() == [young.id]


def test_retry_after_crash_returns_same_receipt_without_second_step(tmp_path):
    server = fresh(max_staleness=0, journal=tmp_path / LINES)
    tickets = [server.dispatch("a"), server.dispatch("b")]
    told = [server.receive(ticket, answer(1)) for ticket in tickets]
    assert [receipt.accepted for receipt in told] == [True, False]
    crash(server)
    other = back(tmp_path, server)
    assert repr([other.receive(ticket, answer(2)) for ticket in tickets]) == repr(told)
    assert other.version == 1


def test_receipt_on_full_disk_is_returned_after_space_is_free(tmp_path, monkeypatch, caplog):
    server = fresh(journal=tmp_path / LINES)
    one, two = server.dispatch("a"), server.dispatch("b")
    mine = answer(1)
    as_sent = mine.points.clone()

    def full(file, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(journal.os, "write", full)
        with pytest.raises(CheckpointError, match="^journal: .*lines: could not be written: No space left on device"):
            server.receive(one, mine)
        assert server.version == 1
        with pytest.raises(CheckpointError, match="No space left"):
            server.receive(one, mine)
        before = content(server)
        with pytest.raises(CheckpointError, match="No space left"):
            server.receive(two, answer(2))
        assert content(server) == before
        with pytest.raises(CheckpointError, match="No space left"):
            server.dispatch("c")
        assert len(server.tickets) == 1
    # What came belongs to its sender again.
    mine.points.zero_()
    assert server.receive(one, mine).accepted
    assert server.receive(two, answer(2)).accepted
    before = state(server)
    crash(server)
    assert state(back(tmp_path, server)) == before
    assert torch.equal(server._state.value.store.load(("client", "a"))["last"], as_sent[0])
    assert "No space left" in caplog.text


def test_batch_that_may_be_lost_blocks_server_until_next_checkpoint(tmp_path, monkeypatch):
    server = fresh(journal=Journal(tmp_path / LINES, "batch", fsync_every=2))

    def broken(file):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    first = server.dispatch("a")
    with monkeypatch.context() as patch:
        patch.setattr(journal.os, "fsync", broken)
        with pytest.raises(CheckpointError, match="Input/output error"):
            server.receive(first, answer(1))
    with pytest.raises(CheckpointError, match="earlier records may be lost; write a checkpoint to start a new segment"):
        server.dispatch("b")
    server.save(tmp_path / FILE)
    assert server.receive(first, answer(1)).accepted
    server.receive(server.dispatch("b"), answer(2)).check()
    before = state(server)
    crash(server)
    assert state(back(tmp_path, server)) == before


def test_signal_handler_during_journal_write_gets_error_or_defers_its_record(tmp_path, monkeypatch):
    server = fresh(journal=tmp_path / LINES)
    ticket, other = server.dispatch("a"), server.dispatch("b")
    said = []

    def handler(file):
        if not said:
            said.append(server.dispatch("c").id)
            server.drop(other)
            with pytest.raises(ArgumentError, match="expected a call outside of a journal write"):
                server.receive(ticket, answer(1))

    monkeypatch.setattr(journal.os, "fsync", handler)
    server.receive(ticket, answer(1)).check()
    assert server.tickets == said
    server.dispatch("d")
    before = state(server)
    crash(server)
    assert state(back(tmp_path, server)) == before


def test_signal_handler_during_journal_write_does_not_deadlock(tmp_path, monkeypatch):
    server = fresh(journal=tmp_path / LINES)
    told = []

    def handler(file):
        for waits in (lambda: server.save(tmp_path / FILE), server.snapshot, server.averaged, server.close):
            with pytest.raises(ArgumentError, match="expected a call outside of a journal write") as error:
                waits()
            told.append(error)

    with monkeypatch.context() as patch:
        patch.setattr(journal.os, "fsync", handler)
        server.dispatch("a")
    assert len(told) == 4
    server.receive(server.tickets[0], answer(1)).check()


def test_interrupt_during_journal_write_keeps_the_receipt(tmp_path, monkeypatch):
    for at, name in enumerate(("lseek", "write", "write", "fsync")):
        folder = tmp_path / str(at)
        folder.mkdir()
        server = fresh(journal=folder / LINES)
        ticket = server.dispatch("a")

        class Interrupted(Disk):
            def _call(self, called, call, given, name=name):
                result = call(*given)
                if called == name:
                    raise KeyboardInterrupt
                return result

        with disked(monkeypatch, Interrupted()), pytest.raises(KeyboardInterrupt):
            server.receive(ticket, answer(1))
        assert server.receive(ticket, answer(1)).version == 1
        before = state(server)
        crash(server)
        assert state(back(folder, server)) == before


def test_options_given_at_resume_apply_only_after_the_resume(tmp_path):
    life = Life(fresh(Gathers(2, patient=False), journal=tmp_path / LINES))
    life.go(12)
    crash(life.server)
    before = content(life.server)
    options = {"update_limits": UpdateLimits(max_norm=1e-9), "history_size": 1, "weights": "uniform"}
    other = back(tmp_path, life.server, **options)
    assert torch.equal(other.model, life.server.model)
    assert other.history == life.server.history[-1:]
    assert not other.receive(life.out[0], payload(other.rule, life.out[0], 1)).accepted
    other.dispatch("a")
    now = state(other)
    crash(other)
    assert state(back(tmp_path, other)) == now
    assert before["updates"] == now["updates"]


@pytest.mark.parametrize(
    "limits",
    [
        UpdateLimits(max_norm=5.0),
        UpdateLimits(norm_factor=1.0, norm_after=1),
        UpdateLimits(min_cosine=1.0),
        UpdateLimits(min_cosine=1.0, max_norm=5.0, norm_factor=1.0, norm_after=1),
    ],
    ids=["norm", "median", "cosine", "all"],
)
def test_an_accepted_update_at_a_limit_is_accepted_again_on_another_processor(tmp_path, monkeypatch, limits):
    server = Server(
        SPACE,
        FedAsync(0.5),
        torch.zeros(SIZE),
        limits=limits,
        durability=Durability(journal=tmp_path / LINES),
    )
    move = torch.zeros(1, SIZE)
    move[0, :2] = torch.tensor([3.0, 4.0])
    for ticket in [server.dispatch("a") for _ in range(3)]:
        server.receive(ticket, Payload(move, 1)).check()
    before = state(server)
    crash(server)
    with monkeypatch.context() as patch:
        measured, calls = limits_module._norm_and_cosine, itertools.count(1)

        def rounded(*given):
            norm, cosine = measured(*given)
            return norm * (1 + 1e-15 * next(calls)), cosine - 1e-15

        patch.setattr(limits_module, "_norm_and_cosine", rounded)
        resumed = back(tmp_path, server)
        after = state(resumed)
    assert torch.equal(resumed.model, server.model)
    for now in (before, after):
        del now["model_state"]  # The norms in it are those of the other processor.
    assert after == before
    assert resumed._durability._options == server._durability._options


def test_rejections_by_the_median_are_replayed(tmp_path):
    """A rejected norm changes the median, and therefore the clipping norm of later updates."""
    limits = UpdateLimits(norm_factor=4.0, clip_factor=2.0, norm_after=2, norm_window=4)
    server = Server(
        SPACE,
        FedAsync(0.5),
        torch.zeros(SIZE),
        limits=ServerLimits(limits),
        durability=Durability(journal=tmp_path / LINES),
    )

    def send(server, client, length):
        ticket = server.dispatch(client)
        move = torch.full((1, SIZE), length / SIZE**0.5)
        return server.receive(ticket, Payload(ticket.message.start[None] + move, 1))

    for client in "abc":
        assert send(server, client, 1.0).accepted
    server.save(tmp_path / FILE)
    for client in "de":
        assert not send(server, client, 9.0).accepted
    # Twice the median of {1, 1, 4, 4}; without the rejected updates it would be twice 1.
    assert send(server, "h", 6.0).clipped
    assert server._state.value.model_state.norms[-1][1] == pytest.approx(5.0)
    before = state(server)
    crash(server)
    resumed = back(tmp_path, server)
    assert state(resumed) == before
    assert torch.equal(resumed.model, server.model)
    assert not send(resumed, "i", 1e3).accepted
    crash(resumed)
    assert state(back(tmp_path, resumed)) == state(resumed)


def test_resume_rejects_journal_that_does_not_match_checkpoint(tmp_path, monkeypatch):
    server = fresh(journal=tmp_path / LINES)
    server.dispatch("a")
    server.save(tmp_path / FILE)
    shutil.copy(tmp_path / FILE, tmp_path / "older")
    server.receive(server.tickets[0], answer(1)).check()
    with pytest.raises(CheckpointError, match=r"lines: is locked by another process"):
        back(tmp_path, server)
    crash(server)
    with pytest.raises(ArgumentError, match=r"^journal: .*lines: already exists; resume with `Server\.open`"):
        fresh(journal=tmp_path / LINES)
    with pytest.raises(CheckpointError, match=r"pass durability=Durability\(journal=\.\.\.\), or ignore_journal=True"):
        Server.resume(tmp_path / FILE, SPACE, Adds())
    assert Server.resume(tmp_path / FILE, SPACE, Adds(), ignore_journal=True).version == 0
    with pytest.raises(CheckpointError, match="mine: the journal does not exist, but .* requires it"):
        back(tmp_path, server, journal=tmp_path / "mine")
    with pytest.raises(CheckpointError, match="space: n: was 6, got 7|space: .*was 6, got 7"):
        Server.resume(tmp_path / FILE, Flat(7), Adds(), durability=Durability(journal=tmp_path / LINES))
    with pytest.raises(CheckpointError, match="rule: was .*Adds, got .*FedAsync"):
        Server.resume(
            tmp_path / FILE, SPACE, FedAsync(0.5), replace=True, durability=Durability(journal=tmp_path / LINES)
        )
    (tmp_path / FILE).rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match="does not exist, and the journal .*lines does not start with a snapshot"):
        back(tmp_path, server)
    fresh().save(tmp_path / FILE)
    with pytest.raises(CheckpointError, match="lines: belongs to another server than"):
        back(tmp_path, server)
    (tmp_path / "away").rename(tmp_path / FILE)
    other = back(tmp_path, server)
    assert other.version == 1
    other.save(tmp_path / FILE)
    crash(other)
    with pytest.raises(
        CheckpointError, match="starts with record 2, but the checkpoint ends before record 1; pass a newer checkpoint"
    ):
        Server.resume(tmp_path / "older", SPACE, Adds(), durability=Durability(journal=gone(tmp_path, other)))
    # With nothing beyond the checkpoint another rule may take over.
    new = Server.resume(
        tmp_path / FILE, SPACE, FedAsync(0.5), replace=True, durability=Durability(journal=tmp_path / LINES)
    )
    assert new.version == 1


def gone(folder, server):
    """Return a journal whose first file, with the next record, was replaced.

    Such a journal exists after a checkpoint with newer updates.
    """
    server = back(folder, server)
    server.dispatch("z")
    server.save(folder / FILE)
    crash(server)
    (folder / "other").mkdir()
    for path in folder.glob(f"{LINES}.*"):
        shutil.copy(path, folder / "other" / path.name.replace(".3.", ".2."))
    path = folder / "other" / f"{LINES}.2.journal"
    with pytest.raises(CheckpointError, match="starts with record 3: the file was renamed"):
        log_format.Segment.read(path, 2)
    header = log_format.Segment.read(path, 3).header
    tensor_file.save(path, log_format.KIND, {**header, "first_lsn": 2})
    return folder / "other" / LINES


def test_resume_adds_a_journal_to_a_server_without_one(tmp_path):
    life = Life(fresh())
    life.go(6)
    life.server.save(tmp_path / FILE)
    life.server = back(tmp_path, life.server)
    for _ in range(2):
        life.go(3)
        before = state(life.server)
        crash(life.server)
        life.server = back(tmp_path, life.server)
        assert state(life.server) == before


def test_closed_server_keeps_its_journal(tmp_path):
    server = fresh(journal=Journal(tmp_path / LINES, "batch"))
    server.receive(server.dispatch("a"), answer(1)).check()
    server.dispatch("b")
    before = state(server)
    server.close()
    server.close()
    assert state(back(tmp_path, server)) == before


@pytest.mark.parametrize("new", [False, True])
def test_only_one_of_two_processes_can_open_a_journal(tmp_path, new):
    server = fresh(FedAsync(0.5), **({} if new else {"journal": tmp_path / LINES}))
    server.receive(server.dispatch("a"), answer(1)).check()
    server.save(tmp_path / FILE)
    server.close()
    start = threading.Barrier(2)
    found, refused = [], []

    def work():
        start.wait()
        try:
            found.append(back(tmp_path, server))
        except CheckpointError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = found
    (told,) = refused
    assert told == f"{tmp_path / LINES}: is locked by another process, or by another server of this process"
    # Also after the files were begun anew, and of a new server.
    winner.receive(winner.dispatch("b"), answer(2)).check()
    winner.save(tmp_path / FILE)
    for make in (lambda: back(tmp_path, server), lambda: fresh(journal=tmp_path / LINES)):
        with pytest.raises(CheckpointError, match="is locked by another process"):
            make()
    winner.receive(winner.dispatch("c"), answer(3)).check()
    before = state(winner)
    winner.close()
    assert state(back(tmp_path, server)) == before


def test_new_journal_is_locked_before_its_files_exist(tmp_path, monkeypatch):
    begin = journal.JournalWriter.open_segment

    def late(appender, *given):
        with pytest.raises(CheckpointError, match="is locked by another process"):
            fresh(journal=tmp_path / LINES)
        begin(appender, *given)

    monkeypatch.setattr(journal.JournalWriter, "open_segment", late)
    server = fresh(journal=tmp_path / LINES)
    assert server.dispatch("a").version == 0


def test_checkpoint_at_another_path_does_not_truncate_the_journal(tmp_path):
    server = fresh(journal=tmp_path / LINES, checkpoint=CheckpointPolicy(tmp_path / FILE, every_updates=100))
    server.receive(server.dispatch("a"), answer(1)).check()
    server.save()
    for seed in (2, 3):
        server.receive(server.dispatch("a"), answer(seed)).check()
        server.save(tmp_path / "elsewhere")
    files = server._durability.journal.journal.segments()
    before = state(server)
    crash(server)
    assert files == [2]
    other = back(tmp_path, server, checkpoint=CheckpointPolicy(tmp_path / FILE, every_updates=100))
    assert state(other) == before
    (tmp_path / "link").symlink_to(tmp_path)
    other.save(tmp_path / "link" / FILE)
    assert other._durability.journal.journal.segments() == [6]


class Slow:
    """Replacement of the file writer that blocks in its first write of a checkpoint.

    The test releases it, or it continues after `moment` seconds.
    """

    def __init__(self, monkeypatch, moment=60.0):
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.moment = moment
        self._atomic_write = tensor_file._atomic_write
        monkeypatch.setattr(tensor_file, "_atomic_write", self)

    def __call__(self, place, parts, keep):
        if place.name == FILE and not self.begun.is_set():
            self.begun.set()
            self.go_on.wait(self.moment)
        self._atomic_write(place, parts, keep)


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("named", [True, False])
def test_older_checkpoint_does_not_replace_newer_one_after_journal_rotation(tmp_path, monkeypatch, keep, named):
    slow = Slow(monkeypatch)
    every = CheckpointPolicy(tmp_path / FILE, every_updates=1, keep=keep)
    server = fresh(journal=tmp_path / LINES, checkpoint=every)
    server.receive(server.dispatch("a"), answer(1)).check()
    assert slow.begun.wait(60)
    server.dispatch("b")
    saving = threading.Thread(target=server.save, args=(tmp_path / FILE if named else None,))
    saving.start()
    # The one that is held up would be over by then, were it not waited for.
    saving.join(0.2)
    server.dispatch("c")
    slow.go_on.set()
    saving.join(60)
    server._durability.checkpoints.finish()
    before = state(server)
    crash(server)
    assert state(back(tmp_path, server, checkpoint=every)) == before


def test_concurrent_saves_keep_the_later_record(tmp_path, monkeypatch):
    slow = Slow(monkeypatch, moment=0.2)
    server = fresh(journal=tmp_path / LINES)
    server.receive(server.dispatch("a"), answer(1)).check()
    early = threading.Thread(target=server.save, args=(tmp_path / FILE,))
    early.start()
    assert slow.begun.wait(60)
    server.dispatch("b")
    server.save(tmp_path / FILE)
    early.join(60)
    before = state(server)
    crash(server)
    assert state(back(tmp_path, server)) == before


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("every", [None, CheckpointPolicy])
def test_signal_handler_that_saves_during_a_save_loses_nothing(tmp_path, monkeypatch, every, elsewhere):
    options = {} if every is None else {"checkpoint": CheckpointPolicy(tmp_path / FILE, every_updates=100)}
    server = fresh(journal=tmp_path / LINES, **options)
    server.receive(server.dispatch("a"), answer(1)).check()
    install = tensor_file._atomic_write
    said = []

    def handled(place, parts, keep):
        if place.name == FILE and not said:
            said.append(server.dispatch("b").id)
            server.save(tmp_path / ("other" if elsewhere else FILE))
        install(place, parts, keep)

    monkeypatch.setattr(tensor_file, "_atomic_write", handled)
    server.save(tmp_path / FILE)
    before = state(server)
    crash(server)
    assert state(back(tmp_path, server, **options)) == before
    assert server.tickets == said


@pytest.mark.parametrize("call", ["listdir", "open", "payload"])
def test_read_error_is_reported_and_journal_is_not_truncated(tmp_path, monkeypatch, call):
    path, states, _ = ended(tmp_path)
    whole = path.read_bytes()

    def broken(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        if call == "listdir":
            patch.setattr(journal.os, "listdir", broken)
        elif call == "open":
            patch.setattr(log_format.mmap, "mmap", broken)
        else:
            patch.setattr(recovery, "read_payload", broken)
        with pytest.raises(CheckpointError, match="cannot be read: Input/output error"):
            back(tmp_path, fresh())
    assert path.read_bytes() == whole
    assert state(back(tmp_path, fresh())) == states[-1]


COUNT = itertools.count()


class Forgets(Adds):
    def step(self, *given, **named):
        state, outcome = super().step(*given, **named)
        return state, replace(outcome, numbers={"step": float(next(COUNT))})


def test_encoded_payload_is_a_copy_and_its_buffer_is_reused():
    free_list = deque(maxlen=1)
    first = answer(1)
    packed = log_format.pack_payload(first, free_list)
    before = bytes(packed)
    # While a record refers to the buffer, another payload has its own.
    other = log_format.pack_payload(answer(2), free_list)
    first.points.zero_()
    assert bytes(packed) == before
    assert other.obj is not packed.obj
    buffer = packed.obj
    del packed
    assert free_list[0] is buffer
    again = log_format.pack_payload(answer(1), free_list)
    assert again.obj is buffer
    assert bytes(again) == before
    larger = log_format.pack_payload(Payload(torch.ones(1, 10 * SIZE), 1), free_list)
    assert len(larger.obj) > len(buffer)
    assert larger.obj is not other.obj


def test_threads_that_encode_concurrently_use_separate_buffers(tmp_path):
    server = fresh(AsyncBezier(0.5), journal=tmp_path / LINES)
    tickets = [server.dispatch(name) for name in range(8)]
    payloads = [payload(server.rule, ticket, seed) for seed, ticket in enumerate(tickets)]
    start = threading.Barrier(8)

    def work(ticket, mine):
        start.wait()
        server.receive(ticket, mine).check()
        for tensor in (mine.points, *mine.tensors.values()):
            tensor.zero_()  # The receipt has arrived, so the memory is the caller's.

    threads = [threading.Thread(target=work, args=given) for given in zip(tickets, payloads, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    before = state(server)
    crash(server)
    assert state(back(tmp_path, server)) == before


def test_replay_reports_a_rule_that_is_not_deterministic(tmp_path):
    server = fresh(Forgets(), journal=tmp_path / LINES)
    server.receive(server.dispatch("a"), answer(1)).check()
    crash(server)
    with pytest.warns(RuntimeWarning, match="record 1: the receipt was .*in the replay: the rule is not deterministic"):
        back(tmp_path, server)


def test_rejected_updates_are_not_written_to_the_journal(tmp_path):
    server = fresh(journal=tmp_path / LINES)
    ticket = server.dispatch("a")
    (path,) = tmp_path.glob("*.journal")
    size = path.stat().st_size
    for _ in range(50):
        assert not server.receive(ticket, Payload(torch.ones(1, SIZE + 1), 1)).accepted
        assert not server.receive("of my own making", answer(1)).accepted
    assert path.stat().st_size == size
    server.drop(ticket)
    crash(server)
    assert back(tmp_path, server).rejected == {"points": 50, "ticket": 50}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"fsync": "never"}, "fsync: expected"),
        ({"fsync_every": 0}, "fsync_every: expected an integer >= 1"),
        ({"path": "nowhere/at/all"}, "path: expected the path of a file in an existing folder"),
    ],
)
def test_invalid_journal_options_are_rejected(tmp_path, given, told, as_shipped):
    with pytest.raises(ArgumentError, match=told):
        Journal(**{"path": tmp_path / LINES, **given})
    with pytest.raises(ArgumentError, match="journal: expected a path or a Journal, got 3"):
        fresh(journal=3)


def test_journal_requires_named_rules_and_clients_that_are_strings_or_integers(tmp_path):
    server = fresh(journal=tmp_path / LINES)
    with pytest.raises(ArgumentError, match="^client: expected a string or an integer"):
        server.dispatch(("ward", 7))
    with pytest.raises(CheckpointError, match="rule: rate: expected a function of a module"):
        fresh(FedAsync(lambda version: 0.5), journal=tmp_path / "other")


def test_truncation_is_logged(tmp_path, caplog):
    path, states, ends = ended(tmp_path)
    path.write_bytes(path.read_bytes()[:-3])
    with caplog.at_level(logging.WARNING, "manifoldagg"):
        assert state(back(tmp_path, fresh())) == states[-2]
    assert f"{ends[-1] - 3 - ends[-2]} bytes after record 4 are not a record" in caplog.text


@pytest.mark.parametrize("links", [True, False])
def test_other_users_cannot_read_or_lock_the_journal(tmp_path, monkeypatch, links):
    def no_link(*_):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    if not links:
        monkeypatch.setattr(os, "link", no_link)
    (tmp_path / f"{LINES}.lock").touch(0o666)  # of an earlier version of the package
    before = os.umask(0)
    try:
        server = fresh(journal=tmp_path / LINES, checkpoint=CheckpointPolicy(tmp_path / FILE, every_updates=9))
        for _ in range(2):
            server.receive(server.dispatch("a"), answer(1)).check()
            server.save()
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys([FILE, f"{FILE}.1", f"{LINES}.lock", f"{LINES}.4.journal"], "0o600")


def started(code, folder, before=""):
    """Start a process that runs Python code with a server `s`, whose journal is in the folder.

    The code `before` runs before the imports.
    """
    begin = f"""
import atexit, multiprocessing, os, signal, sys
FOLDER = {str(folder)!r}
{before}
import torch
from manifoldagg.federated import Durability, Server
from manifoldagg.federated.rules import FedAsync
from manifoldagg.manifolds import Flat
s = Server(Flat(2), FedAsync(0.5), torch.zeros(2), durability=Durability(journal=FOLDER + "/{LINES}"))
"""
    command = [sys.executable, "-c", begin + code]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


FORKS = """
s.dispatch("parent")
def work():
    try:
        s.dispatch("child")
    except Exception as error:
        print(os.getpid(), type(error).__name__, flush=True)
    signal.pause()
child = multiprocessing.get_context("fork").Process(target=work)
child.start()
sys.stdin.read()
"""


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="the system has no fork")
def test_a_child_of_a_killed_server_does_not_hold_its_journal(tmp_path):
    server = started(FORKS, tmp_path)
    child, error = server.stdout.readline().split()
    try:
        assert error == "ArgumentError"
        # The lock of the parent is its own, whatever the child does with its copy.
        with pytest.raises(CheckpointError, match="is locked by another process"):
            Server.resume(tmp_path / FILE, Flat(2), FedAsync(0.5), durability=Durability(journal=tmp_path / LINES))
        server.kill()
        server.wait()
        os.kill(int(child), 0)  # is there
        resumed = Server.resume(
            tmp_path / FILE, Flat(2), FedAsync(0.5), durability=Durability(journal=tmp_path / LINES)
        )
        assert len(resumed.tickets) == 1
        resumed.close()
    finally:
        os.kill(int(child), signal.SIGKILL)
        server.kill()
        server.communicate()


OPENS_AT_EXIT = """
import atexit
def last():
    files = [open(f"{FOLDER}/other{i}", "wb") for i in range(4)]
    s.dispatch("late")
atexit.register(last)
"""


def test_exit_handler_writes_only_to_the_journal(tmp_path):
    server = started("s.dispatch('early')", tmp_path, before=OPENS_AT_EXIT)
    server.communicate()
    assert server.returncode == 0
    assert [(tmp_path / f"other{i}").read_bytes() for i in range(4)] == [b""] * 4
    resumed = Server.resume(tmp_path / FILE, Flat(2), FedAsync(0.5), durability=Durability(journal=tmp_path / LINES))
    assert [ticket.client for ticket in resumed._state.value.tickets.values()] == ["early", "late"]


def work(server, folder, seed, script):
    """Run the updates and checkpoints of a script."""
    for i, step in enumerate(script):
        if step == "s":
            server.save(folder / FILE)
        else:
            server.receive(server.dispatch(f"{seed} {i}"), answer(seed + i)).check()


@pytest.mark.parametrize(
    ("kind", "one", "two"),
    [(kind, *scripts) for kind in ("copies", "live", "clones") for scripts in (("usu", "usu"), ("usu", "uuuu"))]
    + [("copies", "uusu", "usu"), ("copies", "usu", "u"), ("live", "uusu", "u")],
)
def test_checkpoint_of_a_copy_does_not_match_the_journal_of_another(tmp_path, monkeypatch, kind, one, two):
    (tmp_path / "one").mkdir()
    server = fresh(journal=tmp_path / "one" / LINES)
    states = {}
    work(server, tmp_path / "one", 1, "us")
    for _ in range(4):
        server.dispatch("b")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    if kind == "live":  # The server goes on beside its copy.
        work(server, tmp_path / "one", 10, one)
        states["one"] = state(server)
    crash(server)
    for name, seed, script in (("one", 10, one), ("two", 20, two))[kind == "live" :]:
        drawn = itertools.count()
        with monkeypatch.context() as patch:
            if kind == "clones":  # Copies of a running machine draw the same random numbers.
                patch.setattr(os, "urandom", lambda n, drawn=drawn: next(drawn).to_bytes(n, "big"))
            other = back(tmp_path / name, server)
            work(other, tmp_path / name, seed, script)
        states[name] = state(other)
        crash(other)
    for own, foreign, script in (("one", "two", one), ("two", "one", two)):
        mixed = tmp_path / f"{own} {foreign}"
        shutil.copytree(tmp_path / foreign, mixed)
        shutil.copy(tmp_path / own / FILE, mixed / FILE)
        if "s" in script:
            with pytest.raises(
                CheckpointError, match="or to another copy of this server|belongs to another copy of this server"
            ):
                back(mixed, server)
    for name, now in states.items():
        assert state(back(tmp_path / name, server)) == now


def test_open_starts_a_server_and_resumes_it_at_any_time(tmp_path):
    start = draw(0, SIZE, dtype=torch.float32)
    files = {"journal": tmp_path / LINES, "checkpoint": CheckpointPolicy(tmp_path / FILE, every_updates=10)}

    def opened(start):
        return Server.open(tmp_path / FILE, SPACE, Adds(), start, **grouped(**files))

    server = opened(start)
    assert (server.orphaned_tickets, torch.equal(server.model, start)) == ([], True)
    old, lost = server.dispatch("a"), server.dispatch("b")
    for saved in (False, True):
        if saved:
            server.save()
        before = state(server)
        crash(server)
        server = opened(torch.zeros(SIZE))
        assert state(server) == before
        assert server.orphaned_tickets == [old.id, lost.id]
    assert (tmp_path / FILE).exists()
    new = server.dispatch("a")
    server.receive(old, answer(1)).check()
    assert (server.orphaned_tickets, server.tickets) == ([lost.id], [lost.id, new.id])
    # With a checkpoint alone.
    del files["journal"]
    server.close()
    with pytest.raises(CheckpointError, match="expected the journal of this checkpoint; pass"):
        opened(start)
    (tmp_path / FILE).unlink()
    server = opened(start)
    server.receive(server.dispatch("a"), answer(1)).check()
    assert opened(start).updates == 0
    server.save()
    assert opened(start).updates == 1


@pytest.mark.parametrize("with_journal", [False, True])
def test_open_ignores_the_initial_model_and_its_buffers_on_a_resume(tmp_path, with_journal):
    network = nn.BatchNorm1d(2)
    space = ParameterSpace.of(network)
    files = {"journal": tmp_path / LINES} if with_journal else {}

    def opened(value):
        buffers = {**network.state_dict(), "running_mean": torch.full((2,), value)}
        buffers = {name: buffers[name] for name in ("running_mean", "running_var", "num_batches_tracked")}
        start, policy = torch.full((4,), value), {"running_var": "latest"}
        return Server.open(
            tmp_path / FILE,
            space,
            FedAsync(0.5),
            InitialModel(start, buffers, policy),
            limits=ServerLimits(history_size=3),
            **grouped(**files),
        )

    server = opened(1.0)
    server.save(tmp_path / FILE)
    before = state(server)
    server.close()
    assert state(opened(2.0)) == before


@pytest.mark.parametrize("with_journal", [False, True])
def test_open_accepts_a_module_and_resumes_its_buffers(tmp_path, with_journal):
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    policy = CheckpointPolicy(tmp_path / FILE, every_updates=1)
    files = {"journal": tmp_path / LINES} if with_journal else {"checkpoint": policy}

    def opened(**options):
        return Server.open(tmp_path / FILE, network, FedAsync(0.5), **options, **grouped(**files))

    server = opened(buffer_policy={"1.running_mean": "latest"})
    model = server.state_dict() | {"1.running_mean": torch.full((2,), 3.0)}
    server.receive_model(server.dispatch("a"), model, samples=10).check()
    before = state(server)
    server.close()
    resumed = opened()
    assert state(resumed) == before
    assert resumed.state_dict()["1.running_mean"].tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((SPACE,), {}, "start: expected the initial model of the space, got None"),
        ((SPACE, torch.zeros(SIZE)), {"scaling": 2.0}, "scaling: expected 1.0 if model is a space"),
        ((SPACE, torch.zeros(SIZE)), {"buffer_policy": ["b"]}, "buffer_policy: expected None for a space"),
        ((nn.Linear(2, 1), torch.zeros(3)), {}, "start: expected None, because the module or the state dict"),
    ],
)
def test_open_rejects_contradicting_models(tmp_path, arguments, options, words):
    space, *start = arguments
    with pytest.raises(ArgumentError, match=words):
        Server.open(tmp_path / FILE, space, FedAsync(0.5), *start, **options)


def test_new_server_does_not_replace_a_checkpoint(tmp_path):
    files = {"checkpoint": CheckpointPolicy(tmp_path / FILE, every_updates=1)}
    server = fresh(**files)
    server.receive(server.dispatch("a"), answer(1)).check()
    server.close()
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(ArgumentError, match="checkpoint: .*already exists; resume with `Server.open`"):
        fresh(**files)
    assert (tmp_path / FILE).read_bytes() == before


@pytest.mark.parametrize("act", ["dispatch", "drop"])
@pytest.mark.parametrize(
    ("within", "fsync", "every"), [("receive", "always", 1), ("receive", "batch", 1), ("save", "batch", 9)]
)
def test_call_during_a_journal_write_is_durable_after_the_interrupted_call(
    tmp_path, monkeypatch, act, within, fsync, every
):
    server = fresh(journal=Journal(tmp_path / LINES, fsync=fsync, fsync_every=every))
    tickets = [server.dispatch(client) for client in "ab"]
    synced = journal.os.fsync
    seen = []

    def handler(file):
        synced(file)
        if not seen and server._durability.journal.held_by_me():
            seen.append(None)
            if act == "dispatch":
                server.dispatch("c")
            else:
                server.drop(tickets[1])
            seen[0] = server.tickets

    with monkeypatch.context() as patch:
        patch.setattr(journal.os, "fsync", handler)
        if within == "receive":
            server.receive(tickets[0], answer(1)).check()
        else:
            server.save(tmp_path / FILE)
    crash(server)
    assert back(tmp_path, server).tickets == seen[0]


def test_no_call_succeeds_after_close_has_written_the_journal(tmp_path, monkeypatch):
    server = fresh(journal=Journal(tmp_path / LINES, fsync="batch"))
    ticket, _ = server.dispatch("a"), server.dispatch("b")
    tickets = server.tickets
    said = []

    def handler(call):
        def called(file):
            call(file)
            for late in (lambda: server.dispatch("c"), lambda: server.drop(ticket)):
                with pytest.raises(ArgumentError, match="server: was closed"):
                    late()
            said.append(call)

        return called

    with monkeypatch.context() as patch:
        patch.setattr(journal.os, "fsync", handler(journal.os.fsync))
        patch.setattr(_io.os, "close", handler(_io.os.close))
        server.close()
    assert len(said) > 1
    assert back(tmp_path, server).tickets == tickets


def test_concurrent_calls_share_a_sync(tmp_path, monkeypatch):
    server = fresh(journal=tmp_path / LINES)
    server.dispatch("a")
    synced, entered, released = journal.os.fsync, threading.Event(), threading.Event()
    syncs = []

    def slow(file):
        syncs.append(file)
        if len(syncs) == 1:
            entered.set()
            assert released.wait(30)
        synced(file)

    monkeypatch.setattr(journal.os, "fsync", slow)
    threads = [threading.Thread(target=server.dispatch, args=(client,)) for client in "bcde"]
    threads[0].start()
    assert entered.wait(30)
    for thread in threads[1:]:
        thread.start()
    deadline = time.monotonic() + 30
    while len(server.tickets) < 5:  # Each thread publishes its ticket, and then waits for the write.
        assert time.monotonic() < deadline
        time.sleep(0.001)
    released.set()
    for thread in threads:
        thread.join(30)
    assert len(syncs) == 2
    before = state(server)
    crash(server)
    assert state(back(tmp_path, server)) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_close_can_be_repeated_after_an_interrupt_of_the_average(tmp_path, monkeypatch, error):
    server = fresh(journal=tmp_path / LINES)
    server.dispatch("a")
    tickets = server.tickets

    def interrupted():
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(server._updates, "notify_average", interrupted)
        with pytest.raises(error):
            server.close()
    with pytest.raises(ArgumentError, match="server: was closed"):
        server.dispatch("b")
    server.close()
    assert back(tmp_path, server).tickets == tickets


def test_interrupt_before_close_leaves_an_open_server_with_a_journal(tmp_path, monkeypatch):
    server = fresh(journal=tmp_path / LINES)

    class Interrupted:
        def __enter__(self):
            raise KeyboardInterrupt

        def __exit__(self, *_):
            pass

    with monkeypatch.context() as patch:
        patch.setattr(server._updates.lock, "lock", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            server.close()
    server.dispatch("a")
    before = state(server)
    crash(server)
    assert state(back(tmp_path, server)) == before


def test_call_whose_record_a_failing_close_cannot_write_raises(tmp_path, monkeypatch):
    """The thread has published its ticket, and waits for the journal while another thread closes the server."""
    server = fresh(journal=tmp_path / LINES)
    entered, raised = threading.Event(), []
    writer = server._durability.journal
    write_until = writer._write_until

    def waits(lsn):
        entered.set()
        assert closed.wait(30)
        write_until(lsn)

    closed = threading.Event()

    def dispatch():
        try:
            server.dispatch("a")
        except CheckpointError as error:
            raised.append(str(error))

    monkeypatch.setattr(writer, "_write_until", waits)
    thread = threading.Thread(target=dispatch)
    thread.start()
    assert entered.wait(30)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(journal.os, "write", full)
        with pytest.raises(CheckpointError, match="No space left"):
            server.close()
    closed.set()
    thread.join(30)
    assert len(raised) == 1
    assert "the server was closed" in raised[0]
    assert back(tmp_path, server).tickets == []


def test_journal_stays_locked_until_the_last_checkpoint_is_written(tmp_path, monkeypatch):
    policy = CheckpointPolicy(tmp_path / FILE, every_updates=1)
    server = Server(
        SPACE, Adds(), torch.zeros(SIZE), durability=Durability(checkpoint=policy, journal=tmp_path / LINES)
    )
    server.receive(server.dispatch("a"), answer(1)).check()
    finish = server._durability.checkpoints.finish
    refused = []

    def observed():
        with pytest.raises(CheckpointError, match="is locked"):
            journal.JournalLock(Journal(tmp_path / LINES))
        refused.append(True)
        finish()

    monkeypatch.setattr(server._durability.checkpoints, "finish", observed)
    server.close()
    assert refused
    journal.JournalLock(Journal(tmp_path / LINES)).close()


def test_checkpoint_does_not_hide_a_failed_write(tmp_path, monkeypatch):
    server = fresh(journal=tmp_path / LINES)
    first, second = server.dispatch("a"), server.dispatch("b")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def unwritable(*_):
        raise CheckpointError("cannot be written")

    with monkeypatch.context() as patch:
        patch.setattr(journal.os, "write", full)
        with pytest.raises(CheckpointError, match="No space left"):
            server.receive(first, answer(1))
    with monkeypatch.context() as patch:
        patch.setattr(server._durability.journal, "open_segment", unwritable)
        server.save(tmp_path / FILE)
    version = server.version
    with monkeypatch.context() as patch:
        patch.setattr(journal.os, "write", full)
        with pytest.raises(CheckpointError, match="No space left"):
            server.receive(second, answer(2))
    assert server.version == version


def test_records_of_a_failed_batch_sync_stay_pending(tmp_path, monkeypatch):
    server = fresh(journal=Journal(tmp_path / LINES, fsync="batch", fsync_every=1))
    ticket = server.dispatch("a")

    def broken(file):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(journal.os, "fsync", broken)
        for _ in range(2):  # The second call finds the record of the first one.
            with pytest.raises(CheckpointError, match="Input/output error"):
                server.dispatch("b")
    server.receive(ticket, answer(1)).check()
    before = state(server)
    crash(server)
    assert state(back(tmp_path, server)) == before
