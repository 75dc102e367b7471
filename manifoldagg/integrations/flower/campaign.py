"""A campaign: letters to nodes and their answers, for one run. What they say is the strategy's business."""

import logging
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
from manifoldagg.federated.asking import Asking
from manifoldagg.integrations.flower.metrics import bare
from manifoldagg.integrations.flower.nodes import Nodes

__all__ = ["AT_ONCE", "Campaign", "Exam"]

LOG = logging.getLogger("flwr")
AT_ONCE = 2**28
"""Bytes of replies that are held at a time."""
LOOK = 1.0
"""Seconds between two looks at who is here."""
UNREADABLE = (AssertionError, AttributeError, EOFError, LookupError, TypeError, ValueError)
"""What Flower raises where an answer makes no sense; not where the line is broken."""
Letter: TypeAlias = flwr.app.Message


@dataclass(eq=False)
class _Task:
    """Training, on a ticket: issued at once, but for a node that rests. When it has gone only its id is kept."""

    ticket: Ticket | None = None
    gone: str = ""

    @property
    def id(self) -> str:
        """Of the ticket; empty where there is none yet."""
        return self.ticket.id if self.ticket else self.gone


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
        self._mail: deque[Letter] = deque()
        self._unasked: list[str] = []
        self._idle = False
        self._due: dict[int, _Task | _Question] = {}
        self._asking: Asking | None = None
        self.nodes: Nodes[_Task | _Question] = Nodes()
        self.exams: list[Exam] = []

    def open(self, asking: Callable[[list[int]], Asking]) -> None:
        """See who is here, and ask the first of them."""
        here, _ = self.nodes.meet(self._here())
        self._asking = asking(here)
        self._ask(self._asking.begin(self.nodes.present))

    def close(self) -> None:
        """Nobody trains any more."""
        self._asking = None
        for ticket in self._server.tickets:
            self._server.drop(ticket)

    def examine(self, exam: Exam, letters: Iterable[Letter]) -> None:
        """Let nodes evaluate, each when it is next free."""
        self.exams.append(exam)
        for letter in letters:
            if letter.metadata.dst_node_id in self.nodes.present:
                self.nodes.ask(letter.metadata.dst_node_id, _Question(exam, letter), first=True)
                exam.out += 1

    def concluded(self) -> list[Exam]:
        """The exams that are over, once."""
        now = time.monotonic()
        over = [exam for exam in self.exams if not exam.out or exam.until <= now]
        self.exams = [exam for exam in self.exams if exam not in over]
        return over

    def tasks(self) -> list[tuple[int, Ticket]]:
        """Who is to train now, and on which ticket."""
        found = []
        for node, work in self._due.items():
            if isinstance(work, _Task):
                work.ticket = work.ticket or self._server.dispatch(node)
                found.append((node, work.ticket))
        return found

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
        sent = set(self._grid.push_messages(letters.values())) if letters else set()
        now = time.monotonic()
        for node, work in due.items():
            letter = letters.get(node)
            if letter is None or letter.metadata.message_id not in sent:
                self.nodes.skip(node)
                self.nodes.rest(node, now)
                self._ended(node, work)
            else:
                # What it holds besides is large, and on its way.
                kept = _Task(gone=work.id) if isinstance(work, _Task) else work
                self.nodes.sent(node, letter.metadata.message_id, kept, until=now + letter.metadata.ttl)
        self._due = {}

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
            self._unasked = self.nodes.letters
        most = max(1, AT_ONCE // self._largest)
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
                return [reply for name in names for reply in self._brought([name])]
            LOG.warning("an answer cannot be read: %s", error)
            self.settle(names[0], well=False)
            return []

    def _look(self) -> None:
        """See who has come, gone, or kept its letter for too long."""
        now = time.monotonic()
        for name in self.nodes.overdue(now):
            held = self.nodes.held(name)
            LOG.warning("node %d: has not answered in time", held[0] if held else 0)
            self.settle(name, well=False)
        if now - self._looked < LOOK:
            return
        new, left = self.nodes.meet(self._here())
        for node, works in left.items():
            LOG.info("node %d: has left", node)
            for work in works:
                self._drop(work)
            if self._asking is not None:
                count = sum(isinstance(work, _Task) for work in works)
                self._ask(self._asking.lost(node, count, self.nodes.present))
        for node in new:
            if self._asking is not None:
                self._ask(self._asking.joined(node, self.nodes.present))

    def _here(self) -> list[int]:
        self._looked = time.monotonic()
        return [node for node in self._grid.get_node_ids() if self._takes(node)]

    def _ask(self, nodes: Iterable[int]) -> None:
        now = time.monotonic()
        for node in nodes:
            ticket = None if self.nodes.is_resting(node, now) else self._server.dispatch(node)
            self.nodes.ask(node, _Task(ticket))

    def _ended(self, node: int, work: _Task | _Question, well: bool = False) -> None:
        """A node is done with its work, and somebody else may be asked."""
        if isinstance(work, _Question) or not well:
            self._drop(work)
        if isinstance(work, _Task) and self._asking is not None:
            self._ask(self._asking.answered(node, well, self.nodes.present))

    def _drop(self, work: _Task | _Question) -> None:
        """Nobody waits for this any more."""
        if isinstance(work, _Question):
            work.exam.out -= 1
        elif work.id:
            with suppress(ArgumentError):  # a refusal may have ended it
                self._server.drop(work.id)

    def _is_over(self, work: _Task | _Question) -> bool:
        """Whether what waits for a node is not to be done any more."""
        return self._asking is None if isinstance(work, _Task) else work.exam not in self.exams


def _again(letter: Letter) -> Letter:
    """The same letter, whose time begins now."""
    told = letter.metadata
    return Letter(letter.content, told.dst_node_id, told.message_type, ttl=told.ttl, group_id=told.group_id)
