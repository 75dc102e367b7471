"""A campaign: letters to nodes and their answers, for one run. What they say is the strategy's business."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import flwr.app
from flwr.serverapp import Grid

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Server, Ticket
from manifoldagg.federated.server.client_sampling import Asking, Present
from manifoldagg.integrations.flower.metrics import bare
from manifoldagg.integrations.flower.nodes import Nodes

__all__ = ["AT_ONCE", "Campaign", "Exam"]

LOG = logging.getLogger("flwr")
AT_ONCE = 2**28
"""Bytes of replies that are held at a time."""
LOOK = 1.0
"""Seconds between two looks at who is here."""
GRACE = 60.0
"""Seconds, beside twice its patience, that a letter is valid for Flower."""
BEHIND = 2
"""Rounds whose models a node has still to evaluate, at most: one of them in its hands, as a rule."""
LOST = 10.0
"""Seconds after which a node gets new work whose answer may have been lost."""
UNREADABLE = (AssertionError, AttributeError, EOFError, LookupError, TypeError, ValueError)
"""What Flower raises where an answer makes no sense; not where the line is broken."""
Letter: TypeAlias = flwr.app.Message


class _Task(NamedTuple):
    """Training, on a ticket, of which only the id is kept when it has gone."""

    id: str
    ticket: Ticket | None = None


@dataclass(eq=False)
class Exam:
    """The federated evaluation of a round.

    Args:
        round: whose model it is.
        until: when it is over, whoever has answered.
        out: how many answers are still to come.
        replies: that have come, without arrays.
    """

    round: int
    until: float
    out: int = 0
    replies: list[Letter] = field(default_factory=list)


class _Question(NamedTuple):
    exam: Exam
    letter: Letter


class Campaign:
    """Gives nodes their letters, one at a time, and finds their answers.

    Args:
        grid: of Flower.
        server: issues the tickets.
        largest: bytes of the largest reply that is expected.
        interval: seconds between two looks for answers.
        takes: whether a node may be asked to train.

    Attributes:
        nodes: which of them is free.
        exams: that are not over.
    """

    def __init__(
        self, grid: Grid, server: Server, *, largest: int, interval: float, takes: Callable[[int], bool]
    ) -> None:
        self._grid = grid
        self._server = server
        self._largest = max(largest, 1)
        self._interval = interval
        self._takes = takes
        self._looked = -LOOK
        self._swept = -math.inf
        self._most = AT_ONCE
        self._mail: deque[Letter] = deque()
        self._unasked: list[str] = []
        self._idle = False
        self._due: dict[int, _Task | _Question] = {}
        self._asking: Asking | None = None
        # Those that may be asked: who is here and does not rest.
        self._ready = Present()
        self._resting: set[int] = set()
        self.nodes: Nodes[_Task | _Question] = Nodes()
        self.exams: list[Exam] = []

    def open(self, asking: Callable[[list[int]], Asking]) -> None:
        """See who is here, and ask the first of them."""
        here, _ = self.nodes.meet(self._here())
        self._ready = Present(here)
        self._asking = asking(here)
        self._ask(self._asking.begin(self._ready))

    def close(self) -> None:
        """Nobody trains any more."""
        self._asking = None
        for ticket in self._server.tickets:
            self._server.drop(ticket)

    def examine(self, exam: Exam, letters: Iterable[Letter]) -> None:
        """Let nodes evaluate, each when it is next free; but for those that are rounds behind with it already."""
        self.exams.append(exam)
        for letter in letters:
            node = letter.metadata.dst_node_id
            if node not in self.nodes.present:
                continue
            behind = sum(isinstance(work, _Question) for work in self.nodes.works(node))
            if behind < BEHIND:
                self.nodes.ask(node, _Question(exam, letter), first=True)
                exam.out += 1

    def concluded(self) -> list[Exam]:
        """The exams that are over, once."""
        now = time.monotonic()
        over = [exam for exam in self.exams if not exam.out or exam.until <= now]
        self.exams = [exam for exam in self.exams if exam not in over]
        return over

    def tasks(self) -> list[tuple[int, Ticket]]:
        """Who is to train now, and on which ticket."""
        return [(node, work.ticket) for node, work in self._due.items() if isinstance(work, _Task) and work.ticket]

    def send(self, configure: Callable[[], Iterable[Letter]]) -> None:
        """Send what is due; `configure` makes the letters of `tasks`. Who gets none of them fails."""
        due = dict(self.nodes.due(time.monotonic()))
        for node in [node for node, work in due.items() if self._is_over(work)]:
            self.nodes.skip(node)
            del due[node]
        self._due = due
        letters = {node: _again(work.letter) for node, work in due.items() if isinstance(work, _Question)}
        if len(letters) < len(due):
            made = {letter.metadata.dst_node_id: letter for letter in configure()}
            letters |= {node: letter for node, letter in made.items() if isinstance(due.get(node), _Task)}
        patience = {node: letter.metadata.ttl for node, letter in letters.items()}
        for sealed in letters.values():
            # An answer that came in time is Flower's to keep while this side is busy with something else.
            sealed.metadata.ttl += sealed.metadata.ttl + GRACE
        sent = set(self._grid.push_messages(letters.values())) if letters else set()
        now = time.monotonic()
        unsent = []
        for node, work in due.items():
            letter = letters.get(node)
            if letter is None or letter.metadata.message_id not in sent:
                self.nodes.skip(node)
                self.nodes.rest(node, now)
                unsent.append((node, work))
            else:
                # What it holds besides is large, and on its way.
                kept = _Task(work.id) if isinstance(work, _Task) else work
                self.nodes.sent(node, letter.metadata.message_id, kept, until=now + patience[node])
        self._due = {}
        # Last of all: others may be asked for them, and what is next for a node is not what was due any more.
        for node, work in unsent:
            self._ended(node, work)

    def ticket(self, name: str) -> str | None:
        """The id of the ticket that a letter has brought to its node; `None` where none waits for its answer."""
        held = self.nodes.held(name)
        return held[1].id if held is not None and isinstance(held[1], _Task) else None

    def answer(self) -> Letter | None:
        """The next answer to a task, which `settle` follows. `None`: none has come yet."""
        if not self._mail:
            self._pull()
        if not self._mail:
            return None
        reply = self._mail.popleft()
        name = reply.metadata.reply_to_message_id
        held = self.nodes.held(name)
        if held is None:
            return None
        node, work = held
        well = reply.has_content()
        if not well:
            LOG.warning("node %d: %s", node, reply.error.reason)
        if isinstance(work, _Task) and self._asking is not None:
            return reply
        if isinstance(work, _Question):
            if well:
                reply.content = bare(reply.content)
            work.exam.replies.append(reply)
        self.settle(name, well=well)
        return None

    def settle(self, name: str, *, well: bool) -> None:
        """A letter was answered, well or not; once."""
        if self.nodes.held(name) is not None:
            node, work = self.nodes.answered(name, time.monotonic(), well=well)
            self._ended(node, work, well)

    def _pull(self) -> None:
        """See what came, for so many letters that their answers are not too large; between two looks at all, wait."""
        if not self._unasked:
            if self._idle:
                time.sleep(self._interval)
            self._idle = True
            self._look()
            self._swept = time.monotonic()
            self._unasked = self.nodes.letters
        most = max(1, self._most // self._largest)
        some, self._unasked = self._unasked[:most], self._unasked[most:]
        for reply in self._brought(some):
            self._idle = False
            self._mail.append(reply)
            if reply.has_content():
                records = reply.content.array_records.values()
                self._largest = max(self._largest, sum(len(x.data) for record in records for x in record.values()))

    def _brought(self, names: list[str]) -> list[Letter]:
        """The answers to these letters, as far as there are any."""
        try:
            return list(self._grid.pull_messages(names)) if names else []
        except UNREADABLE as error:
            # One of them is expired, or junk on which Flower stumbles.
            if len(names) > 1:
                # What it has handed out with it may be lost: these nodes get new work soon. From now on one by one.
                self._most = 1
                brought = [reply for name in names for reply in self._brought([name])]
                for name in set(names).difference(reply.metadata.reply_to_message_id for reply in brought):
                    self.nodes.hurry(name, time.monotonic() + LOST)
                return brought
            LOG.warning("an answer cannot be read: %s", error)
            self.settle(names[0], well=False)
            return []

    def _look(self) -> None:
        """See who has come, gone, or kept its letter for too long."""
        # Who had answered by the end of its time has been found by a look at all that began after it.
        for name in self.nodes.overdue(self._swept):
            held = self.nodes.held(name)
            LOG.warning("node %d: has not answered in time", held[0] if held else 0)
            self.settle(name, well=False)
        now = time.monotonic()
        self._join([node for node in sorted(self._resting) if not self.nodes.is_resting(node, now)])
        if now - self._looked < LOOK:
            return
        new, left = self.nodes.meet(self._here())
        for node, works in left.items():
            LOG.info("node %d: has left", node)
            self._ready.discard(node)
            self._resting.discard(node)
            for work in works:
                self._drop(work)
            if self._asking is not None:
                count = sum(isinstance(work, _Task) for work in works)
                self._ask(self._asking.lost(node, count, self._ready))
        self._join(new)

    def _join(self, nodes: list[int]) -> None:
        """These may be asked from now on."""
        self._resting.difference_update(nodes)
        for node in nodes:
            self._ready.add(node)
        for node in nodes:
            if self._asking is not None:
                self._ask(self._asking.joined(node, self._ready))

    def _here(self) -> list[int]:
        self._looked = time.monotonic()
        return [node for node in self._grid.get_node_ids() if self._takes(node)]

    def _ask(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            ticket = self._server.dispatch(node)
            self.nodes.ask(node, _Task(ticket.id, ticket))

    def _ended(self, node: int, work: _Task | _Question, well: bool = False) -> None:
        """A node is done with its work, and somebody else may be asked."""
        if isinstance(work, _Question) or not well:
            self._drop(work)
        if not well:
            self._ready.discard(node)
            self._resting.add(node)
        if isinstance(work, _Task) and self._asking is not None:
            self._ask(self._asking.answered(node, well, self._ready))

    def _drop(self, work: _Task | _Question) -> None:
        """Nobody waits for this any more."""
        if isinstance(work, _Question):
            work.exam.out -= 1
        else:
            with suppress(ArgumentError):  # a refusal may have ended it
                self._server.drop(work.id)

    def _is_over(self, work: _Task | _Question) -> bool:
        """Whether what waits for a node is not to be done any more."""
        return self._asking is None if isinstance(work, _Task) else work.exam not in self.exams


def _again(letter: Letter) -> Letter:
    """The same letter, whose time begins now."""
    told = letter.metadata
    return Letter(letter.content, told.dst_node_id, told.message_type, ttl=told.ttl, group_id=told.group_id)
