"""Tests with a signal at every call of a server. The signal interrupts, calls the server, collects garbage or forks.

`test_hostile_hour.py` runs this file in a process without the shape checks, because most calls would be calls of these
checks.
"""

import gc
import logging
import random
import time
from contextlib import suppress

import pytest
import torch

from manifoldagg.averaging import SWA
from manifoldagg.errors import ArgumentError
from manifoldagg.federated import InitialModel, Payload, Server
from manifoldagg.manifolds import Flat, ParameterSpace
from tests.federated.fingerprint import Adds, Gathers
from tests.federated.server.durability.spilled import mapped, open_files
from tests.federated.server.hostile import (
    PATIENCE,
    P,
    Scene,
    everywhere,
    files,
    forked,
    outside,
    quiet,
    rung,
    scene,
    watched,
)


@pytest.fixture(autouse=True)
def watchful(caplog, request):
    """Wake every thread that waits forever. Other tests check what the server logs."""
    patience = PATIENCE * (60 if "soak" in request.keywords else 1)
    with caplog.at_level(logging.CRITICAL, "manifoldagg"), watched(patience):
        yield


FORMS = {
    "plain": {},
    "averaged": {"averaging": lambda: SWA(Flat(P))},
    "buffered": {"rule": lambda: Gathers(2)},
    "narrow": {"base_dtype": torch.bfloat16},
    "brought": {"retain_base": False},
    "spilled": {"memory_limit": 0},
}


def formed(form, folder):
    """Return one of the kinds of scenes."""
    options = dict(FORMS[form])
    if "averaging" in options:
        options["averaging"] = options["averaging"]()
    if "memory_limit" in options:
        options["spill"] = folder
    return scene(**options)


def interrupted_receives(form, folder, **places):
    """Interrupt `receive` at every point, and check that a retry returns the receipt of the single applied update."""
    plain = formed(form, folder)
    receipt = plain.receive()
    expected = outside(plain.server)
    plain.server.close()

    def check(scene):
        for _ in range(2):
            assert repr(scene.receive()) == repr(receipt)
            assert outside(scene.server) == expected
        quiet(scene)
        scene.server.close()

    assert everywhere(lambda: formed(form, folder), Scene.receive, check, **places) > 200
    assert mapped(folder) == open_files(folder) == files(folder) == []


@pytest.mark.parametrize("form", FORMS)
def test_interrupted_receive_applies_update_once(form, tmp_path):
    # What differs in the others is a few lines.
    interrupted_receives(form, tmp_path, skipped=0 if form in ("plain", "averaged", "spilled") else 3)


@pytest.mark.soak
@pytest.mark.parametrize("form", FORMS)
def test_interrupted_receive_applies_update_once_on_every_call_path(form, tmp_path):
    interrupted_receives(form, tmp_path, deep=True)


def test_interrupted_dispatch_retains_only_expiring_tickets():
    def check(scene):
        assert scene.receive(scene.server.dispatch("c")).accepted
        quiet(scene)

    assert everywhere(scene, lambda scene: scene.server.dispatch("c"), check) > 20


def test_interrupted_drop_is_complete_or_repeatable():
    def check(scene):
        for _ in range(2):
            with suppress(ArgumentError):
                scene.server.drop(scene.ticket.id)
        assert scene.receive().reason.startswith("ticket: unknown")
        quiet(scene)

    assert everywhere(scene, lambda scene: scene.server.drop(scene.ticket.id), check) > 2


def test_interrupted_expire_is_repeatable():
    def late():
        made = scene()
        made.clock.now = 61.0
        return made

    def check(scene):
        scene.server.expire()
        assert not scene.receive().accepted
        quiet(scene)

    assert everywhere(late, lambda scene: scene.server.expire(), check) > 2


def test_interrupted_close_is_repeatable(tmp_path):
    def check(scene):
        scene.server.close()
        assert mapped(tmp_path) == open_files(tmp_path) == []
        assert scene.server.model.tolist() == [2.0] * P

    assert everywhere(lambda: scene(memory_limit=0, spill=tmp_path), lambda scene: scene.server.close(), check) > 2


def test_interrupted_save_leaves_only_a_complete_file(tmp_path):
    path = tmp_path / "server"
    made = scene()
    made.server.save(path)
    version = made.server.version
    assert made.receive().accepted

    def check(made):
        # Older and newer are whole alike; a temporary file goes with the next save at the latest.
        resumed = Server.resume(path, Flat(P), Adds(), clock=made.clock)
        assert resumed.version in (version, version + 1)
        assert resumed.model.tolist() == [float(resumed.version)] * P
        made.server.save(path)
        assert files(tmp_path) == [path]

    everywhere(lambda: made, lambda made: made.server.save(path), check, skipped=7)


def bombarded(count):
    """Interrupt `receive` by a timer at random times.

    Return how many calls applied an update twice or lost its receipt.
    """
    dice = random.Random(0)
    made = scene(history_size=None)
    taken = 2
    hits = 0
    started = time.perf_counter()
    assert made.receive().accepted
    span = 2 * (time.perf_counter() - started)
    taken += 1
    while hits < count:
        ticket = made.server.dispatch("a")
        hits += rung(lambda ticket=ticket: made.receive(ticket), dice.uniform(1e-6, span))
        receipt = made.receive(ticket)
        taken += 1
        assert receipt.accepted
        assert (receipt.version, made.server.version) == (taken, taken)
        assert made.server.model.tolist() == [float(taken)] * P
    quiet(made)


def test_timer_signals_during_receive_apply_each_update_once():
    bombarded(300)


@pytest.mark.soak
def test_thousands_of_timer_signals_during_receive_apply_each_update_once():
    bombarded(20_000)


ACTS = {
    "receive": Scene.receive,
    "dispatch": lambda scene: scene.server.dispatch("c"),
    "drop": lambda scene: scene.server.drop(scene.ticket.id),
    "expire": lambda scene: scene.server.expire(),
}


def crowded():
    """Return a scene with one more ticket in flight."""
    made = scene()
    made.other = made.server.dispatch("other")
    return made


@pytest.mark.parametrize("act", ACTS)
def test_signal_handler_may_read_drop_and_dispatch_at_any_point(act):
    undisturbed = crowded()
    before = outside(undisturbed.server)
    ACTS[act](undisturbed)
    after = outside(undisturbed.server)

    def handler(made):
        def asks(*_):
            # What it reads is never in between.
            assert outside(made.server) in (before, after)
            made.server.drop(made.other.id)
            made.server.drop(made.server.dispatch("third").id)

        return asks

    def check(made):
        with pytest.raises(ArgumentError, match="ticket: unknown"):
            made.server.drop(made.other.id)
        assert made.server.version == undisturbed.server.version
        quiet(made)

    everywhere(crowded, ACTS[act], check, handler)


def test_signal_handler_may_read_a_state_dict_during_receive():
    net = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(1))
    space = ParameterSpace.of(net)

    def make():
        server = Server(space, Adds(), InitialModel(space.point(net), space.buffers(net)))
        return server, server.dispatch("a")

    def act(made):
        server, ticket = made
        buffers = {name: torch.ones_like(x) for name, x in ticket.message.buffers.items()}
        assert server.receive(ticket.id, Payload(ticket.message.start[None] + 1, 1, buffers=buffers)).accepted

    def handler(made):
        def reads(*_):
            moved = made[0].state_dict()
            # Parameters and buffers of one version.
            assert (moved["0.bias"] > net.state_dict()["0.bias"]).all() == (moved["1.running_mean"] == 1).all()

        return reads

    everywhere(make, act, lambda made: made[0].close(), handler, skipped=4)


@pytest.mark.parametrize("act", ACTS)
def test_signal_handler_that_receives_gets_a_receipt_or_an_error(act):
    def make():
        made = crowded()
        made.errors = []
        return made

    def handler(made):
        def receives(*_):
            try:
                made.receive(made.other)
            except ArgumentError as error:
                made.errors.append(error)

        return receives

    def check(made):
        assert all("expected a call outside of an update" in str(error) for error in made.errors)
        assert made.receive(made.other).accepted
        assert made.server.model.tolist() == [float(made.server.version)] * P
        assert made.server.version == len(made.server.history) == 3 + (act == "receive")
        quiet(made)

    everywhere(make, ACTS[act], check, handler)


class Drops:
    """Object that drops its ticket and dispatches another one when it is garbage collected."""

    def __init__(self, server):
        self.server = server
        self.ticket = server.dispatch("mortal")
        self.cycle = self

    def __del__(self):
        self.server.drop(self.ticket.id)
        self.server.drop(self.server.dispatch("heir").id)


@pytest.mark.parametrize("act", ACTS)
def test_finaliser_may_drop_a_ticket_during_garbage_collection(act):
    def make():
        made = scene()
        made.mortal = Drops(made.server).ticket
        return made

    def check(made):
        with pytest.raises(ArgumentError, match="ticket: unknown"):
            made.server.drop(made.mortal.id)
        quiet(made)

    gc.collect()
    gc.disable()
    try:
        everywhere(make, ACTS[act], check, lambda made: lambda *_: gc.collect(1), skipped=4)
    finally:
        gc.enable()


def test_garbage_collection_at_every_allocation_is_safe():
    """The garbage collector itself starts the collections."""
    made = scene()
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 2, 2)
    try:
        for _ in range(30):
            Drops(made.server)
            ticket = made.server.dispatch("a")
            Drops(made.server)
            assert made.receive(ticket).accepted
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert made.server.version == 32
    quiet(made)


def test_fork_at_any_point_of_an_update_is_safe():
    """The child reads the model of either version, and the parent is not affected."""

    def handler(made):
        def forks(*_):
            model, version = forked(lambda: (made.server.model.tolist(), made.server.version))
            assert model == [float(version)] * P

        return forks

    def check(made):
        assert made.receive().accepted
        quiet(made)
        made.server.close()

    everywhere(scene, Scene.receive, check, handler, skipped=9)
