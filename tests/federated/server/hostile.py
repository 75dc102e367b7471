"""Tools for fault injection in a server.

They provide signals at every call, forks, detection of deadlocks, and servers with a history.
"""

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
    """Exception that a signal handler raises. It is not a `KeyboardInterrupt`, but must be handled like one."""


class Stuck(BaseException):
    """Exception that wakes a thread that waits forever."""


class _Signal(int):
    """Integer whose attribute `now` simulates a signal when it is read.

    The read itself is not a point at which Python handles signals.
    """

    now = property(_thread.interrupt_main)


_COMES = _Signal(COMES)


@cache
def _calling(code):
    """Return the offsets of the instructions of the package that call or jump back.

    Python handles signals after them and at the start of a function. The result is `None` for code of other packages.
    """
    if not code.co_filename.startswith(PACKAGE):
        return None
    ways = ("CALL", "JUMP_BACKWARD", "POP_JUMP_BACKWARD", "BEFORE_WITH")
    return frozenset(step.offset for step in dis.get_instructions(code) if step.opname.startswith(ways))


class _Tripwire:
    """Tracer that sends one signal before a call, and records the place of the call.

    Python handles the signal before the callee's first line, or after a call into C. The tracer stops after the signal.

    Args:
        past: the places of earlier signals. The signal is sent at a place that is not in this set.
        skipped: the number of such places that are skipped before the signal.
        deep: whether a place is the whole call stack instead of its last call.
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
    """Install a signal handler in a `with` block. An exception that a finaliser suppresses is not an error."""
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
    """Run `act` with a signal before its first call at a place that is not in `past`.

    Return this place, or `None` if there is none.
    """
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
    """Run `act` on a new scene for every place where the package makes a call, with a signal at this place.

    Args:
        make: a function that returns a new scene.
        act: a function of a scene, which the signal interrupts.
        check: a function of the scene that is called after `act`.
        handler: a function from a scene to the signal handler. By default, the signal raises `Interrupted`.
        places: options of the tracer.

    Returns:
        The number of places.
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
    """Wake the main thread with `Stuck` if it waits forever."""

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
    """Run `act` with a real signal after the given number of seconds, and return whether the signal interrupted it."""
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
    """Return or raise the result of `work()` in a forked child. If the child has to be killed, raise `Stuck`."""
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
    """A clock whose time the test sets."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@dataclass
class Scene:
    """A server with a history, the ticket under test, and the published updates."""

    server: Server
    ticket: Ticket
    told: list
    clock: Clock
    retain_base: bool
    is_spilled: bool

    def payload(self, ticket=None):
        """Return a payload with a displacement of 1."""
        start = (ticket or self.ticket).message.start
        return Payload(start[None] + 1, 1, base=None if self.retain_base else start)

    def receive(self, ticket=None):
        ticket = ticket or self.ticket
        return self.server.receive(ticket.id, self.payload(ticket))


def scene(rule=Adds, retain_base=True, **options):
    """Return a server at version 2. All three versions are in flight, and client states are stored."""
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
    """Return the visible state of a server. Trees of other clients may be in memory or in files."""
    memory = server.memory
    kept = memory["versions"] + memory["clients"] + memory["spilled"]
    return server.model.tolist(), server.version, repr(server.history), memory["state"], kept, server.rejected


def files(folder):
    """Return the spilled files of a server."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def quiet(scene):
    """Check that the server accepts another update, and that it stores only the model after all tickets end."""
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
