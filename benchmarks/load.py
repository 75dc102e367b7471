"""A load test of the server with a million messages, most of which are invalid.

The benchmark checks which messages are accepted, measures the cost of a message, and checks that the memory of the
server does not grow. Messages are passed to `receive` as Python values, or as bytes through `wire.ticket_of` and
`wire.unpack`. They contain these faults, among others:

- replayed and late messages, unknown tickets and unknown clients
- NaN, infinite and huge numbers, wrong shapes and dtypes, missing fields, and objects whose methods fail
- truncated, altered and forged bytes, huge declared sizes, and compression bombs

Three servers receive messages: one from a single thread; one from four threads, with a limit on the queue; and one with
a journal and checkpoints, which then resumes from its files. Next to each server, a second server receives only the
accepted updates, in the order of the first server's events. At the end, the states of both servers must be
bit-identical.

The table shows the number of messages and of accepted messages of each kind, and the processor time per message without
its construction. The plot shows the resident memory. The benchmark fails in these cases:

- `receive` raises an exception.
- An invalid message is accepted, or a valid message is rejected.
- The states of the two servers differ.
- Files remain open.
- The memory of the process exceeds its value after the first twentieth of the messages by more than `BOUND`.
"""

import argparse
import gc
import json
import math
import platform
import random
import statistics
import tempfile
import threading
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import zstandard
from resident import descriptors, megabytes, resident
from timing import machine

from manifoldagg import ParameterSpace, Server, tensor_file, wire
from manifoldagg._io import new_figure
from manifoldagg.averaging import SWA
from manifoldagg.errors import ArgumentError, BusyError, WireError
from manifoldagg.federated import (
    CheckpointPolicy,
    Durability,
    Journal,
    MemoryPolicy,
    Message,
    Payload,
    Receipt,
    ServerLimits,
    Ticket,
    UpdateLimits,
)
from manifoldagg.federated.rules import MasFL
from manifoldagg.federated.server.events import Accepted, Dispatched, Dropped, Event, Expired, Rejected
from manifoldagg.tensor_file import dumps, with_length

HERE = Path(__file__).parent
BOUND = 128e6
"""The largest growth of the process in bytes, relative to its size after the first twentieth of the messages.

Each of four threads may hold a parsed header of two megabytes, the longest header of this benchmark."""
FEW = 8
"""The largest number of additional open files at the end."""
CLIENTS = 50
POOL = 40
"""The number of tickets of a message source. The next ticket to use is drawn at random."""
STALE = 30
"""The largest staleness of an accepted update, in versions."""
TIMEOUT = 50.0
ROUND = 500
"""The number of messages between two measurements, and between two updates of the second server."""
FREED = torch.ones(1, 990)
FREED.untyped_storage().resize_(0)
NONE = (FREED, torch.nested.nested_tensor([torch.ones(990)], layout=torch.jagged))
"""Tensors without values or without a shape."""
TAKEN, REFUSED, AGAIN, EITHER = "taken", "refused", "the receipt again", "either"


class Seconds:
    """A clock that returns a settable time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Hostile(Mapping):  # type: ignore[type-arg]
    """A mapping whose methods raise different exceptions."""

    def __getitem__(self, name: str) -> Any:
        raise RecursionError(name)

    def __iter__(self) -> Iterator[str]:
        raise OSError("no names today")

    def __len__(self) -> int:
        raise MemoryError

    def __repr__(self) -> str:
        raise ZeroDivisionError


class Odd(float):
    """A number that has a different value at each access."""

    def __float__(self) -> float:
        raise KeyError("float")

    def __index__(self) -> int:
        raise AttributeError("index")


class Equal:
    """An object that equals everything and whose hash raises an exception."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        raise SystemError("hash")


@dataclass(frozen=True)
class Sent:
    """A message: its ticket, its content, the client if declared, and the expected result."""

    ticket: Any
    brought: Any
    expected: str
    client: Any = None
    data: bytes | None = None


def model() -> torch.nn.Module:
    """Return a model with 990 parameters and three buffers."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.BatchNorm1d(30))


LIMITS = ServerLimits(
    UpdateLimits(max_norm=1e6, norm_factor=50.0, samples_factor=5.0), history_size=1000, receipt_cache_size=5000
)


def made(
    space: ParameterSpace, clock: Seconds, limits: Mapping[str, Any] = MappingProxyType({}), **options: Any
) -> Server:
    """Return a server with all features, with some limits replaced."""
    return Server.of(
        model(),
        MasFL(),
        averaging=SWA(space, cycle=3),
        clock=clock.__call__,
        limits=replace(LIMITS, **limits),
        **options,
    )


class Twin:
    """A second server that receives only the accepted updates of a first server, in the same order.

    Args:
        server: the first server.
        own: the second server.
    """

    def __init__(self, server: Server, own: Server) -> None:
        self.own = own
        self.brought: dict[str, Any] = {}
        self._events: list[Event] = []
        self._names: dict[str, str] = {}
        server.on_event(self._events.append)

    def catch_up(self) -> None:
        """Replay all events since the last call. The first server must be idle."""
        events = [*self._events]
        self._events.clear()
        starts = defaultdict(list)
        for event in events:
            if isinstance(event, Dispatched):
                starts[event.start_version].append(event)
        for event in events:
            # A client that was dispatched during an update started from the version before this update.
            for left in starts.pop(self.own.version, ()):
                self._names[left.ticket] = self.own.dispatch(left.client).id
            if isinstance(event, Accepted):
                receipt = self.own.receive(self._names.pop(event.ticket), self.brought.pop(event.ticket))
                if repr(receipt) != repr(event.receipt):
                    raise RuntimeError(f"receipt: expected {event.receipt}, got {receipt}")
            elif isinstance(event, Dropped | Expired) or (isinstance(event, Rejected) and event.is_final):
                self.own.drop(self._names.pop(str(event.ticket)))
        for left in starts.pop(self.own.version, ()):
            self._names[left.ticket] = self.own.dispatch(left.client).id
        if starts:
            raise RuntimeError("somebody left with a version that never was")


def known(server: Server) -> bytes:
    """Return the state of a server without identifiers, rejections and storage locations."""
    tree: dict[str, Any] = dict(server.snapshot().tree())
    for name in ("options", "clock", "time", "closed_tickets", "rejected", "journal"):
        del tree[name]
    tree["stored_trees"] = sorted(tree["stored_trees"], key=lambda pair: repr(pair[0]))
    tree["tickets"] = sorted(repr(ticket[1:3]) for ticket in tree["tickets"])
    tree["history"] = server.history
    return bytes(dumps("known", tree))


class Source:
    """A generator of messages.

    Args:
        server: the server that receives the messages.
        seed: the seed of the random numbers.
    """

    def __init__(self, server: Server, space: ParameterSpace, seed: int) -> None:
        self.server = server
        self.space = space
        self.random = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.moves = [0.1 * torch.randn(space.layout.size, generator=generator) for _ in range(32)]
        self.tickets: list[Ticket] = []
        self.old: deque[Ticket] = deque(maxlen=100)
        self.answered: deque[tuple[str, str]] = deque(maxlen=100)
        self.kinds: dict[str, tuple[int, Callable[[], Sent]]] = {
            "valid": (25, lambda: self.value(self.payload, TAKEN)),
            "valid, as bytes": (15, lambda: self.bytes_of(self.payload, TAKEN)),
            "valid, compressed": (4, lambda: self.bytes_of(self.payload, TAKEN, compress=True)),
            "valid, odd tensors": (4, lambda: self.value(self.odd, TAKEN)),
            "sent again": (30, self.again),
            "sent again, as bytes": (10, self.again_as_bytes),
            "ticket given back": (8, self.dropped),
            "ticket unknown": (15, self.unknown),
            "ticket of another": (10, self.stranger),
            "too late": (4, self.late),
            "numbers": (30, lambda: self.value(self.numbers, REFUSED)),
            "shapes": (30, lambda: self.value(self.shapes, REFUSED)),
            "dtypes": (20, lambda: self.value(self.dtypes, REFUSED)),
            "no tensors": (20, lambda: self.value(self.foreign, REFUSED)),
            "samples": (20, lambda: self.value(self.samples, REFUSED)),
            "fields": (30, lambda: self.value(self.fields, REFUSED)),
            "no payload": (15, self.nothing),
            "bytes: bad values": (15, lambda: self.bytes_of(self.numbers, REFUSED)),
            "bytes: cut": (25, self.cut),
            "bytes: altered": (30, self.altered),
            "bytes: forged header": (30, self.forged),
            "bytes: huge sizes": (20, self.sizes),
            "bytes: bombs": (8, self.bombs),
            "bytes: noise": (15, self.noise),
            "bytes: other kinds": (10, self.others),
            "bytes: long headers": (0.1, self.headers),
        }

    def fill(self) -> None:
        """Dispatch tickets to all clients."""
        for client in range(CLIENTS):
            self.tickets.append(self.server.dispatch(client))

    def next(self) -> tuple[str, Sent]:
        """Return the kind of the next message, and the message."""
        (name,) = self.random.choices([*self.kinds], [often for often, _ in self.kinds.values()])
        return name, self.kinds[name][1]()

    def ticket(self) -> Ticket:
        """Return a random ticket in flight. The ticket stays in the pool until `used` is called."""
        while len(self.tickets) < POOL:
            try:
                self.tickets.append(self.server.dispatch(self.random.randrange(CLIENTS)))
            except BusyError:
                self.server.drop(self.old.popleft())
        if self.random.random() < 0.01:
            self.old.append(self.tickets.pop(self.random.randrange(len(self.tickets))))
            return self.ticket()
        return self.random.choice(self.tickets)

    def used(self, ticket: str, receipt: Receipt) -> None:
        """Record that an update on a ticket was accepted."""
        self.lost(ticket)
        self.answered.append((ticket, repr(receipt)))

    def lost(self, ticket: str) -> None:
        """Record that a ticket has ended."""
        self.tickets = [one for one in self.tickets if one.id != ticket]

    # Valid messages.

    def payload(self, ticket: Ticket) -> Payload:
        """Return a valid payload."""
        message = ticket.message
        move = self.random.choice(self.moves)
        return Payload(
            (message.start + move)[None],
            self.random.randint(1, 50),
            {"gradient": -move},
            {"opening": message.numbers.get("opening", 1.0)},
            buffers={name: x + 1 for name, x in message.buffers.items()},
        )

    def odd(self, ticket: Ticket) -> Payload:
        """Return a valid payload whose tensors have unusual strides or require gradients."""
        right = self.payload(ticket)
        points = right.points
        wide = torch.stack([points, points], -1)
        ways = (points.clone().requires_grad_(), wide[..., 0], torch.nn.Parameter(points), points[0].expand(1, -1))
        return replace(right, points=self.random.choice(ways), samples=np.int64(right.samples))

    def value(self, make: Callable[[Ticket], Any], expected: str) -> Sent:
        """Return a message with a Python value."""
        ticket = self.ticket()
        return Sent(ticket.id, make(ticket), expected)

    def bytes_of(self, make: Callable[[Ticket], Payload], expected: str, **options: Any) -> Sent:
        """Return a message with the bytes of a value."""
        ticket = self.ticket()
        return self.sent(wire.pack(make(ticket), ticket=ticket, **options), expected)

    def sent(self, data: bytes, expected: str) -> Sent:
        """Return a message with the given bytes."""
        return Sent(None, partial(wire.unpack, data), expected, data=data)

    def data(self, **options: Any) -> bytearray:
        """Return the bytes of a valid payload."""
        ticket = self.ticket()
        return bytearray(wire.pack(self.payload(ticket), ticket=ticket, **options))

    # Messages on invalid tickets.

    def again(self) -> Sent:
        if not self.answered:
            return self.value(self.payload, TAKEN)
        ticket, receipt = self.random.choice(self.answered)
        kept = self.random.choice((self.payload, self.numbers))
        return Sent(ticket, kept(self.ticket()), AGAIN, data=None, client=("receipt", receipt))

    def again_as_bytes(self) -> Sent:
        if not self.answered:
            return self.value(self.payload, TAKEN)
        ticket, receipt = self.random.choice(self.answered)
        data = wire.pack(self.payload(self.ticket()), ticket=ticket)
        return Sent(None, partial(wire.unpack, data), AGAIN, ("receipt", receipt), data)

    def dropped(self) -> Sent:
        ticket = self.ticket()
        self.lost(ticket.id)
        with suppress(ArgumentError):  # it has expired
            self.server.drop(ticket)
        return Sent(ticket.id, self.payload(ticket), REFUSED)

    def unknown(self) -> Sent:
        names = (f"{self.random.getrandbits(128):032x}", "", None, 3, b"\0", [], {}, "x" * 10_000, math.nan, Equal())
        made_up = Ticket("made up", 10**30, Message(torch.zeros(1)))
        return Sent(self.random.choice((*names, made_up)), self.payload(self.ticket()), REFUSED)

    def stranger(self) -> Sent:
        ticket = self.ticket()
        client = self.random.choice(("liar", -1, [], {}, math.nan, torch.ones(2), Equal(), Hostile(), None))
        return Sent(ticket.id, self.payload(ticket), REFUSED, ("client", client))

    def late(self) -> Sent:
        if not self.old or self.server.version - self.old[0].version <= STALE:
            return self.value(self.payload, TAKEN)
        ticket = self.old.popleft()
        return Sent(ticket.id, self.payload(ticket), REFUSED)

    # Faults in values.

    def numbers(self, ticket: Ticket) -> Payload:
        right = self.payload(ticket)
        points = right.points.clone()
        bad = self.random.choice((math.nan, math.inf, -math.inf, 3e38, -1e30))
        if self.random.random() < 0.3:
            gradient = right.tensors["gradient"].clone()
            gradient[self.random.randrange(len(gradient))] = bad if abs(bad) == math.inf else math.nan
            return replace(right, tensors={"gradient": gradient})
        points[0, self.random.randrange(points.shape[1])] = bad
        return replace(right, points=points)

    def shapes(self, ticket: Ticket) -> Payload:
        right = self.payload(ticket)
        x = right.points
        ways = (
            *(x[0], x[None], x[:, :-1], x[:0], x.expand(17, -1), x.expand(10**6, -1), x.new_zeros(1, 0), x.sum()),
            *(torch.cat([x, x], 1), x.T, x.new_zeros(1, 1).expand(1, 10**12)),
        )
        return replace(right, points=self.random.choice(ways))

    def dtypes(self, ticket: Ticket) -> Payload:
        right = self.payload(ticket)
        some = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8)
        if self.random.random() < 0.3:
            return replace(right, tensors={"gradient": right.tensors["gradient"].to(self.random.choice(some))})
        return replace(right, points=right.points.to(self.random.choice(some)))

    def foreign(self, ticket: Ticket) -> Payload:
        right = self.payload(ticket)
        x = right.points
        ways = (None, 3, "points", [1.0], x.numpy(), b"\0" * 4000, x.to_sparse(), x.to("meta"), *NONE, Hostile())
        return replace(right, points=self.random.choice(ways))

    def samples(self, ticket: Ticket) -> Payload:
        some = (0, -1, True, 2**70, 10**5000, math.nan, 1.5, "10", None, [], Odd(3), torch.ones(2), Hostile(), Equal())
        return replace(self.payload(ticket), samples=self.random.choice(some))

    def fields(self, ticket: Ticket) -> Payload:
        right = self.payload(ticket)
        x = right.tensors["gradient"]
        ways: tuple[dict[str, Any], ...] = (
            *({"tensors": {}}, {"tensors": None}, {"tensors": [x]}, {"tensors": Hostile()}, {"tensors": {3: x}}),
            *({"tensors": {"gradient": x, "more": x}}, {"tensors": {"x" * 9999: x}}, {"tensors": {"gradient": 1.0}}),
            *({"numbers": {}}, {"numbers": {"opening": math.nan}}, {"numbers": {"opening": 10**400}}),
            *({"numbers": {"opening": "1"}}, {"numbers": {"opening": Odd(1)}}, {"numbers": Hostile()}),
            *({"numbers": {f"n{i}": 1.0 for i in range(100)}}, {"buffers": {}}, {"buffers": None}),
            *({"buffers": dict.fromkeys(right.buffers, x)}, {"buffers": Hostile()}, {"base": right.points[0]}),
            *({"buffers": {name: y.to(torch.float16) for name, y in right.buffers.items()}}, {"base": 3}),
        )
        return replace(right, **self.random.choice(ways))

    def nothing(self) -> Sent:
        def fails() -> Any:
            raise WireError("wire: nothing came")

        ways = (None, 3, {}, [], "payload", Payload, Receipt(True, "", 1), self.ticket(), lambda: None, dict, fails)
        return Sent(self.ticket().id, self.random.choice(ways), REFUSED)

    # Faults in bytes.

    def cut(self) -> Sent:
        data = self.data(compress=self.random.random() < 0.3)
        return self.sent(bytes(data[: self.random.randrange(len(data))]), REFUSED)

    def altered(self) -> Sent:
        data = self.data(compress=self.random.random() < 0.3)
        header = self.random.random() < 0.7
        most = 8 + int.from_bytes(data[:8], "little") if header else len(data)
        for _ in range(self.random.randint(1, 4)):
            data[self.random.randrange(most)] ^= 1 << self.random.randrange(8)
        return self.sent(bytes(data), EITHER)

    def forged(self) -> Sent:
        data = self.data(compress=self.random.random() < 0.3)
        length = int.from_bytes(data[:8], "little")
        lines = json.loads(data[8 : 8 + length])
        value = self.random.choice(
            (
                None,
                True,
                -1,
                2**80,
                1e400,
                "",
                "F32",
                "tensor",
                [],
                {},
                [0, 8],
                [2**62] * 3,
                {"a": {"a": {}}},
                "\0\ud800",
            )
        )
        inner = self.random.random()
        if inner < 0.4:
            lines["__metadata__"][self.random.choice([*lines["__metadata__"], "more"])] = value
        elif inner < 0.8:
            line = lines[self.random.choice([name for name in lines if name != "__metadata__"])]
            line[self.random.choice([*line, "more"])] = value
        else:
            lines[self.random.choice([*lines, "more"])] = value
        return self.sent(with_length(json.dumps(lines).encode()) + data[8 + length :], EITHER)

    def sizes(self) -> Sent:
        data = self.data()
        length = int.from_bytes(data[:8], "little")
        if self.random.random() < 0.3:
            data[:8] = self.random.choice((2**63, 2**40, 2**64 - 1, len(data), len(data) - 8)).to_bytes(8, "little")
            return self.sent(bytes(data), REFUSED)
        lines = json.loads(data[8 : 8 + length])
        line = lines[self.random.choice([name for name in lines if name != "__metadata__"])]
        huge = self.random.choice((2**40, 2**61, 2**63, 10**30))
        line["shape"] = self.random.choice(([huge], [1, huge], [huge, 0], [2**31, 2**31]))
        if self.random.random() < 0.5:
            line["data_offsets"] = [0, self.random.choice((huge, 4 * huge))]
        return self.sent(with_length(json.dumps(lines).encode()) + data[8 + length :], REFUSED)

    def bombs(self) -> Sent:
        """Return a message with few bytes that expand to many bytes, or that declare a huge size."""
        ticket = self.ticket()
        told = self.random.choice((4 * 10**5, 4 * 10**6, 4 * 10**9, 4 * 10**12))
        zeros = zstandard.ZstdCompressor(1).compress(bytes(4 * 10**6))
        if self.random.random() < 0.5:
            zeros = zeros.ljust(told // 99 if told < 10**8 else len(zeros), b"\0")
        tree = json.loads(framed_header(self.data()))["__metadata__"]["tree"].replace("points", "memory", 1)
        lines = {
            "__metadata__": {
                "format": tensor_file.FORMAT,
                "version": tensor_file.VERSION,
                "kind": "payload",
                "ticket": ticket.id,
                "tree": tree,
                "coded": json.dumps({"points": ["float32", [1, told // 4], True]}),
            },
            "points": {"dtype": "U8", "shape": [len(zeros)], "data_offsets": [0, len(zeros)]},
        }
        return self.sent(with_length(json.dumps(lines).encode()) + zeros, REFUSED)

    def noise(self) -> Sent:
        data = self.random.randbytes(self.random.choice((0, 1, 7, 8, 9, 100, 10_000)))
        return self.sent(with_length(data) if self.random.random() < 0.3 else data, REFUSED)

    def others(self) -> Sent:
        ticket = self.ticket()
        some = (Receipt(True, "", 3), ticket.message, ticket)
        return self.sent(wire.pack(self.random.choice(some), ticket=ticket), REFUSED)

    def headers(self) -> Sent:
        """Return a message whose header would take long to parse."""
        data = self.data()
        length = int.from_bytes(data[:8], "little")
        lines = json.loads(data[8 : 8 + length])
        deep = self.random.choice(
            ("[" * 50_000, "[" * 500 + "]" * 500, json.dumps({"$dict": [[i, 0] for i in range(9999)]}))
        )
        lines["__metadata__"]["tree"] = self.random.choice((deep, "[" + "0," * 10**6 + "0]"))
        return self.sent(with_length(json.dumps(lines).encode()) + data[8 + length :], REFUSED)


def framed_header(data: bytes | bytearray) -> bytes:
    """Return the JSON header of packed bytes."""
    return bytes(data[8 : 8 + int.from_bytes(data[:8], "little")])


class Intake:
    """A host that passes messages to a server and checks the results.

    Args:
        server: the server that receives the messages.
        twin: the second server, which receives the accepted updates.
    """

    def __init__(self, server: Server, twin: Twin) -> None:
        self.server = server
        self.twin = twin
        self.faults: list[str] = []
        self._noting = threading.Lock()
        self.seconds: dict[str, array[float]] = defaultdict(lambda: array("d"))
        self.taken: dict[str, int] = defaultdict(int)

    def hand(self, source: Source, kind: str, sent: Sent) -> None:
        """Pass one message to the server."""
        told = {}
        if isinstance(sent.client, tuple) and sent.client[0] == "client":
            told = {"client": sent.client[1]}
        ticket = sent.ticket
        begun = time.thread_time()
        try:
            if sent.data is not None:
                try:
                    ticket = wire.ticket_of(sent.data)
                except WireError:
                    self._note(kind, begun, taken=False)
                    if sent.expected in (TAKEN, AGAIN):
                        self.faults.append(f"{kind}: could not be read")
                    return
            receipt = self.server.receive(ticket, sent.brought, **told)
        except BaseException as error:
            self.faults.append(f"{kind}: {type(error).__name__}: {error}"[:300])
            return
        self._note(kind, begun, taken=receipt.accepted)
        self._judge(source, kind, sent, ticket, receipt)

    def _note(self, kind: str, begun: float, *, taken: bool) -> None:
        seconds = time.thread_time() - begun
        with self._noting:
            self.seconds[kind].append(seconds)
            self.taken[kind] += taken

    def _judge(self, source: Source, kind: str, sent: Sent, ticket: Any, receipt: Receipt) -> None:
        busy = receipt.reason.startswith("server: busy")
        if receipt.accepted and type(ticket) is str and sent.expected != AGAIN:
            self.twin.brought.setdefault(ticket, sent.brought)
            source.used(ticket, receipt)
        if receipt.reason.startswith(("ticket: expired", "ticket: unknown", "staleness")) and type(ticket) is str:
            source.lost(ticket)
            # The ticket had expired, so a valid message is rejected as well.
            busy = busy or sent.expected == TAKEN
        if sent.expected == AGAIN and repr(receipt) != sent.client[1]:
            self.faults.append(f"{kind}: expected the original receipt, got {receipt}")
        if (sent.expected == TAKEN and not receipt.accepted and not busy) or (
            sent.expected == REFUSED and receipt.accepted
        ):
            self.faults.append(f"{kind}: expected it to be {sent.expected}, got {receipt}")
        if not receipt.accepted and not (
            receipt.reason and len(receipt.reason) < 1000 and receipt.reason.isprintable()
        ):
            self.faults.append(f"{kind}: expected a printable reason, got {receipt.reason[:300]!r}")


class Look:
    """Measurements of memory and open files by number of messages."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, str]] = []
        self.count = 0

    def at(self, messages: int, part: str) -> None:
        """Measure after a further number of messages."""
        self.count += messages
        self.rows.append((self.count, resident(), descriptors(), part))


def flooded(
    part: str, messages: int, look: Look, threads: int = 1, seconds: float = math.inf, **options: Any
) -> Intake:
    """Send messages to a server, compare the server with its twin, and close both servers.

    The function stops after the given number of messages or seconds.
    """
    space = ParameterSpace.of(model())
    clock = Seconds()
    update = replace(LIMITS.update, max_staleness=STALE)
    server = made(
        space,
        clock,
        {
            "update": update,
            "timeout": TIMEOUT,
            "max_in_flight": 1000,
            "max_queued_updates": 2,
        },
        memory=MemoryPolicy(limit=20 * 4 * space.layout.size),
        **options,
    )
    # With the same limit, the twin releases the versions that are too stale at the same time.
    twin = Twin(server, made(space, Seconds(), {"update": update}))
    intake = Intake(server, twin)
    sources = [Source(server, space, seed) for seed in range(threads)]
    # Each client first contributes one update. The weights depend on the tickets of clients without an update, and the
    # twin dispatches these tickets in another order.
    for client in range(CLIENTS):
        ticket = server.dispatch(client)
        twin.brought[ticket.id] = sources[0].payload(ticket)
        server.receive(ticket, twin.brought[ticket.id]).check()
        twin.catch_up()
    sources[0].fill()

    def work(source: Source, count: int) -> None:
        for _ in range(count):
            intake.hand(source, *source.next())

    left = messages
    end = time.perf_counter() + seconds
    while left > 0 and time.perf_counter() < end:
        count = min(ROUND, left)
        if threads == 1:
            work(sources[0], count)
        else:
            # `result` raises the exceptions of the threads.
            with ThreadPoolExecutor(threads) as pool:
                shares = [(count + i) // threads for i in range(threads)]
                done = [pool.submit(work, one, share) for one, share in zip(sources, shares, strict=True)]
            for each in done:
                each.result()
        left -= count
        clock.now += 5.0
        server.expire()
        twin.catch_up()
        look.at(count, part)
    if known(server) != known(twin.own):
        intake.faults.append(f"{part}: the state differs from that of a server that received only the valid messages")
    server.close()
    if "durability" in options:
        del server
        path = options["durability"].checkpoint.path
        back = Server.resume(
            path,
            space,
            MasFL(),
            averaging=SWA(space, cycle=3),
            clock=clock.__call__,
            durability=Durability(journal=options["durability"].journal),
        )
        if known(back) != known(twin.own):
            intake.faults.append(f"{part}: the state of the resumed server differs")
        back.close()
    # Without this, the memory of both servers would count for the next part.
    del intake.server, intake.twin
    return intake


def main() -> None:
    """Print the table, write the results and the plot, and fail if there is a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=float, default=1e6)
    parser.add_argument("--seconds", type=float, default=math.inf, help="the maximum duration in seconds")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    count = int(options.messages)
    before = descriptors()
    look = Look()
    intakes = {}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        files = {
            "durability": Durability(
                CheckpointPolicy(Path(folder) / "server", every_updates=1000),
                Journal(Path(folder) / "journal", "batch"),
            )
        }
        for part, share, more in (
            ("in turns", 0.5, {}),
            ("four threads", 0.25, {"threads": 4}),
            ("journal", 0.25, files),
        ):
            intakes[part] = flooded(part, int(share * count), look, seconds=share * options.seconds, **more)
            gc.collect()
    whole = time.perf_counter() - began
    faults = [fault for intake in intakes.values() for fault in intake.faults]
    warm = [size for at, size, _, _ in look.rows if at >= look.count / 20]
    grew = max(warm) - warm[0]
    left = descriptors() - before
    head = f"floods of messages, P = 990; torch {torch.__version__}, {machine()}"
    lines = [
        head,
        f"{look.count} messages in {whole:.0f} s including their construction; "
        f"resident memory {megabytes(warm[0]):.0f} MB after a twentieth, "
        f"growth {megabytes(grew):.1f} MB of at most {megabytes(BOUND):.0f}; {left} more open files",
        "",
        "kind                       sent accepted   median us  quartiles        a second",
    ]
    rows = []
    first = intakes["in turns"]
    for kind in sorted(set().union(*(intake.seconds for intake in intakes.values()))):
        came = sum(len(intake.seconds[kind]) for intake in intakes.values())
        taken = sum(intake.taken[kind] for intake in intakes.values())
        alone = [1e6 * second for second in first.seconds[kind]]
        low, middle, high = statistics.quantiles(alone, n=4) if len(alone) > 1 else 3 * [math.nan]
        rows.append({"kind": kind, "came": came, "taken": taken, "median": middle, "quartiles": [low, high]})
        mean = statistics.fmean(alone) if alone else math.nan
        lines.append(f"{kind:<22} {came:>8} {taken:>8} {middle:>11.0f}  {low:>5.0f} - {high:<8.0f} {1e6 / mean:>9.0f}")
    lines += ["", "part              messages per processor second"]
    for part, intake in intakes.items():
        seconds = [second for kind in intake.seconds.values() for second in kind]
        lines.append(f"{part:<17} {len(seconds) / sum(seconds):>10.0f}")
    lines += ["", f"{len(faults)} faults", *faults[:20]]
    print(*lines, sep="\n")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "load.txt").write_text("\n".join(lines) + "\n")
    told = {"messages": look.count, "machine": platform.platform(), "grew": grew, "files": left}
    (options.out / "load.json").write_text(
        json.dumps({"settings": told, "rows": rows, "faults": faults}, indent=1) + "\n"
    )
    draw(look, warm[0], options.out / "load.png")
    if faults:
        raise SystemExit(f"{len(faults)} faults, the first: {faults[0]}")
    if grew > BOUND:
        raise SystemExit(f"memory grew by {megabytes(grew):.1f} MB")
    if left > FEW:
        raise SystemExit(f"{left} more files are open")


def draw(look: Look, warm: float, path: Path) -> None:
    """Plot the memory over the number of messages, with the bound."""
    figure = new_figure(6.4, 3.6)
    axes = figure.subplots()
    for part, colour in (("in turns", "#0072b2"), ("four threads", "#e69f00"), ("journal", "#009e73")):
        mine = [(at, size) for at, size, _, name in look.rows if name == part]
        axes.plot([at / 1e3 for at, _ in mine], [megabytes(size) for _, size in mine], color=colour, label=part)
    axes.axhline(megabytes(warm + BOUND), color="0.4", ls="--", lw=1, label="bound")
    axes.set_ylim(0, 1.1 * megabytes(warm + BOUND))
    axes.set_xlabel("thousands of messages")
    axes.set_ylabel("resident memory, MB")
    axes.legend(loc="lower right", ncols=4, fontsize="small")
    figure.savefig(path)


if __name__ == "__main__":
    main()
