"""Random run of a server with clients that join late, leave, return old tickets, fail, and send invalid updates."""

from dataclasses import dataclass

import torch

from manifoldagg.federated import Message, Payload, Receipt, Server
from manifoldagg.manifolds import Flat
from tests.server_options import grouped
from tests.support import draw

SIZE = 6
SPACE = Flat(SIZE)


@dataclass(frozen=True)
class Sent:
    """Event: the server dispatched a task to a client."""

    client: int
    message: Message


@dataclass(frozen=True)
class Came:
    """Event: the server received an update.

    It contains the client's start model and points, and the server's model after the update.
    """

    client: int
    base: torch.Tensor
    point: torch.Tensor
    staleness: int
    receipt: Receipt
    model: torch.Tensor


def life(rule, seed, events=40, clients=5, **options):
    """Return the events of a random run of a server, in order.

    Client i joins at event 6 i, and client 1 gets its last task in the middle of the run. One ticket in ten is dropped.
    One update in ten is NaN, and the server must reject it. `options` are those of the server.
    """
    generator = torch.Generator().manual_seed(seed)
    server, out, happened = Server(SPACE, rule, draw(seed, SIZE), **grouped(**options)), [], []

    def pick(count):
        return int(torch.randint(count, (), generator=generator))

    for event in range(events):
        here = [i for i in range(clients) if event >= 6 * i and not (i == 1 and event > events // 2)]
        if len(out) < 2 or pick(2):
            ticket = server.dispatch(client := here[pick(len(here))])
            out.append((client, ticket))
            happened.append(Sent(client, ticket.message))
            continue
        client, ticket = out[at := pick(len(out))]
        fate = pick(10)
        if fate == 0:
            server.drop(ticket.id)
        else:
            base = ticket.message.start
            point = base + draw(seed + event + 1, SIZE)
            staleness, before = server.version - ticket.version, server.model
            if fate == 1:
                assert not server.receive(ticket.id, Payload(torch.full_like(point, torch.nan)[None], 1)).accepted
                assert torch.equal(server.model, before)
            receipt = server.receive(ticket.id, Payload(point[None], samples=1 + pick(9)))
            assert receipt.accepted
            happened.append(Came(client, base, point, staleness, receipt, server.model))
        out.pop(at)
    return happened


def arrivals(rule, seed, **options):
    """Return the updates of a random run."""
    return [event for event in life(rule, seed, **options) if isinstance(event, Came)]
