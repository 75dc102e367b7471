"""What a hostile hour brings: signals at every instant, forks, a watch for what waits for ever; and whom it meets."""

import _thread
import dis
import os
import pickle
import select
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch

import manifoldagg
from manifoldagg.federated import Payload, Server, Ticket
from manifoldagg.federated.server.events import Accepted
from manifoldagg.manifolds import Flat
from tests.federated.fingerprint import Adds, versions
from tests.server_options import grouped

P = 3
PATIENCE = 120.0
"""Seconds after which what waits is taken to wait for ever."""
PACKAGE = os.path.dirname(manifoldagg.__file__)
COMES, STUCK, RINGS = signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM


class Interrupted(BaseException):
    """What a handler raises; a `KeyboardInterrupt` in all but its name."""


class Stuck(BaseException):
    """Something waited for ever, and was woken."""


class _Signal(int):
    """Reading `now` is as if this signal had come: alone such a look is none of the points at which Python handles one."""

    now = property(_thread.interrupt_main)


_COMES = _Signal(COMES)


@cache
def _calling(code):
    """Where a frame of the package calls, or jumps back: Python handles a signal after these, and as a function begins."""
    if not code.co_filename.startswith(PACKAGE):
        return None
    ways = ("CALL", "JUMP_BACKWARD", "POP_JUMP_BACKWARD", "BEFORE_WITH")
    return frozenset(step.offset for step in dis.get_instructions(code) if step.opname.startswith(ways))


class _Tripwire:
    """A tracer that lets a signal come before a call, and says where; from then on nothing is traced.

    Python itself says when it handles the signal: before the callee's first line, or after a call into C.

    Args:
        past: where it has come already; it comes at a place that is not there.
        skipped: how many such places it passes before.
        deep: whether a place is a line of calls, and not the last of them alone.
    """

    def __init__(self, past, skipped=0, deep=False):
        self.past = past
        self.skipped = skipped
        self.deep = deep
        self.where = None

    def __call__(self, frame, event, arg):
        if event == "call":
            if _calling(frame.f_code) is None:
                return None
            frame.f_trace_lines = False
            frame.f_trace_opcodes = True
        elif event == "opcode" and frame.f_lasti in _calling(frame.f_code):
            place = self.place(frame)
            if place not in self.past:
                self.past.add(place)
                if self.skipped == 0:
                    # Else the tracer itself would be what handles it.
                    sys.settrace(None)
                    self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"
                    _COMES.now  # noqa: B018
                    return None
                self.skipped -= 1
        return self

    def place(self, frame):
        line = [(frame.f_code, frame.f_lasti)]
        while self.deep and (frame := frame.f_back) is not None and _calling(frame.f_code) is not None:
            line.append((frame.f_code, frame.f_lasti))
        return tuple(line)


@contextmanager
def handling(number, handler):
    """A handler of a signal for a while. What a finaliser swallows of it is no error: it was interrupted there."""
    before = signal.signal(number, handler)
    hook = sys.unraisablehook
    sys.unraisablehook = lambda given: None if isinstance(given.exc_value, Interrupted) else hook(given)
    try:
        yield
    finally:
        signal.signal(number, before)
        sys.unraisablehook = hook


def _interrupts(*_):
    raise Interrupted


def signalled(act, past, handler=_interrupts, **places):
    """Run `act` with a signal before its first call at a place that is not in `past`: where that was, if there is one."""
    wire = _Tripwire(past, **places)
    before = sys.gettrace()
    with handling(COMES, handler):
        try:
            sys.settrace(wire)
            act()
        except Interrupted:
            pass
        finally:
            sys.settrace(before)
    return wire.where


def everywhere(make, act, check, handler=lambda scene: _interrupts, **places):
    """Run `act` on a new scene with a signal at every place where the package calls, one each; `check(scene)` after it.

    Args:
        make: of a scene.
        act: on a scene.
        check: of a scene, afterwards.
        handler: of the signal, from a scene; without it the signal interrupts.
        places: as for the tripwire.

    Returns:
        How many places there were.
    """
    past = set()
    while True:
        scene = make()
        where = signalled(lambda scene=scene: act(scene), past, handler(scene), **places)
        if where is None:
            return len(past)
        try:
            check(scene)
        except BaseException as error:
            error.add_note(f"after a signal at {where}")
            raise


@contextmanager
def watched(patience=PATIENCE):
    """Wake the main thread where it waits for ever: `Stuck`."""

    def wakes(*_):
        raise Stuck("the main thread waits for itself")

    before = signal.signal(STUCK, wakes)
    watch = threading.Timer(patience, signal.pthread_kill, (threading.main_thread().ident, STUCK))
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()
        watch.join()
        signal.signal(STUCK, before)


def rung(act, seconds):
    """Run `act` with a real signal after so many seconds, and say whether that interrupted it."""
    # As long as nobody waits for the signal it may come late, into what follows.
    armed = False

    def rings(*_):
        nonlocal armed
        if armed:
            armed = False
            raise Interrupted

    with handling(RINGS, rings):
        try:
            armed = True
            signal.setitimer(signal.ITIMER_REAL, seconds)
            act()
            armed = False
        except Interrupted:
            return True
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    return False


def forked(work: Callable[[], object], patience=PATIENCE):
    """What `work()` returns, or raises, in a forked child; `Stuck` where the child has to be killed."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = (True, work())
        except BaseException as error:
            answer = (False, error)
        with os.fdopen(into, "wb") as pipe:
            pickle.dump(answer, pipe)
        os._exit(0)
    os.close(into)
    with os.fdopen(out, "rb") as pipe:
        ready, _, _ = select.select([pipe], [], [], patience)
        if not ready:
            os.kill(child, signal.SIGKILL)
        told = pipe.read()
    os.waitpid(child, 0)
    if not ready:
        raise Stuck("a forked child waits for ever")
    fine, answer = pickle.loads(told)
    if not fine:
        raise answer
    return answer


class Clock:
    """Seconds as a test sets them."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@dataclass
class Scene:
    """A server with a past, the ticket that a test is about, and what was told of updates."""

    server: Server
    ticket: Ticket
    told: list
    clock: Clock
    retain_base: bool
    is_spilled: bool

    def payload(self, ticket=None):
        """A displacement of one."""
        start = (ticket or self.ticket).message.start
        return Payload(start[None] + 1, 1, base=None if self.retain_base else start)

    def receive(self, ticket=None):
        ticket = ticket or self.ticket
        return self.server.receive(ticket.id, self.payload(ticket))


def scene(rule=Adds, retain_base=True, **options):
    """A server at version 2, of which all three versions are out, and client memory is kept."""
    told = []
    clock = Clock()
    start = torch.zeros(P, dtype=torch.float64)
    server = Server(Flat(P), rule(), start, clock=clock, **grouped(timeout=60.0, **options))
    server.on_event(lambda event: told.append(dict(event.row)) if isinstance(event, Accepted) else None)
    made = Scene(server, None, told, clock, retain_base, options.get("memory_limit") == 0)
    server.dispatch("early", retain_base=retain_base)
    for client in "ab":
        assert made.receive(server.dispatch(client, retain_base=retain_base)).accepted
    made.ticket = server.dispatch("a", retain_base=retain_base)
    return made


def outside(server):
    """What a server shows. What is kept for others may be in memory or in files."""
    memory = server.memory
    kept = memory["versions"] + memory["clients"] + memory["spilled"]
    return server.model.tolist(), server.version, repr(server.history), memory["state"], kept, server.rejected


def files(folder):
    """What a server has spilled."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def quiet(scene):
    """Nothing is stuck and nothing held: another update is taken, and when every ticket is gone only the model is kept."""
    server = scene.server
    assert server._updates.lock.tickets == []
    assert scene.receive(server.dispatch("next", retain_base=scene.retain_base)).accepted
    # Of what was interrupted while it was told, perhaps twice.
    assert list(dict.fromkeys(map(repr, scene.told))) == [*map(repr, server.history)]
    scene.clock.now += 61
    server.expire()
    assert versions(server) == [server.version]
    assert server.memory["versions"] == 0
    if scene.is_spilled:
        assert server.memory["clients"] == 0
