"""A scripted run of a server.

The next event depends only on the number of past events, so another process can continue the run.
"""

import signal
from dataclasses import replace

import torch

from manifoldagg.averaging import SWA
from manifoldagg.federated import CheckpointPolicy, MemoryPolicy, Payload, Server
from manifoldagg.federated.rules import AsyncBezier
from manifoldagg.federated.types import extra_fields
from manifoldagg.manifolds import Flat
from tests.federated.fingerprint import bits
from tests.server_options import grouped
from tests.support import draw

SIZE = 6
CLIENTS = ["heavy", 7, "light"]
LAG = 4
"""So many tickets are out when the first is answered."""


def payload(rule, ticket, seed):
    """Return a payload for a message: points near the start model, and everything that the rule requires."""
    start = ticket.message.start
    tensors, names = extra_fields(rule)
    count = getattr(
        rule, "vertices", 1 if getattr(rule, "single_point", "AsyncCurve" not in type(rule).__name__) else 2
    )

    def noise(i, k):
        return draw(seed + i, *([] if k is None else [k]), *start.shape, dtype=start.dtype)

    brought = {name: noise(i, k) for i, (name, k) in enumerate(tensors.items(), 100)}
    numbers = {name: ticket.message.numbers.get(name, 1.0) for name in names}
    return Payload(start + 0.1 * noise(0, count), 1 + seed % 9, brought, numbers)


def carrying(rule, ticket, seed):
    """Return a payload with buffers, except the counters of batches, which the server does not update."""
    buffers = {
        name: x + draw(seed, *x.shape, dtype=x.dtype).abs()
        for name, x in ticket.message.buffers.items()
        if "tracked" not in name
    }
    return replace(payload(rule, ticket, seed), buffers=buffers)


class Wall:
    """A clock whose time the test sets."""

    def __init__(self, now=0.0):
        self.now = now

    def __call__(self):
        return self.now


class Life:
    """A run that alternates dispatches and late updates.

    One ticket in seven is dropped, and one update in five is invalid.
    """

    def __init__(self, server):
        self.server = server
        self.out = []
        self.events = 0

    def go(self, events, answer=payload):
        """Run the given number of events, and return the representations of the receipts."""
        told = []
        for _ in range(events):
            i = self.events
            self.events += 1
            self.out.append(self.server.dispatch(CLIENTS[(i * i) % len(CLIENTS)]))
            if len(self.out) < LAG:
                continue
            ticket = self.out.pop(i % LAG)
            if i % 7 == 6:
                self.server.drop(ticket)
                continue
            if i % 5 == 4:
                bad = Payload(torch.full_like(ticket.message.start, torch.nan)[None], 1)
                told.append(repr(self.server.receive(ticket, bad)))
            told.append(repr(self.server.receive(ticket, answer(self.server.rule, ticket, i))))
        return told

    def on(self, server):
        """Continue the same run on another server."""
        other = Life(server)
        other.out = [*self.out]
        other.events = self.events
        return other


def content(server):
    """Return the whole state of a server as comparable values, with tickets but without their ids."""
    state = server._state.value
    return {
        "model_state": bits(state.model_state),
        "weights": state.weights,
        "kept": {key: (holders, bits(state.store.load(key))) for key, (_, holders) in state.store.entries.items()},
        "tickets": [(ticket.client, ticket.version, ticket.base_key) for ticket in state.tickets.values()],
        "closed_tickets": [repr(closed) for closed in state.closed_tickets.values()],
        "history": bits(server.history),
        "updates": server.updates,
        "rejected": server.rejected,
        "averaged": bits(server.averaged()),
        "limits": state.limits,
    }


LARGE = 2**14
"""So large that writing it takes about as long as an update."""


def large(updates, **options):
    """Return a server for `script`."""
    space = Flat(LARGE)
    return Server(
        space,
        AsyncBezier(0.5),
        torch.zeros(LARGE),
        averaging=SWA(space, start=3),
        memory=MemoryPolicy(limit=LARGE * 10),
        **grouped(**options),
    )


def script(server, until=None, told=lambda updates: None):
    """Run clients that return updates in the order of their dispatch.

    The history of the server determines where the run continues.
    """
    for i in range(len(server.history), until or 10**9):
        while len(server._state.value.tickets) < LAG:
            issued = i + len(server._state.value.tickets)
            server.dispatch(issued % 5)
        oldest = next(iter(server._state.value.tickets))
        server.receive(oldest, Payload(draw(i, 2, LARGE, dtype=torch.float32), 1 + i % 3)).check()
        told(i + 1)


def run_until_killed(path, channel):
    """Run the script in a separate process, with a checkpoint after every update."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    script(large(0, checkpoint=CheckpointPolicy(path, every_updates=1)), told=channel.send)
