"""Tests of checkpoints: a resumed server is bitwise equal to the saved one, and mismatches raise descriptive errors."""

import errno
import logging
import multiprocessing
import os
import random
import re
import threading
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from manifoldagg import _io, tensor_file
from manifoldagg.averaging import SWA
from manifoldagg.errors import ArgumentError, CheckpointError, SpillError
from manifoldagg.federated import CheckpointPolicy, InitialModel, Payload, Server, UpdateLimits
from manifoldagg.federated.pytrees import tensors
from manifoldagg.federated.rules import AsyncBezier, FedAdam, FedAsync, FedBuff, Momentum, Private
from manifoldagg.federated.server import update_processor
from manifoldagg.federated.server.durability import checkpoint
from manifoldagg.kernels import set_backend
from manifoldagg.manifolds import Flat, ParameterSpace, Sphere
from tests.federated.faults import each
from tests.federated.fingerprint import Adds, Gathers, Listens
from tests.federated.rules.registered import golden
from tests.federated.server.durability import scripted_run
from tests.federated.server.durability.scripted_run import (
    LAG,
    SIZE,
    Life,
    Wall,
    carrying,
    content,
    large,
    payload,
    script,
)
from tests.federated.server.durability.spilled import alter
from tests.server_options import grouped
from tests.support import draw

SPACE = Flat(SIZE)
RULES = golden()
FILE = "server"


def fresh(rule=None, **options):
    return Server(SPACE, rule or Adds(), draw(0, SIZE, dtype=torch.float32), **grouped(**options))


def resumed(folder, server, **options):
    """Save a server, and return a second server that is resumed from the file."""
    server.save(folder / FILE)
    return Server.resume(folder / FILE, server.space, server.rule, **grouped(**options))


def goes_on(life, other, events=12, answer=payload):
    """Return whether two servers give equal results from now on."""
    mine = content(life.server)
    assert content(other) == mine
    twin = life.on(other)
    told = life.go(events, answer)
    assert twin.go(events, answer) == told
    assert content(twin.server) == content(life.server)
    assert told


VARIANTS = {
    "within a memory limit": lambda: {"memory_limit": 0},
    "with SWA": lambda: {"averaging": SWA(SPACE, start=2)},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", RULES)
def test_resumed_server_of_every_rule_is_bitwise_equal(tmp_path, name, variant):
    options = VARIANTS[variant]
    life = Life(fresh(RULES[name], **options()))
    life.go(8)
    other = resumed(tmp_path, life.server, **options())
    assert other.memory == life.server.memory
    assert (other.memory["spilled"] > 0) == ("memory_limit" in options())
    goes_on(life, other, 5)


def test_exact_averages_are_resumed(tmp_path):
    life = Life(fresh(averaging=SWA(SPACE, kind="exact", cycle=2)))
    life.go(12)
    goes_on(life, resumed(tmp_path, life.server, averaging=SWA(SPACE, kind="exact", cycle=2)))


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "uniform"},
        {"weights": {"heavy": 5, 7: 3, "light": 1}},
        {
            "update_limits": UpdateLimits(
                norm_factor=50.0, max_norm=90.0, samples_factor=3.0, clip_factor=1.2, min_cosine=-0.9
            )
        },
        {"base_dtype": torch.bfloat16, "memory_limit": 60},
        {"base_dtype": torch.float16},
        {"max_staleness": 2, "history_size": 3, "receipt_cache_size": 4},
    ],
    ids=lambda options: ", ".join(options),
)
@pytest.mark.parametrize("rule", [FedBuff(3), Gathers(2, patient=False)], ids=lambda r: type(r).__name__)
def test_options_are_resumed(tmp_path, rule, options):
    life = Life(fresh(rule, **options))
    life.go(10)
    goes_on(life, resumed(tmp_path, life.server))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


@pytest.mark.parametrize("manifolds", [None, {"0.weight": Sphere(3)}], ids=["flat", "curved"])
@pytest.mark.parametrize("rule", [FedBuff(3), AsyncBezier(0.5)], ids=lambda r: type(r).__name__)
def test_buffers_and_curved_leaves_are_resumed(tmp_path, rule, manifolds):
    net = network()
    net[0].weight.data /= net[0].weight.data.norm(dim=-1, keepdim=True)
    space = ParameterSpace.of(net, manifolds)
    policies = {"*running_mean": "average", "*running_var": "latest", "*tracked": "leave"}
    server = Server(space, rule, InitialModel(space.point(net), space.buffers(net), policies))

    def answer(rule, ticket, seed):
        given = carrying(rule, ticket, seed)
        return given if space.flat else replace(given, points=space.project(given.points))

    life = Life(server)
    life.go(LAG, answer)
    assert (server._state.value.model_state.pending_buffers is not None) == isinstance(rule, FedBuff)
    other = resumed(tmp_path, server)
    goes_on(life, other, 4, answer)
    assert all(torch.equal(x, server.state_dict()[name]) for name, x in other.state_dict().items())


def test_tickets_without_base_and_models_in_flight_are_resumed(tmp_path):
    server = fresh()
    bare = server.dispatch("a", retain_base=False)
    kept = server.dispatch("b")
    server.receive(server.dispatch("c"), Payload(torch.ones(1, SIZE), 1)).check()
    other = resumed(tmp_path, server)
    answers = [
        (bare, Payload(torch.ones(1, SIZE), 1, base=bare.message.start)),
        (kept, Payload(torch.ones(1, SIZE), 1)),
    ]
    for ticket, answer in answers:
        assert repr(other.receive(ticket, answer)) == repr(server.receive(ticket, answer))
        assert torch.equal(other.model, server.model)
    assert other.memory == server.memory


def test_retry_after_crash_returns_the_same_receipt(tmp_path):
    server = fresh(max_staleness=0)
    tickets = [server.dispatch("a"), server.dispatch("b")]
    told = [server.receive(ticket, Payload(torch.ones(1, SIZE), 1)) for ticket in tickets]
    assert [receipt.accepted for receipt in told] == [True, False]
    other = resumed(tmp_path, server)
    before = content(other)
    again = [other.receive(ticket, Payload(torch.ones(1, SIZE), 1)) for ticket in tickets]
    assert repr(again) == repr(told)
    assert content(other) == before
    assert (
        "another" in other.receive(tickets[0], Payload(torch.ones(1, SIZE), 1), client="b").reason
        or not other.receive(tickets[0], Payload(torch.ones(1, SIZE), 1), client="b").accepted
    )


def test_resumed_tickets_keep_their_age(tmp_path):
    wall = Wall(100.0)
    server = fresh(timeout=10.0, clock=wall)
    old = server.dispatch("a")
    wall.now = 106.0
    young = server.dispatch("b")
    server.save(tmp_path / FILE)
    for later, gone in ((3.0, []), (4.5, [old.id]), (10.5, [young.id])):
        now = Wall(6000.0)
        other = Server.resume(tmp_path / FILE, SPACE, server.rule, clock=now)
        if gone == [young.id]:
            other.drop(old)
        now.now += later
        assert other.expire() == gone


def test_given_options_override_saved_options(tmp_path):
    server = fresh(max_in_flight=3, max_queued_updates=5, timeout=9.0, history_size=7, weights={"a": 1, "b": 3})
    assert server.receive(server.dispatch("a"), Payload(torch.ones(1, SIZE), 1)).weight == 0.25
    other = resumed(tmp_path, server)
    assert other._state.value.limits == server._state.value.limits
    assert other._updates.lock.max_queued == 5
    limits = replace(server._state.value.limits, max_in_flight=4, history_size=0)
    other = resumed(tmp_path, server, limits=limits, memory_limit=0, weights={"a": 1, "b": 1})
    assert other._state.value.limits == limits
    assert other.history == []
    assert other.receive(other.dispatch("b"), Payload(torch.ones(1, SIZE), 1)).weight == 0.5
    with pytest.raises(ArgumentError, match="history_size: expected"):
        resumed(tmp_path, server, history_size=-1)
    with pytest.raises(TypeError, match="hystory"):
        resumed(tmp_path, server, hystory=3)


def slowing(version):
    return 1 / (version + 1)


def halving(version):
    return 0.5**version


def test_resume_with_another_rule_requires_replace(tmp_path):
    server = fresh(FedAdam(3, rate=slowing))
    life = Life(server)
    life.go(8)
    server.save(tmp_path / FILE)
    Server.resume(tmp_path / FILE, SPACE, FedAdam(3, rate=slowing))
    with pytest.raises(
        CheckpointError, match=f"rule: rate: was {__name__}.slowing, got {__name__}.halving; .*replace=True"
    ):
        Server.resume(tmp_path / FILE, SPACE, FedAdam(3, rate=halving))
    other = Server.resume(tmp_path / FILE, SPACE, FedAdam(3, rate=halving), replace=True)
    assert content(other) == content(server)
    with pytest.raises(CheckpointError, match="rule: was .*FedAdam, got .*FedAsync"):
        Server.resume(tmp_path / FILE, SPACE, FedAsync(0.5))
    other = Server.resume(tmp_path / FILE, SPACE, FedAsync(0.5), replace=True)
    assert (other.version, other._state.value.model_state.state) == (server.version, {"version": 0})
    assert torch.equal(other.model, server.model)
    assert other.receive(life.out[0], Payload(torch.ones(1, SIZE), 1)).accepted


@pytest.mark.parametrize("wrap", [lambda rule: rule, lambda rule: Momentum(rule, 0.5)], ids=["alone", "wrapped"])
def test_resume_rejects_private_rule_with_other_noise(tmp_path, wrap):
    server = fresh(wrap(Private(FedBuff(2), clip=5.0, noise=1.0)))
    server.receive(server.dispatch("a"), Payload(torch.ones(1, SIZE), 1)).check()
    server.save(tmp_path / FILE)
    for clip, noise in ((5.0, 4.0), (5.0, 0.5), (1.0, 1.0)):
        other = wrap(Private(FedBuff(2), clip=clip, noise=noise))
        with pytest.raises(CheckpointError, match=rf"rule: \(clip, noise\) was \(5.0, 1.0\), got \({clip}, {noise}\)"):
            Server.resume(tmp_path / FILE, SPACE, other, replace=True)
    other = wrap(Private(FedBuff(3, rate=0.5), clip=5.0, noise=1.0, participations=9))
    assert content(Server.resume(tmp_path / FILE, SPACE, other, replace=True)) == content(server)
    assert Server.resume(tmp_path / FILE, SPACE, FedAsync(0.5), replace=True).version == 0


def test_replaced_rule_discards_client_states(tmp_path):
    server = fresh()
    server.receive(server.dispatch("a"), Payload(torch.ones(1, SIZE), 1)).check()
    server.save(tmp_path / FILE)
    assert Server.resume(tmp_path / FILE, SPACE, Adds()).memory["clients"] == server.memory["clients"] > 0
    assert Server.resume(tmp_path / FILE, SPACE, FedAsync(0.5), replace=True).memory["clients"] == 0


@pytest.mark.usefixtures("as_shipped")
def test_resume_rejects_model_of_another_architecture(tmp_path):
    network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    Server.of(network, FedAsync(0.5)).save(tmp_path / "server")
    longer = torch.nn.Sequential(*network, torch.nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match="space: layout: leaves: was 4 entries, got 6"):
        Server.resume(tmp_path / "server", ParameterSpace.of(longer), FedAsync(0.5))
    with pytest.raises(CheckpointError, match="model: layout: leaves: was 4 entries, got 6"):
        Server.resume(tmp_path / "server", longer, FedAsync(0.5))


def test_resume_rejects_another_space(tmp_path):
    fresh().save(tmp_path / FILE)
    with pytest.raises(CheckpointError, match=r"server: space: n: was 6, got 7|server: space: .*was 6, got 7"):
        Server.resume(tmp_path / FILE, Flat(7), Adds(), replace=True)


def test_resume_requires_the_averaging_of_the_checkpoint(tmp_path):
    server = fresh(averaging=SWA(SPACE))
    server.save(tmp_path / FILE)
    with pytest.raises(
        ArgumentError, match=r"averaging: expected an instance of manifoldagg\..*SWA, as in the checkpoint, got None"
    ):
        Server.resume(tmp_path / FILE, SPACE, Adds())

    class Other(Listens):
        def update(self, version, model):
            pass

    with pytest.raises(ArgumentError, match="averaging: expected an instance of .*SWA.*, got .*Other"):
        Server.resume(tmp_path / FILE, SPACE, Adds(), averaging=Other())
    fresh().save(tmp_path / FILE)
    assert Server.resume(tmp_path / FILE, SPACE, Adds(), averaging=SWA(SPACE)).version == 0


def test_save_rejects_functions_and_clients_without_stable_name(tmp_path):
    server = fresh(FedAsync(lambda version: 0.5))
    with pytest.raises(CheckpointError, match=r"^rule: rate: expected a function of a module.*<lambda>"):
        server.save(tmp_path / FILE)
    with pytest.raises(CheckpointError, match="^rule: rate"):
        fresh(server.rule, checkpoint=CheckpointPolicy(tmp_path / FILE, every_updates=1))
    server = fresh()
    server.dispatch(("ward", 7))
    with pytest.raises(
        CheckpointError,
        match=r"^client: expected a string or an integer, as a checkpoint stores it, got \('ward', 7\)$",
    ):
        server.save(tmp_path / FILE)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("client", [("ward", 7), 1.5, None, True, frozenset(), b"x"])
def test_checkpoints_require_clients_that_are_strings_or_integers(tmp_path, client):
    server = fresh(checkpoint=CheckpointPolicy(tmp_path / FILE, every_updates=1))
    before = content(server)
    with pytest.raises(ArgumentError, match="^client: expected a string or an integer"):
        server.dispatch(client)
    assert content(server) == before
    fresh().dispatch(client)


def test_error_describes_the_defect_of_damaged_or_foreign_file(tmp_path):
    server = fresh()
    path = tmp_path / FILE
    server.save(path)
    os.rename(path, f"{path}.1")
    server.save(path)
    whole = path.read_bytes()
    for content_, told in [
        (whole[:-1], "is truncated"),
        (whole[:99] + bytes([whole[99] ^ 1]) + whole[100:], "is altered"),
        (b"PK" + whole, "was not written by this package"),
        (None, "No such file"),
    ]:
        path.unlink(missing_ok=True)
        if content_ is not None:
            path.write_bytes(content_)
        with pytest.raises(CheckpointError, match=rf"{told}.*; an older file is .*server\.1$"):
            Server.resume(path, SPACE, Adds())
    tensor_file.save(path, "clock", {})
    with pytest.raises(CheckpointError, match="contains a clock, expected a server"):
        Server.resume(path, SPACE, Adds())
    assert Server.resume(f"{path}.1", SPACE, Adds()).version == 0


def test_resume_with_another_backend_warns(tmp_path, monkeypatch):
    server = fresh()
    server.save(tmp_path / FILE)
    before = set_backend("reference")
    try:
        with pytest.warns(RuntimeWarning, match="backend: was .*, is reference here: results may differ bitwise"):
            Server.resume(tmp_path / FILE, SPACE, Adds())
    finally:
        set_backend(before)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "ABACUS")
    with pytest.warns(RuntimeWarning, match="processor: was .*, is .*ABACUS here"):
        Server.resume(tmp_path / FILE, SPACE, Adds())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "every_updates, every_seconds: expected at least one"),
        ({"every_updates": 0}, "every_updates: expected an integer >= 1"),
        ({"every_seconds": 0.0}, "every_seconds: expected a finite number > 0"),
        ({"every_updates": 1, "keep": 0}, "keep: expected an integer >= 1"),
        ({"every_updates": 1, "path": "nowhere/at/all"}, "path: expected the path of a file in an existing folder"),
    ],
)
def test_checkpoint_policy_rejects_invalid_intervals(tmp_path, given, told):
    with pytest.raises(ArgumentError, match=told):
        CheckpointPolicy(**{"path": tmp_path / FILE, **given})


def test_server_rejects_checkpoint_that_is_not_a_policy(tmp_path, as_shipped):
    with pytest.raises(ArgumentError, match="checkpoint: expected CheckpointPolicy, got '"):
        fresh(checkpoint=str(tmp_path / FILE))


def test_checkpoint_is_written_after_every_n_updates(tmp_path):
    server = fresh(checkpoint=CheckpointPolicy(tmp_path / FILE, every_updates=3, keep=2))
    seen = []
    for i in range(10):
        server.receive(server.dispatch(i), Payload(torch.ones(1, SIZE), 1)).check()
        server._durability.checkpoints.finish()
        seen.append(sorted(os.listdir(tmp_path)))
        if (i + 1) % 3 == 0:
            assert content(Server.resume(tmp_path / FILE, SPACE, Adds())) == content(server)
    assert seen == [[]] * 2 + [[FILE]] * 3 + [[FILE, f"{FILE}.1"]] * 5
    assert [Server.resume(tmp_path / name, SPACE, Adds()).version for name in (FILE, f"{FILE}.1")] == [9, 6]


def test_checkpoint_is_written_after_every_interval_in_seconds(tmp_path, monkeypatch):
    seconds = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    server = fresh(checkpoint=CheckpointPolicy(tmp_path / FILE, every_seconds=10.0), clock=Wall())
    for now, version in [(9.0, None), (10.0, 2), (19.0, 2), (25.0, 4), (34.0, 4)]:
        seconds[0] = now
        server.receive(server.dispatch("a"), Payload(torch.ones(1, SIZE), 1)).check()
        server._durability.checkpoints.finish()
        path = tmp_path / FILE
        there = Server.resume(path, SPACE, Adds(), clock=Wall()).version if path.exists() else None
        assert there == version


def test_resume_requires_a_clock_with_the_saved_name(tmp_path):
    path = tmp_path / FILE
    fresh(clock=Wall()).save(path)
    assert Server.resume(path, SPACE, Adds(), clock=Wall()).version == 0
    told = "pass replace=True to replace it"
    with pytest.raises(CheckpointError, match=f"clock: was .*Wall, got time.monotonic; {told}"):
        Server.resume(path, SPACE, Adds())
    other = Server.resume(path, SPACE, Adds(), clock=lambda: 0.0, replace=True)
    with pytest.raises(CheckpointError, match="clock: expected a function of a module"):
        other.save(path)
    with pytest.raises(CheckpointError, match="clock: expected a function of a module"):
        fresh(clock=lambda: 0.0, checkpoint=CheckpointPolicy(path, every_updates=1))
    fresh(clock=Wall().__call__).save(path)
    assert Server.resume(path, SPACE, Adds(), clock=Wall(7.0).__call__).version == 0


def test_updates_do_not_wait_for_checkpoints_which_are_written_one_at_a_time(tmp_path, monkeypatch):
    begun = threading.Semaphore(0)
    go_on = threading.Semaphore(0)
    writing = []
    write = tensor_file.save

    def slow(path, kind, tree, *, keep):
        assert not writing
        writing.append(path)
        begun.release()
        assert go_on.acquire(timeout=60)
        writing.clear()
        write(path, kind, tree, keep=keep)

    monkeypatch.setattr(checkpoint.tensor_file, "save", slow)
    server = fresh(checkpoint=CheckpointPolicy(tmp_path / FILE, every_updates=1, keep=9))
    for i in range(5):
        server.receive(server.dispatch(i), Payload(torch.ones(1, SIZE), 1)).check()
        if i == 0:
            assert begun.acquire(timeout=60)
    assert server.version == 5
    go_on.release(2)
    server._durability.checkpoints.finish()
    monkeypatch.undo()
    # What came between the one that was being written and the latest is not written.
    assert [Server.resume(tmp_path / name, SPACE, Adds()).version for name in (FILE, f"{FILE}.1")] == [5, 1]
    assert len(os.listdir(tmp_path)) == 2


def test_background_checkpoint_error_is_logged_and_raised_by_close(tmp_path, monkeypatch, caplog):
    def full(path, kind, tree, *, keep):
        raise CheckpointError("disk full")

    folder = tmp_path / "there"
    folder.mkdir()
    server = fresh(checkpoint=CheckpointPolicy(folder / FILE, every_updates=1))
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "manifoldagg"):
        patch.setattr(checkpoint.tensor_file, "save", full)
        assert server.receive(server.dispatch("a"), Payload(torch.ones(1, SIZE), 1)).accepted
        with pytest.raises(CheckpointError, match="disk full"):
            server._durability.checkpoints.finish()
        assert "checkpoint: disk full" in caplog.text
        assert server.receive(server.dispatch("a"), Payload(torch.ones(1, SIZE), 1)).accepted
        with pytest.raises(CheckpointError, match="disk full"):
            server.close()
    server.close()
    server = fresh(checkpoint=CheckpointPolicy(folder / FILE, every_updates=1))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.tensor_file, "save", full)
        server.receive(server.dispatch("a"), Payload(torch.ones(1, SIZE), 1)).check()
        server._durability.checkpoints._drain()
    server.receive(server.dispatch("a"), Payload(torch.ones(1, SIZE), 1)).check()
    server.close()
    assert Server.resume(folder / FILE, SPACE, Adds()).version == 2


def test_close_writes_the_last_checkpoint_if_threads_are_unavailable(tmp_path, monkeypatch):
    def none(thread):
        raise RuntimeError("can't start new thread")

    server = fresh(checkpoint=CheckpointPolicy(tmp_path / FILE, every_updates=1))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none)
        assert server.receive(server.dispatch("a"), Payload(torch.ones(1, SIZE), 1)).accepted
    assert os.listdir(tmp_path) == []
    server.close()
    assert Server.resume(tmp_path / FILE, SPACE, Adds()).version == 1


def test_save_during_an_update_or_after_close_raises(tmp_path):
    class Saves(Adds):
        def step(self, *given, **named):
            server.save(tmp_path / FILE)

    server = fresh(Saves())
    assert (
        "expected a call outside of an update"
        in server.receive(server.dispatch("a"), Payload(torch.ones(1, SIZE), 1)).reason
    )
    server.close()
    with pytest.raises(ArgumentError, match="server: was closed"):
        server.save(tmp_path / FILE)
    assert os.listdir(tmp_path) == []


def test_snapshot_can_be_written_later_with_other_data(tmp_path):
    life = Life(fresh(Gathers(3)))
    life.go(9)
    moment = life.server.snapshot()
    then = content(life.server)
    twin = Life(life.server)
    twin.out, twin.events = [*life.out], life.events
    told = life.go(6)
    tensor_file.save(tmp_path / "hour", "hour", {"server": moment.tree(), "events": twin.events})
    tree = tensor_file.load(tmp_path / "hour", "hour")
    twin.server = Server.resume(checkpoint.LoadedCheckpoint(tmp_path / "hour", tree["server"]), SPACE, Gathers(3))
    assert content(twin.server) == then
    assert (tree["events"], twin.go(6)) == (9, told)
    with pytest.raises(CheckpointError, match="hour: rule: was .*Gathers, got .*Adds"):
        Server.resume(checkpoint.LoadedCheckpoint(tmp_path / "hour", tree["server"]), SPACE, Adds())
    life.server.close()
    with pytest.raises(ArgumentError, match="server: was closed"):
        life.server.snapshot()


def test_save_omits_tickets_with_lost_base_and_reports_lost_client_state(tmp_path):
    (tmp_path / "spill").mkdir()
    server = fresh(memory_limit=0, spill=tmp_path / "spill")
    lost = server.dispatch("a")
    server.receive(server.dispatch("b"), Payload(torch.ones(1, SIZE), 1)).check()
    kept = server.dispatch("c")
    alter(server, ("version", 0))
    other = resumed(tmp_path, server)
    assert other.receive(lost, Payload(torch.ones(1, SIZE), 1)).reason == "ticket: unknown, or used already"
    assert other.receive(kept, Payload(torch.ones(1, SIZE), 1)).accepted
    alter(server, ("client", "b"))
    with pytest.raises(SpillError, match="was altered"):
        server.save(tmp_path / FILE)


def test_a_checkpoint_reads_spilled_trees_without_a_copy(tmp_path):
    """All spilled trees together may not fit in memory."""
    server = fresh(memory_limit=0, spill=tmp_path)
    server.dispatch("a")
    server.receive(server.dispatch("b"), Payload(torch.ones(1, SIZE), 1)).check()
    state = server._state.value
    kept, lost = checkpoint._stored_trees(state)
    assert lost == set()
    assert [key for key, _ in kept] == [key for key in state.store.entries if key != state.current_key]
    for key, tree in kept:
        views = tensors(state.store.load(key, copy=False))
        assert [tensor.data_ptr() for tensor in tensors(tree)] == [tensor.data_ptr() for tensor in views]


def test_save_during_concurrent_updates_is_consistent(tmp_path):
    server = fresh(Gathers(2, patient=False), weights="uniform")

    def work(name):
        for _ in range(40):
            ticket = server.dispatch(name)
            server.receive(ticket, Payload(ticket.message.start[None] + 1, 1)).check()

    threads = [threading.Thread(target=work, args=(name,)) for name in range(2)]
    for thread in threads:
        thread.start()
    versions = []
    while any(thread.is_alive() for thread in threads):
        server.save(tmp_path / FILE)
        state = Server.resume(tmp_path / FILE, SPACE, server.rule)._state.value
        versions.append(state.model_state.version)
        assert len(state.history) == 2 * state.model_state.version + len(state.model_state.state["waiting"])
        assert [row["version"] for row in state.history.values()][-1:] in ([], [state.model_state.version])
        assert len(state.tickets) <= 2
    assert versions == sorted(versions)


def test_fault_at_any_call_of_save_keeps_the_previous_checkpoint(tmp_path, monkeypatch):
    life = Life(fresh(AsyncBezier(0.5), memory_limit=50))
    life.go(6)
    life.server.save(tmp_path / FILE)
    old = (tmp_path / FILE).read_bytes()
    life.go(6)
    mine = content(life.server)

    def run(disk):
        (tmp_path / FILE).write_bytes(old)
        with monkeypatch.context() as patch:
            for module in (_io, tensor_file):
                patch.setattr(module, "os", disk)
            life.server.save(tmp_path / FILE)

    for disk, call, error in each(run, faults=(errno.ENOSPC, "torn")):
        assert content(life.server) == mine
        found = content(Server.resume(tmp_path / FILE, SPACE, life.server.rule))
        new = error is None and not disk.dead
        assert (found == mine) == new or (call in ("open", "fsync", "unlink", "close") and found == mine)


def killed(folder, context, seed):
    """Resume from the files of a process that was killed at some time, and compare the run with an uninterrupted run."""
    chance = random.Random(seed)
    path = folder / FILE
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=scripted_run.run_until_killed, args=(path, theirs), daemon=True)
    process.start()
    theirs.close()
    wanted = chance.randint(1, 25)
    # However slow the disk is, there is a file before the process is killed; the server does not wait for it.
    while mine.recv() < wanted or not path.exists():
        pass
    # Some way into what it does then: a write, as a rule.
    for _ in range(chance.randint(0, 20_000)):
        pass
    process.kill()
    process.join()
    server = Server.resume(
        path, Flat(scripted_run.LARGE), AsyncBezier(0.5), averaging=SWA(Flat(scripted_run.LARGE), start=3)
    )
    done = len(server.history)
    assert done > 0
    straight = large(0)
    script(straight, until=done + 3)
    script(server, until=done + 3)
    assert content(server) == content(straight)
    server.save(path)
    assert [name for name in os.listdir(folder) if not re.fullmatch(rf"{FILE}(\.1)?", name)] == []


def forks():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.federated.server.durability.scripted_run"])
    return context


def test_killed_run_resumes_bitwise_equal(tmp_path):
    for seed in range(5):
        (tmp_path / str(seed)).mkdir()
        killed(tmp_path / str(seed), forks(), seed)


@pytest.mark.soak
def test_a_hundred_killed_runs_resume_bitwise_equal(tmp_path):
    for seed in range(100, 200):
        (tmp_path / str(seed)).mkdir()
        killed(tmp_path / str(seed), forks(), seed)


def test_close_keeps_files_that_a_pending_checkpoint_needs(tmp_path, monkeypatch):
    go_on = threading.Event()
    kept = checkpoint._stored_trees

    def slow(state):
        assert go_on.wait(60)
        return kept(state)

    monkeypatch.setattr(checkpoint, "_stored_trees", slow)
    server = fresh(memory_limit=0, checkpoint=CheckpointPolicy(tmp_path / FILE, every_updates=2), spill=tmp_path)
    tickets = [server.dispatch("a")]
    for _ in range(2):
        tickets.append(server.dispatch("b"))
        server.receive(server.dispatch("c"), Payload(torch.ones(1, SIZE), 1)).check()
    closing = threading.Thread(target=server.close)
    closing.start()
    while not server._state.value.is_closed:
        time.sleep(0.001)
    go_on.set()
    closing.join(60)
    other = Server.resume(tmp_path / FILE, SPACE, Adds())
    assert set(other._state.value.tickets) == {ticket.id for ticket in tickets}
    del server, closing
    assert not [*tmp_path.glob("manifoldagg-*")]


def test_update_during_close_writes_no_empty_checkpoint(tmp_path, monkeypatch):
    seconds = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    server = fresh(checkpoint=CheckpointPolicy(tmp_path / FILE, every_seconds=1.0, keep=1))
    tickets = [server.dispatch("a") for _ in range(3)]
    server.receive(tickets[0], Payload(torch.ones(1, SIZE), 1)).check()
    server.save(tmp_path / FILE)
    validate = update_processor.validate_payload

    def closes(*given, **named):
        payload = validate(*given, **named)
        server.close()
        return payload

    seconds[0] = 2.0
    monkeypatch.setattr(update_processor, "validate_payload", closes)
    assert not server.receive(tickets[1], Payload(torch.ones(1, SIZE), 1)).accepted
    server._durability.checkpoints.finish()
    assert len(Server.resume(tmp_path / FILE, SPACE, Adds())._state.value.tickets) == 2


def test_replaced_wrapper_rule_starts_with_a_new_state(tmp_path):
    server = fresh(Momentum(FedAsync(0.5)))
    server.receive(server.dispatch("a"), Payload(torch.ones(1, SIZE), 1)).check()
    server.save(tmp_path / FILE)
    other = Server.resume(tmp_path / FILE, SPACE, Momentum(FedBuff(size=2)), replace=True)
    assert other.version == 1
    assert other.receive(other.dispatch("a"), Payload(torch.ones(1, SIZE), 1)).buffered


def test_weights_with_names_that_no_file_can_store_are_rejected(tmp_path):
    with pytest.raises(ArgumentError, match="client: expected a string or an integer"):
        fresh(weights={("ward", 7): 10}, checkpoint=CheckpointPolicy(tmp_path / FILE, every_updates=1))


def test_resume_rejects_averaging_with_other_options(tmp_path):
    server = fresh(averaging=SWA(SPACE, start=2))
    with pytest.raises(ArgumentError, match=r"state: expected the state of an SWA with .*'start': 3"):
        resumed(tmp_path, server, averaging=SWA(SPACE, start=3))


def test_receipt_without_cosine_is_restored_equal(tmp_path):
    server = fresh(FedAsync(0.5))
    ticket = server.dispatch("a")
    receipt = server.receive(ticket, Payload(torch.ones(1, SIZE), 1))
    assert receipt.cosine != receipt.cosine
    assert resumed(tmp_path, server).receive(ticket, Payload(torch.ones(1, SIZE), 1)) == receipt


def test_older_checkpoints_are_kept_without_hard_links(tmp_path, monkeypatch):
    def refuses(*names):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuses)
    server = fresh(checkpoint=CheckpointPolicy(tmp_path / FILE, every_updates=1))
    for _ in range(2):
        server.receive(server.dispatch("a"), Payload(torch.ones(1, SIZE), 1)).check()
        server._durability.checkpoints.finish()
    assert [Server.resume(tmp_path / name, SPACE, Adds()).version for name in (f"{FILE}.1", FILE)] == [1, 2]
